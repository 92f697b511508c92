//! NCCL's communicator with calls that return early and are polled, so that one that waits for a rank that is gone can be ended.
//!
//! A communicator is not for several threads at once: whoever calls NCCL holds the lock. An abort first says why, which ends the
//! polling of whoever does, and then takes the communicator on a thread of its own, because NCCL's abort waits until no recording
//! that holds the communicator's kernels is left.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use parking_lot::Mutex;

use super::library::{Comm, Config, IN_PROGRESS, Nccl, SUCCESS, Status, UniqueId};
use crate::RankOnDevice;
use crate::cuda::stream::Streams;

/// How often a call that is in progress is looked at, after a while in which it is looked at all the time.
const POLL: Duration = Duration::from_micros(100);
const SPIN: Duration = Duration::from_micros(200);

/// How long the other ranks have to take what is under way when this one leaves.
const FINALIZE: Duration = Duration::from_secs(5);

pub(super) struct Communicator {
    nccl: &'static Nccl,
    /// `None` once an abort has taken it.
    calls: Arc<Mutex<Option<Handle>>>,
    ended: OnceLock<Error>,
    abort: Mutex<Option<JoinHandle<()>>>,
    streams: Arc<Streams>,
}

struct Handle(Comm);

// SAFETY: NCCL allows any thread to use a communicator, one at a time, which the lock sees to.
unsafe impl Send for Handle {}

impl Communicator {
    /// Meets the other ranks.
    pub fn meet(
        nccl: &'static Nccl,
        streams: Arc<Streams>,
        id: UniqueId,
        place: &RankOnDevice<'_>,
    ) -> Result<Communicator> {
        streams.bind()?;
        let (n_ranks, rank) = (place.n_ranks as i32, place.rank as i32);
        let (mut comm, mut config) = (std::ptr::null_mut(), Config::polled());
        // SAFETY: the library writes a handle, and reads the configuration, which says how long it is.
        let status = unsafe { (nccl.comm_init_rank_config)(&mut comm, n_ranks, id, rank, &mut config) };
        let calls = Arc::new(Mutex::new(Some(Handle(comm))));
        let met = Communicator { nccl, calls, ended: OnceLock::new(), abort: Mutex::new(None), streams };
        let result = met.poll(comm, status, || {
            (place.stop)()?;
            match Instant::now() > place.deadline {
                true => Err(Error::deadline_exceeded(format!(
                    "the other ranks did not come to where the GPUs of {n_ranks} ranks meet (rank {rank})"
                ))),
                false => Ok(()),
            }
        });
        if let Err(error) = result {
            let error = error.context("NCCL");
            met.abort(error.clone());
            return Err(error);
        }
        Ok(met)
    }

    /// Calls NCCL between the beginning and the end of a group, so that all calls begin together, and returns when they are enqueued.
    pub fn group(&self, calls: impl FnOnce(&Nccl, Comm) -> Result<(), Status>) -> Result<()> {
        let handle = self.calls.lock();
        if let Some(error) = self.ended.get() {
            return Err(error.clone());
        }
        let Some(Handle(comm)) = &*handle else { return Err(Error::internal("an NCCL communicator has no handle")) };
        self.streams.bind()?;
        // SAFETY: a group is the calling thread's; it is ended below in any case.
        let begun = unsafe { (self.nccl.group_start)() };
        let called = calls(self.nccl, *comm);
        // SAFETY: as above.
        let ended = unsafe { (self.nccl.group_end)() };
        let bad = [begun, called.err().unwrap_or(SUCCESS)].into_iter().find(|status| !is_fine(*status));
        let result = self.poll(*comm, bad.unwrap_or(ended), || Ok(()));
        drop(handle);
        result.inspect_err(|error| self.abort(error.clone()))
    }

    /// Looks at a call until it is done, or the communicator is ended, or `stop` says so.
    fn poll(&self, comm: Comm, mut status: Status, stop: impl Fn() -> Result<()>) -> Result<()> {
        let began = Instant::now();
        while status == IN_PROGRESS {
            if let Some(error) = self.ended.get() {
                return Err(error.clone());
            }
            stop()?;
            match began.elapsed() < SPIN {
                true => std::hint::spin_loop(),
                false => std::thread::sleep(POLL),
            }
            status = self.state(comm);
        }
        match status {
            SUCCESS => Ok(()),
            bad => Err(Error::internal(format!("NCCL: {}", self.nccl.describe(bad, comm)))),
        }
    }

    fn state(&self, comm: Comm) -> Status {
        let mut state = SUCCESS;
        // SAFETY: the caller holds the lock, so the handle is alive; the library writes one number.
        match unsafe { (self.nccl.comm_get_async_error)(comm, &mut state) } {
            SUCCESS => state,
            bad => bad,
        }
    }

    /// Ends what is under way. Only the first reason is kept.
    pub fn abort(&self, why: Error) {
        if self.ended.set(why).is_err() {
            return;
        }
        let (nccl, calls, streams) = (self.nccl, self.calls.clone(), self.streams.clone());
        let abort = move || {
            if let Some(Handle(comm)) = calls.lock().take()
                && !comm.is_null()
                && streams.bind().is_ok()
            {
                // SAFETY: nobody else has the handle any more. A failure leaves memory behind, and nothing to be done about it.
                let _ = unsafe { (nccl.comm_abort)(comm) };
            }
        };
        match std::thread::Builder::new().name("kolo-nccl-abort".to_owned()).spawn(abort) {
            Ok(thread) => *self.abort.lock() = Some(thread),
            Err(error) => tracing::error!("no thread to abort NCCL with, so its kernels go on: {error}"),
        }
    }

    /// Why it has ended, if it has; NCCL is asked unless it is busy.
    pub fn ended(&self) -> Option<Error> {
        if self.ended.get().is_none()
            && let Some(handle) = self.calls.try_lock()
            && let Some(Handle(comm)) = &*handle
        {
            let state = self.state(*comm);
            if !is_fine(state) {
                let why = Error::aborted(format!("NCCL: {}", self.nccl.describe(state, *comm)));
                drop(handle);
                self.abort(why);
            }
        }
        self.ended.get().cloned()
    }
}

fn is_fine(status: Status) -> bool {
    matches!(status, SUCCESS | IN_PROGRESS)
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if let Some(thread) = self.abort.get_mut().take() {
            // A panic there has nothing to add.
            let _ = thread.join();
        }
        let Some(Handle(comm)) = self.calls.lock().take().filter(|handle| !handle.0.is_null()) else { return };
        if self.streams.bind().is_err() {
            return;
        }
        // Others may still read what this rank has sent.
        // SAFETY: nobody else has the handle any more.
        let mut status = unsafe { (self.nccl.comm_finalize)(comm) };
        let deadline = Instant::now() + FINALIZE;
        while status == IN_PROGRESS && Instant::now() < deadline {
            std::thread::sleep(POLL);
            status = self.state(comm);
        }
        let end = if status == SUCCESS { self.nccl.comm_destroy } else { self.nccl.comm_abort };
        // SAFETY: as above; this is the last use. A failure leaves memory behind, and nothing to be done about it.
        let _ = unsafe { end(comm) };
    }
}
