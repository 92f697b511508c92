//! `KoloAwaitExchange`: its inputs, once the exchange between devices that gave them is done. What a GPU enqueues after it waits, and the
//! host does not. A pass puts it between a collective that is `awaited_later` and the readers of its tensors, so that kernels in between
//! run beside the exchange.

use kolo_core::Result;
use kolo_graph::{Gradient, OpDef, shape_fns};

use crate::cuda::PLAIN;
use crate::kernel::KernelInit;
use crate::op::{Gpu, Op, cpu_any, gpu_made};
use crate::{Cost, Kernel, KernelCtx, KernelMaker};

pub(crate) static KOLO_AWAIT_EXCHANGE: Op = Op {
    def: OpDef {
        name: "KoloAwaitExchange",
        signature: "(values:N*T) -> (ready:N*T) ; N:int>=1, T:type, group:string=\"\"",
        shape: shape_fns::each_as_its_input,
        gradient: Gradient::Refused("ranks exchange gradients; nothing is differentiated through the exchange"),
        ..OpDef::BASE
    },
    // On a CPU, a collective gives nothing before it is done.
    kernels: &[cpu_any(pass_on)],
    gpu: Gpu::Kernels(&[gpu_made("T", PLAIN, KernelMaker::Object(Await::make))]),
    cost: Cost::Inline,
};

fn pass_on(ctx: &mut KernelCtx<'_>) -> Result<()> {
    (0..ctx.n_inputs()).try_for_each(|i| ctx.forward(i, i))
}

struct Await {
    group: String,
}

impl Await {
    fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(Await { group: init.attrs().str("group")?.to_owned() }))
    }
}

impl Kernel for Await {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let group = ctx.step.resources().groups().find(&self.group)?;
        if let Some(ranks) = group.on_device(ctx.device)? {
            (0..ctx.n_inputs()).try_for_each(|i| ranks.await_exchange(ctx.device, ctx.input(i)?))?;
        }
        pass_on(ctx)
    }
}
