//! Planning: from a graph and a request to one part for each device or task, by the passes of one list.
//!
//! Local sessions, masters and workers all plan here. What differs between them is data:
//!
//! | | local session | master | worker |
//! | --- | --- | --- | --- |
//! | cut between | devices | tasks | devices |
//! | feeds and fetches | the caller's | transfers with the client | none are left |
//! | loops that span devices | get control loops | get control loops | have them |
//! | passes | the session's, fusion | the session's | fusion |
//!
//! Everything here is a pure function. Compiling the parts comes after it.

mod client_ends;
mod colocate;
pub(crate) mod cost;
mod fallback;
pub(crate) mod partition;
pub(crate) mod place;
pub(crate) mod placed;
pub(crate) mod prune;
mod rules;

use std::collections::{BTreeMap, HashMap};

use kolo_core::{Error, Result};

use self::client_ends::add_client_ends;
use self::partition::deny_implicit_copies;
use self::prune::refuse_unknown;
use crate::rewrite::{BuiltIn, Run};
use crate::{Endpoint, NodeId, Nodes, OpRegistry, Pass, PassContext, PassRecord, Rewriter, Stage};

pub use client_ends::ClientEnds;
pub use colocate::{colocation_leaders, holds_state, is_variable};
pub use cost::{CostModel, Link};
pub use fallback::{FallbackCost, price_fallbacks};
pub use partition::{
    Granularity, LoopControl, Partition, PartitionOptions, Transfer, TransferRound, moved_bytes, partition,
};
pub use place::{DeviceInfo, KernelSupport, Order, PlaceOptions, Placement, Policy, place, state_stays};
pub use placed::{LogFormat, Placed, PlacedGraph, Rule, log_lines};
pub use prune::{Pruned, Request, prune};
pub use rules::{PlacementRules, RuleRow, RuleTable};

/// Who has the values that are fed, and wants those that are fetched.
#[derive(Clone, Copy, Default)]
pub enum Ends<'a> {
    /// Whoever runs the parts hands them over and takes them.
    #[default]
    Caller,
    /// A client, which is reached by transfers with this device.
    Client(&'a DeviceInfo),
}

/// Whether values may be copied between memories because of placement alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImplicitCopies {
    /// They may.
    #[default]
    Allowed,
    /// They may not: that is an error.
    Denied,
}

/// What is to be planned, for whom, and where.
pub struct PlanRequest<'a> {
    /// The graph.
    pub nodes: &'a Nodes,
    /// What a run asks for.
    pub request: &'a Request,
    /// Outputs that stand in for others: `(from, to)`, all that read `to` read `from`.
    pub connections: &'a [(Endpoint, Endpoint)],
    /// All ops.
    pub registry: &'a OpRegistry,
    /// All devices.
    pub devices: &'a [DeviceInfo],
    /// What can run where.
    pub support: &'a dyn KernelSupport,
    /// Where nodes are already.
    pub earlier: &'a HashMap<NodeId, usize>,
    /// How the others are placed.
    pub place: &'a PlaceOptions,
    /// Whether placement may make values move.
    pub copies: ImplicitCopies,
    /// Where to cut.
    pub granularity: Granularity,
    /// Who sees to loops that span devices.
    pub loops: LoopControl,
    /// Where feeds come from and fetches go.
    pub ends: Ends<'a>,
    /// What happens, in order; see [`crate::pipeline`].
    pub passes: &'a [Pass],
    /// The pass after which the graph is wanted as text.
    pub show_after: Option<&'a str>,
}

/// A graph, cut.
pub struct Plan {
    /// The whole graph as the passes left it. The given nodes have their old numbers.
    pub nodes: Nodes,
    /// What a run needs of it.
    pub pruned: Pruned,
    /// Where each node goes, by its number; `None` for nodes that the run does not need.
    pub placement: Vec<Option<Placed>>,
    /// For each node that sends to other devices the bytes it makes move in a step; see [`moved_bytes`].
    pub moved: BTreeMap<NodeId, Option<usize>>,
    /// The parts.
    pub parts: Vec<Partition>,
    /// The transfers with the client, for [`Ends::Client`].
    pub ends: ClientEnds,
    /// What each pass did.
    pub log: Vec<PassRecord>,
    /// The graph after the pass that was asked for.
    pub text: Option<String>,
}

