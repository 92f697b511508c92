//! Convolution and pooling over NHWC images, and flattening.

use kolo_core::DType;
use kolo_graph::{Initializer, Output};

use super::layer::{Activation, last_dim, read_as, refuse, weights};
use crate::ops;

/// What happens at the border of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Padding {
    /// Zeros around the image, so that with stride 1 the result is as large.
    Same,
    /// Windows stay within the image.
    #[default]
    Valid,
}

impl Padding {
    fn text(self) -> &'static str {
        match self {
            Padding::Same => "SAME",
            Padding::Valid => "VALID",
        }
    }
}

/// A convolution layer over `[batch, height, width, channels]`. Padding is [`Padding::Same`] unless told otherwise.
#[derive(Clone, Debug)]
pub struct Conv2d {
    filters: usize,
    size: [usize; 2],
    strides: [i64; 2],
    padding: Padding,
    name: String,
    activation: Option<Activation>,
    kernel: Initializer,
    bias: Option<Initializer>,
    around: Option<usize>,
    stored: Option<DType>,
}

/// A convolution with stride 1 and padding, called `name`.
#[track_caller]
pub fn conv2d<'g>(images: Output<'g>, filters: usize, size: [usize; 2], name: &str) -> Output<'g> {
    Conv2d::new(filters, size).name(name).apply(images)
}

impl Conv2d {
    /// So many filters of this height and width.
    pub fn new(filters: usize, size: [usize; 2]) -> Conv2d {
        Conv2d {
            filters,
            size,
            strides: [1, 1],
            padding: Padding::Same,
            name: "conv2d".to_owned(),
            activation: None,
            kernel: Initializer::GlorotUniform,
            bias: Some(Initializer::Zeros),
            around: None,
            stored: None,
        }
    }

    /// How far the window moves, down and across.
    #[must_use]
    pub fn strides(mut self, strides: [i64; 2]) -> Conv2d {
        self.strides = strides;
        self
    }

    /// What happens at the border.
    #[must_use]
    pub fn padding(mut self, padding: Padding) -> Conv2d {
        self.padding = padding;
        self
    }

    /// Its name: `conv2d` otherwise.
    #[must_use]
    pub fn name(mut self, name: &str) -> Conv2d {
        self.name = name.to_owned();
        self
    }

    /// What is applied to the result.
    #[must_use]
    pub fn activation(mut self, activation: Activation) -> Conv2d {
        self.activation = Some(activation);
        self
    }

    /// How the kernel begins.
    #[must_use]
    pub fn kernel(mut self, initial: impl Into<Initializer>) -> Conv2d {
        self.kernel = initial.into();
        self
    }

    /// How the bias begins.
    #[must_use]
    pub fn bias(mut self, initial: impl Into<Initializer>) -> Conv2d {
        self.bias = Some(initial.into());
        self
    }

    /// Adds nothing to the sums; for a layer that normalisation follows.
    #[must_use]
    pub fn no_bias(mut self) -> Conv2d {
        self.bias = None;
        self
    }

    /// So many zeros on each side of the image, instead of what the padding says: with strides above 1, [`Padding::Same`] adds
    /// more after than before, which other libraries do not.
    #[must_use]
    pub fn zeros_around(mut self, n: usize) -> Conv2d {
        self.around = Some(n);
        self
    }

    /// The dtype of the variables, if it is not that of the images; see [`super::Dense::stored_as`].
    #[must_use]
    pub fn stored_as(mut self, dtype: DType) -> Conv2d {
        self.stored = Some(dtype);
        self
    }

    /// Adds the layer to the graph of `images`.
    #[track_caller]
    pub fn apply<'g>(&self, images: Output<'g>) -> Output<'g> {
        let graph = images.graph();
        let Some(channels) = last_dim(images, "Conv2d", &self.name) else { return Output::invalid(graph) };
        graph.name_scope(&self.name, || {
            let dims = [self.size[0], self.size[1], channels, self.filters];
            let stored = self.stored.unwrap_or(images.dtype());
            let kernel = read_as(weights(graph, "kernel", &dims, stored, &self.kernel), images.dtype());
            let mut y = match self.around {
                None => ops::conv2d(images, kernel, self.strides, self.padding.text()),
                Some(n) => ops::conv2d_explicit(images, kernel, self.strides, [n as i64; 4]),
            };
            if let Some(initial) = &self.bias {
                let bias = weights(graph, "bias", &[self.filters], stored, initial);
                y = ops::bias_add(y, read_as(bias, images.dtype()));
            }
            self.activation.map_or(y, |activation| activation(y))
        })
    }
}

