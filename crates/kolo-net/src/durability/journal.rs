//! A write-ahead log of a task's variables, so that a task that was killed restarts with all acknowledged updates.
//!
//! Before a task responds that it has run its part of a step, the variables that the part may have written are appended
//! to a file, in one record. A task that starts replays its file up to the first incomplete record, which was never
//! acknowledged. `docs/design/durability.md` explains why this is enough.
//!
//! ```text
//!   KOLOJRN1                                  the file's first bytes
//!   length u64 | crc32c u32 | Record          any number of times; the first is a snapshot of all variables
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kolo_core::{Code, DType, Dim, Error, PartialShape, Result};
use kolo_graph::{NodeId, Nodes, is_variable};
use kolo_ops::{ResourceStore, VariableCell};
use kolo_runtime::Host;
use parking_lot::Mutex;
use prost::Message as _;

use crate::task::peers::TaskName;
use crate::wire::proto::VariableEntry;
use crate::wire::tensor_wire::WireTensor;

const MAGIC: &[u8; 8] = b"KOLOJRN1";

/// A file is compacted when it exceeds both this multiple of its first record and this many bytes.
const GROWTH: u64 = 4;
const MIN_COMPACTED_BYTES: u64 = 64 << 20;

/// What survives the end of a task.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Only checkpoints.
    #[default]
    Checkpoints,
    /// Every acknowledged step, in a log.
    Logged {
        /// The directory of the log, for this task alone.
        dir: PathBuf,
        /// Whether a step also survives a crash of the machine, at the price of waiting for its disk.
        sync: bool,
    },
    /// Every acknowledged step, in the memory of another task.
    Replicated {
        /// The other task; `None` is the next of the same job, or the first of another job.
        to: Option<TaskName>,
    },
}

/// A variable: container and name.
pub(crate) type Key = (String, String);

#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(message, repeated, tag = "1")]
    entry: Vec<VariableEntry>,
}

/// The journal of one task.
pub(crate) struct Journal {
    dir: PathBuf,
    sync: bool,
    stores: Vec<Arc<ResourceStore>>,
    state: Mutex<JournalState>,
    /// Locked as long as the journal is in use.
    _lock: File,
}

struct JournalState {
    /// All variables that the file has a value for.
    known: BTreeSet<(usize, Key)>,
    file: File,
    number: u64,
    /// Where the last complete record ends.
    end: u64,
    /// Where the first record ends.
    first_end: u64,
    /// A write failed and could not be truncated: a new file must be written.
    is_broken: bool,
}

impl Journal {
    /// Opens the journal in `dir`, and restores the host's variables from it.
    pub fn open(dir: &Path, sync: bool, host: &Host) -> Result<Journal> {
        let cannot = |what: &str, error: std::io::Error| {
            Error::failed_precondition(format!("the journal '{}' {what}: {error}", dir.display()))
        };
        fs::create_dir_all(dir).map_err(|error| cannot("cannot be made", error))?;
        let lock = File::create(dir.join("lock")).map_err(|error| cannot("cannot be locked", error))?;
        lock.try_lock().map_err(|error| {
            Error::failed_precondition(format!("the journal '{}' is in use by another task: {error}", dir.display()))
        })?;
        let stores = host.resources();
        let numbers = numbers(dir).map_err(|error| cannot("cannot be listed", error))?;
        // The newest file that begins with a complete record: a newer one was never finished.
        let mut found = None;
        for &number in numbers.iter().rev() {
            if let Some(entries) = read(&path(dir, number)).map_err(|error| error.context("a journal"))? {
                found = Some(entries);
                break;
            }
        }
        let mut known = BTreeSet::new();
        for ((device, key), entry) in found.unwrap_or_default() {
            let Some(store) = stores.get(device) else {
                return Err(Error::failed_precondition(format!(
                    "the journal '{}' is of a task with more devices: it has variables of device {device}",
                    dir.display()
                )));
            };
            restore(store, &key, entry)?;
            known.insert((device, key));
        }
        if !known.is_empty() {
            tracing::warn!("restored {} variables from '{}'", known.len(), dir.display());
        }
        let number = numbers.last().map_or(1, |last| last + 1);
        let (file, end) =
            write_all(dir, number, &stores, &known).map_err(|error| cannot("cannot be written", error))?;
        remove_older(dir, number);
        let state = JournalState { known, file, number, end, first_end: end, is_broken: false };
        Ok(Journal { dir: dir.to_owned(), sync, stores, state: Mutex::new(state), _lock: lock })
    }

