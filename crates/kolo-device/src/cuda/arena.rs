//! The memory of one logical GPU: a block allocator with a hard limit, statistics, and a report when it runs out.
//!
//! Blocks can be reused as soon as they are freed: everything that used them was enqueued on the compute stream before,
//! and everything that will use them comes after. A captured step has a separate pool ([`Arena::begin_pool`]), so that
//! its blocks keep their addresses when it is replayed.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::result;
use kolo_core::{Buffer, Error, Memory, Result};
use parking_lot::Mutex;

use super::blocks::{Backing, Blocks, rounded};
use super::stream::Streams;
use crate::MemoryStats;

/// How much of a GPU's memory a device may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The limit in bytes; `None` is the GPU's memory.
    pub limit: Option<u64>,
    /// Allocates memory on demand; otherwise all of the limit at once.
    pub grow: bool,
}

pub(super) struct Arena {
    name: String,
    /// The GPU, for reports.
    label: String,
    number: u32,
    limit: Option<u64>,
    /// Unique in the process.
    id: u64,
    streams: Arc<Streams>,
    state: Mutex<ArenaState>,
}

/// The id of the last arena.
static LAST_ID: AtomicU64 = AtomicU64::new(0);

struct ArenaState {
    /// All memory was allocated at once, by pool 0; other pools allocate from pool 0.
    is_fixed: bool,
    /// Pool 0 is shared; others belong to captured steps.
    pools: Vec<Option<Blocks>>,
    /// Pools of dropped captures, some of whose buffers are still in use.
    abandoned: HashSet<usize>,
    live: HashMap<u64, (u64, Arc<str>)>,
    peak: u64,
    n_allocations: u64,
    n_system_allocations: u64,
}

/// Allocates segments from the driver.
struct Driver<'a> {
    streams: &'a Streams,
    n_calls: u64,
}

impl Backing for Driver<'_> {
    fn map(&mut self, n_bytes: u64) -> Option<u64> {
        self.streams.bind().ok()?;
        self.n_calls += 1;
        // SAFETY: a plain allocation.
        unsafe { result::malloc_sync(usize::try_from(n_bytes).ok()?) }.ok()
    }
    fn unmap(&mut self, base: u64, _: u64) {
        if self.streams.bind().is_ok() {
            // SAFETY: the segment came from `map`, and the caller guarantees that nothing in it is in use. The call
            // waits for the GPU, so running kernels finish first. An error means that the GPU is lost.
            let _ = unsafe { result::free_sync(base) };
        }
    }
}

/// Allocates a captured step's segments from the shared pool.
struct Common<'a>(&'a mut Blocks, Driver<'a>);

impl Backing for Common<'_> {
    fn map(&mut self, n_bytes: u64) -> Option<u64> {
        self.0.allocate(n_bytes, 0, &mut self.1).map(|(address, _)| address)
    }
    fn unmap(&mut self, base: u64, _: u64) {
        self.0.release(base);
    }
}

impl ArenaState {
    /// Bytes allocated from the driver.
    fn reserved(&self) -> u64 {
        self.counted().map(|pool| pool.reserved).sum()
    }
    /// The pools with segments from the driver.
    fn counted(&self) -> impl Iterator<Item = &Blocks> {
        self.pools.iter().take(if self.is_fixed { 1 } else { usize::MAX }).flatten()
    }
    /// Frees unused segments, except those of captured steps: a replay writes to them.
    fn trim(&mut self, driver: &mut Driver<'_>) -> u64 {
        self.pools[0].as_mut().map_or(0, |pool| pool.trim(driver))
    }
    fn in_use(&self) -> u64 {
        self.counted().map(|pool| pool.in_use).sum()
    }
    /// Allocates a block from a pool.
    fn allocate(&mut self, pool: usize, n_bytes: u64, room: u64, mut driver: Driver<'_>) -> Option<(u64, u64)> {
        let mut blocks = self.pools.get_mut(pool)?.take().unwrap_or_default();
        let found = match (pool, self.pools.first_mut().and_then(Option::as_mut)) {
            (1.., Some(common)) if self.is_fixed => blocks.allocate(n_bytes, u64::MAX, &mut Common(common, driver)),
            _ => {
                let found = blocks.allocate(n_bytes, room, &mut driver);
                self.n_system_allocations += driver.n_calls;
                found
            }
        };
        self.pools[pool] = Some(blocks);
        found
    }
    /// Frees all memory of a pool.
    fn clear(&mut self, pool: usize, mut driver: Driver<'_>) {
        let Some(mut blocks) = self.pools.get_mut(pool).and_then(Option::take) else { return };
        match (pool, self.pools.first_mut().and_then(Option::as_mut)) {
            (1.., Some(common)) if self.is_fixed => blocks.clear(&mut Common(common, driver)),
            _ => blocks.clear(&mut driver),
        }
    }
}

