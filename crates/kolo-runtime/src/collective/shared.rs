//! Collectives of ranks that share memory, in rounds of a [`SharedGroup`]: a rank publishes a piece of its data, and reads what it
//! needs from the buffers of the others.

use std::ops::Range;

use kolo_core::{Error, Result, Tensor};
use kolo_device::cpu::reduce::{ReduceOp, reduce};
use kolo_device::shared_group::{Inputs, SharedGroup, WaitLimits};
use kolo_ops::collective::{CollectiveKind, Root};

use super::signature::{SIGNATURE_BYTES, Signature};
use super::vector::{Vector, with_rows};

/// Up to this size every rank reduces everything by itself: reading a peer's vector twice costs less than meeting twice.
const SMALL_BYTES: usize = 32 << 10;

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
            CollectiveKind::Reduce(op, Root(root)) => self.reduce(Vector::new(tensors)?, op, root),
            CollectiveKind::Broadcast(Root(root)) => self.broadcast(Vector::new(tensors)?, root),
            CollectiveKind::AllGather => self.gather(&tensors[0], None),
            CollectiveKind::Gather(Root(root)) => self.gather(&tensors[0], Some(root)),
            CollectiveKind::ReduceScatter(op) => self.reduce_scatter(&tensors[0], op),
            CollectiveKind::Scatter(Root(root)) => self.scatter(&tensors[0], root),
            CollectiveKind::AllToAll => self.all_to_all(&tensors[0]),
            CollectiveKind::Barrier => self.publish(|_| Ok(())).map(|_| Vec::new()),
        }
    }

    /// Begins a round: `fill` writes this rank's data. In the first one, all ranks compare what they are about to do.
    fn publish(&mut self, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Inputs<'_>> {
        let rank = self.group.rank();
        let n_ranks = self.group.n_ranks();
        let is_first = std::mem::replace(&mut self.is_first, false);
        let mut round = self.group.begin(&self.limits)?;
        let (head, data) = round.input().split_at_mut(SIGNATURE_BYTES);
        if is_first {
            self.signature.write(head);
        }
        fill(data)?;
        let mut inputs = round.publish();
        if is_first {
            inputs.wait_all(&self.limits)?;
            for other in (0..n_ranks).filter(|other| *other != rank) {
                self.signature.check(rank, other, inputs.input(other)?)?;
            }
        }
        Ok(inputs)
    }

    /// Bytes of data in a round.
    fn room(&self) -> usize {
        self.group.buffer_bytes() - SIGNATURE_BYTES
    }

    fn all_reduce(&mut self, mut vector: Vector, op: ReduceOp) -> Result<Vec<Tensor>> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let Some(dtype) = vector.dtype() else { return Ok(Vec::new()) };
        for Range { start, end } in pieces(vector.n_bytes(), self.room()) {
            let n = end - start;
            let mut inputs = self.publish(|data| vector.read(start, &mut data[..n]))?;
            inputs.wait_all(&limits)?;
            if n <= SMALL_BYTES || n_ranks == 1 {
                inputs.write_output(|output, inputs| {
                    reduce(dtype, op, &cut(inputs, 0..n), &mut output[..n])?;
                    vector.write(start, &output[..n])
                })??;
                continue;
            }
            // Each rank reduces a part, which the others then copy.
            let parts: Vec<Range<usize>> = (0..n_ranks).map(|rank| part(n, rank, n_ranks)).collect();
            let own = parts[rank].clone();
            inputs.write_output(|output, inputs| {
                reduce(dtype, op, &cut(inputs, own.clone()), &mut output[..own.len()])?;
                vector.write(start + own.start, &output[..own.len()])
            })??;
            let mut outputs = inputs.publish();
            // Not all ranks read from the same one at the same time.
            for other in (rank + 1..n_ranks).chain(0..rank) {
                let reduced = outputs.wait(other, &limits)?;
                vector.write(start + parts[other].start, &reduced[..parts[other].len()])?;
            }
        }
        Ok(vector.into_tensors())
    }

    fn reduce(&mut self, mut vector: Vector, op: ReduceOp, root: usize) -> Result<Vec<Tensor>> {
        let (rank, limits) = (self.group.rank(), self.limits);
        let Some(dtype) = vector.dtype() else { return Ok(Vec::new()) };
        for Range { start, end } in pieces(vector.n_bytes(), self.room()) {
            let n = end - start;
            let mut inputs = self.publish(|data| vector.read(start, &mut data[..n]))?;
            if rank == root {
                inputs.wait_all(&limits)?;
                inputs.write_output(|output, inputs| {
                    reduce(dtype, op, &cut(inputs, 0..n), &mut output[..n])?;
                    vector.write(start, &output[..n])
                })??;
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
                let mut inputs = self.publish(|_| Ok(()))?;
                inputs.wait(root, &limits)?;
                vector.write(start, &inputs.input(root)?[SIGNATURE_BYTES..][..n])?;
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
            let mut inputs = self.publish(|data| {
                data[..n].copy_from_slice(&own[start..end]);
                Ok(())
            })?;
            let Some(all) = &mut all else { continue };
            let all = all.host_bytes_mut()?;
            for other in 0..n_ranks {
                inputs.wait(other, &limits)?;
                let at = other * own.len() + start;
                all[at..at + n].copy_from_slice(&inputs.input(other)?[SIGNATURE_BYTES..][..n]);
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
            let mut inputs = self.publish(|data| write_shares(tensor, n_ranks, start..end, data))?;
            inputs.wait_all(&limits)?;
            inputs.write_output(|output, inputs| {
                reduce(dtype, op, &cut(inputs, rank * n..(rank + 1) * n), &mut output[..n])?;
                to[start..end].copy_from_slice(&output[..n]);
                Ok::<(), Error>(())
            })??;
        }
        Ok(vec![share])
    }

    fn scatter(&mut self, tensor: &Tensor, root: usize) -> Result<Vec<Tensor>> {
        let (rank, n_ranks, limits) = (self.group.rank(), self.group.n_ranks(), self.limits);
        let mut share = with_rows(tensor, |rows| rows.checked_div(n_ranks))?;
        let to = share.host_bytes_mut()?;
        for Range { start, end } in pieces(to.len(), self.room_for_each()) {
            let n = end - start;
            let mut inputs = self.publish(|data| match rank == root {
                true => write_shares(tensor, n_ranks, start..end, data),
                false => Ok(()),
            })?;
            inputs.wait(root, &limits)?;
            to[start..end].copy_from_slice(&inputs.input(root)?[SIGNATURE_BYTES + rank * n..][..n]);
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
            let mut inputs = self.publish(|data| write_shares(tensor, n_ranks, start..end, data))?;
            for other in 0..n_ranks {
                inputs.wait(other, &limits)?;
                let at = other * n_share + start;
                to[at..at + n].copy_from_slice(&inputs.input(other)?[SIGNATURE_BYTES + rank * n..][..n]);
            }
        }
        Ok(vec![shares])
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

/// A part of the data of all ranks.
fn cut<'i>(inputs: &[&'i [u8]], part: Range<usize>) -> Vec<&'i [u8]> {
    inputs.iter().map(|input| &input[SIGNATURE_BYTES + part.start..SIGNATURE_BYTES + part.end]).collect()
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
