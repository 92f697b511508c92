//! A task of a cluster: its devices, served to clients and to other tasks on one port.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Error, Result};
use kolo_device::DeviceAttributes;
use kolo_ops::io::FileAccess;
use kolo_runtime::{Host, SessionConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::cluster::ClusterSpec;
use crate::connect::announce;
use crate::framed::{Allocate, HELLO, Identity, KoloPeer, serve_connection};
use crate::grpc;
use crate::limits::MessageLimits;
use crate::master::{LocalMaster, Master};
use crate::peers::{Peers, TaskName};
use crate::proto;
use crate::tls::{Security, Token};
use crate::worker::{LocalWorker, Worker};

/// How a server is set up.
#[derive(Clone)]
pub struct ServerConfig {
    /// Its devices and threads.
    pub session: SessionConfig,
    /// What sessions do whose clients say nothing else: soft placement, placement logs, filters, time limits.
    pub defaults: proto::ConfigProto,
    /// How long a new session waits for tasks that are not there yet.
    pub ready_deadline: Duration,
    /// The most sessions at once.
    pub max_sessions: usize,
    /// The largest messages.
    pub limits: MessageLimits,
    /// The files that ops may touch.
    pub files: FileAccess,
    /// Threads that carry messages.
    pub n_io_threads: usize,
    /// Who is let in.
    pub security: Security,
    /// Talk to all tasks by gRPC, as TensorFlow would.
    pub grpc_only: bool,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig {
            session: SessionConfig::default(),
            defaults: proto::ConfigProto::default(),
            ready_deadline: Duration::from_secs(60),
            max_sessions: 10_000,
            limits: MessageLimits::default(),
            files: FileAccess::default(),
            n_io_threads: 2,
            security: Security::default(),
            grpc_only: false,
        }
    }
}

/// A task that serves. Dropping it ends it.
pub struct Server {
    own: TaskName,
    address: SocketAddr,
    worker: Arc<Worker>,
    master: Arc<Master>,
    /// Becomes true when the server should end.
    stop: watch::Sender<bool>,
    /// Becomes true when it has.
    ended: watch::Receiver<bool>,
    runtime: Option<Runtime>,
}

impl Server {
    /// Starts task `task` of job `job`. It listens on the address that the cluster gives for it, and only there; port 0
    /// lets the system choose one.
    pub fn new(cluster: &ClusterSpec, job: &str, task: u32, config: ServerConfig) -> Result<Server> {
        let address = cluster.address(job, task)?;
        let listener = std::net::TcpListener::bind(address).map_err(|error| {
            let own = TaskName::new(job, task);
            Error::unavailable(format!("{own} cannot listen on {address}: {error}; is another server running there?"))
        })?;
        Server::on(listener, cluster, job, task, config)
    }

    /// The same on a socket that listens already, for programs that let the system choose ports before they write the
    /// cluster down.
    pub fn on(
        listener: std::net::TcpListener,
        cluster: &ClusterSpec,
        job: &str,
        task: u32,
        config: ServerConfig,
    ) -> Result<Server> {
        let own = TaskName::new(job, task);
        cluster.address(job, task)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.n_io_threads.max(1))
            .max_blocking_threads(4)
            .thread_keep_alive(Duration::from_secs(2))
            .thread_name("kolo-net")
            .enable_all()
            .build()
            .map_err(|error| {
                Error::resource_exhausted(format!("the server's threads could not be started: {error}"))
            })?;
        let registered = || {
            let _inside = runtime.enter();
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        };
        let listener = registered().map_err(|error| Error::internal(format!("{own} cannot listen: {error}")))?;
        let address = listener.local_addr().map_err(|error| Error::internal(error.to_string()))?;
        config.security.check_bind(address)?;

        let host = Host::of_task(job, task, session_config(&config.session))?;
        host.limit_file_access(&config.files);
        let identity = Identity {
            own: own.clone(),
            cluster: cluster.clone(),
            token: config.security.token.as_ref().map(Token::text),
        };
        let allocate = allocate(&host);
        let connect = {
            let (identity, allocate, config) = (identity.clone(), allocate.clone(), config.clone());
            let handle = runtime.handle().clone();
            let links = grpc::LinkOptions {
                limits: config.limits,
                tls: config.security.client_tls()?,
                token: config.security.token.clone(),
                wait_for_peer: config.ready_deadline,
                memory: Some(grpc::ReceiveMemory::of(host.first_device())),
                ..grpc::LinkOptions::default()
            };
            Box::new(move |task: &TaskName, address: &str| -> Arc<dyn crate::services::WorkerService> {
                let grpc: Arc<dyn crate::services::WorkerService> =
                    Arc::new(grpc::GrpcPeer::new(task.to_string(), address, links.clone(), handle.clone()));
                match config.grpc_only || links.tls.is_some() {
                    true => grpc,
                    false => {
                        let (identity, allocate) = (identity.clone(), allocate.clone());
                        let address = address.to_owned();
                        Arc::new(KoloPeer::new(task.clone(), address, identity, config.limits, allocate, grpc))
                    }
                }
            })
        };
        let peers = Peers::new(own.clone(), cluster.clone(), runtime.handle().clone(), connect);
        let worker = Worker::new(host, peers.clone());
        let master = Master::new(peers, config.defaults.clone(), config.ready_deadline, config.max_sessions);

