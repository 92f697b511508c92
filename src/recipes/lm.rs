//! A character-level language model: a small transformer that learns which character comes next.

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Initializer, Output};
use kolo_runtime::Session;

use super::Parts;
use crate::data::Random;
use crate::data::text::Vocabulary;
use crate::nn::{self, AttentionMask, MultiHeadAttention, Reduction};

/// The size of a transformer.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// How many characters it knows.
    pub vocabulary: usize,
    /// How many characters it sees at once.
    pub context: usize,
    /// The model's width (embedding size).
    pub width: usize,
    /// Layers of attention.
    pub layers: usize,
    /// Heads in each.
    pub heads: usize,
}

/// Logits for the next character at every place: from `int32[n,context]` to `float[n,context,vocabulary]`.
pub fn transformer<'g>(tokens: Output<'g>, size: &Size) -> Output<'g> {
    let graph = tokens.graph();
    let small = Initializer::Normal { mean: 0.0, stddev: 0.02 };
    let embedded =
        nn::Embedding::new(size.vocabulary, size.width).name("characters").initial(small.clone()).apply(tokens);
    let place = graph.new_variable("places", small).shape([size.context, size.width]).build();
    let mut x = embedded + place.read();
    let mask = AttentionMask::causal(graph, size.context);
    for layer in 0..size.layers {
        x = graph.name_scope(&format!("layer{layer}"), || {
            let normal = nn::layer_norm(x, "norm1");
            let x = x + MultiHeadAttention::new(size.heads).name("attention").apply(normal, mask, false);
            let normal = nn::layer_norm(x, "norm2");
            let inner = nn::Dense::new(4 * size.width).activation(nn::gelu).name("up").apply(normal);
            x + nn::dense(inner, size.width, "down")
        });
    }
    nn::dense(nn::layer_norm(x, "norm"), size.vocabulary, "logits")
}

/// The loss of `logits`, in nats a character, and the share of characters that are guessed right.
pub fn parts<'g>(logits: Output<'g>, next: Output<'g>) -> Parts<'g> {
    Parts {
        loss: nn::sparse_softmax_cross_entropy(logits, next, Reduction::Mean),
        metrics: vec![("accuracy", nn::accuracy(logits, next))],
    }
}

/// Writes on from `prompt`: draws `n` characters, one after the other, each from what the model thinks comes next. A low
/// temperature makes it cautious.
#[derive(Clone, Copy, Debug)]
pub struct Sampler<'g> {
    /// Where the characters go in.
    pub tokens: Output<'g>,
    /// What the model thinks.
    pub logits: Output<'g>,
    /// How many characters it sees at once.
    pub context: usize,
}

impl Sampler<'_> {
    /// The text that follows.
    pub fn write_on(
        &self,
        session: &Session,
        vocabulary: &Vocabulary,
        prompt: &str,
        n: usize,
        temperature: f32,
        seed: u64,
    ) -> Result<String> {
        let mut text = vocabulary.encode(prompt)?;
        if text.is_empty() {
            return Err(Error::invalid_argument("a prompt needs at least one character"));
        }
        let prompted = text.len();
        let mut random = Random::new(seed, 0);
        for _ in 0..n {
            let start = text.len().saturating_sub(self.context);
            let seen = &text[start..];
            let last = seen.len() - 1;
            // What comes after the last place does not matter to it: attention looks back only.
            let mut window = seen.to_vec();
            window.resize(self.context, 0);
            let feed = Tensor::from_vec([1, self.context], window)?;
            let values = session.run(&[self.logits], &[(self.tokens, feed)], &[])?;
            let logits = values.first().ok_or_else(|| Error::internal("a fetch gave nothing"))?.data::<f32>()?;
            let row = &logits[last * vocabulary.len()..(last + 1) * vocabulary.len()];
            text.push(draw(row, temperature, random.unit()));
        }
        Ok(vocabulary.decode(&text[prompted..]))
    }
}

/// The index that a number from 0 to 1 falls on, when the indices share that range by softmax.
fn draw(logits: &[f32], temperature: f32, at: f32) -> i32 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = logits.iter().map(|x| ((x - top) / temperature.max(1e-3)).exp()).collect();
    let mut left = at * weights.iter().sum::<f32>();
    for (i, weight) in weights.iter().enumerate() {
        left -= weight;
        if left <= 0.0 {
            return i as i32;
        }
    }
    weights.len() as i32 - 1
}

#[cfg(test)]
mod tests {
    use super::draw;

    #[test]
    fn drawing_follows_the_shares() {
        let logits = [1.0f32.ln(), 2.0f32.ln(), 1.0f32.ln()];
        assert_eq!([0.1, 0.3, 0.7, 0.8].map(|at| draw(&logits, 1.0, at)), [0, 1, 1, 2]);
        // Cold, the largest takes all.
        assert_eq!([0.01, 0.99].map(|at| draw(&logits, 0.01, at)), [1, 1]);
    }
}
