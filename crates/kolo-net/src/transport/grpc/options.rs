//! Options of connections.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{DType, Shape, Tensor};
use kolo_device::Device;
use tokio::net::TcpStream;

use crate::transport::tls::{ClientTls, Credentials, ServerTls, Token};
use crate::wire::limits::MessageLimits;

/// HTTP/2 flow-control windows. A 10 Gbit/s link with a round trip of 10 ms has 12 MB in flight; with a smaller window
/// it would idle.
pub(super) const STREAM_WINDOW: u32 = 16 << 20;
pub(super) const CONNECTION_WINDOW: u32 = 64 << 20;

/// The maximum size of an HTTP/2 data frame.
pub(super) const FRAME_BYTES: u32 = 256 << 10;

/// Disables Nagle's algorithm, and lets the kernel detect a vanished machine: after about `5 + 3 × 2` seconds on an
/// idle connection, and after 30 with unacknowledged data.
pub(crate) fn set_up(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(5))
        .with_interval(Duration::from_secs(2))
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(Duration::from_secs(30)))?;
    Ok(())
}

/// Options of a server's connections.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// How long messages may be.
    pub limits: MessageLimits,
    /// TLS; `None` is plain text.
    pub tls: Option<ServerTls>,
    /// The token that callers must present; `None` accepts all.
    pub token: Option<Token>,
    /// Whether connections of the server's own user need no token; see [`crate::tls::Security::same_user`].
    pub same_user: bool,
    /// The interval and the timeout of pings. A client that does not answer is disconnected, and its calls are
    /// cancelled.
    pub ping: Option<(Duration, Duration)>,
    /// How long a connection may take until it has sent the bytes that tell its protocol.
    pub first_bytes: Duration,
    /// How long calls may continue after the server was asked to stop. Then they fail with `UNAVAILABLE`.
    pub grace: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            limits: MessageLimits::default(),
            tls: None,
            token: None,
            same_user: false,
            ping: Some((Duration::from_secs(20), Duration::from_secs(20))),
            first_bytes: Duration::from_secs(10),
            grace: Duration::from_secs(2),
        }
    }
}

/// Options of a connection to another task.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// How long messages may be.
    pub limits: MessageLimits,
    /// TLS; `None` is plain text.
    pub tls: Option<ClientTls>,
    /// What is presented to the server.
    pub credentials: Credentials,
    /// The deadline of a call that does not have its own; `None` waits for ever.
    pub deadline: Option<Duration>,
    /// How long a first call (GetStatus, CreateSession, ..) waits for a task that cannot be reached, if its deadline is
    /// not sooner. Other calls fail at once.
    pub wait_for_peer: Duration,
    /// The timeout of one attempt to connect.
    pub connect_timeout: Duration,
    /// The interval and the timeout of pings. TensorFlow's servers disconnect clients that ping often, so this is for
    /// Kolo's own.
    pub ping: Option<(Duration, Duration)>,
    /// The memory for large incoming tensors; `None` allocates new memory for each.
    pub memory: Option<ReceiveMemory>,
}

impl Default for LinkOptions {
    fn default() -> LinkOptions {
        LinkOptions {
            limits: MessageLimits::default(),
            tls: None,
            credentials: Credentials::Nothing,
            deadline: None,
            wait_for_peer: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(5),
            ping: None,
            memory: None,
        }
    }
}

/// The memory of a device, for incoming tensors.
///
/// New memory costs more than the transfer itself, because of a page fault for each page on first use. A device reuses
/// its memory.
#[derive(Clone)]
pub struct ReceiveMemory {
    device: Arc<dyn Device>,
    tag: Arc<str>,
}

impl ReceiveMemory {
    /// The memory of this device, which should be a CPU.
    pub fn of(device: Arc<dyn Device>) -> ReceiveMemory {
        ReceiveMemory { device, tag: "received".into() }
    }

    /// A tensor that the host can write, if there is room for it.
    pub(super) fn allocate(&self, dtype: DType, shape: &Shape) -> Option<Tensor> {
        let mut tensor = self.device.allocate_tensor(dtype, shape.clone(), &self.tag).ok()?;
        tensor.host_bytes_mut().is_ok().then_some(tensor)
    }
}

impl fmt::Debug for ReceiveMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "of {}", self.device.attributes().name)
    }
}