    /// Appends the current values of these variables. When this returns, they are durable.
    pub fn commit(&self, keys: &BTreeSet<Key>) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        let mut state = self.state.lock();
        let entries = changes(&self.stores, keys, &mut state.known)?;
        self.append(&mut state, entries)
    }

    /// Appends the removal of all variables that the stores no longer have.
    pub fn commit_removals(&self) -> Result<()> {
        let keys: BTreeSet<Key> = self.state.lock().known.iter().map(|(_, key)| key.clone()).collect();
        self.commit(&keys)
    }

    fn append(&self, state: &mut JournalState, entries: Vec<VariableEntry>) -> Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        let failed = |error: std::io::Error| {
            Error::new(
                Code::ResourceExhausted,
                format!("the step could not be logged in '{}', so it is not acknowledged: {error}", self.dir.display()),
            )
        };
        let grown = state.end > MIN_COMPACTED_BYTES.max(state.first_end.saturating_mul(GROWTH));
        if grown || state.is_broken {
            let number = state.number + 1;
            let (file, end) = write_all(&self.dir, number, &self.stores, &state.known).map_err(failed)?;
            (state.file, state.end, state.first_end, state.number) = (file, end, end, number);
            state.is_broken = false;
            remove_older(&self.dir, number);
            return Ok(());
        }
        let bytes = framed(entries);
        let written =
            state.file.write_all(&bytes).and_then(|()| if self.sync { state.file.sync_data() } else { Ok(()) });
        match written {
            Ok(()) => {
                state.end += bytes.len() as u64;
                Ok(())
            }
            Err(error) => {
                // A partial record would hide all records after it.
                let end = state.end;
                let truncated = state.file.set_len(end).and_then(|()| state.file.seek(SeekFrom::Start(end)));
                state.is_broken = truncated.is_err();
                Err(failed(error))
            }
        }
    }
}

/// The variables that nodes may write: all variables that are passed to an op, unless the op is known not to write any.
pub(crate) fn written(nodes: &Nodes) -> BTreeSet<Key> {
    let variable = |id: NodeId| -> Option<Key> {
        let node = nodes.node(id);
        if !is_variable(node) {
            return None;
        }
        let name = node.attrs.str("shared_name").ok().filter(|name| !name.is_empty()).unwrap_or(&node.name);
        Some((node.attrs.str("container").unwrap_or_default().to_owned(), name.to_owned()))
    };
    let mut keys = BTreeSet::new();
    for (_, node) in nodes.iter().filter(|(_, node)| !node.def.effects.leaves_variables()) {
        for (i, input) in node.inputs.iter().enumerate() {
            if input.feed().is_some() {
                continue;
            }
            // The output of a reference variable is copied, unless the input takes it by reference.
            let by_handle = nodes.output(*input).dtype == DType::Resource || node.ref_inputs.get(i) == Some(&true);
            if by_handle {
                keys.extend(variable(input.node));
            }
        }
    }
    keys
}

/// The current values of these variables on each device, for a record; updates `known`, the set of variables with a
/// value. The caller keeps `known` locked until the record is written, so that records are in the order of their
/// values.
pub(crate) fn changes(
    stores: &[Arc<ResourceStore>],
    keys: &BTreeSet<Key>,
    known: &mut BTreeSet<(usize, Key)>,
) -> Result<Vec<VariableEntry>> {
    let mut entries = Vec::new();
    for (device, store) in stores.iter().enumerate() {
        for key in keys {
            // One variable has one key, however a graph spells its container.
            let place = (device, (store.container(&key.0).to_owned(), key.1.clone()));
            match entry(store, &place)? {
                Some(entry) => {
                    known.insert(place);
                    entries.push(entry);
                }
                None if known.remove(&place) => entries.push(gone(&place)),
                None => {}
            }
        }
    }
    Ok(entries)
}

/// A variable's current value; `None` if it has none.
pub(crate) fn entry(store: &ResourceStore, place: &(usize, Key)) -> Result<Option<VariableEntry>> {
    let (device, (container, name)) = place;
    // A resource of another type with that name is not logged.
    let Ok(Some(cell)) = store.lookup::<VariableCell>(container, name) else { return Ok(None) };
    let Some(value) = cell.read() else { return Ok(None) };
    let dims = cell.shape().dims().map(|dims| {
        dims.iter().map(|dim| dim.and_then(|dim| i64::try_from(dim).ok()).unwrap_or(-1)).collect::<Vec<_>>()
    });
    let has_rank = dims.is_some();
    let value = Some(WireTensor::new(value)?);
    let dims = dims.unwrap_or_default();
    Ok(Some(VariableEntry {
        value,
        dims,
        has_rank,
        device: *device as u32,
        container: container.clone(),
        name: name.clone(),
    }))
}

