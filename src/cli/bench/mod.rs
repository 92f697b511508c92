//! `kolo bench`: Kolo's side of each benchmark in `bench/README.md`, which says what each one measures.

mod checkpoint;
mod cluster;
mod collectives;
mod data_parallel;
mod dispatch;
mod gpu;
mod gpu_layers;
mod gpu_models;
mod latency;
mod matmul;
mod measure;
mod networks;
mod ops;
mod ps_vs_ring;
mod scaling;
mod training;

use crate::Result;

/// Flags of `kolo bench`.
#[derive(clap::Args)]
pub struct Args {
    /// Run this benchmark
    #[arg(value_enum)]
    name: Name,
    /// Print one JSON object per case
    #[arg(long)]
    json: bool,
    /// Run only cases of `ops`, `gpu` and `data-parallel` whose name begins with this; may be given more than once [default: all but
    /// single layers of `gpu`]
    #[arg(long, value_name = "CASE")]
    case: Vec<String>,
    /// Run `tls` without TLS, for comparison
    #[arg(long)]
    plain: bool,
    #[command(flatten)]
    collectives: collectives::CollectiveFlags,
    #[command(flatten)]
    data_parallel: data_parallel::DataParallelFlags,
    #[command(flatten)]
    worker: cluster::WorkerFlags,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Name {
    RunLatency,
    Dispatch,
    Matmul,
    Mlp,
    Lenet,
    Scaling,
    Checkpoint,
    TrainMnist,
    TrainLenet,
    TrainLm,
    Startup,
    RemoteLatency,
    Transfer,
    PsAsync,
    PsSync,
    PsLarge,
    Tls,
    Gpu,
    Ops,
    Collectives,
    DataParallel,
    PsVsRing,
}

pub fn run(args: &Args) -> Result<()> {
    let report = measure::Report::from_environment(args.json);
    match args.name {
        Name::RunLatency => latency::run(&report),
        Name::Dispatch => dispatch::run(&report),
        Name::Matmul => matmul::run(&report),
        Name::Mlp => networks::mlp(&report),
        Name::Lenet => networks::lenet(&report),
        Name::Scaling => scaling::run(&report),
        Name::Checkpoint => checkpoint::run(&report),
        Name::TrainMnist => training::train_mnist(&report),
        Name::TrainLenet => training::train_lenet(&report),
        Name::TrainLm => training::train_lm(&report),
        Name::Ops => ops::run(&report, &args.case),
        Name::Gpu => gpu::run(&report, &args.case),
        Name::Startup => training::startup(&report),
        Name::RemoteLatency => cluster::remote_latency(&report),
        Name::Transfer => cluster::transfer(&report),
        Name::PsAsync => cluster::train(&report, false, &args.worker),
        Name::PsSync => cluster::train(&report, true, &args.worker),
        Name::PsLarge => cluster::ps_large(&report),
        Name::Tls => cluster::tls(&report, args.plain),
        Name::Collectives => collectives::run(&report, &args.collectives),
        Name::DataParallel => data_parallel::run(&report, &args.data_parallel, &args.case, &args.collectives),
        Name::PsVsRing => ps_vs_ring::run(&report, args.collectives.ranks),
    }
}
