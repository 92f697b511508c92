//! What a kernel is, and what it may see and do.

use std::sync::Arc;

use kolo_core::{DType, DeviceName, Element, Error, Result, Shape, Tensor};
use kolo_device::Device;
use kolo_device::cpu::IntraPool;
use kolo_graph::{Attrs, Node};

use crate::resource::{ResourceStore, VariableCell};
use crate::step::{FrameIteration, StepServices};

/// Computes one node, again and again, from any thread.
pub trait Kernel: Send + Sync {
    /// Reads inputs, sets outputs.
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()>;
}

/// A kernel that may have to wait: for an element in a queue, for a tensor from elsewhere.
pub trait AsyncKernel: Send + Sync {
    /// Begins. `done` is called once, now or later, from any thread; the inputs are only there during this call. If
    /// the step is cancelled while it waits, `done` is called with an error soon.
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done);
}

/// Ends an [`AsyncKernel`]'s work with its outputs. Dropping it unused ends the work with an error: a kernel that loses its
/// `Done`, by a slip or a panic, must not leave its step waiting for ever.
pub struct Done(Option<Finish>);

type Finish = Box<dyn FnOnce(Result<Outcome>) + Send>;

impl Done {
    /// Calls `finish` with the outcome.
    pub fn new(finish: impl FnOnce(Result<Outcome>) + Send + 'static) -> Done {
        Done(Some(Box::new(finish)))
    }

    /// The work is done, well or badly.
    pub fn finish(mut self, outcome: Result<Outcome>) {
        if let Some(finish) = self.0.take() {
            finish(outcome);
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(finish) = self.0.take() {
            finish(Err(Error::internal("the kernel gave up without saying how its work ended")));
        }
    }
}

/// The outputs of an asynchronous kernel.
#[derive(Debug, Default)]
pub struct Outcome {
    /// One tensor per output.
    pub outputs: Vec<Tensor>,
    /// The outputs are dead: received from a branch that was not taken.
    pub dead: bool,
}

impl From<Vec<Tensor>> for Outcome {
    fn from(outputs: Vec<Tensor>) -> Outcome {
        Outcome { outputs, dead: false }
    }
}

/// What a kernel knows when it is made.
pub struct KernelInit<'a> {
    /// The node it is for, attributes complete.
    pub node: &'a Arc<Node>,
    /// The device it will run on.
    pub device: &'a DeviceName,
    /// The device's resources, for kernels that own one.
    pub resources: &'a Arc<ResourceStore>,
}

impl KernelInit<'_> {
    /// The node's attributes.
    #[inline]
    pub fn attrs(&self) -> &Attrs {
        &self.node.attrs
    }
}

/// What is at an input or an output of a call.
#[derive(Clone, Debug, Default)]
pub enum Value {
    /// Nothing: taken already, not set yet, or dead.
    #[default]
    Empty,
    /// A tensor.
    Tensor(Tensor),
    /// A reference to a variable.
    Reference(Arc<VariableCell>),
}

impl Value {
    /// The value, and nothing left in its place.
    #[inline]
    pub fn take(&mut self) -> Value {
        std::mem::take(self)
    }

    /// True if there is nothing.
    #[inline]
    pub fn is_empty(&self) -> bool {
        matches!(self, Value::Empty)
    }
}

/// One call of a kernel: its inputs and outputs, and what it may use.
pub struct KernelCtx<'a> {
    /// The node that is computed.
    pub node: &'a Arc<Node>,
    /// The device it is computed on.
    pub device: &'a dyn Device,
    /// The step's services: rendezvous, cancellation, resources.
    pub step: &'a dyn StepServices,
    /// The inputs, in order.
    pub inputs: &'a mut [Value],
    /// The outputs, to be set.
    pub outputs: &'a mut [Value],
    /// The iteration of a loop that this call belongs to.
    pub frame_iteration: FrameIteration,
    /// An input is dead. Only kernels that pass deadness on ever see `true`.
    pub is_dead: bool,
}

impl<'a> KernelCtx<'a> {
    /// How many inputs there are.
    pub fn n_inputs(&self) -> usize {
        self.inputs.len()
    }

