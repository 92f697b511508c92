//! The options of a session, and of one run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kolo_device::Device;
use kolo_graph::{CostModel, Pass, PlacementRules, Policy};
use kolo_ops::CancelToken;
use kolo_ops::collective::Groups;

/// The options of a session. Field names are TensorFlow's where it has them.
#[derive(Clone, Default)]
pub struct SessionConfig {
    /// The number of devices of each type: `{"CPU": 4}`. One CPU if absent.
    pub device_count: BTreeMap<String, usize>,
    /// Options of CPU devices, by number: cores, memory limit. Defaults if absent.
    pub cpu_devices: BTreeMap<usize, DevicePlan>,
    /// GPU options. `device_count["GPU"]` is the maximum number of GPUs: all visible ones if it is absent, none if it
    /// is 0.
    pub gpu: GpuOptions,
    /// More devices, such as null devices in tests. They come after the CPUs.
    pub extra_devices: Vec<Arc<dyn Device>>,
    /// Threads that run nodes of one step at once, the caller included, for each device; 0 means the device's cores
    /// divided by its intra-op threads.
    pub inter_op_parallelism_threads: usize,
    /// Threads inside one kernel, the caller included, for each CPU device; 0 means an equal share of the cores.
    pub intra_op_parallelism_threads: usize,
    /// Ignored, for compatibility: every session has its own threads.
    pub use_per_session_threads: bool,
    /// Nodes that cannot run where they are pinned run elsewhere instead of being refused.
    pub allow_soft_placement: bool,
    /// The maximum number of nodes that may fall back under soft placement; more fail the run.
    pub max_fallbacks: Option<usize>,
    /// Pins by pattern, usually read from a file beside the program; see [`PlacementRules::parse`].
    pub placement_rules: PlacementRules,
    /// How nodes without a pin are placed: by the three simple rules, by TensorFlow's heuristics too, or by `costs`.
    pub placement_policy: Policy,
    /// Measured times of nodes and links, for [`Policy::Cost`] and for the cost of fallbacks, filled from traces by
    /// [`crate::StepTrace::add_to`]. Shared by all clones of this configuration.
    pub costs: Arc<CostModel>,
    /// Refuses runs with implicit copies between devices' memories. Feeds, fetches and pinned `Identity` nodes are
    /// explicit copies.
    pub deny_implicit_copies: bool,
    /// Logs where every node was placed.
    pub log_device_placement: bool,
    /// For a remote session: the tasks it may use, as partial device names such as `/job:ps`. Empty means all. Other
    /// tasks need not be up.
    pub device_filters: Vec<String>,
    /// For a remote session: its variables and queues are not shared with other sessions, and end with it.
    pub isolate_session_state: bool,
    /// Passes of the user's own, which run before Kolo's of the same stage; see [`Pass`]. Only for local sessions.
    pub passes: Vec<Pass>,
    /// The groups of ranks that collectives name. Only for local sessions.
    pub groups: Groups,
    /// The timeout of runs without their own.
    pub operation_timeout: Option<Duration>,
}

/// GPU options. Field names are TensorFlow's where it has them.
#[derive(Clone, Debug, Default)]
pub struct GpuOptions {
    /// The fraction of each GPU's memory that its device may use, from 0 to 1; all of it if absent. Refused at once if
    /// less is free.
    pub per_process_gpu_memory_fraction: Option<f64>,
    /// Whether memory is allocated on demand (true, the default if absent) or all at once. It is freed when the session
    /// ends.
    pub allow_growth: Option<bool>,
    /// The GPUs to use, by visible number, in the order in which they become GPU 0, 1, …: `"1,0"`. Empty means all.
    pub visible_device_list: String,
    /// The limit on each GPU's tensors in bytes, by the GPU's index in the list above.
    pub memory_limits: BTreeMap<usize, u64>,
    /// Several logical GPUs on one GPU: the limit of each in bytes, by the GPU's index in the list above.
    pub virtual_devices: BTreeMap<usize, Vec<u64>>,
    /// Matrix products and convolutions of `float` use full precision instead of TF32.
    pub full_precision: bool,
    /// Steps are not captured as CUDA graphs but enqueued kernel by kernel, for comparison.
    pub no_capture: bool,
    /// Nodes are not fused but run one by one, for comparison.
    pub no_fusion: bool,
    /// The folder of the kernel cache; in the user's cache folder if absent.
    pub kernel_cache: Option<std::path::PathBuf>,
}

/// The options of one CPU device.
#[derive(Clone, Debug, Default)]
pub struct DevicePlan {
    /// The cores its threads are bound to; empty means all, or, on a machine with several NUMA nodes, a share of one
    /// node if no device has a core set. The thread that calls `run` is not bound.
    pub cores: Vec<usize>,
    /// The limit on its tensors' bytes; without one, the memory that the process can have.
    pub memory_limit: Option<u64>,
}

/// The options of one run.
#[derive(Clone, Default)]
pub struct RunOptions {
    /// The run fails with `DeadlineExceeded` after this long; the error names what it waited for.
    pub timeout: Option<Duration>,
    /// Records every node; see [`crate::RunMetadata::trace`].
    pub trace: bool,
    /// Cancelling this token stops the run.
    pub cancel: Option<Arc<CancelToken>>,
}
