//! The writer of event files.
//!
//! Callers leave encoded events in a queue; one thread per directory appends them to the file. All that both touch is
//! `WriterState`, under one mutex:
//!
//! | field | callers | writing thread |
//! | --- | --- | --- |
//! | `queue`, `n_bytes`, `since` | push | take all |
//! | `flushes` | ask for one more | |
//! | `flushed` | wait for it | raise when everything taken before is in the file |
//! | `is_closing` | set when the last handle goes | ends when it is set and the queue is empty |
//! | `error`, `n_lost` | read | set |
//!
//! A disk that is full does not stop a training: the file is cut back to its last whole record, the events are counted as
//! lost, the reason is logged once, and later events are tried again.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kolo_core::{Error, Result, Tensor};
use kolo_graph::Graph;
use kolo_graph::wire::graph::{ExportOptions, export, write_graph};
use kolo_ops::summary::{histogram, image, tensor};
use kolo_runtime::RunMetadata;
use parking_lot::{Condvar, Mutex, MutexGuard};
use prost::Message as _;

use super::event::{
    Event, EventContent, SessionLog, SessionStatus, SummaryEvent, TaggedRunMetadata, run_metadata_bytes,
};
use super::{Content, Summary, SummaryMetadata, SummaryValue};
use crate::data::{io_error, record};

/// How an event file is written.
#[derive(Clone, Debug)]
pub struct WriterOptions {
    /// How long events may stay in memory.
    pub flush_every: Duration,
    /// Added to the file's name.
    pub suffix: String,
    /// How many bytes of events may wait for a slow disk; after that, adding one waits.
    pub max_queued_bytes: usize,
    /// How long adding an event waits at most; then the event is lost.
    pub max_wait: Duration,
}

impl Default for WriterOptions {
    fn default() -> WriterOptions {
        WriterOptions {
            flush_every: Duration::from_secs(120),
            suffix: String::new(),
            max_queued_bytes: 64 << 20,
            max_wait: Duration::from_secs(10),
        }
    }
}

/// Writes events to a file in a directory, in the background. TensorBoard reads them while they are written.
///
/// A process has one writer for each directory: a second one for the same directory is another handle to the first, and
/// the file is closed with the last handle. Adding never fails because of the disk; [`FileWriter::flush`] and
/// [`FileWriter::close`] tell what went wrong.
#[derive(Clone)]
pub struct FileWriter {
    shared: Arc<Shared>,
}

/// Handles that live, by directory. The one table of the process: TensorBoard takes two files that are written at once
/// for two runs, of which it would show only one.
static WRITERS: LazyLock<Mutex<HashMap<PathBuf, Weak<Shared>>>> = LazyLock::new(Mutex::default);

struct Shared {
    path: PathBuf,
    options: WriterOptions,
    channel: Arc<Channel>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Channel {
    state: Mutex<WriterState>,
    /// Something to do for the writing thread.
    work: Condvar,
    /// Something was taken or flushed.
    progress: Condvar,
}

#[derive(Default)]
struct WriterState {
    queue: Vec<Vec<u8>>,
    n_bytes: usize,
    /// When the first event of the queue came.
    since: Option<Instant>,
    flushes: u64,
    flushed: u64,
    is_closing: bool,
    error: Option<Error>,
    n_lost: u64,
}

impl FileWriter {
    /// A writer for this directory, which is made if it does not exist.
    pub fn new(dir: impl AsRef<Path>) -> Result<FileWriter> {
        FileWriter::with_options(dir, WriterOptions::default())
    }

