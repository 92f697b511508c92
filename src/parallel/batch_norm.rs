//! Batch normalisation by the statistics of all ranks' batches: a rank's own share may be too small to tell a mean and a variance.
//!
//! ```text
//! forward   rows, mean, variance of each rank ─► KoloAllGather ─► mean, variance of all ─► normalise by them as by given ones
//! backward  sums of dy and of dy · x̂ of each rank ─► KoloAllReduce (sum) ─► what mean and variance pass on to dx
//! ```
//!
//! The variance of all comes from those of the ranks and how far their means are apart (Chan, Golub and LeVeque, 1979): unlike a sum of
//! squares, that loses nothing where the mean is large.

use kolo_core::{DType, DeviceSpec, Error, Result, Tensor};
use kolo_graph::{AttrValue, Attrs, BatchNormHalf, Endpoint, Graph, Node, NodeId, Region, Rewriter, TrainingNodes};

use super::data_parallel::{ExchangePlace, add_collective};
use super::nodes::attrs;

/// Whether a graph has a batch normalisation that uses its batch's statistics.
pub(crate) fn trains_batch_norm(graph: &Graph) -> bool {
    let trains = |node: &Node| node.attrs.bool("is_training").unwrap_or(false);
    graph.nodes().iter().any(|(_, node)| is(node, BatchNormHalf::Forward) && trains(node))
}

fn is(node: &Node, half: BatchNormHalf) -> bool {
    node.def.batch_norm == Some(half)
}

/// Makes the batch normalisations of a step use the statistics of all ranks.
pub(super) fn synchronise(graph: &mut Rewriter<'_>, step: &TrainingNodes, place: ExchangePlace) -> Result<()> {
    let is_of_step = |id: &NodeId| step.region(*id) == Some(Region::Forward);
    let trains = |id: &NodeId| {
        let Some(node) = graph.node(*id).filter(|node| is(node, BatchNormHalf::Forward)) else { return Ok(false) };
        node.attrs.bool("is_training")
    };
    let mut found = Vec::new();
    for id in graph.ids().into_iter().filter(is_of_step) {
        if trains(&id)? {
            found.push(id);
        }
    }
    let conditional = graph.conditional()?;
    for id in found {
        let Some(node) = graph.node(id) else { continue };
        let (op, name) = (node.op().to_owned(), node.name.to_string());
        let refuse = |why: &str| Err(Error::unimplemented(format!("ranks cannot synchronise {op} '{name}': {why}")));
        if conditional.holds(id) {
            return refuse(
                "it is in a branch or a loop, which a step may skip or repeat; say when the graph is made whether it trains \
                 (`Phase::Known`)",
            );
        }
        if node.attrs.float("exponential_avg_factor").is_ok_and(|factor| factor != 1.0) {
            return refuse(
                "it keeps moving averages by itself (exponential_avg_factor is not 1); update them by an op of their own",
            );
        }
        Layer::of(graph, id, place)?.synchronise()?;
    }
    Ok(())
}

/// One batch normalisation.
struct Layer<'r, 'a> {
    graph: &'r mut Rewriter<'a>,
    place: ExchangePlace,
    /// Normalises by the rank's own statistics, of which only those are used.
    local: NodeId,
    name: String,
    x: Endpoint,
    scale: Endpoint,
    n_channels: usize,
    epsilon: f32,
    /// The shape with which a vector of channels goes with `x`.
    along_x: Vec<i32>,
}

/// What all ranks know of their batches together.
#[derive(Clone, Copy)]
struct Statistics {
    n: Endpoint,
    mean: Endpoint,
    variance: Endpoint,
}

