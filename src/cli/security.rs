//! Flags about who is let in, for servers and for those who call them.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::tls::{Security, TlsFiles, Token};
use crate::{Error, Result};

/// Who is let in, and what this process shows to others. Each flag has an environment variable that stands in for it, so
/// that one line in a profile serves all commands.
#[derive(Clone, Default, clap::Args)]
pub struct SecurityFlags {
    /// The certificate of the cluster's authority, from `kolo cert init`; $KOLO_TLS_CA if absent
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    tls_ca: Option<PathBuf>,
    /// This machine's certificate; $KOLO_TLS_CERT if absent
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    tls_cert: Option<PathBuf>,
    /// The key of --tls-cert; $KOLO_TLS_KEY if absent
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    tls_key: Option<PathBuf>,
    /// A secret that all tasks and clients share, of 16 characters or more; $KOLO_TOKEN if absent. Other users of this
    /// machine can read flags, so the variable or --token-file is better
    #[arg(long, value_name = "SECRET", help_heading = "Security", conflicts_with = "token_file")]
    token: Option<String>,
    /// A file that holds the token
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    token_file: Option<PathBuf>,
    /// Listens to other machines with neither certificates nor a token: whoever reaches the port may run anything
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
    /// What the flags and the environment say, with the files read.
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

    /// The flags again, for another process that is to be given the same.
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
