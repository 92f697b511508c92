//! Training on a cluster, as graphs describe it: which task holds which variable, and how the updates of many workers meet.

mod device_setter;
mod partitioned;

pub use device_setter::{Balance, PS_OPS, PsStrategy, ReplicaDeviceSetter, ps_bytes};
pub(crate) use partitioned::save_slice;
pub use partitioned::{LookupStrategy, PartitionedVariable};
