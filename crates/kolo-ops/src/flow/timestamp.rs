//! `Timestamp`: the time at which it runs.

use std::time::{SystemTime, UNIX_EPOCH};

use kolo_core::Tensor;
use kolo_graph::{Effects, Gradient, Graph, OpDef, Output, shape_fns};

use crate::Cost;
use crate::op::{Gpu, Op, cpu_any};

/// Seconds since 1970, as a double, when the control dependencies that are open now have run.
#[track_caller]
pub fn timestamp(graph: &Graph) -> Output<'_> {
    graph.op("Timestamp").out()
}

pub(crate) static TIMESTAMP: Op = Op {
    def: OpDef {
        name: "Timestamp",
        signature: "() -> (ts:double)",
        shape: shape_fns::scalars,
        gradient: Gradient::None("time has no inputs"),
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        // A clock set before 1970 reads as 1970.
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        ctx.set_output(0, Tensor::scalar(seconds));
        Ok(())
    })],
    gpu: Gpu::Never("it reads the host's clock"),
    cost: Cost::Inline,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::evaluate;

    #[test]
    fn time_passes() {
        let g = crate::graph();
        let first = timestamp(&g);
        let second = g.control_dependencies(&[first.operation()], || timestamp(&g));
        let times = evaluate(&g, &[first, second], &[]).unwrap();
        let [first, second] = [0, 1].map(|i: usize| times[i].scalar_value::<f64>().unwrap());
        assert!(first > 1.7e9 && second >= first);
    }
}
