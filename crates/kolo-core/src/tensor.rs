//! The tensor: a dtype, a shape, and a shared buffer in host or device memory.
//!
//! Cloning shares the buffer. Writing needs the only handle to it ([`Tensor::data_mut`] is an error otherwise), which
//! lets a kernel reuse the buffer of an input without other users. Host access to device memory is an error, never a
//! hidden copy.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;

use crate::{DType, Element, Error, Result, Shape};

/// The memory of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Ordinary host memory.
    Host,
    /// Host memory that a device can copy from and to without staging.
    PinnedHost,
    /// A device's own memory, which the host cannot reach. The list of kinds is open: each device implementation states its
    /// own.
    Device {
        /// Whose copies understand it, such as `CUDA`.
        kind: &'static str,
        /// Which device of that kind.
        ordinal: u32,
    },
}

impl Memory {
    /// Whether the host reads and writes it directly.
    #[inline]
    pub fn is_host(self) -> bool {
        match self {
            Memory::Host | Memory::PinnedHost => true,
            Memory::Device { .. } => false,
        }
    }
}

/// `host`, `pinned host`, `CUDA:0`.
impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Host => f.write_str("host"),
            Memory::PinnedHost => f.write_str("pinned host"),
            Memory::Device { kind, ordinal } => write!(f, "{kind}:{ordinal}"),
        }
    }
}

/// A buffer of a device's allocator. Dropping the last handle frees it.
pub trait Buffer: Send + Sync + 'static {
    /// Its memory.
    fn memory(&self) -> Memory;
    /// Its size in bytes.
    fn n_bytes(&self) -> usize;
    /// The bytes, if the host can read them.
    fn host(&self) -> Option<&[u8]>;
    /// The bytes, if the host can write them.
    fn host_mut(&mut self) -> Option<&mut [u8]>;
    /// The concrete buffer, for the device that made it.
    fn as_any(&self) -> &dyn Any;
    /// True if a device counts these bytes against its limit.
    fn is_counted(&self) -> bool {
        false
    }
    /// Another buffer of the same allocator, for a copy; `None` if anybody's memory will do.
    fn another(&self, _n_bytes: usize) -> Option<Result<Arc<dyn Buffer>>> {
        None
    }
}

/// The elements of a tensor of strings.
pub struct Strings {
    list: Vec<Bytes>,
    /// Held as long as the list is: what a device has counted for it.
    charge: Option<Box<dyn Any + Send + Sync>>,
    is_text_counted: bool,
}

impl Strings {
    fn new(list: Vec<Bytes>) -> Arc<Strings> {
        Arc::new(Strings { list, charge: None, is_text_counted: false })
    }

    /// True if a device counts the list, without the text, against its limit.
    pub fn is_list_counted(&self) -> bool {
        self.charge.is_some()
    }

    /// True if a device counts the text against its limit.
    pub fn is_text_counted(&self) -> bool {
        self.is_text_counted
    }
}

impl Deref for Strings {
    type Target = [Bytes];
    fn deref(&self) -> &[Bytes] {
        &self.list
    }
}

/// A value in a graph.
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Shape,
    data: TensorData,
}

/// The storage of a tensor's elements.
#[derive(Clone)]
pub enum TensorData {
    /// Up to 16 bytes, stored in the tensor itself: scalars cost no allocation.
    Inline([u64; 2]),
    /// A span of a shared buffer.
    Buffer {
        /// The bytes.
        buffer: Arc<dyn Buffer>,
        /// The offset of this tensor's first byte.
        offset: usize,
    },
    /// Byte strings.
    Strings(Arc<Strings>),
    /// Handles to objects that outlive a step.
    Handles(Arc<Vec<ResourceHandle>>),
}

const INLINE_BYTES: usize = 16;

