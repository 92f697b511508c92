//! Pools that change size, and devices that keep to cores. In a process of its own: it counts the process's threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Code, Tensor};
use kolo_device::cpu::topology::allowed_cores;
use kolo_ops::math::matmul::matmul;
use kolo_runtime::{DevicePlan, Session, SessionConfig};

fn config(n_cpus: usize) -> SessionConfig {
    SessionConfig {
        device_count: BTreeMap::from([("CPU".to_owned(), n_cpus)]),
        inter_op_parallelism_threads: 1,
        intra_op_parallelism_threads: 1,
        ..SessionConfig::default()
    }
}

/// The threads of this process whose name begins so; `None` where the system does not say.
fn threads_called(start: &str) -> Option<Vec<usize>> {
    let mut ids = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        // A thread may end while the list is read.
        let Ok(name) = std::fs::read_to_string(task.path().join("comm")) else { continue };
        if name.starts_with(start) {
            ids.push(task.file_name().to_str()?.parse().ok()?);
        }
    }
    Some(ids)
}

#[track_caller]
fn soon(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not come true");
        std::thread::yield_now();
    }
}

/// One test, since the threads of others would be counted too.
#[test]
fn pools_have_exactly_the_threads_they_are_told() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [Some(128), Some(128)]);
    let towers: Vec<_> = (0..8).map(|i| g.device(&format!("/cpu:{}", i % 2), || matmul(matmul(x, x), x))).collect();
    let sum = towers.iter().skip(1).fold(towers[0], |sum, tower| sum + *tower);
    let session = Session::with_config(&g, config(2)).unwrap();
    let local = session.local().unwrap();
    let value = Tensor::from_vec([128, 128], vec![0.5f32; 128 * 128]).unwrap();
    let name = sum.name();
    let run = || session.run_named(&[&name], &[("x", value.clone())], &[]).unwrap();
    let expected = run();
    let intra_threads = || threads_called("kolo-intra");
    let intra = || local.threads().iter().map(|threads| threads.intra_op).collect::<Vec<_>>();
    assert_eq!(intra(), [1, 1]);

    local.set_intra_op_threads("/cpu:1", 3).unwrap();
    assert_eq!(intra(), [1, 3]);
    soon("two workers", || intra_threads().is_none_or(|ids| ids.len() == 2));
    local.set_intra_op_threads("", 2).unwrap();
    assert_eq!(intra(), [2, 2]);
    soon("one worker each", || intra_threads().is_none_or(|ids| ids.len() == 2));
    assert_eq!(run(), expected, "results do not depend on the number of threads");

    local.set_inter_op_threads("/cpu:0", 3).unwrap();
    let inter = || local.threads().iter().map(|threads| threads.inter_op).collect::<Vec<_>>();
    assert_eq!(inter(), [3, 1]);

    // Safe while steps run.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(run(), expected);
                }
            });
        }
        for n in [4, 1, 3, 2, 1, 4, 2] {
            local.set_inter_op_threads("", n).unwrap();
            local.set_intra_op_threads("", n).unwrap();
            assert_eq!((inter(), intra()), (vec![n, n], vec![n, n]));
            run();
            soon("no more threads than allowed", || local.threads().iter().all(|t| t.inter_op_alive <= n));
        }
        stop.store(true, Ordering::Relaxed);
    });
    local.set_inter_op_threads("", 1).unwrap();
    local.set_intra_op_threads("", 1).unwrap();
    soon("no workers", || intra_threads().is_none_or(|ids| ids.is_empty()));
    soon("one runner each", || threads_called("kolo-cpu").is_none_or(|ids| ids.len() <= 2));

    assert_eq!(local.set_intra_op_threads("/cpu:7", 1).unwrap_err().code(), Code::InvalidArgument);
    assert!(local.set_inter_op_threads("/cpu:0", 0).unwrap_err().message().contains("from 1"));

    // Its threads would be counted below.
    drop(session);
    soon("no runners", || threads_called("kolo-cpu").is_none_or(|ids| ids.is_empty()));
    keeps_to_cores();
}

fn keeps_to_cores() {
    let Some(allowed) = allowed_cores() else { return };
    let last = allowed[allowed.len() - 1];
    let g = kolo_ops::graph();
    let x = g.device("/cpu:0", || g.placeholder::<f32>("x", [None]));
    let y = g.device("/cpu:1", || x * 2.0);
    let z = g.device("/cpu:0", || y + x);
    let mut config = config(2);
    config.cpu_devices.insert(1, DevicePlan { cores: vec![last], ..DevicePlan::default() });
    let session = Session::with_config(&g, config.clone()).expect("the core may be used");
    assert!(session.list_devices()[1].description.contains(&format!("cores {last}")));
    assert!(session.list_devices()[0].description.contains("all cores"));
    session.local().expect("it runs here").set_intra_op_threads("/cpu:1", 2).expect("the device exists");
    let one = Tensor::from([1.0f32]);
    assert_eq!(session.run(&[z], &[(x, one)], &[]), Ok(vec![Tensor::from([3.0f32])]));
    let bound = |start: &str| {
        let Some(ids) = threads_called(start) else { return true };
        ids.iter().all(|id| {
            let status = std::fs::read_to_string(format!("/proc/self/task/{id}/status")).unwrap_or_default();
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            list.is_none_or(|list| list.trim() == last.to_string())
        })
    };
    soon("the device's own threads keep to its core", || bound("kolo-intra") && bound("kolo-cpu1"));

    config.cpu_devices.insert(0, DevicePlan { cores: vec![9999], ..DevicePlan::default() });
    let error = Session::with_config(&g, config).err().expect("no machine has this core");
    assert!(error.message().contains("core 9999"), "{error}");
}
