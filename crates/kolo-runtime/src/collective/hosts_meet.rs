//! How the ranks of a group that sends messages begin: all take the costs of rank 0, and those of one host share memory where there are
//! several hosts.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use kolo_device::shared_group::{SharedGroup, WaitLimits};

use super::CommunicatorOptions;
use super::algorithm::choice::Costs;
use super::algorithm::two_level::OwnHost;
use super::hosts::{Hosts, Layout};
use super::shared::PIECE;
use super::signature::SIGNATURE_BYTES;
use super::transport::{Incoming, Outgoing, Transport};

/// What ranks say at first: on which host they are, and what they think messages cost.
const WORDS: usize = 8;
const HEAD_BYTES: usize = WORDS * 8;

/// Where a file in memory is ([`place_of`]), filled up with zeros; all zeros if there is none.
const PLACE_BYTES: usize = 128;

/// What ranks know of each other when they have met.
pub(super) struct MetHosts {
    /// On which hosts they are, if there are several.
    pub layout: Option<Layout>,
    /// The memory of this rank's host, if there are several, one has several ranks, and those of each can share memory.
    pub own_host: Option<OwnHost>,
    /// Those of rank 0.
    pub costs: Costs,
}

/// All ranks say on which host they are, and what messages cost.
pub(super) fn meet(transport: &mut dyn Transport, host: u64, options: &CommunicatorOptions) -> Result<MetHosts> {
    let (rank, n_ranks) = (transport.rank(), transport.n_ranks());
    let limits = WaitLimits { deadline: Some(Instant::now() + options.timeout), stop: &|_| Ok(()) };
    let all: Vec<usize> = (0..n_ranks).collect();
    let heads = tell(transport, &all, &head(host, &options.costs), &limits)?;
    let costs = heads.first().map_or(options.costs, |head| costs(head));
    let names: Vec<u64> = heads.iter().map(|head| word(head, 0)).collect();
    let hosts = Hosts::new(&names);
    let layout = (!hosts.is_one()).then(|| hosts.layout());
    if !hosts.has_levels() {
        return Ok(MetHosts { layout, own_host: None, costs });
    }
    let beside = hosts.beside(rank).to_vec();
    let file = (beside.first() == Some(&rank)).then(|| create(beside.len(), options.buffer_bytes)).transpose();
    let mut said = [0; PLACE_BYTES];
    if let Ok(Some((_, place))) = &file {
        said.iter_mut().zip(place.bytes()).for_each(|(to, byte)| *to = byte);
    }
    let places = tell(transport, &beside, &said, &limits)?;
    let place = beside.iter().position(|one| *one == rank).unwrap_or(0);
    let joined = match &file {
        Ok(Some((file, _))) => SharedGroup::join(file, place),
        Ok(None) => {
            let at = String::from_utf8_lossy(&places[0]);
            file_at(at.trim_end_matches('\0')).and_then(|file| SharedGroup::join(&file, place))
        }
        Err(error) => Err(error.clone()),
    };
    // One that cannot goes without, and so do all: they have to choose alike.
    let can = tell(transport, &all, &[u8::from(joined.is_ok())], &limits)?;
    let own_host = match joined {
        Ok(group) => can.iter().all(|can| can == &[1]).then(|| OwnHost { group: group.with_names(beside), hosts }),
        Err(error) => {
            tracing::warn!(target: "kolo::collective", "rank {rank} does not share memory with ranks {beside:?} of its host, so all send messages: {error}");
            None
        }
    };
    Ok(MetHosts { layout, own_host, costs })
}

fn create(n_ranks: usize, buffer_bytes: usize) -> Result<(File, String)> {
    let file = SharedGroup::anonymous_file()
        .map_err(|error| Error::resource_exhausted(format!("no file in memory for the ranks of a host: {error}")))?;
    SharedGroup::create(&file, n_ranks, buffer_bytes.max(SIGNATURE_BYTES + PIECE * n_ranks))?;
    let place = place_of(&file)?;
    Ok((file, place))
}

