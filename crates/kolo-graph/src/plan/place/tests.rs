//! Tests of [`place`].

use kolo_core::Code;
use proptest::prelude::*;

use super::*;
use crate::testing::{Kernels, devices, graph, while_loop};
use crate::{Graph, LogFormat, Output, log_lines};

/// Places all nodes and compares `name=KIND:ID rule` for each.
fn check(g: &Graph, on: &str, options: &PlaceOptions, expect: &[&str]) {
    let nodes = g.snapshot();
    let placed = place_all(&nodes, on, &HashMap::new(), options).unwrap();
    assert_eq!(describe(&placed), expect);
}

fn place_all<'a>(
    nodes: &'a Nodes,
    on: &str,
    earlier: &HashMap<NodeId, usize>,
    options: &PlaceOptions,
) -> Result<PlacedGraph<'a>> {
    let needed: Vec<NodeId> = nodes.iter().map(|(id, _)| id).collect();
    place(nodes, &needed, &devices(on), &Kernels, earlier, options)
}

fn describe(placed: &PlacedGraph<'_>) -> Vec<String> {
    let describe = |(id, node): (NodeId, &std::sync::Arc<Node>)| {
        let DeviceInfo { name, .. } = placed.device_of(id)?;
        let task = if name.job.as_ref() == "localhost" { String::new() } else { format!("{}{}/", name.job, name.task) };
        Some(format!("{}={task}{}:{} {:?}", node.name, name.kind, name.id, placed.placed(id)?.rule))
    };
    placed.nodes.iter().filter_map(describe).collect()
}

fn error(g: &Graph, on: &str, options: &PlaceOptions) -> Error {
    let nodes = g.snapshot();
    match place_all(&nodes, on, &HashMap::new(), options) {
        Ok(placed) => panic!("placed: {:?}", describe(&placed)),
        Err(error) => error,
    }
}

fn strict() -> PlaceOptions {
    PlaceOptions::default()
}

fn soft() -> PlaceOptions {
    PlaceOptions { placement: Placement::Soft, ..PlaceOptions::default() }
}

fn tf() -> PlaceOptions {
    PlaceOptions { policy: Policy::Heuristic, ..PlaceOptions::default() }
}

fn source<'g>(g: &'g Graph, name: &str) -> Output<'g> {
    g.op("Source").name(name).out()
}

#[test]
fn a_pin_wins_then_the_first_accelerator_then_the_cpu() {
    let g = graph();
    let a = g.device("/cpu:1", || source(&g, "a"));
    let b = source(&g, "b");
    g.op("Neg").name("c").input(b).build();
    g.op("Add").name("d").input(a).input(b).build();
    check(&g, "/cpu:0 /cpu:1", &strict(), &["a=CPU:1 Pinned", "b=CPU:0 Cpu", "c=CPU:0 Cpu", "d=CPU:0 Cpu"]);
    check(
        &g,
        "/cpu:0 /gpu:10 /gpu:2 /cpu:1",
        &strict(),
        &["a=CPU:1 Pinned", "b=GPU:2 Accelerator", "c=CPU:0 Cpu", "d=GPU:2 Accelerator"],
    );
    // Any kind other than CPU is an accelerator; a GPU comes first.
    check(
        &g,
        "/cpu:0 /cpu:1 /device:NPU:0",
        &strict(),
        &["a=CPU:1 Pinned", "b=NPU:0 Accelerator", "c=CPU:0 Cpu", "d=NPU:0 Accelerator"],
    );
}

#[test]
fn a_node_that_was_placed_stays() {
    let g = graph();
    source(&g, "a");
    g.device("/gpu:0", || source(&g, "b"));
    let nodes = g.snapshot();
    let earlier = HashMap::from([(NodeId(0), 0), (NodeId(1), 0)]);
    let placed = place_all(&nodes, "/cpu:0 /gpu:0", &earlier, &strict()).unwrap();
    // A stateless node whose pin says otherwise moves there.
    assert_eq!(describe(&placed), ["a=CPU:0 Earlier", "b=GPU:0 Pinned"]);
    let placed = place_all(&nodes, "/cpu:0 /gpu:0", &earlier, &soft()).unwrap();
    assert_eq!(describe(&placed), ["a=CPU:0 Earlier", "b=CPU:0 Earlier"]);
    assert_eq!(placed.n_fallbacks, 1);
}

