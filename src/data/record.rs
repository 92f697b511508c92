//! TFRecord files: records one after the other, each with its length and two checksums. TensorFlow keeps training data and
//! events in them.
//!
//! A record is its length (8 bytes, little-endian), the masked CRC-32C of those, the data, and the masked CRC-32C of them.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use kolo_core::Result;

use super::file::{Input, io_error};

/// The largest record that is read unless [`RecordReader::max_bytes`] says otherwise.
const MAX_RECORD: u64 = 1 << 30;

const HEADER: usize = 12;

/// The records of a file, in order. Each is checked before it is handed out.
///
/// ```no_run
/// for record in kolo::data::record::read("train.tfrecord")? {
///     println!("{} bytes", record?.len());
/// }
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct RecordReader {
    input: Input,
    max_bytes: u64,
    n_read: u64,
    is_done: bool,
}

/// Opens a TFRecord file, gzipped or not.
pub fn read(path: impl AsRef<Path>) -> Result<RecordReader> {
    Ok(RecordReader::new(Input::open_with(path.as_ref(), is_gzip)?))
}

/// Reads records from memory, gzipped or not; `name` is for errors.
pub fn read_bytes(name: &str, bytes: impl AsRef<[u8]> + Send + 'static) -> Result<RecordReader> {
    Ok(RecordReader::new(Input::from_bytes_with(name, bytes, is_gzip)?))
}

/// A record of 35,615 bytes begins with gzip's magic number; only its checksum tells.
fn is_gzip(start: &[u8]) -> bool {
    let is_record = |header: &[u8; HEADER]| length_of(header).is_ok();
    start.starts_with(&[0x1f, 0x8b]) && !start.first_chunk().is_some_and(is_record)
}

/// The length in a header; without it if the checksum is wrong.
fn length_of(header: &[u8; HEADER]) -> Result<u64, (u32, u32)> {
    let [l0, l1, l2, l3, l4, l5, l6, l7, c0, c1, c2, c3] = *header;
    let length = [l0, l1, l2, l3, l4, l5, l6, l7];
    match (u32::from_le_bytes([c0, c1, c2, c3]), masked_crc(&length)) {
        (stored, computed) if stored == computed => Ok(u64::from_le_bytes(length)),
        wrong => Err(wrong),
    }
}

impl RecordReader {
    fn new(input: Input) -> RecordReader {
        RecordReader { input, max_bytes: MAX_RECORD, n_read: 0, is_done: false }
    }

    /// Refuses records of more than `n` bytes; 1 GiB if not said.
    pub fn max_bytes(mut self, n: u64) -> RecordReader {
        self.max_bytes = n;
        self
    }

    fn next_record(&mut self) -> Result<Option<Vec<u8>>> {
        let number = self.n_read;
        let start = self.input.at();
        let mut header = [0; HEADER];
        match self.input.read_up_to(&mut header)? {
            0 => return Ok(None),
            HEADER => {}
            n => {
                return Err(self.input.wrong_at(
                    start,
                    &format!("12 bytes before record {number}"),
                    &format!("only {n}"),
                ));
            }
        }
        let length = length_of(&header).map_err(|(stored, computed)| {
            let expected = format!("the length of record {number} with checksum {computed:08x}");
            self.input.wrong_at(start, &expected, &format!("{stored:08x}; is it a TFRecord file?"))
        })?;
        if length > self.max_bytes {
            let expected = format!("a record {number} of at most {} bytes", self.max_bytes);
            return Err(self.input.wrong_at(start, &expected, &length.to_string()));
        }
        let data = self.input.read_bytes(length, &format!("the data of record {number}"))?;
        let mut crc = [0; 4];
        self.input.read_exact(&mut crc, &format!("the checksum of record {number}"))?;
        let (stored, computed) = (u32::from_le_bytes(crc), masked_crc(&data));
        if stored != computed {
            let expected = format!("data of record {number} with checksum {stored:08x}");
            return Err(self.input.wrong_at(
                start + HEADER as u64,
                &expected,
                &format!("{computed:08x}; they are damaged"),
            ));
        }
        self.n_read += 1;
        Ok(Some(data))
    }
}

impl Iterator for RecordReader {
    type Item = Result<Vec<u8>>;

    fn next(&mut self) -> Option<Result<Vec<u8>>> {
        if self.is_done {
            return None;
        }
        let record = self.next_record();
        self.is_done = !matches!(record, Ok(Some(_)));
        record.transpose()
    }
}

/// Writes a TFRecord file.
///
/// ```no_run
/// let mut file = kolo::data::record::RecordWriter::create("out.tfrecord")?;
/// file.write(b"first")?;
/// file.finish()?;
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct RecordWriter<W: Write> {
    name: String,
    writer: W,
}

