//! `KoloGradientStore` and its ops: the gradients of one variable, kept apart by worker and step until a chief says which of
//! them make an update.
//!
//! [`super::barrier`] decides once for all variables; so an update is made of the same workers' gradients everywhere. A store
//! keeps the last two gradients of each worker: the one of this round, and one that is late.

use std::any::Any;
use std::sync::Arc;

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::Charge;
use kolo_device::cpu::IntraPool;
use kolo_graph::{InferCtx, shape_fns};
use parking_lot::Mutex;

use super::barrier_ops::{check_worker, maker, n_workers, stateful};
use crate::holdings::{Holdings, Measured};
use crate::math::number::Number;
use crate::op::{KernelMaker, Op, cpu_any, cpu_made};
use crate::queue::source::{Described, Source, object};
use crate::state::number::combine;
use crate::{KernelCtx, Resource};

/// How many gradients of a worker are kept.
const KEPT: usize = 2;

/// What all who name a store must agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StoreSpec {
    n_workers: usize,
    dtype: DType,
    shape: PartialShape,
}

struct Store {
    name: Arc<str>,
    spec: StoreSpec,
    /// Where means lie.
    memory: Charge,
    kept: Mutex<KeptGradients>,
}

struct KeptGradients {
    /// In the order in which they came.
    entries: Vec<Entry>,
    holdings: Holdings,
}

struct Entry {
    worker: usize,
    step: i64,
    gradient: Gradient,
}

enum Gradient {
    Dense(Tensor),
    Rows { indices: Tensor, values: Tensor },
}

impl Gradient {
    /// As a store counts it, with its place in the list, which has room for up to twice as many.
    fn measured(&self) -> Measured {
        let place = 2 * size_of::<Entry>();
        match self {
            Gradient::Dense(values) => Measured::new(place, std::slice::from_ref(values)),
            Gradient::Rows { indices, values } => Measured::new(place, &[indices.clone(), values.clone()]),
        }
    }
}

impl KeptGradients {
    fn remove(&mut self, at: usize) -> Entry {
        let entry = self.entries.remove(at);
        self.holdings.remove(&entry.gradient.measured());
        entry
    }
}

impl Store {
    fn push(&self, worker: i64, step: i64, gradient: Gradient) -> Result<()> {
        let worker = check_worker(worker, self.spec.n_workers)?;
        let dtype = match &gradient {
            Gradient::Dense(values) => {
                if !self.spec.shape.admits(values.shape()) {
                    return Err(self.mismatch(values.shape()));
                }
                values.dtype()
            }
            Gradient::Rows { indices, values } => {
                self.check_rows(indices, values)?;
                values.dtype()
            }
        };
        if dtype != self.spec.dtype {
            let text = format!("gradients of '{}' are {}, found {dtype}", self.name, self.spec.dtype);
            return Err(Error::invalid_argument(text));
        }
        let part = gradient.measured();
        let mut kept = self.kept.lock();
        // First of all: if there is no memory for it, those that it replaces stay.
        kept.holdings.add(&part)?;
        // A step that is pushed again replaces what was there.
        if let Some(at) = kept.entries.iter().position(|entry| entry.worker == worker && entry.step == step) {
            kept.remove(at);
        }
        let n = kept.entries.iter().filter(|entry| entry.worker == worker).count();
        if n >= KEPT
            && let Some(at) = kept.entries.iter().position(|entry| entry.worker == worker)
        {
            kept.remove(at);
        }
        kept.entries.push(Entry { worker, step, gradient });
        Ok(())
    }

    fn check_rows(&self, indices: &Tensor, values: &Tensor) -> Result<()> {
        let (&[n], Some((&n_rows, row))) = (indices.shape().dims(), values.shape().dims().split_first()) else {
            return Err(Error::invalid_argument(
                "rows of a gradient are a vector of indices and values of rank 1 or more",
            ));
        };
        let whole = PartialShape::of_rank(1).concat(&PartialShape::from(&Shape::new(row)?));
        if n != n_rows || self.spec.shape.merge(&whole).is_err() {
            return Err(self.mismatch(values.shape()));
        }
        let limit = self.spec.shape.dim(0).map_or(i64::MAX, |rows| rows as i64);
        match indices.data::<i64>()?.iter().find(|&&index| index < 0 || index >= limit) {
            Some(index) => Err(Error::invalid_argument(format!("row {index} is not in [0, {limit})"))),
            None => Ok(()),
        }
    }

