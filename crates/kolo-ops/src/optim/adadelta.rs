//! `ApplyAdadelta` (Zeiler, 2012): steps in units of the variable, from running means of squared steps and gradients.

use kolo_core::Result;
use kolo_graph::{Operation, Output, UpdateRule};

use crate::Op;
use crate::optim::update::{
    Compute, Optimizer, Rule, Scalars, build, dense_shape, sparse_shape, sparse_update_op, update_kernels, update_op,
};

/// Updates a variable and its two accumulators, given by reference or by handle.
#[track_caller]
pub fn apply_adadelta<'g>(
    [var, accum, accum_update]: [Output<'g>; 3],
    lr: Output<'g>,
    rho: Output<'g>,
    epsilon: Output<'g>,
    grad: Output<'g>,
) -> Operation<'g> {
    build("ApplyAdadelta", &[var, accum, accum_update, lr, rho, epsilon, grad], &[])
}

static ADADELTA_RULE: UpdateRule = UpdateRule {
    name: "Adadelta",
    slots: 2,
    grad: 6,
    scalars: &[3, 4, 5],
    text: "s0 = s0 * c4 + g * g * ((W)1 - c4); W step = sqrt(s1 + c5) / sqrt(s0 + c5) * g;\n\
           v -= step * c3; s1 = s1 * c4 + step * step * ((W)1 - c4);",
    ..UpdateRule::BASE
};

pub(crate) static APPLY_ADADELTA: Op = update_op(
    "ApplyAdadelta",
    "(var:Ref(T), accum:Ref(T), accum_update:Ref(T), lr:T, rho:T, epsilon:T, grad:T) -> \
     (out:Ref(T)) ; T:type{num}, use_locking:bool=false",
    dense_shape::<Adadelta, 2>,
    &ADADELTA_RULE,
    update_kernels!(dense, Adadelta, 2),
);

pub(crate) static RESOURCE_APPLY_ADADELTA: Op = update_op(
    "ResourceApplyAdadelta",
    "(var:resource, accum:resource, accum_update:resource, lr:T, rho:T, epsilon:T, grad:T) -> () \
     ; T:type{num}, use_locking:bool=false",
    dense_shape::<Adadelta, 2>,
    &ADADELTA_RULE,
    update_kernels!(dense, Adadelta, 2),
);

pub(crate) static SPARSE_APPLY_ADADELTA: Op = sparse_update_op(
    "SparseApplyAdadelta",
    "(var:Ref(T), accum:Ref(T), accum_update:Ref(T), lr:T, rho:T, epsilon:T, grad:T, \
     indices:Tindices) -> (out:Ref(T)) ; T:type{num}, Tindices:type{int32,int64}, \
     use_locking:bool=false",
    sparse_shape::<Adadelta, 2>,
    &ADADELTA_RULE,
    update_kernels!(sparse, Adadelta, 2),
);

pub(crate) static RESOURCE_SPARSE_APPLY_ADADELTA: Op = sparse_update_op(
    "ResourceSparseApplyAdadelta",
    "(var:resource, accum:resource, accum_update:resource, lr:T, rho:T, epsilon:T, grad:T, \
     indices:Tindices) -> () ; T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false",
    sparse_shape::<Adadelta, 2>,
    &ADADELTA_RULE,
    update_kernels!(sparse, Adadelta, 2),
);

/// The rule.
pub struct Adadelta;

impl Optimizer<2> for Adadelta {
    const GRAD: usize = 6;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 2>> {
        let (lr, rho, epsilon): (C, C, C) = (scalars.at(3)?, scalars.at(4)?, scalars.at(5)?);
        let rest = C::one() - rho;
        Ok(
            #[inline(always)]
            move |var: C, [accum, accum_update]: [C; 2], grad: C| {
                let accum = accum * rho + grad * grad * rest;
                let update = (accum_update + epsilon).sqrt() / (accum + epsilon).sqrt() * grad;
                (var - update * lr, [accum, accum_update * rho + update * update * rest])
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
    fn adadelta() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyAdadelta")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.5f32, 0.4, 0.6]))
            .input(0.1f32)
            .input(0.95f32)
            .input(0.001f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.8660497f32, -1.8090298, 0.25579134]),
                Tensor::from([0.099025f32, 0.228275, 0.349725]),
                Tensor::from([0.49498504f32, 0.44989458, 0.6868672]),
            ]);
        update("ResourceSparseApplyAdadelta")
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.55f32, 0.65, 0.35, 0.45, 0.15, 0.25]))
            .input(0.1f32)
            .input(0.95f32)
            .input(0.001f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .twice_gives([
                tensor([3, 2], [0.63837546f32, -2.07346, 0.5, 3.0, 3.966363, -4.909106]),
                tensor([3, 2], [0.169225f32, 0.1844, 0.3, 0.4, 0.46002498, 0.589275]),
                tensor([3, 2], [0.81513166f32, 0.59977865, 0.35000002, 0.45000002, 0.13813293, 0.24576311]),
            ]);
    }
}
