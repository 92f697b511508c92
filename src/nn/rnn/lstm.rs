//! Long short-term memory (Hochreiter and Schmidhuber, 1997), with TensorFlow's layout: one kernel for input and state, gates
//! in the order input, candidate, forget, output.

use kolo_core::{DType, Tensor};
use kolo_graph::{Graph, Initializer, Output, Variable};

use super::RnnCell;
use crate::nn::layer::weights;
use crate::ops;

/// What an LSTM cell is like; [`LstmCell::build`] adds its variables.
#[derive(Clone, Debug)]
pub struct LstmCell {
    units: usize,
    forget_bias: f64,
    name: String,
    kernel: Initializer,
}

/// An LSTM cell with its variables. Its state is the memory and the output.
#[derive(Clone, Copy, Debug)]
pub struct Lstm<'g> {
    /// `[inputs + units, 4 · units]`.
    pub kernel: Variable<'g>,
    /// `[4 · units]`.
    pub bias: Variable<'g>,
    units: usize,
    of_input: Output<'g>,
    of_state: Output<'g>,
    /// The bias with the forget bias added where it belongs.
    whole_bias: Output<'g>,
}

impl LstmCell {
    /// A cell with this number of units and a forget bias of 1.
    pub fn new(units: usize) -> LstmCell {
        LstmCell { units, forget_bias: 1.0, name: "lstm_cell".to_owned(), kernel: Initializer::GlorotUniform }
    }

    /// What is added to the forget gate, so that at first little is forgotten.
    #[must_use]
    pub fn forget_bias(mut self, bias: f64) -> LstmCell {
        self.forget_bias = bias;
        self
    }

    /// Its name: `lstm_cell` otherwise.
    #[must_use]
    pub fn name(mut self, name: &str) -> LstmCell {
        self.name = name.to_owned();
        self
    }

    /// How the kernel begins.
    #[must_use]
    pub fn kernel(mut self, initial: impl Into<Initializer>) -> LstmCell {
        self.kernel = initial.into();
        self
    }

    /// Adds the variables, for inputs of this size.
    #[track_caller]
    pub fn build<'g>(&self, graph: &'g Graph, inputs: usize, dtype: DType) -> Lstm<'g> {
        let units = self.units;
        graph.name_scope(&self.name, || {
            let kernel = weights(graph, "kernel", &[inputs + units, 4 * units], dtype, &self.kernel);
            let bias = weights(graph, "bias", &[4 * units], dtype, &Initializer::Zeros);
            let parts = ops::split_sizes(kernel.read(), &[inputs as i64, units as i64], 2, 0);
            let forget: Vec<f64> =
                (0..4 * units).map(|i| if i / units.max(1) == 2 { self.forget_bias } else { 0.0 }).collect();
            let forget = ops::cast(graph.constant(Tensor::vector(forget)), dtype);
            let part = |i: usize| parts.get(i).copied().unwrap_or(Output::invalid(graph));
            Lstm { kernel, bias, units, of_input: part(0), of_state: part(1), whole_bias: bias.read() + forget }
        })
    }
}

impl<'g> RnnCell<'g> for Lstm<'g> {
    fn output_size(&self) -> usize {
        self.units
    }

    fn state_sizes(&self) -> Vec<usize> {
        vec![self.units; 2]
    }

    fn dtype(&self) -> DType {
        self.kernel.dtype()
    }

    fn prepare(&self, x: Output<'g>) -> Output<'g> {
        ops::bias_add(ops::matmul(x, self.of_input), self.whole_bias)
    }

    fn step(&self, prepared: Output<'g>, state: &[Output<'g>]) -> (Output<'g>, Vec<Output<'g>>) {
        let [memory, output] = *state else {
            return super::unroll::wrong_state(prepared.graph(), "an LSTM", 2, state.len());
        };
        let gates = ops::split(prepared + ops::matmul(output, self.of_state), 4, 1);
        let [input, candidate, forget, out] = gates[..] else {
            return super::unroll::wrong_state(prepared.graph(), "an LSTM", 4, gates.len());
        };
        let memory = memory * ops::sigmoid(forget) + ops::sigmoid(input) * ops::tanh(candidate);
        let output = ops::tanh(memory) * ops::sigmoid(out);
        (output, vec![memory, output])
    }
}
