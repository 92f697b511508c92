//! `NoOp`: does nothing, after its control inputs. `kolo_graph::Graph::group` makes one.

use kolo_graph::{Gradient, HostRule, OpDef};

use crate::Cost;
use crate::op::{Gpu, Op, cpu_any};

pub(crate) static NO_OP: Op = Op {
    def: OpDef {
        name: "NoOp",
        signature: "() -> ()",
        gradient: Gradient::None("nothing goes in or out"),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|_| Ok(()))],
    gpu: Gpu::Host,
    cost: Cost::Inline,
};

#[cfg(test)]
mod tests {
    #[test]
    fn no_op_runs_what_it_waits_for() {
        let g = crate::graph();
        let never_fed = g.placeholder::<f32>("x", [2usize]);
        let group = g.group("all", &[never_fed.operation()]);
        let error = crate::testing::Evaluation::new(g.snapshot()).run_targets(&[group], &[]).unwrap_err();
        assert!(error.message().contains("You must feed"), "{error}");
    }
}
