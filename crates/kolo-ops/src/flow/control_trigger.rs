//! `ControlTrigger`: does nothing, after its control inputs, even if they are dead.

use kolo_graph::{Flow, Gradient, HostRule, OpDef};

use crate::Cost;
use crate::op::{Gpu, KernelMaker, Op, cpu_made};

pub(crate) static CONTROL_TRIGGER: Op = Op {
    def: OpDef {
        name: "ControlTrigger",
        signature: "() -> ()",
        gradient: Gradient::None("nothing goes in or out"),
        flow: Flow::ControlTrigger,
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Executor)],
    gpu: Gpu::Host,
    cost: Cost::Inline,
};
