//! Tensors and shapes, to and from the wire.
//!
//! What arrives is checked against its own shape before anything is allocated: apart from the fill rule (a short list of
//! values repeats its last one), a tensor never takes more memory than the bytes that came justify, and the fill rule
//! draws on a [budget](from_proto_within). Large contents are shared with the message, not copied, both ways.

use std::any::Any;
use std::sync::Arc;

use bytes::Bytes;
use half::{bf16, f16};
use kolo_core::{
    Buffer, DType, Element, Error, Memory, PartialShape, ResourceHandle, Result, Shape, Tensor, TensorData,
};

use super::proto::{DATA_TYPE, Dim, ResourceHandleProto, TensorProto, TensorShapeProto};

// A `tensor_content` is little-endian and is used as it is.
const _: () = assert!(cfg!(target_endian = "little"), "tensors are shared with little-endian messages");

/// The most bytes that the fill rule may add, unless the caller says otherwise.
pub const MAX_FILLED_BYTES: u64 = 1 << 33;

/// Up to this many bytes the elements are written as a list of values, which people can read; above it, as content.
const MAX_TYPED_BYTES: usize = 64;

/// Contents below this size are copied: sharing them would keep a whole message alive for a few bytes.
const MIN_SHARED_BYTES: usize = 4096;

/// TensorFlow's limit, and far above any use.
const MAX_RANK: usize = 254;

/// Reads a tensor. The fill rule may add up to [`MAX_FILLED_BYTES`].
pub fn from_proto(proto: &TensorProto) -> Result<Tensor> {
    from_proto_within(proto, &mut MAX_FILLED_BYTES.clone())
}

/// Reads a tensor; the bytes that the fill rule adds are taken from `budget`, and too few left there is an error. With
/// one budget for many tensors, a small message cannot ask for a lot of memory in small portions.
pub fn from_proto_within(proto: &TensorProto, budget: &mut u64) -> Result<Tensor> {
    let dtype = dtype_from_number(proto.dtype)?;
    let shape = match &proto.tensor_shape {
        Some(shape) => shape_from_proto(shape)?
            .known()
            .ok_or_else(|| Error::invalid_argument(format!("a tensor's shape is only partly known: {shape:?}")))?,
        None => Shape::scalar(),
    };
    match dtype {
        DType::Str => read_strings(proto, shape, budget),
        DType::Resource => read_handle(proto, shape),
        DType::Variant => Err(Error::unimplemented("tensors of variants are not supported")),
        _ if shape.n_elements() == 0 => Tensor::zeros(dtype, shape),
        _ if !proto.tensor_content.is_empty() => read_content(dtype, shape, &proto.tensor_content),
        _ => read_values(proto, dtype, shape, budget),
    }
}

/// Writes a tensor that the host can read. One value stands for all if they are the same; up to 64 bytes are written as
/// a list of values, more as content that shares the tensor's memory.
pub fn to_proto(tensor: &Tensor) -> Result<TensorProto> {
    let mut proto = TensorProto {
        dtype: tensor.dtype() as i32,
        tensor_shape: Some(shape_to_proto(&PartialShape::from(tensor.shape()))),
        ..TensorProto::default()
    };
    match tensor.storage() {
        TensorData::Strings(strings) => {
            let all_same = strings.iter().all(|string| *string == strings[0]);
            let shown = if all_same { strings.len().min(1) } else { strings.len() };
            proto.string_val = strings[..shown].to_vec();
        }
        TensorData::Handles(handles) => {
            proto.resource_handle_val = handles.iter().map(handle_to_proto).collect();
        }
        TensorData::Inline(_) | TensorData::Buffer { .. } => {
            let bytes = tensor.host_bytes()?;
            let size = tensor.dtype().size().unwrap_or(1);
            let all_same = bytes.chunks_exact(size).all(|element| *element == bytes[..size]);
            if all_same {
                write_values(&mut proto, tensor.dtype(), &bytes[..size.min(bytes.len())]);
            } else if bytes.len() <= MAX_TYPED_BYTES {
                write_values(&mut proto, tensor.dtype(), bytes);
            } else {
                proto.tensor_content = Bytes::from_owner(HostTensor(tensor.clone()));
            }
        }
    }
    Ok(proto)
}

