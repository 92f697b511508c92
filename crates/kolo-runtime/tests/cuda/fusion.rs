//! Nodes that are fused for a GPU, against the same nodes one by one and on a CPU.

use super::*;

#[test]
fn fused_steps_learn_what_plain_ones_do() {
    on_gpu(|| {
        type Build<'a> = &'a dyn for<'g> Fn(&'g Graph) -> Model<'g>;
        let losses = |build: Build<'_>, width: usize, no_fusion: bool| -> Vec<f32> {
            let g = kolo_ops::graph();
            let model = build(&g);
            let session = Session::with_config(&g, config(GpuOptions { no_fusion, ..exact() })).unwrap();
            session.run_op(model.init).unwrap();
            // Few images and steps: the tools that look for races slow convolutions down a thousand times.
            let feeds = [(model.x, wavy(&[8, width], 5)), (model.y, labels(8, 10))];
            let options = RunOptions { trace: true, ..RunOptions::default() };
            let (_, metadata) = session.run_with(&options, &[model.loss], &feeds, &[model.train]).unwrap();
            let n_fused = metadata.trace.nodes.iter().filter(|node| node.op.starts_with("_Kolo")).count();
            assert_eq!(n_fused == 0, no_fusion);
            (0..6)
                .map(|_| session.run(&[model.loss], &feeds, &[model.train]).unwrap()[0].scalar_value::<f32>().unwrap())
                .collect()
        };
        let models: [(Build<'_>, usize, f32); 2] =
            [(&|g| mlp(g, &[21, 33, 18, 10], Source::Fed), 21, 1e-5), (&|g| lenet(g, Source::Fed), 784, 2e-3)];
        for (build, width, tolerance) in models {
            let (fused, plain) = (losses(build, width, false), losses(build, width, true));
            for (a, b) in fused.iter().zip(&plain) {
                assert!((a - b).abs() <= tolerance, "{fused:?} and {plain:?}");
            }
        }
    });
}

#[test]
fn fused_trees_compute_what_their_nodes_do() {
    on_gpu(|| {
        let cast = |x: Output<'static>, to: DType| x.graph().op("Cast").input(x).attr("DstT", to).out();
        let unary = |op: &str, x: Output<'static>| x.graph().op(op).input(x).out();
        let binary = |op: &str, x: Output<'static>, y: Output<'static>| x.graph().op(op).input(x).input(y).out();
        let values = |dtype: DType, shapes: &[&[usize]; 3], no_fusion: bool| -> Vec<Tensor> {
            // Kept for good: the closures above want graphs that do not end.
            let g: &'static Graph = Box::leak(Box::new(kolo_ops::graph()));
            let held: Vec<Output<'static>> = shapes
                .iter()
                .enumerate()
                .map(|(i, dims)| cast(g.variable(&format!("v{i}"), wavy(dims, i as u32 + 1)).read(), dtype))
                .collect();
            let (a, b, c) = (held[0], held[1], held[2]);
            let sum = unary("Tanh", a + b) * c;
            let less = binary("Less", sum, b);
            let chosen = g.op("SelectV2").input(less).input(sum).input(c * c).out();
            let leaky = g.op("LeakyRelu").input(a - c).attr("alpha", 0.25f32).out();
            let outputs = [
                unary("Sigmoid", sum) + unary("Abs", sum),
                cast(binary("Maximum", chosen, leaky), DType::F32),
                cast(cast(a * a + b, DType::F32) * cast(c, DType::F32), DType::F16),
                cast(unary("LogicalNot", less), DType::I64),
            ];
            let outputs: Vec<Output<'static>> = outputs.map(|x| cast(x, DType::F32)).to_vec();
            let init = g.global_variables_initializer();
            let session = Session::with_config(g, config(GpuOptions { no_fusion, ..exact() })).unwrap();
            session.run_op(init).unwrap();
            session.run(&outputs, &[], &[]).unwrap()
        };
        let shapes: [[&[usize]; 3]; 8] = [
            [&[1000], &[1000], &[1000]],
            [&[37, 64], &[64], &[37, 1]],
            [&[37, 63], &[63], &[1]],
            [&[5, 1, 7], &[3, 7], &[5, 3, 1]],
            [&[1], &[1], &[1]],
            [&[2, 0], &[1], &[2, 1]],
            [&[300, 700], &[700], &[300, 700]],
            [&[2, 3, 4, 5, 6], &[4, 1, 6], &[3, 1, 5, 1]],
        ];
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            for shapes in &shapes {
                let (fused, plain) = (values(dtype, shapes, false), values(dtype, shapes, true));
                for (i, (a, b)) in fused.iter().zip(&plain).enumerate() {
                    // The third has been through f16, in which a last bit of float may decide the rounding.
                    close(
                        a,
                        b,
                        if dtype == DType::BF16 {
                            1e-2
                        } else if i == 2 {
                            1e-3
                        } else {
                            1e-5
                        },
                    );
                }
            }
        }
    });
}

