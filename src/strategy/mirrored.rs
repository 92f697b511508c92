//! A replica of the computation on each device of one process.

use kolo_core::{Code, DeviceSpec, Error, Result};
use kolo_runtime::SessionConfig;

use super::{Mesh, Peers, Strategy, on};
use crate::cuda::Discovery;
use crate::parallel::World;

/// Trains on several devices of this process: each computes on its share of every batch, and one update is made from the mean of their
/// gradients.
///
/// [`Mirrored::build`] describes all replicas in one graph ([`towers`](crate::parallel::towers)): a variable is kept once, on the first
/// device, and the others read it in every step. [`Mirrored::spread`] gives every device a rank of its own, on a thread, with a copy of
/// the weights; gradients are exchanged among them, by NCCL between GPUs.
#[derive(Clone, Debug)]
pub struct Mirrored {
    devices: Vec<String>,
}

impl Mirrored {
    /// On these devices.
    pub fn new(devices: &[impl AsRef<str>]) -> Mirrored {
        Mirrored { devices: devices.iter().map(|device| device.as_ref().to_owned()).collect() }
    }

    /// On all GPUs that were found ([`discover`](crate::cuda::discover)); on the CPU if there is none.
    pub fn on_gpus(found: &Discovery) -> Mirrored {
        match found.gpus.iter().filter(|gpu| gpu.visible.is_some()).count() {
            0 => Mirrored::new(&["/cpu:0"]),
            n => Mirrored { devices: (0..n).map(|i| format!("/gpu:{i}")).collect() },
        }
    }

    /// The strategy.
    pub fn build(self) -> Result<Strategy> {
        let home = on(self.devices.first().map_or("", String::as_str))?;
        Strategy::new("mirrored", Mesh::of_process(&self.devices), home, Peers::None)
    }

    /// Runs `program` once for each device, on a thread of its own, as one of as many ranks; gives what each returned, in the order of
    /// devices. The first error ends the world of all of them.
    ///
    /// ```
    /// use kolo::parallel::ReduceOp;
    /// use kolo::strategy::Mirrored;
    ///
    /// let devices = ["/cpu:0", "/cpu:1"];
    /// let sums = Mirrored::new(&devices).spread(|strategy| {
    ///     let g = kolo::graph();
    ///     let sum = strategy.scope(&g, |scope| {
    ///         let ids = scope.run(&[], |replica| Ok(g.constant(replica.id() as f32 + 1.0)))?;
    ///         scope.reduce(ReduceOp::Sum, &ids)
    ///     })?;
    ///     strategy.session(&g)?.fetch(sum)?.scalar_value::<f32>()
    /// })?;
    /// assert_eq!(sums, [3.0, 3.0]);
    /// # Ok::<(), kolo::Error>(())
    /// ```
    pub fn spread<R: Send>(self, program: impl Fn(Strategy) -> Result<R> + Sync) -> Result<Vec<R>> {
        Mesh::of_process(&self.devices).check("mirrored")?;
        let worlds = World::threads(self.devices.len())?;
        let results: Vec<Result<R>> = std::thread::scope(|scope| {
            let program = &program;
            let rank = |(world, device): (World, String)| scope.spawn(move || program(rank_on(&world, &device)?));
            let ranks: Vec<_> = worlds.into_iter().zip(self.devices).map(rank).collect();
            let panicked = |_| Err(Error::internal("a replica's thread panicked"));
            ranks.into_iter().map(|rank| rank.join().unwrap_or_else(panicked)).collect()
        });
        // A rank that gave up because of another one only says so.
        let cause = |result: &Result<R>| result.as_ref().is_err_and(|error| error.code() != Code::Aborted);
        match results.iter().position(cause) {
            Some(rank) => results.into_iter().skip(rank).take(1).collect(),
            None => results.into_iter().collect(),
        }
    }
}

/// A rank with one device. Of the GPUs, it opens its own alone.
fn rank_on(world: &World, device: &str) -> Result<Strategy> {
    let spec = DeviceSpec::parse(device)?;
    let mut config = SessionConfig::default();
    let device = match (spec.kind.as_deref(), spec.id) {
        (Some("GPU"), Some(id)) => {
            config.gpu.visible_device_list = id.to_string();
            "/gpu:0"
        }
        _ => device,
    };
    let strategy = super::MultiWorkerMirrored::new(world).devices(&[device]).build()?;
    Ok(Strategy { name: "mirrored", ..strategy }.with_session_config(config))
}
