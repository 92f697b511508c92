//! Rows of which ranks may have different numbers: who gives how many to whom.
//!
//! Before any rows go, each rank tells each other how many it gets, together with what it is about to do; so nobody has to know it
//! before the call, and memory is taken for what comes.

use std::ops::Range;

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_ops::collective::{CollectiveCall, CollectiveGroup, CollectiveKind, Root, call};

/// The bytes by which a rank tells another one how many rows it gets.
pub(super) const TOLD_BYTES: usize = 8;

/// This rank's part.
pub(super) struct Uneven {
    kind: CollectiveKind,
    rank: usize,
    /// The rows that each rank gets of this one; `None` if it is sent nothing.
    gives: Vec<Option<Range<usize>>>,
    /// Who is to send, if only one rank may.
    receives_from: Option<Option<usize>>,
    row_bytes: usize,
}

impl Uneven {
    pub fn new(kind: CollectiveKind, rank: usize, n_ranks: usize, tensors: &[Tensor]) -> Result<Uneven> {
        let Some((value, list)) = tensors.split_first() else {
            return Err(Error::invalid_argument(format!("{kind} takes a tensor, and there is none")));
        };
        let dims = value.shape().dims();
        let Some((&n_rows, others)) = dims.split_first() else {
            return Err(Error::invalid_argument(format!("{kind} needs rows, and a scalar has none")));
        };
        let size = value.dtype().size().unwrap_or(0);
        let row_bytes = others.iter().product::<usize>() * size;
        let all = 0..n_rows;
        let mut receives_from = None;
        let gives = match kind {
            CollectiveKind::AllGatherUneven => vec![Some(all); n_ranks],
            CollectiveKind::GatherUneven(Root(root)) => only(root, n_ranks, all),
            CollectiveKind::ScatterUneven(Root(root)) if root != rank => vec![None; n_ranks],
            CollectiveKind::ScatterUneven(_) | CollectiveKind::AllToAllUneven => shares(kind, n_ranks, n_rows, list)?,
            _ => {
                let [to, from] = peers(kind, n_ranks, list)?;
                receives_from = Some(from);
                to.map_or_else(|| vec![None; n_ranks], |to| only(to, n_ranks, all))
            }
        };
        Ok(Uneven { kind, rank, gives, receives_from, row_bytes })
    }

    /// Whether every rank that gets something gets all rows.
    pub fn gives_all(&self) -> bool {
        !matches!(self.kind, CollectiveKind::ScatterUneven(_) | CollectiveKind::AllToAllUneven)
    }

    /// What this rank tells another one.
    pub fn told(&self, other: usize) -> [u8; TOLD_BYTES] {
        // Nothing sent is not the same as no rows sent.
        let n = self.gives.get(other).and_then(Option::as_ref).map_or(0, |rows| 1 + rows.len() as u64);
        n.to_le_bytes()
    }

    /// Bytes of this rank's tensor that another one gets.
    pub fn bytes_for(&self, other: usize) -> Range<usize> {
        let rows = self.gives.get(other).cloned().flatten().unwrap_or(0..0);
        rows.start * self.row_bytes..rows.end * self.row_bytes
    }

    /// The bytes that a rank says to give.
    pub fn bytes_told(&self, told: [u8; TOLD_BYTES]) -> usize {
        rows_told(told).unwrap_or(0).saturating_mul(self.row_bytes)
    }

    /// What comes to this rank, from what all have told it.
    pub fn coming(&self, value: &Tensor, told: &[[u8; TOLD_BYTES]]) -> Result<Coming> {
        if let Some(expected) = self.receives_from {
            for (other, told) in told.iter().enumerate() {
                let (sends, rank) = (rows_told(*told).is_some(), self.rank);
                if sends && expected != Some(other) {
                    return Err(Error::invalid_argument(format!(
                        "rank {other} sends to rank {rank}, which receives from {}",
                        expected.map_or_else(|| "nobody".to_owned(), |from| format!("rank {from}"))
                    )));
                }
                if !sends && expected == Some(other) {
                    return Err(Error::invalid_argument(format!(
                        "rank {rank} receives from rank {other}, which does not send to it"
                    )));
                }
            }
        }
        let rows: Vec<usize> = told.iter().map(|told| rows_told(*told).unwrap_or(0)).collect();
        let too_many = || Error::invalid_argument(format!("{} gives more rows than there can be", self.kind));
        let total = rows.iter().try_fold(0usize, |sum, n| sum.checked_add(*n)).ok_or_else(too_many)?;
        let mut dims = value.shape().dims().to_vec();
        dims[0] = total;
        let joined = Tensor::zeros(value.dtype(), Shape::new(&dims)?)?;
        let ends = rows.iter().scan(0, |at, n| {
            let start = *at;
            *at += n * self.row_bytes;
            Some(start..*at)
        });
        Ok(Coming { places: ends.collect(), joined, rows })
    }

