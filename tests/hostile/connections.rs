//! Clients that connect and say nothing, and clients that vanish.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kolo::Code;
use kolo::tls::Credentials;
use kolo_net::grpc::{GrpcMaster, LinkOptions};
use kolo_net::proto::{CreateSessionRequest, ListDevicesRequest};
use kolo_net::services::MasterService as _;
use tokio::runtime::{Builder, Runtime};

use crate::support::{PATIENCE, Process, Spec, one_at_a_time};

#[test]
fn connections_that_do_not_say_what_they_want_are_dropped() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("worker", 1)]);
    let server = spec.serve("worker", 0, &["--first-bytes", "0.5"]);
    let before = server.n_descriptors();
    let beginnings: [&[u8]; 6] = [b"", b"K", b"KOLO/1\r", b"P", b"PRI * HTTP/2.0\r\n\r\n", b"KOLO/1\r\n\xff\xff"];
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
