//! One piece of work of a reader: a file, from which records are taken one by one.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use kolo_core::{Code, Error, Result};

use crate::io::FileAccess;
use crate::io::bundle::checksum::Checksum;
use crate::io::files::file_error;
use crate::io::whole_file::contents;

/// What a reader reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// Records with lengths and checksums.
    TfRecord(Compression),
    /// Lines, the first so many of which are skipped.
    Lines(usize),
    /// Files as they are.
    WholeFiles,
    /// Records of one size between a header and a footer.
    Fixed(FixedLength),
    /// The work itself: nothing is read.
    Identity,
}

/// How a file is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// As zlib does it.
    Zlib,
    /// As gzip does it.
    Gzip,
}

impl Compression {
    /// From an attribute.
    pub fn parse(name: &str) -> Result<Compression> {
        match name {
            "" => Ok(Compression::None),
            "ZLIB" => Ok(Compression::Zlib),
            "GZIP" => Ok(Compression::Gzip),
            other => {
                Err(Error::invalid_argument(format!("compression '{other}' is not known; there are ZLIB and GZIP")))
            }
        }
    }

    fn open(self, file: File) -> Box<dyn Read + Send> {
        match self {
            Compression::None => Box::new(BufReader::new(file)),
            Compression::Zlib => Box::new(BufReader::new(flate2::read::ZlibDecoder::new(file))),
            Compression::Gzip => Box::new(BufReader::new(flate2::read::MultiGzDecoder::new(file))),
        }
    }
}

/// Sizes of a file with records of one size, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedLength {
    /// Skipped at the start.
    pub header: u64,
    /// Of one record.
    pub record: u64,
    /// Left at the end.
    pub footer: u64,
    /// From the start of one record to that of the next.
    pub hop: u64,
    /// How the file is packed.
    pub compression: Compression,
}

/// A record and its key.
pub type Record = (Bytes, Bytes);

/// Work that was begun.
pub struct Work {
    name: Bytes,
    path: PathBuf,
    access: FileAccess,
    source: Source,
}

enum Source {
    Records { reader: Box<dyn Read + Send>, at: u64 },
    Lines { reader: BufReader<File>, number: u64 },
    Whole { taken: bool },
    Fixed { reader: FixedReader, next: u64 },
    Identity { taken: bool },
}

/// A file in its place, or one that was unpacked.
enum FixedReader {
    File { file: File, size: u64 },
    Memory(Vec<u8>),
}

/// A packed file of a few bytes can become this large and no larger.
const MOST_BYTES: u64 = 1 << 30;

impl Work {
    /// Opens the file called `name`.
    pub fn open(format: &Format, name: Bytes, path: PathBuf, access: &FileAccess) -> Result<Work> {
        let open = || access.open(&path).map_err(|error| file_error("cannot read", &path, &error));
        let source = match format {
            Format::TfRecord(compression) => Source::Records { reader: compression.open(open()?), at: 0 },
            Format::Lines(skipped) => {
                let mut reader = BufReader::new(open()?);
                let mut number = 0;
                let mut line = Vec::new();
                while number < *skipped as u64 && read_line(&mut reader, &mut line, &path)? {
                    number += 1;
                    line.clear();
                }
                Source::Lines { reader, number }
            }
            Format::WholeFiles => Source::Whole { taken: false },
            Format::Fixed(sizes) => {
                let file = open()?;
                let reader = match sizes.compression {
                    Compression::None => {
                        let about = file.metadata().map_err(|error| file_error("cannot read", &path, &error))?;
                        FixedReader::File { file, size: about.len() }
                    }
                    packed => {
                        let mut bytes = Vec::new();
                        let n = packed.open(file).take(MOST_BYTES + 1).read_to_end(&mut bytes);
                        let n = n.map_err(|error| broken(&path, &error))?;
                        if n as u64 > MOST_BYTES {
                            return Err(Error::resource_exhausted(format!(
                                "{} unpacks to more than {MOST_BYTES} bytes",
                                path.display()
                            )));
                        }
                        FixedReader::Memory(bytes)
                    }
                };
                Source::Fixed { reader, next: 0 }
            }
            Format::Identity => Source::Identity { taken: false },
        };
        Ok(Work { name, path, access: access.clone(), source })
    }

    fn key(&self, at: u64) -> Bytes {
        [self.name.as_ref(), format!(":{at}").as_bytes()].concat().into()
    }