/// The removal of a variable.
fn gone((device, (container, name)): &(usize, Key)) -> VariableEntry {
    VariableEntry {
        device: *device as u32,
        container: container.clone(),
        name: name.clone(),
        ..VariableEntry::default()
    }
}

/// Restores a variable.
pub(crate) fn restore(store: &ResourceStore, (container, name): &Key, entry: VariableEntry) -> Result<()> {
    let Some(value) = entry.value else { return Ok(()) };
    let value = value.into_tensor().map_err(|error| error.context(format_args!("the stored value of {name}")))?;
    let shape = match entry.has_rank {
        true => {
            let dims: Vec<Dim> = entry.dims.iter().map(|&dim| usize::try_from(dim).ok()).collect();
            PartialShape::new(&dims)
        }
        false => PartialShape::unknown(),
    };
    let dtype = value.dtype();
    let cell =
        store.lookup_or_create(container, name, || Ok(VariableCell::new(name.as_str(), dtype, shape.clone())))?;
    cell.assign(value)
}

/// The last values in a file; `None` if its first record is incomplete.
fn read(path: &Path) -> Result<Option<BTreeMap<(usize, Key), VariableEntry>>> {
    let broken = |error: std::io::Error| {
        Error::new(Code::DataLoss, format!("the journal '{}' cannot be read: {error}", path.display()))
    };
    let mut file = File::open(path).map_err(broken)?;
    let n_bytes = file.metadata().map_err(broken)?.len();
    let mut magic = [0; MAGIC.len()];
    if n_bytes < MAGIC.len() as u64 || file.read_exact(&mut magic).is_err() || magic != *MAGIC {
        return Ok(None);
    }
    let mut at = MAGIC.len() as u64;
    let mut values: Option<BTreeMap<(usize, Key), VariableEntry>> = None;
    loop {
        let mut head = [0; 12];
        if n_bytes - at < head.len() as u64 {
            break;
        }
        file.read_exact(&mut head).map_err(broken)?;
        at += head.len() as u64;
        let length = u64::from_le_bytes([head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7]]);
        let crc = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
        // Never more than there is in the file.
        let Some(length) = usize::try_from(length).ok().filter(|&length| length as u64 <= n_bytes - at) else { break };
        let mut bytes = vec![0; length];
        file.read_exact(&mut bytes).map_err(broken)?;
        at += length as u64;
        if crc32c::crc32c(&bytes) != crc {
            break;
        }
        let Ok(record) = Record::decode(bytes::Bytes::from(bytes)) else { break };
        let values = values.get_or_insert_default();
        for entry in record.entry {
            let key = (entry.device as usize, (entry.container.clone(), entry.name.clone()));
            match entry.value {
                Some(_) => drop(values.insert(key, entry)),
                None => drop(values.remove(&key)),
            }
        }
    }
    Ok(values)
}

fn framed(entry: Vec<VariableEntry>) -> Vec<u8> {
    let record = Record { entry };
    let length = record.encoded_len();
    let mut bytes = Vec::with_capacity(12 + length);
    bytes.extend((length as u64).to_le_bytes());
    bytes.extend([0; 4]);
    record.encode_raw(&mut bytes);
    let crc = crc32c::crc32c(&bytes[12..]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Writes a new file with the current values of all variables, and renames it when it is complete.
fn write_all(
    dir: &Path,
    number: u64,
    stores: &[Arc<ResourceStore>],
    known: &BTreeSet<(usize, Key)>,
) -> std::io::Result<(File, u64)> {
    let mut entries = Vec::with_capacity(known.len());
    for place in known {
        let value = stores.get(place.0).map(|store| entry(store, place)).transpose().map_err(std::io::Error::other)?;
        entries.extend(value.flatten());
    }
    let unfinished = dir.join("unfinished");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(&unfinished)?;
    let bytes = framed(entries);
    file.write_all(MAGIC)?;
    file.write_all(&bytes)?;
    file.sync_data()?;
    fs::rename(&unfinished, path(dir, number))?;
    File::open(dir)?.sync_all()?;
    Ok((file, (MAGIC.len() + bytes.len()) as u64))
}

fn path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("journal-{number}"))
}

