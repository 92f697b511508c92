//! Changing some rows of a variable: `Scatter{Update,Add,Sub,Mul,Div,Min,Max}` on references, `ResourceScatter…` on
//! handles.
//!
//! Row `indices[i]` is combined with `updates[i]`, or with the one number that `updates` is. An index that occurs twice
//! counts twice, in order. All indices are checked before anything is written.

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::IntraPool;
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, Operation, Output};
use smallvec::SmallVec;

use super::handle::uninitialized;
use super::read::value_shape;
use crate::array::elements::product;
use crate::cuda::scatter::{self, Join, Places};
use crate::cuda::{NUMBERS, gpu};
use crate::math::elementwise::lanes;
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_any, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// Adds `updates` to the rows `indices` of the variable behind a handle or reference.
#[track_caller]
pub fn scatter_add<'g>(variable: Output<'g>, indices: Output<'g>, updates: Output<'g>) -> Operation<'g> {
    build("Add", variable, indices, updates)
}

/// Subtracts `updates` from the rows `indices` of the variable behind a handle or reference.
#[track_caller]
pub fn scatter_sub<'g>(variable: Output<'g>, indices: Output<'g>, updates: Output<'g>) -> Operation<'g> {
    build("Sub", variable, indices, updates)
}

/// Sets the rows `indices` of the variable behind a handle or reference to `updates`.
#[track_caller]
pub fn scatter_update<'g>(variable: Output<'g>, indices: Output<'g>, updates: Output<'g>) -> Operation<'g> {
    build("Update", variable, indices, updates)
}

#[track_caller]
fn build<'g>(verb: &str, variable: Output<'g>, indices: Output<'g>, updates: Output<'g>) -> Operation<'g> {
    let family = if variable.is_ref() { "" } else { "Resource" };
    variable.graph().op(&format!("{family}Scatter{verb}")).inputs([variable, indices, updates]).build()
}

/// The GPU kernels of a scatter into a reference and into a resource.
macro_rules! gpu_scatter {
    ($join:ident) => {
        (
            Gpu::Kernels(&[gpu_kernel("T", NUMBERS, |ctx| on_gpu(ctx, Join::$join).and_then(|()| ctx.forward(0, 0)))]),
            Gpu::Kernels(&[gpu_kernel("dtype", NUMBERS, |ctx| on_gpu(ctx, Join::$join))]),
        )
    };
}

macro_rules! scatter_ops {
    ($($reference:ident, $resource:ident, $verb:literal, $types:literal, $resource_types:literal, $locking:literal, $on_reference:expr, $on_resource:expr, $gpu:expr;)*) => {
        $(pub(crate) static $reference: Op = Op {
            def: OpDef {
                name: concat!("Scatter", $verb),
                signature: concat!(
                    "(ref:Ref(T), indices:Tindices, updates:T) -> (output_ref:Ref(T)) ; T:type", $types,
                    ", Tindices:type{int32,int64}, use_locking:bool=", $locking
                ),
                shape: |ctx| Ok(vec![checked_shape(ctx, ctx.input(0))?]),
                gradient: Gradient::None("a variable's new value does not depend on a graph"),
                effects: Effects::Writes,
                ..OpDef::BASE
            },
            kernels: $on_reference,
            gpu: $gpu.0,
            cost: Cost::Elements,
        };
        pub(crate) static $resource: Op = Op {
            def: OpDef {
                name: concat!("ResourceScatter", $verb),
                signature: concat!(
                    "(resource:resource, indices:Tindices, updates:dtype) -> () ; dtype:type", $resource_types,
                    ", Tindices:type{int32,int64}"
                ),
                shape: |ctx| {
                    let shape = value_shape(ctx, 0, ctx.attrs().dtype("dtype")?)?;
                    checked_shape(ctx, &shape)?;
                    Ok(Vec::new())
                },
                gradient: Gradient::None("nothing comes out"),
                stateful: true,
                effects: Effects::Writes,
                ..OpDef::BASE
            },
            kernels: $on_resource,
            gpu: $gpu.1,
            cost: Cost::Elements,
        };)*
    };
}

