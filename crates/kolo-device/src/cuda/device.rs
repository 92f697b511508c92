//! One logical GPU: a physical GPU, or a share of its memory, with its own streams.

use std::any::Any;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use kolo_core::{Buffer, DeviceName, Error, Memory, Result, Tensor};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::arena::{Arena, MemoryPlan};
use super::conv::Dnn;
use super::launch::{Args, Grid, cuda_buffer};
use super::library::absent;
use super::matmul::{Lt, WORKSPACE};
use super::nccl::NcclRanks;
use super::page_lock::is_locked;
use super::pinned::Pinned;
use super::program::{Function, ProgramKey, Programs};
use super::stream::{Streams, Watcher};
use super::{PhysicalGpu, check, is_gpu_memory, memory_of};
use crate::cpu::pool::IntraPool;
use crate::{Device, DeviceAttributes, DeviceRanks as _, Event, MemoryStats, RankDevice, Recorder, StreamRole};

/// The configuration of a GPU device.
#[derive(Clone)]
pub struct CudaConfig {
    /// The GPU, as [`super::discover`] found it.
    pub gpu: PhysicalGpu,
    /// How much of its memory to use.
    pub memory: MemoryPlan,
    /// A number that differs after every start.
    pub incarnation: u64,
    /// Where compiled kernels are cached; `None` disables the cache.
    pub kernel_cache: Option<PathBuf>,
    /// The device that runs nodes of this one whose tensors are in host memory.
    pub host: Arc<dyn Device>,
    /// Matrix products of floats may use TF32.
    pub allow_tf32: bool,
}

/// A GPU.
pub struct CudaDevice {
    me: Weak<CudaDevice>,
    attributes: DeviceAttributes,
    number: u32,
    host: Arc<dyn Device>,
    allow_tf32: bool,
    multiprocessors: u32,
    shared_memory: u32,
    /// The GPU's name for messages; unique on this machine.
    gpu: String,
    /// Its ends of groups of ranks.
    ranks: Mutex<Vec<Arc<NcclRanks>>>,
    /// Dropped before the streams: its callbacks hold tensors.
    watcher: Watcher,
    workspace: OnceLock<Arc<dyn Buffer>>,
    lt: OnceLock<Lt>,
    dnn: Mutex<Option<Dnn>>,
    matmuls: Mutex<()>,
    programs: Programs,
    pinned: Arc<Pinned>,
    arena: Arc<Arena>,
    streams: Arc<Streams>,
}

/// A launch function of the driver: function, blocks, threads, bytes of shared memory, stream, parameters.
type Launch = unsafe fn(
    sys::CUfunction,
    (u32, u32, u32),
    (u32, u32, u32),
    u32,
    sys::CUstream,
    &mut [*mut c_void],
) -> std::result::Result<(), DriverError>;

/// Copies up to this size use the compute stream: two events would cost more than they save.
const SMALL_COPY: usize = 1 << 20;

impl CudaDevice {
    /// A device of this name on a GPU. Its memory plan is checked against the GPU's free memory.
    pub fn new(name: DeviceName, config: &CudaConfig) -> Result<Arc<CudaDevice>> {
        let gpu = &config.gpu;
        if let Some(why) = absent().or_else(|| gpu.refused.clone()) {
            return Err(Error::unavailable(format!("{name}: {why}")));
        }
        let ordinal = gpu.visible.ok_or_else(|| Error::unavailable(format!("{name}: the GPU is not visible")))?;
        let what = format!("opening {}", gpu.label());
        let context = check(&what, CudaContext::new(ordinal))?;
        let (free, _) = check(&what, context.mem_get_info())?;
        // Refused now rather than in the middle of the work: the limit must be available.
        if let Some(limit) = config.memory.limit
            && limit > free as u64
        {
            let holders = gpu.holders();
            let holders = if holders.is_empty() { String::new() } else { format!("; it is held by {holders}") };
            return Err(Error::resource_exhausted(format!(
                "{name} is to have {limit} bytes of {}, and only {free} are free{holders}; ask for a smaller fraction or \
                 limit",
                gpu.label()
            )));
        }
        let attribute = |which| check(&what, context.attribute(which));
        let multiprocessors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_memory = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let mut driver = 0;
        // SAFETY: the driver is present, and writes one int.
        check(&what, unsafe { sys::cuDriverGetVersion(&mut driver) }.result())?;
        let streams = Arc::new(Streams::new(context)?);
        let arena = Arena::new(name.to_string(), gpu.label(), name.id, config.memory, streams.clone())?;
        let watcher = Watcher::new(&format!("kolo-gpu{}-events", name.id))?;
        Ok(Arc::new_cyclic(|me| CudaDevice {
            me: me.clone(),
            number: name.id,
            host: config.host.clone(),
            allow_tf32: config.allow_tf32,
            multiprocessors: multiprocessors.max(1) as u32,
            shared_memory: shared_memory.max(0) as u32,
            gpu: gpu.label(),
            ranks: Mutex::default(),
            watcher,
            workspace: OnceLock::new(),
            lt: OnceLock::new(),
            dnn: Mutex::new(None),
            matmuls: Mutex::new(()),
            programs: Programs::new(streams.clone(), gpu.capability, driver, config.kernel_cache.clone()),
            pinned: Pinned::new(streams.clone()),
            attributes: DeviceAttributes {
                memory_limit: config.memory.limit.or(Some(gpu.total)),
                incarnation: config.incarnation,
                description: format!(
                    "{}, compute capability {}.{}, {}",
                    gpu.name,
                    gpu.capability.0,
                    gpu.capability.1,
                    gpu.label()
                ),
                name,
            },
            arena,
            streams,
        }))
    }

