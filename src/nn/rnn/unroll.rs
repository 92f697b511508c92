//! Running a cell over time: by a loop in the graph, or once for each of a fixed number of steps.

use kolo_core::{Error, PartialShape, Result};
use kolo_graph::{Graph, Output, WhileOptions};

use super::RnnCell;
use crate::nn::layer::shaped_like;
use crate::ops::{self, At, TensorArray};

/// What [`dynamic_rnn`] may do differently.
#[derive(Clone, Debug)]
pub struct RnnOptions<'g> {
    /// How long each sequence is, `[batch]` of `int32`: beyond that, outputs are zero and the state stays.
    pub sequence_length: Option<Output<'g>>,
    /// The state before the first step; zeros if absent.
    pub initial_state: Option<Vec<Output<'g>>>,
    /// Inputs and outputs are `[time, batch, …]` instead of `[batch, time, …]`.
    pub time_major: bool,
    /// How many steps may be in flight at once.
    pub parallel_iterations: i64,
    /// The name scope.
    pub name: String,
}

impl Default for RnnOptions<'_> {
    fn default() -> Self {
        RnnOptions {
            sequence_length: None,
            initial_state: None,
            time_major: false,
            parallel_iterations: 32,
            name: "rnn".to_owned(),
        }
    }
}

/// What a recurrent network gives.
#[derive(Clone, Debug)]
pub struct Rnn<'g> {
    /// The output of every step, `[batch, time, …]`.
    pub outputs: Output<'g>,
    /// The state after the last step.
    pub state: Vec<Output<'g>>,
}

/// Runs `cell` over the sequences in `x`, `[batch, time, inputs]`, in a loop: neither time nor batch need be known.
///
/// ```
/// use kolo::nn::{LstmCell, RnnOptions, dynamic_rnn};
///
/// let g = kolo::graph();
/// let x = g.placeholder::<f32>("x", [None, None, Some(28)]);
/// let cell = LstmCell::new(64).build(&g, 28, kolo::DType::F32);
/// let rnn = dynamic_rnn(&cell, x, RnnOptions::default())?;
/// assert_eq!(rnn.outputs.shape().to_string(), "[?,?,64]");
/// # Ok::<(), kolo::Error>(())
/// ```
#[track_caller]
pub fn dynamic_rnn<'g>(cell: &dyn RnnCell<'g>, x: Output<'g>, options: RnnOptions<'g>) -> Result<Rnn<'g>> {
    let graph = x.graph();
    graph.check()?;
    let Some(inputs) = x.shape().dim(-1).filter(|_| x.shape().rank() == Some(3)) else {
        return Err(Error::invalid_argument(format!(
            "the input {x:?} of a recurrent network must be [batch, time, inputs] with known inputs"
        )));
    };
    graph.name_scope(&options.name, || {
        let x = if options.time_major { x } else { ops::transpose(x, &[1, 0, 2]) };
        let sizes = ops::shape(x);
        let time = ops::slice_at(sizes, &[At::Index(0)]);
        let batch = x.shape().dim(1);
        let prepared = cell.prepare(ops::reshape(x, &[-1, inputs as i64]));
        graph.check()?;
        let Some(width) = prepared.shape().dim(-1) else {
            return Err(Error::invalid_argument(format!("a cell prepared {prepared:?}, of unknown size")));
        };
        let prepared = shaped_like(prepared, x, width);
        let element = |size: usize| PartialShape::new(&[batch, Some(size)]);
        let inputs = TensorArray::new(graph, cell.dtype(), time, element(width)).unstack(prepared);
        let outputs = TensorArray::new(graph, cell.dtype(), time, element(cell.output_size()));
        let state = options
            .initial_state
            .unwrap_or_else(|| cell.zero_state(graph, batch.ok_or_else(|| ops::slice_at(sizes, &[At::Index(1)]))));
        if state.len() != cell.state_sizes().len() {
            return Err(Error::invalid_argument(format!(
                "the initial state has {} parts, the cell's has {}",
                state.len(),
                cell.state_sizes().len()
            )));
        }
        let start = graph.constant(0i32);
        let init: Vec<Output<'g>> = [start, outputs.flow()].into_iter().chain(state).collect();
        let last = graph.while_loop(
            &init,
            |_, vars| ops::less(vars[0], time),
            |graph, vars| {
                let (at, state) = (vars[0], &vars[2..]);
                let (mut output, mut next) = cell.step(inputs.read(at), state);
                if let Some(lengths) = options.sequence_length {
                    let going_on = ops::expand_dims(ops::less(at, ops::cast(lengths, kolo_core::DType::I32)), 1);
                    output = ops::select(going_on, output, ops::zeros_like(output));
                    next = next.iter().zip(state).map(|(&new, &old)| ops::select(going_on, new, old)).collect();
                }
                let written = outputs.with_flow(vars[1]).write(at, output);
                let counted = at + graph.constant(1i32);
                [counted, written.flow()].into_iter().chain(next).collect()
            },
            WhileOptions { parallel_iterations: options.parallel_iterations, ..WhileOptions::default() },
        )?;
        let all = outputs.with_flow(last[1]).stack();
        let outputs = if options.time_major { all } else { ops::transpose(all, &[1, 0, 2]) };
        graph.check()?;
        Ok(Rnn { outputs, state: last[2..].to_vec() })
    })
}