scatter_ops! {
    SCATTER_UPDATE, RESOURCE_SCATTER_UPDATE, "Update", "", "", "true", &[cpu_any(replace_reference)], &[cpu_any(replace)], gpu_scatter!(Set);
    SCATTER_ADD, RESOURCE_SCATTER_ADD, "Add", "{num}", "{num}", "false", ADD.0, ADD.1, gpu_scatter!(Add);
    SCATTER_SUB, RESOURCE_SCATTER_SUB, "Sub", "{num}", "{num}", "false", SUB.0, SUB.1, gpu_scatter!(Sub);
    SCATTER_MUL, RESOURCE_SCATTER_MUL, "Mul", "{num}", "{num}", "false", MUL.0, MUL.1, gpu_scatter!(Mul);
    SCATTER_DIV, RESOURCE_SCATTER_DIV, "Div", "{num}", "{num}", "false", DIV.0, DIV.1, (Gpu::Missing, Gpu::Missing);
    SCATTER_MIN, RESOURCE_SCATTER_MIN, "Min", "{half,bfloat16,float,double,int32,int64}", "{num}", "false", MIN.0, MIN.1, gpu_scatter!(Min);
    SCATTER_MAX, RESOURCE_SCATTER_MAX, "Max", "{half,bfloat16,float,double,int32,int64}", "{num}", "false", MAX.0, MAX.1, gpu_scatter!(Max);
}

/// `variable`, if `updates` can be `indices.shape + variable.shape[1:]` or a scalar.
fn checked_shape(ctx: &InferCtx<'_>, variable: &PartialShape) -> Result<PartialShape> {
    let (indices, updates) = (ctx.input(1), ctx.input(2));
    match (variable.dims(), updates.rank()) {
        (Some([]), _) => Err(Error::invalid_argument("a scalar variable has no rows")),
        (Some([_, row @ ..]), Some(1..)) => {
            indices
                .concat(&PartialShape::new(row))
                .merge(updates)
                .map_err(|_| wrong_shapes(updates, indices, variable))?;
            Ok(variable.clone())
        }
        _ => Ok(variable.clone()),
    }
}

fn wrong_shapes(
    updates: impl std::fmt::Display,
    indices: impl std::fmt::Display,
    variable: impl std::fmt::Display,
) -> Error {
    Error::invalid_argument(format!(
        "Must have updates.shape = indices.shape + params.shape[1:] or updates.shape = [], got updates.shape {updates}, \
         indices.shape {indices}, params.shape {variable}"
    ))
}

/// Which rows to change, once the shapes and all indices were found good.
struct Rows {
    indices: Vec<usize>,
    n_rows: usize,
    /// One number for all.
    scalar: bool,
}

impl Rows {
    fn of(variable: &Shape, indices: &Tensor, updates: &Tensor) -> Result<Rows> {
        let Some((&n_rows, row)) = variable.split_first() else {
            return Err(Error::invalid_argument("a scalar variable has no rows"));
        };
        let scalar = updates.shape().rank() == 0;
        if !scalar && !updates.shape().iter().eq(indices.shape().iter().chain(row)) {
            return Err(wrong_shapes(updates.shape(), indices.shape(), variable));
        }
        Ok(Rows { indices: checked_indices(indices, n_rows)?, n_rows, scalar })
    }

    /// Calls `change` with each chosen row of `data`, which has `row` units, and the number of its update.
    fn change<T: Send>(&self, pool: &IntraPool, data: &mut [T], row: usize, change: impl Fn(&mut [T], usize) + Sync) {
        if self.indices.is_empty() || row == 0 {
            return;
        }
        // A task owns a range of rows and looks at all indices, so that updates of one row keep their order.
        const UNITS_WORTH_A_TASK: usize = 1 << 15;
        let n_tasks = (self.indices.len() * row / UNITS_WORTH_A_TASK).clamp(1, pool.n_threads().max(1));
        let rows_per_task = self.n_rows.div_ceil(n_tasks).max(1);
        pool.for_each_chunk(data, rows_per_task * row, |task, part| {
            let first = task * rows_per_task;
            for (i, &index) in self.indices.iter().enumerate() {
                if let Some(at) = index.checked_sub(first)
                    && let Some(to) = part.get_mut(at * row..(at + 1) * row)
                {
                    change(to, i);
                }
            }
        });
    }
}