impl Arena {
    pub fn new(
        name: String,
        label: String,
        number: u32,
        plan: MemoryPlan,
        streams: Arc<Streams>,
    ) -> Result<Arc<Arena>> {
        let is_fixed = !plan.grow && plan.limit.is_some();
        let state = ArenaState {
            is_fixed,
            pools: vec![Some(Blocks::default())],
            abandoned: HashSet::new(),
            live: HashMap::new(),
            peak: 0,
            n_allocations: 0,
            n_system_allocations: 0,
        };
        let id = LAST_ID.fetch_add(1, Ordering::Relaxed) + 1;
        let arena = Arena { name, label, number, limit: plan.limit, id, streams, state: Mutex::new(state) };
        if let (false, Some(limit)) = (plan.grow, plan.limit) {
            let mut state = arena.state.lock();
            let mut driver = Driver { streams: &arena.streams, n_calls: 0 };
            let pool = state.pools[0].get_or_insert_default();
            if !pool.reserve(limit, &mut driver) {
                drop(state);
                return Err(Error::resource_exhausted(format!(
                    "{} asks for {limit} bytes of {} at once, and the GPU has fewer left{}",
                    arena.name,
                    arena.label,
                    arena.holders()
                )));
            }
            state.n_system_allocations = driver.n_calls;
        }
        Ok(Arc::new(arena))
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn allocate(self: &Arc<Self>, n_bytes: usize, tag: &Arc<str>) -> Result<Arc<CudaBuffer>> {
        let mut state = self.state.lock();
        let room = |state: &ArenaState| self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(state.reserved()));
        let pool = super::capture::pool_of(self.id);
        let attempt = |state: &mut ArenaState| {
            let room = room(state);
            state.allocate(pool, n_bytes as u64, room, Driver { streams: &self.streams, n_calls: 0 })
        };
        let mut found = attempt(&mut state);
        if found.is_none() {
            // Unused segments may be of the wrong size; freeing them may make room for one that fits.
            let mut trimmer = Driver { streams: &self.streams, n_calls: 0 };
            if state.trim(&mut trimmer) > 0 {
                found = attempt(&mut state);
            }
        }
        let Some((address, size)) = found else {
            let report = self.exhausted(&state, n_bytes, tag);
            drop(state);
            return Err(report.and(self.holders()));
        };
        state.n_allocations += 1;
        state.peak = state.peak.max(state.in_use());
        state.live.insert(address, (size, tag.clone()));
        Ok(Arc::new(CudaBuffer { address, n_bytes, pool, arena: self.clone() }))
    }

    pub fn stats(&self) -> MemoryStats {
        let state = self.state.lock();
        MemoryStats {
            in_use: state.in_use(),
            peak: state.peak,
            reserved: state.reserved(),
            n_allocations: state.n_allocations,
            n_system_allocations: state.n_system_allocations,
            limit: self.limit,
        }
    }

    /// Frees segments that no tensor uses.
    pub fn trim(&self) {
        let mut state = self.state.lock();
        let mut driver = Driver { streams: &self.streams, n_calls: 0 };
        state.trim(&mut driver);
    }

    /// Creates a pool for the tensors of a capture.
    pub fn begin_pool(&self) -> usize {
        let mut state = self.state.lock();
        let pool = match state.pools.iter().skip(1).position(Option::is_none) {
            Some(free) => free + 1,
            None => {
                state.pools.push(None);
                state.pools.len() - 1
            }
        };
        state.pools[pool] = Some(Blocks::default());
        pool
    }

