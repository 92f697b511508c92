//! `TensorSummaryV2`: any tensor, with metadata that says which of TensorBoard's plugins shows it. `TensorSummary`, the form
//! before it, has the name of its node instead.

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_graph::wire::proto::TensorProto;
use kolo_graph::wire::tensor::shape_to_proto;
use kolo_graph::{Gradient, OpDef, Output, shape_fns};
use prost::Message as _;

use super::proto::{Content, Summary, SummaryMetadata, Value};
use super::{scalar_tag, tag_text};
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// A summary of `tensor` under `tag`, a scalar.
#[track_caller]
pub fn tensor_summary<'g>(tag: Output<'g>, tensor: Output<'g>, metadata: &SummaryMetadata) -> Output<'g> {
    let metadata = tag.graph().constant(Tensor::string(metadata.encode_to_vec()));
    tag.graph().op("TensorSummaryV2").input(tag).input(tensor).input(metadata).out()
}

pub(crate) static TENSOR_SUMMARY_V2: Op = Op {
    def: OpDef {
        name: "TensorSummaryV2",
        signature: "(tag:string, tensor:T, serialized_summary_metadata:string) -> (summary:string) ; T:type",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a summary"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(summarize)],
    gpu: Gpu::Never("summaries are written in host memory"),
    cost: Cost::Elements,
};

pub(crate) static TENSOR_SUMMARY: Op = Op {
    def: OpDef {
        name: "TensorSummary",
        signature: "(tensor:T) -> (summary:string) ; T:type, description:string=\"\", labels:list(string)=[], \
                    display_name:string=\"\"",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a summary"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(summarize_by_node)],
    gpu: Gpu::Never("summaries are written in host memory"),
    cost: Cost::Elements,
};

fn summarize_by_node(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let tensor = Value { metadata: None, ..tensor_value("", ctx.input(0)?, SummaryMetadata::default())? };
    // TensorFlow writes the name first. Two messages side by side are read as one that has the fields of both.
    let mut value = Value { node_name: ctx.node.name.to_string(), ..Value::default() }.encode_to_vec();
    value.extend(tensor.encode_to_vec());
    let mut summary = vec![0x0a];
    prost::encoding::encode_varint(value.len() as u64, &mut summary);
    summary.extend(value);
    ctx.set_output(0, Tensor::string(summary));
    Ok(())
}

fn summarize(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let tag = tag_text(scalar_tag(ctx.input(0)?, "tag must be scalar")?)?;
    let metadata = scalar_tag(ctx.input(2)?, "serialized_summary_metadata must be scalar")?;
    let metadata = SummaryMetadata::decode(&metadata[..])
        .map_err(|reason| Error::invalid_argument(format!("serialized_summary_metadata cannot be read: {reason}")))?;
    let value = tensor_value(&tag, ctx.input(1)?, metadata)?;
    ctx.set_output(0, Summary::from(vec![value]).to_tensor());
    Ok(())
}

/// The summary value of a tensor.
pub fn tensor_value(tag: &str, tensor: &Tensor, metadata: SummaryMetadata) -> Result<Value> {
    let mut proto = TensorProto {
        dtype: tensor.dtype() as i32,
        tensor_shape: Some(shape_to_proto(&PartialShape::from(tensor.shape()))),
        ..TensorProto::default()
    };
    // Summaries hold all elements, one by one or as content: their readers do not know of values that repeat.
    match tensor.dtype() {
        DType::Str => proto.string_val = tensor.strings()?.to_vec(),
        _ => proto.tensor_content = bytes::Bytes::copy_from_slice(tensor.host_bytes()?),
    }
    Ok(Value { metadata: Some(metadata), ..Value::new(tag, Content::Tensor(Box::new(proto))) })
}

#[cfg(test)]
mod tests {
    use super::super::testing::bytes;
    use super::*;
    use crate::testing::{check_op, evaluate};

    // The expected bytes were written by TensorFlow 2.21.

    #[test]
    fn a_tensor_is_kept_whole() {
        let text = b"\x0a\x06\x0a\x04text".to_vec();
        check_op("TensorSummaryV2")
            .input("t")
            .input([1.5f32, 2.5])
            .input(Tensor::string(text))
            .gives(bytes("0a210a01744212080112041202080222080000c03f000020404a080a060a0474657874"));
        let scalar = bytes("0a110a0174420a080312002204030000004a00");
        check_op("TensorSummaryV2").input("t").input(3i32).input("").gives(scalar);
        let words = Tensor::from_strings([2], vec!["a".into(), "bc".into()]).unwrap();
        let both = bytes("0a160a0174420f0807120412020802420161420262634a00");
        check_op("TensorSummaryV2").input("t").input(words).input("").gives(both);
    }

    #[test]
    fn the_metadata_names_a_plugin() {
        let g = crate::graph();
        let words = g.constant(Tensor::from_strings([2], vec!["hi".into(), "there".into()]).unwrap());
        let summary = tensor_summary(g.constant("words"), words, &SummaryMetadata::for_plugin("text"));
        let expected = bytes("0a260a05776f7264734213080712041202080242026869420574686572654a080a060a0474657874");
        assert_eq!(evaluate(&g, &[summary], &[]).unwrap(), [expected]);
    }

    #[test]
    fn tags_and_metadata_are_scalars() {
        let list = || Tensor::from_strings([1], vec!["a".into()]).unwrap();
        check_op("TensorSummaryV2").input(list()).input(1i32).input("").fails("tag must be scalar");
        let metadata = check_op("TensorSummaryV2").input("t").input(1i32).input(list());
        metadata.fails("serialized_summary_metadata must be scalar");
        let broken = Tensor::string(vec![0xff]);
        check_op("TensorSummaryV2").input("t").input(1i32).input(broken).fails("cannot be read");
    }
}
