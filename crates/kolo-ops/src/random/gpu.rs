//! Random numbers: the same Philox streams as on a CPU, so the same seeds give the same numbers (up to the last bit of
//! sine and logarithm).

use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::cuda::{Args, Grid, ProgramKey};

use crate::cuda::{c_type, gpu};
use crate::kernel::KernelInit;
use crate::random::philox::Philox;
use crate::random::shape_in;
use crate::random::stream::Stream;
use crate::{Kernel, KernelCtx};

const NAMES: [&str; 3] = ["uniform", "normal", "truncated"];

pub(crate) struct Random {
    stream: Stream,
    kind: usize,
    dtype: DType,
}

impl Random {
    pub(crate) fn make(init: &KernelInit<'_>, kind: usize) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(Random { stream: Stream::new(init)?, kind, dtype: init.attrs().dtype("dtype")? }))
    }
}

impl Kernel for Random {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let mut out = ctx.allocate(self.dtype, shape_in(ctx)?)?;
        let start = self.stream.reserve_outputs(out.n_elements());
        fill(ctx, &mut out, self.kind, start)?;
        ctx.set_output(0, out);
        Ok(())
    }
}

pub(crate) fn stateless(ctx: &mut KernelCtx<'_>, kind: usize) -> Result<()> {
    let seeds = ctx.integers(1)?;
    let &[first, second] = seeds.as_slice() else {
        let found = ctx.input(1)?.shape();
        return Err(Error::invalid_argument(format!("seed must have shape [2], not {found}")));
    };
    let mut out = ctx.allocate(ctx.attrs().dtype("dtype")?, shape_in(ctx)?)?;
    fill(ctx, &mut out, kind, Philox::from_stateless_seeds([first as u64, second as u64]))?;
    ctx.set_output(0, out);
    Ok(())
}

fn fill(ctx: &KernelCtx<'_>, out: &mut Tensor, kind: usize, start: Philox) -> Result<()> {
    let n = out.n_elements();
    if n == 0 {
        return Ok(());
    }
    let (dtype, device) = (out.dtype(), gpu(ctx)?);
    let key = ProgramKey { family: "random", op: NAMES[kind], dtypes: [Some(dtype), None, None], variant: 0 };
    let kernel = device.function(&key, || source(kind, dtype))?;
    let (counter, key) = start.parts();
    let position = [counter as u64, (counter >> 64) as u64, u64::from(key[0]) | u64::from(key[1]) << 32];
    let per_thread = if dtype == DType::F64 { 2 } else { 4 };
    device.launch(kernel, Grid::over(n.div_ceil(per_thread)), &Args::new().output(out).size(n).words(&position))
}

fn source(kind: usize, dtype: DType) -> String {
    format!(
        "typedef {} T;\n#define KIND {kind}\n#define IS_DOUBLE {}\n{}",
        c_type(dtype),
        u32::from(dtype == DType::F64),
        include_str!("random.cu")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::FLOATS;

    #[test]
    fn sources_compile() {
        let all = FLOATS.iter().flat_map(|&dtype| {
            NAMES.iter().enumerate().map(move |(kind, op)| {
                let key = ProgramKey { family: "random", op, dtypes: [Some(dtype), None, None], variant: 0 };
                (key, source(kind, dtype))
            })
        });
        crate::cuda::tests::compiles(all);
    }
}
