//! Trainings whose ranks come and go: a process is a rank of one world after the other, and keeps the state of the training in between.

use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use kolo_net::ranks::elastic::{ElasticConfig, Membership, Sizes};
use kolo_net::tls::{Security, Token};
use kolo_runtime::collective::{CommunicatorOptions, Costs, Group};
use parking_lot::Mutex;

use super::cost_file::own_costs;
use super::split::Met;
use super::{RankPlace, World};
use crate::train::TrainerState;

/// How long a rank that lost others waits to be told by its launcher where they meet again.
const INVITATION: Duration = Duration::from_secs(20);

/// A process of a training whose ranks may die, be stopped or cut off, come back, or be new. It is a rank of one [`World`] after the
/// other: when one ends, those who are left go on in the next, and when somebody waits to be let in, all leave theirs after the same
/// step and meet it there. All of them go on from the state of the rank that is farthest; nothing is read from a disk.
///
/// No process is special. For each world, a majority of the members of the one before has to be there (or half of them, if the first
/// one is among these), so of a network that is split one side goes on at most.
///
/// ```no_run
/// use kolo::SessionConfig;
/// use kolo::data::Dataset;
/// use kolo::parallel::{DataParallel, Elastic};
/// use kolo::train::{Model, Trainer};
/// # fn model(g: &kolo::Graph) -> kolo::Result<Model<'_>> { unimplemented!() }
/// # fn data() -> kolo::Result<Dataset> { unimplemented!() }
///
/// let data = data()?;
/// // Two ranks at least, four at most; where the others are is in the environment.
/// let elastic = Elastic::from_env(2..=4)?;
/// let loss = elastic.train(|rank| {
///     let g = kolo::graph();
///     let config = DataParallel::new(rank.world()).atomic_updates().configure(SessionConfig::default());
///     let mut trainer = Trainer::new(&g, model(&g)?).source(config).elastic(rank).build()?;
///     Ok(trainer.fit(&data, &mut [])?.last_loss)
/// })?;
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct Elastic {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
}

/// What a process of an elastic training is in one of its worlds.
#[derive(Clone)]
pub struct ElasticRank {
    world: World,
    number: u64,
    shared: Arc<Shared>,
}

struct Shared {
    meeting: Meeting,
    /// Where the training was when the last world ended.
    state: Mutex<Option<TrainerState>>,
}

/// How a process learns of the next world.
enum Meeting {
    /// It decides with the other members.
    Members(Box<Membership>),
    /// Its launcher tells it.
    Launcher(Mutex<Told>),
}

/// What a launcher has told a rank and what the rank has not done yet.
struct Told {
    lines: Receiver<String>,
    last: Option<String>,
    /// The world that it was started in.
    first: Option<World>,
}

impl Told {
    /// The last word counts: another rank may have died in the meantime.
    fn look(&mut self) -> Option<&str> {
        self.last = self.lines.try_iter().last().or(self.last.take());
        self.last.as_deref()
    }
}

/// The word before a world in which a rank has to be at once, and before one that it joins after its step.
pub(crate) const MEET_NOW: &str = "world";
pub(crate) const MEET_LATER: &str = "larger-world";

impl Elastic {
    /// Takes part in a training of processes that find each other over TCP, as `config` says.
    pub fn join(config: ElasticConfig) -> Result<Elastic> {
        Elastic::join_with(config, Costs::default())
    }

    fn join_with(config: ElasticConfig, costs: Costs) -> Result<Elastic> {
        let options = CommunicatorOptions { costs, ..CommunicatorOptions::default() };
        let members = Membership::start(config, &options)?;
        Ok(Elastic::new(Meeting::Members(Box::new(members))))
    }

