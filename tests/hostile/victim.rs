//! The server that is attacked: a process of its own, so that a test notices when it hangs or aborts.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kolo::{Connect as _, Graph, Output, Session, SessionConfig, WhileOptions};

use crate::support::{PATIENCE, Process, Spec};

pub struct Victim {
    pub process: Process,
    spec: Spec,
}

impl Victim {
    /// A task that is alone in its cluster, with two threads for nodes, as on a machine of two cores.
    pub fn new(flags: &[&str]) -> Victim {
        let spec = Spec::new(&[("ps", 1)]);
        let flags = [&["--inter-op-threads", "2", "--intra-op-threads", "2"], flags].concat();
        Victim { process: spec.serve("ps", 0, &flags), spec }
    }

    /// The same with the address space limited to so many megabytes, which no machine has to spare.
    pub fn limited(megabytes: u64, flags: &[&str]) -> Victim {
        let spec = Spec::new(&[("ps", 1)]);
        let mut command = std::process::Command::new("sh");
        command.arg("-c").arg(format!("ulimit -v {} && exec \"$@\"", megabytes << 10)).arg("sh");
        command.arg(env!("CARGO_BIN_EXE_kolo")).args(["serve", "--with-parent", "--cluster", &spec.text]);
        command.args(["--job", "ps", "--task", "0", "--inter-op-threads", "2", "--intra-op-threads", "2"]).args(flags);
        let process = Process::spawn("ps:0", command);
        process.wait_for("serving grpc://");
        Victim { process, spec }
    }

    pub fn address(&self) -> &str {
        self.spec.address("ps", 0)
    }

    pub fn connect(&self, graph: &Graph) -> Session {
        connect(self.address(), graph)
    }

    /// The server works for a client that means well. Sessions time out: the server may hang.
    #[track_caller]
    pub fn still_works(&self) {
        let g = kolo::graph();
        let y = g.constant(2.0f32) * 3.0;
        let value = self.connect(&g).fetch(y).unwrap();
        assert_eq!(value.scalar_value::<f32>().unwrap(), 6.0);
    }

    /// The share of one core that the process takes now.
    fn load(&self) -> f64 {
        let ticks = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.pid())).unwrap();
            let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
            // A tick is a hundredth of a second on Linux.
            fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()
        };
        let (before, start) = (ticks(), Instant::now());
        std::thread::sleep(Duration::from_millis(500));
        (ticks() - before) / 100.0 / start.elapsed().as_secs_f64()
    }

    /// Waits until no step keeps the process busy.
    #[track_caller]
    pub fn comes_to_rest(&self) {
        let deadline = Instant::now() + PATIENCE;
        // A loop that goes on gets little where much else runs, so this is not far above what a server does at rest.
        while self.load() > 0.08 {
            assert!(Instant::now() < deadline, "the server still computes");
        }
    }
}

pub fn connect(address: &str, graph: &Graph) -> Session {
    let config = SessionConfig { operation_timeout: Some(PATIENCE), ..SessionConfig::default() };
    Session::connect_with(&format!("grpc://{address}"), graph, config).unwrap()
}

/// A loop that does not end: `body` computes the next value.
pub fn endless<'g>(first: Output<'g>, body: impl FnOnce(Output<'g>) -> Output<'g>) -> Output<'g> {
    let g = first.graph();
    let forever = |g: &'g Graph, _: &[Output<'g>]| g.constant(true);
    let options = WhileOptions { shape_invariants: vec![Some(kolo::PartialShape::unknown())], ..Default::default() };
    g.while_loop(&[first], forever, |_, v| vec![body(v[0])], options).unwrap()[0]
}

/// Passes bytes on to a server until it is cut, which is how a client vanishes.
pub struct Wire {
    pub address: String,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Wire {
    pub fn to(server: &str) -> Wire {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let ends: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let (server, kept) = (server.to_owned(), ends.clone());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(io::Result::ok) {
                let Ok(server) = TcpStream::connect(&server) else { return };
                kept.lock().unwrap().extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                for (mut from, mut to) in [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)]
                {
                    std::thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Wire { address, ends }
    }

    pub fn cut(&self) {
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}
