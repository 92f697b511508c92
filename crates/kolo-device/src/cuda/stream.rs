//! Streams, the events between them, and the thread that tells receivers when an event has come.

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
    /// Events that can be used again.
    spare: Mutex<Vec<RawEvent>>,
}

struct RawEvent(sys::CUevent);

// SAFETY: an event is a handle that the driver allows any thread to use.
unsafe impl Send for RawEvent {}

impl Streams {
    pub fn new(context: Arc<CudaContext>) -> Result<Streams> {
        // Otherwise the first stream waits for all that the card does, which fails while another session captures a step.
        // SAFETY: what is tracked are cudarc's own slices, of which we make none.
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

    /// Makes the card current on this thread. Every call below does; it costs nothing if it is.
    pub fn bind(&self) -> Result<()> {
        check("choosing the card", self.context.bind_to_thread())
    }

    /// The point after all that is on `stream` now. `keep` stays alive until that point has passed.
    pub fn mark(self: &Arc<Self>, stream: &CudaStream, keep: Option<Tensor>) -> Result<Mark> {
        self.bind()?;
        let spare = self.spare.lock().pop();
        let event = match spare {
            Some(event) => event,
            None => {
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
                RawEvent(check("making an event", result::event::create(flags))?)
            }
        };
        // SAFETY: both handles are alive: the event is ours, the stream is borrowed.
        check("recording an event", unsafe { result::event::record(event.0, stream.cu_stream()) })?;
        Ok(Mark { event: Some(event), streams: self.clone(), keep })
    }

    /// Makes `stream` wait for a mark, without holding up the host.
    pub fn wait(&self, stream: &CudaStream, mark: &Mark) -> Result<()> {
        self.bind()?;
        let Some(event) = &mark.event else { return Ok(()) };
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive while they are borrowed.
        check("waiting for an event", unsafe { result::stream::wait_event(stream.cu_stream(), event.0, flags) })
    }

    /// Waits until all four streams are idle.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        for stream in [&self.copy_in, &self.compute, &self.peer, &self.copy_out] {
            check("waiting for the card", stream.synchronize())?;
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
            // SAFETY: spare events are nobody else's, and this was the last use.
            // An error here means that the card is lost, which its user has been told.
            let _ = unsafe { result::event::destroy(event.0) };
        }
    }
}

/// A point on a stream.
pub(super) struct Mark {
    event: Option<RawEvent>,
    streams: Arc<Streams>,
    /// Read by the work before the mark.
    keep: Option<Tensor>,
}

// SAFETY: the driver allows any thread to query an event; nothing else is reached through `&Mark`.
unsafe impl Sync for Mark {}

impl Event for Mark {
    fn is_done(&self) -> bool {
        let Some(event) = &self.event else { return true };
        // SAFETY: the event is alive while `self` is. An error counts as done: waiting will say what it is.
        let state = self.streams.bind().map(|()| unsafe { result::event::query(event.0) });
        !matches!(state, Ok(Err(error)) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY)
    }

    fn wait(&self) -> Result<()> {
        let Some(event) = &self.event else { return Ok(()) };
        self.streams.bind()?;
        // SAFETY: the event is alive while `self` is.
        check("waiting for the card", unsafe { result::event::synchronize(event.0) })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // What is kept was read on another stream than the one that orders its memory: that one must not go on to write
        // there before the reader is done.
        if self.keep.is_some() && !self.is_done() {
            let _ = self.streams.wait(&self.streams.compute.clone(), self);
        }
        if let Some(event) = self.event.take() {
            self.streams.spare.lock().push(event);
        }
    }
}

/// Waits for marks, one after the other, and calls back.
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
            unsent.0.1(Err(Error::internal("the thread that waits for the card is gone")));
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // A callback that panicked has ended the thread; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}
