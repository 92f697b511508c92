//! Changing slices of a variable by coordinates: `ScatterNdUpdate`, `Add`, `Sub` on references, `ResourceScatterNd…` on
//! handles. As with `ScatterNd`, the last dimension of `indices` holds coordinates; all are checked before anything is
//! written, and a slice that occurs twice is changed twice, in order.

use half::{bf16, f16};
use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, Operation, Output};

use super::handle::uninitialized;
use super::read::{value_shape, wrong_dtype};
use crate::array::gather_nd::{rows, slices_shape};
use crate::math::number::Number;
use crate::memory::Scratch;
use crate::op::{Gpu, KernelDef, Op, cpu_any, cpu_kernels};
use crate::{Cost, KernelCtx};

/// Adds `updates` to the slices of a variable at the coordinates in `indices`.
#[track_caller]
pub fn scatter_nd_add<'g>(variable: Output<'g>, indices: Output<'g>, updates: Output<'g>) -> Operation<'g> {
    build("Add", variable, indices, updates)
}

/// Subtracts `updates` from the slices of a variable at the coordinates in `indices`.
#[track_caller]
pub fn scatter_nd_sub<'g>(variable: Output<'g>, indices: Output<'g>, updates: Output<'g>) -> Operation<'g> {
    build("Sub", variable, indices, updates)
}

/// Sets the slices of a variable at the coordinates in `indices` to `updates`.
#[track_caller]
pub fn scatter_nd_update<'g>(variable: Output<'g>, indices: Output<'g>, updates: Output<'g>) -> Operation<'g> {
    build("Update", variable, indices, updates)
}

#[track_caller]
fn build<'g>(verb: &str, variable: Output<'g>, indices: Output<'g>, updates: Output<'g>) -> Operation<'g> {
    let family = if variable.is_ref() { "" } else { "Resource" };
    variable.graph().op(&format!("{family}ScatterNd{verb}")).inputs([variable, indices, updates]).build()
}

macro_rules! scatter_nd_ops {
    ($($reference:ident, $resource:ident, $verb:literal, $types:literal, $locking:literal, $kernels:expr;)*) => {
        $(pub(crate) static $reference: Op = Op {
            def: OpDef {
                name: concat!("ScatterNd", $verb),
                signature: concat!(
                    "(ref:Ref(T), indices:Tindices, updates:T) -> (output_ref:Ref(T)) ; T:type", $types,
                    ", Tindices:type{int32,int64}, use_locking:bool=", $locking
                ),
                shape: |ctx| {
                    check(ctx, ctx.input(0))?;
                    Ok(vec![ctx.input(0).clone()])
                },
                gradient: Gradient::None("a variable's new value does not depend on a graph"),
                effects: Effects::Writes,
                ..OpDef::BASE
            },
            kernels: $kernels.0,
            gpu: Gpu::Missing,
            cost: Cost::Elements,
        };
        pub(crate) static $resource: Op = Op {
            def: OpDef {
                name: concat!("ResourceScatterNd", $verb),
                signature: "(ref:resource, indices:Tindices, updates:T) -> () ; T:type, Tindices:type{int32,int64}, \
                            use_locking:bool=true",
                shape: |ctx| {
                    check(ctx, &value_shape(ctx, 0, ctx.attrs().dtype("T")?)?)?;
                    Ok(Vec::new())
                },
                gradient: Gradient::None("nothing comes out"),
                stateful: true,
                effects: Effects::Writes,
                ..OpDef::BASE
            },
            kernels: $kernels.1,
            gpu: Gpu::Missing,
            cost: Cost::Elements,
        };)*
    };
}

scatter_nd_ops! {
    SCATTER_ND_UPDATE, RESOURCE_SCATTER_ND_UPDATE, "Update", "", "true", UPDATE;
    SCATTER_ND_ADD, RESOURCE_SCATTER_ND_ADD, "Add", "{num}", "false", ADD;
    SCATTER_ND_SUB, RESOURCE_SCATTER_ND_SUB, "Sub", "{num}", "false", SUB;
}

