//! Products against a triple loop, for every instruction set present.

use super::*;

/// Numbers of a fixed sequence, small enough that sums stay exact-ish.
fn values(seed: u64, len: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
    };
    (0..len).map(|_| next()).collect()
}

fn naive(call: &Gemm<'_, f64>, old: &[f64]) -> Vec<f64> {
    let mut c = old.to_vec();
    for i in 0..call.m {
        for j in 0..call.n {
            let mut sum = 0.0;
            for p in 0..call.k {
                let a = if call.op_a == Op::None { i * call.lda + p } else { p * call.lda + i };
                let b = if call.op_b == Op::None { p * call.ldb + j } else { j * call.ldb + p };
                sum += call.a[a] * call.b[b];
            }
            let x = &mut c[i * call.ldc + j];
            *x = call.alpha * sum + if call.beta == 0.0 { 0.0 } else { call.beta * *x };
            *x += call.epilogue.column_bias.map_or(0.0, |b| b[j]);
            *x += call.epilogue.row_bias.map_or(0.0, |b| b[i]);
            *x = match call.epilogue.activation {
                Activation::None => *x,
                Activation::Relu => x.max(0.0),
                Activation::Sigmoid => 1.0 / (1.0 + (-*x).exp()),
            };
        }
    }
    c
}

struct Case {
    sizes: (usize, usize, usize),
    ops: (Op, Op),
    pad: usize,
    alpha: f64,
    beta: f64,
    activation: Activation,
    biased: bool,
}

