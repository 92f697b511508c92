//! TensorFlow's collectives between the tasks of a cluster: the devices of a group meet in one task, the same for all groups, which
//! computes what all of them get. Its own devices come there as they do in a single process; those of other tasks come by a call, which
//! ends when the meeting does. A task that dies, or whose step ends, takes back its call, and so ends the meeting for all.
//!
//! ```text
//!   worker:1 ── KoloMeet (tensor) ──►  worker:0: Meetings  ◄── its own devices
//!            ◄── result ────────────      the last one to come computes
//! ```
//!
//! A task that dies before it has come is missed if the group has met before: its members are known then, and those that are missing
//! are asked whether they are there.
//!
//! TensorFlow's tasks find each other by `CompleteGroup` and `CompleteInstance` and send rings of `RecvBuf`. They cannot be in a group
//! with Kolo's, and are told so.

use std::sync::{Arc, Weak};
use std::time::Duration;

use kolo_core::{Code, DType, DeviceName, Error, Result, Shape, Tensor};
use kolo_ops::collective::{Arrival, MeetingKey, MeetingPlace, MeetingSpec, Meetings, Together};
use kolo_ops::{CancelToken, Done, Outcome};
use kolo_runtime::collective::ReduceOp;
use tokio::sync::oneshot;

use crate::task::peers::{Peers, TaskName};
use crate::task::random::random_id;
use crate::wire::proto::{GetStatusRequest, KoloMeetRequest, KoloMeetResponse};
use crate::wire::tensor_wire::WireTensor;

/// So often those who wait ask whether those who are missing are there.
const ASKED_EVERY: Duration = Duration::from_millis(500);

/// A task that does not answer for so long is lost.
const LOST_AFTER: Duration = Duration::from_secs(2);

/// The meetings of this task, and where the devices of its cluster meet.
pub(crate) struct ClusterMeetings {
    peers: Weak<Peers>,
    own: TaskName,
    leader: TaskName,
    meetings: Arc<Meetings>,
}

impl ClusterMeetings {
    /// Lets the devices of this task meet those of the others.
    pub fn begin(peers: &Arc<Peers>, meetings: &Arc<Meetings>) -> Arc<ClusterMeetings> {
        let (own, leader) = (peers.own.clone(), leader_of(peers));
        let place = Arc::new(ClusterMeetings { peers: Arc::downgrade(peers), own, leader, meetings: meetings.clone() });
        if peers.cluster.n_tasks() > 1 {
            meetings.meet_at(Arc::new(Handle(Arc::downgrade(&place))));
        }
        place
    }

    fn peers(&self) -> Result<Arc<Peers>> {
        self.peers.upgrade().ok_or_else(|| Error::unavailable("this task is ending"))
    }

    /// A device of another task comes here.
    pub async fn answer(self: Arc<Self>, request: KoloMeetRequest) -> Result<KoloMeetResponse> {
        if self.own != self.leader {
            return Err(Error::failed_precondition(format!(
                "the devices of this cluster meet in {}, and {} was asked; start all tasks with the same cluster",
                self.leader, self.own
            )));
        }
        let outcome = self.meet(arrival_of(request)?, CancelToken::new()).await?;
        let tensor = outcome.outputs.into_iter().next().map(WireTensor::new).transpose()?;
        Ok(KoloMeetResponse { tensor })
    }

    /// Comes to a meeting of this task, and looks after those who are missing. Dropping it takes the device away again.
    async fn meet(&self, arrival: Arrival, cancel: Arc<CancelToken>) -> Result<Outcome> {
        let (key, place) = (arrival.key, arrival.place.clone());
        let (sender, mut ended) = oneshot::channel();
        let _gone = Gone(cancel.clone());
        self.meetings.arrive_here(arrival, &cancel, Done::new(move |outcome| drop(sender.send(outcome))));
        loop {
            tokio::select! {
                outcome = &mut ended => return outcome.unwrap_or_else(|_| Err(Error::internal("a meeting was lost"))),
                () = tokio::time::sleep(ASKED_EVERY) => {
                    if let Some(error) = self.lost(key, &place).await {
                        self.meetings.fail(key, &place, &error);
                    }
                }
            }
        }
    }

