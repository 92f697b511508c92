//! The services of a task, as two traits.
//!
//! Callers need not know whether the task is in this process or behind a connection. Dropping an [`Answer`] cancels the
//! call, wherever it runs. A method without an implementation returns `UNIMPLEMENTED`, which TensorFlow's masters and
//! clients expect of rare ones.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use kolo_core::{Error, Result};
use kolo_ops::{Received, RendezvousKey};

use crate::task::peers::TaskName;
use crate::wire::limits::MessageLimits;
use crate::wire::proto::*;

/// A pending response. Dropping it cancels the call.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// A handler whose panic fails only its own call, with an error for the caller.
pub(crate) struct Unwound<T>(pub Answer<T>);

impl<T> Future for Unwound<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        // Shared state is behind locks that a panic does not poison.
        let poll = AssertUnwindSafe(|| self.0.as_mut().poll(cx));
        std::panic::catch_unwind(poll)
            .unwrap_or_else(|_| Poll::Ready(Err(Error::internal("internal error of the server; see its log"))))
    }
}

/// Cancels the operation that returned it when it is dropped.
pub type Guard = Box<dyn Send>;

/// Called once for each of several tensors, with its index, on any thread.
pub type Each = Arc<dyn Fn(usize, Result<Received>) + Send + Sync>;

/// Delivers tensors that another task has requested.
#[derive(Clone)]
pub struct Delivery {
    /// Takes each of them, and may buffer small ones.
    pub each: Each,
    /// Flushes the buffered ones.
    pub flush: Arc<dyn Fn() + Send + Sync>,
}

/// All tensors that one task unconditionally needs from another one in a step.
#[derive(Clone, Debug)]
pub struct Group {
    /// The sending task.
    pub task: TaskName,
    /// The tensors' keys.
    pub keys: Arc<[RendezvousKey]>,
    /// The keys, encoded for Kolo's transport.
    pub wire: Bytes,
}

/// The kind of a method's messages, which decides their size limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// They hold tensors.
    Tensors,
    /// They hold graphs.
    Graphs,
    /// They hold neither.
    Other,
}

impl Size {
    /// The limit for such messages.
    pub fn limit(self, limits: &MessageLimits) -> usize {
        match self {
            Size::Tensors => limits.tensors,
            Size::Graphs => limits.graphs,
            Size::Other => limits.others,
        }
    }
}

/// The retry policy of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempts {
    /// Waits until the task can be reached, and retries until the deadline.
    Probe,
    /// Waits until the task can be reached, and is sent once.
    Open,
    /// Idempotent: if its connection is lost, it is sent again over a new one.
    Repeat,
    /// Never retried.
    Once,
}

/// Calls a macro with all methods of `WorkerService`: name in Rust, name on the wire, request, response, size,
/// attempts.
macro_rules! worker_methods {
    ($use:ident $($more:tt)*) => {
        $use! {
            $($more)* WorkerService "tensorflow.WorkerService";
            /// Asks for the task's devices; the first call to any task.
            get_status GetStatus GetStatusRequest GetStatusResponse Other Probe;
            /// Announces a session.
            create_worker_session CreateWorkerSession CreateWorkerSessionRequest CreateWorkerSessionResponse Other Repeat;
            /// Ends a session.
            delete_worker_session DeleteWorkerSession DeleteWorkerSessionRequest DeleteWorkerSessionResponse Other Repeat;
            /// Registers a part of a graph.
            register_graph RegisterGraph RegisterGraphRequest RegisterGraphResponse Graphs Once;
            /// Deregisters a part of a graph.
            deregister_graph DeregisterGraph DeregisterGraphRequest DeregisterGraphResponse Other Once;
            /// Runs a part of a step.
            run_graph RunGraph RunGraphRequest RunGraphResponse Tensors Once;
            /// Ends a step.
            cleanup_graph CleanupGraph CleanupGraphRequest CleanupGraphResponse Other Repeat;
            /// Clears containers.
            cleanup_all CleanupAll CleanupAllRequest CleanupAllResponse Other Repeat;
            /// Waits for a tensor.
            recv_tensor RecvTensor RecvTensorRequest RecvTensorResponse Tensors Once;
            /// Waits for a buffer of a collective.
            recv_buf RecvBuf RecvBufRequest RecvBufResponse Tensors Once;
            /// Records, or returns, the times of calls.
            logging Logging LoggingRequest LoggingResponse Graphs Once;
            /// Traces the process.
            tracing Tracing TracingRequest TracingResponse Other Once;
            /// Joins a group of devices.
            complete_group CompleteGroup CompleteGroupRequest CompleteGroupResponse Other Once;
            /// Joins a collective.
            complete_instance CompleteInstance CompleteInstanceRequest CompleteInstanceResponse Other Once;
            /// Asks for the numbers of steps with collectives.
            get_step_sequence GetStepSequence GetStepSequenceRequest GetStepSequenceResponse Other Repeat;
            /// Acknowledges a tensor.
            mark_recv_finished MarkRecvFinished MarkRecvFinishedRequest MarkRecvFinishedResponse Other Repeat;
            /// Asks what the task is doing. Kolo's own.
            report KoloReport KoloReportRequest KoloReportResponse Graphs Repeat;
            /// Claims the replicated variables of the calling task. Kolo's own.
            claim KoloClaim KoloClaimRequest KoloClaimResponse Tensors Probe;
            /// Stores new values of the calling task's variables. Kolo's own.
            replicate KoloReplicate KoloReplicateRequest KoloReplicateResponse Tensors Once;
            /// Asks whether a claim is the task's own. Kolo's own.
            confirm KoloConfirm KoloConfirmRequest KoloConfirmResponse Other Repeat;
            /// Waits for what devices of several tasks compute together. Kolo's own.
            meet KoloMeet KoloMeetRequest KoloMeetResponse Tensors Once;
        }
    };
}

