//! Tests of [`partition`].

use proptest::prelude::*;

use super::*;
use crate::testing::{Kernels, devices, graph, registry, while_loop};
use crate::{Graph, PlaceOptions, Request, place, prune};

/// Plans a run that fetches these endpoints and feeds those.
fn plan(nodes: &Nodes, on: &str, feeds: &str, fetches: &str, options: &PartitionOptions<'_>) -> Result<Vec<Partition>> {
    let endpoints = |names: &str| names.split_whitespace().map(|name| nodes.endpoint(name).unwrap()).collect();
    let request = Request { feeds: endpoints(feeds), fetches: endpoints(fetches), targets: vec![] };
    plan_request(nodes, on, &request, options)
}

fn plan_request(nodes: &Nodes, on: &str, request: &Request, options: &PartitionOptions<'_>) -> Result<Vec<Partition>> {
    let pruned = prune(nodes, request)?;
    let earlier = HashMap::new();
    let placed = place(nodes, &pruned.nodes, &devices(on), &Kernels, &earlier, &PlaceOptions::default())?;
    let mut counter = 0;
    let mut fresh = || {
        counter += 1;
        counter - 1
    };
    partition(&placed, &pruned, registry(), options, &mut fresh)
}

/// The partitions as text, shortened: devices as `KIND:ID`, no attributes but those that matter here.
fn text(partitions: &[Partition]) -> String {
    let mut out = String::new();
    for part in partitions {
        out += &format!("--- {}\n", part.device);
        for (_, node) in part.nodes.iter() {
            let data = node.inputs.iter().map(|&at| match at.feed() {
                Some(feed) => format!("<feed {feed}>"),
                None => part.nodes.endpoint_name(at),
            });
            let control = node.control_inputs.iter().map(|&id| format!("^{}", part.nodes.node(id).name));
            let inputs: Vec<String> = data.chain(control).collect();
            let edge = node.attrs.str("tensor_name").map_or(String::new(), |name| format!(" [{name}]"));
            out += &format!("{} = {}({}){edge}\n", node.name, node.op(), inputs.join(", "));
        }
        for (feed, consumers) in &part.feeds {
            let consumers: Vec<String> =
                consumers.iter().map(|(id, i)| format!("{}.{i}", part.nodes.node(*id).name)).collect();
            out += &format!("feed {feed} -> {}\n", consumers.join(" "));
        }
        for (fetch, at) in &part.fetches {
            out += &format!("fetch {fetch} <- {}\n", part.nodes.endpoint_name(*at));
        }
    }
    out
}

fn check(g: &Graph, on: &str, feeds: &str, fetches: &str, expect: &str) {
    let nodes = g.snapshot();
    let partitions = plan(&nodes, on, feeds, fetches, &PartitionOptions::default()).unwrap();
    let expect: String = expect.lines().map(|line| format!("{}\n", line.trim())).skip(1).collect();
    assert_eq!(text(&partitions).trim(), expect.trim());
}

#[test]
fn one_device_needs_no_transfer() {
    let g = graph();
    let x = g.op("Placeholder").name("x").out();
    let b = g.op("Source").name("b").out();
    g.op("Add").name("y").input(x).input(b).build();
    check(
        &g,
        "/cpu:0 /cpu:1",
        "x",
        "y x b",
        "
        --- 0
        b = Source()
        y = Add(<feed 0>, b:0)
        feed 0 -> y.0
        fetch 0 <- y:0
        fetch 2 <- b:0",
    );
}

