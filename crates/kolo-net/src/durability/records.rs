//! The file format of the journal: records that are checked and chained, and a reader that tells a torn tail from damage.
//!
//! ```text
//!   KOLOJRN2                                                              the file's first bytes
//!   "KREC" | number u64 | length u64 | checksum u32 | head checksum u32 | Record      any number of times
//! ```
//!
//! The first record is a snapshot of all variables; each later one is a step and has the next number. A checksum continues
//! the one of the record before it, so that a record that is missing, repeated or out of order is noticed. The head has a
//! checksum of its own: its length can be trusted, so a record that the end of the file cuts off is known to be a write that
//! a crash interrupted, which was never acknowledged. Everything else that does not match is damage.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use kolo_core::{Code, Error, Result};
use prost::Message as _;

use super::variables::Key;
use crate::wire::proto::VariableEntry;

pub(super) const MAGIC: &[u8; 8] = b"KOLOJRN2";

/// The first bytes of a journal of an earlier version, whose records were not chained.
const EARLIER_MAGIC: &[u8; 8] = b"KOLOJRN1";

const MARK: &[u8; 4] = b"KREC";
const N_HEAD: usize = 28;

/// The bytes that are read at a time when a damaged file is searched for further records.
const N_SEARCHED: usize = 1 << 20;

#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(message, repeated, tag = "1")]
    entry: Vec<VariableEntry>,
}

/// Where the chain of records has got to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    /// The number of the last record, which is the number of steps since the journal was begun.
    pub number: u64,
    checksum: u32,
}

impl Chain {
    /// Before the first record of a file.
    pub fn begin() -> Chain {
        Chain { number: 0, checksum: crc32c::crc32c(MAGIC) }
    }

    /// The bytes of the record with this number, and the chain after it.
    pub fn record(self, number: u64, entry: Vec<VariableEntry>) -> (Vec<u8>, Chain) {
        let record = Record { entry };
        let length = record.encoded_len();
        let mut bytes = Vec::with_capacity(N_HEAD + length);
        bytes.extend(MARK);
        bytes.extend(number.to_le_bytes());
        bytes.extend((length as u64).to_le_bytes());
        bytes.extend([0; 8]);
        record.encode_raw(&mut bytes);
        let checksum = crc32c::crc32c_append(self.checksum, &bytes[N_HEAD..]);
        bytes[20..24].copy_from_slice(&checksum.to_le_bytes());
        let of_head = crc32c::crc32c(&bytes[..24]);
        bytes[24..N_HEAD].copy_from_slice(&of_head.to_le_bytes());
        (bytes, Chain { number, checksum })
    }
}

/// What a file holds.
pub(super) struct JournalContents {
    /// The last values of all variables; `None` if the snapshot cannot be read.
    pub values: Option<BTreeMap<(usize, Key), VariableEntry>>,
    /// The number of the last record that was read.
    pub number: u64,
    pub ending: Ending,
}

/// How a file ends.
pub(super) enum Ending {
    /// With a complete record.
    Complete,
    /// With a part of a record that was being written when the process or the machine stopped.
    Torn { offset: u64 },
    /// With bytes that are not what was written.
    Damaged(Damage),
}

/// Bytes that are not what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Damage {
    /// Where the first record that cannot be used begins.
    pub offset: u64,
    reason: String,
    /// The first and the last acknowledged step that is lost, as far as the rest of the file tells.
    first_lost: u64,
    last_lost: u64,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Damage { offset, reason, first_lost, last_lost } = self;
        write!(f, "damaged at byte {offset}: {reason}. ")?;
        match (first_lost, last_lost) {
            (first, last) if first == last => write!(f, "Acknowledged step {first} of the journal is lost"),
            (first, last) => {
                write!(f, "{} acknowledged steps are lost, {first} to {last} of the journal", last - first + 1)
            }
        }
    }
}

struct Head {
    number: u64,
    length: u64,
    checksum: u32,
}

impl Head {
    /// `None` if the bytes are not a head.
    fn parse(bytes: &[u8; N_HEAD]) -> Option<Head> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let is_head = bytes[..4] == *MARK && u32_at(24) == crc32c::crc32c(&bytes[..24]);
        is_head.then(|| Head { number: u64_at(4), length: u64_at(12), checksum: u32_at(20) })
    }
}

