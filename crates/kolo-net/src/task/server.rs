//! A task of a cluster: its devices, served to clients and to other tasks on one port.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use kolo_device::DeviceAttributes;
use kolo_ops::collective::Groups;
use kolo_ops::io::FileAccess;
use kolo_runtime::{Host, SessionConfig};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::client::connect::announce;
use crate::cluster::ClusterSpec;
use crate::durability::journal::{Durability, Journal};
use crate::durability::replica::{Replicator, default_replica};
use crate::task::health;
use crate::task::master::{LocalMaster, Master};
use crate::task::overdue;
use crate::task::peers::{Peers, TaskName};
use crate::task::worker::{Keeper, LocalWorker, Worker};
use crate::transport::complaints::Complaints;
use crate::transport::framed::{self, Allocate, ConnectOptions, HELLO, Identity, KoloPeer, Stream, serve_connection};
use crate::transport::grpc;
use crate::transport::tls::Security;
use crate::wire::limits::MessageLimits;
use crate::wire::proto;

/// The backlog of connections to accept. With the usual 128, a burst of clients loses some to a retry after a second.
const BACKLOG: i32 = 4096;

/// The pause before a task retries to claim its variables.
const CLAIM_PAUSE: Duration = Duration::from_secs(1);

/// The configuration of a server.
#[derive(Clone)]
pub struct ServerConfig {
    /// Its devices and threads. By default the threads are the task's share of the cores: all, if no other worker of
    /// the cluster is on this host.
    pub session: SessionConfig,
    /// Defaults for the options of sessions: soft placement, placement logs, filters, timeouts.
    pub defaults: proto::ConfigProto,
    /// How long a new session waits for tasks that are not up yet.
    pub ready_deadline: Duration,
    /// A step that has run for this long is logged with what it waits for; `None` never.
    pub report_after: Option<Duration>,
    /// The maximum number of concurrent sessions.
    pub max_sessions: usize,
    /// How long a session is kept for a client that has no connection any more; `None` for ever.
    pub session_lease: Option<Duration>,
    /// How long a connection may take to say which protocol it speaks.
    pub first_bytes: Duration,
    /// The size limits of messages.
    pub limits: MessageLimits,
    /// The files that ops may touch; none by default.
    pub files: FileAccess,
    /// What survives the end of the task.
    pub durability: Durability,
    /// Network threads; 0 is one for each core of the task's share, and at most two.
    pub n_io_threads: usize,
    /// How callers are authenticated. By default a server on loopback requires the token of its own user, which Kolo's
    /// clients of that user find by themselves, and one that other machines can reach does not start.
    pub security: Security,
    /// Send large tensors to tasks on the same machine through shared memory.
    pub shared_memory: bool,
    /// Use gRPC for all tasks, as TensorFlow does.
    pub grpc_only: bool,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig {
            session: SessionConfig::default(),
            defaults: proto::ConfigProto::default(),
            ready_deadline: Duration::from_secs(60),
            report_after: Some(Duration::from_secs(10)),
            max_sessions: 10_000,
            session_lease: Some(Duration::from_secs(600)),
            first_bytes: Duration::from_secs(10),
            limits: MessageLimits::default(),
            files: FileAccess::nothing(),
            durability: Durability::default(),
            n_io_threads: 0,
            security: Security::default(),
            shared_memory: true,
            grpc_only: false,
        }
    }
}

/// A running task. Dropping it stops it.
pub struct Server {
    own: TaskName,
    address: SocketAddr,
    token_file: Option<PathBuf>,
    worker: Arc<Worker>,
    master: Arc<Master>,
    /// Becomes true when the server should stop.
    stop: watch::Sender<bool>,
    /// Becomes true when it has stopped.
    ended: watch::Receiver<bool>,
    runtime: Option<Runtime>,
}

impl Server {
    /// Starts task `task` of job `job`. It listens on the address that the cluster gives for it, and only there; port 0
    /// lets the system choose one.
    pub fn new(cluster: &ClusterSpec, job: &str, task: u32, config: ServerConfig) -> Result<Server> {
        let address = cluster.address(job, task)?;
        let own = TaskName::new(job, task);
        let addresses = own_addresses(address, &own, config.ready_deadline)
            .map_err(|error| Error::unavailable(format!("{own} cannot listen on {address}: {error}")))?;
        let listener = std::net::TcpListener::bind(&addresses[..]).map_err(|error| {
            Error::unavailable(format!("{own} cannot listen on {address}: {error}; is another server running there?"))
        })?;
        Server::on(listener, cluster, job, task, config)
    }

