//! `DecodePng`, `EncodePng`: images as PNG files.

use std::io::{self, BufRead, Cursor, Read, Seek, SeekFrom};

use bytes::Bytes;
use kolo_core::{DType, Dim, Error, PartialShape, Result, Shape};
use kolo_device::cpu::{looking, stop_if_asked};
use kolo_graph::{Gradient, OpDef, Output};

use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The image of a PNG file as `[height, width, channels]`; 0 channels means as many as the file has.
#[track_caller]
pub fn decode_png(contents: Output<'_>, channels: i64) -> Output<'_> {
    contents.graph().op("DecodePng").input(contents).attr("channels", channels).out()
}

/// Images, with the last three dimensions height, width and channels, as PNG files.
#[track_caller]
pub fn encode_png(images: Output<'_>) -> Output<'_> {
    images.graph().op("EncodePng").input(images).out()
}

pub(crate) static DECODE_PNG: Op = Op {
    def: OpDef {
        name: "DecodePng",
        signature: "(contents:string) -> (image:dtype) ; channels:int=0, dtype:type{uint8,uint16}=uint8",
        shape: |ctx| {
            ctx.input_of_rank(0, 0)?;
            let channels = usize::try_from(ctx.attrs().int("channels")?).ok().filter(|&n| n > 0);
            Ok(vec![PartialShape::new(&[None, None, channels])])
        },
        gradient: Gradient::None("files are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(decode)],
    gpu: Gpu::FILES,
    cost: Cost::Heavy,
};

pub(crate) static ENCODE_PNG: Op = Op {
    def: OpDef {
        name: "EncodePng",
        signature: "(image:T) -> (contents:string) ; compression:int=-1, T:type{uint8,uint16}=uint8",
        shape: |ctx| {
            let images = ctx.input_of_rank_at_least(0, 3)?;
            Ok(vec![match images.dims() {
                Some([batch @ .., _, _, _]) => PartialShape::new(batch as &[Dim]),
                _ => PartialShape::unknown(),
            }])
        },
        gradient: Gradient::None("files are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(encode)],
    gpu: Gpu::FILES,
    cost: Cost::Heavy,
};

/// A file of a few bytes can claim to be larger than any image that is worth decoding.
const MOST_BYTES: usize = 1 << 30;

/// A file that is read in small pieces, with a look at whether the step is stopped before each: a few bytes may stand for a
/// thousand times as many of an image.
struct Pieces<'a>(Cursor<&'a [u8]>);

impl Pieces<'_> {
    const N_BYTES: usize = 4096;
}

impl Read for Pieces<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        stop_if_asked();
        let n = to.len().min(Self::N_BYTES);
        self.0.read(&mut to[..n])
    }
}

impl BufRead for Pieces<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        stop_if_asked();
        let rest = self.0.fill_buf()?;
        Ok(&rest[..rest.len().min(Self::N_BYTES)])
    }

    fn consume(&mut self, n: usize) {
        self.0.consume(n);
    }
}

impl Seek for Pieces<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

fn decode(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let channels = ctx.attrs().int("channels")?;
    if ![0, 1, 3, 4].contains(&channels) {
        return Err(Error::invalid_argument(format!("`channels` must be 0, 1, 3 or 4 but got {channels}")));
    }
    let [contents] = ctx.input(0)?.strings()? else {
        return Err(Error::invalid_argument(format!("contents must be scalar, got shape {}", ctx.input(0)?.shape())));
    };
    let bad = |why: &dyn std::fmt::Display| Error::invalid_argument(format!("Invalid PNG. {why}"));
    let limits = png::Limits { bytes: MOST_BYTES };
    let mut decoder = png::Decoder::new_with_limits(Pieces(Cursor::new(contents.as_ref())), limits);
    decoder.set_transformations(png::Transformations::EXPAND);
    let mut reader = decoder.read_info().map_err(|error| bad(&error))?;
    let n = reader.output_buffer_size().filter(|&n| n <= MOST_BYTES);
    let n = n.ok_or_else(|| bad(&"The image is too large"))?;
    // Whatever the file claims is asked for.
    let mut bytes = ctx.scratch(n, 0u8, "bytes of an image")?;
    let frame = reader.next_frame(&mut bytes).map_err(|error| bad(&error))?;
    let (width, height) = (frame.width as usize, frame.height as usize);
    let has = frame.color_type.samples();
    let wide = frame.bit_depth == png::BitDepth::Sixteen;
    // Everything as 16 bits: what has 8 is repeated, so that white stays white.
    let sample = |i: usize| match wide {
        true => u16::from_be_bytes([bytes[2 * i], bytes[2 * i + 1]]),
        false => u16::from(bytes[i]) * 257,
    };
    if width * height * has * if wide { 2 } else { 1 } > bytes.len() {
        return Err(bad(&"The image is larger than it claims"));
    }
    let wanted = if channels == 0 { has } else { channels as usize };
    let mut image = ctx.allocate(ctx.attrs().dtype("dtype")?, [height, width, wanted].into())?;
    let pixels = looking(0..width * height).flat_map(|pixel| {
        let samples: [u16; 4] =
            std::array::from_fn(|channel| if channel < has { sample(pixel * has + channel) } else { 0 });
        convert(&samples[..has], wanted)
    });
    match image.dtype() {
        DType::U16 => image.data_mut::<u16>()?.iter_mut().zip(pixels).for_each(|(to, sample)| *to = sample),
        // The upper byte, as libpng does it.
        _ => image.data_mut::<u8>()?.iter_mut().zip(pixels).for_each(|(to, sample)| *to = (sample >> 8) as u8),
    }
    ctx.set_output(0, image);
    Ok(())
}

