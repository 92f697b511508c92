//! Data parallelism over ranks: each trains a copy of the model on its rows of every batch, and all apply the mean of their
//! gradients. The program is that for one device; two passes over its graph do the rest.
//!
//! Gradients are exchanged in buckets, in the order in which backward makes them, so that the exchange of the last layers' runs
//! beside the computation of the first layers'. A bucket is one collective over several tensors, which are not copied together.
//!
//! ```text
//! backward ─► gradient ─► KoloAllReduce (mean, a bucket) ─► clip, accumulate, update
//! ```
//!
//! Gradients are exchanged through host memory, or between the ranks' GPUs if each has one of its own and NCCL is there. A GPU enqueues
//! exchanges beside backward; `KoloAwaitExchange`, after the last of them, makes the updates wait.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kolo_core::{DType, DeviceSpec, Error, Result};
use kolo_device::cuda::rank_hardware;
use kolo_graph::{
    AttrValue, Attrs, Effects, Endpoint, GradParts, Node, NodeId, Pass, Region, Rewriter, Stage, Training,
    TrainingNodes,
};
use kolo_runtime::SessionConfig;

use super::batch_norm::synchronise;
use super::bucket_sizes::BucketSizes;
use super::exchange::{COMPRESSED_STEP, Exchange, check_is_step, unsent};
use super::local_steps::{OuterStep, average_weights};
use super::merge_collectives::{MEETING_BYTES, merge_collectives};
use super::nodes::{attrs, float};
use super::world::{WORLD, World};
use super::{one_bit_adam, power_sgd, top_k};

/// Makes the training steps of a session those of one rank among many.
///
/// What a step applies is the mean over all ranks, so `n` ranks with equal shares of a batch do what one process does with all of
/// it. Sums are made in a fixed tree over the ranks: the same ranks give the same bits every time, and 1, 2, 4 or 8 ranks give the
/// same bits as each other if the batch is cut into the same parts ([`towers`](super::towers) on one device).
///
/// What a step writes to other variables from the data of its own batch, such as the moving averages of batch normalisation, is
/// averaged, too, so that all ranks keep the same values. Random ops draw the same numbers on every rank that gives its graph
/// the same seed; for different dropout on each, seed the graph with the rank: initial values come from rank 0 in any case.
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
///     let train = Sgd::new(1.0).minimize(ops::mean_all(w.read() * x), None)?;
///     let init = g.global_variables_initializer();
///
///     let config = DataParallel::new(&world).configure(SessionConfig::default());
///     let session = Session::with_config(&g, config)?;
///     session.run_op(init)?;
///     let share = Tensor::from([world.rank() as f32]);
///     session.run(&[], &[(x, share)], &[train])?;
///     session.fetch(w.read())
/// };
/// std::thread::scope(|scope| {
///     for world in World::threads(2)? {
///         scope.spawn(move || assert_eq!(rank(world).unwrap(), Tensor::scalar(0.5f32)));
///     }
///     Ok::<(), kolo::Error>(())
/// })?;
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone)]
pub struct DataParallel {
    world: World,
    /// The most bytes of the first bucket and of the others, by hand.
    first_bucket: Option<usize>,
    other_buckets: Option<usize>,
    exchange: Exchange,
    /// In how manieth steps ranks meet that train by themselves, and what moves their weights then.
    local_steps: Option<(u64, Option<OuterStep>)>,
    is_atomic: bool,
    stays_on_host: bool,
    synchronises_batch_norm: bool,
}

impl DataParallel {
    /// For the ranks of `world`.
    pub fn new(world: &World) -> DataParallel {
        DataParallel {
            world: world.clone(),
            first_bucket: None,
            other_buckets: None,
            exchange: Exchange::Whole,
            local_steps: None,
            is_atomic: false,
            stays_on_host: false,
            synchronises_batch_norm: false,
        }
    }

    /// The most bytes of a bucket, unless it holds a single gradient. Larger ones need fewer meetings, smaller ones leave less for the
    /// end. If not said, [`DataParallel::configure`] measures what a meeting of the ranks and what a byte costs, and takes buckets of
    /// which a tenth of the time is the meeting.
    #[must_use]
    pub fn bucket_bytes(mut self, n_bytes: usize) -> DataParallel {
        self.other_buckets = Some(n_bytes);
        self
    }