#[test]
fn consumers_on_one_device_share_a_transfer() {
    let g = graph();
    let a = g.op("Source").name("a").out();
    let (b, c) = g.device("/cpu:1", || (g.op("Neg").name("b").input(a).out(), g.op("Neg").name("c").input(a).out()));
    g.op("AddN").name("d").input(a).input(b).input(c).build();
    check(
        &g,
        "/cpu:0 /cpu:1",
        "",
        "d",
        "
        --- 0
        a = Source()
        a_G0 = _Send(a:0) [edge_0_a]
        b_G3 = _Recv() [edge_1_b]
        c_G5 = _Recv() [edge_2_c]
        d = AddN(a:0, b_G3:0, c_G5:0)
        fetch 0 <- d:0
        --- 1
        a_G1 = _Recv() [edge_0_a]
        b = Neg(a_G1:0)
        c = Neg(a_G1:0)
        b_G2 = _Send(b:0) [edge_1_b]
        c_G4 = _Send(c:0) [edge_2_c]",
    );
    let partitions = plan(&g.snapshot(), "/cpu:0 /cpu:1", "", "d", &PartitionOptions::default()).unwrap();
    let a = Endpoint { node: NodeId(0), index: 0 };
    let transfer = &partitions[0].transfers[0];
    assert_eq!(*transfer, Transfer { send: NodeId(1), source: Some(a), to: 1, n_bytes: Some(24), n_consumers: 2 });
    let send = partitions[0].nodes.node(transfer.send);
    assert_eq!(
        partitions[0].nodes.to_string().lines().nth(1).unwrap(),
        "a_G0 = _Send[T=float, client_terminated=false, recv_device=\"/job:localhost/replica:0/task:0/device:CPU:1\", \
         send_device=\"/job:localhost/replica:0/task:0/device:CPU:0\", send_device_incarnation=1, \
         tensor_name=\"edge_0_a\"](a:0) @ /job:localhost/replica:0/task:0/device:CPU:0"
    );
    assert_eq!(send.def.flow, Flow::Transfer);
}

#[test]
fn a_control_edge_sends_an_empty_tensor() {
    let g = graph();
    let a = g.op("NoOp").name("a").build();
    g.device("/cpu:1", || g.op("Source").name("b").control_input(a).build());
    g.device("/cpu:1", || g.op("NoOp").name("end").control_input(a).build());
    let nodes = g.snapshot();
    let request = Request { targets: vec![NodeId(1), NodeId(2)], ..Request::default() };
    let partitions = plan_request(&nodes, "/cpu:0 /cpu:1", &request, &PartitionOptions::default()).unwrap();
    assert_eq!(
        text(&partitions),
        "--- 0\na = NoOp()\na_G0 = Const(^a)\na_G1 = _Send(a_G0:0) [edge_0_a]\n\
         --- 1\na_G2 = _Recv() [edge_0_a]\na_G3 = Identity(a_G2:0)\nb = Source(^a_G3)\nend = NoOp(^a_G3)\n"
    );
    assert_eq!(partitions[0].transfers[0].n_bytes, Some(0));
}

#[test]
fn between_tasks_a_value_carries_the_control_edges_of_its_node() {
    let g = graph();
    let x = g.op("Source").name("x").out();
    let alone = g.op("Source").name("alone").build();
    g.device("/job:b", || {
        // The control edge comes first, so it cannot lean on a transfer that is there already.
        g.op("NoOp").name("waits").control_input(x.operation()).control_input(alone).build();
        g.op("Neg").name("reads").input(x).build();
    });
    let nodes = g.snapshot();
    let targets = ["waits", "reads"].map(|name| nodes.find(name).unwrap()).to_vec();
    let request = Request { targets, ..Request::default() };
    let by_task = PartitionOptions { granularity: Granularity::Task, ..PartitionOptions::default() };
    let partitions = plan_request(&nodes, "/job:a/task:0/cpu:0 /job:b/task:0/cpu:0", &request, &by_task).unwrap();
    let sent: Vec<_> = partitions[0].transfers.iter().map(|transfer| (transfer.source, transfer.n_consumers)).collect();
    let x = x.endpoint();
    assert_eq!(sent, [(Some(x), 2), (None, 1)], "{}", text(&partitions));
    // A receive of a dead value is not dead itself, so nothing may wait for it.
    let nodes = &partitions[1].nodes;
    let waited = nodes.node(nodes.find("waits").unwrap()).control_inputs.iter().map(|&id| nodes.node(id).op());
    assert_eq!(waited.collect::<Vec<_>>(), ["Identity", "Identity"], "{}", text(&partitions));
}

