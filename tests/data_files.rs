//! Files that NumPy and TensorFlow wrote (`tests/data/input/make_fixtures.py`) are read as they were meant.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use kolo::data::example::{self, Example, Feature};
use kolo::data::{npy, record};
use kolo::{DType, Tensor};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/input").join(name)
}

#[test]
fn arrays_of_numpy() {
    for name in ["arrays.npz", "arrays_compressed.npz"] {
        let arrays: HashMap<String, Tensor> = npy::read_npz(fixture(name)).unwrap().into_iter().collect();
        let check = |name: &str, expected: Tensor| assert_eq!(arrays[name], expected, "{name}");
        let half = half_pair(1.5, -2.0);
        check("f16", half);
        check("f32", Tensor::from([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]));
        check("f64", Tensor::from([std::f64::consts::PI, -0.0]));
        check("f32_big", Tensor::from([1.0f32, -2.5]));
        check("f32_fortran", Tensor::from([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]));
        check("i8", Tensor::from([-128i8, 127]));
        check("i16", Tensor::from([-32768i16, 32767]));
        check("i32", Tensor::from([-5i32, 7]));
        check("i64", Tensor::from([-(1i64 << 62), 1 << 62]));
        check("i64_big", Tensor::from([1i64, -2]));
        check("u8", Tensor::from([0u8, 255]));
        check("u16", Tensor::from([0u16, 65535]));
        check("u32", Tensor::from([0u32, u32::MAX]));
        check("u64", Tensor::from([0u64, u64::MAX]));
        check("bool", Tensor::from([true, false, true]));
        check("scalar", Tensor::scalar(42i32));
        check("empty", Tensor::zeros(DType::F32, [0, 3]).unwrap());
        check("cube_fortran", Tensor::from_vec([2, 3, 4], (0..24).collect::<Vec<i32>>()).unwrap());
        check("bytes", Tensor::from_strings([2], vec!["ab".into(), "c".into()]).unwrap());
        assert_eq!(arrays.len(), 19);
    }
    let fortran = npy::read(fixture("f32_fortran.npy")).unwrap();
    assert_eq!(fortran, Tensor::from([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]));
}

/// The bits of two halves, by way of their bytes.
fn half_pair(a: f32, b: f32) -> Tensor {
    let bits = |x: f32| match x {
        1.5 => 0x3e00u16,
        -2.0 => 0xc000,
        _ => panic!("not in the fixture"),
    };
    Tensor::from([bits(a), bits(b)]).bitcast(DType::F16).unwrap()
}

#[test]
fn examples_of_tensorflow() {
    for name in ["examples.tfrecord", "examples.tfrecord.gz"] {
        let records: Vec<Vec<u8>> = record::read(fixture(name)).unwrap().collect::<kolo::Result<_>>().unwrap();
        assert_eq!(records.len(), 3);
        let second = Example::decode(&records[1]).unwrap();
        assert_eq!(second.names().collect::<Vec<_>>(), ["extra", "label", "name", "pixels"]);
        assert_eq!(second.feature("extra"), Some(&Feature::Ints(vec![1, 2, 3])));
        assert_eq!(second.feature("name"), Some(&Feature::Bytes(vec![b"sample 1".to_vec()])));

        let data = example::dataset(&[fixture(name)], &[("pixels", &[2, 2]), ("label", &[])]).batch(2, false);
        let batches: Vec<_> = data.batches().unwrap().collect::<kolo::Result<_>>().unwrap();
        assert_eq!(batches.len(), 2);
        let pixels = Tensor::from_vec([2, 2, 2], vec![0.0f32, 1.0, -1.0, 2.0, 0.5, 1.0, -1.0, 2.0]).unwrap();
        assert_eq!(batches[0].tensors, [pixels, Tensor::from([-1i64, 0])]);
        assert_eq!(batches[1].tensors[1], Tensor::from([1i64]));
        assert!(batches[1].is_last_of_epoch);
    }
}

#[test]
fn examples_that_differ_are_named() {
    let path = fixture("examples.tfrecord");
    let data = example::dataset(&[path], &[("extra", &[3])]);
    let error = data.batches().unwrap().next().unwrap().unwrap_err();
    assert!(error.message().contains("examples.tfrecord: record 0: feature 'extra' is missing"), "{error}");
    let data = example::dataset(&[fixture("gone.tfrecord")], &[("extra", &[3])]);
    let error = data.batches().unwrap().next().unwrap().unwrap_err();
    assert_eq!(error.code(), kolo::Code::NotFound);
}

#[test]
fn a_file_cut_anywhere_is_an_error_and_never_a_panic() {
    let tfrecord = std::fs::read(fixture("examples.tfrecord")).unwrap();
    let mut n_whole = 0;
    for cut in 0..tfrecord.len() {
        let read = record::read_bytes("cut", tfrecord[..cut].to_vec()).unwrap();
        n_whole += usize::from(read.collect::<kolo::Result<Vec<_>>>().is_ok());
    }
    // Nothing, and two ends of records: all that a reader cannot tell from a whole file.
    assert_eq!(n_whole, 3);
    for name in ["examples.tfrecord.gz", "arrays.npz", "arrays_compressed.npz"] {
        let bytes = std::fs::read(fixture(name)).unwrap();
        for cut in 1..bytes.len() {
            let is_error = match name {
                "examples.tfrecord.gz" => match record::read_bytes("cut", bytes[..cut].to_vec()) {
                    Ok(mut records) => records.any(|record| record.is_err()),
                    Err(_) => true,
                },
                _ => npy::read_npz_bytes("cut", &bytes[..cut]).is_err(),
            };
            assert!(is_error, "{name} cut at {cut}");
        }
    }
}