/// The values of an index tensor, each in `0..n`; else TensorFlow's words.
pub(super) fn checked_indices(indices: &Tensor, n: usize) -> Result<Vec<usize>> {
    let values = indices.integers()?;
    let mut good = Vec::with_capacity(values.len());
    for (at, &value) in values.iter().enumerate() {
        match usize::try_from(value) {
            Ok(index) if index < n => good.push(index),
            _ => {
                let place = position(at, indices.shape());
                return Err(Error::invalid_argument(format!("indices{place} = {value} is not in [0, {n})")));
            }
        }
    }
    Ok(good)
}

/// `[1,2]`: where element `at` is; nothing for a scalar.
fn position(mut at: usize, shape: &Shape) -> String {
    if shape.rank() == 0 {
        return String::new();
    }
    let mut place = vec![String::new(); shape.rank()];
    for (i, &dim) in shape.iter().enumerate().rev() {
        place[i] = (at % dim.max(1)).to_string();
        at /= dim.max(1);
    }
    format!("[{}]", place.join(","))
}

fn row_of(shape: &Shape) -> usize {
    shape.iter().skip(1).product()
}

/// Combines rows with updates by `f`.
fn combine<T: Number>(ctx: &mut KernelCtx<'_>, f: impl Fn(T, T) -> T + Sync + Copy) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    cell.update(|variable| {
        let rows = Rows::of(variable.shape(), ctx.input(1)?, ctx.input(2)?)?;
        let updates = ctx.data::<T>(2)?;
        let row = row_of(variable.shape());
        rows.change(ctx.pool(), variable.data_mut::<T>()?, row, |to, i| {
            lanes::<T, _>(
                #[inline(always)]
                || match rows.scalar {
                    true => to.iter_mut().for_each(|x| *x = f(*x, updates[0])),
                    false => {
                        to.iter_mut().zip(&updates[i * row..(i + 1) * row]).for_each(|(x, &y)| *x = f(*x, y));
                    }
                },
            );
        });
        Ok(())
    })
}

macro_rules! kernels {
    ($($table:ident, $on_reference:ident, $on_resource:ident, |$ctx:ident| $before:expr, $f:ident, $($ty:ty),*;)*) => {
        $(fn $on_resource<T: Number>($ctx: &mut KernelCtx<'_>) -> Result<()> {
            $before?;
            combine::<T>($ctx, T::$f)
        }
        fn $on_reference<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
            $on_resource::<T>(ctx)?;
            ctx.forward(0, 0)
        }
        /// For references, and for handles.
        const $table: (&[KernelDef], &[KernelDef]) = (
            cpu_kernels!($on_reference: $($ty),*),
            cpu_kernels!("dtype", $on_resource: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64),
        );)*
    };
}

kernels! {
    ADD, add_reference, add, |ctx| Ok::<(), Error>(()), add, f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64;
    SUB, sub_reference, sub, |ctx| Ok::<(), Error>(()), sub, f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64;
    MUL, mul_reference, mul, |ctx| Ok::<(), Error>(()), mul, f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64;
    DIV, div_reference, div, |ctx| no_zeros::<T>(ctx), div, f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64;
    MIN, min_reference, min, |ctx| Ok::<(), Error>(()), min, f32, f64, f16, bf16, i32, i64;
    MAX, max_reference, max, |ctx| Ok::<(), Error>(()), max, f32, f64, f16, bf16, i32, i64;
}

fn no_zeros<T: Number>(ctx: &KernelCtx<'_>) -> Result<()> {
    match T::DTYPE.is_integer() && ctx.data::<T>(2)?.contains(&T::ZERO) {
        true => Err(Error::invalid_argument("Integer division by zero")),
        false => Ok(()),
    }
}

fn replace_reference(ctx: &mut KernelCtx<'_>) -> Result<()> {
    replace(ctx)?;
    ctx.forward(0, 0)
}

