//! Reads a graph from a file and makes a session over it, for commands that take one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{
    CostModel, DType, DeviceName, Error, Graph, NullDevice, PlacementRules, Policy, Result, Session, SessionConfig,
    Shape, Tensor, wire,
};
use clap::Args;
use kolo_device::cpu::topology::parse_cores;

/// Flags for the graph and its devices.
#[derive(Args)]
pub struct GraphArgs {
    /// Read this GraphDef, binary (.pb) or text (.pbtxt)
    pub graph: PathBuf,
    /// Compute this tensor or operation; may be given more than once
    #[arg(long = "fetch", value_name = "NAME", required = true)]
    pub fetches: Vec<String>,
    /// Use these devices, such as cpu=4,gpu=1 or cpu:0=cores 0-1,cpu:1=cores 2-3; GPUs are simulated and compute
    /// nothing
    #[arg(long, value_name = "KIND=N,…", default_value = "cpu=1")]
    pub devices: String,
    /// Use soft placement: nodes that cannot run where they are pinned run elsewhere
    #[arg(long)]
    pub soft: bool,
    /// Read placement rules from this file, one per line: '*/weights -> /cpu:0', 'op=MatMul dtype=float -> /gpu:0',
    /// '! loss/* -> /cpu:0'
    #[arg(long, value_name = "FILE")]
    pub pins: Option<PathBuf>,
    /// Place nodes without a pin by this policy: simple, heuristic (TensorFlow's) or cost
    #[arg(long, value_name = "POLICY", default_value = "simple")]
    pub policy: String,
    /// Read measured times of nodes and links from this file, written by 'kolo trace --write-costs'
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
}

impl GraphArgs {
    /// The graph in the file.
    pub fn read(&self) -> Result<Graph> {
        let name = self.graph.display();
        let bytes =
            std::fs::read(&self.graph).map_err(|error| Error::not_found(format!("cannot read {name}: {error}")))?;
        let graph = crate::graph();
        let (def, origins) =
            wire::graph::read_graph_file(&bytes, &name.to_string()).map_err(|error| error.context(&name))?;
        let options = wire::graph::ImportOptions { origins, ..wire::graph::ImportOptions::default() };
        wire::graph::import(&graph, &def, options).map_err(|error| error.context(&name))?;
        Ok(graph)
    }

    /// The rules of `--pins`; none without it.
    pub fn rules(&self) -> Result<PlacementRules> {
        let Some(path) = &self.pins else { return Ok(PlacementRules::default()) };
        PlacementRules::parse(&read_text(path)?, &path.display().to_string())
    }

    /// The costs of `--costs`; nothing measured without it.
    pub fn cost_model(&self) -> Result<CostModel> {
        let Some(path) = &self.costs else { return Ok(CostModel::default()) };
        CostModel::parse(&read_text(path)?, &path.display().to_string())
    }

    /// A session over the graph and the requested devices.
    pub fn session(&self, graph: &Graph) -> Result<Session> {
        let mut config = SessionConfig {
            allow_soft_placement: self.soft,
            placement_rules: self.rules()?,
            placement_policy: self.policy.parse::<Policy>().map_err(|error| error.context("--policy"))?,
            costs: Arc::new(self.cost_model()?),
            ..SessionConfig::default()
        };
        let list = parse_devices(&self.devices)?;
        list.bind(&mut config);
        for (kind, n) in list.counts {
            match kind.as_str() {
                "CPU" => drop(config.device_count.insert(kind, n)),
                _ => {
                    let stand_in = |id| NullDevice::new(DeviceName::local(&kind, id as u32), None, &[]) as _;
                    config.extra_devices.extend((0..n).map(stand_in));
                }
            }
        }
        Session::with_config(graph, config)
    }
}

fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| Error::not_found(format!("cannot read {}: {error}", path.display())))
}

/// The value of `--devices`.
#[derive(Debug, Default, PartialEq)]
pub struct DeviceList {
    /// The number of devices of each kind, in capitals.
    pub counts: BTreeMap<String, usize>,
    /// The core sets of CPU devices that have one.
    pub cores: BTreeMap<usize, Vec<usize>>,
}

impl DeviceList {
    /// Sets the cores of the CPU devices.
    pub fn bind(&self, config: &mut SessionConfig) {
        for (&id, cores) in &self.cores {
            config.cpu_devices.entry(id).or_default().cores.clone_from(cores);
        }
    }
}

