//! GPUs that share work: a GPU inside a cluster, towers on two virtual GPUs, and the README's command on a machine with one.
//! On a machine without a GPU every test says that it was skipped, and why, with a count.
#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

mod support;

use std::net::TcpListener;
use std::process::{Command, Stdio};

use kolo::cluster::ReplicaDeviceSetter;
use kolo::optim::{Adam, Optimizer, Sgd};
use kolo::parallel::{Tower, towers};
use kolo::{ClusterSpec, Connect as _, Graph, Output, Server, ServerConfig, Session, SessionConfig, Tensor, nn, ops};
use kolo::{GpuOptions, Shape};

use support::on_gpu;

/// Numbers that look random and are the same everywhere.
fn wavy(dims: &[usize], seed: u32) -> Tensor {
    let n: usize = dims.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i as f32 + 1.0) * 0.37 + seed as f32 * 1.7).sin()).collect();
    Tensor::from_vec(Shape::new(dims).unwrap(), values).unwrap()
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 1e-3 * b.abs().max(1.0), "{what}, {i}: {a} and {b}");
    }
}

/// Large enough that a step's weights and gradients go through shared memory.
const WIDTH: usize = 300;

fn loss<'g>(x: Output<'g>, y: Output<'g>) -> Output<'g> {
    let hidden = nn::Dense::new(WIDTH).activation(nn::relu).kernel(kolo::Initializer::Value(wavy(&[200, WIDTH], 1)));
    let out = nn::Dense::new(3).kernel(kolo::Initializer::Value(wavy(&[WIDTH, 3], 2)));
    let out = out.name("out").apply(hidden.name("hidden").apply(x));
    ops::mean_all(ops::squared_difference(out, y))
}

fn inputs(g: &Graph) -> [Output<'_>; 2] {
    [g.placeholder::<f32>("x", [Some(32), Some(200)]), g.placeholder::<f32>("y", [Some(32), Some(3)])]
}

fn batch(step: u32) -> [Tensor; 2] {
    [wavy(&[32, 200], step), wavy(&[32, 3], step + 100)]
}

fn devices(n_gpus: usize) -> SessionConfig {
    let gpu = GpuOptions { full_precision: true, ..GpuOptions::default() };
    SessionConfig { gpu, device_count: [("GPU".to_owned(), n_gpus)].into(), ..SessionConfig::default() }
}

/// Losses of a worker with so many GPUs whose variables are on a parameter server, over TCP as between machines.
fn losses_in_a_cluster(n_gpus: usize, shared_memory: bool, optimizer: &dyn Optimizer) -> Vec<f32> {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [ps, worker] = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let spec = ClusterSpec::parse(&format!("ps={ps};worker={worker}")).unwrap();
    let config = |n_gpus| ServerConfig { session: devices(n_gpus), shared_memory, ..ServerConfig::default() };
    let [on_ps, on_worker] = listeners;
    let _ps = Server::on(on_ps, &spec, "ps", 0, config(0)).unwrap();
    let _worker = Server::on(on_worker, &spec, "worker", 0, config(n_gpus)).unwrap();
    let g = kolo::graph();
    let setter = ReplicaDeviceSetter::new(1).worker_device("/job:worker/task:0").ps_device("/job:ps/device:CPU:0");
    let build = || {
        let [x, y] = inputs(&g);
        let loss = loss(x, y);
        (x, y, loss, optimizer.minimize(loss, None).unwrap())
    };
    let (x, y, loss, train) = setter.apply(&g, build).unwrap();
    let init = g.global_variables_initializer();
    let session = Session::connect(&format!("grpc://localhost:{}", worker.port()), &g).unwrap();
    let n_found = session.list_devices().iter().filter(|device| &*device.name.kind == "GPU").count();
    assert_eq!(n_found, n_gpus, "a parameter server takes no GPU");
    session.run_op(init).unwrap();
    (0..30)
        .map(|step| {
            let [images, labels] = batch(step % 3);
            session.run(&[loss], &[(x, images), (y, labels)], &[train]).unwrap()[0].scalar_value::<f32>().unwrap()
        })
        .collect()
}

#[test]
fn a_worker_with_a_gpu_learns_what_one_without_does() {
    on_gpu(|| {
        let optimizers: [&dyn Optimizer; 2] = [&Sgd::new(1e-5), &Adam::new(1e-4)];
        for optimizer in optimizers {
            let plain = losses_in_a_cluster(0, true, optimizer);
            // Of the same batch.
            assert!(plain[27] < plain[0], "{plain:?}");
            for shared_memory in [true, false] {
                let found = losses_in_a_cluster(1, shared_memory, optimizer);
                assert_close(&found, &plain, &format!("shared memory {shared_memory}"));
            }
        }
    });
}

#[test]
fn towers_on_two_virtual_gpus_are_captured_and_learn_what_one_does() {
    on_gpu(|| {
        let losses = |gpus: &[&str], no_capture: bool| {
            let g = kolo::graph();
            let [x, y] = inputs(&g);
            let model = towers(&g, gpus, "/gpu:0", &[x, y], |shares| {
                Ok(Tower { loss: loss(shares[0], shares[1]), metrics: Vec::new() })
            });
            let model = model.unwrap();
            let train = Sgd::new(0.001).apply_gradients(&model.gradients, None).unwrap();
            let init = g.global_variables_initializer();
            let config = devices(2);
            let virtual_devices = [(0, vec![1 << 30; 2])].into();
            let gpu = GpuOptions { virtual_devices, no_capture, ..config.gpu };
            let session = Session::with_config(&g, SessionConfig { gpu, ..config }).unwrap();
            session.run_op(init).unwrap();
            let losses: Vec<f32> = (0..30)
                .map(|step| {
                    let [images, labels] = batch(step);
                    let out = session.run(&[model.loss], &[(x, images), (y, labels)], &[train]).unwrap();
                    out[0].scalar_value::<f32>().unwrap()
                })
                .collect();
            let reports = session.local().unwrap().capture_reports();
            let n_captured = reports.iter().flat_map(|report| &report.segments).filter(|made| made.is_ok()).count();
            assert_eq!(n_captured > 0, !no_capture, "{reports:?}");
            (losses, n_captured)
        };
        let (one, _) = losses(&["/gpu:0"], true);
        let (two, n_captured) = losses(&["/gpu:0", "/gpu:1"], false);
        assert!(n_captured >= 2, "a segment of each GPU at least: {n_captured}");
        assert_close(&two, &one, "two towers");
    });
}

#[test]
fn the_readme_s_command_trains_on_the_gpu() {
    on_gpu(|| {
        let output = Command::new(env!("CARGO_BIN_EXE_kolo"))
            .args(["train", "mnist", "--ps", "1", "--workers", "2", "--max-steps", "1200", "--json"])
            .env("KOLO_LOG", "kolo::capture=debug")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{out}\n{err}");
        let end = out.lines().rev().find_map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).ok()?;
            line["test_accuracy"].as_f64()
        });
        assert!(end.is_some_and(|accuracy| accuracy > 0.95), "{out}");
        for task in 0..2 {
            let gpu = format!("/job:worker/replica:0/task:{task}/device:GPU:0");
            let is_captured = |line: &str| line.contains(" launches on ") && line.contains(&gpu);
            assert!(err.lines().any(is_captured), "no step of {gpu} is captured: {err}");
        }
        assert!(!err.contains("/job:ps/replica:0/task:0/device:GPU"), "the parameter server has no GPU: {err}");
    });
}
