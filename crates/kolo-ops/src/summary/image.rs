//! `ImageSummary`: pictures, as PNG.
//!
//! Bytes are shown as they are. Floats have no range of their own: if none is negative they are scaled so that the largest
//! is 255; else so that the largest magnitude is 127, around 128. Pixels with NaN or infinity get a colour that is seen.

use half::f16;
use kolo_core::{DType, Element, Error, Result, Tensor};
use kolo_graph::{Gradient, OpDef, Output, shape_fns};

use super::proto::{Content, Image, Summary, Value};
use super::{scalar_tag, tag_text};
use crate::op::{Gpu, KernelMaker, Op, cpu_on};
use crate::{Cost, KernelCtx};

/// A summary of the first `max_images` pictures of `images`, `[n, height, width, channels]`, under `tag`, a scalar.
#[track_caller]
pub fn image_summary<'g>(tag: Output<'g>, images: Output<'g>, max_images: usize) -> Output<'g> {
    let builder = tag.graph().op("ImageSummary").input(tag).input(images);
    builder.attr("max_images", i64::try_from(max_images).unwrap_or(i64::MAX)).out()
}

pub(crate) static IMAGE_SUMMARY: Op = Op {
    def: OpDef {
        name: "ImageSummary",
        signature: "(tag:string, tensor:T) -> (summary:string) ; max_images:int>=1=3, T:type{uint8,float,half,double}=float, \
                    bad_color:tensor=uint8[255,0,0,255]",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a summary"),
        ..OpDef::BASE
    },
    kernels: &[cpu_on("T", &[DType::U8, DType::F32, DType::F16, DType::F64], KernelMaker::Function(summarize))],
    gpu: Gpu::Never("summaries are written in host memory"),
    cost: Cost::Elements,
};

fn summarize(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let tag = tag_text(scalar_tag(ctx.input(0)?, "Tags must be a scalar")?)?;
    let max_images = usize::try_from(ctx.attrs().int("max_images")?).unwrap_or(0);
    let bad_color = ctx.attrs().tensor("bad_color")?;
    if bad_color.dtype() != DType::U8 {
        return Err(Error::invalid_argument(format!("bad_color must be uint8, got {}", bad_color.dtype())));
    }
    let values = images(&tag, ctx.input(1)?, max_images, bad_color.data::<u8>()?)?;
    ctx.set_output(0, Summary::from(values).to_tensor());
    Ok(())
}

/// The red that stands for pixels that are not finite, unless another colour is asked for.
pub const BAD_COLOR: [u8; 4] = [255, 0, 0, 255];

/// The summary values of up to `max_images` pictures of `tensor`, `[n, height, width, channels]`.
pub fn images(tag: &str, tensor: &Tensor, max_images: usize, bad_color: &[u8]) -> Result<Vec<Value>> {
    let shape = tensor.shape();
    let &[n, height, width, depth @ (1 | 3 | 4)] = shape.dims() else {
        return Err(Error::invalid_argument(format!("Tensor must be 4-D with last dim 1, 3, or 4, not {shape}")));
    };
    // No pictures are nothing to show; pictures of no size are a mistake.
    if height == 0 || width == 0 {
        return Err(Error::invalid_argument(format!(
            "input tensor must have non-zero dims. Found: [{n}, {height}, {width}, {depth}]."
        )));
    }
    let is_too_large = |size: usize| i32::try_from(size).is_err();
    if is_too_large(height) || is_too_large(width) || is_too_large(height * width) {
        return Err(Error::invalid_argument(format!("Tensor too large for summary {shape}")));
    }
    if tensor.dtype() != DType::U8 && bad_color.len() < depth {
        return Err(Error::invalid_argument(format!(
            "expected depth <= bad_color.size, got depth = {depth}, bad_color.size = {}",
            bad_color.len()
        )));
    }
    let n_pixels = height * width * depth;
    let mut values = Vec::new();
    for i in 0..n.min(max_images) {
        let one = i * n_pixels..(i + 1) * n_pixels;
        let pixels = match tensor.dtype() {
            DType::U8 => tensor.data::<u8>()?[one].to_vec(),
            DType::F32 => normalized(&tensor.data::<f32>()?[one], depth, bad_color),
            DType::F16 => normalized(&tensor.data::<f16>()?[one], depth, bad_color),
            DType::F64 => normalized(&tensor.data::<f64>()?[one], depth, bad_color),
            other => {
                return Err(Error::invalid_argument(format!("pictures are uint8, float, half or double, not {other}")));
            }
        };
        let image = Image {
            height: height as i32,
            width: width as i32,
            colorspace: depth as i32,
            encoded_image_string: png(height, width, depth, &pixels)?,
        };
        // The name depends on how many are asked for, so that it does not change with the size of a batch.
        let tag = if max_images > 1 { format!("{tag}/image/{i}") } else { format!("{tag}/image") };
        values.push(Value::new(tag, Content::Image(image)));
    }
    Ok(values)
}

