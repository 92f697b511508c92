//! The devices of a session, created from its configuration.

pub(crate) mod host;
pub(crate) mod links;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use kolo_core::{DeviceName, Error, Result};
use kolo_device::cpu::topology::{Topology, allowed_cores, print_cores};
use kolo_device::{CpuConfig, CpuDevice, Device, DeviceAttributes, cuda};
use kolo_graph::DeviceInfo;
use kolo_ops::ResourceStore;
use kolo_ops::collective::Groups;

use crate::compile::part::DeviceUnit;
use crate::config::SessionConfig;
use crate::executor::inter_pool::InterPool;

/// A kind of device besides CPUs.
struct Accelerator {
    /// As in device names and in [`SessionConfig::device_count`].
    kind: &'static str,
    /// Opens the devices of this kind for a session of the task in the given device name. Work on host memory goes to
    /// the CPU. Opens all devices, unless `device_count` has a number.
    open: Open,
}

type Open = fn(&SessionConfig, &DeviceName, &Arc<dyn Device>) -> Result<Vec<Arc<dyn Device>>>;

/// All of them, in the order in which a session lists them. Each op states its kernels for them (`kolo_ops::Op`).
const ACCELERATORS: &[Accelerator] = &[Accelerator { kind: "GPU", open: gpus }];

/// All devices of a session; CPUs first.
pub(crate) struct Devices {
    pub units: Vec<Arc<DeviceUnit>>,
}

impl Devices {
    /// The devices of a session of this process.
    pub fn new(config: &SessionConfig) -> Result<Devices> {
        Devices::of_task(config, &DeviceName::local("CPU", 0))
    }

    /// The devices of the task in the device name `like`.
    pub fn of_task(config: &SessionConfig, like: &DeviceName) -> Result<Devices> {
        /// The maximum number of CPU devices; more are a mistake.
        const MOST: usize = 1024;
        if !kolo_device::IS_OPTIMISED {
            warn_of_slow_build();
        }
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let kinds: Vec<&str> = std::iter::once("CPU").chain(ACCELERATORS.iter().map(|found| found.kind)).collect();
        if let Some(kind) = config.device_count.keys().find(|kind| !kinds.contains(&kind.as_str())) {
            return Err(Error::invalid_argument(format!(
                "device_count names '{kind}'; there are {} devices",
                kinds.join(" and ")
            )));
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
        // With several NUMA nodes, a device without configured cores stays on one node; a single `/cpu:0` still has
        // all cores.
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
            // Kernels use all of the device's cores themselves; a second runner would only compete with them.
            let n_inter = match config.inter_op_parallelism_threads {
                0 => (or_share(0, plan.cores.len()) / cpu.intra_op_threads).max(1),
                threads => threads,
            };
            units.push(unit(
                CpuDevice::new(DeviceName { kind: "CPU".into(), id: id as u32, ..like.clone() }, &cpu),
                n_inter,
                &plan.cores,
                &config.groups,
            ));
        }
        let host = units[0].device.clone();
        for accelerator in ACCELERATORS {
            // A device that replaces one of this kind in a test disables the real ones.
            let is_kind = |device: &Arc<dyn Device>| &*device.attributes().name.kind == accelerator.kind;
            if config.device_count.get(accelerator.kind) == Some(&0) || config.extra_devices.iter().any(is_kind) {
                continue;
            }
            for device in (accelerator.open)(config, like, &host)? {
                // Kernels are only enqueued, which one thread does best.
                units.push(unit(device, 1, &[], &config.groups));
            }
        }
        for device in &config.extra_devices {
            let name = &device.attributes().name;
            if units.iter().any(|unit: &Arc<DeviceUnit>| unit.device.attributes().name == *name) {
                return Err(Error::invalid_argument(format!("there are two devices called {name}")));
            }
            let n_inter = or_share(config.inter_op_parallelism_threads, 0);
            units.push(unit(device.clone(), n_inter, &[], &config.groups));
        }
        Ok(Devices { units })
    }

    /// The same devices and threads, with empty resource stores.
    pub fn with_own_state(&self) -> Devices {
        let units = self.units.iter().map(|unit| {
            let (name, job) = (unit.name.clone(), &*unit.device.attributes().name.job);
            let resources = ResourceStore::with_groups(name, job, unit.resources.groups().clone());
            resources.limit_file_access(unit.resources.file_access());
            let (device, pool) = (unit.device.clone(), unit.pool.clone());
            Arc::new(DeviceUnit { device, name: unit.name.clone(), pool, resources })
        });
        Devices { units: units.collect() }
    }

    /// The device properties that placement needs.
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

/// NVIDIA GPUs, as [`SessionConfig::gpu`] says.
fn gpus(config: &SessionConfig, like: &DeviceName, host: &Arc<dyn Device>) -> Result<Vec<Arc<dyn Device>>> {
    let options = &config.gpu;
    let cache = || std::env::home_dir().map(|home| home.join(".cache").join("kolo").join("kernels"));
    cuda::open(&cuda::GpuRequest {
        n_devices: config.device_count.get("GPU").copied(),
        visible_device_list: &options.visible_device_list,
        memory_fraction: options.per_process_gpu_memory_fraction,
        grow: options.allow_growth.unwrap_or(true),
        memory_limits: &options.memory_limits,
        virtual_devices: &options.virtual_devices,
        allow_tf32: !options.full_precision,
        kernel_cache: options.kernel_cache.clone().or_else(cache),
        like,
        host,
        incarnation,
    })
}

fn unit(device: Arc<dyn Device>, n_inter: usize, cores: &[usize], groups: &Groups) -> Arc<DeviceUnit> {
    let name = &device.attributes().name;
    let text: Arc<str> = name.to_string().into();
    Arc::new(DeviceUnit {
        pool: Arc::new(InterPool::with_cores(format!("kolo-{}{}", name.kind.to_lowercase(), name.id), n_inter, cores)),
        resources: ResourceStore::with_groups(text.clone(), &*name.job, groups.clone()),
        name: text,
        device,
    })
}

/// A random number; the standard library's hasher is seeded by the system.
fn incarnation() -> u64 {
    RandomState::new().build_hasher().finish() | 1
}

/// The error message of a run that was stopped because its session ended. TensorFlow's clients match it.
pub(crate) fn stop_text() -> &'static str {
    "Step was cancelled by an explicit call to `Session::Close()`."
}

/// Says once that this build is slow, and what to do. On standard error, since few programs listen to the log, and nobody
/// would guess.
fn warn_of_slow_build() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| eprintln!("{SLOW_BUILD}"));
}

/// What to do about a build without optimisation.
const SLOW_BUILD: &str =
    "kolo: warning: Kolo was compiled without optimisation: it is about a hundred times slower than it \
could be.
Build with --release, or add these lines to the Cargo.toml of your workspace:

    [profile.dev.package.\"*\"]
    opt-level = 2
";
