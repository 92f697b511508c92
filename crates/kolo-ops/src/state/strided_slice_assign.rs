//! `StridedSliceAssign` and `ResourceStridedSliceAssign`: write to the part of a variable that `StridedSlice` would show.

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Effects, Gradient, OpDef};

use super::handle::uninitialized;
use super::read::wrong_dtype;
use crate::array::strided_slice::resolve;
use crate::array::view::View;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static STRIDED_SLICE_ASSIGN: Op = Op {
    def: OpDef {
        name: "StridedSliceAssign",
        signature: "(ref:Ref(T), begin:Index, end:Index, strides:Index, value:T) -> (output_ref:Ref(T)) ; T:type, \
                    Index:type{int32,int64}, begin_mask:int=0, end_mask:int=0, ellipsis_mask:int=0, new_axis_mask:int=0, \
                    shrink_axis_mask:int=0",
        shape: kolo_graph::shape_fns::same_as_input_0,
        gradient: Gradient::None("a variable's new value does not depend on a graph"),
        effects: Effects::Writes,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        assign(ctx)?;
        ctx.forward(0, 0)
    })],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static RESOURCE_STRIDED_SLICE_ASSIGN: Op = Op {
    def: OpDef {
        name: "ResourceStridedSliceAssign",
        signature: "(ref:resource, begin:Index, end:Index, strides:Index, value:T) -> () ; T:type, \
                    Index:type{int32,int64}, begin_mask:int=0, end_mask:int=0, ellipsis_mask:int=0, new_axis_mask:int=0, \
                    shrink_axis_mask:int=0",
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Writes,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(assign)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn assign(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    cell.update(|variable| {
        let value = ctx.input(4)?;
        if value.dtype() != variable.dtype() {
            return Err(wrong_dtype("assign", variable.dtype(), value.dtype()));
        }
        let (view, shape) = resolve(ctx, variable.shape(), 1)?;
        if *value.shape() != shape {
            return Err(Error::invalid_argument(format!(
                "sliced l-value shape {shape} does not match r-value shape {}. Automatic broadcasting not yet \
                 implemented.",
                value.shape()
            )));
        }
        write(&view, variable, value)
    })
}

/// Writes `value` through the view, whatever the elements are.
fn write(view: &View, variable: &mut Tensor, value: &Tensor) -> Result<()> {
    fn elements<const N: usize>(view: &View, variable: &mut Tensor, value: &Tensor) -> Result<()>
    where
        [u8; N]: Default + bytemuck::Pod,
    {
        let from: &[[u8; N]] = bytemuck::cast_slice(value.host_bytes()?);
        view.write(bytemuck::cast_slice_mut(variable.host_bytes_mut()?), from);
        Ok(())
    }
    if variable.dtype() == DType::Str {
        let mut strings = variable.strings()?.to_vec();
        view.write(&mut strings, value.strings()?);
        *variable = Tensor::from_strings(variable.shape().clone(), strings)?;
        return Ok(());
    }
    match variable.dtype().size() {
        Some(1) => elements::<1>(view, variable, value),
        Some(2) => elements::<2>(view, variable, value),
        Some(4) => elements::<4>(view, variable, value),
        Some(8) => elements::<8>(view, variable, value),
        Some(16) => elements::<16>(view, variable, value),
        _ => Err(Error::unimplemented(format!("slices of {} variables cannot be assigned", variable.dtype()))),
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;
    use kolo_graph::VariableKind;

    use super::*;
    use crate::testing::{Evaluation, tensor};

    fn after(initial: Tensor, range: [[i32; 2]; 3], shrink: i64, value: Tensor) -> Result<Tensor> {
        let mut found = Vec::new();
        for (kind, op) in
            [(VariableKind::Reference, "StridedSliceAssign"), (VariableKind::Resource, "ResourceStridedSliceAssign")]
        {
            let g = crate::graph();
            let v = g.new_variable("v", initial.clone()).kind(kind).build();
            let range = range.map(|list| g.constant(list));
            let assign = g.op(op).input(v.handle()).inputs(range).input(g.constant(value.clone()));
            let assign = assign.attr("shrink_axis_mask", shrink).build();
            let read = v.read_now();
            g.check()?;
            let run = Evaluation::new(g.snapshot());
            run.run_targets(&[v.initializer()], &[])?;
            run.run_targets(&[assign], &[])?;
            found.push(run.run(&[read], &[])?.remove(0));
        }
        assert_eq!(found[0], found[1]);
        Ok(found.remove(0))
    }

    #[test]
    fn the_slice_is_written() {
        let v = || tensor([3, 3], [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        // v[0:3:2, 1:3] = …
        let found = after(v(), [[0, 1], [3, 3], [2, 1]], 0, tensor([2, 2], [-1.0f32, -2.0, -3.0, -4.0]));
        assert_eq!(found, Ok(tensor([3, 3], [1.0f32, -1.0, -2.0, 4.0, 5.0, 6.0, 7.0, -3.0, -4.0])));
        // v[1, ::-1] = …
        let found = after(v(), [[1, 2], [2, -9], [1, -1]], 1, Tensor::from([10.0f32, 20.0, 30.0]));
        assert_eq!(found, Ok(tensor([3, 3], [1.0f32, 2.0, 3.0, 30.0, 20.0, 10.0, 7.0, 8.0, 9.0])));
        let words = |list: &[&'static str]| {
            Tensor::from_strings([1, list.len()], list.iter().map(|&word| word.into()).collect()).unwrap()
        };
        let found = after(words(&["a", "b"]), [[0, 1], [1, 2], [1, 1]], 0, words(&["z"]));
        assert_eq!(found, Ok(words(&["a", "z"])));
        let error = after(v(), [[0, 0], [1, 2], [1, 1]], 0, Tensor::scalar(1.0f32)).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("sliced l-value shape [1,2] does not match r-value shape []"), "{error}");
    }
}
