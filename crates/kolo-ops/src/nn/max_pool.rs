//! `MaxPool`: the largest value under a window, for each channel. `MaxPoolGrad`: its gradient, which goes to the first
//! value that is the largest, and on a CPU to the first of all where none is, since there is NaN (on a GPU, nowhere).
//! `MaxPoolV2` and `MaxPoolGradV2`: the same, with the window's size and strides as inputs.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::stop_if_asked;
use kolo_graph::{Attrs, Gradient, HalfSafety, OpDef, Output, SplitRule, shape_fns};

use crate::cuda::FLOATS;
use crate::math::binary::first;
use crate::math::elementwise::lanes;
use crate::math::number::Number;
use crate::nn::conv2d::like;
use crate::nn::pool::gpu as pool_on_gpu;
use crate::nn::pool::{Folding, Pool, depth_group, infer, infer_with, is_across_channels};
use crate::nn::window::for_taps;
use crate::op::{Gpu, Op, cpu_kernels, gpu_kernel};
use crate::widened::keep_in_range;
use crate::{Cost, KernelCtx};

/// The largest values under windows of `size` over NHWC images. Padding is `SAME` or `VALID`.
#[track_caller]
pub fn max_pool<'g>(images: Output<'g>, size: [i64; 2], strides: [i64; 2], padding: &str) -> Output<'g> {
    let list = |[h, w]: [i64; 2]| vec![1, h, w, 1];
    let builder = images.graph().op("MaxPool").input(images);
    builder.attr("ksize", list(size)).attr("strides", list(strides)).attr("padding", padding).out()
}

pub(crate) static MAX_POOL: Op = Op {
    def: OpDef {
        name: "MaxPool",
        signature: "(input:T) -> (output:T) ; \
                    T:type{half,bfloat16,float,double,int32,int64,uint8,int16,int8,uint16,qint8}=float, \
                    ksize:list(int)>=4, strides:list(int)>=4, padding:string{SAME|VALID|EXPLICIT}, \
                    explicit_paddings:list(int)=[], data_format:string{NHWC|NCHW|NCHW_VECT_C}=\"NHWC\"",
        shape: infer,
        gradient: Gradient::Rule(|op, dy| {
            let dx = like(op, "MaxPoolGrad").inputs([op.input(0), op.output(0), first(dy)?]).out();
            Ok(vec![Some(dx.into())])
        }),
        half: HalfSafety::Neutral,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64, i32, i64; f16, bf16, i8, i16, u8, u16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, |ctx| pool_on_gpu::forward(ctx, pool_on_gpu::MAX))
        .except("pools across channels", is_across_channels)]),
    cost: Cost::Elements,
};

pub(crate) static MAX_POOL_GRAD: Op = Op {
    def: OpDef {
        name: "MaxPoolGrad",
        signature: "(orig_input:T, orig_output:T, grad:T) -> (output:T) ; ksize:list(int)>=4, strides:list(int)>=4, \
                    padding:string{SAME|VALID|EXPLICIT}, explicit_paddings:list(int)=[], \
                    data_format:string{NHWC|NCHW}=\"NHWC\", \
                    T:type{float,double,int32,uint8,int16,int8,int64,bfloat16,uint16,half,uint32,uint64}=float",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Refused("MaxPoolGradGrad is not implemented"),
        half: HalfSafety::Neutral,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, |ctx| pool_on_gpu::max_backward(ctx, false))
        .except("pools across channels", is_across_channels)]),
    cost: Cost::Elements,
};

