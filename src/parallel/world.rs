//! The processes that train together: which of them this is, and what they compute together outside of graphs.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::shared_group::SharedGroup;
use kolo_graph::{Graph, Operation, Output, Variable};
use kolo_net::ranks::{RankConfig, join};
use kolo_net::tls::{Security, Token};
use kolo_runtime::collective::{
    Activity, CollectiveCall, CollectiveKind, Communicator, CommunicatorOptions, Costs, ExchangedSoFar, Group, MpiKind,
    MpiRanks, all_say, call, own_host,
};
use kolo_runtime::{Session, SessionConfig};

use super::cost_file::own_costs;
use super::split::Met;
use crate::place::{Environment, Meeting, Place, RankSeat, find};

/// The ranks of a training: processes, or threads of one process, each with a copy of the model. A clone is the same rank.
///
/// All ranks make the same calls in the same order. A call returns when its result is there; one that fails on any rank (it was
/// another one than the others', a process has died, the deadline has passed) ends the world with an error on every rank that
/// names the cause.
///
/// ```
/// use kolo::Tensor;
/// use kolo::parallel::{ReduceOp, World};
///
/// let worlds = World::threads(2)?;
/// std::thread::scope(|scope| {
///     for world in worlds {
///         scope.spawn(move || {
///             let mine = Tensor::from([world.rank() as f32, 1.0]);
///             let sum = world.all_reduce(vec![mine], ReduceOp::Sum).unwrap();
///             assert_eq!(sum, [Tensor::from([1.0f32, 2.0])]);
///         });
///     }
/// });
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone)]
pub struct World {
    place: RankPlace,
    group: Arc<Group>,
    met: Met,
}

/// Which rank a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPlace {
    /// Its number among all, from 0.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Its number among those of its host, from 0: which of the host's GPUs is its own, say.
    pub local_rank: usize,
    /// How many its host has.
    pub local_size: usize,
}

impl RankPlace {
    /// Rank `rank` of `size`, all on one host.
    pub fn on_one_host(rank: usize, size: usize) -> RankPlace {
        RankPlace { rank, size, local_rank: rank, local_size: size }
    }

    /// An error if there is no such rank.
    pub(crate) fn check(self) -> Result<()> {
        let RankPlace { rank, size, local_rank, local_size } = self;
        if rank >= size {
            return Err(Error::invalid_argument(format!("there is no rank {rank}: there are {size}, from 0 on")));
        }
        if local_rank >= local_size || local_size > size {
            return Err(Error::invalid_argument(format!(
                "local rank {local_rank} of {local_size} is not a rank of one host; the rank among all ({rank} of {size}) is \
                 another number"
            )));
        }
        Ok(())
    }
}

/// A rank of another machine of which nothing was heard for so long is lost. One whose process ends is noticed at once.
const LOST_AFTER: Duration = Duration::from_secs(2);

/// The group of all ranks, by its name in graphs.
pub(crate) const WORLD: &str = "world";

impl World {
    /// A world of one.
    pub fn alone() -> Result<World> {
        World::threads(1)?.pop().ok_or_else(|| Error::internal("one rank was asked for"))
    }

    /// A world of `n` ranks in this process, one for each of its threads.
    pub fn threads(n: usize) -> Result<Vec<World>> {
        let all = Communicator::in_process(n, &CommunicatorOptions::default())?;
        let world = |(rank, end)| {
            World::new(RankPlace::on_one_host(rank, n), end, Met::SharedMemory, |end| shared_group(end, n))
        };
        all.into_iter().enumerate().map(world).collect()
    }

    /// A file in memory, without a name, in which a world of `n` processes of this host meets: they join it by
    /// `/proc/PID/fd/N`, or as a descriptor that they inherit, while this one keeps it open.
    pub fn create(n: usize) -> Result<File> {
        let file = SharedGroup::anonymous_file()
            .map_err(|error| Error::resource_exhausted(format!("no file in memory for {n} ranks: {error}")))?;
        Communicator::create(&file, n, &CommunicatorOptions::default())?;
        Ok(file)
    }

    /// Ends the world in a file for all its ranks, whether they have joined or not: what they wait for is an error with this reason.
    pub fn close(file: &File, reason: &str) -> Result<()> {
        SharedGroup::close(file, reason)
    }

