//! Files: checkpoints, and what reads and writes files from inside a graph.
//!
//! Every file is reached through [`files`], which asks the device's [`FileAccess`] first. Ops that read or write do so on
//! threads of their own, so that a slow disk holds up no other node.

mod arguments;
pub mod background;
pub mod bundle;
pub mod files;
pub mod merge_v2_checkpoints;
pub mod restore_v2;
pub mod save_v2;
pub mod sharded_filename;
pub(crate) mod threads;

pub use files::FileAccess;

use crate::Op;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &background::AWAIT_SAVE_V2,
    &background::BACKGROUND_SAVE_V2,
    &merge_v2_checkpoints::MERGE_V2_CHECKPOINTS,
    &restore_v2::RESTORE_V2,
    &save_v2::SAVE_V2,
    &sharded_filename::SHARDED_FILENAME,
    &sharded_filename::SHARDED_FILESPEC,
];
