//! Layers, losses and metrics: functions that add parts of a model to a graph.
//!
//! ```
//! use kolo::nn::{self, Reduction};
//! use kolo::optim::{Adam, Optimizer};
//!
//! let g = kolo::graph();
//! let images = g.placeholder::<f32>("images", [None, Some(28), Some(28), Some(1)]);
//! let labels = g.placeholder::<i64>("labels", [None]);
//! let training = g.placeholder::<bool>("training", kolo::PartialShape::scalar());
//!
//! let x = nn::Conv2d::new(32, [5, 5]).activation(nn::relu).apply(images);
//! let x = nn::max_pool(x, [2, 2], [2, 2], nn::Padding::Same);
//! let x = nn::Dense::new(128).activation(nn::relu).name("hidden").apply(nn::flatten(x));
//! let x = nn::dropout(x, 0.4, training);
//! let logits = nn::dense(x, 10, "logits");
//!
//! let loss = nn::sparse_softmax_cross_entropy(logits, labels, Reduction::Mean);
//! let accuracy = nn::accuracy(logits, labels);
//! let train = Adam::new(0.001).minimize(loss, None)?;
//! # Ok::<(), kolo::Error>(())
//! ```
//!
//! A layer is a small struct that says what it is like, and `apply` adds it: its variables, named as `tf.layers` names them
//! (`hidden/kernel`, `hidden/bias`), and its ops. A second layer of the same name gets a suffix. A layer that is used more
//! than once is built first (`Dense::build`, `Embedding::build`) and then applied as often as one likes. Sizes that variables
//! depend on must be known; if one is not, the error names the layer.

mod activation;
mod attention;
mod conv;
mod dense;
mod dropout;
mod embedding;
mod layer;
mod loss;
mod metric;
mod norm;
mod rnn;
#[cfg(test)]
mod testing;

pub use activation::{
    elu, gelu, gelu_exact, identity, leaky_relu, relu, relu6, selu, sigmoid, silu, softmax, softplus, softsign, tanh,
};
pub use attention::{AttentionMask, MultiHeadAttention};
pub use conv::{Conv2d, Padding, avg_pool, conv2d, flatten, global_avg_pool, global_max_pool, max_pool};
pub use dense::{Dense, DenseLayer, dense};
pub use dropout::{Dropout, dropout};
pub use embedding::{Embedding, EmbeddingTable, embedding};
pub use kolo_graph::Initializer;
pub use layer::{Activation, Phase, update_ops};
pub use loss::{
    Reduction, absolute_error, class_loss, hinge, huber, l1_penalty, l2_penalty, mean_squared_error,
    sigmoid_cross_entropy, smoothed_labels, softmax_cross_entropy, sparse_softmax_cross_entropy, weighted_mean,
};
pub use metric::{Metric, accuracy, mean_metric, streaming_accuracy, streaming_top_k_accuracy, top_k_accuracy};
pub use norm::{BatchNorm, LayerNorm, batch_norm, layer_norm};
pub use rnn::{Gru, GruCell, Lstm, LstmCell, Rnn, RnnCell, RnnOptions, StackedCells, dynamic_rnn, static_rnn};
