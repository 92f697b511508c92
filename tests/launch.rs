//! `kolo launch` on this machine and with agents, and what processes find that launchers of other systems start.
#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use support::{Folder, PATIENCE, Process, Spec, kolo, one_at_a_time};

/// Runs a command line of `kolo` to its end: exit code, standard output and standard error.
fn run(args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(args).env_remove("TF_CONFIG").env_remove("RANK").env_remove("WORLD_SIZE");
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// The lines of a rank.
fn of_rank(text: &str, rank: usize) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix(&format!("[{rank}] "))).collect()
}

/// Waits until something holds.
#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen in {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_running(pid: &str) -> bool {
    // A zombie that nobody waits for has ended.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn each_process_is_told_who_it_is_and_its_lines_are_its_own() {
    let dir = Folder::new("launch-logs");
    let logs = dir.path("logs");
    let script = "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, horovod $HOROVOD_RANK, mpi $OMPI_COMM_WORLD_SIZE; \
                  echo at $MASTER_ADDR $MASTER_PORT $KOLO_TOKEN; echo $TF_CONFIG >&2";
    let (code, out, err) = run(&["launch", "--processes", "3", "--log-dir", &logs, "--", "sh", "-c", script]);
    assert_eq!(code, 0, "{out}{err}");
    let mut meetings = Vec::new();
    for rank in 0..3 {
        let lines = of_rank(&out, rank);
        assert_eq!(lines[0], format!("rank {rank} of 3, {rank} of 3, horovod {rank}, mpi 3"), "{out}");
        assert!(lines[1].starts_with("at 127.0.0.1 ") && lines[1].len() > 40, "{out}");
        meetings.push(lines[1].to_owned());
        let config = of_rank(&err, rank)[0];
        let config = kolo::TfConfig::parse(config).unwrap();
        assert_eq!((config.task.unwrap().index as usize, config.cluster.unwrap().n_tasks()), (rank, 3));
        let log = std::fs::read_to_string(format!("{logs}/rank-{rank}.log")).unwrap();
        assert!(log.contains(&format!("rank {rank} of 3")) && log.contains("\"worker\""), "{log}");
    }
    assert!(meetings.iter().all(|other| *other == meetings[0]), "{meetings:?}");
    // `config check` in such a process says the same.
    let (code, out, err) = run(&["launch", "-n", "2", "--", env!("CARGO_BIN_EXE_kolo"), "config", "check"]);
    assert!(code == 0 && out.contains("[1] A training that is started here is rank 1 of 2"), "{out}{err}");
    assert!(out.contains("read:    KOLO_PLACE=ranks") && out.contains("ignored: TF_CONFIG"), "{out}");
}

#[test]
fn kolo_trains_under_it_to_the_weights_of_its_own_ranks() {
    let _turn = one_at_a_time();
    let end = |text: &str| -> serde_json::Value {
        let line = text.lines().find(|line| line.contains("\"event\":\"end\""));
        let line = line.unwrap_or_else(|| panic!("{text}"));
        serde_json::from_str(&line[line.find('{').unwrap()..]).unwrap()
    };
    let train = ["train", "linear", "--epochs", "3", "--micro-batches", "4", "--json"];
    let (code, out, err) = run(&[&train[..], &["--ranks", "2"]].concat());
    assert_eq!(code, 0, "{err}");
    let expected = end(&out);
    let launched = [&["launch", "-n", "4", "--", env!("CARGO_BIN_EXE_kolo")][..], &train].concat();
    let (code, out, err) = run(&launched);
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!((&end(&out)["weights"], &end(&out)["ranks"]), (&expected["weights"], &serde_json::json!(4)));
}