/// A float of a picture. Scaling is done in its own precision, as TensorFlow does.
trait Shade: Element {
    fn to_f32(self) -> f32;
    fn is_finite(self) -> bool;
    fn scaled(self, scale: f32, offset: f32) -> u8;
}

macro_rules! shades {
    ($($ty:ty: $from:expr, $to_f32:expr;)*) => {$(
        impl Shade for $ty {
            fn to_f32(self) -> f32 {
                $to_f32(self)
            }
            fn is_finite(self) -> bool {
                <$ty>::is_finite(self)
            }
            fn scaled(self, scale: f32, offset: f32) -> u8 {
                let shade: $ty = self * $from(scale) + $from(offset);
                $to_f32(shade) as u8
            }
        }
    )*};
}

shades! {
    f32: |x| x, |x| x;
    f64: f64::from, |x| x as f32;
    f16: f16::from_f32, f16::to_f32;
}

fn normalized<T: Shade>(values: &[T], depth: usize, bad_color: &[u8]) -> Vec<u8> {
    let is_finite = |pixel: &[T]| pixel.iter().all(|value| value.is_finite());
    let (mut min, mut max) = (f32::INFINITY, f32::NEG_INFINITY);
    for value in values.chunks_exact(depth).filter(|pixel| is_finite(pixel)).flatten() {
        min = min.min(value.to_f32());
        max = max.max(value.to_f32());
    }
    const ZERO_THRESHOLD: f32 = 1e-6;
    let (range, most, offset) = if min < 0.0 { (min.abs().max(max.abs()), 127.0, 128.0) } else { (max, 255.0, 0.0) };
    let scale = if range < ZERO_THRESHOLD { 0.0 } else { most / range };
    let mut pixels = Vec::with_capacity(values.len());
    for pixel in values.chunks_exact(depth) {
        match is_finite(pixel) {
            true => pixels.extend(pixel.iter().map(|value| value.scaled(scale, offset))),
            false => pixels.extend_from_slice(&bad_color[..depth]),
        }
    }
    pixels
}

