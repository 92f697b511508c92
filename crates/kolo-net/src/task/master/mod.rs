//! The master of a task, which serves clients: keeps their graphs, places and partitions them, and has all tasks run
//! their parts of steps.
//!
//! Any task can be a client's master. The master's own part of a step runs in the same process without a message.

mod callable;
mod graph;
mod partial;
mod plan;
mod run;
mod session;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{DeviceName, DeviceSpec, Error, Result};
use kolo_graph::DeviceInfo;
use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::cluster::ClusterSpec;
use crate::task::peers::{Peers, TaskName};
use crate::task::random::random_u64;
use crate::task::request_ids::RequestIds;
use crate::task::services::{Answer, MasterService};
use crate::wire::proto;

use graph::{Devices, check_config};
use plan::{StepPlan, Wanted, part_def};
use run::StepIo;
use session::{Session, from_task};

/// The number of request ids that a master remembers, as in TensorFlow.
const N_REQUESTS: usize = 10_000;

/// The timeout for a task's response with its cluster spec.
const COMPARE_DEADLINE: Duration = Duration::from_secs(5);

/// One task's master.
pub struct Master {
    peers: Arc<Peers>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    requests: RequestIds,
    /// The defaults for a session's options.
    defaults: proto::ConfigProto,
    /// How long a new session waits for tasks that are not up yet.
    ready_deadline: Duration,
    /// The maximum number of concurrent sessions.
    max_sessions: usize,
}

impl Master {
    pub(crate) fn new(
        peers: Arc<Peers>,
        defaults: proto::ConfigProto,
        ready_deadline: Duration,
        max_sessions: usize,
    ) -> Arc<Master> {
        Arc::new(Master {
            peers,
            sessions: Mutex::default(),
            requests: RequestIds::new(N_REQUESTS),
            defaults,
            ready_deadline,
            max_sessions,
        })
    }

    fn session(&self, handle: &str) -> Result<Arc<Session>> {
        let found = self.sessions.lock().get(handle).cloned();
        let session = found.ok_or_else(|| Error::aborted(format!("Session {handle} is not found.")))?;
        session.touch();
        Ok(session)
    }

    async fn create(self: Arc<Self>, request: proto::CreateSessionRequest) -> Result<proto::CreateSessionResponse> {
        let config = self.merged(request.config.unwrap_or_default());
        check_config(&config)?;
        if self.sessions.lock().len() >= self.max_sessions {
            return Err(Error::resource_exhausted(format!(
                "this master has {} sessions, the most it was told to have; close some",
                self.max_sessions
            )));
        }
        let filters = filters(&config.device_filters)?;
        let mut tasks = self.peers.tasks_of(config.cluster_def.as_ref())?;
        tasks.retain(|task| self.is_wanted(task, &filters));
        if !tasks.contains(&self.peers.own) {
            let own = &self.peers.own;
            return Err(Error::invalid_argument(format!("cluster_def does not have {own}, the session's own server")));
        }
        let deadline = match u64::try_from(config.operation_timeout_in_ms) {
            Ok(millis) if millis > 0 => Duration::from_millis(millis),
            _ => self.ready_deadline,
        };
        let attributes = self.ask_devices(&tasks, &filters, deadline).await?;
        self.compare_clusters(&tasks, COMPARE_DEADLINE.min(deadline / 4)).await?;
        let infos = infos(&attributes)?;
        let handle = format!("{:016x}", random_u64());
        let devices = Devices { own: self.peers.own.clone(), infos };
        let session = Session::new(handle.clone(), config, devices, attributes, tasks, self.peers.clone());
        let session = Arc::new(session);
        let announcing = within(deadline, "announcing the session to all tasks", self.announce(&session));
        let announced = match announcing.await {
            Ok(()) => session.extend(request.graph_def.unwrap_or_default(), None).await,
            Err(error) => Err(error),
        };
        match announced {
            Ok(graph_version) => {
                session.touch();
                self.sessions.lock().insert(handle.clone(), session);
                Ok(proto::CreateSessionResponse { session_handle: handle, graph_version })
            }
            Err(error) => {
                self.peers.runtime.spawn(session.close());
                Err(error)
            }
        }
    }

