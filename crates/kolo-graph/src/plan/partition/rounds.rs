//! Rounds: how often a value has crossed between tasks before it is there.
//!
//! A task sees only its own part of a step. If it runs many nodes as one (a captured segment of a GPU's part), it must
//! know that what it receives does not depend, by way of other tasks, on what the same segment is yet to send: the segment
//! would wait for itself. The master sees the whole step and writes the round of each transfer on both of its ends. A value
//! that depends on another through a different task has a larger round.
//!
//! It also says which values may be dead, since a branch may have been decided on another task.

use std::collections::HashMap;

use super::draft::{Draft, Source};
use crate::rewrite::FrameId;
use crate::rewrite::order::topological_order;
use crate::rewrite::{BranchNode, skipped_nodes};
use crate::{AttrValue, Flow, Node};

/// The attribute with the round of a transfer between tasks.
const ROUND: &str = "_kolo_round";
/// The attribute of transfers between tasks whose value may be dead, or comes from a loop.
const CONDITIONAL: &str = "_kolo_conditional";

/// What a master says of a transfer between tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferRound {
    /// How often its value has crossed between tasks before it is sent.
    pub round: i64,
    /// Its value may be dead in some steps.
    pub is_conditional: bool,
}

impl TransferRound {
    /// What was written on one end of a transfer; `None` if its master, TensorFlow's say, writes no such thing.
    pub fn of(node: &Node) -> Option<TransferRound> {
        let round = node.attrs.int(ROUND).ok()?;
        Some(TransferRound { round, is_conditional: node.attrs.bool(CONDITIONAL).unwrap_or(true) })
    }

