//! Products of matrices with a narrow side, such as the last layer of a classifier, in kernels of ours: a library made for large
//! tiles takes many times as long as the memory needs to be read once.

use kolo_core::{DType, Result, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Epilogue, Grid, MatMul, ProgramKey};

use crate::cuda::c_type;
use crate::cuda::map::is_aligned;

/// Most numbers of the narrow side.
const MOST: usize = 16;
/// From this inner size on, of a product that is summed by blocks alone, the library has more blocks.
const LONGEST: usize = 1 << 14;
const NAMES: [&str; 3] = ["columns", "columns_turned", "inner"];

/// What decides a kernel's text.
#[derive(Clone, Copy)]
struct Form {
    kind: usize,
    side: usize,
    rows: usize,
    width: usize,
    turned: bool,
    bias: bool,
    relu: bool,
}

fn source(dtype: DType, form: Form) -> String {
    let Form { kind, side, rows, width, turned, bias, relu } = form;
    format!(
        "typedef {} T;\n#define KIND {kind}\n#define SIDE {side}\n#define ROWS {rows}\n#define WIDTH {width}\n\
         #define TURNED {turned}\n#define BIAS {bias}\n#define RELU {relu}\n{}",
        c_type(dtype),
        include_str!("narrow.cu")
    )
}

/// Which kernel is for a product, and its narrow side; `None` if the library's are.
fn kind(call: &MatMul) -> Option<(usize, usize)> {
    let is_plain = call.batch == 1 && !call.adds && matches!(call.dtype, DType::F32 | DType::F16 | DType::BF16);
    if !is_plain || [call.m, call.n, call.k].contains(&0) {
        return None;
    }
    match (call.n <= MOST, call.k <= MOST) {
        (true, false) if !call.transpose_a && call.k <= LONGEST => Some((0, call.n)),
        (true, false) if !call.transpose_b && call.k <= LONGEST && call.epilogue == Epilogue::None => Some((1, call.n)),
        (_, true) if !call.transpose_a => Some((2, call.k)),
        _ => None,
    }
}

/// Enqueues a product if it is narrow; says whether it did. The tensors fit the call.
pub(crate) fn narrow(
    device: &CudaDevice,
    call: &MatMul,
    (a, b): (&Tensor, &Tensor),
    bias: Option<&Tensor>,
    out: &mut Tensor,
) -> Result<bool> {
    let Some((kind, side)) = kind(call) else { return Ok(false) };
    let MatMul { m, n, k, .. } = *call;
    let packed = |n: usize, tensor: &Tensor| {
        let mut width = 16 / call.dtype.size().unwrap_or(16);
        while width > 1 && !(n.is_multiple_of(width) && is_aligned(tensor, width)) {
            width /= 2;
        }
        width
    };
    let busy = device.multiprocessors();
    let (rows, width, grid) = match kind {
        0 => {
            let width = packed(k, a).min(4);
            let rows = [8, 4, 2].into_iter().find(|rows| m / rows >= busy / 2).unwrap_or(1);
            let threads = (k / width).next_multiple_of(32).clamp(32, 256);
            (rows, width, Grid::blocks(m.div_ceil(rows), threads)?)
        }
        1 => (1, 1, Grid::blocks(m.div_ceil(32), 512)?),
        _ => {
            let width = packed(n, out).min(4);
            let threads = (n / width).next_multiple_of(32).clamp(32, 256);
            let wide = (n / width).div_ceil(threads);
            let rows = [16, 8, 4, 2].into_iter().find(|rows| m / rows * wide >= busy * 2).unwrap_or(1);
            let (wide, tall) = (u32::try_from(wide), u32::try_from(m.div_ceil(rows)));
            // More rows than a grid is tall are the library's.
            let (Ok(wide), Ok(tall @ 1..=65_535)) = (wide, tall) else { return Ok(false) };
            (rows, width, Grid { blocks: [wide, tall, 1], threads: [threads as u32, 1, 1], shared: 0 })
        }
    };
    let form = Form {
        kind,
        side,
        rows,
        width,
        turned: call.transpose_b,
        bias: bias.is_some(),
        relu: call.epilogue == Epilogue::BiasRelu,
    };
    let variant = side | rows << 5 | width << 10 | usize::from(form.turned) << 13;
    let variant = variant | usize::from(form.bias) << 14 | usize::from(form.relu) << 15;
    let dtypes = [Some(call.dtype), None, None];
    let key = ProgramKey { family: "narrow", op: NAMES[kind], dtypes, variant: variant as u32 };
    let kernel = device.function(&key, || source(call.dtype, form))?;
    let args = Args::new().input(a).input(b).input(bias.unwrap_or(a)).output(out);
    device.launch(kernel, grid, &args.size(m).size(if kind == 2 { n } else { k }))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let all = [DType::F32, DType::F16, DType::BF16].into_iter().flat_map(|dtype| {
            (0..NAMES.len()).flat_map(move |kind| {
                [(1, 1, 1, false), (10, 8, 4, true), (16, 4, 2, false)].map(|(side, rows, width, turned)| {
                    let key =
                        ProgramKey { family: "narrow", op: NAMES[kind], dtypes: [Some(dtype), None, None], variant: 0 };
                    (key, source(dtype, Form { kind, side, rows, width, turned, bias: turned, relu: turned }))
                })
            })
        });
        crate::cuda::tests::compiles(all);
    }
}
