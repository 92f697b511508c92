//! Work that is enqueued once, kept as a CUDA graph, and replayed with one call.
//!
//! During a capture nothing is computed: the launches of the capturing thread are recorded, with their addresses.
//! Blocks that its tensors allocate meanwhile come from a pool that belongs to the capture, so a replay may write to
//! them at any later time. A copy from the host is not recorded: it is done once, immediately, into memory that the
//! capture keeps, so replays see the value that the host had then. A copy to the host cannot be captured. The caller
//! of a replay must ensure that everything else (variables, feeds) still has the same address.
//!
//! The capture of a thread is a thread-local, not an argument: every launch, allocation and copy must go to its stream and its
//! pool, those inside cuBLAS, cuDNN and destructors of tensors included, and the driver itself captures what one thread
//! enqueues. One call that was not given the capture would run at once and be missing from replays.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result, sys};
use kolo_core::{Error, Result, Tensor};

use super::arena::Arena;
use super::check;
use super::device::CudaDevice;
use super::launch::cuda_buffer;
use super::stream::{Mark, Streams};
use crate::{ActiveRecording, Address, Recorder, Recording};

/// A recorded step.
pub(super) struct Captured {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    n_nodes: usize,
    /// Values from the host that its launches read. They are not in the pool, to all of which launches may write.
    _kept: Vec<Tensor>,
    /// What its work on other streams needs.
    _beside: Vec<Arc<dyn Any + Send + Sync>>,
    pool: usize,
    arena: Arc<Arena>,
    streams: Arc<Streams>,
}

// SAFETY: the driver allows any thread to launch a graph; launches of one graph are ordered by its one stream.
unsafe impl Send for Captured {}
// SAFETY: as above.
unsafe impl Sync for Captured {}

/// Where the work of a capturing thread is redirected to.
#[derive(Clone, Copy)]
struct Redirect {
    arena: u64,
    stream: sys::CUstream,
    pool: usize,
}

thread_local! {
    static CURRENT: Cell<Option<Redirect>> = const { Cell::new(None) };
    /// Tensors that the capture of this thread keeps.
    static KEPT: RefCell<Vec<Tensor>> = const { RefCell::new(Vec::new()) };
    /// Work on other streams that the capture of this thread has begun.
    static BESIDE: RefCell<Vec<Beside>> = const { RefCell::new(Vec::new()) };
}

/// Work that a capture holds on another stream than its own.
struct Beside {
    /// After it.
    mark: Arc<Mark>,
    /// What it needs as long as it is replayed.
    keep: Arc<dyn Any + Send + Sync>,
}

/// Makes the capture of this thread, if there is one, end after the work before `mark` on another stream, and keep an object as long
/// as it is replayed.
pub(super) fn join_before_end(mark: &Arc<Mark>, keep: Arc<dyn Any + Send + Sync>) {
    if CURRENT.get().is_some() {
        BESIDE.with_borrow_mut(|beside| beside.push(Beside { mark: mark.clone(), keep }));
    }
}

/// Runs `make` outside of the capture: its work is done now, in the arena's common pool. The capture keeps the
/// tensor that it returns.
pub(super) fn keep(make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    let tensor = outside_capture(make)?;
    KEPT.with_borrow_mut(|kept| kept.push(tensor.clone()));
    Ok(tensor)
}

/// Runs `f` as if this thread were not capturing: its work is done now, in the arena's common pool.
fn outside_capture<R>(f: impl FnOnce() -> R) -> R {
    /// Resumes capturing, also if `f` panics.
    struct Paused(Option<Redirect>);
    impl Drop for Paused {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    let _paused = Paused(CURRENT.take());
    f()
}

fn redirect(arena: u64) -> Option<Redirect> {
    CURRENT.get().filter(|redirect| redirect.arena == arena)
}

/// The pool of an arena that this thread allocates from.
pub(super) fn pool_of(arena: u64) -> usize {
    redirect(arena).map_or(0, |redirect| redirect.pool)
}

/// The stream that records this thread's work for an arena's device, if it is capturing.
pub(super) fn stream_of(arena: u64) -> Option<sys::CUstream> {
    redirect(arena).map(|redirect| redirect.stream)
}

impl CudaDevice {
    /// Starts to record what this thread enqueues for this device, instead of running it. The thread's tensors come
    /// from a separate pool. Other threads are not affected. Ends with [`Capturing::end`].
    pub(super) fn begin_capture(&self) -> Result<Capturing<'_>> {
        if CURRENT.get().is_some() {
            return Err(Error::internal("this thread captures already"));
        }
        self.bind()?;
        let stream = check("making a stream", self.streams().context.new_stream())?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream was just made.
        check("beginning a capture", unsafe { result::stream::begin_capture(stream.cu_stream(), mode) })?;
        let pool = self.arena().begin_pool();
        CURRENT.set(Some(Redirect { arena: self.arena_id(), stream: stream.cu_stream(), pool }));
        Ok(Capturing { device: self, stream, pool: Some(pool), of_this_thread: PhantomData })
    }

    /// True while this thread's work for the device is recorded.
    pub(super) fn is_capturing(&self) -> bool {
        redirect(self.arena_id()).is_some()
    }
}

