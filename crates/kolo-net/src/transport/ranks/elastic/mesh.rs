//! The connections of a world that was decided: each member calls those of lower rank, at the addresses that the decision names.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error};
use kolo_runtime::collective::{RankBoard, RankRecord, own_host};

use super::super::greeting::{Purpose, answer, call, refuse};
use super::super::link::Link;
use super::super::stream::Stream;
use super::super::watch::{Watch, end_message};
use super::agent::{Shared, group_of};
use super::messages::Epoch;

/// How long the members of a world take at most to connect.
const CONNECT: Duration = Duration::from_secs(5);

/// A member that refuses connections for so long is gone: one that lives always listens.
const REFUSED: Duration = Duration::from_millis(200);

/// When and how often one looks whether those that have not called are there.
const PROBE: Duration = Duration::from_millis(200);

/// Why a world is not connected, and which ranks are to blame.
pub(super) struct Unconnected {
    pub error: Error,
    pub lost: Vec<usize>,
}

impl Unconnected {
    /// There is a newer world.
    pub fn superseded() -> Unconnected {
        Unconnected { error: Error::cancelled("there is a newer world"), lost: Vec::new() }
    }

    fn by(rank: usize, error: Error) -> Unconnected {
        Unconnected { error, lost: vec![rank] }
    }
}

/// The host of this process, which others reach at this address.
pub(super) fn host_of(address: SocketAddr) -> u64 {
    own_host(Some(address.ip()))
}

/// Connects this member to all others of a world.
pub(super) fn connect(shared: &Shared, job: u128, epoch: &Epoch) -> Result<Link, Unconnected> {
    let own = |error: Error| Unconnected { error, lost: Vec::new() };
    let rank = epoch.rank_of(shared.own.id).ok_or_else(|| own(Error::internal("this process is not in its world")))?;
    let n_ranks = epoch.members.len();
    let group = group_of(job, epoch.number);
    let own_ip = shared.own.address.ip();
    let n_streams = |peer: usize| if epoch.members[peer].address.ip() == own_ip { 1 } else { shared.config.n_streams };
    let mut all: Vec<Vec<Option<Stream>>> = (0..n_ranks)
        .map(|peer| std::iter::repeat_with(|| None).take(if peer == rank { 0 } else { n_streams(peer) + 1 }).collect())
        .collect();
    let deadline = Instant::now() + CONNECT;
    let connected = call_lower(shared, epoch, rank, group, &mut all, deadline)
        .and_then(|()| wait_for_higher(shared, epoch, rank, group, &mut all, deadline));
    if let Err(unconnected) = connected {
        // The others learn that this one is there and whom it misses, and do not take it for lost as well.
        let message = end_message(rank, unconnected.error.message());
        for control in all.iter_mut().filter_map(|streams| streams.last_mut()?.as_mut()) {
            let _ = control.write_all_by(&message, Instant::now() + Duration::from_millis(50));
        }
        return Err(unconnected);
    }
    let (mut messages, mut controls) = (Vec::new(), Vec::new());
    for mut of_peer in all {
        controls.push(of_peer.pop().flatten());
        messages.push(of_peer.into_iter().flatten().collect());
    }
    let board = Arc::new(RankBoard::alone(n_ranks, rank, group).map_err(own)?);
    board.record(rank).into_iter().for_each(RankRecord::adopt);
    let (watch, watching) = Watch::start(rank, controls, board, shared.config.lost_after).map_err(own)?;
    let n_here = epoch.members.iter().filter(|member| member.address.ip() == own_ip).count();
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let watching = Some(watching);
    Ok(Link { rank, n_ranks, streams: messages, watch, watching, spins: n_here <= n_cores, n_bytes_sent: 0 })
}

fn call_lower(
    shared: &Shared,
    epoch: &Epoch,
    rank: usize,
    group: [u8; 16],
    all: &mut [Vec<Option<Stream>>],
    deadline: Instant,
) -> Result<(), Unconnected> {
    for (peer, streams) in all[..rank].iter_mut().enumerate() {
        let (address, name) = (epoch.members[peer].address, format!("rank {peer}"));
        let (last, began) = (streams.len() - 1, Instant::now());
        for (i, to) in streams.iter_mut().enumerate() {
            let purpose = if i == last { Purpose::Control } else { Purpose::Data };
            let body = shared.body(purpose, group, (rank, epoch.members.len()), i);
            *to = loop {
                if shared.stops() || !shared.is_newest(epoch.number) {
                    return Err(Unconnected::superseded());
                }
                let called = call(address, &address.ip().to_string(), &name, &shared.security, &body, deadline);
                let called = called.and_then(|mut stream| answer(&mut stream, &name, deadline).map(|()| stream));
                match called {
                    Ok(stream) => break Some(stream),
                    // It may have had no room among many callers.
                    Err(error) if error.code() == Code::Unavailable && began.elapsed() < REFUSED => {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    Err(error) => return Err(Unconnected::by(peer, error)),
                }
            };
        }
    }
    Ok(())
}

fn wait_for_higher(
    shared: &Shared,
    epoch: &Epoch,
    rank: usize,
    group: [u8; 16],
    all: &mut [Vec<Option<Stream>>],
    deadline: Instant,
) -> Result<(), Unconnected> {
    let mut probe_at = Instant::now() + PROBE;
    loop {
        let missing: Vec<usize> = (rank + 1..all.len()).filter(|peer| all[*peer].iter().any(Option::is_none)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        if shared.stops() || !shared.is_newest(epoch.number) {
            return Err(Unconnected::superseded());
        }
        let now = Instant::now();
        if now >= deadline {
            let names = missing.iter().map(|peer| format!("rank {peer} ({})", epoch.members[*peer].address));
            let names = names.collect::<Vec<_>>().join(", ");
            let error = Error::deadline_exceeded(format!("not there within {} s: {names}", CONNECT.as_secs()));
            return Err(Unconnected { error, lost: missing });
        }
        if now >= probe_at {
            probe_at = now + PROBE;
            let gone = missing.into_iter().find(|peer| is_gone(epoch.members[*peer].address));
            if let Some(peer) = gone {
                let error = Error::unavailable(format!("rank {peer} ({}) has died", epoch.members[peer].address));
                return Err(Unconnected::by(peer, error));
            }
        }
        for (mut stream, body) in shared.take_arrived(group, Duration::from_millis(20)) {
            let streams = all.get_mut(body.rank as usize).filter(|_| body.rank as usize > rank);
            let slot = streams.and_then(|streams| {
                let is_last = body.stream as usize + 1 == streams.len();
                let purpose = if is_last { Purpose::Control } else { Purpose::Data };
                streams.get_mut(body.stream as usize).filter(|slot| slot.is_none() && body.purpose == purpose)
            });
            match slot {
                Some(slot) => *slot = Some(stream),
                None => refuse(&mut stream, &Error::failed_precondition("no such connection is expected")),
            }
        }
    }
}

/// Whether nobody listens there. A host that does not answer at all says nothing about that.
fn is_gone(address: SocketAddr) -> bool {
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    TcpStream::connect_timeout(&address, Duration::from_millis(100)).is_err_and(refused)
}
