//! The part of a message that some of its nodes need.

use std::collections::HashMap;

use kolo_core::{Error, Result};

use crate::op::registry::did_you_mean;
use crate::wire::proto::GraphDef;

/// `def` with only the nodes that these (`node`, or `node:output`) need, in their order; the library stays whole. An error that suggests
/// a similar name if a node is not there.
pub fn subgraph(def: &GraphDef, wanted: &[&str]) -> Result<GraphDef> {
    let index: HashMap<&str, usize> = def.node.iter().enumerate().map(|(i, node)| (node.name.as_str(), i)).collect();
    let mut stack = Vec::new();
    for name in wanted {
        let node = node_of(name);
        let hint = || did_you_mean(node, index.keys().copied());
        let found =
            index.get(node).ok_or_else(|| Error::not_found(format!("node '{node}' is not in the graph{}", hint())));
        stack.push(*found?);
    }
    let mut needed = vec![false; def.node.len()];
    while let Some(i) = stack.pop() {
        if !std::mem::replace(&mut needed[i], true) {
            // An input that is nowhere is an error of the import, which says more about it.
            stack
                .extend(def.node[i].input.iter().filter_map(|input| index.get(node_of(input.trim_start_matches('^')))));
        }
    }
    let node = def.node.iter().zip(needed).filter(|(_, needed)| *needed).map(|(node, _)| node.clone()).collect();
    Ok(GraphDef { node, ..def.clone() })
}

fn node_of(tensor: &str) -> &str {
    tensor.split(':').next().unwrap_or(tensor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::graph::read_graph;

    #[test]
    fn only_what_is_needed_stays() {
        let text = "node { name: 'a' } node { name: 'b' input: 'a:1' input: '^c' } node { name: 'c' } node { name: 'odd' input: 'b' }";
        let def = read_graph(text.as_bytes()).unwrap();
        let names = |wanted: &[&str]| -> Vec<String> {
            subgraph(&def, wanted).unwrap().node.into_iter().map(|node| node.name).collect()
        };
        assert_eq!(names(&["b:0"]), ["a", "b", "c"]);
        assert_eq!(names(&["c", "a"]), ["a", "c"]);
        assert!(subgraph(&def, &["oddd"]).unwrap_err().message().contains("did you mean 'odd'?"));
    }
}
