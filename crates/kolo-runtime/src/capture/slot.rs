//! Steps that a device records and replays; on an NVIDIA GPU as a CUDA graph.
//!
//! A plan is captured after a few runs if all of it is on one device that can record, and nothing in it depends on a
//! value that the host reads. Then every run launches the same kernels on the same memory, and one call replaces all
//! of the launches. Nodes that run on the host (shapes, axes, numbers of elements) run during the capture. Their
//! outputs are the same in every replay, since they depend only on constants and on the shapes of feeds and
//! variables, which a replay requires to be unchanged. What they copy to the GPU stays there, and so does what nodes
//! on the GPU compute from such values alone. So a capture is valid for certain shapes of the feeds, and a plan may
//! have a few captures. A plan that cannot be captured as a whole is split (`split.rs`), and its segments are
//! captured in the same way.
//!
//! Before each replay the variables must have the addresses that they had during the capture, and nobody else may
//! hold memory that the replay writes to; otherwise the step runs node by node. So does a plan that cannot be
//! captured; the reason is logged once (`KOLO_LOG=kolo::capture=debug`).
//!
//! The slot's lock is held while a capture or a replay is enqueued and until its fetches arrive, because replays of
//! one plan share their buffers. The variables' locks are taken after it, in the order of their addresses.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use kolo_core::{Code, Error, Result};
use kolo_device::{Address, Recorder};
use kolo_graph::{Flow, TransferEnd, Work};
use kolo_ops::Value;
use parking_lot::Mutex;

use crate::capture::limits::Limits;
use crate::capture::replay::{Feeds, Replay, Replayed, Wishes, is_on_gpu};
use crate::compile::part::{NodePlan, PartPlan, PlanKernel};
use crate::executor::step::Step;

/// Runs before a capture: in these, kernels are compiled, algorithms chosen and memory allocated.
pub(crate) const WARM_UP: u32 = 3;
/// The maximum number of captures of one plan that are discarded before they have paid off.
const MOST_CAPTURES: u32 = 8;
/// The number of replays after which a capture has paid off.
const WORTH_IT: u32 = 64;
/// The number of runs without a fitting capture before another is made.
const PATIENCE: u32 = 4;
/// The maximum number of captures that one plan has at a time, for different shapes of its feeds; each has its own
/// memory.
const MOST_AT_ONCE: usize = 4;

/// The state of capturing one plan, or one segment of a plan.
pub(crate) struct CaptureSlot {
    /// For a segment: the number of segments before it. They are captured first, so that their outputs have fixed
    /// addresses.
    segment: Option<u32>,
    /// Why it is never captured, once that is known. Read without the lock below, which a run holds while a device
    /// records.
    off: OnceLock<Error>,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    /// Runs since a capture was last missing.
    n_runs: u32,
    /// Captures made since one has paid off.
    n_captures: u32,
    /// Consecutive runs without a fitting capture.
    n_misses: u32,
    /// The GPU addresses of feeds when no capture fitted, by number.
    seen: HashMap<usize, Address>,
    /// Feeds whose address has changed.
    unsteady: HashSet<usize>,
    /// Ordered by last use; the most recently used is last.
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

    /// For a plan that is never captured as a whole, and why.
    pub fn off(why: &str) -> CaptureSlot {
        CaptureSlot { segment: None, off: OnceLock::from(Error::unimplemented(why)), progress: Mutex::default() }
    }

    /// For a segment of a plan that has `n_before` segments before it.
    pub fn for_segment(n_before: u32) -> CaptureSlot {
        CaptureSlot { segment: Some(n_before), off: OnceLock::new(), progress: Mutex::default() }
    }

