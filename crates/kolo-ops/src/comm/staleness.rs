//! `KoloStaleness` and its ops: how old the variables were from which workers computed their gradients, and a limit to how
//! far one worker may be ahead of another.
//!
//! A worker's clock counts its updates. The slowest of those who take part holds back the others once they are `bound`
//! updates ahead; a worker that is silent for longer than a lease does not count, so that one that died holds up nobody.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Error, PartialShape, Result, Shape, Tensor};
use kolo_device::Charge;
use kolo_graph::shape_fns;
use parking_lot::Mutex;

use super::alarm::{Alarm, Rings};
use super::barrier_ops::{check_worker, maker, n_workers, stateful};
use crate::holdings::Holdings;
use crate::memory::filled;
use crate::op::{KernelMaker, Op, cpu_any, cpu_made};
use crate::queue::source::{Described, Source, object};
use crate::queue::wait::{Waiter, Waits, watch};
use crate::{AsyncKernel, CancelToken, Done, KernelCtx, Registration, Resource};

/// The classes of a histogram: 0 to 30, and all above.
const CLASSES: usize = 32;

/// What all who name the object must agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Spec {
    n_workers: usize,
    lease: Duration,
}

struct Staleness {
    spec: Spec,
    state: Mutex<ClockState>,
    alarm: Alarm,
}

struct ClockState {
    workers: Vec<Worker>,
    waiting: Vec<Waiting>,
    next_id: u64,
    /// The workers.
    _holdings: Holdings,
}

#[derive(Clone)]
struct Worker {
    clock: i64,
    /// When it was last heard of; at first, when the object was made.
    heard: Instant,
    /// It said that it makes no more updates.
    has_left: bool,
    histogram: [i64; CLASSES],
}

struct Waiting {
    waiter: Waiter,
    worker: usize,
    bound: i64,
}

impl Staleness {
    /// A worker has made an update with gradients from variables of global step `pulled`, at global step `pushed`.
    fn record(self: &Arc<Self>, worker: i64, pulled: i64, pushed: i64) -> Result<()> {
        let worker = check_worker(worker, self.spec.n_workers)?;
        let now = Instant::now();
        let class = usize::try_from(pushed.saturating_sub(pulled)).unwrap_or(0).min(CLASSES - 1);
        {
            let mut state = self.state.lock();
            // One that was given up and comes back begins where the others are, or they would wait for it to catch up.
            if state.is_gone(worker, now, self.spec.lease)
                && let Some(slowest) = state.slowest(now, self.spec.lease)
            {
                let own = &mut state.workers[worker];
                own.clock = own.clock.max(slowest);
            }
            let own = &mut state.workers[worker];
            own.clock += 1;
            own.heard = now;
            own.has_left = false;
            own.histogram[class] += 1;
        }
        self.serve();
        Ok(())
    }

    /// A worker makes no more updates, until it does: the others need not wait for it.
    fn leave(self: &Arc<Self>, worker: i64) -> Result<()> {
        let worker = check_worker(worker, self.spec.n_workers)?;
        self.state.lock().workers[worker].has_left = true;
        self.serve();
        Ok(())
    }

    /// Waits until the worker is at most `bound` updates ahead of the slowest.
    fn wait(self: &Arc<Self>, worker: i64, bound: i64, cancel: &Arc<CancelToken>, done: Done) {
        let worker = match check_worker(worker, self.spec.n_workers) {
            Ok(_) if bound < 0 => {
                let text = format!("a staleness bound is 0 or more, not {bound}");
                return done.finish(Err(Error::invalid_argument(text)));
            }
            Ok(worker) => worker,
            Err(error) => return done.finish(Err(error)),
        };
        let id = {
            let mut state = self.state.lock();
            state.next_id += 1;
            let id = state.next_id;
            state.waiting.push(Waiting { waiter: Waiter::new(id, done), worker, bound });
            id
        };
        self.serve();
        watch(self, id, cancel);
    }