    /// The same for the first bucket. If not said, half of its time is the meeting, so that the exchange begins early.
    #[must_use]
    pub fn first_bucket_bytes(mut self, n_bytes: usize) -> DataParallel {
        self.first_bucket = Some(n_bytes);
        self
    }

    /// Exchanges gradients in this way: smaller where the link between ranks is slow. Gradients of rows stay what they are, and so do
    /// small ones. What a step runs is then what [`DataParallel::steps`] returns.
    #[must_use]
    pub fn exchange(mut self, exchange: Exchange) -> DataParallel {
        self.exchange = exchange;
        self
    }

    /// Exchanges gradients as `bfloat16` or `half`: [`Exchange::As`].
    #[must_use]
    pub fn exchange_as(self, dtype: DType) -> DataParallel {
        self.exchange(Exchange::As(dtype))
    }

    pub(super) fn with_local_steps(mut self, n: u64, outer: Option<OuterStep>) -> DataParallel {
        self.local_steps = Some((n, outer));
        self
    }

    pub(super) fn exchange_kind(&self) -> Exchange {
        self.exchange
    }

    pub(super) fn local_step_count(&self) -> Option<(u64, Option<OuterStep>)> {
        self.local_steps
    }

    pub(super) fn updates_are_atomic(&self) -> bool {
        self.is_atomic
    }

    pub(crate) fn synchronises_statistics(&self) -> bool {
        self.synchronises_batch_norm
    }

    /// Updates variables only when all collectives of the step are done. A step that fails because a rank was lost then has
    /// changed nothing on this rank, or all of it; without, some variables may be one step ahead of others. For trainings that
    /// go on after a loss ([`crate::train::TrainerState`]). Not covered is what collectives themselves depend on: sums of gradients that
    /// are kept between steps, and moving averages that a part of a batch updates before the next part is computed.
    #[must_use]
    pub fn atomic_updates(mut self) -> DataParallel {
        self.is_atomic = true;
        self
    }

    /// Exchanges gradients through host memory, also where the ranks' GPUs can reach each other.
    #[must_use]
    pub fn through_host(mut self) -> DataParallel {
        self.stays_on_host = true;
        self
    }

    /// Makes batch normalisations use mean and variance of all ranks' batches, not of each rank's own share, forward and backward:
    /// `n` ranks then do what one process does with the whole batch, up to rounding. Worth it where shares are small; each layer
    /// costs two meetings of the ranks. If a batch is cut into parts, its statistics are those of one part on all ranks.
    #[must_use]
    pub fn synchronised_batch_norm(mut self) -> DataParallel {
        self.synchronises_batch_norm = true;
        self
    }

    /// The ranks.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// A configuration for this rank's sessions: with the passes, the group of all ranks, and this rank's share of the host's cores
    /// unless the threads are set. All ranks call it, and find out whether their GPUs can reach each other.
    pub fn configure(&self, config: SessionConfig) -> SessionConfig {
        let place = match self.exchanges_on_devices(&config) {
            true => ExchangePlace::Devices,
            false => ExchangePlace::Host,
        };
        let sizes = match place {
            ExchangePlace::Host => BucketSizes::measured(&self.world, self.by_hand()),
            ExchangePlace::Devices => BucketSizes::usual(self.by_hand()),
        };
        let mut config = self.world.configure(config);
        config.passes.extend(self.passes_for(place, sizes));
        config
    }

    /// Whether the GPUs that sessions of this configuration have can exchange data, on all ranks.
    fn exchanges_on_devices(&self, config: &SessionConfig) -> bool {
        // A step that has lost a rank must not have updated anything. Only the host knows that in time.
        let is_made_smaller = self.exchange.keeps_the_rest();
        let wants =
            !self.is_atomic && !self.stays_on_host && !is_made_smaller && config.device_count.get("GPU") != Some(&0);
        let hardware = wants.then(|| rank_hardware(&config.gpu.visible_device_list, self.world.size())).flatten();
        match self.world.all_have_own(hardware.as_deref()) {
            Ok(can) => can,
            Err(error) => {
                // The next call of the world says so as well.
                tracing::warn!(target: "kolo::train", "ranks did not agree on where to exchange gradients: {error}");
                false
            }
        }
    }

