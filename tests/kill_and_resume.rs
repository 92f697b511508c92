//! A trainer that is killed at any moment, as often as one likes, ends with the very weights of one that was left alone.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const KILLS: usize = 50;

/// Pseudo-random numbers, the same in every run of the test.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// A folder that is gone after the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::remove_dir_all(&path).ok();
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// A small set of pictures in MNIST's format, so that a process is at work within milliseconds.
fn write_pictures(dir: &Path) {
    let mut random = Random(7);
    for (split, n) in [("train", 400u32), ("t10k", 50)] {
        let mut images = vec![0, 0, 8, 3];
        images.extend([n, 28, 28].iter().flat_map(|x| x.to_be_bytes()));
        images.extend((0..n * 784).map(|_| random.next() as u8));
        let mut labels = vec![0, 0, 8, 1];
        labels.extend(n.to_be_bytes());
        labels.extend((0..n).map(|_| (random.next() % 10) as u8));
        std::fs::File::create(dir.join(format!("{split}-images-idx3-ubyte"))).unwrap().write_all(&images).unwrap();
        std::fs::File::create(dir.join(format!("{split}-labels-idx1-ubyte"))).unwrap().write_all(&labels).unwrap();
    }
}

fn trainer(data: &Path, checkpoints: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(["train", "mnist", "--json", "--batch-size", "20", "--epochs", "2", "--seed", "3", "--resume"]);
    command
        .args(["--checkpoint-every", "5", "--keep", "3", "--data"])
        .arg(data)
        .arg("--checkpoint-dir")
        .arg(checkpoints);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The checksum of the weights in the last line, if the process came so far.
fn weights(output: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(output);
    let end = text.lines().find(|line| line.contains("\"event\":\"end\""))?;
    let (_, rest) = end.split_once("\"weights\":\"")?;
    rest.split('"').next().map(str::to_owned)
}

#[test]
fn fifty_kills_change_nothing() {
    let folder = Folder::new("kill-and-resume");
    let data = folder.0.join("data");
    std::fs::create_dir_all(&data).unwrap();
    write_pictures(&data);

    let began = Instant::now();
    let undisturbed = trainer(&data, &folder.0.join("undisturbed")).output().unwrap();
    let one_life = began.elapsed();
    let expected = weights(&undisturbed.stdout)
        .unwrap_or_else(|| panic!("training failed: {}", String::from_utf8_lossy(&undisturbed.stderr)));

    let mut random = Random(42);
    let (mut n_killed, mut n_finished, mut n_resumed) = (0, 0, 0);
    let deadline = Instant::now() + Duration::from_secs(300);
    // Jobs one after the other, each killed until it happens to come through.
    while n_killed < KILLS {
        let checkpoints = folder.0.join(format!("job-{n_finished}"));
        loop {
            assert!(Instant::now() < deadline, "{n_killed} kills, {n_finished} jobs finished in five minutes");
            let mut child = trainer(&data, &checkpoints).spawn().unwrap();
            let life = one_life.mul_f64(random.next() as f64 / u64::MAX as f64);
            std::thread::sleep(life);
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            n_resumed += usize::from(String::from_utf8_lossy(&output.stdout).contains("\"event\":\"resumed\""));
            if let Some(found) = weights(&output.stdout) {
                assert_eq!(found, expected, "job {n_finished} after {n_killed} kills");
                n_finished += 1;
                break;
            }
            let errors = String::from_utf8_lossy(&output.stderr);
            // A kill between a checkpoint and the file that lists it leaves a warning in the next life's log, which is no failure.
            let has_failed = output.status.success() || errors.lines().any(|line| line.starts_with("kolo: "));
            assert!(!has_failed, "the trainer failed by itself: {errors}");
            n_killed += 1;
        }
    }
    assert!(n_finished > 0 && n_resumed > 0, "{n_finished} jobs finished, {n_resumed} lives resumed");
    // What is left of the last job can always be finished.
    let last = trainer(&data, &folder.0.join(format!("job-{n_finished}"))).output().unwrap();
    assert_eq!(weights(&last.stdout), Some(expected), "{}", String::from_utf8_lossy(&last.stderr));
}
