//! `kolo config check`: explains a cluster's description, without starting anything.

use crate::{ClusterSpec, Result};
use clap::Subcommand;
use serde_json::json;

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
    /// Explain --cluster, or TF_CONFIG, and report mistakes
    #[command(after_help = "Examples:
  kolo config check                                     explain TF_CONFIG
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
    let cluster = match (&check.task.cluster, &environment) {
        (None, Some(config)) if config.cluster.is_none() => {
            return print("TF_CONFIG names no cluster: this process works alone.");
        }
        (flag, environment) => task::cluster(flag.as_deref(), environment.as_ref())?,
    };
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
        return print(json!({ "tasks": tasks, "own": own, "warnings": warnings }));
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
    Ok(())
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
