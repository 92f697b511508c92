//! Collectives that only move rows: each message goes straight from the rank that has it to the one that gets it.

use kolo_core::{Result, Tensor};

use super::super::uneven::{TOLD_BYTES, Uneven};
use super::super::vector::with_rows;
use super::choice::Algorithm;
use super::{Call, Incoming, Outgoing, Pieces, ring};

pub(super) fn all_gather(call: &mut Call<'_>, own: &[u8], to: &mut [u8]) -> Result<()> {
    let sends = call.others().map(|to| Outgoing { to, parts: vec![own] }).collect();
    let receives = fill(call.rank(), own, to);
    call.exchange(sends, receives)
}

pub(super) fn gather(call: &mut Call<'_>, tensor: &Tensor, root: usize) -> Result<Tensor> {
    let (rank, n_ranks, own) = (call.rank(), call.n_ranks(), tensor.host_bytes()?);
    if rank != root {
        call.exchange(vec![Outgoing { to: root, parts: vec![own] }], Vec::new())?;
        return Ok(tensor.clone());
    }
    let mut all = with_rows(tensor, |rows| rows.checked_mul(n_ranks))?;
    let receives = fill(rank, own, all.host_bytes_mut()?);
    call.exchange(Vec::new(), receives)?;
    Ok(all)
}

pub(super) fn scatter(call: &mut Call<'_>, tensor: &Tensor, root: usize) -> Result<Tensor> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let mut share = with_rows(tensor, |rows| rows.checked_div(n_ranks))?;
    let to = share.host_bytes_mut()?;
    if rank != root {
        call.exchange(Vec::new(), vec![Incoming { from: root, parts: vec![to], check: None }])?;
        return Ok(share);
    }
    let (all, n) = (tensor.host_bytes()?, to.len());
    to.copy_from_slice(&all[rank * n..(rank + 1) * n]);
    let sends = call.others().map(|to| Outgoing { to, parts: vec![&all[to * n..(to + 1) * n]] });
    call.exchange(sends.collect(), Vec::new())?;
    Ok(share)
}

pub(super) fn all_to_all(call: &mut Call<'_>, tensor: &Tensor) -> Result<Tensor> {
    let (rank, n_ranks) = (call.rank(), call.n_ranks());
    let mut shares = with_rows(tensor, Some)?;
    let (all, n) = (tensor.host_bytes()?, tensor.n_bytes() / n_ranks);
    let sends = call.others().map(|to| Outgoing { to, parts: vec![&all[to * n..(to + 1) * n]] }).collect();
    let receives = fill(rank, &all[rank * n..(rank + 1) * n], shares.host_bytes_mut()?);
    call.exchange(sends, receives)?;
    Ok(shares)
}

/// Any numbers of rows: first each rank tells each other how many it gets.
pub(super) fn uneven(
    call: &mut Call<'_>,
    algorithm: Algorithm,
    uneven: &Uneven,
    tensor: &Tensor,
) -> Result<Vec<Tensor>> {
    let (rank, n_ranks, own) = (call.rank(), call.n_ranks(), tensor.host_bytes()?);
    let telling: Vec<[u8; TOLD_BYTES]> = (0..n_ranks).map(|other| uneven.told(other)).collect();
    let mut told = telling.clone();
    let sends = call.others().map(|to| Outgoing { to, parts: vec![&telling[to][..]] }).collect();
    let receives = told.iter_mut().enumerate().filter(|(from, _)| *from != rank);
    let receives = receives.map(|(from, told)| Incoming { from, parts: vec![&mut told[..]], check: None });
    call.exchange(sends, receives.collect())?;
    let mut coming = uneven.coming(tensor, &told)?;
    let (to, places) = (coming.joined.host_bytes_mut()?, &coming.places);
    to[places[rank].clone()].copy_from_slice(&own[uneven.bytes_for(rank)]);
    if algorithm == Algorithm::Ring {
        ring::go_round(call, &mut Pieces::new(vec![to]), places)?;
        return uneven.given(tensor, coming);
    }
    let sends = call.others().map(|to| Outgoing { to, parts: vec![&own[uneven.bytes_for(to)]] }).collect();
    let mut receives = Vec::with_capacity(n_ranks);
    let mut rest = to;
    for (from, place) in places.iter().enumerate() {
        let (part, behind) = rest.split_at_mut(place.len());
        rest = behind;
        if from != rank {
            receives.push(Incoming { from, parts: vec![part], check: None });
        }
    }
    call.exchange(sends, receives)?;
    uneven.given(tensor, coming)
}

/// Messages of the same size from all ranks, in their order; this rank's own is copied.
fn fill<'a>(rank: usize, own: &[u8], to: &'a mut [u8]) -> Vec<Incoming<'a>> {
    let mut receives = Vec::new();
    for (from, part) in to.chunks_mut(own.len().max(1)).enumerate() {
        match from == rank {
            true => part.copy_from_slice(own),
            false => receives.push(Incoming { from, parts: vec![part], check: None }),
        }
    }
    receives
}
