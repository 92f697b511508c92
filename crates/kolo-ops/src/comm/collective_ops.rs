//! `KoloAllReduce` and the other collectives: what the ranks of a group compute together, as nodes. See [`crate::collective`].
//!
//! On a GPU, a collective is enqueued as kernels are and its tensors stay where they are, if the group's ranks reach each other's
//! devices; otherwise they go through host memory.
//!
//! Every rank runs the same collectives of a group in the same order: the pass `order-collectives` sees to that, except within
//! loops and branches, where the program orders them by control dependencies. A difference between ranks is an error on all.

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_device::DeviceRanks;
use kolo_device::cpu::reduce::ReduceOp;
use kolo_graph::{Attrs, Effects, Gradient, HostRule, InferCtx, OpDef, ShapeFn, shape_fns};

use crate::collective::{CollectiveCall, CollectiveGroup, CollectiveKind, Root, call};
use crate::cuda::{NUMBERS, PLAIN};
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, Op, cpu_made, gpu_made};
use crate::{AsyncKernel, Cost, Done, Kernel, KernelCtx, KernelMaker, Outcome};

pub(crate) static KOLO_ALL_REDUCE: Op = alike(joined(collective(
    "KoloAllReduce",
    "(values:N*T) -> (reduced:N*T) ; N:int>=1, \
     T:type{half,bfloat16,float,double,int8,int16,int32,int64,uint8,uint16,uint32,uint64}, group:string=\"\", \
     reduction:string{\"sum\",\"mean\",\"min\",\"max\",\"prod\"}=\"sum\", awaited_later:bool=false",
    shape_fns::each_as_its_input,
    &[made(|init| Collective::make(init, CollectiveKind::AllReduce(reduction(init.attrs())?)))],
    &[on_gpu("T", NUMBERS, |init| OnGpu::make(init, CollectiveKind::AllReduce(reduction(init.attrs())?)))],
)));

pub(crate) static KOLO_REDUCE_SCATTER: Op = collective(
    "KoloReduceScatter",
    "(value:T) -> (share:T) ; \
     T:type{half,bfloat16,float,double,int8,int16,int32,int64,uint8,uint16,uint32,uint64}, group:string=\"\", \
     reduction:string{\"sum\",\"mean\",\"min\",\"max\",\"prod\"}=\"sum\"",
    other_rows,
    &[made(|init| Collective::make(init, CollectiveKind::ReduceScatter(reduction(init.attrs())?)))],
    &[on_gpu("T", NUMBERS, |init| OnGpu::make(init, CollectiveKind::ReduceScatter(reduction(init.attrs())?)))],
);

pub(crate) static KOLO_ALL_GATHER: Op = alike(collective(
    "KoloAllGather",
    "(value:T) -> (all:T) ; T:type, group:string=\"\"",
    other_rows,
    &[made(|init| Collective::make(init, CollectiveKind::AllGather))],
    &[on_gpu("T", PLAIN, |init| OnGpu::make(init, CollectiveKind::AllGather))],
));

pub(crate) static KOLO_ALL_TO_ALL: Op = collective(
    "KoloAllToAll",
    "(value:T) -> (shares:T) ; T:type, group:string=\"\"",
    shape_fns::each_as_its_input,
    &[made(|init| Collective::make(init, CollectiveKind::AllToAll))],
    &[on_gpu("T", PLAIN, |init| OnGpu::make(init, CollectiveKind::AllToAll))],
);

pub(crate) static KOLO_BROADCAST: Op = alike(joined(collective(
    "KoloBroadcast",
    "(values:N*T) -> (copies:N*T) ; N:int>=1, T:type, group:string=\"\", root:int>=0=0",
    shape_fns::each_as_its_input,
    &[made(|init| Collective::make(init, CollectiveKind::Broadcast(root(init.attrs())?)))],
    &[on_gpu("T", PLAIN, |init| OnGpu::make(init, CollectiveKind::Broadcast(root(init.attrs())?)))],
)));

