//! Everybody sends everything to everybody, and reduces it by itself: one hop, for small vectors.

use kolo_core::Result;

use super::{Call, Incoming, Outgoing, Pieces, Reduction, Scratch, cut, part_bytes, shared};

pub(super) fn all_reduce(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
) -> Result<()> {
    meet(call, scratch, pieces, reduction, None)
}

/// To one rank.
pub(super) fn reduce(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
    root: usize,
) -> Result<()> {
    meet(call, scratch, pieces, reduction, Some(root))
}

fn meet(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
    root: Option<usize>,
) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let all = 0..pieces.n_bytes();
    let most = part_bytes(call.buffer_bytes, n_ranks);
    let reduces = |other: usize| root.is_none_or(|root| root == other);
    let mut buffers = scratch.buffers(n_ranks, most.min(all.len()))?;
    for i in 0..all.len().div_ceil(most) {
        let part = cut(&all, i, most);
        let [own] = pieces.parts([part.clone()]);
        let own = shared(own);
        let sends = call.others().filter(|to| reduces(*to)).map(|to| Outgoing { to, parts: own.clone() }).collect();
        let receives = buffers.iter_mut().enumerate().filter(|(from, _)| *from != rank && reduces(rank));
        let receives = receives.map(|(from, buffer)| {
            let parts = vec![&mut buffer[..part.len()]];
            Incoming { from, parts, check: None }
        });
        call.exchange(sends, receives.collect())?;
        if reduces(rank) {
            let theirs: Vec<&[u8]> = buffers.iter().map(|buffer| &buffer[..part.len()]).collect();
            let [own] = pieces.parts([part]);
            reduction.run(&theirs[..rank], own, &theirs[rank + 1..])?;
        }
    }
    Ok(())
}
