//! What running costs: measured times of nodes, and speeds of the links between devices.
//!
//! Times come from traces of earlier runs, by node and type of device. Link speeds are measured or, where nobody did,
//! assumed. The model is plain text, one fact per line, so that it can be kept beside the program and read by people:
//!
//! ```text
//! # node NAME OP DEVICE-TYPE RUNS MEAN-SECONDS
//! node tower/MatMul MatMul CPU 12 0.00123
//! # link FROM TO BYTES-PER-SECOND LATENCY-SECONDS
//! link CPU GPU 12000000000 0.00001
//! ```

use std::collections::BTreeMap;
use std::fmt;

use kolo_core::{DeviceName, Error, Result};

use crate::{Node, OutputInfo};

/// How fast values go from one device to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// How many bytes go over in a second.
    pub bytes_per_second: f64,
    /// What even an empty value takes, in seconds.
    pub latency: f64,
}

/// Within a process, devices of one type: values go by reference, and the reader's cores fetch them.
const SAME_KIND: Link = Link { bytes_per_second: 20e9, latency: 5e-6 };
/// Between a host and its accelerator: PCI Express 3.0, 16 lanes.
const HOST_DEVICE: Link = Link { bytes_per_second: 12e9, latency: 10e-6 };
/// Between machines: ten-gigabit Ethernet.
const NETWORK: Link = Link { bytes_per_second: 1.25e9, latency: 50e-6 };

/// What a value of unknown shape is taken for.
const UNKNOWN_BYTES: usize = 1 << 20;

/// Measured node times and link speeds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostModel {
    nodes: BTreeMap<String, Measured>,
    links: BTreeMap<(String, String), Link>,
}

/// One node's times.
#[derive(Clone, Debug, Default, PartialEq)]
struct Measured {
    op: String,
    /// Runs and mean seconds, by type of device.
    by_kind: BTreeMap<String, (u64, f64)>,
}

impl CostModel {
    /// True if nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.links.is_empty()
    }

    /// Takes in one run of a node on a device of type `kind`. A node that is another op now is measured anew.
    pub fn record(&mut self, node: &str, op: &str, kind: &str, seconds: f64) {
        if !(seconds.is_finite() && seconds >= 0.0) {
            return;
        }
        let measured = self.nodes.entry(node.to_owned()).or_default();
        if measured.op != op {
            *measured = Measured { op: op.to_owned(), by_kind: BTreeMap::new() };
        }
        let (n, mean) = measured.by_kind.entry(kind.to_owned()).or_insert((0, 0.0));
        *n = n.saturating_add(1);
        *mean += (seconds - *mean) / *n as f64;
    }

    /// States how fast devices of type `from` send to those of type `to`, in one process.
    pub fn set_link(&mut self, from: &str, to: &str, link: Link) {
        self.links.insert((from.to_owned(), to.to_owned()), link);
    }

    /// The mean time of a node on a device like this one, in seconds; `None` if it was never measured.
    pub fn seconds(&self, node: &Node, device: &DeviceName) -> Option<f64> {
        let measured = self.nodes.get(&*node.name).filter(|measured| measured.op == node.op())?;
        measured.by_kind.get(&*device.kind).map(|(_, mean)| *mean)
    }

    /// How fast values go between two devices, and whether that was measured.
    pub fn link(&self, from: &DeviceName, to: &DeviceName) -> (Link, bool) {
        if !from.same_task(to) {
            return (NETWORK, false);
        }
        let key = (from.kind.to_string(), to.kind.to_string());
        match self.links.get(&key) {
            Some(link) => (*link, true),
            None if from.kind == to.kind => (SAME_KIND, false),
            None => (HOST_DEVICE, false),
        }
    }

    /// How long a value of this size takes from one device to another, in seconds; none on one device. A value of unknown
    /// size is taken for a megabyte.
    pub fn transfer_seconds(&self, from: &DeviceName, to: &DeviceName, n_bytes: Option<usize>) -> f64 {
        if from == to {
            return 0.0;
        }
        let (link, _) = self.link(from, to);
        link.latency + n_bytes.unwrap_or(UNKNOWN_BYTES) as f64 / link.bytes_per_second
    }

    /// Reads what [`CostModel`]'s `Display` writes. Errors name `source` and the line.
    ///
    /// ```
    /// let costs = kolo_graph::CostModel::parse("node a MatMul CPU 3 0.25\nlink CPU GPU 1e10 1e-5\n", "costs.txt")?;
    /// assert_eq!(costs.to_string().lines().last(), Some("link CPU GPU 10000000000 0.00001"));
    /// # Ok::<(), kolo_core::Error>(())
    /// ```
    pub fn parse(text: &str, source: &str) -> Result<CostModel> {
        let mut costs = CostModel::default();
        for (i, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = line.split_whitespace().collect();
            let bad = || {
                Error::invalid_argument(format!(
                    "{source}:{}: '{}' should be 'node NAME OP DEVICE-TYPE RUNS MEAN-SECONDS' or 'link FROM TO \
                     BYTES-PER-SECOND LATENCY-SECONDS'",
                    i + 1,
                    line.trim()
                ))
            };
            let number = |text: &str, least: f64| {
                let value: f64 = text.parse().map_err(|_| bad())?;
                if value.is_finite() && value >= least { Ok(value) } else { Err(bad()) }
            };
            match words.as_slice() {
                [] => {}
                ["node", name, op, kind, runs, mean] => {
                    let runs: u64 = runs.parse().map_err(|_| bad())?;
                    let mean = number(mean, 0.0)?;
                    let measured = costs.nodes.entry((*name).to_owned()).or_default();
                    measured.op = (*op).to_owned();
                    measured.by_kind.insert(kind.to_ascii_uppercase(), (runs, mean));
                }
                ["link", from, to, speed, latency] => {
                    let link = Link { bytes_per_second: number(speed, 1.0)?, latency: number(latency, 0.0)? };
                    costs.set_link(&from.to_ascii_uppercase(), &to.to_ascii_uppercase(), link);
                }
                _ => return Err(bad()),
            }
        }
        Ok(costs)
    }
}

