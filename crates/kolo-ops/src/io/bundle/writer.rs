//! Writes a bundle: tensors straight from their buffers to one data file, then the index.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use bytes::Bytes;
use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_graph::wire::proto::{BundleEntryProto, Dim, TensorShapeProto};
use prost::Message as _;

use super::checksum::Checksum;
use super::slice::TensorSlice;
use super::table::{push_varint, write_table};
use super::{data_path, header, index_path};
use crate::CancelToken;
use crate::io::FileAccess;
use crate::io::files::{NewFile, PRIVATE, file_error, sync_directory_of};

/// What is summed and written at once: small enough to be still in the cache when it is written.
const CHUNK_BYTES: usize = 1 << 20;
/// Smaller pieces are gathered; larger ones go to the file from where they are.
const GATHER_BYTES: usize = 1 << 16;

/// One tensor to save.
#[derive(Clone, Debug)]
pub struct Item {
    /// Its name in the checkpoint.
    pub name: String,
    /// If it is a part of a larger tensor: the shape of that, and where the part lies.
    pub slice: Option<(Shape, TensorSlice)>,
    /// Its value.
    pub tensor: Tensor,
}

/// Writes `items` as the checkpoint `prefix`, in their order. Either both files are there in the end, or nothing has
/// changed: a bundle that was there before is replaced only when the new one is on the disk.
pub fn save(prefix: &str, items: &[Item], cancel: Option<&CancelToken>) -> Result<()> {
    save_within(prefix, items, cancel, &FileAccess::everything())
}

/// As [`save`], for one who may not touch all files.
pub fn save_within(prefix: &str, items: &[Item], cancel: Option<&CancelToken>, access: &FileAccess) -> Result<()> {
    let mut data = NewFile::create_within(access, &data_path(prefix, 0, 1), PRIVATE)?;
    let path = data.target().to_owned();
    let mut writer = DataWriter::new(data.file(), &path, total_bytes(items)?, cancel);
    let entries = write_items(&mut writer, items)?;
    writer.flush()?;
    let header = header(1);
    let encoded: Vec<(&[u8], Vec<u8>)> = entries.iter().map(|(key, entry)| (&**key, entry.encode_to_vec())).collect();
    let table = std::iter::once((&b""[..], &*header)).chain(encoded.iter().map(|(key, value)| (*key, &**value)));
    let table = write_table(table);
    let mut index = NewFile::create_within(access, &index_path(prefix), PRIVATE)?;
    let path = index.target().to_owned();
    let mut writer = DataWriter::new(index.file(), &path, table.len() as u64, cancel);
    writer.write(&table)?;
    writer.flush()?;
    data.sync()?;
    index.sync()?;
    data.publish()?;
    index.publish()?;
    sync_directory_of(&index_path(prefix));
    Ok(())
}

/// Entries by key, as an index holds them.
pub(super) type Entries = BTreeMap<Vec<u8>, BundleEntryProto>;

fn write_items(writer: &mut DataWriter<'_>, items: &[Item]) -> Result<Entries> {
    let mut entries = Entries::new();
    for item in items {
        let Item { name, slice, tensor } = item;
        if name.is_empty() {
            return Err(Error::invalid_argument("a tensor to save has an empty name"));
        }
        let key = match slice {
            None => name.clone().into_bytes(),
            Some((full, slice)) => {
                let expected = slice.shape_in(full)?;
                if expected != *tensor.shape() {
                    return Err(Error::invalid_argument(format!(
                        "Slice in shape_and_slice specification does not match the shape of the tensor to save: \
                         '{name}' has shape {}, the slice {slice} of {full} has {expected}",
                        tensor.shape()
                    )));
                }
                add_slice(&mut entries, name, tensor.dtype(), full, slice)?;
                slice.key(name)
            }
        };
        if entries.contains_key(&key) {
            return Err(Error::invalid_argument(format!("Adding duplicate key: {name}")));
        }
        let offset = writer.n_written;
        let checksum = writer.write_tensor(tensor).map_err(|error| error.and(format_args!(" (tensor '{name}')")))?;
        let entry = BundleEntryProto {
            dtype: tensor.dtype() as i32,
            shape: Some(shape_proto(tensor.shape())),
            shard_id: 0,
            offset: offset as i64,
            size: (writer.n_written - offset) as i64,
            crc32c: checksum.masked(),
            slices: Vec::new(),
        };
        entries.insert(key, entry);
    }
    Ok(entries)
}

/// Notes a slice in the entry of the whole, which is made by the first one.
fn add_slice(entries: &mut Entries, name: &str, dtype: DType, full: &Shape, slice: &TensorSlice) -> Result<()> {
    let whole = entries.entry(name.as_bytes().to_vec()).or_insert_with(|| BundleEntryProto {
        dtype: dtype as i32,
        shape: Some(shape_proto(full)),
        ..BundleEntryProto::default()
    });
    if whole.size != 0 || (whole.slices.is_empty() && whole.crc32c != 0) {
        return Err(Error::invalid_argument(format!("Adding duplicate key: {name}")));
    }
    if whole.dtype != dtype as i32 || whole.shape.as_ref() != Some(&shape_proto(full)) {
        return Err(Error::invalid_argument(format!(
            "the slices of '{name}' disagree on its dtype or shape: one says {dtype}{full}"
        )));
    }
    whole.slices.push(slice.to_proto());
    Ok(())
}

