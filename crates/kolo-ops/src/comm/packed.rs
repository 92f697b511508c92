//! What the ops share that make a gradient smaller before ranks exchange it (`top_k_exchange.rs`, `sign_exchange.rs`): several tensors
//! become bytes, of which there are as many on every rank, so that the bytes of all can be gathered; and what a rank has not sent yet
//! is kept for its next turn.

use kolo_core::{DType, Element, Error, PartialShape, Result, Tensor};
use kolo_graph::{Gradient, InferCtx, OpDef, ShapeFn};
use num_traits::Float;

use crate::op::{Gpu, KernelDef, Op};
use crate::{Cost, KernelCtx};

/// An element that is exchanged whole.
pub(super) trait Real: Element + Float {
    /// Its bytes.
    const SIZE: usize;
    fn put(self, to: &mut [u8]);
    fn get(from: &[u8]) -> Self;
    /// Its bits, such that those of a larger magnitude are larger; no number is the largest.
    fn magnitude(self) -> u64;
    fn of(number: f64) -> Self;
    fn wide(self) -> f64;
}

macro_rules! real {
    ($ty:ty, $bits:ty) => {
        impl Real for $ty {
            const SIZE: usize = size_of::<$ty>();

            fn put(self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_le_bytes());
            }

            fn get(from: &[u8]) -> $ty {
                let mut bytes = [0; size_of::<$ty>()];
                bytes.copy_from_slice(from);
                <$ty>::from_le_bytes(bytes)
            }

            fn magnitude(self) -> u64 {
                u64::from((self.to_bits() << 1) >> 1)
            }

            fn of(number: f64) -> $ty {
                number as $ty
            }

            fn wide(self) -> f64 {
                f64::from(self)
            }
        }
    };
}

real!(f32, u32);
real!(f64, u64);

/// An op of this kind: on the host, where ranks exchange bytes.
pub(super) const fn exchange_op(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    kernels: &'static [KernelDef],
) -> Op {
    let gradient = Gradient::Refused("ranks exchange gradients; nothing is differentiated through the exchange");
    Op {
        def: OpDef { name, signature, shape, gradient, ..OpDef::BASE },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

/// Shapes of what is packed, and of what is left of each tensor. The number of bytes is known if all shapes are.
pub(super) fn packed_shapes(
    ctx: &InferCtx<'_>,
    n_bytes: impl Fn(usize, usize) -> Result<usize>,
) -> Result<Vec<PartialShape>> {
    let n = ctx.n_outputs() - 1;
    let mut total = Some(0usize);
    for i in 0..n {
        ctx.input(i).merge(ctx.input(n + i))?;
        let size = ctx.input_dtype(i).size().unwrap_or(0);
        let own = ctx.input(i).n_elements().map(|n| n_bytes(n, size)).transpose()?;
        total = total.zip(own).and_then(|(total, own)| total.checked_add(own));
    }
    Ok(std::iter::once(PartialShape::new(&[total])).chain((0..n).map(|i| ctx.input(i).clone())).collect())
}

/// Shapes of what comes out of the bytes of all ranks: those of the tensors that went in, which follow the bytes.
pub(super) fn unpacked_shapes(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok((0..ctx.n_outputs()).map(|i| ctx.input(1 + i).clone()).collect())
}

/// The sum of tensor `i` and what was left of it last time.
pub(super) fn with_left<T: Real>(ctx: &mut KernelCtx<'_>, i: usize) -> Result<Tensor> {
    let left = ctx.n_inputs() / 2 + i;
    let shape = ctx.input(i)?.shape().clone();
    if ctx.input(left)?.shape() != &shape {
        return Err(Error::invalid_argument(format!(
            "tensor {i} has shape {shape}, and what was left of it has {}",
            ctx.input(left)?.shape()
        )));
    }
    let mut sum = ctx.allocate(T::DTYPE, shape)?;
    let (value, kept) = (ctx.data::<T>(i)?, ctx.data::<T>(left)?);
    for (to, (&value, &kept)) in sum.data_mut::<T>()?.iter_mut().zip(value.iter().zip(kept)) {
        *to = value + kept;
    }
    Ok(sum)
}

/// The bytes of each rank, in their order.
pub(super) fn of_each_rank(all: &[u8], n_bytes: usize) -> Result<Vec<&[u8]>> {
    if n_bytes == 0 || all.is_empty() || !all.len().is_multiple_of(n_bytes) {
        return Err(Error::invalid_argument(format!(
            "{} bytes came from all ranks, which is no multiple of the {n_bytes} of each",
            all.len()
        )));
    }
    Ok(all.chunks_exact(n_bytes).collect())
}

/// Bytes for an output.
pub(super) fn bytes_of(ctx: &KernelCtx<'_>, n: usize) -> Result<Tensor> {
    ctx.allocate(DType::U8, kolo_core::Shape::new(&[n])?)
}
