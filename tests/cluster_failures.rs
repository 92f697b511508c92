//! What happens to a cluster of real processes when one is late, wrong, killed, stopped, or silent.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kolo::{Code, Connect as _, Graph, Result, RunOptions, Session, SessionConfig, Tensor};
use support::{Folder, PATIENCE, Process, Spec, kolo, one_at_a_time, write_pictures};

/// Opens a session over an empty graph.
fn connect(target: &str) -> Result<Session> {
    Session::connect(target, &kolo::graph())
}

#[test]
fn a_task_that_is_missing_is_named_at_once_and_found_when_it_comes() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
    let worker = spec.serve("worker", 0, &["--ready-deadline", "2"]);
    let error = connect(&spec.target("worker", 0)).err().unwrap();
    assert!([Code::DeadlineExceeded, Code::Unavailable].contains(&error.code()), "{error:?}");
    for part in ["/job:ps/replica:0/task:0", spec.address("ps", 0), "connection refused"] {
        assert!(error.message().contains(part), "{part} is missing in {error}");
    }
    let warning = worker.wait_for("still waiting for /job:ps/replica:0/task:0");
    assert!(warning.text.contains("connection refused"), "{}", warning.text);
    drop(worker);

    let _worker = spec.serve("worker", 0, &[]);
    let target = spec.target("worker", 0);
    let waiting = std::thread::spawn(move || connect(&target).map(|session| session.list_devices().len()));
    let _ps = spec.serve("ps", 0, &[]);
    assert_eq!(waiting.join().unwrap().unwrap(), 2);
}

