//! Server processes for benches, ended with them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use crate::tls::cert::Authority;
use crate::tls::{Security, TlsFiles};
use crate::{Connect as _, Error, Graph, Result, Session, SessionConfig};

/// Processes `kolo serve` on this machine.
pub struct Servers {
    children: Vec<Child>,
    /// As `--cluster` takes it.
    pub cluster: String,
    workers: Vec<String>,
    security: Security,
    /// Certificates, for as long as servers may read them.
    folder: Option<std::path::PathBuf>,
}

impl Servers {
    /// So many parameter servers and workers.
    pub fn start(n_ps: usize, n_workers: usize) -> Result<Servers> {
        Servers::start_with(n_ps, n_workers, &[])
    }

    /// The same with further flags.
    pub fn start_with(n_ps: usize, n_workers: usize, flags: &[&str]) -> Result<Servers> {
        let mut servers = Servers::addresses(n_ps, n_workers)?;
        for (job, n) in [("ps", n_ps), ("worker", n_workers)] {
            for task in 0..n {
                servers.serve(job, task, flags)?;
            }
        }
        Ok(servers)
    }

    /// The same with certificates that both sides show.
    pub fn start_with_tls(n_ps: usize, n_workers: usize, more: &[&str]) -> Result<Servers> {
        let TlsFiles { ca, cert, key } = Authority::new(2)?.issue("bench", &["127.0.0.1".to_owned()], 1)?;
        let folder = std::env::temp_dir().join(format!("kolo-bench-tls-{}", std::process::id()));
        let wrong = |error: std::io::Error| Error::failed_precondition(format!("{}: {error}", folder.display()));
        std::fs::create_dir_all(&folder).map_err(wrong)?;
        let mut servers = Servers::addresses(n_ps, n_workers)?;
        servers.folder = Some(folder.clone());
        let mut flags = Vec::new();
        for (flag, bytes) in [("--tls-ca", &ca), ("--tls-cert", &cert), ("--tls-key", &key)] {
            let path = folder.join(&flag[2..]);
            write_private(&path, bytes).map_err(wrong)?;
            flags.extend([flag.to_owned(), path.to_string_lossy().into_owned()]);
        }
        servers.security = Security { tls: Some(TlsFiles { ca, cert, key }), ..Security::default() };
        let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
        for (job, n) in [("ps", n_ps), ("worker", n_workers)] {
            (0..n).try_for_each(|task| servers.serve(job, task, &flags))?;
        }
        Ok(servers)
    }

    /// A session on the first worker.
    pub fn connect(&self, graph: &Graph) -> Result<Arc<Session>> {
        let config = SessionConfig::default();
        Session::connect_secured(&self.target(0), graph, config, &self.security).map(Arc::new)
    }

    /// Addresses that are free, and nobody there yet.
    pub fn addresses(n_ps: usize, n_workers: usize) -> Result<Servers> {
        let wrong = |error: std::io::Error| Error::unavailable(format!("no free port: {error}"));
        let bound =
            (0..n_ps + n_workers).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<std::io::Result<Vec<_>>>();
        let addresses: Vec<String> = bound
            .and_then(|all| all.iter().map(|one| one.local_addr().map(|at| at.to_string())).collect())
            .map_err(wrong)?;
        let (ps, workers) = addresses.split_at(n_ps);
        let jobs = [("ps", ps), ("worker", workers)].into_iter().filter(|(_, list)| !list.is_empty());
        let cluster = jobs.map(|(job, list)| format!("{job}={}", list.join(","))).collect::<Vec<_>>().join(";");
        let workers = workers.to_vec();
        Ok(Servers { children: Vec::new(), cluster, workers, security: Security::default(), folder: None })
    }

    /// Starts one task and waits until it serves.
    pub fn serve(&mut self, job: &str, task: usize, flags: &[&str]) -> Result<()> {
        let program = std::env::current_exe().map_err(|error| Error::internal(error.to_string()))?;
        let mut command = Command::new(program);
        command.args(["serve", "--with-parent", "--cluster", &self.cluster, "--job", job, "--task", &task.to_string()]);
        let spawned = command.args(flags).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| Error::unavailable(format!("no server: {error}")))?;
        let mut line = String::new();
        let out = child.stdout.take();
        self.children.push(child);
        let read = out.map(|out| BufReader::new(out).read_line(&mut line)).transpose();
        match read {
            Ok(Some(n)) if n > 0 => Ok(()),
            _ => Err(Error::unavailable(format!("/job:{job}/task:{task} did not start"))),
        }
    }

    /// The target of a worker.
    pub fn target(&self, worker: usize) -> String {
        format!("grpc://{}", self.workers[worker])
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// Keys that others may read are refused.
fn write_private(path: &std::path::Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}

/// Bytes per second through a plain socket of this machine, into memory that is used again: the median of the best.
pub fn raw_loopback(size: usize) -> Result<f64> {
    let wrong = |error: std::io::Error| Error::unavailable(format!("loopback: {error}"));
    let listener = TcpListener::bind("127.0.0.1:0").map_err(wrong)?;
    let address = listener.local_addr().map_err(wrong)?;
    let receive = move || -> std::io::Result<()> {
        let mut stream = TcpStream::connect(address)?;
        let mut buffer = vec![0; size];
        for _ in 0..7 {
            stream.read_exact(&mut buffer)?;
            stream.write_all(b"x")?;
        }
        Ok(())
    };
    let receiver = std::thread::Builder::new().name("loopback".to_owned()).spawn(receive).map_err(wrong)?;
    let (mut stream, _) = listener.accept().map_err(wrong)?;
    let data = vec![1u8; size];
    let mut rates = Vec::new();
    for _ in 0..7 {
        let start = Instant::now();
        stream.write_all(&data).and_then(|()| stream.read_exact(&mut [0])).map_err(wrong)?;
        rates.push(size as f64 / start.elapsed().as_secs_f64());
    }
    receiver.join().map_err(|_| Error::internal("loopback"))?.map_err(wrong)?;
    rates.sort_by(f64::total_cmp);
    Ok(rates[4])
}
