//! What a queue is, and what fits into it.

use kolo_core::{DType, Error, PartialShape, Result, Tensor};

use super::elements::Order;

/// What a queue is: all who name it must agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueSpec {
    /// In which order elements come out.
    pub order: Order,
    /// At most so many elements; `None` for any number.
    pub capacity: Option<usize>,
    /// The dtypes of an element's components.
    pub dtypes: Vec<DType>,
    /// Their shapes; empty if none were declared.
    pub shapes: Vec<PartialShape>,
}

/// How much a dequeue asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// One element, not batched.
    One,
    /// Exactly so many, batched.
    Many(usize),
    /// So many, batched; or what is left, once the queue is closed.
    UpTo(usize),
}

impl QueueSpec {
    /// Batches need shapes: full ones, or at least ranks if it pads.
    pub(super) fn can_batch(&self) -> bool {
        let is_enough = |shape: &PartialShape| match self.order {
            Order::PaddingFifo => shape.rank().is_some(),
            Order::Fifo | Order::Shuffle { .. } | Order::Priority => shape.known().is_some(),
        };
        self.shapes.len() == self.dtypes.len() && self.shapes.iter().all(is_enough)
    }

    /// Whether components fit; with `n_rows`, each is a batch of so many.
    pub(super) fn check(&self, components: &[Tensor], n_rows: Option<usize>) -> Result<()> {
        if components.len() != self.dtypes.len() {
            return Err(self.wrong_number(components.len()));
        }
        for (i, (tensor, &dtype)) in components.iter().zip(&self.dtypes).enumerate() {
            if tensor.dtype() != dtype {
                return Err(Error::invalid_argument(format!(
                    "Type mismatch in tuple component {i}. Expected {dtype}, got {}",
                    tensor.dtype()
                )));
            }
            if let Some(n) = n_rows
                && tensor.shape().first() != Some(&n)
            {
                return Err(Error::invalid_argument(format!(
                    "All input tensors must have the same size in the 0th dimension. Component {i} has {}, and should \
                     have {n}",
                    tensor.shape().first().copied().unwrap_or(0)
                )));
            }
            if let Some(declared) = self.shapes.get(i) {
                let expected = match n_rows {
                    Some(n) => PartialShape::from([n]).concat(declared),
                    None => declared.clone(),
                };
                if !expected.admits(tensor.shape()) {
                    return Err(Error::invalid_argument(format!(
                        "Shape mismatch in tuple component {i}. Expected {expected}, got {}",
                        tensor.shape()
                    )));
                }
            }
        }
        Ok(())
    }

    pub(super) fn wrong_number(&self, found: usize) -> Error {
        Error::invalid_argument(format!(
            "Wrong number of components in tuple. Expected {}, got {found}",
            self.dtypes.len()
        ))
    }
}
