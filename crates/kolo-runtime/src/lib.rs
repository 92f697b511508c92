//! Runs graphs in one process: plans are compiled once per signature and run many times.
//!
//! [`Session`] prunes, places and partitions a graph with `kolo-graph`, compiles each partition into a plan, and runs
//! steps: nodes count their pending inputs and run when none is left. It cannot name gRPC; a cluster uses the same
//! executor with another [`kolo_ops::Rendezvous`].

mod config;
mod devices;
mod executor;
mod host;
mod inter_pool;
mod layout;
mod links;
mod planner;
mod rendezvous;
mod session;
mod threads;
mod trace;

pub use config::{DevicePlan, GpuOptions, RunOptions, SessionConfig};
pub use host::Host;
pub use inter_pool::InterPool;
pub use planner::{PlacementReport, PlacementRow};
pub use rendezvous::LocalRendezvous;
pub use session::{Callable, PartialRun, RunMetadata, Session};
pub use threads::DeviceThreads;
pub use trace::{NodeTrace, StepTrace};
