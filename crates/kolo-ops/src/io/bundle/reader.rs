//! Reads bundles: tensors and slices of tensors, each checked against its checksum.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::Charge;
use kolo_graph::wire::proto::{BundleEntryProto, BundleHeaderProto};
use prost::Message as _;

use super::checksum::Checksum;
use super::slice::{TensorSlice, for_each_run, intersection};
use super::table::{read_table, take_varint};
use super::writer::{Entries, add_length};
use super::{VERSION, data_path, index_path};
use crate::CancelToken;
use crate::io::FileAccess;
use crate::io::files::file_error;

/// What is read and summed at once.
const CHUNK_BYTES: usize = 1 << 20;
/// More data files than anyone has; a damaged header could say anything.
const MOST_SHARDS: i32 = 1 << 20;

/// A checkpoint that is open for reading.
pub struct Bundle {
    prefix: String,
    n_shards: usize,
    entries: Entries,
    files: HashMap<usize, OpenFile>,
    access: FileAccess,
    cancel: Option<Arc<CancelToken>>,
    /// Where tensors are read to.
    memory: Charge,
}

struct OpenFile {
    path: PathBuf,
    file: File,
    n_bytes: u64,
}

/// What a bundle's index says of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// The number of its element type, which may be one that Kolo does not know.
    pub dtype: i32,
    /// The shape of the whole.
    pub shape: Shape,
    /// Bytes in the data files.
    pub n_bytes: u64,
    /// The slices it is stored in; empty if it is stored whole.
    pub slices: Vec<TensorSlice>,
}

impl StoredTensor {
    /// Its element type; an error if Kolo does not know it.
    pub fn dtype(&self) -> Result<DType> {
        DType::from_number(self.dtype)
    }
}

/// A part of a tensor as it is stored: where in the whole it lies, and its entry.
struct Piece {
    bounds: Vec<(usize, usize)>,
    entry: BundleEntryProto,
}

