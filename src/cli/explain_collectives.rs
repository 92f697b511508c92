//! `kolo explain collectives`: the table of costs, which of its numbers were measured, and the algorithms that it makes groups choose.

use kolo_core::DType;
use kolo_runtime::collective::{Choice, CollectiveKind, CostTable, Layout, ReduceOp, Root};
use serde_json::json;

use crate::parallel::{cost_file, read_costs};
use crate::{Error, Result};

use super::print;

/// Flags of `kolo explain collectives`.
#[derive(clap::Args)]
pub struct Args {
    /// Show what so many ranks would take
    #[arg(long, value_name = "N", default_value_t = 4)]
    ranks: usize,
    /// They are on so many hosts, as many on each, one host after the other
    #[arg(long, value_name = "N", default_value_t = 1)]
    hosts: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const SIZES: [(usize, &str); 6] = [
    (1 << 10, "1 KB"),
    (16 << 10, "16 KB"),
    (256 << 10, "256 KB"),
    (1 << 20, "1 MB"),
    (16 << 20, "16 MB"),
    (100 << 20, "100 MB"),
];

const KINDS: [CollectiveKind; 4] = [
    CollectiveKind::AllReduce(ReduceOp::Sum),
    CollectiveKind::ReduceScatter(ReduceOp::Sum),
    CollectiveKind::AllGather,
    CollectiveKind::Broadcast(Root(0)),
];

pub fn run(args: &Args) -> Result<()> {
    let &Args { ranks, hosts, json } = args;
    if ranks == 0 || hosts == 0 || !ranks.is_multiple_of(hosts) {
        return Err(Error::invalid_argument(format!("--ranks {ranks} cannot be divided among --hosts {hosts}")));
    }
    let path = cost_file(&|name| std::env::var(name).ok());
    let found = path.as_deref().map(read_costs).transpose()?.flatten();
    let table = found.clone().unwrap_or_default();
    let here = ranks / hosts;
    let branches = Layout { n_hosts: hosts, most_ranks: here, is_even: true, is_branches: here.is_power_of_two() };
    let choice = Choice {
        n_ranks: ranks,
        layout: (hosts > 1).then_some(branches),
        shares_memory: here > 1,
        costs: table.costs(),
        wanted: None,
        deterministic: true,
    };
    if json {
        let costs: Vec<_> = table
            .rows()
            .map(|(name, value, _, _, is_measured)| json!({ "name": name, "value": value, "measured": is_measured }))
            .collect();
        let choices: Vec<_> = chosen(&choice)
            .map(|(kind, n_bytes, algorithm, seconds)| {
                json!({ "collective": kind.name(), "bytes": n_bytes, "algorithm": algorithm, "us": seconds * 1e6 })
            })
            .collect();
        let file = path.filter(|_| found.is_some());
        return print(json!({ "ranks": ranks, "hosts": hosts, "file": file, "costs": costs, "choices": choices }));
    }
    match (&found, &path) {
        (Some(_), Some(path)) => print(format_args!("costs of collectives, measured ones from {}", path.display()))?,
        _ => print("costs of collectives; none was measured, which `kolo bench collectives --calibrate` does")?,
    }
    print_table(&table)?;
    let on = if hosts == 1 { "one host".to_owned() } else { format!("{hosts} hosts") };
    print(format_args!("\n{ranks} ranks on {on} that send messages (float, deterministic) take"))?;
    for kind in KINDS {
        print(kind.name())?;
        for (_, n_bytes, algorithm, seconds) in chosen(&choice).filter(|(of, ..)| *of == kind) {
            let size = SIZES.iter().find(|(n, _)| *n == n_bytes).map_or("", |(_, name)| name);
            print(format_args!("  {size:>7}  {algorithm:17} about {:.1} us", seconds * 1e6))?;
        }
    }
    match hosts {
        1 => print(
            "ranks of one host that were started by `kolo train --ranks` share memory, where there is one way only",
        ),
        _ => Ok(()),
    }
}

/// Each kind and size, with the algorithm for it and how long that takes.
fn chosen(choice: &Choice<'_>) -> impl Iterator<Item = (CollectiveKind, usize, &'static str, f64)> {
    KINDS.into_iter().flat_map(move |kind| {
        SIZES.into_iter().map(move |(n_bytes, _)| {
            let algorithm = choice.choose(kind, Some(DType::F32), n_bytes);
            let seconds = choice.costs.estimate(algorithm, kind, n_bytes, choice.n_ranks, choice.layout.as_ref());
            (kind, n_bytes, algorithm.name(), seconds)
        })
    })
}

/// The numbers, one on each line.
pub fn print_table(table: &CostTable) -> Result<()> {
    for (name, value, unit, what, is_measured) in table.rows() {
        let value = if value < 1e5 { format!("{value:.1}") } else { format!("{value:.2e}") };
        let source = if is_measured { "measured" } else { "default" };
        print(format_args!("  {name:24} {value:>10} {unit:7}  {source:8}  {what}"))?;
    }
    Ok(())
}
