//! GPT-2 (Radford et al., 2019): a transformer whose weights are kept in `float` and used in a lower precision.

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Initializer, Output};

use super::Parts;
use crate::data::{Dataset, Random};
use crate::nn::{self, Reduction};
use crate::ops;

/// The size of a model, and what it computes in.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// How many tokens it knows.
    pub vocabulary: usize,
    /// How many tokens it sees at once.
    pub context: usize,
    /// Numbers per token.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Heads in each.
    pub heads: usize,
    /// The dtype of activations and products. Variables are `float` in any case.
    pub compute: DType,
}

impl Size {
    /// The smallest of the published models, 124 million weights. Its 50,257 tokens are rounded up to a multiple of 128, which
    /// makes products faster; the tokens that do not exist soon have no share.
    pub fn gpt2_124m() -> Size {
        Size { vocabulary: 50304, context: 1024, width: 768, layers: 12, heads: 12, compute: DType::BF16 }
    }

    /// An error unless the sizes fit each other.
    pub fn check(&self) -> Result<()> {
        if self.heads == 0 || !self.width.is_multiple_of(self.heads) || self.width == 0 {
            return Err(Error::invalid_argument(format!(
                "a width of {} is not a multiple of {} heads",
                self.width, self.heads
            )));
        }
        if self.context == 0 || self.vocabulary == 0 {
            return Err(Error::invalid_argument("context and vocabulary must be at least 1"));
        }
        Ok(())
    }
}

/// Logits for the next token at every place: from whole numbers `[n, context]` to `[n, context, vocabulary]` of the dtype that is
/// computed in.
pub fn logits<'g>(tokens: Output<'g>, size: &Size) -> Output<'g> {
    let graph = tokens.graph();
    let normal = |stddev: f64| Initializer::Normal { mean: 0.0, stddev };
    let small = normal(0.02);
    // What is added to the stream is smaller the more layers add to it.
    let added = normal(0.02 / ((2 * size.layers.max(1)) as f64).sqrt());
    let dense = |units: usize, name: &str, initial: &Initializer| {
        nn::Dense::new(units).kernel(initial.clone()).stored_as(DType::F32).name(name)
    };
    let norm = |x: Output<'g>, name: &str| nn::LayerNorm::new().stored_as(DType::F32).name(name).apply(x);
    let table = nn::Embedding::new(size.vocabulary, size.width).name("tokens").initial(small.clone()).build(graph);
    let places = graph.new_variable("places", small.clone()).shape([size.context, size.width]).build();
    let mut x = ops::cast(table.lookup(tokens) + places.read(), size.compute);
    for layer in 0..size.layers {
        x = graph.name_scope(&format!("layer{layer}"), || {
            let qkv = dense(3 * size.width, "qkv", &small).apply(norm(x, "norm1"));
            let seen = ops::attention(qkv, size.heads, true);
            let x = x + dense(size.width, "out", &added).apply(seen);
            let inner = dense(4 * size.width, "up", &small).activation(nn::gelu).apply(norm(x, "norm2"));
            x + dense(size.width, "down", &added).apply(inner)
        });
    }
    // The table serves twice: for what goes in, and to tell what comes next.
    table.logits(norm(x, "norm"))
}

/// The loss of `logits`, in nats a token.
pub fn parts<'g>(logits: Output<'g>, next: Output<'g>) -> Parts<'g> {
    Parts { loss: nn::class_loss(logits, next, Reduction::Mean), metrics: Vec::new() }
}

/// Tokens that look like a text to a machine: each is one of four that may follow the one before, so there is something to learn,
/// down to ln 4 = 1.386 nats.
pub fn synthetic_tokens(n: usize, vocabulary: usize, seed: u64) -> Vec<i32> {
    let mut random = Random::new(seed, 0);
    let mut token = 0u64;
    (0..n)
        .map(|_| {
            let choice = (random.unit() * 4.0) as u64;
            token = (token.wrapping_mul(48271).wrapping_add(11 + choice * 7919)) % vocabulary.max(1) as u64;
            token as i32
        })
        .collect()
}

/// Windows of [`synthetic_tokens`] and the tokens that follow.
pub fn synthetic(n: usize, size: &Size, seed: u64) -> Result<Dataset> {
    let tokens = synthetic_tokens(n, size.vocabulary, seed);
    Ok(Dataset::windows(Tensor::from(tokens), size.context, size.context))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_runtime::Session;

    use super::*;
    use crate::optim::{AdamW, Optimizer};

    fn losses(compute: DType, steps: usize) -> Vec<f32> {
        let size = Size { vocabulary: 31, context: 16, width: 32, layers: 2, heads: 2, compute };
        size.check().unwrap();
        let g = kolo_ops::graph();
        g.set_seed(1);
        let tokens = g.placeholder::<i32>("tokens", [None, Some(size.context)]);
        let next = g.placeholder::<i32>("next", [None, Some(size.context)]);
        let loss = parts(logits(tokens, &size), next).loss;
        let train = AdamW::new(3e-3, 0.01).minimize(loss, None).unwrap();
        let init = g.global_variables_initializer();
        let session = Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        let data = synthetic(4096, &size, 1).unwrap().shuffle(1).batch(8, true).repeat_forever();
        let mut batches = data.batches().unwrap();
        (0..steps)
            .map(|_| {
                let batch = batches.next().unwrap().unwrap().tensors;
                let feeds = [(tokens, batch[0].clone()), (next, batch[1].clone())];
                session.run(&[loss], &feeds, &[train]).unwrap()[0].scalar_value::<f32>().unwrap()
            })
            .collect()
    }

    #[test]
    fn a_tiny_one_learns_in_both_precisions() {
        for compute in [DType::F32, DType::BF16] {
            let losses = losses(compute, 60);
            let (first, last) = (losses[0], losses[losses.len() - 1]);
            assert!((first - 31f32.ln()).abs() < 0.2, "{compute}: begins with {first}, which is not a guess");
            assert!(last < 2.2, "{compute}: {first} fell to {last} only");
        }
    }

    #[test]
    fn precisions_agree_at_first() {
        let (wide, narrow) = (losses(DType::F32, 1)[0], losses(DType::BF16, 1)[0]);
        assert!((wide - narrow).abs() < 0.02, "{wide} and {narrow}");
    }

    #[test]
    fn it_has_as_many_weights_as_published() {
        let g = kolo_ops::graph();
        let size = Size::gpt2_124m();
        let tokens = g.placeholder::<i32>("tokens", [None, Some(size.context)]);
        let logits = logits(tokens, &size);
        assert_eq!(logits.shape().to_string(), "[?,1024,50304]");
        let n: usize = g.trainable_variables().iter().map(|v| v.shape().known().unwrap().n_elements()).sum();
        // 124,439,808 as published, with 47 more rows in the table.
        assert_eq!(n, 124_439_808 + 47 * 768);
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let odd = Size { heads: 5, ..Size::gpt2_124m() };
        assert!(odd.check().unwrap_err().to_string().contains("5 heads"));
        assert!(Size { context: 0, ..Size::gpt2_124m() }.check().is_err());
    }
}
