//! The index file: a sorted table of keys and values in LevelDB's format, as TensorFlow writes it.
//!
//! ```text
//!   data block … data block │ metaindex block │ index block │ footer
//!                             (empty)           last key of    where the other two are,
//!                                               each block     magic number
//! ```
//!
//! A block is a run of entries, each sharing a prefix of its key with the one before, then the offsets of those that do
//! not, then a type byte and a checksum. Nothing read here is trusted: lengths are checked against what is there before
//! anything is allocated for them.

use std::path::Path;

use kolo_core::{Error, Result};

use super::checksum::Checksum;

/// A block is closed when it has grown to this.
const BLOCK_BYTES: usize = 262_144;
/// Every so many entries of a data block, a key is written whole.
const RESTART_EVERY: usize = 16;
const MAGIC: u64 = 0xdb47_7524_8b80_fb57;
const FOOTER_BYTES: usize = 48;
/// Type byte and checksum.
const TRAILER_BYTES: usize = 5;

/// The bytes of a table with these entries, whose keys ascend.
pub fn write_table<'a>(entries: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) -> Vec<u8> {
    let mut out = Vec::new();
    let mut data = BlockBuilder::new(RESTART_EVERY);
    let mut index = BlockBuilder::new(1);
    // The block that was closed last, until the next key is known: its key in the index lies between the two.
    let mut closed: Option<(Vec<u8>, Handle)> = None;
    for (key, value) in entries {
        if let Some((last, handle)) = closed.take() {
            index.add(&separator(last, key), &handle.encode());
        }
        data.add(key, value);
        if data.n_bytes() >= BLOCK_BYTES {
            let last = data.last_key.clone();
            closed = Some((last, append_block(&mut out, &mut data)));
        }
    }
    if !data.is_empty() {
        let last = data.last_key.clone();
        closed = Some((last, append_block(&mut out, &mut data)));
    }
    let metaindex = append_block(&mut out, &mut BlockBuilder::new(RESTART_EVERY));
    if let Some((last, handle)) = closed {
        index.add(&successor(last), &handle.encode());
    }
    let index = append_block(&mut out, &mut index);
    let mut footer = [metaindex.encode(), index.encode()].concat();
    footer.resize(FOOTER_BYTES - 8, 0);
    out.extend_from_slice(&footer);
    out.extend_from_slice(&MAGIC.to_le_bytes());
    out
}

/// Calls `visit` with every entry of the table in `bytes`, in the order of their keys. `path` is for messages.
pub fn read_table(bytes: &[u8], path: &Path, mut visit: impl FnMut(&[u8], &[u8]) -> Result<()>) -> Result<()> {
    let damaged = |why: &str| Error::data_loss(format!("the index file {} is damaged: {why}", path.display()));
    let footer_at = bytes.len().checked_sub(FOOTER_BYTES).ok_or_else(|| damaged("it is shorter than its footer"))?;
    let (blocks, footer) = bytes.split_at(footer_at);
    if footer[FOOTER_BYTES - 8..] != MAGIC.to_le_bytes() {
        return Err(damaged("it does not end with the magic number of a table"));
    }
    let mut rest = &footer[..FOOTER_BYTES - 8];
    let index = Handle::decode(&mut rest)
        .and_then(|_metaindex| Handle::decode(&mut rest))
        .ok_or_else(|| damaged("its footer cannot be read"))?;
    let index = index.block(blocks).map_err(|why| damaged(&why))?;
    let mut last_key: Option<Vec<u8>> = None;
    each_entry(&index, |_, mut value| {
        let handle = Handle::decode(&mut value).ok_or_else(|| damaged("an entry of its index cannot be read"))?;
        let block = handle.block(blocks).map_err(|why| damaged(&why))?;
        each_entry(&block, |key, value| {
            if last_key.as_deref().is_some_and(|last| last >= key) {
                return Err(damaged("its keys do not ascend"));
            }
            last_key = Some(key.to_vec());
            visit(key, value)
        })
        .unwrap_or_else(|()| Err(damaged("a block cannot be read")))
    })
    .unwrap_or_else(|()| Err(damaged("its index cannot be read")))
}

/// Where a block is, without its trailer.
#[derive(Clone, Copy)]
struct Handle {
    offset: u64,
    size: u64,
}

impl Handle {
    fn encode(self) -> Vec<u8> {
        let mut out = Vec::new();
        push_varint(&mut out, self.offset);
        push_varint(&mut out, self.size);
        out
    }

    fn decode(bytes: &mut &[u8]) -> Option<Handle> {
        Some(Handle { offset: take_varint(bytes)?, size: take_varint(bytes)? })
    }

