//! Which process of a job this one is: found in its environment, whoever has started it.
//!
//! [`find`] is a pure function from an [`Environment`] to a [`Place`], and the only reader of what launchers set. The first of these
//! that says something decides, since it is the innermost one:
//!
//! | | who | its variables | a file |
//! | --- | --- | --- | --- |
//! | 1 | `kolo train --ranks` | `KOLO_WORLD`, with those of 2 | `ranks.rs` |
//! | 2 | `torchrun`, `kolo launch`, Kubeflow's `PyTorchJob`, by hand | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, .. | `ranks.rs` |
//! | 3 | Kubeflow's `TFJob`, by hand | `TF_CONFIG` | `tf_config.rs` |
//! | 4 | `mpirun` of Open MPI or MPICH, Kubeflow's `MPIJob` | `OMPI_COMM_WORLD_RANK`, `PMI_RANK`, .. | `mpi.rs` |
//! | 5 | Slurm's `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, .. | `slurm.rs` |
//! | 6 | Kubeflow's `TrainJob` | `PET_NNODES`, `PET_NODE_RANK`, .. | `pods.rs` |
//! | 7 | pods of a StatefulSet, an indexed Job or a JobSet | `KOLO_PODS`, `KOLO_SERVICE`, the host's name | `pods.rs` |
//!
//! A process that trains alone by mistake is noticed late, and so are four that do so beside each other. So an environment that
//! is half set is an error, and so are two launchers that contradict each other. `KOLO_PLACE` names the one to believe, or `alone`.

mod environment;
mod mpi;
mod node_list;
mod pods;
mod ranks;
mod slurm;
#[cfg(test)]
mod tests;
mod tf_config;

use std::fmt;
use std::path::PathBuf;

use kolo_core::{Error, Result};
use kolo_net::ClusterSpec;
use kolo_runtime::collective::MpiKind;

pub use self::environment::Environment;
use self::environment::Reader;
use crate::parallel::RankPlace;

/// Where a process is among those that were started with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is the only one.
    Alone,
    /// One of several that do the same.
    Rank(RankSeat),
    /// A task of a cluster with parameter servers, or the evaluator beside a training.
    Task(TaskSeat),
}

/// One of several processes that do the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSeat {
    /// Which one.
    pub place: RankPlace,
    /// Where they meet.
    pub meeting: Meeting,
}

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// In a file in memory, which `kolo train --ranks` has made.
    File(PathBuf),
    /// At this `host:port`, where rank 0 listens.
    Address(String),
    /// In a library of MPI.
    Mpi {
        /// Whose `mpirun` has started them.
        kind: MpiKind,
        /// The library, if it is not the one of that `mpirun`.
        library: Option<PathBuf>,
    },
    /// Nowhere that the environment says. An error for a Kolo program; others may know by themselves.
    Unsaid,
}

/// A task of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskSeat {
    /// All tasks.
    pub cluster: ClusterSpec,
    /// The job of this one. An `evaluator` need not be in the cluster.
    pub job: String,
    /// Its index there.
    pub index: u32,
}

impl TaskSeat {
    /// Its number among those that train: the chief is 0, and workers follow. `None` for those that do not.
    pub fn replica(&self) -> Option<usize> {
        tf_config::replicas(&self.cluster).position(|(job, index, _)| job == self.job && index == self.index)
    }

    /// How many train.
    pub fn n_replicas(&self) -> usize {
        tf_config::replicas(&self.cluster).count()
    }

    /// How many keep variables.
    pub fn n_ps(&self) -> usize {
        self.cluster.tasks("ps").count()
    }
}

