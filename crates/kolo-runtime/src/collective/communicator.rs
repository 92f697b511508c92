//! One rank's end of a group: collectives as plain calls that return when they are done.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result, Tensor};
use kolo_device::cpu::reduce::{ReduceOp, check_reducible};
use kolo_device::shared_group::{RankBoard, SharedGroup, WaitLimits};
use kolo_ops::collective::{CollectiveCall, CollectiveKind, Root};

use super::algorithm::choice::{Algorithm, Choice, Costs};
use super::algorithm::two_level::OwnHost;
use super::algorithm::{Call, Scratch};
use super::hosts::Layout;
use super::hosts_meet::{self, MetHosts};
use super::record::Recorder;
use super::shared::{Exchange, PIECE};
use super::signature::{Route, SIGNATURE_BYTES, Signature};
use super::transport::Transport;
use super::uneven::{joined_rows, only_tensor, row_numbers};
use super::waiting::{PastCalls, Waiting};

/// How a group works. All ranks use the same.
#[derive(Clone, Debug)]
pub struct CommunicatorOptions {
    /// A call that has waited so long for a rank fails.
    pub timeout: Duration,
    /// How much of a vector is under way at a time. In shared memory, there are four such buffers for each rank. Smaller ones stay in
    /// the caches, larger ones need fewer meetings.
    pub buffer_bytes: usize,
    /// Only algorithms whose sums have the bits of the fixed tree over ranks, so that they are the same over any transport, for
    /// any size of buffers, every time. In shared memory, they always have.
    pub deterministic: bool,
    /// The algorithm of the calls that it fits, over a transport. Others, and all without one, take the cheapest.
    pub algorithm: Option<Algorithm>,
    /// What messages cost, over a transport.
    pub costs: Costs,
}

impl Default for CommunicatorOptions {
    fn default() -> CommunicatorOptions {
        CommunicatorOptions {
            timeout: Duration::from_secs(600),
            buffer_bytes: 512 << 10,
            deterministic: true,
            algorithm: None,
            costs: Costs::default(),
        }
    }
}

/// One rank's end of a group of processes (or threads), which share memory or send each other messages. Every rank makes the same
/// calls in the same order.
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
    link: Link,
    options: CommunicatorOptions,
    n_calls: u64,
    recorder: Recorder,
    past: PastCalls,
    /// Why the group has ended.
    ended: Option<Error>,
    /// Set by others to make calls fail.
    stop: Arc<AtomicBool>,
}

