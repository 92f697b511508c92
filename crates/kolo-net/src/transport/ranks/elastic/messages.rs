//! What members say to each other about membership: one request and one reply on a connection of its own. Lengths are bounded, and
//! whatever arrives is checked; whoever says it has proved itself before (`greeting.rs`).

use std::net::{Ipv6Addr, SocketAddr};

use super::super::meet::octets;

/// The most members of a world, and of those who wait.
pub const MOST_MEMBERS: usize = 1024;

/// The longest message: two lists of members and what stands beside them.
pub(super) const MOST_BYTES: usize = 2 * (4 + MOST_MEMBERS * MEMBER) + 64 + MOST_TEXT;

/// A longer text is cut off.
const MOST_TEXT: usize = 600;

/// Bytes of a member: its id, its address, and the rank that it asks for.
const MEMBER: usize = 16 + 18 + 4;

/// A process, for as long as it lives: one that is started again is another member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId(pub u128);

/// A process that takes part in a training, or wants to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Who it is.
    pub id: MemberId,
    /// Where it listens for the others.
    pub address: SocketAddr,
    /// The rank that it would have if all came: those who come together are put in this order.
    pub wish: u32,
}

/// A world: the members that train together, in the order of their ranks, and the how manieth world of the training it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Epoch {
    /// Its number. World 0 is the founder alone, who waits for the others.
    pub number: u64,
    /// The members, by rank.
    pub members: Vec<Member>,
}

impl Epoch {
    /// The rank of a member.
    pub fn rank_of(&self, id: MemberId) -> Option<usize> {
        self.members.iter().position(|member| member.id == id)
    }

    /// Whether these members may decide about the next world: more than half, or half with the first. Any two such sets have a member
    /// in common.
    pub fn is_quorum(&self, is_in: impl Fn(MemberId) -> bool) -> bool {
        let n = self.members.iter().filter(|member| is_in(member.id)).count();
        let has_first = self.members.first().is_some_and(|first| is_in(first.id));
        2 * n > self.members.len() || (has_first && 2 * n == self.members.len())
    }
}

/// A number of a proposal; those of two members differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ballot {
    pub round: u32,
    pub by: u32,
}

/// A list of members that somebody proposes as the next world, or has accepted.
pub type Accepted = (Ballot, Vec<Member>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Asks for a promise to take part in no proposal for the world after this one below the ballot.
    Prepare { job: u128, epoch: Epoch, ballot: Ballot },
    /// Asks to accept a list as the world after the one of this number.
    Accept { job: u128, number: u64, ballot: Ballot, members: Vec<Member> },
    /// Says that a world is decided.
    Commit { job: u128, epoch: Epoch },
    /// Asks to be let in. `settings` is a number for what all have to agree on; the job is 0 as long as it is not known.
    Join { job: u128, settings: u64, member: Member },
    /// Asks one who waits whether it is still there.
    Invite { job: u128 },
    /// Says that the training has ended.
    Over { job: u128 },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To `Prepare`: what was accepted before, and who waits to be let in.
    Promise { accepted: Option<Accepted>, waiting: Vec<Member> },
    /// To `Accept`.
    Accepted,
    /// Another proposal with this ballot came before.
    Nack { promised: Ballot },
    /// The newest world that the member knows. To a `Join`, that it has been noted; to others, that they come too late.
    Newest { job: u128, epoch: Epoch },
    /// To `Invite`: it still waits.
    Ready,
    /// It has been noted, and there is nothing to say.
    Noted,
    /// The training has ended.
    Over,
    /// No, and why not.
    Refused(String),
}

/// Appends numbers.
struct Writer(Vec<u8>);

impl Writer {
    fn number<const N: usize>(&mut self, bytes: [u8; N]) {
        self.0.extend(bytes);
    }

    fn members(&mut self, members: &[Member]) {
        let members = &members[..members.len().min(MOST_MEMBERS)];
        self.number((members.len() as u32).to_le_bytes());
        for Member { id, address, wish } in members {
            self.number(id.0.to_le_bytes());
            self.number(octets(address.ip()));
            self.number(address.port().to_le_bytes());
            self.number(wish.to_le_bytes());
        }
    }

    fn epoch(&mut self, epoch: &Epoch) {
        self.number(epoch.number.to_le_bytes());
        self.members(&epoch.members);
    }

