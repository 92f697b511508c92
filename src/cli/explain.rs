//! `kolo explain`: wish, fact and reason for every node, before anything runs.

use kolo::Result;

use super::graph_file::GraphArgs;
use super::print;

/// Flags of `kolo explain`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    graph: GraphArgs,
    /// One JSON object per node
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let graph = args.graph.read()?;
    let session = args.graph.session(&graph)?;
    let fetches: Vec<&str> = args.graph.fetches.iter().map(String::as_str).collect();
    let report = session.explain(&fetches)?;
    if !args.json {
        return print(report.to_string().trim_end());
    }
    for row in &report.rows {
        let moved = row.n_bytes_moved.map_or_else(|| "null".to_owned(), |n| n.to_string());
        print(format_args!(
            "{{\"node\":\"{}\",\"op\":\"{}\",\"wish\":\"{}\",\"device\":\"{}\",\"rule\":\"{}\",\"bytes_moved\":{moved}}}",
            row.node, row.op, row.wish, row.device, row.rule
        ))?;
    }
    Ok(())
}
