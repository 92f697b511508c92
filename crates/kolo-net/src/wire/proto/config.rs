//! `ConfigProto`: the options of a session, or of a server.
//!
//! Options of TensorFlow's own graph rewriting are omitted where Kolo has no counterpart; a decoder skips them.

use std::collections::BTreeMap;

use kolo_graph::wire::proto::AttrValue;

use super::ClusterDef;

/// `tensorflow.ConfigProto`: the options of a session, and the defaults of a server.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ConfigProto {
    /// The maximum number of devices of each type. Read by a server at startup.
    #[prost(btree_map = "string, int32", tag = "1")]
    pub device_count: BTreeMap<String, i32>,
    /// Threads that share the work of one op; 0 lets the server choose.
    #[prost(int32, tag = "2")]
    pub intra_op_parallelism_threads: i32,
    /// Unused.
    #[prost(int32, tag = "3")]
    pub placement_period: i32,
    /// Partial device names. A session sees only devices that match one of them, and those of its own master.
    #[prost(string, repeated, tag = "4")]
    pub device_filters: Vec<String>,
    /// Threads that run ops concurrently; 0 lets the server choose.
    #[prost(int32, tag = "5")]
    pub inter_op_parallelism_threads: i32,
    /// GPU options. Read by a server at startup.
    #[prost(message, optional, tag = "6")]
    pub gpu_options: Option<GpuOptions>,
    /// Whether a node may run elsewhere if its device has no kernel for it.
    #[prost(bool, tag = "7")]
    pub allow_soft_placement: bool,
    /// Whether the master logs the device of every node.
    #[prost(bool, tag = "8")]
    pub log_device_placement: bool,
    /// Threads for this session alone; a cluster refuses it.
    #[prost(bool, tag = "9")]
    pub use_per_session_threads: bool,
    /// Optimisations of the graph before it runs.
    #[prost(message, optional, tag = "10")]
    pub graph_options: Option<GraphOptions>,
    /// The default deadline of every call of the session; 0 is none.
    #[prost(int64, tag = "11")]
    pub operation_timeout_in_ms: i64,
    /// Thread pools for this session alone; a cluster refuses them.
    #[prost(message, repeated, tag = "12")]
    pub session_inter_op_thread_pool: Vec<ThreadPoolOptionProto>,
    /// RPC options.
    #[prost(message, optional, tag = "13")]
    pub rpc_options: Option<RpcOptions>,
    /// The cluster, if the client provides it.
    #[prost(message, optional, tag = "14")]
    pub cluster_def: Option<ClusterDef>,
    /// Whether the session's variables are isolated.
    #[prost(bool, tag = "15")]
    pub isolate_session_state: bool,
    /// Experimental options.
    #[prost(message, optional, tag = "16")]
    pub experimental: Option<ConfigExperimental>,
    /// Whether devices of the cluster are taken from the client.
    #[prost(bool, tag = "17")]
    pub share_cluster_devices_in_session: bool,
}

/// `tensorflow.ConfigProto.Experimental`: experimental options.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ConfigExperimental {
    /// The task that leads collectives, as `/job:worker/replica:0/task:0`.
    #[prost(string, tag = "1")]
    pub collective_group_leader: String,
    /// Which executor to run with.
    #[prost(string, tag = "3")]
    pub executor_type: String,
    /// The maximum chunk size of a `RecvBufResponse`.
    #[prost(int32, tag = "4")]
    pub recv_buf_max_chunk: i32,
    /// Whether memory is allocated on the device's NUMA node.
    #[prost(bool, tag = "5")]
    pub use_numa_affinity: bool,
    /// Whether collectives run sequentially.
    #[prost(bool, tag = "6")]
    pub collective_deterministic_sequential_execution: bool,
    /// Whether collectives use NCCL.
    #[prost(bool, tag = "7")]
    pub collective_nccl: bool,
    /// With `cluster_def`: keep variables in the shared containers.
    #[prost(bool, tag = "8")]
    pub share_session_state_in_clusterspec_propagation: bool,
    /// Whether idle threads sleep at once.
    #[prost(bool, tag = "9")]
    pub disable_thread_spinning: bool,
    /// The former place of `ConfigProto.share_cluster_devices_in_session`.
    #[prost(bool, tag = "10")]
    pub share_cluster_devices_in_session: bool,
    /// A name for the session.
    #[prost(message, optional, tag = "11")]
    pub session_metadata: Option<SessionMetadata>,
    /// Whether the graph is promised not to grow.
    #[prost(bool, tag = "12")]
    pub optimize_for_static_graph: bool,
    /// Whether `output_partition_graphs` is refused.
    #[prost(bool, tag = "14")]
    pub disable_output_partition_graphs: bool,
    /// TensorFlow's coordination service, which this runtime does without.
    #[prost(message, optional, tag = "23")]
    pub coordination_config: Option<CoordinationServiceConfig>,
    /// Whether `optimize_for_static_graph` is overridden.
    #[prost(bool, tag = "24")]
    pub disable_optimize_for_static_graph: bool,
}

