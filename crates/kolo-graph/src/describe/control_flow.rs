//! Branches and loops: [`Graph::cond`] and [`Graph::while_loop`] add the ops that steer a step, as TensorFlow 1.x does.
//!
//! ```text
//!  while_loop                                      cond
//!
//!  init ─ Enter ─ Merge ─┬─ cond ─ LoopCond        pred ─ Switch ─┬─ switch_f (pivot)
//!                   ▲    │            │                           └─ switch_t (pivot)
//!                   │    └─ Switch ◄──┘            x ─ Switch ─┬─ else branch ─┐
//!                   │        │ │                               └─ then branch ─┴─ Merge
//!                   │   Exit ◄─┘ Identity
//!                   │              │
//!              NextIteration ◄─ body
//! ```
//!
//! While a branch or a body is described, a [`FlowScope`] is open. Every node that is added meanwhile passes through
//! [`prepare`], which lets its inputs in from outside: through a constant `Enter` into a loop, through a `Switch` into a
//! branch, one after the other where they are nested. A node without inputs waits for the scope's pivot, so that it runs
//! when the branch is taken, and once per iteration.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use kolo_core::{DType, Error, PartialShape, Result};

use crate::describe::graph::LoopId;
use crate::describe::request::NodeRequest;
use crate::{Endpoint, Flow, Graph, Node, NodeId, Operation, Output};

/// What may differ from one loop to another.
#[derive(Clone, Debug, PartialEq)]
pub struct WhileOptions {
    /// The name scope of the loop.
    pub name: String,
    /// How many iterations may be in flight at once.
    pub parallel_iterations: i64,
    /// What is known of the shapes of the loop variables in every iteration; if empty, or where `None`, the shapes with
    /// which they enter.
    pub shape_invariants: Vec<Option<PartialShape>>,
    /// The loop ends after so many iterations, whatever its condition says.
    pub maximum_iterations: Option<i32>,
}

impl Default for WhileOptions {
    fn default() -> WhileOptions {
        WhileOptions {
            name: "while".to_owned(),
            parallel_iterations: 10,
            shape_invariants: Vec::new(),
            maximum_iterations: None,
        }
    }
}

