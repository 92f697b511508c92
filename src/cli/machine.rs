//! This machine's memory, load and processes, as the operating system reports them. Linux only; elsewhere unknown.

use std::fs;

/// Bytes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The total.
    pub total: u64,
    /// What is available to programs.
    pub free: u64,
}

/// A process and its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its process id.
    pub id: u32,
    /// Its command.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
}

/// Time that the cores spent, in the system's ticks since it started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticks {
    /// At work.
    pub busy: u64,
    /// In all.
    pub total: u64,
}

impl Ticks {
    /// The share of the time since `before` that was spent at work, from 0 to 1.
    pub fn load_since(self, before: Ticks) -> f64 {
        let total = self.total.saturating_sub(before.total);
        self.busy.saturating_sub(before.busy) as f64 / total.max(1) as f64
    }
}

/// The memory of this machine.
pub fn memory() -> Option<Memory> {
    parse_memory(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// The time its cores spent so far.
pub fn ticks() -> Option<Ticks> {
    parse_ticks(&fs::read_to_string("/proc/stat").ok()?)
}

/// The processes that take most memory, largest first.
pub fn largest_processes(n: usize) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut processes: Vec<Process> = ids.filter_map(process).collect();
    processes.sort_by_key(|process| std::cmp::Reverse(process.memory));
    processes.truncate(n);
    processes
}

/// A process.
pub fn process(id: u32) -> Option<Process> {
    parse_process(id, &fs::read_to_string(format!("/proc/{id}/status")).ok()?)
}

/// `key: 12 kB` in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

fn parse_memory(text: &str) -> Option<Memory> {
    Some(Memory { total: kilobytes(text, "MemTotal")?, free: kilobytes(text, "MemAvailable")? })
}

fn parse_process(id: u32, text: &str) -> Option<Process> {
    let name = text.lines().find_map(|line| line.strip_prefix("Name:"))?.trim().to_owned();
    Some(Process { id, name, memory: kilobytes(text, "VmRSS")? })
}

fn parse_ticks(text: &str) -> Option<Ticks> {
    let numbers: Vec<u64> =
        text.lines().next()?.strip_prefix("cpu ")?.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
    let counted = numbers.get(..8)?;
    let total: u64 = counted.iter().sum();
    Some(Ticks { busy: total - counted[3] - counted[4], total })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_linux_writes() {
        let text = "MemTotal:       24576000 kB\nMemFree:  100 kB\nMemAvailable:   20480000 kB\n";
        assert_eq!(parse_memory(text), Some(Memory { total: 24_576_000 * 1024, free: 20_480_000 * 1024 }));
        assert_eq!(parse_memory("MemTotal: lots\n"), None);
        let text = "Name:\tkolo\nState:\tR\nVmRSS:\t    2048 kB\n";
        assert_eq!(parse_process(7, text), Some(Process { id: 7, name: "kolo".into(), memory: 2048 * 1024 }));
        assert_eq!(parse_process(2, "Name:\tkthreadd\n"), None);
    }

    #[test]
    fn load_is_the_share_of_busy_time() {
        let before = parse_ticks("cpu  100 0 50 800 50 0 0 0 0 0\n").map(|ticks| (ticks.busy, ticks.total));
        assert_eq!(before, Some((150, 1000)));
        let load = Ticks { busy: 225, total: 1100 }.load_since(Ticks { busy: 150, total: 1000 });
        assert!((load - 0.75).abs() < 1e-9);
        assert_eq!(Ticks { busy: 1, total: 1 }.load_since(Ticks { busy: 1, total: 1 }), 0.0);
        assert_eq!(parse_ticks("cpu  1 2\n"), None);
    }
}
