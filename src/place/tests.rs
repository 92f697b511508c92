//! Environments of launchers, and what a process finds in them.
#![allow(clippy::unwrap_used)]

use kolo_core::Code;
use proptest::prelude::*;

use super::*;

/// `NAME=value` words.
fn environment(text: &str) -> Environment {
    Environment::new(text.split_whitespace().map(|word| word.split_once('=').unwrap()))
}

fn rank(text: &str) -> (RankPlace, Meeting, Engine) {
    let found = find(&environment(text)).unwrap_or_else(|error| panic!("{text}: {error}"));
    match found.place {
        Place::Rank(seat) => (seat.place, seat.meeting, found.engine),
        other => panic!("{text}: {other:?}"),
    }
}

fn at(rank: usize, size: usize, local_rank: usize, local_size: usize) -> RankPlace {
    RankPlace { rank, size, local_rank, local_size }
}

#[track_caller]
fn refused(environment: &Environment, code: Code, words: &[&str]) {
    let error = find(environment).unwrap_err();
    assert!(error.code() == code && words.iter().all(|word| error.message().contains(word)), "{error:?}");
}

const SRUN: &str = "SLURM_JOB_ID=70 SLURM_STEP_ID=1 SLURM_NTASKS=5 SLURM_STEP_NUM_TASKS=5 SLURM_PROCID=3 SLURM_LOCALID=1 \
    SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_STEP_NODELIST=n[08-09],m1";

#[test]
fn every_launcher_is_understood() {
    let on = |address: &str| Meeting::Address(address.to_owned());
    let by_name = |host: &str, text: &str| {
        let found = find(&environment(text).on_host(host)).unwrap();
        let Place::Rank(seat) = found.place else { panic!("{found:?}") };
        (seat.place, seat.meeting, found.engine)
    };
    let torchrun = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=4000";
    assert_eq!(rank(torchrun), (at(5, 8, 1, 4), on("a:4000"), Engine::Ranks));
    assert_eq!(rank("RANK=1 WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=4000").1, on("[::1]:4000"));
    assert_eq!(rank("RANK=1 WORLD_SIZE=2").1, Meeting::Unsaid);
    // Each pod of a PyTorchJob is a host.
    let pod = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PET_NPROC_PER_NODE=1 KUBERNETES_SERVICE_HOST=10.0.0.1";
    assert_eq!(rank(pod), (at(1, 2, 0, 1), on("job-master-0:23456"), Engine::Ranks));
    let own = "KOLO_WORLD=/proc/1/fd/3 RANK=0 WORLD_SIZE=1 KOLO_PLACE=alone";
    assert_eq!(rank(own), (at(0, 1, 0, 1), Meeting::File("/proc/1/fd/3".into()), Engine::KoloRanks));
    let open_mpi =
        "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4";
    let over = |kind, library: Option<&str>| Meeting::Mpi { kind, library: library.map(PathBuf::from) };
    assert_eq!(rank(open_mpi), (at(5, 8, 1, 4), over(MpiKind::OpenMpi, None), Engine::Mpi));
    // Slurm counts the daemons of an mpirun in its job.
    assert_eq!(rank(&format!("{open_mpi} {SRUN}")).2, Engine::Mpi);
    let mpich = "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 KOLO_MPI_LIBRARY=/opt/libmpi.so";
    assert_eq!(rank(mpich), (at(0, 2, 0, 2), over(MpiKind::Mpich, Some("/opt/libmpi.so")), Engine::Mpi));
    assert_eq!(rank(SRUN), (at(3, 5, 1, 2), on("n08:16945"), Engine::Slurm));
    // What `srun --mpi=pmi2` adds is no mpirun.
    assert_eq!(rank(&format!("{SRUN} PMI_RANK=3 PMI_SIZE=5")).2, Engine::Slurm);
    assert_eq!(rank(&format!("{SRUN} SLURM_STEP_RESV_PORTS=12000-12003")).1, on("n08:12000"));
    assert_eq!(rank(&format!("{SRUN} MASTER_ADDR=b MASTER_PORT=7")).1, on("b:7"));
    let one_node = SRUN.replace("n[08-09],m1", "n08").replace("2(x2),1", "5").replace("NODEID=1", "NODEID=0");
    assert_eq!(rank(&one_node).1, on("127.0.0.1:16945"));
    let train_job =
        "PET_NNODES=3 PET_NPROC_PER_NODE=auto PET_NODE_RANK=2 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400";
    assert_eq!(rank(train_job), (at(2, 3, 0, 1), on("job-node-0-0.job:29400"), Engine::TrainJob));
    let stateful_set = "KOLO_PODS=4 KOLO_SERVICE=trainer";
    assert_eq!(by_name("trainer-3", stateful_set), (at(3, 4, 0, 1), on("trainer-0.trainer:29500"), Engine::Pods));
    let job_set = "KOLO_PODS=4 KOLO_SERVICE=digits JOB_COMPLETION_INDEX=2 KOLO_PORT=4000";
    assert_eq!(by_name("digits-workers-0-2", job_set).1, on("digits-workers-0-0.digits:4000"));
    assert_eq!(by_name("pod", "KOLO_PODS=2 JOB_COMPLETION_INDEX=1 MASTER_ADDR=first").1, on("first:29500"));
}

