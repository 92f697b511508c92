//! A reader: takes names of files from a queue, and gives out their records.
//!
//! One request is served at a time; the others wait in line, without a thread. A request that needs the next name waits
//! for it in the queue, as any dequeue does; files are read on file threads.
//!
//! | state | touched by | under |
//! | --- | --- | --- |
//! | the line, and whether somebody has a turn | any thread | `line` |
//! | the work that was begun, and the counts | the request whose turn it is, and resets | `progress` |

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{Error, Result, Tensor};
use kolo_device::Charge;
use parking_lot::Mutex;

use super::work::{Format, Record, Work};
use crate::io::FileAccess;
use crate::io::on_thread::path_of;
use crate::io::threads::IoThreads;
use crate::queue::source::Described;
use crate::queue::wait::{Waiter, Waits, watch};
use crate::queue::{Amount, Queue};
use crate::resource::Resource;
use crate::{CancelToken, Done, Outcome, Registration};

/// A reader.
pub struct Reader {
    format: Format,
    line: Mutex<Line>,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Line {
    is_taken: bool,
    next_id: u64,
    waiting: VecDeque<(Waiter, Request)>,
}

#[derive(Default)]
struct Progress {
    work: Option<Work>,
    n_records: i64,
}

/// How much is asked for.
#[derive(Clone, Copy)]
pub enum Wanted {
    /// One record, as two scalars.
    One,
    /// So many at most, as two vectors.
    UpTo(usize),
}

/// What a request needs.
#[derive(Clone)]
pub struct Request {
    /// How much.
    pub wanted: Wanted,
    /// Where names come from.
    pub queue: Arc<Queue>,
    /// Which files may be read.
    pub access: FileAccess,
    /// What reads.
    pub threads: Arc<IoThreads>,
    /// Tells when the step is cancelled.
    pub cancel: Arc<CancelToken>,
}

/// The right to use the reader. Lets the next in line have it when dropped, whatever happened.
struct Turn(Arc<Reader>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.next_turn();
    }
}

impl Reader {
    /// How many records were given out.
    pub fn n_records(&self) -> i64 {
        self.progress.lock().n_records
    }

    /// Forgets the file that was begun, and counts anew.
    pub fn reset(&self) {
        let old = std::mem::take(&mut *self.progress.lock());
        drop(old);
    }

    /// Reads, once it is this request's turn.
    pub fn read(self: &Arc<Self>, request: Request, done: Done) {
        let cancel = request.cancel.clone();
        let id = {
            let mut line = self.line.lock();
            line.next_id += 1;
            let waiter = Waiter::new(line.next_id, done);
            if !line.is_taken {
                line.is_taken = true;
                drop(line);
                return go_on(Turn(self.clone()), waiter, request);
            }
            let id = waiter.id;
            line.waiting.push_back((waiter, request));
            id
        };
        watch(self, id, &cancel);
    }

    fn next_turn(self: &Arc<Self>) {
        let next = {
            let mut line = self.line.lock();
            let next = line.waiting.pop_front();
            line.is_taken = next.is_some();
            next
        };
        if let Some((waiter, request)) = next {
            go_on(Turn(self.clone()), waiter, request);
        }
    }

    /// The records that are wanted from the work at hand, and fewer at its end; `None` if there is no work.
    fn take(&self, wanted: Wanted) -> Result<Option<Vec<Record>>> {
        let mut progress = self.progress.lock();
        let n = match wanted {
            Wanted::One => 1,
            Wanted::UpTo(n) => n,
        };
        let mut records = Vec::new();
        while let Some(work) = &mut progress.work {
            if records.len() == n {
                return Ok(Some(records));
            }
            match work.next(&self.format) {
                Ok(Some(record)) => {
                    records.push(record);
                    progress.n_records += 1;
                }
                Ok(None) => progress.work = None,
                Err(error) => {
                    // A broken file is not tried again.
                    progress.work = None;
                    return Err(error);
                }
            }
        }
        Ok(if records.is_empty() { None } else { Some(records) })
    }