#[test]
fn the_first_failure_is_named_and_its_code_passed_on() {
    let script = "if [ $RANK = 1 ]; then echo the cause is here >&2; exit 7; fi; sleep 600";
    let began = Instant::now();
    let (code, _, err) = run(&["launch", "-n", "3", "--", "sh", "-c", script]);
    assert!(code == 7 && began.elapsed() < PATIENCE, "{code} {err}");
    assert!(
        err.contains("rank 1 of 3 on localhost failed first: exit code 7; its last lines:\n    the cause is here"),
        "{err}"
    );
    let (code, _, err) = run(&["launch", "-n", "2", "--", "sh", "-c", "[ $RANK = 0 ] && kill -9 $$; sleep 600"]);
    assert!(code == 137 && err.contains("rank 0 of 2 on localhost failed first: signal: 9 (SIGKILL)"), "{code} {err}");
    let (code, _, err) = run(&["launch", "-n", "2", "--", "/nonexistent/program"]);
    assert!(code == 1 && err.contains("'/nonexistent/program' could not be started"), "{code} {err}");
    // One that does not listen is killed after a while.
    let deaf = "trap '' TERM; if [ $RANK = 0 ]; then sleep 1; exit 3; fi; while true; do sleep 1; done";
    let (code, _, err) = run(&["launch", "-n", "2", "--grace", "0.5", "--", "sh", "-c", deaf]);
    assert!(code == 3 && err.contains("killing those that did not end in 0.5 s"), "{code} {err}");
}

#[test]
fn all_are_started_again_within_limits() {
    let dir = Folder::new("launch-restarts");
    let script = format!(
        "echo start $KOLO_RESTART port $MASTER_PORT; cd {}; if [ $RANK = 1 ] && [ $KOLO_RESTART -lt 2 ]; then exit 5; fi",
        dir.path("")
    );
    let (code, out, err) = run(&["launch", "-n", "2", "--restarts", "2", "--", "sh", "-c", &script]);
    assert!(code == 0 && err.contains("starting all 2 processes again (2 of 2)"), "{code} {out}{err}");
    let starts = of_rank(&out, 1);
    assert_eq!(starts.len(), 3, "{out}");
    assert!(starts[2].starts_with("start 2 port "), "{out}");
    let (code, _, err) = run(&["launch", "-n", "2", "--restarts", "1", "--", "sh", "-c", "exit 5"]);
    assert!(code == 5 && err.contains("(1 of 1)") && err.contains("failed first: exit code 5"), "{code} {err}");
}

#[test]
fn with_min_one_is_started_again_and_told_where_the_others_are() {
    let script = "if [ $RANK = 1 ] && [ $KOLO_RESTART = 0 ]; then exit 4; fi; echo $KOLO_RESTART listens $KOLO_LISTEN joins $KOLO_JOIN; sleep 2";
    let (code, out, err) = run(&["launch", "--max", "3", "--min", "2", "--restarts", "1", "--", "sh", "-c", script]);
    assert!(code == 0 && err.contains("2 others go on, and it is started again"), "{code} {out}{err}");
    let listens = |rank: usize| of_rank(&out, rank)[0].split(' ').nth(2).unwrap().to_owned();
    assert_eq!(of_rank(&out, 1), [format!("1 listens {} joins {},{}", listens(1), listens(0), listens(2))], "{out}");
    assert!(of_rank(&out, 0)[0].ends_with("joins"), "{out}");
    let (code, _, err) =
        run(&["launch", "-n", "2", "--min", "2", "--", "sh", "-c", "[ $RANK = 0 ] && exit 4; sleep 600"]);
    assert!(code == 4 && err.contains("fewer than --min 2"), "{code} {err}");
}