    /// As [`FileWriter::new`]. The options are those of the first writer for the directory.
    pub fn with_options(dir: impl AsRef<Path>, options: WriterOptions) -> Result<FileWriter> {
        let dir = dir.as_ref();
        let name = dir.display().to_string();
        std::fs::create_dir_all(dir).map_err(|reason| io_error(&name, &reason))?;
        let dir = dir.canonicalize().map_err(|reason| io_error(&name, &reason))?;
        let mut writers = WRITERS.lock();
        if let Some(shared) = writers.get(&dir).and_then(Weak::upgrade) {
            return Ok(FileWriter { shared });
        }
        writers.retain(|_, writer| writer.strong_count() > 0);
        let shared = Arc::new(Shared::open(&dir, options)?);
        writers.insert(dir, Arc::downgrade(&shared));
        Ok(FileWriter { shared })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Adds what a summary op gave: a string scalar, or several.
    pub fn add_summary(&self, summary: &Tensor, step: i64) -> Result<()> {
        for bytes in summary.strings()? {
            Summary::from_bytes(bytes)?;
            // Kept as bytes, so that kinds of value that Kolo does not make are written whole.
            let event = SummaryEvent { wall_time: now().as_secs_f64(), step, summary: bytes.clone() };
            self.shared.push(event.encode_to_vec());
        }
        Ok(())
    }

    /// Adds values made by hand.
    pub fn add_values(&self, values: Vec<SummaryValue>, step: i64) {
        self.add_event(EventContent::Summary(Summary::from(values)), step);
    }

    /// Adds a number.
    pub fn add_scalar(&self, tag: &str, value: f64, step: i64) {
        self.add_values(vec![SummaryValue::new(tag, Content::SimpleValue(value as f32))], step);
    }

    /// Adds the distribution of a tensor's values. NaN and infinity are errors.
    pub fn add_histogram(&self, tag: &str, values: &Tensor, step: i64) -> Result<()> {
        let histogram = histogram::histogram(values, tag)?;
        self.add_values(vec![SummaryValue::new(tag, Content::Histo(histogram))], step);
        Ok(())
    }

    /// Adds up to three pictures of a batch `[n, height, width, channels]`.
    pub fn add_image(&self, tag: &str, images: &Tensor, step: i64) -> Result<()> {
        self.add_values(image::images(tag, images, 3, &image::BAD_COLOR)?, step);
        Ok(())
    }

    /// Adds a text, which TensorBoard shows as Markdown.
    pub fn add_text(&self, tag: &str, text: &str, step: i64) -> Result<()> {
        self.add_values(
            vec![tensor::tensor_value(tag, &Tensor::from(text), SummaryMetadata::for_plugin("text"))?],
            step,
        );
        Ok(())
    }

    /// Adds a graph.
    pub fn add_graph(&self, graph: &Graph) -> Result<()> {
        graph.check()?;
        let def = export(&graph.nodes(), ExportOptions::default())?;
        self.add_event(EventContent::GraphDef(write_graph(&def)?), 0);
        Ok(())
    }

    /// Adds that a training began, stopped or saved a checkpoint.
    pub fn add_session_log(&self, status: SessionStatus, checkpoint_path: &str, step: i64) {
        let log =
            SessionLog { status: status.into(), checkpoint_path: checkpoint_path.to_owned(), ..Default::default() };
        self.add_event(EventContent::SessionLog(log), step);
    }

    /// Adds what ran when in a traced step; TensorBoard's graph page shows it by `tag`.
    pub fn add_run_metadata(&self, tag: &str, metadata: &RunMetadata, step: i64) {
        let run_metadata = run_metadata_bytes(metadata);
        self.add_event(EventContent::TaggedRunMetadata(TaggedRunMetadata { tag: tag.to_owned(), run_metadata }), step);
    }

    /// Adds any event, as of now.
    pub fn add_event(&self, what: EventContent, step: i64) {
        let event = Event { wall_time: now().as_secs_f64(), step, what: Some(what) };
        self.shared.push(event.encode_to_vec());
    }

    /// Waits until everything added so far is in the file.
    ///
    /// # Errors
    /// What kept events from being written since the file was opened, and how many are lost.
    pub fn flush(&self) -> Result<()> {
        self.shared.flush()
    }

    /// Writes everything that was added and gives this handle up; the last one closes the file.
    ///
    /// # Errors
    /// As [`FileWriter::flush`].
    pub fn close(self) -> Result<()> {
        self.shared.flush()
    }
}

impl std::fmt::Debug for FileWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "writer of {}", self.path().display())
    }
}

