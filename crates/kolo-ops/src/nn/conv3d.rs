//! `Conv3D`: a filter slid over volumes, and its gradients `Conv3DBackpropInputV2` and `Conv3DBackpropFilterV2`.
//!
//! For every image and every depth of the output, what lies under the filter is copied to the rows of a matrix, and the
//! convolution is a product with the filter.

use half::{bf16, f16};
use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::{Attrs, Gradient, HalfSafety, InferCtx, OpDef, Output, SplitRule};

use crate::math::binary::first;
use crate::math::matmul::{MatrixElement, Sizes};
use crate::nn::conv2d::{like, shape};
use crate::nn::float::Float;
use crate::nn::window::{Axis, Padding, axis};
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// `filter` (`[depth, height, width, channels before, channels after]`) slid over NDHWC volumes. Padding is `SAME` or
/// `VALID`.
#[track_caller]
pub fn conv3d<'g>(volumes: Output<'g>, filter: Output<'g>, strides: [i64; 3], padding: &str) -> Output<'g> {
    let strides = vec![1, strides[0], strides[1], strides[2], 1];
    volumes.graph().op("Conv3D").inputs([volumes, filter]).attr("strides", strides).attr("padding", padding).out()
}

macro_rules! attrs {
    () => {
        "T:type{half,bfloat16,float,double}, strides:list(int)>=5, padding:string{SAME|VALID}, \
         data_format:string{NDHWC|NCDHW}=\"NDHWC\", dilations:list(int)=[1,1,1,1,1]"
    };
}

