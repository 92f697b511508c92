//! Where TensorFlow's collectives meet ([`super::device_collectives`]): nodes on several devices, in one step or in several, that have
//! the same group and instance. The last one to come computes what all of them get. In a cluster, the devices of all tasks meet in one of
//! them ([`MeetingPlace`]).
//!
//! A member is a device. Members are ordered by their names, so what is computed does not depend on who came first. Nodes of
//! steps that overlap may have the same instance; the second arrival of a device belongs to the next meeting.
//!
//! Lock order: refusals, then the open meetings. Both are given back before anything is computed and anybody is told.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kolo_core::{DType, DeviceName, Error, Result, Shape, Tensor};
use kolo_device::cpu::reduce::{ReduceOp, reduce};
use parking_lot::Mutex;

use super::alarm::{Alarm, Rings};
use crate::queue::wait::{Waiter, Waits, watch};
use crate::{CancelToken, Done, Outcome, Registration};

/// What a meeting is called: the group's key and the instance's.
pub type MeetingKey = (i32, i32);

/// What is computed.
#[derive(Clone, Debug, PartialEq)]
pub enum Together {
    /// Elements are combined; sums may be divided by the number of members.
    Reduce {
        /// How.
        merge: ReduceOp,
        /// Whether sums become means.
        divide: bool,
    },
    /// The rows of all, in the order of their devices.
    Gather,
    /// The tensor of the one that has one.
    Broadcast {
        /// Its shape.
        shape: Shape,
    },
}

/// What all members of a meeting agree on.
#[derive(Clone, Debug, PartialEq)]
pub struct MeetingSpec {
    /// What is computed.
    pub together: Together,
    /// How many members there are.
    pub size: usize,
    /// Of what.
    pub dtype: DType,
}

/// One that comes to a meeting.
pub struct Arrival {
    /// Where it comes.
    pub key: MeetingKey,
    /// What it thinks that the meeting is about.
    pub spec: MeetingSpec,
    /// Which device it is.
    pub place: DeviceName,
    /// Nothing for one who only receives.
    pub tensor: Option<Tensor>,
    /// It waits for the others no longer than this.
    pub timeout: Option<Duration>,
}

/// Where the devices of several processes meet.
pub trait MeetingPlace: Send + Sync {
    /// A device of this process comes; `done` gets what the meeting gives it.
    fn arrive(&self, arrival: Arrival, cancel: &Arc<CancelToken>, done: Done);
}

/// So many groups are remembered.
const MOST_GROUPS: usize = 1024;

/// All meetings of a process that are not complete.
pub struct Meetings {
    open: Mutex<HashMap<MeetingKey, Vec<Meeting>>>,
    /// The devices that were in the last complete meeting of a group.
    groups: Mutex<HashMap<i32, Vec<DeviceName>>>,
    /// Groups that cannot meet here, and why.
    refused: Mutex<HashMap<i32, Error>>,
    place: OnceLock<Arc<dyn MeetingPlace>>,
    next_id: AtomicU64,
    alarm: Alarm,
}

struct Meeting {
    spec: MeetingSpec,
    members: Vec<Member>,
}

struct Member {
    place: DeviceName,
    tensor: Option<Tensor>,
    deadline: Option<Instant>,
    waiter: Waiter,
}

impl Default for Meetings {
    fn default() -> Meetings {
        Meetings {
            open: Mutex::default(),
            groups: Mutex::default(),
            refused: Mutex::default(),
            place: OnceLock::new(),
            next_id: AtomicU64::new(0),
            alarm: Alarm::new("kolo-meetings"),
        }
    }
}

impl Meetings {
    /// Lets devices of this process meet those of others at this place, from now on.
    pub fn meet_at(&self, place: Arc<dyn MeetingPlace>) {
        self.place.get_or_init(|| place);
    }

    /// Comes to a meeting, wherever it is; `done` gets what it gives this member.
    pub(super) fn arrive(self: &Arc<Self>, arrival: Arrival, cancel: &Arc<CancelToken>, done: Done) {
        match self.place.get() {
            Some(place) => place.arrive(arrival, cancel, done),
            None => self.arrive_here(arrival, cancel, done),
        }
    }

    /// The members of the last complete meeting of a group that a device waits for in this one; none once it is over.
    pub fn missing(&self, key: MeetingKey, place: &DeviceName) -> Vec<DeviceName> {
        let known = self.groups.lock().get(&key.0).cloned().unwrap_or_default();
        let open = self.open.lock();
        let mut meetings = open.get(&key).into_iter().flatten();
        match meetings.find(|meeting| meeting.members.iter().any(|member| member.place == *place)) {
            Some(meeting) => {
                known.into_iter().filter(|one| meeting.members.iter().all(|of| of.place != *one)).collect()
            }
            None => Vec::new(),
        }
    }

