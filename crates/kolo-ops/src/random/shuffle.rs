//! `RandomShuffle`: the rows of a tensor in random order.

use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::cpu::{looking, looking_by};
use kolo_graph::{Effects, Gradient, OpDef, Output, shape_fns};

use crate::op::{Gpu, Op, cpu_made};
use crate::random::philox::Words;
use crate::random::stream::Stream;
use crate::{Cost, Kernel, KernelCtx, KernelInit, KernelMaker};

/// The rows of `value` (its slices along dimension 0) in random order.
#[track_caller]
pub fn random_shuffle(value: Output<'_>, seed: Option<i64>) -> Output<'_> {
    let (seed, seed2) = value.graph().op_seeds(seed);
    value.graph().op("RandomShuffle").input(value).attr("seed", seed).attr("seed2", seed2).out()
}

pub(crate) static RANDOM_SHUFFLE: Op = Op {
    def: OpDef {
        name: "RandomShuffle",
        signature: "(value:T) -> (output:T) ; seed:int=0, seed2:int=0, T:type",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Refused("the order is not an output, so a gradient cannot follow it"),
        stateful: true,
        effects: Effects::Random,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|init: &KernelInit<'_>| {
        Ok(Box::new(RandomShuffle { stream: Stream::new(init)? }))
    }))],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

struct RandomShuffle {
    stream: Stream,
}

impl Kernel for RandomShuffle {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let input = ctx.take_input(0)?;
        let n_rows = input.shape().first().copied().unwrap_or(1);
        if n_rows <= 1 || input.n_elements() <= 1 {
            ctx.set_output(0, input);
            return Ok(());
        }
        let n_draws = n_rows as u64 - 1;
        let mut words = Words::new(self.stream.reserve(n_draws.div_ceil(4)));
        let mut order = ctx.scratch(n_rows, 0usize, "rows")?;
        looking(order.iter_mut().enumerate()).for_each(|(i, row)| *row = i);
        for i in looking(0..n_rows - 1) {
            // A tensor of more than 2³² rows would not be shuffled evenly; TensorFlow's neither.
            let left = u32::try_from(n_rows - i).unwrap_or(u32::MAX);
            order.swap(i, i + (words.draw() % left) as usize);
        }
        let output = gather_rows(ctx, &input, &order)?;
        ctx.set_output(0, output);
        Ok(())
    }
}

/// Rows `order` of `input`.
fn gather_rows(ctx: &KernelCtx<'_>, input: &Tensor, order: &[usize]) -> Result<Tensor> {
    let row = input.n_elements() / order.len();
    if input.dtype() == DType::Str {
        let strings = input.strings()?;
        let mut shuffled = ctx.strings(input.n_elements())?;
        shuffled.extend(looking(order.iter().flat_map(|&i| &strings[i * row..(i + 1) * row])).cloned());
        return ctx.string_tensor(input.shape().clone(), shuffled);
    }
    let Some(size) = input.dtype().size() else {
        return Err(Error::unimplemented(format!("RandomShuffle does not work on {}", input.dtype())));
    };
    let n_bytes = row * size;
    let mut out = ctx.allocate(input.dtype(), input.shape().clone())?;
    let from = input.host_bytes()?;
    for (to, &i) in looking_by(n_bytes, out.host_bytes_mut()?.chunks_mut(n_bytes).zip(order)) {
        to.copy_from_slice(&from[i * n_bytes..(i + 1) * n_bytes]);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::random::testing::run_twice;
    use crate::testing::{check_op, tensor};

    #[test]
    fn orders_are_tensorflows() {
        let seeds = [("seed", 5i64.into()), ("seed2", 6i64.into())];
        let found = run_twice("RandomShuffle", &seeds, &[Tensor::vector((0..13).collect::<Vec<i32>>())]);
        assert_eq!(found[0], Tensor::from([0i32, 8, 12, 6, 1, 2, 5, 11, 3, 9, 7, 4, 10]));
        assert_eq!(found[1], Tensor::from([12i32, 1, 5, 11, 3, 9, 10, 4, 0, 7, 6, 8, 2]));
        let rows = tensor([7, 2], (0..14).map(|i| i as f32).collect::<Vec<f32>>());
        let found = run_twice("RandomShuffle", &seeds, &[rows]);
        assert_eq!(found[0].data::<f32>().unwrap()[..6], [6.0, 7.0, 4.0, 5.0, 0.0, 1.0]);
    }

    #[test]
    fn little_or_nothing_to_shuffle() {
        check_op("RandomShuffle").input(3.5f32).gives(3.5f32);
        check_op("RandomShuffle").input(tensor::<f32, 2>([0, 3], [])).gives(tensor::<f32, 2>([0, 3], []));
        check_op("RandomShuffle").input([[1i32, 2]]).gives([[1i32, 2]]);
        let empty_rows = tensor::<f32, 2>([3, 0], []);
        check_op("RandomShuffle").input(empty_rows.clone()).gives(empty_rows);
    }
}
