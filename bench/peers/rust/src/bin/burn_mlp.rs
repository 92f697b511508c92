//! The small MLP in Burn on its flex backend: forward, backward and SGD, milliseconds per step.

use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::sigmoid;
use kolo_bench_peers::{BATCH, CLASSES, HIDDEN, PIXELS, RATE, data, measure};

#[derive(Module, Debug)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    fn loss(&self, loss: &CrossEntropyLoss, x: Tensor<2>, y: Tensor<1, Int>) -> Tensor<1> {
        let logits = self.output.forward(sigmoid(self.hidden.forward(x)));
        loss.forward(logits, y)
    }
}

fn main() {
    let device = Device::flex().autodiff();
    let mut model = Some(Mlp {
        hidden: LinearConfig::new(PIXELS, HIDDEN).init(&device),
        output: LinearConfig::new(HIDDEN, CLASSES).init(&device),
    });
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut sgd = SgdConfig::new().init();
    let data: Vec<(Vec<f32>, Vec<i32>)> = data()
        .into_iter()
        .map(|(images, labels)| (images, labels.into_iter().map(|l| l as i32).collect()))
        .collect();
    measure("burn", "0.22.1", |i| {
        let (images, labels) = &data[i];
        let x = Tensor::<2>::from_data(TensorData::new(images.clone(), [BATCH, PIXELS]), &device);
        let y = Tensor::<1, Int>::from_data(TensorData::new(labels.clone(), [BATCH]), &device);
        let old = model.take().expect("each step puts the model back");
        let gradients = GradientsParams::from_grads(old.loss(&loss, x, y).backward(), &old);
        model = Some(sgd.step(RATE, old, gradients));
    });
}
