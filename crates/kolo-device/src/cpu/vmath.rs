//! Elementary functions over slices, vectorised by the compiler for the instruction set present.

/// `x = 1 / (1 + exp(-x))` for every element.
pub fn sigmoid_f32(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp()));
}

/// `x = 1 / (1 + exp(-x))` for every element.
pub fn sigmoid_f64(x: &mut [f64]) {
    x.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp()));
}
