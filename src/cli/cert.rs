//! `kolo cert`: certificates for a cluster.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::tls::TlsFiles;
use crate::tls::cert::Authority;
use crate::{Error, Result};
use clap::Subcommand;

use super::print;

/// Flags of `kolo cert`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make an authority, a certificate for every machine of the cluster, and one for clients
    #[command(after_help = "Example:
  kolo cert init certs --hosts ps0.example,w0.example+10.0.0.7,w1.example

makes certs/ca.pem, certs/ca-key.pem, and certs/NAME.pem with certs/NAME-key.pem for ps0.example, w0.example, w1.example
and client. Copy ca.pem and a machine's own two files to it; keep ca-key.pem to yourself: whoever has it can let others in.")]
    Init(Issue),
    /// Make certificates for more machines, with the authority from `kolo cert init`
    Add(Issue),
}

#[derive(clap::Args)]
struct Issue {
    /// Write the certificates to this folder
    dir: PathBuf,
    /// Make certificates for these machines: host names or IP addresses, as in the cluster's addresses. Write a machine
    /// with several names as NAME+NAME
    #[arg(long, value_name = "HOST,HOST", value_delimiter = ',', required = true)]
    hosts: Vec<String>,
    /// Make the certificates valid for this many days
    #[arg(long, default_value_t = 365, value_name = "N")]
    days: u32,
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Init(issue) => init(issue),
        Command::Add(issue) => {
            let (certificate, key) = authority_paths(&issue.dir);
            let authority = Authority::open(&read(&certificate)?, &read(&key)?)?;
            add(issue, &authority, &issue.hosts)
        }
    }
}

fn init(issue: &Issue) -> Result<()> {
    std::fs::create_dir_all(&issue.dir).map_err(|error| {
        Error::failed_precondition(format!("the folder '{}' cannot be made: {error}", issue.dir.display()))
    })?;
    let (certificate, key) = authority_paths(&issue.dir);
    // The authority outlives its certificates a little, so that they end first and are the ones to be renewed.
    let authority = Authority::new(issue.days.saturating_add(30).min(36_500))?;
    write(&key, authority.key().as_bytes(), true)?;
    write(&certificate, authority.certificate().as_bytes(), false)?;
    print(format_args!("{}: the authority's certificate; every machine needs it", certificate.display()))?;
    print(format_args!("{}: its key; no machine needs it, keep it safe", key.display()))?;
    let mut hosts = issue.hosts.clone();
    if !hosts.iter().any(|host| host == "client") {
        hosts.push("client".to_owned());
    }
    add(issue, &authority, &hosts)
}

fn add(issue: &Issue, authority: &Authority, hosts: &[String]) -> Result<()> {
    for host in hosts {
        let names: Vec<String> = host.split('+').map(|name| name.trim().to_owned()).collect();
        let name = names[0].clone();
        let TlsFiles { cert, key, .. } = authority.issue(&name, &names, issue.days)?;
        // Colons of IPv6 addresses are not welcome in file names everywhere.
        let file = name.replace(':', "_");
        let (cert_path, key_path) = (issue.dir.join(format!("{file}.pem")), issue.dir.join(format!("{file}-key.pem")));
        write(&key_path, &key, true)?;
        write(&cert_path, &cert, false)?;
        let whose = match name == "client" {
            true => "for clients".to_owned(),
            false => format!("for {}", names.join(" or ")),
        };
        print(format_args!("{}, {}: {whose}", cert_path.display(), key_path.display()))?;
    }
    Ok(())
}

fn authority_paths(dir: &Path) -> (PathBuf, PathBuf) {
    (dir.join("ca.pem"), dir.join("ca-key.pem"))
}

/// Writes a new file; an existing one is never overwritten. Keys are readable only by their owner.
fn write(path: &Path, bytes: &[u8], is_secret: bool) -> Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(if is_secret { 0o600 } else { 0o644 });
    }
    #[cfg(not(unix))]
    let _ = is_secret;
    let written = options.open(path).and_then(|mut file| file.write_all(bytes));
    written.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Error::new(
            crate::Code::AlreadyExists,
            format!("'{}' exists already; remove it, or use another folder, or `kolo cert add`", path.display()),
        ),
        _ => Error::failed_precondition(format!("'{}' cannot be written: {error}", path.display())),
    })
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| {
        Error::failed_precondition(format!(
            "'{}' cannot be read: {error}; `kolo cert init` makes an authority",
            path.display()
        ))
    })
}
