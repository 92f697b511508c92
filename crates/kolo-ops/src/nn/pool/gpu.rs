//! `MaxPool`, `AvgPool` and their gradients, in kernels of ours: any padding, both orders of dimensions, and gradients that
//! are gathered rather than scattered, so that a step gives the same numbers each time.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use crate::KernelCtx;
use crate::cuda::columns::reduce_columns;
use crate::cuda::map::{Expression, is_aligned, run};
use crate::cuda::reduce::SUM;
use crate::cuda::{c_type, gpu, zeros};
use crate::fused::map::mapped_sums;
use crate::nn::pool::{Pool, depth_group};
use crate::nn::window::Axis;

const NAMES: [&str; 8] =
    ["max", "max_grad", "avg", "avg_grad", "max_grad_apart", "max_taps", "max_grad_taps", "max_apart"];
pub(crate) const MAX: usize = 0;
const MAX_GRAD: usize = 1;
pub(crate) const AVG: usize = 2;
const AVG_GRAD: usize = 3;
const MAX_GRAD_APART: usize = 4;
/// Two kernels for windows that overlap: which tap was the largest, and then the gradient of those.
const MAX_TAPS: usize = 5;
const MAX_GRAD_TAPS: usize = 6;
const MAX_APART: usize = 7;
/// Most of each size of a window that a kernel is compiled for; three bits of its name.
const MOST_KNOWN: usize = 7;
/// Taps are numbered in a byte, in which this means none.
const NO_TAP: usize = 255;

/// What decides a kernel's text.
#[derive(Clone, Copy, Default)]
struct Form {
    /// Channels of a thread.
    per: usize,
    /// An index may need more than 31 bits.
    is_long: bool,
    /// The gradient of a `Relu` before the pool too.
    relu: bool,
    /// A bias and a `Relu` before the pool.
    bias: bool,
    /// The window, its stride and dilation, down and across, where the kernel is for these only; else zeros.
    window: [usize; 6],
    /// There is one channel.
    is_flat: bool,
}

fn kernel(device: &CudaDevice, kind: usize, dtype: DType, form: Form) -> Result<Function> {
    let sizes = form.window.iter().fold(0, |all, &size| all << 3 | size as u32);
    let variant = form.per as u32 | u32::from(form.is_long) << 5 | u32::from(form.relu) << 6;
    let variant = variant | u32::from(form.bias) << 7 | u32::from(form.is_flat) << 8 | sizes << 9;
    let key = ProgramKey { family: "pool", op: NAMES[kind], dtypes: [Some(dtype), None, None], variant };
    device.function(&key, || source(kind, dtype, form))
}

fn source(kind: usize, dtype: DType, form: Form) -> String {
    let Form { per, is_long, relu, bias, window, is_flat } = form;
    let [tall, broad, step_h, step_w, apart_h, apart_w] = window;
    format!(
        "typedef {} T;\ntypedef Wide<T>::type W;\ntypedef {} N;\n#define INFINITE ((W)__int_as_float(0x7f800000))\n\
         #define KIND {kind}\n#define PER {per}\n#define RELU {}\n#define BIAS {}\n#define TALL {tall}\n#define BROAD {broad}\n\
         #define STEP_H {step_h}\n#define STEP_W {step_w}\n#define APART_H {apart_h}\n#define APART_W {apart_w}\n\
         #define CHANNELS {}\n{}",
        c_type(dtype),
        if is_long { "i64" } else { "i32" },
        u32::from(relu),
        u32::from(bias),
        u32::from(is_flat),
        include_str!("../pool.cu")
    )
}

fn words(axis: &Axis, is_long: bool) -> Vec<u64> {
    let Axis { input, output, kernel, stride, dilation, before } = *axis;
    let all = [input, output, kernel, stride, dilation, before].map(|word| word as u64);
    match is_long {
        true => all.to_vec(),
        // Two to a word, as the structure of 32-bit numbers lies.
        false => all.chunks(2).map(|pair| pair[0] | pair[1] << 32).collect(),
    }
}

/// Whether the windows lie side by side, cover the image, and are few enough elements for one thread.
fn is_apart(pool: &Pool) -> bool {
    let apart = |axis: &Axis| {
        axis.kernel == axis.stride && axis.before == 0 && axis.dilation == 1 && axis.output * axis.stride == axis.input
    };
    apart(&pool.h)
        && apart(&pool.w)
        && pool.h.kernel * pool.w.kernel <= 9
        && pool.h.kernel.max(pool.w.kernel) <= MOST_KNOWN
}

