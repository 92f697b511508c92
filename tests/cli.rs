//! The `kolo` command, as a person meets it.

use std::process::{Command, Output};

fn kolo(args: &[&str]) -> Output {
    let graph = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/product.pbtxt");
    let args = args.iter().map(|arg| if *arg == "GRAPH" { graph } else { *arg });
    Command::new(env!("CARGO_BIN_EXE_kolo")).args(args).output().expect("the binary was built for this test")
}

#[track_caller]
fn succeeds(args: &[&str], parts: &[&str]) {
    let output = kolo(args);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for part in parts {
        assert!(text.contains(part), "'{part}' is missing in:\n{text}");
    }
}

#[track_caller]
fn fails(args: &[&str], parts: &[&str]) {
    let output = kolo(args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for part in parts {
        assert!(text.contains(part), "'{part}' is missing in:\n{text}");
    }
}

#[test]
fn explain_shows_wish_fact_and_rule() {
    succeeds(
        &["explain", "GRAPH", "--fetch", "c", "--devices", "cpu=2"],
        &["node", "bytes moved", "MatMul", "/device:CPU:1", "pinned", "no accelerator has a kernel"],
    );
    succeeds(
        &["explain", "GRAPH", "--fetch", "c", "--devices", "cpu=2", "--json"],
        &["\"node\":\"c\"", "\"bytes_moved\":0"],
    );
}

#[test]
fn explain_refuses_what_cannot_be_and_says_why() {
    fails(&["explain", "GRAPH", "--fetch", "c"], &["InvalidArgument", "'c'", "/device:CPU:1"]);
    succeeds(
        &["explain", "GRAPH", "--fetch", "c", "--soft"],
        &["fell back: the pinned device does not exist", "1 op fell back, -", "32 bytes fewer move"],
    );
    fails(&["explain", "GRAPH", "--fetch", "cc", "--devices", "cpu=2"], &["NotFound", "'cc'"]);
    fails(&["explain", "no-such-file.pb", "--fetch", "c"], &["no-such-file.pb"]);
    fails(&["explain", "GRAPH", "--fetch", "c", "--devices", "cpu=lots"], &["cpu=lots", "should look like cpu=4"]);
    fails(&["explain", "GRAPH"], &["--fetch"]);
}

#[test]
fn devices_may_keep_to_cores() {
    let Some(core) = kolo_device::cpu::topology::allowed_cores().and_then(|cores| cores.last().copied()) else {
        return;
    };
    let devices = format!("cpu:0,cpu:1=cores {core}");
    succeeds(&["explain", "GRAPH", "--fetch", "c", "--devices", &devices], &["/device:CPU:1"]);
    fails(&["explain", "GRAPH", "--fetch", "c", "--devices", "cpu:1=cores 9999"], &["core 9999", "may use cores"]);
}

#[test]
fn explain_takes_pins_from_a_file_and_names_lines() {
    let pins = std::env::temp_dir().join(format!("kolo-pins-{}.txt", std::process::id()));
    let path = pins.to_str().expect("a temporary path is text");
    std::fs::write(&pins, "# where things go\nx -> /cpu:1\n! op=MatMul -> /cpu:0\nnothing* -> /cpu:0\n")
        .expect("it is ours");
    let args = ["explain", "GRAPH", "--fetch", "c", "--devices", "cpu=2", "--pins", path];
    let lines = [2, 3].map(|line| format!("{path}:{line}\n"));
    let unused = format!("{path}:4: no node of the graph is like this");
    succeeds(&args, &[&lines[0], &lines[1], &unused, "product.pbtxt:4\n"]);
    std::fs::write(&pins, "x -> /gpu:0\n").expect("it is ours");
    fails(&args, &[&format!("(pinned at {path}:1)")]);
    std::fs::write(&pins, "\nx = 3\n").expect("it is ours");
    fails(&args, &["InvalidArgument", &format!("{path}:2: ")]);
    std::fs::remove_file(&pins).expect("it is ours");
    fails(&args, &["NotFound", path]);
    // The graph's own pins have lines too.
    fails(&["explain", "GRAPH", "--fetch", "c"], &["product.pbtxt:19)"]);
}

#[test]
fn trace_writes_a_timeline() {
    let out = std::env::temp_dir().join(format!("kolo-trace-{}.json", std::process::id()));
    let path = out.to_str().expect("a temporary path is text");
    succeeds(
        &["trace", "GRAPH", "--fetch", "c", "--devices", "cpu=2", "--feed", "x=float[2,2]", "--out", path],
        &["nodes", "written to"],
    );
    let json = std::fs::read_to_string(&out).expect("it was written");
    std::fs::remove_file(&out).expect("it is ours");
    assert!(json.contains("\"name\":\"c\"") && json.contains("\"cat\":\"MatMul\""), "{json}");
    fails(&["trace", "GRAPH", "--fetch", "c", "--devices", "cpu=2", "--out", path], &["You must feed a value", "'x'"]);
}

#[test]
fn measured_times_place_by_cost() {
    let folder = std::env::temp_dir().join(format!("kolo-costs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("it is ours");
    let path = |name: &str| folder.join(name).to_str().expect("a temporary path is text").to_owned();
    let (costs, trace, pins) = (path("costs.txt"), path("trace.json"), path("pins.txt"));
    let feed = ["--feed", "x=float[2,2]", "--devices", "cpu=2", "--out", &trace, "--write-costs", &costs];
    succeeds(&[&["trace", "GRAPH", "--fetch", "c"][..], &feed].concat(), &["written to"]);
    let text = std::fs::read_to_string(&costs).expect("it was written");
    assert!(text.contains("node c MatMul CPU 1 0.") && text.contains("link CPU CPU "), "{text}");
    std::fs::write(&pins, "! c -> /job:localhost\n").expect("it is ours");
    let explain = ["explain", "GRAPH", "--fetch", "c", "--devices", "cpu=2", "--policy"];
    succeeds(&[&explain[..], &["cost", "--costs", &costs]].concat(), &["pinned"]);
    std::fs::write(&costs, "node c MatMul\n").expect("it is ours");
    fails(&[&explain[..], &["cost", "--costs", &costs]].concat(), &["costs.txt:1: 'node c MatMul' should be"]);
    fails(&[&explain[..], &["best"]].concat(), &["--policy", "simple, heuristic and cost"]);
    succeeds(&[&explain[..], &["heuristic"]].concat(), &["where its consumers are"]);
    std::fs::remove_dir_all(&folder).expect("it is ours");
}

#[test]
fn devices_and_ops_are_listed() {
    succeeds(&["devices"], &["/job:localhost/replica:0/task:0/device:CPU:0"]);
    succeeds(&["ops", "matmul"], &["MatMul (a:T, b:T) -> (product:T)", "kernels: CPU", "gradient: yes"]);
    fails(&["ops", "nothing-like-it"], &["no op's name contains"]);
}
