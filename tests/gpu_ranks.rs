//! Ranks whose GPUs exchange data by NCCL. Each is a process; they share one GPU, which NCCL allows if each says that it is on another
//! host. That shows that values, order, ends and errors are right; it says nothing about speed. On a machine without a GPU every test
//! says that it was skipped, and why, with a count.
#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

mod support;

use std::os::fd::AsRawFd;
use std::process::{Command, Output as Printed, Stdio};
use std::time::{Duration, Instant};

use kolo::optim::{Adam, Optimizer};
use kolo::parallel::{DataParallel, World};
use kolo::{DType, GpuOptions, Graph, Output, Session, SessionConfig, Shape, Tensor, nn, ops};

use support::on_gpu;

/// What a process of this program does as a rank.
const PART: &str = "KOLO_TEST_PART";

/// Runs a test of this file as `n` ranks that share the GPU; what each has printed.
fn ranks(n: usize, part: &str, variables: &[(&str, &str)]) -> Vec<Printed> {
    let world = World::create(n).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), world.as_raw_fd());
    let children: Vec<_> = (0..n)
        .map(|rank| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["rank_of_a_world", "--exact", "--nocapture"]).env(PART, part).env("KOLO_WORLD", &path);
            for (name, value) in [("RANK", rank), ("WORLD_SIZE", n), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", n)] {
                command.env(name, value.to_string());
            }
            // Ranks of one host cannot share a GPU. Two processes may time algorithms differently.
            command.env("NCCL_HOSTID", format!("host-{rank}")).env("NCCL_SOCKET_IFNAME", "lo").env("KOLO_TUNE", "off");
            command.envs(variables.iter().copied());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

/// The lines `found: …` of a rank.
fn found(printed: &Printed) -> Vec<String> {
    let text = String::from_utf8_lossy(&printed.stdout);
    // The harness may have begun the line.
    text.lines().filter_map(|line| line.split_once("found: ")).map(|(_, found)| found.to_owned()).collect()
}

fn show(printed: &[Printed]) -> String {
    let text = |printed: &Printed| {
        format!("{}{}", String::from_utf8_lossy(&printed.stdout), String::from_utf8_lossy(&printed.stderr))
    };
    printed.iter().enumerate().map(|(rank, printed)| format!("rank {rank}:\n{}", text(printed))).collect()
}

/// Not a test of its own: what the processes do that others start.
#[test]
fn rank_of_a_world() {
    let Ok(part) = std::env::var(PART) else { return };
    let world = World::from_env().unwrap();
    match part.as_str() {
        "values" => values(&world),
        "training" => training(&world),
        "differing" => differing(&world),
        "death" => death(&world),
        other => panic!("there is no part '{other}'"),
    }
}

fn config() -> SessionConfig {
    let gpu = GpuOptions { full_precision: true, ..GpuOptions::default() };
    SessionConfig { gpu, device_count: [("GPU".to_owned(), 1)].into(), ..SessionConfig::default() }
}

/// Numbers that look random and differ between ranks.
fn wavy(dims: &[usize], seed: usize) -> Tensor {
    let n: usize = dims.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i as f32 + 1.0) * 0.37 + seed as f32 * 1.7).sin()).collect();
    Tensor::from_vec(Shape::new(dims).unwrap(), values).unwrap()
}

/// The same nodes on the GPU and on the host.
fn both<'g>(
    g: &'g Graph,
    pairs: &mut Vec<(String, Output<'g>, Output<'g>)>,
    what: String,
    make: &dyn Fn(&'static str) -> Vec<Output<'g>>,
) {
    let on_gpu = g.device("/device:GPU:0", || make("gpu"));
    let on_host = g.device("/device:CPU:0", || make("cpu"));
    for (a, b) in on_gpu.into_iter().zip(on_host) {
        pairs.push((what.clone(), ops::cast(a, DType::F64), ops::cast(b, DType::F64)));
    }
}

