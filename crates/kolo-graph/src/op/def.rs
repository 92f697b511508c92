//! What an op is, apart from how it is computed: its signature, the shapes of its outputs, its gradient.

use kolo_core::{PartialShape, Result};

use crate::{
    BatchNormHalf, Effects, Elementwise, HalfSafety, HostRule, InferCtx, Operation, Output, SplitRule, TransferEnd,
    Update, Work,
};

/// An op's description. Static: `kolo-ops` keeps one per op in its table.
#[derive(Clone, Copy)]
pub struct OpDef {
    /// TensorFlow's name for it.
    pub name: &'static str,
    /// `(inputs) -> (outputs) ; attrs`, for example
    /// `(a:T, b:T) -> (product:T) ; transpose_a:bool=false, T:type{float,double}`. See [`crate::Signature`].
    pub signature: &'static str,
    /// The shapes of the outputs, one each.
    pub shape: ShapeFn,
    /// How it is differentiated.
    pub gradient: Gradient,
    /// Has state or effects, in TensorFlow's table: never folded, merged or moved.
    pub stateful: bool,
    /// What it does to state, its own or others'.
    pub effects: Effects,
    /// Where it runs if it is placed on a device with memory of its own.
    pub host: HostRule,
    /// The arguments, by name, that are in host memory wherever it runs: shapes, axes, numbers that a kernel reads at once or
    /// gives. (Strings and handles always are.)
    pub host_args: &'static [&'static str],
    /// What it looks at.
    pub work: Work,
    /// How each element of its output is made, if it is made of those at the same place alone.
    pub elementwise: Option<Elementwise>,
    /// By which rule it updates a variable, if it is an optimizer's update.
    pub update: Option<Update>,
    /// Whether its floats may be halves.
    pub half: HalfSafety,
    /// How its output is split when its inputs are; see [`OpDef::split_rule`].
    pub split: SplitRule,
    /// Which end of a cut edge it is, if it is one.
    pub transfer: Option<TransferEnd>,
    /// The attribute that names the group of ranks in which it meets its like in other processes, if it is a collective.
    pub group: Option<&'static str>,
    /// The attribute that counts its inputs, if each output is made of the input at its place alone, so that two nodes that are alike
    /// otherwise can be one with the inputs of both.
    pub joined_by: Option<&'static str>,
    /// A collective whose outputs are the same on every rank of its group.
    pub alike_on_all_ranks: bool,
    /// Which half of a batch normalisation it is, if it is one.
    pub batch_norm: Option<BatchNormHalf>,
    /// The handles that it takes may be of any device, since it never looks at what is behind them.
    pub handles_from_anywhere: bool,
    /// May receive a reference to a variable without a value.
    pub allows_uninitialized_input: bool,
    /// What it does to the control flow of a step.
    pub flow: Flow,
    /// What its resource output refers to.
    pub handle: HandleRule,
}

impl OpDef {
    /// Neutral values, to be overridden with `..OpDef::BASE`. The gradient is [`Gradient::Unstated`], which the op
    /// table's own test refuses.
    pub const BASE: OpDef = OpDef {
        name: "",
        signature: "() -> ()",
        shape: crate::op::shape_fns::unknown,
        gradient: Gradient::Unstated,
        stateful: false,
        effects: Effects::None,
        host: HostRule::OnDevice,
        host_args: &[],
        work: Work::Computes,
        elementwise: None,
        update: None,
        half: HalfSafety::Unstated,
        split: SplitRule::Unstated,
        transfer: None,
        group: None,
        joined_by: None,
        alike_on_all_ranks: false,
        batch_norm: None,
        handles_from_anywhere: false,
        allows_uninitialized_input: false,
        flow: Flow::Plain,
        handle: HandleRule::Forward,
    };
}

/// Computes the shapes of all outputs from what is known of the inputs.
pub type ShapeFn = fn(&InferCtx<'_>) -> Result<Vec<PartialShape>>;

/// Adds the gradients of an op's inputs to the graph, given those of its outputs (`None` where no gradient arrives).
/// Returns one entry per input, `None` where there is none to give.
pub type GradientFn = for<'g> fn(Operation<'g>, &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>>;

/// How an op is differentiated. Stated, never assumed.
#[derive(Clone, Copy)]
pub enum Gradient {
    /// Nobody has said; an error when it is asked for.
    Unstated,
    /// There is none, and why. Gradients stop here silently, as for `ArgMax`.
    None(&'static str),
    /// There may be one, but asking for it is an error that says why.
    Refused(&'static str),
    /// Dense gradients in, any out.
    Rule(GradientFn),
    /// The gradient of input 0 is the gradient of output 0, unchanged, sparse or dense. Other inputs have none.
    Same,
    /// Control flow; the gradient rewrite itself knows it.
    Flow,
}

/// The gradient of one input.
#[derive(Clone, Copy)]
pub enum Grad<'g> {
    /// As large as the input.
    Dense(Output<'g>),
    /// Only some rows differ from zero.
    Slices(IndexedSlices<'g>),
}

impl<'g> From<Output<'g>> for Grad<'g> {
    fn from(output: Output<'g>) -> Grad<'g> {
        Grad::Dense(output)
    }
}

/// Rows of a tensor that is zero elsewhere; the same row may occur more than once and then counts as the sum.
#[derive(Clone, Copy)]
pub struct IndexedSlices<'g> {
    /// `[n, …]`: the rows.
    pub values: Output<'g>,
    /// `[n]`: which rows they are.
    pub indices: Output<'g>,
    /// The shape of the whole, as an integer vector.
    pub dense_shape: Output<'g>,
}

/// What an op does to the control flow of a step; the executor acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Runs when all inputs are there, and is dead if one is.
    Plain,
    /// `Switch`, `RefSwitch`: one output is dead.
    Switch,
    /// `Merge`, `RefMerge`: runs when one live input is there.
    Merge,
    /// `Enter`, `RefEnter`: into a loop.
    Enter,
    /// `Exit`, `RefExit`: out of it.
    Exit,
    /// `NextIteration`, `RefNextIteration`: around once more.
    NextIteration,
    /// `LoopCond`: the predicate of a loop.
    LoopCond,
    /// `ControlTrigger`: runs even if its control inputs are dead.
    ControlTrigger,
    /// `_Send`, `_Recv` and their like, which pass deadness on.
    Transfer,
}

/// Where the element type and shape behind a resource output come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandleRule {
    /// Attributes `dtype` and `shape`, as for `VarHandleOp`.
    FromAttrs,
    /// Attributes `dtype` and `element_shape`, as for `TensorArrayV3`.
    FromElementAttrs,
    /// The same as of the first resource input, if there is one.
    Forward,
}
