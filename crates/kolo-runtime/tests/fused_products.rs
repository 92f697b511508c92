//! Steps whose products are fused with what comes after them, against the same steps node by node.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use kolo_core::{Code, DType, Shape, Tensor};
use kolo_graph::{Graph, gradients};
use kolo_ops::math::matmul::matmul;
use kolo_ops::math::reduce::sum::mean;
use kolo_ops::nn::bias_add::bias_add;
use kolo_ops::optim::gradient_descent::apply_gradient_descent;
use kolo_runtime::{GpuOptions, RunOptions, Session, SessionConfig};

fn session(g: &Graph, no_fusion: bool) -> Session {
    let gpu = GpuOptions { no_fusion, ..GpuOptions::default() };
    Session::with_config(g, SessionConfig { gpu, ..SessionConfig::default() }).unwrap()
}

/// Numbers between -1 and 1, the same each time.
fn numbers(dtype: DType, dims: &[usize]) -> Tensor {
    let shape = Shape::new(dims).unwrap();
    let n = shape.n_elements();
    let value = |i: usize| ((i * 7919 + 13) % 1000) as f64 / 500.0 - 1.0;
    match dtype {
        DType::F32 => Tensor::from_vec(shape, (0..n).map(|i| value(i) as f32).collect::<Vec<_>>()).unwrap(),
        _ => Tensor::from_vec(shape, (0..n).map(value).collect::<Vec<_>>()).unwrap(),
    }
}

/// The weights after three steps, and the ops that the last one ran.
fn train(dtype: DType, activation: &str, no_fusion: bool) -> (Vec<f64>, Vec<String>) {
    let g = kolo_ops::graph();
    g.set_seed(1);
    let x = g.constant(numbers(dtype, &[30, 40]));
    let (w, b) = (g.variable("w", numbers(dtype, &[40, 21])), g.variable("b", numbers(dtype, &[21])));
    let sum = bias_add(matmul(x, w.read()), b.read());
    let hidden = if activation.is_empty() { sum } else { g.op(activation).input(sum).out() };
    let loss = mean(hidden * hidden, &[0, 1]);
    let rate = g.constant(numbers(dtype, &[]));
    let handles = [w.handle(), b.handle()];
    let grads = gradients(&[loss], &handles).unwrap();
    let mut updates: Vec<String> = Vec::new();
    for (handle, grad) in handles.into_iter().zip(grads) {
        updates.push(apply_gradient_descent(handle, rate, grad.unwrap().dense().unwrap()).name().to_string());
    }
    let read = w.read();
    let init = g.global_variables_initializer();
    let session = session(&g, no_fusion);
    session.run_op(init).unwrap();
    let mut ran = Vec::new();
    for _ in 0..3 {
        let targets: Vec<&str> = updates.iter().map(String::as_str).collect();
        let options = RunOptions { trace: true, ..RunOptions::default() };
        let (_, metadata) = session.run_named_with(&options, &[], &[], &targets).unwrap();
        ran = metadata.trace.nodes.iter().map(|node| node.op.to_string()).collect();
    }
    let weights = session.fetch(read).unwrap();
    let weights = match dtype {
        DType::F32 => weights.data::<f32>().unwrap().iter().map(|&x| f64::from(x)).collect(),
        _ => weights.data::<f64>().unwrap().to_vec(),
    };
    (weights, ran)
}

#[test]
fn fused_steps_learn_what_single_nodes_learn() {
    for dtype in [DType::F32, DType::F64] {
        let tolerance = if dtype == DType::F32 { 1e-6 } else { 1e-14 };
        for activation in ["", "Relu", "Sigmoid"] {
            let (fused, ran) = train(dtype, activation, false);
            let (single, ran_singly) = train(dtype, activation, true);
            for op in ["_KoloFusedDense", "_KoloApplyDescent"] {
                assert!(ran.iter().any(|ran| ran == op), "{activation}: {ran:?}");
                assert!(ran_singly.iter().all(|ran| ran != op), "{activation}: {ran_singly:?}");
            }
            assert_ne!(single, numbers(DType::F64, &[40, 21]).data::<f64>().unwrap());
            for (i, (x, y)) in fused.iter().zip(&single).enumerate() {
                assert!((x - y).abs() <= tolerance, "{dtype} {activation} at {i}: {x} for {y}");
            }
        }
    }
}

#[test]
fn errors_in_fused_nodes_name_the_product_and_leave_the_session_usable() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [None, None]);
    let w = g.variable("w", numbers(DType::F32, &[4, 3]));
    let bias = g.placeholder::<f32>("bias", [None]);
    let product = g.op("MatMul").input(x).input(w.read()).name("product").out();
    let hidden = g.op("Sigmoid").input(bias_add(product, bias)).out();
    let rate = g.constant(0.1f32);
    let (a, b) = (g.placeholder::<f32>("a", [None, None]), g.placeholder::<f32>("b", [None, None]));
    let delta = g.op("MatMul").input(a).input(b).name("delta").out();
    let update = apply_gradient_descent(w.handle(), rate, delta);
    let read = w.read();
    let init = g.global_variables_initializer();
    let session = session(&g, false);
    session.run_op(init).unwrap();
    let matrix = |m: usize, n: usize| numbers(DType::F32, &[m, n]);
    let ones = Tensor::from([1.0f32; 3]);

    let run = |x_value: Tensor, bias_value: Tensor| session.run(&[hidden], &[(x, x_value), (bias, bias_value)], &[]);
    let error = run(matrix(2, 5), ones.clone()).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.to_string().contains("product") && error.to_string().contains("inner sizes differ"), "{error}");
    let error = run(matrix(2, 4), Tensor::from([1.0f32; 2])).unwrap_err();
    assert!(error.to_string().contains("as many biases"), "{error}");
    let error = session.run(&[], &[(a, matrix(4, 2)), (b, matrix(2, 2))], &[update]).unwrap_err();
    assert!(error.to_string().contains("same shape[4,3] [4,2]"), "{error}");
    let error = session.run(&[], &[(a, matrix(4, 2)), (b, matrix(3, 3))], &[update]).unwrap_err();
    assert!(error.to_string().contains("delta"), "{error}");

    assert_eq!(run(matrix(2, 4), ones).unwrap()[0].shape().dims(), [2, 3]);
    session.run(&[], &[(a, matrix(4, 0)), (b, matrix(0, 3))], &[update]).unwrap();
    assert_eq!(session.fetch(read).unwrap(), matrix(4, 3));
}
