//! Graphs to and from `GraphDef`s, and `GraphDef`s from and to files' bytes.
//!
//! ```text
//!   bytes ──read_graph──> GraphDef ──import──> Graph
//!   bytes <─write_graph── GraphDef <──export── Nodes
//! ```
//!
//! [`import`] takes what TensorFlow programs, files and masters send: nodes in any order, attributes left out that equal
//! their defaults, annotations nobody has heard of, calls of functions. It adds the whole graph or, on an error, nothing. [`export`] writes
//! what both TensorFlow 1.15 and 2.x accept. Large constants are shared between graph and message in both directions.

mod export;
mod import;
mod origins;
mod subgraph;
#[cfg(test)]
mod tests;

use kolo_core::{Error, Result};
use prost::Message as _;

pub use export::{ExportOptions, export};
pub(crate) use import::import_within;
pub use import::{Calls, DroppedAttr, ImportOptions, Imported, import};
pub use origins::GraphOrigins;
pub use subgraph::subgraph;

use super::proto::GraphDef;
use super::text;

/// The version of the graph format that we read as, which a graph's `min_consumer` may not exceed: that of
/// TensorFlow 2.21.
pub const CONSUMER_VERSION: i32 = 2474;

/// The version of the graph format that we write: that of TensorFlow 1.15, so that every later one reads it too.
pub const PRODUCER_VERSION: i32 = 134;

/// The least version that may read what we write.
pub const MIN_CONSUMER_VERSION: i32 = 12;

/// Protobuf's own limit for one message.
const MAX_MESSAGE_BYTES: usize = i32::MAX as usize;

/// Reads a graph from the bytes of a file, either protobuf's binary form (`.pb`) or its text form (`.pbtxt`). Which of
/// the two it is shows in the bytes: no text is also a valid message.
pub fn read_graph(bytes: &[u8]) -> Result<GraphDef> {
    read_graph_file(bytes, "").map(|(def, _)| def)
}

/// [`read_graph`], and where each node stands in the file, for [`ImportOptions::origins`]: messages then name `file` and
/// the line of a pin.
pub fn read_graph_file(bytes: &[u8], file: &str) -> Result<(GraphDef, GraphOrigins)> {
    let not_binary = match GraphDef::decode(bytes) {
        Ok(def) => return Ok((def, GraphOrigins::of_binary(file))),
        Err(error) => error,
    };
    let is_text_byte = |byte: &u8| *byte >= b' ' && *byte != 0x7f || b"\t\n\r".contains(byte);
    match std::str::from_utf8(bytes) {
        Ok(text) if bytes.iter().all(is_text_byte) => {
            let (def, marks) = text::parse_marked(text, Some(("node", "device")))
                .map_err(|error| Error::invalid_argument(format!("not the text of a GraphDef: {error}")))?;
            Ok((def, GraphOrigins::of_text(file, text, &marks)))
        }
        _ => Err(Error::invalid_argument(format!("neither a binary GraphDef nor text: {not_binary}"))),
    }
}

/// The graph in protobuf's binary form. More than 2 GiB, protobuf's limit, is an error: such a file could not be read.
pub fn write_graph(def: &GraphDef) -> Result<Vec<u8>> {
    write_graph_within(def, MAX_MESSAGE_BYTES)
}

fn write_graph_within(def: &GraphDef, limit: usize) -> Result<Vec<u8>> {
    let n_bytes = def.encoded_len();
    if n_bytes <= limit {
        return Ok(def.encode_to_vec());
    }
    let largest = def.node.iter().max_by_key(|node| node.encoded_len());
    let largest =
        largest.map(|node| format!("; the largest node is '{}' with {} bytes", node.name, node.encoded_len()));
    Err(Error::invalid_argument(format!(
        "the graph takes {n_bytes} bytes, and protobuf's limit is {limit}{}; keep large constants in variables",
        largest.unwrap_or_default()
    )))
}
