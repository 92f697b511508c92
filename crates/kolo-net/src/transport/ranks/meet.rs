//! How ranks find each other: all of them call a coordinator, which tells each the addresses of all when the last one has come.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};

use super::MOST_RANKS;
use super::greeting::{Body, Door, Purpose, accept, random, refuse};
use super::stream::Stream;
use crate::transport::tls::Security;

/// How often a coordinator looks whether it should stop.
const LOOK: Duration = Duration::from_millis(10);

/// Bytes of an address in a roster.
const ADDRESS: usize = 18;

/// Where the ranks of a group meet. Rank 0 usually has one ([`super::join`] starts it), but any process may: it lives until this is
/// dropped, and groups may meet there one after the other.
pub struct Coordinator {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Coordinator {
    /// Listens at an address for a group of `n_ranks`. Port 0 is one of the system's choice.
    pub fn start(address: SocketAddr, n_ranks: usize, security: &Security) -> Result<Coordinator> {
        if n_ranks == 0 || n_ranks > MOST_RANKS {
            return Err(Error::invalid_argument(format!("a group has 1 to {MOST_RANKS} ranks, not {n_ranks}")));
        }
        let door =
            Door::open(address, security).map_err(|error| error.context("the coordinator of a group of ranks"))?;
        let (address, stop) = (door.address()?, Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("kolo-coordinator".to_owned())
            .spawn(move || serve(door, n_ranks, &stopped))
            .map_err(|error| Error::resource_exhausted(format!("no thread for a coordinator: {error}")))?;
        Ok(Coordinator { address, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // What it panicked about is in the log.
            let _ = thread.join();
        }
    }
}

/// The addresses of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Roster {
    pub group: [u8; 16],
    pub addresses: Vec<SocketAddr>,
}

impl Roster {
    fn write(&self) -> Vec<u8> {
        let mut bytes = self.group.to_vec();
        for address in &self.addresses {
            bytes.extend(octets(address.ip()));
            bytes.extend(address.port().to_le_bytes());
        }
        bytes
    }

