//! A write-ahead log of a task's variables, so that a task that was killed restarts with all acknowledged updates.
//!
//! Before a task responds that it has run its part of a step, the variables that the part may have written are appended
//! to a file, in one record. A task that starts replays its file. A record that a crash has cut off was never acknowledged.
//! Damage is reported; what lies before it is restored, and the file is set aside (`journal-7.damaged`), never deleted.
//! While the disk is full, steps wait. `records.rs` has the format, `docs/design/durability.md` explains why this is enough.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use kolo_ops::ResourceStore;
use kolo_runtime::Host;
use parking_lot::Mutex;

use super::records::{self, Chain, Ending, MAGIC};
use super::variables::{Key, changes, entry, restore};
use crate::task::peers::TaskName;
use crate::wire::proto::VariableEntry;

/// A file is compacted when it exceeds both this multiple of its first record and this many bytes.
const GROWTH: u64 = 4;
const MIN_COMPACTED_BYTES: u64 = 64 << 20;

/// How long a step waits before it tries again to write to a full disk: at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How often a full disk is reported.
const REPORT_PERIOD: Duration = Duration::from_secs(10);

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

/// The journal of one task.
pub(crate) struct Journal {
    dir: PathBuf,
    sync: bool,
    stores: Vec<Arc<ResourceStore>>,
    state: Mutex<JournalState>,
    /// Since when steps wait for room on the disk, and when that was last reported.
    full: Mutex<Option<(Instant, Instant)>>,
    /// Locked as long as the journal is in use.
    _lock: File,
}

struct JournalState {
    /// All variables that the file has a value for.
    known: BTreeSet<(usize, Key)>,
    file: File,
    number: u64,
    chain: Chain,
    /// Where the last complete record ends.
    end: u64,
    /// The file is compacted when it is longer than this.
    compact_at: u64,
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
        // The newest file whose snapshot can be read.
        let (mut found, mut n_steps) = (None, 0);
        for &number in numbers.iter().rev() {
            let contents = records::read(&path(dir, number))?;
            report(dir, number, &contents).map_err(|error| cannot("is damaged and cannot be set aside", error))?;
            if contents.values.is_some() {
                (found, n_steps) = (contents.values, contents.number);
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
            tracing::warn!("restored {} variables from '{}', as of its step {n_steps}", known.len(), dir.display());
        }
        let number = numbers.last().map_or(1, |last| last + 1);
        let (file, end, chain) =
            write_all(dir, number, n_steps, &stores, &known).map_err(|error| cannot("cannot be written", error))?;
        remove_older(dir, number);
        let state = JournalState { known, file, number, chain, end, compact_at: compact_at(end), is_broken: false };
        Ok(Journal { dir: dir.to_owned(), sync, stores, state: Mutex::new(state), full: Mutex::default(), _lock: lock })
    }

    /// Appends the current values of these variables. When this returns, they are durable. As long as the disk is full it
    /// waits, and logs that it does; dropping the call ends the wait.
    pub async fn commit(self: &Arc<Self>, keys: &Arc<BTreeSet<Key>>) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        let mut pause = FIRST_PAUSE;
        loop {
            let (journal, keys) = (self.clone(), keys.clone());
            let logged = tokio::task::spawn_blocking(move || journal.try_commit(&keys)).await;
            let full = match logged.map_err(|error| Error::internal(format!("the journal failed: {error}")))? {
                Ok(()) => {
                    self.report_room();
                    return Ok(());
                }
                Err(NotLogged::Failed(error)) => return Err(error),
                Err(NotLogged::NoRoom(error)) => error,
            };
            self.report_full(&full);
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Appends the removal of all variables that the stores no longer have.
    pub async fn commit_removals(self: &Arc<Self>) -> Result<()> {
        let keys: BTreeSet<Key> = self.state.lock().known.iter().map(|(_, key)| key.clone()).collect();
        self.commit(&Arc::new(keys)).await
    }

    /// Since when steps wait for room on the disk, with the directory.
    pub fn full_since(&self) -> Option<(Duration, &Path)> {
        self.full.lock().map(|(since, _)| (since.elapsed(), self.dir.as_path()))
    }

    fn report_full(&self, error: &std::io::Error) {
        let now = Instant::now();
        let mut full = self.full.lock();
        let (since, reported) = full.get_or_insert((now, now));
        if *since != now && reported.elapsed() < REPORT_PERIOD {
            return;
        }
        *reported = now;
        tracing::error!(
            "the journal '{}' cannot be written: {error}. Steps wait, and are not acknowledged, until there is room ({} s \
             so far)",
            self.dir.display(),
            since.elapsed().as_secs()
        );
    }

    fn report_room(&self) {
        if let Some((since, _)) = self.full.lock().take() {
            let waited = since.elapsed().as_secs_f32();
            tracing::warn!("the journal '{}' has room again, after {waited:.1} s; steps go on", self.dir.display());
        }
    }

    fn try_commit(&self, keys: &BTreeSet<Key>) -> std::result::Result<(), NotLogged> {
        let mut state = self.state.lock();
        let entries = changes(&self.stores, keys, &mut state.known).map_err(NotLogged::Failed)?;
        if entries.is_empty() {
            return Ok(());
        }
        let removed = entries.iter().filter(|entry| entry.value.is_none());
        let removed: Vec<_> = removed.map(|e| (e.device as usize, (e.container.clone(), e.name.clone()))).collect();
        self.append(&mut state, entries).map_err(|error| {
            // The file has them still.
            state.known.extend(removed);
            match error.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => NotLogged::NoRoom(error),
                _ => NotLogged::Failed(Error::new(
                    Code::ResourceExhausted,
                    format!(
                        "the step could not be logged in '{}', so it is not acknowledged: {error}",
                        self.dir.display()
                    ),
                )),
            }
        })
    }

