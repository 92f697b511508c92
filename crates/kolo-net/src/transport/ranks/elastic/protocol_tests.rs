//! The protocol under many random schedules: messages that are late or lost, members that die, are stopped, cut off, and come.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use super::messages::{Epoch, Member, MemberId, Reply, Request};
use super::protocol::{Call, Event, Protocol, Start};
use super::sizes::Sizes;

const TICK: Duration = Duration::from_millis(10);

/// The longest time that a call may take.
const LIMIT: Duration = Duration::from_millis(1000);

/// A member that cannot be reached is missed after this time.
const LOST_AFTER: Duration = Duration::from_millis(2000);

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    fn millis(&mut self, n: u64) -> Duration {
        Duration::from_micros(self.below(n * 1000) + 100)
    }
}

/// A process, and the training that it does.
struct Node {
    protocol: Protocol,
    is_dead: bool,
    is_stopped: bool,
    /// Nodes of other sides cannot be reached.
    side: u32,
    /// The world in which it trains.
    trains: Option<Epoch>,
    silent: BTreeMap<MemberId, Duration>,
    failed: Option<String>,
    is_over: bool,
}

enum Happens {
    Tick,
    Arrives { from: usize, to: usize, number: u64, request: Request },
    Answered { to: usize, number: u64, reply: Option<Reply> },
}

struct Simulation {
    now: Duration,
    nodes: Vec<Node>,
    queue: BTreeMap<(Duration, u64), Happens>,
    n_queued: u64,
    random: Random,
    /// Messages out of a hundred that are lost.
    lossy: u64,
    worlds: BTreeMap<u64, Vec<MemberId>>,
    sizes: Sizes,
}

fn address(i: usize) -> SocketAddr {
    SocketAddr::new([127, 0, 0, 1].into(), 1000 + i as u16)
}

impl Simulation {
    fn new(seed: u64, n: usize, sizes: Sizes) -> Simulation {
        let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let (nodes, queue, worlds) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let now = Duration::ZERO;
        let mut all = Simulation { now, nodes, queue, n_queued: 0, random, lossy: 0, worlds, sizes };
        for i in 0..n {
            all.add((i == 0).then_some(7), n);
        }
        all.at(Duration::ZERO, Happens::Tick);
        all
    }

    fn add(&mut self, founds: Option<u128>, start_with: usize) {
        let i = self.nodes.len();
        let own = Member { id: MemberId(i as u128 + 1), address: address(i), wish: i as u32 };
        let start = Start {
            own,
            founds,
            // Any of those that were there before.
            known: (0..i).map(address).collect(),
            sizes: self.sizes.clone(),
            start_with,
            patience: Duration::from_secs(40),
            settings: 0,
            seed: self.random.below(u64::MAX),
        };
        self.nodes.push(Node {
            protocol: Protocol::new(start, self.now),
            is_dead: false,
            is_stopped: false,
            side: 0,
            trains: None,
            silent: BTreeMap::new(),
            failed: None,
            is_over: false,
        });
    }

    fn at(&mut self, after: Duration, what: Happens) {
        self.n_queued += 1;
        self.queue.insert((self.now + after, self.n_queued), what);
    }

