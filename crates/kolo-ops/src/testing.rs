//! How ops are tested: against stated values, on every device there is, and their gradients against finite differences.
//!
//! ```text
//! check_op("Softplus").input([-1.0f32, 0.0]).gives([0.313262f32, 0.693147]).gradient();
//! ```
//!
//! The values are checked on a CPU and, if the machine has a GPU and the op has a kernel there for these dtypes, on the GPU
//! (`testing/gpu.rs`). Updates of variables by optimizers have a helper of their own, which does the same
//! (`optim/testing.rs`).

pub(crate) mod gpu;

use std::collections::HashMap;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use kolo_core::{DType, DeviceName, Error, Result, Tensor};
use kolo_device::{CpuConfig, CpuDevice, Device, MemoryStats};
use kolo_graph::{AttrValue, Endpoint, Flow, Graph, Node, Nodes, Output};

use crate::cancel::CancelToken;
use crate::kernel::{Done, KernelCtx, KernelInit, Outcome, Value};
use crate::op::{KernelDef, KernelMaker};
use crate::resource::ResourceStore;
use crate::step::{Received, Rendezvous, RendezvousKey, StepServices};

/// One op with given attributes and inputs.
pub struct OpTest {
    op: String,
    attrs: Vec<(String, AttrValue)>,
    inputs: Vec<Tensor>,
    tolerance: f64,
}

/// Begins a test of the op of this name.
pub fn check_op(op: &str) -> OpTest {
    OpTest { op: op.to_owned(), attrs: Vec::new(), inputs: Vec::new(), tolerance: 1e-5 }
}

impl OpTest {
    /// An attribute.
    pub fn attr(mut self, name: &str, value: impl Into<AttrValue>) -> Self {
        self.attrs.push((name.to_owned(), value.into()));
        self
    }

    /// The next input.
    pub fn input(mut self, input: impl Into<Tensor>) -> Self {
        self.inputs.push(input.into());
        self
    }

    /// The largest allowed difference, relative for values above 1.
    pub fn tolerance(mut self, tolerance: f64) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Runs the op; its first output must be this. Inputs are fed, so shapes are known but values are not constant; then
    /// once more as constants; then on the GPU, if there is one.
    #[track_caller]
    pub fn gives(self, expected: impl Into<Tensor>) -> Self {
        self.gives_all([expected.into()])
    }