#[test]
fn a_task_of_another_cluster_and_a_wrong_token_are_named() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
    let _worker = spec.serve("worker", 0, &["--ready-deadline", "5"]);
    let other = spec.with("worker", 0, "127.0.0.1:9");
    let ps = other.serve("ps", 0, &[]);
    let error = connect(&spec.target("worker", 0)).err().unwrap();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    for part in ["/job:ps/replica:0/task:0", "/job:worker/replica:0/task:0", "different clusters", "127.0.0.1:9"] {
        assert!(error.message().contains(part), "{part} is missing in {error}");
    }
    let (is_well, text) = kolo(&["doctor", "--cluster", &spec.text]);
    assert!(!is_well && text.contains("ps:0 was started with another cluster"), "{text}");
    drop(ps);
    // Over gRPC there is no greeting; the master asks.
    let by_grpc = Spec::new(&[("ps", 1), ("worker", 1)]);
    let _by_grpc_worker = by_grpc.serve("worker", 0, &["--grpc-only"]);
    let _by_grpc_ps = by_grpc.with("worker", 0, "127.0.0.1:9").serve("ps", 0, &[]);
    let error = connect(&by_grpc.target("worker", 0)).err().unwrap();
    assert!(error.code() == Code::FailedPrecondition && error.message().contains("different clusters"), "{error}");

    let folder = Folder::new("token-of-the-ps");
    std::fs::write(folder.0.join("token"), "a-token-of-the-ps").unwrap();
    std::fs::set_permissions(folder.0.join("token"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let _ps = spec.serve("ps", 0, &["--token-file", &folder.path("token")]);
    let error = connect(&spec.target("worker", 0)).err().unwrap();
    assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    assert!(error.message().contains("/job:ps/replica:0/task:0 wants a token"), "{error}");
    let error = connect(&spec.target("ps", 0)).err().unwrap();
    assert_eq!(error.code(), Code::Unauthenticated, "{error}");
}

/// A cluster that trains: `ps:0`, and workers as they are started.
struct Training {
    spec: Spec,
    folder: Folder,
}

impl Training {
    fn new(name: &str, n_workers: usize) -> Training {
        let folder = Folder::new(name);
        write_pictures(&folder.0.join("data"));
        Training { spec: Spec::new(&[("ps", 1), ("worker", n_workers)]), folder }
    }

    /// A worker that reports every step. The first one is the chief, and saves every 20 steps.
    fn worker(&self, task: usize, flags: &[&str]) -> Process {
        let (data, checkpoints, task_text) = (self.folder.path("data"), self.folder.path("ckpt"), task.to_string());
        let mut args =
            vec!["train", "mnist", "--json", "--log-every", "1", "--batch-size", "20", "--epochs", "1000000"];
        args.extend(["--with-parent", "--data", &data, "--cluster", &self.spec.text, "--task", &task_text]);
        args.extend(["--optimizer", "sgd", "--lr", "0.001"]);
        if task == 0 {
            args.extend(["--checkpoint-dir", &checkpoints]);
            if !flags.contains(&"--checkpoint-every") {
                args.extend(["--checkpoint-every", "20"]);
            }
        }
        args.extend(flags);
        Process::start(&format!("worker {task}"), &args)
    }

    /// Waits until a checkpoint of a later step than 20 is whole: they are written beside the training.
    fn wait_for_checkpoint(&self) {
        let state = self.folder.0.join("ckpt").join("checkpoint");
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let text = std::fs::read_to_string(&state).unwrap_or_default();
            let newest = text.lines().next().and_then(|line| line.rsplit('-').next());
            if newest.and_then(|step| step.trim_matches('"').parse::<i64>().ok()).is_some_and(|step| step > 20) {
                return;
            }
            assert!(Instant::now() < deadline, "no checkpoint: {text}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn a_worker_trains_as_soon_as_its_chief_is_ready() {
    let _turn = one_at_a_time();
    let training = Training::new("late-chief", 2);
    let _ps = training.spec.serve("ps", 0, &[]);
    let worker = training.worker(1, &[]);
    worker.wait_for("the chief has given no value yet");
    assert!(worker.steps().is_empty());
    let chief = training.worker(0, &[]);
    let (_, ready) = chief.wait_for_step(0, |_| true);
    let (_, first) = worker.wait_for_step(0, |_| true);
    println!("the worker trained {:?} after the chief", first.at.saturating_duration_since(ready.at));
}

#[test]
fn a_worker_that_is_killed_is_not_missed_and_can_be_replaced() {
    let _turn = one_at_a_time();
    let training = Training::new("killed-worker", 2);
    let _ps = training.spec.serve("ps", 0, &[]);
    let chief = training.worker(0, &[]);
    let mut worker = training.worker(1, &[]);
    chief.wait_for_step(0, |_| true);
    worker.wait_for_step(0, |_| true);
    worker.kill();
    let (killed_at, n_lines) = (Instant::now(), chief.lines().len());
    let before = chief.steps().into_iter().max().unwrap();
    let (_, next) = chief.wait_for_step(n_lines, |step| step > before);
    println!("the chief's next step came {:?} after the kill", next.at.saturating_duration_since(killed_at));

    let replacement = training.worker(1, &[]);
    let (step, first) = replacement.wait_for_step(0, |_| true);
    println!("the replacement trained {:?} after its start", first.at - replacement.started);
    assert!(step >= before, "step {step} after {before}");
    let steps = chief.steps();
    assert!(steps.is_sorted(), "no acknowledged update is lost: {steps:?}");
    assert!(!chief.text().contains("lost the session"), "{}", chief.text());
}

#[test]
fn a_parameter_server_that_is_killed_costs_the_steps_since_the_checkpoint_and_says_so() {
    let _turn = one_at_a_time();
    let training = Training::new("killed-ps", 2);
    let mut ps = training.spec.serve("ps", 0, &[]);
    let chief = training.worker(0, &[]);
    let worker = training.worker(1, &[]);
    worker.wait_for_step(0, |_| true);
    chief.wait_for_step(0, |step| step > 45);
    training.wait_for_checkpoint();
    ps.kill();
    chief.wait_for("lost the session");
    let (n_chief, n_worker) = (chief.lines().len(), worker.lines().len());
    let before = chief.steps().into_iter().max().unwrap();
    let _ps = training.spec.serve("ps", 0, &[]);
    let restarted = Instant::now();
    let announced = chief.wait_until("steps lost", n_chief, |line| line.text.contains("steps lost: "));
    assert!(announced.text.contains("Restored"), "{}", announced.text);
    let (step, next) = chief.wait_for_step(n_chief, |_| true);
    println!("the chief trained {:?} after the restart; {}", next.at - restarted, announced.text);
    let lost: i64 = announced.text.rsplit("steps lost: ").next().unwrap().trim().parse().unwrap();
    assert!(step > 20 && step <= before + 200, "it went on at {step} after {before}");
    assert!((0..=before).contains(&lost), "{lost} of {before}");
    worker.wait_for_step(n_worker, |_| true);
}

#[test]
fn a_chief_that_returns_attaches_and_the_global_step_never_decreases() {
    let _turn = one_at_a_time();
    let training = Training::new("killed-chief", 2);
    let _ps = training.spec.serve("ps", 0, &[]);
    let mut chief = training.worker(0, &["--checkpoint-every", "1000000"]);
    let worker = training.worker(1, &[]);
    worker.wait_for_step(0, |_| true);
    chief.wait_for_step(0, |step| step > 30);
    chief.kill();
    let before = chief.steps().into_iter().max().unwrap();
    let n_lines = worker.lines().len();
    worker.wait_for_step(n_lines, |step| step > before);
    let chief = training.worker(0, &[]);
    let (step, first) = chief.wait_for_step(0, |_| true);
    println!("the chief trained {:?} after its start", first.at - chief.started);
    assert!(step > before, "step {step} after {before}");
    let steps = worker.steps();
    assert!(steps.is_sorted(), "{steps:?}");
}

/// A graph whose value comes from the parameter server to the worker.
fn across(g: &Graph) -> (kolo::Operation<'_>, kolo::Output<'_>) {
    let v = g.device("/job:ps/task:0", || g.variable("v", [3.0f32, 4.0]));
    let y = g.device("/job:worker/task:0", || v.read() * 2.0);
    (g.global_variables_initializer(), y)
}

#[test]
fn a_stopped_task_is_named_with_the_step_and_the_tensor_that_wait_for_it() {
    let _turn = one_at_a_time();
    for transport in [&["--report-after", "1"][..], &["--report-after", "1", "--grpc-only"]] {
        let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
        let ps = spec.serve("ps", 0, transport);
        let worker = spec.serve("worker", 0, transport);
        let (is_well, text) = kolo(&["doctor", "--cluster", &spec.text]);
        assert!(is_well && text.contains("Nothing is stuck"), "{text}");

        let (stop, n_runs, target) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)), spec.target("worker", 0));
        let runs = {
            let (stop, n_runs) = (stop.clone(), n_runs.clone());
            std::thread::spawn(move || -> Result<()> {
                let g = kolo::graph();
                let (init, y) = across(&g);
                let session = Session::connect(&target, &g)?;
                session.run_op(init)?;
                let options = RunOptions { timeout: Some(PATIENCE), ..RunOptions::default() };
                while !stop.load(Ordering::Relaxed) {
                    session.run_with(&options, &[y], &[], &[])?;
                    n_runs.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        let wait_for_runs = |more: u64| {
            let (began, from) = (Instant::now(), n_runs.load(Ordering::Relaxed));
            while n_runs.load(Ordering::Relaxed) < from + more {
                assert!(began.elapsed() < PATIENCE && !runs.is_finished(), "the runs do not go on");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        wait_for_runs(5);
        ps.signal("STOP");
        let stopped = Instant::now();
        let named = loop {
            let (is_well, text) = kolo(&["doctor", "--cluster", &spec.text, "--overdue", "0.3", "--deadline", "0.5"]);
            if text.contains("needs its tensor") {
                assert!(!is_well);
                break text;
            }
            assert!(stopped.elapsed() < PATIENCE, "{text}");
        };
        println!("named after {:?}:\n{named}", stopped.elapsed());
        for part in
            ["ps:0 (does not answer (stopped or overloaded)", "tasks wait for ps:0", "worker:0 needs its tensor edge_"]
        {
            assert!(named.contains(part), "'{part}' is missing in:\n{named}");
        }
        // The master says so by itself, too.
        let own = worker.wait_for("tasks wait for ps:0");
        assert!(own.text.contains("needs its tensor edge_"), "{}", own.text);
        ps.signal("CONT");
        wait_for_runs(5);
        stop.store(true, Ordering::Relaxed);
        runs.join().unwrap().unwrap();
    }
}

/// Accepts connections and reads what comes; answers with `answer` once, and then never.
fn silent_peer(address: &str, answer: &'static [u8]) {
    use std::io::Write as _;
    let listener = TcpListener::bind(address).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let _ = stream.write_all(answer);
                let mut sink = [0; 4096];
                while matches!(stream.read(&mut sink), Ok(n) if n > 0) {}
            });
        }
    });
}

#[test]
fn a_peer_that_accepts_and_never_answers_holds_nobody_longer_than_the_deadline() {
    let _turn = one_at_a_time();
    // Nothing at all; and the settings of HTTP/2, as of a server that hangs after its first words.
    for answer in [&b""[..], b"\0\0\0\x04\0\0\0\0\0"] {
        for transport in [&["--ready-deadline", "1"][..], &["--ready-deadline", "1", "--grpc-only"]] {
            let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
            silent_peer(spec.address("ps", 0), answer);
            let _worker = spec.serve("worker", 0, transport);
            let began = Instant::now();
            let error = connect(&spec.target("worker", 0)).err().unwrap();
            assert!([Code::DeadlineExceeded, Code::Unavailable].contains(&error.code()), "{error:?}");
            assert!(error.message().contains("/job:ps/replica:0/task:0"), "{error}");
            let (is_well, text) = kolo(&["doctor", "--cluster", &spec.text]);
            assert!(!is_well && text.contains("does not answer (stopped or overloaded)"), "{text}");
            assert!(began.elapsed() < PATIENCE);
            // As a client's server, it is given up too, long before it could be at the limits that hold without a wish.
            let began = Instant::now();
            let config = SessionConfig { operation_timeout: Some(Duration::from_secs(1)), ..SessionConfig::default() };
            let error = Session::connect_with(&spec.target("ps", 0), &kolo::graph(), config).err().unwrap();
            assert!([Code::DeadlineExceeded, Code::Unavailable].contains(&error.code()), "{error:?}");
            assert!(began.elapsed() < Duration::from_secs(9), "{:?}: {error}", began.elapsed());
        }
    }
}

#[test]
fn sessions_and_connections_that_end_leave_nothing_behind() {
    const N_SESSIONS: usize = 1000;
    const N_AT_ONCE: usize = 50;
    const N_CONNECTIONS: usize = 10_000;
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("worker", 1)]);
    let worker = spec.serve("worker", 0, &[]);
    let target = spec.target("worker", 0);
    let round = |n: usize| {
        let sessions: Vec<Session> = (0..n)
            .map(|i| {
                let g = kolo::graph();
                let y = g.constant(i as f32) + 1.0;
                let session = Session::connect(&target, &g).unwrap();
                assert_eq!(session.fetch(y).unwrap().scalar_value::<f32>().unwrap(), i as f32 + 1.0);
                session
            })
            .collect();
        drop(sessions);
    };
    // Once before measuring: the first ones fill caches.
    round(2 * N_AT_ONCE);
    let at_rest = |limit: usize| {
        let began = Instant::now();
        while worker.n_descriptors() > limit {
            assert!(began.elapsed() < PATIENCE, "{} descriptors, {limit} at first", worker.n_descriptors());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    at_rest(20);
    let (descriptors, memory) = (worker.n_descriptors(), worker.resident_kb());
    let began = Instant::now();
    for _ in 0..N_SESSIONS / N_AT_ONCE {
        round(N_AT_ONCE);
    }
    at_rest(descriptors + 2);
    println!("{N_SESSIONS} sessions took {:?}", began.elapsed());
    let after_sessions = worker.resident_kb();
    let address = spec.address("worker", 0);
    for i in 0..N_CONNECTIONS {
        use std::io::Write as _;
        let mut stream = TcpStream::connect(address).unwrap();
        // Some say nothing, some begin to speak one of the protocols.
        let words: &[u8] = [&b""[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"KOLO/1\r\n\0\0"][i % 3];
        let _ = stream.write_all(words);
    }
    at_rest(descriptors + 2);
    let after = worker.resident_kb();
    println!(
        "{memory} kB, {after_sessions} kB after {N_SESSIONS} sessions, {after} kB after {N_CONNECTIONS} connections"
    );
    assert!(after < memory + 30_000, "{memory} kB grew to {after} kB");
    round(1);
}

#[test]
fn a_request_to_end_is_obeyed_with_a_last_checkpoint() {
    let _turn = one_at_a_time();
    let training = Training::new("sigterm", 1);
    let mut ps = training.spec.serve("ps", 0, &[]);
    let mut chief = training.worker(0, &["--checkpoint-every", "1000000"]);
    chief.wait_for_step(0, |step| step > 10);
    chief.signal("TERM");
    assert!(chief.wait().success(), "{}", chief.text());
    let (saved, last) = (last_saved(&training.folder), chief.steps().into_iter().max().unwrap());
    assert!(saved >= last, "step {saved} was saved, {last} was reported");
    ps.signal("TERM");
    assert!(ps.wait().success(), "{}", ps.text());
}

#[test]
fn a_cluster_that_one_command_started_ends_with_it() {
    let _turn = one_at_a_time();
    let folder = Folder::new("launcher-sigterm");
    write_pictures(&folder.0.join("data"));
    let (data, checkpoints) = (folder.path("data"), folder.path("ckpt"));
    let args = [
        "train",
        "mnist",
        "--ps",
        "1",
        "--workers",
        "2",
        "--json",
        "--log-every",
        "1",
        "--batch-size",
        "20",
        "--epochs",
        "1000000",
        "--data",
        &data,
        "--checkpoint-dir",
        &checkpoints,
        "--checkpoint-every",
        "1000000",
    ];
    let mut launcher = Process::start("launcher", &args);
    launcher.wait_for_step(0, |step| step > 10);
    launcher.signal("TERM");
    assert!(launcher.wait().success(), "{}", launcher.text());
    let last = launcher.steps().into_iter().max().unwrap();
    let saved = last_saved(&folder);
    assert!(saved >= last, "step {saved} was saved, {last} was reported");
    assert!(!launcher.text().contains("lost the session"), "{}", launcher.text());
}

#[test]
fn a_worker_of_a_launched_cluster_that_is_killed_is_started_again() {
    let _turn = one_at_a_time();
    let folder = Folder::new("launcher-restart");
    write_pictures(&folder.0.join("data"));
    let data = folder.path("data");
    let size = ["--batch-size", "20", "--epochs", "1000000", "--data", &data];
    let cluster = ["--ps", "1", "--workers", "2", "--json", "--log-every", "1"];
    let mut launcher = Process::start("launcher", &[&["train", "mnist"], &cluster[..], &size[..]].concat());
    let of_worker_1 =
        |line: &support::Line| line.text.contains("\"event\":\"step\"") && line.text.contains("\"task\":1}");
    launcher.wait_until("a step of worker 1", 0, of_worker_1);
    let children =
        Command::new("ps").args(["--ppid", &launcher.pid().to_string(), "-o", "pid=,args="]).output().unwrap();
    let children = String::from_utf8_lossy(&children.stdout).into_owned();
    let worker = children.lines().find(|line| line.contains("--task 1")).unwrap_or_else(|| panic!("{children}"));
    let killed = Command::new("kill").args(["-KILL", worker.split_whitespace().next().unwrap()]).status();
    assert!(killed.unwrap().success());
    let n = launcher.lines().len();
    launcher.wait_for("[worker 1] died (signal: 9 (SIGKILL)); the others go on. Starting it again");
    let n_said = launcher.lines().len().max(n);
    launcher.wait_until("a step of worker 1, again", n_said, of_worker_1);
    assert!(!launcher.text().contains("lost the session"), "{}", launcher.text());
    launcher.signal("TERM");
    assert!(launcher.wait().success(), "{}", launcher.text());
}

/// The step of the newest checkpoint.
fn last_saved(folder: &Folder) -> i64 {
    let state = std::fs::read_to_string(folder.0.join("ckpt/checkpoint")).unwrap();
    state.split("model.ckpt-").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn a_signal_that_comes_while_a_process_starts_ends_it_in_order() {
    let _turn = one_at_a_time();
    let folder = Folder::new("first-moment");
    let spec = Spec::new(&[("ps", 1)]);
    // A journal that cannot be opened until somebody writes to it keeps the process in its first moments.
    let pipe = folder.0.join("journal/ps-0/journal-1");
    std::fs::create_dir_all(pipe.parent().unwrap()).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut ps = spec.start("ps", 0, &["--durability", "logged", "--journal", &folder.path("journal")]);
    let handles_term = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", ps.pid())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
        u64::from_str_radix(&caught, 16).unwrap() & (1 << 14) != 0
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    while !handles_term() {
        assert!(Instant::now() < deadline, "a signal would end it");
        std::thread::sleep(Duration::from_millis(5));
    }
    ps.signal("TERM");
    // It reads an empty file, as often as it opens it, and goes on. Nobody may be at the other end.
    let ended = AtomicBool::new(false);
    let status = std::thread::scope(|scope| {
        scope.spawn(|| {
            use std::os::unix::fs::OpenOptionsExt as _;
            const O_NONBLOCK: i32 = 0o4000;
            while !ended.load(Ordering::Relaxed) {
                drop(std::fs::OpenOptions::new().write(true).custom_flags(O_NONBLOCK).open(&pipe));
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ps.wait()));
        ended.store(true, Ordering::Relaxed);
        status.unwrap()
    });
    assert!(status.success(), "{status}: {}", ps.text());
}

#[test]
fn a_parameter_server_with_a_journal_loses_no_step() {
    loses_no_step("journal", |folder| {
        ["--durability", "logged", "--journal", &folder.path("journal")].map(str::to_owned).to_vec()
    });
}

#[test]
fn a_parameter_server_whose_variables_another_task_keeps_loses_no_step() {
    // With one parameter server the chief keeps them.
    loses_no_step("replica", |_| ["--durability", "replicated"].map(str::to_owned).to_vec());
}

fn loses_no_step(name: &str, flags: impl Fn(&Folder) -> Vec<String>) {
    let _turn = one_at_a_time();
    for mode in ["--async", "--sync"] {
        let training = Training::new(name, 2);
        let flags = flags(&training.folder);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut ps = training.spec.serve("ps", 0, &flags);
        let chief = training.worker(0, &["--checkpoint-every", "1000000", mode]);
        let worker = training.worker(1, &[mode]);
        worker.wait_for_step(0, |_| true);
        chief.wait_for_step(0, |step| step > 30);
        ps.kill();
        chief.wait_for("lost the session");
        let n_chief = chief.lines().len();
        let _ps = training.spec.serve("ps", 0, &flags);
        let restarted = Instant::now();
        let announced = chief.wait_until("steps lost", n_chief, |line| line.text.contains("steps lost: "));
        assert!(announced.text.contains("Attached") && announced.text.contains("steps lost: 0"), "{}", announced.text);
        let (_, next) = chief.wait_for_step(n_chief, |_| true);
        println!("the chief trained {:?} after the restart; {}", next.at - restarted, announced.text);
        worker.wait_for_step(worker.lines().len(), |_| true);
        for process in [&chief, &worker] {
            assert!(process.steps().is_sorted(), "{mode}: {:?}", process.steps());
        }
    }
}

#[test]
fn updates_that_were_acknowledged_outlive_any_number_of_kills() {
    let folder = Folder::new("acknowledged");
    outlive_kills(&["--durability", "logged", "--journal", &folder.path("journal")]);
    outlive_kills(&["--durability", "replicated", "--replica", "worker:0"]);
}

fn outlive_kills(flags: &[&str]) {
    const N_KILLS: u64 = 8;
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
    let _worker = spec.serve("worker", 0, &[]);
    let acknowledged = AtomicU64::new(0);
    for round in 0..=N_KILLS {
        let mut ps = spec.serve("ps", 0, flags);
        let g = kolo::graph();
        let v = g.device("/job:ps/task:0", || g.variable("v", Tensor::scalar(0i64)));
        let more = g.device("/job:ps/task:0", || v.assign_add(g.constant(1i64))).name();
        let init = g.global_variables_initializer();
        let session = Session::connect(&spec.target("worker", 0), &g).unwrap();
        if round == 0 {
            session.run_op(init).unwrap();
        }
        let value = session.fetch(v.read()).unwrap().scalar_value::<i64>().unwrap() as u64;
        let n = acknowledged.load(Ordering::Relaxed);
        // A kill may hit an update that was made and logged, and not yet acknowledged.
        assert!((n..=n + round).contains(&value), "{value} after {n} acknowledged updates and {round} kills");
        if round == N_KILLS {
            break;
        }
        let enough = n + 10 + 7 * round;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while session.run_named(&[], &[], &[&more]).is_ok() {
                    acknowledged.fetch_add(1, Ordering::Relaxed);
                }
            });
            let began = Instant::now();
            while acknowledged.load(Ordering::Relaxed) < enough {
                assert!(began.elapsed() < PATIENCE, "updates do not go on");
                std::thread::yield_now();
            }
            ps.kill();
        });
    }
}

