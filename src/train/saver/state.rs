//! The `checkpoint` file of a directory, and the files of a checkpoint.

use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::time::UNIX_EPOCH;

use kolo_core::{Error, Result};
use kolo_graph::wire::{proto, text};
use kolo_ops::io::bundle::{Bundle, index_path};
use kolo_ops::io::files::{NewFile, file_error, write_whole};

/// What the file is called.
pub(super) const STATE_FILE: &str = "checkpoint";

/// What a directory's `checkpoint` file says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CheckpointState {
    /// The newest checkpoint.
    pub model_checkpoint_path: String,
    /// All that are kept, oldest first, the newest included.
    pub all_model_checkpoint_paths: Vec<String>,
}

/// The newest checkpoint of a directory, by its `checkpoint` file; `None` if it has none or its files are gone.
pub fn latest_checkpoint(dir: impl AsRef<Path>) -> Result<Option<String>> {
    let newest = checkpoint_state(dir)?.map(|state| state.model_checkpoint_path);
    Ok(newest.filter(|prefix| checkpoint_exists(prefix)))
}

/// Whether there is an index file of a checkpoint with this prefix.
pub fn checkpoint_exists(prefix: impl AsRef<Path>) -> bool {
    prefix.as_ref().to_str().is_some_and(|prefix| index_path(prefix).is_file())
}

/// What the directory's `checkpoint` file says, with paths that were relative to the directory joined to it; `None` if
/// there is no such file.
pub fn checkpoint_state(dir: impl AsRef<Path>) -> Result<Option<CheckpointState>> {
    let dir = dir.as_ref();
    let path = dir.join(STATE_FILE);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(file_error("cannot read", &path, &error)),
    };
    let damaged = |why: String| Error::data_loss(format!("{} is damaged: {why}", path.display()));
    let content = String::from_utf8(bytes).map_err(|_| damaged("it is not text".into()))?;
    let state: proto::CheckpointState = text::parse(&content).map_err(|error| damaged(error.to_string()))?;
    let join = |path: String| match Path::new(&path).is_absolute() {
        true => Ok(path),
        false => as_text(&dir.join(path)).map(str::to_owned),
    };
    Ok(Some(CheckpointState {
        model_checkpoint_path: join(state.model_checkpoint_path)?,
        all_model_checkpoint_paths: state.all_model_checkpoint_paths.into_iter().map(join).collect::<Result<_>>()?,
    }))
}

/// The checkpoints of a directory in the order in which to try them: those that the `checkpoint` file lists, newest first,
/// then the others that lie there, by step and time. If the file is missing or damaged while there are checkpoints, the log
/// says so. `None` if there is neither.
pub(super) fn candidates(dir: &Path) -> Result<Option<Vec<String>>> {
    let (listed, trouble) = match checkpoint_state(dir) {
        Ok(Some(state)) if !state.model_checkpoint_path.is_empty() => {
            let mut listed = vec![state.model_checkpoint_path];
            for prefix in state.all_model_checkpoint_paths.into_iter().rev() {
                if !listed.contains(&prefix) {
                    listed.push(prefix);
                }
            }
            (listed, None)
        }
        Ok(Some(_)) => (Vec::new(), Some("is empty".to_owned())),
        Ok(None) => (Vec::new(), Some("is missing".to_owned())),
        Err(error) => (Vec::new(), Some(format!("cannot be used ({error})"))),
    };
    let present = present(dir)?;
    if let (Some(trouble), Some(newest)) = (trouble, present.first()) {
        tracing::warn!(
            target: "kolo::checkpoint",
            "{} {trouble}; taking the newest whole checkpoint in the directory, of which there are {}, from {newest} on",
            dir.join(STATE_FILE).display(),
            present.len()
        );
    }
    let unlisted: Vec<String> = present.into_iter().filter(|prefix| !listed.iter().any(|l| same(l, prefix))).collect();
    let all: Vec<String> = listed.into_iter().chain(unlisted).collect();
    Ok(Some(all).filter(|all| !all.is_empty()))
}

/// Whether two prefixes name the same checkpoint, however they are written.
fn same(a: &str, b: &str) -> bool {
    let canonical = |prefix: &str| fs::canonicalize(index_path(prefix)).ok();
    a == b || canonical(a).is_some_and(|a| Some(a) == canonical(b))
}

/// The checkpoints whose index lies in the directory, newest first: by the step in their names, then by time.
fn present(dir: &Path) -> Result<Vec<String>> {
    let listing = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let entries = match fs::read_dir(listing) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(file_error("cannot list", listing, &error)),
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(base) = name.to_str().and_then(|name| name.strip_suffix(".index")) else { continue };
        let step = base.rsplit_once('-').and_then(|(_, step)| step.parse::<i64>().ok()).unwrap_or(-1);
        let prefix = as_text(&dir.join(base))?.to_owned();
        found.push((step, written_at(&prefix), prefix));
    }
    found.sort_by(|a, b| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)));
    Ok(found.into_iter().map(|(_, _, prefix)| prefix).collect())
}

