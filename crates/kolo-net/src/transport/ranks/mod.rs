//! Groups of ranks over TCP, for `kolo_runtime::collective`.
//!
//! Every rank calls [`join`] with the address of a coordinator, which rank 0 usually has (`MASTER_ADDR` and `MASTER_PORT` of other
//! systems). There the ranks learn each other's addresses, and then connect to each other:
//!
//! ```text
//! rank 0 ─┐                        ┌─► addresses of all ─► for each pair: streams for messages (link.rs),
//! rank 1 ─┼─► coordinator (meet.rs)┤                       and one that says who is still there (watch.rs)
//! rank 2 ─┘                        └─► or which ranks are missing
//! ```
//!
//! Every connection begins with a greeting (`greeting.rs`) in which both sides prove that they know the token, with TLS where the
//! cluster has it. Strangers cost a small fixed amount of memory and are heard beside each other, so they cannot hold up a group
//! that forms. After that, messages have the lengths that both ends expect, whatever the other one sends.

pub mod elastic;
mod greeting;
mod link;
mod meet;
mod stream;
mod telling;
mod watch;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use kolo_runtime::collective::{Communicator, CommunicatorOptions, RankBoard, RankRecord, own_host};

use self::greeting::{Body, CallerSecurity, Door, Purpose, accept, answer, call, refuse};
use self::link::Link;
use self::meet::{Roster, list_missing, octets};
use self::stream::Stream;
use self::watch::Watch;
use super::tls::Security;

pub use self::meet::Coordinator;

/// The most ranks of a group.
pub const MOST_RANKS: usize = 4096;

/// The most streams of a pair.
const MOST_STREAMS: usize = 16;

/// How long ranks that have met take at most to connect to each other.
const CONNECT: Duration = Duration::from_secs(20);

/// The first and the longest time before a coordinator that is not there is called again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// How a process joins a group of ranks.
#[derive(Clone, Debug)]
pub struct RankConfig {
    /// The rank of this process.
    pub rank: usize,
    /// The number of ranks.
    pub n_ranks: usize,
    /// The `host:port` where the ranks meet.
    pub coordinator: String,
    /// Who is there.
    pub host: CoordinatorHost,
    /// The address at which this rank listens for others. By default the one from which it reaches the coordinator.
    pub listen: Option<IpAddr>,
    /// How ranks authenticate each other.
    pub security: Security,
    /// How long a rank waits for all others to join.
    pub join_timeout: Duration,
    /// A rank of which nothing was heard for so long is lost, and ends the group. All ranks use the same.
    pub lost_after: Duration,
    /// Connections for the messages of a pair on two hosts; large messages are cut and go over all of them. Ranks of one host have one:
    /// there, more cost time. All ranks use the same.
    pub n_streams: usize,
}

/// Whose the coordinator is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoordinatorHost {
    /// Rank 0 starts it when it joins.
    FirstRank,
    /// Another process, or the caller, has one ([`Coordinator::start`]).
    Other,
}

impl RankConfig {
    /// Rank `rank` of `n_ranks`, which meet at rank 0.
    pub fn new(rank: usize, n_ranks: usize, coordinator: &str) -> RankConfig {
        RankConfig {
            rank,
            n_ranks,
            coordinator: coordinator.to_owned(),
            host: CoordinatorHost::FirstRank,
            listen: None,
            security: Security::default(),
            join_timeout: Duration::from_secs(60),
            lost_after: Duration::from_millis(400),
            n_streams: 4,
        }
    }

    /// The address of this host at which others reach this rank.
    pub fn own_address(&self) -> Result<IpAddr> {
        let listen = self.listen.filter(|ip| !ip.is_unspecified());
        listen.map_or_else(|| address_towards(resolve(&self.coordinator)?), Ok)
    }

