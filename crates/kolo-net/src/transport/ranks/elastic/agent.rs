//! A process's membership: a thread that listens and looks around, threads that call other members, and one that connects the members
//! of a world. What is said, and when, is `protocol.rs`'s.
//!
//! | state | who may touch it |
//! | --- | --- |
//! | `state` | any thread, briefly; nobody waits for a socket while it is held, and of other locks only those of a `Watch` are taken |
//! | `inbox` | the listening thread puts connections there, the one that connects a world takes them |
//!
//! A process listens at one address for its whole life: for questions about membership and for connections of the worlds that it is in.
//! So a world needs no meeting of its own once it is decided, and nobody is there where a connection is refused.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use kolo_runtime::collective::{Communicator, CommunicatorOptions};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::super::greeting::{Body, CallerSecurity, Door, Purpose, accept, call, random, refuse};
use super::super::stream::Stream;
use super::super::watch::Watch;
use super::super::{MOST_STREAMS, address_towards, resolve};
use super::mesh;
use super::messages::{Epoch, MOST_BYTES, Member, MemberId, Reply, Request};
use super::protocol::{Call, Event, Protocol, Start};
use super::sizes::Sizes;
use crate::transport::tls::Security;

/// A member that has not answered a question after this time does not.
const CALL_LIMIT: Duration = Duration::from_millis(1000);

/// How often the listening thread looks whether a world has ended.
const LOOK: Duration = Duration::from_millis(20);

/// The most questions that are answered at the same time.
const MOST_ASKING: usize = 64;

/// The most connections of worlds that are not taken yet, and how long they are kept.
const MOST_ARRIVED: usize = 4096;
const KEPT: Duration = Duration::from_secs(10);

/// How a process takes part in an elastic training.
#[derive(Clone, Debug)]
pub struct ElasticConfig {
    /// Where this process listens for others, for its whole life; port 0 is one of the system's choice. By default the address from
    /// which it reaches the first of `join`.
    pub listen: Option<SocketAddr>,
    /// Members of a training that is under way, or its founder, as `host:port`. Empty for the process that founds the training.
    pub join: Vec<String>,
    /// How many ranks the training can have.
    pub sizes: Sizes,
    /// The founder waits for so many to begin, for at most half of `patience`.
    pub start_with: usize,
    /// Those who come together are put in this order.
    pub wish: u32,
    /// A number for what all members have to agree on; others are not let in.
    pub settings: u64,
    /// How long to wait for others when they are too few, or for a member when none is found.
    pub patience: Duration,
    /// A member of which nothing was heard for so long is lost. All use the same.
    pub lost_after: Duration,
    /// Connections for the messages of a pair on two hosts. All use the same.
    pub n_streams: usize,
    /// How members authenticate each other.
    pub security: Security,
}

impl ElasticConfig {
    /// A training with so many ranks, of those that find each other at these addresses.
    pub fn new(sizes: Sizes, join: Vec<String>) -> ElasticConfig {
        ElasticConfig {
            listen: None,
            join,
            start_with: sizes.most(),
            sizes,
            wish: 0,
            settings: 0,
            patience: Duration::from_secs(60),
            lost_after: Duration::from_secs(2),
            n_streams: 4,
            security: Security::default(),
        }
    }

    fn check(&self) -> Result<()> {
        let refused = |why: String| Err(Error::invalid_argument(why));
        if self.sizes.largest(self.start_with) != Some(self.start_with) {
            return refused(format!(
                "a training cannot begin with {} ranks: {}",
                self.start_with,
                self.sizes.describe()
            ));
        }
        if self.n_streams == 0 || self.n_streams > MOST_STREAMS {
            return refused(format!("a pair of ranks has 1 to {MOST_STREAMS} streams, not {}", self.n_streams));
        }
        if self.lost_after < Duration::from_millis(50) || self.lost_after > Duration::from_secs(3600) {
            return refused(format!("a rank is lost after 50 ms to an hour, not {:?}", self.lost_after));
        }
        if self.patience < Duration::from_millis(100) || self.patience > Duration::from_secs(24 * 3600) {
            return refused(format!("ranks wait for each other for 0.1 s to a day, not {:?}", self.patience));
        }
        Ok(())
    }
}

