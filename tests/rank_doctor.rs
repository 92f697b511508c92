//! `kolo doctor` on trainings by ranks: what it says while ranks are stopped, dead or busy with something else.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use kolo::parallel::World;
use serde_json::Value;
use support::{PATIENCE, Process, kolo, one_at_a_time};

const ENDLESS: [&str; 9] =
    ["train", "linear", "--json", "--batch-size", "48", "--log-every", "1", "--epochs", "100000000"];

/// A training of `n` ranks in shared memory, under way, with the process of each rank.
fn in_shared_memory(n: usize) -> (Vec<Process>, BTreeMap<usize, u32>) {
    let launcher = Process::start("launcher", &[&ENDLESS[..], &["--ranks", &n.to_string()]].concat());
    launcher.wait_for_step(0, |step| step > 20);
    let rank = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let text = String::from_utf8_lossy(&environment).into_owned();
        text.split('\0').find_map(|variable| variable.strip_prefix("RANK=")?.parse::<usize>().ok())
    };
    let path = format!("/proc/{0}/task/{0}/children", launcher.pid());
    let children = std::fs::read_to_string(path).unwrap();
    let pids = children.split_whitespace().map(|pid| pid.parse::<u32>().unwrap());
    let ranks = pids.filter_map(|pid| Some((rank(&pid)?, pid))).collect();
    (vec![launcher], ranks)
}

/// The same over TCP, as another launcher would start them.
fn over_tcp(n: usize) -> (Vec<Process>, BTreeMap<usize, u32>) {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: usize| {
        let (rank, size) = (rank.to_string(), n.to_string());
        let place = [("RANK", &*rank), ("WORLD_SIZE", &*size), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
        Process::start_with(
            &format!("rank {rank}"),
            &ENDLESS,
            &[&place[..], &[("KOLO_TOKEN", "a-token-of-tests")]].concat(),
        )
    };
    let ranks: Vec<Process> = (0..n).map(start).collect();
    ranks[0].wait_for_step(0, |step| step > 20);
    let pids = ranks.iter().enumerate().map(|(rank, process)| (rank, process.pid())).collect();
    (ranks, pids)
}

fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap().success());
}

/// What the doctor says of the training that `pid` belongs to, and whether it found it healthy.
fn ask(pid: u32) -> (bool, Value) {
    let (is_well, text) = kolo(&["doctor", "--pid", &pid.to_string(), "--overdue", "0.3", "--json"]);
    let report: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap_or_else(|_| panic!("{text}"));
    let [training] = &report["trainings"].as_array().unwrap()[..] else { panic!("{text}") };
    assert_eq!(is_well, report["healthy"] == true, "{text}");
    (is_well, training.clone())
}

/// Asks until it has found something.
fn finding(pid: u32) -> Value {
    let began = Instant::now();
    loop {
        let (is_well, training) = ask(pid);
        if !is_well && training["finding"]["waiting"].as_array().is_some_and(|waiting| !waiting.is_empty()) {
            return training;
        }
        assert!(began.elapsed() < PATIENCE, "nothing was found: {training}");
    }
}

#[test]
fn a_stopped_rank_is_named_with_what_it_was_doing_and_who_waits_where() {
    let _turn = one_at_a_time();
    for connect in [in_shared_memory, over_tcp] {
        let (processes, ranks) = connect(3);
        let (_, training) = ask(ranks[&0]);
        assert_eq!(training["ranks"].as_array().unwrap().len(), 3, "{training}");
        assert!(training["ranks"][1]["step"].as_i64().unwrap() > 0, "{training}");
        assert!(!training["ranks"][1]["last_calls"].as_array().unwrap().is_empty(), "{training}");
        signal(ranks[&1], "STOP");
        let training = finding(processes[0].pid());
        let found = &training["finding"];
        assert_eq!((&found["roots"], &found["cause"]), (&serde_json::json!([1]), &"stopped".into()), "{training}");
        let text = found["text"].as_str().unwrap();
        let fix = format!("rank 1 (is stopped (`kill -CONT {}` lets it go on); before that: ", ranks[&1]);
        assert!(text.contains(&fix) && text.contains("wait for rank 1"), "{text}");
        assert_eq!(found["waiting"], serde_json::json!([0, 2]), "{training}");
        assert!(found["step"].as_i64().unwrap() > 0 && found["call"]["name"].is_string(), "{training}");
        // The others say so as well, by themselves.
        processes[0].wait_for(&format!("`kill -CONT {}`", ranks[&1]));
        // For a person, all at once.
        let (is_well, text) = kolo(&["doctor", "--overdue", "0.3"]);
        assert!(!is_well && text.contains(&fix) && text.contains("train linear"), "{text}");
        signal(ranks[&1], "CONT");
    }
}

/// Over TCP a rank that is gone is known from what it has told.
#[test]
fn a_dead_rank_is_named_in_the_error_with_its_step_and_what_it_did() {
    let _turn = one_at_a_time();
    for connect in [in_shared_memory, over_tcp] {
        let (mut processes, ranks) = connect(3);
        signal(ranks[&2], "KILL");
        let line = processes[0].wait_for("rank 2 has");
        assert!(line.text.contains("has died") || line.text.contains("ended the group"), "{line:?}");
        let line = processes[0].wait_until("what it did", 0, |line| {
            line.text.contains("rank 2 has died") && line.text.contains("before that: ")
        });
        assert!(line.text.contains("in step "), "{line:?}");
        assert!(!processes[0].wait().success());
    }
}

/// A rank that stays outside of collectives, and one that never joins.
#[test]
fn ranks_of_a_program_are_told_apart_by_what_they_do() {
    let _turn = one_at_a_time();
    let worlds = World::threads(3).unwrap();
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || {
                world.begin_step(41);
                if world.rank() == 2 {
                    let training = finding(std::process::id());
                    let found = &training["finding"];
                    assert_eq!((&found["roots"], &found["cause"]), (&serde_json::json!([2]), &"compute".into()));
                    let text = found["text"].as_str().unwrap();
                    assert!(
                        text.starts_with("step 41: 2 of 3 ranks (0, 1) wait for rank 2 (computes in step 41 for"),
                        "{text}"
                    );
                    assert!(text.contains("in call 0, barrier 'barrier', in step 41, for"), "{text}");
                }
                world.barrier().unwrap();
            });
        }
    });
    let file = World::create(2).unwrap();
    let place = kolo::parallel::RankPlace::on_one_host(0, 2);
    let world = World::join(&file, place).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| world.barrier().unwrap_err().to_string());
        let training = finding(std::process::id());
        assert_eq!(training["finding"]["cause"], "absent", "{training}");
        World::close(&file, "a test").unwrap();
        assert!(waits.join().unwrap().contains("a test"));
    });
}

#[test]
fn a_training_that_is_none_is_an_error_and_a_healthy_one_is_well() {
    let _turn = one_at_a_time();
    let (is_well, text) = kolo(&["doctor", "--pid", "1"]);
    assert!(!is_well && text.contains("process 1 is none of a training with several ranks"), "{text}");
    let (processes, _) = in_shared_memory(2);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        let (is_well, training) = ask(processes[0].pid());
        assert!(is_well, "{training}");
    }
    let (is_well, text) = kolo(&["doctor", "--pid", &processes[0].pid().to_string()]);
    assert!(is_well && text.contains("Nothing is stuck.") && text.contains("(2 ranks in shared memory)"), "{text}");
}
