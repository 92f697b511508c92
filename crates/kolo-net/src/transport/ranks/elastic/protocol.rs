//! How members agree on the next world, as a state machine: what happens goes in, what to say to whom comes out. It knows no socket, no
//! thread and no clock, so that tests can run it through any schedule.
//!
//! For each world, the members of the one before decide by a majority (or half that includes the first: [`Epoch::is_quorum`]) who is in
//! it. That is single-decree Paxos: each is an acceptor, and the first one that seems to be there proposes. If it dies, the next one
//! takes over: what a quorum has accepted is kept, whoever proposes. So there are never two worlds of one number, and of a network that
//! is split one side goes on at most.
//!
//! ```text
//! proposer                                  members of world e             those who wait
//! Prepare(e, ballot)                   ──►  promise, accepted before, who waits
//! Invite                               ─────────────────────────────────►  ready
//! Accept(e + 1, ballot, members)       ──►  accepted
//! Commit(e + 1)                        ──►  ────────────────────────────►
//! ```
//!
//! A process that is not in the world it knows dials the members again and again until one of the next worlds has it. That is how
//! newcomers join, and how those come back that were stopped or cut off. A world of which one member is lost is over for all, so what
//! the lost one may still believe does no harm: it cannot complete a step alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use kolo_core::Error;

use super::messages::{Accepted, Ballot, Epoch, MOST_MEMBERS, Member, MemberId, Reply, Request};
use super::sizes::Sizes;

/// How often one who waits to be let in calls a member.
const DIAL: Duration = Duration::from_millis(200);

/// One who waits and has not called for so long is gone.
const WAITS: Duration = Duration::from_secs(3);

/// One who was not let in, because it did not answer, is not a reason to stop a training again before this time.
const LEFT_OUT: Duration = Duration::from_secs(5);

/// Members begin to propose one after the other, in the order of ranks, unless those before are known to be lost.
const TURN: Duration = Duration::from_millis(150);

/// How long a member that has promised something lets the proposer go on.
const PATIENT: Duration = Duration::from_millis(600);

/// The least time between two proposals of a member.
const AGAIN: Duration = Duration::from_millis(200);

/// The most who wait.
const MOST_WAITING: usize = 256;

/// What a member is told at its start.
#[derive(Clone, Debug)]
pub struct Start {
    pub own: Member,
    /// The job, if this member founds it; others learn it.
    pub founds: Option<u128>,
    /// Addresses at which other members may be.
    pub known: Vec<SocketAddr>,
    /// How many members a world may have.
    pub sizes: Sizes,
    /// The founder waits for so many members to begin.
    pub start_with: usize,
    /// How long to wait for other members before giving up.
    pub patience: Duration,
    /// A number for what all members have to agree on.
    pub settings: u64,
    /// Makes pauses that differ between members.
    pub seed: u64,
}

/// Something to say. The answer, or that there is none, is due to [`Protocol::answered`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub number: u64,
    pub to: SocketAddr,
    pub request: Request,
}

/// What a process has to know.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It is in this world, which is the newest.
    In(Epoch),
    /// It is not in this world, which is the newest, and waits to be let in.
    Out(Epoch),
    /// The training has ended.
    Over,
    /// It does not go on.
    Failed(Error),
    /// For the log.
    Note(String),
}

/// What one has promised and accepted for the world after the one that it knows.
#[derive(Default)]
struct Acceptor {
    promised: Option<Ballot>,
    accepted: Option<Accepted>,
}

/// One who wants to be let in.
#[derive(Clone, Debug)]
struct Waiting {
    member: Member,
    heard: Duration,
    /// It is not a reason to stop a training before.
    counts_from: Duration,
}

