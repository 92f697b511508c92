//! `SerializeTensor`: a tensor as the bytes of a TensorProto. `ParseTensor`: the tensor in such bytes.

use bytes::Bytes;
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_graph::wire::proto::TensorProto;
use kolo_graph::wire::tensor::{from_proto_within, shape_from_proto, shape_to_proto};
use kolo_graph::{Gradient, OpDef, Output, shape_fns};
use prost::Message;

use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// `x` as the bytes of a TensorProto.
#[track_caller]
pub fn serialize_tensor(x: Output<'_>) -> Output<'_> {
    x.graph().op("SerializeTensor").input(x).out()
}

/// The tensor of `dtype` in the bytes of a TensorProto.
#[track_caller]
pub fn parse_tensor(serialized: Output<'_>, dtype: DType) -> Output<'_> {
    serialized.graph().op("ParseTensor").input(serialized).attr("out_type", dtype).out()
}

pub(crate) static SERIALIZE_TENSOR: Op = Op {
    def: OpDef {
        name: "SerializeTensor",
        signature: "(tensor:T) -> (serialized:string) ; T:type",
        shape: shape_fns::scalars,
        gradient: Gradient::None("bytes are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(serialize)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

pub(crate) static PARSE_TENSOR: Op = Op {
    def: OpDef {
        name: "ParseTensor",
        signature: "(serialized:string) -> (output:out_type) ; out_type:type",
        shape: |ctx| {
            ctx.input_of_rank(0, 0)?;
            Ok(vec![PartialShape::unknown()])
        },
        gradient: Gradient::None("bytes are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(parse)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

/// The bytes of a tensor's TensorProto as TensorFlow writes it: all contents as bytes, strings one by one.
pub(crate) fn text_of(tensor: &Tensor) -> Result<Bytes> {
    let mut proto = TensorProto {
        dtype: tensor.dtype() as i32,
        tensor_shape: Some(shape_to_proto(&PartialShape::from(tensor.shape()))),
        ..TensorProto::default()
    };
    match tensor.dtype() {
        DType::Str => proto.string_val = tensor.strings()?.to_vec(),
        DType::Resource | DType::Variant => {
            return Err(Error::unimplemented(format!("{} cannot be serialized", tensor.dtype())));
        }
        _ => proto.tensor_content = Bytes::copy_from_slice(tensor.host_bytes()?),
    }
    Ok(proto.encode_to_vec().into())
}

/// The tensor of `dtype` in the bytes of a TensorProto.
pub(crate) fn tensor_of(ctx: &KernelCtx<'_>, text: &Bytes, dtype: DType) -> Result<Tensor> {
    let proto = TensorProto::decode(text.clone())
        .map_err(|_| Error::invalid_argument("Could not parse `serialized` as TensorProto"))?;
    if proto.dtype != dtype as i32 {
        let found = DType::from_number(proto.dtype).map_or_else(|_| proto.dtype.to_string(), |dtype| dtype.to_string());
        return Err(Error::invalid_argument(format!(
            "Type mismatch between parsed tensor ({found}) and dtype ({dtype})"
        )));
    }
    // One value may stand for many: what these need is asked for before.
    let shape = proto.tensor_shape.as_ref().map(shape_from_proto).transpose()?;
    let n = shape.map_or(Some(1), |shape| shape.n_elements()).unwrap_or(0);
    let n_bytes = n.saturating_mul(dtype.size().unwrap_or(size_of::<Bytes>()));
    let _charge = ctx.device.charge(n_bytes, &ctx.node.name)?;
    from_proto_within(&proto, &mut (n_bytes as u64))
}

/// The same with all contents as bytes, strings too: the lengths of all of them, and then their bytes.
pub(crate) fn content_of(tensor: &Tensor) -> Result<Bytes> {
    if tensor.dtype() != DType::Str {
        return text_of(tensor);
    }
    let mut content = Vec::new();
    for text in tensor.strings()? {
        prost::encode_length_delimiter(text.len(), &mut content)
            .map_err(|error| Error::internal(format!("a vector takes what it is given: {error}")))?;
    }
    tensor.strings()?.iter().for_each(|text| content.extend_from_slice(text));
    let proto = TensorProto {
        dtype: tensor.dtype() as i32,
        tensor_shape: Some(shape_to_proto(&PartialShape::from(tensor.shape()))),
        tensor_content: content.into(),
        ..TensorProto::default()
    };
    Ok(proto.encode_to_vec().into())
}

fn serialize(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let mut made = ctx.strings_made();
    made.push(text_of(ctx.input(0)?)?)?;
    let out = made.finish(Shape::scalar())?;
    ctx.set_output(0, out);
    Ok(())
}

fn parse(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let serialized = ctx.input(0)?;
    let (0, [text]) = (serialized.shape().rank(), serialized.strings()?) else {
        return Err(Error::invalid_argument(format!(
            "Expected `serialized` to be a scalar, got shape: {}",
            serialized.shape()
        )));
    };
    let out = tensor_of(ctx, text, ctx.attrs().dtype("out_type")?)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::testing::{check_op, evaluate, tensor};

    #[test]
    fn tensors_come_back() {
        let words = Tensor::from_strings([2], vec!["a".into(), "\u{17e}".into()]).unwrap();
        for x in [tensor([2, 2], [1.5f32, -2.0, 0.0, 3.0]), Tensor::scalar(7i64), Tensor::from([true, false]), words] {
            let g = crate::graph();
            let y = super::parse_tensor(super::serialize_tensor(g.constant(x.clone())), x.dtype());
            assert_eq!(evaluate(&g, &[y], &[]).unwrap(), [x]);
        }
        // dtype 1, a shape of one dimension of size 1, and four bytes of content.
        let bytes: &[u8] = &[8, 1, 18, 4, 18, 2, 8, 1, 34, 4, 0, 0, 128, 63];
        check_op("SerializeTensor").input([1.0f32]).gives(Tensor::string(bytes.to_vec()));
    }

    #[test]
    fn what_is_no_tensor_is_refused() {
        let case =
            |text: &[u8]| check_op("ParseTensor").attr("out_type", DType::F32).input(Tensor::string(text.to_vec()));
        case(b"\xff\xff").fails("Could not parse");
        case(&[8, 3]).fails("Type mismatch between parsed tensor (int32) and dtype (float)");
        // 2^40 elements of which there is one value.
        let huge: &[u8] = &[8, 1, 18, 9, 18, 7, 8, 128, 128, 128, 128, 128, 32, 42, 4, 0, 0, 128, 63];
        case(huge).fails("");
        check_op("ParseTensor")
            .attr("out_type", DType::F32)
            .input(Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap())
            .fails("");
    }
}
