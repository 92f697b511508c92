//! `StringToHashBucketFast`: a bucket for each string, by its fingerprint.

use kolo_core::{DType, Error, Result};
use kolo_device::cpu::stop_if_asked;
use kolo_graph::{OpDef, Output, shape_fns};

use super::NO_GRADIENT;
use super::farm_hash::fingerprint64;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// For each string a number below `n_buckets`, always the same one.
#[track_caller]
pub fn string_to_hash_bucket_fast(strings: Output<'_>, n_buckets: i64) -> Output<'_> {
    strings.graph().op("StringToHashBucketFast").input(strings).attr("num_buckets", n_buckets).out()
}

pub(crate) static STRING_TO_HASH_BUCKET_FAST: Op = Op {
    def: OpDef {
        name: "StringToHashBucketFast",
        signature: "(input:string) -> (output:int64) ; num_buckets:int>=1",
        shape: shape_fns::same_as_input_0,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.attrs().int("num_buckets")?;
    let n = u64::try_from(n)
        .ok()
        .filter(|&n| n > 0)
        .ok_or_else(|| Error::invalid_argument(format!("num_buckets is {n}, and must be positive")))?;
    let mut out = ctx.allocate(DType::I64, ctx.input(0)?.shape().clone())?;
    let strings = ctx.input(0)?.strings()?;
    for (y, text) in out.data_mut::<i64>()?.iter_mut().zip(strings) {
        stop_if_asked();
        *y = (fingerprint64(text) % n) as i64;
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::check_op;

    #[test]
    fn buckets_are_tensorflows() {
        let texts = [
            "",
            "a",
            "ab",
            "abc",
            "abcd",
            "hello",
            "hello wo",
            "hello world!",
            "0123456789abcdef",
            "0123456789abcdefg",
        ];
        let long = [("x", 32), ("x", 33), ("y", 64), ("y", 65), ("abc", 50), ("q", 128), ("q", 129), ("Zr", 500)];
        let all: Vec<bytes::Bytes> = texts
            .iter()
            .map(|text| text.to_string())
            .chain(long.iter().map(|(text, n)| text.repeat(*n)))
            .map(bytes::Bytes::from)
            .collect();
        let input = || Tensor::from_strings([all.len()], all.clone()).unwrap();
        check_op("StringToHashBucketFast").attr("num_buckets", 1i64 << 62).input(input()).gives(vec![
            1936946117179621455i64,
            3694432073954588131,
            3066228220894225694,
            2640714258260161385,
            1897425971756105985,
            3786372426573024488,
            3616420679985843595,
            4577883861590986596,
            1493332391325024359,
            2800675501336285770,
            3678204687145032709,
            3046993373088323127,
            4471793200125962424,
            4023130470993650268,
            2999530846569638125,
            3049490681071257226,
            154208312781622945,
            3655395001268585771,
        ]);
        check_op("StringToHashBucketFast")
            .attr("num_buckets", 10i64)
            .input(input())
            .gives(vec![3i64, 9, 2, 5, 5, 6, 5, 6, 3, 8, 7, 5, 4, 6, 5, 0, 7, 3]);
        check_op("StringToHashBucketFast").attr("num_buckets", 0i64).input("a").fails("num_buckets");
    }
}
