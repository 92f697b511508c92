//! Element types. Names and numbers are TensorFlow's, so graphs and tensors carry over unchanged.

use std::fmt;
use std::sync::Arc;

use bytemuck::checked::CheckedCastError;
use half::{bf16, f16};

use crate::tensor::VecBuffer;
use crate::{Buffer, Error, Result};

macro_rules! dtypes {
    ($($variant:ident = $number:literal, $name:literal, $size:expr, $doc:literal;)*) => {
        /// The type of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(i32)]
        pub enum DType {
            $(#[doc = $doc] $variant = $number,)*
        }

        impl DType {
            /// Every dtype, by number.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// TensorFlow's name, such as `float` or `int32`.
            pub fn name(self) -> &'static str {
                match self { $(DType::$variant => $name,)* }
            }

            /// Bytes of one element, for types whose elements are contiguous in a buffer.
            pub fn size(self) -> Option<usize> {
                match self { $(DType::$variant => $size,)* }
            }
        }
    };
}

dtypes! {
    F32 = 1, "float", Some(4), "32-bit IEEE float.";
    F64 = 2, "double", Some(8), "64-bit IEEE float.";
    I32 = 3, "int32", Some(4), "32-bit signed integer.";
    U8 = 4, "uint8", Some(1), "8-bit unsigned integer.";
    I16 = 5, "int16", Some(2), "16-bit signed integer.";
    I8 = 6, "int8", Some(1), "8-bit signed integer.";
    Str = 7, "string", None, "A byte string of any length.";
    Complex64 = 8, "complex64", Some(8), "Two 32-bit floats; known by name, without kernels.";
    I64 = 9, "int64", Some(8), "64-bit signed integer.";
    Bool = 10, "bool", Some(1), "True or false, one byte.";
    QI8 = 11, "qint8", Some(1), "Quantised; known by name, without kernels.";
    QU8 = 12, "quint8", Some(1), "Quantised; known by name, without kernels.";
    QI32 = 13, "qint32", Some(4), "Quantised; known by name, without kernels.";
    BF16 = 14, "bfloat16", Some(2), "The upper half of a 32-bit float.";
    QI16 = 15, "qint16", Some(2), "Quantised; known by name, without kernels.";
    QU16 = 16, "quint16", Some(2), "Quantised; known by name, without kernels.";
    U16 = 17, "uint16", Some(2), "16-bit unsigned integer.";
    Complex128 = 18, "complex128", Some(16), "Two 64-bit floats; known by name, without kernels.";
    F16 = 19, "half", Some(2), "16-bit IEEE float.";
    Resource = 20, "resource", None, "A handle to a variable, a queue or another object that outlives a step.";
    Variant = 21, "variant", None, "Anything; known by name, without kernels.";
    U32 = 22, "uint32", Some(4), "32-bit unsigned integer.";
    U64 = 23, "uint64", Some(8), "64-bit unsigned integer.";
}

impl DType {
    /// The dtype with this number, base types only: references (number + 100) are a property of an edge, not of a
    /// value.
    pub fn from_number(number: i32) -> Result<DType> {
        DType::ALL
            .iter()
            .copied()
            .find(|dtype| *dtype as i32 == number)
            .ok_or_else(|| Error::invalid_argument(format!("dtype number {number} is not known")))
    }

    /// The dtype with this name, as in `float`, `DT_FLOAT`, `float32` or `f32`.
    pub fn from_name(name: &str) -> Result<DType> {
        let lower = name.strip_prefix("DT_").unwrap_or(name).to_ascii_lowercase();
        let canonical = match lower.as_str() {
            "float32" | "f32" => "float",
            "float64" | "f64" => "double",
            "float16" | "f16" => "half",
            "bf16" => "bfloat16",
            other => other,
        };
        DType::ALL
            .iter()
            .copied()
            .find(|dtype| dtype.name() == canonical)
            .ok_or_else(|| Error::invalid_argument(format!("dtype '{name}' is not known")))
    }

    /// True for f16, bf16, f32 and f64.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    /// True for the signed and unsigned integers of 8 to 64 bits.
    pub fn is_integer(self) -> bool {
        use DType::*;
        matches!(self, I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64)
    }

