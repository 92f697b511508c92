//! Processes of a cluster for tests: started with addresses of their own, listened to, and ended with their test. And
//! tests that need a GPU.
#![allow(clippy::unwrap_used, dead_code)] // Helpers of tests may fail as tests do, and no test uses all of them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Long enough for a machine that does much else; whatever takes longer hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Tests with processes run one after the other, so that they do not wait for each other's.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed has said so; the next one need not fail too.
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// An address of this machine that no other cluster uses. All of 127/8 is loopback on Linux, and nobody's outgoing
/// connections have their ports there, so a task that ends can be started again on its port.
fn host() -> String {
    static N: AtomicU32 = AtomicU32::new(1);
    let (pid, n) = (std::process::id(), N.fetch_add(1, Ordering::Relaxed));
    match cfg!(target_os = "linux") {
        true => format!("127.{}.{}.{}", 1 + pid / 250 % 250, 1 + pid % 250, 1 + n % 250),
        false => "127.0.0.1".to_owned(),
    }
}

/// The addresses of a cluster.
pub struct Spec {
    pub text: String,
    addresses: Vec<(String, Vec<String>)>,
}

impl Spec {
    /// So many tasks of each job, on ports that the system chose.
    pub fn new(jobs: &[(&str, usize)]) -> Spec {
        let host = host();
        let mut listeners = Vec::new();
        let mut addresses = Vec::new();
        for &(job, n) in jobs {
            let new: Vec<TcpListener> = (0..n).map(|_| TcpListener::bind((host.as_str(), 0)).unwrap()).collect();
            addresses.push((job.to_owned(), new.iter().map(|l| l.local_addr().unwrap().to_string()).collect()));
            listeners.extend(new);
        }
        Spec::of(addresses)
    }

    fn of(addresses: Vec<(String, Vec<String>)>) -> Spec {
        let jobs: Vec<String> = addresses.iter().map(|(job, all)| format!("{job}={}", all.join(","))).collect();
        Spec { text: jobs.join(";"), addresses }
    }

    /// The same with another address for one task.
    pub fn with(&self, job: &str, task: usize, address: &str) -> Spec {
        let mut addresses = self.addresses.clone();
        addresses.iter_mut().find(|(name, _)| name == job).unwrap().1[task] = address.to_owned();
        Spec::of(addresses)
    }

    pub fn address(&self, job: &str, task: usize) -> &str {
        &self.addresses.iter().find(|(name, _)| name == job).unwrap().1[task]
    }

    pub fn target(&self, job: &str, task: usize) -> String {
        format!("grpc://{}", self.address(job, task))
    }

    /// `kolo serve` for one task, not waited for.
    pub fn start(&self, job: &str, task: usize, flags: &[&str]) -> Process {
        let task_text = task.to_string();
        let mut args = vec!["serve", "--with-parent", "--cluster", &self.text, "--job", job, "--task", &task_text];
        if !flags.contains(&"--allow-dir") {
            args.extend(["--allow-dir", env!("CARGO_TARGET_TMPDIR")]);
        }
        args.extend(flags);
        Process::start(&format!("{job}:{task}"), &args)
    }

    /// The same, once it serves.
    pub fn serve(&self, job: &str, task: usize, flags: &[&str]) -> Process {
        let process = self.start(job, task, flags);
        process.wait_for("serving grpc://");
        process
    }
}

/// A line that a process wrote, and when it came.
#[derive(Clone, Debug)]
pub struct Line {
    pub at: Instant,
    pub text: String,
}

/// A process of the `kolo` command. It is killed when this is dropped.
pub struct Process {
    name: String,
    child: Child,
    lines: Arc<(Mutex<Vec<Line>>, Condvar)>,
    readers: [JoinHandle<()>; 2],
    pub started: Instant,
}

impl Process {
    pub fn start(name: &str, args: &[&str]) -> Process {
        Process::start_with(name, args, &[])
    }