/// Reads `cpu=4,gpu=1`, single devices such as `cpu:0,cpu:1=cores 2-3,5`, or both.
pub fn parse_devices(text: &str) -> Result<DeviceList> {
    /// More devices than this are a mistake.
    const MOST: usize = 1024;
    let mut list = DeviceList::default();
    let mut named: BTreeMap<String, usize> = BTreeMap::new();
    for part in device_parts(text) {
        let part = part.trim();
        let bad = || {
            Error::invalid_argument(format!(
                "--devices: '{part}' should look like cpu=4, with a number from 1 to {MOST}, or like cpu:1=cores 2-3"
            ))
        };
        let (device, value) = part.split_once('=').map_or((part, None), |(device, value)| (device, Some(value.trim())));
        let (kind, id) = device.split_once(':').map_or((device, None), |(kind, id)| (kind, Some(id.trim())));
        let kind = kind.trim().to_ascii_uppercase();
        if kind.is_empty() || !kind.chars().all(|c| c.is_ascii_alphabetic()) {
            return Err(bad());
        }
        match (id, value) {
            (None, Some(n)) => {
                let n = n.parse().ok().filter(|n| (1..=MOST).contains(n)).ok_or_else(bad)?;
                list.counts.insert(kind, n);
            }
            (Some(id), cores) => {
                let id: usize = id.parse().ok().filter(|id| *id < MOST).ok_or_else(bad)?;
                if let Some(cores) = cores {
                    let cores = cores.strip_prefix("cores").filter(|_| kind == "CPU").ok_or_else(bad)?;
                    let cores = parse_cores(cores.trim())
                        .map_err(|error| error.context(format_args!("--devices: '{part}'")))?;
                    if cores.is_empty() || list.cores.insert(id, cores).is_some() {
                        return Err(bad());
                    }
                }
                let n = named.entry(kind).or_default();
                *n = (*n).max(id + 1);
            }
            (None, None) => return Err(bad()),
        }
    }
    for (kind, n) in named {
        match list.counts.get(&kind) {
            Some(count) if *count < n => {
                let (kind, last) = (kind.to_ascii_lowercase(), n - 1);
                return Err(Error::invalid_argument(format!("--devices: {kind}:{last} is named, but {kind}={count}")));
            }
            Some(_) => {}
            None => drop(list.counts.insert(kind, n)),
        }
    }
    Ok(list)
}

/// The parts between commas; a part that begins with a digit goes on with the list of cores before it.
fn device_parts(text: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    for part in text.split(',').filter(|part| !part.trim().is_empty()) {
        match parts.last_mut() {
            Some(last) if part.trim().starts_with(|c: char| c.is_ascii_digit()) => {
                last.push(',');
                last.push_str(part);
            }
            _ => parts.push(part.to_owned()),
        }
    }
    parts
}

/// `NAME=DTYPE[2,3]`: a feed of zeros, so that a graph with placeholders can be traced.
pub fn parse_feed(text: &str) -> Result<(String, Tensor)> {
    let bad = || Error::invalid_argument(format!("--feed: '{text}' should look like x=float[100,784]"));
    let (name, value) = text.split_once('=').ok_or_else(bad)?;
    let (dtype, dims) = value.strip_suffix(']').and_then(|value| value.split_once('[')).ok_or_else(bad)?;
    let dims: Vec<usize> = match dims.trim() {
        "" => Vec::new(),
        dims => dims.split(',').map(|dim| dim.trim().parse().map_err(|_| bad())).collect::<Result<_>>()?,
    };
    Ok((name.to_owned(), Tensor::zeros(DType::from_name(dtype.trim())?, Shape::new(&dims)?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_lists_are_read_or_refused_by_name() {
        let counts = |list: &[(&str, usize)]| list.iter().map(|(kind, n)| ((*kind).to_owned(), *n)).collect();
        let list = parse_devices("cpu=4, gpu=1").unwrap();
        assert_eq!(list, DeviceList { counts: counts(&[("CPU", 4), ("GPU", 1)]), cores: BTreeMap::new() });
        let list = parse_devices("cpu:0, cpu:2=cores 2-3,7, gpu:1,cpu:1 = cores 5").unwrap();
        let cores = BTreeMap::from([(2, vec![2, 3, 7]), (1, vec![5])]);
        assert_eq!(list, DeviceList { counts: counts(&[("CPU", 3), ("GPU", 2)]), cores });
        assert_eq!(parse_devices("cpu=3,cpu:1=cores 0").unwrap().counts, counts(&[("CPU", 3)]));
        assert!(parse_devices("cpu=2,cpu:5").unwrap_err().message().contains("cpu:5 is named, but cpu=2"));
        for bad in [
            "cpu",
            "cpu=x",
            "cpu=0",
            "cpu=99999",
            "=3",
            "cpu:x",
            "cpu:1=2-3",
            "gpu:0=cores 1",
            "cpu:1=cores 3-2",
            "cpu:1=cores",
        ] {
            assert!(parse_devices(bad).unwrap_err().message().contains(bad), "{bad}");
        }
    }

    #[test]
    fn feeds_are_zeros_of_the_given_shape() {
        let (name, value) = parse_feed("x=float[2,3]").unwrap();
        assert_eq!((name.as_str(), value), ("x", Tensor::zeros(DType::F32, [2, 3]).unwrap()));
        assert_eq!(parse_feed("i=int32[]").unwrap().1, Tensor::scalar(0i32));
        assert!(parse_feed("x=float[2").is_err() && parse_feed("x=flaot[2]").is_err());
    }
}
