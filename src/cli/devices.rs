//! `kolo devices`: what a session would see on this machine.

use std::io::IsTerminal;
use std::time::Duration;

use crate::cuda::{self, Discovery, PhysicalGpu};
use crate::{DeviceAttributes, Error, Result, Session, SessionConfig};
use serde_json::json;

use super::machine::{self, Memory, Process};
use super::print;

/// Flags of `kolo devices`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kolo devices              one look
  kolo devices --watch      again every second, until Ctrl-C
  kolo devices --json       one JSON object a device, for programs")]
pub struct Args {
    /// Print one JSON object per device
    #[arg(long)]
    json: bool,
    /// Repeat until Ctrl-C
    #[arg(long)]
    watch: bool,
    /// With --watch, wait this many seconds between listings
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    interval: f64,
}

pub fn run(args: &Args) -> Result<()> {
    let graph = crate::graph();
    // GPUs are looked at from outside: a session would make a context on each, which takes some of its memory.
    let config = SessionConfig { device_count: [("GPU".to_owned(), 0)].into(), ..SessionConfig::default() };
    let devices = Session::with_config(&graph, config)?.list_devices();
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let interval = Duration::try_from_secs_f64(args.interval)
        .map_err(|_| Error::invalid_argument(format!("--interval {} is not a number of seconds", args.interval)))?;
    let mut before = machine::ticks();
    // The first look needs a short while to see what the cores do.
    std::thread::sleep(Duration::from_millis(100));
    loop {
        let now = machine::ticks();
        let look = Look {
            n_cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory: machine::memory(),
            load: before.zip(now).map(|(before, now)| now.load_since(before)),
            processes: machine::largest_processes(3),
        };
        before = now;
        if args.watch && !args.json && std::io::stdout().is_terminal() {
            // To the top left corner, and nothing below.
            print("\x1b[H\x1b[J")?;
        }
        devices.iter().try_for_each(|device| show(device, &look, args.json))?;
        show_gpus(&cuda::discover(visible.as_deref()), args.json)?;
        if !args.watch {
            return Ok(());
        }
        std::thread::sleep(interval);
    }
}

/// One snapshot of the machine.
struct Look {
    n_cores: usize,
    memory: Option<Memory>,
    load: Option<f64>,
    processes: Vec<Process>,
}

fn show(device: &DeviceAttributes, look: &Look, as_json: bool) -> Result<()> {
    let Look { n_cores, memory, load, processes } = look;
    if as_json {
        let processes: Vec<_> =
            processes.iter().map(|p| json!({ "pid": p.id, "name": p.name, "memory": p.memory })).collect();
        return print(json!({
            "name": device.name.to_string(), "kind": device.name.kind.as_ref() as &str, "description": device.description,
            "cores": n_cores, "load": load, "memory_total": memory.map(|m| m.total), "memory_free": memory.map(|m| m.free),
            "memory_limit": device.memory_limit, "processes": processes,
        }));
    }
    print(&device.name)?;
    print(format_args!(
        "  kind         {}, {n_cores} cores on this machine ({})",
        device.name.kind, device.description
    ))?;
    match memory {
        Some(memory) => print(format_args!("  memory       {} total, {} free", gib(memory.total), gib(memory.free)))?,
        None => print("  memory       unknown on this system")?,
    }
    if let Some(limit) = device.memory_limit {
        print(format_args!("  limit        {}", gib(limit)))?;
    }
    if let Some(load) = load {
        print(format_args!("  load         {:.0}%", load * 100.0))?;
    }
    let users: Vec<String> = processes.iter().map(|p| format!("{} ({}) {}", p.name, p.id, gib(p.memory))).collect();
    match users.is_empty() {
        true => Ok(()),
        false => print(format_args!("  used by      {}", users.join(", "))),
    }
}

fn show_gpus(found: &Discovery, as_json: bool) -> Result<()> {
    for gpu in &found.gpus {
        match as_json {
            true => print(gpu_json(gpu))?,
            false => show_gpu(gpu)?,
        }
    }
    if as_json {
        return Ok(());
    }
    if let Some(why) = &found.absent {
        print(format_args!("No GPU devices: {why}; `kolo doctor gpu` says what was looked for."))?;
    }
    if let Some(driver) = &found.driver {
        print(format_args!("NVIDIA driver {driver}"))?;
    }
    found.warnings.iter().try_for_each(|warning| print(format_args!("warning: {warning}")))
}

fn gpu_json(gpu: &PhysicalGpu) -> serde_json::Value {
    let processes: Vec<_> =
        gpu.processes.iter().map(|p| json!({ "pid": p.pid, "name": p.name, "memory": p.n_bytes })).collect();
    json!({
        "name": gpu.visible.map(|n| format!("/device:GPU:{n}")), "kind": "GPU", "description": gpu.name,
        "physical": gpu.physical, "visible": gpu.visible, "uuid": gpu.uuid, "pci": gpu.pci,
        "compute_capability": format!("{}.{}", gpu.capability.0, gpu.capability.1),
        "memory_total": gpu.total, "memory_free": gpu.free, "load": gpu.load.map(|load| f64::from(load) / 100.0),
        "temperature": gpu.temperature, "processes": processes, "refused": gpu.refused,
    })
}

fn show_gpu(gpu: &PhysicalGpu) -> Result<()> {
    let physical = gpu.physical.map_or_else(|| "unknown".to_owned(), |n| n.to_string());
    match (&gpu.refused, gpu.visible) {
        (None, Some(visible)) => print(format_args!("/device:GPU:{visible}"))?,
        _ => print(format_args!("GPU, physical {physical}: not used"))?,
    }
    let (major, minor) = gpu.capability;
    print(format_args!("  kind         {}, compute capability {major}.{minor}", gpu.name))?;
    let visible = gpu.visible.map_or_else(|| "none".to_owned(), |n| n.to_string());
    print(format_args!("  number       {physical} on this machine, {visible} in this process"))?;
    print(format_args!("  bus          {} ({})", gpu.pci, gpu.uuid))?;
    let free = gpu.free.map_or_else(|| "unknown".to_owned(), gib);
    print(format_args!("  memory       {} total, {free} free", gib(gpu.total)))?;
    if let Some(load) = gpu.load {
        print(format_args!("  load         {load}%"))?;
    }
    if let Some(degrees) = gpu.temperature {
        print(format_args!("  temperature  {degrees} °C"))?;
    }
    if !gpu.processes.is_empty() {
        print(format_args!("  used by      {}", gpu.holders()))?;
    }
    match &gpu.refused {
        Some(why) => print(format_args!("  refused      {why}")),
        None => Ok(()),
    }
}

fn gib(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 => format!("{:.1} GiB", b as f64 / f64::from(1 << 30)),
        b => format!("{:.0} MiB", b as f64 / f64::from(1 << 20)),
    }
}