impl Shared {
    fn open(dir: &Path, options: WriterOptions) -> Result<Shared> {
        let (path, file) = create(dir, &options.suffix)?;
        let version = EventContent::FileVersion("brain.Event:2".to_owned());
        let event = Event { wall_time: now().as_secs_f64(), step: 0, what: Some(version) };
        let mut out = Out { path: path.clone(), file, length: 0 };
        // The first event is written now, so that a disk that cannot be written to is known at once.
        out.write(&[event.encode_to_vec()])?;
        let channel = Arc::new(Channel::default());
        let (theirs, every) = (channel.clone(), options.flush_every);
        let thread =
            std::thread::Builder::new().name("kolo-events".to_owned()).spawn(move || theirs.write_all(out, every));
        let thread =
            thread.map_err(|reason| Error::resource_exhausted(format!("no thread to write events: {reason}")))?;
        Ok(Shared { path, options, channel, thread: Some(thread) })
    }

    fn push(&self, event: Vec<u8>) {
        let deadline = Instant::now() + self.options.max_wait;
        let mut state = self.channel.state.lock();
        // One event is taken whatever its size.
        while state.n_bytes > self.options.max_queued_bytes && !state.queue.is_empty() {
            if self.channel.progress.wait_until(&mut state, deadline).timed_out() {
                let error = Error::deadline_exceeded(format!(
                    "{}: events wait for the disk for more than {:?}",
                    self.path.display(),
                    self.options.max_wait
                ));
                return state.lose(error, 1);
            }
        }
        let before = state.n_bytes;
        state.n_bytes += event.len();
        state.queue.push(event);
        state.since.get_or_insert_with(Instant::now);
        // The thread wakes for the first event, to note the time, and when there is enough to write.
        if before == 0 || (before < WRITE_AT && state.n_bytes >= WRITE_AT) {
            self.channel.work.notify_one();
        }
    }

    fn flush(&self) -> Result<()> {
        let mut state = self.channel.state.lock();
        state.flushes += 1;
        let mine = state.flushes;
        self.channel.work.notify_one();
        let deadline = Instant::now() + FLUSH_WAIT;
        while state.flushed < mine {
            if self.channel.progress.wait_until(&mut state, deadline).timed_out() && state.flushed < mine {
                return Err(Error::deadline_exceeded(format!(
                    "{}: the disk took more than {FLUSH_WAIT:?} to take the events",
                    self.path.display()
                )));
            }
        }
        match &state.error {
            None => Ok(()),
            Some(error) => Err(error.clone().and(format_args!("; {} events were lost", state.n_lost))),
        }
    }
}

/// How long a flush waits for the disk.
const FLUSH_WAIT: Duration = Duration::from_secs(60);

impl Drop for Shared {
    fn drop(&mut self) {
        self.channel.state.lock().is_closing = true;
        self.channel.work.notify_one();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to write.
            let _ = thread.join();
        }
    }
}

impl WriterState {
    fn lose(&mut self, error: Error, n_events: u64) {
        if self.error.is_none() {
            tracing::warn!(target: "kolo::summary", "{error}; the training goes on without these summaries");
        }
        self.error.get_or_insert(error);
        self.n_lost += n_events;
    }
}

impl Channel {
    /// The writing thread.
    fn write_all(&self, mut out: Out, flush_every: Duration) {
        let mut state = self.state.lock();
        loop {
            while state.flushes == state.flushed && !state.is_closing && state.n_bytes < WRITE_AT {
                match state.since.and_then(|since| since.checked_add(flush_every)) {
                    Some(due) => {
                        if self.work.wait_until(&mut state, due).timed_out() {
                            break;
                        }
                    }
                    None => self.work.wait(&mut state),
                }
            }
            let (flushes, is_closing) = (state.flushes, state.is_closing);
            let events = std::mem::take(&mut state.queue);
            (state.n_bytes, state.since) = (0, None);
            let outcome = MutexGuard::unlocked(&mut state, || out.write(&events));
            if let Err(error) = outcome {
                state.lose(error, events.len() as u64);
            }
            state.flushed = flushes;
            self.progress.notify_all();
            if is_closing && state.queue.is_empty() {
                return;
            }
        }
    }
}

