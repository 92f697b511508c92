//! Which parameter server holds which variable: a device function, and three ways to choose.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use kolo_core::{DType, DeviceSpec, Error, PartialShape, Result, Shape};
use kolo_graph::{Graph, Initializer, Node, is_variable};

use super::PartitionedVariable;

/// The ops that go to parameter servers: TensorFlow's list.
pub const PS_OPS: &[&str] = &[
    "Variable",
    "VariableV2",
    "AutoReloadVariable",
    "MutableHashTable",
    "MutableHashTableV2",
    "MutableHashTableOfTensors",
    "MutableHashTableOfTensorsV2",
    "MutableDenseHashTable",
    "MutableDenseHashTableV2",
    "VarHandleOp",
    "BoostedTreesEnsembleResourceHandleOp",
    "BoostedTreesQuantileStreamResourceHandleOp",
    "ResourceConditionalAccumulator",
    "DecisionTreeResource",
];

/// How a parameter server is chosen for a variable.
#[derive(Clone, Debug, Default)]
pub enum PsStrategy {
    /// One after the other, as TensorFlow does unless told otherwise.
    RoundRobin,
    /// The one that holds the fewest bytes so far.
    Greedy,
    /// As [`Balance`] planned it with all variables in view; variables that are not in the plan as [`PsStrategy::Greedy`]
    /// does. [`ReplicaDeviceSetter::variable`] splits the very large ones.
    #[default]
    Balanced,
}

/// Puts variables on the tasks of the `ps` job and everything else on the worker's device.
///
/// Every process must make its variables in the same order, as between-graph replication does anyway: the choice depends on
/// nothing else, so all processes agree without a word.
///
/// ```
/// use kolo::cluster::{PsStrategy, ReplicaDeviceSetter};
///
/// let g = kolo::graph();
/// let setter = ReplicaDeviceSetter::new(2).worker_device("/job:worker/task:1").strategy(PsStrategy::RoundRobin);
/// setter.apply(&g, || {
///     g.variable("a", 1.0f32);
///     g.variable("b", 2.0f32);
///     g.named_constant("x", 3.0f32);
/// })?;
/// let device = |name: &str| g.operation(name).unwrap().node().unwrap().device.to_string();
/// assert_eq!(device("a"), "/job:ps/task:0");
/// assert_eq!(device("b"), "/job:ps/task:1");
/// assert_eq!(device("x"), "/job:worker/task:1");
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ReplicaDeviceSetter {
    n_ps: usize,
    ps_device: String,
    worker_device: String,
    ps_ops: Vec<String>,
    strategy: PsStrategy,
    balance: Balance,
    split_above: u64,
    /// Shared by all copies, so that scopes that come one after the other go on where the last one stopped.
    chosen: Rc<RefCell<Chosen>>,
}

#[derive(Clone, Debug, Default)]
struct Chosen {
    next: usize,
    n_bytes: Vec<u64>,
}

impl ReplicaDeviceSetter {
    /// For `n_ps` parameter servers. With none, variables go where everything else goes.
    pub fn new(n_ps: usize) -> ReplicaDeviceSetter {
        ReplicaDeviceSetter {
            n_ps,
            ps_device: "/job:ps".to_owned(),
            worker_device: "/job:worker".to_owned(),
            ps_ops: PS_OPS.iter().map(|&op| op.to_owned()).collect(),
            strategy: PsStrategy::default(),
            balance: Balance::default(),
            split_above: 16 << 20,
            chosen: Rc::default(),
        }
    }

    /// The device of what is no variable, `/job:worker` unless said: for a worker `/job:worker/task:i`.
    #[must_use]
    pub fn worker_device(mut self, device: &str) -> Self {
        self.worker_device = device.to_owned();
        self
    }

    /// The device of variables, `/job:ps` unless said; it gets a task if it names a job.
    #[must_use]
    pub fn ps_device(mut self, device: &str) -> Self {
        self.ps_device = device.to_owned();
        self
    }

    /// The ops that go to parameter servers; [`PS_OPS`] unless said.
    #[must_use]
    pub fn ps_ops(mut self, ops: &[&str]) -> Self {
        self.ps_ops = ops.iter().map(|&op| op.to_owned()).collect();
        self
    }

