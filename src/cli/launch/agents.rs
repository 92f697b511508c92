//! Brings together the hosts of a launch: this one, and those whose agents join.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::{Duration, Instant};

use serde_json::json;

use super::crew::{Crew, JOIN_TOKEN, Local, event_from_json};
use super::group::{Event, MOST_EVENTS};
use super::hosts::LOCAL;
use super::watch::StopSignals;
use super::{Args, Plan};
use crate::agents::{Arrival, Heard, Line, Lobby};
use crate::{Error, Result};

/// How long an agent has to say its name.
const HELLO: Duration = Duration::from_secs(5);

/// How long agents have to read that it is over, and to end.
const FAREWELL: Duration = Duration::from_secs(12);

/// All hosts of a launch.
pub struct Crews {
    pub crews: Vec<Crew>,
    /// Where processes of other hosts reach those of each.
    pub addresses: Vec<String>,
    pub events: Receiver<Event>,
    /// The connections to agents, and the programs that have started those.
    farewell: Vec<Line>,
    _starters: Vec<Starter>,
    _lobby: Option<Lobby>,
}

impl Drop for Crews {
    fn drop(&mut self) {
        let n_told = self.farewell.iter().filter(|line| line.say(&json!({ "bye": true }))).count();
        // They hang up when what they run has ended.
        let (mut n_gone, deadline) = (0, Instant::now() + FAREWELL);
        while n_gone < n_told {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Lost { .. }) => n_gone += 1,
                Ok(_) => {}
                Err(_) => break,
            }
        }
    }
}

/// Prepares all hosts of a plan, and waits for agents.
pub fn gather(args: &Args, plan: &Plan, patience: Duration, stop: &StopSignals) -> Result<Crews> {
    let (sender, events) = mpsc::sync_channel(MOST_EVENTS);
    let remote: Vec<&str> = plan.hosts.iter().map(|host| host.name.as_str()).filter(|name| *name != LOCAL).collect();
    let mut all = Crews {
        crews: Vec::new(),
        addresses: vec![Ipv4Addr::LOCALHOST.to_string()],
        events,
        farewell: Vec::new(),
        _starters: Vec::new(),
        _lobby: None,
    };
    if remote.is_empty() {
        all.crews.push(Crew::Here(Local::new(sender)?));
        return Ok(all);
    }
    let listen = match args.listen {
        Some(address) => address,
        None => SocketAddr::new(address_towards(remote[0])?, 0),
    };
    let lobby = Lobby::open(listen)?;
    let address = match lobby.address().ip().is_unspecified() {
        true => SocketAddr::new(address_towards(remote[0])?, lobby.address().port()),
        false => lobby.address(),
    };
    invite(args, &remote, &lobby, address, &mut all._starters)?;
    let mut joined = wait(&remote, &lobby, patience, stop, &mut all._starters)?;
    let has_far = joined.iter().any(|(_, arrival)| !arrival.address.ip().is_loopback());
    all.addresses.clear();
    for (i, host) in plan.hosts.iter().enumerate() {
        let Some(at) = joined.iter().position(|(name, _)| *name == host.name) else {
            all.crews.push(Crew::Here(Local::new(sender.clone())?));
            all.addresses.push(if has_far { address.ip() } else { Ipv4Addr::LOCALHOST.into() }.to_string());
            continue;
        };
        let (_, arrival) = joined.swap_remove(at);
        let ip = arrival.address.ip().to_canonical();
        // One that runs beside this launcher is elsewhere for those of other hosts.
        all.addresses.push(if has_far && ip.is_loopback() { host.name.clone() } else { ip.to_string() });
        all.crews.push(Crew::There(arrival.line.clone()));
        all.farewell.push(arrival.line);
        pass_on(i, arrival.heard, sender.clone())?;
    }
    all._lobby = Some(lobby);
    Ok(all)
}

/// Tells people, or ssh, how agents are started.
fn invite(args: &Args, remote: &[&str], lobby: &Lobby, address: SocketAddr, starters: &mut Vec<Starter>) -> Result<()> {
    let token = lobby.token().text();
    if let Some(path) = &args.join_token_file {
        let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        file.and_then(|mut file| writeln!(file, "{token}")).map_err(|error| {
            Error::failed_precondition(format!("--join-token-file '{}' cannot be written: {error}", path.display()))
        })?;
    }
    if let Some(program) = &args.ssh {
        for host in remote {
            let mut command = Command::new(program);
            command.arg(host).arg(&args.remote_kolo).args([
                "agent",
                "--join",
                &address.to_string(),
                "--name",
                host,
                "--token-stdin",
            ]);
            starters.push(Starter::start(host, command, &token)?);
        }
        return Ok(());
    }
    let token = match &args.join_token_file {
        Some(path) => format!("--token-file {}", path.display()),
        None => String::new(),
    };
    let variable = if token.is_empty() { format!("{JOIN_TOKEN}={} ", lobby.token().text()) } else { String::new() };
    eprintln!("kolo: waiting for an agent on each of {}; start there, with its name:", remote.join(", "));
    eprintln!("  {variable}kolo agent --join {address} --name {} {token}", remote[0]);
    Ok(())
}

