//! Collectives of ranks that share memory, in rounds of a [`SharedGroup`]: a rank publishes a piece of its data, and reads what it
//! needs from the buffers of the others.

use std::ops::Range;

use kolo_core::{DType, Result, Tensor};
use kolo_device::cpu::reduce::{ReduceOp, reduce};
use kolo_device::shared_group::{Meeting, Published, SharedGroup, WaitLimits};
use kolo_ops::collective::{CollectiveKind, Root};

use super::pieces::cut;
use super::signature::{SIGNATURE_BYTES, Signature};
use super::uneven::{TOLD_BYTES, Uneven};
use super::vector::{Vector, with_rows};

/// Up to this size every rank reduces everything by itself: reading a peer's vector twice costs less than meeting twice.
const SMALL_BYTES: usize = 32 << 10;

/// Pieces of a vector that goes in several have so many bytes: less is not worth meeting for, more does not stay in the caches
/// until its sum is there.
const LEAST_BYTES: usize = 128 << 10;
const CACHED_BYTES: usize = 256 << 10;

/// Pieces of vectors begin at multiples of this, so that ranks write to different cache lines and elements are aligned.
pub(super) const PIECE: usize = 64;

/// A call that is under way.
pub(super) struct Exchange<'a> {
    pub group: &'a mut SharedGroup,
    pub signature: &'a Signature,
    pub limits: WaitLimits<'a>,
    /// No round of it has begun.
    pub is_first: bool,
}

impl<'a> Exchange<'a> {
    pub fn run(mut self, kind: CollectiveKind, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        match kind {
            CollectiveKind::AllReduce(op) => self.all_reduce(Vector::new(tensors)?, op),
            CollectiveKind::Reduce(op, Root(root)) => self.reduce(Vector::new(tensors)?, op, Some(root)),
            CollectiveKind::Broadcast(Root(root)) => self.broadcast(Vector::new(tensors)?, root),
            CollectiveKind::AllGather => self.gather(&tensors[0], None),
            CollectiveKind::Gather(Root(root)) => self.gather(&tensors[0], Some(root)),
            CollectiveKind::ReduceScatter(op) => self.reduce_scatter(&tensors[0], op),
            CollectiveKind::Scatter(Root(root)) => self.scatter(&tensors[0], root),
            CollectiveKind::AllToAll => self.all_to_all(&tensors[0]),
            CollectiveKind::AllGatherUneven
            | CollectiveKind::GatherUneven(_)
            | CollectiveKind::ScatterUneven(_)
            | CollectiveKind::AllToAllUneven
            | CollectiveKind::SendReceive => self.uneven(kind, &tensors),
            CollectiveKind::Barrier => self.publish(|_| Ok(())).map(|_| Vec::new()),
        }
    }

    /// Begins a round: `fill` writes this rank's data. In the first one, all ranks compare what they are about to do.
    fn publish(&mut self, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Meeting<'_>> {
        self.publish_after(|data, _| fill(data))
    }

    /// As [`Exchange::publish`]; `fill` may also read what others published in the round before.
    fn publish_after(
        &mut self,
        fill: impl FnOnce(&mut [u8], Option<Published<'_>>) -> Result<()>,
    ) -> Result<Meeting<'_>> {
        let rank = self.group.rank();
        let n_ranks = self.group.n_ranks();
        let is_first = std::mem::replace(&mut self.is_first, false);
        let mut round = self.group.begin(&self.limits)?;
        let (buffer, before) = round.buffer_and_before();
        let (head, data) = buffer.split_at_mut(SIGNATURE_BYTES);
        if is_first {
            self.signature.write(head);
        }
        fill(data, before)?;
        let meeting = round.publish();
        if is_first {
            let published = meeting.published();
            published.wait_all(&self.limits)?;
            for other in (0..n_ranks).filter(|other| *other != rank) {
                self.signature.check(rank, other, published.of(other)?)?;
            }
        }
        Ok(meeting)
    }

    /// Bytes of data in a round.
    fn room(&self) -> usize {
        self.group.buffer_bytes() - SIGNATURE_BYTES
    }

    fn all_reduce(&mut self, vector: Vector, op: ReduceOp) -> Result<Vec<Tensor>> {
        if vector.n_bytes() <= SMALL_BYTES || self.group.n_ranks() == 1 {
            return self.reduce(vector, op, None);
        }
        self.all_reduce_in_slices(vector, op)
    }

