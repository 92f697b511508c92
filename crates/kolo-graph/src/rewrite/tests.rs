//! What a rewriter promises, on small graphs.

use super::*;
use crate::testing::{graph, registry, while_loop};
use crate::{Graph, Request, prune};

/// Runs `change` on the nodes that `fetches` need; returns the graph after it, or what the check says.
fn rewrite(g: &Graph, fetches: &[&str], change: impl FnOnce(&mut Rewriter<'_>) -> Result<()>) -> Result<String> {
    let nodes = g.snapshot();
    let fetches = fetches.iter().map(|name| nodes.endpoint(name)).collect::<Result<_>>()?;
    let pruned = prune(&nodes, &Request { fetches, ..Request::default() })?;
    let mut n = 0;
    let mut fresh = || {
        n += 1;
        n
    };
    let mut rewriter = Rewriter::of_graph(nodes, &pruned, registry(), &mut fresh);
    change(&mut rewriter)?;
    rewriter.check()?;
    let (nodes, pruned) = rewriter.into_graph();
    let fetched: Vec<String> = pruned.fetches.iter().map(|at| nodes.endpoint_name(*at)).collect();
    let lines = pruned.nodes.iter().map(|id| nodes.line(*id) + "\n");
    Ok(lines.collect::<String>() + &fetched.join(" "))
}

/// `c = a + (-a)`, fetched; `b` is the negation.
fn sum() -> Graph {
    let g = graph();
    let a = g.op("Source").name("a").out();
    let b = g.op("Neg").name("b").input(a).out();
    g.op("Add").name("c").input(a).input(b).build();
    g
}

fn at(rewriter: &Rewriter<'_>, name: &str) -> Endpoint {
    Endpoint { node: rewriter.find(name).unwrap(), index: 0 }
}

#[test]
fn users_follow_every_change() {
    rewrite(&sum(), &["c"], |graph| {
        let (a, b, c) = (at(graph, "a"), at(graph, "b"), at(graph, "c"));
        assert_eq!(graph.readers(a), [(b.node, 0), (c.node, 0)]);
        assert_eq!((graph.sole_reader(b), graph.sole_reader(a), graph.sole_reader(c)), (Some(c.node), None, None));
        let d = graph.add("Neg", "d", &[b], Attrs::default())?;
        assert_eq!(graph.sole_reader(b), None);
        graph.order_after(d, a.node);
        assert_eq!(graph.waiters(a.node), [d]);
        assert!(graph.is_read_only_by(b, |id| id == c.node || id == d) && !graph.is_read_only_by(b, |id| id == d));
        graph.edit(b.node, |node| node.name = "renamed".into());
        assert_eq!((graph.find("renamed"), graph.find("b")), (Some(b.node), None));
        // What waited for the merged node waits for the other; what it read itself is forgotten.
        graph.redirect(b, a)?;
        graph.merge(b.node, d);
        assert_eq!(graph.readers(a), [(c.node, 0), (c.node, 1), (d, 0)]);
        assert!(graph.reaches(&[a.node], d) && !graph.reaches(&[d], a.node));
        Ok(())
    })
    .unwrap();
}

#[test]
fn added_nodes_are_inferred_and_named_afresh() {
    let text = rewrite(&sum(), &["c"], |graph| {
        let c = at(graph, "c");
        let wider = graph.add("Neg", "b", &[c], Attrs::default())?;
        graph.splice(c, wider)
    })
    .unwrap();
    assert_eq!(
        text,
        "a = Source() -> float[2,3]\n\
         b = Neg[T=float](a:0) -> float[2,3]\n\
         c = Add[T=float](a:0, b:0) -> float[2,3]\n\
         b_R1 = Neg[T=float](c:0) -> float[2,3]\n\
         b_R1:0"
    );
}

#[test]
fn a_region_is_cloned_with_its_inner_edges() {
    let text = rewrite(&sum(), &["c"], |graph| {
        let (a, b, c) = (at(graph, "a"), at(graph, "b"), at(graph, "c"));
        let other = graph.add("Source", "other", &[], Attrs::default())?;
        let instead = HashMap::from([(a, Endpoint { node: other, index: 0 })]);
        let copies = graph.clone_region(&[b.node, c.node], &instead, "_again")?;
        graph.redirect(c, Endpoint { node: copies[&c.node], index: 0 })?;
        graph.remove_dead();
        Ok(())
    })
    .unwrap();
    assert_eq!(
        text,
        "other = Source() -> float[2,3]\n\
         b_again = Neg[T=float](other:0) -> float[2,3]\n\
         c_again = Add[T=float](other:0, b_again:0) -> float[2,3]\n\
         c_again:0"
    );
}

#[test]
fn a_region_is_outlined_with_what_it_shares() {
    let g = graph();
    let [a, shared] = ["a", "shared"].map(|name| g.op("Source").name(name).out());
    let first = g.op("Neg").name("first").input(a).build();
    let second = g.op("Add").name("second").input(first.output(0)).input(shared).out();
    let awaited = g.control_dependencies(&[first], || g.op("Neg").name("awaited").input(shared).out());
    g.op("Add").name("end").input(second).input(awaited).build();
    let region = *registry().find("Region").unwrap().0;
    let mut body = String::new();
    let text = rewrite(&g, &["end", "first"], |graph| {
        let ids = ["first", "second"].map(|name| at(graph, name).node);
        let shared = at(graph, "shared").node;
        let outlined = graph.outline(&ids, &|id| id == shared, &region, "region")?;
        graph.remove_dead();
        body.extend(outlined.nodes.iter().map(|(id, _)| outlined.nodes.line(id) + "\n"));
        body += &format!(
            "{:?}",
            (outlined.feeds, outlined.fetches.iter().map(|(i, at)| (*i, at.node.0)).collect::<Vec<_>>())
        );
        Ok(())
    })
    .unwrap();
    // What is awaited is the whole; what is shared is in both.
    assert_eq!(
        text,
        "a = Source() -> float[2,3]\n\
         shared = Source() -> float[2,3]\n\
         awaited = Neg[T=float](shared:0, ^region) -> float[2,3]\n\
         end = Add[T=float](region:1, awaited:0) -> float[2,3]\n\
         region = Region[Tin=[float], Tout=[float, float]](a:0) -> float[2,3], float[2,3]\n\
         end:0 region:0"
    );
    assert_eq!(
        body,
        "first = Neg[T=float](<feed 0>) -> float[2,3]\n\
         shared = Source() -> float[2,3]\n\
         second = Add[T=float](first:0, shared:0) -> float[2,3]\n\
         ([(0, [(#0, 0)])], [(0, 0), (1, 2)])"
    );
    // Something outside lies between the two.
    let error = rewrite(&g, &["end"], |graph| {
        let ids = ["first", "second", "end"].map(|name| at(graph, name).node);
        graph.outline(&ids, &|_| false, &region, "region").map(drop)
    });
    assert!(error.unwrap_err().message().contains("cycle"));
}

#[test]
fn what_a_pass_breaks_is_named() {
    let breaks =
        |change: &dyn Fn(&mut Rewriter<'_>) -> Result<()>| rewrite(&sum(), &["c"], change).unwrap_err().to_string();
    let text = breaks(&|graph| {
        graph.merge(at(graph, "b").node, at(graph, "c").node);
        Ok(())
    });
    assert!(text.contains("'c'") && text.contains("which is not there"), "{text}");
    let text = breaks(&|graph| {
        graph.order_after(at(graph, "a").node, at(graph, "c").node);
        Ok(())
    });
    assert!(text.contains("a cycle that is not a loop"), "{text}");
    let text = breaks(&|graph| {
        graph.edit(at(graph, "b").node, |node| node.outputs[0].dtype = kolo_core::DType::I32);
        Ok(())
    });
    assert!(text.contains("int32") || text.contains("I32"), "{text}");
    let text = breaks(&|graph| {
        graph.edit(at(graph, "b").node, |node| node.outputs[0].shape = kolo_core::PartialShape::new(&[Some(7)]));
        Ok(())
    });
    assert!(text.contains("[7]"), "{text}");
    let text = breaks(&|graph| {
        graph.edit(at(graph, "b").node, |node| node.device = kolo_core::DeviceSpec::parse("/cpu:7").unwrap());
        Ok(())
    });
    assert!(text.contains("asked for"), "{text}");
    let text = breaks(&|graph| {
        graph.edit(at(graph, "b").node, |node| node.name = "a".into());
        Ok(())
    });
    assert!(text.contains("has the name of another node"), "{text}");
    let flag = |graph: &mut Rewriter<'_>| graph.add("Flag", "flag", &[], Attrs::default());
    let text = breaks(&|graph| {
        let flag = flag(graph)?;
        graph.redirect(at(graph, "b"), Endpoint { node: flag, index: 0 })
    });
    assert!(text.contains("b:0 is float and cannot be read from flag:0, which is bool"), "{text}");
}

#[test]
fn loops_are_left_in_one_piece() {
    let g = while_loop("", "");
    let text = rewrite(&g, &["exit"], |graph| {
        graph.remove_dead();
        Ok(())
    })
    .unwrap();
    assert_eq!(text.lines().count(), g.snapshot().len() + 1);
}
