//! What of a node on a GPU stays on the host: whole ops, by their [`HostRule`], and the arguments that an op reads there.

use std::collections::HashMap;
use std::sync::OnceLock;

use kolo_core::DType;
use kolo_graph::{ArgType, Attrs, HostRule, Node, Signature};

use crate::op::{KernelDef, Op};

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
    let known = signatures.read().get(node.def.name).copied();
    let signature: &'static Signature = match known {
        Some(signature) => signature,
        None => {
            // One for each op of the table, kept for good.
            let parsed: &'static Signature = Box::leak(Box::new(Signature::parse(node.def.signature).ok()?));
            signatures.write().insert(node.def.name, parsed);
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

#[cfg(test)]
mod tests {
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