#[test]
fn state_does_not_move_off_its_device() {
    let g = graph();
    g.device("/gpu:0", || g.op("Var").name("v").build());
    let nodes = g.snapshot();
    let error = place_all(&nodes, "/cpu:0 /gpu:0", &HashMap::from([(NodeId(0), 0)]), &strict()).err().unwrap();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().starts_with("'v' is pinned to '/device:GPU:0' (pinned at "), "{error}");
    assert!(error.message().contains("holds state on /job:localhost/replica:0/task:0/device:CPU:0"), "{error}");
    let bad = place_all(&nodes, "/cpu:0", &HashMap::from([(NodeId(0), 5)]), &strict()).err().unwrap();
    assert_eq!(bad.code(), Code::Internal);
}

#[test]
fn users_of_a_variable_go_to_it_even_if_pinned_elsewhere() {
    let g = graph();
    let v = g.device("/cpu:1", || g.op("Var").name("v").out());
    let x = source(&g, "x");
    g.device("/gpu:0", || g.op("Assign").name("w").input(v).input(x).build());
    // Reading the value is not holding a reference.
    g.op("Identity").name("read").input(v).build();
    let h = g.device("/cpu:1", || g.op("Handle").name("h").out());
    g.device("/cpu:0", || g.op("Read").name("r").input(h).build());
    check(
        &g,
        "/cpu:0 /cpu:1 /gpu:0",
        &strict(),
        &[
            "v=CPU:1 Pinned",
            "x=GPU:0 Accelerator",
            "w=CPU:1 Colocated",
            "read=GPU:0 Accelerator",
            "h=CPU:1 Pinned",
            "r=CPU:1 Colocated",
        ],
    );
}

#[test]
fn an_unpinned_variable_suits_all_its_users() {
    let g = graph();
    let v = g.op("Var").name("v").attr("dtype", DType::I32).out();
    let x = g.op("Integer").name("x").out();
    g.op("Assign").name("w").input(v).input(x).build();
    check(&g, "/cpu:0 /gpu:0", &strict(), &["v=CPU:0 Cpu", "x=GPU:0 Accelerator", "w=CPU:0 Colocated"]);
    // Users that this run does not need count too: the next run may need them.
    let g = graph();
    let v = g.op("Var").name("v").out();
    let x = source(&g, "x");
    g.device("/cpu:0", || g.op("Assign").name("w").input(v).input(x).build());
    let nodes = g.snapshot();
    let placed = place(&nodes, &[NodeId(0)], &devices("/cpu:0 /gpu:0"), &Kernels, &HashMap::new(), &strict()).unwrap();
    assert_eq!(describe(&placed), ["v=CPU:0 Colocated"]);
}

#[test]
fn state_pinned_to_two_places_is_refused() {
    let g = graph();
    let v = g.device("/cpu:1", || g.op("Var").name("v").out());
    let w = g.device("/cpu:0", || g.op("Var").name("w").out());
    g.op("Assign").input(v).input(w).build();
    // A variable read as a value may be anywhere.
    check(&g, "/cpu:0 /cpu:1", &strict(), &["v=CPU:1 Pinned", "w=CPU:0 Pinned", "Assign=CPU:1 Colocated"]);
    let mut nodes = g.snapshot();
    nodes.node_mut(NodeId(2)).ref_inputs[1] = true;
    let error = place_all(&nodes, "/cpu:0 /cpu:1", &HashMap::new(), &strict()).err().unwrap();
    assert!(error.message().contains("incompatible resource devices"), "{error}");
    assert!(error.message().contains("The edge src node is Var 'w'"), "{error}");
}

#[test]
fn colocation_groups_share_a_device() {
    let g = graph();
    let a = g.device("/cpu:1", || source(&g, "a"));
    g.colocate_with(a.operation(), || source(&g, "b"));
    // Two that name a group which is no node.
    for name in ["c", "d"] {
        g.op("Source").name(name).attr("_class", vec!["loc:@ghost", "other"]).build();
    }
    let options = strict();
    check(&g, "/cpu:0 /cpu:1", &options, &["a=CPU:1 Pinned", "b=CPU:1 Colocated", "c=CPU:0 Cpu", "d=CPU:0 Colocated"]);
}