/// The dtype of a value or an attribute. References and numbers that are not known are errors.
pub fn dtype_from_number(number: i32) -> Result<DType> {
    DType::from_number(number).map_err(|unknown| match DATA_TYPE.name_of(number) {
        Some("DT_INVALID") => Error::invalid_argument("the dtype is missing"),
        Some(name) if name.ends_with("_REF") => {
            Error::invalid_argument(format!("{name} is the type of a reference, which only an edge can have"))
        }
        Some(name) => Error::unimplemented(format!("dtype {name} is not supported")),
        None => unknown,
    })
}

/// Reads a shape, of which parts may be unknown.
pub fn shape_from_proto(proto: &TensorShapeProto) -> Result<PartialShape> {
    let bad = |why: String| Err(Error::invalid_argument(format!("not a shape: {why}")));
    if proto.unknown_rank {
        return match proto.dim.len() {
            0 => Ok(PartialShape::unknown()),
            n => bad(format!("of unknown rank, and {n} dimensions")),
        };
    }
    if proto.dim.len() > MAX_RANK {
        return bad(format!("{} dimensions, the most is {MAX_RANK}", proto.dim.len()));
    }
    let mut dims = Vec::with_capacity(proto.dim.len());
    for dim in &proto.dim {
        match usize::try_from(dim.size) {
            Ok(size) => dims.push(Some(size)),
            Err(_) if dim.size == -1 => dims.push(None),
            Err(_) => return bad(format!("a dimension of size {}", dim.size)),
        }
    }
    // What is known may already be too much.
    Shape::new(&dims.iter().copied().flatten().collect::<Vec<_>>())?;
    Ok(PartialShape::new(&dims))
}

/// Writes a shape, of which parts may be unknown.
pub fn shape_to_proto(shape: &PartialShape) -> TensorShapeProto {
    let size = |dim: &Option<usize>| dim.and_then(|dim| i64::try_from(dim).ok()).unwrap_or(-1);
    match shape.dims() {
        Some(dims) => TensorShapeProto {
            dim: dims.iter().map(|dim| Dim { size: size(dim), name: String::new() }).collect(),
            unknown_rank: false,
        },
        None => TensorShapeProto { dim: Vec::new(), unknown_rank: true },
    }
}

fn read_strings(proto: &TensorProto, shape: Shape, budget: &mut u64) -> Result<Tensor> {
    let n = shape.n_elements();
    if n > 0 && !proto.tensor_content.is_empty() {
        return Tensor::from_strings(shape, split_strings(&proto.tensor_content, n)?);
    }
    let given = &proto.string_val[..n.min(proto.string_val.len())];
    let missing = n - given.len();
    spend(budget, missing, size_of::<Bytes>(), DType::Str, &shape)?;
    let last = given.last().cloned().unwrap_or_default();
    let strings = given.iter().cloned().chain(std::iter::repeat_n(last, missing)).collect();
    Tensor::from_strings(shape, strings)
}

/// `n` lengths as varints, then the bytes of all strings.
fn split_strings(content: &Bytes, n: usize) -> Result<Vec<Bytes>> {
    let damaged = |why: &str| Error::invalid_argument(format!("tensor_content is not {n} strings: {why}"));
    // Each length takes a byte at least, so a large `n` fails before it is believed.
    if n > content.len() {
        return Err(damaged("it is too short"));
    }
    let mut rest = &content[..];
    let mut lengths = Vec::with_capacity(n);
    for _ in 0..n {
        let length = prost::encoding::decode_varint(&mut rest).map_err(|_| damaged("a length is cut off"))?;
        lengths.push(usize::try_from(length).map_err(|_| damaged("a length is too large"))?);
    }
    let mut at = content.len() - rest.len();
    let mut strings = Vec::with_capacity(n);
    for length in lengths {
        let end = at.checked_add(length).filter(|&end| end <= content.len());
        let end = end.ok_or_else(|| damaged("a string is cut off"))?;
        strings.push(content.slice(at..end));
        at = end;
    }
    match at == content.len() {
        true => Ok(strings),
        false => Err(damaged("bytes are left over")),
    }
}

