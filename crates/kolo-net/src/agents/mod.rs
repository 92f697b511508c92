//! Conversations between a launcher and its agents on other hosts, which run what the launcher says.
//!
//! Agents call the launcher, so only its host needs a port that others can reach. What they need to know is a [`JoinToken`]: the
//! fingerprint of the launcher's certificate, which was made for this launch alone, and a secret.
//!
//! ```text
//! agent ── TLS 1.3, certificate with that fingerprint ──► launcher      so the agent knows who tells it what to run
//!       ── the secret ────────────────────────────────►                 so the launcher knows who runs it
//!       ◄─ welcome ────────────────────────────────────
//!       ◄─ messages: lengths of 4 bytes, then JSON ───►                 a length of 0 is a sign of life
//! ```
//!
//! An end of which nothing was heard for [`LOST_AFTER`] is lost. Messages go one after the other; few of them are kept at either end, and
//! whoever sends more than the other end takes waits.

mod token;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio::sync::mpsc as channel;

pub use self::token::JoinToken;
use crate::transport::tls::pinned;

/// An end that says nothing for so long is lost.
pub const LOST_AFTER: Duration = Duration::from_secs(10);

/// How often an end that has nothing to say shows that it is there.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);

/// How long a stranger has for its handshake and its secret.
const STRANGER: Duration = Duration::from_secs(10);

/// So many strangers are heard at once; others wait.
const MOST_STRANGERS: usize = 64;

/// The longest message, and the longest of a stranger.
const MOST_BYTES: usize = 4 << 20;
const MOST_GREETING: usize = 1 << 10;

/// How many messages wait to be sent, or to be taken, before whoever sends them waits as well.
const MOST_WAITING: usize = 256;

/// How often an end looks whether what has come was taken.
const TAKEN: Duration = Duration::from_millis(5);

/// The first and the longest pause before a launcher that is not there is called again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// What comes from the other end.
#[derive(Debug)]
pub enum Heard {
    /// A message.
    Message(Value),
    /// It has gone; the reason.
    Gone(String),
}

/// One end of a conversation, which ends when all clones of this have been dropped.
#[derive(Clone)]
pub struct Line {
    outgoing: channel::Sender<Vec<u8>>,
}

impl Line {
    /// Sends a message; waits if many are waiting. False if the other end has gone.
    pub fn say(&self, message: &Value) -> bool {
        self.outgoing.blocking_send(message.to_string().into_bytes()).is_ok()
    }
}

/// An agent that has come.
pub struct Arrival {
    /// To it.
    pub line: Line,
    /// From it.
    pub heard: Receiver<Heard>,
    /// Its address.
    pub address: SocketAddr,
}

/// Where a launcher waits for its agents. They are gone when this is dropped.
pub struct Lobby {
    address: SocketAddr,
    token: JoinToken,
    arrivals: Receiver<Arrival>,
    runtime: Option<Runtime>,
}