/// The same for `MasterService`.
macro_rules! master_methods {
    ($use:ident $($more:tt)*) => {
        $use! {
            $($more)* MasterService "tensorflow.MasterService";
            /// Opens a session.
            create_session CreateSession CreateSessionRequest CreateSessionResponse Graphs Open;
            /// Adds nodes to a session's graph.
            extend_session ExtendSession ExtendSessionRequest ExtendSessionResponse Graphs Once;
            /// Begins a step that is fed and fetched in parts.
            partial_run_setup PartialRunSetup PartialRunSetupRequest PartialRunSetupResponse Other Once;
            /// Runs a step.
            run_step RunStep RunStepRequest RunStepResponse Tensors Once;
            /// Ends a session.
            close_session CloseSession CloseSessionRequest CloseSessionResponse Other Once;
            /// Asks for the devices of a session or of the server.
            list_devices ListDevices ListDevicesRequest ListDevicesResponse Other Open;
            /// Clears containers and ends the sessions that use them.
            reset Reset ResetRequest ResetResponse Other Open;
            /// Makes a callable: a step with fixed feeds and fetches.
            make_callable MakeCallable MakeCallableRequest MakeCallableResponse Other Once;
            /// Runs a callable.
            run_callable RunCallable RunCallableRequest RunCallableResponse Tensors Once;
            /// Releases a callable.
            release_callable ReleaseCallable ReleaseCallableRequest ReleaseCallableResponse Other Repeat;
        }
    };
}

pub(crate) use {master_methods, worker_methods};

macro_rules! service {
    (@more WorkerService) => {
        /// Delivers several tensors of a step, each as soon as it is available. For the task of this process.
        fn recv_tensors(&self, step_id: u64, keys: &Arc<[RendezvousKey]>, delivery: Delivery) -> Option<Guard> {
            let _ = (step_id, keys, delivery);
            None
        }

        /// Requests several tensors of a step at once; the request is sent with the next call or by
        /// [`WorkerService::flush`]. `None` if they must be requested one by one.
        fn ask_tensors(&self, step_id: u64, group: &Group, each: Each) -> Option<Guard> {
            let _ = (step_id, group, each);
            None
        }

        /// Flushes deferred requests.
        fn flush(&self) {}

        /// Whether the two tasks have checked in a greeting that they have the same cluster.
        fn has_greeted(&self) -> bool {
            false
        }

        /// Requests the tensors that a part of a step will need, before the part runs here.
        fn prepare(&self, request: &RunGraphRequest) {
            let _ = request;
        }

        /// Ends a step without a response. False if this is not supported and [`WorkerService::cleanup_graph`] is
        /// needed.
        fn end_step(&self, step_id: u64) -> bool {
            let _ = step_id;
            false
        }
    };
    (@more MasterService) => {};
    ($trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $attempts:ident;
    )*) => {
        #[doc = concat!("`", $service, "`.")]
        pub trait $trait: Send + Sync + 'static {
            /// Why the task cannot be reached, if it is in another process and the last attempt failed.
            fn trouble(&self) -> Option<String> {
                None
            }

            service!(@more $trait);

            $($(#[$doc])*
            fn $method(&self, request: $request) -> Answer<$response> {
                let _ = request;
                not_written(concat!($service, "/", stringify!($name)))
            })*
        }
    };
}

worker_methods!(service);
master_methods!(service);

fn not_written<T: Send + 'static>(method: &'static str) -> Answer<T> {
    Box::pin(std::future::ready(Err(Error::unimplemented(format!("this task does not do {method}")))))
}
