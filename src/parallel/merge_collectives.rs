//! Small collectives that ranks begin at about the same time become one: up to some size, what a collective costs is that ranks meet.

use kolo_core::{DeviceSpec, Result};
use kolo_graph::{Attrs, Endpoint, NodeId, Pass, Rewriter, Stage};

/// Meeting costs about as much as this many bytes.
pub(super) const MEETING_BYTES: usize = 64 << 10;

/// A pass that makes a collective of at most `most_bytes` part of the next one that does the same, such as the mean of a step's losses
/// part of its first gradients'. What is larger is begun as early as it can be.
pub(super) fn merge_collectives(most_bytes: usize) -> Pass {
    Pass::new(
        "merge-collectives",
        Stage::Graph,
        "a small collective costs as much as a meeting of all ranks, so it is done in the meeting for the next one",
        move |graph, _| merge(graph, most_bytes),
    )
}

/// What collectives have alike that can be one.
#[derive(PartialEq)]
struct Alike {
    op: String,
    attrs: Attrs,
    device: DeviceSpec,
}

fn merge(graph: &mut Rewriter<'_>, most_bytes: usize) -> Result<()> {
    let conditional = graph.conditional()?;
    let mut found: Vec<(Alike, Vec<NodeId>)> = Vec::new();
    // In the order in which they were described, and buckets in that in which they become ready.
    for (id, node) in graph.iter() {
        let Some(count) = node.def.joined_by.filter(|_| !conditional.holds(id)) else { continue };
        let mut attrs = node.attrs.clone();
        attrs.remove(count);
        let alike = Alike { op: node.op().to_owned(), attrs, device: node.device.clone() };
        match found.iter_mut().find(|(other, _)| *other == alike) {
            Some((_, ids)) => ids.push(id),
            None => found.push((alike, vec![id])),
        }
    }
    for (alike, ids) in found {
        let mut ids = ids.into_iter();
        let Some(mut last) = ids.next() else { continue };
        for next in ids {
            let is_small = n_bytes(graph, last).is_some_and(|n| n <= most_bytes);
            // One that needs the other's result cannot begin with it.
            let is_apart = || !graph.reaches(&[last], next) && !graph.reaches(&[next], last);
            last = if is_small && is_apart() { join(graph, &alike, last, next)? } else { next };
        }
    }
    Ok(())
}

/// How much a collective exchanges, if that is known.
fn n_bytes(graph: &Rewriter<'_>, id: NodeId) -> Option<usize> {
    let outputs = &graph.node(id)?.outputs;
    outputs.iter().map(|output| Some(output.shape.n_elements()? * output.dtype.size()?)).sum()
}

/// One collective in the place of two, named after the later one.
fn join(graph: &mut Rewriter<'_>, alike: &Alike, first: NodeId, second: NodeId) -> Result<NodeId> {
    let parts: Vec<(NodeId, Vec<Endpoint>, Vec<NodeId>, String)> = [first, second]
        .into_iter()
        .filter_map(|id| Some((id, graph.node(id)?)))
        .map(|(id, node)| (id, node.inputs.to_vec(), node.control_inputs.clone(), node.name.to_string()))
        .collect();
    let inputs: Vec<Endpoint> = parts.iter().flat_map(|(_, inputs, ..)| inputs).copied().collect();
    // Ranks compare names. One of its own is the same on all of them, whatever else passes have added on each one's device.
    let name = parts.last().map_or_else(|| "merged".to_owned(), |(.., name)| format!("{name}_joined"));
    let joined = graph.add(&alike.op, &name, &inputs, alike.attrs.clone())?;
    let before: Vec<NodeId> = parts.iter().flat_map(|(_, _, before, _)| before).copied().collect();
    graph.edit(joined, |node| node.device = alike.device.clone());
    before.into_iter().for_each(|before| graph.order_after(joined, before));
    let mut index = 0;
    for (node, inputs, ..) in &parts {
        for i in 0..inputs.len() as u32 {
            graph.redirect(Endpoint { node: *node, index: i }, Endpoint { node: joined, index })?;
            index += 1;
        }
    }
    graph.merge_all(&[first, second], joined);
    Ok(joined)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_graph::Output;
    use kolo_runtime::{Session, SessionConfig};

    use super::*;
    use crate::Tensor;
    use crate::parallel::World;

    fn all_reduce<'g>(x: Output<'g>, name: &str, reduction: &str) -> Output<'g> {
        let g = x.graph();
        g.op("KoloAllReduce").name(name).inputs([x]).attr("group", "world").attr("reduction", reduction).out()
    }

    /// The collectives of a run after the pass, and its values on one of two ranks.
    fn merged(most_bytes: usize, build: for<'g> fn(&'g kolo_graph::Graph) -> Vec<Output<'g>>) -> (String, Vec<Tensor>) {
        let worlds = World::threads(2).unwrap();
        let rank = |world: World| {
            let g = crate::graph();
            let fetches = build(&g);
            let mut config = world.configure(SessionConfig::default());
            config.passes.push(merge_collectives(most_bytes));
            let session = Session::with_config(&g, config).unwrap();
            let names: Vec<String> = fetches.iter().map(|fetch| fetch.name()).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let report = session.local().unwrap().explain_passes(&names, Some("merge-collectives")).unwrap();
            (report.text.unwrap(), session.run(&fetches, &[], &[]).unwrap())
        };
        let rank = &rank;
        std::thread::scope(|scope| {
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || rank(world))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).next().unwrap()
        })
    }

    fn n_collectives(text: &str) -> usize {
        text.lines().filter(|line| line.contains("= KoloAllReduce")).count()
    }

    #[test]
    fn what_is_small_and_alike_becomes_one_and_means_the_same() {
        fn build(g: &kolo_graph::Graph) -> Vec<Output<'_>> {
            let x = all_reduce(g.constant([1.0f32, 2.0]), "x", "sum");
            let y = all_reduce(g.constant([[3.0f32]]), "y", "sum");
            let mean = all_reduce(g.constant([7.0f32]), "mean", "mean");
            let int = all_reduce(g.constant([7i32]), "int", "sum");
            vec![x, y, mean, int]
        }
        let wanted =
            [Tensor::from([2.0f32, 4.0]), Tensor::from([[6.0f32]]), Tensor::from([7.0f32]), Tensor::from([14i32])];
        for (most_bytes, n) in [(1 << 10, 3), (8, 3), (7, 4), (0, 4)] {
            let (text, values) = merged(most_bytes, build);
            assert_eq!((n_collectives(&text), values.as_slice()), (n, wanted.as_slice()), "{most_bytes} bytes: {text}");
        }
    }

    #[test]
    fn what_needs_the_result_of_another_comes_after_it() {
        fn build(g: &kolo_graph::Graph) -> Vec<Output<'_>> {
            let x = all_reduce(g.constant([1.0f32]), "x", "sum");
            let y = all_reduce(crate::ops::square(x), "y", "sum");
            let z = all_reduce(g.constant([5.0f32]), "z", "sum");
            vec![x, y, z]
        }
        let (text, values) = merged(1 << 10, build);
        assert_eq!(n_collectives(&text), 2, "{text}");
        assert_eq!(values, [Tensor::from([2.0f32]), Tensor::from([8.0f32]), Tensor::from([10.0f32])]);
    }
}
