//! Kernels for NVIDIA GPUs, by area. Sources in CUDA C++ lie beside the Rust that launches them and are compiled when
//! they are first needed; `kolo_device::cuda` does that, and holds everything unsafe.
//!
//! A kernel enqueues work and returns. Its tensors are on the card, except the arguments its op names in
//! `host_args` (shapes, axes, handles), which it reads at once. Ops over `int32` are mostly about shapes: as in TensorFlow,
//! those whose definition says so ([`HostRule`]) run on the host, on host memory, though they are placed on the GPU. An index
//! that is out of range cannot be an error here without waiting for the card; it reads zeros and writes nothing, as
//! TensorFlow's kernels do.

use std::collections::HashMap;
use std::sync::OnceLock;

use kolo_core::{DType, Result, Tensor};
use kolo_device::cuda::CudaDevice;
use kolo_graph::{ArgType, Attrs, HostRule, Node, Signature};

use crate::kernel::KernelInit;
use crate::op::{DTypeSet, KernelDef, KernelMaker, Op};
use crate::{Kernel, KernelCtx};

mod apply_all;
pub(crate) mod array;
mod attention;
mod batch_norm;
mod batch_norm_first;
mod batch_norm_held;
mod class_loss;
mod columns;
mod conv;
mod elementwise;
mod flow;
mod fused;
mod gather;
mod layer_norm;
mod map;
mod matmul;
mod narrow;
mod optim;
mod pool;
mod random;
mod reduce;
mod rows;
mod state;
mod transfer;

/// The kernels of each op.
type Table = HashMap<&'static str, Vec<KernelDef>>;

/// Each area's list.
const ADDERS: &[fn(&mut Table)] = &[
    apply_all::add,
    array::add,
    attention::add,
    batch_norm::add,
    class_loss::add,
    conv::add,
    elementwise::add,
    flow::add,
    fused::add,
    gather::add,
    layer_norm::add,
    matmul::add,
    optim::add,
    pool::add,
    random::add,
    reduce::add,
    rows::add,
    state::add,
    transfer::add,
];

fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = Table::new();
        for add in ADDERS {
            add(&mut table);
        }
        table
    })
}

pub use apply_all::{UpdateLayout, update_layout};

/// The GPU kernels of this op.
pub(crate) fn kernels(op: &str) -> &'static [KernelDef] {
    table().get(op).map_or(&[], Vec::as_slice)
}

/// The CPU kernel that a node placed on a GPU runs on the host, if its op says that it does; see [`HostRule`].
pub(crate) fn host_kernel(op: &'static Op, node: &Node) -> Option<&'static KernelDef> {
    let is_of_host = match op.def.host {
        HostRule::OnDevice => false,
        HostRule::Always => true,
        HostRule::SmallIntegers => {
            let (inputs, outputs) = argument_types(node)?;
            let is_truth = |dtype: &DType| *dtype == DType::Bool;
            // The predicate of a `Switch` is read on the host, so a loop's int32 counter may be pinned to a GPU.
            let is_read_there = |name: &String| op.def.host_args.contains(&name.as_str());
            inputs.iter().all(|(name, dtype)| on_host(*dtype) || is_read_there(name))
                && outputs.iter().all(|(_, dtype)| on_host(*dtype) || is_truth(dtype))
                && !(inputs.is_empty() && outputs.iter().any(|(_, dtype)| is_truth(dtype)))
        }
    };
    is_of_host.then(|| op.kernels.iter().find(|kernel| kernel.fits("CPU", &node.attrs))).flatten()
}

/// Whether tensors of this dtype are in host memory even on a GPU.
fn on_host(dtype: DType) -> bool {
    matches!(dtype, DType::I32 | DType::Str | DType::Resource | DType::Variant)
}

/// Arguments as `(name, dtype)`, one for each tensor.
type Arguments = Vec<(String, DType)>;

/// The arguments of a node, as its op's signature and its attributes say; `None` if they do not fit.
fn argument_types(node: &Node) -> Option<(Arguments, Arguments)> {
    static SIGNATURES: OnceLock<parking_lot::RwLock<HashMap<&'static str, &'static Signature>>> = OnceLock::new();
    let signatures = SIGNATURES.get_or_init(Default::default);
    let known = signatures.read().get(node.op()).copied();
    let signature: &'static Signature = match known {
        Some(signature) => signature,
        None => {
            // One for each op of the table, kept for good.
            let parsed: &'static Signature = Box::leak(Box::new(Signature::parse(node.def.signature).ok()?));
            signatures.write().insert(node.op(), parsed);
            parsed
        }
    };
    Some((expand(&signature.inputs, &node.attrs)?, expand(&signature.outputs, &node.attrs)?))
}

fn expand(args: &[kolo_graph::ArgDef], attrs: &Attrs) -> Option<Arguments> {
    let mut all = Vec::new();
    for arg in args {
        let one = |ty: &ArgType| match ty {
            ArgType::Fixed(dtype) => Some(*dtype),
            ArgType::Attr(attr) => attrs.dtype(attr).ok(),
            ArgType::Repeated { .. } | ArgType::List(_) => None,
        };
        match &arg.ty {
            ArgType::Repeated { count, element } => {
                let dtype = one(element)?;
                (0..attrs.int(count).ok()?).for_each(|_| all.push((arg.name.clone(), dtype)));
            }
            ArgType::List(attr) => {
                all.extend(attrs.dtypes(attr).ok()?.into_iter().map(|dtype| (arg.name.clone(), dtype)));
            }
            single => all.push((arg.name.clone(), one(single)?)),
        }
    }
    Some(all)
}