/// Every collective on the GPU gives the bits that it gives on the host.
fn values(world: &World) {
    let n = world.size();
    let g = kolo::graph();
    let mut pairs: Vec<(String, Output<'_>, Output<'_>)> = Vec::new();
    let mut feeds = Vec::new();
    for (i, rows) in [n, 3 * n, 64 * n, 1000 * n, 50_001 * n].into_iter().enumerate() {
        let x = g.placeholder::<f32>(&format!("x{i}"), [Some(rows), Some(3)]);
        feeds.push((x, wavy(&[rows, 3], world.rank() + 10 * i)));
        let dtypes = [DType::F32, DType::BF16, DType::F64, DType::F16, DType::I64, DType::U8, DType::I16];
        for &dtype in if rows > 1000 * n { &dtypes[..2] } else { &dtypes[..] } {
            let scaled = if dtype.is_float() { x } else { x * g.constant(100.0f32) };
            let x = ops::cast(scaled, dtype);
            let what = |what: &str| format!("{what} of {rows} rows of {dtype}");
            let group = |op: &str, at: &str, k: usize| {
                g.op(op).name(&format!("{op}_{i}_{}_{k}_{at}", dtype.name())).attr("group", "world")
            };
            for (k, reduction) in ["sum", "mean", "min", "max", "prod"].into_iter().enumerate() {
                let y = ops::cast(ops::reshape(x, g.constant([-1i32])), dtype);
                both(&g, &mut pairs, what(&format!("all-reduce {reduction}")), &|at| {
                    let op = group("KoloAllReduce", at, k).inputs([x, y]);
                    op.attr("reduction", reduction).build().outputs()
                });
                both(&g, &mut pairs, what(&format!("reduce-scatter {reduction}")), &|at| {
                    vec![group("KoloReduceScatter", at, k).input(x).attr("reduction", reduction).out()]
                });
            }
            both(&g, &mut pairs, what("all-gather"), &|at| vec![group("KoloAllGather", at, 0).input(x).out()]);
            both(&g, &mut pairs, what("all-to-all"), &|at| vec![group("KoloAllToAll", at, 0).input(x).out()]);
            both(&g, &mut pairs, what("broadcast"), &|at| {
                group("KoloBroadcast", at, 0).inputs([x]).attr("root", n as i64 - 1).build().outputs()
            });
        }
    }
    let session = Session::with_config(&g, world.configure(config())).unwrap();
    let fetches: Vec<Output<'_>> = pairs.iter().flat_map(|(_, a, b)| [*a, *b]).collect();
    // Node by node, and replayed.
    for round in 0..5 {
        let values = session.run(&fetches, &feeds, &[]).unwrap();
        for ((what, ..), values) in pairs.iter().zip(values.chunks(2)) {
            assert_eq!(values[0].shape(), values[1].shape(), "{what}, round {round}");
            let bits =
                |tensor: &Tensor| tensor.data::<f64>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<u64>>();
            assert_eq!(bits(&values[0]), bits(&values[1]), "{what}, round {round}");
        }
    }
    println!("found: {} collectives agree", pairs.len());
}

const WIDTH: usize = 300;

fn model<'g>(g: &'g Graph, rank: usize) -> (Output<'g>, Output<'g>, Output<'g>) {
    g.set_seed(rank as i64 + 1);
    let (x, y) = (g.placeholder::<f32>("x", [Some(32), Some(200)]), g.placeholder::<f32>("y", [Some(32), Some(3)]));
    let hidden = nn::Dense::new(WIDTH).activation(nn::relu).name("hidden").apply(x);
    let deep = nn::Dense::new(WIDTH).activation(nn::relu).name("deep").apply(hidden);
    let loss = ops::mean_all(ops::squared_difference(nn::Dense::new(3).name("out").apply(deep), y));
    (x, y, loss)
}

/// Trains, by exchanges between GPUs or through the host; the last weights, and what was captured.
fn train(world: &World, data_parallel: DataParallel, n_steps: usize) -> (Vec<Tensor>, String, String) {
    let g = kolo::graph();
    let (x, y, loss) = model(&g, world.rank());
    let op = Adam::new(1e-3).minimize(loss, None).unwrap();
    let (init, share) = (g.global_variables_initializer(), world.broadcast_variables(&g, 0).unwrap());
    let reads: Vec<Output<'_>> = g.global_variables().iter().map(|variable| variable.read()).collect();
    let session = Session::with_config(&g, data_parallel.configure(config())).unwrap();
    session.run_op(init).unwrap();
    session.run_op(share).unwrap();
    for step in 0..n_steps {
        let seed = step * world.size() + world.rank();
        session.run(&[loss], &[(x, wavy(&[32, 200], seed)), (y, wavy(&[32, 3], seed))], &[op]).unwrap();
    }
    world.check_variables(&g, &session).unwrap();
    let captured = session.local().unwrap().capture_reports().iter().map(|report| format!("{report:?} ")).collect();
    let passes = session.local().unwrap().explain_passes(&[op.name().as_str()], Some("order-collectives")).unwrap();
    (session.run(&reads, &[], &[]).unwrap(), captured, passes.text.unwrap())
}

