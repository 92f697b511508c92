//! `data-parallel`: training steps of ranks that exchange gradients, on 1, 2, 4, … processes of this machine, one thread each.
//!
//! This process is rank 0, which measures. Before each batch of steps it tells the others by a broadcast how many there are, outside of
//! the measured time. Batches are in memory: what is measured is a step and its exchange, not the reading of data.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use super::collectives::CollectiveFlags;
use super::measure::{Better, Report, median};
use super::networks::{N_BATCHES, batches, lenet_logits, mnist_batches, small_logits};
use crate::data::text::{Corpus, shakespeare};
use crate::optim::{AdamW, Optimizer, Sgd};
use crate::parallel::{DataParallel, RankPlace, World};
use crate::recipes::lm;
use crate::{Callable, Error, Graph, Output, Result, Session, SessionConfig, Tensor, ops};

/// Flags of `kolo bench data-parallel`, with `--ranks`. The hidden ones are of the ranks that it starts.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DataParallelFlags {
    #[arg(long, hide = true)]
    world: Option<PathBuf>,
}

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// The classic network, 784-100-10, batches of 100 that ranks share.
    Mnist,
    /// The same, and each rank has 100 rows of its own.
    MnistEach,
    /// A transformer of four layers, batches of 32 windows that ranks share.
    Lm,
    /// Two convolutions, and each rank has 64 rows of its own.
    LenetEach,
}

impl Work {
    const ALL: [Work; 4] = [Work::Mnist, Work::MnistEach, Work::Lm, Work::LenetEach];

    fn name(self) -> &'static str {
        match self {
            Work::Mnist => "mnist",
            Work::MnistEach => "mnist-each",
            Work::Lm => "lm",
            Work::LenetEach => "lenet-each",
        }
    }

    /// Whether every rank has as many rows, however many ranks there are.
    fn grows(self) -> bool {
        matches!(self, Work::MnistEach | Work::LenetEach)
    }

    /// The rows of a rank.
    fn rows(self, n_ranks: usize) -> Result<usize> {
        let (rows, n) = match self {
            Work::Mnist => (100, n_ranks),
            Work::MnistEach => (100, 1),
            Work::Lm => (32, n_ranks),
            Work::LenetEach => (64, 1),
        };
        match rows / n * n == rows {
            true => Ok(rows / n),
            false => Err(Error::invalid_argument(format!(
                "{} shares batches of {rows}, which {n_ranks} ranks cannot do equally",
                self.name()
            ))),
        }
    }
}

/// Measures, or is one of the ranks that are measured.
pub fn run(report: &Report, flags: &DataParallelFlags, cases: &[String], ranks: &CollectiveFlags) -> Result<()> {
    let most = ranks.ranks.unwrap_or(2);
    if let (Some(rank), Some(world)) = (ranks.rank, &flags.world) {
        let file = File::options().read(true).write(true).open(world);
        let file = file.map_err(|error| Error::unavailable(format!("'{}': {error}", world.display())))?;
        let of_case = |work: &Work| cases.iter().any(|case| case == work.name());
        let work = Work::ALL.into_iter().find(of_case);
        let work = work.ok_or_else(|| Error::invalid_argument("a rank is told one case"))?;
        return RankTraining::new(work, World::join(&file, RankPlace::on_one_host(rank, most))?)?.obey();
    }
    if most == 0 {
        return Err(Error::invalid_argument("--ranks is at least 1"));
    }
    let is_wanted = |work: &Work| cases.is_empty() || cases.iter().any(|case| work.name().starts_with(case.as_str()));
    let wanted: Vec<Work> = Work::ALL.into_iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        let names = Work::ALL.map(Work::name).join(", ");
        return Err(Error::invalid_argument(format!(
            "no case begins with '{}'; there are {names}",
            cases.join("', '")
        )));
    }
    for work in wanted {
        let numbers = (0..usize::BITS).map(|i| 1 << i).take_while(|n| *n < most).chain([most]);
        let mut alone = None;
        for n in numbers {
            if work.rows(n).is_err() && n != most {
                continue;
            }
            let mut ranks = Ranks::start(work, n)?;
            let per_step = if work.grows() { n as f64 } else { 1.0 };
            let rates: Vec<f64> = ranks.sample(report)?.iter().map(|seconds| per_step / seconds).collect();
            ranks.stop()?;
            let unit = if work.grows() { "batches/s" } else { "steps/s" };
            report.print("data-parallel", &format!("{}/{n}", work.name()), unit, Better::Higher, &rates)?;
            let alone = *alone.get_or_insert(median(&rates));
            if n > 1 {
                let times: Vec<f64> = rates.iter().map(|rate| rate / alone).collect();
                report.print("data-parallel", &format!("{}/{n}-of-1", work.name()), "x", Better::Higher, &times)?;
            }
        }
    }
    Ok(())
}

