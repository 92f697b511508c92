//! Describing: what a program calls to build a graph. Nodes are checked and inferred as they are added.

pub(crate) mod control_flow;
pub(crate) mod graph;
mod operators;
mod origin;
mod output;
pub(crate) mod request;
mod variable;

pub use control_flow::WhileOptions;
pub use graph::Graph;
pub use operators::IntoOutput;
pub use origin::Origin;
pub use output::{OpBuilder, Operation, Output};
pub use variable::{Initializer, Variable, VariableBuilder, VariableKind, VariableRecord};
