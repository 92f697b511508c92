//! A device of a kind that Kolo has never heard of, whose memory the host cannot reach.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kolo_core::{Buffer, Code, DeviceName, Error, Memory, Result, Tensor, TensorData};
use kolo_device::cpu::pool::IntraPool;
use kolo_device::{Device, DeviceAttributes, Event, MemoryStats, NullDevice, StreamRole};
use kolo_graph::CostModel;
use kolo_runtime::{Session, SessionConfig};
use parking_lot::Mutex;

/// Keeps tensors where only its own copies reach them. It computes nothing, as its null device says to the planner.
struct Vault {
    null: Arc<NullDevice>,
    ordinal: u32,
    n_copies: AtomicUsize,
}

struct VaultBuffer {
    ordinal: u32,
    bytes: Mutex<Vec<u8>>,
}

impl Buffer for VaultBuffer {
    fn memory(&self) -> Memory {
        Memory::Device { kind: "VAULT", ordinal: self.ordinal }
    }
    fn n_bytes(&self) -> usize {
        self.bytes.lock().len()
    }
    fn host(&self) -> Option<&[u8]> {
        None
    }
    fn host_mut(&mut self) -> Option<&mut [u8]> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Vault {
    fn new(ordinal: u32) -> Arc<Vault> {
        let null = NullDevice::new(DeviceName::local("VAULT", ordinal), None, &[]);
        Arc::new(Vault { null, ordinal, n_copies: AtomicUsize::new(0) })
    }

    fn n_copies(&self) -> usize {
        self.n_copies.load(Ordering::Relaxed)
    }
}

fn vault_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let TensorData::Buffer { buffer, offset } = tensor.storage() else { return Err(Error::internal("no buffer")) };
    let buffer =
        buffer.as_any().downcast_ref::<VaultBuffer>().ok_or_else(|| Error::internal("memory of another kind"))?;
    Ok(buffer.bytes.lock()[*offset..*offset + tensor.n_bytes()].to_vec())
}

impl Device for Vault {
    fn attributes(&self) -> &DeviceAttributes {
        self.null.attributes()
    }
    fn memory(&self) -> Memory {
        Memory::Device { kind: "VAULT", ordinal: self.ordinal }
    }
    fn allocate(&self, n_bytes: usize, _: &Arc<str>) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(VaultBuffer { ordinal: self.ordinal, bytes: Mutex::new(vec![0; n_bytes]) }))
    }
    fn memory_stats(&self) -> MemoryStats {
        self.null.memory_stats()
    }
    fn pool(&self) -> &Arc<IntraPool> {
        self.null.pool()
    }
    fn copy(&self, tensor: &Tensor, memory: Memory) -> Result<(Tensor, Option<Arc<dyn Event>>)> {
        self.n_copies.fetch_add(1, Ordering::Relaxed);
        let (dtype, shape) = (tensor.dtype(), tensor.shape().clone());
        if memory == self.memory() {
            let bytes = match tensor.memory().is_host() {
                true => tensor.host_bytes()?.to_vec(),
                false => vault_bytes(tensor)?,
            };
            let buffer = VaultBuffer { ordinal: self.ordinal, bytes: Mutex::new(bytes) };
            return Ok((Tensor::from_buffer(dtype, shape, Arc::new(buffer))?, None));
        }
        let mut copy = Tensor::zeros(dtype, shape)?;
        copy.host_bytes_mut()?.copy_from_slice(&vault_bytes(tensor)?);
        Ok((copy, None))
    }
    fn fill(&self, tensor: &mut Tensor, byte: u8) -> Result<()> {
        let TensorData::Buffer { buffer, .. } = tensor.storage() else { return Err(Error::internal("no buffer")) };
        let buffer = buffer.as_any().downcast_ref::<VaultBuffer>();
        buffer.ok_or_else(|| Error::internal("memory of another kind"))?.bytes.lock().fill(byte);
        Ok(())
    }
    fn record(&self, _: StreamRole) -> Option<Arc<dyn Event>> {
        None
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn as_null(&self) -> Option<&NullDevice> {
        Some(&self.null)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn with(vaults: &[&Arc<Vault>]) -> SessionConfig {
    let extra_devices = vaults.iter().map(|&vault| vault.clone() as Arc<dyn Device>).collect();
    SessionConfig { device_count: [("GPU".to_owned(), 0)].into(), extra_devices, ..SessionConfig::default() }
}

#[test]
fn variables_move_to_a_device_with_memory_of_its_own_and_back() {
    let (first, second) = (Vault::new(0), Vault::new(1));
    let g = kolo_ops::graph();
    let (scalar, vector, flags, text) = g.device("/cpu:0", || {
        let long: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let flags: Vec<bool> = (0..100).map(|i| i % 3 == 0).collect();
        (
            g.variable("scalar", 3.0f32),
            g.variable("vector", long),
            g.variable("flags", flags),
            g.variable("text", "abc"),
        )
    });
    let init = g.global_variables_initializer();
    let session = Session::with_config(&g, with(&[&first, &second])).unwrap();
    session.run_op(init).unwrap();
    let reads = [scalar.read(), vector.read(), flags.read(), text.read()];
    let before = session.run(&reads, &[], &[]).unwrap();
    for device in ["/device:VAULT:0", "/device:VAULT:1", "/cpu:0"] {
        for name in ["scalar", "vector", "flags", "text"] {
            session.local().unwrap().move_node(name, device).unwrap();
        }
    }
    assert_eq!(session.run(&reads, &[], &[]).unwrap(), before);
    // Strings are the host's wherever they are used. Between two devices of a kind nothing goes through the host.
    assert_eq!((first.n_copies(), second.n_copies()), (3, 6));
}

#[test]
fn links_to_a_device_with_memory_of_its_own_are_measured() {
    let g = kolo_ops::graph();
    let (first, second) = (Vault::new(0), Vault::new(1));
    let session = Session::with_config(&g, with(&[&first, &second])).unwrap();
    let mut costs = CostModel::default();
    session.local().unwrap().measure_links(&mut costs).unwrap();
    for link in ["link CPU VAULT ", "link VAULT CPU ", "link VAULT VAULT "] {
        assert!(costs.to_string().contains(link), "'{link}' is missing in:\n{costs}");
    }
}

#[test]
fn a_kind_that_is_not_there_is_refused_with_those_that_are() {
    let g = kolo_ops::graph();
    let config = SessionConfig { device_count: [("TPU".to_owned(), 1)].into(), ..SessionConfig::default() };
    let error = Session::with_config(&g, config).err().expect("there are no TPUs");
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("'TPU'; there are CPU and GPU devices"), "{error}");
}
