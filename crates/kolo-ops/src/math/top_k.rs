//! `TopK`, `TopKV2`: the largest elements of each row and where they are. `InTopK`, `InTopKV2`: whether a class is among
//! the most probable ones.

use std::cmp::Ordering;

use half::{bf16, f16};
use kolo_core::{DType, Dim, Element, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::stop_if_asked;
use kolo_graph::{Grad, Gradient, HalfSafety, InferCtx, OpDef, Operation, Output, SplitRule};

use crate::array::elements::BETWEEN_LOOKS;
use crate::math::binary::first;
use crate::math::elementwise::{collect, lanes};
use crate::math::number::Number;
use crate::math::segment::unsorted::segment_ids;
use crate::op::{Gpu, KernelDef, Op, cpu_any, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The `k` largest elements of each row of the last dimension, largest first, and their positions as int32. Of equals the
/// first comes first.
#[track_caller]
pub fn top_k(x: Output<'_>, k: i32) -> (Output<'_>, Output<'_>) {
    let operation = x.graph().op("TopKV2").input(x).input(x.graph().constant(k)).build();
    (operation.output(0), operation.output(1))
}

/// For each row of `predictions`, whether fewer than `k` of them are larger than that of the class in `targets`.
#[track_caller]
pub fn in_top_k<'g>(predictions: Output<'g>, targets: Output<'g>, k: i64) -> Output<'g> {
    predictions.graph().op("InTopK").input(predictions).input(targets).attr("k", k).out()
}

pub(crate) static TOP_K_V2: Op = Op {
    def: OpDef {
        name: "TopKV2",
        signature: "(input:T, k:Tk) -> (values:T, indices:index_type) ; sorted:bool=true, T:type{real}, \
                    Tk:type{int16,int32,int64}=int32, index_type:type{int16,int32,int64}=int32",
        shape: |ctx| {
            let k = match ctx.constant_integers(1).as_deref() {
                Some([k]) => Some(to_count(*k)?),
                _ => None,
            };
            top_k_shape(ctx, k)
        },
        gradient: Gradient::Rule(gradient),
        half: HalfSafety::Neutral,
        split: SplitRule::Rows,
        ..OpDef::BASE
    },
    kernels: TOP_K_KERNELS,
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static TOP_K: Op = Op {
    def: OpDef {
        name: "TopK",
        signature: "(input:T) -> (values:T, indices:int32) ; k:int>=0, sorted:bool=true, T:type{real}",
        shape: |ctx| top_k_shape(ctx, Some(to_count(ctx.attrs().int("k")?)?)),
        gradient: Gradient::Rule(gradient),
        half: HalfSafety::Neutral,
        split: SplitRule::Rows,
        ..OpDef::BASE
    },
    kernels: TOP_K_KERNELS,
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static IN_TOP_K: Op =
    in_top_k_op("InTopK", "(predictions:float, targets:T) -> (precision:bool) ; k:int, T:type{int32,int64}=int32")
        .half(HalfSafety::Neutral)
        .split(SplitRule::Examples);
pub(crate) static IN_TOP_K_V2: Op =
    in_top_k_op("InTopKV2", "(predictions:float, targets:T, k:T) -> (precision:bool) ; T:type{int32,int64}=int32")
        .half(HalfSafety::Neutral)
        .split(SplitRule::Examples);

const fn in_top_k_op(name: &'static str, signature: &'static str) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: |ctx| {
                let rows = ctx.input_of_rank(0, 2)?.dim(0);
                Ok(vec![PartialShape::new(&[rows]).merge(&ctx.input_of_rank(1, 1)?)?])
            },
            gradient: Gradient::None("truth values have no gradient"),
            ..OpDef::BASE
        },
        kernels: IN_TOP_K_KERNELS,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

fn to_count(k: i64) -> Result<usize> {
    usize::try_from(k).map_err(|_| Error::invalid_argument(format!("Need k >= 0, got {k}")))
}

fn too_few(n: usize, k: usize) -> Error {
    Error::invalid_argument(format!("input must have at least k columns. Had {n}, needed {k}"))
}

fn top_k_shape(ctx: &InferCtx<'_>, k: Dim) -> Result<Vec<PartialShape>> {
    let input = ctx.input_of_rank_at_least(0, 1)?;
    if let (Some(n), Some(k)) = (input.dim(-1), k)
        && n < k
    {
        return Err(too_few(n, k));
    }
    Ok(vec![
        match input.dims() {
            Some([front @ .., _]) => PartialShape::new(front).concat(&PartialShape::new(&[k])),
            _ => PartialShape::unknown(),
        };
        2
    ])
}

/// Each gradient goes back to where its element was; the others get 0.
fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, x, dy) = (op.graph(), op.input(0), first(dy)?);
    let shape_of = |of: Output<'g>| graph.op("Shape").input(of).out();
    // The last size of a shape, in a vector of its own.
    let last = |shape: Output<'g>| {
        let [minus_one, zero, one] = [-1i32, 0, 1].map(|i| graph.constant([i]));
        graph.op("StridedSlice").inputs([shape, minus_one, zero, one]).attr("end_mask", 1i64).out()
    };
    let flat = |of: Output<'g>| graph.op("Reshape").input(of).input(graph.constant([-1i32])).out();
    let indices = graph.op("Cast").input(op.output(1)).attr("DstT", DType::I32).out();
    // Row r of the input begins at r · n.
    let n_taken = graph.op("Size").input(indices).out();
    let number = graph.op("Range").inputs([graph.constant(0i32), n_taken, graph.constant(1i32)]).out();
    let row = graph.op("FloorDiv").input(number).input(last(shape_of(indices))).out();
    let at = row * last(shape_of(x)) + flat(indices);
    let size = graph.op("Size").input(x).out();
    let dx = graph.op("UnsortedSegmentSum").inputs([flat(dy), at, size]).out();
    let dx = graph.op("Reshape").input(dx).input(shape_of(x)).out();
    Ok(if op.n_inputs() == 2 { vec![Some(dx.into()), None] } else { vec![Some(dx.into())] })
}

