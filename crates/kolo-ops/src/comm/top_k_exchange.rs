//! `KoloPackTopK` and `KoloUnpackTopK`: of each tensor only its largest elements are exchanged, and the others are kept and added next
//! time, so that nothing is lost (Lin et al., "Deep Gradient Compression", 2017).
//!
//! Bytes of a rank: for each tensor the positions of its k largest elements, ascending, as 32 bits each, and then the elements.

use kolo_core::{Error, Result};
use kolo_graph::Attrs;

use super::packed::{Real, bytes_of, exchange_op, of_each_rank, packed_shapes, unpacked_shapes, with_left};
use crate::KernelCtx;
use crate::op::{Op, cpu_kernels};

pub(crate) static KOLO_PACK_TOP_K: Op = exchange_op(
    "KoloPackTopK",
    "(values:N*T, left:N*T) -> (packed:uint8, left_now:N*T) ; N:int>=1, T:type{float,double}, fraction:float=0.01",
    |ctx| {
        let fraction = fraction(ctx.attrs())?;
        packed_shapes(ctx, |n, size| Ok(n_kept(n, fraction)? * (POSITION + size)))
    },
    cpu_kernels!(pack: f32, f64),
);

pub(crate) static KOLO_UNPACK_TOP_K: Op = exchange_op(
    "KoloUnpackTopK",
    "(packed:uint8, like:N*T) -> (means:N*T) ; N:int>=1, T:type{float,double}, fraction:float=0.01",
    unpacked_shapes,
    cpu_kernels!(unpack: f32, f64),
);

/// The bytes of a position.
const POSITION: usize = size_of::<u32>();

fn fraction(attrs: &Attrs) -> Result<f64> {
    let fraction = attrs.float("fraction")?;
    match fraction > 0.0 && fraction <= 1.0 {
        true => Ok(f64::from(fraction)),
        false => {
            Err(Error::invalid_argument(format!("the fraction of elements is above 0 and at most 1, not {fraction}")))
        }
    }
}

/// How many of so many elements are exchanged.
fn n_kept(n: usize, fraction: f64) -> Result<usize> {
    if u32::try_from(n).is_err() {
        return Err(Error::invalid_argument(format!("a tensor of {n} elements is too large: positions have 32 bits")));
    }
    // Not one more because a tenth is no number of an attribute.
    Ok(((n as f64 * fraction * (1.0 - 1e-6)).ceil() as usize).clamp(1, n.max(1)).min(n))
}

fn pack<T: Real>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (fraction, n) = (fraction(ctx.attrs())?, ctx.n_inputs() / 2);
    let kept = (0..n).map(|i| n_kept(ctx.input(i)?.n_elements(), fraction)).collect::<Result<Vec<usize>>>()?;
    let mut packed = bytes_of(ctx, kept.iter().map(|k| k * (POSITION + T::SIZE)).sum())?;
    let mut to = packed.host_bytes_mut()?;
    for (i, k) in kept.into_iter().enumerate() {
        let mut sum = with_left::<T>(ctx, i)?;
        let elements = sum.data_mut::<T>()?;
        let (own, rest) = to.split_at_mut(k * (POSITION + T::SIZE));
        let (positions, values) = own.split_at_mut(k * POSITION);
        let places = positions.chunks_exact_mut(POSITION).zip(values.chunks_exact_mut(T::SIZE));
        for (at, (position, value)) in largest(elements, k).into_iter().zip(places) {
            position.copy_from_slice(&at.to_le_bytes());
            elements[at as usize].put(value);
            elements[at as usize] = T::zero();
        }
        to = rest;
        ctx.set_output(1 + i, sum);
    }
    ctx.set_output(0, packed);
    Ok(())
}

/// The positions of the `k` elements with the largest magnitudes, ascending; of equals the first.
fn largest<T: Real>(elements: &[T], k: usize) -> Vec<u32> {
    if k == 0 {
        return Vec::new();
    }
    let mut magnitudes: Vec<u64> = elements.iter().map(|element| element.magnitude()).collect();
    let (above, &mut least, _) = magnitudes.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
    let mut n_equal = k - above.iter().filter(|magnitude| **magnitude > least).count();
    let mut is_kept = |element: &T| match element.magnitude().cmp(&least) {
        std::cmp::Ordering::Greater => true,
        std::cmp::Ordering::Equal if n_equal > 0 => {
            n_equal -= 1;
            true
        }
        _ => false,
    };
    let kept = elements.iter().enumerate().filter(|(_, element)| is_kept(element));
    kept.map(|(at, _)| at as u32).collect()
}

