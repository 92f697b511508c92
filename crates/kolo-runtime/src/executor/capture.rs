//! Steps that are captured as a CUDA graph and replayed.
//!
//! A plan is captured after a few runs if all of it is on one GPU and nothing in it depends on a value that the host sees:
//! then the same kernels run on the same memory each time, and one call stands for all of them. Feeds are copied into fixed
//! buffers, fetches out of fixed ones. Nodes that run on the host (shapes, axes, numbers of elements) ran during the capture
//! and give the same each time, since they see only constants and the shapes of feeds and variables, which are part of the
//! agreement; what they sent to the card is kept there, and so is what nodes on the card compute from such values alone. So a capture is for feeds of certain shapes, and a plan has a few.
//!
//! Before each replay the variables must be where the capture saw them, and nobody else may hold what it writes to; otherwise
//! the step runs as usual. Whatever cannot be captured says so once (`KOLO_LOG=kolo::capture=debug`) and runs as usual too.
//!
//! The slot's lock is held while a capture or a replay is enqueued and its fetches arrive: replays of one plan share their
//! buffers. Then the variables' locks, in the order of their addresses.

use std::sync::Arc;

use kolo_core::{DType, Error, Memory, Result, Shape, Tensor};
use kolo_device::Device;
use kolo_device::cuda::{Captured, CudaDevice};
use kolo_graph::Flow;
use kolo_ops::{Touched, Value, VariableCell, record_variables};
use parking_lot::Mutex;

use super::plan::{NodePlan, PartPlan, PlanKernel, updates_variable};
use super::step::Step;

/// Runs before a capture: kernels are compiled, algorithms chosen and memory taken in these.
const WARM_UP: u32 = 3;
/// Captures of one plan that were lost before they were worth it, at most.
const MOST_CAPTURES: u32 = 8;
/// Replays after which a capture was worth it.
const WORTH_IT: u32 = 64;
/// Runs that no capture fitted before another is made.
const PATIENCE: u32 = 4;
/// Captures of one plan at a time, for feeds of different shapes; each holds memory of its own.
const MOST_AT_ONCE: usize = 4;

/// What is known of capturing one plan.
pub(crate) struct CaptureSlot {
    state: Mutex<State>,
}

enum State {
    /// Never, and why.
    Off(String),
    /// It is captured now or later.
    On(Progress),
}

#[derive(Default)]
struct Progress {
    /// Runs since a capture was last found missing.
    n_runs: u32,
    /// Captures that were made since one was worth it.
    n_captures: u32,
    /// Runs in a row that no capture fitted.
    n_misses: u32,
    /// The last that fitted is the last.
    replays: Vec<Replay>,
}

struct Replay {
    /// For each feed of the part its number and its place on the card.
    feeds: Vec<(usize, Tensor)>,
    /// The fetches by number, where each replay leaves them.
    fetches: Vec<(usize, Tensor)>,
    /// In the order of the cells' addresses.
    variables: Vec<Place>,
    n_replays: u32,
    /// After the tensors above, which lie in its memory.
    captured: Captured,
}

/// A variable, and where its value must be.
struct Place {
    cell: Arc<VariableCell>,
    is_written: bool,
    address: u64,
    shape: Shape,
}

/// What a run through a slot gives: fetches by number, or nothing if the step has to run as usual.
type Replayed = Option<Vec<(usize, Tensor)>>;

impl CaptureSlot {
    /// For a plan of these parts.
    pub fn new(parts: &[Arc<PartPlan>], is_wanted: bool) -> CaptureSlot {
        let why_not = if is_wanted { why_not(parts) } else { Some("it is switched off".to_owned()) };
        let state = match why_not {
            Some(why) => State::Off(why),
            None => State::On(Progress::default()),
        };
        CaptureSlot { state: Mutex::new(state) }
    }

    /// Runs the step by a replay, if there is one for such feeds, or makes one. `new_step` makes a step to be captured.
    pub fn run(&self, part: &PartPlan, feeds: &[&Tensor], new_step: &dyn Fn() -> Arc<Step>) -> Result<Replayed> {
        let mut state = self.state.lock();
        let State::On(progress) = &mut *state else { return Ok(None) };
        // What is captured is what one thread enqueues.
        if part.unit.pool.max_threads() > 1 {
            return Ok(None);
        }
        let device = CudaDevice::of(&*part.unit.device)?;
        if let Some(fetched) = progress.replay(device, feeds)? {
            return Ok(Some(fetched));
        }
        progress.n_misses = progress.n_misses.saturating_add(1);
        if progress.n_runs < WARM_UP {
            // Once there is a capture, other shapes now and then are no reason for another.
            let is_missing = progress.replays.is_empty() || progress.n_misses > PATIENCE;
            progress.n_runs += u32::from(is_missing);
            return Ok(None);
        }
        progress.n_captures += 1;
        let made = match progress.n_captures > MOST_CAPTURES {
            true => Err(Error::aborted("its variables or feeds changed too often")),
            false => Replay::capture(device, part, feeds, new_step),
        };
        match made {
            Ok(replay) => {
                let n_nodes = replay.captured.n_nodes();
                tracing::debug!(target: "kolo::capture", "captured {n_nodes} launches on {}", part.unit.name);
                progress.add(replay);
                progress.replay(device, feeds)
            }
            Err(error) => {
                tracing::debug!(target: "kolo::capture", "not captured on {}: {error}", part.unit.name);
                *state = State::Off(error.to_string());
                Ok(None)
            }
        }
    }

