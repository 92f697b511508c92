//! A binomial tree: rank 0 is its root, and a rank's parent is the one without its lowest bit. Sums grow on the way up, each
//! rank adding its children from the nearest on, so they are those of the fixed tree over ranks; the result goes down again.
//! For small vectors on many ranks, and for broadcasts.

use kolo_core::Result;

use super::{Call, Incoming, Outgoing, Pieces, Reduction, Scratch, cut, part_bytes, shared};

pub(super) fn all_reduce(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let all = 0..pieces.n_bytes();
    let most = part_bytes(call.buffer_bytes, 1);
    let mut buffers = scratch.buffers(1, most.min(all.len()))?;
    for i in 0..all.len().div_ceil(most) {
        let part = cut(&all, i, most);
        for child in children(rank, n_ranks) {
            let buffer = &mut buffers[0][..part.len()];
            call.exchange(Vec::new(), vec![Incoming { from: child, parts: vec![&mut *buffer], check: None }])?;
            let [own] = pieces.parts([part.clone()]);
            reduction.of_parts().run(&[], own, &[buffer])?;
        }
        let [own] = pieces.parts([part]);
        if rank != 0 {
            call.exchange(vec![Outgoing { to: parent(rank), parts: shared(own) }], Vec::new())?;
        } else {
            reduction.finish(own, n_ranks)?;
        }
    }
    broadcast(call, pieces, 0)
}

/// Ranks are counted from the root on.
pub(super) fn broadcast(call: &mut Call<'_>, pieces: &mut Pieces<'_>, root: usize) -> Result<()> {
    let n_ranks = call.n_ranks();
    let rank = (call.rank() + n_ranks - root) % n_ranks;
    let all = 0..pieces.n_bytes();
    // In parts, so that a rank sends on what it has while more arrives at its parent.
    let most = part_bytes(call.buffer_bytes, 1);
    for i in 0..all.len().div_ceil(most) {
        let part = cut(&all, i, most);
        if rank != 0 {
            let [own] = pieces.parts([part.clone()]);
            call.exchange(
                Vec::new(),
                vec![Incoming { from: (parent(rank) + root) % n_ranks, parts: own, check: None }],
            )?;
        }
        let [own] = pieces.parts([part]);
        let own = shared(own);
        // The farthest first: it has the most to send on.
        let children: Vec<usize> = children(rank, n_ranks).collect();
        let send = |child: &usize| Outgoing { to: (child + root) % n_ranks, parts: own.clone() };
        call.exchange(children.iter().rev().map(send).collect(), Vec::new())?;
    }
    Ok(())
}

/// A rank without its lowest bit.
fn parent(rank: usize) -> usize {
    rank & rank.wrapping_sub(1)
}

/// The ranks whose parent is this one, the nearest first.
fn children(rank: usize, n_ranks: usize) -> impl Iterator<Item = usize> {
    let distances = (0..usize::BITS - 1).map(|bit| 1usize << bit);
    distances.take_while(move |distance| rank & distance == 0 && rank + distance < n_ranks).map(move |d| rank + d)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_but_the_root_is_a_child_of_its_parent() {
        for n_ranks in 1..20 {
            let mut found = vec![];
            for rank in 0..n_ranks {
                for child in children(rank, n_ranks) {
                    assert_eq!(parent(child), rank);
                    found.push(child);
                }
            }
            found.sort_unstable();
            assert_eq!(found, (1..n_ranks).collect::<Vec<_>>());
        }
    }
}
