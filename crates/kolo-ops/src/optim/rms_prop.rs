//! `ApplyRMSProp`: gradients divided by the root of their running mean square, with momentum. The centred form takes the
//! running mean off first.

use kolo_core::Result;
use kolo_graph::{Operation, Output, UpdateRule};

use crate::Op;
use crate::optim::update::{
    Compute, Optimizer, Rule, Scalars, build, dense_shape, sparse_shape, sparse_update_op, update_kernels, update_op,
};

/// Updates a variable, its mean square and its momentum, given by reference or by handle.
#[track_caller]
pub fn apply_rms_prop<'g>(
    [var, ms, mom]: [Output<'g>; 3],
    lr: Output<'g>,
    rho: Output<'g>,
    momentum: Output<'g>,
    epsilon: Output<'g>,
    grad: Output<'g>,
) -> Operation<'g> {
    build("ApplyRMSProp", &[var, ms, mom, lr, rho, momentum, epsilon, grad], &[])
}

/// The same with the running mean `mg` taken off.
#[track_caller]
pub fn apply_centered_rms_prop<'g>(
    [var, mg, ms, mom]: [Output<'g>; 4],
    lr: Output<'g>,
    rho: Output<'g>,
    momentum: Output<'g>,
    epsilon: Output<'g>,
    grad: Output<'g>,
) -> Operation<'g> {
    build("ApplyCenteredRMSProp", &[var, mg, ms, mom, lr, rho, momentum, epsilon, grad], &[])
}

static RMS_PROP_RULE: UpdateRule = UpdateRule {
    name: "RMSProp",
    slots: 2,
    grad: 7,
    scalars: &[3, 4, 5, 6],
    text: "s0 += (g * g - s0) * ((W)1 - c4); s1 = s1 * c5 + g * c3 / sqrt(s0 + c6); v -= s1;",
    ..UpdateRule::BASE
};

static CENTERED_RMS_PROP_RULE: UpdateRule = UpdateRule {
    name: "CenteredRMSProp",
    slots: 3,
    grad: 8,
    scalars: &[4, 5, 6, 7],
    text: "s1 += (g * g - s1) * ((W)1 - c5); s0 += (g - s0) * ((W)1 - c5);\n\
           s2 = s2 * c6 + g * c4 / sqrt(s1 - s0 * s0 + c7); v -= s2;",
    ..UpdateRule::BASE
};

pub(crate) static APPLY_RMS_PROP: Op = update_op(
    "ApplyRMSProp",
    "(var:Ref(T), ms:Ref(T), mom:Ref(T), lr:T, rho:T, momentum:T, epsilon:T, grad:T) -> \
     (out:Ref(T)) ; T:type{num}, use_locking:bool=false",
    dense_shape::<RmsProp, 2>,
    &RMS_PROP_RULE,
    update_kernels!(dense, RmsProp, 2),
);

pub(crate) static RESOURCE_APPLY_RMS_PROP: Op = update_op(
    "ResourceApplyRMSProp",
    "(var:resource, ms:resource, mom:resource, lr:T, rho:T, momentum:T, epsilon:T, grad:T) -> () \
     ; T:type{num}, use_locking:bool=false",
    dense_shape::<RmsProp, 2>,
    &RMS_PROP_RULE,
    update_kernels!(dense, RmsProp, 2),
);

pub(crate) static SPARSE_APPLY_RMS_PROP: Op = sparse_update_op(
    "SparseApplyRMSProp",
    "(var:Ref(T), ms:Ref(T), mom:Ref(T), lr:T, rho:T, momentum:T, epsilon:T, grad:T, \
     indices:Tindices) -> (out:Ref(T)) ; T:type{num}, Tindices:type{int32,int64}, \
     use_locking:bool=false",
    sparse_shape::<RmsProp, 2>,
    &RMS_PROP_RULE,
    update_kernels!(sparse, RmsProp, 2),
);

pub(crate) static RESOURCE_SPARSE_APPLY_RMS_PROP: Op = sparse_update_op(
    "ResourceSparseApplyRMSProp",
    "(var:resource, ms:resource, mom:resource, lr:T, rho:T, momentum:T, epsilon:T, grad:T, \
     indices:Tindices) -> () ; T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false",
    sparse_shape::<RmsProp, 2>,
    &RMS_PROP_RULE,
    update_kernels!(sparse, RmsProp, 2),
);

pub(crate) static APPLY_CENTERED_RMS_PROP: Op = update_op(
    "ApplyCenteredRMSProp",
    "(var:Ref(T), mg:Ref(T), ms:Ref(T), mom:Ref(T), lr:T, rho:T, momentum:T, epsilon:T, grad:T) \
     -> (out:Ref(T)) ; T:type{num}, use_locking:bool=false",
    dense_shape::<CenteredRmsProp, 3>,
    &CENTERED_RMS_PROP_RULE,
    update_kernels!(dense, CenteredRmsProp, 3),
);

pub(crate) static RESOURCE_APPLY_CENTERED_RMS_PROP: Op = update_op(
    "ResourceApplyCenteredRMSProp",
    "(var:resource, mg:resource, ms:resource, mom:resource, lr:T, rho:T, momentum:T, epsilon:T, \
     grad:T) -> () ; T:type{num}, use_locking:bool=false",
    dense_shape::<CenteredRmsProp, 3>,
    &CENTERED_RMS_PROP_RULE,
    update_kernels!(dense, CenteredRmsProp, 3),
);

