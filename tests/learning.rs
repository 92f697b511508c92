//! Small models learn small tasks: the library's layers, losses and optimizers together, from seeds that are fixed.

#![allow(clippy::unwrap_used)]

use kolo::nn::{self, AttentionMask, Reduction};
use kolo::optim::{Adam, AdamW, Clip, MinimizeOptions, Optimizer, Schedule};
use kolo::{DType, Output, Session, Tensor, train};

/// Numbers that look random and are always the same.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

fn scalar(session: &Session, output: Output<'_>, feeds: &[(Output<'_>, Tensor)]) -> f32 {
    session.run(&[output], feeds, &[]).unwrap()[0].scalar_value::<f32>().unwrap()
}

#[test]
fn a_perceptron_learns_xor() {
    let g = kolo::graph();
    g.set_seed(1);
    let x = g.constant([[0.0f32, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]);
    let labels = g.constant([[0.0f32], [1.0], [1.0], [0.0]]);
    let hidden = nn::Dense::new(8).activation(nn::tanh).name("hidden").apply(x);
    let logits = nn::dense(hidden, 1, "logits");
    let loss = nn::sigmoid_cross_entropy(logits, labels, Reduction::Mean);
    let step = train::global_step_or_create(&g).unwrap();
    let train = Adam::new(Schedule::constant(0.05).warm_up(10)).minimize(loss, Some(step)).unwrap();
    let init = g.global_variables_initializer();

    let session = Session::new(&g).unwrap();
    session.run_op(init).unwrap();
    let before = scalar(&session, loss, &[]);
    for _ in 0..200 {
        session.run_op(train).unwrap();
    }
    let after = scalar(&session, loss, &[]);
    assert!(before > 0.5 && after < 0.05, "from {before} to {after}");
}

#[test]
fn an_lstm_remembers_the_first_bit() {
    const STEPS: usize = 8;
    const BATCH: usize = 16;
    let g = kolo::graph();
    g.set_seed(2);
    let x = g.placeholder::<f32>("x", [None, Some(STEPS), Some(1)]);
    let labels = g.placeholder::<i64>("labels", [None]);
    let cell = nn::LstmCell::new(12).build(&g, 1, DType::F32);
    let rnn = nn::dynamic_rnn(&cell, x, nn::RnnOptions::default()).unwrap();
    let logits = nn::dense(rnn.state[1], 2, "logits");
    let loss = nn::sparse_softmax_cross_entropy(logits, labels, Reduction::Mean);
    let accuracy = nn::accuracy(logits, labels);
    let options = MinimizeOptions { clip: Some(Clip::GlobalNorm(5.0)), ..MinimizeOptions::default() };
    let train = Adam::new(0.03).minimize_with(loss, &options).unwrap();
    let init = g.global_variables_initializer();

    let session = Session::new(&g).unwrap();
    session.run_op(init).unwrap();
    let mut numbers = Numbers(7);
    let mut batch = || {
        let bits: Vec<f32> = (0..BATCH * STEPS).map(|_| numbers.below(2) as f32 * 2.0 - 1.0).collect();
        let first = bits.chunks(STEPS).map(|sequence| i64::from(sequence[0] > 0.0)).collect::<Vec<_>>();
        [(x, Tensor::from_vec([BATCH, STEPS, 1], bits).unwrap()), (labels, Tensor::vector(first))]
    };
    for _ in 0..150 {
        session.run(&[], &batch(), &[train]).unwrap();
    }
    let found = (0..4).map(|_| scalar(&session, accuracy, &batch())).sum::<f32>() / 4.0;
    assert!(found > 0.95, "accuracy {found}");
}

#[test]
fn attention_learns_to_copy() {
    const LENGTH: usize = 6;
    const WORDS: usize = 5;
    const WIDTH: usize = 16;
    let g = kolo::graph();
    g.set_seed(4);
    // Each sequence is three words and the same three again; the second half can be predicted.
    let words = g.placeholder::<i64>("words", [None, Some(LENGTH)]);
    let next = g.placeholder::<i64>("next", [None, Some(LENGTH)]);
    let table = nn::Embedding::new(WORDS, WIDTH).name("words").build(&g);
    let places = nn::Embedding::new(LENGTH, WIDTH).name("places").build(&g).table.read();
    let mask = AttentionMask::causal(&g, LENGTH);
    let x = table.lookup(words) + places;
    let seen = nn::layer_norm(x, "block/norm1");
    let x = x + nn::MultiHeadAttention::new(2).name("block/attention").apply(seen, mask, true);
    let inner = nn::layer_norm(x, "block/norm2");
    let inner = nn::Dense::new(2 * WIDTH).activation(nn::gelu).name("block/up").apply(inner);
    let x = x + nn::dense(inner, WIDTH, "block/down");
    let logits = nn::dense(nn::layer_norm(x, "norm"), WORDS, "logits");
    let losses = nn::sparse_softmax_cross_entropy(logits, next, Reduction::None);
    let second_half = g.constant([[0.0f32, 0.0, 1.0, 1.0, 1.0, 0.0]]);
    let loss = nn::weighted_mean(losses, losses * 0.0 + second_half);
    let train = AdamW::new(0.02, 0.01).exclude_from_decay(&["bias", "gamma", "beta"]).minimize(loss, None).unwrap();
    let init = g.global_variables_initializer();

    let session = Session::new(&g).unwrap();
    session.run_op(init).unwrap();
    let mut numbers = Numbers(11);
    let mut batch = || {
        let mut sequences: Vec<i64> = Vec::new();
        for _ in 0..16 {
            let half: Vec<i64> = (0..LENGTH / 2).map(|_| numbers.below(WORDS as u64) as i64).collect();
            sequences.extend(half.iter().chain(&half));
        }
        let shifted: Vec<i64> = (0..sequences.len()).map(|i| sequences[(i + 1).min(sequences.len() - 1)]).collect();
        let tensor = |values: Vec<i64>| Tensor::from_vec([16usize, LENGTH], values).unwrap();
        [(words, tensor(sequences)), (next, tensor(shifted))]
    };
    let before = scalar(&session, loss, &batch());
    for _ in 0..80 {
        session.run(&[], &batch(), &[train]).unwrap();
    }
    let after = scalar(&session, loss, &batch());
    assert!(before > 1.2 && after < 0.1, "from {before} to {after}");
}
