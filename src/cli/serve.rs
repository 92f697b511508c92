//! `kolo serve`: one task of a cluster.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::{
    ClusterSpec, Durability, Error, FileAccess, MessageLimits, Result, Server, ServerConfig, SessionConfig, TaskName,
};
use clap::ValueEnum;

use super::print;
use super::security::ServerSecurityFlags;
use super::signals;
use super::task::TaskFlags;

/// Flags of `kolo serve`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kolo serve --cluster 'ps=127.0.0.1:2222;worker=127.0.0.1:2223,127.0.0.1:2224' --job ps --task 0
  kolo serve --cluster cluster.json --job worker --task 1
  kolo serve                         from TF_CONFIG alone

Clients connect to grpc://HOST:PORT of any task: TensorFlow's tf.Session(\"grpc://127.0.0.1:2223\"), Kolo's
Session::connect, kolo train --target. The server ends on Ctrl-C or SIGTERM.

Graphs may touch files only below --allow-dir. A task on loopback serves the user who started it: Kolo's clients and tasks of
that user find the token by themselves, and TensorFlow's clients need --same-user or --insecure-loopback. A task that other
machines can reach needs certificates (kolo cert init), a token, or the word --insecure. docs/clusters.md leads through a
cluster of three machines.")]
pub struct Args {
    #[command(flatten)]
    task: TaskFlags,
    #[command(flatten)]
    security: ServerSecurityFlags,
    /// Let graphs read and write files below this directory; may be given more than once [default: nowhere]
    #[arg(long, value_name = "DIR", help_heading = "Security")]
    allow_dir: Vec<PathBuf>,
    /// Keep this much if the process is killed and restarted
    #[arg(long, value_enum, default_value_t = Lasts::Checkpoints, requires_ifs = [("logged", "journal"), ("synced", "journal")])]
    durability: Lasts,
    /// Write the log of --durability to a subfolder of this folder, named after the task
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
    /// Replicate to this task with --durability replicated, such as ps:1 [default: the next task of the same job, or
    /// the first of another job]
    #[arg(long, value_name = "JOB:TASK")]
    replica: Option<String>,
    /// Refuse more concurrent sessions than this
    #[arg(long, default_value_t = 10_000, value_name = "N", help_heading = "Limits")]
    max_sessions: usize,
    /// Keep a session this many seconds for a client that has no connection any more; 0 means for ever
    #[arg(long, default_value_t = 600.0, value_name = "SECONDS", help_heading = "Limits")]
    session_lease: f64,
    /// Drop a connection that does not say within this many seconds which protocol it speaks
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS", help_heading = "Limits")]
    first_bytes: f64,
    /// Refuse larger messages with tensors, such as 512M
    #[arg(long, default_value = "2G", value_name = "BYTES", value_parser = parse_bytes, help_heading = "Limits")]
    max_tensor_message: usize,
    /// Refuse larger messages with a graph
    #[arg(long, default_value = "1G", value_name = "BYTES", value_parser = parse_bytes, help_heading = "Limits")]
    max_graph_message: usize,
    /// Create this many devices of a kind, such as CPU=2 [default: one CPU, all visible GPUs]
    #[arg(long, value_name = "KIND=N")]
    device_count: Vec<String>,
    /// Run nodes with this many threads on each device; 0 means this task's share of the cores
    #[arg(long, default_value_t = 0, value_name = "N")]
    inter_op_threads: usize,
    /// Run each kernel with this many threads; 0 means this task's share of the cores
    #[arg(long, default_value_t = 0, value_name = "N")]
    intra_op_threads: usize,
    /// Let a new session wait this many seconds for missing tasks
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS")]
    ready_deadline: f64,
    /// Log what a step waits for after this many seconds; 0 means never
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    report_after: f64,
    /// Stop a step after this many seconds if its session sets no timeout of its own; 0 means never
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS")]
    operation_timeout: f64,
    /// Log where sessions place their nodes
    #[arg(long)]
    log_device_placement: bool,
    /// Answer probes over HTTP at this address: /livez, /readyz and /startupz [default: nowhere]
    #[arg(long, value_name = "HOST:PORT")]
    health: Option<SocketAddr>,
    /// Exit when standard input closes, that is, when the parent process has exited
    #[arg(long, hide = true)]
    with_parent: bool,
    /// Send tensors over TCP even to tasks on this machine [default: shared memory]
    #[arg(long)]
    no_shared_memory: bool,
    /// Use gRPC for all tasks [default: Kolo's own transport between Kolo's tasks]
    #[arg(long)]
    grpc_only: bool,
}

/// What survives if a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Lasts {
    /// Only the chief's checkpoints
    Checkpoints,
    /// Every acknowledged step, as long as the machine stays up
    Logged,
    /// Every acknowledged step, even if the machine goes down; waits for the disk
    Synced,
    /// Every acknowledged step, in the memory of another task; waits for its acknowledgement
    Replicated,
}

