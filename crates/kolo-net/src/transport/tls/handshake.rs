//! The TLS handshake of a connection that carries Kolo's own transport.
//!
//! A client offers two protocols by ALPN, Kolo's and HTTP/2, and the server selects one. A server peeks at that offer
//! before the handshake, and leaves a connection that will carry gRPC to `tokio-rustls`.

use std::io;
use std::time::Duration;

use kolo_core::{Code, Error, Result};
use tokio::net::TcpStream;
use tokio_rustls::rustls;
use tokio_rustls::rustls::AlertDescription::*;
use tokio_rustls::rustls::client::UnbufferedClientConnection;
use tokio_rustls::rustls::server::{Acceptor, UnbufferedServerConnection};
use tokio_rustls::rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};

use super::records::halves;
use super::stream::TlsStream;
use super::{ClientTls, KOLO, ServerTls};

/// The timeout of a handshake.
const DEADLINE: Duration = Duration::from_secs(10);

/// The maximum size of the buffer for incoming handshake bytes.
const MOST: usize = 64 << 10;

/// The maximum size of a `ClientHello`.
const MOST_HELLO: usize = 16 << 10;

/// The first and the longest backoff before an incomplete `ClientHello` is peeked at again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// How long a server that refuses a client waits for it to read the alert.
const LINGER: Duration = Duration::from_secs(1);

impl ClientTls {
    /// The client's handshake with the server at `address`. `None` if the server does not support Kolo's own transport.
    pub(crate) async fn connect(&self, tcp: TcpStream, address: &str) -> Result<Option<TlsStream>> {
        let name = self.server_name(address)?;
        let connection = UnbufferedClientConnection::new(self.own.clone(), name);
        let mut connection = connection.map_err(|error| failed(&invalid(error)))?;
        let shaken = tokio::time::timeout(DEADLINE, shake(&tcp, &mut connection)).await;
        let late = |_| Error::unavailable(format!("no TLS handshake in {DEADLINE:?} (is it a server with TLS?)"));
        let buffers = shaken.map_err(late)?.map_err(|error| failed(&error))?;
        if connection.alpn_protocol() != Some(KOLO) {
            return Ok(None);
        }
        let made = connection
            .dangerous_into_kernel_connection()
            .and_then(|(secrets, connection)| halves(secrets, connection, &buffers.plain, buffers.arrived()));
        let (sealer, opener) = made.map_err(|error| failed(&invalid(error)))?;
        Ok(Some(TlsStream::new(tcp, sealer, opener)))
    }
}

impl ServerTls {
    /// Whether the client offers Kolo's own transport. Only peeks: no bytes are consumed.
    pub(crate) async fn is_offered_kolo(&self, tcp: &TcpStream) -> bool {
        let mut first = vec![0; MOST_HELLO];
        let look = async {
            let mut pause = PAUSES.0;
            loop {
                let n = match tcp.peek(&mut first).await {
                    Ok(0) | Err(_) => return false,
                    Ok(n) => n,
                };
                match offers_kolo(&first[..n]) {
                    Some(offers) => return offers,
                    None if n == MOST_HELLO => return false,
                    None => {}
                }
                // A `ClientHello` usually arrives in one piece, so this is rare and short.
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSES.1);
            }
        };
        tokio::time::timeout(DEADLINE, look).await.unwrap_or(false)
    }

    /// The server's handshake with a client that offers Kolo's own transport.
    pub(crate) async fn accept(&self, tcp: TcpStream) -> io::Result<TlsStream> {
        let mut connection = UnbufferedServerConnection::new(self.own.clone()).map_err(invalid)?;
        let buffers = match tokio::time::timeout(DEADLINE, shake(&tcp, &mut connection)).await {
            Ok(Ok(buffers)) => buffers,
            Ok(Err(error)) => {
                linger(&tcp).await;
                return Err(error);
            }
            Err(_) => return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no TLS handshake in {DEADLINE:?}"))),
        };
        if connection.alpn_protocol() != Some(KOLO) {
            return Err(io::Error::other("the caller has changed its mind about the protocol"));
        }
        let (secrets, connection) = connection.dangerous_into_kernel_connection().map_err(invalid)?;
        let (sealer, opener) = halves(secrets, connection, &buffers.plain, buffers.arrived()).map_err(invalid)?;
        Ok(TlsStream::new(tcp, sealer, opener))
    }
}

