//! Values and shapes of batch normalisation.

use kolo_core::{Shape, Tensor};

use crate::testing::{OpTest, assert_close, check_op, evaluate, tensor, wavy};

const SCALE: [f32; 3] = [1.0, 0.5, 2.0];
const OFFSET: [f32; 3] = [0.1, 0.2, -0.3];
const MEAN: [f32; 3] = [0.1, -0.2, 0.3];
const VARIANCE: [f32; 3] = [0.5, 1.0, 2.0];

fn forward(op: &str, x: Tensor) -> OpTest {
    check_op(op).attr("epsilon", 1e-3f32).input(x).input(SCALE).input(OFFSET)
}

fn none() -> Tensor {
    Tensor::vector::<f32>(vec![])
}

fn channels_first(images: &Tensor) -> Tensor {
    let &[n, h, w, c] = images.shape().dims() else { panic!() };
    let shape = Shape::from([n, c, h, w]);
    let mut out = vec![0.0f32; images.n_elements()];
    crate::nn::layout::to_nchw(images.data::<f32>().unwrap(), &shape, &mut out);
    Tensor::from_vec(shape, out).unwrap()
}

fn trained() -> [Tensor; 5] {
    [
        tensor(
            [2, 2, 1, 3],
            [
                0.3464198f32,
                0.88247824,
                -1.8904812,
                -1.1151274,
                0.47042078,
                1.8914196,
                -0.41213575,
                -0.22109912,
                1.4553218,
                1.5808434,
                -0.33179992,
                -2.6562598,
            ],
        ),
        Tensor::from([-0.3316679f32, -0.043439314, 0.45574588]),
        Tensor::from([0.7039021f32, 1.3872695, 0.60928696]),
        Tensor::from([-0.3316679f32, -0.043439314, 0.45574588]),
        Tensor::from([0.52792656f32, 1.0404521, 0.4569652]),
    ]
}

/// The batch has no mean, and still there is nothing that a gradient could come from.
#[test]
fn gradients_of_an_empty_batch_are_zero() {
    let empty = || tensor::<f32, 4>([0, 4, 4, 3], []);
    let (nan, zeros) = ([f32::NAN; 3], || Tensor::from([0.0f32; 3]));
    for training in [true, false] {
        let test = |op| check_op(op).attr("is_training", training).input(empty()).input(empty()).input(SCALE);
        let test = |op| test(op).input(nan).input(nan);
        test("FusedBatchNormGrad").gives_all([empty(), zeros(), zeros(), none(), none()]);
        test("FusedBatchNormGradV3").input(0.0f32).gives_all([empty(), zeros(), zeros(), none(), none()]);
    }
}

#[test]
fn training_is_tensorflows() {
    let x = wavy([2, 2, 1, 3], 1);
    for op in ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"] {
        forward(op, x.clone()).input(none()).input(none()).gives_all(trained());
        let mut first = trained();
        first[0] = channels_first(&first[0]);
        let test = forward(op, channels_first(&x)).attr("data_format", "NCHW");
        test.input(none()).input(none()).gives_all(first);
    }
    let mut averaged = trained();
    averaged[1] = Tensor::from([-0.029500373f32, -0.1530318, 0.3467238]);
    averaged[2] = Tensor::from([0.56117064f32, 1.1161809, 1.5827861]);
    forward("FusedBatchNormV3", x)
        .attr("exponential_avg_factor", 0.3f32)
        .input(MEAN)
        .input(VARIANCE)
        .gives_all(averaged);
}

#[test]
fn inference_is_tensorflows() {
    let x = wavy([2, 2, 1, 3], 1);
    for op in ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"] {
        forward(op, x.clone()).attr("is_training", false).input(MEAN).input(VARIANCE).gives_all([
            tensor(
                [2, 2, 1, 3],
                [
                    -0.25666648f32,
                    0.9743731,
                    -0.84068596,
                    -1.7583959,
                    0.55407196,
                    0.9685816,
                    -1.0360769,
                    -0.15128236,
                    0.7599518,
                    1.0116949,
                    -0.26419777,
                    -1.2070358,
                ],
            ),
            Tensor::from(MEAN),
            Tensor::from(VARIANCE),
        ]);
    }
}

fn backward(op: &str, training: bool) -> OpTest {
    let [_, _, _, mean, variance] = trained();
    let (mean, variance) = if training { (mean, variance) } else { (MEAN.into(), VARIANCE.into()) };
    let test = check_op(op)
        .attr("epsilon", 1e-3f32)
        .attr("is_training", training)
        .input(wavy([2, 2, 1, 3], 2))
        .input(wavy([2, 2, 1, 3], 1))
        .input(SCALE)
        .input(mean)
        .input(variance);
    if op.ends_with("V3") { test.input(0.0f32) } else { test }
}

