//! `MutexV2`, `MutexLock`, `ConsumeMutexLock`: only one step at a time goes on between the last two.
//!
//! A lock is a value. It is given back when it is consumed, or when the last copy of it is gone, so that a step that fails
//! does not keep it.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kolo_core::{Error, ResourceHandle, Result, Tensor};
use kolo_device::Charge;
use kolo_graph::{Effects, Gradient, HostRule, OpDef, OwnedState, shape_fns};

use crate::op::{Gpu, KernelMaker, Op, cpu_any, cpu_made};
use crate::queue::source::{Described, Source, object};
use crate::queue::wait::{Waiter, Waits, watch};
use crate::resource::Resource;
use crate::{AsyncKernel, CancelToken, Cost, Done, KernelCtx, Outcome, Registration};

pub(crate) static MUTEX_V2: Op = Op {
    def: OpDef {
        name: "MutexV2",
        signature: "() -> (resource:resource) ; container:string=\"\", shared_name:string=\"\"",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a handle has no inputs"),
        stateful: true,
        effects: Effects::Owns(OwnedState::Other),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|init| Source::<Mutex>::make(init, ())))],
    gpu: Gpu::Host,
    cost: Cost::Inline,
};

pub(crate) static MUTEX_LOCK: Op = Op {
    def: OpDef {
        name: "MutexLock",
        signature: "(mutex:resource) -> (mutex_lock:variant)",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a lock is no number"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Async(|_| Ok(Box::new(Lock))))],
    gpu: Gpu::OBJECTS,
    cost: Cost::Inline,
};

pub(crate) static CONSUME_MUTEX_LOCK: Op = Op {
    def: OpDef {
        name: "ConsumeMutexLock",
        signature: "(mutex_lock:variant) -> ()",
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(consume)],
    gpu: Gpu::OBJECTS,
    cost: Cost::Inline,
};

/// A mutex of the graph.
struct Mutex {
    name: Arc<str>,
    state: parking_lot::Mutex<MutexState>,
}

#[derive(Default)]
struct MutexState {
    is_locked: bool,
    next_id: u64,
    line: VecDeque<Waiter>,
}

/// Held while somebody may go on. Gives the mutex back once.
struct Guard {
    mutex: Arc<Mutex>,
    is_released: AtomicBool,
}

impl Guard {
    fn release(&self) {
        if !self.is_released.swap(true, Ordering::AcqRel) {
            self.mutex.unlock();
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.release();
    }
}

impl Mutex {
    /// What a lock looks like in a graph.
    fn lock_value(self: &Arc<Self>) -> Outcome {
        let guard = Arc::new(Guard { mutex: self.clone(), is_released: AtomicBool::new(false) });
        let handle =
            ResourceHandle { device: "".into(), container: "".into(), name: self.name.clone(), object: Some(guard) };
        vec![Tensor::variant(handle)].into()
    }

    fn lock(self: &Arc<Self>, cancel: &Arc<CancelToken>, done: Done) {
        let id = {
            let mut state = self.state.lock();
            if !state.is_locked {
                state.is_locked = true;
                drop(state);
                return done.finish(Ok(self.lock_value()));
            }
            state.next_id += 1;
            let id = state.next_id;
            state.line.push_back(Waiter::new(id, done));
            id
        };
        watch(self, id, cancel);
    }

    /// Hands the lock on to the next in line.
    fn unlock(self: &Arc<Self>) {
        let next = {
            let mut state = self.state.lock();
            let next = state.line.pop_front();
            state.is_locked = next.is_some();
            next
        };
        if let Some(waiter) = next {
            waiter.finish(Ok(self.lock_value()));
        }
    }
}

impl Waits for Mutex {
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool {
        match self.state.lock().line.iter_mut().find(|waiter| waiter.id == id) {
            Some(waiter) => {
                waiter.attach(token, registration);
                true
            }
            None => false,
        }
    }

    fn cancel(&self, id: u64) {
        let gone = {
            let mut state = self.state.lock();
            let at = state.line.iter().position(|waiter| waiter.id == id);
            at.and_then(|at| state.line.remove(at))
        };
        if let Some(waiter) = gone {
            waiter.finish(Err(Error::cancelled("Lock acquisition cancelled.")));
        }
    }
}

impl Resource for Mutex {
    fn kind(&self) -> &'static str {
        "mutex"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Described for Mutex {
    type Spec = ();
    fn make(name: &Arc<str>, (): &(), _: Charge) -> Result<Arc<Mutex>> {
        Ok(Arc::new(Mutex { name: name.clone(), state: parking_lot::Mutex::default() }))
    }
    fn agree(&self, _: &str, (): &()) -> Result<()> {
        Ok(())
    }
}

struct Lock;

impl AsyncKernel for Lock {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        match object::<Mutex>(ctx, 0) {
            Ok(mutex) => mutex.lock(ctx.step.cancel(), done),
            Err(error) => done.finish(Err(error)),
        }
    }
}

fn consume(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let lock = ctx.take_input(0)?;
    let handle = lock.resource()?;
    match handle.object.clone().map(|object| object.downcast::<Guard>()) {
        Some(Ok(guard)) => {
            guard.release();
            Ok(())
        }
        _ => Err(Error::invalid_argument("Expected a mutex lock value, found something else")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kolo_core::{Code, DType};

    use super::*;
    use crate::testing::Evaluation;

    #[test]
    fn a_lock_is_given_back_by_being_consumed_or_lost() {
        let g = crate::graph();
        let mutex = g.op("MutexV2").attr("shared_name", "m").out();
        let lock = g.op("MutexLock").input(mutex).out();
        assert_eq!(lock.dtype(), DType::Variant);
        let consume = g.op("ConsumeMutexLock").input(lock).build();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[consume], &[]).unwrap();
        run.run_targets(&[consume], &[]).unwrap();
        // A lock that nobody consumes goes with the step.
        run.run_targets(&[lock.operation()], &[]).unwrap();
        run.run_targets(&[consume], &[]).unwrap();
    }

    #[test]
    fn others_wait_in_line() {
        let mutex = <Mutex as Described>::make(&"m".into(), &(), Charge::NONE).unwrap();
        let lock = |cancel: &Arc<CancelToken>| {
            let (sender, receiver) = mpsc::channel();
            mutex.lock(cancel, Done::new(move |outcome| drop(sender.send(outcome))));
            receiver
        };
        let (cancel, other) = (CancelToken::new(), CancelToken::new());
        let first = lock(&cancel).try_recv().unwrap().unwrap();
        let (second, third) = (lock(&other), lock(&cancel));
        assert!(second.try_recv().is_err() && third.try_recv().is_err());
        other.cancel(Error::cancelled("the step ended"));
        assert_eq!(second.try_recv().unwrap().unwrap_err().code(), Code::Cancelled);
        drop(first);
        let held = third.try_recv().unwrap().unwrap();
        assert!(lock(&cancel).try_recv().is_err(), "somebody has it");
        drop(held);
    }
}
