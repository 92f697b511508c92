//! The ops: what each one is, how it is differentiated, and how it is computed, one op (or tight family) per file.
//!
//! [`TABLE`] is the list of all of them; everything else follows from it: what a graph may contain ([`registry`]), which
//! device can run what ([`find_kernel`]), which kernel the executor calls. A kernel sees its step only through
//! [`KernelCtx`] and the traits in it, never the runtime itself.

mod cancel;
mod cuda;
#[cfg(test)]
mod expression_tests;
mod holdings;
mod host;
mod kernel;
mod memory;
mod op;
mod resource;
mod step;
#[cfg(test)]
mod testing;
mod widened;

pub mod array;
pub mod collective;
pub mod comm;
pub mod flow;
pub mod fused;
pub mod io;
pub mod math;
pub mod nn;
pub mod optim;
pub mod queue;
pub mod random;
pub mod sparse;
pub mod state;
pub mod string;
pub mod summary;
pub mod table;
pub mod undone;

pub use cancel::{CancelToken, Registration};
pub use fused::apply_all::{UpdateLayout, update_layout};
pub use host::host_arguments;
pub use kernel::{AsyncKernel, Done, Kernel, KernelCtx, KernelInit, Outcome, Value};
pub use op::{
    Cost, DTypeSet, Gpu, KernelDef, KernelMaker, Op, TABLE, find_kernel, find_op, graph, kernels_of, registry,
};
pub use resource::{Resource, ResourceStore, Touched, VariableCell, record_variables};
pub use step::{FrameIteration, Received, Rendezvous, RendezvousKey, StepServices};
