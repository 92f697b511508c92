//! No bytes from outside make anything panic: GraphDef, TensorProto, RunStep, RecvTensor, checkpoint indices, TF_CONFIG.
//!
//! Each target changes inputs that it knows: those of its folder in `tests/fuzz`, which were kept because something new
//! happened with them, and a few valid ones. What leads to an answer that was not seen before is changed further.
//!
//! ```text
//! cargo test -p kolo-net --test fuzz                                         a moment for each
//! KOLO_FUZZ_SECONDS=300 cargo test --release -p kolo-net --test fuzz         five minutes for each
//! KOLO_FUZZ_KEEP=1 ..                                                        also keeps what was new
//! ```
//!
//! On 2026-11-15 five minutes of each ran clean, with overflow checks (no `--release`) and beside other work: GraphDef 650,000
//! inputs, TensorProto 2,760,000, RunStep 570,000, RecvTensor 1,150,000, TF_CONFIG 5,780,000, checkpoint indices 555,000, their
//! entries 367,000.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Error, Result, Tensor};
use kolo_graph::wire::graph::{ImportOptions, import};
use kolo_net::grpc::{GrpcMaster, GrpcPeer, LinkOptions};
use kolo_net::services::{MasterService as _, WorkerService as _};
use kolo_net::tensor_wire::WireTensor;
use kolo_net::tls::Security;
use kolo_net::{ClusterSpec, Server, ServerConfig, TfConfig, proto};
use prost::Message as _;

/// Inputs that are tried when nobody says how long.
const N_TRIES: usize = 1500;

/// The longest input.
const MOST: usize = 16 << 10;

/// Panics of any thread of this process: a server's are not seen by whoever calls it.
static N_PANICS: AtomicUsize = AtomicUsize::new(0);

#[test]
fn graphs() {
    let seeds = files("../kolo-graph/tests/data", "pb");
    fuzz("graph_def", seeds, |bytes| {
        let def = kolo_graph::wire::proto::GraphDef::decode(bytes).map_err(unreadable)?;
        let graph = kolo_ops::graph();
        import(&graph, &def, ImportOptions::default()).map(drop)
    });
}

#[test]
fn tensors() {
    let tensors = [
        Tensor::scalar(1.5f32),
        Tensor::from_vec([2, 3], vec![1i64, 2, 3, 4, 5, 6]).unwrap(),
        Tensor::from_strings([2], vec!["a".into(), "bcd".into()]).unwrap(),
    ];
    let seeds = tensors.map(|tensor| WireTensor::new(tensor).unwrap().encode_to_vec()).to_vec();
    fuzz("tensor_proto", seeds, |bytes| {
        let tensor = WireTensor::decode(bytes).map_err(unreadable)?.into_tensor()?;
        tensor.host_bytes().map(drop).or_else(|_| tensor.strings().map(drop))
    });
}

#[test]
fn steps() {
    let cluster = Cluster::new();
    let handle = cluster.session();
    let named = |name: &str, value: f32| proto::NamedTensorProto {
        name: name.to_owned(),
        tensor: Some(WireTensor::new(Tensor::scalar(value)).unwrap()),
    };
    let request = proto::RunStepRequest {
        feed: vec![named("x", 2.0)],
        fetch: vec!["y:0".to_owned()],
        target: vec!["y".to_owned()],
        options: Some(proto::RunOptions { trace_level: 1, ..Default::default() }),
        ..Default::default()
    };
    fuzz("run_step", vec![request.encode_to_vec()], |bytes| {
        let mut request = proto::RunStepRequest::decode(bytes).map_err(unreadable)?;
        request.session_handle.clone_from(&handle);
        cluster.wait(cluster.master.run_step(request)).map(drop)
    });
}

#[test]
fn questions_for_tensors() {
    let cluster = Cluster::new();
    let incarnation = cluster.incarnation();
    let device = "/job:worker/replica:0/task:0/device:CPU:0";
    let request = proto::RecvTensorRequest {
        step_id: 1,
        rendezvous_key: format!("{device};{incarnation:016x};{device};edge_1_x;0:0"),
        ..Default::default()
    };
    let response = proto::RecvTensorResponse {
        tensor: Some(WireTensor::new(Tensor::from_vec([4], vec![1.0f32; 4]).unwrap()).unwrap()),
        ..Default::default()
    };
    fuzz("recv_tensor", vec![request.encode_to_vec(), response.encode_to_vec()], |bytes| {
        // Either side of the call.
        let answered = proto::RecvTensorResponse::decode(bytes)
            .map_err(unreadable)
            .and_then(|response| response.tensor.map(WireTensor::into_tensor).transpose().map(drop));
        let Ok(mut request) = proto::RecvTensorRequest::decode(bytes) else { return answered };
        request.request_id = 0;
        let peer = cluster.worker.with_deadline(Some(Duration::from_millis(5)));
        cluster.wait(peer.recv_tensor(request)).map(drop).and(answered)
    });
}