    fn mismatch(&self, found: &Shape) -> Error {
        let text = format!("gradients of '{}' have shape {}, found {found}", self.name, self.spec.shape);
        Error::invalid_argument(text)
    }

    /// The gradients of these workers and steps, which the store then does not have any more, with their weights: shares of
    /// one. Also what `room` gives for them: memory for what is made of them. If it fails, the store keeps them.
    fn take<R>(
        &self,
        members: &Tensor,
        weights: &Tensor,
        room: impl FnOnce(&[&Gradient]) -> Result<R>,
    ) -> Result<(Vec<(Gradient, f64)>, R)> {
        let (members, weights) = (members.data::<i64>()?, weights.data::<f32>()?);
        let total: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
        let is_sound = weights.iter().all(|weight| weight.is_finite() && *weight >= 0.0) && total > 0.0;
        if members.len() != weights.len().saturating_mul(2) || !is_sound {
            return Err(Error::invalid_argument(format!(
                "members are pairs of worker and step with a weight each, found {} numbers and weights {weights:?}",
                members.len()
            )));
        }
        let mut kept = self.kept.lock();
        let mut places: Vec<usize> = Vec::with_capacity(weights.len());
        for member in members.chunks_exact(2) {
            let is_it = |entry: &Entry| entry.worker as i64 == member[0] && entry.step == member[1];
            let Some(at) = kept.entries.iter().position(is_it).filter(|at| !places.contains(at)) else {
                return Err(Error::aborted(format!(
                    "the gradient of '{}' by worker {} for step {} is gone: its server was restarted, or the worker began again",
                    self.name, member[0], member[1]
                )));
            };
            places.push(at);
        }
        let gradients: Vec<&Gradient> = places.iter().map(|&at| &kept.entries[at].gradient).collect();
        let room = room(&gradients)?;
        let mut taken = Vec::with_capacity(places.len());
        for (i, &weight) in weights.iter().enumerate() {
            // Those behind one that was removed have moved up.
            let at = places[i] - places[..i].iter().filter(|&&before| before < places[i]).count();
            taken.push((kept.remove(at).gradient, f64::from(weight) / total));
        }
        Ok((taken, room))
    }

    /// Memory for the mean of whole gradients.
    fn room_for_mean(&self, gradients: &[&Gradient]) -> Result<Tensor> {
        let mut shape: Option<&Shape> = None;
        for gradient in gradients {
            let Gradient::Dense(values) = gradient else { return Err(mixed()) };
            if let Some(shape) = shape.filter(|shape| *shape != values.shape()) {
                let text = format!("gradients of shapes {shape} and {} meet", values.shape());
                return Err(Error::invalid_argument(text));
            }
            shape = Some(values.shape());
        }
        let shape = shape.ok_or_else(|| Error::internal("there is no gradient to take"))?;
        self.memory.tensor(self.spec.dtype, shape.clone())
    }

    /// Memory for all rows of gradients and their indices.
    fn room_for_rows(&self, gradients: &[&Gradient]) -> Result<[Tensor; 2]> {
        let (mut n, mut row): (usize, Option<&[usize]>) = (0, None);
        for gradient in gradients {
            let Gradient::Rows { values, .. } = gradient else { return Err(mixed()) };
            let own = values.shape().dims().get(1..).unwrap_or_default();
            if *row.get_or_insert(own) != own {
                let text = format!("rows of different shapes meet: {} is one", values.shape());
                return Err(Error::invalid_argument(text));
            }
            n = n.saturating_add(values.shape().first().copied().unwrap_or(0));
        }
        let dims = [&[n], row.unwrap_or_default()].concat();
        Ok([self.memory.tensor(DType::I64, [n].into())?, self.memory.tensor(self.spec.dtype, Shape::new(&dims)?)?])
    }
}