/// A pixel with another number of channels.
fn convert(pixel: &[u16], wanted: usize) -> impl Iterator<Item = u16> + use<> {
    let (color, alpha): ([u16; 3], u16) = match *pixel {
        [gray] => ([gray; 3], u16::MAX),
        [gray, alpha] => ([gray; 3], alpha),
        [r, g, b] => ([r, g, b], u16::MAX),
        [r, g, b, alpha] => ([r, g, b], alpha),
        _ => ([0; 3], u16::MAX),
    };
    let list: [u16; 4] = match wanted {
        1 => [gray(color), 0, 0, 0],
        2 => [gray(color), alpha, 0, 0],
        _ => [color[0], color[1], color[2], alpha],
    };
    list.into_iter().take(wanted)
}

/// The brightness of a colour with libpng's weights, which are of 15 bits.
fn gray([r, g, b]: [u16; 3]) -> u16 {
    if r == g && g == b {
        return r;
    }
    let weighted = |r: u16, g: u16, b: u16, half: u32| -> u32 {
        (9798 * u32::from(r) + 19235 * u32::from(g) + 3735 * u32::from(b) + half) >> 15
    };
    // Eight bits are weighted as such and cut off, sixteen are rounded, so that the result is libpng's.
    let is_narrow = [r, g, b].iter().all(|sample| sample % 257 == 0);
    match is_narrow {
        true => (weighted(r / 257, g / 257, b / 257, 0) * 257) as u16,
        false => weighted(r, g, b, 16_384) as u16,
    }
}

