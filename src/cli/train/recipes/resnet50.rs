//! ResNet-50 in mixed precision, on synthetic images. Small ones run anywhere.

use crate::recipes::{Parts, resnet};
use crate::{Error, Graph, Output, Result};

use crate::cli::train::Resnet50;
use crate::cli::train::options::Kind;
use crate::cli::train::recipe::{Defaults, Recipe, RecipeData};

/// `kolo train resnet50`.
pub struct Resnet(resnet::Size);

impl Resnet {
    /// In the size of the flags.
    pub fn new(flags: &Resnet50) -> Result<Resnet> {
        let (side, classes, width) = (flags.side, flags.classes, flags.width);
        let size = resnet::Size { side, classes, width, compute: flags.precision.dtype(), ..resnet::Size::resnet50() };
        size.check()?;
        Ok(Resnet(size))
    }
}

impl Recipe for Resnet {
    fn defaults(&self) -> Defaults {
        Defaults { optimizer: (Kind::Momentum, 0.05), batch: 128, epochs: 25, steps: Some(100) }
    }

    fn unit(&self) -> (&'static str, usize) {
        ("images", 1)
    }

    fn data(&self, batch: usize, seed: u64) -> Result<RecipeData> {
        let side = self.0.side;
        let n_images = batch.checked_mul(4).filter(|n| n.saturating_mul(side.saturating_mul(side)) < 1 << 28);
        let n_images = n_images.ok_or_else(|| Error::invalid_argument("--batch-size and --side are too large"))?;
        Ok(RecipeData { train: resnet::synthetic(n_images, &self.0, seed)?, test: None })
    }

    fn inputs<'g>(&self, graph: &'g Graph) -> Vec<Output<'g>> {
        let side = Some(self.0.side);
        let images = graph.placeholder::<f32>("images", [None, side, side, Some(3)]);
        vec![images, graph.placeholder::<i32>("labels", [None])]
    }

    fn build<'g>(&self, inputs: &[Output<'g>]) -> Result<Parts<'g>> {
        Ok(resnet::parts(resnet::logits(inputs[0], &self.0), inputs[1]))
    }
}
