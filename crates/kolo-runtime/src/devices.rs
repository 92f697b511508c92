//! The devices of a session, made from its configuration.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use kolo_core::{DeviceName, Error, Result};
use kolo_device::cpu::topology::{Topology, allowed_cores, print_cores};
use kolo_device::cuda::{self, Card, CudaConfig, CudaDevice, Discovery, MemoryPlan};
use kolo_device::{CpuConfig, CpuDevice, Device, DeviceAttributes};
use kolo_graph::DeviceInfo;
use kolo_ops::ResourceStore;

use crate::config::SessionConfig;
use crate::executor::plan::DeviceUnit;
use crate::inter_pool::InterPool;

/// All devices of a session; CPUs first.
pub(crate) struct Devices {
    pub units: Vec<Arc<DeviceUnit>>,
}

impl Devices {
    /// The devices of a session of this process.
    pub fn new(config: &SessionConfig) -> Result<Devices> {
        Devices::of_task(config, &DeviceName::local("CPU", 0))
    }

    /// The devices of the task that `like` is a device of.
    pub fn of_task(config: &SessionConfig, like: &DeviceName) -> Result<Devices> {
        /// More CPU devices than this is a slip.
        const MOST: usize = 1024;
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        if let Some(kind) = config.device_count.keys().find(|kind| !matches!(kind.as_str(), "CPU" | "GPU")) {
            return Err(Error::invalid_argument(format!("device_count names '{kind}'; there are CPU and GPU devices")));
        }
        let n_cpus = config.device_count.get("CPU").copied().unwrap_or(1);
        if !(1..=MOST).contains(&n_cpus) {
            return Err(Error::invalid_argument(format!("device_count CPU is {n_cpus}, not from 1 to {MOST}")));
        }
        if let Some(id) = config.cpu_devices.keys().find(|id| **id >= n_cpus) {
            return Err(Error::invalid_argument(format!("cpu_devices names CPU {id}, but there are {n_cpus}")));
        }
        let share = (n_cores / n_cpus).max(1);
        let topology = Topology::of_machine();
        // With several NUMA nodes a device that was not told its cores keeps to one; `/cpu:0` alone still means all.
        let split = topology.split(n_cpus).filter(|_| config.cpu_devices.values().all(|plan| plan.cores.is_empty()));
        let allowed = allowed_cores();
        let or_share = |threads: usize, cores: usize| match (threads, cores) {
            (0, 0) => share,
            (0, cores) => cores,
            (threads, _) => threads,
        };
        let mut units = Vec::new();
        for id in 0..n_cpus {
            let mut plan = config.cpu_devices.get(&id).cloned().unwrap_or_default();
            if let Some(split) = &split {
                plan.cores.clone_from(&split[id]);
            }
            if let Some(allowed) = &allowed
                && let Some(core) = plan.cores.iter().find(|core| !allowed.contains(core))
            {
                return Err(Error::invalid_argument(format!(
                    "cpu_devices gives core {core} to CPU {id}; this process may use cores {}",
                    print_cores(allowed)
                )));
            }
            let cpu = CpuConfig {
                intra_op_threads: or_share(config.intra_op_parallelism_threads, plan.cores.len()),
                memory_limit: plan.memory_limit,
                cores: plan.cores.clone(),
                incarnation: incarnation(),
                numa_node: topology.node_of(&plan.cores),
            };
            // Kernels spread over the device's cores themselves; a second runner beside them would only take turns.
            let n_inter = match config.inter_op_parallelism_threads {
                0 => (or_share(0, plan.cores.len()) / cpu.intra_op_threads).max(1),
                threads => threads,
            };
            units.push(unit(
                CpuDevice::new(DeviceName { kind: "CPU".into(), id: id as u32, ..like.clone() }, &cpu),
                n_inter,
                &plan.cores,
            ));
        }
        for gpu in gpus(config, like, &units)? {
            // Kernels are enqueued, which one thread does best.
            units.push(unit(gpu, 1, &[]));
        }
        for device in &config.extra_devices {
            let name = &device.attributes().name;
            if units.iter().any(|unit: &Arc<DeviceUnit>| unit.device.attributes().name == *name) {
                return Err(Error::invalid_argument(format!("there are two devices called {name}")));
            }
            units.push(unit(device.clone(), or_share(config.inter_op_parallelism_threads, 0), &[]));
        }
        Ok(Devices { units })
    }

    /// The same devices and threads with nothing stored on them.
    pub fn with_own_state(&self) -> Devices {
        let units = self.units.iter().map(|unit| {
            let resources = ResourceStore::new(unit.name.clone(), &*unit.device.attributes().name.job);
            resources.limit_file_access(unit.resources.file_access());
            let (device, pool) = (unit.device.clone(), unit.pool.clone());
            Arc::new(DeviceUnit { device, name: unit.name.clone(), pool, resources })
        });
        Devices { units: units.collect() }
    }

    /// What placing must know of them.
    pub fn infos(&self) -> Vec<DeviceInfo> {
        let info = |unit: &Arc<DeviceUnit>| {
            let attributes = unit.device.attributes();
            DeviceInfo { name: attributes.name.clone(), incarnation: attributes.incarnation }
        };
        self.units.iter().map(info).collect()
    }

