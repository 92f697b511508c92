//! The environment of a process as a value, and who read what in it.

use std::cell::RefCell;
use std::collections::BTreeMap;

use kolo_core::{Error, Result};

/// Variables by name, and the name of the host. What is empty is not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    variables: BTreeMap<String, String>,
    host_name: String,
}

impl Environment {
    /// These variables, on a host without a name.
    pub fn new<N: Into<String>, V: Into<String>>(variables: impl IntoIterator<Item = (N, V)>) -> Environment {
        let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into()));
        Environment {
            variables: variables.filter(|(_, value)| !value.trim().is_empty()).collect(),
            ..Environment::default()
        }
    }

    /// The environment of this process. What is not UTF-8 is nothing that a launcher sets, and left out.
    pub fn own() -> Environment {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        let host_name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Environment::new(std::env::vars_os().filter_map(text)).on_host(host_name.trim())
    }

    /// The same on a host of this name.
    pub fn on_host(self, name: &str) -> Environment {
        Environment { host_name: name.to_owned(), ..self }
    }

    /// The same without a variable.
    pub fn without(&self, name: &str) -> Environment {
        let mut other = self.clone();
        other.variables.remove(name);
        other
    }

    /// A variable, if it is set.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    pub(super) fn host_name(&self) -> &str {
        &self.host_name
    }
}

/// Reads an environment, and remembers what was there.
pub(super) struct Reader<'a> {
    environment: &'a Environment,
    read: RefCell<Vec<&'static str>>,
}

impl<'a> Reader<'a> {
    pub fn new(environment: &'a Environment) -> Reader<'a> {
        Reader { environment, read: RefCell::default() }
    }

    pub fn get(&self, name: &'static str) -> Option<&'a str> {
        let value = self.environment.get(name)?;
        let mut read = self.read.borrow_mut();
        if !read.contains(&name) {
            read.push(name);
        }
        Some(value)
    }

    /// The first of these that is set, with its name.
    pub fn first(&self, names: &[&'static str]) -> Option<(&'static str, &'a str)> {
        names.iter().find_map(|name| Some((*name, self.get(name)?)))
    }

    /// A number, if it is set. An error if it is none.
    pub fn number(&self, name: &'static str) -> Result<Option<usize>> {
        self.get(name).map(|text| parse(name, text)).transpose()
    }

    /// A number that `who` always sets, who is known by the variable `by`.
    pub fn required(&self, name: &'static str, by: &str, who: &str) -> Result<usize> {
        let missing = || {
            Error::invalid_argument(format!(
                "{by} is set, as by {who}, and {name} is not; start all processes with one command of that launcher, or unset {by}"
            ))
        };
        self.number(name)?.ok_or_else(missing)
    }

    /// A port, if it is set.
    pub fn port(&self, name: &'static str) -> Result<Option<u16>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let port: usize = parse(name, text)?;
        u16::try_from(port).ok().filter(|port| *port > 0).map(Some).ok_or_else(|| {
            Error::invalid_argument(format!(
                "{name}={text} is no port: those are 1 to 65535, and all processes need the same"
            ))
        })
    }

    pub fn host_name(&self) -> &'a str {
        self.environment.host_name()
    }

    /// What was read, in the order in which it was.
    pub fn read(&self) -> Vec<(String, String)> {
        let value = |name: &str| self.environment.get(name).unwrap_or_default().to_owned();
        self.read.borrow().iter().map(|name| ((*name).to_owned(), value(name))).collect()
    }
}

pub(super) fn parse(name: &str, text: &str) -> Result<usize> {
    // `parse` would accept a sign.
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse()
        .ok()
        .filter(|_| is_number)
        .ok_or_else(|| Error::invalid_argument(format!("{name}='{text}' is not a number")))
}

/// `host:port`; an IPv6 address needs brackets.
pub(super) fn address(host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}