    /// Lets those go on who may.
    fn serve(self: &Arc<Self>) {
        let (free, next) = {
            let mut state = self.state.lock();
            let now = Instant::now();
            // Those who wait are alive, whatever their last update was.
            for i in 0..state.waiting.len() {
                let worker = state.waiting[i].worker;
                state.workers[worker].heard = now;
            }
            let slowest = state.slowest(now, self.spec.lease);
            let ClockState { waiting, workers, .. } = &mut *state;
            let may_go = |waits: &mut Waiting| {
                slowest.is_none_or(|slowest| workers[waits.worker].clock - slowest <= waits.bound)
            };
            let free: Vec<Waiting> = waiting.extract_if(.., may_go).collect();
            let is_held = !waiting.is_empty();
            // Time alone can end a wait: when the slowest is given up.
            let next = workers.iter().map(|worker| worker.heard + self.spec.lease).filter(|at| *at > now).min();
            (free, next.filter(|_| is_held))
        };
        for waits in free {
            waits.waiter.finish(Ok(Vec::new().into()));
        }
        if let Err(error) = self.alarm.set(self, next) {
            let waiting = std::mem::take(&mut self.state.lock().waiting);
            waiting.into_iter().for_each(|waits| waits.waiter.finish(Err(error.clone())));
        }
    }

    fn report(&self) -> Result<[Tensor; 3]> {
        let state = self.state.lock();
        let now = Instant::now();
        let histogram: Vec<i64> = state.workers.iter().flat_map(|worker| worker.histogram).collect();
        let ago = |worker: &Worker| (now - worker.heard).as_secs_f32();
        Ok([
            Tensor::from_vec(Shape::new(&[state.workers.len(), CLASSES])?, histogram)?,
            Tensor::vector(state.workers.iter().map(|worker| worker.clock).collect::<Vec<i64>>()),
            Tensor::vector(state.workers.iter().map(ago).collect::<Vec<f32>>()),
        ])
    }
}

impl ClockState {
    fn is_gone(&self, worker: usize, now: Instant, lease: Duration) -> bool {
        let worker = &self.workers[worker];
        worker.has_left || now.saturating_duration_since(worker.heard) >= lease
    }

    /// The least clock of those who take part.
    fn slowest(&self, now: Instant, lease: Duration) -> Option<i64> {
        let there = (0..self.workers.len()).filter(|&worker| !self.is_gone(worker, now, lease));
        there.map(|worker| self.workers[worker].clock).min()
    }
}

impl Rings for Staleness {
    fn ring(self: Arc<Self>) {
        self.serve();
    }
}

fn cancelled() -> Error {
    Error::cancelled("the wait for slower workers was cancelled")
}

impl Waits for Staleness {
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool {
        match self.state.lock().waiting.iter_mut().find(|waits| waits.waiter.id == id) {
            Some(waits) => {
                waits.waiter.attach(token, registration);
                true
            }
            None => false,
        }
    }

    fn cancel(&self, id: u64) {
        let gone = {
            let mut state = self.state.lock();
            let at = state.waiting.iter().position(|waits| waits.waiter.id == id);
            at.map(|at| state.waiting.swap_remove(at))
        };
        if let Some(gone) = gone {
            gone.waiter.finish(Err(cancelled()));
        }
    }
}

/// Those who still wait when the object is removed are told.
impl Drop for Staleness {
    fn drop(&mut self) {
        let waiting = std::mem::take(&mut self.state.get_mut().waiting);
        waiting.into_iter().for_each(|waits| waits.waiter.finish(Err(cancelled())));
    }
}

