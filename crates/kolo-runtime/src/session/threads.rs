//! Thread pools that can be resized while their session is in use.

use kolo_core::{DeviceName, DeviceSpec, Error, Result};

use crate::compile::part::DeviceUnit;
use crate::session::local::LocalSession;

/// The threads of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceThreads {
    /// The device.
    pub device: DeviceName,
    /// The maximum number of threads that run its nodes in one step, a caller of the session included.
    pub inter_op: usize,
    /// The current number of threads that run its nodes; they are started on demand.
    pub inter_op_alive: usize,
    /// The number of threads inside one of its kernels, the one that runs the node included.
    pub intra_op: usize,
}

impl LocalSession {
    pub fn set_inter_op_threads(&self, device: &str, n_threads: usize) -> Result<()> {
        self.for_each_device(device, n_threads, |unit| unit.pool.set_max_threads(n_threads))
    }

    pub fn set_intra_op_threads(&self, device: &str, n_threads: usize) -> Result<()> {
        self.for_each_device(device, n_threads, |unit| {
            unit.device.pool().set_threads(n_threads);
        })
    }

    pub fn threads(&self) -> Vec<DeviceThreads> {
        let of = |unit: &std::sync::Arc<DeviceUnit>| DeviceThreads {
            device: unit.device.attributes().name.clone(),
            inter_op: unit.pool.max_threads(),
            inter_op_alive: unit.pool.n_threads(),
            intra_op: unit.device.pool().n_threads(),
        };
        self.devices.units.iter().map(of).collect()
    }

    fn for_each_device(&self, device: &str, n_threads: usize, set: impl Fn(&DeviceUnit)) -> Result<()> {
        /// The maximum number of threads; more are a mistake.
        const MOST: usize = 4096;
        if !(1..=MOST).contains(&n_threads) {
            return Err(Error::invalid_argument(format!("{n_threads} threads: a pool has from 1 to {MOST}")));
        }
        let spec = DeviceSpec::parse(device)?;
        self.device_like(&spec)?;
        self.devices
            .units
            .iter()
            .filter(|unit| spec.matches(&unit.device.attributes().name))
            .for_each(|unit| set(unit));
        Ok(())
    }
}