#[test]
fn gradients_are_tensorflows() {
    for op in ["FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"] {
        backward(op, true).gives_all([
            tensor(
                [2, 2, 1, 3],
                [
                    -0.3202161f32,
                    0.042415775,
                    0.64497846,
                    -0.023365581,
                    -0.0566539,
                    0.25826073,
                    0.22597438,
                    -0.046320885,
                    -0.39722377,
                    0.117607474,
                    0.060559023,
                    -0.50601596,
                ],
            ),
            Tensor::from([3.0441246f32, 3.9436355, 2.7260838]),
            Tensor::from([-1.2184598f32, -0.4165163, 1.7773292]),
            none(),
            none(),
        ]);
        backward(op, false).gives_all([
            tensor(
                [2, 2, 1, 3],
                [
                    -0.49443316f32,
                    0.663751,
                    0.1705083,
                    -1.7608564,
                    0.1566512,
                    1.807575,
                    -0.7488146,
                    -0.514244,
                    1.2838837,
                    1.2826623,
                    -0.51431227,
                    -0.7490721,
                ],
            ),
            Tensor::from([3.870907f32, 3.9573538, 1.4998494]),
            Tensor::from([-1.2184598f32, -0.4165163, 1.7773292]),
            none(),
            none(),
        ]);
    }
}

#[test]
fn the_gradient_of_the_op_is_the_grad_op_in_both_formats() {
    let expected = [
        tensor(
            [2, 2, 1, 3],
            [
                -0.3202161f32,
                0.042415775,
                0.64497846,
                -0.023365581,
                -0.0566539,
                0.25826073,
                0.22597438,
                -0.046320885,
                -0.39722377,
                0.117607474,
                0.060559023,
                -0.50601596,
            ],
        ),
        Tensor::from([3.0441246f32, 3.9436355, 2.7260838]),
        Tensor::from([-1.2184598f32, -0.4165163, 1.7773292]),
    ];
    for nchw in [false, true] {
        let order = |images: Tensor| if nchw { channels_first(&images) } else { images };
        let g = crate::graph();
        let xs = [order(wavy([2, 2, 1, 3], 1)), SCALE.into(), OFFSET.into()].map(|x| g.constant(x));
        let none = g.constant(none());
        let builder = g.op("FusedBatchNormV3").inputs(xs).inputs([none, none]).attr("epsilon", 1e-3f32);
        let y = builder.attr("data_format", if nchw { "NCHW" } else { "NHWC" }).out();
        let dy = g.constant(order(wavy([2, 2, 1, 3], 2)));
        let options = kolo_graph::GradientOptions { grad_ys: vec![Some(dy)], ..Default::default() };
        let grads = kolo_graph::gradients_with(&[y], &xs, &options).unwrap();
        let grads: Vec<_> = grads.into_iter().map(|grad| grad.unwrap().dense().unwrap()).collect();
        let mut expected = expected.clone();
        expected[0] = order(expected[0].clone());
        for (found, expected) in evaluate(&g, &grads, &[]).unwrap().iter().zip(&expected) {
            assert_close(found, expected, 1e-5, "gradient of FusedBatchNormV3");
        }
    }
}

#[test]
fn halves_and_sizes_one_and_zero() {
    let half = |values: &[f32]| values.iter().map(|&x| half::f16::from_f32(x)).collect::<Vec<_>>();
    check_op("FusedBatchNormV2")
        .attr("epsilon", 0.0f32)
        .tolerance(2e-3)
        .input(tensor([2, 1, 1, 1], half(&[1.0, 3.0])))
        .input([1.0f32])
        .input([0.0f32])
        .input(none())
        .input(none())
        .gives_all([
            tensor([2, 1, 1, 1], half(&[-1.0, 1.0])),
            [2.0f32].into(),
            [2.0f32].into(),
            [2.0f32].into(),
            [1.0f32].into(),
        ]);
    forward("FusedBatchNormV3", tensor([1, 1, 1, 3], [5.0f32, 6.0, 7.0])).input(none()).input(none()).gives_all([
        tensor([1, 1, 1, 3], OFFSET),
        [5.0f32, 6.0, 7.0].into(),
        [0.0f32; 3].into(),
    ]);
    let empty = || tensor::<f32, 4>([0, 2, 2, 3], []);
    forward("FusedBatchNormV3", empty()).attr("is_training", false).input(MEAN).input(VARIANCE).gives(empty());
}

#[test]
fn bad_input() {
    forward("FusedBatchNormV3", wavy([2, 3], 1)).input(none()).input(none()).fails("at least rank 4");
    forward("FusedBatchNormV3", wavy([1, 2, 2, 2], 1)).input(none()).input(none()).fails("not compatible");
    forward("FusedBatchNormV3", wavy([1, 2, 2, 3], 1))
        .attr("is_training", false)
        .input(none())
        .input(none())
        .fails("must have the same number of elements as the channels of x: [0] vs 3");
}
