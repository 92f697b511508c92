//! `KoloAttention`: self-attention of several heads, `softmax(q · kᵀ / √size) · v`, as one op of our own. The matrix of
//! scores, which has the square of the length, is never whole in memory: where the composition of TensorFlow's ops writes and
//! reads it a dozen times, a kernel keeps a few rows of it at a time.
//!
//! Queries, keys and values come as one tensor, as one product gives them: a row is `[3, heads, size]`. So nothing has to be
//! transposed before or after, and the gradient is one tensor too.

mod gpu;

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::vectorize;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output};

use crate::cuda::FLOATS;
use crate::math::binary::first;
use crate::nn::float::Float;
use crate::nn::rows::for_row_pairs;
use crate::op::{Gpu, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// Attention among the places of a sequence: from `[batch, length, 3 · heads · size]`, which holds queries, keys and values, to
/// `[batch, length, heads · size]`. If it is `causal`, a place sees those up to itself.
#[track_caller]
pub fn attention(qkv: Output<'_>, heads: usize, causal: bool) -> Output<'_> {
    qkv.graph().op("KoloAttention").input(qkv).attr("heads", heads as i64).attr("causal", causal).out()
}

pub(crate) static ATTENTION: Op = Op {
    def: OpDef {
        name: "KoloAttention",
        signature: "(qkv:T) -> (y:T, lse:float) ; T:type{half,bfloat16,float,double}, heads:int>=1, causal:bool=true",
        shape: |ctx| {
            let qkv = ctx.input_of_rank(0, 3)?;
            let heads = usize::try_from(ctx.attrs().int("heads")?).unwrap_or(0);
            let width = match qkv.dim(2) {
                Some(row) => Some(width_of(row, heads)?),
                None => None,
            };
            let y = PartialShape::new(&[qkv.dim(0), qkv.dim(1), width]);
            Ok(vec![y, PartialShape::new(&[qkv.dim(0), Some(heads), qkv.dim(1)])])
        },
        gradient: Gradient::Rule(|op, dy| {
            if dy.get(1).copied().flatten().is_some() {
                return Err(Error::unimplemented("KoloAttention has no gradient through its second output"));
            }
            let (heads, causal) = op.attrs(|attrs| Ok((attrs.int("heads")?, attrs.bool("causal")?)))?;
            let builder = op.graph().op("KoloAttentionGrad");
            let builder = builder.inputs([first(dy)?, op.input(0), op.output(0), op.output(1)]);
            Ok(vec![Some(builder.attr("heads", heads).attr("causal", causal).out().into())])
        }),
        half: HalfSafety::Faster,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, gpu::forward)]),
    cost: Cost::Heavy,
};

pub(crate) static ATTENTION_GRAD: Op = Op {
    def: OpDef {
        name: "KoloAttentionGrad",
        signature: "(dy:T, qkv:T, y:T, lse:float) -> (dqkv:T) ; T:type{half,bfloat16,float,double}, heads:int>=1, \
                    causal:bool=true",
        shape: |ctx| Ok(vec![ctx.input_of_rank(1, 3)?]),
        gradient: Gradient::Refused("no second derivative is defined for KoloAttention"),
        half: HalfSafety::Faster,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward: f32, f64; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, gpu::backward)]),
    cost: Cost::Heavy,
};

/// Elements that are computed side by side: two of the widest vectors.
const LANES: usize = 32;

/// The width of all heads together, of a row of queries, keys and values.
fn width_of(row: usize, heads: usize) -> Result<usize> {
    let width = row / 3;
    match row.is_multiple_of(3) && heads > 0 && width.is_multiple_of(heads) {
        true => Ok(width),
        false => Err(Error::invalid_argument(format!(
            "a row of {row} cannot hold queries, keys and values of {heads} heads: it must be a multiple of {}",
            heads.saturating_mul(3)
        ))),
    }
}

/// The sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub length: usize,
    pub heads: usize,
    /// Of one head.
    pub size: usize,
    pub causal: bool,
}

