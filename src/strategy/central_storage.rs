//! A replica of the computation on each device, with variables in the host's memory.

use kolo_core::Result;

use super::{Mesh, Peers, Strategy, on};

/// Trains on several devices of this process, as [`Mirrored`](super::Mirrored) does, but keeps variables, and makes updates, in the
/// host's memory: for models whose optimizer state does not fit on one of the devices.
///
/// ```
/// use kolo::strategy::CentralStorage;
///
/// let strategy = CentralStorage::new(&["/cpu:0", "/cpu:1"]).build()?;
/// assert_eq!(strategy.num_replicas_in_sync(), 2);
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CentralStorage {
    devices: Vec<String>,
}

impl CentralStorage {
    /// On these devices.
    pub fn new(devices: &[impl AsRef<str>]) -> CentralStorage {
        CentralStorage { devices: devices.iter().map(|device| device.as_ref().to_owned()).collect() }
    }

    /// The strategy.
    pub fn build(self) -> Result<Strategy> {
        Strategy::new("central-storage", Mesh::of_process(&self.devices), on("/cpu:0")?, Peers::None)
    }
}
