//! Worlds of some of the ranks of a world.

use std::fs::File;

use kolo_core::{Error, Result, Tensor};
use kolo_net::ranks::{Coordinator, CoordinatorHost, RankConfig};
use kolo_runtime::SessionConfig;
use kolo_runtime::collective::{Communicator, CommunicatorOptions, Group, file_at, own_host, place_of};

use super::{RankPlace, World};

/// How the ranks of a world have met, for those that meet again.
#[derive(Clone, Debug)]
pub(super) enum Met {
    SharedMemory,
    Tcp(Box<RankConfig>),
    Mpi,
    /// As members of an elastic training.
    Members,
}

impl World {
    /// The world of those ranks that give the same number, in the order of their ranks here. All ranks call it, and it takes a moment:
    /// the world is to be kept. Its ranks make their calls beside those of this world, each world's in one order.
    ///
    /// Ranks of one host share memory, and those of several meet over TCP as this world did. Over MPI only worlds on one host can be
    /// split.
    ///
    /// ```
    /// use kolo::Tensor;
    /// use kolo::parallel::{ReduceOp, World};
    ///
    /// let worlds = World::threads(4)?;
    /// std::thread::scope(|scope| {
    ///     for world in worlds {
    ///         scope.spawn(move || {
    ///             let part = world.split(world.rank() % 2).unwrap();
    ///             let sum = part.all_reduce(vec![Tensor::from([world.rank() as i32])], ReduceOp::Sum).unwrap();
    ///             // 0 + 2, and 1 + 3.
    ///             assert_eq!(sum, [Tensor::from([if world.rank() % 2 == 0 { 2 } else { 4 }])]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), kolo::Error>(())
    /// ```
    pub fn split(&self, part: usize) -> Result<World> {
        let all = self.all_gather(Tensor::from([[part as i64, own_host(None) as i64]]))?;
        let all: Vec<(usize, i64)> = all.data::<i64>()?.chunks(2).map(|one| (one[0] as usize, one[1])).collect();
        let members: Vec<usize> = (0..self.size()).filter(|rank| all[*rank].0 == part).collect();
        let hosts: Vec<i64> = members.iter().map(|rank| all[*rank].1).collect();
        let rank = members.iter().position(|member| *member == self.rank());
        let rank = rank.ok_or_else(|| Error::internal("a rank is in no part of its world"))?;
        let n_here = |of: &[i64]| of.iter().filter(|host| **host == hosts[rank]).count();
        let (local_rank, local_size) = (n_here(&hosts[..rank]), n_here(&hosts));
        let place = RankPlace { rank, size: members.len(), local_rank, local_size };
        match self.met() {
            Met::Tcp(config) => self.split_over_tcp(config, place, &members),
            Met::Mpi if self.local_size() < self.size() => Err(Error::unimplemented(
                "a world over MPI that is on several hosts cannot be split; start its ranks with RANK, WORLD_SIZE, MASTER_ADDR and \
                 MASTER_PORT, so that they meet over TCP",
            )),
            Met::Members => Err(Error::unimplemented(
                "the world of an elastic training over TCP cannot be split: the parts would not learn of the next world",
            )),
            Met::Mpi | Met::SharedMemory => self.split_in_memory(RankPlace::on_one_host(rank, place.size), &members),
        }
        .map_err(|error| error.context(format_args!("part {part} of the world, ranks {members:?}")))
    }

    /// Gives a session this world under another name than `world`, which is that of [`World::configure`].
    pub fn add_to(&self, config: SessionConfig, name: &str) -> SessionConfig {
        config.groups.insert(name, self.group().clone());
        config
    }

    fn split_in_memory(&self, place: RankPlace, members: &[usize]) -> Result<World> {
        let create = || {
            let file = World::create(place.size)?;
            let at = place_of(&file)?;
            Ok((file, at))
        };
        let file: Option<Result<(File, String)>> = (place.rank == 0).then(create);
        let said = match &file {
            Some(Ok((_, at))) => at.clone(),
            Some(Err(error)) => format!("!{}", error.message()),
            None => String::new(),
        };
        let at = self.said_by(members[0], &said);
        // On a thread of its own: two groups that both ran on the thread that begins their calls could wait for each other.
        let join = |file: &File| {
            let end = Communicator::join(file, place.rank, &CommunicatorOptions::default())?;
            World::new(place, end, Met::SharedMemory, Group::new)
        };
        let joined = at.and_then(|at| match &file {
            Some(Ok((file, _))) => join(file),
            _ => join(&file_at(&at)?),
        });
        // The file has its name for as long as its rank keeps it open.
        self.all_or_none(members, joined)
    }

    /// This rank's world if all `members` of it have joined theirs, which all ranks tell each other; else an error on all members, which
    /// would wait for the missing one.
    fn all_or_none(&self, members: &[usize], joined: Result<World>) -> Result<World> {
        let why = match &joined {
            Ok(_) => String::new(),
            Err(error) => format!("it could not join: {}", error.message()),
        };
        let all = self.all_say(&why)?;
        let missing = members.iter().find(|member| !all[**member].is_empty());
        match missing.filter(|_| joined.is_ok()) {
            Some(missing) => Err(Error::unavailable(format!("rank {missing}: {}", all[*missing]))),
            None => joined,
        }
    }

    fn split_over_tcp(&self, config: &RankConfig, place: RankPlace, members: &[usize]) -> Result<World> {
        let start = || Coordinator::start((config.own_address()?, 0).into(), place.size, &config.security);
        let coordinator = (place.rank == 0).then(start);
        let said = match &coordinator {
            Some(Ok(coordinator)) => coordinator.address().to_string(),
            Some(Err(error)) => format!("!{}", error.message()),
            None => String::new(),
        };
        let address = self.said_by(members[0], &said)?;
        let (rank, n_ranks) = (place.rank, place.size);
        let config = RankConfig { rank, n_ranks, coordinator: address, host: CoordinatorHost::Other, ..config.clone() };
        World::meet_with(&config, place, self.group().options().costs)
    }

