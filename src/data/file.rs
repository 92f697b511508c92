//! Files as readers see them: unzipped on the fly where they are gzipped, with errors that name file, byte, what was
//! expected and what was found.

use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use kolo_core::{Code, Error, Result};
use kolo_device::cpu::prefer_huge_pages;

/// What is reserved at once for bytes that a file merely promises; more is taken as they arrive.
const RESERVED_AT_ONCE: u64 = 64 << 20;

/// A file that is being read. Gzip is told by the first two bytes, never by the name.
pub(crate) struct Input {
    name: String,
    reader: Box<dyn Read + Send>,
    /// The next byte's place; in the unzipped contents for a gzipped file.
    at: u64,
    /// How long it was when it was opened; gzipped files do not tell.
    length: Option<u64>,
}

impl Input {
    /// Opens a file.
    pub(crate) fn open(path: &Path) -> Result<Input> {
        Input::open_with(path, starts_as_gzip)
    }

    /// Opens a file that is gzipped if `is_gzip` says so of its first bytes.
    pub(crate) fn open_with(path: &Path, is_gzip: fn(&[u8]) -> bool) -> Result<Input> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(|reason| io_error(&name, &reason))?;
        let length = file.metadata().map_err(|reason| io_error(&name, &reason))?.len();
        Input::new(name, BufReader::with_capacity(1 << 16, file), length, is_gzip)
    }

    /// Reads bytes that are there already; `name` is for errors.
    pub(crate) fn from_bytes(name: &str, bytes: impl AsRef<[u8]> + Send + 'static) -> Result<Input> {
        Input::from_bytes_with(name, bytes, starts_as_gzip)
    }

    /// As [`Input::from_bytes`]; they are gzipped if `is_gzip` says so of the first of them.
    pub(crate) fn from_bytes_with(
        name: &str,
        bytes: impl AsRef<[u8]> + Send + 'static,
        is_gzip: fn(&[u8]) -> bool,
    ) -> Result<Input> {
        let length = bytes.as_ref().len() as u64;
        Input::new(name.to_owned(), Cursor::new(bytes), length, is_gzip)
    }

    fn new(
        name: String,
        mut reader: impl io::BufRead + Send + 'static,
        length: u64,
        is_gzip: fn(&[u8]) -> bool,
    ) -> Result<Input> {
        let start = reader.fill_buf().map_err(|reason| io_error(&name, &reason))?;
        Ok(match is_gzip(start) {
            true => Input { name, reader: Box::new(MultiGzDecoder::new(reader)), at: 0, length: None },
            false => Input { name, reader: Box::new(reader), at: 0, length: Some(length) },
        })
    }

    /// The next byte's place.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Fills `buffer` with `what`.
    pub(crate) fn read_exact(&mut self, buffer: &mut [u8], what: &str) -> Result<()> {
        let found = self.read_up_to(buffer)?;
        if found < buffer.len() {
            return Err(self.cut_off(what, buffer.len() as u64, found as u64));
        }
        Ok(())
    }

    /// Fills as much of `buffer` as the file has.
    pub(crate) fn read_up_to(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let mut found = 0;
        while found < buffer.len() {
            match self.reader.read(&mut buffer[found..]) {
                Ok(0) => break,
                Ok(n) => found += n,
                Err(reason) if reason.kind() == io::ErrorKind::Interrupted => {}
                Err(reason) => return Err(self.unreadable(found as u64, &reason)),
            }
        }
        self.at += found as u64;
        Ok(found)
    }

    /// The next `n` bytes, which are `what`. A promise that the file does not keep costs little memory.
    pub(crate) fn read_bytes(&mut self, n: u64, what: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        // A file may have grown since it was opened, so its length decides about memory only.
        let left = self.length.map_or(RESERVED_AT_ONCE, |length| length.saturating_sub(self.at));
        let reserve = usize::try_from(n.min(left).min(RESERVED_AT_ONCE)).unwrap_or(0);
        bytes.try_reserve_exact(reserve).map_err(|_| {
            Error::resource_exhausted(format!("{}: no memory for {what}, {n} bytes at byte {}", self.name, self.at))
        })?;
        prefer_huge_pages(&mut bytes);
        let read = (&mut self.reader).take(n).read_to_end(&mut bytes);
        if let Err(reason) = read {
            return Err(self.unreadable(bytes.len() as u64, &reason));
        }
        let found = bytes.len() as u64;
        if found < n {
            return Err(self.cut_off(what, n, found));
        }
        self.at += found;
        Ok(bytes)
    }

    /// Everything that is left, at most `limit` bytes.
    pub(crate) fn read_rest(&mut self, limit: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = (&mut self.reader).take(limit.saturating_add(1)).read_to_end(&mut bytes);
        if let Err(reason) = read {
            return Err(self.unreadable(bytes.len() as u64, &reason));
        }
        if bytes.len() as u64 > limit {
            return Err(Error::resource_exhausted(format!(
                "{}: more than the {limit} bytes that are read of such a file",
                self.name
            )));
        }
        self.at += bytes.len() as u64;
        Ok(bytes)
    }

    /// Nothing may follow. For a gzipped file this also checks its checksum.
    pub(crate) fn expect_end(&mut self, after: &str) -> Result<()> {
        match self.read_up_to(&mut [0])? {
            0 => Ok(()),
            _ => Err(self.wrong_at(self.at - 1, &format!("the end of the file after {after}"), "more bytes")),
        }
    }

    /// An error about the bytes at `at`.
    pub(crate) fn wrong_at(&self, at: u64, expected: &str, found: &str) -> Error {
        Error::data_loss(format!("{}: expected {expected} at byte {at}, found {found}", self.name))
    }

    fn cut_off(&self, what: &str, n: u64, found: u64) -> Error {
        Error::data_loss(format!(
            "{}: expected {what}, {n} bytes from byte {}, found the end of the file after {found} of them; the file is cut off",
            self.name, self.at
        ))
    }

    fn unreadable(&self, further: u64, reason: &io::Error) -> Error {
        io_error(&self.name, reason).and(format_args!(" (at byte {})", self.at.saturating_add(further)))
    }
}

