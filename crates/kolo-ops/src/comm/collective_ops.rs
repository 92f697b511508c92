//! `KoloAllReduce` and the other collectives: what the ranks of a group compute together, as nodes. See [`crate::collective`].
//!
//! Every rank runs the same collectives of a group in the same order: the pass `order-collectives` sees to that, except within
//! loops and branches, where the program orders them by control dependencies. A difference between ranks is an error on all.

use kolo_core::{PartialShape, Result, Tensor};
use kolo_device::cpu::reduce::ReduceOp;
use kolo_graph::{Attrs, Effects, Gradient, InferCtx, OpDef, ShapeFn, shape_fns};

use crate::collective::{CollectiveCall, CollectiveKind, Root};
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, Op, cpu_made};
use crate::{AsyncKernel, Cost, Done, KernelCtx, KernelMaker, Outcome};

pub(crate) static KOLO_ALL_REDUCE: Op = joined(collective(
    "KoloAllReduce",
    "(values:N*T) -> (reduced:N*T) ; N:int>=1, \
     T:type{half,bfloat16,float,double,int8,int16,int32,int64,uint8,uint16,uint32,uint64}, group:string=\"\", \
     reduction:string{\"sum\",\"mean\",\"min\",\"max\",\"prod\"}=\"sum\"",
    shape_fns::each_as_its_input,
    &[made(|init| Collective::make(init, CollectiveKind::AllReduce(reduction(init.attrs())?)))],
));

pub(crate) static KOLO_REDUCE_SCATTER: Op = collective(
    "KoloReduceScatter",
    "(value:T) -> (share:T) ; \
     T:type{half,bfloat16,float,double,int8,int16,int32,int64,uint8,uint16,uint32,uint64}, group:string=\"\", \
     reduction:string{\"sum\",\"mean\",\"min\",\"max\",\"prod\"}=\"sum\"",
    other_rows,
    &[made(|init| Collective::make(init, CollectiveKind::ReduceScatter(reduction(init.attrs())?)))],
);

pub(crate) static KOLO_ALL_GATHER: Op = collective(
    "KoloAllGather",
    "(value:T) -> (all:T) ; T:type, group:string=\"\"",
    other_rows,
    &[made(|init| Collective::make(init, CollectiveKind::AllGather))],
);

pub(crate) static KOLO_ALL_TO_ALL: Op = collective(
    "KoloAllToAll",
    "(value:T) -> (shares:T) ; T:type, group:string=\"\"",
    shape_fns::each_as_its_input,
    &[made(|init| Collective::make(init, CollectiveKind::AllToAll))],
);

pub(crate) static KOLO_BROADCAST: Op = joined(collective(
    "KoloBroadcast",
    "(values:N*T) -> (copies:N*T) ; N:int>=1, T:type, group:string=\"\", root:int>=0=0",
    shape_fns::each_as_its_input,
    &[made(|init| {
        let root = usize::try_from(init.attrs().int("root")?).unwrap_or(usize::MAX);
        Collective::make(init, CollectiveKind::Broadcast(Root(root)))
    })],
));

const fn collective(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    let gradient = Gradient::Refused("ranks exchange gradients; nothing is differentiated through the exchange");
    let def = OpDef {
        name,
        signature,
        shape,
        gradient,
        stateful: true,
        effects: Effects::Outside,
        group: Some("group"),
        ..OpDef::BASE
    };
    Op { def, kernels, gpu: Gpu::Missing, cost: Cost::Inline }
}

/// One that exchanges `N` tensors together.
const fn joined(op: Op) -> Op {
    Op { def: OpDef { joined_by: Some("N"), ..op.def }, ..op }
}

const fn made(make: fn(&KernelInit<'_>) -> Result<Box<dyn AsyncKernel>>) -> KernelDef {
    cpu_made(KernelMaker::Async(make))
}

fn reduction(attrs: &Attrs) -> Result<ReduceOp> {
    ReduceOp::parse(attrs.str("reduction")?)
}

/// The number of rows depends on the number of ranks.
fn other_rows(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let shape = ctx.input_of_rank_at_least(0, 1)?;
    Ok(vec![match shape.dims() {
        Some(dims) => {
            let dims: Vec<Option<usize>> = std::iter::once(None).chain(dims[1..].iter().copied()).collect();
            PartialShape::new(&dims)
        }
        None => PartialShape::unknown(),
    }])
}

struct Collective {
    kind: CollectiveKind,
    group: String,
}

impl Collective {
    fn make(init: &KernelInit<'_>, kind: CollectiveKind) -> Result<Box<dyn AsyncKernel>> {
        Ok(Box::new(Collective { kind, group: init.attrs().str("group")?.to_owned() }))
    }
}

impl AsyncKernel for Collective {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let mut arguments = || {
            let group = ctx.step.resources().groups().find(&self.group)?;
            let tensors = (0..ctx.n_inputs()).map(|i| ctx.take_input(i)).collect::<Result<Vec<Tensor>>>()?;
            Ok((group, tensors))
        };
        match arguments() {
            Ok((group, tensors)) => {
                let (name, cancel) = (ctx.node.name.clone(), Some(ctx.step.cancel().clone()));
                let call = CollectiveCall { kind: self.kind, name, tensors, cancel };
                group.start(call, Box::new(move |result| done.finish(result.map(Outcome::from))));
            }
            Err(error) => done.finish(Err(error)),
        }
    }
}
