//! Many copies within one GPU in one launch. A replay copies each of its feeds into a fixed buffer; a call of the driver
//! for each would take longer than the launch of the replay.

use kolo_core::{Error, Result, Tensor};

use super::device::CudaDevice;
use super::launch::{Args, Grid};
use super::program::ProgramKey;

/// Pairs of one launch: their addresses and sizes are 1.5 of the 4 KB that a kernel's parameters may have.
const PAIRS: usize = 64;
/// Bytes that a block copies, if there are enough blocks.
const PER_BLOCK: usize = 64 << 10;
/// The maximum number of blocks for one pair.
const MOST_BLOCKS: usize = 1024;

const SOURCE: &str = include_str!("copies.cu");
const KEY: ProgramKey = ProgramKey { family: "copies", op: "many", dtypes: [None; 3], variant: PAIRS as u32 };

impl CudaDevice {
    /// Copies between tensors of this device, enqueued; both tensors of a pair have the same size. Nothing else may
    /// write to a target before that.
    pub(super) fn copy_pairs(&self, pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
        self.check_not_capturing()?;
        self.launch_copies(pairs)
    }

    /// As [`CudaDevice::copy_pairs`], also in a capture, which then repeats the copies.
    pub(super) fn launch_copies(&self, pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
        if let Some((from, to)) = pairs.iter().find(|(from, to)| from.n_bytes() != to.n_bytes()) {
            let (from, to) = (from.n_bytes(), to.n_bytes());
            return Err(Error::internal(format!("a copy of {from} bytes to a buffer of {to}")));
        }
        let function = self.function(&KEY, || format!("#define PAIRS {PAIRS}\n{SOURCE}"))?;
        for chunk in pairs.chunks(PAIRS) {
            let tensors: Vec<&Tensor> = chunk.iter().flat_map(|(from, to)| [*from, *to]).collect();
            let sizes: Vec<u64> = chunk.iter().map(|(from, _)| from.n_bytes() as u64).collect();
            let args = Args::new().table(&tensors, 2 * PAIRS, &padded(sizes));
            let largest = chunk.iter().map(|(from, _)| from.n_bytes()).max().unwrap_or(0);
            let blocks = largest.div_ceil(PER_BLOCK).clamp(1, MOST_BLOCKS);
            let grid = Grid { blocks: [blocks as u32, chunk.len() as u32, 1], threads: [256, 1, 1], shared: 0 };
            self.launch(function, grid, &args)?;
        }
        Ok(())
    }
}

fn padded(mut sizes: Vec<u64>) -> Vec<u64> {
    sizes.resize(PAIRS, 0);
    sizes
}
