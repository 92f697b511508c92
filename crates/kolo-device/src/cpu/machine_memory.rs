//! How much memory this process can have: what the machine has, or less if the process is limited.

use std::sync::OnceLock;

/// The least of the machine's memory, the limits of the control group, and what is left of the address space, but for what a
/// process needs besides tensors: code, stacks, messages, and what is too small to be counted. `u64::MAX` where the system
/// does not say.
pub(crate) fn machine_memory() -> u64 {
    static FOUND: OnceLock<u64> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        [
            total(&read("/proc/meminfo")),
            group_limit(&read("/sys/fs/cgroup/memory.max")),
            group_limit(&read("/sys/fs/cgroup/memory/memory.limit_in_bytes")),
            address_space(&read("/proc/self/limits")).map(|all| left(all, taken(&read("/proc/self/status")))),
        ]
        .into_iter()
        .flatten()
        .min()
        .map_or(u64::MAX, |all| all - (all / 8).min(MOST_UNCOUNTED))
    })
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
        assert!(machine_memory() > 1 << 20);
    }
}