fn top_k_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let k = match ctx.n_inputs() {
        1 => to_count(ctx.attrs().int("k")?)?,
        _ => match segment_ids(ctx, 1)?.as_slice() {
            [k] => to_count(*k)?,
            _ => return Err(Error::invalid_argument("k must be a scalar")),
        },
    };
    let shape = ctx.input(0)?.shape().clone();
    let Some((&n, front)) = shape.split_last() else {
        return Err(Error::invalid_argument("input must be >= 1-D, got shape []"));
    };
    if n < k {
        return Err(too_few(n, k));
    }
    let positions_fit = u32::try_from(n).is_ok();
    if !positions_fit {
        return Err(Error::invalid_argument(format!("rows of {n} elements are too long")));
    }
    let shape = Shape::new(&[front, &[k]].concat())?;
    let mut values = ctx.allocate(T::DTYPE, shape.clone())?;
    let mut positions = vec![0u32; shape.n_elements()];
    let input = ctx.data::<T>(0)?;
    if k > 0 {
        let rows_per_task = (4096 / n).max(1);
        ctx.pool().for_each_chunk2(values.data_mut::<T>()?, &mut positions, rows_per_task * k, |task, values, at| {
            let (mut keys, mut order): (Vec<u64>, Vec<u32>) = Default::default();
            let mut few: Vec<(T, u32)> = Vec::with_capacity(FEW);
            for (i, (values, at)) in values.chunks_exact_mut(k).zip(at.chunks_exact_mut(k)).enumerate() {
                let start = (task * rows_per_task + i) * n;
                let row = &input[start..start + n];
                if k <= FEW {
                    few_largest(row, k, &mut few);
                    for ((value, at), &found) in values.iter_mut().zip(at).zip(&few) {
                        (*value, *at) = found;
                    }
                    continue;
                }
                order.clear();
                // By `if const`, so that only one of them is compiled.
                if const { size_of::<T>() <= 4 } {
                    keys.clear();
                    for (row, first) in row.chunks(BETWEEN_LOOKS).zip((0..).step_by(BETWEEN_LOOKS)) {
                        stop_if_asked();
                        keys.extend(row.iter().zip(first..).map(|(x, i): (_, u64)| x.descending_key() << 32 | i));
                    }
                    sort_first(&mut keys, k);
                    order.extend(keys[..k].iter().map(|&key| key as u32));
                } else {
                    order.extend(0..n as u32);
                    let mut n_compared = 0;
                    let mut compare = |a: &u32, b: &u32| {
                        look_sometimes(&mut n_compared);
                        before(row[*a as usize], row[*b as usize]).then(a.cmp(b))
                    };
                    if k < n {
                        order.select_nth_unstable_by(k - 1, &mut compare);
                    }
                    order[..k].sort_unstable_by(&mut compare);
                }
                for ((value, at), &from) in values.iter_mut().zip(at).zip(&order) {
                    (*value, *at) = (row[from as usize], from);
                }
            }
        });
    }
    let indices = match ctx.node.outputs.get(1).map(|output| output.dtype) {
        Some(DType::I16) => indices::<i16>(ctx, shape, &positions)?,
        Some(DType::I64) => indices::<i64>(ctx, shape, &positions)?,
        _ => indices::<i32>(ctx, shape, &positions)?,
    };
    ctx.set_output(0, values);
    ctx.set_output(1, indices);
    Ok(())
}

