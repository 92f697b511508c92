//! Values, gradients and bad input of the convolutions.

use kolo_core::{Shape, Tensor};

use crate::nn::window::{Window, for_taps};
use crate::testing::{OpTest, check_op, tensor, wavy};

/// A window: strides, padding, explicit paddings, dilations.
type Case = ([i64; 2], &'static str, &'static [i64], [i64; 2]);

/// The windows that are tried.
const WINDOWS: [Case; 6] = [
    ([1, 1], "VALID", &[], [1, 1]),
    ([2, 1], "SAME", &[], [1, 1]),
    ([2, 2], "EXPLICIT", &[0, 0, 1, 2, 0, 1, 0, 0], [1, 1]),
    ([1, 1], "SAME", &[], [2, 1]),
    ([1, 1], "VALID", &[], [1, 2]),
    ([3, 2], "EXPLICIT", &[0, 0, 3, 0, 4, 2, 0, 0], [1, 1]),
];

fn with_window(op: &str, i: usize, nchw: bool) -> OpTest {
    let (strides, padding, explicit, dilations) = WINDOWS[i];
    let order = |[h, w]: [i64; 2]| if nchw { vec![1, 1, h, w] } else { vec![1, h, w, 1] };
    let mut explicit = explicit.to_vec();
    if nchw && !explicit.is_empty() {
        explicit.rotate_right(2);
    }
    check_op(op)
        .attr("strides", order(strides))
        .attr("padding", padding)
        .attr("explicit_paddings", explicit)
        .attr("dilations", order(dilations))
        .attr("data_format", if nchw { "NCHW" } else { "NHWC" })
}

/// The definition, tap by tap.
fn by_definition(i: usize, input: &Tensor, filter: &Tensor) -> Tensor {
    let mut attrs = kolo_graph::Attrs::default();
    let (strides, padding, explicit, dilations) = WINDOWS[i];
    attrs.set("strides", vec![1, strides[0], strides[1], 1]);
    attrs.set("dilations", vec![1, dilations[0], dilations[1], 1]);
    attrs.set("padding", padding);
    attrs.set("explicit_paddings", explicit.to_vec());
    attrs.set("data_format", "NHWC");
    let window = Window::from_attrs(&attrs).unwrap();
    let (x, f) = (input.data::<f32>().unwrap(), filter.data::<f32>().unwrap());
    let (images, &[kh, kw, cin, cout]) = (window.images(input.shape()).unwrap(), filter.shape().dims()) else {
        panic!()
    };
    let [h, w] = window.axes(images.spatial, [kh, kw]).unwrap();
    let (places, pixels) = (h.output * w.output, h.input * w.input);
    let mut y = vec![0.0f32; images.batch * places * cout];
    for n in 0..images.batch {
        for_taps(&h, &w, |o, k, i| {
            for a in 0..cin {
                for b in 0..cout {
                    y[(n * places + o) * cout + b] += x[(n * pixels + i) * cin + a] * f[(k * cin + a) * cout + b];
                }
            }
        });
    }
    tensor([images.batch, h.output, w.output, cout], y)
}

fn channels_first(images: &Tensor) -> Tensor {
    let &[n, h, w, c] = images.shape().dims() else { panic!() };
    let shape = Shape::from([n, c, h, w]);
    let mut out = vec![0.0f32; images.n_elements()];
    crate::nn::layout::to_nchw(images.data::<f32>().unwrap(), &shape, &mut out);
    Tensor::from_vec(shape, out).unwrap()
}

#[test]
fn the_definition_is_tensorflows() {
    let (x, f) = (wavy([2, 5, 4, 2], 1), wavy([3, 2, 2, 3], 2));
    let expected = tensor(
        [2, 3, 2, 3],
        [
            2.3282259f32,
            -0.5510169,
            -2.1609638,
            2.2253654,
            -0.8767878,
            -1.9298173,
            -1.6998729,
            2.8557127,
            1.1295309,
            -1.3310345,
            3.013145,
            0.7197678,
            -0.47326687,
            -2.12198,
            1.0885291,
            -0.86732256,
            -2.0119834,
            1.4098897,
            0.6969565,
            0.5828937,
            -0.8866134,
            1.7098762,
            0.039525025,
            -1.738911,
            -1.025754,
            0.37912154,
            1.0162729,
            -1.5763836,
            1.7900788,
            1.249505,
            0.5462272,
            -0.5792254,
            -0.26649657,
            0.09859036,
            -1.5423472,
            0.41033995,
        ],
    );
    crate::testing::assert_close(&by_definition(2, &x, &f), &expected, 1e-5, "explicit padding");
    with_window("Conv2D", 2, false).input(x).input(f).gives(expected);
}

