//! Variables: state that outlives a step, in TensorFlow's two families.
//!
//! A *resource* variable (`VarHandleOp`) is read by explicit ops, each a snapshot, so the order of reads and writes is
//! what the control edges say. A *reference* variable (`VariableV2`) hands out a pointer. Resource is the default;
//! graphs from TensorFlow 1.x use the other.

use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};

use crate::{Endpoint, Graph, NodeId, Operation, Output};

/// The two families.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VariableKind {
    /// `VarHandleOp`, `ReadVariableOp`, `AssignVariableOp`.
    #[default]
    Resource,
    /// `VariableV2`, `Identity`, `Assign`.
    Reference,
}

/// What a graph remembers of a variable.
#[derive(Clone, Debug)]
pub struct VariableRecord {
    /// The variable's name, which is also its op's.
    pub name: String,
    /// Which family.
    pub kind: VariableKind,
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub shape: PartialShape,
    /// The handle or reference.
    pub handle: Endpoint,
    /// The value, read once per step by everyone who does not ask for an order of their own.
    pub read: Endpoint,
    /// Assigns the initial value.
    pub initializer: NodeId,
    /// Trained by optimizers.
    pub trainable: bool,
    /// Belongs to this process: initialised by `local_variables_initializer`, not saved.
    pub local: bool,
}

/// A variable of a graph. A plain copy, like [`Output`].
#[derive(Clone, Copy, Debug)]
pub struct Variable<'g> {
    graph: &'g Graph,
    kind: VariableKind,
    handle: Output<'g>,
    read: Output<'g>,
    initializer: Operation<'g>,
}

impl<'g> Variable<'g> {
    fn from_record(graph: &'g Graph, record: &VariableRecord) -> Variable<'g> {
        Variable {
            graph,
            kind: record.kind,
            handle: Output::new(graph, record.handle),
            read: Output::new(graph, record.read),
            initializer: Operation::new(graph, record.initializer),
        }
    }

    /// The handle or reference: what gradients are taken with respect to, and what update ops take.
    pub fn handle(self) -> Output<'g> {
        self.handle
    }

