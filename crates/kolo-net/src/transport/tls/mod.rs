//! Authentication of peers: TLS 1.3 with client certificates, or a token, or none if that is requested explicitly.
//!
//! With TLS every task has a certificate that is signed by one certificate authority of the cluster ([`cert`] issues
//! them), and presents it both as client and as server. A token is a shared secret; without TLS it is sent in plain
//! text, so it is for networks that are trusted but shared. On loopback a server that was given neither requires the token
//! of its own user, which the clients of that user find by themselves (`transport/user_token.rs`).

pub mod cert;
mod handshake;
pub(crate) mod pinned;
mod records;
mod stream;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::{HeaderMap, HeaderValue};
use kolo_core::{Code, Error, Result};
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig, crypto};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::user_token::{UserToken, read_private};

pub use super::user_token::random_token;
pub(crate) use handshake::failed;
pub(crate) use stream::TlsStream;

/// The ALPN protocols: HTTP/2, for gRPC, and Kolo's own.
const HTTP2: &[u8] = b"h2";
const KOLO: &[u8] = b"kolo/1";
/// And that of connections between the ranks of a group.
const RANKS: &[u8] = b"kolo-ranks/1";

/// How a server and its clients authenticate each other.
#[derive(Clone, Debug, Default)]
pub struct Security {
    /// Certificates, for both directions.
    pub tls: Option<TlsFiles>,
    /// A token that clients present.
    pub token: Option<Token>,
    /// Whether a server may accept everybody who reaches it, with neither.
    pub insecure: bool,
    /// The same, for a server on loopback, where everybody is any user of this machine. A client with this presents no
    /// token of its user.
    pub insecure_loopback: bool,
    /// Whether a server accepts gRPC connections from this machine without a token if they are its own user's, as far as
    /// the kernel knows; for TensorFlow's clients, which cannot send a token. Linux only.
    pub same_user: bool,
}

/// What a client presents to servers.
#[derive(Clone, Debug, Default)]
pub enum Credentials {
    /// No token.
    #[default]
    Nothing,
    /// A token, to every server.
    Token(Token),
    /// The token of this user, if there is one, to servers on loopback.
    User,
}

impl Credentials {
    /// The token for a server at this address.
    pub(crate) fn token_for(&self, server: SocketAddr) -> Result<Option<Token>> {
        match self {
            Credentials::Nothing => Ok(None),
            Credentials::Token(token) => Ok(Some(token.clone())),
            Credentials::User if !server.ip().to_canonical().is_loopback() => Ok(None),
            Credentials::User => UserToken::find()?.map(|user| user.token(server.port())).transpose(),
        }
    }
}

/// The token that a server requires, and the file that it is derived from, if it is the user's.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequiredToken {
    pub token: Option<Token>,
    pub file: Option<PathBuf>,
}

impl Security {
    /// An error if a server that listens on this address would accept unauthenticated peers.
    pub fn check_bind(&self, address: SocketAddr) -> Result<()> {
        let is_loopback = address.ip().is_loopback();
        if self.insecure_loopback && !is_loopback {
            return Err(Error::invalid_argument(format!(
                "--insecure-loopback is for addresses such as 127.0.0.1, and {address} can be reached from other machines"
            )));
        }
        if self.same_user && !cfg!(target_os = "linux") {
            return Err(Error::unimplemented(
                "--same-user asks Linux whose a connection is; on this system say --insecure-loopback",
            ));
        }
        if is_loopback || self.tls.is_some() || self.token.is_some() || self.insecure {
            return Ok(());
        }
        Err(Error::failed_precondition(format!(
            "{address} can be reached from other machines, and whoever reaches it can run any graph here. Give certificates \
             (--tls-ca, --tls-cert, --tls-key; `kolo cert init` makes them), or a token (--token-file), or listen on 127.0.0.1, or \
             say --insecure if everybody on that network may"
        )))
    }

