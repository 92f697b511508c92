//! One rank's end of a group: collectives as plain calls that return when they are done.

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result, Shape, Tensor};
use kolo_device::cpu::reduce::{ReduceOp, check_reducible, reduce};
use kolo_device::shared_group::{Inputs, SharedGroup, WaitLimits};
use kolo_ops::collective::{CollectiveCall, CollectiveKind, Root};

use super::signature::{SIGNATURE_BYTES, Signature};
use super::vector::Vector;

/// Up to this size every rank reduces everything by itself: reading a peer's vector twice costs less than meeting twice.
const SMALL_BYTES: usize = 32 << 10;

/// Pieces of vectors begin at multiples of this, so that ranks write to different cache lines and elements are aligned.
const PIECE: usize = 64;

/// A rank that waits this long says so in the log.
const LONG_WAIT: Duration = Duration::from_secs(10);

/// How a group works. All ranks use the same.
#[derive(Clone, Debug)]
pub struct CommunicatorOptions {
    /// A call that has waited so long for a rank fails.
    pub timeout: Duration,
    /// How much of a vector a rank publishes at a time. There are four such buffers for each rank. Smaller ones stay in the
    /// caches, larger ones need fewer meetings.
    pub buffer_bytes: usize,
}

impl Default for CommunicatorOptions {
    fn default() -> CommunicatorOptions {
        CommunicatorOptions { timeout: Duration::from_secs(600), buffer_bytes: 512 << 10 }
    }
}

/// One rank's end of a group of processes (or threads) on one host. Every rank makes the same calls in the same order.
///
/// A call that fails on one rank, because it was wrong, stopped, or waited for too long, ends the group: all ranks get an error, in
/// this call or in the next one.
///
/// ```
/// use kolo_core::Tensor;
/// use kolo_runtime::collective::{Communicator, CommunicatorOptions, ReduceOp};
///
/// let ranks = Communicator::in_process(2, &CommunicatorOptions::default())?;
/// let sums = std::thread::scope(|scope| {
///     let sum = |mut rank: Communicator| move || rank.all_reduce(vec![Tensor::from([rank.rank() as f32, 1.0])], ReduceOp::Sum);
///     let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(sum(rank))).collect();
///     threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>, _>>()
/// })?;
/// assert_eq!(sums, [[Tensor::from([1.0f32, 2.0])], [Tensor::from([1.0f32, 2.0])]]);
/// # Ok::<(), kolo_core::Error>(())
/// ```
pub struct Communicator {
    group: SharedGroup,
    options: CommunicatorOptions,
    n_calls: u64,
    /// Why the group has ended.
    ended: Option<Error>,
    /// Set by others to make calls fail.
    stop: Arc<AtomicBool>,
}

impl Communicator {
    /// Lays a group out in a file of `/dev/shm`, which its ranks then join.
    pub fn create(file: &File, n_ranks: usize, options: &CommunicatorOptions) -> Result<()> {
        // Every rank gets a piece at least, in the calls that cut a buffer into as many parts as there are ranks.
        let least = SIGNATURE_BYTES + PIECE * n_ranks;
        SharedGroup::create(file, n_ranks, options.buffer_bytes.max(least))
    }

    /// Joins the group in `file` as `rank`.
    pub fn join(file: &File, rank: usize, options: &CommunicatorOptions) -> Result<Communicator> {
        let group = SharedGroup::join(file, rank)?;
        Ok(Communicator { group, options: options.clone(), n_calls: 0, ended: None, stop: Arc::default() })
    }

    /// All ranks of a new group, for threads of this process.
    pub fn in_process(n_ranks: usize, options: &CommunicatorOptions) -> Result<Vec<Communicator>> {
        let file = SharedGroup::anonymous_file()
            .map_err(|error| Error::resource_exhausted(format!("no file in memory for a group: {error}")))?;
        Communicator::create(&file, n_ranks, options)?;
        (0..n_ranks).map(|rank| Communicator::join(&file, rank, options)).collect()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The number of ranks.
    pub fn n_ranks(&self) -> usize {
        self.group.n_ranks()
    }

    /// A flag that makes this call, and all later ones, fail.
    pub(super) fn stop_flag(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// Combines tensors of all ranks element by element. They are written in place if nobody else holds them.
    pub fn all_reduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> Result<Vec<Tensor>> {
        self.call(CollectiveKind::AllReduce(op), tensors)
    }

    /// As [`Communicator::all_reduce`], for one rank alone; the others get their own tensors back.
    pub fn reduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp, root: usize) -> Result<Vec<Tensor>> {
        self.call(CollectiveKind::Reduce(op, Root(root)), tensors)
    }

    /// Combines a tensor of all ranks; each gets its share of the rows.
    pub fn reduce_scatter(&mut self, tensor: Tensor, op: ReduceOp) -> Result<Tensor> {
        self.call_for_one(CollectiveKind::ReduceScatter(op), tensor)
    }

    /// The rows of all ranks, in the order of ranks.
    pub fn all_gather(&mut self, tensor: Tensor) -> Result<Tensor> {
        self.call_for_one(CollectiveKind::AllGather, tensor)
    }

    /// The rows of all ranks, for one rank alone; the others get their own back.
    pub fn gather(&mut self, tensor: Tensor, root: usize) -> Result<Tensor> {
        self.call_for_one(CollectiveKind::Gather(Root(root)), tensor)
    }

    /// The tensors of rank `root`. Others give tensors of the same dtypes and shapes, which are written in place if nobody else
    /// holds them.
    pub fn broadcast(&mut self, tensors: Vec<Tensor>, root: usize) -> Result<Vec<Tensor>> {
        self.call(CollectiveKind::Broadcast(Root(root)), tensors)
    }

    /// This rank's share of the rows of rank `root`'s tensor. Others give a tensor of the same dtype and shape.
    pub fn scatter(&mut self, tensor: Tensor, root: usize) -> Result<Tensor> {
        self.call_for_one(CollectiveKind::Scatter(Root(root)), tensor)
    }

    /// This rank's share of the rows of every rank's tensor, in the order of ranks.
    pub fn all_to_all(&mut self, tensor: Tensor) -> Result<Tensor> {
        self.call_for_one(CollectiveKind::AllToAll, tensor)
    }

    /// Returns when every rank has called it.
    pub fn barrier(&mut self) -> Result<()> {
        self.call(CollectiveKind::Barrier, Vec::new()).map(drop)
    }

    fn call(&mut self, kind: CollectiveKind, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        self.run(CollectiveCall { kind, name: kind.name().into(), tensors, cancel: None })
    }

    fn call_for_one(&mut self, kind: CollectiveKind, tensor: Tensor) -> Result<Tensor> {
        let mut tensors = self.call(kind, vec![tensor])?;
        tensors.pop().ok_or_else(|| Error::internal(format!("{kind} gave nothing")))
    }

    /// Makes a call.
    pub fn run(&mut self, call: CollectiveCall) -> Result<Vec<Tensor>> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        let number = self.n_calls;
        self.n_calls += 1;
        let signature = Signature::new(number, call.kind, &call.name, &call.tensors);
        self.run_as(&signature, call).map_err(|error| {
            let error = error.context(format_args!("rank {} of {}: {signature}", self.rank(), self.n_ranks()));
            self.group.end(error.message());
            self.ended = Some(error.clone().into_derived());
            error
        })
    }