#[test]
fn every_window_in_both_formats() {
    for (i, _) in WINDOWS.iter().enumerate() {
        for (x, f) in [
            (wavy([2, 5, 4, 2], 1), wavy([3, 2, 2, 3], 2)),
            (wavy([3, 6, 7, 1], 3), wavy([2, 3, 1, 5], 4)),
            (wavy([1, 5, 5, 3], 5), wavy([1, 1, 3, 2], 6)),
        ] {
            let expected = by_definition(i, &x, &f);
            with_window("Conv2D", i, false).input(x.clone()).input(f.clone()).gives(expected.clone());
            with_window("Conv2D", i, true).input(channels_first(&x)).input(f).gives(channels_first(&expected));
        }
    }
}

#[test]
fn images_too_large_for_one_block() {
    let (x, f) = (wavy([2, 70, 67, 4], 1), wavy([5, 5, 4, 3], 2));
    let expected = by_definition(1, &x, &f);
    with_window("Conv2D", 1, false).tolerance(1e-4).input(x).input(f).gives(expected);
}

#[test]
fn halves_are_computed_in_single_precision() {
    let (x, f) = (wavy([1, 3, 3, 2], 1), wavy([2, 2, 2, 3], 2));
    let half = |tensor: &Tensor| {
        let values = tensor.data::<f32>().unwrap().iter().map(|&x| half::f16::from_f32(x)).collect();
        Tensor::from_vec(tensor.shape().clone(), values).unwrap()
    };
    let expected = half(&by_definition(0, &x, &f));
    with_window("Conv2D", 0, false).tolerance(5e-3).input(half(&x)).input(half(&f)).gives(expected);
}

#[test]
fn gradients() {
    for (i, _) in WINDOWS.iter().enumerate() {
        with_window("Conv2D", i, false).input(wavy([2, 4, 4, 2], 1)).input(wavy([2, 2, 2, 2], 2)).gradient();
    }
    with_window("Conv2D", 1, true).input(wavy([1, 2, 3, 4], 1)).input(wavy([2, 2, 2, 2], 2)).gradient();
    with_window("Conv2D", 0, false).input(wavy([2, 3, 2, 2], 1)).input(wavy([1, 1, 2, 3], 2)).gradient();
    with_window("Conv2DBackpropInput", 1, false)
        .input([1i32, 4, 3, 2])
        .input(wavy([2, 2, 2, 2], 1))
        .input(wavy([1, 2, 3, 2], 2))
        .gradient();
    with_window("Conv2DBackpropFilter", 1, false)
        .input(wavy([1, 4, 3, 2], 1))
        .input([2i32, 2, 2, 2])
        .input(wavy([1, 2, 3, 2], 2))
        .gradient();
}