pub(crate) static MAX_POOL_V2: Op = Op {
    def: OpDef {
        name: "MaxPoolV2",
        signature: "(input:T, ksize:int32, strides:int32) -> (output:T) ; \
                    T:type{half,bfloat16,float,double,int32,int64,uint8,int16,int8,uint16,qint8}=float, \
                    padding:string{SAME|VALID}, data_format:string{NHWC|NCHW|NCHW_VECT_C}=\"NHWC\"",
        shape: |ctx| match (ctx.constant(1), ctx.constant(2)) {
            (Some(size), Some(strides)) => infer_with(ctx, &with_window(ctx.attrs(), size, strides)?),
            _ => Ok(vec![PartialShape::of_rank(4)]),
        },
        gradient: Gradient::Rule(|op, dy| {
            let window = [op.input(1), op.input(2)];
            let builder = like(op, "MaxPoolGradV2").inputs([op.input(0), op.output(0), first(dy)?]).inputs(window);
            Ok(vec![Some(builder.out().into()), None, None])
        }),
        half: HalfSafety::Neutral,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward_v2: f32, f64, i32, i64; f16, bf16, i8, i16, u8, u16),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static MAX_POOL_GRAD_V2: Op = Op {
    def: OpDef {
        name: "MaxPoolGradV2",
        signature: "(orig_input:T, orig_output:T, grad:T, ksize:int32, strides:int32) -> (output:T) ; \
                    padding:string{SAME|VALID}, data_format:string{NHWC|NCHW}=\"NHWC\", \
                    T:type{float,double,int32,uint8,int16,int8,int64,bfloat16,uint16,half,uint32,uint64}=float",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Refused("MaxPoolGradGradV2 is not implemented"),
        half: HalfSafety::Neutral,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward_v2: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// The attributes with the window's size and strides that came as inputs.
fn with_window(attrs: &Attrs, size: &Tensor, strides: &Tensor) -> Result<Attrs> {
    let mut attrs = attrs.clone();
    for (name, list) in [("ksize", size), ("strides", strides)] {
        if list.shape().dims() != [4] {
            return Err(Error::invalid_argument(format!("{name} must have 4 elements, found shape {}", list.shape())));
        }
        attrs.set(name, list.integers()?);
    }
    Ok(attrs)
}

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    pool_forward::<T>(ctx, ctx.attrs())?;
    keep_in_range::<T>(ctx)
}

fn forward_v2<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let attrs = with_window(ctx.attrs(), ctx.input(1)?, ctx.input(2)?)?;
    pool_forward::<T>(ctx, &attrs)?;
    keep_in_range::<T>(ctx)
}

fn backward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    pool_backward::<T>(ctx, ctx.attrs())
}

fn backward_v2<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let attrs = with_window(ctx.attrs(), ctx.input(3)?, ctx.input(4)?)?;
    pool_backward::<T>(ctx, &attrs)
}