    fn run_as(&mut self, signature: &Signature, call: CollectiveCall) -> Result<Vec<Tensor>> {
        check(&call, self.n_ranks())?;
        let began = Instant::now();
        let (has_warned, rank) = (Cell::new(false), self.rank());
        let (stop_flag, cancel) = (self.stop.clone(), call.cancel.clone());
        let stop = |peer: usize| {
            if let Some(reason) = cancel.as_ref().and_then(|cancel| cancel.reason()) {
                return Err(Error::new(Code::Cancelled, format!("the step was stopped: {}", reason.message())));
            }
            if stop_flag.load(Ordering::Relaxed) {
                return Err(Error::cancelled("the group was closed"));
            }
            if began.elapsed() >= LONG_WAIT && !has_warned.replace(true) {
                let waited = began.elapsed().as_secs();
                tracing::warn!("rank {rank} has waited {waited} s for rank {peer} in {signature}");
            }
            Ok(())
        };
        let limits = WaitLimits { deadline: Some(began + self.options.timeout), stop: &stop };
        let mut exchange = Exchange { group: &mut self.group, signature, limits, is_first: true };
        exchange.run(call.kind, call.tensors)
    }
}

/// An error if this rank's part makes no sense, whatever others do.
fn check(call: &CollectiveCall, n_ranks: usize) -> Result<()> {
    let (kind, tensors) = (call.kind, &call.tensors);
    if let Some(root) = kind.root().filter(|root| *root >= n_ranks) {
        return Err(Error::invalid_argument(format!("there is no rank {root}: there are {n_ranks}, from 0 on")));
    }
    for tensor in tensors {
        let dtype = tensor.dtype();
        if dtype.size().is_none() || dtype != tensors[0].dtype() {
            return Err(Error::invalid_argument(format!(
                "tensors of {dtype} and {} cannot be exchanged together: all have one dtype, of a fixed size",
                tensors[0].dtype()
            )));
        }
        tensor.host_bytes()?;
        if kind.reduction().is_some() {
            check_reducible(dtype)?;
        }
    }
    let cuts_rows = match kind {
        CollectiveKind::AllReduce(_)
        | CollectiveKind::Reduce(..)
        | CollectiveKind::Broadcast(_)
        | CollectiveKind::Barrier => return Ok(()),
        CollectiveKind::AllGather | CollectiveKind::Gather(_) => false,
        CollectiveKind::ReduceScatter(_) | CollectiveKind::Scatter(_) | CollectiveKind::AllToAll => true,
    };
    let [tensor] = &tensors[..] else {
        return Err(Error::invalid_argument(format!("{kind} takes one tensor, not {}", tensors.len())));
    };
    match tensor.shape().dims().first() {
        None => Err(Error::invalid_argument(format!("{kind} needs rows, and a scalar has none"))),
        Some(rows) if cuts_rows && !rows.is_multiple_of(n_ranks) => Err(Error::invalid_argument(format!(
            "{kind} cuts {}{} along its first axis, which {n_ranks} ranks do not divide",
            tensor.dtype(),
            tensor.shape()
        ))),
        Some(_) => Ok(()),
    }
}

/// A call that is under way.
struct Exchange<'a> {
    group: &'a mut SharedGroup,
    signature: &'a Signature,
    limits: WaitLimits<'a>,
    /// No round of it has begun.
    is_first: bool,
}

impl<'a> Exchange<'a> {
    fn run(&mut self, kind: CollectiveKind, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
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

/// A tensor like this one with another number of rows.
fn with_rows(tensor: &Tensor, rows: impl FnOnce(usize) -> Option<usize>) -> Result<Tensor> {
    let mut dims = tensor.shape().dims().to_vec();
    dims[0] = rows(dims[0]).ok_or_else(|| Error::invalid_argument("there are too many rows"))?;
    Tensor::zeros(tensor.dtype(), Shape::new(&dims)?)
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
