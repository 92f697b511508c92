//! `ApplyFtrl`: follow the regularised leader (McMahan et al., 2013). V2 adds shrinkage, an l2 penalty on the variable
//! as it was.

use kolo_core::Result;
use kolo_graph::{Operation, Output, UpdateRule};

use crate::Op;
use crate::optim::update::{
    Compute, Optimizer, Rule, Scalars, build, dense_shape, sparse_shape, sparse_update_op, update_kernels, update_op,
};

/// Updates a variable, its accumulator and its linear term, given by reference or by handle. `rates` are the learning
/// rate, l1, l2 and the power of the learning rate.
#[track_caller]
pub fn apply_ftrl<'g>(
    [var, accum, linear]: [Output<'g>; 3],
    grad: Output<'g>,
    rates: [Output<'g>; 4],
) -> Operation<'g> {
    let [lr, l1, l2, lr_power] = rates;
    build("ApplyFtrl", &[var, accum, linear, grad, lr, l1, l2, lr_power], &[])
}

static FTRL_RULE: UpdateRule = UpdateRule {
    name: "Ftrl",
    slots: 2,
    grad: 3,
    scalars: &[4, 5, 6, 7],
    flag: "multiply_linear_by_lr",
    before: "const W unit = FLAG ? (W)1 : c4, scale = FLAG ? c4 : (W)1, shrink = 0, power = c7;",
    text: FTRL,
    ..UpdateRule::BASE
};

static FTRL_V2_RULE: UpdateRule = UpdateRule {
    name: "FtrlV2",
    slots: 2,
    grad: 3,
    scalars: &[4, 5, 6, 7, 8],
    flag: "multiply_linear_by_lr",
    before: "const W unit = FLAG ? (W)1 : c4, scale = FLAG ? c4 : (W)1, shrink = c7, power = c8;",
    text: FTRL,
    ..UpdateRule::BASE
};

const FTRL: &str = "W grown = s0 + g * g;\n\
    W new_p = power == (W)-0.5 ? sqrt(grown) : pow(grown, -power), old_p = power == (W)-0.5 ? sqrt(s0) : pow(s0, -power);\n\
    s1 = s1 + (g + (W)2 * shrink * v) * scale - (new_p - old_p) / unit * v;\n\
    W bound = c5 * scale; s0 = grown;\n\
    v = fabs(s1) > bound ? (bound * (s1 < (W)0 ? (W)-1 : (W)1) - s1) / (new_p / unit + (W)2 * c6 * scale) : (W)0;";

pub(crate) static APPLY_FTRL: Op = update_op(
    "ApplyFtrl",
    "(var:Ref(T), accum:Ref(T), linear:Ref(T), grad:T, lr:T, l1:T, l2:T, lr_power:T) -> \
     (out:Ref(T)) ; T:type{num}, use_locking:bool=false, multiply_linear_by_lr:bool=false",
    dense_shape::<Ftrl, 2>,
    &FTRL_RULE,
    update_kernels!(dense, Ftrl, 2),
);

pub(crate) static RESOURCE_APPLY_FTRL: Op = update_op(
    "ResourceApplyFtrl",
    "(var:resource, accum:resource, linear:resource, grad:T, lr:T, l1:T, l2:T, lr_power:T) -> () \
     ; T:type{num}, use_locking:bool=false, multiply_linear_by_lr:bool=false",
    dense_shape::<Ftrl, 2>,
    &FTRL_RULE,
    update_kernels!(dense, Ftrl, 2),
);

pub(crate) static SPARSE_APPLY_FTRL: Op = sparse_update_op(
    "SparseApplyFtrl",
    "(var:Ref(T), accum:Ref(T), linear:Ref(T), grad:T, indices:Tindices, lr:T, l1:T, l2:T, \
     lr_power:T) -> (out:Ref(T)) ; T:type{num}, Tindices:type{int32,int64}, \
     use_locking:bool=false, multiply_linear_by_lr:bool=false",
    sparse_shape::<Ftrl, 2>,
    &FTRL_RULE,
    update_kernels!(sparse, Ftrl, 2),
);