#[test]
fn a_fed_value_goes_to_every_device_that_uses_it() {
    let g = graph();
    let x = g.op("Placeholder").name("x").out();
    g.op("Neg").name("a").input(x).build();
    g.device("/cpu:1", || g.op("Add").name("b").input(x).input(x).control_input(x.operation()).build());
    check(
        &g,
        "/cpu:0 /cpu:1",
        "x",
        "a b",
        "
        --- 0
        a = Neg(<feed 0>)
        feed 0 -> a.0
        fetch 0 <- a:0
        --- 1
        b = Add(<feed 0>, <feed 0>)
        feed 0 -> b.0 b.1
        fetch 1 <- b:0",
    );
}

#[test]
fn a_reference_is_read_after_the_other_inputs_and_not_shared() {
    let g = graph();
    let v = g.device("/cpu:0", || g.op("Var").name("v").out());
    let end = g.device("/cpu:1", || {
        let x = g.op("Source").name("x").out();
        let init = g.op("NoOp").name("init").build();
        let a = g.op("Add").name("a").input(v).input(x).control_input(init).out();
        g.op("Add").name("b").input(v).input(a).out()
    });
    assert!(end.is_valid());
    check(
        &g,
        "/cpu:0 /cpu:1",
        "",
        "b",
        "
        --- 0
        v = Var()
        v_G0 = _Send(v:0) [edge_0_v]
        v_G2 = _Send(v:0) [edge_1_v]
        --- 1
        x = Source()
        init = NoOp()
        v_G1 = _Recv(^x, ^init) [edge_0_v]
        a = Add(v_G1:0, x:0, ^init)
        v_G3 = _Recv(^a) [edge_1_v]
        b = Add(v_G3:0, a:0)
        fetch 0 <- b:0",
    );
}

#[test]
fn a_reference_that_is_held_cannot_leave() {
    let g = graph();
    let v = g.op("Var").name("v").out();
    let x = g.op("Source").name("x").out();
    let w = g.op("Assign").name("w").input(v).input(x).out();
    let nodes = g.snapshot();
    let pruned = prune(&nodes, &Request { fetches: vec![w.endpoint()], ..Request::default() }).unwrap();
    let mut placed =
        place(&nodes, &pruned.nodes, &devices("/cpu:0 /cpu:1"), &Kernels, &HashMap::new(), &PlaceOptions::default())
            .unwrap();
    placed.placement[2].as_mut().unwrap().device = 1;
    let error = partition(&placed, &pruned, registry(), &PartitionOptions::default(), &mut || 0).err().unwrap();
    assert!(error.message().contains("a reference cannot leave its device"), "{error}");
}

#[test]
fn a_task_keeps_the_edges_between_its_devices() {
    let g = graph();
    let a = g.device("/job:ps/cpu:0", || g.op("Source").name("a").out());
    let b = g.device("/job:worker/cpu:0", || g.op("Neg").name("b").input(a).out());
    g.device("/job:worker/cpu:1", || g.op("Add").name("c").input(b).input(a).build());
    let on = "/job:ps/cpu:0 /job:worker/cpu:0 /job:worker/cpu:1";
    let options = PartitionOptions { granularity: Granularity::Task, ..PartitionOptions::default() };
    let partitions = plan(&g.snapshot(), on, "", "c", &options).unwrap();
    assert_eq!(
        text(&partitions),
        "--- 0\na = Source()\na_S0 = _Send(a:0) [edge_0_a]\n\
         --- 1\na_S1 = _Recv() [edge_0_a]\nb = Neg(a_S1:0)\nc = Add(b:0, a_S1:0)\nfetch 0 <- c:0\n"
    );
    // The worker cuts its own part again.
    let part = &partitions[1].nodes;
    let again = plan(part, on, "", "c", &PartitionOptions { loops: LoopControl::Present, ..Default::default() });
    assert_eq!(
        text(&again.unwrap()),
        "--- 1\na_S1 = _Recv() [edge_0_a]\nb = Neg(a_S1:0)\nb_G0 = _Send(b:0) [edge_0_b]\n\
         a_S1_G2 = _Send(a_S1:0) [edge_1_a_S1]\n\
         --- 2\nb_G1 = _Recv() [edge_0_b]\na_S1_G3 = _Recv() [edge_1_a_S1]\nc = Add(b_G1:0, a_S1_G3:0)\nfetch 0 <- c:0\n"
    );
}

