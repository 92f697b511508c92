//! How connections are made and kept.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{DType, Shape, Tensor};
use kolo_device::Device;
use tokio::net::TcpStream;

use crate::limits::MessageLimits;
use crate::tls::{ClientTls, ServerTls, Token};

/// HTTP/2 windows. A 10 Gbit/s link with a round trip of 10 ms holds 12 MB; a window must not be smaller, or it is idle.
pub(super) const STREAM_WINDOW: u32 = 16 << 20;
pub(super) const CONNECTION_WINDOW: u32 = 64 << 20;

/// The largest piece of a body, and so how often a long message is cut.
pub(super) const FRAME_BYTES: u32 = 256 << 10;

/// No waiting for more to send with; and a machine that vanished is noticed by the kernel, after about `5 + 3 × 2` seconds if
/// nothing was under way and 30 if something was, whatever the program at the other end does or is.
pub(super) fn set_up(stream: &TcpStream) -> std::io::Result<()> {
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

/// How a server treats its connections.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// How long messages may be.
    pub limits: MessageLimits,
    /// TLS; `None` is plain text.
    pub tls: Option<ServerTls>,
    /// What callers must show; `None` lets all in.
    pub token: Option<Token>,
    /// How often a client is asked for a sign of life, and how long it has to answer. A client that does not is dropped, and
    /// its calls are cancelled.
    pub ping: Option<(Duration, Duration)>,
    /// How long calls may go on after the server was asked to stop. Then they are answered `UNAVAILABLE`.
    pub grace: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            limits: MessageLimits::default(),
            tls: None,
            token: None,
            ping: Some((Duration::from_secs(20), Duration::from_secs(20))),
            grace: Duration::from_secs(2),
        }
    }
}

/// How a connection to another task is made and kept.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// How long messages may be.
    pub limits: MessageLimits,
    /// TLS; `None` is plain text.
    pub tls: Option<ClientTls>,
    /// What to show to the server.
    pub token: Option<Token>,
    /// The deadline of a call that does not bring its own; `None` waits for ever.
    pub deadline: Option<Duration>,
    /// How long a call that opens a conversation (GetStatus, CreateSession, ..) waits for a task that cannot be reached,
    /// if its deadline is not sooner. Other calls fail at once.
    pub wait_for_peer: Duration,
    /// How long one attempt to connect may take.
    pub connect_timeout: Duration,
    /// How often the peer is asked for a sign of life, and how long it has to answer. TensorFlow's servers hang up on
    /// clients that ask often, so this is for Kolo's own.
    pub ping: Option<(Duration, Duration)>,
    /// Where large tensors that arrive are put; `None` is new memory for each.
    pub memory: Option<ReceiveMemory>,
}

impl Default for LinkOptions {
    fn default() -> LinkOptions {
        LinkOptions {
            limits: MessageLimits::default(),
            tls: None,
            token: None,
            deadline: None,
            wait_for_peer: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(5),
            ping: None,
            memory: None,
        }
    }
}

/// The memory of a device, for tensors that arrive.
///
/// New memory costs more than the transfer itself: the system hands it out page by page, on first use. A device keeps what
/// it has used.
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
