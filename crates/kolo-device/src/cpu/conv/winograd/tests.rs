//! Against plain loops in doubles, and against plain sums where those are the ones to agree with.

use super::super::tests::{each_term, shape};
use super::super::{ConvElement, ConvShape, plain, plain_filter_gradient, plain_input_gradient};
use super::super::{conv2d, conv2d_backprop_filter, conv2d_backprop_input};
use super::*;
use crate::cpu::gemm::Activation;
use num_traits::AsPrimitive;

const NONE: Epilogue<'static, f32> = Epilogue { column_bias: None, row_bias: None, activation: Activation::None };

/// Numbers from -1 to 1 without a pattern, which would make errors cancel or add up.
fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Input, filter and gradient of the output.
fn operands(s: &ConvShape) -> [Vec<f32>; 3] {
    [random(1, s.input_len()), random(2, s.filter_len()), random(3, s.output_len())]
}

/// Output and gradients of input and filter, exact but for doubles.
fn exact(s: &ConvShape, [input, filter, grad]: &[Vec<f32>; 3]) -> [Vec<f64>; 3] {
    let mut found = [s.output_len(), s.input_len(), s.filter_len()].map(|n| vec![0.0; n]);
    let [y, dx, dw] = &mut found;
    each_term(s, |i, f, o| {
        y[o] += f64::from(input[i]) * f64::from(filter[f]);
        dx[i] += f64::from(grad[o]) * f64::from(filter[f]);
        dw[f] += f64::from(grad[o]) * f64::from(input[i]);
    });
    found
}

/// The same by Winograd's algorithm, whether it pays or not.
fn fast(pool: &IntraPool, s: &ConvShape, [input, filter, grad]: &[Vec<f32>; 3]) -> [Vec<f32>; 3] {
    let mut found = [s.output_len(), s.input_len(), s.filter_len()].map(|n| vec![f32::NAN; n]);
    let [y, dx, dw] = &mut found;
    assert!(Winograd::forward_fitting(s).unwrap().convolve(pool, input, filter, y, &NONE));
    assert!(Winograd::input_gradient_fitting(s).unwrap().convolve_turned(pool, grad, filter, dx));
    assert!(Winograd::filter_gradient_fitting(s).unwrap().filter_gradient(pool, input, grad, dw));
    found
}

/// Output and gradient of the filter by folding, whether it pays or not.
fn folded(pool: &IntraPool, s: &ConvShape, [input, filter, grad]: &[Vec<f32>; 3]) -> [Vec<f32>; 2] {
    let mut found = [s.output_len(), s.filter_len()].map(|n| vec![f32::NAN; n]);
    let [y, dw] = &mut found;
    assert!(Folded::fitting(s).unwrap().convolve(pool, input, filter, y, &NONE));
    assert!(Folded::gradient_fitting(s).unwrap().filter_gradient(pool, input, grad, dw));
    found
}

/// The same as plain sums, of floats or of doubles.
fn sums<T: ConvElement>(pool: &IntraPool, s: &ConvShape, operands: &[Vec<f32>; 3]) -> [Vec<T>; 3]
where
    f32: AsPrimitive<T>,
{
    let [input, filter, grad] = operands.each_ref().map(|x| x.iter().map(|x| x.as_()).collect::<Vec<T>>());
    let mut found = [s.output_len(), s.input_len(), s.filter_len()].map(|n| vec![T::ZERO; n]);
    let [y, dx, dw] = &mut found;
    // SAFETY: the lengths are those of the shape.
    unsafe {
        plain(pool, s, &input, &filter, y, Epilogue::default());
        plain_input_gradient(pool, s, &filter, &grad, dx);
        plain_filter_gradient(pool, s, &input, &grad, dw);
    }
    found
}

/// Root mean square and largest error, relative to the root mean square of what is right.
fn errors(found: &[f32], exact: &[f64]) -> [f64; 2] {
    let n = exact.len() as f64;
    let scale = (exact.iter().map(|y| y * y).sum::<f64>() / n).sqrt();
    let all = found.iter().zip(exact).map(|(&x, y)| (f64::from(x) - y).abs() / scale);
    let (sum, most) = all.fold((0.0, 0f64), |(sum, most), e| (sum + e * e, if e <= most { most } else { e }));
    [(sum / n).sqrt(), most]
}

fn check(s: &ConvShape) {
    let operands = operands(s);
    let exact = exact(s, &operands);
    let one = fast(&IntraPool::new(1), s, &operands);
    for (found, exact) in one.iter().zip(&exact) {
        let [_, most] = errors(found, exact);
        assert!(most < 4e-5, "{s:?}: {most}");
    }
    assert_eq!(one, fast(&IntraPool::new(3), s, &operands), "threads change bits");
}