    /// Ends a meeting that a device waits in, with an error for all who wait there.
    pub fn fail(&self, key: MeetingKey, place: &DeviceName, error: &Error) {
        let failed = {
            let mut open = self.open.lock();
            let is_there = |meeting: &Meeting| meeting.members.iter().any(|member| member.place == *place);
            let meetings = open.get_mut(&key);
            let failed = meetings.and_then(|all| all.iter().position(is_there).map(|at| all.remove(at)));
            open.retain(|_, meetings| !meetings.is_empty());
            failed
        };
        if let Some(meeting) = failed {
            meeting.fail(error);
        }
    }

    /// Ends all meetings of a group, those to come included: a member cannot meet the others here.
    pub fn refuse(&self, group: i32, error: &Error) {
        let ended: Vec<Meeting> = {
            let mut refused = self.refused.lock();
            if refused.len() >= MOST_GROUPS {
                refused.clear();
            }
            refused.insert(group, error.clone());
            let mut open = self.open.lock();
            let keys: Vec<MeetingKey> = open.keys().copied().filter(|key| key.0 == group).collect();
            keys.iter().filter_map(|key| open.remove(key)).flatten().collect()
        };
        ended.into_iter().for_each(|meeting| meeting.fail(error));
    }

    /// Comes to a meeting of this process.
    pub fn arrive_here(self: &Arc<Self>, arrival: Arrival, cancel: &Arc<CancelToken>, done: Done) {
        // Held until it is among those who wait, so that a refusal finds it there.
        let refused = self.refused.lock();
        if let Some(error) = refused.get(&arrival.key.0).cloned() {
            drop(refused);
            return done.finish(Err(error));
        }
        let Arrival { key, spec, place, tensor, timeout } = arrival;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        // One beyond the clock is none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let member = Member { place, tensor, deadline, waiter: Waiter::new(id, done) };
        let outcome = {
            let mut open = self.open.lock();
            let meetings = open.entry(key).or_default();
            let at = meetings.iter().position(|meeting| meeting.members.iter().all(|one| one.place != member.place));
            let at = at.unwrap_or_else(|| {
                meetings.push(Meeting { spec: spec.clone(), members: Vec::new() });
                meetings.len() - 1
            });
            let difference = (meetings[at].spec != spec).then(|| differ(key, &meetings[at], &member, &spec));
            meetings[at].members.push(member);
            let is_complete = meetings[at].members.len() >= meetings[at].spec.size;
            let ended = (difference.is_some() || is_complete).then(|| meetings.remove(at));
            if meetings.is_empty() {
                open.remove(&key);
            }
            ended.map(|meeting| (meeting, difference))
        };
        drop(refused);
        match outcome {
            Some((meeting, Some(difference))) => meeting.fail(&difference),
            Some((meeting, None)) => {
                self.remember(key.0, &meeting);
                meeting.complete(key);
            }
            None => {
                watch(self, id, cancel);
                if deadline.is_some()
                    && let Err(error) = self.set_alarm()
                {
                    self.take(|member| member.waiter.id == id)
                        .into_iter()
                        .for_each(|(_, meeting)| meeting.fail(&error));
                }
            }
        }
    }

    fn remember(&self, group: i32, meeting: &Meeting) {
        let mut groups = self.groups.lock();
        if groups.len() >= MOST_GROUPS && !groups.contains_key(&group) {
            groups.clear();
        }
        groups.insert(group, meeting.members.iter().map(|member| member.place.clone()).collect());
    }

    /// Takes the meetings out of which `is_it` holds for a member.
    fn take(&self, is_it: impl Fn(&Member) -> bool) -> Vec<(MeetingKey, Meeting)> {
        let mut taken = Vec::new();
        self.open.lock().retain(|key, meetings| {
            for i in (0..meetings.len()).rev() {
                if meetings[i].members.iter().any(&is_it) {
                    taken.push((*key, meetings.remove(i)));
                }
            }
            !meetings.is_empty()
        });
        taken
    }

    fn set_alarm(self: &Arc<Self>) -> Result<()> {
        let first = {
            let open = self.open.lock();
            open.values().flatten().flat_map(|meeting| &meeting.members).filter_map(|member| member.deadline).min()
        };
        self.alarm.set(self, first)
    }
}