    /// How to choose among the parameter servers.
    #[must_use]
    pub fn strategy(mut self, strategy: PsStrategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// A plan for the variables it names; see [`Balance`].
    #[must_use]
    pub fn balance(mut self, balance: Balance) -> Self {
        (self.strategy, self.balance) = (PsStrategy::Balanced, balance);
        self
    }

    /// The bytes from which [`ReplicaDeviceSetter::variable`] splits a variable: more than 16 MiB unless said.
    #[must_use]
    pub fn split_above(mut self, n_bytes: u64) -> Self {
        self.split_above = n_bytes;
        self
    }

    /// How many parameter servers there are.
    pub fn n_ps(&self) -> usize {
        self.n_ps
    }

    /// Runs `body`; the nodes it adds go to where they belong. A device that a node asks for itself wins.
    pub fn apply<R>(&self, graph: &Graph, body: impl FnOnce() -> R) -> Result<R> {
        Ok(graph.device_fn(self.device_fn()?, body))
    }

    /// The same as a function for [`Graph::device_fn`].
    pub fn device_fn(&self) -> Result<impl Fn(&Node) -> DeviceSpec + 'static + use<>> {
        let ps = DeviceSpec::parse(&self.ps_device)?;
        let worker = DeviceSpec::parse(&self.worker_device)?;
        u32::try_from(self.n_ps)
            .map_err(|_| Error::invalid_argument(format!("{} ps tasks are too many", self.n_ps)))?;
        let setter = self.clone();
        Ok(move |node: &Node| {
            if setter.n_ps == 0 || ps.is_empty() || !setter.ps_ops.iter().any(|op| op == node.op()) {
                return worker.clone();
            }
            let mut device = ps.clone();
            // As in TensorFlow: a task is chosen, and counted, unless the node is for another job.
            if device.job.is_some() && (node.device.job.is_none() || node.device.job == device.job) {
                device.task = Some(setter.choose(node) as u32);
            }
            device
        })
    }

    /// A variable of the scope's device function that is cut along its first dimension into one part for each parameter
    /// server if it is larger than [`ReplicaDeviceSetter::split_above`]; in one part otherwise.
    ///
    /// Call it inside of [`ReplicaDeviceSetter::apply`].
    #[track_caller]
    pub fn variable<'g>(
        &self,
        graph: &'g Graph,
        name: &str,
        shape: &[usize],
        dtype: DType,
        initial: impl Into<Initializer>,
    ) -> Result<PartitionedVariable<'g>> {
        let n_bytes = n_bytes(dtype, &Shape::new(shape)?.into());
        let n_parts = if n_bytes > self.split_above { self.n_ps } else { 1 };
        PartitionedVariable::new(graph, name, shape, dtype, initial, n_parts.max(1))
    }

    /// The task for a node, which is then counted.
    fn choose(&self, node: &Node) -> usize {
        let mut chosen = self.chosen.borrow_mut();
        chosen.n_bytes.resize(self.n_ps, 0);
        let size = size_of(node);
        let least = |loads: &[u64]| (0..loads.len()).min_by_key(|&task| loads[task]).unwrap_or(0);
        let task = match self.strategy {
            PsStrategy::RoundRobin => {
                let task = chosen.next;
                chosen.next = (task + 1) % self.n_ps;
                task
            }
            PsStrategy::Greedy => least(&chosen.n_bytes),
            PsStrategy::Balanced => match self.balance.tasks.get(&*node.name) {
                Some(&task) => task % self.n_ps,
                None => {
                    // What the plan will bring counts already.
                    let planned = self.balance.unplaced(&chosen.n_bytes);
                    least(&planned)
                }
            },
        };
        chosen.n_bytes[task] = chosen.n_bytes[task].saturating_add(size);
        task
    }
}

/// The bytes of a variable's value; 0 if its size is not known.
fn size_of(node: &Node) -> u64 {
    match (node.attrs.dtype("dtype"), node.attrs.shape("shape")) {
        (Ok(dtype), Ok(shape)) => n_bytes(dtype, shape),
        _ => 0,
    }
}

fn n_bytes(dtype: DType, shape: &PartialShape) -> u64 {
    let n_elements = shape.known().map_or(0, |shape| shape.n_elements() as u64);
    n_elements.saturating_mul(dtype.size().unwrap_or(0) as u64)
}

/// Which parameter server each variable of a model goes to, worked out with all of them in view: the largest first, each to
/// the task with the fewest bytes.
///
/// ```
/// use kolo::cluster::{Balance, ReplicaDeviceSetter};
/// use kolo::Initializer;
///
/// let model = |g: &kolo::Graph| {
///     for (name, size) in [("a", 10), ("b", 30), ("c", 20)] {
///         g.new_variable(name, Initializer::Zeros).shape([size]).build();
///     }
/// };
/// let balance = Balance::of_model(2, model)?;
/// assert_eq!(balance.n_bytes(), [120, 120]);
/// let g = kolo::graph();
/// ReplicaDeviceSetter::new(2).balance(balance).apply(&g, || model(&g))?;
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Balance {
    tasks: HashMap<String, usize>,
    n_bytes: Vec<u64>,
}

