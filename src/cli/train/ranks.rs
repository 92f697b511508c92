//! Training by all-reduce: one command starts all ranks of this machine, each a process with a copy of the model. A process that
//! another launcher has started as a rank, such as `torchrun` on several machines, meets the others over TCP.
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

use crate::parallel::{RankPlace, World};
use crate::{Error, Result};

use super::child::{Process, Said, own_flags, start, start_with_own_output};
use super::job::stop_on_ctrl_c;
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
}

impl RankFlags {
    /// The world of this process, if a launcher has started it as a rank. Ranks that meet over TCP authenticate each other so.
    pub fn world(&self, security: &ServerSecurityFlags) -> Result<Option<World>> {
        match is_rank() {
            true => World::from_env_secured(&security.read()?).map(Some),
            false => Ok(None),
        }
    }

    /// Whether this process takes the place of a rank that died.
    pub fn replaces_a_rank(&self) -> bool {
        std::env::var_os(REPLACES_VARIABLE).is_some()
    }
}

/// Whether this process is one of several ranks: by `--ranks`, or by another launcher, which says where they meet.
pub fn is_rank() -> bool {
    std::env::var_os(WORLD_VARIABLE).is_some() || meets_over_tcp()
}

/// Whether another launcher than `--ranks` has started this process as a rank.
pub fn meets_over_tcp() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some();
    !is_set(WORLD_VARIABLE) && ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"].into_iter().all(is_set)
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
    let mut launcher = Launcher { world: World::create(n)?, ranks: Vec::with_capacity(n), sender };
    for rank in 0..n {
        let process = launcher.start(rank, n, false)?;
        launcher.ranks.push(Rank { process, started: Instant::now(), n_deaths: 0, ending: None });
    }
    let mut give_up = None;
    while launcher.ranks.iter().any(|rank| rank.ending.is_none()) && give_up.is_none_or(|at| Instant::now() < at) {
        if let Ok(said) = said.recv_timeout(Duration::from_millis(20)) {
            show(&said);
        }
        let is_stopping = stop.load(Ordering::Relaxed);
        if is_stopping {
            launcher.ranks.iter_mut().for_each(|rank| rank.process.ask_to_end());
        }
        if let Some(dead) = launcher.new_death()? {
            let goes_on = flags.elastic && !is_stopping && give_up.is_none() && launcher.may_replace(&dead);
            match goes_on {
                true => launcher.replace(&dead)?,
                false => give_up = give_up.or(Some(Instant::now() + LAST_WORDS)),
            }
        }
    }
    let cause = launcher.cause();
    drop(launcher);
    said.try_iter().for_each(|said| show(&said));
    match cause {
        Some((rank, status)) => Err(Error::aborted(format!("rank {rank} of {n} failed: {status}"))),
        None => Ok(()),
    }
}

/// All ranks, and where they meet.
struct Launcher {
    world: File,
    ranks: Vec<Rank>,
    sender: Sender<Said>,
}

struct Rank {
    process: Process,
    started: Instant,
    /// How often it has died since it last worked for a while.
    n_deaths: u32,
    ending: Option<ExitStatus>,
}

/// A rank that has failed.
struct Death {
    rank: usize,
    status: ExitStatus,
}

impl Launcher {
    fn start(&self, rank: usize, n: usize, replaces: bool) -> Result<Process> {
        let program = std::env::current_exe().map_err(|error| Error::internal(format!("who am I? {error}")))?;
        let mut command = Command::new(program);
        command.args(own_flags(&["--ranks"], &[])).arg("--with-parent").env(WORLD_VARIABLE, path_of(&self.world));
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

    /// A rank that has failed since this was last asked. Notes the ends of all.
    fn new_death(&mut self) -> Result<Option<Death>> {
        for (rank, of) in self.ranks.iter_mut().enumerate().filter(|(_, of)| of.ending.is_none()) {
            of.ending = of.process.ended()?;
            if let Some(status) = of.ending.filter(|status| !status.success()) {
                return Ok(Some(Death { rank, status }));
            }
        }
        Ok(None)
    }

    /// Whether it makes sense to go on with another rank in the place of a dead one.
    fn may_replace(&self, dead: &Death) -> bool {
        let rank = &self.ranks[dead.rank];
        let n_before = if rank.started.elapsed() > WELL_AFTER { 0 } else { rank.n_deaths };
        let all_others_run = self.ranks.iter().enumerate().all(|(i, of)| i == dead.rank || of.ending.is_none());
        let died = !dead.status.code().is_some_and(|code| OWN_ERRORS.contains(&code));
        died && all_others_run && n_before < MAX_RESTARTS
    }

    /// Makes a new world with a new rank in the place of a dead one.
    fn replace(&mut self, dead: &Death) -> Result<()> {
        let (rank, n) = (dead.rank, self.ranks.len());
        let why = format!("rank {rank} died ({})", dead.status);
        let old = std::mem::replace(&mut self.world, World::create(n)?);
        // Nobody waits for it any more, nor for one that has not come.
        World::close(&old, &why)?;
        eprintln!("kolo: {why}; the others go on with a new one in its place");
        for (i, of) in self.ranks.iter_mut().enumerate().filter(|(i, _)| *i != rank) {
            of.process.tell(&invitation(&self.world, i, n));
        }
        let process = self.start(rank, n, true)?;
        let of = &mut self.ranks[rank];
        let n_deaths = if of.started.elapsed() > WELL_AFTER { 1 } else { of.n_deaths + 1 };
        *of = Rank { process, started: Instant::now(), n_deaths, ending: None };
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