    /// Receives one of so many ranks.
    pub fn receive(stream: &mut Stream, n_ranks: usize, deadline: Instant) -> io::Result<Roster> {
        let mut group = [0; 16];
        stream.read_exact_by(&mut group, deadline)?;
        let mut bytes = vec![0; n_ranks * ADDRESS];
        stream.read_exact_by(&mut bytes, deadline)?;
        let address = |bytes: &[u8]| {
            let mut ip = [0; 16];
            ip.copy_from_slice(&bytes[..16]);
            SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16::from_le_bytes([bytes[16], bytes[17]]))
        };
        Ok(Roster { group, addresses: bytes.chunks_exact(ADDRESS).map(address).collect() })
    }
}

/// An address of either kind.
pub(super) fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// A rank that waits for the others.
struct Waiting {
    stream: Stream,
    body: Body,
    address: SocketAddr,
    gives_up: Instant,
}

fn serve(mut door: Door, n_ranks: usize, stop: &AtomicBool) {
    let mut waiting: Vec<Option<Waiting>> = (0..n_ranks).map(|_| None).collect();
    while !stop.load(Ordering::Relaxed) {
        let streams: Vec<&dyn AsFd> = waiting.iter().flatten().map(|rank| &rank.stream as &dyn AsFd).collect();
        let callers = match door.wait(&streams, LOOK) {
            Ok(callers) => callers,
            Err(error) => {
                tracing::error!("the coordinator of a group of ranks has failed: {error}");
                return;
            }
        };
        // Who hung up, because it was stopped or gave up, may come again.
        for rank in &mut waiting {
            if rank.as_ref().is_some_and(|rank| has_gone(&rank.stream)) {
                *rank = None;
            }
        }
        for (mut stream, body, from) in callers {
            match admit(&waiting, &body, n_ranks) {
                Ok(rank) => {
                    let gives_up = Instant::now() + Duration::from_millis(u64::from(body.timeout_ms));
                    let listen = Ipv6Addr::from(body.listen);
                    let ip = if listen.is_unspecified() { from.ip().to_canonical() } else { listen.to_canonical() };
                    let address = SocketAddr::new(ip, body.port);
                    waiting[rank] = Some(Waiting { stream, body, address, gives_up });
                }
                Err(error) => refuse(&mut stream, &error),
            }
        }
        if waiting.iter().all(Option::is_some) {
            tell_all(&mut waiting);
        } else if let Some(first) = waiting.iter().flatten().find(|rank| rank.gives_up <= Instant::now()) {
            let seconds = f64::from(first.body.timeout_ms) / 1e3;
            let error = Error::deadline_exceeded(format!(
                "not all {n_ranks} ranks have joined within {seconds:.1} s: {}",
                missing(&waiting)
            ));
            waiting.iter_mut().flatten().for_each(|rank| refuse(&mut rank.stream, &error));
            waiting.fill_with(|| None);
        }
    }
}

/// The rank that a caller is, or why it cannot join.
fn admit(waiting: &[Option<Waiting>], body: &Body, n_ranks: usize) -> Result<usize> {
    let rank = body.rank as usize;
    if body.purpose != Purpose::Meet {
        return Err(Error::failed_precondition("this is where ranks meet, and not a rank"));
    }
    if body.n_ranks as usize != n_ranks || rank >= n_ranks {
        return Err(Error::failed_precondition(format!(
            "rank {rank} was started as one of {} ranks, and the group has {n_ranks}, from 0 on",
            body.n_ranks
        )));
    }
    if let Some(first) = &waiting[rank] {
        return Err(Error::failed_precondition(format!(
            "rank {rank} has joined already, from {}: every process needs a rank of its own",
            first.address
        )));
    }
    let settings = |body: &Body| (body.n_streams, body.lost_after_ms);
    match waiting.iter().flatten().find(|other| settings(&other.body) != settings(body)) {
        Some(other) => {
            let ((streams, lost), (their_streams, their_lost)) = (settings(body), settings(&other.body));
            Err(Error::failed_precondition(format!(
                "rank {rank} has {streams} streams and misses a rank after {lost} ms, rank {} {their_streams} and {their_lost} \
                 ms: all ranks need the same",
                other.body.rank
            )))
        }
        None => Ok(rank),
    }
}

/// Tells all ranks where the others are; the next group may come.
fn tell_all(waiting: &mut [Option<Waiting>]) {
    let addresses = waiting.iter().flatten().map(|rank| rank.address).collect();
    let group = match random() {
        Ok(group) => group,
        Err(error) => {
            waiting.iter_mut().flatten().for_each(|rank| refuse(&mut rank.stream, &error));
            return waiting.fill_with(|| None);
        }
    };
    let roster = Roster { group, addresses }.write();
    for rank in waiting.iter_mut().flatten() {
        let deadline = Instant::now() + Duration::from_secs(1);
        // Who is gone is missed by those who connect to it.
        let _ = accept(&mut rank.stream, deadline).and_then(|()| rank.stream.write_all_by(&roster, deadline));
    }
    waiting.fill_with(|| None);
}

/// Whether a rank that has nothing to say has hung up.
fn has_gone(stream: &Stream) -> bool {
    let mut byte = [0; 1];
    match stream.tcp().peek(&mut byte) {
        Ok(0) => true,
        // With TLS, tickets or the like; otherwise it says something where it has to listen.
        Ok(_) => false,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock && error.kind() != io::ErrorKind::Interrupted,
    }
}

/// `ranks 2, 5 and 6 are missing`.
fn missing(waiting: &[Option<Waiting>]) -> String {
    let ranks: Vec<usize> = (0..waiting.len()).filter(|rank| waiting[*rank].is_none()).collect();
    list_missing(&ranks)
}

pub(super) fn list_missing(ranks: &[usize]) -> String {
    let mut names: Vec<String> = ranks.iter().take(20).map(usize::to_string).collect();
    match (names.pop(), ranks.len()) {
        (Some(last), 1) => format!("rank {last} is missing"),
        (Some(last), 2..=20) => format!("ranks {} and {last} are missing", names.join(", ")),
        (Some(last), n) => format!("ranks {}, {last} and {} more are missing", names.join(", "), n - 20),
        (None, _) => "none is missing".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::RankConfig;
    use super::super::greeting::{CallerSecurity, answer, call};
    use super::*;

    /// A quarter of the open files that a process usually may have.
    const MANY: usize = 250;

    #[test]
    fn many_ranks_meet_and_all_learn_the_same() {
        let security = Security { insecure_loopback: true, ..Security::default() };
        let coordinator = Coordinator::start("127.0.0.1:0".parse().unwrap(), MANY, &security).unwrap();
        let (caller, began) = (CallerSecurity::new(&security).unwrap(), Instant::now());
        let deadline = began + Duration::from_secs(60);
        let rank = |rank: usize| {
            let config = RankConfig::new(rank, MANY, "");
            let body = Body { port: rank as u16 + 1, ..config.body(Purpose::Meet) };
            call(coordinator.address(), "127.0.0.1", "the coordinator", &caller, &body, deadline).unwrap()
        };
        let streams: Vec<Stream> = std::thread::scope(|scope| {
            let some = |first: usize| scope.spawn(move || (first..MANY).step_by(10).map(rank).collect::<Vec<_>>());
            let some: Vec<_> = (0..10).map(some).collect();
            some.into_iter().flat_map(|some| some.join().unwrap()).collect()
        });
        let mut rosters = Vec::new();
        for mut stream in streams {
            answer(&mut stream, "the coordinator", deadline).unwrap();
            rosters.push(Roster::receive(&mut stream, MANY, deadline).unwrap());
        }
        assert!(rosters.iter().all(|roster| *roster == rosters[0]));
        for (rank, address) in rosters[0].addresses.iter().enumerate() {
            assert_eq!(address.to_string(), format!("127.0.0.1:{}", rank + 1));
        }
        println!("{MANY} ranks have met in {:?}", began.elapsed());
    }

    #[test]
    fn missing_ranks_are_listed() {
        assert_eq!(list_missing(&[3]), "rank 3 is missing");
        assert_eq!(list_missing(&[1, 2, 5]), "ranks 1, 2 and 5 are missing");
        let many: Vec<usize> = (0..30).collect();
        assert!(list_missing(&many).ends_with("18, 19 and 10 more are missing"));
    }
}
