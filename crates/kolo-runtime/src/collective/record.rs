//! What each rank does and did last, as its record says: one form of it for warnings, errors, `kolo doctor` and tests.
//!
//! A [`Recorder`] writes the record of this process's rank into the memory of its group ([`RankBoard`]), a [`RankState`] is what
//! anybody reads there.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::DType;
use kolo_device::shared_group::{Activity, CALL_BYTES, CallNote, Condition, RankBoard, RankNote, RankRecord, now};
use kolo_ops::collective::CollectiveKind;

use super::signature::{SIGNATURE_BYTES, Signature};

const _: () = assert!(SIGNATURE_BYTES == CALL_BYTES, "a record holds a whole signature");

/// Writes down what one rank does. Clones write to the same record.
#[derive(Clone, Default)]
pub struct Recorder {
    /// None if there is no memory for it: then nothing is written down.
    board: Option<Arc<RankBoard>>,
    rank: usize,
}

impl Recorder {
    /// For a rank of the group that `board` is about; this process is that rank.
    pub(super) fn new(board: Option<Arc<RankBoard>>, rank: usize) -> Recorder {
        let recorder = Recorder { board, rank };
        if let Some(record) = recorder.record() {
            record.adopt();
        }
        recorder
    }

    fn record(&self) -> Option<&RankRecord> {
        self.board.as_ref()?.record(self.rank)
    }

    /// What the rank is busy with, from now on.
    pub fn note(&self, activity: Activity) {
        if let Some(record) = self.record() {
            record.note(activity);
        }
    }

    /// The rank begins a step, with this.
    pub fn note_step(&self, step: i64, activity: Activity) {
        if let Some(record) = self.record() {
            record.note_step(step, activity);
        }
    }

    /// The step that the rank is in, if somebody has said so.
    pub fn step(&self) -> Option<i64> {
        self.record()?.step()
    }

    pub(super) fn begin_call(&self, signature: &Signature) {
        let Some(record) = self.record() else { return };
        let mut what = [0; CALL_BYTES];
        signature.write(&mut what);
        record.begin_call(signature.number(), &what[..signature.n_bytes()]);
    }

    pub(super) fn wait_for(&self, rank: usize) {
        if let Some(record) = self.record() {
            record.wait_for(rank);
        }
    }

    pub(super) fn end_call(&self, number: u64) {
        if let Some(record) = self.record() {
            record.end_call(number);
        }
    }

    /// What a rank does now.
    pub fn state(&self, rank: usize) -> Option<RankState> {
        Some(RankState::new(rank, self.board.as_ref()?.record(rank)?.read()))
    }

    /// What all ranks do now.
    pub fn states(&self) -> Vec<RankState> {
        let n_ranks = self.board.as_ref().map_or(0, |board| board.n_ranks());
        (0..n_ranks).filter_map(|rank| self.state(rank)).collect()
    }

    /// The ranks that have not begun call `number`, and what they do instead; empty if all have. At most three.
    pub(super) fn who_is_behind(&self, number: u64) -> String {
        let Some(board) = &self.board else { return String::new() };
        let is_behind = |rank: &usize| board.record(*rank).is_some_and(|record| record.n_begun() <= number);
        let behind = (0..board.n_ranks()).filter(|rank| *rank != self.rank).filter(is_behind);
        let states = behind.take(3).filter_map(|rank| self.state(rank));
        let texts: Vec<String> = states.map(|state| format!("rank {} {state}", state.rank)).collect();
        texts.join("; ")
    }
}

/// What a rank does and did last.
#[derive(Clone, Debug, PartialEq)]
pub struct RankState {
    /// Which one.
    pub rank: usize,
    /// Its process, once it has joined.
    pub pid: Option<u32>,
    /// What has become of its process.
    pub condition: Condition,
    /// What it is busy with.
    pub activity: Activity,
    /// For how long.
    pub lasts: Duration,
    /// In which step, if that is known.
    pub step: Option<i64>,
    /// How many collectives it has begun.
    pub n_calls: u64,
    /// The collective that it is in.
    pub call: Option<CallState>,
    /// Which rank it waits for there, and for how long.
    pub waits_for: Option<(usize, Duration)>,
    /// Its last collectives, the oldest first, with the one that it is in.
    pub last_calls: Vec<CallState>,
    /// How old this is, for a rank of which others have told.
    pub age: Option<Duration>,
}

/// A collective of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct CallState {
    signature: Signature,
    /// In which step.
    pub step: Option<i64>,
    /// How long ago it began.
    pub began: Duration,
    /// How long it took, if it has ended.
    pub took: Option<Duration>,
}