/// Where a member's own proposal is.
enum Proposal {
    None {
        not_before: Duration,
    },
    Preparing {
        ballot: Ballot,
        open: BTreeMap<u64, MemberId>,
        promised: BTreeMap<MemberId, Option<Accepted>>,
        waiting: Vec<Member>,
    },
    Inviting {
        ballot: Ballot,
        open: BTreeMap<u64, Member>,
        here: Vec<Member>,
        ready: Vec<Member>,
    },
    Accepting {
        ballot: Ballot,
        open: BTreeMap<u64, MemberId>,
        accepted: BTreeSet<MemberId>,
        members: Vec<Member>,
    },
}

/// One process's part in the membership of a training.
pub struct Protocol {
    start: Start,
    job: Option<u128>,
    /// The newest world that was decided, as far as this process knows.
    epoch: Option<Epoch>,
    acceptor: Acceptor,
    /// Since when the next world is wanted; none while this one goes on.
    changing: Option<Duration>,
    /// Members of this world that are known to be lost.
    lost: BTreeSet<MemberId>,
    waiting: BTreeMap<MemberId, Waiting>,
    proposal: Proposal,
    round: u32,
    /// One who waits: when it calls next, whom, and when it was last answered.
    dials: Dialing,
    n_calls: u64,
    /// Somebody has said that the training is over.
    is_over: bool,
    has_failed: bool,
    events: VecDeque<Event>,
    random: u64,
    /// What the last proposal lacked.
    lacks: Option<String>,
}

struct Dialing {
    next: Duration,
    at: usize,
    answered: Duration,
    open: Option<u64>,
}

impl Protocol {
    pub fn new(start: Start, now: Duration) -> Protocol {
        let job = start.founds;
        let epoch = job.map(|_| Epoch { number: 0, members: vec![start.own] });
        let random = start.seed ^ start.own.id.0 as u64 | 1;
        Protocol {
            job,
            changing: epoch.as_ref().map(|_| now),
            epoch,
            acceptor: Acceptor::default(),
            lost: BTreeSet::new(),
            waiting: BTreeMap::new(),
            proposal: Proposal::None { not_before: now },
            round: 0,
            dials: Dialing { next: now, at: 0, answered: now, open: None },
            n_calls: 0,
            is_over: false,
            has_failed: false,
            events: VecDeque::new(),
            random,
            lacks: None,
            start,
        }
    }

    /// The next thing to know.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The newest world that this process knows.
    #[cfg(test)]
    pub fn epoch(&self) -> Option<&Epoch> {
        self.epoch.as_ref()
    }

    /// The number of the training; 0 as long as it is not known.
    pub fn job(&self) -> u128 {
        self.job.unwrap_or(0)
    }

    fn is_member(&self) -> bool {
        self.epoch.as_ref().is_some_and(|epoch| epoch.rank_of(self.start.own.id).is_some())
    }

    /// The world of this number is over, at least for this process, and these of its members are lost.
    pub fn leave(&mut self, number: u64, lost: &[MemberId], now: Duration) {
        if self.is_member() && self.epoch.as_ref().is_some_and(|epoch| epoch.number == number) {
            self.lost.extend(lost);
            if self.changing.is_none() {
                self.changing = Some(now);
                self.proposal = Proposal::None { not_before: now };
            }
        }
    }

    /// Whether the world could become larger: members may stop at a step, and leave it.
    pub fn wants_change(&self, now: Duration) -> bool {
        let Some(epoch) = self.epoch.as_ref().filter(|_| self.changing.is_none()) else { return false };
        let n_waiting = self.waiting.values().filter(|one| one.is_here(now) && one.counts_from <= now).count();
        let n = epoch.members.len();
        self.is_member() && self.start.sizes.largest(n + n_waiting).is_some_and(|most| most > n)
    }

    /// The training has ended for this process: these are to be told, if they listen.
    pub fn finish(&mut self) -> Vec<Call> {
        self.is_over = true;
        let Some(job) = self.job else { return Vec::new() };
        let members = self.epoch.iter().flat_map(|epoch| &epoch.members);
        let all = members.chain(self.waiting.values().map(|one| &one.member)).map(|member| member.address);
        let others: BTreeSet<SocketAddr> = all.filter(|address| *address != self.start.own.address).collect();
        others.into_iter().map(|to| self.call(to, Request::Over { job })).collect()
    }

