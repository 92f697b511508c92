//! What a process is told about itself and the others: by the names of torchrun, TensorFlow, Horovod and Open MPI.

use std::collections::BTreeMap;

use serde_json::json;

use crate::place::{Engine, Environment, Meeting, Place, RankSeat, find};
use crate::{Error, Result};

/// What other launchers have started beside this one: one on each node of a Slurm job, or in each pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// Which node this is.
    pub node: usize,
    pub n_nodes: usize,
    /// Where rank 0 listens.
    pub host: String,
    pub port: String,
}

/// A process among all.
#[derive(Clone, Debug)]
pub struct Seat {
    pub rank: usize,
    pub size: usize,
    pub local_rank: usize,
    pub local_size: usize,
    pub node: usize,
    pub n_nodes: usize,
}

/// Where the processes of one start find each other.
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    pub master: (String, String),
    /// One for each process, for servers of TensorFlow; none if they are not known.
    pub tasks: Vec<String>,
    /// One for each process, where elastic ranks listen.
    pub listen: Vec<String>,
}

/// How many processes are started here.
pub fn own_slots(flag: Option<usize>, environment: &Environment) -> Result<usize> {
    let by_pod = || environment.get("PET_NPROC_PER_NODE").and_then(|text| text.parse().ok());
    match flag.or_else(by_pod).unwrap_or(1) {
        0 => Err(Error::invalid_argument("-n 0 starts nothing; give a number of processes")),
        n => Ok(n),
    }
}

/// Whether this launcher is one of several, and which.
pub fn outside(environment: &Environment) -> Result<Option<Outside>> {
    // How many processes a pod runs is for this launcher to see to.
    let found = match find(&environment.without("PET_NPROC_PER_NODE")) {
        // A script of Slurm, which starts as many as it is told.
        Err(error) if error.code() == crate::Code::FailedPrecondition => return Ok(None),
        found => found?,
    };
    match (found.place, found.engine) {
        (Place::Alone, _) => Ok(None),
        (
            Place::Rank(RankSeat { place, meeting: Meeting::Address(address) }),
            Engine::Slurm | Engine::TrainJob | Engine::Pods,
        ) => {
            if place.local_size != 1 {
                return Err(Error::invalid_argument(format!(
                    "{} has started {} processes on this host already; start one launcher on each (srun --ntasks-per-node 1), or the \
                     program without `kolo launch`",
                    found.engine, place.local_size
                )));
            }
            let (host, port) = address.rsplit_once(':').unwrap_or((&address, ""));
            let host = host.trim_matches(['[', ']']).to_owned();
            Ok(Some(Outside { node: place.rank, n_nodes: place.size, host, port: port.to_owned() }))
        }
        (_, engine) => Err(Error::invalid_argument(format!(
            "{engine} says that this launcher is one of several, so that each would start processes of its own; leave out `kolo \
             launch`, or set KOLO_PLACE=alone if that is meant"
        ))),
    }
}

