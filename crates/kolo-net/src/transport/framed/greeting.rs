//! The greeting at the start of a connection: each side sends its task name and its cluster spec.

use std::time::Duration;

use kolo_core::{Error, Result};
use prost::Message as _;

use super::Failure;
use super::shared::{Probe, sees};
use super::stream::Stream;
use crate::cluster::ClusterSpec;
use crate::task::peers::TaskName;
use crate::transport::tls::{REMEDY, Token};
use crate::wire::proto::ClusterDef;

/// The first bytes of a connection. HTTP/2, and so gRPC, begins with other bytes.
pub(crate) const HELLO: &[u8; 8] = b"KOLO/1\r\n";

/// The size limit of a greeting.
const MAX_BYTES: usize = 1 << 20;

/// How long either side waits for the other's greeting.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Clone, PartialEq, prost::Message)]
struct Greeting {
    /// The sender's job.
    #[prost(string, tag = "1")]
    job: String,
    /// The sender's task index.
    #[prost(uint32, tag = "2")]
    task: u32,
    /// The sender's cluster spec.
    #[prost(message, optional, tag = "3")]
    cluster: Option<ClusterDef>,
    /// Authenticates the sender.
    #[prost(string, tag = "4")]
    token: String,
    /// Why the sender refuses, if it does.
    #[prost(message, optional, tag = "5")]
    refusal: Option<Failure>,
    /// A file in memory, and the nonce it holds: a task that can read it shares memory with the sender.
    #[prost(string, tag = "6")]
    shared_path: String,
    #[prost(fixed64, tag = "7")]
    shared_nonce: u64,
    /// In the server's greeting: large tensors go through shared memory.
    #[prost(bool, tag = "8")]
    is_shared: bool,
}

/// What a task sends in greetings and checks in those of others.
#[derive(Clone)]
pub(crate) struct Identity {
    pub own: TaskName,
    /// `None` for a client, which belongs to no cluster.
    pub cluster: Option<ClusterSpec>,
    /// The token that callers must present.
    pub token: Option<Token>,
    /// Whether large tensors may go through shared memory to tasks on the same machine.
    pub shares_memory: bool,
}

impl Identity {
    fn greeting(&self) -> Greeting {
        Greeting {
            job: self.own.job.to_string(),
            task: self.own.task,
            cluster: self.cluster.as_ref().map(ClusterSpec::to_def),
            ..Greeting::default()
        }
    }

    /// Refuses a peer of another cluster.
    fn check(&self, theirs: &Greeting) -> Result<TaskName> {
        let peer = TaskName::new(&theirs.job, theirs.task);
        let (Some(own), Some(theirs)) = (&self.cluster, &theirs.cluster) else { return Ok(peer) };
        match own.first_difference(&ClusterSpec::from_def(theirs)?) {
            None => Ok(peer),
            Some(difference) => Err(Error::failed_precondition(format!(
                "{} and {peer} were started with different clusters: {difference}",
                self.own
            ))),
        }
    }
}

async fn send(stream: &Stream, greeting: &Greeting) -> std::io::Result<()> {
    let body = greeting.encode_to_vec();
    let mut bytes = HELLO.to_vec();
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    stream.write_all(&bytes).await
}

/// What was received where a greeting was expected.
enum GreetingBytes {
    Greeting(Greeting),
    /// Bytes of another protocol.
    Other,
    /// Nothing: the connection was closed.
    Nothing,
}

fn broken(error: std::io::Error) -> Error {
    Error::unavailable(format!("the connection broke in the greeting: {error}"))
}

