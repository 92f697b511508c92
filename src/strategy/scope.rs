//! What a program says inside of a strategy's scope.
//!
//! There are two contexts, as in TensorFlow: cross-replica context, in which the program is the only one, and replica context, in the
//! function that [`Scope::run`] calls once for each replica. Each call says in which of them it belongs.

use std::cell::Cell;
use std::collections::HashSet;

use kolo_core::{Error, Result};
use kolo_graph::{Graph, Operation, Output, Variable};

use super::{Peers, PerReplica, Strategy};
use crate::nn;
use crate::ops;
use crate::optim::Optimizer;
use crate::parallel::{ReduceOp, WORLD, average_gradients, gradients_on, replicate, sum};

/// The inside of [`Strategy::scope`]: cross-replica context.
pub struct Scope<'s, 'g> {
    strategy: &'s Strategy,
    graph: &'g Graph,
    /// The replica whose function runs.
    replica: Cell<Option<usize>>,
    /// Variables that were there before.
    outside: HashSet<String>,
}

/// The inside of the function that [`Scope::run`] calls: replica context.
pub struct Replica<'a, 'g> {
    id: usize,
    n_replicas: usize,
    inputs: Vec<Output<'g>>,
    graph: &'g Graph,
    device: &'a str,
}

impl<'g> Replica<'_, 'g> {
    /// The number of this replica among those of all processes, from 0.
    pub fn id(&self) -> usize {
        self.id
    }

    /// How many replicas there are.
    pub fn num_replicas_in_sync(&self) -> usize {
        self.n_replicas
    }

    /// The graph.
    pub fn graph(&self) -> &'g Graph {
        self.graph
    }

    /// Its device; empty if the placer chooses.
    pub fn device(&self) -> &str {
        self.device
    }

    /// What it was given.
    pub fn inputs(&self) -> &[Output<'g>] {
        &self.inputs
    }

    /// Input number `i`. If it was given fewer, the graph keeps the error.
    pub fn input(&self, i: usize) -> Output<'g> {
        self.inputs.get(i).copied().unwrap_or_else(|| {
            self.graph.record_error(Error::invalid_argument(format!(
                "a replica was given {} inputs and asks for number {i}, from 0; give them to `run`",
                self.inputs.len()
            )));
            self.graph.constant(0.0f32)
        })
    }
}

impl<'s, 'g> Scope<'s, 'g> {
    pub(super) fn new(strategy: &'s Strategy, graph: &'g Graph) -> Scope<'s, 'g> {
        let outside = graph.variables(|all| all.iter().map(|variable| variable.name.clone()).collect());
        Scope { strategy, graph, replica: Cell::new(None), outside }
    }

