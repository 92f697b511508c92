//! How updates are tested: on variables of their own, by handle and, where the op has that form, by reference; on a CPU and, if
//! the machine has a GPU and the op has a kernel there for the dtype, on the GPU.

use std::sync::Arc;

use kolo_core::{DType, DeviceName, Error, PartialShape, ResourceHandle, Result, Tensor};
use kolo_device::{CpuConfig, CpuDevice, Device};
use kolo_graph::{AttrValue, Graph, Node, Output};

use crate::testing::{TestStep, assert_close, gpu, run_kernel};
use crate::{KernelMaker, Value, VariableCell, find_kernel, find_op};

/// An update with given variables, inputs and attributes.
pub struct UpdateTest {
    op: String,
    attrs: Vec<(String, AttrValue)>,
    arguments: Vec<Argument>,
}

#[derive(Clone)]
enum Argument {
    Variable(Tensor),
    Value(Tensor),
}

/// Begins a test of the `Resource…` op of this name.
pub fn update(op: &str) -> UpdateTest {
    UpdateTest { op: op.to_owned(), attrs: Vec::new(), arguments: Vec::new() }
}

impl UpdateTest {
    /// The next input is a variable that begins as this.
    pub fn variable(mut self, value: impl Into<Tensor>) -> Self {
        self.arguments.push(Argument::Variable(value.into()));
        self
    }

    /// The next input is this value.
    pub fn input(mut self, value: impl Into<Tensor>) -> Self {
        self.arguments.push(Argument::Value(value.into()));
        self
    }

    /// An attribute.
    pub fn attr(mut self, name: &str, value: impl Into<AttrValue>) -> Self {
        self.attrs.push((name.to_owned(), value.into()));
        self
    }

    /// After two updates the variables hold these values.
    #[track_caller]
    pub fn twice_gives<const M: usize>(self, expected: [Tensor; M]) {
        self.check(2, &expected);
    }

    /// After one update the variables hold these values.
    #[track_caller]
    pub fn once_gives<const M: usize>(self, expected: [Tensor; M]) {
        self.check(1, &expected);
    }

    /// The update fails with a message that contains `text`.
    #[track_caller]
    pub fn fails(self, text: &str) {
        match self.run(&self.op, 1, DType::F32) {
            Ok(values) => panic!("{} should fail with '{text}', gave {values:?}", self.op),
            Err(error) => assert!(error.to_string().contains(text), "expected '{text}', found '{error}'"),
        }
    }

    #[track_caller]
    fn check(&self, n_steps: usize, expected: &[Tensor]) {
        let by_reference = self.op.strip_prefix("Resource").unwrap_or(&self.op).to_owned();
        let by_reference = Some(by_reference).filter(|op| find_op(op).is_ok());
        for op in [Some(self.op.clone()), by_reference].into_iter().flatten() {
            for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::F64, 2e-6), (DType::F16, 1e-2), (DType::BF16, 8e-2)]
            {
                let compare = |found: Vec<Tensor>, tolerance: f64| {
                    assert_eq!(found.len(), expected.len(), "{op}");
                    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                        let what = format!("{op} of {dtype}, variable {i}");
                        assert_close(&cast(found, DType::F64), &cast(expected, DType::F64), tolerance, &what);
                    }
                };
                compare(self.run(&op, n_steps, dtype).unwrap_or_else(|error| panic!("{op}: {error:?}")), tolerance);
                let Some(device) = gpu::device() else { continue };
                let prepared = self.prepare(&op, dtype).unwrap_or_else(|error| panic!("{op}: {error:?}"));
                let has_kernel = find_kernel(&prepared.node, &device.attributes().name)
                    .is_ok_and(|kernel| kernel.device == "GPU" && !matches!(kernel.make, KernelMaker::Executor));
                if has_kernel {
                    // Its functions are exact to a few units in the last place.
                    let run = move || prepared.run_on(device, n_steps);
                    gpu::check_run(&format!("{op} of {dtype}"), run, |found| compare(found, tolerance.max(2e-5)));
                }
            }
        }
    }

    /// What the variables hold after so many steps of this op on a CPU, by handle or by reference.
    pub fn run(&self, op: &str, n_steps: usize, dtype: DType) -> Result<Vec<Tensor>> {
        let name = DeviceName::local("CPU", 0);
        let device: Arc<dyn Device> = CpuDevice::new(name, &CpuConfig { intra_op_threads: 3, ..CpuConfig::default() });
        self.prepare(op, dtype)?.run_on(&device, n_steps)
    }

    /// The op with its floats of this dtype, as a node.
    fn prepare(&self, op: &str, dtype: DType) -> Result<Prepared> {
        let graph = crate::graph();
        let (mut arguments, mut sources) = (Vec::new(), Vec::new());
        for argument in &self.arguments {
            match argument {
                Argument::Value(value) => {
                    let value = cast(value, dtype);
                    sources.push(placeholder(&graph, value.dtype(), value.shape().into()));
                    arguments.push(Argument::Value(value));
                }
                Argument::Variable(value) => {
                    sources.push(match op.starts_with("Resource") {
                        true => placeholder(&graph, DType::Resource, PartialShape::scalar()),
                        false => {
                            let shape = PartialShape::from(value.shape());
                            graph.op("VariableV2").attr("dtype", dtype).attr("shape", shape).out()
                        }
                    });
                    arguments.push(Argument::Variable(cast(value, dtype)));
                }
            }
        }
        let builder = graph.op(op).inputs(sources);
        let builder = self.attrs.iter().fold(builder, |builder, (name, value)| builder.attr(name, value.clone()));
        let node = builder.try_build()?.node().ok_or_else(|| Error::internal("no node"))?;
        Ok(Prepared { node, arguments })
    }
}

