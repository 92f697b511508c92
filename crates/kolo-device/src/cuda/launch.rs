//! The arguments and the grid of a kernel launch.

use std::marker::PhantomData;

use kolo_core::{Error, Result, Tensor, TensorData};
use smallvec::SmallVec;

use super::arena::CudaBuffer;

/// The arguments of a launch, in order. An error, such as a tensor in the wrong memory, is kept and returned by the
/// launch. Tensors stay borrowed until then.
#[derive(Default)]
pub struct Args<'a> {
    pub(super) words: SmallVec<[u64; 32]>,
    /// Where each argument begins in `words`.
    pub(super) starts: SmallVec<[u16; 16]>,
    error: Option<Error>,
    /// The arenas of the tensors.
    arenas: SmallVec<[u64; 8]>,
    tensors: PhantomData<&'a Tensor>,
}

impl<'a> Args<'a> {
    /// No arguments.
    pub fn new() -> Args<'a> {
        Args::default()
    }

    /// A tensor that the kernel reads.
    pub fn input(mut self, tensor: &'a Tensor) -> Args<'a> {
        match cuda_buffer(tensor) {
            Ok((buffer, offset)) => {
                self.arenas.push(buffer.arena_id());
                self.word(buffer.address() + offset as u64)
            }
            Err(error) => self.fail(error),
        }
    }

    /// A tensor that the kernel writes. It must have no other handle.
    pub fn output(self, tensor: &'a mut Tensor) -> Args<'a> {
        if !tensor.is_unique() {
            return self.fail(Error::internal("a kernel may not write to a buffer that others share"));
        }
        self.input(tensor)
    }

    /// A 64-bit integer.
    pub fn i64(self, value: i64) -> Args<'a> {
        self.word(value as u64)
    }

    /// A count.
    pub fn size(self, value: usize) -> Args<'a> {
        self.word(value as u64)
    }

    /// A 32-bit integer.
    pub fn i32(self, value: i32) -> Args<'a> {
        self.word(u64::from(value as u32))
    }

    /// A float.
    pub fn f32(self, value: f32) -> Args<'a> {
        self.word(u64::from(value.to_bits()))
    }

    /// A double.
    pub fn f64(self, value: f64) -> Args<'a> {
        self.word(value.to_bits())
    }

    /// A structure of 64-bit words, passed by value.
    pub fn words(mut self, words: &[u64]) -> Args<'a> {
        self.starts.push(self.words.len() as u16);
        self.words.extend_from_slice(words);
        self
    }

    /// A structure of 64-bit integers, padded with zeros to `n` words.
    pub fn sizes(mut self, sizes: &[i64], n: usize) -> Args<'a> {
        if sizes.len() > n {
            return self.fail(Error::internal(format!("{} sizes where {n} fit", sizes.len())));
        }
        self.starts.push(self.words.len() as u16);
        self.words.extend(sizes.iter().map(|&size| size as u64));
        self.words.resize(self.words.len() + n - sizes.len(), 0);
        self
    }

    /// A structure that begins with the addresses of tensors that the kernel may read and write, padded with zeros to
    /// `n`, followed by `words`. The caller ensures that a tensor that is written has no other handle.
    pub fn table(mut self, tensors: &[&'a Tensor], n: usize, words: &[u64]) -> Args<'a> {
        if tensors.len() > n {
            return self.fail(Error::internal(format!("{} addresses where {n} fit", tensors.len())));
        }
        self.starts.push(self.words.len() as u16);
        for tensor in tensors {
            match cuda_buffer(tensor) {
                Ok((buffer, offset)) => {
                    self.arenas.push(buffer.arena_id());
                    self.words.push(buffer.address() + offset as u64);
                }
                Err(error) => return self.fail(error),
            }
        }
        self.words.resize(self.words.len() + n - tensors.len(), 0);
        self.words.extend_from_slice(words);
        self
    }

    fn word(mut self, word: u64) -> Args<'a> {
        self.starts.push(self.words.len() as u16);
        self.words.push(word);
        self
    }

    fn fail(mut self, error: Error) -> Args<'a> {
        self.error.get_or_insert(error);
        self
    }

    /// An error if an argument was invalid or is in another arena.
    pub(super) fn check(&self, arena_id: u64) -> Result<()> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        match self.arenas.iter().all(|&id| id == arena_id) {
            true => Ok(()),
            false => Err(Error::internal("a kernel's argument is memory of another device; a copy is missing")),
        }
    }
}

/// A tensor's buffer on the GPU, and the tensor's offset in it.
pub(super) fn cuda_buffer(tensor: &Tensor) -> Result<(&CudaBuffer, usize)> {
    if let TensorData::Buffer { buffer, offset } = tensor.storage()
        && let Some(buffer) = buffer.as_any().downcast_ref::<CudaBuffer>()
    {
        return Ok((buffer, *offset));
    }
    Err(Error::internal(format!(
        "a kernel on a GPU was given {}{} in {} memory; a copy op is missing",
        tensor.dtype(),
        tensor.shape(),
        tensor.memory()
    )))
}

/// The grid of a launch: the numbers of blocks and of threads per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks, in three directions.
    pub blocks: [u32; 3],
    /// Threads of a block, in three directions.
    pub threads: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
}

impl Grid {
    /// Enough threads for one of `n` items each, in blocks of 256; capped at the number of blocks that keeps the GPU
    /// busy, so kernels use grid-stride loops.
    pub fn over(n: usize) -> Grid {
        const THREADS: usize = 256;
        const MOST: usize = 132 * 32;
        let blocks = n.div_ceil(THREADS).clamp(1, MOST);
        Grid { blocks: [blocks as u32, 1, 1], threads: [THREADS as u32, 1, 1], shared: 0 }
    }

    /// This many blocks of this many threads.
    pub fn blocks(n: usize, threads: usize) -> Result<Grid> {
        let most = i32::MAX as usize;
        if n > most || threads == 0 || threads > 1024 {
            return Err(Error::invalid_argument(format!("{n} blocks of {threads} threads are too many for a GPU")));
        }
        Ok(Grid { blocks: [n as u32, 1, 1], threads: [threads as u32, 1, 1], shared: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_and_stay_small() {
        assert_eq!(Grid::over(0).blocks[0], 1);
        assert_eq!(Grid::over(257).blocks[0], 2);
        assert_eq!(Grid::over(usize::MAX).blocks[0], 132 * 32);
        assert!(Grid::blocks(1 << 40, 32).is_err());
    }

    #[test]
    fn host_tensors_are_refused() {
        let tensor = Tensor::from(vec![1.0f32; 8]);
        let args = Args::new().input(&tensor).i64(-1);
        assert!(args.error.is_some_and(|error| error.message().contains("a copy op is missing")));
    }
}