#[test]
fn signals_reach_everything_that_was_started() {
    let script = "sleep 600 & echo child $!; trap 'echo ending; exit 0' TERM; wait";
    let mut launch = Process::start("launch", &["launch", "-n", "2", "--", "sh", "-c", script]);
    let child = |rank: usize| {
        let line = launch.wait_for(&format!("[{rank}] child "));
        line.text.rsplit(' ').next().unwrap().to_owned()
    };
    let children = [child(0), child(1)];
    assert!(children.iter().all(|pid| is_running(pid)));
    launch.signal("TERM");
    assert_eq!(launch.wait().code(), Some(0), "{}", launch.text());
    assert!(launch.text().contains("[0] ending") && launch.text().contains("[1] ending"), "{}", launch.text());
    wait_until("the end of grandchildren", || !children.iter().any(|pid| is_running(pid)));
    // Those that do not end are killed by a second signal.
    let deaf = "trap '' TERM INT; echo ready; while true; do sleep 1; done";
    let mut launch = Process::start("launch", &["launch", "-n", "1", "--grace", "500", "--", "sh", "-c", deaf]);
    launch.wait_for("[0] ready");
    launch.signal("INT");
    launch.wait_for("Ctrl-C again kills them");
    launch.signal("INT");
    assert_eq!(launch.wait().code(), Some(137), "{}", launch.text());
}

/// A launch on hosts with these names, whose agents dial in on loopback.
struct Hosts {
    launch: Process,
    address: String,
    token: String,
}

impl Hosts {
    fn new(hosts: &str, more: &[&str], program: &[&str]) -> Hosts {
        let args = [&["launch", "--hosts", hosts, "--listen", "127.0.0.1:0"][..], more, &["--"], program].concat();
        let launch = Process::start("launch", &args);
        let line = launch.wait_for("KOLO_JOIN_TOKEN=").text;
        let word = |before: &str| line.split(before).nth(1).unwrap().split(' ').next().unwrap().to_owned();
        Hosts { address: word("--join "), token: word("KOLO_JOIN_TOKEN="), launch }
    }

    fn agent(&self, name: &str) -> Process {
        let args = ["agent", "--join", &self.address, "--name", name];
        Process::start_with(name, &args, &[("KOLO_JOIN_TOKEN", &self.token)])
    }
}

#[test]
fn agents_of_several_hosts_train_together() {
    let _turn = one_at_a_time();
    let train = [env!("CARGO_BIN_EXE_kolo"), "train", "linear", "--epochs", "2", "--json"];
    let mut hosts = Hosts::new("a:2,b:2", &[], &train);
    let (mut a, mut b) = (hosts.agent("a"), hosts.agent("b"));
    assert_eq!(hosts.launch.wait().code(), Some(0), "{}", hosts.launch.text());
    assert!(hosts.launch.text().contains("\"ranks\":4"), "{}", hosts.launch.text());
    assert!(a.wait().success() && b.wait().success(), "{}{}", a.text(), b.text());
}

#[test]
fn an_agent_that_is_lost_is_named_and_ends_what_it_runs() {
    let mut hosts = Hosts::new("a:1,b:1", &[], &["sh", "-c", "echo process $$; sleep 600"]);
    let (mut a, mut b) = (hosts.agent("a"), hosts.agent("b"));
    let of_a = hosts.launch.wait_for("[0] process ").text.rsplit(' ').next().unwrap().to_owned();
    hosts.launch.wait_for("[1] process ");
    b.kill();
    assert_eq!(hosts.launch.wait().code(), Some(1), "{}", hosts.launch.text());
    assert!(
        hosts.launch.text().contains("rank 1 of 2 on b failed first: its host is lost (the agent on b: "),
        "{}",
        hosts.launch.text()
    );
    assert!(a.wait().success(), "{}", a.text());
    wait_until("the end of a's process", || !is_running(&of_a));
    // And a launcher that is lost ends what agents run for it.
    let mut hosts = Hosts::new("a:1", &[], &["sh", "-c", "echo process $$; sleep 600"]);
    let mut a = hosts.agent("a");
    let of_a = hosts.launch.wait_for("[0] process ").text.rsplit(' ').next().unwrap().to_owned();
    hosts.launch.kill();
    assert_eq!(a.wait().code(), Some(1));
    assert!(a.text().contains("is lost, and its processes here were ended"), "{}", a.text());
    wait_until("the end of a's process", || !is_running(&of_a));
}

