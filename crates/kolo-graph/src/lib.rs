//! Describes graphs and plans how to run them. Pure: no device, thread, clock, file or socket is within reach.
//!
//! ```text
//! describe/  what a program calls: Graph, Output, Variable, loops and branches
//! op/        what an op is: OpDef, its signature, shapes, facts
//! grad/      gradients, a rewrite that adds nodes to a description
//! nodes.rs   the same graph as plain data, which all that follows works on
//! plan/      from a graph and a request to parts, by one list of passes: prune, place, partition
//! rewrite/   how a pass changes a graph: the Rewriter, its check, loop frames, branches, order, text
//! wire/      GraphDef, in and out
//! ```
//!
//! The table of all ops is `kolo-ops`'s.

mod describe;
mod grad;
mod nodes;
mod op;
mod plan;
pub mod rewrite;
#[cfg(test)]
mod testing;
pub mod wire;

pub use describe::{
    Graph, Initializer, IntoOutput, OpBuilder, Operation, Origin, Output, Variable, VariableBuilder, VariableKind,
    VariableRecord, WhileOptions,
};
pub use grad::{
    GradParts, GradientOptions, InputName, Loss, OutputName, Region, Slot, TrainedVariable, Training, VariableUpdate,
    gradients, gradients_with,
};
pub use nodes::{Endpoint, Location, Node, NodeId, Nodes, OutputInfo};
pub use op::{
    ArgDef, ArgType, AttrDef, AttrKind, AttrValue, Attrs, BatchNormHalf, Combine, Effects, Elements, Elementwise, Flow,
    Grad, Gradient, GradientFn, HalfSafety, HandleRule, HostRule, IndexedSlices, InferCtx, Literal, OpDef, OpRegistry,
    OwnedState, ShapeFn, ShapesFit, Signature, SplitRule, TransferEnd, UnknownOp, Update, UpdateRule, Work, shape_fns,
};
pub use plan::{
    ClientEnds, CostModel, DeviceInfo, Ends, FallbackCost, Granularity, ImplicitCopies, KernelSupport, Link, LogFormat,
    LoopControl, Order, Partition, PartitionOptions, PlaceOptions, Placed, PlacedGraph, Placement, PlacementRules,
    Plan, PlanRequest, Policy, Pruned, Request, Rule, RuleRow, RuleTable, Transfer, TransferRound, colocation_leaders,
    holds_state, is_variable, log_lines, moved_bytes, partition, place, plan, price_fallbacks, prune, state_stays,
};
pub use rewrite::{
    BranchNode, Conditional, Frame, FrameId, Frames, LossNodes, Outlined, Pass, PassContext, PassRecord, Rewriter,
    Stage, TrainingNodes, VariableNodes, frames, order_collectives, pipeline, rewrite_part, skipped_nodes,
    topological_order,
};
