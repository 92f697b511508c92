//! Images in ten classes: MNIST and CIFAR-10.

use crate::data::{self, Dataset, mnist::Split};
use crate::recipes::{self, Parts, mnist::Network as Build};
use crate::{Error, Graph, Output, PartialShape, Result};

use crate::cli::train::options::Kind;
use crate::cli::train::recipe::{Defaults, Recipe, RecipeData};
use crate::cli::train::{Cifar, Mnist, Network};

/// `kolo train mnist` and `kolo train cifar`.
pub struct Pictures {
    train: Dataset,
    test: Dataset,
    /// The shape of an image.
    shape: &'static [usize],
    network: Build,
    defaults: Defaults,
}

impl Pictures {
    /// Handwritten digits.
    pub fn mnist(flags: &Mnist) -> Result<Pictures> {
        let mnist = match &flags.data {
            Some(dir) => data::mnist::from_dir(dir)?,
            None => data::mnist::embedded()?,
        };
        let side = |split: &Split| split.images.shape()[1..].to_vec();
        if side(&mnist.train) != [28, 28] || side(&mnist.test) != [28, 28] {
            return Err(Error::invalid_argument("--data: these networks take images of 28 by 28 pixels"));
        }
        let (network, rate, epochs): (Build, _, _) = match flags.model {
            Network::Mlp => (recipes::mnist::mlp, 2e-3, 10),
            Network::Lenet => (recipes::mnist::lenet, 1e-3, 3),
            Network::Lstm => (recipes::mnist::lstm, 4e-3, 3),
        };
        Ok(Pictures {
            train: mnist.train.dataset(),
            test: mnist.test.dataset(),
            shape: &[784],
            network,
            defaults: Defaults { optimizer: (Kind::Adam, rate), batch: 100, epochs, steps: None },
        })
    }

    /// Small colour images.
    pub fn cifar(flags: &Cifar) -> Result<Pictures> {
        let cifar = data::cifar::from_dir(&flags.data)?;
        Ok(Pictures {
            train: cifar.train.dataset(),
            test: cifar.test.dataset(),
            shape: &[32, 32, 3],
            network: recipes::cifar::cnn,
            defaults: Defaults { optimizer: (Kind::Adam, 1e-3), batch: 128, epochs: 10, steps: None },
        })
    }
}

impl Recipe for Pictures {
    fn defaults(&self) -> Defaults {
        self.defaults
    }

    fn unit(&self) -> (&'static str, usize) {
        ("samples", 1)
    }

    fn data(&self, _batch: usize, _seed: u64) -> Result<RecipeData> {
        Ok(RecipeData { train: self.train.clone(), test: Some(self.test.clone().batch(1000, false)) })
    }

    fn inputs<'g>(&self, graph: &'g Graph) -> Vec<Output<'g>> {
        let dims: Vec<Option<usize>> = std::iter::once(None).chain(self.shape.iter().map(|n| Some(*n))).collect();
        let images = graph.placeholder::<f32>("images", PartialShape::new(&dims));
        vec![images, graph.placeholder::<i32>("labels", [None])]
    }

    fn build<'g>(&self, inputs: &[Output<'g>]) -> Result<Parts<'g>> {
        Ok(recipes::mnist::parts((self.network)(inputs[0])?, inputs[1]))
    }
}