#[test]
fn agents_with_another_token_or_name_are_sent_away() {
    let hosts = Hosts::new("a:1", &["--join-deadline", "30"], &["true"]);
    let mut other = hosts.agent("zeta");
    assert_eq!(other.wait().code(), Some(1));
    assert!(other.text().contains("'zeta' is none of --hosts: a; give --name"), "{}", other.text());
    let token = format!("{}.0123456789abcdef0123", "0".repeat(64));
    let args = ["agent", "--join", &hosts.address, "--name", "a"];
    let mut stranger = Process::start_with("stranger", &args, &[("KOLO_JOIN_TOKEN", &token)]);
    assert_eq!(stranger.wait().code(), Some(1));
    assert!(stranger.text().contains("not the launcher that this token is for"), "{}", stranger.text());
    let mut hosts = Hosts::new("a:1,b:1", &["--join-deadline", "1"], &["true"]);
    assert_eq!(hosts.launch.wait().code(), Some(1));
    assert!(hosts.launch.text().contains("no agent has joined from a, b in 1 s"), "{}", hosts.launch.text());
}

#[test]
fn agents_are_started_by_ssh_or_what_stands_in_for_it() {
    let dir = Folder::new("launch-ssh");
    let (ssh, file) = (dir.path("ssh"), dir.path("token"));
    // What a host's name and a command become: the arguments are kept, and the command runs here.
    std::fs::write(&ssh, format!("#!/bin/sh\necho \"$@\" >> {}\nshift\nexec \"$@\"\n", dir.path("calls"))).unwrap();
    Command::new("chmod").args(["+x", &ssh]).status().unwrap();
    let flags =
        ["launch", "--hosts", "a:1,b:1", "--listen", "127.0.0.1:0", "--remote-kolo", env!("CARGO_BIN_EXE_kolo")];
    let (code, out, err) = run(&[&flags[..], &["--ssh", &ssh, "--", "sh", "-c", "echo rank $RANK"]].concat());
    assert!(code == 0 && out.contains("[0] rank 0") && out.contains("[1] rank 1"), "{code} {out}{err}");
    let calls = std::fs::read_to_string(dir.path("calls")).unwrap();
    assert_eq!(calls.lines().count(), 2, "{calls}");
    assert!(calls.contains("--name a --token-stdin"), "{calls}");
    let (code, _, err) = run(&[&flags[..], &["--ssh", "false", "--", "true"]].concat());
    assert!(
        code == 1 && err.contains("the agent on ") && err.contains("was not started: exit status: 1"),
        "{code} {err}"
    );
    // By hand, the token can be in a file.
    let args = ["launch", "--hosts", "a:1", "--listen", "127.0.0.1:0", "--join-token-file", &file, "--", "true"];
    let mut launch = Process::start("launch", &args);
    let line = launch.wait_for("kolo agent --join ").text;
    let address = line.split("--join ").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    let (is_well, text) =
        kolo(&["agent", "--join", &address, "--name", "a", "--token-file", &file, "--join-deadline", "20"]);
    assert!(is_well && launch.wait().success(), "{text}{}", launch.text());
}