#[test]
fn host_memory_is_a_border_too() {
    struct Hosts;
    impl KernelSupport for Hosts {
        fn has_kernel(&self, _: &Node, _: &kolo_core::DeviceName) -> bool {
            true
        }
        fn kernels(&self, _: &Node) -> Vec<String> {
            vec![]
        }
        fn host_inputs(&self, node: &Node, _: &kolo_core::DeviceName) -> Vec<bool> {
            if node.op() == "Add" { vec![false, true] } else { vec![] }
        }
        fn host_outputs(&self, node: &Node, _: &kolo_core::DeviceName) -> Vec<bool> {
            vec![node.op() == "Shape"]
        }
    }
    let g = graph();
    let a = g.device("/cpu:0", || g.op("Integer").name("a").out());
    let s = g.device("/gpu:0", || g.op("Shape").name("s").input(a).out());
    // The first input is in the device's memory, the second in the host's, where the shape already is.
    g.device("/gpu:0", || g.op("Add").name("c").input(s).input(s).build());
    let nodes = g.snapshot();
    let request = Request { targets: vec![NodeId(2)], ..Request::default() };
    let pruned = prune(&nodes, &request).unwrap();
    let placed =
        place(&nodes, &pruned.nodes, &devices("/cpu:0 /gpu:0"), &Hosts, &HashMap::new(), &PlaceOptions::default())
            .unwrap();
    let mut n = 0;
    let mut fresh = || {
        n += 1;
        n
    };
    let options = PartitionOptions { support: Some(&Hosts), ..PartitionOptions::default() };
    let partitions = partition(&placed, &pruned, registry(), &options, &mut fresh).unwrap();
    assert_eq!(
        text(&partitions),
        "--- 0\na = Integer()\na_G1 = _Send(a:0) [edge_0_a]\n\
         --- 1\na_G2 = _Recv() [edge_0_a]\ns = Shape(a_G2:0)\ns_G3 = _HostSend(s:0) [edge_1_s]\n\
         s_G4 = _Recv(^s_G3) [edge_1_s]\nc = Add(s_G4:0, s:0)\n"
    );
}

#[test]
fn a_loop_over_two_devices_gets_control_loops() {
    // The body runs on the second device, all else on the first.
    let g = while_loop("/cpu:0", "/cpu:1");
    check(
        &g,
        "/cpu:0 /cpu:1",
        "",
        "exit",
        "
        --- 0
        zero = Source()
        enter = Enter(zero:0)
        merge = Merge(enter:0, next:0)
        less = Less(merge:0, merge:0)
        cond = LoopCond(less:0)
        switch = Switch(merge:0, cond:0)
        switch_G4 = _Send(switch:1) [edge_0_switch]
        exit = Exit(switch:0)
        cond_G8 = _Send(cond:0) [edge_2_cond]
        _cloop2 = Const()
        _cloop3/Enter = Enter(_cloop2:0)
        _cloop3/Merge = Merge(_cloop3/Enter:0, _cloop3/Next:0)
        add_G7 = _Recv(^_cloop3/Merge) [edge_1_add]
        next = NextIteration(add_G7:0)
        _cloop3/Switch = Switch(_cloop3/Merge:0, cond:0)
        _cloop3/Next = NextIteration(_cloop3/Switch:1)
        fetch 0 <- exit:0
        --- 1
        _cloop0 = Const()
        _cloop1/Enter = Enter(_cloop0:0)
        _cloop1/Merge = Merge(_cloop1/Enter:0, _cloop1/Next:0)
        switch_G5 = _Recv(^_cloop1/Merge) [edge_0_switch]
        add = Add(switch_G5:0, switch_G5:0)
        add_G6 = _Send(add:0) [edge_1_add]
        cond_G9 = _Recv(^_cloop1/Merge) [edge_2_cond]
        _cloop1/Switch = Switch(_cloop1/Merge:0, cond_G9:0)
        _cloop1/Next = NextIteration(_cloop1/Switch:1)",
    );
    let partitions = plan(&g.snapshot(), "/cpu:0 /cpu:1", "", "exit", &PartitionOptions::default()).unwrap();
    let enter = partitions[1].nodes.node(partitions[1].nodes.find("_cloop1/Enter").unwrap());
    assert_eq!(enter.attrs.str("frame_name"), Ok("f"));
    assert_eq!(enter.attrs.int("parallel_iterations"), Ok(7));
}