    fn ballot(&mut self, ballot: Ballot) {
        self.number(ballot.round.to_le_bytes());
        self.number(ballot.by.to_le_bytes());
    }
}

/// Takes numbers away from the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn u128(&mut self) -> Option<u128> {
        self.bytes().map(u128::from_le_bytes)
    }

    fn member(&mut self) -> Option<Member> {
        let id = MemberId(self.u128()?);
        let ip = Ipv6Addr::from(self.bytes::<16>()?).to_canonical();
        let port = u16::from_le_bytes(self.bytes()?);
        Some(Member { id, address: SocketAddr::new(ip, port), wish: self.u32()? })
    }

    fn members(&mut self) -> Option<Vec<Member>> {
        let n = self.u32()? as usize;
        // What is not there is not made room for.
        (n <= MOST_MEMBERS && n * MEMBER <= self.0.len()).then(|| (0..n).map(|_| self.member()).collect())?
    }

    fn epoch(&mut self) -> Option<Epoch> {
        Some(Epoch { number: self.u64()?, members: self.members()? })
    }

    fn ballot(&mut self) -> Option<Ballot> {
        Some(Ballot { round: self.u32()?, by: self.u32()? })
    }
}

impl Request {
    pub fn write(&self) -> Vec<u8> {
        let mut to = Writer(Vec::new());
        match self {
            Request::Prepare { job, epoch, ballot } => {
                to.number([1]);
                to.number(job.to_le_bytes());
                to.ballot(*ballot);
                to.epoch(epoch);
            }
            Request::Accept { job, number, ballot, members } => {
                to.number([2]);
                to.number(job.to_le_bytes());
                to.number(number.to_le_bytes());
                to.ballot(*ballot);
                to.members(members);
            }
            Request::Commit { job, epoch } => {
                to.number([3]);
                to.number(job.to_le_bytes());
                to.epoch(epoch);
            }
            Request::Join { job, settings, member } => {
                to.number([4]);
                to.number(job.to_le_bytes());
                to.number(settings.to_le_bytes());
                to.members(&[*member]);
            }
            Request::Invite { job } => {
                to.number([5]);
                to.number(job.to_le_bytes());
            }
            Request::Over { job } => {
                to.number([6]);
                to.number(job.to_le_bytes());
            }
        }
        to.0
    }

    /// `None` if no member says so.
    pub fn read(bytes: &[u8]) -> Option<Request> {
        let mut from = Reader(bytes);
        let [kind] = from.bytes()?;
        let job = from.u128()?;
        let request = match kind {
            1 => {
                let ballot = from.ballot()?;
                Request::Prepare { job, ballot, epoch: from.epoch()? }
            }
            2 => {
                let (number, ballot) = (from.u64()?, from.ballot()?);
                Request::Accept { job, number, ballot, members: from.members()? }
            }
            3 => Request::Commit { job, epoch: from.epoch()? },
            4 => {
                let settings = from.u64()?;
                let [member] = from.members()?[..] else { return None };
                Request::Join { job, settings, member }
            }
            5 => Request::Invite { job },
            6 => Request::Over { job },
            _ => return None,
        };
        from.0.is_empty().then_some(request)
    }
}

impl Reply {
    pub fn write(&self) -> Vec<u8> {
        let mut to = Writer(Vec::new());
        match self {
            Reply::Promise { accepted, waiting } => {
                to.number([1]);
                to.number([u8::from(accepted.is_some())]);
                if let Some((ballot, members)) = accepted {
                    to.ballot(*ballot);
                    to.members(members);
                }
                to.members(waiting);
            }
            Reply::Accepted => to.number([2]),
            Reply::Nack { promised } => {
                to.number([3]);
                to.ballot(*promised);
            }
            Reply::Newest { job, epoch } => {
                to.number([4]);
                to.number(job.to_le_bytes());
                to.epoch(epoch);
            }
            Reply::Ready => to.number([5]),
            Reply::Noted => to.number([6]),
            Reply::Over => to.number([7]),
            Reply::Refused(why) => {
                to.number([8]);
                to.0.extend(&why.as_bytes()[..why.len().min(MOST_TEXT)]);
            }
        }
        to.0
    }