    /// Why it is not captured, or how many launches a replay stands for.
    pub fn describe(&self) -> std::result::Result<usize, String> {
        match &*self.state.lock() {
            State::Off(why) => Err(why.clone()),
            State::On(progress) => match progress.replays.last() {
                Some(replay) if replay.n_replays > 0 => Ok(replay.captured.n_nodes()),
                Some(_) => Err("its variables are never where the capture saw them".to_owned()),
                None => Err(format!("{} runs so far", progress.n_runs)),
            },
        }
    }
}

impl Progress {
    /// Replays what fits, if anything does.
    fn replay(&mut self, device: &CudaDevice, feeds: &[&Tensor]) -> Result<Replayed> {
        let Some(at) = self.replays.iter().rposition(|replay| replay.fits(feeds)) else { return Ok(None) };
        let Some(fetched) = self.replays[at].run(device, feeds)? else { return Ok(None) };
        (self.n_runs, self.n_misses) = (0, 0);
        let mut used = self.replays.remove(at);
        used.n_replays = used.n_replays.saturating_add(1);
        if used.n_replays == WORTH_IT {
            self.n_captures = 0;
        }
        self.replays.push(used);
        Ok(Some(fetched))
    }

    /// Adds one, instead of those for the same shapes: their variables are elsewhere by now.
    fn add(&mut self, replay: Replay) {
        self.replays.retain(|old| !old.is_for_same(&replay));
        if self.replays.len() >= MOST_AT_ONCE {
            self.replays.remove(0);
        }
        self.replays.push(replay);
        self.n_runs = 0;
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
        part.constants
            .iter()
            .filter(|constant| is_on_card(constant))
            .for_each(|constant| device.keep_in_capture(constant));
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
        let mut variables = Vec::with_capacity(touched.len());
        for Touched { cell, is_written } in touched {
            let (address, shape) = cell.with_value(|value| match value {
                Some(tensor) => Ok((device.address_of(tensor)?, tensor.shape().clone())),
                None => Err(Error::failed_precondition(format!("variable {} has no value", cell.name()))),
            })?;
            variables.push(Place { cell, is_written, address, shape });
        }
        variables.sort_by_key(|place| Arc::as_ptr(&place.cell) as usize);
        for (fetch, value) in fetches.iter().filter(|(_, value)| is_on_card(value)) {
            let at = device.address_of(value)?;
            if variables.iter().any(|place| place.address == at) {
                return Err(Error::unimplemented(format!("fetch {fetch} is a variable's own memory")));
            }
        }
        Ok(Replay { feeds: fixed, fetches, variables, n_replays: 0, captured })
    }

    /// Whether it was captured for feeds of these shapes.
    fn fits(&self, feeds: &[&Tensor]) -> bool {
        self.feeds.iter().all(|(number, place)| feeds.get(*number).is_some_and(|feed| form(feed) == form(place)))
    }

    fn is_for_same(&self, other: &Replay) -> bool {
        self.feeds.iter().map(|(_, place)| form(place)).eq(other.feeds.iter().map(|(_, place)| form(place)))
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

/// Whether a call that is being captured gives the same in every replay, because what it reads is the same: then it is made
/// now, once, and its outputs are kept.
pub(super) fn is_constant_call(device: &CudaDevice, node: &NodePlan, inputs: &[Value]) -> bool {
    if !device.is_capturing() {
        return false;
    }
    let is_same = |input: &Value| match input {
        Value::Tensor(tensor) => !is_on_card(tensor) || device.is_kept_in_capture(tensor),
        Value::Empty | Value::Reference(_) => false,
    };
    matches!(node.node.op(), "OnesLike" | "ZerosLike") || (!inputs.is_empty() && inputs.iter().all(is_same))
}

fn form(tensor: &Tensor) -> (DType, &Shape) {
    (tensor.dtype(), tensor.shape())
}

/// Runs `f` under the locks of all variables if each is where it was and nobody else holds what `f` writes to; says whether
/// it did. What is only read may be shared: an initial value often is, with the constant it came from.
fn with_all(device: &CudaDevice, variables: &[Place], f: &mut dyn FnMut() -> Result<()>) -> Result<bool> {
    let Some((place, rest)) = variables.split_first() else { return f().map(|()| true) };
    place.cell.with_value(|value| {
        let Some(tensor) = value else { return Ok(false) };
        let is_there = device.address_of(tensor)? == place.address && *tensor.shape() == place.shape;
        match is_there && (!place.is_written || tensor.is_unique()) {
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
        // A value of the host that depends on shapes alone: sent while the step is captured, and kept.
        if matches!(op, "_HostSend" | "_Recv") {
            return None;
        }
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
