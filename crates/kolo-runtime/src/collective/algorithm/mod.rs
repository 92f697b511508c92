//! Collectives as messages between ranks, over a [`Transport`]. One algorithm is a file:
//!
//! | file | all-reduce of S bytes on N ranks | hops | bytes that a rank sends |
//! | --- | --- | --- | --- |
//! | `whole.rs` | everybody sends everything to everybody | 1 | (N-1)·S |
//! | `direct.rs` | slices go straight to the rank that reduces them, and back from there | 2 | 2(N-1)/N·S |
//! | `ring.rs` | slices go round, and grow on the way | 2(N-1) | 2(N-1)/N·S |
//! | `halving_doubling.rs` | pairs exchange halves, then quarters, … | 2·log₂N | 2(N-1)/N·S |
//! | `tree.rs` | up a binomial tree and down again | 2·log₂N | up to 2·log₂N·S |
//! | `two_level.rs` | inside of each of H hosts, then between them | as others, on H ranks | as others, on H ranks, of S/(N/H) |
//!
//! `choice.rs` says which one a call takes. `rows.rs` moves rows, where nothing is reduced.

pub(super) mod choice;
mod direct;
mod halving_doubling;
mod ring;
mod rows;
mod tree;
pub(super) mod two_level;
mod whole;

use std::ops::Range;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::cpu::reduce::{ReduceOp, reduce_in_place};
use kolo_device::shared_group::WaitLimits;
use kolo_ops::collective::{CollectiveKind, Root};

use self::choice::{Algorithm, Choice};
use self::two_level::OwnHost;
use super::pieces::{Pieces, cut};
use super::signature::{SIGNATURE_BYTES, Signature};
use super::transport::{Incoming, Outgoing, Transport};
use super::uneven::Uneven;
use super::vector::{Vector, with_rows};

/// Slices begin at multiples of this in buffers, so that elements are aligned.
const ALIGNMENT: usize = 64;

/// A call that is under way.
pub(super) struct Call<'a> {
    pub transport: &'a mut dyn Transport,
    pub signature: &'a Signature,
    pub limits: WaitLimits<'a>,
    /// How much of a vector is under way at a time.
    pub buffer_bytes: usize,
    /// No message has been sent.
    pub is_first: bool,
    /// The memory of this rank's host, if ranks are on several.
    pub own_host: Option<&'a mut OwnHost>,
}

