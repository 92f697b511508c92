//! `All` and `Any` over axes.

use kolo_core::Result;
use kolo_graph::{Combine, Gradient, OpDef, Output, SplitRule, shape_fns};

use crate::cuda::reduce as on_gpu;
use crate::math::reduce::reduce;
use crate::math::reduce::sum::over_all;
use crate::math::reduce::walk::Reducer;
use crate::op::{Gpu, KernelDef, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// Whether all elements over `axes` are true.
#[track_caller]
pub fn all<'g>(x: Output<'g>, axes: &[i32]) -> Output<'g> {
    x.graph().op("All").input(x).input(x.graph().constant(axes)).out()
}

/// Whether all elements are true.
#[track_caller]
pub fn all_all(x: Output<'_>) -> Output<'_> {
    over_all(x, "All")
}

/// Whether any element over `axes` is true.
#[track_caller]
pub fn any<'g>(x: Output<'g>, axes: &[i32]) -> Output<'g> {
    x.graph().op("Any").input(x).input(x.graph().constant(axes)).out()
}

/// Whether any element is true.
#[track_caller]
pub fn any_all(x: Output<'_>) -> Output<'_> {
    over_all(x, "Any")
}

pub(crate) static ALL: Op = logical("All", &[cpu_any(all_kernel)])
    .split(SplitRule::Reduction(Combine::All))
    .host_args(&["reduction_indices"])
    .gpu(&[gpu_kernel("", &[], |ctx| on_gpu::reduce(ctx, &GPU_ALL))]);
pub(crate) static ANY: Op = logical("Any", &[cpu_any(any_kernel)])
    .split(SplitRule::Reduction(Combine::Any))
    .host_args(&["reduction_indices"])
    .gpu(&[gpu_kernel("", &[], |ctx| on_gpu::reduce(ctx, &GPU_ANY))]);

const fn logical(name: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(input:bool, reduction_indices:Tidx) -> (output:bool) ; \
                        keep_dims:bool=false, Tidx:type{int32,int64}=int32",
            shape: shape_fns::reduction,
            gradient: Gradient::None("truth values have no gradient"),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

#[derive(Clone, Copy)]
struct All;

impl Reducer<bool> for All {
    type Acc = bool;
    const START: bool = true;
    #[inline(always)]
    fn step(acc: bool, x: bool) -> bool {
        acc & x
    }
    #[inline(always)]
    fn join(a: bool, b: bool) -> bool {
        a & b
    }
    #[inline(always)]
    fn finish(acc: bool, _: usize) -> bool {
        acc
    }
}

#[derive(Clone, Copy)]
struct Any;

impl Reducer<bool> for Any {
    type Acc = bool;
    const START: bool = false;
    #[inline(always)]
    fn step(acc: bool, x: bool) -> bool {
        acc | x
    }
    #[inline(always)]
    fn join(a: bool, b: bool) -> bool {
        a | b
    }
    #[inline(always)]
    fn finish(acc: bool, _: usize) -> bool {
        acc
    }
}

fn all_kernel(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<bool, All>(ctx)
}

fn any_kernel(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<bool, Any>(ctx)
}

pub(crate) const GPU_ALL: on_gpu::Reducer =
    on_gpu::Reducer { name: "all", start: "1", step: "(a) & (A)(x)", join: "(a) & (b)", ..on_gpu::SUM };

pub(crate) const GPU_ANY: on_gpu::Reducer =
    on_gpu::Reducer { name: "any", start: "0", step: "(a) | (A)(x)", join: "(a) | (b)", ..on_gpu::SUM };

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor};

    #[test]
    fn all_and_any() {
        let x = [[true, false], [true, true]];
        check_op("All").input(x).input([0i32]).gives([true, false]);
        check_op("All").input(x).input([1i64]).attr("keep_dims", true).gives([[false], [true]]);
        check_op("Any").input(x).input([0i32, 1]).gives(true);
        check_op("Any").input([[false, false], [false, true]]).input([1i32]).gives([false, true]);
        check_op("All").input(tensor::<bool, 1>([0], [])).input([0i32]).gives(true);
        check_op("Any").input(tensor::<bool, 1>([0], [])).input([0i32]).gives(false);
        let mut many = vec![true; 100_001];
        check_op("All").input(many.clone()).input([0i32]).gives(true);
        many[70_000] = false;
        check_op("All").input(many).input([0i32]).gives(false);
    }
}
