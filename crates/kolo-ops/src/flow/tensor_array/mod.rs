//! `TensorArrayV3` and its ops: an array of tensors, each written once, that a loop reads from and writes to. It lives as
//! long as its step. [`TensorArray`] is the handle that programs use.
//!
//! A write does not change the array's value in the graph, only an object behind its handle; so every op takes and gives
//! a *flow*, a float without meaning, whose edges order writes before reads. Gradients follow the flow: the gradient of
//! a read is a write to the array's gradient array ([`create`]), and the other way round.

use kolo_core::{DType, PartialShape, Result};
use kolo_graph::{Graph, Operation, Output};

pub mod access;
pub mod bulk;
pub mod create;
mod object;

/// An array of tensors, at one point of a program. Each write gives a new one, to be used from there on.
///
/// ```text
/// let squares = TensorArray::new(g, DType::F32, n, [2usize]).write(i, x * x).stack();
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TensorArray<'g> {
    handle: Output<'g>,
    flow: Output<'g>,
    dtype: DType,
}

impl<'g> TensorArray<'g> {
    /// An array of `size` tensors (an int32), none written. The element shape may be unknown.
    #[track_caller]
    pub fn new(graph: &'g Graph, dtype: DType, size: Output<'g>, element_shape: impl Into<PartialShape>) -> Self {
        TensorArray::build(graph, dtype, size, element_shape.into(), false)
    }

    /// As [`TensorArray::new`]; grows as it is written.
    #[track_caller]
    pub fn dynamic(graph: &'g Graph, dtype: DType, size: Output<'g>, element_shape: impl Into<PartialShape>) -> Self {
        TensorArray::build(graph, dtype, size, element_shape.into(), true)
    }

    #[track_caller]
    fn build(graph: &'g Graph, dtype: DType, size: Output<'g>, element_shape: PartialShape, dynamic: bool) -> Self {
        let array = graph
            .op("TensorArrayV3")
            .name("TensorArray")
            .input(size)
            .attr("dtype", dtype)
            .attr("element_shape", element_shape)
            .attr("dynamic_size", dynamic)
            .build();
        TensorArray { handle: array.output(0), flow: array.output(1), dtype }
    }

    /// The flow: what a loop carries from one iteration to the next.
    pub fn flow(self) -> Output<'g> {
        self.flow
    }

    /// The same array after what `flow` stands for: in a loop, the loop variable.
    #[must_use]
    pub fn with_flow(self, flow: Output<'g>) -> Self {
        TensorArray { flow, ..self }
    }

    /// Writes one element.
    #[track_caller]
    #[must_use]
    pub fn write(self, index: Output<'g>, value: Output<'g>) -> Self {
        let write = self.handle.graph().op("TensorArrayWriteV3");
        self.with_flow(write.inputs([self.handle, index, value, self.flow]).out())
    }

    /// Reads one element, which is gone afterwards.
    #[track_caller]
    pub fn read(self, index: Output<'g>) -> Output<'g> {
        let read = self.handle.graph().op("TensorArrayReadV3");
        read.inputs([self.handle, index, self.flow]).attr("dtype", self.dtype).out()
    }

    /// Some elements, stacked along a new first dimension.
    #[track_caller]
    pub fn gather(self, indices: Output<'g>) -> Output<'g> {
        let gather = self.handle.graph().op("TensorArrayGatherV3");
        let element_shape = self.handle.handle().map_or_else(PartialShape::unknown, |(_, shape)| shape);
        gather
            .inputs([self.handle, indices, self.flow])
            .attr("dtype", self.dtype)
            .attr("element_shape", element_shape)
            .out()
    }

    /// All elements, stacked along a new first dimension.
    #[track_caller]
    pub fn stack(self) -> Output<'g> {
        let graph = self.handle.graph();
        let (first, step) = (graph.constant(0i32), graph.constant(1i32));
        self.gather(graph.op("Range").inputs([first, self.size(), step]).out())
    }

    /// Writes the slices of `value` along its first dimension to these elements.
    #[track_caller]
    #[must_use]
    pub fn scatter(self, indices: Output<'g>, value: Output<'g>) -> Self {
        let scatter = self.handle.graph().op("TensorArrayScatterV3");
        self.with_flow(scatter.inputs([self.handle, indices, value, self.flow]).out())
    }

    /// Writes the slices of `value` along its first dimension, beginning with element 0.
    #[track_caller]
    #[must_use]
    pub fn unstack(self, value: Output<'g>) -> Self {
        let graph = self.handle.graph();
        let [zero, one] = [0i32, 1].map(|i| graph.constant([i]));
        let shape = graph.op("Shape").input(value).out();
        let n = graph.op("StridedSlice").inputs([shape, zero, one, one]).attr("shrink_axis_mask", 1i64).out();
        let (first, step) = (graph.constant(0i32), graph.constant(1i32));
        self.scatter(graph.op("Range").inputs([first, n, step]).out(), value)
    }

    /// All elements, joined along their first dimension.
    #[track_caller]
    pub fn concat(self) -> Output<'g> {
        let concat = self.handle.graph().op("TensorArrayConcatV3");
        concat.inputs([self.handle, self.flow]).attr("dtype", self.dtype).out()
    }

    /// Writes consecutive pieces of `value`, of these lengths (int64) along its first dimension.
    #[track_caller]
    #[must_use]
    pub fn split(self, value: Output<'g>, lengths: Output<'g>) -> Self {
        let split = self.handle.graph().op("TensorArraySplitV3");
        self.with_flow(split.inputs([self.handle, value, lengths, self.flow]).out())
    }

    /// How many elements there are.
    #[track_caller]
    pub fn size(self) -> Output<'g> {
        self.handle.graph().op("TensorArraySizeV3").inputs([self.handle, self.flow]).out()
    }

    /// The array of the gradients of an array's elements, for the rules of ops on it.
    fn gradient_of(handle: Output<'g>, dtype: DType, flow: Output<'g>) -> Self {
        let graph = handle.graph();
        let source = graph.gradient_source();
        let array = graph.op("TensorArrayGradV3").inputs([handle, flow]).attr("source", source).build();
        // The array must exist before anything uses it.
        let flow =
            graph.control_dependencies(&[array], || graph.op("Identity").name("gradient_flow").input(flow).out());
        TensorArray { handle: array.output(0), flow, dtype }
    }

    /// As [`TensorArray::gradient_of`] for an op that wrote: its own write must be done first, or the gradient array
    /// would be made before the array has its final size and shapes.
    fn gradient_after(op: Operation<'g>, dtype: DType, flow_grad: Output<'g>) -> (Self, Output<'g>) {
        let graph = op.graph();
        let written = graph.op("Identity").name("flow_out").input(op.output(0)).build();
        let flow = graph
            .control_dependencies(&[written], || graph.op("Identity").name("write_barrier").input(flow_grad).out());
        (TensorArray::gradient_of(op.input(0), dtype, flow), flow)
    }
}

/// The array behind input 0.
fn array(ctx: &crate::KernelCtx<'_>) -> Result<std::sync::Arc<object::ArrayObject>> {
    ctx.step.step_resources().resolve(ctx.input(0)?.resource()?)
}

#[cfg(test)]
mod tests;
