//! cuDNN's engines: a pass of a convolution is described as a graph of one operation, for which the library names engines and
//! settings of them, more than its older algorithms cover.

use std::ffi::c_void;

use cudarc::cudnn::sys;
use kolo_core::{DType, Error, Result};
use sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Kind, cudnnBackendDescriptorType_t as Thing,
};

use super::conv::{Conv, ConvPass};

/// Most engines, with settings, that are looked at.
const MOST_ENGINES: usize = 16;
/// What tensors begin at a multiple of, in bytes.
pub(super) const ALIGNMENT: usize = 16;

/// A descriptor of the library, destroyed with this.
struct Descriptor(sys::cudnnBackendDescriptor_t);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and this is its last use. There is nothing to do about a failure.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}

fn checked(what: &str, status: sys::cudnnStatus_t) -> Result<()> {
    match status {
        sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS => Ok(()),
        other => Err(Error::unimplemented(format!("cuDNN, {what}: {other:?}"))),
    }
}

impl Descriptor {
    fn new(thing: Thing) -> Result<Descriptor> {
        let mut at = std::ptr::null_mut();
        // SAFETY: the library writes the address of a new descriptor.
        checked("making a descriptor", unsafe { sys::cudnnBackendCreateDescriptor(thing, &mut at) })?;
        Ok(Descriptor(at))
    }

    /// Sets an attribute to values whose type in memory is the one that `kind` stands for.
    fn set<T: Copy>(&self, name: Name, kind: Kind, values: &[T]) -> Result<()> {
        // SAFETY: the descriptor is alive; the library copies as many values as there are.
        let set =
            unsafe { sys::cudnnBackendSetAttribute(self.0, name, kind, values.len() as i64, values.as_ptr().cast()) };
        checked("describing a convolution", set)
    }

    fn set_descriptor(&self, name: Name, value: &Descriptor) -> Result<()> {
        self.set(name, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &[value.0])
    }

    fn finish(self) -> Result<Descriptor> {
        // SAFETY: the descriptor is alive.
        checked("completing a descriptor", unsafe { sys::cudnnBackendFinalize(self.0) })?;
        Ok(self)
    }
}

/// An engine that was set up for one pass of one convolution.
pub(super) struct Engine {
    plan: Descriptor,
    /// Bytes of workspace.
    pub workspace: usize,
}

/// A pass of a convolution, and the engines that the library advises for it.
pub(super) struct Graph {
    advice: Vec<Descriptor>,
    /// Which the engines refer to.
    _graph: Descriptor,
    _parts: Vec<Descriptor>,
}

fn data_type(dtype: DType) -> Result<[sys::cudnnDataType_t; 2]> {
    use sys::cudnnDataType_t as Type;
    match dtype {
        DType::F32 => Ok([Type::CUDNN_DATA_FLOAT; 2]),
        DType::F16 => Ok([Type::CUDNN_DATA_HALF, Type::CUDNN_DATA_FLOAT]),
        DType::BF16 => Ok([Type::CUDNN_DATA_BFLOAT16, Type::CUDNN_DATA_FLOAT]),
        other => Err(Error::unimplemented(format!("cuDNN's engines are not used for {other}"))),
    }
}

/// A tensor of `[outer, channels, height, width]`, with channels last in memory unless they are first.
fn tensor(call: &Conv, id: i64, sizes: [usize; 4]) -> Result<Descriptor> {
    let [n, c, h, w] = sizes.map(|size| size as i64);
    let strides = if call.channels_first { [c * h * w, h * w, w, 1] } else { [c * h * w, 1, w * c, c] };
    let [data, _] = data_type(call.dtype)?;
    let made = Descriptor::new(Thing::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
    made.set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[data])?;
    made.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Kind::CUDNN_TYPE_INT64, &[n, c, h, w])?;
    made.set(Name::CUDNN_ATTR_TENSOR_STRIDES, Kind::CUDNN_TYPE_INT64, &strides)?;
    made.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Kind::CUDNN_TYPE_INT64, &[id])?;
    made.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Kind::CUDNN_TYPE_INT64, &[ALIGNMENT as i64])?;
    made.finish()
}

/// The names of tensors in a graph: image, filter, output, whichever of them the pass computes.
const IDS: [i64; 3] = [1, 2, 3];

