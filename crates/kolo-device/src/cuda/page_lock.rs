//! Files of shared memory that a GPU reads directly: their pages are locked once, and copies need no staging.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use kolo_core::{Tensor, TensorData};

use super::stream::Streams;
use crate::SharedMap;
use crate::shared_map::PageLock;

/// Smaller copies are staged: locking pages costs a system call, and the sender may use the file only once.
const SMALLEST: usize = 64 << 10;

/// Whether the GPU can read this tensor of the host directly: it is in a file that another process has sent, and the
/// file's pages are locked, now or since an earlier tensor. Files are reused step after step, so locking pays.
pub(super) fn is_locked(tensor: &Tensor, streams: &Streams) -> bool {
    if tensor.n_bytes() < SMALLEST {
        return false;
    }
    let TensorData::Buffer { buffer, .. } = tensor.storage() else { return false };
    let map = buffer.as_any().downcast_ref::<SharedMap>();
    map.is_some_and(|map| map.lock_pages(|start, n_bytes| lock(start, n_bytes, streams)))
}

/// `None` if the system has no more memory to lock; copies are staged then.
fn lock(start: *const u8, n_bytes: usize, streams: &Streams) -> Option<PageLock> {
    streams.bind().ok()?;
    let start = start.cast_mut().cast::<c_void>();
    // SAFETY: the range is mapped, and is unlocked before it is unmapped: the map drops the lock first.
    let locked = unsafe { sys::cuMemHostRegister_v2(start, n_bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) };
    locked.result().ok()?;
    Some(Box::new(Locked { start, context: streams.context.clone() }))
}

/// Unlocks the pages when dropped.
struct Locked {
    start: *mut c_void,
    context: Arc<CudaContext>,
}

// SAFETY: the address is only given to the driver, which any thread may call.
unsafe impl Send for Locked {}
// SAFETY: as above; nothing is reachable through `&Locked`.
unsafe impl Sync for Locked {}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the range was locked once and is still mapped. An error means that the GPU is lost.
            let _ = unsafe { sys::cuMemHostUnregister(self.start) };
        }
    }
}
