//! Branches and loops through a session: their values, and their gradients against finite differences.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::time::Duration;

use kolo_core::{Code, DType, Error, PartialShape, Result, Tensor};
use kolo_graph::wire::graph::{ExportOptions, ImportOptions, export, import, read_graph};
use kolo_graph::{Graph, Initializer, Output, WhileOptions, gradients};
use kolo_ops::CancelToken;
use kolo_ops::flow::tensor_array::TensorArray;
use kolo_runtime::{RunOptions, Session, SessionConfig};

fn less<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a.graph().op("Less").input(a).input(b).out()
}

fn matmul<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a.graph().op("MatMul").input(a).input(b).out()
}

fn tanh(x: Output<'_>) -> Output<'_> {
    x.graph().op("Tanh").input(x).out()
}

fn named(name: &str) -> WhileOptions {
    WhileOptions { name: name.to_owned(), ..WhileOptions::default() }
}

/// Runs `body(i, vars)` for i from 0 to n − 1.
fn repeat<'g>(
    n: Output<'g>,
    init: &[Output<'g>],
    body: impl FnOnce(Output<'g>, &[Output<'g>]) -> Vec<Output<'g>>,
) -> Vec<Output<'g>> {
    let g = n.graph();
    let mut all = vec![g.constant(0i32)];
    all.extend(init);
    let cond = |_: &'g Graph, v: &[Output<'g>]| less(v[0], n);
    let step = |_: &'g Graph, v: &[Output<'g>]| {
        let mut next = body(v[0], &v[1..]);
        next.insert(0, v[0] + 1i32);
        next
    };
    g.while_loop(&all, cond, step, WhileOptions::default()).unwrap().split_off(1)
}

fn matrix(rows: usize, columns: usize, seed: f64) -> Tensor {
    let values = (0..rows * columns).map(|i| (i as f64 * 1.3 + seed).sin() * 0.7).collect();
    Tensor::from_vec([rows, columns], values).unwrap()
}

fn doubles(tensor: &Tensor) -> Vec<f64> {
    tensor.data::<f64>().unwrap().to_vec()
}

/// The gradients of the sum of `f` at `inputs` agree with finite differences, and are returned. Once with the graph as it
/// was described, once as it comes back from a GraphDef, which says nothing of loops but their nodes.
#[track_caller]
fn check_gradient(inputs: &[Tensor], f: impl for<'g> Fn(&'g Graph, &[Output<'g>]) -> Output<'g>) -> Vec<Vec<f64>> {
    let described = kolo_ops::graph();
    let xs: Vec<Output<'_>> = inputs
        .iter()
        .enumerate()
        .map(|(i, x)| {
            let shape = PartialShape::from(x.shape());
            described.placeholder_of(&format!("x{i}"), DType::F64, shape.dims().unwrap())
        })
        .collect();
    let y = f(&described, &xs);
    described.check().unwrap();
    let imported = kolo_ops::graph();
    let def = export(&described.snapshot(), ExportOptions::default()).unwrap();
    import(&imported, &def, ImportOptions::default()).unwrap();
    let find = |at: Output<'_>| imported.nodes().endpoint(&at.name()).unwrap();
    let found: Vec<Output<'_>> = xs.iter().map(|&x| Output::new(&imported, find(x))).collect();
    agrees_with_differences(Output::new(&imported, find(y)), &found, inputs);
    agrees_with_differences(y, &xs, inputs)
}

#[track_caller]
fn agrees_with_differences(y: Output<'_>, xs: &[Output<'_>], inputs: &[Tensor]) -> Vec<Vec<f64>> {
    let g = y.graph();
    let grads = gradients(&[y], xs).unwrap_or_else(|error| panic!("{error}\n{}", g.snapshot()));
    let grads: Vec<Output<'_>> = grads.into_iter().map(|grad| grad.expect("a path").dense().unwrap()).collect();
    let session = Session::new(g).unwrap();
    let run = |fetches: &[Output<'_>], inputs: &[Tensor]| -> Vec<Tensor> {
        let feeds: Vec<_> = xs.iter().copied().zip(inputs.iter().cloned()).collect();
        session.run(fetches, &feeds, &[]).unwrap_or_else(|error| panic!("{error}\n{}", g.snapshot()))
    };
    let found: Vec<Vec<f64>> = run(&grads, inputs).iter().map(doubles).collect();
    for (i, input) in inputs.iter().enumerate() {
        assert_eq!(found[i].len(), input.n_elements());
        for element in 0..input.n_elements() {
            let at = |delta: f64| -> f64 {
                let mut moved = inputs.to_vec();
                let mut values = doubles(input);
                values[element] += delta;
                moved[i] = Tensor::from_vec(input.shape().clone(), values).unwrap();
                doubles(&run(&[y], &moved)[0]).iter().sum()
            };
            const STEP: f64 = 1e-5;
            let expected = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let got = found[i][element];
            assert!(
                (got - expected).abs() <= 1e-5 * (1.0 + expected.abs()),
                "input {i} element {element}: {got}, finite difference {expected}"
            );
        }
    }
    found
}

