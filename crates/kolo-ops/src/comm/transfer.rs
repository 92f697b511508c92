//! `_Send`, `_Recv`, `_HostSend`, `_HostRecv`: the two ends of an edge that crosses devices. Partitioning adds them.
//!
//! A send leaves its tensor in the step's rendezvous and is done; a receive leaves a callback there and gives up its
//! thread. Both run even if what they pass on is dead, so that the other side learns of it. They need not watch for
//! cancellation: the runtime aborts the rendezvous, which answers every receive.

mod gpu;

use std::sync::Arc;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Attrs, Effects, Flow, Gradient, HostRule, OpDef, TransferEnd};

use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, Op, cpu_made, gpu_made};
use crate::{AsyncKernel, Cost, Done, Kernel, KernelCtx, KernelMaker, Outcome, Received, RendezvousKey, Value};

pub(crate) static SEND: Op = send("_Send", TransferEnd::Send);
pub(crate) static HOST_SEND: Op = send("_HostSend", TransferEnd::HostSend).host(HostRule::Always);
pub(crate) static RECV: Op = recv("_Recv", TransferEnd::Recv);
pub(crate) static HOST_RECV: Op = recv("_HostRecv", TransferEnd::HostRecv).host(HostRule::Always);

const GRADIENT: Gradient = Gradient::Refused("gradients are taken before a graph is cut into parts");

const SEND_ON_GPU: &[KernelDef] = &[gpu_made("", &[], KernelMaker::Async(gpu::Send::make))];

const fn send(name: &'static str, end: TransferEnd) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(tensor:T) -> () ; T:type, tensor_name:string, send_device:string, send_device_incarnation:int, \
                        recv_device:string, client_terminated:bool=false",
            gradient: GRADIENT,
            stateful: true,
            effects: Effects::Outside,
            transfer: Some(end),
            flow: Flow::Transfer,
            ..OpDef::BASE
        },
        kernels: SEND_KERNELS,
        gpu: Gpu::Kernels(SEND_ON_GPU),
        cost: Cost::Inline,
    }
}

const RECV_ON_GPU: &[KernelDef] = &[gpu_made("", &[], KernelMaker::Async(gpu::Recv::make))];

const fn recv(name: &'static str, end: TransferEnd) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "() -> (tensor:tensor_type) ; tensor_type:type, tensor_name:string, send_device:string, \
                        send_device_incarnation:int, recv_device:string, client_terminated:bool=false",
            gradient: GRADIENT,
            stateful: true,
            effects: Effects::Outside,
            transfer: Some(end),
            flow: Flow::Transfer,
            ..OpDef::BASE
        },
        kernels: RECV_KERNELS,
        gpu: Gpu::Kernels(RECV_ON_GPU),
        cost: Cost::Inline,
    }
}

const SEND_KERNELS: &[KernelDef] = &[cpu_made(KernelMaker::Object(Send::make))];
const RECV_KERNELS: &[KernelDef] = &[cpu_made(KernelMaker::Async(Recv::make))];

/// `SEND_DEVICE;INCARNATION;RECV_DEVICE;TENSOR_NAME`, as TensorFlow's workers spell it. The incarnation is an unsigned
/// number that the attribute holds as if it were signed.
pub fn edge_key(attrs: &Attrs) -> Result<Arc<str>> {
    let part = |name: &str| match attrs.str(name)? {
        "" => Err(Error::invalid_argument(format!("attribute '{name}' is empty"))),
        text if text.contains(';') => Err(Error::invalid_argument(format!("attribute '{name}' contains ';': {text}"))),
        text => Ok(text),
    };
    let incarnation = attrs.int("send_device_incarnation")? as u64;
    let (from, to, name) = (part("send_device")?, part("recv_device")?, part("tensor_name")?);
    Ok(format!("{from};{incarnation:016x};{to};{name}").into())
}

struct Send {
    edge: Arc<str>,
}

impl Send {
    fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(Send { edge: edge_key(init.attrs())? }))
    }
}

