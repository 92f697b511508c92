//! `kolo ops`: the op table, for people, and what of it is covered by conformance cases.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use crate::{DType, Error, Result};
use kolo_graph::Gradient;
use kolo_ops::{Gpu, KernelDef, Op, TABLE, kernels_of};

use super::print;

/// Flags of `kolo ops`.
#[derive(clap::Args)]
pub struct Args {
    /// List only ops whose name contains this, ignoring case [default: all ops]
    filter: Option<String>,
    /// Print the coverage table of all ops in Markdown, as in docs/ops.md
    #[arg(long)]
    coverage: bool,
}

/// How many cases each op has, as `conformance/ops/generate.py` counted them.
const COUNTS: &str = include_str!("../../tests/golden/counts.txt");

pub fn run(args: &Args) -> Result<()> {
    let filter = args.filter.as_deref().unwrap_or_default().to_lowercase();
    let ops = ops_named(&filter);
    if ops.is_empty() {
        return Err(Error::not_found(format!("no op's name contains '{filter}'")));
    }
    if args.coverage {
        return print(coverage(&filter).trim_end());
    }
    for op in &ops {
        print(format_args!("{} {}", op.def.name, op.def.signature))?;
        let mut kernels: Vec<String> = kernels_of(op).map(|kernel| kernel.describe(op)).collect();
        kernels.dedup();
        print(format_args!(
            "    kernels: {}",
            if kernels.is_empty() { "none".to_owned() } else { kernels.join("; ") }
        ))?;
        match op.gpu {
            Gpu::Kernels(_) | Gpu::Unstated => {}
            Gpu::Host => print("    on a GPU: runs on the host")?,
            Gpu::Never(why) => print(format_args!("    on a GPU: none ({why})"))?,
            Gpu::Missing => print("    on a GPU: no kernel yet")?,
        }
        print(match op.def.gradient {
            Gradient::Rule(_) | Gradient::Same | Gradient::Flow => "    gradient: yes".to_owned(),
            Gradient::None(why) => format!("    gradient: none ({why})"),
            Gradient::Refused(why) => format!("    gradient: refused ({why})"),
            Gradient::Unstated => "    gradient: not stated".to_owned(),
        })?;
    }
    print(format_args!("{} ops", ops.len()))
}

/// The ops whose name contains `filter`, in small letters, by name.
fn ops_named(filter: &str) -> Vec<&'static Op> {
    let mut ops: Vec<&Op> = TABLE.iter().copied().flatten().copied().collect();
    ops.retain(|op| op.def.name.to_lowercase().contains(filter));
    ops.sort_by_key(|op| op.def.name);
    ops
}

/// Why an op has no GPU kernel that could have one.
const MISSING: &str = "nobody has written a kernel yet";

/// The coverage table.
fn coverage(filter: &str) -> String {
    let counts: HashMap<&str, (usize, usize)> = COUNTS
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let mut parts = line.split(' ');
            Some((parts.next()?, (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?)))
        })
        .collect();
    let (ops, mut rows) = (ops_named(filter), String::new());
    let (mut reasons, mut gpu_reasons) = (BTreeMap::<&str, Vec<&str>>::new(), BTreeMap::<&str, Vec<&str>>::new());
    let (mut n_kernels, mut n_on_gpu, mut n_gradients, mut n_covered, mut n_cases) = (0, 0, 0, 0, 0);
    for op in &ops {
        let (cases, grads) = counts.get(op.def.name).copied().unwrap_or_default();
        let kernels = dtypes_on(op, "CPU");
        let on_gpu = match op.gpu {
            Gpu::Kernels(_) => dtypes_on(op, "GPU"),
            Gpu::Host => "host".to_owned(),
            Gpu::Never(why) => {
                gpu_reasons.entry(why).or_default().push(op.def.name);
                "none".to_owned()
            }
            Gpu::Missing => {
                gpu_reasons.entry(MISSING).or_default().push(op.def.name);
                "missing".to_owned()
            }
            Gpu::Unstated => "not stated".to_owned(),
        };
        n_on_gpu += usize::from(matches!(op.gpu, Gpu::Kernels(_) | Gpu::Host));
        n_kernels += usize::from(!op.kernels.is_empty());
        n_gradients += usize::from(matches!(op.def.gradient, Gradient::Rule(_) | Gradient::Same | Gradient::Flow));
        if let (true, Gradient::Refused(why)) = (op.kernels.is_empty(), op.def.gradient) {
            reasons.entry(why).or_default().push(op.def.name);
        }
        n_covered += usize::from(cases > 0);
        n_cases += cases;
        let gradient = match op.def.gradient {
            Gradient::Rule(_) | Gradient::Same | Gradient::Flow => "yes",
            Gradient::None(_) => "none",
            Gradient::Refused(_) => "refused",
            Gradient::Unstated => "not stated",
        };
        let _ = writeln!(rows, "| {} | {kernels} | {on_gpu} | {gradient} | {cases} | {grads} |", op.def.name);
    }
    let mut without = String::new();
    for (why, names) in &reasons {
        let _ = writeln!(without, "- {}: {why}.", names.join(", "));
    }
    let without = if without.is_empty() { without } else { format!("\n## Without a kernel, and why\n\n{without}") };
    let mut without_gpu = String::new();
    for (why, names) in &gpu_reasons {
        let _ = writeln!(without_gpu, "- {why} ({}): {}.", names.len(), names.join(", "));
    }
    let without_gpu = match without_gpu.is_empty() {
        true => without_gpu,
        false => format!("\n## Without a GPU kernel, and why\n\n{without_gpu}"),
    };
    format!(
        "# Ops\n\n\
         Made by `kolo ops --coverage`; `cargo test` fails when it is out of date. Every op has TensorFlow's signature and\n\
         infers its outputs' shapes. *Gradient* is whether there is one (`none`: nothing to differentiate), *cases* how\n\
         many conformance cases there are (`conformance/ops`) and how many of them compare gradients with TensorFlow's.\n\
         On a GPU, *host* means that the op runs on the host's memory wherever it is placed. *None* and *missing* have to be\n\
         placed on a CPU, which soft placement does: one has no use for a GPU, the other could have a kernel. `int32` forms\n\
         of array and arithmetic ops run on the host.\n\n\
         {} ops, {n_kernels} with a CPU kernel, {n_on_gpu} on GPUs, {n_gradients} with a gradient, {n_covered} with cases; {n_cases} times an op\n\
         is in a case.\n\n\
         | op | CPU kernels | GPU kernels | gradient | cases | with gradients |\n| --- | --- | --- | --- | --- | --- |\n{rows}{without}{without_gpu}",
        ops.len()
    )
}

/// The dtypes of the attribute that chooses the kernel on this kind of device; `all` if none does.
fn dtypes_on(op: &'static Op, device: &str) -> String {
    let kernels: Vec<&KernelDef> = kernels_of(op).filter(|kernel| kernel.device == device).collect();
    if kernels.is_empty() {
        return "none".to_owned();
    }
    if kernels.iter().any(|kernel| kernel.attr.is_empty()) {
        return "all".to_owned();
    }
    let dtypes: Vec<DType> = kernels.iter().flat_map(|kernel| kernel.dtypes(op)).collect();
    let is_there = |dtype: &DType| dtypes.contains(dtype);
    let names: Vec<&str> = DType::ALL.iter().filter(|dtype| is_there(dtype)).map(|dtype| dtype.name()).collect();
    names.join(" ")
}
