//! `ApplyKoloAdamW` (Loshchilov and Hutter, 2017): Adam, and apart from it a decay of the weights, in one pass. An op of our
//! own. `var = var · (1 − lr · weight_decay) − lr · m̂ / (√v̂ + ε)`, where m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ).

use kolo_core::Result;
use kolo_graph::UpdateRule;

use crate::Op;
use crate::optim::update::{Compute, Optimizer, Rule, Scalars, dense_shape, update_kernels, update_op};

static KOLO_ADAM_W_RULE: UpdateRule = UpdateRule {
    name: "KoloAdamW",
    slots: 2,
    grad: 10,
    scalars: &[3, 4, 5, 6, 7, 8, 9],
    before: "const W decay = c5 * c9, root = sqrt((W)1 - c4), alpha = c5 * root / ((W)1 - c3), eps = c8 * root;",
    text: "s0 += (g - s0) * ((W)1 - c6); s1 += (g * g - s1) * ((W)1 - c7);\n\
           v = v - v * decay - s0 * alpha / (sqrt(s1) + eps);",
    ..UpdateRule::BASE
};

pub(crate) static APPLY_ADAM_W: Op = update_op(
    "ApplyKoloAdamW",
    "(var:Ref(T), m:Ref(T), v:Ref(T), beta1_power:T, beta2_power:T, lr:T, beta1:T, beta2:T, \
     epsilon:T, weight_decay:T, grad:T) -> (out:Ref(T)) ; T:type{num}, use_locking:bool=false",
    dense_shape::<AdamW, 2>,
    &KOLO_ADAM_W_RULE,
    update_kernels!(dense, AdamW, 2),
);

pub(crate) static RESOURCE_APPLY_ADAM_W: Op = update_op(
    "ResourceApplyKoloAdamW",
    "(var:resource, m:resource, v:resource, beta1_power:T, beta2_power:T, lr:T, beta1:T, beta2:T, \
     epsilon:T, weight_decay:T, grad:T) -> () ; T:type{num}, use_locking:bool=false",
    dense_shape::<AdamW, 2>,
    &KOLO_ADAM_W_RULE,
    update_kernels!(dense, AdamW, 2),
);

/// The rule.
pub struct AdamW;

impl Optimizer<2> for AdamW {
    const GRAD: usize = 10;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 2>> {
        let (power1, power2, lr): (C, C, C) = (scalars.at(3)?, scalars.at(4)?, scalars.at(5)?);
        let (beta1, beta2, epsilon): (C, C, C) = (scalars.at(6)?, scalars.at(7)?, scalars.at(8)?);
        let one = C::one();
        let decay = lr * scalars.at::<C>(9)?;
        // The corrections of both moments, moved out of the loop: √v̂ + ε is (√v + ε · root) / root.
        let root = (one - power2).sqrt();
        let (alpha, epsilon) = (lr * root / (one - power1), epsilon * root);
        Ok(
            #[inline(always)]
            move |var: C, [m, v]: [C; 2], grad: C| {
                let m = m + (grad - m) * (one - beta1);
                let v = v + (grad * grad - v) * (one - beta2);
                (var - var * decay - m * alpha / (v.sqrt() + epsilon), [m, v])
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::optim::testing::update;

    #[test]
    fn adam_w() {
        // One step by the formula above, in float64: β₁ᵗ = 0.9, β₂ᵗ = 0.999, rate 0.1, ε = 0.001, decay 0.05.
        let (var, m, v, grad) = ([1.0f64, -2.0, 0.5], [0.1f64, 0.2, 0.3], [0.5f64, 0.4, 0.6], [0.3f64, -0.7, 0.9]);
        let moved = [0, 1, 2].map(|i| {
            let m = 0.9 * m[i] + 0.1 * grad[i];
            let v = 0.999 * v[i] + 0.001 * grad[i] * grad[i];
            let step = (m / 0.1) / ((v / 0.001f64).sqrt() + 0.001);
            [var[i] * (1.0 - 0.1 * 0.05) - 0.1 * step, m, v]
        });
        let part = |k: usize| Tensor::from(moved.map(|after| after[k] as f32));
        update("ResourceApplyKoloAdamW")
            .variable(Tensor::from(var.map(|x| x as f32)))
            .variable(Tensor::from(m.map(|x| x as f32)))
            .variable(Tensor::from(v.map(|x| x as f32)))
            .input(0.9f32)
            .input(0.999f32)
            .input(0.1f32)
            .input(0.9f32)
            .input(0.999f32)
            .input(0.001f32)
            .input(0.05f32)
            .input(Tensor::from(grad.map(|x| x as f32)))
            .once_gives([part(0), part(1), part(2)]);
    }
}