#[test]
fn sizes_that_fill_tiles_and_do_not() {
    check(&shape(2, [14, 14, 32], [5, 5], 64));
    check(&shape(1, [14, 14, 32], [3, 3], 32));
    check(&shape(3, [9, 7, 17], [5, 5], 23));
    check(&shape(2, [13, 6, 16], [3, 3], 49));
    check(&shape(1, [31, 8, 70], [3, 3], 130));
    check(&shape(40, [8, 9, 20], [3, 3], 16));
    check(&shape(2, [1, 5, 24], [3, 3], 40));
    check(&shape(1, [4, 2, 16], [5, 5], 66));
    check(&shape(2, [13, 15, 20], [4, 4], 37));
    check(&shape(1, [1, 3, 16], [4, 4], 16));
}

#[test]
fn paddings_of_any_size() {
    for (side, pads) in [(3, [0, 1, 2, 4]), (4, [0, 1, 3, 5]), (5, [0, 1, 4, 6])] {
        for pad_top in pads {
            for pad_left in pads {
                let s = shape(2, [8, 7, 16], [side, side], 18);
                // More below and to the right than above and to the left.
                let output = [8 + pad_top + 3 - side, 7 + pad_left + 4 - side, 18];
                check(&ConvShape { pad_top, pad_left, output, ..s });
            }
        }
    }
}

/// A convolution of squares with a stride; `more` zeros below and to the right.
fn strided(batch: usize, input: [usize; 3], filter: [usize; 2], o: usize, stride: [usize; 2], pad: usize) -> ConvShape {
    let size = |d: usize, more: usize| (input[d] + pad + more - filter[d]) / stride[d] + 1;
    ConvShape {
        stride,
        pad_top: pad,
        pad_left: pad + 1,
        output: [size(0, 3), size(1, 4), o],
        ..shape(batch, input, filter, o)
    }
}

fn check_folded(s: &ConvShape) {
    let operands = operands(s);
    let [y, _, dw] = exact(s, &operands);
    let one = folded(&IntraPool::new(1), s, &operands);
    for (found, exact) in one.iter().zip([y, dw]) {
        let [_, most] = errors(found, &exact);
        assert!(most < 4e-5, "{s:?}: {most}");
    }
    assert_eq!(one, folded(&IntraPool::new(3), s, &operands), "threads change bits");
}

#[test]
fn folded_sizes_strides_and_paddings() {
    for (filter, stride) in [
        ([7, 7], [2, 2]),
        ([8, 7], [2, 2]),
        ([5, 6], [2, 2]),
        ([9, 10], [2, 2]),
        ([7, 4], [2, 1]),
        ([3, 8], [1, 3]),
        ([7, 11], [3, 4]),
    ] {
        for pad in [0, 1, 2, 5, 13] {
            check_folded(&strided(2, [17, 14, 4], filter, 16, stride, pad));
            check_folded(&strided(1, [12, 19, 5], filter, 35, stride, pad));
        }
    }
    for c in [2, 4, 17] {
        check_folded(&strided(3, [20, 21, c], [7, 7], 16, [2, 2], 3));
    }
    // Most of the filter is outside of an image of one pixel; an image whose last lines no window covers.
    check_folded(&strided(5, [1, 1, 3], [7, 7], 64, [2, 2], 6));
    check_folded(&ConvShape { output: [2, 1, 24], ..strided(1, [30, 40, 3], [7, 7], 24, [2, 2], 0) });
}

#[test]
fn folded_with_bias_and_activation() {
    let s = strided(2, [23, 23, 3], [7, 7], 40, [2, 2], 2);
    let (pool, operands) = (IntraPool::new(2), operands(&s));
    let bias = random(4, 40);
    let epilogue = Epilogue { column_bias: Some(&bias), row_bias: None, activation: Activation::Relu };
    let mut found = vec![f32::NAN; s.output_len()];
    let [input, filter, _] = &operands;
    assert!(Folded::fitting(&s).unwrap().convolve(&pool, input, filter, &mut found, &epilogue));
    let [y, _] = folded(&pool, &s, &operands);
    let expect: Vec<f32> = y.iter().enumerate().map(|(i, y)| (y + bias[i % 40]).max(0.0)).collect();
    assert_eq!(found, expect);
}