    /// As [`OpTest::gives`], for all outputs.
    #[track_caller]
    pub fn gives_all(self, expected: impl IntoIterator<Item = Tensor>) -> Self {
        let expected: Vec<Tensor> = expected.into_iter().collect();
        for constant in [false, true] {
            let found = self.run(constant).unwrap_or_else(|error| panic!("{}: {error:?}", self.op));
            assert!(found.len() >= expected.len(), "{} has {} outputs", self.op, found.len());
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_close(found, expected, self.tolerance, &format!("{} output {i}", self.op));
            }
        }
        gpu::check(&self, &expected);
        self
    }

    /// Building or running the op fails with a message that contains `text`.
    #[track_caller]
    pub fn fails(self, text: &str) -> Self {
        for constant in [false, true] {
            match self.run(constant) {
                Ok(outputs) => panic!("{} should fail with '{text}', gave {outputs:?}", self.op),
                Err(error) => assert!(error.to_string().contains(text), "expected '{text}', found '{error}'"),
            }
        }
        self
    }

    /// The outputs.
    pub fn run(&self, constant: bool) -> Result<Vec<Tensor>> {
        let graph = crate::graph();
        let (inputs, feeds) = self.sources(&graph, &self.inputs, constant);
        let operation = self.build(&graph, inputs)?;
        let info = graph.snapshot();
        let outputs = evaluate(&graph, &operation.outputs(), &feeds)?;
        assert_declared(info.node(operation.id()), &outputs);
        Ok(outputs)
    }

    /// The op's gradient rule agrees with finite differences, in double precision, for every float input and the sum of
    /// all float outputs weighted unevenly.
    #[track_caller]
    pub fn gradient(self) -> Self {
        let inputs: Vec<Tensor> = self.inputs.iter().map(to_double).collect();
        let run = |inputs: &[Tensor]| -> Result<(f64, Vec<Option<Tensor>>)> {
            let graph = crate::graph();
            let (sources, feeds) = self.sources(&graph, inputs, false);
            // What is not differentiated is a constant, as axes and shapes usually are.
            let sources: Vec<Output<'_>> = sources
                .iter()
                .zip(inputs)
                .map(
                    |(source, tensor)| {
                        if tensor.dtype() == DType::F64 { *source } else { graph.constant(tensor.clone()) }
                    },
                )
                .collect();
            let outputs = self.build(&graph, sources.clone())?.outputs();
            let floats: Vec<Output<'_>> = outputs.into_iter().filter(|output| output.dtype() == DType::F64).collect();
            let values = evaluate(&graph, &floats, &feeds)?;
            let weights: Vec<Tensor> = values.iter().map(uneven_weights).collect();
            let total = values.iter().zip(&weights).map(|(value, weight)| dot(value, weight)).sum();
            let grad_ys = weights.into_iter().map(|weight| Some(graph.constant(weight))).collect();
            let options = kolo_graph::GradientOptions { grad_ys, ..Default::default() };
            let xs: Vec<Output<'_>> = sources.iter().copied().filter(|source| source.dtype() == DType::F64).collect();
            let grads = kolo_graph::gradients_with(&floats, &xs, &options)?;
            let mut tensors = Vec::new();
            for grad in grads {
                tensors.push(match grad {
                    Some(grad) => evaluate(&graph, &[grad.dense()?], &feeds)?.pop(),
                    None => None,
                });
            }
            Ok((total, tensors))
        };
        let (_, grads) = run(&inputs).unwrap_or_else(|error| panic!("gradient of {}: {error:?}", self.op));
        let float_inputs: Vec<usize> = (0..inputs.len()).filter(|&i| inputs[i].dtype() == DType::F64).collect();
        for (&i, grad) in float_inputs.iter().zip(&grads) {
            let Some(grad) = grad else { continue };
            assert_eq!(grad.shape(), inputs[i].shape(), "gradient of {} input {i}", self.op);
            for element in 0..inputs[i].n_elements() {
                const STEP: f64 = 1e-5;
                let at = |delta: f64| {
                    let mut moved = inputs.clone();
                    let mut values = moved[i].data::<f64>().expect("double").to_vec();
                    values[element] += delta;
                    moved[i] = Tensor::from_vec(moved[i].shape().clone(), values).expect("same shape");
                    run(&moved).expect("ran before").0
                };
                let expected = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                let found = grad.data::<f64>().expect("double")[element];
                let close = (found - expected).abs() <= 1e-4 * (1.0 + expected.abs());
                assert!(
                    close,
                    "gradient of {} input {i} element {element}: {found}, finite difference {expected}",
                    self.op
                );
            }
        }
        assert!(grads.iter().any(Option::is_some), "{} gave no gradient at all", self.op);
        self
    }

    fn sources<'g>(
        &self,
        graph: &'g Graph,
        inputs: &[Tensor],
        constant: bool,
    ) -> (Vec<Output<'g>>, Vec<(Output<'g>, Tensor)>) {
        let mut feeds = Vec::new();
        let outputs = inputs
            .iter()
            .enumerate()
            .map(|(i, tensor)| {
                if constant {
                    return graph.constant(tensor.clone());
                }
                let shape = kolo_core::PartialShape::from(tensor.shape());
                let output = graph
                    .op("Placeholder")
                    .name(&format!("in{i}"))
                    .attr("dtype", tensor.dtype())
                    .attr("shape", shape)
                    .out();
                feeds.push((output, tensor.clone()));
                output
            })
            .collect();
        (outputs, feeds)
    }

    fn build<'g>(&self, graph: &'g Graph, inputs: Vec<Output<'g>>) -> Result<kolo_graph::Operation<'g>> {
        graph.check()?;
        let builder = graph.op(&self.op).inputs(inputs);
        self.attrs.iter().fold(builder, |builder, (name, value)| builder.attr(name, value.clone())).try_build()
    }
}

/// A tensor of another shape, for expectations: `tensor([2, 2], [1.0f32, 2.0, 3.0, 4.0])`.
pub fn tensor<T: kolo_core::Element, const N: usize>(shape: [usize; N], values: impl Into<Vec<T>>) -> Tensor {
    Tensor::from_vec(shape, values.into()).expect("a test's own literal")
}

/// Values that look random and stay away from kinks: `0.3, -1.1, …`.
pub fn wavy<const N: usize>(shape: [usize; N], seed: u32) -> Tensor {
    let n: usize = shape.iter().product();
    let value = |i: usize| ((i as f32 + seed as f32 * 7.3) * 1.7).sin() * 1.3 + 0.05;
    Tensor::from_vec(shape, (0..n).map(value).collect::<Vec<f32>>()).expect("made to fit")
}

fn to_double(tensor: &Tensor) -> Tensor {
    match tensor.data::<f32>() {
        Ok(values) => Tensor::from_vec(tensor.shape().clone(), values.iter().map(|&x| f64::from(x)).collect())
            .expect("same shape"),
        Err(_) => tensor.clone(),
    }
}

