//! `kolo serve`: one task of a cluster.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kolo::{ClusterSpec, Error, Result, Server, ServerConfig, SessionConfig, TfConfig};

use super::print;

/// Flags of `kolo serve`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kolo serve --cluster 'ps=127.0.0.1:2222;worker=127.0.0.1:2223,127.0.0.1:2224' --job ps --task 0
  kolo serve --cluster cluster.json --job worker --task 1
  kolo serve                         from TF_CONFIG alone

Clients connect to grpc://HOST:PORT of any task: TensorFlow's tf.Session(\"grpc://127.0.0.1:2223\"), Kolo's
Session::connect, kolo train --target. The server ends on Ctrl-C or SIGTERM.")]
pub struct Args {
    /// All tasks: JOB=HOST:PORT,HOST:PORT;JOB=... or a JSON file; $TF_CONFIG if absent
    #[arg(long, value_name = "TASKS")]
    cluster: Option<String>,
    /// The job this task is of
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// Its number in the job
    #[arg(long, value_name = "N")]
    task: Option<String>,
    /// Devices, such as CPU=2
    #[arg(long, value_name = "KIND=N")]
    device_count: Vec<String>,
    /// Threads that run nodes beside each other, on each device; 0 means as many as cores
    #[arg(long, default_value_t = 0, value_name = "N")]
    inter_op_threads: usize,
    /// Threads inside one kernel; 0 means all cores
    #[arg(long, default_value_t = 0, value_name = "N")]
    intra_op_threads: usize,
    /// Seconds a new session waits for tasks that are not there
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS")]
    ready_deadline: f64,
    /// Logs where sessions place their nodes
    #[arg(long)]
    log_device_placement: bool,
    /// Ends when standard input ends: whoever started this process is gone
    #[arg(long, hide = true)]
    with_parent: bool,
    /// Talks to other tasks by gRPC even if they are Kolo's
    #[arg(long)]
    grpc_only: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let (cluster, job, task) = task(args)?;
    let mut config = ServerConfig {
        session: SessionConfig {
            device_count: device_count(&args.device_count)?,
            inter_op_parallelism_threads: args.inter_op_threads,
            intra_op_parallelism_threads: args.intra_op_threads,
            ..SessionConfig::default()
        },
        ready_deadline: Duration::try_from_secs_f64(args.ready_deadline)
            .map_err(|_| Error::invalid_argument("--ready-deadline is not a number of seconds"))?,
        grpc_only: args.grpc_only,
        ..ServerConfig::default()
    };
    config.defaults.log_device_placement = args.log_device_placement;
    let server = Arc::new(Server::new(&cluster, &job, task, config)?);
    let stopped = Arc::downgrade(&server);
    let stop = move || {
        if let Some(server) = stopped.upgrade() {
            server.stop();
        }
    };
    ctrlc::set_handler(stop).map_err(|error| Error::internal(format!("signals cannot be handled: {error}")))?;
    if args.with_parent {
        end_with_parent(&server)?;
    }
    print(format_args!("serving {} as /job:{job}/task:{task}", server.target()))?;
    server.join()
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

/// The cluster and this task's place in it, from flags or from `TF_CONFIG`.
fn task(args: &Args) -> Result<(ClusterSpec, String, u32)> {
    let environment = match std::env::var("TF_CONFIG") {
        Ok(text) if !text.trim().is_empty() => Some(TfConfig::parse(&text)?),
        _ => None,
    };
    let of_environment = environment.as_ref().and_then(|config| config.cluster.clone());
    let cluster = match (&args.cluster, of_environment) {
        (Some(text), _) if Path::new(text).is_file() => ClusterSpec::read(Path::new(text))?,
        (Some(text), _) => ClusterSpec::parse(text)?,
        (None, Some(cluster)) => cluster,
        (None, None) => {
            return Err(Error::invalid_argument(
                "no cluster: say --cluster 'ps=HOST:PORT;worker=HOST:PORT' --job NAME --task N, or set TF_CONFIG",
            ));
        }
    };
    let from_environment = environment.and_then(|config| config.task);
    let job = args.job.clone().or_else(|| from_environment.as_ref().map(|task| task.job.clone()));
    let job = job.ok_or_else(|| {
        Error::invalid_argument(format!("which job is this task of? --job is one of {}", jobs(&cluster)))
    })?;
    let task = match (&args.task, from_environment) {
        (Some(text), _) => cluster.task_index(&job, text)?,
        (None, Some(task)) if args.job.is_none() => task.index,
        (None, _) => match cluster.tasks(&job).map(|(task, _)| task).collect::<Vec<_>>()[..] {
            [only] => only,
            // An index that is no number makes the message that names the valid ones.
            _ => cluster.task_index(&job, "")?,
        },
    };
    Ok((cluster, job, task))
}

fn jobs(cluster: &ClusterSpec) -> String {
    cluster.jobs().collect::<Vec<_>>().join(", ")
}

fn device_count(texts: &[String]) -> Result<std::collections::BTreeMap<String, usize>> {
    let one = |text: &String| {
        let wrong = || Error::invalid_argument(format!("--device-count '{text}' is not like CPU=2"));
        let (kind, n) = text.split_once('=').ok_or_else(wrong)?;
        Ok((kind.to_uppercase(), n.parse().map_err(|_| wrong())?))
    };
    texts.iter().flat_map(|text| text.split(',')).map(|text| one(&text.to_owned())).collect()
}