    /// Takes part in the training that the environment says, with a number of ranks in this range. `RANK` and `WORLD_SIZE` say with how
    /// many the training begins, and `MASTER_ADDR` and `MASTER_PORT` where rank 0 listens, which founds it. A process that comes later, or again,
    /// needs `KOLO_JOIN`, addresses of members as `host:port`, separated by commas. `KOLO_LISTEN` is where this process listens for the
    /// others. They prove to each other that they know `KOLO_TOKEN`, or on loopback that they are of one user.
    pub fn from_env(sizes: RangeInclusive<usize>) -> Result<Elastic> {
        let token = match std::env::var("KOLO_TOKEN") {
            Ok(text) if !text.is_empty() => Some(Token::new(&text).map_err(|error| error.context("KOLO_TOKEN"))?),
            _ => None,
        };
        let variable = |name: &str| std::env::var(name).ok();
        let sizes = Sizes::new(*sizes.start(), *sizes.end(), |_| true, "any number of ranks in this range can train")?;
        let security = Security { token, ..Security::default() };
        let place = ElasticPlace::of(&variable)?;
        Elastic::join_with(ElasticConfig { security, ..place.config(sizes)? }, own_costs(&variable))
    }

    /// The same, with all that a command line says besides. `own_costs` are read as for ranks that stay.
    pub(crate) fn join_from_env(config: ElasticConfig) -> Result<Elastic> {
        Elastic::join_with(config, own_costs(&|name| std::env::var(name).ok()))
    }

    /// One of the ranks of a launcher on this machine, which says on these lines where they meet.
    pub(crate) fn launched(first: World, lines: Receiver<String>) -> Elastic {
        Elastic::new(Meeting::Launcher(Mutex::new(Told { lines, last: None, first: Some(first) })))
    }

    fn new(meeting: Meeting) -> Elastic {
        Elastic { shared: Arc::new(Shared { meeting, state: Mutex::default() }), stop: Arc::default() }
    }

    /// Setting this flag ends the wait for others.
    pub fn stop_flag(mut self, stop: Arc<AtomicBool>) -> Elastic {
        self.stop = stop;
        self
    }

    /// Where this process listens for others; none if a launcher of this machine has started it.
    pub fn address(&self) -> Option<std::net::SocketAddr> {
        match &self.shared.meeting {
            Meeting::Members(members) => Some(members.address()),
            Meeting::Launcher(_) => None,
        }
    }

    /// Calls `train` in one world after the other, until it is done. It builds its graph and its [`Trainer`](crate::train::Trainer) anew for
    /// each world, with [`TrainerBuilder::elastic`](crate::train::TrainerBuilder::elastic), and returns the error of
    /// [`Trainer::fit`](crate::train::Trainer::fit) or of a collective if there is one: `Aborted` means that the world has ended, and that there may be
    /// another one. Any other error is this process's own, and ends it; so does having waited too long for others. `None` if the training
    /// has ended without this process, which waited to be let in.
    pub fn train<R>(&self, mut train: impl FnMut(&ElasticRank) -> Result<R>) -> Result<Option<R>> {
        let (mut left, mut ended) = (None, None);
        loop {
            let Some((world, number)) = self.next(left, ended.take())? else { return Ok(None) };
            let rank = ElasticRank { world, number, shared: self.shared.clone() };
            match train(&rank) {
                Ok(done) => {
                    if let Meeting::Members(members) = &self.shared.meeting {
                        members.finish();
                    }
                    return Ok(Some(done));
                }
                Err(error) if error.code() == Code::Aborted => (left, ended) = (Some(number), Some(error)),
                Err(error) => return Err(error),
            }
        }
    }