    /// What somebody says, and the answer.
    pub fn request(&mut self, request: Request, now: Duration) -> Reply {
        let own_job = self.job.unwrap_or(0);
        match request {
            Request::Join { job, settings, member } => self.on_join(job, settings, member, now),
            Request::Prepare { job, .. }
            | Request::Accept { job, .. }
            | Request::Commit { job, .. }
            | Request::Invite { job }
            | Request::Over { job }
                if own_job != 0 && job != own_job =>
            {
                Reply::Refused("this is a member of another training".to_owned())
            }
            _ if self.is_over && !matches!(request, Request::Over { .. }) => Reply::Over,
            Request::Prepare { job, epoch, ballot } => self.on_prepare(job, epoch, ballot, now),
            Request::Accept { number, ballot, members, .. } => self.on_accept(number, ballot, members),
            Request::Commit { job, epoch } => {
                self.adopt(job, epoch, now);
                Reply::Noted
            }
            Request::Invite { .. } if self.is_member() => self.newest().unwrap_or(Reply::Noted),
            Request::Invite { .. } => Reply::Ready,
            Request::Over { .. } => {
                if !self.is_over {
                    self.is_over = true;
                    self.events.push_back(Event::Over);
                }
                Reply::Noted
            }
        }
    }

    fn newest(&self) -> Option<Reply> {
        Some(Reply::Newest { job: self.job?, epoch: self.epoch.clone()? })
    }

    fn on_join(&mut self, job: u128, settings: u64, member: Member, now: Duration) -> Reply {
        if self.job.is_some_and(|own| job != 0 && job != own) {
            return Reply::Refused("this is a member of another training".to_owned());
        }
        if self.is_over {
            return Reply::Over;
        }
        if settings != self.start.settings {
            return Reply::Refused(
                "it was started with other flags than the members of this training: model, batches, seed and the like have to be the \
                 same"
                    .to_owned(),
            );
        }
        let Some(newest) = self.newest() else { return Reply::Refused(UNKNOWN.to_owned()) };
        let is_inside = self.epoch.as_ref().is_some_and(|epoch| epoch.rank_of(member.id).is_some());
        if self.is_member()
            && !is_inside
            && (self.waiting.len() < MOST_WAITING || self.waiting.contains_key(&member.id))
        {
            let is_new = !self.waiting.contains_key(&member.id);
            let known = self.waiting.entry(member.id).or_insert(Waiting { member, heard: now, counts_from: now });
            (known.member, known.heard) = (member, now);
            if let (true, Proposal::None { not_before }) = (is_new && self.changing.is_some(), &mut self.proposal) {
                // It may be the one that was missing.
                *not_before = now.min(*not_before);
            }
        }
        newest
    }

    fn on_prepare(&mut self, job: u128, epoch: Epoch, ballot: Ballot, now: Duration) -> Reply {
        if epoch.rank_of(self.start.own.id).is_none() {
            return self.newest().unwrap_or_else(|| Reply::Refused(UNKNOWN.to_owned()));
        }
        let leader = epoch.members.get(ballot.by as usize).map(|member| member.address);
        // A world from which somebody wants to go on has been decided.
        let number = epoch.number;
        self.adopt(job, epoch, now);
        if self.epoch.as_ref().is_some_and(|own| own.number > number) {
            return self.newest().unwrap_or(Reply::Noted);
        }
        self.changing.get_or_insert(now);
        if self.acceptor.promised.is_some_and(|promised| promised > ballot) {
            return Reply::Nack { promised: self.acceptor.promised.unwrap_or(ballot) };
        }
        self.acceptor.promised = Some(ballot);
        self.round = self.round.max(ballot.round);
        self.lacks = leader.map(|at| {
            format!(
                "rank {} of world {number} ({at}) has not found enough of them, and says what is missing",
                ballot.by
            )
        });
        // Two that propose at the same time get nowhere.
        let later = now + PATIENT + self.turn();
        self.proposal = Proposal::None { not_before: later };
        let waiting = self.those_waiting(now);
        Reply::Promise { accepted: self.acceptor.accepted.clone(), waiting }
    }