impl<'r, 'a> Layer<'r, 'a> {
    fn of(graph: &'r mut Rewriter<'a>, local: NodeId, place: ExchangePlace) -> Result<Layer<'r, 'a>> {
        let node = graph.node(local).ok_or_else(|| Error::internal("a batch normalisation is gone"))?.clone();
        let [x, scale, ..] = node.inputs[..] else {
            return Err(Error::internal("a batch normalisation has no inputs"));
        };
        let shape = |at: Endpoint| graph.node(at.node).map(|node| node.outputs[at.index as usize].shape.clone());
        let vectors = [Endpoint { node: local, index: 3 }, scale];
        let n_channels = vectors.into_iter().find_map(|at| shape(at)?.dim(0)).ok_or_else(|| {
            Error::invalid_argument(format!(
                "ranks cannot synchronise {} '{}': its number of channels is not known when the graph is planned; give its scale a shape",
                node.op(),
                node.name
            ))
        })?;
        let format = node.attrs.str("data_format").unwrap_or("NHWC");
        // The letters of the format are the dimensions.
        let rank = shape(x).and_then(|shape| shape.rank()).unwrap_or(format.len());
        let n_behind = if format.starts_with("NC") { rank.saturating_sub(2) } else { 0 };
        let mut along_x = vec![1; n_behind + 1];
        along_x[0] = n_channels as i32;
        let epsilon = node.attrs.float("epsilon")?;
        let name = format!("{}/synchronised", node.name);
        Ok(Layer { graph, place, local, name, x, scale, n_channels, epsilon, along_x })
    }

