//! The one topological sort: nodes by number, each after what it needs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::plan::prune::{Feeds, describe_cycle, forward_inputs, needed_order};
use crate::{NodeId, Nodes};

/// Orders `0..needs.len()` so that each comes after everything in its `needs`, and otherwise as they were. If that is
/// impossible, the error is one way round: each of its entries needs the next, and the last needs the first.
pub fn topological_order(needs: &[Vec<usize>]) -> Result<Vec<usize>, Vec<usize>> {
    // Graphs are nearly always described in order, which costs one look at each edge to find out.
    if needs.iter().enumerate().all(|(i, needs)| needs.iter().all(|&source| source < i)) {
        return Ok((0..needs.len()).collect());
    }
    let mut needed_by: Vec<Vec<usize>> = vec![Vec::new(); needs.len()];
    let mut n_missing = Vec::with_capacity(needs.len());
    for (node, sources) in needs.iter().enumerate() {
        n_missing.push(sources.len());
        for &source in sources {
            needed_by[source].push(node);
        }
    }
    let mut ready: BinaryHeap<_> = (0..needs.len()).filter(|&node| n_missing[node] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(needs.len());
    while let Some(Reverse(node)) = ready.pop() {
        order.push(node);
        for &consumer in &needed_by[node] {
            n_missing[consumer] -= 1;
            if n_missing[consumer] == 0 {
                ready.push(Reverse(consumer));
            }
        }
    }
    match n_missing.iter().position(|&n| n > 0) {
        None => Ok(order),
        Some(stuck) => Err(cycle(needs, &n_missing, stuck)),
    }
}

/// For each of `needed` (sorted) the length of the longest path that leads to it, edges that close loops and fed inputs left
/// out; an error for a cycle.
pub(crate) fn levels(nodes: &Nodes, needed: &[NodeId], feeds: &Feeds) -> kolo_core::Result<Vec<u32>> {
    let order = needed_order(nodes, needed, feeds).map_err(|cycle| describe_cycle(nodes, &cycle))?;
    let mut levels = vec![0u32; needed.len()];
    for id in order {
        let Ok(i) = needed.binary_search(&id) else { continue };
        let before = forward_inputs(nodes, id, feeds).filter_map(|input| needed.binary_search(&input).ok());
        levels[i] = before.map(|input| levels[input] + 1).max().unwrap_or(0);
    }
    Ok(levels)
}

/// A node that could not be ordered needs another such node, so following them from `stuck` must come round.
fn cycle(needs: &[Vec<usize>], n_missing: &[usize], stuck: usize) -> Vec<usize> {
    let mut path = vec![stuck];
    let mut seen_at = vec![None; needs.len()];
    seen_at[stuck] = Some(0);
    let mut node = stuck;
    while let Some(&next) = needs[node].iter().find(|&&source| n_missing[source] > 0) {
        if let Some(start) = seen_at[next] {
            path.drain(..start);
            break;
        }
        seen_at[next] = Some(path.len());
        path.push(next);
        node = next;
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_that_works_is_kept() {
        assert_eq!(topological_order(&[vec![], vec![0], vec![], vec![2, 1]]), Ok(vec![0, 1, 2, 3]));
        assert_eq!(topological_order(&[vec![2, 2], vec![], vec![1]]), Ok(vec![1, 2, 0]));
        assert_eq!(topological_order(&[]), Ok(vec![]));
    }

    #[test]
    fn a_cycle_is_found_behind_its_consumers() {
        assert_eq!(topological_order(&[vec![1], vec![2], vec![3], vec![4], vec![2]]), Err(vec![2, 3, 4]));
        assert_eq!(topological_order(&[vec![0]]), Err(vec![0]));
    }
}
