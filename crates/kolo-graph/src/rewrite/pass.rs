//! Passes: what happens to a graph between its description and its parts, as one ordered list.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use kolo_core::{DeviceName, Result};

use super::Rewriter;
use crate::{DeviceInfo, KernelSupport};

/// When a pass runs. Stages come in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// On all nodes that were described, before it is known which are needed.
    Described,
    /// On the nodes that a run needs, before they have devices.
    Graph,
    /// On one device's part, once the graph was cut.
    Part,
    /// On compiled parts, where it is known which kernels run.
    Compiled,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Described => "described",
            Stage::Graph => "graph",
            Stage::Part => "part",
            Stage::Compiled => "compiled",
        })
    }
}

/// One step of planning: its name, when it runs, why it is there, and what it does.
///
/// ```
/// use kolo_graph::{Pass, Stage};
///
/// let pass = Pass::new("double-negation", Stage::Graph, "-(-x) is x", |graph, _| {
///     for id in graph.ids() {
///         let Some(outer) = graph.node(id).filter(|node| node.op() == "Neg") else { continue };
///         let Some(inner) = graph.node(outer.inputs[0].node).filter(|node| node.op() == "Neg") else { continue };
///         let x = inner.inputs[0];
///         graph.redirect(kolo_graph::Endpoint { node: id, index: 0 }, x)?;
///     }
///     graph.remove_dead();
///     Ok(())
/// });
/// assert_eq!(pass.name(), "double-negation");
/// ```
#[derive(Clone)]
pub struct Pass {
    name: Cow<'static, str>,
    stage: Stage,
    why: Cow<'static, str>,
    /// The kind of device whose parts it is for; all if absent.
    kind: Option<&'static str>,
    is_optional: bool,
    pub(crate) run: Run,
}

/// A rewrite.
pub(crate) type PassFn = dyn Fn(&mut Rewriter<'_>, &PassContext<'_>) -> Result<()> + Send + Sync;

#[derive(Clone)]
pub(crate) enum Run {
    Rewrite(Arc<PassFn>),
    /// A step that every plan has.
    BuiltIn(BuiltIn),
    /// Done by another place; see [`Pass::noted`].
    Elsewhere,
}

/// The steps that every plan has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BuiltIn {
    Connect,
    Prune,
    ClientEnds,
    Place,
    Partition,
}

/// What a pass may know besides the graph.
pub struct PassContext<'a> {
    /// All devices of the session.
    pub devices: &'a [DeviceInfo],
    /// What can run where.
    pub support: &'a dyn KernelSupport,
    /// For a pass over a part: its device.
    pub device: Option<&'a DeviceName>,
}

/// What a pass did to a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassRecord {
    /// The pass.
    pub pass: String,
    /// When it ran.
    pub stage: Stage,
    /// Why it is there.
    pub why: String,
    /// For a pass over a part: the part's device.
    pub device: Option<DeviceName>,
    /// How many nodes there were before.
    pub n_before: usize,
    /// How many there were after.
    pub n_after: usize,
    /// Whether it changed anything; a pass may exchange nodes one for one.
    pub has_changed: bool,
    /// Why what it did was thrown away, if it was; see [`Pass::optional`].
    pub undone: Option<String>,
}

impl Pass {
    /// A pass that rewrites the graph in [`Stage::Described`] or [`Stage::Graph`], or every part in [`Stage::Part`].
    pub fn new(
        name: impl Into<Cow<'static, str>>,
        stage: Stage,
        why: impl Into<Cow<'static, str>>,
        run: impl Fn(&mut Rewriter<'_>, &PassContext<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Pass {
        let run = Run::Rewrite(Arc::new(run));
        Pass { name: name.into(), stage, why: why.into(), kind: None, is_optional: false, run }
    }

    /// The same for parts on devices of this kind alone, such as `GPU`.
    #[must_use]
    pub fn on_kind(mut self, kind: &'static str) -> Pass {
        self.kind = Some(kind);
        self
    }

    /// The same as an improvement that a run can do without: if it fails, or breaks a part, the part stays as it was, and
    /// [`PassRecord::undone`] says why. Any other pass fails the plan. Only for [`Stage::Part`].
    #[must_use]
    pub fn optional(mut self) -> Pass {
        self.is_optional = true;
        self
    }

    /// A step that another place does, and that has a line in the list for its order and its reason.
    pub const fn noted(name: &'static str, stage: Stage, why: &'static str) -> Pass {
        Pass::listed(name, stage, why, Run::Elsewhere)
    }

    const fn built_in(name: &'static str, stage: Stage, why: &'static str, step: BuiltIn) -> Pass {
        Pass::listed(name, stage, why, Run::BuiltIn(step))
    }

    const fn listed(name: &'static str, stage: Stage, why: &'static str, run: Run) -> Pass {
        Pass { name: Cow::Borrowed(name), stage, why: Cow::Borrowed(why), kind: None, is_optional: false, run }
    }

    /// Whether it is for parts on devices of this kind.
    pub(crate) fn is_for(&self, kind: &str) -> bool {
        self.kind.is_none_or(|own| own == kind)
    }

    /// Whether a run can do without it.
    pub(crate) fn is_optional(&self) -> bool {
        self.is_optional
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// When it runs.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Why it is there.
    pub fn why(&self) -> &str {
        &self.why
    }
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.name, self.stage, self.why)
    }
}

/// The whole list: the steps that every plan has, with `passes` at their stages, in the order they are given.
pub fn pipeline(passes: &[Pass]) -> Vec<Pass> {
    let of = |stage: Stage| passes.iter().filter(move |pass| pass.stage == stage).cloned();
    let mut list = vec![Pass::built_in(
        "connect",
        Stage::Described,
        "a client may let one tensor stand in for another; first, since it decides what a run needs",
        BuiltIn::Connect,
    )];
    list.extend(of(Stage::Described));
    list.push(Pass::built_in(
        "prune",
        Stage::Described,
        "only what the fetches and targets need is looked at from here on",
        BuiltIn::Prune,
    ));
    list.push(Pass::built_in(
        "client-ends",
        Stage::Graph,
        "a master's feeds and fetches become transfers with the client; before placing, so that they have a device",
        BuiltIn::ClientEnds,
    ));
    list.extend(of(Stage::Graph));
    list.push(Pass::built_in(
        "place",
        Stage::Graph,
        "every node gets one device: where it was, where it is pinned, or the first with a kernel",
        BuiltIn::Place,
    ));
    list.push(Pass::built_in(
        "partition",
        Stage::Graph,
        "one part for each device or task; edges that cross become transfers, loops that cross get a control loop",
        BuiltIn::Partition,
    ));
    list.extend(of(Stage::Part));
    list.extend(of(Stage::Compiled));
    list
}