/// An update that any device can run.
struct Prepared {
    node: Arc<Node>,
    arguments: Vec<Argument>,
}

impl Prepared {
    /// What the variables, which are in the device's memory, hold after so many steps there; in host memory.
    fn run_on(&self, device: &Arc<dyn Device>, n_steps: usize) -> Result<Vec<Tensor>> {
        let (node, op) = (&self.node, self.node.op());
        let name = &device.attributes().name;
        let kernel = find_kernel(node, name)?;
        let (on_host, _) = crate::host_arguments(node, kernel);
        let place = |tensor: &Tensor| match device.memory().is_host() {
            true => Ok(tensor.clone()),
            false => gpu::copy_to(device, tensor),
        };
        let (mut cells, mut inputs) = (Vec::new(), Vec::new());
        for (i, argument) in self.arguments.iter().enumerate() {
            inputs.push(match argument {
                Argument::Value(value) => Value::Tensor(match on_host.get(i).copied().unwrap_or(false) {
                    true => value.clone(),
                    false => place(value)?,
                }),
                Argument::Variable(value) => {
                    let cell = VariableCell::new(format!("v{i}"), value.dtype(), value.shape().into());
                    cell.assign(place(value)?)?;
                    cells.push(cell.clone());
                    if op.starts_with("Resource") { Value::Tensor(handle(cell)) } else { Value::Reference(cell) }
                }
            });
        }
        for _ in 0..n_steps {
            let outputs = run_kernel(kernel, node, &**device, &TestStep::new(name), &mut inputs.clone())?;
            assert!(!outputs.iter().any(Value::is_empty), "{op} passes its variable on");
        }
        cells.iter().map(|cell| device.to_host(&cell.value()?)).collect()
    }
}

fn placeholder(graph: &Graph, dtype: DType, shape: PartialShape) -> Output<'_> {
    graph.op("Placeholder").attr("dtype", dtype).attr("shape", shape).out()
}

fn handle(cell: Arc<VariableCell>) -> Tensor {
    Tensor::handle(ResourceHandle {
        device: "test".into(),
        container: "".into(),
        name: cell.name().into(),
        object: Some(cell),
    })
}

/// Floats as another float type; everything else as it is.
fn cast(tensor: &Tensor, dtype: DType) -> Tensor {
    if !tensor.dtype().is_float() {
        return tensor.clone();
    }
    let values: Vec<f64> = match tensor.dtype() {
        DType::F32 => tensor.data::<f32>().unwrap().iter().map(|&x| f64::from(x)).collect(),
        DType::F16 => tensor.data::<half::f16>().unwrap().iter().map(|x| x.to_f64()).collect(),
        DType::BF16 => tensor.data::<half::bf16>().unwrap().iter().map(|x| x.to_f64()).collect(),
        _ => tensor.data::<f64>().unwrap().to_vec(),
    };
    let shape = tensor.shape().clone();
    match dtype {
        DType::F32 => Tensor::from_vec(shape, values.iter().map(|&x| x as f32).collect()),
        DType::F16 => Tensor::from_vec(shape, values.iter().map(|&x| half::f16::from_f64(x)).collect()),
        DType::BF16 => Tensor::from_vec(shape, values.iter().map(|&x| half::bf16::from_f64(x)).collect()),
        _ => Tensor::from_vec(shape, values),
    }
    .unwrap()
}
