//! `SerializeSparse`, `SerializeManySparse`: sparse tensors as three texts each, those of their coordinates, values and shape.
//! `DeserializeSparse`, `DeserializeManySparse`: back again, stacked into one.

use bytes::Bytes;
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_graph::{Gradient, OpDef, ShapeFn};

use super::elements::{Triple, input, set_outputs, stack, take_apart};
use crate::io::serialize_tensor::{content_of, tensor_of};
use crate::op::{Gpu, KernelDef, Op, cpu_any};
use crate::{Cost, KernelCtx};

const SERIALIZE: &str = "(sparse_indices:int64, sparse_values:T, sparse_shape:int64) -> (serialized_sparse:out_type) ; \
                         T:type, out_type:type{string,variant}=string";

pub(crate) static SERIALIZE_SPARSE: Op = texts(
    "SerializeSparse",
    SERIALIZE,
    |ctx| {
        ctx.input_of_rank(0, 2)?;
        Ok(vec![PartialShape::from([3usize])])
    },
    &[cpu_any(serialize)],
);
pub(crate) static SERIALIZE_MANY_SPARSE: Op = texts(
    "SerializeManySparse",
    SERIALIZE,
    |ctx| {
        ctx.input_of_rank(0, 2)?;
        Ok(vec![PartialShape::new(&[None, Some(3)])])
    },
    &[cpu_any(serialize_many)],
);
pub(crate) static DESERIALIZE_SPARSE: Op = texts(
    "DeserializeSparse",
    "(serialized_sparse:Tserialized) -> (sparse_indices:int64, sparse_values:dtype, sparse_shape:int64) ; dtype:type, \
     Tserialized:type{string,variant}=string",
    |ctx| {
        ctx.input(0).merge(ctx.input_of_rank_at_least(0, 1)?)?;
        Ok(vec![PartialShape::of_rank(2), PartialShape::of_rank(1), PartialShape::of_rank(1)])
    },
    &[cpu_any(deserialize)],
);
pub(crate) static DESERIALIZE_MANY_SPARSE: Op = texts(
    "DeserializeManySparse",
    "(serialized_sparse:string) -> (sparse_indices:int64, sparse_values:dtype, sparse_shape:int64) ; dtype:type",
    |ctx| {
        ctx.input_of_rank(0, 2)?.merge(&PartialShape::new(&[None, Some(3)]))?;
        Ok(vec![PartialShape::of_rank(2), PartialShape::of_rank(1), PartialShape::of_rank(1)])
    },
    &[cpu_any(deserialize_many)],
);

const fn texts(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef { name, signature, shape, gradient: Gradient::None("texts are not numbers"), ..OpDef::BASE },
        kernels,
        gpu: Gpu::STRINGS,
        cost: Cost::Elements,
    }
}

fn refuse_variants(ctx: &KernelCtx<'_>, attr: &str) -> Result<()> {
    match ctx.attrs().dtype(attr)? {
        DType::Str => Ok(()),
        other => Err(Error::unimplemented(format!("{} works on strings here, not on {other}", ctx.node.op()))),
    }
}

fn serialize(ctx: &mut KernelCtx<'_>) -> Result<()> {
    refuse_variants(ctx, "out_type")?;
    let triple = input(ctx, 0)?;
    let mut made = ctx.strings_made();
    for tensor in &triple {
        made.push(content_of(tensor)?)?;
    }
    let out = made.finish(Shape::new(&[3])?)?;
    ctx.set_output(0, out);
    Ok(())
}

fn serialize_many(ctx: &mut KernelCtx<'_>) -> Result<()> {
    refuse_variants(ctx, "out_type")?;
    let triples = take_apart(ctx, &input(ctx, 0)?)?;
    let mut made = ctx.strings_made();
    for tensor in triples.iter().flatten() {
        made.push(content_of(tensor)?)?;
    }
    let out = made.finish(Shape::new(&[triples.len(), 3])?)?;
    ctx.set_output(0, out);
    Ok(())
}

fn deserialize_many(ctx: &mut KernelCtx<'_>) -> Result<()> {
    if ctx.input(0)?.shape().rank() != 2 {
        return Err(Error::invalid_argument(format!(
            "Serialized sparse should be a matrix with 3 columns but has shape {}",
            ctx.input(0)?.shape()
        )));
    }
    restore(ctx)
}

fn deserialize(ctx: &mut KernelCtx<'_>) -> Result<()> {
    refuse_variants(ctx, "Tserialized")?;
    restore(ctx)
}

fn restore(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let texts = ctx.input(0)?;
    let [outer @ .., 3] = texts.shape().dims() else {
        return Err(Error::invalid_argument(format!(
            "Serialized sparse should have 3 as the last dimension {}",
            texts.shape()
        )));
    };
    let (outer, texts) = (outer.to_vec(), texts.strings()?.to_vec());
    if texts.is_empty() {
        return Err(Error::invalid_argument("Must have at least 1 serialized SparseTensor, but there are none"));
    }
    let dtype = ctx.attrs().dtype("dtype")?;
    let mut triples = ctx.list(texts.len() / 3, "sparse tensors")?;
    for texts in texts.chunks_exact(3) {
        triples.push(triple(ctx, texts, dtype)?);
    }
    let out = match (outer.is_empty(), triples.pop()) {
        (true, Some(only)) => only,
        (_, last) => {
            triples.extend(last);
            stack(ctx, dtype, &outer, &triples)?
        }
    };
    set_outputs(ctx, out);
    Ok(())
}

fn triple(ctx: &KernelCtx<'_>, texts: &[Bytes], dtype: DType) -> Result<Triple> {
    let read = |i: usize, dtype: DType| -> Result<Tensor> {
        tensor_of(ctx, &texts[i], dtype).map_err(|error| error.context(format_args!("serialized_sparse[{i}]")))
    };
    let triple = [read(0, DType::I64)?, read(1, dtype)?, read(2, DType::I64)?];
    super::reorder::sizes(&triple[0], &triple[1], &triple[2])?;
    Ok(triple)
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::testing::{check_op, evaluate, tensor};

    #[test]
    fn texts_become_tensors_again() {
        let g = crate::graph();
        let inputs = [g.constant([[0i64, 1], [2, 0]]), g.constant([1.0f32, 2.0]), g.constant([3i64, 2])];
        for (to, from) in [("SerializeSparse", "DeserializeSparse"), ("SerializeManySparse", "DeserializeManySparse")] {
            let text = g.op(to).inputs(inputs).out();
            let back = g.op(from).input(text).attr("dtype", DType::F32).build();
            let found = evaluate(&g, &back.outputs(), &[]).unwrap();
            assert_eq!(
                found,
                [Tensor::from([[0i64, 1], [2, 0]]), Tensor::from([1.0f32, 2.0]), Tensor::from([3i64, 2])],
                "{to}"
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let case = |texts: Tensor| check_op("DeserializeSparse").attr("dtype", DType::F32).input(texts);
        let words = |n: usize| Tensor::from_strings([n], vec!["x".into(); n]).unwrap();
        case(words(2)).fails("3 as the last dimension");
        case(words(3)).fails("serialized_sparse[0]");
        let out_of_order = check_op("SerializeManySparse").input([[1i64, 0], [0, 0]]).input([1i32, 2]).input([2i64, 1]);
        out_of_order.fails("out of order");
        let vector = check_op("SerializeManySparse").input(tensor([1, 1], [0i64])).input([1i32]).input([2i64]);
        vector.fails("should be > 1");
    }
}