    /// The next record; `None` at the end.
    pub fn next(&mut self, format: &Format) -> Result<Option<Record>> {
        match &mut self.source {
            Source::Records { reader, at } => {
                let start = *at;
                let Some(record) = read_record(reader, start, &self.path)? else { return Ok(None) };
                *at = start + record.len() as u64 + OVERHEAD;
                Ok(Some((self.key(start), record)))
            }
            Source::Lines { reader, number } => {
                let mut line = Vec::new();
                if !read_line(reader, &mut line, &self.path)? {
                    return Ok(None);
                }
                *number += 1;
                let number = *number;
                Ok(Some((self.key(number), line.into())))
            }
            Source::Whole { taken } => {
                if std::mem::replace(taken, true) {
                    return Ok(None);
                }
                Ok(Some((self.name.clone(), contents(&self.path, &self.access)?.into())))
            }
            Source::Fixed { reader, next } => {
                let Format::Fixed(sizes) = format else { return Ok(None) };
                let number = *next;
                *next += 1;
                let record = reader.record(number, sizes).map_err(|error| broken(&self.path, &error))?;
                Ok(record.map(|record| (self.key(number), record)))
            }
            Source::Identity { taken } => {
                if std::mem::replace(taken, true) {
                    return Ok(None);
                }
                Ok(Some((self.name.clone(), self.name.clone())))
            }
        }
    }
}

impl FixedReader {
    /// Record `number`; `None` if it would reach into the footer.
    fn record(&mut self, number: u64, sizes: &FixedLength) -> std::io::Result<Option<Bytes>> {
        let size = match self {
            FixedReader::File { size, .. } => *size,
            FixedReader::Memory(bytes) => bytes.len() as u64,
        };
        let start = number.checked_mul(sizes.hop).and_then(|at| at.checked_add(sizes.header));
        let end = start.and_then(|start| start.checked_add(sizes.record));
        let (Some(start), Some(end)) = (start, end) else { return Ok(None) };
        if size.checked_sub(sizes.footer).is_none_or(|last| end > last) {
            return Ok(None);
        }
        match self {
            FixedReader::File { file, .. } => {
                file.seek(SeekFrom::Start(start))?;
                let mut record = vec![0; sizes.record as usize];
                file.read_exact(&mut record)?;
                Ok(Some(record.into()))
            }
            FixedReader::Memory(bytes) => Ok(Some(Bytes::copy_from_slice(&bytes[start as usize..end as usize]))),
        }
    }
}

fn broken(path: &Path, error: &std::io::Error) -> Error {
    Error::new(Code::DataLoss, format!("cannot read {}: {error}", path.display()))
}

/// A line without its end; false if there is none.
fn read_line(reader: &mut BufReader<File>, line: &mut Vec<u8>, path: &Path) -> Result<bool> {
    let n = reader.read_until(b'\n', line).map_err(|error| file_error("cannot read", path, &error))?;
    if line.last() == Some(&b'\n') {
        line.pop();
    }
    // As in TensorFlow, which ends lines as Windows does too.
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    Ok(n > 0)
}

/// Bytes of a record besides its contents: length, and two checksums.
const OVERHEAD: u64 = 8 + 4 + 4;

fn read_record(reader: &mut dyn Read, at: u64, path: &Path) -> Result<Option<Bytes>> {
    let lost = |what: &str| Error::new(Code::DataLoss, format!("{what} record at {at} in {}", path.display()));
    let mut head = Vec::new();
    reader.take(12).read_to_end(&mut head).map_err(|error| broken(path, &error))?;
    if head.is_empty() {
        return Ok(None);
    }
    let Some((length, sum)) = head.split_at_checked(8).filter(|(_, sum)| sum.len() == 4) else {
        return Err(lost("truncated"));
    };
    let is_sum = |sum: &[u8], of: &[u8]| sum == Checksum::of(of).masked().to_le_bytes();
    if !is_sum(sum, length) {
        return Err(lost("corrupted"));
    }
    let length = length.iter().rev().fold(0u64, |all, &byte| all << 8 | u64::from(byte));
    // Read as it comes, so that a length alone does not make us allocate.
    let mut data = Vec::new();
    let total = length.checked_add(4).ok_or_else(|| lost("corrupted"))?;
    let n = reader.take(total).read_to_end(&mut data).map_err(|error| broken(path, &error))?;
    if n as u64 != total {
        return Err(lost("truncated"));
    }
    let sum = data.split_off(length as usize);
    if !is_sum(&sum, &data) {
        return Err(lost("corrupted"));
    }
    Ok(Some(data.into()))
}
