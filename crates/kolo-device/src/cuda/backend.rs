//! cuDNN's backend: descriptors of tensors and operations, graphs of operations, and the engines that the library has
//! for a graph, more than its older calls cover.

use std::ffi::c_void;

use cudarc::cudnn::sys;
use kolo_core::{DType, Error, Result};
pub(super) use sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Kind, cudnnBackendDescriptorType_t as Thing,
    cudnnDataType_t as Type,
};

/// The maximum number of engine configurations to consider.
const MOST_ENGINES: usize = 16;
/// The alignment of tensors, in bytes.
pub(super) const ALIGNMENT: usize = 16;

/// A descriptor of the library, destroyed with this.
pub(super) struct Descriptor(sys::cudnnBackendDescriptor_t);

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
    pub fn new(thing: Thing) -> Result<Descriptor> {
        let mut at = std::ptr::null_mut();
        // SAFETY: the library writes the address of a new descriptor.
        checked("making a descriptor", unsafe { sys::cudnnBackendCreateDescriptor(thing, &mut at) })?;
        Ok(Descriptor(at))
    }

    /// Sets an attribute; `T` must be the type in memory of `kind`.
    pub fn set<T: Copy>(&self, name: Name, kind: Kind, values: &[T]) -> Result<()> {
        // SAFETY: the descriptor is alive; the library copies as many values as there are.
        let set =
            unsafe { sys::cudnnBackendSetAttribute(self.0, name, kind, values.len() as i64, values.as_ptr().cast()) };
        checked("describing an operation", set)
    }

    pub fn set_descriptor(&self, name: Name, value: &Descriptor) -> Result<()> {
        self.set(name, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &[value.0])
    }

    pub fn finish(self) -> Result<Descriptor> {
        // SAFETY: the descriptor is alive.
        checked("completing a descriptor", unsafe { sys::cudnnBackendFinalize(self.0) })?;
        Ok(self)
    }
}

/// Where a tensor of a graph is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorStorage {
    /// In the GPU's memory.
    Memory,
    /// Nowhere: an intermediate value that is never stored as a whole.
    Virtual,
    /// A scalar that is read on the host when the graph is enqueued.
    Number,
}

/// A tensor of a graph. `id` is unique in the graph.
pub(super) fn tensor(
    id: i64,
    data: Type,
    storage: TensorStorage,
    sizes: [i64; 4],
    strides: [i64; 4],
) -> Result<Descriptor> {
    let made = Descriptor::new(Thing::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
    made.set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[data])?;
    made.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Kind::CUDNN_TYPE_INT64, &sizes)?;
    made.set(Name::CUDNN_ATTR_TENSOR_STRIDES, Kind::CUDNN_TYPE_INT64, &strides)?;
    made.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Kind::CUDNN_TYPE_INT64, &[id])?;
    made.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Kind::CUDNN_TYPE_INT64, &[ALIGNMENT as i64])?;
    match storage {
        TensorStorage::Memory => {}
        TensorStorage::Virtual => made.set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, Kind::CUDNN_TYPE_BOOLEAN, &[true])?,
        TensorStorage::Number => made.set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, Kind::CUDNN_TYPE_BOOLEAN, &[true])?,
    }
    made.finish()
}

/// The library's type for elements of a tensor, and the one to compute in.
pub(super) fn data_type(dtype: DType) -> Result<[Type; 2]> {
    match dtype {
        DType::F32 => Ok([Type::CUDNN_DATA_FLOAT; 2]),
        DType::F16 => Ok([Type::CUDNN_DATA_HALF, Type::CUDNN_DATA_FLOAT]),
        DType::BF16 => Ok([Type::CUDNN_DATA_BFLOAT16, Type::CUDNN_DATA_FLOAT]),
        other => Err(Error::unimplemented(format!("cuDNN's engines are not used for {other}"))),
    }
}

/// A graph of operations, and the heuristic's engines for it.
pub(super) struct Graph {
    advice: Vec<Descriptor>,
    /// Referenced by the engines.
    _graph: Descriptor,
    _operations: Vec<Descriptor>,
    _parts: Vec<Descriptor>,
}

impl Graph {
    /// A graph of `operations`, which refer to `parts`. The handle is alive and used by no other thread.
    pub fn new(handle: sys::cudnnHandle_t, operations: Vec<Descriptor>, parts: Vec<Descriptor>) -> Result<Graph> {
        let graph = Descriptor::new(Thing::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let all: Vec<sys::cudnnBackendDescriptor_t> = operations.iter().map(|operation| operation.0).collect();
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &all)?;
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[handle])?;
        let graph = graph.finish()?;
        let advice = advice(&graph)?;
        Ok(Graph { advice, _graph: graph, _operations: operations, _parts: parts })
    }

    /// The number of engines in the heuristic's list.
    pub fn n_engines(&self) -> usize {
        self.advice.len()
    }

    /// Compiles one of the engines.
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

/// The heuristic's engine configurations, best first.
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

/// An engine compiled for a graph.
pub(super) struct Engine {
    plan: Descriptor,
    /// Bytes of workspace.
    pub workspace: usize,
}

impl Engine {
    /// Enqueues the graph on the stream of the handle, with an address for each tensor of [`TensorStorage::Memory`] and
    /// a host's address for each [`TensorStorage::Number`].
    ///
    /// # Safety
    /// The engine belongs to the handle. The tensors are those that the graph describes, and they and the workspace are
    /// alive until the stream has passed this; numbers are alive until this returns.
    pub unsafe fn enqueue(
        &self,
        handle: sys::cudnnHandle_t,
        ids: &[i64],
        addresses: &[*mut c_void],
        workspace: *mut c_void,
    ) -> Result<()> {
        if ids.len() != addresses.len() {
            return Err(Error::internal(format!("{} tensors of a graph, {} addresses", ids.len(), addresses.len())));
        }
        let pack = Descriptor::new(Thing::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Kind::CUDNN_TYPE_INT64, ids)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Kind::CUDNN_TYPE_VOID_PTR, addresses)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Kind::CUDNN_TYPE_VOID_PTR, &[workspace])?;
        let pack = pack.finish()?;
        // SAFETY: plan and pack are complete; the rest is the caller's promise.
        checked("computing a graph", unsafe { sys::cudnnBackendExecute(handle, self.plan.0, pack.0) })
    }
}