#[test]
fn tf_config_makes_every_task_of_a_cluster_which_ends_with_its_training() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("ps", 1), ("chief", 1), ("worker", 1)]);
    let config = |job: &str| {
        let one = |job: &str| format!("\"{job}\": [\"{}\"]", spec.address(job, 0));
        let task = format!("\"task\": {{\"type\": \"{job}\", \"index\": 0}}");
        format!("{{\"cluster\": {{{}, {}, {}}}, {task}}}", one("ps"), one("chief"), one("worker"))
    };
    let start = |job: &str| {
        let mut command = Command::new("env");
        command.arg(format!("TF_CONFIG={}", config(job))).arg(env!("CARGO_BIN_EXE_kolo"));
        command.args(["train", "linear", "--epochs", "3", "--json"]);
        Process::spawn(job, command)
    };
    let mut all = ["ps", "chief", "worker"].map(start);
    for process in &mut all {
        assert!(process.wait().success(), "{}", process.text());
    }
    assert!(all[0].text().contains("as /job:ps/task:0 until the training ends"), "{}", all[0].text());
    assert!(
        all[1].text().contains("\"task\":0") && all[2].text().contains("\"task\":1"),
        "{}{}",
        all[1].text(),
        all[2].text()
    );
    // All are asked to end at once, as pods are: the chief saves what is on the parameter server.
    let dir = Folder::new("launch-tf-config");
    let (spec, ckpt) = (Spec::new(&[("ps", 1), ("chief", 1)]), dir.path("ckpt"));
    let mut all = ["ps", "chief"].map(|job| {
        let (ps, chief) = (spec.address("ps", 0), spec.address("chief", 0));
        let mut command = Command::new("env");
        command.arg(format!(
            "TF_CONFIG={{\"cluster\": {{\"ps\": [\"{ps}\"], \"chief\": [\"{chief}\"]}}, \"task\": {{\"type\": \"{job}\", \"index\": 0}}}}"
        ));
        command.args([env!("CARGO_BIN_EXE_kolo"), "train", "linear", "--epochs", "1000000", "--checkpoint-dir", &ckpt, "--json"]);
        Process::spawn(job, command)
    });
    all[1].wait_for_step(0, |step| step > 0);
    all.iter().for_each(|process| process.signal("TERM"));
    for process in &mut all {
        assert!(process.wait().success(), "{}", process.text());
    }
    assert!(all[1].text().contains("\"stopped\":true"), "{}", all[1].text());
    assert!(std::fs::read_dir(&ckpt).unwrap().count() > 0);
    // Without parameter servers they are ranks.
    let spec = Spec::new(&[("worker", 2)]);
    let addresses = format!("\"{}\", \"{}\"", spec.address("worker", 0), spec.address("worker", 1));
    let start = |index: usize| {
        let config = format!(
            "{{\"cluster\": {{\"worker\": [{addresses}]}}, \"task\": {{\"type\": \"worker\", \"index\": {index}}}}}"
        );
        let mut command = Command::new("env");
        command.arg(format!("TF_CONFIG={config}")).arg(env!("CARGO_BIN_EXE_kolo"));
        command.args(["train", "linear", "--epochs", "2", "--json"]);
        Process::spawn("worker", command)
    };
    let mut ranks = [start(0), start(1)];
    for rank in &mut ranks {
        assert!(rank.wait().success(), "{}", rank.text());
    }
    assert!(ranks[0].text().contains("\"ranks\":2"), "{}", ranks[0].text());
}

#[test]
fn half_an_environment_ends_a_training_with_the_cure() {
    let train = |variables: &[(&str, &str)], flags: &[&str]| {
        let mut process =
            Process::start_with("train", &[&["train", "linear", "--epochs", "1"], flags].concat(), variables);
        (process.wait().success(), process.text())
    };
    let script = [("SLURM_JOB_ID", "7"), ("SLURM_NTASKS", "2"), ("SLURM_PROCID", "0")];
    let (is_well, text) = train(&script, &[]);
    assert!(!is_well && text.contains("SLURM_NTASKS=2") && text.contains("srun kolo train"), "{text}");
    // It may start its own, or say that it is alone.
    let (is_well, text) = train(&script, &["--ranks", "2"]);
    assert!(is_well, "{text}");
    let (is_well, text) = train(&[&script[..], &[("KOLO_PLACE", "alone")]].concat(), &[]);
    assert!(is_well, "{text}");
    let evaluator = r#"{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "evaluator", "index": 0}}"#;
    let mut command = Command::new("env");
    command.arg(format!("TF_CONFIG={evaluator}")).args([env!("CARGO_BIN_EXE_kolo"), "train", "linear"]);
    let mut process = Process::spawn("evaluator", command);
    assert!(!process.wait().success() && process.text().contains("has no evaluator"), "{}", process.text());
}

