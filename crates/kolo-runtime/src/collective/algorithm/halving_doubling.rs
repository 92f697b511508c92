//! Recursive halving and doubling: pairs of neighbours exchange halves of the vector and each sums one, pairs of pairs exchange
//! quarters, and so on; then the same way back with the sums. It takes few steps, and with a power of two of ranks the sums
//! are those of the fixed tree over ranks.
//!
//! Ranks beyond the largest power of two give their vectors to a neighbour first, and get the result from it at the end.

use std::ops::Range;

use kolo_core::Result;

use super::{Call, Incoming, Outgoing, Pieces, Reduction, Scratch, cut, part_bytes, shared};

pub(super) fn all_reduce(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
) -> Result<()> {
    let (rank, n_ranks, width) = (call.rank(), call.n_ranks(), reduction.width);
    let all = 0..pieces.n_bytes();
    let n_active = 1 << n_ranks.ilog2();
    // The first ranks are in pairs, of which the first works for both.
    let n_paired = 2 * (n_ranks - n_active);
    let active = match rank < n_paired {
        true if rank % 2 == 1 => {
            let most = part_bytes(call.buffer_bytes, 1);
            for i in 0..all.len().div_ceil(most) {
                let [own] = pieces.parts([cut(&all, i, most)]);
                call.exchange(vec![Outgoing { to: rank - 1, parts: shared(own) }], Vec::new())?;
            }
            let [own] = pieces.parts([all]);
            return call.exchange(Vec::new(), vec![Incoming { from: rank - 1, parts: own, check: None }]);
        }
        true => {
            add(call, scratch, pieces, reduction, rank + 1, 0..0, all.clone())?;
            rank / 2
        }
        false => rank - n_paired / 2,
    };
    let rank_of = |active: usize| if active < n_paired / 2 { 2 * active } else { active + n_paired / 2 };

    // The range that this rank sums, after each step.
    let mut ranges = vec![all.clone()];
    let mut own = all.clone();
    for distance in (0..n_active.ilog2()).map(|step| 1usize << step) {
        let middle = own.start + own.len() / width / 2 * width;
        let (kept, given) = match active & distance == 0 {
            true => (own.start..middle, middle..own.end),
            false => (middle..own.end, own.start..middle),
        };
        add(call, scratch, pieces, reduction, rank_of(active ^ distance), given, kept.clone())?;
        own = kept;
        ranges.push(own.clone());
    }
    let [sum] = pieces.parts([own]);
    reduction.finish(sum, n_ranks)?;
    for step in (0..n_active.ilog2() as usize).rev() {
        let (mine, both) = (ranges[step + 1].clone(), &ranges[step]);
        let theirs = if mine.start == both.start { mine.end..both.end } else { both.start..mine.start };
        let peer = rank_of(active ^ (1 << step));
        let [mine, theirs] = pieces.parts([mine, theirs]);
        call.exchange(
            vec![Outgoing { to: peer, parts: shared(mine) }],
            vec![Incoming { from: peer, parts: theirs, check: None }],
        )?;
    }
    if rank < n_paired {
        let [own] = pieces.parts([all]);
        call.exchange(vec![Outgoing { to: rank + 1, parts: shared(own) }], Vec::new())?;
    }
    Ok(())
}

/// Gives a peer one range, and adds the peer's other one to this rank's.
fn add(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
    peer: usize,
    given: Range<usize>,
    kept: Range<usize>,
) -> Result<()> {
    let most = part_bytes(call.buffer_bytes, 1);
    let longest = given.len().max(kept.len());
    let mut buffers = scratch.buffers(1, most.min(longest))?;
    for i in 0..longest.div_ceil(most) {
        let (given, kept) = (cut(&given, i, most), cut(&kept, i, most));
        let buffer = &mut buffers[0][..kept.len()];
        let [given, own] = pieces.parts([given, kept]);
        call.exchange(
            vec![Outgoing { to: peer, parts: shared(given) }],
            vec![Incoming { from: peer, parts: vec![&mut *buffer], check: None }],
        )?;
        match peer < call.rank() {
            true => reduction.of_parts().run(&[buffer], own, &[])?,
            false => reduction.of_parts().run(&[], own, &[buffer])?,
        }
    }
    Ok(())
}