pub(crate) static KOLO_REDUCE: Op = joined(on_host(
    "KoloReduce",
    "(values:N*T) -> (reduced:N*T) ; N:int>=1, \
     T:type{half,bfloat16,float,double,int8,int16,int32,int64,uint8,uint16,uint32,uint64}, group:string=\"\", \
     reduction:string{\"sum\",\"mean\",\"min\",\"max\",\"prod\"}=\"sum\", root:int>=0=0",
    shape_fns::each_as_its_input,
    &[made(|init| Collective::make(init, CollectiveKind::Reduce(reduction(init.attrs())?, root(init.attrs())?)))],
));

pub(crate) static KOLO_GATHER: Op = on_host(
    "KoloGather",
    "(value:T) -> (all:T) ; T:type, group:string=\"\", root:int>=0=0",
    other_rows,
    &[made(|init| Collective::make(init, CollectiveKind::Gather(root(init.attrs())?)))],
);

pub(crate) static KOLO_SCATTER: Op = on_host(
    "KoloScatter",
    "(value:T) -> (share:T) ; T:type, group:string=\"\", root:int>=0=0",
    other_rows,
    &[made(|init| Collective::make(init, CollectiveKind::Scatter(root(init.attrs())?)))],
);

pub(crate) static KOLO_ALL_GATHER_UNEVEN: Op = alike(on_host(
    "KoloAllGatherUneven",
    "(value:T) -> (all:T, rows:int64) ; T:type, group:string=\"\"",
    other_rows_and_numbers,
    &[made(|init| Collective::make(init, CollectiveKind::AllGatherUneven))],
));

pub(crate) static KOLO_GATHER_UNEVEN: Op = on_host(
    "KoloGatherUneven",
    "(value:T) -> (all:T, rows:int64) ; T:type, group:string=\"\", root:int>=0=0",
    other_rows_and_numbers,
    &[made(|init| Collective::make(init, CollectiveKind::GatherUneven(root(init.attrs())?)))],
);

pub(crate) static KOLO_SCATTER_UNEVEN: Op = on_host(
    "KoloScatterUneven",
    "(value:T, rows:int64) -> (share:T) ; T:type, group:string=\"\", root:int>=0=0",
    other_rows,
    &[made(|init| Collective::make(init, CollectiveKind::ScatterUneven(root(init.attrs())?)))],
);

pub(crate) static KOLO_ALL_TO_ALL_UNEVEN: Op = on_host(
    "KoloAllToAllUneven",
    "(value:T, rows:int64) -> (shares:T, received:int64) ; T:type, group:string=\"\"",
    other_rows_and_numbers,
    &[made(|init| Collective::make(init, CollectiveKind::AllToAllUneven))],
);

pub(crate) static KOLO_SEND_RECEIVE: Op = on_host(
    "KoloSendReceive",
    "(value:T, peers:int64) -> (received:T) ; T:type, group:string=\"\"",
    other_rows,
    &[made(|init| Collective::make(init, CollectiveKind::SendReceive))],
);

pub(crate) static KOLO_GROUP_BARRIER: Op = on_host(
    "KoloGroupBarrier",
    "() -> () ; group:string=\"\"",
    shape_fns::unknown,
    &[made(|init| Collective::make(init, CollectiveKind::Barrier))],
);

/// One that always goes through host memory.
const fn on_host(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    let op = collective(name, signature, shape, kernels, &[]);
    Op { def: OpDef { host: HostRule::Always, ..op.def }, gpu: Gpu::Host, ..op }
}

const fn collective(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    kernels: &'static [KernelDef],
    gpu: &'static [KernelDef],
) -> Op {
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
    Op { def, kernels, gpu: Gpu::Kernels(gpu), cost: Cost::Inline }
}

/// One that exchanges `N` tensors together.
const fn joined(op: Op) -> Op {
    Op { def: OpDef { joined_by: Some("N"), ..op.def }, ..op }
}

/// One that gives all ranks the same.
const fn alike(op: Op) -> Op {
    Op { def: OpDef { alike_on_all_ranks: true, ..op.def }, ..op }
}

