//! `ConditionalAccumulator` and `ResourceConditionalAccumulator`: whole gradients, and their mean.

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_device::Charge;
use kolo_device::cpu::IntraPool;
use kolo_graph::{Effects, Gradient, Graph, InferCtx, OpDef, Operation, Output, OwnedState, ShapeFn, shape_fns};

use super::accumulator::{Accumulator, Form, Reduction, TAKE, access, make};
use super::make::pair;
use super::source::object;
use crate::holdings::{counted, make_unique};
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_any, cpu_made};
use crate::state::number::{NumberVisitor, combine, visit_number};
use crate::{Cost, KernelMaker};

/// A conditional accumulator of a graph: gradients are applied by workers and taken by a chief. A plain copy.
#[derive(Clone, Copy, Debug)]
pub struct ConditionalAccumulator<'g> {
    handle: Output<'g>,
    dtype: DType,
}

impl<'g> ConditionalAccumulator<'g> {
    /// An accumulator for gradients of this dtype and shape, private to the session that uses it if `shared_name` is
    /// empty.
    #[track_caller]
    pub fn new(
        graph: &'g Graph,
        name: &str,
        shared_name: &str,
        dtype: DType,
        shape: impl Into<PartialShape>,
    ) -> ConditionalAccumulator<'g> {
        let builder = graph.op("ResourceConditionalAccumulator").name(name).attr("shared_name", shared_name);
        ConditionalAccumulator { handle: builder.attr("dtype", dtype).attr("shape", shape.into()).out(), dtype }
    }

    /// The handle.
    pub fn handle(self) -> Output<'g> {
        self.handle
    }

    /// Adds a gradient that was computed in step `local_step` (int64); dropped if that is an earlier step than the
    /// accumulator's.
    #[track_caller]
    pub fn apply_grad(self, gradient: Output<'g>, local_step: Output<'g>) -> Operation<'g> {
        let graph = self.handle.graph();
        graph.op("ResourceAccumulatorApplyGradient").inputs([self.handle, local_step, gradient]).build()
    }

    /// The mean of the gradients, once there are `n_required` (int32) of them. The accumulator is then empty, and its step
    /// one further.
    #[track_caller]
    pub fn take_grad(self, n_required: Output<'g>) -> Output<'g> {
        let builder = self.handle.graph().op("ResourceAccumulatorTakeGradient").inputs([self.handle, n_required]);
        builder.attr("dtype", self.dtype).out()
    }

    /// Sets the accumulator's step (int64).
    #[track_caller]
    pub fn set_global_step(self, step: Output<'g>) -> Operation<'g> {
        self.handle.graph().op("ResourceAccumulatorSetGlobalStep").inputs([self.handle, step]).build()
    }

    /// How many gradients wait to be taken, as an int32.
    #[track_caller]
    pub fn num_accumulated(self) -> Output<'g> {
        self.handle.graph().op("ResourceAccumulatorNumAccumulated").input(self.handle).out()
    }
}

pub(crate) static CONDITIONAL_ACCUMULATOR: Op = maker(
    "ConditionalAccumulator",
    "() -> (handle:Ref(string)) ; dtype:type{num}, shape:shape, container:string=\"\", shared_name:string=\"\", \
     reduction_type:string{\"MEAN\",\"SUM\"}=\"MEAN\"",
    pair,
    DENSE,
);
pub(crate) static RESOURCE_CONDITIONAL_ACCUMULATOR: Op = maker(
    "ResourceConditionalAccumulator",
    "() -> (handle:resource) ; dtype:type{num}, shape:shape, container:string=\"\", shared_name:string=\"\", \
     reduction_type:string{\"MEAN\",\"SUM\"}=\"MEAN\"",
    shape_fns::scalars,
    DENSE,
);
pub(crate) static ACCUMULATOR_APPLY_GRADIENT: Op = access(
    "AccumulatorApplyGradient",
    "(handle:Ref(string), local_step:int64, gradient:dtype) -> () ; dtype:type{num}",
    applied,
    APPLY,
    false,
);
pub(crate) static RESOURCE_ACCUMULATOR_APPLY_GRADIENT: Op = access(
    "ResourceAccumulatorApplyGradient",
    "(handle:resource, local_step:int64, gradient:dtype) -> () ; dtype:type{num}",
    applied,
    APPLY,
    true,
);
pub(crate) static ACCUMULATOR_TAKE_GRADIENT: Op = access(
    "AccumulatorTakeGradient",
    "(handle:Ref(string), num_required:int32) -> (average:dtype) ; dtype:type{num}",
    taken,
    TAKE,
    false,
);
pub(crate) static RESOURCE_ACCUMULATOR_TAKE_GRADIENT: Op = access(
    "ResourceAccumulatorTakeGradient",
    "(handle:resource, num_required:int32) -> (average:dtype) ; dtype:type{num}",
    taken,
    TAKE,
    true,
);

