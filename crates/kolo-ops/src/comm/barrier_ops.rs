//! `KoloBarrier` and the ops on it; see [`super::barrier`] for what they do.

use kolo_core::{Error, PartialShape, Result};
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, OwnedState, ShapeFn, shape_fns};

use super::barrier::{Barrier, BarrierSpec, Late};
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, KernelMaker, Op, cpu_any, cpu_made};
use crate::queue::source::{Source, object};
use crate::{AsyncKernel, Cost, Done, KernelCtx};

/// The most workers that one object counts.
const MOST_WORKERS: usize = 1 << 16;

/// A worker's number, which must be one of `n`.
pub(super) fn check_worker(worker: i64, n: usize) -> Result<usize> {
    usize::try_from(worker)
        .ok()
        .filter(|&worker| worker < n)
        .ok_or_else(|| Error::invalid_argument(format!("there is no worker {worker}: there are {n}, from 0 on")))
}

/// The number of workers that an op names.
pub(super) fn n_workers(init: &KernelInit<'_>) -> Result<usize> {
    let n = init.attrs().int("n_workers")?;
    usize::try_from(n)
        .ok()
        .filter(|n| (1..=MOST_WORKERS).contains(n))
        .ok_or_else(|| Error::invalid_argument(format!("n_workers is {n}, not from 1 to {MOST_WORKERS}")))
}

/// An op on an object of this folder.
pub(super) const fn stateful(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    kernels: &'static [KernelDef],
) -> Op {
    let gradient = Gradient::None("what workers agree on does not depend on a graph");
    let def = OpDef { name, signature, shape, gradient, stateful: true, effects: Effects::Uses, ..OpDef::BASE };
    Op { def, kernels, gpu: Gpu::OBJECTS, cost: Cost::Inline }
}

/// An op that makes such an object.
pub(super) const fn maker(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    kernels: &'static [KernelDef],
) -> Op {
    stateful(name, signature, shape, kernels).effects(Effects::Owns(OwnedState::Other))
}

pub(crate) static KOLO_BARRIER: Op = maker(
    "KoloBarrier",
    "() -> (handle:resource) ; n_workers:int>=1, late:string{\"drop\",\"scale\",\"queue\"}=\"drop\", container:string=\"\", \
     shared_name:string=\"\"",
    shape_fns::scalars,
    &[cpu_made(KernelMaker::Object(|init| {
        let late = match init.attrs().str("late")? {
            "scale" => Late::Scale,
            "queue" => Late::Queue,
            _ => Late::Drop,
        };
        Source::<Barrier>::make(init, BarrierSpec { n_workers: n_workers(init)?, late })
    }))],
);

pub(crate) static KOLO_BARRIER_ARRIVE: Op = stateful(
    "KoloBarrierArrive",
    "(handle:resource, worker:int64, step:int64) -> (next_step:int64)",
    shape_fns::scalars,
    &[cpu_made(KernelMaker::Async(|_| Ok(Box::new(Arrive))))],
);

pub(crate) static KOLO_BARRIER_WAIT: Op = stateful(
    "KoloBarrierWait",
    "(handle:resource, share:float, timeout_ms:int64) -> (members:int64, weights:float, step:int64)",
    |_| Ok(vec![PartialShape::new(&[None, Some(2)]), PartialShape::of_rank(1), PartialShape::scalar()]),
    &[cpu_made(KernelMaker::Async(|_| Ok(Box::new(Wait))))],
);

pub(crate) static KOLO_BARRIER_RELEASE: Op = stateful(
    "KoloBarrierRelease",
    "(handle:resource, step:int64) -> ()",
    shape_fns::unknown,
    &[cpu_any(|ctx| {
        let step = ctx.scalar::<i64>(1)?;
        object::<Barrier>(ctx, 0)?.release(step);
        Ok(())
    })],
);

pub(crate) static KOLO_BARRIER_LEAVE: Op = stateful(
    "KoloBarrierLeave",
    "(handle:resource, worker:int64) -> ()",
    shape_fns::unknown,
    &[cpu_any(|ctx| {
        let worker = ctx.scalar::<i64>(1)?;
        object::<Barrier>(ctx, 0)?.leave(worker)
    })],
);

pub(crate) static KOLO_BARRIER_CLOSE: Op = stateful(
    "KoloBarrierClose",
    "(handle:resource) -> ()",
    shape_fns::unknown,
    &[cpu_any(|ctx| {
        object::<Barrier>(ctx, 0)?.close();
        Ok(())
    })],
);

pub(crate) static KOLO_BARRIER_STATE: Op = stateful(
    "KoloBarrierState",
    "(handle:resource) -> (step:int64, has_arrived:bool, last_step:int64, seconds_ago:float, counts:int64, late:int64)",
    report_shapes,
    &[cpu_any(|ctx| {
        let report = object::<Barrier>(ctx, 0)?.report()?;
        report.into_iter().enumerate().for_each(|(i, tensor)| ctx.set_output(i, tensor));
        Ok(())
    })],
);

fn report_shapes(_: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let per_worker = || PartialShape::of_rank(1);
    let four = || PartialShape::new(&[None, Some(4)]);
    Ok(vec![PartialShape::scalar(), per_worker(), per_worker(), per_worker(), four(), four()])
}

struct Arrive;

impl AsyncKernel for Arrive {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let arguments = || Ok((object::<Barrier>(ctx, 0)?, ctx.scalar::<i64>(1)?, ctx.scalar::<i64>(2)?));
        match arguments() {
            Ok((barrier, worker, step)) => barrier.arrive(worker, step, ctx.step.cancel(), done),
            Err(error) => done.finish(Err(error)),
        }
    }
}

struct Wait;

impl AsyncKernel for Wait {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let arguments = || Ok((object::<Barrier>(ctx, 0)?, ctx.scalar::<f32>(1)?, ctx.scalar::<i64>(2)?));
        match arguments() {
            Ok((barrier, share, timeout)) => barrier.wait(share, timeout, ctx.step.cancel(), done),
            Err(error) => done.finish(Err(error)),
        }
    }
}