impl Graph {
    /// Runs `body` on the loop variables as long as `cond` of them holds; gives their last values. Both closures are
    /// called once, to describe the loop. They may use outputs from outside of it. `body` gives one output per variable,
    /// of the same dtype and of a shape that agrees with the variable's.
    ///
    /// ```text
    /// let n = g.while_loop(&[g.constant(1.0)], |g, v| less(v[0], limit), |g, v| vec![v[0] * 2.0], WhileOptions::default())?;
    /// ```
    #[track_caller]
    pub fn while_loop<'g>(
        &'g self,
        init: &[Output<'g>],
        cond: impl FnOnce(&'g Graph, &[Output<'g>]) -> Output<'g>,
        body: impl FnOnce(&'g Graph, &[Output<'g>]) -> Vec<Output<'g>>,
        options: WhileOptions,
    ) -> Result<Vec<Output<'g>>> {
        let Some(limit) = options.maximum_iterations else {
            return self.name_scope(&options.name, || self.build_loop(init, cond, body, &options));
        };
        let limit = self.constant(limit);
        let init: Vec<Output<'g>> = std::iter::once(self.constant(0i32)).chain(init.iter().copied()).collect();
        let mut options = options;
        if !options.shape_invariants.is_empty() {
            options.shape_invariants.insert(0, None);
        }
        let cond = |g: &'g Graph, vars: &[Output<'g>]| {
            let below = g.op("Less").input(vars[0]).input(limit).out();
            let more = cond(g, &vars[1..]);
            g.op("LogicalAnd").input(below).input(more).out()
        };
        let body = |g: &'g Graph, vars: &[Output<'g>]| {
            let mut next = body(g, &vars[1..]);
            next.insert(0, vars[0] + 1i32);
            next
        };
        let mut last = self.name_scope(&options.name, || self.build_loop(&init, cond, body, &options))?;
        last.remove(0);
        Ok(last)
    }

    #[track_caller]
    fn build_loop<'g>(
        &'g self,
        init: &[Output<'g>],
        cond: impl FnOnce(&'g Graph, &[Output<'g>]) -> Output<'g>,
        body: impl FnOnce(&'g Graph, &[Output<'g>]) -> Vec<Output<'g>>,
        options: &WhileOptions,
    ) -> Result<Vec<Output<'g>>> {
        self.check()?;
        if init.is_empty() {
            return Err(Error::invalid_argument("No loop variables provided"));
        }
        if options.parallel_iterations < 1 {
            return Err(Error::invalid_argument("parallel_iterations must be a positive integer"));
        }
        if !options.shape_invariants.is_empty() && options.shape_invariants.len() != init.len() {
            return Err(Error::invalid_argument(format!(
                "{} shape invariants for {} loop variables",
                options.shape_invariants.len(),
                init.len()
            )));
        }
        let frame = self.scoped_name("while_context");
        let scope = Rc::new(LoopScope::new(self, &frame, options.parallel_iterations));
        let mut enters = Vec::new();
        for (i, &value) in init.iter().enumerate() {
            let enter = enter(self, value, &frame, options.parallel_iterations, IsConstant::No);
            self.check()?;
            let invariant = options.shape_invariants.get(i).cloned().flatten();
            if let Some(invariant) = invariant {
                invariant_admits(&invariant, &value.shape(), value)?;
                self.replace_output_shape(enter.endpoint(), invariant);
            }
            scope.core().add(self, enter.endpoint().node);
            enters.push(enter);
        }
        let inside: Rc<dyn FlowScope> = scope.clone();
        let switches = self.with_flow(Some(inside), || -> Result<_> {
            let merges: Vec<Operation<'g>> =
                enters.iter().map(|&enter| self.op("Merge").inputs([enter, enter]).build()).collect();
            self.check()?;
            scope.core().pivot.set(Some(merges[0].id()));
            let values: Vec<Output<'g>> = merges.iter().map(|merge| merge.output(0)).collect();
            let predicate = self.op("LoopCond").name("LoopCond").input(cond(self, &values)).out();
            self.check()?;
            let switches: Vec<Operation<'g>> =
                values.iter().map(|&value| switch(self, value, predicate)).collect::<Result<_>>()?;
            let vars: Vec<Output<'g>> =
                switches.iter().map(|switch| self.op("Identity").input(switch.output(1)).out()).collect();
            self.check()?;
            scope.core().pivot.set(Some(vars[0].endpoint().node));
            let results = body(self, &vars);
            self.check()?;
            if results.len() != vars.len() {
                return Err(Error::invalid_argument(format!(
                    "the body gives {} values for {} loop variables",
                    results.len(),
                    vars.len()
                )));
            }
            for (merge, result) in merges.iter().zip(results) {
                close(self, *merge, result)?;
            }
            Ok(switches)
        })?;
        switches.iter().map(|switch| exit(self, switch.output(0))).collect()
    }

    /// Runs `then` if `pred` holds and `otherwise` if not; gives the outputs of the one that ran. Both closures are
    /// called once, to describe their branch, and must give as many outputs of the same dtypes. What they use from
    /// outside is computed whichever branch is taken; what they add is not.
    #[track_caller]
    pub fn cond<'g>(
        &'g self,
        pred: Output<'g>,
        then: impl FnOnce() -> Vec<Output<'g>>,
        otherwise: impl FnOnce() -> Vec<Output<'g>>,
    ) -> Result<Vec<Output<'g>>> {
        self.name_scope("cond", || {
            let sides = self.op("Switch").input(pred).input(pred).build();
            let pivot_true = self.op("Identity").name("switch_t").input(sides.output(1)).build();
            let pivot_false = self.op("Identity").name("switch_f").input(sides.output(0)).build();
            let pred = self.op("Identity").name("pred_id").input(pred).out();
            self.check()?;
            let on_true = self.branch(pred, pivot_true, 1, then)?;
            let on_false = self.branch(pred, pivot_false, 0, otherwise)?;
            if on_true.len() != on_false.len() {
                return Err(Error::invalid_argument(format!(
                    "true_fn and false_fn must return the same number of outputs: {} and {}",
                    on_true.len(),
                    on_false.len()
                )));
            }
            let merged = on_false.into_iter().zip(on_true).map(|(on_false, on_true)| {
                if on_true.dtype() != on_false.dtype() {
                    return Err(Error::invalid_argument(format!(
                        "Outputs of true_fn and false_fn must have the same type: {}, {}",
                        on_true.dtype(),
                        on_false.dtype()
                    )));
                }
                let merge = self.op("Merge").inputs([on_false, on_true]).out();
                self.check()?;
                Ok(merge)
            });
            merged.collect()
        })
    }

    fn branch<'g>(
        &'g self,
        pred: Output<'g>,
        pivot: Operation<'g>,
        taken: u32,
        describe: impl FnOnce() -> Vec<Output<'g>>,
    ) -> Result<Vec<Output<'g>>> {
        let core = ScopeCore::new(self.flow_scope(), None);
        core.pivot.set(Some(pivot.id()));
        core.captured.borrow_mut().insert(pred.endpoint(), pred.endpoint());
        core.inside.borrow_mut().insert(pivot.id());
        let scope = Rc::new(BranchScope { core, pred: pred.endpoint(), taken });
        self.with_flow(Some(scope.clone()), || {
            let outputs = describe();
            self.check()?;
            // A branch may give what it did not make; it must still be dead when the branch is not taken.
            outputs
                .into_iter()
                .map(|output| capture(self, &*scope, output.endpoint()).map(|at| Output::new(self, at)))
                .collect()
        })
    }
}

