//! `ApplyProximalGradientDescent`, `ApplyProximalAdagrad`: a step along the gradient, then towards zero (Duchi and
//! Singer, 2009): by a fixed amount for l1, in proportion for l2.

use kolo_core::Result;
use kolo_graph::UpdateRule;

use crate::Op;
use crate::optim::update::{
    Compute, Optimizer, Rule, Scalars, dense_shape, sparse_shape, sparse_update_op, update_kernels, update_op,
};

static PROXIMAL_GRADIENT_DESCENT_RULE: UpdateRule = UpdateRule {
    name: "ProximalGradientDescent",
    grad: 4,
    scalars: &[1, 2, 3],
    text: "W x = v - c1 * g, cut = c2 > (W)0 ? c1 * c2 : (W)0, far = fabs(x) - cut; far = far > (W)0 ? far : (W)0;\n\
           v = (x < (W)0 ? -far : far) / ((W)1 + c1 * c3);",
    ..UpdateRule::BASE
};

static PROXIMAL_ADAGRAD_RULE: UpdateRule = UpdateRule {
    name: "ProximalAdagrad",
    slots: 1,
    grad: 5,
    scalars: &[2, 3, 4],
    text: "s0 += g * g; W lr = c2 / sqrt(s0), x = v - lr * g, cut = c3 > (W)0 ? lr * c3 : (W)0, far = fabs(x) - cut;\n\
           far = far > (W)0 ? far : (W)0; v = (x < (W)0 ? -far : far) / ((W)1 + lr * c4);",
    ..UpdateRule::BASE
};

pub(crate) static APPLY_PROXIMAL_GRADIENT_DESCENT: Op = update_op(
    "ApplyProximalGradientDescent",
    "(var:Ref(T), alpha:T, l1:T, l2:T, delta:T) -> (out:Ref(T)) ; T:type{num}, \
     use_locking:bool=false",
    dense_shape::<ProximalGradientDescent, 0>,
    &PROXIMAL_GRADIENT_DESCENT_RULE,
    update_kernels!(dense, ProximalGradientDescent, 0),
);

pub(crate) static RESOURCE_APPLY_PROXIMAL_GRADIENT_DESCENT: Op = update_op(
    "ResourceApplyProximalGradientDescent",
    "(var:resource, alpha:T, l1:T, l2:T, delta:T) -> () ; T:type{num}, use_locking:bool=false",
    dense_shape::<ProximalGradientDescent, 0>,
    &PROXIMAL_GRADIENT_DESCENT_RULE,
    update_kernels!(dense, ProximalGradientDescent, 0),
);

pub(crate) static SPARSE_APPLY_PROXIMAL_GRADIENT_DESCENT: Op = sparse_update_op(
    "SparseApplyProximalGradientDescent",
    "(var:Ref(T), alpha:T, l1:T, l2:T, grad:T, indices:Tindices) -> (out:Ref(T)) ; T:type{num}, \
     Tindices:type{int32,int64}, use_locking:bool=false",
    sparse_shape::<ProximalGradientDescent, 0>,
    &PROXIMAL_GRADIENT_DESCENT_RULE,
    update_kernels!(sparse, ProximalGradientDescent, 0),
);

pub(crate) static RESOURCE_SPARSE_APPLY_PROXIMAL_GRADIENT_DESCENT: Op = sparse_update_op(
    "ResourceSparseApplyProximalGradientDescent",
    "(var:resource, alpha:T, l1:T, l2:T, grad:T, indices:Tindices) -> () ; T:type{num}, \
     Tindices:type{int32,int64}, use_locking:bool=false",
    sparse_shape::<ProximalGradientDescent, 0>,
    &PROXIMAL_GRADIENT_DESCENT_RULE,
    update_kernels!(sparse, ProximalGradientDescent, 0),
);

pub(crate) static APPLY_PROXIMAL_ADAGRAD: Op = update_op(
    "ApplyProximalAdagrad",
    "(var:Ref(T), accum:Ref(T), lr:T, l1:T, l2:T, grad:T) -> (out:Ref(T)) ; T:type{num}, \
     use_locking:bool=false",
    dense_shape::<ProximalAdagrad, 1>,
    &PROXIMAL_ADAGRAD_RULE,
    update_kernels!(dense, ProximalAdagrad, 1),
);