    /// Frees a pool's memory, once no buffer of it is in use.
    pub fn drop_pool(&self, pool: usize) {
        let mut state = self.state.lock();
        state.abandoned.insert(pool);
        self.clear_abandoned(&mut state, pool);
    }

    /// Frees the memory of an abandoned pool if no buffer of it is in use.
    fn clear_abandoned(&self, state: &mut ArenaState, pool: usize) {
        let is_idle = |blocks: &Blocks| blocks.in_use == 0;
        if !state.abandoned.contains(&pool) || !state.pools.get(pool).is_some_and(|p| p.as_ref().is_some_and(is_idle)) {
            return;
        }
        state.abandoned.remove(&pool);
        state.clear(pool, Driver { streams: &self.streams, n_calls: 0 });
    }

    fn release(&self, address: u64, pool: usize) {
        let tag = {
            let mut state = self.state.lock();
            if let Some(blocks) = state.pools.get_mut(pool).and_then(Option::as_mut) {
                blocks.release(address);
            }
            self.clear_abandoned(&mut state, pool);
            state.live.remove(&address)
        };
        // The tag may be the last handle to a name: dropped outside the lock.
        drop(tag);
    }

    fn exhausted(&self, state: &ArenaState, n_bytes: usize, tag: &str) -> Error {
        const SHOWN: usize = 10;
        let mut largest: Vec<&(u64, Arc<str>)> = state.live.values().collect();
        largest.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        let list: Vec<String> = largest.iter().take(SHOWN).map(|(size, tag)| format!("{tag} {size}")).collect();
        let (in_use, reserved) = (state.in_use(), state.reserved());
        let needed = in_use.saturating_add(rounded(n_bytes as u64));
        let fragments = state.pools[0].as_ref().map_or((0, 0), Blocks::fragments);
        let hit = match self.limit {
            Some(limit) => format!("the limit of {limit} bytes"),
            None => format!("the memory of {}", self.label),
        };
        let remedy = match self.limit {
            Some(_) => format!("a limit of {needed} bytes would do, or a batch smaller by what is missing"),
            None => "a smaller batch would do, or ending another program that holds the GPU".to_owned(),
        };
        Error::resource_exhausted(format!(
            "OOM when allocating {n_bytes} bytes for '{tag}' on {}: {in_use} bytes are in use, {reserved} are reserved \
             ({} free blocks, the largest of {} bytes), and {hit} does not allow more; {remedy}; largest living tensors \
             (bytes): {}",
            self.name,
            fragments.1,
            fragments.0,
            if list.is_empty() { "none".to_owned() } else { list.join(", ") }
        ))
    }

    /// The other processes that use the GPU, for error messages.
    fn holders(&self) -> String {
        let found = super::discover(None);
        let me = std::process::id();
        let gpu = found.gpus.into_iter().find(|gpu| gpu.label() == self.label);
        let Some(mut gpu) = gpu else { return String::new() };
        gpu.processes.retain(|process| process.pid != me);
        match gpu.processes.is_empty() {
            true => String::new(),
            false => format!("; others on the GPU: {}", gpu.holders()),
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let mut driver = Driver { streams: &self.streams, n_calls: 0 };
        // If all memory was allocated at once, only pool 0 has segments from the driver.
        let n_own = if state.is_fixed { 1 } else { usize::MAX };
        state.pools.iter_mut().take(n_own).flatten().for_each(|pool| pool.clear(&mut driver));
    }
}

/// A buffer on the GPU; dropping it frees it.
pub(super) struct CudaBuffer {
    address: u64,
    n_bytes: usize,
    pool: usize,
    arena: Arc<Arena>,
}

impl CudaBuffer {
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The streams that order its use.
    pub fn streams(&self) -> &Arc<Streams> {
        &self.arena.streams
    }

    /// The id of its arena.
    pub fn arena_id(&self) -> u64 {
        self.arena.id
    }
}

impl Buffer for CudaBuffer {
    fn memory(&self) -> Memory {
        super::memory_of(self.arena.number)
    }
    fn n_bytes(&self) -> usize {
        self.n_bytes
    }
    fn host(&self) -> Option<&[u8]> {
        None
    }
    fn host_mut(&mut self) -> Option<&mut [u8]> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        self.arena.release(self.address, self.pool);
    }
}
