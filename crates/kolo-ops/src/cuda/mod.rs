//! Kernels for NVIDIA GPUs, by area. Sources in CUDA C++ lie beside the Rust that launches them and are compiled when
//! they are first needed; `kolo_device::cuda` does that, and holds everything unsafe.
//!
//! A kernel enqueues work and returns. Its tensors are on the card, except the arguments its op names in
//! `host_args` (shapes, axes, handles), which it reads at once. Ops over `int32` are mostly about shapes: as in TensorFlow,
//! those whose definition says so ([`HostRule`]) run on the host, on host memory, though they are placed on the GPU. An index
//! that is out of range cannot be an error here without waiting for the card; it reads zeros and writes nothing, as
//! TensorFlow's kernels do.

use kolo_core::{DType, Result, Tensor};
use kolo_device::cuda::CudaDevice;

use crate::KernelCtx;

pub(crate) mod apply_all;
pub(crate) mod array;
pub(crate) mod attention;
pub(crate) mod batch_norm;
pub(crate) mod batch_norm_first;
pub(crate) mod batch_norm_held;
pub(crate) mod class_loss;
pub(crate) mod columns;
pub(crate) mod conv;
pub(crate) mod elementwise;
pub(crate) mod flow;
pub(crate) mod fused;
pub(crate) mod gather;
pub(crate) mod layer_norm;
pub(crate) mod map;
pub(crate) mod matmul;
pub(crate) mod narrow;
pub(crate) mod optim;
pub(crate) mod pool;
pub(crate) mod random;
pub(crate) mod reduce;
pub(crate) mod rows;
pub(crate) mod state;
pub(crate) mod transfer;

/// The GPU that a kernel runs on.
pub(crate) fn gpu<'a>(ctx: &KernelCtx<'a>) -> Result<&'a CudaDevice> {
    CudaDevice::of(ctx.device)
}

pub(crate) const FLOATS: &[DType] = &[DType::F32, DType::F64, DType::F16, DType::BF16];
/// Numbers that have kernels on the card; `int32` too, for the few ops that take indices or casts there.
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
/// Everything that lies side by side and is on the card.
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

/// The name that a dtype has in CUDA sources.
pub(crate) fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I8 => "i8",
        DType::I16 => "i16",
        DType::I32 => "i32",
        DType::I64 => "i64",
        DType::U8 => "u8",
        DType::U16 => "u16",
        DType::U32 => "u32",
        DType::U64 => "u64",
        DType::Bool => "bool",
        _ => "void",
    }
}

/// A tensor on the card in which every byte is zero.
pub(crate) fn zeros(ctx: &KernelCtx<'_>, dtype: DType, shape: kolo_core::Shape) -> Result<Tensor> {
    ctx.allocate_zeroed(dtype, shape)
}

#[cfg(test)]
pub(crate) mod tests {
    /// Compiles sources for a Hopper chip, which needs no card; says so if the compiler is not here.
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