pub(crate) static RESOURCE_APPLY_PROXIMAL_ADAGRAD: Op = update_op(
    "ResourceApplyProximalAdagrad",
    "(var:resource, accum:resource, lr:T, l1:T, l2:T, grad:T) -> () ; T:type{num}, \
     use_locking:bool=false",
    dense_shape::<ProximalAdagrad, 1>,
    &PROXIMAL_ADAGRAD_RULE,
    update_kernels!(dense, ProximalAdagrad, 1),
);

pub(crate) static SPARSE_APPLY_PROXIMAL_ADAGRAD: Op = sparse_update_op(
    "SparseApplyProximalAdagrad",
    "(var:Ref(T), accum:Ref(T), lr:T, l1:T, l2:T, grad:T, indices:Tindices) -> (out:Ref(T)) ; \
     T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false",
    sparse_shape::<ProximalAdagrad, 1>,
    &PROXIMAL_ADAGRAD_RULE,
    update_kernels!(sparse, ProximalAdagrad, 1),
);

pub(crate) static RESOURCE_SPARSE_APPLY_PROXIMAL_ADAGRAD: Op = sparse_update_op(
    "ResourceSparseApplyProximalAdagrad",
    "(var:resource, accum:resource, lr:T, l1:T, l2:T, grad:T, indices:Tindices) -> () ; \
     T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false",
    sparse_shape::<ProximalAdagrad, 1>,
    &PROXIMAL_ADAGRAD_RULE,
    update_kernels!(sparse, ProximalAdagrad, 1),
);

/// The rule of gradient descent.
pub struct ProximalGradientDescent;

impl Optimizer<0> for ProximalGradientDescent {
    const GRAD: usize = 4;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 0>> {
        let (alpha, l1, l2): (C, C, C) = (scalars.at(1)?, scalars.at(2)?, scalars.at(3)?);
        Ok(
            #[inline(always)]
            move |var: C, none: [C; 0], grad: C| (towards_zero(var - alpha * grad, alpha, l1, l2), none),
        )
    }
}

/// The rule of Adagrad.
pub struct ProximalAdagrad;

impl Optimizer<1> for ProximalAdagrad {
    const GRAD: usize = 5;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 1>> {
        let (lr, l1, l2): (C, C, C) = (scalars.at(2)?, scalars.at(3)?, scalars.at(4)?);
        Ok(
            #[inline(always)]
            move |var: C, [accum]: [C; 1], grad: C| {
                let accum = accum + grad * grad;
                let lr = lr / accum.sqrt();
                (towards_zero(var - lr * grad, lr, l1, l2), [accum])
            },
        )
    }
}

/// `sign(x) · max(|x| − lr·l1, 0) / (1 + lr·l2)`.
#[inline(always)]
fn towards_zero<C: Compute>(x: C, lr: C, l1: C, l2: C) -> C {
    let cut = if l1 > C::zero() { lr * l1 } else { C::zero() };
    let beyond = (x.abs() - cut).max(C::zero());
    (if x < C::zero() { -beyond } else { beyond }) / (C::one() + lr * l2)
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::optim::testing::update;
    use crate::testing::tensor;

    #[test]
    fn gradient_descent() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyProximalGradientDescent")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([Tensor::from([0.8469225f32, -1.7129796, 0.26081628])]);
        update("ResourceApplyProximalGradientDescent")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .input(0.1f32)
            .input(0.0f32)
            .input(0.3f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([Tensor::from([0.88519186f32, -1.751249, 0.2990857])]);
        update("ResourceSparseApplyProximalGradientDescent")
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .twice_gives([tensor([3, 2], [0.7321144f32, -1.8851919, 0.5, 3.0, 3.6747105, -4.540767])]);
    }

    #[test]
    fn adagrad() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyProximalAdagrad")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.6944244f32, -1.6960243, 0.2987855]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
            ]);
        update("ResourceApplyProximalAdagrad")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(0.0f32)
            .input(0.3f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.77081823f32, -1.7365544, 0.33097985]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
            ]);
        update("ResourceSparseApplyProximalAdagrad")
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .twice_gives([
                tensor([3, 2], [0.75653493f32, -1.7834791, 0.5, 3.0, 3.5955567, -4.5952682]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
            ]);
    }
}
