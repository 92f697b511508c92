//! `a:4,b:4`: hosts, and how many processes each runs.

use std::collections::BTreeSet;

use crate::{Error, Result};

/// This machine, which needs no agent.
pub const LOCAL: &str = "localhost";

/// A host and its processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSlots {
    pub name: String,
    pub slots: usize,
}

/// Reads `--hosts`.
pub fn parse(text: &str) -> Result<Vec<HostSlots>> {
    let one = |item: &str| {
        let wrong =
            |why: &str| Error::invalid_argument(format!("--hosts '{text}': '{item}' {why}; write HOST:N,HOST:N"));
        let (name, slots) = item.trim().rsplit_once(':').unwrap_or((item.trim(), "1"));
        let is_name =
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        // A name that begins so would be a flag of ssh.
        if !is_name || name.starts_with('-') {
            return Err(wrong("has no name of a host before its number"));
        }
        let slots = slots.parse().ok().filter(|slots| (1..=super::MOST).contains(slots));
        Ok(HostSlots { name: name.to_owned(), slots: slots.ok_or_else(|| wrong("has no number of processes"))? })
    };
    let hosts = text.split(',').map(one).collect::<Result<Vec<_>>>()?;
    let mut known = BTreeSet::new();
    match hosts.iter().find(|host| !known.insert(&host.name)) {
        Some(twice) => {
            Err(Error::invalid_argument(format!("--hosts '{text}': {} is there twice; add its numbers", twice.name)))
        }
        None => Ok(hosts),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_names_and_numbers() {
        let host = |name: &str, slots| HostSlots { name: name.to_owned(), slots };
        assert_eq!(parse("a:4, b.example:2,c").unwrap(), [host("a", 4), host("b.example", 2), host("c", 1)]);
        for (text, why) in [
            ("", "no name"),
            ("a:4,,b:1", "no name"),
            ("-oProxyCommand=x:1", "no name"),
            ("a b:1", "no name"),
            ("a:0", "no number"),
            ("a:x", "no number"),
            ("a:99999", "no number"),
            ("a:1,a:2", "a is there twice"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
