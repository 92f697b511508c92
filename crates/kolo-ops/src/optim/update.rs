//! What all optimizers share: finding the variable and its slots, locking them, checking shapes, and walking over the
//! elements or, in the sparse forms, over the rows that have a gradient.
//!
//! An optimizer states its rule for one element ([`Optimizer::rule`]); the same rule serves the form that takes references
//! (`ApplyAdam`), the one that takes handles (`ResourceApplyAdam`) and the sparse ones. The variable and its slots are
//! locked together, always in the order of their addresses, so two updates never wait for each other in a circle; the
//! attribute `use_locking` has nothing left to ask for.

pub(crate) mod gpu;

use std::sync::Arc;

use half::{bf16, f16};
use kolo_core::{DType, Element, Error, PartialShape, Result, Tensor};
use kolo_device::cpu::{IntraPool, pool};
use kolo_graph::{
    Effects, Gradient, HalfSafety, InferCtx, OpDef, Operation, Output, ShapeFn, Signature, SplitRule, Update,
    UpdateRule,
};
use num_traits::Float;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::cuda::FLOATS;
use crate::math::elementwise::lanes;
use crate::op::{Gpu, KernelDef, KernelMaker, Op, gpu_made};
use crate::{Cost, KernelCtx, VariableCell};

/// A way to update a variable with `N` slots.
pub trait Optimizer<const N: usize>: 'static {
    /// Which input the gradient is. The variable and its slots are inputs 0 to `N`; the others are scalars. In the sparse
    /// form the indices follow the gradient.
    const GRAD: usize;
    /// About what one element costs.
    const NS: f64 = 0.5;

    /// From a variable's element, its slots' and the gradient's to the new element and slots.
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, N>>;
}

/// What becomes of one element and its slots, given one of the gradient.
pub trait Rule<C, const N: usize>: Fn(C, [C; N], C) -> (C, [C; N]) + Copy + Sync {}

impl<C, const N: usize, F: Fn(C, [C; N], C) -> (C, [C; N]) + Copy + Sync> Rule<C, N> for F {}

/// What updates are computed in: `f32`, or `f64` for doubles.
pub trait Compute: Float + Send + Sync + std::fmt::Debug + 'static {
    /// A number, rounded.
    fn of(number: f64) -> Self;
}

impl Compute for f32 {
    #[inline(always)]
    fn of(number: f64) -> f32 {
        number as f32
    }
}

impl Compute for f64 {
    #[inline(always)]
    fn of(number: f64) -> f64 {
        number
    }
}

/// What variables are made of.
pub trait Number: Element {
    /// What its updates are computed in.
    type Compute: Compute;
    /// The number, for computing.
    fn widen(self) -> Self::Compute;
    /// The result, rounded.
    fn narrow(value: Self::Compute) -> Self;
}

macro_rules! numbers {
    ($($ty:ty => $compute:ty, $widen:expr, $narrow:expr;)*) => {
        $(impl Number for $ty {
            type Compute = $compute;
            #[inline(always)]
            fn widen(self) -> $compute {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(value: $compute) -> $ty {
                $narrow(value)
            }
        })*
    };
}

numbers! {
    f32 => f32, std::convert::identity, std::convert::identity;
    f64 => f64, std::convert::identity, std::convert::identity;
    f16 => f32, f16::to_f32, f16::from_f32;
    bf16 => f32, bf16::to_f32, bf16::from_f32;
}

/// The scalar inputs and the attributes of an update, by their place in the dense form.
pub struct Scalars<'a, 'c> {
    ctx: &'a KernelCtx<'c>,
    grad: usize,
    sparse: bool,
}

impl Scalars<'_, '_> {
    /// The scalar that is input `i` of the dense form.
    pub fn at<C: Compute>(&self, i: usize) -> Result<C> {
        let i = i + usize::from(self.sparse && i > self.grad);
        let tensor = self.ctx.input(i)?;
        if tensor.n_elements() != 1 {
            return Err(Error::invalid_argument(format!(
                "{} is not a scalar: {}",
                input_name(self.ctx, i),
                tensor.shape()
            )));
        }
        match tensor.dtype() {
            DType::F32 => Ok(C::of(f64::from(tensor.scalar_value::<f32>()?))),
            DType::F64 => Ok(C::of(tensor.scalar_value::<f64>()?)),
            DType::F16 => Ok(C::of(tensor.scalar_value::<f16>()?.to_f64())),
            DType::BF16 => Ok(C::of(tensor.scalar_value::<bf16>()?.to_f64())),
            DType::I64 => Ok(C::of(tensor.scalar_value::<i64>()? as f64)),
            other => Err(Error::invalid_argument(format!("{} is {other}", input_name(self.ctx, i)))),
        }
    }

    /// A boolean attribute.
    pub fn flag(&self, name: &str) -> Result<bool> {
        self.ctx.attrs().bool(name)
    }
}

/// Adds the update `name` of a variable, by reference (`ApplyX`) or by handle (`ResourceApplyX`).
#[track_caller]
pub fn build<'g>(name: &str, inputs: &[Output<'g>], attrs: &[(&str, bool)]) -> Operation<'g> {
    let var = inputs[0];
    let name = if var.dtype() == DType::Resource { format!("Resource{name}") } else { name.to_owned() };
    let builder = var.graph().op(&name).inputs(inputs.iter().copied());
    attrs.iter().fold(builder, |builder, &(attr, value)| builder.attr(attr, value)).build()
}

