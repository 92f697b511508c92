//! The GPU flags of `kolo train`.

use std::collections::BTreeMap;

use crate::cuda::discover;
use crate::parallel::World;
use crate::{Error, GpuOptions, Result};
use clap::Args;

/// GPU options of a run.
#[derive(Args, Clone, Debug, Default)]
pub struct GpuFlags {
    /// Reserve this fraction of each GPU's memory at start, from 0 to 1; fail if less is free [default: allocate on
    /// demand]
    #[arg(long, value_name = "SHARE")]
    pub gpu_memory_fraction: Option<f64>,
    /// Split the first GPU into logical GPUs, such as 4=8GiB: four of 8 GiB each, gpu:0 to gpu:3 [default: one per GPU]
    #[arg(long, value_name = "N=SIZE")]
    pub virtual_gpus: Option<String>,
    /// Launch every kernel of a step on a GPU separately instead of replaying a captured step, for comparison
    #[arg(long)]
    pub no_capture: bool,
    /// Run nodes on a GPU one by one instead of fusing them, for comparison
    #[arg(long)]
    pub no_fusion: bool,
    /// Multiply floats on a GPU in full precision instead of TF32
    #[arg(long)]
    pub full_precision: bool,
}

impl GpuFlags {
    /// The options from the flags.
    pub fn options(&self) -> Result<GpuOptions> {
        let mut options = GpuOptions {
            no_capture: self.no_capture,
            no_fusion: self.no_fusion,
            full_precision: self.full_precision,
            ..GpuOptions::default()
        };
        if let Some(share) = self.gpu_memory_fraction {
            if !(share > 0.0 && share <= 1.0) {
                return Err(Error::invalid_argument(format!(
                    "--gpu-memory-fraction {share} is no share of a GPU's memory: give more than 0 and at most 1"
                )));
            }
            options.per_process_gpu_memory_fraction = Some(share);
            // Reserved at start, so that a run that asks for more than is free fails before it begins.
            options.allow_growth = Some(false);
        }
        if let Some(text) = &self.virtual_gpus {
            options.virtual_devices = BTreeMap::from([(0, virtual_gpus(text)?)]);
        }
        Ok(options)
    }
}

impl GpuFlags {
    /// Gives each rank of a host a GPU of its own, in turn if there are fewer.
    pub fn choose_for(&self, world: &World, options: &mut GpuOptions) {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let n_gpus = discover(visible.as_deref()).usable().len();
        if n_gpus > 1 && world.local_size() > 1 {
            options.visible_device_list = (world.local_rank() % n_gpus).to_string();
        }
    }
}

/// More logical GPUs than this on one GPU are a mistake.
const MAX_VIRTUAL: usize = 64;

/// `4=8GiB`: the limits of four devices in bytes.
fn virtual_gpus(text: &str) -> Result<Vec<u64>> {
    let wrong = |why: &str| Error::invalid_argument(format!("--virtual-gpus {text}: {why}; write, say, 4=8GiB"));
    let (n, size) = text.split_once('=').ok_or_else(|| wrong("there is no '='"))?;
    let n: usize = n.trim().parse().map_err(|_| wrong("the number of GPUs is no number"))?;
    if !(1..=MAX_VIRTUAL).contains(&n) {
        return Err(wrong(&format!("a GPU is cut into 1 to {MAX_VIRTUAL} GPUs")));
    }
    let size = size.trim();
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.into_iter().find_map(|(unit, bits)| Some((size.strip_suffix(unit)?, bits)));
    let (number, bits) = unit.unwrap_or((size, 0));
    let number: u64 = number.trim().parse().map_err(|_| wrong("the size is no number of bytes, KiB, MiB or GiB"))?;
    let bytes = number.checked_mul(1 << bits).filter(|bytes| *bytes > 0);
    Ok(vec![bytes.ok_or_else(|| wrong("the size is zero or too large"))?; n])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(virtual_gpus("2=1GiB").unwrap(), [1 << 30; 2]);
        assert_eq!(virtual_gpus("1= 512 MiB").unwrap(), [512 << 20]);
        assert_eq!(virtual_gpus("3=4096").unwrap(), [4096; 3]);
        for (text, why) in [
            ("4", "no '='"),
            ("x=1GiB", "no number"),
            ("0=1GiB", "1 to 64"),
            ("2=1TB", "no number of bytes"),
            ("2=0", "zero or too large"),
            ("2=99999999999GiB", "zero or too large"),
        ] {
            let error = virtual_gpus(text).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(text), "{text}: {error}");
        }
    }

    #[test]
    fn shares_lie_between_0_and_1() {
        let flags = |share| GpuFlags { gpu_memory_fraction: Some(share), ..GpuFlags::default() };
        assert_eq!(flags(0.4).options().unwrap().per_process_gpu_memory_fraction, Some(0.4));
        for share in [0.0, -1.0, 1.5, f64::NAN] {
            assert!(flags(share).options().unwrap_err().to_string().contains("--gpu-memory-fraction"));
        }
    }
}