    /// The same on a listening socket, for programs that let the system choose ports before they make the cluster spec.
    pub fn on(
        listener: std::net::TcpListener,
        cluster: &ClusterSpec,
        job: &str,
        task: u32,
        config: ServerConfig,
    ) -> Result<Server> {
        let own = TaskName::new(job, task);
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let share = share_of_cores(n_cores, cluster, cluster.address(job, task)?);
        let n_io_threads = if config.n_io_threads == 0 { share.min(2) } else { config.n_io_threads };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(n_io_threads)
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
            socket2::SockRef::from(&listener).listen(BACKLOG)?;
            TcpListener::from_std(listener)
        };
        let listener = registered().map_err(|error| Error::internal(format!("{own} cannot listen: {error}")))?;
        let address = listener.local_addr().map_err(|error| Error::internal(error.to_string()))?;
        config.security.check_bind(address)?;
        let required = config.security.required_token(address)?;

        // Two servers of a process may have one configuration, and each has meetings of its own.
        let session = SessionConfig { groups: Groups::new(), ..session_config(&config.session, n_cores, share) };
        let groups = session.groups.clone();
        let host = Host::of_task(job, task, session)?;
        host.limit_file_access(&config.files);
        let identity = Identity {
            own: own.clone(),
            cluster: Some(cluster.clone()),
            token: required.token.clone(),
            shares_memory: config.shared_memory,
        };
        let allocate = allocate(&host);
        let connect = {
            let (handle, grpc_only) = (runtime.handle().clone(), config.grpc_only);
            let links = grpc::LinkOptions {
                limits: config.limits,
                tls: config.security.client_tls()?,
                credentials: config.security.credentials(),
                wait_for_peer: config.ready_deadline,
                memory: Some(grpc::ReceiveMemory::of(host.first_device())),
                ..grpc::LinkOptions::default()
            };
            let options = ConnectOptions {
                identity: identity.clone(),
                tls: links.tls.clone(),
                credentials: links.credentials.clone(),
                limits: config.limits,
                allocate: allocate.clone(),
            };
            Box::new(move |task: &TaskName, address: &str| -> Arc<dyn crate::task::services::WorkerService> {
                let grpc: Arc<dyn crate::task::services::WorkerService> =
                    Arc::new(grpc::GrpcPeer::new(task.to_string(), address, links.clone(), handle.clone()));
                match grpc_only {
                    true => grpc,
                    false => Arc::new(KoloPeer::new(task.clone(), address.to_owned(), options.clone(), grpc)),
                }
            })
        };
        let peers = Peers::new(own.clone(), cluster.clone(), runtime.handle().clone(), connect);
        let worker = Worker::new(host, peers.clone(), &groups)?;
        match &config.durability {
            Durability::Checkpoints => worker.set_keeper(Keeper::Nobody),
            Durability::Logged { dir, sync } => {
                worker.set_keeper(Keeper::Journal(Arc::new(Journal::open(dir, *sync, worker.host())?)));
            }
            Durability::Replicated { to } => {
                let to = match to {
                    Some(to) => to.clone(),
                    None => default_replica(&own, &peers)?,
                };
                cluster.address(&to.job, to.task)?;
                // Two tasks may be each other's replicas, so this one serves before it has its variables.
                runtime.spawn(claim(peers.clone(), to, worker.clone()));
            }
        }
        if let Some(report_after) = config.report_after {
            runtime.spawn(overdue::watch(peers.clone(), report_after));
        }
        let master = Master::new(peers, config.defaults.clone(), config.ready_deadline, config.max_sessions);
        if let Some(lease) = config.session_lease {
            runtime.spawn(end_abandoned_sessions(Arc::downgrade(&master), lease));
        }

