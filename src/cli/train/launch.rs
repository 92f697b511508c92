//! `kolo train --ranks`: starts ranks on this machine, and replaces those that die.
//!
//! Ranks meet in a file in memory that the launcher keeps open. When a rank of an elastic training dies, the launcher closes the
//! world that it was in, which ends what the others wait for, and tells them on their standard input where they meet next:
//!
//! ```text
//! world PATH RANK SIZE           at once: as many of those that are left as can share the batches, if --min allows
//! larger-world PATH RANK SIZE    after the step that they are in: those that were started instead have come
//! ```
//!
//! If those that are left are too few, they meet the new ones at once, and wait for them there.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::process::{Command, ExitStatus};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use crate::parallel::{MEET_LATER, MEET_NOW, Sizes, World};
use crate::{Error, Result};

use super::child::{Process, Said, own_flags, start, start_with_own_output};
use super::job::stop_on_ctrl_c;
use super::ranks::{REPLACES_VARIABLE, RankFlags, WORLD_VARIABLE};

/// When one rank has failed, the others learn of it by themselves, and say what they know.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// So often a rank is started again, unless the training went well for a while in between.
const MAX_RESTARTS: u32 = 5;
const WELL_AFTER: Duration = Duration::from_secs(60);

/// So many worlds are kept open: a rank that starts takes a moment to open its own.
const MOST_WORLDS: usize = 16;

/// The exit codes of a rank that could not go on, and said why: it would only repeat it.
const OWN_ERRORS: [i32; 2] = [1, 2];

