//! What a task does for others, as two traits.
//!
//! Whoever calls them need not know whether the task is of this process or, through a
//! connection, of another one. Dropping an [`Answer`] cancels the call, wherever it runs. A method that is not written
//! answers `UNIMPLEMENTED`, which TensorFlow's masters and clients expect of rare ones.

use std::future::Future;
use std::pin::Pin;

use kolo_core::{Error, Result};

use crate::limits::MessageLimits;
use crate::proto::*;

/// A response that is yet to come. Dropping it cancels the call.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// How large a method's messages may be.
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

/// How hard a call tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempts {
    /// It waits until the task can be reached, and is repeated as often as time allows.
    Probe,
    /// It waits until the task can be reached, and is sent once.
    Open,
    /// It may be repeated: if its connection is lost, it is sent again over a new one.
    Repeat,
    /// It may not be repeated.
    Once,
}

/// Calls a macro with all methods of `WorkerService`: name in Rust, name on the wire, request, response, size, attempts.
macro_rules! worker_methods {
    ($use:ident $($more:ident)?) => {
        $use! {
            $($more)? WorkerService "tensorflow.WorkerService";
            /// Asks for the task's devices; the first call to any task.
            get_status GetStatus GetStatusRequest GetStatusResponse Other Probe;
            /// Announces a session.
            create_worker_session CreateWorkerSession CreateWorkerSessionRequest CreateWorkerSessionResponse Other Repeat;
            /// Ends a session.
            delete_worker_session DeleteWorkerSession DeleteWorkerSessionRequest DeleteWorkerSessionResponse Other Repeat;
            /// Hands over a part of a graph.
            register_graph RegisterGraph RegisterGraphRequest RegisterGraphResponse Graphs Once;
            /// Forgets a part of a graph.
            deregister_graph DeregisterGraph DeregisterGraphRequest DeregisterGraphResponse Other Once;
            /// Runs a part of a step.
            run_graph RunGraph RunGraphRequest RunGraphResponse Tensors Once;
            /// Ends a step.
            cleanup_graph CleanupGraph CleanupGraphRequest CleanupGraphResponse Other Repeat;
            /// Clears containers.
            cleanup_all CleanupAll CleanupAllRequest CleanupAllResponse Other Repeat;
            /// Waits for a tensor.
            recv_tensor RecvTensor RecvTensorRequest RecvTensorResponse Tensors Once;
            /// Waits for a piece of a collective.
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
        }
    };
}

/// The same for `MasterService`.
macro_rules! master_methods {
    ($use:ident $($more:ident)?) => {
        $use! {
            $($more)? MasterService "tensorflow.MasterService";
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
            /// Ends all sessions and clears containers.
            reset Reset ResetRequest ResetResponse Other Open;
            /// Describes a step that is to run often.
            make_callable MakeCallable MakeCallableRequest MakeCallableResponse Other Once;
            /// Runs a step that was described before.
            run_callable RunCallable RunCallableRequest RunCallableResponse Tensors Once;
            /// Forgets a step that was described before.
            release_callable ReleaseCallable ReleaseCallableRequest ReleaseCallableResponse Other Repeat;
        }
    };
}

pub(crate) use {master_methods, worker_methods};

macro_rules! service {
    ($trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $attempts:ident;
    )*) => {
        #[doc = concat!("`", $service, "`.")]
        pub trait $trait: Send + Sync + 'static {
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
