//! `ScalarSummary`: numbers with names.

use kolo_core::{Error, Result};
use kolo_graph::{Gradient, OpDef, Output, shape_fns};

use super::proto::{Content, Summary, Value};
use super::tag_text;
use crate::math::number::Number;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// A summary of `values`, each under the tag in the same place of `tags`, which has the same shape.
#[track_caller]
pub fn scalar_summary<'g>(tags: Output<'g>, values: Output<'g>) -> Output<'g> {
    tags.graph().op("ScalarSummary").input(tags).input(values).out()
}

pub(crate) static SCALAR_SUMMARY: Op = Op {
    def: OpDef {
        name: "ScalarSummary",
        signature: "(tags:string, values:T) -> (summary:string) ; T:type{real}",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a summary"),
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(summarize: f32, f64, i32, u8, i16, i8, i64, half::bf16, u16, half::f16, u32, u64),
    gpu: Gpu::Never("summaries are written in host memory"),
    cost: Cost::Inline,
};

fn summarize<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (tags, values) = (ctx.input(0)?, ctx.input(1)?);
    let texts = tags.strings()?;
    if tags.shape() != values.shape() {
        let single = match texts {
            [tag] => format!(" (tag '{}')", String::from_utf8_lossy(tag)),
            _ => String::new(),
        };
        return Err(Error::invalid_argument(format!(
            "tags and values are not the same shape: {} != {}{single}",
            tags.shape(),
            values.shape()
        )));
    }
    let mut summary = Summary::default();
    for (tag, value) in texts.iter().zip(values.data::<T>()?) {
        // Through `f64`, which is exact for all but integers beyond 2^53.
        summary.value.push(Value::new(tag_text(tag)?, Content::SimpleValue(value.to_f64() as f32)));
    }
    ctx.set_output(0, summary.to_tensor());
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use super::super::testing::bytes;
    use crate::testing::check_op;

    // The expected bytes were written by TensorFlow 2.21.

    #[test]
    fn a_number_has_a_name() {
        check_op("ScalarSummary").input("loss").input(2.5f32).gives(bytes("0a0b0a046c6f73731500002040"));
        let tags = Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap();
        let both = bytes("0a080a0161150000803f0a080a01621500000040");
        check_op("ScalarSummary").input(tags).input([1i32, 2]).gives(both);
    }

    #[test]
    fn every_value_has_a_tag() {
        let tags = Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap();
        check_op("ScalarSummary")
            .input(tags)
            .input([1.0f32])
            .fails("tags and values are not the same shape: [2] != [1]");
        check_op("ScalarSummary")
            .input("a")
            .input([1.0f32])
            .fails("tags and values are not the same shape: [] != [1] (tag 'a')");
        let latin = Tensor::string(vec![0xe9]);
        check_op("ScalarSummary").input(latin).input(1.0f32).fails("is not UTF-8");
    }
}
