//! `Bitcast`: the same bytes read as another dtype.

use kolo_core::{DType, Dim, Error, PartialShape, Result, Shape};
use kolo_graph::{Gradient, OpDef, Output, Work};

use crate::cuda::PLAIN;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The bytes of `x` read as `dtype`. If elements become smaller there is a new last dimension of their pieces; if they
/// become larger the last dimension must hold exactly the pieces of one, and goes away.
#[track_caller]
pub fn bitcast(x: Output<'_>, dtype: DType) -> Output<'_> {
    x.graph().op("Bitcast").input(x).attr("type", dtype).out()
}

pub(crate) static BITCAST: Op = Op {
    def: OpDef {
        name: "Bitcast",
        signature: "(input:T) -> (output:type) ; T:type{num}, type:type{num}",
        shape: |ctx| {
            let Some(dims) = ctx.input(0).dims() else { return Ok(vec![PartialShape::unknown()]) };
            let dims = recut(dims, ctx.attrs().dtype("T")?, ctx.attrs().dtype("type")?, |dim, n| {
                dim.is_none_or(|dim| dim == n)
            })?;
            Ok(vec![PartialShape::new(&dims)])
        },
        gradient: Gradient::None("bits do not change smoothly"),
        work: Work::Reshapes,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Inline,
};

/// The sizes after the cast; `fits` says whether a last size may be `n`.
fn recut<D: Copy + From<Piece>>(dims: &[D], from: DType, to: DType, fits: impl Fn(D, usize) -> bool) -> Result<Vec<D>> {
    let cannot = |why: &str| Error::invalid_argument(format!("Cannot bitcast from {from} to {to}{why}"));
    let (Some(have), Some(want)) = (from.size(), to.size()) else { return Err(cannot("")) };
    let mut dims = dims.to_vec();
    if have > want {
        dims.push(Piece(have / want).into());
    } else if have < want {
        let n = want / have;
        match dims.pop() {
            Some(last) if fits(last, n) => {}
            _ => return Err(cannot(&format!(": the last dimension must be {n}"))),
        }
    }
    Ok(dims)
}

/// A size, for shapes of either kind.
struct Piece(usize);

impl From<Piece> for usize {
    fn from(piece: Piece) -> usize {
        piece.0
    }
}

impl From<Piece> for Dim {
    fn from(piece: Piece) -> Dim {
        Some(piece.0)
    }
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (from, to) = (ctx.attrs().dtype("T")?, ctx.attrs().dtype("type")?);
    let input = ctx.take_input(0)?;
    let dims = recut(input.shape().dims(), from, to, |dim, n| dim == n)?;
    let shape = Shape::new(&dims)?;
    if from.size() == to.size() {
        let out = input.bitcast(to)?;
        ctx.set_output(0, out);
        return Ok(());
    }
    // A buffer of small elements need not be aligned for large ones.
    if crate::cuda::view::is_on_gpu(&input) {
        let out = crate::cuda::view::recast(ctx, &input, to, shape)?;
        ctx.set_output(0, out);
        return Ok(());
    }
    let mut out = ctx.allocate(to, shape)?;
    out.host_bytes_mut()?.copy_from_slice(input.host_bytes()?);
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor};

    #[test]
    fn bitcast() {
        let case = |dtype: DType| check_op("Bitcast").attr("type", dtype);
        case(DType::I32).input([1.0f32, -0.0]).gives([0x3f80_0000i32, i32::MIN]);
        case(DType::U8).input([0x0102_0304u32]).gives([[4u8, 3, 2, 1]]);
        case(DType::U32).input([[4u8, 3, 2, 1]]).gives([0x0102_0304u32]);
        case(DType::F64).input(0x3ff0_0000_0000_0000i64).gives(1.0f64);
        case(DType::I32).input(tensor::<u8, 2>([0, 4], [])).gives(tensor::<i32, 1>([0], []));
        case(DType::I32)
            .input([[1i16, 2, 3]])
            .fails("Cannot bitcast from int16 to int32: the last dimension must be 2");
        case(DType::I32).input(1u8).fails("Cannot bitcast from uint8 to int32");
        case(DType::Bool).input(1u8).fails("bool is not allowed");
    }
}