    /// The passes alone, for exchanges through host memory. The session also needs the group ([`World::configure`]).
    pub fn passes(&self) -> Vec<Pass> {
        self.passes_for(ExchangePlace::Host, BucketSizes::usual(self.by_hand()))
    }

    fn by_hand(&self) -> [Option<usize>; 2] {
        [self.first_bucket, self.other_buckets]
    }

    fn passes_for(&self, place: ExchangePlace, sizes: BucketSizes) -> Vec<Pass> {
        let (exchange, n_ranks) = (self.exchange, self.world.size());
        if let Some((_, outer)) = self.local_steps {
            let weights = Pass::new(
                "average-weights",
                Stage::Graph,
                "ranks that train by themselves take over the mean of their weights now and then",
                move |graph, _| {
                    for_each_step(graph, |graph, training, step| {
                        average_weights(graph, training, step, (sizes, outer), place)
                    })
                },
            );
            return vec![weights, merge_collectives(MEETING_BYTES.min(sizes.first / 4))];
        }
        let gradients = Pass::new(
            "average-gradients",
            Stage::Graph,
            "ranks that train together apply the mean of their gradients, exchanged in buckets while backward goes on",
            move |graph, _| {
                for_each_step(graph, |graph, _, step| average_gradients(graph, step, (sizes, exchange), n_ranks, place))
            },
        );
        let state = Pass::new(
            "average-state",
            Stage::Graph,
            "what a step writes from the data of one rank alone, such as moving averages, becomes the mean over all ranks",
            move |graph, _| {
                for_each_step(graph, |graph, training, step| average_state(graph, training, step, sizes, place))
            },
        );
        // Buckets that were made smaller by hand stay as they are.
        let mut passes = vec![gradients];
        if self.synchronises_batch_norm {
            passes.push(Pass::new(
                "synchronise-batch-norm",
                Stage::Graph,
                "batch normalisation in training uses the statistics of all ranks' batches",
                move |graph, _| for_each_step(graph, |graph, _, step| synchronise(graph, step, place)),
            ));
        }
        passes.extend([state, merge_collectives(MEETING_BYTES.min(sizes.first / 4))]);
        if self.is_atomic {
            passes.push(Pass::new(
                "atomic-updates",
                Stage::Graph,
                "a step that loses a rank updates all variables or none",
                |graph, _| for_each_step(graph, |graph, _, _| update_at_the_end(graph)),
            ));
        }
        passes
    }
}

/// Where ranks exchange data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExchangePlace {
    /// In host memory.
    Host,
    /// Where nodes are placed: on a GPU if what is exchanged has a kernel there.
    Devices,
}