fn uneven_weights(tensor: &Tensor) -> Tensor {
    let weights = (0..tensor.n_elements()).map(|i| 1.0 + 0.37 * ((i * 7 % 11) as f64)).collect();
    Tensor::from_vec(tensor.shape().clone(), weights).expect("same shape")
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (a.data::<f64>().expect("double"), b.data::<f64>().expect("double"));
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The outputs have the dtypes and shapes that were inferred for the node.
#[track_caller]
fn assert_declared(node: &Node, outputs: &[Tensor]) {
    for (i, (tensor, declared)) in outputs.iter().zip(&node.outputs).enumerate() {
        let op = node.op();
        assert_eq!(tensor.dtype(), declared.dtype, "{op} output {i} has another dtype than declared");
        let (inferred, found) = (&declared.shape, tensor.shape());
        assert!(inferred.admits(found), "{op} output {i}: inferred {inferred}, found {found}");
    }
}

/// Same dtype, shape and, within `tolerance`, elements. NaN equals NaN here.
#[track_caller]
pub fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    assert_eq!(found.dtype(), expected.dtype(), "{what}: dtype");
    assert_eq!(found.shape(), expected.shape(), "{what}: shape");
    let numbers = |tensor: &Tensor| -> Option<Vec<f64>> {
        match tensor.dtype() {
            DType::F32 => tensor.data::<f32>().ok().map(|v| v.iter().map(|&x| f64::from(x)).collect()),
            DType::F64 => tensor.data::<f64>().ok().map(<[f64]>::to_vec),
            DType::F16 => tensor.data::<half::f16>().ok().map(|v| v.iter().map(|x| x.to_f64()).collect()),
            DType::BF16 => tensor.data::<half::bf16>().ok().map(|v| v.iter().map(|x| x.to_f64()).collect()),
            _ => None,
        }
    };
    match (numbers(found), numbers(expected)) {
        (Some(a), Some(b)) => {
            for (i, (a, b)) in a.iter().zip(&b).enumerate() {
                let close = (a - b).abs() <= tolerance * b.abs().max(1.0) || a == b || (a.is_nan() && b.is_nan());
                assert!(close, "{what}: element {i} is {a}, expected {b}; all: {found:?}");
            }
        }
        _ => assert_eq!(found, expected, "{what}"),
    }
}

/// Computes outputs of a graph without a runtime: one node after the other, on one CPU device. No control flow, and
/// nothing that waits for another node.
pub fn evaluate(graph: &Graph, fetches: &[Output<'_>], feeds: &[(Output<'_>, Tensor)]) -> Result<Vec<Tensor>> {
    graph.check()?;
    Evaluation::new(graph.snapshot()).run(fetches, feeds)
}

/// Longer than any file op of a test takes.
const MOST_WAIT: Duration = Duration::from_secs(30);

/// A place to evaluate in more than once, so that state is kept between calls.
pub struct Evaluation {
    nodes: Nodes,
    step: TestStep,
    device: Arc<CpuDevice>,
}

impl Evaluation {
    /// Over these nodes, with no state yet.
    pub fn new(nodes: Nodes) -> Evaluation {
        let name = DeviceName::local("CPU", 0);
        let device = CpuDevice::new(name.clone(), &CpuConfig { intra_op_threads: 1, ..CpuConfig::default() });
        Evaluation { nodes, step: TestStep::new(&name), device }
    }

    /// How much of the device's memory was used so far.
    pub fn memory(&self) -> MemoryStats {
        self.device.memory_stats()
    }

    /// Computes `fetches`. Nodes with effects run again in every call.
    pub fn run(&self, fetches: &[Output<'_>], feeds: &[(Output<'_>, Tensor)]) -> Result<Vec<Tensor>> {
        let mut values: HashMap<Endpoint, Value> = HashMap::new();
        for (output, tensor) in feeds {
            values.insert(output.endpoint(), Value::Tensor(tensor.clone()));
        }
        let mut done = vec![false; self.nodes.len()];
        fetches
            .iter()
            .map(|fetch| {
                self.compute(fetch.endpoint().node, &mut values, &mut done)?;
                match values.get(&fetch.endpoint()) {
                    Some(Value::Tensor(tensor)) => Ok(tensor.clone()),
                    Some(Value::Reference(cell)) => cell.value(),
                    Some(Value::Empty) | None => Err(Error::internal(format!("{} was not computed", fetch.name()))),
                }
            })
            .collect()
    }

    /// Runs operations for their effects.
    pub fn run_targets(&self, targets: &[kolo_graph::Operation<'_>], feeds: &[(Output<'_>, Tensor)]) -> Result<()> {
        let mut values: HashMap<Endpoint, Value> = HashMap::new();
        for (output, tensor) in feeds {
            values.insert(output.endpoint(), Value::Tensor(tensor.clone()));
        }
        let mut done = vec![false; self.nodes.len()];
        targets.iter().try_for_each(|target| self.compute(target.id(), &mut values, &mut done))
    }

    fn compute(&self, id: kolo_graph::NodeId, values: &mut HashMap<Endpoint, Value>, done: &mut [bool]) -> Result<()> {
        let node = self.nodes.node(id);
        let fed = (0..node.outputs.len() as u32).all(|index| values.contains_key(&Endpoint { node: id, index }));
        if done[id.index()] || (fed && !node.outputs.is_empty()) {
            return Ok(());
        }
        done[id.index()] = true;
        for before in node.inputs.iter().map(|at| at.node).chain(node.control_inputs.iter().copied()) {
            self.compute(before, values, done)?;
        }
        let mut inputs: Vec<Value> = Vec::new();
        for (at, &by_ref) in node.inputs.iter().zip(&node.ref_inputs) {
            inputs.push(match values.get(at) {
                Some(Value::Reference(cell)) if !by_ref => Value::Tensor(cell.value()?),
                Some(value) if !value.is_empty() => value.clone(),
                Some(_) | None => return Err(Error::internal("an input is missing")),
            });
        }
        let kernel = crate::find_kernel(node, &self.device.attributes().name)?;
        let outputs = run_kernel(kernel, node, &*self.device, &self.step, &mut inputs)?;
        for (index, output) in outputs.into_iter().enumerate() {
            let at = Endpoint { node: id, index: index as u32 };
            if !output.is_empty() {
                values.entry(at).or_insert(output);
            }
        }
        Ok(())
    }
}

