//! Placement, devices and transfers through a session.

use std::collections::BTreeMap;
use std::sync::Arc;

use kolo_core::{Code, DType, DeviceName, DeviceSpec, Tensor};
use kolo_device::NullDevice;
use kolo_graph::{CostModel, Graph, Link, PlacementRules, Policy, Rule, VariableKind};
use kolo_ops::math::matmul::matmul;
use kolo_runtime::{DevicePlan, RunOptions, Session, SessionConfig};

fn cpus(n: usize) -> SessionConfig {
    SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), n)]), ..SessionConfig::default() }
}

fn with_null_gpu(without_kernel: &[&str], soft: bool) -> (SessionConfig, Arc<NullDevice>) {
    let gpu = NullDevice::new(DeviceName::local("GPU", 0), None, without_kernel);
    let config =
        SessionConfig { extra_devices: vec![gpu.clone()], allow_soft_placement: soft, ..SessionConfig::default() };
    (config, gpu)
}

fn device_of(session: &Session, node: &str) -> String {
    let report = session.local().expect("it runs here").placement();
    let row = report.rows.iter().find(|row| row.node == node).unwrap_or_else(|| panic!("{node} was not placed"));
    format!("{}:{}", row.device.kind, row.device.id)
}

fn two_by_two(g: &Graph) -> (kolo_graph::Output<'_>, kolo_graph::Output<'_>) {
    (g.named_constant("a", [[1.0f32, 2.0], [3.0, 4.0]]), g.named_constant("b", [[1.0f32, 0.0], [0.0, 1.0]]))
}

#[test]
fn the_three_rules_in_order() {
    let g = kolo_ops::graph();
    let (a, b) = g.device("/cpu:0", || two_by_two(&g));
    let c = matmul(a, b);
    let (config, gpu) = with_null_gpu(&[], false);
    let session = Session::with_config(&g, config).unwrap();
    session.run(&[c], &[], &[]).unwrap();
    assert_eq!(device_of(&session, "a"), "CPU:0");
    assert_eq!(device_of(&session, "MatMul"), "GPU:0");
    assert_eq!(gpu.take_log(), ["MatMul"]);
    let report = session.local().unwrap().placement();
    let rule = |name: &str| report.rows.iter().find(|row| row.node == name).unwrap().rule;
    assert_eq!((rule("a"), rule("MatMul")), (Rule::Pinned, Rule::Accelerator));
    let a = report.rows.iter().find(|row| row.node == "a").unwrap();
    assert_eq!(a.n_bytes_moved, Some(16), "a crosses to the accelerator");
    assert_eq!(a.log_line(), "a: (Const): /job:localhost/replica:0/task:0/device:CPU:0");
    assert!(report.to_string().contains("first accelerator with a kernel"), "{report}");
}