/// Limits the size of the files that a process writes, which then looks like a full disk to it.
#[cfg(target_os = "linux")]
fn limit_files(process: &Process, limit: &str) {
    let pid = process.pid().to_string();
    let limited = std::process::Command::new("prlimit").args(["--pid", &pid, &format!("--fsize={limit}")]).status();
    assert!(limited.unwrap().success());
}

#[test]
#[cfg(target_os = "linux")]
fn steps_wait_for_room_on_the_disk_of_a_journal_and_are_acknowledged_then() {
    let _turn = one_at_a_time();
    let folder = Folder::new("full-journal");
    let spec = Spec::new(&[("ps", 1)]);
    let journal = folder.path("journal");
    let args = ["serve", "--with-parent", "--cluster", &spec.text, "--job", "ps", "--task", "0"];
    // A write beyond the limit is an error for it, not a signal.
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kolo")]);
    command.args(args).args(["--durability", "logged", "--journal", &journal]);
    let ps = Process::spawn("ps:0", command);
    ps.wait_for("serving grpc://");
    let g = kolo::graph();
    let v = g.variable("v", Tensor::scalar(0i64));
    let more = v.assign_add(g.constant(1i64)).name();
    let init = g.global_variables_initializer();
    let session = Session::connect(&spec.target("ps", 0), &g).unwrap();
    session.run_op(init).unwrap();
    session.run_named(&[], &[], &[&more]).unwrap();
    limit_files(&ps, "1:unlimited");
    // A step may be given up, and others still run that write nothing.
    let short = RunOptions { timeout: Some(Duration::from_millis(500)), ..RunOptions::default() };
    let error = session.run_named_with(&short, &[], &[], &[&more]).err().unwrap();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    assert_eq!(session.fetch(v.read()).unwrap().scalar_value::<i64>().unwrap(), 2);
    ps.wait_for("Steps wait, and are not acknowledged, until there is room");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| session.run_named(&[], &[], &[&more]));
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (_, text) = kolo(&["doctor", "--cluster", &spec.text, "--overdue", "0.1"]);
            if text.contains("waits for room on the disk of its journal") {
                break;
            }
            assert!(Instant::now() < deadline && !waiting.is_finished(), "{text}");
        }
        limit_files(&ps, "unlimited:unlimited");
        waiting.join().unwrap().unwrap();
    });
    ps.wait_for("has room again");
    drop(ps);
    let _ps = spec.serve("ps", 0, &["--durability", "logged", "--journal", &journal]);
    let session = Session::connect(&spec.target("ps", 0), &g).unwrap();
    assert_eq!(session.fetch(v.read()).unwrap().scalar_value::<i64>().unwrap(), 3);
}