    /// The value, read once per step and shared by all who call this.
    pub fn read(self) -> Output<'g> {
        self.read
    }

    /// The value, read by an op of its own, under the control dependencies that are open now.
    #[track_caller]
    pub fn read_now(self) -> Output<'g> {
        match self.kind {
            VariableKind::Resource => {
                self.graph.op("ReadVariableOp").input(self.handle).attr("dtype", self.read.dtype()).out()
            }
            VariableKind::Reference => self.graph.op("Identity").input(self.handle).out(),
        }
    }

    /// The operation that gives it its initial value.
    pub fn initializer(self) -> Operation<'g> {
        self.initializer
    }

    /// Which family it is of.
    pub fn kind(self) -> VariableKind {
        self.kind
    }

    /// Its name.
    pub fn name(self) -> String {
        self.handle.operation().name()
    }

    /// Its element type.
    pub fn dtype(self) -> DType {
        self.read.dtype()
    }

    /// Its shape.
    pub fn shape(self) -> PartialShape {
        self.read.shape()
    }

    /// Gives it a new value.
    #[track_caller]
    pub fn assign(self, value: Output<'g>) -> Operation<'g> {
        self.update("AssignVariableOp", "Assign", value)
    }

    /// Adds to its value.
    #[track_caller]
    pub fn assign_add(self, value: Output<'g>) -> Operation<'g> {
        self.update("AssignAddVariableOp", "AssignAdd", value)
    }

    /// Subtracts from its value.
    #[track_caller]
    pub fn assign_sub(self, value: Output<'g>) -> Operation<'g> {
        self.update("AssignSubVariableOp", "AssignSub", value)
    }

    #[track_caller]
    fn update(self, resource_op: &str, reference_op: &str, value: Output<'g>) -> Operation<'g> {
        let op = match self.kind {
            VariableKind::Resource => resource_op,
            VariableKind::Reference => reference_op,
        };
        self.graph.op(op).input(self.handle).input(value).build()
    }
}

/// How a variable gets its first value.
#[derive(Clone, Debug)]
pub enum Initializer {
    /// All zeros.
    Zeros,
    /// What this output of the same graph gives in the step that initialises; the shape must agree.
    Output(Endpoint),
    /// All ones.
    Ones,
    /// One number everywhere.
    Constant(f64),
    /// Exactly this value; the shape must agree.
    Value(Tensor),
    /// Evenly from `low` up to, not including, `high`.
    Uniform {
        /// The least value.
        low: f64,
        /// The bound.
        high: f64,
    },
    /// From a normal distribution.
    Normal {
        /// Its mean.
        mean: f64,
        /// Its standard deviation.
        stddev: f64,
    },
    /// From a normal distribution, redrawn beyond two standard deviations.
    TruncatedNormal {
        /// Its mean.
        mean: f64,
        /// Its standard deviation.
        stddev: f64,
    },
    /// Uniform, scaled by fan-in and fan-out (Glorot and Bengio, 2010).
    GlorotUniform,
    /// Truncated normal, scaled by fan-in and fan-out.
    GlorotNormal,
    /// Uniform, scaled by fan-in (He et al., 2015).
    HeUniform,
    /// Truncated normal, scaled by fan-in.
    HeNormal,
}

impl<T: Into<Tensor>> From<T> for Initializer {
    fn from(value: T) -> Initializer {
        Initializer::Value(value.into())
    }
}

impl Initializer {
    /// The same without regard to sides: what is scaled by fan-in and fan-out becomes a distribution with the scale that
    /// `shape` gives it. For the parts of a variable, whose scale follows from the whole.
    pub fn resolved(&self, shape: &Shape) -> Initializer {
        // Truncation at two standard deviations narrows the distribution; this widens it again.
        const TRUNCATED_STDDEV: f64 = 0.879_625_661_034_239_8;
        let (fan_in, fan_out) = fans(shape);
        let uniform = |limit: f64| Initializer::Uniform { low: -limit, high: limit };
        let truncated = |stddev: f64| Initializer::TruncatedNormal { mean: 0.0, stddev: stddev / TRUNCATED_STDDEV };
        match self {
            Initializer::GlorotUniform => uniform((6.0 / (fan_in + fan_out)).sqrt()),
            Initializer::GlorotNormal => truncated((2.0 / (fan_in + fan_out)).sqrt()),
            Initializer::HeUniform => uniform((6.0 / fan_in).sqrt()),
            Initializer::HeNormal => truncated((2.0 / fan_in).sqrt()),
            other => other.clone(),
        }
    }

    /// Adds the ops that make the value.
    #[track_caller]
    pub fn build<'g>(&self, graph: &'g Graph, dtype: DType, shape: &Shape) -> Output<'g> {
        match self {
            Initializer::Value(value) => graph.named_constant("initial_value", value.clone()),
            Initializer::Output(at) => Output::new(graph, *at),
            Initializer::Zeros => fill(graph, dtype, shape, 0.0),
            Initializer::Ones => fill(graph, dtype, shape, 1.0),
            Initializer::Constant(value) => fill(graph, dtype, shape, *value),
            Initializer::Uniform { low, high } => random(graph, "RandomUniform", dtype, shape, high - low, *low),
            Initializer::Normal { mean, stddev } => random(graph, "RandomStandardNormal", dtype, shape, *stddev, *mean),
            Initializer::TruncatedNormal { mean, stddev } => {
                random(graph, "TruncatedNormal", dtype, shape, *stddev, *mean)
            }
            Initializer::GlorotUniform | Initializer::GlorotNormal | Initializer::HeUniform | Initializer::HeNormal => {
                self.resolved(shape).build(graph, dtype, shape)
            }
        }
    }
}

/// How many inputs and outputs a unit has: for a matrix its sides, for a filter those times its window.
fn fans(shape: &Shape) -> (f64, f64) {
    match shape.dims() {
        [] => (1.0, 1.0),
        [n] => (*n as f64, *n as f64),
        [window @ .., fan_in, fan_out] => {
            let window = window.iter().product::<usize>() as f64;
            ((window * *fan_in as f64).max(1.0), (window * *fan_out as f64).max(1.0))
        }
    }
}

fn shape_constant<'g>(graph: &'g Graph, shape: &Shape) -> Output<'g> {
    graph.constant(Tensor::vector(shape.iter().map(|&dim| dim as i32).collect::<Vec<_>>()))
}

#[track_caller]
fn fill<'g>(graph: &'g Graph, dtype: DType, shape: &Shape, value: f64) -> Output<'g> {
    let value = crate::IntoOutput::into_output(value, graph, dtype);
    graph.op("Fill").input(shape_constant(graph, shape)).input(value).out()
}

