//! `ApplyAdagrad` (Duchi et al., 2011): each element's step shrinks with the sum of its squared gradients. V2 adds an
//! epsilon to the denominator.

use kolo_core::Result;
use kolo_graph::{Operation, Output, UpdateRule};

use crate::Op;
use crate::optim::update::{
    Compute, Optimizer, Rule, Scalars, build, dense_shape, sparse_shape, sparse_update_op, update_kernels, update_op,
};

/// Updates a variable and its accumulator, given by reference or by handle.
#[track_caller]
pub fn apply_adagrad<'g>([var, accum]: [Output<'g>; 2], lr: Output<'g>, grad: Output<'g>) -> Operation<'g> {
    build("ApplyAdagrad", &[var, accum, lr, grad], &[])
}

/// Updates only rows `indices`.
#[track_caller]
pub fn sparse_apply_adagrad<'g>(
    [var, accum]: [Output<'g>; 2],
    lr: Output<'g>,
    [grad, indices]: [Output<'g>; 2],
) -> Operation<'g> {
    build("SparseApplyAdagrad", &[var, accum, lr, grad, indices], &[])
}

static ADAGRAD_RULE: UpdateRule = UpdateRule {
    name: "Adagrad",
    slots: 1,
    grad: 3,
    scalars: &[2],
    flag: "update_slots",
    text: "if (FLAG) s0 += g * g; v -= g * c2 / sqrt(s0);",
    ..UpdateRule::BASE
};

static ADAGRAD_V2_RULE: UpdateRule = UpdateRule {
    name: "AdagradV2",
    slots: 1,
    grad: 4,
    scalars: &[2, 3],
    flag: "update_slots",
    text: "if (FLAG) s0 += g * g; v -= g * c2 / (sqrt(s0) + c3);",
    ..UpdateRule::BASE
};

pub(crate) static APPLY_ADAGRAD: Op = update_op(
    "ApplyAdagrad",
    "(var:Ref(T), accum:Ref(T), lr:T, grad:T) -> (out:Ref(T)) ; T:type{num}, \
     use_locking:bool=false, update_slots:bool=true",
    dense_shape::<Adagrad, 1>,
    &ADAGRAD_RULE,
    update_kernels!(dense, Adagrad, 1),
);

pub(crate) static RESOURCE_APPLY_ADAGRAD: Op = update_op(
    "ResourceApplyAdagrad",
    "(var:resource, accum:resource, lr:T, grad:T) -> () ; T:type{num}, use_locking:bool=false, \
     update_slots:bool=true",
    dense_shape::<Adagrad, 1>,
    &ADAGRAD_RULE,
    update_kernels!(dense, Adagrad, 1),
);

pub(crate) static SPARSE_APPLY_ADAGRAD: Op = sparse_update_op(
    "SparseApplyAdagrad",
    "(var:Ref(T), accum:Ref(T), lr:T, grad:T, indices:Tindices) -> (out:Ref(T)) ; T:type{num}, \
     Tindices:type{int32,int64}, use_locking:bool=false, update_slots:bool=true",
    sparse_shape::<Adagrad, 1>,
    &ADAGRAD_RULE,
    update_kernels!(sparse, Adagrad, 1),
);

pub(crate) static RESOURCE_SPARSE_APPLY_ADAGRAD: Op = sparse_update_op(
    "ResourceSparseApplyAdagrad",
    "(var:resource, accum:resource, lr:T, grad:T, indices:Tindices) -> () ; T:type{num}, \
     Tindices:type{int32,int64}, use_locking:bool=false, update_slots:bool=true",
    sparse_shape::<Adagrad, 1>,
    &ADAGRAD_RULE,
    update_kernels!(sparse, Adagrad, 1),
);

pub(crate) static APPLY_ADAGRAD_V2: Op = update_op(
    "ApplyAdagradV2",
    "(var:Ref(T), accum:Ref(T), lr:T, epsilon:T, grad:T) -> (out:Ref(T)) ; T:type{num}, \
     use_locking:bool=false, update_slots:bool=true",
    dense_shape::<AdagradV2, 1>,
    &ADAGRAD_V2_RULE,
    update_kernels!(dense, AdagradV2, 1),
);