    fn synchronise(mut self) -> Result<()> {
        let all = self.statistics()?;
        let node = self.graph.node(self.local).ok_or_else(|| Error::internal("a batch normalisation is gone"))?.clone();
        // By given statistics.
        let mut attrs = node.attrs.clone();
        attrs.set("is_training", false);
        let inputs = [self.x, self.scale, node.inputs[2], all.mean, all.variance];
        let normal = self.graph.add(node.op(), &self.name, &inputs, attrs)?;
        self.graph.redirect(self.local_output(0), Endpoint { node: normal, index: 0 })?;
        // What a running average should see is the estimate without bias.
        let one = self.number(1.0)?;
        let fewer = self.op("Sub", &[all.n, one])?;
        let fewer = self.op("Maximum", &[fewer, one])?;
        let larger = self.op("RealDiv", &[all.n, fewer])?;
        let unbiased = self.op("Mul", &[all.variance, larger])?;
        self.graph.redirect(self.local_output(1), all.mean)?;
        self.graph.redirect(self.local_output(2), unbiased)?;
        let own = [self.local_output(3), self.local_output(4)];
        let is_gradient = |graph: &Rewriter<'_>, id: NodeId| {
            let node = graph.node(id).filter(|node| is(node, BatchNormHalf::Backward));
            node.is_some_and(|node| node.inputs.get(3) == Some(&own[0]))
        };
        let readers: Vec<NodeId> = self.graph.readers(own[0]).into_iter().map(|(id, _)| id).collect();
        for id in readers.into_iter().filter(|id| is_gradient(self.graph, *id)).collect::<Vec<_>>() {
            self.gradient(id, all)?;
        }
        Ok(())
    }

    /// Mean and variance over all ranks. A rank may have no rows.
    fn statistics(&mut self) -> Result<Statistics> {
        let channels = self.n_channels;
        let size = self.graph.add("Size", &self.name, &[self.x], Attrs::default())?;
        let size = self.cast(Endpoint { node: size, index: 0 }, DType::F32)?;
        let n_channels = self.number(channels as f32)?;
        let n = self.op("RealDiv", &[size, n_channels])?;
        let zero = self.number(0.0)?;
        let has_rows = self.op("Greater", &[n, zero])?;
        let mut parts = Vec::new();
        for index in [3, 4] {
            parts.push(self.op("SelectV2", &[has_rows, self.local_output(index), zero])?);
        }
        parts.push(self.reshape(n, &[1])?);
        parts.push(self.integer(0)?);
        let n_parts = AttrValue::Int(3);
        let own = self.graph.add("ConcatV2", &self.name, &parts, attrs([("N", n_parts)]))?;
        let own = self.reshape(Endpoint { node: own, index: 0 }, &[1, 2 * channels as i32 + 1])?;
        let all = add_collective(self.graph, "KoloAllGather", &self.name, &[own], Attrs::default(), self.place)?;
        let sizes = self.constant(Tensor::vector(vec![channels as i64, channels as i64, 1]))?;
        let axis = self.integer(1)?;
        let split = attrs([("num_split", AttrValue::Int(3))]);
        let all = self.graph.add("SplitV", &self.name, &[Endpoint { node: all, index: 0 }, sizes, axis], split)?;
        let [means, variances, rows] = [0, 1, 2].map(|index| Endpoint { node: all, index });
        let n = self.sum_of_ranks(rows)?;
        let weighted = self.op("Mul", &[means, rows])?;
        let sum = self.sum_of_ranks(weighted)?;
        // Of an empty batch, too: its values are none, and its averages stay numbers.
        let mean = self.op("DivNoNan", &[sum, n])?;
        let apart = self.op("SquaredDifference", &[means, mean])?;
        let around_all = self.op("Add", &[variances, apart])?;
        let weighted = self.op("Mul", &[around_all, rows])?;
        let sum = self.sum_of_ranks(weighted)?;
        Ok(Statistics { n, mean, variance: self.op("DivNoNan", &[sum, n])? })
    }

    /// The gradient by given statistics, and what passes through these.
    fn gradient(&mut self, own: NodeId, all: Statistics) -> Result<()> {
        let node = self.graph.node(own).ok_or_else(|| Error::internal("a gradient is gone"))?.clone();
        let mut inputs = node.inputs.to_vec();
        inputs[3..5].copy_from_slice(&[all.mean, all.variance]);
        let mut given = node.attrs.clone();
        given.set("is_training", false);
        let name = self.name.clone();
        let direct = self.graph.add(node.op(), &name, &inputs, given)?;
        let [dx, d_scale, d_offset] = [0, 1, 2].map(|index| Endpoint { node: direct, index });
        // Sums over this rank's rows: gradients of ranks are averaged where those of all variables are.
        self.graph.redirect(Endpoint { node: own, index: 1 }, d_scale)?;
        self.graph.redirect(Endpoint { node: own, index: 2 }, d_offset)?;
        let sum = attrs([("reduction", AttrValue::from("sum"))]);
        let sums = add_collective(self.graph, "KoloAllReduce", &name, &[d_scale, d_offset], sum, self.place)?;
        let [products, offsets] = [0, 1].map(|index| Endpoint { node: sums, index });
        // dx − s · i · (Σdy + (x − mean) · i · Σ(dy · x̂)) / n, where i = 1 / √(variance + ε).
        let epsilon = self.number(self.epsilon)?;
        let larger = self.op("Add", &[all.variance, epsilon])?;
        let inverse = self.op("Rsqrt", &[larger])?;
        let factor = self.op("Mul", &[self.scale, inverse])?;
        let factor = self.op("DivNoNan", &[factor, all.n])?;
        let slope = self.op("Mul", &[inverse, products])?;
        let [mean, factor, slope, offsets] = [all.mean, factor, slope, offsets].map(|at| self.beside_x(at));
        let x = self.cast(self.x, DType::F32)?;
        let centred = self.op("Sub", &[x, mean?])?;
        let sloped = self.op("Mul", &[centred, slope?])?;
        let through = self.op("Add", &[sloped, offsets?])?;
        let through = self.op("Mul", &[through, factor?])?;
        let direct = self.cast(dx, DType::F32)?;
        let wide = self.op("Sub", &[direct, through])?;
        let dx = self.cast(wide, self.dtype(self.x))?;
        self.graph.redirect(Endpoint { node: own, index: 0 }, dx)
    }

    fn local_output(&self, index: u32) -> Endpoint {
        Endpoint { node: self.local, index }
    }

    fn dtype(&self, at: Endpoint) -> DType {
        self.graph.node(at.node).map_or(DType::F32, |node| node.outputs[at.index as usize].dtype)
    }

    fn op(&mut self, op: &str, inputs: &[Endpoint]) -> Result<Endpoint> {
        let node = self.graph.add(op, &self.name, inputs, Attrs::default())?;
        Ok(Endpoint { node, index: 0 })
    }

    fn cast(&mut self, at: Endpoint, to: DType) -> Result<Endpoint> {
        if self.dtype(at) == to {
            return Ok(at);
        }
        let node = self.graph.add("Cast", &self.name, &[at], attrs([("DstT", AttrValue::Type(to))]))?;
        Ok(Endpoint { node, index: 0 })
    }

    /// The sum over the first dimension, in which ranks lie in their order.
    fn sum_of_ranks(&mut self, at: Endpoint) -> Result<Endpoint> {
        let axis = self.integer(0)?;
        self.op("Sum", &[at, axis])
    }

    fn reshape(&mut self, at: Endpoint, dims: &[i32]) -> Result<Endpoint> {
        let dims = self.constant(Tensor::vector(dims.to_vec()))?;
        self.op("Reshape", &[at, dims])
    }

    fn beside_x(&mut self, at: Endpoint) -> Result<Endpoint> {
        match self.along_x.len() {
            1 => Ok(at),
            _ => {
                let dims = self.along_x.clone();
                self.reshape(at, &dims)
            }
        }
    }

    fn number(&mut self, x: f32) -> Result<Endpoint> {
        self.constant(Tensor::scalar(x))
    }

    fn integer(&mut self, x: i32) -> Result<Endpoint> {
        self.constant(Tensor::scalar(x))
    }

    fn constant(&mut self, value: Tensor) -> Result<Endpoint> {
        let attrs = attrs([("dtype", AttrValue::Type(value.dtype())), ("value", AttrValue::Tensor(value))]);
        let node = self.graph.add("Const", &self.name, &[], attrs)?;
        // Beside what uses it.
        let device: DeviceSpec = self.graph.node(self.local).map(|node| node.device.clone()).unwrap_or_default();
        self.graph.edit(node, |node| node.device = device);
        Ok(Endpoint { node, index: 0 })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_graph::Output;
    use kolo_runtime::{Session, SessionConfig};

    use super::*;
    use crate::nn::Phase;
    use crate::optim::{Momentum, Optimizer};
    use crate::parallel::{DataParallel, World};
    use crate::{nn, ops};

    const N_ROWS: usize = 8;

    /// Eight images of 2 by 2 points with 3 channels, far from zero.
    fn images(step: usize) -> Tensor {
        let number = |i: usize| ((i * 7919 + step * 104_729) % 101) as f32 / 50.0 + 9.0;
        Tensor::from_vec([N_ROWS, 2, 2, 3], (0..N_ROWS * 12).map(number).collect::<Vec<f32>>()).unwrap()
    }

    struct Model<'g> {
        x: Output<'g>,
        step: kolo_graph::Operation<'g>,
    }

    /// A normalisation in the given order of dimensions, and one of a hidden layer.
    fn model<'g>(g: &'g Graph, format: &str, dtype: DType) -> Model<'g> {
        g.set_seed(5);
        let x = g.placeholder::<f32>("x", [None, Some(2), Some(2), Some(3)]);
        let scale = g.variable("scale", [0.5f32, 1.5, -1.0]);
        let offset = g.variable("offset", [0.1f32, 0.2, 0.3]);
        let none = g.constant(Tensor::vector::<f32>(Vec::new()));
        let own = match format {
            "NCHW" => ops::transpose(x, &[0, 3, 1, 2]),
            _ => x,
        };
        let builder = g.op("FusedBatchNormV3").inputs([ops::cast(own, dtype), scale.read(), offset.read(), none, none]);
        let normal = builder.attr("data_format", format).attr("epsilon", 1e-3f32).build().output(0);
        let normal = match format {
            "NCHW" => ops::transpose(normal, &[0, 2, 3, 1]),
            _ => normal,
        };
        let flat = ops::reshape(ops::cast(normal, DType::F32), &[-1, 12]);
        let hidden = nn::BatchNorm::new().momentum(0.5).apply(nn::dense(flat, 4, "hidden"), true);
        let guess = nn::dense(ops::tanh(hidden), 1, "guess");
        let loss = ops::mean_all(ops::square(ops::reshape(guess, &[-1]) - ops::mean(flat, &[1])));
        let train = Momentum::new(0.05, 0.9).minimize(loss, None).unwrap();
        Model { x, step: g.group("step", &[vec![train], nn::update_ops(g)].concat()) }
    }

    /// All variables after four steps.
    fn train(
        g: &Graph,
        model: &Model<'_>,
        config: SessionConfig,
        rank: usize,
        n_ranks: usize,
    ) -> Vec<(String, Tensor)> {
        let init = g.global_variables_initializer();
        let reads: Vec<Output<'_>> = g.global_variables().iter().map(|variable| variable.read()).collect();
        let session = Session::with_config(g, config).unwrap();
        session.run_op(init).unwrap();
        let n = N_ROWS / n_ranks;
        for step in 0..4 {
            let share = images(step).rows(rank * n, n).unwrap();
            session.run(&[], &[(model.x, share)], &[model.step]).unwrap();
        }
        let names = g.global_variables().into_iter().map(|variable| variable.name());
        names.zip(session.run(&reads, &[], &[]).unwrap()).collect()
    }

    fn on_ranks<R: Send>(n: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
        let worlds = World::threads(n).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| rank(world))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn check(format: &str, dtype: DType, tolerance: f32) {
        let g = crate::graph();
        let alone = train(&g, &model(&g, format, dtype), SessionConfig::default(), 0, 1);
        for n in [1, 2, 4, 8] {
            let found = on_ranks(n, |world| {
                let g = crate::graph();
                let model = model(&g, format, dtype);
                let config = DataParallel::new(&world).synchronised_batch_norm().configure(SessionConfig::default());
                train(&g, &model, config, world.rank(), n)
            });
            assert!(found.iter().all(|other| *other == found[0]), "ranks differ");
            for (rank, found) in found.iter().enumerate() {
                for ((name, found), (_, wanted)) in found.iter().zip(&alone) {
                    let (found, wanted) = (found.data::<f32>().unwrap(), wanted.data::<f32>().unwrap());
                    for (found, wanted) in found.iter().zip(wanted) {
                        let is_close = (found - wanted).abs() <= tolerance * wanted.abs().max(1.0);
                        assert!(is_close, "{name} is {found} and not {wanted} in rank {rank} of {n}, {format} {dtype}");
                    }
                }
            }
        }
    }

    /// With 8 ranks each has one row only: by itself it could not tell a variance.
    #[test]
    fn ranks_normalise_as_one_process_with_the_whole_batch_does() {
        check("NHWC", DType::F32, 2e-5);
        check("NCHW", DType::F32, 2e-5);
    }

    #[test]
    fn halves_are_normalised_by_statistics_in_float() {
        check("NHWC", DType::BF16, 0.02);
    }

    /// Also where one of the ranks has no rows at all.
    #[test]
    fn a_rank_without_rows_takes_the_others_statistics() {
        let found = on_ranks(2, |world| {
            let g = crate::graph();
            let x = g.placeholder::<f32>("x", [None, Some(1)]);
            let y = nn::BatchNorm::new().momentum(0.0).apply(x, true);
            let train = Momentum::new(0.1, 0.9).minimize(ops::sum_all(ops::square(y - 1.0)), None).unwrap();
            let step = g.group("step", &[vec![train], nn::update_ops(&g)].concat());
            let init = g.global_variables_initializer();
            let read = |name: &str| g.find_variable(&format!("batch_normalization/{name}")).unwrap().read();
            let reads = ["moving_mean", "moving_variance", "gamma"].map(read);
            let config = DataParallel::new(&world).synchronised_batch_norm().configure(SessionConfig::default());
            let session = Session::with_config(&g, config).unwrap();
            session.run_op(init).unwrap();
            let share = Tensor::from([[1.0f32], [3.0]]).rows(0, if world.rank() == 0 { 2 } else { 0 }).unwrap();
            session.run(&[], &[(x, share)], &[step]).unwrap();
            session.run(&reads, &[], &[]).unwrap()
        });
        assert_eq!(found[0], found[1]);
        assert_eq!(found[0][..2], [Tensor::from([2.0f32]), Tensor::from([2.0f32])]);
        assert!(found[0][2].data::<f32>().unwrap()[0].is_finite());
    }

    #[test]
    fn what_ranks_cannot_synchronise_is_refused_by_name() {
        let world = World::alone().unwrap();
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [None, Some(1)]);
        let training = g.placeholder::<bool>("training", kolo_core::PartialShape::scalar());
        // Its variables stand still: their gradients would come from a branch, too.
        let norm = nn::BatchNorm::new().no_scale().no_center().name("norm").apply(x, Phase::Fed(training));
        let y = norm * g.variable("w", 1.0f32).read();
        let train = Momentum::new(0.1, 0.9).minimize(ops::mean_all(ops::square(y - 1.0)), None).unwrap();
        let init = g.global_variables_initializer();
        let config = DataParallel::new(&world).synchronised_batch_norm().configure(SessionConfig::default());
        let session = Session::with_config(&g, config).unwrap();
        session.run_op(init).unwrap();
        let feeds = [(x, Tensor::from([[1.0f32]])), (training, Tensor::scalar(true))];
        let error = session.run(&[], &feeds, &[train]).unwrap_err().to_string();
        assert!(error.contains("ranks cannot synchronise FusedBatchNormV3 'norm/"), "{error}");
        assert!(error.contains("Phase::Known"), "{error}");
    }
}