    fn append(&self, state: &mut JournalState, entries: Vec<VariableEntry>) -> std::io::Result<()> {
        if state.end > state.compact_at || state.is_broken {
            let number = state.number + 1;
            match write_all(&self.dir, number, state.chain.number + 1, &self.stores, &state.known) {
                Ok((file, end, chain)) => {
                    (state.file, state.end, state.chain, state.number) = (file, end, chain, number);
                    (state.compact_at, state.is_broken) = (compact_at(end), false);
                    remove_older(&self.dir, number);
                    return Ok(());
                }
                Err(error) if state.is_broken => return Err(error),
                // There may be room for a record where there is none for a snapshot.
                Err(error) => {
                    tracing::warn!("the journal '{}' is not compacted: {error}", self.dir.display());
                    state.compact_at = state.end.saturating_add(MIN_COMPACTED_BYTES);
                }
            }
        }
        let (bytes, chain) = state.chain.record(state.chain.number + 1, entries);
        let written =
            state.file.write_all(&bytes).and_then(|()| if self.sync { state.file.sync_data() } else { Ok(()) });
        match &written {
            Ok(()) => {
                state.end += bytes.len() as u64;
                state.chain = chain;
            }
            Err(_) => {
                // A partial record would hide all records after it.
                let end = state.end;
                let truncated = state.file.set_len(end).and_then(|()| state.file.seek(SeekFrom::Start(end)));
                state.is_broken = truncated.is_err();
            }
        }
        written
    }
}

/// Why a step was not logged.
enum NotLogged {
    /// The disk is full: the step waits.
    NoRoom(std::io::Error),
    Failed(Error),
}

/// A file of this length is compacted when it is so long.
fn compact_at(end: u64) -> u64 {
    MIN_COMPACTED_BYTES.max(end.saturating_mul(GROWTH))
}

/// Reports how a file ends. A damaged one gets a second name first, under which it stays.
fn report(dir: &Path, number: u64, contents: &records::JournalContents) -> std::io::Result<()> {
    let file = path(dir, number);
    match &contents.ending {
        Ending::Complete => {}
        Ending::Torn { offset } => {
            let file = file.display();
            tracing::info!("'{file}' ends in a step that was being written, at byte {offset}; it was not acknowledged");
        }
        Ending::Damaged(damage) => {
            let aside = set_aside(&file)?;
            let kept = match &contents.values {
                Some(values) => format!("{} variables are restored as of step {}", values.len(), contents.number),
                None => "none of its variables can be restored".to_owned(),
            };
            let (file, aside) = (file.display(), aside.display());
            tracing::error!("the journal '{file}' is {damage}; {kept}. The file is kept as '{aside}'");
        }
    }
    Ok(())
}