/// A world that this process is in, connected.
pub struct NextWorld {
    /// This rank's end of it.
    pub communicator: Communicator,
    /// The how manieth world of the training it is, from 1.
    pub number: u64,
    /// This rank among those of its host (ranks of one address are on one host), and how many those are.
    pub local: (usize, usize),
}

/// A process's membership in an elastic training, from its start to the end of the process.
pub struct Membership {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

pub(super) struct Shared {
    pub config: ElasticConfig,
    pub own: Member,
    pub security: CallerSecurity,
    options: CommunicatorOptions,
    state: Mutex<State>,
    /// Something in `state` is new.
    changed: Condvar,
    inbox: Mutex<Inbox>,
    /// Something in `inbox` is new.
    arrived: Condvar,
    wake: UnixStream,
    stops: AtomicBool,
    n_asking: AtomicUsize,
    began: Instant,
}

struct State {
    protocol: Protocol,
    /// The world that this process is in.
    current: Option<Current>,
    /// It is connected, and nobody has taken it yet.
    ready: Option<NextWorld>,
    ending: Option<Ending>,
    /// Why the current world has ended, until somebody has said so.
    unsaid: Option<Error>,
}

struct Current {
    epoch: Epoch,
    watch: Option<Arc<Watch>>,
    /// It is known that it has ended.
    has_ended: bool,
}

enum Ending {
    Over,
    Failed(Error),
}

/// Connections of worlds, by the group that they belong to.
#[derive(Default)]
struct Inbox {
    groups: HashMap<[u8; 16], Vec<(Stream, Body, Instant)>>,
    n: usize,
}

/// The number of a world's group, which its connections name.
pub(super) fn group_of(job: u128, number: u64) -> [u8; 16] {
    (job ^ u128::from(number)).to_le_bytes()
}

impl Membership {
    /// Listens, and finds the others. Founds a training if no address to join is given.
    pub fn start(config: ElasticConfig, options: &CommunicatorOptions) -> Result<Membership> {
        config.check()?;
        let mut known = Vec::new();
        for address in &config.join {
            // One machine of a list may be gone with its name.
            match resolve(address) {
                Ok(address) => known.push(address),
                Err(error) if config.join.len() > 1 => tracing::warn!(target: "kolo::train", "{error}"),
                Err(error) => return Err(error),
            }
        }
        let listen = match (config.listen, known.first()) {
            (Some(listen), _) => listen,
            (None, Some(first)) => SocketAddr::new(address_towards(*first)?, 0),
            (None, None) => {
                return Err(Error::invalid_argument(
                    "an elastic training needs an address at which this process listens, or those of members to join",
                ));
            }
        };
        let door = Door::open(listen, &config.security)?;
        let mut address = door.address()?;
        if address.ip().is_unspecified() {
            address.set_ip(own_ip(known.first())?);
        }
        known.retain(|known| *known != address);
        let founds = match (known.is_empty(), config.join.is_empty()) {
            (_, true) => Some(u128::from_le_bytes(random()?)),
            (true, false) => {
                return Err(Error::invalid_argument(format!(
                    "the only address to join, {}, is this process's own; give that of another member, or none to found a training",
                    config.join.join(", ")
                )));
            }
            (false, false) => None,
        };
        let own = Member { id: MemberId(u128::from_le_bytes(random()?)), address, wish: config.wish };
        let start = Start {
            own,
            founds,
            known,
            sizes: config.sizes.clone(),
            start_with: config.start_with,
            patience: config.patience,
            settings: config.settings,
            seed: u64::from_le_bytes(random()?),
        };
        let failed =
            |error: io::Error| Error::resource_exhausted(format!("an elastic rank cannot be started: {error}"));
        let (wake, waker) = UnixStream::pair().map_err(failed)?;
        wake.set_nonblocking(true).and_then(|()| waker.set_nonblocking(true)).map_err(failed)?;
        let protocol = Protocol::new(start, Duration::ZERO);
        let shared = Arc::new(Shared {
            own,
            security: CallerSecurity::new(&config.security)?,
            options: options.clone(),
            state: Mutex::new(State { protocol, current: None, ready: None, ending: None, unsaid: None }),
            changed: Condvar::new(),
            inbox: Mutex::default(),
            arrived: Condvar::new(),
            wake,
            stops: AtomicBool::new(false),
            n_asking: AtomicUsize::new(0),
            began: Instant::now(),
            config,
        });
        let listening = shared.clone();
        let thread = std::thread::Builder::new()
            .name("kolo-membership".to_owned())
            .spawn(move || listening.listen(door, &waker))
            .map_err(failed)?;
        Ok(Membership { shared, thread: Some(thread) })
    }

