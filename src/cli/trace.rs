//! `kolo trace`: one step of a graph as a timeline.

use std::path::PathBuf;

use crate::{Error, Result, RunOptions, Tensor};

use super::graph_file::{GraphArgs, parse_feed};
use super::print;

/// Flags of `kolo trace`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    graph: GraphArgs,
    /// Feed zeros: NAME=DTYPE[SIZES], such as x=float[100,784]
    #[arg(long = "feed", value_name = "NAME=DTYPE[SIZES]")]
    feeds: Vec<String>,
    /// Run this operation first, untraced, such as init
    #[arg(long = "first", value_name = "NAME")]
    first: Vec<String>,
    /// Write the trace to this file; open it in chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "FILE", default_value = "trace.json")]
    out: PathBuf,
    /// Also write the measured times of nodes and links, for 'kolo explain --policy cost --costs FILE'
    #[arg(long, value_name = "FILE")]
    write_costs: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    let graph = args.graph.read()?;
    let session = args.graph.session(&graph)?;
    let feeds = args.feeds.iter().map(|feed| parse_feed(feed)).collect::<Result<Vec<_>>>()?;
    let feeds: Vec<(&str, Tensor)> = feeds.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    for first in &args.first {
        session.run_named(&[], &[], &[first])?;
    }
    let (operations, tensors): (Vec<&str>, Vec<&str>) = args
        .graph
        .fetches
        .iter()
        .map(String::as_str)
        .partition(|name| graph.operation(name).is_ok_and(|operation| operation.n_outputs() == 0));
    // Once for the plan, once for the trace: the first run of a signature compiles it.
    let options = RunOptions { trace: true, ..RunOptions::default() };
    session.run_named(&tensors, &feeds, &operations)?;
    let (_, metadata) = session.run_named_with(&options, &tensors, &feeds, &operations)?;
    let out = args.out.display();
    std::fs::write(&args.out, metadata.trace.to_chrome_json())
        .map_err(|error| Error::unavailable(format!("cannot write {out}: {error}")))?;
    if let Some(path) = &args.write_costs {
        let mut costs = args.graph.cost_model()?;
        metadata.trace.add_to(&mut costs);
        session.local()?.measure_links(&mut costs)?;
        std::fs::write(path, costs.to_string())
            .map_err(|error| Error::unavailable(format!("cannot write {}: {error}", path.display())))?;
    }
    let total: f64 = metadata.trace.nodes.iter().map(|node| node.duration.as_secs_f64()).sum();
    print(format_args!("{} nodes, {:.1} µs in kernels, written to {out}", metadata.trace.nodes.len(), total * 1e6))
}