#[test]
fn a_task_that_keeps_variables_may_be_restarted() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("ps", 2), ("worker", 1)]);
    // Each keeps the other's.
    let flags = ["--durability", "replicated"];
    let (first, second) = (spec.start("ps", 0, &flags), spec.start("ps", 1, &flags));
    let mut keeper = second;
    first.wait_for("serving");
    keeper.wait_for("serving");
    let _worker = spec.serve("worker", 0, &[]);
    let g = kolo::graph();
    let v = g.device("/job:ps/task:0", || g.variable("v", Tensor::scalar(0i64)));
    let more = g.device("/job:ps/task:0", || v.assign_add(g.constant(1i64))).name();
    let init = g.global_variables_initializer();
    let config = SessionConfig { device_filters: vec!["/job:ps/task:0".to_owned()], ..SessionConfig::default() };
    let session = Session::connect_with(&spec.target("worker", 0), &g, config.clone()).unwrap();
    session.run_op(init).unwrap();
    session.run_named(&[], &[], &[&more]).unwrap();
    keeper.kill();
    let error = session.run_named(&[], &[], &[&more]).unwrap_err();
    assert!(error.message().contains("is not acknowledged"), "{error}");
    // The new one knows nothing, and is told everything with the next step.
    let _keeper = spec.serve("ps", 1, &flags);
    let deadline = Instant::now() + PATIENCE;
    while session.run_named(&[], &[], &[&more]).is_err() {
        assert!(Instant::now() < deadline, "steps are not copied again");
    }
    drop(first);
    let _first = spec.serve("ps", 0, &flags);
    let session = Session::connect_with(&spec.target("worker", 0), &g, config).unwrap();
    let value = session.fetch(v.read()).unwrap().scalar_value::<i64>().unwrap();
    // One of before, one of after; what was not acknowledged may count or not.
    assert!(value >= 2, "{value}");
}

