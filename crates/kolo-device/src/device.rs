//! What every device offers: a name, memory with a limit, copies, and an order of work.
//!
//! The interface is made for devices that run behind the host: work is queued on streams, and an [`Event`] says when it
//! is done. On a CPU every call has finished when it returns, and there are no events to wait for.

use std::any::Any;
use std::sync::Arc;

use kolo_core::{Buffer, DType, DeviceName, Error, Memory, Result, Shape, Tensor};

use crate::cpu::pool::IntraPool;
use crate::{Charge, MemoryStats, NullDevice, RankDevice, Recorder};

/// What a device says of itself.
#[derive(Clone, Debug)]
pub struct DeviceAttributes {
    /// Its full name.
    pub name: DeviceName,
    /// The most bytes that tensors may take there; `None` if only the machine limits them.
    pub memory_limit: Option<u64>,
    /// A random number that differs after every start, so that a peer notices a restart.
    pub incarnation: u64,
    /// The hardware, for people.
    pub description: String,
}

/// Which of a device's queues work goes to. Copies have queues of their own, so that they overlap with computing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamRole {
    /// Kernels.
    Compute,
    /// Copies from the host.
    HostToDevice,
    /// Copies to the host.
    DeviceToHost,
    /// Copies between devices.
    Peer,
}

/// A point in a device's work that others can wait for.
pub trait Event: Send + Sync {
    /// True once the work before it is done.
    fn is_done(&self) -> bool;
    /// Waits on the host until the work before it is done, and returns the error it ended with, if any.
    fn wait(&self) -> Result<()>;
}

/// A place where kernels run.
pub trait Device: Send + Sync + 'static {
    /// Name, limit, incarnation.
    fn attributes(&self) -> &DeviceAttributes;

    /// The memory in which this device's kernels expect their tensors.
    fn memory(&self) -> Memory;

    /// `n_bytes` of the device's memory. `tag` names the node that asks, for the report when memory runs out. The
    /// contents are whatever was there before.
    fn allocate(&self, n_bytes: usize, tag: &Arc<str>) -> Result<Arc<dyn Buffer>>;

    /// Counts bytes of the host's memory that lie elsewhere, such as the elements of a list, against the device's limit,
    /// until the charge is dropped. An error if they do not fit. A device with memory of its own counts nothing.
    fn charge(&self, _n_bytes: usize, _tag: &Arc<str>) -> Result<Charge> {
        Ok(Charge::NONE)
    }

    /// How much is in use.
    fn memory_stats(&self) -> MemoryStats;

    /// Threads for work inside one kernel on the host.
    fn pool(&self) -> &Arc<IntraPool>;

    /// A tensor with the same contents in `memory`; the same tensor if it is there already. The event, if any, must be
    /// waited for before the copy is read elsewhere.
    fn copy(&self, tensor: &Tensor, memory: Memory) -> Result<(Tensor, Option<Arc<dyn Event>>)>;

    /// The tensor in host memory, waited for if it has to come from this device.
    fn to_host(&self, tensor: &Tensor) -> Result<Tensor> {
        if tensor.memory().is_host() {
            return Ok(tensor.clone());
        }
        let (copy, event) = self.copy(tensor, Memory::Host)?;
        if let Some(event) = event {
            event.wait()?;
        }
        Ok(copy)
    }

    /// Sets every byte of a tensor in this device's memory, in the order of its kernels. An error if others hold the buffer.
    fn fill(&self, tensor: &mut Tensor, byte: u8) -> Result<()> {
        tensor.host_bytes_mut()?.fill(byte);
        Ok(())
    }

    /// Copies `n_bytes` between two tensors in this device's memory, from and to these offsets, in the order of its kernels. An
    /// error if a span does not fit its tensor or others hold the target's buffer.
    fn copy_within(&self, from: &Tensor, at: usize, to: &mut Tensor, to_at: usize, n_bytes: usize) -> Result<()> {
        let source = from.host_bytes()?.get(at..).and_then(|rest| rest.get(..n_bytes));
        let target = to.host_bytes_mut()?.get_mut(to_at..).and_then(|rest| rest.get_mut(..n_bytes));
        match (source, target) {
            (Some(source), Some(target)) => {
                target.copy_from_slice(source);
                Ok(())
            }
            _ => Err(Error::internal("a copy does not fit its tensors")),
        }
    }

    /// A tensor of this device with the same elements, in memory of its own. Strings and handles, which nobody writes to, are
    /// shared.
    fn duplicate(&self, tensor: &Tensor, tag: &Arc<str>) -> Result<Tensor> {
        if tensor.dtype().size().is_none() {
            return Ok(tensor.clone());
        }
        let mut copy = self.allocate_tensor(tensor.dtype(), tensor.shape().clone(), tag)?;
        self.copy_within(tensor, 0, &mut copy, 0, tensor.n_bytes())?;
        Ok(copy)
    }

    /// This device as one that records work and replays it, if it can.
    fn recorder(&self) -> Option<&dyn Recorder> {
        None
    }

    /// This device as one that exchanges data with those of other ranks, if it is one.
    fn rank_device(&self) -> Option<&dyn RankDevice> {
        None
    }

    /// The point after all work queued so far on `stream`; `None` if it is done already.
    fn record(&self, stream: StreamRole) -> Option<Arc<dyn Event>>;

    /// Waits until all queued work is done. For fetches and tests.
    fn synchronize(&self) -> Result<()>;

    /// Calls `call` when `event` has come, from any thread, without holding up the caller if the device can avoid it.
    fn when_done(&self, event: Arc<dyn Event>, call: Box<dyn FnOnce(Result<()>) + Send>) {
        call(event.wait());
    }

    /// For a device with memory of its own: where its nodes run whose tensors are all in host memory.
    fn host(&self) -> Option<&Arc<dyn Device>> {
        None
    }

    /// A handle of its own to this device, for work that goes on after a call; `None` if nobody holds one.
    fn handle(&self) -> Option<Arc<dyn Device>> {
        None
    }

    /// The device as a recorder that computes nothing, if it is one.
    fn as_null(&self) -> Option<&NullDevice> {
        None
    }

    /// The concrete device, for kernels written for it.
    fn as_any(&self) -> &dyn Any;

    /// A tensor for a kernel's output. On the host small ones live in the tensor itself; others have whatever contents the
    /// memory had, except that bools of the host are always valid. Where kernels cannot reach the host's memory even the
    /// smallest tensor is the device's.
    fn allocate_tensor(&self, dtype: DType, shape: Shape, tag: &Arc<str>) -> Result<Tensor> {
        let is_host = self.memory().is_host();
        if is_host && let Some(tensor) = Tensor::inline(dtype, &shape) {
            return Ok(tensor);
        }
        let Some(size) = dtype.size() else { return Tensor::zeros(dtype, shape) };
        let n_bytes = shape
            .n_elements()
            .checked_mul(size)
            .ok_or_else(|| Error::invalid_argument(format!("{dtype}{shape} is too large")))?;
        let buffer = self.allocate(n_bytes, tag)?;
        let mut tensor = Tensor::from_buffer(dtype, shape, buffer)?;
        if is_host && dtype == DType::Bool {
            tensor.host_bytes_mut()?.fill(0);
        }
        Ok(tensor)
    }
}