pub(crate) static RESOURCE_SPARSE_APPLY_FTRL: Op = sparse_update_op(
    "ResourceSparseApplyFtrl",
    "(var:resource, accum:resource, linear:resource, grad:T, indices:Tindices, lr:T, l1:T, l2:T, \
     lr_power:T) -> () ; T:type{num}, Tindices:type{int32,int64}, use_locking:bool=false, \
     multiply_linear_by_lr:bool=false",
    sparse_shape::<Ftrl, 2>,
    &FTRL_RULE,
    update_kernels!(sparse, Ftrl, 2),
);

pub(crate) static APPLY_FTRL_V2: Op = update_op(
    "ApplyFtrlV2",
    "(var:Ref(T), accum:Ref(T), linear:Ref(T), grad:T, lr:T, l1:T, l2:T, l2_shrinkage:T, \
     lr_power:T) -> (out:Ref(T)) ; T:type{num}, use_locking:bool=false, \
     multiply_linear_by_lr:bool=false",
    dense_shape::<FtrlV2, 2>,
    &FTRL_V2_RULE,
    update_kernels!(dense, FtrlV2, 2),
);

pub(crate) static RESOURCE_APPLY_FTRL_V2: Op = update_op(
    "ResourceApplyFtrlV2",
    "(var:resource, accum:resource, linear:resource, grad:T, lr:T, l1:T, l2:T, l2_shrinkage:T, \
     lr_power:T) -> () ; T:type{num}, use_locking:bool=false, multiply_linear_by_lr:bool=false",
    dense_shape::<FtrlV2, 2>,
    &FTRL_V2_RULE,
    update_kernels!(dense, FtrlV2, 2),
);

pub(crate) static SPARSE_APPLY_FTRL_V2: Op = sparse_update_op(
    "SparseApplyFtrlV2",
    "(var:Ref(T), accum:Ref(T), linear:Ref(T), grad:T, indices:Tindices, lr:T, l1:T, l2:T, \
     l2_shrinkage:T, lr_power:T) -> (out:Ref(T)) ; T:type{num}, Tindices:type{int32,int64}, \
     use_locking:bool=false, multiply_linear_by_lr:bool=false",
    sparse_shape::<FtrlV2, 2>,
    &FTRL_V2_RULE,
    update_kernels!(sparse, FtrlV2, 2),
);

pub(crate) static RESOURCE_SPARSE_APPLY_FTRL_V2: Op = sparse_update_op(
    "ResourceSparseApplyFtrlV2",
    "(var:resource, accum:resource, linear:resource, grad:T, indices:Tindices, lr:T, l1:T, l2:T, \
     l2_shrinkage:T, lr_power:T) -> () ; T:type{num}, Tindices:type{int32,int64}, \
     use_locking:bool=false, multiply_linear_by_lr:bool=false",
    sparse_shape::<FtrlV2, 2>,
    &FTRL_V2_RULE,
    update_kernels!(sparse, FtrlV2, 2),
);

/// The rule.
pub struct Ftrl;

impl Optimizer<2> for Ftrl {
    const GRAD: usize = 3;
    const NS: f64 = 3.0;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 2>> {
        Leader::<C>::new(scalars, C::zero(), 7).map(Leader::rule)
    }
}

/// The rule with shrinkage.
pub struct FtrlV2;

impl Optimizer<2> for FtrlV2 {
    const GRAD: usize = 3;
    const NS: f64 = 3.0;
    fn rule<C: Compute>(scalars: &Scalars<'_, '_>) -> Result<impl Rule<C, 2>> {
        Leader::<C>::new(scalars, scalars.at(7)?, 8).map(Leader::rule)
    }
}

#[derive(Clone, Copy)]
struct Leader<C> {
    lr: C,
    l1: C,
    l2: C,
    shrinkage: C,
    lr_power: C,
    multiply_by_lr: bool,
}

impl<C: Compute> Leader<C> {
    fn new(scalars: &Scalars<'_, '_>, shrinkage: C, lr_power: usize) -> Result<Leader<C>> {
        Ok(Leader {
            lr: scalars.at(4)?,
            l1: scalars.at(5)?,
            l2: scalars.at(6)?,
            shrinkage,
            lr_power: scalars.at(lr_power)?,
            multiply_by_lr: scalars.flag("multiply_linear_by_lr")?,
        })
    }