/// Whether every iteration sees the value that enters, or only the first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum IsConstant {
    Yes,
    No,
}

/// Adds an `Enter` in the scope that is open.
pub(crate) fn enter<'g>(
    graph: &'g Graph,
    value: Output<'g>,
    frame: &str,
    parallel_iterations: i64,
    constant: IsConstant,
) -> Output<'g> {
    // A loop variable is a value; what is only looked at may stay a reference.
    let op = if value.is_ref() && constant == IsConstant::Yes { "RefEnter" } else { "Enter" };
    graph
        .op(op)
        .name("Enter")
        .input(value)
        .attr("frame_name", frame)
        .attr("is_constant", constant == IsConstant::Yes)
        .attr("parallel_iterations", parallel_iterations)
        .out()
}

/// Adds a `Switch`, of a reference if the data is one.
pub(crate) fn switch<'g>(graph: &'g Graph, data: Output<'g>, pred: Output<'g>) -> Result<Operation<'g>> {
    let op = if data.is_ref() { "RefSwitch" } else { "Switch" };
    graph.op(op).name("Switch").input(data).input(pred).try_build()
}

/// Adds an `Exit` from the loop in which `value` lives into the scope that is open.
pub(crate) fn exit<'g>(graph: &'g Graph, value: Output<'g>) -> Result<Output<'g>> {
    let op = if value.is_ref() { "RefExit" } else { "Exit" };
    let operation = raw(graph, || graph.op(op).name("Exit").input(value).try_build())?;
    Ok(operation.output(0))
}

/// Closes a loop: `next` is the value of the variable at `merge` in the following iteration.
pub(crate) fn close<'g>(graph: &'g Graph, merge: Operation<'g>, next: Output<'g>) -> Result<()> {
    let enters = merge.output(0);
    if enters.dtype() != next.dtype() {
        return Err(Error::invalid_argument(format!(
            "loop variable {} is {}, but {} after one iteration",
            enters.name(),
            enters.dtype(),
            next.dtype()
        )));
    }
    let is_invariant = enters.shape().relax(&next.shape()) == enters.shape();
    if !is_invariant {
        return Err(Error::invalid_argument(format!(
            "The shape for {} is not an invariant for the loop. It enters the loop with shape {}, but has shape {} \
             after one iteration. Provide shape invariants",
            enters.name(),
            enters.shape(),
            next.shape()
        )));
    }
    let next = graph.op("NextIteration").input(next).try_build()?;
    graph.close_loop(merge.id(), 1, Endpoint { node: next.id(), index: 0 })
}

fn invariant_admits(invariant: &PartialShape, shape: &PartialShape, value: Output<'_>) -> Result<()> {
    if invariant.relax(shape) == *invariant {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "The shape invariant specified for {} is not compatible with the initial shape of the loop variable. It enters \
         the loop with shape {shape}, but the specified shape invariant is {invariant}",
        value.name()
    )))
}

/// A branch or loop body that is being described.
pub(crate) trait FlowScope {
    /// What all scopes keep.
    fn core(&self) -> &ScopeCore;
    /// Makes an output from outside available inside; not called for one that is.
    fn bring_in(&self, graph: &Graph, at: Endpoint) -> Result<Endpoint>;
    /// The node to wait for inside instead of one outside.
    fn bring_in_control(&self, graph: &Graph, id: NodeId) -> Result<NodeId>;
    /// A last word on a node that is about to be added.
    fn adapt(&self, _: &Graph, _: &mut NodeRequest) -> Result<()> {
        Ok(())
    }
    /// Nodes are added as they are.
    fn is_raw(&self) -> bool {
        false
    }
}

