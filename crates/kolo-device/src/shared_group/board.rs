//! The records of all ranks of a group, in a file in memory: that of the group itself, or one of a rank that has no memory in
//! common with others, and keeps there what they tell.
//!
//! Who may read the memory of a process can find the file among its descriptors: nothing has to be asked of a process that may
//! not be able to answer, and nothing is left behind when the last one ends.

use std::fs::File;
use std::mem::size_of;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use kolo_core::{Error, Result};

use super::record::RankRecord;
use super::{ALIGNMENT, MAGIC, SharedGroup, header, no_memory};
use crate::SharedMap;

/// The file of a rank that shares no memory with others.
const ALONE_MAGIC: u64 = u64::from_le_bytes(*b"koloback");

/// More ranks than any group has.
const MOST_RANKS: usize = 1 << 16;

/// The records of all ranks of a group.
pub struct RankBoard {
    map: SharedMap,
    /// Kept open by those whom it is about, so that others find it.
    _file: Option<File>,
    /// Device and number of the file.
    id: (u64, u64),
    records_start: usize,
    n_ranks: usize,
}

/// Which group a board is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BoardOf {
    /// All ranks write to this one file: its number.
    Shared(u64, u64),
    /// A rank's own, of a group with this name.
    Rank {
        /// The group.
        group: [u64; 2],
        /// The rank whose process writes it.
        rank: usize,
    },
}

impl RankBoard {
    /// A board of rank `rank` alone, in a group that all its ranks know by `group`.
    pub fn alone(n_ranks: usize, rank: usize, group: [u8; 16]) -> Result<RankBoard> {
        let failed =
            |error: std::io::Error| Error::resource_exhausted(format!("no file in memory for a group: {error}"));
        let file = SharedGroup::anonymous_file().map_err(failed)?;
        let n_bytes = size_of::<super::Header>().next_multiple_of(128) + n_ranks * size_of::<RankRecord>();
        let map = SharedMap::create(&file, n_bytes.next_multiple_of(ALIGNMENT)).map_err(failed)?;
        let header = header(&map);
        header.n_ranks.store(n_ranks as u32, Ordering::Relaxed);
        header.ended_by.store(rank as u32, Ordering::Relaxed);
        for (to, from) in header.group.iter().zip(group.chunks(8)) {
            to.store(from.try_into().map_or(0, u64::from_le_bytes), Ordering::Relaxed);
        }
        header.magic.store(ALONE_MAGIC, Ordering::Release);
        drop(map);
        RankBoard::open(file)
    }

    /// The board in a file: that of a group in shared memory, or of a rank alone.
    pub fn open(file: File) -> Result<RankBoard> {
        let refused = |why: &str| Error::invalid_argument(format!("the file of a group {why}"));
        let metadata = file.metadata().map_err(|error| refused(&format!("cannot be read: {error}")))?;
        let n_bytes = metadata.len() as usize;
        if n_bytes < ALIGNMENT {
            return Err(refused("is too short"));
        }
        let failed = |error: std::io::Error| no_memory(&error, n_bytes);
        let head = SharedMap::open(&file, ALIGNMENT).map_err(failed)?;
        let n_ranks = header(&head).n_ranks.load(Ordering::Relaxed) as usize;
        if n_ranks == 0 || n_ranks > MOST_RANKS {
            return Err(refused("is damaged"));
        }
        let records_start = match header(&head).magic.load(Ordering::Acquire) {
            MAGIC => SharedGroup::records_start(n_ranks),
            ALONE_MAGIC => size_of::<super::Header>().next_multiple_of(128),
            _ => return Err(refused("is not one")),
        };
        let needed = records_start + n_ranks * size_of::<RankRecord>();
        if needed > n_bytes {
            return Err(refused("is damaged"));
        }
        // The records alone, and not the buffers behind them.
        let map = SharedMap::open(&file, needed).map_err(failed)?;
        let id = (metadata.dev(), metadata.ino());
        Ok(RankBoard { map, _file: Some(file), id, records_start, n_ranks })
    }

    /// The number of ranks.
    pub fn n_ranks(&self) -> usize {
        self.n_ranks
    }

    /// A rank's record. There is none for a rank that the group does not have.
    pub fn record(&self, rank: usize) -> Option<&RankRecord> {
        let at = self.records_start + rank * size_of::<RankRecord>();
        // SAFETY: `open` checked that the mapping holds the records of all ranks; a record is atomics that any bytes are valid for, and
        // both the mapping and the start of the records are aligned to 128 bytes.
        (rank < self.n_ranks).then(|| unsafe { &*self.map.start().add(at).cast::<RankRecord>() })
    }

