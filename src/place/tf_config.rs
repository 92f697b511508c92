//! `TF_CONFIG`: a cluster with parameter servers, or without them workers that are alike.

use kolo_core::{Error, Result};
use kolo_net::{ClusterSpec, TfConfig};

use super::environment::Reader;
use super::{Claim, Meeting, Place, TaskSeat};
use crate::parallel::RankPlace;

/// The jobs whose tasks train, the first of which leads.
const TRAINING: [&str; 3] = ["chief", "master", "worker"];

/// The tasks that train, the chief first.
pub(super) fn replicas(cluster: &ClusterSpec) -> impl Iterator<Item = (&'static str, u32, &str)> {
    TRAINING.iter().flat_map(move |job| cluster.tasks(job).map(move |(index, address)| (*job, index, address)))
}

pub(super) fn claim(reader: &Reader<'_>) -> Result<Option<Claim>> {
    let Some(text) = reader.get("TF_CONFIG") else { return Ok(None) };
    let config = TfConfig::parse(text)?;
    let is_evaluator = config.task.as_ref().is_some_and(|task| task.job == "evaluator");
    // Without a cluster the process is alone, whatever it is called, as in TensorFlow.
    let (Some(cluster), false) = (&config.cluster, config.cluster.is_none() && !is_evaluator) else { return Ok(None) };
    let Some(task) = config.task else {
        // A cluster of one, which `parse` has made sure of.
        return Ok(Some(Claim::alone()));
    };
    let seat = TaskSeat { cluster: cluster.clone(), job: task.job, index: task.index };
    let has_others = cluster.jobs().any(|job| !TRAINING.contains(&job) && job != "evaluator");
    match seat.replica() {
        Some(rank) if !has_others => of_alike(&seat, rank),
        _ => Ok(Some(Claim { place: Place::Task(seat) })),
    }
}

/// One of several workers without parameter servers.
fn of_alike(seat: &TaskSeat, rank: usize) -> Result<Option<Claim>> {
    let addresses: Vec<&str> = replicas(&seat.cluster).map(|(_, _, address)| address).collect();
    let host = |address: &str| address.rsplit_once(':').map_or(String::new(), |(host, _)| host.to_ascii_lowercase());
    let own = host(addresses[rank]);
    let n_here = |some: &[&str]| some.iter().filter(|address| host(address) == own).count();
    let (local_rank, local_size) = (n_here(&addresses[..rank]), n_here(&addresses));
    if addresses.len() > 1 && addresses[0].ends_with(":0") {
        return Err(Error::invalid_argument(format!(
            "TF_CONFIG: the first task is at {}, and port 0 is any free one, where the others cannot find it; give it a port",
            addresses[0]
        )));
    }
    let place = RankPlace { rank, size: addresses.len(), local_rank, local_size };
    Claim::rank(place, Meeting::Address(addresses[0].to_owned()))
}
