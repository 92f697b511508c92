//! The GPU half of [`check_op`](super::check_op): the op's GPU kernel must give the stated values too.
//!
//! Without a GPU this says once, on standard error, that it checks nothing. Ops without a GPU kernel for their dtypes, and those
//! that run on the host though they are placed on a GPU, have been checked by then. A failure ends its test, as any other; with
//! `KOLO_GPU_CHECKS=report` failures are only printed, so that one run lists all of them.

use std::collections::BTreeMap;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use kolo_core::{Code, DType, DeviceName, Error, Result, Tensor};
use kolo_device::cuda::{self, GpuRequest};
use kolo_device::{CpuConfig, CpuDevice, Device};
use kolo_graph::Node;

use super::{OpTest, TestStep, assert_close, assert_declared, run_kernel};
use crate::kernel::Value;
use crate::op::{KernelDef, KernelMaker};

/// Longer than a kernel and its compilation take, with other tests waiting for the compiler too.
const MOST_WAIT: Duration = Duration::from_secs(120);

/// A kernel that does not come back keeps the GPU busy for ever; nothing else is checked on it then.
static IS_STUCK: AtomicBool = AtomicBool::new(false);
static N_CHECKED: AtomicUsize = AtomicUsize::new(0);
static N_FAILED: AtomicUsize = AtomicUsize::new(0);

/// Compares what the op gives on the GPU with `expected`.
#[track_caller]
pub(super) fn check(test: &OpTest, expected: &[Tensor]) {
    let Some(device) = device() else { return };
    let Some((node, kernel)) = chosen(test, device) else { return };
    let dtypes: Vec<&str> = test.inputs.iter().map(|tensor| tensor.dtype().name()).collect();
    let what = format!("{} of ({})", test.op, dtypes.join(", "));
    let (of_device, of_node, inputs) = (device.clone(), node.clone(), test.inputs.clone());
    let run = move || run(&of_device, &of_node, kernel, inputs);
    check_run(&what, run, |outputs| {
        assert_declared(&node, &outputs);
        for (i, (found, expected)) in outputs.iter().zip(expected).enumerate() {
            assert_close(found, expected, tolerance(test.tolerance, &test.inputs), &format!("output {i}"));
        }
    });
}

/// Runs something on the GPU, with a limit on the time, and has `compare` look at what it gives. A failure ends the test, or is
/// printed; see the [module](self).
#[track_caller]
pub(crate) fn check_run<T: Send + 'static>(
    what: &str,
    run: impl FnOnce() -> Result<T> + Send + 'static,
    compare: impl FnOnce(T),
) {
    if IS_STUCK.load(Ordering::Relaxed) {
        return;
    }
    let result = catch_unwind(AssertUnwindSafe(|| {
        match with_limit(run) {
            // The kernel says that it is not for these attributes or shapes.
            Err(error) if error.code() == Code::Unimplemented => return,
            found => compare(found.unwrap_or_else(|error| panic!("{error:?}"))),
        }
        N_CHECKED.fetch_add(1, Ordering::Relaxed);
    }));
    let Err(panic) = result else { return };
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    let message = format!("{what} on the GPU: {}", text.unwrap_or("panicked without a message"));
    let (n, of) = (N_FAILED.fetch_add(1, Ordering::Relaxed) + 1, N_CHECKED.load(Ordering::Relaxed));
    say(&format!("GPU check failed ({n} so far, {of} passed): {message}"));
    if std::env::var_os("KOLO_GPU_CHECKS").is_none_or(|mode| mode != "report") {
        panic!("{message}");
    }
}

/// The node of a test and its GPU kernel, if it has one that computes on the GPU.
fn chosen(test: &OpTest, device: &Arc<dyn Device>) -> Option<(Arc<Node>, &'static KernelDef)> {
    let graph = crate::graph();
    let (sources, _) = test.sources(&graph, &test.inputs, false);
    let node = test.build(&graph, sources).ok()?.node()?;
    let kernel = crate::find_kernel(&node, &device.attributes().name).ok()?;
    let computes = matches!(kernel.make, KernelMaker::Function(_) | KernelMaker::Object(_));
    (kernel.device == "GPU" && computes).then_some((node, kernel))
}

