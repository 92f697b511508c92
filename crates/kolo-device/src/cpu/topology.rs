//! The cores and NUMA nodes of the machine; binding of threads and memory.
//!
//! Linux describes them in files: `/sys/devices/system/node/node0/cpulist` holds `0-7,16-23`. With one node, or without
//! these files, nothing is bound to nodes.

use std::path::Path;

use kolo_core::{Error, Result};

/// Where Linux describes the nodes.
const SYSTEM: &str = "/sys/devices/system/node";

/// Cores by NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// NUMA nodes that have cores, by number.
    pub nodes: Vec<NumaNode>,
}

/// Cores that share local memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// The system's id of the node.
    pub id: usize,
    /// Its cores, in order.
    pub cores: Vec<usize>,
}

impl Topology {
    /// The topology of this machine, restricted to the cores that this process may use.
    pub fn of_machine() -> Topology {
        let mut topology = Topology::read(Path::new(SYSTEM));
        if let Some(allowed) = allowed_cores() {
            for node in &mut topology.nodes {
                node.cores.retain(|core| allowed.contains(core));
            }
            topology.nodes.retain(|node| !node.cores.is_empty());
        }
        topology
    }

    /// Reads a tree like `/sys/devices/system/node`. Unreadable entries are skipped.
    pub fn read(root: &Path) -> Topology {
        let mut nodes = Vec::new();
        for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.strip_prefix("node")?.parse().ok());
            let cores = || parse_cores(std::fs::read_to_string(entry.path().join("cpulist")).ok()?.trim()).ok();
            if let Some(id) = id
                && let Some(cores) = cores()
                && !cores.is_empty()
            {
                nodes.push(NumaNode { id, cores });
            }
        }
        nodes.sort_by_key(|node| node.id);
        Topology { nodes }
    }

    /// The node that all of these cores belong to, if there are several nodes and the cores are of one.
    pub fn node_of(&self, cores: &[usize]) -> Option<usize> {
        let has = |node: &&NumaNode| !cores.is_empty() && cores.iter().all(|core| node.cores.contains(core));
        self.nodes.iter().filter(|_| self.nodes.len() > 1).find(has).map(|node| node.id)
    }

    /// The cores of each of `n_devices` devices, so that no device spans more nodes than necessary. `None` if cores
    /// should not be split: one device, one node, or a node with fewer cores than devices.
    pub fn split(&self, n_devices: usize) -> Option<Vec<Vec<usize>>> {
        let n_nodes = self.nodes.len();
        if n_devices < 2 || n_nodes < 2 {
            return None;
        }
        if n_devices <= n_nodes {
            let whole = |device: usize| {
                let nodes = device * n_nodes / n_devices..(device + 1) * n_nodes / n_devices;
                self.nodes[nodes].iter().flat_map(|node| node.cores.iter().copied()).collect()
            };
            return Some((0..n_devices).map(whole).collect());
        }
        let mut split = Vec::with_capacity(n_devices);
        for (i, node) in self.nodes.iter().enumerate() {
            let n_here = (i + 1) * n_devices / n_nodes - i * n_devices / n_nodes;
            if node.cores.len() < n_here {
                return None;
            }
            let bound = |k: usize| k * node.cores.len() / n_here;
            split.extend((0..n_here).map(|k| node.cores[bound(k)..bound(k + 1)].to_vec()));
        }
        Some(split)
    }
}

/// Reads `0-3,8`, as Linux writes lists of cores: sorted, each once.
pub fn parse_cores(text: &str) -> Result<Vec<usize>> {
    /// No machine has more cores than this.
    const MOST: usize = 1 << 16;
    let bad = || Error::invalid_argument(format!("'{text}' is not a list of cores such as 0-3,8"));
    let number = |text: &str| text.trim().parse::<usize>().ok().filter(|core| *core < MOST).ok_or_else(bad);
    let mut cores = Vec::new();
    for part in text.split(',').filter(|_| !text.trim().is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if last < first {
            return Err(bad());
        }
        cores.extend(first..=last);
    }
    cores.sort_unstable();
    cores.dedup();
    Ok(cores)
}

/// The list as [`parse_cores`] reads it: `0-3,8`.
pub fn print_cores(cores: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &core in cores {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == core => *last = core,
            _ => parts.push((core, core)),
        }
    }
    let print = |(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    parts.iter().map(print).collect::<Vec<_>>().join(",")
}

/// The cores that this thread may run on; `None` if the system does not report them.
#[cfg(target_os = "linux")]
pub fn allowed_cores() -> Option<Vec<usize>> {
    // SAFETY: the set is plain bits made by `zeroed`, its size is given, and pid 0 means this thread; `CPU_ISSET` is
    // asked about numbers below the set's size only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return None;
        }
        Some((0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &set)).collect())
    }
}

/// The cores that this thread may run on; `None` if the system does not report them.
#[cfg(not(target_os = "linux"))]
pub fn allowed_cores() -> Option<Vec<usize>> {
    None
}

