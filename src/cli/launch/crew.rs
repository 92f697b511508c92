//! The processes of one host: started and signalled here, or by an agent there.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::group::{Ending, Event, Key, ProcessGroup};
use super::guard::Guard;
use crate::agents::Line;
use crate::{Error, Result};

/// What an agent's environment has, and its processes need not know.
pub const JOIN_TOKEN: &str = "KOLO_JOIN_TOKEN";

/// The processes of one host.
pub enum Crew {
    Here(Local),
    There(Line),
}

impl Crew {
    /// Starts a process. Its end, if that failed at once.
    pub fn start(
        &mut self,
        key: Key,
        program: &[String],
        variables: &BTreeMap<&'static str, String>,
    ) -> Option<Ending> {
        match self {
            Crew::Here(local) => {
                let variables = variables.iter().map(|(name, text)| ((*name).to_owned(), text.clone()));
                local.start(key, program, variables, None)
            }
            Crew::There(line) => {
                let folder = std::env::current_dir().unwrap_or_default();
                line.say(&json!({ "start": {
                    "rank": key.rank, "attempt": key.attempt, "program": program, "variables": variables,
                    "folder": folder.to_string_lossy(),
                }}));
                None
            }
        }
    }

    /// Sends a signal to a process and all that it has started.
    pub fn signal(&mut self, rank: usize, signal: Signal) {
        match self {
            Crew::Here(local) => local.signal(rank, signal),
            Crew::There(line) => {
                line.say(&json!({ "signal": { "rank": rank, "number": signal.as_raw() } }));
            }
        }
    }

    /// Free ports of this host. Those of another one come as an event.
    pub fn ask_for_ports(&mut self, n: usize) -> Result<Option<Vec<u16>>> {
        match self {
            Crew::Here(_) => free_ports(n).map(Some),
            Crew::There(line) => {
                line.say(&json!({ "ports": n }));
                Ok(None)
            }
        }
    }
}

/// Processes of this host.
pub struct Local {
    processes: BTreeMap<usize, ProcessGroup>,
    events: SyncSender<Event>,
    guard: Arc<Guard>,
}

impl Local {
    pub fn new(events: SyncSender<Event>) -> Result<Local> {
        Ok(Local { processes: BTreeMap::new(), events, guard: Arc::new(Guard::start()?) })
    }

    /// Starts a process in a folder, if there is one of that name. Its end, if that failed at once.
    pub fn start(
        &mut self,
        key: Key,
        program: &[String],
        variables: impl IntoIterator<Item = (String, String)>,
        folder: Option<&Path>,
    ) -> Option<Ending> {
        let Some((name, arguments)) = program.split_first() else {
            return Some(Ending::Never("there is no program".to_owned()));
        };
        let mut command = Command::new(name);
        command.args(arguments).env_remove(JOIN_TOKEN).envs(variables);
        if let Some(folder) = folder.filter(|folder| folder.is_dir()) {
            command.current_dir(folder);
        }
        // One that is being replaced has ended.
        self.processes.remove(&key.rank);
        match ProcessGroup::start(command, key, self.events.clone(), self.guard.clone()) {
            Ok(group) => {
                self.processes.insert(key.rank, group);
                None
            }
            Err(error) => Some(Ending::Never(error.message().to_owned())),
        }
    }

    pub fn signal(&self, rank: usize, signal: Signal) {
        if let Some(group) = self.processes.get(&rank) {
            group.signal(signal);
        }
    }

    pub fn signal_all(&self, signal: Signal) {
        self.processes.values().for_each(|group| group.signal(signal));
    }
}

/// Ports that were free a moment ago, on all addresses of this host.
pub fn free_ports(n: usize) -> Result<Vec<u16>> {
    let bound = (0..n)
        .map(|_| TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), 0)))
        .collect::<std::io::Result<Vec<_>>>();
    let ports = bound.and_then(|all| all.iter().map(|one| Ok(one.local_addr()?.port())).collect());
    ports.map_err(|error| Error::unavailable(format!("no free ports: {error}")))
}

/// An event as an agent tells it.
pub fn event_to_json(event: &Event) -> Value {
    let of = |key: &Key| json!([key.rank, key.attempt]);
    match event {
        Event::Line { key, is_error, text } => json!({ "line": of(key), "error": is_error, "text": text }),
        Event::Ended { key, ending } => match ending {
            Ending::Code(code) => json!({ "ended": of(key), "code": code }),
            Ending::Signal(signal) => json!({ "ended": of(key), "signal": signal }),
            Ending::Never(why) => json!({ "ended": of(key), "why": why }),
        },
        Event::Ports { ports, .. } => json!({ "ports": ports }),
        Event::Lost { why, .. } => json!({ "leaving": why }),
    }
}

/// What the agent of a host has told; `None` if it makes no sense.
pub fn event_from_json(host: usize, message: &Value) -> Option<Event> {
    let key = |value: &Value| {
        let number = |i: usize| value.get(i)?.as_u64();
        Some(Key { rank: usize::try_from(number(0)?).ok()?, attempt: u32::try_from(number(1)?).ok()? })
    };
    let small = |value: &Value| i32::try_from(value.as_i64()?).ok();
    if let Some(line) = message.get("line") {
        let text = message.get("text")?.as_str()?.to_owned();
        return Some(Event::Line { key: key(line)?, is_error: message.get("error")?.as_bool()?, text });
    }
    if let Some(ended) = message.get("ended") {
        let ending = match (message.get("code"), message.get("signal"), message.get("why")) {
            (Some(code), ..) => Ending::Code(small(code)?),
            (_, Some(signal), _) => Ending::Signal(small(signal)?),
            (_, _, Some(why)) => Ending::Never(why.as_str()?.to_owned()),
            (None, None, None) => return None,
        };
        return Some(Event::Ended { key: key(ended)?, ending });
    }
    if let Some(ports) = message.get("ports") {
        let ports: Option<Vec<u16>> = ports.as_array()?.iter().map(|port| u16::try_from(port.as_u64()?).ok()).collect();
        return Some(Event::Ports { host, ports: ports? });
    }
    Some(Event::Lost { host, why: message.get("leaving")?.as_str()?.to_owned() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_they_are_told() {
        let key = Key { rank: 7, attempt: 2 };
        for event in [
            Event::Line { key, is_error: true, text: "\u{fffd}\"x".to_owned() },
            Event::Ended { key, ending: Ending::Code(-1) },
            Event::Ended { key, ending: Ending::Signal(9) },
            Event::Ended { key, ending: Ending::Never("why".to_owned()) },
            Event::Ports { host: 3, ports: vec![1, 65535] },
            Event::Lost { host: 3, why: "asked to".to_owned() },
        ] {
            assert_eq!(event_from_json(3, &event_to_json(&event)), Some(event));
        }
        for wrong in
            [json!({}), json!(3), json!({ "ended": [1, 2] }), json!({ "line": [1] }), json!({ "ports": [70000] })]
        {
            assert_eq!(event_from_json(0, &wrong), None, "{wrong}");
        }
    }
}
