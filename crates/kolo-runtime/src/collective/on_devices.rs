//! Collectives that run on devices: how the ranks' devices meet, what ranks compare before they enqueue anything there, and who watches
//! over it.
//!
//! An exchange that is enqueued on one rank and not on another, or in another order, waits for ever, and no error comes from a device.
//! So at the beginning of every run all ranks compare the exchanges that it is about to enqueue, whether it launches them one by one
//! or replays them. While devices work, a thread looks whether the ranks are still there, and ends the exchanges if one is not.
//! Runs ask for that before they return what they have computed.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result, Tensor};
use kolo_device::shared_group::{Activity, Condition};
use kolo_device::{Device, DeviceRanks, Event, MeetingId, RankOnDevice, StreamRole};
use kolo_graph::Node;
use kolo_ops::CancelToken;
use kolo_ops::collective::{CollectiveCall, CollectiveGroup, CollectiveKind, Groups, Root, call};

use super::uneven::{all_say, only_tensor};
use super::{RankState, Recorder};
use crate::compile::part::{NodePlan, PartPlan};

/// How long devices have to meet.
const MEET: Duration = Duration::from_secs(120);

/// How often somebody looks whether all ranks are still there while devices work.
const LOOK: Duration = Duration::from_millis(50);

/// How long it may take until a process is seen to be gone whose connections were closed.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// The most bytes of the place where devices meet.
const MEETING_BYTES: usize = 256;

/// The exchanges of one group that a run enqueues on devices.
pub(crate) struct DeviceExchanges {
    group: String,
    /// One line for each, in their order.
    lines: Vec<String>,
    digest: i64,
}

impl DeviceExchanges {
    /// Those of a plan with these parts.
    pub fn of(parts: &[Arc<PartPlan>]) -> Vec<DeviceExchanges> {
        let mut found: Vec<(String, Vec<String>)> = Vec::new();
        for part in parts.iter().filter(|part| part.unit.device.rank_device().is_some()) {
            let on_device = |plan: &&NodePlan| !plan.on_host && plan.node.def.group.is_some();
            let mut nodes: Vec<(usize, &NodePlan)> =
                part.nodes.iter().filter(on_device).map(|plan| (place_in_order(part, plan), plan)).collect();
            nodes.sort_by(|(place, plan), (other_place, other)| {
                (place, &plan.node.name).cmp(&(other_place, &other.node.name))
            });
            for (_, plan) in nodes {
                let group = plan.node.def.group.and_then(|attr| plan.node.attrs.str(attr).ok()).unwrap_or_default();
                let at = found.iter().position(|(known, _)| known == group).unwrap_or(found.len());
                if at == found.len() {
                    found.push((group.to_owned(), Vec::new()));
                }
                found[at].1.push(line(&plan.node));
            }
        }
        found.into_iter().map(|(group, lines)| DeviceExchanges::new(&group, lines)).collect()
    }

    /// Those of one group, a line for each.
    pub fn new(group: &str, lines: Vec<String>) -> DeviceExchanges {
        let mut hasher = DefaultHasher::new();
        lines.hash(&mut hasher);
        DeviceExchanges { group: group.to_owned(), lines, digest: hasher.finish() as i64 }
    }

    /// Compares them with those of all other ranks, for which it waits until it is stopped, or until the deadline. An error on every rank
    /// if they differ.
    pub fn compare(&self, groups: &Groups, (cancel, deadline): (&Arc<CancelToken>, Option<Instant>)) -> Result<()> {
        let group = groups.find(&self.group)?;
        group.health()?;
        if group.n_ranks() == 1 {
            return Ok(());
        }
        let (kind, name) = (CollectiveKind::AllGather, "compare the exchanges on devices of a run");
        let tensors = vec![Tensor::from([self.digest])];
        let call_of_run = CollectiveCall { kind, name: name.into(), tensors, cancel: Some(cancel.clone()), deadline };
        let digests = only_tensor(call(&*group, call_of_run)?)?;
        if digests.data::<i64>()?.iter().all(|digest| *digest == self.digest) {
            return Ok(());
        }
        // All ranks know that there is a difference, so all say what they do.
        let texts = all_say(&*group, "what ranks enqueue on devices", &self.lines.join("\n"))?;
        let lines = |text: &String| text.lines().map(str::to_owned).collect::<Vec<String>>();
        Err(difference(&texts.iter().map(lines).collect::<Vec<_>>()))
    }

    /// An error if the group has ended, so that what was computed since is worth nothing.
    pub fn check(&self, groups: &Groups) -> Result<()> {
        groups.find(&self.group)?.health()
    }
}

/// How many collectives of a part come before this one: they are ordered by control dependencies.
fn place_in_order(part: &PartPlan, plan: &NodePlan) -> usize {
    let (mut n, mut at) = (0, plan);
    loop {
        let before = at.node.control_inputs.iter().filter_map(|id| part.nodes.get(id.index()));
        match before.filter(|plan| plan.node.def.group.is_some()).max_by_key(|plan| &plan.node.name) {
            // A chain is no longer than there are nodes, whatever the graph says.
            Some(next) if n < part.nodes.len() => (n, at) = (n + 1, next),
            _ => return n,
        }
    }
}