impl Rings for Meetings {
    fn ring(self: Arc<Self>) {
        let now = Instant::now();
        for (key, meeting) in self.take(|member| member.deadline.is_some_and(|deadline| deadline <= now)) {
            let error = Error::deadline_exceeded(format!(
                "{} waited for the other members until its timeout; {} of {} came: {}",
                name(key),
                meeting.members.len(),
                meeting.spec.size,
                meeting.places()
            ));
            meeting.fail(&error);
        }
        // The alarm has its thread: it just rang.
        let _ = self.set_alarm();
    }
}

impl Waits for Meetings {
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool {
        let mut open = self.open.lock();
        let mut members = open.values_mut().flatten().flat_map(|meeting| &mut meeting.members);
        match members.find(|member| member.waiter.id == id) {
            Some(member) => {
                member.waiter.attach(token, registration);
                true
            }
            None => false,
        }
    }

    /// The others would wait for a member that does not come any more.
    fn cancel(&self, id: u64) {
        for (key, meeting) in self.take(|member| member.waiter.id == id) {
            let left = meeting.members.iter().find(|member| member.waiter.id == id);
            let left = left.map(|member| member.place.to_string()).unwrap_or_default();
            meeting.fail(&Error::cancelled(format!("{}: the step of {left} was stopped", name(key))));
        }
    }
}

fn name((group, instance): MeetingKey) -> String {
    format!("collective group {group}, instance {instance}")
}

fn differ(key: MeetingKey, meeting: &Meeting, member: &Member, spec: &MeetingSpec) -> Error {
    Error::invalid_argument(format!(
        "{}: {} does {:?} of {} by {} members, and {} does {:?} of {} by {}",
        name(key),
        meeting.places(),
        meeting.spec.together,
        meeting.spec.dtype,
        meeting.spec.size,
        member.place,
        spec.together,
        spec.dtype,
        spec.size
    ))
}

impl Meeting {
    fn places(&self) -> String {
        self.members.iter().map(|member| member.place.to_string()).collect::<Vec<_>>().join(", ")
    }

    fn fail(self, error: &Error) {
        self.members.into_iter().for_each(|member| member.waiter.finish(Err(error.clone())));
    }

    fn complete(mut self, key: MeetingKey) {
        self.members.sort_by(|a, b| a.place.cmp(&b.place));
        match self.compute() {
            Ok(result) => {
                let outcome = || Ok(Outcome::from(vec![result.clone()]));
                self.members.into_iter().for_each(|member| member.waiter.finish(outcome()));
            }
            Err(error) => self.fail(&error.context(name(key))),
        }
    }

    /// What every member gets.
    fn compute(&mut self) -> Result<Tensor> {
        let tensors: Vec<Tensor> = self.members.iter_mut().filter_map(|member| member.tensor.take()).collect();
        if let Together::Broadcast { shape } = &self.spec.together {
            return match &tensors[..] {
                [one] if one.shape() == shape => Ok(one.clone()),
                [one] => Err(Error::invalid_argument(format!("{} is sent, and {shape} was said", one.shape()))),
                several => Err(Error::invalid_argument(format!("one member sends, not {}", several.len()))),
            };
        }
        let first = tensors.first().ok_or_else(|| Error::internal("nobody came"))?;
        if let Some(other) = tensors.iter().find(|tensor| tensor.shape() != first.shape()) {
            return Err(Error::invalid_argument(format!(
                "Shape mismatch in the collective: {} and {}",
                first.shape(),
                other.shape()
            )));
        }
        let bytes = tensors.iter().map(Tensor::host_bytes).collect::<Result<Vec<&[u8]>>>()?;
        match self.spec.together {
            Together::Reduce { merge, divide } => {
                let op = if divide && merge == ReduceOp::Sum { ReduceOp::Mean } else { merge };
                let mut sum = Tensor::zeros(first.dtype(), first.shape().clone())?;
                reduce(first.dtype(), op, &bytes, sum.host_bytes_mut()?)?;
                Ok(sum)
            }
            _ => {
                let mut dims = first.shape().dims().to_vec();
                let rows = dims.first_mut().ok_or_else(|| Error::invalid_argument("a scalar has no rows to gather"))?;
                *rows = rows
                    .checked_mul(tensors.len())
                    .ok_or_else(|| Error::invalid_argument("there are too many rows"))?;
                let mut all = Tensor::zeros(first.dtype(), Shape::new(&dims)?)?;
                let to = all.host_bytes_mut()?;
                let n = bytes[0].len();
                bytes.iter().enumerate().for_each(|(i, from)| to[i * n..(i + 1) * n].copy_from_slice(from));
                Ok(all)
            }
        }
    }
}