pub fn run(args: &Args) -> Result<()> {
    let (cluster, job, task) = args.task.read()?;
    let report_after = seconds("--report-after", args.report_after)?;
    let session_lease = seconds("--session-lease", args.session_lease)?;
    let mut config = ServerConfig {
        session: SessionConfig {
            device_count: device_count(&args.device_count)?,
            inter_op_parallelism_threads: args.inter_op_threads,
            intra_op_parallelism_threads: args.intra_op_threads,
            ..SessionConfig::default()
        },
        ready_deadline: seconds("--ready-deadline", args.ready_deadline)?,
        report_after: (!report_after.is_zero()).then_some(report_after),
        max_sessions: args.max_sessions,
        session_lease: (!session_lease.is_zero()).then_some(session_lease),
        first_bytes: seconds("--first-bytes", args.first_bytes)?,
        limits: MessageLimits {
            tensors: args.max_tensor_message,
            graphs: args.max_graph_message,
            ..MessageLimits::default()
        },
        files: file_access(&args.allow_dir)?,
        durability: match (args.durability, &args.journal) {
            (Lasts::Logged | Lasts::Synced, Some(dir)) => {
                Durability::Logged { dir: dir.join(format!("{job}-{task}")), sync: args.durability == Lasts::Synced }
            }
            (Lasts::Replicated, _) => {
                Durability::Replicated { to: args.replica.as_deref().map(|text| replica(text, &cluster)).transpose()? }
            }
            _ => Durability::Checkpoints,
        },
        security: args.security.read()?,
        grpc_only: args.grpc_only,
        shared_memory: !args.no_shared_memory,
        ..ServerConfig::default()
    };
    config.defaults.log_device_placement = args.log_device_placement;
    let timeout = seconds("--operation-timeout", args.operation_timeout)?.as_millis();
    config.defaults.operation_timeout_in_ms = i64::try_from(timeout).unwrap_or(i64::MAX);
    let server = Arc::new(Server::new(&cluster, &job, task, config)?);
    let stopped = Arc::downgrade(&server);
    signals::on_stop(move || {
        if let Some(server) = stopped.upgrade() {
            server.stop();
        }
    });
    if args.with_parent {
        end_with_parent(&server)?;
    }
    if let Some(address) = args.health {
        let address = server.answer_probes(address).map_err(|error| error.context("--health"))?;
        print(format_args!("answering probes at http://{address}/readyz"))?;
    }
    let to = match server.token_file() {
        Some(file) => format!(", to clients with the token in {}", file.display()),
        None => String::new(),
    };
    print(format_args!("serving {} as /job:{job}/task:{task}{to}", server.target()))?;
    server.join()
}

/// The task that `--replica` names.
fn replica(text: &str, cluster: &ClusterSpec) -> Result<TaskName> {
    let (job, task) = text
        .rsplit_once(':')
        .ok_or_else(|| Error::invalid_argument(format!("--replica '{text}' is not a task; it looks like ps:1")))?;
    let task = cluster.task_index(job, task).map_err(|error| error.context("--replica"))?;
    Ok(TaskName::new(job, task))
}

/// Stops the server when standard input ends.
fn end_with_parent(server: &Arc<Server>) -> Result<()> {
    let server = Arc::downgrade(server);
    let watch = move || {
        // Nothing is ever written there; it ends with the process that holds the other end.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        if let Some(server) = server.upgrade() {
            server.stop();
        }
    };
    let started = std::thread::Builder::new().name("kolo-parent".to_owned()).spawn(watch);
    started.map(drop).map_err(|error| Error::resource_exhausted(format!("no thread: {error}")))
}

/// The files that graphs may touch on a task: those below `allowed`.
pub fn file_access(allowed: &[PathBuf]) -> Result<FileAccess> {
    FileAccess::under(allowed).map_err(|error| error.context("--allow-dir"))
}

/// `512M`, or a number of bytes.
fn parse_bytes(text: &str) -> std::result::Result<usize, String> {
    let (digits, shift) = match text.trim_end_matches(['B', 'b']).to_ascii_uppercase() {
        text if text.ends_with('K') => (text.trim_end_matches('K').to_owned(), 10),
        text if text.ends_with('M') => (text.trim_end_matches('M').to_owned(), 20),
        text if text.ends_with('G') => (text.trim_end_matches('G').to_owned(), 30),
        text => (text, 0),
    };
    // Lengths of messages are 32-bit numbers with a sign in TensorFlow.
    let most = i32::MAX as usize;
    let bytes = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(1 << shift)).filter(|bytes| *bytes > 0);
    bytes.map(|bytes| bytes.min(most)).ok_or_else(|| format!("'{text}' is not a size such as 512M"))
}

fn seconds(flag: &str, seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Error::invalid_argument(format!("{flag} {seconds} is not a number of seconds")))
}

fn device_count(texts: &[String]) -> Result<std::collections::BTreeMap<String, usize>> {
    let one = |text: &String| {
        let wrong = || Error::invalid_argument(format!("--device-count '{text}' is not like CPU=2"));
        let (kind, n) = text.split_once('=').ok_or_else(wrong)?;
        Ok((kind.to_uppercase(), n.parse().map_err(|_| wrong())?))
    };
    texts.iter().flat_map(|text| text.split(',')).map(|text| one(&text.to_owned())).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_bytes("512M"), Ok(512 << 20));
        assert_eq!(parse_bytes("64kb"), Ok(64 << 10));
        assert_eq!(parse_bytes("1000"), Ok(1000));
        assert_eq!(parse_bytes("2G"), Ok(i32::MAX as usize));
        for wrong in ["", "M", "0", "-1", "1.5G", "99999999999999999999", "18446744073709551615G"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_are_closed_unless_they_are_allowed() {
        let path = std::env::temp_dir();
        assert!(file_access(&[]).unwrap().check(&path).is_err());
        assert!(file_access(std::slice::from_ref(&path)).unwrap().check(&path).is_ok());
        let error = file_access(&["/nonexistent".into()]).unwrap_err();
        assert!(error.message().contains("--allow-dir") && error.message().contains("/nonexistent"), "{error}");
    }
}
