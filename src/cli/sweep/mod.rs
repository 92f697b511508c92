//! `kolo sweep`: many trainings of one recipe, with other flags each, as a queue of processes under limits.
//!
//! ```text
//! space.rs   which runs there are: a grid, or points at random
//! flags.rs   a run's command line, checked before anything starts
//! queue.rs   starts runs, watches them, ends those that are hopeless or take too much memory
//! halving.rs which runs go on after a rung
//! record.rs  the folder with a file for each run, by which a sweep is resumed
//! table.rs   the results
//! ```

mod flags;
mod halving;
mod queue;
mod record;
mod space;
mod table;

use std::path::PathBuf;

use crate::{Error, Result};
use clap::ValueEnum;

use self::space::{Axis, RandomAxis};
use super::print;

/// Flags of `kolo sweep`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kolo sweep mnist --grid lr=0.1,0.01 --grid optimizer=sgd,adam --parallel 2 -- --epochs 1
  kolo sweep linear --random 20 --range lr=log:1e-4..1 --halving 50
  kolo sweep mnist --grid lr=0.1,0.01 --dir sweep --resume           goes on with what is missing")]
pub struct Args {
    /// Train this recipe: see `kolo train --help`
    recipe: String,
    /// Try each of these values of a flag of the recipe; several grids are combined
    #[arg(long, value_name = "FLAG=VALUE,VALUE", value_parser = space::parse_grid)]
    grid: Vec<Axis>,
    /// Try this many points at random: of --range, and of each --grid one value
    #[arg(long, value_name = "N")]
    random: Option<usize>,
    /// Draw a flag's value from this range: whole numbers if both ends are; evenly over magnitudes with log:
    #[arg(long, value_name = "FLAG=[log:]LOW..HIGH", value_parser = space::parse_range, requires = "random")]
    range: Vec<RandomAxis>,
    /// Seed the points of --random
    #[arg(long, default_value_t = 1, value_name = "N", requires = "random")]
    seed: u64,
    /// Run this many trainings at a time
    #[arg(long, default_value_t = 1, value_name = "N")]
    parallel: usize,
    /// Bind each run to this many cores of its own [default: an equal share of all]
    #[arg(long, value_name = "N")]
    cores: Option<usize>,
    /// End a run that needs more memory than this, such as 2G, and start none while less is available [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = flags::parse_memory)]
    memory: Option<u64>,
    /// Stop the worse half of the runs after this many steps, the worse half of the others after twice as many, and so on
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u64).range(1..))]
    halving: Option<u64>,
    /// Name the best run by this result
    #[arg(long, value_enum, default_value_t = Measure::TestLoss, value_name = "RESULT")]
    best: Measure,
    /// Keep a record, a log and, with --halving, checkpoints of each run in this folder
    #[arg(long, default_value = "sweep", value_name = "DIR")]
    dir: PathBuf,
    /// Go on with the sweep in --dir: runs that are done are not repeated
    #[arg(long)]
    resume: bool,
    /// Print one JSON object for each run, and the results at the end
    #[arg(long)]
    json: bool,
    /// Give these flags to every run
    #[arg(last = true, value_name = "FLAGS")]
    common: Vec<String>,
}

/// What runs are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Measure {
    /// The loss over the test data; the last step's for recipes without
    TestLoss,
    /// The accuracy over the test data
    TestAccuracy,
    /// The loss of the last step
    FinalCost,
}

impl Measure {
    /// The result of a run, the smaller the better.
    fn of(self, end: &serde_json::Value) -> Option<f64> {
        let number = |name: &str| end.get(name).and_then(serde_json::Value::as_f64).filter(|number| number.is_finite());
        match self {
            Measure::TestLoss => number("test_loss").or_else(|| number("final_cost")),
            Measure::TestAccuracy => number("test_accuracy").map(|accuracy| -accuracy),
            Measure::FinalCost => number("final_cost"),
        }
    }

    fn word(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Runs all trainings that are missing, and prints the results. A run that fails is named, and does not end the others.
pub fn run(args: &Args) -> Result<()> {
    let points = match args.random {
        Some(n) => space::random(&args.grid, &args.range, n, args.seed)?,
        None => space::grid(&args.grid)?,
    };
    flags::check(&args.recipe, &args.common, &points)?;
    let limits = queue::Limits::new(args.parallel, args.cores, args.memory)?;
    let plan = record::Plan { recipe: args.recipe.clone(), common: args.common.clone(), points, halving: args.halving };
    let mut folder = record::Folder::open(&args.dir, &plan, args.resume)?;
    let was_stopped = queue::Queue::new(args, &plan, limits).run(&mut folder)?;
    table::show(args, &plan, folder.runs())?;
    if was_stopped {
        let said = "stopped; the same command with --resume goes on with what is missing";
        return if args.json { print(serde_json::json!({ "event": "stopped", "text": said })) } else { print(said) };
    }
    match folder.runs().iter().any(record::Run::is_good) {
        true => Ok(()),
        false => Err(Error::aborted("no run has ended well; their logs are in the folder of the sweep")),
    }
}