const ON_GPU: &[KernelDef] = &[gpu_made("T", FLOATS, KernelMaker::Object(gpu::UpdateKernel::make))];

/// An update op, by reference or by handle.
pub(crate) const fn update_op(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    rule: &'static UpdateRule,
    kernels: &'static [KernelDef],
) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("an update changes its variable; nothing is differentiated through it"),
            // TensorFlow calls only the forms with handles stateful; those with references are tied to their variable.
            stateful: name.as_bytes()[0] == b'R',
            effects: Effects::Writes,
            update: Some(Update { rule, is_sparse: false }),
            half: HalfSafety::Never,
            split: SplitRule::Update,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Kernels(ON_GPU),
        cost: Cost::Elements,
    }
}

/// As [`update_op`], of the rows that have a gradient: which these are says nothing of how a variable is split.
pub(crate) const fn sparse_update_op(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    rule: &'static UpdateRule,
    kernels: &'static [KernelDef],
) -> Op {
    let op = update_op(name, signature, shape, rule, kernels).split(SplitRule::Unstated);
    Op { def: OpDef { update: Some(Update { rule, is_sparse: true }), ..op.def }, ..op }
}

/// CPU kernels of an update: `update_kernels!(dense, Momentum, 1)`.
macro_rules! update_kernels {
    ($form:ident, $optimizer:ty, $n:literal) => {
        &[
            $crate::op::cpu(kolo_core::DType::F32, $crate::optim::update::$form::<$optimizer, f32, $n>),
            $crate::op::cpu(kolo_core::DType::F64, $crate::optim::update::$form::<$optimizer, f64, $n>),
            $crate::op::cpu(kolo_core::DType::F16, $crate::optim::update::$form::<$optimizer, half::f16, $n>),
            $crate::op::cpu(kolo_core::DType::BF16, $crate::optim::update::$form::<$optimizer, half::bf16, $n>),
        ]
    };
}
pub(crate) use update_kernels;

/// The shape function of a dense update.
pub fn dense_shape<O: Optimizer<N>, const N: usize>(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let shape = variables_shape::<N>(ctx)?.merge(ctx.input(O::GRAD))?;
    for i in (N + 1..ctx.n_inputs()).filter(|&i| i != O::GRAD) {
        ctx.input_of_rank(i, 0)?;
    }
    Ok(vec![shape; ctx.n_outputs()])
}

/// The shape function of a sparse update.
pub fn sparse_shape<O: Optimizer<N>, const N: usize>(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let shape = variables_shape::<N>(ctx)?;
    let indices = ctx.input_of_rank(O::GRAD + 1, 1)?;
    if let (Some(rows), Some(grad)) = (shape.dims().and_then(|dims| dims.split_first()), ctx.input(O::GRAD).dims()) {
        let rows = PartialShape::new(&[indices.dim(0)]).concat(&PartialShape::new(rows.1));
        rows.merge(&PartialShape::new(grad))?;
    }
    for i in (N + 1..ctx.n_inputs()).filter(|&i| i != O::GRAD && i != O::GRAD + 1) {
        ctx.input_of_rank(i, 0)?;
    }
    Ok(vec![shape; ctx.n_outputs()])
}

/// What the variable and its slots agree on.
fn variables_shape<const N: usize>(ctx: &InferCtx<'_>) -> Result<PartialShape> {
    (0..=N).try_fold(PartialShape::unknown(), |shape, i| match ctx.input_dtype(i) {
        DType::Resource => ctx.handle(i).map_or(Ok(shape.clone()), |(_, held)| shape.merge(held)),
        _ => shape.merge(ctx.input(i)),
    })
}