    /// What the call gives this rank.
    pub fn given(&self, value: &Tensor, Coming { joined, rows, .. }: Coming) -> Result<Vec<Tensor>> {
        let rows = || Tensor::vector(rows.iter().map(|n| *n as i64).collect::<Vec<i64>>());
        Ok(match self.kind {
            CollectiveKind::GatherUneven(Root(root)) if root != self.rank => vec![value.clone(), rows()],
            CollectiveKind::ScatterUneven(_) | CollectiveKind::SendReceive => vec![joined],
            _ => vec![joined, rows()],
        })
    }
}

/// Memory for what comes.
pub(super) struct Coming {
    pub joined: Tensor,
    /// Where the bytes of each rank go.
    pub places: Vec<Range<usize>>,
    /// How many rows each rank gives.
    rows: Vec<usize>,
}

/// Numbers of rows, as a call takes them.
pub fn row_numbers(rows: &[usize]) -> Tensor {
    Tensor::vector(rows.iter().map(|n| i64::try_from(*n).unwrap_or(i64::MAX)).collect::<Vec<i64>>())
}

/// Rows, and how many came from each rank.
pub fn joined_rows(given: Vec<Tensor>) -> Result<(Tensor, Vec<usize>)> {
    let Ok([rows, counts]) = <[Tensor; 2]>::try_from(given) else {
        return Err(Error::internal("a collective of rows gave something else"));
    };
    let counts = counts.data::<i64>()?.iter().map(|n| *n as usize).collect();
    Ok((rows, counts))
}

/// What each rank of a group says, in a text of any length.
pub fn all_say(group: &dyn CollectiveGroup, name: &str, said: &str) -> Result<Vec<String>> {
    let tensors = vec![Tensor::vector(said.as_bytes().to_vec())];
    let kind = CollectiveKind::AllGatherUneven;
    let given = call(group, CollectiveCall { kind, name: name.into(), tensors, cancel: None, deadline: None })?;
    let (all, counts) = joined_rows(given)?;
    let mut rest = all.data::<u8>()?;
    let mut next = |n: usize| {
        let (text, others) = rest.split_at(n.min(rest.len()));
        rest = others;
        String::from_utf8_lossy(text).into_owned()
    };
    Ok(counts.into_iter().map(&mut next).collect())
}

/// The one tensor that a call gives.
pub fn only_tensor(given: Vec<Tensor>) -> Result<Tensor> {
    let Ok([tensor]) = <[Tensor; 1]>::try_from(given) else {
        return Err(Error::internal("a collective did not give one tensor"));
    };
    Ok(tensor)
}

fn rows_told(told: [u8; TOLD_BYTES]) -> Option<usize> {
    u64::from_le_bytes(told).checked_sub(1).map(|n| usize::try_from(n).unwrap_or(usize::MAX))
}

fn only(one: usize, n_ranks: usize, rows: Range<usize>) -> Vec<Option<Range<usize>>> {
    (0..n_ranks).map(|rank| (rank == one).then(|| rows.clone())).collect()
}

fn list_of(kind: CollectiveKind, what: &str, n: usize, list: &[Tensor]) -> Result<Vec<i64>> {
    let [list] = list else {
        return Err(Error::invalid_argument(format!(
            "{kind} takes a tensor and {what}, not {} tensors",
            1 + list.len()
        )));
    };
    if list.dtype() != DType::I64 || list.shape().dims() != [n] {
        return Err(Error::invalid_argument(format!(
            "{kind} takes {what} as int64[{n}], not as {}{}",
            list.dtype(),
            list.shape()
        )));
    }
    Ok(list.data::<i64>()?.to_vec())
}

/// The rows of each rank, as the list says.
fn shares(kind: CollectiveKind, n_ranks: usize, n_rows: usize, list: &[Tensor]) -> Result<Vec<Option<Range<usize>>>> {
    let list = list_of(kind, "the number of rows for each rank", n_ranks, list)?;
    let mut at = 0usize;
    let mut shares = Vec::with_capacity(n_ranks);
    for n in &list {
        let end = usize::try_from(*n).ok().and_then(|n| at.checked_add(n)).filter(|end| *end <= n_rows);
        let Some(end) = end else { break };
        shares.push(Some(at..end));
        at = end;
    }
    if shares.len() < n_ranks || at != n_rows {
        return Err(Error::invalid_argument(format!(
            "{kind}: the numbers of rows for the ranks, {list:?}, do not add up to the tensor's {n_rows} rows"
        )));
    }
    Ok(shares)
}

/// The rank to send to, and the one to receive from.
fn peers(kind: CollectiveKind, n_ranks: usize, list: &[Tensor]) -> Result<[Option<usize>; 2]> {
    let list = list_of(kind, "the ranks to send to and to receive from", 2, list)?;
    let peer = |rank: i64| match usize::try_from(rank) {
        Ok(rank) if rank < n_ranks => Ok(Some(rank)),
        _ if rank == -1 => Ok(None),
        _ => Err(Error::invalid_argument(format!(
            "there is no rank {rank}: there are {n_ranks}, from 0 on, and -1 for none"
        ))),
    };
    Ok([peer(list[0])?, peer(list[1])?])
}
