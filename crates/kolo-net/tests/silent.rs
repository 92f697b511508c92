//! A task that takes every call and answers all but one kind: whoever calls comes back within a deadline.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result, Tensor};
use kolo_net::grpc::{ServerOptions, serve};
use kolo_net::proto::*;
use kolo_net::services::{Answer, MasterService, WorkerService};
use kolo_net::tensor_wire::WireTensor;
use kolo_net::{ClusterSpec, Connect as _, Server, ServerConfig};
use kolo_runtime::{Session, SessionConfig};
use tokio::runtime::Runtime;

/// Far more than all deadlines below together; less than any of those that nobody asked for.
const PATIENCE: Duration = Duration::from_secs(50);

/// A task that answers as if it did its work.
struct Fake {
    silent: &'static str,
}

impl Fake {
    fn answer<T: Send + 'static>(&self, method: &str, answer: T) -> Answer<T> {
        let is_silent = self.silent == method;
        Box::pin(async move {
            if is_silent {
                std::future::pending::<()>().await;
            }
            Ok(answer)
        })
    }
}

impl WorkerService for Fake {
    fn get_status(&self, _: GetStatusRequest) -> Answer<GetStatusResponse> {
        let device = DeviceAttributes {
            name: "/job:ps/replica:0/task:0/device:CPU:0".into(),
            device_type: "CPU".into(),
            incarnation: 77,
            ..DeviceAttributes::default()
        };
        self.answer("GetStatus", GetStatusResponse { device_attributes: vec![device] })
    }

    fn create_worker_session(&self, _: CreateWorkerSessionRequest) -> Answer<CreateWorkerSessionResponse> {
        self.answer("CreateWorkerSession", CreateWorkerSessionResponse {})
    }

    fn delete_worker_session(&self, _: DeleteWorkerSessionRequest) -> Answer<DeleteWorkerSessionResponse> {
        self.answer("DeleteWorkerSession", DeleteWorkerSessionResponse {})
    }

    fn register_graph(&self, _: RegisterGraphRequest) -> Answer<RegisterGraphResponse> {
        self.answer("RegisterGraph", RegisterGraphResponse { graph_handle: "g".into() })
    }

    fn run_graph(&self, _: RunGraphRequest) -> Answer<RunGraphResponse> {
        self.answer("RunGraph", RunGraphResponse::default())
    }

    fn recv_tensor(&self, _: RecvTensorRequest) -> Answer<RecvTensorResponse> {
        let tensor = Some(WireTensor::new(Tensor::scalar(3.0f32)).unwrap());
        self.answer("RecvTensor", RecvTensorResponse { tensor, ..RecvTensorResponse::default() })
    }

    fn cleanup_graph(&self, _: CleanupGraphRequest) -> Answer<CleanupGraphResponse> {
        self.answer("CleanupGraph", CleanupGraphResponse {})
    }

    fn cleanup_all(&self, _: CleanupAllRequest) -> Answer<CleanupAllResponse> {
        self.answer("CleanupAll", CleanupAllResponse {})
    }

    fn report(&self, _: KoloReportRequest) -> Answer<KoloReportResponse> {
        self.answer("KoloReport", KoloReportResponse::default())
    }
}

struct NoMaster;

impl MasterService for NoMaster {}

/// A cluster whose `ps:0` is silent to one method, and the worker that is asked.
struct Cluster {
    worker: Server,
    runtime: Option<Runtime>,
}

impl Cluster {
    fn new(silent: &'static str) -> Cluster {
        let listeners: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<String> = listeners.iter().map(|l| l.local_addr().unwrap().to_string()).collect();
        let spec = ClusterSpec::parse(&format!("ps={};worker={}", addresses[0], addresses[1])).unwrap();
        let mut listeners = listeners.into_iter();
        let runtime = Runtime::new().unwrap();
        let listener = listeners.next().unwrap();
        listener.set_nonblocking(true).unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let fake = Arc::new(Fake { silent });
            serve(listener, fake, Arc::new(NoMaster), ServerOptions::default(), std::future::pending()).await;
        });
        let config = ServerConfig { ready_deadline: Duration::from_secs(1), ..ServerConfig::default() };
        let worker = Server::on(listeners.next().unwrap(), &spec, "worker", 0, config).unwrap();
        Cluster { worker, runtime: Some(runtime) }
    }

    /// Everything that a client does, with a limit of a second for each call.
    fn use_it(&self) -> Result<()> {
        let g = kolo_ops::graph();
        let x = g.device("/job:ps/task:0", || g.constant(3.0f32));
        let y = g.device("/job:worker/task:0", || x + 1.0);
        let config = SessionConfig { operation_timeout: Some(Duration::from_secs(1)), ..SessionConfig::default() };
        let session = Session::connect_with(&self.worker.target(), &g, config)?;
        let value = session.fetch(y)?.scalar_value::<f32>()?;
        if value != 4.0 {
            return Err(Error::internal(format!("{value} is not 4")));
        }
        session.reset(&["c".to_owned()]);
        session.close();
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[test]
fn silence_on_any_call_ends_at_a_deadline() {
    // The first is silent to nothing.
    let methods = [
        ("", None),
        ("GetStatus", Some("/job:ps/replica:0/task:0")),
        ("CreateWorkerSession", Some("announcing the session")),
        ("RegisterGraph", Some("handing the graph to its tasks")),
        ("RunGraph", Some("did not end")),
        ("RecvTensor", Some("did not end")),
        ("CleanupGraph", None),
        ("CleanupAll", None),
        ("DeleteWorkerSession", None),
        ("KoloReport", None),
    ];
    let cases: Vec<_> = methods
        .into_iter()
        .map(|(method, wanted)| {
            let case = move || {
                let began = Instant::now();
                let cluster = Cluster::new(method);
                let outcome = cluster.use_it();
                drop(cluster);
                assert!(began.elapsed() < PATIENCE, "silent to {method}: {outcome:?} after {:?}", began.elapsed());
                match (outcome, wanted) {
                    (Ok(()), None) => {}
                    (Err(error), Some(wanted)) => {
                        assert_eq!(error.code(), Code::DeadlineExceeded, "silent to {method}: {error}");
                        assert!(error.message().contains(wanted), "silent to {method}: {error}");
                    }
                    (outcome, _) => panic!("silent to {method}: {outcome:?}"),
                }
            };
            std::thread::spawn(case)
        })
        .collect();
    for case in cases {
        case.join().unwrap();
    }
}