#[test]
fn a_loop_within_a_task_keeps_its_triggers_for_the_worker() {
    let g = while_loop("/cpu:0", "/cpu:1");
    let on = "/cpu:0 /cpu:1";
    let task = PartitionOptions { granularity: Granularity::Task, ..PartitionOptions::default() };
    let whole = plan(&g.snapshot(), on, "", "exit", &task).unwrap();
    assert_eq!(whole.len(), 1);
    let nodes = &whole[0].nodes;
    let add = nodes.node(nodes.find("add").unwrap());
    assert!(add.control_inputs.iter().any(|&id| nodes.node(id).name.starts_with("_cloop")), "{nodes}");
    // The worker finds the triggers and gives them to its receives.
    let device = PartitionOptions { loops: LoopControl::Present, ..PartitionOptions::default() };
    let parts = plan(nodes, on, "", "exit", &device).unwrap();
    for part in &parts {
        for (_, node) in part.nodes.iter().filter(|(_, node)| node.op() == "_Recv") {
            let triggers = node.control_inputs.iter().map(|&id| part.nodes.node(id));
            assert_eq!(triggers.filter(|node| is_control_loop(node)).count(), 1, "{}", text(&parts));
        }
        let add = part.nodes.find("add").map(|id| part.nodes.node(id).control_inputs.len());
        assert!(add.is_none_or(|n| n == 0), "{}", text(&parts));
    }
}

#[test]
fn a_loop_without_a_predicate_cannot_span_devices() {
    let g = graph();
    let x = g.op("Source").out();
    let e = g.op("Enter").input(x).attr("frame_name", "f").attr("is_constant", true).out();
    let y = g.device("/cpu:1", || g.op("Neg").input(e).out());
    g.op("Exit").name("exit").input(y).build();
    let error = plan(&g.snapshot(), "/cpu:0 /cpu:1", "", "exit", &PartitionOptions::default()).err().unwrap();
    assert_eq!(error.message(), "A cross-device loop must have a pivot predicate: f");
}

#[test]
fn what_does_not_run_in_every_iteration_cannot_be_sent() {
    let g = while_loop("/cpu:0", "/cpu:0");
    let enter = g.operation("enter").unwrap().output(0);
    let merge = g.operation("merge").unwrap().output(0);
    let y = g.device("/cpu:1", || g.op("Add").name("y").input(enter).input(merge).out());
    g.op("Exit").name("out").input(y).build();
    let error = plan(&g.snapshot(), "/cpu:0 /cpu:1", "", "out", &PartitionOptions::default()).err().unwrap();
    assert!(error.message().contains("does not run in every iteration of its loop"), "{error}");
}

#[test]
fn added_names_avoid_those_of_the_graph() {
    let g = graph();
    let a = g.op("Source").name("a").out();
    let b = g.op("Neg").name("a_G0").input(a).out();
    g.device("/cpu:1", || g.op("Add").name("c").input(a).input(b).build());
    let partitions = plan(&g.snapshot(), "/cpu:0 /cpu:1", "", "c", &PartitionOptions::default()).unwrap();
    assert_eq!(partitions[0].nodes.len(), 4);
    assert!(partitions[0].nodes.iter().all(|(id, node)| partitions[0].nodes.find(&node.name) == Some(id)));
}

