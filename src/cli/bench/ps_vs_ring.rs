//! `ps-vs-ring`: the MNIST recipe by a parameter server and by ranks, on as many processes and the same samples, as a user starts it.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::measure::{Better, Report, median};
use crate::cli::print;
use crate::{Error, Result};

/// Samples that a process takes in a step.
const BATCH: usize = 100;

/// Steps that say how long one takes.
const FIRST_STEPS: usize = 20;

/// A training that takes longer has failed.
const MOST_TIME: Duration = Duration::from_secs(900);

/// How a training is divided among processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    OneProcess,
    Ranks,
    ServerSync,
    ServerAsync,
}

impl Way {
    const ALL: [Way; 4] = [Way::OneProcess, Way::Ranks, Way::ServerSync, Way::ServerAsync];

    fn name(self) -> &'static str {
        match self {
            Way::OneProcess => "one process",
            Way::Ranks => "ranks",
            Way::ServerSync => "server, sync",
            Way::ServerAsync => "server, async",
        }
    }

    fn case(self) -> &'static str {
        match self {
            Way::OneProcess => "one-process",
            Way::Ranks => "ranks",
            Way::ServerSync => "ps-sync",
            Way::ServerAsync => "ps-async",
        }
    }

    /// Flags of `kolo train mnist` for `n` processes, and samples of a step.
    fn flags(self, n: usize) -> (Vec<String>, usize) {
        let count = n.to_string();
        let flags: Vec<&str> = match self {
            Way::OneProcess => vec![],
            Way::Ranks => vec!["--ranks", &count],
            Way::ServerSync => vec!["--ps", "1", "--workers", &count, "--sync"],
            Way::ServerAsync => vec!["--ps", "1", "--workers", &count, "--async"],
        };
        // The batch is all ranks' together, and one worker's. A step without synchronisation is one worker's.
        let (batch, samples) = match self {
            Way::OneProcess | Way::Ranks => (n * BATCH, n * BATCH),
            Way::ServerSync => (BATCH, n * BATCH),
            Way::ServerAsync => (BATCH, BATCH),
        };
        let batch = batch.to_string();
        let all = flags.into_iter().chain(["--batch-size", &batch]);
        (all.map(str::to_owned).collect(), samples)
    }
}

/// What one way gave.
#[derive(Clone, Debug)]
struct Found {
    way: Way,
    /// Samples in a second, of each run.
    rates: Vec<f64>,
    /// On the test set, after the last run.
    accuracy: Option<f64>,
}

pub fn run(report: &Report, n: Option<usize>) -> Result<()> {
    let n = n.unwrap_or(2);
    if n < 2 {
        return Err(Error::invalid_argument("ps-vs-ring compares ways for several processes: --ranks is at least 2"));
    }
    let n_runs = if report.budget() < Duration::from_secs(1) { 1 } else { 3 };
    let (rate, _) = train(Way::OneProcess, n, FIRST_STEPS * n * BATCH)?;
    // As many samples in all ways: those of the measured time of one process, and whole steps of each.
    let step = n * BATCH;
    let n_steps = ((rate * report.budget().as_secs_f64()) as usize / step).clamp(FIRST_STEPS, 1_000_000);
    let mut found = Vec::new();
    for way in Way::ALL {
        let (mut rates, mut accuracy) = (Vec::new(), None);
        for _ in 0..n_runs {
            let (rate, tested) = train(way, n, n_steps * step)?;
            rates.push(rate);
            accuracy = tested;
        }
        if report.is_json() {
            report.print("ps-vs-ring", way.case(), "samples/s", Better::Higher, &rates)?;
        }
        found.push(Found { way, rates, accuracy });
    }
    if report.is_json() {
        return Ok(());
    }
    print(format_args!("MNIST, {n} processes on this machine, {} samples in each of {n_runs} runs:", n_steps * step))?;
    table(&found).iter().try_for_each(print)?;
    print(advice(&found))
}

/// The table, line by line.
fn table(found: &[Found]) -> Vec<String> {
    let one = found.iter().find(|one| one.way == Way::OneProcess).map_or(f64::NAN, |one| median(&one.rates));
    let mut lines = vec![format!("{:14} {:>10} {:>15} {:>14}", "", "samples/s", "of one process", "test accuracy")];
    lines.extend(found.iter().map(|Found { way, rates, accuracy }| {
        let rate = median(rates);
        let accuracy = accuracy.map_or_else(|| "-".to_owned(), |share| format!("{:.2}%", share * 100.0));
        format!("{:14} {rate:10.0} {:14.2}x {accuracy:>14}", way.name(), rate / one)
    }));
    lines
}

/// What to choose.
fn advice(found: &[Found]) -> String {
    let rate = |way| found.iter().find(|one| one.way == way).map_or(f64::NAN, |one| median(&one.rates));
    let [one, ranks, sync, unsynchronised] = Way::ALL.map(rate);
    let others = "A server without synchronisation is for workers that come and go or differ in speed, and for embeddings that are too \
                  large for each of them; its weights differ from run to run.";
    let first = if one >= ranks.max(sync) {
        "This model is too small to gain from several processes here: take one, with all cores."
    } else if ranks >= sync {
        "Take ranks (--ranks): of the ways with the same updates as one process they are the fastest here."
    } else {
        "A synchronous server (--ps 1 --workers N --sync) is the fastest here of the ways that update with all samples of a step; only \
         ranks give the same bits every time."
    };
    format!(
        "{first} Ranks are {:.1} times as fast as a synchronous server, and {:.1} times as fast as one without synchronisation. {others}",
        ranks / sync,
        ranks / unsynchronised
    )
}

