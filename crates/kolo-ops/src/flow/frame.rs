//! The ops at a loop's borders: `Enter` and `Exit` lead in and out, `NextIteration` around once more, `LoopCond` marks
//! the predicate. Each has a variant for references. `kolo_graph::Graph::while_loop` makes them.

use kolo_graph::{Effects, Flow, Gradient, HostRule, OpDef, shape_fns};

use crate::Cost;
use crate::cuda::PLAIN;
use crate::op::{Gpu, KernelDef, KernelMaker, Op, cpu_made, gpu_made};

pub(crate) static ENTER: Op = border("Enter", Flow::Enter, ENTER_SIGNATURE).host(HostRule::SmallIntegers);
pub(crate) static REF_ENTER: Op = border("RefEnter", Flow::Enter, REF_ENTER_SIGNATURE).effects(Effects::Forwards);
pub(crate) static EXIT: Op = border("Exit", Flow::Exit, PASS_ON).host(HostRule::SmallIntegers);
pub(crate) static REF_EXIT: Op = border("RefExit", Flow::Exit, REF_PASS_ON).effects(Effects::Forwards);
pub(crate) static NEXT_ITERATION: Op =
    border("NextIteration", Flow::NextIteration, PASS_ON).host(HostRule::SmallIntegers);
pub(crate) static REF_NEXT_ITERATION: Op =
    border("RefNextIteration", Flow::NextIteration, REF_PASS_ON).effects(Effects::Forwards);
pub(crate) static LOOP_COND: Op = Op {
    def: OpDef {
        gradient: Gradient::None("a predicate is no float"),
        host: HostRule::Always,
        ..border("LoopCond", Flow::LoopCond, "(input:bool) -> (output:bool)").def
    },
    kernels: KERNELS,
    gpu: Gpu::Host,
    cost: Cost::Inline,
};

const ENTER_SIGNATURE: &str =
    "(data:T) -> (output:T) ; T:type, frame_name:string, is_constant:bool=false, parallel_iterations:int=10";
const REF_ENTER_SIGNATURE: &str =
    "(data:Ref(T)) -> (output:Ref(T)) ; T:type, frame_name:string, is_constant:bool=false, parallel_iterations:int=10";
const PASS_ON: &str = "(data:T) -> (output:T) ; T:type";
const REF_PASS_ON: &str = "(data:Ref(T)) -> (output:Ref(T)) ; T:type";

const KERNELS: &[KernelDef] = &[cpu_made(KernelMaker::Executor)];

const ON_GPU: &[KernelDef] = &[gpu_made("T", PLAIN, KernelMaker::Executor)];

const fn border(name: &'static str, flow: Flow, signature: &'static str) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: shape_fns::same_as_input_0,
            gradient: Gradient::Flow,
            flow,
            ..OpDef::BASE
        },
        kernels: KERNELS,
        gpu: Gpu::Kernels(ON_GPU),
        cost: Cost::Inline,
    }
}
