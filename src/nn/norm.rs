//! Normalisation: by the statistics of a batch, or of each example by itself.

use kolo_core::DType;
use kolo_graph::{Initializer, Output};

use super::layer::{Phase, UPDATE_OPS, last_dim, read_as, weights};
use crate::ops;
use crate::optim::assign_moving_average;

/// Batch normalisation (Ioffe and Szegedy, 2015) of each channel, the last dimension, over all others. While it trains, it uses
/// the batch's mean and variance and adds updates of their moving averages to the collection `update_ops` (see
/// [`super::update_ops`]); otherwise it uses the averages.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    momentum: f64,
    epsilon: f32,
    name: String,
    scale: bool,
    center: bool,
}

/// [`BatchNorm`] as `tf.layers` has it, called `name`.
#[track_caller]
pub fn batch_norm<'g>(x: Output<'g>, training: impl Into<Phase<'g>>, name: &str) -> Output<'g> {
    BatchNorm::new().name(name).apply(x, training)
}

impl Default for BatchNorm {
    fn default() -> BatchNorm {
        BatchNorm::new()
    }
}

impl BatchNorm {
    /// Momentum 0.99 and ε = 1e-3.
    pub fn new() -> BatchNorm {
        let name = "batch_normalization".to_owned();
        BatchNorm { momentum: 0.99, epsilon: 1e-3, name, scale: true, center: true }
    }

    /// The part of the moving averages that stays at each update.
    #[must_use]
    pub fn momentum(mut self, momentum: f64) -> BatchNorm {
        self.momentum = momentum;
        self
    }

    /// What is added to the variance.
    #[must_use]
    pub fn epsilon(mut self, epsilon: f32) -> BatchNorm {
        self.epsilon = epsilon;
        self
    }

    /// Its name: `batch_normalization` otherwise.
    #[must_use]
    pub fn name(mut self, name: &str) -> BatchNorm {
        self.name = name.to_owned();
        self
    }

    /// Does not scale by a trained `gamma`.
    #[must_use]
    pub fn no_scale(mut self) -> BatchNorm {
        self.scale = false;
        self
    }

    /// Does not shift by a trained `beta`.
    #[must_use]
    pub fn no_center(mut self) -> BatchNorm {
        self.center = false;
        self
    }

    /// Adds the layer to the graph of `x`.
    #[track_caller]
    pub fn apply<'g>(&self, x: Output<'g>, training: impl Into<Phase<'g>>) -> Output<'g> {
        let graph = x.graph();
        let Some(channels) = last_dim(x, "BatchNorm", &self.name) else { return Output::invalid(graph) };
        graph.name_scope(&self.name, || {
            // Statistics are kept in float even where values are halves.
            let trained = |name: &str, initial: Initializer| weights(graph, name, &[channels], DType::F32, &initial);
            let fixed = |value: f32| graph.constant(vec![value; channels]);
            let averaged = |name: &str, initial: Initializer| {
                graph.new_variable(name, initial).shape([channels]).not_trainable().build()
            };
            let gamma = if self.scale { trained("gamma", Initializer::Ones).read() } else { fixed(1.0) };
            let beta = if self.center { trained("beta", Initializer::Zeros).read() } else { fixed(0.0) };
            let averages =
                [averaged("moving_mean", Initializer::Zeros), averaged("moving_variance", Initializer::Ones)];
            let images = match x.shape().rank() {
                Some(4) => x,
                _ => ops::reshape(x, &[-1, 1, 1, channels as i64]),
            };
            let now = || averages.map(|average| average.read());
            let train = || {
                let done = ops::batch_norm_training(images, gamma, beta, self.epsilon);
                vec![done.y, done.mean, done.variance]
            };
            let infer = || {
                let [mean, variance] = now();
                let y = ops::batch_norm_inference(images, [gamma, beta], [mean, variance], self.epsilon);
                vec![y, mean, variance]
            };
            let outputs = match training.into() {
                Phase::Known(true) => Ok(train()),
                Phase::Known(false) => Ok(vec![infer()[0]]),
                // Without training the averages are updated with themselves, which changes nothing.
                Phase::Fed(training) => graph.cond(training, train, infer),
            };
            let outputs = outputs.unwrap_or_else(|error| {
                graph.record_error(error);
                vec![Output::invalid(graph)]
            });
            if let [_, mean, variance] = outputs[..] {
                for (average, value) in averages.into_iter().zip([mean, variance]) {
                    let update = graph.name_scope("AssignMovingAvg", || {
                        graph.colocate_with(average.handle().operation(), || {
                            assign_moving_average(average, value, 1.0 - self.momentum)
                        })
                    });
                    if update.is_valid() {
                        graph.add_to_collection(UPDATE_OPS, &update.name());
                    }
                }
            }
            match x.shape().rank() {
                Some(4) => outputs[0],
                Some(2) => ops::reshape(outputs[0], &[-1, channels as i64]),
                _ => ops::reshape(outputs[0], ops::shape(x)),
            }
        })
    }
}

/// Layer normalisation (Ba et al., 2016) of each example over its last dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    epsilon: f64,
    name: String,
    composed: bool,
    stored: Option<DType>,
}