/// Trains on so many samples. Samples in a second, and the accuracy of the model.
fn train(way: Way, n: usize, n_samples: usize) -> Result<(f64, Option<f64>)> {
    let (flags, samples) = way.flags(n);
    let program = std::env::current_exe().map_err(|error| Error::internal(error.to_string()))?;
    let mut command = Command::new(program);
    command.args(["train", "mnist", "--json", "--log-every", "1000000000", "--max-steps"]);
    command.arg((n_samples / samples).to_string()).args(&flags).stdin(Stdio::null()).stdout(Stdio::piped());
    let about = || format!("kolo train mnist {}", flags.join(" "));
    let unavailable = |error: std::io::Error| Error::unavailable(format!("{}: {error}", about()));
    let mut child = Ended(command.spawn().map_err(unavailable)?);
    let out = child.0.stdout.take().ok_or_else(|| Error::internal("a pipe that was asked for is not there"))?;
    let (sender, lines) = mpsc::channel();
    let read = move || {
        for line in BufReader::new(out).lines().map_while(std::io::Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("training-output".to_owned()).spawn(read).map_err(unavailable)?;
    let (began, mut end) = (Instant::now(), None);
    loop {
        match lines.recv_timeout(MOST_TIME.saturating_sub(began.elapsed())) {
            Ok(line) => end = end_of(&line).or(end),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                return Err(Error::deadline_exceeded(format!("{} has not ended after {MOST_TIME:?}", about())));
            }
        }
    }
    // Its output has ended, and so does it.
    let status = child.0.wait().map_err(unavailable)?;
    match end {
        Some(end) if status.success() => Ok((end.n_steps * samples as f64 / end.seconds, end.accuracy)),
        _ => Err(Error::aborted(format!("{} ended with {status} and without a result", about()))),
    }
}

/// A process that ends with this.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The end of a training.
#[derive(Debug, PartialEq)]
struct End {
    n_steps: f64,
    seconds: f64,
    accuracy: Option<f64>,
}

/// What a line says of the end of a training, if it does; of workers, the first one's.
fn end_of(line: &str) -> Option<End> {
    let value: Value = serde_json::from_str(line).ok()?;
    let is_first = value.get("task").is_none_or(|task| task.as_u64() == Some(0));
    if value.get("event")?.as_str() != Some("end") || !is_first {
        return None;
    }
    let number = |name: &str| value.get(name).and_then(Value::as_f64);
    Some(End { n_steps: number("step")?, seconds: number("train_time_s")?, accuracy: number("test_accuracy") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_worker_says_how_a_training_ended() {
        let line = r#"{"event":"end","step":400,"task":0,"train_time_s":2.5,"test_accuracy":0.95}"#;
        assert_eq!(end_of(line), Some(End { n_steps: 400.0, seconds: 2.5, accuracy: Some(0.95) }));
        assert_eq!(end_of(&line.replace("\"task\":0", "\"task\":1")), None);
        assert_eq!(end_of(&line.replace("\"task\":0,", "")).map(|end| end.n_steps), Some(400.0));
        assert_eq!(end_of(r#"{"event":"begin","step":0}"#), None);
        assert_eq!(end_of("[ps 0] serving"), None);
    }

    #[test]
    fn all_ways_take_the_same_samples_in_a_step_of_all_processes() {
        let flags = |way: Way| {
            let (flags, samples) = way.flags(3);
            (flags.join(" "), samples)
        };
        assert_eq!(flags(Way::Ranks), ("--ranks 3 --batch-size 300".to_owned(), 300));
        assert_eq!(flags(Way::ServerSync), ("--ps 1 --workers 3 --sync --batch-size 100".to_owned(), 300));
        assert_eq!(flags(Way::ServerAsync), ("--ps 1 --workers 3 --async --batch-size 100".to_owned(), 100));
    }

    #[test]
    fn the_advice_is_that_of_the_figures() {
        let found = |rates: [f64; 4]| -> Vec<Found> {
            let found = |(way, rate)| Found { way, rates: vec![rate], accuracy: Some(0.5) };
            Way::ALL.into_iter().zip(rates).map(found).collect()
        };
        let ranks = advice(&found([100.0, 180.0, 60.0, 90.0]));
        assert!(
            ranks.starts_with("Take ranks") && ranks.contains("3.0 times") && ranks.contains("2.0 times"),
            "{ranks}"
        );
        assert!(advice(&found([200.0, 180.0, 60.0, 90.0])).starts_with("This model is too small"));
        assert!(advice(&found([100.0, 180.0, 190.0, 90.0])).starts_with("A synchronous server"));
        let table = table(&found([100.0, 180.0, 60.0, 90.0]));
        assert!(table.len() == 5 && table[2].contains("1.80x") && table[2].contains("50.00%"), "{table:?}");
    }
}
