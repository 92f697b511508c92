//! NumPy's files: `.npy`, one array, and `.npz`, several in a zip.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufReader, BufWriter, Cursor, Read, Seek, Write};
use std::path::Path;

use kolo_core::{DType, Error, Result, Shape, Tensor};
use prost::bytes::Bytes;
use zip::read::ZipArchive;
use zip::write::{SimpleFileOptions, ZipWriter};

use super::file::{Input, io_error};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// A header names a dtype and a shape; a longer one is something else.
const MAX_HEADER: u32 = 1 << 16;

/// Reads an `.npy` file: C or Fortran order, little or big endian; bools, integers, floats, and byte strings.
pub fn read(path: impl AsRef<Path>) -> Result<Tensor> {
    parse(&mut Input::open(path.as_ref())?)
}

/// Reads `.npy` from memory; `name` is for errors.
pub fn read_bytes(name: &str, bytes: impl AsRef<[u8]> + Send + 'static) -> Result<Tensor> {
    parse(&mut Input::from_bytes(name, bytes)?)
}

/// Writes an `.npy` file.
pub fn write(path: impl AsRef<Path>, tensor: &Tensor) -> Result<()> {
    let path = path.as_ref();
    let name = path.display().to_string();
    let fails = |reason: std::io::Error| io_error(&name, &reason);
    let mut file = BufWriter::new(File::create(path).map_err(fails)?);
    encode(tensor, &name, &mut file)?;
    file.flush().map_err(fails)
}

/// Reads the arrays of an `.npz` file, in their order there.
pub fn read_npz(path: impl AsRef<Path>) -> Result<Vec<(String, Tensor)>> {
    let path = path.as_ref();
    let name = path.display().to_string();
    let file = File::open(path).map_err(|reason| io_error(&name, &reason))?;
    parse_npz(&name, BufReader::new(file))
}

/// Reads `.npz` from memory; `name` is for errors.
pub fn read_npz_bytes(name: &str, bytes: &[u8]) -> Result<Vec<(String, Tensor)>> {
    parse_npz(name, Cursor::new(bytes))
}

/// Writes an `.npz` file, uncompressed as `numpy.savez` does.
pub fn write_npz<'a>(path: impl AsRef<Path>, arrays: impl IntoIterator<Item = (&'a str, &'a Tensor)>) -> Result<()> {
    let path = path.as_ref();
    let name = path.display().to_string();
    let file = File::create(path).map_err(|reason| io_error(&name, &reason))?;
    let mut zip = ZipWriter::new(BufWriter::new(file));
    let fails = |reason: zip::result::ZipError| zip_error(&name, reason);
    for (array, tensor) in arrays {
        let large = tensor.n_bytes() >= u32::MAX as usize / 2;
        let options = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored).large_file(large);
        zip.start_file(format!("{array}.npy"), options).map_err(fails)?;
        encode(tensor, &name, &mut zip)?;
    }
    let mut file = zip.finish().map_err(fails)?;
    file.flush().map_err(|reason| io_error(&name, &reason))
}

fn parse_npz(name: &str, reader: impl Read + Seek) -> Result<Vec<(String, Tensor)>> {
    let mut zip = ZipArchive::new(reader).map_err(|reason| zip_error(name, reason))?;
    let mut arrays = Vec::new();
    for i in 0..zip.len() {
        let mut file = zip.by_index(i).map_err(|reason| zip_error(name, reason))?;
        let entry = file.name().map_err(|reason| zip_error(name, reason))?.into_owned();
        let whole = format!("{name}/{entry}");
        // The size in the directory is a claim; memory is taken as bytes arrive.
        let mut bytes = Vec::new();
        let claimed = file.size();
        let read = file.by_ref().take(claimed.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|reason| io_error(&whole, &reason))?;
        let array = entry.strip_suffix(".npy").unwrap_or(&entry).to_owned();
        arrays.push((array, read_bytes(&whole, bytes)?));
    }
    Ok(arrays)
}

fn zip_error(name: &str, reason: zip::result::ZipError) -> Error {
    match reason {
        zip::result::ZipError::Io(reason) => io_error(name, &reason),
        other => Error::data_loss(format!("{name}: expected a zip of .npy files, found damage: {other}")),
    }
}

/// What a header says.
struct Header {
    kind: Kind,
    is_big: bool,
    is_fortran: bool,
    shape: Shape,
}

