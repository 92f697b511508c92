//! Ranks that `mpirun` has started.

use std::path::PathBuf;

use kolo_core::Result;
use kolo_runtime::collective::MpiKind;

use super::environment::Reader;
use super::{Claim, Meeting};
use crate::parallel::RankPlace;

/// Where a launcher of MPI says which rank a process is.
struct Names {
    kind: MpiKind,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

const LAUNCHERS: [Names; 2] = [
    Names {
        kind: MpiKind::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Names {
        kind: MpiKind::Mpich,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
    },
];

/// The library to open instead of the one that belongs to the launcher.
const LIBRARY: &str = "KOLO_MPI_LIBRARY";

pub(super) const VARIABLES: &[&str] = &[
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    LIBRARY,
];

pub(super) fn claim(reader: &Reader<'_>) -> Result<Option<Claim>> {
    let Some(names) = LAUNCHERS.iter().find(|names| reader.get(names.size).is_some()) else { return Ok(None) };
    // `srun --mpi=pmi2` sets two of MPICH's variables. A size of 1 may come from there too, and is compared with Slurm's.
    let is_srun = names.kind == MpiKind::Mpich
        && reader.get("SLURM_PROCID").is_some()
        && reader.get(names.local_rank).is_none()
        && reader.get(names.size) != Some("1");
    if is_srun {
        return Ok(None);
    }
    let who = format!("the mpirun of {}", names.kind);
    let size = reader.required(names.size, names.size, &who)?;
    if size == 1 {
        return Ok(Some(Claim::alone()));
    }
    let number = |name: &'static str| reader.required(name, names.size, &who);
    let place = RankPlace {
        rank: number(names.rank)?,
        size,
        local_rank: number(names.local_rank)?,
        local_size: number(names.local_size)?,
    };
    Claim::rank(place, Meeting::Mpi { kind: names.kind, library: reader.get(LIBRARY).map(PathBuf::from) })
}
