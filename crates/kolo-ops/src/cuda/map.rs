//! Elementwise kernels: one expression of up to four inputs, broadcast against each other, as generated CUDA C++.
//!
//! Inputs that are as large as the output, or one element, take the flat loop, whose loads are 16 bytes wide where the
//! addresses allow. Others take the strided loop over up to eight dimensions, neighbours merged.

use kolo_core::{DType, Error, Result, Shape, Tensor, TensorData};
use kolo_device::cuda::{Args, CudaDevice, Grid, ProgramKey};
use smallvec::SmallVec;

use super::{c_type, gpu};
use crate::KernelCtx;
use crate::math::elementwise::broadcast_shape;

/// An expression over elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expression {
    /// Its name; with the element types it names the kernel.
    pub name: &'static str,
    /// CUDA C++: the value, from `x0`, `x1`, … of type `W` (the inputs, widened) and `p0`, `p1` (floats). `T` is the
    /// inputs' type and `U` the output's.
    pub text: &'static str,
}

/// The input as it is, broadcast to the output.
pub(crate) const COPY: Expression = Expression { name: "copy", text: "x0" };

/// Most inputs.
const MAX_INPUTS: usize = 4;
/// Most dimensions of the strided loop.
pub(crate) const RANK: usize = 8;

/// Output 0 becomes the expression of all inputs (all of one dtype), in the memory of one that dies here if possible.
pub(crate) fn map_inputs(ctx: &mut KernelCtx<'_>, expression: Expression, out: DType, params: &[f32]) -> Result<()> {
    let n = ctx.n_inputs();
    let mut shape = ctx.input(0)?.shape().clone();
    for i in 1..n {
        let other = ctx.input(i)?.shape();
        if *other != shape {
            shape = broadcast_shape(&shape, other)?;
        }
    }
    map_to(ctx, expression, out, shape, params)
}

/// As [`map_inputs`], to an output of a given shape that all inputs broadcast to.
pub(crate) fn map_to(
    ctx: &mut KernelCtx<'_>,
    expression: Expression,
    out: DType,
    shape: Shape,
    params: &[f32],
) -> Result<()> {
    let n = ctx.n_inputs();
    let mut output = None;
    for i in 0..n {
        if ctx.input(i)?.dtype() == out && *ctx.input(i)?.shape() == shape {
            let (tensor, reused) = ctx.reuse_or_allocate(i, out, shape.clone())?;
            if reused {
                output = Some((tensor, Some(i)));
                break;
            }
            // The tensor that was allocated in vain serves as the output, unless a later input dies here.
            output = Some((tensor, None));
        }
    }
    let (mut output, reused) = match output {
        Some(found) => found,
        None => (ctx.allocate(out, shape)?, None),
    };
    let device = gpu(ctx)?;
    let inputs: SmallVec<[Option<&Tensor>; MAX_INPUTS]> =
        (0..n).map(|i| if reused == Some(i) { Ok(None) } else { ctx.input(i).map(Some) }).collect::<Result<_>>()?;
    run(device, expression, &inputs, &mut output, params)?;
    drop(inputs);
    ctx.set_output(0, output);
    Ok(())
}

/// Enqueues the expression. An input of `None` is the output itself, before it is written.
pub(crate) fn run(
    device: &CudaDevice,
    expression: Expression,
    inputs: &[Option<&Tensor>],
    output: &mut Tensor,
    params: &[f32],
) -> Result<()> {
    let n = output.n_elements();
    if n == 0 {
        return Ok(());
    }
    if inputs.len() > MAX_INPUTS {
        return Err(Error::internal(format!("{} inputs of an elementwise kernel", inputs.len())));
    }
    let out = output.dtype();
    let dtype = inputs.iter().flatten().map(|tensor| tensor.dtype()).next().unwrap_or(out);
    let is_flat = inputs.iter().flatten().all(|tensor| tensor.n_elements() == n || tensor.n_elements() == 1);
    let mut variant = inputs.len() as u32 | (params.len() as u32) << 4;
    let shape = output.shape().clone();
    let walk = if is_flat { None } else { Some(strides(&shape, inputs)?) };
    let width = match is_flat {
        true => 16 / dtype.size().unwrap_or(16).max(out.size().unwrap_or(16)).max(1),
        false => 1,
    };
    let aligned = inputs.iter().flatten().all(|tensor| tensor.n_elements() == 1 || is_aligned(tensor, width))
        && is_aligned(output, width);
    let width = if aligned && n >= width { width.max(1) } else { 1 };
    match &walk {
        None => {
            variant |= (width as u32) << 8;
            for (i, tensor) in inputs.iter().enumerate() {
                // One element: read once and kept.
                if n > 1 && tensor.is_some_and(|tensor| tensor.n_elements() == 1) {
                    variant |= 1 << (16 + i);
                }
            }
        }
        Some(walk) => variant |= 1 << 24 | (walk.sizes.len() as u32) << 8,
    }
    let key = ProgramKey { family: "map", op: expression.name, dtypes: [Some(dtype), Some(out), None], variant };
    let rank = walk.as_ref().map_or(0, |walk| walk.sizes.len());
    let kernel = device.function(&key, || source(expression.text, dtype, out, variant, rank))?;
    let mut args = Args::new();
    for tensor in inputs {
        args = match tensor {
            Some(tensor) => args.input(tensor),
            // The kernel reads its output's old value instead.
            None => args.i64(0),
        };
    }
    args = args.output(output).size(n);
    for &param in params {
        args = args.f32(param);
    }
    if let Some(walk) = &walk {
        args = args.sizes(&walk.sizes, RANK);
        for steps in &walk.steps {
            args = args.sizes(steps, RANK);
        }
    }
    device.launch(kernel, Grid::over(n.div_ceil(width)), &args)
}

