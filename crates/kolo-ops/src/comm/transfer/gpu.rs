//! `_Send` and `_Recv` on a GPU: a value is copied between the GPU's memory and the host's, or another GPU's.
//!
//! A send to the host begins the copy and leaves the tensor in the rendezvous when it has arrived, from the thread that
//! waits for the GPU; a receive from the host enqueues the copy and is done. `_HostSend` and `_HostRecv` are the CPU's.

use std::sync::Arc;

use kolo_core::{DType, DeviceName, Error, Memory, Result, Tensor};

use crate::comm::transfer::edge_key;
use crate::kernel::KernelInit;
use crate::{AsyncKernel, Done, KernelCtx, Outcome, Received, RendezvousKey, Value};

pub(crate) struct Send {
    edge: Arc<str>,
    /// The receiver is another GPU of this process and reads the tensor from this one's memory.
    stays_on_gpus: bool,
}

impl Send {
    pub(crate) fn make(init: &KernelInit<'_>) -> Result<Box<dyn AsyncKernel>> {
        let attrs = init.attrs();
        let to = DeviceName::parse(attrs.str("recv_device")?)?;
        let stays_on_gpus = &*to.kind == "GPU" && to.same_task(init.device) && to != *init.device;
        Ok(Box::new(Send { edge: edge_key(attrs)?, stays_on_gpus }))
    }
}

impl AsyncKernel for Send {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let key = RendezvousKey { edge: self.edge.clone(), frame_iteration: ctx.frame_iteration };
        let rendezvous = ctx.step.rendezvous().clone();
        let leave = move |tensor: Tensor, is_dead: bool| {
            let value = Received { is_dead, ..Received::value(tensor) };
            rendezvous.send(key, value).map(|()| Outcome { outputs: Vec::new(), dead: is_dead })
        };
        let (is_dead, device) = (ctx.is_dead, ctx.device);
        let begin = |ctx: &mut KernelCtx<'_>| -> Result<(Tensor, Option<Arc<dyn kolo_device::Event>>)> {
            if is_dead {
                return Ok((Tensor::zeros(DType::F32, [0])?, None));
            }
            // A copy is on its way from now on, so a reference is read now.
            let tensor = match &ctx.inputs[0] {
                Value::Reference(cell) => cell.value()?,
                _ => ctx.take_input(0)?,
            };
            match self.stays_on_gpus {
                true => Ok((tensor, None)),
                false => device.copy(&tensor, Memory::Host),
            }
        };
        match begin(ctx) {
            Err(error) => done.finish(Err(error)),
            Ok((tensor, None)) => done.finish(leave(tensor, is_dead)),
            Ok((tensor, Some(event))) => device
                .when_done(event, Box::new(move |result| done.finish(result.and_then(|()| leave(tensor, is_dead))))),
        }
    }
}

pub(crate) struct Recv {
    edge: Arc<str>,
    dtype: DType,
}

impl Recv {
    pub(crate) fn make(init: &KernelInit<'_>) -> Result<Box<dyn AsyncKernel>> {
        let attrs = init.attrs();
        Ok(Box::new(Recv { edge: edge_key(attrs)?, dtype: attrs.dtype("tensor_type")? }))
    }
}

impl AsyncKernel for Recv {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let key = RendezvousKey { edge: self.edge.clone(), frame_iteration: ctx.frame_iteration };
        let dtype = self.dtype;
        let Some(device) = ctx.device.handle() else {
            return done.finish(Err(Error::internal("the device is going away")));
        };
        ctx.step.rendezvous().recv(
            key,
            Box::new(move |received| {
                done.finish(received.and_then(|Received { tensor, is_dead, .. }| {
                    if is_dead {
                        return Ok(Outcome { outputs: vec![tensor], dead: true });
                    }
                    if tensor.dtype() != dtype {
                        let found = tensor.dtype();
                        return Err(Error::internal(format!("received {found} where {dtype} was expected")));
                    }
                    // Enqueued; what comes later on the compute stream sees it.
                    let (copy, _) = device.copy(&tensor, device.memory())?;
                    Ok(Outcome { outputs: vec![copy], dead: false })
                }));
            }),
        );
    }
}
