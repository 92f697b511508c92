//! TLS between ends without an authority: the client knows the fingerprint of the server's certificate.

use std::sync::Arc;

use kolo_core::{Error, Result};
use ring::digest::{SHA256, digest};
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    self, CertificateError, ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::cert::Authority;
use super::{bad, provider};

/// What every such server is called: its name says nothing.
const NAME: &str = "kolo-launch";

/// How long a certificate is valid, in days. It is used by one process, for as long as that runs.
const DAYS: u32 = 3650;

/// A server with a certificate of its own, and the fingerprint of that.
pub(crate) fn server() -> Result<(TlsAcceptor, [u8; 32])> {
    let files = Authority::new(DAYS)?.issue(NAME, &[NAME.to_owned()], DAYS)?;
    let chain = files.chain()?;
    let fingerprint = chain.first().map(|certificate| fingerprint(certificate));
    let fingerprint = fingerprint.ok_or_else(|| Error::internal("a certificate was made, and there is none"))?;
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| bad("TLS 1.3", error))?
        .with_no_client_auth()
        .with_single_cert(chain, files.private_key()?)
        .map_err(|error| bad("the certificate and its key", error))?;
    Ok((TlsAcceptor::from(Arc::new(config)), fingerprint))
}

/// A client of the server whose certificate has this fingerprint, and of no other.
pub(crate) fn client(fingerprint: [u8; 32]) -> Result<TlsConnector> {
    let provider = provider();
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| bad("TLS 1.3", error))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned { fingerprint, provider }))
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// The name that a client asks for.
pub(crate) fn name() -> Result<ServerName<'static>> {
    ServerName::try_from(NAME).map_err(|error| Error::internal(error.to_string()))
}

fn fingerprint(certificate: &CertificateDer<'_>) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest(&SHA256, certificate.as_ref()).as_ref());
    bytes
}

/// Accepts one certificate, and that its server has the key of it.
#[derive(Debug)]
struct Pinned {
    fingerprint: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        match fingerprint(certificate) == self.fingerprint {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken here".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
