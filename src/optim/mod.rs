//! Optimizers: what turns a loss into an update of the variables.
//!
//! ```
//! use kolo::optim::{Momentum, Optimizer, Schedule};
//! use kolo::{Session, ops, train};
//!
//! let g = kolo::graph();
//! let w = g.variable("w", [4.0f32, -2.0]);
//! let loss = ops::sum_all(ops::square(w.read()));
//! let step = train::global_step_or_create(&g)?;
//! let rate = Schedule::exponential(0.1, 100, 0.5);
//! let train = Momentum::new(rate, 0.9).minimize(loss, Some(step))?;
//! let init = g.global_variables_initializer();
//!
//! let session = Session::new(&g)?;
//! session.run_op(init)?;
//! for _ in 0..60 {
//!     session.run_op(train)?;
//! }
//! assert!(session.fetch(loss)?.scalar_value::<f32>()? < 1.0);
//! assert_eq!(session.fetch(step.read())?.scalar_value::<i64>()?, 60);
//! # Ok::<(), kolo::Error>(())
//! ```
//!
//! An optimizer keeps nothing of the graph but names, so it can be boxed, passed around and asked later for its slots. What
//! it remembers between steps lives in variables that are named as TensorFlow names them (`w/Momentum`, `w/Adam_1`,
//! `beta1_power`), so that checkpoints carry over. Slots are on the device of their variable, and so are the updates: the
//! same kernels run wherever a variable is, and give the same bits there.
//!
//! What an optimizer knows of a step stays with the graph as a [`Training`], for passes that rewrite it:
//!
//! ```
//! use kolo::ops;
//! use kolo::optim::{Momentum, Optimizer};
//!
//! let g = kolo::graph();
//! let [first, last] = ["first", "last"].map(|name| g.variable(name, [[0.5f32, 1.0], [0.0, 2.0]]));
//! let hidden = ops::tanh(ops::matmul(g.constant([[1.0f32, 2.0]]), first.read()));
//! let loss = ops::sum_all(ops::matmul(hidden, last.read()));
//! let train = Momentum::new(0.1, 0.9).minimize(loss, None)?;
//!
//! let training = g.training(train).ok_or_else(|| kolo::Error::not_found("no training"))?;
//! // The gradient of the last layer is ready first.
//! let names: Vec<&str> = training.variables.iter().map(|variable| &*variable.name).collect();
//! assert_eq!(names, ["last", "first"]);
//! let last = &training.variables[0];
//! assert_eq!((last.n_bytes, &*last.slots[0].variable), (Some(16), "last/Momentum"));
//! // It is computed by a node that belongs to the product in which the variable is used.
//! let (_, gradient) = &last.gradients[0];
//! assert_eq!(training.forward_of(&gradient.values().node).map(|node| &**node), Some("MatMul_1"));
//! # Ok::<(), kolo::Error>(())
//! ```

mod accumulate;
mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod adam_w;
mod clip;
mod ftrl;
mod lamb;
mod momentum;
mod moving_average;
mod optimizer;
mod rate;
mod rms_prop;
mod schedule;
mod sgd;
mod slots;
#[cfg(test)]
mod testing;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod training_tests;
mod update;

pub use accumulate::Accumulate;
pub use adadelta::Adadelta;
pub use adafactor::Adafactor;
pub use adagrad::Adagrad;
pub use adam::Adam;
pub use adam_w::AdamW;
pub use clip::{Clip, clip_by_global_norm, clip_by_norm, clip_by_value, global_norm};
pub use ftrl::Ftrl;
pub use lamb::Lamb;
pub use momentum::Momentum;
pub use moving_average::ExponentialMovingAverage;
pub(crate) use moving_average::assign_moving_average;
pub(crate) use optimizer::leave_updates_to;
pub use optimizer::{GradAndVar, MinimizeOptions, Optimizer, wrap_training};
pub use rate::LearningRate;
pub use rms_prop::RmsProp;
pub use schedule::Schedule;
pub use sgd::Sgd;
pub use slots::Core;
pub use update::{Update, deduplicate};

pub use kolo_graph::Training;