/// `KoloAllReduce 'data_parallel/gradients_0' (sum) of float[784,100], float[100]`
fn line(node: &Node) -> String {
    let outputs = node.outputs.iter().map(|output| format!("{}{}", output.dtype, output.shape));
    let how = match (node.attrs.str("reduction"), node.attrs.int("root")) {
        (Ok(reduction), _) => format!(" ({reduction})"),
        (_, Ok(root)) => format!(" (from rank {root})"),
        _ => String::new(),
    };
    format!("{} '{}'{how} of {}", node.op(), node.name, outputs.collect::<Vec<String>>().join(", "))
}

/// Names the first difference between what rank 0 and another one do.
fn difference(texts: &[Vec<String>]) -> Error {
    let line = |rank: usize, i: usize| texts[rank].get(i).map_or("nothing more", String::as_str);
    for (rank, text) in texts.iter().enumerate().skip(1) {
        let n = text.len().max(texts[0].len());
        if let Some(i) = (0..n).find(|i| line(0, *i) != line(rank, *i)) {
            return Error::failed_precondition(format!(
                "the ranks differ in what they exchange between their devices in this run: as exchange {i}, rank 0 does {}, and rank \
                 {rank} does {}; all ranks have to run the same step of the same program",
                line(0, i),
                line(rank, i)
            ));
        }
    }
    Error::failed_precondition("the ranks differ in what they exchange between their devices in this run")
}

/// One rank's ends of its group on devices.
#[derive(Default)]
pub(super) struct DeviceEnds(Vec<DeviceEnd>);

struct DeviceEnd {
    /// Of the device.
    incarnation: u64,
    /// `None` if the ranks' devices cannot reach each other. The device keeps it.
    ranks: Option<Weak<dyn DeviceRanks>>,
    /// Dropped with it.
    _watch: Option<RankWatch>,
}

/// What a group knows that its devices have to know, too.
pub(super) struct GroupOnDevices<'a> {
    pub group: &'a dyn CollectiveGroup,
    pub deterministic: bool,
    pub timeout: Duration,
    pub recorder: &'a Recorder,
    pub stop: &'a Arc<AtomicBool>,
}

impl DeviceEnds {
    /// The end on a device. Meets the other ranks there if this is the first time.
    pub fn of(&mut self, device: &dyn Device, of: &GroupOnDevices<'_>) -> Result<Option<Arc<dyn DeviceRanks>>> {
        let incarnation = device.attributes().incarnation;
        if let Some(end) = self.0.iter().find(|end| end.incarnation == incarnation) {
            return match &end.ranks {
                None => Ok(None),
                Some(ranks) => ranks.upgrade().map(Some).ok_or_else(|| Error::internal("a device has lost its ranks")),
            };
        }
        // Those of sessions that are gone.
        self.0.retain(|end| end.ranks.as_ref().is_none_or(|ranks| ranks.strong_count() > 0));
        let ranks = meet(device, of)?;
        let watch = match &ranks {
            Some(ranks) if of.group.n_ranks() > 1 => Some(RankWatch::start(device, ranks, of)?),
            _ => None,
        };
        self.0.push(DeviceEnd { incarnation, ranks: ranks.as_ref().map(Arc::downgrade), _watch: watch });
        Ok(ranks)
    }

