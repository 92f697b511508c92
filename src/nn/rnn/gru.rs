//! The gated recurrent unit (Cho et al., 2014), with TensorFlow's layout: gates in the order reset, update, each kernel for
//! input and state.

use kolo_core::DType;
use kolo_graph::{Graph, Initializer, Output, Variable};

use super::RnnCell;
use crate::nn::layer::weights;
use crate::ops;

/// What a GRU cell is like; [`GruCell::build`] adds its variables.
#[derive(Clone, Debug)]
pub struct GruCell {
    units: usize,
    name: String,
    kernel: Initializer,
}

/// A GRU cell with its variables. Its state is its output.
#[derive(Clone, Copy, Debug)]
pub struct Gru<'g> {
    /// `[inputs + units, 2 · units]`.
    pub gates_kernel: Variable<'g>,
    /// `[inputs + units, units]`.
    pub candidate_kernel: Variable<'g>,
    units: usize,
    /// Both kernels' parts for the input, side by side, and both biases.
    of_input: Output<'g>,
    whole_bias: Output<'g>,
    gates_of_state: Output<'g>,
    candidate_of_state: Output<'g>,
}

impl GruCell {
    /// A cell with this number of units.
    pub fn new(units: usize) -> GruCell {
        GruCell { units, name: "gru_cell".to_owned(), kernel: Initializer::GlorotUniform }
    }

    /// Its name: `gru_cell` otherwise.
    #[must_use]
    pub fn name(mut self, name: &str) -> GruCell {
        self.name = name.to_owned();
        self
    }

    /// How the kernels begin.
    #[must_use]
    pub fn kernel(mut self, initial: Initializer) -> GruCell {
        self.kernel = initial;
        self
    }

    /// Adds the variables, for inputs of this size.
    #[track_caller]
    pub fn build<'g>(&self, graph: &'g Graph, inputs: usize, dtype: DType) -> Gru<'g> {
        let units = self.units;
        graph.name_scope(&self.name, || {
            let pair = |scope: &str, size: usize, bias: Initializer| {
                graph.name_scope(scope, || {
                    let kernel = weights(graph, "kernel", &[inputs + units, size], dtype, &self.kernel);
                    let bias = weights(graph, "bias", &[size], dtype, &bias);
                    let parts = ops::split_sizes(kernel.read(), &[inputs as i64, units as i64], 2, 0);
                    let part = |i: usize| parts.get(i).copied().unwrap_or(Output::invalid(graph));
                    (kernel, bias, part(0), part(1))
                })
            };
            // Gates begin open, so that at first little is forgotten.
            let (gates_kernel, gates_bias, gates_of_input, gates_of_state) =
                pair("gates", 2 * units, Initializer::Ones);
            let (candidate_kernel, candidate_bias, candidate_of_input, candidate_of_state) =
                pair("candidate", units, Initializer::Zeros);
            Gru {
                gates_kernel,
                candidate_kernel,
                units,
                of_input: ops::concat(&[gates_of_input, candidate_of_input], 1),
                whole_bias: ops::concat(&[gates_bias.read(), candidate_bias.read()], 0),
                gates_of_state,
                candidate_of_state,
            }
        })
    }
}

impl<'g> RnnCell<'g> for Gru<'g> {
    fn output_size(&self) -> usize {
        self.units
    }

    fn state_sizes(&self) -> Vec<usize> {
        vec![self.units]
    }

    fn dtype(&self) -> DType {
        self.gates_kernel.dtype()
    }

    fn prepare(&self, x: Output<'g>) -> Output<'g> {
        ops::bias_add(ops::matmul(x, self.of_input), self.whole_bias)
    }

    fn step(&self, prepared: Output<'g>, state: &[Output<'g>]) -> (Output<'g>, Vec<Output<'g>>) {
        let graph = prepared.graph();
        let [before] = *state else { return super::unroll::wrong_state(graph, "a GRU", 1, state.len()) };
        let units = self.units as i64;
        let of_input = ops::split_sizes(prepared, &[2 * units, units], 2, 1);
        let [gates, candidate] = of_input[..] else {
            return super::unroll::wrong_state(graph, "a GRU", 2, of_input.len());
        };
        let gates = ops::split(ops::sigmoid(gates + ops::matmul(before, self.gates_of_state)), 2, 1);
        let [reset, keep] = gates[..] else { return super::unroll::wrong_state(graph, "a GRU", 2, gates.len()) };
        let candidate = ops::tanh(candidate + ops::matmul(reset * before, self.candidate_of_state));
        let after = candidate + keep * (before - candidate);
        (after, vec![after])
    }
}
