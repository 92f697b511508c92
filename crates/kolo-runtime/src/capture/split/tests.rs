//! Split plans, with CPUs in place of GPUs.

use kolo_graph::{
    Graph, KernelSupport, Operation, Output, PartitionOptions, PlaceOptions, Request, partition, place, prune,
};
use kolo_ops::flow::print::print;
use kolo_ops::math::matmul::matmul;
use kolo_ops::nn::relu::relu;
use kolo_ops::optim::gradient_descent::apply_gradient_descent;
use kolo_ops::{find_kernel, host_arguments, registry};

use std::time::{Duration, Instant};

use super::*;
use crate::SessionConfig;
use crate::devices::Devices;

/// Two CPUs, the first of which is declared to be a GPU: plans are split as for a GPU, and arguments are in host
/// memory.
struct Bench {
    devices: Devices,
    kernels: KernelCache,
}

impl Bench {
    fn new() -> Bench {
        let device_count = [("GPU".to_owned(), 0), ("CPU".to_owned(), 2)].into();
        let config = SessionConfig { device_count, inter_op_parallelism_threads: 1, ..SessionConfig::default() };
        Bench { devices: Devices::new(&config).unwrap(), kernels: KernelCache::default() }
    }

    /// Runs the graph, split or not. Returns what was made.
    fn run(
        &self,
        g: &Graph,
        (fetches, feeds, targets): (&[Output<'_>], &[(Output<'_>, Tensor)], &[Operation<'_>]),
        is_split: bool,
    ) -> (Vec<Tensor>, Made) {
        g.check().unwrap();
        let nodes = g.snapshot();
        let request = Request {
            feeds: feeds.iter().map(|(output, _)| output.endpoint()).collect(),
            fetches: fetches.iter().map(|output| output.endpoint()).collect(),
            targets: targets.iter().map(|target| target.id()).collect(),
        };
        let pruned = prune(&nodes, &request).unwrap();
        let mut infos = self.devices.infos();
        infos[0].name = DeviceName::local("GPU", 0);
        infos[1].name = DeviceName::local("CPU", 0);
        let placed = place(&nodes, &pruned.nodes, &infos, &AsGpu, &HashMap::new(), &PlaceOptions::default()).unwrap();
        let options = PartitionOptions { support: Some(&AsGpu), ..PartitionOptions::default() };
        let mut fresh = 0..;
        let parts =
            partition(&placed, &pruned, registry(), &options, &mut || fresh.next().unwrap_or_default()).unwrap();
        let compiled: Vec<Arc<PartPlan>> = parts
            .iter()
            .map(|part| {
                let fed = part.feeds.iter().flat_map(|(feed, to)| to.iter().map(move |input| (*input, *feed)));
                let whole = Part {
                    nodes: &part.nodes,
                    fed: fed.collect(),
                    fetches: part.fetches.clone(),
                    frame_ids: FrameIds::default(),
                    extras: Extras::default(),
                };
                Arc::new(compile(&whole, &self.devices.units[part.device], &self.kernels).unwrap())
            })
            .collect();
        // The first device is treated as a GPU.
        let gpu = |part: &Partition| (part.device == 0).then(|| DeviceName::local("GPU", 0));
        let gpus: Vec<Option<DeviceName>> = parts.iter().map(gpu).collect();
        let made = match is_split {
            true => make_for(&parts, &compiled, &gpus, FrameIds::default(), &HashMap::new(), &self.kernels).unwrap(),
            false => Made { parts: compiled.into(), segments: Vec::new(), split_by: Vec::new() },
        };
        let step = Step::new(1, &made.parts, CancelToken::new(), false, false);
        let values: Vec<(usize, &Tensor)> = feeds.iter().map(|(_, value)| value).enumerate().collect();
        step.feed(&values, false);
        step.run(Some(Instant::now() + Duration::from_secs(20)), &|_| false);
        let fetched = step.finish(fetches.len()).unwrap();
        (fetched.into_iter().map(|value| value.unwrap()).collect(), made)
    }
}

/// Device properties for the placement: everything can run on either.
struct AsGpu;

impl AsGpu {
    fn arguments(node: &Node, device: &DeviceName) -> (Vec<bool>, Vec<bool>) {
        match &*device.kind {
            "GPU" => find_kernel(node, device).map(|kernel| host_arguments(node, kernel)).unwrap_or_default(),
            _ => Default::default(),
        }
    }
}

impl KernelSupport for AsGpu {
    fn has_kernel(&self, _: &Node, _: &DeviceName) -> bool {
        true
    }