    /// An error if the exchanges on a device have ended, which says whose fault it is.
    pub fn health(&self, recorder: &Recorder, own: usize) -> Result<()> {
        let alive = self.0.iter().filter_map(|end| end.ranks.as_ref()?.upgrade());
        let Some(error) = alive.filter_map(|ranks| ranks.ended()).next() else { return Ok(()) };
        // A connection may be closed before the process at its other end is gone.
        let deadline = Instant::now() + LAST_WORDS;
        loop {
            match dead_rank(recorder, own) {
                Some(dead) if error.message().contains(&dead) => return Err(error),
                Some(dead) => return Err(error.and(format_args!("; {dead}"))),
                None if Instant::now() > deadline => return Err(error),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

/// What is said of a rank that has died, if one has.
fn dead_rank(recorder: &Recorder, own: usize) -> Option<String> {
    // A rank that is done has waited for what others get from it.
    let is_dead = |condition: Condition, activity: Activity| {
        matches!(condition, Condition::Gone { .. }) && activity != Activity::Ended
    };
    let dead = |state: &RankState| state.rank != own && is_dead(state.condition, state.activity);
    recorder.states().iter().find(|state| dead(state)).map(|state| format!("rank {} {}", state.rank, state.condition))
}

/// Meets the other ranks on a device, if all of them can; all of them ask.
fn meet(device: &dyn Device, of: &GroupOnDevices<'_>) -> Result<Option<Arc<dyn DeviceRanks>>> {
    let (rank, n_ranks) = (of.group.rank(), of.group.n_ranks());
    let Some(here) = device.rank_device() else { return Ok(None) };
    let stop = || match of.stop.load(Ordering::Relaxed) {
        true => Err(Error::cancelled("the group was closed")),
        false => Ok(()),
    };
    let (deterministic, deadline) = (of.deterministic, Instant::now() + MEET);
    let place = RankOnDevice { rank, n_ranks, deterministic, deadline, stop: &stop };
    if n_ranks == 1 {
        return here.meet(&MeetingId::new(), &place).map(Some);
    }
    let hardware = here.hardware();
    if let Err(why) = &hardware {
        tracing::warn!(target: "kolo::collective", "rank {rank}: data of {} goes through the host: {why}", device.attributes().name);
    }
    let all = all_say(of.group, "which devices ranks have", &hardware.unwrap_or_default())?;
    let twin = (0..n_ranks).find_map(|i| Some((i, (i + 1..n_ranks).find(|other| all[i] == all[*other])?)));
    if all.iter().any(String::is_empty) {
        return Ok(None);
    }
    if let Some((one, other)) = twin {
        if rank == 0 {
            let what = &all[one];
            tracing::warn!(
                target: "kolo::collective",
                "ranks {one} and {other} share {what}, so data goes through the host; give each rank a GPU of its own"
            );
        }
        return Ok(None);
    }
    let meeting = if rank == 0 { here.new_meeting()? } else { MeetingId::new() };
    // The others do not know how long it is.
    let mut padded = meeting;
    padded.resize(MEETING_BYTES, 0);
    let name = "where devices meet";
    let kind = CollectiveKind::Broadcast(Root(0));
    let given = call(
        of.group,
        CollectiveCall { kind, name: name.into(), tensors: vec![Tensor::vector(padded)], cancel: None, deadline: None },
    )?;
    let meeting = given.first().map(|given| given.data::<u8>().map(<[u8]>::to_vec)).unwrap_or(Ok(Vec::new()))?;
    here.meet(&meeting, &place).map(Some)
}

/// A thread that looks whether the ranks are still there while a device works, and ends the exchanges if one is not.
struct RankWatch {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RankWatch {
    fn start(device: &dyn Device, ranks: &Arc<dyn DeviceRanks>, of: &GroupOnDevices<'_>) -> Result<RankWatch> {
        let device = device.handle().ok_or_else(|| Error::internal("nobody holds the device"))?;
        let (device, ranks) = (Arc::downgrade(&device), Arc::downgrade(ranks));
        let (recorder, stop, timeout) = (of.recorder.clone(), of.stop.clone(), of.timeout);
        let (rank, is_over) = (of.group.rank(), Arc::new(AtomicBool::new(false)));
        let ends = is_over.clone();
        let watch = move || {
            let mut probe: Option<(Arc<dyn Event>, Instant)> = None;
            while !ends.load(Ordering::Relaxed) {
                std::thread::park_timeout(LOOK);
                let (Some(device), Some(ranks)) = (device.upgrade(), ranks.upgrade()) else { return };
                if ranks.ended().is_some() {
                    return;
                }
                // After all that is enqueued now.
                let (event, since) = match probe.take().filter(|(event, _)| !event.is_done()) {
                    Some(probe) => probe,
                    None => match device.record(StreamRole::Compute) {
                        Some(event) => (event, Instant::now()),
                        None => continue,
                    },
                };
                let is_busy = !event.is_done();
                probe = Some((event, since));
                if let Some(why) =
                    is_busy.then(|| why_pointless(&recorder, rank, &stop, since.elapsed() > timeout)).flatten()
                {
                    tracing::warn!(target: "kolo::collective", "rank {rank}: exchanges between devices are ended: {why}");
                    ranks.abort(why);
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("kolo-rank-{rank}-watch")).spawn(watch);
        let thread =
            thread.map_err(|error| Error::resource_exhausted(format!("no thread to watch over ranks: {error}")))?;
        Ok(RankWatch { is_over, thread: Some(thread) })
    }
}

impl Drop for RankWatch {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            thread.thread().unpark();
            // A panic there has nothing to add.
            let _ = thread.join();
        }
    }
}

/// Why what a device does with those of other ranks cannot end well.
fn why_pointless(recorder: &Recorder, own: usize, stop: &AtomicBool, is_overdue: bool) -> Option<Error> {
    if stop.load(Ordering::Relaxed) {
        return Some(Error::cancelled("the group was closed"));
    }
    if let Some(dead) = dead_rank(recorder, own) {
        return Some(Error::aborted(format!("devices exchanged data with a rank that is gone: {dead}")));
    }
    if is_overdue {
        let others = recorder.states().into_iter().filter(|state| state.rank != own);
        let texts: Vec<String> = others.map(|state| format!("rank {} {state}", state.rank)).collect();
        return Some(Error::deadline_exceeded(format!(
            "devices wait for each other for too long; {}",
            texts.join("; ")
        )));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_with_what_both_do() {
        let lines = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<String>>();
        let error = difference(&[lines(&["a", "b"]), lines(&["a", "b"]), lines(&["a", "c", "d"])]);
        assert!(error.message().contains("as exchange 1, rank 0 does b, and rank 2 does c"), "{error}");
        let error = difference(&[lines(&["a"]), lines(&["a", "b"])]);
        assert!(error.message().contains("as exchange 1, rank 0 does nothing more, and rank 1 does b"), "{error}");
    }
}
