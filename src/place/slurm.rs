//! Tasks of a job step of Slurm, which `srun` starts.
//!
//! Rank 0 is on the first node of the step, and the others find it there. The port is the first one that Slurm has reserved for the
//! step (`srun --resv-ports`), or follows from the numbers of job and step: 2048 jobs in a row, each with 8 steps at once, have ports of
//! their own, below those that the system gives to connections. `MASTER_ADDR` and `MASTER_PORT` come before both.

use kolo_core::{Error, Result};

use super::environment::{Reader, address, parse};
use super::node_list::{counts, hosts};
use super::{Claim, Meeting};
use crate::parallel::RankPlace;

pub(super) const VARIABLES: &[&str] = &[
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_RESV_PORTS",
];

/// The first port, and how many there are.
const PORTS: (usize, usize) = (16_384, 16_384);

/// How many steps of a job have ports of their own.
const STEPS: usize = 8;

const WHO: &str = "Slurm's srun";

pub(super) fn claim(reader: &Reader<'_>) -> Result<Option<Claim>> {
    let Some(job) = reader.first(&["SLURM_JOB_ID", "SLURM_JOBID"]) else { return Ok(None) };
    let step = reader.first(&["SLURM_STEP_ID", "SLURM_STEPID"]);
    let n_reserved = match reader.first(&["SLURM_NTASKS", "SLURM_NPROCS"]) {
        Some((name, text)) => parse(name, text)?,
        None => 1,
    };
    let n_started = match (step, reader.number("SLURM_STEP_NUM_TASKS")?) {
        (None, _) => 1,
        (Some(_), n) => n.unwrap_or(n_reserved),
    };
    if n_started == 1 && n_reserved > 1 {
        return Err(Error::failed_precondition(format!(
            "SLURM_NTASKS={n_reserved}, and this process is not one of {n_reserved} that srun has started, but the only one: a job's \
             script, or a shell; write `srun kolo train ..` (or `srun PROGRAM`) there, or set KOLO_PLACE=alone if it is to be alone"
        )));
    }
    let Some(step) = step else { return Ok(None) };
    if n_started == 1 {
        return Ok(Some(Claim::alone()));
    }
    if reader.get("SLURM_HET_SIZE").is_some() {
        return Err(Error::invalid_argument(
            "SLURM_HET_SIZE is set: the parts of a heterogeneous job count their tasks apart; set RANK, WORLD_SIZE, MASTER_ADDR and \
             MASTER_PORT for each task, or use a job of one part",
        ));
    }
    let by = "SLURM_STEP_NUM_TASKS";
    let (rank, local_rank) = (reader.required("SLURM_PROCID", by, WHO)?, reader.required("SLURM_LOCALID", by, WHO)?);
    let node = reader.required("SLURM_NODEID", by, WHO)?;
    let missing = |name: &str| Error::invalid_argument(format!("{by} is set, as by {WHO}, and {name} is not"));
    let (name, list) = reader
        .first(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"])
        .ok_or_else(|| missing("SLURM_STEP_NODELIST"))?;
    let nodes = hosts(name, list)?;
    let (name, per_node) = reader
        .first(&["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"])
        .ok_or_else(|| missing("SLURM_STEP_TASKS_PER_NODE"))?;
    let per_node = counts(name, per_node)?;
    let n_all = per_node.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
    if per_node.len() != nodes.len() || n_all != n_started || node >= nodes.len() {
        return Err(Error::invalid_argument(format!(
            "Slurm's variables contradict each other: {n_started} tasks in the step, {n_all} in {name} on {} nodes, {} nodes in the list \
             '{list}', and this is node {node}; unset those that are not of this step",
            per_node.len(),
            nodes.len()
        )));
    }
    let host = match reader.get("MASTER_ADDR") {
        Some(host) => host,
        None if nodes.len() == 1 => "127.0.0.1",
        None => {
            if let (0, Some(own)) = (rank, reader.get("SLURMD_NODENAME"))
                && own != nodes[0]
            {
                return Err(Error::invalid_argument(format!(
                    "rank 0 is on {own}, and the list of nodes begins with {}, where the others would look for it; set MASTER_ADDR={own} for \
                     the whole step",
                    nodes[0]
                )));
            }
            &nodes[0]
        }
    };
    let port = match (reader.port("MASTER_PORT")?, reserved_port(reader)?) {
        (Some(port), _) | (None, Some(port)) => port,
        (None, None) => derived_port(parse(job.0, job.1)?, parse(step.0, step.1)?),
    };
    let place = RankPlace { rank, size: n_started, local_rank, local_size: per_node[node] };
    Claim::rank(place, Meeting::Address(address(host, port)))
}

/// The first port of `12000-12003,12010`.
fn reserved_port(reader: &Reader<'_>) -> Result<Option<u16>> {
    const NAME: &str = "SLURM_STEP_RESV_PORTS";
    let Some(text) = reader.get(NAME) else { return Ok(None) };
    let first: String = text.chars().take_while(char::is_ascii_digit).collect();
    first.parse().map(Some).map_err(|_| Error::invalid_argument(format!("{NAME}='{text}' begins with no port")))
}

fn derived_port(job: usize, step: usize) -> u16 {
    let (first, n) = PORTS;
    (first + (job.wrapping_mul(STEPS).wrapping_add(step % STEPS)) % n) as u16
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn neighbouring_jobs_and_steps_have_ports_of_their_own() {
        let all = (70_000..70_000 + 2048).flat_map(|job| (0..STEPS).map(move |step| derived_port(job, step)));
        let ports: BTreeSet<u16> = all.collect();
        assert_eq!(ports.len(), 2048 * STEPS);
        assert!(ports.iter().all(|port| (16_384..32_768).contains(port)));
    }
}
