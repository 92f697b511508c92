//! Ops that run functions: calls, branches and loops that name them, and the ends of a function's body. They have no
//! kernels: importing a graph writes them out as plain nodes (`kolo_graph::wire::graph::import`), and one that was kept
//! says so when it is run.

use kolo_core::{PartialShape, Result};
use kolo_graph::{AttrValue, Effects, Gradient, InferCtx, OpDef};

use crate::Cost;
use crate::op::{Gpu, Op};

pub(crate) static PARTITIONED_CALL: Op = call("PartitionedCall", CALL, false);
pub(crate) static STATEFUL_PARTITIONED_CALL: Op = call("StatefulPartitionedCall", CALL, true);
pub(crate) static IF: Op = call("If", BRANCH, true);
pub(crate) static STATELESS_IF: Op = call("StatelessIf", BRANCH, false);
pub(crate) static WHILE: Op = call("While", LOOP, true);
pub(crate) static STATELESS_WHILE: Op = call("StatelessWhile", LOOP, false);
pub(crate) static CASE: Op = call("Case", SELECTION, true);
pub(crate) static STATELESS_CASE: Op = call("StatelessCase", SELECTION, false);
pub(crate) static SYMBOLIC_GRADIENT: Op = call(
    "SymbolicGradient",
    "(input:list(Tin)) -> (output:list(Tout)) ; Tin:list(type)>=1, Tout:list(type)>=1, f:func",
    false,
);
pub(crate) static ARG: Op = call("_Arg", "() -> (output:T) ; T:type, index:int>=0", true);
pub(crate) static RETVAL: Op = call("_Retval", "(input:T) -> () ; T:type, index:int>=0", true);

const CALL: &str = "(args:list(Tin)) -> (output:list(Tout)) ; Tin:list(type)>=0, Tout:list(type)>=0, f:func, \
     config:string=\"\", config_proto:string=\"\", executor_type:string=\"\"";
const BRANCH: &str = "(cond:Tcond, input:list(Tin)) -> (output:list(Tout)) ; Tcond:type, Tin:list(type)>=0, \
     Tout:list(type)>=0, then_branch:func, else_branch:func, output_shapes:list(shape)=[]";
const LOOP: &str = "(input:list(T)) -> (output:list(T)) ; T:list(type)>=0, cond:func, body:func, \
     output_shapes:list(shape)=[], parallel_iterations:int=10";
const SELECTION: &str = "(branch_index:int32, input:list(Tin)) -> (output:list(Tout)) ; Tin:list(type)>=0, \
     Tout:list(type)>=0, branches:list(func)>=1, output_shapes:list(shape)=[]";

const fn call(name: &'static str, signature: &'static str, stateful: bool) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::Refused("import the graph with calls written out, and take the gradient there"),
            stateful,
            // The function's nodes are placed one by one.
            handles_from_anywhere: true,
            effects: if stateful { Effects::Outside } else { Effects::None },
            ..OpDef::BASE
        },
        kernels: &[],
        gpu: Gpu::Never("it is written out as plain nodes when a graph is imported"),
        cost: Cost::Inline,
    }
}

/// What the node says of its outputs, if it does. The functions themselves are not within reach here; a call that is
/// written out has the shapes that its body gives.
fn shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let stated = match ctx.attrs().find("output_shapes") {
        Some(AttrValue::List(shapes)) if shapes.len() == ctx.n_outputs() => shapes.as_slice(),
        _ => &[],
    };
    let of = |i| match stated.get(i) {
        Some(AttrValue::Shape(shape)) => shape.clone(),
        _ => PartialShape::unknown(),
    };
    Ok((0..ctx.n_outputs()).map(of).collect())
}

#[cfg(test)]
mod tests {
    use kolo_core::{Code, DType};
    use kolo_graph::{Request, prune};

    use super::*;

    #[test]
    fn a_call_that_was_kept_has_the_shapes_it_states_and_refuses_to_run() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [2usize]);
        let p = g.placeholder::<bool>("p", PartialShape::scalar());
        let branch = |name: &str, shapes: Vec<AttrValue>| {
            let op = g.op("If").name(name).input(p).input(x).attr("Tout", vec![DType::F32]);
            let op =
                op.attr("then_branch", AttrValue::Func("f".into())).attr("else_branch", AttrValue::Func("g".into()));
            op.attr("output_shapes", AttrValue::List(shapes)).out()
        };
        let stated = branch("stated", vec![AttrValue::Shape(PartialShape::new(&[None, Some(3)]))]);
        assert_eq!(stated.shape(), PartialShape::new(&[None, Some(3)]));
        assert_eq!(branch("open", Vec::new()).shape(), PartialShape::unknown());
        g.check().unwrap();
        let request = Request { targets: vec![stated.operation().id()], ..Request::default() };
        let error = prune(&g.snapshot(), &request).unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented);
        assert!(error.message().contains("If 'stated'") && error.message().contains("Calls::Lower"), "{error}");
    }
}
