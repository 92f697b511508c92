//! A device for tests: it records what ran and computes nothing.

use std::any::Any;
use std::sync::Arc;

use kolo_core::{Buffer, DeviceName, Memory, Result, Tensor};
use parking_lot::Mutex;

use crate::cpu::pool::IntraPool;
use crate::{Arena, Charge, Device, DeviceAttributes, Event, MemoryStats, StreamRole};

/// A device that records the nodes that ran. Outputs are zeros.
pub struct NullDevice {
    attributes: DeviceAttributes,
    arena: Arc<Arena>,
    pool: Arc<IntraPool>,
    without_kernel: Vec<String>,
    log: Mutex<Vec<String>>,
}

impl NullDevice {
    /// A null device with this name, of any type: `DeviceName::local("GPU", 0)` simulates a GPU. It has no kernels for
    /// the ops in `without_kernel`.
    pub fn new(name: DeviceName, memory_limit: Option<u64>, without_kernel: &[&str]) -> Arc<NullDevice> {
        Arc::new(NullDevice {
            arena: Arena::new(name.to_string(), memory_limit),
            attributes: DeviceAttributes { name, memory_limit, incarnation: 1, description: "computes nothing".into() },
            pool: IntraPool::new(1),
            without_kernel: without_kernel.iter().map(|&op| op.to_owned()).collect(),
            log: Mutex::new(Vec::new()),
        })
    }

    /// Whether it pretends to have a kernel for `op`.
    pub fn has_kernel(&self, op: &str) -> bool {
        !self.without_kernel.iter().any(|refused| refused == op)
    }

    /// Records that `node` ran.
    pub fn record_run(&self, node: &str) {
        self.log.lock().push(node.to_owned());
    }

    /// Takes the list of nodes that ran so far, in order.
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock())
    }
}

impl Device for NullDevice {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }
    fn memory(&self) -> Memory {
        Memory::Host
    }
    fn allocate(&self, n_bytes: usize, tag: &Arc<str>) -> Result<Arc<dyn Buffer>> {
        self.arena.allocate(n_bytes, tag)
    }
    fn charge(&self, n_bytes: usize, tag: &Arc<str>) -> Result<Charge> {
        self.arena.charge(n_bytes, tag)
    }
    fn memory_stats(&self) -> MemoryStats {
        self.arena.stats()
    }
    fn pool(&self) -> &Arc<IntraPool> {
        &self.pool
    }
    fn copy(&self, tensor: &Tensor, _: Memory) -> Result<(Tensor, Option<Arc<dyn Event>>)> {
        Ok((tensor.clone(), None))
    }
    fn record(&self, _: StreamRole) -> Option<Arc<dyn Event>> {
        None
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn as_null(&self) -> Option<&NullDevice> {
        Some(self)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