    fn on_accept(&mut self, number: u64, ballot: Ballot, members: Vec<Member>) -> Reply {
        match self.epoch.as_ref().map(|epoch| epoch.number + 1) {
            Some(next) if next == number => {}
            Some(next) if next > number => return self.newest().unwrap_or(Reply::Noted),
            _ => return Reply::Refused(UNKNOWN.to_owned()),
        }
        if let Some(promised) = self.acceptor.promised.filter(|promised| *promised > ballot) {
            return Reply::Nack { promised };
        }
        self.acceptor = Acceptor { promised: Some(ballot), accepted: Some((ballot, members)) };
        Reply::Accepted
    }

    /// Takes over a world that was decided, if it is newer than what this process knows.
    fn adopt(&mut self, job: u128, epoch: Epoch, now: Duration) {
        if self.epoch.as_ref().is_some_and(|own| own.number >= epoch.number) || self.job.is_some_and(|own| own != job) {
            return;
        }
        (self.job, self.acceptor, self.changing, self.lacks) = (Some(job), Acceptor::default(), None, None);
        self.lost.clear();
        self.proposal = Proposal::None { not_before: now };
        self.waiting.retain(|id, _| epoch.rank_of(*id).is_none());
        // If there was room for those who were not let in, they could not be reached.
        let n = epoch.members.len();
        if self.start.sizes.largest(n + self.waiting.len()).is_some_and(|most| most > n) {
            self.waiting.values_mut().for_each(|one| one.counts_from = now + LEFT_OUT);
        }
        let is_in = epoch.rank_of(self.start.own.id).is_some();
        self.events.push_back(if is_in { Event::In(epoch.clone()) } else { Event::Out(epoch.clone()) });
        self.epoch = Some(epoch);
        self.dials.answered = now;
        if is_in {
            self.has_failed = false;
        } else {
            self.waiting.clear();
        }
    }

    /// What is to be said now.
    pub fn poll(&mut self, now: Duration) -> Vec<Call> {
        self.waiting.retain(|_, one| one.is_here(now));
        if self.is_over || self.has_failed {
            return Vec::new();
        }
        match self.is_member() {
            true => self.propose(now),
            false => self.dial(now).into_iter().collect(),
        }
    }

    /// When [`Protocol::poll`] may have something to say, if nothing happens until then.
    pub fn next_poll(&self, now: Duration) -> Duration {
        match (&self.proposal, self.changing) {
            _ if !self.is_member() => self.dials.next,
            (Proposal::None { not_before }, Some(_)) => *not_before,
            _ => now + DIAL,
        }
    }

    fn dial(&mut self, now: Duration) -> Option<Call> {
        if now >= self.dials.answered + self.start.patience {
            let addresses: Vec<String> = self.addresses().iter().map(ToString::to_string).collect();
            let waited = self.start.patience.as_secs_f64();
            self.fail(Error::deadline_exceeded(format!(
                "no member of the training has answered for {waited:.1} s, of {}; is it under way, and does it listen there?",
                if addresses.is_empty() { "none that is known".to_owned() } else { addresses.join(", ") }
            )));
            return None;
        }
        if self.dials.open.is_some() || now < self.dials.next {
            return None;
        }
        let addresses = self.addresses();
        let to = *addresses.get(self.dials.at % addresses.len().max(1))?;
        self.dials.at += 1;
        self.dials.next = now + DIAL;
        let (job, settings) = (self.job.unwrap_or(0), self.start.settings);
        let call = self.call(to, Request::Join { job, settings, member: self.start.own });
        self.dials.open = Some(call.number);
        Some(call)
    }