impl Kernel for Send {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let value = match ctx.is_dead {
            // TensorFlow stands an empty float vector in for a dead tensor of any dtype.
            true => Received { is_dead: true, ..Received::value(Tensor::zeros(DType::F32, [0])?) },
            false => match &ctx.inputs[0] {
                Value::Reference(cell) => Received { live: Some(cell.clone()), ..Received::value(cell.value()?) },
                _ => Received::value(ctx.take_input(0)?),
            },
        };
        let key = RendezvousKey { edge: self.edge.clone(), frame_iteration: ctx.frame_iteration };
        ctx.step.rendezvous().send(key, value)
    }
}

struct Recv {
    edge: Arc<str>,
    dtype: DType,
}

impl Recv {
    fn make(init: &KernelInit<'_>) -> Result<Box<dyn AsyncKernel>> {
        let attrs = init.attrs();
        Ok(Box::new(Recv { edge: edge_key(attrs)?, dtype: attrs.dtype("tensor_type")? }))
    }
}

impl AsyncKernel for Recv {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let key = RendezvousKey { edge: self.edge.clone(), frame_iteration: ctx.frame_iteration };
        let dtype = self.dtype;
        ctx.step.rendezvous().recv(
            key,
            Box::new(move |received| {
                done.finish(received.and_then(|Received { tensor, is_dead, .. }| {
                    // A dead tensor's dtype means nothing.
                    if !is_dead && tensor.dtype() != dtype {
                        let found = tensor.dtype();
                        return Err(Error::internal(format!("received {found} where {dtype} was expected")));
                    }
                    Ok(Outcome { outputs: vec![tensor], dead: is_dead })
                }));
            }),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use kolo_core::DeviceName;
    use kolo_device::{CpuConfig, CpuDevice};
    use kolo_graph::{Graph, Operation};
    use parking_lot::Mutex;

    use super::*;
    use crate::testing::TestStep;
    use crate::{CancelToken, FrameIteration, Rendezvous, ResourceStore, StepServices};

    type Waiting = Box<dyn FnOnce(Result<Received>) + std::marker::Send>;

    /// Holds one side until the other comes.
    #[derive(Default)]
    struct Table(Mutex<(HashMap<RendezvousKey, Received>, HashMap<RendezvousKey, Waiting>)>);

    impl Rendezvous for Table {
        fn send(&self, key: RendezvousKey, value: Received) -> Result<()> {
            let waiting = self.0.lock().1.remove(&key);
            match waiting {
                Some(done) => done(Ok(value)),
                None => drop(self.0.lock().0.insert(key, value)),
            }
            Ok(())
        }
        fn recv(&self, key: RendezvousKey, done: Waiting) {
            let value = self.0.lock().0.remove(&key);
            match value {
                Some(value) => done(Ok(value)),
                None => drop(self.0.lock().1.insert(key, done)),
            }
        }
    }

    struct Step {
        base: TestStep,
        table: Arc<dyn Rendezvous>,
    }

    impl StepServices for Step {
        fn step_id(&self) -> u64 {
            1
        }
        fn resources(&self) -> &Arc<ResourceStore> {
            self.base.resources()
        }
        fn step_resources(&self) -> &Arc<ResourceStore> {
            self.base.step_resources()
        }
        fn rendezvous(&self) -> &Arc<dyn Rendezvous> {
            &self.table
        }
        fn cancel(&self) -> &Arc<CancelToken> {
            self.base.cancel()
        }
    }

    struct World {
        name: DeviceName,
        device: Arc<CpuDevice>,
        step: Step,
    }

    impl World {
        fn new() -> World {
            let name = DeviceName::local("CPU", 0);
            let device = CpuDevice::new(name.clone(), &CpuConfig { intra_op_threads: 1, ..CpuConfig::default() });
            let step = Step { base: TestStep::new(&name), table: Arc::new(Table::default()) };
            World { name, device, step }
        }

        fn run(&self, operation: Operation<'_>, input: Value, iteration: u64, is_dead: bool, done: Option<Done>) {
            let node = operation.node().unwrap();
            let init = KernelInit { node: &node, device: &self.name, resources: self.step.resources() };
            let mut ctx = KernelCtx {
                node: &node,
                device: &*self.device,
                step: &self.step,
                inputs: &mut [input],
                outputs: &mut [],
                frame_iteration: FrameIteration { frame: 0, iteration },
                is_dead,
            };
            match done {
                Some(done) => Recv::make(&init).unwrap().start(&mut ctx, done),
                None => Send::make(&init).unwrap().compute(&mut ctx).unwrap(),
            }
        }
    }

    fn pair(g: &Graph) -> (Operation<'_>, Operation<'_>) {
        let with = |builder: kolo_graph::OpBuilder<'_>| {
            builder
                .attr("tensor_name", "edge_4_v/read")
                .attr("send_device", "/job:ps/replica:0/task:0/device:CPU:0")
                .attr("send_device_incarnation", -2i64)
                .attr("recv_device", "/job:worker/replica:0/task:0/device:CPU:0")
                .build()
                .id()
        };
        let send = with(g.op("_Send").input(g.constant([1.0f32, 2.0])));
        let recv = with(g.op("_HostRecv").attr("tensor_type", DType::F32));
        (Operation::new(g, send), Operation::new(g, recv))
    }