#[test]
fn tf_config_is_a_task_or_a_rank_in_all_its_forms() {
    let find = |json: &str| find(&Environment::new([("TF_CONFIG", json)])).unwrap().place;
    let ps = r#""ps": ["p:1"], "#;
    let config = |ps: &str, job: &str, index: &str| {
        format!(
            r#"{{"cluster": {{{ps}"chief": ["c:1"], "worker": ["c:2", "w:1"]}}, "task": {{"type": "{job}", "index": {index}}}}}"#
        )
    };
    let seat = |place: Place| match place {
        Place::Task(seat) => (seat.job.clone(), seat.index, seat.replica(), seat.n_replicas(), seat.n_ps()),
        other => panic!("{other:?}"),
    };
    assert_eq!(seat(find(&config(ps, "chief", "0"))), ("chief".to_owned(), 0, Some(0), 3, 1));
    assert_eq!(seat(find(&config(ps, "worker", "\"1\""))), ("worker".to_owned(), 1, Some(2), 3, 1));
    assert_eq!(seat(find(&config(ps, "ps", "0"))), ("ps".to_owned(), 0, None, 3, 1));
    assert_eq!(seat(find(&config("", "evaluator", "0"))), ("evaluator".to_owned(), 0, None, 3, 0));
    let master = r#"{"cluster": {"master": ["m:1"], "ps": ["p:1"]}, "task": {"type": "master"}}"#;
    assert_eq!(seat(find(master)).2, Some(0));
    // Without parameter servers all of them are alike, and the chief is the first.
    let ranks = |job: &str, index: &str| match find(&config("", job, index)) {
        Place::Rank(seat) => (seat.place, seat.meeting),
        other => panic!("{other:?}"),
    };
    assert_eq!(ranks("chief", "0"), (at(0, 3, 0, 2), Meeting::Address("c:1".to_owned())));
    assert_eq!(ranks("worker", "0").0, at(1, 3, 1, 2));
    assert_eq!(ranks("worker", "1").0, at(2, 3, 0, 1));
    for alone in [
        "{}",
        r#"{"cluster": {}, "task": {"type": "worker", "index": 0}}"#,
        r#"{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}"#,
        r#"{"cluster": {"chief": ["a:1"]}}"#,
    ] {
        assert_eq!(find(alone), Place::Alone, "{alone}");
    }
}

#[test]
fn nobody_and_ones_are_alone() {
    for text in [
        "",
        "RANK=0 WORLD_SIZE=1",
        "MASTER_ADDR=a MASTER_PORT=1 LOCAL_RANK=1",
        "OMPI_COMM_WORLD_SIZE=1",
        "SLURM_JOB_ID=1 SLURM_NTASKS=1",
        "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0",
        "PET_NNODES=1 PET_NPROC_PER_NODE=1",
        "KOLO_PODS=1",
        "TF_CONFIG= RANK=",
    ] {
        assert_eq!(find(&environment(text)).unwrap().place, Place::Alone, "{text}");
    }
    let found = find(&environment(&format!("{SRUN} KOLO_PLACE=alone"))).unwrap();
    assert_eq!((found.place, found.read), (Place::Alone, vec![("KOLO_PLACE".to_owned(), "alone".to_owned())]));
}

