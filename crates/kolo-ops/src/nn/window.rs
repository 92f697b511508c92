//! How a window slides over an image: strides, dilations and padding, as the attributes of convolutions and pools say.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::Attrs;

/// A window's attributes, for height and width.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    nchw: bool,
    strides: [usize; 2],
    dilations: [usize; 2],
    padding: [Padding; 2],
}

/// What lies around an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Padding {
    /// As much as makes the output the input's size over the stride.
    Same,
    /// Nothing.
    Valid,
    /// This much before and after.
    Explicit(usize, usize),
}

/// A window along one dimension of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// The image's size.
    pub input: usize,
    /// How many places the window is put to.
    pub output: usize,
    /// The window's size, in taps.
    pub kernel: usize,
    /// From one place to the next.
    pub stride: usize,
    /// From one tap to the next.
    pub dilation: usize,
    /// How far the first place lies before the image.
    pub before: usize,
}

impl Axis {
    /// The taps at place `o` that are in the image.
    #[inline(always)]
    pub fn taps(&self, o: usize) -> std::ops::Range<usize> {
        let (start, end) = (o * self.stride, self.before + self.input);
        let first = self.before.saturating_sub(start).div_ceil(self.dilation);
        let last = end.saturating_sub(start).div_ceil(self.dilation).min(self.kernel);
        first.min(last)..last
    }

    /// The places from which a window without dilation covers position `i` of the image.
    #[inline(always)]
    pub fn places(&self, i: usize) -> std::ops::Range<usize> {
        let at = i + self.before;
        let last = (at / self.stride + 1).min(self.output);
        ((at + 1).saturating_sub(self.kernel)).div_ceil(self.stride).min(last)..last
    }

    /// Where tap `k` at place `o` is in the image; it must be in there.
    #[inline(always)]
    pub fn at(&self, o: usize, k: usize) -> usize {
        o * self.stride + k * self.dilation - self.before
    }
}

/// Calls `f(o, k, i)` for every place `o` of a window, in order, and every tap `k` that is in the image, in order, with its
/// position `i` there. All three are row-major over height and width.
#[inline(always)]
pub fn for_taps(h: &Axis, w: &Axis, mut f: impl FnMut(usize, usize, usize)) {
    for oh in 0..h.output {
        for ow in 0..w.output {
            let across = w.taps(ow);
            for kh in h.taps(oh) {
                let (row, line) = (kh * w.kernel, h.at(oh, kh) * w.input);
                for kw in across.clone() {
                    f(oh * w.output + ow, row + kw, line + w.at(ow, kw));
                }
            }
        }
    }
}

/// The sizes of a batch of images, whatever their format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Images<D> {
    /// Images.
    pub batch: D,
    /// Height and width.
    pub spatial: [D; 2],
    /// Channels.
    pub channels: D,
}

impl Window {
    /// Reads `strides`, `padding` and, where the op has them, `dilations`, `explicit_paddings` and `data_format`.
    pub fn from_attrs(attrs: &Attrs) -> Result<Window> {
        let nchw = match attrs.str("data_format")? {
            "NHWC" => false,
            "NCHW" => true,
            other => return Err(Error::unimplemented(format!("data format {other} is not supported"))),
        };
        let strides = spatial(&attrs.ints("strides")?, nchw, "strides")?;
        let dilations = match attrs.find("dilations") {
            Some(_) => spatial(&attrs.ints("dilations")?, nchw, "dilations")?,
            None => [1, 1],
        };
        let padding = match attrs.str("padding")? {
            "SAME" => [Padding::Same; 2],
            "VALID" => [Padding::Valid; 2],
            _ => explicit(&attrs.ints("explicit_paddings")?, nchw)?,
        };
        Ok(Window { nchw, strides, dilations, padding })
    }

    /// The window of a pool, from attribute `ksize`.
    pub fn pool_size(&self, attrs: &Attrs) -> Result<[usize; 2]> {
        spatial(&attrs.ints("ksize")?, self.nchw, "ksize")
    }

    /// True if the channels come before height and width.
    pub fn is_nchw(&self) -> bool {
        self.nchw
    }

    /// The sizes in a shape of four dimensions.
    pub fn images(&self, shape: &Shape) -> Result<Images<usize>> {
        match (shape.dims(), self.nchw) {
            (&[batch, h, w, channels], false) | (&[batch, channels, h, w], true) => {
                Ok(Images { batch, spatial: [h, w], channels })
            }
            _ => Err(Error::invalid_argument(format!("input must be 4-dimensional, found {shape}"))),
        }
    }

