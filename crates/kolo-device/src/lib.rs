//! Kolo's devices: memory, threads and the kernels' inner loops.
//!
//! The only crate of the workspace that may contain `unsafe`. It cannot name a graph: a [`Device`] allocates memory,
//! copies bytes and provides threads; the ops decide what to compute.

mod arena;
pub mod cpu;
pub mod cuda;
mod device;
mod mapping;
mod null;
mod recorder;
mod shared_map;
mod socket;

pub use arena::{Arena, Charge, MemoryStats};
pub use cpu::device::{CpuConfig, CpuDevice};
pub use device::{Device, DeviceAttributes, Event, StreamRole, copy_between};
pub use null::NullDevice;
pub use recorder::{ActiveRecording, Address, Recorder, Recording};
pub use shared_map::SharedMap;
pub use socket::set_receive_low_water_mark;