/// A file that this process keeps open, for the processes that it has started.
fn path_of(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// Starts `n` ranks with the flags of this process, and waits for them. Rank 0 has this process's terminal; the others speak up if
/// something is wrong.
pub fn launch(flags: &RankFlags, n: usize, sizes: Sizes) -> Result<()> {
    let stop = stop_on_ctrl_c();
    let (sender, said) = mpsc::channel();
    let mut launcher = Launcher::new(n, sizes, sender)?;
    for i in 0..n {
        launcher.start(i, false)?;
    }
    let mut give_up = None;
    while !launcher.is_done() && give_up.is_none_or(|at| Instant::now() < at) {
        if let Ok(said) = said.recv_timeout(Duration::from_millis(20)) {
            show(&said);
        }
        let is_stopping = stop.load(Ordering::Relaxed);
        if is_stopping {
            launcher.ranks.iter_mut().for_each(|rank| rank.process.iter_mut().for_each(Process::ask_to_end));
        }
        let dead = launcher.look()?;
        if !dead.is_empty() {
            let goes_on = flags.elastic && !is_stopping && give_up.is_none() && launcher.may_replace(&dead)?;
            match goes_on {
                true => launcher.replace(&dead)?,
                false => give_up = give_up.or(Some(Instant::now() + LAST_WORDS)),
            }
        }
        launcher.let_in()?;
    }
    let cause = launcher.cause();
    // All at once, and not each after the one before.
    launcher.ranks.iter_mut().for_each(|rank| rank.process.iter_mut().for_each(Process::ask_to_end));
    drop(launcher);
    said.try_iter().for_each(|said| show(&said));
    match cause {
        Some((rank, status)) => Err(Error::aborted(format!("rank {rank} of {n} failed: {status}"))),
        None => Ok(()),
    }
}

/// All ranks, and where they meet.
struct Launcher {
    /// With how many ranks the training can go on.
    sizes: Sizes,
    ranks: Vec<Rank>,
    /// Where ranks meet, by the number of the world. Older ones are kept open for a while: a rank that was started for one of these
    /// may open it late, and has to learn that it is closed.
    worlds: BTreeMap<usize, File>,
    n_worlds: usize,
    /// The world that trains.
    current: Meeting,
    /// A larger one, where ranks wait until all of those have come that are not in the one that trains.
    larger: Option<Meeting>,
    sender: Sender<Said>,
    /// The training has ended without the newest ranks.
    is_over: bool,
}

/// Where some ranks meet.
#[derive(Clone)]
struct Meeting {
    /// How many worlds there were before.
    number: usize,
    /// Which of the launcher's processes they are, in the order of ranks.
    members: Vec<usize>,
}

/// A process and those that were started in its place.
#[derive(Default)]
struct Rank {
    process: Option<Process>,
    started: Option<Instant>,
    /// How often it has died since it last worked for a while.
    n_deaths: u32,
    /// It was in a world that all had joined, so it knows what was trained there.
    has_state: bool,
    /// It was started instead of another one, for a world that not all have joined.
    is_new: bool,
    ending: Option<ExitStatus>,
    /// It has died too often, and is not started again.
    is_given_up: bool,
}

impl Rank {
    fn lives(&self) -> bool {
        self.process.is_some() && self.ending.is_none()
    }
}

/// A rank that has failed.
struct Death {
    process: usize,
    status: ExitStatus,
}

impl Launcher {
    fn new(n: usize, sizes: Sizes, sender: Sender<Said>) -> Result<Launcher> {
        let ranks = (0..n).map(|_| Rank::default()).collect();
        let current = Meeting { number: 0, members: (0..n).collect() };
        let worlds = BTreeMap::from([(0, World::create(n)?)]);
        Ok(Launcher { sizes, ranks, worlds, n_worlds: 1, current, larger: None, sender, is_over: false })
    }

    /// Makes a world for these processes.
    fn create(&mut self, members: Vec<usize>) -> Result<Meeting> {
        let number = self.n_worlds;
        self.worlds.insert(number, World::create(members.len())?);
        self.worlds.retain(|old, _| old + MOST_WORLDS > number);
        self.n_worlds += 1;
        Ok(Meeting { number, members })
    }

    fn file(&self, meeting: &Meeting) -> Result<&File> {
        self.worlds.get(&meeting.number).ok_or_else(|| Error::internal("there is no such world"))
    }

    /// Whether all of these processes have joined the world where they are to meet.
    fn have_joined(&self, meeting: &Meeting, who: impl Fn(usize) -> bool) -> Result<bool> {
        for (rank, process) in meeting.members.iter().enumerate() {
            if who(*process) && !World::has_joined(self.file(meeting)?, rank)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Nobody is left but new ranks that nobody will meet.
    fn is_done(&self) -> bool {
        self.ranks.iter().all(|rank| !rank.lives() || (self.is_over && rank.is_new))
    }

    /// Starts a process for the world in which it is to be.
    fn start(&mut self, i: usize, replaces: bool) -> Result<()> {
        let program = std::env::current_exe().map_err(|error| Error::internal(format!("who am I? {error}")))?;
        let of = |meeting: &Meeting| {
            meeting.members.iter().position(|process| *process == i).map(|rank| (meeting.clone(), rank))
        };
        let found = self.larger.as_ref().and_then(of).or_else(|| of(&self.current));
        let (meeting, rank) = found.ok_or_else(|| Error::internal("a process is started for no world"))?;
        let size = meeting.members.len();
        let mut command = Command::new(program);
        command
            .args(own_flags(&["--ranks"], &[]))
            .arg("--with-parent")
            .env(WORLD_VARIABLE, path_of(self.file(&meeting)?));
        for (name, value) in [("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)] {
            command.env(name, value.to_string());
        }
        if replaces {
            command.env(REPLACES_VARIABLE, "1");
        }
        let label = format!("rank {i}");
        let process = match i {
            0 => start_with_own_output(command, label)?,
            _ => start(command, label, i, &self.sender)?,
        };
        let of = &mut self.ranks[i];
        (of.process, of.started, of.ending) = (Some(process), Some(Instant::now()), None);
        (of.has_state, of.is_new) = (false, replaces);
        Ok(())
    }

    /// The ranks that have failed since this was last asked. Notes the ends of all.
    fn look(&mut self) -> Result<Vec<Death>> {
        let mut deaths = Vec::new();
        for process in 0..self.ranks.len() {
            let of = &mut self.ranks[process];
            let Some(running) = of.process.as_mut().filter(|_| of.ending.is_none()) else { continue };
            of.ending = running.ended()?;
            match of.ending {
                Some(status) if !status.success() => deaths.push(Death { process, status }),
                Some(_) => self.end_without(process)?,
                None => {}
            }
        }
        Ok(deaths)
    }

    /// A process is done: those that wait for it elsewhere wait in vain.
    fn end_without(&mut self, process: usize) -> Result<()> {
        for meeting in [Some(&self.current), self.larger.as_ref()].into_iter().flatten() {
            let Some(rank) = meeting.members.iter().position(|member| *member == process) else { continue };
            let file = self.file(meeting)?;
            if !World::has_joined(file, rank)? {
                World::close(file, "the training has ended")?;
                self.is_over = true;
            }
        }
        if self.is_over {
            let trains = &self.current.members;
            let outside = self.ranks.iter_mut().enumerate().filter(|(i, _)| !trains.contains(i));
            outside.for_each(|(_, rank)| rank.is_new = true);
        }
        Ok(())
    }

    /// Whether it makes sense to go on without these ranks, or with others in their places.
    fn may_replace(&mut self, dead: &[Death]) -> Result<bool> {
        if dead.iter().any(|dead| dead.status.code().is_some_and(|code| OWN_ERRORS.contains(&code))) {
            return Ok(false);
        }
        if self.have_joined(&self.current, |_| true)? {
            let members = self.current.members.clone();
            members.into_iter().for_each(|i| (self.ranks[i].has_state, self.ranks[i].is_new) = (true, false));
        }
        let has_trained = self.ranks.iter().any(|rank| rank.has_state);
        let nobody_is_done = self.ranks.iter().all(|rank| rank.ending.is_none_or(|status| !status.success()));
        let somebody_knows = self.ranks.iter().any(|rank| rank.lives() && rank.has_state);
        if has_trained && !somebody_knows {
            eprintln!(
                "kolo: no rank is left that has the state of the training; --resume goes on from its newest checkpoint"
            );
            return Ok(false);
        }
        for Death { process, .. } in dead {
            let rank = &mut self.ranks[*process];
            let went_well = rank.started.is_some_and(|at| at.elapsed() > WELL_AFTER);
            rank.n_deaths = if went_well { 1 } else { rank.n_deaths + 1 };
            rank.is_given_up = rank.n_deaths > MAX_RESTARTS;
        }
        let n_left = self.ranks.iter().filter(|rank| !rank.is_given_up).count();
        Ok(nobody_is_done && !self.is_over && self.sizes.largest(n_left).is_some())
    }

    /// Has those that are left go on, and starts others instead of the dead.
    fn replace(&mut self, dead: &[Death]) -> Result<()> {
        let names: Vec<String> =
            dead.iter().map(|dead| format!("rank {} died ({})", self.name(dead.process), dead.status)).collect();
        let why = names.join(", ");
        // Nobody waits there any more, nor for one that has not come.
        World::close(self.file(&self.current)?, &why)?;
        let larger = self.larger.take();
        if let Some(larger) = &larger {
            World::close(self.file(larger)?, &why)?;
        }
        // Those that train keep their order; then come those that wait, in theirs.
        let mut order = self.current.members.clone();
        order.extend(larger.iter().flat_map(|larger| &larger.members));
        order.extend(0..self.ranks.len());
        let mut seen = vec![false; self.ranks.len()];
        order.retain(|i| !std::mem::replace(&mut seen[*i], true) && !self.ranks[*i].is_given_up);
        let (ready, others): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|i| self.ranks[*i].lives() && self.ranks[*i].has_state);
        let all: Vec<usize> = ready.iter().chain(&others).copied().collect();
        let n_all = self.sizes.largest(all.len()).unwrap_or(all.len());
        match self.sizes.largest(ready.len()) {
            Some(n_now) if n_now < n_all || n_now == ready.len() => {
                self.current = self.create(ready[..n_now].to_vec())?;
                let goes_on = if n_now == 1 { "1 goes on".to_owned() } else { format!("{n_now} go on") };
                eprintln!("kolo: {why}; {goes_on} at once");
                if n_now < ready.len() {
                    eprintln!("kolo: {} ranks are left, and {}", ready.len(), self.sizes.describe());
                }
                self.larger = if n_now < n_all { Some(self.create(all[..n_all].to_vec())?) } else { None };
            }
            _ => {
                let instead =
                    if dead.len() == 1 { "with a new one in its place" } else { "with new ones in their places" };
                eprintln!("kolo: {why}; the others go on {instead}");
                // Everybody has the rank that it had.
                let mut members = all[..n_all].to_vec();
                members.sort_unstable();
                self.current = self.create(members)?;
            }
        }
        self.invite(MEET_NOW, &self.current.clone(), |_| true)?;
        if let Some(larger) = self.larger.clone() {
            let trains = self.current.members.clone();
            self.invite(MEET_NOW, &larger, |process| !trains.contains(&process))?;
        }
        for i in all.into_iter().take(n_all).filter(|i| !self.ranks[*i].lives()).collect::<Vec<_>>() {
            self.start(i, true)?;
        }
        Ok(())
    }

    /// What a process is called: its rank in the world that trains, or else the one that it was started with.
    fn name(&self, process: usize) -> usize {
        self.current.members.iter().position(|member| *member == process).unwrap_or(process)
    }

    /// Tells those of these processes that live where they meet.
    fn invite(&mut self, when: &str, meeting: &Meeting, who: impl Fn(usize) -> bool) -> Result<()> {
        let (path, size) = (path_of(self.file(meeting)?), meeting.members.len());
        for (rank, i) in meeting.members.iter().enumerate().filter(|(_, i)| who(**i)) {
            let of = &mut self.ranks[*i];
            if let (Some(process), None) = (&mut of.process, of.ending) {
                process.tell(&format!("{when} {path} {rank} {size}"));
            }
        }
        Ok(())
    }

    /// Has the ranks that train meet those that have come in the meantime.
    fn let_in(&mut self) -> Result<()> {
        let Some(larger) = self.larger.clone() else { return Ok(()) };
        let trains = self.current.members.clone();
        if self.is_over || !self.have_joined(&larger, |process| !trains.contains(&process))? {
            return Ok(());
        }
        self.invite(MEET_LATER, &larger, |process| trains.contains(&process))?;
        (self.current, self.larger) = (larger, None);
        eprintln!("kolo: {} ranks go on after this step", self.current.members.len());
        Ok(())
    }

    /// The rank that is the reason for the end: one that a signal ended before one that gave up because of it.
    fn cause(&self) -> Option<(usize, ExitStatus)> {
        let failed = self.ranks.iter().enumerate().filter_map(|(rank, of)| Some((rank, of.ending?)));
        let somebody_is_done = self.ranks.iter().any(|rank| rank.ending.is_some_and(|status| status.success()));
        let counts = |rank: usize| !(somebody_is_done && self.ranks[rank].is_given_up);
        let failed = failed.filter(|(rank, status)| !status.success() && counts(*rank));
        failed.min_by_key(|(rank, status)| (status.code().is_some(), *rank))
    }
}

/// Other ranks do what rank 0 does and shows; what they say on standard error is news, and so is all if another one has become rank 0.
fn show(said: &Said) {
    match said {
        Said::Err(rank, line) => eprintln!("[rank {rank}] {line}"),
        Said::Out(_, line) => drop(crate::cli::print(line)),
    }
}
