//! Every recipe of `kolo train` in every way of running it: alone, on two devices, in a cluster that one command starts
//! (asynchronous, synchronous, hybrid), and through servers that run already. The workers of a cluster train one set of
//! weights, whichever the recipe.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;

use serde_json::Value;
use support::{Folder, Process, Spec, kolo, write_pictures};

/// The flags of a small version, which is done in a moment, and its last step if one process trains alone.
struct Small {
    flags: Vec<String>,
    n_steps: i64,
}

fn small(flags: &[&str], n_steps: i64) -> Small {
    Small { flags: flags.iter().map(|flag| (*flag).to_owned()).collect(), n_steps }
}

#[test]
fn linear() {
    runs_in_every_way(&small(&["linear", "--batch-size", "100", "--epochs", "1"], 10));
}

#[test]
fn mnist() {
    let folder = Folder::new("recipes-mnist");
    write_pictures(&folder.0);
    let data = folder.path("");
    runs_in_every_way(&small(&["mnist", "--data", &data, "--batch-size", "40", "--epochs", "1"], 10));
}

#[test]
fn cifar() {
    let folder = Folder::new("recipes-cifar");
    write_colour_pictures(&folder.0);
    let data = folder.path("");
    runs_in_every_way(&small(&["cifar", "--data", &data, "--batch-size", "4", "--max-steps", "4"], 4));
}

#[test]
fn lm() {
    let folder = Folder::new("recipes-lm");
    std::fs::write(folder.0.join("text"), "ROMEO: but soft, what light\n".repeat(100)).unwrap();
    let text = folder.path("text");
    let size = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "8"];
    let rest = ["--batch-size", "8", "--max-steps", "6", "--data", &text, "--sample", "3", "--prompt", "ROMEO:"];
    runs_in_every_way(&small(&[&["lm"], &size[..], &rest[..]].concat(), 6));
}

#[test]
fn gpt2() {
    let size = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "8", "--vocabulary", "31"];
    let rest = ["--data", "synthetic", "--batch-size", "4", "--max-steps", "6"];
    runs_in_every_way(&small(&[&["lm", "--model", "gpt2-124m"], &size[..], &rest[..]].concat(), 6));
}

#[test]
fn resnet50() {
    let size = ["--side", "32", "--width", "2", "--classes", "4", "--precision", "f32"];
    runs_in_every_way(&small(&[&["resnet50"], &size[..], &["--batch-size", "4", "--max-steps", "2"]].concat(), 2));
}

fn runs_in_every_way(small: &Small) {
    let alone = one_end(&train(small, &["--device", "cpu:0"]));
    assert_eq!(alone["step"], small.n_steps, "{alone}");
    let on_two = one_end(&train(small, &["--devices", "cpu=2"]));
    assert_eq!(on_two["step"], small.n_steps, "{on_two}");

    by_all_reduce(small, &alone);
    let cluster = ["--ps", "1", "--workers", "2"];
    for mode in [&["--async"][..], &["--sync"], &["--hybrid", "timeout=60s,min=1"]] {
        let ends = train(small, &[&cluster[..], mode].concat());
        assert_shared(&ends, small, &alone, mode[0] == "--async");
    }
    through_servers(small, &alone);
}

/// Ranks that exchange gradients do as many steps as one process, with the same result.
fn by_all_reduce(small: &Small, alone: &Value) {
    let ranks = one_end(&train(small, &["--ranks", "2"]));
    let what = format!("{:?}: {ranks} for {alone}", small.flags);
    assert_eq!((&ranks["ranks"], &ranks["step"]), (&Value::from(2), &alone["step"]), "{what}");
    for result in ["test_loss", "text"] {
        assert_eq!(ranks[result].is_null(), alone[result].is_null(), "{what}");
    }
    // Batch normalisation takes each rank's share of a batch for itself. Halves round each share, and Adam's first steps follow
    // the sign of gradients next to zero.
    let is_named = |name: &str| small.flags.iter().any(|flag| flag == name);
    let (is_alike, tolerance) = match small.flags[0].as_str() {
        "resnet50" => (false, 0.0),
        _ if is_named("gpt2-124m") || is_named("cifar") => (true, 1e-2),
        _ => (true, 1e-5),
    };
    let cost = |end: &Value| end["final_cost"].as_f64().unwrap();
    assert!(!is_alike || (cost(&ranks) / cost(alone) - 1.0).abs() < tolerance, "{what}");
    // With the same parts of each batch, the weights are the same to the bit.
    let parts = ["1", "2"].map(|n| one_end(&train(small, &["--ranks", n, "--micro-batches", "2"])));
    assert_eq!(parts[0]["final_cost"], parts[1]["final_cost"], "{what}");
    assert!(!is_alike || parts[0]["weights"] == parts[1]["weights"], "{parts:?}");
}

