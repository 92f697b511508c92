//! The object behind `KoloBarrier` and its ops ([`super::barrier_ops`]): where workers meet at the end of a step, with a limit
//! to how long they wait for each other.
//!
//! ```text
//! worker   push gradients ── KoloBarrierArrive(worker, step) ───────────────────────────> next step
//!                                      │ waits                                   ▲
//! chief                      KoloBarrierWait(share, timeout) ── take, apply ── KoloBarrierRelease(step)
//! ```
//!
//! A round ends when all workers have arrived, or when `timeout` has passed since the first one and at least a `share` of
//! them has. A worker that was missing in three rounds in a row that ended so, and did not come late either, is not waited for
//! until it comes back. Those who come later find their round gone: their gradients are dropped, or take part in the next round with
//! less weight or in full. The chief learns which gradients belong to the round, so that it takes the same ones for every
//! variable ([`super::gradient_store`]).
//!
//! Lock order: the barrier's own lock only; waiters are told after it is given back.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result, Shape, Tensor};
use kolo_device::Charge;
use parking_lot::Mutex;

use super::alarm::{Alarm, Rings};
use super::barrier_ops::check_worker;
use crate::holdings::Holdings;
use crate::memory::filled;
use crate::queue::source::Described;
use crate::queue::wait::{Waiter, Waits, watch};
use crate::{CancelToken, Done, Registration, Resource};

/// A worker that was waited for in vain in so many rounds in a row is taken for dead: waiting for it would cost every step
/// its timeout.
const MISSED: u32 = 3;

/// How many late gradients the log remembers.
const LOG: usize = 1024;

/// What the place of a late gradient takes in its list, which has room for up to twice as many.
const LATE_BYTES: usize = 2 * size_of::<(usize, i64)>();

/// What becomes of a gradient whose round is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Late {
    Drop,
    Scale,
    Queue,
}

/// What all who name a barrier must agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BarrierSpec {
    pub n_workers: usize,
    pub late: Late,
}

/// Where workers meet.
pub(super) struct Barrier {
    name: Arc<str>,
    spec: BarrierSpec,
    state: Mutex<BarrierState>,
    alarm: Alarm,
}

struct BarrierState {
    /// The step of the round.
    step: i64,
    /// The chief has the round's gradients and has not released it yet.
    is_taken: bool,
    /// Training has ended, until another release.
    is_closed: bool,
    workers: Vec<Worker>,
    /// Gradients of earlier rounds that take part in this one: worker and step.
    late: Vec<(usize, i64)>,
    /// When the first worker of the round arrived.
    first: Option<Instant>,
    /// Workers that go on at the next release.
    parked: Vec<(usize, Waiter)>,
    chief: Option<Chief>,
    log: VecDeque<[i64; 4]>,
    next_id: u64,
    /// The workers, the late and the log.
    holdings: Holdings,
}

#[derive(Clone, Default)]
struct Worker {
    /// In time for this round.
    has_arrived: bool,
    /// It said that it does not come any more.
    has_left: bool,
    /// Rounds in a row in which it was waited for in vain.
    n_missed: u32,
    last: Option<(i64, Instant)>,
    /// Gradients in time, dropped, scaled, queued.
    counts: [i64; 4],
}

impl Worker {
    /// Whether the round waits for it, until the timeout.
    fn is_awaited(&self) -> bool {
        !self.has_arrived && !self.has_left && self.n_missed < MISSED
    }
}

struct Chief {
    waiter: Waiter,
    share: f32,
    timeout: Duration,
}

/// Those who are told once the lock is given back.
#[derive(Default)]
struct Told {
    list: Vec<(Waiter, Result<Vec<Tensor>>)>,
    alarm: Option<Option<Instant>>,
}

impl Told {
    fn push(&mut self, waiter: Waiter, outcome: Result<Vec<Tensor>>) {
        self.list.push((waiter, outcome));
    }
}

impl Barrier {
    fn tell(self: &Arc<Self>, mut told: Told) {
        let alarm = told.alarm.map_or(Ok(()), |at| self.alarm.set(self, at));
        if let Err(error) = alarm
            && let Some(chief) = self.state.lock().chief.take()
        {
            told.push(chief.waiter, Err(error));
        }
        for (waiter, outcome) in told.list {
            waiter.finish(outcome.map(Into::into));
        }
    }

