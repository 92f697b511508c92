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
pub use optimizer::{GradAndVar, MinimizeOptions, Optimizer};
pub use rate::LearningRate;
pub use rms_prop::RmsProp;
pub use schedule::Schedule;
pub use sgd::Sgd;
pub use slots::Core;
pub use update::{Update, deduplicate};