/// Runs `cell` over a fixed number of steps, each input `[batch, inputs]`, and gives all outputs and the last state. The graph
/// grows with every step; [`dynamic_rnn`] does not.
#[track_caller]
pub fn static_rnn<'g>(
    cell: &dyn RnnCell<'g>,
    inputs: &[Output<'g>],
    initial_state: Option<Vec<Output<'g>>>,
) -> Result<(Vec<Output<'g>>, Vec<Output<'g>>)> {
    let Some(first) = inputs.first() else {
        return Err(Error::invalid_argument("a recurrent network needs at least one step"));
    };
    let graph = first.graph();
    graph.name_scope("rnn", || {
        let batch = first.shape().dim(0).ok_or_else(|| ops::slice_at(ops::shape(*first), &[At::Index(0)]));
        let mut state = initial_state.unwrap_or_else(|| cell.zero_state(graph, batch));
        let mut outputs = Vec::with_capacity(inputs.len());
        for &x in inputs {
            let (output, next) = cell.step(cell.prepare(x), &state);
            outputs.push(output);
            state = next;
        }
        graph.check()?;
        Ok((outputs, state))
    })
}

/// Keeps the error that a cell was given a state of another kind.
pub(super) fn wrong_state<'g>(graph: &'g Graph, cell: &str, n: usize, found: usize) -> (Output<'g>, Vec<Output<'g>>) {
    graph.record_error(Error::invalid_argument(format!("{cell} works on {n} parts, not {found}")));
    (Output::invalid(graph), vec![Output::invalid(graph); n])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::{DType, Tensor};
    use kolo_graph::Initializer;

    use super::*;
    use crate::nn::testing::{check_gradients, close, run};
    use crate::nn::{GruCell, LstmCell, StackedCells};

    /// A matrix that is not symmetric in any way: element (i, j) is `((7·i + 3·j) mod 11 − 5) / 10`.
    fn matrix(rows: usize, columns: usize) -> Vec<f64> {
        let at = |i: usize| ((7 * (i / columns) + 3 * (i % columns)) % 11) as f64;
        (0..rows * columns).map(|i| (at(i) - 5.0) / 10.0).collect()
    }

    fn floats(rows: usize, columns: usize) -> Tensor {
        Tensor::from_vec([rows, columns], matrix(rows, columns).iter().map(|&x| x as f32).collect()).unwrap()
    }

    /// Two sequences of three steps of two numbers: sin(0.7 · i).
    fn sequences() -> Tensor {
        let values = (0..12).map(|i| (i as f32 * 0.7).sin()).collect();
        Tensor::from_vec([2usize, 3, 2], values).unwrap()
    }

    fn lengths<'g>(g: &'g Graph) -> RnnOptions<'g> {
        RnnOptions { sequence_length: Some(g.constant([3i32, 2])), ..RnnOptions::default() }
    }

    #[test]
    fn an_lstm_is_tensorflows() {
        let g = kolo_ops::graph();
        let cell = LstmCell::new(2).kernel(floats(4, 8)).build(&g, 2, DType::F32);
        assert_eq!((cell.kernel.name().as_str(), cell.bias.name().as_str()), ("lstm_cell/kernel", "lstm_cell/bias"));
        let x = g.placeholder::<f32>("x", [None, None, Some(2)]);
        let rnn = dynamic_rnn(&cell, x, lengths(&g)).unwrap();
        let plain = dynamic_rnn(&cell, x, RnnOptions::default()).unwrap();
        assert_eq!(rnn.outputs.shape().to_string(), "[?,?,2]");
        let steps = ops::unstack(g.constant(sequences()), 3, 1);
        let (outputs, state) = static_rnn(&cell, &steps, None).unwrap();
        let unrolled = ops::stack(&outputs, 1);
        let major = RnnOptions { time_major: true, ..RnnOptions::default() };
        let turned = dynamic_rnn(&cell, ops::transpose(x, &[1, 0, 2]), major).unwrap();
        let turned = ops::transpose(turned.outputs, &[1, 0, 2]);
        let fetches =
            [rnn.outputs, rnn.state[0], rnn.state[1], plain.outputs, unrolled, plain.state[1], state[1], turned];
        let found = run(&g, &fetches, &[(x, sequences())]);
        // BasicLSTMCell's formula in NumPy: i, j, f, o = split([x, h] · kernel), forget bias 1.
        let expected = [
            -0.0473633, 0.0, -0.0728291, 0.1381911, -0.0251237, 0.1351378, 0.0576373, -0.0518569, 0.0301973, -0.104207,
            0.0, 0.0,
        ];
        close(&found[0], &expected);
        close(&found[1], &[-0.0475638, 0.2497978, 0.0638574, -0.2579507]);
        close(&found[2], &[-0.0251237, 0.1351378, 0.0301973, -0.104207]);
        assert_eq!((&found[3], &found[5]), (&found[4], &found[6]));
        assert_eq!(found[3], found[7]);
    }

    #[test]
    fn a_gru_is_tensorflows() {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [Some(2), None, Some(2)]);
        let cell = GruCell::new(2).build(&g, 2, DType::F32);
        let set = [
            cell.gates_kernel.assign(g.constant(floats(4, 4))),
            cell.candidate_kernel.assign(g.constant(floats(4, 2))),
        ];
        let names: Vec<String> = g.trainable_variables().iter().map(|v| v.name()).collect();
        let expected = ["gates/kernel", "gates/bias", "candidate/kernel", "candidate/bias"];
        assert_eq!(names, expected.map(|name| format!("gru_cell/{name}")));
        let rnn = dynamic_rnn(&cell, x, lengths(&g)).unwrap();
        let init = g.global_variables_initializer();
        let session = kolo_runtime::Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        session.run(&[], &[], &set).unwrap();
        let found = session.run(&[rnn.outputs, rnn.state[0]], &[(x, sequences())], &[]).unwrap();
        // GRUCell's formula in NumPy: r, u = split(σ([x, h] · gates + 1)), h = u · h + (1 − u) · tanh([x, r · h] · candidate).
        let expected = [
            0.0395408, 0.0837517, -0.0572686, 0.1095278, -0.0901482, 0.0228031, 0.0540418, -0.1051041, 0.1124664,
            -0.0163033, 0.0, 0.0,
        ];
        close(&found[0], &expected);
        close(&found[1], &[-0.0901482, 0.0228031, 0.1124664, -0.0163033]);
    }

    #[test]
    fn gradients_go_through_the_loop() {
        let g = kolo_ops::graph();
        g.set_seed(3);
        let values = Tensor::from_vec([2usize, 3, 2], (0..12).map(|i| f64::from(i).sin()).collect()).unwrap();
        let x = g.variable("x", Initializer::Value(values));
        let build = |name: &str, inputs: usize| LstmCell::new(2).name(name).build(&g, inputs, DType::F64);
        let gru = GruCell::new(2).build(&g, 2, DType::F64);
        let stack = StackedCells::new(build("low", 2)).then(gru).then(build("high", 2));
        assert_eq!((stack.output_size(), stack.state_sizes()), (2, vec![2; 5]));
        let rnn = dynamic_rnn(&stack, x.read(), lengths(&g)).unwrap();
        let weights =
            g.constant(Tensor::from_vec([2usize, 3, 2], (0..12).map(|i| f64::from(i) - 5.0).collect()).unwrap());
        check_gradients(&g, ops::sum_all(rnn.outputs * weights) + ops::sum_all(rnn.state[0]));
    }

    #[test]
    fn what_is_not_a_sequence_is_refused() {
        let g = kolo_ops::graph();
        let cell = LstmCell::new(2).build(&g, 2, DType::F32);
        let x = g.placeholder::<f32>("x", [None, Some(2)]);
        assert!(
            dynamic_rnn(&cell, x, RnnOptions::default()).unwrap_err().to_string().contains("[batch, time, inputs]")
        );
        assert!(static_rnn(&cell, &[], None).is_err());
        let x = g.placeholder::<f32>("y", [None, None, Some(2)]);
        let one = RnnOptions { initial_state: Some(vec![x]), ..RnnOptions::default() };
        assert!(dynamic_rnn(&cell, x, one).unwrap_err().to_string().contains("has 1 parts, the cell's has 2"));
    }
}
