//! How a connection begins: both sides prove that they know the token, and the caller says who it is. Everything has a fixed size, so a
//! stranger can make nobody allocate.
//!
//! ```text
//! caller                                        listener
//! magic, nonce                           ──►
//!                                        ◄──    magic, nonce, HMAC(token; "listener", both nonces)
//! HMAC(token; "caller", both, body), body ──►
//!                                        ◄──    0, or 1 and why not
//! ```
//!
//! The token itself is never sent. Without one (with TLS, or where everybody may join), the key of the HMAC is empty.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use ring::rand::SecureRandom as _;
use ring::{hmac, rand};
use rustix::event::{PollFd, PollFlags};
use tokio_rustls::rustls::{ClientConnection, Connection, ServerConnection};

use super::stream::{Stream, wait_for};
use crate::transport::tls::{ClientTls, Security, ServerTls, Token, failed};

/// The first bytes of both sides, with the version of everything that follows.
const MAGIC: &[u8; 8] = b"KOLORNK1";

const NONCE: usize = 32;
const PROOF: usize = 32;

/// How long a caller may take to prove itself.
const STRANGER: Duration = Duration::from_secs(5);

/// A caller that has not proved itself in this time makes room for others, if there are many.
const TIME_TO_SPEAK: Duration = Duration::from_millis(300);

/// The most callers that have not proved themselves; the oldest make room for new ones.
const MOST_STRANGERS: usize = 256;

/// The longest refusal.
const MOST_REASON: usize = 600;

/// Why a caller connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To meet the other ranks, at a coordinator.
    Meet,
    /// To carry messages.
    Data,
    /// To tell and to learn who is there.
    Control,
    /// To ask a member of an elastic training something.
    Member,
}

/// What a caller says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Body {
    pub purpose: Purpose,
    pub rank: u32,
    pub n_ranks: u32,
    /// Of connections between ranks: which group, and which of the pair's streams.
    pub group: [u8; 16],
    pub stream: u32,
    /// To meet: where the rank listens, how long it waits for others, and what all ranks must agree on. An address of zeros is the one
    /// that it calls from.
    pub listen: [u8; 16],
    pub port: u16,
    pub timeout_ms: u32,
    pub n_streams: u32,
    pub lost_after_ms: u32,
}

pub(super) const BODY: usize = 64;

impl Body {
    fn write(&self) -> [u8; BODY] {
        let mut bytes = [0; BODY];
        bytes[0] = match self.purpose {
            Purpose::Meet => 1,
            Purpose::Data => 2,
            Purpose::Control => 3,
            Purpose::Member => 4,
        };
        bytes[2..4].copy_from_slice(&self.port.to_le_bytes());
        let numbers =
            [self.rank, self.n_ranks, self.stream, self.timeout_ms, self.n_streams, self.lost_after_ms].into_iter();
        for (at, number) in bytes[4..28].chunks_exact_mut(4).zip(numbers) {
            at.copy_from_slice(&number.to_le_bytes());
        }
        bytes[28..44].copy_from_slice(&self.group);
        bytes[44..60].copy_from_slice(&self.listen);
        bytes
    }

    /// `None` if nobody writes such a thing.
    fn read(bytes: &[u8; BODY]) -> Option<Body> {
        let purpose = match bytes[0] {
            1 => Purpose::Meet,
            2 => Purpose::Data,
            3 => Purpose::Control,
            4 => Purpose::Member,
            _ => return None,
        };
        let number = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let (mut group, mut listen) = ([0; 16], [0; 16]);
        group.copy_from_slice(&bytes[28..44]);
        listen.copy_from_slice(&bytes[44..60]);
        Some(Body {
            purpose,
            rank: number(4),
            n_ranks: number(8),
            group,
            stream: number(12),
            listen,
            port: u16::from_le_bytes([bytes[2], bytes[3]]),
            timeout_ms: number(16),
            n_streams: number(20),
            lost_after_ms: number(24),
        })
    }
}

/// Random bytes that nobody can guess.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = rand::SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| Error::internal("the system has no random numbers"))?;
    Ok(bytes)
}

fn key(token: Option<&Token>) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, token.map(Token::secret).unwrap_or_default().as_bytes())
}

/// What is proved: the role, both nonces, and what the caller says.
fn proven(role: &str, caller: &[u8], listener: &[u8], body: &[u8]) -> Vec<u8> {
    [b"kolo ranks ", role.as_bytes(), b" ", caller, listener, body].concat()
}