/// Training gives the same weights whether gradients go from GPU to GPU or through the host, also when it is replayed.
fn training(world: &World) {
    let (on_gpu, captured, graph) =
        train(world, DataParallel::new(world).first_bucket_bytes(8 << 10).bucket_bytes(200 << 10), 30);
    let (on_host, ..) = train(world, DataParallel::new(world).through_host(), 30);
    assert_eq!(on_gpu, on_host);
    assert!(graph.contains("KoloAwaitExchange"), "{graph}");
    println!("found: {} variables are equal; {captured}", on_gpu.len());
}

/// Rank 1 runs another program.
fn differing(world: &World) {
    let g = kolo::graph();
    let reduction = if world.rank() == 1 { "max" } else { "sum" };
    let x = g.placeholder::<f32>("x", [Some(4)]);
    let build = || g.op("KoloAllReduce").name("total").inputs([x]).attr("group", "world").attr("reduction", reduction);
    let total = g.device("/device:GPU:0", || build().out());
    let session = Session::with_config(&g, world.configure(config())).unwrap();
    let error = session.run(&[total], &[(x, Tensor::from([1.0f32; 4]))], &[]).unwrap_err();
    println!("found: {}", error.message().replace('\n', " "));
}

/// Rank 1 dies while GPUs work; the others get an error that names it.
fn death(world: &World) {
    let g = kolo::graph();
    let x = g.new_variable("x", wavy(&[1 << 20, 16], world.rank())).build();
    let mut y = x.read();
    for i in 0..8 {
        let op = g
            .op("KoloAllReduce")
            .name(&format!("sum_{i}"))
            .inputs([y])
            .attr("group", "world")
            .attr("reduction", "mean");
        y = g.device("/device:GPU:0", || op.out());
    }
    let last = ops::sum_all(y);
    let init = g.global_variables_initializer();
    let session = Session::with_config(&g, world.configure(config())).unwrap();
    session.run_op(init).unwrap();
    for _ in 0..10 {
        session.fetch(last).unwrap();
    }
    world.barrier().unwrap();
    let began = Instant::now();
    if world.rank() == 1 {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(500));
            Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
        });
    }
    let error = loop {
        if let Err(error) = session.fetch(last) {
            break error;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "no error came");
    };
    println!("found: {:.1} {}", began.elapsed().as_secs_f64(), error.message().replace('\n', " "));
    // The exchanges have ended: the session says so, and does not hang.
    assert!(session.fetch(last).is_err());
}

#[test]
fn collectives_of_gpus_have_the_bits_of_collectives_of_hosts() {
    on_gpu(|| {
        for n in [1, 2, 3, 4] {
            let printed = ranks(n, "values", &[]);
            let all = printed.iter().all(|printed| printed.status.success() && found(printed).len() == 1);
            assert!(all, "{n} ranks: {}", show(&printed));
            eprintln!("{n} ranks: {}", found(&printed[0])[0]);
        }
    });
}

#[test]
fn training_on_gpus_has_the_bits_of_training_through_the_host() {
    on_gpu(|| {
        for n in [1, 2, 4] {
            let printed = ranks(n, "training", &[]);
            let all = printed.iter().all(|printed| printed.status.success() && found(printed).len() == 1);
            assert!(all, "{n} ranks: {}", show(&printed));
            eprintln!("{n} ranks: {}", found(&printed[0])[0]);
        }
    });
}

#[test]
fn ranks_that_exchange_different_things_are_told_before_anything_is_exchanged() {
    on_gpu(|| {
        let printed = ranks(3, "differing", &[]);
        for printed_by in &printed {
            let found = found(printed_by);
            let says = "as exchange 0, rank 0 does KoloAllReduce 'total' (sum) of float[4], and rank 1 does KoloAllReduce 'total' (max)";
            assert!(found.len() == 1 && found[0].contains(says), "{}", show(&printed));
        }
    });
}

#[test]
fn a_rank_that_dies_while_gpus_exchange_data_is_named() {
    on_gpu(|| {
        let printed = ranks(3, "death", &[]);
        for rank in [0, 2] {
            let found = found(&printed[rank]);
            assert!(printed[rank].status.success() && found.len() == 1, "{}", show(&printed));
            assert!(found[0].contains("rank 1"), "{}", show(&printed));
            let seconds: f64 = found[0].split(' ').next().unwrap().parse().unwrap();
            assert!(seconds < 20.0, "{}", show(&printed));
            eprintln!("rank {rank}: {}", found[0]);
        }
    });
}
