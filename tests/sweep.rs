//! `kolo sweep`: many runs of one recipe, as processes.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{Folder, PATIENCE, Process, kolo, one_at_a_time};

fn events(text: &str) -> Vec<Value> {
    text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect()
}

/// A sweep that ends well, and its results.
fn sweep(dir: &Folder, flags: &[&str]) -> (Vec<Value>, Value) {
    let dir = dir.0.to_str().unwrap().to_owned();
    let args = [&["sweep", "linear", "--json", "--dir", &dir], flags].concat();
    let (is_well, text) = kolo(&args);
    assert!(is_well, "{args:?}: {text}");
    let mut events = events(&text);
    let end = events.iter().position(|event| event["event"] == "sweep-end").unwrap_or_else(|| panic!("{text}"));
    let end = events.remove(end);
    (events, end)
}

fn states(end: &Value) -> Vec<(u64, String)> {
    let run = |run: &Value| (run["run"].as_u64().unwrap(), run["state"].as_str().unwrap().to_owned());
    let mut states: Vec<(u64, String)> = end["runs"].as_array().unwrap().iter().map(run).collect();
    states.sort();
    states
}

#[test]
fn a_grid_names_the_best_run_and_a_run_that_fails_does_not_end_the_others() {
    let _turn = one_at_a_time();
    let dir = Folder::new("sweep-grid");
    // A rate of 30 makes the loss infinite, which ends that run with an error.
    let grid = ["--grid", "lr=0.2,30,0.0001", "--grid", "optimizer=sgd", "--parallel", "2", "--", "--epochs", "2"];
    let (_, end) = sweep(&dir, &grid);
    assert_eq!(states(&end), [(1, "done".to_owned()), (2, "failed".to_owned()), (3, "done".to_owned())]);
    assert_eq!((&end["best"], &end["by"]), (&Value::from(1), &Value::from("test-loss")));
    assert_eq!(end["command"], "kolo train linear --epochs 2 --lr=0.2 --optimizer=sgd");
    let failed = end["runs"].as_array().unwrap().iter().find(|run| run["state"] == "failed").unwrap();
    assert!(failed["error"].as_str().unwrap().contains("try a smaller learning rate"), "{failed}");
    let log = std::fs::read_to_string(dir.0.join("run-0002.log")).unwrap();
    assert!(log.contains("try a smaller learning rate"), "{log}");
    // The folder is this sweep's: again is refused, and to resume makes what failed alone.
    let dir_text = dir.0.to_str().unwrap();
    let (is_well, text) = kolo(&[&["sweep", "linear", "--dir", dir_text], &grid[..]].concat());
    assert!(!is_well && text.contains("--resume goes on with it"), "{text}");
    let (is_well, text) = kolo(&[&["sweep", "linear", "--resume", "--dir", dir_text], &grid[..]].concat());
    assert!(is_well && text.contains("Best by test-loss: run 1 (lr=0.2 optimizer=sgd)"), "{text}");
    assert!(
        text.contains("Run 2 (lr=30 optimizer=sgd) failed") && !text.contains("Run 1 (lr=0.2 optimizer=sgd) is done"),
        "{text}"
    );
}

#[test]
fn halving_stops_the_hopeless_and_the_best_ends_as_if_it_had_been_alone() {
    let _turn = one_at_a_time();
    let dir = Folder::new("sweep-halving");
    let flags = ["--grid", "lr=0.00001,0.2,0.001,0.01", "--halving", "40", "--best", "final-cost"];
    let (events, end) = sweep(&dir, &flags);
    let halved = |run| (run, "halved".to_owned());
    assert_eq!(states(&end), [halved(1), (2, "done".to_owned()), halved(3), halved(4)]);
    assert_eq!(end["best"], 2);
    // Two rungs: after 40 steps, and after 80 for those that were left.
    let run = |n: u64| end["runs"].as_array().unwrap().iter().find(|run| run["run"] == n).unwrap().clone();
    assert_eq!([1, 2, 3, 4].map(|n| run(n)["scores"].as_array().unwrap().len()), [1, 2, 1, 2]);
    assert!(events.iter().all(|event| event["event"] == "run"), "{events:?}");
    // With checkpoints as well, so that both keep their place in the data.
    let (_, alone) = kolo(&["train", "linear", "--json", "--lr=0.2", "--checkpoint-dir", &dir.path("alone")]);
    let alone = alone.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok()).unwrap();
    assert_eq!((&run(2)["result"]["weights"], &run(2)["result"]["step"]), (&alone["weights"], &alone["step"]));
}