impl Recorder for CudaDevice {
    fn begin_recording(&self) -> Result<Box<dyn ActiveRecording + '_>> {
        Ok(Box::new(self.begin_capture()?))
    }
    fn is_recording(&self) -> bool {
        self.is_capturing()
    }
    fn outside_recording(&self, work: &mut dyn FnMut()) {
        outside_capture(work);
    }
    fn keep_in_recording(&self, tensor: &Tensor) {
        KEPT.with_borrow_mut(|kept| kept.push(tensor.clone()));
    }
    fn is_kept_in_recording(&self, tensor: &Tensor) -> bool {
        let start = |tensor: &Tensor| cuda_buffer(tensor).map(|(buffer, _)| buffer.address()).ok();
        let Some(at) = start(tensor) else { return false };
        KEPT.with_borrow(|kept| kept.iter().any(|kept| start(kept) == Some(at)))
    }
    fn address_of(&self, tensor: &Tensor) -> Result<Address> {
        self.address(tensor).map(Address)
    }
    fn write_over(&self, from: &Tensor, to: &Tensor) -> Result<()> {
        self.overwrite(from, to)
    }
    fn write_over_all(&self, pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
        let is_moved = |pair: &&(&Tensor, &Tensor)| !pair.0.memory().is_host() && pair.0.dtype() == pair.1.dtype();
        let (together, alone): (Vec<_>, Vec<_>) = pairs.iter().partition(is_moved);
        match &together[..] {
            [] => {}
            [(from, to)] => self.overwrite(from, to)?,
            _ => self.copy_pairs(&together)?,
        }
        alone.into_iter().try_for_each(|(from, to)| self.overwrite(from, to))
    }
}

/// A capture in progress. Dropping it discards what was recorded.
pub(super) struct Capturing<'a> {
    device: &'a CudaDevice,
    stream: Arc<CudaStream>,
    pool: Option<usize>,
    /// The redirection is thread-local, so it must end on this thread.
    of_this_thread: PhantomData<*const ()>,
}

impl Capturing<'_> {
    /// Ends the capture; returns what was enqueued since it began, ready to be replayed.
    pub fn end(mut self) -> Result<Captured> {
        let device = self.device;
        let pool = self.pool.take().ok_or_else(|| Error::internal("a capture was ended twice"))?;
        CURRENT.set(None);
        let (kept, beside) = (KEPT.take(), BESIDE.take());
        device.bind()?;
        // A capture that leaves work on other streams behind is refused. Waiting twice for the same costs nothing. A failure is one
        // of the capture, which is ended below in any case.
        let _ = beside.iter().try_for_each(|beside| device.streams().wait(&self.stream, &beside.mark));
        // SAFETY: the stream has been capturing since `begin_capture`.
        let graph = check("ending a capture", unsafe { result::stream::end_capture(self.stream.cu_stream()) });
        let made = graph.and_then(|graph| {
            let mut n_nodes = 0usize;
            // SAFETY: the graph was just made; with a null list the driver returns only the number.
            let counted = unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut n_nodes) }.result();
            check("counting a capture", counted)?;
            let mut exec = std::ptr::null_mut();
            // SAFETY: as above; the driver writes a handle.
            let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) }.result();
            check("making a graph of a capture", made)?;
            Ok((graph, exec, n_nodes))
        });
        match made {
            Ok((graph, exec, n_nodes)) => Ok(Captured {
                graph,
                exec,
                n_nodes,
                _kept: kept,
                _beside: beside.into_iter().map(|beside| beside.keep).collect(),
                pool,
                arena: device.arena().clone(),
                streams: device.streams().clone(),
            }),
            Err(error) => {
                device.arena().drop_pool(pool);
                Err(error)
            }
        }
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        let Some(pool) = self.pool.take() else { return };
        CURRENT.set(None);
        KEPT.take();
        BESIDE.take();
        if self.device.bind().is_ok() {
            // SAFETY: as in `end`. The recorded work is discarded, also if the driver reports it as invalid.
            if let Ok(graph) = unsafe { result::stream::end_capture(self.stream.cu_stream()) }
                && !graph.is_null()
            {
                // SAFETY: the graph was just made and is not used.
                let _ = unsafe { result::graph::destroy(graph) };
            }
        }
        self.device.arena().drop_pool(pool);
    }
}

impl ActiveRecording for Capturing<'_> {
    fn end(self: Box<Self>) -> Result<Box<dyn Recording>> {
        Ok(Box::new(Capturing::end(*self)?))
    }
}

impl Recording for Captured {
    fn replay(&self) -> Result<()> {
        self.streams.bind()?;
        // SAFETY: the graph is alive, and the stream is its device's compute stream.
        let launched = unsafe { result::graph::launch(self.exec, self.streams.compute.cu_stream()) };
        check("replaying a capture", launched)
    }
    fn n_launches(&self) -> usize {
        self.n_nodes
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if self.streams.bind().is_ok() {
            // A replay may still be running, and its memory is freed below. An error means that the GPU is lost.
            let _ = self.streams.compute.synchronize();
            // SAFETY: both are ours, and this is their last use.
            unsafe {
                let _ = result::graph::exec_destroy(self.exec);
                let _ = result::graph::destroy(self.graph);
            }
        }
        self.arena.drop_pool(self.pool);
    }
}
