//! `kolo config check`: explains what a process started here would be, and a cluster's description, without starting anything.

use crate::place::{Engine, Found, Meeting, Place, RankSeat};
use crate::{ClusterSpec, Result};
use clap::Subcommand;
use serde_json::{Map, Value, json};

use super::place::own_place;
use super::print;
use super::task::{self, TaskFlags};

/// Flags of `kolo config`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Explain what a process started here would be, by its environment, or --cluster; and report mistakes
    #[command(after_help = "Examples:
  kolo config check                                     TF_CONFIG, or who else starts several processes
  srun -n 4 kolo config check                           the same for each process of a step
  kolo config check --cluster cluster.json --job ps     explain a file, as the parameter server would read it")]
    Check(Check),
}

#[derive(clap::Args)]
struct Check {
    #[command(flatten)]
    task: TaskFlags,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let Command::Check(check) = &args.command;
    let environment = task::environment()?;
    let says_cluster = check.task.cluster.is_some() || check.task.job.is_some();
    let found = if says_cluster { None } else { Some(own_place()?) };
    let has_cluster = environment.as_ref().is_some_and(|config| config.cluster.is_some());
    if let Some(found) = found.as_ref().filter(|found| found.engine != Engine::TfConfig || !has_cluster) {
        return match check.json {
            true => print(place_json(found)),
            false => explain(found),
        };
    }
    let cluster = task::cluster(check.task.cluster.as_deref(), environment.as_ref())?;
    let says_task = check.task.job.is_some() || environment.as_ref().is_some_and(|config| config.task.is_some());
    let own = match says_task {
        true => check.task.read().map(|(_, job, task)| Some((job, task)))?,
        false => None,
    };
    let warnings = warnings(&cluster);
    if check.json {
        let tasks: Vec<_> = cluster
            .all_tasks()
            .map(|(job, task, address)| {
                json!({ "job": job, "task": task, "address": address, "role": role(&cluster, job, task) })
            })
            .collect();
        let own = own.as_ref().map(|(job, task)| json!({ "job": job, "task": task }));
        let mut all = found.as_ref().map_or_else(|| json!({}), place_json);
        (all["tasks"], all["own"], all["warnings"]) = (json!(tasks), json!(own), json!(warnings));
        return print(all);
    }
    let source = match (&check.task.cluster, &environment) {
        (Some(_), _) => "--cluster",
        _ => "TF_CONFIG",
    };
    let n_jobs = cluster.jobs().count();
    print(format_args!(
        "{source} is well formed: {} in {}.",
        count(cluster.n_tasks(), "task", "tasks"),
        count(n_jobs, "job", "jobs")
    ))?;
    let width = cluster.all_tasks().map(|(job, task, _)| format!("{job}:{task}").len()).max().unwrap_or(0);
    let wide = cluster.all_tasks().map(|(_, _, address)| address.len()).max().unwrap_or(0);
    for (job, task, address) in cluster.all_tasks() {
        let name = format!("{job}:{task}");
        print(format_args!("  {name:width$}  {address:wide$}  {}", role(&cluster, job, task)))?;
    }
    match &own {
        Some((job, task)) => {
            let address = cluster.address(job, *task)?;
            print(format_args!("This process is {job}:{task}. It listens on {address} and nowhere else."))?;
            if !is_loopback(address) {
                print(
                    "Other machines can reach that address, so it needs --tls-ca, --tls-cert and --tls-key, or --token-file, \
                     or --insecure.",
                )?;
            }
        }
        None => print("It does not say which of them this process is; --job and --task would.")?,
    }
    for warning in warnings {
        print(format_args!("Note: {warning}"))?;
    }
    match &found {
        Some(found) => explain(found),
        None => Ok(()),
    }
}

/// What `kolo train` would do here, and which variables say so.
fn explain(found: &Found) -> Result<()> {
    match &found.place {
        Place::Alone => print("A training that is started here works alone.")?,
        Place::Task(seat) => print(format_args!(
            "A training that is started here is {}:{} of {}.",
            seat.job,
            seat.index,
            count(seat.cluster.n_tasks(), "task", "tasks")
        ))?,
        Place::Rank(RankSeat { place, meeting }) => {
            print(format_args!(
                "A training that is started here is rank {} of {}, and rank {} of the {} on this host, by {}.",
                place.rank, place.size, place.local_rank, place.local_size, found.engine
            ))?;
            print(format_args!("{}.", meeting_text(meeting, place.rank)))?;
        }
    }
    for (name, value) in &found.read {
        print(format_args!("  read:    {name}={}", shortened(value)))?;
    }
    for (name, why) in &found.ignored {
        print(format_args!("  ignored: {name}: {why}"))?;
    }
    Ok(())
}

