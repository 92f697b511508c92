//! `StepStats`: the timing of a step, and `CostGraphDef`: its costs.

use std::collections::BTreeMap;

use kolo_graph::wire::proto::TensorShapeProto;

/// `tensorflow.StepStats`: the timing of a step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StepStats {
    /// By device.
    #[prost(message, repeated, tag = "1")]
    pub dev_stats: Vec<DeviceStepStats>,
}

/// `tensorflow.DeviceStepStats`: the timing of one device.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceStepStats {
    /// The device's name.
    #[prost(string, tag = "1")]
    pub device: String,
    /// The nodes that ran.
    #[prost(message, repeated, tag = "2")]
    pub node_stats: Vec<NodeExecStats>,
    /// Names of the threads.
    #[prost(btree_map = "uint32, string", tag = "3")]
    pub thread_names: BTreeMap<u32, String>,
}

/// `tensorflow.NodeExecStats`: one node that ran.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeExecStats {
    /// The node's name.
    #[prost(string, tag = "1")]
    pub node_name: String,
    /// When it began, in microseconds since 1970.
    #[prost(int64, tag = "2")]
    pub all_start_micros: i64,
    /// When its kernel began, after `all_start_micros`.
    #[prost(int64, tag = "3")]
    pub op_start_rel_micros: i64,
    /// When its kernel ended, after `all_start_micros`.
    #[prost(int64, tag = "4")]
    pub op_end_rel_micros: i64,
    /// When all of it ended, after `all_start_micros`.
    #[prost(int64, tag = "5")]
    pub all_end_rel_micros: i64,
    /// Memory it allocated.
    #[prost(message, repeated, tag = "6")]
    pub memory: Vec<AllocatorMemoryUsed>,
    /// Its outputs.
    #[prost(message, repeated, tag = "7")]
    pub output: Vec<NodeOutput>,
    /// Its label in timelines.
    #[prost(string, tag = "8")]
    pub timeline_label: String,
    /// When it became ready, in microseconds since 1970.
    #[prost(int64, tag = "9")]
    pub scheduled_micros: i64,
    /// The thread it ran on.
    #[prost(uint32, tag = "10")]
    pub thread_id: u32,
    /// Memory it shares with others.
    #[prost(message, repeated, tag = "11")]
    pub referenced_tensor: Vec<AllocationDescription>,
    /// Memory it keeps.
    #[prost(message, optional, tag = "12")]
    pub memory_stats: Option<MemoryStats>,
    /// As `all_start_micros`, in nanoseconds.
    #[prost(int64, tag = "13")]
    pub all_start_nanos: i64,
    /// As `op_start_rel_micros`, in nanoseconds.
    #[prost(int64, tag = "14")]
    pub op_start_rel_nanos: i64,
    /// As `op_end_rel_micros`, in nanoseconds.
    #[prost(int64, tag = "15")]
    pub op_end_rel_nanos: i64,
    /// As `all_end_rel_micros`, in nanoseconds.
    #[prost(int64, tag = "16")]
    pub all_end_rel_nanos: i64,
    /// As `scheduled_micros`, in nanoseconds.
    #[prost(int64, tag = "17")]
    pub scheduled_nanos: i64,
}

/// `tensorflow.AllocatorMemoryUsed`: memory that a node allocated.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocatorMemoryUsed {
    /// The allocator's name.
    #[prost(string, tag = "1")]
    pub allocator_name: String,
    /// The total number of bytes.
    #[prost(int64, tag = "2")]
    pub total_bytes: i64,
    /// The peak number of bytes.
    #[prost(int64, tag = "3")]
    pub peak_bytes: i64,
    /// Its live bytes at the end.
    #[prost(int64, tag = "4")]
    pub live_bytes: i64,
    /// The allocator's live bytes at the end.
    #[prost(int64, tag = "5")]
    pub allocator_bytes_in_use: i64,
    /// Each of its allocations.
    #[prost(message, repeated, tag = "6")]
    pub allocation_records: Vec<AllocationRecord>,
}

/// `tensorflow.AllocationRecord`: one allocation.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocationRecord {
    /// When.
    #[prost(int64, tag = "1")]
    pub alloc_micros: i64,
    /// Bytes; negative for a deallocation.
    #[prost(int64, tag = "2")]
    pub alloc_bytes: i64,
}

/// `tensorflow.NodeOutput`: one output of a node that ran.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeOutput {
    /// Which output.
    #[prost(int32, tag = "1")]
    pub slot: i32,
    /// The tensor.
    #[prost(message, optional, tag = "3")]
    pub tensor_description: Option<TensorDescription>,
}