    /// Where this process listens.
    pub fn address(&self) -> SocketAddr {
        self.shared.own.address
    }

    /// Whether somebody waits to be let in for whom there is room: all ranks leave their world after the same step then, and meet in
    /// [`Membership::next`].
    pub fn wants_change(&self) -> bool {
        self.shared.state.lock().protocol.wants_change(self.shared.now())
    }

    /// The next world: waits until it is decided and connected. `left` is the one that this process has left, if it was in one. None
    /// if the training has ended meanwhile. An error if too few are left or no member is found in time, or `stop` was set.
    pub fn next(&self, left: Option<u64>, stop: &AtomicBool) -> Result<Option<NextWorld>> {
        if let Some(number) = left {
            self.shared.drive(|state, now| {
                look(state, now);
                state.protocol.leave(number, &[], now);
                ((), state.protocol.poll(now))
            });
        }
        let mut state = self.shared.state.lock();
        loop {
            if let Some(world) = state.ready.take() {
                return Ok(Some(world));
            }
            match &state.ending {
                Some(Ending::Over) => return Ok(None),
                Some(Ending::Failed(error)) => return Err(error.clone()),
                None => {}
            }
            if stop.load(Ordering::Relaxed) {
                return Err(Error::cancelled("this rank was asked to stop while it waited for others"));
            }
            self.shared.changed.wait_for(&mut state, Duration::from_millis(100));
        }
    }

    /// Says that the training has ended, to all who wait or may still want to go on.
    pub fn finish(&self) {
        let calls = {
            let mut state = self.shared.state.lock();
            state.protocol.finish()
        };
        std::thread::scope(|scope| {
            for call in &calls {
                let shared = &self.shared;
                let spawned = std::thread::Builder::new().spawn_scoped(scope, move || drop(shared.ask(call)));
                drop(spawned);
            }
        });
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // What it panicked about is in the log.
            let _ = thread.join();
        }
        let mut state = self.shared.state.lock();
        let (world, _) = (state.ready.take(), state.current.take());
        drop(state);
        drop(world);
    }
}

/// The address of this host from which others are reached, for one that listens at all of its addresses.
fn own_ip(towards: Option<&SocketAddr>) -> Result<IpAddr> {
    towards.map_or_else(
        || {
            Err(Error::invalid_argument(
                "the founder of a training has to listen at an address by which others reach it, not at all of its own",
            ))
        },
        |address| address_towards(*address),
    )
}

/// Notices that the current world has ended.
fn look(state: &mut State, now: Duration) {
    let Some(current) = state.current.as_mut().filter(|current| !current.has_ended) else { return };
    let Some((watch, error)) = current.watch.as_ref().and_then(|watch| Some((watch, watch.ended()?))) else { return };
    let lost: Vec<MemberId> =
        watch.lost().into_iter().filter_map(|rank| current.epoch.members.get(rank).map(|member| member.id)).collect();
    current.has_ended = true;
    state.unsaid = Some(error);
    state.protocol.leave(current.epoch.number, &lost, now);
}

