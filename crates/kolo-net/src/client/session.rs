//! A client's session on a server, which may be Kolo's or TensorFlow's.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{DeviceName, Error, Result, Tensor};
use kolo_device::DeviceAttributes;
use kolo_graph::Nodes;
use kolo_graph::wire::graph::{ExportOptions, export};
use kolo_runtime::{NodeTrace, RemoteRun, RemoteSession, RunMetadata, SessionConfig, StepTrace};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::task::random::random_id;
use crate::task::services::MasterService;
use crate::wire::proto;
use crate::wire::tensor_wire::WireTensor;

/// The timeout of calls that no option limits: they run no steps.
const CALL_DEADLINE: Duration = Duration::from_secs(120);

/// The timeout for closing a session.
const CLOSE_DEADLINE: Duration = Duration::from_secs(10);

/// The maximum number of nodes in a trace; a server could send more than fit into memory.
const MAX_TRACED: usize = 1 << 20;

/// One session on a master.
pub(crate) struct ClientSession {
    master: Arc<dyn MasterService>,
    runtime: Handle,
    target: String,
    config: proto::ConfigProto,
    state: Mutex<Option<ServerSession>>,
}

/// The server's handle of the session, and the version of its graph.
#[derive(Clone)]
struct ServerSession {
    handle: String,
    version: i64,
}

impl ClientSession {
    pub fn new(
        master: Arc<dyn MasterService>,
        runtime: Handle,
        target: &str,
        config: &SessionConfig,
    ) -> Arc<ClientSession> {
        let config = session_options(config);
        Arc::new(ClientSession { master, runtime, target: target.to_owned(), config, state: Mutex::new(None) })
    }

    fn handle(&self) -> Result<String> {
        let state = self.state.lock();
        let known = state.as_ref().ok_or_else(|| Error::failed_precondition("the session was never made"))?;
        Ok(known.handle.clone())
    }

    /// The timeout of the call that opens the session: the session's own limit and a little more, so that the server,
    /// which knows what is missing, times out first.
    fn deadline(&self) -> Duration {
        match u64::try_from(self.config.operation_timeout_in_ms).map(Duration::from_millis) {
            Ok(limit) if !limit.is_zero() => CALL_DEADLINE.min(limit + grace(limit)),
            _ => CALL_DEADLINE,
        }
    }

    /// Waits for a response until the deadline.
    fn wait<T>(&self, what: &str, deadline: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
        let timed = async {
            tokio::time::timeout(deadline, call).await.unwrap_or_else(|_| {
                Err(Error::deadline_exceeded(format!("{} did not answer {what} in {deadline:?}", self.target)))
            })
        };
        self.runtime.block_on(timed)
    }

    async fn run_step(&self, request: proto::RunStepRequest, run: &RemoteRun<'_>) -> Result<proto::RunStepResponse> {
        let call = self.master.run_step(request);
        let timed = async {
            match run.options.timeout {
                None => call.await,
                // The server knows what the step waits for, so it should time out first.
                Some(timeout) => tokio::time::timeout(timeout + grace(timeout), call).await.unwrap_or_else(|_| {
                    Err(Error::deadline_exceeded(format!("{} did not end the step in {timeout:?}", self.target)))
                }),
            }
        };
        let Some(token) = &run.options.cancel else { return timed.await };
        let (sender, cancelled) = oneshot::channel();
        let registration = match token.register(Box::new(move |reason| drop(sender.send(reason)))) {
            Ok(registration) => registration,
            Err((_, reason)) => return Err(reason),
        };
        let result = tokio::select! {
            biased;
            result = timed => result,
            Ok(reason) = cancelled => Err(reason),
        };
        token.deregister(registration);
        result
    }

