//! `kolo train` as a person or a script uses it.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Long enough for a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(60);

fn kolo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(output: &Output) -> (String, String) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("train-{name}-{}", std::process::id()));
    std::fs::remove_dir_all(&path).ok();
    path
}

#[test]
fn plain_lines_when_piped() {
    let output = kolo(&["train", "linear", "--log-every", "200"]).output().unwrap();
    let (out, err) = text(&output);
    assert!(output.status.success(), "{err}");
    let first = out.lines().next().unwrap();
    assert!(first.starts_with("Step: 200, Epoch: 4, Batch: 50 of 50, Cost: 0.0"), "{out}");
    assert!(first.contains(", AvgTime: ") && first.ends_with("ms"), "{out}");
    for word in ["Test-Cost: 0.00", "Total Time: ", "Final Cost: 0.00"] {
        assert!(out.contains(word), "{word} in\n{out}");
    }
    assert_finds_the_line(&out);
}

/// The points lie around y = 3x + 2.
fn assert_finds_the_line(out: &str) {
    let line = out.lines().find_map(|line| line.strip_prefix("y = ")).unwrap_or_else(|| panic!("{out}"));
    let (slope, offset) = line.split_once(" x + ").unwrap();
    let (slope, offset): (f64, f64) = (slope.parse().unwrap(), offset.parse().unwrap());
    assert!((slope - 3.0).abs() < 0.02 && (offset - 2.0).abs() < 0.02, "{line}");
}

#[test]
fn json_for_programs_and_a_curve_in_the_log_folder() {
    let dir = folder("json");
    let output = kolo(&["train", "linear", "--json", "--epochs", "2", "--logdir"]).arg(&dir).output().unwrap();
    let (out, err) = text(&output);
    assert!(output.status.success(), "{err}");
    let lines: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let end = lines.last().unwrap();
    assert_eq!(end["event"], "end");
    assert_eq!(end["step"], 100);
    assert!(end["final_cost"].as_f64().unwrap() < 0.1, "{end}");
    assert_eq!(lines.iter().filter(|line| line["event"] == "epoch").count(), 2);
    let svg = std::fs::read_to_string(dir.join("loss.svg")).unwrap();
    assert!(svg.starts_with("<svg"));
    let names: Vec<String> =
        std::fs::read_dir(&dir).unwrap().map(|f| f.unwrap().file_name().to_string_lossy().into_owned()).collect();
    assert!(names.iter().any(|name| name.contains("tfevents")), "{names:?}");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn ctrl_c_saves_and_resume_goes_on() {
    let dir = folder("interrupt");
    let flags = ["train", "linear", "--epochs", "1000000", "--log-every", "10", "--checkpoint-dir"];
    let mut child = kolo(&flags).arg(&dir).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    lines.read_line(&mut first).unwrap();
    assert!(first.starts_with("Step: 10,"), "{first}");
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success(), "{rest}");
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert!(errors.contains("stopping after this step; Ctrl-C again to stop now"), "{errors}");
    let stopped =
        rest.lines().find_map(|line| line.strip_prefix("Stopped at step ")).unwrap_or_else(|| panic!("{rest}"));
    let step: i64 = stopped.split(',').next().unwrap().parse().unwrap();

    let last = (step + 5).to_string();
    let output = kolo(&flags).arg(&dir).args(["--resume", "--max-steps", &last]).output().unwrap();
    let (out, err) = text(&output);
    assert!(output.status.success(), "{err}");
    assert!(out.starts_with(&format!("Resumed from {}", dir.join(format!("model.ckpt-{step}")).display())), "{out}");
    assert!(dir.join(format!("model.ckpt-{last}.index")).exists());
    std::fs::remove_dir_all(&dir).unwrap();
}

/// In the middle of a step that takes longer than this test: the first Ctrl-C is answered at once, and a second one ends it.
#[test]
fn ctrl_c_in_a_long_step_is_answered_and_another_ends_it() {
    let size = ["--side", "224", "--batch-size", "32", "--max-steps", "1", "--device", "cpu:0"];
    let mut child = kolo(&[&["train", "resnet50", "--log-every", "1"], &size[..]].concat()).spawn().unwrap();
    // Planning is over, and kernels compute, when it has taken more processor time than that.
    let started = Instant::now();
    while processor_seconds(child.id()) < 4.0 {
        assert!(started.elapsed() < PATIENCE && child.try_wait().unwrap().is_none(), "it does not compute");
        std::thread::sleep(Duration::from_millis(50));
    }
    let interrupt = |child: &Child| Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupt(&child).success());
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let (mut line, began) = (String::new(), Instant::now());
    while !line.contains("stopping after this step; Ctrl-C again to stop now") {
        line.clear();
        assert!(errors.read_line(&mut line).unwrap() > 0, "it ended without a word");
    }
    println!("answered after {:.1?}", began.elapsed());
    assert!(interrupt(&child).success());
    let began = Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    println!("ended after {:.1?}", began.elapsed());
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    assert!(!out.contains("Step: 1"), "the step was over before: {out}");
}

