//! Training on a cluster, as graphs describe it: which task holds which variable, and how the updates of many workers meet.

mod chief;
mod device_setter;
mod partitioned;
mod place;
mod sync_replicas;
#[cfg(test)]
mod testing;

pub use device_setter::{Balance, PS_OPS, PsStrategy, ReplicaDeviceSetter, ps_bytes};
pub(crate) use partitioned::save_slice;
pub use partitioned::{LookupStrategy, PartitionedVariable};
pub use sync_replicas::{SyncReplicas, SyncReplicasHook};
