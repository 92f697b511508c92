//! A cache of pinned host memory, which the GPU reads and writes directly.
//!
//! Pinning memory is slow, so blocks are cached by size (powers of two). A block that the GPU still reads is returned
//! with a mark, and reused once the mark has completed.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::result;
use kolo_core::{Buffer, Memory, Result};
use parking_lot::Mutex;

use super::check;
use super::stream::{Mark, Streams};
use crate::Event;

/// The smallest block.
const SMALLEST: usize = 4 << 10;
/// Larger blocks are not cached.
const LARGEST_KEPT: usize = 256 << 20;

pub(super) struct Pinned {
    streams: Arc<Streams>,
    state: Mutex<PinnedBlocks>,
}

#[derive(Default)]
struct PinnedBlocks {
    /// Free blocks by the logarithm of their size.
    free: Vec<Vec<Block>>,
    /// Blocks that the GPU still reads, oldest first.
    busy: VecDeque<(Mark, Block)>,
}

struct Block {
    start: *mut u8,
    n_bytes: usize,
}

// SAFETY: a block owns its memory; its sole owner may use it on any thread.
unsafe impl Send for Block {}
// SAFETY: only the address and the size are accessible through `&Block`.
unsafe impl Sync for Block {}

impl Pinned {
    pub fn new(streams: Arc<Streams>) -> Arc<Pinned> {
        Arc::new(Pinned { streams, state: Mutex::default() })
    }

    /// A block of at least `n_bytes`.
    pub fn take(self: &Arc<Self>, n_bytes: usize) -> Result<PinnedBuffer> {
        let size = n_bytes.max(SMALLEST).next_power_of_two();
        let class = size.ilog2() as usize;
        let cached = {
            let mut state = self.state.lock();
            while state.busy.front().is_some_and(|(mark, _)| mark.is_done()) {
                if let Some((_, block)) = state.busy.pop_front() {
                    state.keep(block);
                }
            }
            state.free.get_mut(class).and_then(Vec::pop)
        };
        let block = match cached {
            Some(block) => block,
            None => {
                self.streams.bind()?;
                // SAFETY: a plain allocation; the flags ask for nothing special.
                let start = check("locking host memory", unsafe { result::malloc_host(size, 0) })?.cast::<u8>();
                // SAFETY: `size` bytes were just allocated there. Zeroed once, so that they are never uninitialised.
                unsafe { start.write_bytes(0, size) };
                Block { start, n_bytes: size }
            }
        };
        Ok(PinnedBuffer { block: Some(block), n_bytes, pool: self.clone() })
    }

    /// Returns a buffer that the GPU still reads until `mark`.
    pub fn give_back_after(&self, mut buffer: PinnedBuffer, mark: Mark) {
        if let Some(block) = buffer.block.take() {
            self.state.lock().busy.push_back((mark, block));
        }
    }
}

impl PinnedBlocks {
    /// Caches a free block, or frees it if it is very large.
    fn keep(&mut self, block: Block) {
        if block.n_bytes > LARGEST_KEPT {
            return free(&block);
        }
        let class = block.n_bytes.ilog2() as usize;
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        self.free[class].push(block);
    }
}

fn free(block: &Block) {
    // SAFETY: the block came from `malloc_host` and is not used any more. An error means that the GPU is lost.
    let _ = unsafe { result::free_host(block.start.cast()) };
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        for (mark, block) in state.busy.drain(..) {
            // The GPU must not read freed memory; if waiting fails, the GPU is lost and does not read.
            let _ = mark.wait();
            free(&block);
        }
        state.free.iter().flatten().for_each(free);
    }
}

/// A block of the cache in use; dropping it returns it.
pub(super) struct PinnedBuffer {
    block: Option<Block>,
    n_bytes: usize,
    pool: Arc<Pinned>,
}

impl PinnedBuffer {
    /// The first byte's address.
    pub fn start(&self) -> *mut u8 {
        self.block.as_ref().map_or(std::ptr::null_mut(), |block| block.start)
    }

    fn bytes(&self) -> &[u8] {
        match &self.block {
            // SAFETY: the block has at least `n_bytes`, was zeroed, and is ours alone while `self` lives. The GPU
            // writes to it only before the event that its reader waits for.
            Some(block) => unsafe { std::slice::from_raw_parts(block.start, self.n_bytes) },
            None => &[],
        }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &self.block {
            // SAFETY: as above, and `self` is borrowed alone.
            Some(block) => unsafe { std::slice::from_raw_parts_mut(block.start, self.n_bytes) },
            None => &mut [],
        }
    }
}

impl Buffer for PinnedBuffer {
    fn memory(&self) -> Memory {
        Memory::PinnedHost
    }
    fn n_bytes(&self) -> usize {
        self.n_bytes
    }
    fn host(&self) -> Option<&[u8]> {
        Some(self.bytes())
    }
    fn host_mut(&mut self) -> Option<&mut [u8]> {
        Some(self.bytes_mut())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.pool.state.lock().keep(block);
        }
    }
}
