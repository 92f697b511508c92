//! The outbox of a connection and the transfers of a step under [shuttle](https://docs.rs/shuttle), which runs a test's threads
//! under many random schedules and fails when all of them wait. Both files are compiled a second time, with shuttle's primitives
//! in `sync`, and a connection in memory in `stream`.
//!
//! `SHUTTLE_SCHEDULES=N` runs N schedules of each test. A failure prints the schedule; `shuttle::replay` runs it again.

#[path = "../src/transport/framed/outbox.rs"]
#[allow(dead_code, reason = "the models do not call all of it")]
mod outbox;
#[path = "../src/task/worker/transfers.rs"]
#[allow(dead_code, reason = "the models do not call all of it")]
mod transfers;

use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};
use kolo_net::TaskName;
use kolo_ops::{Received, Rendezvous as _, RendezvousKey};
use kolo_runtime::StepRendezvous as _;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{future, thread};

use outbox::{Outbox, WireMessage};
use stream::Stream;
use sync::Mutex;
use transfers::{Fetch, StepTransfers, Transfers, Waiter};

/// Where `transfers.rs` looks for them.
mod task {
    pub use kolo_net::services;
}

/// Shuttle's primitives, as the two files expect them.
mod sync {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::PoisonError;
    use std::task::{Context, Poll};
    use std::time::Duration;

    pub use shuttle::future::{JoinHandle, spawn};
    use shuttle::rand::Rng as _;
    pub use shuttle::sync::MutexGuard;
    pub use shuttle::sync::atomic::{AtomicBool, Ordering};

    pub const IDLE_TICKS: u32 = 1;

    /// With parking_lot's signatures.
    #[derive(Default)]
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// Tokio's, which shuttle's executor can wait for; the atomic lets other threads run before each call.
    pub struct Notify(tokio::sync::Notify, AtomicBool);

    impl Notify {
        pub fn new() -> Notify {
            Notify(tokio::sync::Notify::new(), AtomicBool::new(false))
        }

        pub fn notify_one(&self) {
            self.1.store(true, Ordering::SeqCst);
            self.0.notify_one();
        }

        pub fn notified(&self) -> impl Future<Output = ()> {
            self.1.store(true, Ordering::SeqCst);
            self.0.notified()
        }
    }