/// Processes that train together, of which this one is rank 0.
struct Ranks {
    training: RankTraining,
    children: Children,
    /// Where they meet: it is there while this is open.
    _world: File,
}

/// Processes that do not outlive this.
#[derive(Default)]
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Ranks {
    fn start(work: Work, n: usize) -> Result<Ranks> {
        let program = std::env::current_exe().map_err(|error| Error::internal(error.to_string()))?;
        let world = World::create(n)?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), world.as_raw_fd());
        let mut children = Children::default();
        for rank in 1..n {
            let mut command = Command::new(&program);
            command.args(["bench", "data-parallel", "--case", work.name(), "--world", &path]);
            command.args(["--ranks", &n.to_string(), "--rank", &rank.to_string()]);
            let spawned = command.stdin(Stdio::null()).spawn();
            children
                .0
                .push(spawned.map_err(|error| Error::unavailable(format!("rank {rank} does not start: {error}")))?);
        }
        let training = RankTraining::new(work, World::join(&world, RankPlace::on_one_host(0, n))?)?;
        Ok(Ranks { training, children, _world: world })
    }

    /// Seconds for a step, one figure for each of about thirty batches of steps.
    fn sample(&mut self, report: &Report) -> Result<Vec<f64>> {
        let (began, mut n_warm) = (Instant::now(), 0);
        while n_warm == 0 || began.elapsed() < report.warm_up() {
            n_warm += 1;
            self.steps(10)?;
        }
        let once = self.steps(10)?;
        let n_steps = ((report.budget().as_secs_f64() / 30.0 / once.max(1e-7)) as usize).clamp(1, 100_000);
        let (began, mut samples) = (Instant::now(), Vec::new());
        while samples.len() < 5 || began.elapsed() < report.budget() {
            samples.push(self.steps(n_steps)?);
        }
        Ok(samples)
    }

    fn steps(&mut self, n: usize) -> Result<f64> {
        self.training.world.broadcast(vec![Tensor::from([n as i64])], 0)?;
        // The broadcast leaves rank 0 first.
        self.training.world.barrier()?;
        let began = Instant::now();
        self.training.steps(n)?;
        Ok(began.elapsed().as_secs_f64() / n as f64)
    }

    fn stop(mut self) -> Result<()> {
        self.training.world.broadcast(vec![Tensor::from([0i64])], 0)?;
        for child in &mut self.children.0 {
            let status = child.wait().map_err(|error| Error::internal(error.to_string()))?;
            if !status.success() {
                return Err(Error::aborted(format!("a rank ended with {status}")));
            }
        }
        self.children.0.clear();
        Ok(())
    }
}

/// What one rank trains.
struct RankTraining {
    world: World,
    step: Callable,
    batches: Vec<Vec<Tensor>>,
    next: usize,
}