    /// Calls `visitor` with the Rust type of this dtype. For dtypes without one, returns an error that names `what`.
    pub fn visit<V: ElementVisitor>(self, what: &str, visitor: V) -> Result<V::Out> {
        use DType::*;
        match self {
            F32 => visitor.visit::<f32>(),
            F64 => visitor.visit::<f64>(),
            F16 => visitor.visit::<f16>(),
            BF16 => visitor.visit::<bf16>(),
            I8 => visitor.visit::<i8>(),
            I16 => visitor.visit::<i16>(),
            I32 => visitor.visit::<i32>(),
            I64 => visitor.visit::<i64>(),
            U8 => visitor.visit::<u8>(),
            U16 => visitor.visit::<u16>(),
            U32 => visitor.visit::<u32>(),
            U64 => visitor.visit::<u64>(),
            Bool => visitor.visit::<bool>(),
            Str | Resource | Variant | Complex64 | Complex128 | QI8 | QU8 | QI16 | QU16 | QI32 => {
                Err(Error::unimplemented(format!("{what} does not work on {self}")))
            }
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Code to run once the Rust type behind a [`DType`] is known; see [`DType::visit`].
pub trait ElementVisitor {
    /// What it returns.
    type Out;
    /// Called with the element type.
    fn visit<T: Element>(self) -> Result<Self::Out>;
}

/// A Rust type that can be an element of a tensor's buffer.
pub trait Element:
    bytemuck::NoUninit
    + bytemuck::CheckedBitPattern
    + Copy
    + Default
    + PartialEq
    + Send
    + Sync
    + fmt::Debug
    + fmt::Display
    + 'static
{
    /// Its dtype.
    const DTYPE: DType;
    /// A host buffer that takes ownership of the vector's memory.
    fn into_buffer(elements: Vec<Self>) -> Arc<dyn Buffer>;
    /// These bytes as elements. Looks at each of them only if some bytes are no value of the type.
    fn of_bytes(bytes: &[u8]) -> std::result::Result<&[Self], CheckedCastError>;
    /// The same, to write.
    fn of_bytes_mut(bytes: &mut [u8]) -> std::result::Result<&mut [Self], CheckedCastError>;
}

macro_rules! elements {
    ($($ty:ty => $dtype:ident),* $(,)?) => {
        $(impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
            fn into_buffer(elements: Vec<Self>) -> Arc<dyn Buffer> {
                Arc::new(VecBuffer(elements))
            }
            #[inline]
            fn of_bytes(bytes: &[u8]) -> std::result::Result<&[Self], CheckedCastError> {
                Ok(bytemuck::try_cast_slice(bytes)?)
            }
            #[inline]
            fn of_bytes_mut(bytes: &mut [u8]) -> std::result::Result<&mut [Self], CheckedCastError> {
                Ok(bytemuck::try_cast_slice_mut(bytes)?)
            }
        })*
    };
}

impl Element for bool {
    const DTYPE: DType = DType::Bool;
    fn into_buffer(elements: Vec<bool>) -> Arc<dyn Buffer> {
        // Kept as bytes: a buffer can be written bytewise, and not every byte is a bool.
        Arc::new(VecBuffer(elements.into_iter().map(u8::from).collect()))
    }
    #[inline]
    fn of_bytes(bytes: &[u8]) -> std::result::Result<&[bool], CheckedCastError> {
        bytemuck::checked::try_cast_slice(bytes)
    }
    #[inline]
    fn of_bytes_mut(bytes: &mut [u8]) -> std::result::Result<&mut [bool], CheckedCastError> {
        bytemuck::checked::try_cast_slice_mut(bytes)
    }
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => BF16,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8, u16 => U16, u32 => U32, u64 => U64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_number(*dtype as i32), Ok(*dtype));
            assert_eq!(DType::from_name(dtype.name()), Ok(*dtype));
            assert_eq!(DType::from_name(&format!("DT_{}", dtype.name().to_uppercase())), Ok(*dtype));
        }
        assert_eq!(DType::from_name("float32"), Ok(DType::F32));
        assert!(DType::from_number(101).is_err());
    }

    #[test]
    fn visiting_meets_the_rust_type() {
        struct SizeOf;
        impl ElementVisitor for SizeOf {
            type Out = usize;
            fn visit<T: Element>(self) -> Result<usize> {
                Ok(size_of::<T>())
            }
        }
        assert_eq!(DType::BF16.visit("test", SizeOf), Ok(2));
        assert_eq!(
            DType::Str.visit("test", SizeOf).map_err(|e| e.message().to_owned()),
            Err("test does not work on string".into())
        );
    }
}