    /// Times out sooner or later: shuttle has no clock.
    pub async fn timeout<F: Future>(_: Duration, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        std::future::poll_fn(|cx: &mut Context<'_>| {
            let future: Pin<&mut F> = future.as_mut();
            match future.poll(cx) {
                Poll::Ready(output) => Poll::Ready(Some(output)),
                Poll::Pending if shuttle::rand::thread_rng().gen_bool(0.5) => Poll::Ready(None),
                Poll::Pending => {
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// A connection in memory, with a buffer of a few bytes.
mod stream {
    use std::future::poll_fn;
    use std::io::{self, IoSlice};
    use std::sync::Arc;
    use std::task::{Poll, Waker};

    use shuttle::sync::{Condvar, Mutex};

    const CAPACITY: usize = 3;

    #[derive(Default)]
    pub struct Stream {
        pipe: Mutex<Pipe>,
        is_readable: Condvar,
    }

    #[derive(Default)]
    struct Pipe {
        bytes: Vec<u8>,
        writer: Option<Waker>,
        is_shut_down: bool,
    }

    impl Stream {
        pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
            let mut pipe = self.pipe.lock().expect("not poisoned");
            if pipe.is_shut_down {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let room = CAPACITY - pipe.bytes.len();
            if room == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let written: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).take(room).collect();
            pipe.bytes.extend_from_slice(&written);
            self.is_readable.notify_one();
            Ok(written.len())
        }

        pub async fn writable(&self) -> io::Result<()> {
            poll_fn(|cx| {
                let mut pipe = self.pipe.lock().expect("not poisoned");
                if pipe.bytes.len() < CAPACITY || pipe.is_shut_down {
                    return Poll::Ready(Ok(()));
                }
                pipe.writer = Some(cx.waker().clone());
                Poll::Pending
            })
            .await
        }

        pub async fn pump(self: Arc<Self>) {}

        pub fn shut_down(&self) {
            let writer = {
                let mut pipe = self.pipe.lock().expect("not poisoned");
                pipe.is_shut_down = true;
                pipe.writer.take()
            };
            self.is_readable.notify_one();
            writer.into_iter().for_each(Waker::wake);
        }

        /// Waits for so many bytes, or fewer if the connection is shut down.
        pub fn read(&self, n: usize) -> Vec<u8> {
            let mut found = Vec::new();
            while found.len() < n {
                let writer = {
                    let mut pipe = self.pipe.lock().expect("not poisoned");
                    while pipe.bytes.is_empty() {
                        if pipe.is_shut_down {
                            return found;
                        }
                        pipe = self.is_readable.wait(pipe).expect("not poisoned");
                    }
                    found.append(&mut pipe.bytes);
                    pipe.writer.take()
                };
                writer.into_iter().for_each(Waker::wake);
            }
            found
        }
    }
}

/// Runs `model` under so many schedules of each of two kinds: all choices random, and few switches at random points.
fn check(n_schedules: usize, model: fn()) {
    let n_schedules = std::env::var("SHUTTLE_SCHEDULES").map_or(n_schedules, |n| n.parse().expect("a number"));
    let schedulers: [Box<dyn Scheduler + Send>; 2] =
        [Box::new(RandomScheduler::new(n_schedules)), Box::new(PctScheduler::new(3, n_schedules))];
    for scheduler in schedulers {
        shuttle::Runner::new(scheduler, shuttle::Config::new()).run(model);
    }
}

fn message(text: &str) -> WireMessage {
    WireMessage { head: text.as_bytes().to_vec(), body: None }
}

/// An outbox with its writing task, and the other end of its connection.
fn open() -> (Arc<Outbox>, Arc<Stream>, future::JoinHandle<()>) {
    let stream = Arc::new(Stream::default());
    let outbox = Arc::new(Outbox::new(stream.clone()));
    let writing = future::spawn(outbox.clone().drain());
    (outbox, stream, writing)
}

/// Closes an outbox; its writing task must end.
fn close(outbox: &Outbox, writing: future::JoinHandle<()>) {
    outbox.close(Error::cancelled("enough"));
    future::block_on(writing).expect("it ends");
}

/// Urgent messages arrive whole and in the order of their thread, though the socket is full at times and nothing ticks.
#[test]
fn urgent_messages_arrive() {
    check(3000, || {
        let (outbox, stream, writing) = open();
        let other = {
            let outbox = outbox.clone();
            thread::spawn(move || ["ab", "cd"].map(|text| outbox.push(message(text)).expect("open")))
        };
        let reading = thread::spawn(move || stream.read(8));
        outbox.push(message("12")).expect("open");
        outbox.push(message("34")).expect("open");
        let found = reading.join().expect("it ends");
        let of = |is_mine: fn(&u8) -> bool| found.iter().copied().filter(is_mine).collect::<Vec<u8>>();
        assert_eq!((of(u8::is_ascii_digit), of(u8::is_ascii_lowercase)), (b"1234".to_vec(), b"abcd".to_vec()));
        other.join().expect("it ends");
        close(&outbox, writing);
    });
}

/// A deferred message arrives though no urgent one follows, also when it comes as the ticking stops.
#[test]
fn deferred_messages_arrive() {
    check(3000, || {
        let (outbox, stream, writing) = open();
        let reading = thread::spawn(move || stream.read(4));
        for text in ["a", "b", "c", "d"] {
            outbox.push_later(message(text)).expect("open");
            thread::yield_now();
        }
        assert_eq!(reading.join().expect("it ends"), b"abcd");
        close(&outbox, writing);
    });
}

/// Messages on hold are sent with the release, those of other threads too.
#[test]
fn held_messages_arrive() {
    check(3000, || {
        let (outbox, stream, writing) = open();
        let other = {
            let outbox = outbox.clone();
            thread::spawn(move || {
                outbox.push(message("ab")).expect("open");
                outbox.push_later(message("cd")).expect("open");
                outbox.flush_now();
            })
        };
        let reading = thread::spawn(move || stream.read(6));
        outbox.hold();
        outbox.push(message("12")).expect("open");
        outbox.release();
        assert_eq!(reading.join().expect("it ends").len(), 6);
        other.join().expect("it ends");
        close(&outbox, writing);
    });
}

/// When the connection breaks, nothing waits for it any more.
#[test]
fn a_broken_connection_ends_the_writing_task() {
    check(3000, || {
        let (outbox, stream, writing) = open();
        let breaking = {
            let stream = stream.clone();
            thread::spawn(move || stream.shut_down())
        };
        // Refused once the break is noticed.
        while outbox.push(message("abcd")).is_ok() {
            thread::yield_now();
        }
        breaking.join().expect("it ends");
        future::block_on(writing).expect("it ends");
    });
}

/// An outbox can be closed while its writing task waits for room that never comes.
#[test]
fn closing_ends_a_writing_task_that_waits_for_room() {
    check(3000, || {
        let (outbox, _unread, writing) = open();
        let pushing = {
            let outbox = outbox.clone();
            // Refused once the outbox is closed.
            thread::spawn(move || ["abcd", "ef"].map(|text| outbox.push(message(text)).is_ok()))
        };
        outbox.push_later(message("12")).expect("open");
        close(&outbox, writing);
        pushing.join().expect("it ends");
    });
}

/// Another task, which answers each question on a thread of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Elsewhere {
    /// Answers groups too.
    Groups,
    /// Must be asked one by one.
    OneByOne,
    /// Never answers.
    Silent,
}

impl Fetch for Elsewhere {
    fn fetch(&self, _: u64, _: &RendezvousKey, done: Waiter) -> task::services::Guard {
        if *self == Elsewhere::Silent {
            // The question is open for as long as its guard lives.
            return Box::new(done);
        }
        thread::spawn(move || done(Ok(value())));
        Box::new(())
    }

    fn fetch_group(
        &self,
        _: u64,
        group: &task::services::Group,
        each: task::services::Each,
    ) -> Option<task::services::Guard> {
        let n_keys = group.keys.len();
        match self {
            Elsewhere::OneByOne => return None,
            Elsewhere::Groups => {
                thread::spawn(move || (0..n_keys).for_each(|index| each(index, Ok(value()))));
            }
            Elsewhere::Silent => return Some(Box::new(each)),
        }
        Some(Box::new(()))
    }
}

fn value() -> Received {
    Received::value(Tensor::scalar(1.0f32))
}

/// A transfer from this task's device to itself, or from another task's.
fn key(task: u32) -> RendezvousKey {
    let device = |task| format!("/job:w/replica:0/task:{task}/device:CPU:0");
    RendezvousKey::parse(&format!("{};0000000000000001;{};edge;0:0", device(task), device(0))).expect("a key")
}

fn table(elsewhere: Elsewhere) -> Arc<Transfers> {
    Arc::new(Transfers::new(7, "/job:w/replica:0/task:0/".into(), Arc::new(elsewhere)))
}

/// What a `_Recv` was told, each time.
type Told = Arc<Mutex<Vec<Result<()>>>>;

fn recv(table: &Arc<Transfers>, key: RendezvousKey) -> Told {
    let told = Told::default();
    let tell = told.clone();
    let done = Box::new(move |received: Result<Received>| tell.lock().push(received.map(|_| ())));
    StepTransfers(table.clone()).recv(key, done);
    told
}

/// Waits until a `_Recv` was told something.
fn wait(told: &Told) -> Result<()> {
    // Shuttle fails a test that takes too many steps, so waiting in vain is found too.
    while told.lock().is_empty() {
        thread::yield_now();
    }
    told.lock()[0].clone()
}

fn abort(table: &Arc<Transfers>) -> thread::JoinHandle<()> {
    let table = table.clone();
    thread::spawn(move || StepTransfers(table).abort(Error::cancelled("stop")))
}

/// A value of this task reaches its receiver, or the abort does, and a wait that is given up takes nothing.
#[test]
fn a_local_transfer_is_told_once() {
    check(2000, || {
        let table = table(Elsewhere::Groups);
        let sending = {
            let table = table.clone();
            thread::spawn(move || StepTransfers(table).send(key(0), value()).is_ok())
        };
        let given_up = {
            let table = table.clone();
            thread::spawn(move || {
                let told = Told::default();
                let tell = told.clone();
                let ticket = table.wait(key(0), Box::new(move |received| tell.lock().push(received.map(|_| ()))));
                table.give_up(&key(0), ticket);
                told
            })
        };
        let given_up = given_up.join().expect("it ends");
        let told = recv(&table, key(0));
        let was_sent = sending.join().expect("it ends");
        let aborting = abort(&table);
        let result = wait(&told);
        aborting.join().expect("it ends");
        assert!(was_sent && told.lock().len() == 1);
        assert_eq!(result.is_ok(), given_up.lock().is_empty(), "whoever gave up in time has left the value");
    });
}

/// A value of another task reaches its receiver once, asked for ahead or not, in time or late, or the abort does.
#[test]
fn a_remote_transfer_is_told_once() {
    let models: [fn(); 5] = [
        || remote(Elsewhere::Groups, Ending::Answer),
        || remote(Elsewhere::OneByOne, Ending::Answer),
        || remote(Elsewhere::Groups, Ending::Abort),
        || remote(Elsewhere::OneByOne, Ending::Abort),
        || remote(Elsewhere::Silent, Ending::Abort),
    ];
    for model in models {
        check(1000, model);
    }
}

/// How a wait may end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// With a value.
    Answer,
    /// With a value, or the abort of the step.
    Abort,
}

fn remote(elsewhere: Elsewhere, ending: Ending) {
    let table = table(elsewhere);
    let asking = {
        let table = table.clone();
        let (task, keys) = (TaskName::new("w", 1), [key(1)].into());
        let group = task::services::Group { task, keys, wire: Default::default() };
        thread::spawn(move || table.ask_ahead(&[group]))
    };
    let aborting = (ending == Ending::Abort).then(|| abort(&table));
    let told = recv(&table, key(1));
    asking.join().expect("it ends");
    aborting.into_iter().for_each(|aborting| aborting.join().expect("it ends"));
    let result = wait(&told);
    assert!(result.is_ok() || ending == Ending::Abort, "{result:?}");
    assert!(result.is_err() || elsewhere != Elsewhere::Silent);
    assert_eq!(told.lock().len(), 1);
    assert!(table.is_empty() || ending == Ending::Answer);
}