/// Calls `rewrite` for each training step of which the run has the updates.
fn for_each_step(
    graph: &mut Rewriter<'_>,
    rewrite: impl Fn(&mut Rewriter<'_>, &Training, &TrainingNodes) -> Result<()>,
) -> Result<()> {
    for training in graph.trainings().iter() {
        match training.resolve(graph)? {
            Some(step) if step.variables.iter().any(|variable| variable.update.is_some()) => {
                rewrite(graph, training, &step)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// A tensor that ranks exchange, and the inputs that read what comes out of it.
pub(super) struct Exchanged {
    pub value: Endpoint,
    pub readers: Vec<(NodeId, usize)>,
    /// The variable that it is about.
    pub variable: Arc<str>,
}

fn average_gradients(
    graph: &mut Rewriter<'_>,
    step: &TrainingNodes,
    (sizes, how): (BucketSizes, Exchange),
    n_ranks: usize,
    place: ExchangePlace,
) -> Result<()> {
    let (mut dense, mut values, mut indices) = (Vec::new(), Vec::new(), Vec::new());
    // Two variables may have one gradient, or rows of the same numbers.
    let mut seen = HashSet::new();
    let mut add = |to: &mut Vec<Exchanged>, places: Vec<Exchanged>| {
        to.extend(places.into_iter().filter(|place| seen.insert(place.value)));
    };
    // All places are found before any is changed.
    for variable in step.variables.iter().filter(|variable| variable.update.is_some()) {
        // Rows may be summed into a whole gradient before it is applied.
        let is_rows = match &variable.gradients[..] {
            [] => variable.reads.indices().is_some(),
            gradients => gradients.iter().any(|(_, parts)| parts.indices().is_some()),
        };
        let parts = |pick: &dyn Fn(&GradParts<Endpoint>) -> Option<Endpoint>| {
            variable.gradients.iter().filter_map(|(_, parts)| pick(parts)).collect::<Vec<Endpoint>>()
        };
        let applied = variable.applied.as_ref();
        let of_values = parts(&|parts| Some(*parts.values()));
        let at = (applied.map(|applied| *applied.values()), variable.reads.values().as_slice());
        add(
            if is_rows { &mut values } else { &mut dense },
            places(graph, (step, &variable.name), &of_values, at, is_rows),
        );
        if is_rows {
            let of_indices = parts(&|parts| parts.indices().copied());
            let reads = variable.reads.indices().map_or(&[][..], Vec::as_slice);
            let at = (applied.and_then(|applied| applied.indices().copied()), reads);
            add(&mut indices, places(graph, (step, &variable.name), &of_indices, at, is_rows));
        }
    }
    if let Exchange::As(wire) = how {
        dense = dense.into_iter().map(|exchanged| narrowed(graph, exchanged, wire)).collect::<Result<_>>()?;
    }
    let mut smaller = Vec::new();
    if is_smaller_now(graph, how)? {
        (smaller, dense) = dense.into_iter().partition(|exchanged| is_kept_for(graph, exchanged));
    }
    exchange(graph, GRADIENTS, dense, sizes, place)?;
    for bucket in buckets(graph, GRADIENTS, smaller, sizes)? {
        exchange_smaller(graph, &bucket, step, how)?;
    }
    for exchanged in values {
        let all = gather(graph, "rows", exchanged.value, place)?;
        let mean = divide(graph, all, n_ranks)?;
        graph.redirect_inputs(&exchanged.readers, mean)?;
    }
    for exchanged in indices {
        let all = gather(graph, "indices", exchanged.value, place)?;
        graph.redirect_inputs(&exchanged.readers, all)?;
    }
    Ok(())
}

/// A gradient that is cast to a narrower type, and what comes out of the exchange back.
fn narrowed(graph: &mut Rewriter<'_>, exchanged: Exchanged, wire: DType) -> Result<Exchanged> {
    Exchange::As(wire).check()?;
    let Exchanged { value, readers, variable } = exchanged;
    let own = graph.node(value.node).map(|node| node.outputs[value.index as usize].dtype);
    if !matches!(own, Some(DType::F32 | DType::F64)) || readers.is_empty() {
        return Ok(Exchanged { value, readers, variable });
    }
    let cast = |graph: &mut Rewriter<'_>, name: &str, at: Endpoint, to: DType| {
        let node = graph.add("Cast", name, &[at], attrs([("DstT", to)]))?;
        Ok::<Endpoint, Error>(Endpoint { node, index: 0 })
    };
    let narrow = cast(graph, "data_parallel/narrow", value, wire)?;
    let wide = cast(graph, "data_parallel/wide", narrow, own.unwrap_or(DType::F32))?;
    graph.redirect_inputs(&readers, wide)?;
    Ok(Exchanged { value: narrow, readers: vec![(wide.node, 0)], variable })
}

/// Where the gradient of a variable is exchanged: where it leaves backward, so before it is clipped or accumulated. Of several
/// gradients (the model is on several devices, or the batch is cut into parts) where they have become one.
fn places(
    graph: &Rewriter<'_>,
    (step, variable): (&TrainingNodes, &Arc<str>),
    gradients: &[Endpoint],
    (applied, reads): (Option<Endpoint>, &[(NodeId, usize)]),
    is_rows: bool,
) -> Vec<Exchanged> {
    // A gradient, or which rows it is of, may be a value of the forward pass, which goes on as it is.
    let is_outside = |&(id, _): &(NodeId, usize)| !matches!(step.region(id), Some(Region::Backward | Region::Forward));
    let leaving = |&value: &Endpoint| {
        let readers = graph.readers(value).into_iter().filter(is_outside).collect();
        Exchanged { value, readers, variable: variable.clone() }
    };
    match (gradients, applied) {
        ([], Some(value)) => vec![Exchanged { value, readers: reads.to_vec(), variable: variable.clone() }],
        ([_, _, ..], Some(applied)) => match meeting_point(graph, gradients, applied, is_rows) {
            Some(value) => vec![Exchanged { value, readers: graph.readers(value), variable: variable.clone() }],
            None => gradients.iter().map(leaving).collect(),
        },
        _ => gradients.iter().map(leaving).collect(),
    }
}

/// The first value on the way to `applied` that depends on all `gradients` and is as large as they are; if they are rows, there may
/// be more of them.
fn meeting_point(graph: &Rewriter<'_>, gradients: &[Endpoint], applied: Endpoint, is_rows: bool) -> Option<Endpoint> {
    let ends: HashSet<NodeId> = gradients.iter().map(|gradient| gradient.node).collect();
    let (mut between, mut open) = (HashSet::new(), vec![applied.node]);
    while let Some(id) = open.pop() {
        if !ends.contains(&id) && between.insert(id) {
            open.extend(graph.node(id)?.inputs.iter().filter(|at| at.feed().is_none()).map(|at| at.node));
        }
    }
    let mut n_behind: HashMap<NodeId, usize> = HashMap::new();
    for &gradient in gradients {
        let (mut seen, mut open) = (HashSet::new(), vec![gradient]);
        while let Some(at) = open.pop() {
            for (reader, _) in graph.readers(at) {
                if between.contains(&reader) && seen.insert(reader) {
                    *n_behind.entry(reader).or_default() += 1;
                    let n_outputs = graph.node(reader)?.outputs.len() as u32;
                    open.extend((0..n_outputs).map(|index| Endpoint { node: reader, index }));
                }
            }
        }
    }
    let is_behind_all = |id: &NodeId| n_behind.get(id) == Some(&gradients.len());
    let like = &graph.node(gradients[0].node)?.outputs[gradients[0].index as usize];
    let mut found = n_behind.keys().filter(|id| is_behind_all(id)).filter_map(|&id| {
        let node = graph.node(id)?;
        let is_first = !node.inputs.iter().any(|at| is_behind_all(&at.node));
        let [output] = &node.outputs[..] else { return None };
        let is_as_large = if is_rows { output.shape.rank() == like.shape.rank() } else { output.shape == like.shape };
        let is_alike = output.dtype == like.dtype && is_as_large;
        (is_first && is_alike).then_some(Endpoint { node: id, index: 0 })
    });
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

/// What is exchanged: nodes are named after it.
const GRADIENTS: &str = "gradients";
const STATE: &str = "state";

/// These values in their order, so many at a time as are exchanged together.
fn buckets(graph: &Rewriter<'_>, what: &str, values: Vec<Exchanged>, sizes: BucketSizes) -> Result<Vec<Bucket>> {
    let values: Vec<Exchanged> = values.into_iter().filter(|exchanged| !exchanged.readers.is_empty()).collect();
    if values.is_empty() {
        return Ok(Vec::new());
    }
    let mut buckets: Vec<Bucket> = Vec::new();
    let conditional = graph.conditional()?;
    for exchanged in values {
        let output = graph.node(exchanged.value.node).and_then(|node| node.outputs.get(exchanged.value.index as usize));
        let output = output.ok_or_else(|| Error::internal("a gradient is not in the graph"))?;
        if let Some(node) = graph.node(exchanged.value.node).filter(|_| conditional.holds(exchanged.value.node)) {
            return Err(Error::unimplemented(format!(
                "ranks cannot exchange what {} '{}' computes, which a step may skip or repeat: it is in a branch or a loop; move the \
                 update out of it",
                node.op(),
                node.name
            )));
        }
        let size = output.dtype.size().unwrap_or(0);
        let n_bytes = output.shape.n_elements().unwrap_or(0).saturating_mul(size);
        let dtype = output.dtype;
        let open = buckets.iter_mut().enumerate().rev().find(|(_, bucket)| bucket.dtype == dtype);
        // A part of a batch may be computed after the update of the part before.
        let is_later = |bucket: &Bucket| what == STATE && bucket.leads_to(graph, exchanged.value);
        let fits = |i: usize, bucket: &Bucket| bucket.n_bytes.saturating_add(n_bytes) <= sizes.of(i == 0);
        match open.filter(|(i, bucket)| fits(*i, bucket) && !is_later(bucket)) {
            Some((_, bucket)) => bucket.add(exchanged, n_bytes),
            None => buckets.push(Bucket { dtype, n_bytes, values: vec![exchanged] }),
        }
    }
    Ok(buckets)
}

/// Whether the gradients of this run are exchanged in another way than whole. An error if the run is no step of ranks that keep
/// something between steps.
fn is_smaller_now(graph: &Rewriter<'_>, how: Exchange) -> Result<bool> {
    if !how.keeps_the_rest() {
        return Ok(false);
    }
    let is_compressed = graph.find(COMPRESSED_STEP).is_some();
    check_is_step(graph, is_compressed)?;
    Ok(is_compressed || !matches!(how, Exchange::OneBitAdam { .. }))
}

/// Whether [`DataParallel::steps`] has made a place for what is not sent of a gradient.
fn is_kept_for(graph: &Rewriter<'_>, exchanged: &Exchanged) -> bool {
    graph.find(&unsent(&exchanged.variable)).is_some()
}

/// Exchanges the gradients of a bucket in another way than whole.
fn exchange_smaller(graph: &mut Rewriter<'_>, bucket: &Bucket, step: &TrainingNodes, how: Exchange) -> Result<()> {
    match how {
        Exchange::TopK(fraction) => top_k::exchange(graph, bucket, fraction, step.op),
        Exchange::PowerSgd(_) => power_sgd::exchange(graph, bucket, step.op),
        Exchange::OneBitAdam { warm_up } => one_bit_adam::exchange(graph, bucket, &step.variables, warm_up, step.op),
        Exchange::Whole | Exchange::As(_) => Ok(()),
    }
}

/// Puts all-reduces behind these values, in buckets, in their order.
pub(super) fn exchange(
    graph: &mut Rewriter<'_>,
    what: &str,
    values: Vec<Exchanged>,
    sizes: BucketSizes,
    place: ExchangePlace,
) -> Result<()> {
    let buckets = buckets(graph, what, values, sizes)?;
    let mut nodes = Vec::with_capacity(buckets.len());
    for (i, bucket) in buckets.iter().enumerate() {
        let inputs: Vec<Endpoint> = bucket.values.iter().map(|exchanged| exchanged.value).collect();
        let (name, mut attrs) = (format!("data_parallel/{what}_{i}"), attrs([("reduction", "mean")]));
        if place == ExchangePlace::Devices {
            attrs.set(AWAITED_LATER, true);
        }
        nodes.push(add_collective(graph, "KoloAllReduce", &name, &inputs, attrs, place)?);
    }
    let last = nodes.last().copied();
    for (bucket, exchange) in buckets.iter().zip(nodes) {
        // When the last bucket is enqueued, so is all that can run beside the exchanges. A later bucket of state may depend on what an
        // earlier one updates, so each of those is awaited by itself.
        let last = if what == STATE { Some(exchange) } else { last };
        let node = match (place, last) {
            (ExchangePlace::Devices, Some(last)) => await_exchange(graph, what, exchange, bucket.values.len(), last)?,
            _ => exchange,
        };
        for (index, exchanged) in bucket.values.iter().enumerate() {
            graph.redirect_inputs(&exchanged.readers, Endpoint { node, index: index as u32 })?;
        }
    }
    Ok(())
}

/// The attribute of an all-reduce whose tensors another node waits for.
const AWAITED_LATER: &str = "awaited_later";

/// A node that passes on the `n` tensors of an exchange between devices when it is done, not before `last`.
fn await_exchange(graph: &mut Rewriter<'_>, what: &str, exchange: NodeId, n: usize, last: NodeId) -> Result<NodeId> {
    let values: Vec<Endpoint> = (0..n as u32).map(|index| Endpoint { node: exchange, index }).collect();
    let name = format!("data_parallel/await_{what}");
    let node = graph.add("KoloAwaitExchange", &name, &values, attrs([("group", WORLD)]))?;
    if last != exchange {
        graph.order_after(node, last);
    }
    Ok(node)
}

/// What is exchanged at a time.
pub(super) struct Bucket {
    pub dtype: DType,
    n_bytes: usize,
    pub values: Vec<Exchanged>,
}

impl Bucket {
    /// Whether a value depends on what reads the values of this bucket.
    fn leads_to(&self, graph: &Rewriter<'_>, value: Endpoint) -> bool {
        let readers = self.values.iter().flat_map(|exchanged| &exchanged.readers);
        graph.reaches(&readers.map(|(id, _)| *id).collect::<Vec<NodeId>>(), value.node)
    }

    fn add(&mut self, exchanged: Exchanged, n_bytes: usize) {
        self.n_bytes += n_bytes;
        self.values.push(exchanged);
    }
}

/// A collective among all ranks.
pub(super) fn add_collective(
    graph: &mut Rewriter<'_>,
    op: &str,
    name: &str,
    inputs: &[Endpoint],
    mut attrs: Attrs,
    place: ExchangePlace,
) -> Result<NodeId> {
    attrs.set("group", WORLD);
    let node = graph.add(op, name, inputs, attrs)?;
    if place == ExchangePlace::Host {
        let host = DeviceSpec::parse("/device:CPU:0")?;
        graph.edit(node, |node| node.device = host);
    }
    Ok(node)
}

/// The rows of all ranks, one rank after the other. Ranks have different numbers of them if their shares of a batch differ.
fn gather(graph: &mut Rewriter<'_>, what: &str, at: Endpoint, place: ExchangePlace) -> Result<Endpoint> {
    let name = format!("data_parallel/{what}");
    let n_rows = graph.node(at.node).and_then(|node| node.outputs.get(at.index as usize)?.shape.dim(0));
    let op = if n_rows.is_some() { "KoloAllGather" } else { "KoloAllGatherUneven" };
    let node = add_collective(graph, op, &name, &[at], Attrs::default(), place)?;
    Ok(Endpoint { node, index: 0 })
}

fn divide(graph: &mut Rewriter<'_>, sum: Endpoint, n: usize) -> Result<Endpoint> {
    let dtype = graph.node(sum.node).map_or(DType::F32, |node| node.outputs[0].dtype);
    let attrs = attrs([("dtype", AttrValue::Type(dtype)), ("value", AttrValue::Tensor(float(n as f64, dtype)?))]);
    let n = graph.add("Const", "data_parallel/n_ranks", &[], attrs)?;
    let inputs = [sum, Endpoint { node: n, index: 0 }];
    let node = graph.add("RealDiv", "data_parallel/mean", &inputs, Attrs::default())?;
    Ok(Endpoint { node, index: 0 })
}

/// Makes whatever writes to variables wait for all collectives.
fn update_at_the_end(graph: &mut Rewriter<'_>) -> Result<()> {
    let conditional = graph.conditional()?;
    let is_collective =
        |(id, node): &(NodeId, &std::sync::Arc<kolo_graph::Node>)| node.def.group.is_some() && !conditional.holds(*id);
    let collectives: Vec<NodeId> = graph.iter().filter(is_collective).map(|(id, _)| id).collect();
    if collectives.is_empty() {
        return Ok(());
    }
    // What collectives depend on cannot wait for them.
    let (mut before, mut open) = (HashSet::new(), collectives.clone());
    while let Some(id) = open.pop() {
        if let Some(node) = graph.node(id).filter(|_| before.insert(id)) {
            open.extend(node.inputs.iter().filter(|at| at.feed().is_none()).map(|at| at.node));
            open.extend(&node.control_inputs);
        }
    }
    let writes: Vec<NodeId> = graph
        .iter()
        .filter(|(id, node)| node.def.effects == Effects::Writes && !before.contains(id))
        .filter(|(id, _)| !conditional.looped.contains(id))
        .map(|(id, _)| id)
        .collect();
    let met = graph.add("NoOp", "data_parallel/all_met", &[], Attrs::default())?;
    let host = DeviceSpec::parse("/device:CPU:0")?;
    graph.edit(met, |node| {
        node.device = host;
        node.control_inputs = collectives;
    });
    writes.into_iter().for_each(|write| graph.order_after(write, met));
    Ok(())
}

/// Averages what the step writes to variables beside those that it trains.
fn average_state(
    graph: &mut Rewriter<'_>,
    training: &Training,
    step: &TrainingNodes,
    sizes: BucketSizes,
    place: ExchangePlace,
) -> Result<()> {
    let written = written_from_data(graph, training, step).into_iter().map(|written| written.exchanged).collect();
    exchange(graph, STATE, written, sizes, place)
}

/// A value that a step writes to a variable.
pub(super) struct Written {
    pub exchanged: Exchanged,
    pub owner: NodeId,
}

/// What a step writes from the data of one rank to variables beside those that it trains.
pub(super) fn written_from_data(graph: &Rewriter<'_>, training: &Training, step: &TrainingNodes) -> Vec<Written> {
    let mut trained: HashSet<&str> = training.scalars.iter().map(|slot| &*slot.variable).collect();
    for variable in &training.variables {
        trained.insert(&variable.name);
        trained.extend(variable.slots.iter().map(|slot| &*slot.variable));
    }
    let mut is_data = HashMap::new();
    let mut written = Vec::new();
    for (id, node) in graph.iter() {
        let (Effects::Writes, None, [variable, value]) = (node.def.effects, node.def.update, &node.inputs[..]) else {
            continue;
        };
        let is_float = graph.node(value.node).is_some_and(|node| node.outputs[value.index as usize].dtype.is_float());
        let Some((owner, name)) = owner(graph, *variable).filter(|_| is_float) else { continue };
        let is_kept = name.ends_with(&unsent(""));
        if !trained.contains(&*name) && !is_kept && step.region(id) != Some(Region::Backward) {
            written.push(Written {
                exchanged: Exchanged { value: *value, readers: vec![(id, 1)], variable: name },
                owner,
            });
        }
    }
    written.retain(|written| depends_on_data(graph, written.exchanged.value, &mut is_data));
    written
}

/// The variable that a reference or a handle leads to, and its name.
fn owner(graph: &Rewriter<'_>, mut at: Endpoint) -> Option<(NodeId, Arc<str>)> {
    loop {
        let node = graph.node(at.node)?;
        match node.def.effects {
            Effects::Owns(_) => return Some((at.node, node.name.clone())),
            _ => at = *node.inputs.first()?,
        }
    }
}

/// Whether what a node gives is the same on all ranks of the training, since they have exchanged it.
fn is_alike(node: &Node) -> bool {
    let group = node.def.group.and_then(|attr| node.attrs.str(attr).ok());
    node.def.alike_on_all_ranks && group == Some(WORLD)
}

/// Whether a value depends on what the step is fed, reads or draws, and not on variables alone.
fn depends_on_data(graph: &Rewriter<'_>, value: Endpoint, known: &mut HashMap<NodeId, bool>) -> bool {
    // Each node is looked at twice: to open what it needs, and to conclude from that. A loop's way back counts as no.
    let mut open = vec![(value, false)];
    while let Some((at, is_done)) = open.pop() {
        if graph.is_fed(at) {
            known.insert(at.node, true);
            continue;
        }
        let Some(node) = graph.node(at.node) else { continue };
        match (is_done, node.def.effects) {
            (true, _) => {
                let found = node.inputs.iter().any(|input| known.get(&input.node) == Some(&true));
                known.insert(at.node, found);
            }
            (false, _) if known.contains_key(&at.node) => {}
            (false, Effects::Reads | Effects::Owns(_)) => drop(known.insert(at.node, false)),
            // What all ranks have exchanged they have alike.
            (false, _) if is_alike(node) => drop(known.insert(at.node, false)),
            (false, Effects::Random | Effects::Uses | Effects::Outside) => drop(known.insert(at.node, true)),
            (false, _) => {
                known.insert(at.node, false);
                open.push((at, true));
                open.extend(node.inputs.iter().map(|input| (*input, false)));
            }
        }
    }
    known.get(&value.node) == Some(&true)
}

#[cfg(test)]
#[path = "data_parallel_tests.rs"]
#[allow(clippy::unwrap_used)]
mod tests;
