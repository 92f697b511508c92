//! Every rank owns a slice of the vector. The others send it theirs, it reduces them in the fixed tree over ranks, and sends the result
//! to all. A rank sends as much as in a ring, in two hops, and a sum has the same bits as in shared memory.
//!
//! Slices are cut into parts of a buffer's size: the results of one part travel with the data of the next, and what arrives is
//! still in the caches when it is reduced.

use std::ops::Range;

use kolo_core::Result;

use super::{Call, Incoming, Outgoing, Pieces, Reduction, Scratch, cut, part_bytes, shared, slices};

pub(super) fn all_reduce(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let slices = slices(pieces.n_bytes(), reduction.width, n_ranks);
    let (most, n_parts) = parts_of(call, &slices);
    let mut buffers = scratch.buffers(n_ranks, most)?;
    for i in 0..=n_parts {
        // The part before this one, which is reduced, and this one.
        let old = |rank: usize| i.checked_sub(1).map_or(0..0, |before| cut(&slices[rank], before, most));
        let new = |rank: usize| if i == n_parts { 0..0 } else { cut(&slices[rank], i, most) };
        let ranges: Vec<Range<usize>> = (0..n_ranks).map(old).chain((0..n_ranks).map(new)).collect();
        let mut parts = pieces.many_parts(&ranges);
        let mut news = parts.split_off(n_ranks);
        let reduced = shared(std::mem::take(&mut parts[rank]));
        let mut sends = Vec::with_capacity(2 * n_ranks);
        let mut receives = Vec::with_capacity(2 * n_ranks);
        for other in call.others() {
            sends.push(Outgoing { to: other, parts: reduced.clone() });
            sends.push(Outgoing { to: other, parts: shared(std::mem::take(&mut news[other])) });
            receives.push(Incoming { from: other, parts: std::mem::take(&mut parts[other]), check: None });
        }
        for (from, buffer) in buffers.iter_mut().enumerate().filter(|(from, _)| *from != rank) {
            receives.push(Incoming { from, parts: vec![&mut buffer[..new(rank).len()]], check: None });
        }
        call.exchange(sends, receives)?;
        let theirs: Vec<&[u8]> = buffers.iter().map(|buffer| &buffer[..new(rank).len()]).collect();
        let [own] = pieces.parts([new(rank)]);
        reduction.run(&theirs[..rank], own, &theirs[rank + 1..])?;
    }
    Ok(())
}

/// To one rank. The others keep what they have, and reduce in a buffer.
pub(super) fn reduce(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    pieces: &mut Pieces<'_>,
    reduction: Reduction,
    root: usize,
) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let slices = slices(pieces.n_bytes(), reduction.width, n_ranks);
    let (most, n_parts) = parts_of(call, &slices);
    // The one of this rank is where it reduces.
    let mut buffers = scratch.buffers(n_ranks, most)?;
    for i in 0..n_parts {
        let part = |rank: usize| cut(&slices[rank], i, most);
        let ranges: Vec<Range<usize>> = (0..n_ranks).map(part).collect();
        let mut parts: Vec<Vec<&[u8]>> = pieces.many_parts(&ranges).into_iter().map(shared).collect();
        let n = part(rank).len();
        copy(&parts[rank], &mut buffers[rank][..n]);
        let sends = call.others().map(|to| Outgoing { to, parts: std::mem::take(&mut parts[to]) }).collect();
        let receives = buffers.iter_mut().enumerate().filter(|(from, _)| *from != rank);
        let receives =
            receives.map(|(from, buffer)| Incoming { from, parts: vec![&mut buffer[..n]], check: None }).collect();
        call.exchange(sends, receives)?;
        let (before, rest) = buffers.split_at_mut(rank);
        let [own, after @ ..] = rest else { return Ok(()) };
        let before: Vec<&[u8]> = before.iter().map(|buffer| &buffer[..n]).collect();
        let after: Vec<&[u8]> = after.iter().map(|buffer| &buffer[..n]).collect();
        reduction.run(&before, vec![&mut own[..n]], &after)?;
        if rank != root {
            call.exchange(vec![Outgoing { to: root, parts: vec![&own[..n]] }], Vec::new())?;
            continue;
        }
        let mut parts = pieces.many_parts(&ranges);
        let mut at = 0;
        for piece in &mut parts[rank] {
            piece.copy_from_slice(&own[at..at + piece.len()]);
            at += piece.len();
        }
        let receives = call.others().map(|from| {
            let parts = std::mem::take(&mut parts[from]);
            Incoming { from, parts, check: None }
        });
        let receives = receives.collect();
        call.exchange(Vec::new(), receives)?;
    }
    Ok(())
}

