//! `ApplyAdagradDA`: Adagrad with dual averaging (Duchi et al., 2011); l1 regularisation then gives true zeros.

use kolo_core::Result;
use kolo_graph::UpdateRule;

use crate::Op;
use crate::optim::update::{
    Compute, Optimizer, Rule, Scalars, dense_shape, sparse_shape, sparse_update_op, update_kernels, update_op,
};

static ADAGRAD_DA_RULE: UpdateRule = UpdateRule {
    name: "AdagradDA",
    slots: 2,
    grad: 3,
    scalars: &[4, 5, 6, 7],
    // The global step.
    integers: &[7],
    before: "const W cut = c5 > (W)0 ? c5 * c7 : (W)0;",
    text: "s0 += g; s1 += g * g; W beyond = fabs(s0) - cut; beyond = beyond > (W)0 ? beyond : (W)0;\n\
           v = -c4 * (s0 < (W)0 ? -beyond : beyond) / (c6 * c7 * c4 + sqrt(s1));",
    ..UpdateRule::BASE
};

pub(crate) static APPLY_ADAGRAD_DA: Op = update_op(
    "ApplyAdagradDA",
    "(var:Ref(T), gradient_accumulator:Ref(T), gradient_squared_accumulator:Ref(T), grad:T, lr:T, \
     l1:T, l2:T, global_step:int64) -> (out:Ref(T)) ; T:type{num}, use_locking:bool=false",
    dense_shape::<AdagradDa, 2>,
    &ADAGRAD_DA_RULE,
    update_kernels!(dense, AdagradDa, 2),
);

pub(crate) static RESOURCE_APPLY_ADAGRAD_DA: Op = update_op(
    "ResourceApplyAdagradDA",
    "(var:resource, gradient_accumulator:resource, gradient_squared_accumulator:resource, grad:T, \
     lr:T, l1:T, l2:T, global_step:int64) -> () ; T:type{num}, use_locking:bool=false",
    dense_shape::<AdagradDa, 2>,
    &ADAGRAD_DA_RULE,
    update_kernels!(dense, AdagradDa, 2),
);

pub(crate) static SPARSE_APPLY_ADAGRAD_DA: Op = sparse_update_op(
    "SparseApplyAdagradDA",
    "(var:Ref(T), gradient_accumulator:Ref(T), gradient_squared_accumulator:Ref(T), grad:T, \
     indices:Tindices, lr:T, l1:T, l2:T, global_step:int64) -> (out:Ref(T)) ; T:type{num}, \
     Tindices:type{int32,int64}, use_locking:bool=false",
    sparse_shape::<AdagradDa, 2>,
    &ADAGRAD_DA_RULE,
    update_kernels!(sparse, AdagradDa, 2),
);

pub(crate) static RESOURCE_SPARSE_APPLY_ADAGRAD_DA: Op = sparse_update_op(
    "ResourceSparseApplyAdagradDA",
    "(var:resource, gradient_accumulator:resource, gradient_squared_accumulator:resource, grad:T, \
     indices:Tindices, lr:T, l1:T, l2:T, global_step:int64) -> () ; T:type{num}, \
     Tindices:type{int32,int64}, use_locking:bool=false",
    sparse_shape::<AdagradDa, 2>,
    &ADAGRAD_DA_RULE,
    update_kernels!(sparse, AdagradDa, 2),
);

/// The rule.
pub struct AdagradDa;

impl Optimizer<2> for AdagradDa {
    const GRAD: usize = 3;
    const NS: f64 = 1.0;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 2>> {
        let (lr, l1, l2, step): (C, C, C, C) = (scalars.at(4)?, scalars.at(5)?, scalars.at(6)?, scalars.at(7)?);
        let cut = if l1 > C::zero() { l1 * step } else { C::zero() };
        Ok(
            #[inline(always)]
            move |_: C, [sum, squares]: [C; 2], grad: C| {
                let (sum, squares) = (sum + grad, squares + grad * grad);
                let beyond = (sum.abs() - cut).max(C::zero());
                let shrunk = if sum < C::zero() { -beyond } else { beyond };
                (-lr * shrunk / (l2 * step * lr + squares.sqrt()), [sum, squares])
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::optim::testing::update;
    use crate::testing::tensor;

    #[test]
    fn adagrad_da() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyAdagradDA")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .variable(Tensor::from([0.5f32, 0.4, 0.6]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.05f32)
            .input(0.3f32)
            .input(7i64)
            .twice_gives([
                Tensor::from([-0.028996127f32, 0.07727115, -0.08706053]),
                Tensor::from([0.65000004f32, -1.42, 1.8299999]),
                Tensor::from([0.68000007f32, 1.38, 2.2199998]),
            ]);
        update("ResourceApplyAdagradDA")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .variable(Tensor::from([0.5f32, 0.4, 0.6]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.0f32)
            .input(0.3f32)
            .input(7i64)
            .twice_gives([
                Tensor::from([-0.062824935f32, 0.102546774, -0.107649185]),
                Tensor::from([0.65000004f32, -1.42, 1.8299999]),
                Tensor::from([0.68000007f32, 1.38, 2.2199998]),
            ]);
        update("ResourceSparseApplyAdagradDA")
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .variable(tensor([3, 2], [0.55f32, 0.65, 0.35, 0.45, 0.15, 0.25]))
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.1f32)
            .input(0.05f32)
            .input(0.3f32)
            .input(7i64)
            .twice_gives([
                tensor([3, 2], [-0.08674511f32, -0.006576474, 0.5, 3.0, -0.038243048, 0.075053796]),
                tensor([3, 2], [1.81f32, 0.42000002, 0.030000001, 0.040000003, 0.65000004, -1.3399999]),
                tensor([3, 2], [2.1699998f32, 0.7300001, 0.35000002, 0.45000002, 0.33, 1.23]),
            ]);
    }
}
