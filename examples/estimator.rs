//! `Estimator`: a model as a function, and one call that does this process's part of a training. Here it is the whole job; with `TF_CONFIG`
//! set, the same program is a chief, a worker, a parameter server or an evaluator.
//!
//! ```text
//! step 100: loss 0.0000
//! step 200: loss 0.0000
//! x = 10: y = 31.00
//! ```

use kolo::data::Dataset;
use kolo::optim::Momentum;
use kolo::strategy::Mirrored;
use kolo::train::{Estimator, EstimatorSpec, EvalSpec, Mode, RunConfig, TrainSpec, train_and_evaluate};
use kolo::{Output, Result, Tensor, nn, ops};

/// The model: what it predicts, how wrong it is, and how it learns.
fn model_fn<'g>(features: &[Output<'g>], labels: Option<Output<'g>>, mode: Mode) -> Result<EstimatorSpec<'g>> {
    let y = nn::dense(features[0], 1, "line");
    let spec = EstimatorSpec::new().prediction("y", y);
    let Some(labels) = labels else { return Ok(spec) };
    let spec = spec.loss(ops::mean_all(ops::square(y - labels)));
    Ok(if mode == Mode::Train { spec.minimize(Momentum::new(0.02, 0.9)) } else { spec })
}

/// Points of a line. The last column are the labels.
fn points() -> Dataset {
    let xs: Vec<f32> = (0..64).map(|i| i as f32 / 32.0 - 1.0).collect();
    let ys: Vec<f32> = xs.iter().map(|x| 3.0 * x + 1.0).collect();
    Dataset::new([Tensor::vector(xs), Tensor::vector(ys)]).reshape(0, &[1]).reshape(1, &[1])
}

fn main() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("kolo-estimator-{}", std::process::id()));
    let mut config = RunConfig::from_env(&dir)?;
    if std::env::var_os("TF_CONFIG").is_none() {
        // Alone, on two devices.
        config = config.train_distribute(&Mirrored::new(&["/cpu:0", "/cpu:1"]).build()?);
    }
    let estimator = Estimator::new(config, model_fn);
    let train = TrainSpec::new(|| Ok(points().shuffle(1).batch(32, true).repeat_forever()), 200);
    let eval = EvalSpec::new(|| Ok(points().batch(16, false))).every(100);
    for found in train_and_evaluate(&estimator, &train, &eval)? {
        println!("step {}: loss {:.4}", found.step, found.evaluation.loss);
    }
    let x = || Ok(Dataset::new([Tensor::from([[10.0f32]])]).batch(1, false));
    for (_, values) in estimator.predict(x)? {
        println!("x = 10: y = {:.2}", values.data::<f32>()?[0]);
    }
    std::fs::remove_dir_all(dir).ok();
    Ok(())
}