/// Waits until the agents of all hosts have joined.
fn wait<'a>(
    remote: &[&'a str],
    lobby: &Lobby,
    patience: Duration,
    stop: &StopSignals,
    starters: &mut [Starter],
) -> Result<Vec<(&'a str, Arrival)>> {
    let deadline = Instant::now() + patience;
    let mut joined: Vec<(&str, Arrival)> = Vec::new();
    while joined.len() < remote.len() {
        let missing = || {
            let missing: Vec<&str> =
                remote.iter().copied().filter(|name| !joined.iter().any(|(known, _)| known == name)).collect();
            missing.join(", ")
        };
        if stop.count() > 0 {
            return Err(Error::new(crate::Code::Cancelled, "stopped while agents were waited for"));
        }
        for starter in starters.iter_mut().filter(|starter| missing().split(", ").any(|name| name == starter.host)) {
            if let Ok(Some(status)) = starter.child.try_wait() {
                return Err(Error::unavailable(format!("the agent on {} was not started: {status}", starter.host)));
            }
        }
        if Instant::now() >= deadline {
            return Err(Error::deadline_exceeded(format!(
                "no agent has joined from {} in {:.0} s; is `kolo agent --join {} --name ..` running there, and can it reach this address?",
                missing(),
                patience.as_secs_f64(),
                lobby.address()
            )));
        }
        let Some(arrival) = lobby.next(Duration::from_millis(100)) else { continue };
        let name = match arrival.heard.recv_timeout(HELLO) {
            Ok(Heard::Message(message)) => message["hello"].as_str().unwrap_or_default().to_owned(),
            _ => continue,
        };
        match remote.iter().find(|known| **known == name) {
            Some(host) if !joined.iter().any(|(known, _)| known == host) => {
                eprintln!("kolo: {host} has joined, from {}", arrival.address);
                joined.push((host, arrival));
            }
            known => {
                let why = match known {
                    Some(_) => format!("an agent of the name {name} has joined already"),
                    None => format!("'{name}' is none of --hosts: {}; give --name", remote.join(", ")),
                };
                eprintln!("kolo: an agent from {} was sent away: {why}", arrival.address);
                arrival.line.say(&json!({ "refused": why }));
            }
        }
    }
    Ok(joined)
}

/// Makes events of what an agent says.
fn pass_on(host: usize, heard: Receiver<Heard>, events: SyncSender<Event>) -> Result<()> {
    let pass = move || {
        while let Ok(heard) = heard.recv() {
            let event = match heard {
                Heard::Message(message) => event_from_json(host, &message),
                Heard::Gone(why) => Some(Event::Lost { host, why }),
            };
            let event =
                event.unwrap_or_else(|| Event::Lost { host, why: "it said something that no agent says".to_owned() });
            if events.send(event).is_err() {
                return;
            }
        }
    };
    let started = std::thread::Builder::new().name("kolo-agent".to_owned()).spawn(pass);
    started.map(drop).map_err(|error| Error::resource_exhausted(format!("no thread: {error}")))
}

/// The address of this machine from which a host is reached. Nothing is sent.
fn address_towards(host: &str) -> Result<IpAddr> {
    let found = (host, 9).to_socket_addrs().ok().and_then(|mut found| found.next());
    let own = found.and_then(|to| {
        let any: IpAddr =
            if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { std::net::Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip())
    });
    own.ok_or_else(|| {
        Error::invalid_argument(format!(
            "--hosts: {host} is no name or address that this machine knows, so it does not know at which of its own addresses agents \
             reach it; give --listen ADDRESS:0"
        ))
    })
}

/// A program such as ssh that runs an agent elsewhere; it ends when its standard input does.
struct Starter {
    host: String,
    child: Child,
}

impl Starter {
    fn start(host: &str, mut command: Command, token: &str) -> Result<Starter> {
        let program = command.get_program().to_string_lossy().into_owned();
        // A terminal's Ctrl-C is for the launcher.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let spawned = command.spawn();
        let mut child = spawned
            .map_err(|error| Error::failed_precondition(format!("--ssh: '{program}' cannot be run: {error}")))?;
        if let Some(stdin) = &mut child.stdin {
            // If it has ended, it is missed below. Other users can read arguments, so the token is none.
            let _ = writeln!(stdin, "{token}");
        }
        Ok(Starter { host: host.to_owned(), child })
    }
}

impl Drop for Starter {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let asked = Instant::now();
        while asked.elapsed() < Duration::from_secs(5) {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(20)),
                _ => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