    /// Whether a rank has joined the world in a file; it may have left since.
    pub fn has_joined(file: &File, rank: usize) -> Result<bool> {
        SharedGroup::has_joined(file, rank)
    }

    /// Joins the world in a file that [`World::create`] has made.
    pub fn join(file: &File, place: RankPlace) -> Result<World> {
        place.check()?;
        let end = Communicator::join(file, place.rank, &CommunicatorOptions::default())?;
        World::new(place, end, Met::SharedMemory, |end| shared_group(end, place.local_size))
    }

    pub(super) fn new(
        place: RankPlace,
        end: Communicator,
        met: Met,
        group: impl FnOnce(Communicator) -> Result<Arc<Group>>,
    ) -> Result<World> {
        place.check()?;
        if (end.rank(), end.n_ranks()) != (place.rank, place.size) {
            return Err(Error::invalid_argument(format!(
                "this is said to be rank {} of {}, and its group says rank {} of {}",
                place.rank,
                place.size,
                end.rank(),
                end.n_ranks()
            )));
        }
        Ok(World { place, group: group(end)?, met })
    }

    /// Meets the ranks of a world over TCP, on one machine or on many, as `config` says.
    pub fn meet(config: &RankConfig, place: RankPlace) -> Result<World> {
        World::meet_with(config, place, Costs::default())
    }

    /// The same, where messages cost so much.
    pub(super) fn meet_with(config: &RankConfig, place: RankPlace, costs: Costs) -> Result<World> {
        let end = join(config, &CommunicatorOptions { costs, ..CommunicatorOptions::default() })?;
        World::new(place, end, Met::Tcp(Box::new(config.clone())), Group::new)
    }

    /// The ranks that `mpirun` has started.
    fn over_mpi(kind: MpiKind, library: Option<&Path>, place: RankPlace, costs: Costs) -> Result<World> {
        let ranks = MpiRanks::join(kind, library, place.local_size)?;
        let options = CommunicatorOptions { costs, ..CommunicatorOptions::default() };
        let end = Communicator::over_hosts(Box::new(ranks), own_host(None), &options)?;
        World::new(place, end, Met::Mpi, Group::new)
            .map_err(|error| error.context(format_args!("the mpirun of {kind}")))
    }

    /// The world that a launcher has started this process in, or a world of one: [`place::find`](crate::place::find) says which
    /// launchers are understood (`kolo launch`, torchrun, `mpirun`, Slurm's `srun`, Kubernetes, `TF_CONFIG`). Ranks that meet at an
    /// address prove to each other that they know `KOLO_TOKEN`, or on loopback that they are of one user. An error if variables are
    /// missing or contradict each other: a process that trained alone by mistake would not be noticed.
    pub fn from_env() -> Result<World> {
        let token = match std::env::var("KOLO_TOKEN") {
            Ok(text) if !text.is_empty() => Some(Token::new(&text).map_err(|error| error.context("KOLO_TOKEN"))?),
            _ => None,
        };
        World::from_env_secured(&Security { token, ..Security::default() })
    }

    /// [`World::from_env`], where ranks that meet over TCP authenticate each other so.
    pub fn from_env_secured(security: &Security) -> Result<World> {
        World::from_environment(&Environment::own(), security)
    }

    pub(super) fn from_environment(environment: &Environment, security: &Security) -> Result<World> {
        let seat = match find(environment)?.place {
            Place::Alone => return World::alone(),
            Place::Rank(seat) => seat,
            Place::Task(task) => {
                return Err(Error::failed_precondition(format!(
                    "TF_CONFIG says that this is {}:{} of a cluster, and not one of several ranks that do the same; leave out the jobs ps and \
                     evaluator, or train as a task of that cluster",
                    task.job, task.index
                )));
            }
        };
        World::meet_with_costs(&seat, security, &|name| environment.get(name).map(str::to_owned))
    }

    /// Meets the other ranks where this seat says. Those that meet at an address authenticate each other so.
    pub fn meet_at(seat: &RankSeat, security: &Security) -> Result<World> {
        World::meet_with_costs(seat, security, &|name| std::env::var(name).ok())
    }