/// Whether this `ClientHello` offers Kolo's own transport; `None` if it is incomplete.
fn offers_kolo(mut bytes: &[u8]) -> Option<bool> {
    let mut acceptor = Acceptor::default();
    while !bytes.is_empty() {
        if !acceptor.read_tls(&mut bytes).is_ok_and(|n| n > 0) {
            return Some(false);
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => {
                let hello = accepted.client_hello();
                return Some(hello.alpn().is_some_and(|mut offered| offered.any(|protocol| protocol == KOLO)));
            }
            Ok(None) => {}
            Err(_) => return Some(false),
        }
    }
    None
}

/// The buffers of a handshake.
#[derive(Default)]
struct Buffers {
    incoming: Vec<u8>,
    n_incoming: usize,
    outgoing: Vec<u8>,
    /// Decrypted data that the peer sent after its last handshake message.
    plain: Vec<u8>,
}

impl Buffers {
    /// Bytes that have arrived and are not processed yet.
    fn arrived(&self) -> &[u8] {
        &self.incoming[..self.n_incoming]
    }

    fn discard(&mut self, n: usize) {
        let n = n.min(self.n_incoming);
        self.incoming.copy_within(n..self.n_incoming, 0);
        self.n_incoming -= n;
    }
}

/// The next action of a handshake.
enum Next {
    Look,
    Write,
    Read,
    Done,
}

trait Side {
    /// Processes the bytes that have arrived.
    fn look(&mut self, buffers: &mut Buffers) -> std::result::Result<Next, rustls::Error>;

    /// Whether there are handshake bytes or alerts left to send.
    fn has_to_say(&self) -> bool;
}

macro_rules! side {
    ($type:ident) => {
        impl Side for $type {
            fn look(&mut self, buffers: &mut Buffers) -> std::result::Result<Next, rustls::Error> {
                let Buffers { incoming, n_incoming, outgoing, plain } = buffers;
                let status = self.process_tls_records(&mut incoming[..*n_incoming]);
                let (discard, next) = handle(status, outgoing, plain);
                buffers.discard(discard);
                match next {
                    Ok(Next::Done) if self.is_handshaking() => Ok(Next::Read),
                    next => next,
                }
            }

            fn has_to_say(&self) -> bool {
                self.wants_write()
            }
        }
    };
}

side!(UnbufferedClientConnection);
side!(UnbufferedServerConnection);

fn handle<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    outgoing: &mut Vec<u8>,
    plain: &mut Vec<u8>,
) -> (usize, std::result::Result<Next, rustls::Error>) {
    let UnbufferedStatus { mut discard, state } = status;
    let next = match state {
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                Some(Ok(record)) => {
                    discard += record.discard;
                    plain.extend(record.payload);
                }
                Some(Err(error)) => break Err(error),
                None => break Ok(Next::Look),
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let start = outgoing.len();
            let needed = match data.encode(&mut []) {
                Err(EncodeError::InsufficientSize(needed)) => needed.required_size,
                Ok(_) | Err(EncodeError::AlreadyEncoded) => 0,
            };
            outgoing.resize(start + needed, 0);
            match data.encode(&mut outgoing[start..]) {
                Ok(_) => Ok(Next::Look),
                Err(error) => Err(rustls::Error::General(error.to_string())),
            }
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(Next::Write)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Next::Read),
        Ok(ConnectionState::WriteTraffic(_)) => Ok(Next::Done),
        Ok(_) => Err(rustls::Error::General("the other side ended the connection in the handshake".into())),
        Err(error) => Err(error),
    };
    (discard, next)
}

