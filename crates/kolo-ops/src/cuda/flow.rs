//! Control flow, pass-throughs and shapes: nothing is computed on the card.

use kolo_core::{DType, Error, Result, Shape, Tensor};

use crate::KernelCtx;

/// What may be asked for its shape.
pub(crate) const ANY: &[DType] = &[
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I8,
    DType::I16,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::Bool,
];

pub(crate) fn constant(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let value = ctx.attrs().tensor("value")?.clone();
    let (copy, event) = ctx.device.copy(&value, ctx.device.memory())?;
    if let Some(event) = event {
        event.wait()?;
    }
    ctx.set_output(0, copy);
    Ok(())
}

pub(crate) fn shape(ctx: &mut KernelCtx<'_>) -> Result<()> {
    for i in 0..ctx.n_inputs() {
        let dims: Vec<i64> = ctx.input(i)?.shape().iter().map(|&dim| dim as i64).collect();
        let shape = Shape::new(&[dims.len()])?;
        let out = integers(shape, &dims, ctx.attrs().dtype("out_type")?)?;
        ctx.set_output(i, out);
    }
    Ok(())
}

pub(crate) fn size(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.input(0)?.n_elements() as i64;
    let out = integers(Shape::scalar(), &[n], ctx.attrs().dtype("out_type")?)?;
    ctx.set_output(0, out);
    Ok(())
}

pub(crate) fn rank(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let rank = ctx.input(0)?.shape().rank() as i64;
    ctx.set_output(0, integers(Shape::scalar(), &[rank], DType::I32)?);
    Ok(())
}

/// Whole numbers in host memory.
pub(super) fn integers(shape: Shape, values: &[i64], dtype: DType) -> Result<Tensor> {
    match dtype {
        DType::I64 => Tensor::from_vec(shape, values.to_vec()),
        _ => {
            let narrow: std::result::Result<Vec<i32>, _> = values.iter().map(|&value| i32::try_from(value)).collect();
            let narrow = narrow.map_err(|_| Error::invalid_argument(format!("{values:?} do not fit int32")))?;
            Tensor::from_vec(shape, narrow)
        }
    }
}
