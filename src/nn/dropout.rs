//! Dropout: during training, elements set to zero at random.

use kolo_graph::Output;

use super::layer::{Phase, refuse};
use crate::ops;

/// Sets elements to zero at random while training, each with probability `rate`, and scales the others up by
/// `1 / (1 − rate)`, so that nothing need change afterwards.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    rate: f64,
    seed: Option<i64>,
}

/// [`Dropout`] at this rate: the part that goes, not the part that stays.
#[track_caller]
pub fn dropout<'g>(x: Output<'g>, rate: f64, training: impl Into<Phase<'g>>) -> Output<'g> {
    Dropout::new(rate).apply(x, training)
}

impl Dropout {
    /// Drops this part of the elements.
    pub fn new(rate: f64) -> Dropout {
        Dropout { rate, seed: None }
    }

    /// Drops the same elements in every program with this seed.
    #[must_use]
    pub fn seed(mut self, seed: i64) -> Dropout {
        self.seed = Some(seed);
        self
    }

    /// Adds it to the graph of `x`.
    #[track_caller]
    pub fn apply<'g>(&self, x: Output<'g>, training: impl Into<Phase<'g>>) -> Output<'g> {
        let graph = x.graph();
        if !(0.0..1.0).contains(&self.rate) {
            return refuse(graph, "Dropout", "", format_args!("the rate {} is not in [0, 1)", self.rate));
        }
        match training.into() {
            Phase::Known(false) => x,
            Phase::Known(true) => ops::dropout(x, self.rate, self.seed),
            Phase::Fed(_) if self.rate == 0.0 => x,
            Phase::Fed(training) => graph.name_scope("dropout", || {
                let dropped = graph.cond(training, || vec![ops::dropout(x, self.rate, self.seed)], || vec![x]);
                dropped.map_or_else(
                    |error| {
                        graph.record_error(error);
                        Output::invalid(graph)
                    },
                    |branch| branch[0],
                )
            }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::{PartialShape, Tensor};

    use super::*;
    use crate::nn::testing::run;

    #[test]
    fn only_training_drops() {
        let g = kolo_ops::graph();
        let x = g.constant(Tensor::from_vec([1000usize], vec![3.0f32; 1000]).unwrap());
        let training = g.placeholder::<bool>("training", PartialShape::scalar());
        let y = Dropout::new(0.25).seed(7).apply(x, training);
        assert_eq!(dropout(x, 0.5, false), x);
        assert_eq!(y.shape().to_string(), "[1000]");
        let off = run(&g, &[y], &[(training, Tensor::scalar(false))]);
        assert!(off[0].data::<f32>().unwrap().iter().all(|&x| x == 3.0));
        let on = run(&g, &[y], &[(training, Tensor::scalar(true))]);
        let on = on[0].data::<f32>().unwrap();
        let kept = on.iter().filter(|&&x| x == 4.0).count();
        assert!(on.iter().all(|&x| x == 0.0 || x == 4.0) && (700..800).contains(&kept), "kept {kept} of 1000");
    }

    #[test]
    fn a_rate_of_one_is_refused() {
        let g = kolo_ops::graph();
        let x = g.constant([1.0f32]);
        dropout(x, 1.0, true);
        assert!(g.check().unwrap_err().to_string().contains("the rate 1 is not in [0, 1)"));
    }
}
