//! How much memory this process can have: what the machine has, or less if the process is limited.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The memory of this machine.
pub(crate) static MACHINE: MachineMemory = MachineMemory::new(read);

/// How much there is, as it was when it was last asked for. Virtual machines that get memory as they use it begin with little,
/// and limits of control groups may be changed: so it is asked for again before anything is refused.
pub(crate) struct MachineMemory {
    /// 0 if nobody has asked.
    known: AtomicU64,
    read: fn() -> u64,
}

impl MachineMemory {
    const fn new(read: fn() -> u64) -> MachineMemory {
        MachineMemory { known: AtomicU64::new(0), read }
    }

    /// Bytes, as far as is known.
    pub fn known(&self) -> u64 {
        match self.known.load(Ordering::Relaxed) {
            0 => self.ask(),
            known => known,
        }
    }

    /// Whether the machine has so many bytes.
    pub fn has(&self, n_bytes: u64) -> bool {
        n_bytes <= self.known() || n_bytes <= self.ask()
    }

    #[cold]
    fn ask(&self) -> u64 {
        let bytes = (self.read)().max(1);
        self.known.store(bytes, Ordering::Relaxed);
        bytes
    }
}

/// The least of the machine's memory, the limits of the control group, and what was left of the address space at first, but for
/// what a process needs besides tensors: code, stacks, messages, and what is too small to be counted. `u64::MAX` where the
/// system does not say.
fn read() -> u64 {
    /// The address space that was taken before the first tensor.
    static TAKEN: OnceLock<u64> = OnceLock::new();
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let taken = *TAKEN.get_or_init(|| taken(&read("/proc/self/status")));
    [
        total(&read("/proc/meminfo")),
        group_limit(&read("/sys/fs/cgroup/memory.max")),
        group_limit(&read("/sys/fs/cgroup/memory/memory.limit_in_bytes")),
        address_space(&read("/proc/self/limits")).map(|all| left(all, taken)),
    ]
    .into_iter()
    .flatten()
    .min()
    .map_or(u64::MAX, |all| all - (all / 8).min(MOST_UNCOUNTED))
}

/// What is left for tensors of an address space: less [`RESERVED`], but half of it if it is small, so that a small limit does not
/// leave nothing.
fn left(all: u64, taken: u64) -> u64 {
    let left = all.saturating_sub(taken);
    left - RESERVED.min(left / 2)
}

/// Allocators reserve addresses for each thread that they do not use: 64 MB each with glibc.
const RESERVED: u64 = 256 << 20;

/// An eighth of the memory is left for what is not counted, but no more than this.
const MOST_UNCOUNTED: u64 = 1 << 30;

/// `MemTotal:       24576000 kB`
fn total(meminfo: &str) -> Option<u64> {
    kilobytes(meminfo, "MemTotal:")
}

/// The address space that is taken already: `VmSize:     8192 kB`
fn taken(status: &str) -> u64 {
    kilobytes(status, "VmSize:").unwrap_or(0)
}

fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    let kilobytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// Bytes, or `max`.
fn group_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|&limit| limit > 0)
}

/// `Max address space         unlimited            unlimited            bytes`: the first is what holds.
fn address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read() {
        assert_eq!(total("MemFree: 1 kB\nMemTotal:       24 kB\n"), Some(24 * 1024));
        assert_eq!((taken("Name: a\nVmSize:\t  24 kB\n"), taken("")), (24 * 1024, 0));
        assert_eq!(group_limit("max\n"), None);
        assert_eq!(group_limit("1048576\n"), Some(1 << 20));
        let line =
            |limit: &str| format!("Max cpu time  unlimited\nMax address space         {limit}   unlimited   bytes\n");
        assert_eq!(address_space(&line("unlimited")), None);
        assert_eq!(address_space(&line("4096")), Some(4096));
        let mb = |n: u64| n << 20;
        assert_eq!([left(mb(2048), mb(300)), left(mb(512), mb(300)), left(mb(100), mb(300))], [mb(1492), mb(106), 0]);
        assert!(MACHINE.known() > 1 << 20);
    }

    #[test]
    fn memory_that_grows_is_asked_for_again_before_a_refusal() {
        static ASKED: AtomicU64 = AtomicU64::new(0);
        let machine = MachineMemory::new(|| 100 * (1 + ASKED.fetch_add(1, Ordering::Relaxed)));
        assert!(machine.has(100) && machine.has(7));
        assert_eq!((ASKED.load(Ordering::Relaxed), machine.known()), (1, 100));
        assert!(machine.has(150));
        assert_eq!(machine.known(), 200);
        assert!(machine.has(200) && !machine.has(1000));
        assert_eq!(ASKED.load(Ordering::Relaxed), 3);
    }
}