    /// The block's contents, its checksum verified.
    fn block(self, blocks: &[u8]) -> Result<std::borrow::Cow<'_, [u8]>, String> {
        let Handle { offset, size } = self;
        let find = || {
            let start = usize::try_from(offset).ok()?;
            let end = start.checked_add(usize::try_from(size).ok()?)?;
            blocks.get(start..end.checked_add(TRAILER_BYTES)?).map(|block| block.split_at(end - start))
        };
        let (contents, trailer) =
            find().ok_or_else(|| format!("a block of {size} bytes at {offset} is not in the file"))?;
        let mut checksum = Checksum::of(contents);
        checksum.add(&trailer[..1]);
        if trailer[1..] != checksum.masked().to_le_bytes() {
            return Err(format!("the checksum of the block at {offset} is wrong"));
        }
        match trailer[0] {
            0 => Ok(contents.into()),
            1 => unpack(contents).map(Into::into).ok_or_else(|| format!("the block at {offset} cannot be unpacked")),
            other => Err(format!("the block at {offset} is of type {other}, which is not known")),
        }
    }
}

/// Unpacks a snappy block, unless it says that it is larger than it can be.
fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    // Three bytes can stand for 64.
    const MOST_GROWTH: usize = 32;
    let n_bytes = snap::raw::decompress_len(packed).ok()?;
    if n_bytes > packed.len().checked_mul(MOST_GROWTH)? {
        return None;
    }
    snap::raw::Decoder::new().decompress_vec(packed).ok()
}

/// Calls `visit` with each entry of a block; `Err(())` if the block makes no sense, else what `visit` said.
fn each_entry(block: &[u8], mut visit: impl FnMut(&[u8], &[u8]) -> Result<()>) -> Result<Result<()>, ()> {
    let n_restarts_at = block.len().checked_sub(4).ok_or(())?;
    let n_restarts = u32::from_le_bytes(block[n_restarts_at..].try_into().map_err(drop)?) as usize;
    let end = n_restarts.checked_mul(4).and_then(|n| n_restarts_at.checked_sub(n)).ok_or(())?;
    let mut rest = &block[..end];
    let mut key: Vec<u8> = Vec::new();
    while !rest.is_empty() {
        let mut length = || take_varint(&mut rest).and_then(|n| usize::try_from(n).ok()).ok_or(());
        let (shared, unshared, n_value) = (length()?, length()?, length()?);
        let entry = unshared.checked_add(n_value).and_then(|n| rest.split_at_checked(n)).ok_or(())?;
        if shared > key.len() {
            return Err(());
        }
        key.truncate(shared);
        key.extend_from_slice(&entry.0[..unshared]);
        if let Err(error) = visit(&key, &entry.0[unshared..]) {
            return Ok(Err(error));
        }
        rest = entry.1;
    }
    Ok(Ok(()))
}

struct BlockBuilder {
    bytes: Vec<u8>,
    restarts: Vec<u32>,
    restart_every: usize,
    /// Entries since the last whole key.
    n_since_restart: usize,
    last_key: Vec<u8>,
}

impl BlockBuilder {
    fn new(restart_every: usize) -> BlockBuilder {
        BlockBuilder { bytes: Vec::new(), restarts: vec![0], restart_every, n_since_restart: 0, last_key: Vec::new() }
    }

    fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What it would take if it were closed now.
    fn n_bytes(&self) -> usize {
        self.bytes.len() + 4 * self.restarts.len() + 4
    }

    fn add(&mut self, key: &[u8], value: &[u8]) {
        let mut shared = 0;
        if self.n_since_restart < self.restart_every {
            shared = self.last_key.iter().zip(key).take_while(|(a, b)| a == b).count();
        } else {
            self.restarts.push(self.bytes.len() as u32);
            self.n_since_restart = 0;
        }
        for length in [shared, key.len() - shared, value.len()] {
            push_varint(&mut self.bytes, length as u64);
        }
        self.bytes.extend_from_slice(&key[shared..]);
        self.bytes.extend_from_slice(value);
        self.last_key = key.to_vec();
        self.n_since_restart += 1;
    }
}

/// Closes the block and appends it with its trailer; `block` is empty again.
fn append_block(out: &mut Vec<u8>, block: &mut BlockBuilder) -> Handle {
    let block = std::mem::replace(block, BlockBuilder::new(block.restart_every));
    let offset = out.len();
    out.extend_from_slice(&block.bytes);
    for restart in &block.restarts {
        out.extend_from_slice(&restart.to_le_bytes());
    }
    out.extend_from_slice(&(block.restarts.len() as u32).to_le_bytes());
    let size = out.len() - offset;
    out.push(0);
    let checksum = Checksum::of(&out[offset..]);
    out.extend_from_slice(&checksum.masked().to_le_bytes());
    Handle { offset: offset as u64, size: size as u64 }
}

/// A short key from `last` on that is before `next`.
fn separator(mut last: Vec<u8>, next: &[u8]) -> Vec<u8> {
    let differ = last.iter().zip(next).take_while(|(a, b)| a == b).count();
    if let (Some(&byte), Some(&limit)) = (last.get(differ), next.get(differ))
        && byte < 0xff
        && byte + 1 < limit
    {
        last[differ] = byte + 1;
        last.truncate(differ + 1);
    }
    last
}