    /// With these environment variables.
    pub fn start_with(name: &str, args: &[&str], environment: &[(&str, &str)]) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
        command.args(args).envs(environment.iter().copied());
        Process::spawn(name, command)
    }

    /// Any command.
    pub fn spawn(name: &str, mut command: Command) -> Process {
        command.env_remove("TF_CONFIG");
        let started = Instant::now();
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines: Arc<(Mutex<Vec<Line>>, Condvar)> = Arc::default();
        let stdout = collect(child.stdout.take().unwrap(), lines.clone());
        let stderr = collect(child.stderr.take().unwrap(), lines.clone());
        Process { name: name.to_owned(), child, lines, readers: [stdout, stderr], started }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has said so far.
    pub fn lines(&self) -> Vec<Line> {
        self.lines.0.lock().unwrap().clone()
    }

    pub fn text(&self) -> String {
        self.lines().into_iter().map(|line| line.text + "\n").collect()
    }

    /// Waits for a line that contains `part`.
    #[track_caller]
    pub fn wait_for(&self, part: &str) -> Line {
        self.wait_until(part, 0, |line| line.text.contains(part))
    }

    /// Waits for a line after the first `skip` ones that `is_it` says yes to.
    #[track_caller]
    pub fn wait_until(&self, what: &str, skip: usize, is_it: impl Fn(&Line) -> bool) -> Line {
        let deadline = Instant::now() + PATIENCE;
        let (lines, changed) = &*self.lines;
        let mut all = lines.lock().unwrap();
        loop {
            if let Some(line) = all.iter().skip(skip).find(|line| is_it(line)) {
                return line.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let said: String = all.iter().map(|line| line.text.clone() + "\n").collect();
                drop(all);
                panic!("{} did not say '{what}' in {PATIENCE:?}; it said:\n{said}", self.name);
            }
            all = changed.wait_timeout(all, left).unwrap().0;
        }
    }

    /// Waits until it has reported a step of training that `is_it` says yes to, after the first `skip` lines.
    #[track_caller]
    pub fn wait_for_step(&self, skip: usize, is_it: impl Fn(i64) -> bool) -> (i64, Line) {
        let line = self.wait_until("a step", skip, |line| step_of(&line.text).is_some_and(&is_it));
        (step_of(&line.text).unwrap(), line)
    }

    /// The global steps it has reported, in order.
    pub fn steps(&self) -> Vec<i64> {
        self.lines().iter().filter_map(|line| step_of(&line.text)).collect()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// `STOP`, `CONT`, `TERM`.
    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill").arg(format!("-{signal}")).arg(self.pid().to_string()).status().unwrap();
        assert!(sent.success());
    }

    /// Waits until it has ended.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.read_rest();
                return status;
            }
            assert!(Instant::now() < deadline, "{} did not end in {PATIENCE:?}; it said:\n{}", self.name, self.text());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until what it has said is here. What it has started may go on, and say more, without end.
    fn read_rest(&self) {
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.readers.iter().any(|reader| !reader.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Open file descriptors.
    pub fn n_descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    /// Memory in use, in kilobytes.
    pub fn resident_kb(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(from: impl Read + Send + 'static, lines: Arc<(Mutex<Vec<Line>>, Condvar)>) -> JoinHandle<()> {
    let read = move || {
        for text in BufReader::new(from).lines().map_while(std::io::Result::ok) {
            lines.0.lock().unwrap().push(Line { at: Instant::now(), text });
            lines.1.notify_all();
        }
    };
    std::thread::Builder::new().name("test-output".to_owned()).spawn(read).unwrap()
}

/// The global step of a line that reports one.
pub fn step_of(line: &str) -> Option<i64> {
    let (_, rest) = line.contains("\"event\":\"step\"").then(|| line.split_once("\"step\":"))??;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Runs the `kolo` command to its end: exit status, and what it wrote to both outputs.
pub fn kolo(args: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kolo")).args(args).env_remove("TF_CONFIG").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

/// A folder that is gone after the test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::remove_dir_all(&path).ok();
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// A small set of pictures in MNIST's format, so that a worker is at work soon.
pub fn write_pictures(dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    let mut random = 7u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for (split, n) in [("train", 400u32), ("t10k", 50)] {
        let mut images = vec![0, 0, 8, 3];
        images.extend([n, 28, 28].iter().flat_map(|x| x.to_be_bytes()));
        images.extend((0..n * 784).map(|_| next() as u8));
        let mut labels = vec![0, 0, 8, 1];
        labels.extend(n.to_be_bytes());
        labels.extend((0..n).map(|_| (next() % 10) as u8));
        std::fs::File::create(dir.join(format!("{split}-images-idx3-ubyte"))).unwrap().write_all(&images).unwrap();
        std::fs::File::create(dir.join(format!("{split}-labels-idx1-ubyte"))).unwrap().write_all(&labels).unwrap();
    }
}

/// The body of a test, unless there is no GPU. A skipped test says so where the harness does not hide it.
pub fn on_gpu(test: impl FnOnce()) {
    static SKIPPED: AtomicU32 = AtomicU32::new(0);
    match kolo::cuda::discover(None).absent {
        Some(why) => {
            let n = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
            let name = std::thread::current().name().unwrap_or("a test").to_owned();
            let _ = writeln!(std::io::stderr(), "skipped ({n} GPU tests so far): {name}: {why}");
        }
        None => test(),
    }
}
