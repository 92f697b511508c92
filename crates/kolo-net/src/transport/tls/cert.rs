//! Certificates for a cluster: one authority, and one certificate for each task.

use std::net::IpAddr;
use std::time::Duration;

use kolo_core::{Error, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

use super::TlsFiles;

/// Certificates are backdated by this much, because the clocks of a cluster's machines differ a little.
const BACKDATED: Duration = Duration::from_secs(3600);

/// The subject name of all authorities. Verifiers tell them apart by their keys, so an authority can be loaded again
/// from its key alone.
const NAME: &str = "Kolo cluster CA";

/// A certificate authority, with its key: it can issue certificates for tasks.
pub struct Authority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// A new authority, valid for `days`.
    pub fn new(days: u32) -> Result<Authority> {
        let mut params = authority_params()?;
        set_validity(&mut params, days)?;
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.self_signed(&key).map_err(failed)?.pem();
        Ok(Authority { certificate, issuer: Issuer::new(params, key) })
    }

    /// Loads an existing authority from its certificate and its key in PEM form.
    pub fn open(certificate: &str, key: &str) -> Result<Authority> {
        let key = KeyPair::from_pem(key)
            .map_err(|error| Error::invalid_argument(format!("the authority's key cannot be used: {error}")))?;
        Ok(Authority { certificate: certificate.to_owned(), issuer: Issuer::new(authority_params()?, key) })
    }

    /// The authority's certificate, which every task needs, in PEM form.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// The authority's key, which no task needs, in PEM form.
    pub fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a certificate for a task that is reached under these host names and addresses, valid for `days`. `name`
    /// is only for display. The certificate is for both server and client authentication.
    pub fn issue(&self, name: &str, hosts: &[String], days: u32) -> Result<TlsFiles> {
        if hosts.is_empty() {
            return Err(Error::invalid_argument(format!("a certificate for {name} needs a host name or address")));
        }
        for host in hosts.iter().filter(|host| host.parse::<IpAddr>().is_err()) {
            if !crate::cluster::is_host_name(host) {
                return Err(Error::invalid_argument(format!("'{host}' is neither a host name nor an address")));
            }
        }
        let mut params = CertificateParams::new(hosts.to_vec()).map_err(failed)?;
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, name);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        set_validity(&mut params, days)?;
        let key = KeyPair::generate().map_err(failed)?;
        let cert = params.signed_by(&key, &self.issuer).map_err(failed)?;
        Ok(TlsFiles {
            ca: self.certificate.clone().into_bytes(),
            cert: cert.pem().into_bytes(),
            key: key.serialize_pem().into_bytes(),
        })
    }
}

fn authority_params() -> Result<CertificateParams> {
    let mut params = CertificateParams::new(Vec::new()).map_err(failed)?;
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::CommonName, NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn set_validity(params: &mut CertificateParams, days: u32) -> Result<()> {
    let now = std::time::SystemTime::now();
    let lifetime = Duration::from_secs(u64::from(days) * 24 * 3600);
    let until = now.checked_add(lifetime).filter(|_| (1..=36_500).contains(&days));
    let until =
        until.ok_or_else(|| Error::invalid_argument(format!("a validity of {days} days; 1 to 36500 are possible")))?;
    params.not_before = (now - BACKDATED).into();
    params.not_after = until.into();
    Ok(())
}

fn failed(error: rcgen::Error) -> Error {
    Error::internal(format!("a certificate could not be made: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_can_use_what_the_authority_makes() {
        let authority = Authority::new(2).unwrap();
        let files = authority.issue("/job:ps/task:0", &["localhost".into(), "127.0.0.1".into()], 1).unwrap();
        assert!(files.server().is_ok() && files.client().is_ok());
        let other = authority.issue("other", &["::1".into()], 1).unwrap();
        let mixed = TlsFiles { key: other.key, ..files };
        assert!(mixed.server().unwrap_err().message().contains("the certificate and its key"));
        assert!(authority.key().contains("PRIVATE KEY"));
        assert!(authority.issue("x", &[], 1).is_err());
        assert!(authority.issue("x", &["a b".into()], 1).unwrap_err().message().contains("'a b'"));
        assert!(authority.issue("x", &["localhost".into()], 0).is_err());
    }
}
