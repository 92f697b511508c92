//! The command line of a run. All of them are parsed before any is started.

use crate::{Error, Result};
use clap::{CommandFactory as _, FromArgMatches as _};

use super::space::Point;
use crate::cli::refusal::Given;
use crate::cli::{Cli, Command};

/// Flags that a sweep gives to its runs, or that a run of a sweep cannot have, and why.
const NOT_IN_A_RUN: &[(&[&str], &str)] = &[
    (&["json", "with-parent", "log-every"], "is what the sweep itself gives to every run; leave it out"),
    (&["checkpoint-dir", "resume", "logdir"], "would be one folder for all runs; those of a sweep are in --dir"),
    (
        &["ranks", "ps", "workers", "cluster", "task", "target"],
        "makes a run of several processes, and a run of a sweep is one: --parallel starts more at a time, --devices splits its batches",
    ),
];

/// An error that names the first run whose flags make no sense.
pub fn check(recipe: &str, common: &[String], points: &[Point]) -> Result<()> {
    points.iter().try_for_each(|point| {
        let args = args(recipe, common, point);
        parse(&args).map_err(|error| error.context(format_args!("kolo {}", args.join(" "))))
    })
}

/// The flags of one run.
pub fn args(recipe: &str, common: &[String], point: &Point) -> Vec<String> {
    let own = point.iter().map(|(flag, value)| format!("--{flag}={value}"));
    ["train".to_owned(), recipe.to_owned()].into_iter().chain(common.iter().cloned()).chain(own).collect()
}

fn parse(args: &[String]) -> Result<()> {
    let command = Cli::command();
    let matches = command.clone().try_get_matches_from(std::iter::once("kolo".to_owned()).chain(args.iter().cloned()));
    // What a person should read is in the first paragraph; the usage of another command would only confuse.
    let wrong = |error: clap::Error| {
        let text = error.to_string();
        let first = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        Error::invalid_argument(first.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let matches = matches.map_err(wrong)?;
    let given = Given::new(&command, &matches);
    for (flags, why) in NOT_IN_A_RUN {
        if let Some(flag) = flags.iter().find(|flag| given.has(flag)) {
            return Err(Error::invalid_argument(format!("--{flag} {why}")));
        }
    }
    if given.is_cluster() {
        return Err(Error::invalid_argument(
            "--strategy parameter-server makes a run of several processes, and a run of a sweep is one; take --strategy mirrored",
        ));
    }
    given.check()?;
    match Cli::from_arg_matches(&matches).map_err(wrong)?.command {
        Command::Train(args) => args.check(),
        _ => Err(Error::internal("a run of a sweep is a training")),
    }
}

/// `512M` or `2G`, in bytes.
pub fn parse_memory(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(['B', 'b']).trim_end_matches('i');
    let (digits, shift) = match digits.chars().last().map(|unit| unit.to_ascii_uppercase()) {
        Some('M') => (&digits[..digits.len() - 1], 20),
        Some('G') => (&digits[..digits.len() - 1], 30),
        Some('T') => (&digits[..digits.len() - 1], 40),
        _ => return Err(format!("'{text}' is not a size such as 512M or 2G")),
    };
    let number = digits.trim().parse::<f64>().ok().filter(|number| *number > 0.0 && number.is_finite());
    let bytes = number.map(|number| number * (1u64 << shift) as f64).filter(|bytes| *bytes < 1e18);
    bytes.map(|bytes| bytes as u64).ok_or_else(|| format!("'{text}' is not a size such as 512M or 2G"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_run_is_parsed_before_any_starts() {
        let point = |text: &str| {
            let (flag, value) = text.split_once('=').unwrap();
            vec![(flag.to_owned(), value.to_owned())]
        };
        let says = |recipe: &str, common: &[&str], points: &[&str], text: &str| {
            let common: Vec<String> = common.iter().map(|flag| (*flag).to_owned()).collect();
            let points: Vec<Point> = points.iter().map(|text| point(text)).collect();
            let error = check(recipe, &common, &points).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        check("linear", &["--epochs".to_owned(), "2".to_owned()], &[point("lr=0.1"), point("optimizer=adam")]).unwrap();
        says(
            "linear",
            &[],
            &["lr=0.1", "hidden=50"],
            "kolo train linear --hidden=50: unexpected argument '--hidden' found",
        );
        says("nothing", &[], &["lr=0.1"], "unrecognized subcommand 'nothing'");
        says("linear", &[], &["optimizer=best"], "invalid value 'best'");
        says("linear", &[], &["batch-size=0"], "--batch-size must be at least 1");
        says("linear", &["--json"], &["lr=1"], "--json is what the sweep itself gives");
        says("linear", &["--resume", "--checkpoint-dir", "x"], &["lr=1"], "those of a sweep are in --dir");
        says("linear", &[], &["ranks=2"], "a run of a sweep is one");
        says("linear", &["--strategy", "parameter-server"], &["lr=1"], "take --strategy mirrored");
        // What a training refuses, a sweep refuses.
        says("linear", &["--keep", "3"], &["lr=1"], "nothing is saved without --checkpoint-dir");
    }

    #[test]
    fn sizes_of_memory_have_units() {
        assert_eq!(parse_memory("512M"), Ok(512 << 20));
        assert_eq!(parse_memory("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse_memory("2gb"), Ok(2 << 30));
        for wrong in ["", "2", "G", "-1G", "0M", "many", "NaNG"] {
            assert!(parse_memory(wrong).is_err(), "{wrong}");
        }
    }
}