    /// The strategy.
    pub fn strategy(&self) -> &'s Strategy {
        self.strategy
    }

    /// The graph.
    pub fn graph(&self) -> &'g Graph {
        self.graph
    }

    /// How many replicas make an update together.
    pub fn num_replicas_in_sync(&self) -> usize {
        self.strategy.num_replicas_in_sync()
    }

    /// This process's batch, cut along its first dimension into one share for each of its replicas.
    pub fn split(&self, batch: Output<'g>) -> Result<PerReplica<Output<'g>>> {
        self.expect_cross_replica("split")?;
        // Also for one: random initial values follow from the number of nodes before them.
        Ok(PerReplica::new(ops::split(batch, self.strategy.mesh.devices.len(), 0)))
    }

    /// The same value for every replica of this process.
    pub fn same(&self, value: Output<'g>) -> PerReplica<Output<'g>> {
        PerReplica::new(vec![value; self.strategy.mesh.devices.len()])
    }

    /// Calls `describe` once for each replica of this process; what it adds is on that replica's device. Variables that the first replica
    /// makes are shared by all. Gives what each returned.
    pub fn run<T>(
        &self,
        inputs: &[PerReplica<Output<'g>>],
        describe: impl Fn(&Replica<'_, 'g>) -> Result<T>,
    ) -> Result<PerReplica<T>> {
        self.expect_cross_replica("run")?;
        for values in inputs {
            self.check(values, "run")?;
        }
        let mesh = &self.strategy.mesh;
        let devices: Vec<&str> = mesh.devices.iter().map(String::as_str).collect();
        let first = mesh.process * devices.len();
        let build = |i: usize| {
            let replica = Replica {
                id: first + i,
                n_replicas: self.num_replicas_in_sync(),
                inputs: inputs.iter().map(|values| values.local()[i]).collect(),
                graph: self.graph,
                device: devices[i],
            };
            self.replica.set(Some(replica.id));
            let made = describe(&replica);
            self.replica.set(None);
            made
        };
        replicate(self.graph, &devices, None, build, |_, _| Ok(Vec::new())).map(PerReplica::new)
    }

    /// One value from those of all replicas, element by element. Among workers of parameter servers, which do not meet in a step, it is
    /// that of this worker's replicas.
    pub fn reduce(&self, op: ReduceOp, values: &PerReplica<Output<'g>>) -> Result<Output<'g>> {
        self.expect_cross_replica("reduce")?;
        self.check(values, "reduce")?;
        let own = values.local();
        let fold =
            |two: fn(Output<'g>, Output<'g>) -> Output<'g>| own[1..].iter().fold(own[0], |all, value| two(all, *value));
        let local = match op {
            ReduceOp::Sum => sum(own),
            ReduceOp::Mean if own.len() == 1 => own[0],
            ReduceOp::Mean => sum(own) / own.len() as f32,
            ReduceOp::Min => fold(|a, b| ops::minimum(a, b)),
            ReduceOp::Max => fold(|a, b| ops::maximum(a, b)),
            ReduceOp::Prod => fold(|a, b| a * b),
        };
        let Peers::Ranks(_) = &self.strategy.peers else { return Ok(local) };
        Ok(self.on_host(|| {
            let op_name = op.name();
            self.graph
                .op("KoloAllReduce")
                .name("reduce")
                .input(local)
                .attr("group", WORLD)
                .attr("reduction", op_name)
                .out()
        }))
    }

    /// The rows of all replicas' values, one replica after the other. Among workers of parameter servers, those of this worker.
    pub fn gather(&self, values: &PerReplica<Output<'g>>) -> Result<Output<'g>> {
        self.expect_cross_replica("gather")?;
        self.check(values, "gather")?;
        let local = match values.local() {
            [one] => *one,
            many => ops::concat(many, 0),
        };
        let Peers::Ranks(_) = &self.strategy.peers else { return Ok(local) };
        Ok(self.on_host(|| self.graph.op("KoloAllGatherUneven").name("gather").input(local).attr("group", WORLD).out()))
    }

    /// One step of training: an update of the variables by the mean of all replicas' gradients. Each loss is the mean over that replica's
    /// share of the batch; do not divide it by the global batch, as for TensorFlow, which sums. With parameter servers, the optimizer is
    /// wrapped as the update mode says.
    pub fn minimize(
        &self,
        optimizer: impl Optimizer + 'static,
        losses: &PerReplica<Output<'g>>,
        global_step: Option<Variable<'g>>,
    ) -> Result<Operation<'g>> {
        self.minimize_boxed(Box::new(optimizer), losses, global_step)
    }

    /// The same for an optimizer that is chosen at run time.
    pub fn minimize_boxed(
        &self,
        optimizer: Box<dyn Optimizer>,
        losses: &PerReplica<Output<'g>>,
        global_step: Option<Variable<'g>>,
    ) -> Result<Operation<'g>> {
        self.expect_cross_replica("minimize")?;
        self.check(losses, "minimize")?;
        self.graph.check()?;
        let variables = self.graph.trainable_variables();
        let devices = &self.strategy.mesh.devices;
        let gradients = losses.local().iter().zip(devices);
        let gradients = gradients
            .map(|(loss, device)| gradients_on(self.graph, device, *loss, &variables))
            .collect::<Result<Vec<_>>>()?;
        let trains =
            |(i, _): &(usize, &Variable<'g>)| gradients.iter().any(|of| of.get(*i).is_some_and(Option::is_some));
        let trained = variables.iter().enumerate().filter(trains).map(|(_, variable)| *variable);
        for variable in trained.chain(global_step) {
            self.expect_inside(variable)?;
        }
        let averaged = average_gradients(&variables, &gradients)?;
        let train = match &self.strategy.peers {
            Peers::Servers(seat) => seat.wrap(optimizer).apply_gradients(&averaged, global_step)?,
            Peers::None | Peers::Ranks(_) => optimizer.apply_gradients(&averaged, global_step)?,
        };
        Ok(with_updates(self.graph, train))
    }

    fn on_host<R>(&self, body: impl FnOnce() -> R) -> R {
        self.graph.no_device(|| self.graph.device("/device:CPU:0", body))
    }

    fn expect_cross_replica(&self, call: &str) -> Result<()> {
        match self.replica.get() {
            None => Ok(()),
            Some(id) => Err(Error::failed_precondition(format!(
                "`{call}` was called in replica context, inside of the function that `run` calls (replica {id}); return the value from that \
                 function, and call `{call}` on what `run` gives"
            ))),
        }
    }

    fn expect_inside(&self, variable: Variable<'g>) -> Result<()> {
        let name = variable.name();
        match self.outside.contains(&name) {
            false => Ok(()),
            true => Err(Error::failed_precondition(format!(
                "variable '{name}' was made outside of the scope of strategy {}, which could not say where it is kept; make it inside of \
                 `strategy.scope(..)`, or in the function of `run`",
                self.strategy.name
            ))),
        }
    }

    fn check<T>(&self, values: &PerReplica<T>, call: &str) -> Result<()> {
        let (found, n) = (values.local().len(), self.strategy.mesh.devices.len());
        match found == n {
            true => Ok(()),
            false => Err(Error::invalid_argument(format!(
                "`{call}` was given {found} values, and this process has {n} replicas; `split` or `same` make one for each"
            ))),
        }
    }
}

/// One step: the update of the weights, and what layers update beside it, such as the statistics of batch normalisation. The
/// update does not wait for those: what the chief of a cluster applies has no batch of its own to compute them from.
pub(crate) fn with_updates<'g>(graph: &'g Graph, train: Operation<'g>) -> Operation<'g> {
    let updates = nn::update_ops(graph);
    match updates.is_empty() {
        true => train,
        false => graph.group("step", &[&[train], updates.as_slice()].concat()),
    }
}