    fn run_request(&self, run: &RemoteRun<'_>, partial: &str) -> Result<proto::RunStepRequest> {
        let feed = |&(name, value): &(&str, &Tensor)| {
            let tensor =
                WireTensor::new(value.clone()).map_err(|error| error.context(format_args!("feed '{name}'")))?;
            Ok(proto::NamedTensorProto { name: name.to_owned(), tensor: Some(tensor) })
        };
        Ok(proto::RunStepRequest {
            session_handle: self.handle()?,
            feed: run.feeds.iter().map(feed).collect::<Result<_>>()?,
            fetch: run.fetches.to_vec(),
            target: run.targets.to_vec(),
            options: Some(proto::RunOptions {
                trace_level: if run.options.trace { 3 } else { 0 },
                timeout_in_ms: run.options.timeout.map_or(0, |timeout| (timeout.as_millis() as i64).max(1)),
                ..proto::RunOptions::default()
            }),
            partial_run_handle: partial.to_owned(),
            store_errors_in_response_body: true,
            request_id: random_id(),
        })
    }
}

/// How much later than the server the client times out.
fn grace(timeout: Duration) -> Duration {
    (timeout / 10).clamp(Duration::from_millis(50), Duration::from_secs(2))
}

/// The values by name, in the order of `fetches`.
fn in_order(response: Vec<proto::NamedTensorProto>, fetches: &[String]) -> Result<Vec<Tensor>> {
    let mut values: HashMap<String, Tensor> = HashMap::with_capacity(response.len());
    for named in response {
        if let Some(tensor) = named.tensor {
            values.insert(named.name, tensor.into_tensor()?);
        }
    }
    let value = |name: &String| {
        values.get(name).cloned().ok_or_else(|| Error::internal(format!("the server did not return '{name}'")))
    };
    fetches.iter().map(value).collect()
}

impl RemoteSession for ClientSession {
    fn target(&self) -> &str {
        &self.target
    }

    fn extend(&self, nodes: &Nodes, first_new: usize) -> Result<()> {
        let mut def = export(nodes, ExportOptions::default())?;
        def.node.drain(..first_new.min(def.node.len()));
        let known = self.state.lock().clone();
        let known = match known {
            None => {
                let request = proto::CreateSessionRequest {
                    graph_def: Some(def),
                    config: Some(self.config.clone()),
                    target: self.target.clone(),
                };
                let made = self.wait("CreateSession", self.deadline(), self.master.create_session(request))?;
                ServerSession { handle: made.session_handle, version: made.graph_version }
            }
            Some(known) => {
                let request = proto::ExtendSessionRequest {
                    session_handle: known.handle.clone(),
                    graph_def: Some(def),
                    current_graph_version: known.version,
                };
                let extended = self.wait("ExtendSession", CALL_DEADLINE, self.master.extend_session(request))?;
                ServerSession { version: extended.new_graph_version, ..known }
            }
        };
        *self.state.lock() = Some(known);
        Ok(())
    }

    fn run(&self, run: &RemoteRun<'_>) -> Result<(Vec<Tensor>, RunMetadata)> {
        let request = self.run_request(run, "")?;
        let response = self.runtime.block_on(self.run_step(request, run))?;
        let trace = response.metadata.and_then(|metadata| metadata.step_stats).map(trace).unwrap_or_default();
        Ok((in_order(response.tensor, run.fetches)?, RunMetadata { trace, step_id: 0 }))
    }

    fn begin_partial(&self, feeds: &[String], fetches: &[String], targets: &[String]) -> Result<String> {
        let request = proto::PartialRunSetupRequest {
            session_handle: self.handle()?,
            feed: feeds.to_vec(),
            fetch: fetches.to_vec(),
            target: targets.to_vec(),
            request_id: random_id(),
        };
        let response = self.wait("PartialRunSetup", CALL_DEADLINE, self.master.partial_run_setup(request))?;
        Ok(response.partial_run_handle)
    }

    fn run_partial(&self, handle: &str, run: &RemoteRun<'_>) -> Result<Vec<Tensor>> {
        let request = self.run_request(run, handle)?;
        let response = self.runtime.block_on(self.run_step(request, run))?;
        in_order(response.tensor, run.fetches)
    }

    fn list_devices(&self) -> Result<Vec<DeviceAttributes>> {
        let request = proto::ListDevicesRequest { session_handle: self.handle()? };
        let response = self.wait("ListDevices", CALL_DEADLINE, self.master.list_devices(request))?;
        response.local_device.into_iter().chain(response.remote_device).map(attributes).collect()
    }

