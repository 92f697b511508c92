//! A caching allocator for host memory, with a hard limit and statistics.
//!
//! Freed blocks are cached by size class, so that a repeated step allocates from free lists and never from the system.
//! Memory is zeroed once, when it is allocated from the system: a reused block holds old values, but is never
//! uninitialised.
//!
//! Large blocks that no allocation has needed for [`IDLE`] go back to the system, so that one large step does not hold the
//! machine's memory for ever: each free list counts the blocks that were never taken in that time. Whatever a repeated
//! step takes again stays, however often it is freed in between. Up to [`KEPT`] bytes stay in any case.
//!
//! One lock guards free lists and statistics; it is held for a handful of instructions.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kolo_core::{Buffer, DType, Error, Memory, Result, Shape, Tensor};
use parking_lot::Mutex;

use crate::cpu::machine_memory::MACHINE;
use crate::cpu::pages::Pages;
use crate::cpu::topology::prefer_node;

/// How long a large block stays unused before it goes back to the system: longer than nearly every step, since taking it
/// again costs page faults. It may take twice as long.
const IDLE: Duration = Duration::from_secs(5);

/// The number of cached bytes that are not worth giving back.
const KEPT: u64 = 64 << 20;

/// No address space is larger; sizes up to this can be rounded up.
const MOST: usize = 1 << 62;

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
    free: Vec<FreeList>,
    /// The blocks in use, for the report when memory runs out; the indices of free entries are in `vacant`.
    live: Vec<Option<(u64, Arc<str>)>>,
    vacant: Vec<u32>,
    stats: MemoryStats,
    /// A thread gives idle blocks back; it ends when there are few.
    is_trimmed: bool,
}

/// The free blocks of one size class.
#[derive(Default)]
struct FreeList {
    blocks: Vec<Block>,
    /// The least number of blocks since the last look for idle ones: so many were not needed.
    n_idle: usize,
}

impl FreeList {
    fn pop(&mut self) -> Option<Block> {
        let block = self.blocks.pop();
        self.n_idle = self.n_idle.min(self.blocks.len());
        block
    }
}

/// Bytes that are counted like a tensor though they lie elsewhere: elements of lists, queues, tables. Until dropped.
#[must_use]
pub struct Charge {
    /// `None` where nothing is counted.
    held: Option<HeldCharge>,
}

struct HeldCharge {
    arena: Arc<Arena>,
    place: u32,
    /// As in the arena's list, so that it can be read without the lock.
    tag: Arc<str>,
}

impl Charge {
    /// Nothing is counted.
    pub const NONE: Charge = Charge { held: None };

    /// Counts `n_bytes` instead of what it counted before. An error if the difference does not fit; then it stays as it was.
    pub fn resize(&mut self, n_bytes: usize) -> Result<()> {
        let Some(HeldCharge { arena, place, tag }) = &self.held else { return Ok(()) };
        let mut state = arena.state.lock();
        match state.resize(*place, n_bytes as u64, |n| arena.allows(n)) {
            Ok(()) => Ok(()),
            Err(old) => Err(arena.exhausted(&state, n_bytes - old as usize, tag)),
        }
    }

    /// As [`Charge::resize`], for whoever can do with less: false if the difference does not fit, without the report that an error
    /// is.
    pub fn try_resize(&mut self, n_bytes: usize) -> bool {
        self.held.as_ref().is_none_or(|HeldCharge { arena, place, .. }| {
            arena.state.lock().resize(*place, n_bytes as u64, |n| arena.allows(n)).is_ok()
        })
    }

    /// What it is counted as.
    pub fn tag(&self) -> Arc<str> {
        self.held.as_ref().map(|held| held.tag.clone()).unwrap_or_default()
    }

    /// A second charge against the same memory.
    pub fn another(&self, n_bytes: usize) -> Result<Charge> {
        match &self.held {
            Some(HeldCharge { arena, tag, .. }) => arena.charge(n_bytes, tag),
            None => Ok(Charge::NONE),
        }
    }

