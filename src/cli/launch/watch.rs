//! Who runs, who has failed, and what follows: the others are ended and all started again, or with `--min` only the one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::Plan;
use super::agents::Crews;
use super::group::{Ending, Event, Key};
use super::output::Output;
use super::variables::{Addresses, Seat, of_process};
use crate::cli::signals;
use crate::{Error, Result, tls};

/// A process that failed is started again after this, and after twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// How long hosts take at most to say which ports are free.
const PORTS: Duration = Duration::from_secs(30);

/// How many signals have asked this process to end.
#[derive(Clone)]
pub struct StopSignals(Arc<AtomicUsize>);

impl StopSignals {
    pub fn install() -> StopSignals {
        let stop = StopSignals(Arc::default());
        let own = stop.clone();
        signals::on_stop(move || own.add());
        stop
    }

    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Runs all processes to their end; the exit code.
pub fn run(plan: &Plan, crews: &mut Crews, stop: &StopSignals) -> Result<i32> {
    let mut watch = Watch::new(plan, crews)?;
    loop {
        watch.start_all()?;
        watch.until_all_have_ended(stop);
        let Some(cause) = watch.cause.take() else { return Ok(watch.code()) };
        let may_restart = plan.min.is_none() && !watch.is_stopping && watch.n_restarts < plan.restarts;
        if !may_restart || !watch.lost.iter().all(Option::is_none) {
            watch.report(&cause);
            return Ok(cause.ending.code().max(1));
        }
        watch.n_restarts += 1;
        eprintln!(
            "kolo: starting all {} processes again ({} of {})",
            watch.seats.len(),
            watch.n_restarts,
            plan.restarts
        );
    }
}

/// What a process is doing.
enum State {
    /// It is started again then.
    Waiting(Instant),
    Running,
    Ended(Ending),
}

/// The first failure.
struct Cause {
    process: usize,
    ending: Ending,
}

struct Watch<'a> {
    plan: &'a Plan,
    crews: &'a mut Crews,
    seats: Vec<Seat>,
    /// The host of each process.
    hosts: Vec<usize>,
    keys: Vec<Key>,
    states: Vec<State>,
    /// How often each has been started again by itself.
    n_single_restarts: Vec<u32>,
    addresses: Addresses,
    token: Option<String>,
    output: Output,
    cause: Option<Cause>,
    /// Why nothing comes of a host any more.
    lost: Vec<Option<String>>,
    n_restarts: u32,
    is_stopping: bool,
    /// Somebody has ended well, so nobody is needed any more.
    is_over: bool,
    kill_at: Option<Instant>,
}