/// How many bytes are gathered before they are written.
const WRITE_AT: usize = 1 << 16;

/// An event file.
struct Out {
    path: PathBuf,
    file: File,
    /// How much of the file is whole records.
    length: u64,
}

impl Out {
    /// Appends events. If that fails, the file ends where it did.
    fn write(&mut self, events: &[Vec<u8>]) -> Result<()> {
        let mut records = Vec::new();
        events.iter().for_each(|event| record::append(&mut records, event));
        let written = self.file.write_all(&records);
        match written {
            Ok(()) => self.length += records.len() as u64,
            Err(_) => {
                // If this fails too, the next write will say so.
                let _ = self.file.set_len(self.length).and_then(|()| self.file.seek(SeekFrom::Start(self.length)));
            }
        }
        written.map_err(|reason| io_error(&self.path.display().to_string(), &reason))
    }
}

/// Makes `events.out.tfevents.<seconds>.<host><suffix>`; with a number at the end if there is one already.
fn create(dir: &Path, suffix: &str) -> Result<(PathBuf, File)> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "localhost",
        host => host,
    };
    let name = format!("events.out.tfevents.{:010}.{host}{suffix}", now().as_secs());
    for number in 0..10_000 {
        let path = dir.join(if number == 0 { name.clone() } else { format!("{name}.{number}") });
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(reason) if reason.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(reason) => return Err(io_error(&path.display().to_string(), &reason)),
        }
    }
    Err(Error::already_exists(format!("{}: too many event files of this second", dir.join(name).display())))
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Code;

    use super::*;

    /// A folder of its own for each test.
    struct TempDir(PathBuf);

    impl TempDir {
        fn new(name: &str) -> TempDir {
            TempDir(std::env::temp_dir().join(format!("kolo-events-{name}-{}", std::process::id())))
        }

        fn events(&self) -> Vec<Vec<Event>> {
            let mut paths: Vec<_> = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).collect();
            paths.sort();
            paths.iter().map(|path| read(path)).collect()
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn read(path: &Path) -> Vec<Event> {
        record::read(path).unwrap().map(|record| Event::decode(&record.unwrap()[..]).unwrap()).collect()
    }

    #[test]
    fn events_come_back_in_order_behind_the_version() {
        let dir = TempDir::new("order");
        let writer = FileWriter::new(&dir.0).unwrap();
        let name = writer.path().file_name().unwrap().to_str().unwrap().to_owned();
        assert!(name.starts_with("events.out.tfevents.1") && name.split('.').count() >= 5, "{name}");
        for step in 0..100 {
            writer.add_scalar("x", f64::from(step) / 2.0, step.into());
        }
        writer.add_session_log(SessionStatus::Checkpoint, "model.ckpt-7", 7);
        writer.close().unwrap();
        let [events] = &dir.events()[..] else { panic!("one file") };
        assert_eq!(events[0].what, Some(EventContent::FileVersion("brain.Event:2".into())));
        for (step, event) in events[1..101].iter().enumerate() {
            assert_eq!(event.step, step as i64);
            let value = SummaryValue::new("x", Content::SimpleValue(step as f32 / 2.0));
            assert_eq!(event.what, Some(EventContent::Summary(vec![value].into())));
        }
        assert!(events.windows(2).all(|pair| pair[0].wall_time <= pair[1].wall_time));
        let Some(EventContent::SessionLog(log)) = &events[101].what else { panic!("a log") };
        assert_eq!((log.status(), log.checkpoint_path.as_str()), (SessionStatus::Checkpoint, "model.ckpt-7"));
    }

    #[test]
    fn a_directory_has_one_writer_at_a_time() {
        let dir = TempDir::new("one");
        let first = FileWriter::new(&dir.0).unwrap();
        let second = FileWriter::new(dir.0.join(".")).unwrap();
        assert_eq!(first.path(), second.path());
        first.add_scalar("a", 1.0, 1);
        first.close().unwrap();
        second.add_scalar("b", 2.0, 2);
        drop(second);
        assert_eq!(dir.events().iter().map(Vec::len).collect::<Vec<_>>(), [3]);
        // All handles are gone: the next one begins a new file, even within the same second.
        FileWriter::new(&dir.0).unwrap().close().unwrap();
        assert_eq!(dir.events().len(), 2);
    }

    #[test]
    fn everything_is_in_the_file_after_a_flush() {
        let dir = TempDir::new("flush");
        let writer = FileWriter::new(&dir.0).unwrap();
        let g = kolo_ops::graph();
        g.constant(1.0f32);
        writer.add_graph(&g).unwrap();
        writer.add_histogram("h", &Tensor::from([1.0f32, 2.0]), 3).unwrap();
        writer.add_image("i", &Tensor::zeros(kolo_core::DType::U8, [1, 2, 2, 1]).unwrap(), 3).unwrap();
        writer.add_text("t", "hello", 3).unwrap();
        // A value of a kind that Kolo does not make is written whole.
        let sound = b"\x0a\x10\x0a\x01s\x32\x0b\x0d\0\0\x80\x3f\x10\x01\x22\x02ab".to_vec();
        writer.add_summary(&Tensor::string(sound.clone()), 4).unwrap();
        assert!(writer.add_histogram("h", &Tensor::from([f32::NAN]), 3).is_err());
        assert!(writer.add_summary(&Tensor::from("\u{ff}"), 3).is_err());
        writer.flush().unwrap();
        let events = read(writer.path());
        assert_eq!(events.len(), 6);
        let bytes = std::fs::read(writer.path()).unwrap();
        assert!(bytes.windows(sound.len()).any(|part| part == sound));
        writer.close().unwrap();
    }

    #[test]
    fn a_file_is_written_when_its_time_comes() {
        let dir = TempDir::new("time");
        let options = WriterOptions { flush_every: Duration::from_millis(1), ..WriterOptions::default() };
        let writer = FileWriter::with_options(&dir.0, options).unwrap();
        writer.add_scalar("x", 1.0, 1);
        let deadline = Instant::now() + Duration::from_secs(60);
        // The last record may be half there.
        let n_whole = || record::read(writer.path()).unwrap().filter(Result::is_ok).count();
        while n_whole() < 2 {
            assert!(Instant::now() < deadline, "the event was never written");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_disk_that_fails_costs_events_and_nothing_else() {
        let Ok(full) = OpenOptions::new().write(true).open("/dev/full") else { return };
        let channel = Arc::new(Channel::default());
        let out = Out { path: PathBuf::from("/dev/full"), file: full, length: 0 };
        let theirs = channel.clone();
        let thread = std::thread::spawn(move || theirs.write_all(out, Duration::from_secs(120)));
        let path = PathBuf::from("/dev/full");
        let shared = Arc::new(Shared { path, options: WriterOptions::default(), channel, thread: Some(thread) });
        let writer = FileWriter { shared };
        writer.add_scalar("x", 1.0, 1);
        let error = writer.flush().unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert!(error.message().starts_with("/dev/full: No space left"), "{error}");
        writer.add_scalar("x", 1.0, 2);
        let error = writer.close().unwrap_err();
        assert!(error.message().ends_with("; 2 events were lost"), "{error}");
    }

    #[test]
    fn a_slow_disk_holds_up_nobody_for_ever() {
        // Nobody takes events from this queue.
        let options =
            WriterOptions { max_queued_bytes: 10, max_wait: Duration::from_millis(1), ..WriterOptions::default() };
        let shared = Shared { path: PathBuf::from("slow"), options, channel: Arc::default(), thread: None };
        (0..4).for_each(|_| shared.push(vec![0; 8]));
        let state = shared.channel.state.lock();
        assert_eq!((state.queue.len(), state.n_lost), (2, 2));
        assert_eq!(state.error.as_ref().unwrap().code(), Code::DeadlineExceeded);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_an_error_at_once() {
        let dir = TempDir::new("file");
        std::fs::write(&dir.0, "a file").unwrap();
        assert!(FileWriter::new(dir.0.join("x")).is_err());
        std::fs::remove_file(&dir.0).unwrap();
    }
}
