//! Kolo's devices: memory, threads and the kernels' inner loops.
//!
//! The only crate of the workspace that may contain `unsafe`. It cannot name a graph: a [`Device`] allocates memory,
//! copies bytes and provides threads; the ops decide what to compute.

mod arena;
pub mod cpu;
pub mod cuda;
mod device;
mod mapping;
pub mod mpi;
mod null;
mod rank_device;
mod recorder;
pub mod shared_group;
mod shared_map;
mod socket;

pub use arena::{Arena, Charge, MemoryStats};
pub use cpu::device::{CpuConfig, CpuDevice};
pub use device::{Device, DeviceAttributes, Event, StreamRole, copy_between};
pub use null::NullDevice;
pub use rank_device::{DeviceRanks, MeetingId, RankDevice, RankOnDevice};
pub use recorder::{ActiveRecording, Address, Recorder, Recording};
pub use shared_map::SharedMap;
pub use socket::set_receive_low_water_mark;

/// Whether the compiler optimised this crate, which holds the inner loops. A dependent's debug build does not unless its
/// `Cargo.toml` says so, and is some hundred times slower then.
pub const IS_OPTIMISED: bool = is_optimised(env!("KOLO_DEVICE_OPT_LEVEL"));

/// Whether a level of optimisation is any: `0` is none, and an unknown one gets the benefit of the doubt.
const fn is_optimised(level: &str) -> bool {
    !matches!(level.as_bytes(), b"0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_debug_builds_are_optimised() {
        // `[profile.dev.package.kolo-device]` of the workspace; otherwise every test would be slow, and warn.
        const { assert!(IS_OPTIMISED) };
        assert!(!is_optimised("0"));
        for level in ["1", "2", "3", "s", "z", ""] {
            assert!(is_optimised(level), "{level}");
        }
    }
}