impl Sizes {
    /// Of the node at hand, whose queries, keys and values are input `i`.
    pub fn of(ctx: &KernelCtx<'_>, i: usize) -> Result<Sizes> {
        let shape = ctx.input(i)?.shape();
        let &[batch, length, row] = shape.dims() else {
            return Err(Error::invalid_argument(format!("qkv must be [batch, length, row], found {shape}")));
        };
        let heads = usize::try_from(ctx.attrs().int("heads")?).unwrap_or(0);
        let size = width_of(row, heads)? / heads;
        Ok(Sizes { batch, length, heads, size, causal: ctx.attrs().bool("causal")? })
    }

    pub fn width(&self) -> usize {
        self.heads * self.size
    }

    pub fn is_empty(&self) -> bool {
        self.batch * self.length * self.width() == 0
    }

    /// The shapes of both outputs.
    pub fn outputs(&self) -> Result<[Shape; 2]> {
        Ok([Shape::new(&[self.batch, self.length, self.width()])?, Shape::new(&[self.batch, self.heads, self.length])?])
    }

    /// Fails unless the gradient's other inputs are what the forward op gave.
    pub fn check_grad(&self, ctx: &KernelCtx<'_>) -> Result<()> {
        let [y, lse] = self.outputs()?;
        for (i, expected) in [(0, &y), (2, &y), (3, &lse)] {
            let found = ctx.input(i)?.shape();
            if found != expected {
                return Err(Error::invalid_argument(format!("input {i} has shape {found}, expected {expected}")));
            }
        }
        Ok(())
    }

    /// How many keys the query at place `i` sees.
    fn seen(&self, i: usize) -> usize {
        if self.causal { i + 1 } else { self.length }
    }
}

/// Rows of one head, packed: part 0 is queries, 1 keys, 2 values.
fn part<T: Float>(rows: &[T], sizes: &Sizes, part: usize, head: usize) -> Vec<T> {
    let width = sizes.width();
    let from = part * width + head * sizes.size;
    rows.chunks_exact(3 * width).flat_map(|row| &row[from..from + sizes.size]).copied().collect()
}

/// Columns of rows: number `d` of every row of `size`, side by side, with zeros up to whole vectors.
fn columns<R: Float>(rows: &[R], size: usize) -> Columns<R> {
    let stride = (rows.len() / size).next_multiple_of(LANES);
    let mut values = vec![R::zero(); size * stride];
    for (j, row) in rows.chunks_exact(size).enumerate() {
        for (d, &x) in row.iter().enumerate() {
            values[d * stride + j] = x;
        }
    }
    Columns { stride, values }
}

struct Columns<R> {
    stride: usize,
    values: Vec<R>,
}

impl<R: Float> Columns<R> {
    /// The products of `by` with the first rows: many at a time, where a sum over each row would bring its lanes together every time.
    #[inline(always)]
    fn products(&self, by: &[R], out: &mut [R]) {
        for (block, out) in out.chunks_mut(LANES).enumerate() {
            let mut lanes = [R::zero(); LANES];
            for (d, &by) in by.iter().enumerate() {
                if let Some(column) = self.values[d * self.stride + block * LANES..].first_chunk::<LANES>() {
                    for (lane, &x) in lanes.iter_mut().zip(column) {
                        *lane += by * x;
                    }
                }
            }
            out.copy_from_slice(&lanes[..out.len()]);
        }
    }
}

/// `out = Σ weights[j] · rows[j]`, with the sums in registers.
#[inline(always)]
fn weighted_sum<R: Float>(weights: &[R], rows: &[R], out: &mut [R]) {
    let size = out.len();
    let (whole, rest) = out.as_chunks_mut::<LANES>();
    let n_whole = whole.len() * LANES;
    for (block, out) in whole.iter_mut().enumerate() {
        let mut lanes = [R::zero(); LANES];
        for (&by, row) in weights.iter().zip(rows.chunks_exact(size)) {
            if let Some(row) = row[block * LANES..].first_chunk::<LANES>() {
                for (lane, &x) in lanes.iter_mut().zip(row) {
                    *lane += by * x;
                }
            }
        }
        *out = lanes;
    }
    rest.fill(R::zero());
    if !rest.is_empty() {
        for (&by, row) in weights.iter().zip(rows.chunks_exact(size)) {
            add_scaled(rest, by, &row[n_whole..]);
        }
    }
}