fn meeting_text(meeting: &Meeting, rank: usize) -> String {
    match meeting {
        Meeting::File(path) => format!("The ranks share memory, by {}", path.display()),
        Meeting::Address(address) if rank == 0 => format!("It listens at {address}, where the others join it"),
        Meeting::Address(address) => format!("It joins rank 0 at {address}"),
        Meeting::Mpi { kind, library: None } => format!("The ranks talk over MPI, by the library of {kind}'s mpirun"),
        Meeting::Mpi { library: Some(path), .. } => format!("The ranks talk over MPI, by {}", path.display()),
        Meeting::Unsaid => {
            "Nothing says where the ranks meet, so it would fail: set MASTER_ADDR and MASTER_PORT".to_owned()
        }
    }
}

fn place_json(found: &Found) -> Value {
    let pairs = |pairs: &[(String, String)]| pairs.iter().map(|(name, text)| (name.clone(), json!(text))).collect();
    let (read, ignored): (Map<String, Value>, Map<String, Value>) = (pairs(&found.read), pairs(&found.ignored));
    let place = match &found.place {
        Place::Alone => json!({ "alone": true }),
        Place::Task(seat) => json!({ "job": seat.job, "index": seat.index, "replica": seat.replica() }),
        Place::Rank(RankSeat { place, meeting }) => json!({
            "rank": place.rank, "size": place.size, "local_rank": place.local_rank, "local_size": place.local_size,
            "meeting": match meeting {
                Meeting::File(path) => json!({ "file": path }),
                Meeting::Address(address) => json!({ "address": address }),
                Meeting::Mpi { kind, library } => json!({ "mpi": kind.to_string(), "library": library }),
                Meeting::Unsaid => Value::Null,
            },
        }),
    };
    json!({ "place": place, "engine": found.engine.to_string(), "read": read, "ignored": ignored })
}

/// The first characters of a value.
fn shortened(value: &str) -> String {
    const MOST: usize = 100;
    match value.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &value[..end]),
        None => value.to_owned(),
    }
}

/// What a task of this name does in a training program.
fn role(cluster: &ClusterSpec, job: &str, task: u32) -> &'static str {
    let has_chief = cluster.jobs().any(|job| job == "chief" || job == "master");
    let is_first = cluster.tasks(job).next().is_some_and(|(first, _)| first == task);
    match job {
        "ps" => "keeps variables",
        "chief" | "master" => "chief: trains, initialises, restores and saves",
        "worker" if !has_chief && is_first => "chief: trains, initialises, restores and saves",
        "worker" => "trains",
        "evaluator" => "looks on: tests checkpoints",
        _ => "runs what is pinned to it",
    }
}

/// Warnings about settings that are valid but rarely intended.
fn warnings(cluster: &ClusterSpec) -> Vec<String> {
    let mut warnings = Vec::new();
    let n_local = cluster.all_tasks().filter(|(_, _, address)| is_loopback(address)).count();
    if n_local > 0 && n_local < cluster.n_tasks() {
        warnings.push(
            "some addresses are of this machine only (localhost, 127.0.0.1) and some are not: a task on another machine \
             would look for the former on itself."
                .to_owned(),
        );
    }
    for (job, task, address) in cluster.all_tasks() {
        if address.ends_with(":0") {
            warnings.push(format!("{job}:{task} has port 0, which the system fills in: no other task can find it."));
        }
        if address.starts_with("0.0.0.0:") || address.starts_with("[::]:") {
            warnings.push(format!(
                "{job}:{task} is at {address}, which means every address of a machine: others cannot connect to it. Name \
                 the host."
            ));
        }
    }
    if cluster.jobs().any(|job| job == "worker") && cluster.tasks("ps").next().is_none() {
        warnings.push("there is no job 'ps': variables live with the workers.".to_owned());
    }
    if cluster.tasks("ps").next().is_some() && cluster.jobs().count() == 1 {
        warnings.push("there are parameter servers only: nobody trains.".to_owned());
    }
    warnings
}

/// Whether an address is loopback by its name; does no DNS lookup.
fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn count(n: usize, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}
