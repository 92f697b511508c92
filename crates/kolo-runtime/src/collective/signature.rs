//! What a rank is about to do, in a form that others compare with what they do.

use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::cpu::reduce::ReduceOp;
use kolo_ops::collective::{CollectiveKind, Root};

use super::algorithm::choice::Algorithm;

/// The bytes that a signature takes before the data of a call.
pub(super) const SIGNATURE_BYTES: usize = 256;

/// Names are cut off there for comparing by eye; the hash is of the whole name.
const MAX_NAME: usize = SIGNATURE_BYTES - HEAD;

/// What comes before the name.
const HEAD: usize = 48;

/// A call of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Signature {
    /// Counts the calls of the group.
    number: u64,
    kind: CollectiveKind,
    dtype: Option<DType>,
    /// Of all tensors, or of one row where ranks have different numbers of them.
    n_elements: u64,
    n_tensors: u32,
    /// Of shapes and name.
    hash: u64,
    /// None in shared memory, where there is one way only.
    route: Option<Route>,
    name: String,
}

/// How the messages of a call go, which all ranks have to agree on as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub algorithm: Algorithm,
    pub buffer_bytes: u64,
}

impl Signature {
    pub fn new(number: u64, kind: CollectiveKind, name: &str, tensors: &[Tensor]) -> Signature {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        // Ranks differ in their rows if they may, and in nothing else.
        let n_free = usize::from(kind.is_uneven());
        for (i, tensor) in tensors.iter().enumerate() {
            let dims = tensor.shape().dims();
            (tensor.dtype(), &dims[if i == 0 { n_free.min(dims.len()) } else { 0 }..]).hash(&mut hasher);
        }
        let n_elements = match (kind.is_uneven(), tensors) {
            (true, [tensor, ..]) => tensor.shape().dims().iter().skip(1).map(|dim| *dim as u64).product(),
            _ => tensors.iter().map(|tensor| tensor.n_elements() as u64).sum(),
        };
        let end = (0..=name.len().min(MAX_NAME)).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
        Signature {
            number,
            kind,
            dtype: tensors.first().map(Tensor::dtype),
            n_elements,
            n_tensors: tensors.len() as u32,
            hash: hasher.finish(),
            route: None,
            name: name[..end].to_owned(),
        }
    }

    /// The same call, by messages.
    pub fn by(self, route: Route) -> Signature {
        Signature { route: Some(route), ..self }
    }

    /// How its messages go.
    pub fn algorithm(&self) -> Option<Algorithm> {
        self.route.map(|route| route.algorithm)
    }

    /// Counts the calls of the group.
    pub fn number(&self) -> u64 {
        self.number
    }

    pub fn kind(&self) -> CollectiveKind {
        self.kind
    }

    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    pub fn n_elements(&self) -> u64 {
        self.n_elements
    }

    /// The name, cut off.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many bytes `write` writes.
    pub fn n_bytes(&self) -> usize {
        HEAD + self.name.len()
    }

    pub fn write(&self, to: &mut [u8]) {
        let dtype = self.dtype.map_or(0, |dtype| dtype as i32 as u32);
        let op = self.kind.reduction().map_or(0, |op| 1 + op as u8);
        let root = self.kind.root().map_or(u32::MAX, |root| u32::try_from(root).unwrap_or(u32::MAX - 1));
        let algorithm = self.algorithm().and_then(|own| Algorithm::ALL.iter().position(|algorithm| *algorithm == own));
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            to[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&self.number.to_le_bytes());
        put(&self.n_elements.to_le_bytes());
        put(&self.hash.to_le_bytes());
        put(&dtype.to_le_bytes());
        put(&self.n_tensors.to_le_bytes());
        put(&root.to_le_bytes());
        put(&self.route.map_or(0, |route| route.buffer_bytes).to_le_bytes());
        put(&[kind_number(self.kind), op, algorithm.map_or(0, |at| 1 + at as u8), self.name.len() as u8]);
        put(self.name.as_bytes());
    }