/// Calls a listener and proves itself to it. `listener` is what it is called in errors.
pub(super) fn call(
    address: SocketAddr,
    host: &str,
    listener: &str,
    security: &CallerSecurity,
    body: &Body,
    deadline: Instant,
) -> Result<Stream> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let unreachable =
        |error: io::Error| Error::unavailable(format!("{listener} at {address} cannot be reached: {error}"));
    let tcp = TcpStream::connect_timeout(&address, left).map_err(unreachable)?;
    let tls = match &security.tls {
        None => None,
        Some(tls) => {
            let connection = ClientConnection::new(tls.rank_config(), tls.server_name(host)?);
            let wrong = |error| Error::unavailable(format!("{listener} at {address}: {error}"));
            Some(Connection::Client(connection.map_err(wrong)?))
        }
    };
    let has_tls = tls.is_some();
    let mut stream = Stream::new(tcp, tls).map_err(unreachable)?;
    let broken = |error: io::Error| match has_tls {
        true => failed(&error).context(format_args!("{listener} at {address}")),
        false => Error::unavailable(format!("{listener} at {address} did not answer as one: {error}")),
    };
    let (key, own) = (key(security.security.credentials().token_for(address)?.as_ref()), random::<NONCE>()?);
    let answer_by = deadline.min(Instant::now() + STRANGER);
    let mut hello = MAGIC.to_vec();
    hello.extend(own);
    stream.write_all_by(&hello, answer_by).map_err(broken)?;
    let mut answer = [0; MAGIC.len() + NONCE + PROOF];
    stream.read_exact_by(&mut answer, answer_by).map_err(broken)?;
    let (magic, rest) = answer.split_at(MAGIC.len());
    let (nonce, proof) = rest.split_at(NONCE);
    if magic != MAGIC {
        return Err(Error::failed_precondition(format!(
            "{listener} at {address} is another program, or of another version"
        )));
    }
    if hmac::verify(&key, &proven("listener", &own, nonce, &[]), proof).is_err() {
        return Err(Error::new(
            Code::Unauthenticated,
            format!("{listener} at {address} has another token, or none: give all ranks the same"),
        ));
    }
    let body = body.write();
    let mut proof = hmac::sign(&key, &proven("caller", &own, nonce, &body)).as_ref().to_vec();
    proof.extend(body);
    stream.write_all_by(&proof, answer_by).map_err(broken)?;
    Ok(stream)
}

/// Waits for the listener's answer to a call.
pub(super) fn answer(stream: &mut Stream, listener: &str, deadline: Instant) -> Result<()> {
    let broken = |error: io::Error| match error.kind() {
        io::ErrorKind::TimedOut => Error::deadline_exceeded(format!("{listener} did not answer in time")),
        _ => Error::unavailable(format!("{listener} is gone, or did not accept the token: {error}")),
    };
    let mut status = [0; 1];
    stream.read_exact_by(&mut status, deadline).map_err(broken)?;
    if status == [0] {
        return Ok(());
    }
    let mut n = [0; 2];
    stream.read_exact_by(&mut n, deadline).map_err(broken)?;
    let mut reason = vec![0; usize::from(u16::from_le_bytes(n)).min(MOST_REASON)];
    stream.read_exact_by(&mut reason, deadline).map_err(broken)?;
    let code = if status == [2] { Code::DeadlineExceeded } else { Code::FailedPrecondition };
    Err(Error::new(code, String::from_utf8_lossy(&reason).into_owned()))
}

/// Answers a caller that it is accepted.
pub(super) fn accept(stream: &mut Stream, deadline: Instant) -> io::Result<()> {
    stream.write_all_by(&[0], deadline)
}

/// Answers a caller that it is not; it may have gone already.
pub(super) fn refuse(stream: &mut Stream, error: &Error) {
    let status = if error.code() == Code::DeadlineExceeded { 2 } else { 1 };
    let text = &error.message().as_bytes()[..error.message().len().min(MOST_REASON)];
    let n = (text.len() as u16).to_le_bytes();
    let _ = stream.write_all_by(&[&[status], &n[..], text].concat(), Instant::now() + Duration::from_millis(200));
}

/// What a caller needs to authenticate itself.
pub(super) struct CallerSecurity {
    security: Security,
    tls: Option<ClientTls>,
}

impl CallerSecurity {
    pub fn new(security: &Security) -> Result<CallerSecurity> {
        Ok(CallerSecurity { security: security.clone(), tls: security.client_tls()? })
    }
}

/// Listens for callers, and hears out those that have not proved themselves, all at the same time.
pub(super) struct Door {
    listener: TcpListener,
    key: hmac::Key,
    tls: Option<ServerTls>,
    strangers: Vec<Stranger>,
}

impl Door {
    /// Listens there. An error if strangers who reach the address could join.
    pub fn open(address: SocketAddr, security: &Security) -> Result<Door> {
        security.check_bind(address)?;
        let failed = |error: io::Error| Error::unavailable(format!("{address} cannot be listened at: {error}"));
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let token = security.required_token(listener.local_addr().map_err(failed)?)?.token;
        Ok(Door { listener, key: key(token.as_ref()), tls: security.server_tls()?, strangers: Vec::new() })
    }

