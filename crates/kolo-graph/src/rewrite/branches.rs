//! Which nodes do not run in every step, because a `Switch` decides about them.
//!
//! A node is in a branch if it needs an output of a `Switch`. A `Merge` of both outputs of one decision ends the branch; a
//! `Merge` of anything else, or what leaves a loop that was entered in a branch, counts as undecided. So does a node in more
//! than [`MAX_DEPTH`] branches at once: graphs come from the network, and the work must not grow with the square of their
//! nesting.

use std::collections::BTreeSet;

use crate::{Flow, Node};

/// Nested branches that are followed.
const MAX_DEPTH: usize = 16;

/// A node by its place in a list, as far as branches are concerned.
pub struct BranchNode<'a> {
    /// The node.
    pub node: &'a Node,
    /// For each input its maker and that one's output; `None` for what a caller feeds.
    pub inputs: Vec<Option<(usize, u32)>>,
    /// What it waits for.
    pub control: Vec<usize>,
    /// The input of another node that it passes on unchanged, if it does: a predicate may be copied before it decides.
    pub passes_on: Option<(usize, u32)>,
    /// It may be skipped for reasons that are not seen here, as what another task sends may be.
    pub may_be_skipped: bool,
}

/// For each node whether there may be steps that skip it. `order` lists all nodes, each after its inputs.
pub fn skipped_nodes(nodes: &[BranchNode<'_>], order: &[usize]) -> Vec<bool> {
    /// What decides, and which way. [`UNDECIDED`] stands for conditions that were not understood.
    type Branch = ((usize, u32), u32);
    const UNDECIDED: Branch = ((usize::MAX, 0), u32::MAX);
    let mut branches: Vec<BTreeSet<Branch>> = vec![BTreeSet::new(); nodes.len()];
    // Where the value of a node comes from that only passes one on.
    let mut origins: Vec<Option<(usize, u32)>> = vec![None; nodes.len()];
    let mut enters_a_branch = false;
    for &i in order {
        let BranchNode { node, inputs, control, passes_on, .. } = &nodes[i];
        origins[i] = passes_on.map(|from| origins[from.0].unwrap_or(from));
        // Edges that close a loop say nothing new: what goes round was entered.
        let is_forward = |maker: usize| nodes[maker].node.def.flow != Flow::NextIteration;
        let of_input = |input: &Option<(usize, u32)>| -> BTreeSet<Branch> {
            let Some((maker, index)) = input.filter(|(maker, _)| is_forward(*maker)) else { return BTreeSet::new() };
            let mut all = branches[maker].clone();
            if nodes[maker].node.def.flow == Flow::Switch
                && let Some(Some(decides)) = nodes[maker].inputs.get(1)
            {
                all.insert((origins[decides.0].unwrap_or(*decides), index));
            }
            all
        };
        let mut all: BTreeSet<Branch> = match (node.def.flow, &inputs[..]) {
            (Flow::Exit, _) => enters_a_branch.then_some(UNDECIDED).into_iter().collect(),
            (Flow::Merge, [a, b]) => {
                let (a, b) = (of_input(a), of_input(b));
                let common: BTreeSet<Branch> = a.intersection(&b).copied().collect();
                let rest = |of: &BTreeSet<Branch>| -> Vec<Branch> { of.difference(&common).copied().collect() };
                match (&rest(&a)[..], &rest(&b)[..]) {
                    ([(p, x)], [(q, y)]) if p == q && x != y => common,
                    _ => a.union(&b).copied().chain([UNDECIDED]).collect(),
                }
            }
            _ => inputs.iter().flat_map(of_input).collect(),
        };
        all.extend(control.iter().flat_map(|&earlier| branches[earlier].iter().copied()));
        if nodes[i].may_be_skipped {
            all.insert(UNDECIDED);
        }
        if all.len() > MAX_DEPTH {
            all = BTreeSet::from([UNDECIDED]);
        }
        enters_a_branch |= node.def.flow == Flow::Enter && !all.is_empty();
        branches[i] = all;
    }
    branches.iter().map(|all| !all.is_empty()).collect()
}