    fn kernels(&self, _: &Node) -> Vec<String> {
        Vec::new()
    }

    fn host_inputs(&self, node: &Node, device: &DeviceName) -> Vec<bool> {
        AsGpu::arguments(node, device).0
    }

    fn host_outputs(&self, node: &Node, device: &DeviceName) -> Vec<bool> {
        AsGpu::arguments(node, device).1
    }
}

fn wavy(n: usize, seed: f32) -> Tensor {
    Tensor::from_vec([n, n], (0..n * n).map(|i| (i as f32 * 0.7 + seed).sin()).collect::<Vec<f32>>()).unwrap()
}

fn chain(x: Output<'_>) -> Output<'_> {
    let y = x.graph().op("Tanh").input(x).out();
    let y = x.graph().op("Sigmoid").input(y).out();
    relu(y) * x
}

/// Runs it unsplit and in segments, each from the start, and compares the steps.
fn compare(
    build: impl for<'g> Fn(&'g Graph) -> (Vec<Output<'g>>, Vec<(Output<'g>, Tensor)>, Vec<Operation<'g>>),
) -> Made {
    let run = |is_split: bool| {
        let g = kolo_ops::graph();
        let (fetches, feeds, targets) = build(&g);
        let bench = Bench::new();
        let init = g.global_variables_initializer();
        bench.run(&g, (&[], &[], &[init]), false);
        let mut all = Vec::new();
        let mut made = None;
        for _ in 0..3 {
            let (values, what) = bench.run(&g, (&fetches, &feeds, &targets), is_split);
            all.push(values);
            made = Some(what);
        }
        (all, made.unwrap())
    };
    let ((plain, _), (split, made)) = (run(false), run(true));
    assert_eq!(plain, split);
    made
}

#[test]
fn a_node_of_the_host_splits_a_step() {
    let made = compare(|g| {
        let x = g.placeholder::<f32>("x", [Some(6), Some(6)]);
        let w = g.variable("w", wavy(6, 1.0));
        let hidden = chain(matmul(x, w.read()));
        let shown = print(hidden, &[hidden], "hidden");
        let out = chain(matmul(shown, w.read())) + x;
        let update = apply_gradient_descent(w.handle(), g.constant(0.1f32), out);
        let after = g.control_dependencies(&[update], || w.read_now() + 0.0);
        (vec![out, hidden, after], vec![(x, wavy(6, 2.0))], vec![update])
    });
    assert_eq!(made.segments.len(), 2, "{:?}", made.split_by);
    let apart: Vec<&str> = made.split_by.iter().map(|node| node.op).collect();
    assert_eq!(apart, ["Print"]);
    // The update is in the second segment, since that still reads the old value.
    let late: Vec<bool> = made.segments.iter().map(|segment| segment.is_late).collect();
    assert_eq!(late, [false, true]);
}

#[test]
fn branches_and_loops_run_between_segments() {
    let made = compare(|g| {
        let x = g.variable("x", wavy(5, 3.0)).read();
        let first = chain(x);
        let mean = kolo_ops::math::reduce::sum::mean(first, &[0, 1]);
        let which = g.op("Less").input(mean).input(g.constant(0.0f32)).out();
        let chosen = g.cond(which, || vec![first * 2.0], || vec![first * 3.0]).unwrap()[0];
        let second = chain(chosen);
        let looped = g
            .while_loop(
                &[g.constant(0i32), second],
                |g, vars| g.op("Less").input(vars[0]).input(g.constant(3i32)).out(),
                |g, vars| vec![vars[0] + g.constant(1i32), vars[1] * 0.5],
                kolo_graph::WhileOptions::default(),
            )
            .unwrap()[1];
        (vec![chain(looped), which], Vec::new(), Vec::new())
    });
    assert_eq!(made.segments.len(), 3, "{:?}", made.split_by);
    assert!(made.split_by.iter().any(|node| node.why == "it may be skipped"), "{:?}", made.split_by);
    assert!(made.split_by.iter().any(|node| node.why == "it is in a loop"), "{:?}", made.split_by);
}

#[test]
fn what_is_computed_from_values_of_the_host_stays_outside() {
    let made = compare(|g| {
        let n = g.placeholder::<i32>("n", [Some(1)]);
        let filled = g.op("Fill").input(n + g.constant(1i32)).input(g.constant(2.0f32)).out();
        (vec![chain(chain(filled))], vec![(n, Tensor::from([3i32]))], Vec::new())
    });
    let apart: Vec<&str> = made.split_by.iter().map(|node| node.op).collect();
    assert_eq!((made.segments.len(), apart), (1, vec!["AddV2", "Fill"]));
}

/// A value that comes back from another device depends on what was sent there, though no edge of the part says so.
#[test]
fn what_comes_back_from_another_device_is_in_a_later_segment() {
    let made = compare(|g| {
        let x = g.placeholder::<f32>("x", [Some(6), Some(6)]);
        let w = g.variable("w", wavy(6, 1.0));
        let hidden = chain(matmul(x, w.read()));
        let there = kolo_core::DeviceSpec::parse("/cpu:0").unwrap();
        let back = g.op("Mul").device(there.clone()).input(hidden).input(g.constant(0.5f32)).out();
        let again = chain(back);
        let third = chain(g.op("Tanh").device(there).input(again).out());
        let update = apply_gradient_descent(w.handle(), g.constant(0.1f32), third);
        (vec![third, hidden], vec![(x, wavy(6, 2.0))], vec![update])
    });
    assert_eq!(made.segments.len(), 3, "{:?}", made.split_by);
    let n_recvs = made.split_by.iter().filter(|node| node.op == "_Recv").count();
    assert_eq!(n_recvs, 2, "{:?}", made.split_by);
}

/// The other device can begin while the segment runs.
#[test]
fn a_variable_that_another_device_reads_is_sent_before_the_segment() {
    let made = compare(|g| {
        let w = g.variable("w", wavy(6, 1.0));
        let read = w.read();
        let there = kolo_core::DeviceSpec::parse("/cpu:0").unwrap();
        let other = g.op("Tanh").device(there).input(read).out();
        let here = chain(chain(read));
        let update = apply_gradient_descent(w.handle(), g.constant(0.1f32), chain(other + here));
        (vec![here, other], Vec::new(), vec![update])
    });
    // The read alone is sent: too little for a segment of its own.
    assert_eq!(made.segments.len(), 2, "{:?}", made.split_by);
    assert!(made.segments.iter().all(|segment| segment.is_late), "the first gives way to the read");
    let reads = made.segments[0].part.nodes.iter().filter(|node| node.node.op() == "ReadVariableOp").count();
    assert_eq!(reads, 0, "the read is outside");
}

/// The first value of a loop may be a constant, and the others computed by a segment, here or on another device.
#[test]
fn what_leaves_a_loop_is_in_a_later_segment_than_what_goes_round() {
    for device in ["/gpu:0", "/cpu:0"] {
        let made = compare(|g| {
            let x = g.variable("x", wavy(5, 3.0)).read();
            let first = chain(x);
            let there = kolo_core::DeviceSpec::parse(device).unwrap();
            let add = |a, b| g.op("AddV2").device(there.clone()).input(a).input(b).out();
            let looped = g
                .while_loop(
                    &[g.constant(0i32), g.constant(wavy(5, 4.0))],
                    |g, vars| g.op("Less").input(vars[0]).input(g.constant(3i32)).out(),
                    |g, vars| vec![vars[0] + g.constant(1i32), add(vars[1], first)],
                    kolo_graph::WhileOptions::default(),
                )
                .unwrap()[1];
            (vec![chain(looped)], Vec::new(), Vec::new())
        });
        assert_eq!(made.segments.len(), 2, "{device}: {:?}", made.split_by);
    }
}

/// A node on the GPU returns a number to the host, which sends it; a replay would leave the send out.
#[test]
fn what_the_host_sends_to_another_device_is_sent_in_every_step() {
    let made = compare(|g| {
        let x = g.variable("x", wavy(6, 1.0)).read();
        let first = chain(x);
        let there = kolo_core::DeviceSpec::parse("/cpu:0").unwrap();
        let sizes = g.op("Shape").input(first).out();
        let doubled = g.op("AddV2").device(there.clone()).input(sizes).input(g.constant([6i32, 0])).out();
        let filled = g.op("Fill").input(doubled).input(g.constant(2.0f32)).out();
        let tail = g.op("Pad").device(there).input(filled).input(g.constant([[0i32, 0], [0, 1]])).out();
        (vec![chain(tail), first], Vec::new(), Vec::new())
    });
    assert_eq!(made.segments.len(), 2, "{:?}", made.split_by);
    let sends = made.split_by.iter().filter(|node| node.op == "_HostSend").count();
    assert_eq!(sends, 3, "{:?}", made.split_by);
}
