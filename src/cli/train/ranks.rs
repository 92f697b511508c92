//! Training by all-reduce: one command starts all ranks of this machine, each a process with a copy of the model. A process that
//! another launcher has started as a rank meets the others over TCP (`torchrun`, on several machines) or MPI (`mpirun`).
//!
//! Ranks meet in a file in memory that the launcher keeps open. With `--elastic` a rank that dies is started again: the launcher
//! closes the world that it was in, which ends what the others wait for, makes another one, and tells them on their standard
//! input where it is. The new rank gets its state from the others.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use crate::parallel::{DataParallel, Exchange, OuterStep, RankPlace, World};
use crate::place::Place;
use crate::{Error, Result};

use super::child::{Process, Said, own_flags, start, start_with_own_output};
use super::job::stop_on_ctrl_c;
use crate::cli::place::own_place;
use crate::cli::security::ServerSecurityFlags;

/// Where the ranks of a launched training find each other.
const WORLD_VARIABLE: &str = "KOLO_WORLD";

/// Set for a rank that takes the place of one that died.
const REPLACES_VARIABLE: &str = "KOLO_REPLACES_RANK";

/// When one rank has failed, the others learn of it by themselves, and say what they know.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// How long a rank that lost others waits to be told where they meet again.
const INVITATION: Duration = Duration::from_secs(20);

/// So often a rank is started again, unless the training went well for a while in between.
const MAX_RESTARTS: u32 = 5;
const WELL_AFTER: Duration = Duration::from_secs(60);

/// So many worlds are kept open: a rank that starts takes a moment to open its own.
const MOST_WORLDS: usize = 8;

/// The exit codes of a rank that could not go on, and said why: it would only repeat it.
const OWN_ERRORS: [i32; 2] = [1, 2];

/// Flags about ranks.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RankFlags {
    /// Train with this many processes on this machine, each with an equal share of every batch; they exchange gradients among
    /// themselves, without parameter servers
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub ranks: Option<usize>,
    /// Start a rank again that dies, while the others go on: it gets its state from them, and no step is lost
    #[arg(long, help_heading = "Ranks")]
    pub elastic: bool,
    /// Cut every batch into this many parts, which ranks compute one after the other: the same parts give the same weights,
    /// bit for bit, on 1, 2, 4 or 8 ranks [default: one part for each rank and device]
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub micro_batches: Option<usize>,
    /// Compare the weights of all ranks every this many steps, and at the end; 0 compares at the end only [default: 1000]
    #[arg(long, value_name = "STEPS", help_heading = "Ranks")]
    pub check_weights_every: Option<u64>,
    /// Normalise batches by the mean and variance of all ranks' shares, not of each rank's own: for small shares
    #[arg(long, help_heading = "Ranks")]
    pub sync_batch_norm: bool,
    /// Exchange gradients in this way: whole, bf16, f16, top-k:0.01, power-sgd:4 or 1-bit-adam:200; what is smaller than whole is not
    /// exact, and pays where the link between ranks is slow [default: whole]
    #[arg(long, value_name = "HOW", help_heading = "Ranks")]
    pub exchange: Option<Exchange>,
    /// Train without exchanging gradients, and average the weights of all ranks every this many steps
    #[arg(long, value_name = "STEPS", help_heading = "Ranks")]
    pub local_steps: Option<u64>,
    /// With --local-steps, move the weights by an outer optimizer of this rate and Nesterov momentum, such as 0.7:0.9
    #[arg(long, value_name = "RATE[:MOMENTUM]", help_heading = "Ranks")]
    pub outer: Option<OuterStep>,
}

impl RankFlags {
    /// What the flags say about how ranks train together.
    pub fn data_parallel(&self, world: &World) -> DataParallel {
        let mut data_parallel = DataParallel::new(world);
        if self.elastic {
            data_parallel = data_parallel.atomic_updates();
        }
        if self.sync_batch_norm {
            data_parallel = data_parallel.synchronised_batch_norm();
        }
        if let Some(exchange) = self.exchange {
            data_parallel = data_parallel.exchange(exchange);
        }
        match (self.local_steps, self.outer) {
            (Some(n), Some(outer)) => data_parallel.outer_steps(n, outer),
            (Some(n), None) => data_parallel.local_steps(n),
            (None, _) => data_parallel,
        }
    }

    /// The world of this process, if a launcher has started it as a rank. Ranks that meet over TCP authenticate each other so.
    pub fn world(&self, security: &ServerSecurityFlags) -> Result<Option<World>> {
        match own_place()?.place {
            Place::Rank(_) => World::from_env_secured(&security.read()?).map(Some),
            Place::Alone | Place::Task(_) => Ok(None),
        }
    }

