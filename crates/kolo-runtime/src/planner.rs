//! What a local session plans with: its devices, its passes, and where its nodes have been placed so far.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kolo_core::{DType, DeviceName, DeviceSpec, Error, Result};
use kolo_graph::{
    DeviceInfo, Endpoint, Ends, FallbackCost, Granularity, ImplicitCopies, KernelSupport, LoopControl, Node, NodeId,
    Nodes, Origin, Pass, PassRecord, PlaceOptions, Placed, Placement, Plan, PlanRequest, Request, Rule, Stage,
    colocation_leaders, holds_state, order_collectives, pipeline, plan, price_fallbacks, state_stays,
};
use kolo_ops::{KernelMaker, find_kernel, find_op, host_arguments, kernels_of, registry};

use crate::collective::DeviceExchanges;
use crate::compile::part::KernelCache;
use crate::compile::{Captures, CompiledPlan};
use crate::config::SessionConfig;
use crate::devices::Devices;
use crate::executor::frame_id::FrameIds;
use crate::session::local::RunPlan;
use crate::session::wanted::Wanted;
use crate::{compile, fusion};

/// Where nodes were placed, as data. Printing it gives a table.
#[derive(Clone, Debug, Default)]
pub struct PlacementReport {
    /// One row per node that has been planned, in graph order.
    pub rows: Vec<PlacementRow>,
    /// How many nodes are not where they were pinned.
    pub n_fallbacks: usize,
    /// What those nodes cost in a step that runs all of them.
    pub fallback_cost: FallbackCost,
}

/// Where one node was placed, and why.
#[derive(Clone, Debug)]
pub struct PlacementRow {
    /// The node.
    pub node: String,
    /// Its op.
    pub op: &'static str,
    /// The device it asked for.
    pub wish: DeviceSpec,
    /// The device it got.
    pub device: DeviceName,
    /// Where it was asked for: a line of the program, of a file of rules or of a graph.
    pub pinned_at: Option<Origin>,
    /// What decided.
    pub rule: Rule,
    /// Where it was before its pin changed, if it moved in this session.
    pub moved_from: Option<DeviceName>,
    /// Bytes that a step moves from it to other devices; `None` where a shape is not known.
    pub n_bytes_moved: Option<usize>,
}

impl PlacementRow {
    /// The line of the placement log: `name: (Op): /job:localhost/replica:0/task:0/device:CPU:0`.
    pub fn log_line(&self) -> String {
        format!("{}: ({}): {}", self.node, self.op, self.device)
    }
}

impl fmt::Display for PlacementReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["node", "op", "wish", "device", "rule", "bytes moved", "pinned at"].map(str::to_owned);
        let body = self.rows.iter().map(|row| {
            let wish = if row.wish.is_empty() { "-".to_owned() } else { row.wish.to_string() };
            let moved = row.n_bytes_moved.map_or_else(|| "?".to_owned(), |n| n.to_string());
            let rule = match &row.moved_from {
                Some(from) => format!("{}, moved from {from}", row.rule),
                None => row.rule.to_string(),
            };
            let pin = row.pinned_at.as_ref().map_or_else(String::new, Origin::to_string);
            [row.node.clone(), row.op.to_owned(), wish, row.device.to_string(), rule, moved, pin]
        });
        let table: Vec<[String; 7]> = std::iter::once(head).chain(body).collect();
        let width = |column: usize| table.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..7).map(width).collect();
        for row in &table {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        match self.n_fallbacks {
            0 => Ok(()),
            _ => writeln!(f, "{}", self.fallback_cost),
        }
    }
}

/// What the passes of a session do to one run, as data. Printing it gives a table.
#[derive(Clone, Debug)]
pub struct PassReport {
    /// All passes, in order.
    pub passes: Vec<Pass>,
    /// What each did; one that works on parts has a record for each.
    pub log: Vec<PassRecord>,
    /// The graph after the pass that was asked for.
    pub text: Option<String>,
}

