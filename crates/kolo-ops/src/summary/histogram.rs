//! `HistogramSummary`: how the values of a tensor are distributed.
//!
//! The buckets are TensorFlow's: their limits are 1e-12 · 1.1^k up to 1e20, the same below zero, zero itself, and the
//! greatest finite numbers. A value belongs to the first bucket whose limit is greater. Runs of empty buckets are written
//! as one.

use std::sync::OnceLock;

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Gradient, OpDef, Output, shape_fns};

use super::proto::{Content, HistogramProto, Summary, Value};
use super::{scalar_tag, tag_text};
use crate::math::number::Number;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// A summary of the distribution of `values`, under `tag`, a scalar. NaN and infinity fail the step.
#[track_caller]
pub fn histogram_summary<'g>(tag: Output<'g>, values: Output<'g>) -> Output<'g> {
    tag.graph().op("HistogramSummary").input(tag).input(values).out()
}

pub(crate) static HISTOGRAM_SUMMARY: Op = Op {
    def: OpDef {
        name: "HistogramSummary",
        signature: "(tag:string, values:T) -> (summary:string) ; T:type{real}=float",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a summary"),
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(summarize: f32, f64, i32, u8, i16, i8, i64, half::bf16, u16, half::f16, u32, u64),
    gpu: Gpu::Never("summaries are written in host memory"),
    cost: Cost::Elements,
};

fn summarize<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let tag = tag_text(scalar_tag(ctx.input(0)?, "tags must be scalar")?)?;
    let histogram = of_values(ctx.data::<T>(1)?, &ctx.node.name)?;
    let value = Value::new(tag, Content::Histo(histogram));
    ctx.set_output(0, Summary::from(vec![value]).to_tensor());
    Ok(())
}

/// The histogram of a tensor of numbers; `name` is for errors.
pub fn histogram(tensor: &Tensor, name: &str) -> Result<HistogramProto> {
    macro_rules! by_dtype {
        ($($dtype:ident: $ty:ty),*) => {
            match tensor.dtype() {
                $(kolo_core::DType::$dtype => of_values(tensor.data::<$ty>()?, name),)*
                other => Err(Error::invalid_argument(format!("{other} elements have no histogram"))),
            }
        };
    }
    by_dtype!(
        F32: f32, F64: f64, I32: i32, U8: u8, I16: i16, I8: i8, I64: i64, BF16: half::bf16, U16: u16, F16: half::f16,
        U32: u32, U64: u64
    )
}

fn of_values<T: Number>(values: &[T], name: &str) -> Result<HistogramProto> {
    let limits = limits();
    let mut counts = vec![0.0f64; limits.len()];
    let (mut min, mut max) = (f64::MAX, -f64::MAX);
    let (mut num, mut sum, mut sum_squares) = (0.0, 0.0, 0.0);
    for value in values {
        let value = value.to_f64();
        if value.is_nan() {
            return Err(Error::invalid_argument(format!("Nan in summary histogram for: {name}")));
        }
        if value.is_infinite() {
            return Err(Error::invalid_argument(format!("Infinity in Histogram for: {name}")));
        }
        // The greatest finite number is its bucket's own limit; it counts there all the same.
        let bucket = limits.partition_point(|limit| *limit <= value).min(limits.len() - 1);
        counts[bucket] += 1.0;
        if min > value {
            min = value;
        }
        if max < value {
            max = value;
        }
        num += 1.0;
        sum += value;
        sum_squares += value * value;
    }
    let unless_zero = |x: f64| (x.to_bits() != 0).then_some(x);
    let mut proto = HistogramProto {
        min: unless_zero(min),
        max: unless_zero(max),
        num: unless_zero(num),
        sum: unless_zero(sum),
        sum_squares: unless_zero(sum_squares),
        ..HistogramProto::default()
    };
    for (i, &count) in counts.iter().enumerate() {
        let is_run = count == 0.0 && counts.get(i + 1) == Some(&0.0);
        if !is_run {
            proto.bucket_limit.push(limits[i]);
            proto.bucket.push(count);
        }
    }
    Ok(proto)
}

/// The upper ends of all buckets, ascending.
fn limits() -> &'static [f64] {
    static LIMITS: OnceLock<Vec<f64>> = OnceLock::new();
    LIMITS.get_or_init(|| {
        // Repeated products, not powers: the limits must be TensorFlow's to the last bit.
        let mut above = Vec::new();
        let mut limit = 1.0e-12;
        while limit < 1.0e20 {
            above.push(limit);
            limit *= 1.1;
        }
        above.push(f64::MAX);
        let below = above.iter().rev().map(|limit| -limit);
        below.chain([0.0]).chain(above.iter().copied()).collect()
    })
}

