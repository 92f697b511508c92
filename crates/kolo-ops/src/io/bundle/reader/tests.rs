//! Tensors of all kinds come back, slices of them too, and no bytes make the reader panic.

use half::{bf16, f16};
use kolo_core::Code;

use super::*;
use crate::io::bundle::{Item, save};
use crate::io::files::TestDir;

fn item(name: &str, tensor: impl Into<Tensor>) -> Item {
    Item { name: name.to_owned(), slice: None, tensor: tensor.into() }
}

fn strings(values: &[&'static [u8]]) -> Tensor {
    Tensor::from_strings([values.len()], values.iter().map(|value| Bytes::from_static(value)).collect()).unwrap()
}

fn samples() -> Vec<Item> {
    vec![
        item("bf16", Tensor::vector([bf16::from_f32(1.5), bf16::from_f32(-2.0)])),
        item("bool", [true, false, true]),
        item("empty", Tensor::zeros(DType::F32, [3, 0]).unwrap()),
        item("f16", Tensor::vector([f16::from_f32(0.25)])),
        item("f32", vec![0.5f32; 300_000]),
        item("f64", [1.0f64, f64::NAN.copysign(1.0)]),
        item("i16", [-1i16, 2]),
        item("i64", i64::MIN),
        item("i8", [[1i8, 2], [3, 4]]),
        item("no strings", strings(&[])),
        item("string", Tensor::string("scalar")),
        item("strings", strings(&[b"", b"a\0b", &[0xff; 200]])),
        item("u32", [u32::MAX]),
        item("u64", [u64::MAX]),
        item("z", 7i32),
    ]
}

fn same(a: &Tensor, b: &Tensor) -> bool {
    match a.dtype() {
        DType::Str => a == b,
        _ => (a.dtype(), a.shape(), a.host_bytes()) == (b.dtype(), b.shape(), b.host_bytes()),
    }
}

#[test]
fn all_kinds_of_tensors_come_back() {
    let dir = TestDir::new("reader");
    let items = samples();
    save(&dir.text("m"), &items, None).unwrap();
    let mut bundle = Bundle::open(&dir.text("m")).unwrap();
    assert_eq!(bundle.names().collect::<Vec<_>>(), items.iter().map(|item| &*item.name).collect::<Vec<_>>());
    for item in &items {
        assert!(same(&bundle.read(&item.name).unwrap(), &item.tensor), "{}", item.name);
    }
    bundle.check_files().unwrap();
    assert_eq!(bundle.verify(), []);
    let stored = bundle.find("f32").unwrap();
    assert_eq!((stored.dtype(), stored.shape.dims(), stored.n_bytes), (Ok(DType::F32), &[300_000][..], 1_200_000));
}

#[test]
fn what_is_not_there_is_named() {
    let dir = TestDir::new("missing");
    let error = Bundle::open(&dir.text("m")).err().unwrap();
    assert_eq!(error.code(), Code::NotFound);
    let text = format!("Failed to find any matching files for {}", dir.text("m"));
    assert!(error.message().ends_with(&text), "{error}");
    save(&dir.text("m"), &[item("a", 1i32)], None).unwrap();
    let mut bundle = Bundle::open(&dir.text("m")).unwrap();
    assert_eq!(bundle.read("b").unwrap_err().message(), "Key b not found in checkpoint");
    std::fs::remove_file(dir.join("m.data-00000-of-00001")).unwrap();
    let error = bundle.read("a").unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.message().contains("m.data-00000-of-00001") && error.message().contains("'a'"), "{error}");
}

#[test]
fn slices_are_read_from_slices_and_wholes() {
    let dir = TestDir::new("slices");
    // A 4x3 tensor 0..12, stored as rows 0..1, rows 1..4 column 0, rows 1..4 columns 1..3.
    let part = |offset: [usize; 2], shape: [usize; 2], values: Vec<i32>| Item {
        name: "p".into(),
        slice: Some(([4, 3].into(), TensorSlice::at(&offset, &shape))),
        tensor: Tensor::from_vec(shape, values).unwrap(),
    };
    let whole: Vec<i32> = (0..12).collect();
    let text = |i: &i32| Bytes::from(i.to_string());
    let texts = Tensor::from_strings([4, 3], whole.iter().map(text).collect()).unwrap();
    let items = [
        part([0, 0], [1, 3], vec![0, 1, 2]),
        part([1, 0], [3, 1], vec![3, 6, 9]),
        part([1, 1], [3, 2], vec![4, 5, 7, 8, 10, 11]),
        item("w", Tensor::from_vec([4, 3], whole.clone()).unwrap()),
        item("s", texts),
    ];
    save(&dir.text("m"), &items, None).unwrap();
    let mut bundle = Bundle::open(&dir.text("m")).unwrap();
    let full = Shape::from([4, 3]);
    let middle = TensorSlice::at(&[1, 1], &[2, 2]);
    for name in ["p", "w"] {
        assert_eq!(bundle.read(name).unwrap(), Tensor::from_vec([4, 3], whole.clone()).unwrap());
        let found = bundle.read_slice(name, &full, &middle).unwrap();
        assert_eq!(found, Tensor::from_vec([2, 2], vec![4i32, 5, 7, 8]).unwrap());
    }
    let found = bundle.read_slice("s", &full, &middle).unwrap();
    assert_eq!(found, Tensor::from_strings([2, 2], [4, 5, 7, 8].iter().map(text).collect()).unwrap());
    let stored = bundle.find("p").unwrap();
    assert_eq!((stored.slices.len(), stored.n_bytes), (3, 48));
    assert!(bundle.verify().is_empty());
    let error = bundle.read_slice("w", &[4, 4].into(), &TensorSlice::full(2)).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("[4,4] does not match the shape stored in checkpoint: [4,3]"), "{error}");

    // Without one of the slices the whole cannot be read, the others can.
    save(&dir.text("m"), &items[1..], None).unwrap();
    let mut bundle = Bundle::open(&dir.text("m")).unwrap();
    let error = bundle.read("p").unwrap_err();
    assert_eq!(error.code(), Code::DataLoss);
    assert!(error.message().contains("cover 9 of the 12 elements"), "{error}");
    assert!(bundle.read_slice("p", &full, &middle).is_ok());
}