/// Names an object (a variable, a queue, …) in a container of a device, and, inside the process that made the handle,
/// keeps the object alive.
#[derive(Clone, Default)]
pub struct ResourceHandle {
    /// Full name of the device that owns the object.
    pub device: Arc<str>,
    /// Its container.
    pub container: Arc<str>,
    /// Its name in the container.
    pub name: Arc<str>,
    /// The object, in the process that made the handle.
    pub object: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for ResourceHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} on {}", self.container, self.name, self.device)
    }
}

/// Host memory owned by a vector.
pub(crate) struct VecBuffer<T>(pub(crate) Vec<T>);

impl<T: Element + bytemuck::Pod> Buffer for VecBuffer<T> {
    fn memory(&self) -> Memory {
        Memory::Host
    }
    fn n_bytes(&self) -> usize {
        size_of_val(self.0.as_slice())
    }
    fn host(&self) -> Option<&[u8]> {
        Some(bytemuck::cast_slice(&self.0))
    }
    fn host_mut(&mut self) -> Option<&mut [u8]> {
        Some(bytemuck::cast_slice_mut(&mut self.0))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Tensor {
    /// A tensor that takes ownership of a vector's elements, in row-major order.
    pub fn from_vec<T: Element>(shape: impl Into<Shape>, elements: Vec<T>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.n_elements() != elements.len() {
            return Err(Error::invalid_argument(format!(
                "shape {shape} needs {} elements, found {}",
                shape.n_elements(),
                elements.len()
            )));
        }
        if size_of_val(elements.as_slice()) <= INLINE_BYTES {
            let mut tensor = Tensor::small(T::DTYPE, shape);
            tensor.data_mut::<T>()?.copy_from_slice(&elements);
            return Ok(tensor);
        }
        Ok(Tensor { dtype: T::DTYPE, shape, data: TensorData::Buffer { buffer: T::into_buffer(elements), offset: 0 } })
    }

    /// A single value.
    #[inline]
    pub fn scalar<T: Element>(value: T) -> Tensor {
        let mut words = [0u64; 2];
        bytemuck::bytes_of_mut(&mut words)[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
        Tensor { dtype: T::DTYPE, shape: Shape::scalar(), data: TensorData::Inline(words) }
    }

    /// A list of values.
    pub fn vector<T: Element>(values: impl Into<Vec<T>>) -> Tensor {
        let values = values.into();
        Tensor::from_vec([values.len()], values).expect("the shape was made from the length")
    }

    /// A tensor of byte strings.
    pub fn from_strings(shape: impl Into<Shape>, strings: Vec<Bytes>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.n_elements() != strings.len() {
            return Err(Error::invalid_argument(format!(
                "shape {shape} needs {} strings, found {}",
                shape.n_elements(),
                strings.len()
            )));
        }
        Ok(Tensor { dtype: DType::Str, shape, data: TensorData::Strings(Strings::new(strings)) })
    }

    /// As [`Tensor::from_strings`]; the tensor holds `charge`, by which a device counts the list, as long as it lives.
    /// `is_text_counted` says whether a device counts the text, too, by this charge or another one.
    pub fn from_counted_strings(
        shape: impl Into<Shape>,
        strings: Vec<Bytes>,
        charge: impl Any + Send + Sync,
        is_text_counted: bool,
    ) -> Result<Tensor> {
        let mut tensor = Tensor::from_strings(shape, strings)?;
        if let TensorData::Strings(strings) = &mut tensor.data
            && let Some(strings) = Arc::get_mut(strings)
        {
            strings.charge = Some(Box::new(charge));
            strings.is_text_counted = is_text_counted;
        }
        Ok(tensor)
    }

    /// A single byte string.
    pub fn string(value: impl Into<Bytes>) -> Tensor {
        let data = TensorData::Strings(Strings::new(vec![value.into()]));
        Tensor { dtype: DType::Str, shape: Shape::scalar(), data }
    }

    /// A single resource handle.
    pub fn handle(handle: ResourceHandle) -> Tensor {
        let data = TensorData::Handles(Arc::new(vec![handle]));
        Tensor { dtype: DType::Resource, shape: Shape::scalar(), data }
    }

    /// Resource handles, in row-major order; an error if their number is not the shape's.
    pub fn from_handles(shape: impl Into<Shape>, handles: Vec<ResourceHandle>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.n_elements() != handles.len() {
            return Err(Error::invalid_argument(format!("{} handles for a tensor of shape {shape}", handles.len())));
        }
        Ok(Tensor { dtype: DType::Resource, shape, data: TensorData::Handles(Arc::new(handles)) })
    }

    /// A scalar of dtype `variant`, such as a lock, which moves through a graph as a handle does.
    pub fn variant(handle: ResourceHandle) -> Tensor {
        Tensor { dtype: DType::Variant, ..Tensor::handle(handle) }
    }

    /// A tensor over a buffer. An error if the buffer is shorter than dtype and shape require.
    pub fn from_buffer(dtype: DType, shape: Shape, buffer: Arc<dyn Buffer>) -> Result<Tensor> {
        let n_bytes = byte_count(dtype, &shape)?;
        if buffer.n_bytes() < n_bytes {
            return Err(Error::internal(format!(
                "{dtype}{shape} needs {n_bytes} bytes, the buffer has {}",
                buffer.n_bytes()
            )));
        }
        Ok(Tensor { dtype, shape, data: TensorData::Buffer { buffer, offset: 0 } })
    }

    /// All zeros (empty strings), in ordinary host memory.
    pub fn zeros(dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if dtype == DType::Str {
            let n = shape.n_elements();
            let mut strings = Vec::new();
            strings.try_reserve_exact(n).map_err(|_| out_of_memory(dtype, &shape))?;
            strings.resize(n, Bytes::new());
            return Tensor::from_strings(shape, strings);
        }
        let n_bytes = byte_count(dtype, &shape)?;
        if n_bytes <= INLINE_BYTES {
            return Ok(Tensor::small(dtype, shape));
        }
        // Whole words, so that the memory is aligned for every element type.
        let words = bytemuck::try_zeroed_vec::<u64>(n_bytes.div_ceil(8)).map_err(|_| out_of_memory(dtype, &shape))?;
        Ok(Tensor { dtype, shape, data: TensorData::Buffer { buffer: u64::into_buffer(words), offset: 0 } })
    }

    /// A zeroed tensor of at most 16 bytes, stored inline; `None` if it does not fit.
    pub fn inline(dtype: DType, shape: &Shape) -> Option<Tensor> {
        let n_bytes = shape.n_elements().checked_mul(dtype.size()?)?;
        (n_bytes <= INLINE_BYTES).then(|| Tensor::small(dtype, shape.clone()))
    }

    fn small(dtype: DType, shape: Shape) -> Tensor {
        Tensor { dtype, shape, data: TensorData::Inline([0; 2]) }
    }

    /// The type of the elements.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The sizes of the dimensions.
    #[inline]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of elements.
    #[inline]
    pub fn n_elements(&self) -> usize {
        self.shape.n_elements()
    }

    /// Bytes of the elements; for strings, of their contents.
    #[inline]
    pub fn n_bytes(&self) -> usize {
        match &self.data {
            TensorData::Strings(strings) => strings.iter().map(|s| s.len()).sum(),
            TensorData::Handles(_) => 0,
            TensorData::Inline(_) | TensorData::Buffer { .. } => self.n_elements() * self.dtype.size().unwrap_or(0),
        }
    }

    /// True if the elements, at most 16 bytes, are stored inline.
    #[inline]
    pub fn is_inline(&self) -> bool {
        matches!(self.data, TensorData::Inline(_))
    }

    /// The storage of the elements.
    pub fn storage(&self) -> &TensorData {
        &self.data
    }

    /// The memory of the elements.
    #[inline]
    pub fn memory(&self) -> Memory {
        match &self.data {
            TensorData::Buffer { buffer, .. } => buffer.memory(),
            TensorData::Inline(_) | TensorData::Strings(_) | TensorData::Handles(_) => Memory::Host,
        }
    }

    /// The elements, row-major. An error if `T` is not their type or the host cannot reach them.
    #[inline]
    pub fn data<T: Element>(&self) -> Result<&[T]> {
        self.expect_dtype(T::DTYPE)?;
        let bytes = self.host_bytes()?;
        T::of_bytes(bytes)
            .map_err(|reason| Error::internal(format!("{} bytes are not {}: {reason}", bytes.len(), self.dtype)))
    }

    /// The elements, to write. An error if the type differs, the host cannot reach them, or others share them.
    pub fn data_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        self.expect_dtype(T::DTYPE)?;
        let dtype = self.dtype;
        let bytes = self.host_bytes_mut()?;
        T::of_bytes_mut(bytes).map_err(|reason| Error::internal(format!("the buffer does not hold {dtype}: {reason}")))
    }

    /// The one element of a scalar, or of any tensor of one element.
    #[inline]
    pub fn scalar_value<T: Element>(&self) -> Result<T> {
        // A fast path for scalars, without checks of sizes and buffers.
        if let TensorData::Inline(words) = &self.data
            && self.dtype == T::DTYPE
            && self.shape.rank() == 0
            && let Ok(value) = bytemuck::checked::try_pod_read_unaligned(&bytemuck::bytes_of(words)[..size_of::<T>()])
        {
            return Ok(value);
        }
        self.only_element()
    }

    /// [`Tensor::scalar_value`] of anything but a scalar. Apart from it, so that the fast path is inlined into kernels.
    #[cold]
    #[inline(never)]
    fn only_element<T: Element>(&self) -> Result<T> {
        match self.data::<T>()? {
            [value] => Ok(*value),
            _ => Err(Error::invalid_argument(format!("expected a single value, found shape {}", self.shape))),
        }
    }

    /// The elements of an int32 or int64 tensor, widened. For shapes, axes, indices.
    pub fn integers(&self) -> Result<Vec<i64>> {
        match self.dtype {
            DType::I32 => Ok(self.data::<i32>()?.iter().map(|&x| i64::from(x)).collect()),
            DType::I64 => Ok(self.data::<i64>()?.to_vec()),
            other => Err(Error::invalid_argument(format!("expected int32 or int64, found {other}"))),
        }
    }

    /// The byte strings of a string tensor.
    pub fn strings(&self) -> Result<&[Bytes]> {
        match &self.data {
            TensorData::Strings(strings) => Ok(strings),
            _ => Err(Error::invalid_argument(format!("expected string, found {}", self.dtype))),
        }
    }

    /// The handles of a resource tensor.
    pub fn handles(&self) -> Result<&[ResourceHandle]> {
        match &self.data {
            TensorData::Handles(handles) if self.dtype == DType::Resource => Ok(handles),
            _ => Err(Error::invalid_argument(format!("expected resource handles, found {}", self.dtype))),
        }
    }

    /// The handle in a resource scalar.
    pub fn resource(&self) -> Result<&ResourceHandle> {
        match &self.data {
            TensorData::Handles(handles) if handles.len() == 1 => Ok(&handles[0]),
            _ => {
                Err(Error::invalid_argument(format!("expected a resource handle, found {}{}", self.dtype, self.shape)))
            }
        }
    }

    /// The bytes of the elements, in the format of `tensor_content`.
    #[inline]
    pub fn host_bytes(&self) -> Result<&[u8]> {
        let n_bytes = self.n_bytes();
        match &self.data {
            TensorData::Inline(words) => Ok(&bytemuck::bytes_of(words)[..n_bytes]),
            TensorData::Buffer { buffer, offset } => match buffer.host() {
                Some(bytes) => Ok(&bytes[*offset..*offset + n_bytes]),
                None => Err(not_host(buffer.memory())),
            },
            TensorData::Strings(_) | TensorData::Handles(_) => {
                Err(Error::invalid_argument(format!("{} elements do not lie side by side", self.dtype)))
            }
        }
    }

    /// The bytes of the elements, to write; an error if others share them.
    pub fn host_bytes_mut(&mut self) -> Result<&mut [u8]> {
        let n_bytes = self.n_bytes();
        match &mut self.data {
            TensorData::Inline(words) => Ok(&mut bytemuck::bytes_of_mut(words)[..n_bytes]),
            TensorData::Buffer { buffer, offset } => {
                let memory = buffer.memory();
                let buffer =
                    Arc::get_mut(buffer).ok_or_else(|| Error::internal("writing to a buffer that others share"))?;
                match buffer.host_mut() {
                    Some(bytes) => Ok(&mut bytes[*offset..*offset + n_bytes]),
                    None => Err(not_host(memory)),
                }
            }
            TensorData::Strings(_) | TensorData::Handles(_) => {
                Err(Error::invalid_argument(format!("{} elements do not lie side by side", self.dtype)))
            }
        }
    }

    /// True if this is the only handle to the buffer, so that it may be written in place.
    pub fn is_unique(&mut self) -> bool {
        match &mut self.data {
            TensorData::Inline(_) => true,
            TensorData::Buffer { buffer, .. } => Arc::get_mut(buffer).is_some(),
            TensorData::Strings(strings) => Arc::get_mut(strings).is_some(),
            TensorData::Handles(_) => false,
        }
    }

    /// The same elements with another shape of the same number of elements. Shares the buffer.
    pub fn reshaped(mut self, shape: Shape) -> Result<Tensor> {
        if shape.n_elements() != self.n_elements() {
            return Err(Error::invalid_argument(format!(
                "cannot reshape {} elements {} to {} elements {shape}",
                self.n_elements(),
                self.shape,
                shape.n_elements()
            )));
        }
        self.shape = shape;
        Ok(self)
    }

    /// The same bytes read as another dtype of the same size. Shares the buffer.
    pub fn bitcast(mut self, dtype: DType) -> Result<Tensor> {
        if self.dtype.size().is_none() || self.dtype.size() != dtype.size() {
            return Err(Error::invalid_argument(format!("{} and {dtype} differ in size", self.dtype)));
        }
        self.dtype = dtype;
        Ok(self)
    }

    /// Rows `start .. start + n_rows` of dimension 0. Shares the buffer.
    pub fn rows(&self, start: usize, n_rows: usize) -> Result<Tensor> {
        let Some((&n, inner)) = self.shape.split_first() else {
            return Err(Error::invalid_argument("a scalar has no rows"));
        };
        if start.checked_add(n_rows).is_none_or(|end| end > n) {
            return Err(Error::invalid_argument(format!("rows {start}..{} of {n}", start.saturating_add(n_rows))));
        }
        let mut dims = self.shape.dims().to_vec();
        dims[0] = n_rows;
        let shape = Shape::new(&dims)?;
        let row: usize = inner.iter().product();
        let data = match &self.data {
            TensorData::Inline(_) => {
                let row_bytes = row * self.dtype.size().unwrap_or(0);
                let bytes = &self.host_bytes()?[start * row_bytes..(start + n_rows) * row_bytes];
                let mut words = [0u64; 2];
                bytemuck::bytes_of_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
                TensorData::Inline(words)
            }
            TensorData::Buffer { buffer, offset } => {
                let row_bytes = row * self.dtype.size().unwrap_or(0);
                TensorData::Buffer { buffer: buffer.clone(), offset: offset + start * row_bytes }
            }
            TensorData::Strings(strings) => {
                TensorData::Strings(Strings::new(strings[start * row..(start + n_rows) * row].to_vec()))
            }
            TensorData::Handles(handles) => {
                TensorData::Handles(Arc::new(handles[start * row..(start + n_rows) * row].to_vec()))
            }
        };
        Ok(Tensor { dtype: self.dtype, shape, data })
    }

    #[inline]
    fn expect_dtype(&self, dtype: DType) -> Result<()> {
        if self.dtype == dtype {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("expected {dtype}, found {}", self.dtype)))
    }
}

fn out_of_memory(dtype: DType, shape: &Shape) -> Error {
    Error::resource_exhausted(format!("OOM when allocating {dtype}{shape}: the system refused"))
}

/// The bytes of `shape` elements of `dtype`; an error for dtypes whose elements are not contiguous in a buffer.
fn byte_count(dtype: DType, shape: &Shape) -> Result<usize> {
    let size = dtype.size().ok_or_else(|| Error::invalid_argument(format!("{dtype} elements have no fixed size")))?;
    shape
        .n_elements()
        .checked_mul(size)
        .filter(|&n| n <= isize::MAX as usize)
        .ok_or_else(|| Error::invalid_argument(format!("{dtype}{shape} is too large")))
}

fn not_host(memory: Memory) -> Error {
    Error::internal(format!("host access to {memory} memory; a copy op is missing"))
}

/// `float[2,2] [1.0, 2.0, …]`: dtype, shape and the first elements.
impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        write!(f, "{}{} ", self.dtype, self.shape)?;
        if let TensorData::Strings(strings) = &self.data {
            return f.debug_list().entries(strings.iter().take(SHOWN)).finish();
        }
        struct Show<'a, 'b, 'c>(&'a Tensor, &'b mut fmt::Formatter<'c>);
        impl crate::ElementVisitor for Show<'_, '_, '_> {
            type Out = fmt::Result;
            fn visit<T: Element>(self) -> Result<fmt::Result> {
                let elements = self.0.data::<T>()?;
                let mut list = self.1.debug_list();
                list.entries(elements.iter().take(SHOWN));
                if elements.len() > SHOWN {
                    list.entry(&format_args!("…"));
                }
                Ok(list.finish())
            }
        }
        self.dtype.visit("printing", Show(self, f)).unwrap_or(Ok(()))
    }
}