    /// The token that callers of a server at this address must present: the given one, or that of this user on loopback
    /// if there are no certificates either.
    pub(crate) fn required_token(&self, address: SocketAddr) -> Result<RequiredToken> {
        let is_open = self.tls.is_some() || self.insecure || self.insecure_loopback;
        if self.token.is_some() || is_open || !address.ip().is_loopback() {
            return Ok(RequiredToken { token: self.token.clone(), file: None });
        }
        let user = UserToken::find_or_create()?;
        Ok(RequiredToken { token: Some(user.token(address.port())?), file: Some(user.path().to_owned()) })
    }

    /// What a client with these settings presents.
    pub fn credentials(&self) -> Credentials {
        match &self.token {
            Some(token) => Credentials::Token(token.clone()),
            None if self.tls.is_some() || self.insecure_loopback => Credentials::Nothing,
            None => Credentials::User,
        }
    }

    /// The server's side of TLS, if it is configured.
    pub fn server_tls(&self) -> Result<Option<ServerTls>> {
        self.tls.as_ref().map(TlsFiles::server).transpose()
    }

    /// The client's side of TLS, if it is configured.
    pub fn client_tls(&self) -> Result<Option<ClientTls>> {
        self.tls.as_ref().map(TlsFiles::client).transpose()
    }
}

/// A task's certificates, in PEM form.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate of the cluster's authority.
    pub ca: Vec<u8>,
    /// The task's certificate.
    pub cert: Vec<u8>,
    /// The private key of the certificate.
    pub key: Vec<u8>,
}

/// Keeps the key out of logs.
impl fmt::Debug for TlsFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsFiles").finish_non_exhaustive()
    }
}

impl TlsFiles {
    /// Reads the three files. A key that others may read is refused.
    pub fn read(ca: &Path, cert: &Path, key: &Path) -> Result<TlsFiles> {
        let read = |what: &str, path: &Path| {
            std::fs::read(path).map_err(|error| {
                let code = if error.kind() == std::io::ErrorKind::NotFound {
                    Code::NotFound
                } else {
                    Code::FailedPrecondition
                };
                Error::new(code, format!("{what} '{}' cannot be read: {error}", path.display()))
            })
        };
        Ok(TlsFiles {
            ca: read("the CA certificate", ca)?,
            cert: read("the certificate", cert)?,
            key: read_private("the key", key)?,
        })
    }

    /// For a server: clients must present a certificate of the same authority.
    pub fn server(&self) -> Result<ServerTls> {
        let provider = provider();
        let callers = WebPkiClientVerifier::builder_with_provider(Arc::new(self.roots()?), provider.clone())
            .build()
            .map_err(|error| bad("the CA certificate", error))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| bad("TLS 1.3", error))?
            .with_client_cert_verifier(callers)
            .with_single_cert(self.chain()?, self.private_key()?)
            .map_err(|error| bad("the certificate and its key", error))?;
        config.alpn_protocols.push(HTTP2.to_vec());
        let mut own = config.clone();
        own.alpn_protocols = vec![KOLO.to_vec()];
        // The code in `records` needs the traffic secrets, and does not support session tickets.
        own.enable_secret_extraction = true;
        own.send_tls13_tickets = 0;
        Ok(ServerTls { http: TlsAcceptor::from(Arc::new(config)), own: Arc::new(own) })
    }

    /// For a client: the server must present a certificate of the same authority that is valid for its address.
    pub fn client(&self) -> Result<ClientTls> {
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| bad("TLS 1.3", error))?
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(self.chain()?, self.private_key()?)
            .map_err(|error| bad("the certificate and its key", error))?;
        config.alpn_protocols.push(HTTP2.to_vec());
        let mut own = config.clone();
        own.alpn_protocols = vec![KOLO.to_vec(), HTTP2.to_vec()];
        own.enable_secret_extraction = true;
        own.resumption = Resumption::disabled();
        Ok(ClientTls { http: TlsConnector::from(Arc::new(config)), own: Arc::new(own) })
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        for cert in certificates("the CA certificate", &self.ca)? {
            roots.add(cert).map_err(|error| bad("the CA certificate", error))?;
        }
        Ok(roots)
    }

    fn chain(&self) -> Result<Vec<CertificateDer<'static>>> {
        certificates("the certificate", &self.cert)
    }

    fn private_key(&self) -> Result<PrivateKeyDer<'static>> {
        PrivateKeyDer::from_pem_slice(&self.key).map_err(|error| bad("the key", error))
    }
}

