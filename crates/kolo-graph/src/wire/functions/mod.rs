//! Functions: calls of them, and control flow that names them, written out as plain nodes.
//!
//! ```text
//!   y = PartitionedCall(x, f=double)         y/add = Add(x, x);  y = Identity(y/add)
//!   y = If(p, x, then_branch=f, …)           Switch(x, p), both bodies, Merge; y = Identity(Merge)
//!   y = While(x, cond=c, body=b)             Enter, Merge, the condition, LoopCond, Switch, the body, NextIteration, Exit
//!   y = Case(i, x, branches=[f, g, …])       a Switch for each branch, all bodies, Merge
//! ```
//!
//! [`lower`] does this on the message, before anything is added to a graph, so that everything after it (shapes,
//! gradients, placement, partitioning, the executor) sees ordinary nodes. It follows TensorFlow's own lowering:
//!
//! - The nodes of a body are named after the call, `call/node`, and ask for the call's device where they leave it open.
//! - A node of a body without inputs waits for the call's control inputs, or for the branch or iteration that it is in.
//! - What a body must run for its effects (`control_ret`) has run before anybody sees the call's outputs.
//! - The call's own name stays: an `Identity` for one output, an `IdentityN` for several, a `NoOp` for none. The
//!   consumers of several outputs take them from the body, so that each waits for its own.
//!
//! [`library`] finds functions and counts their arguments, `body` writes a body in place of a call, `flow` writes
//! branches and loops, `gradient` the gradient of a function.

mod body;
mod flow;
mod gradient;
mod library;
mod lower;

pub(crate) use library::{Functions, join};
pub(crate) use lower::{Flat, LowerOptions, lower};

/// Marks the node that stands for a call with several outputs, so that feeding it can be refused: its consumers take
/// their inputs from the function's body.
pub(crate) const CALL_MARK: &str = "_kolo_call";

/// Whether this op runs functions that an attribute names. Importing a graph writes them out; one that was kept
/// ([`super::graph::Calls::Keep`]) cannot run.
pub(crate) fn is_call(op: &str) -> bool {
    matches!(
        op,
        "PartitionedCall"
            | "StatefulPartitionedCall"
            | "If"
            | "StatelessIf"
            | "While"
            | "StatelessWhile"
            | "Case"
            | "StatelessCase"
            | "SymbolicGradient"
    )
}
