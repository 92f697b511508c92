//! Several tensors as one vector of bytes, so that a bucket of gradients is one collective.

use std::ops::Range;

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cpu::reduce::{ReduceOp, reduce_in_place};

/// What is combined at a time: it stays in the nearest cache, with as much of a peer's.
const CACHED: usize = 16 << 10;

/// Tensors of host memory, one after the other, that are written in place.
pub(super) struct Vector {
    tensors: Vec<Tensor>,
    /// Where each one ends.
    ends: Vec<usize>,
}

impl Vector {
    /// Copies what others hold as well.
    pub fn new(tensors: Vec<Tensor>) -> Result<Vector> {
        let own = |mut tensor: Tensor| -> Result<Tensor> {
            if tensor.is_unique() {
                return Ok(tensor);
            }
            let mut copy = Tensor::zeros(tensor.dtype(), tensor.shape().clone())?;
            copy.host_bytes_mut()?.copy_from_slice(tensor.host_bytes()?);
            Ok(copy)
        };
        let tensors = tensors.into_iter().map(own).collect::<Result<Vec<Tensor>>>()?;
        let ends = tensors.iter().scan(0, |end, tensor| {
            *end += tensor.n_bytes();
            Some(*end)
        });
        let ends = ends.collect();
        Ok(Vector { tensors, ends })
    }

    pub fn n_bytes(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The dtype of all tensors, if there are any.
    pub fn dtype(&self) -> Option<DType> {
        self.tensors.first().map(Tensor::dtype)
    }

    /// The memory of all tensors.
    pub fn slices_mut(&mut self) -> Result<Vec<&mut [u8]>> {
        self.tensors.iter_mut().map(Tensor::host_bytes_mut).collect()
    }

    pub fn into_tensors(self) -> Vec<Tensor> {
        self.tensors
    }

    /// Copies bytes from `at` on.
    pub fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        let (mut i, mut at, mut to) = (self.tensor_at(at), at, to);
        while !to.is_empty() {
            let start = if i == 0 { 0 } else { self.ends[i - 1] };
            let n = (self.ends[i] - at).min(to.len());
            let (now, later) = to.split_at_mut(n);
            now.copy_from_slice(&self.tensors[i].host_bytes()?[at - start..at - start + n]);
            (i, at, to) = (i + 1, at + n, later);
        }
        Ok(())
    }

    /// Copies bytes to `at` and what follows.
    pub fn write(&mut self, at: usize, from: &[u8]) -> Result<()> {
        let (mut i, mut at, mut from) = (self.tensor_at(at), at, from);
        while !from.is_empty() {
            let start = if i == 0 { 0 } else { self.ends[i - 1] };
            let n = (self.ends[i] - at).min(from.len());
            let (now, later) = from.split_at(n);
            self.tensors[i].host_bytes_mut()?[at - start..at - start + n].copy_from_slice(now);
            (i, at, from) = (i + 1, at + n, later);
        }
        Ok(())
    }

    /// Calls `update` with the memory of these bytes, tensor by tensor, and where in `range` each part begins.
    pub fn update(
        &mut self,
        range: Range<usize>,
        mut update: impl FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let (mut i, mut at) = (self.tensor_at(range.start), range.start);
        while at < range.end {
            let start = if i == 0 { 0 } else { self.ends[i - 1] };
            let end = self.ends[i].min(range.end);
            // An empty tensor has no part.
            if end > at {
                update(at - range.start, &mut self.tensors[i].host_bytes_mut()?[at - start..end - start])?;
            }
            (i, at) = (i + 1, end);
        }
        Ok(())
    }

    /// Combines bytes of all ranks in place: this rank's own, and those of the ranks before and after it. `also` gets what becomes of
    /// them, part by part, while it is in the caches.
    pub fn reduce(
        &mut self,
        range: Range<usize>,
        (dtype, op): (DType, ReduceOp),
        (before, after): (&[&[u8]], &[&[u8]]),
        mut also: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.update(range, |from, own| {
            for (i, own) in own.chunks_mut(CACHED).enumerate() {
                let at = from + i * CACHED;
                let of = at..at + own.len();
                reduce_in_place(dtype, op, &cut(before, &of), own, &cut(after, &of))?;
                also(at, own);
            }
            Ok(())
        })
    }

    /// The tensor that byte `at` is in.
    fn tensor_at(&self, at: usize) -> usize {
        self.ends.partition_point(|end| *end <= at)
    }
}

/// A part of each of some vectors.
fn cut<'v>(vectors: &[&'v [u8]], part: &Range<usize>) -> Vec<&'v [u8]> {
    vectors.iter().map(|bytes| &bytes[part.clone()]).collect()
}

/// A tensor like this one with another number of rows.
pub(super) fn with_rows(tensor: &Tensor, rows: impl FnOnce(usize) -> Option<usize>) -> Result<Tensor> {
    let mut dims = tensor.shape().dims().to_vec();
    dims[0] = rows(dims[0]).ok_or_else(|| Error::invalid_argument("there are too many rows"))?;
    Tensor::zeros(tensor.dtype(), Shape::new(&dims)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_read_and_written_as_one() {
        let tensors = [vec![1u8, 2, 3], vec![], vec![4], vec![5, 6]].map(Tensor::from);
        let shared = tensors.clone();
        let mut vector = Vector::new(tensors.to_vec()).unwrap();
        assert_eq!(vector.n_bytes(), 6);
        for (at, n) in [(0, 6), (2, 3), (3, 1), (5, 1), (6, 0), (0, 0)] {
            let mut found = vec![0; n];
            vector.read(at, &mut found).unwrap();
            assert_eq!(found, [1, 2, 3, 4, 5, 6][at..at + n]);
        }
        vector.write(2, &[7, 8, 9]).unwrap();
        let mut found = Vec::new();
        let update = |at, part: &mut [u8]| {
            found.push((at, part.to_vec()));
            part.iter_mut().for_each(|byte| *byte += 1);
            Ok(())
        };
        vector.update(1..5, update).unwrap();
        assert_eq!(found, [(0, vec![2, 7]), (2, vec![8]), (3, vec![9])]);
        vector.update(6..6, |_, _| Err(Error::internal("nothing is there"))).unwrap();
        let written = vector.into_tensors();
        assert_eq!(written, [vec![1u8, 3, 8], vec![], vec![9], vec![10, 6]].map(Tensor::from));
        assert_eq!(shared[0], Tensor::from(vec![1u8, 2, 3]), "what others hold stays as it was");
    }
}