    /// An error if one of those who are missing is lost.
    async fn lost(&self, key: MeetingKey, place: &DeviceName) -> Option<Error> {
        for device in self.meetings.missing(key, place) {
            let task = TaskName::of_device(&device.to_string()).ok().filter(|task| *task != self.own)?;
            let peer = self.peers().ok()?.task(&task).ok()?;
            let answer = tokio::time::timeout(LOST_AFTER, peer.get_status(GetStatusRequest::default())).await;
            // It may have come in the meantime.
            if !matches!(answer, Ok(Ok(_))) && self.meetings.missing(key, place).contains(&device) {
                let why = peer.trouble().map_or(String::new(), |trouble| format!(": {trouble}"));
                return Some(Error::unavailable(format!(
                    "Collective ops is aborted by: {task} did not answer for {LOST_AFTER:?}{why}; collective group {}, instance {} waits \
                     for its {device}\nThe error could be from a previous operation. Restart your program to reset.",
                    key.0, key.1
                )));
            }
        }
        None
    }

    /// What a task of TensorFlow is told that wants to be in a group with this one, and what those are told who wait for it.
    pub fn refuse<T>(&self, device: &str, group: i32) -> Result<T> {
        let error = Error::unimplemented(format!(
            "{device}: TensorFlow's tasks and Kolo's cannot be in one group of collectives, since they meet in different ways; start all \
             tasks whose devices are in group {group} with the same program"
        ));
        self.meetings.refuse(group, &error);
        Err(error)
    }

    /// Goes to the meeting in the task where all meet.
    async fn ask(&self, arrival: Arrival) -> Result<Outcome> {
        let dtype = arrival.spec.dtype;
        let (group, instance) = arrival.key;
        let peer = self.peers()?.task(&self.leader)?;
        let response = peer.meet(request_of(arrival)?).await.map_err(|error| {
            let why = match error.code() {
                Code::Unimplemented => format!(
                    "the devices of this cluster meet in {}, which is no task of Kolo's, and TensorFlow's tasks meet in another way: start \
                     all tasks whose devices are in one group with the same program; {}",
                    self.leader,
                    error.message()
                ),
                Code::Unavailable if !error.message().contains("Collective ops is aborted by") => format!(
                    "Collective ops is aborted by: {} is lost, where collective group {group}, instance {instance} meets: {}\nThe error \
                     could be from a previous operation. Restart your program to reset.",
                    self.leader,
                    error.message()
                ),
                _ => return error,
            };
            Error::new(error.code(), why)
        })?;
        let tensor = response.tensor.ok_or_else(|| Error::internal("a meeting gave nothing"))?.into_tensor()?;
        match tensor.dtype() == dtype {
            true => Ok(Outcome::from(vec![tensor])),
            false => Err(Error::internal(format!("a meeting of {dtype} gave {}", tensor.dtype()))),
        }
    }
}

/// What the kernels of this task have of it.
struct Handle(Weak<ClusterMeetings>);

impl MeetingPlace for Handle {
    fn arrive(&self, arrival: Arrival, cancel: &Arc<CancelToken>, done: Done) {
        let place = self.0.upgrade().ok_or_else(|| Error::unavailable("this task is ending"));
        let found = place.and_then(|place| Ok((place.peers()?.runtime.clone(), place)));
        let (runtime, place) = match found {
            Ok(found) => found,
            Err(error) => return done.finish(Err(error)),
        };
        let (stopped, mut stop) = oneshot::channel();
        let registration = match cancel.register(Box::new(move |reason| drop(stopped.send(reason)))) {
            Ok(registration) => registration,
            Err((_, reason)) => return done.finish(Err(reason)),
        };
        let cancel = cancel.clone();
        runtime.spawn(async move {
            let is_here = place.own == place.leader;
            let meeting = async {
                match is_here {
                    true => place.meet(arrival, CancelToken::new()).await,
                    false => place.ask(arrival).await,
                }
            };
            let outcome = tokio::select! {
                outcome = meeting => outcome,
                Ok(reason) = &mut stop => Err(reason),
            };
            cancel.deregister(registration);
            done.finish(outcome);
        });
    }
}

/// Takes a device away from the meeting that it waits in.
struct Gone(Arc<CancelToken>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.cancel(Error::cancelled("the device has left"));
    }
}

/// Where all devices of a cluster meet: the chief, the first worker, or the first task there is.
fn leader_of(peers: &Peers) -> TaskName {
    let tasks = peers.tasks();
    let first = |job: &str| tasks.iter().find(|task| &*task.job == job && task.task == 0);
    first("chief").or_else(|| first("worker")).or_else(|| tasks.first()).unwrap_or(&peers.own).clone()
}

