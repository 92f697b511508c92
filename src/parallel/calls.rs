//! What the ranks of a [`World`] compute together, as plain calls on tensors.
//!
//! A tensor is written in place if nobody else holds it. Where a call cuts or joins a tensor, it does so along its first axis.

use kolo_core::{Result, Tensor};
use kolo_runtime::collective::{CollectiveKind, ReduceOp, Root, joined_rows, only_tensor, row_numbers};

use super::World;

impl World {
    /// Combines tensors of all ranks, element by element.
    pub fn all_reduce(&self, tensors: Vec<Tensor>, op: ReduceOp) -> Result<Vec<Tensor>> {
        self.call(CollectiveKind::AllReduce(op), tensors)
    }

    /// As [`World::all_reduce`], for rank `root` alone; the others get their own tensors back.
    pub fn reduce(&self, tensors: Vec<Tensor>, op: ReduceOp, root: usize) -> Result<Vec<Tensor>> {
        self.call(CollectiveKind::Reduce(op, Root(root)), tensors)
    }

    /// Combines a tensor of all ranks; each gets its share of the rows.
    pub fn reduce_scatter(&self, tensor: Tensor, op: ReduceOp) -> Result<Tensor> {
        only_tensor(self.call(CollectiveKind::ReduceScatter(op), vec![tensor])?)
    }

    /// The rows of all ranks, in the order of ranks. All give as many.
    pub fn all_gather(&self, tensor: Tensor) -> Result<Tensor> {
        only_tensor(self.call(CollectiveKind::AllGather, vec![tensor])?)
    }

    /// The rows of all ranks, in the order of ranks, and how many came from each: ranks may give different numbers of rows.
    pub fn all_gather_uneven(&self, tensor: Tensor) -> Result<(Tensor, Vec<usize>)> {
        joined_rows(self.call(CollectiveKind::AllGatherUneven, vec![tensor])?)
    }

    /// As [`World::all_gather`], for rank `root` alone; the others get their own rows back.
    pub fn gather(&self, tensor: Tensor, root: usize) -> Result<Tensor> {
        only_tensor(self.call(CollectiveKind::Gather(Root(root)), vec![tensor])?)
    }

    /// As [`World::all_gather_uneven`], for rank `root` alone; the others get their own rows back, and learn that none came to them.
    pub fn gather_uneven(&self, tensor: Tensor, root: usize) -> Result<(Tensor, Vec<usize>)> {
        joined_rows(self.call(CollectiveKind::GatherUneven(Root(root)), vec![tensor])?)
    }

    /// The tensors of rank `root`. The others give tensors of the same dtypes and shapes.
    pub fn broadcast(&self, tensors: Vec<Tensor>, root: usize) -> Result<Vec<Tensor>> {
        self.call(CollectiveKind::Broadcast(Root(root)), tensors)
    }

    /// This rank's share of the rows of rank `root`'s tensor. The others give a tensor of the same dtype and shape.
    pub fn scatter(&self, tensor: Tensor, root: usize) -> Result<Tensor> {
        only_tensor(self.call(CollectiveKind::Scatter(Root(root)), vec![tensor])?)
    }

    /// So many rows of rank `root`'s tensor as its list says that this rank gets. The others give a tensor of the same dtype with rows
    /// of the same shape, as many as they like, and a list of as many numbers, which nobody reads.
    pub fn scatter_uneven(&self, tensor: Tensor, rows: &[usize], root: usize) -> Result<Tensor> {
        only_tensor(self.call(CollectiveKind::ScatterUneven(Root(root)), vec![tensor, row_numbers(rows)])?)
    }

    /// This rank's share of the rows of every rank's tensor, in the order of ranks.
    pub fn all_to_all(&self, tensor: Tensor) -> Result<Tensor> {
        only_tensor(self.call(CollectiveKind::AllToAll, vec![tensor])?)
    }

    /// So many rows of this rank's tensor go to each rank as the list says. Gives the rows that came from all ranks, in their order, and
    /// how many came from each; nobody has to know that before.
    pub fn all_to_all_uneven(&self, tensor: Tensor, rows: &[usize]) -> Result<(Tensor, Vec<usize>)> {
        joined_rows(self.call(CollectiveKind::AllToAllUneven, vec![tensor, row_numbers(rows)])?)
    }

    /// Sends this rank's rows to one rank, and gives those of another one; no rows if it receives from none. A call of all ranks, as
    /// every other: those that neither send nor receive make it too, and a rank may do both, as when something goes round.
    pub fn send_receive(&self, tensor: Tensor, to: Option<usize>, from: Option<usize>) -> Result<Tensor> {
        let peers = [to, from].map(|peer| peer.map_or(-1, |peer| i64::try_from(peer).unwrap_or(i64::MAX)));
        only_tensor(self.call(CollectiveKind::SendReceive, vec![tensor, Tensor::from(peers)])?)
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        self.call(CollectiveKind::Barrier, Vec::new()).map(drop)
    }
}