/// Equal dtype, shape and elements, on the host. NaN is not equal to itself.
impl PartialEq for Tensor {
    fn eq(&self, other: &Tensor) -> bool {
        if self.dtype != other.dtype || self.shape != other.shape {
            return false;
        }
        if let (TensorData::Strings(a), TensorData::Strings(b)) = (&self.data, &other.data) {
            return a[..] == b[..];
        }
        struct Same<'a>(&'a Tensor, &'a Tensor);
        impl crate::ElementVisitor for Same<'_> {
            type Out = bool;
            fn visit<T: Element>(self) -> Result<bool> {
                Ok(self.0.data::<T>()? == self.1.data::<T>()?)
            }
        }
        // Quantised elements are compared by their bytes.
        let bytes = |_| matches!((self.host_bytes(), other.host_bytes()), (Ok(a), Ok(b)) if a == b);
        self.dtype.visit("comparing", Same(self, other)).unwrap_or_else(bytes)
    }
}

impl<T: Element> From<T> for Tensor {
    fn from(value: T) -> Tensor {
        Tensor::scalar(value)
    }
}

impl From<&str> for Tensor {
    fn from(value: &str) -> Tensor {
        Tensor::string(Bytes::copy_from_slice(value.as_bytes()))
    }
}

/// A list of texts.
impl<const N: usize> From<[&str; N]> for Tensor {
    fn from(values: [&str; N]) -> Tensor {
        let strings = values.map(|value| Bytes::copy_from_slice(value.as_bytes())).to_vec();
        Tensor::from_strings([N], strings).expect("the shape is the array's own")
    }
}

