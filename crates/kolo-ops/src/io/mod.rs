//! Files: checkpoints, and what reads and writes files from inside a graph.
//!
//! Every file is reached through [`files`], which asks the device's [`FileAccess`] first. Ops that read or write do so on
//! threads of their own, so that a slow disk holds up no other node.

mod access;
mod arguments;
pub mod background;
pub mod bundle;
pub mod csv;
pub mod decode_raw;
pub mod example;
pub mod files;
pub mod merge_v2_checkpoints;
mod on_thread;
pub mod png_image;
pub mod reader;
pub mod restore_v2;
pub mod save_v2;
pub mod serialize_tensor;
pub mod sharded_filename;
pub(crate) mod threads;
pub mod whole_file;

pub use access::FileAccess;

use crate::Op;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &background::AWAIT_SAVE_V2,
    &background::BACKGROUND_SAVE_V2,
    &csv::DECODE_CSV,
    &decode_raw::DECODE_RAW,
    &example::PARSE_EXAMPLE,
    &example::PARSE_SINGLE_EXAMPLE,
    &merge_v2_checkpoints::MERGE_V2_CHECKPOINTS,
    &png_image::DECODE_PNG,
    &png_image::ENCODE_PNG,
    &reader::FIXED_LENGTH_RECORD_READER_V2,
    &reader::IDENTITY_READER_V2,
    &reader::READER_NUM_RECORDS_PRODUCED_V2,
    &reader::READER_READ_UP_TO_V2,
    &reader::READER_READ_V2,
    &reader::READER_RESET_V2,
    &reader::TEXT_LINE_READER_V2,
    &reader::TF_RECORD_READER_V2,
    &reader::WHOLE_FILE_READER_V2,
    &restore_v2::RESTORE_V2,
    &save_v2::SAVE_V2,
    &serialize_tensor::PARSE_TENSOR,
    &serialize_tensor::SERIALIZE_TENSOR,
    &sharded_filename::SHARDED_FILENAME,
    &sharded_filename::SHARDED_FILESPEC,
    &whole_file::MATCHING_FILES,
    &whole_file::READ_FILE,
    &whole_file::WRITE_FILE,
];