/// The first half of an all-reduce, of slices that are shares of rows.
pub(super) fn reduce_scatter(
    call: &mut Call<'_>,
    scratch: &mut Scratch,
    from: &[u8],
    to: &mut [u8],
    reduction: Reduction,
) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let share = |rank: usize| rank * to.len()..(rank + 1) * to.len();
    let shares: Vec<Range<usize>> = (0..n_ranks).map(share).collect();
    let (most, n_parts) = parts_of(call, &shares);
    let mut buffers = scratch.buffers(n_ranks, most)?;
    for i in 0..n_parts {
        let part = cut(&(0..to.len()), i, most);
        let sends = call.others().map(|to| Outgoing { to, parts: vec![&from[cut(&shares[to], i, most)]] }).collect();
        let receives = buffers.iter_mut().enumerate().filter(|(from, _)| *from != rank);
        let receives = receives.map(|(from, buffer)| {
            let parts = vec![&mut buffer[..part.len()]];
            Incoming { from, parts, check: None }
        });
        call.exchange(sends, receives.collect())?;
        let theirs: Vec<&[u8]> = buffers.iter().map(|buffer| &buffer[..part.len()]).collect();
        let own = &mut to[part];
        own.copy_from_slice(&from[cut(&shares[rank], i, most)]);
        reduction.run(&theirs[..rank], vec![own], &theirs[rank + 1..])?;
    }
    Ok(())
}

/// The root sends a slice to each rank, which sends it to all others: for large vectors.
pub(super) fn broadcast(call: &mut Call<'_>, pieces: &mut Pieces<'_>, root: usize) -> Result<()> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let slices = slices(pieces.n_bytes(), 1, n_ranks);
    let (most, n_parts) = parts_of(call, &slices);
    for i in 0..=n_parts {
        // The part before this one, which its owners send on, and this one.
        let old = |rank: usize| i.checked_sub(1).map_or(0..0, |before| cut(&slices[rank], before, most));
        let new = |rank: usize| if i == n_parts { 0..0 } else { cut(&slices[rank], i, most) };
        let ranges: Vec<Range<usize>> = (0..n_ranks).map(old).chain((0..n_ranks).map(new)).collect();
        let mut parts = pieces.many_parts(&ranges);
        let mut news = parts.split_off(n_ranks);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let own = shared(std::mem::take(&mut parts[rank]));
        for other in call.others() {
            if other != root {
                sends.push(Outgoing { to: other, parts: own.clone() });
            }
            if rank == root {
                sends.push(Outgoing { to: other, parts: shared(std::mem::take(&mut news[other])) });
            } else {
                receives.push(Incoming { from: other, parts: std::mem::take(&mut parts[other]), check: None });
            }
        }
        if rank != root {
            receives.push(Incoming { from: root, parts: std::mem::take(&mut news[rank]), check: None });
        }
        call.exchange(sends, receives)?;
    }
    Ok(())
}

/// The size of parts, and how many the longest slice has.
fn parts_of(call: &Call<'_>, slices: &[Range<usize>]) -> (usize, usize) {
    let longest = slices.iter().map(Range::len).max().unwrap_or(0);
    let most = part_bytes(call.buffer_bytes, slices.len());
    (most.min(longest.max(1)), longest.div_ceil(most))
}

fn copy(from: &[&[u8]], to: &mut [u8]) {
    let mut at = 0;
    for part in from {
        to[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
}
