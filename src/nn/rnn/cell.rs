//! What a cell is: one step of a recurrent network.

use kolo_core::{DType, Shape};
use kolo_graph::{Graph, Output};

use crate::ops;

/// One step of a recurrent network: from an input and a state to an output and the next state. The variables exist already, so
/// that every step uses the same.
pub trait RnnCell<'g> {
    /// The size of the output's last dimension.
    fn output_size(&self) -> usize;

    /// The sizes of the state's parts.
    fn state_sizes(&self) -> Vec<usize>;

    /// The element type.
    fn dtype(&self) -> DType;

    /// What of all steps depends on their inputs alone, computed at once: `x` is `[n, inputs]`, the result `[n, …]`.
    fn prepare(&self, x: Output<'g>) -> Output<'g>;

    /// One step, from what [`RnnCell::prepare`] gave for it and the state before it, to its output and the state after it.
    fn step(&self, prepared: Output<'g>, state: &[Output<'g>]) -> (Output<'g>, Vec<Output<'g>>);

    /// A state of zeros for a batch of this size, a scalar `int32` where it is not known.
    fn zero_state(&self, graph: &'g Graph, batch: Result<usize, Output<'g>>) -> Vec<Output<'g>> {
        let zeros = |size: usize| match batch {
            Ok(batch) => match Shape::new(&[batch, size]) {
                Ok(shape) => graph.zeros(self.dtype(), &shape),
                Err(error) => {
                    graph.record_error(error);
                    Output::invalid(graph)
                }
            },
            // Made flat, so that the size of the last dimension stays known.
            Err(batch) => {
                let n = ops::reshape(batch * size as i32, &[1i64]);
                ops::reshape(ops::zeros(graph, n, self.dtype()), &[-1, size as i64])
            }
        };
        self.state_sizes().into_iter().map(zeros).collect()
    }
}

/// Cells on top of each other: the output of each is the input of the next.
pub struct StackedCells<'a, 'g> {
    cells: Vec<Box<dyn RnnCell<'g> + 'a>>,
}

impl<'a, 'g> StackedCells<'a, 'g> {
    /// A stack of one cell.
    pub fn new(first: impl RnnCell<'g> + 'a) -> StackedCells<'a, 'g> {
        StackedCells { cells: vec![Box::new(first)] }
    }

    /// One more on top, whose inputs are the outputs of the one below.
    #[must_use]
    pub fn then(mut self, cell: impl RnnCell<'g> + 'a) -> StackedCells<'a, 'g> {
        self.cells.push(Box::new(cell));
        self
    }
}

impl<'g> RnnCell<'g> for StackedCells<'_, 'g> {
    fn output_size(&self) -> usize {
        self.cells.last().map_or(0, |cell| cell.output_size())
    }

    fn state_sizes(&self) -> Vec<usize> {
        self.cells.iter().flat_map(|cell| cell.state_sizes()).collect()
    }

    fn dtype(&self) -> DType {
        self.cells.first().map_or(DType::F32, |cell| cell.dtype())
    }

    fn prepare(&self, x: Output<'g>) -> Output<'g> {
        self.cells.first().map_or(x, |cell| cell.prepare(x))
    }

    fn step(&self, prepared: Output<'g>, state: &[Output<'g>]) -> (Output<'g>, Vec<Output<'g>>) {
        let (mut x, mut next, mut rest) = (prepared, Vec::with_capacity(state.len()), state);
        for (i, cell) in self.cells.iter().enumerate() {
            let (own, others) = rest.split_at(cell.state_sizes().len().min(rest.len()));
            let input = if i == 0 { x } else { cell.prepare(x) };
            let (output, after) = cell.step(input, own);
            next.extend(after);
            (x, rest) = (output, others);
        }
        (x, next)
    }
}