    /// `None` if no member says so.
    pub fn read(bytes: &[u8]) -> Option<Reply> {
        let mut from = Reader(bytes);
        let [kind] = from.bytes()?;
        let reply = match kind {
            1 => {
                let accepted = match from.bytes()? {
                    [0] => None,
                    [1] => Some((from.ballot()?, from.members()?)),
                    _ => return None,
                };
                Reply::Promise { accepted, waiting: from.members()? }
            }
            2 => Reply::Accepted,
            3 => Reply::Nack { promised: from.ballot()? },
            4 => {
                let job = from.u128()?;
                Reply::Newest { job, epoch: from.epoch()? }
            }
            5 => Reply::Ready,
            6 => Reply::Noted,
            7 => Reply::Over,
            8 if from.0.len() <= MOST_TEXT => {
                return Some(Reply::Refused(String::from_utf8_lossy(from.0).into_owned()));
            }
            _ => return None,
        };
        from.0.is_empty().then_some(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(n: u32) -> Member {
        let address = format!("127.0.0.{}:{}", 1 + n % 200, 1000 + n).parse().unwrap();
        Member { id: MemberId(u128::from(n) << 70 | 5), address, wish: n }
    }

    fn requests() -> Vec<Request> {
        let (job, ballot) = (77 << 90, Ballot { round: 3, by: 9 });
        let members: Vec<Member> = (0..3).map(member).collect();
        let epoch = Epoch { number: 8, members: members.clone() };
        vec![
            Request::Prepare { job, epoch: epoch.clone(), ballot },
            Request::Accept { job, number: 5, ballot, members },
            Request::Commit { job, epoch },
            Request::Join { job: 0, settings: 4, member: member(7) },
            Request::Invite { job },
            Request::Over { job },
        ]
    }

    fn replies() -> Vec<Reply> {
        let ballot = Ballot { round: 1, by: 0 };
        let waiting = vec![member(1)];
        vec![
            Reply::Promise { accepted: None, waiting: Vec::new() },
            Reply::Promise { accepted: Some((ballot, vec![member(2), member(3)])), waiting },
            Reply::Accepted,
            Reply::Nack { promised: ballot },
            Reply::Newest { job: 4, epoch: Epoch { number: 1, members: vec![member(4)] } },
            Reply::Ready,
            Reply::Noted,
            Reply::Over,
            Reply::Refused("no".to_owned()),
        ]
    }

    #[test]
    fn what_is_said_is_what_is_heard_and_nothing_shorter_or_longer() {
        for request in requests() {
            let bytes = request.write();
            assert_eq!(Request::read(&bytes), Some(request));
            (0..bytes.len()).for_each(|n| assert_eq!(Request::read(&bytes[..n]), None, "{n} bytes"));
            assert_eq!(Request::read(&[&bytes[..], &[0]].concat()), None);
        }
        for reply in replies() {
            let bytes = reply.write();
            assert_eq!(Reply::read(&bytes), Some(reply.clone()));
            if !matches!(reply, Reply::Refused(_)) {
                (0..bytes.len()).for_each(|n| assert_eq!(Reply::read(&bytes[..n]), None, "{n} bytes"));
            }
        }
    }

    #[test]
    fn a_length_is_no_reason_to_make_room() {
        let mut bytes = Request::Commit { job: 1, epoch: Epoch { number: 1, members: Vec::new() } }.write();
        let at = bytes.len() - 4;
        for n in [1, MOST_MEMBERS as u32, u32::MAX] {
            bytes[at..].copy_from_slice(&n.to_le_bytes());
            assert_eq!(Request::read(&bytes), None);
        }
        let most = Reply::Promise {
            accepted: Some((Ballot { round: 0, by: 0 }, vec![member(0); MOST_MEMBERS])),
            waiting: vec![member(1); 2 * MOST_MEMBERS],
        };
        assert!(most.write().len() <= MOST_BYTES);
    }

    #[test]
    fn any_two_quorums_have_a_member_in_common() {
        for n in 1..=7u32 {
            let epoch = Epoch { number: 1, members: (0..n).map(member).collect() };
            let is_in = |set: u32| move |id: MemberId| set >> (id.0 >> 70) & 1 == 1;
            let quorums: Vec<u32> = (0..1 << n).filter(|set| epoch.is_quorum(is_in(*set))).collect();
            assert!(quorums.iter().all(|a| quorums.iter().all(|b| a & b != 0)), "of {n}");
            // Of any set and the rest, one may decide: nobody waits for want of a rule.
            assert!((0..1 << n).all(|set: u32| epoch.is_quorum(is_in(set)) != epoch.is_quorum(is_in(!set))));
        }
    }
}