/// Brings all values together, in lanes side by side.
#[inline(always)]
fn fold<R: Float>(values: &[R], start: R, f: impl Fn(R, R) -> R + Copy) -> R {
    let mut lanes = [start; 16];
    let (whole, rest) = values.as_chunks::<16>();
    for chunk in whole {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = f(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = f(*lane, x);
    }
    lanes.into_iter().fold(start, f)
}

#[inline(always)]
fn add_scaled<R: Float>(to: &mut [R], by: R, x: &[R]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += by * *x);
}

/// What a query gives to each key it sees; returns the logarithm of the sum of the exponentials.
#[inline(always)]
fn shares<T: Float>(query: &[T], keys: &Columns<T>, scale: T, shares: &mut [T]) -> T {
    keys.products(query, shares);
    for share in shares.iter_mut() {
        *share = *share * scale;
    }
    let lowest = T::neg_infinity();
    let top = fold(
        shares,
        lowest,
        #[inline(always)]
        |a, b| if b > a { b } else { a },
    );
    // The sum in a loop of its own: one that adds up in order has no vectors.
    for share in shares.iter_mut() {
        *share = T::exponential(*share - top);
    }
    let total = fold(
        shares,
        T::of(0.0),
        #[inline(always)]
        |a, b| a + b,
    );
    let inverse = T::of(1.0) / total;
    for share in shares.iter_mut() {
        *share = *share * inverse;
    }
    top + num_traits::Float::ln(total)
}

fn scale_of<T: Float>(sizes: &Sizes) -> T {
    T::of((sizes.size as f64).powf(-0.5))
}

fn forward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Sizes::of(ctx, 0)?;
    let [shape, lse_shape] = sizes.outputs()?;
    let mut y = ctx.allocate(T::DTYPE, shape)?;
    let mut lse = ctx.allocate_zeroed(DType::F32, lse_shape)?;
    if !sizes.is_empty() {
        let qkv = ctx.data::<T>(0)?;
        let (width, per_batch) = (sizes.width(), sizes.length * sizes.width());
        let lengths = (per_batch, sizes.heads * sizes.length);
        let (y, lse) = (y.data_mut::<T>()?, lse.data_mut::<f32>()?);
        for_row_pairs(ctx.pool(), 1, lengths, y, lse, |from, y, lse| {
            let batches = y.chunks_exact_mut(lengths.0).zip(lse.chunks_exact_mut(lengths.1));
            for (i, (y, lse)) in batches.enumerate() {
                let rows = &qkv[(from + i) * 3 * per_batch..][..3 * per_batch];
                for head in 0..sizes.heads {
                    let lse = &mut lse[head * sizes.length..][..sizes.length];
                    vectorize(
                        #[inline(always)]
                        || one_head(rows, &sizes, head, y, width, lse),
                    );
                }
            }
        });
    }
    ctx.set_output(0, y);
    ctx.set_output(1, lse);
    Ok(())
}

#[inline(always)]
fn one_head<T: Float>(rows: &[T], sizes: &Sizes, head: usize, y: &mut [T], width: usize, lse: &mut [f32]) {
    let [queries, keys, values] = [0, 1, 2].map(|p| part(rows, sizes, p, head));
    let (scale, size) = (scale_of::<T>(sizes), sizes.size);
    let keys = columns(&keys, size);
    let mut all = vec![T::of(0.0); sizes.length];
    for (i, query) in queries.chunks_exact(size).enumerate() {
        let seen = &mut all[..sizes.seen(i)];
        let logarithm = shares::<T>(query, &keys, scale, seen);
        lse[i] = num_traits::ToPrimitive::to_f32(&logarithm).unwrap_or(f32::NAN);
        weighted_sum(seen, &values, &mut y[i * width + head * size..][..size]);
    }
}