    /// The client's options; those that it does not set are the server's defaults.
    fn merged(&self, mut config: proto::ConfigProto) -> proto::ConfigProto {
        if config.operation_timeout_in_ms == 0 {
            config.operation_timeout_in_ms = self.defaults.operation_timeout_in_ms;
        }
        config.allow_soft_placement |= self.defaults.allow_soft_placement;
        config.log_device_placement |= self.defaults.log_device_placement;
        if config.device_filters.is_empty() {
            config.device_filters.clone_from(&self.defaults.device_filters);
        }
        config
    }

    fn is_wanted(&self, task: &TaskName, filters: &[DeviceSpec]) -> bool {
        let spec = DeviceSpec {
            job: Some(task.job.clone()),
            replica: Some(0),
            task: Some(task.task),
            ..DeviceSpec::default()
        };
        *task == self.peers.own || filters.is_empty() || filters.iter().any(|filter| filter.compatible(&spec))
    }

    /// The devices of all tasks, the own task's first. The error after a timeout names the tasks that did not respond.
    async fn ask_devices(
        &self,
        tasks: &[TaskName],
        filters: &[DeviceSpec],
        deadline: Duration,
    ) -> Result<Vec<proto::DeviceAttributes>> {
        let mut asking = JoinSet::new();
        for task in tasks.iter().cloned() {
            let worker = self.peers.task(&task)?;
            let is_own = task == self.peers.own;
            asking.spawn(async move {
                let answer = tokio::time::timeout(deadline, worker.get_status(proto::GetStatusRequest {})).await;
                let answer = answer.map_err(|_| worker.trouble().unwrap_or_else(|| "no answer".to_owned()));
                (answer.map(|answer| answer.map_err(|error| from_task(error, &task, is_own))), task)
            });
        }
        let mut found: Vec<(TaskName, Vec<proto::DeviceAttributes>)> = Vec::new();
        let mut missing: Vec<String> = Vec::new();
        while let Some(answer) = asking.join_next().await {
            let (answer, task) = answer.map_err(|error| Error::internal(format!("GetStatus failed: {error}")))?;
            match answer {
                Ok(answer) => found.push((task, answer?.device_attributes)),
                Err(why) => {
                    let address = self.peers.cluster.address(&task.job, task.task)?;
                    missing.push(format!("{task} at {address}: {why}"));
                }
            }
        }
        if !missing.is_empty() {
            missing.sort();
            return Err(Error::deadline_exceeded(format!(
                "these tasks did not say in {deadline:?} which devices they have: {}",
                missing.join("; ")
            )));
        }
        found.sort_by_key(|(task, _)| (*task != self.peers.own, task.clone()));
        let mut all = Vec::new();
        for (task, devices) in found {
            for device in devices {
                let spec = DeviceSpec::parse(&device.name)?;
                let keeps = task == self.peers.own
                    || filters.is_empty()
                    || filters.iter().any(|filter| filter.compatible(&spec));
                if keeps && runs_kernels(&device.device_type) {
                    all.push(device);
                }
            }
        }
        Ok(all)
    }

    /// Refuses tasks of another cluster. Kolo's own transport checks this when it connects; over gRPC a request is
    /// needed. TensorFlow's tasks do not support that request.
    async fn compare_clusters(&self, tasks: &[TaskName], patience: Duration) -> Result<()> {
        let mut asking = JoinSet::new();
        for task in tasks.iter().cloned() {
            let worker = self.peers.task(&task)?;
            if !worker.has_greeted() {
                // No step has this id: only the cluster spec in the response is used.
                let call = worker.report(proto::KoloReportRequest { step_id: -1, ..Default::default() });
                asking.spawn(async move { (tokio::time::timeout(patience, call).await, task) });
            }
        }
        while let Some(answer) = asking.join_next().await {
            let (answer, task) = answer.map_err(|error| Error::internal(format!("KoloReport failed: {error}")))?;
            let Some(theirs) = answer.ok().and_then(Result::ok).and_then(|report| report.cluster) else { continue };
            if let Some(difference) = self.peers.cluster.first_difference(&ClusterSpec::from_def(&theirs)?) {
                return Err(Error::failed_precondition(format!(
                    "{} and {task} were started with different clusters: {difference}",
                    self.peers.own
                )));
            }
        }
        Ok(())
    }