#[test]
fn random_points_are_made_under_a_limit_of_memory() {
    let _turn = one_at_a_time();
    let dir = Folder::new("sweep-random");
    let flags = [
        "--random",
        "3",
        "--seed",
        "3",
        "--range",
        "lr=log:0.01..0.5",
        "--range",
        "batch-size=10..20",
        "--parallel",
        "2",
    ];
    let (_, end) = sweep(&dir, &[&flags[..], &["--memory", "2G", "--", "--epochs", "1"]].concat());
    assert!(states(&end).iter().all(|(_, state)| state == "done"), "{end}");
    for run in end["runs"].as_array().unwrap() {
        let flag = |name: &str| run["flags"][name].as_str().unwrap().parse::<f64>().unwrap();
        assert!((0.01..=0.5).contains(&flag("lr")) && (10.0..=20.0).contains(&flag("batch-size")), "{run}");
    }
    // No program is that small.
    let dir = Folder::new("sweep-memory");
    let dir_text = dir.0.to_str().unwrap();
    let small =
        ["sweep", "linear", "--grid", "lr=0.1", "--memory", "1M", "--dir", dir_text, "--", "--epochs", "100000"];
    let (is_well, text) = kolo(&small);
    assert!(!is_well && text.contains("more than --memory 1M") && text.contains("no run has ended well"), "{text}");
}

#[test]
fn ctrl_c_ends_the_runs_and_keeps_what_is_done() {
    let _turn = one_at_a_time();
    let dir = Folder::new("sweep-stop");
    let dir_text = dir.0.to_str().unwrap();
    let args = |epochs| ["sweep", "linear", "--json", "--grid", epochs, "--dir", dir_text];
    let mut process = Process::start("sweep", &args("epochs=1,1000000"));
    let done = process.wait_for("\"done\"").text;
    assert!(done.contains("\"run\":1"), "{done}");
    let first = std::fs::metadata(dir.0.join("run-0001.json")).unwrap().modified().unwrap();
    process.signal("INT");
    assert!(process.wait().success());
    process.wait_for("\"stopped\"");
    let text = process.text();
    assert!(text.contains("--resume goes on"), "{text}");
    let end = events(&text).into_iter().find(|event| event["event"] == "sweep-end").unwrap();
    assert_eq!(states(&end), [(1, "done".to_owned()), (2, "waiting".to_owned())]);
    // Another sweep is not this one.
    let (is_well, text) = kolo(&[&args("epochs=1,2")[..], &["--resume"]].concat());
    assert!(!is_well && text.contains("holds another sweep (it has other points)"), "{text}");
    assert_eq!(std::fs::metadata(dir.0.join("run-0001.json")).unwrap().modified().unwrap(), first);
}

/// The processes that another one has started and that are still there.
fn children(of: &Process) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{}/task", of.pid())).unwrap();
    let files = threads.map(|thread| thread.unwrap().path().join("children"));
    let text: String = files.filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[test]
fn the_runs_of_a_sweep_that_is_killed_end() {
    let _turn = one_at_a_time();
    let dir = Folder::new("sweep-killed");
    let dir_text = dir.0.to_str().unwrap();
    let flags =
        ["sweep", "linear", "--grid", "seed=1,2", "--parallel", "2", "--dir", dir_text, "--", "--epochs", "1000000"];
    let mut process = Process::start("sweep", &flags);
    let begun = Instant::now();
    let has_said = |run: &str| std::fs::metadata(dir.0.join(run)).is_ok_and(|file| file.len() > 0);
    while !(has_said("run-0001.log") && has_said("run-0002.log")) {
        assert!(begun.elapsed() < PATIENCE, "no run has begun: {}", process.text());
        std::thread::sleep(Duration::from_millis(20));
    }
    let runs = children(&process);
    assert_eq!(runs.len(), 2, "{runs:?}");
    process.kill();
    let begun = Instant::now();
    while runs.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
        assert!(begun.elapsed() < PATIENCE, "runs are still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}