#[test]
fn a_loop_runs_until_its_condition_fails() {
    for parallel_iterations in [1, 2, 10] {
        let g = kolo_ops::graph();
        let options = WhileOptions { parallel_iterations, ..WhileOptions::default() };
        let step = g.placeholder::<i32>("step", PartialShape::scalar());
        let init = [g.constant(0i32), g.constant(1i64)];
        let out = g
            .while_loop(&init, |g, v| less(v[0], g.constant(100i32)), |_, v| vec![v[0] + step, v[1] * 2], options)
            .unwrap();
        let session = Session::new(&g).unwrap();
        let run = |n: i32| session.run(&out, &[(step, Tensor::scalar(n))], &[]).unwrap();
        assert_eq!(run(7), [Tensor::scalar(105i32), Tensor::scalar(1i64 << 15)]);
        assert_eq!(run(100), [Tensor::scalar(100i32), Tensor::scalar(2i64)]);
    }
}

#[test]
fn a_loop_that_never_runs_gives_what_went_in() {
    let g = kolo_ops::graph();
    let n = g.placeholder::<i32>("n", PartialShape::scalar());
    let out = repeat(n, &[g.constant(5.0f64)], |_, v| vec![v[0] * 3.0]);
    let session = Session::new(&g).unwrap();
    let run = |times: i32| session.run(&out, &[(n, Tensor::scalar(times))], &[]).unwrap();
    assert_eq!(run(0), [Tensor::scalar(5.0f64)]);
    assert_eq!(run(2), [Tensor::scalar(45.0f64)]);
}

#[test]
fn maximum_iterations_ends_a_loop() {
    let g = kolo_ops::graph();
    let options = WhileOptions { maximum_iterations: Some(3), ..WhileOptions::default() };
    let out = g.while_loop(&[g.constant(1i32)], |g, _| g.constant(true), |_, v| vec![v[0] * 2], options).unwrap();
    assert_eq!(Session::new(&g).unwrap().fetch(out[0]).unwrap(), Tensor::scalar(8i32));
}

#[test]
fn loops_nest() {
    let g = kolo_ops::graph();
    let n = g.constant(4i32);
    let scale = g.placeholder::<f64>("scale", PartialShape::scalar());
    // sum over i < 4 of sum over j <= i of scale·(10·i + j)
    let out = repeat(n, &[g.constant(0f64)], |i, v| {
        let outer = g.op("Cast").input(i).attr("DstT", DType::F64).out();
        repeat(i + 1, &[v[0]], |j, v| {
            let inner = g.op("Cast").input(j).attr("DstT", DType::F64).out();
            vec![v[0] + scale * (outer * 10.0 + inner)]
        })
    });
    let session = Session::new(&g).unwrap();
    let value = session.run(&out, &[(scale, Tensor::scalar(2f64))], &[]).unwrap();
    // 0, 10 + 11, 20 + 21 + 22, 30 + 31 + 32 + 33
    assert_eq!(value, [Tensor::scalar(2.0 * (21.0 + 63.0 + 126.0))]);
}

#[test]
fn only_the_branch_that_is_taken_runs() {
    let g = kolo_ops::graph();
    let pred = g.placeholder::<bool>("pred", PartialShape::scalar());
    let x = g.placeholder::<f32>("x", [2usize]);
    let counts = ["on_true", "on_false"].map(|name| g.new_variable(name, Initializer::Zeros).shape([]).build());
    let count = |i: usize| {
        let one = g.constant(1.0f32);
        counts[i].assign_add(one)
    };
    let out = g
        .cond(
            pred,
            || {
                let done = count(0);
                vec![g.control_dependencies(&[done], || x * 2.0)]
            },
            || {
                let done = count(1);
                vec![g.control_dependencies(&[done], || x - 1.0)]
            },
        )
        .unwrap();
    let init = g.global_variables_initializer();
    let session = Session::new(&g).unwrap();
    session.run_op(init).unwrap();
    let run = |taken: bool| {
        let feeds = [(pred, Tensor::scalar(taken)), (x, [3.0f32, 4.0].into())];
        session.run(&out, &feeds, &[]).unwrap()
    };
    assert_eq!(run(true), [[6.0f32, 8.0].into()]);
    assert_eq!(run(true), [[6.0f32, 8.0].into()]);
    assert_eq!(run(false), [[2.0f32, 3.0].into()]);
    let ran = counts.map(|count| session.fetch(count.read()).unwrap());
    assert_eq!(ran, [Tensor::scalar(2.0f32), Tensor::scalar(1.0f32)]);
}

#[test]
fn a_branch_may_give_what_it_did_not_make_and_constants() {
    let g = kolo_ops::graph();
    let pred = g.placeholder::<bool>("pred", PartialShape::scalar());
    let x = g.placeholder::<f32>("x", PartialShape::scalar());
    let out = g.cond(pred, || vec![x, g.constant(1i32)], || vec![g.constant(7.0f32), g.constant(0i32)]).unwrap();
    let session = Session::new(&g).unwrap();
    let run =
        |taken: bool| session.run(&out, &[(pred, Tensor::scalar(taken)), (x, Tensor::scalar(3.0f32))], &[]).unwrap();
    assert_eq!(run(true), [Tensor::scalar(3.0f32), Tensor::scalar(1i32)]);
    assert_eq!(run(false), [Tensor::scalar(7.0f32), Tensor::scalar(0i32)]);
}