impl fmt::Display for PassReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = vec![["pass", "stage", "nodes", "why"].map(str::to_owned)];
        for pass in &self.passes {
            let records = || self.log.iter().filter(|record| record.pass == pass.name());
            let sum = |n: fn(&PassRecord) -> usize| records().map(n).sum::<usize>();
            let nodes = match records().any(|record| record.has_changed) {
                true => format!("{} -> {}", sum(|record| record.n_before), sum(|record| record.n_after)),
                false if records().any(|record| record.undone.is_some()) => "undone".to_owned(),
                false if records().next().is_some() => "unchanged".to_owned(),
                false => "-".to_owned(),
            };
            table.push([pass.name().to_owned(), pass.stage().to_string(), nodes, pass.why().to_owned()]);
        }
        let width = |column: usize| table.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..4).map(width).collect();
        for row in &table {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// Plans runs; remembers where nodes were placed.
pub(crate) struct Planner {
    devices: Arc<Devices>,
    infos: Vec<DeviceInfo>,
    options: PlaceOptions,
    log: bool,
    copies: ImplicitCopies,
    captures: Captures,
    /// What happens to a graph, in order.
    passes: Vec<Pass>,
    /// Where earlier runs put nodes: rule 1.
    earlier: HashMap<NodeId, usize>,
    placed: BTreeMap<NodeId, (Placed, Option<usize>)>,
    /// Nodes whose pin changed, and where they were.
    moved_from: HashMap<NodeId, usize>,
    fresh: u64,
}

impl Planner {
    pub fn new(devices: Arc<Devices>, config: &SessionConfig) -> Planner {
        let infos = devices.infos();
        let placement = if config.allow_soft_placement { Placement::Soft } else { Placement::Strict };
        Planner {
            devices,
            infos,
            options: PlaceOptions {
                placement,
                policy: config.placement_policy,
                max_fallbacks: config.max_fallbacks,
                costs: config.costs.clone(),
                ..PlaceOptions::default()
            },
            log: config.log_device_placement,
            copies: match config.deny_implicit_copies {
                true => ImplicitCopies::Denied,
                false => ImplicitCopies::Allowed,
            },
            captures: if config.gpu.no_capture { Captures::Off } else { Captures::Whole },
            passes: session_passes(config),
            earlier: HashMap::new(),
            placed: BTreeMap::new(),
            moved_from: HashMap::new(),
            fresh: 0,
        }
    }

    pub fn plan(&mut self, nodes: &Nodes, wanted: &Wanted, kernels: &KernelCache) -> Result<RunPlan> {
        let plan = self.plan_parts(nodes, wanted, None)?;
        fusion::log_undone(&plan.log);
        let compiled = CompiledPlan::new(plan.parts, &self.devices, kernels, FrameIds::default(), self.captures)?;

        // Only a plan that can run counts as an earlier run.
        let mut n_new_fallbacks = 0;
        // Nodes that passes added are the plan's own: their numbers mean nothing to the next one.
        for &id in plan.pruned.nodes.iter().filter(|id| id.index() < nodes.len()) {
            let Some(row) = &plan.placement[id.index()] else { continue };
            self.earlier.insert(id, row.device);
            let bytes = plan.moved.get(&id).copied().unwrap_or(Some(0));
            if let Some((old, most)) = self.placed.get_mut(&id).filter(|(old, _)| old.device == row.device) {
                // Runs differ in what they take from a node; the table shows the most.
                *most = most.zip(bytes).map(|(most, bytes)| most.max(bytes));
                old.wish = row.wish.clone();
                continue;
            }
            n_new_fallbacks += usize::from(row.rule.is_fallback());
            let (node, device) = (nodes.node(id), &self.infos[row.device].name);
            if self.log {
                tracing::info!(target: "kolo::placement", "{}: ({}): {device}", node.name, node.op());
            }
            if let Some((old, _)) = self.placed.insert(id, (row.clone(), bytes)) {
                let from = &self.infos[old.device].name;
                tracing::info!(
                    target: "kolo::placement",
                    "{}: ({}): moved from {from} to {device}{}", node.name, node.op(), node.pinned_at()
                );
                self.moved_from.insert(id, old.device);
            }
        }
        if n_new_fallbacks > 0 {
            tracing::warn!(target: "kolo::placement", "{}", self.fallback_cost(nodes));
        }
        let feeds = wanted.feed_infos(nodes);
        let echo = |(fetch, at): (usize, &Endpoint)| plan.pruned.feed_of(*at).map(|feed| (fetch, feed));
        let parts = &compiled.parts;
        Ok(RunPlan {
            is_stale: AtomicBool::new(false),
            is_constant: parts.iter().all(|part| part.roots.is_empty() && part.feeds.is_empty()),
            feeds,
            n_fetches: wanted.fetches.len(),
            echoes: plan.pruned.fetches.iter().enumerate().filter_map(echo).collect(),
            exchanges: DeviceExchanges::of(parts),
            compiled,
        })
    }

    /// Plans without compiling, and without remembering where nodes were placed.
    fn plan_parts(&mut self, nodes: &Nodes, wanted: &Wanted, show_after: Option<&str>) -> Result<Plan> {
        let request = Request {
            feeds: wanted.feeds.to_vec(),
            fetches: wanted.fetches.to_vec(),
            targets: wanted.targets.to_vec(),
        };
        let fresh = &mut self.fresh;
        let request = PlanRequest {
            nodes,
            request: &request,
            connections: &[],
            registry: registry(),
            devices: &self.infos,
            support: &Support { devices: &self.devices },
            earlier: &self.earlier,
            place: &self.options,
            copies: self.copies,
            granularity: Granularity::Device,
            loops: LoopControl::Add,
            ends: Ends::Caller,
            passes: &self.passes,
            show_after,
        };
        plan(&request, &mut || {
            *fresh += 1;
            *fresh
        })
    }

    /// What each pass does to a run, and the graph after the pass `after`, without running it.
    pub fn explain_passes(&mut self, nodes: &Nodes, wanted: &Wanted, after: Option<&str>) -> Result<PassReport> {
        if let Some(after) = after.filter(|after| self.passes.iter().all(|pass| pass.name() != *after)) {
            let names: Vec<&str> = self.passes.iter().map(Pass::name).collect();
            return Err(Error::not_found(format!("there is no pass '{after}'; there are {}", names.join(", "))));
        }
        let plan = self.plan_parts(nodes, wanted, after)?;
        Ok(PassReport { passes: self.passes.clone(), log: plan.log, text: plan.text })
    }

    pub fn report(&self, nodes: &Nodes) -> PlacementReport {
        let row = |(&id, (placed, bytes)): (&NodeId, &(Placed, Option<usize>))| {
            let node = nodes.node(id);
            PlacementRow {
                node: node.name.to_string(),
                op: node.def.name,
                wish: placed.wish.clone(),
                device: self.infos[placed.device].name.clone(),
                pinned_at: node.device_source.clone().filter(|_| !node.device.is_empty()),
                rule: placed.rule,
                moved_from: self.moved_from.get(&id).map(|&from| self.infos[from].name.clone()),
                n_bytes_moved: *bytes,
            }
        };
        let fallback_cost = self.fallback_cost(nodes);
        PlacementReport {
            rows: self.placed.iter().map(row).collect(),
            n_fallbacks: fallback_cost.n_nodes,
            fallback_cost,
        }
    }

    /// What the nodes that fell back so far cost.
    fn fallback_cost(&self, nodes: &Nodes) -> FallbackCost {
        let placed = |id: NodeId| self.placed.get(&id).map(|(placed, _)| placed);
        price_fallbacks(nodes, &self.infos, &placed, &self.options.costs)
    }

    /// The placed nodes that must move because `nodes` pins them, or what shares their device, elsewhere than earlier
    /// runs put them. PartState does not move by itself: that is an error.
    pub fn moves(&self, nodes: &Nodes) -> Result<HashSet<NodeId>> {
        let mut changed = Vec::new();
        for (&id, (placed, _)) in &self.placed {
            let node = nodes.node(id);
            let at = &self.infos[placed.device].name;
            if node.device == placed.wish || node.device.matches(at) {
                continue;
            }
            if self.keeps_state(nodes, id) {
                return Err(state_stays(node, &node.device, &node.pinned_at(), at));
            }
            changed.push(id);
        }
        if changed.is_empty() {
            return Ok(HashSet::new());
        }
        let leaders = colocation_leaders(nodes)?;
        let sets: HashSet<NodeId> = changed.iter().map(|id| leaders[id.index()]).collect();
        let moves = |id: &NodeId| sets.contains(&leaders[id.index()]) && !self.keeps_state(nodes, *id);
        Ok(self.placed.keys().copied().filter(moves).collect())
    }

    /// Forgets where these nodes are, so that the next plan places them anew.
    pub fn forget(&mut self, ids: &HashSet<NodeId>) {
        self.earlier.retain(|id, _| !ids.contains(id));
    }

    /// Whether a node keeps something between steps itself: a variable, a queue, the place in a random stream. Nodes that
    /// work on the state of others go where that is.
    pub fn keeps_state(&self, nodes: &Nodes, id: NodeId) -> bool {
        let node = nodes.node(id);
        let borrows = |(i, at): (usize, &Endpoint)| {
            node.ref_inputs.get(i).copied().unwrap_or(false) || nodes.output(*at).dtype == DType::Resource
        };
        if holds_state(node) {
            return true;
        }
        if !node.def.stateful || node.inputs.iter().enumerate().any(borrows) {
            return false;
        }
        // A kernel that is a plain function has nowhere to keep anything.
        let cpu = DeviceName::local("CPU", 0);
        !find_kernel(node, &cpu).is_ok_and(|kernel| matches!(kernel.make, KernelMaker::Function(_)))
    }

    /// Where earlier runs put a node.
    pub fn device_of(&self, id: NodeId) -> Option<usize> {
        self.earlier.get(&id).copied()
    }

    /// Whether a node can run on device number `device`.
    pub fn runs_on(&self, node: &Node, device: usize) -> bool {
        Support { devices: &self.devices }.has_kernel(node, &self.infos[device].name)
    }

    /// Notes that these nodes are on `device` now.
    pub fn relocate(&mut self, nodes: &Nodes, ids: &[NodeId], device: usize) {
        for &id in ids {
            let Some((placed, bytes)) = self.placed.get_mut(&id) else { continue };
            if placed.device != device {
                self.moved_from.insert(id, placed.device);
            }
            self.earlier.insert(id, device);
            let wish = nodes.node(id).device.clone();
            let rule = if wish.is_empty() { Rule::Colocated } else { Rule::Pinned };
            // The next plan says what it makes move.
            (*placed, *bytes) = (Placed { device, wish, rule, missed: None }, Some(0));
        }
    }
}

/// The passes of a local session: the user's, then ours, which look for what is left.
fn session_passes(config: &SessionConfig) -> Vec<Pass> {
    let mut passes = vec![Pass::noted(
        "placement-rules",
        Stage::Described,
        "pins by pattern are the session's, so they hold for every run; done when the session begins",
    )];
    passes.extend(config.passes.iter().cloned());
    passes.push(order_collectives());
    if !config.gpu.no_fusion {
        passes.extend(fusion::passes());
    }
    passes.extend(compile::passes());
    pipeline(&passes)
}

/// The op table's answer to what can run where; null devices answer for themselves.
pub(crate) struct Support<'a> {
    pub devices: &'a Devices,
}