impl fmt::Display for CostModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, measured) in &self.nodes {
            for (kind, (runs, mean)) in &measured.by_kind {
                writeln!(f, "node {name} {} {kind} {runs} {mean}", measured.op)?;
            }
        }
        for ((from, to), link) in &self.links {
            writeln!(f, "link {from} {to} {} {}", link.bytes_per_second, link.latency)?;
        }
        Ok(())
    }
}

/// The size of an output in bytes, if its shape is known and its elements have a size.
pub(crate) fn output_bytes(output: &OutputInfo) -> Option<usize> {
    output.shape.n_elements()?.checked_mul(output.dtype.size()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_means_and_follow_the_op() {
        let g = crate::testing::graph();
        let a = g.op("Source").name("a").build();
        let nodes = g.snapshot();
        let node = nodes.node(a.id());
        let cpu = DeviceName::local("CPU", 3);
        let mut costs = CostModel::default();
        assert_eq!(costs.seconds(node, &cpu), None);
        [1.0, 2.0, 6.0, f64::NAN, -1.0].iter().for_each(|&seconds| costs.record("a", "Source", "CPU", seconds));
        assert_eq!(costs.seconds(node, &cpu), Some(3.0));
        assert_eq!(costs.seconds(node, &DeviceName::local("GPU", 0)), None);
        costs.record("a", "Neg", "CPU", 9.0);
        assert_eq!(costs.seconds(node, &cpu), None, "it was measured as another op");
    }

    #[test]
    fn text_comes_back_and_bad_lines_are_named() {
        let mut costs = CostModel::default();
        costs.record("x/y", "MatMul", "CPU", 0.125);
        costs.record("x/y", "MatMul", "GPU", 1e-7);
        costs.set_link("CPU", "GPU", Link { bytes_per_second: 5e9, latency: 2.5e-6 });
        assert_eq!(CostModel::parse(&costs.to_string(), "c").unwrap(), costs);
        for bad in
            ["node a b", "link CPU GPU 0 1", "link CPU GPU nan 1", "node a MatMul CPU x 1", "node a M CPU 1 -1", "cost"]
        {
            let error = CostModel::parse(&format!("\n{bad}"), "costs.txt").unwrap_err();
            assert!(error.message().starts_with(&format!("costs.txt:2: '{bad}' should be")), "{error}");
        }
    }

    #[test]
    fn transfers_take_latency_and_bytes() {
        let (a, b) = (DeviceName::local("CPU", 0), DeviceName::local("GPU", 0));
        let mut costs = CostModel::default();
        assert_eq!(costs.transfer_seconds(&a, &a, Some(1 << 30)), 0.0);
        assert!((costs.transfer_seconds(&a, &b, Some(12_000_000)) - 1.01e-3).abs() < 1e-9);
        assert!(costs.transfer_seconds(&a, &b, None) > costs.transfer_seconds(&a, &b, Some(1000)));
        costs.set_link("CPU", "GPU", Link { bytes_per_second: 1e6, latency: 0.0 });
        assert_eq!((costs.transfer_seconds(&a, &b, Some(1_000_000)), costs.link(&a, &b).1), (1.0, true));
        let far = DeviceName { task: 1, ..b };
        assert_eq!(costs.link(&a, &far), (NETWORK, false));
    }
}
