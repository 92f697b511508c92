//! What a recipe says about itself: its model, its data and its usual settings. How it is run (alone, on several devices,
//! in a cluster) is written once, for all recipes, in [`super::run`].

use crate::data::Dataset;
use crate::recipes::Parts;
use crate::{Graph, Output, Result, Session};

use super::options::Kind;

/// A model, what it learns from, and how it is judged.
pub trait Recipe {
    /// Its settings where no flag says otherwise.
    fn defaults(&self) -> Defaults;

    /// What a sample is called, and how many of them one row of a batch is.
    fn unit(&self) -> (&'static str, usize);

    /// What to train on and to test with, for batches of `batch` samples.
    fn data(&self, batch: usize, seed: u64) -> Result<RecipeData>;

    /// The placeholders for the columns of a batch.
    fn inputs<'g>(&self, graph: &'g Graph) -> Vec<Output<'g>>;

    /// The model: its loss and metrics. It is called once for each copy of the model.
    fn build<'g>(&self, inputs: &[Output<'g>]) -> Result<Parts<'g>>;

    /// What to say about the trained model, if anything. Called before the session is opened, so it may add nodes.
    fn closing<'g>(
        &'g self,
        _graph: &'g Graph,
        _inputs: &[Output<'g>],
        _seed: u64,
    ) -> Result<Option<Box<dyn Closing + 'g>>> {
        Ok(None)
    }
}

/// Says something about a trained model.
pub trait Closing {
    /// The text.
    fn text(&self, session: &Session) -> Result<String>;
}

impl<F: Fn(&Session) -> Result<String>> Closing for F {
    fn text(&self, session: &Session) -> Result<String> {
        self(session)
    }
}

/// The settings of a recipe where no flag says otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    /// The optimizer and its learning rate.
    pub optimizer: (Kind, f64),
    /// Samples of a batch.
    pub batch: usize,
    /// How often to go through the data.
    pub epochs: u64,
    /// Stops after so many steps of one process; the rate warms up over a tenth of them. If absent, the epochs decide,
    /// and the rate does not warm up.
    pub steps: Option<u64>,
}

/// Samples to train on, and batches to test with.
pub struct RecipeData {
    /// Single samples, in their own order.
    pub train: Dataset,
    /// Batches of which every sample counts.
    pub test: Option<Dataset>,
}