#[test]
fn colocation_that_contradicts_pins_is_refused_or_dropped() {
    let g = graph();
    g.device("/cpu:1", || source(&g, "a"));
    g.device("/cpu:0", || g.op("Source").name("b").attr("_class", vec!["loc:@a"]).build());
    let refused = error(&g, "/cpu:0 /cpu:1", &strict());
    assert!(refused.message().starts_with("Cannot colocate nodes Source 'a'"), "{refused}");
    assert!(refused.message().contains("incompatible ids"), "{refused}");
    check(&g, "/cpu:0 /cpu:1", &soft(), &["a=CPU:1 Pinned", "b=CPU:0 Pinned"]);
}

#[test]
fn colocated_nodes_need_one_device_with_kernels_for_all() {
    let g = graph();
    let a = source(&g, "a");
    g.op("Neg").name("b").input(a).attr("_class", vec!["loc:@a"]).build();
    check(&g, "/cpu:0 /gpu:0", &strict(), &["a=CPU:0 Cpu", "b=CPU:0 Colocated"]);
    let refused = error(&g, "/gpu:0", &strict());
    assert!(refused.message().contains("No OpKernel was registered to support Op 'Neg'"), "{refused}");
}

#[test]
fn a_missing_kernel_is_explained() {
    let g = graph();
    let line = line!() + 1;
    g.device("/gpu:0", || g.op("Var").name("Variable").attr("dtype", DType::I32).build());
    let refused = error(&g, "/cpu:0 /gpu:0", &strict());
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_eq!(
        refused.message(),
        format!(
            "Cannot assign a device to node 'Variable': Could not satisfy explicit device specification '/device:GPU:0' \
             because no supported kernel for GPU devices is available: Var of int32 has kernels for: CPU; GPU with T in \
             {{float}}; devices that can run it: /job:localhost/replica:0/task:0/device:CPU:0; a literal such as 3 is \
             int32, write 3.0 for float, which has a kernel there (pinned at {}:{line})",
            file!()
        )
    );
    assert_eq!(refused.node().map(|node| node.op.as_str()), Some("Var"));
}

#[test]
fn a_missing_kernel_of_a_colocated_node_names_that_node() {
    let g = graph();
    let a = g.device("/gpu:0", || source(&g, "a"));
    g.op("Neg").name("b").input(a).attr("_class", vec!["loc:@a"]).build();
    let refused = error(&g, "/cpu:0 /gpu:0", &strict());
    let expect = "Cannot assign a device to node 'b': Could not satisfy explicit device specification '/device:GPU:0', \
                  where it must be with 'a' because no supported kernel for GPU devices is available: Neg of float has \
                  kernels for: CPU; devices that can run it: /job:localhost/replica:0/task:0/device:CPU:0 (pinned at";
    assert!(refused.message().starts_with(expect), "{refused}");
}

#[test]
fn a_missing_device_is_explained() {
    let g = graph();
    g.device("/gpu:7", || source(&g, "a"));
    let refused = error(&g, "/gpu:0 /cpu:0", &strict());
    let expect = "Cannot assign a device to node 'a': Could not satisfy explicit device specification '/device:GPU:7': \
                  Source {{node a}} was explicitly assigned to /device:GPU:7 but available devices are [ \
                  /job:localhost/replica:0/task:0/device:CPU:0, /job:localhost/replica:0/task:0/device:GPU:0 ]. Make sure \
                  the device specification refers to a valid device. (pinned at ";
    assert!(refused.message().starts_with(expect), "{refused}");
}

#[test]
fn soft_placement_falls_back_and_counts() {
    let g = graph();
    let a = g.device("/gpu:0", || source(&g, "a"));
    g.device("/gpu:0", || g.op("Neg").name("b").input(a).build());
    g.device("/gpu:7", || g.op("Neg").name("c").input(a).build());
    g.device("/gpu:7", || source(&g, "d"));
    let expect =
        &["a=GPU:0 Pinned", "b=CPU:0 SoftMissingKernel", "c=CPU:0 SoftMissingDevice", "d=GPU:0 SoftMissingDevice"];
    check(&g, "/cpu:0 /gpu:0", &soft(), expect);
    let nodes = g.snapshot();
    let placed = place_all(&nodes, "/cpu:0 /gpu:0", &HashMap::new(), &soft()).unwrap();
    assert_eq!(placed.n_fallbacks, 3);
    assert_eq!(placed.placed(NodeId(1)).unwrap().wish.to_string(), "/device:GPU:0");

    let options = PlaceOptions { max_fallbacks: Some(2), ..soft() };
    let refused = error(&g, "/cpu:0 /gpu:0", &options);
    let expect = "3 nodes fell back to another device, at most 2 may: 'b' from '/device:GPU:0' (pinned at ";
    assert!(refused.message().starts_with(expect), "{refused}");
    assert!(refused.message().contains("'c' from '/device:GPU:7' (pinned at "), "{refused}");

    // A task that does not exist is not a matter of softness.
    let g = graph();
    g.device("/job:ps", || source(&g, "a"));
    assert!(error(&g, "/cpu:0", &soft()).message().contains("available devices are"));
}