        let n_left = if config.shared_memory { framed::sweep() } else { 0 };
        if n_left > 0 {
            tracing::info!("removed {n_left} files of shared memory that killed processes have left behind");
        }
        announce(&address.to_string(), &master, runtime.handle());
        let options = grpc::ServerOptions {
            limits: config.limits,
            tls: config.security.server_tls()?,
            token: required.token,
            same_user: config.security.same_user,
            first_bytes: config.first_bytes,
            ..grpc::ServerOptions::default()
        };
        let (stop, stopped) = watch::channel(false);
        let (ended_sender, ended) = watch::channel(false);
        let services = Services {
            worker: worker.clone(),
            master: master.clone(),
            identity,
            limits: config.limits,
            allocate,
            complaints: Complaints::default(),
        };
        runtime.spawn(async move {
            services.serve(listener, options, stopped).await;
            ended_sender.send_replace(true);
        });
        Ok(Server { own, address, token_file: required.file, worker, master, stop, ended, runtime: Some(runtime) })
    }

    /// The target for sessions of clients.
    pub fn target(&self) -> String {
        format!("grpc://{}", self.address)
    }

    /// `/job:ps/replica:0/task:0`
    pub fn task(&self) -> &TaskName {
        &self.own
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The file with the secret of this user, if callers must present a token that is derived from it.
    pub fn token_file(&self) -> Option<&Path> {
        self.token_file.as_deref()
    }

    /// Answers probes (`/livez`, `/readyz`, `/startupz`) at another address, over HTTP and without a token, for as long as the server
    /// lives. Returns the address: port 0 is one of the system's choice.
    pub fn answer_probes(&self, address: SocketAddr) -> Result<SocketAddr> {
        let runtime = self.runtime.as_ref().ok_or_else(|| Error::internal("a server without threads"))?;
        let probed = health::Probed { worker: self.worker.clone(), stop: self.stop.subscribe() };
        runtime.block_on(health::listen(address, probed))
    }

    /// Its devices.
    pub fn devices(&self) -> Vec<DeviceAttributes> {
        self.worker.devices()
    }

    /// Waits until the server has stopped.
    pub fn join(&self) -> Result<()> {
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let mut ended = self.ended.clone();
        runtime.block_on(async move {
            // The sender is dropped only when the server stops.
            let _ = ended.wait_for(|ended| *ended).await;
        });
        Ok(())
    }

    /// Stops the server: closes its sessions and refuses further calls. [`Server::join`] then returns. May be called
    /// from any thread.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let Some(runtime) = self.runtime.take() else { return };
        // Close sessions first, so that callers in this process do not wait for a deadline.
        let close = async { tokio::time::timeout(Duration::from_secs(5), self.master.close_all()).await };
        let _ = runtime.block_on(close);
        runtime.shutdown_timeout(Duration::from_secs(1));
    }
}

/// The addresses behind a task's own name. A pod of Kubernetes gets its name a while after it has started, so an unknown one is asked
/// for again for so long.
fn own_addresses(address: &str, own: &TaskName, patience: Duration) -> std::io::Result<Vec<SocketAddr>> {
    const PAUSE: Duration = Duration::from_millis(250);
    let began = Instant::now();
    let mut is_told = false;
    loop {
        match address.to_socket_addrs() {
            Err(error) if error.kind() != std::io::ErrorKind::InvalidInput && began.elapsed() + PAUSE < patience => {
                if !is_told {
                    tracing::warn!("{own}: its own address {address} is not known yet, and asked for again: {error}");
                    is_told = true;
                }
                std::thread::sleep(PAUSE);
            }
            found => return found.map(Iterator::collect),
        }
    }
}

/// A task's share of the cores if all workers of its host compute at once. Parameter servers are not counted: they
/// mostly wait.
fn share_of_cores(n_cores: usize, cluster: &ClusterSpec, address: &str) -> usize {
    let host = |address: &str| address.rsplit_once(':').map_or(String::new(), |(host, _)| host.to_owned());
    let own = host(address);
    let n_workers = cluster.all_tasks().filter(|(job, _, other)| *job != "ps" && host(other) == own).count();
    (n_cores / n_workers.max(1)).max(1)
}