impl Balance {
    /// A plan for variables of these names and bytes.
    pub fn new(n_ps: usize, variables: &[(String, u64)]) -> Result<Balance> {
        if n_ps == 0 {
            return Err(Error::invalid_argument("variables are balanced over at least one ps task"));
        }
        let mut order: Vec<&(String, u64)> = variables.iter().collect();
        // The sort is stable, so equal sizes stay in order and every process plans the same.
        order.sort_by_key(|(_, size)| std::cmp::Reverse(*size));
        let mut balance = Balance { tasks: HashMap::new(), n_bytes: vec![0; n_ps] };
        for (name, size) in order {
            let task = (0..n_ps).min_by_key(|&task| balance.n_bytes[task]).unwrap_or(0);
            balance.tasks.insert(name.clone(), task);
            balance.n_bytes[task] = balance.n_bytes[task].saturating_add(*size);
        }
        Ok(balance)
    }

    /// A plan for the variables that `build` makes; it is called with a graph that is thrown away.
    pub fn of_model<R>(n_ps: usize, build: impl FnOnce(&Graph) -> R) -> Result<Balance> {
        let graph = kolo_ops::graph();
        build(&graph);
        graph.check()?;
        let sizes: Vec<(String, u64)> = graph.variables(|all| {
            all.iter().filter(|v| !v.local).map(|v| (v.name.clone(), n_bytes(v.dtype, &v.shape))).collect()
        });
        Balance::new(n_ps, &sizes)
    }

    /// The task of a variable, if it is planned.
    pub fn task(&self, variable: &str) -> Option<usize> {
        self.tasks.get(variable).copied()
    }

    /// The bytes of each task.
    pub fn n_bytes(&self) -> &[u64] {
        &self.n_bytes
    }

    /// The bytes of the fullest task over the mean; 1 is perfect.
    pub fn imbalance(&self) -> f64 {
        imbalance(&self.n_bytes)
    }

    /// For each task the larger of what it has and what it is to have.
    fn unplaced(&self, placed: &[u64]) -> Vec<u64> {
        let planned = |task: usize| self.n_bytes.get(task).copied().unwrap_or(0);
        placed.iter().enumerate().map(|(task, &n_bytes)| n_bytes.max(planned(task))).collect()
    }
}

/// The largest over the mean; 1 if there is nothing.
fn imbalance(n_bytes: &[u64]) -> f64 {
    let total: u64 = n_bytes.iter().sum();
    match (n_bytes.iter().max(), total) {
        (None, _) | (_, 0) => 1.0,
        (Some(&most), total) => most as f64 * n_bytes.len() as f64 / total as f64,
    }
}