#[test]
fn half_an_environment_is_refused_with_the_cure() {
    for (text, words) in [
        ("RANK=1", &["one of RANK and WORLD_SIZE is set", "kolo launch"][..]),
        ("RANK=x WORLD_SIZE=2", &["RANK='x' is not a number"]),
        ("RANK=+1 WORLD_SIZE=2", &["RANK='+1' is not a number"]),
        ("RANK=2 WORLD_SIZE=2", &["there is no rank 2"]),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", &["MASTER_PORT=0 is no port"]),
        ("KOLO_WORLD=/x", &["RANK and WORLD_SIZE are not"]),
        ("PMI_SIZE=2", &["PMI_SIZE is set, as by the mpirun of MPICH, and PMI_RANK is not"]),
        ("OMPI_COMM_WORLD_SIZE=many", &["OMPI_COMM_WORLD_SIZE='many' is not a number"]),
        ("PET_NNODES=2 PET_NODE_RANK=1", &["PET_MASTER_ADDR is not"]),
        ("PET_NNODES=1:4", &["is a range", "numNodes"]),
        ("KOLO_PODS=2", &["host's name, '', does not end with a number", "JOB_COMPLETION_INDEX"]),
        ("KOLO_PLACE=slrum", &["none of alone, ranks, tf_config, mpi, slurm"]),
        ("KOLO_PLACE=slurm", &["Slurm's srun says nothing about this process", "SLURM_PROCID"]),
    ] {
        refused(&environment(text), Code::InvalidArgument, words);
    }
    let without =
        |name: &str| environment(&SRUN.split(' ').filter(|word| !word.starts_with(name)).collect::<Vec<_>>().join(" "));
    for name in ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"] {
        refused(&without(name), Code::InvalidArgument, &[name, "is not"]);
    }
    refused(
        &environment(&SRUN.replace("m1", "m[1-2]")),
        Code::InvalidArgument,
        &["contradict each other", "4 nodes in the list"],
    );
    refused(&environment(&SRUN.replace("m1", "m[1")), Code::InvalidArgument, &["SLURM_STEP_NODELIST=", "not closed"]);
    let other_first = SRUN.replace("PROCID=3", "PROCID=0").replace("LOCALID=1", "LOCALID=0") + " SLURMD_NODENAME=n09";
    refused(&environment(&other_first), Code::InvalidArgument, &["rank 0 is on n09", "MASTER_ADDR=n09"]);
    refused(&environment(&format!("{SRUN} SLURM_HET_SIZE=2")), Code::InvalidArgument, &["heterogeneous"]);
    // There is room for processes that nobody has started.
    let script = "SLURM_JOB_ID=1 SLURM_NTASKS=4 SLURM_PROCID=0";
    refused(&environment(script), Code::FailedPrecondition, &["SLURM_NTASKS=4", "srun kolo train", "KOLO_PLACE=alone"]);
    let shell = format!("{script} SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1");
    refused(&environment(&shell), Code::FailedPrecondition, &["the only one"]);
    let many = "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=4 PET_MASTER_ADDR=a";
    refused(&environment(many), Code::FailedPrecondition, &["4 processes", "kolo launch -- PROGRAM"]);
    refused(
        &environment(&format!("{many} RANK=1 WORLD_SIZE=8")),
        Code::FailedPrecondition,
        &["4 processes", "kolo launch -- PROGRAM"],
    );
    let unnamed = Environment::new([("KOLO_PODS", "2")]).on_host("trainer-1");
    refused(&unnamed, Code::InvalidArgument, &["KOLO_SERVICE"]);
    let two_jobs = Environment::new([("KOLO_PODS", "4"), ("JOB_COMPLETION_INDEX", "3"), ("KOLO_SERVICE", "s")])
        .on_host("js-w-0-1");
    refused(&two_jobs, Code::InvalidArgument, &["JOB_COMPLETION_INDEX=3", "ends with 1"]);
    let port_0 = r#"{"cluster": {"worker": ["a:0", "b:0"]}, "task": {"type": "worker", "index": 1}}"#;
    refused(&Environment::new([("TF_CONFIG", port_0)]), Code::InvalidArgument, &["port 0"]);
    refused(&Environment::new([("TF_CONFIG", "{")]), Code::InvalidArgument, &["TF_CONFIG is not JSON"]);
}