#[test]
fn moved_bytes_count_each_destination_once() {
    let g = graph();
    let a = g.op("Source").name("a").out();
    let u = g.op("Less").name("u").input(a).input(a).out();
    let add = |on: &str| g.device(on, || g.op("Add").input(a).input(a).out().operation().id());
    let mut targets = vec![add("/cpu:1"), add("/cpu:1"), add("/cpu:2"), add("/cpu:0")];
    targets.push(g.device("/cpu:1", || g.op("Neg").input(u).out()).operation().id());
    let nodes = g.snapshot();
    let pruned = prune(&nodes, &Request { targets, ..Request::default() }).unwrap();
    let on = devices("/cpu:0 /cpu:1 /cpu:2");
    let placed = place(&nodes, &pruned.nodes, &on, &Kernels, &HashMap::new(), &PlaceOptions::default()).unwrap();
    let expect = BTreeMap::from([(a.operation().id(), Some(2 * 24)), (u.operation().id(), None)]);
    assert_eq!(moved_bytes(&placed, &pruned), expect);
}

/// The edges of all partitions with transfers taken out again: `(node, input number or control, source)`.
fn reassemble(nodes: &Nodes, pruned: &Pruned, partitions: &[Partition]) -> Vec<(NodeId, Option<usize>, Endpoint)> {
    let mut sends = HashMap::new();
    for (p, part) in partitions.iter().enumerate() {
        for (_, node) in part.nodes.iter().filter(|(_, node)| node.op() == "_Send") {
            assert!(sends.insert(key(node), (p, node.inputs[0])).is_none(), "a key was used twice");
        }
    }
    // The value behind an endpoint of a partition, in the whole graph.
    let value = |p: usize, at: Endpoint| match (at.feed(), partitions[p].origin.get(at.node.index())) {
        (Some(feed), _) => pruned.feeds[feed],
        (None, Some(Some(origin))) => Endpoint { node: *origin, index: at.index },
        (None, _) => {
            let (from, sent) = sends[&key(partitions[p].nodes.node(at.node))];
            Endpoint { node: partitions[from].origin[sent.node.index()].unwrap(), index: sent.index }
        }
    };
    let mut edges = Vec::new();
    for (p, part) in partitions.iter().enumerate() {
        for (id, node) in part.nodes.iter() {
            let Some(origin) = part.origin[id.index()] else { continue };
            edges.extend(node.inputs.iter().enumerate().map(|(i, &at)| (origin, Some(i), value(p, at))));
            for &control in &node.control_inputs {
                let before = part.origin[control.index()].unwrap_or_else(|| {
                    // Identity <- _Recv, _Send <- the node that is waited for, or Const <- that node.
                    let recv = part.nodes.node(part.nodes.node(control).inputs[0].node);
                    let (from, sent) = sends[&key(recv)];
                    partitions[from].origin[sent.node.index()].unwrap_or_else(|| {
                        let empty = partitions[from].nodes.node(sent.node);
                        partitions[from].origin[empty.control_inputs[0].index()].unwrap()
                    })
                });
                edges.push((origin, None, Endpoint { node: before, index: 0 }));
            }
        }
    }
    edges.sort();
    assert!(edges.iter().all(|(id, ..)| id.index() < nodes.len()));
    edges
}

fn key(node: &Node) -> (String, String, String, i64) {
    let attr = |name| node.attrs.str(name).unwrap().to_owned();
    let incarnation = node.attrs.int("send_device_incarnation").unwrap();
    (attr("send_device"), attr("recv_device"), attr("tensor_name"), incarnation)
}

