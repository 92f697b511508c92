//! Large tensors between processes of one machine: the sender writes them to a file that lives in memory, the receiver reads
//! them from there, and the connection carries only the message that says so. That is two copies, as over TCP, but without
//! the system's packets between them.
//!
//! A file is used again once the receiver says that it has read it. The receiver unlinks a file when it opens it, so nothing
//! is left behind, whoever ends first.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use kolo_core::{Error, Result};
use parking_lot::Mutex;

use crate::random::random_u64;

/// Tensors below this go over the connection: a file would cost more than it saves.
pub(super) const LEAST: usize = 256 << 10;

/// The most files of a connection, and the most bytes in all of them. What does not fit goes over the connection.
const MAX_FILES: usize = 8;
const MAX_BYTES: usize = 1 << 30;

/// Where files live in memory.
const FOLDER: &str = "/dev/shm";

/// A file by which a caller shows that it shares memory with whoever can read it.
pub(super) struct Probe {
    path: PathBuf,
    pub nonce: u64,
}

impl Probe {
    /// Writes the file; `None` if there is nowhere to write it.
    pub fn new() -> Option<Probe> {
        let nonce = random_u64();
        let path = new_path();
        let file = create(&path).ok()?;
        let probe = Probe { path, nonce };
        file.write_all_at(&nonce.to_le_bytes(), 0).ok()?;
        Some(probe)
    }

    pub fn path(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // Whether it is there or not: it should not be.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether the caller's file is here and says what the caller says.
pub(super) fn sees(path: &str, nonce: u64) -> bool {
    let mut found = [0; 8];
    let read = is_ours(path).then(|| File::open(path).and_then(|file| file.read_exact_at(&mut found, 0)));
    matches!(read, Some(Ok(()))) && nonce != 0 && found == nonce.to_le_bytes()
}

/// Only files that we could have made are opened, whatever a message says: no links, and no pipes, which would not open at all
/// until somebody writes to them.
fn is_ours(path: &str) -> bool {
    let name = path.strip_prefix(FOLDER).and_then(|rest| rest.strip_prefix("/kolo-"));
    let is_named_so = name.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_hexdigit()));
    is_named_so && std::fs::symlink_metadata(path).is_ok_and(|found| found.is_file())
}

fn new_path() -> PathBuf {
    Path::new(FOLDER).join(format!("kolo-{:016x}{:08x}", random_u64(), std::process::id()))
}

fn create(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// The sender's files of one connection.
#[derive(Default)]
pub(super) struct Outgoing {
    files: Mutex<Vec<Slot>>,
}

struct Slot {
    id: u32,
    /// Taken while it is written.
    file: Option<File>,
    /// Until the receiver has opened it.
    path: Option<PathBuf>,
    size: usize,
    is_free: bool,
}

/// Where a tensor was put.
pub(super) struct Put {
    pub id: u32,
    /// For a file that the receiver has not seen yet.
    pub path: String,
}

impl Outgoing {
    /// Writes bytes to a file that is free, or to a new one. `None` if there is neither.
    pub fn put(&self, bytes: &[u8]) -> Option<Put> {
        let (id, file, path) = self.take(bytes.len())?;
        let written = file.write_all_at(bytes, 0);
        let mut files = self.files.lock();
        let slot = files.iter_mut().find(|slot| slot.id == id)?;
        slot.file = Some(file);
        match written {
            Ok(()) => Some(Put { id, path }),
            Err(_) => {
                // Memory is short: the connection does it, now and for files of this size.
                slot.is_free = true;
                None
            }
        }
    }

    fn take(&self, n: usize) -> Option<(u32, File, String)> {
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
                if files.len() >= MAX_FILES || total.checked_add(n)? > MAX_BYTES {
                    return None;
                }
                let path = new_path();
                let file = create(&path).ok()?;
                let id = files.len() as u32;
                files.push(Slot { id, file: Some(file), path: Some(path), size: n, is_free: true });
                files.len() - 1
            }
        };
        let slot = &mut files[at];
        let file = slot.file.take()?;
        slot.is_free = false;
        let path = slot.path.as_ref().map_or(String::new(), |path| path.to_string_lossy().into_owned());
        Some((slot.id, file, path))
    }

    /// The receiver has read the file.
    pub fn release(&self, id: u32) {
        let mut files = self.files.lock();
        if let Some(slot) = files.iter_mut().find(|slot| slot.id == id) {
            slot.is_free = true;
            slot.path = None;
        }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        for path in self.files.get_mut().iter().filter_map(|slot| slot.path.as_ref()) {
            // The receiver may have been faster.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The receiver's files of one connection.
#[derive(Default)]
pub(super) struct Incoming {
    files: HashMap<u32, File>,
}

impl Incoming {
    /// Reads what the sender has put there.
    pub fn get(&mut self, id: u32, path: &str, bytes: &mut [u8]) -> Result<()> {
        let broken = |error: std::io::Error| Error::unavailable(format!("shared memory '{path}': {error}"));
        if !path.is_empty() {
            if !is_ours(path) || self.files.len() >= MAX_FILES {
                return Err(Error::data_loss(format!("'{path}' is not a file for tensors")));
            }
            let file = File::open(path).map_err(broken)?;
            std::fs::remove_file(path).map_err(broken)?;
            self.files.insert(id, file);
        }
        let file = self.files.get(&id).ok_or_else(|| Error::data_loss(format!("no shared file {id}")))?;
        file.read_exact_at(bytes, 0).map_err(broken)
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

        let (out, mut incoming) = (Outgoing::default(), Incoming::default());
        let first = out.put(&[1; 1000]).unwrap();
        assert!(!first.path.is_empty());
        let mut bytes = [0; 1000];
        incoming.get(first.id, &first.path, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 1000]);
        assert!(!Path::new(&first.path).exists());
        out.release(first.id);
        let second = out.put(&[2; 500]).unwrap();
        assert_eq!((second.id, second.path.as_str()), (first.id, ""));
        let third = out.put(&[3; 500]).unwrap();
        assert_ne!(third.id, second.id);
        incoming.get(second.id, "", &mut bytes[..500]).unwrap();
        assert_eq!(bytes[..500], [2; 500]);
        drop(out);
        assert!(!Path::new(&third.path).exists());
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
            assert!(Incoming::default().get(0, path, &mut [0; 4]).is_err());
        }
    }
}
