//! One step: every task runs its part, tensors go from task to task, fetches come back.

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

/// After an error that only echoes another one, how long the step waits for the other one.
const CAUSE_DEADLINE: Duration = Duration::from_secs(2);

/// How long a task is asked to clean up after a step; a task that hangs longer has been noticed otherwise.
const CLEAN_UP_DEADLINE: Duration = Duration::from_secs(60);

/// What a step takes and gives.
#[derive(Default)]
pub(super) struct StepIo {
    /// Values by the keys of their transfers.
    pub send: Vec<proto::NamedTensorProto>,
    /// The keys of what is wanted.
    pub recv: Vec<String>,
    pub exec_opts: proto::ExecutorOpts,
    /// `Some(is_last)` for one call of a partial run.
    pub partial: Option<bool>,
}

/// What a step gave.
#[derive(Default)]
pub(super) struct StepOutput {
    /// By key.
    pub values: HashMap<String, WireTensor>,
    pub step_stats: Option<proto::StepStats>,
}

impl Session {
    /// Runs one step of a plan to its end, and tells all tasks that it is over.
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
            // The step still waits while its tasks are asked what for.
            let why = self.ask_why(plan, step.step_id).await;
            Err(Error::deadline_exceeded(format!("the step did not end in {timeout:?}: {why}")))
        };
        tokio::select! {
            biased;
            result = timed => result,
            reason = self.closed() => Err(reason),
        }
    }

    /// What a step waits for, in a sentence.
    async fn ask_why(&self, plan: &StepPlan, step_id: u64) -> String {
        let reports = ask(&self.peers, plan.parts.iter().map(|part| part.task.clone()), step_id).await;
        let findings = diagnose(&reports, Duration::ZERO);
        findings.first().map_or_else(|| "its tasks have ended it".to_owned(), |finding| finding.text.clone())
    }

    /// Has every task run its part; the first error that is nobody's echo wins.
    ///
    /// All calls are looked at by whoever waits for the step, so that none needs another thread to be sent or to end.
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
                // What this part needs of others is asked for in the same breath as they are told to run.
                part.worker.prepare(&request);
                own = Some(run_part(part, request));
            } else {
                calls.push(run_part(part, request));
            }
        }
        // The own part last: it may run for a while before it waits for anything.
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

/// Not the echo of another error.
fn is_cause(error: &Error) -> bool {
    !error.is_derived() && error.code() != Code::Cancelled
}

/// A part that runs.
struct Call {
    answer: Answer<proto::RunGraphResponse>,
    task: TaskName,
    is_own: bool,
}

fn run_part(part: &RegisteredPart, request: proto::RunGraphRequest) -> Call {
    Call { answer: part.worker.run_graph(request), task: part.task.clone(), is_own: part.is_own }
}

/// The first answer that is there; its call is taken from the list.
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

/// Tells the tasks of a step that it is over, however it ended, without making anybody wait.
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