#[derive(Clone, Copy)]
enum Kind {
    Number(DType),
    /// Byte strings of this length, padded with zeros.
    Bytes(usize),
}

fn parse(input: &mut Input) -> Result<Tensor> {
    let mut magic = [0; 8];
    input.read_exact(&mut magic, "NumPy's magic number")?;
    if !magic.starts_with(MAGIC) {
        return Err(input.wrong_at(0, "NumPy's magic number", &format!("{:02x?}", &magic[..6])));
    }
    let length = match magic[6] {
        1 => {
            let mut length = [0; 2];
            input.read_exact(&mut length, "the header's length")?;
            u32::from(u16::from_le_bytes(length))
        }
        2 | 3 => {
            let mut length = [0; 4];
            input.read_exact(&mut length, "the header's length")?;
            u32::from_le_bytes(length)
        }
        other => return Err(input.wrong_at(6, "version 1, 2 or 3", &other.to_string())),
    };
    let start = input.at();
    if length > MAX_HEADER {
        return Err(input.wrong_at(start, &format!("a header of at most {MAX_HEADER} bytes"), &length.to_string()));
    }
    let header = input.read_bytes(length.into(), "the header")?;
    let header = String::from_utf8_lossy(&header).into_owned();
    let header = parse_header(&header)
        .map_err(|what| input.wrong_at(start, &what, &format!("'{}'", header.trim_end().escape_debug())))?;
    let size = match header.kind {
        Kind::Number(dtype) => dtype.size().unwrap_or(1),
        Kind::Bytes(length) => length,
    };
    let what = format!("the elements of shape {}", header.shape);
    let n_bytes = header.shape.n_elements().checked_mul(size);
    let n_bytes =
        n_bytes.ok_or_else(|| input.wrong_at(start, "a shape that fits memory", &header.shape.to_string()))?;
    // Strings without a length take no bytes in the file, but memory here.
    if size == 0 && header.shape.n_elements() > MAX_HEADER as usize {
        return Err(input.wrong_at(start, "elements that have bytes", &header.shape.to_string()));
    }
    let mut bytes = input.read_bytes(n_bytes as u64, &what)?;
    input.expect_end(&what)?;
    if header.is_fortran && header.shape.rank() > 1 {
        bytes = to_row_major(&bytes, size, &header.shape);
    }
    match header.kind {
        Kind::Bytes(length) => {
            let string = |i: usize| {
                let padded = &bytes[i * length..(i + 1) * length];
                let end = padded.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                Bytes::copy_from_slice(&padded[..end])
            };
            let strings = (0..header.shape.n_elements()).map(string).collect();
            Tensor::from_strings(header.shape, strings)
        }
        Kind::Number(dtype) => {
            if header.is_big {
                bytes.chunks_exact_mut(size).for_each(<[u8]>::reverse);
            }
            if dtype == DType::Bool && bytes.iter().any(|byte| *byte > 1) {
                return Err(input.wrong_at(start + u64::from(length), "bools, 0 or 1", "other bytes"));
            }
            let mut tensor = Tensor::zeros(dtype, header.shape)?;
            tensor.host_bytes_mut()?.copy_from_slice(&bytes);
            Ok(tensor)
        }
    }
}

