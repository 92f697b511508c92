//! Which ranks are on one host.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;

/// The host of each rank of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hosts {
    /// Hosts are numbered in the order of their first ranks.
    of: Vec<usize>,
    ranks: Vec<Vec<usize>>,
}

/// On which hosts the ranks of a group are, as far as it matters for choosing an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// How many hosts there are.
    pub n_hosts: usize,
    /// The most ranks that one of them has.
    pub most_ranks: usize,
    /// Every host has as many ranks as the others.
    pub is_even: bool,
    /// The ranks of each host are a branch of the fixed tree over all ranks.
    pub is_branches: bool,
}

impl Hosts {
    /// Ranks with the same name are on one host.
    pub fn new(names: &[u64]) -> Hosts {
        let mut known: Vec<u64> = Vec::new();
        let (mut of, mut ranks) = (Vec::with_capacity(names.len()), Vec::<Vec<usize>>::new());
        for (rank, name) in names.iter().enumerate() {
            let host = known.iter().position(|one| one == name).unwrap_or(known.len());
            if host == known.len() {
                known.push(*name);
                ranks.push(Vec::new());
            }
            ranks[host].push(rank);
            of.push(host);
        }
        Hosts { of, ranks }
    }

    /// Whether all ranks are on one host.
    pub fn is_one(&self) -> bool {
        self.ranks.len() <= 1
    }

    /// Whether there are several hosts, and several ranks on one of them.
    pub fn has_levels(&self) -> bool {
        self.ranks.len() > 1 && self.ranks.len() < self.of.len()
    }

    /// The ranks that are on the same host as this one, in their order.
    pub fn beside(&self, rank: usize) -> &[usize] {
        self.of.get(rank).map_or(&[], |host| &self.ranks[*host])
    }

    /// The ranks that come at this place on their hosts, of hosts that have so many.
    pub fn at_place(&self, place: usize) -> Vec<usize> {
        self.ranks.iter().filter_map(|ranks| ranks.get(place).copied()).collect()
    }

    pub fn layout(&self) -> Layout {
        let sizes: Vec<usize> = self.ranks.iter().map(Vec::len).collect();
        let first = sizes.first().copied().unwrap_or(0);
        let (last, others) = sizes.split_last().map_or((0, &[][..]), |(last, others)| (*last, others));
        // Blocks of a power of two of ranks, one after the other; the last may be smaller.
        let is_sorted = self.of.is_sorted();
        let is_branches =
            is_sorted && first.is_power_of_two() && last <= first && others.iter().all(|size| *size == first);
        Layout {
            n_hosts: sizes.len(),
            most_ranks: sizes.iter().copied().max().unwrap_or(0),
            is_even: sizes.iter().all(|size| *size == first),
            is_branches,
        }
    }
}

/// A number that tells hosts apart, and containers of one host. Processes that also differ in `address`, by which others reach them,
/// are on different hosts.
pub fn own_host(address: Option<IpAddr>) -> u64 {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let mut hasher = DefaultHasher::new();
    (read("/proc/sys/kernel/random/boot_id"), read("/proc/sys/kernel/hostname"), address).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_on_their_hosts() {
        let hosts = Hosts::new(&[7, 7, 3, 7, 3]);
        assert_eq!((hosts.beside(1), hosts.beside(4)), (&[0, 1, 3][..], &[2, 4][..]));
        assert_eq!([hosts.at_place(0), hosts.at_place(1), hosts.at_place(2)], [vec![0, 2], vec![1, 4], vec![3]]);
        assert!(hosts.has_levels() && !Hosts::new(&[1, 2, 3]).has_levels() && !Hosts::new(&[1, 1]).has_levels());
    }

    #[test]
    fn blocks_of_a_power_of_two_of_ranks_are_branches() {
        let layout = |names: &[u64]| {
            let Layout { n_hosts, most_ranks, is_even, is_branches } = Hosts::new(names).layout();
            (n_hosts, most_ranks, is_even, is_branches)
        };
        assert_eq!(layout(&[1, 1, 2, 2]), (2, 2, true, true));
        assert_eq!(layout(&[1, 1, 2, 2, 3]), (3, 2, false, true));
        assert_eq!(layout(&[1, 1, 2, 3, 3]), (3, 2, false, false));
        assert_eq!(layout(&[1, 2, 1, 2]), (2, 2, true, false));
        assert_eq!(layout(&[1, 1, 1, 2, 2, 2]), (2, 3, true, false));
        assert_eq!(layout(&[1, 1, 2, 2, 2]), (2, 3, false, false));
    }
}
