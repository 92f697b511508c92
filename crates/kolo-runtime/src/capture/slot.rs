//! Steps that a device records and replays; on an NVIDIA GPU as a CUDA graph.
//!
//! A plan is captured after a few runs if all of it is on one device that records and nothing in it depends on a value that the host sees:
//! then the same kernels run on the same memory each time, and one call stands for all of them. Nodes that run on the host
//! (shapes, axes, numbers of elements) ran during the capture and give the same each time, since they see only constants and
//! the shapes of feeds and variables, which are part of the agreement; what they sent to the card is kept there, and so is what
//! nodes on the card compute from such values alone. So a capture is for feeds of certain shapes, and a plan has a few.
//! A plan that cannot be captured whole is split (`split.rs`), and its segments are captured in the same way.
//!
//! Before each replay the variables must be where the capture saw them, and nobody else may hold what it writes to; otherwise
//! the step runs as usual. Whatever cannot be captured says so once (`KOLO_LOG=kolo::capture=debug`) and runs as usual too.
//!
//! The slot's lock is held while a capture or a replay is enqueued and its fetches arrive: replays of one plan share their
//! buffers. Then the variables' locks, in the order of their addresses.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use kolo_core::{Code, Error, Result};
use kolo_device::{Address, Recorder};
use kolo_graph::{Flow, TransferEnd, Work};
use kolo_ops::Value;
use parking_lot::Mutex;

use crate::capture::limits::Limits;
use crate::capture::replay::{Feeds, Replay, Replayed, Wishes, is_on_card};
use crate::compile::part::{NodePlan, PartPlan, PlanKernel};
use crate::executor::step::Step;

/// Runs before a capture: kernels are compiled, algorithms chosen and memory taken in these.
pub(crate) const WARM_UP: u32 = 3;
/// Captures of one plan that were lost before they were worth it, at most.
const MOST_CAPTURES: u32 = 8;
/// Replays after which a capture was worth it.
const WORTH_IT: u32 = 64;
/// Runs that no capture fitted before another is made.
const PATIENCE: u32 = 4;
/// Captures of one plan at a time, for feeds of different shapes; each holds memory of its own.
const MOST_AT_ONCE: usize = 4;

/// What is known of capturing one plan, or one segment of a plan.
pub(crate) struct CaptureSlot {
    /// For a segment: how many come before it. They are captured first, so that what they leave for it is in its place.
    segment: Option<u32>,
    /// Why it is never captured, once that is known. Read without the lock below, which a run holds while a device records.
    off: OnceLock<Error>,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    /// Runs since a capture was last found missing.
    n_runs: u32,
    /// Captures that were made since one was worth it.
    n_captures: u32,
    /// Runs in a row that no capture fitted.
    n_misses: u32,
    /// Where feeds were on the card when no capture fitted, by number.
    seen: HashMap<usize, Address>,
    /// Feeds that were found elsewhere than expected.
    unsteady: HashSet<usize>,
    /// The last that fitted is the last.
    replays: Vec<Replay>,
}

impl CaptureSlot {
    /// For a plan of these parts.
    pub fn new(parts: &[Arc<PartPlan>]) -> CaptureSlot {
        match why_not(parts) {
            Some(why) => CaptureSlot::off(&why),
            None => CaptureSlot { segment: None, off: OnceLock::new(), progress: Mutex::default() },
        }
    }

    /// For a plan that is never captured whole, and why.
    pub fn off(why: &str) -> CaptureSlot {
        CaptureSlot { segment: None, off: OnceLock::from(Error::unimplemented(why)), progress: Mutex::default() }
    }

    /// For a segment of a plan, with so many before it.
    pub fn for_segment(n_before: u32) -> CaptureSlot {
        CaptureSlot { segment: Some(n_before), off: OnceLock::new(), progress: Mutex::default() }
    }

    /// Runs the step by a replay, if there is one for such feeds, or makes one. `new_step` makes a step to be captured. The
    /// feeds of a plan are tensors of the host, those of a segment are wherever its inputs are.
    pub fn run(
        &self,
        part: &PartPlan,
        feeds: &mut Feeds,
        new_step: &dyn Fn() -> Arc<Step>,
        limits: &Limits,
    ) -> Result<Replayed> {
        if self.off.get().is_some() {
            return Ok(None);
        }
        let mut progress = limits.lock(&self.progress, "another run of the same captured step")?;
        let progress = &mut *progress;
        // What is captured is what one thread enqueues.
        if part.unit.pool.max_threads() > 1 {
            return Ok(None);
        }
        let Some(device) = part.unit.device.recorder() else { return Ok(None) };
        if let Some(fetched) = progress.replay(device, feeds, limits)? {
            return Ok(Some(fetched));
        }
        progress.n_misses = progress.n_misses.saturating_add(1);
        let seen = progress.see(device, feeds);
        // Two runs more for each segment before: one to be captured in, one to be seen in its place.
        if progress.n_runs < WARM_UP.saturating_add(self.segment.unwrap_or(0).saturating_mul(2)) {
            // Once there is a capture, other shapes now and then are no reason for another.
            let is_missing = progress.replays.is_empty() || progress.n_misses > PATIENCE;
            progress.n_runs += u32::from(is_missing);
            return Ok(None);
        }
        progress.n_captures += 1;
        let is_steady = |number: usize, at: Address| {
            self.segment.is_some() && seen.get(&number) == Some(&at) && !progress.unsteady.contains(&number)
        };
        let wishes = Wishes { stays: self.segment.is_some(), is_steady: &is_steady };
        let made = match progress.n_captures > MOST_CAPTURES {
            true => Err(Error::aborted("its variables or feeds changed too often")),
            false => Replay::capture(device, part, feeds, &wishes, new_step, limits),
        };
        match made {
            Ok(replay) => {
                let n_launches = replay.n_launches();
                tracing::debug!(target: "kolo::capture", "captured {n_launches} launches on {}", part.unit.name);
                progress.add(replay);
                progress.replay(device, feeds, limits)
            }
            Err(error) => {
                tracing::debug!(target: "kolo::capture", "not captured on {}: {error}", part.unit.name);
                // A library may fail because of what another thread does to the card meanwhile: that is tried again.
                match error.code() == Code::Unimplemented || progress.n_captures > MOST_CAPTURES {
                    // The first reason stays.
                    true => drop(self.off.set(error)),
                    false => progress.n_runs = 0,
                }
                Ok(None)
            }
        }
    }

