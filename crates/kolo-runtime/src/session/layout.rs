//! The devices that a session's nodes request, and how these requests change while the session lives: placement rules
//! are replaced, and nodes are moved.
//!
//! A node without state follows its pin. State stays where an earlier run placed it; [`crate::LocalView::move_node`]
//! moves a variable with its value, and every node that must share its device.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kolo_core::{DeviceName, DeviceSpec, Error, Result, Tensor};
use kolo_device::copy_between;
use kolo_graph::{Node, NodeId, Nodes, Origin, PlacementRules, colocation_leaders, holds_state, is_variable};
use kolo_ops::VariableCell;

use crate::planner::Planner;
use crate::session::local::LocalSession;

/// What determines the devices that nodes request.
#[derive(Clone)]
pub(crate) struct Layout {
    /// The nodes as the graph describes them.
    pub described: Nodes,
    rules: PlacementRules,
    /// Nodes that were moved explicitly, and their devices.
    moved: BTreeMap<NodeId, DeviceName>,
}

impl Layout {
    pub fn new(described: Nodes, rules: PlacementRules) -> Layout {
        Layout { described, rules, moved: BTreeMap::new() }
    }

    /// The same layout for a graph that has grown.
    pub fn of_grown(&self, described: Nodes) -> Layout {
        Layout { described, rules: self.rules.clone(), moved: self.moved.clone() }
    }

    /// The nodes with the devices that they request in the end.
    fn nodes(&self) -> Nodes {
        let mut nodes = self.rules.apply(&self.described);
        for (&id, device) in &self.moved {
            nodes.pin(id, device.spec(), Origin::Call("session.move_node"));
        }
        nodes
    }
}

/// A variable's value that is being moved.
struct Luggage {
    /// The device it leaves.
    from: usize,
    container: String,
    name: Arc<str>,
    cell: Arc<VariableCell>,
    value: Option<Tensor>,
}

impl LocalSession {
    pub fn set_placement_rules(&self, rules: PlacementRules) -> Result<()> {
        self.check_open()?;
        let mut layout = self.layout.lock();
        let mut new = Layout { rules, ..layout.clone() };
        // A rule overrides an explicit move. If it names another device and the node keeps state there, `lay_out`
        // refuses.
        let Layout { described, rules, moved } = &mut new;
        moved.retain(|&id, device| {
            let node = described.node(id);
            !rules.decides(node) || rules.device(node).matches(device)
        });
        self.lay_out(&mut layout, new)
    }

    pub fn move_node(&self, name: &str, device: &str) -> Result<()> {
        self.check_open()?;
        let to = self.device_like(&DeviceSpec::parse(device)?)?;
        let to_name = self.devices.units[to].device.attributes().name.clone();
        let mut layout = self.layout.lock();
        let nodes = layout.nodes();
        let id = nodes.require(name)?;
        let leaders = colocation_leaders(&nodes)?;
        let shares = |other: &NodeId| leaders[other.index()] == leaders[id.index()];
        let members: Vec<NodeId> = nodes.iter().map(|(other, _)| other).filter(shares).collect();
        let mut planner = self.planner.lock();
        for &id in &members {
            check_moves(&planner, &nodes, id, to, &to_name)?;
        }
        // Held until the move is complete: a step that begins now blocks here, and then finds its plan stale.
        let active = self.active.lock();
        if !active.is_empty() {
            return Err(Error::failed_precondition(format!(
                "'{name}' cannot move now: {} runs are in flight; move nodes between runs",
                active.len()
            )));
        }
        let luggage = self.pack(&planner, &nodes, &members, to)?;

        let mut new = layout.clone();
        for &id in &members {
            let node = nodes.node(id);
            if holds_state(node) || node.name.as_ref() == name || !node.device.matches(&to_name) {
                new.moved.insert(id, to_name.clone());
            }
        }
        let nodes = new.nodes();
        for item in luggage {
            self.unpack(item, to)?;
        }
        planner.relocate(&nodes, &members, to);
        self.drop_plans();
        tracing::info!(target: "kolo::placement", "{name} and {} nodes with it moved to {to_name}", members.len() - 1);
        *layout = new;
        *self.nodes.write() = nodes;
        Ok(())
    }