fn check(ctx: &InferCtx<'_>, variable: &kolo_core::PartialShape) -> Result<()> {
    let indices = ctx.input_of_rank_at_least(1, 1)?;
    ctx.input(2).merge(&slices_shape(variable, indices)?).map_err(|_| {
        Error::invalid_argument(format!(
            "Must have updates.shape = indices.shape[:-1] + params.shape[indices.shape[-1]:], got updates.shape {}, \
             indices.shape {indices}, params.shape {variable}",
            ctx.input(2)
        ))
    })?;
    Ok(())
}

/// Which slices of a variable of `shape` to change, and how long one is.
fn slices(ctx: &KernelCtx<'_>, shape: &Shape) -> Result<(usize, Scratch<usize>)> {
    let (indices, updates) = (ctx.input(1)?, ctx.input(2)?);
    let (depth, rows) = rows(ctx, indices, shape, "shape")?;
    let outer = &indices.shape()[..indices.shape().rank() - 1];
    if !updates.shape().iter().eq(outer.iter().chain(&shape[depth..])) {
        return Err(Error::invalid_argument(format!(
            "Must have updates.shape = indices.shape[:batch_dim] + params_shape[slice_dim:], got updates.shape: {}, \
             indices.shape: {}, params_shape: {shape}, slice_dim: {depth}, and batch_dim: {}",
            updates.shape(),
            indices.shape(),
            outer.len()
        )));
    }
    Ok((shape[depth..].iter().product(), rows))
}

/// Calls `change` with each slice of the variable that is named, in order.
fn change(ctx: &KernelCtx<'_>, update: impl FnOnce(&mut Tensor, usize, &[usize]) -> Result<()>) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    cell.update(|variable| {
        let dtype = ctx.input(2)?.dtype();
        if dtype != variable.dtype() {
            return Err(wrong_dtype("update", variable.dtype(), dtype));
        }
        let (len, rows) = slices(ctx, variable.shape())?;
        if len == 0 {
            return Ok(());
        }
        update(variable, len, &rows)
    })
}

fn combine<T: Number>(ctx: &KernelCtx<'_>, f: impl Fn(T, T) -> T) -> Result<()> {
    change(ctx, |variable, len, rows| {
        let (to, from) = (variable.data_mut::<T>()?, ctx.data::<T>(2)?);
        for (&row, from) in rows.iter().zip(from.chunks_exact(len)) {
            to[row * len..(row + 1) * len].iter_mut().zip(from).for_each(|(x, &y)| *x = f(*x, y));
        }
        Ok(())
    })
}

/// Replaces slices, whatever the elements are.
fn replace(ctx: &mut KernelCtx<'_>) -> Result<()> {
    change(ctx, |variable, len, rows| {
        let updates = ctx.input(2)?;
        if variable.dtype() == DType::Str {
            let (mut strings, from) = (variable.strings()?.to_vec(), updates.strings()?);
            for (&row, from) in rows.iter().zip(from.chunks_exact(len)) {
                strings[row * len..(row + 1) * len].clone_from_slice(from);
            }
            *variable = Tensor::from_strings(variable.shape().clone(), strings)?;
            return Ok(());
        }
        let n = len * variable.dtype().size().unwrap_or(0);
        let (to, from) = (variable.host_bytes_mut()?, updates.host_bytes()?);
        for (&row, from) in rows.iter().zip(from.chunks_exact(n)) {
            to[row * n..(row + 1) * n].copy_from_slice(from);
        }
        Ok(())
    })
}

fn replace_reference(ctx: &mut KernelCtx<'_>) -> Result<()> {
    replace(ctx)?;
    ctx.forward(0, 0)
}

/// For references, and for handles.
const UPDATE: (&[KernelDef], &[KernelDef]) = (&[cpu_any(replace_reference)], &[cpu_any(replace)]);