/// What all scopes keep.
pub(crate) struct ScopeCore {
    /// The scope around this one.
    pub parent: Option<Rc<dyn FlowScope>>,
    /// The innermost loop.
    pub inside_loop: Option<LoopId>,
    /// This scope is that loop's, not one of a branch in it.
    pub is_loop: bool,
    /// Nodes that were added here or in a scope within this one.
    pub inside: RefCell<HashSet<NodeId>>,
    /// Outputs from outside, and what stands for them here.
    pub captured: RefCell<HashMap<Endpoint, Endpoint>>,
    /// What a node without inputs waits for.
    pub pivot: Cell<Option<NodeId>>,
}

impl ScopeCore {
    /// A scope within `parent`: of the loop `new_loop`, or of a branch.
    pub(crate) fn new(parent: Option<Rc<dyn FlowScope>>, new_loop: Option<LoopId>) -> ScopeCore {
        let around = parent.as_ref().and_then(|parent| parent.core().inside_loop);
        ScopeCore {
            inside_loop: new_loop.or(around),
            is_loop: new_loop.is_some(),
            parent,
            inside: RefCell::default(),
            captured: RefCell::default(),
            pivot: Cell::new(None),
        }
    }

    /// Remembers that a node belongs here.
    pub(crate) fn add(&self, graph: &Graph, id: NodeId) {
        graph.set_loop(id, self.inside_loop);
        self.inside.borrow_mut().insert(id);
        let mut around = self.parent.clone();
        while let Some(scope) = around {
            scope.core().inside.borrow_mut().insert(id);
            around = scope.core().parent.clone();
        }
    }

    /// The output as the scope around this one sees it.
    pub(crate) fn seen_around(&self, graph: &Graph, at: Endpoint) -> Result<Endpoint> {
        match &self.parent {
            Some(parent) => capture(graph, &**parent, at),
            None => outside(graph, at).map(|()| at),
        }
    }
}

/// An output that is used where no scope is open must not live inside a loop.
fn outside(graph: &Graph, at: Endpoint) -> Result<()> {
    match graph.loop_of(at.node) {
        None => Ok(()),
        Some(_) => Err(in_a_loop(graph, at)),
    }
}

fn in_a_loop(graph: &Graph, at: Endpoint) -> Error {
    let name = graph.nodes().node(at.node).name.clone();
    Error::invalid_argument(format!("Cannot use '{name}' as input because '{name}' is in a while loop"))
}

/// What stands for an output inside `scope`.
pub(crate) fn capture(graph: &Graph, scope: &dyn FlowScope, at: Endpoint) -> Result<Endpoint> {
    let core = scope.core();
    if let Some(&known) = core.captured.borrow().get(&at) {
        return Ok(known);
    }
    if core.inside.borrow().contains(&at.node) {
        let same_loop = graph.loop_of(at.node) == core.inside_loop;
        return if same_loop { Ok(at) } else { Err(in_a_loop(graph, at)) };
    }
    let inner = scope.bring_in(graph, at)?;
    core.captured.borrow_mut().insert(at, inner);
    Ok(inner)
}

/// Makes the inputs of a node that is about to be added available in the scope that is open, and ties it to the scope's
/// pivot where nothing else does.
pub(crate) fn prepare(graph: &Graph, scope: Option<&dyn FlowScope>, request: &mut NodeRequest) -> Result<()> {
    let Some(scope) = scope else {
        let waits_for = request.control_inputs.iter().map(|&node| Endpoint { node, index: 0 });
        return request.inputs.iter().copied().chain(waits_for).try_for_each(|at| outside(graph, at));
    };
    if scope.is_raw() {
        return Ok(());
    }
    scope.adapt(graph, request)?;
    for at in &mut request.inputs {
        *at = capture(graph, scope, *at)?;
    }
    let core = scope.core();
    let mut control = Vec::with_capacity(request.control_inputs.len());
    let mut seen = HashSet::new();
    for &id in &request.control_inputs {
        let id = if core.inside.borrow().contains(&id) { id } else { scope.bring_in_control(graph, id)? };
        if seen.insert(id) {
            control.push(id);
        }
    }
    request.control_inputs = control;
    let is_tied = {
        let nodes = graph.nodes();
        let inside = core.inside.borrow();
        let mut sources = request.inputs.iter().map(|at| at.node).chain(request.control_inputs.iter().copied());
        match core.is_loop {
            // Loop invariants are there in the last, dead iteration too.
            true => sources.any(|id| !is_constant_enter(nodes.node(id))),
            false => !request.inputs.is_empty() || sources.any(|id| inside.contains(&id)),
        }
    };
    if let Some(pivot) = core.pivot.get()
        && !is_tied
    {
        request.control_inputs.push(pivot);
    }
    Ok(())
}