fn starts_as_gzip(start: &[u8]) -> bool {
    start.starts_with(&[0x1f, 0x8b])
}

/// An operating system's error about a file, with the code that says whose move is next.
pub(crate) fn io_error(name: &str, reason: &io::Error) -> Error {
    let code = match reason.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory => Code::NotFound,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Code::PermissionDenied,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::OutOfMemory => {
            Code::ResourceExhausted
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => Code::DataLoss,
        io::ErrorKind::AlreadyExists => Code::AlreadyExists,
        _ => Code::Unavailable,
    };
    Error::new(code, format!("{name}: {reason}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn zipped_or_not_the_same_bytes_come() {
        for bytes in [b"hello".to_vec(), gzip(b"hello")] {
            let mut input = Input::from_bytes("x", bytes).unwrap();
            assert_eq!(input.read_bytes(2, "the head").unwrap(), b"he");
            let mut rest = [0; 3];
            input.read_exact(&mut rest, "the tail").unwrap();
            assert_eq!(&rest, b"llo");
            input.expect_end("the tail").unwrap();
        }
    }

    #[test]
    fn a_promise_that_is_not_kept_names_file_byte_and_both_sizes() {
        for bytes in [b"hello".to_vec(), gzip(b"hello")] {
            let mut input = Input::from_bytes("dir/x", bytes).unwrap();
            input.read_bytes(1, "a").unwrap();
            let error = input.read_bytes(u64::MAX, "pixels").unwrap_err();
            assert_eq!(error.code(), Code::DataLoss);
            assert_eq!(
                error.message(),
                "dir/x: expected pixels, 18446744073709551615 bytes from byte 1, found the end of the file after 4 of \
                 them; the file is cut off"
            );
        }
    }

    #[test]
    fn damage_inside_a_zipped_file_is_found() {
        let whole = gzip(&[7; 1000]);
        for cut in 2..whole.len() {
            let mut input = Input::from_bytes("x", whole[..cut].to_vec()).unwrap();
            assert!(input.read_bytes(1000, "data").and_then(|_| input.expect_end("data")).is_err(), "cut at {cut}");
        }
        let mut wrong = whole.clone();
        let n = wrong.len();
        wrong[n - 5] ^= 1;
        let mut input = Input::from_bytes("x", wrong).unwrap();
        let error = input.read_bytes(1000, "data").and_then(|_| input.expect_end("data")).unwrap_err();
        assert_eq!(error.code(), Code::DataLoss, "{error}");
    }

    #[test]
    fn a_missing_file_is_not_found() {
        let error = Input::open(Path::new("no/such/file")).err().unwrap();
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.message().starts_with("no/such/file: "), "{error}");
    }
}