    /// Announces a session to all tasks.
    async fn announce(&self, session: &Arc<Session>) -> Result<()> {
        let mut announcing = JoinSet::new();
        for task in session.tasks.iter().cloned() {
            let worker = self.peers.task(&task)?;
            let is_own = task == self.peers.own;
            let request = proto::CreateWorkerSessionRequest {
                session_handle: session.handle.clone(),
                isolate_session_state: session.config.isolate_session_state,
                ..proto::CreateWorkerSessionRequest::default()
            };
            announcing.spawn(async move {
                worker.create_worker_session(request).await.map(drop).map_err(|error| from_task(error, &task, is_own))
            });
        }
        while let Some(answer) = announcing.join_next().await {
            answer.map_err(|error| Error::internal(format!("CreateWorkerSession failed: {error}")))??;
        }
        Ok(())
    }

    async fn run(self: Arc<Self>, request: proto::RunStepRequest) -> Result<proto::RunStepResponse> {
        self.requests.check(request.request_id, "RunStep (Master)")?;
        let session = self.session(&request.session_handle)?;
        if !request.partial_run_handle.is_empty() {
            return session.run_partial(request).await;
        }
        session.run(request).await
    }

    async fn list(self: Arc<Self>, request: proto::ListDevicesRequest) -> Result<proto::ListDevicesResponse> {
        if !request.session_handle.is_empty() {
            let session = self
                .session(&request.session_handle)
                .map_err(|_| Error::invalid_argument(format!("Session {} is not found.", request.session_handle)))?;
            // TensorFlow's masters list all devices here, and clients merge both lists.
            let local_device = session.attributes.clone();
            return Ok(proto::ListDevicesResponse { local_device, remote_device: Vec::new() });
        }
        let all = self.ask_devices(&self.peers.tasks(), &[], self.ready_deadline).await?;
        let own = format!("{}/", self.peers.own);
        let (local_device, remote_device) = all.into_iter().partition(|device| device.name.starts_with(&own));
        Ok(proto::ListDevicesResponse { local_device, remote_device })
    }

    /// Empties containers, and ends the sessions that use them. Those of others go on.
    async fn reset_containers(self: Arc<Self>, request: proto::ResetRequest) -> Result<proto::ResetResponse> {
        let filters = filters(&request.device_filters)?;
        let jobs: Vec<&str> = self.peers.cluster.jobs().collect();
        // The container without a name has the name of the task's job.
        let has_default =
            request.container.is_empty() || request.container.iter().any(|name| jobs.contains(&name.as_str()));
        let is_reset = |container: &str| match container {
            "" => has_default,
            name => request.container.iter().any(|reset| reset == name),
        };
        let all: Vec<Arc<Session>> = self.sessions.lock().values().cloned().collect();
        for session in all.into_iter().filter(|session| session.uses_container(is_reset)) {
            self.sessions.lock().remove(&session.handle);
            session.close().await;
        }
        let mut resetting = JoinSet::new();
        for task in self.peers.tasks().into_iter().filter(|task| self.is_wanted(task, &filters)) {
            let call =
                self.peers.task(&task)?.cleanup_all(proto::CleanupAllRequest { container: request.container.clone() });
            let call = within(self.ready_deadline, "Reset", call);
            resetting.spawn(async move { call.await.map(drop).map_err(|error| from_task(error, &task, false)) });
        }
        while let Some(answer) = resetting.join_next().await {
            answer.map_err(|error| Error::internal(format!("CleanupAll failed: {error}")))??;
        }
        Ok(proto::ResetResponse {})
    }

    /// Ends the sessions that no open connection has used, and that nobody has used for this long.
    pub(crate) async fn end_abandoned(&self, lease: Duration) {
        let abandoned: Vec<Arc<Session>> = {
            let mut sessions = self.sessions.lock();
            let all = sessions.values().filter(|session| session.is_abandoned(lease)).cloned().collect::<Vec<_>>();
            all.iter().for_each(|session| drop(sessions.remove(&session.handle)));
            all
        };
        if !abandoned.is_empty() {
            tracing::info!("ended {} sessions of clients that have been gone for {lease:?}", abandoned.len());
        }
        for session in abandoned {
            session.close().await;
        }
    }

