//! Means over the samples of all ranks, where ranks have different numbers of them.

use kolo_core::{DType, Error};
use kolo_graph::Output;

use super::world::WORLD;
use crate::ops;

/// The mean over the samples of all ranks, where this rank has `n` of them, which add up to `sum`: the sum over the mean of all ranks'
/// `n`. For a loss whose ranks have different numbers of rows, or of tokens that count: the sum of what is masked, and the sum of the
/// mask. Both are scalars; a rank may have no samples at all. Where all have as many, this is `sum / n`, to the bit.
///
/// It is one rank's part: what follows takes means over ranks, as ever, [`DataParallel`](super::DataParallel) of the gradients, a
/// [`Trainer`](crate::train::Trainer) of the losses that it reports. The ranks are those that a session knows as `world`
/// ([`World::configure`](super::World::configure)), as for [`DataParallel`](super::DataParallel).
///
/// If a batch is cut into parts whose means are averaged ([`towers`](super::towers)), give each part `n` of the whole batch over the number
/// of parts, computed before it is cut; a part's own `n` would make all parts count alike, however many samples they have.
/// [`Accumulate`](crate::optim::Accumulate) averages steps in that way, and they count alike.
///
/// ```
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::parallel::{DataParallel, World, mean_over_samples};
/// use kolo::{Session, SessionConfig, Tensor, ops};
///
/// let rank = |world: World| -> kolo::Result<Tensor> {
///     let g = kolo::graph();
///     let x = g.placeholder::<f32>("x", [None]);
///     let w = g.variable("w", 1.0f32);
///     let loss = mean_over_samples(ops::sum_all(w.read() * x), ops::size(x));
///     let train = Sgd::new(1.0).minimize(loss, None)?;
///     let init = g.global_variables_initializer();
///     let session = Session::with_config(&g, DataParallel::new(&world).configure(SessionConfig::default()))?;
///     session.run_op(init)?;
///     let share = [Tensor::from([1.0f32]), Tensor::from([2.0f32, 3.0, 6.0])][world.rank()].clone();
///     session.run(&[], &[(x, share)], &[train])?;
///     session.fetch(w.read())
/// };
/// // The gradient is the mean of 1, 2, 3 and 6.
/// std::thread::scope(|scope| {
///     for world in World::threads(2)? {
///         scope.spawn(move || assert_eq!(rank(world).unwrap(), Tensor::scalar(-2.0f32)));
///     }
///     Ok::<(), kolo::Error>(())
/// })?;
/// # Ok::<(), kolo::Error>(())
/// ```
#[track_caller]
pub fn mean_over_samples<'g>(sum: Output<'g>, n: Output<'g>) -> Output<'g> {
    let graph = sum.graph();
    for (what, at) in [("sum", sum), ("number of samples", n)] {
        if at.is_valid() && at.shape().rank().is_some_and(|rank| rank != 0) {
            graph.record_error(Error::invalid_argument(format!(
                "the {what} of a mean over the samples of all ranks must be a scalar, and '{}' has shape {}",
                at.name(),
                at.shape()
            )));
            return Output::invalid(graph);
        }
    }
    graph.name_scope("mean_over_samples", || {
        // Numbers of tokens do not fit into halves.
        let wide = if sum.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let of_all = graph.device("/device:CPU:0", || {
            let n = ops::stop_gradient(ops::cast(n, wide));
            graph.op("KoloAllReduce").inputs([n]).attr("group", WORLD).attr("reduction", "mean").out()
        });
        // 0 if no rank has any.
        let mean = graph.op("DivNoNan").inputs([ops::cast(sum, wide), ops::stop_gradient(of_all)]).out();
        ops::cast(mean, sum.dtype())
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::{Result, Tensor};
    use kolo_graph::Graph;
    use kolo_runtime::{Session, SessionConfig};

    use super::*;
    use crate::data::Dataset;
    use crate::nn;
    use crate::optim::{Adam, Optimizer, Sgd};
    use crate::parallel::{DataParallel, Tower, World, towers};
    use crate::train::{FitReport, Model, Trainer, global_step_or_create};

    fn on_ranks<R: Send>(n: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
        let worlds = World::threads(n).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| rank(world))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Ten samples in batches of four: the last one of an epoch has two.
    fn data() -> Dataset {
        let rows: [[f32; 2]; 10] = std::array::from_fn(|i| [(i as f32).sin(), (i as f32 * 0.7).cos()]);
        let wanted = rows.map(|[a, b]| [a * 2.0 - b]);
        let kinds: [i32; 10] = std::array::from_fn(|i| (i * 7 % 3) as i32);
        Dataset::new([Tensor::from(rows), Tensor::from(kinds), Tensor::from(wanted)]).batch(4, false).repeat(3)
    }

    /// Two layers and an embedding, whose gradient has as many rows as the batch. `mean` makes the loss of the squares of the errors.
    fn model<'g>(g: &'g Graph, mean: impl FnOnce(Output<'g>) -> Output<'g>) -> ([Output<'g>; 3], Output<'g>) {
        g.set_seed(2);
        let x = g.placeholder::<f32>("x", [None, Some(2)]);
        let kinds = g.placeholder::<i32>("kinds", [None]);
        let y = g.placeholder::<f32>("y", [None, Some(1)]);
        let offsets = ops::gather(g.variable("offsets", [[0.1f32], [0.3], [-0.2]]).read(), kinds, 0);
        let guess = nn::dense(ops::tanh(nn::dense(x, 4, "hidden")), 1, "guess") + offsets;
        ([x, kinds, y], mean(ops::square(guess - y)))
    }

    fn of_all_ranks(errors: Output<'_>) -> Output<'_> {
        mean_over_samples(ops::sum_all(errors), ops::size(errors))
    }

    /// What a fit reports, and the weights after it.
    fn fit(world: Option<&World>) -> Result<(FitReport, Vec<f32>)> {
        let g = crate::graph();
        let (inputs, loss) = match world {
            Some(_) => model(&g, of_all_ranks),
            None => model(&g, ops::mean_all),
        };
        let train = Adam::new(0.01).minimize(loss, Some(global_step_or_create(&g)?))?;
        let weights = g.trainable_variables();
        let mut builder = Trainer::new(&g, Model::new(&inputs, loss, train));
        if let Some(world) = world {
            let config = DataParallel::new(world).configure(SessionConfig::default());
            builder = builder.source(config).world(world).uneven_batches();
        }
        let mut trainer = builder.build()?;
        let report = trainer.fit(&data(), &mut [])?;
        let reads: Vec<Output<'_>> = weights.iter().map(|weight| weight.read()).collect();
        let values = trainer.session().run(&reads, &[], &[])?;
        Ok((report, values.iter().flat_map(|value| value.data::<f32>().unwrap().to_vec()).collect()))
    }

    /// On three ranks they have 2, 1 and 1 rows, and 1, 1 and none of the last batch.
    #[test]
    fn ranks_with_unequal_shares_train_as_one_process_does() {
        let (alone, wanted) = fit(None).unwrap();
        for n in [2, 3, 4] {
            for (report, weights) in on_ranks(n, |world| fit(Some(&world)).unwrap()) {
                assert_eq!((report.step, report.n_samples), (alone.step, alone.n_samples), "{n} ranks");
                assert!((report.last_loss - alone.last_loss).abs() < 1e-5, "{n} ranks: {report:?} and not {alone:?}");
                for (found, wanted) in weights.iter().zip(&wanted) {
                    assert!((found - wanted).abs() < 1e-5, "{n} ranks: {weights:?} and not {wanted:?}");
                }
            }
        }
    }

    /// Three ranks have 4, 3 and 3 of ten samples.
    #[test]
    fn what_ranks_exchange_is_not_evaluated_and_what_they_have_alone_is() {
        let train = |world: &World, evaluates_alone: bool| -> Result<f64> {
            let g = crate::graph();
            let mut own = None;
            let (inputs, loss) = model(&g, |errors| {
                own = Some(ops::mean_all(errors));
                of_all_ranks(errors)
            });
            let train = Adam::new(0.01).minimize(loss, Some(global_step_or_create(&g)?))?;
            let mut model = Model::new(&inputs, loss, train);
            if let Some(own) = own.filter(|_| evaluates_alone) {
                model = model.evaluate_with(own, &[]);
            }
            let config = DataParallel::new(world).configure(SessionConfig::default());
            let trainer = Trainer::new(&g, model).source(config).world(world).uneven_batches().build()?;
            Ok(trainer.evaluate(&data())?.loss)
        };
        let alone = train(&World::alone().unwrap(), true).unwrap();
        for found in on_ranks(3, |world| [train(&world, false), train(&world, true)]) {
            let [refused, found] = found;
            let error = refused.unwrap_err().to_string();
            assert!(
                error.contains("depends on KoloAllReduce 'mean_over_samples/") && error.contains("evaluate_with"),
                "{error}"
            );
            assert!((found.unwrap() - alone).abs() < 1e-5);
        }
    }

    #[test]
    fn uneven_batches_are_normalised_by_the_statistics_of_all_rows() {
        let build = |world: &World, is_synchronised: bool| {
            let g = crate::graph();
            let x = g.placeholder::<f32>("x", [None, Some(2)]);
            let normal = nn::BatchNorm::new().apply(x, true);
            let loss = of_all_ranks(ops::square(normal - 1.0));
            let train = Sgd::new(0.1).minimize(loss, Some(global_step_or_create(&g)?))?;
            let step = g.group("step", &[vec![train], nn::update_ops(&g)].concat());
            let mut data_parallel = DataParallel::new(world);
            if is_synchronised {
                data_parallel = data_parallel.synchronised_batch_norm();
            }
            let config = data_parallel.configure(SessionConfig::default());
            let builder = Trainer::new(&g, Model::new(&[x], loss, step)).source(config).data_parallel(&data_parallel);
            let mut trainer = builder.uneven_batches().build()?;
            // The second rank has no rows of the second batch.
            let rows = Dataset::new([Tensor::from([[1.0f32, 2.0], [3.0, 5.0], [6.0, 8.0]])]).batch(2, false);
            trainer.fit(&rows, &mut [])
        };
        let refused = on_ranks(2, |world| build(&world, false).map(drop).unwrap_err().to_string());
        assert!(
            refused[1].contains("a rank may have no rows") && refused[1].contains("synchronised_batch_norm"),
            "{refused:?}"
        );
        for report in on_ranks(2, |world| build(&world, true).unwrap()) {
            assert!(report.last_loss.is_finite() && report.n_samples == 3, "{report:?}");
        }
    }

    #[test]
    fn equal_shares_are_divided_by_their_own_number() {
        let weighed = on_ranks(3, |world| {
            let g = crate::graph();
            let losses = [0.3f32, 5.1].map(|sum| mean_over_samples(g.constant(sum), g.constant(7i32)));
            let session = Session::with_config(&g, world.configure(SessionConfig::default())).unwrap();
            session.run(&losses, &[], &[]).unwrap()
        });
        assert_eq!(weighed, vec![[0.3f32 / 7.0, 5.1 / 7.0].map(Tensor::scalar).to_vec(); 3]);
    }

    /// A weight after a step over a batch that is cut into parts, where only what the mask leaves counts. Tokens and the mask are those
    /// of one rank.
    fn masked_step(world: &World, n_parts: usize, tokens: &[f32], mask: &[f32]) -> f32 {
        let g = crate::graph();
        let [tokens_in, mask_in] = ["tokens", "mask"].map(|name| g.placeholder::<f32>(name, [None]));
        let n = ops::sum_all(mask_in) / n_parts as f32;
        let w = g.variable("w", 1.0f32);
        let model = towers(&g, &vec!["/cpu:0"; n_parts], "/cpu:0", &[tokens_in, mask_in], |part| {
            let errors = ops::square(w.read() * part[0] - 1.0) * part[1];
            Ok(Tower { loss: mean_over_samples(ops::sum_all(errors), n), metrics: vec![] })
        });
        let train = Sgd::new(0.1).apply_gradients(&model.unwrap().gradients, None).unwrap();
        let init = g.global_variables_initializer();
        let config = DataParallel::new(world).configure(SessionConfig::default());
        let session = Session::with_config(&g, config).unwrap();
        session.run_op(init).unwrap();
        let feeds = [(tokens_in, Tensor::vector(tokens.to_vec())), (mask_in, Tensor::vector(mask.to_vec()))];
        session.run(&[], &feeds, &[train]).unwrap();
        session.fetch(w.read()).unwrap().scalar_value().unwrap()
    }

    /// Rank 1 has none in one case, nobody any in another; of two parts, each has another number.
    #[test]
    fn only_tokens_that_count_are_in_the_mean_and_a_rank_may_have_none() {
        let tokens = [[1.0f32, 2.0, -1.0, 0.5], [3.0, 0.25, 1.5, -2.0]];
        for mask in [[[1.0f32, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0]], [[1.0, 1.0, 1.0, 0.0], [0.0; 4]], [[0.0; 4]; 2]] {
            let all: Vec<(f32, f32)> =
                tokens.as_flattened().iter().copied().zip(mask.as_flattened().to_vec()).collect();
            let n = all.iter().map(|(_, counts)| counts).sum::<f32>().max(1.0);
            let gradient = all.iter().map(|(x, counts)| 2.0 * x * (x - 1.0) * counts).sum::<f32>() / n;
            for n_parts in [1, 2] {
                let found = on_ranks(2, |world| {
                    let rank = world.rank();
                    masked_step(&world, n_parts, &tokens[rank], &mask[rank])
                });
                for found in found {
                    let wanted = 1.0 - 0.1 * gradient;
                    assert!((found - wanted).abs() < 1e-5, "{found} and not {wanted}: {mask:?} in {n_parts} parts");
                }
            }
        }
    }

    #[test]
    fn what_is_no_scalar_has_no_mean() {
        let g = crate::graph();
        mean_over_samples(g.constant(1.0f32), g.constant([1i32, 2]));
        let error = g.check().unwrap_err().to_string();
        assert!(
            error.contains("the number of samples of a mean over the samples of all ranks must be a scalar"),
            "{error}"
        );
    }
}