fn read_handle(proto: &TensorProto, shape: Shape) -> Result<Tensor> {
    let only_one = || {
        Error::unimplemented(format!(
            "a resource tensor of shape {shape} with {} handles; only a scalar with one handle is supported",
            proto.resource_handle_val.len()
        ))
    };
    match proto.resource_handle_val.as_slice() {
        [handle] if shape.rank() == 0 => Ok(Tensor::handle(ResourceHandle {
            device: handle.device.as_str().into(),
            container: handle.container.as_str().into(),
            name: handle.name.as_str().into(),
            object: None,
        })),
        _ => Err(only_one()),
    }
}

fn handle_to_proto(handle: &ResourceHandle) -> ResourceHandleProto {
    ResourceHandleProto {
        device: handle.device.to_string(),
        container: handle.container.to_string(),
        name: handle.name.to_string(),
        ..ResourceHandleProto::default()
    }
}

fn read_content(dtype: DType, shape: Shape, content: &Bytes) -> Result<Tensor> {
    let n_bytes = dtype.size().and_then(|size| size.checked_mul(shape.n_elements()));
    if n_bytes != Some(content.len()) {
        let needed = n_bytes.map_or("too many".to_owned(), |n| n.to_string());
        return Err(Error::invalid_argument(format!(
            "{dtype}{shape} needs {needed} bytes, tensor_content has {}",
            content.len()
        )));
    }
    if dtype == DType::Bool
        && let Some(byte) = content.iter().find(|&&byte| byte > 1)
    {
        return Err(Error::invalid_argument(format!("tensor_content of a bool tensor holds {byte}")));
    }
    if content.len() >= MIN_SHARED_BYTES && is_aligned(content, dtype) {
        return Tensor::from_buffer(dtype, shape, Arc::new(SharedBytes::Message(content.clone())));
    }
    let mut tensor = Tensor::zeros(dtype, shape)?;
    tensor.host_bytes_mut()?.copy_from_slice(content);
    Ok(tensor)
}

fn is_aligned(content: &Bytes, dtype: DType) -> bool {
    let alignment = match dtype {
        DType::Complex64 => align_of::<f32>(),
        DType::Complex128 => align_of::<f64>(),
        _ => dtype.size().unwrap_or(1),
    };
    content.as_ptr().addr().is_multiple_of(alignment)
}

/// The elements from the field of values for the dtype, by the fill rule.
fn read_values(proto: &TensorProto, dtype: DType, shape: Shape, budget: &mut u64) -> Result<Tensor> {
    use DType::*;
    let of = Filling { dtype, shape, budget };
    match dtype {
        F32 => of.fill(&proto.float_val, |&value| Some(value)),
        F64 => of.fill(&proto.double_val, |&value| Some(value)),
        F16 => of.fill(&proto.half_val, |&bits| u16::try_from(bits).ok().map(f16::from_bits)),
        BF16 => of.fill(&proto.half_val, |&bits| u16::try_from(bits).ok().map(bf16::from_bits)),
        I32 | QI32 => of.fill(&proto.int_val, |&value| Some(value)),
        I16 | QI16 => of.fill(&proto.int_val, |&value| i16::try_from(value).ok()),
        I8 | QI8 => of.fill(&proto.int_val, |&value| i8::try_from(value).ok()),
        U16 | QU16 => of.fill(&proto.int_val, |&value| u16::try_from(value).ok()),
        U8 | QU8 => of.fill(&proto.int_val, |&value| u8::try_from(value).ok()),
        I64 => of.fill(&proto.int64_val, |&value| Some(value)),
        U32 => of.fill(&proto.uint32_val, |&value| Some(value)),
        U64 => of.fill(&proto.uint64_val, |&value| Some(value)),
        Bool => of.fill(&proto.bool_val, |&value| Some(value)),
        Complex64 => of.fill_pairs(&proto.scomplex_val, f32::to_le_bytes),
        Complex128 => of.fill_pairs(&proto.dcomplex_val, f64::to_le_bytes),
        Str | Resource | Variant => Err(Error::internal(format!("{dtype} has no list of values"))),
    }
}