/// Where other processes of this host find a file that this one has open: `/proc/PID/fd/N DEVICE INODE`. Where processes are numbered
/// in another way, as in a container, the path may lead to another file; the two numbers tell.
pub fn place_of(file: &File) -> Result<String> {
    let found = file.metadata().map_err(|error| Error::unavailable(format!("a file in memory: {error}")))?;
    Ok(format!("/proc/{}/fd/{} {} {}", std::process::id(), file.as_raw_fd(), found.dev(), found.ino()))
}

/// The file that another process has at such a place.
pub fn file_at(place: &str) -> Result<File> {
    let (path, wanted) = place.split_once(' ').unwrap_or((place, ""));
    let unavailable =
        |why: &str| Error::unavailable(format!("the memory that a rank of this host has at '{path}': {why}"));
    let file = File::options().read(true).write(true).open(path).map_err(|error| unavailable(&error.to_string()))?;
    let found = file.metadata().map_err(|error| unavailable(&error.to_string()))?;
    match format!("{} {}", found.dev(), found.ino()) == wanted {
        true => Ok(file),
        false => Err(unavailable("that is another file here, as if its process were in another container")),
    }
}

/// Each of these ranks says the same number of bytes to each other; what they say, in their order.
fn tell(transport: &mut dyn Transport, ranks: &[usize], own: &[u8], limits: &WaitLimits<'_>) -> Result<Vec<Vec<u8>>> {
    let rank = transport.rank();
    let mut said = vec![own.to_vec(); ranks.len()];
    let others = || ranks.iter().copied().filter(|other| *other != rank);
    let sends: Vec<Outgoing<'_>> = others().map(|to| Outgoing { to, parts: vec![own] }).collect();
    let receives = ranks.iter().zip(&mut said).filter(|(other, _)| **other != rank);
    let mut receives: Vec<Incoming<'_>> =
        receives.map(|(from, said)| Incoming { from: *from, parts: vec![&mut said[..]], check: None }).collect();
    transport.exchange(&sends, &mut receives, limits)?;
    drop(receives);
    Ok(said)
}

fn word(bytes: &[u8], i: usize) -> u64 {
    let mut word = [0; 8];
    word.iter_mut().zip(bytes.iter().skip(8 * i)).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(word)
}

fn head(host: u64, costs: &Costs) -> [u8; HEAD_BYTES] {
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let Costs { base, hop, message, bytes_per_second, host_bytes_per_second, memory_base, memory_bytes_per_second } =
        *costs;
    let words: [u64; WORDS] = [
        host,
        nanos(base),
        nanos(hop),
        nanos(message),
        bytes_per_second.to_bits(),
        host_bytes_per_second.to_bits(),
        nanos(memory_base),
        memory_bytes_per_second.to_bits(),
    ];
    let mut bytes = [0; HEAD_BYTES];
    bytes.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    bytes
}

fn costs(head: &[u8]) -> Costs {
    let time = |i| Duration::from_nanos(word(head, i));
    let rate = |i| f64::from_bits(word(head, i));
    Costs {
        base: time(1),
        hop: time(2),
        message: time(3),
        bytes_per_second: rate(4),
        host_bytes_per_second: rate(5),
        memory_base: time(6),
        memory_bytes_per_second: rate(7),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn another_file_at_the_place_of_a_group_is_not_taken_for_it() {
        let (_file, place) = create(2, 4096).unwrap();
        SharedGroup::join(&file_at(&place).unwrap(), 1).unwrap();
        // The same descriptor of another process is another file.
        let (other, _) = create(3, 4096).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), other.as_raw_fd());
        let (_, numbers) = place.split_once(' ').unwrap();
        let error = file_at(&format!("{path} {numbers}")).unwrap_err().to_string();
        assert!(error.contains("that is another file here"), "{error}");
        assert!(!SharedGroup::has_joined(&other, 1).unwrap());
        assert!(file_at("/proc/0/fd/0 1 1").is_err() && file_at("").is_err());
    }

    #[test]
    fn costs_arrive_as_they_were_said() {
        let said = Costs { hop: Duration::from_nanos(1234), host_bytes_per_second: 1.0 / 3.0, ..Costs::default() };
        let bytes = head(77, &said);
        assert_eq!((word(&bytes, 0), costs(&bytes)), (77, said));
    }
}