/// Who has started a process, as far as its environment says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Nobody who says how many there are.
    Nobody,
    /// `kolo train --ranks`.
    KoloRanks,
    /// Somebody who sets `RANK` and `WORLD_SIZE`.
    Ranks,
    /// Somebody who sets `TF_CONFIG`.
    TfConfig,
    /// `mpirun`.
    Mpi,
    /// Slurm's `srun`.
    Slurm,
    /// Kubeflow's `TrainJob`.
    TrainJob,
    /// Kubernetes, for pods that have `KOLO_PODS`.
    Pods,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::Nobody => "nobody",
            Engine::KoloRanks => "kolo train --ranks",
            Engine::Ranks => "RANK",
            Engine::TfConfig => "TF_CONFIG",
            Engine::Mpi => "mpirun",
            Engine::Slurm => "Slurm's srun",
            Engine::TrainJob => "a TrainJob (PET_NNODES)",
            Engine::Pods => "Kubernetes (KOLO_PODS)",
        })
    }
}

/// What was found in an environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where this process is.
    pub place: Place,
    /// Who says so.
    pub engine: Engine,
    /// The variables that decided, with their values.
    pub read: Vec<(String, String)>,
    /// Variables of launchers that did not, and why.
    pub ignored: Vec<(String, String)>,
}

/// What the variables of one launcher say.
struct Claim {
    place: Place,
}

impl Claim {
    fn alone() -> Claim {
        Claim { place: Place::Alone }
    }

    fn rank(place: RankPlace, meeting: Meeting) -> Result<Option<Claim>> {
        place.check()?;
        Ok(Some(match place.size {
            1 => Claim::alone(),
            _ => Claim { place: Place::Rank(RankSeat { place, meeting }) },
        }))
    }
}

/// How the variables of a launcher are read.
struct Reading {
    engine: Engine,
    /// Its name in `KOLO_PLACE`.
    name: &'static str,
    /// `None` if it has not started this process, or has not said so.
    claim: fn(&Reader<'_>) -> Result<Option<Claim>>,
    /// What it may set.
    variables: &'static [&'static str],
}

/// All of them, in their order.
const READINGS: &[Reading] = &[
    Reading { engine: Engine::KoloRanks, name: "world", claim: ranks::of_world, variables: &["KOLO_WORLD"] },
    Reading { engine: Engine::Ranks, name: "ranks", claim: ranks::claim, variables: ranks::VARIABLES },
    Reading { engine: Engine::TfConfig, name: "tf_config", claim: tf_config::claim, variables: &["TF_CONFIG"] },
    Reading { engine: Engine::Mpi, name: "mpi", claim: mpi::claim, variables: mpi::VARIABLES },
    Reading { engine: Engine::Slurm, name: "slurm", claim: slurm::claim, variables: slurm::VARIABLES },
    Reading { engine: Engine::TrainJob, name: "trainjob", claim: pods::of_train_job, variables: pods::TRAIN_JOB },
    Reading { engine: Engine::Pods, name: "pods", claim: pods::claim, variables: pods::VARIABLES },
];

/// Names the launcher to believe.
const CHOICE: &str = "KOLO_PLACE";

/// Finds the place of a process in its environment.
///
/// Errors have the code `FailedPrecondition` if a launcher has room for several processes and has started none of them yet, so
/// that starting several by other means is right; and `InvalidArgument` if variables are missing or contradict each other.
///
/// ```
/// use kolo::place::{Environment, Place, find};
///
/// let environment = Environment::new([("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "4000")]);
/// let Place::Rank(seat) = find(&environment)?.place else { panic!() };
/// assert_eq!((seat.place.rank, seat.place.size), (1, 2));
/// assert!(matches!(find(&Environment::default())?.place, Place::Alone));
/// assert!(find(&Environment::new([("RANK", "1")])).is_err());
/// # Ok::<(), kolo::Error>(())
/// ```
pub fn find(environment: &Environment) -> Result<Found> {
    let choice = environment.get(CHOICE);
    // Its processes may have inherited a word that was meant for the one that started them.
    if environment.get("KOLO_WORLD").is_none()
        && let Some(name) = choice
    {
        return find_chosen(environment, name);
    }
    for (i, reading) in READINGS.iter().enumerate() {
        let reader = Reader::new(environment);
        let Some(claim) = (reading.claim)(&reader)? else { continue };
        if reading.engine != Engine::KoloRanks {
            READINGS[i + 1..].iter().try_for_each(|other| agree(reading, &claim, other, environment))?;
        }
        return Ok(found(environment, Some(reading), &reader, claim.place));
    }
    Ok(found(environment, None, &Reader::new(environment), Place::Alone))
}

