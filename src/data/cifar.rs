//! CIFAR-10 in its binary version: small colour photographs of ten kinds of thing.
//!
//! A file is records of 3,073 bytes: the label, then 32 × 32 pixels of red, as many of green, as many of blue.

use std::path::Path;

use kolo_core::{DType, Error, Result, Tensor};

use super::Dataset;
use super::file::Input;

const SIDE: usize = 32;
const PIXELS: usize = SIDE * SIDE;
const RECORD: usize = 1 + 3 * PIXELS;

/// What the labels stand for.
pub const CLASSES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

/// Photographs to train on, and others to test with.
#[derive(Clone, Debug)]
pub struct Cifar10 {
    /// What to train on: 50,000 in the whole set.
    pub train: Split,
    /// What to test with: 10,000.
    pub test: Split,
}

/// Some photographs and their labels.
#[derive(Clone, Debug)]
pub struct Split {
    /// `uint8[n,32,32,3]`.
    pub images: Tensor,
    /// `uint8[n]`, 0 to 9.
    pub labels: Tensor,
}

/// The CIFAR-10 in this folder: every `data_batch_*.bin` there, in order, and `test_batch.bin`; gzipped or not.
pub fn from_dir(dir: impl AsRef<Path>) -> Result<Cifar10> {
    let dir = dir.as_ref();
    let name = dir.display().to_string();
    let entries = std::fs::read_dir(dir).map_err(|reason| super::io_error(&name, &reason))?;
    let mut batches = Vec::new();
    let mut test = None;
    for entry in entries {
        let path = entry.map_err(|reason| super::io_error(&name, &reason))?.path();
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default().to_owned();
        match file.strip_suffix(".gz").unwrap_or(&file) {
            "test_batch.bin" => test = Some(path),
            file if file.starts_with("data_batch_") && file.ends_with(".bin") => batches.push(path),
            _ => {}
        }
    }
    batches.sort();
    let missing = |what: &str| {
        Error::not_found(format!("{name}: there is no {what}; the folder should hold CIFAR-10's binary version"))
    };
    if batches.is_empty() {
        return Err(missing("data_batch_1.bin"));
    }
    Ok(Cifar10 { train: read(&batches)?, test: read(&[test.ok_or_else(|| missing("test_batch.bin"))?])? })
}

/// The photographs in some files, one after the other.
pub fn read(paths: &[impl AsRef<Path>]) -> Result<Split> {
    let (mut images, mut labels) = (Vec::new(), Vec::new());
    for path in paths {
        parse(&mut Input::open(path.as_ref())?, &mut images, &mut labels)?;
    }
    let n = labels.len();
    Ok(Split { images: Tensor::from_vec([n, SIDE, SIDE, 3], images)?, labels: Tensor::from_vec([n], labels)? })
}

fn parse(input: &mut Input, images: &mut Vec<u8>, labels: &mut Vec<u8>) -> Result<()> {
    let mut record = [0; RECORD];
    for number in 0u64.. {
        let start = input.at();
        match input.read_up_to(&mut record)? {
            0 => break,
            RECORD => {}
            n => {
                let expected = format!("record {number} of {RECORD} bytes");
                return Err(input.wrong_at(start, &expected, &format!("only {n}; is it CIFAR-10's binary version?")));
            }
        }
        let (label, pixels) = (record[0], &record[1..]);
        if usize::from(label) >= CLASSES.len() {
            let expected = format!("the label of record {number}, 0 to 9,");
            return Err(input.wrong_at(start, &expected, &label.to_string()));
        }
        labels.push(label);
        images.reserve(3 * PIXELS);
        for i in 0..PIXELS {
            images.extend([pixels[i], pixels[PIXELS + i], pixels[2 * PIXELS + i]]);
        }
    }
    Ok(())
}

impl Split {
    /// How many photographs there are.
    pub fn len(&self) -> usize {
        self.labels.n_elements()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Two columns: the photographs as `float[n,32,32,3]` from 0 to 1, and the labels as `int32[n]`.
    pub fn dataset(&self) -> Dataset {
        Dataset::new([self.images.clone(), self.labels.clone()]).scale(0, 1.0 / 255.0).cast(1, DType::I32)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A photograph whose red is 1, 2, …, whose green is 100 and whose blue is 200.
    fn record(label: u8) -> Vec<u8> {
        let red = (0..PIXELS).map(|i| (i + 1) as u8);
        let others = [100, 200].into_iter().flat_map(|shade| std::iter::repeat_n(shade, PIXELS));
        std::iter::once(label).chain(red).chain(others).collect()
    }

    #[test]
    fn planes_become_pixels() {
        let dir = std::env::temp_dir().join(format!("kolo-cifar-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(dir.join(name), bytes).unwrap();
        assert!(from_dir(&dir).unwrap_err().message().contains("there is no data_batch_1.bin"));
        write("data_batch_2.bin", &record(9));
        write("data_batch_1.bin", &[record(3), record(4)].concat());
        assert!(from_dir(&dir).unwrap_err().message().contains("there is no test_batch.bin"));
        write("test_batch.bin", &record(0));
        let cifar = from_dir(&dir).unwrap();
        assert_eq!(cifar.train.labels, Tensor::from([3u8, 4, 9]));
        assert_eq!(cifar.train.images.shape().dims(), [3, 32, 32, 3]);
        assert_eq!(cifar.test.images.data::<u8>().unwrap()[..6], [1, 100, 200, 2, 100, 200]);
        let batch = cifar.test.dataset().batches().unwrap().next().unwrap().unwrap();
        assert_eq!(batch.tensors[0].shape().dims(), [1, 32, 32, 3]);
        assert_eq!(CLASSES[usize::from(cifar.train.labels.data::<u8>().unwrap()[0])], "cat");
        write("test_batch.bin", &record(0)[..3000]);
        let error = from_dir(&dir).unwrap_err();
        assert!(error.message().contains("expected record 0 of 3073 bytes at byte 0, found only 3000"), "{error}");
        write("test_batch.bin", &[record(0), record(10)].concat());
        let error = from_dir(&dir).unwrap_err();
        assert!(error.message().contains("the label of record 1, 0 to 9, at byte 3073, found 10"), "{error}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