#[test]
fn a_job_is_stopped_in_order_and_saves() {
    let dir = Folder::new("launch-stop");
    let train = ["train", "linear", "--epochs", "100000000", "--checkpoint-dir", &dir.path("ckpt"), "--json"]
        .map(str::to_owned);
    let train: Vec<&str> = train.iter().map(String::as_str).collect();
    let launch = [&["launch", "-n", "2", "--", env!("CARGO_BIN_EXE_kolo")][..], &train].concat();
    let mut launch = Process::start("launch", &launch);
    launch.wait_for("\"event\":\"step\"");
    let pid = launch.pid().to_string();
    let (is_well, text) = kolo(&["stop", "--list", "--json"]);
    let found = text.lines().filter(|line| line.contains(&dir.path("ckpt"))).collect::<Vec<_>>();
    // What the launch has started is no job of its own.
    assert!(is_well && found.len() == 1 && found[0].contains(&format!("\"pid\":{pid}")), "{text}");
    let (is_well, text) = kolo(&["stop", "--pid", &pid]);
    assert!(is_well && text.contains(&format!("process {pid} has ended after")), "{text}");
    assert!(launch.wait().success() && launch.text().contains("\"stopped\":true"), "{}", launch.text());
    assert!(std::fs::read_dir(dir.0.join("ckpt")).unwrap().count() > 0);
    // One that does not end is named; who insists ends it, or kills it.
    let deaf = || {
        let script = "trap '' TERM; echo ready $$; while true; do sleep 1; done";
        let deaf = Process::start("deaf", &["launch", "--grace", "500", "--", "sh", "-c", script]);
        let below = deaf.wait_for("ready ").text.rsplit(' ').next().unwrap().to_owned();
        (deaf.pid().to_string(), below, deaf)
    };
    let (pid, below, mut process) = deaf();
    let (is_well, text) = kolo(&["stop", "--pid", &pid, "--deadline", "0.3"]);
    assert!(!is_well && text.contains("has not ended in 0 s") && text.contains("--kill"), "{text}");
    let (is_well, text) = kolo(&["stop", "--pid", &pid]);
    assert!(is_well && text.contains("has ended after"), "{text}");
    assert_eq!(process.wait().code(), Some(137));
    assert!(!is_running(&below));
    let (pid, below, mut process) = deaf();
    let (is_well, text) = kolo(&["stop", "--pid", &pid, "--deadline", "0.3", "--kill"]);
    assert!(is_well && text.contains("was killed"), "{text}");
    assert!(!process.wait().success());
    wait_until("the end of what it had started", || !is_running(&below));
    let (is_well, text) = kolo(&["stop", "--pid", "1"]);
    assert!(!is_well && text.contains("no job of yours"), "{text}");
}

#[test]
fn probes_are_answered_while_a_task_serves() {
    use std::io::{Read as _, Write as _};
    let spec = Spec::new(&[("worker", 1)]);
    let mut server = spec.serve("worker", 0, &["--health", "127.0.0.1:0"]);
    let line = server.wait_for("answering probes at http://").text;
    let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    let ask = |request: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    for path in ["livez", "readyz", "startupz"] {
        let answer = ask(&format!("GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n"));
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("ok\n"), "{answer}");
    }
    assert!(ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(ask("POST /readyz HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(!ask("nonsense\r\n\r\n").contains("200"));
    // One that says nothing is in nobody's way.
    let _silent = std::net::TcpStream::connect(&address).unwrap();
    assert!(ask("GET /livez HTTP/1.0\r\n\r\n").contains("200 OK"));
    server.signal("TERM");
    assert!(server.wait().success());
    // A replica whose other task has not come yet is live, and not ready.
    let spec = Spec::new(&[("ps", 2)]);
    let first = spec.start("ps", 0, &["--durability", "replicated", "--health", "127.0.0.1:0"]);
    let line = first.wait_for("answering probes at http://").text;
    let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    let ask = |path: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.write_all(format!("GET /{path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(ask("livez").contains("200 OK"));
    assert!(ask("readyz").contains("503") && ask("readyz").contains("fetching its variables"));
    let _second = spec.serve("ps", 1, &["--durability", "replicated"]);
    wait_until("readiness", || ask("readyz").contains("200 OK"));
}
