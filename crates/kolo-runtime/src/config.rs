//! How a session is set up, and how one run differs from others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kolo_device::Device;
use kolo_graph::{CostModel, Pass, PlacementRules, Policy};
use kolo_ops::CancelToken;

/// How a session is set up. Field names are TensorFlow's where it has them.
#[derive(Clone, Default)]
pub struct SessionConfig {
    /// How many devices of each type: `{"CPU": 4}`. One CPU if absent.
    pub device_count: BTreeMap<String, usize>,
    /// Details of CPU devices, by number: cores, memory limit. Absent ones have none.
    pub cpu_devices: BTreeMap<usize, DevicePlan>,
    /// How GPUs are used. `device_count["GPU"]` says how many at most; all that are visible if it is absent, none if it is 0.
    pub gpu: GpuOptions,
    /// More devices, such as null devices in tests. They come after the CPUs.
    pub extra_devices: Vec<Arc<dyn Device>>,
    /// Threads that run nodes of one step at once, the caller included, for each device; 0 means as many as the device has
    /// cores for, given that each may use all intra-op threads.
    pub inter_op_parallelism_threads: usize,
    /// Threads inside one kernel, the caller included, for each CPU device; 0 means an equal share of the cores.
    pub intra_op_parallelism_threads: usize,
    /// Every session has threads of its own; accepted for compatibility, and always so.
    pub use_per_session_threads: bool,
    /// Nodes that cannot run where they are pinned run elsewhere instead of being refused.
    pub allow_soft_placement: bool,
    /// The most nodes that may fall back under soft placement; more fail the run.
    pub max_fallbacks: Option<usize>,
    /// Pins by pattern, usually read from a file beside the program; see [`PlacementRules::parse`].
    pub placement_rules: PlacementRules,
    /// How nodes without a pin are placed: by the three simple rules, by TensorFlow's heuristics too, or by `costs`.
    pub placement_policy: Policy,
    /// Measured times of nodes and links, for [`Policy::Cost`] and for the price of fall-backs. Traces fill it:
    /// [`crate::StepTrace::add_to`]. Shared by all clones of this configuration.
    pub costs: Arc<CostModel>,
    /// Refuses runs in which a value moves from one device's memory to another's without being asked to: by a feed, a fetch,
    /// or an `Identity` that is pinned.
    pub deny_implicit_copies: bool,
    /// Logs where every node was placed.
    pub log_device_placement: bool,
    /// For a remote session: the tasks it may use, as partial device names such as `/job:ps`. Empty means all. Tasks that are
    /// filtered out need not be there.
    pub device_filters: Vec<String>,
    /// For a remote session: variables and queues of its own, which end with it.
    pub isolate_session_state: bool,
    /// Passes of the user's own, which run before Kolo's of the same stage; see [`Pass`]. Only for local sessions.
    pub passes: Vec<Pass>,
    /// The time limit of a run that has none of its own.
    pub operation_timeout: Option<Duration>,
}

/// How GPUs are used. Field names are TensorFlow's where it has them.
#[derive(Clone, Debug, Default)]
pub struct GpuOptions {
    /// The share of each card's memory that its device may take, from 0 to 1; all of it if absent. Refused at once if the
    /// card has less left.
    pub per_process_gpu_memory_fraction: Option<f64>,
    /// Whether memory is taken when it is needed (true, which is what absent means) or all at once. What is taken goes
    /// back when the session ends.
    pub allow_growth: Option<bool>,
    /// The cards to use, by visible number, in the order in which they become GPU 0, 1, …: `"1,0"`. Empty means all.
    pub visible_device_list: String,
    /// The most bytes that each GPU's tensors may take, by the number of the card in the list above.
    pub memory_limits: BTreeMap<usize, u64>,
    /// Several GPUs on one card: the limit of each in bytes, by the number of the card in the list above.
    pub virtual_devices: BTreeMap<usize, Vec<u64>>,
    /// Matrix products and convolutions of `float` keep all their bits instead of using TF32.
    pub full_precision: bool,
    /// Steps are not captured as CUDA graphs but enqueued kernel by kernel, for comparison.
    pub no_capture: bool,
    /// Nodes are not fused but run one by one, for comparison.
    pub no_fusion: bool,
    /// Where compiled kernels are kept between runs of the program; in the user's cache folder if absent.
    pub kernel_cache: Option<std::path::PathBuf>,
}

/// Details of one CPU device.
#[derive(Clone, Debug, Default)]
pub struct DevicePlan {
    /// The cores its threads keep to; empty means all, or, on a machine with several NUMA nodes, a share of one node if no
    /// device is told its cores. The thread that calls `run` is not bound.
    pub cores: Vec<usize>,
    /// The most bytes its tensors may take.
    pub memory_limit: Option<u64>,
}

/// How one run differs from others.
#[derive(Clone, Default)]
pub struct RunOptions {
    /// The run fails with `DeadlineExceeded` after this long, and says what it waited for.
    pub timeout: Option<Duration>,
    /// Records every node; see [`crate::RunMetadata::trace`].
    pub trace: bool,
    /// Cancelling this token stops the run.
    pub cancel: Option<Arc<CancelToken>>,
}