#[cfg(test)]
mod tests {
    use half::f16;
    use prost::Message as _;

    use super::super::testing::bytes;
    use super::*;
    use crate::testing::{check_op, tensor};

    // The expected bytes were written by TensorFlow 2.21.

    #[test]
    fn values_fall_into_tensorflow_s_buckets() {
        check_op("HistogramSummary").input("h").input([1.0f32, 1.0, 2.0, -3.5, 0.0]).gives(bytes(
            "0ac7010a01682ac101090000000000000cc011000000000000004019000000000000144021000000000000e03f290000000000403240\
             324881444bf80ba70ec075f872caaddd0bc0000000000000000011ea2d819997713d08996919155aed3f2b14facdbe24f03fdc94cd2e\
             8d75ff3fe011f10c744d0140ffffffffffffef7f3a480000000000000000000000000000f03f00000000000000000000000000\
             00f03f000000000000000000000000000000400000000000000000000000000000f03f0000000000000000",
        ));
        check_op("HistogramSummary").input("h").input(tensor([2, 2], [1i32, 2, 3, 100])).gives(bytes(
            "0ac7010a01682ac10109000000000000f03f110000000000005940190000000000001040210000000000805a402900000000008fc340\
             324808996919155aed3f2b14facdbe24f03fdc94cd2e8d75ff3fe011f10c744d014068bc10359a0707400d9cc5a029550940723b6014\
             ce785840feda691649eb5a40ffffffffffffef7f3a480000000000000000000000000000f03f0000000000000000000000000000f03f\
             0000000000000000000000000000f03f0000000000000000000000000000f03f0000000000000000",
        ));
        let halves = [f16::from_f32(0.1), f16::from_f32(1000.0)];
        check_op("HistogramSummary").input("h").input(halves).gives(bytes(
            "0a87010a01682a810109000000000098b93f110000000000408f4019000000000000004021000000c0cc408f402980141e0580842e41\
             3228382f9a43f9d6b73f2567f6634539ba3f83dcaaf154218e40af5f841e55929040ffffffffffffef7f3a2800000000000000000000\
             00000000f03f0000000000000000000000000000f03f0000000000000000",
        ));
    }

    #[test]
    fn the_ends_of_the_scale_and_nothing_at_all() {
        check_op("HistogramSummary")
            .input("h")
            .input(tensor::<f32, 1>([0], []))
            .gives(bytes("0a2b0a01682a2609ffffffffffffef7f11ffffffffffffefff3208ffffffffffffef7f3a080000000000000000"));
        check_op("HistogramSummary").input("h").input([-0.0f32, 0.0]).gives(bytes(
            "0a540a01682a4f0900000000000000801100000000000000801900000000000000403218000000000000000011ea2d819997713dffff\
             ffffffffef7f3a18000000000000000000000000000000400000000000000000",
        ));
        check_op("HistogramSummary").input("h").input([1e-30f64, -1e30, 1e300, -1e300, 1.7e308]).gives(bytes(
            "0a97010a01682a9101099c7500883ce437fe11763b7730d142ee7f19000000000000144021763b7730d142ee7f29000000000000f07f\
             3230ffffffffffffefff4c549f02238315c4000000000000000011ea2d819997713d4c549f0223831544ffffffffffffef7f3a300000\
             00000000000000000000000000400000000000000000000000000000f03f00000000000000000000000000000040",
        ));
        assert_eq!(histogram(&Tensor::from([f64::MAX]), "h").unwrap().bucket, [0.0, 1.0]);
        assert!(histogram(&Tensor::from([true]), "h").is_err());
    }

    #[test]
    fn a_thousand_values_make_the_bytes_that_tensorflow_makes() {
        let values: Vec<f64> = (0..1000i64).map(|i| ((i * 7919) % 1000 - 500) as f64 / 97.0).collect();
        let value = Value::new("h", Content::Histo(histogram(&Tensor::from(values), "h").unwrap()));
        let bytes = Summary::from(vec![value]).encode_to_vec();
        // The length and CRC-32C of what TensorFlow wrote.
        assert_eq!((bytes.len(), crc32c::crc32c(&bytes)), (1996, 3_877_813_546));
    }

    #[test]
    fn what_is_not_a_finite_number_is_refused() {
        let check = |value: f32, text: &str| drop(check_op("HistogramSummary").input("h").input([value]).fails(text));
        check(f32::NAN, "Nan in summary histogram for: HistogramSummary");
        check(f32::INFINITY, "Infinity in Histogram for: HistogramSummary");
        let tags = Tensor::from_strings([1], vec!["a".into()]).unwrap();
        check_op("HistogramSummary").input(tags).input([1.0f32]).fails("tags must be scalar");
    }
}