    fn check(&self) -> Result<()> {
        let refused = |why: String| Err(Error::invalid_argument(why));
        if self.n_ranks == 0 || self.n_ranks > MOST_RANKS {
            return refused(format!("a group has 1 to {MOST_RANKS} ranks, not {}", self.n_ranks));
        }
        if self.rank >= self.n_ranks {
            return refused(format!(
                "there is no rank {} in a group of {}: they count from 0",
                self.rank, self.n_ranks
            ));
        }
        if self.n_streams == 0 || self.n_streams > MOST_STREAMS {
            return refused(format!("a pair of ranks has 1 to {MOST_STREAMS} streams, not {}", self.n_streams));
        }
        if self.lost_after < Duration::from_millis(50) || self.lost_after > Duration::from_secs(3600) {
            return refused(format!("a rank is lost after 50 ms to an hour, not {:?}", self.lost_after));
        }
        if self.join_timeout > Duration::from_secs(24 * 3600) {
            return refused(format!("ranks wait for each other for at most a day, not {:?}", self.join_timeout));
        }
        Ok(())
    }

    fn body(&self, purpose: Purpose) -> Body {
        Body {
            purpose,
            rank: self.rank as u32,
            n_ranks: self.n_ranks as u32,
            group: [0; 16],
            stream: 0,
            listen: [0; 16],
            port: 0,
            timeout_ms: self.join_timeout.as_millis() as u32,
            n_streams: self.n_streams as u32,
            lost_after_ms: self.lost_after.as_millis() as u32,
        }
    }
}

/// Joins a group; returns when all ranks have.
///
/// ```
/// use kolo_core::Tensor;
/// use kolo_net::ranks::{Coordinator, CoordinatorHost, RankConfig, join};
/// use kolo_net::tls::{Security, Token};
/// use kolo_runtime::collective::{CommunicatorOptions, ReduceOp};
///
/// let security = Security { token: Some(Token::new("a-secret-of-the-job")?), ..Security::default() };
/// let coordinator = Coordinator::start("127.0.0.1:0".parse().unwrap(), 2, &security)?;
/// let address = coordinator.address().to_string();
/// // Usually in a process of its own, with the address of rank 0 and without the line about the host.
/// let rank = |rank| {
///     let mut config = RankConfig::new(rank, 2, &address);
///     (config.security, config.host) = (security.clone(), CoordinatorHost::Other);
///     let mut group = join(&config, &CommunicatorOptions::default())?;
///     group.all_reduce(vec![Tensor::from([rank as f32, 1.0])], ReduceOp::Sum)
/// };
/// let sums = std::thread::scope(|scope| [scope.spawn(|| rank(0)), scope.spawn(|| rank(1))].map(|one| one.join().unwrap()));
/// assert_eq!(sums[0].clone()?, [Tensor::from([1.0f32, 2.0])]);
/// # Ok::<(), kolo_core::Error>(())
/// ```
pub fn join(config: &RankConfig, options: &CommunicatorOptions) -> Result<Communicator> {
    let (link, host) = connect(config).map_err(|error| {
        error.context(format_args!("rank {} of {} cannot join its group", config.rank, config.n_ranks))
    })?;
    // Several machines may be seen with one address, behind a router or in a test.
    Communicator::over_hosts(Box::new(link), own_host(Some(host)), options)
}

/// This rank's connections, and its address.
fn connect(config: &RankConfig) -> Result<(Link, IpAddr)> {
    config.check()?;
    let deadline = Instant::now() + config.join_timeout;
    let meeting = resolve_by(&config.coordinator, deadline)?;
    let _coordinator = match (config.rank, config.host) {
        (0, CoordinatorHost::FirstRank) if meeting.port() == 0 => {
            return Err(Error::invalid_argument(format!(
                "the other ranks cannot know the port of '{}': name one, or start a Coordinator and give them its address",
                config.coordinator
            )));
        }
        (0, CoordinatorHost::FirstRank) => Some(Coordinator::start(meeting, config.n_ranks, &config.security)?),
        _ => None,
    };
    let security = CallerSecurity::new(&config.security)?;
    let (door, roster) = meet(config, &security, meeting, deadline)?;
    let streams = connect_all(config, &security, door, &roster)?;
    let (mut messages, mut controls) = (Vec::new(), Vec::new());
    for mut of_peer in streams {
        controls.push(of_peer.pop().flatten());
        messages.push(of_peer.into_iter().flatten().collect());
    }
    let board = Arc::new(RankBoard::alone(config.n_ranks, config.rank, roster.group)?);
    board.record(config.rank).into_iter().for_each(RankRecord::adopt);
    let (watch, watching) = Watch::start(config.rank, controls, board, config.lost_after)?;
    let own_host = roster.addresses[config.rank].ip();
    let n_here = roster.addresses.iter().filter(|address| address.ip() == own_host).count();
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let link = Link {
        rank: config.rank,
        n_ranks: config.n_ranks,
        streams: messages,
        watch,
        watching: Some(watching),
        spins: n_here <= n_cores,
        n_bytes_sent: 0,
    };
    Ok((link, own_host))
}

