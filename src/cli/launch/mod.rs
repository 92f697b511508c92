//! `kolo launch`: starts any program several times, on this machine or on several, and looks after the processes until they end.
//!
//! ```text
//! hosts.rs      which hosts, how many processes on each        variables.rs  what each process is told
//! group.rs      a process with all that it starts              output.rs     its lines: prefix, log file, the last ones
//! crew.rs       those of one host: here, or with an agent      watch.rs      who ends how, and what follows from it
//! agents.rs     the agents of several hosts: waiting, ssh      agent.rs      the other end of that
//! guard.rs      ends processes if this one is killed
//! ```

pub mod agent;
mod agents;
mod crew;
mod group;
pub mod guard;
mod hosts;
mod output;
mod variables;
mod watch;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use self::hosts::HostSlots;
use self::variables::Outside;
use crate::{Error, Result};

/// Flags of `kolo launch`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kolo launch -n 4 -- kolo train mnist                   four ranks on this machine
  kolo launch -n 2 --restarts 3 -- python train.py       PyTorch; all are started again if one fails
  kolo launch --hosts a:4,b:4 -- kolo train mnist        on each host: kolo agent --join ADDRESS, as printed
  kolo launch --hosts a:4,b:4 --ssh -- kolo train mnist  the agents are started by ssh
  srun --ntasks-per-node 1 kolo launch -n 4 -- python train.py    four processes on each node of a Slurm job

Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TF_CONFIG, the same for Horovod
and Open MPI, and KOLO_TOKEN, a random secret of all of them. Ctrl-C and SIGTERM end all of them in order; the exit code is that of
the first process that failed.")]
pub struct Args {
    /// Start this many processes on this machine [default: $PET_NPROC_PER_NODE, or 1]
    #[arg(short = 'n', long, value_name = "N", visible_alias = "max", conflicts_with = "hosts")]
    processes: Option<usize>,
    /// Start processes on these hosts, on which agents join: HOST:N,HOST:N; localhost is this machine
    #[arg(long, value_name = "HOST:N,..")]
    hosts: Option<String>,
    /// Start the agents by ssh, or by this program in its place, called as PROGRAM HOST kolo agent ..
    #[arg(long, value_name = "PROGRAM", num_args = 0..=1, default_missing_value = "ssh", requires = "hosts")]
    ssh: Option<OsString>,
    /// Call the program `kolo` so on the hosts of --ssh
    #[arg(long, value_name = "PATH", default_value = "kolo")]
    remote_kolo: String,
    /// Wait for agents at this address of this machine [default: the one from which the first host is reached]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<SocketAddr>,
    /// Write the token for agents to this new file, in place of standard error
    #[arg(long, value_name = "FILE")]
    join_token_file: Option<PathBuf>,
    /// Wait this many seconds for all agents
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    join_deadline: f64,
    /// Write what each process says to a file of its own in this folder: rank-0.log, rank-1.log, ..
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Start all processes again when one fails, at most this often; with --min, only the one
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: u32,
    /// Go on while this many processes run: each is told where the others listen (KOLO_LISTEN, KOLO_JOIN), as `kolo train --elastic` needs it
    #[arg(long, value_name = "N")]
    min: Option<usize>,
    /// Give processes this many seconds to end before they are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    grace: f64,
    /// Start this program with these arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

/// Checked flags.
struct Plan {
    hosts: Vec<HostSlots>,
    /// What others have started beside this launcher.
    outside: Option<Outside>,
    min: Option<usize>,
    restarts: u32,
    grace: Duration,
    log_dir: Option<PathBuf>,
    program: Vec<String>,
}

/// The most processes.
const MOST: usize = 4096;

pub fn run(args: &Args) -> Result<()> {
    let environment = crate::place::Environment::own();
    let outside = variables::outside(&environment)?;
    let hosts = match &args.hosts {
        Some(text) => hosts::parse(text)?,
        None => vec![HostSlots {
            name: hosts::LOCAL.to_owned(),
            slots: variables::own_slots(args.processes, &environment)?,
        }],
    };
    let n = hosts.iter().fold(0usize, |sum, host| sum.saturating_add(host.slots));
    let n_all = n.saturating_mul(outside.as_ref().map_or(1, |outside| outside.n_nodes));
    if n_all == 0 || n_all > MOST {
        return Err(Error::invalid_argument(format!("{n_all} processes; 1 to {MOST} can be started")));
    }
    if outside.is_some() && (args.hosts.is_some() || args.min.is_some()) {
        return Err(Error::invalid_argument(
            "--hosts and --min are for one launcher, and this one is one of several that Slurm or Kubernetes has started; leave them \
             out, or set KOLO_PLACE=alone",
        ));
    }
    if let Some(min) = args.min.filter(|min| *min == 0 || *min > n) {
        return Err(Error::invalid_argument(format!("--min {min}: of {n} processes, 1 to {n} can be enough")));
    }
    let plan = Plan {
        hosts,
        outside,
        min: args.min,
        restarts: args.restarts,
        grace: seconds("--grace", args.grace)?,
        log_dir: args.log_dir.clone(),
        program: args.program.clone(),
    };
    let stop = watch::StopSignals::install();
    let join_deadline = seconds("--join-deadline", args.join_deadline)?;
    let mut crews = agents::gather(args, &plan, join_deadline, &stop)?;
    let code = watch::run(&plan, &mut crews, &stop)?;
    // Agents read that it is over before this process ends.
    drop(crews);
    match code {
        0 => Ok(()),
        code => std::process::exit(code),
    }
}

fn seconds(flag: &str, seconds: f64) -> Result<Duration> {
    let parsed = Duration::try_from_secs_f64(seconds).ok().filter(|duration| duration.as_secs() < 1 << 30);
    parsed.ok_or_else(|| Error::invalid_argument(format!("{flag} {seconds} is not a number of seconds")))
}
