//! A best-fit allocator with coalescing, over memory that it allocates in large segments.
//!
//! Pure bookkeeping: addresses are numbers, and [`Backing`] allocates and frees segments. The smallest free block that
//! is large enough is used, and split if the remainder is large enough; a freed block coalesces with free neighbours in
//! its segment.

use std::collections::{BTreeMap, BTreeSet};

/// Where segments come from.
pub(super) trait Backing {
    /// Allocates a segment of this many bytes; `None` if that fails.
    fn map(&mut self, n_bytes: u64) -> Option<u64>;
    /// Frees a segment.
    fn unmap(&mut self, base: u64, n_bytes: u64);
}

/// Addresses and sizes are multiples of this: enough for every vector load, and the alignment of the driver's
/// allocator.
pub(super) const ALIGN: u64 = 256;
/// The first segment; each new one doubles, so that there are few.
const FIRST_SEGMENT: u64 = 2 << 20;
const LARGEST_SEGMENT: u64 = 512 << 20;
/// A block is split if the remainder is at least this large.
const WORTH_KEEPING: u64 = ALIGN;

#[derive(Default)]
pub(super) struct Blocks {
    /// Segments: base to size.
    segments: BTreeMap<u64, u64>,
    /// Every block, free or not, by address.
    blocks: BTreeMap<u64, Block>,
    /// Free blocks by size, then address.
    free: BTreeSet<(u64, u64)>,
    next_segment: u64,
    /// Bytes allocated from the backing.
    pub reserved: u64,
    /// Bytes in use.
    pub in_use: u64,
}

#[derive(Clone, Copy)]
struct Block {
    size: u64,
    segment: u64,
    is_free: bool,
}

/// The size that a request takes.
pub(super) fn rounded(n_bytes: u64) -> u64 {
    n_bytes.max(1).div_ceil(ALIGN).saturating_mul(ALIGN)
}

impl Blocks {
    /// Allocates a block of at least `n_bytes`, from a free block or a new segment of at most `room` bytes. `None` if
    /// there is neither.
    pub fn allocate(&mut self, n_bytes: u64, room: u64, backing: &mut dyn Backing) -> Option<(u64, u64)> {
        let size = rounded(n_bytes);
        if let Some(found) = self.take_free(size) {
            return Some(found);
        }
        if size > room {
            return None;
        }
        // A segment may be larger than requested, so that the next requests fit too, but a large request gets its own.
        let wish = self.next_segment.max(FIRST_SEGMENT).max(size).min(room.max(size));
        let wish = if size > LARGEST_SEGMENT { size } else { wish };
        let (base, n_bytes) = match backing.map(wish) {
            Some(base) => (base, wish),
            None => (backing.map(size)?, size),
        };
        self.next_segment = (self.next_segment.max(FIRST_SEGMENT) * 2).min(LARGEST_SEGMENT);
        self.segments.insert(base, n_bytes);
        self.reserved += n_bytes;
        self.blocks.insert(base, Block { size: n_bytes, segment: base, is_free: true });
        self.free.insert((n_bytes, base));
        self.take_free(size)
    }

    /// Allocates one segment in advance, for a device that does not grow. False if that fails.
    pub fn reserve(&mut self, n_bytes: u64, backing: &mut dyn Backing) -> bool {
        let Some(base) = backing.map(n_bytes) else { return false };
        self.segments.insert(base, n_bytes);
        self.reserved += n_bytes;
        self.blocks.insert(base, Block { size: n_bytes, segment: base, is_free: true });
        self.free.insert((n_bytes, base));
        true
    }

    fn take_free(&mut self, size: u64) -> Option<(u64, u64)> {
        let &(found, address) = self.free.range((size, 0)..).next()?;
        self.free.remove(&(found, address));
        let block = self.blocks.get_mut(&address)?;
        block.is_free = false;
        let (segment, rest) = (block.segment, found - size);
        if rest >= WORTH_KEEPING {
            block.size = size;
            self.blocks.insert(address + size, Block { size: rest, segment, is_free: true });
            self.free.insert((rest, address + size));
        }
        let taken = if rest >= WORTH_KEEPING { size } else { found };
        self.in_use += taken;
        Some((address, taken))
    }

    /// Frees a block from [`Blocks::allocate`]. Other addresses are ignored.
    pub fn release(&mut self, address: u64) {
        let Some(&Block { mut size, segment, is_free: false }) = self.blocks.get(&address) else { return };
        self.in_use -= size;
        let mut start = address;
        if let Some((&next, &block)) = self.blocks.range(address + 1..).next()
            && block.is_free
            && block.segment == segment
        {
            self.blocks.remove(&next);
            self.free.remove(&(block.size, next));
            size += block.size;
        }
        if let Some((&before, &block)) = self.blocks.range(..address).next_back()
            && block.is_free
            && block.segment == segment
        {
            self.blocks.remove(&address);
            self.free.remove(&(block.size, before));
            size += block.size;
            start = before;
        }
        self.blocks.insert(start, Block { size, segment, is_free: true });
        self.free.insert((size, start));
    }

    /// Frees unused segments, and returns their total bytes.
    pub fn trim(&mut self, backing: &mut dyn Backing) -> u64 {
        let idle: Vec<(u64, u64)> = self
            .segments
            .iter()
            .filter(|(base, size)| self.free.contains(&(**size, **base)))
            .map(|(base, size)| (*base, *size))
            .collect();
        let mut freed = 0;
        for (base, size) in idle {
            self.segments.remove(&base);
            self.blocks.remove(&base);
            self.free.remove(&(size, base));
            backing.unmap(base, size);
            freed += size;
        }
        self.reserved -= freed;
        if self.segments.is_empty() {
            self.next_segment = 0;
        }
        freed
    }