/// Plans a run. `fresh` gives numbers that no other plan of the session was given; they make the names of added nodes unique.
/// Fails as the stages do; a pass that breaks the graph is an error that names it, unless the run can do without it.
pub fn plan(request: &PlanRequest<'_>, fresh: &mut dyn FnMut() -> u64) -> Result<Plan> {
    let mut planner = Planning {
        request,
        nodes: request.nodes.clone(),
        pruned: Pruned {
            nodes: request.nodes.iter().map(|(id, _)| id).collect(),
            feeds: request.request.feeds.clone(),
            fetches: request.request.fetches.clone(),
            targets: request.request.targets.clone(),
        },
        placement: Vec::new(),
        moved: BTreeMap::new(),
        parts: Vec::new(),
        ends: ClientEnds::default(),
        log: Vec::new(),
        text: None,
    };
    for pass in request.passes {
        match &pass.run {
            Run::BuiltIn(step) => planner.step(*step, pass, fresh)?,
            Run::Rewrite(_) => planner.rewrite(pass, fresh)?,
            Run::Elsewhere => {}
        }
        if request.show_after == Some(pass.name()) {
            planner.text = Some(planner.show());
        }
    }
    let Planning { nodes, pruned, placement, moved, parts, ends, log, text, .. } = planner;
    Ok(Plan { nodes, pruned, placement, moved, parts, ends, log, text })
}

/// A plan on its way.
struct Planning<'a, 'r> {
    request: &'r PlanRequest<'a>,
    nodes: Nodes,
    pruned: Pruned,
    placement: Vec<Option<Placed>>,
    moved: BTreeMap<NodeId, Option<usize>>,
    /// Empty until the graph is cut.
    parts: Vec<Partition>,
    ends: ClientEnds,
    log: Vec<PassRecord>,
    text: Option<String>,
}

impl Planning<'_, '_> {
    fn n_nodes(&self) -> usize {
        match self.parts.is_empty() {
            true => self.pruned.nodes.len(),
            false => self.parts.iter().map(|part| part.nodes.len()).sum(),
        }
    }

    /// One of the steps that every plan has.
    fn step(&mut self, step: BuiltIn, pass: &Pass, fresh: &mut dyn FnMut() -> u64) -> Result<()> {
        let (request, n_before) = (self.request, self.n_nodes());
        let mut has_changed = true;
        match step {
            BuiltIn::Connect if request.connections.is_empty() => return Ok(()),
            BuiltIn::Connect => self.connect(fresh)?,
            BuiltIn::Prune => {
                let asked = Request {
                    feeds: std::mem::take(&mut self.pruned.feeds),
                    fetches: std::mem::take(&mut self.pruned.fetches),
                    targets: std::mem::take(&mut self.pruned.targets),
                };
                self.pruned = prune(&self.nodes, &asked)?;
                refuse_unknown(&self.nodes, &self.pruned.nodes, request.registry)?;
                has_changed = self.pruned.nodes.len() < n_before;
            }
            BuiltIn::ClientEnds => {
                let Ends::Client(client) = request.ends else { return Ok(()) };
                self.ends = add_client_ends(&mut self.nodes, &mut self.pruned, request.registry, client)?;
            }
            BuiltIn::Place => self.place()?,
            BuiltIn::Partition => {
                let placed = PlacedGraph {
                    placement: std::mem::take(&mut self.placement),
                    nodes: &self.nodes,
                    devices: request.devices.to_vec(),
                    n_fallbacks: 0,
                };
                let options = PartitionOptions {
                    granularity: request.granularity,
                    loops: request.loops,
                    support: Some(request.support),
                };
                let parts = partition(&placed, &self.pruned, request.registry, &options, fresh)?;
                self.moved = moved_bytes(&placed, &self.pruned);
                self.placement = placed.placement;
                self.parts = parts;
            }
        }
        self.record(pass, None, n_before, self.n_nodes(), has_changed);
        Ok(())
    }

    fn connect(&mut self, fresh: &mut dyn FnMut() -> u64) -> Result<()> {
        let nodes = std::mem::take(&mut self.nodes);
        // Where a client's tensors are joined, its own feeds and fetches stay what they are.
        let all = Pruned { nodes: std::mem::take(&mut self.pruned.nodes), ..Pruned::default() };
        let mut rewriter = Rewriter::of_graph(nodes, &all, self.request.registry, fresh);
        for &(from, to) in self.request.connections {
            rewriter.redirect(to, from).map_err(|error| error.context("tensor_connection"))?;
        }
        let (nodes, all) = rewriter.into_graph();
        (self.nodes, self.pruned.nodes) = (nodes, all.nodes);
        Ok(())
    }

