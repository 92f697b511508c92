//! Work that a device writes down once and replays with one call.
//!
//! ```text
//!  begin_recording ──▶ kernels are launched as ever, but only written down ──▶ end ──▶ Recording ──replay──▶ …
//! ```
//!
//! A recording holds the addresses that its kernels were given. Its own temporary tensors are in memory that belongs to it; for
//! everything else (variables, feeds) whoever replays must see to it that [`Recorder::address_of`] is what it was. Recording
//! concerns the thread that began it and nobody else.

use kolo_core::{Result, Tensor};

use crate::Device;

/// A device that can record what it is asked to do; see [`Device::recorder`].
pub trait Recorder: Device {
    /// From now on what this thread enqueues for this device is written down instead of done, and the tensors it allocates
    /// come from memory of the recording. Copies from the host are done at once, and the recording keeps what they made; a
    /// copy to the host is an error. An error if this thread records already.
    fn begin_recording(&self) -> Result<Box<dyn ActiveRecording + '_>>;

    /// True while this thread's work for the device is written down.
    fn is_recording(&self) -> bool;

    /// Calls `work` once, as if this thread did not record: its work is done now, in common memory.
    fn outside_recording(&self, work: &mut dyn FnMut());

    /// Makes this thread's recording hold a tensor of common memory, whose value must not change as long as it is replayed.
    fn keep_in_recording(&self, tensor: &Tensor);

    /// Whether this thread's recording holds the buffer of `tensor`, so that its value is the same in every replay.
    fn is_kept_in_recording(&self, tensor: &Tensor) -> bool;

    /// Where a tensor of this device begins; an error for tensors of other memory.
    fn address_of(&self, tensor: &Tensor) -> Result<Address>;

    /// Copies a tensor of the host or of this device over one of this device that others may hold, enqueued: for the fixed
    /// feeds of a recording, which only its replays read. An error if they differ in dtype or length.
    fn write_over(&self, from: &Tensor, to: &Tensor) -> Result<()>;

    /// Calls [`Recorder::write_over`] for each pair, or enqueues them together if that is faster.
    fn write_over_all(&self, pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
        pairs.iter().try_for_each(|(from, to)| self.write_over(from, to))
    }
}

/// Where a tensor begins in its device's memory. Says whether two tensors of one device begin at the same place, and nothing
/// else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address(pub u64);

/// A recording that goes on. Dropping it forgets what was written down.
pub trait ActiveRecording {
    /// What was enqueued since the beginning, ready to be replayed.
    fn end(self: Box<Self>) -> Result<Box<dyn Recording>>;
}

/// Work that was written down. Dropping it waits for replays that still run.
pub trait Recording: Send + Sync {
    /// Enqueues all of it.
    fn replay(&self) -> Result<()>;

    /// How many launches and copies it stands for.
    fn n_launches(&self) -> usize;
}
