//! The pass `order-collectives`: ranks begin the collectives of a graph in one order, which its edges leave open.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use kolo_core::{DType, Tensor};
use kolo_graph::{Graph, Output};
use kolo_runtime::collective::{Communicator, CommunicatorOptions, Group};
use kolo_runtime::{Session, SessionConfig};

fn all_reduce<'g>(g: &'g Graph, x: Output<'g>, name: &str, group: &str) -> Output<'g> {
    let op = g.op("KoloAllReduce").name(name).inputs([x]);
    op.attr("group", group).attr("reduction", "sum").out()
}

fn neg<'g>(g: &'g Graph, x: Output<'g>, n: usize) -> Output<'g> {
    (0..n).fold(x, |x, _| g.op("Neg").input(x).out())
}

/// The line of a node in the graph after the pass.
fn line_of(text: &str, name: &str) -> String {
    text.lines()
        .find(|line| line.contains(&format!("{name} ")))
        .unwrap_or_else(|| panic!("{name} in {text}"))
        .to_owned()
}

#[test]
fn what_is_ready_first_comes_first_and_branches_are_left_alone() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [None]);
    let late = all_reduce(&g, neg(&g, x, 5), "late", "a");
    let early = all_reduce(&g, neg(&g, x, 1), "early", "a");
    let middle = all_reduce(&g, neg(&g, x, 3), "middle", "a");
    let other = all_reduce(&g, neg(&g, x, 2), "other", "b");
    let flag = g.placeholder::<bool>("flag", [0; 0]);
    let taken = || vec![all_reduce(&g, neg(&g, x, 2), "in_branch", "a")];
    let branch = g.cond(flag, taken, || vec![neg(&g, x, 1)]).unwrap()[0];
    let fetches = [late, early, middle, other, branch].map(|output| output.name());
    let names: Vec<&str> = fetches.iter().map(String::as_str).collect();
    let session = Session::new(&g).unwrap();
    let text = session.local().unwrap().explain_passes(&names, Some("order-collectives")).unwrap().text.unwrap();
    assert!(!line_of(&text, "early").contains('^'), "{text}");
    assert!(line_of(&text, "middle").contains("^early"), "{text}");
    assert!(line_of(&text, "late").contains("^middle"), "{text}");
    assert!(!line_of(&text, "other").contains('^'), "{text}");
    for name in ["early", "middle", "late"] {
        assert!(!line_of(&text, "in_branch").contains(&format!("^{name}")), "{text}");
        assert!(!line_of(&text, name).contains("in_branch"), "{text}");
    }
}

/// Many collectives that do not depend on each other, begun by several threads, on ranks that describe the same graph.
#[test]
fn ranks_never_differ_in_their_order() {
    let options = CommunicatorOptions::default();
    let ranks = Communicator::in_process(2, &options).unwrap();
    std::thread::scope(|scope| {
        for rank in ranks {
            scope.spawn(move || {
                let (n, group) = (rank.rank() as f32, Group::new(rank).unwrap());
                let g = kolo_ops::graph();
                let x = g.constant([n + 1.0, 2.0]);
                let sums: Vec<Output<'_>> = (0..12)
                    .map(|i| {
                        // Large enough that several threads join the step.
                        let wide = g.op("Fill").inputs([g.constant([70_000i32]), g.constant(1.0f32)]).out();
                        let sum = g.op("Sum").inputs([wide, g.constant([0i32])]).attr("Tidx", DType::I32).out();
                        let mine = g.op("Mul").inputs([x, sum]).out();
                        all_reduce(&g, mine, &format!("sum_{i}"), "all")
                    })
                    .collect();
                let config = SessionConfig { inter_op_parallelism_threads: 3, ..SessionConfig::default() };
                config.groups.insert("all", group);
                let session = Session::with_config(&g, config).unwrap();
                for _ in 0..30 {
                    for sum in session.run(&sums, &[], &[]).unwrap() {
                        assert_eq!(sum, Tensor::from([210_000.0f32, 280_000.0]));
                    }
                }
            });
        }
    });
}