    /// Closes all sessions, when the task shuts down.
    pub(crate) async fn close_all(&self) {
        let sessions = std::mem::take(&mut *self.sessions.lock());
        for session in sessions.into_values() {
            session.close().await;
        }
    }
}

impl Session {
    /// The timeout of a run.
    fn timeout(&self, options: &proto::RunOptions) -> Option<Duration> {
        let millis =
            if options.timeout_in_ms > 0 { options.timeout_in_ms } else { self.config.operation_timeout_in_ms };
        u64::try_from(millis).ok().filter(|&millis| millis > 0).map(Duration::from_millis)
    }

    async fn run(self: Arc<Self>, request: proto::RunStepRequest) -> Result<proto::RunStepResponse> {
        self.check_open()?;
        let options = request.options.unwrap_or_default();
        let mut feeds: Vec<proto::NamedTensorProto> = request.feed;
        feeds.sort_by(|a, b| a.name.cmp(&b.name));
        let wanted = Wanted {
            feeds: feeds.iter().map(|feed| feed.name.clone()).collect(),
            fetches: request.fetch,
            targets: request.target,
            ..Wanted::default()
        };
        let plan = match self.timeout(&options) {
            Some(timeout) => within(timeout, "handing the graph to its tasks", self.plan(wanted.sorted())).await?,
            None => self.plan(wanted.sorted()).await?,
        };
        let send = |(key, named): (&Option<String>, proto::NamedTensorProto)| {
            key.as_ref().map(|key| proto::NamedTensorProto { name: key.clone(), tensor: named.tensor })
        };
        let io = StepIo {
            send: plan.feed_keys.iter().zip(feeds).filter_map(send).collect(),
            recv: plan.unique_fetch_keys(),
            exec_opts: exec_opts(&options),
            partial: None,
        };
        let output = self.run_step(&plan, io, self.timeout(&options)).await?;
        let mut tensor: Vec<proto::NamedTensorProto> = Vec::with_capacity(plan.fetch_keys.len());
        for (name, key) in plan.wanted.fetches.iter().zip(&plan.fetch_keys) {
            if tensor.last().is_some_and(|last| last.name == *name) {
                continue;
            }
            tensor.push(proto::NamedTensorProto { name: name.clone(), tensor: output.values.get(key).cloned() });
        }
        let partition_graphs = match options.output_partition_graphs {
            true => plan.parts.iter().map(|part| part_def(&part.nodes)).collect::<Result<_>>()?,
            false => Vec::new(),
        };
        let step_stats = output.step_stats;
        let metadata = proto::RunMetadata { step_stats, partition_graphs, ..proto::RunMetadata::default() };
        Ok(proto::RunStepResponse { tensor, metadata: Some(metadata), ..proto::RunStepResponse::default() })
    }
}

impl StepPlan {
    /// The keys of all fetches; a tensor that is fetched twice is sent once.
    fn unique_fetch_keys(&self) -> Vec<String> {
        let mut keys = self.fetch_keys.clone();
        keys.sort_unstable();
        keys.dedup();
        keys
    }
}

/// Fails a call that exceeds its deadline.
async fn within<T>(deadline: Duration, what: &str, call: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Err(Error::deadline_exceeded(format!("{what} did not end in {deadline:?}")));
    tokio::time::timeout(deadline, call).await.unwrap_or_else(late)
}

fn exec_opts(options: &proto::RunOptions) -> proto::ExecutorOpts {
    proto::ExecutorOpts { record_timeline: options.trace_level > 0, ..proto::ExecutorOpts::default() }
}

fn filters(texts: &[String]) -> Result<Vec<DeviceSpec>> {
    let parse = |text: &String| DeviceSpec::parse(text).map_err(|error| error.context("device_filters"));
    texts.iter().map(parse).collect()
}

