//! Stubs for the services of other tasks.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kolo_core::Result;
use prost::Message;
use tokio::runtime::Handle;

use super::link::{Link, Method};
use super::options::LinkOptions;
use super::status;
use crate::task::services::{Answer, Attempts, MasterService, Size, WorkerService, master_methods, worker_methods};
use crate::wire::proto::*;

/// A task whose worker service is called over a connection. Clones share the connection.
///
/// A call connects if there is no connection; its answer may be awaited in any runtime, or in none. RunGraph always
/// requests errors in the response's body, where they are not truncated, and returns them as errors.
#[derive(Clone)]
pub struct GrpcPeer(Remote);

/// A task whose master service is called over a connection. Clones share the connection.
///
/// The deadline of a RunStep is its `timeout_in_ms`, that of a CreateSession its `operation_timeout_in_ms`, if set.
/// Errors in responses are returned as errors.
#[derive(Clone)]
pub struct GrpcMaster(Remote);

#[derive(Clone)]
struct Remote {
    link: Arc<Link>,
    runtime: Handle,
    deadline: Option<Duration>,
}

macro_rules! constructors {
    ($type:ident) => {
        impl $type {
            /// The task `name`, such as `/job:ps/replica:0/task:0`, at `address`, which is `host:port`. Connections
            /// live in `runtime`.
            pub fn new(
                name: impl Into<String>,
                address: impl Into<String>,
                options: LinkOptions,
                runtime: Handle,
            ) -> $type {
                let deadline = options.deadline;
                $type(Remote { link: Link::new(name.into(), address.into(), options), runtime, deadline })
            }

            /// The same task over the same connection, with another deadline for calls; `None` is none.
            pub fn with_deadline(&self, deadline: Option<Duration>) -> $type {
                $type(Remote { deadline, ..self.0.clone() })
            }

            /// The task's `host:port`.
            pub fn address(&self) -> &str {
                self.0.link.address()
            }

            /// Since when and why the task cannot be reached, if the last attempt failed.
            pub fn trouble(&self) -> Option<(Instant, String)> {
                self.0.link.trouble()
            }

            /// The connection's options.
            pub fn options(&self) -> &LinkOptions {
                self.0.link.options()
            }
        }
    };
}

constructors!(GrpcPeer);
constructors!(GrpcMaster);

impl Remote {
    fn call<Q, R>(&self, method: Method, request: Q, deadline: Option<Duration>) -> Answer<R>
    where
        Q: Message + 'static,
        R: Message + Default + 'static,
    {
        let link = self.link.clone();
        let deadline = deadline.or(self.deadline);
        let call = async move {
            let response: R = link.call(&method, request, deadline).await?;
            match error_in_body(&response) {
                Some(error) => Err(error),
                None => Ok(response),
            }
        };
        Box::pin(InRuntime { runtime: self.runtime.clone(), future: Box::pin(call) })
    }
}

/// The error in a response's body.
fn error_in_body(response: &dyn std::any::Any) -> Option<kolo_core::Error> {
    if let Some(response) = response.downcast_ref::<RunGraphResponse>() {
        return status::from_body(response.status_code, &response.status_error_message);
    }
    let response = response.downcast_ref::<RunStepResponse>()?;
    status::from_body(response.status_code, &response.status_error_message)
}

macro_rules! remote {
    ($type:ident $trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $attempts:ident;
    )*) => {
        impl $trait for $type {
            fn trouble(&self) -> Option<String> {
                self.0.link.trouble().map(|(_, why)| why)
            }

            $(fn $method(&self, mut request: $request) -> Answer<$response> {
                let method = Method {
                    path: concat!("/", $service, "/", stringify!($name)),
                    size: Size::$size,
                    attempts: Attempts::$attempts,
                };
                let deadline = prepare(&mut request);
                self.0.call(method, request, deadline)
            })*
        }
    };
}

worker_methods!(remote GrpcPeer);
master_methods!(remote GrpcMaster);

/// Requests errors in the response's body, where they are not truncated; returns the request's own deadline.
fn prepare(request: &mut dyn std::any::Any) -> Option<Duration> {
    if let Some(request) = request.downcast_mut::<RunGraphRequest>() {
        request.store_errors_in_response_body = true;
        return None;
    }
    let millis = if let Some(request) = request.downcast_mut::<RunStepRequest>() {
        request.store_errors_in_response_body = true;
        request.options.as_ref()?.timeout_in_ms
    } else {
        request.downcast_ref::<CreateSessionRequest>()?.config.as_ref()?.operation_timeout_in_ms
    };
    u64::try_from(millis).ok().filter(|&millis| millis > 0).map(Duration::from_millis)
}

/// A future that is polled in the context of its runtime, on whichever thread.
struct InRuntime<T> {
    runtime: Handle,
    future: Pin<Box<dyn Future<Output = Result<T>> + Send>>,
}

impl<T> Future for InRuntime<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let this = &mut *self;
        let _runtime = this.runtime.enter();
        this.future.as_mut().poll(cx)
    }
}