/// Enqueues what a kind of kernel does, over all elements of `out`. A bias is possible only where windows are apart.
fn launch(
    ctx: &KernelCtx<'_>,
    kind: usize,
    inputs: &[&Tensor],
    out: &mut Tensor,
    pool: &Pool,
    form: Form,
) -> Result<()> {
    match (kind, inputs) {
        (MAX, _) if is_apart(pool) => enqueue(ctx, MAX_APART, inputs, out, pool, form),
        (MAX_GRAD, _) if is_apart(pool) => enqueue(ctx, MAX_GRAD_APART, inputs, out, pool, form),
        (MAX_GRAD, &[input, top, grad]) if pool.h.kernel.saturating_mul(pool.w.kernel) < NO_TAP => {
            let mut taps = ctx.allocate(DType::U8, pool.shape.clone())?;
            enqueue(ctx, MAX_TAPS, &[input, top], &mut taps, pool, form)?;
            enqueue(ctx, MAX_GRAD_TAPS, &[&taps, grad], out, pool, form)
        }
        _ => enqueue(ctx, kind, inputs, out, pool, form),
    }
}

/// Enqueues a kernel over all elements of `out`.
fn enqueue(
    ctx: &KernelCtx<'_>,
    kind: usize,
    inputs: &[&Tensor],
    out: &mut Tensor,
    pool: &Pool,
    form: Form,
) -> Result<()> {
    let (device, n) = (gpu(ctx)?, out.n_elements());
    let dtype = if kind == MAX_TAPS { inputs[0].dtype() } else { out.dtype() };
    let most = inputs.iter().map(|tensor| tensor.n_elements()).max().unwrap_or(0).max(n);
    let Pool { channels, h, w, .. } = pool;
    // Padding and reach are added to indices.
    let reach = |axis: &Axis| axis.input + axis.output * axis.stride + axis.kernel * axis.dilation;
    let is_long = most > (1 << 30) || reach(h).max(reach(w)) > (1 << 30);
    let mut per = if matches!(kind, MAX_GRAD | AVG_GRAD) { 1 } else { 16 / dtype.size().unwrap_or(16) };
    // Of planes, pixels of a row; then only what is written is packed.
    let is_plane = kind == MAX_GRAD_TAPS && *channels == 1;
    let is_packed = |per: usize| match is_plane {
        true => w.input.is_multiple_of(per) && is_aligned(out, per),
        false => channels % per == 0 && inputs.iter().copied().chain([&*out]).all(|x| is_aligned(x, per)),
    };
    while per > 1 && !is_packed(per) {
        per /= 2;
    }
    let window = [h.kernel, w.kernel, h.stride, w.stride, h.dilation, w.dilation];
    // Sizes that a kernel knows save most of its divisions. Kernels for windows side by side have to know them.
    let is_known = window.iter().all(|&size| size <= MOST_KNOWN) || matches!(kind, MAX_APART | MAX_GRAD_APART);
    let window = if is_known { window } else { [0; 6] };
    let kernel = kernel(device, kind, dtype, Form { per, is_long, window, is_flat: *channels == 1, ..form })?;
    let n_items = if kind == MAX_GRAD_APART { n / (h.kernel * w.kernel) / per } else { n / per };
    let args = inputs.iter().fold(Args::new(), |args, &tensor| args.input(tensor)).output(out);
    let args = args.size(n).size(*channels).words(&words(h, is_long)).words(&words(w, is_long));
    device.launch(kernel, Grid::over(n_items), &args)
}

fn no_depth(ctx: &KernelCtx<'_>, shape: &Shape) -> Result<()> {
    match depth_group(ctx.attrs(), shape)? {
        Some(_) => Err(Error::unimplemented("a GPU does not pool across channels; place the op on a CPU")),
        None => Ok(()),
    }
}

pub(crate) fn forward(ctx: &mut KernelCtx<'_>, kind: usize) -> Result<()> {
    let input = ctx.input(0)?;
    no_depth(ctx, input.shape())?;
    let pool = Pool::new(ctx.attrs(), input.shape())?;
    let mut out = ctx.allocate(input.dtype(), pool.shape.clone())?;
    if out.n_elements() > 0 {
        launch(ctx, kind, &[input], &mut out, &pool, Form::default())?;
    }
    ctx.set_output(0, out);
    Ok(())
}

fn check(name: &str, found: &Shape, pool: &Pool) -> Result<()> {
    match *found == pool.shape {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!("Expected {name} shape to be {}, but got {found}", pool.shape))),
    }
}

pub(crate) fn max_backward(ctx: &mut KernelCtx<'_>, relu: bool) -> Result<()> {
    let input = ctx.input(0)?;
    no_depth(ctx, input.shape())?;
    let pool = Pool::new(ctx.attrs(), input.shape())?;
    check("orig_output", ctx.input(1)?.shape(), &pool)?;
    check("grad", ctx.input(2)?.shape(), &pool)?;
    let inputs = [input, ctx.input(1)?, ctx.input(2)?];
    backward(ctx, MAX_GRAD, &inputs, input.shape().clone(), &pool, Form { relu, ..Form::default() })
        .map(|out| ctx.set_output(0, out))
}

/// Relu of the input with its bias, which must fit.
const BIAS_RELU: Expression = Expression { name: "bias_relu", text: "x0 + x1 < (W)0 ? (W)0 : x0 + x1" };