#[test]
fn tensorflows_heuristics_are_a_policy() {
    let g = graph();
    let c = source(&g, "c");
    let unused = source(&g, "unused");
    let n = g.op("Neg").name("n").input(c).out();
    g.op("Shape").name("s").input(n).build();
    g.op("NoOp").name("end").control_input(unused.operation()).control_input(n.operation()).build();
    let on = "/cpu:0 /gpu:0";
    check(
        &g,
        on,
        &strict(),
        &[
            "c=GPU:0 Accelerator",
            "unused=GPU:0 Accelerator",
            "n=CPU:0 Cpu",
            "s=GPU:0 Accelerator",
            "end=GPU:0 Accelerator",
        ],
    );
    check(
        &g,
        on,
        &tf(),
        &[
            "c=CPU:0 FollowsConsumers",
            "unused=GPU:0 FollowsConsumers",
            "n=CPU:0 Cpu",
            "s=CPU:0 FollowsInput",
            "end=GPU:0 Accelerator",
        ],
    );
}

#[test]
fn loop_plumbing_goes_with_the_merge() {
    let g = while_loop("/cpu:1", "/cpu:0");
    let nodes = g.snapshot();
    let mut moved = nodes.clone();
    // Whatever the plumbing asks for: a transfer to the merge could never end.
    for name in ["enter", "next"] {
        moved.node_mut(nodes.find(name).unwrap()).device = DeviceSpec::parse("/cpu:0").unwrap();
    }
    let placed = place_all(&moved, "/cpu:0 /cpu:1", &HashMap::new(), &strict()).unwrap();
    let merge = placed.device_of(nodes.find("merge").unwrap());
    assert_eq!(placed.device_of(nodes.find("enter").unwrap()), merge);
    assert_eq!(placed.device_of(nodes.find("next").unwrap()), merge);

    let g = while_loop("", "");
    let nodes = g.snapshot();
    let mut moved = nodes.clone();
    moved.node_mut(nodes.find("exit").unwrap()).device = DeviceSpec::parse("/cpu:1").unwrap();
    let placed = place_all(&moved, "/cpu:0 /cpu:1", &HashMap::new(), &tf()).unwrap();
    let exit = placed.placed(nodes.find("exit").unwrap()).unwrap();
    assert_eq!((exit.device, exit.rule), (0, Rule::FollowsInput));
}

#[test]
fn the_clients_task_comes_first_among_equals() {
    let g = graph();
    source(&g, "a");
    g.device("/cpu:0", || source(&g, "b"));
    g.device("/job:ps", || source(&g, "c"));
    g.device("/job:worker", || source(&g, "d"));
    let on = "/job:ps/task:0/cpu:0 /job:worker/task:10/cpu:0 /job:worker/task:2/cpu:0";
    let own = PlaceOptions { client_device: 1, ..strict() };
    check(
        &g,
        on,
        &own,
        &["a=worker10/CPU:0 Cpu", "b=worker10/CPU:0 Pinned", "c=ps0/CPU:0 Pinned", "d=worker10/CPU:0 Pinned"],
    );
    let text = PlaceOptions { client_device: 2, order: Order::Text, ..strict() };
    check(&g, on, &text, &["a=ps0/CPU:0 Cpu", "b=ps0/CPU:0 Pinned", "c=ps0/CPU:0 Pinned", "d=worker10/CPU:0 Pinned"]);
}

#[test]
fn an_op_without_any_kernel_is_explained() {
    let g = graph();
    g.op("Flag").name("f").build();
    let refused = error(&g, "/cpu:0 /gpu:0", &strict());
    let expect = "Cannot assign a device to node 'f': No OpKernel was registered to support Op 'Flag'";
    assert!(refused.message().starts_with(expect), "{refused}");
    assert!(error(&g, "", &strict()).message().contains("Cannot assign a device"));
}

