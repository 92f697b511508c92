//! Summaries: values of a step, serialised for event files.

use crate::Op;

/// The ops of this area.
pub static OPS: &[&Op] = &[];