/// What a process has computed so far.
fn processor_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // A tick is a hundredth of a second on Linux.
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

#[test]
fn wrong_flags_are_named_with_a_remedy() {
    let cases: [(&[&str], &str); 16] = [
        (&["train", "linear", "--resume"], "--checkpoint-dir"),
        (&["train", "linear", "--lr", "-1"], "--lr"),
        (&["train", "linear", "--batch-size", "0"], "--batch-size must be at least 1"),
        (&["train", "linear", "--batch-size", "10", "--devices", "cpu=3"], "try 12"),
        (&["train", "linear", "--checkpoint-every", "soon"], "nor seconds, such as 30s"),
        (&["train", "mnist", "--data", "no/such/folder"], "no/such/folder"),
        (&["train", "lm", "--width", "10", "--heads", "3"], "multiple of --heads"),
        (&["train", "lm", "--prompt", ""], "--prompt is empty"),
        (&["train", "linear", "--epochs", "0"], "--epochs 0 trains nothing; give at least 1"),
        (&["train", "linear", "--max-steps", "0"], "--max-steps 0 trains nothing"),
        (&["train", "linear", "--batch-size", "1001"], "give --batch-size 1000 or less"),
        (&["train", "linear", "--ps", "1", "--workers", "2", "--batch-size", "501"], "give --batch-size 500 or less"),
        (&["train", "linear", "--sync"], "--sync says how the workers of a cluster"),
        (&["train", "linear", "--devices", "cpu=2", "--ps", "1", "--workers", "2"], "give more --workers"),
        (&["train", "linear", "--device", "tpu:0"], "--device"),
        (
            &["train", "linear", "--target", "grpc://127.0.0.1:1", "--target-deadline", "0.2"],
            "nobody answered at --target grpc://127.0.0.1:1 in 0.2 s",
        ),
    ];
    for (arguments, expected) in cases {
        let output = kolo(arguments).output().unwrap();
        let (_, err) = text(&output);
        assert!(!output.status.success() && err.contains(expected), "{arguments:?}: {err}");
        assert!(!err.contains("panicked"), "{err}");
    }
}

#[test]
fn a_log_filter_that_cannot_be_parsed_is_an_error() {
    let output = kolo(&["train", "linear", "--epochs", "1"]).env("KOLO_LOG", "kolo=loud").output().unwrap();
    let (out, err) = text(&output);
    assert!(!output.status.success() && err.contains("KOLO_LOG='kolo=loud' cannot be parsed"), "{out}{err}");
}

#[test]
fn the_chief_of_a_cluster_writes_the_log_folder() {
    let dir = folder("cluster-log");
    let flags = ["train", "linear", "--ps", "1", "--workers", "2", "--epochs", "1", "--log-every", "5", "--logdir"];
    let output = kolo(&flags).arg(&dir).output().unwrap();
    let (out, err) = text(&output);
    assert!(output.status.success(), "{out}{err}");
    let svg = std::fs::read_to_string(dir.join("loss.svg")).unwrap();
    assert!(svg.matches("<polyline").count() == 2 && svg.contains("points=\"4"), "{svg}");
    let files = std::fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path());
    let events: Vec<PathBuf> = files.filter(|path| path.to_string_lossy().contains("tfevents")).collect();
    assert_eq!(events.len(), 1, "only the chief writes: {events:?}");
    let bytes = std::fs::read(&events[0]).unwrap();
    assert!(bytes.windows(10).any(|part| part == b"train/loss"), "{} bytes without a loss", bytes.len());
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn towers_from_the_command_line() {
    let output = kolo(&["train", "linear", "--devices", "cpu=2", "--epochs", "3"]).output().unwrap();
    let (out, err) = text(&output);
    assert!(output.status.success(), "{err}");
    assert_finds_the_line(&out);
}

#[test]
fn completions_for_each_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let output = kolo(&["completions", shell]).output().unwrap();
        let (out, _) = text(&output);
        assert!(output.status.success() && out.contains("kolo") && out.contains("train"), "{shell}");
    }
}