/// The library's cipher suites, the fastest first: AES with 128-bit keys takes a quarter less time than with 256-bit
/// keys, and both are secure.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = crypto::ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

fn certificates(what: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if found.is_empty() => Err(bad(what, "there is no certificate in it; it should be PEM")),
        Ok(found) => Ok(found),
        Err(error) => Err(bad(what, error)),
    }
}

fn bad(what: &str, error: impl fmt::Display) -> Error {
    Error::invalid_argument(format!("{what} cannot be used: {error}"))
}

/// The server's side of TLS.
#[derive(Clone)]
pub struct ServerTls {
    /// For gRPC.
    http: TlsAcceptor,
    /// For Kolo's own transport.
    own: Arc<ServerConfig>,
}

impl ServerTls {
    pub(crate) fn acceptor(&self) -> &TlsAcceptor {
        &self.http
    }

    /// For connections between ranks.
    pub(crate) fn rank_config(&self) -> Arc<ServerConfig> {
        let mut config = ServerConfig::clone(&self.own);
        (config.alpn_protocols, config.enable_secret_extraction) = (vec![RANKS.to_vec()], false);
        Arc::new(config)
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerTls")
    }
}

/// The client's side of TLS.
#[derive(Clone)]
pub struct ClientTls {
    /// For gRPC.
    http: TlsConnector,
    /// For Kolo's own transport, if the server supports it.
    own: Arc<ClientConfig>,
}

impl ClientTls {
    pub(crate) fn connector(&self) -> &TlsConnector {
        &self.http
    }

    /// For connections between ranks.
    pub(crate) fn rank_config(&self) -> Arc<ClientConfig> {
        let mut config = ClientConfig::clone(&self.own);
        (config.alpn_protocols, config.enable_secret_extraction) = (vec![RANKS.to_vec()], false);
        Arc::new(config)
    }

    /// The name that the server's certificate must be valid for: the host of its address.
    pub(crate) fn server_name(&self, address: &str) -> Result<ServerName<'static>> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        ServerName::try_from(host).map_err(|error| Error::invalid_argument(format!("the address '{address}': {error}")))
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientTls")
    }
}

/// A shared secret that clients send with every call.
#[derive(Clone)]
pub struct Token(HeaderValue);

/// Keeps the secret out of logs.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

const SCHEME: &str = "Bearer ";

/// What to do about a token that is missing or wrong.
pub(crate) const REMEDY: &str = "give it in KOLO_TOKEN or --token-file; on loopback, a server without a token of its own is \
     open to Kolo's clients of the same user, and to TensorFlow's if it was started with --same-user or --insecure-loopback";

impl Token {
    /// Reads a token from a file that only this user can read.
    pub fn read(path: &Path) -> Result<Token> {
        let bytes = read_private("the token file", path)?;
        Token::new(&String::from_utf8_lossy(&bytes)).map_err(|error| error.context(path.display()))
    }
}