    fn meet_with_costs(
        seat: &RankSeat,
        security: &Security,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<World> {
        let RankPlace { rank, size, .. } = seat.place;
        match &seat.meeting {
            Meeting::File(path) => World::join_at(path, seat.place).map_err(|error| error.context("KOLO_WORLD")),
            Meeting::Mpi { kind, library } => {
                World::over_mpi(*kind, library.as_deref(), seat.place, own_costs(variable))
            }
            Meeting::Address(address) => {
                let config = RankConfig {
                    security: security.clone(),
                    lost_after: LOST_AFTER,
                    ..RankConfig::new(rank, size, address)
                };
                // All take those of rank 0.
                let costs = if rank == 0 { own_costs(variable) } else { Costs::default() };
                World::meet_with(&config, seat.place, costs)
            }
            Meeting::Unsaid => Err(Error::invalid_argument(format!(
                "this is rank {rank} of {size}, but neither KOLO_WORLD nor MASTER_ADDR and MASTER_PORT say where they meet; start \
                 all of them with one `kolo launch -n {size} -- ..`, or set MASTER_ADDR and MASTER_PORT to an address of rank 0"
            ))),
        }
    }

    /// Joins the world in the file of this name.
    pub(crate) fn join_at(path: &Path, place: RankPlace) -> Result<World> {
        let file = File::options().read(true).write(true).open(path).map_err(|error| {
            Error::failed_precondition(format!("the file of a world, {}, cannot be opened: {error}", path.display()))
        })?;
        World::join(&file, place)
    }

    /// This rank, from 0. Rank 0 reports and saves.
    pub fn rank(&self) -> usize {
        self.place.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.place.size
    }

    /// This rank among those of its host.
    pub fn local_rank(&self) -> usize {
        self.place.local_rank
    }

    /// The number of ranks of this host.
    pub fn local_size(&self) -> usize {
        self.place.local_size
    }

    /// How its ranks have met.
    pub(super) fn met(&self) -> &Met {
        &self.met
    }

    pub(super) fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Whether every rank has a piece of hardware, and one that no other rank has. All ranks say what they have.
    pub(crate) fn all_have_own(&self, hardware: Option<&str>) -> Result<bool> {
        let all = self.all_say(hardware.unwrap_or_default())?;
        let is_own = |(rank, what): (usize, &String)| !what.is_empty() && !all[..rank].contains(what);
        Ok(all.iter().enumerate().all(is_own))
    }

    /// What each rank says.
    pub(super) fn all_say(&self, said: &str) -> Result<Vec<String>> {
        all_say(&*self.group, "what ranks say", said)
    }

    /// Says that this rank begins a step: warnings, errors and `kolo doctor` name it. A [`Trainer`](crate::train::Trainer) does.
    pub fn begin_step(&self, step: i64) {
        self.group.recorder().note_step(step, Activity::Computing);
    }

    /// Says that this rank begins to wait for the data of a step.
    pub(crate) fn begin_input(&self, step: i64) {
        self.group.recorder().note_step(step, Activity::Input);
    }

    /// Says what this rank is busy with, from now on.
    pub(crate) fn note(&self, activity: Activity) {
        self.group.recorder().note(activity);
    }

    /// When this rank began the first collective since this was last asked.
    pub(crate) fn take_first_begun(&self) -> Option<Instant> {
        self.group.take_first_begun()
    }

    /// What this rank has exchanged with others through host memory, in graphs and in calls.
    pub fn exchanged(&self) -> ExchangedSoFar {
        self.group.exchanged()
    }

    /// A step begins, and with it the exchanges that a report is about.
    pub(crate) fn begin_exchanges(&self) {
        self.group.begin_step();
    }

    /// A step is over.
    pub(crate) fn end_exchanges(&self) {
        self.group.end_step();
    }

    /// Whether exchanges run beside what a rank computes.
    pub(crate) fn exchanges_beside(&self) -> bool {
        self.group.runs_beside()
    }

    pub(super) fn call(&self, kind: CollectiveKind, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        call(&*self.group, CollectiveCall { kind, name: kind.name().into(), tensors, cancel: None, deadline: None })
    }

    /// Gives a session of this rank the group of all ranks, which its nodes know as `world`, and a share of the host's cores unless
    /// its threads are set.
    pub fn configure(&self, mut config: SessionConfig) -> SessionConfig {
        config.groups.insert(WORLD, self.group.clone());
        if config.intra_op_parallelism_threads == 0 && config.inter_op_parallelism_threads == 0 {
            config.intra_op_parallelism_threads = share_of_cores(self.local_size());
            config.inter_op_parallelism_threads = 1;
        }
        config
    }

    /// Adds an operation that gives all variables of `graph`, those of the optimizer included, the values that they have in rank
    /// `root`. Strings stay what they are, and so do local variables. The ranks are those that a session knows as `world`, so it is for
    /// sessions that [`World::configure`] has given this world; not for one that has it by another name ([`World::add_to`]).
    pub fn broadcast_variables<'g>(&self, graph: &'g Graph, root: usize) -> Result<Operation<'g>> {
        let variables = graph.global_variables();
        graph.name_scope("broadcast_variables", || {
            let mut assigned = Vec::new();
            for bucket in by_dtype_and_size(&variables) {
                let values: Vec<Output<'g>> = bucket.iter().map(|variable| variable.read()).collect();
                let op = graph.op("KoloBroadcast").inputs(values).attr("group", WORLD).attr("root", root as i64);
                let copies = graph.device("/device:CPU:0", || op.build().outputs());
                assigned.extend(bucket.iter().zip(copies).map(|(variable, copy)| variable.assign(copy)));
            }
            let all = graph.group("all", &assigned);
            graph.check()?;
            Ok(all)
        })
    }

    /// An error on every rank, which names the first variable that differs and the ranks that differ from rank 0, unless all ranks
    /// have the same values in all variables of `graph`, to the bit.
    pub fn check_variables(&self, graph: &Graph, session: &Session) -> Result<()> {
        self.check_these(&graph.global_variables(), session)
    }

    /// [`World::check_variables`] for some of them, the same on all ranks.
    pub(crate) fn check_these(&self, variables: &[Variable<'_>], session: &Session) -> Result<()> {
        let mut hashes = Vec::with_capacity(variables.len());
        for bucket in by_dtype_and_size(variables) {
            let values: Vec<Output<'_>> = bucket.iter().map(|variable| variable.read()).collect();
            for (variable, value) in bucket.iter().zip(session.run(&values, &[], &[])?) {
                hashes.push((variable.name(), crc32c::crc32c(value.host_bytes()?)));
            }
        }
        let mine: Vec<i64> = hashes.iter().map(|(_, hash)| i64::from(*hash)).collect();
        let all = self.all_gather(Tensor::from(mine))?;
        let (all, n) = (all.data::<i64>()?, hashes.len());
        for (i, (name, _)) in hashes.iter().enumerate() {
            let differs = |rank: &usize| all[rank * n + i] != all[i];
            let others: Vec<String> = (1..self.size()).filter(differs).map(|rank| rank.to_string()).collect();
            if !others.is_empty() {
                return Err(Error::data_loss(format!(
                    "variable '{name}' has another value in rank {} than in rank 0; something updates it from data of one rank \
                     alone",
                    others.join(", ")
                )));
            }
        }
        Ok(())
    }
}

