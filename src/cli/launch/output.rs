//! What processes say: shown with their rank before it, kept in files, and the last lines of each in memory.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use crate::{Error, Result};

/// So many of the last lines of a process are shown when it fails.
const LAST: usize = 20;

/// The lines of all processes.
pub struct Output {
    processes: Vec<OfOne>,
    width: usize,
}

#[derive(Default)]
struct OfOne {
    log: Option<File>,
    last: VecDeque<String>,
}

impl Output {
    /// For the ranks `first` to `first + n`, of so many. Makes the files.
    pub fn new(n: usize, first: usize, size: usize, dir: Option<&Path>) -> Result<Output> {
        let failed = |path: &Path, error: std::io::Error| {
            Error::failed_precondition(format!("--log-dir: '{}' cannot be written: {error}", path.display()))
        };
        if let Some(dir) = dir {
            std::fs::create_dir_all(dir).map_err(|error| failed(dir, error))?;
        }
        let of_one = |i: usize| {
            let path = dir.map(|dir| dir.join(format!("rank-{}.log", first + i)));
            let log = path.map(|path| File::create(&path).map_err(|error| failed(&path, error))).transpose()?;
            Ok(OfOne { log, last: VecDeque::new() })
        };
        let width = size.saturating_sub(1).to_string().len();
        Ok(Output { processes: (0..n).map(of_one).collect::<Result<_>>()?, width })
    }

    /// Shows and keeps a line of process `i`, whose rank is `rank`.
    pub fn line(&mut self, i: usize, rank: usize, is_error: bool, text: &str) {
        let Some(of) = self.processes.get_mut(i) else { return };
        if of.last.len() == LAST {
            of.last.pop_front();
        }
        of.last.push_back(text.to_owned());
        // A full disk, or a reader that has closed the pipe, does not end a training.
        if let Some(log) = &mut of.log {
            let _ = writeln!(log, "{text}");
        }
        let width = self.width;
        let _ = match is_error {
            false => writeln!(std::io::stdout(), "[{rank:width$}] {text}"),
            true => writeln!(std::io::stderr(), "[{rank:width$}] {text}"),
        };
    }

    /// The last lines of a process.
    pub fn last(&self, i: usize) -> impl Iterator<Item = &str> {
        self.processes.get(i).into_iter().flat_map(|of| of.last.iter().map(String::as_str))
    }
}
