//! Files in memory that processes on one machine share, mapped into this process.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::mapping::Mapping;

/// The first bytes of a file, mapped for reading and writing. Writes are visible to other processes that map the file.
///
/// Two processes take turns: the writer does not touch a mapping again until the reader has released it. A peer that
/// violates this makes values change while they are read; authenticated peers are trusted with more than that.
pub struct SharedMap {
    /// Dropped before the memory is unmapped.
    page_lock: OnceLock<Option<PageLock>>,
    mapping: Mapping,
}

/// Keeps pages locked for a device; dropping it unlocks them.
pub(crate) type PageLock = Box<dyn Send + Sync>;

impl SharedMap {
    /// Sets the file's length to `n_bytes`, allocates its memory, and maps it. An error if there is not enough memory,
    /// which would otherwise be a signal on a write.
    pub fn create(file: &File, n_bytes: usize) -> io::Result<SharedMap> {
        let length = libc::off_t::try_from(n_bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        if length == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: `file` is open while it is borrowed, and the call touches no memory of ours.
        let result = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) };
        match result {
            0 => SharedMap::map(file, n_bytes),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Maps the first `n_bytes` of a file that is at least that long.
    pub fn open(file: &File, n_bytes: usize) -> io::Result<SharedMap> {
        if n_bytes == 0 || file.metadata()?.len() < n_bytes as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        SharedMap::map(file, n_bytes)
    }

    fn map(file: &File, n_bytes: usize) -> io::Result<SharedMap> {
        // SAFETY: a new mapping at an address that the system chooses replaces nothing; `n_bytes` is not 0, and the
        // file is open while it is borrowed. The mapping does not need the file to stay open.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                n_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        match NonNull::new(start.cast()) {
            Some(start) => {
                // SAFETY: this was just mapped and has no other owner. Other processes that map the file take turns
                // writing (see the type); bytes that change meanwhile are only wrong values.
                let mapping = unsafe { Mapping::new(start, n_bytes) };
                Ok(SharedMap { page_lock: OnceLock::new(), mapping })
            }
            None => Err(io::ErrorKind::OutOfMemory.into()),
        }
    }

    /// Locks the pages with `lock`, which is called once with the mapped range, and returns whether they are locked.
    pub(crate) fn lock_pages(&self, lock: impl FnOnce(*const u8, usize) -> Option<PageLock>) -> bool {
        self.page_lock.get_or_init(|| lock(self.bytes().as_ptr(), self.n_bytes())).is_some()
    }

    /// The number of mapped bytes.
    pub fn n_bytes(&self) -> usize {
        self.mapping.bytes().len()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.mapping.bytes()
    }

    /// Where it begins, for those who share it by a protocol of their own instead of in turns.
    pub(crate) fn start(&self) -> *mut u8 {
        self.mapping.start()
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.mapping.bytes_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_mapping_writes_another_reads() {
        let path = std::env::temp_dir().join(format!("kolo-shared-map-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut one = SharedMap::create(&file, 10_000).unwrap();
        let other = SharedMap::open(&file, 9_000).unwrap();
        one.bytes_mut()[8_999] = 7;
        assert_eq!((other.n_bytes(), other.bytes()[8_999], other.bytes()[0]), (9_000, 7, 0));
        drop(one);
        assert_eq!(other.bytes()[8_999], 7);
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let path = std::env::temp_dir().join(format!("kolo-short-map-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(100).unwrap();
        assert!(SharedMap::open(&file, 101).is_err());
        assert!(SharedMap::open(&file, 0).is_err() && SharedMap::create(&file, 0).is_err());
        assert!(SharedMap::create(&file, usize::MAX).is_err());
        assert_eq!(SharedMap::open(&file, 100).unwrap().bytes(), [0; 100]);
    }
}
