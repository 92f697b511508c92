//! Large tensors between processes on one machine: the sender copies them to a file in shared memory, the receiver uses
//! them in place, and the connection carries only a message that refers to the file. That is one copy in all.
//!
//! Both sides keep their files mapped. A file is reused once the receiver reports that the tensor was dropped; a
//! long-lived tensor, such as a variable's first value, keeps its file, and when there are too many of those, tensors
//! go over the connection. The receiver unlinks a file when it opens it, so from then on no file can be left behind.
//!
//! Until then the sender holds a lock on the file, which the system releases when the process ends, however it does. So
//! an unlocked file was left behind by a killed process; every server removes such files at startup ([`sweep`]).

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kolo_core::{Buffer, Error, Memory, Result};
use kolo_device::SharedMap;
use kolo_device::cpu::IntraPool;
use parking_lot::Mutex;

use crate::task::random::random_u64;
use crate::wire::limits::{MAX_SHARED_BYTES, MAX_SHARED_FILES};

/// Smaller tensors go over the connection: a file would cost more than it saves.
pub(super) const MIN_SHARED_BYTES: usize = 64 << 10;

/// The file system in memory.
const FOLDER: &str = "/dev/shm";

/// A file by which a server can check that it shares memory with the caller: it can read the nonce.
pub(super) struct Probe {
    path: PathBuf,
    pub nonce: u64,
    /// Holds the lock, so that [`sweep`] does not remove the file.
    file: File,
}

impl Probe {
    /// Writes the file; `None` if that fails.
    pub fn new() -> Option<Probe> {
        let nonce = random_u64();
        let path = new_path();
        let file = create(&path).ok()?;
        let probe = Probe { path, nonce, file };
        probe.file.write_all_at(&nonce.to_le_bytes(), 0).ok()?;
        Some(probe)
    }

    pub fn path(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // It may have been removed already.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether the caller's file can be read here and holds the caller's nonce.
pub(super) fn sees(path: &str, nonce: u64) -> bool {
    let mut found = [0; 8];
    let read = is_ours(path).then(|| File::open(path).and_then(|file| file.read_exact_at(&mut found, 0)));
    matches!(read, Some(Ok(()))) && nonce != 0 && found == nonce.to_le_bytes()
}

/// Whether a path from a peer has the form of our files and is a regular file: no symlinks, and no pipes, whose open
/// would block until there is a writer.
fn is_ours(path: &str) -> bool {
    let name = path.strip_prefix(FOLDER).and_then(|rest| rest.strip_prefix("/kolo-"));
    let is_named_so = name.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_hexdigit()));
    is_named_so && std::fs::symlink_metadata(path).is_ok_and(|found| found.is_file())
}

fn new_path() -> PathBuf {
    Path::new(FOLDER).join(format!("kolo-{:016x}{:08x}", random_u64(), std::process::id()))
}

/// Creates a file and locks it.
fn create(path: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    let is_held = file.try_lock().is_ok();
    // A sweep may have come between the two.
    if !is_held || file.metadata()?.nlink() == 0 {
        // The sweep may have removed it, or still will.
        let _ = std::fs::remove_file(path);
        return Err(std::io::ErrorKind::NotFound.into());
    }
    Ok(file)
}

/// Removes the files that killed processes have left behind, and returns how many.
pub(crate) fn sweep() -> usize {
    let Ok(files) = std::fs::read_dir(FOLDER) else { return 0 };
    let is_left = |path: &Path| {
        // Files of other users cannot be opened, and are theirs to remove.
        let file = path.to_str().filter(|path| is_ours(path)).and_then(|path| File::open(path).ok());
        file.is_some_and(|file| file.try_lock().is_ok() && std::fs::remove_file(path).is_ok())
    };
    files.filter_map(|file| file.ok()).filter(|file| is_left(&file.path())).count()
}

/// The sender's files of one connection.
pub(super) struct OutgoingFiles {
    files: Mutex<Vec<Slot>>,
    /// Copies large tensors.
    pool: Arc<IntraPool>,
}

struct Slot {
    id: u32,
    /// `None` while a tensor is copied into it.
    map: Option<SharedMap>,
    /// Its path and lock, until the receiver has released it once and so must have opened it.
    named: Option<(PathBuf, File)>,
    size: usize,
    is_free: bool,
}