impl Token {
    /// The token with this text: at least 16 visible ASCII characters.
    pub fn new(text: &str) -> Result<Token> {
        let text = text.trim();
        if text.len() < 16 || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::invalid_argument(
                "a token must be at least 16 visible ASCII characters long; `openssl rand -hex 32` makes a good one",
            ));
        }
        let mut header = HeaderValue::from_str(&format!("{SCHEME}{text}"))
            .map_err(|_| Error::invalid_argument("a token must be visible ASCII characters"))?;
        header.set_sensitive(true);
        Ok(Token(header))
    }

    /// The secret itself, for the environment of a child process. It is not for flags or logs.
    pub fn secret(&self) -> String {
        let bytes = self.0.as_bytes();
        String::from_utf8_lossy(bytes.strip_prefix(SCHEME.as_bytes()).unwrap_or(bytes)).into_owned()
    }

    /// Whether a text is this token; compares in constant time.
    pub(crate) fn is(&self, text: &str) -> bool {
        same(text.as_bytes(), self.secret().as_bytes())
    }

    /// The value of the `authorization` header.
    pub(crate) fn header(&self) -> HeaderValue {
        self.0.clone()
    }

    /// An error if the client did not send this token. Compares in constant time, so that timing does not reveal a
    /// partial match.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<()> {
        let Some(shown) = headers.get(http::header::AUTHORIZATION) else {
            return Err(Error::new(
                Code::Unauthenticated,
                format!("this server wants a token, and none was sent; {REMEDY}"),
            ));
        };
        match same(shown.as_bytes(), self.0.as_bytes()) {
            true => Ok(()),
            false => Err(Error::new(Code::Unauthenticated, format!("the token is not this server's; {REMEDY}"))),
        }
    }
}

/// Compares in a time that depends only on the lengths.
fn same(left: &[u8], right: &[u8]) -> bool {
    let mut difference = u8::from(left.len() != right.len());
    for (left, right) in left.iter().zip(right) {
        // Keeps the compiler from ending the loop early once the result is known.
        difference = std::hint::black_box(difference | (left ^ right));
    }
    difference == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_are_let_in_only_if_asked() {
        let open = Security::default();
        let check = |security: &Security, address: &str| security.check_bind(address.parse().unwrap());
        assert!(check(&open, "127.0.0.1:80").is_ok());
        assert!(check(&open, "[::1]:80").is_ok());
        for address in ["0.0.0.0:80", "192.168.0.1:80", "[::]:80"] {
            let error = check(&open, address).unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition);
            assert!(error.message().contains(address) && error.message().contains("--insecure"), "{error}");
            assert!(check(&Security { insecure: true, ..open.clone() }, address).is_ok());
            let error = check(&Security { insecure_loopback: true, ..open.clone() }, address).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
            let token = Some(Token::new("0123456789abcdef").unwrap());
            assert!(check(&Security { token, ..open.clone() }, address).is_ok());
        }
    }

    #[test]
    fn only_the_right_token_is_right() {
        let token = Token::new("0123456789abcdef").unwrap();
        let mut headers = HeaderMap::new();
        assert!(token.check(&headers).unwrap_err().message().contains("none was sent"));
        headers.insert("authorization", token.header());
        assert_eq!(token.check(&headers), Ok(()));
        for wrong in
            ["Bearer 0123456789abcdeg", "Bearer 0123456789abcde", "Bearer 0123456789abcdeff", "0123456789abcdef"]
        {
            headers.insert("authorization", HeaderValue::from_static(wrong));
            assert_eq!(token.check(&headers).unwrap_err().code(), Code::Unauthenticated);
        }
        assert!(Token::new("short").is_err() && Token::new("with a space in it").is_err());
        assert_eq!(format!("{token:?}"), "Token");
    }

    #[test]
    fn bad_files_are_named() {
        let files = TlsFiles { ca: b"x".to_vec(), cert: Vec::new(), key: Vec::new() };
        assert!(files.server().unwrap_err().message().contains("the CA certificate"));
        assert!(files.client().unwrap_err().message().contains("no certificate in it"));
        let missing = Path::new("/nonexistent/ca.pem");
        let error = TlsFiles::read(missing, missing, missing).unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.message().contains("/nonexistent/ca.pem"));
    }
}
