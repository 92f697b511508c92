//! The recipes of `kolo train`, from their flags.

mod linear;
mod pictures;
mod resnet50;
mod text;

pub use linear::Line;
pub use pictures::Pictures;
pub use resnet50::Resnet;
pub use text::{Characters, Gpt2};
