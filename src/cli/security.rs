//! Flags for authentication, of servers and of their clients.

use std::path::PathBuf;

use crate::tls::{Security, TlsFiles, Token};
use crate::{Error, Result};

/// What this process presents to servers. Each flag can be given as an environment variable, so that one line in a profile
/// serves all commands.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SecurityFlags {
    /// Trust this authority's certificate, from `kolo cert init` [default: $KOLO_TLS_CA]
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    tls_ca: Option<PathBuf>,
    /// Present this certificate of this machine [default: $KOLO_TLS_CERT]
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    tls_cert: Option<PathBuf>,
    /// Use this key of --tls-cert; a file that others may read is refused [default: $KOLO_TLS_KEY]
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    tls_key: Option<PathBuf>,
    /// Read the token from this file: a secret of 16 characters or more, shared by all tasks and clients; a file that
    /// others may read is refused [default: $KOLO_TOKEN; on loopback, the token of this user]
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    token_file: Option<PathBuf>,
    /// Refused: other users of this machine can read flags. Use --token-file, or the variable KOLO_TOKEN
    #[arg(long, hide = true, value_parser = refuse_token)]
    token: Option<String>,
}

/// Whom a server accepts, besides what it presents to others.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServerSecurityFlags {
    #[command(flatten)]
    peers: SecurityFlags,
    /// Accept other machines without certificates or a token: anyone who reaches the port can run anything
    #[arg(long, help_heading = "Security")]
    insecure: bool,
    /// Accept connections from this machine without a token: every user and every program on it, a browser's page
    /// included, can then run graphs as you and reach the files below --allow-dir. For TensorFlow's clients, which cannot
    /// send a token, where --same-user does not work
    #[arg(long, help_heading = "Security")]
    insecure_loopback: bool,
    /// Accept gRPC connections from this machine without a token if the kernel says that they are your own; for
    /// TensorFlow's clients (Linux)
    #[arg(long, help_heading = "Security", conflicts_with = "insecure_loopback")]
    same_user: bool,
}

impl SecurityFlags {
    /// The settings from flags and environment, with the files read.
    pub fn read(&self) -> Result<Security> {
        let ca = path("KOLO_TLS_CA", &self.tls_ca);
        let cert = path("KOLO_TLS_CERT", &self.tls_cert);
        let key = path("KOLO_TLS_KEY", &self.tls_key);
        let tls = match (&ca, &cert, &key) {
            (None, None, None) => None,
            (Some(ca), Some(cert), Some(key)) => Some(TlsFiles::read(ca, cert, key)?),
            _ => {
                let missing = [("--tls-ca", &ca), ("--tls-cert", &cert), ("--tls-key", &key)]
                    .into_iter()
                    .filter_map(|(flag, path)| path.is_none().then_some(flag))
                    .collect::<Vec<_>>();
                return Err(Error::invalid_argument(format!(
                    "TLS needs three files, and {} is not given; `kolo cert init` makes them",
                    missing.join(" and ")
                )));
            }
        };
        if let Some(tls) = &tls {
            // A wrong file is better noticed now than by the first caller.
            tls.client()?;
        }
        let token = match &self.token_file {
            Some(file) => Some(Token::read(file)?),
            None => match std::env::var("KOLO_TOKEN") {
                Ok(text) if !text.is_empty() => Some(Token::new(&text).map_err(|error| error.context("KOLO_TOKEN"))?),
                _ => None,
            },
        };
        Ok(Security { tls, token, ..Security::default() })
    }

    /// The flags for a child process with the same settings.
    fn args(&self) -> Vec<String> {
        let mut args = Vec::new();
        let paths = [
            ("--tls-ca", &self.tls_ca),
            ("--tls-cert", &self.tls_cert),
            ("--tls-key", &self.tls_key),
            ("--token-file", &self.token_file),
        ];
        for (flag, path) in paths {
            if let Some(path) = path {
                args.extend([flag.to_owned(), path.display().to_string()]);
            }
        }
        args
    }
}

impl ServerSecurityFlags {
    /// The settings from flags and environment, with the files read.
    pub fn read(&self) -> Result<Security> {
        let Security { tls, token, .. } = self.peers.read()?;
        Ok(Security {
            tls,
            token,
            insecure: self.insecure,
            insecure_loopback: self.insecure_loopback,
            same_user: self.same_user,
        })
    }

    /// The flags for a child process with the same settings.
    pub fn args(&self) -> Vec<String> {
        let own = [
            ("--insecure", self.insecure),
            ("--insecure-loopback", self.insecure_loopback),
            ("--same-user", self.same_user),
        ];
        let own = own.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag.to_owned());
        self.peers.args().into_iter().chain(own).collect()
    }
}

fn path(variable: &str, flag: &Option<PathBuf>) -> Option<PathBuf> {
    flag.clone().or_else(|| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from))
}

fn refuse_token(_: &str) -> std::result::Result<String, String> {
    Err("other users of this machine can read flags; put the token into a file of mode 600 and give --token-file FILE, or \
         set KOLO_TOKEN"
        .to_owned())
}
