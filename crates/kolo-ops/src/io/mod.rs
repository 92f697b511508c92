//! Files: checkpoints, and what reads and writes files from inside a graph.

use crate::Op;

/// The ops of this area.
pub static OPS: &[&Op] = &[];
