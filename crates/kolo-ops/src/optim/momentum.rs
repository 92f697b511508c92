//! `ApplyMomentum`: `accum = momentum · accum + grad; var -= lr · accum`, or looking ahead (Nesterov). `KerasMomentum`
//! scales the gradient before it enters the accumulator instead.

use kolo_core::Result;
use kolo_graph::{Operation, Output, UpdateRule};

use crate::Op;
use crate::optim::update::{
    Compute, Optimizer, Rule, Scalars, build, dense_shape, sparse_shape, sparse_update_op, update_kernels, update_op,
};

/// Updates a variable and its accumulator, given by reference or by handle.
#[track_caller]
pub fn apply_momentum<'g>(
    [var, accum]: [Output<'g>; 2],
    lr: Output<'g>,
    grad: Output<'g>,
    momentum: Output<'g>,
    use_nesterov: bool,
) -> Operation<'g> {
    build("ApplyMomentum", &[var, accum, lr, grad, momentum], &[("use_nesterov", use_nesterov)])
}

/// Updates only rows `indices`.
#[track_caller]
pub fn sparse_apply_momentum<'g>(
    [var, accum]: [Output<'g>; 2],
    lr: Output<'g>,
    [grad, indices]: [Output<'g>; 2],
    momentum: Output<'g>,
    use_nesterov: bool,
) -> Operation<'g> {
    build("SparseApplyMomentum", &[var, accum, lr, grad, indices, momentum], &[("use_nesterov", use_nesterov)])
}

static MOMENTUM_RULE: UpdateRule = UpdateRule {
    name: "Momentum",
    slots: 1,
    grad: 3,
    scalars: &[2, 4],
    flag: "use_nesterov",
    text: "s0 = s0 * c4 + g; v -= FLAG ? g * c2 + s0 * (c4 * c2) : s0 * c2;",
    ..UpdateRule::BASE
};

static KERAS_MOMENTUM_RULE: UpdateRule = UpdateRule {
    name: "KerasMomentum",
    slots: 1,
    grad: 3,
    scalars: &[2, 4],
    flag: "use_nesterov",
    text: "s0 = s0 * c4 - g * c2; v += FLAG ? s0 * c4 - g * c2 : s0;",
    ..UpdateRule::BASE
};

pub(crate) static APPLY_MOMENTUM: Op = update_op(
    "ApplyMomentum",
    "(var:Ref(T), accum:Ref(T), lr:T, grad:T, momentum:T) -> (out:Ref(T)) ; T:type{num}, \
     use_locking:bool=false, use_nesterov:bool=false",
    dense_shape::<Momentum, 1>,
    &MOMENTUM_RULE,
    update_kernels!(dense, Momentum, 1),
);

pub(crate) static RESOURCE_APPLY_MOMENTUM: Op = update_op(
    "ResourceApplyMomentum",
    "(var:resource, accum:resource, lr:T, grad:T, momentum:T) -> () ; T:type{num}, \
     use_locking:bool=false, use_nesterov:bool=false",
    dense_shape::<Momentum, 1>,
    &MOMENTUM_RULE,
    update_kernels!(dense, Momentum, 1),
);

pub(crate) static SPARSE_APPLY_MOMENTUM: Op = sparse_update_op(
    "SparseApplyMomentum",
    "(var:Ref(T), accum:Ref(T), lr:T, grad:T, indices:Tindices, momentum:T) -> (out:Ref(T)) ; \
     T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false, use_nesterov:bool=false",
    sparse_shape::<Momentum, 1>,
    &MOMENTUM_RULE,
    update_kernels!(sparse, Momentum, 1),
);

pub(crate) static RESOURCE_SPARSE_APPLY_MOMENTUM: Op = sparse_update_op(
    "ResourceSparseApplyMomentum",
    "(var:resource, accum:resource, lr:T, grad:T, indices:Tindices, momentum:T) -> () ; \
     T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false, use_nesterov:bool=false",
    sparse_shape::<Momentum, 1>,
    &MOMENTUM_RULE,
    update_kernels!(sparse, Momentum, 1),
);

pub(crate) static RESOURCE_APPLY_KERAS_MOMENTUM: Op = update_op(
    "ResourceApplyKerasMomentum",
    "(var:resource, accum:resource, lr:T, grad:T, momentum:T) -> () ; T:type{num}, \
     use_locking:bool=false, use_nesterov:bool=false",
    dense_shape::<KerasMomentum, 1>,
    &KERAS_MOMENTUM_RULE,
    update_kernels!(dense, KerasMomentum, 1),
);

