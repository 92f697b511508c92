//! Multi-head attention (Vaswani et al., 2017).

use kolo_core::{DType, Dim, Error, Result, Tensor};
use kolo_graph::{Graph, IntoOutput, Output};

use super::layer::{Phase, last_dim, refuse};
use super::{Dense, Dropout};
use crate::ops::{self, At};

/// Which keys a query may look at: a number that is added to each score, 0 or very low. Made once and used by all layers.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMask<'g> {
    /// What is added to the scores, which are `[batch, heads, queries, keys]`; it broadcasts.
    bias: Option<Output<'g>>,
}

/// Low enough to count for nothing after a softmax, and finite, so that a row without any keys stays a number.
fn closed(dtype: DType) -> f64 {
    if dtype == DType::F16 { -3e4 } else { -1e9 }
}

impl<'g> AttentionMask<'g> {
    /// Every query sees every key.
    pub fn none() -> AttentionMask<'g> {
        AttentionMask { bias: None }
    }

    /// A query sees the keys up to its own place, for sequences of this length.
    #[track_caller]
    pub fn causal(graph: &'g Graph, length: usize) -> AttentionMask<'g> {
        let low = closed(DType::F32) as f32;
        let values: Vec<f32> = (0..length * length).map(|i| if i % length > i / length { low } else { 0.0 }).collect();
        let mask = Tensor::from_vec([length, length], values).map(|mask| graph.named_constant("causal_mask", mask));
        AttentionMask { bias: mask.map_err(|error| graph.record_error(error)).ok() }
    }

    /// As [`AttentionMask::causal`], for sequences as long as `x`, `[batch, length, …]`, will be.
    #[track_caller]
    pub fn causal_like(x: Output<'g>) -> AttentionMask<'g> {
        let graph = x.graph();
        if let Some(length) = x.shape().dim(1) {
            return AttentionMask::causal(graph, length);
        }
        graph.name_scope("causal_mask", || {
            let length = ops::slice_at(ops::shape(x), &[At::Range(Some(1), Some(2))]);
            let all = ops::fill(ops::concat(&[length, length], 0), graph.constant(closed(DType::F32) as f32));
            let (below, above) = (graph.constant(-1i64), graph.constant(0i64));
            let seen = graph.op("MatrixBandPart").inputs([all, below, above]).out();
            AttentionMask { bias: Some(all - seen) }
        })
    }

    /// Besides, only the keys that `is_there` (`[batch, keys]` of `bool`) says are there.
    #[track_caller]
    #[must_use]
    pub fn padding(self, is_there: Output<'g>) -> AttentionMask<'g> {
        let graph = is_there.graph();
        let (open, shut) = (graph.constant(0.0f32), graph.constant(closed(DType::F32) as f32));
        let bias = ops::expand_dims(ops::expand_dims(ops::select(is_there, open, shut), 1), 1);
        AttentionMask { bias: Some(self.bias.map_or(bias, |own| own + bias)) }
    }

    fn add_to(self, scores: Output<'g>) -> Output<'g> {
        match self.bias {
            Some(bias) => scores + ops::cast(bias, scores.dtype()),
            None => scores,
        }
    }
}

/// Attention with several heads, and the projections around it.
///
/// ```
/// use kolo::nn::{AttentionMask, MultiHeadAttention};
///
/// let g = kolo::graph();
/// let x = g.placeholder::<f32>("x", [None, Some(16), Some(64)]);
/// let mask = AttentionMask::causal_like(x);
/// let y = MultiHeadAttention::new(4).name("block0/attention").apply(x, mask, false);
/// assert_eq!(y.shape().to_string(), "[?,16,64]");
/// # g.check()?;
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    heads: usize,
    width: Option<usize>,
    dropout: f64,
    name: String,
}

impl MultiHeadAttention {
    /// So many heads, which share the width of the input.
    pub fn new(heads: usize) -> MultiHeadAttention {
        MultiHeadAttention { heads, width: None, dropout: 0.0, name: "multi_head_attention".to_owned() }
    }

    /// The width that the heads share, if it is not that of the input.
    #[must_use]
    pub fn width(mut self, width: usize) -> MultiHeadAttention {
        self.width = Some(width);
        self
    }

    /// The part of the attention that is dropped while training.
    #[must_use]
    pub fn dropout(mut self, rate: f64) -> MultiHeadAttention {
        self.dropout = rate;
        self
    }

    /// Its name: `multi_head_attention` otherwise.
    #[must_use]
    pub fn name(mut self, name: &str) -> MultiHeadAttention {
        self.name = name.to_owned();
        self
    }

    /// Self-attention over `x`, `[batch, length, size]`.
    #[track_caller]
    pub fn apply<'g>(&self, x: Output<'g>, mask: AttentionMask<'g>, training: impl Into<Phase<'g>>) -> Output<'g> {
        let graph = x.graph();
        let Some(size) = last_dim(x, "MultiHeadAttention", &self.name) else { return Output::invalid(graph) };
        let (width, training) = (self.width.unwrap_or(size), training.into());
        if let Err(error) = self.check(width, &[x]) {
            return refuse(graph, "MultiHeadAttention", &self.name, error.message());
        }
        graph.name_scope(&self.name, || {
            // One product gives queries, keys and values.
            let all = Dense::new(3 * width).name("qkv").apply(x);
            let parts = self.heads_of(all, x, 3, width);
            let [queries, keys, values] = parts[..] else { return Output::invalid(graph) };
            let seen = self.attend([queries, keys, values], mask, training, x, width);
            Dense::new(size).name("output").apply(seen)
        })
    }

    /// Attention of `x`, `[batch, length, size]`, to `context`, `[batch, keys, any size]`.
    #[track_caller]
    pub fn apply_to<'g>(
        &self,
        x: Output<'g>,
        context: Output<'g>,
        mask: AttentionMask<'g>,
        training: impl Into<Phase<'g>>,
    ) -> Output<'g> {
        let graph = x.graph();
        let sizes = [x, context].map(|input| last_dim(input, "MultiHeadAttention", &self.name));
        let [Some(size), Some(_)] = sizes else { return Output::invalid(graph) };
        let (width, training) = (self.width.unwrap_or(size), training.into());
        if let Err(error) = self.check(width, &[x, context]) {
            return refuse(graph, "MultiHeadAttention", &self.name, error.message());
        }
        graph.name_scope(&self.name, || {
            let queries = self.heads_of(Dense::new(width).name("query").apply(x), x, 1, width);
            let others = self.heads_of(Dense::new(2 * width).name("key_value").apply(context), context, 2, width);
            let ([queries], [keys, values]) = (&queries[..], &others[..]) else { return Output::invalid(graph) };
            let seen = self.attend([*queries, *keys, *values], mask, training, x, width);
            Dense::new(size).name("output").apply(seen)
        })
    }

    fn check(&self, width: usize, inputs: &[Output<'_>]) -> Result<()> {
        if self.heads == 0 || !width.is_multiple_of(self.heads) {
            return Err(Error::invalid_argument(format!("{} heads cannot share a width of {width}", self.heads)));
        }
        match inputs.iter().find(|input| input.shape().rank() != Some(3)) {
            Some(input) => Err(Error::invalid_argument(format!("its input {input:?} is not [batch, length, size]"))),
            None => Ok(()),
        }
    }

    /// Cuts `[batch, length, n · width]` into n times `[batch, heads, length, size of a head]`. `like` has batch and length.
    fn heads_of<'g>(&self, all: Output<'g>, like: Output<'g>, n: usize, width: usize) -> Vec<Output<'g>> {
        let head = width / self.heads;
        let parts = reshape_after(all, like, &[n, self.heads, head]);
        // One copy brings them all into the order in which they are multiplied.
        let moved = ops::transpose(parts, &[2, 0, 3, 1, 4]);
        ops::unstack(moved, n, 0)
    }

    /// `softmax(queries · keysᵀ / √size) · values`, the heads side by side again.
    fn attend<'g>(
        &self,
        [queries, keys, values]: [Output<'g>; 3],
        mask: AttentionMask<'g>,
        training: Phase<'g>,
        like: Output<'g>,
        width: usize,
    ) -> Output<'g> {
        let scale = ((width / self.heads) as f64).powf(-0.5).into_output(like.graph(), queries.dtype());
        let scores = mask.add_to(ops::batch_matmul_with(queries * scale, keys, false, true));
        let weights = ops::softmax(scores);
        let weights = if self.dropout > 0.0 { Dropout::new(self.dropout).apply(weights, training) } else { weights };
        let seen = ops::transpose(ops::batch_matmul(weights, values), &[0, 2, 1, 3]);
        reshape_after(seen, like, &[width])
    }
}

