//! Ranks that `mpirun` has started: which of them this process is, and whose library carries their messages.

use std::path::PathBuf;

use kolo_core::{Error, Result};
use kolo_runtime::collective::MpiKind;

use super::RankPlace;

/// Where a launcher of MPI says which rank a process is.
struct Variables {
    kind: MpiKind,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

const LAUNCHERS: [Variables; 2] = [
    Variables {
        kind: MpiKind::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Variables {
        kind: MpiKind::Mpich,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
    },
];

/// The library to open instead of the one that belongs to the launcher.
const LIBRARY: &str = "KOLO_MPI_LIBRARY";

/// One of several processes that `mpirun` has started.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MpiPlace {
    pub kind: MpiKind,
    pub place: RankPlace,
    pub library: Option<PathBuf>,
}

impl MpiPlace {
    /// What the launcher's variables say; `None` if there is no such launcher, or only one process.
    pub fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<MpiPlace>> {
        let Some(names) = LAUNCHERS.iter().find(|names| variable(names.size).is_some()) else { return Ok(None) };
        let number = |name: &str| -> Result<usize> {
            let text = variable(name).ok_or_else(|| {
                let size = names.size;
                Error::invalid_argument(format!("{size} is set, as by the mpirun of {}, and {name} is not", names.kind))
            })?;
            text.parse().map_err(|_| Error::invalid_argument(format!("{name}='{text}' is not a number")))
        };
        let size = number(names.size)?;
        if size == 1 {
            return Ok(None);
        }
        let (rank, local_rank, local_size) =
            (number(names.rank)?, number(names.local_rank)?, number(names.local_size)?);
        let library = variable(LIBRARY).filter(|path| !path.is_empty()).map(PathBuf::from);
        let place = RankPlace { rank, size, local_rank, local_size };
        Ok(Some(MpiPlace { kind: names.kind, place, library }))
    }
}

/// Whether `mpirun` has started this process as one of several.
pub(crate) fn is_started_by_mpirun() -> bool {
    let size = |names: &Variables| std::env::var(names.size).ok();
    LAUNCHERS.iter().find_map(size).is_some_and(|size| size != "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Result<Option<MpiPlace>> {
        MpiPlace::of(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn launchers_say_which_rank_a_process_is() {
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        let place = RankPlace { rank: 5, size: 8, local_rank: 1, local_size: 4 };
        assert_eq!(found(&open_mpi), Ok(Some(MpiPlace { kind: MpiKind::OpenMpi, place, library: None })));
        let mpich = [
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "0"),
            ("MPI_LOCALNRANKS", "2"),
            ("KOLO_MPI_LIBRARY", "/opt/libmpi.so"),
        ];
        let place = RankPlace::on_one_host(0, 2);
        let library = Some("/opt/libmpi.so".into());
        assert_eq!(found(&mpich), Ok(Some(MpiPlace { kind: MpiKind::Mpich, place, library })));
        assert_eq!(found(&[("PMI_SIZE", "1")]), Ok(None));
        assert_eq!(found(&[("RANK", "1")]), Ok(None));
    }

    #[test]
    fn half_of_a_launcher_is_refused() {
        let says = |variables: &[(&str, &str)], text: &str| {
            let error = found(variables).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        says(&[("PMI_SIZE", "2")], "PMI_SIZE is set, as by the mpirun of MPICH, and PMI_RANK is not");
        says(&[("OMPI_COMM_WORLD_SIZE", "many")], "OMPI_COMM_WORLD_SIZE='many' is not a number");
    }
}