    /// The next world and its number. `ended` is why there is none any more.
    fn next(&self, left: Option<u64>, ended: Option<Error>) -> Result<Option<(World, u64)>> {
        match &self.shared.meeting {
            Meeting::Members(members) => {
                let Some(next) = members.next(left, &self.stop)? else { return Ok(None) };
                let (rank, size) = (next.communicator.rank(), next.communicator.n_ranks());
                let place = RankPlace { rank, size, local_rank: next.local.0, local_size: next.local.1 };
                World::new(place, next.communicator, Met::Members, Group::new).map(|world| Some((world, next.number)))
            }
            Meeting::Launcher(told) => {
                let mut told = told.lock();
                if let Some(first) = told.first.take() {
                    return Ok(Some((first, 1)));
                }
                let deadline = Instant::now() + INVITATION;
                loop {
                    told.look();
                    let line = match told.last.take() {
                        Some(line) => line,
                        None => match told.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                            Ok(line) => line,
                            Err(_) => return Err(ended.unwrap_or_else(|| Error::aborted("the launcher is gone"))),
                        },
                    };
                    match join_invited(&line) {
                        Ok(world) => return Ok(Some((world, left.map_or(2, |number| number + 1)))),
                        Err(error) => {
                            tracing::warn!(target: "kolo::train", "cannot join the ranks at '{line}': {error}");
                        }
                    }
                }
            }
        }
    }
}

/// `world PATH RANK SIZE`.
fn join_invited(line: &str) -> Result<World> {
    let wrong = || Error::internal("this is no invitation");
    let words: Vec<&str> = line.split_whitespace().collect();
    let [MEET_NOW | MEET_LATER, path, rank, size] = words[..] else { return Err(wrong()) };
    let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
    World::join_at(Path::new(path), RankPlace::on_one_host(number(rank)?, number(size)?))
}

impl ElasticRank {
    /// The ranks that train together now.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The how manieth world of the training it is; of ranks that a launcher has started, of this process. They count from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether a training that nobody knows any more would begin anew: those who have no state from the second world on came to one
    /// whose other ranks had it, and may all be gone.
    pub(crate) fn is_past_beginning(&self) -> bool {
        matches!(self.shared.meeting, Meeting::Members(_)) && self.number > 2
    }

    /// Whether somebody waits to be let in: this world is to end after this step. One rank that says so is enough.
    pub fn wants_change(&self) -> bool {
        match &self.shared.meeting {
            Meeting::Members(members) => members.wants_change(),
            Meeting::Launcher(told) => told.lock().look().is_some(),
        }
    }

    /// Where this process was in the training when its last world ended.
    pub fn state(&self) -> Option<TrainerState> {
        self.shared.state.lock().clone()
    }

    /// Keeps where the training is, for the next world. A [`Trainer`](crate::train::Trainer) does.
    pub fn keep(&self, state: Option<TrainerState>) {
        *self.shared.state.lock() = state;
    }
}

/// What the environment says about a process of an elastic training.
#[derive(Clone, Debug, Default)]
pub(crate) struct ElasticPlace {
    rank: Option<usize>,
    size: Option<usize>,
    /// Where rank 0 listens at the beginning.
    master: Option<String>,
    /// Where this process listens.
    pub listen: Option<String>,
    /// Members of a training that is under way.
    pub join: Vec<String>,
}

