//! Flags that no other test uses do what their help says. The table of all flags is in `src/cli/refusal_tests.rs`.
#![allow(clippy::unwrap_used)]

mod support;

use kolo::{Connect as _, Session, Tensor};
use support::{Folder, Process, Spec, kolo, write_pictures};

fn succeeds(args: &[&str]) -> String {
    let (is_well, text) = kolo(args);
    assert!(is_well, "{args:?}: {text}");
    text
}

#[test]
fn a_server_has_the_devices_and_limits_it_was_given() {
    let spec = Spec::new(&[("worker", 1)]);
    let flags = ["--device-count", "CPU=2", "--max-graph-message", "20K", "--max-tensor-message", "40K"];
    let server = spec.serve("worker", 0, &[&flags[..], &["--log-device-placement"]].concat());
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", [None]);
    let y = g.device("/cpu:1", || x + 1.0);
    let session = Session::connect(&spec.target("worker", 0), &g).unwrap();
    assert_eq!(session.list_devices().len(), 2);
    session.run(&[y], &[(x, Tensor::from([1.0f32]))], &[]).unwrap();
    server.wait_until("where the sum goes", 0, |line| line.text.contains("Add") && line.text.contains("CPU:1"));
    // Equal values would be written as one.
    let large = Tensor::from((0..20_000).map(|i| i as f32).collect::<Vec<f32>>());
    // The peer of a message that is too large may find its connection closed rather than read why.
    assert!(session.run(&[y], &[(x, large.clone())], &[]).is_err());

    let g = kolo::graph();
    let _constant = g.constant(large);
    assert!(Session::connect(&spec.target("worker", 0), &g).is_err());
    Session::connect(&spec.target("worker", 0), &kolo::graph()).unwrap();
}

/// What goes from a parameter server to a worker of this machine is mapped by both, unless that is switched off.
#[test]
#[cfg(target_os = "linux")]
fn tensors_go_through_shared_memory_unless_that_is_switched_off() {
    for (flags, is_shared) in [(&[][..], true), (&["--no-shared-memory"], false)] {
        let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
        let (ps, worker) = (spec.start("ps", 0, flags), spec.serve("worker", 0, flags));
        ps.wait_for("serving grpc://");
        let g = kolo::graph();
        let large = g.device("/job:ps/task:0", || {
            g.op("Fill").input(g.constant([1 << 22])).input(g.placeholder::<f32>("x", [0usize; 0])).out()
        });
        let most = g.device("/job:worker/task:0", || g.op("Max").input(large).input(g.constant(0i32)).out());
        let session = Session::connect(&spec.target("worker", 0), &g).unwrap();
        let value = session.run_named(&[&most.name()], &[("x:0", Tensor::scalar(3.0f32))], &[]).unwrap();
        assert_eq!(value[0], Tensor::scalar(3.0f32));
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", worker.pid())).unwrap();
        assert_eq!(maps.contains("/dev/shm/kolo-"), is_shared, "{flags:?}:\n{maps}");
    }
}

#[test]
fn doctor_and_devices_watch_until_they_are_stopped() {
    let spec = Spec::new(&[("worker", 1)]);
    let _server = spec.serve("worker", 0, &[]);
    let doctor = Process::start("doctor", &["doctor", "--cluster", &spec.text, "--watch", "--json"]);
    let devices = Process::start("devices", &["devices", "--watch", "--interval", "0.2", "--json"]);
    for (process, word) in [(&doctor, "\"healthy\":true"), (&devices, "CPU:0")] {
        let first = process.wait_for(word);
        process.wait_until("it again", 0, |line| line.at > first.at && line.text.contains(word));
    }
}

