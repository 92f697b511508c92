//! `kolo train --strategy`: the same model and the same global batch, whatever the strategy and the shape.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{kolo, one_at_a_time};

/// The events of a training of 25 steps.
fn train(flags: &[&str]) -> Vec<Value> {
    let base = ["train", "linear", "--json", "--batch-size", "40", "--epochs", "1"];
    let args = [&base[..], flags].concat();
    let (is_well, text) = kolo(&args);
    assert!(is_well, "{args:?}: {text}");
    text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect()
}

fn event<'a>(events: &'a [Value], name: &str) -> &'a Value {
    events.iter().find(|event| event["event"] == name).unwrap_or_else(|| panic!("no {name} in {events:?}"))
}

fn said(events: &[Value]) -> String {
    event(events, "strategy")["text"].as_str().unwrap().to_owned()
}

#[test]
fn replicas_of_every_shape_give_the_weights_of_one_device() {
    let _turn = one_at_a_time();
    let alone = train(&["--strategy", "one-device", "--micro-batches", "4"]);
    assert!(said(&alone).contains("the global batch is 40, 40 for each of 1 replica (1 process x 1 device)"));
    let weights = &event(&alone, "end")["weights"];
    let shapes: [(&[&str], &str); 5] = [
        (
            &["mirrored", "--devices", "cpu=4"],
            "strategy mirrored: the global batch is 40, 10 for each of 4 replicas (1 process x 4 devices)",
        ),
        (&["central-storage", "--devices", "cpu=2"], "20 for each of 2 replicas (1 process x 2 devices)"),
        (&["multi-worker-mirrored", "--ranks", "2"], "20 for each of 2 replicas (2 processes x 1 device)"),
        (
            &["collective-all-reduce", "--ranks", "2", "--devices", "cpu=2"],
            "10 for each of 4 replicas (2 processes x 2 devices)",
        ),
        (&["multi-worker-mirrored"], "40 for each of 1 replica"),
    ];
    for (flags, text) in shapes {
        let events = train(&[&["--micro-batches", "4", "--strategy"], flags].concat());
        assert!(said(&events).contains(text), "{}", said(&events));
        assert_eq!(&event(&events, "end")["weights"], weights, "{flags:?}");
    }
    // Without the same parts, sums are rounded in another order.
    let number = |events: &[Value], name: &str| event(events, "end")[name].as_f64().unwrap();
    let loss = number(&train(&["--strategy", "one-device"]), "test_loss");
    let mirrored = number(&train(&["--strategy", "mirrored", "--devices", "cpu=2"]), "test_loss");
    assert!((mirrored - loss).abs() < 1e-6, "{mirrored} and {loss}");
}

#[test]
fn workers_in_sync_share_the_global_batch() {
    let _turn = one_at_a_time();
    let alone = train(&["--strategy", "one-device"]);
    // One server and two workers, without being told so.
    let events = train(&["--strategy", "parameter-server", "--sync"]);
    assert!(said(&events).contains("the global batch is 40, 20 for each of 2 replicas (2 processes x 1 device)"));
    let end = |events: &[Value], name: &str| {
        let chief = events.iter().find(|event| event["event"] == "end" && event["task"].as_u64().unwrap_or(0) == 0);
        chief.unwrap()[name].as_f64().unwrap()
    };
    assert_eq!(end(&events, "step"), end(&alone, "step"));
    let (found, expected) = (end(&events, "test_loss"), end(&alone, "test_loss"));
    assert!((found - expected).abs() < 1e-6, "{found} and {expected}");
    let events = train(&["--strategy", "parameter-server", "--workers", "3"]);
    assert!(said(&events).contains("a batch is 40, that of one worker's update"), "{}", said(&events));
}

#[test]
fn what_a_strategy_does_not_have_is_refused_with_the_one_that_does() {
    let says = |flags: &[&str], text: &str| {
        let (is_well, found) = kolo(&[&["train", "linear", "--strategy"], flags].concat());
        assert!(!is_well && found.contains(text), "{flags:?}: {found}");
    };
    says(&["one-device", "--devices", "cpu=2"], "--strategy mirrored");
    says(&["mirrored", "--device", "cpu:0"], "give --devices");
    says(&["mirrored", "--ranks", "2"], "take --strategy multi-worker-mirrored");
    says(&["central-storage", "--ps", "1"], "take --strategy parameter-server");
    says(&["multi-worker-mirrored", "--sync"], "take --strategy parameter-server");
    says(&["parameter-server", "--devices", "cpu=2"], "splits batches over the devices of one process");
    says(&["parameter-server", "--ranks", "2"], "a cluster has parameter servers");
    says(&["parameter-server", "--sync", "--batch-size", "41"], "cannot be shared equally by 2 workers; try 42");
    says(&["mirrored", "--devices", "cpu=3", "--batch-size", "40"], "cannot be shared equally by 3 devices; try 42");
}
