//! Partial runs: a step whose feeds and fetches come in several calls.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kolo_core::{Error, Result};
use parking_lot::Mutex;

use super::plan::{StepPlan, Wanted};
use super::run::{StepIo, clean_up};
use super::session::Session;
use crate::task::random::random_step_id;
use crate::wire::proto;

pub(super) struct PartialStep {
    plan: Arc<StepPlan>,
    step_id: u64,
    /// The feeds that have been received and the fetches that have been returned, by number.
    done: Mutex<(HashSet<usize>, HashSet<usize>)>,
}

impl Session {
    /// Sets up the feeds and fetches of a partial run.
    pub async fn begin_partial(self: &Arc<Self>, wanted: Wanted) -> Result<String> {
        self.check_open()?;
        let plan = self.plan(wanted).await?;
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed).to_string();
        let step = PartialStep { plan, step_id: random_step_id(), done: Mutex::default() };
        self.partial.lock().insert(handle.clone(), Arc::new(step));
        Ok(handle)
    }

    /// One call of a partial run. An error ends the whole run.
    pub async fn run_partial(self: &Arc<Self>, request: proto::RunStepRequest) -> Result<proto::RunStepResponse> {
        self.check_open()?;
        let step = self
            .partial
            .lock()
            .get(&request.partial_run_handle)
            .cloned()
            .ok_or_else(|| Error::invalid_argument("Must run PartialRunSetup before performing partial runs"))?;
        let handle = request.partial_run_handle.clone();
        let result = self.run_part_of_partial(&step, request).await;
        let is_over = match &result {
            Ok((_, is_last)) => *is_last,
            Err(_) => true,
        };
        if is_over {
            self.partial.lock().remove(&handle);
            clean_up(self, &step.plan, step.step_id);
        }
        result.map(|(response, _)| response)
    }

    async fn run_part_of_partial(
        self: &Arc<Self>,
        step: &PartialStep,
        request: proto::RunStepRequest,
    ) -> Result<(proto::RunStepResponse, bool)> {
        let plan = &*step.plan;
        let (io, fetches, is_last) = step.next(request)?;
        let output = tokio::select! {
            biased;
            output = self.run_parts(plan, step.step_id, io) => output?,
            reason = self.closed() => return Err(reason),
        };
        let mut values = output.values;
        let mut tensor = Vec::with_capacity(fetches.len());
        for fetch in fetches {
            let value = values.remove(&plan.fetch_keys[fetch]);
            tensor.push(proto::NamedTensorProto { name: plan.wanted.fetches[fetch].clone(), tensor: value });
        }
        Ok((proto::RunStepResponse { tensor, ..proto::RunStepResponse::default() }, is_last))
    }
}

impl PartialStep {
    /// The feeds and fetches of one call, the numbers of its fetches, and whether it is the last call.
    fn next(&self, request: proto::RunStepRequest) -> Result<(StepIo, Vec<usize>, bool)> {
        let plan = &*self.plan;
        let mut done = self.done.lock();
        let (mut fed, mut fetched) = done.clone();
        let find = |names: &[String], name: &str, what: &str| {
            names.iter().position(|known| known == name).ok_or_else(|| {
                Error::invalid_argument(format!("The {what} {name} was not specified in partial_run_setup."))
            })
        };
        let mut io = StepIo::default();
        for named in request.feed {
            let feed = find(&plan.wanted.feeds, &named.name, "feed")?;
            if !fed.insert(feed) {
                return Err(Error::invalid_argument(format!("The feed {} has already been fed.", named.name)));
            }
            if let Some(key) = &plan.feed_keys[feed] {
                io.send.push(proto::NamedTensorProto { name: key.clone(), tensor: named.tensor });
            }
        }
        let mut fetches = Vec::with_capacity(request.fetch.len());
        for name in &request.fetch {
            let fetch = find(&plan.wanted.fetches, name, "fetch")?;
            if !fetched.insert(fetch) {
                return Err(Error::invalid_argument(format!("The fetch {name} has already been fetched.")));
            }
            if let Some(feed) = plan.fetch_needs[fetch].iter().find(|feed| !fed.contains(*feed)) {
                return Err(Error::invalid_argument(format!(
                    "Fetch {name} can't be computed from the feeds that have been fed so far: {} is missing.",
                    plan.wanted.feeds[*feed]
                )));
            }
            io.recv.push(plan.fetch_keys[fetch].clone());
            fetches.push(fetch);
        }
        let is_last = fed.len() == plan.wanted.feeds.len() && fetched.len() == plan.wanted.fetches.len();
        io.partial = Some(is_last);
        *done = (fed, fetched);
        Ok((io, fetches, is_last))
    }
}