/// With p the shares of a query and dp what dy makes of them: `ds = p · (dp − Σ p · dp)`; queries get ds · keys, keys
/// dsᵀ · queries, values pᵀ · dy. The shares are computed again.
fn backward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Sizes::of(ctx, 1)?;
    sizes.check_grad(ctx)?;
    let mut out = ctx.allocate(T::DTYPE, ctx.input(1)?.shape().clone())?;
    if !sizes.is_empty() {
        let (dy, qkv) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?);
        let per_batch = sizes.length * sizes.width();
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, 3 * per_batch, |batch, out| {
            let (rows, dy) = (&qkv[batch * 3 * per_batch..][..3 * per_batch], &dy[batch * per_batch..][..per_batch]);
            for head in 0..sizes.heads {
                vectorize(
                    #[inline(always)]
                    || one_head_back(rows, dy, &sizes, head, out),
                );
            }
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

#[inline(always)]
fn one_head_back<T: Float>(rows: &[T], dy: &[T], sizes: &Sizes, head: usize, out: &mut [T]) {
    let [queries, keys, values] = [0, 1, 2].map(|p| part(rows, sizes, p, head));
    let (scale, size, width) = (scale_of::<T>(sizes), sizes.size, sizes.width());
    let (key_columns, value_columns) = (columns(&keys, size), columns(&values, size));
    let [mut to_queries, mut to_keys, mut to_values] = [0, 1, 2].map(|_| vec![T::of(0.0); sizes.length * size]);
    let mut all = vec![T::of(0.0); sizes.length];
    let mut slopes = all.clone();
    for (i, query) in queries.chunks_exact(size).enumerate() {
        let n = sizes.seen(i);
        let (seen, slopes) = (&mut all[..n], &mut slopes[..n]);
        shares::<T>(query, &key_columns, scale, seen);
        let dy_row = &dy[i * width + head * size..][..size];
        value_columns.products(dy_row, slopes);
        let mean: T = seen.iter().zip(slopes.iter()).map(|(share, slope)| *share * *slope).sum();
        for (slope, share) in slopes.iter_mut().zip(seen.iter()) {
            *slope = *share * (*slope - mean) * scale;
        }
        weighted_sum(slopes, &keys, &mut to_queries[i * size..(i + 1) * size]);
        for (to, &ds) in to_keys.chunks_exact_mut(size).zip(slopes.iter()) {
            add_scaled(to, ds, query);
        }
        for (to, &share) in to_values.chunks_exact_mut(size).zip(seen.iter()) {
            add_scaled(to, share, dy_row);
        }
    }
    let grads = [to_queries, to_keys, to_values];
    for (i, row) in out.chunks_exact_mut(3 * width).enumerate() {
        for (p, grad) in grads.iter().enumerate() {
            row[p * width + head * size..][..size].copy_from_slice(&grad[i * size..(i + 1) * size]);
        }
    }
}

/// [`attention`] composed of TensorFlow's ops, for graphs that a TensorFlow server runs, and to compare with.
#[track_caller]
pub fn composed_attention(qkv: Output<'_>, heads: usize, causal: bool) -> Output<'_> {
    let graph = qkv.graph();
    let dims = (qkv.shape().dim(0), qkv.shape().dim(1), qkv.shape().dim(2));
    let (Some(batch), Some(length), Some(row)) = dims else {
        graph.record_error(Error::invalid_argument("composed_attention needs a qkv whose shape is known"));
        return Output::invalid(graph);
    };
    let width = match width_of(row, heads) {
        Ok(width) => width,
        Err(error) => {
            graph.record_error(error);
            return Output::invalid(graph);
        }
    };
    graph.name_scope("attention", || {
        let ints =
            |values: &[usize]| graph.constant(Tensor::vector(values.iter().map(|&n| n as i32).collect::<Vec<_>>()));
        let reshape = |x: Output<'_>, to: &[usize]| {
            let x = Output::new(graph, x.endpoint());
            graph.op("Reshape").inputs([x, ints(to)]).out()
        };
        let transpose = |x: Output<'_>, order: &[usize]| {
            let x = Output::new(graph, x.endpoint());
            graph.op("Transpose").inputs([x, ints(order)]).out()
        };
        let parts = transpose(reshape(qkv, &[batch, length, 3, heads, width / heads]), &[2, 0, 3, 1, 4]);
        let parts = graph.op("Unpack").input(parts).attr("num", 3i64).attr("axis", 0i64).build().outputs();
        let [queries, keys, values] = parts[..] else { return Output::invalid(graph) };
        let scale = ((width / heads) as f64).powf(-0.5);
        let mut scores = graph.op("BatchMatMulV2").inputs([queries, keys]).attr("adj_y", true).out() * scale;
        if causal {
            let low = |i: usize| if i % length > i / length { -1e9f32 } else { 0.0 };
            match Tensor::from_vec([length, length], (0..length * length).map(low).collect::<Vec<f32>>()) {
                Ok(mask) => {
                    scores = scores + graph.op("Cast").input(graph.constant(mask)).attr("DstT", qkv.dtype()).out();
                }
                Err(error) => graph.record_error(error),
            }
        }
        let shares = graph.op("Softmax").input(scores).out();
        let seen = graph.op("BatchMatMulV2").inputs([shares, values]).out();
        reshape(transpose(seen, &[0, 2, 1, 3]), &[batch, length, width])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, check_op, evaluate, tensor, wavy};

    #[test]
    fn one_op_gives_what_many_give() {
        for (causal, sizes) in [(false, (7, 5)), (true, (7, 5)), (false, (37, 35)), (true, (37, 35))] {
            let g = crate::graph();
            // The second is longer than the lanes of the loops, in both ways.
            let (length, size) = sizes;
            let qkv = g.constant(wavy([3, length, 3 * 2 * size], 1));
            let weights = g.constant(wavy([3, length, 2 * size], 2));
            let all = |y: Output<'_>| {
                let y = Output::new(&g, y.endpoint());
                let loss = g.op("Sum").input(y * weights).input(g.constant([0i32, 1, 2])).out();
                let grad = kolo_graph::gradients(&[loss], &[qkv]).unwrap()[0].unwrap().dense().unwrap();
                [y.endpoint(), grad.endpoint()]
            };
            let (one, many) = (all(attention(qkv, 2, causal)), all(composed_attention(qkv, 2, causal)));
            let outputs: Vec<Output<'_>> = one.into_iter().chain(many).map(|at| Output::new(&g, at)).collect();
            let found = evaluate(&g, &outputs, &[]).unwrap();
            assert_close(&found[0], &found[2], 1e-5, "KoloAttention");
            assert_close(&found[1], &found[3], 1e-5, "KoloAttentionGrad");
        }
    }

    #[test]
    fn a_first_place_sees_itself_alone() {
        let qkv = wavy([1, 3, 12], 3);
        let values = qkv.data::<f32>().unwrap()[8..12].to_vec();
        let found = check_op("KoloAttention").attr("heads", 2i64).input(qkv).run(false).unwrap();
        assert_eq!(&found[0].data::<f32>().unwrap()[..4], values.as_slice());
        assert_eq!(found[1].shape().dims(), [1, 2, 3]);
    }

    #[test]
    fn gradients_and_bad_input() {
        check_op("KoloAttention").attr("heads", 2i64).input(wavy([2, 4, 12], 1)).gradient();
        check_op("KoloAttention").attr("heads", 1i64).attr("causal", false).input(wavy([1, 3, 6], 1)).gradient();
        check_op("KoloAttention").attr("heads", 5i64).input(wavy([2, 4, 12], 1)).fails("multiple of 15");
        check_op("KoloAttention").attr("heads", 1i64).input(wavy([4, 12], 1)).fails("rank 3");
        let none = || tensor::<f32, 3>([2, 0, 12], []);
        check_op("KoloAttention").attr("heads", 2i64).input(none()).gives(tensor::<f32, 3>([2, 0, 4], []));
    }
}