/// The kernel of a dense update.
pub fn dense<O: Optimizer<N>, T: Number, const N: usize>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let scalars = Scalars { ctx, grad: O::GRAD, sparse: false };
    let rule = O::rule::<T::Compute>(&scalars)?;
    let cells = cells(ctx, N)?;
    let each = |var: &mut [T], slots: [&mut [T]; N], grad: &[T]| run(var, slots, grad, rule);
    with_values(&cells, &mut |values| dense_by(ctx, O::GRAD, O::NS, values, &each))?;
    finish(ctx, cells)
}

/// The kernel of a sparse update: the rule on rows `indices`, one after the other, so that a row named twice is updated
/// twice.
pub fn sparse<O: Optimizer<N>, T: Number, const N: usize>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let scalars = Scalars { ctx, grad: O::GRAD, sparse: true };
    let rule = O::rule::<T::Compute>(&scalars)?;
    let cells = cells(ctx, N)?;
    let each = |var: &mut [T], slots: [&mut [T]; N], grad: &[T]| run(var, slots, grad, rule);
    with_values(&cells, &mut |values| sparse_by(ctx, O::GRAD, values, &each))?;
    finish(ctx, cells)
}

/// A rule's loop over a piece of the variable, its slots and the gradient. What is around it is compiled once for each
/// element type and number of slots, not for each optimizer.
type Loop<'f, T, const N: usize> = dyn Fn(&mut [T], [&mut [T]; N], &[T]) + Sync + 'f;

fn dense_by<T: Number, const N: usize>(
    ctx: &KernelCtx<'_>,
    grad_at: usize,
    ns: f64,
    values: Values<'_>,
    each: &Loop<'_, T, N>,
) -> Result<()> {
    let grad = ctx.input(grad_at)?;
    check_same_shapes(ctx, &values, Some((grad_at, grad)))?;
    let mut values = values.into_iter();
    let var = next_data::<T>(&mut values)?;
    let slots = slots_data::<T, N>(values)?;
    walk(ctx.pool(), pool::grain(ns * (N + 1) as f64), var, slots, grad.data::<T>()?, each);
    Ok(())
}

fn sparse_by<T: Number, const N: usize>(
    ctx: &KernelCtx<'_>,
    grad_at: usize,
    values: Values<'_>,
    each: &Loop<'_, T, N>,
) -> Result<()> {
    let grad = ctx.input(grad_at)?;
    check_same_shapes(ctx, &values, None)?;
    let row = check_rows(values[0], grad, ctx.input(grad_at + 1)?)?;
    let rows = named_rows(&ctx.integers(grad_at + 1)?, values[0].shape()[0])?;
    let grad = grad.data::<T>()?;
    let mut values = values.into_iter();
    let var = next_data::<T>(&mut values)?;
    let mut slots = slots_data::<T, N>(values)?;
    for (i, at) in rows.into_iter().enumerate() {
        let span = at * row..(at + 1) * row;
        let slots = slots.each_mut().map(|slot| &mut slot[span.clone()]);
        each(&mut var[span.clone()], slots, &grad[i * row..(i + 1) * row]);
    }
    Ok(())
}

/// The rows that `indices` name, if there are as many.
fn named_rows(indices: &[i64], n_rows: usize) -> Result<Vec<usize>> {
    let row = |(i, &index): (usize, &i64)| match usize::try_from(index) {
        Ok(at) if at < n_rows => Ok(at),
        _ => Err(Error::invalid_argument(format!("Index {index} at offset {i} in indices is out of range"))),
    };
    indices.iter().enumerate().map(row).collect()
}

type Cells = SmallVec<[Arc<VariableCell>; 4]>;
type Values<'a> = SmallVec<[&'a mut Tensor; 4]>;

/// The variable and its slots, which must be different ones.
fn cells(ctx: &KernelCtx<'_>, n_slots: usize) -> Result<Cells> {
    let cells = (0..=n_slots).map(|i| ctx.variable(i)).collect::<Result<Cells>>()?;
    for (i, cell) in cells.iter().enumerate() {
        if cells[..i].iter().any(|other| Arc::ptr_eq(cell, other)) {
            return Err(Error::invalid_argument(format!("{cell:?} cannot be variable and slot of one update")));
        }
    }
    Ok(cells)
}