/// `tensorflow.CoordinationServiceConfig`: where TensorFlow 2 looks for its coordination service.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CoordinationServiceConfig {
    /// The kind of service.
    #[prost(string, tag = "1")]
    pub service_type: String,
    /// The task that runs it.
    #[prost(string, tag = "2")]
    pub service_leader: String,
}

/// `tensorflow.SessionMetadata`: a name for a session.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SessionMetadata {
    /// The name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its version.
    #[prost(int64, tag = "2")]
    pub version: i64,
}

/// `tensorflow.ThreadPoolOptionProto`: a pool of threads.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ThreadPoolOptionProto {
    /// The number of threads; 0 lets the server choose.
    #[prost(int32, tag = "1")]
    pub num_threads: i32,
    /// Pools of the same name are one pool.
    #[prost(string, tag = "2")]
    pub global_name: String,
}

/// `tensorflow.GPUOptions`: GPU options.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GpuOptions {
    /// The fraction of each GPU's memory to use; 0 lets the server choose.
    #[prost(double, tag = "1")]
    pub per_process_gpu_memory_fraction: f64,
    /// Empty or `BFC`.
    #[prost(string, tag = "2")]
    pub allocator_type: String,
    /// Bytes of deferred deallocations before they are flushed; 0 lets the server choose.
    #[prost(int64, tag = "3")]
    pub deferred_deletion_bytes: i64,
    /// Whether memory is allocated on demand and not at startup.
    #[prost(bool, tag = "4")]
    pub allow_growth: bool,
    /// The GPUs to use, by physical number, in the order of their new numbers.
    #[prost(string, tag = "5")]
    pub visible_device_list: String,
    /// Unused.
    #[prost(int32, tag = "6")]
    pub polling_active_delay_usecs: i32,
    /// Unused.
    #[prost(int32, tag = "7")]
    pub polling_inactive_delay_msecs: i32,
    /// Whether all host tensors are allocated in pinned memory.
    #[prost(bool, tag = "8")]
    pub force_gpu_compatible: bool,
    /// Experimental options.
    #[prost(message, optional, tag = "9")]
    pub experimental: Option<GpuExperimental>,
}

/// `tensorflow.GPUOptions.Experimental`: experimental GPU options.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GpuExperimental {
    /// The virtual devices of each visible GPU; empty is one device each.
    #[prost(message, repeated, tag = "1")]
    pub virtual_devices: Vec<VirtualDevices>,
    /// Whether more memory may be used than the GPU has.
    #[prost(bool, tag = "2")]
    pub use_unified_memory: bool,
    /// Streams for copies between GPUs.
    #[prost(int32, tag = "3")]
    pub num_dev_to_dev_copy_streams: i32,
    /// The order of the GPUs in a ring.
    #[prost(string, tag = "4")]
    pub collective_ring_order: String,
    /// Whether memory is reused only after the GPU has finished with it.
    #[prost(bool, tag = "5")]
    pub timestamped_allocator: bool,
    /// The fraction of an allocation that may stay unused.
    #[prost(double, tag = "10")]
    pub internal_fragmentation_fraction: f64,
    /// Whether CUDA's own pool is used.
    #[prost(bool, tag = "11")]
    pub use_cuda_malloc_async: bool,
    /// The number of equal virtual devices of each GPU.
    #[prost(int32, tag = "15")]
    pub num_virtual_devices_per_gpu: i32,
}

/// `tensorflow.GPUOptions.Experimental.VirtualDevices`: the virtual devices of one GPU.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VirtualDevices {
    /// The memory of each, in MiB.
    #[prost(float, repeated, tag = "1")]
    pub memory_limit_mb: Vec<f32>,
    /// The stream priority of each.
    #[prost(int32, repeated, tag = "2")]
    pub priority: Vec<i32>,
    /// The number of each.
    #[prost(int32, repeated, tag = "3")]
    pub device_ordinal: Vec<i32>,
}

/// `tensorflow.GraphOptions`: optimisations of a graph before it runs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GraphOptions {
    /// Whether receives are delayed until they are needed.
    #[prost(bool, tag = "2")]
    pub enable_recv_scheduling: bool,
    /// Optimisations by the worker.
    #[prost(message, optional, tag = "3")]
    pub optimizer_options: Option<OptimizerOptions>,
    /// Steps after which a cost model is written; 0 is never.
    #[prost(int64, tag = "4")]
    pub build_cost_model: i64,
    /// Whether nodes are annotated with shapes.
    #[prost(bool, tag = "5")]
    pub infer_shapes: bool,
    /// Whether placement sees only the pruned graph; clusters ignore it.
    #[prost(bool, tag = "6")]
    pub place_pruned_graph: bool,
    /// Whether floats travel between tasks as bfloat16.
    #[prost(bool, tag = "7")]
    pub enable_bfloat16_sendrecv: bool,
    /// Steps between timelines.
    #[prost(int32, tag = "8")]
    pub timeline_step: i32,
    /// Steps to skip before the first cost model.
    #[prost(int64, tag = "9")]
    pub build_cost_model_after: i64,
    /// Optimisations by the master.
    #[prost(message, optional, tag = "10")]
    pub rewrite_options: Option<RewriterConfig>,
}

