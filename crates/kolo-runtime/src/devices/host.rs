//! Devices that outlive a session.

use std::sync::Arc;

use kolo_core::{DeviceName, Result};
use kolo_device::{Device, DeviceAttributes};
use kolo_graph::Graph;
use kolo_ops::ResourceStore;
use kolo_ops::io::FileAccess;

use crate::config::SessionConfig;
use crate::devices::Devices;
use crate::session::Session;

/// The devices of this process and the state on them (variables, queues), shared by every session created on this
/// host, as the sessions of one TensorFlow server share theirs. A session created by [`Session::new`] has its own
/// devices instead.
///
/// ```
/// # use kolo_runtime::{Host, SessionConfig};
/// let g = kolo_ops::graph();
/// let v = g.variable("v", 3.0f32);
/// let init = g.global_variables_initializer();
///
/// let host = Host::new(SessionConfig::default())?;
/// host.session(&g)?.run_op(init)?;
/// let again = host.session(&g)?;
/// assert_eq!(again.fetch(v.read())?.scalar_value::<f32>()?, 3.0);
/// # Ok::<(), kolo_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Host {
    pub(crate) devices: Arc<Devices>,
    pub(crate) config: SessionConfig,
}

impl Host {
    /// Creates the devices.
    pub fn new(config: SessionConfig) -> Result<Host> {
        Ok(Host { devices: Arc::new(Devices::new(&config)?), config })
    }

    /// Creates the devices of a task of a cluster: `/job:ps/replica:0/task:0/device:CPU:0` and so on.
    pub fn of_task(job: &str, task: u32, config: SessionConfig) -> Result<Host> {
        let like = DeviceName { job: job.into(), task, ..DeviceName::local("CPU", 0) };
        Ok(Host { devices: Arc::new(Devices::of_task(&config, &like)?), config })
    }

    /// The devices.
    pub fn list_devices(&self) -> Vec<DeviceAttributes> {
        self.devices.attributes()
    }

    /// The first device, which is a CPU: data from outside goes into its memory.
    pub fn first_device(&self) -> Arc<dyn Device> {
        self.devices.units[0].device.clone()
    }

    /// The resources on each device, in the order of the devices.
    pub fn resources(&self) -> Vec<Arc<ResourceStore>> {
        self.devices.units.iter().map(|unit| unit.resources.clone()).collect()
    }

    /// Limits the files that ops may access. Can be set once.
    pub fn limit_file_access(&self, access: &FileAccess) {
        for unit in &self.devices.units {
            unit.resources.limit_file_access(access.clone());
        }
    }

    /// A session over `graph` on these devices. Closing it keeps their variables.
    pub fn session(&self, graph: &Graph) -> Result<Session> {
        Session::over(graph, self.devices.clone(), self.config.clone())
    }

    /// A session over `graph` on these devices, with its own variables and queues.
    pub fn session_apart(&self, graph: &Graph) -> Result<Session> {
        Session::over(graph, Arc::new(self.devices.with_own_state()), self.config.clone())
    }

    /// Removes the variables, queues and other resources of these containers; of all containers if none is named.
    pub fn reset(&self, containers: &[String]) {
        self.devices.units.iter().for_each(|unit| unit.resources.clear(containers));
    }
}