    /// Each rank reduces a slice of every piece. In a round it publishes what others need to reduce a piece, and what it has reduced
    /// of the piece before; the results of the piece before that are there already, so a rank waits only once for each piece, and
    /// for others that are more than half of one behind.
    fn all_reduce_in_slices(&mut self, mut vector: Vector, op: ReduceOp) -> Result<Vec<Tensor>> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let Some(dtype) = vector.dtype() else { return Ok(Vec::new()) };
        // A buffer has a slot for each rank's slice.
        let slot = slot_bytes(vector.n_bytes(), self.room(), n_ranks, self.group.has_cores());
        let pieces: Vec<Range<usize>> = pieces(vector.n_bytes(), slot * n_ranks).collect();
        let slice = |piece: &Range<usize>, rank: usize| {
            let part = part(piece.len(), rank, n_ranks);
            piece.start + part.start..piece.start + part.end
        };
        // Not all ranks read from the same one at the same time.
        let others = || (rank + 1..n_ranks).chain(0..rank);
        let copy_results = |vector: &mut Vector, piece: &Range<usize>, published: Published<'_>| {
            others().try_for_each(|other| {
                let slice = slice(piece, other);
                let reduced = &published.of(other)?[SIGNATURE_BYTES + other * slot..][..slice.len()];
                vector.write(slice.start, reduced)
            })
        };
        for i in 0..=pieces.len() {
            let meeting = self.publish_after(|data, before| {
                if let Some(piece) = pieces.get(i) {
                    others().try_for_each(|other| {
                        let slice = slice(piece, other);
                        vector.read(slice.start, &mut data[other * slot..][..slice.len()])
                    })?;
                }
                let Some((piece, before)) = i.checked_sub(1).map(|i| &pieces[i]).zip(before) else { return Ok(()) };
                before.wait_all(&limits)?;
                let own = SIGNATURE_BYTES + rank * slot;
                let theirs = |ranks: Range<usize>| {
                    ranks.map(|other| Ok(&before.of(other)?[own..own + slot])).collect::<Result<Vec<&[u8]>>>()
                };
                let (lower, higher) = (theirs(0..rank)?, theirs(rank + 1..n_ranks)?);
                let results = &mut data[rank * slot..];
                vector.reduce(slice(piece, rank), (dtype, op), (&lower, &higher), |at, reduced| {
                    results[at..at + reduced.len()].copy_from_slice(reduced);
                })
            })?;
            if let (Some(i), Some(before)) = (i.checked_sub(2), meeting.before()) {
                copy_results(&mut vector, &pieces[i], before)?;
            }
            if let (true, Some(last)) = (i == pieces.len(), pieces.last()) {
                meeting.published().wait_all(&limits)?;
                copy_results(&mut vector, last, meeting.published())?;
            }
        }
        Ok(vector.into_tensors())
    }

    /// Each rank combines its slice of the vectors of all, in place. Slices may be empty.
    pub fn reduce_slices(
        &mut self,
        vector: &mut Vector,
        slices: &[Range<usize>],
        how: (DType, ReduceOp),
    ) -> Result<()> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        // One slice alone has the whole buffer.
        let is_one = slices.iter().filter(|slice| !slice.is_empty()).count() == 1;
        let slot = if is_one { self.room() / PIECE * PIECE } else { self.room_for_each() };
        let at = |rank: usize| if is_one { 0 } else { rank * slot };
        let longest = slices.iter().map(Range::len).max().unwrap_or(0);
        for i in 0..longest.div_ceil(slot) {
            let part = |rank: usize| cut(&slices[rank], i, slot);
            let meeting = self.publish(|data| {
                (0..n_ranks).filter(|other| *other != rank).try_for_each(|other| {
                    let part = part(other);
                    vector.read(part.start, &mut data[at(other)..][..part.len()])
                })
            })?;
            let own = part(rank);
            if own.is_empty() {
                continue;
            }
            let published = meeting.published();
            published.wait_all(&limits)?;
            let theirs = |ranks: Range<usize>| {
                let of = |other| Ok(&published.of(other)?[SIGNATURE_BYTES + at(rank)..][..own.len()]);
                ranks.map(of).collect::<Result<Vec<&[u8]>>>()
            };
            let (lower, higher) = (theirs(0..rank)?, theirs(rank + 1..n_ranks)?);
            vector.reduce(own.clone(), how, (&lower, &higher), |_, _| ())?;
        }
        Ok(())
    }

    /// Each rank gets the slices of all others.
    pub fn share_slices(&mut self, vector: &mut Vector, slices: &[Range<usize>]) -> Result<()> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let room = self.room() / PIECE * PIECE;
        let longest = slices.iter().map(Range::len).max().unwrap_or(0);
        for i in 0..longest.div_ceil(room) {
            let own = cut(&slices[rank], i, room);
            let meeting = self.publish(|data| vector.read(own.start, &mut data[..own.len()]))?;
            let published = meeting.published();
            // Not all ranks read from the same one at the same time.
            for other in (rank + 1..n_ranks).chain(0..rank) {
                let part = cut(&slices[other], i, room);
                if !part.is_empty() {
                    published.wait(other, &limits)?;
                    vector.write(part.start, &published.of(other)?[SIGNATURE_BYTES..][..part.len()])?;
                }
            }
        }
        Ok(())
    }

    /// Everything is reduced by one rank, or by every rank for itself.
    fn reduce(&mut self, mut vector: Vector, op: ReduceOp, root: Option<usize>) -> Result<Vec<Tensor>> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let Some(dtype) = vector.dtype() else { return Ok(Vec::new()) };
        for piece in pieces(vector.n_bytes(), self.room()) {
            let meeting = self.publish(|data| vector.read(piece.start, &mut data[..piece.len()]))?;
            if root.is_none_or(|root| root == rank) {
                let published = meeting.published();
                published.wait_all(&limits)?;
                let theirs = |ranks: Range<usize>| {
                    ranks.map(|other| Ok(&published.of(other)?[SIGNATURE_BYTES..])).collect::<Result<Vec<&[u8]>>>()
                };
                let (lower, higher) = (theirs(0..rank)?, theirs(rank + 1..n_ranks)?);
                vector.reduce(piece, (dtype, op), (&lower, &higher), |_, _| ())?;
            }
        }
        Ok(vector.into_tensors())
    }

    fn broadcast(&mut self, mut vector: Vector, root: usize) -> Result<Vec<Tensor>> {
        let (rank, limits) = (self.group.rank(), self.limits);
        for Range { start, end } in pieces(vector.n_bytes(), self.room()) {
            let n = end - start;
            if rank == root {
                self.publish(|data| vector.read(start, &mut data[..n]))?;
            } else {
                let meeting = self.publish(|_| Ok(()))?;
                let published = meeting.published();
                published.wait(root, &limits)?;
                vector.write(start, &published.of(root)?[SIGNATURE_BYTES..][..n])?;
            }
        }
        Ok(vector.into_tensors())
    }

    /// To all ranks, or to one.
    fn gather(&mut self, tensor: &Tensor, root: Option<usize>) -> Result<Vec<Tensor>> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let is_receiver = root.is_none_or(|root| root == rank);
        let mut all = match is_receiver {
            true => Some(with_rows(tensor, |rows| rows.checked_mul(n_ranks))?),
            false => None,
        };
        let own = tensor.host_bytes()?;
        for Range { start, end } in pieces(own.len(), self.room()) {
            let n = end - start;
            let meeting = self.publish(|data| {
                data[..n].copy_from_slice(&own[start..end]);
                Ok(())
            })?;
            let Some(all) = &mut all else { continue };
            let (all, published) = (all.host_bytes_mut()?, meeting.published());
            for other in 0..n_ranks {
                published.wait(other, &limits)?;
                let at = other * own.len() + start;
                all[at..at + n].copy_from_slice(&published.of(other)?[SIGNATURE_BYTES..][..n]);
            }
        }
        Ok(vec![all.unwrap_or_else(|| tensor.clone())])
    }

    fn reduce_scatter(&mut self, tensor: &Tensor, op: ReduceOp) -> Result<Vec<Tensor>> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let mut share = with_rows(tensor, |rows| rows.checked_div(n_ranks))?;
        let dtype = tensor.dtype();
        let to = share.host_bytes_mut()?;
        for Range { start, end } in pieces(to.len(), self.room_for_each()) {
            let n = end - start;
            let meeting = self.publish(|data| write_shares(tensor, n_ranks, start..end, data))?;
            let published = meeting.published();
            published.wait_all(&limits)?;
            let of = SIGNATURE_BYTES + rank * n..SIGNATURE_BYTES + (rank + 1) * n;
            let sources = (0..n_ranks).map(|other| Ok(&published.of(other)?[of.clone()]));
            reduce(dtype, op, &sources.collect::<Result<Vec<&[u8]>>>()?, &mut to[start..end])?;
        }
        Ok(vec![share])
    }

    fn scatter(&mut self, tensor: &Tensor, root: usize) -> Result<Vec<Tensor>> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let mut share = with_rows(tensor, |rows| rows.checked_div(n_ranks))?;
        let to = share.host_bytes_mut()?;
        for Range { start, end } in pieces(to.len(), self.room_for_each()) {
            let n = end - start;
            let meeting = self.publish(|data| match rank == root {
                true => write_shares(tensor, n_ranks, start..end, data),
                false => Ok(()),
            })?;
            let published = meeting.published();
            published.wait(root, &limits)?;
            to[start..end].copy_from_slice(&published.of(root)?[SIGNATURE_BYTES + rank * n..][..n]);
        }
        Ok(vec![share])
    }

    fn all_to_all(&mut self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let mut shares = with_rows(tensor, Some)?;
        let n_share = shares.n_bytes() / n_ranks;
        let to = shares.host_bytes_mut()?;
        for Range { start, end } in pieces(n_share, self.room_for_each()) {
            let n = end - start;
            let meeting = self.publish(|data| write_shares(tensor, n_ranks, start..end, data))?;
            let published = meeting.published();
            for other in 0..n_ranks {
                published.wait(other, &limits)?;
                let at = other * n_share + start;
                to[at..at + n].copy_from_slice(&published.of(other)?[SIGNATURE_BYTES + rank * n..][..n]);
            }
        }
        Ok(vec![shares])
    }

    /// Any numbers of rows: in the first round each rank tells each other how many it gets, and reads what all tell all, so that
    /// they go through as many rounds.
    fn uneven(&mut self, kind: CollectiveKind, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let uneven = Uneven::new(kind, rank, n_ranks, tensors)?;
        let (tensor, mut told) = (&tensors[0], vec![[0; TOLD_BYTES]; n_ranks]);
        let mut longest = 0;
        let meeting = self.publish(|data| {
            let places = data.chunks_exact_mut(TOLD_BYTES).take(n_ranks);
            places.enumerate().for_each(|(other, place)| place.copy_from_slice(&uneven.told(other)));
            Ok(())
        })?;
        let published = meeting.published();
        published.wait_all(&limits)?;
        for (other, told) in told.iter_mut().enumerate() {
            let all = &published.of(other)?[SIGNATURE_BYTES..][..n_ranks * TOLD_BYTES];
            for (to, one) in all.chunks_exact(TOLD_BYTES).enumerate() {
                let mut found = [0; TOLD_BYTES];
                found.copy_from_slice(one);
                longest = longest.max(uneven.bytes_told(found));
                if to == rank {
                    *told = found;
                }
            }
        }
        let mut coming = uneven.coming(tensor, &told)?;
        let own = tensor.host_bytes()?;
        let (to, places) = (coming.joined.host_bytes_mut()?, &coming.places);
        let (slot, n_slots) =
            if uneven.gives_all() { (self.room() / PIECE * PIECE, 1) } else { (self.room_for_each(), n_ranks) };
        for i in 0..longest.div_ceil(slot) {
            let meeting = self.publish(|data| {
                for other in 0..n_ranks {
                    let from = cut(&uneven.bytes_for(other), i, slot);
                    data[other % n_slots * slot..][..from.len()].copy_from_slice(&own[from]);
                    if n_slots == 1 && !uneven.bytes_for(other).is_empty() {
                        break;
                    }
                }
                Ok(())
            })?;
            let published = meeting.published();
            for (other, place) in places.iter().enumerate() {
                let place = cut(place, i, slot);
                if !place.is_empty() {
                    published.wait(other, &limits)?;
                    let at = SIGNATURE_BYTES + rank % n_slots * slot;
                    to[place.clone()].copy_from_slice(&published.of(other)?[at..][..place.len()]);
                }
            }
        }
        uneven.given(tensor, coming)
    }

    /// Bytes of data in a round for each rank.
    fn room_for_each(&self) -> usize {
        self.room() / self.group.n_ranks() / PIECE * PIECE
    }
}

