//! `ApplyAdam` (Kingma and Ba, 2014), with the look-ahead of Nesterov if asked for, and its kin: `AdamWithAmsgrad`, which
//! never lets the second moment fall, and `AdaMax`, which takes the largest gradient instead of the second moment.

use kolo_core::Result;
use kolo_graph::{Operation, Output, UpdateRule};

use crate::Op;
use crate::optim::update::{Compute, Optimizer, Rule, Scalars, build, dense_shape, update_kernels, update_op};

/// Updates a variable and its two moments, given by reference or by handle. `powers` are β₁ᵗ and β₂ᵗ, which the graph
/// multiplies on after each step.
#[track_caller]
pub fn apply_adam<'g>(
    [var, m, v]: [Output<'g>; 3],
    powers: [Output<'g>; 2],
    lr: Output<'g>,
    betas: [Output<'g>; 2],
    epsilon: Output<'g>,
    grad: Output<'g>,
    use_nesterov: bool,
) -> Operation<'g> {
    let inputs = [var, m, v, powers[0], powers[1], lr, betas[0], betas[1], epsilon, grad];
    build("ApplyAdam", &inputs, &[("use_nesterov", use_nesterov)])
}

static ADAM_RULE: UpdateRule = UpdateRule {
    name: "Adam",
    slots: 2,
    grad: 9,
    scalars: &[3, 4, 5, 6, 7, 8],
    flag: "use_nesterov",
    before: "const W alpha = c5 * sqrt((W)1 - c4) / ((W)1 - c3);",
    text: "s0 += (g - s0) * ((W)1 - c6); s1 += (g * g - s1) * ((W)1 - c7);\n\
           v -= (FLAG ? g * ((W)1 - c6) + s0 * c6 : s0) * alpha / (sqrt(s1) + c8);",
    ..UpdateRule::BASE
};

static ADAM_WITH_AMSGRAD_RULE: UpdateRule = UpdateRule {
    name: "AdamWithAmsgrad",
    slots: 3,
    grad: 10,
    scalars: &[4, 5, 6, 7, 8, 9],
    before: "const W alpha = c6 * sqrt((W)1 - c5) / ((W)1 - c4);",
    text: "s0 += (g - s0) * ((W)1 - c7); s1 += (g * g - s1) * ((W)1 - c8); s2 = s2 > s1 ? s2 : s1;\n\
           v -= s0 * alpha / (sqrt(s2) + c9);",
    ..UpdateRule::BASE
};

static ADA_MAX_RULE: UpdateRule = UpdateRule {
    name: "AdaMax",
    slots: 2,
    grad: 8,
    scalars: &[3, 4, 5, 6, 7],
    before: "const W alpha = c4 / ((W)1 - c3);",
    text: "s0 += (g - s0) * ((W)1 - c5); W faded = c6 * s1, size = fabs(g); s1 = faded > size ? faded : size;\n\
           v -= alpha * (s0 / (s1 + c7));",
    ..UpdateRule::BASE
};

pub(crate) static APPLY_ADAM: Op = update_op(
    "ApplyAdam",
    "(var:Ref(T), m:Ref(T), v:Ref(T), beta1_power:T, beta2_power:T, lr:T, beta1:T, beta2:T, \
     epsilon:T, grad:T) -> (out:Ref(T)) ; T:type{num}, use_locking:bool=false, \
     use_nesterov:bool=false",
    dense_shape::<Adam, 2>,
    &ADAM_RULE,
    update_kernels!(dense, Adam, 2),
);

pub(crate) static RESOURCE_APPLY_ADAM: Op = update_op(
    "ResourceApplyAdam",
    "(var:resource, m:resource, v:resource, beta1_power:T, beta2_power:T, lr:T, beta1:T, beta2:T, \
     epsilon:T, grad:T) -> () ; T:type{num}, use_locking:bool=false, use_nesterov:bool=false",
    dense_shape::<Adam, 2>,
    &ADAM_RULE,
    update_kernels!(dense, Adam, 2),
);

pub(crate) static RESOURCE_APPLY_ADAM_WITH_AMSGRAD: Op = update_op(
    "ResourceApplyAdamWithAmsgrad",
    "(var:resource, m:resource, v:resource, vhat:resource, beta1_power:T, beta2_power:T, lr:T, \
     beta1:T, beta2:T, epsilon:T, grad:T) -> () ; T:type{num}, use_locking:bool=false",
    dense_shape::<AdamWithAmsgrad, 3>,
    &ADAM_WITH_AMSGRAD_RULE,
    update_kernels!(dense, AdamWithAmsgrad, 3),
);

pub(crate) static APPLY_ADA_MAX: Op = update_op(
    "ApplyAdaMax",
    "(var:Ref(T), m:Ref(T), v:Ref(T), beta1_power:T, lr:T, beta1:T, beta2:T, epsilon:T, grad:T) \
     -> (out:Ref(T)) ; T:type{num}, use_locking:bool=false",
    dense_shape::<AdaMax, 2>,
    &ADA_MAX_RULE,
    update_kernels!(dense, AdaMax, 2),
);

pub(crate) static RESOURCE_APPLY_ADA_MAX: Op = update_op(
    "ResourceApplyAdaMax",
    "(var:resource, m:resource, v:resource, beta1_power:T, lr:T, beta1:T, beta2:T, epsilon:T, \
     grad:T) -> () ; T:type{num}, use_locking:bool=false",
    dense_shape::<AdaMax, 2>,
    &ADA_MAX_RULE,
    update_kernels!(dense, AdaMax, 2),
);

/// The rule.
pub struct Adam;

impl Optimizer<2> for Adam {
    const GRAD: usize = 9;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 2>> {
        let (power1, power2, lr): (C, C, C) = (scalars.at(3)?, scalars.at(4)?, scalars.at(5)?);
        let (beta1, beta2, epsilon): (C, C, C) = (scalars.at(6)?, scalars.at(7)?, scalars.at(8)?);
        let one = C::one();
        let alpha = lr * (one - power2).sqrt() / (one - power1);
        let (along_grad, along_m) = match scalars.flag("use_nesterov")? {
            true => (one - beta1, beta1),
            false => (C::zero(), one),
        };
        Ok(
            #[inline(always)]
            move |var: C, [m, v]: [C; 2], grad: C| {
                let m = m + (grad - m) * (one - beta1);
                let v = v + (grad * grad - v) * (one - beta2);
                (var - (grad * along_grad + m * along_m) * alpha / (v.sqrt() + epsilon), [m, v])
            },
        )
    }
}

/// AMSGrad's rule (Reddi et al., 2018).
pub struct AdamWithAmsgrad;

impl Optimizer<3> for AdamWithAmsgrad {
    const GRAD: usize = 10;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 3>> {
        let (power1, power2, lr): (C, C, C) = (scalars.at(4)?, scalars.at(5)?, scalars.at(6)?);
        let (beta1, beta2, epsilon): (C, C, C) = (scalars.at(7)?, scalars.at(8)?, scalars.at(9)?);
        let one = C::one();
        let alpha = lr * (one - power2).sqrt() / (one - power1);
        Ok(
            #[inline(always)]
            move |var: C, [m, v, vhat]: [C; 3], grad: C| {
                let m = m + (grad - m) * (one - beta1);
                let v = v + (grad * grad - v) * (one - beta2);
                let vhat = if vhat > v { vhat } else { v };
                (var - m * alpha / (vhat.sqrt() + epsilon), [m, v, vhat])
            },
        )
    }
}

/// AdaMax's rule.
pub struct AdaMax;

impl Optimizer<2> for AdaMax {
    const GRAD: usize = 8;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 2>> {
        let (power1, lr): (C, C) = (scalars.at(3)?, scalars.at(4)?);
        let (beta1, beta2, epsilon): (C, C, C) = (scalars.at(5)?, scalars.at(6)?, scalars.at(7)?);
        let one = C::one();
        let alpha = lr / (one - power1);
        Ok(
            #[inline(always)]
            move |var: C, [m, v]: [C; 2], grad: C| {
                let m = m + (grad - m) * (one - beta1);
                let (faded, size) = (beta2 * v, grad.abs());
                let v = if faded > size { faded } else { size };
                (var - alpha * (m / (v + epsilon)), [m, v])
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::optim::testing::update;

    #[test]
    fn adam() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyAdam")
            .attr("use_nesterov", false)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.5f32, 0.4, 0.6]))
            .input(0.9f32)
            .input(0.999f32)
            .input(0.1f32)
            .input(0.9f32)
            .input(0.999f32)
            .input(0.001f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.98847103f32, -2.0069382, 0.468451]),
                Tensor::from([0.13800001f32, 0.02899997, 0.41400003]),
                Tensor::from([0.49918044f32, 0.40017992, 0.6004198]),
            ]);
        update("ResourceApplyAdam")
            .attr("use_nesterov", true)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.5f32, 0.4, 0.6]))
            .input(0.9f32)
            .input(0.999f32)
            .input(0.1f32)
            .input(0.9f32)
            .input(0.999f32)
            .input(0.001f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.98694277f32, -1.9992564, 0.46426886]),
                Tensor::from([0.13800001f32, 0.02899997, 0.41400003]),
                Tensor::from([0.49918044f32, 0.40017992, 0.6004198]),
            ]);
    }

    #[test]
    fn amsgrad() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyAdamWithAmsgrad")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.5f32, 0.4, 0.6]))
            .variable(Tensor::from([0.55f32, 0.44, 0.66]))
            .input(0.9f32)
            .input(0.999f32)
            .input(0.1f32)
            .input(0.9f32)
            .input(0.999f32)
            .input(0.001f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.98901373f32, -2.0066166, 0.46990934]),
                Tensor::from([0.13800001f32, 0.02899997, 0.41400003]),
                Tensor::from([0.49918044f32, 0.40017992, 0.6004198]),
                Tensor::from([0.55f32, 0.44000003, 0.66]),
            ]);
    }

    #[test]
    fn ada_max() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyAdaMax")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.5f32, 0.4, 0.6]))
            .input(0.9f32)
            .input(0.1f32)
            .input(0.9f32)
            .input(0.999f32)
            .input(0.001f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.48424017f32, -2.198288, -0.3590454]),
                Tensor::from([0.13800001f32, 0.02899997, 0.41400003]),
                Tensor::from([0.49900052f32, 0.7, 0.9]),
            ]);
    }
}
