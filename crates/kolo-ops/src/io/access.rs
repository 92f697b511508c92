//! Which files ops may touch, and how they are reached: by descriptors, so that what was checked is what is opened.
//!
//! A path is resolved and compared with the allowed directories. Somebody who may write there could exchange a part of it for
//! a link before it is used, so it is not used again as it is: what is left of it below the allowed directory is opened from
//! that directory's descriptor, by the kernel where it can refuse to leave a directory (`openat2`), and otherwise part by part
//! without following links.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use kolo_core::{Code, Error, Result};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::files::file_error;

/// Which files ops may touch. All of them by default, as for a program's own session; a server that runs others' graphs
/// names directories.
#[derive(Clone, Debug, Default)]
pub struct FileAccess {
    /// `None` means everything.
    directories: Option<Arc<[AllowedDirectory]>>,
}

#[derive(Debug)]
struct AllowedDirectory {
    path: PathBuf,
    descriptor: OwnedFd,
}

/// A directory that may be touched.
#[derive(Debug)]
pub(super) struct Directory(OwnedFd);

impl FileAccess {
    /// Everything that the process itself may touch.
    pub fn everything() -> FileAccess {
        FileAccess::default()
    }

    /// No file at all.
    pub fn nothing() -> FileAccess {
        FileAccess { directories: Some(Arc::new([])) }
    }

    /// Only files under these directories, which must exist. None at all if the list is empty.
    pub fn under<P: AsRef<Path>>(directories: impl IntoIterator<Item = P>) -> Result<FileAccess> {
        let open = |directory: P| {
            let directory = directory.as_ref();
            let opened = fs::canonicalize(directory).and_then(|path| {
                let descriptor = rustix::fs::open(&path, DIRECTORY, Mode::empty())?;
                Ok(AllowedDirectory { path, descriptor })
            });
            opened.map_err(|error| file_error("cannot use the directory", directory, &error))
        };
        let directories = directories.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        Ok(FileAccess { directories: Some(directories.into()) })
    }

    /// An error unless `path` may be touched. Links are followed as far as the path exists.
    pub fn check(&self, path: &Path) -> Result<()> {
        let Some(directories) = &self.directories else { return Ok(()) };
        if self.locate(path).is_some() {
            return Ok(());
        }
        let list = directories.iter().map(|allowed| allowed.path.display().to_string()).collect::<Vec<_>>().join(", ");
        let list = if list.is_empty() { "no directory".to_owned() } else { list };
        Err(Error::new(
            Code::PermissionDenied,
            format!(
                "{} is outside of what ops may touch here: {list}; --allow-dir of `kolo serve` opens a directory",
                path.display()
            ),
        ))
    }

    /// Opens a file to read it. A file with other names is refused where only some directories are allowed: it may be
    /// somebody's outside of them.
    pub(super) fn open(&self, path: &Path) -> io::Result<File> {
        if self.directories.is_none() {
            return File::open(path);
        }
        let (allowed, rest) = self.locate(path).ok_or_else(left)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let file = File::from(open_beneath(allowed.descriptor.as_fd(), &rest, flags)?);
        let about = file.metadata()?;
        if about.is_file() && about.nlink() > 1 && allowed.path != Path::new("/") {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "it has other names (hard links), which may be outside of what ops may touch here; copy it",
            ));
        }
        Ok(file)
    }

    /// Opens the directory that a file is in.
    pub(super) fn directory_of(&self, file: &Path) -> io::Result<Directory> {
        self.directory(parent(file), Missing::IsAnError)
    }

    /// As [`FileAccess::directory_of`]; makes it and those above it if they are missing.
    pub(super) fn make_directory_of(&self, file: &Path) -> io::Result<Directory> {
        self.directory(parent(file), Missing::IsMade)
    }

    /// The names in a directory.
    pub(super) fn list(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let directory = self.directory(path, Missing::IsAnError)?;
        // What may be listed is opened anew: a descriptor of a path alone cannot be read.
        let readable =
            rustix::fs::openat(&directory.0, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(readable)? {
            let name = entry?.file_name().to_bytes().to_owned();
            if name != b"." && name != b".." {
                names.push(OsStr::from_bytes(&name).to_owned());
            }
        }
        Ok(names)
    }

    fn directory(&self, path: &Path, missing: Missing) -> io::Result<Directory> {
        if self.directories.is_none() {
            if missing == Missing::IsMade {
                fs::create_dir_all(path)?;
            }
            return Ok(Directory(rustix::fs::open(path, DIRECTORY, Mode::empty())?));
        }
        let (allowed, rest) = self.locate(path).ok_or_else(left)?;
        let mut directory = rustix::fs::openat(&allowed.descriptor, ".", DIRECTORY, Mode::empty())?;
        for part in rest.components() {
            let Component::Normal(part) = part else { return Err(left()) };
            let open = || rustix::fs::openat(&directory, part, DIRECTORY | OFlags::NOFOLLOW, Mode::empty());
            directory = match open() {
                Err(Errno::NOENT) if missing == Missing::IsMade => {
                    match rustix::fs::mkdirat(&directory, part, Mode::from_raw_mode(0o777)) {
                        Ok(()) | Err(Errno::EXIST) => open(),
                        Err(error) => Err(error),
                    }
                }
                other => other,
            }
            .map_err(explain)?;
        }
        Ok(Directory(directory))
    }

    /// The allowed directory that a path is in, and the rest of the path without links; `None` if it is in none.
    fn locate(&self, path: &Path) -> Option<(&AllowedDirectory, PathBuf)> {
        let real = resolve(path)?;
        let beneath = |allowed: &'_ AllowedDirectory| real.strip_prefix(&allowed.path).ok().map(Path::to_owned);
        self.directories.as_ref()?.iter().find_map(|allowed| Some((allowed, beneath(allowed)?)))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    IsMade,
    IsAnError,
}

impl Directory {
    /// Makes a file that does not exist yet.
    pub fn create_new(&self, name: &OsStr, mode: u32) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(&self.0, name, flags, Mode::from_raw_mode(mode))?))
    }

    /// Gives a file of this directory a name in another one, in place of what has it.
    pub fn rename(&self, from: &OsStr, directory: &Directory, to: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.0, from, &directory.0, to)?)
    }

    /// Removes a file.
    pub fn remove(&self, name: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }

    /// Removes a directory, if it is empty.
    pub fn remove_directory(&self, name: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::REMOVEDIR)?)
    }
}