impl RankTraining {
    fn new(work: Work, world: World) -> Result<RankTraining> {
        let g = crate::graph();
        g.set_seed(1);
        let corpus = shakespeare()?;
        let (inputs, loss) = match work {
            Work::Lm => language_model(&g, &corpus),
            Work::LenetEach => image_model(&g, lenet_logits),
            Work::Mnist | Work::MnistEach => image_model(&g, small_logits),
        };
        let optimizer: &dyn Optimizer = match work {
            Work::Lm => &AdamW::new(1e-3, 0.01),
            _ => &Sgd::new(0.01),
        };
        let train = optimizer.minimize(loss, None)?;
        let init = g.global_variables_initializer();
        let share = world.broadcast_variables(&g, 0)?;
        // One thread each, whatever the number of ranks: they are compared.
        let mut config = SessionConfig {
            intra_op_parallelism_threads: 1,
            inter_op_parallelism_threads: 1,
            ..SessionConfig::default()
        };
        config.device_count.insert("GPU".to_owned(), 0);
        let config = match world.size() {
            1 => world.configure(config),
            _ => DataParallel::new(&world).configure(config),
        };
        let session = Arc::new(Session::with_config(&g, config)?);
        session.run_op(init)?;
        session.run_op(share)?;
        let step = session.make_callable(&inputs, &[loss], &[train])?;
        let (rank, rows) = (world.rank(), work.rows(world.size())?);
        let batches = match work {
            Work::Lm => windows(&corpus, rank, rows)?,
            // Random images: MNIST has too few of them for 40 batches of every rank.
            Work::LenetEach => pairs(batches(rows)?),
            Work::Mnist | Work::MnistEach => pairs(mnist_batches(rows, rank * N_BATCHES)?),
        };
        Ok(RankTraining { world, step, batches, next: 0 })
    }

    fn steps(&mut self, n: usize) -> Result<()> {
        for _ in 0..n {
            let batch: Vec<&Tensor> = self.batches[self.next % self.batches.len()].iter().collect();
            self.next += 1;
            self.step.call(&batch)?;
        }
        Ok(())
    }

    /// Does what rank 0 says, until it says that nothing follows.
    fn obey(mut self) -> Result<()> {
        loop {
            let told = self.world.broadcast(vec![Tensor::from([0i64])], 0)?.remove(0);
            let &[n] = told.data::<i64>()? else { return Err(Error::internal("rank 0 said something else")) };
            if n == 0 {
                return Ok(());
            }
            self.world.barrier()?;
            self.steps(n as usize)?;
        }
    }
}

type Logits = for<'g> fn(&'g Graph, Output<'g>) -> Output<'g>;

fn image_model(g: &Graph, logits: Logits) -> (Vec<Output<'_>>, Output<'_>) {
    let images = g.placeholder::<f32>("images", [None, Some(784)]);
    let labels = g.placeholder::<f32>("labels", [None, Some(10)]);
    (vec![images, labels], ops::mean_all(ops::softmax_cross_entropy(logits(g, images), labels)))
}

/// That of `train-lm`.
fn language_model<'g>(g: &'g Graph, corpus: &Corpus) -> (Vec<Output<'g>>, Output<'g>) {
    let size = lm::Size { vocabulary: corpus.vocabulary().len(), context: WINDOW, width: 128, layers: 4, heads: 4 };
    let tokens = g.placeholder::<i32>("tokens", [None, Some(size.context)]);
    let next = g.placeholder::<i32>("next", [None, Some(size.context)]);
    (vec![tokens, next], lm::parts(lm::transformer(tokens, &size), next).loss)
}

/// Characters of a window.
const WINDOW: usize = 64;

fn windows(corpus: &Corpus, rank: usize, rows: usize) -> Result<Vec<Vec<Tensor>>> {
    let all = corpus.windows(WINDOW).batch(rows, true).repeat_forever().batches()?;
    all.skip(rank * N_BATCHES).take(N_BATCHES).map(|batch| Ok(batch?.tensors.to_vec())).collect()
}

fn pairs(all: Vec<(Tensor, Tensor)>) -> Vec<Vec<Tensor>> {
    all.into_iter().map(|(x, y)| vec![x, y]).collect()
}