impl Resource for Staleness {
    fn kind(&self) -> &'static str {
        "staleness"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Described for Staleness {
    type Spec = Spec;

    fn make(_: &Arc<str>, spec: &Spec, memory: Charge) -> Result<Arc<Staleness>> {
        let mut holdings = Holdings::new(memory);
        holdings.grow(spec.n_workers * size_of::<Worker>())?;
        let worker = Worker { clock: 0, heard: Instant::now(), has_left: false, histogram: [0; CLASSES] };
        let workers = filled(spec.n_workers, worker, "workers")?;
        let state = ClockState { workers, waiting: Vec::new(), next_id: 0, _holdings: holdings };
        Ok(Arc::new(Staleness { spec: spec.clone(), state: Mutex::new(state), alarm: Alarm::new("kolo-staleness") }))
    }

    fn agree(&self, name: &str, spec: &Spec) -> Result<()> {
        match self.spec == *spec {
            true => Ok(()),
            false => Err(Error::invalid_argument(format!(
                "staleness '{name}' is {:?}, but requested was {spec:?}; all workers must agree",
                self.spec
            ))),
        }
    }
}

pub(crate) static KOLO_STALENESS: Op = maker(
    "KoloStaleness",
    "() -> (handle:resource) ; n_workers:int>=1, lease_ms:int=60000, container:string=\"\", shared_name:string=\"\"",
    shape_fns::scalars,
    &[cpu_made(KernelMaker::Object(|init| {
        /// A year is as good as for ever, and no time overflows.
        const MOST: u64 = 365 * 24 * 3_600_000;
        let lease = init.attrs().int("lease_ms")?;
        let lease =
            u64::try_from(lease).map_err(|_| Error::invalid_argument(format!("lease_ms is 0 or more, not {lease}")))?;
        let lease = Duration::from_millis(lease.min(MOST));
        Source::<Staleness>::make(init, Spec { n_workers: n_workers(init)?, lease })
    }))],
);

pub(crate) static KOLO_STALENESS_RECORD: Op = stateful(
    "KoloStalenessRecord",
    "(handle:resource, worker:int64, pulled:int64, pushed:int64) -> ()",
    shape_fns::unknown,
    &[cpu_any(|ctx| {
        let (worker, pulled, pushed) = (ctx.scalar::<i64>(1)?, ctx.scalar::<i64>(2)?, ctx.scalar::<i64>(3)?);
        object::<Staleness>(ctx, 0)?.record(worker, pulled, pushed)
    })],
);

pub(crate) static KOLO_STALENESS_LEAVE: Op = stateful(
    "KoloStalenessLeave",
    "(handle:resource, worker:int64) -> ()",
    shape_fns::unknown,
    &[cpu_any(|ctx| {
        let worker = ctx.scalar::<i64>(1)?;
        object::<Staleness>(ctx, 0)?.leave(worker)
    })],
);

pub(crate) static KOLO_STALENESS_WAIT: Op = stateful(
    "KoloStalenessWait",
    "(handle:resource, worker:int64, bound:int64) -> ()",
    shape_fns::unknown,
    &[cpu_made(KernelMaker::Async(|_| Ok(Box::new(Wait))))],
);

pub(crate) static KOLO_STALENESS_STATE: Op = stateful(
    "KoloStalenessState",
    "(handle:resource) -> (histogram:int64, clocks:int64, seconds_ago:float)",
    |_| {
        let histogram = PartialShape::new(&[None, Some(CLASSES)]);
        Ok(vec![histogram, PartialShape::of_rank(1), PartialShape::of_rank(1)])
    },
    &[cpu_any(|ctx| {
        let report = object::<Staleness>(ctx, 0)?.report()?;
        report.into_iter().enumerate().for_each(|(i, tensor)| ctx.set_output(i, tensor));
        Ok(())
    })],
);

struct Wait;

impl AsyncKernel for Wait {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let arguments = || Ok((object::<Staleness>(ctx, 0)?, ctx.scalar::<i64>(1)?, ctx.scalar::<i64>(2)?));
        match arguments() {
            Ok((staleness, worker, bound)) => staleness.wait(worker, bound, ctx.step.cancel(), done),
            Err(error) => done.finish(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use kolo_core::Code;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn make(n_workers: usize, lease: Duration) -> Arc<Staleness> {
        Staleness::make(&"s".into(), &Spec { n_workers, lease }, Charge::NONE).unwrap()
    }

    fn wait(staleness: &Arc<Staleness>, worker: i64, bound: i64, token: &Arc<CancelToken>) -> Receiver<Result<()>> {
        let (send, receive) = channel();
        staleness.wait(worker, bound, token, Done::new(move |outcome| drop(send.send(outcome.map(|_| ())))));
        receive
    }

    #[test]
    fn gradients_are_counted_by_age() {
        let staleness = make(2, LONG);
        for (worker, pulled, pushed) in [(0, 0, 0), (0, 1, 3), (1, 5, 4), (1, 0, 1000)] {
            staleness.record(worker, pulled, pushed).unwrap();
        }
        let [histogram, clocks, ago] = staleness.report().unwrap();
        let histogram = histogram.data::<i64>().unwrap();
        assert_eq!((histogram[0], histogram[2]), (1, 1));
        assert_eq!((histogram[CLASSES], histogram[2 * CLASSES - 1]), (1, 1));
        assert_eq!(histogram.iter().sum::<i64>(), 4);
        assert_eq!(clocks, Tensor::from([2i64, 2]));
        assert!(ago.data::<f32>().unwrap().iter().all(|&ago| (0.0..30.0).contains(&ago)));
        assert_eq!(staleness.record(2, 0, 0).unwrap_err().code(), Code::InvalidArgument);
    }

    #[test]
    fn one_who_is_ahead_waits_for_the_slowest() {
        let staleness = make(2, Duration::from_secs(3600));
        let token = CancelToken::new();
        for _ in 0..2 {
            staleness.record(0, 0, 0).unwrap();
        }
        assert!(wait(&staleness, 0, 2, &token).try_recv().is_ok(), "two ahead are allowed");
        staleness.record(0, 0, 0).unwrap();
        let waits = wait(&staleness, 0, 2, &token);
        assert!(waits.try_recv().is_err());
        staleness.record(1, 0, 0).unwrap();
        waits.recv_timeout(LONG).unwrap().unwrap();
        staleness.record(0, 0, 0).unwrap();
        let waits = wait(&staleness, 0, 2, &token);
        assert!(waits.try_recv().is_err());
        staleness.leave(1).unwrap();
        waits.recv_timeout(LONG).unwrap().unwrap();
        // Back again, it is where the others are, and one update further.
        staleness.record(1, 0, 0).unwrap();
        assert_eq!(staleness.report().unwrap()[1], Tensor::from([4i64, 5]));
        for _ in 0..4 {
            staleness.record(0, 0, 0).unwrap();
        }
        let waits = wait(&staleness, 0, 2, &token);
        token.cancel(Error::cancelled("stop"));
        assert_eq!(waits.recv_timeout(LONG).unwrap().unwrap_err().code(), Code::Cancelled);
        assert!(wait(&staleness, 0, -1, &CancelToken::new()).recv().unwrap().is_err());
    }

    #[test]
    fn one_who_is_silent_is_given_up_and_comes_back_where_the_others_are() {
        let staleness = make(2, Duration::from_millis(5));
        for _ in 0..10 {
            staleness.record(0, 0, 0).unwrap();
        }
        // Nothing but the clock ends this wait.
        wait(&staleness, 0, 0, &CancelToken::new()).recv_timeout(LONG).unwrap().unwrap();
        staleness.record(0, 0, 0).unwrap();
        staleness.record(1, 0, 0).unwrap();
        let [_, clocks, _] = staleness.report().unwrap();
        let clocks = clocks.data::<i64>().unwrap().to_vec();
        assert!(clocks[0] == 11 && clocks[1] >= 1, "{clocks:?}");
    }
}