fn check(case: &Case) {
    let (m, n, k) = case.sizes;
    let lda = if case.ops.0 == Op::None { k } else { m } + case.pad;
    let ldb = if case.ops.1 == Op::None { n } else { k } + case.pad;
    let ldc = n + case.pad;
    let a = values(1, lda * if case.ops.0 == Op::None { m } else { k });
    let b = values(2, ldb * if case.ops.1 == Op::None { k } else { n });
    let (col, row) = (values(3, n), values(4, m));
    let mut old = values(5, ldc * m);
    if case.beta == 0.0 {
        for r in old.chunks_mut(ldc.max(1)) {
            r[..n].fill(f64::NAN);
        }
    }
    let mut scratch = old.clone();
    let call = Gemm {
        m,
        n,
        k,
        alpha: case.alpha,
        a: &a,
        lda,
        op_a: case.ops.0,
        b: &b,
        ldb,
        op_b: case.ops.1,
        beta: case.beta,
        c: &mut scratch,
        ldc,
        epilogue: Epilogue {
            column_bias: case.biased.then_some(&col),
            row_bias: case.biased.then_some(&row),
            activation: case.activation,
        },
    };
    let expect = naive(&call, &old);
    let to32 = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let (a32, b32, col32, row32) = (to32(&a), to32(&b), to32(&col), to32(&row));
    for isa in Isa::present() {
        let mut results = Vec::new();
        for n_threads in [1, 2, 3] {
            let pool = IntraPool::new(n_threads);
            let mut c = to32(&old);
            let call32 = Gemm {
                m,
                n,
                k,
                alpha: case.alpha as f32,
                a: &a32,
                lda,
                op_a: case.ops.0,
                b: &b32,
                ldb,
                op_b: case.ops.1,
                beta: case.beta as f32,
                c: &mut c,
                ldc,
                epilogue: Epilogue {
                    column_bias: case.biased.then_some(&col32),
                    row_bias: case.biased.then_some(&row32),
                    activation: case.activation,
                },
            };
            gemm_real(isa, &pool, call32).unwrap();
            for (i, (&x, &y)) in c.iter().zip(&expect).enumerate() {
                let at = (i / ldc, i % ldc);
                let tolerance = 1e-6 * (4.0 + k as f64).sqrt() * 2.0;
                assert!(
                    (f64::from(x) - y).abs() <= tolerance,
                    "{isa:?} {m}x{n}x{k} {:?} at {at:?}: {x} for {y}",
                    case.ops
                );
            }
            results.push(c.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        }
        assert!(results.iter().all(|r| *r == results[0]), "threads change bits");
        let mut c = old.clone();
        let call64 = Gemm { c: &mut c, ..Gemm { c: &mut [], epilogue: call.epilogue, ..call } };
        let pool = IntraPool::new(2);
        gemm_real(isa, &pool, call64).unwrap();
        for (&x, &y) in c.iter().zip(&expect) {
            assert!((x - y).abs() <= 1e-12 * (4.0 + k as f64), "f64 {m}x{n}x{k}: {x} for {y}");
        }
    }
}

const OPS: [(Op, Op); 4] =
    [(Op::None, Op::None), (Op::None, Op::Transpose), (Op::Transpose, Op::None), (Op::Transpose, Op::Transpose)];

fn plain(sizes: (usize, usize, usize), ops: (Op, Op), pad: usize) -> Case {
    Case { sizes, ops, pad, alpha: 1.0, beta: 0.0, activation: Activation::None, biased: false }
}

#[test]
fn small_products_match_the_triple_loop() {
    for ops in OPS {
        for m in [1, 2, 5, 7, 14, 15, 29] {
            for n in [1, 3, 8, 9, 16, 17, 25, 33, 65] {
                for k in [1, 2, 4, 7, 19] {
                    check(&plain((m, n, k), ops, (m + n + k) % 3));
                }
            }
        }
    }
}

#[test]
fn blocked_products_match_the_triple_loop() {
    for ops in OPS {
        for sizes in [(100, 100, 784), (131, 67, 300), (200, 530, 270), (1, 300, 513), (300, 1, 257)] {
            check(&plain(sizes, ops, 5));
        }
        check(&plain((128, 512, 512), ops, 0));
        check(&plain((13, 21, 20_000), ops, 0));
        // Longer than a run of k.
        check(&plain((150, 70, 2100), ops, 3));
    }
}

#[test]
fn few_rows_and_many_columns_match_the_triple_loop() {
    for ops in OPS {
        for (sizes, pad) in [((64, 530, 300), 5), ((64, 512, 512), 0), ((20, 600, 2100), 1), ((100, 545, 64), 0)] {
            check(&plain(sizes, ops, pad));
            check(&Case { beta: 1.0, biased: true, activation: Activation::Relu, ..plain(sizes, ops, pad) });
        }
    }
}

/// Ten classes leave a third of a vector's lanes unused.
#[test]
fn nine_and_ten_columns_match_the_triple_loop() {
    for ops in OPS {
        for sizes in [(100, 10, 100), (8, 9, 16), (13, 10, 33), (1001, 10, 777), (57, 9, 64)] {
            check(&plain(sizes, ops, 0));
            let case = plain(sizes, ops, 1);
            check(&Case { alpha: 0.5, beta: 1.0, biased: true, activation: Activation::Relu, ..case });
        }
    }
}

#[test]
fn empty_products_leave_or_clear_c() {
    for ops in OPS {
        for sizes in [(0, 3, 3), (3, 0, 3), (3, 4, 0), (0, 0, 0)] {
            check(&plain(sizes, ops, 1));
            check(&Case { beta: 1.0, ..plain(sizes, ops, 1) });
            check(&Case { biased: true, activation: Activation::Relu, ..plain(sizes, ops, 1) });
        }
    }
}

#[test]
fn alpha_beta_bias_and_activation_apply() {
    for ops in OPS {
        for sizes in [(7, 9, 5), (1, 40, 33), (33, 1, 40), (40, 70, 300), (14, 30, 30_000), (60, 75, 900)] {
            for beta in [0.0, 1.0, -0.5] {
                for activation in [Activation::None, Activation::Relu, Activation::Sigmoid] {
                    let case = plain(sizes, ops, 2);
                    check(&Case { alpha: 0.25, beta, activation, biased: true, ..case });
                }
            }
        }
    }
}

#[test]
fn a_slice_too_short_is_an_error() {
    let pool = IntraPool::new(1);
    let (a, b, mut c) = ([0f32; 6], [0f32; 6], [0f32; 4]);
    assert!(gemm_f32(&pool, Gemm::new(2, 2, 3, &a, &b, &mut c)).is_ok());
    for (m, n, k) in [(3, 2, 3), (2, 3, 3), (2, 2, 4), (usize::MAX, 2, 3)] {
        let error = gemm_f32(&pool, Gemm::new(m, n, k, &a, &b, &mut c)).unwrap_err();
        assert!(error.contains("does not fit"), "{error}");
    }
    let mut call = Gemm::new(2, 2, 3, &a, &b, &mut c);
    call.lda = 2;
    assert!(gemm_f32(&pool, call).unwrap_err().contains("leading dimension"));
    let mut call = Gemm::new(2, 2, 3, &a, &b, &mut c);
    call.epilogue.column_bias = Some(&[1.0]);
    assert!(gemm_f32(&pool, call).unwrap_err().contains("bias has 1 values for 2 columns"));
}