#[test]
fn implicit_copies_can_be_denied() {
    let g = kolo_ops::graph();
    let (a, b) = g.device("/cpu:0", || two_by_two(&g));
    let implicit = g.device("/cpu:1", || matmul(a, b));
    let asked_for = g.device("/cpu:1", || {
        let [a, b] = [a, b].map(|value| g.op("Identity").input(value).out());
        matmul(a, b)
    });
    let fed = g.placeholder::<f32>("x", [Some(2), Some(2)]);
    let from_feed = g.device("/cpu:1", || matmul(fed, fed));
    let session = Session::with_config(&g, SessionConfig { deny_implicit_copies: true, ..cpus(2) }).unwrap();
    let error = session.fetch(implicit).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    for part in
        ["output 0 of 'a' (Const)", "device:CPU:0", "'MatMul' (MatMul)", "device:CPU:1", "Identity that is pinned"]
    {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    session.fetch(asked_for).unwrap();
    let value = Tensor::from([[1.0f32, 0.0], [0.0, 1.0]]);
    session.run(&[from_feed], &[(fed, value)], &[]).unwrap();
    Session::with_config(&g, cpus(2)).unwrap().fetch(implicit).unwrap();
}

#[test]
fn a_pin_without_a_kernel_is_refused_with_all_that_helps() {
    let g = kolo_ops::graph();
    let (a, b) = two_by_two(&g);
    let c = g.device("/gpu:0", || matmul(a, b));
    let (config, _) = with_null_gpu(&["MatMul"], false);
    let error = Session::with_config(&g, config).unwrap().fetch(c).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    for text in [
        "Cannot assign a device to node 'MatMul'",
        "Could not satisfy explicit device specification",
        "MatMul",
        "float",
        "CPU",
        "placement.rs",
    ] {
        assert!(error.to_string().contains(text), "'{text}' is missing in: {error}");
    }
}

#[test]
fn soft_placement_falls_back_for_kernels_and_devices_and_counts() {
    let g = kolo_ops::graph();
    let (a, b) = two_by_two(&g);
    let no_kernel = g.device("/gpu:0", || matmul(a, b));
    let no_device = g.device("/gpu:7", || matmul(no_kernel, b));
    let (config, _) = with_null_gpu(&["MatMul"], true);
    let session = Session::with_config(&g, config).unwrap();
    assert_eq!(session.fetch(no_device).unwrap(), Tensor::from([[1.0f32, 2.0], [3.0, 4.0]]));
    assert_eq!(session.local().unwrap().placement().n_fallbacks, 2);
    let (config, _) = with_null_gpu(&["MatMul"], true);
    let strict = SessionConfig { max_fallbacks: Some(1), ..config };
    assert!(Session::with_config(&g, strict).unwrap().fetch(no_device).is_err());
}

#[test]
fn a_missing_device_is_refused_with_the_list_of_those_there_are() {
    let g = kolo_ops::graph();
    let c = g.device("/gpu:0", || g.constant(1.0f32));
    let error = Session::new(&g).unwrap().fetch(c).unwrap_err();
    assert!(error.to_string().contains("/job:localhost/replica:0/task:0/device:CPU:0"), "{error}");
}

#[test]
fn device_functions_choose_by_op() {
    let g = kolo_ops::graph();
    let choose = |node: &kolo_graph::Node| {
        let device = if node.op() == "MatMul" { "/cpu:1" } else { "/cpu:0" };
        DeviceSpec::parse(device).unwrap()
    };
    let c = g.device_fn(choose, || {
        let (a, b) = two_by_two(&g);
        matmul(a, b) + 1.0
    });
    let session = Session::with_config(&g, cpus(2)).unwrap();
    assert_eq!(session.fetch(c).unwrap(), Tensor::from([[2.0f32, 3.0], [4.0, 5.0]]));
    assert_eq!((device_of(&session, "MatMul"), device_of(&session, "a")), ("CPU:1".into(), "CPU:0".into()));
}

#[test]
fn values_cross_devices_both_ways_in_every_run() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [None, Some(2)]);
    let mut y = x;
    for i in 0..20 {
        let device = format!("/cpu:{}", i % 3);
        y = g.device(&device, || y * 2.0 - y);
    }
    let session = Session::with_config(&g, cpus(3)).unwrap();
    for n in 1..20 {
        let value = Tensor::from_vec([n, 2], (0..2 * n).map(|i| i as f32).collect()).unwrap();
        assert_eq!(session.run(&[y], &[(x, value.clone())], &[]).unwrap(), [value]);
    }
}

#[test]
fn control_edges_order_across_devices() {
    let g = kolo_ops::graph();
    let v = g.device("/cpu:0", || g.variable("v", 0.0f32));
    let one = g.constant(1.0f32);
    let add = v.assign_add(one);
    let read = g.control_dependencies(&[add], || g.device("/cpu:1", || g.constant(10.0f32)));
    let after = g.control_dependencies(&[read.operation()], || v.read_now());
    let init = g.global_variables_initializer();
    let session = Session::with_config(&g, cpus(2)).unwrap();
    session.run_op(init).unwrap();
    for expected in 1..50 {
        assert_eq!(session.fetch(after).unwrap(), Tensor::scalar(expected as f32));
    }
}

#[test]
fn colocation_follows_the_variable() {
    for kind in [VariableKind::Resource, VariableKind::Reference] {
        let g = kolo_ops::graph();
        let v = g.device("/cpu:1", || g.new_variable("v", [1.0f32, 2.0]).kind(kind).build());
        let update = v.assign_add(g.constant([1.0f32, 1.0]));
        let w = g.colocate_with(v.handle().operation(), || g.constant(5.0f32) + 1.0);
        let init = g.global_variables_initializer();
        let session = Session::with_config(&g, cpus(2)).unwrap();
        session.run_op(init).unwrap();
        session.run_op(update).unwrap();
        assert_eq!(session.run(&[v.read(), w], &[], &[]).unwrap()[0], Tensor::from([2.0f32, 3.0]));
        assert_eq!(device_of(&session, &update.name()), "CPU:1");
        assert_eq!(device_of(&session, &w.operation().name()), "CPU:1");
    }
}