    /// The attributes to write.
    pub(crate) fn attrs(self) -> [(&'static str, AttrValue); 2] {
        [(ROUND, self.round.into()), (CONDITIONAL, self.is_conditional.into())]
    }
}

/// For each draft the round of its outputs, if drafts of one place are one task. Empty if there is only one, or if the
/// drafts have a cycle, which partitioning refuses elsewhere.
pub(crate) fn rounds(drafts: &[Draft], place: &dyn Fn(usize) -> usize) -> Vec<TransferRound> {
    let n = drafts.len();
    if (1..n).all(|draft| place(draft) == place(0)) {
        return Vec::new();
    }
    let is_back = |to: usize, from: usize| {
        drafts[to].node.def.flow == Flow::Merge && drafts[from].node.def.flow == Flow::NextIteration
    };
    let mut inputs: Vec<Vec<usize>> = drafts
        .iter()
        .enumerate()
        .map(|(to, draft)| draft.input_drafts().filter(|&from| !is_back(to, from)).collect())
        .collect();
    // What leaves a loop may come from any of its iterations, so it waits for all that goes round: through one barrier for
    // each loop, which is on no task, so that going through it counts as crossing.
    let mut barriers: HashMap<FrameId, usize> = HashMap::new();
    for (draft, node) in drafts.iter().enumerate() {
        let (frame, is_exit) = match node.node.def.flow {
            Flow::Exit => (node.input_frame, true),
            Flow::NextIteration => (node.output_frame, false),
            _ => continue,
        };
        let Some(frame) = frame else { continue };
        let barrier = *barriers.entry(frame).or_insert_with(|| {
            inputs.push(Vec::new());
            inputs.len() - 1
        });
        match is_exit {
            true => inputs[draft].push(barrier),
            false => inputs[barrier].push(draft),
        }
    }
    let Ok(order) = topological_order(&inputs) else { return Vec::new() };
    let source = |input: &Source| match input {
        Source::Draft { draft, index } => Some((*draft, *index)),
        Source::Feed(_) => None,
    };
    let nodes: Vec<BranchNode<'_>> = drafts
        .iter()
        .map(|draft| BranchNode {
            node: &draft.node,
            inputs: draft.inputs.iter().map(source).collect(),
            control: draft.control.clone(),
            passes_on: draft.inputs.first().filter(|_| draft.node.passed_on().is_some()).and_then(source),
            may_be_skipped: false,
        })
        .collect();
    let real: Vec<usize> = order.iter().copied().filter(|&i| i < n).collect();
    let skipped = skipped_nodes(&nodes, &real);
    let task = |i: usize| (i < n).then(|| place(i));
    let mut round = vec![0i64; inputs.len()];
    for &to in &order {
        let after = |&from: &usize| round[from] + i64::from(task(from) != task(to));
        round[to] = inputs[to].iter().map(after).max().unwrap_or(0);
    }
    let found = drafts.iter().zip(round).zip(skipped);
    found
        .map(|((draft, round), is_skipped)| TransferRound {
            round,
            is_conditional: is_skipped || draft.output_frame.is_some(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::testing::{Kernels, devices, graph, registry};
    use crate::{Granularity, Graph, PartitionOptions, PlaceOptions, Request, partition, place, prune};

    /// What is written on the `_Recv` of each value that crosses between tasks, by the name of the value.
    fn received(g: &Graph, fetch: &str) -> HashMap<String, (i64, bool)> {
        let nodes = g.snapshot();
        let request = Request { fetches: vec![nodes.endpoint(fetch).unwrap()], ..Request::default() };
        let pruned = prune(&nodes, &request).unwrap();
        let on = devices("/job:ps/cpu:0 /job:worker/cpu:0");
        let placed = place(&nodes, &pruned.nodes, &on, &Kernels, &HashMap::new(), &PlaceOptions::default()).unwrap();
        let options = PartitionOptions { granularity: Granularity::Task, ..PartitionOptions::default() };
        let mut n = 0;
        let mut fresh = || {
            n += 1;
            n
        };
        let parts = partition(&placed, &pruned, registry(), &options, &mut fresh).unwrap();
        let ends = parts.iter().flat_map(|part| part.nodes.iter()).filter(|(_, node)| node.op() == "_Recv");
        ends.map(|(_, node)| {
            let name = node.attrs.str("tensor_name").unwrap().splitn(3, '_').last().unwrap().to_owned();
            let round = TransferRound::of(node).unwrap();
            (name, (round.round, round.is_conditional))
        })
        .collect()
    }

    #[test]
    fn a_value_that_comes_back_is_of_a_later_round() {
        let g = graph();
        let a = g.device("/job:ps", || g.op("Source").name("a").out());
        let b = g.device("/job:worker", || g.op("Neg").name("b").input(a).out());
        let other = g.device("/job:ps", || g.op("Source").name("other").out());
        let c = g.device("/job:ps", || g.op("Add").name("c").input(b).input(other).out());
        g.device("/job:worker", || g.op("Add").name("d").input(c).input(other).out());
        let found = received(&g, "d");
        assert_eq!(found["a"], (0, false));
        assert_eq!(found["b"], (1, false));
        assert_eq!(found["c"], (2, false));
        assert_eq!(found["other"], (0, false));
    }

    #[test]
    fn what_a_branch_or_a_loop_sends_is_conditional() {
        let g = graph();
        let x = g.device("/job:ps", || g.op("Source").out());
        let flag = g.device("/job:ps", || g.op("Less").input(x).input(x).out());
        let taken = g.device("/job:ps", || g.op("Switch").name("s").input(x).input(flag).build().output(1));
        let seen = g.device("/job:ps", || g.op("Neg").name("seen").input(taken).out());
        g.device("/job:worker", || g.op("Neg").name("end").input(seen).out());
        assert_eq!(received(&g, "end")["seen"], (0, true));

        let g = crate::testing::while_loop("/job:ps", "/job:worker");
        let found = received(&g, "exit");
        assert!(found.values().any(|(_, is_conditional)| *is_conditional), "{found:?}");
    }

    /// Once, each of these took time and memory that grew with the square of its size.
    #[test]
    fn deep_branches_and_wide_loops_are_planned_at_once() {
        const N: usize = 20_000;
        let g = graph();
        let mut x = g.device("/job:ps", || g.op("Source").out());
        for _ in 0..N {
            x = g.device("/job:ps", || {
                let flag = g.op("Less").input(x).input(x).out();
                g.op("Switch").input(x).input(flag).build().output(1)
            });
        }
        g.device("/job:worker", || g.op("Neg").name("end").input(x).out());
        assert!(received(&g, "end").values().all(|(round, is_conditional)| (*round, *is_conditional) == (0, true)));

        let g = graph();
        let mut exits = Vec::new();
        g.device("/job:ps", || {
            let x = g.op("Source").out();
            for _ in 0..N / 4 {
                let enter = g.op("Enter").attr("frame_name", "f").input(x).out();
                let merge = g.op("Merge").input(enter).input(enter).build();
                let next = g.op("NextIteration").input(merge.output(0)).out();
                g.close_loop(merge.id(), 1, next.endpoint()).unwrap();
                exits.push(g.op("Exit").input(merge.output(0)).out());
            }
        });
        let all = g.device("/job:ps", || g.op("AddN").inputs(exits).out());
        g.device("/job:worker", || g.op("Neg").name("end").input(all).out());
        let (round, is_conditional) = received(&g, "end").into_values().next().unwrap();
        assert!(round > 0 && !is_conditional);
    }
}