impl ElasticPlace {
    /// What the variables say.
    pub fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<ElasticPlace> {
        let text = |name: &str| variable(name).filter(|text| !text.is_empty());
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = text(name) else { return Ok(None) };
            let parsed = text.parse::<usize>();
            parsed.map(Some).map_err(|_| Error::invalid_argument(format!("{name}='{text}' is not a number")))
        };
        let master = match (text("MASTER_ADDR"), number("MASTER_PORT")?) {
            (Some(host), Some(port)) if host.contains(':') => Some(format!("[{host}]:{port}")),
            (Some(host), Some(port)) => Some(format!("{host}:{port}")),
            _ => None,
        };
        Ok(ElasticPlace {
            rank: number("RANK")?,
            size: number("WORLD_SIZE")?,
            master,
            listen: text("KOLO_LISTEN"),
            join: text("KOLO_JOIN").map(|list| addresses(&list)).unwrap_or_default(),
        })
    }

    /// With how many ranks the training begins, if that is said.
    pub fn size(&self) -> Option<usize> {
        self.size
    }

    /// How this process takes part.
    pub fn config(&self, sizes: Sizes) -> Result<ElasticConfig> {
        let is_founder = self.join.is_empty() && self.rank == Some(0);
        let listen = match &self.listen {
            Some(_) => self.listen.clone(),
            None if is_founder => self.master.clone(),
            None => None,
        };
        let join = match (&self.join[..], &self.master) {
            ([], _) if is_founder && listen.is_none() => {
                return Err(Error::invalid_argument(
                    "this is rank 0, which founds an elastic training, but neither MASTER_ADDR and MASTER_PORT nor KOLO_LISTEN say \
                     where it listens for the others",
                ));
            }
            ([], _) if is_founder => Vec::new(),
            ([], Some(master)) => vec![master.clone()],
            ([], None) => {
                return Err(Error::invalid_argument(
                    "an elastic rank has to find the others: give KOLO_JOIN (--join), addresses of members as host:port, or RANK, \
                     WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                ));
            }
            (join, _) => join.to_vec(),
        };
        let listen = listen.map(|address| resolve(&address)).transpose()?;
        let mut config = ElasticConfig { listen, ..ElasticConfig::new(sizes, join) };
        config.wish = self.rank.and_then(|rank| u32::try_from(rank).ok()).unwrap_or(u32::MAX);
        if let Some(size) = self.size {
            config.start_with = config.sizes.largest(size).ok_or_else(|| {
                Error::invalid_argument(format!(
                    "WORLD_SIZE={size} is too few to begin with: at least {} ranks are needed; {}",
                    config.sizes.least(),
                    config.sizes.describe()
                ))
            })?;
        }
        Ok(config)
    }
}

/// `host:port[,host:port]`.
pub(crate) fn addresses(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|address| !address.is_empty()).map(str::to_owned).collect()
}

fn resolve(address: &str) -> Result<std::net::SocketAddr> {
    use std::net::ToSocketAddrs as _;
    let wrong = |why: String| Error::invalid_argument(format!("the address '{address}' {why}"));
    let mut found = address.to_socket_addrs().map_err(|error| wrong(format!("is not a host:port: {error}")))?;
    found.next().ok_or_else(|| wrong("has no address".to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Result<ElasticConfig> {
        let find =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        ElasticPlace::of(&find)?.config(Sizes::new(2, 4, |n| n != 3, "2 or 4").unwrap())
    }

    #[test]
    fn rank_0_founds_unless_it_comes_again() {
        let place = [("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "4000")];
        let founder = config(&place).unwrap();
        assert_eq!(
            (founder.join.len(), founder.listen, founder.start_with),
            (0, Some(([127, 0, 0, 1], 4000).into()), 4)
        );
        let again = [&place[..], &[("KOLO_JOIN", "a:1, b:2"), ("KOLO_LISTEN", "127.0.0.3:5")]].concat();
        let again = config(&again).unwrap();
        assert_eq!(
            (again.join, again.listen),
            (vec!["a:1".to_owned(), "b:2".to_owned()], Some(([127, 0, 0, 3], 5).into()))
        );
        let other = config(&[&[("RANK", "1")], &place[1..]].concat()).unwrap();
        assert_eq!((other.join, other.listen, other.wish), (vec!["127.0.0.1:4000".to_owned()], None, 1));
        let newcomer = config(&[("KOLO_JOIN", "127.0.0.1:4000")]).unwrap();
        assert_eq!((newcomer.join.len(), newcomer.wish), (1, u32::MAX));
    }

    #[test]
    fn an_environment_that_makes_no_sense_is_refused() {
        let says = |variables: &[(&str, &str)], text: &str| {
            let error = config(variables).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        says(&[], "has to find the others: give KOLO_JOIN");
        says(&[("RANK", "0"), ("WORLD_SIZE", "2")], "nor KOLO_LISTEN say where it listens");
        says(&[("RANK", "x")], "RANK='x' is not a number");
        says(&[("RANK", "0"), ("KOLO_LISTEN", "nowhere")], "the address 'nowhere' is not a host:port");
        let few = [("RANK", "1"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        says(&few, "WORLD_SIZE=1 is too few to begin with: at least 2 ranks are needed; 2 or 4");
    }
}
