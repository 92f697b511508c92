//! The GPUs of this machine: their properties, load and visibility. Creates no context and allocates nothing.

use cudarc::driver::{result, sys};
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;

use super::library::{absent, has_driver};
use super::visible::{plain_pci, select_visible};

/// The lowest supported compute capability: the lowest that NVRTC 13 supports.
const LEAST_CAPABILITY: (i32, i32) = (7, 5);

/// The result of [`discover`].
#[derive(Clone, Debug, Default)]
pub struct Discovery {
    /// All GPUs, in the order of their physical numbers.
    pub gpus: Vec<PhysicalGpu>,
    /// Why no GPU can be used, if none can.
    pub absent: Option<String>,
    /// The driver's version, such as `580.159.03`.
    pub driver: Option<String>,
    /// Entries of `CUDA_VISIBLE_DEVICES` that were dropped, and the like.
    pub warnings: Vec<String>,
}

/// One GPU.
#[derive(Clone, Debug, Default)]
pub struct PhysicalGpu {
    /// Its number on this machine.
    pub physical: Option<usize>,
    /// Its number in this process, which is the driver's; `None` if it is hidden.
    pub visible: Option<usize>,
    /// The model.
    pub name: String,
    /// The compute capability.
    pub capability: (i32, i32),
    /// The PCI bus id.
    pub pci: String,
    /// The UUID.
    pub uuid: String,
    /// Bytes of memory.
    pub total: u64,
    /// Free bytes, if known.
    pub free: Option<u64>,
    /// Percent of the last second in which a kernel ran.
    pub load: Option<u32>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// The processes that use it.
    pub processes: Vec<Process>,
    /// Why it is not used, if it is not.
    pub refused: Option<String>,
}

/// A process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its process id.
    pub pid: u32,
    /// Its program, if known.
    pub name: Option<String>,
    /// The bytes it holds on the GPU, if known.
    pub n_bytes: Option<u64>,
}

impl Discovery {
    /// The GPUs that can be used, by visible number.
    pub fn usable(&self) -> Vec<&PhysicalGpu> {
        let mut gpus: Vec<&PhysicalGpu> =
            self.gpus.iter().filter(|gpu| gpu.visible.is_some() && gpu.refused.is_none()).collect();
        gpus.sort_by_key(|gpu| gpu.visible);
        gpus
    }
}

impl PhysicalGpu {
    /// `gpu:0 (physical 4, 0000:41:00.0)`, for logs and errors.
    pub fn label(&self) -> String {
        let physical = self.physical.map_or_else(|| "?".to_owned(), |n| n.to_string());
        match self.visible {
            Some(visible) => format!("gpu:{visible} (physical {physical}, {})", self.pci),
            None => format!("physical {physical} ({})", self.pci),
        }
    }

    /// The processes that use its memory, for reports: `python3 (pid 7, 12.0 GiB)`.
    pub fn holders(&self) -> String {
        let one = |process: &Process| {
            let name = process.name.as_deref().unwrap_or("a process");
            let held = process.n_bytes.map_or_else(String::new, |n| format!(", {:.1} GiB", n as f64 / GIB));
            format!("{name} (pid {}{held})", process.pid)
        };
        self.processes.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

const GIB: f64 = (1u64 << 30) as f64;

/// Finds the GPUs. `visible_devices` is the value of `CUDA_VISIBLE_DEVICES`, for explanations: the driver applies it
/// itself.
pub fn discover(visible_devices: Option<&str>) -> Discovery {
    let mut found = Discovery { absent: absent(), ..Discovery::default() };
    let nvml = Nvml::init().ok();
    if let Some(nvml) = &nvml {
        found.driver = nvml.sys_driver_version().ok();
        found.gpus = (0..nvml.device_count().unwrap_or(0)).map(|i| nvml_gpu(nvml, i)).collect();
    }
    let listed: Vec<(String, String)> = found.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.pci.clone())).collect();
    let listed: Vec<(&str, &str)> = listed.iter().map(|(uuid, pci)| (uuid.as_str(), pci.as_str())).collect();
    if nvml.is_some() {
        found.warnings = select_visible(visible_devices, &listed).warnings;
    }
    if has_driver() && result::init().is_ok() {
        for number in 0..result::device::get_count().unwrap_or(0) {
            let Some(seen) = driver_gpu(number) else { continue };
            // The driver numbers the visible GPUs; the PCI id identifies the physical one.
            let same = |gpu: &&mut PhysicalGpu| plain_pci(&gpu.pci) == plain_pci(&seen.pci);
            match found.gpus.iter_mut().find(same) {
                Some(gpu) => {
                    gpu.visible = seen.visible;
                    gpu.capability = seen.capability;
                    gpu.total = seen.total;
                }
                None => found.gpus.push(seen),
            }
        }
    }
    for gpu in &mut found.gpus {
        gpu.refused = if gpu.visible.is_none() {
            let why =
                if visible_devices.is_some() { "hidden by CUDA_VISIBLE_DEVICES" } else { "not seen by the driver" };
            Some(why.to_owned())
        } else if gpu.capability < LEAST_CAPABILITY {
            let ((major, minor), least) = (gpu.capability, LEAST_CAPABILITY);
            Some(format!("its compute capability {major}.{minor} is below {}.{}", least.0, least.1))
        } else {
            None
        };
    }
    if found.absent.is_none() && found.usable().is_empty() {
        found.absent = Some("every GPU was refused".to_owned());
    }
    found
}