#[test]
fn every_changed_byte_of_the_data_is_noticed_in_its_tensor() {
    let dir = TestDir::new("changed");
    let items = [item("a", [1i32, 2, 3]), item("b", [true, false]), item("s", strings(&[b"ab", b"", b"xyz"]))];
    save(&dir.text("m"), &items, None).unwrap();
    let path = dir.join("m.data-00000-of-00001");
    let bytes = std::fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x10;
        std::fs::write(&path, changed).unwrap();
        let wrong = Bundle::open(&dir.text("m")).unwrap().verify();
        let expected = if at < 12 {
            "a"
        } else if at < 14 {
            "b"
        } else {
            "s"
        };
        assert_eq!(wrong.len(), 1, "byte {at}");
        assert_eq!((wrong[0].0.as_str(), wrong[0].1.code()), (expected, Code::DataLoss), "byte {at}");
        assert!(wrong[0].1.message().contains("m.data-00000-of-00001"), "{}", wrong[0].1);
        std::fs::write(&path, &bytes[..at]).unwrap();
        let mut cut = Bundle::open(&dir.text("m")).unwrap();
        assert_eq!(cut.check_files().unwrap_err().code(), Code::DataLoss, "cut to {at}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 300, ..Default::default() })]

    /// The checksums of an index would stop most changes, so entries are changed before they are put into a table.
    #[test]
    fn any_entry_is_read_or_refused(
        key in proptest::sample::select(vec![&b"a"[..], b"p", b"\x00p\x00\x01\x01\x01\x80\x82"]),
        at in 0usize..64,
        byte: u8,
        n_dims in 0usize..4,
        size in proptest::num::i64::ANY,
    ) {
        let dir = TestDir::new("fuzz");
        let half = |offset: usize| Item {
            name: "p".into(),
            slice: Some(([4].into(), TensorSlice::at(&[offset], &[2]))),
            tensor: Tensor::from([1i32, 2]),
        };
        save(&dir.text("m"), &[item("a", strings(&[b"x", b"yz"])), half(0), half(2)], None).unwrap();
        let mut entries: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        let bytes = std::fs::read(dir.join("m.index")).unwrap();
        read_table(&bytes, &dir.join("m.index"), |key, value| {
            entries.insert(key.to_vec(), value.to_vec());
            Ok(())
        })
        .unwrap();
        let value = entries.get_mut(key).unwrap();
        let n = value.len();
        value[at % n] = byte;
        if n_dims > 0 && let Ok(mut entry) = BundleEntryProto::decode(&value[..]) {
            let dim = kolo_graph::wire::proto::Dim { size, name: String::new() };
            entry.shape.get_or_insert_default().dim = vec![dim; n_dims];
            entry.size ^= size;
            *value = entry.encode_to_vec();
        }
        let table = super::super::table::write_table(entries.iter().map(|(key, value)| (&**key, &**value)));
        std::fs::write(dir.join("m.index"), table).unwrap();
        if let Ok(mut bundle) = Bundle::open(&dir.text("m")) {
            let _ = bundle.verify();
            let _ = bundle.read_all();
            let _ = bundle.check_files();
        }
    }

    #[test]
    fn any_index_and_data_are_read_or_refused(changes in proptest::collection::vec((0usize..400, proptest::num::u8::ANY), 1..4)) {
        let dir = TestDir::new("fuzz-files");
        save(&dir.text("m"), &samples()[..4], None).unwrap();
        for name in ["m.index", "m.data-00000-of-00001"] {
            let mut bytes = std::fs::read(dir.join(name)).unwrap();
            for &(at, byte) in &changes {
                let n = bytes.len();
                bytes[at % n] = byte;
            }
            std::fs::write(dir.join(name), bytes).unwrap();
        }
        if let Ok(mut bundle) = Bundle::open(&dir.text("m")) {
            let _ = bundle.read_all();
        }
    }
}
