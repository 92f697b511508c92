//! Convolution of NHWC images as matrix products: each place of the window becomes a row of a matrix, in blocks that fit
//! the cache; the filter is the other matrix.

use kolo_core::{Error, Result};
use kolo_device::cpu::IntraPool;
use kolo_device::cpu::gemm::{Gemm, Op as Transposed, gemm_f32, gemm_f64};
use parking_lot::Mutex;

use crate::nn::float::Real;
use crate::nn::window::Axis;

/// A convolution of `batch` images of `inputs` channels to as many of `outputs` channels.
#[derive(Clone, Copy, Debug)]
pub struct Convolution {
    /// Images.
    pub batch: usize,
    /// The window's height and width.
    pub axes: [Axis; 2],
    /// Channels before.
    pub inputs: usize,
    /// Channels after.
    pub outputs: usize,
}

/// Floats that there is a matrix product for.
pub trait Multiply: Real {
    /// Computes a product.
    fn multiply(pool: &IntraPool, product: Gemm<'_, Self>) -> Result<()>;
}

impl Multiply for f32 {
    fn multiply(pool: &IntraPool, product: Gemm<'_, f32>) -> Result<()> {
        gemm_f32(pool, product).map_err(Error::internal)
    }
}

impl Multiply for f64 {
    fn multiply(pool: &IntraPool, product: Gemm<'_, f64>) -> Result<()> {
        gemm_f64(pool, product).map_err(Error::internal)
    }
}

/// Elements of a block of rows; a megabyte of `f32`.
const BLOCK: usize = 1 << 18;

/// Sums over images are kept in this many parts, whatever the number of threads, unless the filter is large.
const PARTS: usize = 8;
const LARGE_FILTER: usize = 1 << 20;

impl Convolution {
    /// Places of the window in an image.
    fn places(&self) -> usize {
        self.axes[0].output * self.axes[1].output
    }

    /// Elements under the window at one place.
    fn row(&self) -> usize {
        self.axes[0].kernel * self.axes[1].kernel * self.inputs
    }

    /// Elements of an image before.
    fn image(&self) -> usize {
        self.axes[0].input * self.axes[1].input * self.inputs
    }

    /// True if the matrix of rows is the images themselves.
    fn is_pointwise(&self) -> bool {
        self.axes
            .iter()
            .all(|axis| axis.kernel == 1 && axis.stride == 1 && axis.before == 0 && axis.output == axis.input)
    }

    /// How many images a task takes, so that its rows make a block.
    fn images_per_task(&self) -> usize {
        (BLOCK / (self.places() * self.row()).max(1)).clamp(1, self.batch.max(1))
    }

    /// `output = images * filter`. The filter is `[height, width, inputs, outputs]`.
    pub fn forward<T: Multiply>(&self, pool: &IntraPool, images: &[T], filter: &[T], output: &mut [T]) -> Result<()> {
        if output.is_empty() || self.row() == 0 {
            output.fill(T::zero());
            return Ok(());
        }
        let n = self.outputs;
        if self.is_pointwise() {
            let m = self.batch * self.places();
            return T::multiply(pool, Gemm::new(m, n, self.row(), images, filter, output));
        }
        let (spare, failed) = (Spare::new(), Mutex::new(Ok(())));
        let step = self.images_per_task();
        pool.for_each_chunk(output, step * self.places() * n, |task, output| {
            let images = &images[task * step * self.image()..];
            let mut rows = spare.take();
            for block in self.blocks(output.len() / (self.places() * n)) {
                self.gather(&block, images, &mut rows);
                let output = &mut output[block.first * n..(block.first + block.len) * n];
                let product = Gemm::new(block.len, n, self.row(), &rows, filter, output);
                note(&failed, T::multiply(pool, product));
            }
            spare.give(rows);
        });
        failed.into_inner()
    }

    /// The gradient of the images, given that of the output.
    pub fn backprop_images<T: Multiply>(
        &self,
        pool: &IntraPool,
        filter: &[T],
        grad: &[T],
        images: &mut [T],
    ) -> Result<()> {
        if self.is_pointwise() && self.row() > 0 && self.outputs > 0 {
            let (m, n) = (self.batch * self.places(), self.row());
            let filter = (filter, Transposed::Transpose);
            let grad = (grad, Transposed::None);
            return T::multiply(pool, Gemm::with_ops(m, n, self.outputs, grad, filter, images));
        }
        images.fill(T::zero());
        if images.is_empty() || grad.is_empty() {
            return Ok(());
        }
        let (spare, failed) = (Spare::new(), Mutex::new(Ok(())));
        let (step, k) = (self.images_per_task(), self.outputs);
        pool.for_each_chunk(images, step * self.image(), |task, images| {
            let grad = &grad[task * step * self.places() * k..];
            let mut rows = spare.take();
            for block in self.blocks(images.len() / self.image()) {
                rows.resize(block.len * self.row(), T::zero());
                let grad = (&grad[block.first * k..(block.first + block.len) * k], Transposed::None);
                let filter = (filter, Transposed::Transpose);
                let product = Gemm::with_ops(block.len, self.row(), k, grad, filter, &mut rows);
                note(&failed, T::multiply(pool, product));
                self.scatter(&block, &rows, images);
            }
            spare.give(rows);
        });
        failed.into_inner()
    }

