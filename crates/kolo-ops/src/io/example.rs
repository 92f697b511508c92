//! `ParseExample` and `ParseSingleExample`: features of `tf.Example` messages as tensors, dense and sparse.

use std::collections::HashMap;

use bytes::Bytes;
use kolo_core::{DType, Dim, Element, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::stop_if_asked;
use kolo_graph::{Attrs, Gradient, InferCtx, OpDef};
use prost::Message as _;

use crate::holdings::estimate;
use crate::memory::room;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// TensorFlow's `example.proto` and `feature.proto`.
pub(crate) mod proto {
    use std::collections::HashMap;

    use bytes::Bytes;

    /// A message `Example`.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Example {
        /// Its features.
        #[prost(message, optional, tag = "1")]
        pub features: Option<Features>,
    }

    /// A message `Features`.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Features {
        /// By name.
        #[prost(map = "string, message", tag = "1")]
        pub feature: HashMap<String, Feature>,
    }

    /// A message `Feature`.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Feature {
        /// Its values.
        #[prost(oneof = "Kind", tags = "1, 2, 3")]
        pub kind: Option<Kind>,
    }

    /// The values of a feature.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Kind {
        /// Byte strings.
        #[prost(message, tag = "1")]
        Bytes(BytesList),
        /// Floats.
        #[prost(message, tag = "2")]
        Floats(FloatList),
        /// Integers.
        #[prost(message, tag = "3")]
        Ints(Int64List),
    }

    /// A message `BytesList`.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct BytesList {
        /// The strings.
        #[prost(bytes = "bytes", repeated, tag = "1")]
        pub value: Vec<Bytes>,
    }

    /// A message `FloatList`.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct FloatList {
        /// The numbers.
        #[prost(float, repeated, tag = "1")]
        pub value: Vec<f32>,
    }

    /// A message `Int64List`.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Int64List {
        /// The numbers.
        #[prost(int64, repeated, tag = "1")]
        pub value: Vec<i64>,
    }
}

