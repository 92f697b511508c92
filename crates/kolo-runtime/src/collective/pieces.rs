//! Slices of memory, one after the other, of which several parts can be written at the same time.

use std::ops::Range;

/// Memory that is one vector of bytes.
pub(super) struct Pieces<'a> {
    slices: Vec<&'a mut [u8]>,
    /// Where each one ends.
    ends: Vec<usize>,
}

impl<'a> Pieces<'a> {
    pub fn new(slices: Vec<&'a mut [u8]>) -> Pieces<'a> {
        let ends = slices.iter().scan(0, |end, slice| {
            *end += slice.len();
            Some(*end)
        });
        let ends = ends.collect();
        Pieces { slices, ends }
    }

    pub fn n_bytes(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Some ranges, in any order, that do not overlap. What lies outside is left out.
    pub fn parts<const N: usize>(&mut self, ranges: [Range<usize>; N]) -> [Vec<&mut [u8]>; N] {
        let mut parts = self.many_parts(&ranges);
        std::array::from_fn(|i| std::mem::take(&mut parts[i]))
    }

    /// As [`Pieces::parts`].
    pub fn many_parts(&mut self, ranges: &[Range<usize>]) -> Vec<Vec<&mut [u8]>> {
        let mut order: Vec<usize> = (0..ranges.len()).filter(|i| !ranges[*i].is_empty()).collect();
        order.sort_unstable_by_key(|i| ranges[*i].start);
        let mut parts: Vec<Vec<&mut [u8]>> = ranges.iter().map(|_| Vec::new()).collect();
        let start = order.first().map_or(0, |i| ranges[*i].start);
        let first = self.ends.partition_point(|end| *end <= start);
        let mut at = if first == 0 { 0 } else { self.ends[first - 1] };
        let mut slices = self.slices[first..].iter_mut();
        let mut rest: &mut [u8] = &mut [];
        for i in order {
            let Range { mut start, end } = ranges[i].clone();
            while start < end {
                if rest.is_empty() {
                    match slices.next() {
                        Some(slice) => rest = slice,
                        None => break,
                    }
                    continue;
                }
                let n_skipped = (start - at).min(rest.len());
                let n = (end - start).min(rest.len() - n_skipped);
                let (now, later) = std::mem::take(&mut rest)[n_skipped..].split_at_mut(n);
                if n > 0 {
                    parts[i].push(now);
                }
                (rest, at, start) = (later, at + n_skipped + n, start + n);
            }
        }
        parts
    }
}

/// Part `i` of a range that is cut into parts of `most` bytes; empty behind the last.
pub(super) fn cut(range: &Range<usize>, i: usize, most: usize) -> Range<usize> {
    let at = |i: usize| i.saturating_mul(most).saturating_add(range.start).min(range.end);
    at(i)..at(i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_cut_at_the_ends_of_slices() {
        let (mut a, mut b, mut c) = ([0u8, 1, 2], [], [3u8, 4, 5, 6]);
        let mut pieces = Pieces::new(vec![&mut a, &mut b, &mut c]);
        assert_eq!(pieces.n_bytes(), 7);
        assert_eq!(pieces.parts([5..7, 1..4, 4..4]), [vec![&[5, 6][..]], vec![&[1, 2], &[3]], vec![]]);
        assert_eq!(pieces.parts([3..5, 0..0]), [vec![&[3, 4][..]], vec![]]);
        assert_eq!(pieces.parts([0..1, 2..3, 6..9]), [vec![&[0][..]], vec![&[2]], vec![&[6]]]);
        assert_eq!(pieces.parts([0..7, 7..7])[0].concat(), [0, 1, 2, 3, 4, 5, 6]);
    }
}
