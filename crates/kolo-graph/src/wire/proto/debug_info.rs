//! `GraphDebugInfo`: where in the user's program nodes come from. The one proto2 file of the set.

use std::collections::BTreeMap;

/// `tensorflow.GraphDebugInfo`: stack traces by node.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GraphDebugInfo {
    /// Source files, referred to by their index.
    #[prost(string, repeated, tag = "1")]
    pub files: Vec<String>,
    /// Traces by `node@function`.
    #[prost(btree_map = "string, message", tag = "2")]
    pub traces: BTreeMap<String, StackTrace>,
    /// Frames that several traces share.
    #[prost(btree_map = "fixed64, message", tag = "4")]
    pub frames_by_id: BTreeMap<u64, FileLineCol>,
    /// Traces by `node@function`, as keys of `traces_by_id`.
    #[prost(btree_map = "string, fixed64", tag = "5")]
    pub name_to_trace_id: BTreeMap<String, u64>,
    /// Traces that several nodes share.
    #[prost(btree_map = "fixed64, message", tag = "6")]
    pub traces_by_id: BTreeMap<u64, StackTrace>,
}

/// `tensorflow.GraphDebugInfo.FileLineCol`: one frame.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FileLineCol {
    /// An index in [`GraphDebugInfo::files`].
    #[prost(int32, optional, tag = "1")]
    pub file_index: Option<i32>,
    /// The line, from 1.
    #[prost(int32, optional, tag = "2")]
    pub line: Option<i32>,
    /// The column.
    #[prost(int32, optional, tag = "3")]
    pub col: Option<i32>,
    /// The function.
    #[prost(string, optional, tag = "4")]
    pub func: Option<String>,
    /// The text of the line.
    #[prost(string, optional, tag = "5")]
    pub code: Option<String>,
}

/// `tensorflow.GraphDebugInfo.StackTrace`: frames, innermost first.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StackTrace {
    /// The frames themselves.
    #[prost(message, repeated, tag = "1")]
    pub file_line_cols: Vec<FileLineCol>,
    /// Or keys of [`GraphDebugInfo::frames_by_id`].
    #[prost(fixed64, repeated, tag = "2")]
    pub frame_id: Vec<u64>,
}