    /// A worker has pushed its gradients of `step`; `done` hears of the step to go on with.
    pub fn arrive(self: &Arc<Self>, worker: i64, step: i64, cancel: &Arc<CancelToken>, done: Done) {
        let worker = match check_worker(worker, self.spec.n_workers) {
            Ok(worker) => worker,
            Err(error) => return done.finish(Err(error)),
        };
        let mut told = Told::default();
        let id = {
            let mut state = self.state.lock();
            if state.is_closed {
                drop(state);
                return done.finish(Err(self.closed()));
            }
            let id = state.fresh_id();
            let waiter = Waiter::new(id, done);
            let now = Instant::now();
            state.workers[worker].last = Some((step, now));
            state.workers[worker].has_left = false;
            state.workers[worker].n_missed = 0;
            if step > state.step && !state.is_taken {
                // The barrier was lost with its server; those who trained on know better.
                state.begin(step, &mut told);
            }
            if step >= state.step && !state.is_taken {
                // A worker that comes twice was cut off in between; its first call is nobody's any more.
                if let Some(at) = state.parked.iter().position(|(other, _)| *other == worker) {
                    let (_, old) = state.parked.swap_remove(at);
                    told.push(old, Err(Error::aborted("the worker arrived again")));
                }
                state.workers[worker].has_arrived = true;
                state.first.get_or_insert(now);
                state.parked.push((worker, waiter));
                state.serve(&self.spec, now, &mut told);
            } else {
                if let Err(error) = state.note_late(&self.spec, worker, step) {
                    drop(state);
                    return waiter.finish(Err(error));
                }
                match state.is_taken && step >= state.step {
                    // The update is being made: the worker goes on after it.
                    true => state.parked.push((worker, waiter)),
                    false => {
                        let step = state.step;
                        told.push(waiter, Ok(vec![Tensor::scalar(step)]));
                    }
                }
            }
            id
        };
        let waits = !told.list.iter().any(|(waiter, _)| waiter.id == id);
        self.tell(told);
        if waits {
            watch(self, id, cancel);
        }
    }

    /// The chief waits for the end of the round; `done` hears which gradients belong to it.
    pub fn wait(self: &Arc<Self>, share: f32, timeout_ms: i64, cancel: &Arc<CancelToken>, done: Done) {
        if !(0.0..=1.0).contains(&share) || timeout_ms < 0 {
            let text =
                format!("a barrier waits for a share from 0 to 1 and 0 ms or more, not {share} and {timeout_ms}");
            return done.finish(Err(Error::invalid_argument(text)));
        }
        let mut told = Told::default();
        let id = {
            let mut state = self.state.lock();
            let id = state.fresh_id();
            let chief = Chief {
                waiter: Waiter::new(id, done),
                share,
                timeout: Duration::from_millis(timeout_ms.unsigned_abs()),
            };
            if let Some(old) = state.chief.replace(chief) {
                told.push(old.waiter, Err(Error::aborted(format!("another chief waits at barrier '{}'", self.name))));
            }
            state.serve(&self.spec, Instant::now(), &mut told);
            id
        };
        let waits = !told.list.iter().any(|(waiter, _)| waiter.id == id);
        self.tell(told);
        if waits {
            watch(self, id, cancel);
        }
    }

    /// The update is made, or training begins: a new round, and everybody goes on. A round that is on already stays as it is,
    /// so that a chief that begins after its workers takes nothing from them.
    pub fn release(self: &Arc<Self>, step: i64) {
        let mut told = Told::default();
        {
            let mut state = self.state.lock();
            if state.step != step || state.is_taken || state.is_closed {
                state.begin(step, &mut told);
            }
        }
        self.tell(told);
    }

    /// A worker does not come any more, until it does: the others need not wait for it.
    pub fn leave(self: &Arc<Self>, worker: i64) -> Result<()> {
        let worker = check_worker(worker, self.spec.n_workers)?;
        let mut told = Told::default();
        {
            let mut state = self.state.lock();
            state.workers[worker].has_left = true;
            state.serve(&self.spec, Instant::now(), &mut told);
        }
        self.tell(told);
        Ok(())
    }

    /// Training has ended: nobody waits here any more, until a chief begins anew.
    pub fn close(self: &Arc<Self>) {
        let mut told = Told::default();
        {
            let mut state = self.state.lock();
            state.is_closed = true;
            state.parked.drain(..).for_each(|(_, waiter)| told.push(waiter, Err(self.closed())));
            if let Some(chief) = state.chief.take() {
                told.push(chief.waiter, Err(self.closed()));
            }
        }
        self.tell(told);
    }

