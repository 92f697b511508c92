//! A line through points.

use crate::data::Dataset;
use crate::recipes::{Parts, linear};
use crate::{Graph, Output, Result, Session};

use crate::cli::train::options::Kind;
use crate::cli::train::recipe::{Closing, Defaults, Recipe, RecipeData};

/// `kolo train linear`.
pub struct Line;

impl Recipe for Line {
    fn defaults(&self) -> Defaults {
        Defaults { optimizer: (Kind::Sgd, 0.2), batch: 20, epochs: 20, steps: None }
    }

    fn unit(&self) -> (&'static str, usize) {
        ("samples", 1)
    }

    fn data(&self, _batch: usize, seed: u64) -> Result<RecipeData> {
        let test = Dataset::new(linear::points(100, seed.wrapping_add(1))?).batch(100, false);
        Ok(RecipeData { train: Dataset::new(linear::points(1000, seed)?), test: Some(test) })
    }

    fn inputs<'g>(&self, graph: &'g Graph) -> Vec<Output<'g>> {
        ["x", "y"].map(|name| graph.placeholder::<f32>(name, [None, Some(1)])).to_vec()
    }

    fn build<'g>(&self, inputs: &[Output<'g>]) -> Result<Parts<'g>> {
        Ok(linear::model(inputs[0], inputs[1]))
    }

    fn closing<'g>(
        &'g self,
        graph: &'g Graph,
        _inputs: &[Output<'g>],
        _seed: u64,
    ) -> Result<Option<Box<dyn Closing + 'g>>> {
        let values = [graph.find_variable("line/kernel")?.read(), graph.find_variable("line/bias")?.read()];
        Ok(Some(Box::new(move |session: &Session| {
            let value = |of: Output<'g>| session.fetch(of)?.data::<f32>().map(|v| v[0]);
            Ok(format!("y = {:.3} x + {:.3}", value(values[0])?, value(values[1])?))
        })))
    }
}