impl Shared {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn wake(&self) {
        // If the buffer is full, it is awake.
        let _ = (&self.wake).write(&[0]);
    }

    pub fn stops(&self) -> bool {
        self.stops.load(Ordering::Acquire)
    }

    /// Whether a world is still the newest of this process.
    pub fn is_newest(&self, number: u64) -> bool {
        self.state.lock().current.as_ref().is_some_and(|current| current.epoch.number == number)
    }

    /// Does something with the protocol, then what follows from it. What is to be said is said by threads of their own.
    fn drive<R>(self: &Arc<Self>, act: impl FnOnce(&mut State, Duration) -> (R, Vec<Call>)) -> R {
        let mut state = self.state.lock();
        let (result, calls) = act(&mut state, self.now());
        let dropped = self.take_events(&mut state);
        let unsaid = state.unsaid.take();
        drop(state);
        if let Some(error) = unsaid {
            tracing::warn!(target: "kolo::train", "{}", error.message());
        }
        // Connections are closed where nobody waits for the lock.
        drop(dropped);
        self.say(calls);
        result
    }

    /// Says these things to other members, each on a thread of its own.
    fn say(self: &Arc<Self>, calls: Vec<Call>) {
        for call in calls {
            let (shared, number) = (self.clone(), call.number);
            let spawned = std::thread::Builder::new().name("kolo-member-call".to_owned()).spawn(move || {
                let reply = shared.ask(&call);
                shared.on_reply(number, reply);
            });
            if let Err(error) = spawned {
                tracing::warn!(target: "kolo::train", "a member is not called, for want of a thread: {error}");
                self.on_reply(number, None);
            }
        }
    }

    fn on_reply(self: &Arc<Self>, number: u64, reply: Option<Reply>) {
        self.drive(|state, now| ((), state.protocol.answered(number, reply, now)));
    }

    /// Gives what is to be dropped without the lock.
    fn take_events(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) -> Vec<NextWorld> {
        let mut dropped = Vec::new();
        while let Some(event) = state.protocol.event() {
            self.changed.notify_all();
            match event {
                Event::In(epoch) => {
                    dropped.extend(state.ready.take());
                    if let Some(Current { watch: Some(watch), .. }) = &state.current {
                        watch.end("its members go on in another world");
                    }
                    let shared = self.clone();
                    let number = epoch.number;
                    state.current = Some(Current { epoch: epoch.clone(), watch: None, has_ended: false });
                    let spawned =
                        std::thread::Builder::new().name("kolo-meet".to_owned()).spawn(move || shared.connect(&epoch));
                    if let Err(error) = spawned {
                        state.protocol.leave(number, &[], self.now());
                        tracing::warn!(target: "kolo::train", "world {number} is not connected, for want of a thread: {error}");
                    }
                }
                Event::Out(epoch) => {
                    dropped.extend(state.ready.take());
                    if let Some(Current { watch: Some(watch), .. }) = &state.current {
                        watch.end("its members go on in another world");
                    }
                    state.current = None;
                    // World 0 has not begun.
                    if epoch.number > 0 {
                        tracing::warn!(
                            target: "kolo::train",
                            "{} ranks train in world {} of the training, and this process waits to be let in",
                            epoch.members.len(),
                            epoch.number
                        );
                    }
                }
                Event::Over => state.ending = Some(Ending::Over),
                Event::Failed(error) => state.ending = Some(Ending::Failed(error)),
                Event::Note(text) => tracing::warn!(target: "kolo::train", "{text}"),
            }
        }
        dropped
    }