pub(crate) static CONV3D: Op = Op {
    def: OpDef {
        name: "Conv3D",
        signature: concat!("(input:T, filter:T) -> (output:T) ; ", attrs!()),
        shape: infer,
        gradient: Gradient::Rule(|op, dy| {
            let (input, filter, dy) = (op.input(0), op.input(1), first(dy)?);
            let dx = like(op, "Conv3DBackpropInputV2").inputs([shape(input), filter, dy]).out();
            let df = like(op, "Conv3DBackpropFilterV2").inputs([input, shape(filter), dy]).out();
            Ok(vec![Some(dx.into()), Some(df.into())])
        }),
        half: HalfSafety::Faster,
        split: SplitRule::Convolution,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

pub(crate) static CONV3D_BACKPROP_INPUT_V2: Op = Op {
    def: OpDef {
        name: "Conv3DBackpropInputV2",
        signature: concat!(
            "(input_sizes:Tshape, filter:T, out_backprop:T) -> (output:T) ; ",
            attrs!(),
            ", Tshape:type{int32,int64}=int32"
        ),
        shape: |ctx| {
            ctx.input_of_rank(1, 5)?;
            ctx.input_of_rank(2, 5)?;
            Ok(vec![ctx.constant_as_shape(0).merge(&PartialShape::of_rank(5))?])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (filter, grad, dy) = (op.input(1), op.input(2), first(dy)?);
            let df = like(op, "Conv3DBackpropFilterV2").inputs([dy, shape(filter), grad]).out();
            let dg = like(op, "Conv3D").inputs([dy, filter]).out();
            Ok(vec![None, Some(df.into()), Some(dg.into())])
        }),
        half: HalfSafety::Faster,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backprop_input: f32, f64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

pub(crate) static CONV3D_BACKPROP_FILTER_V2: Op = Op {
    def: OpDef {
        name: "Conv3DBackpropFilterV2",
        signature: concat!("(input:T, filter_sizes:int32, out_backprop:T) -> (output:T) ; ", attrs!()),
        shape: |ctx| {
            ctx.input_of_rank(0, 5)?;
            ctx.input_of_rank(2, 5)?;
            Ok(vec![ctx.constant_as_shape(1).merge(&PartialShape::of_rank(5))?])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (input, grad, dy) = (op.input(0), op.input(2), first(dy)?);
            let dx = like(op, "Conv3DBackpropInputV2").inputs([shape(input), dy, grad]).out();
            let dg = like(op, "Conv3D").inputs([input, dy]).out();
            Ok(vec![Some(dx.into()), None, Some(dg.into())])
        }),
        half: HalfSafety::Faster,
        split: SplitRule::SumOfExamples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backprop_filter: f32, f64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

/// The three entries for depth, height and width of a list of five.
fn spatial(attrs: &Attrs, name: &str) -> Result<[usize; 3]> {
    let list = attrs.ints(name)?;
    let &[batch, d, h, w, channels] = list.as_slice() else {
        return Err(Error::invalid_argument(format!("Sliding window {name} field must specify 5 dimensions")));
    };
    if batch != 1 || channels != 1 {
        return Err(Error::invalid_argument(format!(
            "Current implementation does not yet support {name} in the batch and depth dimensions."
        )));
    }
    let positive = |size: i64| {
        i32::try_from(size)
            .ok()
            .and_then(|size| usize::try_from(size).ok())
            .filter(|&size| size > 0)
            .ok_or_else(|| Error::invalid_argument(format!("{name} must be positive, found {size}")))
    };
    Ok([positive(d)?, positive(h)?, positive(w)?])
}

/// How the window slides along dimension `d`, for what is known of the sizes.
fn window(attrs: &Attrs) -> Result<impl Fn(usize, usize, usize) -> Result<Axis>> {
    if attrs.str("data_format")? != "NDHWC" {
        return Err(Error::unimplemented("data format NCDHW is not supported on the CPU"));
    }
    let (strides, dilations) = (spatial(attrs, "strides")?, spatial(attrs, "dilations")?);
    let padding = if attrs.str("padding")? == "SAME" { Padding::Same } else { Padding::Valid };
    Ok(move |d: usize, input: usize, kernel: usize| axis(input, kernel, strides[d], dilations[d], padding))
}

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let (input, filter) = (ctx.input_of_rank(0, 5)?, ctx.input_of_rank(1, 5)?);
    let window = window(ctx.attrs())?;
    if let (Some(input), Some(filter)) = (input.dim(4), filter.dim(3)) {
        check_depth(input, filter)?;
    }
    let mut dims: Vec<Dim> = vec![input.dim(0)];
    for d in 0..3 {
        dims.push(match (input.dim(d as isize + 1), filter.dim(d as isize)) {
            (Some(input), Some(kernel)) => Some(window(d, input, kernel)?.output),
            _ => None,
        });
    }
    dims.push(filter.dim(4));
    Ok(vec![PartialShape::new(&dims)])
}

fn check_depth(input: usize, filter: usize) -> Result<()> {
    match input == filter {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!("input depth must equal the filter's: {input} vs {filter}"))),
    }
}

/// A convolution of known sizes.
struct Plan {
    axes: [Axis; 3],
    channels: usize,
    filters: usize,
    output: Shape,
}

impl Plan {
    fn new(attrs: &Attrs, input: &Shape, filter: &Shape) -> Result<Plan> {
        let (&[batch, d, h, w, channels], &[kd, kh, kw, inputs, filters]) = (input.dims(), filter.dims()) else {
            return Err(Error::invalid_argument(format!(
                "input and filter must be 5-dimensional, found {input} and {filter}"
            )));
        };
        check_depth(channels, inputs)?;
        let window = window(attrs)?;
        let axes = [window(0, d, kd)?, window(1, h, kh)?, window(2, w, kw)?];
        let [od, oh, ow] = axes.map(|axis| axis.output);
        Ok(Plan { axes, channels, filters, output: Shape::new(&[batch, od, oh, ow, filters])? })
    }

    /// Rows and columns of the matrix of what lies under the filter, for one depth of the output.
    fn patches(&self) -> Result<(usize, usize)> {
        let [d, h, w] = &self.axes;
        let columns = Shape::new(&[d.kernel, h.kernel, w.kernel, self.channels])?.n_elements();
        let rows = h.output * w.output;
        Shape::new(&[rows, columns])?;
        Ok((rows, columns))
    }

    /// Elements of one volume before.
    fn volume(&self) -> usize {
        self.axes.iter().map(|axis| axis.input).product::<usize>() * self.channels
    }

    /// Calls `f(at, place)` for all taps at depth `od` of the output that are in the volume: where its channels begin in
    /// the matrix, and where in the volume.
    fn for_taps(&self, od: usize, mut f: impl FnMut(usize, usize)) {
        let ([d, h, w], c) = (&self.axes, self.channels);
        for oh in 0..h.output {
            for ow in 0..w.output {
                let row = oh * w.output + ow;
                for kd in d.taps(od) {
                    for kh in h.taps(oh) {
                        for kw in w.taps(ow) {
                            let tap = (row * d.kernel + kd) * h.kernel * w.kernel + kh * w.kernel + kw;
                            let place = (d.at(od, kd) * h.input + h.at(oh, kh)) * w.input + w.at(ow, kw);
                            f(tap * c, place * c);
                        }
                    }
                }
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.output.n_elements() == 0 || self.volume() == 0 || self.axes.iter().any(|axis| axis.kernel == 0)
    }
}

fn forward<T: Float + MatrixElement>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let plan = Plan::new(ctx.attrs(), ctx.input(0)?.shape(), ctx.input(1)?.shape())?;
    let mut out = ctx.allocate_zeroed(T::DTYPE, plan.output.clone())?;
    if !plan.is_empty() {
        let (rows, columns) = plan.patches()?;
        let (input, filter) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?);
        let sizes = Sizes { m: rows, n: plan.filters, k: columns, transpose_a: false, transpose_b: false };
        let mut patches = ctx.scratch(rows.saturating_mul(columns), T::of(0.0), "patches")?;
        let (depth, c) = (plan.axes[0].output, plan.channels);
        for (i, out) in out.data_mut::<T>()?.chunks_exact_mut(rows * plan.filters).enumerate() {
            let volume = &input[i / depth * plan.volume()..][..plan.volume()];
            patches.fill(T::of(0.0));
            plan.for_taps(i % depth, |at, place| patches[at..at + c].copy_from_slice(&volume[place..place + c]));
            T::multiply(ctx.pool(), sizes, &patches, filter, out)?;
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

fn check_grad(found: &Shape, expected: &Shape) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!(
            "out_backprop has shape {found}, but the convolution's output has shape {expected}"
        ))),
    }
}

