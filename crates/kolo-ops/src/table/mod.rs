//! Tables from keys to values, as resources in containers: one that is filled once (`HashTableV2`), and one that changes
//! (`MutableHashTableV2`).

use crate::Op;

pub mod access;
mod core;
pub mod initialize;
pub mod make;

pub use core::{Table, TableSpec};

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &access::LOOKUP_TABLE_EXPORT_V2,
    &access::LOOKUP_TABLE_FIND_V2,
    &access::LOOKUP_TABLE_IMPORT_V2,
    &access::LOOKUP_TABLE_INSERT_V2,
    &access::LOOKUP_TABLE_SIZE_V2,
    &initialize::INITIALIZE_TABLE_FROM_TEXT_FILE_V2,
    &initialize::INITIALIZE_TABLE_V2,
    &make::HASH_TABLE_V2,
    &make::MUTABLE_HASH_TABLE_V2,
];