    /// Connects the members of a world that was decided, on a thread of its own.
    fn connect(self: &Arc<Self>, epoch: &Epoch) {
        let job = self.state.lock().protocol.job();
        let began = Instant::now();
        let connected = mesh::connect(self, job, epoch).and_then(|link| {
            let watch = link.watch.clone();
            let mut state = self.state.lock();
            match &mut state.current {
                Some(current) if current.epoch.number == epoch.number => current.watch = Some(watch.clone()),
                _ => return Err(mesh::Unconnected::superseded()),
            }
            drop(state);
            let ended = |error| mesh::Unconnected { error, lost: watch.lost() };
            Communicator::over_hosts(Box::new(link), mesh::host_of(self.own.address), &self.options).map_err(ended)
        });
        match connected {
            Ok(communicator) => {
                let is_beside = |member: &&Member| member.address.ip() == self.own.address.ip();
                let rank = communicator.rank();
                let local = (
                    epoch.members[..rank].iter().filter(is_beside).count(),
                    epoch.members.iter().filter(is_beside).count(),
                );
                let world = NextWorld { communicator, number: epoch.number, local };
                tracing::debug!(target: "kolo::train", "world {} is connected after {:?}", epoch.number, began.elapsed());
                let mut state = self.state.lock();
                let is_newest = state.current.as_ref().is_some_and(|current| current.epoch.number == epoch.number);
                let dropped = if is_newest { state.ready.replace(world) } else { Some(world) };
                drop(state);
                self.changed.notify_all();
                drop(dropped);
            }
            Err(mesh::Unconnected { error, lost }) => {
                if self.is_newest(epoch.number) && !self.stops() {
                    tracing::warn!(target: "kolo::train", "world {} did not come about: {error}", epoch.number);
                }
                let lost: Vec<MemberId> =
                    lost.into_iter().filter_map(|rank| epoch.members.get(rank).map(|member| member.id)).collect();
                self.drive(|state, now| {
                    state.protocol.leave(epoch.number, &lost, now);
                    ((), state.protocol.poll(now))
                });
            }
        }
    }

    /// Connections to this process of a world's group that have come since.
    pub fn take_arrived(&self, group: [u8; 16], at_most: Duration) -> Vec<(Stream, Body)> {
        let mut inbox = self.inbox.lock();
        if !inbox.groups.contains_key(&group) {
            self.arrived.wait_for(&mut inbox, at_most);
        }
        let arrived = inbox.groups.remove(&group).unwrap_or_default();
        inbox.n -= arrived.len();
        arrived.into_iter().map(|(stream, body, _)| (stream, body)).collect()
    }

    /// What a caller of a member says of itself.
    pub fn body(&self, purpose: Purpose, group: [u8; 16], place: (usize, usize), stream: usize) -> Body {
        Body {
            purpose,
            rank: place.0 as u32,
            n_ranks: place.1 as u32,
            group,
            stream: stream as u32,
            listen: [0; 16],
            port: self.own.address.port(),
            timeout_ms: 0,
            n_streams: self.config.n_streams as u32,
            lost_after_ms: self.config.lost_after.as_millis() as u32,
        }
    }

    /// Asks a member something; none if it does not answer in time.
    fn ask(&self, to: &Call) -> Option<Reply> {
        let deadline = Instant::now() + CALL_LIMIT;
        let body = self.body(Purpose::Member, [0; 16], (0, 0), 0);
        let mut stream = match call(to.to, &to.to.ip().to_string(), "a member", &self.security, &body, deadline) {
            Ok(stream) => stream,
            // It is there, and will not want this one any better later.
            Err(error) if matches!(error.code(), Code::Unauthenticated | Code::FailedPrecondition) => {
                return Some(Reply::Refused(error.message().to_owned()));
            }
            Err(error) => {
                tracing::debug!(target: "kolo::train", "{error}");
                return None;
            }
        };
        write_message(&mut stream, &to.request.write(), deadline).ok()?;
        Reply::read(&read_message(&mut stream, deadline).ok()?)
    }

