//! Facts about an op that planning and executing ask for. Each is stated in the op's own file, as a field of its [`OpDef`], so
//! that nobody else has to know ops by their names.
//!
//! [`OpDef`]: crate::OpDef

use crate::{AttrValue, Attrs, Endpoint, Node, OpDef};

/// What an op does besides computing its outputs from the values of its inputs. `OpDef::stateful` is TensorFlow's word for
/// some of this; it is on the wire, and says neither what is changed nor whether anything is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effects {
    /// Nothing: the same inputs give the same outputs, and nobody can tell how often it ran.
    None,
    /// It is a piece of state, and its output refers to that by reference or handle.
    Owns(OwnedState),
    /// Reads the values of the variables that its references and handles refer to.
    Reads,
    /// Looks at variables without reading their values: whether there is one, or what shape it has.
    Inspects,
    /// Writes to the variables that its references and handles refer to, all of them; it may read them, too.
    Writes,
    /// Makes, reads, changes or removes other state: queues, tables, stacks, readers.
    Uses,
    /// Passes a reference or a handle on and leaves what is behind it alone.
    Forwards,
    /// Draws numbers from a generator of its own, which moves on.
    Random,
    /// Reaches outside of the step's tensors: files, the terminal, the clock, other devices, the step itself.
    Outside,
}

/// What an op owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnedState {
    /// A variable: one tensor, which outlives its steps.
    Variable,
    /// Anything else: queues, tables, readers, variables of one step.
    Other,
}

impl Effects {
    /// Whether what it is given by reference or handle is the same afterwards, as far as it is a variable.
    pub const fn leaves_variables(self) -> bool {
        matches!(self, Effects::Reads | Effects::Inspects)
    }

    /// Whether its kernel leaves everything but its outputs as it is, so that it may be stopped in the middle. A generator takes its
    /// part of the stream of numbers before it draws any.
    pub const fn only_writes_outputs(self) -> bool {
        matches!(self, Effects::None | Effects::Reads | Effects::Random)
    }

    /// Whether all it does to state is to name, read or write variables: then it can be repeated by a replay of what it
    /// enqueued, as long as its variables are where they were.
    pub const fn is_about_variable_values(self) -> bool {
        matches!(self, Effects::Owns(OwnedState::Variable) | Effects::Reads | Effects::Writes)
    }

    /// Whether anybody but the user of its outputs can tell that it ran.
    pub const fn is_seen_elsewhere(self) -> bool {
        matches!(self, Effects::Writes | Effects::Uses | Effects::Outside)
    }
}

/// Where an op runs that is placed on a device with memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRule {
    /// On the device.
    OnDevice,
    /// On the host if all it takes and gives there is `int32`, strings or handles, and otherwise on the device: integers of
    /// that size are mostly shapes and indices, which the host reads at once. As in TensorFlow.
    SmallIntegers,
    /// Always on the host, on host memory.
    Always,
}

/// What an op looks at to give its outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The elements of its inputs, or something outside; kernels of a device do work.
    Computes,
    /// Nothing: its outputs are its inputs one by one, or the values of variables, as they are.
    PassesOn,
    /// Nothing: its output is its first input under another shape or type, in the same memory.
    Reshapes,
    /// The shapes of its inputs alone; it gives whole numbers of the host.
    Measures,
    /// The shape of its input alone: as many elements, each of which is known ahead.
    FillsLike,
    /// Its attribute `value`.
    Constant,
    /// Nothing: it has no value unless a step feeds it.
    Placeholder,
}

/// One end of an edge that was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferEnd {
    /// Sends from the memory of its device.
    Send,
    /// Sends from host memory, whatever its device is.
    HostSend,
    /// Receives into the memory of its device.
    Recv,
    /// Receives into host memory, whatever its device is.
    HostRecv,
}

impl TransferEnd {
    /// Whether it takes a value away.
    pub const fn sends(self) -> bool {
        matches!(self, TransferEnd::Send | TransferEnd::HostSend)
    }

    /// Whether it brings a value.
    pub const fn receives(self) -> bool {
        !self.sends()
    }
}

impl Node {
    /// The value that its only output is, under another name: an `Identity` and its like. If that is a reference to a
    /// variable, the output is read from it.
    pub fn passed_on(&self) -> Option<Endpoint> {
        match self.inputs[..] {
            [at] if self.def.work == Work::PassesOn && self.def.effects == Effects::None => Some(at),
            _ => None,
        }
    }

