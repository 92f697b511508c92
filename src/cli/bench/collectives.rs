//! `collectives`: all-reduces of several sizes between processes of this machine, over shared memory and over TCP.
//!
//! This process is rank 0, which measures. Before each batch of calls it tells the others by a broadcast how many there are and of which
//! size, outside of the measured time.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kolo_runtime::collective::{Algorithm, Communicator, CommunicatorOptions, CostTable, ReduceOp};

use super::measure::{Better, Report, median};
use crate::cli::explain_collectives::print_table;
use crate::cli::print;
use crate::parallel::{cost_file, write_costs};
use crate::ranks::{Coordinator, CoordinatorHost, RankConfig, join};
use crate::tls::{Security, Token, random_token};
use crate::{Error, Result, Tensor};

/// Bytes of the vectors, and what they are called.
const SIZES: [(usize, &str); 7] = [
    (4 << 10, "4KB"),
    (64 << 10, "64KB"),
    (256 << 10, "256KB"),
    (1 << 20, "1MB"),
    (4 << 20, "4MB"),
    (25 << 20, "25MB"),
    (100 << 20, "100MB"),
];

/// Where the token of the group is for the processes that this one starts.
const TOKEN: &str = "KOLO_TOKEN";

/// Flags of `kolo bench collectives`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct CollectiveFlags {
    /// Run `collectives`, `data-parallel` and `ps-vs-ring` between this many processes [default: 2]
    #[arg(long, value_name = "N")]
    pub(super) ranks: Option<usize>,
    /// Run `collectives` over this alone [default: both]
    #[arg(long, value_enum)]
    transport: Option<TransportName>,
    /// Run `collectives` over TCP by this algorithm, and not the one that costs least: whole, direct, ring, halving-doubling, tree.
    /// Sums may then differ in their last bits
    #[arg(long, value_name = "NAME")]
    algorithm: Option<String>,
    /// Measure what messages and shared memory cost on this machine instead of running `collectives`, and keep it in
    /// ~/.kolo/collective-costs, by which groups choose their algorithms; `kolo explain collectives` shows it
    #[arg(long)]
    calibrate: bool,
    #[arg(long, hide = true)]
    pub(super) rank: Option<usize>,
    #[arg(long, hide = true)]
    meet: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TransportName {
    Shared,
    Tcp,
}

impl TransportName {
    fn name(self) -> &'static str {
        match self {
            TransportName::Shared => "shared",
            TransportName::Tcp => "tcp",
        }
    }
}

/// Measures, or is one of the ranks that are measured.
pub fn run(report: &Report, flags: &CollectiveFlags) -> Result<()> {
    let n_ranks = flags.ranks.unwrap_or(2);
    let algorithm = flags.algorithm.as_deref().map(Algorithm::parse).transpose()?;
    if let (Some(rank), Some(meet), Some(transport)) = (flags.rank, &flags.meet, flags.transport) {
        return obey(&mut connect(transport, rank, n_ranks, meet, algorithm)?);
    }
    if flags.calibrate {
        return calibrate(n_ranks);
    }
    let transports = match flags.transport {
        Some(transport) => vec![transport],
        None => vec![TransportName::Shared, TransportName::Tcp],
    };
    transports.into_iter().try_for_each(|transport| measure(report, transport, n_ranks, algorithm))
}

fn measure(report: &Report, transport: TransportName, n_ranks: usize, algorithm: Option<Algorithm>) -> Result<()> {
    let mut group = Ranks::start(transport, n_ranks, algorithm)?;
    for (n_bytes, size) in SIZES {
        let case = format!("{}/{size}", transport.name());
        let seconds = group.sample(n_bytes / 4, report.budget(), report.warm_up())?;
        let micros: Vec<f64> = seconds.iter().map(|seconds| seconds * 1e6).collect();
        report.print("collectives", &case, "us", Better::Lower, &micros)?;
        if !report.is_json() {
            // What a rank of a ring sends: the figure that does not depend on their number.
            let sent = 2.0 * (n_ranks as f64 - 1.0) / n_ranks as f64 * n_bytes as f64;
            print(format_args!("{:12} {:18} {:12.3} GB/s bus", "", "", sent / median(&seconds) / 1e9))?;
        }
    }
    group.stop()
}