/// The largest values under windows of `size`.
#[track_caller]
pub fn max_pool(images: Output<'_>, size: [i64; 2], strides: [i64; 2], padding: Padding) -> Output<'_> {
    ops::max_pool(images, size, strides, padding.text())
}

/// The means under windows of `size`.
#[track_caller]
pub fn avg_pool(images: Output<'_>, size: [i64; 2], strides: [i64; 2], padding: Padding) -> Output<'_> {
    ops::avg_pool(images, size, strides, padding.text())
}

/// The mean of each channel over the whole image.
#[track_caller]
pub fn global_avg_pool(images: Output<'_>) -> Output<'_> {
    ops::mean(images, &[1, 2])
}

/// The largest value of each channel over the whole image.
#[track_caller]
pub fn global_max_pool(images: Output<'_>) -> Output<'_> {
    ops::max(images, &[1, 2])
}

/// All but the first dimension made one. Their sizes must be known.
#[track_caller]
pub fn flatten(x: Output<'_>) -> Output<'_> {
    if !x.is_valid() {
        return x;
    }
    let n = x.shape().dims().and_then(|dims| dims.get(1..)?.iter().try_fold(1usize, |n, dim| n.checked_mul((*dim)?)));
    match n {
        Some(n) if x.shape().rank() != Some(2) => ops::reshape(x, &[-1, n as i64]),
        Some(_) => x,
        None => refuse(
            x.graph(),
            "flatten",
            "",
            format_args!("all dimensions of {x:?} but the first must be known: give the placeholder its shape"),
        ),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Tensor;

    use super::*;
    use crate::nn::relu;
    use crate::nn::testing::{close, run};

    #[test]
    fn convolution_pooling_flattening() {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None, Some(3), Some(3), Some(1)]);
        let kernel = Tensor::from_vec([2usize, 2, 1, 1], vec![1.0f32, 0.0, 0.0, -1.0]).unwrap();
        let layer = Conv2d::new(1, [2, 2]).kernel(kernel).bias([0.5f32]).activation(relu);
        let same = layer.clone().apply(x);
        let valid = layer.padding(Padding::Valid).strides([1, 2]).name("down").apply(x);
        let pooled = [
            max_pool(x, [2, 2], [1, 1], Padding::Valid),
            avg_pool(x, [2, 2], [2, 2], Padding::Same),
            global_avg_pool(x),
            global_max_pool(x),
            flatten(x),
        ];
        assert_eq!(g.trainable_variables()[2].name(), "down/kernel");
        assert_eq!(pooled[4].shape().to_string(), "[?,9]");
        assert_eq!(flatten(pooled[4]), pooled[4]);
        let image = Tensor::from_vec([1usize, 3, 3, 1], vec![1.0f32, 2.0, 3.0, 4.0, 3.0, 1.0, 7.0, 8.0, 0.0]).unwrap();
        let found = run(&g, &[&[same, valid], pooled.as_slice()].concat(), &[(x, image)]);
        // Each is x[i, j] − x[i + 1, j + 1] + 0.5, not less than 0; beyond the border x is 0.
        close(&found[0], &[0.0, 1.5, 3.5, 0.0, 3.5, 1.5, 7.5, 8.5, 0.5]);
        close(&found[1], &[0.0, 0.0]);
        close(&found[2], &[4.0, 3.0, 8.0, 8.0]);
        close(&found[3], &[2.5, 2.0, 7.5, 0.0]);
        close(&found[4], &[29.0 / 9.0]);
        close(&found[5], &[8.0]);
        close(&found[6], &[1.0, 2.0, 3.0, 4.0, 3.0, 1.0, 7.0, 8.0, 0.0]);
    }

    #[test]
    fn unknown_sizes_are_refused() {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None, None, Some(3)]);
        assert!(!flatten(x).is_valid());
        assert!(g.take_error().unwrap().to_string().contains("all dimensions of x:0 float[?,?,3] but the first"));
        let x = g.placeholder::<f32>("y", [None, Some(2), Some(2), None]);
        conv2d(x, 2, [3, 3], "conv");
        assert!(g.check().unwrap_err().to_string().contains("Conv2d 'conv': the last dimension"));
    }
}