    fn begin(&self, name: Bytes, access: &FileAccess) -> Result<()> {
        let path = path_of(&name)?;
        if self.format != Format::Identity {
            access.check(&path)?;
        }
        let work = Work::open(&self.format, name, path, access)?;
        self.progress.lock().work = Some(work);
        Ok(())
    }
}

/// Ends a request: first the turn, so that whoever asks again at once finds it free.
fn finish(turn: Turn, waiter: Waiter, outcome: Result<Outcome>) {
    drop(turn);
    waiter.finish(outcome);
}

/// Reads on a file thread; asks the queue for a name if there is no work.
fn go_on(turn: Turn, waiter: Waiter, request: Request) {
    let threads = request.threads.clone();
    // If there is no thread, what is dropped here ends the turn and the request.
    let _ = threads.run(move || match turn.0.take(request.wanted) {
        Ok(Some(records)) => finish(turn, waiter, outputs(records, request.wanted)),
        Ok(None) => ask_queue(turn, waiter, request),
        Err(error) => finish(turn, waiter, Err(error)),
    });
}

fn ask_queue(turn: Turn, waiter: Waiter, request: Request) {
    let (queue, cancel) = (request.queue.clone(), request.cancel.clone());
    let done = Done::new(move |outcome: Result<Outcome>| {
        let name = outcome.and_then(|outcome| match outcome.outputs.first().map(Tensor::strings) {
            Some(Ok([name])) => Ok(name.clone()),
            _ => Err(Error::invalid_argument("Queue element must be a single string: the name of a file")),
        });
        match name {
            Ok(name) => {
                let threads = request.threads.clone();
                let _ = threads.run(move || match turn.0.begin(name, &request.access) {
                    Ok(()) => go_on(turn, waiter, request),
                    Err(error) => finish(turn, waiter, Err(error)),
                });
            }
            Err(error) => finish(turn, waiter, Err(error)),
        }
    });
    queue.dequeue(Amount::One, &cancel, done);
}

fn outputs(mut records: Vec<Record>, wanted: Wanted) -> Result<Outcome> {
    match wanted {
        Wanted::One => {
            let (key, value) = records.pop().unwrap_or_default();
            Ok(vec![Tensor::string(key), Tensor::string(value)].into())
        }
        Wanted::UpTo(_) => {
            let n = records.len();
            let (keys, values): (Vec<Bytes>, Vec<Bytes>) = records.into_iter().unzip();
            Ok(vec![Tensor::from_strings([n], keys)?, Tensor::from_strings([n], values)?].into())
        }
    }
}

impl Waits for Reader {
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool {
        match self.line.lock().waiting.iter_mut().find(|(waiter, _)| waiter.id == id) {
            Some((waiter, _)) => {
                waiter.attach(token, registration);
                true
            }
            None => false,
        }
    }

    fn cancel(&self, id: u64) {
        let gone = {
            let mut line = self.line.lock();
            let at = line.waiting.iter().position(|(waiter, _)| waiter.id == id);
            at.and_then(|at| line.waiting.remove(at))
        };
        if let Some((waiter, _)) = gone {
            waiter.finish(Err(Error::cancelled("Read operation was cancelled")));
        }
    }
}

impl Resource for Reader {
    fn kind(&self) -> &'static str {
        "reader"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Described for Reader {
    type Spec = Format;

    fn make(_: &Arc<str>, format: &Format, _: Charge) -> Result<Arc<Reader>> {
        Ok(Arc::new(Reader { format: format.clone(), line: Mutex::default(), progress: Mutex::default() }))
    }

    fn agree(&self, name: &str, format: &Format) -> Result<()> {
        if self.format == *format {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("reader '{name}' exists, and reads {:?}, not {format:?}", self.format)))
    }
}