    pub fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|error| Error::unavailable(format!("a listening socket: {error}")))
    }

    /// Waits for callers, for at most so long, or until one of `others` can be read; returns those that have proved themselves.
    pub fn wait(&mut self, others: &[&dyn AsFd], at_most: Duration) -> Result<Vec<(Stream, Body, SocketAddr)>> {
        let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
        polled.extend(self.strangers.iter().map(|stranger| PollFd::new(&stranger.stream, PollFlags::IN)));
        polled.extend(others.iter().map(|other| PollFd::from_borrowed_fd(other.as_fd(), PollFlags::IN)));
        wait_for(&mut polled, at_most).map_err(|error| Error::unavailable(format!("a listening socket: {error}")))?;
        self.let_in();
        let mut proven = Vec::new();
        for mut stranger in std::mem::take(&mut self.strangers) {
            match stranger.listen(&self.key) {
                Ok(Some(body)) => proven.push((stranger.stream, body, stranger.address)),
                Ok(None) if stranger.since.elapsed() < STRANGER => self.strangers.push(stranger),
                Ok(None) => tracing::debug!("{} did not say who it is in {STRANGER:?}", stranger.address),
                Err(error) => tracing::warn!("{} wanted to join and was refused: {error}", stranger.address),
            }
        }
        Ok(proven)
    }

    /// Takes the callers that wait.
    fn let_in(&mut self) {
        loop {
            if self.strangers.len() >= MOST_STRANGERS {
                // Callers beyond these wait in the system's queue. One that had its time to speak makes room.
                match self.strangers.first().is_some_and(|oldest| oldest.since.elapsed() >= TIME_TO_SPEAK) {
                    true => drop(self.strangers.remove(0)),
                    false => return,
                }
            }
            // The errors of a call that was given up, and of too many open files, are not this listener's.
            let Ok((tcp, address)) = self.listener.accept() else { return };
            let tls = match &self.tls {
                None => Ok(None),
                Some(tls) => ServerConnection::new(tls.rank_config()).map(|tls| Some(Connection::Server(tls))),
            };
            let stream = tls.map_err(io::Error::other).and_then(|tls| Stream::new(tcp, tls));
            match stream.and_then(|stream| Stranger::new(stream, address)) {
                Ok(stranger) => self.strangers.push(stranger),
                Err(error) => tracing::debug!("{address}: {error}"),
            }
        }
    }
}

/// A caller that has not proved itself.
struct Stranger {
    stream: Stream,
    address: SocketAddr,
    since: Instant,
    nonce: [u8; NONCE],
    /// Its nonce, once it has sent one.
    theirs: Option<[u8; NONCE]>,
    /// What it has sent since.
    heard: [u8; PROOF + BODY],
    n_heard: usize,
}

impl Stranger {
    fn new(stream: Stream, address: SocketAddr) -> io::Result<Stranger> {
        let nonce = random().map_err(|error| io::Error::other(error.to_string()))?;
        let heard = [0; PROOF + BODY];
        Ok(Stranger { stream, address, since: Instant::now(), nonce, theirs: None, heard, n_heard: 0 })
    }

    /// Reads what is there. Who it is, once it has proved that.
    fn listen(&mut self, key: &hmac::Key) -> io::Result<Option<Body>> {
        let wrong = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        loop {
            let n_wanted = match self.theirs {
                None => MAGIC.len() + NONCE,
                Some(_) => PROOF + BODY,
            };
            match self.stream.read(&mut [IoSliceMut::new(&mut self.heard[self.n_heard..n_wanted])]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.n_heard += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            let n_magic = self.n_heard.min(MAGIC.len());
            if self.theirs.is_none() && self.heard[..n_magic] != MAGIC[..n_magic] {
                return wrong("it is another program, or of another version");
            }
            if self.n_heard < n_wanted {
                continue;
            }
            let Some(theirs) = self.theirs else {
                let mut theirs = [0; NONCE];
                theirs.copy_from_slice(&self.heard[MAGIC.len()..n_wanted]);
                let proof = hmac::sign(key, &proven("listener", &theirs, &self.nonce, &[]));
                let answer = [&MAGIC[..], &self.nonce, proof.as_ref()].concat();
                // The first bytes on a connection fit into its buffer.
                if self.stream.write(&[IoSlice::new(&answer)])? != answer.len() {
                    return wrong("its socket has no room for an answer");
                }
                (self.theirs, self.n_heard) = (Some(theirs), 0);
                continue;
            };
            let (proof, body) = self.heard.split_at(PROOF);
            if hmac::verify(key, &proven("caller", &theirs, &self.nonce, body), proof).is_err() {
                return wrong("it has another token, or none");
            }
            let mut bytes = [0; BODY];
            bytes.copy_from_slice(body);
            return match Body::read(&bytes) {
                Some(body) => Ok(Some(body)),
                None => wrong("it said something that no rank says"),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_calls_is_read_as_it_is_written() {
        for purpose in [Purpose::Meet, Purpose::Data, Purpose::Control, Purpose::Member] {
            let body = Body {
                purpose,
                rank: 1,
                n_ranks: 2,
                group: [3; 16],
                stream: 4,
                listen: [9; 16],
                port: 5,
                timeout_ms: 6,
                n_streams: 7,
                lost_after_ms: 8,
            };
            assert_eq!(Body::read(&body.write()), Some(body));
        }
        assert_eq!(Body::read(&[0; BODY]), None);
    }
}