    /// What another rank wrote, or `None` if nobody could have.
    pub fn read(from: &[u8]) -> Option<Signature> {
        let mut rest = from;
        let mut take = |n: usize| -> Option<&[u8]> {
            let (bytes, more) = rest.split_at_checked(n)?;
            rest = more;
            Some(bytes)
        };
        let number = u64::from_le_bytes(take(8)?.try_into().ok()?);
        let n_elements = u64::from_le_bytes(take(8)?.try_into().ok()?);
        let hash = u64::from_le_bytes(take(8)?.try_into().ok()?);
        let dtype = u32::from_le_bytes(take(4)?.try_into().ok()?);
        let n_tensors = u32::from_le_bytes(take(4)?.try_into().ok()?);
        let root = u32::from_le_bytes(take(4)?.try_into().ok()?);
        let buffer_bytes = u64::from_le_bytes(take(8)?.try_into().ok()?);
        let &[kind, op, algorithm, n_name] = take(4)? else { return None };
        let algorithm = algorithm.checked_sub(1).and_then(|at| Algorithm::ALL.get(at as usize)).copied();
        let route = algorithm.map(|algorithm| Route { algorithm, buffer_bytes });
        let op = op.checked_sub(1).and_then(|op| ReduceOp::ALL.get(op as usize)).copied();
        let kind = kind_of(kind, op, Root(root as usize))?;
        let name = String::from_utf8_lossy(take(n_name as usize)?).into_owned();
        let dtype = DType::ALL.iter().copied().find(|known| *known as i32 as u32 == dtype);
        Some(Signature { number, kind, dtype, n_elements, n_tensors, hash, route, name })
    }

    /// An error if rank `other` does something else.
    pub fn check(&self, rank: usize, other: usize, from: &[u8]) -> Result<()> {
        let mut mine = [0; SIGNATURE_BYTES];
        self.write(&mut mine);
        let n_bytes = self.n_bytes();
        if mine[..n_bytes] == from[..n_bytes] {
            return Ok(());
        }
        let found = Signature::read(from).map_or_else(|| "something unreadable".to_owned(), |found| found.to_string());
        let shapes = match Signature::read(from) {
            Some(found) if found.route != self.route && found.to_string() == self.to_string() => ", with other options",
            Some(found) if found.to_string() == self.to_string() => ", with other shapes or a longer name",
            _ => "",
        };
        // The lower rank first, so that every rank says the same.
        let ((first, one), (second, two)) = match rank < other {
            true => ((rank, self.to_string()), (other, found)),
            false => ((other, found), (rank, self.to_string())),
        };
        Err(Error::failed_precondition(format!(
            "ranks do not do the same: rank {first} does {one}, rank {second} does {two}{shapes}; every rank must run the \
             same collectives, of the same tensors, in the same order"
        )))
    }
}

/// `call 3, all-reduce (mean) 'bucket_0' of 2 float tensors, 100 elements`.
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "call {}, {} '{}'", self.number, self.kind, self.name)?;
        match self.dtype {
            Some(dtype) if self.kind.is_uneven() => write!(f, " of {dtype} rows of {} elements", self.n_elements)?,
            Some(dtype) => write!(f, " of {} {dtype} tensors, {} elements", self.n_tensors, self.n_elements)?,
            None => {}
        }
        match self.algorithm() {
            Some(algorithm) => write!(f, ", by {algorithm}"),
            None => Ok(()),
        }
    }
}

fn kind_number(kind: CollectiveKind) -> u8 {
    match kind {
        CollectiveKind::AllReduce(_) => 1,
        CollectiveKind::Reduce(..) => 2,
        CollectiveKind::ReduceScatter(_) => 3,
        CollectiveKind::AllGather => 4,
        CollectiveKind::Gather(_) => 5,
        CollectiveKind::Broadcast(_) => 6,
        CollectiveKind::Scatter(_) => 7,
        CollectiveKind::AllToAll => 8,
        CollectiveKind::Barrier => 9,
        CollectiveKind::AllGatherUneven => 10,
        CollectiveKind::GatherUneven(_) => 11,
        CollectiveKind::ScatterUneven(_) => 12,
        CollectiveKind::AllToAllUneven => 13,
        CollectiveKind::SendReceive => 14,
    }
}

