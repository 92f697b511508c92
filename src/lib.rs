//! Kolo runs and trains dataflow graphs over many devices.
//!
//! ```
//! use kolo::{Session, Tensor};
//!
//! let g = kolo::graph();
//! let x = g.placeholder::<f32>("x", [None, Some(2)]);
//! let w = g.variable("w", [[1.0f32], [2.0]]);
//! let y = kolo::ops::matmul(x, w.read()) + 0.5;
//! let init = g.global_variables_initializer();
//!
//! let session = Session::new(&g)?;
//! session.run_op(init)?;
//! let out = session.run(&[y], &[(x, Tensor::from([[3.0f32, 4.0]]))], &[])?;
//! assert_eq!(out, [Tensor::from([[11.5f32]])]);
//! # Ok::<(), kolo::Error>(())
//! ```
//!
//! A [`Graph`] is described once; a [`Session`] prunes, places, partitions and compiles it for its devices and runs it.
//! [`gradients`] adds what training needs. `ARCHITECTURE.md` tells the story of a step.

mod cli;
pub mod cluster;
pub mod data;
pub mod nn;
pub mod ops;
pub mod optim;
pub mod parallel;
pub mod place;
pub mod recipes;
pub mod saved_model;
pub mod strategy;
pub mod train;

pub use cli::main as command_line;
pub use kolo_core::{
    Code, DType, DeviceName, DeviceSpec, Dim, Element, Error, Memory, PartialShape, Result, Shape, Tensor,
};
pub use kolo_device::cuda;
pub use kolo_device::{CpuConfig, CpuDevice, Device, DeviceAttributes, MemoryStats, NullDevice};
pub use kolo_graph::{
    AttrValue, CostModel, Endpoint, FallbackCost, Grad, GradientOptions, Graph, IndexedSlices, Initializer, Link, Node,
    NodeId, Nodes, Operation, Origin, Output, Pass, PassContext, PlacementRules, Policy, Rewriter, Rule, RuleRow,
    RuleTable, Stage, Variable, VariableKind, WhileOptions, gradients, gradients_with, wire,
};
pub use kolo_net::limits::MessageLimits;
pub use kolo_net::{
    ClusterSpec, Connect, Durability, Server, ServerConfig, TaskName, TfConfig, agents, doctor, ranks, tls,
};
pub use kolo_ops::io::FileAccess;
pub use kolo_ops::{CancelToken, graph};
pub use kolo_runtime::{
    Callable, DevicePlan, DeviceThreads, GpuOptions, Host, LocalView, NodeTrace, PartialRun, PassReport,
    PlacementReport, PlacementRow, RemoteRun, RemoteSession, RunMetadata, RunOptions, Session, SessionConfig,
    StepTrace,
};

/// The programs of these pages are compiled and run.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../docs/from-horovod.md")]
    struct FromHorovod;
    #[doc = include_str!("../docs/from-ddp.md")]
    struct FromDdp;
    #[doc = include_str!("../docs/from-tf-distribute.md")]
    struct FromTfDistribute;
}
