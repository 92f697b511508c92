//! The memory of one logical GPU: blocks of the card's memory, a hard limit, statistics, and the report when it runs out.
//!
//! Blocks may be handed out again as soon as they are freed: everything that used them was enqueued on the compute stream
//! before, and everything that will use them comes after. A pool of its own ([`Arena::begin_pool`]) keeps the blocks of a
//! captured step apart, so that they are still where the capture saw them when it is replayed.

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

/// How much of a card a device may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The most bytes; `None` leaves it to the card.
    pub limit: Option<u64>,
    /// Takes memory when it is needed; otherwise all of the limit at once.
    pub grow: bool,
}

pub(super) struct Arena {
    name: String,
    /// The card, for reports.
    label: String,
    number: u32,
    limit: Option<u64>,
    /// A number no other arena of the process has.
    id: u64,
    streams: Arc<Streams>,
    state: Mutex<State>,
}

/// The last number given to an arena.
static LAST_ID: AtomicU64 = AtomicU64::new(0);

struct State {
    /// All memory was taken at once, by pool 0; the others get theirs from there.
    is_fixed: bool,
    /// Pool 0 is everybody's; others belong to captured steps.
    pools: Vec<Option<Blocks>>,
    /// Pools of captures that are gone, some of whose buffers are not.
    abandoned: HashSet<usize>,
    live: HashMap<u64, (u64, Arc<str>)>,
    peak: u64,
    n_allocations: u64,
    n_system_allocations: u64,
}

/// The driver's plain allocations.
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
            // SAFETY: the segment came from `map`, and the caller says that nothing in it is in use. The call waits for
            // the card, so kernels that still run are done first. An error means that the card is lost.
            let _ = unsafe { result::free_sync(base) };
        }
    }
}

/// The memory that everybody shares, for a captured step's own.
struct Common<'a>(&'a mut Blocks, Driver<'a>);

impl Backing for Common<'_> {
    fn map(&mut self, n_bytes: u64) -> Option<u64> {
        self.0.allocate(n_bytes, 0, &mut self.1).map(|(address, _)| address)
    }
    fn unmap(&mut self, base: u64, _: u64) {
        self.0.release(base);
    }
}

impl State {
    /// Bytes that were taken from the card.
    fn reserved(&self) -> u64 {
        self.counted().map(|pool| pool.reserved).sum()
    }
    /// The pools that have memory of their own.
    fn counted(&self) -> impl Iterator<Item = &Blocks> {
        self.pools.iter().take(if self.is_fixed { 1 } else { usize::MAX }).flatten()
    }
    /// Gives segments back in which nothing is used. Those of captured steps stay: a replay writes to them.
    fn trim(&mut self, driver: &mut Driver<'_>) -> u64 {
        self.pools[0].as_mut().map_or(0, |pool| pool.trim(driver))
    }
    fn in_use(&self) -> u64 {
        self.counted().map(|pool| pool.in_use).sum()
    }
    /// A block of a pool.
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
    /// Gives all memory of a pool back.
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
        let state = State {
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
                    "{} asks for {limit} bytes of {} at once, and the card has fewer left{}",
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
        let room = |state: &State| self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(state.reserved()));
        let pool = super::capture::pool_of(self.id);
        let attempt = |state: &mut State| {
            let room = room(state);
            state.allocate(pool, n_bytes as u64, room, Driver { streams: &self.streams, n_calls: 0 })
        };
        let mut found = attempt(&mut state);
        if found.is_none() {
            // Segments that nobody uses may be of the wrong size; without them there may be room for one that fits.
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

    /// Gives memory that no tensor holds back to the card.
    pub fn trim(&self) {
        let mut state = self.state.lock();
        let mut driver = Driver { streams: &self.streams, n_calls: 0 };
        state.trim(&mut driver);
    }

    /// A pool for the tensors of a capture.
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

    /// Gives a pool's memory back; if somebody still holds a buffer of it, when the last of them is gone.
    pub fn drop_pool(&self, pool: usize) {
        let mut state = self.state.lock();
        state.abandoned.insert(pool);
        self.clear_abandoned(&mut state, pool);
    }

    /// Gives back the memory of a pool that nobody will allocate from, once nobody holds any of it.
    fn clear_abandoned(&self, state: &mut State, pool: usize) {
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
        // The tag may be the last handle to a name: freed outside of the lock.
        drop(tag);
    }

    fn exhausted(&self, state: &State, n_bytes: usize, tag: &str) -> Error {
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
            None => "a smaller batch would do, or ending another program that holds the card".to_owned(),
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

    /// Who else is on the card.
    fn holders(&self) -> String {
        let found = super::discover(None);
        let me = std::process::id();
        let card = found.cards.into_iter().find(|card| card.label() == self.label);
        let Some(mut card) = card else { return String::new() };
        card.processes.retain(|process| process.pid != me);
        match card.processes.is_empty() {
            true => String::new(),
            false => format!("; others on the card: {}", card.holders()),
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let mut driver = Driver { streams: &self.streams, n_calls: 0 };
        // Of memory that was taken at once, the other pools have none of their own.
        let n_own = if state.is_fixed { 1 } else { usize::MAX };
        state.pools.iter_mut().take(n_own).flatten().for_each(|pool| pool.clear(&mut driver));
    }
}

/// Bytes on the card; dropping them gives them back.
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

    /// The arena it is of.
    pub fn arena_id(&self) -> u64 {
        self.arena.id
    }
}

impl Buffer for CudaBuffer {
    fn memory(&self) -> Memory {
        Memory::Cuda(self.arena.number)
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
