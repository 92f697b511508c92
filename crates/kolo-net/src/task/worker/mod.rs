//! The worker of a task, which serves masters and other tasks: keeps graphs, runs its part of steps, hands out tensors.
//!
//! A master announces its session, registers its parts of graphs, and runs them step by step. The values that a step
//! has produced for other tasks are kept in its [`Transfers`] until the master reports that the step is over. No thread
//! blocks.

mod meetings;
pub(crate) mod report;
mod session;
mod stats;
mod step;
pub(crate) mod transfers;
#[cfg(test)]
mod transfers_tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kolo_core::{DeviceSpec, Error, Result};
use kolo_device::DeviceAttributes;
use kolo_ops::collective::Groups;
use kolo_ops::{Received, Rendezvous, RendezvousKey};
use kolo_runtime::{Host, StepKind};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::durability::journal::Journal;
use crate::durability::replica::{Replicas, Replicator};
use crate::task::peers::{PeerFetch, Peers, TaskName};
use crate::task::request_ids::RequestIds;
use crate::task::services::{Answer, Delivery, Guard, WorkerService};
use crate::transport::tls::random_token;
use crate::wire::proto;
use crate::wire::tensor_wire::WireTensor;

use meetings::ClusterMeetings;
use session::{Registered, Session};
use step::{Step, Steps};
use transfers::StepTransfers;

/// The number of request ids that a worker remembers, as in TensorFlow.
const N_REQUESTS: usize = 100_000;

/// How long a task has to confirm that it has claimed its variables.
const CONFIRM_DEADLINE: Duration = Duration::from_secs(5);

/// The primitives of `transfers.rs`. `tests/interleavings.rs` compiles that file with shuttle's in their place.
mod sync {
    pub(super) use parking_lot::Mutex;
}

/// One task's worker.
pub struct Worker {
    host: Host,
    peers: Arc<Peers>,
    meetings: Arc<ClusterMeetings>,
    /// By device name.
    incarnations: HashMap<String, u64>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    /// The session of masters that do not announce theirs.
    legacy: Arc<Session>,
    steps: Steps,
    requests: RequestIds,
    started: Instant,
    /// What makes variables durable; `None` until they have been restored.
    keeper: watch::Sender<Option<Keeper>>,
    /// Replicas of other tasks' variables.
    replicas: Replicas,
    /// Proves to other tasks that a claim comes from the process at this task's address.
    nonce: Vec<u8>,
    /// The nonces that tasks have confirmed, the last of each.
    confirmed: Mutex<HashMap<TaskName, Vec<u8>>>,
}

/// What makes variables durable, so that they outlive this process.
#[derive(Clone)]
pub(crate) enum Keeper {
    /// They are not durable.
    Nobody,
    Journal(Arc<Journal>),
    Replica(Arc<Replicator>),
}

impl Worker {
    pub(crate) fn new(host: Host, peers: Arc<Peers>, groups: &Groups) -> Result<Arc<Worker>> {
        let incarnations =
            host.list_devices().iter().map(|device| (device.name.to_string(), device.incarnation)).collect();
        let prefix: Arc<str> = format!("{}/", peers.own).into();
        let worker = Arc::new(Worker {
            meetings: ClusterMeetings::begin(&peers, groups.meetings()),
            incarnations,
            sessions: Mutex::default(),
            legacy: Arc::new(Session::new(&host, false)),
            steps: Steps::new(prefix, Arc::new(PeerFetch::new(peers.clone()))),
            requests: RequestIds::new(N_REQUESTS),
            started: Instant::now(),
            keeper: watch::Sender::new(None),
            replicas: Replicas::default(),
            nonce: random_token()?.secret().into_bytes(),
            confirmed: Mutex::default(),
            host,
            peers: peers.clone(),
        });
        peers.set_own(&worker);
        Ok(worker)
    }

    /// See [`Worker::check_owner`].
    pub(crate) fn nonce(&self) -> &[u8] {
        &self.nonce
    }

    /// Marks the task as ready: its variables are restored, and `keeper` makes updates durable from now on.
    pub(crate) fn set_keeper(&self, keeper: Keeper) {
        self.keeper.send_replace(Some(keeper));
    }

