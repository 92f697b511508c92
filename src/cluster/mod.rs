//! Training on a cluster, as graphs describe it: which task holds which variable, and how the updates of many workers meet.
//!
//! [`ReplicaDeviceSetter`] puts variables on parameter servers and everything else on the worker. [`UpdateMode`] is the choice
//! of how workers update them; each choice is an optimizer around another one:
//!
//! ```text
//! async_replicas.rs  each when it likes; how old gradients are is counted, and may be bounded
//! sync_replicas.rs   all together, as TensorFlow's SyncReplicasOptimizer
//! hybrid.rs          all together as long as they keep up
//! average.rs         each on its own, and the mean of the variables now and then
//! meeting.rs         what the last two share: a barrier, and stores for what workers bring to it
//! ```
//!
//! All of it is graphs and sessions: it runs on one process' devices as on a cluster's.

mod async_replicas;
mod average;
mod chief;
mod device_setter;
mod hybrid;
mod meeting;
mod mode;
mod partitioned;
mod place;
mod saved;
mod sync_replicas;
#[cfg(test)]
mod testing;

pub use async_replicas::{AsyncReplicas, AsyncReplicasHook, WorkerStaleness};
pub use average::ParameterAveraging;
pub use device_setter::{Balance, PS_OPS, PsStrategy, ReplicaDeviceSetter, ps_bytes};
pub use hybrid::{HybridReplicas, Late};
pub use meeting::{BarrierState, LateGradient, MeetingHook, WorkerState};
pub use mode::{Replicas, UpdateMode};
pub use partitioned::{LookupStrategy, PartitionedVariable};
pub(crate) use saved::saved_as;
pub use sync_replicas::{SyncReplicas, SyncReplicasHook};
