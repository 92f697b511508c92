//! The folder of a sweep: what it is to do, and a file for each run with what came out. Each file is replaced as a whole, so that a sweep
//! that is killed leaves records that can be read.

use std::path::{Path, PathBuf};

use crate::{Error, Result};
use serde_json::{Value, json};

use super::Measure;
use super::space::Point;

/// What a sweep is to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub recipe: String,
    pub common: Vec<String>,
    pub points: Vec<Point>,
    pub halving: Option<u64>,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not come to an end, or to a rung.
    Waiting,
    /// It has reached a rung of --halving, and may go on.
    Paused,
    /// It has come to its end.
    Done,
    /// Others were better at a rung.
    Halved,
    /// It has failed.
    Failed,
}

const STATES: [(State, &str); 5] = [
    (State::Waiting, "waiting"),
    (State::Paused, "paused"),
    (State::Done, "done"),
    (State::Halved, "halved"),
    (State::Failed, "failed"),
];

impl State {
    pub fn word(self) -> &'static str {
        STATES.iter().find(|(state, _)| *state == self).map_or("", |(_, word)| word)
    }
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub number: usize,
    pub point: Point,
    pub state: State,
    /// The mean loss before each rung that it has reached, by the rung's step.
    pub scores: Vec<(u64, f64)>,
    /// What it said last, or at its end.
    pub result: Option<Value>,
    /// Why it failed.
    pub error: Option<String>,
    /// Seconds, over all its processes.
    pub took_s: f64,
}

impl Run {
    /// Whether it has a result that can be the best.
    pub fn is_good(&self) -> bool {
        self.state == State::Done
    }

    /// The smaller, the better.
    pub fn measure(&self, by: Measure) -> Option<f64> {
        self.result.as_ref().filter(|_| self.state != State::Failed).and_then(|result| by.of(result))
    }

    pub fn score(&self, rung: u64) -> Option<f64> {
        self.scores.iter().find(|(step, _)| *step == rung).map(|(_, score)| *score)
    }

    /// As a person writes it: `lr=0.1 optimizer=adam`.
    pub fn flags(&self) -> String {
        self.point.iter().map(|(flag, value)| format!("{flag}={value}")).collect::<Vec<_>>().join(" ")
    }

    pub fn to_json(&self) -> Value {
        let flags: serde_json::Map<String, Value> =
            self.point.iter().map(|(flag, value)| (flag.clone(), json!(value))).collect();
        json!({
            "run": self.number, "flags": flags, "state": self.state.word(), "scores": self.scores, "result": self.result,
            "error": self.error, "took_s": self.took_s,
        })
    }

    /// Takes over what a record says of this run.
    fn read(&mut self, value: &Value) -> Option<()> {
        let word = value.get("state")?.as_str()?;
        self.state = STATES.iter().find(|(_, name)| *name == word)?.0;
        let score = |pair: &Value| Some((pair.get(0)?.as_u64()?, pair.get(1)?.as_f64()?));
        self.scores = value.get("scores")?.as_array()?.iter().map(score).collect::<Option<Vec<_>>>()?;
        self.result = value.get("result").filter(|result| !result.is_null()).cloned();
        self.error = value.get("error").and_then(Value::as_str).map(str::to_owned);
        self.took_s = value.get("took_s")?.as_f64()?;
        Some(())
    }
}

/// The folder.
pub struct Folder {
    dir: PathBuf,
    runs: Vec<Run>,
}

impl Folder {
    /// Makes the folder, or goes on with it. An error if it holds another sweep, or this one and nobody said to go on.
    pub fn open(dir: &Path, plan: &Plan, resume: bool) -> Result<Folder> {
        let point = |(i, point): (usize, &Point)| Run {
            number: i + 1,
            point: point.clone(),
            state: State::Waiting,
            scores: Vec::new(),
            result: None,
            error: None,
            took_s: 0.0,
        };
        let mut folder = Folder { dir: dir.to_owned(), runs: plan.points.iter().enumerate().map(point).collect() };
        let (path, written) = (dir.join("sweep.json"), plan_json(plan));
        match read(&path)? {
            None => {
                std::fs::create_dir_all(dir).map_err(|error| cannot("make", dir, &error))?;
                write(&path, &written)?;
            }
            Some(_) if !resume => {
                return Err(Error::already_exists(format!(
                    "{} holds a sweep already; --resume goes on with it, --dir names another folder",
                    dir.display()
                )));
            }
            Some(found) if found != written => {
                return Err(Error::failed_precondition(format!(
                    "{} holds another sweep ({}); give the flags with which that was started, or another --dir",
                    dir.display(),
                    difference(&found, &written)
                )));
            }
            Some(_) => folder.read_runs()?,
        }
        Ok(folder)
    }