/// A short key from `last` on.
fn successor(mut last: Vec<u8>) -> Vec<u8> {
    if let Some(at) = last.iter().position(|&byte| byte != 0xff) {
        last[at] += 1;
        last.truncate(at + 1);
    }
    last
}

/// Seven bits a byte, the low ones first; the top bit says that more follow.
pub fn push_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Takes a number off the front; `None` if there is none.
pub fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for (i, &byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f).checked_shl(7 * i as u32)?;
        if byte < 0x80 {
            *bytes = &bytes[i + 1..];
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut entries = Vec::new();
        read_table(bytes, Path::new("t.index"), |key, value| {
            entries.push((key.to_vec(), value.to_vec()));
            Ok(())
        })?;
        Ok(entries)
    }

    fn borrowed(entries: &[(Vec<u8>, Vec<u8>)]) -> impl Iterator<Item = (&[u8], &[u8])> {
        entries.iter().map(|(key, value)| (&**key, &**value))
    }

    #[test]
    fn the_smallest_tables() {
        assert_eq!(read(&write_table([])).unwrap(), []);
        let one = write_table([(&b""[..], &b"v"[..])]);
        assert_eq!(read(&one).unwrap(), [(vec![], b"v".to_vec())]);
    }

    #[test]
    fn tables_of_several_blocks_come_back() {
        let key = |i: usize| format!("layer_{i:05}/kernel").into_bytes();
        let entries: Vec<(Vec<u8>, Vec<u8>)> = (0..20_000).map(|i| (key(i), vec![i as u8; 40])).collect();
        let bytes = write_table(borrowed(&entries));
        assert!(bytes.len() > 3 * BLOCK_BYTES);
        assert_eq!(read(&bytes).unwrap(), entries);
    }

    #[test]
    fn index_keys_lie_between_blocks() {
        let separator = |a: &str, b: &str| String::from_utf8(separator(a.into(), b.as_bytes())).unwrap();
        assert_eq!(separator("abcde", "abxyz"), "abd");
        assert_eq!(separator("abc", "abd"), "abc");
        assert_eq!(separator("ab", "abc"), "ab");
        assert_eq!(successor(b"zb".to_vec()), b"{");
        assert_eq!(successor(vec![0xff, 0xff, 3, 4]), [0xff, 0xff, 4]);
        assert_eq!(successor(vec![0xff]), [0xff]);
    }

    #[test]
    fn snappy_blocks_are_read() {
        // One data block by hand: the builder's contents, packed.
        let mut data = BlockBuilder::new(RESTART_EVERY);
        data.add(b"a", &[7; 1000]);
        let mut plain = Vec::new();
        append_block(&mut plain, &mut data);
        let mut out = snap::raw::Encoder::new().compress_vec(&plain[..plain.len() - TRAILER_BYTES]).unwrap();
        let handle = Handle { offset: 0, size: out.len() as u64 };
        out.push(1);
        let checksum = Checksum::of(&out).masked();
        out.extend_from_slice(&checksum.to_le_bytes());
        let metaindex = append_block(&mut out, &mut BlockBuilder::new(RESTART_EVERY));
        let mut index = BlockBuilder::new(1);
        index.add(b"b", &handle.encode());
        let index = append_block(&mut out, &mut index);
        let mut footer = [metaindex.encode(), index.encode()].concat();
        footer.resize(40, 0);
        out.extend_from_slice(&footer);
        out.extend_from_slice(&MAGIC.to_le_bytes());
        assert_eq!(read(&out).unwrap(), [(b"a".to_vec(), vec![7; 1000])]);
        // A block that claims to be huge is refused before anything is made for it.
        assert_eq!(unpack(&[0xff, 0xff, 0xff, 0xff, 0x0f, 0, 0]), None);
    }

    #[test]
    fn every_changed_byte_that_matters_is_noticed() {
        let key = |i: usize| format!("v{i:02}").into_bytes();
        let entries: Vec<(Vec<u8>, Vec<u8>)> = (0..40).map(|i| (key(i), vec![i as u8; 9])).collect();
        let bytes = write_table(borrowed(&entries));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x40;
            match read(&changed) {
                Ok(found) => assert_eq!(found, entries, "byte {at}"),
                Err(error) => assert!(error.message().contains("t.index"), "{error}"),
            }
            assert!(read(&bytes[..at]).is_err(), "cut to {at}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300), magic: bool) {
            if magic {
                bytes.extend_from_slice(&MAGIC.to_le_bytes());
            }
            let _ = read(&bytes);
            let _ = each_entry(&bytes, |_, _| Ok(()));
        }

        #[test]
        fn any_entries_come_back(entries in proptest::collection::btree_map(
            proptest::collection::vec(proptest::num::u8::ANY, 0..12),
            proptest::collection::vec(proptest::num::u8::ANY, 0..40),
            0..60,
        )) {
            let bytes = write_table(entries.iter().map(|(key, value)| (&**key, &**value)));
            proptest::prop_assert_eq!(read(&bytes).unwrap(), entries.into_iter().collect::<Vec<_>>());
        }
    }
}