pub(super) fn shape_proto(shape: &Shape) -> TensorShapeProto {
    let dim = |&size: &usize| Dim { size: size as i64, name: String::new() };
    TensorShapeProto { dim: shape.iter().map(dim).collect(), unknown_rank: false }
}

fn total_bytes(items: &[Item]) -> Result<u64> {
    items
        .iter()
        .map(|item| match item.tensor.dtype() {
            DType::Str => Ok(encode_lengths(item.tensor.strings()?).0.len() as u64 + item.tensor.n_bytes() as u64),
            dtype if dtype.size().is_some() => Ok(item.tensor.n_bytes() as u64),
            dtype => Err(Error::unimplemented(format!("'{}' is {dtype}, which cannot be saved", item.name))),
        })
        .sum()
}

/// The head of a string tensor: the lengths, and their checksum. The second value is the checksum of the tensor so far,
/// for which lengths count as four bytes (eight if they need them).
fn encode_lengths(strings: &[Bytes]) -> (Vec<u8>, Checksum) {
    let mut head = Vec::new();
    let mut checksum = Checksum::default();
    for string in strings {
        push_varint(&mut head, string.len() as u64);
        add_length(&mut checksum, string.len() as u64);
    }
    let stored = checksum.masked().to_le_bytes();
    head.extend_from_slice(&stored);
    checksum.add(&stored);
    (head, checksum)
}

pub(super) fn add_length(checksum: &mut Checksum, length: u64) {
    match u32::try_from(length) {
        Ok(short) => checksum.add(&short.to_le_bytes()),
        Err(_) => checksum.add(&length.to_le_bytes()),
    }
}

/// Writes bytes to a file and says, when that fails, how many are missing.
struct DataWriter<'a> {
    out: &'a mut dyn Write,
    path: &'a Path,
    /// Small pieces that wait for company.
    gathered: Vec<u8>,
    /// Those included.
    n_written: u64,
    n_total: u64,
    cancel: Option<&'a CancelToken>,
}