/// The variables of a process. `attempt` counts the starts before this one.
pub fn of_process(
    seat: &Seat,
    addresses: &Addresses,
    attempt: u32,
    joins: bool,
) -> Result<BTreeMap<&'static str, String>> {
    let Seat { rank, size, local_rank, local_size, node, n_nodes } = *seat;
    let (host, port) = addresses.master.clone();
    let mut variables = BTreeMap::from([
        ("MASTER_ADDR", host),
        ("MASTER_PORT", port),
        // What started this launcher is not what started the process.
        ("KOLO_PLACE", "ranks".to_owned()),
        ("HOROVOD_CONTROLLER", "gloo".to_owned()),
        ("HOROVOD_CPU_OPERATIONS", "gloo".to_owned()),
    ]);
    let numbers = [
        ("RANK", rank),
        ("WORLD_SIZE", size),
        ("LOCAL_RANK", local_rank),
        ("LOCAL_WORLD_SIZE", local_size),
        ("GROUP_RANK", node),
        ("GROUP_WORLD_SIZE", n_nodes),
        ("HOROVOD_RANK", rank),
        ("HOROVOD_SIZE", size),
        ("HOROVOD_LOCAL_RANK", local_rank),
        ("HOROVOD_LOCAL_SIZE", local_size),
        ("HOROVOD_CROSS_RANK", node),
        ("HOROVOD_CROSS_SIZE", n_nodes),
        ("OMPI_COMM_WORLD_RANK", rank),
        ("OMPI_COMM_WORLD_SIZE", size),
        ("OMPI_COMM_WORLD_LOCAL_RANK", local_rank),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", local_size),
        ("OMPI_COMM_WORLD_NODE_RANK", local_rank),
        ("TORCHELASTIC_RESTART_COUNT", attempt as usize),
        ("KOLO_RESTART", attempt as usize),
    ];
    variables.extend(numbers.map(|(name, number)| (name, number.to_string())));
    if !addresses.tasks.is_empty() {
        let config = json!({ "cluster": { "worker": addresses.tasks }, "task": { "type": "worker", "index": rank } });
        variables.insert("TF_CONFIG", config.to_string());
    }
    if let Some(own) = addresses.listen.get(rank) {
        variables.insert("KOLO_LISTEN", own.clone());
        if joins {
            let others: Vec<&str> = addresses.listen.iter().filter(|other| *other != own).map(String::as_str).collect();
            variables.insert("KOLO_JOIN", others.join(","));
        }
    }
    Ok(variables)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_kolo_process_finds_in_them_what_was_meant() {
        let addresses = Addresses {
            master: ("10.0.0.1".to_owned(), "4000".to_owned()),
            tasks: ["a:1", "a:2", "b:1"].map(str::to_owned).to_vec(),
            listen: ["a:3", "a:4", "b:3"].map(str::to_owned).to_vec(),
        };
        let seat = Seat { rank: 1, size: 3, local_rank: 1, local_size: 2, node: 0, n_nodes: 2 };
        let variables = of_process(&seat, &addresses, 2, true).unwrap();
        assert_eq!((variables["KOLO_JOIN"].as_str(), variables["KOLO_LISTEN"].as_str()), ("a:3,b:3", "a:4"));
        assert_eq!(variables["KOLO_RESTART"], "2");
        let Place::Rank(found) = find(&Environment::new(variables.clone())).unwrap().place else { panic!() };
        assert_eq!((found.place.rank, found.place.size, found.place.local_size), (1, 3, 2));
        assert_eq!(found.meeting, Meeting::Address("10.0.0.1:4000".to_owned()));
        // The others agree, should somebody ask them.
        for choice in ["tf_config", "mpi"] {
            let others = variables.iter().map(|(name, text)| (*name, text.as_str())).chain([("KOLO_PLACE", choice)]);
            let Place::Rank(other) = find(&Environment::new(others)).unwrap().place else { panic!() };
            assert_eq!((other.place.rank, other.place.size), (1, 3));
        }
        assert!(!of_process(&seat, &addresses, 0, false).unwrap().contains_key("KOLO_JOIN"));
    }

    #[test]
    fn launchers_on_several_nodes_know_their_own() {
        let of = |text: &str| outside(&Environment::new(text.split(' ').map(|word| word.split_once('=').unwrap())));
        let job = "PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK=1 PET_MASTER_ADDR=first PET_MASTER_PORT=29400";
        let expected = Outside { node: 1, n_nodes: 2, host: "first".to_owned(), port: "29400".to_owned() };
        assert_eq!(of(job).unwrap(), Some(expected));
        assert_eq!(own_slots(None, &Environment::new([("PET_NPROC_PER_NODE", "4")])).unwrap(), 4);
        assert_eq!(of("SLURM_JOB_ID=1 SLURM_NTASKS=4").unwrap(), None);
        let step = "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 \
            SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE=2(x2)";
        let step = step.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(of(&step).unwrap_err().to_string().contains("--ntasks-per-node 1"));
        assert!(of("RANK=1 WORLD_SIZE=2").unwrap_err().to_string().contains("leave out `kolo launch`"));
    }
}