    fn place(&mut self) -> Result<()> {
        let request = self.request;
        let is_client_end =
            |id: &NodeId| id.index() >= request.nodes.len() && self.nodes.node(*id).device.full().is_some();
        let device_of = |id: &NodeId| match request.earlier.get(id) {
            Some(&device) => Some(device),
            None if is_client_end(id) => {
                let name = self.nodes.node(*id).device.full()?;
                request.devices.iter().position(|device| device.name == name)
            }
            None => None,
        };
        // A master has placed the graph when it was sent; there is nothing left to decide.
        let known: Option<Vec<usize>> = match request.granularity {
            Granularity::Task => self.pruned.nodes.iter().map(device_of).collect(),
            Granularity::Device => None,
        };
        let placed = match known {
            Some(known) => {
                let mut placement = vec![None; self.nodes.len()];
                for (id, device) in self.pruned.nodes.iter().zip(known) {
                    let wish = self.nodes.node(*id).device.clone();
                    placement[id.index()] = Some(Placed { device, wish, rule: Rule::Earlier, missed: None });
                }
                PlacedGraph { nodes: &self.nodes, devices: request.devices.to_vec(), placement, n_fallbacks: 0 }
            }
            None => {
                let needed = &self.pruned.nodes;
                place(&self.nodes, needed, request.devices, request.support, request.earlier, request.place)?
            }
        };
        if request.copies == ImplicitCopies::Denied {
            deny_implicit_copies(&placed, &self.pruned, request.support)?;
        }
        self.placement = placed.placement;
        Ok(())
    }

    /// A pass of the list, on the graph or on every part.
    fn rewrite(&mut self, pass: &Pass, fresh: &mut dyn FnMut() -> u64) -> Result<()> {
        let Run::Rewrite(run) = &pass.run else { return Ok(()) };
        let request = self.request;
        let blame = |error: Error| error.context(format!("pass '{}'", pass.name()));
        let context = PassContext { devices: request.devices, support: request.support, device: None };
        if pass.stage() < Stage::Part {
            let nodes = std::mem::take(&mut self.nodes);
            let mut rewriter = Rewriter::of_graph(nodes, &self.pruned, request.registry, fresh);
            let n_before = rewriter.len();
            run(&mut rewriter, &context).map_err(blame)?;
            let has_changed = rewriter.has_changed();
            if has_changed {
                rewriter.check().map_err(blame)?;
            }
            (self.nodes, self.pruned) = rewriter.into_graph();
            self.record(pass, None, n_before, self.pruned.nodes.len(), has_changed);
            return Ok(());
        }
        for i in 0..self.parts.len() {
            let device = &request.devices[self.parts[i].device].name;
            if !pass.is_for(&device.kind) {
                continue;
            }
            let context = PassContext { device: Some(device), ..context };
            let mut rewriter = Rewriter::of_part(&self.parts[i], self.nodes.trainings(), request.registry, fresh);
            let n_before = rewriter.len();
            let rewritten = run(&mut rewriter, &context).and_then(|()| match rewriter.has_changed() {
                true => rewriter.check().and_then(|()| rewriter.into_part(&self.parts[i])).map(Some),
                false => Ok(None),
            });
            let (has_changed, undone) = match rewritten {
                Ok(Some(part)) => {
                    self.parts[i] = part;
                    (true, None)
                }
                Ok(None) => (false, None),
                Err(error) if pass.is_optional() => (false, Some(error.to_string())),
                Err(error) => return Err(blame(error)),
            };
            self.record(pass, Some(device.clone()), n_before, self.parts[i].nodes.len(), has_changed);
            if let Some(record) = self.log.last_mut() {
                record.undone = undone;
            }
        }
        Ok(())
    }

    fn record(
        &mut self,
        pass: &Pass,
        device: Option<kolo_core::DeviceName>,
        n_before: usize,
        n_after: usize,
        has_changed: bool,
    ) {
        let (name, why) = (pass.name().to_owned(), pass.why().to_owned());
        let stage = pass.stage();
        self.log.push(PassRecord { pass: name, stage, why, device, n_before, n_after, has_changed, undone: None });
    }

    /// The graph as it is now.
    fn show(&self) -> String {
        if self.parts.is_empty() {
            let line = |id: &NodeId| {
                let placed = self.placement.get(id.index()).and_then(Option::as_ref);
                let device = placed.map(|placed| format!("  # on {}", self.request.devices[placed.device].name));
                format!("{}{}\n", self.nodes.line(*id), device.unwrap_or_default())
            };
            return self.pruned.nodes.iter().map(line).collect();
        }
        let part = |part: &Partition| format!("# {}\n{}", self.request.devices[part.device].name, part.nodes);
        self.parts.iter().map(part).collect::<Vec<_>>().join("\n")
    }
}
