//! `a * b + 2.0`: operators on outputs, and constants where a number is written.

use std::ops::{Add, Div, Mul, Neg, Sub};

use kolo_core::{DType, Dim, Element, PartialShape, Tensor};

use crate::{Graph, Output};

/// What can stand on the other side of an operator, or be an argument: an output, or a number that becomes a constant
/// of the same dtype.
pub trait IntoOutput<'g> {
    /// An output of `dtype`, adding a constant if need be.
    fn into_output(self, graph: &'g Graph, dtype: DType) -> Output<'g>;
}

impl<'g> IntoOutput<'g> for Output<'g> {
    fn into_output(self, _: &'g Graph, _: DType) -> Output<'g> {
        self
    }
}

macro_rules! numbers {
    ($($ty:ty),*) => {
        $(impl<'g> IntoOutput<'g> for $ty {
            #[track_caller]
            fn into_output(self, graph: &'g Graph, dtype: DType) -> Output<'g> {
                graph.constant(number(f64::from(self), dtype))
            }
        })*
    };
}

numbers!(f32, f64, i32);

/// A scalar of `dtype`, so that `x * 2.0` works whatever x is.
fn number(value: f64, dtype: DType) -> Tensor {
    match dtype {
        DType::F64 => Tensor::scalar(value),
        DType::F16 => Tensor::scalar(half::f16::from_f64(value)),
        DType::BF16 => Tensor::scalar(half::bf16::from_f64(value)),
        DType::I8 => Tensor::scalar(value as i8),
        DType::I16 => Tensor::scalar(value as i16),
        DType::I32 => Tensor::scalar(value as i32),
        DType::I64 => Tensor::scalar(value as i64),
        DType::U8 => Tensor::scalar(value as u8),
        DType::U16 => Tensor::scalar(value as u16),
        DType::U32 => Tensor::scalar(value as u32),
        DType::U64 => Tensor::scalar(value as u64),
        // Anything else is refused by the op's signature, with the dtypes in the message.
        _ => Tensor::scalar(value as f32),
    }
}

impl Graph {
    /// A constant: a number, an array, a vector or a tensor. `g.constant(3.0)` is a `float`: write `3i32` for an integer
    /// and `3.0f64` for a `double`.
    #[track_caller]
    pub fn constant(&self, value: impl Into<Tensor>) -> Output<'_> {
        let value = value.into();
        self.op("Const").attr("dtype", value.dtype()).attr("value", value).out()
    }

    /// A constant with a name.
    #[track_caller]
    pub fn named_constant(&self, name: &str, value: impl Into<Tensor>) -> Output<'_> {
        let value = value.into();
        self.op("Const").name(name).attr("dtype", value.dtype()).attr("value", value).out()
    }

    /// A value that every run must feed: `g.placeholder::<f32>("x", [None, Some(784)])`.
    #[track_caller]
    pub fn placeholder<T: Element>(&self, name: &str, shape: impl Into<PartialShape>) -> Output<'_> {
        self.op("Placeholder").name(name).attr("dtype", T::DTYPE).attr("shape", shape.into()).out()
    }

    /// A placeholder whose shape is put together at run time.
    #[track_caller]
    pub fn placeholder_of(&self, name: &str, dtype: DType, dims: &[Dim]) -> Output<'_> {
        self.op("Placeholder").name(name).attr("dtype", dtype).attr("shape", PartialShape::new(dims)).out()
    }

    /// Does nothing but wait for these operations: one target to run them all.
    #[track_caller]
    pub fn group<'g>(&'g self, name: &str, operations: &[crate::Operation<'g>]) -> crate::Operation<'g> {
        let builder = self.op("NoOp").name(name);
        operations.iter().fold(builder, |builder, &operation| builder.control_input(operation)).build()
    }
}

macro_rules! operators {
    ($($trait:ident, $method:ident, $op:literal;)*) => {
        $(impl<'g, R: IntoOutput<'g>> $trait<R> for Output<'g> {
            type Output = Output<'g>;
            #[track_caller]
            fn $method(self, right: R) -> Output<'g> {
                let right = right.into_output(self.graph(), self.dtype());
                self.graph().op($op).input(self).input(right).out()
            }
        }
        operators!(@left $trait, $method, $op, f32, f64, i32);)*
    };
    (@left $trait:ident, $method:ident, $op:literal, $($ty:ty),*) => {
        $(impl<'g> $trait<Output<'g>> for $ty {
            type Output = Output<'g>;
            #[track_caller]
            fn $method(self, right: Output<'g>) -> Output<'g> {
                let left = self.into_output(right.graph(), right.dtype());
                right.graph().op($op).input(left).input(right).out()
            }
        })*
    };
}

operators! {
    Add, add, "AddV2";
    Sub, sub, "Sub";
    Mul, mul, "Mul";
    Div, div, "RealDiv";
}

impl<'g> Neg for Output<'g> {
    type Output = Output<'g>;
    #[track_caller]
    fn neg(self) -> Output<'g> {
        self.graph().op("Neg").input(self).out()
    }
}
