//! What GPU kernels share: launching an elementwise expression (`map`, `elementwise`), reductions (`reduce`, `columns`), kernels
//! over rows (`rows`), copies of views (`view`), scatters (`scatter`), names of types.
//!
//! The kernels themselves lie beside their ops: an op's `gpu` field lists them, its CUDA C++ is in a `.cu` file of its name, and
//! launching them is a function of its file, or of `<op>/gpu.rs` where it is long. Sources are compiled when they are first
//! needed; `kolo_device::cuda` does that, and holds everything unsafe.
//!
//! A kernel enqueues work and returns. Its tensors are in the GPU's memory, except the arguments that its op names in
//! `host_args` (shapes, axes, handles), which it reads at once. Ops over `int32` are mostly about shapes: as in TensorFlow,
//! those whose definition says so (`HostRule`) run on the host, with host memory, though they are placed on the GPU. An index
//! that is out of range cannot be an error here without waiting for the GPU; it reads zeros and writes nothing, as
//! TensorFlow's kernels do.

use kolo_core::{DType, Result, Tensor};
use kolo_device::cuda::CudaDevice;
pub(crate) use kolo_device::cuda::c_type;

use crate::KernelCtx;

pub(crate) mod columns;
pub(crate) mod elementwise;
pub(crate) mod map;
pub(crate) mod reduce;
pub(crate) mod rows;
pub(crate) mod scatter;
pub(crate) mod view;

/// The GPU that a kernel runs on.
pub(crate) fn gpu<'a>(ctx: &KernelCtx<'a>) -> Result<&'a CudaDevice> {
    CudaDevice::of(ctx.device)
}

pub(crate) const FLOATS: &[DType] = &[DType::F32, DType::F64, DType::F16, DType::BF16];
/// Numbers; `int32` is not among them, for it stays in host memory.
pub(crate) const NUMBERS: &[DType] = &[
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I8,
    DType::I16,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
];
/// All dtypes of fixed size that are kept in GPU memory.
pub(crate) const PLAIN: &[DType] = &[
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I8,
    DType::I16,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::Bool,
];

/// A tensor in GPU memory in which every byte is zero.
pub(crate) fn zeros(ctx: &KernelCtx<'_>, dtype: DType, shape: kolo_core::Shape) -> Result<Tensor> {
    ctx.allocate_zeroed(dtype, shape)
}

#[cfg(test)]
pub(crate) mod tests {
    /// Compiles sources for Hopper, which needs no GPU; says so if the compiler is not here.
    #[track_caller]
    pub(crate) fn compiles(sources: impl IntoIterator<Item = (kolo_device::cuda::ProgramKey, String)>) {
        let mut n = 0;
        for (key, source) in sources {
            match kolo_device::cuda::compile_only(&key, &source, "sm_90") {
                None => return println!("skipped: no NVRTC here"),
                Some(Ok(_)) => n += 1,
                Some(Err(error)) => panic!("{key:?}: {error}\n{source}"),
            }
        }
        println!("{n} sources compile");
    }
}
