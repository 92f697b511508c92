//! The usual pieces of a training program, filled in where the program has none of its own.

use std::rc::Rc;
use std::sync::Arc;

use kolo_core::{Result, Tensor};
use kolo_graph::{Graph, Operation, Output, Variable};
use kolo_runtime::Session;

use super::Saver;
use super::ready::report_uninitialized_variables;
use super::summary::merge_all;

/// What runs after `init_op`, with the session.
pub type InitFn<'g> = dyn Fn(&Session) -> Result<()> + 'g;

/// What a training session needs to begin: how to initialise, how to know that all is ready, what to summarise, how to
/// save. Every piece may be given; [`Scaffold::finalize`] makes the others and says which.
#[derive(Clone, Default)]
pub struct Scaffold<'g> {
    init_op: Option<Operation<'g>>,
    init_feeds: Vec<(Output<'g>, Tensor)>,
    init_fn: Option<Rc<InitFn<'g>>>,
    ready_op: Option<Output<'g>>,
    ready_for_local_init_op: Option<Output<'g>>,
    local_init_op: Option<Operation<'g>>,
    summary_op: Option<Output<'g>>,
    saver: Option<Arc<Saver>>,
}

impl<'g> Scaffold<'g> {
    /// Nothing given yet.
    pub fn new() -> Scaffold<'g> {
        Scaffold::default()
    }

    /// Gives the variables their first values. By default the initializers of all global variables.
    pub fn init_op(mut self, operation: Operation<'g>) -> Self {
        self.init_op = Some(operation);
        self
    }

    /// What to feed to the init op.
    pub fn init_feeds(mut self, feeds: Vec<(Output<'g>, Tensor)>) -> Self {
        self.init_feeds = feeds;
        self
    }

    /// Runs after the init op, on the chief, when there was nothing to restore.
    pub fn init_fn(mut self, init: impl Fn(&Session) -> Result<()> + 'g) -> Self {
        self.init_fn = Some(Rc::new(init));
        self
    }

    /// A vector of strings that is empty when all is ready. By default the variables that have no value.
    pub fn ready_op(mut self, output: Output<'g>) -> Self {
        self.ready_op = Some(output);
        self
    }

    /// As [`Scaffold::ready_op`], asked before the local init op runs. By default the global variables without a value.
    pub fn ready_for_local_init_op(mut self, output: Output<'g>) -> Self {
        self.ready_for_local_init_op = Some(output);
        self
    }

    /// Initialises what belongs to this process. By default the local variables.
    pub fn local_init_op(mut self, operation: Operation<'g>) -> Self {
        self.local_init_op = Some(operation);
        self
    }

    /// A serialised summary. By default all summaries of the graph, merged.
    pub fn summary_op(mut self, output: Output<'g>) -> Self {
        self.summary_op = Some(output);
        self
    }

    /// Saves and restores. By default all global variables.
    pub fn saver(mut self, saver: Saver) -> Self {
        self.saver = Some(Arc::new(saver));
        self
    }

    /// Makes what was not given. The graph should not grow after this.
    pub fn finalize(self, graph: &'g Graph) -> Result<FinalScaffold<'g>> {
        let globals = graph.global_variables();
        let all = || globals.iter().copied().chain(local_variables(graph)).collect::<Vec<_>>();
        let mut filled = Vec::new();
        let ready_op =
            or_fill(&mut filled, "ready_op", self.ready_op, || report_uninitialized_variables(graph, &all()))?;
        let ready_for_local_init_op =
            or_fill(&mut filled, "ready_for_local_init_op", self.ready_for_local_init_op, || {
                report_uninitialized_variables(graph, &globals)
            })?;
        let init_op = or_fill(&mut filled, "init_op", self.init_op, || Ok(graph.global_variables_initializer()))?;
        let local_init_op =
            or_fill(&mut filled, "local_init_op", self.local_init_op, || Ok(graph.local_variables_initializer()))?;
        let summary_op = match self.summary_op {
            Some(given) => Some(given),
            None => {
                let merged = merge_all(graph);
                filled.extend(merged.map(|_| "summary_op"));
                merged
            }
        };
        let saver = match self.saver {
            Some(given) => Some(given),
            None if globals.is_empty() => None,
            None => {
                filled.push("saver");
                Some(Arc::new(Saver::new(graph)?))
            }
        };
        graph.check()?;
        tracing::info!(target: "kolo::train", "scaffold filled in: {}", filled.join(", "));
        let Scaffold { init_feeds, init_fn, .. } = self;
        Ok(FinalScaffold {
            init_op,
            init_feeds,
            init_fn,
            ready_op,
            ready_for_local_init_op,
            local_init_op,
            summary_op,
            saver,
            filled,
        })
    }
}

fn or_fill<T>(
    filled: &mut Vec<&'static str>,
    name: &'static str,
    given: Option<T>,
    make: impl FnOnce() -> Result<T>,
) -> Result<T> {
    match given {
        Some(given) => Ok(given),
        None => {
            filled.push(name);
            make()
        }
    }
}

fn local_variables(graph: &Graph) -> Vec<Variable<'_>> {
    let names: Vec<String> =
        graph.variables(|all| all.iter().filter(|record| record.local).map(|record| record.name.clone()).collect());
    names.iter().filter_map(|name| graph.find_variable(name).ok()).collect()
}

/// A [`Scaffold`] with every piece in place.
pub struct FinalScaffold<'g> {
    /// Gives the variables their first values.
    pub init_op: Operation<'g>,
    /// What to feed to it.
    pub init_feeds: Vec<(Output<'g>, Tensor)>,
    /// Runs after it.
    pub init_fn: Option<Rc<InitFn<'g>>>,
    /// Names what is not ready; empty when all is.
    pub ready_op: Output<'g>,
    /// The same, before local initialisation.
    pub ready_for_local_init_op: Output<'g>,
    /// Initialises what belongs to this process.
    pub local_init_op: Operation<'g>,
    /// All summaries, if there are any.
    pub summary_op: Option<Output<'g>>,
    /// Saves and restores, if there is anything to save.
    pub saver: Option<Arc<Saver>>,
    /// The names of the pieces that were made, not given.
    pub filled: Vec<&'static str>,
}