    /// Where members may be: those of the newest world, and those that were known at the start.
    fn addresses(&self) -> Vec<SocketAddr> {
        let mut all: Vec<SocketAddr> = Vec::new();
        let members = self.epoch.iter().flat_map(|epoch| &epoch.members).map(|member| member.address);
        for address in members.chain(self.start.known.iter().copied()) {
            if address != self.start.own.address && !all.contains(&address) {
                all.push(address);
            }
        }
        all
    }

    fn propose(&mut self, now: Duration) -> Vec<Call> {
        let Some(since) = self.changing else { return Vec::new() };
        if now >= since + self.start.patience {
            let waited = self.start.patience.as_secs_f64();
            let why = self.lacks.take().unwrap_or_else(|| "those who are there did not agree".to_owned());
            self.fail(Error::deadline_exceeded(format!(
                "the ranks that are left have waited {waited:.1} s to go on together: {why}"
            )));
            return Vec::new();
        }
        let Proposal::None { not_before } = self.proposal else { return Vec::new() };
        if now < not_before.max(since + self.turn()) {
            return Vec::new();
        }
        let (Some(job), Some(epoch)) = (self.job, self.epoch.clone()) else { return Vec::new() };
        self.round += 1;
        let by = epoch.rank_of(self.start.own.id).unwrap_or(0) as u32;
        let ballot = Ballot { round: self.round, by };
        // Its own promise. It has promised nothing higher, since its round would be higher, too.
        self.acceptor.promised = Some(ballot);
        let promised = BTreeMap::from([(self.start.own.id, self.acceptor.accepted.clone())]);
        // Those who seem to be lost are not waited for at first. They may be there, and are asked if it does not go on without.
        let (lost, own) = (std::mem::take(&mut self.lost), self.start.own.id);
        let (mut open, mut calls) = (BTreeMap::new(), Vec::new());
        for member in epoch.members.iter().filter(|member| member.id != own && !lost.contains(&member.id)) {
            let call = self.call(member.address, Request::Prepare { job, epoch: epoch.clone(), ballot });
            open.insert(call.number, member.id);
            calls.push(call);
        }
        let waiting = self.those_waiting(now);
        self.proposal = Proposal::Preparing { ballot, open, promised, waiting };
        calls.extend(self.go_on(now));
        calls
    }