        announce(&address.to_string(), &master, runtime.handle());
        let options = grpc::ServerOptions {
            limits: config.limits,
            tls: config.security.server_tls()?,
            token: config.security.token.clone(),
            ..grpc::ServerOptions::default()
        };
        let (stop, stopped) = watch::channel(false);
        let (ended_sender, ended) = watch::channel(false);
        let services =
            Services { worker: worker.clone(), master: master.clone(), identity, limits: config.limits, allocate };
        runtime.spawn(async move {
            services.serve(listener, options, stopped).await;
            ended_sender.send_replace(true);
        });
        Ok(Server { own, address, worker, master, stop, ended, runtime: Some(runtime) })
    }

    /// What a client's session connects to.
    pub fn target(&self) -> String {
        format!("grpc://{}", self.address)
    }

    /// `/job:ps/replica:0/task:0`
    pub fn task(&self) -> &TaskName {
        &self.own
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its devices.
    pub fn devices(&self) -> Vec<DeviceAttributes> {
        self.worker.devices()
    }

    /// Waits until the server has ended.
    pub fn join(&self) -> Result<()> {
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let mut ended = self.ended.clone();
        runtime.block_on(async move {
            // The sender is dropped only by the end of the server.
            let _ = ended.wait_for(|ended| *ended).await;
        });
        Ok(())
    }

    /// Ends the server: sessions are closed, and no more calls are taken. [`Server::join`] then returns. May be called from
    /// any thread.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let Some(runtime) = self.runtime.take() else { return };
        // Those who wait in this process should not wait for a deadline.
        let close = async { tokio::time::timeout(Duration::from_secs(5), self.master.close_all()).await };
        let _ = runtime.block_on(close);
        runtime.shutdown_timeout(Duration::from_secs(1));
    }
}

/// A server runs many steps at once, so by default nodes may use as many threads as there are cores.
fn session_config(config: &SessionConfig) -> SessionConfig {
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let inter_op_parallelism_threads = match config.inter_op_parallelism_threads {
        0 => n_cores,
        threads => threads,
    };
    SessionConfig { inter_op_parallelism_threads, ..config.clone() }
}

/// Tensors that arrive go into the memory of the first device, which keeps and reuses it.
fn allocate(host: &Host) -> Allocate {
    let (device, tag) = (host.first_device(), "received".into());
    Arc::new(move |dtype, shape| device.allocate_tensor(dtype, shape, &tag))
}

struct Services {
    worker: Arc<Worker>,
    master: Arc<Master>,
    identity: Identity,
    limits: MessageLimits,
    allocate: Allocate,
}

impl Services {
    /// Takes connections until told to stop. Which protocol a connection speaks shows in its first bytes.
    async fn serve(self, listener: TcpListener, options: grpc::ServerOptions, mut stopped: watch::Receiver<bool>) {
        let services = Arc::new(self);
        let worker = Arc::new(LocalWorker(services.worker.clone()));
        let master = Arc::new(LocalMaster(services.master.clone()));
        let framed = services.clone();
        // Whoever wants TLS wants it for everything.
        let other = options.tls.is_none().then(|| grpc::OtherProtocol {
            hello: HELLO,
            serve: Box::new(move |stream| Box::pin(framed.clone().serve_framed(stream))),
        });
        let ending = services.clone();
        let shutdown = async move {
            // The sender lives as long as the server.
            let _ = stopped.wait_for(|stopped| *stopped).await;
            ending.master.close_all().await;
        };
        grpc::serve_with(listener, worker, master, options, other, shutdown).await;
    }

    async fn serve_framed(self: Arc<Self>, stream: TcpStream) {
        let worker = Arc::new(LocalWorker(self.worker.clone()));
        let served = serve_connection(stream, worker, &self.identity, self.limits, self.allocate.clone()).await;
        if let Err(error) = served {
            tracing::warn!("a connection ended: {error}");
        }
    }
}