#[test]
fn branches_nest_and_stand_in_loops() {
    let g = kolo_ops::graph();
    let limit = g.placeholder::<i32>("limit", PartialShape::scalar());
    // Collatz: how many steps until 1.
    let start = g.placeholder::<i32>("start", PartialShape::scalar());
    let out = g
        .while_loop(
            &[start, g.constant(0i32)],
            |g, v| less(g.constant(1i32), v[0]),
            |g, v| {
                let half = g.op("FloorDiv").input(v[0]).input(g.constant(2i32)).out();
                let odd = g.op("NotEqual").input(half * 2).input(v[0]).out();
                let next = g
                    .cond(
                        odd,
                        || {
                            let small = less(v[0], limit);
                            g.cond(small, || vec![v[0] * 3 + 1], || vec![g.constant(1i32)]).unwrap()
                        },
                        || vec![half],
                    )
                    .unwrap();
                vec![next[0], v[1] + 1]
            },
            named("collatz"),
        )
        .unwrap();
    let session = Session::new(&g).unwrap();
    let run = |from: i32, limit_at: i32| {
        session.run(&out[1..], &[(start, Tensor::scalar(from)), (limit, Tensor::scalar(limit_at))], &[]).unwrap()
    };
    assert_eq!(run(6, 1000), [Tensor::scalar(8i32)]);
    assert_eq!(run(27, 100_000), [Tensor::scalar(111i32)]);
    assert_eq!(run(7, 5), [Tensor::scalar(1i32)]);
}

#[test]
fn variables_made_in_a_body_are_initialised_outside() {
    let g = kolo_ops::graph();
    let out = repeat(g.constant(3i32), &[g.constant([1.0f32])], |_, v| {
        let w = g.get_variable("w", [1usize], Initializer::Constant(2.0));
        vec![v[0] * w.read()]
    });
    let init = g.global_variables_initializer();
    let session = Session::new(&g).unwrap();
    session.run_op(init).unwrap();
    assert_eq!(session.fetch(out[0]).unwrap(), [8.0f32].into());
}

#[test]
fn control_dependencies_reach_into_loops_and_cross_their_border() {
    let g = kolo_ops::graph();
    let v = g.new_variable("v", Initializer::Zeros).shape([]).build();
    let init = g.global_variables_initializer();
    let before = v.assign(g.constant(5.0f32));
    let after = g.control_dependencies(&[before], || {
        repeat(g.constant(2i32), &[g.constant(0.0f32)], |_, x| {
            vec![g.control_dependencies(&[before], || x[0] + v.read_now())]
        })
    });
    let session = Session::new(&g).unwrap();
    session.run_op(init).unwrap();
    assert_eq!(session.fetch(after[0]).unwrap(), Tensor::scalar(10.0f32));
}

#[test]
fn what_lives_in_a_loop_cannot_be_used_outside() {
    let g = kolo_ops::graph();
    let mut inner = None;
    repeat(g.constant(2i32), &[g.constant(1.0f32)], |_, v| {
        inner = Some(v[0] * 2.0);
        vec![v[0] * 2.0]
    });
    let _ = inner.unwrap() + 1.0;
    let error = g.check().unwrap_err();
    assert!(error.message().contains("is in a while loop"), "{error}");
}

#[test]
fn a_variable_that_changes_shape_needs_an_invariant() {
    let g = kolo_ops::graph();
    let grow = |options: WhileOptions| {
        g.while_loop(
            &[g.constant(0i32), g.constant([1.0f32])],
            |g, v| less(v[0], g.constant(3i32)),
            |g, v| vec![v[0] + 1, g.op("ConcatV2").inputs([v[1], v[1], g.constant(0i32)]).out()],
            options,
        )
    };
    let error = grow(WhileOptions::default()).unwrap_err();
    assert!(error.message().contains("is not an invariant for the loop"), "{error}");
    let shape_invariants = vec![None, Some(PartialShape::of_rank(1))];
    let out = grow(WhileOptions { shape_invariants, ..WhileOptions::default() }).unwrap();
    assert_eq!(Session::new(&g).unwrap().fetch(out[1]).unwrap(), [1.0f32; 8].into());
}

#[test]
fn gradient_of_a_power() {
    let found = check_gradient(&[Tensor::scalar(1.7f64)], |g, x| {
        repeat(g.constant(5i32), &[g.constant(1.0f64)], |_, v| vec![v[0] * x[0]])[0]
    });
    assert!((found[0][0] - 5.0 * 1.7f64.powi(4)).abs() < 1e-9, "{found:?}");
}

#[test]
fn gradient_when_the_loop_never_runs() {
    let found = check_gradient(&[Tensor::scalar(1.7f64), Tensor::scalar(2.0f64)], |g, x| {
        repeat(g.constant(0i32), &[x[0]], |_, v| vec![v[0] * x[1]])[0]
    });
    assert_eq!(found, [[1.0], [0.0]]);
}