impl Lobby {
    /// Listens there, with a certificate and a secret that are made for it.
    pub fn open(address: SocketAddr) -> Result<Lobby> {
        let (acceptor, fingerprint) = pinned::server()?;
        let token = JoinToken::new(fingerprint)?;
        let runtime = runtime()?;
        let listener = runtime.block_on(TcpListener::bind(address));
        let listener = listener
            .map_err(|error| Error::unavailable(format!("agents cannot be waited for at {address}: {error}")))?;
        let address = listener.local_addr().map_err(|error| Error::unavailable(error.to_string()))?;
        let (sender, arrivals) = mpsc::channel();
        let secret = token.secret().clone();
        runtime.spawn(async move {
            let strangers = Arc::new(Semaphore::new(MOST_STRANGERS));
            loop {
                let Ok(permit) = strangers.clone().acquire_owned().await else { return };
                let Ok((tcp, from)) = listener.accept().await else {
                    // Too many open files, or a call that was given up.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let (acceptor, secret, sender) = (acceptor.clone(), secret.clone(), sender.clone());
                tokio::spawn(async move {
                    let greeted = tokio::time::timeout(STRANGER, async {
                        tcp.set_nodelay(true)?;
                        let mut stream = acceptor.accept(tcp).await?;
                        let greeting = read_message(&mut stream, MOST_GREETING).await?;
                        let shown = greeting["token"].as_str().unwrap_or_default();
                        if !secret.is(shown) {
                            write_message(&mut stream, json!({ "refused": "the token is another launcher's" })).await?;
                            return Err(std::io::Error::other("it has another token"));
                        }
                        write_message(&mut stream, json!({ "welcome": true })).await?;
                        Ok(stream)
                    });
                    let stream = match greeted.await {
                        Ok(Ok(stream)) => stream,
                        Ok(Err(error)) => {
                            return tracing::warn!("{from} wanted to join as an agent and was refused: {error}");
                        }
                        Err(_) => return tracing::warn!("{from} did not say who it is in {STRANGER:?}"),
                    };
                    drop(permit);
                    let (line, heard) = converse(stream);
                    // Nobody waits for agents any more if this fails.
                    drop(sender.send(Arrival { line, heard, address: from }));
                });
            }
        });
        Ok(Lobby { address, token, arrivals, runtime: Some(runtime) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What agents need to join.
    pub fn token(&self) -> &JoinToken {
        &self.token
    }

    /// The next agent, if one comes in time.
    pub fn next(&self, at_most: Duration) -> Option<Arrival> {
        self.arrivals.recv_timeout(at_most).ok()
    }
}

impl Drop for Lobby {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // What was said last is still sent.
            runtime.shutdown_timeout(Duration::from_millis(500));
        }
    }
}

/// An agent's end, and what keeps it running.
pub struct Joined {
    /// To the launcher.
    pub line: Line,
    /// From it.
    pub heard: Receiver<Heard>,
    _runtime: Runtime,
}

/// Calls a launcher at `host:port`, again and again until it is there or the time is over.
pub fn join(address: &str, token: &JoinToken, patience: Duration) -> Result<Joined> {
    let runtime = runtime()?;
    let deadline = Instant::now() + patience;
    let (mut pause, connector) = (PAUSES.0, pinned::client(token.fingerprint())?);
    let stream = loop {
        let call = async {
            let tcp = TcpStream::connect(address).await.map_err(|error| Error::unavailable(error.to_string()))?;
            let is_other = |error: std::io::Error| {
                Error::new(Code::Unauthenticated, format!("it is not the launcher that this token is for: {error}"))
            };
            let mut stream = connector.connect(pinned::name()?, tcp).await.map_err(is_other)?;
            let said = write_message(&mut stream, json!({ "token": token.secret().secret() })).await;
            let answer = match said {
                Ok(()) => read_message(&mut stream, MOST_GREETING).await,
                Err(error) => Err(error),
            };
            let answer = answer.map_err(|error| Error::unavailable(format!("it did not answer: {error}")))?;
            match answer["refused"].as_str() {
                Some(why) => Err(Error::new(Code::Unauthenticated, why.to_owned())),
                None => Ok(stream),
            }
        };
        let called = runtime.block_on(async { tokio::time::timeout(STRANGER, call).await });
        match called.unwrap_or_else(|_| Err(Error::unavailable(format!("no answer in {STRANGER:?}")))) {
            Ok(stream) => break stream,
            Err(error) if error.code() == Code::Unavailable && Instant::now() + pause < deadline => {
                std::thread::sleep(pause)
            }
            Err(error) => return Err(error.context(format_args!("the launcher at {address} cannot be joined"))),
        }
        pause = (pause * 2).min(PAUSES.1);
    };
    let _inside = runtime.enter();
    let (line, heard) = converse(stream);
    drop(_inside);
    Ok(Joined { line, heard, _runtime: runtime })
}

fn runtime() -> Result<Runtime> {
    let made =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("kolo-agents").enable_all().build();
    made.map_err(|error| Error::resource_exhausted(format!("no thread for agents: {error}")))
}

/// Lets a stream carry a conversation. Called inside a runtime.
fn converse(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> (Line, Receiver<Heard>) {
    let (outgoing, waiting) = channel::channel(MOST_WAITING);
    let (sender, heard) = mpsc::sync_channel(MOST_WAITING);
    tokio::spawn(async move {
        let (mut from, mut to) = tokio::io::split(stream);
        let why = tokio::select! {
            error = listen(&mut from, &sender) => error,
            error = speak(&mut to, waiting) => error,
        };
        pass_on(&sender, Heard::Gone(why)).await;
    });
    (Line { outgoing }, heard)
}

/// Passes messages on until the other end has gone; the reason.
async fn listen(from: &mut (impl AsyncRead + Unpin), sender: &SyncSender<Heard>) -> String {
    loop {
        match tokio::time::timeout(LOST_AFTER, read_frame(from, MOST_BYTES)).await {
            Err(_) => return format!("nothing was heard of it for {LOST_AFTER:?}"),
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => return "it has gone".to_owned(),
            Ok(Err(error)) => return error.to_string(),
            Ok(Ok(frame)) if frame.is_empty() => {}
            Ok(Ok(frame)) => match serde_json::from_slice(&frame) {
                Ok(message) => pass_on(sender, Heard::Message(message)).await,
                Err(error) => return format!("it said something that is no message: {error}"),
            },
        }
    }
}

/// Waits until there is room for what has come. Nobody may be interested any more.
async fn pass_on(sender: &SyncSender<Heard>, heard: Heard) {
    let mut waiting = heard;
    while let Err(TrySendError::Full(back)) = sender.try_send(waiting) {
        waiting = back;
        tokio::time::sleep(TAKEN).await;
    }
}

/// Sends messages until there will be none any more; the reason.
async fn speak(to: &mut (impl AsyncWrite + Unpin), mut waiting: channel::Receiver<Vec<u8>>) -> String {
    loop {
        let written = match tokio::time::timeout(SIGN_OF_LIFE, waiting.recv()).await {
            Ok(Some(message)) => write_frame(to, &message).await,
            Ok(None) => {
                let _ = to.shutdown().await;
                return "the conversation is over".to_owned();
            }
            Err(_) => write_frame(to, &[]).await,
        };
        if let Err(error) = written {
            return error.to_string();
        }
    }
}

async fn read_message(from: &mut (impl AsyncRead + Unpin), most: usize) -> std::io::Result<Value> {
    serde_json::from_slice(&read_frame(from, most).await?).map_err(std::io::Error::other)
}

async fn write_message(to: &mut (impl AsyncWrite + Unpin), message: Value) -> std::io::Result<()> {
    write_frame(to, message.to_string().as_bytes()).await
}

async fn read_frame(from: &mut (impl AsyncRead + Unpin), most: usize) -> std::io::Result<Vec<u8>> {
    let n = from.read_u32_le().await? as usize;
    if n > most {
        return Err(std::io::Error::other(format!("a message of {n} bytes, more than {most}")));
    }
    let mut bytes = vec![0; n];
    from.read_exact(&mut bytes).await?;
    Ok(bytes)
}

async fn write_frame(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    let mut frame = (bytes.len() as u32).to_le_bytes().to_vec();
    frame.extend(bytes);
    to.write_all(&frame).await?;
    to.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn lobby() -> Lobby {
        Lobby::open("127.0.0.1:0".parse().unwrap()).unwrap()
    }

    fn message(heard: &Receiver<Heard>) -> Value {
        match heard.recv_timeout(SOON).unwrap() {
            Heard::Message(message) => message,
            Heard::Gone(why) => panic!("{why}"),
        }
    }

    #[test]
    fn agents_that_know_the_token_are_talked_to_and_missed_when_they_go() {
        let lobby = lobby();
        let token = JoinToken::parse(&lobby.token().text()).unwrap();
        let agent = join(&lobby.address().to_string(), &token, SOON).unwrap();
        let arrival = lobby.next(SOON).unwrap();
        assert!(arrival.line.say(&json!({ "start": 1 })) && agent.line.say(&json!({ "line": "x".repeat(1 << 20) })));
        assert_eq!(message(&agent.heard), json!({ "start": 1 }));
        assert_eq!(message(&arrival.heard)["line"].as_str().unwrap().len(), 1 << 20);
        drop(agent);
        assert!(matches!(arrival.heard.recv_timeout(SOON).unwrap(), Heard::Gone(_)));
        assert!(!arrival.line.say(&json!({})));
    }

    #[test]
    fn whoever_says_more_than_is_heard_waits() {
        let lobby = lobby();
        let agent = join(&lobby.address().to_string(), lobby.token(), SOON).unwrap();
        let arrival = lobby.next(SOON).unwrap();
        let line = agent.line.clone();
        let (sender, said) = mpsc::channel();
        const N: usize = 2000;
        std::thread::spawn(move || {
            for i in 0..N {
                assert!(line.say(&json!([i, "x".repeat(32 << 10)])));
            }
            sender.send(()).unwrap();
        });
        // 64 MB are more than both ends and the system keep.
        assert!(said.recv_timeout(Duration::from_millis(500)).is_err());
        for i in 0..N {
            assert_eq!(message(&arrival.heard)[0], i);
        }
        said.recv_timeout(SOON).unwrap();
    }

    #[test]
    fn strangers_and_other_launchers_are_refused() {
        let (lobby, other) = (lobby(), self::lobby());
        let address = lobby.address().to_string();
        let error = join(&address, other.token(), SOON).err().unwrap();
        assert_eq!(error.code(), Code::Unauthenticated, "{error}");
        assert!(error.message().contains("not the launcher that this token is for"), "{error}");
        let mut wrong = lobby.token().text();
        let last = if wrong.pop() == Some('0') { '1' } else { '0' };
        wrong.push(last);
        let error = join(&address, &JoinToken::parse(&wrong).unwrap(), SOON).err().unwrap();
        assert!(error.message().contains("the token is another launcher's"), "{error}");
        // One that says nothing keeps nobody else out.
        let _silent = std::net::TcpStream::connect(lobby.address()).unwrap();
        let agent = join(&address, lobby.token(), SOON).unwrap();
        lobby.next(SOON).unwrap();
        drop(agent);
        let gone = lobby.address().to_string();
        drop(lobby);
        let error = join(&gone, other.token(), Duration::from_millis(100)).err().unwrap();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
    }
}
