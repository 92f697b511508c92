//! Attention as graphs of cuDNN's operations. The library recognises these graphs and has engines that compute each in
//! one or two kernels; the scores, whose size is quadratic in the length, are never stored.

use cudarc::cudnn::sys;
use kolo_core::Result;
use sys::{cudnnPointwiseMode_t as Mode, cudnnReduceTensorOp_t as Reduce};

use super::attention::{Attention, AttentionPass};
use super::backend::{self, Descriptor, Graph, Kind, Name, TensorStorage, Thing, Type, data_type};

/// The ids of a graph's inputs and outputs.
pub(super) mod id {
    pub const QUERIES: i64 = 1;
    pub const KEYS: i64 = 2;
    pub const VALUES: i64 = 3;
    pub const Y: i64 = 4;
    /// The logarithm of each query's sum of exponentials.
    pub const LSE: i64 = 5;
    pub const DY: i64 = 6;
    pub const D_QUERIES: i64 = 7;
    pub const D_KEYS: i64 = 8;
    pub const D_VALUES: i64 = 9;
    /// The sum over `y · dy` of each query.
    pub const DELTA: i64 = 10;
    /// The float accumulator for the gradient of the queries.
    pub const D_QUERIES_SUM: i64 = 11;
    /// The scale of the scores.
    pub const SCALE: i64 = 12;
    /// The score of a masked key.
    pub const UNSEEN: i64 = 13;
    pub const ONE: i64 = 14;
    /// The first id of virtual tensors.
    pub const PASSING: i64 = 100;
}

/// A tensor of the graph under construction, by its index.
#[derive(Clone, Copy)]
struct Value(usize);

/// A graph under construction.
struct Describing {
    half: Type,
    /// Batch, heads, length, and the size of a head.
    sizes: [i64; 4],
    tensors: Vec<Descriptor>,
    /// Descriptors that operations refer to, besides tensors.
    parts: Vec<Descriptor>,
    operations: Vec<Descriptor>,
}

/// The graph of a pass, and the heuristic's engines for it. The handle is alive and used by no other thread.
pub(super) fn graph(handle: sys::cudnnHandle_t, call: &Attention, pass: AttentionPass) -> Result<Graph> {
    let [half, _] = data_type(call.dtype)?;
    let sizes = [call.batch, call.heads, call.length, call.size].map(|size| size as i64);
    let mut g = Describing { half, sizes, tensors: Vec::new(), parts: Vec::new(), operations: Vec::new() };
    match pass {
        AttentionPass::Forward => g.forward(call.causal)?,
        AttentionPass::Backward => g.backward(call.causal)?,
    }
    let Describing { mut tensors, parts, operations, .. } = g;
    tensors.extend(parts);
    Graph::new(handle, operations, tensors)
}

