//! Runs graphs in one process: plans are compiled once per signature and run many times.
//!
//! [`Session`] prunes, places and partitions a graph with `kolo-graph`, compiles each partition into a plan, and runs
//! steps: nodes count their pending inputs and run when none is left. It cannot name gRPC; a cluster uses the same
//! executor with another [`kolo_ops::Rendezvous`], and a [`Session`] reaches it through a [`RemoteSession`].

mod capture;
pub mod collective;
mod compile;
mod config;
mod devices;
mod executor;
mod fusion;
mod planner;
mod session;
pub mod testing;
mod trace;

pub use capture::split::{CaptureReport, SplitNode};
pub use config::{DevicePlan, GpuOptions, RunOptions, SessionConfig};
pub use devices::host::Host;
pub use executor::frame_id::FrameIds;
pub use executor::inter_pool::InterPool;
pub use executor::rendezvous::{LocalRendezvous, StepRendezvous};
pub use executor::step::{NodeWait, PartView};
pub use fusion::passes as fusion_passes;
pub use planner::{PassReport, PlacementReport, PlacementRow};
pub use session::local_view::LocalView;
pub use session::remote::{RemoteRun, RemoteSession};
pub use session::task::{StepKind, TaskGraph, TaskSession, TaskStep};
pub use session::threads::DeviceThreads;
pub use session::{Callable, PartialRun, RunMetadata, Session};
pub use trace::{NodeTrace, StepTrace};
