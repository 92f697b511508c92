//! Models that `kolo train` trains, and how to put one on several devices. Each is also an example of the library.

pub mod cifar;
pub mod gpt2;
pub mod linear;
pub mod lm;
pub mod mnist;
pub mod resnet;
mod trained;

pub use trained::{Parts, Placement, train_model};