#[test]
fn launchers_that_contradict_each_other_are_refused() {
    // Open MPI 5 under plain `srun`, and others that begin a world of one in each task.
    for one in ["OMPI_COMM_WORLD_SIZE=1", "WORLD_SIZE=1 RANK=0", "PMI_SIZE=1 PMI_RANK=0"] {
        let name = one.split('=').next().unwrap();
        let words = ["is the only one", "rank 3 of 5", "each train alone", "KOLO_PLACE=alone", name];
        refused(&environment(&format!("{SRUN} {one}")), Code::InvalidArgument, &words);
    }
    let other = format!("{SRUN} RANK=1 WORLD_SIZE=5");
    refused(&environment(&other), Code::InvalidArgument, &["rank 1 of 5", "rank 3", "ranks or slurm"]);
    // The word decides, and so does the inner launcher where both are well.
    assert_eq!(rank(&format!("{other} KOLO_PLACE=slurm")).2, Engine::Slurm);
    let torchrun_on_each_node =
        format!("{SRUN} RANK=1 WORLD_SIZE=20 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n08 MASTER_PORT=1");
    assert_eq!(rank(&torchrun_on_each_node).0, at(1, 20, 1, 4));
    let config = r#"{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}"#;
    let both = |rank: &str| {
        Environment::new([
            ("TF_CONFIG", config),
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "2"),
        ])
    };
    refused(
        &both("0"),
        Code::InvalidArgument,
        &["RANK says", "TF_CONFIG says that it is rank 1", "ranks or tf_config"],
    );
    assert_eq!(find(&both("1")).unwrap().engine, Engine::Ranks);
}

#[test]
fn what_was_read_and_what_was_not_is_told() {
    let found = find(&environment(&format!("{SRUN} LOCAL_RANK=7 KOLO_PODS=3 MASTER_PORT=9"))).unwrap();
    let read = |name: &str| found.read.iter().any(|(read, _)| read == name);
    assert!(read("SLURM_PROCID") && read("MASTER_PORT") && !read("KOLO_PODS") && !read("LOCAL_RANK"), "{found:?}");
    let why = |name: &str| found.ignored.iter().find(|(ignored, _)| ignored == name).map(|(_, why)| why.as_str());
    assert_eq!(why("LOCAL_RANK"), Some("Slurm's srun decides"));
    assert_eq!((why("KOLO_PODS"), why("MASTER_PORT")), (Some("Slurm's srun decides"), None));
    assert_eq!(why("SLURM_NTASKS"), None, "{found:?}");
    let alone = find(&environment("MASTER_ADDR=a")).unwrap();
    assert_eq!(
        alone.ignored,
        [("MASTER_ADDR".to_owned(), "by itself it does not say which process this is, as RANK would".to_owned())]
    );
}

/// What variables may hold: what launchers write, and what they do not.
fn value() -> impl Strategy<Value = String> {
    let known = [
        "0",
        "1",
        "2",
        "4",
        "18446744073709551615",
        "-1",
        "a",
        "n[1-3]",
        "n[1-3",
        "2(x2)",
        "9999999999999999999(x2)",
        "auto",
        "1:4",
        "{}",
    ];
    let config = r#"{"cluster": {"worker": ["a:1", "b:0"], "ps": ["p:1"]}, "task": {"type": "worker", "index": 1}}"#;
    prop_oneof![
        prop::sample::select(known.to_vec()).prop_map(str::to_owned),
        Just(config.to_owned()),
        "[\\[\\](x),0-9a:é-]{0,12}",
    ]
}

proptest! {
    #[test]
    fn no_environment_is_too_strange(
        values in prop::collection::vec((any::<prop::sample::Index>(), value()), 0..14),
        host in "[a-z0-9.-]{0,12}",
    ) {
        let names: Vec<&str> = READINGS.iter().flat_map(|reading| reading.variables).copied().chain([CHOICE, "SLURMD_NODENAME"]).collect();
        let variables = values.into_iter().map(|(name, value)| (*name.get(&names), value));
        let environment = Environment::new(variables).on_host(&host);
        match find(&environment) {
            Ok(Found { place: Place::Rank(seat), .. }) => prop_assert!(seat.place.check().is_ok()),
            Ok(Found { place: Place::Task(seat), .. }) => prop_assert!(seat.replica().is_none_or(|n| n < seat.n_replicas())),
            Ok(_) => {}
            Err(error) => prop_assert!([Code::InvalidArgument, Code::FailedPrecondition].contains(&error.code()), "{error:?}"),
        }
    }
}