/// Binds this thread to these cores; does nothing for an empty list. Best effort: if the system refuses, the binding
/// stays as it was.
#[cfg(target_os = "linux")]
pub fn bind_to_cores(cores: &[usize]) {
    if cores.is_empty() {
        return;
    }
    // SAFETY: the set is plain bits made by `zeroed`, the cores set are below its size, and pid 0 means this thread. A
    // refusal is reported by the return value, which leaves the thread unbound.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores.iter().filter(|core| **core < libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

/// Binds this thread to these cores, where the system supports it.
#[cfg(not(target_os = "linux"))]
pub fn bind_to_cores(_cores: &[usize]) {}

/// Makes the system prefer a NUMA node for the untouched pages of a large block. Small blocks share pages with others
/// and are placed by first touch.
#[cfg(target_os = "linux")]
pub(crate) fn prefer_node(block: &mut [u8], node: usize) {
    const LARGE: usize = 1 << 20;
    const PAGE: usize = 4096;
    const MPOL_PREFERRED: libc::c_long = 1;
    let bits = libc::c_ulong::BITS as usize;
    if block.len() < LARGE || node >= 16 * bits {
        return;
    }
    let mut mask = [0 as libc::c_ulong; 16];
    mask[node / bits] = 1 << (node % bits);
    let start = (block.as_mut_ptr() as usize).next_multiple_of(PAGE);
    let end = (block.as_mut_ptr() as usize + block.len()) / PAGE * PAGE;
    // SAFETY: the range is whole pages inside of a block that is borrowed for writing; a preference moves no data and
    // changes no contents. The mask lives through the call and has the number of bits given. A refusal changes nothing.
    unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start as libc::c_ulong,
            (end - start) as libc::c_ulong,
            MPOL_PREFERRED,
            mask.as_ptr(),
            (mask.len() * bits) as libc::c_ulong,
            0 as libc::c_ulong,
        );
    }
}

/// Asks the system to take a block's pages from a NUMA node, where it can.
#[cfg(not(target_os = "linux"))]
pub(crate) fn prefer_node(_block: &mut [u8], _node: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(nodes: &[&str]) -> Topology {
        let node = |(id, cores): (usize, &&str)| NumaNode { id, cores: parse_cores(cores).unwrap() };
        Topology { nodes: nodes.iter().enumerate().map(node).collect() }
    }

    fn split(nodes: &[&str], n_devices: usize) -> Option<Vec<String>> {
        Some(topology(nodes).split(n_devices)?.iter().map(|cores| print_cores(cores)).collect())
    }

    #[test]
    fn lists_of_cores() {
        assert_eq!(parse_cores("0-3,8, 6").unwrap(), [0, 1, 2, 3, 6, 8]);
        assert_eq!(parse_cores("2,2,1-2").unwrap(), [1, 2]);
        assert_eq!(parse_cores("").unwrap(), [0usize; 0]);
        assert_eq!(print_cores(&[0, 1, 2, 6, 8, 9]), "0-2,6,8-9");
        for bad in ["a", "1-", "-1", "3-2", "1,,2", "0-99999999999"] {
            assert!(parse_cores(bad).unwrap_err().message().contains(bad), "{bad}");
        }
    }

    #[test]
    fn a_tree_of_files_is_read() {
        let root = std::env::temp_dir().join(format!("kolo-topology-{}", std::process::id()));
        for (node, list) in
            [("node1", "4-7\n"), ("node0", "0-3\n"), ("node2", "\n"), ("nodes", "9\n"), ("power", "9\n")]
        {
            std::fs::create_dir_all(root.join(node)).unwrap();
            std::fs::write(root.join(node).join("cpulist"), list).unwrap();
        }
        std::fs::create_dir_all(root.join("node7")).unwrap();
        let read = Topology::read(&root);
        std::fs::remove_dir_all(&root).unwrap();
        // Memory without cores, and what is no node, are left out.
        assert_eq!(read, topology(&["0-3", "4-7"]));
        assert_eq!(Topology::read(&root), Topology::default());
        assert_eq!((read.node_of(&[5, 6]), read.node_of(&[3, 4]), read.node_of(&[])), (Some(1), None, None));
        assert_eq!(topology(&["0-3"]).node_of(&[1]), None, "one node is no choice");
    }

    #[test]
    fn devices_keep_to_nodes() {
        let strings = |parts: &[&str]| Some(parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>());
        assert_eq!(split(&["0-3", "4-7"], 2), strings(&["0-3", "4-7"]));
        assert_eq!(split(&["0-1", "2-3", "4-5", "6-7"], 2), strings(&["0-3", "4-7"]));
        assert_eq!(split(&["0-3", "4-7"], 4), strings(&["0-1", "2-3", "4-5", "6-7"]));
        assert_eq!(split(&["0-3,8-11", "4-7"], 3), strings(&["0-3,8-11", "4-5", "6-7"]));
        assert_eq!(split(&["0-3", "4-7"], 1), None);
        assert_eq!(split(&["0-7"], 4), None);
        assert_eq!(split(&["0", "1"], 3), None);
    }

    #[test]
    fn binding_keeps_a_thread_on_its_cores() {
        let Some(allowed) = allowed_cores() else { return };
        let bound = std::thread::spawn(move || {
            bind_to_cores(&allowed[..1]);
            (allowed_cores(), allowed[0])
        });
        let (cores, first) = bound.join().unwrap();
        assert_eq!(cores, Some(vec![first]));
        // A node that may not exist changes nothing but where pages come from.
        let mut block = vec![7u8; 2 << 20];
        prefer_node(&mut block, 0);
        prefer_node(&mut block, 900);
        assert!(block.iter().all(|&byte| byte == 7));
    }
}
