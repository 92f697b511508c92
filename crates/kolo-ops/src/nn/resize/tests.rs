//! Values are TensorFlow 2.21's.

use kolo_core::Tensor;

use crate::testing::{OpTest, check_op, tensor, wavy};

fn resize(op: &str, align_corners: bool, half_pixel_centers: bool) -> OpTest {
    check_op(op).attr("align_corners", align_corners).attr("half_pixel_centers", half_pixel_centers)
}

#[test]
fn values_are_tensorflows() {
    let x = || wavy([1, 3, 4, 1], 1);
    resize("ResizeBilinear", false, false).input(x()).input([5i32, 3]).gives(tensor(
        [1, 5, 3, 1],
        [
            -0.15245335f32,
            0.8722074,
            -0.83773804,
            0.24411745,
            0.6869556,
            -0.8370877,
            0.6167357,
            0.47488078,
            -0.7901181,
            0.9414488,
            0.20916024,
            -0.6505101,
            1.0496864,
            0.12058675,
            -0.6039741,
        ],
    ));
    resize("ResizeBilinearGrad", false, false).input(wavy([1, 5, 3, 1], 2)).input(x()).gives(tensor(
        [1, 3, 4, 1],
        [
            -0.8485096f32,
            0.9690327,
            0.69517803,
            0.4213233,
            -0.9902545,
            -0.5606359,
            0.18220699,
            0.9250504,
            1.8988508,
            -0.47725987,
            -0.7348323,
            -0.99240494,
        ],
    ));
    resize("ResizeNearestNeighbor", false, false).input(x()).input([5i32, 3]).gives(tensor(
        [1, 5, 3, 1],
        [
            -0.15245335f32,
            1.3495203,
            -0.08241825,
            -0.15245335,
            1.3495203,
            -0.08241825,
            0.50849795,
            1.1972469,
            -0.7041306,
            0.50849795,
            1.1972469,
            -0.7041306,
            1.0496864,
            0.74531,
            -1.1288596,
        ],
    ));
    resize("ResizeNearestNeighborGrad", false, false).input(wavy([1, 5, 3, 1], 2)).input([3i32, 4]).gives(tensor(
        [1, 3, 4, 1],
        [
            -1.5963244f32,
            1.6416246,
            1.3990657,
            0.0,
            0.37786466,
            -2.0581408,
            0.3782634,
            0.0,
            1.2785465,
            0.31322157,
            -1.2463762,
            0.0,
        ],
    ));
    resize("ResizeBilinear", false, false).input(x()).input([2i32, 7]).gives(tensor(
        [1, 2, 7, 1],
        [
            -0.15245335f32,
            0.70581734,
            1.1449575,
            0.3267069,
            -0.4061268,
            -1.0535436,
            -1.2153977,
            0.7790922,
            0.8889129,
            0.70159644,
            -0.37713143,
            -0.83241755,
            -0.6642624,
            -0.6222237,
        ],
    ));
    resize("ResizeBilinearGrad", false, false).input(wavy([1, 2, 7, 1], 2)).input(x()).gives(tensor(
        [1, 3, 4, 1],
        [
            0.21924728f32,
            0.50621915,
            -0.46649012,
            0.6553685,
            -0.31991473,
            0.50152266,
            -0.4005924,
            0.6288727,
            -0.31991473,
            0.50152266,
            -0.4005924,
            0.6288727,
        ],
    ));
    resize("ResizeNearestNeighbor", false, false).input(x()).input([2i32, 7]).gives(tensor(
        [1, 2, 7, 1],
        [
            -0.15245335f32,
            -0.15245335,
            1.3495203,
            1.3495203,
            -0.08241825,
            -0.08241825,
            -1.2153977,
            0.50849795,
            0.50849795,
            1.1972469,
            1.1972469,
            -0.7041306,
            -0.7041306,
            -0.9029159,
        ],
    ));
    resize("ResizeNearestNeighborGrad", false, false).input(wavy([1, 2, 7, 1], 2)).input([3i32, 4]).gives(tensor(
        [1, 3, 4, 1],
        [
            0.97819906f32,
            -1.1257602,
            1.591927,
            -0.5300211,
            -0.12093246,
            -0.121252954,
            0.74874014,
            0.31322157,
            0.0,
            0.0,
            0.0,
            0.0,
        ],
    ));
    resize("ResizeBilinear", false, false).input(x()).input([1i32, 1]).gives(tensor([1, 1, 1, 1], [-0.15245335f32]));
    resize("ResizeBilinearGrad", false, false)
        .input(wavy([1, 1, 1, 1], 2))
        .input(x())
        .gives(tensor([1, 3, 4, 1], [-0.34996647f32, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
    resize("ResizeNearestNeighbor", false, false)
        .input(x())
        .input([1i32, 1])
        .gives(tensor([1, 1, 1, 1], [-0.15245335f32]));
    resize("ResizeNearestNeighborGrad", false, false)
        .input(wavy([1, 1, 1, 1], 2))
        .input([3i32, 4])
        .gives(tensor([1, 3, 4, 1], [-0.34996647f32, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
    resize("ResizeBilinear", true, false).input(x()).input([5i32, 3]).gives(tensor(
        [1, 5, 3, 1],
        [
            -0.15245335f32,
            0.63355106,
            -1.2153977,
            0.17802231,
            0.44005463,
            -1.0591568,
            0.50849795,
            0.24655819,
            -0.9029159,
            0.7790922,
            0.027391702,
            -0.6222237,
            1.0496864,
            -0.19177479,
            -0.34153146,
        ],
    ));
    resize("ResizeBilinearGrad", true, false).input(wavy([1, 5, 3, 1], 2)).input(x()).gives(tensor(
        [1, 3, 4, 1],
        [
            -0.9731454f32,
            0.7424475,
            0.7424475,
            0.7598317,
            -0.69925714,
            -0.693421,
            -0.693421,
            1.2824005,
            1.7324893,
            -0.100673884,
            -0.100673884,
            -1.5112793,
        ],
    ));
    resize("ResizeNearestNeighbor", true, false).input(x()).input([5i32, 3]).gives(tensor(
        [1, 5, 3, 1],
        [
            -0.15245335f32,
            -0.08241825,
            -1.2153977,
            0.50849795,
            -0.7041306,
            -0.9029159,
            0.50849795,
            -0.7041306,
            -0.9029159,
            1.0496864,
            -1.1288596,
            -0.34153146,
            1.0496864,
            -1.1288596,
            -0.34153146,
        ],
    ));
    resize("ResizeNearestNeighborGrad", true, false).input(wavy([1, 5, 3, 1], 2)).input([3i32, 4]).gives(tensor(
        [1, 3, 4, 1],
        [
            -0.34996647f32,
            0.0,
            1.3281655,
            0.120597705,
            -1.776379,
            0.0,
            -0.71554315,
            2.1865377,
            2.1864321,
            0.0,
            -0.7159171,
            -1.7761824,
        ],
    ));
    resize("ResizeBilinear", true, false).input(x()).input([2i32, 7]).gives(tensor(
        [1, 2, 7, 1],
        [
            -0.15245335f32,
            0.59853345,
            1.3495203,
            0.63355106,
            -0.08241825,
            -0.648908,
            -1.2153977,
            1.0496864,
            0.89749825,
            0.74531,
            -0.19177479,
            -1.1288596,
            -0.7351955,
            -0.34153146,
        ],
    ));
    resize("ResizeBilinearGrad", true, false).input(wavy([1, 2, 7, 1], 2)).input(x()).gives(tensor(
        [1, 3, 4, 1],
        [
            0.3141163f32,
            0.16150153,
            0.32951406,
            0.109212935,
            0.0,
            0.0,
            0.0,
            0.0,
            -0.5749673,
            0.84735125,
            -0.40510243,
            0.9524948,
        ],
    ));
    resize("ResizeNearestNeighbor", true, false).input(x()).input([2i32, 7]).gives(tensor(
        [1, 2, 7, 1],
        [
            -0.15245335f32,
            1.3495203,
            1.3495203,
            -0.08241825,
            -0.08241825,
            -1.2153977,
            -1.2153977,
            1.0496864,
            0.74531,
            0.74531,
            -1.1288596,
            -1.1288596,
            -0.34153146,
            -0.34153146,
        ],
    ));
    resize("ResizeNearestNeighborGrad", true, false).input(wavy([1, 2, 7, 1], 2)).input([3i32, 4]).gives(tensor(
        [1, 3, 4, 1],
        [
            -0.34996647f32,
            1.4487633,
            -0.9328989,
            0.74844694,
            0.0,
            0.0,
            0.0,
            0.0,
            -1.0290022,
            1.8159554,
            -1.558945,
            1.591768,
        ],
    ));
    resize("ResizeBilinear", true, false).input(x()).input([1i32, 1]).gives(tensor([1, 1, 1, 1], [-0.15245335f32]));
    resize("ResizeBilinearGrad", true, false)
        .input(wavy([1, 1, 1, 1], 2))
        .input(x())
        .gives(tensor([1, 3, 4, 1], [-0.34996647f32, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
    resize("ResizeNearestNeighbor", true, false)
        .input(x())
        .input([1i32, 1])
        .gives(tensor([1, 1, 1, 1], [-0.15245335f32]));
    resize("ResizeNearestNeighborGrad", true, false)
        .input(wavy([1, 1, 1, 1], 2))
        .input([3i32, 4])
        .gives(tensor([1, 3, 4, 1], [-0.34996647f32, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
    resize("ResizeBilinear", false, true).input(x()).input([5i32, 3]).gives(tensor(
        [1, 5, 3, 1],
        [
            0.09787561f32,
            0.63355106,
            -1.026568,
            0.30804116,
            0.4787539,
            -0.96385485,
            0.62328947,
            0.24655819,
            -0.8697851,
            0.84869003,
            -0.016441673,
            -0.6315656,
            0.99895704,
            -0.19177479,
            -0.4727527,
        ],
    ));
    resize("ResizeBilinearGrad", false, true).input(wavy([1, 5, 3, 1], 2)).input(x()).gives(tensor(
        [1, 3, 4, 1],
        [
            -0.91481763f32,
            0.57515687,
            0.9060667,
            0.7397322,
            -0.5545084,
            -0.7685386,
            -0.4563814,
            1.0062789,
            1.5193982,
            0.15174879,
            -0.41284066,
            -1.3035502,
        ],
    ));
    resize("ResizeNearestNeighbor", false, true).input(x()).input([5i32, 3]).gives(tensor(
        [1, 5, 3, 1],
        [
            -0.15245335f32,
            -0.08241825,
            -1.2153977,
            -0.15245335,
            -0.08241825,
            -1.2153977,
            0.50849795,
            -0.7041306,
            -0.9029159,
            1.0496864,
            -1.1288596,
            -0.34153146,
            1.0496864,
            -1.1288596,
            -0.34153146,
        ],
    ));
    resize("ResizeNearestNeighborGrad", false, true).input(wavy([1, 5, 3, 1], 2)).input([3i32, 4]).gives(tensor(
        [1, 3, 4, 1],
        [
            -1.5963244f32,
            0.0,
            1.6416246,
            1.3990657,
            -0.5300211,
            0.0,
            -1.0290022,
            0.90806973,
            2.1864321,
            0.0,
            -0.7159171,
            -1.7761824,
        ],
    ));
    resize("ResizeBilinear", false, true).input(x()).input([2i32, 7]).gives(tensor(
        [1, 2, 7, 1],
        [
            0.012784481f32,
            0.4765944,
            1.21869,
            0.5368028,
            -0.3020916,
            -0.8160521,
            -1.1372772,
            0.9143893,
            0.89435536,
            0.862301,
            -0.08219153,
            -0.98404866,
            -0.6750202,
            -0.48187757,
        ],
    ));
    resize("ResizeBilinearGrad", false, true).input(wavy([1, 2, 7, 1], 2)).input(x()).gives(tensor(
        [1, 3, 4, 1],
        [
            0.38435122f32,
            -0.02763784,
            0.093364164,
            0.23568103,
            0.03301853,
            0.15398191,
            -0.106355794,
            0.35288563,
            -0.28529564,
            0.48958355,
            -0.4124315,
            0.8229759,
        ],
    ));
    resize("ResizeNearestNeighbor", false, true).input(x()).input([2i32, 7]).gives(tensor(
        [1, 2, 7, 1],
        [
            -0.15245335f32,
            -0.15245335,
            1.3495203,
            -0.08241825,
            -0.08241825,
            -1.2153977,
            -1.2153977,
            1.0496864,
            1.0496864,
            0.74531,
            -1.1288596,
            -1.1288596,
            -0.34153146,
            -0.34153146,
        ],
    ));
    resize("ResizeNearestNeighborGrad", false, true).input(wavy([1, 2, 7, 1], 2)).input([3i32, 4]).gives(tensor(
        [1, 3, 4, 1],
        [
            0.97819906f32,
            0.120597705,
            -0.9328989,
            0.74844694,
            0.0,
            0.0,
            0.0,
            0.0,
            -0.12093246,
            0.90788573,
            -1.558945,
            1.591768,
        ],
    ));
    resize("ResizeBilinear", false, true).input(x()).input([1i32, 1]).gives(tensor([1, 1, 1, 1], [0.24655819f32]));
    resize("ResizeBilinearGrad", false, true)
        .input(wavy([1, 1, 1, 1], 2))
        .input(x())
        .gives(tensor([1, 3, 4, 1], [0.0f32, 0.0, 0.0, 0.0, 0.0, -0.17498323, -0.17498323, 0.0, 0.0, 0.0, 0.0, 0.0]));
    resize("ResizeNearestNeighbor", false, true)
        .input(x())
        .input([1i32, 1])
        .gives(tensor([1, 1, 1, 1], [-0.7041306f32]));
    resize("ResizeNearestNeighborGrad", false, true)
        .input(wavy([1, 1, 1, 1], 2))
        .input([3i32, 4])
        .gives(tensor([1, 3, 4, 1], [0.0f32, 0.0, 0.0, 0.0, 0.0, 0.0, -0.34996647, 0.0, 0.0, 0.0, 0.0, 0.0]));
    resize("ResizeBilinear", false, false)
        .input(tensor([1, 1, 2, 1], [0u8, 255]))
        .input([1i32, 4])
        .gives(tensor([1, 1, 4, 1], [0.0f32, 127.5, 255.0, 255.0]));
}

#[test]
fn gradients() {
    resize("ResizeNearestNeighbor", false, true).input(wavy([2, 2, 3, 2], 0)).input([3i32, 2]).gradient();
    // The bilinear gradient is of floats only, so its sum is checked: every output pixel hands on all of its gradient.
    let g = crate::graph();
    let x = g.constant(wavy([2, 2, 3, 2], 0));
    let y = super::resize_bilinear(x, [3, 2]);
    let dx = kolo_graph::gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
    let sum: f32 = crate::testing::evaluate(&g, &[dx], &[]).unwrap()[0].data::<f32>().unwrap().iter().sum();
    assert!((sum - 2.0 * 3.0 * 2.0 * 2.0).abs() < 1e-4, "{sum}");
}

#[test]
fn odd_sizes_and_errors() {
    let x = || wavy([1, 3, 4, 1], 1);
    resize("ResizeBilinear", true, true).input(x()).input([2i32, 2]).fails("align_corners must be False");
    resize("ResizeBilinear", false, false).input(x()).input([0i32, 2]).fails("output dimensions must be positive");
    resize("ResizeNearestNeighbor", false, false).input(wavy([3, 4, 1], 0)).input([1i32, 2]).fails("4");
    resize("ResizeNearestNeighbor", false, false)
        .input(tensor::<f32, 4>([1, 0, 2, 1], []))
        .input([1i32, 2])
        .fails("non-zero size");
    resize("ResizeBilinear", false, false).input(tensor::<f32, 4>([0, 2, 2, 1], [])).input([1i32, 2]).gives(tensor::<
        f32,
        4,
    >(
        [0, 1, 2, 1],
        [],
    ));
    resize("ResizeNearestNeighbor", false, false)
        .input(Tensor::from_vec([1, 1, 2, 1], vec![3i64, 4]).unwrap())
        .input([1i32, 4])
        .gives(tensor([1, 1, 4, 1], [3i64, 3, 4, 4]));
}