impl Graph {
    /// Describes a pass and asks for advice. The handle is alive and used by nobody else.
    pub fn new(handle: sys::cudnnHandle_t, call: &Conv, pass: ConvPass) -> Result<Graph> {
        let [_, compute] = data_type(call.dtype)?;
        let [h, w, c] = call.input;
        let [out_h, out_w, k] = call.output;
        let per_group = c.checked_div(call.groups).unwrap_or(0);
        let image = tensor(call, IDS[0], [call.batch, c, h, w])?;
        let filter = tensor(call, IDS[1], [k, per_group, call.filter[0], call.filter[1]])?;
        let output = tensor(call, IDS[2], [call.batch, k, out_h, out_w])?;

        let conv = Descriptor::new(Thing::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
        let pair = |sizes: [usize; 2]| sizes.map(|size| size as i64);
        let mode = sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
        conv.set(Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[compute])?;
        conv.set(Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE, Kind::CUDNN_TYPE_CONVOLUTION_MODE, &[mode])?;
        conv.set(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, Kind::CUDNN_TYPE_INT64, &[2i64])?;
        conv.set(Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, Kind::CUDNN_TYPE_INT64, &pair(call.pad))?;
        conv.set(Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, Kind::CUDNN_TYPE_INT64, &pair(call.pad))?;
        conv.set(Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, Kind::CUDNN_TYPE_INT64, &pair(call.dilation))?;
        conv.set(Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, Kind::CUDNN_TYPE_INT64, &pair(call.stride))?;
        let conv = conv.finish()?;

        // Image, filter, output, the convolution, and the two factors, by their names in this pass.
        let (thing, names) = match pass {
            ConvPass::Forward => (
                Thing::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
                ],
            ),
            ConvPass::BackpropInput => (
                Thing::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
                ],
            ),
            ConvPass::BackpropFilter => (
                Thing::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
                ],
            ),
        };
        let operation = Descriptor::new(thing)?;
        for (name, part) in names.into_iter().zip([&image, &filter, &output, &conv]) {
            operation.set_descriptor(name, part)?;
        }
        operation.set(names[4], Kind::CUDNN_TYPE_FLOAT, &[1f32])?;
        operation.set(names[5], Kind::CUDNN_TYPE_FLOAT, &[0f32])?;
        let operation = operation.finish()?;

        let graph = Descriptor::new(Thing::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        graph.set_descriptor(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operation)?;
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[handle])?;
        let graph = graph.finish()?;
        let advice = advice(&graph)?;
        Ok(Graph { advice, _graph: graph, _parts: vec![image, filter, output, conv, operation] })
    }

    /// How many engines are advised.
    pub fn n_engines(&self) -> usize {
        self.advice.len()
    }

    /// Sets up one of the engines.
    pub fn engine(&self, handle: sys::cudnnHandle_t, i: usize) -> Result<Engine> {
        let settings =
            self.advice.get(i).ok_or_else(|| Error::unimplemented("cuDNN does not advise so many engines"))?;
        let plan = Descriptor::new(Thing::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[handle])?;
        plan.set_descriptor(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, settings)?;
        let plan = plan.finish()?;
        let (mut workspace, mut n) = (0i64, 0i64);
        // SAFETY: the plan is alive; the library writes one whole number and how many it wrote.
        let asked = unsafe {
            sys::cudnnBackendGetAttribute(
                plan.0,
                Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                Kind::CUDNN_TYPE_INT64,
                1,
                &mut n,
                (&raw mut workspace).cast(),
            )
        };
        checked("asking for the size of a workspace", asked)?;
        Ok(Engine { plan, workspace: usize::try_from(workspace).unwrap_or(usize::MAX) })
    }
}

/// What the heuristics advise, best first.
fn advice(graph: &Descriptor) -> Result<Vec<Descriptor>> {
    let asked = Descriptor::new(Thing::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
    asked.set_descriptor(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)?;
    let mode = sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A;
    asked.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Kind::CUDNN_TYPE_HEUR_MODE, &[mode])?;
    let asked = asked.finish()?;
    let mut advice = Vec::with_capacity(MOST_ENGINES);
    for _ in 0..MOST_ENGINES {
        advice.push(Descriptor::new(Thing::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?);
    }
    let mut all: Vec<sys::cudnnBackendDescriptor_t> = advice.iter().map(|settings| settings.0).collect();
    let mut n = 0i64;
    // SAFETY: the library fills the descriptors at these addresses, at most as many as there are.
    let filled = unsafe {
        sys::cudnnBackendGetAttribute(
            asked.0,
            Name::CUDNN_ATTR_ENGINEHEUR_RESULTS,
            Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR,
            all.len() as i64,
            &mut n,
            all.as_mut_ptr().cast(),
        )
    };
    checked("asking for advice", filled)?;
    advice.truncate(usize::try_from(n).unwrap_or(0));
    Ok(advice)
}

impl Engine {
    /// Enqueues the pass on the stream of the handle.
    ///
    /// # Safety
    /// The engine belongs to the handle. `tensors` are image, filter and output of the convolution it was made for, and they
    /// and the workspace are alive until the stream has passed this.
    pub unsafe fn enqueue(
        &self,
        handle: sys::cudnnHandle_t,
        tensors: [*mut c_void; 3],
        workspace: *mut c_void,
    ) -> Result<()> {
        let pack = Descriptor::new(Thing::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Kind::CUDNN_TYPE_INT64, &IDS)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Kind::CUDNN_TYPE_VOID_PTR, &tensors)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Kind::CUDNN_TYPE_VOID_PTR, &[workspace])?;
        let pack = pack.finish()?;
        // SAFETY: plan and pack are complete; the rest is the caller's promise.
        checked("convolving", unsafe { sys::cudnnBackendExecute(handle, self.plan.0, pack.0) })
    }
}
