//! The results of a sweep, the best run first.

use crate::Result;
use serde_json::{Value, json};

use super::record::{Plan, Run, State};
use super::{Args, flags};
use crate::cli::print;

/// Prints the results, and names the best run.
pub fn show(args: &Args, plan: &Plan, runs: &[Run]) -> Result<()> {
    let mut sorted: Vec<&Run> = runs.iter().collect();
    let place = |run: &Run| run.measure(args.best).unwrap_or(f64::INFINITY);
    sorted.sort_by(|a, b| {
        let rank = |run: &Run| (!run.is_good(), run.state == State::Failed);
        rank(a).cmp(&rank(b)).then(place(a).total_cmp(&place(b))).then(a.number.cmp(&b.number))
    });
    let best = sorted.first().copied().filter(|run| run.is_good() && run.measure(args.best).is_some());
    let command = best.map(|best| format!("kolo {}", flags::args(&plan.recipe, &plan.common, &best.point).join(" ")));
    if args.json {
        return print(json!({
            "event": "sweep-end", "best": best.map(|best| best.number), "by": args.best.word(), "command": command,
            "runs": sorted.iter().map(|run| run.to_json()).collect::<Vec<_>>(),
        }));
    }
    print(table(&sorted))?;
    if let (Some(best), Some(command)) = (best, command) {
        print(format_args!("Best by {}: run {} ({})", args.best.word(), best.number, best.flags()))?;
        print(format_args!("  {command}"))?;
    }
    for run in sorted.iter().filter(|run| run.state == State::Failed) {
        print(format_args!("Run {} failed: {}", run.number, run.error.as_deref().unwrap_or("for no stated reason")))?;
    }
    Ok(())
}

/// Columns as wide as what is in them.
fn table(runs: &[&Run]) -> String {
    let header = ["run", "flags", "state", "step", "final_cost", "test_loss", "test_accuracy", "seconds"];
    let row = |run: &&Run| {
        let of = |name: &str| run.result.as_ref().and_then(|result| result.get(name)).and_then(Value::as_f64);
        let number = |name: &str| of(name).map_or("-".to_owned(), |number| format!("{number:.4}"));
        let step = of("step").map_or("-".to_owned(), |step| format!("{step:.0}"));
        [
            run.number.to_string(),
            run.flags(),
            run.state.word().to_owned(),
            step,
            number("final_cost"),
            number("test_loss"),
            number("test_accuracy"),
            format!("{:.1}", run.took_s),
        ]
    };
    let rows: Vec<[String; 8]> = std::iter::once(header.map(str::to_owned)).chain(runs.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |row: &[String; 8]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}
