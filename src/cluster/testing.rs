//! What the tests of this folder share: a small problem, and workers as threads that share devices.

use std::time::Duration;

use kolo_core::{Shape, Tensor};
use kolo_graph::{Graph, Initializer, Output};
use kolo_runtime::{Host, Session, SessionConfig};

use crate::ops;

/// Rows of each worker's batch.
const ROWS: usize = 4;

/// A small network: enough that its gradients depend on the variables.
pub(super) struct Problem<'g> {
    x: Output<'g>,
    y: Output<'g>,
    pub loss: Output<'g>,
    read: Vec<Output<'g>>,
}

impl<'g> Problem<'g> {
    /// With its variables on this device.
    pub fn new(g: &'g Graph, variables_on: &str) -> Problem<'g> {
        let x = g.placeholder::<f32>("x", [None, Some(3)]);
        let y = g.placeholder::<f32>("y", [None, Some(1)]);
        let weights = |name: &str, shape: &[usize]| {
            let n: usize = shape.iter().product();
            let values: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
            let value = Tensor::from_vec(Shape::new(shape).expect("a small shape"), values).expect("as many as it has");
            g.device(variables_on, || g.variable(name, Initializer::Value(value)))
        };
        let (a, b) = (weights("a", &[3, 4]), weights("b", &[4, 1]));
        let hidden = ops::tanh(ops::matmul(x, a.read()));
        let loss = ops::mean_all(ops::square(ops::matmul(hidden, b.read()) - y));
        Problem { x, y, loss, read: vec![a.read(), b.read()] }
    }

    fn rows(&self, first: usize, n: usize) -> Vec<(Output<'g>, Tensor)> {
        let value = |i: usize| ((i * 37 + 11) % 23) as f32 / 23.0 - 0.5;
        let x: Vec<f32> = (first * 3..(first + n) * 3).map(value).collect();
        let y: Vec<f32> = (first..first + n).map(|row| value(row * 5)).collect();
        let tensor = |dims: &[usize], values| {
            Tensor::from_vec(Shape::new(dims).expect("a small shape"), values).expect("as many as it has")
        };
        vec![(self.x, tensor(&[n, 3], x)), (self.y, tensor(&[n, 1], y))]
    }

    /// The batch of one worker in one step, of three workers at most.
    pub fn batch(&self, worker: usize, step: usize) -> Vec<(Output<'g>, Tensor)> {
        self.rows((step * 3 + worker) * ROWS, ROWS)
    }

    /// The batches of the first `n` workers in one step, together.
    pub fn joined(&self, n: usize, step: usize) -> Vec<(Output<'g>, Tensor)> {
        self.rows(step * 3 * ROWS, n * ROWS)
    }

    pub fn values(&self, session: &Session) -> Vec<Tensor> {
        session.run(&self.read, &[], &[]).expect("variables have values")
    }

    /// Fails unless the values agree up to rounding.
    pub fn close(found: &[Tensor], expected: &[Tensor]) {
        for (found, expected) in found.iter().zip(expected) {
            let (found, expected) = (found.data::<f32>().expect("floats"), expected.data::<f32>().expect("floats"));
            for (x, y) in found.iter().zip(expected) {
                assert!((x - y).abs() <= 1e-5 * y.abs().max(1.0), "{found:?}\nand {expected:?}");
            }
        }
    }
}

/// Runs `work` in `n` threads, which share a host with a device for variables and one for each.
pub(super) fn on_workers<R: Send>(n: usize, work: impl Fn(usize, &Host) -> R + Sync) -> Vec<R> {
    let device_count = [("CPU".to_owned(), n + 1)].into();
    // A worker that waits in vain fails instead of hanging.
    let operation_timeout = Some(Duration::from_secs(60));
    let config =
        SessionConfig { device_count, operation_timeout, intra_op_parallelism_threads: 1, ..SessionConfig::default() };
    let host = Host::new(config).expect("CPUs");
    std::thread::scope(|scope| {
        let (host, work) = (&host, &work);
        let threads: Vec<_> = (0..n).map(|worker| scope.spawn(move || work(worker, host))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a worker failed")).collect()
    })
}