fn pool_forward<T: Number>(ctx: &mut KernelCtx<'_>, attrs: &Attrs) -> Result<()> {
    let input = ctx.input(0)?;
    if let Some(group) = depth_group(attrs, input.shape())? {
        return forward_depth::<T>(ctx, group);
    }
    let pool = Pool::new(attrs, input.shape())?;
    let mut out = ctx.allocate(T::DTYPE, pool.shape.clone())?;
    let (values, c) = (input.data::<T>()?, pool.channels);
    if out.n_elements() > 0 {
        let chunk = pool.images_per_task() * pool.output();
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, chunk, |task, out| {
            let images = &values[task * pool.images_per_task() * pool.input()..];
            if pool.is_halving() {
                let lines = images.chunks_exact(2 * pool.w.input * c).zip(out.chunks_exact_mut(pool.w.output * c));
                return lanes::<T, _>(
                    #[inline(always)]
                    || {
                        for (x, y) in lines {
                            stop_if_asked();
                            halve(x, y, c);
                        }
                    },
                );
            }
            lanes::<T, _>(
                #[inline(always)]
                || {
                    for (image, out) in
                        images.chunks_exact(pool.input().max(1)).zip(out.chunks_exact_mut(pool.output()))
                    {
                        for (o, out) in out.chunks_exact_mut(c).enumerate() {
                            if o % pool.w.output == 0 {
                                stop_if_asked();
                            }
                            largest_of_window(&pool, image, [o / pool.w.output, o % pool.w.output], out);
                        }
                    }
                },
            );
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

/// The largest value of each channel in the window at one place of the output.
#[inline(always)]
fn largest_of_window<T: Number>(pool: &Pool, image: &[T], [oh, ow]: [usize; 2], out: &mut [T]) {
    let place = |kh, kw| (pool.h.at(oh, kh) * pool.w.input + pool.w.at(ow, kw), ());
    let window = [pool.h.taps(oh), pool.w.taps(ow)];
    Folding { image, channels: pool.channels, window, place }.run(
        T::LOWEST,
        #[inline(always)]
        |y, x, ()| y.max(x),
        #[inline(always)]
        |first, largest| out[first..][..largest.len()].copy_from_slice(largest),
    );
}

/// The largest of each group of neighbouring channels.
fn forward_depth<T: Number>(ctx: &mut KernelCtx<'_>, group: usize) -> Result<()> {
    let input = ctx.input(0)?;
    let mut shape = input.shape().dims().to_vec();
    shape[3] /= group;
    let mut out = ctx.allocate(T::DTYPE, Shape::new(&shape)?)?;
    for (y, group) in out.data_mut::<T>()?.iter_mut().zip(input.data::<T>()?.chunks_exact(group)) {
        *y = group.iter().fold(T::LOWEST, |y, &x| y.max(x));
    }
    ctx.set_output(0, out);
    Ok(())
}

fn pool_backward<T: Number>(ctx: &mut KernelCtx<'_>, attrs: &Attrs) -> Result<()> {
    let input = ctx.input(0)?;
    if depth_group(attrs, input.shape())?.is_some() {
        return Err(Error::unimplemented("MaxPoolingGrad is not yet supported on the depth dimension."));
    }
    let pool = Pool::new(attrs, input.shape())?;
    for (i, name) in [(1, "orig_output"), (2, "grad")] {
        let found = ctx.input(i)?.shape();
        if *found != pool.shape {
            return Err(Error::invalid_argument(format!(
                "Expected {name} shape to be {}, but got {found}",
                pool.shape
            )));
        }
    }
    let shape = input.shape().clone();
    let mut out = match pool.is_halving() {
        true => ctx.allocate(T::DTYPE, shape)?,
        false => ctx.allocate_zeroed(T::DTYPE, shape)?,
    };
    let input = ctx.input(0)?;
    let (x, y, dy) = (input.data::<T>()?, ctx.data::<T>(1)?, ctx.data::<T>(2)?);
    if out.n_elements() > 0 && !dy.is_empty() {
        let (c, step) = (pool.channels, pool.images_per_task());
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, step * pool.input(), |task, dx| {
            if pool.is_halving() {
                let (big, small) = (2 * pool.w.input * c, pool.w.output * c);
                let (x, from) = (&x[task * step * pool.input()..], task * step * pool.output());
                let lines = dx.chunks_exact_mut(big).zip(x.chunks_exact(big));
                let outputs = y[from..].chunks_exact(small).zip(dy[from..].chunks_exact(small));
                return lanes::<T, _>(
                    #[inline(always)]
                    || {
                        for ((dx, x), (y, dy)) in lines.zip(outputs) {
                            stop_if_asked();
                            unhalve(dx, x, y, dy, c);
                        }
                    },
                );
            }
            // What has not gone anywhere yet: the first match takes it all.
            let mut left = vec![T::ZERO; pool.output()];
            for (i, dx) in dx.chunks_exact_mut(pool.input()).enumerate() {
                let image = task * step + i;
                let x = &x[image * pool.input()..(image + 1) * pool.input()];
                let y = &y[image * pool.output()..(image + 1) * pool.output()];
                left.copy_from_slice(&dy[image * pool.output()..(image + 1) * pool.output()]);
                lanes::<T, _>(
                    #[inline(always)]
                    || {
                        for_taps(&pool.h, &pool.w, |o, _, i| {
                            if o % pool.w.output == 0 {
                                stop_if_asked();
                            }
                            let (x, dx) = (&x[i * c..(i + 1) * c], &mut dx[i * c..(i + 1) * c]);
                            let (y, left) = (&y[o * c..(o + 1) * c], &mut left[o * c..(o + 1) * c]);
                            for (((dx, left), x), y) in dx.iter_mut().zip(left).zip(x).zip(y) {
                                let hit = x == y;
                                *dx = dx.add(if hit { *left } else { T::ZERO });
                                *left = if hit { T::ZERO } else { *left };
                            }
                        });
                    },
                );
                if left.iter().any(|left| *left != T::ZERO) {
                    give_to_the_first(&pool, &left, dx);
                }
            }
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

/// Adds what no value of a window has taken, since NaN equals nothing, to the first.
#[cold]
fn give_to_the_first<T: Number>(pool: &Pool, left: &[T], dx: &mut [T]) {
    let c = pool.channels;
    for (o, left) in left.chunks_exact(c).enumerate() {
        let [oh, ow] = [o / pool.w.output, o % pool.w.output];
        let (Some(kh), Some(kw)) = (pool.h.taps(oh).next(), pool.w.taps(ow).next()) else { continue };
        let i = pool.h.at(oh, kh) * pool.w.input + pool.w.at(ow, kw);
        dx[i * c..(i + 1) * c].iter_mut().zip(left).for_each(|(dx, left)| *dx = dx.add(*left));
    }
}

/// One line of windows of two by two: `x` are the two lines of the image below it, pixels of `c` channels.
#[inline(always)]
fn halve<T: Number>(x: &[T], y: &mut [T], c: usize) {
    let (top, bottom) = x.split_at(x.len() / 2);
    for ((y, top), bottom) in y.chunks_exact_mut(c).zip(top.chunks_exact(2 * c)).zip(bottom.chunks_exact(2 * c)) {
        let ((a, b), (d, e)) = (top.split_at(c), bottom.split_at(c));
        for ((((y, &a), &b), &d), &e) in y.iter_mut().zip(a).zip(b).zip(d).zip(e) {
            *y = T::LOWEST.max(a).max(b).max(d).max(e);
        }
    }
}

/// The gradient of [`halve`], into every element of `dx`.
#[inline(always)]
fn unhalve<T: Number>(dx: &mut [T], x: &[T], y: &[T], dy: &[T], c: usize) {
    let (top, bottom) = x.split_at(x.len() / 2);
    let (dx_top, dx_bottom) = dx.split_at_mut(x.len() / 2);
    let images = top.chunks_exact(2 * c).zip(bottom.chunks_exact(2 * c));
    let gradients = dx_top.chunks_exact_mut(2 * c).zip(dx_bottom.chunks_exact_mut(2 * c));
    let outputs = y.chunks_exact(c).zip(dy.chunks_exact(c));
    for (((top, bottom), (dx_top, dx_bottom)), (y, dy)) in images.zip(gradients).zip(outputs) {
        let ((a, b), (d, e)) = (top.split_at(c), bottom.split_at(c));
        let ((da, db), (dd, de)) = (dx_top.split_at_mut(c), dx_bottom.split_at_mut(c));
        // In blocks of a known size, which become vectors, then one by one.
        let n = c / LANES * LANES;
        for i in (0..n).step_by(LANES) {
            let at = i..i + LANES;
            let x =
                [load::<T, LANES>(&a[at.clone()]), load(&b[at.clone()]), load(&d[at.clone()]), load(&e[at.clone()])];
            let [ga, gb, gd, ge] = shares(x, load(&y[at.clone()]), load(&dy[at.clone()]));
            da[at.clone()].copy_from_slice(&ga);
            db[at.clone()].copy_from_slice(&gb);
            dd[at.clone()].copy_from_slice(&gd);
            de[at].copy_from_slice(&ge);
        }
        for i in n..c {
            let [[ga], [gb], [gd], [ge]] = shares([[a[i]], [b[i]], [d[i]], [e[i]]], [y[i]], [dy[i]]);
            (da[i], db[i], dd[i], de[i]) = (ga, gb, gd, ge);
        }
    }
}

const LANES: usize = 16;

/// A slice of `N` elements by value, about which the optimiser knows that nothing else touches it.
#[inline(always)]
fn load<T: Number, const N: usize>(x: &[T]) -> [T; N] {
    let mut values = [T::ZERO; N];
    values.copy_from_slice(x);
    values
}

/// What each of four inputs gets of the gradient: the first that equals the output takes it all, and the first of all if none
/// does, since it is NaN.
#[inline(always)]
fn shares<T: Number, const N: usize>(x: [[T; N]; 4], y: [T; N], dy: [T; N]) -> [[T; N]; 4] {
    let mut shares = [[T::ZERO; N]; 4];
    let mut left = dy;
    for (share, x) in shares.iter_mut().zip(x) {
        for i in 0..N {
            let hit = x[i] == y[i];
            share[i] = if hit { left[i] } else { T::ZERO };
            left[i] = if hit { T::ZERO } else { left[i] };
        }
    }
    for i in 0..N {
        shares[0][i] = shares[0][i].add(left[i]);
    }
    shares
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{OpTest, check_op, tensor, wavy};

    fn pool(op: &str, nchw: bool, size: [i64; 2], strides: [i64; 2], padding: &str) -> OpTest {
        let order = |[h, w]: [i64; 2]| if nchw { vec![1, 1, h, w] } else { vec![1, h, w, 1] };
        check_op(op)
            .attr("ksize", order(size))
            .attr("strides", order(strides))
            .attr("padding", padding)
            .attr("data_format", if nchw { "NCHW" } else { "NHWC" })
    }

    #[test]
    fn the_window_as_inputs() {
        let x = || tensor([1, 2, 4, 1], [1.0f32, 5.0, 2.0, 3.0, 4.0, 0.0, 9.0, 8.0]);
        let test = |op: &str| check_op(op).attr("padding", "VALID");
        let (size, strides) = ([1i32, 2, 2, 1], [1i32, 2, 2, 1]);
        test("MaxPoolV2").input(x()).input(size).input(strides).gives(tensor([1, 1, 2, 1], [5.0f32, 9.0]));
        test("MaxPoolV2").input(wavy([1, 4, 4, 2], 0)).input(size).input(strides).gradient();
        test("MaxPoolGradV2")
            .input(x())
            .input(tensor([1, 1, 2, 1], [5.0f32, 9.0]))
            .input(tensor([1, 1, 2, 1], [1.0f32, 2.0]))
            .input(size)
            .input(strides)
            .gives(tensor([1, 2, 4, 1], [0.0f32, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0]));
        test("MaxPoolV2").input(x()).input([1i32, 2, 2]).input(strides).fails("ksize must have 4 elements");
    }

    #[test]
    fn groups_of_channels() {
        let test = |size: i64, stride: i64| {
            check_op("MaxPool")
                .attr("ksize", vec![1, 1, 1, size])
                .attr("strides", vec![1, 1, 1, stride])
                .attr("padding", "SAME")
                .input(tensor([1, 1, 2, 4], [1.0f32, 5.0, 2.0, 3.0, 4.0, 0.0, -9.0, -8.0]))
        };
        test(2, 2).gives(tensor([1, 1, 2, 2], [5.0f32, 3.0, 4.0, -8.0]));
        test(4, 4).gives(tensor([1, 1, 2, 1], [5.0f32, 4.0]));
        test(3, 3).fails("evenly divide");
        test(2, 1).fails("equal");
    }

    #[test]
    fn values_are_tensorflows() {
        let x = wavy([2, 5, 4, 2], 1);
        pool("MaxPool", false, [2, 2], [2, 2], "VALID").input(x.clone()).gives(tensor(
            [2, 2, 2, 2],
            [
                1.0496864f32,
                1.3495203,
                1.3297529,
                1.1972469,
                1.2755408,
                1.3264732,
                0.90121245,
                1.2814133,
                1.1529534,
                1.3423446,
                0.6688978,
                1.2431667,
                1.3067437,
                0.83290684,
                1.3069328,
                1.2434602,
            ],
        ));
        pool("MaxPool", false, [3, 2], [2, 1], "SAME").input(x.clone()).gives(tensor(
            [2, 3, 4, 2],
            [
                1.0496864f32,
                1.3495203,
                1.3297529,
                1.1972469,
                1.3297529,
                1.1972469,
                -0.7041306,
                0.3221268,
                1.2755408,
                1.3264732,
                1.3297529,
                1.3264732,
                1.3297529,
                1.2814133,
                0.76041466,
                1.2814133,
                1.2055832,
                1.3264732,
                1.2055832,
                1.3264732,
                1.3489083,
                1.0381116,
                1.3489083,
                1.0381116,
                1.1529534,
                1.3423446,
                1.1529534,
                1.2431667,
                0.6688978,
                1.2431667,
                0.6688978,
                -0.971667,
                1.3067437,
                1.3423446,
                1.3069328,
                1.2431667,
                1.3069328,
                1.2434602,
                -0.61490333,
                1.2434602,
                1.3067437,
                1.3422664,
                0.9782858,
                1.3422664,
                0.9782858,
                1.2434602,
                0.6695395,
                1.2434602,
            ],
        ));
        // The output must be the op's own: the gradient goes where the input equals it.
        let y = pool("MaxPool", false, [3, 2], [2, 1], "SAME").input(x.clone()).run(false).unwrap().remove(0);
        pool("MaxPoolGrad", false, [3, 2], [2, 1], "SAME").input(x).input(y).input(wavy([2, 3, 4, 2], 3)).gives(
            tensor(
                [2, 5, 4, 2],
                [
                    0.0f32,
                    1.2756225,
                    0.0,
                    0.0,
                    0.0,
                    0.08402431,
                    -0.3417626,
                    0.0,
                    -0.53771865,
                    0.0,
                    0.0,
                    0.0,
                    0.7281618,
                    0.0,
                    0.0,
                    -1.1287564,
                    0.7455169,
                    0.0,
                    0.0,
                    0.0,
                    0.0,
                    0.0,
                    0.0,
                    0.42609063,
                    0.0,
                    0.0,
                    0.0,
                    0.7670127,
                    0.0,
                    0.0,
                    -1.2154531,
                    0.33276796,
                    0.0,
                    0.0,
                    0.15223134,
                    0.0,
                    0.0,
                    0.0,
                    0.3089133,
                    0.0,
                    0.0,
                    0.0,
                    0.41102517,
                    0.0,
                    0.0,
                    0.0,
                    0.43189505,
                    0.0,
                    0.0,
                    -2.1394994,
                    0.0,
                    0.0,
                    0.0,
                    0.94874984,
                    0.0,
                    1.2500868,
                    0.0,
                    0.0,
                    0.0,
                    0.0,
                    -0.10522461,
                    0.0,
                    0.0,
                    0.0,
                    -1.8501308,
                    0.0,
                    0.0,
                    0.0,
                    0.22247052,
                    0.0,
                    1.3022901,
                    -0.36508948,
                    0.0,
                    0.0,
                    0.0,
                    -0.22498868,
                    0.0,
                    0.0,
                    0.99060494,
                    0.0,
                ],
            ),
        );
    }

    #[test]
    fn both_formats_and_padding() {
        let x = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
        let (rows, planes) = (tensor([1, 3, 3, 1], x), tensor([1, 1, 3, 3], x));
        let y = [5.0f32, 6.0, 8.0, 9.0];
        pool("MaxPool", false, [2, 2], [1, 1], "VALID").input(rows).gives(tensor([1, 2, 2, 1], y));
        pool("MaxPool", true, [2, 2], [1, 1], "VALID").input(planes.clone()).gives(tensor([1, 1, 2, 2], y));
        pool("MaxPool", true, [2, 2], [2, 2], "EXPLICIT")
            .attr("explicit_paddings", vec![0i64, 0, 0, 0, 1, 0, 1, 0])
            .input(planes)
            .gives(tensor([1, 1, 2, 2], [1.0f32, 3.0, 7.0, 9.0]));
        pool("MaxPool", false, [2, 1], [1, 1], "VALID")
            .input(tensor([1, 2, 1, 2], [1i32, -2, 0, 5]))
            .gives(tensor([1, 1, 1, 2], [1i32, 5]));
    }

    #[test]
    fn of_equal_values_the_first_gets_the_gradient() {
        pool("MaxPoolGrad", false, [2, 2], [2, 2], "VALID")
            .input(tensor([1, 2, 2, 1], [3.0f32, 5.0, 5.0, 5.0]))
            .input(tensor([1, 1, 1, 1], [5.0f32]))
            .input(tensor([1, 1, 1, 1], [7.0f32]))
            .gives(tensor([1, 2, 2, 1], [0.0f32, 7.0, 0.0, 0.0]));
    }

    #[test]
    fn where_nothing_is_the_largest_the_first_gets_the_gradient() {
        const N: f32 = f32::NAN;
        let check = |nchw: bool, size: i64, stride: i64, padding: &str, x: Tensor, expected: Tensor| {
            let test = |op| pool(op, nchw, [size; 2], [stride; 2], padding);
            let y = test("MaxPool").input(x.clone()).run(false).unwrap().remove(0);
            let dy: Vec<f32> = vec![1.0; y.n_elements()];
            let dy = Tensor::from_vec(y.shape().clone(), dy).unwrap();
            let dx = test("MaxPoolGrad").input(x).input(y).input(dy).run(false).unwrap();
            assert_eq!(dx, [expected]);
        };
        let square = |n: usize, x: &[f32]| Tensor::from_vec([1, n, n, 1], x.to_vec()).unwrap();
        for nchw in [false, true] {
            let grid = |n: usize, x: &[f32]| match nchw {
                true => Tensor::from_vec([1, 1, n, n], x.to_vec()).unwrap(),
                false => square(n, x),
            };
            check(nchw, 2, 2, "VALID", grid(2, &[N; 4]), grid(2, &[1.0, 0.0, 0.0, 0.0]));
            let all = [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0];
            check(nchw, 2, 1, "VALID", grid(3, &[N; 9]), grid(3, &all));
            let corners = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0];
            check(nchw, 2, 2, "SAME", grid(3, &[N; 9]), grid(3, &corners));
        }
        // A block of channels and some more.
        let mut dx = vec![1.0f32; 18];
        dx.resize(4 * 18, 0.0);
        let wide = |x: Vec<f32>| Tensor::from_vec([1, 2, 2, 18], x).unwrap();
        check(false, 2, 2, "VALID", wide(vec![N; 4 * 18]), wide(dx));
    }

    #[test]
    fn gradients() {
        for nchw in [false, true] {
            pool("MaxPool", nchw, [2, 2], [2, 2], "VALID").input(wavy([2, 4, 5, 3], 1)).gradient();
            pool("MaxPool", nchw, [2, 2], [2, 2], "SAME").input(wavy([2, 4, 6, 2], 1)).gradient();
            // A block of channels and some more.
            pool("MaxPool", nchw, [2, 2], [2, 2], "VALID").input(wavy([1, 4, 2, 18], 1)).gradient();
            pool("MaxPool", nchw, [3, 2], [2, 1], "SAME").input(wavy([2, 4, 5, 3], 1)).gradient();
        }
    }

    #[test]
    fn sizes_zero_and_wrong() {
        let none = |shape: [usize; 4]| tensor::<f32, 4>(shape, []);
        pool("MaxPool", false, [2, 2], [2, 2], "VALID").input(none([0, 4, 4, 3])).gives(none([0, 2, 2, 3]));
        pool("MaxPool", false, [2, 2], [2, 2], "VALID").input(none([2, 4, 4, 0])).gives(none([2, 2, 2, 0]));
        pool("MaxPool", false, [2, 2], [2, 2], "VALID").input(Tensor::from([1.0f32])).fails("should have rank 4");
        pool("MaxPool", false, [5, 2], [1, 2], "VALID").input(wavy([1, 3, 3, 1], 1)).fails("would be negative");
        check_op("MaxPool")
            .attr("ksize", vec![1i64, 1, 1, 2])
            .attr("strides", vec![1i64, 1, 1, 1])
            .attr("padding", "SAME")
            .input(wavy([1, 3, 3, 2], 1))
            .fails("requires the depth window to equal the depth stride");
        pool("MaxPoolGrad", false, [2, 2], [2, 2], "VALID")
            .input(wavy([1, 4, 4, 1], 1))
            .input(wavy([1, 2, 2, 1], 1))
            .input(wavy([1, 2, 1, 1], 1))
            .fails("Expected grad shape to be [1,2,2,1], but got [1,2,1,1]");
    }
}