#[track_caller]
fn random<'g>(graph: &'g Graph, op: &str, dtype: DType, shape: &Shape, scale: f64, shift: f64) -> Output<'g> {
    let shape = shape_constant(graph, shape);
    let (seed, seed2) = graph.op_seeds(None);
    let standard = graph.op(op).input(shape).attr("dtype", dtype).attr("seed", seed).attr("seed2", seed2).out();
    match shift {
        0.0 => standard * scale,
        _ => standard * scale + shift,
    }
}

/// A variable that is about to be made.
#[must_use = "a variable is added by build()"]
pub struct VariableBuilder<'g> {
    graph: &'g Graph,
    name: String,
    initializer: Initializer,
    dtype: DType,
    shape: Option<Shape>,
    kind: VariableKind,
    trainable: bool,
    local: bool,
}

impl<'g> VariableBuilder<'g> {
    /// The shape; needed unless the initial value has one.
    pub fn shape(mut self, shape: impl Into<Shape>) -> Self {
        self.shape = Some(shape.into());
        self
    }

    /// The element type; `float` unless the initial value has another.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Which family.
    pub fn kind(mut self, kind: VariableKind) -> Self {
        self.kind = kind;
        self
    }

    /// Optimizers leave it alone.
    pub fn not_trainable(mut self) -> Self {
        self.trainable = false;
        self
    }

    /// Belongs to this process alone: see [`Graph::local_variables_initializer`]. Not trainable.
    pub fn local(mut self) -> Self {
        self.local = true;
        self.trainable = false;
        self
    }

    /// Adds the variable. If it cannot be, the graph keeps the reason.
    #[track_caller]
    pub fn build(self) -> Variable<'g> {
        let VariableBuilder { graph, name, initializer, dtype, shape, kind, trainable, local } = self;
        let (dtype, shape) = match (&initializer, shape) {
            (Initializer::Value(value), None) => (value.dtype(), value.shape().clone()),
            (_, Some(shape)) => (dtype, shape),
            (_, None) => {
                graph.record_error(Error::invalid_argument(format!("variable '{name}' needs a shape: call .shape(…)")));
                (dtype, Shape::scalar())
            }
        };
        if let Some(shared) = graph.shared_variable_name(&name) {
            let existing = graph.variables(|all| all.iter().find(|record| record.name == shared).cloned());
            return match existing {
                Some(record) => graph.share(&record, dtype, &shape),
                None => graph.unshared(|| {
                    let builder = graph.new_variable(&shared, initializer).shape(shape).dtype(dtype).kind(kind);
                    VariableBuilder { trainable, local, ..builder }.build()
                }),
            };
        }
        let static_shape = PartialShape::from(&shape);
        // Initial values must not wait for whatever step the variable happens to be described in.
        graph.no_control_dependencies(|| {
            let op = match kind {
                VariableKind::Resource => graph.op("VarHandleOp"),
                VariableKind::Reference => graph.op("VariableV2"),
            };
            let handle = op.name(&name).attr("dtype", dtype).attr("shape", static_shape.clone()).out();
            let name = handle.operation().name();
            if kind == VariableKind::Resource && handle.is_valid() {
                // A suffix that made the name unique must keep the state apart as well.
                graph.set_attr(handle.endpoint().node, "shared_name", name.clone());
            }
            let (initial, read) = graph.absolute_scope(&name, || {
                graph.colocate_with(handle.operation(), || {
                    let initial = graph
                        .absolute_scope(&format!("{name}/Initializer"), || initializer.build(graph, dtype, &shape));
                    let read = match kind {
                        VariableKind::Resource => {
                            graph.op("ReadVariableOp").name("Read/ReadVariableOp").attr("dtype", dtype)
                        }
                        VariableKind::Reference => graph.op("Identity").name("read"),
                    };
                    (initial, read.input(handle).out())
                })
            });
            let assign = match kind {
                VariableKind::Resource => "AssignVariableOp",
                VariableKind::Reference => "Assign",
            };
            let initializer =
                graph.absolute_scope(&name, || graph.op(assign).name("Assign").input(handle).input(initial).build());
            if handle.is_valid() && read.is_valid() && initializer.is_valid() {
                graph.add_variable(VariableRecord {
                    name,
                    kind,
                    dtype,
                    shape: static_shape,
                    handle: handle.endpoint(),
                    read: read.endpoint(),
                    initializer: initializer.id(),
                    trainable,
                    local,
                });
            }
            Variable { graph, kind, handle, read, initializer }
        })
    }
}