#[test]
fn gradient_of_a_loop_variable_squared_again_and_again() {
    let found = check_gradient(&[Tensor::scalar(1.1f64)], |g, x| {
        repeat(g.constant(3i32), &[x[0]], |_, v| vec![v[0] * v[0]])[0]
    });
    assert!((found[0][0] - 8.0 * 1.1f64.powi(7)).abs() < 1e-9, "{found:?}");
}

#[test]
fn gradient_of_a_matrix_power() {
    check_gradient(&[matrix(3, 3, 0.4), matrix(2, 3, 1.0)], |g, x| {
        repeat(g.constant(4i32), &[x[1]], |_, v| vec![matmul(v[0], x[0])])[0]
    });
}

#[test]
fn gradient_with_any_number_of_parallel_iterations() {
    for parallel_iterations in [1, 3, 32] {
        check_gradient(&[matrix(2, 2, 0.4), matrix(2, 2, 1.0)], |g, x| {
            let options = WhileOptions { parallel_iterations, ..WhileOptions::default() };
            let init = [g.constant(0i32), x[1], x[0]];
            g.while_loop(
                &init,
                |g, v| less(v[0], g.constant(12i32)),
                |_, v| vec![v[0] + 1, tanh(matmul(v[1], x[0])), v[2] * 0.5 + v[1]],
                options,
            )
            .unwrap()[2]
        });
    }
}

#[test]
fn gradient_of_a_recurrent_net_with_broadcast_bias() {
    check_gradient(&[matrix(2, 3, 0.1), matrix(3, 3, 0.7), matrix(1, 3, 2.0)], |g, x| {
        let out = repeat(g.constant(4i32), &[x[0], g.constant(0.0f64)], |_, v| {
            let h = tanh(matmul(v[0], x[1]) + x[2]);
            let axes = g.constant([0i32, 1]);
            let total = g.op("Sum").input(h * h).input(axes).out();
            vec![h, v[1] + total]
        });
        out[1]
    });
}

#[test]
fn gradient_of_a_branch() {
    for taken in [true, false] {
        let found = check_gradient(&[Tensor::from([1.0f64, 2.0]), Tensor::from([3.0f64, 5.0])], |g, x| {
            let pred = g.constant(taken);
            g.cond(pred, || vec![x[0] * x[1] * x[1]], || vec![x[0] * 3.0]).unwrap()[0]
        });
        let expected = match taken {
            true => [[9.0, 25.0], [6.0, 20.0]],
            false => [[3.0, 3.0], [0.0, 0.0]],
        };
        assert_eq!(found, expected);
    }
}

#[test]
fn gradient_of_nested_branches_with_an_input_used_inside_and_outside() {
    for (outer, inner) in [(true, true), (true, false), (false, true), (false, false)] {
        check_gradient(&[Tensor::scalar(1.5f64), Tensor::scalar(-0.5f64)], |g, x| {
            let out = g.cond(
                g.constant(outer),
                || {
                    let y = x[0] * x[0];
                    g.cond(g.constant(inner), || vec![y * x[1]], || vec![y + x[1] * x[1]]).unwrap()
                },
                || vec![x[1]],
            );
            out.unwrap()[0] * x[0] + x[1]
        });
    }
}

#[test]
fn gradient_of_a_branch_inside_a_loop() {
    check_gradient(&[Tensor::from([0.9f64, 1.2]), Tensor::from([1.1f64, 0.7])], |g, x| {
        let out = repeat(g.constant(7i32), &[x[0]], |i, v| {
            let half = g.op("FloorDiv").input(i).input(g.constant(2i32)).out();
            let odd = g.op("NotEqual").input(half * 2).input(i).out();
            let y = v[0] * 0.9;
            g.cond(odd, || vec![tanh(v[0]) * x[1] * y], || vec![v[0] * v[0] + x[1]]).unwrap()
        });
        out[0]
    });
}

#[test]
fn gradient_of_nested_branches_inside_a_loop() {
    check_gradient(&[Tensor::scalar(0.9f64), Tensor::scalar(1.1f64)], |g, x| {
        let out = repeat(g.constant(9i32), &[x[0]], |i, v| {
            let rest = g.op("FloorMod").input(i).input(g.constant(3i32)).out();
            let is = |n: i32| g.op("Equal").input(rest).input(g.constant(n)).out();
            g.cond(
                is(0),
                || vec![tanh(v[0] * x[1])],
                || {
                    let y = v[0] * v[0] * 0.5;
                    g.cond(is(1), || vec![y * x[1] + v[0]], || vec![tanh(y)]).unwrap()
                },
            )
            .unwrap()
        });
        out[0]
    });
}

#[test]
fn gradient_of_a_loop_inside_a_branch() {
    for taken in [true, false] {
        check_gradient(&[Tensor::scalar(1.3f64), Tensor::scalar(0.8f64)], |g, x| {
            let out = g.cond(
                g.constant(taken),
                || repeat(g.constant(3i32), &[x[0]], |_, v| vec![v[0] * v[0] * x[1]]),
                || vec![x[1] * x[0]],
            );
            out.unwrap()[0]
        });
    }
}

