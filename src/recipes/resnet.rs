//! ResNet-50 (He et al., 2015) in the usual later form, where the middle convolution of a block has the stride. Weights are kept in
//! `float` and used in a lower precision; statistics of batch normalisation are `float` too.

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Initializer, Output};

use super::Parts;
use crate::data::{Dataset, Random};
use crate::nn::{self, BatchNorm, Conv2d, Padding, Reduction};
use crate::ops;

/// The size of a network, and what it computes in.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Height and width of the images.
    pub side: usize,
    /// How many classes there are.
    pub classes: usize,
    /// Channels of the first stage; each stage has twice as many as the one before.
    pub width: usize,
    /// Blocks of each stage.
    pub blocks: [usize; 4],
    /// The dtype of activations and products.
    pub compute: DType,
}

impl Size {
    /// 25.6 million weights, a thousand classes, images of 224 by 224.
    pub fn resnet50() -> Size {
        Size { side: 224, classes: 1000, width: 64, blocks: [3, 4, 6, 3], compute: DType::BF16 }
    }

    /// An error unless the sizes make sense.
    pub fn check(&self) -> Result<()> {
        match self.side >= 32 && self.classes > 0 && self.width > 0 {
            true => Ok(()),
            false => Err(Error::invalid_argument(format!(
                "images of {0} by {0} into {1} classes, {2} wide: images must be at least 32 by 32, the others at least 1",
                self.side, self.classes, self.width
            ))),
        }
    }
}

fn convolution<'g>(x: Output<'g>, filters: usize, side: usize, stride: i64, name: &str) -> Output<'g> {
    let layer = Conv2d::new(filters, [side, side]).strides([stride, stride]).zeros_around(side / 2).no_bias();
    layer.kernel(Initializer::HeNormal).stored_as(DType::F32).name(name).apply(x)
}

fn normalised<'g>(x: Output<'g>, name: &str) -> Output<'g> {
    BatchNorm::new().momentum(0.9).epsilon(1e-5).name(name).apply(x, true)
}

/// Three convolutions, and around them what came in.
fn block<'g>(x: Output<'g>, width: usize, stride: i64) -> Output<'g> {
    let y = ops::relu(normalised(convolution(x, width, 1, 1, "conv1"), "norm1"));
    let y = ops::relu(normalised(convolution(y, width, 3, stride, "conv2"), "norm2"));
    let y = normalised(convolution(y, 4 * width, 1, 1, "conv3"), "norm3");
    let around = match x.shape().dim(-1) == Some(4 * width) && stride == 1 {
        true => x,
        false => normalised(convolution(x, 4 * width, 1, stride, "shortcut"), "shortcut_norm"),
    };
    ops::relu(y + around)
}

/// Logits of images `float[n, side, side, 3]`: `[n, classes]` of the dtype that is computed in. For training: batch normalisation
/// uses the batch's statistics.
pub fn logits<'g>(images: Output<'g>, size: &Size) -> Output<'g> {
    let graph = images.graph();
    let x = ops::cast(images, size.compute);
    let x = ops::relu(normalised(convolution(x, size.width, 7, 2, "stem"), "stem_norm"));
    let mut x = nn::max_pool(x, [3, 3], [2, 2], Padding::Same);
    for (stage, &n_blocks) in size.blocks.iter().enumerate() {
        for i in 0..n_blocks {
            let stride = if i == 0 && stage > 0 { 2 } else { 1 };
            x = graph.name_scope(&format!("stage{}/block{i}", stage + 1), || block(x, size.width << stage, stride));
        }
    }
    let pooled = nn::global_avg_pool(x);
    nn::Dense::new(size.classes).stored_as(DType::F32).name("logits").apply(pooled)
}

/// The loss of `logits`, and the share of images that are told right.
pub fn parts<'g>(logits: Output<'g>, labels: Output<'g>) -> Parts<'g> {
    Parts {
        loss: nn::class_loss(logits, labels, Reduction::Mean),
        metrics: vec![("accuracy", nn::accuracy(logits, labels))],
    }
}

/// Images of noise around a shade for each class, so that there is something to learn.
pub fn synthetic(n: usize, size: &Size, seed: u64) -> Result<Dataset> {
    let mut random = Random::new(seed, 0);
    let labels: Vec<i32> =
        (0..n).map(|_| ((random.unit() * size.classes as f32) as i32).min(size.classes as i32 - 1)).collect();
    let per_image = size.side * size.side * 3;
    let mut pixels = Vec::with_capacity(n * per_image);
    for &label in &labels {
        let shade = label as f32 / size.classes as f32 - 0.5;
        pixels.extend((0..per_image).map(|_| shade + random.unit() - 0.5));
    }
    Ok(Dataset::new([Tensor::from_vec([n, size.side, size.side, 3], pixels)?, Tensor::from(labels)]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_runtime::Session;

    use super::*;
    use crate::optim::{Momentum, Optimizer};

    #[test]
    fn it_has_as_many_weights_as_published() {
        let g = kolo_ops::graph();
        let size = Size::resnet50();
        let images = g.placeholder::<f32>("images", [None, Some(size.side), Some(size.side), Some(3)]);
        let logits = logits(images, &size);
        g.check().unwrap();
        assert_eq!(logits.shape().to_string(), "[?,1000]");
        let n: usize = g.trainable_variables().iter().map(|v| v.shape().known().unwrap().n_elements()).sum();
        assert_eq!(n, 25_557_032);
    }

    #[test]
    fn a_tiny_one_learns() {
        for compute in [DType::F32, DType::BF16] {
            let size = Size { side: 32, classes: 4, width: 4, blocks: [1, 1, 1, 1], compute };
            size.check().unwrap();
            let g = kolo_ops::graph();
            g.set_seed(1);
            let images = g.placeholder::<f32>("images", [None, Some(32), Some(32), Some(3)]);
            let labels = g.placeholder::<i32>("labels", [None]);
            let loss = parts(logits(images, &size), labels).loss;
            let updates = nn::update_ops(&g);
            assert_eq!(updates.len(), 2 * (1 + 4 * 3 + 4));
            let train = g.control_dependencies(&updates, || Momentum::new(0.02, 0.9).minimize(loss, None)).unwrap();
            let init = g.global_variables_initializer();
            let session = Session::new(&g).unwrap();
            session.run_op(init).unwrap();
            let batch = synthetic(16, &size, 1).unwrap().batch(16, true).batches().unwrap().next().unwrap().unwrap();
            let feeds = [(images, batch.tensors[0].clone()), (labels, batch.tensors[1].clone())];
            let step = || session.run(&[loss], &feeds, &[train]).unwrap()[0].scalar_value::<f32>().unwrap();
            let first = step();
            let last = (0..12).fold(first, |_, _| step());
            assert!(last.is_finite() && last < first * 0.8, "{compute}: {first} became {last}");
        }
    }
}