async fn receive(stream: &Stream, broken: impl Fn(std::io::Error) -> Error) -> Result<GreetingBytes> {
    let mut hello = [0; HELLO.len()];
    match stream.read_exact(&mut hello).await {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof && !stream.is_tls() => {
            return Ok(GreetingBytes::Nothing);
        }
        Err(error) => return Err(broken(error)),
    }
    if hello != *HELLO {
        return Ok(GreetingBytes::Other);
    }
    let mut n = [0; 4];
    stream.read_exact(&mut n).await.map_err(&broken)?;
    let n = u32::from_le_bytes(n) as usize;
    if n > MAX_BYTES {
        return Err(Error::resource_exhausted(format!("a greeting of {n} bytes; the limit is {MAX_BYTES}")));
    }
    let mut bytes = vec![0; n];
    stream.read_exact(&mut bytes).await.map_err(&broken)?;
    let greeting = Greeting::decode(&bytes[..]).map_err(|error| Error::data_loss(format!("a greeting: {error}")))?;
    Ok(GreetingBytes::Greeting(greeting))
}

/// What the greeting tells a caller about the peer.
pub(super) enum PeerProtocol {
    /// A Kolo task of the same cluster.
    Kolo,
    /// Another protocol: a TensorFlow task.
    Other,
    /// It closed the connection, as TensorFlow's tasks do on unknown bytes, and as any task does that exits.
    HungUp,
}

/// The caller's side. With TLS a server that rejects our certificate reports it only now.
pub(super) async fn introduce(stream: &Stream, identity: &Identity, token: Option<&Token>) -> Result<PeerProtocol> {
    let probe = identity.shares_memory.then(Probe::new).flatten();
    let mut greeting = Greeting { token: token.map(Token::secret).unwrap_or_default(), ..identity.greeting() };
    if let Some(probe) = &probe {
        (greeting.shared_path, greeting.shared_nonce) = (probe.path(), probe.nonce);
    }
    let exchange = async {
        let refused = |error| match stream.is_tls() {
            true => crate::transport::tls::failed(&error),
            false => broken(error),
        };
        match send(stream, &greeting).await {
            // With TLS a server that has closed the connection has sent an alert with the reason.
            Err(error) if !stream.is_tls() => Err(broken(error)),
            Ok(()) | Err(_) => receive(stream, refused).await,
        }
    };
    let answer = tokio::time::timeout(DEADLINE, exchange).await.map_err(|_| {
        Error::deadline_exceeded(format!(
            "it accepted the connection and said nothing for {DEADLINE:?} (stopped, overloaded, or another program)"
        ))
    })?;
    let theirs = match answer? {
        GreetingBytes::Greeting(theirs) => theirs,
        GreetingBytes::Other => return Ok(PeerProtocol::Other),
        GreetingBytes::Nothing => return Ok(PeerProtocol::HungUp),
    };
    if let Some(refusal) = theirs.refusal {
        return Err(refusal.into_error());
    }
    identity.check(&theirs)?;
    Ok(PeerProtocol::Kolo)
}

/// The server's side. Returns the caller's name, and whether large tensors go through shared memory.
pub(super) async fn welcome(stream: &Stream, identity: &Identity) -> Result<(TaskName, bool)> {
    let received = tokio::time::timeout(DEADLINE, receive(stream, broken))
        .await
        .map_err(|_| Error::deadline_exceeded(format!("no greeting in {DEADLINE:?}")))??;
    let GreetingBytes::Greeting(theirs) = received else { return Err(Error::data_loss("not a greeting")) };
    let checked = match &identity.token {
        Some(token) if !token.is(&theirs.token) => Err(Error::new(
            kolo_core::Code::Unauthenticated,
            match theirs.token.is_empty() {
                true => format!("{} wants a token, and none was sent; {REMEDY}", identity.own),
                false => format!("{} wants a token, and this is not it; {REMEDY}", identity.own),
            },
        )),
        _ => identity.check(&theirs),
    };
    let refusal = checked.as_ref().err().map(Failure::of);
    // A refused peer learns nothing else.
    let is_shared = identity.shares_memory && checked.is_ok() && sees(&theirs.shared_path, theirs.shared_nonce);
    let answer = match refusal {
        Some(refusal) => Greeting { refusal: Some(refusal), ..Greeting::default() },
        None => Greeting { is_shared, ..identity.greeting() },
    };
    send(stream, &answer).await.map_err(|error| Error::unavailable(format!("the greeting failed: {error}")))?;
    checked.map(|peer| (peer, is_shared))
}
