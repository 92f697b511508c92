//! Runs graphs in one process: plans are compiled once per signature and run many times.
//!
//! [`Session`] prunes, places and partitions a graph with `kolo-graph`, compiles each partition into a plan, and runs
//! steps: nodes count their pending inputs and run when none is left. It cannot name gRPC; a cluster uses the same
//! executor with another [`kolo_ops::Rendezvous`], and a [`Session`] reaches it through a [`RemoteSession`].

mod compiled;
mod config;
mod devices;
mod executor;
mod fusion;
mod host;
mod inter_pool;
mod layout;
mod links;
mod local;
mod local_view;
mod planner;
mod remote;
mod rendezvous;
mod session;
mod task;
pub mod testing;
mod threads;
mod trace;
mod wanted;

pub use config::{DevicePlan, GpuOptions, RunOptions, SessionConfig};
pub use executor::frame_id::FrameIds;
pub use executor::split::{CaptureReport, SplitNode};
pub use executor::step::NodeWait;
pub use fusion::passes as fusion_passes;
pub use host::Host;
pub use inter_pool::InterPool;
pub use local_view::LocalView;
pub use planner::{PassReport, PlacementReport, PlacementRow};
pub use remote::{RemoteRun, RemoteSession};
pub use rendezvous::{LocalRendezvous, StepRendezvous};
pub use session::{Callable, PartialRun, RunMetadata, Session};
pub use task::{StepKind, TaskGraph, TaskSession, TaskStep};
pub use threads::DeviceThreads;
pub use trace::{NodeTrace, StepTrace};