    pub(crate) fn host(&self) -> &Host {
        &self.host
    }

    /// Waits until the task is ready.
    /// Whether the task has its variables, so that it is ready.
    pub(crate) fn has_variables(&self) -> bool {
        self.keeper.borrow().is_some()
    }

    async fn keeper(&self) -> Keeper {
        let mut keeper = self.keeper.subscribe();
        let set = keeper.wait_for(Option::is_some).await;
        set.ok().and_then(|keeper| keeper.clone()).unwrap_or(Keeper::Nobody)
    }

    /// How long steps have waited for room on the disk of the journal, and its directory, if they do.
    fn full_journal(&self) -> Option<(Duration, String)> {
        match &*self.keeper.borrow() {
            Some(Keeper::Journal(journal)) => {
                journal.full_since().map(|(lasts, dir)| (lasts, dir.display().to_string()))
            }
            Some(Keeper::Nobody | Keeper::Replica(_)) | None => None,
        }
    }

    /// The task's devices.
    pub fn devices(&self) -> Vec<DeviceAttributes> {
        self.host.list_devices()
    }

    fn session(&self, handle: &str, was_announced: bool) -> Result<Arc<Session>> {
        if !was_announced {
            return Ok(self.legacy.clone());
        }
        self.sessions.lock().get(handle).cloned().ok_or_else(|| {
            Error::aborted(format!(
                "Session handle is not found: {handle}. Possibly this worker (\"{}\") just restarted.",
                self.peers.own
            ))
        })
    }

    /// Makes the variables that a part has written durable, before the caller gets the response that the part ran. It may
    /// wait, until the master ends the step.
    async fn log(&self, part: &Registered, step: &Step) -> Result<()> {
        if part.written.is_empty() {
            return Ok(());
        }
        match self.keeper().await {
            Keeper::Nobody => Ok(()),
            Keeper::Journal(journal) => {
                tokio::select! {
                    logged = journal.commit(&part.written) => logged,
                    error = step.stopped() => Err(error),
                }
            }
            Keeper::Replica(replica) => replica.commit(&part.written).await,
        }
    }

    async fn run(self: Arc<Self>, request: proto::RunGraphRequest) -> Result<proto::RunGraphResponse> {
        self.requests.check(request.request_id, "RunGraph (Worker)")?;
        let session = self.session(&request.session_handle, request.create_worker_session_called)?;
        let registered = session.graph(&request.graph_handle)?;
        let step = self.steps.find_or_create(request.step_id as u64)?;
        step.transfers.ask_ahead(&registered.groups);
        let keys: Vec<RendezvousKey> =
            request.recv_key.iter().map(|key| RendezvousKey::parse(key)).collect::<Result<_>>()?;
        let mut sends = Vec::with_capacity(request.send.len());
        for named in request.send {
            let tensor = named.tensor.ok_or_else(|| Error::invalid_argument(format!("{} has no value", named.name)))?;
            sends.push((RendezvousKey::parse(&named.name)?, tensor.into_tensor()?));
        }
        let is_traced = request.exec_opts.unwrap_or_default().record_timeline;
        let transfers = StepTransfers(step.transfers.clone());
        let deposit = || sends.into_iter().try_for_each(|(key, tensor)| transfers.send(key, Received::value(tensor)));
        let response = |recv| proto::RunGraphResponse { recv, ..proto::RunGraphResponse::default() };
        if request.is_partial {
            if !step.is_begun() {
                step.begin(&registered.graph, if is_traced { StepKind::Traced } else { StepKind::Partial })?;
            }
            let stop = step.stop_on_drop();
            deposit()?;
            step.transfers.flush_values();
            self.steps.flush();
            let mut recv = Vec::with_capacity(keys.len());
            for key in keys {
                // Another node may have failed while this call waited for the value.
                let value = step.wait_for(key.clone()).await.map_err(|error| step.cause_of(error))?;
                recv.push(named(&key, value)?);
            }
            if request.is_last_partial_run {
                step.end().await?;
            }
            self.log(&registered, &step).await?;
            stop.disarm();
            return Ok(response(recv));
        }
        deposit()?;
        step.begin(&registered.graph, if is_traced { StepKind::Traced } else { StepKind::Whole })?;
        if registered.graph.count_run() {
            let registered = registered.clone();
            // Not awaited: this step runs without it, and a failure is logged there.
            drop(self.peers.runtime.spawn_blocking(move || registered.graph.split()));
        }
        // Flushed only now: the values that the step has sent already go out first, and the peer is woken only once.
        self.steps.flush();
        let stop = step.stop_on_drop();
        let ended = step.end().await;
        stop.disarm();
        ended?;
        self.log(&registered, &step).await?;
        let mut recv = Vec::with_capacity(keys.len());
        for key in keys {
            let value = step.transfers.take(&key);
            let value = value.ok_or_else(|| Error::internal(format!("the step did not send {key}")))?;
            recv.push(named(&key, value.picked_up()?)?);
        }
        let step_stats = is_traced.then(|| stats::step_stats(&step.take_trace(), step.started()));
        Ok(proto::RunGraphResponse { step_stats, ..response(recv) })
    }