/// True for an `Enter` whose value every iteration sees.
pub(crate) fn is_constant_enter(node: &Node) -> bool {
    node.def.flow == Flow::Enter && node.attrs.bool("is_constant").unwrap_or(false)
}

/// Runs `body`; the nodes it adds keep their inputs as they are, and belong to the scope that is open.
pub(crate) fn raw<R>(graph: &Graph, body: impl FnOnce() -> R) -> R {
    graph.with_flow(Some(Rc::new(RawScope { core: ScopeCore::new(graph.flow_scope(), None) })), body)
}

/// For builders that connect the loops and branches themselves.
struct RawScope {
    core: ScopeCore,
}

impl FlowScope for RawScope {
    fn core(&self) -> &ScopeCore {
        &self.core
    }
    fn bring_in(&self, _: &Graph, at: Endpoint) -> Result<Endpoint> {
        Ok(at)
    }
    fn bring_in_control(&self, _: &Graph, id: NodeId) -> Result<NodeId> {
        Ok(id)
    }
    fn is_raw(&self) -> bool {
        true
    }
}

/// One side of a [`Graph::cond`].
struct BranchScope {
    core: ScopeCore,
    pred: Endpoint,
    /// Which output of a `Switch` is live here.
    taken: u32,
}

impl FlowScope for BranchScope {
    fn core(&self) -> &ScopeCore {
        &self.core
    }

    fn bring_in(&self, graph: &Graph, at: Endpoint) -> Result<Endpoint> {
        let at = self.core.seen_around(graph, at)?;
        let (data, pred) = (Output::new(graph, at), Output::new(graph, self.pred));
        let id = graph.with_flow(self.core.parent.clone(), || raw(graph, || switch(graph, data, pred)))?.id();
        self.core.add(graph, id);
        Ok(Endpoint { node: id, index: self.taken })
    }

    fn bring_in_control(&self, graph: &Graph, id: NodeId) -> Result<NodeId> {
        // The same frame: an edge from outside is as good as one from inside.
        match &self.core.parent {
            Some(parent) if !parent.core().inside.borrow().contains(&id) => parent.bring_in_control(graph, id),
            _ => Ok(id),
        }
    }
}

/// The condition and body of a [`Graph::while_loop`].
struct LoopScope {
    core: ScopeCore,
    frame: String,
    parallel_iterations: i64,
}

impl LoopScope {
    fn new(graph: &Graph, frame: &str, parallel_iterations: i64) -> LoopScope {
        let core = ScopeCore::new(graph.flow_scope(), Some(graph.new_loop_id()));
        LoopScope { core, frame: frame.to_owned(), parallel_iterations }
    }
}

impl FlowScope for LoopScope {
    fn core(&self) -> &ScopeCore {
        &self.core
    }

    fn bring_in(&self, graph: &Graph, at: Endpoint) -> Result<Endpoint> {
        let at = self.core.seen_around(graph, at)?;
        enter_constant(graph, &self.core, &self.frame, self.parallel_iterations, at)
    }

    fn bring_in_control(&self, graph: &Graph, id: NodeId) -> Result<NodeId> {
        enter_control(graph, self, id)
    }
}

/// Adds the constant `Enter` through which an output of the scope around `core` comes into its loop.
pub(crate) fn enter_constant(
    graph: &Graph,
    core: &ScopeCore,
    frame: &str,
    parallel_iterations: i64,
    at: Endpoint,
) -> Result<Endpoint> {
    let value = Output::new(graph, at);
    let entered = graph.with_flow(core.parent.clone(), || {
        raw(graph, || enter(graph, value, frame, parallel_iterations, IsConstant::Yes))
    });
    graph.check()?;
    core.add(graph, entered.endpoint().node);
    Ok(entered.endpoint())
}

/// A node inside a loop that has waited for a node outside: control edges do not cross into frames, data does.
pub(crate) fn enter_control(graph: &Graph, scope: &dyn FlowScope, id: NodeId) -> Result<NodeId> {
    let has_value = graph.nodes().node(id).outputs.first().is_some_and(|output| output.dtype != DType::Resource);
    let signal = match has_value {
        true => Endpoint { node: id, index: 0 },
        false => {
            let around = scope.core().parent.clone();
            let zero = graph.with_flow(around, || {
                let zero = graph.op("Const").attr("dtype", DType::F32).attr("value", kolo_core::Tensor::scalar(0f32));
                zero.control_input(Operation::new(graph, id)).try_build()
            })?;
            Endpoint { node: zero.id(), index: 0 }
        }
    };
    Ok(capture(graph, scope, signal)?.node)
}