/// Runs `f` on the values of all cells, in the order of `cells`, all locked.
fn with_values(cells: &Cells, f: &mut dyn FnMut(Values<'_>) -> Result<()>) -> Result<()> {
    let mut order: SmallVec<[usize; 4]> = (0..cells.len()).collect();
    order.sort_by_key(|&i| Arc::as_ptr(&cells[i]));
    lock_next(cells, &order, [const { None }; MAX_VARIABLES], f)
}

/// A variable and up to three slots.
const MAX_VARIABLES: usize = 4;

/// Locks the cells that `order` names one inside the other, and calls `f` when there is none left.
fn lock_next(
    cells: &Cells,
    order: &[usize],
    locked: [Option<&mut Tensor>; MAX_VARIABLES],
    f: &mut dyn FnMut(Values<'_>) -> Result<()>,
) -> Result<()> {
    let Some((&i, rest)) = order.split_first() else {
        return f(locked.into_iter().flatten().collect());
    };
    cells[i].update(|tensor| {
        let mut locked: [Option<&mut Tensor>; MAX_VARIABLES] = locked;
        locked[i] = Some(tensor);
        lock_next(cells, rest, locked, f)
    })
}

fn check_same_shapes(ctx: &KernelCtx<'_>, values: &Values<'_>, grad: Option<(usize, &Tensor)>) -> Result<()> {
    let var = values[0].shape();
    let slots = values.iter().enumerate().skip(1).map(|(i, slot)| (i, slot.shape()));
    for (i, other) in slots.chain(grad.map(|(i, grad)| (i, grad.shape()))) {
        if other != var {
            let name = input_name(ctx, i);
            return Err(Error::invalid_argument(format!("var and {name} do not have the same shape{var} {other}")));
        }
    }
    Ok(())
}

/// The length of a row; an error if the gradient does not have one row of that length for each index.
fn check_rows(var: &Tensor, grad: &Tensor, indices: &Tensor) -> Result<usize> {
    let Some((_, row)) = var.shape().split_first() else {
        return Err(Error::invalid_argument("var must be at least 1 dimensional"));
    };
    if indices.shape().rank() != 1 {
        return Err(Error::invalid_argument("indices must be one-dimensional"));
    }
    let Some((&n, grad_row)) = grad.shape().split_first() else {
        return Err(Error::invalid_argument("grad must be at least 1 dimensional"));
    };
    if let Some(d) = (0..row.len().max(grad_row.len())).find(|&d| row.get(d) != grad_row.get(d)) {
        return Err(Error::invalid_argument(format!("var and grad must match in dimension {}", d + 1)));
    }
    if n != indices.n_elements() {
        return Err(Error::invalid_argument("grad must be the same size as indices in the first dimension."));
    }
    Ok(row.iter().product())
}

fn input_name(ctx: &KernelCtx<'_>, i: usize) -> String {
    match Signature::parse(ctx.node.def.signature) {
        Ok(signature) if i < signature.inputs.len() => signature.inputs[i].name.clone(),
        _ => format!("input {i}"),
    }
}

fn next_data<'a, T: Element>(values: &mut impl Iterator<Item = &'a mut Tensor>) -> Result<&'a mut [T]> {
    values.next().ok_or_else(|| Error::internal("a slot is missing"))?.data_mut::<T>()
}

fn slots_data<'a, T: Element, const N: usize>(
    mut values: impl Iterator<Item = &'a mut Tensor>,
) -> Result<[&'a mut [T]; N]> {
    let slots = (0..N).map(|_| next_data::<T>(&mut values)).collect::<Result<SmallVec<[&mut [T]; 4]>>>()?;
    slots.into_iter().collect::<Vec<_>>().try_into().map_err(|_| Error::internal("a slot is missing"))
}

/// A piece of the variable with the same piece of its slots and of the gradient.
struct Part<'a, T, const N: usize> {
    var: &'a mut [T],
    slots: [&'a mut [T]; N],
    grad: &'a [T],
}

/// Runs `each` over all elements, over several threads if there are many.
fn walk<T: Number, const N: usize>(
    pool: &IntraPool,
    chunk: usize,
    mut var: &mut [T],
    mut slots: [&mut [T]; N],
    mut grad: &[T],
    each: &Loop<'_, T, N>,
) {
    if var.len() <= chunk || pool.n_threads() == 1 {
        return each(var, slots, grad);
    }
    let is_cached = (N + 2) * size_of_val(var) <= pool.n_threads() * pool::CACHED_BYTES;
    // One task takes one part; the lock of each is only ever asked for once.
    let mut parts = Vec::with_capacity(var.len().div_ceil(chunk));
    while !var.is_empty() {
        let n = chunk.min(var.len());
        let (var_part, var_rest) = var.split_at_mut(n);
        let (grad_part, grad_rest) = grad.split_at(n);
        let mut slot_parts = slots.map(|slot| Some(slot.split_at_mut(n)));
        let taken = "each pair is taken apart once";
        let first = slot_parts.each_mut().map(|pair| std::mem::take(&mut pair.as_mut().expect(taken).0));
        slots = slot_parts.map(|pair| pair.expect(taken).1);
        parts.push(Mutex::new(Some(Part { var: var_part, slots: first, grad: grad_part })));
        (var, grad) = (var_rest, grad_rest);
    }
    let task = |i: usize| {
        if let Some(part) = parts[i].lock().take() {
            each(part.var, part.slots, part.grad);
        }
    };
    match is_cached {
        // Each thread updates the same part step after step.
        true => pool.parallel_for_near(parts.len(), &task),
        false => pool.parallel_for(parts.len(), &task),
    }
}