#[test]
fn the_shape_decides_whether_to_fold() {
    let first = strided(4, [112, 112, 3], [7, 7], 64, [2, 2], 2);
    let is_used = |s: ConvShape| Folded::forward_of(&s).is_some();
    assert!(is_used(first) && Folded::filter_gradient_of(&first).is_some());
    assert!(!is_used(strided(1, [32, 32, 3], [7, 7], 16, [2, 2], 2)));
    assert!(!is_used(strided(4, [112, 112, 1], [7, 7], 64, [2, 2], 2)));
    assert!(!is_used(strided(4, [112, 112, 3], [7, 7], 8, [2, 2], 2)));
    assert!(!is_used(strided(4, [112, 112, 3], [7, 9], 64, [2, 2], 2)));
    assert!(!is_used(ConvShape { stride: [1, 1], ..first }));
    // Nearly all of what would be folded is padding, and there is a lot of it.
    assert!(!is_used(strided(1, [10, 10, 3], [1000, 1000], 16, [300, 300], 30_000)));
    assert!(!is_used(strided(1, [1, 1, 3], [7, 7], 64, [2, 2], 60)));
    assert!(!is_used(ConvShape { dilation: [2, 2], ..first }));
    for empty in [
        ConvShape { batch: 0, ..first },
        ConvShape { output: [0, 56, 64], ..first },
        ConvShape { filter: [0, 0], ..first },
    ] {
        assert!(!is_used(empty) && Folded::filter_gradient_of(&empty).is_none());
    }
    let (input, filter) = (vec![1.0; first.input_len()], vec![1.0; first.filter_len()]);
    let mut out = vec![0f64; first.output_len()];
    let forward = Folded::forward_of(&first).unwrap();
    assert!(!forward.convolve(&IntraPool::new(1), &input, &filter, &mut out, &Epilogue::default()));
}

/// A value that is not finite reaches those results that see it, and no others.
#[test]
fn what_is_not_finite_is_not_folded() {
    let pool = IntraPool::new(2);
    let s = strided(4, [64, 64, 3], [7, 7], 64, [2, 2], 2);
    assert!(Folded::forward_of(&s).is_some() && Folded::filter_gradient_of(&s).is_some());
    let [mut input, filter, mut grad] = operands(&s);
    input[(20 * 64 + 31) * 3 + 1] = f32::NAN;
    grad[(9 * s.output[1] + 3) * 64 + 1] = f32::INFINITY;
    let operands = [input, filter, grad];
    let [y, _, dw] = sums::<f32>(&pool, &s, &operands);
    let mut found = [s.output_len(), s.filter_len()].map(|n| vec![0.0; n]);
    let ([input, filter, grad], [found_y, found_dw]) = (&operands, &mut found);
    conv2d(&pool, &s, input, filter, found_y, NONE).unwrap();
    conv2d_backprop_filter(&pool, &s, input, grad, found_dw).unwrap();
    for (found, expect) in found.iter().zip([y, dw]) {
        assert!(found.iter().zip(&expect).all(|(x, y)| x == y || (x.is_nan() && y.is_nan())));
        assert!(found.iter().any(|x| x.is_finite()) && found.iter().any(|x| !x.is_finite()));
    }
}

#[test]
fn bias_and_activation_come_last() {
    let s = shape(2, [9, 9, 32], [3, 3], 40);
    let (pool, operands) = (IntraPool::new(2), operands(&s));
    let bias = random(4, 40);
    let epilogue = Epilogue { column_bias: Some(&bias), row_bias: None, activation: Activation::Relu };
    let mut found = vec![f32::NAN; s.output_len()];
    let [input, filter, _] = &operands;
    assert!(Winograd::forward_fitting(&s).unwrap().convolve(&pool, input, filter, &mut found, &epilogue));
    let [y, ..] = fast(&pool, &s, &operands);
    let expect: Vec<f32> = y.iter().enumerate().map(|(i, y)| (y + bias[i % 40]).max(0.0)).collect();
    assert_eq!(found, expect);
}

/// What is printed is the table of `bench/gemm.md`: `cargo test -p kolo-device --lib errors_are -- --nocapture`.
#[test]
fn errors_are_a_few_times_those_of_plain_sums() {
    for s in [
        shape(64, [14, 14, 32], [5, 5], 64),
        shape(16, [14, 14, 32], [5, 5], 64),
        shape(8, [28, 28, 64], [3, 3], 64),
        shape(2, [14, 14, 256], [3, 3], 32),
        ConvShape {
            output: [56, 56, 64],
            stride: [2, 2],
            pad_top: 2,
            pad_left: 2,
            ..shape(4, [112, 112, 3], [7, 7], 64)
        },
    ] {
        let [mut input, filter, grad] = operands(&s);
        // As after a `Relu`: not around zero.
        input.iter_mut().for_each(|x| *x = x.max(0.0));
        let operands = [input, filter, grad];
        let pool = IntraPool::new(2);
        let exact = sums::<f64>(&pool, &s, &operands);
        let sums = sums::<f32>(&pool, &s, &operands);
        let fast = match s.stride {
            [1, 1] => fast(&pool, &s, &operands),
            _ => {
                let [y, dw] = folded(&pool, &s, &operands);
                [y, Vec::new(), dw]
            }
        };
        for (i, name) in ["forward", "input gradient", "filter gradient"].into_iter().enumerate() {
            if fast[i].is_empty() {
                continue;
            }
            let ([rms, most], [plain_rms, plain_most]) = (errors(&fast[i], &exact[i]), errors(&sums[i], &exact[i]));
            let ([height, width, c], o, side) = (s.input, s.output[2], s.filter[0]);
            let shape = format!("{},{c},{height}x{width} -> {o}, {side} {name}", s.batch);
            println!(
                "| {shape} | {plain_rms:.1e} | {plain_most:.1e} | {rms:.1e} | {most:.1e} | {:.1} |",
                rms / plain_rms
            );
            assert!(rms < 6.0 * plain_rms, "{name} of {s:?}: {rms} and {plain_rms}");
        }
    }
}