impl Describing {
    fn forward(&mut self, causal: bool) -> Result<()> {
        let (packed, turned) = (self.packed(), self.packed_turned());
        let (queries, keys) = (self.heads(id::QUERIES, packed)?, self.heads_turned(id::KEYS, turned)?);
        let values = self.heads(id::VALUES, packed)?;
        let (y, lse) = (self.heads(id::Y, self.plain())?, self.row(Some(id::LSE))?);
        let scale = self.number(id::SCALE)?;

        let scores = self.scores(Type::CUDNN_DATA_FLOAT)?;
        self.product(queries, keys, scores)?;
        let scores = self.with(Mode::CUDNN_POINTWISE_MUL, scores, scale)?;
        let scores = if causal { self.mask(scores)? } else { scores };
        let top = self.reduce(Reduce::CUDNN_REDUCE_TENSOR_MAX, scores)?;
        let below = self.with(Mode::CUDNN_POINTWISE_SUB, scores, top)?;
        let power = self.of(Mode::CUDNN_POINTWISE_EXP, below)?;
        let sum = self.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, power)?;
        let log = self.row(None)?;
        self.pointwise(Mode::CUDNN_POINTWISE_LOG, sum, None, None, log)?;
        self.pointwise(Mode::CUDNN_POINTWISE_ADD, top, Some(log), None, lse)?;
        let shares = self.scores(self.half)?;
        self.pointwise(Mode::CUDNN_POINTWISE_DIV, power, Some(sum), None, shares)?;
        self.product(shares, values, y)
    }

    fn backward(&mut self, causal: bool) -> Result<()> {
        let (packed, turned, plain) = (self.packed(), self.packed_turned(), self.plain());
        let (queries, keys) = (self.heads(id::QUERIES, packed)?, self.heads_turned(id::KEYS, turned)?);
        let values = self.heads_turned(id::VALUES, turned)?;
        let (y, dy) = (self.heads(id::Y, plain)?, self.heads(id::DY, plain)?);
        let (d_queries, d_keys) = (self.heads(id::D_QUERIES, packed)?, self.heads(id::D_KEYS, packed)?);
        let d_values = self.heads(id::D_VALUES, packed)?;
        let (lse, delta) = (self.row(Some(id::LSE))?, self.row(Some(id::DELTA))?);
        let (scale, one) = (self.number(id::SCALE)?, self.number(id::ONE)?);

        let [batch, heads, length, size] = self.sizes;
        let dense = [heads * length * size, length * size, size, 1];
        let float = Type::CUDNN_DATA_FLOAT;
        let both = self.tensor(None, float, self.sizes, dense)?;
        self.pointwise(Mode::CUDNN_POINTWISE_MUL, dy, Some(y), None, both)?;
        let sum = self.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, both)?;
        // The library expects a factor here, which it needs for dropout.
        self.pointwise(Mode::CUDNN_POINTWISE_MUL, sum, Some(one), None, delta)?;

        let scores = self.scores(float)?;
        self.product(queries, keys, scores)?;
        let scores = self.with(Mode::CUDNN_POINTWISE_MUL, scores, scale)?;
        let scores = self.with(Mode::CUDNN_POINTWISE_SUB, scores, lse)?;
        let scores = if causal { self.mask(scores)? } else { scores };
        let shares = self.of(Mode::CUDNN_POINTWISE_EXP, scores)?;
        let shares_turned = self.turn(shares)?;
        self.product(shares_turned, dy, d_values)?;

        let d_shares = self.scores(float)?;
        self.product(dy, values, d_shares)?;
        let d_scores = self.with(Mode::CUDNN_POINTWISE_SUB, d_shares, delta)?;
        let d_scores = self.with(Mode::CUDNN_POINTWISE_MUL, d_scores, shares)?;
        let d_scores = self.with(Mode::CUDNN_POINTWISE_MUL, d_scores, scale)?;
        let d_scores_turned = self.turn(d_scores)?;
        self.product(d_scores_turned, queries, d_keys)?;

        let keys_back = self.tensor(None, float, [batch, heads, length, size], packed)?;
        self.reshape(keys, keys_back)?;
        let d_queries_sum = self.tensor(Some(id::D_QUERIES_SUM), float, self.sizes, dense)?;
        self.product(d_scores, keys_back, d_queries_sum)?;
        self.pointwise(Mode::CUDNN_POINTWISE_IDENTITY, d_queries_sum, None, None, d_queries)
    }

    /// Strides of queries, keys and values, which are interleaved in rows of `[3, heads, size]`.
    fn packed(&self) -> [i64; 4] {
        let [_, heads, length, size] = self.sizes;
        [length * 3 * heads * size, size, 3 * heads * size, 1]
    }

    fn packed_turned(&self) -> [i64; 4] {
        let [batch, head, row, column] = self.packed();
        [batch, head, column, row]
    }

    /// Strides of rows of `[heads, size]`.
    fn plain(&self) -> [i64; 4] {
        let [_, heads, length, size] = self.sizes;
        [length * heads * size, size, heads * size, 1]
    }

    fn tensor(&mut self, id: Option<i64>, data: Type, sizes: [i64; 4], strides: [i64; 4]) -> Result<Value> {
        let storage = if id.is_some() { TensorStorage::Memory } else { TensorStorage::Virtual };
        let id = id.unwrap_or(id::PASSING + self.tensors.len() as i64);
        self.push(backend::tensor(id, data, storage, sizes, strides)?)
    }

    fn push(&mut self, tensor: Descriptor) -> Result<Value> {
        self.tensors.push(tensor);
        Ok(Value(self.tensors.len() - 1))
    }

    fn number(&mut self, id: i64) -> Result<Value> {
        self.push(backend::tensor(id, Type::CUDNN_DATA_FLOAT, TensorStorage::Number, [1; 4], [1; 4])?)
    }

    /// `[batch, heads, length, size]` in memory.
    fn heads(&mut self, id: i64, strides: [i64; 4]) -> Result<Value> {
        self.tensor(Some(id), self.half, self.sizes, strides)
    }

    /// `[batch, heads, size, length]` in memory.
    fn heads_turned(&mut self, id: i64, strides: [i64; 4]) -> Result<Value> {
        let [batch, heads, length, size] = self.sizes;
        self.tensor(Some(id), self.half, [batch, heads, size, length], strides)
    }

    /// A float for each query.
    fn row(&mut self, id: Option<i64>) -> Result<Value> {
        let [batch, heads, length, _] = self.sizes;
        self.tensor(id, Type::CUDNN_DATA_FLOAT, [batch, heads, length, 1], [heads * length, length, 1, 1])
    }

    /// A virtual tensor with a value for each query and key.
    fn scores(&mut self, data: Type) -> Result<Value> {
        let [batch, heads, length, _] = self.sizes;
        let strides = [heads * length * length, length * length, length, 1];
        self.tensor(None, data, [batch, heads, length, length], strides)
    }

    /// Transposed scores, converted to the element type for a product.
    fn turn(&mut self, scores: Value) -> Result<Value> {
        let [batch, heads, length, _] = self.sizes;
        let strides = [heads * length * length, length * length, 1, length];
        let turned = self.tensor(None, self.half, [batch, heads, length, length], strides)?;
        self.reshape(scores, turned)?;
        Ok(turned)
    }

    /// Replaces the scores of keys after the query.
    fn mask(&mut self, scores: Value) -> Result<Value> {
        let unseen = self.number(id::UNSEEN)?;
        let (row, column) = (self.index(scores, 2)?, self.index(scores, 3)?);
        let is_seen = self.scores(Type::CUDNN_DATA_BOOLEAN)?;
        self.pointwise(Mode::CUDNN_POINTWISE_CMP_GE, row, Some(column), None, is_seen)?;
        let masked = self.scores(Type::CUDNN_DATA_FLOAT)?;
        self.pointwise(Mode::CUDNN_POINTWISE_BINARY_SELECT, scores, Some(unseen), Some(is_seen), masked)?;
        Ok(masked)
    }

    /// Each score's index along an axis.
    fn index(&mut self, scores: Value, axis: i64) -> Result<Value> {
        let out = self.scores(Type::CUDNN_DATA_INT32)?;
        let what = pointwise(Mode::CUDNN_POINTWISE_GEN_INDEX, Some(axis))?;
        self.apply(what, scores, None, None, out)?;
        Ok(out)
    }

    fn of(&mut self, mode: Mode, x: Value) -> Result<Value> {
        let out = self.scores(Type::CUDNN_DATA_FLOAT)?;
        self.pointwise(mode, x, None, None, out)?;
        Ok(out)
    }

    fn with(&mut self, mode: Mode, x: Value, by: Value) -> Result<Value> {
        let out = self.scores(Type::CUDNN_DATA_FLOAT)?;
        self.pointwise(mode, x, Some(by), None, out)?;
        Ok(out)
    }

    fn pointwise(&mut self, mode: Mode, x: Value, by: Option<Value>, chosen: Option<Value>, out: Value) -> Result<()> {
        self.apply(pointwise(mode, None)?, x, by, chosen, out)
    }

    fn apply(
        &mut self,
        what: Descriptor,
        x: Value,
        by: Option<Value>,
        chosen: Option<Value>,
        out: Value,
    ) -> Result<()> {
        let operation = Descriptor::new(Thing::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &what)?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &self.tensors[x.0])?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &self.tensors[out.0])?;
        if let Some(by) = by {
            operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &self.tensors[by.0])?;
        }
        if let Some(chosen) = chosen {
            operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, &self.tensors[chosen.0])?;
        }
        self.operation(what, operation)
    }

    fn operation(&mut self, what: Descriptor, operation: Descriptor) -> Result<()> {
        self.parts.push(what);
        self.operations.push(operation.finish()?);
        Ok(())
    }

    fn product(&mut self, a: Value, b: Value, out: Value) -> Result<()> {
        let what = Descriptor::new(Thing::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        what.set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[Type::CUDNN_DATA_FLOAT])?;
        let what = what.finish()?;
        let operation = Descriptor::new(Thing::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &self.tensors[a.0])?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &self.tensors[b.0])?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &self.tensors[out.0])?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &what)?;
        self.operation(what, operation)
    }

    /// Reduces over the last axis.
    fn reduce(&mut self, by: Reduce, x: Value) -> Result<Value> {
        let out = self.row(None)?;
        let what = Descriptor::new(Thing::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        what.set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[Type::CUDNN_DATA_FLOAT])?;
        what.set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, Kind::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &[by])?;
        let what = what.finish()?;
        let operation = Descriptor::new(Thing::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &what)?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &self.tensors[x.0])?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &self.tensors[out.0])?;
        self.operation(what, operation)?;
        Ok(out)
    }

    fn reshape(&mut self, x: Value, out: Value) -> Result<()> {
        let operation = Descriptor::new(Thing::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &self.tensors[x.0])?;
        operation.set_descriptor(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &self.tensors[out.0])?;
        self.operations.push(operation.finish()?);
        Ok(())
    }
}

/// The descriptor of a pointwise operation; comparisons produce booleans, all others floats.
fn pointwise(mode: Mode, axis: Option<i64>) -> Result<Descriptor> {
    let compute = match mode {
        Mode::CUDNN_POINTWISE_CMP_GE => Type::CUDNN_DATA_BOOLEAN,
        _ => Type::CUDNN_DATA_FLOAT,
    };
    let what = Descriptor::new(Thing::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
    what.set(Name::CUDNN_ATTR_POINTWISE_MODE, Kind::CUDNN_TYPE_POINTWISE_MODE, &[mode])?;
    what.set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, Kind::CUDNN_TYPE_DATA_TYPE, &[compute])?;
    if let Some(axis) = axis {
        what.set(Name::CUDNN_ATTR_POINTWISE_AXIS, Kind::CUDNN_TYPE_INT64, &[axis])?;
    }
    what.finish()
}
