//! Sessions on servers: `Session::connect("grpc://host:port", &graph)`.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use kolo_core::{Error, Result, Tensor};
use kolo_graph::Graph;
use kolo_runtime::{Session, SessionConfig};
use parking_lot::Mutex;
use tokio::runtime::{Handle, Runtime};

use crate::client::session::ClientSession;
use crate::task::master::{LocalMaster, Master};
use crate::task::peers::TaskName;
use crate::task::services::MasterService;
use crate::transport::framed::{ConnectOptions, Identity, KoloMaster};
use crate::transport::grpc;
use crate::transport::tls::Security;

/// Opens sessions on servers. In scope, it gives [`Session`] the function `connect`.
///
/// ```no_run
/// use kolo_net::Connect as _;
/// use kolo_runtime::Session;
///
/// let g = kolo_ops::graph();
/// let sum = g.device("/job:ps/task:0", || g.constant(1.0f32)) + 2.0;
/// let session = Session::connect("grpc://127.0.0.1:2222", &g)?;
/// assert_eq!(session.fetch(sum)?.scalar_value::<f32>()?, 3.0);
/// # Ok::<(), kolo_core::Error>(())
/// ```
pub trait Connect: Sized {
    /// A session over `graph` on the server at `target`, which may be Kolo's or TensorFlow's. The server is its master,
    /// and runs the nodes without a pin.
    fn connect(target: &str, graph: &Graph) -> Result<Self> {
        Self::connect_with(target, graph, SessionConfig::default())
    }

    /// The same, with options. Those about devices and threads are ignored: the servers have their own.
    fn connect_with(target: &str, graph: &Graph, config: SessionConfig) -> Result<Self> {
        Self::connect_secured(target, graph, config, &Security::default())
    }

    /// The same on a server that requires a token or a certificate. Without either, the session presents the token of
    /// this user to a server on loopback.
    fn connect_secured(target: &str, graph: &Graph, config: SessionConfig, security: &Security) -> Result<Self>;
}

impl Connect for Session {
    fn connect_secured(target: &str, graph: &Graph, config: SessionConfig, security: &Security) -> Result<Session> {
        let address = target.strip_prefix("grpc://").ok_or_else(|| {
            Error::invalid_argument(format!("'{target}' is not a target; it looks like grpc://host:port"))
        })?;
        if let Some(pass) = config.passes.first() {
            return Err(Error::invalid_argument(format!(
                "pass '{}' cannot run in a session on {target}: its servers plan with passes of their own; rewrite the graph \
                 before the session, or use a local one",
                pass.name()
            )));
        }
        let (master, runtime) = match own_server(address) {
            Some((master, runtime)) => (Arc::new(LocalMaster(master)) as Arc<dyn MasterService>, runtime),
            None => {
                let runtime = client_runtime()?;
                let options = grpc::LinkOptions {
                    tls: security.client_tls()?,
                    credentials: security.credentials(),
                    ..grpc::LinkOptions::default()
                };
                let own = TaskName::new("", 0);
                let connect_options = ConnectOptions {
                    identity: Identity { own, cluster: None, token: None, shares_memory: false },
                    tls: options.tls.clone(),
                    credentials: options.credentials.clone(),
                    limits: options.limits,
                    allocate: Arc::new(Tensor::zeros),
                };
                let grpc = Arc::new(grpc::GrpcMaster::new(target, address, options, runtime.clone()));
                let master = Arc::new(KoloMaster::new(address.to_owned(), connect_options, grpc));
                (master as Arc<dyn MasterService>, runtime)
            }
        };
        Session::remote(graph, ClientSession::new(master, runtime, target, &config), config)
    }
}

/// The runtime for the connections of clients.
pub(crate) fn client_runtime() -> Result<Handle> {
    static RUNTIME: OnceLock<std::result::Result<Runtime, String>> = OnceLock::new();
    let make = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(1)
            .thread_name("kolo-client")
            .enable_all()
            .build()
            .map_err(|error| error.to_string())
    };
    match RUNTIME.get_or_init(make) {
        Ok(runtime) => Ok(runtime.handle().clone()),
        Err(error) => Err(Error::resource_exhausted(format!("the client's thread could not be started: {error}"))),
    }
}

/// The masters of this process by address: sessions in this process call them directly.
type LocalMasters = HashMap<String, (Weak<Master>, Handle)>;

fn own_servers() -> &'static Mutex<LocalMasters> {
    static OWN: OnceLock<Mutex<LocalMasters>> = OnceLock::new();
    OWN.get_or_init(Mutex::default)
}

fn own_server(address: &str) -> Option<(Arc<Master>, Handle)> {
    let servers = own_servers().lock();
    let (master, runtime) = servers.get(address)?;
    Some((master.upgrade()?, runtime.clone()))
}

/// Registers a server for clients in this process.
pub(crate) fn announce(address: &str, master: &Arc<Master>, runtime: &Handle) {
    let mut servers = own_servers().lock();
    servers.retain(|_, (master, _)| master.strong_count() > 0);
    servers.insert(address.to_owned(), (Arc::downgrade(master), runtime.clone()));
}
