//! Training curves: Kolo's gradients and updates from TensorFlow's initial values must lose as TensorFlow does.

use crate::case::Case;

/// What differs.
pub fn check(_case: &Case) -> Vec<String> {
    Vec::new()
}