#[test]
fn a_placed_node_stays_where_it_is() {
    let g = kolo_ops::graph();
    let a = g.named_constant("a", 1.0f32) + 1.0;
    let (config, _) = with_null_gpu(&["AddV2"], false);
    let session = Session::with_config(&g, config).unwrap();
    session.fetch(a).unwrap();
    assert_eq!(device_of(&session, "AddV2"), "CPU:0");
    let b = a * 2.0;
    session.extend(&g).unwrap();
    session.fetch(b).unwrap();
    assert_eq!(device_of(&session, "AddV2"), "CPU:0");
    assert_eq!(device_of(&session, "Mul"), "GPU:0");
}

#[test]
fn a_memory_limit_is_hard_and_names_the_holders() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [None]);
    let kept = x * 2.0;
    let y = kept + x * 3.0;
    let mut config = cpus(1);
    config.cpu_devices.insert(0, DevicePlan { memory_limit: Some(64 << 10), ..DevicePlan::default() });
    let session = Session::with_config(&g, config).unwrap();
    let small = Tensor::zeros(DType::F32, [1 << 10]).unwrap();
    session.run(&[y], &[(x, small.clone())], &[]).unwrap();
    let error = session.run(&[y], &[(x, Tensor::zeros(DType::F32, [15 << 10]).unwrap())], &[]).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    assert!(error.to_string().contains("limit of 65536 bytes") && error.to_string().contains("Mul"), "{error}");
    session.run(&[y], &[(x, small)], &[]).unwrap();
    assert_eq!(
        session.local().unwrap().memory_stats(0).unwrap().in_use,
        0,
        "a step's outputs do not outlive it unless fetched"
    );
}

#[test]
fn seeds_give_the_same_values_on_any_devices() {
    let values = |n_devices: usize| {
        let g = kolo_ops::graph();
        g.set_seed(42);
        let device = format!("/cpu:{}", n_devices - 1);
        let w =
            g.device(&device, || g.new_variable("w", kolo_graph::Initializer::GlorotUniform).shape([30, 20]).build());
        let init = g.global_variables_initializer();
        let session = Session::with_config(&g, cpus(n_devices)).unwrap();
        session.run_op(init).unwrap();
        session.fetch(w.read()).unwrap()
    };
    assert_eq!(values(1), values(3));
}

#[test]
fn the_placement_log_has_one_line_per_node_and_placement() {
    #[derive(Clone, Default)]
    struct Sink(Arc<std::sync::Mutex<Vec<u8>>>);
    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let sink = Sink::default();
    let writer = sink.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    let g = kolo_ops::graph();
    let sum = g.named_constant("a", 1.0f32) + 1.0;
    let session =
        Session::with_config(&g, SessionConfig { log_device_placement: true, ..SessionConfig::default() }).unwrap();
    tracing::subscriber::with_default(subscriber, || {
        session.fetch(sum).unwrap();
        session.run(&[sum, sum], &[], &[]).unwrap();
    });
    let log = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    let line = "AddV2: (AddV2): /job:localhost/replica:0/task:0/device:CPU:0";
    assert_eq!(log.matches(line).count(), 1, "{log}");
    assert!(log.contains("a: (Const): /job:localhost"), "{log}");
}

#[test]
fn rules_place_nodes_and_show_in_report_and_errors() {
    let g = kolo_ops::graph();
    let (a, b) = two_by_two(&g);
    let c = g.device("/cpu:0", || matmul(a, b));
    let rules = |text: &str| PlacementRules::parse(text, "pins.txt").unwrap();
    let config = SessionConfig { placement_rules: rules("# variables\nop=MatMul -> /cpu:1\na -> /cpu:1"), ..cpus(2) };
    let session = Session::with_config(&g, config).unwrap();
    session.fetch(c).unwrap();
    assert_eq!((device_of(&session, "a"), device_of(&session, "MatMul")), ("CPU:1".into(), "CPU:0".into()));
    let report = session.local().unwrap().placement();
    let row = report.rows.iter().find(|row| row.node == "a").unwrap();
    assert_eq!(row.pinned_at.as_ref().unwrap().to_string(), "pins.txt:3");
    assert!(report.to_string().contains("pins.txt:3"), "{report}");
    // Nodes that come later take the rules too.
    let d = g.named_constant("a2/weights", 1.0f32) + 1.0;
    let config = SessionConfig { placement_rules: rules("*/weights -> /cpu:1\n! op=MatMul -> /cpu:1"), ..cpus(2) };
    let session = Session::with_config(&g, config).unwrap();
    session.fetch(d).unwrap();
    session.fetch(c).unwrap();
    assert_eq!((device_of(&session, "a2/weights"), device_of(&session, "MatMul")), ("CPU:1".into(), "CPU:1".into()));
    let e = g.named_constant("late/weights", 1.0f32) * 3.0;
    session.extend(&g).unwrap();
    session.fetch(e).unwrap();
    assert_eq!(device_of(&session, "late/weights"), "CPU:1");

    let config = SessionConfig { placement_rules: rules("a -> /gpu:0"), ..cpus(2) };
    let error = Session::with_config(&g, config).unwrap().fetch(c).unwrap_err();
    assert!(error.to_string().contains("(pinned at pins.txt:1)"), "{error}");
}