const fn made(make: fn(&KernelInit<'_>) -> Result<Box<dyn AsyncKernel>>) -> KernelDef {
    cpu_made(KernelMaker::Async(make))
}

const fn on_gpu(
    attr: &'static str,
    dtypes: &[DType],
    make: fn(&KernelInit<'_>) -> Result<Box<dyn Kernel>>,
) -> KernelDef {
    gpu_made(attr, dtypes, KernelMaker::Object(make))
}

fn root(attrs: &Attrs) -> Result<Root> {
    Ok(Root(usize::try_from(attrs.int("root")?).unwrap_or(usize::MAX)))
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

/// The same, and a number for each rank.
fn other_rows_and_numbers(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let mut shapes = other_rows(ctx)?;
    shapes.push(PartialShape::new(&[None]));
    Ok(shapes)
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
                let call = CollectiveCall { kind: self.kind, name, tensors, cancel, deadline: None };
                group.start(call, Box::new(move |result| done.finish(result.map(Outcome::from))));
            }
            Err(error) => done.finish(Err(error)),
        }
    }
}

/// On a GPU.
struct OnGpu {
    kind: CollectiveKind,
    group: String,
    /// Another node waits for it (`KoloAwaitExchange`), so that kernels in between run beside it.
    awaited_later: bool,
}

impl OnGpu {
    fn make(init: &KernelInit<'_>, kind: CollectiveKind) -> Result<Box<dyn Kernel>> {
        let awaited_later = init.attrs().find("awaited_later").is_some() && init.attrs().bool("awaited_later")?;
        Ok(Box::new(OnGpu { kind, group: init.attrs().str("group")?.to_owned(), awaited_later }))
    }

    /// The tensors of this device of all ranks.
    fn exchange(&self, ctx: &KernelCtx<'_>, ranks: &dyn DeviceRanks, mut tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let device = ctx.device;
        let mut only = || tensors.pop().ok_or_else(|| Error::internal("a collective without a tensor"));
        Ok(match self.kind {
            CollectiveKind::AllReduce(op) => {
                let reduced = ranks.all_reduce(device, tensors, op)?;
                if !self.awaited_later {
                    reduced.iter().try_for_each(|tensor| ranks.await_exchange(device, tensor))?;
                }
                reduced
            }
            CollectiveKind::Broadcast(Root(root)) => ranks.broadcast(device, tensors, root)?,
            CollectiveKind::ReduceScatter(op) => vec![ranks.reduce_scatter(device, only()?, op)?],
            CollectiveKind::AllGather => vec![ranks.all_gather(device, only()?)?],
            CollectiveKind::AllToAll => vec![ranks.all_to_all(device, only()?)?],
            other => return Err(Error::unimplemented(format!("{other} does not run on devices"))),
        })
    }

    /// By way of the host, which waits for it.
    fn through_host(
        &self,
        ctx: &KernelCtx<'_>,
        group: &dyn CollectiveGroup,
        tensors: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        let device = ctx.device;
        let tensors = tensors.iter().map(|tensor| device.to_host(tensor)).collect::<Result<Vec<Tensor>>>()?;
        let (name, cancel) = (ctx.node.name.clone(), Some(ctx.step.cancel().clone()));
        let given = call(group, CollectiveCall { kind: self.kind, name, tensors, cancel, deadline: None })?;
        let back = |tensor: Tensor| {
            let (copy, event) = device.copy(&tensor, device.memory())?;
            event.map_or(Ok(()), |event| event.wait())?;
            Ok(copy)
        };
        given.into_iter().map(back).collect()
    }
}

impl Kernel for OnGpu {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let group = ctx.step.resources().groups().find(&self.group)?;
        if let Some(root) = self.kind.root().filter(|root| *root >= group.n_ranks()) {
            let n = group.n_ranks();
            return Err(Error::invalid_argument(format!("there is no rank {root}: there are {n}, from 0 on")));
        }
        let tensors = (0..ctx.n_inputs()).map(|i| ctx.take_input(i)).collect::<Result<Vec<Tensor>>>()?;
        let given = match group.on_device(ctx.device)? {
            Some(ranks) => self.exchange(ctx, &*ranks, tensors)?,
            None => self.through_host(ctx, &*group, &tensors)?,
        };
        given.into_iter().enumerate().for_each(|(i, tensor)| ctx.set_output(i, tensor));
        Ok(())
    }
}
