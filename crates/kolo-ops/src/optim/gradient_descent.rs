//! `ApplyGradientDescent`: `var -= alpha · delta`. Its sparse form is a scatter.

use kolo_core::Result;
use kolo_graph::{Operation, Output, UpdateRule};

use crate::Op;
use crate::optim::update::{Compute, Optimizer, Rule, Scalars, build, dense_shape, update_kernels, update_op};

/// Subtracts `lr · grad` from a variable, given by reference or by handle.
#[track_caller]
pub fn apply_gradient_descent<'g>(var: Output<'g>, lr: Output<'g>, grad: Output<'g>) -> Operation<'g> {
    build("ApplyGradientDescent", &[var, lr, grad], &[])
}

static GRADIENT_DESCENT_RULE: UpdateRule =
    UpdateRule { name: "GradientDescent", grad: 2, scalars: &[1], text: "v -= c1 * g;", ..UpdateRule::BASE };

pub(crate) static APPLY_GRADIENT_DESCENT: Op = update_op(
    "ApplyGradientDescent",
    "(var:Ref(T), alpha:T, delta:T) -> (out:Ref(T)) ; T:type{num}, use_locking:bool=false",
    dense_shape::<GradientDescent, 0>,
    &GRADIENT_DESCENT_RULE,
    update_kernels!(dense, GradientDescent, 0),
);

pub(crate) static RESOURCE_APPLY_GRADIENT_DESCENT: Op = update_op(
    "ResourceApplyGradientDescent",
    "(var:resource, alpha:T, delta:T) -> () ; T:type{num}, use_locking:bool=false",
    dense_shape::<GradientDescent, 0>,
    &GRADIENT_DESCENT_RULE,
    update_kernels!(dense, GradientDescent, 0),
);

/// The rule.
pub struct GradientDescent;

impl Optimizer<0> for GradientDescent {
    const GRAD: usize = 2;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 0>> {
        let alpha: C = scalars.at(1)?;
        Ok(
            #[inline(always)]
            move |var: C, none: [C; 0], grad: C| (var - alpha * grad, none),
        )
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::optim::testing::update;

    #[test]
    fn gradient_descent() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyGradientDescent")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .input(0.1f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([Tensor::from([0.94000006f32, -1.8599999, 0.32])]);
    }
}