macro_rules! kernels {
    ($($table:ident, $on_reference:ident, $on_resource:ident, $f:ident;)*) => {
        $(fn $on_resource<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
            combine::<T>(ctx, T::$f)
        }
        fn $on_reference<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
            combine::<T>(ctx, T::$f)?;
            ctx.forward(0, 0)
        }
        const $table: (&[KernelDef], &[KernelDef]) = (
            cpu_kernels!($on_reference: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64),
            cpu_kernels!($on_resource: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64),
        );)*
    };
}

kernels! {
    ADD, add_reference, add, add;
    SUB, sub_reference, sub, sub;
}

#[cfg(test)]
mod tests {
    use kolo_graph::VariableKind;

    use super::*;
    use crate::testing::{Evaluation, tensor};

    /// Runs one op in both families; both must give the same.
    fn after(verb: &str, initial: Tensor, indices: Tensor, updates: Tensor) -> Result<Tensor> {
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
            run.run_targets(&[v.initializer()], &[])?;
            let feeds = [(i, indices.clone()), (u, updates.clone())];
            found.push(run.run_targets(&[scatter], &feeds).and_then(|()| Ok(run.run(&[read], &[])?.remove(0))));
        }
        let (resource, reference) = (found.pop().unwrap(), found.pop().unwrap());
        assert_eq!(resource.is_ok(), reference.is_ok());
        if let (Ok(a), Ok(b)) = (&resource, &reference) {
            assert_eq!(a, b);
        }
        resource
    }

    #[test]
    fn slices_are_changed_in_order() {
        // TensorFlow's example.
        let eight = || Tensor::from([1i32, 2, 3, 4, 5, 6, 7, 8]);
        let indices = || Tensor::from([[4i32], [3], [1], [7]]);
        let updates = || Tensor::from([9i32, 10, 11, 12]);
        assert_eq!(after("Update", eight(), indices(), updates()), Ok(Tensor::from([1i32, 11, 3, 10, 9, 6, 7, 12])));
        assert_eq!(after("Add", eight(), indices(), updates()), Ok(Tensor::from([1i32, 13, 3, 14, 14, 6, 7, 20])));
        assert_eq!(after("Sub", eight(), indices(), updates()), Ok(Tensor::from([1i32, -9, 3, -6, -4, 6, 7, -4])));
        let grid = || tensor([2, 2], [1.0f32, 2.0, 3.0, 4.0]);
        let twice = after("Add", grid(), Tensor::from([[1i64], [1]]), grid());
        assert_eq!(twice, Ok(tensor([2, 2], [1.0f32, 2.0, 7.0, 10.0])));
        let all = after("Sub", grid(), tensor::<i32, 2>([1, 0], []), tensor([1, 2, 2], [1.0f32; 4]));
        assert_eq!(all, Ok(tensor([2, 2], [0.0f32, 1.0, 2.0, 3.0])));
        let words = |list: &[&'static str]| {
            Tensor::from_strings([list.len()], list.iter().map(|&word| word.into()).collect()).unwrap()
        };
        let found = after("Update", words(&["a", "b"]), Tensor::from([[1i32]]), words(&["z"]));
        assert_eq!(found, Ok(words(&["a", "z"])));
    }

    #[test]
    fn bad_coordinates_change_nothing() {
        let grid = || tensor([2, 2], [1.0f32, 2.0, 3.0, 4.0]);
        let error = after("Add", grid(), Tensor::from([[0i32, 0], [0, 2]]), Tensor::from([1.0f32, 1.0])).unwrap_err();
        assert!(error.message().contains("indices[1] = [0, 2] does not index into shape [2,2]"), "{error}");
        let error = after("Update", grid(), Tensor::from([[0i32, 0]]), Tensor::from([1.0f32, 1.0])).unwrap_err();
        assert!(error.message().contains("Must have updates.shape"), "{error}");
    }
}