impl Graph {
    /// A variable with this first value: `g.variable("w", [1.0f32, 2.0])`.
    #[track_caller]
    pub fn variable(&self, name: &str, initial: impl Into<Initializer>) -> Variable<'_> {
        self.new_variable(name, initial).build()
    }

    /// A variable whose details come next: `g.new_variable("w", Initializer::HeNormal).shape([784, 100]).build()`.
    pub fn new_variable(&self, name: &str, initial: impl Into<Initializer>) -> VariableBuilder<'_> {
        VariableBuilder {
            graph: self,
            name: name.to_owned(),
            initializer: initial.into(),
            dtype: DType::F32,
            shape: None,
            kind: VariableKind::default(),
            trainable: true,
            local: false,
        }
    }

    /// The variable of this name in the scope that is open, made on first use. A second use with another shape is an
    /// error.
    #[track_caller]
    pub fn get_variable(&self, name: &str, shape: impl Into<Shape>, initial: impl Into<Initializer>) -> Variable<'_> {
        let shape = shape.into();
        let full = self.scoped_name(name);
        let existing = self.variables(|all| all.iter().find(|record| record.name == full).cloned());
        let Some(record) = existing else {
            return self.new_variable(name, initial).shape(shape).build();
        };
        self.share(&record, record.dtype, &shape)
    }

    /// The variable that exists, if it is what is asked for.
    #[track_caller]
    fn share(&self, record: &VariableRecord, dtype: DType, shape: &Shape) -> Variable<'_> {
        if !record.shape.admits(shape) || record.dtype != dtype {
            self.record_error(Error::invalid_argument(format!(
                "Trying to share variable {}, but specified shape {shape} and found shape {} ({dtype} and {}, at {})",
                record.name,
                record.shape,
                record.dtype,
                std::panic::Location::caller()
            )));
        }
        Variable::from_record(self, record)
    }

    /// Makes nodes that the graph has already, as an import leaves them, known as a variable. A second one of its name is
    /// an error.
    pub fn adopt_variable(&self, record: VariableRecord) -> Result<()> {
        if self.variables(|all| all.iter().any(|known| known.name == record.name)) {
            return Err(Error::already_exists(format!("the graph has a variable '{}' already", record.name)));
        }
        let n_nodes = self.nodes().len();
        let exist = [record.handle.node, record.read.node, record.initializer].iter().all(|id| id.index() < n_nodes);
        if !exist {
            return Err(Error::not_found(format!("the nodes of variable '{}' are not in the graph", record.name)));
        }
        self.add_variable(record);
        Ok(())
    }

    /// The variable of this full name.
    pub fn find_variable(&self, name: &str) -> Result<Variable<'_>> {
        self.variables(|all| {
            all.iter().find(|record| record.name == name).map(|record| Variable::from_record(self, record))
        })
        .ok_or_else(|| Error::not_found(format!("there is no variable '{name}'")))
    }

    /// Makes a variable belong to this process alone, as [`VariableBuilder::local`] does; it is trained if it was before.
    /// For strategies that give each worker a copy of its own.
    pub fn make_local(&self, variable: Variable<'_>) {
        self.mark_local(&variable.name());
    }

    /// All variables that optimizers train.
    pub fn trainable_variables(&self) -> Vec<Variable<'_>> {
        self.variables(|all| all.iter().filter(|v| v.trainable).map(|v| Variable::from_record(self, v)).collect())
    }

    /// All variables that are not local to a process.
    pub fn global_variables(&self) -> Vec<Variable<'_>> {
        self.variables(|all| all.iter().filter(|v| !v.local).map(|v| Variable::from_record(self, v)).collect())
    }

    /// Gives all global variables their first values.
    #[track_caller]
    pub fn global_variables_initializer(&self) -> Operation<'_> {
        let initializers: Vec<_> = self.global_variables().iter().map(|variable| variable.initializer).collect();
        self.group("init", &initializers)
    }

    /// Gives all local variables their first values.
    #[track_caller]
    pub fn local_variables_initializer(&self) -> Operation<'_> {
        let initializers: Vec<_> =
            self.variables(|all| all.iter().filter(|v| v.local).map(|v| Operation::new(self, v.initializer)).collect());
        self.group("init_local", &initializers)
    }
}
