//! Whether two tensors agree.

use kolo::{DType, Element, Tensor};

use crate::case::Tolerance;

/// What differs, in words; `None` if nothing does. Integers, truth values and strings are compared exactly; floats
/// within the tolerance, NaN and infinities exactly.
pub fn difference(expected: &Tensor, got: &Tensor, tolerance: Tolerance) -> Option<String> {
    if (expected.dtype(), expected.shape()) != (got.dtype(), got.shape()) {
        return Some(format!("expected {expected:?}, got {got:?}"));
    }
    let halves = Tolerance { atol: tolerance.half_atol.or(tolerance.atol), ..tolerance };
    let at = match expected.dtype() {
        DType::F32 => floats(expected, got, tolerance, 2e-6, 1e-6, |x: f32| x.into()),
        DType::F64 => floats(expected, got, tolerance, 1e-13, 1e-14, |x: f64| x),
        DType::F16 => floats(expected, got, halves, 2e-3, 1e-6, |x: half::f16| x.into()),
        DType::BF16 => floats(expected, got, halves, 1.6e-2, 1e-6, |x: half::bf16| x.into()),
        DType::Str => (expected.strings() != got.strings()).then(String::new),
        _ => (expected != got).then(String::new),
    };
    at.map(|at| format!("{at}expected {expected:?}, got {got:?}"))
}

/// The first place that differs.
fn floats<T: Element>(
    expected: &Tensor,
    got: &Tensor,
    tolerance: Tolerance,
    rtol: f64,
    atol: f64,
    widen: impl Fn(T) -> f64,
) -> Option<String> {
    let on_gpu = crate::run::on_gpu();
    let (rtol, atol) = if on_gpu { (rtol * 10.0, atol * 10.0) } else { (rtol, atol) };
    let (rtol, atol) = match tolerance.exact && !on_gpu {
        true => (0.0, 0.0),
        false => (tolerance.rtol.unwrap_or(rtol).max(rtol), tolerance.atol.unwrap_or(atol).max(atol)),
    };
    let (expected, got) = (expected.data::<T>().unwrap(), got.data::<T>().unwrap());
    let differs = |a: f64, b: f64| match a.is_finite() && b.is_finite() {
        true => (a - b).abs() > atol + rtol * a.abs(),
        false => a != b && !(a.is_nan() && b.is_nan()),
    };
    let at = (0..expected.len()).find(|&i| differs(widen(expected[i]), widen(got[i])))?;
    Some(format!("element {at}: expected {:?}, got {:?}; ", widen(expected[at]), widen(got[at])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_agrees_and_what_does_not() {
        let agree =
            |a: &[f32], b: &[f32]| difference(&Tensor::vector(a), &Tensor::vector(b), Tolerance::default()).is_none();
        assert!(agree(&[1.0, f32::NAN, f32::INFINITY], &[1.000001, f32::NAN, f32::INFINITY]));
        assert!(!agree(&[1.0], &[1.00001]));
        assert!(!agree(&[1.0], &[f32::NAN]) && !agree(&[f32::NAN], &[1.0]));
        assert!(!agree(&[f32::INFINITY], &[f32::NEG_INFINITY]) && !agree(&[f32::INFINITY], &[1.0]));
        assert!(!agree(&[1.0], &[1.0, 1.0]));
        let exact = Tolerance { exact: true, ..Tolerance::default() };
        assert!(difference(&Tensor::scalar(1.0f32), &Tensor::scalar(1.0000001f32), exact).is_some());
        assert!(difference(&Tensor::scalar(1i32), &Tensor::scalar(1i64), exact).is_some());
    }
}