/// [`LayerNorm`], called `name`.
#[track_caller]
pub fn layer_norm<'g>(x: Output<'g>, name: &str) -> Output<'g> {
    LayerNorm::new().name(name).apply(x)
}

impl Default for LayerNorm {
    fn default() -> LayerNorm {
        LayerNorm::new()
    }
}

impl LayerNorm {
    /// ε = 1e-5.
    pub fn new() -> LayerNorm {
        LayerNorm { epsilon: 1e-5, name: "layer_normalization".to_owned(), composed: false, stored: None }
    }

    /// What is added to the variance.
    #[must_use]
    pub fn epsilon(mut self, epsilon: f64) -> LayerNorm {
        self.epsilon = epsilon;
        self
    }

    /// Its name: `layer_normalization` otherwise.
    #[must_use]
    pub fn name(mut self, name: &str) -> LayerNorm {
        self.name = name.to_owned();
        self
    }

    /// Composes it of TensorFlow's ops, slower: for graphs that a TensorFlow server runs, and for second derivatives.
    #[must_use]
    pub fn composed(mut self) -> LayerNorm {
        self.composed = true;
        self
    }

    /// The dtype of the variables, if it is not that of the input; see [`super::Dense::stored_as`].
    #[must_use]
    pub fn stored_as(mut self, dtype: DType) -> LayerNorm {
        self.stored = Some(dtype);
        self
    }

    /// Adds the layer to the graph of `x`.
    #[track_caller]
    pub fn apply<'g>(&self, x: Output<'g>) -> Output<'g> {
        let graph = x.graph();
        let Some(size) = last_dim(x, "LayerNorm", &self.name) else { return Output::invalid(graph) };
        graph.name_scope(&self.name, || {
            let stored = self.stored.unwrap_or(x.dtype());
            let gamma = read_as(weights(graph, "gamma", &[size], stored, &Initializer::Ones), x.dtype());
            let beta = read_as(weights(graph, "beta", &[size], stored, &Initializer::Zeros), x.dtype());
            match self.composed {
                true => ops::composed_layer_norm(x, gamma, beta, self.epsilon),
                false => ops::layer_norm(x, gamma, beta, self.epsilon),
            }
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::{PartialShape, Tensor};
    use kolo_runtime::Session;

    use super::*;
    use crate::nn::testing::{check_gradients, close, run};
    use crate::nn::update_ops;

    #[test]
    fn batch_norm_trains_and_then_uses_what_it_saw() {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None, Some(2)]);
        let training = g.placeholder::<bool>("training", PartialShape::scalar());
        let y = BatchNorm::new().momentum(0.5).epsilon(0.0).apply(x, training);
        assert_eq!(y.shape().to_string(), "[?,2]");
        let names: Vec<String> = g.global_variables().iter().map(|v| v.name()).collect();
        let expected = ["gamma", "beta", "moving_mean", "moving_variance"];
        assert_eq!(names, expected.map(|name| format!("batch_normalization/{name}")));
        assert_eq!(g.trainable_variables().len(), 2);
        let updates = update_ops(&g);
        assert_eq!(updates.len(), 2);
        let init = g.global_variables_initializer();
        let session = Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        // Means 3 and 10, variances 4 and 1, without bias 8 and 2.
        let batch = Tensor::from([[1.0f32, 9.0], [5.0, 11.0]]);
        let feeds = |on: bool| [(x, batch.clone()), (training, Tensor::scalar(on))];
        let found = session.run(&[y], &feeds(true), &updates).unwrap();
        close(&found[0], &[-1.0, -1.0, 1.0, 1.0]);
        // The averages are now (0 + 3)/2, (0 + 10)/2 and (1 + 8)/2, (1 + 2)/2; running without training leaves them so.
        for _ in 0..2 {
            let found = session.run(&[y], &feeds(false), &updates).unwrap();
            let at = |x: f32, mean: f32, variance: f32| (x - mean) / variance.sqrt();
            close(&found[0], &[at(1.0, 1.5, 4.5), at(9.0, 5.0, 1.5), at(5.0, 1.5, 4.5), at(11.0, 5.0, 1.5)]);
        }
    }

    #[test]
    fn layer_norm_values_and_gradients() {
        let g = kolo_ops::graph();
        let x = g.variable("x", [[1.0f64, 2.0, 4.0], [-3.0, 0.5, 7.0]]);
        let y = LayerNorm::new().epsilon(0.0).apply(x.read());
        let composed = LayerNorm::new().epsilon(0.0).composed().apply(x.read());
        // (x − 7/3) / √(14/9)
        let found = run(&g, &[y, composed], &[]);
        let root = (14.0f64 / 9.0).sqrt();
        let row: Vec<f64> = [1.0, 2.0, 4.0].iter().map(|x| (x - 7.0 / 3.0) / root).collect();
        for found in found {
            for (found, expected) in found.data::<f64>().unwrap().iter().zip(&row) {
                assert!((found - expected).abs() < 1e-12);
            }
        }
        let weights = g.constant([[0.3f64, -0.2, 0.7], [1.0, 0.1, -0.4]]);
        check_gradients(&g, ops::sum_all(ops::tanh(y) * weights) + ops::sum_all(ops::square(composed) * weights));
    }
}