/// Brings the `k` least to the front, in their order. A key holds what stands for an element, whatever its type, above its position,
/// so that this is compiled once.
fn sort_first(keys: &mut [u64], k: usize) {
    if keys.len() < LONG {
        if k < keys.len() {
            keys.select_nth_unstable(k - 1);
        }
        return keys[..k].sort_unstable();
    }
    let mut n_compared = 0;
    let mut compare = |a: &u64, b: &u64| {
        look_sometimes(&mut n_compared);
        a.cmp(b)
    };
    if k < keys.len() {
        keys.select_nth_unstable_by(k - 1, &mut compare);
    }
    keys[..k].sort_unstable_by(&mut compare);
}

/// Sorting so many takes long enough to be stopped.
const LONG: usize = 1 << 20;

/// For comparisons of a sort, which has no other place to look at whether its step was stopped.
fn look_sometimes(n_compared: &mut u32) {
    *n_compared = n_compared.wrapping_add(1);
    if n_compared.is_multiple_of(1 << 16) {
        stop_if_asked();
    }
}

/// Up to so many, the largest are kept in order while the row is read once.
const FEW: usize = 32;

/// The `k` largest of a row and where they are. Most values are not larger than the last of those found so far, and whole
/// blocks of them are passed over at once.
fn few_largest<T: Number>(row: &[T], k: usize, found: &mut Vec<(T, u32)>) {
    found.clear();
    let (first, rest) = row.split_at(k);
    for (i, &x) in first.iter().enumerate() {
        let at = found.partition_point(|&(y, _)| before(y, x).is_le());
        found.insert(at, (x, i as u32));
    }
    let mut i = k as u32;
    for block in rest.chunks(64) {
        let Some(&(last, _)) = found.last() else { return };
        let passes = lanes::<T, _>(
            #[inline(always)]
            || block.iter().fold(false, |any, &x| any | (x > last)),
        );
        // Anything comes before NaN, though it is not larger.
        if passes || last.partial_cmp(&last).is_none() {
            for (&x, i) in block.iter().zip(i..) {
                if found.last().is_some_and(|&(last, _)| before(x, last).is_lt()) {
                    found.pop();
                    let at = found.partition_point(|&(y, _)| before(y, x).is_le());
                    found.insert(at, (x, i));
                }
            }
        }
        i += block.len() as u32;
    }
}

