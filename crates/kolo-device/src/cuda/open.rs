//! The GPUs that a session asks for: which cards, how much of each, and under which names.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use kolo_core::{DeviceName, Error, Result};

use super::{Card, CudaConfig, CudaDevice, Discovery, MemoryPlan, discover};
use crate::Device;

/// What is asked for. Cards are numbered as in [`GpuRequest::visible_device_list`].
pub struct GpuRequest<'a> {
    /// How many devices at most, and an error if there is none at all; all that there are if absent.
    pub n_devices: Option<usize>,
    /// The cards to use, by visible number, in order: `"1,0"`. Empty means all.
    pub visible_device_list: &'a str,
    /// The share of each card's memory that its device may take, above 0 and at most 1; all of it if absent.
    pub memory_fraction: Option<f64>,
    /// Takes memory when it is needed; otherwise all at once, where there is a limit.
    pub grow: bool,
    /// The most bytes that a device may take, by card.
    pub memory_limits: &'a BTreeMap<usize, u64>,
    /// Several devices on one card: the limit of each in bytes, by card.
    pub virtual_devices: &'a BTreeMap<usize, Vec<u64>>,
    /// Matrix products of floats may use TF32.
    pub allow_tf32: bool,
    /// Where compiled kernels are kept; nowhere if absent.
    pub kernel_cache: Option<PathBuf>,
    /// A device of the task that they belong to; job, replica and task are taken from it.
    pub like: &'a DeviceName,
    /// Where nodes run whose tensors are in host memory.
    pub host: &'a Arc<dyn Device>,
    /// Gives a number that differs after every start.
    pub incarnation: fn() -> u64,
}

/// The GPUs that were asked for. None on a machine without, unless they were asked for by number.
pub fn open(request: &GpuRequest<'_>) -> Result<Vec<Arc<dyn Device>>> {
    let found = discover(None);
    if let Some(why) = &found.absent {
        return match request.n_devices {
            Some(n) => Err(Error::unavailable(format!("device_count asks for {n} GPU(s), but {why}"))),
            None => Ok(Vec::new()),
        };
    }
    let cards = cards(request.visible_device_list, &found)?;
    let plans = memory_plans(request, &cards)?;
    let n = request.n_devices.unwrap_or(plans.len()).min(plans.len());
    if let Some(wanted) = request.n_devices
        && wanted > 0
        && plans.is_empty()
    {
        return Err(Error::unavailable(format!("device_count asks for {wanted} GPU(s), but none is left")));
    }
    let make = |(id, (card, memory)): (usize, (&Card, MemoryPlan))| -> Result<Arc<dyn Device>> {
        let config = CudaConfig {
            card: card.clone(),
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

/// A device each: its card, and how much of it.
fn memory_plans<'c>(request: &GpuRequest<'_>, cards: &[&'c Card]) -> Result<Vec<(&'c Card, MemoryPlan)>> {
    let grow = request.grow;
    let mut plans: Vec<(&Card, MemoryPlan)> = Vec::new();
    for (i, &card) in cards.iter().enumerate() {
        if let Some(limits) = request.virtual_devices.get(&i) {
            plans.extend(limits.iter().map(|&limit| (card, MemoryPlan { limit: Some(limit), grow })));
            continue;
        }
        let share = match request.memory_fraction {
            Some(fraction) if !(0.0..=1.0).contains(&fraction) || fraction == 0.0 => {
                return Err(Error::invalid_argument(format!(
                    "per_process_gpu_memory_fraction is {fraction}, not above 0 and at most 1"
                )));
            }
            Some(fraction) => Some((card.total as f64 * fraction) as u64),
            None => None,
        };
        let limit = match (request.memory_limits.get(&i).copied(), share) {
            (Some(limit), Some(share)) => Some(limit.min(share)),
            (limit, share) => limit.or(share),
        };
        plans.push((card, MemoryPlan { limit, grow: grow || limit.is_none() }));
    }
    if let Some(i) = request.memory_limits.keys().chain(request.virtual_devices.keys()).find(|i| **i >= cards.len()) {
        return Err(Error::invalid_argument(format!("a memory limit names card {i}, but {} are used", cards.len())));
    }
    Ok(plans)
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