impl<'a> DataWriter<'a> {
    fn new(out: &'a mut dyn Write, path: &'a Path, n_total: u64, cancel: Option<&'a CancelToken>) -> DataWriter<'a> {
        DataWriter { out, path, gathered: Vec::new(), n_written: 0, n_total, cancel }
    }

    fn write_tensor(&mut self, tensor: &Tensor) -> Result<Checksum> {
        if tensor.dtype() == DType::Str {
            let strings = tensor.strings()?;
            let (head, mut checksum) = encode_lengths(strings);
            self.write(&head)?;
            for string in strings {
                checksum.add(string);
                self.write(string)?;
            }
            return Ok(checksum);
        }
        let mut checksum = Checksum::default();
        for chunk in tensor.host_bytes()?.chunks(CHUNK_BYTES) {
            checksum.add(chunk);
            self.write(chunk)?;
        }
        Ok(checksum)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.n_written += bytes.len() as u64;
        if self.gathered.len() + bytes.len() <= GATHER_BYTES {
            self.gathered.extend_from_slice(bytes);
            return Ok(());
        }
        self.flush()?;
        match bytes.len() <= GATHER_BYTES {
            true => self.gathered.extend_from_slice(bytes),
            false => self.write_now(bytes)?,
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let mut gathered = std::mem::take(&mut self.gathered);
        self.write_now(&gathered)?;
        gathered.clear();
        self.gathered = gathered;
        Ok(())
    }

    /// Writes the last of what [`DataWriter::n_written`] counts.
    fn write_now(&mut self, bytes: &[u8]) -> Result<()> {
        if let Some(reason) = self.cancel.and_then(CancelToken::reason) {
            return Err(reason);
        }
        self.out.write_all(bytes).map_err(|error| {
            let on_disk = self.n_written.saturating_sub(bytes.len() as u64);
            file_error("cannot write", self.path, &error).and(format_args!(
                "; {} of {} bytes are missing. What was there before is untouched",
                self.n_total.saturating_sub(on_disk),
                self.n_total
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use kolo_core::Code;

    use super::*;
    use crate::io::files::TestDir;

    fn item(name: &str, tensor: impl Into<Tensor>) -> Item {
        Item { name: name.to_owned(), slice: None, tensor: tensor.into() }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn the_bytes_are_tensorflow_s() {
        // What TensorFlow 2.21's Saver wrote for these variables.
        const INDEX: &str = "00000608011a020801000d1500706172740001010280838084080112081202080312020804200c283035f03bf517\
            09041583828084080112081202080212020804203c282035faffd70f00010b6108031200280435a78d9d88000b0d676c6f62616c5f73\
            74657008091200200428083529039807000422706172740801120812020805120208043a080a0210030a0210043a0a0a04080310020a\
            021004000111730807120412020802205c2808359188b04d0002157a620801120812020802120208032064281835c0db3d1700000000\
            010000000064c964e0000000000100000000c0f2a1b00001037b00d4010000000001000000001cc851f6d90108e6010f000000000000\
            0000000000000000000000000000000000000000000000000000000057fb808b247547db";
        let part = |offset: usize, rows: usize| Item {
            name: "part".into(),
            slice: Some(([5, 4].into(), TensorSlice::at(&[offset, 0], &[rows, 4]))),
            tensor: Tensor::zeros(DType::F32, [rows, 4]).unwrap(),
        };
        let strings = Tensor::from_strings([2], vec![Bytes::from_static(b"ab"), Bytes::new()]).unwrap();
        let zb = Tensor::from([[0.0f32, 1.0, 2.0], [3.0, 4.0, 5.0]]);
        let items =
            [item("a", 7i32), item("global_step", 0i64), part(0, 3), part(3, 2), item("s", strings), item("zb", zb)];
        let dir = TestDir::new("writer");
        save(&dir.text("m-4"), &items, None).unwrap();
        assert_eq!(hex(&std::fs::read(dir.join("m-4.index")).unwrap()), INDEX);
        let data = std::fs::read(dir.join("m-4.data-00000-of-00001")).unwrap();
        let expected = "07000000".to_owned()
            + &"00".repeat(8 + 80)
            + "020078270b3461620000000000"
            + "00803f0000004000004040000080400000a040";
        assert_eq!(hex(&data), expected);
        assert_eq!(dir.names(), ["m-4.data-00000-of-00001", "m-4.index"]);
    }

    #[test]
    fn wrong_items_are_refused_and_leave_nothing_behind() {
        let dir = TestDir::new("wrong");
        let fails = |items: &[Item], text: &str| {
            let error = save(&dir.text("m"), items, None).unwrap_err();
            assert!(error.message().contains(text), "{error}");
            assert_eq!(dir.names(), [] as [&str; 0]);
        };
        fails(&[item("a", 1i32), item("a", 2i32)], "Adding duplicate key: a");
        fails(&[item("", 1i32)], "empty name");
        let slice = |full: [usize; 1], offset: usize, tensor: Tensor| Item {
            name: "a".into(),
            slice: Some((full.into(), TensorSlice::at(&[offset], tensor.shape().dims()))),
            tensor,
        };
        fails(&[item("a", 1i32), slice([4], 0, Tensor::from([1i32, 2]))], "Adding duplicate key: a");
        let (first, again) = (slice([4], 0, Tensor::from([1i32, 2])), slice([4], 0, Tensor::from([1i32, 2])));
        fails(&[first.clone(), again], "Adding duplicate key: a");
        fails(&[first.clone(), slice([5], 2, Tensor::from([1i32, 2]))], "disagree");
        fails(&[slice([3], 2, Tensor::from([1i32, 2]))], "out of bounds");
        let mut wrong = first;
        wrong.tensor = Tensor::from([1i32, 2, 3]);
        fails(&[wrong], "does not match the shape of the tensor to save");
    }

    #[test]
    fn a_cancelled_save_leaves_the_old_one() {
        let dir = TestDir::new("cancelled");
        save(&dir.text("m"), &[item("a", 1i32)], None).unwrap();
        let before = std::fs::read(dir.join("m.index")).unwrap();
        let cancel = CancelToken::new();
        cancel.cancel(Error::cancelled("enough"));
        let error = save(&dir.text("m"), &[item("a", vec![1.0f32; 100_000])], Some(&cancel)).unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::Cancelled, "enough (tensor 'a')"));
        assert_eq!(std::fs::read(dir.join("m.index")).unwrap(), before);
        assert_eq!(dir.names(), ["m.data-00000-of-00001", "m.index"]);
    }

    /// A disk with room for so many bytes.
    struct SmallDisk(usize);

    impl Write for SmallDisk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let n = bytes.len().min(self.0);
            self.0 -= n;
            if n == 0 && !bytes.is_empty() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(n) }
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_is_named_with_what_is_missing() {
        let items = [item("a", vec![1.0f32; 500_000]), item("b", vec![2.0f32; 500_000])];
        let mut disk = SmallDisk(2_500_000);
        let mut writer = DataWriter::new(&mut disk, Path::new("/x/m.data"), total_bytes(&items).unwrap(), None);
        let error = write_items(&mut writer, &items).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        let text = error.message();
        assert!(text.starts_with("cannot write /x/m.data: "), "{text}");
        // Chunks are a mebibyte; the first 2,000,000 bytes fitted, the next chunk did not.
        assert!(text.contains("; 2000000 of 4000000 bytes are missing"), "{text}");
        assert!(text.ends_with("(tensor 'b')"), "{text}");
    }
}