/// Refers to the file that holds a tensor.
pub(super) struct FileRef {
    pub id: u32,
    /// Empty once the receiver is known to have opened the file.
    pub path: String,
}

impl OutgoingFiles {
    pub fn new(pool: Arc<IntraPool>) -> OutgoingFiles {
        OutgoingFiles { files: Mutex::default(), pool }
    }

    /// Copies bytes to a free file, or to a new one. `None` if there is neither.
    pub fn put(&self, bytes: &[u8]) -> Option<FileRef> {
        let (id, mut map, path) = self.take(bytes.len())?;
        self.pool.copy(&mut map.bytes_mut()[..bytes.len()], bytes);
        let mut files = self.files.lock();
        let slot = files.iter_mut().find(|slot| slot.id == id)?;
        slot.map = Some(map);
        Some(FileRef { id, path })
    }

    fn take(&self, n: usize) -> Option<(u32, SharedMap, String)> {
        let mut files = self.files.lock();
        let fits = files
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.is_free && slot.size >= n)
            .min_by_key(|(_, slot)| slot.size);
        let at = match fits.map(|(at, _)| at) {
            Some(at) => at,
            None => {
                let total: usize = files.iter().map(|slot| slot.size).sum();
                if files.len() >= MAX_SHARED_FILES || total.checked_add(n)? > MAX_SHARED_BYTES {
                    return None;
                }
                let path = new_path();
                let file = create(&path).ok()?;
                let Ok(map) = SharedMap::create(&file, n) else {
                    // Out of memory: the tensor goes over the connection.
                    let _ = std::fs::remove_file(&path);
                    return None;
                };
                let id = files.len() as u32;
                files.push(Slot { id, map: Some(map), named: Some((path, file)), size: n, is_free: true });
                files.len() - 1
            }
        };
        let slot = &mut files[at];
        let map = slot.map.take()?;
        slot.is_free = false;
        let path = slot.named.as_ref().map_or(String::new(), |(path, _)| path.to_string_lossy().into_owned());
        Some((slot.id, map, path))
    }

    /// The receiver is done with the file.
    pub fn release(&self, id: u32) {
        let mut files = self.files.lock();
        // A file that is being written has not been sent yet, so a message that releases it is wrong.
        if let Some(slot) = files.iter_mut().find(|slot| slot.id == id && slot.map.is_some()) {
            slot.is_free = true;
            slot.named = None;
        }
    }
}

