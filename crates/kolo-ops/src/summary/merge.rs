//! `MergeSummary`: several summaries as one.

use std::collections::HashSet;

use bytes::Bytes;
use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Gradient, OpDef, Output, shape_fns};
use prost::Message as _;

use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// One summary with the values of all of `inputs`, of which there must be at least one. No two may have the same tag.
#[track_caller]
pub fn merge_summary<'g>(first: Output<'g>, others: &[Output<'g>]) -> Output<'g> {
    first.graph().op("MergeSummary").input(first).inputs(others.iter().copied()).out()
}

pub(crate) static MERGE_SUMMARY: Op = Op {
    def: OpDef {
        name: "MergeSummary",
        signature: "(inputs:N*string) -> (summary:string) ; N:int>=1",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a summary"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(merge)],
    gpu: Gpu::Never("summaries are written in host memory"),
    cost: Cost::Inline,
};

/// A summary whose values stay bytes, so that kinds of value that Kolo does not make pass through whole.
#[derive(Clone, PartialEq, prost::Message)]
struct RawSummary {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    value: Vec<Bytes>,
}

/// Only the tag of a value.
#[derive(Clone, PartialEq, prost::Message)]
struct Tag {
    #[prost(bytes = "bytes", tag = "1")]
    tag: Bytes,
}

fn merge(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let unreadable = |_| Error::invalid_argument("Could not parse one of the summary inputs");
    let mut merged = RawSummary::default();
    let mut tags = HashSet::new();
    for i in 0..ctx.n_inputs() {
        for bytes in ctx.input(i)?.strings()? {
            for value in RawSummary::decode(bytes.clone()).map_err(unreadable)?.value {
                let Tag { tag } = Tag::decode(value.clone()).map_err(unreadable)?;
                // The old tensor summaries have no tag.
                if !tag.is_empty() && !tags.insert(tag.clone()) {
                    let tag = String::from_utf8_lossy(&tag);
                    return Err(Error::invalid_argument(format!("Duplicate tag {tag} found in summary inputs")));
                }
                merged.value.push(value);
            }
        }
    }
    ctx.set_output(0, Tensor::string(merged.encode_to_vec()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::bytes;
    use crate::testing::check_op;

    // The expected bytes were written by TensorFlow 2.21.

    #[test]
    fn values_follow_one_another() {
        let (ab, q) = (bytes("0a080a0161150000803f0a080a01621500000040"), bytes("0a080a0171150000803f"));
        check_op("MergeSummary")
            .input(ab.clone())
            .input(q)
            .gives(bytes("0a080a0161150000803f0a080a016215000000400a080a0171150000803f"));
        check_op("MergeSummary").input(ab.clone()).input(ab).fails("Duplicate tag a found in summary inputs");
        check_op("MergeSummary").input(bytes("ffff")).fails("Could not parse one of the summary inputs");
        check_op("MergeSummary").input("").gives("");
    }

    #[test]
    fn sounds_pass_through_though_nothing_here_makes_them() {
        // Tag `s`, and an audio of 1 channel with 2 bytes (field 6).
        let sound = "0a100a0173320b0d0000803f10012202abcd";
        check_op("MergeSummary").input(bytes(sound)).gives(bytes(sound));
    }
}