impl Call<'_> {
    pub fn run(
        mut self,
        kind: CollectiveKind,
        choice: &Choice<'_>,
        tensors: Vec<Tensor>,
        scratch: &mut Scratch,
    ) -> Result<Vec<Tensor>> {
        let n_ranks = self.n_ranks();
        let algorithm = self.signature.algorithm().unwrap_or(Algorithm::Direct);
        let given = match kind {
            CollectiveKind::AllReduce(op) => {
                let mut vector = Vector::new(tensors)?;
                match Reduction::new(op, vector.dtype())? {
                    Some(reduction) if algorithm == Algorithm::TwoLevel => {
                        two_level::all_reduce(&mut self, scratch, &mut vector, reduction, choice)?;
                    }
                    Some(reduction) => {
                        let pieces = &mut Pieces::new(vector.slices_mut()?);
                        all_reduce_by(&mut self, algorithm, scratch, pieces, reduction)?;
                    }
                    None => {}
                }
                vector.into_tensors()
            }
            CollectiveKind::Reduce(op, Root(root)) => {
                let mut vector = Vector::new(tensors)?;
                if let Some(reduction) = Reduction::new(op, vector.dtype())? {
                    let pieces = &mut Pieces::new(vector.slices_mut()?);
                    match algorithm {
                        Algorithm::Whole => whole::reduce(&mut self, scratch, pieces, reduction, root)?,
                        _ => direct::reduce(&mut self, scratch, pieces, reduction, root)?,
                    }
                }
                vector.into_tensors()
            }
            CollectiveKind::Broadcast(Root(root)) => {
                let mut vector = Vector::new(tensors)?;
                let pieces = &mut Pieces::new(vector.slices_mut()?);
                match algorithm {
                    Algorithm::Direct => direct::broadcast(&mut self, pieces, root)?,
                    _ => tree::broadcast(&mut self, pieces, root)?,
                }
                vector.into_tensors()
            }
            CollectiveKind::ReduceScatter(op) => {
                let mut share = with_rows(&tensors[0], |rows| rows.checked_div(n_ranks))?;
                if let Some(reduction) = Reduction::new(op, Some(share.dtype()))? {
                    let (from, to) = (tensors[0].host_bytes()?, share.host_bytes_mut()?);
                    match algorithm {
                        Algorithm::Ring => ring::reduce_scatter(&mut self, scratch, from, to, reduction)?,
                        _ => direct::reduce_scatter(&mut self, scratch, from, to, reduction)?,
                    }
                }
                vec![share]
            }
            CollectiveKind::AllGather => {
                let mut all = with_rows(&tensors[0], |rows| rows.checked_mul(n_ranks))?;
                let (own, to) = (tensors[0].host_bytes()?, all.host_bytes_mut()?);
                match algorithm {
                    Algorithm::Ring => ring::all_gather(&mut self, own, to)?,
                    _ => rows::all_gather(&mut self, own, to)?,
                }
                vec![all]
            }
            CollectiveKind::Gather(Root(root)) => vec![rows::gather(&mut self, &tensors[0], root)?],
            CollectiveKind::Scatter(Root(root)) => vec![rows::scatter(&mut self, &tensors[0], root)?],
            CollectiveKind::AllToAll => vec![rows::all_to_all(&mut self, &tensors[0])?],
            CollectiveKind::AllGatherUneven
            | CollectiveKind::GatherUneven(_)
            | CollectiveKind::ScatterUneven(_)
            | CollectiveKind::AllToAllUneven
            | CollectiveKind::SendReceive => {
                let uneven = Uneven::new(kind, self.rank(), n_ranks, &tensors)?;
                rows::uneven(&mut self, algorithm, &uneven, &tensors[0])?
            }
            CollectiveKind::Barrier => Vec::new(),
        };
        // Ranks meet, and compare what they do, even if there is nothing to send.
        if self.is_first {
            self.exchange(Vec::new(), Vec::new())?;
        }
        Ok(given)
    }

    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    pub fn n_ranks(&self) -> usize {
        self.transport.n_ranks()
    }

    /// The other ranks. Not all ranks send to the same one first.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, n_ranks) = (self.rank(), self.n_ranks());
        (rank + 1..n_ranks).chain(0..rank)
    }

    /// Sends and receives messages; empty ones do not exist. Before the first of them, each rank sends each other what it is about to
    /// do, and no message counts before that was compared.
    fn exchange(&mut self, sends: Vec<Outgoing<'_>>, receives: Vec<Incoming<'_>>) -> Result<()> {
        let sends = sends.into_iter().filter(|message| message.n_bytes() > 0);
        let receives = receives.into_iter().filter(|message| message.n_bytes() > 0);
        if !std::mem::replace(&mut self.is_first, false) {
            let (sends, mut receives) = (sends.collect::<Vec<_>>(), receives.collect::<Vec<_>>());
            return match sends.is_empty() && receives.is_empty() {
                true => Ok(()),
                false => self.transport.exchange(&sends, &mut receives, &self.limits),
            };
        }
        let (rank, signature) = (self.rank(), self.signature);
        let mut own = [0; SIGNATURE_BYTES];
        signature.write(&mut own);
        let mut theirs = vec![[0; SIGNATURE_BYTES]; self.n_ranks()];
        let check = |other: usize, found: &[u8]| signature.check(rank, other, found);
        let heads = self.others().map(|to| Outgoing { to, parts: vec![&own[..]] });
        let found = theirs.iter_mut().enumerate().filter(|(from, _)| *from != rank);
        let found = found.map(|(from, head)| Incoming { from, parts: vec![&mut head[..]], check: Some(&check) });
        let (sends, mut receives) = (heads.chain(sends).collect::<Vec<_>>(), found.chain(receives).collect::<Vec<_>>());
        self.transport.exchange(&sends, &mut receives, &self.limits)
    }
}

/// An all-reduce by one of the algorithms on one level.
fn all_reduce_by(
    call: &mut Call<'_>,
    algorithm: Algorithm,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
) -> Result<()> {
    match algorithm {
        Algorithm::Whole => whole::all_reduce(call, scratch, pieces, reduction),
        Algorithm::Direct | Algorithm::TwoLevel => direct::all_reduce(call, scratch, pieces, reduction),
        Algorithm::Ring => ring::all_reduce(call, scratch, pieces, reduction),
        Algorithm::HalvingDoubling => halving_doubling::all_reduce(call, scratch, pieces, reduction),
        Algorithm::Tree => tree::all_reduce(call, scratch, pieces, reduction),
    }
}