    /// Which group it is about.
    pub fn of(&self) -> BoardOf {
        let header = header(&self.map);
        if header.magic.load(Ordering::Acquire) == MAGIC {
            return BoardOf::Shared(self.id.0, self.id.1);
        }
        let group = [0, 1].map(|i| header.group[i].load(Ordering::Relaxed));
        BoardOf::Rank { group, rank: header.ended_by.load(Ordering::Relaxed) as usize }
    }

    /// Whether its group has ended, for a group in shared memory: ranks may meet elsewhere by now.
    pub fn has_ended(&self) -> bool {
        let header = header(&self.map);
        header.magic.load(Ordering::Acquire) == MAGIC && header.ended_by.load(Ordering::SeqCst) != 0
    }

    /// The boards that processes of this machine keep open, as far as this one may look at them, each with the processes that do.
    pub fn find_all() -> Vec<(RankBoard, Vec<u32>)> {
        let mut found: Vec<((u64, u64), RankBoard, Vec<u32>)> = Vec::new();
        let numbers = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
        for pid in entries(Path::new("/proc")).filter_map(|path| numbers(&path)) {
            for descriptor in entries(&PathBuf::from(format!("/proc/{pid}/fd"))) {
                let name = std::fs::read_link(&descriptor).unwrap_or_default();
                if !name.to_string_lossy().starts_with("/memfd:kolo-group") {
                    continue;
                }
                // One that is gone by now, or is no board, is of no interest.
                let Ok(file) = File::options().read(true).write(true).open(&descriptor) else { continue };
                let Ok(id) = file.metadata().map(|file| (file.dev(), file.ino())) else { continue };
                match found.iter_mut().find(|(known, ..)| *known == id) {
                    Some((_, _, pids)) if pids.contains(&pid) => {}
                    Some((_, _, pids)) => pids.push(pid),
                    // This process only looks: it is not to be found by others who do.
                    None => found.extend(
                        RankBoard::open(file).ok().map(|board| (id, RankBoard { _file: None, ..board }, vec![pid])),
                    ),
                }
            }
        }
        found.into_iter().map(|(_, board, pids)| (board, pids)).collect()
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::super::record::Activity;
    use super::*;

    #[test]
    fn a_board_is_found_among_the_descriptors_of_its_process() {
        let board = RankBoard::alone(3, 1, *b"0123456789abcdef").unwrap();
        board.record(1).unwrap().adopt();
        board.record(1).unwrap().note_step(5, Activity::Saving);
        assert!(board.record(3).is_none());
        let ours = |(found, _): &(RankBoard, Vec<u32>)| found.of() == board.of();
        let (found, pids) = RankBoard::find_all().into_iter().find(ours).unwrap();
        assert_eq!((found.n_ranks(), pids), (3, vec![std::process::id()]));
        let note = found.record(1).unwrap().read();
        assert_eq!((note.step, note.activity), (Some(5), Activity::Saving));
        drop(board);
        drop(found);
        let name =
            BoardOf::Rank { group: [u64::from_le_bytes(*b"01234567"), u64::from_le_bytes(*b"89abcdef")], rank: 1 };
        assert!(RankBoard::find_all().iter().all(|(board, _)| board.of() != name), "nothing is left behind");
    }

    #[test]
    fn the_file_of_a_group_has_records_beside_its_buffers() {
        let file = SharedGroup::anonymous_file().unwrap();
        SharedGroup::create(&file, 2, 100).unwrap();
        let mut group = SharedGroup::join(&file, 0).unwrap();
        let board = RankBoard::open(file.try_clone().unwrap()).unwrap();
        board.record(0).unwrap().begin_call(0, &[255; 256]);
        board.record(1).unwrap().begin_call(0, &[255; 256]);
        // Neither writes to what is the other's.
        assert!(SharedGroup::has_joined(&file, 0).unwrap() && !SharedGroup::has_joined(&file, 1).unwrap());
        group.begin(&super::super::WaitLimits::NONE).unwrap().buffer().fill(7);
        assert_eq!(board.record(1).unwrap().read().calls[0].what, [255; 256]);
        assert!(matches!(board.of(), BoardOf::Shared(..)));
    }

    #[test]
    fn files_that_are_no_boards_are_refused() {
        let error = |file: File| RankBoard::open(file).err().unwrap().to_string();
        let file = SharedGroup::anonymous_file().unwrap();
        assert!(error(file.try_clone().unwrap()).contains("too short"));
        file.set_len(8192).unwrap();
        assert!(error(file.try_clone().unwrap()).contains("is damaged"));
        SharedGroup::create(&file, 2, 100).unwrap();
        let map = SharedMap::open(&file, 4096).unwrap();
        header(&map).n_ranks.store(60_000, Ordering::Relaxed);
        assert!(error(file).contains("is damaged"));
    }
}