    /// Takes the next stage of a proposal, if nothing is missing for it.
    fn go_on(&mut self, now: Duration) -> Vec<Call> {
        let (Some(job), Some(epoch)) = (self.job, self.epoch.clone()) else { return Vec::new() };
        match std::mem::replace(&mut self.proposal, Proposal::None { not_before: now }) {
            Proposal::Preparing { ballot, open, promised, waiting } if open.is_empty() => {
                if !epoch.is_quorum(|id| promised.contains_key(&id)) {
                    let missing: Vec<String> = epoch
                        .members
                        .iter()
                        .enumerate()
                        .filter(|(_, member)| !promised.contains_key(&member.id))
                        .map(|(rank, member)| format!("{rank} ({})", member.address))
                        .collect();
                    self.lacks = Some(format!(
                        "{} of {} members of world {} are there, and rank {} is missing; more than half are needed, or half with rank 0",
                        promised.len(),
                        epoch.members.len(),
                        epoch.number,
                        missing.join(" and ")
                    ));
                    self.pause(now);
                    return Vec::new();
                }
                // What may have been decided already has to be proposed again.
                let accepted = promised.values().flatten().max_by_key(|(ballot, _)| *ballot);
                if let Some((_, members)) = accepted {
                    let members = members.clone();
                    return self.ask_to_accept(ballot, members, now);
                }
                let here: Vec<Member> =
                    epoch.members.iter().filter(|member| promised.contains_key(&member.id)).copied().collect();
                let mut open = BTreeMap::new();
                let mut calls = Vec::new();
                for member in waiting {
                    let call = self.call(member.address, Request::Invite { job });
                    open.insert(call.number, member);
                    calls.push(call);
                }
                self.proposal = Proposal::Inviting { ballot, open, here, ready: Vec::new() };
                if calls.is_empty() {
                    calls = self.go_on(now);
                }
                calls
            }
            Proposal::Inviting { ballot, open, here, mut ready } if open.is_empty() => {
                ready.sort_by_key(|member| (member.wish, member.id));
                let n_here = here.len() + ready.len();
                let mut members = here;
                members.extend(ready);
                match self.size(&epoch, n_here, now) {
                    Some(n) => {
                        if n < n_here {
                            let spare = n_here - n;
                            let sizes = self.start.sizes.describe();
                            self.events.push_back(Event::Note(format!(
                                "{n_here} ranks are there; {n} train, and {spare} wait, because {sizes}"
                            )));
                        }
                        members.truncate(n);
                        self.ask_to_accept(ballot, members, now)
                    }
                    None => {
                        let wanted = if epoch.number == 0 { self.start.start_with } else { self.start.sizes.least() };
                        self.lacks = Some(format!("{n_here} are there, and {wanted} are needed"));
                        self.pause(now);
                        Vec::new()
                    }
                }
            }
            Proposal::Accepting { ballot, open, accepted, members } => {
                if epoch.is_quorum(|id| accepted.contains(&id)) {
                    return self.decided(Epoch { number: epoch.number + 1, members }, now);
                }
                match open.is_empty() {
                    true => self.pause(now),
                    false => self.proposal = Proposal::Accepting { ballot, open, accepted, members },
                }
                Vec::new()
            }
            unchanged => {
                self.proposal = unchanged;
                Vec::new()
            }
        }
    }

    /// With how many of those who are there training can go on; none if they wait for more.
    fn size(&self, epoch: &Epoch, n_here: usize, now: Duration) -> Option<usize> {
        let size = self.start.sizes.largest(n_here);
        // The training begins with as many as was said, or in the end with those who have come.
        let is_late = self.changing.is_some_and(|since| now >= since + self.start.patience / 2);
        size.filter(|n| epoch.number > 0 || *n >= self.start.start_with || is_late)
    }

    fn ask_to_accept(&mut self, ballot: Ballot, members: Vec<Member>, now: Duration) -> Vec<Call> {
        let (Some(job), Some(epoch)) = (self.job, self.epoch.clone()) else { return Vec::new() };
        if self.acceptor.promised.is_some_and(|promised| promised > ballot) {
            self.pause(now);
            return Vec::new();
        }
        self.acceptor = Acceptor { promised: Some(ballot), accepted: Some((ballot, members.clone())) };
        let (mut open, mut calls, own) = (BTreeMap::new(), Vec::new(), self.start.own.id);
        for member in epoch.members.iter().filter(|member| member.id != own) {
            let request = Request::Accept { job, number: epoch.number + 1, ballot, members: members.clone() };
            let call = self.call(member.address, request);
            open.insert(call.number, member.id);
            calls.push(call);
        }
        let accepted = BTreeSet::from([self.start.own.id]);
        self.proposal = Proposal::Accepting { ballot, open, accepted, members };
        calls.extend(self.go_on(now));
        calls
    }

    fn decided(&mut self, next: Epoch, now: Duration) -> Vec<Call> {
        let (Some(job), Some(before)) = (self.job, self.epoch.clone()) else { return Vec::new() };
        self.adopt(job, next.clone(), now);
        let mut told = BTreeSet::from([self.start.own.id]);
        let all = next.members.iter().chain(&before.members).copied().collect::<Vec<Member>>();
        all.into_iter()
            .filter(|member| told.insert(member.id))
            .map(|member| self.call(member.address, Request::Commit { job, epoch: next.clone() }))
            .collect()
    }