/// `tensorflow.TensorDescription`: a tensor without its elements.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorDescription {
    /// The dtype's number.
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    /// The shape.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
    /// Its memory.
    #[prost(message, optional, tag = "4")]
    pub allocation_description: Option<AllocationDescription>,
}

/// `tensorflow.AllocationDescription`: a piece of memory.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocationDescription {
    /// Bytes requested.
    #[prost(int64, tag = "1")]
    pub requested_bytes: i64,
    /// Bytes allocated.
    #[prost(int64, tag = "2")]
    pub allocated_bytes: i64,
    /// The allocator's name.
    #[prost(string, tag = "3")]
    pub allocator_name: String,
    /// The allocation's id.
    #[prost(int64, tag = "4")]
    pub allocation_id: i64,
    /// Whether only one tensor uses it.
    #[prost(bool, tag = "5")]
    pub has_single_reference: bool,
    /// Its address.
    #[prost(uint64, tag = "6")]
    pub ptr: u64,
}

/// `tensorflow.MemoryStats`: memory that a node keeps.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemoryStats {
    /// Temporary bytes.
    #[prost(int64, tag = "1")]
    pub temp_memory_size: i64,
    /// Persistent bytes.
    #[prost(int64, tag = "3")]
    pub persistent_memory_size: i64,
    /// The persistent allocations' ids.
    #[prost(int64, repeated, tag = "5")]
    pub persistent_tensor_alloc_ids: Vec<i64>,
}

/// `tensorflow.CostGraphDef`: the costs of a graph's nodes.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CostGraphDef {
    /// The nodes.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<CostNode>,
    /// The total costs.
    #[prost(message, repeated, tag = "2")]
    pub cost: Vec<AggregatedCost>,
}

/// `tensorflow.CostGraphDef.Node`: the cost of one node.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CostNode {
    /// The node's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its device.
    #[prost(string, tag = "2")]
    pub device: String,
    /// Its number in this message.
    #[prost(int32, tag = "3")]
    pub id: i32,
    /// Its inputs.
    #[prost(message, repeated, tag = "4")]
    pub input_info: Vec<InputInfo>,
    /// Its outputs.
    #[prost(message, repeated, tag = "5")]
    pub output_info: Vec<OutputInfo>,
    /// Temporary bytes.
    #[prost(int64, tag = "6")]
    pub temporary_memory_size: i64,
    /// Whether its outputs are fetched.
    #[prost(bool, tag = "7")]
    pub is_final: bool,
    /// Its control inputs.
    #[prost(int32, repeated, tag = "8")]
    pub control_input: Vec<i32>,
    /// Microseconds, measured or estimated.
    #[prost(int64, tag = "9")]
    pub compute_cost: i64,
    /// Persistent bytes.
    #[prost(int64, tag = "12")]
    pub persistent_memory_size: i64,
    /// Estimated time of computing.
    #[prost(int64, tag = "14")]
    pub compute_time: i64,
    /// Estimated time of memory access.
    #[prost(int64, tag = "15")]
    pub memory_time: i64,
    /// Whether the estimate is poor.
    #[prost(bool, tag = "17")]
    pub inaccurate: bool,
}

/// `tensorflow.CostGraphDef.Node.InputInfo`: where an input comes from.
#[derive(Clone, PartialEq, prost::Message)]
pub struct InputInfo {
    /// The node, by its number in this message.
    #[prost(int32, tag = "1")]
    pub preceding_node: i32,
    /// Its output.
    #[prost(int32, tag = "2")]
    pub preceding_port: i32,
}

/// `tensorflow.CostGraphDef.Node.OutputInfo`: one output of a node.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OutputInfo {
    /// Bytes.
    #[prost(int64, tag = "1")]
    pub size: i64,
    /// The input whose memory it uses, or -1.
    #[prost(int64, tag = "2")]
    pub alias_input_port: i64,
    /// The shape.
    #[prost(message, optional, tag = "3")]
    pub shape: Option<TensorShapeProto>,
    /// The dtype's number.
    #[prost(int32, tag = "4")]
    pub dtype: i32,
}

/// `tensorflow.CostGraphDef.AggregatedCost`: the cost of a whole graph.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AggregatedCost {
    /// The amount.
    #[prost(float, tag = "1")]
    pub cost: f32,
    /// The kind of cost.
    #[prost(string, tag = "2")]
    pub dimension: String,
}