    /// Whether it sends a value to another part, or to another memory.
    pub fn sends(&self) -> bool {
        self.def.transfer.is_some_and(TransferEnd::sends)
    }

    /// Whether it receives a value from another part, or from another memory.
    pub fn receives(&self) -> bool {
        self.def.transfer.is_some_and(TransferEnd::receives)
    }
}

/// An op that makes each element of its output from the elements of its inputs at the same place. A GPU's kernel, alone or
/// fused with others, is made from the expression, and the CPU's loop is tested against it.
///
/// The expression is C: `x0`, `x1`, … are the inputs, in the type `W` that is computed in (the inputs' own, `float` for
/// halves); `p0` is a float. It has numbers (`(W)0.5`), `? :`, `||`, `&&`, `!`, comparisons, `+ - * /` and calls of C's
/// functions of one or two numbers, of `is_nan`, `smaller`, `larger` and `gelu_grad`.
///
/// ```
/// use kolo_graph::{Elements, Elementwise};
///
/// const LEAKY_RELU: Elementwise = Elementwise::new("x0 > (W)0 ? x0 : (W)p0 * x0", Elements::Floats).parameter("alpha");
/// assert_eq!(LEAKY_RELU.text(1), Some("x0 > (W)0 ? x0 : (W)p0 * x0"));
/// assert_eq!(LEAKY_RELU.text(2), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elementwise {
    text: &'static str,
    /// What elements the expression is for; ops may have kernels for others.
    pub elements: Elements,
    /// How the shapes of the inputs must fit.
    pub shapes: ShapesFit,
    /// The float attribute that is `p0`.
    pub parameter: Option<&'static str>,
    /// With this attribute it is something else.
    pub unless: Option<(&'static str, Literal)>,
}

/// The elements that an expression is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// Floats of all sizes.
    Floats,
    /// Floats and integers.
    Numbers,
    /// Numbers and truth values.
    Plain,
    /// Truth values alone.
    Truths,
}

/// How the shapes of an elementwise op's inputs must fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapesFit {
    /// They are broadcast against each other.
    Broadcast,
    /// They are the same.
    Same,
    /// The second is a vector along the last dimension of the first.
    Bias,
    /// As the op's kernel says.
    Own,
}

/// The value of an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Literal {
    /// A truth value.
    Bool(bool),
    /// A string.
    Str(&'static str),
}

/// The text of a sum of as many inputs as there are.
const SUMS: [&str; 4] = ["x0", "x0 + x1", "x0 + x1 + x2", "x0 + x1 + x2 + x3"];

impl Elementwise {
    /// The most inputs an expression has.
    pub const MAX_INPUTS: usize = SUMS.len();

    /// An expression of inputs that are broadcast against each other.
    pub const fn new(text: &'static str, elements: Elements) -> Elementwise {
        Elementwise { text, elements, shapes: ShapesFit::Broadcast, parameter: None, unless: None }
    }

    /// The sum of all inputs, which have the same shape.
    pub const fn sum() -> Elementwise {
        Elementwise::new("", Elements::Numbers).shapes(ShapesFit::Same)
    }

    /// The same, of inputs whose shapes fit so.
    pub const fn shapes(self, shapes: ShapesFit) -> Elementwise {
        Elementwise { shapes, ..self }
    }

    /// The same, where `p0` is this attribute.
    pub const fn parameter(self, attr: &'static str) -> Elementwise {
        Elementwise { parameter: Some(attr), ..self }
    }

    /// The same, for nodes whose attribute `attr` is not `value`.
    pub const fn unless(self, attr: &'static str, value: Literal) -> Elementwise {
        Elementwise { unless: Some((attr, value)), ..self }
    }

    /// The expression of so many inputs; `None` if it is not of so many.
    pub fn text(&self, n_inputs: usize) -> Option<&'static str> {
        match self.text {
            "" => SUMS.get(n_inputs.checked_sub(1)?).copied(),
            text => (n_used(text) == n_inputs).then_some(text),
        }
    }

    /// Whether it holds for a node with these attributes.
    pub fn holds_for(&self, attrs: &Attrs) -> bool {
        let Some((attr, value)) = self.unless else { return true };
        match (attrs.find(attr), value) {
            (Some(AttrValue::Bool(found)), Literal::Bool(value)) => *found != value,
            (Some(AttrValue::Str(found)), Literal::Str(value)) => &found[..] != value.as_bytes(),
            _ => true,
        }
    }
}