impl RankState {
    /// What a record says.
    pub fn new(rank: usize, note: RankNote) -> RankState {
        let now = now();
        let ago = |at: u64| if at == 0 { Duration::ZERO } else { Duration::from_nanos(now.saturating_sub(at)) };
        let calls: Vec<CallState> = note.calls.iter().filter_map(|call| CallState::new(call, ago)).collect();
        let is_in_call = note.n_done < note.n_begun;
        let call = calls.last().filter(|call| is_in_call && call.number() + 1 == note.n_begun).cloned();
        RankState {
            rank,
            pid: (note.pid != 0).then_some(note.pid),
            condition: note.condition(),
            activity: note.activity,
            lasts: ago(note.since),
            step: note.step,
            n_calls: note.n_begun,
            waits_for: note.waits_for.filter(|_| call.is_some()).map(|(rank, since)| (rank, ago(since))),
            call,
            last_calls: calls,
            age: (note.heard != 0).then(|| ago(note.heard)),
        }
    }

    /// Whether it is there and can go on.
    pub fn is_well(&self) -> bool {
        matches!(self.condition, Condition::Busy { .. } | Condition::Unknown)
    }

    /// What it is busy with, whatever has become of its process since.
    pub fn doing(&self) -> Doing<'_> {
        Doing(self)
    }

    /// What it is busy with, or was when it was last heard of.
    fn activity(&self) -> String {
        let doing = match self.activity {
            Activity::Other => "does something outside of collectives",
            Activity::Computing => "computes",
            Activity::Input => "waits for its input",
            Activity::Saving => "saves a checkpoint",
            Activity::Evaluating => "tests the model",
            Activity::Preparing => "prepares its training",
            Activity::Ended => return "has ended its training".to_owned(),
        };
        let step = self.step.map_or(String::new(), |step| format!(" in step {step}"));
        format!("{doing}{step} for {:.1} s", self.lasts.as_secs_f64())
    }
}

/// `waits for its input in step 41 for 3.1 s`
impl fmt::Display for RankState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.condition {
            Condition::Absent => return f.write_str("has not joined yet"),
            Condition::Stopped { .. } | Condition::Gone { .. } => write!(f, "{}; before that: ", self.condition)?,
            Condition::Busy { .. } | Condition::Unknown => {}
        }
        self.doing().fmt(f)
    }
}

/// What a rank is busy with, whatever has become of its process.
pub struct Doing<'a>(&'a RankState);

impl fmt::Display for Doing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0;
        match &state.call {
            Some(call) => {
                write!(f, "in {call} for {:.1} s", call.began.as_secs_f64())?;
                if let Some((rank, lasts)) = state.waits_for {
                    write!(f, ", where it waits for rank {rank} for {:.1} s", lasts.as_secs_f64())?;
                }
            }
            None => f.write_str(&state.activity())?,
        }
        match state.age {
            Some(age) if age >= Duration::from_secs(1) => write!(f, " (last heard of {:.1} s ago)", age.as_secs_f64()),
            _ => Ok(()),
        }
    }
}

impl CallState {
    fn new(call: &CallNote, ago: impl Fn(u64) -> Duration) -> Option<CallState> {
        let began = ago(call.begun);
        let took = call.finished.map(|at| began.saturating_sub(ago(at)));
        Some(CallState { signature: Signature::read(&call.what)?, step: call.step, began, took })
    }

    /// Which collective of its group it is, from 0.
    pub fn number(&self) -> u64 {
        self.signature.number()
    }

    /// What it is called; a long name is cut off.
    pub fn name(&self) -> &str {
        self.signature.name()
    }

    /// What is done.
    pub fn kind(&self) -> CollectiveKind {
        self.signature.kind()
    }

    /// The type of its tensors, if it has any.
    pub fn dtype(&self) -> Option<DType> {
        self.signature.dtype()
    }

    /// How many elements they have together.
    pub fn n_elements(&self) -> u64 {
        self.signature.n_elements()
    }

    /// Whether another rank's is the same one, with the same tensors.
    pub fn is_same_as(&self, other: &CallState) -> bool {
        self.signature == other.signature
    }
}

/// `call 164, all-reduce (mean) 'data_parallel/gradients_0' of 2 float tensors, 7850 elements, in step 41`
impl fmt::Display for CallState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.signature)?;
        self.step.map_or(Ok(()), |step| write!(f, ", in step {step}"))
    }
}