    /// A tensor in the memory that the charge counts against, for those who have no device at hand. It has whatever the memory had,
    /// except that bools are always valid.
    pub fn tensor(&self, dtype: DType, shape: Shape) -> Result<Tensor> {
        let (Some(held), Some(size)) = (&self.held, dtype.size()) else { return Tensor::zeros(dtype, shape) };
        if let Some(tensor) = Tensor::inline(dtype, &shape) {
            return Ok(tensor);
        }
        let n_bytes = shape
            .n_elements()
            .checked_mul(size)
            .ok_or_else(|| Error::invalid_argument(format!("{dtype}{shape} is too large")))?;
        let buffer = held.arena.allocate(n_bytes, &held.tag)?;
        let mut tensor = Tensor::from_buffer(dtype, shape, buffer)?;
        if dtype == DType::Bool {
            tensor.host_bytes_mut()?.fill(0);
        }
        Ok(tensor)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let Some(HeldCharge { arena, place, .. }) = self.held.take() else { return };
        let mut state = arena.state.lock();
        let entry = state.vacate(place);
        let n_bytes = entry.as_ref().map_or(0, |(n_bytes, _)| *n_bytes);
        state.stats.in_use -= n_bytes;
        state.stats.reserved -= n_bytes;
        drop(state);
        drop(entry);
    }
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
        let state = ArenaState { free: Vec::new(), live: Vec::new(), vacant: Vec::new(), stats, is_trimmed: false };
        Arc::new(Arena { name: name.into(), limit, numa_node, state: Mutex::new(state) })
    }

    /// Allocates a block of at least `n_bytes`. Beyond the limit the error is `ResourceExhausted` and names the largest
    /// live tensors.
    pub fn allocate(self: &Arc<Arena>, n_bytes: usize, tag: &Arc<str>) -> Result<Arc<dyn Buffer>> {
        if n_bytes > MOST {
            return Err(self.exhausted(&self.state.lock(), n_bytes, tag));
        }
        let class = SizeClass::of(n_bytes);
        let size = class.n_bytes() as u64;
        let mut state = self.state.lock();
        if !self.allows(state.stats.in_use.saturating_add(size)) {
            return Err(self.exhausted(&state, n_bytes, tag));
        }
        let cached = state.free.get_mut(class.0).and_then(FreeList::pop);
        let block = match cached {
            Some(block) => block,
            None => {
                state.make_room(size, |n| self.allows(n));
                let block = Block::new(class).or_else(|| {
                    // The system may have no more because of what is cached.
                    state.drop_cached();
                    Block::new(class)
                });
                let Some(mut block) = block else {
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
        state.stats.n_allocations += 1;
        let place = state.enter(size, tag);
        Ok(Arc::new(ArenaBuffer { block, n_bytes, class, place, arena: self.clone() }))
    }

    /// Counts bytes that lie elsewhere against the limit, until the charge is dropped.
    pub fn charge(self: &Arc<Arena>, n_bytes: usize, tag: &Arc<str>) -> Result<Charge> {
        let size = n_bytes as u64;
        let mut state = self.state.lock();
        if !self.allows(state.stats.in_use.saturating_add(size)) {
            return Err(self.exhausted(&state, n_bytes, tag));
        }
        state.make_room(size, |n| self.allows(n));
        state.stats.reserved += size;
        let place = state.enter(size, tag);
        Ok(Charge { held: Some(HeldCharge { arena: self.clone(), place, tag: tag.clone() }) })
    }

    fn tag(&self, place: u32) -> Arc<str> {
        self.state.lock().live[place as usize].as_ref().map(|(_, tag)| tag.clone()).unwrap_or_default()
    }

    /// Whether so many bytes may be in use: what the system could not back would end the process.
    fn allows(&self, n_bytes: u64) -> bool {
        match self.limit {
            Some(limit) => n_bytes <= limit,
            None => MACHINE.has(n_bytes),
        }
    }

    /// Gives blocks back to the system that were not needed since the last call. False if few are left: there is no
    /// more to do.
    fn trim_idle(&self) -> bool {
        let mut state = self.state.lock();
        let mut idle = Vec::new();
        let first = SizeClass::of(Pages::LEAST).0;
        let mut n_cached = state.stats.reserved - state.stats.in_use;
        for (class, list) in state.free.iter_mut().enumerate().skip(first).rev() {
            let size = SizeClass(class).n_bytes() as u64;
            // The first ones are the oldest.
            let n = list.n_idle.min((n_cached.saturating_sub(KEPT)).div_ceil(size) as usize);
            idle.extend(list.blocks.drain(..n));
            list.n_idle = list.blocks.len();
            n_cached -= n as u64 * size;
        }
        state.stats.reserved = state.stats.in_use + n_cached;
        state.is_trimmed = n_cached > KEPT;
        let goes_on = state.is_trimmed;
        drop(state);
        // Unmapping takes long.
        drop(idle);
        goes_on
    }

    /// Memory statistics.
    pub fn stats(&self) -> MemoryStats {
        self.state.lock().stats
    }

    /// Frees cached blocks.
    pub fn trim(&self) {
        let mut state = self.state.lock();
        let freed: Vec<FreeList> = std::mem::take(&mut state.free);
        state.stats.reserved = state.stats.in_use;
        drop(state);
        drop(freed);
    }

    fn exhausted(&self, state: &ArenaState, n_bytes: usize, tag: &str) -> Error {
        const SHOWN: usize = 10;
        let largest_first = |a: &&(u64, Arc<str>), b: &&(u64, Arc<str>)| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1));
        let mut largest: Vec<&(u64, Arc<str>)> = state.live.iter().flatten().filter(|(size, _)| *size > 0).collect();
        // There may be millions, and everybody waits for the lock.
        if largest.len() > SHOWN {
            largest.select_nth_unstable_by(SHOWN, largest_first);
            largest.truncate(SHOWN);
        }
        largest.sort_by(largest_first);
        let list: Vec<String> = largest.iter().map(|(size, tag)| format!("{tag} {size}")).collect();
        let limit = match self.limit {
            Some(limit) => format!("the limit of {limit} bytes"),
            None => format!("the memory of the machine, {} bytes,", MACHINE.known()),
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

impl ArenaState {
    /// Enters bytes that are in use; gives their place in the list.
    fn enter(&mut self, size: u64, tag: &Arc<str>) -> u32 {
        self.stats.in_use += size;
        self.stats.peak = self.stats.peak.max(self.stats.in_use);
        let entry = Some((size, tag.clone()));
        match self.vacant.pop() {
            Some(place) => {
                self.live[place as usize] = entry;
                place
            }
            None => {
                self.live.push(entry);
                (self.live.len() - 1) as u32
            }
        }
    }

    /// Counts `size` bytes for an entry instead of what it has, which is the error if the difference does not fit.
    fn resize(&mut self, place: u32, size: u64, allows: impl Fn(u64) -> bool) -> std::result::Result<(), u64> {
        let Some((entry, _)) = &mut self.live[place as usize] else { return Ok(()) };
        let old = *entry;
        let in_use = self.stats.in_use - old;
        if size > old && !allows(in_use.saturating_add(size)) {
            return Err(old);
        }
        *entry = size;
        if size > old {
            self.make_room(size - old, allows);
        }
        self.stats.in_use = in_use + size;
        self.stats.peak = self.stats.peak.max(self.stats.in_use);
        self.stats.reserved = self.stats.reserved - old + size;
        Ok(())
    }

    /// Removes an entry. Its tag may be the last handle to a name: dropped outside the lock.
    fn vacate(&mut self, place: u32) -> Option<(u64, Arc<str>)> {
        self.vacant.push(place);
        self.live[place as usize].take()
    }

    /// Gives cached blocks back if otherwise so many more bytes would take more from the system than is allowed.
    fn make_room(&mut self, n_bytes: u64, allows: impl Fn(u64) -> bool) {
        if !allows(self.stats.reserved.saturating_add(n_bytes)) {
            self.drop_cached();
        }
    }

    fn drop_cached(&mut self) {
        self.free.clear();
        self.stats.reserved = self.stats.in_use;
    }
}

/// Gives idle blocks back from time to time, until few are left or the arena is gone.
fn trim_in_background(arena: Weak<Arena>) {
    loop {
        std::thread::sleep(IDLE);
        match arena.upgrade() {
            Some(arena) if arena.trim_idle() => {}
            _ => return,
        }
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
    fn is_counted(&self) -> bool {
        true
    }
    fn another(&self, n_bytes: usize) -> Option<Result<Arc<dyn Buffer>>> {
        let tag = self.arena.tag(self.place);
        Some(self.arena.allocate(n_bytes, &tag))
    }
}

impl Drop for ArenaBuffer {
    fn drop(&mut self) {
        let block = std::mem::take(&mut self.block);
        let mut state = self.arena.state.lock();
        let entry = state.vacate(self.place);
        state.stats.in_use -= self.class.n_bytes() as u64;
        if state.free.len() <= self.class.0 {
            state.free.resize_with(self.class.0 + 1, FreeList::default);
        }
        state.free[self.class.0].blocks.push(block);
        let is_much = self.n_bytes >= Pages::LEAST && state.stats.reserved - state.stats.in_use > KEPT;
        let begins = is_much && !std::mem::replace(&mut state.is_trimmed, true);
        drop(state);
        drop(entry);
        if begins {
            let arena = Arc::downgrade(&self.arena);
            let trim = std::thread::Builder::new().name("kolo-trim".to_owned()).spawn(|| trim_in_background(arena));
            if trim.is_err() {
                // The next large block tries again.
                self.arena.state.lock().is_trimmed = false;
            }
        }
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
    fn cached_blocks_give_way_to_what_lies_elsewhere() {
        let arena = Arena::new("cpu", Some(8192));
        let use_and_free = || drop(arena.allocate(7168, &tag("a")).unwrap());
        use_and_free();
        let mut charge = arena.charge(7000, &tag("list")).unwrap();
        assert_eq!(arena.stats().reserved, 7000, "what was cached is dropped");
        charge.resize(0).unwrap();
        use_and_free();
        assert_eq!(arena.stats().reserved, 7168);
        charge.resize(1000).unwrap();
        assert_eq!(arena.stats().reserved, 8168, "both fit");
        charge.resize(7000).unwrap();
        assert_eq!(arena.stats().reserved, 7000);
    }

    #[test]
    fn blocks_that_no_step_needs_go_back_and_others_stay() {
        let arena = Arena::new("cpu", None);
        let large = 100 << 20;
        let step = || drop(arena.allocate(large, &tag("step")).unwrap());
        let once = arena.allocate(3 * large, &tag("once")).unwrap();
        step();
        drop(once);
        let of = |n_bytes| SizeClass::of(n_bytes).n_bytes() as u64;
        assert_eq!(arena.stats().reserved, of(large) + of(3 * large));
        // What was there before the first look has not been idle for a whole period.
        assert!(arena.trim_idle());
        step();
        assert!(arena.trim_idle(), "what a repeated step needs is still there");
        assert_eq!(arena.stats().reserved, of(large));
        step();
        assert_eq!(arena.stats().n_system_allocations, 2);
        arena.trim_idle();
        assert!(!arena.trim_idle(), "nothing is left to give back");
        assert_eq!(arena.stats().reserved, 0);
    }

    #[test]
    fn small_caches_stay() {
        let arena = Arena::new("cpu", None);
        drop(arena.allocate(KEPT as usize / 2, &tag("a")).unwrap());
        assert!(!arena.trim_idle() && !arena.trim_idle());
        assert_eq!(arena.stats().reserved, KEPT / 2);
    }

    #[test]
    fn charges_count_until_they_are_dropped() {
        let arena = Arena::new("cpu", Some(1000));
        let charge = arena.charge(900, &tag("list")).unwrap();
        let error = arena.charge(101, &tag("more")).err().unwrap();
        assert!(error.message().contains("'more'") && error.message().contains("list 900"), "{error}");
        assert!(arena.allocate(128, &tag("tensor")).is_err());
        drop(charge);
        assert_eq!((arena.stats().in_use, arena.stats().reserved), (0, 0));
        assert!(arena.charge(1000, &tag("all")).is_ok());
    }

    #[test]
    fn a_charge_grows_within_the_limit_and_shrinks() {
        let arena = Arena::new("cpu", Some(1000));
        let mut charge = arena.charge(0, &tag("queue")).unwrap();
        charge.resize(800).unwrap();
        let error = charge.resize(1001).unwrap_err();
        assert!(error.message().contains("201 bytes for 'queue'"), "{error}");
        assert_eq!((arena.stats().in_use, arena.stats().reserved), (800, 800));
        charge.resize(100).unwrap();
        let tensor = charge.tensor(DType::F32, [100].into()).unwrap();
        assert_eq!(tensor, Tensor::zeros(DType::F32, [100]).unwrap());
        assert!(arena.stats().in_use > 500 && charge.tensor(DType::F32, [200].into()).is_err());
        drop((charge, tensor));
        assert_eq!((arena.stats().in_use, arena.stats().peak), (0, 800));
    }

    #[test]
    fn absurd_sizes_are_an_error() {
        let arena = Arena::new("cpu", None);
        for n_bytes in [1 << 60, 1 << 63, usize::MAX] {
            assert_eq!(arena.allocate(n_bytes, &tag("a")).err().map(|e| e.code()), Some(Code::ResourceExhausted));
        }
        let charge = arena.charge(0, &tag("a")).unwrap();
        assert!(charge.tensor(DType::F64, [1 << 31, 1 << 31].into()).is_err());
    }

    #[test]
    fn the_ten_largest_are_named_and_a_try_changes_nothing() {
        let arena = Arena::new("cpu", Some(10_000));
        let _held: Vec<Charge> = (0..100).map(|i| arena.charge(i * 7 % 100, &tag(&format!("c{i}"))).unwrap()).collect();
        let error = arena.charge(10_000, &tag("more")).err().unwrap();
        assert!(
            error.message().ends_with("c57 99, c14 98, c71 97, c28 96, c85 95, c42 94, c99 93, c56 92, c13 91, c70 90"),
            "{error}"
        );
        let mut charge = arena.charge(10, &tag("queue")).unwrap();
        let before = arena.stats();
        assert!(!charge.try_resize(10_000));
        assert_eq!(arena.stats(), before);
        assert!(charge.try_resize(20));
        assert_eq!(arena.stats().in_use, before.in_use + 10);
        let mut none = Charge::NONE;
        assert!(none.try_resize(usize::MAX));
    }
}
