//! Fully connected layers: `activation(x · kernel + bias)`.

use kolo_core::DType;
use kolo_graph::{Graph, Initializer, Output, Variable};

use super::layer::{Activation, as_matrix, last_dim, read_as, shaped_like, weights};
use crate::ops;

/// A fully connected layer over the last dimension, whatever is before it.
#[derive(Clone, Debug)]
pub struct Dense {
    units: usize,
    name: String,
    activation: Option<Activation>,
    kernel: Initializer,
    bias: Option<Initializer>,
    stored: Option<DType>,
}

/// The variables of a [`Dense`] layer, to be applied more than once.
#[derive(Clone, Debug)]
pub struct DenseLayer<'g> {
    /// `[inputs, units]`.
    pub kernel: Variable<'g>,
    /// `[units]`.
    pub bias: Option<Variable<'g>>,
    units: usize,
    activation: Option<Activation>,
    scope: String,
}

/// A fully connected layer without activation, called `name`.
#[track_caller]
pub fn dense<'g>(x: Output<'g>, units: usize, name: &str) -> Output<'g> {
    Dense::new(units).name(name).apply(x)
}

impl Dense {
    /// A layer with this number of units.
    pub fn new(units: usize) -> Dense {
        Dense {
            units,
            name: "dense".to_owned(),
            activation: None,
            kernel: Initializer::GlorotUniform,
            bias: Some(Initializer::Zeros),
            stored: None,
        }
    }

    /// Its name: `dense` otherwise.
    #[must_use]
    pub fn name(mut self, name: &str) -> Dense {
        self.name = name.to_owned();
        self
    }

    /// What is applied to the result: `.activation(nn::relu)`.
    #[must_use]
    pub fn activation(mut self, activation: Activation) -> Dense {
        self.activation = Some(activation);
        self
    }

    /// How the kernel begins.
    #[must_use]
    pub fn kernel(mut self, initial: impl Into<Initializer>) -> Dense {
        self.kernel = initial.into();
        self
    }

    /// How the bias begins.
    #[must_use]
    pub fn bias(mut self, initial: impl Into<Initializer>) -> Dense {
        self.bias = Some(initial.into());
        self
    }

    /// Adds nothing to the product.
    #[must_use]
    pub fn no_bias(mut self) -> Dense {
        self.bias = None;
        self
    }

    /// The dtype of the variables, if it is not that of the input: in mixed precision they are `float`, so that small updates
    /// are not lost, and are rounded each time they are used.
    #[must_use]
    pub fn stored_as(mut self, dtype: DType) -> Dense {
        self.stored = Some(dtype);
        self
    }

    /// Adds the layer to the graph of `x`.
    #[track_caller]
    pub fn apply<'g>(&self, x: Output<'g>) -> Output<'g> {
        match last_dim(x, "Dense", &self.name) {
            Some(inputs) => self.build(x.graph(), inputs, x.dtype()).apply(x),
            None => Output::invalid(x.graph()),
        }
    }

    /// Adds the layer's variables, for inputs of this size.
    #[track_caller]
    pub fn build<'g>(&self, graph: &'g Graph, inputs: usize, dtype: DType) -> DenseLayer<'g> {
        let dtype = self.stored.unwrap_or(dtype);
        graph.name_scope(&self.name, || DenseLayer {
            kernel: weights(graph, "kernel", &[inputs, self.units], dtype, &self.kernel),
            bias: self.bias.as_ref().map(|initial| weights(graph, "bias", &[self.units], dtype, initial)),
            units: self.units,
            activation: self.activation,
            scope: graph.scoped_name(""),
        })
    }
}

impl<'g> DenseLayer<'g> {
    /// Adds the layer's ops.
    #[track_caller]
    pub fn apply(&self, x: Output<'g>) -> Output<'g> {
        let graph = x.graph();
        let Some(inputs) = last_dim(x, "Dense", self.scope.trim_end_matches('/')) else {
            return Output::invalid(graph);
        };
        graph.absolute_scope(&self.scope, || {
            let mut y = ops::matmul(as_matrix(x, inputs), read_as(self.kernel, x.dtype()));
            if let Some(bias) = self.bias {
                y = ops::bias_add(y, read_as(bias, x.dtype()));
            }
            if let Some(activation) = self.activation {
                y = activation(y);
            }
            shaped_like(y, x, self.units)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Tensor;

    use super::*;
    use crate::nn::testing::{close, run};
    use crate::nn::{relu, tanh};

    #[test]
    fn values_and_names() {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None, Some(2)]);
        let first = Dense::new(3).kernel([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]).bias([0.5f32, 0.0, -20.0]);
        let y = first.activation(relu).apply(x);
        let z = dense(y, 2, "logits");
        let again = dense(y, 2, "logits");
        assert_eq!(z.shape().to_string(), "[?,2]");
        let names: Vec<String> = g.trainable_variables().iter().map(|v| v.name()).collect();
        let expected =
            ["dense/kernel", "dense/bias", "logits/kernel", "logits/bias", "logits_1/kernel", "logits_1/bias"];
        assert_eq!(names, expected);
        assert_eq!((z.name(), again.name()), ("logits/BiasAdd:0".to_owned(), "logits_1/BiasAdd:0".to_owned()));
        let found = run(&g, &[y], &[(x, Tensor::from([[1.0f32, 1.0]]))]);
        close(&found[0], &[5.5, 7.0, 0.0]);
    }

    #[test]
    fn more_dimensions_stay() {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None, Some(3), Some(2)]);
        let y = Dense::new(1).kernel([[1.0f32], [10.0]]).no_bias().activation(tanh).apply(x * 0.01);
        assert_eq!(y.shape().to_string(), "[?,3,1]");
        let unknown = g.placeholder::<f32>("unknown", [None, None, Some(2)]);
        let kernel = Dense::new(1).kernel([[1.0f32], [10.0]]).build(&g, 2, DType::F32);
        let (a, b) = (kernel.apply(unknown), kernel.apply(x));
        assert_eq!(a.shape().rank(), Some(3));
        let fed = Tensor::from_vec([1usize, 3, 2], vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        let found = run(&g, &[y, a, b], &[(x, fed.clone()), (unknown, fed)]);
        close(&found[0], &[0.21f32.tanh(), 0.43f32.tanh(), 0.65f32.tanh()]);
        close(&found[1], &[21.0, 43.0, 65.0]);
        assert_eq!(found[1], found[2]);
    }

    #[test]
    fn an_unknown_last_dimension_names_the_layer() {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [Some(2), None]);
        let y = g.name_scope("tower", || dense(x, 3, "fc1"));
        assert!(!dense(y, 3, "fc2").is_valid());
        let error = g.check().unwrap_err().to_string();
        assert!(
            error.contains("Dense 'tower/fc1': the last dimension of its input x:0 float[2,?] is not known"),
            "{error}"
        );
    }
}