#[test]
fn products_on_top_of_a_residual_are_what_their_nodes_are() {
    on_gpu(|| {
        // Several runs, so that algorithms are timed and the step is captured; the residual is used again or dies.
        let values = |dtype: DType, (m, k, n): (usize, usize, usize), config: SessionConfig| -> (Vec<Tensor>, usize) {
            let g = kolo_ops::graph();
            let to = |x: Output<'_>, to: DType| {
                Output::new(&g, g.op("Cast").input(Output::new(&g, x.endpoint())).attr("DstT", to).out().endpoint())
            };
            let held = |name: &str, dims: &[usize], seed: u32| to(g.variable(name, wavy(dims, seed)).read(), dtype);
            let x = held("x", &[m, k], 1);
            let (w, wt, b) = (held("w", &[k, n], 2), held("wt", &[n, k], 3), held("b", &[n], 4));
            let plus = held("plus", &[m, n], 5);
            let product =
                |x: Output<'_>, w: Output<'_>| matmul(Output::new(&g, x.endpoint()), Output::new(&g, w.endpoint()));
            let bias = |x: Output<'_>| {
                Output::new(&g, g.op("BiasAdd").input(Output::new(&g, x.endpoint())).input(b).out().endpoint())
            };
            // On top of a value that dies with it, one that is seen too, and one in other dimensions.
            let dying = product(x, w) + g.op("Tanh").input(plus).out();
            let turned = g.op("MatMul").input(x).input(wt).attr("transpose_b", true).out();
            let biased = bias(turned) + plus;
            let clipped = relu(plus + bias(product(x, w)));
            let shape = g.constant([1i32, m as i32, n as i32]);
            let deep = g.op("Reshape").input(plus).input(shape).out();
            let deep = deep + g.op("Reshape").input(bias(product(x, w))).input(shape).out();
            let outputs: Vec<Output<'_>> = [dying, biased, clipped, deep].map(|y| to(y, DType::F32)).to_vec();
            let init = g.global_variables_initializer();
            let session = Session::with_config(&g, config).unwrap();
            session.run_op(init).unwrap();
            let options = RunOptions { trace: true, ..RunOptions::default() };
            let (_, metadata) = session.run_with(&options, &outputs, &[], &[]).unwrap();
            let n_fused = metadata.trace.nodes.iter().filter(|node| node.op == "_KoloFusedMatMulAdd").count();
            (0..5).for_each(|_| drop(session.run(&outputs, &[], &[]).unwrap()));
            (session.run(&outputs, &[], &[]).unwrap(), n_fused)
        };
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2), (DType::F64, 1e-6)] {
            for sizes in [(64, 32, 48), (7, 5, 3)] {
                let (fused, n_fused) = values(dtype, sizes, config(exact()));
                let (plain, none) = values(dtype, sizes, config(GpuOptions { no_fusion: true, ..exact() }));
                let (cpu, _) = values(dtype, sizes, cpu_only());
                assert_eq!((n_fused, none), (if dtype == DType::F64 { 0 } else { 4 }, 0), "{dtype}");
                for ((fused, plain), cpu) in fused.iter().zip(&plain).zip(&cpu) {
                    close(fused, plain, tolerance);
                    close(fused, cpu, tolerance);
                }
            }
        }
    });
}

#[test]
fn descent_within_a_product_learns_what_a_cpu_does() {
    on_gpu(|| {
        let losses = |config: SessionConfig, wants: bool| -> Vec<f32> {
            let g = kolo_ops::graph();
            let model = mlp(&g, &[64, 1024, 1024, 10], Source::Resident(48));
            let session = Session::with_config(&g, config).unwrap();
            session.run_op(model.init).unwrap();
            let options = RunOptions { trace: true, ..RunOptions::default() };
            let (_, metadata) = session.run_with(&options, &[], &[], &[model.train]).unwrap();
            assert_eq!(metadata.trace.nodes.iter().any(|node| node.op == "_KoloApplyProduct"), wants);
            (0..6)
                .map(|_| session.run(&[model.loss], &[], &[model.train]).unwrap()[0].scalar_value::<f32>().unwrap())
                .collect()
        };
        let (cpu, gpu) = (losses(cpu_only(), false), losses(config(exact()), true));
        println!("losses: cpu {cpu:?}, gpu {gpu:?}");
        assert!(cpu[5] < cpu[0]);
        for (a, b) in cpu.iter().zip(&gpu) {
            assert!((a - b).abs() < 1e-3, "{cpu:?} and {gpu:?}");
        }
    });
}

