//! Opens the GPUs that a session requests: which GPUs, how much memory of each, and under which names.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use kolo_core::{DeviceName, Error, Result};

use super::nccl::{hardware_of, nccl_version};
use super::{CudaConfig, CudaDevice, Discovery, MemoryPlan, PhysicalGpu, discover};
use crate::Device;

/// A request for GPUs. They are numbered as in [`GpuRequest::visible_device_list`].
pub struct GpuRequest<'a> {
    /// The maximum number of devices, and an error if there is no GPU at all; `None` means all.
    pub n_devices: Option<usize>,
    /// The GPUs to use, by visible number, in order: `"1,0"`. Empty means all.
    pub visible_device_list: &'a str,
    /// The fraction of each GPU's memory that its device may use, above 0 and at most 1; `None` means all of it.
    pub memory_fraction: Option<f64>,
    /// Allocates memory on demand; otherwise all at once, if there is a limit.
    pub grow: bool,
    /// The maximum number of bytes that a device may use, by GPU.
    pub memory_limits: &'a BTreeMap<usize, u64>,
    /// Several devices on one GPU: the limit of each in bytes, by GPU.
    pub virtual_devices: &'a BTreeMap<usize, Vec<u64>>,
    /// Matrix products of floats may use TF32.
    pub allow_tf32: bool,
    /// Where compiled kernels are cached; `None` disables the cache.
    pub kernel_cache: Option<PathBuf>,
    /// A device of the task that the GPUs belong to; job, replica and task are taken from it.
    pub like: &'a DeviceName,
    /// The device that runs nodes whose tensors are in host memory.
    pub host: &'a Arc<dyn Device>,
    /// Returns a number that differs after every start.
    pub incarnation: fn() -> u64,
}

/// Opens the requested GPUs. Empty on a machine without GPUs, unless a number of them was requested.
pub fn open(request: &GpuRequest<'_>) -> Result<Vec<Arc<dyn Device>>> {
    let found = discover(None);
    if let Some(why) = &found.absent {
        return match request.n_devices {
            Some(n) => Err(Error::unavailable(format!("device_count asks for {n} GPU(s), but {why}"))),
            None => Ok(Vec::new()),
        };
    }
    let gpus = gpus(request.visible_device_list, &found)?;
    let plans = memory_plans(request, &gpus)?;
    let n = request.n_devices.unwrap_or(plans.len()).min(plans.len());
    if let Some(wanted) = request.n_devices
        && wanted > 0
        && plans.is_empty()
    {
        return Err(Error::unavailable(format!("device_count asks for {wanted} GPU(s), but none is left")));
    }
    let make = |(id, (gpu, memory)): (usize, (&PhysicalGpu, MemoryPlan))| -> Result<Arc<dyn Device>> {
        let config = CudaConfig {
            gpu: gpu.clone(),
            memory,
            incarnation: (request.incarnation)(),
            kernel_cache: request.kernel_cache.clone(),
            host: request.host.clone(),
            allow_tf32: request.allow_tf32,
        };
        let name = DeviceName { kind: "GPU".into(), id: id as u32, ..request.like.clone() };
        Ok(CudaDevice::new(name, &config)?)
    };
    plans.into_iter().take(n).enumerate().map(make).collect()
}

/// What [`RankDevice::hardware`](crate::RankDevice::hardware) will say of the first GPU of a request with this list, for one of
/// `n_ranks`; `None` if there is none, or the ranks could not meet on it.
pub fn rank_hardware(visible_device_list: &str, n_ranks: usize) -> Option<String> {
    let found = discover(None);
    if found.absent.is_some() || (n_ranks > 1 && nccl_version().is_none()) {
        return None;
    }
    let gpus = gpus(visible_device_list, &found).ok()?;
    Some(hardware_of(&gpus.first()?.label()))
}

/// For each device, its GPU and how much of its memory to use.
fn memory_plans<'c>(request: &GpuRequest<'_>, gpus: &[&'c PhysicalGpu]) -> Result<Vec<(&'c PhysicalGpu, MemoryPlan)>> {
    let grow = request.grow;
    let mut plans: Vec<(&PhysicalGpu, MemoryPlan)> = Vec::new();
    for (i, &gpu) in gpus.iter().enumerate() {
        if let Some(limits) = request.virtual_devices.get(&i) {
            plans.extend(limits.iter().map(|&limit| (gpu, MemoryPlan { limit: Some(limit), grow })));
            continue;
        }
        let share = match request.memory_fraction {
            Some(fraction) if !(0.0..=1.0).contains(&fraction) || fraction == 0.0 => {
                return Err(Error::invalid_argument(format!(
                    "per_process_gpu_memory_fraction is {fraction}, not above 0 and at most 1"
                )));
            }
            Some(fraction) => Some((gpu.total as f64 * fraction) as u64),
            None => None,
        };
        let limit = match (request.memory_limits.get(&i).copied(), share) {
            (Some(limit), Some(share)) => Some(limit.min(share)),
            (limit, share) => limit.or(share),
        };
        plans.push((gpu, MemoryPlan { limit, grow: grow || limit.is_none() }));
    }
    if let Some(i) = request.memory_limits.keys().chain(request.virtual_devices.keys()).find(|i| **i >= gpus.len()) {
        return Err(Error::invalid_argument(format!("a memory limit names GPU {i}, but {} are used", gpus.len())));
    }
    Ok(plans)
}

/// The GPUs in `visible_device_list`, in its order.
fn gpus<'a>(list: &str, found: &'a Discovery) -> Result<Vec<&'a PhysicalGpu>> {
    let usable = found.usable();
    if list.trim().is_empty() {
        return Ok(usable);
    }
    let mut gpus: Vec<&PhysicalGpu> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let bad = |why: &str| Error::invalid_argument(format!("visible_device_list: '{entry}' {why}"));
        let number: usize = entry.parse().map_err(|_| bad("is not a number"))?;
        let gpu = usable.iter().find(|gpu| gpu.visible == Some(number)).ok_or_else(|| bad("is not a usable GPU"))?;
        if gpus.iter().any(|other| other.visible == gpu.visible) {
            return Err(bad("is named twice"));
        }
        gpus.push(gpu);
    }
    Ok(gpus)
}
