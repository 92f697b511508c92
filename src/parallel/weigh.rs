//! Means over the samples of all ranks, where ranks have different numbers of them.

use kolo_core::{DType, Error};
use kolo_graph::Output;

use super::world::{WORLD, World};
use crate::ops;

impl World {
    /// `mean`, a mean over `n` samples of this rank, weighed so that the mean over all ranks is that over the samples of all of them:
    /// times `n`, over the mean of all ranks' `n`. For a loss whose ranks have different numbers of rows, or of tokens that count
    /// (sum the mask). Both are scalars; a rank may have no samples at all. Where all have as many, the weight is 1, and nothing
    /// changes, to the bit.
    ///
    /// What follows takes means over ranks, as ever: [`DataParallel`](super::DataParallel) of the gradients, a
    /// [`Trainer`](crate::train::Trainer) of the losses that it reports.
    ///
    /// ```
    /// use kolo::optim::{Optimizer, Sgd};
    /// use kolo::parallel::{DataParallel, World};
    /// use kolo::{Session, SessionConfig, Tensor, ops};
    ///
    /// let rank = |world: World| -> kolo::Result<Tensor> {
    ///     let g = kolo::graph();
    ///     let x = g.placeholder::<f32>("x", [None]);
    ///     let w = g.variable("w", 1.0f32);
    ///     let loss = world.weigh(ops::mean_all(w.read() * x), ops::size(x));
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
    pub fn weigh<'g>(&self, mean: Output<'g>, n: Output<'g>) -> Output<'g> {
        let graph = mean.graph();
        for (what, at) in [("mean", mean), ("number of samples", n)] {
            if at.is_valid() && at.shape().rank().is_some_and(|rank| rank != 0) {
                graph.record_error(Error::invalid_argument(format!(
                    "the {what} that a rank is weighed by must be a scalar, and '{}' has shape {}",
                    at.name(),
                    at.shape()
                )));
                return Output::invalid(graph);
            }
        }
        graph.name_scope("weigh", || {
            let n = ops::cast(n, DType::F32);
            let of_all = graph.device("/device:CPU:0", || {
                graph.op("KoloAllReduce").inputs([n]).attr("group", WORLD).attr("reduction", "mean").out()
            });
            let weight = graph.op("DivNoNan").inputs([n, of_all]).out();
            let weight = ops::cast(ops::stop_gradient(weight), mean.dtype());
            // The mean of nothing is no number.
            let mean = ops::select(ops::greater(n, graph.constant(0.0f32)), mean, ops::zeros_like(mean));
            mean * weight
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::{Result, Tensor};
    use kolo_runtime::{Session, SessionConfig};

    use super::*;
    use crate::data::Dataset;
    use crate::nn;
    use crate::optim::{Adam, Optimizer};
    use crate::parallel::DataParallel;
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
        Dataset::new([Tensor::from(rows), Tensor::from(wanted)]).batch(4, false).repeat(3)
    }

    /// What a fit reports, and the weights after it.
    fn fit(world: Option<&World>) -> Result<(FitReport, Vec<f32>)> {
        let g = crate::graph();
        g.set_seed(2);
        let x = g.placeholder::<f32>("x", [None, Some(2)]);
        let y = g.placeholder::<f32>("y", [None, Some(1)]);
        let guess = nn::dense(ops::tanh(nn::dense(x, 4, "hidden")), 1, "guess");
        let loss = ops::mean_all(ops::square(guess - y));
        let loss = world.map_or(loss, |world| world.weigh(loss, ops::size(y)));
        let train = Adam::new(0.01).minimize(loss, Some(global_step_or_create(&g)?))?;
        let weights = g.trainable_variables();
        let mut builder = Trainer::new(&g, Model::new(&[x, y], loss, train));
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

    #[test]
    fn equal_shares_have_the_weight_one() {
        let weighed = on_ranks(3, |world| {
            let g = crate::graph();
            let loss = world.weigh(g.constant(0.3f32), g.constant(7i32));
            Session::with_config(&g, world.configure(SessionConfig::default())).unwrap().fetch(loss).unwrap()
        });
        assert_eq!(weighed, vec![Tensor::scalar(0.3f32); 3]);
    }

    #[test]
    fn what_is_no_scalar_has_no_weight() {
        let world = World::alone().unwrap();
        let g = crate::graph();
        world.weigh(g.constant(1.0f32), g.constant([1i32, 2]));
        let error = g.check().unwrap_err().to_string();
        assert!(error.contains("the number of samples that a rank is weighed by must be a scalar"), "{error}");
    }
}