fn request_of(arrival: Arrival) -> Result<KoloMeetRequest> {
    let Arrival { key: (group_key, instance_key), spec, place, tensor, timeout } = arrival;
    let mut request = KoloMeetRequest {
        group_key,
        instance_key,
        size: spec.size as u64,
        data_type: spec.dtype as i32,
        device: place.to_string(),
        tensor: tensor.map(WireTensor::new).transpose()?,
        timeout: timeout.map_or(0.0, |timeout| timeout.as_secs_f64()),
        request_id: random_id(),
        ..KoloMeetRequest::default()
    };
    match spec.together {
        Together::Reduce { merge, divide } => (request.reduction, request.divide) = (merge.name().to_owned(), divide),
        Together::Gather => {}
        Together::Broadcast { shape } => {
            request.is_broadcast = true;
            request.dims = shape.dims().iter().map(|dim| *dim as u64).collect();
        }
    }
    Ok(request)
}

fn arrival_of(request: KoloMeetRequest) -> Result<Arrival> {
    let dtype = DType::from_number(request.data_type)?;
    let size = usize::try_from(request.size).ok().filter(|size| *size > 0);
    let size =
        size.ok_or_else(|| Error::invalid_argument(format!("group size must be positive, got {}", request.size)))?;
    let together = match (&*request.reduction, request.is_broadcast) {
        ("", false) => Together::Gather,
        ("", true) => {
            let wide =
                |dim: &u64| usize::try_from(*dim).map_err(|_| Error::invalid_argument(format!("a size of {dim}")));
            Together::Broadcast { shape: Shape::new(&request.dims.iter().map(wide).collect::<Result<Vec<usize>>>()?)? }
        }
        (reduction, _) => Together::Reduce { merge: ReduceOp::parse(reduction)?, divide: request.divide },
    };
    let tensor = request.tensor.map(WireTensor::into_tensor).transpose()?;
    if let Some(other) = tensor.as_ref().map(Tensor::dtype).filter(|other| *other != dtype) {
        return Err(Error::invalid_argument(format!("{} brings {other} to a meeting of {dtype}", request.device)));
    }
    Ok(Arrival {
        key: (request.group_key, request.instance_key),
        spec: MeetingSpec { together, size, dtype },
        place: DeviceName::parse(&request.device)?,
        tensor,
        timeout: Duration::try_from_secs_f64(request.timeout).ok().filter(|timeout| !timeout.is_zero()),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_says_comes_over() {
        let places = ["/job:worker/replica:0/task:1/device:CPU:0", "/job:chief/replica:0/task:0/device:CPU:1"];
        let togethers = [
            Together::Reduce { merge: ReduceOp::Max, divide: false },
            Together::Reduce { merge: ReduceOp::Sum, divide: true },
            Together::Gather,
            Together::Broadcast { shape: Shape::new(&[2, 3]).unwrap() },
        ];
        for (i, together) in togethers.into_iter().enumerate() {
            let spec = MeetingSpec { together, size: i + 2, dtype: DType::F32 };
            let arrival = || Arrival {
                key: (3, -4),
                spec: spec.clone(),
                place: DeviceName::parse(places[i % 2]).unwrap(),
                tensor: (i != 3).then(|| Tensor::from([1.0f32, 2.0])),
                timeout: (i == 1).then(|| Duration::from_millis(1500)),
            };
            let back = arrival_of(request_of(arrival()).unwrap()).unwrap();
            let wanted = arrival();
            assert_eq!((back.key, back.spec, back.place), (wanted.key, wanted.spec, wanted.place));
            assert_eq!((back.tensor, back.timeout), (wanted.tensor, wanted.timeout));
        }
        let refused = |change: fn(&mut KoloMeetRequest), says: &str| {
            let mut request = KoloMeetRequest {
                size: 2,
                data_type: DType::F32 as i32,
                device: places[0].to_owned(),
                tensor: Some(WireTensor::new(Tensor::from([1.0f32])).unwrap()),
                ..KoloMeetRequest::default()
            };
            change(&mut request);
            let error = arrival_of(request).err().unwrap().to_string();
            assert!(error.contains(says), "{error}");
        };
        refused(|request| request.size = 0, "group size must be positive");
        refused(|request| request.data_type = DType::I32 as i32, "brings float to a meeting of int32");
        refused(|request| request.device = "/cpu:0".to_owned(), "not a full device name");
        refused(|request| request.reduction = "xor".to_owned(), "xor");
    }
}
