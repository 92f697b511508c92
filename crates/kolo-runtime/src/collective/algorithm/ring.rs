//! Slices go round: in N-1 steps each becomes the sum of all on its way, and in N-1 more it goes to everybody. Every rank sends to one
//! neighbour and receives from the other, so it needs few connections, and a slice is summed in the order in which it goes round.

use std::ops::Range;

use kolo_core::{Result, Tensor};

use super::{Call, Incoming, Outgoing, Pieces, Reduction, Scratch, cut, part_bytes, shared, slices};

pub(super) fn all_reduce(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
) -> Result<()> {
    let slices = slices(pieces.n_bytes(), reduction.width, call.n_ranks());
    scatter(call, scratch, pieces, reduction, &slices)?;
    go_round(call, pieces, &slices)
}

/// The first half, of slices that are shares of rows.
pub(super) fn reduce_scatter(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    from: &[u8],
    to: &mut [u8],
    reduction: Reduction,
) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    // Partial sums are kept where the caller's data is not.
    let mut partial = Tensor::zeros(reduction.dtype, [from.len() / reduction.width])?;
    let all = partial.host_bytes_mut()?;
    all.copy_from_slice(from);
    let shares: Vec<Range<usize>> = (0..n_ranks).map(|rank| rank * to.len()..(rank + 1) * to.len()).collect();
    scatter(call, scratch, &mut Pieces::new(vec![&mut *all]), reduction, &shares)?;
    to.copy_from_slice(&all[shares[rank].clone()]);
    Ok(())
}

/// The second half, of slices that are rows.
pub(super) fn all_gather(call: &mut Call<'_>, own: &[u8], to: &mut [u8]) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let shares: Vec<Range<usize>> = (0..n_ranks).map(|rank| rank * own.len()..(rank + 1) * own.len()).collect();
    to[shares[rank].clone()].copy_from_slice(own);
    go_round(call, &mut Pieces::new(vec![to]), &shares)
}

/// Each rank gets its slice of the sum; in the others it has partial sums.
fn scatter(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
    slices: &[Range<usize>],
) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let most = part_bytes(call.buffer_bytes, 1);
    let longest = slices.iter().map(Range::len).max().unwrap_or(0);
    let mut buffers = scratch.buffers(1, most.min(longest))?;
    let from = (rank + n_ranks - 1) % n_ranks;
    for step in 1..n_ranks {
        // A slice begins with the rank after its owner.
        let sent = &slices[(rank + n_ranks - step) % n_ranks];
        let received = &slices[(rank + 2 * n_ranks - step - 1) % n_ranks];
        for i in 0..longest.div_ceil(most) {
            let (sent, received) = (cut(sent, i, most), cut(received, i, most));
            let n = received.len();
            let [sent, own] = pieces.parts([sent, received]);
            let buffer = &mut buffers[0][..n];
            call.exchange(
                vec![Outgoing { to: (rank + 1) % n_ranks, parts: shared(sent) }],
                vec![Incoming { from, parts: vec![&mut *buffer], check: None }],
            )?;
            // The lower rank first, as far as it is known: with two ranks, it is the order of the fixed tree.
            match from < rank {
                true => reduction.of_parts().run(&[buffer], own, &[])?,
                false => reduction.of_parts().run(&[], own, &[buffer])?,
            }
        }
    }
    let [own] = pieces.parts([slices[rank].clone()]);
    reduction.finish(own, n_ranks)
}

/// Every rank has its own slice, and gets those of all.
pub(super) fn go_round(call: &mut Call<'_>, pieces: &mut Pieces<'_>, slices: &[Range<usize>]) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    for step in 0..n_ranks - 1 {
        let sent = slices[(rank + n_ranks - step) % n_ranks].clone();
        let received = slices[(rank + 2 * n_ranks - step - 1) % n_ranks].clone();
        let [sent, received] = pieces.parts([sent, received]);
        call.exchange(
            vec![Outgoing { to: (rank + 1) % n_ranks, parts: shared(sent) }],
            vec![Incoming { from: (rank + n_ranks - 1) % n_ranks, parts: received, check: None }],
        )?;
    }
    Ok(())
}
