//! `DecodeRaw`: bytes as numbers.

use kolo_core::{DType, Dim, Error, PartialShape, Result, Shape};
use kolo_device::cpu::stop_if_asked;
use kolo_graph::{Gradient, OpDef, Output};

use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The bytes of each string as numbers of `dtype`, the low byte first, along a new last dimension.
#[track_caller]
pub fn decode_raw(strings: Output<'_>, dtype: DType) -> Output<'_> {
    strings.graph().op("DecodeRaw").input(strings).attr("out_type", dtype).out()
}

pub(crate) static DECODE_RAW: Op = Op {
    def: OpDef {
        name: "DecodeRaw",
        signature: "(bytes:string) -> (output:out_type) ; \
                    out_type:type{half,float,double,int32,uint16,uint8,int16,int8,int64,complex64,complex128,bool,\
                    bfloat16}, little_endian:bool=true",
        shape: |ctx| {
            let Some(dims) = ctx.input(0).dims() else { return Ok(vec![PartialShape::unknown()]) };
            Ok(vec![PartialShape::new(&[dims, &[None]].concat() as &[Dim])])
        },
        gradient: Gradient::None("bytes are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::FILES,
    cost: Cost::Elements,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let dtype = ctx.attrs().dtype("out_type")?;
    let size = dtype.size().ok_or_else(|| Error::unimplemented(format!("DecodeRaw does not make {dtype}")))?;
    let input = ctx.input(0)?;
    let strings = input.strings()?;
    let n = strings.first().map_or(0, |first| first.len());
    if let Some((i, other)) = strings.iter().enumerate().find(|(_, text)| text.len() != n) {
        return Err(Error::invalid_argument(format!(
            "DecodeRaw requires input strings to all be the same size, but element {i} has size {} != {n}",
            other.len()
        )));
    }
    if !n.is_multiple_of(size) {
        return Err(Error::invalid_argument(format!(
            "Input to DecodeRaw has length {n} that is not a multiple of {size}, the size of {dtype}"
        )));
    }
    let shape = Shape::new(&[input.shape().dims(), &[n / size]].concat())?;
    let mut out = ctx.allocate(dtype, shape)?;
    let bytes = out.host_bytes_mut()?;
    for (to, from) in bytes.chunks_exact_mut(n.max(1)).zip(strings) {
        stop_if_asked();
        to.copy_from_slice(from);
    }
    if dtype == DType::Bool {
        // Anything but zero is true.
        bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
    if ctx.attrs().bool("little_endian")? != cfg!(target_endian = "little") {
        let part = if matches!(dtype, DType::Complex64 | DType::Complex128) { size / 2 } else { size };
        bytes.chunks_exact_mut(part).for_each(<[u8]>::reverse);
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use super::*;
    use crate::testing::{check_op, tensor};

    #[test]
    fn bytes_become_numbers() {
        let bytes = |list: &[&'static [u8]]| {
            Tensor::from_strings([list.len()], list.iter().map(|&text| text.into()).collect()).unwrap()
        };
        let test =
            |dtype: DType, list: &[&'static [u8]]| check_op("DecodeRaw").attr("out_type", dtype).input(bytes(list));
        test(DType::I16, &[b"\x01\x00\x02\x00", b"\x03\x00\x04\x00"]).gives([[1i16, 2], [3, 4]]);
        test(DType::U16, &[b"\x01\x00"]).attr("little_endian", false).gives([[256u16]]);
        test(DType::Bool, &[b"\x02\x00"]).gives([[true, false]]);
        test(DType::F32, &[b"\x00\x00\x80\x3f"]).gives([[1.0f32]]);
        test(DType::I16, &[]).gives(tensor::<i16, 2>([0, 0], []));
        test(DType::U8, &[b"\x01\x00", b"\x00"]).fails("all be the same size");
        test(DType::I16, &[b"abc"]).fails("length 3 that is not a multiple of 2, the size of int16");
        check_op("DecodeRaw").attr("out_type", DType::I16).input("").gives(tensor::<i16, 1>([0], []));
    }
}