#[test]
fn a_program_trains_through_a_server_that_runs_already() {
    let _turn = one_at_a_time();
    let training = Training::new("target", 1);
    let spec = &training.spec;
    let (_ps, _worker) = (spec.serve("ps", 0, &[]), spec.serve("worker", 0, &[]));
    let (data, target) = (training.folder.path("data"), spec.target("worker", 0));
    let train = |target: &str| {
        let args = ["train", "mnist", "--json", "--log-every", "1", "--batch-size", "20", "--max-steps", "30"];
        let mut client = Process::start("client", &[&args[..], &["--data", &data, "--target", target]].concat());
        let is_well = client.wait().success();
        (is_well, client.steps(), client.text())
    };
    let (is_well, steps, text) = train(&target);
    assert!(is_well && !steps.is_empty() && text.contains("\"step\":30,"), "{text}");
    // The variables are on the parameter server still, and so is the step.
    let (is_well, _, text) = train(&target);
    assert!(is_well && text.contains("\"own_steps\":0"), "{text}");
    let (is_well, _, text) = train(&spec.target("ps", 0));
    assert!(!is_well && text.contains("give the address of one of those"), "{text}");
}

/// Passes connections on to `to`, with a pause before each piece of up to 16 KiB, by its number and its length.
fn slow_link(to: &str, pause: fn(usize, usize) -> Duration) -> String {
    use std::io::Write as _;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, to) = (listener.local_addr().unwrap().to_string(), to.to_owned());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (Ok(near), Ok(far)) = (stream, TcpStream::connect(&to)) else { return };
            let ways = [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)];
            for (mut from, mut to) in ways {
                std::thread::spawn(move || {
                    let mut piece = [0; 16 << 10];
                    for number in 1.. {
                        let Ok(n @ 1..) = from.read(&mut piece) else { break };
                        std::thread::sleep(pause(number, n));
                        if to.write_all(&piece[..n]).is_err() {
                            break;
                        }
                    }
                });
            }
        }
    });
    address
}