    /// Runs the step as a replay, if there is a capture for such feeds, or makes a capture. `new_step` creates the
    /// step to capture. The feeds of a plan are host tensors; those of a segment are on the device of its inputs.
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
        // A capture records the work of one thread.
        if part.unit.pool.max_threads() > 1 {
            return Ok(None);
        }
        let Some(device) = part.unit.device.recorder() else { return Ok(None) };
        if let Some(fetched) = progress.replay(device, feeds, limits)? {
            return Ok(Some(fetched));
        }
        progress.n_misses = progress.n_misses.saturating_add(1);
        let seen = progress.see(device, feeds);
        // Two more runs for each segment before it: one in which that is captured, and one that shows the address of
        // its output.
        if progress.n_runs < WARM_UP.saturating_add(self.segment.unwrap_or(0).saturating_mul(2)) {
            // Once there is a capture, other shapes that come up occasionally are no reason for another.
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
                // A library may fail because of what another thread does on the GPU at the same time, so the capture
                // is tried again.
                match error.code() == Code::Unimplemented || progress.n_captures > MOST_CAPTURES {
                    // The first reason is kept.
                    true => drop(self.off.set(error)),
                    false => progress.n_runs = 0,
                }
                Ok(None)
            }
        }
    }

    /// The number of launches that a replay replaces, or why there is none.
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

    /// Why it is never captured, once that is known. Never blocks.
    pub fn why_off(&self) -> Option<&Error> {
        self.off.get()
    }
}

impl Progress {
    /// Replays a capture that fits, if there is one.
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

    /// Stores the addresses of the feeds; returns the previous ones.
    fn see(&mut self, device: &dyn Recorder, feeds: &Feeds) -> HashMap<usize, Address> {
        for replay in &self.replays {
            replay.moved(device, feeds, &mut self.unsteady);
        }
        let on_gpu = feeds.iter().enumerate().filter_map(|(number, value)| {
            let value = value.as_ref().filter(|value| is_on_gpu(value))?;
            Some((number, device.address_of(value).ok()?))
        });
        std::mem::replace(&mut self.seen, on_gpu.collect())
    }

    /// Adds a capture and removes those for the same shapes: their variables have moved.
    fn add(&mut self, replay: Replay) {
        self.replays.retain(|old| !old.is_for_same(&replay));
        if self.replays.len() >= MOST_AT_ONCE {
            self.replays.remove(0);
        }
        self.replays.push(replay);
        self.n_runs = 0;
    }
}

/// Whether a call in a capture has the same outputs in every replay, because its inputs are the same. Then it is run
/// once, now, and its outputs are kept.
pub(crate) fn is_constant_call(device: &dyn Recorder, node: &NodePlan, inputs: &[Value]) -> bool {
    // What other ranks give may differ.
    if !device.is_recording() || node.node.def.group.is_some() {
        return false;
    }
    let is_same = |input: &Value| match input {
        Value::Tensor(tensor) => !is_on_gpu(tensor) || device.is_kept_in_recording(tensor),
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
        // A host value that depends on shapes alone: copied during the capture, and kept.
        if matches!(node.node.def.transfer, Some(TransferEnd::HostSend | TransferEnd::Recv)) {
            return None;
        }
        refusal(node).map(|why| format!("{} '{}' {why}", node.node.op(), node.node.name))
    })
}

/// Why a node cannot be captured, regardless of its inputs. Transfers are handled elsewhere.
pub(crate) fn refusal(node: &NodePlan) -> Option<&'static str> {
    if node.flow != Flow::Plain {
        return Some("is control flow or a transfer");
    }
    match &node.kernel {
        PlanKernel::Function(_) | PlanKernel::Object(_) | PlanKernel::Lend => {}
        // A constant.
        PlanKernel::Flow if node.node.def.work == Work::Constant => return None,
        PlanKernel::Async(_) | PlanKernel::Flow | PlanKernel::Null | PlanKernel::Segment(_) => {
            return Some("waits for the host");
        }
    }
    // What ranks exchange between devices is enqueued as kernels are; they have compared it when the run begins.
    let has_state = node.node.def.stateful && node.node.def.group.is_none();
    match has_state && !node.node.def.effects.is_about_variable_values() {
        true => Some("has a state of its own"),
        false => None,
    }
}
