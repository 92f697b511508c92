//! A caching allocator for host memory, with a hard limit and statistics.
//!
//! Freed blocks are cached by size class, so that a repeated step allocates from free lists and never from the system.
//! Memory is zeroed once, when it is allocated from the system: a reused block holds old values, but is never
//! uninitialised.
//!
//! One lock guards free lists and statistics; it is held for a handful of instructions.

use std::any::Any;
use std::sync::Arc;

use kolo_core::{Buffer, Error, Memory, Result};
use parking_lot::Mutex;

use crate::cpu::pages::Pages;
use crate::cpu::topology::prefer_node;

/// Statistics of a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes held by living tensors.
    pub in_use: u64,
    /// The maximum of `in_use`.
    pub peak: u64,
    /// Bytes allocated from the system: `in_use` and cached blocks.
    pub reserved: u64,
    /// The number of allocations.
    pub n_allocations: u64,
    /// The number of allocations from the system.
    pub n_system_allocations: u64,
    /// The limit in bytes, if there is one.
    pub limit: Option<u64>,
}

/// The allocator. Shared by its buffers.
pub struct Arena {
    name: String,
    limit: Option<u64>,
    /// The preferred NUMA node of large blocks.
    numa_node: Option<usize>,
    state: Mutex<ArenaState>,
}

struct ArenaState {
    free: Vec<Vec<Block>>,
    /// The blocks in use, for the report when memory runs out; the indices of free entries are in `vacant`.
    live: Vec<Option<(u64, Arc<str>)>>,
    vacant: Vec<u32>,
    stats: MemoryStats,
}

/// A cache line: no two tensors share one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: all zeros is a valid array of bytes, any bytes are, and 64 bytes aligned to 64 leave no padding.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Line {}

const LINE: usize = 64;

/// Memory of one size class.
enum Block {
    Lines(Vec<Line>),
    /// For large blocks.
    Pages(Pages),
}

impl Block {
    /// Zeroed memory from the system; `None` if there is none. Zeroing is free for large blocks: new pages are zero.
    fn new(class: SizeClass) -> Option<Block> {
        match class.n_bytes() {
            n_bytes if n_bytes >= Pages::LEAST => Pages::new(n_bytes).ok().map(Block::Pages),
            n_bytes => bytemuck::try_zeroed_vec::<Line>(n_bytes / LINE).ok().map(Block::Lines),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Block::Lines(lines) => bytemuck::cast_slice(lines),
            Block::Pages(pages) => pages.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Block::Lines(lines) => bytemuck::cast_slice_mut(lines),
            Block::Pages(pages) => pages.bytes_mut(),
        }
    }
}

/// An empty block, left behind by `take`.
impl Default for Block {
    fn default() -> Block {
        Block::Lines(Vec::new())
    }
}

impl Arena {
    /// An empty arena. `name` appears in messages; it is the device's.
    pub fn new(name: impl Into<String>, limit: Option<u64>) -> Arc<Arena> {
        Arena::on_node(name, limit, None)
    }

    /// As [`Arena::new`]; large blocks are allocated on a NUMA node if there is room.
    pub fn on_node(name: impl Into<String>, limit: Option<u64>, numa_node: Option<usize>) -> Arc<Arena> {
        let stats = MemoryStats { limit, ..MemoryStats::default() };
        let state = ArenaState { free: Vec::new(), live: Vec::new(), vacant: Vec::new(), stats };
        Arc::new(Arena { name: name.into(), limit, numa_node, state: Mutex::new(state) })
    }

    /// Allocates a block of at least `n_bytes`. Beyond the limit the error is `ResourceExhausted` and names the largest
    /// live tensors.
    pub fn allocate(self: &Arc<Arena>, n_bytes: usize, tag: &Arc<str>) -> Result<Arc<dyn Buffer>> {
        let class = SizeClass::of(n_bytes);
        let size = class.n_bytes() as u64;
        let mut state = self.state.lock();
        if self.limit.is_some_and(|limit| state.stats.in_use + size > limit) {
            return Err(self.exhausted(&state, n_bytes, tag));
        }
        let cached = state.free.get_mut(class.0).and_then(Vec::pop);
        let block = match cached {
            Some(block) => block,
            None => {
                if self.limit.is_some_and(|limit| state.stats.reserved + size > limit) {
                    let freed: u64 =
                        state.free.iter_mut().flat_map(|list| list.drain(..)).map(|b| b.bytes().len() as u64).sum();
                    state.stats.reserved -= freed;
                }
                let Some(mut block) = Block::new(class) else {
                    return Err(self.exhausted(&state, n_bytes, tag).and(" (the system refused)"));
                };
                if let Some(node) = self.numa_node {
                    prefer_node(block.bytes_mut(), node);
                }
                state.stats.reserved += size;
                state.stats.n_system_allocations += 1;
                block
            }
        };
        state.stats.in_use += size;
        state.stats.peak = state.stats.peak.max(state.stats.in_use);
        state.stats.n_allocations += 1;
        let entry = Some((size, tag.clone()));
        let place = match state.vacant.pop() {
            Some(place) => {
                state.live[place as usize] = entry;
                place
            }
            None => {
                state.live.push(entry);
                (state.live.len() - 1) as u32
            }
        };
        Ok(Arc::new(ArenaBuffer { block, n_bytes, class, place, arena: self.clone() }))
    }

    /// Memory statistics.
    pub fn stats(&self) -> MemoryStats {
        self.state.lock().stats
    }