    fn reaches(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.nodes[a], &self.nodes[b]);
        !a.is_dead && !b.is_dead && !a.is_stopped && !b.is_stopped && a.side == b.side
    }

    fn send(&mut self, from: usize, calls: Vec<Call>) {
        for Call { number, to, request } in calls {
            let to = (0..self.nodes.len()).find(|i| address(*i) == to).unwrap();
            let is_refused = self.nodes[to].is_dead && self.nodes[from].side == self.nodes[to].side;
            let is_lost = self.random.below(100) < self.lossy;
            if is_refused {
                let soon = self.random.millis(2);
                self.at(soon, Happens::Answered { to: from, number, reply: None });
            } else if is_lost || !self.reaches(from, to) {
                self.at(LIMIT, Happens::Answered { to: from, number, reply: None });
            } else {
                let late = self.random.millis(30);
                self.at(late, Happens::Arrives { from, to, number, request });
            }
        }
    }

    /// What a node has learned.
    fn hear(&mut self, i: usize) {
        while let Some(event) = self.nodes[i].protocol.event() {
            match event {
                Event::In(epoch) => {
                    self.decided(&epoch);
                    self.nodes[i].silent.clear();
                    self.nodes[i].trains = Some(epoch);
                }
                Event::Out(epoch) => {
                    self.decided(&epoch);
                    self.nodes[i].trains = None;
                }
                Event::Over => self.nodes[i].is_over = true,
                Event::Failed(error) => {
                    // Its process ends.
                    (self.nodes[i].failed, self.nodes[i].is_dead) = (Some(error.to_string()), true);
                }
                Event::Note(_) => {}
            }
        }
    }

    fn decided(&mut self, epoch: &Epoch) {
        let ids: Vec<MemberId> = epoch.members.iter().map(|member| member.id).collect();
        assert!(ids.iter().collect::<BTreeSet<_>>().len() == ids.len(), "nobody is in a world twice: {ids:?}");
        let known = self.worlds.entry(epoch.number).or_insert_with(|| ids.clone());
        assert_eq!(*known, ids, "there are two worlds {}", epoch.number);
    }

    fn run(&mut self, until: Duration, mut chaos: impl FnMut(&mut Simulation)) {
        while let Some((&key, _)) = self.queue.iter().next() {
            if key.0 >= until {
                break;
            }
            let what = self.queue.remove(&key).unwrap();
            self.now = key.0;
            match what {
                Happens::Tick => {
                    chaos(self);
                    self.tick();
                    self.at(TICK, Happens::Tick);
                }
                Happens::Arrives { from, to, number, request } => {
                    // It stays in the buffers of one that is stopped.
                    if !self.reaches(from, to) {
                        self.at(LIMIT, Happens::Answered { to: from, number, reply: None });
                        continue;
                    }
                    let now = self.now;
                    let reply = self.nodes[to].protocol.request(request, now);
                    self.hear(to);
                    let (late, is_lost) = (self.random.millis(30), self.random.below(100) < self.lossy);
                    match is_lost {
                        true => self.at(LIMIT, Happens::Answered { to: from, number, reply: None }),
                        false => self.at(late, Happens::Answered { to: from, number, reply: Some(reply) }),
                    }
                }
                Happens::Answered { to, number, reply } => {
                    if !self.nodes[to].is_dead && !self.nodes[to].is_stopped {
                        let now = self.now;
                        let calls = self.nodes[to].protocol.answered(number, reply, now);
                        self.hear(to);
                        self.send(to, calls);
                    } else if self.nodes[to].is_stopped {
                        self.at(TICK, Happens::Answered { to, number, reply });
                    }
                }
            }
        }
    }

    fn index(id: MemberId) -> usize {
        id.0 as usize - 1
    }

    /// Whether a world can make a step: only if all of it is there.
    fn is_whole(&self, epoch: &Epoch) -> bool {
        let members: Vec<usize> = epoch.members.iter().map(|member| Simulation::index(member.id)).collect();
        let trains = |i: usize| self.nodes[i].trains.as_ref().is_some_and(|own| own.number == epoch.number);
        members.iter().all(|a| trains(*a) && members.iter().all(|b| self.reaches(*a, *b)))
    }

    /// Time goes on, and the processes look around.
    fn tick(&mut self) {
        let now = self.now;
        let worlds: BTreeMap<u64, Epoch> =
            self.nodes.iter().filter_map(|node| node.trains.clone()).map(|epoch| (epoch.number, epoch)).collect();
        let whole: Vec<u64> = worlds.values().filter(|epoch| self.is_whole(epoch)).map(|epoch| epoch.number).collect();
        assert!(whole.len() <= 1, "worlds {whole:?} train at the same time");
        for i in 0..self.nodes.len() {
            if self.nodes[i].is_dead || self.nodes[i].is_stopped {
                continue;
            }
            if let Some(epoch) = self.nodes[i].trains.clone() {
                let mut lost = Vec::new();
                let mut is_over = false;
                for member in &epoch.members {
                    let other = Simulation::index(member.id);
                    if other == i {
                        continue;
                    }
                    if self.nodes[other].is_dead && self.nodes[other].side == self.nodes[i].side {
                        lost.push(member.id);
                    } else if !self.reaches(i, other) {
                        let since = *self.nodes[i].silent.entry(member.id).or_insert(now);
                        if now >= since + LOST_AFTER {
                            lost.push(member.id);
                        }
                    } else {
                        self.nodes[i].silent.remove(&member.id);
                        // It has gone on without this one.
                        is_over |= self.nodes[other].trains.as_ref().is_some_and(|own| own.number > epoch.number);
                        is_over |= self.nodes[other].protocol.epoch().is_some_and(|own| own.number > epoch.number);
                    }
                }
                // At the end of a step all learn that somebody waits.
                let wants = whole.contains(&epoch.number)
                    && epoch
                        .members
                        .iter()
                        .any(|member| self.nodes[Simulation::index(member.id)].protocol.wants_change(now));
                if !lost.is_empty() || is_over || wants {
                    let all = if wants {
                        epoch.members.iter().map(|member| Simulation::index(member.id)).collect()
                    } else {
                        vec![i]
                    };
                    for one in all {
                        self.nodes[one].trains = None;
                        self.nodes[one].protocol.leave(epoch.number, if one == i { &lost } else { &[] }, now);
                    }
                }
            }
            let calls = self.nodes[i].protocol.poll(now);
            self.hear(i);
            self.send(i, calls);
        }
    }

    fn newest(&self) -> (u64, Vec<usize>) {
        self.worlds
            .last_key_value()
            .map(|(n, ids)| (*n, ids.iter().map(|id| Simulation::index(*id)).collect()))
            .unwrap_or_default()
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|i| !self.nodes[*i].is_dead).collect()
    }

    /// All that live train in one world.
    #[track_caller]
    fn assert_all_train(&self, n: usize) {
        let (number, members) = self.newest();
        let trains = |i: &usize| self.nodes[*i].trains.as_ref().is_some_and(|epoch| epoch.number == number);
        assert!(members.iter().all(trains), "world {number} of {members:?}");
        assert_eq!(members.len(), n, "world {number} of {members:?}, alive {:?}", self.alive());
    }
}

