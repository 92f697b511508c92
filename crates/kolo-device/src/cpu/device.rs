//! The CPU as a device. `/cpu:0` alone means all cores; several CPU devices share them or take a set of cores each.

use std::any::Any;
use std::sync::Arc;

use kolo_core::{Buffer, DeviceName, Error, Memory, Result, Tensor};

use crate::cpu::pool::IntraPool;
use crate::cpu::topology;
use crate::{Arena, Charge, Device, DeviceAttributes, Event, MemoryStats, StreamRole};

/// The configuration of a CPU device.
#[derive(Clone, Debug, Default)]
pub struct CpuConfig {
    /// Threads for work inside one kernel, the caller included; 0 means 1.
    pub intra_op_threads: usize,
    /// The limit on its tensors' bytes.
    pub memory_limit: Option<u64>,
    /// The cores it may use; empty means all.
    pub cores: Vec<usize>,
    /// A number that is different after every start.
    pub incarnation: u64,
    /// The NUMA node whose memory its tensors should be in, if its cores belong to one of several.
    pub numa_node: Option<usize>,
}

/// A CPU, or a share of one.
pub struct CpuDevice {
    attributes: DeviceAttributes,
    arena: Arc<Arena>,
    pool: Arc<IntraPool>,
    cores: Vec<usize>,
}

impl CpuDevice {
    /// A CPU device under this name.
    pub fn new(name: DeviceName, config: &CpuConfig) -> Arc<CpuDevice> {
        let cores = (!config.cores.is_empty()).then_some(config.cores.as_slice());
        let description = match cores {
            Some(cores) => format!("cores {}", topology::print_cores(cores)),
            None => "all cores".to_owned(),
        };
        let description = match config.numa_node {
            Some(node) => format!("{description}, NUMA node {node}"),
            None => description,
        };
        Arc::new(CpuDevice {
            arena: Arena::on_node(name.to_string(), config.memory_limit, config.numa_node),
            pool: IntraPool::with_cores(config.intra_op_threads.max(1), cores),
            attributes: DeviceAttributes {
                name,
                memory_limit: config.memory_limit,
                incarnation: config.incarnation,
                description,
            },
            cores: config.cores.clone(),
        })
    }

    /// The cores it is bound to; empty means all.
    pub fn cores(&self) -> &[usize] {
        &self.cores
    }
}

impl Device for CpuDevice {
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
    fn copy(&self, tensor: &Tensor, memory: Memory) -> Result<(Tensor, Option<Arc<dyn Event>>)> {
        let from = tensor.memory();
        match from.is_host() && (memory == Memory::Host || memory == from) {
            true => Ok((tensor.clone(), None)),
            false => Err(Error::unimplemented(format!("a CPU does not copy from {from} to {memory} memory"))),
        }
    }
    fn record(&self, _: StreamRole) -> Option<Arc<dyn Event>> {
        None
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
