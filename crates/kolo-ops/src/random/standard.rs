//! `RandomUniform`: evenly from [0, 1). `RandomStandardNormal`: mean 0, standard deviation 1. `TruncatedNormal`: the
//! same, redrawn beyond two standard deviations.

use std::marker::PhantomData;

use half::{bf16, f16};
use kolo_core::{DType, Element, Result};
use kolo_graph::{Effects, Gradient, OpDef, Output, shape_fns};

use crate::cuda::FLOATS;
use crate::op::{Gpu, KernelDef, Op, cpu_on, gpu_made};
use crate::random::distribution::{Distribution, Normal, Standard, Truncated, Uniform, fill};
use crate::random::shape_in;
use crate::random::stream::Stream;
use crate::{Cost, Kernel, KernelCtx, KernelInit, KernelMaker};

/// Numbers drawn evenly from [0, 1), in the shape that integer vector `shape` holds.
#[track_caller]
pub fn random_uniform(shape: Output<'_>, dtype: DType, seed: Option<i64>) -> Output<'_> {
    random("RandomUniform", shape, dtype, seed)
}

/// Numbers from a normal distribution with mean 0 and standard deviation 1.
#[track_caller]
pub fn random_normal(shape: Output<'_>, dtype: DType, seed: Option<i64>) -> Output<'_> {
    random("RandomStandardNormal", shape, dtype, seed)
}

/// Numbers from a normal distribution, redrawn beyond two standard deviations.
#[track_caller]
pub fn truncated_normal(shape: Output<'_>, dtype: DType, seed: Option<i64>) -> Output<'_> {
    random("TruncatedNormal", shape, dtype, seed)
}

#[track_caller]
fn random<'g>(op: &str, shape: Output<'g>, dtype: DType, seed: Option<i64>) -> Output<'g> {
    let (seed, seed2) = shape.graph().op_seeds(seed);
    shape.graph().op(op).input(shape).attr("dtype", dtype).attr("seed", seed).attr("seed2", seed2).out()
}

pub(crate) static RANDOM_UNIFORM: Op = standard("RandomUniform", UNIFORM_KERNELS)
    .host_args(&["shape"])
    .gpu(&[gpu_made("dtype", FLOATS, KernelMaker::Object(|init| super::gpu::Random::make(init, 0)))]);
pub(crate) static RANDOM_STANDARD_NORMAL: Op = standard("RandomStandardNormal", NORMAL_KERNELS)
    .host_args(&["shape"])
    .gpu(&[gpu_made("dtype", FLOATS, KernelMaker::Object(|init| super::gpu::Random::make(init, 1)))]);
pub(crate) static TRUNCATED_NORMAL: Op = standard("TruncatedNormal", TRUNCATED_KERNELS)
    .host_args(&["shape"])
    .gpu(&[gpu_made("dtype", FLOATS, KernelMaker::Object(|init| super::gpu::Random::make(init, 2)))]);

const fn standard(name: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(shape:T) -> (output:dtype) ; seed:int=0, seed2:int=0, \
                        dtype:type{half,bfloat16,float,double}, T:type{int32,int64}",
            shape: shape_fns::from_shape_input,
            gradient: Gradient::None("random numbers do not depend on their shape"),
            stateful: true,
            effects: Effects::Random,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

const UNIFORM_KERNELS: &[KernelDef] = &[
    kernel::<f32>(|init| make(init, Uniform::<f32>(PhantomData))),
    kernel::<f64>(|init| make(init, Uniform::<f64>(PhantomData))),
    kernel::<f16>(|init| make(init, Uniform::<f16>(PhantomData))),
    kernel::<bf16>(|init| make(init, Uniform::<bf16>(PhantomData))),
];
const NORMAL_KERNELS: &[KernelDef] = &[
    kernel::<f32>(|init| make(init, Normal::<f32>(PhantomData))),
    kernel::<f64>(|init| make(init, Normal::<f64>(PhantomData))),
    kernel::<f16>(|init| make(init, Normal::<f16>(PhantomData))),
    kernel::<bf16>(|init| make(init, Normal::<bf16>(PhantomData))),
];
const TRUNCATED_KERNELS: &[KernelDef] = &[
    kernel::<f32>(|init| make(init, Truncated::<f32>(PhantomData))),
    kernel::<f64>(|init| make(init, Truncated::<f64>(PhantomData))),
    kernel::<f16>(|init| make(init, Truncated::<f16>(PhantomData))),
    kernel::<bf16>(|init| make(init, Truncated::<bf16>(PhantomData))),
];

const fn kernel<T: Standard>(make: fn(&KernelInit<'_>) -> Result<Box<dyn Kernel>>) -> KernelDef {
    cpu_on("dtype", &[T::DTYPE], KernelMaker::Object(make))
}

fn make<D: Distribution + Send + 'static>(init: &KernelInit<'_>, distribution: D) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Random { stream: Stream::new(init)?, distribution }))
}