    /// The size of the largest free block, and the number of free blocks.
    pub fn fragments(&self) -> (u64, usize) {
        (self.free.last().map_or(0, |(size, _)| *size), self.free.len())
    }

    /// Frees all segments, even those in use: the memory's owner is being dropped.
    pub fn clear(&mut self, backing: &mut dyn Backing) {
        for (base, size) in std::mem::take(&mut self.segments) {
            backing.unmap(base, size);
        }
        *self = Blocks::default();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A fake backing.
    struct Fake {
        left: u64,
        next: u64,
        mapped: BTreeMap<u64, u64>,
    }

    impl Fake {
        fn new(left: u64) -> Fake {
            Fake { left, next: 1 << 30, mapped: BTreeMap::new() }
        }
    }

    impl Backing for Fake {
        fn map(&mut self, n_bytes: u64) -> Option<u64> {
            self.left = self.left.checked_sub(n_bytes)?;
            let base = self.next;
            // Segments are adjacent, so that coalescing across a boundary would be detected.
            self.next += n_bytes;
            self.mapped.insert(base, n_bytes);
            Some(base)
        }
        fn unmap(&mut self, base: u64, n_bytes: u64) {
            assert_eq!(self.mapped.remove(&base), Some(n_bytes));
            self.left += n_bytes;
        }
    }

    const ALL: u64 = u64::MAX;

    #[test]
    fn the_smallest_block_that_fits_is_taken() {
        let (mut blocks, mut fake) = (Blocks::default(), Fake::new(ALL));
        let mut take = |n: u64| blocks.allocate(n, ALL, &mut fake).unwrap().0;
        let (a, _b, c, _d) = (take(4096), take(256), take(1024), take(256));
        blocks.release(a);
        blocks.release(c);
        assert_eq!(blocks.allocate(1000, ALL, &mut fake).unwrap().0, c);
        assert_eq!(blocks.allocate(1000, ALL, &mut fake).unwrap().0, a);
        assert_eq!(fake.mapped.len(), 1);
    }

    #[test]
    fn free_neighbours_join_but_not_across_segments() {
        let (mut blocks, mut fake) = (Blocks::default(), Fake::new(ALL));
        let taken: Vec<u64> = (0..8).map(|_| blocks.allocate(FIRST_SEGMENT / 8, ALL, &mut fake).unwrap().0).collect();
        for i in [1, 3, 5, 7, 0, 2, 4, 6] {
            blocks.release(taken[i]);
        }
        assert_eq!(blocks.fragments(), (FIRST_SEGMENT, 1));
        let whole = blocks.allocate(FIRST_SEGMENT, ALL, &mut fake).unwrap().0;
        let other = blocks.allocate(FIRST_SEGMENT * 2, ALL, &mut fake).unwrap().0;
        blocks.release(whole);
        blocks.release(other);
        assert_eq!(blocks.fragments().1, 2);
        assert_eq!(blocks.trim(&mut fake), FIRST_SEGMENT * 3);
        assert_eq!((blocks.reserved, blocks.in_use, fake.mapped.len()), (0, 0, 0));
    }

    #[test]
    fn room_is_a_hard_limit_and_a_poor_backing_is_asked_for_less() {
        let (mut blocks, mut fake) = (Blocks::default(), Fake::new(4096));
        assert!(blocks.allocate(4097, 4096, &mut fake).is_none());
        assert_eq!(blocks.allocate(2048, 1 << 30, &mut fake).unwrap().1, 2048);
        assert_eq!(blocks.reserved, 2048);
        assert!(blocks.allocate(4096, 1 << 30, &mut fake).is_none());
        assert!(blocks.allocate(0, 1 << 30, &mut fake).is_some(), "nothing takes a block too");
        assert!(blocks.allocate(ALL - 5, ALL, &mut fake).is_none());
    }

    #[test]
    fn releasing_twice_or_nonsense_changes_nothing() {
        let (mut blocks, mut fake) = (Blocks::default(), Fake::new(ALL));
        let (a, size) = blocks.allocate(100, ALL, &mut fake).unwrap();
        blocks.release(a + 1);
        assert_eq!(blocks.in_use, size);
        blocks.release(a);
        blocks.release(a);
        assert_eq!(blocks.in_use, 0);
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_come_back(sizes in prop::collection::vec((1u64..3_000_000, any::<bool>()), 1..200)) {
            let (mut blocks, mut fake) = (Blocks::default(), Fake::new(ALL));
            let mut live: BTreeMap<u64, u64> = BTreeMap::new();
            for (size, release) in sizes {
                let (at, taken) = blocks.allocate(size, ALL, &mut fake).unwrap();
                prop_assert!(taken >= size && at % ALIGN == 0);
                if let Some((&before, &n)) = live.range(..=at).next_back() { prop_assert!(before + n <= at); }
                if let Some((&after, _)) = live.range(at..).next() { prop_assert!(at + taken <= after); }
                live.insert(at, taken);
                if release {
                    let (&first, _) = live.iter().nth(live.len() / 2).unwrap();
                    live.remove(&first);
                    blocks.release(first);
                }
                prop_assert_eq!(blocks.in_use, live.values().sum::<u64>());
            }
            live.keys().for_each(|&at| blocks.release(at));
            blocks.trim(&mut fake);
            prop_assert!(fake.mapped.is_empty() && blocks.reserved == 0);
        }
    }
}