fn any(least: usize) -> Sizes {
    Sizes::new(least, 64, |_| true, "any").unwrap()
}

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn those_who_were_started_meet_in_the_order_that_they_were_given() {
    let mut all = Simulation::new(1, 5, any(5));
    all.run(secs(2), |_| {});
    assert_eq!(all.newest(), (1, vec![0, 1, 2, 3, 4]));
    all.assert_all_train(5);
}

#[test]
fn the_others_go_on_at_once_when_one_dies_whoever_it_is() {
    for victim in 0..4 {
        let mut all = Simulation::new(victim as u64 + 1, 4, any(1));
        all.run(secs(2), |_| {});
        all.nodes[victim].is_dead = true;
        // A few round trips of up to 60 ms.
        all.run(secs(2) + Duration::from_millis(500), |_| {});
        let others: Vec<usize> = (0..4).filter(|i| *i != victim).collect();
        assert_eq!(all.newest(), (2, others));
        all.assert_all_train(3);
        // A new one takes its place.
        all.add(None, 1);
        all.run(secs(5), |_| {});
        all.assert_all_train(4);
    }
}

#[test]
fn of_a_network_that_is_split_one_side_goes_on_and_the_other_comes_back() {
    for (sides, goes_on) in [([0, 0, 0, 1], vec![0, 1, 2]), ([1, 0, 0, 0], vec![1, 2, 3]), ([0, 1, 1, 0], vec![0, 3])] {
        let mut all = Simulation::new(5, 4, any(1));
        all.run(secs(2), |_| {});
        (0..4).for_each(|i| all.nodes[i].side = sides[i]);
        all.run(secs(15), |_| {});
        assert_eq!(all.newest(), (2, goes_on.clone()));
        all.assert_all_train(goes_on.len());
        (0..4).for_each(|i| all.nodes[i].side = 0);
        all.run(secs(30), |_| {});
        all.assert_all_train(4);
        assert_eq!(&all.newest().1[..goes_on.len()], goes_on, "those who went on come first");
    }
}

#[test]
fn one_that_was_stopped_is_left_out_and_comes_back() {
    for victim in 0..3 {
        let mut all = Simulation::new(9, 3, any(1));
        all.run(secs(2), |_| {});
        all.nodes[victim].is_stopped = true;
        all.run(secs(6), |_| {});
        all.assert_all_train(2);
        all.nodes[victim].is_stopped = false;
        all.run(secs(12), |_| {});
        all.assert_all_train(3);
    }
}