impl<'a> Watch<'a> {
    fn new(plan: &'a Plan, crews: &'a mut Crews) -> Result<Watch<'a>> {
        let n: usize = plan.hosts.iter().map(|host| host.slots).sum();
        let (node, n_nodes) = plan.outside.as_ref().map_or((0, plan.hosts.len()), |of| (of.node, of.n_nodes));
        let is_outside = plan.outside.is_some();
        let (first, size) = if is_outside { (node * n, n_nodes * n) } else { (0, n) };
        let (mut seats, mut hosts) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for (i, host) in plan.hosts.iter().enumerate() {
            for local_rank in 0..host.slots {
                let rank = first + seats.len();
                let node = if is_outside { node } else { i };
                seats.push(Seat { rank, size, local_rank, local_size: host.slots, node, n_nodes });
                hosts.push(i);
            }
        }
        let set = std::env::var("KOLO_TOKEN").ok().filter(|token| !token.is_empty());
        // Launchers of other nodes would make another one.
        let token = match set {
            None if !is_outside => Some(tls::random_token()?.secret()),
            set => set,
        };
        Ok(Watch {
            output: Output::new(n, first, size, plan.log_dir.as_deref())?,
            keys: seats.iter().map(|seat| Key { rank: seat.rank, attempt: 0 }).collect(),
            states: seats.iter().map(|_| State::Running).collect(),
            n_single_restarts: vec![0; n],
            lost: vec![None; plan.hosts.len()],
            seats,
            hosts,
            plan,
            crews,
            addresses: Addresses::default(),
            token,
            cause: None,
            n_restarts: 0,
            is_stopping: false,
            is_over: false,
            kill_at: None,
        })
    }

    fn start_all(&mut self) -> Result<()> {
        self.addresses = self.find_addresses()?;
        (self.kill_at, self.is_over) = (None, false);
        for i in 0..self.seats.len() {
            match self.cause {
                None => self.start(i, false)?,
                // One before it could not be started, so the others are not either.
                Some(_) => self.states[i] = State::Ended(Ending::Never("it was not started".to_owned())),
            }
        }
        Ok(())
    }

    fn start(&mut self, i: usize, joins: bool) -> Result<()> {
        self.keys[i].attempt += 1;
        let mut variables = of_process(&self.seats[i], &self.addresses, self.keys[i].attempt - 1, joins)?;
        if let Some(token) = &self.token {
            variables.insert("KOLO_TOKEN", token.clone());
        }
        self.states[i] = State::Running;
        if let Some(ending) = self.crews.crews[self.hosts[i]].start(self.keys[i], &self.plan.program, &variables) {
            self.ended(i, ending);
        }
        Ok(())
    }

    /// New ports for a new start.
    fn find_addresses(&mut self) -> Result<Addresses> {
        if let Some(outside) = &self.plan.outside {
            return Ok(Addresses { master: (outside.host.clone(), outside.port.clone()), ..Addresses::default() });
        }
        let n_hosts = self.plan.hosts.len();
        let (mut ports, deadline) = (vec![None; n_hosts], Instant::now() + PORTS);
        for (i, host) in self.plan.hosts.iter().enumerate() {
            ports[i] = self.crews.crews[i].ask_for_ports(2 * host.slots + 1)?;
        }
        while ports.iter().any(Option::is_none) {
            let name = |i: usize| &self.plan.hosts[i].name;
            match self.crews.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Ports { host, ports: found }) if found.len() > 2 * self.plan.hosts[host].slots => {
                    ports[host] = Some(found);
                }
                Ok(Event::Ports { host, .. }) => {
                    return Err(Error::unavailable(format!("{} has no free ports", name(host))));
                }
                Ok(Event::Lost { host, why }) => {
                    return Err(Error::unavailable(format!("the agent on {} is lost: {why}", name(host))));
                }
                // Of an earlier start.
                Ok(Event::Line { .. } | Event::Ended { .. }) => {}
                Err(_) => {
                    let slow = ports.iter().position(Option::is_none).map_or("", |i| name(i));
                    return Err(Error::deadline_exceeded(format!(
                        "{slow} did not say which ports are free in {PORTS:?}"
                    )));
                }
            }
        }
        let all: Vec<Vec<String>> = ports
            .into_iter()
            .flatten()
            .zip(&self.crews.addresses)
            .map(|(ports, host)| {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                ports.iter().map(|port| format!("{host}:{port}")).collect()
            })
            .collect();
        let take = |which: usize| {
            let of_host = |(host, addresses): (&super::hosts::HostSlots, &Vec<String>)| {
                addresses[1 + which * host.slots..1 + (which + 1) * host.slots].to_vec()
            };
            self.plan.hosts.iter().zip(&all).flat_map(of_host).collect::<Vec<_>>()
        };
        let master = all[0][0].rsplit_once(':').map(|(_, port)| (self.crews.addresses[0].clone(), port.to_owned()));
        let mut addresses = Addresses { master: master.unwrap_or_default(), tasks: take(0), listen: Vec::new() };
        if self.plan.min.is_some() {
            addresses.listen = take(1);
            // Rank 0 listens at its own address from the start.
            let port = addresses.listen[0].rsplit_once(':').map(|(_, port)| port.to_owned());
            addresses.master.1 = port.unwrap_or_default();
        }
        Ok(addresses)
    }

    fn until_all_have_ended(&mut self, stop: &StopSignals) {
        let mut n_signals = 0;
        while !self.states.iter().all(|state| matches!(state, State::Ended(_))) {
            if let Ok(event) = self.crews.events.recv_timeout(Duration::from_millis(20)) {
                self.handle(event);
            }
            if stop.count() > n_signals {
                n_signals = stop.count();
                self.is_stopping = true;
                match n_signals {
                    1 => {
                        eprintln!("kolo: ending all processes; Ctrl-C again kills them");
                        self.end_all();
                    }
                    _ => self.signal_all(Signal::KILL),
                }
            }
            if self.kill_at.is_some_and(|at| at <= Instant::now()) {
                self.kill_at = None;
                eprintln!("kolo: killing those that did not end in {:.1} s", self.plan.grace.as_secs_f64());
                self.signal_all(Signal::KILL);
            }
            for i in 0..self.states.len() {
                if matches!(self.states[i], State::Waiting(at) if at <= Instant::now())
                    && let Err(error) = self.start(i, true)
                {
                    self.states[i] = State::Ended(Ending::Never(error.message().to_owned()));
                }
            }
        }
        // What was said just before the end.
        while let Ok(event) = self.crews.events.try_recv() {
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Line { key, is_error, text } => {
                if let Some(i) = self.seats.iter().position(|seat| seat.rank == key.rank) {
                    self.output.line(i, key.rank, is_error, &text);
                }
            }
            Event::Ended { key, ending } => {
                // A host may tell the end of an earlier start, and an agent may say anything.
                let i = self.keys.iter().position(|known| *known == key);
                if let Some(i) = i.filter(|i| matches!(self.states[*i], State::Running)) {
                    self.ended(i, ending);
                }
            }
            Event::Lost { host, why } => {
                if self.lost[host].is_some() {
                    return;
                }
                let name = &self.plan.hosts[host].name;
                let why = format!("its host is lost (the agent on {name}: {why})");
                self.lost[host] = Some(why.clone());
                for i in (0..self.seats.len()).filter(|i| self.hosts[*i] == host).collect::<Vec<_>>() {
                    if !matches!(self.states[i], State::Ended(_)) {
                        self.ended(i, Ending::Never(why.clone()));
                    }
                }
            }
            // An answer that nobody waits for.
            Event::Ports { .. } => {}
        }
    }

    fn ended(&mut self, i: usize, ending: Ending) {
        let (rank, n) = (self.seats[i].rank, self.seats.len());
        let is_well = ending == Ending::Code(0);
        self.states[i] = State::Ended(ending.clone());
        self.is_over |= is_well && !self.is_stopping;
        if is_well || self.is_stopping || self.cause.is_some() {
            return;
        }
        let Some(min) = self.plan.min else {
            eprintln!("kolo: rank {rank} failed: {ending}; ending the others");
            self.cause = Some(Cause { process: i, ending });
            return self.end_all();
        };
        if self.is_over {
            eprintln!("kolo: rank {rank} failed after others had ended well: {ending}");
            return;
        }
        let n_running = self.states.iter().filter(|state| matches!(state, State::Running)).count();
        if n_running < min {
            eprintln!(
                "kolo: rank {rank} failed: {ending}; {n_running} of {n} are left, fewer than --min {min}, so they are ended"
            );
            self.cause = Some(Cause { process: i, ending });
            return self.end_all();
        }
        if self.n_restarts >= self.plan.restarts || self.lost[self.hosts[i]].is_some() {
            eprintln!("kolo: rank {rank} failed: {ending}; {n_running} others go on without it");
            return;
        }
        self.n_restarts += 1;
        let pause = (FIRST_PAUSE * (1 << self.n_single_restarts[i].min(8))).min(LONGEST_PAUSE);
        self.n_single_restarts[i] += 1;
        eprintln!(
            "kolo: rank {rank} failed: {ending}; {n_running} others go on, and it is started again in {pause:.1?} ({} of {})",
            self.n_restarts, self.plan.restarts
        );
        self.states[i] = State::Waiting(Instant::now() + pause);
    }

    /// Asks all that run to end, and kills them after a while. Nobody is started any more.
    fn end_all(&mut self) {
        self.signal_all(Signal::TERM);
        self.kill_at = Some(Instant::now() + self.plan.grace);
        for state in &mut self.states {
            if matches!(state, State::Waiting(_)) {
                *state = State::Ended(Ending::Never("it was not started again".to_owned()));
            }
        }
    }

    fn signal_all(&mut self, signal: Signal) {
        for i in 0..self.seats.len() {
            if matches!(self.states[i], State::Running) {
                self.crews.crews[self.hosts[i]].signal(self.seats[i].rank, signal);
            }
        }
    }

    /// Where no failure ended the others: 0, or the code of the first that did not end well.
    fn code(&self) -> i32 {
        if self.is_over && self.plan.min.is_some() {
            return 0;
        }
        let codes = self.states.iter().filter_map(|state| match state {
            State::Ended(ending) => Some(ending.code()),
            State::Waiting(_) | State::Running => None,
        });
        codes.into_iter().find(|code| *code != 0).unwrap_or(0)
    }

    fn report(&self, cause: &Cause) {
        let (rank, host) = (self.seats[cause.process].rank, &self.plan.hosts[self.hosts[cause.process]].name);
        let last: Vec<&str> = self.output.last(cause.process).collect();
        let said = if last.is_empty() { "it said nothing" } else { "its last lines:" };
        eprintln!("kolo: rank {rank} of {} on {host} failed first: {}; {said}", self.seats[0].size, cause.ending);
        last.iter().for_each(|line| eprintln!("    {line}"));
    }
}