/// A tensor of at least one element that is being read from a list of values.
struct Filling<'a> {
    dtype: DType,
    shape: Shape,
    budget: &'a mut u64,
}

impl Filling<'_> {
    fn fill<V: std::fmt::Debug, T: Element>(self, values: &[V], convert: impl Fn(&V) -> Option<T>) -> Result<Tensor> {
        let n = self.shape.n_elements();
        let given = &values[..n.min(values.len())];
        spend(self.budget, n - given.len(), size_of::<T>(), self.dtype, &self.shape)?;
        if given.is_empty() {
            return Tensor::zeros(self.dtype, self.shape);
        }
        let mut elements = Vec::new();
        elements.try_reserve_exact(n).map_err(|_| out_of_memory(self.dtype, &self.shape))?;
        for value in given {
            let element = convert(value).ok_or_else(|| {
                Error::invalid_argument(format!("value {value:?} does not fit an element of {}", self.dtype))
            })?;
            elements.push(element);
        }
        elements.resize(n, elements[given.len() - 1]);
        Tensor::from_vec(self.shape, elements)?.bitcast(self.dtype)
    }

    /// Complex numbers: each is two values, side by side as in memory.
    fn fill_pairs<V: Copy, const N: usize>(self, values: &[V], to_bytes: impl Fn(V) -> [u8; N]) -> Result<Tensor> {
        let (pairs, odd) = values.as_chunks::<2>();
        if !odd.is_empty() {
            return Err(Error::invalid_argument(format!("{} values are not pairs for {}", values.len(), self.dtype)));
        }
        let n = self.shape.n_elements();
        let given = &pairs[..n.min(pairs.len())];
        spend(self.budget, n - given.len(), 2 * N, self.dtype, &self.shape)?;
        let mut tensor = Tensor::zeros(self.dtype, self.shape)?;
        if let Some(&last) = given.last() {
            let all = given.iter().chain(std::iter::repeat(&last));
            for (element, [re, im]) in tensor.host_bytes_mut()?.chunks_exact_mut(2 * N).zip(all) {
                element[..N].copy_from_slice(&to_bytes(*re));
                element[N..].copy_from_slice(&to_bytes(*im));
            }
        }
        Ok(tensor)
    }
}

/// Takes the bytes of elements that are not in the message from the budget.
fn spend(budget: &mut u64, n_elements: usize, size: usize, dtype: DType, shape: &Shape) -> Result<()> {
    let n_bytes = (n_elements as u64).checked_mul(size as u64);
    *budget = n_bytes.and_then(|n| budget.checked_sub(n)).ok_or_else(|| {
        Error::resource_exhausted(format!(
            "{dtype}{shape} has {n_elements} elements that are not in the message; filling them in is limited to {budget} more bytes"
        ))
    })?;
    Ok(())
}

fn out_of_memory(dtype: DType, shape: &Shape) -> Error {
    Error::resource_exhausted(format!("no memory for {dtype}{shape}"))
}

