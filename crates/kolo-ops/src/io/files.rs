//! The one place where ops touch the file system: who may touch what, errors that name the file, and files that appear
//! whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kolo_core::{Code, Error, Result};

/// What comes between a file's name and a number while it is being written. TensorFlow's own word, so that tools which
/// skip its unfinished files skip ours.
const UNFINISHED: &str = ".tempstate";

/// Which files ops may touch. All of them by default, as for a program's own session; a server that runs others' graphs
/// names directories.
#[derive(Clone, Debug, Default)]
pub struct FileAccess {
    /// `None` means everything.
    directories: Option<Arc<[PathBuf]>>,
}

impl FileAccess {
    /// Everything that the process itself may touch.
    pub fn everything() -> FileAccess {
        FileAccess::default()
    }

    /// No file at all.
    pub fn nothing() -> FileAccess {
        FileAccess { directories: Some(Arc::default()) }
    }

    /// Only files under these directories, which must exist. None at all if the list is empty.
    pub fn under<P: AsRef<Path>>(directories: impl IntoIterator<Item = P>) -> Result<FileAccess> {
        let real = |directory: P| {
            let directory = directory.as_ref();
            fs::canonicalize(directory).map_err(|error| file_error("cannot use the directory", directory, &error))
        };
        let directories = directories.into_iter().map(real).collect::<Result<Vec<_>>>()?;
        Ok(FileAccess { directories: Some(directories.into()) })
    }

    /// An error unless `path` may be touched. Links are followed as far as the path exists.
    pub fn check(&self, path: &Path) -> Result<()> {
        let Some(directories) = &self.directories else { return Ok(()) };
        let allowed = resolve(path).is_some_and(|real| directories.iter().any(|directory| real.starts_with(directory)));
        if allowed {
            return Ok(());
        }
        let list = directories.iter().map(|directory| directory.display().to_string()).collect::<Vec<_>>().join(", ");
        let list = if list.is_empty() { "no directory".to_owned() } else { list };
        Err(Error::new(
            Code::PermissionDenied,
            format!(
                "{} is outside of what ops may touch here: {list}; --allow-dir of `kolo serve` opens a directory",
                path.display()
            ),
        ))
    }
}

/// The path with links followed as far as it exists; `None` if what does not exist climbs up with `..`.
fn resolve(path: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).ok()?;
    let mut existing = absolute.as_path();
    let mut rest = Vec::new();
    loop {
        if let Ok(real) = fs::canonicalize(existing) {
            return Some(rest.into_iter().rev().fold(real, |path, part| path.join(part)));
        }
        // A link that leads nowhere yet would be followed when the file is made.
        if fs::symlink_metadata(existing).is_ok() {
            return None;
        }
        match existing.components().next_back()? {
            Component::Normal(part) => rest.push(part),
            _ => return None,
        }
        existing = existing.parent()?;
    }
}

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

/// Makes a directory and those above it, if they are missing.
pub fn make_directory(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(|error| match error.kind() {
        // A file has its name, which is not what "already exists" would say of a directory.
        io::ErrorKind::AlreadyExists => Error::failed_precondition(format!(
            "cannot make the directory {}: there is a file of that name",
            directory.display()
        )),
        _ => file_error("cannot make the directory", directory, &error),
    })
}

/// A file under a temporary name. It gets its own name by [`NewFile::publish`]; dropped before that, it is removed.
pub struct NewFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
    published: bool,
}

impl NewFile {
    /// Begins a file that will be called `target`. The directory is made if it is missing.
    pub fn create(target: &Path) -> Result<NewFile> {
        if let Some(directory) = target.parent().filter(|directory| !directory.as_os_str().is_empty()) {
            make_directory(directory)?;
        }
        let temporary = temporary_name(target);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary)
            .map_err(|error| file_error("cannot make the file", &temporary, &error))?;
        Ok(NewFile { file, temporary, target: target.to_owned(), published: false })
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
        fs::rename(&self.temporary, &self.target)
            .map_err(|error| file_error("cannot rename to", &self.target, &error))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.published {
            // Nothing can be done about a file that cannot be removed; its name says what it is.
            let _ = fs::remove_file(&self.temporary);
        }
    }
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

/// Writes a small file so that readers see the old or the new contents, never a part.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<()> {
    let mut file = NewFile::create(path)?;
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

    #[test]
    fn access_is_limited_to_directories() {
        let dir = TestDir::new("access");
        fs::create_dir(dir.join("in")).unwrap();
        fs::create_dir(dir.join("out")).unwrap();
        let access = FileAccess::under([dir.join("in")]).unwrap();
        for inside in ["in/x", "in/new/y", "in/../in/z", "out/../in/z"] {
            access.check(&dir.join(inside)).unwrap();
        }
        for outside in ["out/x", "in/../out/x", "in/new/../../out/x", "inner", ""] {
            let error = access.check(&dir.join(outside)).unwrap_err();
            assert_eq!(error.code(), Code::PermissionDenied, "{outside}");
        }
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(dir.join("out"), dir.join("in/link")).unwrap();
            std::os::unix::fs::symlink(dir.join("out/later"), dir.join("in/dangling")).unwrap();
            assert!(access.check(&dir.join("in/link/x")).is_err());
            assert!(access.check(&dir.join("in/dangling")).is_err());
        }
        FileAccess::everything().check(&dir.join("out/x")).unwrap();
        let none: [&Path; 0] = [];
        assert!(FileAccess::under(none).unwrap().check(&dir.join("in/x")).is_err());
    }
}