#[test]
fn gradient_of_a_loop_inside_a_loop() {
    check_gradient(&[Tensor::scalar(1.05f64), Tensor::scalar(0.9f64)], |g, x| {
        repeat(g.constant(3i32), &[x[0]], |i, v| {
            let y = v[0] * x[1];
            let inner = repeat(i + 1, &[y], |_, w| vec![tanh(w[0] * v[0]) + x[1] * w[0]]);
            vec![inner[0] * v[0]]
        })[0]
    });
}

#[test]
fn gradient_of_a_loop_in_a_branch_in_a_loop() {
    check_gradient(&[Tensor::scalar(1.05f64), Tensor::scalar(0.9f64)], |g, x| {
        repeat(g.constant(4i32), &[x[0]], |i, v| {
            let half = g.op("FloorDiv").input(i).input(g.constant(2i32)).out();
            let odd = g.op("NotEqual").input(half * 2).input(i).out();
            g.cond(odd, || repeat(i, &[v[0]], |_, w| vec![tanh(w[0] * v[0]) * x[1]]), || vec![v[0] * x[1] + 0.5])
                .unwrap()
        })[0]
    });
}

#[test]
fn gradient_of_three_loops_in_each_other() {
    check_gradient(&[Tensor::scalar(0.9f64), Tensor::scalar(0.8f64)], |g, x| {
        repeat(g.constant(2i32), &[x[0]], |i, u| {
            repeat(i + 2, &[u[0]], |j, v| repeat(j + 1, &[v[0]], |_, w| vec![tanh(w[0] * v[0] + x[1] * u[0])]))
        })[0]
    });
}

#[test]
fn gradient_of_a_variable_whose_shape_changes() {
    check_gradient(&[Tensor::from([0.4f64, 0.9])], |g, x| {
        let shape_invariants = vec![None, Some(PartialShape::of_rank(1))];
        let options = WhileOptions { shape_invariants, ..WhileOptions::default() };
        g.while_loop(
            &[g.constant(0i32), x[0]],
            |g, v| less(v[0], g.constant(3i32)),
            |g, v| vec![v[0] + 1, g.op("ConcatV2").inputs([v[1] * v[1], v[1], g.constant(0i32)]).out()],
            options,
        )
        .unwrap()[1]
    });
}

#[test]
fn gradient_of_a_recurrent_net_over_tensor_arrays() {
    let x = Tensor::from_vec([4, 2, 3], (0..24).map(|i| (f64::from(i) * 0.37).cos()).collect()).unwrap();
    check_gradient(&[x, matrix(3, 3, 0.3), matrix(3, 3, 0.9)], |g, x| {
        let n = g.constant(4i32);
        let inputs = TensorArray::new(g, DType::F64, n, [2usize, 3]).unstack(x[0]);
        let outputs = TensorArray::new(g, DType::F64, n, [2usize, 3]);
        let h = g.constant(Tensor::zeros(DType::F64, [2, 3]).unwrap());
        let last = repeat(n, &[h, outputs.flow()], |i, v| {
            let h = tanh(matmul(inputs.read(i), x[1]) + matmul(v[0], x[2]));
            vec![h, outputs.with_flow(v[1]).write(i, h).flow()]
        });
        outputs.with_flow(last[1]).stack()
    });
}

#[test]
fn gradient_with_respect_to_variables() {
    for kind in [kolo_graph::VariableKind::Resource, kolo_graph::VariableKind::Reference] {
        let g = kolo_ops::graph();
        let w = g.new_variable("w", Initializer::Value(Tensor::from([2.0f64, 3.0]))).kind(kind).build();
        let out = repeat(g.constant(3i32), &[g.constant([1.0f64, 1.0])], |_, v| vec![v[0] * w.read_now()]);
        let grad = gradients(&out, &[w.handle()]).unwrap()[0].unwrap().dense().unwrap();
        let pred = g.placeholder::<bool>("pred", PartialShape::scalar());
        let out = g.cond(pred, || vec![w.read_now() * 5.0], || vec![g.constant([0.0f64, 0.0])]).unwrap();
        let in_branch = gradients(&out, &[w.handle()]).unwrap()[0].unwrap().dense().unwrap();
        let init = g.global_variables_initializer();
        let session = Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        assert_eq!(session.fetch(grad).unwrap(), [12.0f64, 27.0].into());
        let run = |taken: bool| session.run(&[in_branch], &[(pred, Tensor::scalar(taken))], &[]).unwrap();
        assert_eq!(run(true), [[5.0f64, 5.0].into()]);
        assert_eq!(run(false), [[0.0f64, 0.0].into()]);
    }
}

#[test]
fn there_is_no_gradient_without_a_path() {
    let g = kolo_ops::graph();
    let [x, y] = ["x", "y"].map(|name| g.placeholder::<f64>(name, PartialShape::scalar()));
    let out = repeat(g.constant(3i32), &[x, y], |_, v| vec![v[0] * 2.0, v[1] * 3.0]);
    let grads = gradients(&[out[0]], &[x, y]).unwrap();
    assert!(grads[0].is_some() && grads[1].is_none());
}