/// What messages cost: from all-reduces by two algorithms of which one takes a hop and a message more for each peer, and from how much
/// longer a large one takes. And what shared memory costs, from a small and a large one.
fn calibrate(n_ranks: usize) -> Result<()> {
    if n_ranks < 2 {
        return Err(Error::invalid_argument("--calibrate measures what ranks exchange: --ranks is at least 2"));
    }
    let path = cost_file(&|name| std::env::var(name).ok()).ok_or_else(|| {
        Error::failed_precondition("HOME is no absolute path, so there is nowhere to keep what --calibrate measures")
    })?;
    let (budget, warm_up) = (Duration::from_secs(1), Duration::from_millis(200));
    let time = |transport, algorithm, n| -> Result<f64> {
        let mut group = Ranks::start(transport, n_ranks, algorithm)?;
        let seconds = group.sample(n, budget, warm_up)?;
        group.stop()?;
        Ok(median(&seconds))
    };
    let n_large = 16 << 20;
    let by = |algorithm, n| time(TransportName::Tcp, Some(algorithm), n);
    let (one, two, large) =
        (by(Algorithm::Whole, 2)?, by(Algorithm::Direct, n_ranks)?, by(Algorithm::Direct, n_large)?);
    let in_memory = |n| time(TransportName::Shared, None, n);
    let (memory_small, memory_large) = (in_memory(n_ranks)?, in_memory(n_large)?);
    let others = n_ranks as f64 - 1.0;
    let step = (two - one).max(0.0);
    // Two algorithms tell how long a step takes, and not how it is divided: a hop is taken to be four messages, as in the defaults.
    let message = step / (4.0 + others);
    let bytes = 4.0 * n_large as f64;
    let mut table = CostTable::default();
    for (name, value) in [
        ("base_us", (one - step).max(0.0) * 1e6),
        ("hop_us", (step - message * others) * 1e6),
        ("message_us", message * 1e6),
        ("bytes_per_second", 2.0 * others / n_ranks as f64 * bytes / (large - two).max(1e-9)),
        ("memory_base_us", memory_small * 1e6),
        ("memory_bytes_per_second", bytes / (memory_large - memory_small).max(1e-9)),
    ] {
        table.measure(name, value)?;
    }
    write_costs(&path, &table)?;
    print_table(&table)?;
    print(format_args!("written to {}, from {n_ranks} ranks of this machine", path.display()))
}

/// A group of processes, of which this one is rank 0.
struct Ranks {
    communicator: Communicator,
    children: Vec<Child>,
    /// The file of the group in shared memory.
    file: Option<PathBuf>,
    _coordinator: Option<Coordinator>,
}

impl Ranks {
    fn start(transport: TransportName, n_ranks: usize, algorithm: Option<Algorithm>) -> Result<Ranks> {
        if n_ranks == 0 {
            return Err(Error::invalid_argument("--ranks is at least 1"));
        }
        let token = random_token()?;
        let (mut file, mut coordinator) = (None, None);
        let meet = match transport {
            TransportName::Shared => {
                let path = PathBuf::from(format!("/dev/shm/kolo-bench-{}", std::process::id()));
                let new = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
                let new = new.map_err(|error| Error::resource_exhausted(format!("'{}': {error}", path.display())))?;
                file = Some(path.clone());
                Communicator::create(&new, n_ranks, &options(algorithm))?;
                path.to_string_lossy().into_owned()
            }
            TransportName::Tcp => {
                let loopback = ([127, 0, 0, 1], 0).into();
                let started = coordinator.insert(Coordinator::start(loopback, n_ranks, &security(token.clone()))?);
                started.address().to_string()
            }
        };
        let mut children = Vec::new();
        for rank in 1..n_ranks {
            let program = std::env::current_exe().map_err(|error| Error::internal(error.to_string()))?;
            let mut command = Command::new(program);
            command.args(["bench", "collectives", "--transport", transport.name(), "--meet", &meet]);
            command.args(["--ranks", &n_ranks.to_string(), "--rank", &rank.to_string()]);
            if let Some(algorithm) = algorithm {
                command.args(["--algorithm", algorithm.name()]);
            }
            let spawned = command.env(TOKEN, token.secret()).stdin(Stdio::null()).spawn();
            children.push(spawned.map_err(|error| Error::unavailable(format!("rank {rank} does not start: {error}")))?);
        }
        let communicator = connect_as(transport, 0, n_ranks, &meet, algorithm, token)?;
        Ok(Ranks { communicator, children, file, _coordinator: coordinator })
    }

