//! What a kernel may ask of a group of ranks: processes, or replicas in one process, that compute something together. The runtime
//! implements it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use kolo_core::{Error, Result, Tensor};
use kolo_device::cpu::reduce::ReduceOp;
use kolo_device::{Device, DeviceRanks};
use parking_lot::Mutex;

use crate::cancel::CancelToken;
pub use crate::comm::meeting::{Arrival, MeetingKey, MeetingPlace, MeetingSpec, Meetings, Together};

/// What the ranks of a group do together. Every rank gives tensors of the same dtypes and shapes; in what is uneven, ranks may give
/// different numbers of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// Every rank gets the tensors of all, combined element by element.
    AllReduce(ReduceOp),
    /// One rank gets them; the others get their own back.
    Reduce(ReduceOp, Root),
    /// Each rank gets its share of them: the tensors are cut along their first axis.
    ReduceScatter(ReduceOp),
    /// Every rank gets the tensors of all, one after the other along the first axis.
    AllGather,
    /// One rank gets them; the others get their own back.
    Gather(Root),
    /// Every rank gets the tensors of one.
    Broadcast(Root),
    /// Each rank gets its share of one rank's tensors, cut along their first axis. What others give says only how large they are.
    Scatter(Root),
    /// Each rank gets its share of the tensors of all, one after the other along the first axis.
    AllToAll,
    /// As [`CollectiveKind::AllGather`], of any number of rows from each rank. Gives the rows, and how many came from each rank.
    AllGatherUneven,
    /// The same for one rank. The others get their own back, and learn that no rows came to them.
    GatherUneven(Root),
    /// One rank cuts its rows into shares of any size: its second tensor says how many rows each rank gets. Others give a tensor of
    /// any number of rows, and the same list or another one, which nobody reads. Gives a share.
    ScatterUneven(Root),
    /// Each rank cuts its rows into shares of any size: its second tensor says how many rows each rank gets. Gives the rows that came
    /// from all ranks, in their order, and how many came from each.
    AllToAllUneven,
    /// A rank sends its rows to one rank, or to none, and gets those of one, or none: its second tensor is the number of the rank to
    /// send to and that of the rank to receive from, each -1 for none. Ranks that do neither call it as well.
    SendReceive,
    /// Nothing, but nobody goes on before everybody came.
    Barrier,
}

/// A rank that has a part of its own in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Root(pub usize);

impl CollectiveKind {
    /// `all-reduce`, …
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllReduce(_) => "all-reduce",
            CollectiveKind::Reduce(..) => "reduce",
            CollectiveKind::ReduceScatter(_) => "reduce-scatter",
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::Gather(_) => "gather",
            CollectiveKind::Broadcast(_) => "broadcast",
            CollectiveKind::Scatter(_) => "scatter",
            CollectiveKind::AllToAll => "all-to-all",
            CollectiveKind::AllGatherUneven => "uneven all-gather",
            CollectiveKind::GatherUneven(_) => "uneven gather",
            CollectiveKind::ScatterUneven(_) => "uneven scatter",
            CollectiveKind::AllToAllUneven => "uneven all-to-all",
            CollectiveKind::SendReceive => "send and receive",
            CollectiveKind::Barrier => "barrier",
        }
    }

    /// Whether ranks may give different numbers of rows.
    pub fn is_uneven(self) -> bool {
        matches!(
            self,
            CollectiveKind::AllGatherUneven
                | CollectiveKind::GatherUneven(_)
                | CollectiveKind::ScatterUneven(_)
                | CollectiveKind::AllToAllUneven
                | CollectiveKind::SendReceive
        )
    }

    /// How elements are combined, if they are.
    pub fn reduction(self) -> Option<ReduceOp> {
        match self {
            CollectiveKind::AllReduce(op) | CollectiveKind::Reduce(op, _) | CollectiveKind::ReduceScatter(op) => {
                Some(op)
            }
            _ => None,
        }
    }

    /// The rank with a part of its own.
    pub fn root(self) -> Option<usize> {
        match self {
            CollectiveKind::Reduce(_, Root(root))
            | CollectiveKind::Gather(Root(root))
            | CollectiveKind::Broadcast(Root(root))
            | CollectiveKind::Scatter(Root(root))
            | CollectiveKind::GatherUneven(Root(root))
            | CollectiveKind::ScatterUneven(Root(root)) => Some(root),
            _ => None,
        }
    }
}

