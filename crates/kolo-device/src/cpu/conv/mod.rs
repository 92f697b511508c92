//! Two-dimensional convolutions, NHWC with HWIO filters, as products whose left operand (the
//! patch matrix) is made while it is packed and never stored.
//!
//! ```text
//! forward          out[pixel, o]    = patches(input)[pixel, tap·c] × filter[tap·c, o]
//! backprop filter  dfilter[tap·c, o] = patches(input)ᵀ × dout[pixel, o]
//! backprop input   dinput[pixel, c]  = patches(dout)[pixel, tap·o] × filter[tap, c, o]ᵀ
//! ```
//!
//! Batches of eight images or more need no patch matrix at all: see `direct`. 3×3 and 5×5 filters with enough channels
//! need fewer multiplications: see `winograd`.
//!
//! With a stride, backprop input splits the pixels by their remainder: each class sees only the
//! taps that can reach it, and is a convolution with stride 1.

use super::IntraPool;
use super::gemm::{Epilogue, Layout, Left, Problem, Real, Shared, product, transpose};
use super::scratch::Scratch;

mod direct;
#[cfg(target_arch = "x86_64")]
mod lines;
mod patches;
#[cfg(test)]
mod tests;
mod winograd;

use direct::{Direct, Target};
use patches::{Patches, runs};
use winograd::{Folded, Winograd};

/// Sizes of a convolution. Padding on the other sides follows from the output's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    /// Images.
    pub batch: usize,
    /// Input height, width and channels.
    pub input: [usize; 3],
    /// Filter height and width.
    pub filter: [usize; 2],
    /// Output height, width and channels.
    pub output: [usize; 3],
    /// Input pixels between output pixels, down and across; at least 1.
    pub stride: [usize; 2],
    /// Input pixels between taps, down and across; at least 1.
    pub dilation: [usize; 2],
    /// Rows of zeros above the input.
    pub pad_top: usize,
    /// Columns of zeros left of the input.
    pub pad_left: usize,
}

impl ConvShape {
    /// Values of the input.
    #[must_use]
    pub fn input_len(&self) -> usize {
        self.batch * self.input.iter().product::<usize>()
    }

    /// Values of the filter.
    #[must_use]
    pub fn filter_len(&self) -> usize {
        self.filter[0] * self.filter[1] * self.input[2] * self.output[2]
    }

    /// Values of the output.
    #[must_use]
    pub fn output_len(&self) -> usize {
        self.batch * self.output.iter().product::<usize>()
    }

    fn check(&self, input: usize, filter: usize, output: usize) -> Result<(), String> {
        if self.stride.contains(&0) || self.dilation.contains(&0) {
            return Err("stride and dilation are at least 1".into());
        }
        for (name, found, needed) in [
            ("input", input, self.input_len()),
            ("filter", filter, self.filter_len()),
            ("output", output, self.output_len()),
        ] {
            if found != needed {
                return Err(format!("{name} has {found} values, the shape needs {needed}"));
            }
        }
        Ok(())
    }

    /// The input's patch matrix: a row per output pixel.
    fn patches<'a, T>(&self, input: &'a [T]) -> Patches<'a, T> {
        let [height, width, channels] = self.input;
        let mut taps = Vec::with_capacity(self.filter[0] * self.filter[1]);
        for i in 0..self.filter[0] {
            for j in 0..self.filter[1] {
                let dy = (i * self.dilation[0]) as isize - self.pad_top as isize;
                let dx = (j * self.dilation[1]) as isize - self.pad_left as isize;
                taps.push((dy, dx));
            }
        }
        Patches {
            source: input,
            height,
            width,
            channels,
            grid: (self.output[0], self.output[1]),
            step: (self.stride[0], self.stride[1]),
            runs: runs(&taps, channels),
        }
    }
}

/// `out = conv(input, filter)`, then the epilogue (a column is an output channel).
///
/// # Errors
/// If a slice has not the length its shape needs.
pub fn conv2d<T: ConvElement>(
    pool: &IntraPool,
    shape: &ConvShape,
    input: &[T],
    filter: &[T],
    out: &mut [T],
    epilogue: Epilogue<'_, T>,
) -> Result<(), String> {
    shape.check(input.len(), filter.len(), out.len())?;
    let n = shape.output[2];
    epilogue.check(out.len() / n.max(1), n)?;
    if epilogue.row_bias.is_none() {
        let done = match (Winograd::forward_of(shape), Folded::forward_of(shape)) {
            (Some(fast), _) => fast.convolve(pool, input, filter, out, &epilogue),
            (None, Some(fast)) => fast.convolve(pool, input, filter, out, &epilogue),
            (None, None) => false,
        };
        if done {
            return Ok(());
        }
    }
    // SAFETY: the lengths were checked above.
    unsafe { plain(pool, shape, input, filter, out, epilogue) };
    Ok(())
}

