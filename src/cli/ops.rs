//! `kolo ops`: the op table, for people.

use kolo::{Error, Result};
use kolo_graph::Gradient;
use kolo_ops::{KernelDef, Op, TABLE};

use super::print;

/// Flags of `kolo ops`.
#[derive(clap::Args)]
pub struct Args {
    /// Only ops whose name contains this, in any case
    filter: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    let filter = args.filter.as_deref().unwrap_or_default().to_lowercase();
    let mut ops: Vec<&Op> = TABLE.iter().copied().flatten().copied().collect();
    ops.retain(|op| op.def.name.to_lowercase().contains(&filter));
    ops.sort_by_key(|op| op.def.name);
    if ops.is_empty() {
        return Err(Error::not_found(format!("no op's name contains '{filter}'")));
    }
    for op in &ops {
        print(format_args!("{} {}", op.def.name, op.def.signature))?;
        let mut kernels: Vec<String> = op.kernels.iter().map(KernelDef::describe).collect();
        kernels.dedup();
        print(format_args!(
            "    kernels: {}",
            if kernels.is_empty() { "none".to_owned() } else { kernels.join("; ") }
        ))?;
        print(match op.def.gradient {
            Gradient::Rule(_) | Gradient::Same | Gradient::Flow => "    gradient: yes".to_owned(),
            Gradient::None(why) => format!("    gradient: none ({why})"),
            Gradient::Refused(why) => format!("    gradient: refused ({why})"),
            Gradient::Unstated => "    gradient: not stated".to_owned(),
        })?;
    }
    print(format_args!("{} ops", ops.len()))
}
