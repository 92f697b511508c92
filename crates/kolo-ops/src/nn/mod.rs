//! Placeholder.

use crate::Op;

/// The ops of this area.
pub static OPS: &[&Op] = &[];