impl<T: Element> From<Vec<T>> for Tensor {
    fn from(values: Vec<T>) -> Tensor {
        Tensor::vector(values)
    }
}

impl<T: Element> From<&[T]> for Tensor {
    fn from(values: &[T]) -> Tensor {
        Tensor::vector(values)
    }
}

impl<T: Element, const N: usize> From<[T; N]> for Tensor {
    fn from(values: [T; N]) -> Tensor {
        Tensor::vector(values)
    }
}

/// A matrix, row by row.
impl<T: Element, const N: usize, const M: usize> From<[[T; N]; M]> for Tensor {
    fn from(rows: [[T; N]; M]) -> Tensor {
        Tensor::from_vec([M, N], rows.concat()).expect("the shape is the array's own")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantised_tensors_are_compared_by_their_bytes() {
        let one = Tensor::zeros(DType::QI32, [20]).unwrap();
        let mut other = one.clone();
        assert_eq!(one, other);
        other = Tensor::zeros(DType::QI32, [20]).unwrap();
        other.host_bytes_mut().unwrap()[3] = 1;
        assert_ne!(one, other);
    }

    #[test]
    fn elements_come_back_as_they_went_in() {
        let tensor = Tensor::from([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        assert_eq!(tensor.shape(), &Shape::from([2, 3]));
        assert_eq!(tensor.data::<f32>(), Ok(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..]));
        assert_eq!(tensor.rows(1, 1).and_then(|row| row.reshaped([3].into())), Ok(Tensor::from([4.0f32, 5.0, 6.0])));
        assert!(tensor.data::<f64>().is_err());
        assert!(tensor.rows(1, usize::MAX).is_err());
    }

    #[test]
    fn small_tensors_need_no_buffer() {
        assert!(matches!(Tensor::scalar(3i64).storage(), TensorData::Inline(_)));
        assert!(matches!(Tensor::from([1i32, 2, 3, 4]).storage(), TensorData::Inline(_)));
        assert!(matches!(Tensor::from([1i32, 2, 3, 4, 5]).storage(), TensorData::Buffer { .. }));
        assert_eq!(Tensor::from([true, false]).data::<bool>(), Ok(&[true, false][..]));
        assert_eq!(Tensor::from([1i32, 2, 3, 4]).rows(1, 2), Ok(Tensor::from([2i32, 3])));
    }

    #[test]
    fn only_the_sole_owner_may_write() {
        let mut tensor = Tensor::zeros(DType::F32, [100]).unwrap();
        assert!(tensor.is_unique());
        let shared = tensor.clone();
        assert!(!tensor.is_unique());
        assert!(tensor.data_mut::<f32>().is_err());
        drop(shared);
        assert!(tensor.data_mut::<f32>().is_ok());
    }

    #[test]
    fn bools_in_a_long_tensor_can_be_written() {
        let mut tensor = Tensor::from(vec![true; 40]);
        tensor.data_mut::<bool>().unwrap()[3] = false;
        assert_eq!(tensor.data::<bool>().unwrap().iter().filter(|&&b| b).count(), 39);
    }

    #[test]
    fn any_kind_of_device_memory_is_out_of_the_hosts_reach() {
        struct Remote;
        impl Buffer for Remote {
            fn memory(&self) -> Memory {
                Memory::Device { kind: "TPU", ordinal: 3 }
            }
            fn n_bytes(&self) -> usize {
                400
            }
            fn host(&self) -> Option<&[u8]> {
                None
            }
            fn host_mut(&mut self) -> Option<&mut [u8]> {
                None
            }
            fn as_any(&self) -> &dyn Any {
                self
            }
        }
        let mut tensor = Tensor::from_buffer(DType::F32, [100].into(), Arc::new(Remote)).unwrap();
        assert!(!tensor.memory().is_host());
        let text = "host access to TPU:3 memory; a copy op is missing";
        assert_eq!(tensor.data::<f32>().unwrap_err().message(), text);
        assert_eq!(tensor.host_bytes_mut().unwrap_err().message(), text);
        assert!(Memory::Host.is_host() && Memory::PinnedHost.is_host());
    }

    #[test]
    fn sizes_that_overflow_are_an_error() {
        assert!(Tensor::zeros(DType::F64, Shape::new(&[1 << 61]).unwrap()).is_err());
        assert!(Tensor::inline(DType::F64, &Shape::new(&[1 << 61]).unwrap()).is_none());
        assert!(Tensor::from_vec([2], vec![1.0f32]).is_err());
    }
}
