//! Convolutions on a real GPU while a step is captured. Without a GPU the test says that it was skipped, and why.

#![allow(clippy::unwrap_used)] // Tests may fail as tests do.

use std::io::Write;
use std::sync::Arc;

use kolo_core::{DType, DeviceName, Memory, Shape, Tensor};
use kolo_device::cuda::{Conv, ConvPass, CudaConfig, CudaDevice, MemoryPlan, discover};
use kolo_device::{CpuConfig, CpuDevice, Device, Recorder};

fn values(dims: &[usize]) -> Tensor {
    let n: usize = dims.iter().product();
    let list: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
    Tensor::from_vec(Shape::new(dims).unwrap(), list).unwrap()
}

fn to_host(device: &CudaDevice, tensor: &Tensor) -> Vec<f32> {
    let (copy, event) = device.copy(tensor, Memory::Host).unwrap();
    event.unwrap().wait().unwrap();
    copy.data::<f32>().unwrap().to_vec()
}

/// An engine that one device has chosen is not set up on another while that one captures: what needs no set-up is used.
#[test]
fn a_convolution_whose_engine_is_missing_can_be_captured() {
    let found = discover(None);
    if let Some(why) = found.absent {
        let _ = writeln!(std::io::stderr(), "skipped (1 GPU test): {why}");
        return;
    }
    let host: Arc<dyn Device> = CpuDevice::new(DeviceName::local("CPU", 0), &CpuConfig::default());
    let device = |id: u32| {
        let config = CudaConfig {
            gpu: found.usable()[0].clone(),
            memory: MemoryPlan { limit: None, grow: true },
            incarnation: 1,
            kernel_cache: None,
            host: host.clone(),
            allow_tf32: true,
        };
        CudaDevice::new(DeviceName::local("GPU", id), &config).unwrap()
    };
    let call = Conv {
        dtype: DType::F32,
        channels_first: false,
        batch: 4,
        input: [16, 16, 32],
        filter: [3, 3],
        output: [16, 16, 64],
        stride: [1, 1],
        dilation: [1, 1],
        pad: [1, 1],
        groups: 1,
        allow_tf32: true,
    };
    let (images, filters) = (values(&[4, 16, 16, 32]), values(&[64, 3, 3, 32]));
    let grads = values(&[4, 16, 16, 64]);
    for pass in [ConvPass::Forward, ConvPass::BackpropInput, ConvPass::BackpropFilter] {
        let on = |device: &CudaDevice, tensor: &Tensor| device.copy(tensor, device.memory()).unwrap().0;
        let (a, b, dims): (&Tensor, &Tensor, &[usize]) = match pass {
            ConvPass::Forward => (&images, &filters, &[4, 16, 16, 64]),
            ConvPass::BackpropInput => (&filters, &grads, &[4, 16, 16, 32]),
            ConvPass::BackpropFilter => (&images, &grads, &[64, 3, 3, 32]),
        };
        let new =
            |device: &CudaDevice| device.allocate_tensor(DType::F32, Shape::new(dims).unwrap(), &"out".into()).unwrap();
        // The first device times what there is, and chooses.
        let first = device(0);
        let (a0, b0, mut out) = (on(&first, a), on(&first, b), new(&first));
        (0..4).for_each(|_| first.convolve(&call, pass, &a0, &b0, &mut out).unwrap());
        let expected = to_host(&first, &out);
        // The second has never computed it when it begins to capture.
        let second = device(1);
        let (a1, b1, mut out) = (on(&second, a), on(&second, b), new(&second));
        let capturing = second.begin_recording().unwrap();
        second.convolve(&call, pass, &a1, &b1, &mut out).unwrap();
        let captured = capturing.end().unwrap();
        captured.replay().unwrap();
        let replayed = to_host(&second, &out);
        // And now what was chosen.
        second.convolve(&call, pass, &a1, &b1, &mut out).unwrap();
        let plain = to_host(&second, &out);
        let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
        // Algorithms round to TF32 in different places.
        for ((x, y), z) in expected.iter().zip(&replayed).zip(&plain) {
            assert!((x - y).abs() <= 5e-2 * largest && (x - z).abs() <= 5e-2 * largest, "{pass:?}: {x}, {y}, {z}");
        }
    }
}