/// Whether nodes can be placed on devices of this kind. The list of kinds is open: a kind that this task has no kernels for
/// gets the nodes that are pinned to it, or none. TensorFlow's tasks also list the compilers of XLA (`XLA_CPU`, `XLA_GPU`) as
/// devices; those run clusters of nodes that TensorFlow has compiled, and no kernel.
fn runs_kernels(kind: &str) -> bool {
    !kind.starts_with("XLA_")
}

fn infos(attributes: &[proto::DeviceAttributes]) -> Result<Vec<DeviceInfo>> {
    let info = |device: &proto::DeviceAttributes| {
        Ok(DeviceInfo { name: DeviceName::parse(&device.name)?, incarnation: device.incarnation })
    };
    attributes.iter().map(info).collect()
}

/// The master, as a service for clients.
pub(crate) struct LocalMaster(pub Arc<Master>);

impl MasterService for LocalMaster {
    fn create_session(&self, request: proto::CreateSessionRequest) -> Answer<proto::CreateSessionResponse> {
        Box::pin(self.0.clone().create(request))
    }

    fn extend_session(&self, request: proto::ExtendSessionRequest) -> Answer<proto::ExtendSessionResponse> {
        let session = self.0.session(&request.session_handle);
        Box::pin(async move {
            let def = request.graph_def.unwrap_or_default();
            let new_graph_version = session?.extend(def, Some(request.current_graph_version)).await?;
            Ok(proto::ExtendSessionResponse { new_graph_version })
        })
    }

    fn run_step(&self, request: proto::RunStepRequest) -> Answer<proto::RunStepResponse> {
        Box::pin(self.0.clone().run(request))
    }

    fn partial_run_setup(&self, request: proto::PartialRunSetupRequest) -> Answer<proto::PartialRunSetupResponse> {
        let seen = self.0.requests.check(request.request_id, "PartialRunSetup (Master)");
        let session = self.0.session(&request.session_handle);
        Box::pin(async move {
            seen?;
            let wanted =
                Wanted { feeds: request.feed, fetches: request.fetch, targets: request.target, ..Wanted::default() };
            let partial_run_handle = session?.begin_partial(wanted).await?;
            Ok(proto::PartialRunSetupResponse { partial_run_handle })
        })
    }

    fn close_session(&self, request: proto::CloseSessionRequest) -> Answer<proto::CloseSessionResponse> {
        let session = self.0.sessions.lock().remove(&request.session_handle);
        Box::pin(async move {
            let session = session.ok_or_else(|| {
                let handle = &request.session_handle;
                Error::aborted(format!("Session {handle} is not found. Possibly, this master has restarted."))
            })?;
            session.close().await;
            Ok(proto::CloseSessionResponse {})
        })
    }

    fn list_devices(&self, request: proto::ListDevicesRequest) -> Answer<proto::ListDevicesResponse> {
        Box::pin(self.0.clone().list(request))
    }

    fn reset(&self, request: proto::ResetRequest) -> Answer<proto::ResetResponse> {
        Box::pin(self.0.clone().reset_containers(request))
    }

    fn make_callable(&self, request: proto::MakeCallableRequest) -> Answer<proto::MakeCallableResponse> {
        let seen = self.0.requests.check(request.request_id, "MakeCallable (Master)");
        let session = self.0.session(&request.session_handle);
        Box::pin(async move {
            seen?;
            let handle = session?.make_callable(request.options.unwrap_or_default()).await?;
            Ok(proto::MakeCallableResponse { handle })
        })
    }

    fn run_callable(&self, request: proto::RunCallableRequest) -> Answer<proto::RunCallableResponse> {
        let seen = self.0.requests.check(request.request_id, "RunCallable (Master)");
        let session = self.0.session(&request.session_handle);
        Box::pin(async move {
            seen?;
            session?.run_callable(request).await
        })
    }

    fn release_callable(&self, request: proto::ReleaseCallableRequest) -> Answer<proto::ReleaseCallableResponse> {
        let session = self.0.session(&request.session_handle);
        Box::pin(async move {
            session?.callables.lock().remove(&request.handle);
            Ok(proto::ReleaseCallableResponse {})
        })
    }
}