/// How many inputs an expression names.
fn n_used(text: &str) -> usize {
    (0..Elementwise::MAX_INPUTS).rev().find(|i| text.contains(&format!("x{i}"))).map_or(0, |i| i + 1)
}

/// An op that is an optimizer's update of a variable and its slots.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// What is done to one element.
    pub rule: &'static UpdateRule,
    /// The gradient is of some rows, and their indices are the input after it.
    pub is_sparse: bool,
}

/// What an optimizer does to one element of a variable and of its slots. Kernels for GPUs are made from the text, and the CPU's
/// loop is tested against it.
///
/// The text is C: it assigns to `v`, the variable's element, and `s0`, `s1`, … the slots', given `g`, the gradient's, and
/// `c3`, … the scalars by their places among the inputs of the dense form. Variable and slots are the first inputs.
#[derive(Clone, Copy, Debug)]
pub struct UpdateRule {
    /// Its name, among all rules.
    pub name: &'static str,
    /// How many slots the variable has.
    pub slots: usize,
    /// Which input the gradient is, in the dense form.
    pub grad: usize,
    /// Which inputs are scalars, in the dense form.
    pub scalars: &'static [usize],
    /// Those of the scalars that are `int64`, not numbers of the variable's type.
    pub integers: &'static [usize],
    /// A boolean attribute, which the text sees as `FLAG`; empty if there is none.
    pub flag: &'static str,
    /// Computed once, before all elements: declarations of constants.
    pub before: &'static str,
    /// Done to each element.
    pub text: &'static str,
}

impl UpdateRule {
    /// Neutral values, to be overridden.
    pub const BASE: UpdateRule =
        UpdateRule { name: "", slots: 0, grad: 0, scalars: &[], integers: &[], flag: "", before: "", text: "" };
}

/// Which half of a batch normalisation an op is. Its attribute `is_training` says whether it uses the statistics of its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchNormHalf {
    /// `(x, scale, offset, mean, variance) -> (y, mean, variance for averages, mean, variance of the batch, …)`.
    Forward,
    /// `(dy, x, scale, mean, variance of the batch, …) -> (dx, d scale, d offset, …)`.
    Backward,
}

/// How an op fares when its floats are halves (`half` or `bfloat16`), for rewrites that make graphs of mixed precision. The
/// values are those of TensorFlow's lists for automatic mixed precision, given in brackets; where these know nothing of an
/// op or have several opinions, PyTorch's `autocast` and caution decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfSafety {
    /// Nobody has said; it keeps its types.
    Unstated,
    /// Worth converting for: faster by far, and exact enough, since sums are kept in `float` (allow).
    Faster,
    /// Exact enough, but no reason to convert (infer).
    Safe,
    /// Moves or compares values, so it is as good as they are (clear).
    Neutral,
    /// Its result overflows or loses too much: `float` or wider (deny).
    Wide,
    /// It keeps the types it has, whatever they are: it shares them with a variable.
    Never,
}

/// How an op's output is split over devices when an input is split along one of its dimensions. A *summand* is as large as
/// the output; the output is the sum of all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitRule {
    /// It is not known: inputs have to be brought together first.
    Unstated,
    /// As the inputs; all of them along the same dimension, those that are broadcast along it whole.
    Elementwise,
    /// `a · b`: along the rows of `a` or the columns of `b`, as that; along what is summed over, in both, into summands.
    Product,
    /// As [`SplitRule::Product`] for the last two dimensions; along any before them, in both inputs, as that.
    BatchProduct,
    /// An image and filters: along the examples as the image, along the filters into channels; along the channels of the
    /// image, in both, into summands.
    Convolution,
    /// Along a dimension that is kept as that; along one that is reduced into parts that are combined.
    Reduction(Combine),
    /// Along every dimension of the first input but the last, as that.
    Rows,
    /// Along the first dimension, as that; what has none is whole.
    Examples,
    /// Along the first dimension of all inputs into summands.
    SumOfExamples,
    /// A variable's update: along any dimension, in the variable, its slots and the gradient alike.
    Update,
}

/// How partial reductions become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// Added.
    Sum,
    /// Averaged, by the sizes of the parts.
    Mean,
    /// Multiplied.
    Product,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// Whether all hold.
    All,
    /// Whether any holds.
    Any,
}

impl OpDef {
    /// How its output is split when its inputs are: as it states, and an elementwise op as such.
    pub const fn split_rule(&self) -> SplitRule {
        match (self.split, self.elementwise) {
            (SplitRule::Unstated, Some(_)) => SplitRule::Elementwise,
            (stated, _) => stated,
        }
    }
}