#[test]
fn gradients_are_taken_twice_and_inside_a_body() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f64>("x", PartialShape::scalar());
    let y = repeat(g.constant(3i32), &[x], |_, v| vec![v[0] * x])[0];
    let twice = [y, y * 2.0].map(|y| gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap());
    // Newton's method for the square root of x: the gradient is taken in every iteration, once through an inner loop.
    let root = repeat(g.constant(20i32), &[g.constant(1.0f64)], |_, v| {
        let power = repeat(g.constant(2i32), &[g.constant(1.0f64)], |_, w| vec![w[0] * v[0]])[0];
        let f = power - x;
        let slope = gradients(&[f], &[v[0]]).unwrap()[0].unwrap().dense().unwrap();
        vec![v[0] - f / slope]
    });
    let session = Session::new(&g).unwrap();
    let fetches = [twice[0], twice[1], root[0]];
    let values = session.run(&fetches, &[(x, Tensor::scalar(2.0f64))], &[]).unwrap();
    assert_eq!(values[..2], [Tensor::scalar(32.0f64), Tensor::scalar(64.0f64)]);
    assert!((doubles(&values[2])[0] - 2f64.sqrt()).abs() < 1e-12);
}

/// Imported graphs may bring along what no run needs.
#[test]
fn a_malformed_loop_matters_only_to_what_depends_on_it() {
    let g = kolo_ops::graph();
    let x = g.constant(2.0f32);
    let stray = g.op("Exit").name("stray").input(x * 3.0).out();
    let y = repeat(g.constant(3i32), &[g.constant(1.0f32)], |_, v| vec![v[0] * x])[0];
    let dx = gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
    let session = Session::new(&g).unwrap();
    assert_eq!(session.fetch(dx).unwrap().scalar_value::<f32>().unwrap(), 12.0);
    let error = gradients(&[stray * y], &[x]).err().unwrap();
    assert!(error.message().contains("Exit 'stray'") && error.message().contains("is not inside of a loop"), "{error}");
}

#[test]
fn second_order_gradients_through_loops_are_refused() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f64>("x", PartialShape::scalar());
    let y = repeat(g.constant(3i32), &[x], |_, v| vec![v[0] * v[0]])[0];
    let first = gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
    let error = gradients(&[first], &[x]).err().expect("refused");
    assert!(error.message().contains("second-order gradients through while loops"), "{error}");
}

/// Two loops in each other and a branch, as TensorFlow 2.21 wrote them with `disable_control_flow_v2`:
///
/// ```text
/// def body(i, h):
///     _, u = while_loop(lambda j, u: j < i + 1, lambda j, u: (j + 1, tanh(matmul(u, w) + h * 0.5)), [constant(0), h])
///     return i + 1, cond(equal(floormod(i, 2), 0), lambda: u * w + h, lambda: tanh(u) * h)
/// _, h = while_loop(lambda i, h: i < 4, body, [constant(0), x])
/// y = reduce_sum(h * h)
/// ```
#[test]
fn gradient_of_a_graph_from_tensorflow() {
    let g = kolo_ops::graph();
    let def = read_graph(include_bytes!("data/while_cond.pb")).unwrap();
    import(&g, &def, ImportOptions::default()).unwrap();
    let [x, w, y] = ["x", "w", "y"].map(|name| g.operation(name).unwrap().output(0));
    let grads = gradients(&[y], &[x, w]).unwrap();
    let fetches = [y, grads[0].unwrap().dense().unwrap(), grads[1].unwrap().dense().unwrap()];
    let square = |values: [f64; 4]| Tensor::from_vec([2, 2], values.to_vec()).unwrap();
    let feeds = [(x, square([0.3, -0.2, 0.5, 0.9])), (w, square([0.7, 0.1, -0.4, 0.6]))];
    let found = Session::new(&g).unwrap().run(&fetches, &feeds, &[]).unwrap();
    // What TensorFlow's own session gives.
    let expected: [&[f64]; 3] = [
        &[0.9176873854561441],
        &[1.12886273, -0.09060865, 0.08503382, 1.84698991],
        &[1.16392212, -0.69293774, 0.10669494, 3.77439205],
    ];
    for (found, expected) in found.iter().zip(expected) {
        for (found, expected) in doubles(found).iter().zip(expected) {
            assert!((found - expected).abs() < 1e-8, "{found} {expected}");
        }
    }
}

