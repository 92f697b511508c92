//! `DataFormatVecPermute`: sizes of an image's dimensions in another order, such as from `NHWC` to `NCHW`. `DataFormatDimMap`: the
//! number of a dimension in another order.

use kolo_core::{DType, Error, Result};
use kolo_graph::shape_fns::same_as_input_0;
use kolo_graph::{Attrs, Gradient, OpDef};

use super::elements::{integer_tensor, integers};
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static DATA_FORMAT_VEC_PERMUTE: Op = Op {
    def: OpDef {
        name: "DataFormatVecPermute",
        signature: "(x:T) -> (y:T) ; T:type{int32,int64}=int32, src_format:string=\"NHWC\", dst_format:string=\"NCHW\"",
        shape: |ctx| {
            formats(ctx.attrs(), false)?;
            same_as_input_0(ctx)
        },
        gradient: Gradient::None("sizes are whole numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(permute)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static DATA_FORMAT_DIM_MAP: Op = Op {
    def: OpDef {
        name: "DataFormatDimMap",
        signature: "(x:T) -> (y:T) ; T:type{int32,int64}=int32, src_format:string=\"NHWC\", dst_format:string=\"NCHW\"",
        shape: |ctx| {
            formats(ctx.attrs(), false)?;
            same_as_input_0(ctx)
        },
        gradient: Gradient::None("dimensions are whole numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(map)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

/// For each dimension of the destination, where it is in the source; of the spatial dimensions alone if `spatial`.
fn formats(attrs: &Attrs, spatial: bool) -> Result<Vec<usize>> {
    let (from, to) = (attrs.str("src_format")?, attrs.str("dst_format")?);
    for (name, format) in [("Source", from), ("Destination", to)] {
        if !(4..=5).contains(&format.len()) || !format.is_ascii() {
            return Err(Error::invalid_argument(format!("{name} format must be of length 4 or 5, received {format}")));
        }
    }
    let letters = |format: &str| -> Vec<u8> {
        format.bytes().filter(|letter| !spatial || !matches!(letter, b'N' | b'C')).collect()
    };
    let (source, target) = (letters(from), letters(to));
    let places: Option<Vec<usize>> =
        target.iter().map(|letter| source.iter().position(|other| other == letter)).collect();
    let mut seen = vec![false; source.len()];
    match places {
        Some(places)
            if source.len() == target.len()
                && places.iter().all(|&place| !std::mem::replace(&mut seen[place], true)) =>
        {
            Ok(places)
        }
        _ => Err(Error::invalid_argument(format!(
            "Destination and source format must determine a permutation, got {from} and {to}"
        ))),
    }
}

fn permute(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let x = ctx.input(0)?;
    let n = match x.shape().dims() {
        [n] | [n, 2] => *n,
        _ => {
            return Err(Error::invalid_argument(format!(
                "input must be a vector or a matrix of two columns, but got shape {}",
                x.shape()
            )));
        }
    };
    let full = formats(ctx.attrs(), false)?.len();
    if n != full && n + 2 != full {
        return Err(Error::invalid_argument(format!(
            "1D input must be of size {} or {full}, but got shape {}",
            full - 2,
            x.shape()
        )));
    }
    let places = formats(ctx.attrs(), n != full)?;
    if places.len() != n {
        return Err(Error::invalid_argument(
            "the formats must have the dimensions N and C and no others but spatial ones",
        ));
    }
    let values = integers(x)?;
    let width = values.len() / n;
    let out = places.iter().flat_map(|&place| values[place * width..(place + 1) * width].iter().copied()).collect();
    let out = integer_tensor(x.dtype(), x.shape().clone(), out)?;
    ctx.set_output(0, out);
    Ok(())
}

fn map(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let places = formats(ctx.attrs(), false)?;
    let (x, n) = (ctx.input(0)?, places.len() as i64);
    let (dtype, shape) = (x.dtype(), x.shape().clone());
    let mut values = integers(x)?;
    for value in &mut values {
        let source = value.rem_euclid(n) as usize;
        // Every dimension is somewhere, since the formats are a permutation.
        *value = places.iter().position(|&place| place == source).map_or(0, |at| at as i64);
    }
    debug_assert!(matches!(dtype, DType::I32 | DType::I64));
    let out = integer_tensor(dtype, shape, values)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::check_op;

    #[test]
    fn sizes_change_places() {
        let case =
            |from: &str, to: &str| check_op("DataFormatVecPermute").attr("src_format", from).attr("dst_format", to);
        case("NHWC", "NCHW").input([7i32, 4, 9, 3]).gives([7i32, 3, 4, 9]);
        case("NCHW", "NHWC").input([[7i64, 4], [9, 3], [4, 5], [5, 1]]).gives([[7i64, 4], [4, 5], [5, 1], [9, 3]]);
        case("NHWC", "HWNC").input([7i32, 4, 9, 3]).gives([4i32, 9, 7, 3]);
        case("NHWC", "NCHW").input([7i32, 4]).gives([7i32, 4]);
        case("NHWC", "WHCN").input([7i32, 4]).gives([4i32, 7]);
        case("NHWC", "NCHW").input([7i32, 4, 9]).fails("size 2 or 4");
        case("NHWC", "NCH").input([7i32, 4]).fails("length 4 or 5");
        case("NHWC", "NHHC").input([7i32, 4, 9, 3]).fails("determine a permutation");
    }

    #[test]
    fn dimensions_change_numbers() {
        let case = |from: &str, to: &str| check_op("DataFormatDimMap").attr("src_format", from).attr("dst_format", to);
        case("NHWC", "NCHW").input([0i32, 1, 2, 3, -1, -2, -3, -4]).gives([0i32, 2, 3, 1, 1, 3, 2, 0]);
        case("NHWC", "HWNC").input(3i64).gives(3i64);
    }
}