fn kind_of(number: u8, op: Option<ReduceOp>, root: Root) -> Option<CollectiveKind> {
    Some(match number {
        1 => CollectiveKind::AllReduce(op?),
        2 => CollectiveKind::Reduce(op?, root),
        3 => CollectiveKind::ReduceScatter(op?),
        4 => CollectiveKind::AllGather,
        5 => CollectiveKind::Gather(root),
        6 => CollectiveKind::Broadcast(root),
        7 => CollectiveKind::Scatter(root),
        8 => CollectiveKind::AllToAll,
        9 => CollectiveKind::Barrier,
        10 => CollectiveKind::AllGatherUneven,
        11 => CollectiveKind::GatherUneven(root),
        12 => CollectiveKind::ScatterUneven(root),
        13 => CollectiveKind::AllToAllUneven,
        14 => CollectiveKind::SendReceive,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_read_as_they_are_written() {
        let tensors = [Tensor::from([1.0f32, 2.0]), Tensor::from([1.0f32])];
        let kinds = [
            CollectiveKind::AllReduce(ReduceOp::Mean),
            CollectiveKind::Reduce(ReduceOp::Prod, Root(3)),
            CollectiveKind::ReduceScatter(ReduceOp::Sum),
            CollectiveKind::AllGather,
            CollectiveKind::Gather(Root(1)),
            CollectiveKind::Broadcast(Root(0)),
            CollectiveKind::Scatter(Root(2)),
            CollectiveKind::AllToAll,
            CollectiveKind::Barrier,
            CollectiveKind::AllGatherUneven,
            CollectiveKind::GatherUneven(Root(1)),
            CollectiveKind::ScatterUneven(Root(4)),
            CollectiveKind::AllToAllUneven,
            CollectiveKind::SendReceive,
        ];
        for (i, kind) in kinds.into_iter().enumerate() {
            let name = "ä".repeat(i * 30);
            let signature = Signature::new(i as u64, kind, &name, &tensors[..2.min(i)]);
            let mut bytes = [0; SIGNATURE_BYTES];
            signature.write(&mut bytes);
            assert_eq!(Signature::read(&bytes).unwrap(), signature);
            signature.check(0, 1, &bytes).unwrap();
        }
        assert!(Signature::read(&[0; SIGNATURE_BYTES]).is_none() && Signature::read(&[]).is_none());
    }

    #[test]
    fn a_difference_is_shown_the_same_way_on_both_ranks() {
        let sum = CollectiveKind::AllReduce(ReduceOp::Sum);
        let one = Signature::new(4, sum, "a", &[Tensor::from([1.0f32, 2.0])]);
        let other = Signature::new(4, sum, "a", &[Tensor::from([1i32, 2, 3])]);
        let written = |signature: &Signature| {
            let mut bytes = [0; SIGNATURE_BYTES];
            signature.write(&mut bytes);
            bytes
        };
        let error = one.check(0, 1, &written(&other)).unwrap_err();
        assert_eq!(error.to_string(), other.check(1, 0, &written(&one)).unwrap_err().to_string());
        let text = "rank 0 does call 4, all-reduce (sum) 'a' of 1 float tensors, 2 elements, rank 1 does call 4, all-reduce \
                    (sum) 'a' of 1 int32 tensors, 3 elements";
        assert!(error.to_string().contains(text), "{error}");
        let rows = |dims: [usize; 2]| {
            Signature::new(0, CollectiveKind::AllGatherUneven, "a", &[Tensor::zeros(DType::F32, dims).unwrap()])
        };
        rows([2, 3]).check(0, 1, &written(&rows([7, 3]))).unwrap();
        let error = rows([2, 3]).check(0, 1, &written(&rows([2, 4]))).unwrap_err().to_string();
        assert!(
            error.contains("rank 0 does call 0, uneven all-gather 'a' of float rows of 3 elements, rank 1"),
            "{error}"
        );
        let shaped = Signature::new(4, sum, "a", &[Tensor::from([[1.0f32], [2.0]])]);
        let error = one.check(0, 1, &written(&shaped)).unwrap_err().to_string();
        assert!(error.contains("with other shapes"), "{error}");
    }
}