    /// Whether this process takes the place of a rank that died.
    pub fn replaces_a_rank(&self) -> bool {
        std::env::var_os(REPLACES_VARIABLE).is_some()
    }
}

/// Waits to be told where the ranks meet again, and joins them there. `None` if nobody says so in time.
pub fn next_world(lines: &Receiver<String>) -> Option<World> {
    let deadline = Instant::now() + INVITATION;
    loop {
        let line = lines.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?;
        // The last word counts: another rank may have died in the meantime.
        let line = lines.try_iter().last().unwrap_or(line);
        match join_invited(&line) {
            Ok(world) => return Some(world),
            Err(error) => tracing::warn!(target: "kolo::train", "cannot join the ranks at '{line}': {error}"),
        }
    }
}

/// `world PATH RANK SIZE`.
fn invitation(world: &File, rank: usize, size: usize) -> String {
    format!("world {} {rank} {size}", path_of(world))
}

fn join_invited(line: &str) -> Result<World> {
    let wrong = || Error::internal("this is no invitation");
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["world", path, rank, size] = words[..] else { return Err(wrong()) };
    let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
    World::join_at(Path::new(path), RankPlace::on_one_host(number(rank)?, number(size)?))
}

/// A file that this process keeps open, for the processes that it has started.
fn path_of(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// Starts `n` ranks with the flags of this process, and waits for them. Rank 0 has this process's terminal; the others speak up if
/// something is wrong.
pub fn launch(flags: &RankFlags, n: usize) -> Result<()> {
    let stop = stop_on_ctrl_c();
    let (sender, said) = mpsc::channel();
    let mut launcher =
        Launcher { worlds: vec![World::create(n)?], ranks: Vec::with_capacity(n), sender, is_over: false };
    for rank in 0..n {
        let process = launcher.start(rank, n, false)?;
        let started = Instant::now();
        launcher.ranks.push(Rank { process, started, n_deaths: 0, has_state: false, is_new: false, ending: None });
    }
    let mut give_up = None;
    while !launcher.is_done() && give_up.is_none_or(|at| Instant::now() < at) {
        if let Ok(said) = said.recv_timeout(Duration::from_millis(20)) {
            show(&said);
        }
        let is_stopping = stop.load(Ordering::Relaxed);
        if is_stopping {
            launcher.ranks.iter_mut().for_each(|rank| rank.process.ask_to_end());
        }
        for dead in launcher.look()? {
            let goes_on = flags.elastic && !is_stopping && give_up.is_none() && launcher.may_replace(&dead)?;
            match goes_on {
                true => launcher.replace(&dead)?,
                false => give_up = give_up.or(Some(Instant::now() + LAST_WORDS)),
            }
        }
    }
    let cause = launcher.cause();
    // All at once, and not each after the one before.
    launcher.ranks.iter_mut().for_each(|rank| rank.process.ask_to_end());
    drop(launcher);
    said.try_iter().for_each(|said| show(&said));
    match cause {
        Some((rank, status)) => Err(Error::aborted(format!("rank {rank} of {n} failed: {status}"))),
        None => Ok(()),
    }
}

/// All ranks, and where they meet.
struct Launcher {
    /// Where they meet now, after where they met before: a rank that was started for one of these may open it late, and has to
    /// learn that it is closed.
    worlds: Vec<File>,
    ranks: Vec<Rank>,
    sender: Sender<Said>,
    /// The training has ended without the newest ranks.
    is_over: bool,
}

struct Rank {
    process: Process,
    started: Instant,
    /// How often it has died since it last worked for a while.
    n_deaths: u32,
    /// It was in a world that all had joined, so it knows what was trained there.
    has_state: bool,
    /// It has taken the place of another one, in a world that not all have joined.
    is_new: bool,
    ending: Option<ExitStatus>,
}

/// A rank that has failed.
struct Death {
    rank: usize,
    status: ExitStatus,
}

impl Launcher {
    fn world(&self) -> Result<&File> {
        self.worlds.last().ok_or_else(|| Error::internal("there is no world"))
    }

    /// Nobody is left but new ranks that nobody will meet.
    fn is_done(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ending.is_some() || (self.is_over && rank.is_new))
    }

    fn start(&self, rank: usize, n: usize, replaces: bool) -> Result<Process> {
        let program = std::env::current_exe().map_err(|error| Error::internal(format!("who am I? {error}")))?;
        let mut command = Command::new(program);
        command.args(own_flags(&["--ranks"], &[])).arg("--with-parent").env(WORLD_VARIABLE, path_of(self.world()?));
        for (name, value) in [("RANK", rank), ("WORLD_SIZE", n), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", n)] {
            command.env(name, value.to_string());
        }
        if replaces {
            command.env(REPLACES_VARIABLE, "1");
        }
        let label = format!("rank {rank}");
        match rank {
            0 => start_with_own_output(command, label),
            _ => start(command, label, rank, &self.sender),
        }
    }

    /// The ranks that have failed since this was last asked. Notes the ends of all.
    fn look(&mut self) -> Result<Vec<Death>> {
        let mut deaths = Vec::new();
        for rank in 0..self.ranks.len() {
            let of = &mut self.ranks[rank];
            if of.ending.is_some() {
                continue;
            }
            let ending = of.process.ended()?;
            of.ending = ending;
            match ending {
                Some(status) if !status.success() => deaths.push(Death { rank, status }),
                // It was done before a new rank came, so that one waits in vain.
                Some(_) if !World::has_joined(self.world()?, rank)? => {
                    self.is_over = true;
                    World::close(self.world()?, "the training has ended")?;
                }
                _ => {}
            }
        }
        Ok(deaths)
    }

    /// Whether it makes sense to go on with another rank in the place of a dead one.
    fn may_replace(&mut self, dead: &Death) -> Result<bool> {
        if dead.status.code().is_some_and(|code| OWN_ERRORS.contains(&code)) {
            return Ok(false);
        }
        let world = self.world()?;
        let mut is_whole = true;
        for rank in 0..self.ranks.len() {
            is_whole &= World::has_joined(world, rank)?;
        }
        if is_whole {
            self.ranks.iter_mut().for_each(|rank| (rank.has_state, rank.is_new) = (true, false));
        }
        let has_trained = self.ranks.iter().any(|rank| rank.has_state);
        let others = || self.ranks.iter().enumerate().filter(|(i, _)| *i != dead.rank).map(|(_, rank)| rank);
        // Others that have failed in the same moment are replaced, too.
        let nobody_is_done = others().all(|rank| rank.ending.is_none_or(|status| !status.success()));
        let somebody_knows = others().any(|rank| rank.ending.is_none() && rank.has_state);
        if has_trained && !somebody_knows {
            eprintln!(
                "kolo: no rank is left that has the state of the training; --resume goes on from its newest checkpoint"
            );
            return Ok(false);
        }
        let rank = &self.ranks[dead.rank];
        let n_before = if rank.started.elapsed() > WELL_AFTER { 0 } else { rank.n_deaths };
        Ok(nobody_is_done && !self.is_over && n_before < MAX_RESTARTS)
    }

    /// Makes a new world with a new rank in the place of a dead one.
    fn replace(&mut self, dead: &Death) -> Result<()> {
        let (rank, n) = (dead.rank, self.ranks.len());
        let why = format!("rank {rank} died ({})", dead.status);
        // Nobody waits there any more, nor for one that has not come.
        World::close(self.world()?, &why)?;
        self.worlds.push(World::create(n)?);
        let n_old = self.worlds.len().saturating_sub(MOST_WORLDS);
        self.worlds.drain(..n_old);
        eprintln!("kolo: {why}; the others go on with a new one in its place");
        for i in (0..n).filter(|i| *i != rank) {
            let line = invitation(self.world()?, i, n);
            self.ranks[i].process.tell(&line);
        }
        let process = self.start(rank, n, true)?;
        let of = &mut self.ranks[rank];
        let n_deaths = if of.started.elapsed() > WELL_AFTER { 1 } else { of.n_deaths + 1 };
        *of = Rank { process, started: Instant::now(), n_deaths, has_state: false, is_new: true, ending: None };
        Ok(())
    }

    /// The rank that is the reason for the end: one that a signal ended before one that gave up because of it.
    fn cause(&self) -> Option<(usize, ExitStatus)> {
        let failed = self.ranks.iter().enumerate().filter_map(|(rank, of)| Some((rank, of.ending?)));
        failed.filter(|(_, status)| !status.success()).min_by_key(|(rank, status)| (status.code().is_some(), *rank))
    }
}

/// Other ranks do what rank 0 does and shows; only what they say on standard error is news.
fn show(said: &Said) {
    if let Said::Err(rank, line) = said {
        eprintln!("[rank {rank}] {line}");
    }
}