#[test]
fn a_peer_behind_a_slow_or_lossy_link_is_named_with_what_was_measured() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
    // The link has a port of its own, and the token of a user is another one for each port.
    let serve = |job: &str| spec.serve(job, 0, &["--insecure-loopback"]);
    let (_ps, _worker) = (serve("ps"), serve("worker"));
    let (is_well, text) = kolo(&["doctor", "--cluster", &spec.text]);
    assert!(is_well && text.contains("Nothing is stuck"), "{text}");
    // 10 Mbit/s; and every seventh piece is sent again after 250 ms.
    let slow = |_: usize, n: usize| Duration::from_secs_f64(n as f64 * 8.0 / 10e6);
    let lossy = |number: usize, _: usize| Duration::from_millis(if number.is_multiple_of(7) { 250 } else { 0 });
    for (pause, wanted) in [(slow as fn(usize, usize) -> Duration, "Mbit/s"), (lossy, "packets are lost")] {
        let address = slow_link(spec.address("worker", 0), pause);
        let (is_well, text) = kolo(&["doctor", "--cluster", &spec.with("worker", 0, &address).text]);
        let named = text.lines().find(|line| line.contains("worker:0 is behind a slow link")).unwrap_or_default();
        assert!(!is_well && named.contains(wanted), "{text}");
        assert!(!text.contains("ps:0 is behind"), "{text}");
    }
}

