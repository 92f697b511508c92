//! One replica, on one device: what every other strategy must agree with.

use kolo_core::Result;

use super::{Mesh, Peers, Strategy, on};

/// Trains on one device.
///
/// ```
/// use kolo::strategy::OneDevice;
///
/// let strategy = OneDevice::new("/cpu:0").build()?;
/// assert_eq!(strategy.num_replicas_in_sync(), 1);
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct OneDevice {
    device: String,
}

impl OneDevice {
    /// On this device; an empty name leaves the choice to the placer.
    pub fn new(device: &str) -> OneDevice {
        OneDevice { device: device.to_owned() }
    }

    /// The strategy.
    pub fn build(self) -> Result<Strategy> {
        Strategy::new("one-device", Mesh::of_process(&[&self.device]), on(&self.device)?, Peers::None)
    }
}