pub(crate) static RESOURCE_SPARSE_APPLY_KERAS_MOMENTUM: Op = sparse_update_op(
    "ResourceSparseApplyKerasMomentum",
    "(var:resource, accum:resource, lr:T, grad:T, indices:Tindices, momentum:T) -> () ; \
     T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false, use_nesterov:bool=false",
    sparse_shape::<KerasMomentum, 1>,
    &KERAS_MOMENTUM_RULE,
    update_kernels!(sparse, KerasMomentum, 1),
);

/// The rule.
pub struct Momentum;

impl Optimizer<1> for Momentum {
    const GRAD: usize = 3;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 1>> {
        let (lr, momentum): (C, C) = (scalars.at(2)?, scalars.at(4)?);
        // The step along the gradient itself and along the accumulator.
        let (along_grad, along_accum) = match scalars.flag("use_nesterov")? {
            true => (lr, momentum * lr),
            false => (C::zero(), lr),
        };
        Ok(
            #[inline(always)]
            move |var: C, [accum]: [C; 1], grad: C| {
                let accum = accum * momentum + grad;
                (var - (grad * along_grad + accum * along_accum), [accum])
            },
        )
    }
}

/// Keras's rule.
pub struct KerasMomentum;

impl Optimizer<1> for KerasMomentum {
    const GRAD: usize = 3;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 1>> {
        let (lr, momentum): (C, C) = (scalars.at(2)?, scalars.at(4)?);
        let (along_grad, along_accum) = match scalars.flag("use_nesterov")? {
            true => (lr, momentum),
            false => (C::zero(), C::one()),
        };
        Ok(
            #[inline(always)]
            move |var: C, [accum]: [C; 1], grad: C| {
                let accum = accum * momentum - grad * lr;
                (var + (accum * along_accum - grad * along_grad), [accum])
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
    fn momentum() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyMomentum")
            .attr("use_nesterov", false)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.9f32)
            .twice_gives([Tensor::from([0.8959f32, -1.8312, 0.18770002]), Tensor::from([0.651f32, -1.168, 1.953])]);
        update("ResourceApplyMomentum")
            .attr("use_nesterov", true)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.9f32)
            .twice_gives([
                Tensor::from([0.84630996f32, -1.70808, 0.03893003]),
                Tensor::from([0.651f32, -1.168, 1.953]),
            ]);
        update("ResourceSparseApplyMomentum")
            .attr("use_nesterov", false)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .input(0.1f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.9f32)
            .twice_gives([
                tensor([3, 2], [0.72190005f32, -2.0922, 0.5, 3.0, 3.8274999, -4.8996]),
                tensor([3, 2], [1.7909999f32, 0.542, 0.3, 0.4, 0.97499996, -0.844]),
            ]);
        update("ResourceSparseApplyMomentum")
            .attr("use_nesterov", true)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .input(0.1f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.9f32)
            .twice_gives([
                tensor([3, 2], [0.56971f32, -2.1229799, 0.5, 3.0, 3.78475, -4.76964]),
                tensor([3, 2], [1.7909999f32, 0.542, 0.3, 0.4, 0.97499996, -0.844]),
            ]);
    }

    #[test]
    fn keras_momentum() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyKerasMomentum")
            .attr("use_nesterov", false)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.9f32)
            .twice_gives([
                Tensor::from([1.084f32, -1.455, 0.75200003]),
                Tensor::from([0.023999993f32, 0.295, 0.072000004]),
            ]);
        update("ResourceApplyKerasMomentum")
            .attr("use_nesterov", true)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .input(0.1f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.9f32)
            .twice_gives([
                Tensor::from([1.0156001f32, -1.3695, 0.5468]),
                Tensor::from([0.023999993f32, 0.295, 0.072000004]),
            ]);
        update("ResourceSparseApplyKerasMomentum")
            .attr("use_nesterov", false)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .input(0.1f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.9f32)
            .twice_gives([
                tensor([3, 2], [0.91f32, -1.7160001, 0.5, 3.0, 4.768, -3.771]),
                tensor([3, 2], [-0.089999996f32, 0.12399999, 0.3, 0.4, 0.348, 0.619]),
            ]);
        update("ResourceSparseApplyKerasMomentum")
            .attr("use_nesterov", true)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .input(0.1f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.9f32)
            .twice_gives([
                tensor([3, 2], [0.739f32, -1.7844001, 0.5, 3.0, 4.6312, -3.7539]),
                tensor([3, 2], [-0.089999996f32, 0.12399999, 0.3, 0.4, 0.348, 0.619]),
            ]);
    }
}
