//! Inside each host first, through its memory, then between hosts by messages, and back: of N ranks on H hosts, each byte goes between
//! hosts as often as in an all-reduce of H ranks.
//!
//! If all hosts have as many ranks, each rank sums a slice of its host's vectors and exchanges it with the ranks at its place on other
//! hosts; otherwise the first rank of each host does all of it. The sum of a host is a branch of the fixed tree over ranks if its ranks
//! are a block of a power of two of them, and hosts are summed in the tree over hosts: then it has the bits of the fixed tree.

use kolo_core::{Error, Result};
use kolo_device::shared_group::{SharedGroup, WaitLimits};

use super::super::hosts::{Hosts, Layout};
use super::super::shared::Exchange;
use super::super::transport::{Incoming, Outgoing, Transport};
use super::super::vector::Vector;
use super::choice::Choice;
use super::{Call, Pieces, Reduction, Scratch, all_reduce_by, slices};

/// What the ranks of one host share.
pub(crate) struct OwnHost {
    pub group: SharedGroup,
    pub hosts: Hosts,
}

pub(super) fn all_reduce(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    vector: &mut Vector,
    reduction: Reduction,
    choice: &Choice<'_>,
) -> Result<()> {
    // All ranks compare what they do before those of a host wait for each other.
    call.exchange(Vec::new(), Vec::new())?;
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let Some(OwnHost { group, hosts }) = call.own_host.take() else {
        return Err(Error::internal("a call in two levels, and the ranks of a host do not share memory"));
    };
    let beside = hosts.beside(rank);
    let place = group.rank();
    let own_slices = match hosts.layout().is_even {
        true => slices(vector.n_bytes(), reduction.width, beside.len()),
        false => (0..beside.len()).map(|place| if place == 0 { 0..vector.n_bytes() } else { 0..0 }).collect(),
    };
    let (partial, own) = (reduction.of_parts(), own_slices[place].clone());
    in_host(call, group, beside, |exchange| exchange.reduce_slices(vector, &own_slices, (partial.dtype, partial.op)))?;
    if !own.is_empty() {
        let mut pieces = Pieces::new(vector.slices_mut()?);
        let [parts] = pieces.parts([own]);
        let mut part = Pieces::new(parts);
        between_hosts(call, scratch, &mut part, partial, &hosts.at_place(place), choice)?;
        let all = 0..part.n_bytes();
        let [sum] = part.parts([all]);
        reduction.finish(sum, n_ranks)?;
    }
    in_host(call, group, beside, |exchange| exchange.share_slices(vector, &own_slices))
}

/// A stage inside of a host. It ends as well if a rank of another host ends the group.
fn in_host(
    call: &Call<'_>,
    group: &mut SharedGroup,
    beside: &[usize],
    stage: impl FnOnce(&mut Exchange<'_>) -> Result<()>,
) -> Result<()> {
    let (transport, limits) = (&*call.transport, &call.limits);
    let stop = |peer: usize| match transport.ended() {
        Some(error) => Err(error),
        None => (limits.stop)(beside.get(peer).copied().unwrap_or(peer)),
    };
    let limits = WaitLimits { deadline: limits.deadline, stop: &stop };
    stage(&mut Exchange { group, signature: call.signature, limits, is_first: false })
}

fn between_hosts(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    part: &mut Pieces<'_>,
    reduction: Reduction,
    peers: &[usize],
    choice: &Choice<'_>,
) -> Result<()> {
    let rank = call.rank();
    let Some(place) = peers.iter().position(|peer| *peer == rank) else {
        return Err(Error::internal("a rank is not among those of its place"));
    };
    let layout = Some(Layout { n_hosts: peers.len(), most_ranks: 1, is_even: true, is_branches: true });
    let choice = Choice { n_ranks: peers.len(), layout, shares_memory: false, wanted: None, ..*choice };
    let algorithm = choice.choose(call.signature.kind(), Some(reduction.dtype), part.n_bytes());
    let (signature, limits, buffer_bytes) = (call.signature, call.limits, call.buffer_bytes);
    let mut among = Among { transport: &mut *call.transport, peers, place };
    let call = &mut Call { transport: &mut among, signature, limits, buffer_bytes, is_first: false, own_host: None };
    all_reduce_by(call, algorithm, scratch, part, reduction)
}

/// Some of the ranks of a transport, which count from 0 among themselves.
struct Among<'a> {
    transport: &'a mut dyn Transport,
    peers: &'a [usize],
    place: usize,
}

impl Transport for Among<'_> {
    fn rank(&self) -> usize {
        self.place
    }

    fn n_ranks(&self) -> usize {
        self.peers.len()
    }

    fn exchange(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        limits: &WaitLimits<'_>,
    ) -> Result<()> {
        let sends: Vec<Outgoing<'_>> =
            sends.iter().map(|message| Outgoing { to: self.peers[message.to], parts: message.parts.clone() }).collect();
        receives.iter_mut().for_each(|message| message.from = self.peers[message.from]);
        self.transport.exchange(&sends, receives, limits)
    }

    fn end(&self, reason: &str) {
        self.transport.end(reason);
    }

    fn ended(&self) -> Option<Error> {
        self.transport.ended()
    }

    fn n_bytes_sent(&self) -> u64 {
        self.transport.n_bytes_sent()
    }
}