    /// Makes `new` the layout; an error if that would move state.
    pub(crate) fn lay_out(&self, layout: &mut Layout, new: Layout) -> Result<()> {
        let nodes = new.nodes();
        let mut planner = self.planner.lock();
        let moves = planner.moves(&nodes)?;
        planner.forget(&moves);
        if !moves.is_empty() {
            self.drop_plans();
        }
        *self.nodes.write() = nodes;
        *layout = new;
        Ok(())
    }

    /// The first device that matches `spec`.
    pub(crate) fn device_like(&self, spec: &DeviceSpec) -> Result<usize> {
        let names = || self.devices.units.iter().map(|unit| &unit.device.attributes().name);
        names().position(|name| spec.matches(name)).ok_or_else(|| {
            let all: Vec<String> = names().map(ToString::to_string).collect();
            Error::invalid_argument(format!("no device is like '{spec}'; there are {}", all.join(", ")))
        })
    }

    /// Drops all plans; they are compiled again on demand.
    fn drop_plans(&self) {
        for (_, plan) in self.plans.write().drain() {
            plan.is_stale.store(true, Ordering::Relaxed);
        }
    }

    /// Copies the values of the variables among `members` to device `to`. Changes nothing if it fails.
    fn pack(&self, planner: &Planner, nodes: &Nodes, members: &[NodeId], to: usize) -> Result<Vec<Luggage>> {
        let target = &self.devices.units[to];
        let mut luggage = Vec::new();
        let mut seen: HashMap<(String, Arc<str>), ()> = HashMap::new();
        for &id in members {
            let node = nodes.node(id);
            let Some(from) = planner.device_of(id).filter(|&from| from != to && is_variable(node)) else { continue };
            let (container, name) = resource_key(node)?;
            if seen.insert((container.clone(), name.clone()), ()).is_some() {
                continue;
            }
            let Some(cell) = self.devices.units[from].resources.lookup::<VariableCell>(&container, &name)? else {
                continue;
            };
            let there = target.resources.lookup::<VariableCell>(&container, &name)?;
            if there.is_some_and(|there| there.is_initialized()) {
                return Err(Error::already_exists(format!(
                    "'{name}' cannot move to {}: there is a variable of that name with a value",
                    target.name
                )));
            }
            let source = &self.devices.units[from].device;
            let copied = |value: Tensor| copy_between(&value, &**source, &*target.device, &name);
            let value = cell.read().map(copied).transpose()?;
            luggage.push(Luggage { from, container, name, cell, value });
        }
        Ok(luggage)
    }

    /// Puts a variable into the store of device `to` and removes it from its old one.
    fn unpack(&self, item: Luggage, to: usize) -> Result<()> {
        let Luggage { from, container, name, cell, value } = item;
        let make = || Ok(VariableCell::new(name.clone(), cell.dtype(), cell.shape().clone()));
        let there = self.devices.units[to].resources.lookup_or_create(&container, &name, make)?;
        if let Some(value) = value {
            there.assign(value)?;
        }
        self.devices.units[from].resources.remove(&container, &name);
        // Kernels of the old device may still hold the cell; its memory is freed without waiting for them.
        cell.clear();
        Ok(())
    }
}

/// Refuses a node that cannot go to device `to`.
fn check_moves(planner: &Planner, nodes: &Nodes, id: NodeId, to: usize, to_name: &DeviceName) -> Result<()> {
    let node = nodes.node(id);
    let was_placed = planner.device_of(id).is_some_and(|at| at != to);
    if was_placed && planner.keeps_state(nodes, id) && !is_variable(node) {
        return Err(Error::failed_precondition(format!(
            "{} does not move to {to_name}: only variables take what they hold along; make a new session to place it anew",
            node.describe()
        )));
    }
    match planner.runs_on(node, to) {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!("{} has no kernel on {to_name}", node.describe()))),
    }
}

/// The container and name under which a variable's node keeps its value.
fn resource_key(node: &Node) -> Result<(String, Arc<str>)> {
    let name = match node.attrs.str("shared_name")? {
        "" => node.name.clone(),
        shared => shared.into(),
    };
    Ok((node.attrs.str("container")?.to_owned(), name))
}