/// Runs one kernel, and waits for it if it is asynchronous.
pub(crate) fn run_kernel(
    kernel: &KernelDef,
    node: &Arc<Node>,
    device: &dyn Device,
    step: &TestStep,
    inputs: &mut [Value],
) -> Result<Vec<Value>> {
    let mut outputs: Vec<Value> = vec![Value::Empty; node.outputs.len()];
    let name = &device.attributes().name;
    let mut ctx = KernelCtx {
        node,
        device,
        step,
        inputs,
        outputs: &mut outputs,
        frame_iteration: Default::default(),
        is_dead: false,
    };
    let init = KernelInit { node, device: name, resources: &step.resources };
    let place = |error: Error| error.with_node(&node.name, node.op(), &name.to_string());
    match kernel.make {
        KernelMaker::Function(compute) => compute(&mut ctx).map_err(place)?,
        KernelMaker::Object(make) => make(&init).and_then(|kernel| kernel.compute(&mut ctx)).map_err(place)?,
        KernelMaker::Async(make) => {
            let (sender, receiver) = mpsc::channel::<Result<Outcome>>();
            let kernel = make(&init).map_err(place)?;
            kernel.start(&mut ctx, Done::new(move |outcome| drop(sender.send(outcome))));
            // File ops finish from a thread of their own; anything else is done by now or waits for ever.
            let outcome = receiver.recv_timeout(MOST_WAIT).map_err(|_| Error::internal("the kernel waits"))?;
            let outcome = outcome.map_err(place)?;
            for (i, tensor) in outcome.outputs.into_iter().enumerate() {
                outputs[i] = Value::Tensor(tensor);
            }
        }
        KernelMaker::Executor => {
            let why = if node.def.flow == Flow::Plain { "has no kernel" } else { "is control flow" };
            return Err(place(Error::unimplemented(format!("{why}: test it through a session"))));
        }
    }
    Ok(outputs)
}

/// A step with empty stores and a rendezvous in a map.
pub struct TestStep {
    resources: Arc<ResourceStore>,
    step_resources: Arc<ResourceStore>,
    rendezvous: Arc<dyn Rendezvous>,
    cancel: Arc<CancelToken>,
}

impl TestStep {
    /// For a device of this name.
    pub fn new(device: &DeviceName) -> TestStep {
        TestStep {
            resources: ResourceStore::new(device.to_string(), "localhost"),
            step_resources: ResourceStore::new(device.to_string(), "step"),
            rendezvous: Arc::new(NoRendezvous),
            cancel: CancelToken::new(),
        }
    }
}

impl StepServices for TestStep {
    fn step_id(&self) -> u64 {
        1
    }
    fn resources(&self) -> &Arc<ResourceStore> {
        &self.resources
    }
    fn step_resources(&self) -> &Arc<ResourceStore> {
        &self.step_resources
    }
    fn rendezvous(&self) -> &Arc<dyn Rendezvous> {
        &self.rendezvous
    }
    fn cancel(&self) -> &Arc<CancelToken> {
        &self.cancel
    }
}

struct NoRendezvous;

impl Rendezvous for NoRendezvous {
    fn send(&self, _: RendezvousKey, _: Received) -> Result<()> {
        Ok(())
    }
    fn recv(&self, key: RendezvousKey, done: Box<dyn FnOnce(Result<Received>) + Send>) {
        done(Err(Error::unimplemented(format!("nothing sends {key:?} in this test"))));
    }
}