proptest! {
    /// Random graphs, pins, feeds, fetches and control edges: taking the transfers out again gives the graph back, every
    /// node is in one partition, on its device and after its inputs.
    #[test]
    fn partitions_reassemble_to_the_graph(
        recipe in proptest::collection::vec(
            (0usize..5, any::<[prop::sample::Index; 3]>(), 0usize..5, any::<bool>()), 1..40),
        n_devices in 1usize..5,
        feeds in proptest::collection::vec(any::<prop::sample::Index>(), 0..3),
        fetches in proptest::collection::vec(any::<prop::sample::Index>(), 1..4),
        task in any::<bool>(),
    ) {
        let g = graph();
        let mut made = Vec::new();
        for (i, (kind, picks, pin, control)) in recipe.iter().enumerate() {
            let pin = if *pin < n_devices { format!("/cpu:{pin}") } else { String::new() };
            let pick = |k: usize| -> crate::Output<'_> { made[picks[k].index(made.len())] };
            let operation = g.device(&pin, || {
                let builder = match kind {
                    _ if made.is_empty() => g.op("Source"),
                    0 => g.op("Var"),
                    1 => g.op("Add").input(pick(0)).input(pick(1)),
                    2 => g.op("Two").input(pick(0)),
                    _ => g.op("Neg").input(pick(0)),
                };
                let builder = match control {
                    true if !made.is_empty() => builder.control_input(pick(2).operation()),
                    _ => builder,
                };
                builder.name(&format!("n{i}")).build()
            });
            made.extend(operation.outputs());
        }
        g.check().unwrap();
        let nodes = g.snapshot();
        let mut fed: Vec<Endpoint> = feeds.iter().map(|feed| made[feed.index(made.len())].endpoint()).collect();
        fed.sort();
        fed.dedup();
        let fetches: Vec<Endpoint> = fetches.iter().map(|fetch| made[fetch.index(made.len())].endpoint()).collect();
        let pruned = prune(&nodes, &Request { feeds: fed, fetches, targets: vec![] }).unwrap();
        let names = ["/job:a/cpu:0", "/job:b/cpu:1", "/job:a/cpu:2", "/job:b/cpu:3"];
        let on = devices(&names[..n_devices].join(" "));
        let options = PlaceOptions::default();
        let placed = place(&nodes, &pruned.nodes, &on, &Kernels, &HashMap::new(), &options).unwrap();
        let granularity = if task { Granularity::Task } else { Granularity::Device };
        let mut counter = 0;
        let mut fresh = || { counter += 1; counter };
        let options = PartitionOptions { granularity, ..PartitionOptions::default() };
        let partitions = partition(&placed, &pruned, registry(), &options, &mut fresh).unwrap();

        let mut expect = Vec::new();
        for &id in &pruned.nodes {
            let node = nodes.node(id);
            expect.extend(node.inputs.iter().enumerate().map(|(i, &at)| (id, Some(i), at)));
            let control = node.control_inputs.iter().map(|&control| Endpoint { node: control, index: 0 });
            expect.extend(control.map(|at| (id, None, at)));
        }
        expect.sort();
        prop_assert_eq!(reassemble(&nodes, &pruned, &partitions), expect);

        let mut origins: Vec<NodeId> = partitions.iter().flat_map(|part| part.origin.iter().flatten().copied()).collect();
        origins.sort();
        prop_assert_eq!(&origins, &pruned.nodes);
        let n_sends: usize = partitions.iter().map(|part| part.transfers.len()).sum();
        let recvs = partitions.iter().flat_map(|part| part.nodes.iter()).filter(|(_, node)| node.op() == "_Recv");
        prop_assert_eq!(recvs.count(), n_sends);
        for part in &partitions {
            let mut fed = Vec::new();
            for (id, node) in part.nodes.iter() {
                prop_assert!(part.nodes.find(&node.name) == Some(id));
                let name = node.device.full().unwrap();
                let own = &on[part.device].name;
                prop_assert!((task && name.same_task(own)) || name == *own);
                if let Some(origin) = part.origin[id.index()] {
                    prop_assert_eq!(&placed.device_of(origin).unwrap().name, &name);
                }
                prop_assert!(node.inputs.iter().all(|at| at.feed().is_some() || at.node < id));
                prop_assert!(node.control_inputs.iter().all(|before| *before < id));
                fed.extend(node.inputs.iter().enumerate().filter_map(|(i, at)| Some((at.feed()?, (id, i)))));
            }
            fed.sort();
            let listed: Vec<_> =
                part.feeds.iter().flat_map(|(feed, to)| to.iter().map(|at| (*feed, *at))).collect();
            prop_assert_eq!(fed, listed);
        }
        for (i, fetch) in pruned.fetches.iter().enumerate() {
            let found: Vec<Endpoint> = partitions.iter().flat_map(|part| {
                let of = |at: Endpoint| Endpoint { node: part.origin[at.node.index()].unwrap(), index: at.index };
                part.fetches.iter().filter(|(k, _)| *k == i).map(move |(_, at)| of(*at))
            }).collect();
            let expect = if pruned.feed_of(*fetch).is_some() { vec![] } else { vec![*fetch] };
            prop_assert_eq!(found, expect);
        }
    }
}
