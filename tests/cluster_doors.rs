//! Who gets into a cluster, what they may touch there, and how its operator learns what is wrong.
#![allow(clippy::unwrap_used)]

mod support;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use kolo::tls::{Security, TlsFiles, Token};
use kolo::{Code, Connect as _, Result, Session, SessionConfig, Tensor};
use support::{Folder, Process, Spec, kolo, one_at_a_time};

fn connect(target: &str, security: &Security) -> Result<Session> {
    let config = SessionConfig { operation_timeout: Some(support::PATIENCE), ..SessionConfig::default() };
    Session::connect_secured(target, &kolo::graph(), config, security)
}

#[test]
fn an_address_that_others_can_reach_needs_a_lock() {
    let (is_well, text) = kolo(&["serve", "--cluster", "ps=0.0.0.0:0", "--job", "ps"]);
    assert!(!is_well);
    for part in ["FailedPrecondition", "--tls-ca", "--token", "--insecure", "kolo cert init"] {
        assert!(text.contains(part), "{part} is missing in:\n{text}");
    }
    let folder = Folder::new("short-token");
    std::fs::write(folder.0.join("token"), "short").unwrap();
    std::fs::set_permissions(folder.0.join("token"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let args = ["serve", "--cluster", "ps=0.0.0.0:0", "--job", "ps", "--token-file", &folder.path("token")];
    let (is_well, text) = kolo(&args);
    assert!(!is_well && text.contains("at least 16"), "{text}");
    let (is_well, text) = kolo(&["serve", "--cluster", "ps=127.0.0.1:0", "--job", "ps", "--tls-ca", "x"]);
    assert!(!is_well && text.contains("--tls-cert and --tls-key is not given"), "{text}");
}

#[test]
fn with_certificates_only_their_owners_get_in() {
    let _turn = one_at_a_time();
    let folder = Folder::new("certificates");
    let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
    let host = spec.address("ps", 0).split(':').next().unwrap().to_owned();
    let dir = folder.path("certs");
    let (is_well, text) = kolo(&["cert", "init", &dir, "--hosts", &format!("{host}+localhost")]);
    assert!(is_well && text.contains("ca-key.pem") && text.contains("for clients"), "{text}");
    // What is there is not overwritten; more machines can be added.
    let (is_well, text) = kolo(&["cert", "init", &dir, "--hosts", "elsewhere"]);
    assert!(!is_well && text.contains("exists already"), "{text}");
    let (is_well, text) = kolo(&["cert", "add", &dir, "--hosts", "elsewhere"]);
    assert!(is_well && text.contains("elsewhere.pem"), "{text}");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let key = std::fs::metadata(folder.0.join("certs/client-key.pem")).unwrap();
        assert_eq!(key.permissions().mode() & 0o077, 0, "a key is for its owner alone");
    }

    let file = |name: &str| folder.path(&format!("certs/{name}.pem"));
    let (ca, cert, key) = (file("ca"), file(&host), file(&format!("{host}-key")));
    let flags = ["--tls-ca", &ca, "--tls-cert", &cert, "--tls-key", &key];
    let _ps = spec.serve("ps", 0, &flags);
    let _worker = spec.serve("worker", 0, &flags);
    let read =
        |ca: &str, cert: &str, key: &str| TlsFiles::read(Path::new(ca), Path::new(cert), Path::new(key)).unwrap();
    let client = Security { tls: Some(read(&ca, &file("client"), &file("client-key"))), ..Security::default() };
    let session = connect(&spec.target("worker", 0), &client).unwrap();
    assert_eq!(session.list_devices().len(), 2);

    // Without a certificate, and with one of another authority.
    let config =
        SessionConfig { operation_timeout: Some(std::time::Duration::from_secs(2)), ..SessionConfig::default() };
    let strangers = folder.path("strangers");
    assert!(kolo(&["cert", "init", &strangers, "--hosts", &host]).0);
    let other = |name: &str| folder.path(&format!("strangers/{name}.pem"));
    let stranger = Security { tls: Some(read(&ca, &other("client"), &other("client-key"))), ..Security::default() };
    for security in [&Security::default(), &stranger] {
        let refused = Session::connect_secured(&spec.target("worker", 0), &kolo::graph(), config.clone(), security);
        let error = refused.err().unwrap();
        match security.tls {
            None => assert!([Code::Unavailable, Code::DeadlineExceeded].contains(&error.code()), "{error}"),
            Some(_) => assert_eq!(error.code(), Code::Unauthenticated, "{error}"),
        }
    }
    let (client_cert, client_key) = (file("client"), file("client-key"));
    let doctor = ["doctor", "--cluster", &spec.text, "--deadline", "5"];
    let (is_well, text) =
        kolo(&[&doctor[..], &["--tls-ca", &ca, "--tls-cert", &client_cert, "--tls-key", &client_key]].concat());
    assert!(is_well && text.contains("Nothing is stuck"), "{text}");
    let (is_well, text) = kolo(&doctor);
    assert!(!is_well && !text.contains("alive"), "{text}");
}

#[test]
fn with_a_token_only_those_who_know_it_get_in() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("ps", 1), ("worker", 1)]);
    let token = "a-secret-of-this-test";
    let folder = Folder::new("token");
    std::fs::write(folder.0.join("token"), format!("{token}\n")).unwrap();
    std::fs::set_permissions(folder.0.join("token"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let _ps = spec.serve("ps", 0, &["--token-file", &folder.path("token")]);
    let args = ["serve", "--with-parent", "--cluster", &spec.text, "--job", "worker"];
    let worker = Process::start_with("worker", &args, &[("KOLO_TOKEN", token)]);
    worker.wait_for("serving grpc://");
    let friend = Security { token: Some(Token::new(token).unwrap()), ..Security::default() };
    assert_eq!(connect(&spec.target("worker", 0), &friend).unwrap().list_devices().len(), 2);
    let wrong = Security { token: Some(Token::new("another-secret-here").unwrap()), ..Security::default() };
    for stranger in [&Security::default(), &wrong] {
        let error = connect(&spec.target("worker", 0), stranger).err().unwrap();
        assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    }
    assert!(!worker.text().contains(token), "secrets are not for logs");
}

#[test]
fn graphs_touch_only_the_directories_that_were_allowed_and_sessions_are_counted() {
    let _turn = one_at_a_time();
    let folder = Folder::new("allowed");
    std::fs::create_dir_all(folder.0.join("in")).unwrap();
    let spec = Spec::new(&[("worker", 1)]);
    let _worker = spec.serve("worker", 0, &["--allow-dir", &folder.path("in"), "--max-sessions", "1"]);
    let g = kolo::graph();
    let text = |text: String| g.constant(Tensor::from_strings([0; 0], vec![text.into()]).unwrap());
    let contents = text("contents".to_owned());
    let write = |name: &str| g.op("WriteFile").input(text(folder.path(name))).input(contents).build();
    let (inside, outside, climbing) = (write("in/file"), write("out"), write("in/../out"));
    let session = Session::connect(&spec.target("worker", 0), &g).unwrap();
    session.run_op(inside).unwrap();
    for refused in [outside, climbing] {
        let error = session.run_op(refused).unwrap_err();
        assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    }
    assert!(folder.0.join("in/file").is_file() && !folder.0.join("out").exists());
    let error = connect(&spec.target("worker", 0), &Security::default()).err().unwrap();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    drop(session);
    connect(&spec.target("worker", 0), &Security::default()).unwrap();
}

#[test]
fn a_cluster_is_explained_in_words() {
    let config = |value: &str, args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
        let output = command.args(["config", "check"]).args(args).env("TF_CONFIG", value).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    let good =
        r#"{"cluster": {"ps": ["a:1"], "worker": ["b:1", "localhost:1"]}, "task": {"type": "worker", "index": "1"}}"#;
    let text = config(good, &[]);
    for part in [
        "TF_CONFIG is well formed: 3 tasks in 2 jobs",
        "worker:0  b:1          chief",
        "This process is worker:1",
        "some addresses are of this machine only",
    ] {
        assert!(text.contains(part), "'{part}' is missing in:\n{text}");
    }
    let text = config(good, &["--json"]);
    assert!(text.contains(r#""own":{"job":"worker","task":1}"#), "{text}");
    // The comma between two hosts is missing.
    let text = config(r#"{"cluster": {"ps": ["a:1b:1"]}, "task": {"type": "ps", "index": 0}}"#, &[]);
    assert!(text.contains("kolo: InvalidArgument") && text.contains("a:1b:1"), "{text}");
    let text = config(r#"{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 3}}"#, &[]);
    assert!(text.contains("it has task 0"), "{text}");
    assert!(config("{}", &[]).contains("works alone"));
}