struct Random<D> {
    stream: Stream,
    distribution: D,
}

impl<D: Distribution + Send> Kernel for Random<D> {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let shape = shape_in(ctx)?;
        let mut out = ctx.allocate(D::Output::DTYPE, shape)?;
        let start = self.stream.reserve_outputs(out.n_elements());
        fill(ctx.pool(), &self.distribution, start, out.data_mut()?);
        ctx.set_output(0, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::random::testing::{bits_hash, run_twice};
    use crate::testing::check_op;

    /// Words of TensorFlow 2.21's values for seeds 12345 and 678: of shape [5] (first run and second), and a hash of
    /// both runs of shape [20011].
    fn check(op: &str, dtype: DType, small: [[u64; 5]; 2], large: [u64; 2]) {
        let run = |n: i32| {
            let attrs = [("dtype", dtype.into()), ("seed", 12345i64.into()), ("seed2", 678i64.into())];
            run_twice(op, &attrs, &[Tensor::vector(vec![n])])
        };
        for (found, expected) in run(5).iter().zip(small) {
            assert_eq!(words(found), expected, "{op} of {dtype}: {found:?}");
        }
        assert_eq!(run(20011).map(|tensor| bits_hash(&tensor)), large, "{op} of {dtype}");
    }

    fn words(tensor: &Tensor) -> Vec<u64> {
        let bytes = tensor.host_bytes().unwrap();
        let size = tensor.dtype().size().unwrap();
        bytes.chunks(size).map(|word| word.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte))).collect()
    }

    #[test]
    fn uniform_is_tensorflows() {
        check(
            "RandomUniform",
            DType::F32,
            [
                [0x3efd2880, 0x3f701d5c, 0x3dff8b70, 0x3f7bc162, 0x3e8624fc],
                [0x3f1aad96, 0x3ed4b8c0, 0x3f4e1cb4, 0x3e471370, 0x3e8da99c],
            ],
            [0xf07e193a412423e0, 0x3315c51cdacee5ee],
        );
        check(
            "RandomUniform",
            DType::F64,
            [
                [0x3fee9441b8f01d5c, 0x3feff16ef6fbc162, 0x3fb893f2d4a7c800, 0x3fe7acee9e996e82, 0x3fd4a4295c47af4c],
                [0x3feaad964d6a5c60, 0x3fdc39694a6389b8, 0x3fcb533857121120, 0x3fec8e5e93643824, 0x3fef3b87ec40a2d0],
            ],
            [0x118e19f7fdfa8a76, 0x9c698a1b0c158012],
        );
        check(
            "RandomUniform",
            DType::F16,
            [[0x3840, 0x395c, 0x31b8, 0x3188, 0x34fc], [0x3996, 0x3860, 0x38b4, 0x38dc, 0x38ce]],
            [0x512e535db052b5a3, 0x1bbe088856ccf943],
        );
        check(
            "RandomUniform",
            DType::BF16,
            [[0x3e80, 0x3eb8, 0x3edc, 0x3ec4, 0x3efc], [0x3f16, 0x3ec0, 0x3f34, 0x3f5c, 0x3f4e]],
            [0x125f23adc1f7604, 0xaa570794cd02d4aa],
        );
    }

    #[test]
    fn normal_is_tensorflows() {
        check(
            "RandomStandardNormal",
            DType::F32,
            [
                [0xbee6f6ac, 0x3f8c8429, 0xbe5940b6, 0x4001dd85, 0xbf4e4743],
                [0x3f022807, 0xbf5d9460, 0x3f1e60a0, 0x3e66bbce, 0xbfcbee26],
            ],
            [0x203ee537b56dda3a, 0x88085bb2391f479],
        );
        check(
            "RandomStandardNormal",
            DType::F64,
            [
                [0xbf6b9581c2c26d0d, 0x3fd349adf742e210, 0xc00148a7f02cce93, 0xbfc1a497680fe5f5, 0xbff0eaeba20045cb],
                [0x3fcbf7851ee19269, 0xbfe1fd6662191af3, 0xbff198f460308dc9, 0x3ff5ee5b0960941a, 0x3fc6a9b7cc4fe724],
            ],
            [0xda3a47dc05921b30, 0xb90f4f4c1417331e],
        );
        check(
            "RandomStandardNormal",
            DType::F16,
            [[0xb738, 0x3c64, 0xb2ca, 0x400f, 0xba72], [0x3811, 0xbaed, 0x38f3, 0x3336, 0xbe5f]],
            [0x92c7c50043b32433, 0x583301eafa7bd1df],
        );
        check(
            "RandomStandardNormal",
            DType::BF16,
            [[0xbee7, 0x3f8d, 0xbe59, 0x4002, 0xbf4e], [0x3f02, 0xbf5e, 0x3f1e, 0x3e67, 0xbfcc]],
            [0x8de35e16ced00b1a, 0xf70e8af3613ea4a6],
        );
    }

    #[test]
    fn truncated_normal_is_tensorflows() {
        check(
            "TruncatedNormal",
            DType::F32,
            [
                [0xbee6f6ac, 0x3f8c8429, 0xbe5940b6, 0xbf4e4743, 0xbe0a37f8],
                [0x3f022807, 0xbf5d9460, 0x3f1e60a0, 0x3e66bbce, 0x3e9f2919],
            ],
            [0x63496a8505e8b064, 0xa388e38a8d1e6bfc],
        );
        check(
            "TruncatedNormal",
            DType::F64,
            [
                [0xbf6b9581c2c26d0d, 0x3fd349adf742e210, 0xbfdc46737a42a552, 0xbfdc4d3c3d08eee6, 0xbfb71b2247a5ff25],
                [0x3fcbf7851ee19269, 0xbfe1fd6662191af3, 0x3ffaf3d3a211551d, 0xbff9468547f15d68, 0xbff227af42f2e692],
            ],
            [0x87aba64e6ae9805b, 0x7e0486c7a37e9ad3],
        );
        check(
            "TruncatedNormal",
            DType::F16,
            [[0xb738, 0x3c64, 0xb2ca, 0xba72, 0xb052], [0x3811, 0xbaed, 0x38f3, 0x3336, 0x34f9]],
            [0xac8be9f3434c42f2, 0x2a1be86f3edc4d92],
        );
        check(
            "TruncatedNormal",
            DType::BF16,
            [[0xbee7, 0x3f8d, 0xbe59, 0xbf4e, 0xbe0a], [0x3f02, 0xbf5e, 0x3f1e, 0x3e67, 0x3e9f]],
            [0x4f5f76b3636bd733, 0x2ee323a6c59e2951],
        );
    }

    #[test]
    fn without_seeds_values_differ_and_shapes_hold() {
        let draw =
            || check_op("RandomUniform").attr("dtype", DType::F32).input(vec![4i32, 25]).run(false).unwrap().remove(0);
        let (a, b) = (draw(), draw());
        assert_eq!(a.shape().dims(), [4, 25]);
        assert_ne!(a, b);
        assert!(a.data::<f32>().unwrap().iter().all(|x| (0.0..1.0).contains(x)));
        check_op("TruncatedNormal").attr("dtype", DType::F32).input(vec![0i64]).gives(Tensor::vector::<f32>(vec![]));
        check_op("RandomUniform").attr("dtype", DType::F32).input(vec![2i32, -1]).fails("negative size");
    }
}
