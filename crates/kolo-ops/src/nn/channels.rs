//! A tensor seen as channels with something before and after them: what NHWC and NCHW have in common.

use kolo_core::{Error, Result, Shape};
use kolo_device::cpu::{IntraPool, vectorize};
use kolo_graph::Attrs;

use crate::math::number::Number;
use crate::nn::rows::rows_per_task;

/// True if attribute `data_format` puts the channels after the batch.
pub fn is_nchw(attrs: &Attrs) -> Result<bool> {
    // BiasAddV1 has no such attribute.
    Ok(attrs.find("data_format").is_some() && attrs.str("data_format")?.starts_with("NC"))
}

/// Which dimension the channels are.
pub fn channel_axis(rank: usize, nchw: bool) -> usize {
    if nchw { 1 } else { rank - 1 }
}

/// `[outer, channels, inner]`, row-major; `inner` is 1 when the channels come last.
#[derive(Clone, Copy, Debug)]
pub struct Channels {
    /// What comes before the channels.
    pub outer: usize,
    /// The channels.
    pub channels: usize,
    /// What comes after them.
    pub inner: usize,
}

/// The most parts that sums are kept in.
const BLOCKS: usize = 64;

impl Channels {
    /// For a tensor of at least two dimensions.
    pub fn of(shape: &Shape, nchw: bool) -> Result<Channels> {
        if shape.rank() < 2 {
            return Err(Error::invalid_argument(format!("Input tensor must be at least 2D: {shape}")));
        }
        let axis = channel_axis(shape.rank(), nchw);
        let (outer, inner) = (shape[..axis].iter().product(), shape[axis + 1..].iter().product());
        Ok(Channels { outer, channels: shape[axis], inner })
    }

    /// Elements in a row of channels if they come last, else in a plane of one channel.
    pub fn run(self) -> usize {
        if self.inner == 1 { self.channels } else { self.inner }
    }

    /// How many elements each channel has.
    pub fn per_channel(self) -> usize {
        self.outer * self.inner
    }

    /// The sum of each channel. Rows are summed in blocks whose size depends on the shape alone, so the result does not
    /// depend on the number of threads.
    pub fn sums<T: Number>(self, pool: &IntraPool, values: &[T]) -> Vec<T> {
        let Channels { outer, channels, inner } = self;
        let mut sums = vec![T::ZERO; channels];
        if outer * channels * inner == 0 {
            return sums;
        }
        let slice = channels * inner;
        // At least so many rows that joining the blocks is little work beside summing them.
        let rows_per_block = rows_per_task(0.3, slice).max(outer.div_ceil(BLOCKS));
        let n_blocks = outer.div_ceil(rows_per_block);
        let mut blocks = vec![T::ZERO; n_blocks * channels];
        pool.for_each_chunk(&mut blocks, channels, |block, sums| {
            let first = block * rows_per_block * slice;
            let last = (first + rows_per_block * slice).min(values.len());
            vectorize(
                #[inline(always)]
                || match inner {
                    1 => {
                        for row in values[first..last].chunks_exact(channels) {
                            sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum = sum.add(x));
                        }
                    }
                    _ => {
                        for (i, plane) in values[first..last].chunks_exact(inner).enumerate() {
                            let sum = &mut sums[i % channels];
                            *sum = sum.add(sum_in_lanes(plane));
                        }
                    }
                },
            );
        });
        for block in blocks.chunks_exact(channels) {
            sums.iter_mut().zip(block).for_each(|(sum, &x)| *sum = sum.add(x));
        }
        sums
    }
}

/// The sum of a run, in lanes that vectorise.
#[inline(always)]
fn sum_in_lanes<T: Number>(values: &[T]) -> T {
    let mut lanes = [T::ZERO; 16];
    let whole = values.chunks_exact(16);
    let rest = whole.remainder();
    for chunk in whole {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane = lane.add(x));
    }
    lanes.iter_mut().zip(rest).for_each(|(lane, &x)| *lane = lane.add(x));
    lanes.into_iter().fold(T::ZERO, |sum, lane| sum.add(lane))
}