impl Resource for Store {
    fn kind(&self) -> &'static str {
        "gradient store"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Described for Store {
    type Spec = StoreSpec;

    fn make(name: &Arc<str>, spec: &StoreSpec, memory: Charge) -> Result<Arc<Store>> {
        let kept = KeptGradients { entries: Vec::new(), holdings: Holdings::new(memory.another(0)?) };
        Ok(Arc::new(Store { name: name.clone(), spec: spec.clone(), memory, kept: Mutex::new(kept) }))
    }

    fn agree(&self, name: &str, spec: &StoreSpec) -> Result<()> {
        match self.spec == *spec {
            true => Ok(()),
            false => Err(Error::invalid_argument(format!(
                "gradient store '{name}' is {:?}, but requested was {spec:?}",
                self.spec
            ))),
        }
    }
}

/// Calls `$body` with the type behind `$dtype` as `$ty`.
macro_rules! with_real {
    ($dtype:expr, $ty:ident, $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $ty = f32;
                $body
            }
            DType::F64 => {
                type $ty = f64;
                $body
            }
            DType::F16 => {
                type $ty = f16;
                $body
            }
            DType::BF16 => {
                type $ty = bf16;
                $body
            }
            dtype => Err(Error::unimplemented(format!("gradients of {dtype} cannot be averaged"))),
        }
    };
}

fn mixed() -> Error {
    Error::invalid_argument("some workers pushed rows, some whole gradients; take what they pushed")
}

/// The weighted mean of whole gradients, in the memory for it.
fn mean<T: Number>(taken: Vec<(Gradient, f64)>, mut mean: Tensor, pool: &IntraPool) -> Result<Tensor> {
    let sum = mean.data_mut::<T>()?;
    sum.fill(T::ZERO);
    for (gradient, share) in taken {
        let Gradient::Dense(values) = gradient else { return Err(mixed()) };
        let share = T::from_f64(share);
        combine(pool, &mut *sum, values.data::<T>()?, |x, y| x.add(y.mul(share)));
    }
    Ok(mean)
}

/// All rows, weighted, in the memory for them: rows that occur more than once count as their sum.
fn weighted_rows<T: Number>(
    taken: Vec<(Gradient, f64)>,
    [mut all_indices, mut all_values]: [Tensor; 2],
) -> Result<[Tensor; 2]> {
    let (mut to_indices, mut to_values) = (all_indices.data_mut::<i64>()?, all_values.data_mut::<T>()?);
    for (gradient, share) in taken {
        let Gradient::Rows { indices, values } = gradient else { return Err(mixed()) };
        let (share, indices, values) = (T::from_f64(share), indices.data::<i64>()?, values.data::<T>()?);
        let (own_indices, later_indices) = to_indices.split_at_mut(indices.len());
        let (own_values, later_values) = to_values.split_at_mut(values.len());
        own_indices.copy_from_slice(indices);
        own_values.iter_mut().zip(values).for_each(|(to, value)| *to = value.mul(share));
        (to_indices, to_values) = (later_indices, later_values);
    }
    Ok([all_indices, all_values])
}

pub(crate) static KOLO_GRADIENT_STORE: Op = maker(
    "KoloGradientStore",
    "() -> (handle:resource) ; dtype:type{float,double,bfloat16,half}, shape:shape, n_workers:int>=1, container:string=\"\", \
     shared_name:string=\"\"",
    shape_fns::scalars,
    &[cpu_made(KernelMaker::Object(|init| {
        let attrs = init.attrs();
        let (dtype, shape) = (attrs.dtype("dtype")?, attrs.shape("shape")?.clone());
        Source::<Store>::make(init, StoreSpec { n_workers: n_workers(init)?, dtype, shape })
    }))],
);

pub(crate) static KOLO_GRADIENT_PUSH: Op = stateful(
    "KoloGradientPush",
    "(handle:resource, worker:int64, step:int64, gradient:dtype) -> () ; dtype:type{float,double,bfloat16,half}",
    shape_fns::unknown,
    &[cpu_any(|ctx| {
        let store = object::<Store>(ctx, 0)?;
        let (worker, step) = (ctx.scalar::<i64>(1)?, ctx.scalar::<i64>(2)?);
        store.push(worker, step, Gradient::Dense(ctx.take_input(3)?))
    })],
);

pub(crate) static KOLO_GRADIENT_PUSH_ROWS: Op = stateful(
    "KoloGradientPushRows",
    "(handle:resource, worker:int64, step:int64, indices:int64, values:dtype) -> () ; \
     dtype:type{float,double,bfloat16,half}",
    shape_fns::unknown,
    &[cpu_any(|ctx| {
        let store = object::<Store>(ctx, 0)?;
        let (worker, step) = (ctx.scalar::<i64>(1)?, ctx.scalar::<i64>(2)?);
        let (indices, values) = (ctx.take_input(3)?, ctx.take_input(4)?);
        store.push(worker, step, Gradient::Rows { indices, values })
    })],
);