    pub fn attributes(&self) -> Vec<DeviceAttributes> {
        self.units.iter().map(|unit| unit.device.attributes().clone()).collect()
    }
}

/// The GPUs of a session. None on a machine without, unless they are asked for by number.
fn gpus(config: &SessionConfig, like: &DeviceName, cpus: &[Arc<DeviceUnit>]) -> Result<Vec<Arc<dyn Device>>> {
    let wanted = config.device_count.get("GPU").copied();
    // A device that stands in for a GPU in a test keeps the real ones away.
    let stand_in = config.extra_devices.iter().any(|device| &*device.attributes().name.kind == "GPU");
    let Some(host) = cpus.first().filter(|_| wanted != Some(0) && !stand_in) else { return Ok(Vec::new()) };
    let found = cuda::discover(None);
    if let Some(why) = &found.absent {
        return match wanted {
            Some(n) => Err(Error::unavailable(format!("device_count asks for {n} GPU(s), but {why}"))),
            None => Ok(Vec::new()),
        };
    }
    let cards = cards(&config.gpu.visible_device_list, &found)?;
    let options = &config.gpu;
    let mut plans: Vec<(&Card, MemoryPlan)> = Vec::new();
    for (i, &card) in cards.iter().enumerate() {
        let grow = options.allow_growth.unwrap_or(true);
        if let Some(limits) = options.virtual_devices.get(&i) {
            plans.extend(limits.iter().map(|&limit| (card, MemoryPlan { limit: Some(limit), grow })));
            continue;
        }
        let share = match options.per_process_gpu_memory_fraction {
            Some(fraction) if !(0.0..=1.0).contains(&fraction) || fraction == 0.0 => {
                return Err(Error::invalid_argument(format!(
                    "per_process_gpu_memory_fraction is {fraction}, not above 0 and at most 1"
                )));
            }
            Some(fraction) => Some((card.total as f64 * fraction) as u64),
            None => None,
        };
        let limit = match (options.memory_limits.get(&i).copied(), share) {
            (Some(limit), Some(share)) => Some(limit.min(share)),
            (limit, share) => limit.or(share),
        };
        plans.push((card, MemoryPlan { limit, grow: grow || limit.is_none() }));
    }
    if let Some(i) = options.memory_limits.keys().chain(options.virtual_devices.keys()).find(|i| **i >= cards.len()) {
        return Err(Error::invalid_argument(format!("a memory limit names card {i}, but {} are used", cards.len())));
    }
    let n = wanted.unwrap_or(plans.len()).min(plans.len());
    if let Some(wanted) = wanted
        && wanted > plans.len()
        && plans.is_empty()
    {
        return Err(Error::unavailable(format!("device_count asks for {wanted} GPU(s), but none is left")));
    }
    let kernel_cache = options
        .kernel_cache
        .clone()
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache").join("kolo").join("kernels")));
    let make = |(id, (card, memory)): (usize, (&Card, MemoryPlan))| -> Result<Arc<dyn Device>> {
        let config = CudaConfig {
            card: card.clone(),
            memory,
            incarnation: incarnation(),
            kernel_cache: kernel_cache.clone(),
            host: host.device.clone(),
            allow_tf32: !options.full_precision,
        };
        Ok(CudaDevice::new(DeviceName { kind: "GPU".into(), id: id as u32, ..like.clone() }, &config)?)
    };
    plans.into_iter().take(n).enumerate().map(make).collect()
}

/// The cards that `visible_device_list` names, in its order.
fn cards<'a>(list: &str, found: &'a Discovery) -> Result<Vec<&'a Card>> {
    let usable = found.usable();
    if list.trim().is_empty() {
        return Ok(usable);
    }
    let mut cards: Vec<&Card> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let bad = |why: &str| Error::invalid_argument(format!("visible_device_list: '{entry}' {why}"));
        let number: usize = entry.parse().map_err(|_| bad("is not a number"))?;
        let card =
            usable.iter().find(|card| card.visible == Some(number)).ok_or_else(|| bad("is not a usable card"))?;
        if cards.iter().any(|other| other.visible == card.visible) {
            return Err(bad("is named twice"));
        }
        cards.push(card);
    }
    Ok(cards)
}

fn unit(device: Arc<dyn Device>, n_inter: usize, cores: &[usize]) -> Arc<DeviceUnit> {
    let name = &device.attributes().name;
    let text: Arc<str> = name.to_string().into();
    Arc::new(DeviceUnit {
        pool: Arc::new(InterPool::with_cores(format!("kolo-{}{}", name.kind.to_lowercase(), name.id), n_inter, cores)),
        resources: ResourceStore::new(text.clone(), &*name.job),
        name: text,
        device,
    })
}

/// A random number; the standard library's hasher is seeded by the system.
fn incarnation() -> u64 {
    RandomState::new().build_hasher().finish() | 1
}

/// What a run hears that its session's end has stopped. TensorFlow's clients look for it.
pub(crate) fn stop_text() -> &'static str {
    "Step was cancelled by an explicit call to `Session::Close()`."
}