/// Reads `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`; the error is what was expected.
fn parse_header(text: &str) -> Result<Header, String> {
    let inner = text.trim().strip_prefix('{').and_then(|text| text.strip_suffix('}'));
    let inner = inner.ok_or("a header in braces")?;
    let value = |key: &str| {
        let quoted = [format!("'{key}':"), format!("\"{key}\":")];
        let found = quoted.iter().find_map(|quoted| inner.find(quoted.as_str()).map(|at| &inner[at + quoted.len()..]));
        found.map(str::trim_start).ok_or_else(|| format!("a header with '{key}'"))
    };
    let descr = value("descr")?;
    let descr = descr.strip_prefix(['\'', '"']).and_then(|text| text.split(['\'', '"']).next());
    let descr = descr.ok_or("a plain dtype; records are not read")?;
    let (is_big, kind) = match descr.split_at_checked(1) {
        Some(("<" | "|" | "=", kind)) => (false, kind),
        Some((">", kind)) => (true, kind),
        _ => return Err("a dtype such as '<f4'".to_owned()),
    };
    use DType::*;
    let kind = match kind {
        "b1" | "?" => Kind::Number(Bool),
        "i1" => Kind::Number(I8),
        "i2" => Kind::Number(I16),
        "i4" => Kind::Number(I32),
        "i8" => Kind::Number(I64),
        "u1" => Kind::Number(U8),
        "u2" => Kind::Number(U16),
        "u4" => Kind::Number(U32),
        "u8" => Kind::Number(U64),
        "f2" => Kind::Number(F16),
        "f4" => Kind::Number(F32),
        "f8" => Kind::Number(F64),
        other => match other.strip_prefix('S').and_then(|length| length.parse().ok()) {
            Some(length) => Kind::Bytes(length),
            None => return Err("a dtype of bools, integers, floats or byte strings".to_owned()),
        },
    };
    let is_fortran = match value("fortran_order")? {
        order if order.starts_with("False") => false,
        order if order.starts_with("True") => true,
        _ => return Err("a fortran_order of True or False".to_owned()),
    };
    let shape = value("shape")?.strip_prefix('(').and_then(|text| text.split_once(')'));
    let (shape, _) = shape.ok_or("a shape in brackets")?;
    let sizes = shape.split(',').map(str::trim).filter(|size| !size.is_empty());
    let sizes: Result<Vec<usize>, _> = sizes.map(str::parse).collect();
    let shape = Shape::new(&sizes.map_err(|_| "a shape of numbers")?).map_err(|_| "a shape that fits memory")?;
    Ok(Header { kind, is_big, is_fortran, shape })
}

/// Elements whose first index runs fastest, in the order in which the last one does.
fn to_row_major(bytes: &[u8], size: usize, shape: &Shape) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut index = vec![0usize; shape.rank()];
    let strides: Vec<usize> = (0..shape.rank()).map(|i| shape[..i].iter().product()).collect();
    for _ in 0..shape.n_elements() {
        let at: usize = index.iter().zip(&strides).map(|(i, stride)| i * stride).sum();
        out.extend_from_slice(&bytes[at * size..][..size]);
        for dim in (0..index.len()).rev() {
            index[dim] += 1;
            if index[dim] < shape[dim] {
                break;
            }
            index[dim] = 0;
        }
    }
    out
}

