//! How variables outlive their task: a journal on disk, or a replica in another task.

pub(crate) mod journal;
mod records;
pub(crate) mod replica;
pub(crate) mod variables;