    /// The node's attributes.
    pub fn attrs(&self) -> &'a Attrs {
        &self.node.attrs
    }

    /// Threads for work inside this kernel.
    #[inline]
    pub fn pool(&self) -> &'a IntraPool {
        self.device.pool()
    }

    /// An input's value.
    #[inline]
    pub fn input(&self, i: usize) -> Result<&Tensor> {
        match &self.inputs[i] {
            Value::Tensor(tensor) => Ok(tensor),
            other => Err(no_tensor(i, other)),
        }
    }

    /// An input's elements.
    #[inline]
    pub fn data<T: Element>(&self, i: usize) -> Result<&[T]> {
        self.input(i)?.data::<T>().map_err(|error| error.context(format_args!("input {i}")))
    }

    /// The one value of a scalar input.
    pub fn scalar<T: Element>(&self, i: usize) -> Result<T> {
        self.input(i)?.scalar_value::<T>().map_err(|error| error.context(format_args!("input {i}")))
    }

    /// The values of an int32 or int64 input: a shape, axes, sizes.
    pub fn integers(&self, i: usize) -> Result<Vec<i64>> {
        let input = self.input(i)?;
        let values = match input.dtype() {
            DType::I32 | DType::I64 => crate::array::elements::integers(input),
            _ => input.integers(),
        };
        values.map_err(|error| error.context(format_args!("input {i}")))
    }

    /// An input's value, which the kernel then owns: if nobody else holds it, it may be written in place.
    #[inline]
    pub fn take_input(&mut self, i: usize) -> Result<Tensor> {
        match std::mem::take(&mut self.inputs[i]) {
            Value::Tensor(tensor) => Ok(tensor),
            other => Err(no_tensor(i, &other)),
        }
    }

    /// The variable that an input refers to, by reference or by handle.
    pub fn variable(&self, i: usize) -> Result<Arc<VariableCell>> {
        match &self.inputs[i] {
            Value::Reference(cell) => Ok(cell.clone()),
            Value::Tensor(tensor) => self.step.resources().variable(tensor.resource()?),
            Value::Empty => Err(Error::internal(format!("input {i} was taken already"))),
        }
    }

    /// A tensor for an output. Its contents are undefined until written.
    pub fn allocate(&self, dtype: DType, shape: Shape) -> Result<Tensor> {
        self.device.allocate_tensor(dtype, shape, &self.node.name)
    }

    /// A tensor for an output in which every element is zero.
    pub fn allocate_zeroed(&self, dtype: DType, shape: Shape) -> Result<Tensor> {
        let mut tensor = self.allocate(dtype, shape)?;
        if dtype.size().is_some() {
            self.device.fill(&mut tensor, 0)?;
        }
        Ok(tensor)
    }

    /// Input `i`, taken, if it has this dtype and number of elements and nobody else holds it; else a new tensor with
    /// undefined contents. The flag says whether it is the input, whose values are still in it.
    pub fn reuse_or_allocate(&mut self, i: usize, dtype: DType, shape: Shape) -> Result<(Tensor, bool)> {
        if let Value::Tensor(tensor) = &mut self.inputs[i]
            && tensor.dtype() == dtype
            && tensor.n_elements() == shape.n_elements()
            && tensor.is_unique()
        {
            let tensor = self.take_input(i)?;
            return Ok((if *tensor.shape() == shape { tensor } else { tensor.reshaped(shape)? }, true));
        }
        Ok((self.allocate(dtype, shape)?, false))
    }

    /// Sets an output.
    #[inline]
    pub fn set_output(&mut self, i: usize, tensor: Tensor) {
        self.outputs[i] = Value::Tensor(tensor);
    }

    /// Sets an output to a reference to a variable.
    pub fn set_reference(&mut self, i: usize, cell: Arc<VariableCell>) {
        self.outputs[i] = Value::Reference(cell);
    }

    /// Passes input `i` on as output `o`, without a copy.
    pub fn forward(&mut self, i: usize, o: usize) -> Result<()> {
        match std::mem::take(&mut self.inputs[i]) {
            Value::Tensor(tensor) => self.set_output(o, tensor),
            Value::Reference(cell) => self.set_reference(o, cell),
            Value::Empty => return Err(Error::internal(format!("input {i} was taken already"))),
        }
        Ok(())
    }
}

/// Why an input is not a tensor. Apart from its callers, so that they are short enough to be inlined into kernels.
#[cold]
#[inline(never)]
fn no_tensor(i: usize, input: &Value) -> Error {
    match input {
        Value::Reference(_) => Error::internal(format!("input {i} is a reference")),
        Value::Tensor(_) | Value::Empty => Error::internal(format!("input {i} was taken already")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kolo_core::Code;

    use super::*;

    #[test]
    fn a_lost_completion_is_an_error_and_a_used_one_is_called_once() {
        let (sender, receiver) = mpsc::channel();
        let done = |sender: &mpsc::Sender<Result<Outcome>>| {
            let sender = sender.clone();
            Done::new(move |outcome| sender.send(outcome).expect("the test listens"))
        };
        drop(done(&sender));
        assert_eq!(receiver.try_recv().unwrap().unwrap_err().code(), Code::Internal);
        done(&sender).finish(Ok(Outcome::default()));
        assert!(receiver.try_recv().unwrap().is_ok());
        assert!(receiver.try_recv().is_err());
    }
}