    /// As [`Window::images`], as far as sizes are known.
    pub fn partial_images(&self, shape: &PartialShape) -> Images<Dim> {
        let [c, h, w] = if self.nchw { [1, 2, 3] } else { [3, 1, 2] };
        Images { batch: shape.dim(0), spatial: [shape.dim(h), shape.dim(w)], channels: shape.dim(c) }
    }

    /// The shape with these sizes, or what is known of it.
    pub fn dims<D: Copy>(&self, images: Images<D>) -> [D; 4] {
        let Images { batch, spatial: [h, w], channels } = images;
        if self.nchw { [batch, channels, h, w] } else { [batch, h, w, channels] }
    }

    /// Both dimensions of a window of size `kernel` over images of size `input`.
    pub fn axes(&self, input: [usize; 2], kernel: [usize; 2]) -> Result<[Axis; 2]> {
        Ok([self.axis(0, input[0], kernel[0])?, self.axis(1, input[1], kernel[1])?])
    }

    /// The output's sizes, as far as they are known; an error if the window does not fit.
    pub fn output_dims(&self, input: [Dim; 2], kernel: [Dim; 2]) -> Result<[Dim; 2]> {
        let size = |d: usize| match (input[d], kernel[d], self.padding[d]) {
            (Some(input), Some(kernel), padding) => match self.axis(d, input, kernel)?.output {
                // A window that fits nowhere is a mistake, if the sizes are known before the run.
                0 if input > 0 && padding != Padding::Same => {
                    Err(Error::invalid_argument(format!("a window of {kernel} does not fit into an image of {input}")))
                }
                output => Ok(Some(output)),
            },
            (Some(input), None, Padding::Same) => Ok(Some(input.div_ceil(self.strides[d]))),
            _ => Ok(None),
        };
        Ok([size(0)?, size(1)?])
    }

    fn axis(&self, d: usize, input: usize, kernel: usize) -> Result<Axis> {
        axis(input, kernel, self.strides[d], self.dilations[d], self.padding[d])
    }
}

/// A window of `kernel` taps along a dimension of size `input`; an error if it does not fit.
pub(super) fn axis(input: usize, kernel: usize, stride: usize, dilation: usize, padding: Padding) -> Result<Axis> {
    if kernel == 0 {
        return Err(Error::invalid_argument("the window must not be empty"));
    }
    let too_large = || Error::invalid_argument("the window is too large");
    let reach = (kernel - 1)
        .checked_mul(dilation)
        .and_then(|reach| reach.checked_add(1))
        .filter(|&reach| reach <= isize::MAX as usize)
        .ok_or_else(too_large)?;
    let (before, padded) = match padding {
        Padding::Valid => (0, input),
        Padding::Explicit(before, after) => {
            let padded = input.checked_add(before).and_then(|n| n.checked_add(after)).ok_or_else(too_large)?;
            (before, padded)
        }
        Padding::Same => {
            let output = input.div_ceil(stride);
            let needed = output.saturating_sub(1) * stride + if output > 0 { reach } else { 0 };
            let before = needed.saturating_sub(input) / 2;
            return Ok(Axis { input, output, kernel, stride, dilation, before });
        }
    };
    if padded + stride < reach {
        let size = padded as i64 - reach as i64;
        return Err(Error::invalid_argument(format!(
            "Computed output size would be negative: {} [input_size: {input}, effective_filter_size: {reach}, \
             stride: {stride}]",
            (size + stride as i64).div_euclid(stride as i64)
        )));
    }
    let output = (padded + stride - reach) / stride;
    Ok(Axis { input, output, kernel, stride, dilation, before })
}

/// The entries for height and width of a list of four, which must be 1 for batch and channels.
fn spatial(list: &[i64], nchw: bool, what: &str) -> Result<[usize; 2]> {
    let ((&[batch, h, w, channels], false) | (&[batch, channels, h, w], true)) = (
        <&[i64; 4]>::try_from(list)
            .map_err(|_| Error::invalid_argument(format!("{what} field must specify 4 dimensions")))?,
        nchw,
    );
    if batch != 1 || channels != 1 {
        return Err(Error::unimplemented(format!(
            "Current implementation does not yet support {what} in the batch and depth dimensions."
        )));
    }
    let positive = |size: i64| {
        i32::try_from(size)
            .ok()
            .and_then(|size| usize::try_from(size).ok())
            .filter(|&size| size > 0)
            .ok_or_else(|| Error::invalid_argument(format!("{what} must be positive, found {size}")))
    };
    Ok([positive(h)?, positive(w)?])
}