impl Support<'_> {
    /// Which arguments of a node on a GPU are in host memory; nothing for other devices, whose memory is all alike.
    fn host_arguments(&self, node: &Node, device: &DeviceName) -> (Vec<bool>, Vec<bool>) {
        let unit = self.devices.units.iter().find(|unit| unit.device.attributes().name == *device);
        match unit.filter(|unit| !unit.device.memory().is_host()) {
            Some(_) => find_kernel(node, device).map(|kernel| host_arguments(node, kernel)).unwrap_or_default(),
            None => Default::default(),
        }
    }
}

impl KernelSupport for Support<'_> {
    fn has_kernel(&self, node: &Node, device: &DeviceName) -> bool {
        let unit = self.devices.units.iter().find(|unit| unit.device.attributes().name == *device);
        match unit.and_then(|unit| unit.device.as_null()) {
            Some(null) => null.has_kernel(node.op()),
            None => find_kernel(node, device).is_ok(),
        }
    }

    fn kernels(&self, node: &Node) -> Vec<String> {
        find_op(node.op()).map(|op| kernels_of(op).map(|kernel| kernel.describe(op)).collect()).unwrap_or_default()
    }

    fn host_inputs(&self, node: &Node, device: &DeviceName) -> Vec<bool> {
        self.host_arguments(node, device).0
    }

    fn host_outputs(&self, node: &Node, device: &DeviceName) -> Vec<bool> {
        self.host_arguments(node, device).1
    }
}