    /// Frees cached blocks.
    pub fn trim(&self) {
        let mut state = self.state.lock();
        let freed = std::mem::take(&mut state.free);
        state.stats.reserved = state.stats.in_use;
        drop(state);
        drop(freed);
    }

    fn exhausted(&self, state: &ArenaState, n_bytes: usize, tag: &str) -> Error {
        const SHOWN: usize = 10;
        let mut largest: Vec<&(u64, Arc<str>)> = state.live.iter().flatten().collect();
        largest.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        let list: Vec<String> = largest.iter().take(SHOWN).map(|(size, tag)| format!("{tag} {size}")).collect();
        let limit = match self.limit {
            Some(limit) => format!("the limit of {limit} bytes"),
            None => "the memory of the machine".to_owned(),
        };
        Error::resource_exhausted(format!(
            "OOM when allocating {n_bytes} bytes for '{tag}' on {}: {} bytes are in use and {limit} does not allow more; \
             largest living tensors (bytes): {}",
            self.name,
            state.stats.in_use,
            if list.is_empty() { "none".to_owned() } else { list.join(", ") }
        ))
    }
}

/// A block of an arena in use; dropping it returns it.
struct ArenaBuffer {
    block: Block,
    n_bytes: usize,
    class: SizeClass,
    place: u32,
    arena: Arc<Arena>,
}

impl Buffer for ArenaBuffer {
    fn memory(&self) -> Memory {
        Memory::Host
    }
    fn n_bytes(&self) -> usize {
        self.n_bytes
    }
    fn host(&self) -> Option<&[u8]> {
        Some(&self.block.bytes()[..self.n_bytes])
    }
    fn host_mut(&mut self) -> Option<&mut [u8]> {
        Some(&mut self.block.bytes_mut()[..self.n_bytes])
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for ArenaBuffer {
    fn drop(&mut self) {
        let block = std::mem::take(&mut self.block);
        let mut state = self.arena.state.lock();
        let tag = state.live[self.place as usize].take();
        state.vacant.push(self.place);
        state.stats.in_use -= self.class.n_bytes() as u64;
        if state.free.len() <= self.class.0 {
            state.free.resize_with(self.class.0 + 1, Vec::new);
        }
        state.free[self.class.0].push(block);
        drop(state);
        // The tag may be the last handle to a name: dropped outside the lock.
        drop(tag);
    }
}

/// Sizes are rounded up to a power of two or a quarter step between two, so at most a fifth is wasted and blocks fit
/// the next tensor of about the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SizeClass(usize);

impl SizeClass {
    fn of(n_bytes: usize) -> SizeClass {
        let lines = n_bytes.div_ceil(LINE).max(1);
        if lines <= 4 {
            return SizeClass(lines - 1);
        }
        // Between two powers of two there are four classes: 5/4, 6/4, 7/4 and 8/4 of the lower.
        let log = (lines - 1).ilog2() as usize;
        let quarter = 1usize << (log - 2);
        let step = (lines - (1 << log)).div_ceil(quarter);
        SizeClass((log - 1) * 4 + step - 1)
    }

    fn n_bytes(self) -> usize {
        if self.0 < 4 {
            return (self.0 + 1) * LINE;
        }
        let (log, step) = (self.0 / 4 + 1, self.0 % 4 + 1);
        ((1usize << log) + step * (1usize << (log - 2))) * LINE
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;

    use super::*;

    fn tag(name: &str) -> Arc<str> {
        name.into()
    }

    #[test]
    fn classes_hold_what_they_promise_and_waste_little() {
        let mut last = 0;
        for n in 1..200_000 {
            let class = SizeClass::of(n);
            assert!(class.n_bytes() >= n, "{n}");
            assert!(class.0 >= last, "{n}");
            if n > 4 * LINE {
                assert!(class.n_bytes() - n <= n / 4 + LINE, "{n} -> {}", class.n_bytes());
            }
            last = class.0;
        }
    }

    #[test]
    fn blocks_that_come_back_are_used_again() {
        let arena = Arena::new("cpu", None);
        for _ in 0..5 {
            let _buffer = arena.allocate(1000, &tag("a")).unwrap();
        }
        let stats = arena.stats();
        assert_eq!((stats.n_allocations, stats.n_system_allocations, stats.in_use), (5, 1, 0));
        assert!(stats.reserved > 0);
        arena.trim();
        assert_eq!(arena.stats().reserved, 0);
    }

    #[test]
    fn one_byte_over_the_limit_is_refused_and_names_the_holders() {
        let arena = Arena::new("/device:CPU:0", Some(4096));
        let big = arena.allocate(3072, &tag("dense/MatMul")).unwrap();
        let rest = arena.allocate(1024, &tag("loss")).unwrap();
        let error = arena.allocate(1, &tag("more")).err().unwrap();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert!(error.message().contains("limit of 4096 bytes"), "{error}");
        assert!(error.message().contains("dense/MatMul 3072, loss 1024"), "{error}");
        drop(big);
        assert!(arena.allocate(3000, &tag("again")).is_ok());
        drop(rest);
    }

    #[test]
    fn cached_blocks_give_way_when_the_limit_is_near() {
        let arena = Arena::new("cpu", Some(8192));
        drop(arena.allocate(4096, &tag("a")).unwrap());
        assert!(arena.allocate(8192, &tag("b")).is_ok(), "the block of 4096 is dropped first");
    }

    #[test]
    fn absurd_sizes_are_an_error() {
        let arena = Arena::new("cpu", None);
        assert_eq!(arena.allocate(1 << 60, &tag("a")).err().map(|e| e.code()), Some(Code::ResourceExhausted));
    }
}