/// As TensorFlow 1 writes `tf.while_loop(lambda i: i < 4, body, [0])` whose body runs `tf.assign(v, tf.square(v))` for a
/// reference variable: the read is outside of the loop, and shares the variable's memory.
#[test]
fn a_loop_that_assigns_a_reference_variable_reads_what_it_assigned() {
    let node = |name: &str, op: &str, inputs: &str, attrs: &str| {
        let inputs: String = inputs.split_whitespace().map(|input| format!("input: '{input}' ")).collect();
        format!("node {{ name: '{name}' op: '{op}' {inputs} {attrs} }}\n")
    };
    let ty = |name: &str, ty: &str| format!("attr {{ key: '{name}' value {{ type: {ty} }} }} ");
    let (t, i) = (ty("T", "DT_FLOAT"), ty("T", "DT_INT32"));
    let number = |n: i32| {
        let value = format!("tensor {{ dtype: DT_INT32 tensor_shape {{ }} int_val: {n} }}");
        format!("{} attr {{ key: 'value' value {{ {value} }} }} ", ty("dtype", "DT_INT32"))
    };
    let enter = |constant: bool| {
        format!(
            "attr {{ key: 'frame_name' value {{ s: 'f' }} }} attr {{ key: 'is_constant' value {{ b: {constant} }} }} "
        )
    };
    let shape = "attr { key: 'shape' value { shape { } } } ";
    let two = "attr { key: 'value' value { tensor { dtype: DT_FLOAT tensor_shape { } float_val: 2 } } } ";
    let text = [
        node("two", "Const", "", &format!("{}{two}", ty("dtype", "DT_FLOAT"))),
        node("v", "VariableV2", "", &format!("{}{shape}", ty("dtype", "DT_FLOAT"))),
        node("init", "Assign", "v two", &t),
        node("v/read", "Identity", "v", &t),
        node("zero", "Const", "", &number(0)),
        node("enter", "Enter", "zero", &format!("{i}{}", enter(false))),
        node("merge", "Merge", "enter next", &format!("{i} attr {{ key: 'N' value {{ i: 2 }} }}")),
        node("four", "Const", "^merge", &number(4)),
        node("less", "Less", "merge four", &i),
        node("cond", "LoopCond", "less", ""),
        node("switch", "Switch", "merge cond", &i),
        node("i", "Identity", "switch:1", &i),
        node("read", "Enter", "v/read", &format!("{t}{}", enter(true))),
        node("square", "Square", "read ^i", &t),
        node("place", "RefEnter", "v", &format!("{t}{}", enter(true))),
        node("assign", "Assign", "place square", &t),
        node("one", "Const", "^assign", &number(1)),
        node("add", "Add", "i one", &i),
        node("next", "NextIteration", "add", &i),
        node("exit", "Exit", "switch", &i),
    ];
    let g = kolo_ops::graph();
    import(&g, &read_graph(text.concat().as_bytes()).unwrap(), ImportOptions::default()).unwrap();
    let session = Session::new(&g).unwrap();
    session.run_named(&[], &[], &["init"]).unwrap();
    assert_eq!(session.run_named(&["exit"], &[], &[]).unwrap(), [Tensor::scalar(4i32)]);
    assert_eq!(session.run_named(&["v"], &[], &[]).unwrap(), [Tensor::scalar(65536.0f32)]);
}

/// Runs a graph with functions that TensorFlow 2.21 wrote, with `x` fed.
fn of_tensorflow(def: &[u8], x: f32, fetches: &[&str]) -> Result<Vec<f32>> {
    let g = kolo_ops::graph();
    import(&g, &read_graph(def)?, ImportOptions::default())?;
    let found = Session::new(&g)?.run_named(fetches, &[("x", Tensor::scalar(x))], &[])?;
    found.iter().map(Tensor::scalar_value::<f32>).collect()
}

/// ```text
/// @Defun(tf.float32)
/// def checked(x):
///     with tf.control_dependencies([tf.Assert(x <= 10., [x])]):
///         return x * 2.
///
/// y = checked(x)
/// branch = tf.cond(x > 0., lambda: checked(x) + 1., lambda: x)
/// z = tf.while_loop(lambda v: v < 8., checked, [x])
/// ```
#[test]
fn an_assertion_in_a_function_passes_or_fails() {
    let def = include_bytes!("data/defun_assert.pb");
    assert_eq!(of_tensorflow(def, 1.0, &["y", "branch/Merge", "z"]).unwrap(), [2.0, 3.0, 8.0]);
    // The branch that is not taken asserts nothing.
    assert_eq!(of_tensorflow(def, -2.0, &["branch/Merge", "y"]).unwrap(), [-2.0, -4.0]);
    for fetch in ["y", "branch/Merge"] {
        let error = of_tensorflow(def, 11.0, &[fetch]).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.to_string().contains("assertion failed: [11]"), "{error}");
    }
    assert_eq!(of_tensorflow(def, 9.0, &["z"]).unwrap(), [9.0]);
}

/// `y = tf.while_loop(lambda v: v < 5., f, [x])`, and the same with a branch in the body, where `f` has a constant.
#[test]
fn a_loop_calls_a_function_with_a_constant() {
    let def = include_bytes!("data/loop_calls_function.pb");
    assert_eq!(of_tensorflow(def, 0.0, &["y", "z"]).unwrap(), [5.0, 5.0]);
    assert_eq!(of_tensorflow(def, 7.0, &["y", "z"]).unwrap(), [7.0, 7.0]);
}