#[test]
fn costs_of_collectives_are_measured_kept_and_explained() {
    let home = Folder::new("flags-costs");
    let run = |args: &[&str]| {
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_kolo")).args(args).env("HOME", &home.0).output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
        (output.status.success(), text)
    };
    let explain = ["explain", "collectives", "--ranks", "8", "--hosts", "2"];
    let (is_well, text) = run(&explain);
    assert!(is_well && text.contains("none was measured") && !text.contains(" measured "), "{text}");
    assert!(text.contains("8 ranks on 2 hosts") && text.contains("two-level"), "{text}");
    let (is_well, text) = run(&["bench", "collectives", "--calibrate"]);
    assert!(is_well && text.contains("written to"), "{text}");
    let (is_well, text) = run(&[&explain[..], &["--json"]].concat());
    let file = home.0.join(".kolo/collective-costs");
    assert!(is_well && text.contains(&format!("\"file\":\"{}\"", file.display())), "{text}");
    assert_eq!(text.matches("\"measured\":true").count(), 6, "{text}");
    assert!(text.contains("\"measured\":false,\"name\":\"host_bytes_per_second\""), "{text}");
    // What is damaged is refused by name, and measured again.
    std::fs::write(&file, "kolo collective costs 1\nhop_us 0\n").unwrap();
    let (is_well, text) = run(&explain);
    assert!(!is_well && text.contains("line 2, 'hop_us 0'") && text.contains("--calibrate"), "{text}");
    assert!(run(&["bench", "collectives", "--calibrate"]).0 && run(&explain).0);
    let (is_well, text) = run(&["explain", "collectives", "--ranks", "3", "--hosts", "2"]);
    assert!(!is_well && text.contains("--ranks 3 cannot be divided among --hosts 2"), "{text}");
}

#[test]
fn parameter_servers_and_ranks_are_compared_on_the_same_samples() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(["bench", "ps-vs-ring", "--ranks", "2", "--json"]).env("KOLO_BENCH_BUDGET", "0.01");
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
    for case in ["one-process", "ranks", "ps-sync", "ps-async"] {
        assert!(text.contains(&format!("\"case\":\"{case}\",\"unit\":\"samples/s\"")), "{text}");
    }
    assert!(!kolo(&["bench", "ps-vs-ring", "--ranks", "1"]).0, "one process cannot be divided");
}

#[test]
fn the_network_of_mnist_can_be_chosen() {
    let folder = Folder::new("flags-mnist");
    write_pictures(&folder.0);
    let data = folder.path("");
    let flags = ["train", "mnist", "--data", &data, "--batch-size", "4", "--max-steps", "1", "--json", "--model"];
    let weights = ["mlp", "lenet", "lstm"].map(|model| {
        let text = succeeds(&[&flags[..], &[model]].concat());
        text.split("\"weights\":").nth(1).unwrap_or_else(|| panic!("{text}")).to_owned()
    });
    assert!(weights[0] != weights[1] && weights[1] != weights[2] && weights[0] != weights[2], "{weights:?}");
}

#[test]
fn resnet50_has_synthetic_data_only() {
    let (is_well, text) = kolo(&["train", "resnet50", "--data", "imagenet"]);
    assert!(!is_well && text.contains("possible values: synthetic"), "{text}");
}

#[test]
fn certificates_last_as_long_as_they_should() {
    let folder = Folder::new("flags-cert");
    let dir = folder.path("certs");
    succeeds(&["cert", "init", &dir, "--hosts", "a", "--days", "3"]);
    let output = std::process::Command::new("openssl")
        .args(["x509", "-noout", "-checkend", &(4 * 86_400).to_string(), "-in", &format!("{dir}/a.pem")])
        .output();
    // Without openssl, that it is taken at all is what is shown.
    if let Ok(output) = output {
        assert!(!output.status.success(), "the certificate is valid in four days: {output:?}");
    }
}

#[test]
fn a_cluster_is_explained_as_json() {
    let cluster = "ps=127.0.0.1:1;worker=127.0.0.1:2,127.0.0.1:3";
    let text = succeeds(&["config", "check", "--cluster", cluster, "--job", "worker", "--task", "1", "--json"]);
    let json: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
    assert_eq!(json["own"]["task"], 1, "{json}");
    assert_eq!(json["tasks"].as_array().unwrap().len(), 3, "{json}");
}

#[test]
fn passes_are_listed_and_their_graphs_printed() {
    let graph = ["explain", "tests/data/product.pbtxt", "--fetch", "c", "--devices", "cpu=2"];
    let listed = succeeds(&[&graph[..], &["--passes", "--json"]].concat());
    assert!(listed.lines().count() > 3 && listed.contains("\"pass\":\"partition\""), "{listed}");
    let parts = succeeds(&[&graph[..], &["--after", "partition"]].concat());
    assert!(parts.contains("_Send") && !parts.contains("\"pass\""), "{parts}");
}