/// What `run` gives. A kernel that takes too long is given up.
fn with_limit<T: Send + 'static>(run: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || drop(sender.send(run())));
    match receiver.recv_timeout(MOST_WAIT) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(Error::internal("the kernel panicked")),
        Err(mpsc::RecvTimeoutError::Timeout) => {
            IS_STUCK.store(true, Ordering::Relaxed);
            Err(Error::internal(format!("not done after {MOST_WAIT:?}; no other op is checked on the GPU")))
        }
    }
}

/// The outputs, in host memory.
fn run(device: &Arc<dyn Device>, node: &Arc<Node>, kernel: &KernelDef, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
    let (on_host, _) = crate::host_arguments(node, kernel);
    let mut values = Vec::with_capacity(inputs.len());
    for (i, tensor) in inputs.into_iter().enumerate() {
        let is_host = on_host.get(i).copied().unwrap_or(false);
        values.push(Value::Tensor(if is_host { tensor } else { copy_to(device, &tensor)? }));
    }
    let step = TestStep::new(&device.attributes().name);
    let outputs = run_kernel(kernel, node, &**device, &step, &mut values)?;
    let to_host = |value: Value| match value {
        Value::Tensor(tensor) => device.to_host(&tensor),
        Value::Reference(_) | Value::Empty => Err(Error::internal("an output is missing")),
    };
    outputs.into_iter().map(to_host).collect()
}

/// A copy in the device's memory, complete.
pub(crate) fn copy_to(device: &Arc<dyn Device>, tensor: &Tensor) -> Result<Tensor> {
    let (copy, event) = device.copy(tensor, device.memory())?;
    if let Some(event) = event {
        event.wait()?;
    }
    Ok(copy)
}

/// A GPU sums in another order, and its functions are exact to a few units in the last place. Products are computed in full
/// precision here, without TF32.
fn tolerance(stated: f64, inputs: &[Tensor]) -> f64 {
    let of = |tensor: &Tensor| match tensor.dtype() {
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        DType::F32 => 2e-5,
        _ => 0.0,
    };
    inputs.iter().map(of).fold(stated, f64::max)
}

/// The first GPU, opened once for all tests.
pub(crate) fn device() -> Option<&'static Arc<dyn Device>> {
    static DEVICE: OnceLock<Option<Arc<dyn Device>>> = OnceLock::new();
    DEVICE
        .get_or_init(|| match open() {
            Ok(device) => Some(device),
            Err(why) => {
                say(&format!("skipped: no op is checked on a GPU: {why}"));
                None
            }
        })
        .as_ref()
}

fn open() -> std::result::Result<Arc<dyn Device>, String> {
    if let Some(why) = cuda::discover(None).absent {
        return Err(why);
    }
    let like = DeviceName::local("CPU", 0);
    let host: Arc<dyn Device> =
        CpuDevice::new(like.clone(), &CpuConfig { intra_op_threads: 1, ..CpuConfig::default() });
    let (memory_limits, virtual_devices) = (BTreeMap::new(), BTreeMap::new());
    let request = GpuRequest {
        n_devices: Some(1),
        visible_device_list: "",
        memory_fraction: None,
        grow: true,
        memory_limits: &memory_limits,
        virtual_devices: &virtual_devices,
        allow_tf32: false,
        kernel_cache: None,
        like: &like,
        host: &host,
        incarnation: || 1,
    };
    let devices = cuda::open(&request).map_err(|error| error.to_string())?;
    devices.into_iter().next().ok_or_else(|| "none could be opened".to_owned())
}

/// Written past the test harness, which shows what passing tests print only on request.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