    /// The gradient of the filter, given that of the output.
    pub fn backprop_filter<T: Multiply>(
        &self,
        pool: &IntraPool,
        images: &[T],
        grad: &[T],
        filter: &mut [T],
    ) -> Result<()> {
        filter.fill(T::zero());
        if filter.is_empty() || grad.is_empty() {
            return Ok(());
        }
        let (m, n) = (self.row(), self.outputs);
        if self.is_pointwise() {
            let product = Gemm::with_ops(
                m,
                n,
                self.batch * self.places(),
                (images, Transposed::Transpose),
                (grad, Transposed::None),
                filter,
            );
            return T::multiply(pool, product);
        }
        let (spare, failed) = (Spare::new(), Mutex::new(Ok(())));
        let n_parts = if m * n > LARGE_FILTER { 1 } else { PARTS.min(self.batch) };
        let per_part = self.batch.div_ceil(n_parts);
        let mut parts = vec![T::zero(); n_parts * m * n];
        pool.for_each_chunk(&mut parts, m * n, |part, sum| {
            let (first, last) = (part * per_part, ((part + 1) * per_part).min(self.batch));
            let mut rows = spare.take();
            for image in (first..last).step_by(self.images_per_task()) {
                let n_images = self.images_per_task().min(last - image);
                let images = &images[image * self.image()..];
                let grad = &grad[image * self.places() * n..];
                for block in self.blocks(n_images) {
                    self.gather(&block, images, &mut rows);
                    let grad = (&grad[block.first * n..(block.first + block.len) * n], Transposed::None);
                    let rows = (rows.as_slice(), Transposed::Transpose);
                    let mut product = Gemm::with_ops(m, n, block.len, rows, grad, sum);
                    product.beta = T::one();
                    note(&failed, T::multiply(pool, product));
                }
            }
            spare.give(rows);
        });
        for part in parts.chunks_exact(m * n) {
            filter.iter_mut().zip(part).for_each(|(sum, &x)| *sum += x);
        }
        failed.into_inner()
    }

    /// The places of `n_images` images, cut into blocks of whole lines.
    fn blocks(&self, n_images: usize) -> impl Iterator<Item = Block> {
        let (width, total) = (self.axes[1].output, self.places() * n_images);
        let lines = BLOCK / (width * self.row()).max(1);
        let len = if total * self.row() <= BLOCK { total } else { lines.max(1) * width };
        (0..total).step_by(len.max(1)).map(move |first| Block { first, len: len.min(total - first) })
    }

    /// What lies under the window at the places of `block`, one row each, zero outside of the image.
    fn gather<T: Multiply>(&self, block: &Block, images: &[T], rows: &mut Vec<T>) {
        rows.clear();
        rows.resize(block.len * self.row(), T::zero());
        self.for_runs(block, |row, image, len| rows[row..row + len].copy_from_slice(&images[image..image + len]));
    }

    /// Adds each row to where its elements lie in the images.
    fn scatter<T: Multiply>(&self, block: &Block, rows: &[T], images: &mut [T]) {
        self.for_runs(block, |row, image, len| {
            images[image..image + len].iter_mut().zip(&rows[row..row + len]).for_each(|(sum, &x)| *sum += x);
        });
    }

    /// Calls `f(at in rows, at in images, length)` for runs that lie side by side in both.
    #[inline(always)]
    fn for_runs(&self, block: &Block, mut f: impl FnMut(usize, usize, usize)) {
        let ([h, w], c) = (self.axes, self.inputs);
        for i in 0..block.len {
            let place = block.first + i;
            let (image, place) = (place / self.places(), place % self.places());
            let (oh, ow) = (place / w.output, place % w.output);
            for kh in 0..h.kernel {
                let Some(ih) = h.at(oh, kh) else { continue };
                let row = (i * h.kernel + kh) * w.kernel;
                let line = (image * h.input + ih) * w.input;
                if w.dilation == 1 {
                    // All taps of a line that are in the image lie side by side.
                    let start = ow * w.stride;
                    let first = w.before.saturating_sub(start).min(w.kernel);
                    let last = (w.input + w.before).saturating_sub(start).min(w.kernel);
                    if first < last {
                        f((row + first) * c, (line + start + first - w.before) * c, (last - first) * c);
                    }
                } else {
                    for kw in 0..w.kernel {
                        if let Some(iw) = w.at(ow, kw) {
                            f((row + kw) * c, (line + iw) * c, c);
                        }
                    }
                }
            }
        }
    }
}

/// Places `first .. first + len` of a task's images.
#[derive(Clone, Copy, Debug)]
struct Block {
    first: usize,
    len: usize,
}

/// Buffers that tasks leave to later ones.
struct Spare<T>(Mutex<Vec<Vec<T>>>);

impl<T> Spare<T> {
    fn new() -> Spare<T> {
        Spare(Mutex::new(Vec::new()))
    }

    fn take(&self) -> Vec<T> {
        self.0.lock().pop().unwrap_or_default()
    }

    fn give(&self, buffer: Vec<T>) {
        self.0.lock().push(buffer);
    }
}

/// Keeps the first error of several tasks.
fn note(failed: &Mutex<Result<()>>, result: Result<()>) {
    if let Err(error) = result {
        let mut failed = failed.lock();
        if failed.is_ok() {
            *failed = Err(error);
        }
    }
}