fn numbers(dir: &Path) -> std::io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for file in fs::read_dir(dir)? {
        let name = file?.file_name();
        numbers
            .extend(name.to_str().and_then(|name| name.strip_prefix("journal-")).and_then(|n| n.parse::<u64>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

fn remove_older(dir: &Path, number: u64) {
    for older in numbers(dir).unwrap_or_default().into_iter().filter(|&older| older < number) {
        if let Err(error) = fs::remove_file(path(dir, older)) {
            tracing::debug!("an old journal stays: {error}");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use kolo_core::Tensor;
    use kolo_runtime::SessionConfig;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("kolo-journal-{name}-{}", std::process::id()));
            fs::remove_dir_all(&path).ok();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    fn host() -> Host {
        Host::of_task("ps", 0, SessionConfig::default()).unwrap()
    }

    fn cell(host: &Host, name: &str) -> Arc<VariableCell> {
        let make = || Ok(VariableCell::new(name, DType::F32, PartialShape::new(&[Some(2)])));
        host.resources()[0].lookup_or_create("", name, make).unwrap()
    }

    fn keys(names: &[&str]) -> BTreeSet<Key> {
        names.iter().map(|name| (String::new(), (*name).to_owned())).collect()
    }

    fn value(host: &Host, name: &str) -> Option<Vec<f32>> {
        let cell = host.resources()[0].lookup::<VariableCell>("", name).unwrap()?;
        cell.read().map(|tensor| tensor.data::<f32>().unwrap().to_vec())
    }

    #[test]
    fn values_come_back_and_what_is_gone_does_not() {
        let folder = Folder::new("values");
        let first = host();
        let journal = Journal::open(&folder.0, false, &first).unwrap();
        assert!(Journal::open(&folder.0, false, &first).err().unwrap().message().contains("in use"));
        for name in ["a", "b", "c"] {
            cell(&first, name).assign(Tensor::from([1.0f32, 2.0])).unwrap();
        }
        journal.commit(&keys(&["a", "b", "no such variable"])).unwrap();
        cell(&first, "a").assign(Tensor::from([3.0f32, 4.0])).unwrap();
        journal.commit(&keys(&["a"])).unwrap();
        first.resources()[0].remove("", "b");
        journal.commit_removals().unwrap();
        drop(journal);
        let second = host();
        let journal = Journal::open(&folder.0, true, &second).unwrap();
        assert_eq!(value(&second, "a"), Some(vec![3.0, 4.0]));
        assert_eq!((value(&second, "b"), value(&second, "c")), (None, None));
        assert_eq!(cell(&second, "a").shape(), &PartialShape::new(&[Some(2)]));
        // Once more, from the file that the second host wrote.
        drop(journal);
        let third = host();
        Journal::open(&folder.0, true, &third).unwrap();
        assert_eq!(value(&third, "a"), Some(vec![3.0, 4.0]));
        assert_eq!(numbers(&folder.0).unwrap(), [3]);
    }

    #[test]
    fn a_file_that_was_cut_anywhere_gives_the_last_whole_record() {
        let folder = Folder::new("cut");
        let first = host();
        let journal = Journal::open(&folder.0, false, &first).unwrap();
        let a = cell(&first, "a");
        let mut ends = vec![(journal.state.lock().end, None)];
        for i in 0..3 {
            a.assign(Tensor::from([i as f32, 0.0])).unwrap();
            journal.commit(&keys(&["a"])).unwrap();
            ends.push((journal.state.lock().end, Some(vec![i as f32, 0.0])));
        }
        let file = path(&folder.0, 1);
        drop(journal);
        let whole = fs::read(&file).unwrap();
        for n in 0..=whole.len() {
            let other = Folder::new("cut-copy");
            fs::create_dir_all(&other.0).unwrap();
            fs::write(path(&other.0, 1), &whole[..n]).unwrap();
            let wanted = ends.iter().rev().find(|(end, _)| *end <= n as u64).and_then(|(_, value)| value.clone());
            let again = host();
            Journal::open(&other.0, false, &again).unwrap();
            assert_eq!(value(&again, "a"), wanted, "cut at {n}");
        }
    }

    #[test]
    fn what_graphs_write_is_found_and_what_they_read_is_not() {
        let g = kolo_ops::graph();
        let handle = |name: &str| {
            let shape = PartialShape::new(&[Some(2)]);
            g.op("VarHandleOp").name(name).attr("dtype", DType::F32).attr("shape", shape).out()
        };
        let (read, written_to) = (handle("read"), handle("written"));
        let value = g.op("ReadVariableOp").input(read).attr("dtype", DType::F32).out();
        let _ = g.op("VarIsInitializedOp").input(read).out();
        let _ = g.op("AssignAddVariableOp").input(written_to).input(value).build();
        let _ = g.new_variable("old", 1.0f32).kind(kolo_graph::VariableKind::Reference).build();
        let names: Vec<String> = written(&g.snapshot()).into_iter().map(|(_, name)| name).collect();
        // The last has an initializer.
        assert_eq!(names, ["old", "written"]);
    }
}
