//! Kolo's five nouns, on which every other crate agrees: [`Error`], [`DType`], [`Shape`], [`Tensor`] and
//! [`DeviceName`]. The list is closed: a sixth noun belongs to the crate that first needs it.

mod device_name;
mod dtype;
mod error;
mod shape;
mod tensor;

pub use device_name::{DeviceName, DeviceSpec, MergeConflict};
pub use dtype::{DType, Element, ElementVisitor};
pub use error::{Code, Error, NodeContext, Result};
pub use shape::{Dim, PartialShape, Shape};
pub use tensor::{Buffer, Memory, ResourceHandle, Strings, Tensor, TensorData};