/// The larger first; NaN last, so that this is an order.
fn before<T: Number>(a: T, b: T) -> Ordering {
    match b.partial_cmp(&a) {
        Some(order) => order,
        None => a.to_f64().is_nan().cmp(&b.to_f64().is_nan()),
    }
}

fn indices<I: Element + num_traits::NumCast>(ctx: &KernelCtx<'_>, shape: Shape, positions: &[u32]) -> Result<Tensor> {
    let narrow = |&at: &u32| {
        num_traits::NumCast::from(at)
            .ok_or_else(|| Error::invalid_argument(format!("position {at} does not fit {}", I::DTYPE)))
    };
    let positions: Vec<I> = positions.iter().map(narrow).collect::<Result<_>>()?;
    collect(ctx, shape, |i| positions[i])
}

fn in_top_k_kernel(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let k = match ctx.n_inputs() {
        2 => ctx.attrs().int("k")?,
        _ => match ctx.integers(2)?.as_slice() {
            [k] => *k,
            _ => return Err(Error::invalid_argument("k must be a scalar")),
        },
    };
    let (shape, targets) = (ctx.input(0)?.shape().clone(), ctx.integers(1)?);
    let &[rows, n] = shape.dims() else {
        return Err(Error::invalid_argument(format!("predictions must be 2-dimensional, found {shape}")));
    };
    if rows != targets.len() {
        return Err(Error::invalid_argument(format!(
            "First dimension of predictions {rows} must match length of targets {}",
            targets.len()
        )));
    }
    let predictions = ctx.data::<f32>(0)?;
    let out = collect(ctx, Shape::new(&[rows])?, |row| {
        let classes = &predictions[row * n..(row + 1) * n];
        let target = usize::try_from(targets[row]).ok().and_then(|target| classes.get(target));
        // Nothing can be said where a prediction is infinite or NaN, or the class does not exist.
        match target {
            Some(target) if classes.iter().all(|x| x.is_finite()) => {
                (classes.iter().filter(|x| *x > target).count() as i64) < k
            }
            _ => false,
        }
    })?;
    ctx.set_output(0, out);
    Ok(())
}

