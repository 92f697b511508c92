//! Devices that exchange data with those of other ranks by themselves, without a detour through host memory: GPUs, by NCCL.
//!
//! ```text
//!  kernels ──▶ exchange (on a queue of its own) ──▶ … other kernels … ──▶ await_exchange ──▶ kernels that read the result
//! ```
//!
//! An exchange is enqueued, as kernels are. Ranks that enqueue different ones wait for each other for ever, so callers compare what
//! they are about to do first, and [`DeviceRanks::abort`] ends it all if a rank has died.

use std::sync::Arc;
use std::time::Instant;

use kolo_core::{Error, Result, Tensor};

use crate::Device;
use crate::cpu::reduce::ReduceOp;

/// How ranks find each other on devices: at most 256 opaque bytes, which one rank makes and all others get, perhaps with zeros behind.
pub type MeetingId = Vec<u8>;

/// A device whose memory others can reach; see [`Device::rank_device`].
pub trait RankDevice: Device {
    /// What a rank has to have to itself: ranks of one host that name the same piece of hardware cannot meet on it. An error says why
    /// nobody can, such as a library that is missing.
    fn hardware(&self) -> Result<String>;

    /// A new place to meet.
    fn new_meeting(&self) -> Result<MeetingId>;

    /// Meets the other ranks, all of which call this. The device keeps what it returns.
    fn meet(&self, meeting: &MeetingId, place: &RankOnDevice<'_>) -> Result<Arc<dyn DeviceRanks>>;
}

/// Which rank a device belongs to, and how it works with the others.
pub struct RankOnDevice<'a> {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub n_ranks: usize,
    /// Sums are made in the fixed tree over ranks, with the bits that ranks without devices get.
    pub deterministic: bool,
    /// Not later than this.
    pub deadline: Instant,
    /// An error as soon as waiting is pointless.
    pub stop: &'a dyn Fn() -> Result<()>,
}

/// One rank's end of a group of devices. All ranks enqueue the same exchanges in the same order.
///
/// An exchange runs beside the kernels that are enqueued after it. What it returns may be read after
/// [`DeviceRanks::await_exchange`], which makes later kernels wait, and not the host.
pub trait DeviceRanks: Send + Sync {
    /// The tensors of all ranks, combined element by element; written in place if nobody else holds them.
    fn all_reduce(&self, device: &dyn Device, tensors: Vec<Tensor>, op: ReduceOp) -> Result<Vec<Tensor>>;

    /// The tensors of rank `root`.
    fn broadcast(&self, device: &dyn Device, tensors: Vec<Tensor>, root: usize) -> Result<Vec<Tensor>>;

    /// This rank's share of the rows of what [`DeviceRanks::all_reduce`] gives. The ranks divide the rows.
    fn reduce_scatter(&self, device: &dyn Device, tensor: Tensor, op: ReduceOp) -> Result<Tensor>;

    /// The rows of all ranks, in the order of ranks.
    fn all_gather(&self, device: &dyn Device, tensor: Tensor) -> Result<Tensor>;

    /// This rank's share of the rows of every rank's tensor, in the order of ranks. The ranks divide the rows.
    fn all_to_all(&self, device: &dyn Device, tensor: Tensor) -> Result<Tensor>;

    /// Makes kernels that are enqueued from now on wait for the exchange that gave this tensor. One that was waited for already, or
    /// that no exchange gave, is left alone.
    fn await_exchange(&self, device: &dyn Device, tensor: &Tensor) -> Result<()>;

    /// Ends all exchanges that are under way, and refuses new ones. What is under way leaves anything behind, so nobody may use it.
    fn abort(&self, why: Error);

    /// Why it has ended: an abort, or an error that the device found since.
    fn ended(&self) -> Option<Error>;
}
