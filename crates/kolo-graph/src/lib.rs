//! Describes graphs and plans how to run them. Pure: no device, thread, clock, file or socket is within reach.
//!
//! [`Graph`] is what a program describes; [`Nodes`] is the same as plain data, which planning works on: [`plan`](plan()) runs
//! one list of passes, among them `prune`, which keeps what the fetches need, `place`, which gives every node a device, and
//! `partition`, which cuts the graph at device borders. [`gradients`] is a rewrite that adds nodes. [`OpDef`] says what an op is; the table of all ops is
//! `kolo-ops`'s.

mod attr;
mod branches;
mod client;
mod colocate;
mod control_flow;
mod control_loops;
mod cost;
mod draft;
mod dump;
mod facts;
mod fallback;
mod frames;
mod grad;
mod graph;
mod infer;
mod nodes;
mod op_def;
mod operators;
mod order;
mod origin;
mod output;
mod partition;
mod place;
mod placed;
mod plan;
mod prune;
mod registry;
mod request;
pub mod rewrite;
mod rounds;
mod rules;
pub mod shape_fns;
mod signature;
#[cfg(test)]
mod testing;
mod variable;
pub mod wire;

pub use attr::{AttrValue, Attrs};
pub use branches::{BranchNode, skipped_nodes};
pub use client::ClientEnds;
pub use colocate::{colocation_leaders, holds_state, is_variable};
pub use control_flow::WhileOptions;
pub use cost::{CostModel, Link};
pub use facts::{
    Combine, Effects, Elements, Elementwise, HalfSafety, HostRule, Literal, OwnedState, ShapesFit, SplitRule,
    TransferEnd, Update, UpdateRule, Work,
};
pub use fallback::{FallbackCost, price_fallbacks};
pub use frames::{Frame, FrameId, Frames, frames};
pub use grad::{GradientOptions, gradients, gradients_with};
pub use graph::Graph;
pub use infer::InferCtx;
pub use nodes::{Endpoint, Location, Node, NodeId, Nodes, OutputInfo};
pub use op_def::{Flow, Grad, Gradient, GradientFn, HandleRule, IndexedSlices, OpDef, ShapeFn};
pub use operators::IntoOutput;
pub use order::topological_order;
pub use origin::Origin;
pub use output::{OpBuilder, Operation, Output};
pub use partition::{Granularity, LoopControl, Partition, PartitionOptions, Transfer, moved_bytes, partition};
pub use place::{DeviceInfo, KernelSupport, Order, PlaceOptions, Placement, Policy, place, state_stays};
pub use placed::{LogFormat, Placed, PlacedGraph, Rule, log_lines};
pub use plan::{Ends, ImplicitCopies, Plan, PlanRequest, plan};
pub use prune::{Pruned, Request, prune};
pub use registry::OpRegistry;
pub use rewrite::{Pass, PassContext, PassRecord, Rewriter, Stage, pipeline};
pub use rounds::TransferRound;
pub use rules::{PlacementRules, RuleRow, RuleTable};
pub use signature::{ArgDef, ArgType, AttrDef, AttrKind, Signature};
pub use variable::{Initializer, Variable, VariableBuilder, VariableKind, VariableRecord};
