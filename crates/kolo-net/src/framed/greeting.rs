//! How a connection begins: each side says who it is and which cluster it believes to be in.

use std::time::Duration;

use kolo_core::{Error, Result};
use prost::Message as _;

use super::Failure;
use super::shared::{Probe, sees};
use super::stream::Stream;
use crate::cluster::ClusterSpec;
use crate::peers::TaskName;
use crate::proto::ClusterDef;

/// The first bytes of a connection. HTTP/2, and so gRPC, begins with others.
pub(crate) const HELLO: &[u8; 8] = b"KOLO/1\r\n";

/// The most bytes of a greeting.
const MOST: usize = 1 << 20;

/// How long either side waits for the other's greeting.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Clone, PartialEq, prost::Message)]
struct Greeting {
    /// The sender's job.
    #[prost(string, tag = "1")]
    job: String,
    /// And task.
    #[prost(uint32, tag = "2")]
    task: u32,
    /// The cluster as the sender was told it.
    #[prost(message, optional, tag = "3")]
    cluster: Option<ClusterDef>,
    /// What lets the sender in.
    #[prost(string, tag = "4")]
    token: String,
    /// Why the sender refuses, if it does.
    #[prost(message, optional, tag = "5")]
    refusal: Option<Failure>,
    /// A file in memory, and what it holds: whoever can read it shares memory with the sender.
    #[prost(string, tag = "6")]
    shared_path: String,
    #[prost(fixed64, tag = "7")]
    shared_nonce: u64,
    /// The answer: large tensors go through shared memory.
    #[prost(bool, tag = "8")]
    is_shared: bool,
}

/// Who a task is, for greetings.
#[derive(Clone)]
pub(crate) struct Identity {
    pub own: TaskName,
    /// `None` for a client, which is in no cluster.
    pub cluster: Option<ClusterSpec>,
    pub token: Option<String>,
    /// Whether large tensors may go through shared memory to tasks of the same machine.
    pub shares_memory: bool,
}

impl Identity {
    fn greeting(&self) -> Greeting {
        Greeting {
            job: self.own.job.to_string(),
            task: self.own.task,
            cluster: self.cluster.as_ref().map(ClusterSpec::to_def),
            token: self.token.clone().unwrap_or_default(),
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

/// What came where a greeting was expected.
enum Came {
    Greeting(Greeting),
    /// Bytes of another protocol.
    Other,
    /// Nothing: the connection was closed.
    Nothing,
}

fn broken(error: std::io::Error) -> Error {
    Error::unavailable(format!("the connection broke in the greeting: {error}"))
}

async fn receive(stream: &Stream, broken: impl Fn(std::io::Error) -> Error) -> Result<Came> {
    let mut hello = [0; HELLO.len()];
    match stream.read_exact(&mut hello).await {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof && !stream.is_tls() => {
            return Ok(Came::Nothing);
        }
        Err(error) => return Err(broken(error)),
    }
    if hello != *HELLO {
        return Ok(Came::Other);
    }
    let mut n = [0; 4];
    stream.read_exact(&mut n).await.map_err(&broken)?;
    let n = u32::from_le_bytes(n) as usize;
    if n > MOST {
        return Err(Error::resource_exhausted(format!("a greeting of {n} bytes; the limit is {MOST}")));
    }
    let mut bytes = vec![0; n];
    stream.read_exact(&mut bytes).await.map_err(&broken)?;
    let greeting = Greeting::decode(&bytes[..]).map_err(|error| Error::data_loss(format!("a greeting: {error}")))?;
    Ok(Came::Greeting(greeting))
}

/// What a caller has learnt of the other side.
pub(super) enum Introduced {
    /// It is Kolo's, and of the same cluster.
    Kolo,
    /// It speaks something else: it is TensorFlow's, then.
    Other,
    /// It hung up, as TensorFlow's does on bytes that it does not know, and as any task does that ends.
    HungUp,
}

/// The caller's side. With TLS a server that does not like our certificate says so only now.
pub(super) async fn introduce(stream: &Stream, identity: &Identity) -> Result<Introduced> {
    let probe = identity.shares_memory.then(Probe::new).flatten();
    let mut greeting = identity.greeting();
    if let Some(probe) = &probe {
        (greeting.shared_path, greeting.shared_nonce) = (probe.path(), probe.nonce);
    }
    let exchange = async {
        let refused = |error| match stream.is_tls() {
            true => crate::tls::failed(&error),
            false => broken(error),
        };
        match send(stream, &greeting).await {
            // With TLS a server that has hung up has said why.
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
        Came::Greeting(theirs) => theirs,
        Came::Other => return Ok(Introduced::Other),
        Came::Nothing => return Ok(Introduced::HungUp),
    };
    if let Some(refusal) = theirs.refusal {
        return Err(refusal.into_error());
    }
    identity.check(&theirs)?;
    Ok(Introduced::Kolo)
}

/// The server's side: who calls, and whether large tensors go through shared memory.
pub(super) async fn welcome(stream: &Stream, identity: &Identity) -> Result<(TaskName, bool)> {
    let came = tokio::time::timeout(DEADLINE, receive(stream, broken))
        .await
        .map_err(|_| Error::deadline_exceeded(format!("no greeting in {DEADLINE:?}")))??;
    let Came::Greeting(theirs) = came else { return Err(Error::data_loss("not a greeting")) };
    let checked = match &identity.token {
        Some(token) if !same(token, &theirs.token) => Err(Error::new(
            kolo_core::Code::Unauthenticated,
            format!("{} wants a token, and this is not it", identity.own),
        )),
        _ => identity.check(&theirs),
    };
    let refusal = checked.as_ref().err().map(Failure::of);
    // Who is not let in learns nothing but that.
    let is_shared = identity.shares_memory && checked.is_ok() && sees(&theirs.shared_path, theirs.shared_nonce);
    let answer = match refusal {
        Some(refusal) => Greeting { refusal: Some(refusal), ..Greeting::default() },
        None => Greeting { token: String::new(), is_shared, ..identity.greeting() },
    };
    send(stream, &answer).await.map_err(|error| Error::unavailable(format!("the greeting failed: {error}")))?;
    checked.map(|peer| (peer, is_shared))
}

/// Compares without telling by the time it takes how much was right.
fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