#[test]
fn backprops_are_tensorflows() {
    let (x, f) = (wavy([2, 5, 4, 2], 1), wavy([3, 2, 2, 3], 2));
    with_window("Conv2DBackpropFilter", 2, false)
        .tolerance(1e-4)
        .input(x)
        .input([3i32, 2, 2, 3])
        .input(wavy([2, 3, 2, 3], 3))
        .gives(tensor(
            [3, 2, 2, 3],
            [
                1.3523071f32,
                0.17710479,
                -0.8603597,
                1.8289529,
                -6.0828214,
                -0.29978588,
                -1.4560232,
                1.4949255,
                0.64502716,
                -1.0861865,
                5.802151,
                -0.15899552,
                3.8630824,
                -5.2871037,
                -2.4101233,
                -3.9647486,
                -1.2666931,
                4.355021,
                -2.8961866,
                5.843197,
                1.4363849,
                4.6562815,
                -0.009351146,
                -4.576651,
                -0.4994655,
                -0.49911377,
                1.1656646,
                -5.448626,
                3.5644696,
                4.49177,
                1.7896091,
                -0.649644,
                -2.0479655,
                4.87357,
                -3.6272848,
                -3.6888697,
            ],
        ));
    with_window("Conv2DBackpropInput", 2, false)
        .tolerance(1e-4)
        .input([2i32, 5, 4, 2])
        .input(f)
        .input(wavy([2, 3, 2, 3], 3))
        .gives(tensor(
            [2, 5, 4, 2],
            [
                -0.68913853f32,
                1.5164787,
                1.9014482,
                -0.013153315,
                -3.2149065,
                -0.46745086,
                2.8737333,
                2.6520476,
                -3.1351302,
                -0.29075837,
                2.9361548,
                2.5311925,
                -2.5083456,
                -5.7786126,
                -1.8825146,
                4.333037,
                -1.7197046,
                -1.8015031,
                0.31275815,
                1.992836,
                1.9363729,
                -0.826061,
                -2.5955167,
                -1.1707015,
                1.2580826,
                -4.056552,
                -4.339265,
                0.76165104,
                3.47856,
                2.733105,
                -1.3777976,
                -3.7400103,
                3.2049963,
                1.2453799,
                -2.2330627,
                -2.9029775,
                0.50794834,
                1.8358616,
                0.94920975,
                -1.0489708,
                -2.7995272,
                0.21079624,
                2.9924142,
                2.0848556,
                -2.6027842,
                -1.6081645,
                1.3547117,
                2.5998821,
                -3.1919644,
                -4.661886,
                -0.34508508,
                4.388155,
                0.01426816,
                -5.435459,
                -4.146705,
                2.2772653,
                0.8534143,
                -1.3581505,
                -1.9265141,
                -0.14460117,
                3.2694168,
                0.6498153,
                -2.7692819,
                -2.7343488,
                3.221898,
                0.5739833,
                -2.7696505,
                -2.6493804,
                2.4405026,
                5.890437,
                2.0729568,
                -4.2628284,
                1.6395928,
                1.9177208,
                -0.12514573,
                -1.947582,
                -2.0084748,
                0.8682499,
                2.7164745,
                1.2369144,
            ],
        ));
}

#[test]
fn sizes_zero() {
    let none = |shape: [usize; 4]| tensor::<f32, 4>(shape, []);
    with_window("Conv2D", 0, false).input(none([0, 5, 4, 2])).input(wavy([3, 2, 2, 3], 2)).gives(none([0, 3, 3, 3]));
    with_window("Conv2D", 0, false)
        .input(none([1, 2, 2, 0]))
        .input(none([2, 2, 0, 1]))
        .gives(tensor([1, 1, 1, 1], [0.0f32]));
    with_window("Conv2DBackpropFilter", 0, false)
        .input(none([0, 2, 2, 1]))
        .input([1i32, 1, 1, 1])
        .input(none([0, 2, 2, 1]))
        .gives(tensor([1, 1, 1, 1], [0.0f32]));
}

#[test]
fn bad_input() {
    let check = |x: Tensor, f: Tensor| with_window("Conv2D", 0, false).input(x).input(f);
    check(wavy([1, 3, 3, 2], 1), wavy([2, 2, 3, 1], 1))
        .fails("input depth must be evenly divisible by filter depth: 2 vs 3");
    check(wavy([1, 3, 3, 4], 1), wavy([2, 2, 2, 3], 1))
        .fails("output depth must be evenly divisible by number of groups: 3 vs 2");
    check(wavy([1, 2, 3, 2], 1), wavy([4, 2, 2, 1], 1))
        .fails("Computed output size would be negative: -1 [input_size: 2, effective_filter_size: 4, stride: 1]");
    check(wavy([2, 3, 2], 1), wavy([2, 2, 2, 1], 1)).fails("should have rank 4");
    let bad = |strides: Vec<i64>| {
        check_op("Conv2D")
            .attr("strides", strides)
            .attr("padding", "SAME")
            .input(wavy([1, 2, 2, 1], 1))
            .input(wavy([1, 1, 1, 1], 1))
    };
    bad(vec![1, 1, 1, 2]).fails("does not yet support strides in the batch and depth dimensions");
    bad(vec![1, 0, 1, 1]).fails("strides must be positive");
    bad(vec![1, 1]).fails("must specify 4 dimensions");
    bad(vec![1, 1, 1, 1])
        .attr("padding", "EXPLICIT")
        .attr("explicit_paddings", vec![1i64])
        .fails("must contain 8 values");
    with_window("Conv2DBackpropInput", 0, false)
        .input([1i32, 4, 4, 1])
        .input(wavy([2, 2, 1, 1], 1))
        .input(wavy([1, 2, 2, 1], 2))
        .fails("out_backprop has shape [1,2,2,1], but the convolution's output has shape [1,3,3,1]");
}

