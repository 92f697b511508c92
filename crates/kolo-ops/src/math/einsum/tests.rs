//! Values are TensorFlow 2.21's.

use kolo_core::Tensor;

use super::einsum;
use crate::testing::{OpTest, check_op, evaluate, tensor, wavy};

fn product(equation: &str) -> OpTest {
    check_op("Einsum").attr("equation", equation)
}

#[test]
fn values() {
    product("ij,jk->ik")
        .input(wavy([2, 3], 0))
        .input(wavy([3, 2], 1))
        .gives(tensor([2, 2], [-0.26149416f32, -1.8980083, 0.6720645, -1.0955845]));
    product("ii->i").input(wavy([3, 3], 0)).gives(tensor([3], [0.05f32, 0.6923476, 1.1669105]));
    product("ii->").input(wavy([3, 3], 0)).gives(tensor([], [1.9092581f32]));
    product("ij->").input(wavy([2, 3], 0)).gives(tensor([], [1.7337823f32]));
    product("i->ii").input(wavy([2], 0)).gives(tensor([2, 2], [0.05f32, 0.0, 0.0, 1.3391641]));
    product("...ij,...jk->...ik").input(wavy([2, 1, 2, 3], 0)).input(wavy([3, 3, 2], 1)).gives(tensor(
        [2, 3, 2, 2],
        [
            -0.26149416f32,
            -1.8980083,
            0.6720645,
            -1.0955845,
            1.6890641,
            1.0493281,
            0.3107672,
            1.1859828,
            -1.9616251,
            0.5887761,
            -1.0085511,
            -0.49118435,
            0.7865653,
            1.1526079,
            -0.060435608,
            2.0497208,
            -1.5028603,
            -0.1838244,
            -1.4955873,
            -1.3559941,
            1.2837758,
            -0.96656215,
            2.0636022,
            -0.24596664,
        ],
    ));
    product("bij,bjk->").input(wavy([2, 2, 3], 0)).input(wavy([2, 3, 2], 1)).gives(tensor([], [-7.121289f32]));
    product("ij,k->jk")
        .input(wavy([2, 3], 0))
        .input(wavy([2], 1))
        .gives(tensor([3, 2], [0.16824126f32, -1.4892753, -0.30971077, 2.7415664, -0.122851424, 1.0874835]));
    product("iji,j->").input(wavy([2, 3, 2], 0)).input(wavy([3], 1)).gives(tensor([], [0.4447125f32]));
    product("...i->...").input(wavy([2, 3], 0)).gives(tensor([2], [1.1069605f32, 0.6268218]));
    product("i...,i->...i")
        .input(wavy([3, 2], 0))
        .input(wavy([3], 1))
        .gives(tensor([2, 3], [-0.0076226676f32, -0.38083944, -0.057062075, -0.20416005, -1.5567513, -0.08967379]));
    product("ijj,k->ik")
        .input(wavy([2, 3, 3], 0))
        .input(wavy([2], 1))
        .gives(tensor([2, 2], [-0.2910728f32, 2.5765827, 0.036100302, -0.31956065]));
    product("ij,ij->...ij")
        .input(wavy([2, 3], 0))
        .input(wavy([2, 3], 1))
        .gives(tensor([2, 3], [-0.0076226676f32, 1.8072293, 0.023258723, 1.402033, 0.35205734, 1.3026444]));
    product("i1->i").input(wavy([2, 2], 0)).gives(tensor([2], [1.3891641f32, -1.4357625]));
    product(",->").input(wavy([], 0)).input(wavy([], 1)).gives(tensor([], [-0.0076226676f32]));
    product("ij,jk->ik").input([[1i32, 2]]).input([[3i32], [4]]).gives([[11i32]]);
    let wide = || tensor::<f32, 2>([2, 0], []);
    product("ij,jk->ik").input(wide()).input(tensor::<f32, 2>([0, 1], [])).gives([[0.0f32], [0.0]]);
    product("ij->i").input(wide()).gives([0.0f32, 0.0]);
    product("ij->j").input(wide()).gives(tensor::<f32, 1>([0], []));
}

#[test]
fn gradients() {
    product("ij,jk->ik").input(wavy([2, 3], 0)).input(wavy([3, 2], 1)).gradient();
    product("ii->i").input(wavy([3, 3], 0)).gradient();
    product("ii->").input(wavy([3, 3], 0)).gradient();
    product("ij->").input(wavy([2, 3], 0)).gradient();
    product("i->ii").input(wavy([2], 0)).gradient();
    product("...ij,...jk->...ik").input(wavy([2, 1, 2, 3], 0)).input(wavy([3, 3, 2], 1)).gradient();
    product("bij,bjk->").input(wavy([2, 2, 3], 0)).input(wavy([2, 3, 2], 1)).gradient();
    product("ij,k->jk").input(wavy([2, 3], 0)).input(wavy([2], 1)).gradient();
    product("iji,j->").input(wavy([2, 3, 2], 0)).input(wavy([3], 1)).gradient();
    product("...i->...").input(wavy([2, 3], 0)).gradient();
    product("i...,i->...i").input(wavy([3, 2], 0)).input(wavy([3], 1)).gradient();
    product("ijj,k->ik").input(wavy([2, 3, 3], 0)).input(wavy([2], 1)).gradient();
    product("ij,ij->...ij").input(wavy([2, 3], 0)).input(wavy([2, 3], 1)).gradient();
    product("i1->i").input(wavy([2, 2], 0)).gradient();
    product(",->").input(wavy([], 0)).input(wavy([], 1)).gradient();
    product("ij,...jk->...ik").input(wavy([2, 3], 0)).input(wavy([2, 3, 2], 1)).gradient();
    product("i...j,k...->k...").input(wavy([2, 1, 3], 0)).input(wavy([2, 2], 1)).gradient();
}

#[test]
fn bad_equations_and_shapes() {
    product("...i->i").input(wavy([2, 3], 0)).fails("but no ellipsis (...) was found in the output");
    product("ij,jk->ik").input(wavy([2, 3], 0)).input(wavy([2, 2], 0)).fails("Expected dimension 3 at axis 0");
    product("ij,k->ik")
        .input(wavy([2, 3, 4], 0))
        .input(wavy([2], 0))
        .fails("Expected input 0 to have rank 2 but got: 3");
    product("ijk").input(wavy([2, 3, 4], 0)).fails("Expecting exactly one '->' in einsum equation: ijk");
    product("i->ij").input(wavy([2], 0)).fails("'j' does not appear");
    product("i,i,i->i").input([1.0f32]).input([1.0f32]).input([1.0f32]).fails("Expecting 1 or 2 input subscripts");
}

#[test]
fn many_operands_are_taken_in_order() {
    let g = crate::graph();
    let [a, b, c] = [[2usize, 3], [3, 4], [4, 2]].map(|[m, n]| g.constant(wavy([m, n], m as u32)));
    let chain = einsum("ij, jk, kl -> il", &[a, b, c]);
    let expected = crate::math::matmul::matmul(crate::math::matmul::matmul(a, b), c);
    let found = evaluate(&g, &[chain, expected], &[]).unwrap();
    crate::testing::assert_close(&found[0], &found[1], 1e-5, "einsum");
    let all = [[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]].map(|x| g.constant(x));
    assert_eq!(evaluate(&g, &[einsum("i,i,i->", &all)], &[]).unwrap(), [Tensor::scalar(63.0f32)]);
}