/// An error that says why, unless checkpoints can be written to the directory, which is made.
pub(crate) fn check_writable(dir: &Path) -> Result<()> {
    let cannot = |error: Error| {
        let text = format!("checkpoints cannot be written to {}: {}", dir.display(), error.message());
        Error::failed_precondition(text)
    };
    // This makes the directory. Dropped without a name, so that it is removed again.
    let mut probe = NewFile::create(&dir.join(STATE_FILE)).map_err(cannot)?;
    let written = std::io::Write::write_all(probe.file(), b"probe");
    written.map_err(|error| cannot(file_error("cannot write", probe.target(), &error)))
}

/// Writes the directory's `checkpoint` file, as TensorFlow does: paths as they were given, or relative to the directory if
/// that is relative itself or `relative` asks for it.
pub(super) fn write_state(newest: &str, all: &[String], relative: bool) -> Result<()> {
    let dir = directory_of(newest);
    let written = |path: &str| match relative || !dir.is_absolute() {
        true => relative_to(Path::new(path), dir),
        false => path.to_owned(),
    };
    let state = proto::CheckpointState {
        model_checkpoint_path: written(newest),
        all_model_checkpoint_paths: all.iter().map(|path| written(path)).collect(),
        ..proto::CheckpointState::default()
    };
    write_whole(&dir.join(STATE_FILE), text::print(&state).as_bytes())
}

/// The directory that a prefix is in; empty for the working directory.
pub(super) fn directory_of(prefix: &str) -> &Path {
    Path::new(prefix).parent().unwrap_or(Path::new(""))
}

/// `path` as seen from `dir`. An absolute path seen from a relative directory stays as it is.
fn relative_to(path: &Path, dir: &Path) -> String {
    if path.is_absolute() != dir.is_absolute() {
        return path.display().to_string();
    }
    let parts = |path: &Path| {
        path.components()
            .filter(|part| *part != Component::CurDir)
            .map(|part| part.as_os_str().to_owned())
            .collect::<Vec<_>>()
    };
    let (path, dir) = (parts(path), parts(dir));
    let n_common = path.iter().zip(&dir).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n(OsStr::new(".."), dir.len() - n_common);
    up.chain(path[n_common..].iter().map(|part| part.as_os_str())).collect::<PathBuf>().display().to_string()
}

/// A path as the text that graphs carry.
pub(super) fn as_text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::invalid_argument(format!("the path {} is not valid UTF-8", path.display())))
}

/// An error that says what is wrong, unless the checkpoint's files are all there and as long as they should be.
pub(super) fn check_whole(prefix: &str) -> Result<()> {
    Bundle::open(prefix)?.check_files()
}

/// When the checkpoint was written, in seconds since 1970; 0 if that cannot be told.
pub(super) fn written_at(prefix: &str) -> f64 {
    let modified = fs::metadata(index_path(prefix)).and_then(|about| about.modified());
    modified.ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0.0, |since| since.as_secs_f64())
}

/// Removes the files of a checkpoint. The index goes first: what is left of a removal that was cut short does not look whole.
pub(super) fn remove_checkpoint(prefix: &str) -> Result<()> {
    let remove = |path: &Path| match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(file_error("cannot remove", path, &error)),
        _ => Ok(()),
    };
    remove(&index_path(prefix))?;
    let dir = directory_of(prefix);
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let base = Path::new(prefix).file_name().and_then(OsStr::to_str).unwrap_or_default();
    for entry in fs::read_dir(dir).map_err(|error| file_error("cannot list", dir, &error))?.flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(base));
        if rest.is_some_and(|rest| rest == ".meta" || is_data_suffix(rest)) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// `.data-00000-of-00001`.
fn is_data_suffix(text: &str) -> bool {
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = text.strip_prefix(".data-").and_then(|numbers| numbers.split_once("-of-"));
    numbers.is_some_and(|(shard, n_shards)| is_number(shard) && is_number(n_shards))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_seen_from_directories() {
        let seen = |path: &str, dir: &str| relative_to(Path::new(path), Path::new(dir));
        assert_eq!(seen("a/m-1", "a"), "m-1");
        assert_eq!(seen("m-1", ""), "m-1");
        assert_eq!(seen("./m-1", "."), "m-1");
        assert_eq!(seen("b/m-1", "a"), "../b/m-1");
        assert_eq!(seen("/x/a/m-1", "/x/a"), "m-1");
        assert_eq!(seen("/x/m-1", "a"), "/x/m-1");
    }

    #[test]
    fn only_data_files_look_like_data_files() {
        assert!(is_data_suffix(".data-00000-of-00001"));
        for other in [".data-0-of-1", ".data-00000-of-0000x", ".data-00000", ".index", "0.data-00000-of-00001"] {
            assert!(!is_data_suffix(other), "{other}");
        }
    }
}
