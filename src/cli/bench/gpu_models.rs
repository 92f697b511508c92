//! `gpu`, the large models: whole training steps of ResNet-50 and GPT-2 whose data lies on the GPU.

use crate::optim::{AdamW, Momentum, Optimizer};
use crate::parallel::{Tower, towers};
use crate::recipes::{gpt2, resnet};
use crate::{Error, Graph, Initializer, Operation, Output, Result, Tensor, nn};

use super::gpu::{Target, sample};
use super::measure::{Better, Report};

/// Images in a step of ResNet-50, and texts in one of GPT-2.
const IMAGES: usize = 128;
const TEXTS: usize = 16;

/// Images a second.
pub fn resnet50(report: &Report, case: &str, target: &Target) -> Result<()> {
    let size = resnet::Size::resnet50();
    let g = crate::graph();
    g.set_seed(1);
    let data = resnet::synthetic(IMAGES, &size, 1)?.batch(IMAGES, true).all()?;
    let [images, labels] = &data[..] else { return Err(Error::internal("images have two columns")) };
    let labels: Vec<i64> = labels.integers()?;
    let loss = resnet::parts(
        resnet::logits(resident(&g, "images", images.clone()), &size),
        resident(&g, "labels", Tensor::from(labels)),
    )
    .loss;
    let updates = nn::update_ops(&g);
    let step = g.control_dependencies(&updates, || Momentum::new(0.01, 0.9).minimize(loss, None))?;
    measure(report, case, target, &g, (loss, step), ("img/s", IMAGES))
}

/// Tokens a second.
pub fn gpt2(report: &Report, case: &str, target: &Target) -> Result<()> {
    let size = gpt2::Size::gpt2_124m();
    let g = crate::graph();
    g.set_seed(1);
    let tokens = gpt2::synthetic_tokens(TEXTS * size.context + 1, size.vocabulary, 1);
    let window = |from: usize| -> Result<Tensor> {
        let part = &tokens[from..from + TEXTS * size.context];
        Tensor::from_vec([TEXTS, size.context], part.iter().map(|&token| i64::from(token)).collect::<Vec<_>>())
    };
    let (before, after) = (resident(&g, "before", window(0)?), resident(&g, "after", window(1)?));
    let optimizer = AdamW::new(6e-4, 0.1);
    let (loss, step) = match target.gpus() {
        [] | [_] => {
            let loss = gpt2::parts(gpt2::logits(before, &size), after).loss;
            (loss, optimizer.minimize(loss, None)?)
        }
        gpus => {
            let towers = towers(&g, gpus, gpus[0], &[before, after], |share| {
                let loss = gpt2::parts(gpt2::logits(share[0], &size), share[1]).loss;
                Ok(Tower { loss, metrics: Vec::new() })
            })?;
            (towers.loss, optimizer.apply_gradients(&towers.gradients, None)?)
        }
    };
    measure(report, case, target, &g, (loss, step), ("tok/s", TEXTS * size.context))
}

fn resident<'g>(g: &'g Graph, name: &str, value: Tensor) -> Output<'g> {
    g.new_variable(name, value).not_trainable().build().read()
}

/// How many units a second, and the most memory that tensors took.
fn measure<'g>(
    report: &Report,
    case: &str,
    target: &Target,
    g: &'g Graph,
    (loss, step): (Output<'g>, Operation<'g>),
    (unit, per_step): (&str, usize),
) -> Result<()> {
    // Something small to wait for, that needs nothing of the step.
    let probe = g.new_variable("probe", Initializer::Zeros).shape([1]).not_trainable().build().read() + 1.0;
    let init = g.global_variables_initializer();
    let session = target.session(g)?;
    session.run_op(init)?;
    let call = session.make_callable(&[], &[], &[step])?;
    let wait = session.make_callable(&[], &[probe], &[])?;
    let samples = sample(10, 4, || call.call(&[]).map(drop), || wait.call(&[]).map(drop))?;
    let rates: Vec<f64> = samples.iter().map(|seconds| per_step as f64 / seconds).collect();
    report.print("gpu", case, unit, Better::Higher, &rates)?;
    let devices = session.list_devices();
    let gpu = devices.iter().position(|device| &*device.name.kind == "GPU");
    // A server keeps its own account.
    let stats = session.local().ok().and_then(|local| local.memory_stats(gpu?));
    if let Some(stats) = stats {
        let gib = stats.peak as f64 / (1u64 << 30) as f64;
        report.print("gpu", &format!("{case}-memory"), "GiB", Better::Lower, &[gib])?;
    }
    let last = session.fetch(loss)?.scalar_value::<f32>()?;
    if !last.is_finite() {
        return Err(Error::internal(format!("the loss of {case} became {last}")));
    }
    report.print("gpu", &format!("{case}-loss"), "nats", Better::Lower, &[f64::from(last)])
}
