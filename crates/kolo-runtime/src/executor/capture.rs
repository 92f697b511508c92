//! Steps that are captured as a CUDA graph and replayed.
//!
//! A plan is captured after a few runs if all of it is on one GPU and nothing in it depends on a value that the host sees:
//! then the same kernels run on the same memory each time, and one call stands for all of them. Feeds are copied into fixed
//! buffers, fetches out of fixed ones. Nodes that run on the host (shapes, axes) ran during the capture and give the same
//! each time, since shapes of feeds are part of the agreement.
//!
//! Before each replay the variables must be where the capture saw them, and nobody else may hold what they contain; otherwise
//! the step runs as usual. Whatever cannot be captured says so once (`KOLO_LOG=kolo::capture=debug`) and runs as usual too.
//!
//! The slot's lock is held while a capture or a replay is enqueued and its fetches arrive: replays of one plan share their
//! buffers. Then the variables' locks, in the order of their addresses.

use std::sync::Arc;

use kolo_core::{DType, Error, Memory, Result, Shape, Tensor};
use kolo_device::Device;
use kolo_device::cuda::{Captured, CudaDevice};
use kolo_graph::Flow;
use kolo_ops::{VariableCell, record_variables};
use parking_lot::Mutex;

use super::plan::{PartPlan, PlanKernel, updates_variable};
use super::step::Step;

/// Runs before a capture: kernels are compiled, algorithms chosen and memory taken in these.
const WARM_UP: u32 = 3;
/// Captures of one plan, at most: one that is lost again and again is not worth it.
const MOST_CAPTURES: u32 = 8;
/// Runs that a capture did not fit before another is made.
const PATIENCE: u32 = 4;

/// What is known of capturing one plan.
pub(crate) struct CaptureSlot {
    state: Mutex<State>,
}

enum State {
    /// Never, and why.
    Off(String),
    /// So many runs, after so many captures.
    Warm {
        n_runs: u32,
        n_captures: u32,
    },
    Ready {
        replay: Box<Replay>,
        n_captures: u32,
        n_misses: u32,
    },
}

struct Replay {
    /// For each feed of the part its number and its place on the card.
    feeds: Vec<(usize, Tensor)>,
    /// The fetches by number, where each replay leaves them.
    fetches: Vec<(usize, Tensor)>,
    /// The variables and where their values are, in the order of the cells' addresses.
    variables: Vec<(Arc<VariableCell>, u64)>,
    /// After the tensors above, which lie in its memory.
    captured: Captured,
}

/// What a run through a slot gives: fetches by number, or nothing if the step has to run as usual.
type Replayed = Option<Vec<(usize, Tensor)>>;

impl CaptureSlot {
    /// For a plan of these parts.
    pub fn new(parts: &[Arc<PartPlan>], is_wanted: bool) -> CaptureSlot {
        let why_not = if is_wanted { why_not(parts) } else { Some("it is switched off".to_owned()) };
        let state = match why_not {
            Some(why) => State::Off(why),
            None => State::Warm { n_runs: 0, n_captures: 0 },
        };
        CaptureSlot { state: Mutex::new(state) }
    }

    /// Runs the step by a replay, if there is one for such feeds, or makes one. `new_step` makes a step to be captured.
    pub fn run(&self, part: &PartPlan, feeds: &[&Tensor], new_step: &dyn Fn() -> Arc<Step>) -> Result<Replayed> {
        let mut state = self.state.lock();
        let device = match &*state {
            State::Off(_) => return Ok(None),
            State::Warm { .. } | State::Ready { .. } => CudaDevice::of(&*part.unit.device)?,
        };
        match &mut *state {
            State::Off(_) => Ok(None),
            State::Warm { n_runs, .. } if *n_runs < WARM_UP => {
                *n_runs += 1;
                Ok(None)
            }
            State::Warm { n_captures, .. } => {
                let n_captures = *n_captures + 1;
                let made = match n_captures > MOST_CAPTURES {
                    true => Err(Error::aborted("its variables or feeds changed too often")),
                    false => Replay::capture(device, part, feeds, new_step),
                };
                match made {
                    Ok(replay) => {
                        let n_nodes = replay.captured.n_nodes();
                        tracing::debug!(target: "kolo::capture", "captured {n_nodes} launches on {}", part.unit.name);
                        let fetched = replay.run(device, feeds)?;
                        *state = State::Ready { replay: Box::new(replay), n_captures, n_misses: 0 };
                        Ok(fetched)
                    }
                    Err(error) => {
                        tracing::debug!(target: "kolo::capture", "not captured on {}: {error}", part.unit.name);
                        *state = State::Off(error.to_string());
                        Ok(None)
                    }
                }
            }
            State::Ready { replay, n_captures, n_misses } => {
                let fetched = match replay.fits(feeds) {
                    true => replay.run(device, feeds)?,
                    false => None,
                };
                *n_misses = if fetched.is_some() { 0 } else { *n_misses + 1 };
                if *n_misses >= PATIENCE {
                    let n_captures = *n_captures;
                    *state = State::Warm { n_runs: 0, n_captures };
                }
                Ok(fetched)
            }
        }
    }

    /// Why it is not captured, or how many launches a replay stands for.
    pub fn describe(&self) -> std::result::Result<usize, String> {
        match &*self.state.lock() {
            State::Off(why) => Err(why.clone()),
            State::Warm { n_runs, .. } => Err(format!("{n_runs} runs so far")),
            State::Ready { replay, .. } => Ok(replay.captured.n_nodes()),
        }
    }
}

