//! Queries and controls that only a session in this process has: placement of nodes, contents of devices, sizes of
//! pools.

use kolo_core::Result;
use kolo_device::MemoryStats;
use kolo_graph::{CostModel, PlacementRules};

use crate::capture::split::CaptureReport;
use crate::planner::{PassReport, PlacementReport};
use crate::session::local::LocalSession;
use crate::session::threads::DeviceThreads;

/// A session whose graph runs in this process; see [`Session::local`](crate::Session::local).
#[derive(Clone, Copy)]
pub struct LocalView<'a>(pub(crate) &'a LocalSession);

impl LocalView<'_> {
    /// Where every node that was planned so far was placed, and why.
    pub fn placement(&self) -> PlacementReport {
        self.0.placement()
    }

    /// Places everything these fetches need, without running it.
    pub fn explain(&self, fetches: &[&str]) -> Result<PlacementReport> {
        self.0.explain(fetches)
    }

    /// What each pass does to the graph that these fetches need, and the graph as text after the pass `after`, without
    /// running it.
    pub fn explain_passes(&self, fetches: &[&str], after: Option<&str>) -> Result<PassReport> {
        self.0.explain_passes(fetches, after)
    }

    /// For each plan so far: the number of launches that its replay replaces, or why it is not captured. For a plan
    /// in segments it is the sum over these; [`LocalView::capture_reports`] has each.
    pub fn captures(&self) -> Vec<std::result::Result<usize, String>> {
        let sum = |report: CaptureReport| {
            let (mut n, mut why) = (None, report.why_not.unwrap_or_default());
            for segment in report.segments {
                match segment {
                    Ok(launches) => n = Some(n.unwrap_or(0) + launches),
                    Err(reason) => why = reason,
                }
            }
            n.ok_or(why)
        };
        self.capture_reports().into_iter().map(sum).collect()
    }

    /// For each plan so far: what was captured of it, in how many segments, and which nodes split it.
    pub fn capture_reports(&self) -> Vec<CaptureReport> {
        self.0.capture_reports()
    }

    /// How much memory a device's tensors take, by the device's place in
    /// [`Session::list_devices`](crate::Session::list_devices); `None` if there is no such device.
    pub fn memory_stats(&self, device: usize) -> Option<MemoryStats> {
        self.0.memory_stats(device)
    }

    /// Measures the speed of copies between devices, for [`SessionConfig::costs`](crate::SessionConfig::costs).
    /// Copies some megabytes for each pair of device types.
    pub fn measure_links(&self, costs: &mut CostModel) -> Result<()> {
        self.0.measure_links(costs)
    }

    /// Replaces the placement rules. Nodes that were placed and are now pinned elsewhere move if they keep no state,
    /// which [`LocalView::placement`] then shows. If a node that keeps state would have to move, this is an error and
    /// nothing is changed.
    pub fn set_placement_rules(&self, rules: PlacementRules) -> Result<()> {
        self.0.set_placement_rules(rules)
    }

    /// Moves a node to another device between runs, and with it all nodes that must share its device. A variable
    /// keeps its value. Queues and other state do not move, and nothing moves while a run is in flight.
    ///
    /// Other sessions on the same [`crate::Host`] that have used the variable are not notified.
    ///
    /// ```
    /// # use kolo_runtime::{Session, SessionConfig};
    /// let g = kolo_ops::graph();
    /// let v = g.device("/cpu:0", || g.variable("v", 3.0f32));
    /// let init = g.global_variables_initializer();
    /// let config = SessionConfig { device_count: [("CPU".to_owned(), 2)].into(), ..SessionConfig::default() };
    /// let session = Session::with_config(&g, config)?;
    /// session.run_op(init)?;
    /// session.local()?.move_node("v", "/cpu:1")?;
    /// assert_eq!(session.fetch(v.read())?.scalar_value::<f32>()?, 3.0);
    /// # Ok::<(), kolo_core::Error>(())
    /// ```
    pub fn move_node(&self, name: &str, device: &str) -> Result<()> {
        self.0.move_node(name, device)
    }

    /// Sets the maximum number of threads that run nodes of these devices at once, callers included. Steps in flight
    /// apply it when they next request threads; surplus threads end when they are idle.
    ///
    /// `device` may be a full name, a partial one such as `/cpu:1`, or empty for all devices.
    pub fn set_inter_op_threads(&self, device: &str, n_threads: usize) -> Result<()> {
        self.0.set_inter_op_threads(device, n_threads)
    }

    /// Sets the number of threads inside one kernel of these devices, the one that runs the node included. Waits for
    /// the kernels that use them now; results do not depend on the number.
    ///
    /// `device` may be a full name, a partial one such as `/cpu:1`, or empty for all devices.
    pub fn set_intra_op_threads(&self, device: &str, n_threads: usize) -> Result<()> {
        self.0.set_intra_op_threads(device, n_threads)
    }

    /// The threads of every device.
    pub fn threads(&self) -> Vec<DeviceThreads> {
        self.0.threads()
    }

    /// The number of threads that run nodes in addition to callers, over all devices.
    pub fn n_inter_op_threads(&self) -> usize {
        self.0.n_inter_op_threads()
    }
}
