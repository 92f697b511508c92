//! How a connection begins: each side says who it is and which cluster it believes to be in.

use std::time::Duration;

use kolo_core::{Error, Result};
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::Failure;
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
}

/// Who a task is, for greetings.
#[derive(Clone)]
pub(crate) struct Identity {
    pub own: TaskName,
    pub cluster: ClusterSpec,
    pub token: Option<String>,
}

impl Identity {
    fn greeting(&self) -> Greeting {
        Greeting {
            job: self.own.job.to_string(),
            task: self.own.task,
            cluster: Some(self.cluster.to_def()),
            token: self.token.clone().unwrap_or_default(),
            refusal: None,
        }
    }

    /// Refuses a peer of another cluster.
    fn check(&self, theirs: &Greeting) -> Result<TaskName> {
        let peer = TaskName::new(&theirs.job, theirs.task);
        let cluster = ClusterSpec::from_def(&theirs.cluster.clone().unwrap_or_default())?;
        match self.cluster.first_difference(&cluster) {
            None => Ok(peer),
            Some(difference) => Err(Error::failed_precondition(format!(
                "{} and {peer} were started with different clusters: {difference}",
                self.own
            ))),
        }
    }
}

async fn send(stream: &mut TcpStream, greeting: &Greeting) -> std::io::Result<()> {
    let body = greeting.encode_to_vec();
    let mut bytes = HELLO.to_vec();
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    stream.write_all(&bytes).await
}

async fn receive(stream: &mut TcpStream) -> Result<Option<Greeting>> {
    let broken = |error: std::io::Error| Error::unavailable(format!("the connection broke in the greeting: {error}"));
    let mut hello = [0; HELLO.len()];
    match stream.read_exact(&mut hello).await {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(broken(error)),
    }
    if hello != *HELLO {
        return Ok(None);
    }
    let n = stream.read_u32_le().await.map_err(broken)? as usize;
    if n > MOST {
        return Err(Error::resource_exhausted(format!("a greeting of {n} bytes; the limit is {MOST}")));
    }
    let mut bytes = vec![0; n];
    stream.read_exact(&mut bytes).await.map_err(broken)?;
    let greeting = Greeting::decode(&bytes[..]).map_err(|error| Error::data_loss(format!("a greeting: {error}")))?;
    Ok(Some(greeting))
}

/// The caller's side. `Ok(false)` if the other side does not speak this: it is TensorFlow's, then, or TLS.
pub(super) async fn introduce(stream: &mut TcpStream, identity: &Identity) -> Result<bool> {
    let exchange = async {
        send(stream, &identity.greeting())
            .await
            .map_err(|error| Error::unavailable(format!("the connection broke in the greeting: {error}")))?;
        receive(stream).await
    };
    let answer = tokio::time::timeout(DEADLINE, exchange).await.map_err(|_| {
        Error::deadline_exceeded(format!("it accepted the connection and said nothing for {DEADLINE:?}"))
    })?;
    let Some(theirs) = answer? else { return Ok(false) };
    if let Some(refusal) = theirs.refusal {
        return Err(refusal.into_error());
    }
    identity.check(&theirs)?;
    Ok(true)
}

/// The server's side.
pub(super) async fn welcome(stream: &mut TcpStream, identity: &Identity) -> Result<TaskName> {
    let theirs = tokio::time::timeout(DEADLINE, receive(stream))
        .await
        .map_err(|_| Error::deadline_exceeded(format!("no greeting in {DEADLINE:?}")))??
        .ok_or_else(|| Error::data_loss("not a greeting"))?;
    let checked = match &identity.token {
        Some(token) if !same(token, &theirs.token) => Err(Error::new(
            kolo_core::Code::Unauthenticated,
            format!("{} wants a token, and this is not it", identity.own),
        )),
        _ => identity.check(&theirs),
    };
    let refusal = checked.as_ref().err().map(Failure::of);
    // Who is not let in learns nothing but that.
    let answer = match refusal {
        Some(refusal) => Greeting { refusal: Some(refusal), ..Greeting::default() },
        None => Greeting { token: String::new(), ..identity.greeting() },
    };
    send(stream, &answer).await.map_err(|error| Error::unavailable(format!("the greeting failed: {error}")))?;
    checked
}

/// Compares without telling by the time it takes how much was right.
fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
