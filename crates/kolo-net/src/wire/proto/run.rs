//! Options and results of one step, and of a callable, which is a step with fixed feeds, fetches and options.

use std::collections::BTreeMap;

use kolo_graph::wire::proto::GraphDef;

use super::{CostGraphDef, SessionMetadata, StepStats};

/// `tensorflow.RunOptions`: the options of one step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunOptions {
    /// 0 none, 1 software, 2 hardware, 3 full.
    #[prost(int32, tag = "1")]
    pub trace_level: i32,
    /// The deadline of the step; 0 is the session's.
    #[prost(int64, tag = "2")]
    pub timeout_in_ms: i64,
    /// Which of the session's thread pools to use.
    #[prost(int32, tag = "3")]
    pub inter_op_thread_pool: i32,
    /// Whether to return the graphs that ran.
    #[prost(bool, tag = "5")]
    pub output_partition_graphs: bool,
    /// Tensors to watch.
    #[prost(message, optional, tag = "6")]
    pub debug_options: Option<DebugOptions>,
    /// Whether allocations are reported if the step runs out of memory.
    #[prost(bool, tag = "7")]
    pub report_tensor_allocations_upon_oom: bool,
    /// Experimental options.
    #[prost(message, optional, tag = "8")]
    pub experimental: Option<RunExperimental>,
}

/// `tensorflow.RunOptions.Experimental`: experimental step options.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunExperimental {
    /// Which graph with collectives this is; all tasks must agree. 0 is none.
    #[prost(int64, tag = "1")]
    pub collective_graph_key: i64,
    /// Whether steps share threads by priority.
    #[prost(bool, tag = "2")]
    pub use_run_handler_pool: bool,
    /// The priority.
    #[prost(message, optional, tag = "3")]
    pub run_handler_pool_options: Option<RunHandlerPoolOptions>,
}

/// `tensorflow.RunOptions.Experimental.RunHandlerPoolOptions`: the priority of a step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunHandlerPoolOptions {
    /// Larger is more urgent.
    #[prost(int64, tag = "1")]
    pub priority: i64,
}

/// `tensorflow.DebugOptions`: tensors to watch while a step runs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DebugOptions {
    /// The tensors.
    #[prost(message, repeated, tag = "4")]
    pub debug_tensor_watch_opts: Vec<DebugTensorWatch>,
    /// The step's number, for reports.
    #[prost(int64, tag = "10")]
    pub global_step: i64,
    /// Whether to reset the count of dumped bytes.
    #[prost(bool, tag = "11")]
    pub reset_disk_byte_usage: bool,
}

/// `tensorflow.DebugTensorWatch`: one watched tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DebugTensorWatch {
    /// The node.
    #[prost(string, tag = "1")]
    pub node_name: String,
    /// Its output; -1 is all of them.
    #[prost(int32, tag = "2")]
    pub output_slot: i32,
    /// The debug ops to apply to each value.
    #[prost(string, repeated, tag = "3")]
    pub debug_ops: Vec<String>,
    /// Where to write the results.
    #[prost(string, repeated, tag = "4")]
    pub debug_urls: Vec<String>,
    /// Whether incompatible debug ops are skipped.
    #[prost(bool, tag = "5")]
    pub tolerate_debug_op_creation_failures: bool,
}

/// `tensorflow.RunMetadata`: statistics and graphs of a step that ran.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunMetadata {
    /// Timing statistics.
    #[prost(message, optional, tag = "1")]
    pub step_stats: Option<StepStats>,
    /// Costs.
    #[prost(message, optional, tag = "2")]
    pub cost_graph: Option<CostGraphDef>,
    /// The graphs that ran, one for each device.
    #[prost(message, repeated, tag = "3")]
    pub partition_graphs: Vec<GraphDef>,
    /// The graphs of the functions that ran.
    #[prost(message, repeated, tag = "4")]
    pub function_graphs: Vec<FunctionGraphs>,
    /// The session's name.
    #[prost(message, optional, tag = "5")]
    pub session_metadata: Option<SessionMetadata>,
}

/// `tensorflow.RunMetadata.FunctionGraphs`: the graphs of a function.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FunctionGraphs {
    /// As they ran.
    #[prost(message, repeated, tag = "1")]
    pub partition_graphs: Vec<GraphDef>,
    /// Before any rewriting.
    #[prost(message, optional, tag = "2")]
    pub pre_optimization_graph: Option<GraphDef>,
    /// After it.
    #[prost(message, optional, tag = "3")]
    pub post_optimization_graph: Option<GraphDef>,
}

/// `tensorflow.CallableOptions`: the fixed feeds, fetches and options of a callable.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CallableOptions {
    /// The tensors to feed, in the order of the values to come.
    #[prost(string, repeated, tag = "1")]
    pub feed: Vec<String>,
    /// The tensors to fetch, in the order of the values to return.
    #[prost(string, repeated, tag = "2")]
    pub fetch: Vec<String>,
    /// Further nodes to run.
    #[prost(string, repeated, tag = "3")]
    pub target: Vec<String>,
    /// The options of each run.
    #[prost(message, optional, tag = "4")]
    pub run_options: Option<RunOptions>,
    /// Tensors that replace others.
    #[prost(message, repeated, tag = "5")]
    pub tensor_connection: Vec<TensorConnection>,
    /// Where fed values live; clusters refuse it.
    #[prost(btree_map = "string, string", tag = "6")]
    pub feed_devices: BTreeMap<String, String>,
    /// Where fetched values should live; clusters refuse it.
    #[prost(btree_map = "string, string", tag = "7")]
    pub fetch_devices: BTreeMap<String, String>,
    /// Whether fetched values may be returned before the device has computed them.
    #[prost(bool, tag = "8")]
    pub fetch_skip_sync: bool,
}

/// `tensorflow.TensorConnection`: a tensor that replaces another.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorConnection {
    /// The replacement.
    #[prost(string, tag = "1")]
    pub from_tensor: String,
    /// The tensor that it replaces.
    #[prost(string, tag = "2")]
    pub to_tensor: String,
}