#[test]
fn placements_are_logged_as_tensorflow_does() {
    let g = graph();
    source(&g, "a");
    let nodes = g.snapshot();
    let placed = place_all(&nodes, "/cpu:0", &HashMap::new(), &strict()).unwrap();
    assert_eq!(log_lines(&placed, LogFormat::New), ["a: (Source): /job:localhost/replica:0/task:0/device:CPU:0"]);
    assert_eq!(log_lines(&placed, LogFormat::Old), ["a: /job:localhost/replica:0/task:0/cpu:0"]);
}

proptest! {
    /// Random variables, users, groups and pins: each needed node gets one device that has a kernel, sets stay together,
    /// the answer is the same twice, and nothing panics.
    #[test]
    fn placement_is_total_deterministic_and_keeps_sets_together(
        recipe in proptest::collection::vec((0usize..6, any::<prop::sample::Index>(), 0usize..8), 1..30),
        is_soft in any::<bool>(),
        policy in any::<bool>(),
    ) {
        let g = graph();
        for (i, (kind, pick, pin)) in recipe.iter().enumerate() {
            let pin = ["", "", "", "", "/cpu:0", "/cpu:1", "/gpu:0", "/gpu:9"][*pin];
            let vars: Vec<Output> = (0..i).map(|j| g.operation(&format!("n{j}")).unwrap().output(0)).filter(|o| o.is_ref()).collect();
            let earlier = if i == 0 { None } else { Some(g.operation(&format!("n{}", pick.index(i))).unwrap().output(0)) };
            let name = format!("n{i}");
            g.device(pin, || match (kind, earlier) {
                (0, _) | (_, None) => g.op("Var").name(&name).build(),
                (1, Some(x)) if !vars.is_empty() => g.op("Assign").name(&name).input(vars[pick.index(vars.len())]).input(x).build(),
                (2, Some(x)) => g.op("Neg").name(&name).input(x).build(),
                (3, Some(x)) => g.op("Identity").name(&name).input(x).attr("_class", vec![format!("loc:@n{}", pick.index(i))]).build(),
                (_, Some(x)) => g.op("Identity").name(&name).input(x).build(),
            });
        }
        g.check().unwrap();
        let nodes = g.snapshot();
        let options = PlaceOptions {
            placement: if is_soft { Placement::Soft } else { Placement::Strict },
            policy: if policy { Policy::Heuristic } else { Policy::Simple },
            ..PlaceOptions::default()
        };
        let on = "/cpu:0 /cpu:1 /gpu:0 /gpu:1";
        let first = place_all(&nodes, on, &HashMap::new(), &options);
        let second = place_all(&nodes, on, &HashMap::new(), &options);
        match (first, second) {
            (Ok(placed), Ok(again)) => {
                prop_assert_eq!(&placed.placement, &again.placement);
                for (id, node) in nodes.iter() {
                    let device = placed.device_of(id).unwrap();
                    prop_assert!(Kernels.has_kernel(node, &device.name));
                    let rule = placed.placed(id).unwrap().rule;
                    prop_assert!(rule != Rule::Pinned || node.device.matches(&device.name));
                    for (i, at) in node.inputs.iter().enumerate().filter(|(i, _)| node.ref_inputs[*i]) {
                        prop_assert_eq!(placed.device_of(at.node), Some(device), "input {} of {}", i, node.name);
                    }
                    if !is_soft {
                        // A leader that names a group itself is not in its own.
                        for leader in node.colocation_groups().map(|group| nodes.find(group).unwrap()) {
                            let follows = nodes.node(leader).colocation_groups().next().is_some();
                            prop_assert!(follows || placed.device_of(leader) == Some(device));
                        }
                    }
                }
                // What was placed once stays there.
                let earlier = nodes.iter().map(|(id, _)| (id, placed.placed(id).unwrap().device)).collect();
                let later = place_all(&nodes, on, &earlier, &options).unwrap();
                for (id, _) in nodes.iter() {
                    prop_assert_eq!(placed.placed(id).unwrap().device, later.placed(id).unwrap().device);
                }
            }
            (Err(one), Err(two)) => prop_assert_eq!(one.message(), two.message()),
            _ => prop_assert!(false, "placed once, refused once"),
        }
    }
}