/// An op that makes an accumulator.
pub(super) const fn maker(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    kernels: &'static [KernelDef],
) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("a handle has no inputs"),
            stateful: true,
            effects: Effects::Owns(OwnedState::Other),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::OBJECTS,
        cost: Cost::Inline,
    }
}

/// The declared shape, if the accumulator's op is in sight.
pub(super) fn declared(ctx: &InferCtx<'_>) -> PartialShape {
    ctx.source(0).attrs.shape("shape").cloned().unwrap_or_default()
}

fn applied(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    declared(ctx).merge(ctx.input(2))?;
    Ok(Vec::new())
}

fn taken(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![declared(ctx)])
}

const DENSE: &[KernelDef] = &[cpu_made(KernelMaker::Object(|init| make(init, Form::Dense)))];

const APPLY: &[KernelDef] = &[cpu_any(|ctx| {
    let accumulator = object::<Accumulator>(ctx, 0)?;
    let local_step = ctx.scalar::<i64>(1)?;
    let gradient = ctx.take_input(2)?;
    accumulator.apply(local_step, gradient, ctx.pool())
})];

/// The sum of whole gradients.
#[derive(Default)]
pub(super) struct DenseSum(Option<Tensor>);

impl DenseSum {
    /// Adds a gradient, which must fit the declared shape and what was added before.
    pub fn add(&mut self, gradient: Tensor, declared: &PartialShape, pool: &IntraPool, memory: &Charge) -> Result<()> {
        if !declared.admits(gradient.shape()) {
            return Err(mismatch(declared, &gradient));
        }
        let Some(sum) = &mut self.0 else {
            self.0 = Some(counted(gradient, memory)?);
            return Ok(());
        };
        if sum.shape() != gradient.shape() {
            return Err(mismatch(&sum.shape().into(), &gradient));
        }
        make_unique(sum, memory)?;
        visit_number(gradient.dtype(), "accumulating", Add { sum, gradient: &gradient, pool })
    }

    /// Copies the sum unless this is the only handle to it, so that it can be divided.
    pub fn make_own(&mut self, memory: &Charge) -> Result<()> {
        self.0.as_mut().map_or(Ok(()), |sum| make_unique(sum, memory))
    }

    /// The sum, or the mean over `n` gradients.
    pub fn finish(self, reduction: Reduction, n: usize) -> Result<Tensor> {
        let mut sum = self.0.ok_or_else(|| Error::internal("there is no gradient to take"))?;
        if reduction == Reduction::Mean && n > 1 {
            visit_number(sum.dtype(), "accumulating", Divide { sum: &mut sum, n: n as u64 })?;
        }
        Ok(sum)
    }
}

fn mismatch(expected: &PartialShape, gradient: &Tensor) -> Error {
    Error::invalid_argument(format!("Shape mismatch: expected {expected}, got {}", gradient.shape()))
}

/// `sum += gradient`.
pub(super) struct Add<'a> {
    pub sum: &'a mut Tensor,
    pub gradient: &'a Tensor,
    pub pool: &'a IntraPool,
}

impl NumberVisitor for Add<'_> {
    type Out = ();
    fn visit<T: Number>(self) -> Result<()> {
        combine(self.pool, self.sum.data_mut::<T>()?, self.gradient.data::<T>()?, T::add);
        Ok(())
    }
}

/// `sum /= n`, for n above 0.
struct Divide<'a> {
    sum: &'a mut Tensor,
    n: u64,
}