/// [`conv2d`] as sums of products.
///
/// # Safety
/// Lengths must have been checked.
unsafe fn plain<T: ConvElement>(
    pool: &IntraPool,
    shape: &ConvShape,
    input: &[T],
    filter: &[T],
    out: &mut [T],
    epilogue: Epilogue<'_, T>,
) {
    let n = shape.output[2];
    let patches = shape.patches(input);
    // SAFETY: guaranteed by the caller: m rows of n in `out`, k rows of n in `filter`.
    unsafe {
        let images = Direct::new(&patches, shape.batch, n);
        if let Some(images) = images.filter(|_| epilogue.row_bias.is_none()) {
            let out = Target::dense(out.as_mut_ptr(), patches.grid, n);
            images.forward(pool, filter.as_ptr(), out, &epilogue);
            return;
        }
        product(
            pool,
            &Problem {
                m: out.len() / n.max(1),
                n,
                k: filter.len() / n.max(1),
                alpha: T::ONE,
                a: Left::Gather(&patches, Layout::Rows),
                b: filter.as_ptr(),
                b_layout: Layout::Rows,
                ldb: n,
                accumulate: false,
                c: out.as_mut_ptr(),
                ldc: n,
                epilogue,
            },
        );
    }
}

/// The gradient of a convolution's filter, overwriting `grad_filter`.
///
/// # Errors
/// If a slice has not the length its shape needs.
pub fn conv2d_backprop_filter<T: ConvElement>(
    pool: &IntraPool,
    shape: &ConvShape,
    input: &[T],
    grad_out: &[T],
    grad_filter: &mut [T],
) -> Result<(), String> {
    shape.check(input.len(), grad_filter.len(), grad_out.len())?;
    let done = match (Winograd::filter_gradient_of(shape), Folded::filter_gradient_of(shape)) {
        (Some(fast), _) => fast.filter_gradient(pool, input, grad_out, grad_filter),
        (None, Some(fast)) => fast.filter_gradient(pool, input, grad_out, grad_filter),
        (None, None) => false,
    };
    if done {
        return Ok(());
    }
    // SAFETY: the lengths were checked above.
    unsafe { plain_filter_gradient(pool, shape, input, grad_out, grad_filter) };
    Ok(())
}

/// [`conv2d_backprop_filter`] as sums of products.
///
/// # Safety
/// Lengths must have been checked.
unsafe fn plain_filter_gradient<T: ConvElement>(
    pool: &IntraPool,
    shape: &ConvShape,
    input: &[T],
    grad_out: &[T],
    grad_filter: &mut [T],
) {
    let n = shape.output[2];
    let patches = shape.patches(input);
    // SAFETY: guaranteed by the caller: m rows of n in the result, k rows of n in `grad_out`.
    unsafe {
        if let Some(images) = Direct::new(&patches, shape.batch, n).filter(Direct::has_filter_gradient) {
            images.filter_gradient(pool, grad_out.as_ptr(), grad_filter.as_mut_ptr());
            return;
        }
        product(
            pool,
            &Problem {
                m: grad_filter.len() / n.max(1),
                n,
                k: grad_out.len() / n.max(1),
                alpha: T::ONE,
                a: Left::Gather(&patches, Layout::Cols),
                b: grad_out.as_ptr(),
                b_layout: Layout::Rows,
                ldb: n,
                accumulate: false,
                c: grad_filter.as_mut_ptr(),
                ldc: n,
                epilogue: Epilogue::default(),
            },
        );
    }
}

/// The gradient of a convolution's input, overwriting `grad_input`.
///
/// # Errors
/// If a slice has not the length its shape needs.
pub fn conv2d_backprop_input<T: ConvElement>(
    pool: &IntraPool,
    shape: &ConvShape,
    filter: &[T],
    grad_out: &[T],
    grad_input: &mut [T],
) -> Result<(), String> {
    shape.check(grad_input.len(), filter.len(), grad_out.len())?;
    if let Some(fast) = Winograd::input_gradient_of(shape)
        && fast.convolve_turned(pool, grad_out, filter, grad_input)
    {
        return Ok(());
    }
    // SAFETY: the lengths were checked above.
    unsafe { plain_input_gradient(pool, shape, filter, grad_out, grad_input) };
    Ok(())
}