impl RecordWriter<BufWriter<File>> {
    /// Creates a file, or empties it if it exists.
    pub fn create(path: impl AsRef<Path>) -> Result<RecordWriter<BufWriter<File>>> {
        let name = path.as_ref().display().to_string();
        let file = File::create(path).map_err(|reason| io_error(&name, &reason))?;
        Ok(RecordWriter { name, writer: BufWriter::with_capacity(1 << 16, file) })
    }
}

impl<W: Write> RecordWriter<W> {
    /// Writes records to `writer`; `name` is for errors.
    pub fn new(name: &str, writer: W) -> RecordWriter<W> {
        RecordWriter { name: name.to_owned(), writer }
    }

    /// Writes one record.
    pub fn write(&mut self, data: &[u8]) -> Result<()> {
        let (header, footer) = frame(data);
        [header.as_slice(), data, &footer]
            .iter()
            .try_for_each(|part| self.writer.write_all(part))
            .map_err(|reason| io_error(&self.name, &reason))
    }

    /// Writes out what is buffered and gives the writer back.
    pub fn finish(mut self) -> Result<W> {
        self.writer.flush().map_err(|reason| io_error(&self.name, &reason))?;
        Ok(self.writer)
    }
}

/// Adds a record to `buffer`.
pub(crate) fn append(buffer: &mut Vec<u8>, data: &[u8]) {
    let (header, footer) = frame(data);
    buffer.extend_from_slice(&header);
    buffer.extend_from_slice(data);
    buffer.extend_from_slice(&footer);
}

/// What is written before the data, and after them.
fn frame(data: &[u8]) -> ([u8; HEADER], [u8; 4]) {
    let length = (data.len() as u64).to_le_bytes();
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&length);
    header[8..].copy_from_slice(&masked_crc(&length).to_le_bytes());
    (header, masked_crc(data).to_le_bytes())
}

/// A CRC-32C, rotated and moved, so that the checksum of data that hold checksums is a good one too.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Code;

    use super::*;

    fn written(records: &[&[u8]]) -> Vec<u8> {
        let mut writer = RecordWriter::new("memory", Vec::new());
        records.iter().for_each(|record| writer.write(record).unwrap());
        writer.finish().unwrap()
    }

    #[test]
    fn a_record_is_framed_as_tensorflow_frames_it() {
        // Written by TensorFlow 2.21's TFRecordWriter.
        let expected = b"\x05\0\0\0\0\0\0\0\xea\xb2\x04\x3ehello\xbb\x1f\x1c\x19";
        let found = written(&[b"hello"]);
        assert_eq!(found, expected);
        let mut appended = Vec::new();
        append(&mut appended, b"hello");
        assert_eq!(appended, found);
    }

    #[test]
    fn records_come_back_and_every_cut_but_between_them_is_an_error() {
        let bytes = written(&[b"one", b"", b"three"]);
        let read = |bytes: &[u8]| read_bytes("x", bytes.to_vec()).unwrap().collect::<Result<Vec<_>>>();
        assert_eq!(read(&bytes).unwrap(), [b"one".to_vec(), b"".to_vec(), b"three".to_vec()]);
        let ends = [0, 19, 35, bytes.len()];
        for cut in 0..bytes.len() {
            assert_eq!(read(&bytes[..cut]).is_ok(), ends.contains(&cut), "cut at {cut}");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            let error = read(&damaged).unwrap_err();
            assert_eq!(error.code(), Code::DataLoss, "byte {at}");
        }
    }

    #[test]
    fn errors_say_which_record_and_where() {
        let mut bytes = written(&[b"one", b"two"]);
        bytes[19 + 12] ^= 1;
        let mut reader = read_bytes("x.tfrecord", bytes).unwrap();
        reader.next().unwrap().unwrap();
        let error = reader.next().unwrap().unwrap_err();
        assert!(error.message().starts_with("x.tfrecord: expected data of record 1 with checksum "), "{error}");
        assert!(error.message().contains("at byte 31, found"), "{error}");
        assert!(reader.next().is_none());
        let large = read_bytes("x", written(&[&[0; 100]])).unwrap().max_bytes(99).next().unwrap().unwrap_err();
        assert_eq!(large.message(), "x: expected a record 0 of at most 99 bytes at byte 0, found 100");
        let other = read_bytes("x", b"PK\x03\x04 and more".to_vec()).unwrap().next().unwrap().unwrap_err();
        assert!(other.message().ends_with("is it a TFRecord file?"), "{other}");
    }

    #[test]
    fn a_record_that_looks_zipped_is_not_unzipped() {
        let bytes = written(&[&vec![1; 0x8b1f]]);
        assert_eq!(bytes[..2], [0x1f, 0x8b]);
        assert_eq!(read_bytes("x", bytes).unwrap().next().unwrap().unwrap().len(), 0x8b1f);
    }
}