/// Under sync, and under hybrid as long as it waits, everybody waits at the parameter server for a chief, or a worker, that is
/// stopped: the doctor names that one alone, and follows the steps of the others to it.
#[test]
fn who_is_stopped_is_named_though_all_wait_at_the_parameter_server() {
    let _turn = one_at_a_time();
    for mode in [&["--sync"][..], &["--hybrid", "timeout=100s,min=1"]] {
        let training = Training::new("stopped-chief", 3);
        let _ps = training.spec.serve("ps", 0, &[]);
        for victim in [0usize, 2] {
            let workers: Vec<Process> = (0..3).map(|task| training.worker(task, mode)).collect();
            workers.iter().for_each(|worker| drop(worker.wait_for_step(0, |_| true)));
            workers[victim].signal("STOP");
            let stopped = Instant::now();
            let culprit = format!("worker:{victim}");
            let followed = format!("to which this has not delivered: {culprit} (does not answer");
            loop {
                let flags = ["--overdue", "0.3", "--deadline", "0.5"];
                let (is_well, text) = kolo(&[&["doctor", "--cluster", &training.spec.text], &flags[..]].concat());
                let silent: Vec<&str> = text.lines().filter(|line| line.contains("  does not answer")).collect();
                if let (false, [task]) = (is_well, &silent[..]) {
                    // The line of the culprit's address, and steps of others: all of them lead there.
                    let [task, address] = [*task, training.spec.address("worker", victim)];
                    assert!(task.contains(&culprit) && task.contains(address), "{mode:?}: {text}");
                    let mut steps = text.lines().filter(|line| line.starts_with("step ")).peekable();
                    let are_overdue = steps.peek().is_some();
                    assert!(steps.all(|line| line.contains(&culprit)), "{mode:?}: {text}");
                    if are_overdue && text.contains(&followed) {
                        println!("{mode:?}, {culprit} is stopped:\n{text}");
                        break;
                    }
                }
                assert!(stopped.elapsed() < Duration::from_secs(20), "{mode:?}: {text}");
            }
            workers[victim].signal("CONT");
            drop(workers);
        }
    }
}