/// Whether a tensor begins where a load of `width` elements may.
pub(crate) fn is_aligned(tensor: &Tensor, width: usize) -> bool {
    let bytes = width * tensor.dtype().size().unwrap_or(1);
    match tensor.storage() {
        // Buffers on a GPU begin at multiples of 256 bytes.
        TensorData::Buffer { offset, .. } => offset % bytes.max(1) == 0,
        _ => false,
    }
}

pub(crate) struct Strides {
    pub sizes: SmallVec<[i64; RANK]>,
    /// For each input, its step along each size.
    pub steps: SmallVec<[SmallVec<[i64; RANK]>; MAX_INPUTS]>,
}

/// Sizes, innermost last, and each input's steps along them; neighbours that all inputs walk alike are merged.
pub(crate) fn strides(shape: &Shape, inputs: &[Option<&Tensor>]) -> Result<Strides> {
    let rank = shape.rank();
    let steps_of = |tensor: Option<&Tensor>| -> SmallVec<[i64; RANK]> {
        let dims = tensor.map_or(shape.dims(), |tensor| tensor.shape().dims());
        let mut steps = SmallVec::from_elem(0i64, rank);
        let mut step = 1i64;
        for i in (0..dims.len()).rev() {
            steps[i + rank - dims.len()] = if dims[i] == 1 { 0 } else { step };
            step *= dims[i] as i64;
        }
        steps
    };
    let all: SmallVec<[SmallVec<[i64; RANK]>; MAX_INPUTS]> = inputs.iter().map(|&tensor| steps_of(tensor)).collect();
    let mut sizes: SmallVec<[i64; RANK]> = SmallVec::new();
    let mut steps: SmallVec<[SmallVec<[i64; RANK]>; MAX_INPUTS]> = all.iter().map(|_| SmallVec::new()).collect();
    for i in (0..rank).filter(|&i| shape[i] != 1) {
        let n = shape[i] as i64;
        let merges = !sizes.is_empty()
            && all.iter().zip(&steps).all(|(all, steps)| steps.last().is_some_and(|&last| last == all[i] * n));
        if merges && let Some(size) = sizes.last_mut() {
            *size *= n;
            steps.iter_mut().zip(&all).for_each(|(steps, all)| {
                if let Some(last) = steps.last_mut() {
                    *last = all[i];
                }
            });
        } else {
            sizes.push(n);
            steps.iter_mut().zip(&all).for_each(|(steps, all)| steps.push(all[i]));
        }
    }
    if sizes.len() > RANK {
        return Err(Error::unimplemented(format!(
            "a GPU broadcasts over at most {RANK} dimensions that cannot be merged; {shape} has {}",
            sizes.len()
        )));
    }
    Ok(Strides { sizes, steps })
}

