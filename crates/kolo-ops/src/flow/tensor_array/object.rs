//! The array itself: what the handles refer to.

use std::any::Any;
use std::sync::Arc;

use half::{bf16, f16};
use kolo_core::{DType, Element, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::Charge;
use parking_lot::{Mutex, MutexGuard};

use crate::KernelCtx;
use crate::holdings::{Holdings, Measured, OBJECT};
use crate::memory::room;
use crate::resource::Resource;

/// What a tensor array is made with.
#[derive(Clone, Debug)]
pub(super) struct ArrayOptions {
    pub name: String,
    pub dtype: DType,
    pub element_shape: PartialShape,
    pub dynamic_size: bool,
    /// A read gives the tensor up.
    pub clear_after_read: bool,
    /// The first write decides the shape of all elements.
    pub identical_element_shapes: bool,
    /// Holds gradients: several writes to one element are summed, and what nobody writes is zero.
    pub is_gradient: bool,
}

pub(super) struct ArrayObject {
    options: ArrayOptions,
    state: Mutex<ArrayContents>,
    /// A loop makes one in every iteration.
    _object: Charge,
}

struct ArrayContents {
    element_shape: PartialShape,
    dynamic_size: bool,
    /// Every element costs memory, written or not, which a graph of a few bytes can ask for.
    elements: Vec<Slot>,
    /// The elements' memory, counted as the device's.
    charge: Charge,
    /// What the elements hold.
    holdings: Holdings,
    closed: bool,
}

#[derive(Clone, Default)]
struct Slot {
    tensor: Option<Tensor>,
    /// Known once written; for gradients also without a tensor, which then stands for zeros.
    shape: Option<Shape>,
    read: bool,
    cleared: bool,
}

impl Resource for ArrayObject {
    fn kind(&self) -> &'static str {
        "tensor array"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl ArrayObject {
    /// An array of `size` elements. The device of `ctx` counts their memory.
    pub(super) fn new(ctx: &KernelCtx<'_>, options: ArrayOptions, size: usize) -> Result<ArrayObject> {
        let tag: Arc<str> = format!("TensorArray {}", options.name).into();
        let object = ctx.device.charge(OBJECT, &tag)?;
        let mut state = ArrayContents {
            element_shape: options.element_shape.clone(),
            dynamic_size: options.dynamic_size,
            elements: Vec::new(),
            charge: Charge::NONE,
            holdings: Holdings::new(object.another(0)?),
            closed: false,
        };
        state.grow(ctx, size)?;
        Ok(ArrayObject { options, state: Mutex::new(state), _object: object })
    }

    /// The array for the gradients of this one's elements. From now on this one keeps its size.
    pub(super) fn gradient(&self, ctx: &KernelCtx<'_>, source: &str) -> Result<ArrayObject> {
        let mut state = self.open()?;
        state.dynamic_size = false;
        let options = ArrayOptions {
            name: self.gradient_name(source),
            element_shape: state.element_shape.clone(),
            dynamic_size: false,
            clear_after_read: true,
            is_gradient: true,
            ..self.options.clone()
        };
        let gradient = ArrayObject::new(ctx, options, state.elements.len())?;
        for (to, from) in gradient.state.lock().elements.iter_mut().zip(&state.elements) {
            to.shape.clone_from(&from.shape);
        }
        Ok(gradient)
    }

    pub(super) fn gradient_name(&self, source: &str) -> String {
        format!("{}@{source}", self.options.name)
    }

    pub(super) fn dtype(&self) -> DType {
        self.options.dtype
    }

    pub(super) fn size(&self) -> Result<usize> {
        Ok(self.open()?.elements.len())
    }

    /// What is known of the shape of every element.
    pub(super) fn element_shape(&self) -> Result<PartialShape> {
        Ok(self.open()?.element_shape.clone())
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let elements = std::mem::take(&mut state.elements);
        let charge = std::mem::replace(&mut state.charge, Charge::NONE);
        state.holdings.clear();
        drop(state);
        drop(elements);
        drop(charge);
    }

    pub(super) fn write(&self, ctx: &KernelCtx<'_>, index: i64, value: Tensor) -> Result<()> {
        let mut state = self.open()?;
        let size = state.elements.len();
        let at = usize::try_from(index).ok().filter(|&at| at < size || (state.dynamic_size && at < MOST_ELEMENTS));
        let Some(at) = at else {
            return Err(
                self.error(format!("Tried to write to index {index} but array is not resizeable and size is: {size}"))
            );
        };
        if at >= size {
            state.grow(ctx, at + 1)?;
        }
        let refused = |why: String| self.error(format!("Could not write to TensorArray index {index} because {why}"));
        if value.dtype() != self.options.dtype {
            return Err(refused(format!(
                "the value dtype is {} but TensorArray dtype is {}.",
                value.dtype(),
                self.options.dtype
            )));
        }
        if !state.element_shape.admits(value.shape()) {
            return Err(refused(format!(
                "the value shape is {} which is incompatible with the TensorArray's inferred element shape: {} (consider \
                 setting infer_shape=False).",
                value.shape(),
                state.element_shape
            )));
        }
        if self.options.identical_element_shapes {
            state.element_shape = PartialShape::from(value.shape());
        }
        let ArrayContents { elements, holdings, .. } = &mut *state;
        let slot = &mut elements[at];
        if slot.read {
            return Err(refused("it has already been read.".to_owned()));
        }
        if let Some(shape) = &slot.shape {
            if !self.options.is_gradient {
                return Err(refused("it has already been written to.".to_owned()));
            }
            if shape != value.shape() {
                return Err(self.error(format!(
                    "Could not aggregate to TensorArray index {index} because the existing shape is {shape} but the new \
                     input shape is {}.",
                    value.shape()
                )));
            }
        }
        // A sum lies where the first value does, or in memory of the device.
        if slot.tensor.is_none() {
            holdings.add(&counted(&value))?;
        }
        slot.shape = Some(value.shape().clone());
        slot.tensor = Some(match slot.tensor.take() {
            Some(sum) => {
                holdings.remove(&counted(&sum));
                let sum = add(ctx, sum, &value)?;
                holdings.add(&counted(&sum))?;
                sum
            }
            None => value,
        });
        Ok(())
    }

    pub(super) fn read(&self, ctx: &KernelCtx<'_>, index: i64) -> Result<Tensor> {
        let mut state = self.open()?;
        let size = state.elements.len();
        let Some(at) = usize::try_from(index).ok().filter(|&at| at < size) else {
            return Err(self.error(format!("Tried to read from index {index} but array size is: {size}")));
        };
        let ArrayContents { elements, holdings, element_shape, .. } = &mut *state;
        let known = element_shape.known();
        let slot = &mut elements[at];
        if slot.cleared {
            return Err(self.error(format!(
                "Could not read index {index} twice because it was cleared after a previous read (perhaps try setting \
                 clear_after_read = false?)."
            )));
        }
        let tensor = match (&slot.tensor, slot.shape.clone().or(known)) {
            (Some(tensor), _) => tensor.clone(),
            (None, Some(shape)) => ctx.allocate_zeroed(self.options.dtype, shape)?,
            (None, None) => {
                return Err(self.error(format!(
                    "Could not read from TensorArray index {index}.  Furthermore, the element shape is not fully defined: \
                     {element_shape}.  It is possible you are working with a resizeable TensorArray and stop_gradients is \
                     not allowing the gradients to be written."
                )));
            }
        };
        slot.read = true;
        if self.options.clear_after_read {
            if let Some(gone) = slot.tensor.take() {
                holdings.remove(&counted(&gone));
            }
            slot.cleared = true;
        }
        Ok(tensor)
    }

    pub(super) fn error(&self, what: String) -> Error {
        Error::invalid_argument(format!("TensorArray {}: {what}", self.options.name))
    }

    fn open(&self) -> Result<MutexGuard<'_, ArrayContents>> {
        let state = self.state.lock();
        match state.closed {
            false => Ok(state),
            true => Err(Error::invalid_argument(format!("TensorArray {} has already been closed.", self.options.name))),
        }
    }
}

impl ArrayContents {
    /// Makes room for `size` elements; twice as many as before if the array grows one by one.
    fn grow(&mut self, ctx: &KernelCtx<'_>, size: usize) -> Result<()> {
        if size > self.elements.capacity() {
            let capacity = size.max(2 * self.elements.len());
            let n_bytes = capacity.saturating_mul(size_of::<Slot>());
            let charge = ctx.device.charge(n_bytes, &ctx.node.name)?;
            let mut elements = room(capacity, "elements of a TensorArray")?;
            elements.append(&mut self.elements);
            (self.elements, self.charge) = (elements, charge);
        }
        self.elements.resize(size, Slot::default());
        Ok(())
    }
}

/// An element as the array counts it; its place is counted with the list.
fn counted(element: &Tensor) -> Measured {
    Measured::new(0, std::slice::from_ref(element))
}

/// A dynamic array that is written beyond this is a mistake or an attack: every element costs memory, written or not.
const MOST_ELEMENTS: usize = 1 << 28;

/// `sum + value`, in place where nobody else holds `sum`.
fn add(ctx: &KernelCtx<'_>, mut sum: Tensor, value: &Tensor) -> Result<Tensor> {
    if !sum.is_unique() && sum.memory().is_host() && sum.dtype().size().is_some() {
        let mut copy = ctx.allocate(sum.dtype(), sum.shape().clone())?;
        copy.host_bytes_mut()?.copy_from_slice(sum.host_bytes()?);
        sum = copy;
    }
    fn of<T: Element>(sum: &mut Tensor, value: &Tensor, add: impl Fn(T, T) -> T) -> Result<()> {
        let value = value.data::<T>()?;
        sum.data_mut::<T>()?.iter_mut().zip(value).for_each(|(sum, value)| *sum = add(*sum, *value));
        Ok(())
    }
    match sum.dtype() {
        DType::F32 => of::<f32>(&mut sum, value, |a, b| a + b)?,
        DType::F64 => of::<f64>(&mut sum, value, |a, b| a + b)?,
        DType::F16 => of::<f16>(&mut sum, value, |a, b| a + b)?,
        DType::BF16 => of::<bf16>(&mut sum, value, |a, b| a + b)?,
        DType::I32 => of::<i32>(&mut sum, value, i32::wrapping_add)?,
        DType::I64 => of::<i64>(&mut sum, value, i64::wrapping_add)?,
        other => return Err(Error::unimplemented(format!("gradients of {other} in a TensorArray are not summed"))),
    }
    Ok(sum)
}