/// Reads a file up to its end, or to the first record that cannot be used.
pub(super) fn read(path: &Path) -> Result<JournalContents> {
    let cannot = |error: std::io::Error| {
        Error::new(Code::DataLoss, format!("the journal '{}' cannot be read: {error}", path.display()))
    };
    let mut file = File::open(path).map_err(cannot)?;
    let n_bytes = file.metadata().map_err(cannot)?.len();
    let mut contents = JournalContents { values: None, number: 0, ending: Ending::Complete };
    let mut chain = Chain::begin();
    let mut at = 0;
    // A file gets its name when its snapshot is on the disk: one that ends before is damaged, not torn.
    let damage = |offset: u64, number: u64, is_first: bool, reason: String| {
        let last_lost = last_number(path, offset, n_bytes).unwrap_or(0);
        let first_lost = if is_first { 1 } else { number + 1 };
        Ending::Damaged(Damage { offset, reason, first_lost, last_lost: last_lost.max(first_lost) })
    };
    let mut magic = [0; MAGIC.len()];
    match file.read_exact(&mut magic) {
        Ok(()) if magic == *MAGIC => at += MAGIC.len() as u64,
        Ok(()) if magic == *EARLIER_MAGIC => {
            return Err(Error::failed_precondition(format!(
                "the journal '{}' was written by an earlier version of Kolo, which must save a checkpoint from it; then \
                 move the file away",
                path.display()
            )));
        }
        Ok(()) => contents.ending = damage(0, 0, true, "this is not the beginning of a journal".to_owned()),
        Err(error) => contents.ending = damage(0, 0, true, format!("the beginning cannot be read: {error}")),
    }
    while matches!(contents.ending, Ending::Complete) && at < n_bytes {
        let is_first = contents.values.is_none();
        match next(&mut file, n_bytes - at, chain, is_first) {
            Ok((record, after, length)) => {
                apply(record, contents.values.get_or_insert_default());
                (chain, contents.number) = (after, after.number);
                at += length;
            }
            Err(Unusable::CutOff) if !is_first => contents.ending = Ending::Torn { offset: at },
            Err(Unusable::CutOff) => {
                contents.ending = damage(at, contents.number, is_first, "the snapshot is cut off".to_owned());
            }
            Err(Unusable::Damaged(reason)) => contents.ending = damage(at, contents.number, is_first, reason),
        }
    }
    if contents.values.is_none() && matches!(contents.ending, Ending::Complete) {
        contents.ending = damage(at, 0, true, "the snapshot is missing".to_owned());
    }
    Ok(contents)
}

/// Why a record cannot be used.
enum Unusable {
    /// The file ends before the record does.
    CutOff,
    Damaged(String),
}

/// Reads the next record, of a file with `n_left` bytes. Returns also the chain after it, and its length in the file.
fn next(
    file: &mut File,
    n_left: u64,
    chain: Chain,
    is_first: bool,
) -> std::result::Result<(Record, Chain, u64), Unusable> {
    let damaged = |reason: &str| Unusable::Damaged(reason.to_owned());
    let unreadable = |error: std::io::Error| Unusable::Damaged(format!("it cannot be read: {error}"));
    if n_left < N_HEAD as u64 {
        return Err(Unusable::CutOff);
    }
    let mut head = [0; N_HEAD];
    file.read_exact(&mut head).map_err(unreadable)?;
    let Some(Head { number, length, checksum }) = Head::parse(&head) else {
        // A machine that stops may leave the length of a file without its bytes.
        let is_empty = head == [0; N_HEAD] && has_only_zeros(file).map_err(unreadable)?;
        return Err(if is_empty {
            Unusable::CutOff
        } else {
            damaged("the head of a record does not match its checksum")
        });
    };
    // Never more than there is in the file.
    let n_left = n_left - N_HEAD as u64;
    let Some(length) = usize::try_from(length).ok().filter(|&length| length as u64 <= n_left) else {
        return Err(Unusable::CutOff);
    };
    let mut bytes = vec![0; length];
    file.read_exact(&mut bytes).map_err(unreadable)?;
    if crc32c::crc32c_append(chain.checksum, &bytes) != checksum {
        return Err(damaged("a record does not match its checksum"));
    }
    if !is_first && number != chain.number + 1 {
        return Err(Unusable::Damaged(format!("record {number} follows record {}", chain.number)));
    }
    let record = Record::decode(bytes::Bytes::from(bytes)).map_err(|error| Unusable::Damaged(error.to_string()))?;
    Ok((record, Chain { number, checksum }, (N_HEAD + length) as u64))
}

fn apply(record: Record, values: &mut BTreeMap<(usize, Key), VariableEntry>) {
    for entry in record.entry {
        let key = (entry.device as usize, (entry.container.clone(), entry.name.clone()));
        match entry.value {
            Some(_) => drop(values.insert(key, entry)),
            None => drop(values.remove(&key)),
        }
    }
}

fn has_only_zeros(file: &mut File) -> std::io::Result<bool> {
    for byte in BufReader::new(file).bytes() {
        if byte? != 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The largest number of the records from an offset on that are complete: how many steps a damaged file had.
fn last_number(path: &Path, offset: u64, n_bytes: u64) -> Option<u64> {
    let mut file = File::open(path).ok()?;
    let (mut last, mut at) = (None, offset);
    let mut bytes = Vec::with_capacity(N_SEARCHED);
    while at + (N_HEAD as u64) <= n_bytes {
        bytes.clear();
        file.seek(SeekFrom::Start(at)).ok()?;
        // What cannot be read ends the search: the number is for a message.
        if (&mut file).take(N_SEARCHED as u64).read_to_end(&mut bytes).is_err() {
            break;
        }
        for (i, window) in bytes.windows(N_HEAD).enumerate().filter(|(_, window)| window[..4] == *MARK) {
            let head = window.try_into().ok().and_then(Head::parse);
            let is_complete = |head: &Head| head.length <= n_bytes - (at + (i + N_HEAD) as u64);
            last = last.max(head.filter(is_complete).map(|head| head.number));
        }
        // Windows overlap, so that no head is missed between two of them.
        at += (bytes.len().max(N_HEAD) - N_HEAD + 1) as u64;
    }
    last
}
