//! `ApplyAddSign`, `ApplyPowerSign` (Bello et al., 2017): steps grow where the gradient and its running mean agree in
//! sign.

use kolo_core::Result;
use kolo_graph::UpdateRule;

use crate::Op;
use crate::optim::update::{Compute, Optimizer, Rule, Scalars, dense_shape, update_kernels, update_op};

static ADD_SIGN_RULE: UpdateRule = UpdateRule {
    name: "AddSign",
    slots: 1,
    grad: 6,
    scalars: &[2, 3, 4, 5],
    text: "s0 = s0 * c5 + g * ((W)1 - c5); W sign = (W)((g > (W)0) - (g < (W)0)) * (W)((s0 > (W)0) - (s0 < (W)0));\n\
           v -= c2 * (c3 + c4 * sign) * g;",
    ..UpdateRule::BASE
};

static POWER_SIGN_RULE: UpdateRule = UpdateRule {
    name: "PowerSign",
    slots: 1,
    grad: 6,
    scalars: &[2, 3, 4, 5],
    text: "s0 = s0 * c5 + g * ((W)1 - c5); W sign = (W)((g > (W)0) - (g < (W)0)) * (W)((s0 > (W)0) - (s0 < (W)0));\n\
           v -= c2 * exp(c3 * c4 * sign) * g;",
    ..UpdateRule::BASE
};

pub(crate) static APPLY_ADD_SIGN: Op = update_op(
    "ApplyAddSign",
    "(var:Ref(T), m:Ref(T), lr:T, alpha:T, sign_decay:T, beta:T, grad:T) -> (out:Ref(T)) ; \
     T:type{num}, use_locking:bool=false",
    dense_shape::<AddSign, 1>,
    &ADD_SIGN_RULE,
    update_kernels!(dense, AddSign, 1),
);

pub(crate) static RESOURCE_APPLY_ADD_SIGN: Op = update_op(
    "ResourceApplyAddSign",
    "(var:resource, m:resource, lr:T, alpha:T, sign_decay:T, beta:T, grad:T) -> () ; T:type{num}, \
     use_locking:bool=false",
    dense_shape::<AddSign, 1>,
    &ADD_SIGN_RULE,
    update_kernels!(dense, AddSign, 1),
);

pub(crate) static APPLY_POWER_SIGN: Op = update_op(
    "ApplyPowerSign",
    "(var:Ref(T), m:Ref(T), lr:T, logbase:T, sign_decay:T, beta:T, grad:T) -> (out:Ref(T)) ; \
     T:type{num}, use_locking:bool=false",
    dense_shape::<PowerSign, 1>,
    &POWER_SIGN_RULE,
    update_kernels!(dense, PowerSign, 1),
);

pub(crate) static RESOURCE_APPLY_POWER_SIGN: Op = update_op(
    "ResourceApplyPowerSign",
    "(var:resource, m:resource, lr:T, logbase:T, sign_decay:T, beta:T, grad:T) -> () ; \
     T:type{num}, use_locking:bool=false",
    dense_shape::<PowerSign, 1>,
    &POWER_SIGN_RULE,
    update_kernels!(dense, PowerSign, 1),
);

/// `lr · (alpha + sign_decay · sign(grad) · sign(m)) · grad`.
pub struct AddSign;

impl Optimizer<1> for AddSign {
    const GRAD: usize = 6;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 1>> {
        let (lr, alpha, sign_decay, beta): (C, C, C, C) =
            (scalars.at(2)?, scalars.at(3)?, scalars.at(4)?, scalars.at(5)?);
        Ok(
            #[inline(always)]
            move |var: C, [m]: [C; 1], grad: C| {
                let m = m * beta + grad * (C::one() - beta);
                (var - lr * (alpha + sign_decay * agreement(grad, m)) * grad, [m])
            },
        )
    }
}

/// `lr · exp(logbase · sign_decay · sign(grad) · sign(m)) · grad`.
pub struct PowerSign;

impl Optimizer<1> for PowerSign {
    const GRAD: usize = 6;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 1>> {
        let (lr, logbase, sign_decay, beta): (C, C, C, C) =
            (scalars.at(2)?, scalars.at(3)?, scalars.at(4)?, scalars.at(5)?);
        let scale = logbase * sign_decay;
        // Only three values are possible.
        let (apart, together) = ((-scale).exp(), scale.exp());
        Ok(
            #[inline(always)]
            move |var: C, [m]: [C; 1], grad: C| {
                let m = m * beta + grad * (C::one() - beta);
                let sign = agreement(grad, m);
                let factor = if sign > C::zero() { together } else { apart };
                let factor = if sign == C::zero() { C::one() } else { factor };
                (var - lr * factor * grad, [m])
            },
        )
    }
}

/// 1 if both have one sign, −1 if they differ, 0 if either is 0.
#[inline(always)]
fn agreement<C: Compute>(a: C, b: C) -> C {
    let sign = |x: C| {
        let positive = if x > C::zero() { C::one() } else { C::zero() };
        if x < C::zero() { -C::one() } else { positive }
    };
    sign(a) * sign(b)
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::optim::testing::update;

    #[test]
    fn signs() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyAddSign")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(0.1f32)
            .input(1.0f32)
            .input(0.9f32)
            .input(0.8f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.88600004f32, -1.734, 0.158]),
                Tensor::from([0.14f32, -0.26479998, 0.34319997]),
            ]);
        update("ResourceApplyPowerSign")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(0.1f32)
            .input(1.0f32)
            .input(0.9f32)
            .input(0.8f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.8524238f32, -1.6556556, 0.057271466]),
                Tensor::from([0.14f32, -0.26479998, 0.34319997]),
            ]);
    }
}