/// One of three workers is stopped for half a minute: the others go on, and when it wakes it does no harm.
#[test]
fn hybrid_training_goes_on_without_a_worker_that_is_stopped() {
    let stop = Duration::from_secs(30);
    let _turn = one_at_a_time();
    let training = Training::new("hybrid", 3);
    let _ps = training.spec.serve("ps", 0, &[]);
    let mode = ["--hybrid", "timeout=200ms,min=0.5"];
    let chief = training.worker(0, &[&mode[..], &["--checkpoint-every", "1000000"]].concat());
    let others = [training.worker(1, &mode), training.worker(2, &mode)];
    others.iter().for_each(|worker| drop(worker.wait_for_step(0, |_| true)));
    chief.wait_for_step(0, |step| step > 10);
    others[1].signal("STOP");
    let stopped = Instant::now();
    let before = chief.steps().into_iter().max().unwrap();
    // It is noticed, by name.
    let named = loop {
        let (_, text) = kolo(&["doctor", "--cluster", &training.spec.text, "--deadline", "0.5"]);
        if text.contains("worker:2") && text.contains("does not answer") {
            break text;
        }
        assert!(stopped.elapsed() < PATIENCE, "{text}");
    };
    println!("named after {:?}: {named}", stopped.elapsed());
    while stopped.elapsed() < stop {
        let n = chief.lines().len();
        chief.wait_for_step(n, |_| true);
    }
    let during = chief.steps().into_iter().max().unwrap();
    // Waiting 200 ms for it in every step would make 150.
    assert!(during - before > 300, "{before} and {during}");
    others[1].signal("CONT");
    // It goes on from where the others are: what it had computed is late, and the step never falls.
    let n = others[1].lines().len();
    others[1].wait_for_step(n, |step| step >= during);
    for process in [&chief, &others[0], &others[1]] {
        assert!(process.steps().is_sorted(), "{:?}", process.steps());
    }
}