    fn slot() -> (Arc<Mutex<Option<Result<Outcome>>>>, Done) {
        let slot: Arc<Mutex<Option<Result<Outcome>>>> = Arc::default();
        let result = slot.clone();
        (slot, Done::new(move |outcome| *result.lock() = Some(outcome)))
    }

    #[test]
    fn the_key_is_tensorflows() {
        let g = crate::graph();
        let (send, recv) = pair(&g);
        let key = send.attrs(edge_key).unwrap();
        let expected = "/job:ps/replica:0/task:0/device:CPU:0;fffffffffffffffe;/job:worker/replica:0/task:0/device:CPU:0;\
                        edge_4_v/read";
        assert_eq!(&*key, expected);
        assert_eq!(recv.attrs(edge_key).unwrap(), key);
        let mut attrs = Attrs::default();
        attrs.set("send_device_incarnation", 1i64);
        attrs.set("send_device", "a;b");
        assert!(edge_key(&attrs).unwrap_err().message().contains("contains ';'"));
    }

    #[test]
    fn either_side_may_come_first() {
        let (g, world) = (crate::graph(), World::new());
        let (send, recv) = pair(&g);
        let value = Tensor::from([1.0f32, 2.0]);
        let (early, done) = slot();
        world.run(recv, Value::Empty, 1, false, Some(done));
        assert!(early.lock().is_none(), "nothing was sent yet");
        // Another iteration's tensor is not for it.
        world.run(send, Value::Tensor(Tensor::from([9.0f32, 9.0])), 2, false, None);
        assert!(early.lock().is_none());
        world.run(send, Value::Tensor(value.clone()), 1, false, None);
        let outcome = early.lock().take().unwrap().unwrap();
        assert!(outcome.outputs == [value] && !outcome.dead);
        let (late, done) = slot();
        world.run(recv, Value::Empty, 2, false, Some(done));
        assert_eq!(late.lock().take().unwrap().unwrap().outputs, [Tensor::from([9.0f32, 9.0])]);
    }

    #[test]
    fn deadness_crosses_and_a_wrong_dtype_does_not() {
        let (g, world) = (crate::graph(), World::new());
        let (send, recv) = pair(&g);
        world.run(send, Value::Empty, 0, true, None);
        let (got, done) = slot();
        world.run(recv, Value::Empty, 0, false, Some(done));
        assert!(got.lock().take().unwrap().unwrap().dead);
        world.run(send, Value::Tensor(Tensor::scalar(1i32)), 0, false, None);
        let (got, done) = slot();
        world.run(recv, Value::Empty, 0, false, Some(done));
        let error = got.lock().take().unwrap().unwrap_err();
        assert!(error.message().contains("received int32 where float was expected"), "{error}");
    }
}