pub(crate) static SPARSE_APPLY_CENTERED_RMS_PROP: Op = sparse_update_op(
    "SparseApplyCenteredRMSProp",
    "(var:Ref(T), mg:Ref(T), ms:Ref(T), mom:Ref(T), lr:T, rho:T, momentum:T, epsilon:T, grad:T, \
     indices:Tindices) -> (out:Ref(T)) ; T:type{num}, Tindices:type{int32,int64}, \
     use_locking:bool=false",
    sparse_shape::<CenteredRmsProp, 3>,
    &CENTERED_RMS_PROP_RULE,
    update_kernels!(sparse, CenteredRmsProp, 3),
);

pub(crate) static RESOURCE_SPARSE_APPLY_CENTERED_RMS_PROP: Op = sparse_update_op(
    "ResourceSparseApplyCenteredRMSProp",
    "(var:resource, mg:resource, ms:resource, mom:resource, lr:T, rho:T, momentum:T, epsilon:T, \
     grad:T, indices:Tindices) -> () ; T:type{num}, Tindices:type{int32,int64}, \
     use_locking:bool=false",
    sparse_shape::<CenteredRmsProp, 3>,
    &CENTERED_RMS_PROP_RULE,
    update_kernels!(sparse, CenteredRmsProp, 3),
);

/// The rule.
pub struct RmsProp;

impl Optimizer<2> for RmsProp {
    const GRAD: usize = 7;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 2>> {
        let (lr, rho, momentum, epsilon): (C, C, C, C) =
            (scalars.at(3)?, scalars.at(4)?, scalars.at(5)?, scalars.at(6)?);
        let rest = C::one() - rho;
        Ok(
            #[inline(always)]
            move |var: C, [ms, mom]: [C; 2], grad: C| {
                let ms = ms + (grad * grad - ms) * rest;
                let mom = mom * momentum + grad * lr / (ms + epsilon).sqrt();
                (var - mom, [ms, mom])
            },
        )
    }
}

/// The centred rule.
pub struct CenteredRmsProp;

impl Optimizer<3> for CenteredRmsProp {
    const GRAD: usize = 8;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 3>> {
        let (lr, rho, momentum, epsilon): (C, C, C, C) =
            (scalars.at(4)?, scalars.at(5)?, scalars.at(6)?, scalars.at(7)?);
        let rest = C::one() - rho;
        Ok(
            #[inline(always)]
            move |var: C, [mg, ms, mom]: [C; 3], grad: C| {
                let ms = ms + (grad * grad - ms) * rest;
                let mg = mg + (grad - mg) * rest;
                let mom = mom * momentum + grad * lr / (ms - mg * mg + epsilon).sqrt();
                (var - mom, [mg, ms, mom])
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
    fn rms_prop() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyRMSProp")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(0.1f32)
            .input(0.9f32)
            .input(0.8f32)
            .input(0.001f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.66193885f32, -1.5701492, 0.041071534]),
                Tensor::from([0.0981f32, 0.2551, 0.39690003]),
                Tensor::from([0.20319283f32, -0.26789072, 0.2832335]),
            ]);
        update("ResourceSparseApplyRMSProp")
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(0.1f32)
            .input(0.9f32)
            .input(0.8f32)
            .input(0.001f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .twice_gives([
                tensor([3, 2], [0.40968198f32, -2.1609201, 0.5, 3.0, 3.8022602, -4.8304553]),
                tensor([3, 2], [0.23490001f32, 0.16960001, 0.3, 0.4, 0.42209998, 0.5791001]),
                tensor([3, 2], [0.36530876f32, 0.098421, 0.030000001, 0.040000003, 0.1135072, -0.12641238]),
            ]);
    }

    #[test]
    fn centered() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyCenteredRMSProp")
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(0.1f32)
            .input(0.9f32)
            .input(0.8f32)
            .input(0.001f32)
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .twice_gives([
                Tensor::from([0.65199524f32, -1.559177, 0.028229177]),
                Tensor::from([0.09750001f32, -0.14920002, 0.19530004]),
                Tensor::from([0.0981f32, 0.2551, 0.39690003]),
                Tensor::from([0.21035016f32, -0.2763418, 0.2930373]),
            ]);
        update("ResourceSparseApplyCenteredRMSProp")
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(0.1f32)
            .input(0.9f32)
            .input(0.8f32)
            .input(0.001f32)
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .twice_gives([
                tensor([3, 2], [0.384005f32, -2.1616712, 0.5, 3.0, 3.8012419, -4.82985]),
                tensor([3, 2], [0.17910004f32, 0.05420001, 0.030000001, 0.040000003, 0.09750001, -0.08440003]),
                tensor([3, 2], [0.23490001f32, 0.16960001, 0.3, 0.4, 0.42209998, 0.5791001]),
                tensor([3, 2], [0.38452542f32, 0.09898939, 0.030000001, 0.040000003, 0.114252575, -0.12699774]),
            ]);
    }
}