/// The bytes of variables on each task of job `job`, by what the nodes of the graph ask for.
///
/// ```
/// use kolo::cluster::{ReplicaDeviceSetter, ps_bytes};
///
/// let g = kolo::graph();
/// ReplicaDeviceSetter::new(2).apply(&g, || g.variable("w", [1.0f32, 2.0]))?;
/// assert_eq!(ps_bytes(&g, "ps", 2), [8, 0]);
/// # Ok::<(), kolo::Error>(())
/// ```
pub fn ps_bytes(graph: &Graph, job: &str, n_ps: usize) -> Vec<u64> {
    let mut n_bytes = vec![0u64; n_ps];
    for (_, node) in graph.nodes().iter().filter(|(_, node)| is_variable(node)) {
        let task = node.device.task.map(|task| task as usize);
        if node.device.job.as_deref() == Some(job)
            && let Some(load) = task.and_then(|task| n_bytes.get_mut(task))
        {
            *load = load.saturating_add(size_of(node));
        }
    }
    n_bytes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::ops;
    use crate::optim::{Adam, Optimizer};

    fn device(g: &Graph, name: &str) -> String {
        g.operation(name).unwrap().node().unwrap().device.to_string()
    }

    /// The variables of a ResNet-50, in the order in which a program makes them.
    fn resnet(g: &Graph) {
        fn variable(g: &Graph, shape: &[usize]) {
            g.new_variable("v", Initializer::Zeros).shape(kolo_core::Shape::new(shape).unwrap()).build();
        }
        let conv = |window: usize, from: usize, to: usize| {
            variable(g, &[window, window, from, to]);
            (0..4).for_each(|_| variable(g, &[to]));
        };
        conv(7, 3, 64);
        let mut from = 64;
        for (n_blocks, width) in [(3, 64), (4, 128), (6, 256), (3, 512)] {
            for block in 0..n_blocks {
                if block == 0 {
                    conv(1, from, 4 * width);
                }
                conv(1, from, width);
                conv(3, width, width);
                conv(1, width, 4 * width);
                from = 4 * width;
            }
        }
        variable(g, &[2048, 1000]);
        variable(g, &[1000]);
    }

    #[test]
    fn a_resnet_is_balanced_over_two_to_eight_servers() {
        for n_ps in 2..=8 {
            let g = kolo_ops::graph();
            let balance = Balance::of_model(n_ps, resnet).unwrap();
            assert!(balance.imbalance() <= 1.1);
            ReplicaDeviceSetter::new(n_ps).balance(balance.clone()).apply(&g, || resnet(&g)).unwrap();
            let found = ps_bytes(&g, "ps", n_ps);
            assert_eq!(found, balance.n_bytes(), "what was planned is what happens");
            assert_eq!(found.iter().sum::<u64>(), 102_440_608);
            // Without a plan the order of the variables decides, and it is no worse than round robin.
            let of = |strategy: PsStrategy| {
                let g = kolo_ops::graph();
                ReplicaDeviceSetter::new(n_ps).strategy(strategy).apply(&g, || resnet(&g)).unwrap();
                imbalance(&ps_bytes(&g, "ps", n_ps))
            };
            let (greedy, robin) = (of(PsStrategy::Greedy), of(PsStrategy::RoundRobin));
            assert!(greedy <= robin && greedy <= 1.3, "{n_ps}: {greedy} and {robin}");
            assert_eq!(of(PsStrategy::Balanced), greedy);
        }
    }

    #[test]
    fn an_embedding_model_is_balanced_because_its_tables_are_split() {
        for n_ps in 2..=8 {
            let g = kolo_ops::graph();
            let setter = ReplicaDeviceSetter::new(n_ps);
            let ids = g.placeholder::<i64>("ids", [None]);
            let parts = setter
                .apply(&g, || {
                    let users = setter.variable(&g, "users", &[1_000_003, 16], DType::F32, Initializer::Zeros).unwrap();
                    let items = setter.variable(&g, "items", &[300_000, 16], DType::F32, Initializer::Zeros).unwrap();
                    g.new_variable("w", Initializer::Zeros).shape([32, 64]).build();
                    users.lookup(ids);
                    (users.parts().len(), items.parts().len())
                })
                .unwrap();
            assert_eq!(parts, (n_ps, n_ps));
            let found = ps_bytes(&g, "ps", n_ps);
            assert!(imbalance(&found) <= 1.1, "{found:?}");
            g.check().unwrap();
        }
    }

    #[test]
    fn the_nodes_of_tensorflows_example_go_where_tensorflow_puts_them() {
        let g = kolo_ops::graph();
        let setter = ReplicaDeviceSetter::new(2).worker_device("/job:worker/task:0").strategy(PsStrategy::RoundRobin);
        let (w, loss) = setter
            .apply(&g, || {
                let w = g.variable("w", [1.0f32, 2.0, 3.0]);
                g.variable("e", [[1.0f32, 2.0]]);
                crate::train::global_step_or_create(&g).unwrap();
                g.device("/job:ps/task:0", || g.variable("pinned", 1.0f32));
                g.device("/job:worker/task:7", || g.variable("mine", 1.0f32));
                g.device("/gpu:1", || g.variable("fast", 1.0f32));
                (w, ops::sum_all(ops::square(w.read())))
            })
            .unwrap();
        assert_eq!(device(&g, "w"), "/job:ps/task:0");
        assert_eq!(device(&g, "e"), "/job:ps/task:1");
        assert_eq!(device(&g, "global_step"), "/job:ps/task:0");
        // A variable with a task of its own takes its turn, one of another job does not.
        assert_eq!(device(&g, "pinned"), "/job:ps/task:0");
        assert_eq!(device(&g, "mine"), "/job:worker/task:7");
        assert_eq!(device(&g, "fast"), "/job:ps/task:0/device:GPU:1");
        assert_eq!(device(&g, &loss.operation().name()), "/job:worker/task:0");
        // Slots are colocated with their variables, and no device function moves them.
        let adam = Adam::new(0.1);
        setter.apply(&g, || adam.minimize(loss, None)).unwrap().unwrap();
        let slot = adam.get_slot(w, "m").unwrap().handle().operation().node().unwrap();
        assert_eq!(slot.colocation_groups().collect::<Vec<_>>(), ["w"]);
        assert!(slot.device.is_empty());
    }

    #[test]
    fn no_servers_and_bad_devices() {
        let g = kolo_ops::graph();
        ReplicaDeviceSetter::new(0).worker_device("/job:worker/task:2").apply(&g, || g.variable("v", 1.0f32)).unwrap();
        assert_eq!(device(&g, "v"), "/job:worker/task:2");
        assert!(ReplicaDeviceSetter::new(1).worker_device("worker").apply(&g, || ()).is_err());
        assert!(Balance::new(0, &[]).is_err());
        assert_eq!(Balance::new(3, &[]).unwrap().imbalance(), 1.0);
    }
}