    fn reset(&self, containers: &[String]) -> Result<()> {
        let request = proto::ResetRequest { container: containers.to_vec(), device_filters: Vec::new() };
        self.wait("Reset", CALL_DEADLINE, self.master.reset(request)).map(drop)
    }

    fn close(&self) {
        let Some(known) = self.state.lock().take() else { return };
        let request = proto::CloseSessionRequest { session_handle: known.handle };
        if let Err(error) = self.wait("CloseSession", CLOSE_DEADLINE, self.master.close_session(request)) {
            tracing::debug!("the session on {} could not be closed: {error}", self.target);
        }
    }
}

fn attributes(device: proto::DeviceAttributes) -> Result<DeviceAttributes> {
    Ok(DeviceAttributes {
        name: DeviceName::parse(&device.name)?,
        memory_limit: u64::try_from(device.memory_limit).ok().filter(|&limit| limit > 0),
        incarnation: device.incarnation,
        description: device.physical_device_desc,
    })
}

/// The options of a session that a server can honour.
fn session_options(config: &SessionConfig) -> proto::ConfigProto {
    proto::ConfigProto {
        allow_soft_placement: config.allow_soft_placement,
        log_device_placement: config.log_device_placement,
        device_filters: config.device_filters.clone(),
        isolate_session_state: config.isolate_session_state,
        operation_timeout_in_ms: config.operation_timeout.map_or(0, |timeout| timeout.as_millis() as i64),
        ..proto::ConfigProto::default()
    }
}

/// The server's trace; times count from its first node.
fn trace(stats: proto::StepStats) -> StepTrace {
    let all = || stats.dev_stats.iter().flat_map(|device| device.node_stats.iter().map(move |node| (device, node)));
    let start = all().map(|(_, node)| node.all_start_micros).min().unwrap_or(0);
    let micros = |micros: i64| Duration::from_micros(u64::try_from(micros).unwrap_or(0));
    let row = |(device, node): (&proto::DeviceStepStats, &proto::NodeExecStats)| NodeTrace {
        node: node.node_name.as_str().into(),
        op: op_of_label(&node.timeline_label),
        device: device.device.as_str().into(),
        thread: device.thread_names.get(&node.thread_id).cloned().unwrap_or_else(|| node.thread_id.to_string()),
        start: micros(node.all_start_micros.saturating_sub(start)),
        duration: micros(node.all_end_rel_micros),
        n_bytes: node
            .output
            .iter()
            .filter_map(|output| output.tensor_description.as_ref()?.allocation_description.as_ref())
            .map(|allocation| usize::try_from(allocation.requested_bytes).unwrap_or(0))
            .fold(0, usize::saturating_add),
    };
    let mut nodes: Vec<NodeTrace> = all().take(MAX_TRACED).map(row).collect();
    nodes.sort_by_key(|node| node.start + node.duration);
    StepTrace { nodes }
}

/// The op in a label such as `y = MatMul(a, b)`.
fn op_of_label(label: &str) -> &'static str {
    let op = label.split_once(" = ").map_or(label, |(_, call)| call);
    let op = op.split_once('(').map_or(op, |(op, _)| op);
    kolo_ops::find_op(op).map_or("", |op| op.def.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server may send any numbers; these are the extremes.
    #[test]
    fn a_trace_of_absurd_numbers_is_read() {
        let allocation = proto::AllocationDescription { requested_bytes: i64::MAX, ..Default::default() };
        let description = proto::TensorDescription { allocation_description: Some(allocation), ..Default::default() };
        let output = proto::NodeOutput { slot: 0, tensor_description: Some(description) };
        let node = |all_start_micros| proto::NodeExecStats {
            all_start_micros,
            all_end_rel_micros: i64::MAX,
            output: vec![output.clone(); 3],
            ..Default::default()
        };
        let node_stats = vec![node(i64::MIN), node(i64::MAX)];
        let dev_stats = vec![proto::DeviceStepStats { node_stats, ..Default::default() }];
        assert_eq!(trace(proto::StepStats { dev_stats }).nodes.len(), 2);
    }
}
