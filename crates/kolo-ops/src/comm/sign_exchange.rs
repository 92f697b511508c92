//! `KoloPackSigns` and `KoloUnpackSigns`: of each element only its sign is exchanged, and the mean magnitude once for the tensor; the
//! difference is kept and added next time (Seide et al., "1-Bit Stochastic Gradient Descent", 2014).
//!
//! Bytes of a rank: for each tensor the mean magnitude, and then a bit for each element, eight to a byte from the lowest; 1 is minus.

use kolo_core::Result;

use super::packed::{Real, bytes_of, exchange_op, of_each_rank, packed_shapes, unpacked_shapes, with_left};
use crate::KernelCtx;
use crate::op::{Op, cpu_kernels};

pub(crate) static KOLO_PACK_SIGNS: Op = exchange_op(
    "KoloPackSigns",
    "(values:N*T, left:N*T) -> (packed:uint8, left_now:N*T) ; N:int>=1, T:type{float,double}",
    |ctx| packed_shapes(ctx, |n, size| Ok(size + n.div_ceil(8))),
    cpu_kernels!(pack: f32, f64),
);

pub(crate) static KOLO_UNPACK_SIGNS: Op = exchange_op(
    "KoloUnpackSigns",
    "(packed:uint8, like:N*T) -> (means:N*T) ; N:int>=1, T:type{float,double}",
    unpacked_shapes,
    cpu_kernels!(unpack: f32, f64),
);

fn pack<T: Real>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.n_inputs() / 2;
    let sizes = (0..n).map(|i| Ok(ctx.input(i)?.n_elements().div_ceil(8))).collect::<Result<Vec<usize>>>()?;
    let mut packed = bytes_of(ctx, sizes.iter().map(|size| T::SIZE + size).sum())?;
    let mut to = packed.host_bytes_mut()?;
    for (i, size) in sizes.into_iter().enumerate() {
        let mut sum = with_left::<T>(ctx, i)?;
        let elements = sum.data_mut::<T>()?;
        let magnitudes: f64 = elements.iter().map(|element| element.wide().abs()).sum();
        let scale = T::of(magnitudes / elements.len().max(1) as f64);
        let (own, rest) = to.split_at_mut(T::SIZE + size);
        let (first, bits) = own.split_at_mut(T::SIZE);
        scale.put(first);
        for (elements, bits) in elements.chunks_mut(8).zip(bits) {
            *bits = 0;
            for (bit, element) in elements.iter_mut().enumerate() {
                let is_minus = *element < T::zero();
                *bits |= u8::from(is_minus) << bit;
                *element = if is_minus { *element + scale } else { *element - scale };
            }
        }
        to = rest;
        ctx.set_output(1 + i, sum);
    }
    ctx.set_output(0, packed);
    Ok(())
}

fn unpack<T: Real>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.n_inputs() - 1;
    let sizes = (1..=n).map(|i| Ok(ctx.input(i)?.n_elements().div_ceil(8))).collect::<Result<Vec<usize>>>()?;
    let all = ctx.input(0)?.clone();
    let ranks = of_each_rank(all.host_bytes()?, sizes.iter().map(|size| T::SIZE + size).sum())?;
    let n_ranks = T::of(ranks.len() as f64);
    let mut before = 0;
    for (i, size) in sizes.into_iter().enumerate() {
        let shape = ctx.input(1 + i)?.shape().clone();
        let mut mean = ctx.allocate_zeroed(T::DTYPE, shape)?;
        let elements = mean.data_mut::<T>()?;
        let own = before..before + T::SIZE + size;
        // In the order of ranks, so the sums are the same on all of them.
        for bytes in &ranks {
            let (first, bits) = bytes[own.clone()].split_at(T::SIZE);
            let scale = T::get(first);
            for (elements, bits) in elements.chunks_mut(8).zip(bits) {
                for (bit, element) in elements.iter_mut().enumerate() {
                    *element = if bits >> bit & 1 == 1 { *element - scale } else { *element + scale };
                }
            }
        }
        elements.iter_mut().for_each(|element| *element = *element / n_ranks);
        before = own.end;
        ctx.set_output(i, mean);
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::check_op;

    fn packed(values: &[Tensor], left: &[Tensor]) -> Vec<Tensor> {
        let op = check_op("KoloPackSigns").attr("N", values.len() as i64);
        let op = values.iter().chain(left).fold(op, |op, tensor| op.input(tensor.clone()));
        op.run(false).unwrap()
    }

    #[test]
    fn signs_and_the_mean_magnitude_come_back() {
        let values = [Tensor::from([1.0f32, -2.0, 3.0, -2.0, 2.0, 2.0, -2.0, 2.0, 2.0]), Tensor::from([[-0.5f32]])];
        let left = [Tensor::from([0.0f32; 9]), Tensor::from([[0.0f32]])];
        let sent = packed(&values, &left);
        assert_eq!(sent[0].shape().dims(), [4 + 2 + 4 + 1]);
        assert_eq!(sent[1], Tensor::from([-1.0f32, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
        let op = check_op("KoloUnpackSigns").attr("N", 2i64).input(sent[0].clone());
        let op = op.input(values[0].clone()).input(values[1].clone());
        let wanted = [Tensor::from([2.0f32, -2.0, 2.0, -2.0, 2.0, 2.0, -2.0, 2.0, 2.0]), Tensor::from([[-0.5f32]])];
        op.gives_all(wanted);
    }

    #[test]
    fn ranks_that_differ_meet_in_the_middle() {
        let like = Tensor::from([0.0f64; 2]);
        let one = |values: [f64; 2]| packed(&[Tensor::from(values)], &[like.clone()])[0].data::<u8>().unwrap().to_vec();
        let all = [one([1.0, 3.0]), one([-4.0, 4.0])].concat();
        let op = check_op("KoloUnpackSigns").attr("N", 1i64).input(Tensor::vector(all)).input(like.clone());
        op.gives(Tensor::from([-1.0f64, 3.0]));
    }

    /// What is sent in all steps and what is left at the end is what there was, and what is left stays small.
    #[test]
    fn nothing_is_lost() {
        let step =
            |i: usize| -> [f64; 20] { std::array::from_fn(|j| f64::from(((i * 37 + j * 53) % 31) as u32) / 8.0 - 1.9) };
        let (mut left, mut sent, mut wanted) = (Tensor::from([0.0f64; 20]), [0.0; 20], [0.0; 20]);
        for i in 0..200 {
            let values = Tensor::from(step(i));
            let outputs = packed(&[values.clone()], &[left]);
            let op = check_op("KoloUnpackSigns").attr("N", 1i64).input(outputs[0].clone()).input(values);
            for (j, x) in op.run(false).unwrap()[0].data::<f64>().unwrap().iter().enumerate() {
                sent[j] += x;
                wanted[j] += step(i)[j];
            }
            left = outputs[1].clone();
        }
        for (j, left) in left.data::<f64>().unwrap().iter().enumerate() {
            assert!((sent[j] + left - wanted[j]).abs() < 1e-9, "element {j}");
            assert!(left.abs() < 20.0, "element {j}: {left}");
        }
    }

    #[test]
    fn bytes_that_make_no_sense_are_refused() {
        let op = check_op("KoloUnpackSigns").attr("N", 1i64).input(Tensor::vector(vec![0u8; 6]));
        op.input(Tensor::from([1.0f32])).fails("no multiple of the 5 of each");
    }
}
