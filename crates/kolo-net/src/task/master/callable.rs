//! Callables: steps whose feeds, fetches and options are given once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kolo_core::{Error, Result};

use super::plan::{StepPlan, Wanted};
use super::run::StepIo;
use super::session::Session;
use crate::wire::proto;
use crate::wire::tensor_wire::WireTensor;

pub(super) struct Callable {
    plan: Arc<StepPlan>,
    timeout: Option<Duration>,
    exec_opts: proto::ExecutorOpts,
}

impl Session {
    pub async fn make_callable(self: &Arc<Self>, options: proto::CallableOptions) -> Result<i64> {
        self.check_open()?;
        if !options.feed_devices.is_empty() || !options.fetch_devices.is_empty() {
            return Err(Error::unimplemented("feed_devices and fetch_devices mean nothing to a remote session"));
        }
        let run_options = options.run_options.unwrap_or_default();
        let connections = options.tensor_connection.into_iter().map(|join| (join.from_tensor, join.to_tensor));
        let wanted = Wanted {
            feeds: options.feed,
            fetches: options.fetch,
            targets: options.target,
            connections: connections.collect(),
        };
        let callable = Callable {
            plan: self.plan(wanted).await?,
            timeout: self.timeout(&run_options),
            exec_opts: super::exec_opts(&run_options),
        };
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed) as i64;
        self.callables.lock().insert(handle, Arc::new(callable));
        Ok(handle)
    }

    pub async fn run_callable(
        self: &Arc<Self>,
        request: proto::RunCallableRequest,
    ) -> Result<proto::RunCallableResponse> {
        self.check_open()?;
        let callable = self.callables.lock().get(&request.handle).cloned().ok_or_else(|| {
            Error::invalid_argument(format!("Attempted to run callable after handle was released: {}", request.handle))
        })?;
        let plan = &*callable.plan;
        if request.feed.len() != plan.feed_keys.len() {
            return Err(Error::invalid_argument(format!(
                "Expected {} feeds, but got {}",
                plan.feed_keys.len(),
                request.feed.len()
            )));
        }
        let send = |(key, tensor): (&Option<String>, WireTensor)| {
            key.as_ref().map(|key| proto::NamedTensorProto { name: key.clone(), tensor: Some(tensor) })
        };
        let io = StepIo {
            send: plan.feed_keys.iter().zip(request.feed).filter_map(send).collect(),
            recv: plan.unique_fetch_keys(),
            exec_opts: callable.exec_opts.clone(),
            partial: None,
        };
        let output = self.run_step(plan, io, callable.timeout).await?;
        let value = |key: &String| {
            output.values.get(key).cloned().ok_or_else(|| Error::internal(format!("no task sent {key}")))
        };
        let fetch = plan.fetch_keys.iter().map(value).collect::<Result<_>>()?;
        let metadata = proto::RunMetadata { step_stats: output.step_stats, ..proto::RunMetadata::default() };
        Ok(proto::RunCallableResponse { fetch, metadata: Some(metadata) })
    }
}