/// [`conv2d_backprop_input`] as sums of products.
///
/// # Safety
/// Lengths must have been checked.
unsafe fn plain_input_gradient<T: ConvElement>(
    pool: &IntraPool,
    shape: &ConvShape,
    filter: &[T],
    grad_out: &[T],
    grad_input: &mut [T],
) {
    for y0 in 0..shape.stride[0].min(shape.input[0]) {
        for x0 in 0..shape.stride[1].min(shape.input[1]) {
            // SAFETY: passed on.
            unsafe { input_class(pool, shape, [y0, x0], filter, grad_out, grad_input.as_mut_ptr()) };
        }
    }
}

/// The gradient of input pixels `first + i * stride`, which are not contiguous in `grad_input`.
///
/// # Safety
/// Lengths must have been checked.
unsafe fn input_class<T: ConvElement>(
    pool: &IntraPool,
    shape: &ConvShape,
    first: [usize; 2],
    filter: &[T],
    grad_out: &[T],
    grad_input: *mut T,
) {
    let [c, o] = [shape.input[2], shape.output[2]];
    let grid: [usize; 2] = std::array::from_fn(|d| (shape.input[d] - first[d]).div_ceil(shape.stride[d]));
    let pad = [shape.pad_top, shape.pad_left];
    // The output pixel that reaches this class through tap `t`, relative to the class's grid.
    let reach = |d: usize, t: usize| {
        let at = (first[d] + pad[d]) as isize - (t * shape.dilation[d]) as isize;
        let stride = shape.stride[d] as isize;
        (at % stride == 0).then_some(at / stride)
    };
    let mut taps = Vec::new();
    let mut filters = Vec::new();
    // Backwards, so that neighbouring taps read neighbouring output pixels.
    for i in (0..shape.filter[0]).rev() {
        for j in (0..shape.filter[1]).rev() {
            if let (Some(dy), Some(dx)) = (reach(0, i), reach(1, j)) {
                taps.push((dy, dx));
                filters.push(i * shape.filter[1] + j);
            }
        }
    }
    let turned = Scratch::take::<T>(filters.len() * c * o);
    for (t, f) in filters.iter().enumerate() {
        // SAFETY: one tap's matrix in the filter and in the scratch.
        unsafe {
            let tap = filter.as_ptr().add(f * c * o);
            transpose(tap, o, c, o, turned.as_ptr::<T>().add(t * c * o), c);
        }
    }
    let patches = Patches {
        source: grad_out,
        height: shape.output[0],
        width: shape.output[1],
        channels: o,
        grid: (grid[0], grid[1]),
        step: (1, 1),
        runs: runs(&taps, o),
    };
    let [height, width, _] = shape.input;
    let [step_y, step_x] = shape.stride;
    let target = Target {
        // SAFETY: the first pixel of the class is one of the input's.
        start: unsafe { grad_input.add((first[0] * width + first[1]) * c) },
        image: height * width * c,
        line: step_y * width * c,
        pixel: step_x * c,
    };
    // SAFETY: the transposed filter has k rows of c, and the class's pixels are in the gradient.
    unsafe {
        if let Some(images) = Direct::new(&patches, shape.batch, c) {
            images.forward(pool, turned.as_ptr(), target, &Epilogue::default());
            turned.put_back();
            return;
        }
    }
    let is_dense = shape.stride == [1, 1];
    let class = Scratch::take::<T>(if is_dense { 0 } else { shape.batch * grid[0] * grid[1] * c });
    let problem = Problem {
        m: shape.batch * grid[0] * grid[1],
        n: c,
        k: taps.len() * o,
        alpha: T::ONE,
        a: Left::Gather(&patches, Layout::Rows),
        b: turned.as_ptr(),
        b_layout: Layout::Rows,
        ldb: c,
        accumulate: false,
        c: if is_dense { grad_input } else { class.as_ptr::<T>() },
        ldc: c,
        epilogue: Epilogue::default(),
    };
    // SAFETY: as above; the scratch has room for every pixel of the class.
    unsafe { product(pool, &problem) };
    turned.put_back();
    if !is_dense {
        let (pixels, start) = (Shared(class.as_ptr::<T>()), Shared(target.start));
        pool.parallel_for(shape.batch, &|image| {
            for i in 0..grid[0] * grid[1] {
                let at = image * target.image + i / grid[1] * target.line + i % grid[1] * target.pixel;
                // SAFETY: a pixel of the class and its own place in the gradient.
                unsafe {
                    let pixel = pixels.get().add((image * grid[0] * grid[1] + i) * c);
                    std::ptr::copy_nonoverlapping(pixel, start.get().add(at), c);
                }
            }
        });
    }
    class.put_back();
}

/// Types with convolutions: `f32` and `f64`.
#[expect(private_bounds, reason = "the micro-kernels stay inside this crate")]
pub trait ConvElement: Real {}
impl ConvElement for f32 {}
impl ConvElement for f64 {}