fn encode(tensor: &Tensor, name: &str, writer: &mut impl Write) -> Result<()> {
    use DType::*;
    let strings = if tensor.dtype() == Str { tensor.strings()? } else { &[] };
    let longest = strings.iter().map(|string| string.len()).max().unwrap_or(0).max(1);
    let descr = match tensor.dtype() {
        Bool => "|b1".to_owned(),
        I8 => "|i1".to_owned(),
        U8 => "|u1".to_owned(),
        dtype @ (I16 | I32 | I64) => format!("<i{}", dtype.size().unwrap_or(0)),
        dtype @ (U16 | U32 | U64) => format!("<u{}", dtype.size().unwrap_or(0)),
        dtype @ (F16 | F32 | F64) => format!("<f{}", dtype.size().unwrap_or(0)),
        Str => format!("|S{longest}"),
        other @ (BF16 | Resource | Variant | Complex64 | Complex128 | QI8 | QU8 | QI16 | QU16 | QI32) => {
            return Err(Error::invalid_argument(format!("{name}: NumPy's files do not hold {other}; cast it first")));
        }
    };
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (");
    for (i, size) in tensor.shape().iter().enumerate() {
        let _ = write!(header, "{}{size}", if i > 0 { ", " } else { "" });
    }
    header.push_str(if tensor.shape().rank() == 1 { ",), }" } else { "), }" });
    // As NumPy does: the data begin at a multiple of 64, behind a newline.
    let unpadded = MAGIC.len() + 4 + header.len() + 1;
    header.extend(std::iter::repeat_n(' ', unpadded.next_multiple_of(64) - unpadded));
    header.push('\n');
    let length = u16::try_from(header.len());
    let length = length.map_err(|_| Error::invalid_argument(format!("{name}: the shape has too many dimensions")))?;
    let parts = [MAGIC.as_slice(), &[1, 0], &length.to_le_bytes(), header.as_bytes()];
    let mut put = |bytes: &[u8]| writer.write_all(bytes).map_err(|reason| io_error(name, &reason));
    parts.iter().try_for_each(|part| put(part))?;
    if tensor.dtype() != Str {
        return put(tensor.host_bytes()?);
    }
    let mut padded = vec![0; longest];
    for string in strings {
        padded.fill(0);
        padded[..string.len()].copy_from_slice(string);
        put(&padded)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(tensor: &Tensor) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode(tensor, "x", &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_header_is_numpy_s_to_the_byte() {
        // numpy.save of np.array([1, 2], np.int32), from NumPy 2.4.
        let mut expected = b"\x93NUMPY\x01\0v\0{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }".to_vec();
        expected.resize(127, b' ');
        expected.push(b'\n');
        expected.extend([1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(bytes_of(&Tensor::from([1i32, 2])), expected);
    }

    #[test]
    fn every_cut_is_an_error() {
        for tensor in [Tensor::from([[1i16, 2], [3, 4]]), Tensor::from("text")] {
            let bytes = bytes_of(&tensor);
            assert_eq!(read_bytes("x", bytes.clone()).unwrap(), tensor);
            for cut in 0..bytes.len() {
                assert!(read_bytes("x", bytes[..cut].to_vec()).is_err(), "cut at {cut}");
            }
            assert!(read_bytes("x", [bytes, vec![0]].concat()).unwrap_err().message().contains("found more bytes"));
        }
    }

    #[test]
    fn a_wrong_header_says_what_was_expected() {
        let says = |header: &str, text: &str| {
            let length = (header.len() as u16).to_le_bytes();
            let bytes = [b"\x93NUMPY\x01\0", &length[..], header.as_bytes()].concat();
            let error = read_bytes("x", bytes).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        };
        says("", "expected a header in braces at byte 10");
        says("{'descr': '<f4'}", "a header with 'fortran_order'");
        says("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': ()}", "records are not read");
        says("{'descr': '<c8', 'fortran_order': False, 'shape': ()}", "bools, integers, floats or byte strings");
        says("{'descr': '<f4', 'fortran_order': Maybe, 'shape': ()}", "True or False");
        says("{'descr': '<f4', 'fortran_order': False, 'shape': (x,)}", "a shape of numbers");
        says("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 9999999999)}", "fits memory");
        says("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}", "found the end of the file");
        says("{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,)}", "elements that have bytes");
        assert!(read_bytes("x", *b"\x93NUMPZ\x01\0").unwrap_err().message().contains("NumPy's magic number"));
        assert!(read_bytes("x", *b"\x93NUMPY\x09\0").unwrap_err().message().contains("version 1, 2 or 3"));
        assert!(read_bytes("x", *b"\x93NUMPY\x02\0\xff\xff\xff\xff").unwrap_err().message().contains("at most 65536"));
    }

    #[test]
    fn several_arrays_share_a_file() {
        let path = std::env::temp_dir().join(format!("kolo-{}.npz", std::process::id()));
        let (a, b) = (Tensor::from([1.0f32, 2.0]), Tensor::scalar(7i64));
        write_npz(&path, [("a", &a), ("b", &b)]).unwrap();
        assert_eq!(read_npz(&path).unwrap(), [("a".to_owned(), a), ("b".to_owned(), b)]);
        let bytes = std::fs::read(&path).unwrap();
        for cut in 0..bytes.len() {
            assert!(read_npz_bytes("x", &bytes[..cut]).is_err(), "cut at {cut}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    proptest! {
        #[test]
        fn arrays_come_back(values: Vec<f64>, small: Vec<u8>, flags: Vec<bool>, words: Vec<String>) {
            let n = words.len();
            // NumPy cannot tell zeros at the end of a string from its padding.
            let words = words.iter().map(|word| word.trim_end_matches('\0').to_owned().into()).collect();
            for tensor in [
                Tensor::from(values.clone()),
                Tensor::from_vec([small.len(), 1], small).unwrap(),
                Tensor::from(flags),
                Tensor::from_strings([n], words).unwrap(),
            ] {
                let read = read_bytes("x", bytes_of(&tensor)).unwrap();
                prop_assert_eq!((read.dtype(), read.shape()), (tensor.dtype(), tensor.shape()));
                match tensor.dtype() {
                    DType::Str => prop_assert_eq!(read, tensor),
                    _ => prop_assert_eq!(read.host_bytes(), tensor.host_bytes()),
                }
            }
        }

        #[test]
        fn no_bytes_panic(start in 0usize..140, change: Vec<u8>) {
            let mut bytes = bytes_of(&Tensor::from([1i32, 2]));
            for (byte, new) in bytes.iter_mut().skip(start).zip(change) {
                *byte = new;
            }
            let _ = read_bytes("x", bytes);
        }
    }
}
