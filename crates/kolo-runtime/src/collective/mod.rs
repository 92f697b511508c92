//! Collectives: what the ranks of a group compute together, such as the sum of their gradients.
//!
//! [`Communicator`] has them as plain calls on tensors, which return when they are done. [`Group`] runs the same calls on a thread
//! of its own, one after the other, while the caller goes on; the nodes of a graph reach it by its name
//! ([`crate::SessionConfig::groups`]), so a group outlives steps and sessions.
//!
//! Ranks of one host share memory (`shared.rs`). Others send messages over a [`Transport`], by one of several algorithms
//! (`algorithm/`), which also runs between threads ([`InProcess`]) and over MPI ([`MpiRanks`]).
//!
//! Kernels of devices exchange data by themselves where the devices can (`on_devices.rs`).
//!
//! Before any data of a call is used, every rank compares what all others call: the how manieth call it is, what is done, dtype,
//! shapes and name. A difference ends the group with an error on every rank that shows both.

mod algorithm;
mod communicator;
mod cost_table;
mod diagnosis;
mod group;
mod hosts;
mod hosts_meet;
mod in_process;
mod meter;
mod mpi;
mod on_devices;
mod pieces;
mod record;
mod shared;
mod signature;
mod training;
mod transport;
mod uneven;
mod vector;
mod waiting;

pub use algorithm::choice::{Algorithm, Choice, Costs};
pub use communicator::{Communicator, CommunicatorOptions};
pub use cost_table::CostTable;
pub use diagnosis::{RankFinding, WaitCause, diagnose};
pub use group::Group;
pub use hosts::{Layout, own_host};
pub use hosts_meet::{file_at, place_of};
pub use in_process::{InProcess, SentCounts};
pub use kolo_device::cpu::reduce::ReduceOp;
pub use kolo_device::mpi::MpiKind;
pub use kolo_device::shared_group::{
    Activity, BoardOf, CallNote, Condition, RankBoard, RankNote, RankRecord, WaitLimits, now,
};
pub use kolo_ops::collective::{CollectiveCall, CollectiveDone, CollectiveGroup, CollectiveKind, Groups, Root, call};
pub use meter::ExchangedSoFar;
pub use mpi::MpiRanks;
pub(crate) use on_devices::DeviceExchanges;
pub use record::{CallState, Doing, RankState, Recorder};
pub use training::Training;
pub use transport::{Check, Incoming, Outgoing, Transport};
pub use uneven::{all_say, joined_rows, only_tensor, row_numbers};