/// Puts elements into the list of values for their dtype.
fn write_values(proto: &mut TensorProto, dtype: DType, bytes: &[u8]) {
    use DType::*;
    match dtype {
        F32 => proto.float_val = elements(bytes, f32::from_le_bytes),
        F64 => proto.double_val = elements(bytes, f64::from_le_bytes),
        F16 | BF16 => proto.half_val = elements(bytes, |bits| u16::from_le_bytes(bits).into()),
        I32 | QI32 => proto.int_val = elements(bytes, i32::from_le_bytes),
        I16 | QI16 => proto.int_val = elements(bytes, |bits| i16::from_le_bytes(bits).into()),
        I8 | QI8 => proto.int_val = elements(bytes, |bits| i8::from_le_bytes(bits).into()),
        U16 | QU16 => proto.int_val = elements(bytes, |bits| u16::from_le_bytes(bits).into()),
        U8 | QU8 => proto.int_val = elements(bytes, |bits| u8::from_le_bytes(bits).into()),
        I64 => proto.int64_val = elements(bytes, i64::from_le_bytes),
        U32 => proto.uint32_val = elements(bytes, u32::from_le_bytes),
        U64 => proto.uint64_val = elements(bytes, u64::from_le_bytes),
        Bool => proto.bool_val = elements(bytes, |[byte]| byte != 0),
        Complex64 => proto.scomplex_val = elements(bytes, f32::from_le_bytes),
        Complex128 => proto.dcomplex_val = elements(bytes, f64::from_le_bytes),
        // Their elements do not lie side by side, so they are never bytes.
        Str | Resource | Variant => {}
    }
}

fn elements<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|element| read(*element)).collect()
}

/// A tensor lent to a message. [`to_proto`] has seen that the host can read it.
struct HostTensor(Tensor);

impl AsRef<[u8]> for HostTensor {
    fn as_ref(&self) -> &[u8] {
        self.0.host_bytes().unwrap_or_default()
    }
}

/// A part of a message that a tensor holds on to. Writing to it moves it to memory of its own first.
enum SharedBytes {
    Message(Bytes),
    Own { buffer: Arc<dyn Buffer>, n_bytes: usize },
}

impl Buffer for SharedBytes {
    fn memory(&self) -> Memory {
        Memory::Host
    }

    fn n_bytes(&self) -> usize {
        match self {
            SharedBytes::Message(bytes) => bytes.len(),
            SharedBytes::Own { n_bytes, .. } => *n_bytes,
        }
    }

    fn host(&self) -> Option<&[u8]> {
        match self {
            SharedBytes::Message(bytes) => Some(bytes),
            SharedBytes::Own { buffer, n_bytes } => buffer.host()?.get(..*n_bytes),
        }
    }

