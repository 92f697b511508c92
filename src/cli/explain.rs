//! `kolo explain`: wish, fact and reason for every node, before anything runs.

use crate::Result;

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
        print(report.to_string().trim_end())?;
        for rule in &args.graph.rules()?.table(&graph.nodes()).unused {
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
