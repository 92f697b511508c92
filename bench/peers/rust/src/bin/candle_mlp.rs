//! The small MLP in Candle: forward, backward and SGD, milliseconds per step.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss, ops};
use kolo_bench_peers::{BATCH, CLASSES, HIDDEN, PIXELS, RATE, data, measure};

fn main() -> Result<()> {
    let device = Device::Cpu;
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let hidden = linear(PIXELS, HIDDEN, builder.pp("hidden"))?;
    let output = linear(HIDDEN, CLASSES, builder.pp("output"))?;
    let mut sgd = SGD::new(variables.all_vars(), RATE)?;
    let data = data();
    let mut step = |i: usize| -> Result<()> {
        let (images, labels) = &data[i];
        let x = Tensor::from_slice(images, (BATCH, PIXELS), &device)?;
        let y = Tensor::from_slice(labels, BATCH, &device)?;
        let logits = output.forward(&ops::sigmoid(&hidden.forward(&x)?)?)?;
        sgd.backward_step(&loss::cross_entropy(&logits, &y)?)
    };
    step(0)?;
    measure("candle", "0.11.1", |i| step(i).expect("the step that worked once works again"));
    Ok(())
}
