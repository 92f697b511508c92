//! Convolutions and their gradients against plain loops.

use super::*;
use crate::cpu::gemm::Activation;

fn values(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f64 / 1001.0 - 1.0).collect()
}

/// Calls `f(input, filter, output)` with the places of every product of the convolution.
pub(super) fn each_term(s: &ConvShape, mut f: impl FnMut(usize, usize, usize)) {
    let [h, w, c] = s.input;
    let [oh, ow, o] = s.output;
    for b in 0..s.batch {
        for y in 0..oh {
            for x in 0..ow {
                for i in 0..s.filter[0] {
                    for j in 0..s.filter[1] {
                        let sy = (y * s.stride[0] + i * s.dilation[0]).wrapping_sub(s.pad_top);
                        let sx = (x * s.stride[1] + j * s.dilation[1]).wrapping_sub(s.pad_left);
                        if sy >= h || sx >= w {
                            continue;
                        }
                        for ci in 0..c {
                            for oi in 0..o {
                                f(
                                    ((b * h + sy) * w + sx) * c + ci,
                                    ((i * s.filter[1] + j) * c + ci) * o + oi,
                                    ((b * oh + y) * ow + x) * o + oi,
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

fn check(s: &ConvShape) {
    let input = values(1, s.input_len());
    let filter = values(2, s.filter_len());
    let grad = values(3, s.output_len());
    let bias = values(4, s.output[2]);
    let mut out = vec![0.0; s.output_len()];
    let mut grad_input = vec![0.0; s.input_len()];
    let mut grad_filter = vec![0.0; s.filter_len()];
    each_term(s, |i, f, o| {
        out[o] += input[i] * filter[f];
        grad_input[i] += grad[o] * filter[f];
        grad_filter[f] += grad[o] * input[i];
    });
    for (i, x) in out.iter_mut().enumerate() {
        *x = (*x + bias[i % s.output[2]]).max(0.0);
    }
    let to32 = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let (input32, filter32, grad32, bias32) = (to32(&input), to32(&filter), to32(&grad), to32(&bias));
    let near = |found: &[f32], expect: &[f64], what: &str| {
        for (i, (&x, &y)) in found.iter().zip(expect).enumerate() {
            let error = (f64::from(x) - y).abs();
            assert!(error <= 1e-4 * (1.0 + y.abs()), "{what} {s:?} at {i}: {x} for {y}");
        }
    };
    let mut first: Option<[Vec<f32>; 3]> = None;
    for n_threads in [1, 2, 3] {
        let pool = IntraPool::new(n_threads);
        let mut found = [s.output_len(), s.input_len(), s.filter_len()].map(|n| vec![f32::NAN; n]);
        let [y, dx, dw] = &mut found;
        let relu = Activation::Relu;
        let epilogue = Epilogue { column_bias: Some(&bias32), row_bias: None, activation: relu };
        conv2d(&pool, s, &input32, &filter32, y, epilogue).unwrap();
        conv2d_backprop_input(&pool, s, &filter32, &grad32, dx).unwrap();
        conv2d_backprop_filter(&pool, s, &input32, &grad32, dw).unwrap();
        near(y, &out, "forward");
        near(dx, &grad_input, "backprop input");
        near(dw, &grad_filter, "backprop filter");
        match &first {
            None => first = Some(found),
            Some(first) => assert_eq!(first, &found, "threads change bits"),
        }
    }
    let pool = IntraPool::new(1);
    let mut dx = vec![f64::NAN; s.input_len()];
    conv2d_backprop_input(&pool, s, &filter, &grad, &mut dx).unwrap();
    assert!(dx.iter().zip(&grad_input).all(|(x, y)| (x - y).abs() < 1e-9));
}

pub(super) fn shape(batch: usize, input: [usize; 3], filter: [usize; 2], o: usize) -> ConvShape {
    ConvShape {
        batch,
        input,
        filter,
        output: [input[0], input[1], o],
        stride: [1, 1],
        dilation: [1, 1],
        pad_top: (filter[0] - 1) / 2,
        pad_left: (filter[1] - 1) / 2,
    }
}

#[test]
fn same_padding_matches_the_loops() {
    check(&shape(3, [28, 28, 1], [5, 5], 32));
    check(&shape(2, [14, 14, 32], [5, 5], 64));
    check(&shape(2, [7, 9, 3], [3, 3], 5));
    check(&shape(1, [5, 4, 17], [2, 3], 1));
    check(&shape(4, [1, 1, 6], [1, 1], 10));
    check(&shape(1, [3, 3, 2], [5, 7], 3));
}

#[test]
fn valid_padding_strides_and_dilations_match_the_loops() {
    for stride in [[1, 1], [2, 2], [3, 1], [2, 4]] {
        for dilation in [[1, 1], [2, 2], [1, 3]] {
            for (pad_top, pad_left) in [(0, 0), (1, 2)] {
                let s = shape(2, [13, 12, 3], [3, 2], 9);
                let extent = |d: usize| dilation[d] * (s.filter[d] - 1) + 1;
                let size = |d: usize| (s.input[d] + 2 - extent(d)) / stride[d] + 1;
                let output = [size(0), size(1), 9];
                check(&ConvShape { stride, dilation, pad_top, pad_left, output, ..s });
            }
        }
    }
}

/// Batches that the tiles of [`Direct`] are made of, full and not, with taps outside of the image on every side.
#[test]
fn larger_batches_match_the_loops() {
    check(&shape(9, [6, 7, 8], [5, 5], 40));
    check(&shape(15, [5, 4, 3], [3, 3], 10));
    check(&shape(29, [4, 4, 17], [3, 2], 8));
    check(&shape(8, [28, 28, 1], [5, 5], 32));
    check(&shape(8, [3, 2, 9], [5, 7], 16));
    check(&shape(8, [4, 4, 3], [1, 3], 0));
    check(&ConvShape { output: [0, 8, 4], ..shape(8, [8, 8, 9], [3, 3], 8) });
}

#[test]
fn larger_batches_with_strides_and_dilations_match_the_loops() {
    for stride in [[1, 1], [2, 2], [3, 1], [2, 4]] {
        for dilation in [[1, 1], [2, 1], [2, 2], [1, 3]] {
            for (pad_top, pad_left) in [(0, 0), (1, 2), (4, 4)] {
                let s = shape(10, [9, 8, 11], [3, 2], 24);
                let extent = |d: usize| dilation[d] * (s.filter[d] - 1) + 1;
                let size = |d: usize| (s.input[d] + 2 - extent(d)) / stride[d] + 1;
                let output = [size(0), size(1), 24];
                check(&ConvShape { stride, dilation, pad_top, pad_left, output, ..s });
            }
        }
    }
}

/// Lines that make tiles by themselves, with ends that do not and panels of other widths.
#[test]
fn long_lines_match_the_loops() {
    check(&shape(8, [3, 28, 9], [1, 1], 40));
    check(&shape(9, [5, 27, 6], [3, 3], 33));
    check(&shape(10, [2, 64, 3], [2, 5], 96));
    check(&shape(8, [1, 12, 7], [1, 1], 32));
    // The filter is larger than its part of L2, and so is that of the input's gradient.
    check(&shape(8, [5, 13, 520], [1, 1], 264));
    for stride in [[1, 1], [2, 2], [3, 1], [1, 3]] {
        for dilation in [[1, 1], [2, 1]] {
            for (pad_top, pad_left) in [(0, 0), (1, 2), (4, 4)] {
                let s = shape(8, [7, 40, 5], [3, 2], 64);
                let extent = |d: usize| dilation[d] * (s.filter[d] - 1) + 1;
                let size = |d: usize| (s.input[d] + 2 - extent(d)) / stride[d] + 1;
                let output = [size(0), size(1), 64];
                check(&ConvShape { stride, dilation, pad_top, pad_left, output, ..s });
            }
        }
    }
}

/// An output that begins at a line of the caches is stored in another way than one that does not.
#[test]
fn large_results_past_the_caches_are_the_same() {
    let s = shape(8, [52, 42, 3], [1, 1], 256);
    let to32 = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<_>>();
    let (input, filter) = (to32(values(1, s.input_len())), to32(values(2, s.filter_len())));
    let mut room = vec![f32::NAN; s.output_len() + 32];
    let first = room.as_ptr().align_offset(64);
    for n_threads in [1, 3] {
        let pool = IntraPool::new(n_threads);
        let found = [first, first + 1].map(|first| {
            let out = &mut room[first..][..s.output_len()];
            conv2d(&pool, &s, &input, &filter, out, Epilogue::default()).unwrap();
            out.to_vec()
        });
        assert!(found[0].iter().all(|x| x.is_finite()));
        assert_eq!(found[0], found[1]);
    }
}

#[test]
fn empty_batches_and_channels_do_nothing_or_clear() {
    check(&shape(0, [8, 8, 3], [3, 3], 4));
    check(&shape(2, [8, 8, 0], [3, 3], 4));
    check(&ConvShape { output: [0, 8, 4], ..shape(2, [8, 8, 3], [3, 3], 4) });
}

#[test]
fn a_wrong_length_is_an_error() {
    let pool = IntraPool::new(1);
    let s = shape(1, [2, 2, 1], [1, 1], 1);
    let mut out = [0f32; 4];
    let error = conv2d(&pool, &s, &[0.0; 3], &[0.0], &mut out, Epilogue::default()).unwrap_err();
    assert_eq!(error, "input has 3 values, the shape needs 4");
}