/// A value that is not finite reaches those results that see it, and no others.
#[test]
fn what_is_not_finite_stays_where_it_belongs() {
    let pool = IntraPool::new(2);
    for (bad, side) in [(f32::NAN, 3), (f32::INFINITY, 5)] {
        let s = shape(16, [16, 16, 32], [side, side], 32);
        assert!(Winograd::forward_of(&s).is_some() && Winograd::input_gradient_of(&s).is_some());
        assert!(Winograd::filter_gradient_of(&s).is_some());
        let [mut input, filter, mut grad] = operands(&s);
        input[(5 * 16 + 6) * 32 + 7] = bad;
        grad[(9 * 16 + 3) * 32 + 1] = bad;
        let operands = [input, filter, grad];
        let expect = sums::<f32>(&pool, &s, &operands);
        let mut found = [s.output_len(), s.input_len(), s.filter_len()].map(|n| vec![0.0; n]);
        let ([input, filter, grad], [y, dx, dw]) = (&operands, &mut found);
        conv2d(&pool, &s, input, filter, y, NONE).unwrap();
        conv2d_backprop_input(&pool, &s, filter, grad, dx).unwrap();
        conv2d_backprop_filter(&pool, &s, input, grad, dw).unwrap();
        for (found, expect) in found.iter().zip(&expect) {
            assert!(found.iter().zip(expect).all(|(x, y)| x == y || (x.is_nan() && y.is_nan())));
        }
        assert_eq!(found[0].iter().filter(|y| !y.is_finite()).count(), side * side * 32);
    }
}

/// A transform that overflows does not make an infinite result of a finite one.
#[test]
fn large_values_do_not_overflow_on_the_way() {
    let pool = IntraPool::new(1);
    for side in [3, 5] {
        let s = shape(8, [16, 16, 16], [side, side], 16);
        assert!(Winograd::forward_of(&s).is_some());
        let input = vec![3e38f32; s.input_len()];
        let filter = vec![1e-3f32; s.filter_len()];
        let mut y = vec![f32::NAN; s.output_len()];
        conv2d(&pool, &s, &input, &filter, &mut y, NONE).unwrap();
        assert!(y.iter().all(|y| y.is_finite()));
    }
}

#[test]
fn the_shape_decides() {
    let lenet = shape(64, [14, 14, 32], [5, 5], 64);
    let is_used = |s: ConvShape| Winograd::forward_of(&s).is_some();
    assert!(is_used(lenet));
    assert!(is_used(shape(1, [14, 14, 32], [3, 3], 32)));
    assert!(Winograd::filter_gradient_of(&lenet).is_some());
    assert!(Winograd::filter_gradient_of(&shape(1, [14, 14, 32], [3, 3], 32)).is_none());
    assert!(!is_used(ConvShape { stride: [2, 1], ..lenet }));
    assert!(!is_used(ConvShape { dilation: [1, 2], ..lenet }));
    assert!(!is_used(shape(64, [28, 28, 1], [5, 5], 32)));
    assert!(!is_used(shape(64, [14, 14, 32], [5, 3], 64)));
    assert!(!is_used(shape(64, [14, 14, 32], [1, 1], 64)));
    // All but one of twenty-five taps are outside of the image.
    assert!(!is_used(shape(8, [1, 1, 64], [5, 5], 64)));
    assert!(!is_used(shape(0, [14, 14, 32], [3, 3], 32)));
    assert!(!is_used(ConvShape { output: [0, 14, 32], ..shape(1, [14, 14, 32], [3, 3], 32) }));
    // The transformed filter would be too large.
    assert!(!is_used(shape(1, [14, 14, 2048], [3, 3], 1024)));
    let doubles = vec![1.0; lenet.input_len()];
    let mut out = vec![0.0; lenet.output_len()];
    let forward = Winograd::forward_of(&lenet).unwrap();
    let filter = vec![1.0; lenet.filter_len()];
    assert!(!forward.convolve(&IntraPool::new(1), &doubles, &filter, &mut out, &Epilogue::default()));
}
