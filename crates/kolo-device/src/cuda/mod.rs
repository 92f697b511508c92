//! NVIDIA GPUs, through libraries that are loaded at run time.
//!
//! Building needs nothing from CUDA. On a machine without it [`discover`] reports why there is no GPU; it creates no
//! context. A [`CudaDevice`] is one logical GPU: a physical GPU or a share of one:
//!
//! ```text
//!  host thread ──launch──▶ compute stream ─────────────────▶ kernels, in the order they were enqueued
//!       │                     ▲  │event
//!       ├──copy in────────────┘  └──▶ copy-out stream ──▶ pinned host memory ──event──▶ watcher thread ──▶ receiver
//!       └──drop a tensor: its block is free at once; its next use is enqueued later on the same stream
//! ```
//!
//! Kernels return when they are enqueued. All work on a device's tensors is ordered by its compute stream: a block that
//! another stream still reads is kept until that stream is done. The host waits only for values that it reads.
//!
//! | state | accessed by |
//! | --- | --- |
//! | the block lists (`arena.rs`) | any thread, one lock |
//! | compiled programs (`program.rs`) | any thread; compiled once, under a lock |
//! | cuBLASLt plans (`matmul.rs`) | any thread, one lock; its workspace is ordered by the compute stream |
//! | cuDNN (`conv.rs`, `attention.rs`) | any thread, one lock around each call |
//! | NCCL (`nccl/`) | any thread, one lock around each group of calls; on a stream of its own |
//! | events that receivers wait for | the watcher thread runs their callbacks, in the order they were queued |

mod arena;
mod attention;
mod attention_graph;
mod backend;
mod blocks;
mod capture;
mod conv;
mod copies;
mod device;
mod discover;
mod engines;
mod launch;
mod library;
mod matmul;
mod nccl;
mod open;
mod page_lock;
mod pinned;
mod program;
mod stream;
mod tune;
mod visible;

pub use arena::MemoryPlan;
pub use attention::{Attention, AttentionPass};
pub use conv::{Conv, ConvPass};
pub use device::{CudaConfig, CudaDevice};
pub use discover::{Discovery, PhysicalGpu, Process, discover};
pub use launch::{Args, Grid};
pub use library::{LibraryReport, absent, libraries};
pub use matmul::{Epilogue, MatMul, MatMulKind, Terms};
pub use open::{GpuRequest, open, rank_hardware};
pub use program::{Function, ProgramKey, c_type, compile_only};
pub use visible::{Selection, select_visible};

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use kolo_core::{Error, Memory, Result};

/// The kind of a GPU's memory.
const MEMORY_KIND: &str = "CUDA";

/// The memory of the GPU of this number.
fn memory_of(number: u32) -> Memory {
    Memory::Device { kind: MEMORY_KIND, ordinal: number }
}

/// Whether it is the memory of a GPU.
fn is_gpu_memory(memory: Memory) -> bool {
    matches!(memory, Memory::Device { kind: MEMORY_KIND, .. })
}

/// Converts a driver call's result; the error has what was tried and the driver's description.
fn check<T>(what: &str, result: std::result::Result<T, DriverError>) -> Result<T> {
    result.map_err(|error| {
        let text = format!("{what}: {}", describe(error));
        match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::resource_exhausted(text),
            CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => Error::unavailable(text),
            _ => Error::internal(text),
        }
    })
}

fn describe(error: DriverError) -> String {
    let text = error.error_string().ok().and_then(|text| text.to_str().ok()).unwrap_or("no description");
    let sticky = matches!(
        error.0,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
    );
    let name = format!("{:?}", error.0);
    match sticky {
        // The context is lost: nothing on this GPU works until the process ends.
        true => format!("{name}: {text} (by work enqueued earlier; the GPU is lost to this process)"),
        false => format!("{name}: {text}"),
    }
}