fn nvml_gpu(nvml: &Nvml, index: u32) -> PhysicalGpu {
    let mut gpu = PhysicalGpu { physical: Some(index as usize), ..PhysicalGpu::default() };
    let Ok(device) = nvml.device_by_index(index) else {
        gpu.refused = Some("the driver does not open it".to_owned());
        return gpu;
    };
    gpu.name = device.name().unwrap_or_default();
    gpu.uuid = device.uuid().unwrap_or_default();
    gpu.pci = device.pci_info().map(|pci| pci.bus_id).unwrap_or_default();
    if let Ok(capability) = device.cuda_compute_capability() {
        gpu.capability = (capability.major, capability.minor);
    }
    if let Ok(memory) = device.memory_info() {
        (gpu.total, gpu.free) = (memory.total, Some(memory.free));
    }
    gpu.load = device.utilization_rates().ok().map(|rates| rates.gpu);
    gpu.temperature = device.temperature(TemperatureSensor::Gpu).ok();
    for process in device.running_compute_processes().unwrap_or_default() {
        gpu.processes.push(Process {
            pid: process.pid,
            name: nvml.sys_process_name(process.pid, 128).ok().filter(|name| !name.is_empty()),
            n_bytes: match process.used_gpu_memory {
                UsedGpuMemory::Used(n_bytes) => Some(n_bytes),
                UsedGpuMemory::Unavailable => None,
            },
        });
    }
    gpu
}

/// The driver's description of its GPU `number`; `None` if a call fails.
fn driver_gpu(number: i32) -> Option<PhysicalGpu> {
    let device = result::device::get(number).ok()?;
    let attribute = |which| {
        // SAFETY: `device` came from the driver just now.
        unsafe { result::device::get_attribute(device, which) }.ok()
    };
    let capability = (
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let mut id = [0u8; 32];
    // SAFETY: the driver writes at most as many bytes as it is told, ended by a zero.
    unsafe { sys::cuDeviceGetPCIBusId(id.as_mut_ptr().cast(), id.len() as i32, device) }.result().ok()?;
    let end = id.iter().position(|&byte| byte == 0).unwrap_or(id.len());
    Some(PhysicalGpu {
        visible: Some(number as usize),
        name: result::device::get_name(device).ok()?,
        capability,
        pci: String::from_utf8_lossy(&id[..end]).into_owned(),
        // SAFETY: `device` came from the driver just now.
        total: unsafe { result::device::total_mem(device) }.ok()? as u64,
        ..PhysicalGpu::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discovery_works_anywhere_and_says_why_there_is_nothing() {
        let found = discover(None);
        assert_eq!(found.usable().is_empty(), found.absent.is_some(), "{found:?}");
        if let Some(why) = &found.absent {
            assert!(!why.contains('\n'), "one line: {why}");
        }
    }

    #[test]
    fn cards_are_named_by_both_numbers() {
        let mut gpu = PhysicalGpu {
            physical: Some(4),
            visible: Some(0),
            pci: "0000:41:00.0".to_owned(),
            ..PhysicalGpu::default()
        };
        assert_eq!(gpu.label(), "gpu:0 (physical 4, 0000:41:00.0)");
        gpu.visible = None;
        assert_eq!(gpu.label(), "physical 4 (0000:41:00.0)");
        gpu.processes.push(Process { pid: 7, name: Some("python3".to_owned()), n_bytes: Some(3 << 29) });
        gpu.processes.push(Process { pid: 8, name: None, n_bytes: None });
        assert_eq!(gpu.holders(), "python3 (pid 7, 1.5 GiB), a process (pid 8)");
    }
}