fn resolve(address: &str) -> Result<SocketAddr> {
    let wrong = |why: String| Error::invalid_argument(format!("the address '{address}' {why}"));
    let mut found = address.to_socket_addrs().map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => wrong(format!("is not a host:port: {error}")),
        _ => Error::unavailable(format!("the address '{address}' is not known: {error}")),
    })?;
    found.next().ok_or_else(|| wrong("has no address".to_owned()))
}

/// The same, once the name is known: a pod of Kubernetes gets its name a while after it has started.
fn resolve_by(address: &str, deadline: Instant) -> Result<SocketAddr> {
    let mut is_told = false;
    loop {
        match resolve(address) {
            Err(error) if error.code() == Code::Unavailable && Instant::now() + PAUSES.1 < deadline => {
                if !is_told {
                    tracing::warn!("{}; it may not be there yet, so it is asked for again", error.message());
                    is_told = true;
                }
                std::thread::sleep(PAUSES.1);
            }
            found => return found,
        }
    }
}

fn host_of(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// Calls the coordinator, again and again until it is there, and waits there for the other ranks. Returns where this rank listens, and
/// where the others do.
fn meet(
    config: &RankConfig,
    security: &CallerSecurity,
    meeting: SocketAddr,
    deadline: Instant,
) -> Result<(Door, Roster)> {
    let (coordinator, mut pause) = ("the coordinator", PAUSES.0);
    let listen = config.listen.map_or_else(|| address_towards(meeting), Ok)?;
    let door = Door::open(SocketAddr::new(listen, 0), &config.security)?;
    let own = config.listen.filter(|ip| !ip.is_unspecified()).map_or([0; 16], octets);
    let body = Body { port: door.address()?.port(), listen: own, ..config.body(Purpose::Meet) };
    let mut stream = loop {
        match call(meeting, host_of(&config.coordinator), coordinator, security, &body, deadline) {
            Ok(stream) => break stream,
            // It may not have come yet. Other errors do not go away.
            Err(error) if error.code() != Code::Unavailable => return Err(error),
            Err(_) if Instant::now() + pause < deadline => std::thread::sleep(pause),
            Err(error) => {
                let waited = config.join_timeout.as_secs_f64();
                return Err(Error::deadline_exceeded(format!(
                    "there is no coordinator after {waited:.1} s: {}; is rank 0 running, and is this its address?",
                    error.message()
                )));
            }
        }
        pause = (pause * 2).min(PAUSES.1);
    };
    // The coordinator is the one to say who is missing.
    let told_by = deadline + Duration::from_secs(2);
    answer(&mut stream, coordinator, told_by)?;
    let roster = Roster::receive(&mut stream, config.n_ranks, told_by)
        .map_err(|error| Error::unavailable(format!("the coordinator is gone: {error}")))?;
    Ok((door, roster))
}

/// The address of this host from which the coordinator is reached. Nothing is sent.
fn address_towards(meeting: SocketAddr) -> Result<IpAddr> {
    let any: IpAddr = if meeting.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let local = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(meeting)?;
        socket.local_addr()
    });
    let unknown = |error| Error::unavailable(format!("the way to the coordinator at {meeting} is not known: {error}"));
    Ok(local.map_err(unknown)?.ip())
}