fn check_bias(ctx: &KernelCtx<'_>, pool: &Pool) -> Result<()> {
    let (input, bias) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
    match *bias.dims() == [pool.channels] && input.last() == Some(&pool.channels) {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!(
            "Must provide as many biases as the last dimension of the input tensor: {bias} vs. {input}"
        ))),
    }
}

/// `MaxPool` of `Relu` of the input with a bias.
pub(crate) fn biased_forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, bias) = (ctx.input(0)?, ctx.input(1)?);
    no_depth(ctx, input.shape())?;
    let pool = Pool::new(ctx.attrs(), input.shape())?;
    check_bias(ctx, &pool)?;
    let mut out = ctx.allocate(input.dtype(), pool.shape.clone())?;
    if out.n_elements() == 0 || input.n_elements() == 0 {
        ctx.device.fill(&mut out, 0)?;
    } else if is_apart(&pool) {
        launch(ctx, MAX, &[input, bias], &mut out, &pool, Form { bias: true, ..Form::default() })?;
    } else {
        let mut seen = ctx.allocate(input.dtype(), input.shape().clone())?;
        run(gpu(ctx)?, BIAS_RELU, &[Some(input), Some(bias)], &mut seen, &[])?;
        launch(ctx, MAX, &[&seen], &mut out, &pool, Form::default())?;
    }
    ctx.set_output(0, out);
    Ok(())
}

/// The gradients of [`biased_forward`] with respect to its input and its bias.
pub(crate) fn biased_backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, bias, top, grad) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?, ctx.input(3)?);
    no_depth(ctx, input.shape())?;
    let pool = Pool::new(ctx.attrs(), input.shape())?;
    check_bias(ctx, &pool)?;
    check("orig_output", top.shape(), &pool)?;
    check("grad", grad.shape(), &pool)?;
    let (dtype, shape, channels) = (input.dtype(), input.shape().clone(), pool.channels);
    let mut sums = ctx.allocate(dtype, Shape::new(&[channels])?)?;
    let form = Form { relu: true, ..Form::default() };
    let out = if pool.shape.n_elements() == 0 || shape.n_elements() == 0 {
        ctx.device.fill(&mut sums, 0)?;
        zeros(ctx, dtype, shape)?
    } else if is_apart(&pool) {
        // One element of each window has all of its gradient: what is summed is a window's, if the window is positive.
        mapped_sums(ctx, "ReluGrad", &[grad, top], channels, &mut sums)?;
        backward(ctx, MAX_GRAD, &[input, bias, grad], shape, &pool, Form { bias: true, ..form })?
    } else {
        let mut seen = ctx.allocate(dtype, shape.clone())?;
        run(gpu(ctx)?, BIAS_RELU, &[Some(input), Some(bias)], &mut seen, &[])?;
        let out = backward(ctx, MAX_GRAD, &[&seen, top, grad], shape, &pool, form)?;
        reduce_columns(ctx, &SUM, &[&out], None, (out.n_elements() / channels, channels), &mut sums)?;
        out
    };
    ctx.set_output(0, out);
    ctx.set_output(1, sums);
    Ok(())
}

pub(crate) fn avg_backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = Shape::from_signed(&ctx.integers(0)?)?;
    let pool = Pool::new(ctx.attrs(), &shape)?;
    let grad = ctx.input(1)?;
    check("grad", grad.shape(), &pool)?;
    backward(ctx, AVG_GRAD, &[grad], shape, &pool, Form::default()).map(|out| ctx.set_output(0, out))
}

fn backward(
    ctx: &KernelCtx<'_>,
    kind: usize,
    inputs: &[&Tensor],
    shape: Shape,
    pool: &Pool,
    form: Form,
) -> Result<Tensor> {
    if pool.shape.n_elements() == 0 || shape.n_elements() == 0 {
        return zeros(ctx, inputs[0].dtype(), shape);
    }
    let mut out = ctx.allocate(inputs[0].dtype(), shape)?;
    launch(ctx, kind, inputs, &mut out, pool, form)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::FLOATS;

    #[test]
    fn sources_compile() {
        let all = FLOATS.iter().flat_map(|&dtype| {
            NAMES.iter().enumerate().flat_map(move |(kind, op)| {
                [(false, false), (true, false), (true, true)].map(|(is_long, bias)| {
                    let key = ProgramKey { family: "pool", op, dtypes: [Some(dtype), None, None], variant: 0 };
                    let per = if matches!(kind, MAX_GRAD | AVG_GRAD) { 1 } else { 16 / dtype.size().unwrap_or(16) };
                    (
                        key,
                        source(
                            kind,
                            dtype,
                            Form { per, is_long, relu: is_long, bias, window: [2, 3, 2, 3, 1, 1], is_flat: bias },
                        ),
                    )
                })
            })
        });
        crate::cuda::tests::compiles(all);
    }
}