#[test]
fn groups_of_channels() {
    let check = |op: &str| check_op(op).attr("strides", vec![1i64, 1, 1, 1]).attr("padding", "VALID");
    let (x, f, dy) = (wavy([1, 3, 3, 4], 1), wavy([2, 2, 2, 4], 2), wavy([1, 2, 2, 4], 3));
    check("Conv2D").input(x.clone()).input(f.clone()).gives(tensor(
        [1, 2, 2, 4],
        [
            5.07616f32, 0.88202155, 4.268878, 0.743589, 3.8534915, 3.5730479, 3.280163, 3.470709, -0.85535, 5.7016735,
            -0.9286015, 5.7932744, -3.1115563, 4.5832505, -3.0492995, 4.7820473,
        ],
    ));
    check("Conv2DBackpropInput").input([1i32, 3, 3, 4]).input(f.clone()).input(dy.clone()).gives(tensor(
        [1, 3, 3, 4],
        [
            1.8824214f32,
            1.4622898,
            1.5913888,
            1.1112059,
            2.3967142,
            1.447151,
            1.694324,
            0.79091007,
            1.3089225,
            0.5596827,
            0.9497434,
            0.2895633,
            -0.027829543,
            -0.1454603,
            -0.5316555,
            -0.5179488,
            -0.25291026,
            -0.22212268,
            -0.91160935,
            -0.60342634,
            -0.014126959,
            0.08332717,
            -0.20348299,
            -0.00065968226,
            0.6225943,
            -0.17590587,
            0.48592034,
            -0.21659073,
            0.5072322,
            -0.58647823,
            0.42198908,
            -0.59257746,
            -0.020145355,
            -0.80054915,
            -0.021699248,
            -0.80276,
        ],
    ));
    check("Conv2DBackpropFilter").input(x.clone()).input([2i32, 2, 2, 4]).input(dy).gives(tensor(
        [2, 2, 2, 4],
        [
            2.6575646f32,
            2.525614,
            2.583725,
            1.8584731,
            -1.15237,
            3.1573434,
            -1.4853227,
            2.231254,
            1.8741453,
            3.841206,
            1.7182417,
            2.9150696,
            -2.1994886,
            1.4281255,
            -2.5574636,
            0.76106656,
            -0.7745339,
            3.5297167,
            -1.0923487,
            2.5538216,
            -2.3924606,
            -2.4513748,
            -2.6686132,
            -2.452798,
            -1.9479411,
            1.9839956,
            -2.303319,
            1.2303357,
            -1.4879036,
            -3.5883193,
            -1.6785812,
            -3.356995,
        ],
    ));
    check("Conv2D").input(x).input(f).gradient();
}

#[test]
fn integers() {
    let check = |op: &str, padding: &str| check_op(op).attr("strides", vec![1i64, 1, 1, 1]).attr("padding", padding);
    let x = tensor([1, 3, 3, 2], (0..18).collect::<Vec<i32>>());
    let f = tensor([2, 2, 2, 2], (-7..9).collect::<Vec<i32>>());
    check("Conv2D", "SAME").input(x.clone()).input(f.clone()).gives(tensor(
        [1, 3, 3, 2],
        [116i32, 152, 116, 168, -10, 20, 116, 200, 116, 216, -58, -4, -206, -152, -238, -176, -197, -164],
    ));
    let one = tensor([2, 2, 1, 2], [-7i32, -6, -3, -2, 1, 2, 5, 6]);
    check("Conv2D", "VALID").input(x).input(one).gives(tensor([1, 2, 2, 2], [40i32, 56, 32, 56, 16, 56, 8, 56]));
    check("Conv2DBackpropInput", "SAME").input([1i32, 3, 3, 2]).input(f).input(tensor([1, 3, 3, 2], [1i32; 18])).gives(
        tensor([1, 3, 3, 2], [-13i32, -9, -18, -10, -18, -10, -10, -2, -4, 12, -4, 12, -10, -2, -4, 12, -4, 12]),
    );
}