    /// Why it is not captured, or how many launches a replay stands for.
    pub fn describe(&self) -> std::result::Result<usize, String> {
        if let Some(why) = self.off.get() {
            return Err(why.to_string());
        }
        let progress = self.progress.lock();
        match progress.replays.last() {
            Some(replay) if replay.n_replays > 0 => Ok(replay.n_launches()),
            Some(_) => Err("its variables are never where the capture saw them".to_owned()),
            None => Err(format!("{} runs so far", progress.n_runs)),
        }
    }

    /// Why it is never captured, once that is known. Never waits.
    pub fn why_off(&self) -> Option<&Error> {
        self.off.get()
    }
}

impl Progress {
    /// Replays what fits, if anything does.
    fn replay(&mut self, device: &dyn Recorder, feeds: &mut Feeds, limits: &Limits) -> Result<Replayed> {
        let Some(at) = self.replays.iter().rposition(|replay| replay.fits(device, feeds)) else { return Ok(None) };
        let Some(fetched) = self.replays[at].run(device, feeds, limits)? else { return Ok(None) };
        (self.n_runs, self.n_misses) = (0, 0);
        let mut used = self.replays.remove(at);
        used.n_replays = used.n_replays.saturating_add(1);
        if used.n_replays == WORTH_IT {
            self.n_captures = 0;
        }
        self.replays.push(used);
        Ok(Some(fetched))
    }

    /// Notes where feeds are; returns where they were the last time.
    fn see(&mut self, device: &dyn Recorder, feeds: &Feeds) -> HashMap<usize, Address> {
        for replay in &self.replays {
            replay.moved(device, feeds, &mut self.unsteady);
        }
        let on_card = feeds.iter().enumerate().filter_map(|(number, value)| {
            let value = value.as_ref().filter(|value| is_on_card(value))?;
            Some((number, device.address_of(value).ok()?))
        });
        std::mem::replace(&mut self.seen, on_card.collect())
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

/// Whether a call that is being captured gives the same in every replay, because what it reads is the same: then it is made
/// now, once, and its outputs are kept.
pub(crate) fn is_constant_call(device: &dyn Recorder, node: &NodePlan, inputs: &[Value]) -> bool {
    if !device.is_recording() {
        return false;
    }
    let is_same = |input: &Value| match input {
        Value::Tensor(tensor) => !is_on_card(tensor) || device.is_kept_in_recording(tensor),
        Value::Empty | Value::Reference(_) => false,
    };
    node.node.def.work == Work::FillsLike || (!inputs.is_empty() && inputs.iter().all(is_same))
}

/// Why a plan of these parts cannot be captured.
fn why_not(parts: &[Arc<PartPlan>]) -> Option<String> {
    let [part] = parts else { return Some(format!("it has {} parts", parts.len())) };
    if part.unit.device.recorder().is_none() {
        return Some(format!("{} does not record steps", part.unit.name));
    }
    if let Some(feed) = part.feeds.iter().find(|feed| !feed.on_device) {
        return Some(format!("feed {} is read on the host", feed.feed));
    }
    let n_loops = part.frames.len().saturating_sub(1);
    if n_loops > 0 {
        return Some(format!("it has {n_loops} loops"));
    }
    part.nodes.iter().find_map(|node| {
        // A value of the host that depends on shapes alone: sent while the step is captured, and kept.
        if matches!(node.node.def.transfer, Some(TransferEnd::HostSend | TransferEnd::Recv)) {
            return None;
        }
        refusal(node).map(|why| format!("{} '{}' {why}", node.node.op(), node.node.name))
    })
}

/// Why a node cannot be captured, wherever its inputs come from. Transfers are another matter.
pub(crate) fn refusal(node: &NodePlan) -> Option<&'static str> {
    if node.flow != Flow::Plain {
        return Some("is control flow or a transfer");
    }
    match &node.kernel {
        PlanKernel::Function(_) | PlanKernel::Object(_) | PlanKernel::Lend => {}
        // A constant in its place.
        PlanKernel::Flow if node.node.def.work == Work::Constant => return None,
        PlanKernel::Async(_) | PlanKernel::Flow | PlanKernel::Null | PlanKernel::Segment(_) => {
            return Some("waits for the host");
        }
    }
    match node.node.def.stateful && !node.node.def.effects.is_about_variable_values() {
        true => Some("has a state of its own"),
        false => None,
    }
}