    /// What rank `speaker` says, of what all say; an error if that begins with `!`.
    fn said_by(&self, speaker: usize, said: &str) -> Result<String> {
        let said = self.all_say(said)?.swap_remove(speaker);
        match said.strip_prefix('!') {
            Some(why) => Err(Error::unavailable(format!("rank {speaker}: {why}"))),
            None => Ok(said),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use kolo_net::tls::{Security, Token};
    use kolo_runtime::Session;

    use super::*;
    use crate::parallel::ReduceOp;

    fn over_tcp(n: usize) -> Vec<World> {
        let security = Security { token: Some(Token::new("a-token-for-tests").unwrap()), ..Security::default() };
        let coordinator = Coordinator::start(([127, 0, 0, 1], 0).into(), n, &security).unwrap();
        let address = coordinator.address().to_string();
        let rank = |rank: usize| {
            let lost_after = Duration::from_secs(20);
            let (host, security) = (CoordinatorHost::Other, security.clone());
            let config = RankConfig { host, security, lost_after, ..RankConfig::new(rank, n, &address) };
            World::meet(&config, RankPlace::on_one_host(rank, n)).unwrap()
        };
        let rank = &rank;
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..n).map(|i| scope.spawn(move || rank(i))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn parts_of_a_world_make_calls_of_their_own_beside_it() {
        for worlds in [World::threads(5).unwrap(), over_tcp(5)] {
            std::thread::scope(|scope| {
                for world in worlds {
                    scope.spawn(move || {
                        let rank = world.rank();
                        // 0, 2 and 3; 1; 4.
                        let members = [&[0usize, 2, 3][..], &[1], &[4]][[0, 1, 0, 0, 2][rank]];
                        let part = world.split(members[0]).unwrap();
                        let own = members.iter().position(|member| *member == rank).unwrap();
                        assert_eq!((part.rank(), part.size()), (own, members.len()));
                        assert_eq!((part.local_rank(), part.local_size()), (own, members.len()));
                        for step in 0..20 {
                            let (sum, n) = (members.iter().sum::<usize>() + step * members.len(), rank + step);
                            let found = part.all_reduce(vec![Tensor::from([n as i64])], ReduceOp::Sum).unwrap();
                            assert_eq!(found, [Tensor::from([sum as i64])]);
                            let (rows, counts) = part.all_gather_uneven(Tensor::vector(vec![1u8; rank])).unwrap();
                            assert_eq!((rows.n_elements(), &counts[..]), (members.iter().sum(), members));
                            world.barrier().unwrap();
                        }
                        // Those of a part again, whose world is gone.
                        drop(world);
                        let last = part.split(0).unwrap();
                        drop(part);
                        let (rank, size) = (last.rank(), last.size());
                        let to = (rank + 1) % size;
                        let found =
                            last.send_receive(Tensor::from([rank as i32]), Some(to), Some((rank + size - 1) % size));
                        assert_eq!(found.unwrap(), Tensor::from([((rank + size - 1) % size) as i32]));
                    });
                }
            });
        }
    }

    /// Rank 1 has, say, no descriptors left; ranks 0 and 3 would wait for it. Rank 2 is in another part.
    #[test]
    fn a_rank_that_cannot_join_its_part_is_an_error_on_all_of_the_part() {
        std::thread::scope(|scope| {
            for world in World::threads(4).unwrap() {
                scope.spawn(move || {
                    let members = if world.rank() == 2 { &[2][..] } else { &[0, 1, 3] };
                    let joined = match world.rank() {
                        1 => Err(Error::resource_exhausted("too many open files")),
                        _ => World::alone(),
                    };
                    let found = world.all_or_none(members, joined).map(drop).map_err(|error| error.to_string());
                    match world.rank() {
                        2 => found.unwrap(),
                        1 => assert!(found.unwrap_err().contains("too many open files")),
                        _ => assert!(found.unwrap_err().contains("rank 1: it could not join: too many open files")),
                    }
                    world.barrier().unwrap();
                });
            }
        });
    }

    /// Ranks begin the collectives of the two groups in any order.
    #[test]
    fn nodes_of_one_graph_meet_in_a_world_and_in_its_parts() {
        std::thread::scope(|scope| {
            for world in World::threads(4).unwrap() {
                scope.spawn(move || {
                    let rank = world.rank();
                    let part = world.split(rank / 2).unwrap();
                    let config = part.add_to(world.configure(SessionConfig::default()), "pair");
                    let g = crate::graph();
                    let x = g.constant([rank as i64, 1]);
                    let sum = |group: &str, x| g.op("KoloAllReduce").name(group).inputs([x]).attr("group", group).out();
                    // Neither waits for the other, and then both do.
                    let sums = match rank % 2 {
                        0 => [sum("world", x), sum("pair", x)],
                        _ => {
                            let of_pair = sum("pair", x);
                            [sum("world", x), of_pair]
                        }
                    };
                    let both = sum("world", sums[0] + sums[1]);
                    let session = Session::with_config(&g, config).unwrap();
                    let pair = 4 * (rank as i64 / 2) + 1;
                    let wanted = [[6, 4], [pair, 2], [4 * 6 + 2 + 2 * 5, 24]].map(Tensor::from);
                    for _ in 0..50 {
                        assert_eq!(session.run(&[sums[0], sums[1], both], &[], &[]).unwrap(), wanted);
                    }
                });
            }
        });
    }
}