impl NumberVisitor for Divide<'_> {
    type Out = ();
    fn visit<T: Number>(self) -> Result<()> {
        let n = T::from_count(self.n as usize);
        self.sum.data_mut::<T>()?.iter_mut().for_each(|x| *x = x.div(n));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, channel};

    use kolo_core::Code;

    use super::super::accumulator::AccumulatorSpec;
    use super::*;
    use crate::testing::Evaluation;
    use crate::{CancelToken, Done, Outcome};

    fn accumulator(reduction: Reduction) -> Arc<Accumulator> {
        let shape = PartialShape::of_rank(1);
        let spec = AccumulatorSpec { form: Form::Dense, dtype: DType::F32, shape, reduction };
        Accumulator::new("a", spec, Charge::NONE).unwrap()
    }

    fn take(accumulator: &Arc<Accumulator>, n: i32, cancel: &Arc<CancelToken>) -> Receiver<Result<Outcome>> {
        let (sender, receiver) = channel();
        accumulator.take(n, cancel, Done::new(move |outcome| sender.send(outcome).unwrap_or_default()));
        receiver
    }

    #[track_caller]
    fn apply(accumulator: &Accumulator, step: i64, gradient: [f32; 2]) {
        accumulator.apply(step, Tensor::from(gradient), &IntraPool::new(1)).unwrap();
    }

    #[track_caller]
    fn value(receiver: &Receiver<Result<Outcome>>) -> Tensor {
        receiver.try_recv().expect("served").expect("well").outputs.remove(0)
    }

    #[test]
    fn the_mean_is_over_all_that_came_and_the_stale_are_dropped() {
        let (a, token) = (accumulator(Reduction::Mean), CancelToken::new());
        apply(&a, 0, [1.0, 2.0]);
        apply(&a, 0, [3.0, 4.0]);
        apply(&a, 5, [5.0, 9.0]);
        assert_eq!(a.n_accumulated(), 3);
        assert_eq!(value(&take(&a, 2, &token)), Tensor::from([3.0f32, 5.0]));
        // The step is 1 now.
        apply(&a, 0, [100.0, 100.0]);
        assert_eq!(a.n_accumulated(), 0);
        let waiting = take(&a, 1, &token);
        assert!(waiting.try_recv().is_err());
        apply(&a, 1, [7.0, 8.0]);
        assert_eq!(value(&waiting), Tensor::from([7.0f32, 8.0]));
        a.set_global_step(10);
        apply(&a, 9, [1.0, 1.0]);
        assert_eq!(a.n_accumulated(), 0);
        a.set_global_step(0);
        apply(&a, 0, [1.0, 1.0]);
        assert_eq!(a.n_accumulated(), 1);
    }

    #[test]
    fn takes_are_served_in_order_and_can_be_cancelled() {
        let (a, token, other) = (accumulator(Reduction::Sum), CancelToken::new(), CancelToken::new());
        let first = take(&a, 3, &token);
        let second = take(&a, 1, &other);
        apply(&a, 0, [1.0, 1.0]);
        apply(&a, 0, [1.0, 1.0]);
        assert!(second.try_recv().is_err(), "the first is first");
        token.cancel(Error::cancelled("why"));
        let error = first.try_recv().unwrap().unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::Cancelled, "TakeGrad operation was cancelled"));
        assert_eq!(value(&second), Tensor::from([2.0f32, 2.0]));
        let removed = take(&a, 1, &other);
        drop(a);
        assert_eq!(removed.try_recv().unwrap().unwrap_err().code(), Code::Cancelled);
    }

    #[test]
    fn gradients_must_fit() {
        let (a, token) = (accumulator(Reduction::Mean), CancelToken::new());
        let pool = IntraPool::new(1);
        let error = a.apply(0, Tensor::scalar(1.0f32), &pool).unwrap_err();
        assert_eq!(error.message(), "Shape mismatch: expected [?], got []");
        apply(&a, 0, [1.0, 2.0]);
        let error = a.apply(0, Tensor::from([1.0f32]), &pool).unwrap_err();
        assert_eq!(error.message(), "Shape mismatch: expected [2], got [1]");
        assert!(a.apply(0, Tensor::from([1i32]), &pool).unwrap_err().message().contains("found a gradient of int32"));
        let error = take(&a, 0, &token).try_recv().unwrap().unwrap_err();
        assert_eq!(error.message(), "Argument num_required is not positive: 0");
        assert_eq!(a.n_accumulated(), 1);
    }

    #[test]
    fn both_handle_kinds_in_a_graph() {
        let g = crate::graph();
        let a = ConditionalAccumulator::new(&g, "a", "a", DType::F32, [2usize]);
        let step = g.constant(0i64);
        let apply = a.apply_grad(g.constant([1.0f32, 3.0]), step);
        let (mean, n) = (a.take_grad(g.constant(2i32)), a.num_accumulated());
        let advance = a.set_global_step(g.constant(4i64));
        assert_eq!(mean.shape(), [2usize].into());
        let old = g
            .op("ConditionalAccumulator")
            .attr("dtype", DType::F32)
            .attr("shape", PartialShape::from([2usize]))
            .attr("shared_name", "a")
            .out();
        let apply_old = g.op("AccumulatorApplyGradient").inputs([old, step, g.constant([3.0f32, 5.0])]).build();
        let n_old = g.op("AccumulatorNumAccumulated").input(old).out();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[apply], &[]).unwrap();
        run.run_targets(&[apply_old], &[]).unwrap();
        assert_eq!(run.run(&[n, n_old], &[]).unwrap(), [Tensor::scalar(2i32), Tensor::scalar(2i32)]);
        assert_eq!(run.run(&[mean], &[]).unwrap(), [Tensor::from([2.0f32, 4.0])]);
        run.run_targets(&[advance], &[]).unwrap();
        run.run_targets(&[apply], &[]).unwrap();
        assert_eq!(run.run(&[n], &[]).unwrap(), [Tensor::scalar(0i32)]);
        let error =
            g.op("ResourceAccumulatorApplyGradient").inputs([a.handle(), step, g.constant([1.0f32])]).try_build();
        assert!(error.unwrap_err().to_string().contains("not compatible"));
    }
}
