//! Other users of the machine, who can connect to loopback as everybody can. The attacker is a client without the token;
//! and, where tests run as root, a process of another user.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use kolo::tls::Security;
use kolo::{Code, Connect as _, Error, Session, SessionConfig, Tensor};
use kolo_net::grpc::{GrpcMaster, GrpcPeer, LinkOptions};
use kolo_net::proto::{CreateSessionRequest, KoloReportRequest, ResetRequest};
use kolo_net::services::{MasterService as _, WorkerService as _};

use crate::support::{Folder, PATIENCE, Process, Spec, kolo, one_at_a_time, write_pictures};

/// A user that every system has, and that owns nothing.
const NOBODY: &str = "65534";

/// What another user can present.
fn stranger() -> Security {
    Security { insecure_loopback: true, ..Security::default() }
}

fn connect(target: &str, graph: &kolo::Graph, security: &Security) -> kolo::Result<Session> {
    let config = SessionConfig { operation_timeout: Some(PATIENCE), ..SessionConfig::default() };
    Session::connect_secured(target, graph, config, security)
}

/// The errors of calls without a token, by both transports and of both services.
fn calls_of_a_stranger(address: &str) -> Vec<(&'static str, Error)> {
    let mut errors = Vec::new();
    if let Err(error) = connect(&format!("grpc://{address}"), &kolo::graph(), &stranger()) {
        errors.push(("framed", error));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let options = LinkOptions { deadline: Some(PATIENCE), ..LinkOptions::default() };
    let master = GrpcMaster::new("server", address, options.clone(), runtime.handle().clone());
    let worker = GrpcPeer::new("server", address, options, runtime.handle().clone());
    runtime.block_on(async {
        let created = master.create_session(CreateSessionRequest::default()).await;
        errors.extend(created.err().map(|error| ("CreateSession", error)));
        let reset = master.reset(ResetRequest::default()).await;
        errors.extend(reset.err().map(|error| ("Reset", error)));
        let reported = worker.report(KoloReportRequest::default()).await;
        errors.extend(reported.err().map(|error| ("KoloReport", error)));
    });
    errors
}

#[track_caller]
fn assert_refused(address: &str) {
    let errors = calls_of_a_stranger(address);
    assert_eq!(errors.len(), 4, "a call without a token was answered: {errors:?}");
    for (call, error) in errors {
        assert_eq!(error.code(), Code::Unauthenticated, "{call}: {error}");
        assert!(error.message().contains("--token-file"), "{call}: the remedy is not named: {error}");
    }
}

/// `kolo doctor` as another user, or `None` where that is not possible.
fn doctor_of_nobody(spec: &Spec) -> Option<(bool, String)> {
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    let program = env!("CARGO_BIN_EXE_kolo");
    let as_nobody = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", program]).args(args);
        command.env_remove("TF_CONFIG").env("HOME", "/nonexistent").env_remove("XDG_RUNTIME_DIR").output()
    };
    if !is_root || !as_nobody(&["--version"]).is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no process of another user can be started here (not root, or the program is out of reach)");
        return None;
    }
    let output = as_nobody(&["doctor", "--cluster", &spec.text, "--deadline", "20"]).unwrap();
    Some((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// `kolo doctor` as this user, who has no token at hand.
fn doctor_without_home(spec: &Spec) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(["doctor", "--cluster", &spec.text, "--deadline", "20"]).env_remove("TF_CONFIG");
    let output = command.env("HOME", "/nonexistent").env_remove("XDG_RUNTIME_DIR").output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_server_on_loopback_serves_its_own_user_alone() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
    let ps = spec.serve("ps", 0, &[]);
    let _worker = spec.serve("worker", 0, &[]);
    for (job, task) in [("ps", 0), ("worker", 0)] {
        assert_refused(spec.address(job, task));
    }
    // The same user needs to do nothing: neither as a client, nor as a task, nor as a doctor.
    let g = kolo::graph();
    let sum = g.device("/job:ps/task:0", || g.constant(1.0f32)) + 2.0;
    let session = connect(&spec.target("worker", 0), &g, &Security::default()).unwrap();
    assert_eq!(session.fetch(sum).unwrap().scalar_value::<f32>().unwrap(), 3.0);
    let (is_well, text) = kolo(&["doctor", "--cluster", &spec.text, "--deadline", "20"]);
    assert!(is_well, "{text}");
    // The file is named, and is this user's alone.
    let line = ps.wait_for("to clients with the token in ").text;
    let file = Path::new(line.rsplit_once(" in ").unwrap().1).to_owned();
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(file.parent().unwrap().metadata().unwrap().permissions().mode() & 0o022, 0);
    let (is_well, text) = doctor_without_home(&spec);
    assert!(!is_well && text.contains("wants a token"), "{text}");
    if let Some((is_well, text)) = doctor_of_nobody(&spec) {
        assert!(!is_well && text.contains("wants a token"), "{text}");
    }
}

#[test]
fn a_client_that_sends_no_token_needs_a_word_of_the_server() {
    let _turn = one_at_a_time();
    let open = Spec::new(&[("worker", 1)]);
    let _server = open.serve("worker", 0, &["--insecure-loopback"]);
    assert_eq!(calls_of_a_stranger(open.address("worker", 0)).len(), 0);
    if let Some((is_well, text)) = doctor_of_nobody(&open) {
        assert!(is_well, "{text}");
    }
    if !cfg!(target_os = "linux") {
        eprintln!("skipped: --same-user, which is for Linux");
        return;
    }
    let own = Spec::new(&[("worker", 1)]);
    let _server = own.serve("worker", 0, &["--same-user"]);
    let (is_well, text) = doctor_without_home(&own);
    assert!(is_well, "{text}");
    if let Some((is_well, text)) = doctor_of_nobody(&own) {
        assert!(!is_well && text.contains("wants a token"), "{text}");
    }
}

#[test]
fn graphs_on_loopback_reach_no_file_that_was_not_allowed() {
    let _turn = one_at_a_time();
    let folder = Folder::new("loopback-files");
    std::fs::write(folder.0.join("secret"), "secret").unwrap();
    std::fs::create_dir(folder.0.join("open")).unwrap();
    let spec = Spec::new(&[("worker", 1)]);
    let _server = spec.serve("worker", 0, &["--allow-dir", &folder.path("open")]);
    let g = kolo::graph();
    let text = |text: String| g.constant(Tensor::from_strings([0; 0], vec![text.into()]).unwrap());
    let read = g.op("ReadFile").input(text(folder.path("secret"))).build().output(0);
    let write = g.op("WriteFile").input(text(folder.path("planted"))).input(text("x".to_owned())).build();
    let session = connect(&spec.target("worker", 0), &g, &Security::default()).unwrap();
    for error in [session.fetch(read).map(drop).unwrap_err(), session.run_op(write).unwrap_err()] {
        assert_eq!(error.code(), Code::PermissionDenied, "{error}");
        assert!(error.message().contains("--allow-dir"), "the remedy is not named: {error}");
    }
    assert!(!folder.0.join("planted").exists());
}

#[test]
fn tasks_of_one_command_share_a_token_that_nobody_else_has() {
    let _turn = one_at_a_time();
    let folder = Folder::new("launched");
    write_pictures(&folder.0.join("data"));
    let args = [
        "train",
        "mnist",
        "--data",
        &folder.path("data"),
        "--ps",
        "1",
        "--workers",
        "2",
        "--epochs",
        "100000",
        "--json",
        "--log-every",
        "1",
        "--checkpoint-dir",
        &folder.path("ckpt"),
        "--checkpoint-every",
        "1s",
    ];
    let launcher = Process::start("launcher", &args);
    launcher.wait_for_step(0, |step| step > 1);
    let commands = children(launcher.pid());
    assert_eq!(commands.len(), 3, "{commands:?}");
    let cluster = commands[0].iter().skip_while(|arg| *arg != "--cluster").nth(1).unwrap().clone();
    let addresses: Vec<&str> = cluster.split(';').flat_map(|job| job.split_once('=').unwrap().1.split(',')).collect();
    assert_eq!(addresses.len(), 3);
    for address in addresses {
        assert_refused(address);
        // Not even this user's token: only the tasks know theirs.
        let error = connect(&format!("grpc://{address}"), &kolo::graph(), &Security::default()).err().unwrap();
        assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    }
    assert!(!commands.iter().flatten().any(|arg| arg.contains("token")), "{commands:?}");
    // The chief saves though graphs may touch nothing but this folder.
    let deadline = std::time::Instant::now() + PATIENCE;
    while !folder.0.join("ckpt/checkpoint").is_file() {
        assert!(std::time::Instant::now() < deadline, "no checkpoint:\n{}", launcher.text());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The arguments of a process's children.
fn children(parent: u32) -> Vec<Vec<String>> {
    let listed = Command::new("pgrep").args(["-P", &parent.to_string()]).output().unwrap();
    let pids = String::from_utf8(listed.stdout).unwrap();
    let arguments = |pid: &str| {
        let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        bytes.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect()
    };
    pids.lines().map(arguments).collect()
}

#[test]
fn secrets_are_neither_flags_nor_in_files_that_others_may_read() {
    let folder = Folder::new("secrets");
    let path = folder.0.join("token");
    std::fs::write(&path, "a-secret-of-some-length\n").unwrap();
    let doctor = |args: &[&str]| kolo(&[&["doctor", "--cluster", "ps=127.0.0.1:1"], args].concat());
    let (is_well, text) = doctor(&["--token", "a-secret-of-some-length"]);
    assert!(!is_well && text.contains("--token-file FILE, or set KOLO_TOKEN"), "{text}");
    for (mode, is_refused) in [(0o644, true), (0o640, true), (0o604, true), (0o600, false), (0o400, false)] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let (_, text) = doctor(&["--token-file", &folder.path("token")]);
        assert_eq!(text.contains("can be read by others"), is_refused, "{mode:o}: {text}");
    }
    let (is_well, text) = kolo(&["cert", "init", &folder.path("certs"), "--hosts", "127.0.0.1"]);
    assert!(is_well, "{text}");
    let file = |name: &str| folder.path(&format!("certs/{name}"));
    let (ca, cert, key) = (file("ca.pem"), file("client.pem"), file("client-key.pem"));
    let with_key = || doctor(&["--tls-ca", &ca, "--tls-cert", &cert, "--tls-key", &key]).1;
    assert!(!with_key().contains("can be read by others"));
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(with_key().contains("client-key.pem' can be read by others"), "{}", with_key());
}
