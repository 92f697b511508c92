//! A network with one hidden layer learns which of three spirals a point belongs to: layers, a loss, a schedule, an optimizer,
//! and metrics that gather over batches.
//!
//! ```text
//! $ cargo run --example mlp
//! step   0: loss 1.0967, rate 0.0000
//! step 100: loss 0.0270, rate 0.0196
//! step 200: loss 0.0132, rate 0.0165
//! step 300: loss 0.0100, rate 0.0114
//! step 400: loss 0.0088, rate 0.0058
//! step 500: loss 0.0084, rate 0.0016
//! accuracy 1.00
//! hidden/kernel [2,32]
//! hidden/bias [32]
//! hidden_1/kernel [32,32]
//! hidden_1/bias [32]
//! logits/kernel [32,3]
//! logits/bias [3]
//! ```

use kolo::nn::{self, Reduction};
use kolo::optim::{Adam, Clip, MinimizeOptions, Optimizer, Schedule};
use kolo::{Result, Session, Tensor, train};

const POINTS: usize = 300;
const STEPS: u64 = 600;

fn main() -> Result<()> {
    let g = kolo::graph();
    g.set_seed(1);
    let x = g.placeholder::<f32>("x", [None, Some(2)]);
    let labels = g.placeholder::<i64>("labels", [None]);
    let hidden = nn::Dense::new(32).activation(nn::tanh).name("hidden").apply(x);
    let hidden = nn::Dense::new(32).activation(nn::relu).name("hidden").apply(hidden);
    let logits = nn::dense(hidden, 3, "logits");
    let loss = nn::sparse_softmax_cross_entropy(logits, labels, Reduction::Mean);
    let accuracy = nn::streaming_accuracy(logits, labels, "accuracy");

    let step = train::global_step_or_create(&g)?;
    let schedule = Schedule::cosine(0.02, STEPS - 50).warm_up(50);
    let options =
        MinimizeOptions { global_step: Some(step), clip: Some(Clip::GlobalNorm(1.0)), ..MinimizeOptions::default() };
    let train = Adam::new(schedule.clone()).minimize_with(loss, &options)?;
    let init = [g.global_variables_initializer(), g.local_variables_initializer()];

    let session = Session::new(&g)?;
    session.run(&[], &[], &init)?;
    let (points, classes) = spirals();
    let batch = [(x, Tensor::from_vec([POINTS, 2], points)?), (labels, Tensor::vector(classes))];
    for at in 0..STEPS {
        let found = session.run(&[loss], &batch, &[train])?;
        if at % 100 == 0 {
            println!("step {at:3}: loss {:.4}, rate {:.4}", found[0].scalar_value::<f32>()?, schedule.at(at));
        }
    }
    let found = session.run(&[accuracy.update], &batch, &[])?;
    println!("accuracy {:.2}", found[0].scalar_value::<f32>()?);
    for variable in g.trainable_variables() {
        println!("{} {}", variable.name(), variable.shape());
    }
    Ok(())
}

/// Points on three arms of a spiral, and the arm of each.
fn spirals() -> (Vec<f32>, Vec<i64>) {
    let point = |i: usize| {
        let (arm, along) = (i % 3, i as f32 / POINTS as f32);
        let angle = along * 4.0 + arm as f32 * std::f32::consts::TAU / 3.0;
        [along * angle.cos(), along * angle.sin()]
    };
    ((0..POINTS).flat_map(point).collect(), (0..POINTS).map(|i| (i % 3) as i64).collect())
}