    fn rule(self) -> impl Rule<C, 2> {
        let Leader { lr, l1, l2, shrinkage, lr_power, multiply_by_lr } = self;
        let two = C::of(2.0);
        // Both sides of the linear term's equation may be multiplied by the learning rate.
        let (unit, scale) = if multiply_by_lr { (C::one(), lr) } else { (lr, C::one()) };
        let square_root = lr_power == C::of(-0.5);
        #[inline(always)]
        move |var: C, [accum, linear]: [C; 2], grad: C| {
            let power = |x: C| if square_root { x.sqrt() } else { x.powf(-lr_power) };
            let new = accum + grad * grad;
            let sigma = (power(new) - power(accum)) / unit;
            let linear = linear + (grad + two * shrinkage * var) * scale - sigma * var;
            let bound = l1 * scale;
            let var = if linear.abs() > bound {
                (bound * linear.signum() - linear) / (power(new) / unit + two * l2 * scale)
            } else {
                C::zero()
            };
            (var, [new, linear])
        }
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::optim::testing::update;
    use crate::testing::tensor;

    #[test]
    fn ftrl() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceApplyFtrl")
            .attr("multiply_linear_by_lr", false)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(-0.5f32)
            .twice_gives([
                Tensor::from([0.07947534f32, -0.69668067, 0.063395575]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
                Tensor::from([-0.66822916f32, 8.185898, -1.1164722]),
            ]);
        update("ResourceApplyFtrl")
            .attr("multiply_linear_by_lr", true)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(-0.5f32)
            .twice_gives([
                Tensor::from([0.0f32, -0.67647105, 0.03914913]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
                Tensor::from([-0.013359925f32, 0.795424, -0.076595575]),
            ]);
        update("ResourceApplyFtrl")
            .attr("multiply_linear_by_lr", false)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(-0.7f32)
            .twice_gives([
                Tensor::from([0.09228604f32, -0.9059161, 0.1296545]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
                Tensor::from([-0.633942f32, 10.915526, -2.324701]),
            ]);
        update("ResourceApplyFtrl")
            .attr("multiply_linear_by_lr", true)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(-0.7f32)
            .twice_gives([
                Tensor::from([0.0f32, -0.884262, 0.105882406]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
                Tensor::from([-0.0066202544f32, 1.0659393, -0.19351381]),
            ]);
        update("ResourceApplyFtrlV2")
            .attr("multiply_linear_by_lr", false)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(0.15f32)
            .input(-0.5f32)
            .twice_gives([
                Tensor::from([0.015418731f32, -0.6112467, 0.047597334]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
                Tensor::from([-0.2908395f32, 7.206587, -0.8880864]),
            ]);
        update("ResourceApplyFtrlV2")
            .attr("multiply_linear_by_lr", true)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(0.15f32)
            .input(-0.5f32)
            .twice_gives([
                Tensor::from([-0.000573482f32, -0.5915659, 0.023854064]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
                Tensor::from([0.020337868f32, 0.6980991, -0.054484405]),
            ]);
        update("ResourceApplyFtrlV2")
            .attr("multiply_linear_by_lr", false)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(0.15f32)
            .input(-0.7f32)
            .twice_gives([
                Tensor::from([0.0069693984f32, -0.81108874, 0.113310575]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
                Tensor::from([-0.2327711f32, 9.793872, -2.0568666]),
            ]);
        update("ResourceApplyFtrlV2")
            .attr("multiply_linear_by_lr", true)
            .variable(Tensor::from([1.0f32, -2.0, 0.5]))
            .variable(Tensor::from([0.1f32, 0.2, 0.3]))
            .variable(Tensor::from([0.05f32, -0.02, 0.03]))
            .input(Tensor::from([0.3f32, -0.7, 0.9]))
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(0.15f32)
            .input(-0.7f32)
            .twice_gives([
                Tensor::from([-0.01451786f32, -0.78998387, 0.0899737]),
                Tensor::from([0.28f32, 1.18, 1.9199998]),
                Tensor::from([0.026826505f32, 0.9544235, -0.16744357]),
            ]);
    }

    #[test]
    fn rows() {
        // Two steps of TensorFlow 2.21 on the same numbers.
        update("ResourceSparseApplyFtrl")
            .attr("multiply_linear_by_lr", false)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(-0.5f32)
            .twice_gives([
                tensor([3, 2], [0.45384818f32, -0.19282895, 0.5, 3.0, 0.19435413, -1.090992]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
                tensor([3, 2], [-6.424472f32, 1.3360523, 0.030000001, 0.040000003, -1.9192978, 14.568152]),
            ]);
        update("ResourceSparseApplyFtrl")
            .attr("multiply_linear_by_lr", true)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(-0.5f32)
            .twice_gives([
                tensor([3, 2], [0.44497204f32, -0.2255623, 0.5, 3.0, 0.14001383, -1.1399037]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
                tensor([3, 2], [-0.63027364f32, 0.15289009, 0.030000001, 0.040000003, -0.1438592, 1.5212309]),
            ]);
        update("ResourceSparseApplyFtrl")
            .attr("multiply_linear_by_lr", false)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(-0.7f32)
            .twice_gives([
                tensor([3, 2], [0.56888556f32, -0.25326383, 0.5, 3.0, 0.292997, -1.4929988]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
                tensor([3, 2], [-8.856955f32, 1.3908824, 0.030000001, 0.040000003, -2.6125586, 21.66036]),
            ]);
        update("ResourceSparseApplyFtrl")
            .attr("multiply_linear_by_lr", true)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(-0.7f32)
            .twice_gives([
                tensor([3, 2], [0.5598505f32, -0.29529494, 0.5, 3.0, 0.23309192, -1.5411195]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
                tensor([3, 2], [-0.87194645f32, 0.15885186, 0.030000001, 0.040000003, -0.21192957, 2.2352045]),
            ]);
        update("ResourceSparseApplyFtrlV2")
            .attr("multiply_linear_by_lr", false)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(0.15f32)
            .input(-0.5f32)
            .twice_gives([
                tensor([3, 2], [0.41354486f32, -0.08118343, 0.5, 3.0, 0.04661969, -0.9321583]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
                tensor([3, 2], [-5.871717f32, 0.6782924, 0.030000001, 0.040000003, -0.6124076, 12.476343]),
            ]);
        update("ResourceSparseApplyFtrlV2")
            .attr("multiply_linear_by_lr", true)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(0.15f32)
            .input(-0.5f32)
            .twice_gives([
                tensor([3, 2], [0.40486288f32, -0.112249956, 0.5, 3.0, 0.0, -0.9799556]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
                tensor([3, 2], [-0.5752644f32, 0.086132094, 0.030000001, 0.040000003, -0.014800381, 1.3105825]),
            ]);
        update("ResourceSparseApplyFtrlV2")
            .attr("multiply_linear_by_lr", false)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(0.15f32)
            .input(-0.7f32)
            .twice_gives([
                tensor([3, 2], [0.5269811f32, -0.108654164, 0.5, 3.0, 0.12706785, -1.3299437]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
                tensor([3, 2], [-8.219278f32, 0.7109072, 0.030000001, 0.040000003, -1.2462859, 19.316607]),
            ]);
        update("ResourceSparseApplyFtrlV2")
            .attr("multiply_linear_by_lr", true)
            .variable(tensor([3, 2], [1.0f32, -2.0, 0.5, 3.0, 4.0, -5.0]))
            .variable(tensor([3, 2], [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6]))
            .variable(tensor([3, 2], [0.01f32, 0.02, 0.03, 0.04, 0.05, 0.06]))
            .input(tensor([2, 2], [0.3f32, -0.7, 0.9, 0.2]))
            .input([2i32, 0])
            .input(0.1f32)
            .input(0.2f32)
            .input(0.3f32)
            .input(0.15f32)
            .input(-0.7f32)
            .twice_gives([
                tensor([3, 2], [0.5181242f32, -0.14800362, 0.5, 3.0, 0.06934534, -1.37706]),
                tensor([3, 2], [1.7199999f32, 0.28, 0.3, 0.4, 0.68000007, 1.58]),
                tensor([3, 2], [-0.8084499f32, 0.0895934, 0.030000001, 0.040000003, -0.07709946, 1.9993856]),
            ]);
    }
}