fn png(height: usize, width: usize, depth: usize, pixels: &[u8]) -> Result<Vec<u8>> {
    let fails = |reason: png::EncodingError| Error::internal(format!("writing a PNG: {reason}"));
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_color(match depth {
        1 => png::ColorType::Grayscale,
        3 => png::ColorType::Rgb,
        _ => png::ColorType::Rgba,
    });
    let mut writer = encoder.write_header().map_err(fails)?;
    writer.write_image_data(pixels).map_err(fails)?;
    writer.finish().map_err(fails)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::testing::{check_op, tensor};

    type Picture = (String, [i32; 3], Vec<u8>);

    /// Tags, sizes and pixels of the pictures in the op's output.
    fn pictures(tensor: Tensor, max_images: i64) -> Vec<Picture> {
        let test = check_op("ImageSummary").input("im").input(tensor).attr("max_images", max_images);
        let out = test.run(false).unwrap();
        let summary = Summary::from_bytes(&out[0].strings().unwrap()[0]).unwrap();
        let decode = |value: Value| {
            let Some(Content::Image(image)) = value.content else { panic!("not a picture") };
            let mut reader = png::Decoder::new(Cursor::new(image.encoded_image_string)).read_info().unwrap();
            let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
            let info = reader.next_frame(&mut pixels).unwrap();
            assert_eq!((info.height, info.width), (image.height as u32, image.width as u32));
            (value.tag, [image.height, image.width, image.colorspace], pixels)
        };
        summary.value.into_iter().map(decode).collect()
    }

    fn picture(tag: &str, size: [i32; 3], pixels: &[u8]) -> Picture {
        (tag.to_owned(), size, pixels.to_vec())
    }

    // The expected pixels were read from what TensorFlow 2.21 wrote.

    #[test]
    fn bytes_are_pixels() {
        let grey = tensor([1, 2, 3, 1], [0u8, 10, 20, 30, 40, 50]);
        assert_eq!(pictures(grey, 3), [picture("im/image/0", [2, 3, 1], &[0, 10, 20, 30, 40, 50])]);
        let five = pictures(Tensor::zeros(DType::U8, [5, 1, 1, 1]).unwrap(), 3);
        assert_eq!(
            five.iter().map(|(tag, ..)| tag.as_str()).collect::<Vec<_>>(),
            ["im/image/0", "im/image/1", "im/image/2"]
        );
    }

    #[test]
    fn floats_are_scaled_to_what_can_be_seen() {
        let grey = |values: [f32; 4]| tensor([1, 2, 2, 1], values);
        assert_eq!(pictures(grey([0.0, 0.5, 1.0, 2.0]), 3), [picture("im/image/0", [2, 2, 1], &[0, 63, 127, 255])]);
        assert_eq!(pictures(grey([-1.0, 0.5, 1.0, 2.0]), 1), [picture("im/image", [2, 2, 1], &[64, 159, 191, 255])]);
        assert_eq!(pictures(grey([1e-7, 0.0, 0.0, 0.0]), 1)[0].2, [0, 0, 0, 0]);
        let nan = tensor([1, 1, 2, 3], [f32::NAN, 0.5, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(pictures(nan, 3)[0].2, [255, 0, 0, 127, 191, 255]);
        let halves = [0.1, 0.2, 0.3, 0.7, 0.9, 1.1].map(f16::from_f32);
        assert_eq!(pictures(tensor([1, 1, 2, 3], halves), 3)[0].2, [23, 46, 69, 162, 208, 255]);
        let two = pictures(tensor([2, 1, 1, 4], [-0.1f64, 0.2, 0.3, 0.7, 0.9, 1.1, -3.0, 0.0]), 2);
        assert_eq!(two[0], picture("im/image/0", [1, 1, 4], &[109, 164, 182, 255]));
        assert_eq!(two[1], picture("im/image/1", [1, 1, 4], &[166, 174, 1, 128]));
    }

    #[test]
    fn what_is_not_a_picture_is_refused() {
        let check = |tensor: Tensor, text: &str| drop(check_op("ImageSummary").input("im").input(tensor).fails(text));
        let zeros = |dims: [usize; 4]| Tensor::zeros(DType::F32, dims).unwrap();
        check(zeros([1, 2, 2, 2]), "Tensor must be 4-D with last dim 1, 3, or 4, not [1,2,2,2]");
        check(Tensor::from([1.0f32]), "Tensor must be 4-D");
        check(zeros([1, 0, 2, 1]), "input tensor must have non-zero dims. Found: [1, 0, 2, 1].");
        let tags = Tensor::from_strings([1], vec!["a".into()]).unwrap();
        check_op("ImageSummary").input(tags).input(zeros([1, 1, 1, 1])).fails("Tags must be a scalar");
        let color =
            |color: Tensor| check_op("ImageSummary").input("im").input(zeros([1, 1, 2, 4])).attr("bad_color", color);
        color(Tensor::from([255u8, 0, 0])).fails("expected depth <= bad_color.size, got depth = 4, bad_color.size = 3");
        color(Tensor::from([255i32, 0, 0])).fails("bad_color must be uint8, got int32");
    }
}