/// How many of the host's cores each of so many ranks has, one at least.
fn share_of_cores(local_size: usize) -> usize {
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    (n_cores / local_size).max(1)
}

/// A group in shared memory. A rank with a single core has nothing to run beside a collective.
fn shared_group(end: Communicator, local_size: usize) -> Result<Arc<Group>> {
    match share_of_cores(local_size) {
        1 => Ok(Group::on_callers_thread(end)),
        _ => Group::new(end),
    }
}

/// Variables of numbers and truth values, in lists of one dtype and not too many bytes, in the same order on all ranks.
pub(crate) fn by_dtype_and_size<'g>(variables: &[Variable<'g>]) -> Vec<Vec<Variable<'g>>> {
    const MOST_BYTES: usize = 32 << 20;
    let mut buckets: Vec<(DType, usize, Vec<Variable<'g>>)> = Vec::new();
    for &variable in variables {
        let Some(size) = variable.dtype().size() else { continue };
        let n_bytes = variable.shape().n_elements().unwrap_or(1).saturating_mul(size);
        let fits = |(dtype, n, _): &&mut (DType, usize, Vec<Variable<'g>>)| {
            *dtype == variable.dtype() && n.saturating_add(n_bytes) <= MOST_BYTES
        };
        match buckets.iter_mut().rev().find(fits) {
            Some((_, n, bucket)) => {
                *n += n_bytes;
                bucket.push(variable);
            }
            None => buckets.push((variable.dtype(), n_bytes, vec![variable])),
        }
    }
    buckets.into_iter().map(|(_, _, bucket)| bucket).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// What each rank returns, each on a thread of its own.
    fn run<R: Send>(n: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
        let worlds = World::threads(n).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| rank(world))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn from(variables: &[(&str, &str)]) -> Result<World> {
        World::from_environment(&Environment::new(variables.iter().copied()), &Security::default())
    }

    #[test]
    fn a_process_without_a_launcher_is_alone() {
        let world = from(&[]).unwrap();
        assert_eq!((world.rank(), world.size(), world.local_rank(), world.local_size()), (0, 1, 0, 1));
        world.barrier().unwrap();
        assert_eq!(world.all_gather(Tensor::from([3i32])).unwrap(), Tensor::from([3i32]));
        assert_eq!(from(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().size(), 1);
    }

    #[test]
    fn an_environment_that_makes_no_sense_is_refused() {
        let says = |variables: &[(&str, &str)], text: &str| {
            let error = from(variables).err().unwrap().to_string();
            assert!(error.contains(text), "{error}");
        };
        says(&[("RANK", "1")], "one of RANK and WORLD_SIZE is set");
        says(&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK='x' is not a number");
        says(&[("RANK", "2"), ("WORLD_SIZE", "2")], "there is no rank 2");
        says(
            &[("RANK", "1"), ("WORLD_SIZE", "2")],
            "neither KOLO_WORLD nor MASTER_ADDR and MASTER_PORT say where they meet",
        );
        says(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "http")], "MASTER_PORT='http' is not a number");
        says(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("KOLO_WORLD", "/proc/nothing")], "cannot be opened");
        // The rank among all in the place of the one on this host.
        let host = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "5"), ("LOCAL_WORLD_SIZE", "4")];
        says(&host, "local rank 5 of 4 is not a rank of one host; the rank among all (5 of 8) is another number");
    }

    #[test]
    fn every_rank_has_hardware_of_its_own_or_all_do_without() {
        let found = |hardware: [Option<&'static str>; 3]| {
            let found = run(3, |world| world.all_have_own(hardware[world.rank()]).unwrap());
            assert!(found.iter().all(|other| *other == found[0]), "ranks agree: {found:?}");
            found[0]
        };
        assert!(found([Some("a"), Some("b"), Some("c")]));
        assert!(!found([Some("a"), Some("b"), None]));
        assert!(!found([Some("a"), Some("b"), Some("a")]));
    }

    #[test]
    fn variables_become_those_of_the_root_and_are_compared_by_name() {
        let errors = run(3, |world| {
            let rank = world.rank();
            let g = crate::graph();
            let w = g.variable("w", [rank as f32, 1.0]);
            let n = g.new_variable("n", [rank as i64]).not_trainable().build();
            let _is_set = g.new_variable("is_set", [rank == 1]).not_trainable().build();
            let broadcast = world.broadcast_variables(&g, 1).unwrap();
            let init = g.global_variables_initializer();
            let shift = w.assign_add(g.constant([0.0f32, if rank == 2 { 0.5 } else { 0.0 }]));
            let session = Session::with_config(&g, world.configure(SessionConfig::default())).unwrap();
            session.run_op(init).unwrap();
            session.run_op(broadcast).unwrap();
            assert_eq!(session.fetch(w.read()).unwrap(), Tensor::from([1.0f32, 1.0]));
            assert_eq!(session.fetch(n.read()).unwrap(), Tensor::from([1i64]));
            world.check_variables(&g, &session).unwrap();
            session.run_op(shift).unwrap();
            world.check_variables(&g, &session).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("variable 'w' has another value in rank 2 than in rank 0"), "{error}");
        }
    }
}