impl Drop for OutgoingFiles {
    fn drop(&mut self) {
        for (path, _) in self.files.get_mut().iter().filter_map(|slot| slot.named.as_ref()) {
            // The receiver may have removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The receiver's files of one connection.
pub(super) struct IncomingFiles {
    files: Arc<Mutex<OpenFiles>>,
    /// [`MAX_SHARED_BYTES`], or less in tests.
    max_bytes: usize,
}

impl Default for IncomingFiles {
    fn default() -> IncomingFiles {
        IncomingFiles { files: Arc::default(), max_bytes: MAX_SHARED_BYTES }
    }
}

#[derive(Default)]
struct OpenFiles {
    /// By file number; `None` while a tensor uses the file.
    maps: HashMap<u32, Option<SharedMap>>,
    /// The bytes of all of them. Files stay open until the connection ends, so it only grows.
    n_bytes: usize,
}

/// Called with a file's number when the tensor in it is dropped.
pub(super) type OnRelease = Arc<dyn Fn(u32) + Send + Sync>;

impl IncomingFiles {
    /// A file's bytes, as a tensor's memory. `on_release` is called when that is dropped.
    pub fn get(&mut self, id: u32, path: &str, n_bytes: usize, on_release: &OnRelease) -> Result<Arc<dyn Buffer>> {
        let broken = |error: std::io::Error| Error::unavailable(format!("shared memory '{path}': {error}"));
        let mut files = self.files.lock();
        if !path.is_empty() {
            if !is_ours(path) || files.maps.contains_key(&id) {
                return Err(Error::data_loss(format!("'{path}' is not a file for tensors")));
            }
            if files.maps.len() >= MAX_SHARED_FILES {
                return Err(Error::resource_exhausted(format!(
                    "'{path}' is more than the {MAX_SHARED_FILES} shared files that a connection may have"
                )));
            }
            let file = OpenOptions::new().read(true).write(true).open(path).map_err(broken)?;
            std::fs::remove_file(path).map_err(broken)?;
            let n = file.metadata().map_err(broken)?.len();
            let (max_bytes, room) = (self.max_bytes, self.max_bytes.saturating_sub(files.n_bytes));
            let n = usize::try_from(n).ok().filter(|&n| n <= room).ok_or_else(|| {
                Error::resource_exhausted(format!(
                    "'{path}' has {n} bytes, but of the {max_bytes} bytes that the shared files of a connection may have \
                     together {room} are left"
                ))
            })?;
            let map = SharedMap::open(&file, n).map_err(broken)?;
            files.n_bytes += n;
            files.maps.insert(id, Some(map));
        }
        let map = files.maps.get_mut(&id).and_then(|place| place.take_if(|map| map.n_bytes() >= n_bytes));
        let map = map.ok_or_else(|| Error::data_loss(format!("no shared file {id} with {n_bytes} bytes")))?;
        let (files, on_release) = (self.files.clone(), on_release.clone());
        Ok(Arc::new(SharedBuffer { map: Some(map), n_bytes, id, files, on_release }))
    }
}

/// A tensor's memory in a file that another process has written.
struct SharedBuffer {
    /// `None` only while it is dropped.
    map: Option<SharedMap>,
    n_bytes: usize,
    id: u32,
    /// Where the map is returned to.
    files: Arc<Mutex<OpenFiles>>,
    on_release: OnRelease,
}

impl Buffer for SharedBuffer {
    fn memory(&self) -> Memory {
        Memory::Host
    }
    fn n_bytes(&self) -> usize {
        self.n_bytes
    }
    fn host(&self) -> Option<&[u8]> {
        self.map.as_ref().map(|map| &map.bytes()[..self.n_bytes])
    }
    fn host_mut(&mut self) -> Option<&mut [u8]> {
        self.map.as_mut().map(|map| &mut map.bytes_mut()[..self.n_bytes])
    }
    fn as_any(&self) -> &dyn std::any::Any {
        // A device may read the map directly.
        self.map.as_ref().map_or(self, |map| map as &dyn std::any::Any)
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        if let Some(map) = self.files.lock().maps.get_mut(&self.id) {
            *map = self.map.take();
        }
        (self.on_release)(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_carry_bytes_are_used_again_and_leave_nothing_behind() {
        let Some(probe) = Probe::new() else { return };
        assert!(sees(&probe.path(), probe.nonce) && !sees(&probe.path(), probe.nonce ^ 1));
        let probe_path = probe.path();
        drop(probe);
        assert!(!sees(&probe_path, 1));

        let (out, mut incoming) = (OutgoingFiles::new(IntraPool::new(1)), IncomingFiles::default());
        let left: Arc<Mutex<Vec<u32>>> = Arc::default();
        let note = left.clone();
        let note: OnRelease = Arc::new(move |id| note.lock().push(id));
        let first = out.put(&[1; 1000]).unwrap();
        assert!(!first.path.is_empty());
        let mut tensor = incoming.get(first.id, &first.path, 1000, &note).unwrap();
        assert_eq!(tensor.host().unwrap(), [1; 1000]);
        assert!(!Path::new(&first.path).exists());
        Arc::get_mut(&mut tensor).unwrap().host_mut().unwrap()[3] = 9;
        assert!(incoming.get(first.id, "", 10, &note).is_err(), "a tensor is in it");
        // A file in use is not overwritten.
        let other = out.put(&[3; 500]).unwrap();
        assert_ne!(other.id, first.id);
        drop(tensor);
        assert_eq!(*left.lock(), [first.id]);
        out.release(first.id);
        let second = out.put(&[2; 900]).unwrap();
        assert_eq!((second.id, second.path.as_str()), (first.id, ""));
        assert!(incoming.get(second.id, "", 1001, &note).is_err(), "longer than the file");
        let tensor = incoming.get(second.id, "", 900, &note).unwrap();
        assert_eq!(tensor.host().unwrap(), [2; 900]);
        drop((out, incoming));
        assert!(!Path::new(&other.path).exists());
        // A tensor may outlast its connection.
        assert_eq!(tensor.host().unwrap(), [2; 900]);
    }

    #[test]
    fn a_peer_cannot_make_us_map_more_than_the_total() {
        const LIMIT: usize = 1 << 20;
        let mut incoming = IncomingFiles { max_bytes: LIMIT, ..IncomingFiles::default() };
        let ignore: OnRelease = Arc::new(|_| ());
        let put = |n_bytes: usize| {
            let path = new_path();
            create(&path).unwrap().set_len(n_bytes as u64).unwrap();
            path.to_string_lossy().into_owned()
        };
        if !Path::new(FOLDER).is_dir() {
            return;
        }
        let half = put(LIMIT / 2);
        let first = incoming.get(0, &half, 8, &ignore).unwrap();
        // A file stays mapped when its tensor is dropped.
        drop(first);
        let more = put(LIMIT / 2 + 1);
        let refused = incoming.get(1, &more, 8, &ignore).err().unwrap();
        assert_eq!(refused.code(), kolo_core::Code::ResourceExhausted, "{refused}");
        assert!(refused.message().contains("shared files of a connection"), "{refused}");
        let rest = put(LIMIT / 2);
        assert!(incoming.get(1, &rest, 8, &ignore).is_ok());
        let small = put(4096);
        assert!(incoming.get(2, &small, 8, &ignore).is_err(), "nothing is left");
        for path in [half, more, rest, small] {
            assert!(!Path::new(&path).exists(), "{path}");
        }
    }

    /// Set for a process that is to be killed.
    const VICTIM: &str = "KOLO_TEST_SHARED_VICTIM";

    /// Not a test of its own: the process that the next one kills.
    #[test]
    fn victim() {
        if std::env::var_os(VICTIM).is_none() {
            return;
        }
        let out = OutgoingFiles::new(IntraPool::new(1));
        let (probe, put) = (Probe::new().unwrap(), out.put(&[1; 1000]).unwrap());
        println!("\n{} {}", probe.path(), put.path);
        // Until it is killed, or the test's process has ended.
        let _ = std::io::stdin().read_line(&mut String::new());
    }

    #[test]
    fn what_a_killed_process_left_behind_is_swept_away() {
        use std::io::BufRead as _;
        use std::process::{Child, Command, Stdio};
        struct Killed(Child);
        impl Drop for Killed {
            fn drop(&mut self) {
                let _ = self.0.kill();
                let _ = self.0.wait();
            }
        }
        let Some(mine) = Probe::new() else { return };
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "transport::framed::shared::tests::victim", "--nocapture"]).env(VICTIM, "1");
        let mut child = Killed(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        let lines = std::io::BufReader::new(child.0.stdout.take().unwrap()).lines().map_while(|line| line.ok());
        let line = lines.into_iter().find(|line| line.starts_with(FOLDER)).expect("it says what it made");
        let paths: Vec<&Path> = line.split(' ').map(Path::new).collect();
        sweep();
        assert!(paths.len() == 2 && paths.iter().all(|path| path.exists()), "it lives: {line}");
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        assert!(paths.iter().all(|path| path.exists()), "it had no time to remove them");
        sweep();
        assert!(!paths.iter().any(|path| path.exists()), "they are gone");
        assert!(sees(&mine.path(), mine.nonce), "those of the living stay");
    }

    #[test]
    fn other_files_are_never_opened() {
        let link = new_path();
        if std::os::unix::fs::symlink("/etc/hostname", &link).is_ok() {
            let text = link.to_string_lossy().into_owned();
            assert!(!is_ours(&text));
            std::fs::remove_file(&link).unwrap();
        }
        for path in ["/etc/passwd", "/dev/shm/other", "/dev/shm/kolo-../x", "/dev/shm/kolo-zz"] {
            assert!(!is_ours(path) && !sees(path, 1));
            let left: OnRelease = Arc::new(|_| ());
            assert!(IncomingFiles::default().get(0, path, 4, &left).is_err());
        }
    }
}
