//! `kolo explain`: requested device, actual device and reason for every node, and what the passes make of the graph, before
//! anything runs.

use serde_json::json;

use crate::{Error, PassReport, Result};

use super::graph_file::GraphArgs;
use super::{explain_collectives, print};

/// Flags of `kolo explain`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    graph: Option<GraphArgs>,
    /// Print the passes in order, with their reasons and how many nodes each left
    #[arg(long)]
    passes: bool,
    /// Print the graph as it is after this pass
    #[arg(long, value_name = "PASS")]
    after: Option<String>,
    /// Print one JSON object per node, or per pass with --passes, instead of a table
    #[arg(long, conflicts_with = "after")]
    json: bool,
}

/// What is not about a graph.
#[derive(clap::Subcommand)]
enum Part {
    /// Show what messages between ranks cost, which of it was measured, and which algorithms collectives would take
    Collectives(explain_collectives::Args),
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(Part::Collectives(args)) = &args.part {
        return explain_collectives::run(args);
    }
    let of =
        args.graph.as_ref().ok_or_else(|| Error::invalid_argument("name the file of a graph, or `collectives`"))?;
    let graph = of.read()?;
    let session = of.session(&graph)?;
    let fetches: Vec<&str> = of.fetches.iter().map(String::as_str).collect();
    if args.passes || args.after.is_some() {
        return explain_passes(args, &session.local()?.explain_passes(&fetches, args.after.as_deref())?);
    }
    let report = session.local()?.explain(&fetches)?;
    if !args.json {
        print(report.to_string().trim_end())?;
        for rule in &of.rules()?.table(&graph.nodes()).unused {
            print(format_args!("{rule}: no node of the graph is like this"))?;
        }
        return Ok(());
    }
    for row in &report.rows {
        let moved = row.n_bytes_moved.map_or_else(|| "null".to_owned(), |n| n.to_string());
        let pin = row.pinned_at.as_ref().map_or(serde_json::Value::Null, |pin| pin.to_string().into());
        print(format_args!(
            "{{\"node\":\"{}\",\"op\":\"{}\",\"wish\":\"{}\",\"device\":\"{}\",\"rule\":\"{}\",\"bytes_moved\":{moved},\"pinned_at\":{pin}}}",
            row.node, row.op, row.wish, row.device, row.rule
        ))?;
    }
    Ok(())
}

fn explain_passes(args: &Args, report: &PassReport) -> Result<()> {
    if args.json {
        for record in &report.log {
            print(json!({
                "pass": record.pass, "stage": record.stage.to_string(), "why": record.why,
                "device": record.device.as_ref().map(ToString::to_string), "changed": record.has_changed,
                "undone": record.undone,
                "nodes_before": record.n_before, "nodes_after": record.n_after,
            }))?;
        }
        return Ok(());
    }
    if args.passes {
        print(report.to_string().trim_end())?;
    }
    match (&args.after, &report.text) {
        (Some(_), Some(text)) => print(text.trim_end()),
        (Some(pass), None) => Err(Error::failed_precondition(format!(
            "'{pass}' works on compiled parts, after which there is no graph to print; --after partition shows the parts"
        ))),
        (None, _) => Ok(()),
    }
}
