//! `RANK` and `WORLD_SIZE`, as torchrun and `kolo launch` set them.

use std::path::PathBuf;

use kolo_core::{Error, Result};

use super::environment::{Reader, address};
use super::{Claim, Meeting, Place, RankSeat};
use crate::parallel::RankPlace;

pub(super) const VARIABLES: &[&str] =
    &["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// A rank of `kolo train --ranks`.
pub(super) fn of_world(reader: &Reader<'_>) -> Result<Option<Claim>> {
    let Some(path) = reader.get("KOLO_WORLD") else { return Ok(None) };
    let place = place(reader)?.ok_or_else(|| {
        Error::invalid_argument(
            "KOLO_WORLD is set, as by `kolo train --ranks`, and RANK and WORLD_SIZE are not; unset KOLO_WORLD",
        )
    })?;
    place.check()?;
    // A world of one is joined like any other: its launcher looks after it.
    Ok(Some(Claim { place: Place::Rank(RankSeat { place, meeting: Meeting::File(PathBuf::from(path)) }) }))
}

/// A rank of any other launcher that speaks torchrun's language.
pub(super) fn claim(reader: &Reader<'_>) -> Result<Option<Claim>> {
    let Some(place) = place(reader)? else { return Ok(None) };
    if place.size == 1 {
        return Claim::rank(place, Meeting::Unsaid);
    }
    let meeting = match (reader.get("MASTER_ADDR"), reader.port("MASTER_PORT")?) {
        (Some(host), Some(port)) => Meeting::Address(address(host, port)),
        _ => Meeting::Unsaid,
    };
    Claim::rank(place, meeting)
}

fn place(reader: &Reader<'_>) -> Result<Option<RankPlace>> {
    let (rank, size) = match (reader.number("RANK")?, reader.number("WORLD_SIZE")?) {
        (None, None) => return Ok(None),
        (Some(rank), Some(size)) => (rank, size),
        _ => {
            return Err(Error::invalid_argument(
                "one of RANK and WORLD_SIZE is set, and the other is not; a launcher such as `kolo launch -n 4` or torchrun sets both, \
                 and a process that is to be alone has neither",
            ));
        }
    };
    let local_rank = reader.number("LOCAL_RANK")?;
    let local_size = reader.number("LOCAL_WORLD_SIZE")?;
    let per_node = reader.get("PET_NPROC_PER_NODE").and_then(|text| text.parse::<usize>().ok());
    if let (None, Some(n @ 2..)) = (local_rank, per_node) {
        return Err(Error::failed_precondition(format!(
            "RANK={rank} is that of a pod, which is to run {n} processes (PET_NPROC_PER_NODE={n}), and LOCAL_RANK is not set, so nobody \
             has started them; run `kolo launch -- PROGRAM` or torchrun in the pod, or set numProcPerNode to 1"
        )));
    }
    // Each pod is a host of its own. Elsewhere, who says nothing about hosts means one.
    let has_pods = local_rank.is_none() && local_size.is_none() && reader.get("KUBERNETES_SERVICE_HOST").is_some();
    let (rank_here, size_here) = if has_pods { (0, 1) } else { (rank, size) };
    let (local_rank, local_size) = (local_rank.unwrap_or(rank_here), local_size.unwrap_or(size_here));
    Ok(Some(RankPlace { rank, size, local_rank, local_size }))
}
