use kolo_core::{DType, Tensor};

use crate::random::testing::run_twice;
use crate::testing::{assert_close, check_op, tensor};

#[test]
fn draws_are_tensorflows() {
    let attrs = [("seed", 12345i64.into()), ("seed2", 678i64.into())];
    let alphas = Tensor::from([0.5f64, 1.0, 2.5]);
    let [first, second] = run_twice("RandomGamma", &attrs, &[Tensor::vector(vec![3i32]), alphas]);
    let expected = [
        tensor(
            [3, 3],
            [
                0.014041846309628453,
                1.3541995477541662,
                1.9789077083607256,
                1.8283760098511173,
                0.04524286352580367,
                2.9101800610839996,
                0.009507824673349754,
                0.5816131531474877,
                0.9508973290747422,
            ],
        ),
        tensor(
            [3, 3],
            [
                0.5728352944505455,
                0.397806963561152,
                1.3581099796660374,
                0.6352315993290579,
                1.2248899954201713,
                0.7768884134674838,
                0.3610728563524174,
                1.591688203735631,
                2.3543095210191125,
            ],
        ),
    ];
    assert_close(&first, &expected[0], 1e-14, "first run");
    assert_close(&second, &expected[1], 1e-14, "second run");
    assert_eq!(first.dtype(), DType::F64);
}

#[test]
fn shapes_and_odd_parameters() {
    let test = || check_op("RandomGamma").attr("seed", 1i64);
    let out = test().input([2i32, 3]).input([[1.0f32], [2.0]]).run(false).unwrap();
    assert_eq!(out[0].shape().dims(), [2, 3, 2, 1]);
    assert!(out[0].data::<f32>().unwrap().iter().all(|x| *x > 0.0));
    test().input([0i32]).input(2.0f32).gives(tensor::<f32, 1>([0], []));
    let bad = test().input([1i32]).input(-1.0f32).run(false).unwrap();
    assert!(bad[0].data::<f32>().unwrap()[0].is_nan());
}