/// Writes bytes `of` every rank's share of a tensor, one share after the other.
fn write_shares(tensor: &Tensor, n_ranks: usize, of: Range<usize>, to: &mut [u8]) -> Result<()> {
    let bytes = tensor.host_bytes()?;
    let n_share = bytes.len() / n_ranks;
    for rank in 0..n_ranks {
        let from = &bytes[rank * n_share + of.start..rank * n_share + of.end];
        to[rank * of.len()..(rank + 1) * of.len()].copy_from_slice(from);
    }
    Ok(())
}

/// A vector in pieces of at most `most`: one, even if there is nothing, since ranks still have to meet.
fn pieces(n_bytes: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let most = most / PIECE * PIECE;
    (0..n_bytes.div_ceil(most).max(1)).map(move |i| i * most..((i + 1) * most).min(n_bytes))
}

/// The part of `n` bytes that a rank reduces.
fn part(n: usize, rank: usize, n_ranks: usize) -> Range<usize> {
    let at = |rank: usize| (n.div_ceil(PIECE) * rank / n_ranks * PIECE).min(n);
    at(rank)..at(rank + 1)
}

/// The bytes of a slice of a piece: a vector goes in four pieces or more, so that ranks work beside each other, which stay in the
/// caches. Ranks that share cores have as few pieces as there is room for, since they take turns in each.
fn slot_bytes(n_bytes: usize, room: usize, n_ranks: usize, has_cores: bool) -> usize {
    let most = room / n_ranks / PIECE * PIECE;
    let wanted = (n_bytes / 4).clamp(LEAST_BYTES, CACHED_BYTES) / n_ranks;
    if has_cores { wanted.next_multiple_of(PIECE).min(most) } else { most }
}
