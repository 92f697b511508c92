//! `kolo devices`: what a session would see on this machine.

use kolo::{Result, Session};

use super::print;

/// Flags of `kolo devices`.
#[derive(clap::Args)]
pub struct Args {
    /// One JSON object per device
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let graph = kolo::graph();
    let session = Session::new(&graph)?;
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    for device in session.list_devices() {
        let limit = device.memory_limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
        match args.json {
            true => print(format_args!(
                "{{\"name\":\"{}\",\"cores\":{n_cores},\"memory_limit\":{},\"description\":\"{}\"}}",
                device.name,
                device.memory_limit.map_or_else(|| "null".to_owned(), |limit| limit.to_string()),
                device.description
            ))?,
            false => {
                print(format_args!("{}  {n_cores} cores  memory limit: {limit}  {}", device.name, device.description))?
            }
        }
    }
    if args.json { Ok(()) } else { print("No GPU devices: this build computes on CPUs only.") }
}