    fn closed(&self) -> Error {
        Error::out_of_range(format!("barrier '{}' is closed: training has ended", self.name))
    }

    pub fn report(&self) -> Result<Vec<Tensor>> {
        let state = self.state.lock();
        let now = Instant::now();
        let workers = &state.workers;
        let last = workers.iter().map(|worker| worker.last.map_or(-1, |(step, _)| step)).collect::<Vec<i64>>();
        let ago = |worker: &Worker| worker.last.map_or(-1.0, |(_, at)| (now - at).as_secs_f32());
        let counts: Vec<i64> = workers.iter().flat_map(|worker| worker.counts).collect();
        let log: Vec<i64> = state.log.iter().flatten().copied().collect();
        Ok(vec![
            Tensor::scalar(state.step),
            Tensor::vector(workers.iter().map(|worker| worker.has_arrived).collect::<Vec<bool>>()),
            Tensor::vector(last),
            Tensor::vector(workers.iter().map(ago).collect::<Vec<f32>>()),
            Tensor::from_vec(Shape::new(&[workers.len(), 4])?, counts)?,
            Tensor::from_vec(Shape::new(&[state.log.len(), 4])?, log)?,
        ])
    }
}

impl BarrierState {
    fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Begins the round of `step`.
    fn begin(&mut self, step: i64, told: &mut Told) {
        (self.step, self.is_taken, self.is_closed, self.first) = (step, false, false, None);
        self.workers.iter_mut().for_each(|worker| worker.has_arrived = false);
        for (_, waiter) in self.parked.drain(..) {
            told.push(waiter, Ok(vec![Tensor::scalar(step)]));
        }
    }

    fn note_late(&mut self, spec: &BarrierSpec, worker: usize, step: i64) -> Result<()> {
        let at = match spec.late {
            Late::Drop => 1,
            Late::Scale => 2,
            Late::Queue => 3,
        };
        if spec.late != Late::Drop && !self.late.contains(&(worker, step)) {
            self.holdings.grow(LATE_BYTES)?;
            self.late.push((worker, step));
        }
        self.workers[worker].counts[at] += 1;
        if self.log.len() == LOG {
            self.log.pop_front();
        }
        self.log.push_back([worker as i64, step, self.step, at as i64 - 1]);
        Ok(())
    }

    /// Ends the round if it is time and the chief waits.
    fn serve(&mut self, spec: &BarrierSpec, now: Instant, told: &mut Told) {
        let n_arrived = self.workers.iter().filter(|worker| worker.has_arrived).count();
        let n = self.workers.iter().filter(|worker| worker.has_arrived || !worker.has_left).count();
        let n_awaited = self.workers.iter().filter(|worker| worker.is_awaited()).count();
        let (Some(chief), Some(first), false) = (&self.chief, self.first, self.is_taken) else { return };
        let is_late = first.checked_add(chief.timeout).is_none_or(|at| at <= now);
        let n_least = ((f64::from(chief.share) * n as f64).ceil() as usize).max(1);
        let is_full = n_arrived == n || (n_awaited == 0 && n_arrived >= n_least);
        if !(is_full || is_late && n_arrived >= n_least) {
            if !is_late {
                told.alarm = Some(Some(first + chief.timeout));
            }
            return;
        }
        let Some(chief) = self.chief.take() else { return };
        self.is_taken = true;
        if is_late {
            self.workers.iter_mut().filter(|worker| worker.is_awaited()).for_each(|worker| worker.n_missed += 1);
        }
        let step = self.step;
        let mut members = Vec::new();
        let mut weights = Vec::new();
        for (i, worker) in self.workers.iter_mut().enumerate().filter(|(_, worker)| worker.has_arrived) {
            worker.counts[0] += 1;
            members.extend([i as i64, step]);
            weights.push(1.0f32);
        }
        self.holdings.shrink(self.late.len() * LATE_BYTES);
        for (worker, of) in std::mem::take(&mut self.late) {
            members.extend([worker as i64, of]);
            let lag = step.saturating_sub(of).max(0) as f32;
            weights.push(if spec.late == Late::Scale { 1.0 / (1.0 + lag) } else { 1.0 });
        }
        let members = Shape::new(&[weights.len(), 2]).and_then(|shape| Tensor::from_vec(shape, members));
        told.push(chief.waiter, members.map(|members| vec![members, Tensor::vector(weights), Tensor::scalar(step)]));
        told.alarm = Some(None);
    }
}