/// How elements are combined.
#[derive(Clone, Copy, Debug)]
struct Reduction {
    op: ReduceOp,
    dtype: DType,
    /// Bytes of an element.
    width: usize,
}

impl Reduction {
    /// `None` if there is nothing to reduce.
    fn new(op: ReduceOp, dtype: Option<DType>) -> Result<Option<Reduction>> {
        let Some(dtype) = dtype else { return Ok(None) };
        let width = dtype.size().ok_or_else(|| Error::internal(format!("{dtype} has no size")))?;
        Ok(Some(Reduction { op, dtype, width }))
    }

    /// For partial results: a mean is a sum until all ranks are in it.
    fn of_parts(self) -> Reduction {
        let op = match self.op {
            ReduceOp::Mean => ReduceOp::Sum,
            op => op,
        };
        Reduction { op, ..self }
    }

    /// Combines `own`, in pieces, with contiguous vectors of the ranks before and after it.
    fn run(self, before: &[&[u8]], own: Vec<&mut [u8]>, after: &[&[u8]]) -> Result<()> {
        let mut at = 0;
        for piece in own {
            let of = at..at + piece.len();
            let before: Vec<&[u8]> = before.iter().map(|source| &source[of.clone()]).collect();
            let after: Vec<&[u8]> = after.iter().map(|source| &source[of.clone()]).collect();
            reduce_in_place(self.dtype, self.op, &before, piece, &after)?;
            at = of.end;
        }
        Ok(())
    }

    /// What remains to be done with partial results when all ranks are in them.
    fn finish(self, pieces: Vec<&mut [u8]>, n_ranks: usize) -> Result<()> {
        match self.op {
            ReduceOp::Mean => {
                pieces.into_iter().try_for_each(|piece| kolo_device::cpu::reduce::divide(self.dtype, piece, n_ranks))
            }
            _ => Ok(()),
        }
    }
}

/// Memory for what arrives, kept between calls.
#[derive(Default)]
pub(super) struct Scratch(Option<Tensor>);

impl Scratch {
    /// `n` buffers of `n_bytes` each, aligned.
    fn buffers(&mut self, n: usize, n_bytes: usize) -> Result<Vec<&mut [u8]>> {
        let each = n_bytes.max(1).next_multiple_of(ALIGNMENT);
        if self.0.as_ref().is_none_or(|tensor| tensor.n_bytes() < n * each) {
            self.0 = Some(Tensor::zeros(DType::U64, [n * each / size_of::<u64>()])?);
        }
        let Some(tensor) = &mut self.0 else { return Ok(Vec::new()) };
        Ok(tensor.host_bytes_mut()?.chunks_mut(each).take(n).map(|buffer| &mut buffer[..n_bytes]).collect())
    }
}

/// A vector of `n_bytes`, cut into a slice of whole elements for each rank.
fn slices(n_bytes: usize, width: usize, n_ranks: usize) -> Vec<Range<usize>> {
    let at = |rank: usize| (n_bytes / width) as u128 * rank as u128 / n_ranks as u128;
    (0..n_ranks).map(|rank| at(rank) as usize * width..at(rank + 1) as usize * width).collect()
}

/// The size of parts in which `n` of them fill a buffer.
fn part_bytes(buffer_bytes: usize, n: usize) -> usize {
    (buffer_bytes / n.max(1) / ALIGNMENT * ALIGNMENT).max(ALIGNMENT)
}

/// What is only read from now on.
fn shared(parts: Vec<&mut [u8]>) -> Vec<&[u8]> {
    parts.into_iter().map(|part| &*part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_whole_elements_and_cover_a_vector() {
        for (n_bytes, width, n_ranks) in [(0, 4, 3), (4, 4, 3), (40, 8, 3), (4096, 2, 7), (24, 4, 6)] {
            let slices = slices(n_bytes, width, n_ranks);
            assert_eq!((slices[0].start, slices[n_ranks - 1].end), (0, n_bytes));
            assert!(slices.iter().all(|slice| slice.start % width == 0 && slice.end % width == 0));
            assert!(slices.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
        assert_eq!(slices(usize::MAX / 8 * 8, 8, 2)[0].end, usize::MAX / 16 * 8);
        assert_eq!([cut(&(10..25), 0, 8), cut(&(10..25), 1, 8), cut(&(10..25), 2, 8)], [10..18, 18..25, 25..25]);
        assert_eq!((part_bytes(1, 3), part_bytes(1000, 3)), (64, 320));
    }
}
