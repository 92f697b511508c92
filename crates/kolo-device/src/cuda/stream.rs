//! Streams, events between them, and the thread that runs callbacks when an event completes.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use kolo_core::{Error, Result, Tensor};
use parking_lot::Mutex;

use super::check;
use crate::Event;

/// The streams of one device.
pub(super) struct Streams {
    pub context: Arc<CudaContext>,
    pub compute: Arc<CudaStream>,
    pub copy_in: Arc<CudaStream>,
    pub copy_out: Arc<CudaStream>,
    pub peer: Arc<CudaStream>,
    /// Events for reuse.
    spare: Mutex<Vec<RawEvent>>,
}

struct RawEvent(sys::CUevent);

// SAFETY: an event is a handle that the driver allows any thread to use.
unsafe impl Send for RawEvent {}

impl Streams {
    pub fn new(context: Arc<CudaContext>) -> Result<Streams> {
        // Otherwise the first stream waits for all work of the GPU, which fails while another session captures a step.
        // SAFETY: event tracking concerns cudarc's own slices, which we do not use.
        unsafe { context.disable_event_tracking() };
        let stream = || check("making a stream", context.new_stream());
        Ok(Streams {
            compute: stream()?,
            copy_in: stream()?,
            copy_out: stream()?,
            peer: stream()?,
            spare: Mutex::default(),
            context,
        })
    }

    /// Makes the GPU's context current on this thread, as every call below does; free if it is current already.
    pub fn bind(&self) -> Result<()> {
        check("choosing the GPU", self.context.bind_to_thread())
    }

    /// Records an event after all work that is on `stream` now. `keep` stays alive until the event has completed.
    pub fn mark(self: &Arc<Self>, stream: &CudaStream, keep: Option<Tensor>) -> Result<Mark> {
        self.mark_on(stream.cu_stream(), keep)
    }

    /// As [`Streams::mark`], by handle; the caller keeps the stream alive.
    pub fn mark_on(self: &Arc<Self>, stream: sys::CUstream, keep: Option<Tensor>) -> Result<Mark> {
        self.bind()?;
        let spare = self.spare.lock().pop();
        let event = match spare {
            Some(event) => event,
            None => {
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
                RawEvent(check("making an event", result::event::create(flags))?)
            }
        };
        // SAFETY: both handles are alive: the event is ours, the stream is the caller's.
        check("recording an event", unsafe { result::event::record(event.0, stream) })?;
        Ok(Mark { event: Some(event), streams: self.clone(), keep })
    }

    /// Makes `stream` wait for a mark, without blocking the host.
    pub fn wait(&self, stream: &CudaStream, mark: &Mark) -> Result<()> {
        self.wait_on(stream.cu_stream(), mark)
    }

    /// As [`Streams::wait`], by handle; the caller keeps the stream alive.
    pub fn wait_on(&self, stream: sys::CUstream, mark: &Mark) -> Result<()> {
        self.bind()?;
        let Some(event) = &mark.event else { return Ok(()) };
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive: the event is borrowed, the stream is the caller's.
        check("waiting for an event", unsafe { result::stream::wait_event(stream, event.0, flags) })
    }

    /// Waits until all four streams are idle.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        for stream in [&self.copy_in, &self.compute, &self.peer, &self.copy_out] {
            check("waiting for the GPU", stream.synchronize())?;
        }
        Ok(())
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        for event in self.spare.get_mut().drain(..) {
            // SAFETY: spare events are not in use, and this was the last use.
            // An error here means that the GPU is lost, which another call has reported.
            let _ = unsafe { result::event::destroy(event.0) };
        }
    }
}

/// A point on a stream.
pub(super) struct Mark {
    event: Option<RawEvent>,
    streams: Arc<Streams>,
    /// A tensor that the work before the mark reads.
    keep: Option<Tensor>,
}

// SAFETY: the driver allows any thread to query an event; nothing else is reached through `&Mark`.
unsafe impl Sync for Mark {}

impl Event for Mark {
    fn is_done(&self) -> bool {
        let Some(event) = &self.event else { return true };
        // SAFETY: the event is alive while `self` is. An error counts as done: `wait` will report it.
        let state = self.streams.bind().map(|()| unsafe { result::event::query(event.0) });
        !matches!(state, Ok(Err(error)) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY)
    }

    fn wait(&self) -> Result<()> {
        let Some(event) = &self.event else { return Ok(()) };
        self.streams.bind()?;
        // SAFETY: the event is alive while `self` is.
        check("waiting for the GPU", unsafe { result::event::synchronize(event.0) })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // The kept tensor was read on another stream than the compute stream, which orders its memory: the compute
        // stream must not write to it before the reader is done.
        if self.keep.is_some() && !self.is_done() {
            let _ = self.streams.wait(&self.streams.compute.clone(), self);
        }
        if let Some(event) = self.event.take() {
            self.streams.spare.lock().push(event);
        }
    }
}

/// A thread that waits for events, in order, and runs their callbacks.
pub(super) struct Watcher {
    sender: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

type Callback = Box<dyn FnOnce(Result<()>) + Send>;
type Job = (Arc<dyn Event>, Callback);

impl Watcher {
    pub fn new(name: &str) -> Result<Watcher> {
        let (sender, receiver) = channel::<Job>();
        let watch = move || {
            while let Ok((event, call)) = receiver.recv() {
                let result = event.wait();
                drop(event);
                call(result);
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(watch);
        let thread = thread.map_err(|error| Error::resource_exhausted(format!("starting a thread: {error}")))?;
        Ok(Watcher { sender: Some(sender), thread: Some(thread) })
    }

    /// Calls `call` once `event` is done.
    pub fn watch(&self, event: Arc<dyn Event>, call: Callback) {
        let Some(sender) = &self.sender else { return call(Err(Error::cancelled("the device is gone"))) };
        if let Err(unsent) = sender.send((event, call)) {
            unsent.0.1(Err(Error::internal("the thread that waits for the GPU is gone")));
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // An error means that a callback has panicked and ended the thread; nothing is left to do.
            let _ = thread.join();
        }
    }
}