/// A directory, to look up names in it.
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Opens a path that may not lead out of a directory.
fn open_beneath(directory: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::ResolveFlags;
        let limits = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        match rustix::fs::openat2(directory, path, flags, Mode::empty(), limits) {
            // An older kernel, or a sandbox that does not know the call.
            Err(Errno::NOSYS | Errno::PERM) => {}
            // Something was renamed at the same time, so that the kernel cannot tell.
            Err(Errno::AGAIN) => {}
            other => return other.map_err(explain),
        }
    }
    open_part_by_part(directory, path, flags)
}

/// The same without the kernel's help. Follows no links.
fn open_part_by_part(directory: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let mut current = rustix::fs::openat(directory, ".", DIRECTORY, Mode::empty())?;
    let mut parts = path.components().peekable();
    while let Some(part) = parts.next() {
        let Component::Normal(part) = part else { return Err(left()) };
        let flags = if parts.peek().is_some() { DIRECTORY } else { flags };
        current = rustix::fs::openat(&current, part, flags | OFlags::NOFOLLOW, Mode::empty()).map_err(explain)?;
    }
    Ok(current)
}

/// A path that has become another one since it was checked.
fn left() -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, "it leads out of the directories that ops may touch here")
}

fn explain(error: Errno) -> io::Error {
    match error {
        Errno::XDEV | Errno::LOOP => left(),
        other => other.into(),
    }
}

fn parent(file: &Path) -> &Path {
    match file.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
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

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::io::files::{TestDir, write_whole_within};

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

    fn read(access: &FileAccess, path: &Path) -> io::Result<String> {
        let mut text = String::new();
        access.open(path)?.read_to_string(&mut text)?;
        Ok(text)
    }

    #[test]
    fn what_is_exchanged_for_a_link_is_never_opened() {
        let dir = TestDir::new("race");
        for name in ["in", "in/real", "out"] {
            fs::create_dir(dir.join(name)).unwrap();
        }
        fs::write(dir.join("in/real/file"), "inside").unwrap();
        fs::write(dir.join("out/file"), "outside").unwrap();
        symlink(dir.join("in/real"), dir.join("in/way")).unwrap();
        let access = FileAccess::under([dir.join("in")]).unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    for target in ["out", "in/real"] {
                        symlink(dir.join(target), dir.join("in/next")).unwrap();
                        fs::rename(dir.join("in/next"), dir.join("in/way")).unwrap();
                    }
                }
            });
            for _ in 0..3000 {
                let path = dir.join("in/way/file");
                if let Ok(text) = read(&access, &path) {
                    assert_eq!(text, "inside");
                }
                let _ = write_whole_within(&access, &dir.join("in/way/new"), b"x", 0o600);
                let _ = access.list(&dir.join("in/way")).map(|names| assert!(names.contains(&"file".into())));
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(fs::read_dir(dir.join("out")).unwrap().count(), 1, "something was written outside");
    }

    #[test]
    fn a_path_is_followed_part_by_part_where_the_kernel_does_not_help() {
        let dir = TestDir::new("parts");
        fs::create_dir_all(dir.join("in/a")).unwrap();
        fs::write(dir.join("in/a/file"), "inside").unwrap();
        fs::write(dir.join("secret"), "outside").unwrap();
        symlink(dir.join("secret"), dir.join("in/a/link")).unwrap();
        symlink(dir.join(""), dir.join("in/up")).unwrap();
        let root = rustix::fs::open(dir.join("in"), DIRECTORY, Mode::empty()).unwrap();
        let open = |path: &str| open_part_by_part(root.as_fd(), Path::new(path), OFlags::RDONLY);
        assert!(open("a/file").is_ok());
        for outside in ["a/link", "up/secret", "../secret", "/etc/passwd"] {
            assert!(open(outside).is_err(), "{outside}");
            assert!(open_beneath(root.as_fd(), Path::new(outside), OFlags::RDONLY).is_err(), "{outside}");
        }
    }

    #[test]
    fn a_file_with_a_name_outside_is_refused_and_new_ones_are_private() {
        let dir = TestDir::new("links");
        fs::create_dir(dir.join("in")).unwrap();
        fs::File::create(dir.join("secret")).unwrap().write_all(b"secret").unwrap();
        fs::hard_link(dir.join("secret"), dir.join("in/mine")).unwrap();
        let access = FileAccess::under([dir.join("in")]).unwrap();
        let error = read(&access, &dir.join("in/mine")).unwrap_err();
        assert!(error.to_string().contains("hard links"), "{error}");
        // Writing replaces the name, and leaves the other file as it was.
        write_whole_within(&access, &dir.join("in/mine"), b"new", 0o600).unwrap();
        assert_eq!(fs::read(dir.join("secret")).unwrap(), b"secret");
        assert_eq!(read(&access, &dir.join("in/mine")).unwrap(), "new");
        assert_eq!(dir.join("in/mine").metadata().unwrap().mode() & 0o777, 0o600);
    }
}
