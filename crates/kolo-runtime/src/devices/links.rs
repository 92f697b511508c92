//! Measures the links between a session's devices.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{DType, Result, Shape, Tensor};
use kolo_device::{Device, copy_between};
use kolo_graph::{CostModel, Link};

use crate::devices::Devices;

/// Bytes of the large value; larger than caches that devices might share.
const LARGE: usize = 16 << 20;

/// How often each size is copied. The fastest copy counts, since the others include other load of the machine.
const TRIES: usize = 3;

/// Measures each pair of device types once, on the first two different devices of that pair.
pub(crate) fn measure(devices: &Devices, costs: &mut CostModel) -> Result<()> {
    let mut done = BTreeMap::new();
    for from in &devices.units {
        for to in devices.units.iter().filter(|to| to.name != from.name) {
            let kinds = [from, to].map(|unit| unit.device.attributes().name.kind.to_string());
            if done.insert(kinds.clone(), ()).is_some() {
                continue;
            }
            let latency = fastest(&*from.device, &*to.device, 64)?.as_secs_f64();
            let seconds = fastest(&*from.device, &*to.device, LARGE)?.as_secs_f64();
            let bytes_per_second = LARGE as f64 / (seconds - latency).max(1e-9);
            costs.set_link(&kinds[0], &kinds[1], Link { bytes_per_second, latency });
        }
    }
    Ok(())
}

fn fastest(from: &dyn Device, to: &dyn Device, n_bytes: usize) -> Result<Duration> {
    let tag: Arc<str> = "link measurement".into();
    let mut value = from.allocate_tensor(DType::U8, Shape::new(&[n_bytes])?, &tag)?;
    from.fill(&mut value, 1)?;
    // The timer starts when the value is complete.
    from.synchronize()?;
    let copy = |value: &Tensor| -> Result<Duration> {
        let start = Instant::now();
        let copied = copy_between(value, from, to, &tag)?;
        to.synchronize()?;
        let duration = start.elapsed();
        drop(copied);
        Ok(duration)
    };
    (0..TRIES).map(|_| copy(&value)).try_fold(Duration::MAX, |least, time| Ok(least.min(time?)))
}
