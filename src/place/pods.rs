//! Pods of Kubernetes: Kubeflow's `TrainJob` says who they are, and those of a StatefulSet, an indexed Job or a JobSet are numbered by
//! their host names, `trainer-3`, or by `JOB_COMPLETION_INDEX`.

use kolo_core::{Error, Result};

use super::environment::{Reader, address, parse};
use super::{Claim, Meeting};
use crate::parallel::RankPlace;

pub(super) const TRAIN_JOB: &[&str] =
    &["PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"];

pub(super) const VARIABLES: &[&str] = &["KOLO_PODS", "KOLO_SERVICE", "KOLO_PORT", "JOB_COMPLETION_INDEX"];

/// The port of rank 0 if none is said. Pods have addresses of their own, so any would do.
const PORT: u16 = 29_500;

/// A pod of a `TrainJob`, which is prepared for torchrun.
pub(super) fn of_train_job(reader: &Reader<'_>) -> Result<Option<Claim>> {
    let Some(text) = reader.get("PET_NNODES") else { return Ok(None) };
    if text.contains(':') {
        return Err(Error::invalid_argument(format!(
            "PET_NNODES={text} is a range: how many pods there are is not known from the start; give numNodes one number"
        )));
    }
    let size = parse("PET_NNODES", text)?;
    // `auto` is for torchrun to say; one process uses all devices of its pod.
    let per_pod = reader.get("PET_NPROC_PER_NODE").and_then(|text| text.parse::<usize>().ok()).unwrap_or(1);
    if per_pod > 1 {
        return Err(Error::failed_precondition(format!(
            "this pod is to run {per_pod} processes (PET_NPROC_PER_NODE={per_pod}), and nobody has started them; run `kolo launch -- \
             PROGRAM` or torchrun in it, or set numProcPerNode to 1"
        )));
    }
    let rank = match size {
        1 => return Ok(Some(Claim::alone())),
        _ => reader.required("PET_NODE_RANK", "PET_NNODES", "a TrainJob")?,
    };
    let host = reader.get("PET_MASTER_ADDR").ok_or_else(|| {
        Error::invalid_argument(
            "PET_NNODES is set, as by a TrainJob, and PET_MASTER_ADDR is not; it is the name of the first pod",
        )
    })?;
    let port = reader.port("PET_MASTER_PORT")?.unwrap_or(PORT);
    let place = RankPlace { rank, size, local_rank: 0, local_size: 1 };
    Claim::rank(place, Meeting::Address(address(host, port)))
}

/// A pod of which only the number of all is said.
pub(super) fn claim(reader: &Reader<'_>) -> Result<Option<Claim>> {
    let Some(size) = reader.number("KOLO_PODS")? else { return Ok(None) };
    if size == 1 {
        return Ok(Some(Claim::alone()));
    }
    let name = reader.host_name();
    let by_name = name.split('.').next().and_then(|name| name.rsplit_once('-'));
    let by_name = by_name.and_then(|(base, number)| Some((base, parse("the host's name", number).ok()?)));
    let by_index = reader.number("JOB_COMPLETION_INDEX")?;
    let rank = match (by_name, by_index) {
        (Some((_, named)), Some(index)) if named != index => {
            return Err(Error::invalid_argument(format!(
                "JOB_COMPLETION_INDEX={index}, and the host's name, {name}, ends with {named}: a JobSet with several replicas of a job \
                 numbers the pods of each; use one replica with a higher parallelism, or set RANK and WORLD_SIZE"
            )));
        }
        (Some((_, rank)), _) => rank,
        (None, Some(rank)) => rank,
        (None, None) => {
            return Err(Error::invalid_argument(format!(
                "KOLO_PODS={size}, and nothing says which of them this is: the host's name, '{name}', does not end with a number, as \
                 in a StatefulSet, and JOB_COMPLETION_INDEX is not set, as in an indexed Job"
            )));
        }
    };
    let host = match (reader.get("MASTER_ADDR"), reader.get("KOLO_SERVICE"), by_name) {
        (Some(host), ..) => host.to_owned(),
        (None, Some(service), Some((base, _))) => format!("{base}-0.{service}"),
        (None, service, _) => {
            let missing =
                if service.is_none() { "KOLO_SERVICE, the name of their headless service," } else { "MASTER_ADDR" };
            return Err(Error::invalid_argument(format!(
                "KOLO_PODS={size}, and {missing} is not set: it says where the others find the first pod"
            )));
        }
    };
    let port = match (reader.port("MASTER_PORT")?, reader.port("KOLO_PORT")?) {
        (Some(port), _) | (None, Some(port)) => port,
        (None, None) => PORT,
    };
    let place = RankPlace { rank, size, local_rank: 0, local_size: 1 };
    Claim::rank(place, Meeting::Address(address(&host, port)))
}