#[test]
fn pins_that_cannot_agree_are_named_with_their_lines() {
    let g = kolo_ops::graph();
    let a = g.device("/cpu:0", || g.named_constant("a", 1.0f32));
    let b = g.colocate_with(a.operation(), || g.op("Const").name("b"));
    let value = kolo_graph::AttrValue::from(Tensor::scalar(1.0f32));
    let b = g.colocate_with(a.operation(), || {
        b.device(DeviceSpec::parse("/cpu:1").unwrap()).attr("value", value).attr("dtype", DType::F32).out()
    });
    let error = Session::with_config(&g, cpus(2)).unwrap().run(&[a, b], &[], &[]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("'a' asks for '/device:CPU:0' (pinned at "), "{text}");
    assert!(text.contains("'b' asks for '/device:CPU:1' (pinned at "), "{text}");
    assert_eq!(text.matches("placement.rs:").count(), 4, "{text}");
}

#[test]
fn fall_backs_are_priced_in_the_report() {
    let g = kolo_ops::graph();
    let big = g.device("/gpu:0", || g.op("Fill").input(g.constant([1000i32, 1000])).input(g.constant(1.0f32)).out());
    let y = g.device("/gpu:0", || matmul(big, big));
    let z = g.device("/gpu:0", || y + 1.0);
    let (config, _) = with_null_gpu(&["MatMul"], true);
    let mut costs = CostModel::default();
    let link = Link { bytes_per_second: 8e9, latency: 0.0 };
    costs.set_link("CPU", "GPU", link);
    costs.set_link("GPU", "CPU", link);
    let session = Session::with_config(&g, SessionConfig { costs: Arc::new(costs), ..config }).unwrap();
    session.local().unwrap().explain(&[&z.name()]).unwrap();
    let report = session.local().unwrap().placement();
    // Four million bytes come to the CPU, where MatMul is, and the product goes back: a millisecond.
    let cost = &report.fallback_cost;
    assert_eq!((report.n_fallbacks, cost.n_bytes, cost.n_unknown), (1, 8_000_000, 0), "{report}");
    assert!((cost.seconds - 1e-3).abs() < 1e-9, "{cost:?}");
    assert!(report.to_string().contains("1 op fell back, +1.0 ms a step: 8000000 bytes more move"), "{report}");
}

#[test]
fn traces_make_a_placement_by_cost() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [Some(64), Some(64)]);
    let tower = |name: &str| g.name_scope(name, || (0..3).fold(x, |y, _| matmul(y, y)));
    let sum = tower("a") + tower("b");
    let session = Session::with_config(&g, cpus(2)).unwrap();
    let options = RunOptions { trace: true, ..RunOptions::default() };
    let value = Tensor::zeros(DType::F32, [64, 64]).unwrap();
    let (_, metadata) = session.run_with(&options, &[sum], &[(x, value.clone())], &[]).unwrap();
    let mut measured = CostModel::default();
    metadata.trace.add_to(&mut measured);
    session.local().unwrap().measure_links(&mut measured).unwrap();
    for part in ["node a/MatMul MatMul CPU 1 0.", "node b/MatMul_2 MatMul CPU 1 0.", "link CPU CPU "] {
        assert!(measured.to_string().contains(part), "'{part}' is missing in:\n{measured}");
    }
    // The same with times that do not depend on this machine.
    let mut costs = CostModel::default();
    for tower in ["a", "b"] {
        for node in ["MatMul", "MatMul_1", "MatMul_2"] {
            costs.record(&format!("{tower}/{node}"), "MatMul", "CPU", 0.01);
        }
    }
    let config = SessionConfig { placement_policy: Policy::Cost, costs: Arc::new(costs), ..cpus(2) };
    let session = Session::with_config(&g, config).unwrap();
    session.run(&[sum], &[(x, value)], &[]).unwrap();
    for (tower, device) in [("a", "CPU:0"), ("b", "CPU:1")] {
        for node in ["MatMul", "MatMul_1", "MatMul_2"] {
            assert_eq!(device_of(&session, &format!("{tower}/{node}")), device);
        }
    }
}