fn read_all(access: &FileAccess, path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    access.open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

impl Bundle {
    /// Opens the checkpoint `prefix` and reads its index.
    pub fn open(prefix: &str) -> Result<Bundle> {
        Bundle::open_within(prefix, &FileAccess::everything())
    }

    /// As [`Bundle::open`], for one who may not touch all files.
    pub fn open_within(prefix: &str, access: &FileAccess) -> Result<Bundle> {
        let path = index_path(prefix);
        access.check(&path)?;
        let bytes = read_all(access, &path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::not_found(format!(
                "Unsuccessful TensorSliceReader constructor: Failed to find any matching files for {prefix}"
            )),
            _ => file_error("cannot read", &path, &error),
        })?;
        let damaged = |why: String| Error::data_loss(format!("the index file {} is damaged: {why}", path.display()));
        let mut header = None;
        let mut entries = Entries::new();
        read_table(&bytes, &path, |key, value| {
            let bad = |error: prost::DecodeError| {
                damaged(format!("the entry of '{}' cannot be read: {error}", String::from_utf8_lossy(key)))
            };
            if key.is_empty() {
                header = Some(BundleHeaderProto::decode(value).map_err(bad)?);
            } else {
                entries.insert(key.to_vec(), BundleEntryProto::decode(value).map_err(bad)?);
            }
            Ok(())
        })?;
        let header = header.ok_or_else(|| damaged("it has no header".into()))?;
        if header.endianness != 0 {
            return Err(Error::unimplemented(format!("{} was written on a big-endian machine", path.display())));
        }
        let oldest = header.version.map_or(0, |version| version.min_consumer);
        if oldest > VERSION {
            return Err(Error::unimplemented(format!(
                "{} needs a reader of version {oldest}; this is version {VERSION}",
                path.display()
            )));
        }
        if !(1..=MOST_SHARDS).contains(&header.num_shards) {
            return Err(damaged(format!("it says that there are {} data files", header.num_shards)));
        }
        let n_shards = header.num_shards as usize;
        let access = access.clone();
        Ok(Bundle {
            prefix: prefix.to_owned(),
            n_shards,
            entries,
            files: HashMap::new(),
            access,
            cancel: None,
            memory: Charge::NONE,
        })
    }

    /// Stops reading, with the token's reason, once it is cancelled.
    pub fn with_cancel(mut self, cancel: Arc<CancelToken>) -> Bundle {
        self.cancel = Some(cancel);
        self
    }

    /// Reads tensors into the memory that `memory` counts against.
    pub fn with_memory(mut self, memory: Charge) -> Bundle {
        self.memory = memory;
        self
    }

    /// The prefix it was opened under.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// How many data files it has.
    pub fn n_shards(&self) -> usize {
        self.n_shards
    }

    pub(super) fn into_entries(self) -> Entries {
        self.entries
    }

    /// The names of its tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        // Slices are kept under keys that begin with a zero byte; tensors' own names do not.
        self.entries.keys().filter(|key| key.first() != Some(&0)).filter_map(|key| std::str::from_utf8(key).ok())
    }

    /// What the index says of the tensor `name`.
    pub fn find(&self, name: &str) -> Result<StoredTensor> {
        let entry = self.entry(name)?;
        let shape = self.shape_of(name, entry)?;
        let slices = entry.slices.iter().map(TensorSlice::from_proto).collect::<Result<Vec<_>>>();
        let slices = slices.map_err(|error| error.context(format_args!("{}: tensor '{name}'", self.index_name())))?;
        let n_bytes = match slices.is_empty() {
            true => entry.size.max(0) as u64,
            false => {
                let pieces = slices.iter().filter_map(|slice| self.entries.get(&slice.key(name)));
                pieces.fold(0u64, |n, piece| n.saturating_add(piece.size.max(0) as u64))
            }
        };
        Ok(StoredTensor { name: name.to_owned(), dtype: entry.dtype, shape, n_bytes, slices })
    }

    /// The value of the tensor `name`.
    pub fn read(&mut self, name: &str) -> Result<Tensor> {
        let shape = self.find(name)?.shape;
        let all = TensorSlice::full(shape.rank());
        self.read_slice(name, &shape, &all)
    }

    /// A part of the tensor `name`, which is stored whole or in slices and must have this shape as a whole.
    pub fn read_slice(&mut self, name: &str, full: &Shape, slice: &TensorSlice) -> Result<Tensor> {
        let stored = self.find(name)?;
        if stored.shape != *full {
            return Err(Error::invalid_argument(format!(
                "tensor_name = {name}; shape in shape_and_slice spec {full} does not match the shape stored in \
                 checkpoint: {}",
                stored.shape
            )));
        }
        let wanted = slice.bounds(full)?;
        let pieces = self.pieces(&stored)?;
        if let Some(piece) = pieces.iter().find(|piece| piece.bounds == wanted) {
            let shape = slice.shape_in(full)?;
            return self.read_entry(name, &piece.entry, &shape);
        }
        self.assemble(&stored, slice.shape_in(full)?, &wanted, &pieces)
    }

    /// All tensors, by name.
    pub fn read_all(&mut self) -> Result<BTreeMap<String, Tensor>> {
        let names: Vec<String> = self.names().map(str::to_owned).collect();
        names.into_iter().map(|name| self.read(&name).map(|tensor| (name, tensor))).collect()
    }

    /// Reads every tensor; what is wrong with which.
    pub fn verify(&mut self) -> Vec<(String, Error)> {
        let names: Vec<String> = self.names().map(str::to_owned).collect();
        let mut wrong = Vec::new();
        for name in names {
            if let Err(error) = self.verify_tensor(&name) {
                wrong.push((name, error));
            }
        }
        wrong
    }

    /// Reads one tensor, piece by piece; an error if it is damaged.
    fn verify_tensor(&mut self, name: &str) -> Result<()> {
        let stored = self.find(name)?;
        for piece in self.pieces(&stored)? {
            let lengths: Vec<usize> = piece.bounds.iter().map(|(_, length)| *length).collect();
            if stored.dtype().is_ok_and(|dtype| dtype == DType::Str || dtype.size().is_some()) {
                self.read_entry(name, &piece.entry, &Shape::new(&lengths)?)?;
            } else {
                self.check_range(name, &piece.entry)?;
            }
        }
        Ok(())
    }

    /// An error if a data file is missing or too short for what the index says. Reads no data.
    pub fn check_files(&mut self) -> Result<()> {
        let names: Vec<String> = self.names().map(str::to_owned).collect();
        for name in names {
            let stored = self.find(&name)?;
            for piece in self.pieces(&stored)? {
                self.check_range(&name, &piece.entry)?;
            }
        }
        Ok(())
    }

    fn entry(&self, name: &str) -> Result<&BundleEntryProto> {
        let found = self.entries.get(name.as_bytes()).filter(|_| !name.starts_with('\0'));
        found.ok_or_else(|| Error::not_found(format!("Key {name} not found in checkpoint")))
    }

    fn index_name(&self) -> String {
        index_path(&self.prefix).display().to_string()
    }

    fn damaged(&self, name: &str, why: &str) -> Error {
        Error::data_loss(format!("the index file {} is damaged: tensor '{name}' {why}", self.index_name()))
    }

    fn shape_of(&self, name: &str, entry: &BundleEntryProto) -> Result<Shape> {
        let sizes: Vec<i64> = entry.shape.iter().flat_map(|shape| &shape.dim).map(|dim| dim.size).collect();
        Shape::from_signed(&sizes).map_err(|error| self.damaged(name, error.message()))
    }

    /// The parts that a tensor is stored in: one, if it is stored whole.
    fn pieces(&self, stored: &StoredTensor) -> Result<Vec<Piece>> {
        let name = &stored.name;
        if stored.slices.is_empty() {
            let bounds = stored.shape.iter().map(|&size| (0, size)).collect();
            return Ok(vec![Piece { bounds, entry: self.entry(name)?.clone() }]);
        }
        let mut seen = HashSet::new();
        let piece = |slice: &TensorSlice| {
            let bounds = slice.bounds(&stored.shape).map_err(|error| self.damaged(name, error.message()))?;
            let entry = self.entries.get(&slice.key(name));
            let entry = entry.ok_or_else(|| self.damaged(name, &format!("has no entry for its slice {slice}")))?;
            let lengths: Vec<usize> = bounds.iter().map(|(_, length)| *length).collect();
            if entry.dtype != stored.dtype || self.shape_of(name, entry)?.dims() != lengths {
                return Err(self.damaged(name, &format!("has a slice {slice} of another dtype or shape")));
            }
            if !seen.insert(bounds.clone()) {
                return Err(self.damaged(name, &format!("has the slice {slice} twice")));
            }
            Ok(Piece { bounds, entry: entry.clone() })
        };
        stored.slices.iter().map(piece).collect()
    }

    /// A box put together from the pieces that meet it.
    fn assemble(
        &mut self,
        stored: &StoredTensor,
        shape: Shape,
        wanted: &[(usize, usize)],
        pieces: &[Piece],
    ) -> Result<Tensor> {
        let name = &stored.name;
        let mut n_covered = 0usize;
        let mut n_bytes = 0u64;
        let mut meeting = Vec::new();
        for piece in pieces {
            if let Some(common) = intersection(&piece.bounds, wanted) {
                let volume: usize = common.iter().map(|(_, length)| length).product();
                n_covered = n_covered.saturating_add(volume);
                self.check_range(name, &piece.entry)?;
                n_bytes = n_bytes.saturating_add(piece.entry.size.max(0) as u64);
                meeting.push((piece, common));
            }
        }
        if n_covered != shape.n_elements() {
            return Err(Error::data_loss(format!(
                "{}: the slices of tensor '{name}' cover {n_covered} of the {} elements that are asked for",
                self.index_name(),
                shape.n_elements()
            )));
        }
        // Pieces do not overlap in the files; ones that do could make a small file ask for much memory.
        let n_stored = self.files.values().fold(0u64, |n, file| n.saturating_add(file.n_bytes));
        if n_bytes > n_stored {
            return Err(self.damaged(name, "has slices that share bytes"));
        }
        let dtype = stored.dtype()?;
        let mut strings = Vec::new();
        let mut whole = Tensor::zeros(DType::U8, [0])?;
        let element = match dtype.size() {
            Some(size) => {
                whole = self.memory.tensor(dtype, shape.clone())?;
                size
            }
            None => {
                strings = vec![Bytes::new(); shape.n_elements()];
                1
            }
        };
        for (piece, common) in meeting {
            let lengths: Vec<usize> = piece.bounds.iter().map(|(_, length)| *length).collect();
            let part = self.read_entry(name, &piece.entry, &Shape::new(&lengths)?)?;
            if dtype == DType::Str {
                let from = part.strings()?;
                for_each_run(&common, &piece.bounds, wanted, &mut |a, b, n| {
                    strings[b..b + n].clone_from_slice(&from[a..a + n]);
                });
                continue;
            }
            let (from, to) = (part.host_bytes()?, whole.host_bytes_mut()?);
            for_each_run(&common, &piece.bounds, wanted, &mut |a, b, n| {
                to[b * element..(b + n) * element].copy_from_slice(&from[a * element..(a + n) * element]);
            });
        }
        if dtype == DType::Str { Tensor::from_strings(shape, strings) } else { Ok(whole) }
    }

    /// An error unless the entry's bytes are in its data file, which is opened.
    fn check_range(&mut self, name: &str, entry: &BundleEntryProto) -> Result<()> {
        let range = || {
            let (start, n_bytes) = (u64::try_from(entry.offset).ok()?, u64::try_from(entry.size).ok()?);
            let shard = usize::try_from(entry.shard_id).ok().filter(|shard| *shard < self.n_shards)?;
            Some((shard, start.checked_add(n_bytes)?))
        };
        let (shard, end) = range().ok_or_else(|| self.damaged(name, "has an entry that makes no sense"))?;
        let file = self.open_file(shard, name)?;
        if end > file.n_bytes {
            return Err(Error::data_loss(format!(
                "{} is damaged: it has {} bytes, and tensor '{name}' ends at byte {end}",
                file.path.display(),
                file.n_bytes
            )));
        }
        Ok(())
    }

    fn open_file(&mut self, shard: usize, name: &str) -> Result<&mut OpenFile> {
        if !self.files.contains_key(&shard) {
            let path = data_path(&self.prefix, shard, self.n_shards);
            self.access.check(&path)?;
            let open = || {
                let file = self.access.open(&path)?;
                let n_bytes = file.metadata()?.len();
                Ok(OpenFile { path: path.clone(), file, n_bytes })
            };
            let opened = open().map_err(|error: std::io::Error| {
                file_error("cannot read", &path, &error).and(format_args!(" (needed for tensor '{name}')"))
            })?;
            self.files.insert(shard, opened);
        }
        self.files.get_mut(&shard).ok_or_else(|| Error::internal("a file that was just opened is gone"))
    }

    /// The bytes of an entry as a tensor of this shape.
    fn read_entry(&mut self, name: &str, entry: &BundleEntryProto, shape: &Shape) -> Result<Tensor> {
        let dtype = DType::from_number(entry.dtype)
            .map_err(|error| error.context(format_args!("tensor '{name}' of {}", self.index_name())))?;
        self.check_range(name, entry)?;
        let n_bytes = entry.size as usize;
        let expected = dtype.size().map(|size| shape.n_elements().checked_mul(size));
        if expected.is_some_and(|expected| expected != Some(n_bytes)) {
            return Err(self.damaged(name, &format!("is {dtype}{shape} and has {n_bytes} bytes")));
        }
        let (cancel, memory) = (self.cancel.clone(), self.memory.another(0)?);
        let file = self.open_file(entry.shard_id as usize, name)?;
        file.file
            .seek(SeekFrom::Start(entry.offset as u64))
            .map_err(|error| file_error("cannot read", &file.path, &error))?;
        let mut source = Source { file, name, cancel: cancel.as_deref(), checksum: Checksum::default() };
        match dtype {
            DType::Str => source.read_strings(n_bytes, shape, entry.crc32c),
            _ if dtype.size().is_some() => {
                let mut tensor = memory.tensor(dtype, shape.clone())?;
                let bytes = tensor.host_bytes_mut()?;
                source.fill(bytes)?;
                source.check(entry.crc32c)?;
                if dtype == DType::Bool && bytes.iter().any(|byte| *byte > 1) {
                    return Err(source.damaged("holds bytes that are neither true nor false"));
                }
                Ok(tensor)
            }
            _ => Err(Error::unimplemented(format!("tensor '{name}' is {dtype}, which cannot be restored"))),
        }
    }
}