/// Replaces rows, whatever the elements are.
fn replace(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    cell.update(|variable| {
        let updates = ctx.input(2)?;
        if updates.dtype() != variable.dtype() {
            return Err(super::read::wrong_dtype("update", variable.dtype(), updates.dtype()));
        }
        let rows = Rows::of(variable.shape(), ctx.input(1)?, updates)?;
        let row = row_of(variable.shape());
        if variable.dtype() == DType::Str {
            let (mut strings, from) = (variable.strings()?.to_vec(), updates.strings()?);
            rows.change(ctx.pool(), &mut strings, row, |to, i| match rows.scalar {
                true => to.fill(from[0].clone()),
                false => to.clone_from_slice(&from[i * row..(i + 1) * row]),
            });
            *variable = Tensor::from_strings(variable.shape().clone(), strings)?;
            return Ok(());
        }
        let from = updates.host_bytes()?;
        let row = row * variable.dtype().size().unwrap_or(0);
        rows.change(ctx.pool(), variable.host_bytes_mut()?, row, |to, i| match rows.scalar {
            true => to.chunks_exact_mut(from.len().max(1)).for_each(|element| element.copy_from_slice(from)),
            false => to.copy_from_slice(&from[i * row..(i + 1) * row]),
        });
        Ok(())
    })
}

fn on_gpu(ctx: &mut KernelCtx<'_>, join: Join) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    let (indices, updates, device) = (ctx.input(1)?, ctx.input(2)?, gpu(ctx)?);
    cell.update_on(device, |variable| {
        let shape = variable.shape().clone();
        let Some((&n_rows, row)) = shape.split_first() else {
            return Err(Error::invalid_argument("a scalar variable has no rows"));
        };
        let single = updates.shape().rank() == 0;
        if !single && !updates.shape().iter().eq(indices.shape().iter().chain(row)) {
            return Err(Error::invalid_argument(format!(
                "Must have updates.shape = indices.shape + params.shape[1:] or updates.shape = [], got updates.shape {}, \
                 indices.shape {}, params.shape {shape}",
                updates.shape(),
                indices.shape()
            )));
        }
        let places = Places {
            indices,
            n: indices.n_elements(),
            inner: product(row),
            depth: 1,
            dims: SmallVec::from_slice(&[n_rows as i64]),
            steps: SmallVec::from_slice(&[1]),
            single,
        };
        scatter::combine(device, variable, &places, updates, join)
    })
}

#[cfg(test)]
mod tests {
    use kolo_graph::VariableKind;

    use super::*;
    use crate::testing::{Evaluation, tensor};

    /// Runs one scatter op in both families; both must give the same.
    fn check(verb: &str, initial: Tensor, indices: Tensor, updates: Tensor) -> Result<Tensor> {
        let mut found = Vec::new();
        for kind in [VariableKind::Reference, VariableKind::Resource] {
            let g = crate::graph();
            let v = g.new_variable("v", initial.clone()).kind(kind).build();
            let feed = |name: &str, value: &Tensor| g.op("Placeholder").name(name).attr("dtype", value.dtype()).out();
            let (i, u) = (feed("i", &indices), feed("u", &updates));
            let scatter = build(verb, v.handle(), i, u);
            let read = v.read_now();
            g.check()?;
            let run = Evaluation::new(g.snapshot());
            let feeds = [(i, indices.clone()), (u, updates.clone())];
            assert!(run.run_targets(&[scatter], &feeds).is_err(), "there is no value yet");
            run.run_targets(&[v.initializer()], &[])?;
            found.push(run.run_targets(&[scatter], &feeds).and_then(|()| Ok(run.run(&[read], &[])?.remove(0))));
        }
        match (found.pop().unwrap(), found.pop().unwrap()) {
            (Ok(resource), Ok(reference)) => {
                assert_eq!(resource, reference);
                Ok(resource)
            }
            (Err(resource), reference) => {
                assert_eq!(resource.message(), reference.unwrap_err().message());
                Err(resource)
            }
            (Ok(_), Err(error)) => panic!("only the reference failed: {error}"),
        }
    }