#[test]
fn narrow_products_agree_with_a_cpu() {
    on_gpu(|| {
        let values = |dtype: DType, (m, k, n): (usize, usize, usize), config: SessionConfig| -> Vec<Tensor> {
            let g = kolo_ops::graph();
            let to = |x: Output<'_>, to: DType| {
                Output::new(&g, g.op("Cast").input(Output::new(&g, x.endpoint())).attr("DstT", to).out().endpoint())
            };
            let held = |name: &str, dims: &[usize], seed: u32| to(g.variable(name, wavy(dims, seed)).read(), dtype);
            let mut outputs = Vec::new();
            for (i, (turned_a, turned_b)) in [(false, false), (false, true), (true, false)].into_iter().enumerate() {
                let a = held(&format!("a{i}"), &if turned_a { [k, m] } else { [m, k] }, 1);
                let b = held(&format!("b{i}"), &if turned_b { [n, k] } else { [k, n] }, 2);
                let product =
                    || g.op("MatMul").input(a).input(b).attr("transpose_a", turned_a).attr("transpose_b", turned_b);
                outputs.push(to(product().out(), DType::F32));
                let bias = held(&format!("bias{i}"), &[n], 3);
                let biased = g.op("BiasAdd").input(product().out()).input(bias).out();
                outputs.push(to(relu(biased), DType::F32));
            }
            let init = g.global_variables_initializer();
            let session = Session::with_config(&g, config).unwrap();
            session.run_op(init).unwrap();
            session.run(&outputs, &[], &[]).unwrap()
        };
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
            for sizes in [
                (1, 1, 1),
                (5, 33, 3),
                (100, 100, 10),
                (1030, 700, 10),
                (64, 512, 16),
                (300, 2050, 1),
                (37, 10, 100),
                (1024, 10, 513),
                (3, 16, 4096),
                (2, 1, 7),
            ] {
                let (gpu, cpu) = (values(dtype, sizes, config(exact())), values(dtype, sizes, cpu_only()));
                for (gpu, cpu) in gpu.iter().zip(&cpu) {
                    close(gpu, cpu, tolerance * (1.0 + sizes.1 as f32).sqrt().max(1.0));
                }
            }
        }
    });
}

#[test]
fn columns_are_summed_with_what_they_come_from() {
    on_gpu(|| {
        let sums = |rows: usize, columns: usize, no_fusion: bool| -> Vec<Tensor> {
            let g = kolo_ops::graph();
            let dy = g.variable("dy", wavy(&[rows, columns], 1)).read();
            let y = g.variable("y", wavy(&[rows, columns], 2)).read();
            let dx = g.op("ReluGrad").input(dy).input(y).out();
            let outputs = [dx, g.op("BiasAddGrad").input(dx).out(), g.op("BiasAddGrad").input(y).out()];
            let init = g.global_variables_initializer();
            let session = Session::with_config(&g, config(GpuOptions { no_fusion, ..exact() })).unwrap();
            session.run_op(init).unwrap();
            // Twice: the counters in the kernel must be zero again.
            session.run(&outputs, &[], &[]).unwrap();
            session.run(&outputs, &[], &[]).unwrap()
        };
        for (rows, columns) in [(1, 1), (3, 10), (100, 100), (1024, 4096), (70_000, 32), (50_000, 7), (5, 40_000)] {
            let (fused, plain) = (sums(rows, columns, false), sums(rows, columns, true));
            let (dy, y) = (wavy(&[rows, columns], 1), wavy(&[rows, columns], 2));
            let (dy, y) = (dy.data::<f32>().unwrap(), y.data::<f32>().unwrap());
            let expected: Vec<f32> = (0..columns)
                .map(|c| {
                    let column =
                        (0..rows).map(|r| r * columns + c).filter(|&at| y[at] > 0.0).map(|at| f64::from(dy[at]));
                    column.sum::<f64>() as f32
                })
                .collect();
            close(&fused[0], &plain[0], 0.0);
            let expected = Tensor::from_vec([columns], expected).unwrap();
            close(&fused[1], &expected, 1e-3);
            close(&plain[1], &expected, 1e-3);
            close(&fused[2], &plain[2], 0.0);
        }
    });
}