    async fn answer_recv(self: Arc<Self>, request: proto::RecvTensorRequest) -> Result<proto::RecvTensorResponse> {
        self.requests.check(request.request_id, "RecvTensor (Worker)")?;
        let key = RendezvousKey::parse(&request.rendezvous_key)?;
        self.check_incarnation(&key)?;
        let step = self.steps.find_or_create(request.step_id as u64)?;
        recv_response(step.wait_for(key).await?)
    }

    /// Refuses a request for a value of a previous incarnation of this task.
    fn check_incarnation(&self, key: &RendezvousKey) -> Result<()> {
        let incarnation = u64::from_str_radix(key.part(1), 16)
            .map_err(|_| Error::invalid_argument(format!("Invalid  rendezvous key: {key}")))?;
        let own = match self.incarnations.get(key.part(0)) {
            Some(own) => Some(own),
            // The device name may be spelled differently.
            None => self.incarnations.get(&DeviceSpec::parse(key.part(0))?.to_string()),
        };
        let own = *own.ok_or_else(|| {
            let device = key.part(0);
            Error::invalid_argument(format!("RecvTensor asks {} for a tensor of '{device}'", self.peers.own))
        })?;
        if own != incarnation {
            return Err(Error::aborted(format!(
                "RecvTensor expects a different device incarnation: {incarnation} vs. {own}. Your worker job (\"{}\") was \
                 probably restarted. Check your worker job for the reason why it was restarted.",
                self.peers.own
            )));
        }
        Ok(())
    }

    /// See [`WorkerService::recv_tensors`].
    fn hand_out(&self, step_id: u64, keys: &Arc<[RendezvousKey]>, delivery: &Delivery) -> Result<Guard> {
        keys.iter().try_for_each(|key| self.check_incarnation(key))?;
        let step = self.steps.find_or_create(step_id)?;
        Ok(step.transfers.wait_for_group(keys, delivery))
    }

    /// Replicas are stored only for other tasks of the cluster. Clients have the same token and the same certificates, so
    /// the process at the task's address is asked whether the caller's nonce is its own.
    async fn check_owner(&self, task: &str, nonce: &[u8]) -> Result<()> {
        let own = &self.peers.own;
        let known = self.peers.tasks().into_iter().find(|known| known.to_string() == task && known != own);
        let Some(task) = known else {
            return Err(Error::invalid_argument(format!("{own} keeps no variables for '{task}'")));
        };
        if self.confirmed.lock().get(&task).is_some_and(|confirmed| confirmed == nonce) {
            return Ok(());
        }
        let request = proto::KoloConfirmRequest { nonce: nonce.to_vec() };
        let answer = tokio::time::timeout(CONFIRM_DEADLINE, self.peers.task(&task)?.confirm(request)).await;
        let why = match answer {
            Ok(Ok(answer)) if answer.is_own => {
                self.confirmed.lock().insert(task, nonce.to_vec());
                return Ok(());
            }
            Ok(Ok(_)) => "it has not".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer in {CONFIRM_DEADLINE:?}"),
        };
        Err(Error::aborted(format!(
            "only {task} may have its variables, and the process at its address was asked whether it has claimed them: {why}"
        )))
    }

