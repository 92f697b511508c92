//! Training by all-reduce: one command starts all ranks of this machine, each a process with a copy of the model.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::process::{Command, ExitStatus};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::parallel::World;
use crate::{Error, Result};

use super::child::{Process, Said, own_flags, start, start_with_own_output};
use super::job::stop_on_ctrl_c;

/// Where the ranks of a launched training find each other.
const WORLD_VARIABLE: &str = "KOLO_WORLD";

/// When one rank has failed, the others learn of it by themselves, and say what they know.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Flags about ranks.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RankFlags {
    /// Train with this many processes on this machine, each with an equal share of every batch; they exchange gradients among
    /// themselves, without parameter servers
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub ranks: Option<usize>,
    /// Cut every batch into this many parts, which ranks compute one after the other: the same parts give the same weights,
    /// bit for bit, on 1, 2, 4 or 8 ranks [default: one part for each rank and device]
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub micro_batches: Option<usize>,
    /// Compare the weights of all ranks every this many steps, and at the end; 0 compares at the end only [default: 1000]
    #[arg(long, value_name = "STEPS", help_heading = "Ranks")]
    pub check_weights_every: Option<u64>,
}

impl RankFlags {
    /// The world of this process, if a launcher has started it as a rank.
    pub fn world(&self) -> Result<Option<World>> {
        match std::env::var_os(WORLD_VARIABLE) {
            Some(_) => World::from_env().map(Some),
            None => Ok(None),
        }
    }
}

/// Starts `n` ranks with the flags of this process, and waits for them. Rank 0 has this process's terminal; the others speak up if
/// something is wrong.
pub fn launch(n: usize) -> Result<()> {
    let stop = stop_on_ctrl_c();
    let program = std::env::current_exe().map_err(|error| Error::internal(format!("who am I? {error}")))?;
    // Kept open until all have ended.
    let world = World::create(n)?;
    let (sender, said) = mpsc::channel();
    let mut ranks = Vec::with_capacity(n);
    for rank in 0..n {
        let mut command = Command::new(&program);
        command.args(own_flags(&["--ranks"], &[])).arg("--with-parent");
        for (name, value) in environment(&world, rank, n) {
            command.env(name, value);
        }
        let label = format!("rank {rank}");
        ranks.push(match rank {
            0 => start_with_own_output(command, label)?,
            _ => start(command, label, rank, &sender)?,
        });
    }
    drop(sender);
    let mut endings = vec![None; n];
    let mut give_up = None;
    while endings.iter().any(Option::is_none) && give_up.is_none_or(|at| Instant::now() < at) {
        if let Ok(said) = said.recv_timeout(Duration::from_millis(20)) {
            show(&said);
        }
        if stop.load(Ordering::Relaxed) {
            ranks.iter_mut().for_each(Process::ask_to_end);
        }
        for (rank, ending) in ranks.iter_mut().zip(&mut endings).filter(|(_, ending)| ending.is_none()) {
            *ending = rank.ended()?;
            if ending.is_some_and(|status| !status.success()) {
                give_up = give_up.or(Some(Instant::now() + LAST_WORDS));
            }
        }
    }
    drop(ranks);
    said.try_iter().for_each(|said| show(&said));
    match cause(&endings) {
        Some((rank, status)) => Err(Error::aborted(format!("rank {rank} of {n} failed: {status}"))),
        None => Ok(()),
    }
}

/// What a rank is told.
fn environment(world: &File, rank: usize, n: usize) -> [(&'static str, String); 5] {
    let place = format!("/proc/{}/fd/{}", std::process::id(), world.as_raw_fd());
    [
        (WORLD_VARIABLE, place),
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", n.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", n.to_string()),
    ]
}

/// Other ranks do what rank 0 does and shows; only what they say on standard error is news.
fn show(said: &Said) {
    if let Said::Err(rank, line) = said {
        eprintln!("[rank {rank}] {line}");
    }
}

/// The rank that is the reason for the end: one that a signal ended before one that gave up because of it.
fn cause(endings: &[Option<ExitStatus>]) -> Option<(usize, ExitStatus)> {
    let failed = endings.iter().enumerate().filter_map(|(rank, status)| Some((rank, (*status)?)));
    failed.filter(|(_, status)| !status.success()).min_by_key(|(rank, status)| (status.code().is_some(), *rank))
}