    fn host_mut(&mut self) -> Option<&mut [u8]> {
        if let SharedBytes::Message(bytes) = self {
            // Whole words, so that the copy is aligned for every element type.
            let mut buffer = u64::into_buffer(vec![0; bytes.len().div_ceil(8)]);
            Arc::get_mut(&mut buffer)?.host_mut()?.get_mut(..bytes.len())?.copy_from_slice(bytes);
            *self = SharedBytes::Own { n_bytes: bytes.len(), buffer };
        }
        match self {
            SharedBytes::Own { buffer, n_bytes } => Arc::get_mut(buffer)?.host_mut()?.get_mut(..*n_bytes),
            SharedBytes::Message(_) => None,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::wire::proto::{GraphDef, Value};

    fn shape(dims: &[i64]) -> Option<TensorShapeProto> {
        let dim = dims.iter().map(|&size| Dim { size, name: String::new() }).collect();
        Some(TensorShapeProto { dim, unknown_rank: false })
    }

    fn proto(dtype: DType, dims: &[i64]) -> TensorProto {
        TensorProto { dtype: dtype as i32, tensor_shape: shape(dims), ..TensorProto::default() }
    }

    #[track_caller]
    fn refused(proto: &TensorProto, why: &str) {
        let error = from_proto(proto).unwrap_err();
        assert!(error.message().contains(why), "{error}");
    }

    /// Every dtype's `[0, 1, 100]`, as TensorFlow writes it: numeric elements by value, the others by their bytes.
    #[test]
    fn tensorflow_s_constants_are_read() {
        let def = GraphDef::decode(&include_bytes!("../../tests/data/consts.pb")[..]).unwrap();
        let find = |name: &str| {
            let node = def.node.iter().find(|node| node.name == name).unwrap();
            match &node.attr["value"].value {
                Some(Value::Tensor(tensor)) => from_proto(tensor).unwrap(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(find("vector_float16"), Tensor::from([0.0, 1.0, 100.0].map(f16::from_f32)));
        assert_eq!(find("vector_bfloat16"), Tensor::from([0.0, 1.0, 100.0].map(bf16::from_f32)));
        assert_eq!(find("vector_float32"), Tensor::from([0.0f32, 1.0, 100.0]));
        assert_eq!(find("vector_float64"), Tensor::from([0.0f64, 1.0, 100.0]));
        assert_eq!(find("vector_int8"), Tensor::from([0i8, 1, 100]));
        assert_eq!(find("vector_int16"), Tensor::from([0i16, 1, 100]));
        assert_eq!(find("vector_int32"), Tensor::from([0i32, 1, 100]));
        assert_eq!(find("vector_int64"), Tensor::from([0i64, 1, 100]));
        assert_eq!(find("vector_uint8"), Tensor::from([0u8, 1, 100]));
        assert_eq!(find("vector_uint16"), Tensor::from([0u16, 1, 100]));
        assert_eq!(find("vector_uint32"), Tensor::from([0u32, 1, 100]));
        assert_eq!(find("vector_uint64"), Tensor::from([0u64, 1, 100]));
        assert_eq!(find("vector_bool"), Tensor::from([false, true, true]));
        assert_eq!(find("vector_qint8").host_bytes().unwrap(), [0, 1, 100]);
        assert_eq!(find("vector_quint8").host_bytes().unwrap(), [0, 1, 100]);
        assert_eq!(find("vector_qint32").bitcast(DType::I32), Ok(Tensor::from([0i32, 1, 100])));
        let complex = |parts: [f64; 6]| parts.iter().flat_map(|part| part.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(find("vector_complex128").host_bytes().unwrap(), complex([0.0, 0.0, 1.0, 0.0, 100.0, 0.0]));
        assert_eq!(find("vector_complex64").host_bytes().unwrap()[8..12], 1.0f32.to_le_bytes());
        assert_eq!(find("scalar"), Tensor::scalar(7i32));
        assert_eq!(find("empty"), Tensor::zeros(DType::F32, [0, 2]).unwrap());
        assert_eq!(find("filled"), Tensor::from([[3.0f32; 4]; 4]));
    }

    #[test]
    fn every_dtype_survives_as_values_and_as_content() {
        for &dtype in DType::ALL {
            let Some(size) = dtype.size() else { continue };
            for n in [0, 1, 3, 64 / size, 64 / size + 1, 5000] {
                for same in [false, true] {
                    let mut tensor = Tensor::zeros(dtype, [n]).unwrap();
                    for (i, byte) in tensor.host_bytes_mut().unwrap().iter_mut().enumerate() {
                        let i = if same { i % size } else { i };
                        // Bools are 0 or 1, and the pattern is no float's NaN.
                        *byte = if dtype == DType::Bool { (i % 3 == 1).into() } else { (i * 7 % 61) as u8 + 1 };
                    }
                    let written = to_proto(&tensor).unwrap();
                    let has_content = !written.tensor_content.is_empty();
                    assert_eq!(has_content, n * size > 64 && !same, "{dtype} {n} {same}");
                    let read = from_proto(&TensorProto::decode(written.encode_to_vec().as_slice()).unwrap()).unwrap();
                    assert_eq!((read.dtype(), read.shape()), (dtype, tensor.shape()));
                    assert_eq!(read.host_bytes(), tensor.host_bytes(), "{dtype} {n} {same}");
                }
            }
        }
    }

    #[test]
    fn small_constants_are_written_as_people_read_them() {
        let written = to_proto(&Tensor::from([1.0f32, 2.0, 2.0])).unwrap();
        assert_eq!(written, TensorProto { float_val: vec![1.0, 2.0, 2.0], ..proto(DType::F32, &[3]) });
        let written = to_proto(&Tensor::zeros(DType::I64, [1000]).unwrap()).unwrap();
        assert_eq!(written, TensorProto { int64_val: vec![0], ..proto(DType::I64, &[1000]) });
        let written = to_proto(&Tensor::from_strings([2], vec!["a".into(), "".into()]).unwrap()).unwrap();
        assert_eq!(written, TensorProto { string_val: vec!["a".into(), "".into()], ..proto(DType::Str, &[2]) });
        let written = to_proto(&Tensor::from([f16::from_f32(1.0), f16::NEG_ZERO])).unwrap();
        assert_eq!(written.half_val, [0x3c00, 0x8000]);
        // Zero and minus zero are equal, but not the same.
        assert_eq!(to_proto(&Tensor::from([0.0f32, -0.0])).unwrap().float_val.len(), 2);
    }

    #[test]
    fn values_that_are_left_out_repeat_the_last_one() {
        let check = |proto: TensorProto, expected: Tensor| assert_eq!(from_proto(&proto), Ok(expected));
        check(
            TensorProto { float_val: vec![1.0, 2.0], ..proto(DType::F32, &[4]) },
            Tensor::from([1.0f32, 2.0, 2.0, 2.0]),
        );
        check(proto(DType::I32, &[2]), Tensor::from([0i32, 0]));
        check(TensorProto { int_val: vec![1, 2, 3], ..proto(DType::I32, &[2]) }, Tensor::from([1i32, 2]));
        check(
            TensorProto { tensor_shape: None, bool_val: vec![true], ..proto(DType::Bool, &[]) },
            Tensor::scalar(true),
        );
        check(
            TensorProto { string_val: vec!["x".into()], ..proto(DType::Str, &[2]) },
            Tensor::from_strings([2], vec!["x".into(), "x".into()]).unwrap(),
        );
        check(proto(DType::Str, &[]), Tensor::from(""));
        let pairs = TensorProto { scomplex_val: vec![1.0, 2.0], ..proto(DType::Complex64, &[2]) };
        let bytes = [1.0f32, 2.0, 1.0, 2.0].map(f32::to_le_bytes).concat();
        assert_eq!(from_proto(&pairs).unwrap().host_bytes().unwrap(), bytes);
    }

    #[test]
    fn strings_in_content_are_lengths_then_bytes() {
        let content =
            |bytes: &'static [u8]| TensorProto { tensor_content: Bytes::from_static(bytes), ..proto(DType::Str, &[3]) };
        let expected = Tensor::from_strings([3], vec!["a".into(), "bb".into(), "".into()]).unwrap();
        assert_eq!(from_proto(&content(b"\x01\x02\x00abb")), Ok(expected));
        refused(&content(b"\x01\x02"), "too short");
        refused(&content(b"\x01\x02\xff"), "a length is cut off");
        refused(&content(b"\x01\x02\x00ab"), "a string is cut off");
        refused(&content(b"\x01\x02\x00abbc"), "bytes are left over");
        refused(&content(b"\x01\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01ab"), "a string is cut off");
    }

    #[test]
    fn what_does_not_fit_is_refused_before_memory_is_taken() {
        let content =
            |dtype, dims: &[i64], n| TensorProto { tensor_content: vec![2u8; n].into(), ..proto(dtype, dims) };
        refused(&content(DType::F32, &[2], 7), "float[2] needs 8 bytes, tensor_content has 7");
        refused(&content(DType::F64, &[1 << 61], 8), "needs too many bytes");
        refused(&content(DType::Bool, &[2], 2), "bool tensor holds 2");
        refused(&content(DType::Str, &[1 << 60], 9), "too short");
        refused(&proto(DType::F32, &[1 << 40]), "not in the message");
        refused(&proto(DType::Str, &[1 << 40]), "not in the message");
        refused(
            &TensorProto { dcomplex_val: vec![1.0; 2], ..proto(DType::Complex128, &[1 << 60]) },
            "not in the message",
        );
        refused(&TensorProto { scomplex_val: vec![1.0], ..proto(DType::Complex64, &[]) }, "not pairs");
        refused(&proto(DType::F32, &[1 << 40, 1 << 40]), "too many elements");
        refused(&proto(DType::F32, &[0, 1 << 40, 1 << 40]), "too many elements");
        refused(&proto(DType::F32, &[-1]), "only partly known");
        refused(&proto(DType::F32, &[-2]), "a dimension of size -2");
        refused(&proto(DType::F32, &[1; 255]), "255 dimensions");
        refused(&TensorProto { int_val: vec![256], ..proto(DType::U8, &[]) }, "value 256 does not fit");
        refused(&TensorProto { half_val: vec![-1], ..proto(DType::F16, &[]) }, "value -1 does not fit");
        refused(&TensorProto { dtype: 101, ..proto(DType::F32, &[]) }, "DT_FLOAT_REF");
        refused(&proto(DType::Variant, &[]), "variants are not supported");
        let unknown = TensorShapeProto { dim: vec![Dim::default()], unknown_rank: true };
        refused(&TensorProto { tensor_shape: Some(unknown), ..proto(DType::F32, &[]) }, "of unknown rank");
        let mut budget = 12;
        let fill = TensorProto { float_val: vec![1.0], ..proto(DType::F32, &[3]) };
        assert!(from_proto_within(&fill, &mut budget).is_ok());
        assert_eq!(budget, 4);
        assert!(from_proto_within(&fill, &mut budget).is_err());
    }

    #[test]
    fn a_handle_is_its_names() {
        let handle = ResourceHandle { device: "d".into(), container: "c".into(), name: "n".into(), object: None };
        let written = to_proto(&Tensor::handle(handle)).unwrap();
        assert_eq!(written.resource_handle_val[0].container, "c");
        let read = from_proto(&written).unwrap();
        assert_eq!(format!("{:?}", read.resource().unwrap()), "c/n on d");
        refused(&proto(DType::Resource, &[]), "with 0 handles");
        refused(&TensorProto { tensor_shape: shape(&[1]), ..written }, "of shape [1] with 1 handles");
    }

    #[test]
    fn large_contents_are_shared_until_they_are_written_to() {
        let tensor = Tensor::from((0..2000).map(|i| i as f32).collect::<Vec<_>>());
        let written = to_proto(&tensor).unwrap();
        let place = |tensor: &Tensor| tensor.host_bytes().unwrap().as_ptr();
        assert_eq!(written.tensor_content.as_ptr(), place(&tensor));
        let mut read = from_proto(&written).unwrap();
        assert_eq!(place(&read), place(&tensor));
        read.data_mut::<f32>().unwrap()[1] = -1.0;
        assert_eq!(read.data::<f32>().unwrap()[..3], [0.0, -1.0, 2.0]);
        assert_eq!(tensor.data::<f32>().unwrap()[..3], [0.0, 1.0, 2.0]);

        // One byte further on, the elements are not aligned, and must be copied.
        let mut bytes = vec![0u8];
        bytes.extend_from_slice(tensor.host_bytes().unwrap());
        let moved = Bytes::from(bytes).slice(1..);
        let aligned = moved.as_ptr().addr().is_multiple_of(4);
        let read = from_proto(&TensorProto { tensor_content: moved.clone(), ..proto(DType::F32, &[2000]) }).unwrap();
        assert_eq!(read, tensor);
        assert_eq!(place(&read) == moved.as_ptr(), aligned);
    }
}