fn encode(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let level = ctx.attrs().int("compression")?;
    let compression = match level {
        -1 | 4..=6 => png::Compression::Balanced,
        0 => png::Compression::NoCompression,
        1..=3 => png::Compression::Fast,
        7..=9 => png::Compression::High,
        _ => return Err(Error::invalid_argument(format!("compression should be in [-1,9], got {level}"))),
    };
    let images = ctx.input(0)?;
    let [batch @ .., height, width, channels] = images.shape().dims() else {
        return Err(Error::invalid_argument(format!("image must be at least 3-dimensional, got {}", images.shape())));
    };
    let color = match channels {
        1 => png::ColorType::Grayscale,
        2 => png::ColorType::GrayscaleAlpha,
        3 => png::ColorType::Rgb,
        4 => png::ColorType::Rgba,
        _ => {
            return Err(Error::invalid_argument(format!("image must have 1, 2, 3, or 4 channels, got {channels}")));
        }
    };
    let too_large = |_| Error::invalid_argument(format!("the image is too large: {height}x{width}"));
    let (w, h) = (u32::try_from(*width).map_err(too_large)?, u32::try_from(*height).map_err(too_large)?);
    let batch = Shape::new(batch)?;
    let mut swapped;
    let (bytes, depth): (&[u8], png::BitDepth) = match images.dtype() {
        DType::U16 => {
            let samples = images.data::<u16>()?;
            swapped = ctx.scratch(size_of_val(samples), 0u8, "bytes of images")?;
            let pairs = looking(swapped.chunks_exact_mut(2).zip(samples));
            pairs.for_each(|(to, sample)| to.copy_from_slice(&sample.to_be_bytes()));
            (&swapped, png::BitDepth::Sixteen)
        }
        _ => (images.data::<u8>()?, png::BitDepth::Eight),
    };
    let size = bytes.len().checked_div(batch.n_elements()).unwrap_or(0);
    let file = |i: usize| -> Result<Bytes> {
        // A list that grows has room for twice as many; what cannot be compressed becomes a little longer.
        let _asked = ctx.device.charge(2 * size, &ctx.node.name)?;
        let mut file = Vec::new();
        let fails = |error: png::EncodingError| Error::internal(format!("PNG encoding failed: {error}"));
        let mut encoder = png::Encoder::new(&mut file, w, h);
        encoder.set_depth(depth);
        encoder.set_color(color);
        encoder.set_compression(compression);
        let mut writer = encoder.write_header().map_err(fails)?;
        writer.write_image_data(&bytes[i * size..(i + 1) * size]).map_err(fails)?;
        writer.finish().map_err(fails)?;
        file.shrink_to_fit();
        Ok(file.into())
    };
    let mut files = ctx.strings_made();
    for i in 0..batch.n_elements() {
        files.push(file(i)?)?;
    }
    let files = files.finish(batch)?;
    ctx.set_output(0, files);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{Tensor, TensorData};

    use super::*;
    use crate::testing::{check_op, tensor};

    fn image(channels: usize) -> Tensor {
        Tensor::from_vec([2, 3, channels], (0..6 * channels).map(|i| (i * 9) as u8).collect()).unwrap()
    }

    fn encoded(image: Tensor) -> Tensor {
        check_op("EncodePng").input(image).run(false).unwrap().remove(0)
    }

    #[test]
    fn images_come_back() {
        for channels in 1..=4 {
            check_op("DecodePng").input(encoded(image(channels))).gives(image(channels));
        }
        let wide = tensor([1, 2, 1], [1u16, 65535]);
        check_op("DecodePng").attr("dtype", DType::U16).input(encoded(wide.clone())).gives(wide.clone());
        check_op("DecodePng").input(encoded(wide)).gives(tensor([1, 2, 1], [0u8, 255]));
        let narrow = encoded(tensor([1, 2, 1], [60u8, 180]));
        check_op("DecodePng").attr("dtype", DType::U16).input(narrow).gives(tensor([1, 2, 1], [15420u16, 46260]));
        let batch = encoded(tensor([2, 1, 1, 1, 1], [1u8, 2]));
        assert_eq!(batch.shape().dims(), [2, 1]);
    }

    /// What lives on after the kernel counts as long as it does.
    #[test]
    fn images_and_files_are_counted() {
        let image = Tensor::zeros(DType::U8, [100, 100, 3]).unwrap();
        let files = encoded(Tensor::zeros(DType::U16, [100, 100, 100, 1]).unwrap());
        let TensorData::Strings(list) = files.storage() else { panic!("{files:?}") };
        assert!(list.is_list_counted() && list.is_text_counted());
        for dtype in [DType::U8, DType::U16] {
            let test = check_op("DecodePng").attr("dtype", dtype).input(encoded(image.clone()));
            let decoded = test.run(false).unwrap().remove(0);
            let TensorData::Buffer { buffer, .. } = decoded.storage() else { panic!("{decoded:?}") };
            assert!(buffer.is_counted());
        }
    }

    #[test]
    fn channels_are_added_and_dropped_as_in_tensorflow() {
        let test = |from: usize, to: i64| check_op("DecodePng").attr("channels", to).input(encoded(image(from)));
        test(3, 1).gives(tensor([2, 3, 1], [7u8, 34, 61, 88, 115, 142]));
        test(4, 1).gives(tensor([2, 3, 1], [7u8, 43, 79, 115, 151, 187]));
        test(2, 1).gives(tensor([2, 3, 1], [0u8, 18, 36, 54, 72, 90]));
        test(1, 3).gives(tensor([2, 3, 3], [0u8, 0, 0, 9, 9, 9, 18, 18, 18, 27, 27, 27, 36, 36, 36, 45, 45, 45]));
        let first = |out: Vec<Tensor>| out[0].data::<u8>().unwrap()[..8].to_vec();
        assert_eq!(first(test(3, 4).run(false).unwrap()), [0, 9, 18, 255, 27, 36, 45, 255]);
        assert_eq!(first(test(2, 4).run(false).unwrap()), [0, 0, 0, 9, 18, 18, 18, 27]);
    }

    #[test]
    fn a_file_of_tensorflows() {
        let file =
            b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x03\x00\x00\x00\x02\x08\x00\x00\x00\x00\xb8\x1f\x39\xc6\
            \x00\x00\x00\x10IDAT\x08\x99\x63\x64\xe0\xe4\x64\x94\xe6\xe4\x04\x00\x00\xe3\x00\x42\xb1\xf8\x11\xc8\
            \x00\x00\x00\x00IEND\xae\x42\x60\x82";
        check_op("DecodePng").input(Tensor::string(Bytes::from_static(file))).gives(image(1));
    }

    #[test]
    fn what_is_no_image_is_refused() {
        check_op("DecodePng").input("abc").fails("Invalid PNG");
        let file = encoded(image(1));
        let part = Tensor::string(file.strings().unwrap()[0].slice(..30));
        check_op("DecodePng").input(part).fails("Invalid PNG");
        check_op("DecodePng").attr("channels", 2i64).input(file).fails("`channels` must be 0, 1, 3 or 4 but got 2");
        check_op("EncodePng").input(tensor::<u8, 3>([1, 1, 5], [0; 5])).fails("1, 2, 3, or 4 channels, got 5");
        check_op("EncodePng").attr("compression", 10i64).input(image(1)).fails("compression should be in [-1,9]");
        let empty = check_op("EncodePng").input(tensor::<u8, 3>([0, 3, 1], []));
        assert_eq!(empty.run(false).unwrap_err().code(), kolo_core::Code::Internal);
    }
}
