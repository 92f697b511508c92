//! The one place where ops touch the file system, besides `access.rs`, which says who may touch what: errors that name the
//! file, and files that appear whole or not at all.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kolo_core::{Code, Error, Result};

use super::access::{Directory, FileAccess};

/// What comes between a file's name and a number while it is being written. TensorFlow's own word, so that tools which
/// skip its unfinished files skip ours.
const UNFINISHED: &str = ".tempstate";

/// `what PATH: reason`, with the code that fits the reason.
pub fn file_error(what: &str, path: &Path, error: &io::Error) -> Error {
    use io::ErrorKind::*;
    let code = match error.kind() {
        NotFound => Code::NotFound,
        PermissionDenied => Code::PermissionDenied,
        AlreadyExists => Code::AlreadyExists,
        UnexpectedEof => Code::DataLoss,
        StorageFull | QuotaExceeded | FileTooLarge | OutOfMemory => Code::ResourceExhausted,
        _ => Code::FailedPrecondition,
    };
    Error::new(code, format!("{what} {}: {error}", path.display()))
}

/// A file under a temporary name. It gets its own name by [`NewFile::publish`]; dropped before that, it is removed.
pub struct NewFile {
    file: File,
    directory: Directory,
    temporary: PathBuf,
    target: PathBuf,
    published: bool,
}

/// The mode of files that only their owner may read, such as checkpoints.
pub(super) const PRIVATE: u32 = 0o600;

impl NewFile {
    /// Begins a file that will be called `target`, and that only this user may read. The directory is made if it is
    /// missing.
    pub fn create(target: &Path) -> Result<NewFile> {
        NewFile::create_within(&FileAccess::everything(), target, PRIVATE)
    }

    /// As [`NewFile::create`], for one who may not touch all files, and with another mode.
    pub(super) fn create_within(access: &FileAccess, target: &Path, mode: u32) -> Result<NewFile> {
        let directory = access.make_directory_of(target).map_err(|error| {
            let path = target.parent().unwrap_or(target);
            match error.kind() {
                // A file has its name, which is not what "already exists" would say of a directory.
                io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => Error::failed_precondition(format!(
                    "cannot make the directory {}: there is a file of that name",
                    path.display()
                )),
                _ => file_error("cannot make the directory", path, &error),
            }
        })?;
        let temporary = temporary_name(target);
        let file = directory
            .create_new(name_of(&temporary), mode)
            .map_err(|error| file_error("cannot make the file", &temporary, &error))?;
        Ok(NewFile { file, directory, temporary, target: target.to_owned(), published: false })
    }

    /// The name it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where to write.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Waits until the bytes are on the disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|error| file_error("cannot write", &self.target, &error))
    }

    /// Gives it its name, in place of what had it before. Call [`NewFile::sync`] first.
    pub fn publish(mut self) -> Result<()> {
        self.directory
            .rename(name_of(&self.temporary), &self.directory, name_of(&self.target))
            .map_err(|error| file_error("cannot rename to", &self.target, &error))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.published {
            // Nothing can be done about a file that cannot be removed; its name says what it is.
            let _ = self.directory.remove(name_of(&self.temporary));
        }
    }
}

/// The last part of a path; of one that has none, such as `/`, a name that no file has.
pub(super) fn name_of(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

fn temporary_name(target: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    // Unique in this process by the counter, among processes and machines by number and time.
    let number = now ^ (u64::from(std::process::id()) << 40) ^ (NEXT.fetch_add(1, Ordering::Relaxed) << 56);
    let mut name = target.as_os_str().to_owned();
    name.push(format!("{UNFINISHED}{number}"));
    name.into()
}

/// Makes the names of a directory's files durable, where the system can.
pub fn sync_directory_of(file: &Path) {
    let directory = match file.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    // Not every system can open a directory; the files themselves are safe either way.
    if let Ok(directory) = File::open(directory) {
        let _ = directory.sync_all();
    }
}

/// Writes a small file so that readers see the old or the new contents, never a part. Only this user may read it.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<()> {
    write_whole_within(&FileAccess::everything(), path, contents, PRIVATE)
}

/// As [`write_whole`], for one who may not touch all files, and with another mode.
pub(super) fn write_whole_within(access: &FileAccess, path: &Path, contents: &[u8], mode: u32) -> Result<()> {
    let mut file = NewFile::create_within(access, path, mode)?;
    file.file().write_all(contents).map_err(|error| {
        file_error("cannot write", path, &error).and(format_args!(" ({} bytes were to be written)", contents.len()))
    })?;
    file.sync()?;
    file.publish()?;
    sync_directory_of(path);
    Ok(())
}

/// Removes files in `directory` that a process left unfinished when it was killed. Those written to in the last ten
/// minutes may still be somebody's.
pub fn remove_unfinished(directory: &Path) {
    const OLD: Duration = Duration::from_secs(600);
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some((_, number)) = name.to_str().and_then(|name| name.rsplit_once(UNFINISHED)) else { continue };
        let is_old = entry
            .metadata()
            .and_then(|about| about.modified())
            .is_ok_and(|modified| SystemTime::now().duration_since(modified).is_ok_and(|age| age > OLD));
        if is_old && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A new directory under the system's temporary one, removed when dropped.
#[cfg(test)]
pub(crate) struct TestDir(PathBuf);

#[cfg(test)]
impl TestDir {
    pub(crate) fn new(name: &str) -> TestDir {
        let path = temporary_name(&std::env::temp_dir().join(format!("kolo-{name}")));
        fs::create_dir(&path).expect("the temporary directory can be written");
        TestDir(path)
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The path of a file in it, as a graph names it.
    pub(crate) fn text(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("plain characters").to_owned()
    }

    /// The names in it, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("it exists");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

#[cfg(test)]
impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let dir = TestDir::new("files");
        let path = dir.join("sub/state");
        write_whole(&path, b"one").unwrap();
        let mut unfinished = NewFile::create(&path).unwrap();
        unfinished.file().write_all(b"tw").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(dir.join("sub")).unwrap().count(), 2);
        drop(unfinished);
        assert_eq!(fs::read_dir(dir.join("sub")).unwrap().count(), 1);
        write_whole(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
    }

    #[test]
    fn only_old_unfinished_files_are_removed() {
        let dir = TestDir::new("unfinished");
        for name in ["a.index.tempstate12", "b.tempstate34", "c.tempstatex", "d"] {
            fs::write(dir.join(name), "x").unwrap();
        }
        let long_ago = SystemTime::now() - Duration::from_secs(3600);
        for name in ["a.index.tempstate12", "c.tempstatex", "d"] {
            File::options().append(true).open(dir.join(name)).unwrap().set_modified(long_ago).unwrap();
        }
        remove_unfinished(&dir.join(""));
        assert_eq!(dir.names(), ["b.tempstate34", "c.tempstatex", "d"]);
    }
}