fn unpack<T: Real>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (fraction, n) = (fraction(ctx.attrs())?, ctx.n_inputs() - 1);
    let kept = (1..=n).map(|i| n_kept(ctx.input(i)?.n_elements(), fraction)).collect::<Result<Vec<usize>>>()?;
    let all = ctx.input(0)?.clone();
    let ranks = of_each_rank(all.host_bytes()?, kept.iter().map(|k| k * (POSITION + T::SIZE)).sum())?;
    let mut before = 0;
    for (i, k) in kept.into_iter().enumerate() {
        let shape = ctx.input(1 + i)?.shape().clone();
        let mut mean = ctx.allocate_zeroed(T::DTYPE, shape)?;
        let elements = mean.data_mut::<T>()?;
        let own = before..before + k * (POSITION + T::SIZE);
        // In the order of ranks, so the sums are the same on all of them.
        for bytes in &ranks {
            let (positions, values) = bytes[own.clone()].split_at(k * POSITION);
            for (position, value) in positions.chunks_exact(POSITION).zip(values.chunks_exact(T::SIZE)) {
                let mut at = [0; POSITION];
                at.copy_from_slice(position);
                let at = u32::from_le_bytes(at) as usize;
                let n_elements = elements.len();
                let element = elements.get_mut(at).ok_or_else(|| {
                    Error::invalid_argument(format!("a rank sent element {at} of a tensor that has {n_elements}"))
                })?;
                *element = *element + T::get(value);
            }
        }
        let n_ranks = T::of(ranks.len() as f64);
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

    fn packed(values: &Tensor, left: &Tensor, fraction: f32) -> Vec<Tensor> {
        let op = check_op("KoloPackTopK").attr("fraction", fraction).attr("N", 1i64);
        op.input(values.clone()).input(left.clone()).run(false).unwrap()
    }

    fn unpacked(packed: Tensor, like: &Tensor, fraction: f32) -> Tensor {
        let op = check_op("KoloUnpackTopK").attr("fraction", fraction).attr("N", 1i64);
        op.input(packed).input(like.clone()).run(false).unwrap().remove(0)
    }

    #[test]
    fn the_largest_are_sent_and_the_others_are_left() {
        let values = Tensor::from([[1.0f32, -5.0, 0.5], [5.0, 2.0, -0.25]]);
        let left = Tensor::from([[0.0f32, 0.0, 4.0], [0.0, 0.0, 0.0]]);
        let sent = packed(&values, &left, 0.5);
        assert_eq!(sent[0].shape().dims(), [3 * 8]);
        assert_eq!(sent[1], Tensor::from([[1.0f32, 0.0, 0.0], [0.0, 2.0, -0.25]]));
        let back = unpacked(sent[0].clone(), &values, 0.5);
        assert_eq!(back, Tensor::from([[0.0f32, -5.0, 4.5], [5.0, 0.0, 0.0]]));
        // The mean of two ranks.
        let two: Vec<u8> = [sent[0].data::<u8>().unwrap(), sent[0].data::<u8>().unwrap()].concat();
        assert_eq!(unpacked(Tensor::vector(two), &values, 0.5), back);
    }

    #[test]
    fn of_equals_the_first_are_sent_and_what_is_no_number_is_never_left() {
        let sent = packed(&Tensor::from([1.0f64, -1.0, 1.0, f64::NAN]), &Tensor::from([0.0f64; 4]), 0.6);
        assert_eq!(sent[1], Tensor::from([0.0f64, 0.0, 1.0, 0.0]));
        assert_eq!(packed(&Tensor::from([0.0f32; 0]), &Tensor::from([0.0f32; 0]), 0.5)[0].n_elements(), 0);
    }

    /// What is sent in all steps and what is left at the end is what there was.
    #[test]
    fn nothing_is_lost() {
        let step = |i: usize| -> [f64; 40] {
            std::array::from_fn(|j| f64::from(((i * 37 + j * 101) % 97) as u32) / 8.0 - 6.0)
        };
        let (mut left, mut sent, mut wanted) = (Tensor::from([0.0f64; 40]), [0.0; 40], [0.0; 40]);
        for i in 0..50 {
            let values = Tensor::from(step(i));
            let outputs = packed(&values, &left, 0.1);
            let out = unpacked(outputs[0].clone(), &values, 0.1);
            assert!(out.data::<f64>().unwrap().iter().filter(|x| **x != 0.0).count() <= 4);
            for (j, x) in out.data::<f64>().unwrap().iter().enumerate() {
                sent[j] += x;
                wanted[j] += step(i)[j];
            }
            left = outputs[1].clone();
        }
        // Eighths: sums are exact.
        for (j, left) in left.data::<f64>().unwrap().iter().enumerate() {
            assert_eq!(sent[j] + left, wanted[j], "element {j}");
        }
    }

    #[test]
    fn bytes_that_make_no_sense_are_refused() {
        let like = Tensor::from([1.0f32, 2.0]);
        let op = |bytes: Vec<u8>| {
            check_op("KoloUnpackTopK").attr("N", 1i64).input(Tensor::vector(bytes)).input(like.clone())
        };
        op(vec![9, 0, 0, 0, 0, 0, 0, 0]).fails("a rank sent element 9 of a tensor that has 2");
        op(vec![0; 7]).fails("no multiple of the 8 of each");
        let pack = check_op("KoloPackTopK").attr("N", 1i64).attr("fraction", 0.0f32);
        pack.input(like.clone()).input(like.clone()).fails("above 0 and at most 1");
    }
}
