//! GraphDefs as TensorFlow writes them: protobuf bytes and protobuf text.
//!
//! ```text
//!   .pb bytes  <── prost ──>  proto::GraphDef  <── text ──>  .pbtxt
//!                                    ^
//!                                    |  graph, with attr and tensor
//!                                    v
//!                              Graph and Nodes
//! ```
//!
//! [`proto`] holds the messages, written by hand from the field numbers TensorFlow publishes; [`describe`] holds one
//! table that names their fields; [`text`] reads and writes the text format through that table alone, so a message
//! gains a text form by gaining a row. The messages are wire types: they say what a peer or a file said, and
//! promise nothing about it. [`mod@graph`] and [`tensor`] turn them into graphs and tensors, and refuse what makes no
//! sense; `functions` writes out calls on the way.
//!
//! Nothing here opens a file or a socket, and no input makes it panic.

mod attr;
pub mod describe;
mod enums;
pub(crate) mod functions;
pub mod graph;
pub mod proto;
mod tables;
pub mod tensor;
pub mod text;