    /// The GPU behind a device; an error if it is something else.
    pub fn of(device: &dyn Device) -> Result<&CudaDevice> {
        device
            .as_any()
            .downcast_ref()
            .ok_or_else(|| Error::internal(format!("{} is not a GPU", device.attributes().name)))
    }

    /// Whether matrix products of floats may use TF32.
    pub fn allow_tf32(&self) -> bool {
        self.allow_tf32
    }

    /// The GPU's name for messages; unique on this machine.
    pub(super) fn gpu(&self) -> &str {
        &self.gpu
    }

    /// The number of multiprocessors of the GPU.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors as usize
    }

    /// The maximum shared memory of a block, in bytes.
    pub fn shared_memory(&self) -> usize {
        self.shared_memory as usize
    }

    /// The compute capability, such as (9, 0).
    pub fn capability(&self) -> (i32, i32) {
        self.programs.capability()
    }

    /// The number of kernels that were compiled so far because they were not in the cache.
    pub fn n_compiled(&self) -> usize {
        self.programs.n_compiled()
    }

    /// The kernel of this name; `source` is called on first use. The source defines a kernel called `KOLO_ENTRY`.
    pub fn function(&self, key: &ProgramKey, source: impl FnOnce() -> String) -> Result<Function> {
        self.programs.function(key, source)
    }

    /// Enqueues a kernel on the compute stream.
    pub fn launch(&self, function: Function, grid: Grid, args: &Args<'_>) -> Result<()> {
        self.start(function, grid, args, self.compute_stream(), result::launch_kernel)
    }

    /// Enqueues a kernel on another stream, which the caller orders against the compute stream.
    pub(super) fn launch_on(&self, stream: &CudaStream, function: Function, grid: Grid, args: &Args<'_>) -> Result<()> {
        self.start(function, grid, args, stream.cu_stream(), result::launch_kernel)
    }

    /// Enqueues a kernel whose blocks wait for each other: all of them must fit on the GPU at once.
    pub fn launch_together(&self, function: Function, grid: Grid, args: &Args<'_>) -> Result<()> {
        self.start(function, grid, args, self.compute_stream(), result::launch_cooperative_kernel)
    }

    fn start(
        &self,
        function: Function,
        grid: Grid,
        args: &Args<'_>,
        stream: sys::CUstream,
        launch: Launch,
    ) -> Result<()> {
        args.check(self.arena.id())?;
        let mut params: SmallVec<[*mut c_void; 24]> =
            args.starts.iter().map(|&start| (&raw const args.words[usize::from(start)]).cast_mut().cast()).collect();
        self.bind()?;
        // More than the default limit must be requested.
        if grid.shared > 48 << 10 {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of this device's context.
            let allowed = unsafe { result::function::set_function_attribute(function.0, most, grid.shared as i32) };
            check("allowing a kernel its shared memory", allowed)?;
        }
        let triple = |at: [u32; 3]| (at[0], at[1], at[2]);
        // SAFETY: the function is of this device's context. Each parameter points to at least eight bytes that hold
        // its value, which the driver copies. Tensors are of this device (checked above), and their memory is reused
        // only by work that comes later on this stream, or on the compute stream once that has waited for this one.
        // The kernel's source guarantees that it stays within its tensors.
        let launched =
            unsafe { launch(function.0, triple(grid.blocks), triple(grid.threads), grid.shared, stream, &mut params) };
        check("launching a kernel", launched)
    }

    /// See [`Recorder::write_over`].
    pub(super) fn overwrite(&self, from: &Tensor, to: &Tensor) -> Result<()> {
        self.check_not_capturing()?;
        if !from.memory().is_host() {
            let (source, target, n_bytes) = (self.address(from)?, self.address(to)?, from.n_bytes());
            if n_bytes != to.n_bytes() || from.dtype() != to.dtype() {
                return Err(Error::internal("a feed does not fit its place on the GPU"));
            }
            if n_bytes == 0 || source == target {
                return Ok(());
            }
            self.bind()?;
            // SAFETY: both are of this device, have the same length, and are ordered by this stream.
            let copied = unsafe { result::memcpy_dtod_async(target, source, n_bytes, self.compute_stream()) };
            return check("copying on the GPU", copied);
        }
        let bytes = from.host_bytes()?;
        if bytes.len() != to.n_bytes() || from.dtype() != to.dtype() {
            return Err(Error::internal("a feed does not fit its place on the GPU"));
        }
        let address = self.address(to)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let mut staged = self.pinned.take(bytes.len())?;
        staged.bytes_mut().copy_from_slice(bytes);
        let compute = &self.streams.compute;
        self.bind()?;
        // SAFETY: the source is pinned memory that is kept until the mark below has completed; the target has as many
        // bytes.
        let copied = unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, staged.start().cast(), bytes.len(), compute.cu_stream()).result()
        };
        check("copying to the GPU", copied)?;
        self.pinned.give_back_after(staged, self.streams.mark(compute, None)?);
        Ok(())
    }

    /// Keeps this device's end of a group as long as the device.
    pub(super) fn keep_ranks(&self, ranks: Arc<NcclRanks>) {
        let mut kept = self.ranks.lock();
        kept.retain(|ranks| ranks.ended().is_none());
        kept.push(ranks);
    }

    pub(super) fn check_not_capturing(&self) -> Result<()> {
        match self.is_capturing() {
            true => Err(Error::unimplemented("a copy to the host, or between GPUs, cannot be captured")),
            false => Ok(()),
        }
    }

    /// Frees segments of the GPU's memory that no tensor uses.
    pub fn trim(&self) {
        self.arena.trim();
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(super) fn streams(&self) -> &Arc<Streams> {
        &self.streams
    }

    pub(super) fn arena_id(&self) -> u64 {
        self.arena.id()
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.streams.bind()
    }

    /// The stream that kernels are enqueued on; a separate one while this thread captures.
    pub(super) fn compute_stream(&self) -> sys::CUstream {
        super::capture::stream_of(self.arena.id()).unwrap_or_else(|| self.streams.compute.cu_stream())
    }

    pub(super) fn lt(&self) -> Result<&Lt> {
        if let Some(lt) = self.lt.get() {
            return Ok(lt);
        }
        self.bind()?;
        let lt = Lt::new()?;
        Ok(self.lt.get_or_init(|| lt))
    }

    /// cuDNN, opened on first use. The context must be current.
    pub(super) fn dnn(&self) -> Result<MutexGuard<'_, Option<Dnn>>> {
        let mut dnn = self.dnn.lock();
        if dnn.is_none() {
            *dnn = Some(Dnn::new()?);
        }
        Ok(dnn)
    }

    /// Held while a matrix product is enqueued.
    pub(super) fn matmul_lock(&self) -> MutexGuard<'_, ()> {
        self.matmuls.lock()
    }

    /// The workspace of matrix products, used while [`CudaDevice::matmul_lock`] is held and ordered by the compute
    /// stream.
    pub(super) fn workspace(&self) -> Result<u64> {
        let buffer = match self.workspace.get() {
            Some(buffer) => buffer,
            None => {
                let buffer = self.arena.allocate(WORKSPACE, &"the workspace of matrix products".into())?;
                self.workspace.get_or_init(|| buffer)
            }
        };
        let buffer = buffer.as_any().downcast_ref::<super::arena::CudaBuffer>();
        buffer.map(super::arena::CudaBuffer::address).ok_or_else(|| Error::internal("the workspace is not on the GPU"))
    }

    /// The address of a tensor of this device.
    pub(super) fn address(&self, tensor: &Tensor) -> Result<u64> {
        let (buffer, offset) = cuda_buffer(tensor)?;
        match buffer.arena_id() == self.arena.id() {
            true => Ok(buffer.address() + offset as u64),
            false => Err(Error::internal("memory of another device; a copy is missing")),
        }
    }

    /// Copies from the host to this device. The host's bytes are read before this returns, except those of a file of
    /// shared memory: the GPU reads them directly, and they are kept until it has.
    fn copy_in(&self, tensor: &Tensor) -> Result<Tensor> {
        let bytes = tensor.host_bytes()?;
        let tag: Arc<str> = "a copy from the host".into();
        let copy = self.allocate_tensor(tensor.dtype(), tensor.shape().clone(), &tag)?;
        if bytes.is_empty() {
            return Ok(copy);
        }
        let address = self.address(&copy)?;
        let staged = match is_locked(tensor, &self.streams) {
            true => None,
            false => {
                let mut staged = self.pinned.take(bytes.len())?;
                staged.bytes_mut().copy_from_slice(bytes);
                Some(staged)
            }
        };
        let source = staged.as_ref().map_or(bytes.as_ptr(), |staged| staged.start().cast_const());
        let is_small = bytes.len() <= SMALL_COPY;
        let (compute, own) = (&self.streams.compute, &self.streams.copy_in);
        if !is_small {
            // The memory may have belonged to another tensor, whose last reader is still pending on the compute
            // stream.
            let free = self.streams.mark(compute, None)?;
            self.streams.wait(own, &free)?;
        }
        let stream = if is_small { compute } else { own };
        self.bind()?;
        // SAFETY: the source is pinned memory that is kept until the mark below has completed; the target has as many
        // bytes.
        let copied =
            unsafe { sys::cuMemcpyHtoDAsync_v2(address, source.cast(), bytes.len(), stream.cu_stream()).result() };
        check("copying to the GPU", copied)?;
        let mark = self.streams.mark(stream, None)?;
        if !is_small {
            self.streams.wait(compute, &mark)?;
        }
        match staged {
            Some(staged) => self.pinned.give_back_after(staged, mark),
            // The file is returned to its sender as soon as the GPU has read it.
            None => {
                let read = tensor.clone();
                self.watcher.watch(Arc::new(mark), Box::new(move |_| drop(read)));
            }
        }
        Ok(copy)
    }

    /// Copies from this device to the host. The copy may be read once the event has completed.
    fn copy_out(&self, tensor: &Tensor) -> Result<(Tensor, Option<Arc<dyn Event>>)> {
        let n_bytes = tensor.n_bytes();
        let address = self.address(tensor)?;
        if n_bytes == 0 {
            return Ok((Tensor::zeros(tensor.dtype(), tensor.shape().clone())?, None));
        }
        let staged = self.pinned.take(n_bytes)?;
        let is_small = n_bytes <= SMALL_COPY;
        let (compute, own) = (&self.streams.compute, &self.streams.copy_out);
        if !is_small {
            let written = self.streams.mark(compute, None)?;
            self.streams.wait(own, &written)?;
        }
        let stream = if is_small { compute } else { own };
        self.bind()?;
        // SAFETY: the target is pinned memory of at least `n_bytes`, which the returned tensor owns; the mark keeps
        // the source until it has completed.
        let copied =
            unsafe { sys::cuMemcpyDtoHAsync_v2(staged.start().cast(), address, n_bytes, stream.cu_stream()).result() };
        check("copying from the GPU", copied)?;
        let mark = self.streams.mark(stream, (!is_small).then(|| tensor.clone()))?;
        let copy = Tensor::from_buffer(tensor.dtype(), tensor.shape().clone(), Arc::new(staged))?;
        Ok((copy, Some(Arc::new(mark))))
    }

    /// Copies from another GPU of this process to this one.
    fn copy_peer(&self, tensor: &Tensor) -> Result<Tensor> {
        let (buffer, offset) = cuda_buffer(tensor)?;
        let source = buffer.streams();
        let tag: Arc<str> = "a copy from another GPU".into();
        let copy = self.allocate_tensor(tensor.dtype(), tensor.shape().clone(), &tag)?;
        let n_bytes = tensor.n_bytes();
        if n_bytes == 0 {
            return Ok(copy);
        }
        let (from, to) = (buffer.address() + offset as u64, self.address(&copy)?);
        let written = source.mark(&source.compute, None)?;
        self.streams.wait(&self.streams.peer, &written)?;
        let free = self.streams.mark(&self.streams.compute, None)?;
        self.streams.wait(&self.streams.peer, &free)?;
        self.bind()?;
        let (there, here) = (source.context.cu_ctx(), self.streams.context.cu_ctx());
        // SAFETY: both spans have `n_bytes`. The waits above order the copy after the last write to the source and
        // after the last use of the target's memory; those below prevent both from being reused before it is done.
        let copied =
            unsafe { sys::cuMemcpyPeerAsync(to, here, from, there, n_bytes, self.streams.peer.cu_stream()).result() };
        check("copying between GPUs", copied)?;
        let mark = self.streams.mark(&self.streams.peer, None)?;
        self.streams.wait(&self.streams.compute, &mark)?;
        source.wait(&source.compute, &mark)?;
        Ok(copy)
    }
}