pub(crate) static RESOURCE_APPLY_ADAGRAD_V2: Op = update_op(
    "ResourceApplyAdagradV2",
    "(var:resource, accum:resource, lr:T, epsilon:T, grad:T) -> () ; T:type{num}, \
     use_locking:bool=false, update_slots:bool=true",
    dense_shape::<AdagradV2, 1>,
    &ADAGRAD_V2_RULE,
    update_kernels!(dense, AdagradV2, 1),
);

pub(crate) static SPARSE_APPLY_ADAGRAD_V2: Op = sparse_update_op(
    "SparseApplyAdagradV2",
    "(var:Ref(T), accum:Ref(T), lr:T, epsilon:T, grad:T, indices:Tindices) -> (out:Ref(T)) ; \
     T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false, update_slots:bool=true",
    sparse_shape::<AdagradV2, 1>,
    &ADAGRAD_V2_RULE,
    update_kernels!(sparse, AdagradV2, 1),
);

pub(crate) static RESOURCE_SPARSE_APPLY_ADAGRAD_V2: Op = sparse_update_op(
    "ResourceSparseApplyAdagradV2",
    "(var:resource, accum:resource, lr:T, epsilon:T, grad:T, indices:Tindices) -> () ; \
     T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false, update_slots:bool=true",
    sparse_shape::<AdagradV2, 1>,
    &ADAGRAD_V2_RULE,
    update_kernels!(sparse, AdagradV2, 1),
);

/// The rule.
pub struct Adagrad;

impl Optimizer<1> for Adagrad {
    const GRAD: usize = 3;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 1>> {
        with_epsilon(scalars.at(2)?, C::zero(), scalars.flag("update_slots")?)
    }
}

/// The rule with an epsilon.
pub struct AdagradV2;

impl Optimizer<1> for AdagradV2 {
    const GRAD: usize = 4;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 1>> {
        with_epsilon(scalars.at(2)?, scalars.at(3)?, scalars.flag("update_slots")?)
    }
}

fn with_epsilon<C: Compute>(lr: C, epsilon: C, update_slots: bool) -> Result<impl Rule<C, 1>> {
    let share = if update_slots { C::one() } else { C::zero() };
    Ok(
        #[inline(always)]
        move |var: C, [accum]: [C; 1], grad: C| {
            let accum = accum + grad * grad * share;
            (var - grad * lr / (accum.sqrt() + epsilon), [accum])
        },
    )
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::optim::testing::update;
    use crate::testing::tensor;

    #[test]
    fn adagrad() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyAdagrad")
            .attr("update_slots", true)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.8744806f32, -1.8512896, 0.3496239]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
            ]);
        update("ResourceApplyAdagrad")
            .attr("update_slots", false)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([Tensor::from([0.8102634f32, -1.6869504, 0.17136647]), Tensor::from([0.1f32, 0.2, 0.3])]);
        update("ResourceApplyAdagradV2")
            .attr("update_slots", true)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(0.01f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.8770757f32, -1.8528799, 0.35089248]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
            ]);
        update("ResourceApplyAdagradV2")
            .attr("update_slots", false)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(0.01f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([Tensor::from([0.8160794f32, -1.6937973, 0.17725891]), Tensor::from([0.1f32, 0.2, 0.3])]);
    }

    #[test]
    fn rows() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceSparseApplyAdagrad")
            .attr("update_slots", true)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .input(0.1f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .twice_gives([
                tensor([3, 2], [0.83703f32, -2.0786214, 0.5, 3.0, 3.924563, -4.877263]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
            ]);
        update("ResourceSparseApplyAdagrad")
            .attr("update_slots", false)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .input(0.1f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .twice_gives([
                tensor([3, 2], [0.43079007f32, -2.0894427, 0.5, 3.0, 3.9151473, -4.8192606]),
                tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]),
            ]);
        update("ResourceSparseApplyAdagradV2")
            .attr("update_slots", true)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .input(0.1f32)
            .input(0.01f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .twice_gives([
                tensor([3, 2], [0.8385281f32, -2.0771034, 0.5, 3.0, 3.9255009, -4.8783383]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
            ]);
        update("ResourceSparseApplyAdagradV2")
            .attr("update_slots", false)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .input(0.1f32)
            .input(0.01f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .twice_gives([
                tensor([3, 2], [0.44823825f32, -2.0874863, 0.5, 3.0, 3.9163303, -4.8215647]),
                tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]),
            ]);
    }
}
