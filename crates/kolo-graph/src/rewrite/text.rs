//! A graph as text, one node a line, so that tests and people can compare graphs:
//!
//! `c = MatMul[T=float](a:0, b:0, ^init) @ /device:GPU:0 -> float[2,3]`
//!
//! In a partition, `<feed 0>` is an input that the caller of the run gives.

use std::fmt;

use crate::{NodeId, Nodes, OutputInfo};

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|(id, _)| writeln!(f, "{}", self.line(id)))
    }
}

impl Nodes {
    /// One node as text.
    pub(crate) fn line(&self, id: NodeId) -> String {
        let node = self.node(id);
        let mut line = format!("{} = {}", node.name, node.op());
        let attrs: Vec<String> = node.attrs.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if !attrs.is_empty() {
            line += &format!("[{}]", attrs.join(", "));
        }
        let data = node.inputs.iter().map(|&at| match at.feed() {
            Some(feed) => format!("<feed {feed}>"),
            None => self.endpoint_name(at),
        });
        let control = node.control_inputs.iter().map(|&id| format!("^{}", self.node(id).name));
        line += &format!("({})", data.chain(control).collect::<Vec<_>>().join(", "));
        if !node.device.is_empty() {
            line += &format!(" @ {}", node.device);
        }
        if !node.outputs.is_empty() {
            let outputs: Vec<String> = node.outputs.iter().map(OutputInfo::to_string).collect();
            line += &format!(" -> {}", outputs.join(", "));
        }
        line
    }
}

impl fmt::Display for OutputInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reference = if self.is_ref { "&" } else { "" };
        write!(f, "{}{reference}{}", self.dtype, self.shape)
    }
}