    /// See [`WorkerService::prepare`].
    fn ask_ahead(&self, request: &proto::RunGraphRequest) -> Result<()> {
        let session = self.session(&request.session_handle, request.create_worker_session_called)?;
        let registered = session.graph(&request.graph_handle)?;
        self.steps.find_or_create(request.step_id as u64)?.transfers.ask_ahead(&registered.groups);
        Ok(())
    }
}

/// The response to a request for a tensor.
pub(crate) fn recv_response(received: Received) -> Result<proto::RecvTensorResponse> {
    let micros = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_micros() as i64);
    Ok(proto::RecvTensorResponse {
        tensor: Some(WireTensor::new(received.tensor)?),
        is_dead: received.is_dead,
        send_start_micros: micros,
        ..proto::RecvTensorResponse::default()
    })
}

fn named(key: &RendezvousKey, value: Received) -> Result<proto::NamedTensorProto> {
    if value.is_dead {
        return Err(Error::invalid_argument(format!("The tensor returned for {} was not valid.", key.part(3))));
    }
    Ok(proto::NamedTensorProto { name: key.to_string(), tensor: Some(WireTensor::new(value.tensor)?) })
}

/// A response that is available already.
fn now<T: Send + 'static>(result: Result<T>) -> Answer<T> {
    Box::pin(std::future::ready(result))
}

/// A handle to the worker, which calls keep alive while they run.
pub(crate) struct LocalWorker(pub Arc<Worker>);

impl WorkerService for LocalWorker {
    fn recv_tensors(&self, step_id: u64, keys: &Arc<[RendezvousKey]>, delivery: Delivery) -> Option<Guard> {
        match self.0.hand_out(step_id, keys, &delivery) {
            Ok(guard) => Some(guard),
            Err(error) => {
                (0..keys.len()).for_each(|index| (delivery.each)(index, Err(error.clone())));
                (delivery.flush)();
                None
            }
        }
    }

    fn flush(&self) {
        self.0.steps.flush();
    }

    fn has_greeted(&self) -> bool {
        true
    }

    fn prepare(&self, request: &proto::RunGraphRequest) {
        // An error here is ignored: it occurs again when the part is run, and is reported then.
        let _ = self.0.ask_ahead(request);
    }

    fn end_step(&self, step_id: u64) -> bool {
        self.0.steps.clean_up(step_id);
        true
    }

    fn get_status(&self, _: proto::GetStatusRequest) -> Answer<proto::GetStatusResponse> {
        let worker = self.0.clone();
        Box::pin(async move {
            // Sessions begin with this call. None may begin before the variables are restored.
            worker.keeper().await;
            let device_attributes = worker.devices().iter().map(stats::device_attributes).collect();
            Ok(proto::GetStatusResponse { device_attributes })
        })
    }

    fn create_worker_session(
        &self,
        request: proto::CreateWorkerSessionRequest,
    ) -> Answer<proto::CreateWorkerSessionResponse> {
        if request.session_handle.is_empty() {
            return now(Err(Error::invalid_argument("Session must be non-empty.")));
        }
        let def = request.server_def.unwrap_or_default();
        if let Err(error) = self.0.peers.tasks_of(def.cluster.as_ref()) {
            return now(Err(error));
        }
        let mut sessions = self.0.sessions.lock();
        let isolated = request.isolate_session_state;
        sessions.entry(request.session_handle).or_insert_with(|| Arc::new(Session::new(&self.0.host, isolated)));
        now(Ok(proto::CreateWorkerSessionResponse {}))
    }

    fn delete_worker_session(
        &self,
        request: proto::DeleteWorkerSessionRequest,
    ) -> Answer<proto::DeleteWorkerSessionResponse> {
        let session = self.0.sessions.lock().remove(&request.session_handle);
        drop(session);
        now(Ok(proto::DeleteWorkerSessionResponse {}))
    }

    fn register_graph(&self, request: proto::RegisterGraphRequest) -> Answer<proto::RegisterGraphResponse> {
        let worker = self.0.clone();
        Box::pin(async move {
            let session = worker.session(&request.session_handle, request.create_worker_session_called)?;
            // Large graphs take a while to compile; this must not block other calls.
            let own_prefix = format!("{}/", worker.peers.own);
            let compile = move || session.register(request, &own_prefix);
            let compiled = worker.peers.runtime.spawn_blocking(compile).await;
            let graph_handle =
                compiled.map_err(|error| Error::internal(format!("RegisterGraph failed: {error}")))??;
            Ok(proto::RegisterGraphResponse { graph_handle })
        })
    }