/// Which inputs and outputs of a node on a GPU are in host memory.
pub fn host_arguments(node: &Node, kernel: &KernelDef) -> (Vec<bool>, Vec<bool>) {
    let Some((inputs, outputs)) = argument_types(node) else { return (Vec::new(), Vec::new()) };
    let all = kernel.device == "CPU";
    let is_host = |(name, dtype): &(String, DType)| {
        all || dtype.size().is_none() || node.def.host_args.iter().any(|arg| arg == name)
    };
    (inputs.iter().map(is_host).collect(), outputs.iter().map(is_host).collect())
}

/// The GPU that a kernel runs on.
pub(crate) fn gpu<'a>(ctx: &KernelCtx<'a>) -> Result<&'a CudaDevice> {
    CudaDevice::of(ctx.device)
}

pub(crate) const FLOATS: &[DType] = &[DType::F32, DType::F64, DType::F16, DType::BF16];
/// Numbers that have kernels on the card; `int32` too, for the few ops that take indices or casts there.
pub(crate) const NUMBERS: &[DType] = &[
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I8,
    DType::I16,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
];
/// Everything that lies side by side and is on the card.
pub(crate) const PLAIN: &[DType] = &[
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I8,
    DType::I16,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::Bool,
];

/// The name that a dtype has in CUDA sources.
pub(crate) fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I8 => "i8",
        DType::I16 => "i16",
        DType::I32 => "i32",
        DType::I64 => "i64",
        DType::U8 => "u8",
        DType::U16 => "u16",
        DType::U32 => "u32",
        DType::U64 => "u64",
        DType::Bool => "bool",
        _ => "void",
    }
}

/// Adds a kernel of `op`, for these dtypes of `attr`.
fn register(table: &mut Table, op: &'static str, attr: &'static str, dtypes: &[DType], make: KernelMaker) {
    let dtypes = if attr.is_empty() { DTypeSet::ALL } else { DTypeSet::of(dtypes) };
    table.entry(op).or_default().push(KernelDef { device: "GPU", attr, dtypes, make });
}

/// Adds a kernel that is a plain function.
fn function(
    table: &mut Table,
    op: &'static str,
    attr: &'static str,
    dtypes: &[DType],
    compute: fn(&mut KernelCtx<'_>) -> Result<()>,
) {
    register(table, op, attr, dtypes, KernelMaker::Function(compute));
}

/// A tensor on the card in which every byte is zero.
pub(crate) fn zeros(ctx: &KernelCtx<'_>, dtype: DType, shape: kolo_core::Shape) -> Result<Tensor> {
    ctx.allocate_zeroed(dtype, shape)
}

/// A kernel as an object, from its node.
type Make = fn(&KernelInit<'_>) -> Result<Box<dyn Kernel>>;

/// Adds a kernel that is made once per node.
fn object(table: &mut Table, op: &'static str, attr: &'static str, dtypes: &[DType], make: Make) {
    register(table, op, attr, dtypes, KernelMaker::Object(make));
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Compiles sources for a Hopper chip, which needs no card; says so if the compiler is not here.
    #[track_caller]
    pub(crate) fn compiles(sources: impl IntoIterator<Item = (kolo_device::cuda::ProgramKey, String)>) {
        let mut n = 0;
        for (key, source) in sources {
            match kolo_device::cuda::compile_only(&key, &source, "sm_90") {
                None => return println!("skipped: no NVRTC here"),
                Some(Ok(_)) => n += 1,
                Some(Err(error)) => panic!("{key:?}: {error}\n{source}"),
            }
        }
        println!("{n} sources compile");
    }

    #[test]
    fn every_gpu_kernel_is_of_an_op_and_chosen_by_its_attribute() {
        for (name, kernels) in table() {
            let op = crate::find_op(name).unwrap_or_else(|error| panic!("{name}: {error}"));
            let signature = Signature::parse(op.def.signature).expect("the table's own test reads it");
            for kernel in kernels {
                assert!(kernel.attr.is_empty() || signature.attr(kernel.attr).is_some(), "{name}: {}", kernel.attr);
            }
        }
    }

    #[test]
    fn a_loop_that_counts_in_int32_may_be_pinned_to_a_gpu() {
        let g = crate::graph();
        let (count, limit) = (g.constant(0i32), g.constant(3i32));
        let goes_on = g.op("Less").input(count).input(limit).out();
        let switch = g.op("Switch").input(count).input(goes_on).build().id();
        let x = g.op("Switch").input(g.constant(1.0f32)).input(goes_on).build().id();
        let nodes = g.snapshot();
        let on_gpu = |id| {
            crate::find_kernel(nodes.node(id), &kolo_core::DeviceName::local("GPU", 0)).map(|kernel| kernel.device)
        };
        assert_eq!(on_gpu(switch), Ok("CPU"));
        assert_eq!(on_gpu(x), Ok("GPU"));
    }
}
