//! Flags for authentication, of servers and of their clients.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::tls::{Security, TlsFiles, Token};
use crate::{Error, Result};

/// How peers are authenticated, and what this process presents to them. Each flag can be given as an environment
/// variable, so that one line in a profile serves all commands.
#[derive(Clone, Default, clap::Args)]
pub struct SecurityFlags {
    /// Trust this authority's certificate, from `kolo cert init` [default: $KOLO_TLS_CA]
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    tls_ca: Option<PathBuf>,
    /// Present this certificate of this machine [default: $KOLO_TLS_CERT]
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    tls_cert: Option<PathBuf>,
    /// Use this key of --tls-cert [default: $KOLO_TLS_KEY]
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    tls_key: Option<PathBuf>,
    /// Require and present this secret, shared by all tasks and clients, of 16 characters or more [default:
    /// $KOLO_TOKEN]. Other users of this machine can read flags, so prefer the variable or --token-file
    #[arg(long, value_name = "SECRET", help_heading = "Security", conflicts_with = "token_file")]
    token: Option<String>,
    /// Read the token from this file
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    token_file: Option<PathBuf>,
    /// Accept other machines without certificates or a token: anyone who reaches the port can run anything
    #[arg(long, help_heading = "Security")]
    insecure: bool,
}

/// A token is not for logs.
impl fmt::Debug for SecurityFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecurityFlags").field("insecure", &self.insecure).finish_non_exhaustive()
    }
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
        let token = match (&self.token, &self.token_file) {
            (Some(text), _) => Some(text.clone()),
            (None, Some(file)) => Some(read_token(file)?),
            (None, None) => std::env::var("KOLO_TOKEN").ok().filter(|text| !text.is_empty()),
        };
        let token = token.map(|text| Token::new(text.trim())).transpose()?;
        Ok(Security { tls, token, insecure: self.insecure })
    }

    /// The flags for a child process with the same settings.
    pub fn args(&self) -> Vec<String> {
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
        if let Some(token) = &self.token {
            args.extend(["--token".to_owned(), token.clone()]);
        }
        if self.insecure {
            args.push("--insecure".to_owned());
        }
        args
    }
}

fn path(variable: &str, flag: &Option<PathBuf>) -> Option<PathBuf> {
    flag.clone().or_else(|| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from))
}

fn read_token(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).map_err(|error| {
        Error::failed_precondition(format!("the token file '{}' cannot be read: {error}", file.display()))
    })
}
