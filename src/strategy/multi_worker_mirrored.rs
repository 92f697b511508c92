//! Replicas on the devices of many processes, which exchange gradients among themselves.

use kolo_core::Result;

use super::{Mesh, Peers, Strategy, on};
use crate::parallel::{DataParallel, World};

/// Trains as one of the ranks of a [`World`], each with a copy of the variables and one or more devices: 1×1, 1×N, N×1 or N×M replicas
/// (processes × devices).
///
/// ```
/// use kolo::parallel::World;
/// use kolo::strategy::MultiWorkerMirrored;
///
/// let strategy = MultiWorkerMirrored::new(&World::from_env()?).build()?;
/// assert_eq!(strategy.num_replicas_in_sync(), 1); // no launcher has started this process
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone)]
pub struct MultiWorkerMirrored {
    ranks: DataParallel,
    devices: Vec<String>,
}

/// The name of [`MultiWorkerMirrored`] in TensorFlow 1.15.
pub type CollectiveAllReduce = MultiWorkerMirrored;

impl MultiWorkerMirrored {
    /// As one of these ranks, on the device that the placer chooses.
    pub fn new(world: &World) -> MultiWorkerMirrored {
        MultiWorkerMirrored::with(DataParallel::new(world))
    }

    /// The same with settings for the exchange of gradients.
    pub fn with(ranks: DataParallel) -> MultiWorkerMirrored {
        MultiWorkerMirrored { ranks, devices: vec![String::new()] }
    }

    /// On these devices of this process; every process has as many.
    #[must_use]
    pub fn devices(mut self, devices: &[impl AsRef<str>]) -> MultiWorkerMirrored {
        self.devices = devices.iter().map(|device| device.as_ref().to_owned()).collect();
        self
    }

    /// The strategy.
    pub fn build(self) -> Result<Strategy> {
        let world = self.ranks.world();
        let (process, n_processes) = (world.rank(), world.size());
        let home = on(self.devices.first().map_or("", String::as_str))?;
        let mesh = Mesh { devices: self.devices, process, n_processes };
        Strategy::new("multi-worker-mirrored", mesh, home, Peers::Ranks(Box::new(self.ranks)))
    }
}