    /// What was answered to a call; none if nobody did in time. Gives what is to be said next.
    pub fn answered(&mut self, number: u64, reply: Option<Reply>, now: Duration) -> Vec<Call> {
        if self.is_over {
            return Vec::new();
        }
        if self.dials.open == Some(number) {
            self.dials.open = None;
            self.on_dialed(reply, now);
            return Vec::new();
        }
        match reply {
            Some(Reply::Newest { job, epoch }) if self.epoch.as_ref().is_some_and(|own| own.number < epoch.number) => {
                self.adopt(job, epoch, now);
                return Vec::new();
            }
            Some(Reply::Over) => {
                self.is_over = true;
                self.events.push_back(Event::Over);
                return Vec::new();
            }
            _ => {}
        }
        match &mut self.proposal {
            Proposal::Preparing { open, promised, waiting, .. } => match (open.remove(&number), reply) {
                (Some(id), Some(Reply::Promise { accepted, waiting: theirs })) => {
                    promised.insert(id, accepted);
                    for one in theirs {
                        if waiting.len() < MOST_WAITING && waiting.iter().all(|known| known.id != one.id) {
                            waiting.push(one);
                        }
                    }
                }
                (Some(_), Some(Reply::Nack { promised })) => {
                    self.outbid(promised, now);
                    return Vec::new();
                }
                _ => {}
            },
            Proposal::Inviting { open, ready, .. } => {
                if let (Some(member), Some(Reply::Ready)) = (open.remove(&number), reply) {
                    ready.push(member);
                }
            }
            Proposal::Accepting { open, accepted, .. } => match (open.remove(&number), reply) {
                (Some(id), Some(Reply::Accepted)) => drop(accepted.insert(id)),
                (Some(_), Some(Reply::Nack { promised })) => {
                    self.outbid(promised, now);
                    return Vec::new();
                }
                _ => {}
            },
            _ => return Vec::new(),
        }
        self.go_on(now)
    }

    fn on_dialed(&mut self, reply: Option<Reply>, now: Duration) {
        match reply {
            Some(Reply::Newest { job, epoch }) => {
                self.dials.answered = now;
                self.adopt(job, epoch, now);
            }
            Some(Reply::Over) => {
                self.is_over = true;
                self.events.push_back(Event::Over);
            }
            Some(Reply::Refused(why)) if why != UNKNOWN => {
                self.fail(Error::failed_precondition(format!(
                    "a member of the training does not let this process in: {why}"
                )));
            }
            _ => {}
        }
    }

    /// Somebody has a higher ballot.
    fn outbid(&mut self, promised: Ballot, now: Duration) {
        self.round = self.round.max(promised.round);
        self.proposal = Proposal::None { not_before: now + PATIENT + self.turn() + self.jitter() };
    }

    fn pause(&mut self, now: Duration) {
        self.proposal = Proposal::None { not_before: now + AGAIN + self.jitter() };
    }

    /// How long those before this member have the word.
    fn turn(&self) -> Duration {
        let Some(epoch) = &self.epoch else { return Duration::ZERO };
        let before = epoch.members.iter().take_while(|member| member.id != self.start.own.id);
        TURN * before.filter(|member| !self.lost.contains(&member.id)).count().min(20) as u32
    }

    fn jitter(&mut self) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        Duration::from_millis(self.random % 150)
    }

    fn those_waiting(&self, now: Duration) -> Vec<Member> {
        let here = self.waiting.values().filter(|one| one.is_here(now));
        here.map(|one| one.member).take(MOST_MEMBERS).collect()
    }

    fn fail(&mut self, error: Error) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.events.push_back(Event::Failed(error));
        }
    }

    fn call(&mut self, to: SocketAddr, request: Request) -> Call {
        self.n_calls += 1;
        Call { number: self.n_calls, to, request }
    }
}

impl Waiting {
    fn is_here(&self, now: Duration) -> bool {
        now < self.heard + WAITS
    }
}

/// What one says who does not know the training itself.
const UNKNOWN: &str = "this process is in no training yet";