async fn shake(tcp: &TcpStream, side: &mut impl Side) -> io::Result<Buffers> {
    let mut buffers = Buffers { incoming: vec![0; 4 << 10], ..Buffers::default() };
    loop {
        match side.look(&mut buffers) {
            Ok(Next::Look) => {}
            Ok(Next::Write) => write_all(tcp, &mut buffers.outgoing).await?,
            Ok(Next::Read) => read_some(tcp, &mut buffers).await?,
            Ok(Next::Done) => return Ok(buffers),
            Err(error) => {
                // Send the alert with the reason, if the peer still reads.
                while side.has_to_say() && matches!(side.look(&mut buffers), Ok(Next::Look)) {}
                let _ = write_all(tcp, &mut buffers.outgoing).await;
                return Err(invalid(error));
            }
        }
    }
}

async fn write_all(tcp: &TcpStream, bytes: &mut Vec<u8>) -> io::Result<()> {
    while !bytes.is_empty() {
        tcp.writable().await?;
        match tcp.try_write(bytes) {
            Ok(n) => drop(bytes.drain(..n)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn read_some(tcp: &TcpStream, buffers: &mut Buffers) -> io::Result<()> {
    if buffers.n_incoming == buffers.incoming.len() {
        if buffers.incoming.len() >= MOST {
            return Err(io::Error::other("the other side's part of the TLS handshake is too long"));
        }
        buffers.incoming.resize(buffers.incoming.len() * 2, 0);
    }
    loop {
        tcp.readable().await?;
        match tcp.try_read(&mut buffers.incoming[buffers.n_incoming..]) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it hung up")),
            Ok(n) => {
                buffers.n_incoming += n;
                return Ok(());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Gives the peer time to read the alert. Closing a socket with unread bytes resets the connection, which discards what
/// was sent.
async fn linger(tcp: &TcpStream) {
    if socket2::SockRef::from(tcp).shutdown(std::net::Shutdown::Write).is_err() {
        return;
    }
    let read = async {
        let (mut bytes, mut n_read) = (vec![0; 4 << 10], 0);
        while n_read < MOST && tcp.readable().await.is_ok() {
            match tcp.try_read(&mut bytes) {
                Ok(0) => return,
                Ok(n) => n_read += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    };
    // A peer that has not closed the connection by then has had time to read the alert.
    let _ = tokio::time::timeout(LINGER, read).await;
}

pub(super) fn invalid(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The caller's error for a failed handshake, or for a connection that is closed right after it.
pub(crate) fn failed(error: &io::Error) -> Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        // The last one is for a certificate whose authority has the right name but another key.
        Some(rustls::Error::AlertReceived(
            BadCertificate
            | UnsupportedCertificate
            | CertificateRevoked
            | CertificateExpired
            | CertificateUnknown
            | UnknownCA
            | AccessDenied
            | CertificateRequired
            | DecryptError,
        )) => Error::new(
            Code::Unauthenticated,
            format!("it refuses our certificate: {error} (is it of the same CA as the server's, and valid today?)"),
        ),
        Some(rustls::Error::InvalidCertificate(_)) => Error::new(
            Code::Unauthenticated,
            format!(
                "the TLS handshake failed: {error} (is the server's certificate of the same CA as ours, valid today, and made \
                 out to this address?)"
            ),
        ),
        _ => Error::unavailable(format!(
            "the TLS handshake failed: {error} (is it a server with TLS, and our certificate of its CA?)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_first_bytes_are_not_ours() {
        assert_eq!(offers_kolo(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Some(false));
        assert_eq!(offers_kolo(b""), None);
        assert_eq!(offers_kolo(&[22, 3, 1]), None, "the beginning of a record");
        assert_eq!(offers_kolo(&[22, 3, 1, 0, 4, 2, 0, 0, 0]), Some(false), "not a client's first message");
    }
}