/// How ranks reach each other.
enum Link {
    Shared(SharedGroup),
    Messages {
        transport: Box<dyn Transport>,
        scratch: Scratch,
        /// On which hosts ranks are, if there are several.
        layout: Option<Layout>,
        /// The memory of this rank's host, if its ranks share some.
        own_host: Option<OwnHost>,
    },
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
        // Who cannot keep the file open goes without a record.
        let board = file.try_clone().ok().and_then(|file| RankBoard::open(file).ok()).map(Arc::new);
        Ok(Communicator::new(Link::Shared(group), Recorder::new(board, rank), options))
    }

    /// One rank's end of a group whose ranks send each other messages. All have the same options.
    pub fn over(transport: Box<dyn Transport>, options: &CommunicatorOptions) -> Communicator {
        let recorder = Recorder::new(transport.board(), transport.rank());
        let link = Link::Messages { transport, scratch: Scratch::default(), layout: None, own_host: None };
        Communicator::new(link, recorder, options)
    }

    /// As [`Communicator::over`], where ranks that give the same number as their host share memory if there are several hosts, and all
    /// take the costs of rank 0. Returns when all ranks have called it.
    pub fn over_hosts(
        mut transport: Box<dyn Transport>,
        host: u64,
        options: &CommunicatorOptions,
    ) -> Result<Communicator> {
        let MetHosts { layout, own_host, costs } =
            hosts_meet::meet(&mut *transport, host, options).inspect_err(|error| transport.end(error.message()))?;
        let recorder = Recorder::new(transport.board(), transport.rank());
        let link = Link::Messages { transport, scratch: Scratch::default(), layout, own_host };
        Ok(Communicator::new(link, recorder, &CommunicatorOptions { costs, ..options.clone() }))
    }

    fn new(link: Link, recorder: Recorder, options: &CommunicatorOptions) -> Communicator {
        let (options, past) = (options.clone(), PastCalls::default());
        Communicator { link, options, n_calls: 0, recorder, past, ended: None, stop: Arc::default() }
    }

    /// How it works.
    pub(super) fn options(&self) -> &CommunicatorOptions {
        &self.options
    }

    /// Where this rank writes down what it does.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
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
        match &self.link {
            Link::Shared(group) => group.rank(),
            Link::Messages { transport, .. } => transport.rank(),
        }
    }

    /// The number of ranks.
    pub fn n_ranks(&self) -> usize {
        match &self.link {
            Link::Shared(group) => group.n_ranks(),
            Link::Messages { transport, .. } => transport.n_ranks(),
        }
    }

    /// The bytes of messages that this rank has sent so far, those included in which ranks compare their calls; `None` in shared memory,
    /// where nothing is sent.
    pub fn n_bytes_sent(&self) -> Option<u64> {
        match &self.link {
            Link::Shared(_) => None,
            Link::Messages { transport, .. } => Some(transport.n_bytes_sent()),
        }
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

    /// The rows of all ranks, in the order of ranks, and how many came from each: ranks may give different numbers of rows.
    pub fn all_gather_uneven(&mut self, tensor: Tensor) -> Result<(Tensor, Vec<usize>)> {
        joined_rows(self.call(CollectiveKind::AllGatherUneven, vec![tensor])?)
    }

    /// As [`Communicator::all_gather_uneven`], for one rank alone; the others get their own back, and learn that nothing came.
    pub fn gather_uneven(&mut self, tensor: Tensor, root: usize) -> Result<(Tensor, Vec<usize>)> {
        joined_rows(self.call(CollectiveKind::GatherUneven(Root(root)), vec![tensor])?)
    }

    /// So many rows of rank `root`'s tensor as it says that this rank gets. Others give a tensor of the same dtype and rows of the same
    /// shape, and any `n_ranks` numbers.
    pub fn scatter_uneven(&mut self, tensor: Tensor, rows: &[usize], root: usize) -> Result<Tensor> {
        only_tensor(self.call(CollectiveKind::ScatterUneven(Root(root)), vec![tensor, row_numbers(rows)])?)
    }

    /// So many rows of this rank's tensor go to each rank as `rows` says; gives those that came from all ranks, in their order, and
    /// how many came from each.
    pub fn all_to_all_uneven(&mut self, tensor: Tensor, rows: &[usize]) -> Result<(Tensor, Vec<usize>)> {
        joined_rows(self.call(CollectiveKind::AllToAllUneven, vec![tensor, row_numbers(rows)])?)
    }

    /// Sends this rank's rows to one rank, and gives those of another one; no rows if it receives from none. Ranks that do neither
    /// call it as well.
    pub fn send_receive(&mut self, tensor: Tensor, to: Option<usize>, from: Option<usize>) -> Result<Tensor> {
        let peers = [to, from].map(|peer| peer.map_or(-1, |peer| peer as i64));
        only_tensor(self.call(CollectiveKind::SendReceive, vec![tensor, Tensor::from(peers)])?)
    }

    /// Returns when every rank has called it.
    pub fn barrier(&mut self) -> Result<()> {
        self.call(CollectiveKind::Barrier, Vec::new()).map(drop)
    }

    fn call(&mut self, kind: CollectiveKind, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        self.run(CollectiveCall { kind, name: kind.name().into(), tensors, cancel: None, deadline: None })
    }

    fn call_for_one(&mut self, kind: CollectiveKind, tensor: Tensor) -> Result<Tensor> {
        only_tensor(self.call(kind, vec![tensor])?)
    }

    /// Makes a call.
    pub fn run(&mut self, call: CollectiveCall) -> Result<Vec<Tensor>> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        let number = self.n_calls;
        self.n_calls += 1;
        let mut signature = Signature::new(number, call.kind, &call.name, &call.tensors);
        if matches!(self.link, Link::Messages { .. }) {
            signature = signature.by(self.route(&call));
        }
        self.recorder.begin_call(&signature);
        let result = self.run_as(&signature, call);
        let result = result.map_err(|error| {
            let step = self.recorder.step().map_or(String::new(), |step| format!(", in step {step}"));
            let error = error.context(format_args!("rank {} of {}: {signature}{step}", self.rank(), self.n_ranks()));
            // Who ended the group has said it, and who does something else is in the error.
            let is_own_fault =
                matches!(error.code(), Code::FailedPrecondition | Code::InvalidArgument | Code::Cancelled);
            let error = match self.recorder.who_is_behind(number) {
                behind if !behind.is_empty() && !is_own_fault && !self.has_ended() => {
                    error.and(format_args!("; {behind}"))
                }
                _ => error,
            };
            match &self.link {
                Link::Shared(group) => group.end(error.message()),
                Link::Messages { transport, own_host, .. } => {
                    transport.end(error.message());
                    own_host.iter().for_each(|own| own.group.end(error.message()));
                }
            }
            self.ended = Some(error.clone().into_derived());
            error
        });
        self.recorder.end_call(number);
        result
    }

    /// Whether a rank has ended the group, and has told why.
    fn has_ended(&self) -> bool {
        match &self.link {
            Link::Shared(group) => group.ended().is_some(),
            Link::Messages { transport, .. } => transport.ended().is_some(),
        }
    }

    /// What the algorithms of its calls are chosen by, where ranks send messages.
    pub fn choice(&self) -> Choice<'_> {
        let CommunicatorOptions { deterministic, algorithm: wanted, ref costs, .. } = self.options;
        let (layout, shares_memory) = match &self.link {
            Link::Messages { layout, own_host, .. } => (*layout, own_host.is_some()),
            Link::Shared(_) => (None, true),
        };
        Choice { n_ranks: self.n_ranks(), layout, shares_memory, costs, wanted, deterministic }
    }

    /// How the messages of a call go.
    fn route(&self, call: &CollectiveCall) -> Route {
        // Where ranks have different numbers of rows, none knows how much it will be.
        let n_bytes = if call.kind.is_uneven() { 0 } else { call.tensors.iter().map(Tensor::n_bytes).sum() };
        let dtype = call.tensors.first().map(Tensor::dtype);
        let (algorithm, buffer_bytes) = (self.choice().choose(call.kind, dtype, n_bytes), self.options.buffer_bytes);
        Route { algorithm, buffer_bytes: buffer_bytes as u64 }
    }

    fn run_as(&mut self, signature: &Signature, call: CollectiveCall) -> Result<Vec<Tensor>> {
        check(&call, self.n_ranks())?;
        let began = Instant::now();
        let (recorder, rank) = (self.recorder.clone(), self.rank());
        let waiting = Waiting::new(&recorder, rank, signature, began, &self.past);
        let (stop_flag, cancel) = (self.stop.clone(), call.cancel.clone());
        let stop = |peer: usize| {
            if let Some(reason) = cancel.as_ref().and_then(|cancel| cancel.reason()) {
                return Err(Error::new(Code::Cancelled, format!("the step was stopped: {}", reason.message())));
            }
            if stop_flag.load(Ordering::Relaxed) {
                return Err(Error::cancelled("the group was closed"));
            }
            waiting.look(peer);
            Ok(())
        };
        let deadline = began + self.options.timeout;
        let limits = WaitLimits { deadline: Some(call.deadline.map_or(deadline, |of| of.min(deadline))), stop: &stop };
        let result = match &mut self.link {
            Link::Shared(group) => Exchange { group, signature, limits, is_first: true }.run(call.kind, call.tensors),
            Link::Messages { transport, scratch, layout, own_host } => {
                let CommunicatorOptions { deterministic, algorithm: wanted, ref costs, buffer_bytes, .. } =
                    self.options;
                let (n_ranks, shares_memory) = (transport.n_ranks(), own_host.is_some());
                let choice = Choice { n_ranks, layout: *layout, shares_memory, costs, wanted, deterministic };
                let (transport, own_host) = (&mut **transport, own_host.as_mut());
                let exchange = Call { transport, signature, limits, buffer_bytes, is_first: true, own_host };
                exchange.run(call.kind, &choice, call.tensors, scratch)
            }
        };
        self.past.add(waiting.took());
        result
    }
}

/// An error if this rank's part makes no sense, whatever others do.
fn check(call: &CollectiveCall, n_ranks: usize) -> Result<()> {
    let (kind, tensors) = (call.kind, &call.tensors);
    if let Some(root) = kind.root().filter(|root| *root >= n_ranks) {
        return Err(Error::invalid_argument(format!("there is no rank {root}: there are {n_ranks}, from 0 on")));
    }
    // What is uneven may have a list of numbers beside its rows; `Uneven` looks at them.
    let values = if kind.is_uneven() { &tensors[..tensors.len().min(1)] } else { &tensors[..] };
    for tensor in values {
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
    if kind.is_uneven() {
        return tensors.iter().try_for_each(|tensor| tensor.host_bytes().map(drop));
    }
    let cuts_rows = match kind {
        CollectiveKind::AllReduce(_)
        | CollectiveKind::Reduce(..)
        | CollectiveKind::Broadcast(_)
        | CollectiveKind::Barrier => return Ok(()),
        CollectiveKind::ReduceScatter(_) | CollectiveKind::Scatter(_) | CollectiveKind::AllToAll => true,
        _ => false,
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