fn explicit(list: &[i64], nchw: bool) -> Result<[Padding; 2]> {
    let pairs: Vec<(i64, i64)> = list.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    let ((&[batch, h, w, channels], false) | (&[batch, channels, h, w], true)) = (
        <&[(i64, i64); 4]>::try_from(pairs.as_slice())
            .ok()
            .filter(|_| list.len() == 8)
            .ok_or_else(|| Error::invalid_argument("explicit_paddings attribute must contain 8 values"))?,
        nchw,
    );
    if batch != (0, 0) || channels != (0, 0) {
        return Err(Error::invalid_argument(
            "Nonzero explicit padding in the batch or depth dimensions is not supported",
        ));
    }
    let size = |size: i64| {
        i32::try_from(size)
            .ok()
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(|| Error::invalid_argument("All elements of explicit_paddings must be nonnegative"))
    };
    let pair = |(before, after): (i64, i64)| -> Result<Padding> { Ok(Padding::Explicit(size(before)?, size(after)?)) };
    Ok([pair(h)?, pair(w)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(input: usize, kernel: usize, stride: usize, dilation: usize, padding: Padding) -> Result<Axis> {
        super::axis(input, kernel, stride, dilation, padding)
    }

    #[test]
    fn sizes_are_tensorflows() {
        let size = |input, kernel, stride, dilation, padding| {
            axis(input, kernel, stride, dilation, padding).map(|axis| (axis.output, axis.before)).ok()
        };
        assert_eq!(size(5, 3, 1, 1, Padding::Valid), Some((3, 0)));
        assert_eq!(size(5, 3, 2, 1, Padding::Same), Some((3, 1)));
        assert_eq!(size(4, 2, 1, 1, Padding::Same), Some((4, 0)));
        assert_eq!(size(5, 3, 1, 2, Padding::Valid), Some((1, 0)));
        assert_eq!(size(5, 3, 2, 1, Padding::Explicit(1, 2)), Some((3, 1)));
        assert_eq!(size(2, 3, 1, 1, Padding::Valid), Some((0, 0)));
        assert_eq!(size(2, 4, 1, 1, Padding::Valid), None);
        assert_eq!(size(0, 3, 2, 1, Padding::Same), Some((0, 0)));
        assert_eq!(size(5, 0, 2, 1, Padding::Same), None);
        assert_eq!(size(5, usize::MAX, 2, 3, Padding::Valid), None);
    }

    #[test]
    fn the_places_of_a_position_are_those_whose_taps_meet_it() {
        for (input, kernel, stride, padding) in [
            (5, 3, 1, Padding::Same),
            (6, 2, 2, Padding::Valid),
            (7, 2, 2, Padding::Valid),
            (9, 3, 2, Padding::Same),
            (9, 2, 3, Padding::Same),
            (2, 3, 1, Padding::Valid),
        ] {
            let axis = axis(input, kernel, stride, 1, padding).unwrap();
            for i in 0..input {
                let meets = |&o: &usize| axis.taps(o).any(|k| axis.at(o, k) == i);
                let expected: Vec<usize> = (0..axis.output).filter(meets).collect();
                assert_eq!(axis.places(i).collect::<Vec<_>>(), expected, "{axis:?} at {i}");
            }
        }
    }

    #[test]
    fn the_taps_are_those_in_the_image() {
        for (kernel, stride, dilation, before, after) in
            [(3, 1, 1, 1, 1), (3, 2, 2, 3, 0), (2, 3, 4, 5, 5), (1, 1, 1, 4, 0), (4, 1, 3, 9, 9)]
        {
            let axis = axis(5, kernel, stride, dilation, Padding::Explicit(before, after)).unwrap();
            for o in 0..axis.output {
                let in_image = |k: &usize| (before..before + 5).contains(&(o * stride + k * dilation));
                let expected: Vec<usize> = (0..kernel).filter(in_image).collect();
                assert_eq!(axis.taps(o).collect::<Vec<_>>(), expected, "{axis:?} at {o}");
            }
        }
    }

    #[test]
    fn taps_outside_of_the_image_are_left_out() {
        let axis = axis(3, 3, 1, 1, Padding::Same).unwrap();
        assert_eq!((0..3).map(|o| axis.taps(o).len()).collect::<Vec<_>>(), [2, 3, 2]);
        let one = Axis { input: 1, output: 1, kernel: 1, stride: 1, dilation: 1, before: 0 };
        let mut taps = Vec::new();
        for_taps(&axis, &one, |o, k, i| taps.push((o, k, i)));
        assert_eq!(taps, [(0, 1, 0), (0, 2, 1), (1, 0, 0), (1, 1, 1), (1, 2, 2), (2, 0, 1), (2, 1, 2)]);
    }
}