    /// Answers a question.
    fn answer(self: &Arc<Self>, mut stream: Stream, from: SocketAddr) {
        let deadline = Instant::now() + CALL_LIMIT;
        let answered = read_message(&mut stream, deadline).and_then(|bytes| {
            let request = Request::read(&bytes).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
            let reply = self.drive(|state, now| (state.protocol.request(request, now), Vec::new()));
            write_message(&mut stream, &reply.write(), deadline)
        });
        if let Err(error) = answered {
            tracing::debug!(target: "kolo::train", "a question of {from} about membership: {error}");
        }
    }

    fn listen(self: Arc<Self>, mut door: Door, waker: &UnixStream) {
        while !self.stops() {
            let wait = self.drive(|state, now| {
                look(state, now);
                let calls = state.protocol.poll(now);
                let wait = state.protocol.next_poll(now).saturating_sub(now);
                (wait.clamp(Duration::from_millis(1), LOOK), calls)
            });
            let callers = match door.wait(&[waker], wait) {
                Ok(callers) => callers,
                Err(error) => {
                    let error = error.context("this rank cannot listen for others any more");
                    self.state.lock().ending = Some(Ending::Failed(error));
                    self.changed.notify_all();
                    return;
                }
            };
            let _ = { waker }.read(&mut [0; 64]);
            for (stream, body, from) in callers {
                match body.purpose {
                    Purpose::Member => self.let_ask(stream, from),
                    Purpose::Data | Purpose::Control => self.put_away(stream, body, from),
                    Purpose::Meet => {
                        let mut stream = stream;
                        refuse(
                            &mut stream,
                            &Error::failed_precondition(
                                "this is a member of an elastic training: all of its processes need --elastic",
                            ),
                        );
                    }
                }
            }
        }
    }

    fn let_ask(self: &Arc<Self>, stream: Stream, from: SocketAddr) {
        if self.n_asking.fetch_add(1, Ordering::AcqRel) < MOST_ASKING {
            let shared = self.clone();
            let spawned = std::thread::Builder::new().name("kolo-member-asks".to_owned()).spawn(move || {
                shared.answer(stream, from);
                shared.n_asking.fetch_sub(1, Ordering::AcqRel);
                // What follows may be due at once.
                shared.wake();
            });
            if spawned.is_ok() {
                return;
            }
        }
        // The caller asks again.
        self.n_asking.fetch_sub(1, Ordering::AcqRel);
    }

    /// Keeps a connection until its world is connected here, too.
    fn put_away(&self, mut stream: Stream, body: Body, from: SocketAddr) {
        let mut inbox = self.inbox.lock();
        inbox.groups.retain(|_, streams| {
            streams.retain(|(_, _, since)| since.elapsed() < KEPT);
            !streams.is_empty()
        });
        inbox.n = inbox.groups.values().map(Vec::len).sum();
        if inbox.n >= MOST_ARRIVED {
            drop(inbox);
            tracing::warn!(target: "kolo::train", "{from} is one connection too many");
            return;
        }
        // Who hangs up now is missed when the world begins.
        if accept(&mut stream, Instant::now() + Duration::from_millis(200)).is_ok() {
            inbox.groups.entry(body.group).or_default().push((stream, body, Instant::now()));
            inbox.n += 1;
            drop(inbox);
            self.arrived.notify_all();
        }
    }
}

fn write_message(stream: &mut Stream, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let message = [&(bytes.len() as u32).to_le_bytes(), bytes].concat();
    stream.write_all_by(&message, deadline)
}

fn read_message(stream: &mut Stream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut n = [0; 4];
    stream.read_exact_by(&mut n, deadline)?;
    let mut left = u32::from_le_bytes(n) as usize;
    if left > MOST_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // Room is made as bytes come.
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    while left > 0 {
        let now = left.min(part.len());
        stream.read_exact_by(&mut part[..now], deadline)?;
        bytes.extend(&part[..now]);
        left -= now;
    }
    Ok(bytes)
}