pub(crate) static KOLO_GRADIENT_TAKE: Op = stateful(
    "KoloGradientTake",
    "(handle:resource, members:int64, weights:float) -> (average:dtype) ; dtype:type{float,double,bfloat16,half}",
    |ctx| Ok(vec![declared(ctx)]),
    &[cpu_any(take)],
);

pub(crate) static KOLO_GRADIENT_TAKE_ROWS: Op = stateful(
    "KoloGradientTakeRows",
    "(handle:resource, members:int64, weights:float) -> (indices:int64, values:dtype) ; \
     dtype:type{float,double,bfloat16,half}",
    |ctx| {
        let rows = match declared(ctx).dims() {
            Some([_, row @ ..]) => PartialShape::of_rank(1).concat(&PartialShape::new(row)),
            Some([]) | None => PartialShape::unknown(),
        };
        Ok(vec![PartialShape::of_rank(1), rows])
    },
    &[cpu_any(take_rows)],
);

/// The declared shape, if the store's op is in sight.
fn declared(ctx: &InferCtx<'_>) -> PartialShape {
    ctx.source(0).attrs.shape("shape").cloned().unwrap_or_default()
}

fn take(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let store = object::<Store>(ctx, 0)?;
    let (taken, room) = store.take(ctx.input(1)?, ctx.input(2)?, |gradients| store.room_for_mean(gradients))?;
    let average = with_real!(store.spec.dtype, T, mean::<T>(taken, room, ctx.pool()))?;
    ctx.set_output(0, average);
    Ok(())
}