/// `x` in the shape `[batch, length]` of `like`, followed by `last`.
#[track_caller]
fn reshape_after<'g>(x: Output<'g>, like: Output<'g>, last: &[usize]) -> Output<'g> {
    let front: [Dim; 2] = [like.shape().dim(0), like.shape().dim(1)];
    let last = last.iter().map(|&size| size as i64);
    if front.iter().filter(|dim| dim.is_none()).count() <= 1 {
        let front = front.iter().map(|dim| dim.map_or(-1, |dim| dim as i64));
        return ops::reshape(x, front.chain(last).collect::<Vec<_>>().as_slice());
    }
    let graph = like.graph();
    let front = ops::slice_at(ops::shape(like), &[At::Range(None, Some(2))]);
    let last = graph.constant(Tensor::vector(last.map(|size| size as i32).collect::<Vec<_>>()));
    ops::reshape(x, ops::concat(&[front, last], 0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_runtime::Session;

    use super::*;
    use crate::nn::testing::{check_gradients, close};

    /// Element (i, j) is `((7·i + 3·j) mod 11 − 5) / 10`.
    fn matrix(rows: usize, columns: usize) -> Tensor {
        let at = |i: usize| ((7 * (i / columns) + 3 * (i % columns)) % 11) as f32;
        Tensor::from_vec([rows, columns], (0..rows * columns).map(|i| (at(i) - 5.0) / 10.0).collect()).unwrap()
    }

    fn wave(dims: [usize; 3], of: impl Fn(f32) -> f32) -> Tensor {
        Tensor::from_vec(dims, (0..dims.iter().product::<usize>()).map(|i| of(i as f32)).collect()).unwrap()
    }

    /// Attention with [`matrix`] in place of all kernels.
    fn check(apply: impl for<'g> Fn(&MultiHeadAttention, Output<'g>) -> Output<'g>, expected: &[f32]) {
        for dims in [[Some(1), Some(3), Some(4)], [None, None, Some(4)]] {
            let g = kolo_ops::graph();
            let x = g.placeholder::<f32>("x", dims);
            let y = apply(&MultiHeadAttention::new(2).name("attention"), x);
            assert_eq!(y.shape().dim(-1), Some(4));
            let set: Vec<_> = g
                .trainable_variables()
                .into_iter()
                .filter(|variable| variable.name().ends_with("kernel"))
                .map(|kernel| {
                    let shape = kernel.shape().known().unwrap();
                    kernel.assign(g.constant(matrix(shape[0], shape[1])))
                })
                .collect();
            let init = g.global_variables_initializer();
            let session = Session::new(&g).unwrap();
            session.run_op(init).unwrap();
            session.run(&[], &[], &set).unwrap();
            let found = session.run(&[y], &[(x, wave([1, 3, 4], |i| (i * 0.7).sin()))], &[]).unwrap();
            assert_eq!(found[0].shape().dims(), [1, 3, 4]);
            close(&found[0], expected);
        }
    }

    // Expected values are softmax(q · kᵀ / √2 + mask) · v · output, in NumPy.
    const CAUSAL: [f32; 12] = [
        0.2927038, -0.1541252, -0.1480496, 0.2277707, -0.0791121, 0.0160505, 0.01927, -0.0364352, 0.1330911,
        -0.0627841, -0.0544492, 0.0978765,
    ];

    #[test]
    fn self_attention_and_masks() {
        let plain = [
            0.1371594, -0.0604597, -0.056004, 0.0952856, 0.1182114, -0.0331271, -0.0454154, 0.0527916, 0.1330911,
            -0.0627841, -0.0544492, 0.0978765,
        ];
        check(|layer, x| layer.apply(x, AttentionMask::none(), false), &plain);
        check(|layer, x| layer.apply(x, AttentionMask::causal_like(x), false), &CAUSAL);
        check(|layer, x| layer.apply(x, AttentionMask::causal(x.graph(), 3), false), &CAUSAL);
        let two = |x: Output<'_>| x.graph().constant([[true, true, false]]).endpoint();
        let padded = [
            -0.0598736, -0.007676, 0.0046079, 0.0074094, -0.0791121, 0.0160505, 0.01927, -0.0364352, -0.0633854,
            -0.0073485, 0.0056731, 0.0075021,
        ];
        check(|layer, x| layer.apply(x, AttentionMask::none().padding(Output::new(x.graph(), two(x))), false), &padded);
        let both = [&CAUSAL[..8], &padded[8..]].concat();
        check(
            |layer, x| {
                layer.apply(x, AttentionMask::causal(x.graph(), 3).padding(Output::new(x.graph(), two(x))), true)
            },
            &both,
        );
    }

    #[test]
    fn attention_to_a_context_of_another_size() {
        let expected = [
            0.0933748, -0.1799638, 0.1563133, -0.0741428, 0.0802404, -0.1906309, 0.1628254, -0.0557176, 0.0897693,
            -0.1806817, 0.1565522, -0.0716134,
        ];
        check(
            |layer, x| {
                let context = x.graph().constant(wave([1, 2, 5], |i| (i * 0.3).cos()));
                layer.apply_to(x, context, AttentionMask::none(), false)
            },
            &expected,
        );
    }

    #[test]
    fn gradients_and_names() {
        let g = kolo_ops::graph();
        g.set_seed(5);
        let values = Tensor::from_vec([2usize, 3, 4], (0..24).map(|i| f64::from(i).sin()).collect()).unwrap();
        let x = g.variable("x", values);
        let mask = AttentionMask::causal(&g, 3);
        let y = MultiHeadAttention::new(2).width(6).apply(x.read(), mask, false);
        let names: Vec<String> = g.trainable_variables().iter().map(|v| v.name()).collect();
        let expected = ["qkv/kernel", "qkv/bias", "output/kernel", "output/bias"];
        assert_eq!(names[1..], expected.map(|name| format!("multi_head_attention/{name}")));
        check_gradients(&g, ops::sum_all(ops::tanh(y)));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None, Some(3), Some(5)]);
        MultiHeadAttention::new(2).name("a").apply(x, AttentionMask::none(), false);
        let error = g.take_error().unwrap().to_string();
        assert!(error.contains("MultiHeadAttention 'a': 2 heads cannot share a width of 5"), "{error}");
        let x = g.placeholder::<f32>("y", [None, Some(4)]);
        MultiHeadAttention::new(2).apply(x, AttentionMask::none(), false);
        assert!(g.take_error().unwrap().to_string().contains("is not [batch, length, size]"));
    }
}
