//! A group whose collectives the nodes of graphs begin: on a thread of its own, beside everything else and in the order in which they
//! were begun; or on the thread that begins them, for ranks that have a single core each. There, nothing could run beside them, and
//! two hand-overs between threads cost more than a small collective.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Instant;

use kolo_core::{Error, Result};
use kolo_device::shared_group::Activity;
use kolo_device::{Device, DeviceRanks};
use kolo_ops::collective::{CollectiveCall, CollectiveDone, CollectiveGroup};
use parking_lot::Mutex;

use super::meter::{ExchangedSoFar, Meter};
use super::on_devices::{DeviceEnds, GroupOnDevices};
use super::{Communicator, CommunicatorOptions, Recorder};

/// One rank's end of a group, for the nodes of graphs. Dropping it stops what is under way.
pub struct Group {
    rank: usize,
    n_ranks: usize,
    runs: Runs,
    stop: Arc<AtomicBool>,
    recorder: Recorder,
    /// When the first call was begun since this was taken.
    first_begun: Mutex<Option<Instant>>,
    options: CommunicatorOptions,
    devices: Mutex<DeviceEnds>,
    meter: Arc<Meter>,
}

/// Where collectives run.
enum Runs {
    /// On a thread of the group; both are there until it is dropped.
    OwnThread { queue: Option<Mutex<Sender<Queued>>>, thread: Option<JoinHandle<()>> },
    /// On the thread that begins them.
    CallersThread(Box<Mutex<Communicator>>),
}

type Queued = (CollectiveCall, CollectiveDone);

impl Group {
    /// Takes a communicator over, for a thread of its own.
    pub fn new(communicator: Communicator) -> Result<Arc<Group>> {
        let (rank, n_ranks, stop) = (communicator.rank(), communicator.n_ranks(), communicator.stop_flag());
        let (sender, queue) = mpsc::channel();
        let (recorder, options) = (communicator.recorder().clone(), communicator.options().clone());
        let meter = Arc::<Meter>::default();
        let counts = meter.clone();
        let thread = std::thread::Builder::new()
            .name(format!("kolo-rank-{rank}"))
            .spawn(move || serve(communicator, &queue, &counts))
            .map_err(|error| Error::resource_exhausted(format!("no thread for collectives: {error}")))?;
        let runs = Runs::OwnThread { queue: Some(Mutex::new(sender)), thread: Some(thread) };
        let (first_begun, devices) = (Mutex::default(), Mutex::default());
        Ok(Arc::new(Group { rank, n_ranks, runs, stop, recorder, first_begun, options, devices, meter }))
    }

    /// Takes a communicator over; beginning a collective returns when it is done.
    pub fn on_callers_thread(communicator: Communicator) -> Arc<Group> {
        let (rank, n_ranks, stop) = (communicator.rank(), communicator.n_ranks(), communicator.stop_flag());
        let (recorder, options) = (communicator.recorder().clone(), communicator.options().clone());
        let runs = Runs::CallersThread(Box::new(Mutex::new(communicator)));
        let (first_begun, devices) = (Mutex::default(), Mutex::default());
        Arc::new(Group { rank, n_ranks, runs, stop, recorder, first_begun, options, devices, meter: Arc::default() })
    }

    /// Where this rank writes down what it does.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// How it works, with the costs that its ranks agreed on.
    pub fn options(&self) -> &CommunicatorOptions {
        &self.options
    }

    /// What this rank has exchanged through host memory.
    pub fn exchanged(&self) -> ExchangedSoFar {
        self.meter.so_far()
    }

    /// A step begins. See [`ExchangedSoFar::exposed`].
    pub fn begin_step(&self) {
        self.meter.begin_step();
    }

    /// The calls of a step are over.
    pub fn end_step(&self) {
        self.meter.end_step();
    }

    /// Whether calls run beside what begins them.
    pub fn runs_beside(&self) -> bool {
        matches!(self.runs, Runs::OwnThread { .. })
    }

    /// When the first call was begun since this was last asked: how far a rank comes by itself before it needs the others.
    pub fn take_first_begun(&self) -> Option<Instant> {
        self.first_begun.lock().take()
    }
}

fn serve(mut communicator: Communicator, queue: &Receiver<Queued>, meter: &Meter) {
    while let Ok((call, done)) = queue.recv() {
        let began = Instant::now();
        let result = communicator.run(call);
        meter.ended(began, Instant::now());
        done(result);
    }
}

impl CollectiveGroup for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn n_ranks(&self) -> usize {
        self.n_ranks
    }

    fn start(&self, call: CollectiveCall, done: CollectiveDone) {
        self.first_begun.lock().get_or_insert_with(Instant::now);
        self.meter.count(&call, self.n_ranks);
        let refused = match &self.runs {
            Runs::OwnThread { queue: Some(queue), .. } => {
                queue.lock().send((call, done)).err().map(|refused| refused.0.1)
            }
            Runs::OwnThread { queue: None, .. } => Some(done),
            Runs::CallersThread(communicator) => {
                // Whoever is told may begin the next one.
                let began = Instant::now();
                let result = communicator.lock().run(call);
                self.meter.ended(began, Instant::now());
                done(result);
                None
            }
        };
        if let Some(done) = refused {
            done(Err(Error::internal("the thread of a group has ended")));
        }
    }

    fn on_device(&self, device: &dyn Device) -> Result<Option<Arc<dyn DeviceRanks>>> {
        let CommunicatorOptions { deterministic, timeout, .. } = self.options;
        let (recorder, stop) = (&self.recorder, &self.stop);
        self.devices.lock().of(device, &GroupOnDevices { group: self, deterministic, timeout, recorder, stop })
    }

    fn health(&self) -> Result<()> {
        self.devices.lock().health(&self.recorder, self.rank)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.recorder.note(Activity::Ended);
        let Runs::OwnThread { queue, thread } = &mut self.runs else { return };
        *queue = None;
        // The thread itself may drop the last handle, at the end of a call.
        if let Some(thread) = thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // A panic there has ended the calls that it was about.
            let _ = thread.join();
        }
    }
}