impl Device for CudaDevice {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }
    fn memory(&self) -> Memory {
        memory_of(self.number)
    }
    fn allocate(&self, n_bytes: usize, tag: &Arc<str>) -> Result<Arc<dyn Buffer>> {
        Ok(self.arena.allocate(n_bytes, tag)?)
    }
    fn memory_stats(&self) -> MemoryStats {
        self.arena.stats()
    }
    fn pool(&self) -> &Arc<IntraPool> {
        self.host.pool()
    }
    fn copy(&self, tensor: &Tensor, memory: Memory) -> Result<(Tensor, Option<Arc<dyn Event>>)> {
        // Strings and handles are always in host memory.
        if tensor.dtype().size().is_none() {
            return Ok((tensor.clone(), None));
        }
        let from = tensor.memory();
        if from.is_host() && memory == self.memory() && self.is_capturing() {
            return Ok((super::capture::keep(|| self.copy_in(tensor))?, None));
        }
        if from != memory {
            self.check_not_capturing()?;
        }
        if from.is_host() && memory.is_host() {
            return Ok((tensor.clone(), None));
        }
        if from.is_host() && memory == self.memory() {
            return Ok((self.copy_in(tensor)?, None));
        }
        if is_gpu_memory(from) && memory.is_host() {
            return self.copy_out(tensor);
        }
        if is_gpu_memory(from) && memory == self.memory() {
            return match cuda_buffer(tensor)?.0.arena_id() == self.arena.id() {
                true => Ok((tensor.clone(), None)),
                false => Ok((self.copy_peer(tensor)?, None)),
            };
        }
        Err(Error::internal(format!("{} does not copy from {from} to {memory} memory", self.attributes.name)))
    }
    fn fill(&self, tensor: &mut Tensor, byte: u8) -> Result<()> {
        if !tensor.is_unique() {
            return Err(Error::internal("filling a buffer that others share"));
        }
        let n_bytes = tensor.n_bytes();
        let address = self.address(tensor)?;
        if n_bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the tensor is `n_bytes` long, of this device, and ordered by this stream.
        let filled = unsafe { result::memset_d8_async(address, byte, n_bytes, self.compute_stream()) };
        check("filling memory", filled)
    }
    fn copy_within(&self, from: &Tensor, at: usize, to: &mut Tensor, to_at: usize, n_bytes: usize) -> Result<()> {
        let fits = |at: usize, tensor: &Tensor| at.checked_add(n_bytes).is_some_and(|end| end <= tensor.n_bytes());
        if !fits(at, from) || !fits(to_at, to) || !to.is_unique() {
            return Err(Error::internal("a copy does not fit its tensors"));
        }
        let (source, target) = (self.address(from)? + at as u64, self.address(to)? + to_at as u64);
        if n_bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: both spans were checked, are of this device and ordered by this stream.
        let copied = unsafe { result::memcpy_dtod_async(target, source, n_bytes, self.compute_stream()) };
        check("copying on the GPU", copied)
    }
    fn recorder(&self) -> Option<&dyn Recorder> {
        Some(self)
    }
    fn rank_device(&self) -> Option<&dyn RankDevice> {
        Some(self)
    }
    fn record(&self, stream: StreamRole) -> Option<Arc<dyn Event>> {
        let stream = match stream {
            StreamRole::Compute => &self.streams.compute,
            StreamRole::HostToDevice => &self.streams.copy_in,
            StreamRole::DeviceToHost => &self.streams.copy_out,
            StreamRole::Peer => &self.streams.peer,
        };
        self.streams.mark(stream, None).ok().map(|mark| Arc::new(mark) as Arc<dyn Event>)
    }
    fn synchronize(&self) -> Result<()> {
        self.streams.synchronize()
    }
    fn when_done(&self, event: Arc<dyn Event>, call: Box<dyn FnOnce(Result<()>) + Send>) {
        self.watcher.watch(event, call);
    }
    fn handle(&self) -> Option<Arc<dyn Device>> {
        self.me.upgrade().map(|me| me as Arc<dyn Device>)
    }
    fn host(&self) -> Option<&Arc<dyn Device>> {
        Some(&self.host)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