#[test]
fn checkpoint_indices() {
    let mut seeds = files("../../tests/data/functions/saved_v1/variables", "index");
    seeds.extend(files("../../tests/data/functions/saved_v2/variables", "index"));
    let folder = new_folder("index");
    let prefix = folder.join("c").to_string_lossy().into_owned();
    fuzz("checkpoint_index", seeds, |bytes| {
        std::fs::write(format!("{prefix}.index"), bytes).unwrap();
        read_bundle(&prefix).map_err(without(&prefix))
    });
    std::fs::remove_dir_all(&folder).unwrap();
}

/// In memory if there is such a place: a disk takes a hundred times as long.
fn new_folder(name: &str) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let folder = parent.join(format!("fuzz-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn read_bundle(prefix: &str) -> Result<()> {
    let mut bundle = kolo_ops::io::bundle::Bundle::open(prefix)?;
    let names: Vec<String> = bundle.names().take(20).map(str::to_owned).collect();
    let read = names.iter().map(|name| bundle.read(name).map(drop)).collect::<Vec<_>>();
    bundle.check_files().and(read.into_iter().collect())
}

/// An index is protected by checksums, which keep what was changed from being looked at. This one is changed before they are made.
#[test]
fn checkpoint_entries() {
    let indices = ["saved_v1", "saved_v2"].map(|name| format!("../../tests/data/functions/{name}/variables"));
    let seeds = indices.iter().flat_map(|folder| files(folder, "index")).map(|index| first_block(&index)).collect();
    let folder = new_folder("entries");
    let prefix = folder.join("c").to_string_lossy().into_owned();
    std::fs::write(format!("{prefix}.data-00000-of-00001"), [0; 400]).unwrap();
    fuzz("checkpoint_entries", seeds, |bytes| {
        std::fs::write(format!("{prefix}.index"), index_of(bytes)).unwrap();
        read_bundle(&prefix).map_err(without(&prefix))
    });
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The entries of a small index: what is before the trailer of its first block, which the block behind it points to.
fn first_block(index: &[u8]) -> Vec<u8> {
    let footer = &index[index.len() - 48..];
    let numbers: Vec<usize> = varints(footer, 4);
    let pointers = &index[numbers[2]..][..numbers[3]];
    // One entry: nothing shared, the lengths of a key and of its value, which is where the block is.
    let lengths = varints(pointers, 3);
    let place = varints(&pointers[3 + lengths[1]..], 2);
    index[place[0]..][..place[1]].to_vec()
}

fn varints(mut bytes: &[u8], n: usize) -> Vec<usize> {
    (0..n).map(|_| prost::encoding::decode_varint(&mut bytes).unwrap() as usize).collect()
}

/// An index with these entries.
fn index_of(block: &[u8]) -> Vec<u8> {
    fn add(file: &mut Vec<u8>, block: &[u8]) -> Vec<u8> {
        let mut place = Vec::new();
        prost::encoding::encode_varint(file.len() as u64, &mut place);
        prost::encoding::encode_varint(block.len() as u64, &mut place);
        // Not compressed.
        let block = [block, &[0]].concat();
        let masked = crc32c::crc32c(&block).rotate_right(15).wrapping_add(0xa282_ead8);
        file.extend(block);
        file.extend(masked.to_le_bytes());
        place
    }
    let restarts = [0u32.to_le_bytes(), 1u32.to_le_bytes()].concat();
    let mut file = Vec::new();
    let place = add(&mut file, block);
    let nothing = add(&mut file, &restarts);
    let pointers = [&[0, 1, place.len() as u8, 0xff][..], &place, &restarts].concat();
    let mut footer = [nothing, add(&mut file, &pointers)].concat();
    footer.resize(40, 0);
    footer.extend(0xdb47_7524_8b80_fb57u64.to_le_bytes());
    file.extend(footer);
    file
}

#[test]
fn tf_config() {
    let seed = br#"{"cluster": {"ps": ["a:1"], "worker": ["b:2", "c:3"]}, "task": {"type": "worker", "index": "1"}}"#;
    fuzz("tf_config", vec![seed.to_vec()], |bytes| TfConfig::parse(&String::from_utf8_lossy(bytes)).map(drop));
}

/// An error without the name of a file, which would hide what is wrong with it.
fn without(prefix: &str) -> impl Fn(Error) -> Error {
    move |error| Error::new(error.code(), error.message().replace(prefix, ""))
}

fn unreadable(error: prost::DecodeError) -> Error {
    Error::invalid_argument(error.to_string())
}

/// A server with one session, and how it is called.
struct Cluster {
    runtime: tokio::runtime::Runtime,
    master: GrpcMaster,
    worker: GrpcPeer,
    _server: Server,
}

impl Cluster {
    fn new() -> Cluster {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let cluster = ClusterSpec::from_lists([("worker", vec![address.clone()])]).unwrap();
        let security = Security { insecure_loopback: true, ..Security::default() };
        let open = ServerConfig { security, ..ServerConfig::default() };
        let server = Server::on(listener, &cluster, "worker", 0, open).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let options = LinkOptions { deadline: Some(Duration::from_secs(20)), ..LinkOptions::default() };
        let handle = runtime.handle().clone();
        let master = GrpcMaster::new("server", address.clone(), options.clone(), handle.clone());
        let worker = GrpcPeer::new("server", address, options, handle);
        Cluster { runtime, master, worker, _server: server }
    }

    fn wait<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        self.runtime.block_on(call)
    }

    /// A session whose graph is `y = x + 1`.
    fn session(&self) -> String {
        let graph = kolo_ops::graph();
        let x = graph.placeholder::<f32>("x", kolo_core::PartialShape::unknown());
        let _ = graph.op("AddV2").name("y").input(x).input(graph.constant(1.0f32)).build();
        let def = kolo_graph::wire::graph::export(&graph.snapshot(), Default::default()).unwrap();
        let request = proto::CreateSessionRequest { graph_def: Some(def), ..Default::default() };
        self.wait(self.master.create_session(request)).unwrap().session_handle
    }

    fn incarnation(&self) -> u64 {
        self.wait(self.worker.get_status(proto::GetStatusRequest {})).unwrap().device_attributes[0].incarnation
    }
}

/// All files of a folder beside this crate whose names end so.
fn files(folder: &str, ending: &str) -> Vec<Vec<u8>> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == ending));
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Tries changed inputs until time or tries are up. A panic fails the test, and its input is kept.
fn fuzz(name: &str, seeds: Vec<Vec<u8>>, target: impl Fn(&[u8]) -> Result<()>) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    static HOOK: std::sync::Once = std::sync::Once::new();
    HOOK.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            N_PANICS.fetch_add(1, Ordering::SeqCst);
            default(info);
        }));
    });
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz").join(name);
    let seconds = std::env::var("KOLO_FUZZ_SECONDS").ok().and_then(|text| text.parse::<u64>().ok());
    let keeps = std::env::var_os("KOLO_FUZZ_KEEP").is_some();
    let began = Instant::now();
    let is_enough = |n: usize| match seconds {
        Some(seconds) => began.elapsed() >= Duration::from_secs(seconds),
        None => n >= N_TRIES,
    };
    let mut random =
        Random(seconds.map_or(1, |_| began.elapsed().as_nanos() as u64 ^ u64::from(std::process::id())) | 1);
    let mut pool: Vec<Vec<u8>> = seeds;
    if folder.is_dir() {
        pool.extend(files(&format!("tests/fuzz/{name}"), "bin"));
    }
    let (n_known, mut seen) = (pool.len(), HashSet::new());
    let mut n = 0;
    while n < n_known || !is_enough(n) {
        let input = if n < n_known { pool[n].clone() } else { random.changed(&pool) };
        n += 1;
        let before = N_PANICS.load(Ordering::SeqCst);
        let answer = catch_unwind(AssertUnwindSafe(|| target(&input)));
        let path = folder.join(format!("{:08x}.bin", crc32c::crc32c(&input)));
        if answer.is_err() || N_PANICS.load(Ordering::SeqCst) > before {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &input).unwrap();
            panic!("{name} panics; the input is in {}", path.display());
        }
        // Where the answer is from, as far as its text tells: numbers and names differ without being news.
        let kind: String = match answer.unwrap() {
            Ok(()) => "ok".to_owned(),
            Err(error) => error.message().chars().filter(|c| c.is_ascii_lowercase() || *c == ' ').take(40).collect(),
        };
        if seen.insert(kind) && n > n_known && seen.len() < 500 {
            if keeps {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&path, &input).unwrap();
            }
            pool.push(input);
        }
    }
    println!("{name}: {n} inputs, {} kinds of answers, in {:.1} s", seen.len(), began.elapsed().as_secs_f64());
}

