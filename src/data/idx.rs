//! IDX files, the format of MNIST: a magic number, big-endian sizes, then the elements.

use std::path::Path;

use kolo_core::{DType, Error, Result, Shape, Tensor};

use super::file::Input;

/// More dimensions than any file has; a limit on what is read of a wrong one.
const MAX_RANK: u8 = 16;

/// Reads an IDX file, gzipped or not.
///
/// # Errors
/// Names the file and the byte where it is not IDX, is cut off, or goes on after its end.
pub fn read(path: impl AsRef<Path>) -> Result<Tensor> {
    parse(&mut Input::open(path.as_ref())?)
}

/// Reads IDX from memory, gzipped or not; `name` is for errors.
pub fn read_bytes(name: &str, bytes: impl AsRef<[u8]> + Send + 'static) -> Result<Tensor> {
    parse(&mut Input::from_bytes(name, bytes)?)
}

fn parse(input: &mut Input) -> Result<Tensor> {
    let mut magic = [0u8; 4];
    input.read_exact(&mut magic, "IDX's magic number")?;
    let [0, 0, code, rank] = magic else {
        return Err(input.wrong_at(0, "IDX's magic number (two zero bytes)", &format!("{magic:02x?}")));
    };
    let dtype = match code {
        0x08 => DType::U8,
        0x09 => DType::I8,
        0x0b => DType::I16,
        0x0c => DType::I32,
        0x0d => DType::F32,
        0x0e => DType::F64,
        _ => {
            return Err(input.wrong_at(2, "an element type of IDX (08, 09, 0b, 0c, 0d or 0e)", &format!("{code:02x}")));
        }
    };
    if rank > MAX_RANK {
        return Err(input.wrong_at(3, &format!("at most {MAX_RANK} dimensions"), &rank.to_string()));
    }
    let mut dims = Vec::with_capacity(rank.into());
    for i in 0..rank {
        let mut size = [0u8; 4];
        input.read_exact(&mut size, &format!("the size of dimension {i}"))?;
        dims.push(u32::from_be_bytes(size) as usize);
    }
    let shape = Shape::new(&dims).map_err(|error| input.wrong_at(4, "sizes that fit memory", error.message()))?;
    let size = dtype.size().unwrap_or(1);
    let n_bytes = shape.n_elements().checked_mul(size);
    let n_bytes = n_bytes.ok_or_else(|| input.wrong_at(4, "sizes that fit memory", &format!("{dtype}{shape}")))?;
    let bytes = input.read_bytes(n_bytes as u64, &format!("the elements of {dtype}{shape}"))?;
    input.expect_end(&format!("the elements of {dtype}{shape}"))?;
    from_big_endian(dtype, shape, bytes)
}

fn from_big_endian(dtype: DType, shape: Shape, bytes: Vec<u8>) -> Result<Tensor> {
    fn elements<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks::<N>().0.iter().map(|element| read(*element)).collect()
    }
    match dtype {
        DType::U8 => Tensor::from_vec(shape, bytes),
        DType::I8 => Tensor::from_vec(shape, elements(&bytes, i8::from_be_bytes)),
        DType::I16 => Tensor::from_vec(shape, elements(&bytes, i16::from_be_bytes)),
        DType::I32 => Tensor::from_vec(shape, elements(&bytes, i32::from_be_bytes)),
        DType::F32 => Tensor::from_vec(shape, elements(&bytes, f32::from_be_bytes)),
        DType::F64 => Tensor::from_vec(shape, elements(&bytes, f64::from_be_bytes)),
        other => Err(Error::internal(format!("IDX has no {other}"))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Code;

    use super::*;

    /// A 2 by 3 matrix of int16: -1, 2, …
    const MATRIX: &[u8] = &[0, 0, 0x0b, 2, 0, 0, 0, 2, 0, 0, 0, 3, 0xff, 0xff, 0, 2, 0, 3, 0, 4, 0, 5, 1, 0];

    #[test]
    fn elements_are_big_endian() {
        let tensor = read_bytes("m", MATRIX).unwrap();
        assert_eq!(tensor, Tensor::from([[-1i16, 2, 3], [4, 5, 256]]));
        let tensor = read_bytes("f", [0, 0, 0x0d, 1, 0, 0, 0, 1, 0x3f, 0x80, 0, 0]).unwrap();
        assert_eq!(tensor, Tensor::from([1.0f32]));
        assert_eq!(read_bytes("e", [0, 0, 0x08, 1, 0, 0, 0, 0]).unwrap().n_elements(), 0);
    }

    #[test]
    fn a_file_that_ends_too_early_or_too_late_is_an_error() {
        for cut in 0..MATRIX.len() {
            let error = read_bytes("cut", &MATRIX[..cut]).unwrap_err();
            assert_eq!(error.code(), Code::DataLoss);
            assert!(error.message().starts_with("cut: expected "), "{error}");
        }
        let error = read_bytes("long", [MATRIX, &[0]].concat()).unwrap_err();
        assert_eq!(
            error.message(),
            "long: expected the end of the file after the elements of int16[2,3] at byte 24, found more bytes"
        );
    }

    #[test]
    fn other_files_are_refused_by_their_first_bytes() {
        let says = |bytes: &'static [u8], text: &str| {
            let error = read_bytes("x", bytes).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        };
        says(b"PK\x03\x04", "IDX's magic number (two zero bytes) at byte 0, found [50, 4b, 03, 04]");
        says(&[0, 0, 7, 1], "an element type of IDX");
        says(&[0, 0, 8, 200], "at most 16 dimensions at byte 3, found 200");
        // Sizes whose product overflows, and a claim of 4 GB in a file of 8 bytes.
        says(&[0, 0, 8, 3, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255], "sizes that fit memory");
        says(&[0, 0, 8, 1, 255, 255, 255, 255], "4294967295 bytes from byte 8");
    }
}