    /// Seconds for an all-reduce of so many floats, one figure for each of about thirty batches.
    fn sample(&mut self, n: usize, budget: Duration, warm_up: Duration) -> Result<Vec<f64>> {
        let mut vector = ones(n)?;
        let (began, mut n_warm) = (Instant::now(), 0);
        while n_warm == 0 || began.elapsed() < warm_up {
            n_warm += 1;
            self.batch(&mut vector, 1)?;
        }
        let once = self.batch(&mut vector, 1)?;
        let n_calls = ((budget.as_secs_f64() / 30.0 / once.max(1e-7)) as usize).clamp(1, 100_000);
        let (began, mut samples) = (Instant::now(), Vec::new());
        while samples.len() < 5 || began.elapsed() < budget {
            samples.push(self.batch(&mut vector, n_calls)?);
        }
        Ok(samples)
    }

    fn batch(&mut self, vector: &mut Vec<Tensor>, n_calls: usize) -> Result<f64> {
        let n = vector.first().map_or(0, Tensor::n_elements);
        self.communicator.broadcast(vec![Tensor::from([n as i64, n_calls as i64])], 0)?;
        // The broadcast leaves rank 0 first.
        self.communicator.barrier()?;
        let began = Instant::now();
        all_reduce(&mut self.communicator, vector, n_calls)?;
        Ok(began.elapsed().as_secs_f64() / n_calls as f64)
    }

    fn stop(mut self) -> Result<()> {
        self.communicator.broadcast(vec![Tensor::from([0i64, 0])], 0)?;
        for child in &mut self.children {
            let status = child.wait().map_err(|error| Error::internal(error.to_string()))?;
            if !status.success() {
                return Err(Error::aborted(format!("a rank ended with {status}")));
            }
        }
        self.children.clear();
        Ok(())
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Does what rank 0 says, until it says that nothing follows.
fn obey(communicator: &mut Communicator) -> Result<()> {
    let mut vector = Vec::new();
    loop {
        let told = communicator.broadcast(vec![Tensor::from([0i64, 0])], 0)?.remove(0);
        let &[n, n_calls] = told.data::<i64>()? else { return Err(Error::internal("rank 0 said something else")) };
        if n_calls == 0 {
            return Ok(());
        }
        if vector.first().is_none_or(|vector: &Tensor| vector.n_elements() != n as usize) {
            vector = ones(n as usize)?;
        }
        communicator.barrier()?;
        all_reduce(communicator, &mut vector, n_calls as usize)?;
    }
}

fn all_reduce(communicator: &mut Communicator, vector: &mut Vec<Tensor>, n_calls: usize) -> Result<()> {
    for _ in 0..n_calls {
        *vector = communicator.all_reduce(std::mem::take(vector), ReduceOp::Sum)?;
    }
    Ok(())
}

fn ones(n: usize) -> Result<Vec<Tensor>> {
    Ok(vec![Tensor::from_vec([n], vec![1.0f32; n])?])
}

fn options(algorithm: Option<Algorithm>) -> CommunicatorOptions {
    let timeout = Duration::from_secs(60);
    CommunicatorOptions { timeout, algorithm, deterministic: algorithm.is_none(), ..CommunicatorOptions::default() }
}

fn security(token: Token) -> Security {
    Security { token: Some(token), ..Security::default() }
}

fn connect(
    transport: TransportName,
    rank: usize,
    n_ranks: usize,
    meet: &str,
    algorithm: Option<Algorithm>,
) -> Result<Communicator> {
    let token = std::env::var(TOKEN).map_err(|_| Error::failed_precondition("a rank has no token"))?;
    connect_as(transport, rank, n_ranks, meet, algorithm, Token::new(&token)?)
}

fn connect_as(
    transport: TransportName,
    rank: usize,
    n_ranks: usize,
    meet: &str,
    algorithm: Option<Algorithm>,
    token: Token,
) -> Result<Communicator> {
    match transport {
        TransportName::Shared => {
            let file = File::options().read(true).write(true).open(Path::new(meet));
            let file = file.map_err(|error| Error::unavailable(format!("'{meet}': {error}")))?;
            Communicator::join(&file, rank, &options(algorithm))
        }
        TransportName::Tcp => {
            let (host, security) = (CoordinatorHost::Other, security(token));
            let config = RankConfig { host, security, ..RankConfig::new(rank, n_ranks, meet) };
            join(&config, &options(algorithm))
        }
    }
}