fn backprop_input<T: Float + MatrixElement>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = Shape::from_signed(&ctx.integers(0)?)?;
    let plan = Plan::new(ctx.attrs(), &shape, ctx.input(1)?.shape())?;
    check_grad(ctx.input(2)?.shape(), &plan.output)?;
    let mut out = ctx.allocate_zeroed(T::DTYPE, shape)?;
    if !plan.is_empty() {
        let (rows, columns) = plan.patches()?;
        let (filter, grad) = (ctx.data::<T>(1)?, ctx.data::<T>(2)?);
        let sizes = Sizes { m: rows, n: columns, k: plan.filters, transpose_a: false, transpose_b: true };
        let mut patches = ctx.scratch(rows.saturating_mul(columns), T::of(0.0), "patches")?;
        let sums = out.data_mut::<T>()?;
        let (depth, c) = (plan.axes[0].output, plan.channels);
        for (i, grad) in grad.chunks_exact(rows * plan.filters).enumerate() {
            T::multiply(ctx.pool(), sizes, grad, filter, &mut patches)?;
            let volume = &mut sums[i / depth * plan.volume()..][..plan.volume()];
            plan.for_taps(i % depth, |at, place| {
                volume[place..place + c].iter_mut().zip(&patches[at..at + c]).for_each(|(sum, &x)| *sum += x);
            });
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

fn backprop_filter<T: Float + MatrixElement>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = Shape::from_signed(&ctx.integers(1)?)?;
    let plan = Plan::new(ctx.attrs(), ctx.input(0)?.shape(), &shape)?;
    check_grad(ctx.input(2)?.shape(), &plan.output)?;
    let mut out = ctx.allocate_zeroed(T::DTYPE, shape)?;
    if !plan.is_empty() {
        let (rows, columns) = plan.patches()?;
        let (input, grad) = (ctx.data::<T>(0)?, ctx.data::<T>(2)?);
        let sizes = Sizes { m: columns, n: plan.filters, k: rows, transpose_a: true, transpose_b: false };
        let mut patches = ctx.scratch(rows.saturating_mul(columns), T::of(0.0), "patches")?;
        let mut product = ctx.scratch(columns.saturating_mul(plan.filters), T::of(0.0), "sums")?;
        let sums = out.data_mut::<T>()?;
        let (depth, c) = (plan.axes[0].output, plan.channels);
        for (i, grad) in grad.chunks_exact(rows * plan.filters).enumerate() {
            let volume = &input[i / depth * plan.volume()..][..plan.volume()];
            patches.fill(T::of(0.0));
            plan.for_taps(i % depth, |at, place| patches[at..at + c].copy_from_slice(&volume[place..place + c]));
            T::multiply(ctx.pool(), sizes, &patches, grad, &mut product)?;
            sums.iter_mut().zip(&product[..]).for_each(|(sum, &x)| *sum += x);
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests;
