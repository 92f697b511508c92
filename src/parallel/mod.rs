//! One model on many devices.

mod towers;

pub use towers::{Tower, Towers, average_gradients, towers};
