//! What the tests of this area share: a kernel that is kept and called twice, as a session does.

use kolo_core::{DeviceName, Tensor};
use kolo_device::{CpuConfig, CpuDevice};
use kolo_graph::AttrValue;

use crate::testing::TestStep;
use crate::{KernelCtx, KernelInit, KernelMaker, StepServices, Value, find_kernel};

/// The first output of two calls of one kernel, on a device with several threads.
pub fn run_twice(op: &str, attrs: &[(&str, AttrValue)], inputs: &[Tensor]) -> [Tensor; 2] {
    let graph = crate::graph();
    let sources = inputs.iter().map(|input| graph.constant(input.clone()));
    let builder = graph.op(op).inputs(sources);
    let operation = attrs.iter().fold(builder, |builder, (name, value)| builder.attr(name, value.clone())).build();
    graph.check().unwrap();
    let node = operation.node().unwrap();
    let name = DeviceName::local("CPU", 0);
    let device = CpuDevice::new(name.clone(), &CpuConfig { intra_op_threads: 3, ..CpuConfig::default() });
    let step = TestStep::new(&name);
    let KernelMaker::Object(make) = find_kernel(&node, &name).unwrap().make else { panic!("{op} keeps no state") };
    let kernel = make(&KernelInit { node: &node, device: &name, resources: step.resources() }).unwrap();
    [(), ()].map(|()| {
        let mut inputs: Vec<Value> = inputs.iter().cloned().map(Value::Tensor).collect();
        let mut outputs = vec![Value::Empty; node.outputs.len()];
        kernel
            .compute(&mut KernelCtx {
                node: &node,
                device: &*device,
                step: &step,
                inputs: &mut inputs,
                outputs: &mut outputs,
                frame_iteration: Default::default(),
                is_dead: false,
            })
            .unwrap();
        match outputs.swap_remove(0) {
            Value::Tensor(tensor) => tensor,
            other => panic!("{op} gave {other:?}"),
        }
    })
}

/// FNV-1a over the bytes of the elements.
pub fn bits_hash(tensor: &Tensor) -> u64 {
    let bytes = tensor.host_bytes().unwrap();
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