    fn deregister_graph(&self, request: proto::DeregisterGraphRequest) -> Answer<proto::DeregisterGraphResponse> {
        let session = self.0.session(&request.session_handle, request.create_worker_session_called);
        let forgotten = session.and_then(|session| session.deregister(&request.graph_handle));
        now(forgotten.map(|()| proto::DeregisterGraphResponse {}))
    }

    fn run_graph(&self, request: proto::RunGraphRequest) -> Answer<proto::RunGraphResponse> {
        Box::pin(self.0.clone().run(request))
    }

    fn cleanup_graph(&self, request: proto::CleanupGraphRequest) -> Answer<proto::CleanupGraphResponse> {
        self.0.steps.clean_up(request.step_id as u64);
        now(Ok(proto::CleanupGraphResponse {}))
    }

    fn cleanup_all(&self, request: proto::CleanupAllRequest) -> Answer<proto::CleanupAllResponse> {
        let containers = match request.container.is_empty() {
            true => vec![self.0.peers.own.job.to_string()],
            false => request.container,
        };
        let worker = self.0.clone();
        Box::pin(async move {
            let keeper = worker.keeper().await;
            worker.host.reset(&containers);
            match keeper {
                Keeper::Nobody => {}
                Keeper::Journal(journal) => journal.commit_removals().await?,
                Keeper::Replica(replica) => replica.commit_removals().await?,
            }
            Ok(proto::CleanupAllResponse {})
        })
    }

    fn claim(&self, request: proto::KoloClaimRequest) -> Answer<proto::KoloClaimResponse> {
        let worker = self.0.clone();
        Box::pin(async move {
            worker.check_owner(&request.task, &request.nonce).await?;
            Ok(worker.replicas.claim(&request.task))
        })
    }

    fn replicate(&self, request: proto::KoloReplicateRequest) -> Answer<proto::KoloReplicateResponse> {
        let worker = self.0.clone();
        Box::pin(async move {
            worker.check_owner(&request.task, &request.nonce).await?;
            worker.replicas.keep(request)
        })
    }

    fn confirm(&self, request: proto::KoloConfirmRequest) -> Answer<proto::KoloConfirmResponse> {
        // Of random numbers: how long a comparison takes helps nobody to guess the rest.
        now(Ok(proto::KoloConfirmResponse { is_own: request.nonce == self.0.nonce }))
    }

    fn meet(&self, request: proto::KoloMeetRequest) -> Answer<proto::KoloMeetResponse> {
        Box::pin(self.0.meetings.clone().answer(request))
    }

    fn complete_group(&self, request: proto::CompleteGroupRequest) -> Answer<proto::CompleteGroupResponse> {
        let device = request.device_attributes.map(|device| device.name).or(request.device_name.into_iter().next());
        now(self.0.meetings.refuse(&device.unwrap_or_else(|| "a device".to_owned()), request.group_key))
    }

    fn complete_instance(&self, request: proto::CompleteInstanceRequest) -> Answer<proto::CompleteInstanceResponse> {
        now(self.0.meetings.refuse(&request.device, request.group_key))
    }

    fn recv_tensor(&self, request: proto::RecvTensorRequest) -> Answer<proto::RecvTensorResponse> {
        Box::pin(self.0.clone().answer_recv(request))
    }

    fn mark_recv_finished(&self, _: proto::MarkRecvFinishedRequest) -> Answer<proto::MarkRecvFinishedResponse> {
        now(Ok(proto::MarkRecvFinishedResponse {}))
    }

    fn report(&self, request: proto::KoloReportRequest) -> Answer<proto::KoloReportResponse> {
        let worker = self.0.clone();
        Box::pin(async move { Ok(report::report(&worker, request).await) })
    }

    fn logging(&self, _: proto::LoggingRequest) -> Answer<proto::LoggingResponse> {
        now(Ok(proto::LoggingResponse::default()))
    }
}