/// The kernel's text. See [`run`] for the bits of `variant`.
pub(crate) fn source(text: &str, dtype: DType, out: DType, variant: u32, rank: usize) -> String {
    let (n_inputs, n_params) = (variant & 15, variant >> 4 & 15);
    let is_strided = variant >> 24 & 1 == 1;
    let width = if is_strided { 1 } else { variant >> 8 & 255 };
    let list = |f: &dyn Fn(u32) -> String, n: u32, between: &str| (0..n).map(f).collect::<Vec<_>>().join(between);
    let pointers = list(&|i| format!("const T* in{i}"), n_inputs, ", ");
    let params: String = (0..n_params).map(|i| format!(", float p{i}")).collect();
    // There may be no inputs at all.
    let pointers = if n_inputs == 0 { pointers } else { pointers + ", " };
    let arguments: Vec<String> =
        (0..n_inputs).map(|i| format!("W x{i}")).chain((0..n_params).map(|i| format!("float p{i}"))).collect();
    let arguments = arguments.join(", ");
    let call = |values: Vec<String>| -> String {
        values.into_iter().chain((0..n_params).map(|i| format!("p{i}"))).collect::<Vec<_>>().join(", ")
    };
    let mut code = format!(
        "typedef {} T;\ntypedef {} U;\ntypedef Wide<T>::type W;\n\
         static __device__ __forceinline__ U element({arguments}) {{ return Narrow<U>::from({text}); }}\n",
        c_type(dtype),
        c_type(out)
    );
    // An input that is the output comes as a null pointer.
    let open: String = (0..n_inputs).map(|i| format!("    if (in{i} == nullptr) in{i} = (const T*)out;\n")).collect();
    if is_strided {
        let steps = list(&|i| format!("Sizes s{i}"), n_inputs, ", ");
        let offsets = list(&|i| format!("i64 o{i} = 0;"), n_inputs, " ");
        let walk = list(&|i| format!("o{i} += c * s{i}.at[d];"), n_inputs, " ");
        let values = call((0..n_inputs).map(|i| format!("widen(in{i}[o{i}])")).collect());
        code += &format!(
            "struct Sizes {{ i64 at[{RANK}]; }};\n\
             extern \"C\" __global__ void KOLO_ENTRY({pointers}U* out, i64 n{params}, Sizes sizes, {steps}) {{\n{open}\
             \x20   for (i64 i = thread_number(); i < n; i += n_threads()) {{\n\
             \x20       i64 rest = i; {offsets}\n        #pragma unroll\n\
             \x20       for (int d = {rank} - 1; d >= 0; d--) {{\n\
             \x20           i64 c;\n\
             \x20           if (n < 0x7fffffff) {{ u32 s = (u32)sizes.at[d], r = (u32)rest; c = r % s; rest = r / s; }}\n\
             \x20           else {{ c = rest % sizes.at[d]; rest /= sizes.at[d]; }}\n\
             \x20           {walk}\n        }}\n\
             \x20       out[i] = element({values});\n    }}\n}}\n"
        );
        return code;
    }
    let is_single = |i: u32| variant >> (16 + i) & 1 == 1;
    let singles: String =
        (0..n_inputs).filter(|&i| is_single(i)).map(|i| format!("    const W c{i} = widen(in{i}[0]);\n")).collect();
    let loads: String = (0..n_inputs)
        .filter(|&i| !is_single(i))
        .map(|i| format!("        Pack<T, {width}> a{i} = ((const Pack<T, {width}>*)in{i})[i];\n"))
        .collect();
    let one = |i: u32, other: String| if is_single(i) { format!("c{i}") } else { other };
    let packed = call((0..n_inputs).map(|i| one(i, format!("widen(a{i}.at[j])"))).collect());
    let plain = call((0..n_inputs).map(|i| one(i, format!("widen(in{i}[i])"))).collect());
    code += &format!(
        "extern \"C\" __global__ void KOLO_ENTRY({pointers}U* out, i64 n{params}) {{\n{open}{singles}\
         \x20   const i64 packs = n / {width};\n\
         \x20   for (i64 i = thread_number(); i < packs; i += n_threads()) {{\n{loads}\
         \x20       Pack<U, {width}> b;\n        #pragma unroll\n\
         \x20       for (int j = 0; j < {width}; j++) b.at[j] = element({packed});\n\
         \x20       ((Pack<U, {width}>*)out)[i] = b;\n    }}\n\
         \x20   for (i64 i = packs * {width} + thread_number(); i < n; i += n_threads())\n\
         \x20       out[i] = element({plain});\n}}\n"
    );
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dims: &[usize]) -> Tensor {
        Tensor::zeros(DType::F32, Shape::new(dims).unwrap()).unwrap()
    }

    #[test]
    fn neighbours_merge_and_broadcast_sizes_stand_still() {
        let shape = Shape::new(&[2, 3, 4, 5]).unwrap();
        let (a, b) = (tensor(&[2, 3, 4, 5]), tensor(&[4, 5]));
        let walk = strides(&shape, &[Some(&a), Some(&b)]).unwrap();
        assert_eq!(walk.sizes.as_slice(), [6, 20]);
        assert_eq!(walk.steps[0].as_slice(), [20, 1]);
        assert_eq!(walk.steps[1].as_slice(), [0, 1]);
        let column = tensor(&[2, 3, 1, 1]);
        let walk = strides(&shape, &[Some(&column), None]).unwrap();
        assert_eq!((walk.sizes.as_slice(), walk.steps[0].as_slice()), (&[6, 20][..], &[1, 0][..]));
    }

    #[test]
    fn sources_name_what_they_use() {
        let flat = source("x0 + x1", DType::F32, DType::F32, 2 | 4 << 8 | 1 << 17, 0);
        assert!(flat.contains("const W c1") && flat.contains("Pack<T, 4> a0") && !flat.contains("a1"), "{flat}");
        let strided = source("x0 * p0", DType::F16, DType::F32, 1 | 1 << 4 | 1 << 24, 3);
        assert!(strided.contains("float p0, Sizes sizes, Sizes s0") && strided.contains("d = 3 - 1"), "{strided}");
    }
}