fn find_chosen(environment: &Environment, name: &str) -> Result<Found> {
    let reader = Reader::new(environment);
    reader.get(CHOICE);
    if name == "alone" {
        return Ok(found(environment, None, &reader, Place::Alone));
    }
    let Some(reading) = READINGS.iter().find(|reading| reading.name == name) else {
        let names: Vec<_> = READINGS.iter().map(|reading| reading.name).filter(|name| *name != "world").collect();
        return Err(Error::invalid_argument(format!(
            "{CHOICE}='{name}' is none of alone, {}: it names whose variables say which process this is",
            names.join(", ")
        )));
    };
    match (reading.claim)(&reader)? {
        Some(claim) => Ok(found(environment, Some(reading), &reader, claim.place)),
        None => Err(Error::invalid_argument(format!(
            "{CHOICE}={name}, and {} says nothing about this process, by {}; unset {CHOICE}, or start it there",
            reading.engine,
            reading.variables.join(", ")
        ))),
    }
}

/// An error if the variables of another launcher contradict those of the first.
fn agree(first: &Reading, claim: &Claim, other: &Reading, environment: &Environment) -> Result<()> {
    // Half a launcher is no contradiction, only none.
    let Ok(Some(second)) = (other.claim)(&Reader::new(environment)) else { return Ok(()) };
    let Place::Rank(theirs) = &second.place else { return Ok(()) };
    let (engine, by) = (first.engine, other.engine);
    let theirs = theirs.place;
    match &claim.place {
        Place::Alone => Err(Error::invalid_argument(format!(
            "{engine} says that this process is the only one, and {by} says that it is rank {} of {}, so that {} of them would each \
             train alone; unset {} if they are to train together, or set {CHOICE}=alone if each is to train alone",
            theirs.rank,
            theirs.size,
            theirs.size,
            set_ones(first.variables, environment)
        ))),
        // Daemons of `mpirun` may be what Slurm counts.
        Place::Rank(_) if (engine, by) == (Engine::Mpi, Engine::Slurm) => Ok(()),
        Place::Rank(seat) if seat.place.size == theirs.size && seat.place.rank != theirs.rank => {
            Err(Error::invalid_argument(format!(
                "{engine} says that this is rank {} of {}, and {by} says that it is rank {}; unset what is wrong, or set {CHOICE} to \
                 the one to believe: {} or {}",
                seat.place.rank, seat.place.size, theirs.rank, first.name, other.name
            )))
        }
        Place::Rank(_) | Place::Task(_) => Ok(()),
    }
}

/// Those of some variables that are set.
fn set_ones(variables: &[&str], environment: &Environment) -> String {
    let set: Vec<&str> = variables.iter().copied().filter(|name| environment.get(name).is_some()).collect();
    set.join(", ")
}

fn found(environment: &Environment, by: Option<&Reading>, reader: &Reader<'_>, place: Place) -> Found {
    let read = reader.read();
    let mut ignored: Vec<(String, String)> = Vec::new();
    for reading in READINGS {
        for name in reading.variables.iter().filter(|name| environment.get(name).is_some()) {
            let is_known = read.iter().chain(&ignored).any(|(known, _)| known == name);
            if is_known {
                continue;
            }
            let why = match by {
                Some(by) if by.engine == reading.engine => "it is not needed".to_owned(),
                Some(by) => format!("{} decides", by.engine),
                None if environment.get(CHOICE).is_some() => format!("{CHOICE}=alone decides"),
                None if reading.engine == Engine::TfConfig => "it names no cluster".to_owned(),
                None => format!("by itself it does not say which process this is, as {} would", reading.engine),
            };
            ignored.push(((*name).to_owned(), why));
        }
    }
    Found { place, engine: by.map_or(Engine::Nobody, |by| by.engine), read, ignored }
}
