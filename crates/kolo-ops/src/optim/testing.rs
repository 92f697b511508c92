//! How updates are tested: on variables of their own, by handle and, where the op has that form, by reference.

use std::sync::Arc;

use kolo_core::{DType, DeviceName, Error, PartialShape, ResourceHandle, Result, Tensor};
use kolo_device::{CpuConfig, CpuDevice};
use kolo_graph::{AttrValue, Graph, Output};

use crate::testing::{TestStep, assert_close};
use crate::{KernelCtx, KernelMaker, Value, VariableCell, find_kernel, find_op};

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
                let found = self.run(&op, n_steps, dtype).unwrap_or_else(|error| panic!("{op}: {error:?}"));
                assert_eq!(found.len(), expected.len(), "{op}");
                for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let what = format!("{op} of {dtype}, variable {i}");
                    assert_close(&cast(found, DType::F64), &cast(expected, DType::F64), tolerance, &what);
                }
            }
        }
    }

    /// What the variables hold after so many steps of this op, by handle or by reference.
    pub fn run(&self, op: &str, n_steps: usize, dtype: DType) -> Result<Vec<Tensor>> {
        let graph = crate::graph();
        let (mut cells, mut inputs, mut sources) = (Vec::new(), Vec::new(), Vec::new());
        for (i, argument) in self.arguments.iter().enumerate() {
            match argument {
                Argument::Value(value) => {
                    let value = cast(value, dtype);
                    sources.push(placeholder(&graph, value.dtype(), value.shape().into()));
                    inputs.push(Value::Tensor(value));
                }
                Argument::Variable(value) => {
                    let cell = VariableCell::new(format!("v{i}"), dtype, value.shape().into());
                    cell.assign(cast(value, dtype))?;
                    cells.push(cell.clone());
                    match op.starts_with("Resource") {
                        true => {
                            sources.push(placeholder(&graph, DType::Resource, PartialShape::scalar()));
                            inputs.push(Value::Tensor(handle(cell)));
                        }
                        false => {
                            let shape = PartialShape::from(value.shape());
                            sources.push(graph.op("VariableV2").attr("dtype", dtype).attr("shape", shape).out());
                            inputs.push(Value::Reference(cell));
                        }
                    }
                }
            }
        }
        let builder = graph.op(op).inputs(sources);
        let builder = self.attrs.iter().fold(builder, |builder, (name, value)| builder.attr(name, value.clone()));
        let node = builder.try_build()?.node().ok_or_else(|| Error::internal("no node"))?;
        let name = DeviceName::local("CPU", 0);
        let device = CpuDevice::new(name.clone(), &CpuConfig { intra_op_threads: 3, ..CpuConfig::default() });
        let KernelMaker::Function(compute) = find_kernel(&node, &name)?.make else { panic!("{op} is a function") };
        for _ in 0..n_steps {
            let mut outputs = vec![Value::Empty; node.outputs.len()];
            compute(&mut KernelCtx {
                node: &node,
                device: &*device,
                step: &TestStep::new(&name),
                inputs: &mut inputs.clone(),
                outputs: &mut outputs,
                frame_iteration: Default::default(),
                is_dead: false,
            })?;
            assert!(!outputs.iter().any(Value::is_empty), "{op} passes its variable on");
        }
        cells.iter().map(|cell| cell.value()).collect()
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
