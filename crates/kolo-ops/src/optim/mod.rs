//! Updates of variables: one file per optimizer, one rule for each, in all the forms TensorFlow has.
//!
//! A rule says what becomes of one element of a variable and its slots, given one of the gradient. [`update`] applies it to
//! whole variables, held by reference or by handle, or to the rows that have a gradient.

use crate::Op;

pub mod adadelta;
pub mod adagrad;
pub mod adagrad_da;
pub mod adam;
pub mod adam_w;
pub mod ftrl;
pub mod gradient_descent;
pub mod momentum;
pub mod proximal;
pub mod rms_prop;
pub mod sign;
#[cfg(test)]
pub(crate) mod testing;
pub mod update;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &gradient_descent::APPLY_GRADIENT_DESCENT,
    &gradient_descent::RESOURCE_APPLY_GRADIENT_DESCENT,
    &momentum::APPLY_MOMENTUM,
    &momentum::RESOURCE_APPLY_MOMENTUM,
    &momentum::SPARSE_APPLY_MOMENTUM,
    &momentum::RESOURCE_SPARSE_APPLY_MOMENTUM,
    &momentum::RESOURCE_APPLY_KERAS_MOMENTUM,
    &momentum::RESOURCE_SPARSE_APPLY_KERAS_MOMENTUM,
    &adam::APPLY_ADAM,
    &adam::RESOURCE_APPLY_ADAM,
    &adam::RESOURCE_APPLY_ADAM_WITH_AMSGRAD,
    &adam::APPLY_ADA_MAX,
    &adam::RESOURCE_APPLY_ADA_MAX,
    &adam_w::APPLY_ADAM_W,
    &adam_w::RESOURCE_APPLY_ADAM_W,
    &adagrad::APPLY_ADAGRAD,
    &adagrad::RESOURCE_APPLY_ADAGRAD,
    &adagrad::SPARSE_APPLY_ADAGRAD,
    &adagrad::RESOURCE_SPARSE_APPLY_ADAGRAD,
    &adagrad::APPLY_ADAGRAD_V2,
    &adagrad::RESOURCE_APPLY_ADAGRAD_V2,
    &adagrad::SPARSE_APPLY_ADAGRAD_V2,
    &adagrad::RESOURCE_SPARSE_APPLY_ADAGRAD_V2,
    &adagrad_da::APPLY_ADAGRAD_DA,
    &adagrad_da::RESOURCE_APPLY_ADAGRAD_DA,
    &adagrad_da::SPARSE_APPLY_ADAGRAD_DA,
    &adagrad_da::RESOURCE_SPARSE_APPLY_ADAGRAD_DA,
    &proximal::APPLY_PROXIMAL_GRADIENT_DESCENT,
    &proximal::RESOURCE_APPLY_PROXIMAL_GRADIENT_DESCENT,
    &proximal::SPARSE_APPLY_PROXIMAL_GRADIENT_DESCENT,
    &proximal::RESOURCE_SPARSE_APPLY_PROXIMAL_GRADIENT_DESCENT,
    &proximal::APPLY_PROXIMAL_ADAGRAD,
    &proximal::RESOURCE_APPLY_PROXIMAL_ADAGRAD,
    &proximal::SPARSE_APPLY_PROXIMAL_ADAGRAD,
    &proximal::RESOURCE_SPARSE_APPLY_PROXIMAL_ADAGRAD,
    &adadelta::APPLY_ADADELTA,
    &adadelta::RESOURCE_APPLY_ADADELTA,
    &adadelta::SPARSE_APPLY_ADADELTA,
    &adadelta::RESOURCE_SPARSE_APPLY_ADADELTA,
    &rms_prop::APPLY_RMS_PROP,
    &rms_prop::RESOURCE_APPLY_RMS_PROP,
    &rms_prop::SPARSE_APPLY_RMS_PROP,
    &rms_prop::RESOURCE_SPARSE_APPLY_RMS_PROP,
    &rms_prop::APPLY_CENTERED_RMS_PROP,
    &rms_prop::RESOURCE_APPLY_CENTERED_RMS_PROP,
    &rms_prop::SPARSE_APPLY_CENTERED_RMS_PROP,
    &rms_prop::RESOURCE_SPARSE_APPLY_CENTERED_RMS_PROP,
    &ftrl::APPLY_FTRL,
    &ftrl::RESOURCE_APPLY_FTRL,
    &ftrl::SPARSE_APPLY_FTRL,
    &ftrl::RESOURCE_SPARSE_APPLY_FTRL,
    &ftrl::APPLY_FTRL_V2,
    &ftrl::RESOURCE_APPLY_FTRL_V2,
    &ftrl::SPARSE_APPLY_FTRL_V2,
    &ftrl::RESOURCE_SPARSE_APPLY_FTRL_V2,
    &sign::APPLY_ADD_SIGN,
    &sign::RESOURCE_APPLY_ADD_SIGN,
    &sign::APPLY_POWER_SIGN,
    &sign::RESOURCE_APPLY_POWER_SIGN,
];