impl Rings for Barrier {
    fn ring(self: Arc<Self>) {
        let mut told = Told::default();
        self.state.lock().serve(&self.spec, Instant::now(), &mut told);
        self.tell(told);
    }
}

fn cancelled() -> Error {
    Error::cancelled("the wait at the barrier was cancelled")
}

impl Waits for Barrier {
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool {
        let mut state = self.state.lock();
        let BarrierState { parked, chief, .. } = &mut *state;
        let waiters = parked.iter_mut().map(|(_, waiter)| waiter).chain(chief.as_mut().map(|chief| &mut chief.waiter));
        match waiters.into_iter().find(|waiter| waiter.id == id) {
            Some(waiter) => {
                waiter.attach(token, registration);
                true
            }
            None => false,
        }
    }

    /// A worker that gives up waiting has arrived nonetheless: its gradients are there.
    fn cancel(&self, id: u64) {
        let gone = {
            let mut state = self.state.lock();
            match state.parked.iter().position(|(_, waiter)| waiter.id == id) {
                Some(at) => Some(state.parked.swap_remove(at).1),
                None => state.chief.take_if(|chief| chief.waiter.id == id).map(|chief| chief.waiter),
            }
        };
        if let Some(waiter) = gone {
            waiter.finish(Err(cancelled()));
        }
    }
}

/// Those who still wait when a barrier is removed are told.
impl Drop for Barrier {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let parked = std::mem::take(&mut state.parked).into_iter().map(|(_, waiter)| waiter);
        let chief = state.chief.take().map(|chief| chief.waiter);
        parked.chain(chief).for_each(|waiter| waiter.finish(Err(cancelled())));
    }
}