impl Replay {
    fn capture(
        device: &CudaDevice,
        part: &PartPlan,
        feeds: &[&Tensor],
        new_step: &dyn Fn() -> Arc<Step>,
    ) -> Result<Replay> {
        let mut fixed = Vec::new();
        for feed in &part.feeds {
            let number = feed.feed as usize;
            let value = feeds.get(number).ok_or_else(|| Error::internal(format!("feed {number} is missing")))?;
            if !fixed.iter().any(|(at, _)| *at == number) {
                fixed.push((number, device.copy(value, device.memory())?.0));
            }
        }
        let step = new_step();
        let capturing = device.begin_capture()?;
        let (fetches, touched) = record_variables(|| {
            let values: Vec<(usize, &Tensor)> = fixed.iter().map(|(number, tensor)| (*number, tensor)).collect();
            step.feed(&values, false);
            step.run(None, &|_| false);
            step.take_fetched()
        });
        // Its tensors go back to the capture's memory before the capture ends, and before it is forgotten after an error.
        drop(step);
        let fetches = fetches?;
        let captured = capturing.end()?;
        let mut variables: Vec<(Arc<VariableCell>, u64)> = Vec::new();
        for cell in touched {
            if variables.iter().any(|(known, _)| Arc::ptr_eq(known, &cell)) {
                continue;
            }
            let address = cell.with_value(|value| match value {
                Some(tensor) => device.address_of(tensor),
                None => Err(Error::failed_precondition(format!("variable {} has no value", cell.name()))),
            })?;
            variables.push((cell, address));
        }
        variables.sort_by_key(|(cell, _)| Arc::as_ptr(cell) as usize);
        for (fetch, value) in fetches.iter().filter(|(_, value)| is_on_card(value)) {
            let at = device.address_of(value)?;
            if variables.iter().any(|(_, address)| *address == at) {
                return Err(Error::unimplemented(format!("fetch {fetch} is a variable's own memory")));
            }
        }
        Ok(Replay { feeds: fixed, fetches, variables, captured })
    }

    /// Whether it was captured for feeds of these shapes.
    fn fits(&self, feeds: &[&Tensor]) -> bool {
        let form = |tensor: &Tensor| -> (DType, Shape) { (tensor.dtype(), tensor.shape().clone()) };
        self.feeds.iter().all(|(number, place)| feeds.get(*number).is_some_and(|feed| form(feed) == form(place)))
    }

    /// Replays, unless the variables have changed their places. All fetches have arrived when it returns.
    fn run(&self, device: &CudaDevice, feeds: &[&Tensor]) -> Result<Replayed> {
        for (number, place) in &self.feeds {
            if let Some(value) = feeds.get(*number) {
                device.write_over(value, place)?;
            }
        }
        if !with_all(device, &self.variables, &mut || self.captured.replay())? {
            return Ok(None);
        }
        let mut events = Vec::new();
        let mut fetched = Vec::with_capacity(self.fetches.len());
        for (number, value) in &self.fetches {
            let value = match is_on_card(value) {
                true => {
                    let (copy, event) = device.copy(value, Memory::Host)?;
                    events.extend(event);
                    copy
                }
                false => value.clone(),
            };
            fetched.push((*number, value));
        }
        events.iter().try_for_each(|event| event.wait())?;
        Ok(Some(fetched))
    }
}

/// Runs `f` under the locks of all variables if each is where it was and nobody else holds it; says whether it did.
fn with_all(
    device: &CudaDevice,
    variables: &[(Arc<VariableCell>, u64)],
    f: &mut dyn FnMut() -> Result<()>,
) -> Result<bool> {
    let Some(((cell, address), rest)) = variables.split_first() else { return f().map(|()| true) };
    cell.with_value(|value| {
        let Some(tensor) = value else { return Ok(false) };
        match device.address_of(tensor)? == *address && tensor.is_unique() {
            true => with_all(device, rest, f),
            false => Ok(false),
        }
    })
}

fn is_on_card(tensor: &Tensor) -> bool {
    matches!(tensor.memory(), Memory::Cuda(_))
}

/// Why a plan of these parts cannot be captured.
fn why_not(parts: &[Arc<PartPlan>]) -> Option<String> {
    let [part] = parts else { return Some(format!("it has {} parts", parts.len())) };
    if !matches!(part.unit.device.memory(), Memory::Cuda(_)) {
        return Some(format!("{} is not a GPU", part.unit.name));
    }
    if let Some(feed) = part.feeds.iter().find(|feed| !feed.on_device) {
        return Some(format!("feed {} is read on the host", feed.feed));
    }
    let n_loops = part.frames.len().saturating_sub(1);
    if n_loops > 0 {
        return Some(format!("it has {n_loops} loops"));
    }
    part.nodes.iter().find_map(|node| {
        let op = node.node.op();
        let name = || format!("{op} '{}'", node.node.name);
        let is_placed_constant = op == "Const" && matches!(node.kernel, PlanKernel::Flow);
        if node.flow != Flow::Plain {
            return Some(format!("{} is control flow or a transfer", name()));
        }
        match &node.kernel {
            PlanKernel::Function(_) | PlanKernel::Object(_) | PlanKernel::Lend => {}
            PlanKernel::Flow if is_placed_constant => return None,
            PlanKernel::Async(_) | PlanKernel::Flow | PlanKernel::Null => {
                return Some(format!("{} waits for the host", name()));
            }
        }
        let is_variable = matches!(
            op,
            "VarHandleOp"
                | "ReadVariableOp"
                | "_ReadVariablesOp"
                | "VariableV2"
                | "Variable"
                | "ResourceGather"
                | "NoOp"
        );
        if node.node.def.stateful && !is_variable && !updates_variable(op) {
            return Some(format!("{} has a state of its own", name()));
        }
        None
    })
}