#[test]
fn too_few_wait_and_say_in_the_end_what_is_missing() {
    let mut all = Simulation::new(3, 3, any(3));
    all.run(secs(2), |_| {});
    all.nodes[1].is_dead = true;
    all.run(secs(30), |_| {});
    assert_eq!(all.newest().0, 1, "two are too few");
    assert!(all.nodes[0].failed.is_none());
    all.run(secs(60), |_| {});
    let why = all.nodes[0].failed.clone().unwrap();
    assert!(why.contains("have waited 40.0 s to go on together: 2 are there, and 3 are needed"), "{why}");
    // Half without the first.
    let mut all = Simulation::new(3, 2, any(1));
    all.run(secs(2), |_| {});
    all.nodes[0].is_dead = true;
    all.run(secs(60), |_| {});
    let why = all.nodes[1].failed.clone().unwrap();
    assert!(why.contains("1 of 2 members of world 1 are there, and rank 0 (127.0.0.1:1000) is missing"), "{why}");
}

#[test]
fn who_does_not_fit_waits_until_there_is_room() {
    let sizes = Sizes::new(1, 4, |n| 4 % n == 0, "4 parts").unwrap();
    let mut all = Simulation::new(2, 4, sizes);
    all.run(secs(2), |_| {});
    all.nodes[3].is_dead = true;
    all.run(secs(4), |_| {});
    assert_eq!(all.newest().1, [0, 1], "three cannot share four parts");
    assert!(all.nodes[2].trains.is_none() && all.nodes[2].failed.is_none());
    all.add(None, 1);
    all.run(secs(7), |_| {});
    all.assert_all_train(4);
    // A fifth one is told when it is over.
    all.add(None, 1);
    all.run(secs(9), |_| {});
    all.assert_all_train(4);
    for i in [0, 1, 2, 4] {
        let calls = all.nodes[i].protocol.finish();
        all.send(i, calls);
    }
    all.run(secs(11), |_| {});
    assert!(all.nodes[5].is_over);
}

#[test]
fn one_of_another_training_or_with_other_flags_is_refused() {
    let mut all = Simulation::new(2, 2, any(1));
    all.run(secs(2), |_| {});
    let member = Member { id: MemberId(99), address: address(9), wish: 0 };
    let now = all.now;
    let mut says = |request: Request, text: &str| match all.nodes[0].protocol.request(request, now) {
        Reply::Refused(why) => assert!(why.contains(text), "{why}"),
        other => panic!("{other:?}"),
    };
    says(Request::Join { job: 8, settings: 0, member }, "another training");
    says(Request::Join { job: 0, settings: 1, member }, "other flags");
    says(Request::Over { job: 8 }, "another training");
    assert!(!all.nodes[0].protocol.wants_change(now));
}

/// Many schedules: there are never two worlds of one number, nor two that can train at the same time, and once the faults are over
/// all that live are in one world, if enough of the last one do.
#[test]
fn no_schedule_makes_two_worlds_and_all_end_in_one() {
    let (mut n_done, mut n_worlds) = (0, 0);
    for seed in 1..=120u64 {
        let mut random = Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1);
        let n = 2 + random.below(5) as usize;
        let mut all = Simulation::new(seed, n, any(1));
        all.lossy = random.below(4) * 4;
        all.run(secs(25), |all| {
            if random.below(60) != 0 {
                return;
            }
            let i = random.below(all.nodes.len() as u64) as usize;
            match random.below(7) {
                // At most as many die as the newest world can lose.
                0 if !all.nodes[i].is_dead => {
                    let (_, members) = all.newest();
                    let lives = |one: &usize| !all.nodes[*one].is_dead && *one != i;
                    let n_left = members.iter().filter(|one| lives(one)).count();
                    all.nodes[i].is_dead = 2 * n_left > members.len() && all.worlds.len() > 1;
                }
                1 => all.nodes[i].is_stopped = true,
                2 => (0..all.nodes.len()).for_each(|one| all.nodes[one].side = random.below(2) as u32),
                3 if all.nodes.len() < 10 => all.add(None, 1),
                4 => all.nodes.iter_mut().for_each(|node| node.is_stopped = false),
                _ => all.nodes.iter_mut().for_each(|node| node.side = 0),
            }
        });
        all.lossy = 0;
        all.nodes.iter_mut().for_each(|node| (node.side, node.is_stopped) = (0, false));
        all.run(secs(60), |_| {});
        n_worlds += all.worlds.len();
        let (_, members) = all.newest();
        let n_left = members.iter().filter(|one| !all.nodes[**one].is_dead).count();
        if 2 * n_left > members.len() {
            n_done += 1;
            all.assert_all_train(all.alive().len());
        }
    }
    assert!(n_done > 110, "only {n_done} schedules left enough members");
    println!("{n_worlds} worlds in 120 schedules, {n_done} of which end with all members together");
}