    #[test]
    fn rows_are_changed_in_order() {
        let initial = || tensor([3, 2], [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let indices = || Tensor::from([2i32, 0, 2]);
        let updates = || tensor([3, 2], [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let gives = |verb: &str, expected: [f32; 6]| {
            assert_eq!(check(verb, initial(), indices(), updates()).unwrap(), tensor([3, 2], expected), "{verb}");
        };
        gives("Update", [3.0, 4.0, 3.0, 4.0, 5.0, 6.0]);
        gives("Add", [4.0, 6.0, 3.0, 4.0, 11.0, 14.0]);
        gives("Sub", [-2.0, -2.0, 3.0, 4.0, -1.0, -2.0]);
        gives("Mul", [3.0, 8.0, 3.0, 4.0, 25.0, 72.0]);
        gives("Div", [1.0 / 3.0, 0.5, 3.0, 4.0, 1.0, 0.5]);
        gives("Min", [1.0, 2.0, 3.0, 4.0, 1.0, 2.0]);
        gives("Max", [3.0, 4.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn scalars_strings_and_odd_shapes() {
        let found = check("Add", Tensor::from([1i64, 2, 3]), Tensor::from([1i64, 1]), Tensor::scalar(10i64));
        assert_eq!(found.unwrap(), Tensor::from([1i64, 22, 3]));
        let found = check("Update", Tensor::from([true, true, true]), Tensor::scalar(1i32), Tensor::scalar(false));
        assert_eq!(found.unwrap(), Tensor::from([true, false, true]));
        let words = |words: &[&str]| {
            Tensor::from_strings([words.len()], words.iter().map(|w| w.as_bytes().to_vec().into()).collect()).unwrap()
        };
        let found = check("Update", words(&["a", "b", "c"]), Tensor::from([2i32]), words(&["z"]));
        assert_eq!(found.unwrap(), words(&["a", "b", "z"]));
        let none = tensor::<i32, 1>([0], []);
        let found = check("Add", Tensor::from([1.0f64]), none, tensor::<f64, 1>([0], []));
        assert_eq!(found.unwrap(), Tensor::from([1.0f64]));
        let empty_rows = tensor::<f32, 2>([2, 0], []);
        let found = check("Add", empty_rows.clone(), Tensor::from([1i32]), tensor::<f32, 2>([1, 0], []));
        assert_eq!(found.unwrap(), empty_rows);
    }

    #[test]
    fn bad_indices_and_shapes_change_nothing() {
        let fails = |verb: &str, initial: Tensor, indices: Tensor, updates: Tensor, text: &str| {
            let error = check(verb, initial, indices, updates).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        };
        let v = || Tensor::from([1.0f32, 2.0]);
        fails("Add", v(), Tensor::from([0i32, 2]), v(), "indices[1] = 2 is not in [0, 2)");
        fails("Update", v(), Tensor::from([-1i64, 0]), v(), "indices[0] = -1 is not in [0, 2)");
        fails("Sub", v(), Tensor::scalar(7i32), Tensor::scalar(1.0f32), "indices = 7 is not in [0, 2)");
        let square = tensor([2, 2], [0i32, 1, 0, 9]);
        fails("Mul", v(), square, tensor([2, 2], [1.0f32; 4]), "indices[1,1] = 9 is not in [0, 2)");
        fails("Add", v(), Tensor::from([0i32]), v(), "Must have updates.shape = indices.shape + params.shape[1:]");
        fails("Add", Tensor::scalar(1.0f32), Tensor::from([0i32]), Tensor::from([1.0f32]), "no rows");
        fails("Div", Tensor::from([1i32]), Tensor::from([0i32]), Tensor::from([0i32]), "Integer division by zero");
    }

    #[test]
    fn contradicting_shapes_are_refused_when_the_graph_is_built() {
        let g = crate::graph();
        let v = g.variable("v", tensor([2, 2], [0.0f32; 4]));
        scatter_add(v.handle(), g.constant([0i32]), g.constant([[1.0f32, 2.0, 3.0]]));
        assert!(g.check().unwrap_err().to_string().contains("updates.shape [1,3]"));
    }

    #[test]
    fn many_updates_over_many_threads_keep_their_order() {
        let (n, row) = (97, 64);
        let pool = IntraPool::new(4);
        let rows = Rows { indices: (0..4000).map(|i| i * 31 % n).collect(), n_rows: n, scalar: false };
        let mut data = vec![0usize; n * row];
        rows.change(&pool, &mut data, row, |to, i| to.iter_mut().for_each(|x| *x = *x * 3 % 1_000_003 + i));
        let mut expected = vec![0usize; n];
        for (i, &index) in rows.indices.iter().enumerate() {
            expected[index] = expected[index] * 3 % 1_000_003 + i;
        }
        assert!(data.chunks(row).zip(&expected).all(|(row, x)| row.iter().all(|y| y == x)));
    }
}