/// Two programs, each through the server of its worker.
fn through_servers(small: &Small, alone: &Value) {
    let spec = Spec::new(&[("ps", 1), ("worker", 2)]);
    let _tasks = [spec.start("ps", 0, &[]), spec.start("worker", 0, &[]), spec.start("worker", 1, &[])];
    let run = |max_steps: Option<&'static str>| {
        let start = |task: usize| {
            let mut args: Vec<String> = vec!["train".to_owned()];
            args.extend(small.flags.iter().cloned());
            args.extend(["--json", "--target", &spec.target("worker", task)].map(str::to_owned));
            if let Some(steps) = max_steps {
                match args.iter().position(|arg| arg == "--max-steps") {
                    Some(at) => args[at + 1] = steps.to_owned(),
                    None => args.extend(["--max-steps", steps].map(str::to_owned)),
                }
            }
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            Process::start(&format!("client {task}"), &args)
        };
        let mut clients = [start(0), start(1)];
        let ends = clients.iter_mut().flat_map(|client| {
            let is_well = client.wait().success();
            client.wait_until("its end", 0, |line| line.text.contains("\"event\":\"end\"") || !is_well);
            assert!(is_well, "{}", client.text());
            ends(&client.text())
        });
        ends.collect::<Vec<_>>()
    };
    assert_shared(&run(None), small, alone, true);
    // Nobody trains now, and the servers still have the weights: both see the same ones, and no third set.
    let after = run(Some("1"));
    assert!(after.iter().all(|end| end["own_steps"] == 0), "{after:?}");
    assert_eq!(after[0]["step"], after[1]["step"], "{after:?}");
    assert_eq!(after[0]["weights"], after[1]["weights"], "{after:?}");
}

/// The ends of two workers that trained together, and not each for itself.
fn assert_shared(ends: &[Value], small: &Small, alone: &Value, is_async: bool) {
    let what = format!("{:?}: {ends:?}", small.flags);
    assert_eq!(ends.len(), 2, "{what}");
    let number = |end: &Value, name: &str| end[name].as_i64().unwrap_or_else(|| panic!("{name} in {what}"));
    let step = ends.iter().map(|end| number(end, "step")).max().unwrap();
    let own: i64 = ends.iter().map(|end| number(end, "own_steps")).sum();
    if is_async {
        // Every update counts once, whoever made it; others may be in a step when the last one is reached.
        assert_eq!(own, step, "{what}");
        assert!(step >= small.n_steps, "{what}");
    } else {
        assert!(own >= step, "an update takes the gradients of both: {what}");
    }
    // Nobody trains after it has reported; equal steps are the same moment.
    if ends[0]["step"] == ends[1]["step"] {
        assert_eq!(ends[0]["weights"], ends[1]["weights"], "{what}");
    }
    for end in ends {
        assert!(end["weights"].is_string() && end["weights"] != alone["weights"], "trained alone: {what}");
    }
    let chief = ends.iter().find(|end| end["task"] == 0).unwrap_or_else(|| panic!("{what}"));
    for result in ["test_loss", "text"] {
        assert_eq!(chief[result].is_null(), alone[result].is_null(), "the chief tests and tells: {what}");
    }
}

/// Runs to the end: the last events of its processes.
fn train(small: &Small, flags: &[&str]) -> Vec<Value> {
    let own = small.flags.iter().map(String::as_str);
    let args: Vec<&str> = ["train"].into_iter().chain(own).chain(["--json"]).chain(flags.iter().copied()).collect();
    let (is_well, text) = kolo(&args);
    assert!(is_well, "{args:?}: {text}");
    ends(&text)
}

fn ends(text: &str) -> Vec<Value> {
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == "end").collect()
}

fn one_end(ends: &[Value]) -> Value {
    match ends {
        [end] => end.clone(),
        _ => panic!("one end, not {ends:?}"),
    }
}

/// A few pictures in the binary format of CIFAR-10.
fn write_colour_pictures(dir: &Path) {
    let names = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"];
    for (i, name) in names.iter().enumerate() {
        let row = |n: usize| std::iter::once((n % 10) as u8).chain((0..3072).map(move |at| (at * (n + i + 1)) as u8));
        std::fs::write(dir.join(format!("{name}.bin")), (0..8).flat_map(row).collect::<Vec<_>>()).unwrap();
    }
}