/// `all-reduce (mean)`, `broadcast from rank 0`.
impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if let Some(op) = self.reduction() {
            write!(f, " ({})", op.name())?;
        }
        match (self, self.root()) {
            (
                CollectiveKind::Broadcast(_) | CollectiveKind::Scatter(_) | CollectiveKind::ScatterUneven(_),
                Some(root),
            ) => write!(f, " from rank {root}"),
            (_, Some(root)) => write!(f, " to rank {root}"),
            (_, None) => Ok(()),
        }
    }
}

/// One rank's part of a collective.
pub struct CollectiveCall {
    /// What is done.
    pub kind: CollectiveKind,
    /// What it is called, such as the node's name. All ranks call it the same.
    pub name: Arc<str>,
    /// This rank's tensors, in host memory. They are written to in place if nobody else holds them.
    pub tensors: Vec<Tensor>,
    /// Stops it. A collective that is stopped on one rank ends the group.
    pub cancel: Option<Arc<CancelToken>>,
    /// It fails then, if not before: a group does not wait for a rank for ever either.
    pub deadline: Option<Instant>,
}

/// Takes what a collective gives this rank.
pub type CollectiveDone = Box<dyn FnOnce(Result<Vec<Tensor>>) + Send>;

/// The ranks that compute something together. All of them start the same collectives in the same order.
pub trait CollectiveGroup: Send + Sync {
    /// This process's rank.
    fn rank(&self) -> usize;
    /// The number of ranks.
    fn n_ranks(&self) -> usize;
    /// Begins a collective, behind those that were begun before. `done` is called once, from any thread.
    fn start(&self, call: CollectiveCall, done: CollectiveDone);

    /// This rank's end of the group on a device, for kernels of that device; `None` if data has to go through host memory. Asking for a
    /// device for the first time, all ranks meet there.
    fn on_device(&self, _device: &dyn Device) -> Result<Option<Arc<dyn DeviceRanks>>> {
        Ok(None)
    }

    /// An error if the group has ended while devices exchanged data, so that what they have computed since is worth nothing.
    fn health(&self) -> Result<()> {
        Ok(())
    }
}

/// Makes a collective and waits for what it gives.
pub fn call(group: &dyn CollectiveGroup, call: CollectiveCall) -> Result<Vec<Tensor>> {
    let (kind, (sender, result)) = (call.kind, mpsc::sync_channel(1));
    // A receiver is there as long as this function.
    group.start(call, Box::new(move |done| drop(sender.send(done))));
    result.recv().unwrap_or_else(|_| Err(Error::internal(format!("{kind} ended without a result"))))
}

/// The groups that the nodes of a session can name, and the meetings of its devices. Clones share them.
#[derive(Clone, Default)]
pub struct Groups {
    named: Arc<Mutex<BTreeMap<String, Arc<dyn CollectiveGroup>>>>,
    meetings: Arc<Meetings>,
}

impl Groups {
    /// No groups.
    pub fn new() -> Groups {
        Groups::default()
    }

    /// Adds a group under a name, which replaces one of that name.
    pub fn insert(&self, name: &str, group: Arc<dyn CollectiveGroup>) {
        self.named.lock().insert(name.to_owned(), group);
    }

    /// Where TensorFlow's collectives meet.
    pub fn meetings(&self) -> &Arc<Meetings> {
        &self.meetings
    }

    /// The group of this name.
    pub fn find(&self, name: &str) -> Result<Arc<dyn CollectiveGroup>> {
        let groups = self.named.lock();
        groups.get(name).cloned().ok_or_else(|| {
            let known: Vec<&str> = groups.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "there are none".to_owned() } else { known.join(", ") };
            Error::failed_precondition(format!(
                "this session has no group of ranks '{name}' ({known}); give it one with SessionConfig::groups"
            ))
        })
    }
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.named.lock().keys()).finish()
    }
}
