//! A handful of ops for planning's own tests: this crate cannot see the table of all ops.

use std::sync::OnceLock;

use kolo_core::{DType, DeviceName, DeviceSpec};

use crate::{DeviceInfo, Flow, Graph, KernelSupport, Node, OpDef, OpRegistry, TransferEnd, Work, shape_fns};

/// An empty graph over the ops below.
pub(crate) fn graph() -> Graph {
    Graph::new(registry())
}

pub(crate) fn registry() -> &'static OpRegistry {
    static REGISTRY: OnceLock<OpRegistry> = OnceLock::new();
    REGISTRY.get_or_init(|| OpRegistry::new(DEFS.iter().copied()).unwrap())
}

/// `i = 0; while i < i { i = i + i }`, with the nodes of the loop's head asking for `head` and its body for `body`.
/// The condition is nonsense: planning does not compute.
pub(crate) fn while_loop(head: &str, body: &str) -> Graph {
    let g = graph();
    let zero = g.op("Source").name("zero").out();
    let (merge, switch) = g.device(head, || {
        let enter = g.op("Enter").name("enter").attr("frame_name", "f").attr("parallel_iterations", 7i64);
        let enter = enter.input(zero).out();
        let merge = g.op("Merge").name("merge").input(enter).input(enter).build();
        let less = g.op("Less").name("less").input(merge.output(0)).input(merge.output(0)).out();
        let cond = g.op("LoopCond").name("cond").input(less).out();
        (merge, g.op("Switch").name("switch").input(merge.output(0)).input(cond).build())
    });
    let add = g.op("Add").name("add").input(switch.output(1)).input(switch.output(1));
    let add = g.device(body, || add.out());
    let next = g.device(head, || g.op("NextIteration").name("next").input(add).out());
    g.close_loop(merge.id(), 1, next.endpoint()).unwrap();
    g.device(head, || g.op("Exit").name("exit").input(switch.output(0)).out());
    g.check().unwrap();
    g
}

const fn op(name: &'static str, signature: &'static str) -> OpDef {
    OpDef { name, signature, ..OpDef::BASE }
}

const fn flow(name: &'static str, signature: &'static str, flow: Flow) -> OpDef {
    OpDef { name, signature, flow, ..OpDef::BASE }
}

const fn stateful(name: &'static str, signature: &'static str) -> OpDef {
    OpDef { name, signature, stateful: true, ..OpDef::BASE }
}

const fn transfer(name: &'static str, signature: &'static str, end: TransferEnd) -> OpDef {
    OpDef { name, signature, stateful: true, transfer: Some(end), flow: Flow::Transfer, ..OpDef::BASE }
}

const DEFS: &[OpDef] = &[
    // A value out of nowhere: six floats.
    OpDef { shape: |_| Ok(vec![kolo_core::PartialShape::new(&[Some(2), Some(3)])]), ..op("Source", "() -> (y:float)") },
    op("Integer", "() -> (y:int32)"),
    // Many nodes as one.
    op("Region", "(inputs:list(Tin)) -> (outputs:list(Tout)) ; Tin:list(type)>=0, Tout:list(type)>=0"),
    op("Flag", "() -> (y:bool)"),
    OpDef {
        work: Work::Placeholder,
        ..op("Placeholder", "() -> (output:dtype) ; dtype:type=float, shape:shape=<unknown>")
    },
    op("NoOp", "() -> ()"),
    OpDef { work: Work::Constant, ..op("Const", "() -> (output:dtype) ; value:tensor, dtype:type") },
    OpDef {
        shape: shape_fns::same_as_input_0,
        work: Work::PassesOn,
        ..op("Identity", "(input:T) -> (output:T) ; T:type")
    },
    OpDef { shape: shape_fns::same_as_input_0, ..op("Neg", "(x:T) -> (y:T) ; T:type") },
    OpDef { shape: shape_fns::all_same, ..op("Add", "(x:T, y:T) -> (z:T) ; T:type") },
    op("AddN", "(inputs:N*T) -> (sum:T) ; N:int>=1, T:type"),
    op("Two", "(x:T) -> (first:T, second:T) ; T:type"),
    op("Less", "(x:T, y:T) -> (z:bool) ; T:type"),
    OpDef { work: Work::Measures, ..op("Shape", "(input:T) -> (output:int32) ; T:type") },
    stateful("Var", "() -> (ref:Ref(dtype)) ; dtype:type=float"),
    op("Assign", "(ref:Ref(T), value:T) -> (output_ref:Ref(T)) ; T:type"),
    stateful("Handle", "() -> (resource:resource)"),
    stateful("Read", "(resource:resource) -> (value:float)"),
    flow(
        "Enter",
        "(data:T) -> (output:T) ; T:type, frame_name:string, is_constant:bool=false, parallel_iterations:int=10",
        Flow::Enter,
    ),
    flow("Exit", "(data:T) -> (output:T) ; T:type", Flow::Exit),
    flow("NextIteration", "(data:T) -> (output:T) ; T:type", Flow::NextIteration),
    flow("LoopCond", "(input:bool) -> (output:bool)", Flow::LoopCond),
    flow("Switch", "(data:T, pred:bool) -> (output_false:T, output_true:T) ; T:type", Flow::Switch),
    flow("Merge", "(inputs:N*T) -> (output:T, value_index:int32) ; T:type, N:int>=1", Flow::Merge),
    transfer(
        "_Send",
        "(tensor:T) -> () ; T:type, tensor_name:string, send_device:string, send_device_incarnation:int, recv_device:string, client_terminated:bool=false",
        TransferEnd::Send,
    ),
    transfer(
        "_Recv",
        "() -> (tensor:tensor_type) ; tensor_type:type, tensor_name:string, send_device:string, send_device_incarnation:int, recv_device:string, client_terminated:bool=false",
        TransferEnd::Recv,
    ),
    transfer(
        "_HostSend",
        "(tensor:T) -> () ; T:type, tensor_name:string, send_device:string, send_device_incarnation:int, recv_device:string, client_terminated:bool=false",
        TransferEnd::HostSend,
    ),
    transfer(
        "_HostRecv",
        "() -> (tensor:tensor_type) ; tensor_type:type, tensor_name:string, send_device:string, send_device_incarnation:int, recv_device:string, client_terminated:bool=false",
        TransferEnd::HostRecv,
    ),
];

/// The devices with these names, numbered from incarnation 1.
pub(crate) fn devices(names: &str) -> Vec<DeviceInfo> {
    let device = |(i, text): (usize, &str)| {
        let spec = DeviceName::local("CPU", 0).spec().overridden_by(&DeviceSpec::parse(text).unwrap());
        DeviceInfo { name: spec.full().unwrap(), incarnation: i as u64 + 1 }
    };
    names.split_whitespace().enumerate().map(device).collect()
}

/// CPUs run everything but `Flag`; GPUs run all but `Neg` and `Flag`, and no integers.
pub(crate) struct Kernels;

impl KernelSupport for Kernels {
    fn has_kernel(&self, node: &Node, device: &DeviceName) -> bool {
        let is_integer = ["T", "dtype"].iter().any(|attr| node.attrs.dtype(attr) == Ok(DType::I32));
        match (&*device.kind, node.op()) {
            (_, "Flag") => false,
            ("CPU", _) => true,
            (_, "Neg") => false,
            _ => !is_integer,
        }
    }

    fn kernels(&self, node: &Node) -> Vec<String> {
        match node.op() {
            "Flag" => vec![],
            "Neg" => vec!["CPU".into()],
            _ => vec!["CPU".into(), "GPU with T in {float}".into()],
        }
    }
}