/// One tensor's bytes in a data file.
struct Source<'a> {
    file: &'a mut OpenFile,
    name: &'a str,
    cancel: Option<&'a CancelToken>,
    checksum: Checksum,
}

impl Source<'_> {
    fn damaged(&self, why: &str) -> Error {
        Error::data_loss(format!("{} is damaged: tensor '{}' {why}", self.file.path.display(), self.name))
    }

    /// Fills `bytes` from the file and adds them to the checksum.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        for chunk in bytes.chunks_mut(CHUNK_BYTES) {
            self.fill_unsummed(chunk)?;
            self.checksum.add(chunk);
        }
        Ok(())
    }

    fn fill_unsummed(&mut self, bytes: &mut [u8]) -> Result<()> {
        if let Some(reason) = self.cancel.and_then(CancelToken::reason) {
            return Err(reason);
        }
        self.file.file.read_exact(bytes).map_err(|error| {
            file_error("cannot read", &self.file.path, &error).and(format_args!(" (tensor '{}')", self.name))
        })
    }

    fn check(&self, stored: u32) -> Result<()> {
        let found = self.checksum.masked();
        if found == stored {
            return Ok(());
        }
        Err(self.damaged(&format!("has the checksum {found:08x}, and {stored:08x} was stored with it")))
    }

    fn read_strings(&mut self, n_bytes: usize, shape: &Shape, stored: u32) -> Result<Tensor> {
        let n_strings = shape.n_elements();
        // A length takes at least one byte, so the count is no larger than the file.
        if n_strings.checked_add(4).is_none_or(|least| least > n_bytes) {
            return Err(self.damaged(&format!("has {n_bytes} bytes for {n_strings} strings")));
        }
        let mut bytes = vec![0u8; n_bytes];
        for chunk in bytes.chunks_mut(CHUNK_BYTES) {
            self.fill_unsummed(chunk)?;
        }
        let mut rest = &bytes[..];
        let mut lengths = Vec::with_capacity(n_strings);
        let mut n_contents = 0usize;
        for _ in 0..n_strings {
            let length = take_varint(&mut rest).ok_or_else(|| self.damaged("has lengths that cannot be read"))?;
            add_length(&mut self.checksum, length);
            let short = usize::try_from(length).ok().filter(|length| *length <= n_bytes);
            let length = short.ok_or_else(|| self.damaged("has a string that is longer than it"))?;
            n_contents = n_contents.saturating_add(length);
            lengths.push(length);
        }
        let lengths_checksum = self.checksum.masked().to_le_bytes();
        let Some((stored_lengths, contents)) = rest.split_at_checked(4) else {
            return Err(self.damaged("ends before its strings begin"));
        };
        if stored_lengths != lengths_checksum {
            return Err(self.damaged("has lengths with a wrong checksum"));
        }
        if contents.len() != n_contents {
            return Err(self.damaged(&format!("has {} bytes for strings of {n_contents}", contents.len())));
        }
        self.checksum.add(stored_lengths);
        self.checksum.add(contents);
        self.check(stored)?;
        let start = n_bytes - n_contents;
        let bytes = Bytes::from(bytes);
        let mut at = start;
        let strings = lengths.into_iter().map(|length| {
            at += length;
            bytes.slice(at - length..at)
        });
        Tensor::from_strings(shape.clone(), strings.collect())
    }
}

#[cfg(test)]
mod tests;