    fn read_runs(&mut self) -> Result<()> {
        for i in 0..self.runs.len() {
            let path = self.path(i, "json");
            let Some(value) = read(&path)? else { continue };
            let run = &mut self.runs[i];
            run.read(&value).ok_or_else(|| {
                Error::data_loss(format!(
                    "{} is no record of a run; remove it, and the run is made again",
                    path.display()
                ))
            })?;
            // It may have failed for a reason that is gone.
            if run.state == State::Failed {
                (run.state, run.error) = (if run.scores.is_empty() { State::Waiting } else { State::Paused }, None);
            }
        }
        Ok(())
    }

    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Changes what is known of run `i`, here and in its file.
    pub fn update(&mut self, i: usize, change: impl FnOnce(&mut Run)) -> Result<()> {
        change(&mut self.runs[i]);
        write(&self.path(i, "json"), &self.runs[i].to_json())
    }

    /// A file of run `i`.
    pub fn path(&self, i: usize, ending: &str) -> PathBuf {
        self.dir.join(format!("run-{:04}.{ending}", i + 1))
    }
}

fn plan_json(plan: &Plan) -> Value {
    json!({ "recipe": plan.recipe, "common": plan.common, "points": plan.points, "halving": plan.halving })
}

/// What differs first between two sweeps.
fn difference(found: &Value, wanted: &Value) -> String {
    let differs = |name: &&str| found.get(name) != wanted.get(name);
    match ["recipe", "common", "halving"].iter().find(|name| differs(name)) {
        Some(name) => format!("its {name} is {}, not {}", found[*name], wanted[*name]),
        None => "it has other points".to_owned(),
    }
}

fn read(path: &Path) -> Result<Option<Value>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(cannot("read", path, &error)),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| {
        Error::data_loss(format!("{} is damaged ({error}); remove it, or take another --dir", path.display()))
    })
}

fn write(path: &Path, value: &Value) -> Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, format!("{value:#}\n"))
        .and_then(|()| std::fs::rename(&new, path))
        .map_err(|error| cannot("write", path, &error))
}

fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::failed_precondition(format!("cannot {what} {}: {error}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn plan(rates: &[&str]) -> Plan {
        let points = rates.iter().map(|rate| vec![("lr".to_owned(), (*rate).to_owned())]).collect();
        Plan { recipe: "linear".to_owned(), common: Vec::new(), points, halving: Some(10) }
    }

    #[test]
    fn a_folder_remembers_what_was_done_and_knows_its_sweep() {
        let dir = std::env::temp_dir().join(format!("kolo-sweep-record-{}", std::process::id()));
        std::fs::remove_dir_all(&dir).ok();
        let mut folder = Folder::open(&dir, &plan(&["0.1", "0.2", "0.3"]), false).unwrap();
        let result = json!({ "test_loss": 0.5, "test_accuracy": 0.75 });
        folder
            .update(0, |run| (run.state, run.result, run.scores) = (State::Done, Some(result), vec![(10, 0.25)]))
            .unwrap();
        folder.update(1, |run| (run.state, run.error) = (State::Failed, Some("why".to_owned()))).unwrap();
        let again = Folder::open(&dir, &plan(&["0.1", "0.2", "0.3"]), true).unwrap();
        assert_eq!(again.runs()[0], folder.runs()[0]);
        assert_eq!((again.runs()[0].measure(Measure::TestLoss), again.runs()[0].score(10)), (Some(0.5), Some(0.25)));
        assert_eq!(again.runs()[0].measure(Measure::TestAccuracy), Some(-0.75));
        // A run that failed is tried again.
        assert_eq!((again.runs()[1].state, &again.runs()[1].error), (State::Waiting, &None));
        let says = |plan: &Plan, resume: bool, text: &str| {
            let error = Folder::open(&dir, plan, resume).err().unwrap().to_string();
            assert!(error.contains(text), "{error}");
        };
        says(&plan(&["0.1", "0.2", "0.3"]), false, "--resume goes on with it");
        says(&plan(&["0.1"]), true, "it has other points");
        says(&Plan { halving: None, ..plan(&["0.1", "0.2", "0.3"]) }, true, "its halving is 10, not null");
        std::fs::write(dir.join("run-0002.json"), "{}").unwrap();
        says(&plan(&["0.1", "0.2", "0.3"]), true, "run-0002.json is no record of a run");
        std::fs::write(dir.join("run-0002.json"), "{").unwrap();
        says(&plan(&["0.1", "0.2", "0.3"]), true, "run-0002.json is damaged");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