fn take_rows(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let store = object::<Store>(ctx, 0)?;
    let (taken, room) = store.take(ctx.input(1)?, ctx.input(2)?, |gradients| store.room_for_rows(gradients))?;
    let [indices, values] = with_real!(store.spec.dtype, T, weighted_rows::<T>(taken, room))?;
    ctx.set_output(0, indices);
    ctx.set_output(1, values);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;
    use kolo_device::Arena;

    use super::*;
    use crate::testing::Evaluation;

    #[test]
    fn the_mean_is_of_those_who_were_named() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let g = crate::graph();
            let store = g.op("KoloGradientStore").attr("dtype", dtype).attr("shape", PartialShape::from([2usize]));
            let store = store.attr("n_workers", 3usize).attr("shared_name", "s").out();
            let push = |worker: i64, step: i64, value: f64| {
                let gradient = g
                    .op("Fill")
                    .inputs([g.constant([2i32]), kolo_graph::IntoOutput::into_output(value, &g, dtype)])
                    .out();
                g.op("KoloGradientPush").inputs([store, g.constant(worker), g.constant(step), gradient]).build()
            };
            let pushes = [push(0, 4, 1.0), push(1, 4, 100.0), push(2, 3, 4.0), push(2, 4, 2.0)];
            let members = g.constant([[0i64, 4], [2, 3], [2, 4]]);
            let take = |weights: [f32; 3]| {
                let inputs = [store, members, g.constant(weights)];
                let average = g.op("KoloGradientTake").inputs(inputs).attr("dtype", dtype).out();
                assert_eq!(average.shape(), [2usize].into());
                g.op("Cast").input(average).attr("DstT", DType::F32).out()
            };
            let (weighted, bad) = (take([1.0, 0.5, 0.5]), take([0.0, 0.0, 0.0]));
            g.check().unwrap();
            let run = Evaluation::new(g.snapshot());
            for push in pushes {
                run.run_targets(&[push], &[]).unwrap();
            }
            assert_eq!(run.run(&[bad], &[]).unwrap_err().code(), Code::InvalidArgument);
            assert_eq!(run.run(&[weighted], &[]).unwrap(), [Tensor::from([2.0f32, 2.0])]);
            let gone = run.run(&[weighted], &[]).unwrap_err();
            assert_eq!(gone.code(), Code::Aborted);
            assert!(gone.message().contains("worker 0 for step 4 is gone"), "{gone}");
        }
    }

    fn spec(shape: &[Option<usize>]) -> StoreSpec {
        StoreSpec { n_workers: 2, dtype: DType::F32, shape: PartialShape::new(shape) }
    }

    #[test]
    fn two_are_kept_of_each_worker_and_the_same_step_replaces() {
        let store = Store::make(&"s".into(), &spec(&[]), Charge::NONE).unwrap();
        let push = |worker, step, value: f32| store.push(worker, step, Gradient::Dense(Tensor::scalar(value)));
        for (worker, step) in [(0, 1), (1, 1), (0, 2), (0, 2), (0, 3)] {
            push(worker, step, 1.0).unwrap();
        }
        let left: Vec<_> = store.kept.lock().entries.iter().map(|entry| (entry.worker, entry.step)).collect();
        assert_eq!(left, [(1, 1), (0, 2), (0, 3)]);
        assert_eq!(push(2, 1, 1.0).unwrap_err().code(), Code::InvalidArgument);
        let wrong = store.push(0, 1, Gradient::Dense(Tensor::from([1.0f32])));
        assert!(wrong.unwrap_err().message().contains("have shape [], found [1]"));
        assert!(store.push(0, 1, Gradient::Dense(Tensor::scalar(1.0f64))).is_err());
    }

    #[test]
    fn rows_come_together_with_their_weights() {
        let store = Store::make(&"s".into(), &spec(&[Some(4), Some(1)]), Charge::NONE).unwrap();
        let rows = |indices: &[i64], values: &[f32]| Gradient::Rows {
            indices: Tensor::vector(indices.to_vec()),
            values: Tensor::from_vec(Shape::new(&[values.len(), 1]).unwrap(), values.to_vec()).unwrap(),
        };
        store.push(0, 0, rows(&[3, 1], &[4.0, 8.0])).unwrap();
        store.push(1, 0, rows(&[1], &[2.0])).unwrap();
        let take = |members: Tensor, weights: Tensor| -> [Tensor; 2] {
            let (taken, room) = store.take(&members, &weights, |gradients| store.room_for_rows(gradients)).unwrap();
            weighted_rows::<f32>(taken, room).unwrap()
        };
        let [indices, values] = take(Tensor::from([[0i64, 0], [1, 0]]), Tensor::from([1.0f32, 3.0]));
        assert_eq!(indices, Tensor::from([3i64, 1, 1]));
        assert_eq!(values, Tensor::from([[1.0f32], [2.0], [1.5]]));
        for (bad, text) in [
            (rows(&[4], &[1.0]), "row 4 is not in [0, 4)"),
            (rows(&[-1], &[1.0]), "row -1"),
            (rows(&[1, 2], &[1.0]), "found [1,1]"),
        ] {
            let error = store.push(0, 1, bad).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        }
        // Nothing at all is a gradient, too.
        store.push(0, 2, rows(&[], &[])).unwrap();
        assert_eq!(take(Tensor::from([[0i64, 2]]), Tensor::from([1.0f32]))[1].shape().dims(), [0, 1]);
    }

    #[test]
    fn nothing_is_lost_if_there_is_no_memory() {
        let arena = Arena::new("cpu", Some(1 << 20));
        let charge = arena.charge(0, &"s".into()).unwrap();
        let store = Store::make(&"s".into(), &spec(&[None]), charge).unwrap();
        let gradient = |value: f32| Gradient::Dense(Tensor::vector(vec![value; 10_000]));
        let steps = || -> Vec<i64> { store.kept.lock().entries.iter().map(|entry| entry.step).collect() };
        for step in [1, 2] {
            store.push(0, step, gradient(step as f32)).unwrap();
        }
        let others = arena.charge((1 << 20) - arena.stats().in_use as usize, &"others".into()).unwrap();
        for step in [2, 3] {
            assert_eq!(store.push(0, step, gradient(9.0)).unwrap_err().code(), Code::ResourceExhausted);
        }
        assert_eq!(steps(), [1, 2]);
        let take = |members: [[i64; 2]; 2]| {
            let (members, weights) = (Tensor::from(members), Tensor::from([1.0f32, 1.0]));
            let (taken, room) = store.take(&members, &weights, |gradients| store.room_for_mean(gradients))?;
            mean::<f32>(taken, room, &IntraPool::new(1))
        };
        assert_eq!(take([[0, 2], [0, 1]]).unwrap_err().code(), Code::ResourceExhausted);
        assert_eq!(steps(), [1, 2]);
        drop(others);
        // One of them is not there.
        assert_eq!(take([[0, 2], [0, 3]]).unwrap_err().code(), Code::Aborted);
        assert_eq!(take([[0, 2], [0, 2]]).unwrap_err().code(), Code::Aborted);
        assert_eq!(take([[0, 2], [0, 1]]).unwrap(), Tensor::vector(vec![1.5f32; 10_000]));
        assert!(steps().is_empty() && arena.stats().in_use < 10_000);
    }
}