/// Numbers that come again when the test does.
struct Random(u64);

impl Random {
    fn next(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n.max(1)
    }

    /// One of the inputs, changed in a few places.
    fn changed(&mut self, pool: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = pool[self.next(pool.len())].clone();
        for _ in 0..=self.next(4) {
            let at = self.next(bytes.len() + 1);
            let end = (at + self.next(16)).min(bytes.len());
            match self.next(8) {
                0 => bytes.truncate(at),
                1 => drop(bytes.drain(at..end)),
                2 => bytes.insert(at, self.next(256) as u8),
                3 => {
                    let piece = bytes[at..end].to_vec();
                    bytes.splice(at..at, piece);
                }
                4 => {
                    let other = &pool[self.next(pool.len())];
                    let from = self.next(other.len() + 1);
                    let piece = other[from..(from + self.next(64)).min(other.len())].to_vec();
                    bytes.splice(at..end, piece);
                }
                5 => {
                    const EXTREMES: [u64; 6] = [0, 1, 0x7f, u32::MAX as u64, i64::MAX as u64, u64::MAX];
                    let mut number = Vec::new();
                    prost::encoding::encode_varint(EXTREMES[self.next(EXTREMES.len())], &mut number);
                    bytes.splice(at..end, number);
                }
                _ if at < bytes.len() => bytes[at] ^= 1 << self.next(8),
                _ => {}
            }
        }
        bytes.truncate(MOST);
        bytes
    }
}
