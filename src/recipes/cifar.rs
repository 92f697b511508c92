//! A small convolutional network for CIFAR-10: 32 by 32 pixels in colour, ten classes.

use kolo_core::Result;
use kolo_graph::Output;

use crate::nn::{self, Padding};

/// Three pairs of convolutions, each half as large and twice as deep as the one before, from `float[n,32,32,3]` to ten logits.
pub fn cnn(images: Output<'_>) -> Result<Output<'_>> {
    let mut x = images;
    for (block, filters) in [32, 64, 128].into_iter().enumerate() {
        for layer in 0..2 {
            let name = format!("conv{}_{}", block + 1, layer + 1);
            x = nn::Conv2d::new(filters, [3, 3])
                .activation(nn::relu)
                .kernel(nn::Initializer::HeNormal)
                .name(&name)
                .apply(x);
        }
        x = nn::max_pool(x, [2, 2], [2, 2], Padding::Same);
    }
    let hidden = nn::Dense::new(256).activation(nn::relu).name("hidden").apply(nn::flatten(x));
    Ok(nn::dense(hidden, 10, "logits"))
}
