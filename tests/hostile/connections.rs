//! Clients that connect and say nothing, and clients that vanish.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kolo::tls::Credentials;
use kolo::{Code, Operation, Session};
use kolo_net::grpc::{GrpcMaster, LinkOptions};
use kolo_net::proto::{CreateSessionRequest, ListDevicesRequest};
use kolo_net::services::MasterService as _;
use tokio::runtime::{Builder, Runtime};

use crate::support::{PATIENCE, Process, Spec, one_at_a_time};
use crate::victim::Victim;

#[test]
fn connections_that_do_not_say_what_they_want_are_dropped() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("worker", 1)]);
    let server = spec.serve("worker", 0, &["--first-bytes", "0.5"]);
    let before = server.n_descriptors();
    let beginnings: [&[u8]; 6] =
        [b"", b"K", b"KOLO/1\r", b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"KOLO/1\r\n\xff\xff"];
    let mut silent = Vec::new();
    for i in 0..300 {
        let mut stream = TcpStream::connect(spec.address("worker", 0)).unwrap();
        stream.write_all(beginnings[i % beginnings.len()]).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        silent.push(stream);
    }
    for (i, stream) in silent.iter_mut().enumerate() {
        let mut bytes = Vec::new();
        // Some are told why first.
        match stream.read_to_end(&mut bytes) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            Err(error) => panic!("{:?} is still connected: {error}", beginnings[i % beginnings.len()]),
        }
    }
    let began = Instant::now();
    while server.n_descriptors() > before + 10 {
        assert!(began.elapsed() < PATIENCE, "{} descriptors, {before} before", server.n_descriptors());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(server.lines().len() < 50, "strangers have filled the log:\n{}", server.text());
}

/// As many of `wanted` connections as this process may have open files for; what is missing is said.
fn possible(wanted: usize) -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap_or("1024 1024");
    let most: usize = line.split_whitespace().nth(1).and_then(|hard| hard.parse().ok()).unwrap_or(1024);
    // The servers that this process starts have the same limit.
    let raised = format!("--nofile={most}:{most}");
    let _ = std::process::Command::new("prlimit").args(["--pid", &std::process::id().to_string(), &raised]).status();
    // The rest is for the server's own files, and this process's.
    let n = wanted.min(most.saturating_sub(500));
    if n < wanted {
        println!("NOTE: only {n} of {wanted} connections, since a process may have {most} open files here");
    }
    n
}

/// The median and the 99th percentile of a client's no-ops.
fn latencies(client: &Session, nothing: Operation<'_>, during: Duration) -> (Duration, Duration) {
    let mut all = Vec::new();
    let start = Instant::now();
    while start.elapsed() < during {
        let begun = Instant::now();
        client.run_op(nothing).unwrap();
        all.push(begun.elapsed());
        std::thread::sleep(Duration::from_millis(2));
    }
    all.sort();
    (all[all.len() / 2], all[all.len() * 99 / 100])
}

/// Connections that say nothing, or half of what they must, cost another client nothing to speak of: while they come, while they
/// are there, and while they are dropped.
#[test]
fn silent_connections_leave_the_server_to_another_client() {
    let _turn = one_at_a_time();
    let n = possible(10_000);
    let victim = Victim::new(&["--first-bytes", "8"]);
    let g = kolo::graph();
    let nothing = g.op("NoOp").build();
    let client = victim.connect(&g);
    client.run_op(nothing).unwrap();
    let show = |when: &str, (median, p99): (Duration, Duration)| {
        println!("no-ops {when}: median {median:.1?}, p99 {p99:.1?}");
        // The promise is 20 ms on two idle cores, in a release build.
        assert!(p99 < Duration::from_millis(500), "{when}: p99 is {p99:.1?}");
    };
    show("alone", latencies(&client, nothing, Duration::from_secs(3)));
    let beginnings: [&[u8]; 4] = [b"K", b"", b"KOLO/1\r", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"];
    let before = victim.process.n_descriptors();
    let address = victim.address().to_owned();
    let coming = std::thread::spawn(move || -> Vec<TcpStream> {
        let connect = |i: usize| {
            let mut stream = TcpStream::connect(&address).unwrap();
            stream.write_all(beginnings[i % beginnings.len()]).unwrap();
            stream
        };
        (0..n).map(connect).collect()
    });
    show(&format!("while {n} silent connections come"), latencies(&client, nothing, Duration::from_secs(1)));
    let silent = coming.join().unwrap();
    show(&format!("beside {n} silent connections"), latencies(&client, nothing, Duration::from_secs(4)));
    println!("the server has {} descriptors, {before} before", victim.process.n_descriptors());
    let began = Instant::now();
    while victim.process.n_descriptors() > before + 10 {
        show("while they are dropped", latencies(&client, nothing, Duration::from_secs(1)));
        assert!(began.elapsed() < PATIENCE, "{} descriptors are left", victim.process.n_descriptors());
    }
    drop(silent);
}

struct Client {
    runtime: Runtime,
    master: GrpcMaster,
}

impl Client {
    fn new(spec: &Spec) -> Client {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let options =
            LinkOptions { deadline: Some(PATIENCE), credentials: Credentials::User, ..LinkOptions::default() };
        let master = GrpcMaster::new("server", spec.address("worker", 0), options, runtime.handle().clone());
        Client { runtime, master }
    }

    fn create(&self) -> kolo::Result<String> {
        let created = self.runtime.block_on(self.master.create_session(CreateSessionRequest::default()))?;
        Ok(created.session_handle)
    }

    fn has(&self, session: &str) -> bool {
        let request = ListDevicesRequest { session_handle: session.to_owned() };
        self.runtime.block_on(self.master.list_devices(request)).is_ok()
    }
}

#[test]
fn sessions_of_clients_that_have_vanished_end_and_those_of_idle_ones_do_not() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("worker", 1)]);
    let _server: Process = spec.serve("worker", 0, &["--session-lease", "0.5", "--max-sessions", "3"]);
    let idle = Client::new(&spec);
    let kept = idle.create().unwrap();
    let vanishing = Client::new(&spec);
    let lost = [vanishing.create().unwrap(), vanishing.create().unwrap()];
    assert_eq!(idle.create().unwrap_err().code(), Code::ResourceExhausted);
    // A client that has lost its connection and comes back within the lease finds its session.
    drop(vanishing);
    let back = Client::new(&spec);
    assert!(back.has(&lost[0]));
    let began = Instant::now();
    while idle.create().is_err() {
        assert!(began.elapsed() < PATIENCE, "the session of a client that has vanished is still there");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(!idle.has(&lost[1]));
    assert!(idle.has(&kept), "the session of an idle client has ended");
    assert!(back.has(&lost[0]), "the session of a client that has come back has ended");
}