/// A server runs many steps at once, so by default it has as many inter-op threads as cores. More threads than cores
/// only add context switches, so tasks on one host share the cores.
fn session_config(config: &SessionConfig, n_cores: usize, share: usize) -> SessionConfig {
    let inter_op_parallelism_threads = match config.inter_op_parallelism_threads {
        0 => share,
        threads => threads,
    };
    let intra_op_parallelism_threads = match config.intra_op_parallelism_threads {
        // With all cores, devices divide them among each other.
        0 if share < n_cores => share,
        threads => threads,
    };
    SessionConfig { inter_op_parallelism_threads, intra_op_parallelism_threads, ..config.clone() }
}

/// Fetches a task's variables from its replica, and retries until that task is up.
async fn claim(peers: Arc<Peers>, to: TaskName, worker: Arc<Worker>) {
    loop {
        match Replicator::claim(peers.clone(), to.clone(), worker.host(), worker.nonce()).await {
            Ok(replicator) => return worker.set_keeper(Keeper::Replica(Arc::new(replicator))),
            Err(error) => tracing::warn!("{} cannot fetch its variables from {to}, and retries: {error}", peers.own),
        }
        tokio::time::sleep(CLAIM_PAUSE).await;
    }
}

/// Ends the sessions of clients that have vanished, for as long as there is a master.
async fn end_abandoned_sessions(master: Weak<Master>, lease: Duration) {
    let pause = (lease / 4).clamp(Duration::from_millis(50), Duration::from_secs(60));
    loop {
        tokio::time::sleep(pause).await;
        let Some(master) = master.upgrade() else { return };
        master.end_abandoned(lease).await;
    }
}

/// Incoming tensors are allocated on the first device, which reuses its memory.
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
    complaints: Complaints,
}

impl Services {
    /// Accepts connections until stopped. A connection's protocol is known from its first bytes, or negotiated in the
    /// TLS handshake.
    async fn serve(self, listener: TcpListener, options: grpc::ServerOptions, mut stopped: watch::Receiver<bool>) {
        let services = Arc::new(self);
        let worker = Arc::new(LocalWorker(services.worker.clone()));
        let master = Arc::new(LocalMaster(services.master.clone()));
        let framed = services.clone();
        let other = grpc::OtherProtocol {
            hello: HELLO,
            serve: Box::new(move |stream| Box::pin(framed.clone().serve_framed(stream))),
        };
        let ending = services.clone();
        let shutdown = async move {
            // The sender lives as long as the server.
            let _ = stopped.wait_for(|stopped| *stopped).await;
            ending.master.close_all().await;
        };
        grpc::serve_with(listener, worker, master, options, Some(other), shutdown).await;
    }

    async fn serve_framed(self: Arc<Self>, stream: Stream) {
        let worker = Arc::new(LocalWorker(self.worker.clone()));
        let master = Arc::new(LocalMaster(self.master.clone()));
        let services = framed::Services { worker, master };
        let (allocate, pool) = (self.allocate.clone(), self.worker.host().first_device().pool().clone());
        let served = serve_connection(stream, services, &self.identity, self.limits, allocate, pool).await;
        match served {
            Ok(()) => {}
            Err(error) if error.code() == Code::Unavailable => tracing::debug!("a connection ended: {error}"),
            Err(error) => self.complaints.warn("a connection ended", error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_of_one_host_share_its_cores() {
        let cluster = ClusterSpec::parse("ps=a:1;worker=a:2,a:3,b:1;chief=a:4").unwrap();
        for (address, share) in [("a:1", 2), ("a:2", 2), ("b:1", 8), ("c:1", 8)] {
            assert_eq!(share_of_cores(8, &cluster, address), share, "{address}");
        }
        assert_eq!(share_of_cores(2, &cluster, "a:4"), 1);
        let (own, all) = (SessionConfig::default(), session_config(&SessionConfig::default(), 8, 8));
        assert_eq!((all.inter_op_parallelism_threads, all.intra_op_parallelism_threads), (8, 0));
        let shared = session_config(&own, 8, 2);
        assert_eq!((shared.inter_op_parallelism_threads, shared.intra_op_parallelism_threads), (2, 2));
        let given = SessionConfig { intra_op_parallelism_threads: 5, inter_op_parallelism_threads: 4, ..own };
        let given = session_config(&given, 8, 2);
        assert_eq!((given.inter_op_parallelism_threads, given.intra_op_parallelism_threads), (4, 5));
    }
}