/// Gives a file a second name that no other file has. The first one goes when a new journal is on the disk.
fn set_aside(file: &Path) -> std::io::Result<PathBuf> {
    for n in 1u32.. {
        let mut aside = file.as_os_str().to_owned();
        aside.push(if n == 1 { ".damaged".to_owned() } else { format!(".damaged-{n}") });
        match fs::hard_link(file, &aside) {
            Ok(()) => return Ok(aside.into()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

/// Writes a new file with the current values of all variables, and renames it when it is complete.
fn write_all(
    dir: &Path,
    number: u64,
    n_steps: u64,
    stores: &[Arc<ResourceStore>],
    known: &BTreeSet<(usize, Key)>,
) -> std::io::Result<(File, u64, Chain)> {
    let mut entries = Vec::with_capacity(known.len());
    for place in known {
        let value = stores.get(place.0).map(|store| entry(store, place)).transpose().map_err(std::io::Error::other)?;
        entries.extend(value.flatten());
    }
    let unfinished = dir.join("unfinished");
    // Only this user may read variables.
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    let (bytes, chain) = Chain::begin().record(n_steps, entries);
    let written = file.write_all(MAGIC).and_then(|()| file.write_all(&bytes)).and_then(|()| file.sync_data());
    if let Err(error) = written {
        // Others may need the room; a failure here is not worse than the first.
        let _ = file.set_len(0);
        return Err(error);
    }
    fs::rename(&unfinished, path(dir, number))?;
    File::open(dir)?.sync_all()?;
    Ok((file, (MAGIC.len() + bytes.len()) as u64, chain))
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
    use kolo_core::{DType, PartialShape, Tensor};
    use kolo_ops::VariableCell;
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

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn commit(journal: &Arc<Journal>, keys: &BTreeSet<Key>) -> Result<()> {
        block_on(journal.commit(&Arc::new(keys.clone())))
    }

    fn value(host: &Host, name: &str) -> Option<Vec<f32>> {
        let cell = host.resources()[0].lookup::<VariableCell>("", name).unwrap()?;
        cell.read().map(|tensor| tensor.data::<f32>().unwrap().to_vec())
    }

    #[test]
    fn values_come_back_and_what_is_gone_does_not() {
        let folder = Folder::new("values");
        let first = host();
        let journal = Arc::new(Journal::open(&folder.0, false, &first).unwrap());
        assert!(Journal::open(&folder.0, false, &first).err().unwrap().message().contains("in use"));
        for name in ["a", "b", "c"] {
            cell(&first, name).assign(Tensor::from([1.0f32, 2.0])).unwrap();
        }
        commit(&journal, &keys(&["a", "b", "no such variable"])).unwrap();
        cell(&first, "a").assign(Tensor::from([3.0f32, 4.0])).unwrap();
        commit(&journal, &keys(&["a"])).unwrap();
        first.resources()[0].remove("", "b");
        block_on(journal.commit_removals()).unwrap();
        drop(journal);
        // Values of variables are their owner's alone.
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(path(&folder.0, 1).metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let second = host();
        let journal = Arc::new(Journal::open(&folder.0, true, &second).unwrap());
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
        let journal = Arc::new(Journal::open(&folder.0, false, &first).unwrap());
        let a = cell(&first, "a");
        let mut ends = vec![(journal.state.lock().end, None)];
        for i in 0..3 {
            a.assign(Tensor::from([i as f32, 0.0])).unwrap();
            commit(&journal, &keys(&["a"])).unwrap();
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
    fn a_flipped_bit_keeps_what_lies_before_it_and_the_file() {
        let folder = Folder::new("flipped");
        let first = host();
        let journal = Arc::new(Journal::open(&folder.0, false, &first).unwrap());
        let a = cell(&first, "a");
        let mut ends = vec![(journal.state.lock().end, None)];
        for i in 0..4 {
            a.assign(Tensor::from([i as f32, 0.0])).unwrap();
            commit(&journal, &keys(&["a"])).unwrap();
            ends.push((journal.state.lock().end, Some(vec![i as f32, 0.0])));
        }
        drop(journal);
        let whole = fs::read(path(&folder.0, 1)).unwrap();
        for n in 0..whole.len() {
            let other = Folder::new("flipped-copy");
            fs::create_dir_all(&other.0).unwrap();
            let mut damaged = whole.clone();
            damaged[n] ^= 1 << (n % 8);
            fs::write(path(&other.0, 1), &damaged).unwrap();
            let wanted = ends.iter().rev().find(|(end, _)| *end <= n as u64).and_then(|(_, value)| value.clone());
            let again = host();
            Journal::open(&other.0, false, &again).unwrap();
            assert_eq!(value(&again, "a"), wanted, "byte {n}");
            let kept = fs::read(other.0.join("journal-1.damaged"));
            assert_eq!(kept.ok().as_ref(), Some(&damaged), "the damaged file is gone, byte {n}");
        }
    }

    #[test]
    fn damage_is_told_from_a_torn_tail_and_says_what_is_lost() {
        let folder = Folder::new("named");
        let first = host();
        let journal = Arc::new(Journal::open(&folder.0, false, &first).unwrap());
        let a = cell(&first, "a");
        let mut ends = Vec::new();
        for i in 0..4 {
            a.assign(Tensor::from([i as f32, 0.0])).unwrap();
            commit(&journal, &keys(&["a"])).unwrap();
            ends.push(journal.state.lock().end as usize);
        }
        drop(journal);
        let file = path(&folder.0, 1);
        let whole = fs::read(&file).unwrap();
        let ending = |bytes: &[u8]| {
            fs::write(&file, bytes).unwrap();
            match records::read(&file).unwrap().ending {
                Ending::Complete => "complete".to_owned(),
                Ending::Torn { offset } => format!("torn at {offset}"),
                Ending::Damaged(damage) => damage.to_string(),
            }
        };
        let flip = |at: usize| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            bytes
        };
        assert_eq!(ending(&whole), "complete");
        assert_eq!(ending(&whole[..ends[2] + 1]), format!("torn at {}", ends[2]));
        assert_eq!(ending(&whole[..ends[3] - 1]), format!("torn at {}", ends[2]));
        // A file whose length reached the disk, and whose bytes did not.
        let zeros = [&whole[..ends[2]], &vec![0; 100][..]].concat();
        assert_eq!(ending(&zeros), format!("torn at {}", ends[2]));
        // In the bytes of the second step, and in the length of its head.
        for at in [ends[1] - 1, ends[0] + 12] {
            let text = ending(&flip(at));
            assert!(text.contains(&format!("at byte {}", ends[0])), "{text}");
            assert!(text.contains("3 acknowledged steps are lost, 2 to 4"), "{text}");
        }
        // A step that is missing between two others.
        let text = ending(&[&whole[..ends[0]], &whole[ends[1]..]].concat());
        assert!(text.contains(&format!("at byte {}", ends[0])) && text.contains("2 to 4"), "{text}");
        // In the snapshot, after which nothing can be used.
        let text = ending(&flip(MAGIC.len() + 5));
        assert!(text.contains("at byte 8") && text.contains("1 to 4"), "{text}");
        // A journal of an earlier version is neither read nor lost.
        fs::write(&file, b"KOLOJRN1").unwrap();
        let error = Journal::open(&folder.0, false, &host()).err().unwrap();
        assert!(error.message().contains("earlier version") && file.exists(), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_makes_a_step_wait_until_there_is_room() {
        let folder = Folder::new("full");
        let first = host();
        let journal = Arc::new(Journal::open(&folder.0, false, &first).unwrap());
        let a = cell(&first, "a");
        a.assign(Tensor::from([1.0f32, 0.0])).unwrap();
        commit(&journal, &keys(&["a"])).unwrap();
        // Neither the file nor a new one can be written.
        let full = folder.0.join("unfinished");
        std::os::unix::fs::symlink("/dev/full", &full).unwrap();
        journal.state.lock().file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        a.assign(Tensor::from([2.0f32, 0.0])).unwrap();
        let keys = Arc::new(keys(&["a"]));
        block_on(async {
            // A wait that is given up ends.
            let given_up = tokio::time::timeout(Duration::from_millis(300), journal.commit(&keys)).await;
            assert!(given_up.is_err(), "acknowledged, or failed: {given_up:?}");
            assert!(journal.full_since().is_some());
            let free = async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                fs::remove_file(&full).unwrap();
            };
            let (logged, ()) = tokio::join!(journal.commit(&keys), free);
            logged.unwrap();
        });
        assert!(journal.full_since().is_none());
        drop(journal);
        let second = host();
        Journal::open(&folder.0, false, &second).unwrap();
        assert_eq!(value(&second, "a"), Some(vec![2.0, 0.0]));
    }
}
