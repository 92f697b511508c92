//! One step: every task runs its part, tensors are transferred between tasks, fetches are returned.

use std::collections::HashMap;
use std::task::Poll;
use std::time::Duration;

use kolo_core::{Code, Error, Result};
use tokio::time::Instant;

use super::plan::{RegisteredPart, StepPlan};
use super::session::{Session, from_task};
use crate::doctor::diagnose;
use crate::task::overdue::ask;
use crate::task::peers::TaskName;
use crate::task::random::{random_id, random_step_id};
use crate::task::services::Answer;
use crate::wire::proto;
use crate::wire::tensor_wire::WireTensor;

/// After a derived error, how long the step waits for the error that caused it.
const CAUSE_DEADLINE: Duration = Duration::from_secs(2);

/// The timeout of the request to clean up after a step; a task that hangs longer is detected elsewhere.
const CLEAN_UP_DEADLINE: Duration = Duration::from_secs(60);

/// The inputs and outputs of a step.
#[derive(Default)]
pub(super) struct StepIo {
    /// The values of the feeds, by transfer key.
    pub send: Vec<proto::NamedTensorProto>,
    /// The transfer keys of the fetches.
    pub recv: Vec<String>,
    pub exec_opts: proto::ExecutorOpts,
    /// `Some(is_last)` for one call of a partial run.
    pub partial: Option<bool>,
}

/// The results of a step.
#[derive(Default)]
pub(super) struct StepOutput {
    /// By key.
    pub values: HashMap<String, WireTensor>,
    pub step_stats: Option<proto::StepStats>,
}

impl Session {
    /// Runs one step of a plan to its end, and then tells all tasks that it is over.
    pub async fn run_step(&self, plan: &StepPlan, io: StepIo, timeout: Option<Duration>) -> Result<StepOutput> {
        let step = CleanUp { session: self, plan, step_id: random_step_id() };
        let _listed = self.peers.mastered.begin(step.step_id, plan.parts.iter().map(|part| part.task.clone()));
        let run = self.run_parts(plan, step.step_id, io);
        let timed = async {
            let Some(timeout) = timeout else { return run.await };
            let mut run = std::pin::pin!(run);
            if let Ok(ended) = tokio::time::timeout(timeout, &mut run).await {
                return ended;
            }
            // The step is still pending while its tasks are asked what it waits for.
            let why = self.ask_why(plan, step.step_id).await;
            Err(Error::deadline_exceeded(format!("the step did not end in {timeout:?}: {why}")))
        };
        tokio::select! {
            biased;
            result = timed => result,
            reason = self.closed() => Err(reason),
        }
    }

    /// Describes what a step waits for, in a sentence.
    async fn ask_why(&self, plan: &StepPlan, step_id: u64) -> String {
        let reports = ask(&self.peers, plan.parts.iter().map(|part| part.task.clone()), step_id).await;
        let findings = diagnose(&reports, Duration::ZERO);
        findings.first().map_or_else(|| "its tasks have ended it".to_owned(), |finding| finding.text.clone())
    }

    /// Has every task run its part; the first error that is a root cause wins.
    ///
    /// The future of the step polls all calls itself, so that no call needs another thread to be sent or to complete.
    pub async fn run_parts(&self, plan: &StepPlan, step_id: u64, mut io: StepIo) -> Result<StepOutput> {
        let mut calls: Vec<Call> = Vec::with_capacity(plan.parts.len());
        let mut own = None;
        for part in &plan.parts {
            let mut request = proto::RunGraphRequest {
                graph_handle: part.graph_handle.clone(),
                step_id: step_id as i64,
                exec_opts: Some(io.exec_opts.clone()),
                is_partial: io.partial.is_some(),
                is_last_partial_run: io.partial == Some(true),
                session_handle: self.handle.clone(),
                store_errors_in_response_body: true,
                create_worker_session_called: true,
                request_id: random_id(),
                ..proto::RunGraphRequest::default()
            };
            if part.is_own {
                request.send = std::mem::take(&mut io.send);
                request.recv_key = std::mem::take(&mut io.recv);
                // The prefetch requests of this part go out together with the requests to run the other parts.
                part.worker.prepare(&request);
                own = Some(run_part(part, request));
            } else {
                calls.push(run_part(part, request));
            }
        }
        // The own part comes last: it may run for a while before it first waits.
        calls.extend(own);
        let mut output = StepOutput::default();
        let mut echo: Option<Error> = None;
        let mut give_up_at: Option<Instant> = None;
        while !calls.is_empty() {
            let answer = match give_up_at {
                None => next_answer(&mut calls).await,
                Some(deadline) => match tokio::time::timeout_at(deadline, next_answer(&mut calls)).await {
                    Ok(answer) => answer,
                    Err(_) => break,
                },
            };
            match answer {
                Ok(response) => output.add(response),
                Err(error) if is_cause(&error) => return Err(error),
                Err(error) => {
                    give_up_at.get_or_insert_with(|| Instant::now() + CAUSE_DEADLINE);
                    echo.get_or_insert(error);
                }
            }
        }
        match echo {
            Some(error) => Err(error),
            None => Ok(output),
        }
    }
}

/// Whether the error is a root cause: neither derived from another one nor a cancellation.
fn is_cause(error: &Error) -> bool {
    !error.is_derived() && error.code() != Code::Cancelled
}

/// A pending call to run a part.
struct Call {
    answer: Answer<proto::RunGraphResponse>,
    task: TaskName,
    is_own: bool,
}

fn run_part(part: &RegisteredPart, request: proto::RunGraphRequest) -> Call {
    Call { answer: part.worker.run_graph(request), task: part.task.clone(), is_own: part.is_own }
}

/// Waits for the first response, and removes its call from the list.
async fn next_answer(calls: &mut Vec<Call>) -> Result<proto::RunGraphResponse> {
    let (at, answer) = std::future::poll_fn(|cx| {
        for (at, call) in calls.iter_mut().enumerate() {
            if let Poll::Ready(answer) = call.answer.as_mut().poll(cx) {
                return Poll::Ready((at, answer));
            }
        }
        Poll::Pending
    })
    .await;
    let call = calls.remove(at);
    answer.map_err(|error| from_task(error, &call.task, call.is_own))
}

impl StepOutput {
    fn add(&mut self, response: proto::RunGraphResponse) {
        for named in response.recv {
            if let Some(tensor) = named.tensor {
                self.values.insert(named.name, tensor);
            }
        }
        if let Some(stats) = response.step_stats {
            self.step_stats.get_or_insert_default().dev_stats.extend(stats.dev_stats);
        }
    }
}

/// Tells the tasks of a step that it is over, however it ended, without waiting for them.
struct CleanUp<'a> {
    session: &'a Session,
    plan: &'a StepPlan,
    step_id: u64,
}

impl Drop for CleanUp<'_> {
    fn drop(&mut self) {
        clean_up(self.session, self.plan, self.step_id);
    }
}

/// See [`CleanUp`].
pub(super) fn clean_up(session: &Session, plan: &StepPlan, step_id: u64) {
    for part in plan.parts.iter().filter(|part| !part.worker.end_step(step_id)) {
        let call = part.worker.cleanup_graph(proto::CleanupGraphRequest { step_id: step_id as i64 });
        let task = part.task.clone();
        session.peers.runtime.spawn(async move {
            match tokio::time::timeout(CLEAN_UP_DEADLINE, call).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!("{task} could not clean up after step {step_id}: {error}"),
                Err(_) => tracing::debug!("{task} did not clean up after step {step_id} in {CLEAN_UP_DEADLINE:?}"),
            }
        });
    }
}