/// Connects to all other ranks: to lower ones by calling them, to higher ones by waiting for their calls. For each rank its streams
/// and then its control connection; none for this one.
fn connect_all(
    config: &RankConfig,
    security: &CallerSecurity,
    mut door: Door,
    roster: &Roster,
) -> Result<Vec<Vec<Option<Stream>>>> {
    let deadline = Instant::now() + CONNECT;
    let stop = AtomicBool::new(false);
    let own_host = roster.addresses[config.rank].ip();
    let slots = |address: &SocketAddr| {
        let n_streams = if address.ip() == own_host { 1 } else { config.n_streams };
        std::iter::repeat_with(|| None).take(n_streams + 1).collect()
    };
    let mut all: Vec<Vec<Option<Stream>>> = roster.addresses.iter().map(slots).collect();
    let (lower, higher) = all.split_at_mut(config.rank);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| wait_for_higher(config, &mut door, roster, &mut higher[1..], deadline, &stop));
        let called = call_lower(config, security, roster, lower, deadline);
        if called.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        let waited = waits.join().unwrap_or_else(|_| Err(Error::internal("the thread that waits for ranks panicked")));
        called.and(waited)
    })?;
    Ok(all)
}

fn call_lower(
    config: &RankConfig,
    security: &CallerSecurity,
    roster: &Roster,
    lower: &mut [Vec<Option<Stream>>],
    deadline: Instant,
) -> Result<()> {
    for (peer, streams) in lower.iter_mut().enumerate() {
        let (address, name) = (roster.addresses[peer], format!("rank {peer}"));
        let last = streams.len() - 1;
        for (i, to) in streams.iter_mut().enumerate() {
            let purpose = if i == last { Purpose::Control } else { Purpose::Data };
            let body = Body { group: roster.group, stream: i as u32, ..config.body(purpose) };
            let mut pause = PAUSES.0;
            *to = loop {
                let called = call(address, &address.ip().to_string(), &name, security, &body, deadline).and_then(
                    |mut stream| {
                        answer(&mut stream, &name, deadline)?;
                        Ok(stream)
                    },
                );
                match called {
                    Ok(stream) => break Some(stream),
                    // It may have had no room among many callers.
                    Err(error) if error.code() == Code::Unavailable && Instant::now() + pause < deadline => {
                        std::thread::sleep(pause);
                        pause = (pause * 2).min(PAUSES.1);
                    }
                    Err(error) => return Err(error),
                }
            };
        }
    }
    Ok(())
}

fn wait_for_higher(
    config: &RankConfig,
    door: &mut Door,
    roster: &Roster,
    higher: &mut [Vec<Option<Stream>>],
    deadline: Instant,
    stop: &AtomicBool,
) -> Result<()> {
    let first = config.rank + 1;
    let mut n_missing = higher.iter().map(Vec::len).sum::<usize>();
    while n_missing > 0 {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::cancelled("another connection failed"));
        }
        if Instant::now() >= deadline {
            let missing = |i: &usize| higher[*i].iter().any(Option::is_none);
            let ranks: Vec<usize> = (0..higher.len()).filter(missing).map(|i| i + first).collect();
            return Err(Error::deadline_exceeded(format!(
                "not all ranks have connected to rank {} within {} s: {}; can its address {} be reached from there?",
                config.rank,
                CONNECT.as_secs(),
                list_missing(&ranks),
                roster.addresses[config.rank]
            )));
        }
        for (mut stream, body, from) in door.wait(&[], Duration::from_millis(20))? {
            let is_ours = body.group == roster.group && body.n_ranks as usize == config.n_ranks;
            let streams = (body.rank as usize).checked_sub(first).and_then(|i| higher.get_mut(i));
            let slot = streams.filter(|_| is_ours).and_then(|streams| {
                let is_last = body.stream as usize + 1 == streams.len();
                let purpose = if is_last { Purpose::Control } else { Purpose::Data };
                streams.get_mut(body.stream as usize).filter(|slot| slot.is_none() && body.purpose == purpose)
            });
            let Some(slot) = slot else {
                let error = Error::failed_precondition(format!(
                    "rank {} expects no such connection: is it of another group, or are there two of rank {}?",
                    config.rank, body.rank
                ));
                tracing::warn!("{from}: {error}");
                refuse(&mut stream, &error);
                continue;
            };
            // Who hangs up now is missed when the group begins.
            if accept(&mut stream, deadline).is_ok() {
                *slot = Some(stream);
                n_missing -= 1;
            }
        }
    }
    Ok(())
}