/// `tensorflow.OptimizerOptions`: optimisations by the worker.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OptimizerOptions {
    /// Whether common subexpressions are eliminated.
    #[prost(bool, tag = "1")]
    pub do_common_subexpression_elimination: bool,
    /// Whether constants are folded.
    #[prost(bool, tag = "2")]
    pub do_constant_folding: bool,
    /// 0 is all of them (`L1`), -1 is none (`L0`).
    #[prost(int32, tag = "3")]
    pub opt_level: i32,
    /// Whether function calls are inlined.
    #[prost(bool, tag = "4")]
    pub do_function_inlining: bool,
    /// 0 default, -1 off, 1 and 2 on.
    #[prost(int32, tag = "5")]
    pub global_jit_level: i32,
    /// The largest constant that folding may make; 0 is the default.
    #[prost(int64, tag = "6")]
    pub max_folded_constant_in_bytes: i64,
    /// Whether `global_jit_level` applies to CPUs too.
    #[prost(bool, tag = "7")]
    pub cpu_global_jit: bool,
}

/// `tensorflow.RewriterConfig`: optimisations by the master. A toggle is 0 default, 1 on, 2 off, 3 aggressive.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RewriterConfig {
    /// A toggle: tensor layouts.
    #[prost(int32, tag = "1")]
    pub layout_optimizer: i32,
    /// Whether unused nodes are kept.
    #[prost(bool, tag = "2")]
    pub disable_model_pruning: bool,
    /// A toggle: constant folding.
    #[prost(int32, tag = "3")]
    pub constant_folding: i32,
    /// 0 default, 1 none, 2 manual, 3 heuristics.
    #[prost(int32, tag = "4")]
    pub memory_optimization: i32,
    /// A toggle: arithmetic.
    #[prost(int32, tag = "7")]
    pub arithmetic_optimization: i32,
    /// A toggle: control edges.
    #[prost(int32, tag = "8")]
    pub dependency_optimization: i32,
    /// A toggle: loops.
    #[prost(int32, tag = "9")]
    pub loop_optimization: i32,
    /// A toggle: functions.
    #[prost(int32, tag = "10")]
    pub function_optimization: i32,
    /// The number of iterations: 0 default, 1 once, 2 twice.
    #[prost(int32, tag = "12")]
    pub meta_optimizer_iterations: i32,
    /// A toggle: shapes.
    #[prost(int32, tag = "13")]
    pub shape_optimization: i32,
    /// A toggle: fused ops.
    #[prost(int32, tag = "14")]
    pub remapping: i32,
    /// Smaller graphs are not optimised; -1 is no limit.
    #[prost(int32, tag = "17")]
    pub min_graph_nodes: i32,
    /// Whether all optimisations are off.
    #[prost(bool, tag = "19")]
    pub disable_meta_optimizer: bool,
    /// A toggle: mixed precision.
    #[prost(int32, tag = "23")]
    pub auto_mixed_precision: i32,
    /// The optimizers to run, instead of the default ones.
    #[prost(string, repeated, tag = "100")]
    pub optimizers: Vec<String>,
    /// Optimizers from outside TensorFlow.
    #[prost(message, repeated, tag = "200")]
    pub custom_optimizers: Vec<CustomGraphOptimizer>,
}

/// `tensorflow.RewriterConfig.CustomGraphOptimizer`: an optimizer from outside TensorFlow.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CustomGraphOptimizer {
    /// Its registered name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its options.
    #[prost(btree_map = "string, message", tag = "2")]
    pub parameter_map: BTreeMap<String, AttrValue>,
}

/// `tensorflow.RPCOptions`: RPC options.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RpcOptions {
    /// Whether a master in the same process is called through its socket.
    #[prost(bool, tag = "1")]
    pub use_rpc_for_inprocess_master: bool,
    /// Empty, `deflate` or `gzip`.
    #[prost(string, tag = "2")]
    pub compression_algorithm: String,
    /// 0 to 3.
    #[prost(int32, tag = "3")]
    pub compression_level: i32,
    /// Whether responses of RecvTensor are cached until they are acknowledged.
    #[prost(bool, tag = "4")]
    pub cache_rpc_response: bool,
    /// Whether sessions do not share connections.
    #[prost(bool, tag = "5")]
    pub disable_session_connection_sharing: bool,
    /// Connections to each task; 0 is one.
    #[prost(int32, tag = "6")]
    pub num_channels_per_target: i32,
}