const IN_TOP_K_KERNELS: &[KernelDef] = &[cpu_any(in_top_k_kernel)];
const TOP_K_KERNELS: &[KernelDef] =
    cpu_kernels!(top_k_kernel: f32, f64, i32, i64, u32, u64; f16, bf16, i8, i16, u8, u16);

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn the_largest_come_first_and_of_equals_the_first() {
        let x = [[1.0f32, 7.0, 3.0, 7.0], [4.0, -1.0, 9.0, 0.0]];
        let expected = [Tensor::from([[7.0f32, 7.0], [9.0, 4.0]]), Tensor::from([[1i32, 3], [2, 0]])];
        check_op("TopKV2").input(x).input(2i32).gives_all(expected.clone());
        check_op("TopK").attr("k", 2i64).input(x).gives_all(expected);
        check_op("TopKV2")
            .attr("index_type", DType::I64)
            .input([5u8, 6])
            .input(2i64)
            .gives_all([Tensor::from([6u8, 5]), Tensor::from([1i64, 0])]);
        check_op("TopKV2").input(x).input(0i32).gives_all([tensor::<f32, 2>([2, 0], []), tensor::<i32, 2>([2, 0], [])]);
        check_op("TopKV2")
            .input([f32::NAN, 1.0, f32::NEG_INFINITY])
            .input(3i32)
            .gives_all([Tensor::from([1.0f32, f32::NEG_INFINITY, f32::NAN]), Tensor::from([1i32, 2, 0])]);
        check_op("TopKV2").input(x).input(5i32).fails("input must have at least k columns. Had 4, needed 5");
        check_op("TopKV2").input(x).input(-1i32).fails("Need k >= 0, got -1");
        check_op("TopKV2").input(1.0f32).input(1i32).fails("at least rank 1");
    }

    #[test]
    fn few_and_many_are_found_alike() {
        let row: Vec<f32> = (0..500).map(|i| if i % 97 == 3 { f32::NAN } else { (i * 37 % 101) as f32 }).collect();
        let all = check_op("TopKV2").input(row.clone()).input(500i32).run(false).unwrap();
        for k in [1usize, 2, 31, 32, 33] {
            let some = check_op("TopKV2").input(row.clone()).input(k as i32).run(false).unwrap();
            assert_eq!(some[0].data::<f32>().unwrap(), &all[0].data::<f32>().unwrap()[..k]);
            assert_eq!(some[1].data::<i32>().unwrap(), &all[1].data::<i32>().unwrap()[..k]);
        }
        let nans = vec![f32::NAN, f32::NAN, 1.0, f32::NAN, 2.0];
        check_op("TopKV2").input(nans).input(2i32).gives_all([Tensor::from([2.0f32, 1.0]), Tensor::from([4i32, 2])]);
    }

    #[test]
    fn many_are_found_in_every_type() {
        fn check<T: crate::math::number::Number>(least: T, greatest: T) {
            let mut row: Vec<T> = (0..40usize).map(|i| T::from_count(i * 7 % 40)).collect();
            row.extend([greatest, least, T::ZERO]);
            let found = check_op("TopKV2").input(row.clone()).input(43i32).run(false).unwrap();
            let (values, at) = (found[0].data::<T>().unwrap(), found[1].data::<i32>().unwrap());
            assert!(values.is_sorted_by(|a, b| a >= b), "{values:?}");
            assert_eq!((values[0], at[0], values[42]), (greatest, 40, if least < T::ZERO { least } else { T::ZERO }));
            assert!(values.iter().zip(at).all(|(&value, &at)| row[at as usize] == value));
            // Of equals the first comes first.
            assert!(values.windows(2).zip(at.windows(2)).all(|(v, at)| v[0] > v[1] || at[0] < at[1]));
        }
        check(i8::MIN, i8::MAX);
        check(i16::MIN, i16::MAX);
        check(i32::MIN, i32::MAX);
        check(i64::MIN, i64::MAX);
        check(u8::MIN, u8::MAX);
        check(u16::MIN, u16::MAX);
        check(u32::MIN, u32::MAX);
        check(u64::MIN, u64::MAX);
        check(half::f16::NEG_INFINITY, half::f16::INFINITY);
        check(half::bf16::NEG_INFINITY, half::bf16::INFINITY);
        check(f64::MIN, f64::MAX);
        check(-0.0f32, f32::MAX);
    }

    #[test]
    fn many_rows_are_split_without_gaps() {
        let (rows, n, k) = (300, 101, 3);
        let values: Vec<f32> = (0..rows * n).map(|i| ((i % n * 37 + i / n) % n) as f32).collect();
        let largest: Vec<f32> = (0..rows * k).map(|i| (n - 1 - i % k) as f32).collect();
        check_op("TopKV2").input(tensor([rows, n], values)).input(k as i32).gives(tensor([rows, k], largest));
    }

    #[test]
    fn membership() {
        let x = [[0.1f32, 0.3, 0.2], [0.5, 0.5, 0.1], [f32::NAN, 1.0, 2.0]];
        check_op("InTopK").attr("k", 2i64).input(x).input([2i32, 1, 2]).gives([true, true, false]);
        check_op("InTopK").attr("k", 1i64).input(x).input([0i32, 1, 1]).gives([false, true, false]);
        check_op("InTopKV2").input(x).input([7i64, -1, 0]).input(3i64).gives([false, false, false]);
        check_op("InTopK").attr("k", 1i64).input(x).input([0i32, 1]).fails("not compatible");
    }

    #[test]
    fn gradients() {
        check_op("TopKV2").input(wavy([2, 3, 4], 1)).input(2i32).gradient();
        check_op("TopK").attr("k", 1i64).input(wavy([5], 1)).gradient();
    }
}