/// ```text
/// @Defun(tf.float32)
/// def cube(x): return x * x * x
///
/// @Defun(tf.float32, tf.float32)
/// def two(x, y): return x * y + cube(x), tf.stop_gradient(y) * y * x
///
/// y = cube(x)
/// dx = tf.gradients(y, x)
/// g0, g1 = tf.gradients(two(x, y), [x, y])
/// ```
#[test]
fn gradients_of_a_function_are_derived() {
    let def = include_bytes!("data/defun_gradient.pb");
    assert_eq!(of_tensorflow(def, 3.0, &["y", "dx"]).unwrap(), [27.0, 27.0]);
    // y is 8 and has the gradient x + y x = 18; x has y + 3 x² + y² = 84 by itself, and 3 x² times 18 by y.
    assert_eq!(of_tensorflow(def, 2.0, &["g0", "g1"]).unwrap(), [300.0, 18.0]);
}

/// With control flow v2, as TensorFlow 2.21 wrote it: `v` and `w` are resource variables of 1, `r` is a reference variable.
///
/// ```text
/// def taken():
///     w.assign(7.)
///     return v.assign(5.), w.assign(6.)
///
/// a, b = tf.cond(p, taken, lambda: (tf.constant(0.), tf.constant(0.)))
/// n = tf.while_loop(lambda i: i < 3, lambda i: (v.assign_add(10.), i + 1)[1], [0])
/// read = tf.cond(p, lambda: r + 1., lambda: tf.constant(3.))
/// ```
fn branch_effects() -> Session {
    let g = kolo_ops::graph();
    let def = read_graph(include_bytes!("data/branch_effects.pb")).unwrap();
    import(&g, &def, ImportOptions::default()).unwrap();
    Session::new(&g).unwrap()
}

#[test]
fn what_a_branch_computes_for_outputs_that_are_not_fetched_does_not_run() {
    let session = branch_effects();
    let check = |fetches: &[&str], p: bool, expected: [f32; 2]| {
        session.run_named(&[], &[], &["init"]).unwrap();
        session.run_named(fetches, &[("p", Tensor::scalar(p))], &[]).unwrap();
        let now = session.run_named(&["v_now", "w_now"], &[], &[]).unwrap();
        assert_eq!(now, expected.map(Tensor::scalar), "{fetches:?} {p}");
    };
    check(&["a"], true, [5.0, 1.0]);
    check(&["b"], true, [1.0, 6.0]);
    check(&["a", "b"], true, [5.0, 6.0]);
    check(&["a", "b"], false, [1.0, 1.0]);
    // The body of a loop may not need its own assignments either.
    check(&["n"], true, [1.0, 1.0]);
    // All of the branch's outputs are those of its own node.
    check(&["branch"], true, [5.0, 6.0]);
}

#[test]
fn a_variable_that_only_the_branch_not_taken_reads_need_not_be_initialised() {
    let session = branch_effects();
    let read = |p: bool| session.run_named(&["read"], &[("p", Tensor::scalar(p))], &[]);
    assert_eq!(read(false).unwrap(), [Tensor::scalar(3.0f32)]);
    let error = read(true).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(error.to_string().contains("uninitialized value r"), "{error}");
    // Whoever wants the value itself is told.
    assert_eq!(session.run_named(&["r/read"], &[], &[]).unwrap_err().code(), Code::FailedPrecondition);
    session.run_named(&[], &[], &["init_r"]).unwrap();
    assert_eq!(read(true).unwrap(), [Tensor::scalar(2.0f32)]);
}

#[test]
fn a_loop_and_its_gradient_may_span_devices() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f64>("x", PartialShape::scalar());
    let y = repeat(g.constant(4i32), &[x], |_, v| {
        let there = g.device("/cpu:1", || tanh(v[0] * x));
        vec![there + v[0]]
    })[0];
    let grad = gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
    let run = |n_devices: usize| {
        let device_count = [("CPU".to_owned(), n_devices)].into();
        let config = SessionConfig { device_count, allow_soft_placement: true, ..SessionConfig::default() };
        let session = Session::with_config(&g, config).unwrap();
        session.run(&[y, grad], &[(x, Tensor::scalar(0.6f64))], &[]).unwrap()
    };
    assert_eq!(run(2), run(1));
}

/// The caller's own thread runs the loop: it looks at the deadline itself, and needs no other to be cancelled.
#[test]
fn a_loop_that_does_not_end_ends_by_its_deadline_and_by_cancellation() {
    let g = kolo_ops::graph();
    fn endless(g: &Graph) -> Output<'_> {
        g.while_loop(&[g.constant(0i32)], |g, _| g.constant(true), |_, v| vec![v[0] + 1i32], named("endless")).unwrap()
            [0]
    }
    let count = endless(&g).name();
    let session = Session::new(&g).unwrap();
    let options = RunOptions { timeout: Some(Duration::from_millis(50)), ..RunOptions::default() };
    let error = session.run_named_with(&options, &[&count], &[], &[]).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");

    let cancel = CancelToken::new();
    let options = RunOptions { cancel: Some(cancel.clone()), ..RunOptions::default() };
    std::thread::scope(|scope| {
        let run = scope.spawn(|| session.run_named_with(&options, &[&count], &[], &[]).map(|_| ()));
        std::thread::sleep(Duration::from_millis(20));
        cancel.cancel(Error::cancelled("enough"));
        assert_eq!(run.join().unwrap().unwrap_err().message(), "enough");
    });
}
