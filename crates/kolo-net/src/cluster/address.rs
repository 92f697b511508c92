//! `host:port`, checked by form: an IPv4 address, an IPv6 address in brackets, or a name.

use std::net::{Ipv4Addr, Ipv6Addr};

use kolo_core::{Error, Result};

/// A host and a port.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Address<'a> {
    host: &'a str,
    /// 0 lets the server choose.
    pub(super) port: u16,
}

impl Address<'_> {
    /// A normal form, equal for different spellings of an address.
    pub(super) fn canonical(&self) -> String {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let host = match host.parse::<Ipv6Addr>() {
            Ok(v6) => v6.to_string(),
            Err(_) => host.to_ascii_lowercase(),
        };
        format!("{host}:{}", self.port)
    }
}

pub(super) fn parse(text: &str) -> Result<Address<'_>> {
    let bad = |why: &str| Err(Error::invalid_argument(format!("'{text}' is not host:port: {why}")));
    if text.is_empty() {
        return bad("it is empty");
    }
    if let Some((scheme, rest)) = text.split_once("://") {
        return bad(&format!("leave out '{scheme}://' and write {rest}"));
    }
    if let Some(strange) = text.chars().find(|c| c.is_whitespace() || c.is_control()) {
        return bad(&format!("it holds {strange:?}; is a comma missing?"));
    }
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => {
            if host.parse::<Ipv6Addr>().is_err() {
                return bad("what is in brackets is not an IPv6 address");
            }
            match rest.strip_prefix(':') {
                Some(port) if !port.contains(':') => (&text[..host.len() + 2], port),
                Some(_) => return bad("there is more after the port; is a comma missing between two addresses?"),
                None => return bad("a port must follow the brackets, as in [::1]:2222"),
            }
        }
        None => match text.rsplit_once(':') {
            Some((host, port)) => {
                if host.contains(':') {
                    return bad(&two_colons(text, host, port));
                }
                if let Some(why) = bad_host(host) {
                    return bad(&why);
                }
                (host, port)
            }
            None => return bad("the port is missing"),
        },
    };
    // `parse` would accept a sign.
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return bad(&format!("'{port}' is not a port number"));
    }
    match port.parse() {
        Ok(port) => Ok(Address { host, port }),
        Err(_) => bad(&format!("port {port} is larger than 65535")),
    }
}

/// The likely reason for two colons outside brackets.
fn two_colons(text: &str, host: &str, port: &str) -> String {
    if host.parse::<Ipv6Addr>().is_ok() {
        return format!("an IPv6 address needs brackets: [{host}]:{port}");
    }
    if text.parse::<Ipv6Addr>().is_ok() {
        return format!("an IPv6 address needs brackets and a port: [{text}]:2222");
    }
    // `a:2222b:2222`: a port, then a letter. `a:222210.0.0.1:2222` has no such clear boundary.
    let fused = text.split_once(':').and_then(|(_, rest)| {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let second = &text[text.len() - rest.len() + digits..];
        let clear = digits > 0 && second.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic());
        clear.then(|| (&text[..text.len() - second.len()], second))
    });
    match fused {
        Some((first, second)) => format!(
            "two addresses seem to be fused, '{first}' and '{second}'; a comma is missing between them (in Python, adjacent \
             strings become one)"
        ),
        None => "it has more than one ':'; a comma is likely to be missing between two addresses".to_owned(),
    }
}

fn bad_host(host: &str) -> Option<String> {
    if host.is_empty() {
        return Some("the host is missing".into());
    }
    let numeric = host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if numeric && host.parse::<Ipv4Addr>().is_err() {
        return Some(format!("'{host}' is not an IPv4 address"));
    }
    (!is_host_name(host)).then(|| format!("'{host}' is not a host name"))
}

/// Whether a text has the form of a host's name: labels of letters, digits, `-` and `_`, with dots between them.
pub(crate) fn is_host_name(host: &str) -> bool {
    host.len() <= 253
        && host.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
                && !label.starts_with('-')
                && !label.ends_with('-')
        })
}