/// A copy of a tensor of device `from` in memory of device `to`. Devices of one kind copy directly, others by way of the host;
/// strings and handles are the host's wherever they are used.
pub fn copy_between(tensor: &Tensor, from: &dyn Device, to: &dyn Device, tag: &Arc<str>) -> Result<Tensor> {
    if tensor.dtype().size().is_none() {
        return Ok(tensor.clone());
    }
    if to.memory().is_host() {
        return to.duplicate(&from.to_host(tensor)?, tag);
    }
    let is_direct = match (tensor.memory(), to.memory()) {
        (Memory::Device { kind: source, .. }, Memory::Device { kind: target, .. }) => source == target,
        (Memory::Host | Memory::PinnedHost, _) | (_, Memory::Host | Memory::PinnedHost) => true,
    };
    let staged = if is_direct { tensor.clone() } else { from.to_host(tensor)? };
    let (copy, event) = to.copy(&staged, to.memory())?;
    if let Some(event) = event {
        event.wait()?;
    }
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;

    use super::*;
    use crate::{CpuConfig, CpuDevice};

    #[test]
    fn a_cpu_copies_within_its_memory_and_refuses_what_does_not_fit() {
        let cpu = CpuDevice::new(DeviceName::local("CPU", 0), &CpuConfig::default());
        let tag: Arc<str> = "test".into();
        let from = Tensor::from((0..100).collect::<Vec<u8>>());
        let mut to = cpu.duplicate(&from, &tag).unwrap();
        assert_eq!(to, from);
        cpu.fill(&mut to, 7).unwrap();
        cpu.copy_within(&from, 10, &mut to, 98, 2).unwrap();
        assert_eq!(to.data::<u8>().unwrap()[96..], [7, 7, 10, 11]);
        for (at, to_at, n_bytes) in [(99, 0, 2), (0, 99, 2), (usize::MAX, 0, 1), (1, 1, usize::MAX)] {
            let error = cpu.copy_within(&from, at, &mut to, to_at, n_bytes).unwrap_err();
            assert_eq!(error.code(), Code::Internal, "{at} {to_at} {n_bytes}");
        }
        let reader = to.clone();
        assert!(cpu.fill(&mut to, 0).is_err() && cpu.copy_within(&from, 0, &mut to, 0, 1).is_err());
        assert_eq!(reader.data::<u8>().unwrap()[98], 10, "what is shared stays as it is");
        assert_eq!(cpu.duplicate(&Tensor::from("text"), &tag).unwrap(), Tensor::from("text"));
        assert!(cpu.recorder().is_none());
    }
}