pub(crate) static PARSE_EXAMPLE: Op = Op {
    def: OpDef {
        name: "ParseExample",
        signature: "(serialized:string, names:string, sparse_keys:Nsparse*string, dense_keys:Ndense*string, \
                    dense_defaults:list(Tdense)) -> (sparse_indices:Nsparse*int64, sparse_values:list(sparse_types), \
                    sparse_shapes:Nsparse*int64, dense_values:list(Tdense)) ; Nsparse:int>=0, Ndense:int>=0, \
                    sparse_types:list(type){float,int64,string}>=0, Tdense:list(type){float,int64,string}>=0, \
                    dense_shapes:list(shape)>=0",
        shape: |ctx| {
            let batch = ctx.input_of_rank(0, 1)?;
            infer(ctx, &batch, 2)
        },
        gradient: Gradient::None("messages are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(parse)],
    gpu: Gpu::FILES,
    cost: Cost::Elements,
};

pub(crate) static PARSE_SINGLE_EXAMPLE: Op = Op {
    def: OpDef {
        name: "ParseSingleExample",
        signature: "(serialized:string, dense_defaults:list(Tdense)) -> (sparse_indices:num_sparse*int64, \
                    sparse_values:list(sparse_types), sparse_shapes:num_sparse*int64, dense_values:list(Tdense)) ; \
                    num_sparse:int>=0, sparse_keys:list(string)>=0, dense_keys:list(string)>=0, \
                    sparse_types:list(type){float,int64,string}>=0, Tdense:list(type){float,int64,string}>=0, \
                    dense_shapes:list(shape)>=0",
        shape: |ctx| {
            ctx.input_of_rank(0, 0)?;
            infer(ctx, &PartialShape::scalar(), 1)
        },
        gradient: Gradient::None("messages are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(parse_single)],
    gpu: Gpu::FILES,
    cost: Cost::Elements,
};

/// Coordinates of `rank` numbers, values and shapes of each sparse feature, and then the dense ones, one per example.
fn infer(ctx: &InferCtx<'_>, batch: &PartialShape, rank: usize) -> Result<Vec<PartialShape>> {
    let n_sparse = ctx.attrs().dtypes("sparse_types")?.len();
    let shapes = ctx.attrs().shapes("dense_shapes")?;
    let mut out = vec![PartialShape::new(&[None, Some(rank)]); n_sparse];
    out.extend(vec![PartialShape::of_rank(1); n_sparse]);
    out.extend(vec![PartialShape::from([rank]); n_sparse]);
    out.extend(shapes.into_iter().map(|shape| batch.concat(shape)));
    if out.len() != ctx.n_outputs() {
        return Err(Error::invalid_argument(format!("{} shapes for {} outputs", out.len(), ctx.n_outputs())));
    }
    Ok(out)
}

/// What to look for.
struct Features {
    sparse: Vec<(String, DType)>,
    dense: Vec<Dense>,
}

struct Dense {
    key: String,
    dtype: DType,
    /// The sizes after the first, if that may vary from example to example.
    shape: DenseShape,
    default: Tensor,
}

enum DenseShape {
    Fixed(Shape),
    /// As many rows of this shape as there are; fewer are filled up.
    Rows(Shape),
}

impl DenseShape {
    fn new(shape: &PartialShape) -> Result<DenseShape> {
        if let Some(shape) = shape.known() {
            return Ok(DenseShape::Fixed(shape));
        }
        let bad = || {
            Error::invalid_argument(format!("dense_shapes: {shape} may leave open its first dimension, and no other"))
        };
        match shape.dims() {
            Some([None, rest @ ..]) => Ok(DenseShape::Rows(PartialShape::new(rest as &[Dim]).known().ok_or_else(bad)?)),
            _ => Err(bad()),
        }
    }
}

impl Features {
    fn new(attrs: &Attrs, sparse: Vec<String>, dense: Vec<String>, defaults: Vec<Tensor>) -> Result<Features> {
        let (types, shapes) = (attrs.dtypes("sparse_types")?, attrs.shapes("dense_shapes")?);
        if sparse.len() != types.len() || dense.len() != shapes.len() || dense.len() != defaults.len() {
            return Err(Error::invalid_argument(format!(
                "{} sparse keys for {} types, {} dense keys for {} shapes and {} defaults",
                sparse.len(),
                types.len(),
                dense.len(),
                shapes.len(),
                defaults.len()
            )));
        }
        let dense = dense.into_iter().zip(shapes).zip(defaults).map(|((key, shape), default)| {
            let (shape, dtype) = (DenseShape::new(shape)?, default.dtype());
            let n = default.n_elements();
            let good = match &shape {
                DenseShape::Fixed(shape) => n == 0 || n == shape.n_elements(),
                DenseShape::Rows(_) => n <= 1,
            };
            if !good {
                return Err(Error::invalid_argument(format!(
                    "the default of '{key}' has {n} elements, which do not fit"
                )));
            }
            Ok(Dense { key, dtype, shape, default })
        });
        Ok(Features { sparse: sparse.into_iter().zip(types).collect(), dense: dense.collect::<Result<_>>()? })
    }

    /// The outputs for these messages. `names` are for errors.
    fn parse(&self, ctx: &KernelCtx<'_>, messages: &[Bytes], names: &[Bytes]) -> Result<Vec<Tensor>> {
        let name = |i: usize| names.get(i).map_or("<unknown>".into(), |name| String::from_utf8_lossy(name));
        let mut examples: Vec<HashMap<String, proto::Feature>> = Vec::with_capacity(messages.len());
        for (i, message) in messages.iter().enumerate() {
            stop_if_asked();
            let example = proto::Example::decode(message.clone()).map_err(|error| {
                Error::invalid_argument(format!("Could not parse example input {i}, name: {}: {error}", name(i)))
            })?;
            examples.push(example.features.unwrap_or_default().feature);
        }
        let values = |i: usize, key: &str, dtype: DType| -> Result<Option<Values>> {
            stop_if_asked();
            let Some(kind) = examples[i].get(key).and_then(|feature| feature.kind.as_ref()) else { return Ok(None) };
            let values = Values::of(kind);
            if values.dtype() != dtype {
                return Err(Error::invalid_argument(format!(
                    "Name: {}, Key: {key}, Index: {i}.  Data types don't match. Expected type: {dtype}, Actual type: {}",
                    name(i),
                    values.dtype()
                )));
            }
            Ok(Some(values))
        };
        let (mut indices, mut contents, mut shapes) = (Vec::new(), Vec::new(), Vec::new());
        for (key, dtype) in &self.sparse {
            let (mut at, mut all, mut most) = (Vec::new(), Values::none(*dtype)?, 0);
            for i in 0..examples.len() {
                let Some(found) = values(i, key, *dtype)? else { continue };
                most = most.max(found.len());
                at.extend((0..found.len()).flat_map(|j| [i as i64, j as i64]));
                all.append(found);
            }
            indices.push(counted(ctx, Shape::new(&[all.len(), 2])?, &at)?);
            shapes.push(Tensor::from([examples.len() as i64, most as i64]));
            let n = all.len();
            contents.push(all.into_tensor(ctx, Shape::new(&[n])?)?);
        }
        let mut outputs = [indices, contents, shapes].concat();
        for dense in &self.dense {
            outputs.push(dense.stack(ctx, examples.len(), &name, &|i| values(i, &dense.key, dense.dtype))?);
        }
        Ok(outputs)
    }
}

impl Dense {
    fn stack<'n>(
        &self,
        ctx: &KernelCtx<'_>,
        n_examples: usize,
        name: &dyn Fn(usize) -> std::borrow::Cow<'n, str>,
        values: &dyn Fn(usize) -> Result<Option<Values>>,
    ) -> Result<Tensor> {
        let default = Values::of_tensor(&self.default)?;
        let wrong_number = |i: usize, n: usize, shape: &Shape| {
            Error::invalid_argument(format!(
                "Name: {}, Key: {}, Index: {i}.  Number of {} values != expected.  Values size: {n} but output shape: {shape}",
                name(i),
                self.key,
                self.dtype
            ))
        };
        match &self.shape {
            DenseShape::Fixed(shape) => {
                // The default may stand for every example.
                let n = n_examples.saturating_mul(shape.n_elements());
                let _asked = ctx.device.charge(estimate(self.dtype, n, 0), &ctx.node.name)?;
                let mut all = Values::with_room(self.dtype, n)?;
                for i in 0..n_examples {
                    match values(i)? {
                        Some(found) if found.len() == shape.n_elements() => all.append(found),
                        Some(found) => return Err(wrong_number(i, found.len(), shape)),
                        None if default.len() == shape.n_elements() => all.append(default.clone()),
                        None => {
                            return Err(Error::invalid_argument(format!(
                                "Name: {}, Feature: {} (data type: {}) is required but could not be found.",
                                name(i),
                                self.key,
                                self.dtype
                            )));
                        }
                    }
                }
                all.into_tensor(ctx, Shape::new(&[&[n_examples], shape.dims()].concat())?)
            }
            DenseShape::Rows(row) => {
                let size = row.n_elements().max(1);
                let mut rows = Vec::new();
                for i in 0..n_examples {
                    let found = values(i)?.map_or_else(|| Values::none(self.dtype), Ok)?;
                    if found.len() % size != 0 {
                        return Err(wrong_number(i, found.len(), row));
                    }
                    rows.push(found);
                }
                let most = rows.iter().map(Values::len).max().unwrap_or(0);
                // One long row makes all rows long.
                let n = n_examples.saturating_mul(most);
                let _asked = ctx.device.charge(estimate(self.dtype, n, 0), &ctx.node.name)?;
                let mut all = Values::with_room(self.dtype, n)?;
                let fill = if default.len() == 1 { default } else { Values::zero(self.dtype)? };
                for found in rows {
                    let missing = most - found.len();
                    all.append(found);
                    all.fill(&fill, missing);
                }
                all.into_tensor(ctx, Shape::new(&[&[n_examples, most / size], row.dims()].concat())?)
            }
        }
    }
}

/// Values of one of the three dtypes.
#[derive(Clone)]
enum Values {
    Floats(Vec<f32>),
    Ints(Vec<i64>),
    Texts(Vec<Bytes>),
}

impl Values {
    fn none(dtype: DType) -> Result<Values> {
        match dtype {
            DType::F32 => Ok(Values::Floats(Vec::new())),
            DType::I64 => Ok(Values::Ints(Vec::new())),
            DType::Str => Ok(Values::Texts(Vec::new())),
            other => Err(Error::invalid_argument(format!("examples hold no {other}"))),
        }
    }

    fn with_room(dtype: DType, n: usize) -> Result<Values> {
        Ok(match Values::none(dtype)? {
            Values::Floats(_) => Values::Floats(room(n, "values of examples")?),
            Values::Ints(_) => Values::Ints(room(n, "values of examples")?),
            Values::Texts(_) => Values::Texts(room(n, "values of examples")?),
        })
    }

    fn zero(dtype: DType) -> Result<Values> {
        Ok(match Values::none(dtype)? {
            Values::Floats(_) => Values::Floats(vec![0.0]),
            Values::Ints(_) => Values::Ints(vec![0]),
            Values::Texts(_) => Values::Texts(vec![Bytes::new()]),
        })
    }

    fn of(kind: &proto::Kind) -> Values {
        match kind {
            proto::Kind::Bytes(list) => Values::Texts(list.value.clone()),
            proto::Kind::Floats(list) => Values::Floats(list.value.clone()),
            proto::Kind::Ints(list) => Values::Ints(list.value.clone()),
        }
    }

    fn of_tensor(tensor: &Tensor) -> Result<Values> {
        match tensor.dtype() {
            DType::F32 => Ok(Values::Floats(tensor.data::<f32>()?.to_vec())),
            DType::I64 => Ok(Values::Ints(tensor.data::<i64>()?.to_vec())),
            _ => Ok(Values::Texts(tensor.strings()?.to_vec())),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Values::Floats(_) => DType::F32,
            Values::Ints(_) => DType::I64,
            Values::Texts(_) => DType::Str,
        }
    }

    fn len(&self) -> usize {
        match self {
            Values::Floats(list) => list.len(),
            Values::Ints(list) => list.len(),
            Values::Texts(list) => list.len(),
        }
    }

    /// Adds values of the same dtype.
    fn append(&mut self, other: Values) {
        match (self, other) {
            (Values::Floats(list), Values::Floats(other)) => list.extend(other),
            (Values::Ints(list), Values::Ints(other)) => list.extend(other),
            (Values::Texts(list), Values::Texts(other)) => list.extend(other),
            // Dtypes were compared before.
            _ => {}
        }
    }

    /// Adds the one value of `other` `n` times.
    fn fill(&mut self, other: &Values, n: usize) {
        (0..n).for_each(|_| self.append(other.clone()));
    }

    /// The values in memory that counts as long as the tensor lives.
    fn into_tensor(self, ctx: &KernelCtx<'_>, shape: Shape) -> Result<Tensor> {
        match self {
            Values::Floats(list) => counted(ctx, shape, &list),
            Values::Ints(list) => counted(ctx, shape, &list),
            Values::Texts(list) => ctx.string_tensor(shape, list),
        }
    }
}

fn counted<T: Element>(ctx: &KernelCtx<'_>, shape: Shape, list: &[T]) -> Result<Tensor> {
    let mut tensor = ctx.allocate(T::DTYPE, shape)?;
    tensor.data_mut::<T>()?.copy_from_slice(list);
    Ok(tensor)
}

fn key(tensor: &Tensor) -> Result<String> {
    match tensor.strings()? {
        [key] => Ok(String::from_utf8_lossy(key).into_owned()),
        _ => Err(Error::invalid_argument(format!("a key must be one string, found shape {}", tensor.shape()))),
    }
}

fn parse(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let count = |name: &str| ctx.attrs().int(name).map(|n| usize::try_from(n).unwrap_or(0));
    let (n_sparse, n_dense) = (count("Nsparse")?, count("Ndense")?);
    let keys = |from: usize, n: usize| (from..from + n).map(|i| key(ctx.input(i)?)).collect::<Result<Vec<String>>>();
    let (sparse, dense) = (keys(2, n_sparse)?, keys(2 + n_sparse, n_dense)?);
    let defaults = (2 + n_sparse + n_dense..ctx.n_inputs()).map(|i| ctx.input(i).cloned()).collect::<Result<_>>()?;
    let features = Features::new(ctx.attrs(), sparse, dense, defaults)?;
    let (messages, names) = (ctx.input(0)?, ctx.input(1)?);
    if messages.shape().rank() != 1 {
        return Err(Error::invalid_argument(format!(
            "Expected serialized to be a vector, got shape: {}.",
            messages.shape()
        )));
    }
    if names.n_elements() != 0 && names.shape() != messages.shape() {
        return Err(Error::invalid_argument(format!(
            "Expected len(names) == len(serialized), but got: {} vs. {}",
            names.shape(),
            messages.shape()
        )));
    }
    let outputs = features.parse(ctx, messages.strings()?, names.strings()?)?;
    outputs.into_iter().enumerate().for_each(|(i, output)| ctx.set_output(i, output));
    Ok(())
}

fn parse_single(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let list =
        |name: &str| -> Result<Vec<String>> { Ok(ctx.attrs().strs(name)?.into_iter().map(str::to_owned).collect()) };
    let (sparse, dense) = (list("sparse_keys")?, list("dense_keys")?);
    let n_sparse = sparse.len();
    let defaults = (1..ctx.n_inputs()).map(|i| ctx.input(i).cloned()).collect::<Result<_>>()?;
    let features = Features::new(ctx.attrs(), sparse, dense, defaults)?;
    let outputs = features.parse(ctx, ctx.input(0)?.strings()?, &[])?;
    // The same as a batch of one, without the dimension of the batch.
    for (i, output) in outputs.into_iter().enumerate() {
        let output = match i.checked_div(n_sparse.max(1)) {
            Some(0) if n_sparse > 0 => {
                let columns: Vec<i64> = output.data::<i64>()?.chunks_exact(2).map(|pair| pair[1]).collect();
                Tensor::from_vec([columns.len(), 1], columns)?
            }
            Some(1) if n_sparse > 0 => output,
            Some(2) if n_sparse > 0 => Tensor::from([output.data::<i64>()?[1]]),
            _ => {
                let shape = Shape::new(&output.shape()[1..])?;
                output.reshaped(shape)?
            }
        };
        ctx.set_output(i, output);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