/// Applies `rule` to all elements, on this thread.
fn run<T: Number, const N: usize>(var: &mut [T], slots: [&mut [T]; N], grad: &[T], rule: impl Rule<T::Compute, N>) {
    let n = var.len().min(grad.len());
    lanes::<T, _>(
        #[inline(always)]
        || {
            let (var, grad) = (&mut var[..n], &grad[..n]);
            let mut slots = slots.map(|slot| &mut slot[..n]);
            for i in 0..n {
                let before = slots.each_ref().map(|slot| slot[i].widen());
                let (new, after) = rule(var[i].widen(), before, grad[i].widen());
                var[i] = T::narrow(new);
                for (slot, after) in slots.iter_mut().zip(after) {
                    slot[i] = T::narrow(after);
                }
            }
        },
    );
}

/// The form with references passes the variable on.
fn finish(ctx: &mut KernelCtx<'_>, cells: Cells) -> Result<()> {
    if !ctx.outputs.is_empty()
        && let Some(var) = cells.into_iter().next()
    {
        ctx.set_reference(0, var);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::optim::testing::update;
    use crate::testing::tensor;

    #[test]
    fn large_variables_are_split_over_threads_without_gaps() {
        let n = 100_003;
        let numbers: Vec<f32> = (0..n).map(|i| (i % 1000) as f32 * 0.001).collect();
        let halves: Vec<f32> = numbers.iter().map(|x| x - 0.5 * x).collect();
        update("ResourceApplyGradientDescent")
            .variable(numbers.clone())
            .input(0.5f32)
            .input(numbers)
            .once_gives([Tensor::from(halves)]);
    }

    #[test]
    fn shapes_must_agree() {
        let square = || tensor([2, 2], [1.0f32, 2.0, 3.0, 4.0]);
        update("ResourceApplyGradientDescent")
            .variable(square())
            .input(0.1f32)
            .input([1.0f32, 2.0])
            .fails("var and delta do not have the same shape[2,2] [2]");
        update("ResourceApplyGradientDescent")
            .variable(square())
            .input([0.1f32, 0.2])
            .input(square())
            .fails("should have rank 0");
        update("ResourceApplyMomentum")
            .variable(square())
            .variable([1.0f32])
            .input(0.1f32)
            .input(square())
            .input(0.9f32)
            .fails("var and accum do not have the same shape[2,2] [1]");
        let empty = || Tensor::vector::<f32>(vec![]);
        update("ResourceApplyGradientDescent").variable(empty()).input(0.1f32).input(empty()).once_gives([empty()]);
    }

    #[test]
    fn rows_must_exist_and_fit() {
        let sparse = |grad: Tensor, indices: Tensor| {
            update("ResourceSparseApplyMomentum")
                .variable(tensor([3, 2], [0.0f32; 6]))
                .variable(tensor([3, 2], [0.0f32; 6]))
                .input(0.1f32)
                .input(grad)
                .input(indices)
                .input(0.9f32)
        };
        let grad = || tensor([2, 2], [1.0f32; 4]);
        sparse(grad(), Tensor::from([0i64, 3])).fails("Index 3 at offset 1 in indices is out of range");
        sparse(grad(), Tensor::from([0i64, -1])).fails("Index -1 at offset 1 in indices is out of range");
        sparse(grad(), Tensor::from([0i32])).fails("grad must be the same size as indices in the first dimension");
        sparse(tensor([2, 1], [1.0f32; 2]), Tensor::from([0i32, 1])).fails("var and grad must match in dimension 1");
        sparse(grad(), tensor([1, 2], [0i32, 1])).fails("should have rank 1");
        // A row named twice is updated twice: the second time the momentum carries over.
        sparse(grad(), Tensor::from([1i32, 1])).once_gives([
            tensor([3, 2], [0.0f32, 0.0, -0.29, -0.29, 0.0, 0.0]),
            tensor([3, 2], [0.0f32, 0.0, 1.9, 1.9, 0.0, 0.0]),
        ]);
    }
}