impl Resource for Barrier {
    fn kind(&self) -> &'static str {
        "barrier"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Described for Barrier {
    type Spec = BarrierSpec;

    fn make(name: &Arc<str>, spec: &BarrierSpec, memory: Charge) -> Result<Arc<Barrier>> {
        let mut holdings = Holdings::new(memory);
        holdings.grow(spec.n_workers * size_of::<Worker>() + LOG * size_of::<[i64; 4]>())?;
        let state = BarrierState {
            step: 0,
            is_taken: false,
            is_closed: false,
            workers: filled(spec.n_workers, Worker::default(), "workers")?,
            late: Vec::new(),
            first: None,
            parked: Vec::new(),
            chief: None,
            log: VecDeque::new(),
            next_id: 0,
            holdings,
        };
        let alarm = Alarm::new("kolo-barrier");
        Ok(Arc::new(Barrier { name: name.clone(), spec: spec.clone(), state: Mutex::new(state), alarm }))
    }

    fn agree(&self, name: &str, spec: &BarrierSpec) -> Result<()> {
        match self.spec == *spec {
            true => Ok(()),
            false => Err(Error::invalid_argument(format!(
                "barrier '{name}' is {:?}, but requested was {spec:?}; all workers must agree",
                self.spec
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

    use kolo_core::Code;

    use super::*;

    /// Hung tests fail after this long.
    const LONG: Duration = Duration::from_secs(30);

    struct Play {
        barrier: Arc<Barrier>,
        token: Arc<CancelToken>,
    }

    type Heard = Receiver<Result<Vec<Tensor>>>;

    impl Play {
        fn new(n_workers: usize, late: Late) -> Play {
            let spec = BarrierSpec { n_workers, late };
            Play { barrier: Barrier::make(&"b".into(), &spec, Charge::NONE).unwrap(), token: CancelToken::new() }
        }

        fn done() -> (Done, Heard) {
            let (send, receive) = channel();
            let tell = move |outcome: Result<crate::Outcome>| drop(send.send(outcome.map(|outcome| outcome.outputs)));
            (Done::new(tell), receive)
        }

        fn arrive(&self, worker: i64, step: i64) -> Heard {
            let (done, heard) = Play::done();
            self.barrier.arrive(worker, step, &self.token, done);
            heard
        }

        fn wait(&self, share: f32, timeout_ms: i64) -> Heard {
            let (done, heard) = Play::done();
            self.barrier.wait(share, timeout_ms, &self.token, done);
            heard
        }

        fn counts(&self) -> Vec<i64> {
            self.barrier.report().unwrap()[4].data::<i64>().unwrap().to_vec()
        }
    }

    fn next_step(heard: &Heard) -> i64 {
        heard.recv_timeout(LONG).unwrap().unwrap()[0].scalar_value().unwrap()
    }

    fn members(heard: &Heard) -> (Vec<i64>, Vec<f32>) {
        let outputs = heard.recv_timeout(LONG).unwrap().unwrap();
        (outputs[0].data::<i64>().unwrap().to_vec(), outputs[1].data::<f32>().unwrap().to_vec())
    }

    fn is_silent(heard: &Heard) -> bool {
        heard.recv_timeout(Duration::ZERO).unwrap_err() == RecvTimeoutError::Timeout
    }

    #[test]
    fn a_round_ends_when_all_have_arrived() {
        let play = Play::new(2, Late::Drop);
        let chief = play.wait(0.5, 3_600_000);
        let first = play.arrive(1, 0);
        play.barrier.release(0);
        assert!(is_silent(&chief) && is_silent(&first));
        let second = play.arrive(0, 0);
        assert_eq!(members(&chief), (vec![0, 0, 1, 0], vec![1.0, 1.0]));
        assert!(is_silent(&first), "nobody goes on before the update is made");
        play.barrier.release(1);
        assert_eq!((next_step(&first), next_step(&second)), (1, 1));
        assert_eq!(play.counts(), [1, 0, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn after_the_timeout_a_share_is_enough_and_the_late_one_catches_up() {
        for (late, counted, weight) in [(Late::Drop, 1, None), (Late::Scale, 2, Some(0.5)), (Late::Queue, 3, Some(1.0))]
        {
            let play = Play::new(3, late);
            let chief = play.wait(0.6, 1);
            let waiting = [play.arrive(0, 0), play.arrive(2, 0)];
            // Two of three are more than 0.6; the alarm ends the round.
            assert_eq!(members(&chief), (vec![0, 0, 2, 0], vec![1.0, 1.0]));
            // Too late for the round, too early for the next one: goes on with everybody.
            let slow = play.arrive(1, 0);
            assert!(is_silent(&slow));
            play.barrier.release(1);
            assert!(waiting.iter().chain([&slow]).all(|heard| next_step(heard) == 1));
            assert_eq!(play.counts()[4 + counted], 1);
            // And one whose step is over goes on at once.
            play.barrier.release(2);
            assert_eq!(next_step(&play.arrive(1, 1)), 2);
            let log = play.barrier.report().unwrap()[5].data::<i64>().unwrap().to_vec();
            assert_eq!(log, [[1, 0, 0, counted as i64 - 1], [1, 1, 2, counted as i64 - 1]].concat());
            let chief = play.wait(1.0, 3_600_000);
            let all: Vec<Heard> = (0..3).map(|worker| play.arrive(worker, 2)).collect();
            let (found, weights) = members(&chief);
            match weight {
                None => assert_eq!(found, [0, 2, 1, 2, 2, 2]),
                Some(weight) => {
                    assert_eq!(found, [0, 2, 1, 2, 2, 2, 1, 0, 1, 1]);
                    // Two steps late, and one.
                    let expected = if weight == 1.0 { [1.0, 1.0] } else { [1.0 / 3.0, 0.5] };
                    assert_eq!(weights[3..], expected);
                }
            }
            play.barrier.release(3);
            assert!(all.iter().all(|heard| next_step(heard) == 3));
        }
    }

    #[test]
    fn the_share_is_waited_for_beyond_the_timeout() {
        let play = Play::new(4, Late::Drop);
        let chief = play.wait(0.75, 0);
        let waiting = [play.arrive(0, 0), play.arrive(1, 0)];
        assert!(is_silent(&chief), "two of four are too few");
        let third = play.arrive(3, 0);
        assert_eq!(members(&chief).1.len(), 3);
        play.barrier.release(1);
        assert!(waiting.iter().chain([&third]).all(|heard| next_step(heard) == 1));
    }

    #[test]
    fn who_has_arrived_can_be_read_and_mistakes_are_refused() {
        let play = Play::new(2, Late::Drop);
        play.barrier.release(5);
        let waits = play.arrive(1, 5);
        let report = play.barrier.report().unwrap();
        assert_eq!(report[0], Tensor::scalar(5i64));
        assert_eq!(report[1], Tensor::from([false, true]));
        assert_eq!(report[2], Tensor::from([-1i64, 5]));
        let ago = report[3].data::<f32>().unwrap();
        assert!(ago[0] == -1.0 && ago[1] >= 0.0);
        assert_eq!(play.arrive(2, 5).recv().unwrap().unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(play.arrive(-1, 5).recv().unwrap().unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(play.wait(f32::NAN, 1).recv().unwrap().unwrap_err().code(), Code::InvalidArgument);
        // A second chief takes over from the first.
        let old = play.wait(1.0, 10);
        let new = play.wait(1.0, 10);
        assert_eq!(old.recv().unwrap().unwrap_err().code(), Code::Aborted);
        // A worker that begins again takes its own place.
        let again = play.arrive(1, 5);
        assert_eq!(waits.recv().unwrap().unwrap_err().code(), Code::Aborted);
        play.token.cancel(Error::cancelled("stop"));
        assert_eq!(again.recv_timeout(LONG).unwrap().unwrap_err().code(), Code::Cancelled);
        assert_eq!(new.recv_timeout(LONG).unwrap().unwrap_err().code(), Code::Cancelled);
    }

    #[test]
    fn one_who_has_left_is_not_waited_for() {
        let play = Play::new(3, Late::Drop);
        let chief = play.wait(1.0, 3_600_000);
        let waiting = [play.arrive(0, 0), play.arrive(2, 0)];
        assert!(is_silent(&chief));
        play.barrier.leave(1).unwrap();
        assert_eq!(members(&chief).1.len(), 2);
        play.barrier.release(1);
        assert!(waiting.iter().all(|heard| next_step(heard) == 1));
        // It counts again when it comes back.
        let chief = play.wait(1.0, 3_600_000);
        let back = [play.arrive(1, 1), play.arrive(0, 1)];
        assert!(is_silent(&chief) && back.iter().all(is_silent));
        assert!(play.barrier.leave(3).is_err());
    }

    #[test]
    fn one_who_stays_away_is_not_waited_for_until_it_is_back() {
        let play = Play::new(3, Late::Drop);
        play.barrier.release(0);
        let round = |step: i64, timeout_ms: i64, workers: &[i64]| {
            let chief = play.wait(0.5, timeout_ms);
            let waiting: Vec<Heard> = workers.iter().map(|&worker| play.arrive(worker, step)).collect();
            let n_members = members(&chief).1.len();
            play.barrier.release(step + 1);
            assert!(waiting.iter().all(|heard| next_step(heard) == step + 1));
            n_members
        };
        for step in 0..4 {
            // The timeout ends the first rounds; from then on nobody waits for worker 1.
            assert_eq!(round(step, if step < 3 { 1 } else { 3_600_000 }, &[0, 2]), 2);
        }
        // It is back, late at first, and takes part in the next round.
        assert_eq!(next_step(&play.arrive(1, 0)), 4);
        let chief = play.wait(0.5, 3_600_000);
        let waiting = [play.arrive(0, 4), play.arrive(2, 4)];
        assert!(is_silent(&chief) && waiting.iter().all(is_silent));
        play.arrive(1, 4);
        assert_eq!(members(&chief).1.len(), 3);
        play.barrier.release(5);
        // The least share is of all workers, also of those that stay away.
        for step in 5..8 {
            assert_eq!(round(step, 1, &[0, 2]), 2);
        }
        let chief = play.wait(1.0, 0);
        let waiting = [play.arrive(0, 8), play.arrive(2, 8)];
        assert!(is_silent(&chief) && waiting.iter().all(is_silent));
    }

    #[test]
    fn the_end_is_heard_by_all_and_a_release_begins_anew() {
        let play = Play::new(2, Late::Drop);
        let (chief, worker) = (play.wait(1.0, 10), play.arrive(0, 0));
        play.barrier.close();
        for heard in [chief, worker, play.arrive(1, 0)] {
            assert_eq!(heard.recv_timeout(LONG).unwrap().unwrap_err().code(), Code::OutOfRange);
        }
        play.barrier.release(3);
        assert!(is_silent(&play.arrive(1, 3)));
    }

    #[test]
    fn a_barrier_that_lost_its_step_takes_the_workers_word() {
        let play = Play::new(2, Late::Drop);
        let old = play.arrive(0, 0);
        let new = play.arrive(1, 7);
        assert_eq!(next_step(&old), 7);
        assert!(is_silent(&new));
        drop(play);
        assert_eq!(new.recv_timeout(LONG).unwrap().unwrap_err().code(), Code::Cancelled);
    }
}
