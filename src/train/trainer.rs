//! A training loop for those who want none of their own: fit, evaluate, predict.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Error, Result, Shape, Tensor};
use kolo_graph::{Graph, Operation, Output, Variable};
use kolo_runtime::{Callable, Session, SessionConfig};
use smallvec::SmallVec;

use super::callback::{Callback, EpochReport, Flow, StepReport};
use super::own_state::{OfAllRanks, remove_orphans, write_beside};
use super::ranks::{Ranks, SaidByRank, TrainerState, check_evaluated, mean_of_ranks, shares};
use super::saver::check_writable;
use super::step_calls::StepCalls;
use super::worker::Worker;
use super::{BackgroundSave, Every, Restored, Saver, SessionSource, Timer, global_step_or_create, read_global_step};
use crate::data::{Dataset, Position};
use crate::parallel::{
    Activity, DataParallel, ElasticRank, ExchangeReport, ReduceOp, SlowRank, Steps, World, trains_batch_norm,
};
use crate::strategy::Strategy;

/// What a [`Trainer`] trains: where the columns of a batch go, what to make small and how, and what else to watch.
#[derive(Clone)]
pub struct Model<'g> {
    inputs: Vec<Output<'g>>,
    loss: Output<'g>,
    train_op: Operation<'g>,
    metrics: Vec<(String, Output<'g>)>,
    train_feeds: Vec<(Output<'g>, Tensor)>,
    evaluation: Option<Vec<Output<'g>>>,
}

impl<'g> Model<'g> {
    /// A model whose `inputs` take the columns of the data, in order; whose `loss` is a scalar, the mean over the batch; and
    /// which `train_op` improves by one step. It should count the global step.
    pub fn new(inputs: &[Output<'g>], loss: Output<'g>, train_op: Operation<'g>) -> Model<'g> {
        Model {
            inputs: inputs.to_vec(),
            loss,
            train_op,
            metrics: Vec::new(),
            train_feeds: Vec::new(),
            evaluation: None,
        }
    }

    /// A further scalar to report, such as an accuracy; the mean over the batch.
    pub fn metric(mut self, name: &str, value: Output<'g>) -> Self {
        self.metrics.push((name.to_owned(), value));
        self
    }

    /// Evaluates with another loss and other metrics (as many as there are, in their order): those of a copy of the model
    /// that takes batches of any size, say.
    pub fn evaluate_with(mut self, loss: Output<'g>, metrics: &[Output<'g>]) -> Self {
        self.evaluation = Some(std::iter::once(loss).chain(metrics.iter().copied()).collect());
        self
    }

    /// Feeds this while training, and not while evaluating: a flag for dropout, say, that is false by default.
    pub fn while_training(mut self, output: Output<'g>, value: impl Into<Tensor>) -> Self {
        self.train_feeds.push((output, value.into()));
        self
    }

    /// Where the columns of a batch go.
    pub fn inputs(&self) -> &[Output<'g>] {
        &self.inputs
    }

    /// What is made small.
    pub fn loss(&self) -> Output<'g> {
        self.loss
    }

    /// One step.
    pub fn train_op(&self) -> Operation<'g> {
        self.train_op
    }

    /// Fed while training.
    pub fn train_feeds(&self) -> &[(Output<'g>, Tensor)] {
        &self.train_feeds
    }

    /// What else is watched, by name.
    pub(crate) fn metrics(&self) -> &[(String, Output<'g>)] {
        &self.metrics
    }

    /// The mean loss and metrics over `data` with the variables of `session`.
    pub fn evaluate(&self, session: &Arc<Session>, data: &Dataset) -> Result<Evaluation> {
        self.evaluation_of(self.sums(session, data)?)
    }

    /// The loss, the metrics and the number 1, each summed over the samples of `data`.
    fn sums(&self, session: &Arc<Session>, data: &Dataset) -> Result<Vec<f64>> {
        let evaluate = session.make_callable(&self.inputs, &self.evaluated(), &[])?;
        let mut sums = vec![0.0f64; 2 + self.metrics.len()];
        for batch in data.batches()? {
            let batch = batch?;
            let values = self.run(&evaluate, &batch.tensors, &[])?;
            let values = values.iter().map(number).collect::<Result<Vec<f64>>>()?;
            sums.iter_mut()
                .zip(values.iter().chain([&1.0]))
                .for_each(|(sum, value)| *sum += value * batch.len() as f64);
        }
        Ok(sums)
    }

    fn evaluation_of(&self, sums: Vec<f64>) -> Result<Evaluation> {
        let n_samples = sums.last().copied().unwrap_or(0.0);
        if n_samples == 0.0 {
            return Err(Error::invalid_argument("there is nothing to evaluate on: the data has no samples"));
        }
        let mean = |sum: &f64| sum / n_samples;
        let names = self.metrics.iter().map(|(name, _)| name.clone());
        let metrics = names.zip(sums[1..].iter().map(mean)).collect();
        Ok(Evaluation { loss: mean(&sums[0]), metrics, n_samples: n_samples as usize })
    }

    /// Loss and metrics as evaluation takes them.
    fn evaluated(&self) -> Vec<Output<'g>> {
        let watched = || std::iter::once(self.loss).chain(self.metrics.iter().map(|(_, value)| *value)).collect();
        self.evaluation.clone().unwrap_or_else(watched)
    }

    fn run(&self, callable: &Callable, tensors: &[Tensor], also: &[(Output<'g>, Tensor)]) -> Result<Vec<Tensor>> {
        let wanted = self.inputs.len();
        if tensors.len() != wanted {
            return Err(Error::invalid_argument(format!(
                "the data has {} columns; the model has {wanted} inputs",
                tensors.len()
            )));
        }
        let feeds: SmallVec<[&Tensor; 4]> = tensors.iter().chain(also.iter().map(|(_, value)| value)).collect();
        callable.call(&feeds)
    }
}

/// Runs training, evaluation and prediction over data sets.
///
/// ```
/// use kolo::data::Dataset;
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::train::{Model, Trainer, global_step_or_create};
/// use kolo::{Tensor, ops};
///
/// let g = kolo::graph();
/// let x = g.placeholder::<f32>("x", [None, Some(1)]);
/// let y = g.placeholder::<f32>("y", [None, Some(1)]);
/// let w = g.variable("w", [[0.0f32]]);
/// let loss = ops::mean_all(ops::square(ops::matmul(x, w.read()) - y));
/// let train_op = Sgd::new(0.1).minimize(loss, Some(global_step_or_create(&g)?))?;
///
/// let data = Dataset::new([Tensor::from([[1.0f32], [2.0]]), Tensor::from([[3.0f32], [6.0]])]).batch(2, false);
/// let mut trainer = Trainer::new(&g, Model::new(&[x, y], loss, train_op)).build()?;
/// trainer.fit(&data.clone().repeat(50), &mut [])?;
/// assert!(trainer.evaluate(&data)?.loss < 1e-6); // w is 3 by now
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct Trainer<'g> {
    graph: &'g Graph,
    model: Model<'g>,
    session: Arc<Session>,
    train: StepCalls<'g>,
    position: Variable<'g>,
    set_position: (Output<'g>, Operation<'g>),
    saver: Saver,
    checkpoints: Option<Checkpoints>,
    running: Option<(i64, BackgroundSave)>,
    /// The step of the newest whole checkpoint, so that it is not written twice.
    saved: Option<i64>,
    stop: Arc<AtomicBool>,
    restored: Option<Restored>,
    /// Whether it goes on from a place in the data.
    is_resumed: bool,
    /// The place in the data after the last step.
    at: Position,
    ranks: Option<Ranks<'g>>,
    /// Whether there are checkpoints, of any rank.
    may_save: bool,
    /// What a step would exchange if gradients went whole.
    whole_bytes: Option<f64>,
    strategy: Option<Strategy>,
    /// Its part in a cluster with parameter servers, and what it fetches in a step.
    worker: Option<(Worker<'g>, Vec<Output<'g>>)>,
    elastic: Option<ElasticRank>,
}

/// Where and how often to save.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    /// The directory, made if it is not there.
    pub dir: PathBuf,
    /// How often.
    pub every: Every,
    /// How many to keep; 0 keeps all.
    pub keep: usize,
}

/// A [`Trainer`] that is about to be made.
pub struct TrainerBuilder<'g> {
    graph: &'g Graph,
    model: Model<'g>,
    source: Option<Box<dyn SessionSource + 'g>>,
    strategy: Option<Strategy>,
    checkpoints: Option<Checkpoints>,
    resume: bool,
    stop: Arc<AtomicBool>,
    world: Option<World>,
    data_parallel: Option<DataParallel>,
    check_every: u64,
    is_uneven: bool,
    state: Option<TrainerState>,
    elastic: Option<ElasticRank>,
}

impl<'g> TrainerBuilder<'g> {
    /// Where the session comes from: a [`SessionConfig`], a [`kolo_runtime::Host`], or a function.
    pub fn source(mut self, source: impl SessionSource + 'g) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// Trains with this strategy a model that was described in its [`scope`](Strategy::scope). Sessions, ranks and servers are then the
    /// strategy's, and batches of the data are global ones. With parameter servers, the chief alone saves, and a trainer fits once.
    pub fn strategy(mut self, strategy: &Strategy) -> Self {
        self.strategy = Some(strategy.clone());
        match strategy.ranks() {
            Some(ranks) => self.data_parallel(ranks),
            None => self,
        }
    }

    /// Saves as training goes on, and when it ends.
    pub fn checkpoints(mut self, checkpoints: Checkpoints) -> Self {
        self.checkpoints = Some(checkpoints);
        self
    }

    /// Goes on from the newest whole checkpoint of the directory, if there is one: variables, global step, and the place in
    /// the data, so that the weights come out bit for bit as if training had not been interrupted.
    pub fn resume(mut self, resume: bool) -> Self {
        self.resume = resume;
        self
    }

    /// Setting this flag ends [`Trainer::fit`] after the current step, with a checkpoint.
    pub fn stop_flag(mut self, stop: Arc<AtomicBool>) -> Self {
        self.stop = stop;
        self
    }

    /// Trains as one of the ranks of `world`, all of which build the same trainer; its source is a configuration that
    /// [`DataParallel::configure`](crate::parallel::DataParallel::configure) has made. Initial values are those of rank 0, which alone restores and saves
    /// checkpoints. [`Trainer::fit`] takes the whole data on every rank, and trains on this rank's rows of each batch; what it
    /// reports is the mean over all ranks. Callbacks run on every rank and must come to the same decisions. Every so many steps,
    /// and at the end, all variables are compared between ranks (see [`TrainerBuilder::check_every`]).
    pub fn world(mut self, world: &World) -> Self {
        self.world = Some(world.clone());
        self
    }

    /// As [`TrainerBuilder::world`], for the ranks that train as `data_parallel` says: also if what they exchange is smaller than their
    /// gradients, or if they meet only now and then.
    pub fn data_parallel(mut self, data_parallel: &DataParallel) -> Self {
        self.data_parallel = Some(data_parallel.clone());
        self.world(data_parallel.world())
    }

    /// Goes on from the state of a trainer of this model, with other ranks: all of them take over the state of the rank that is
    /// farthest, those that have none included.
    pub fn state(mut self, state: Option<TrainerState>) -> Self {
        self.state = state;
        self
    }

    /// Trains as a rank of an elastic training ([`Elastic::train`](crate::parallel::Elastic::train)): with the ranks of its world, from
    /// the state of the one that is farthest. [`Trainer::fit`] keeps the state for the next world, and ends with an error of code
    /// `Aborted` if a rank is lost, or after a step if somebody waits to be let in. Updates have to be atomic
    /// ([`DataParallel::atomic_updates`](crate::parallel::DataParallel::atomic_updates)).
    pub fn elastic(self, rank: &ElasticRank) -> Self {
        TrainerBuilder { elastic: Some(rank.clone()), ..self.world(rank.world()).state(rank.state()) }
    }

    /// Lets batches have any number of rows, also if ranks cannot share them equally: for a model whose loss and metrics are made by
    /// [`mean_over_samples`](crate::parallel::mean_over_samples). Without, such batches are refused. Batch normalisation in training has
    /// to use the statistics of all ranks then ([`DataParallel::synchronised_batch_norm`], given to [`TrainerBuilder::data_parallel`]): the
    /// moving averages of ranks count alike, whatever their numbers of rows, and no rows have no mean.
    pub fn uneven_batches(mut self) -> Self {
        self.is_uneven = true;
        self
    }

    /// How often ranks compare their variables, in steps: 1000 if not said, 0 for only at the end.
    pub fn check_every(mut self, n_steps: u64) -> Self {
        self.check_every = n_steps;
        self
    }

    /// Adds what is missing to the graph, opens the session and initialises or restores the variables.
    pub fn build(self) -> Result<Trainer<'g>> {
        let TrainerBuilder {
            graph,
            model,
            source,
            strategy,
            data_parallel,
            checkpoints,
            resume,
            stop,
            world,
            check_every,
            is_uneven,
            state,
            elastic,
        } = self;
        let steps = match &data_parallel {
            Some(data_parallel) => data_parallel.steps(model.train_op)?,
            None => Steps::same(model.train_op),
        };
        let whole_bytes = data_parallel.as_ref().and_then(|of| of.whole_bytes(model.train_op));
        if is_uneven && steps.meet_now_and_then() {
            return Err(Error::invalid_argument(
                "in uneven batches ranks tell each other in every step how many samples they have, and with local steps they do not meet in \
                 every step; batch the data evenly",
            ));
        }
        let is_synchronised = data_parallel.as_ref().is_some_and(DataParallel::synchronises_statistics);
        let is_one_of_many = world.as_ref().is_some_and(|world| world.size() > 1);
        if is_uneven && is_one_of_many && !is_synchronised && trains_batch_norm(graph) {
            return Err(Error::invalid_argument(
                "in uneven batches a rank may have no rows, which have no mean, and batch normalisation would average its ranks' statistics \
                 as if all had as many; use those of all rows (`DataParallel::synchronised_batch_norm`, given to the trainer by \
                 `TrainerBuilder::data_parallel`), or batch the data evenly",
            ));
        }
        let seat = strategy.as_ref().and_then(Strategy::seat);
        // One process saves for all.
        let is_first =
            world.as_ref().is_none_or(|world| world.rank() == 0) && seat.is_none_or(|seat| seat.worker().is_chief());
        let has_checkpoints = checkpoints.is_some();
        let checkpoints = checkpoints.filter(|_| is_first);
        let make = || {
            global_step_or_create(graph)?;
            Ok::<_, Error>(graph.new_variable("input_position", [0i64, 0, 0]).not_trainable().build())
        };
        let position = strategy.as_ref().map_or_else(make, |strategy| strategy.at_home(graph, make))?;
        let new_position = graph.placeholder::<i64>("input_position/new", [Some(3)]);
        let set_position = (new_position, position.assign(new_position));
        let keep = checkpoints.as_ref().map_or(5, |checkpoints| checkpoints.keep);
        let saver = super::SaverBuilder::new(graph).max_to_keep(keep).build()?;
        if let Some(checkpoints) = &checkpoints {
            check_writable(&checkpoints.dir)?;
            saver.check_fits(&checkpoints.dir)?;
        }
        let init = graph.global_variables_initializer();
        let local_init = graph.local_variables_initializer();
        let mut watched = vec![model.loss];
        watched.extend(model.metrics.iter().map(|(_, output)| *output));
        let own_watched = watched.clone();
        let mut ranks = None;
        if let Some(world) = world {
            world.note(Activity::Preparing);
            let own = Ranks::new(graph, world, position, check_every, is_uneven)?;
            watched.push(own.says);
            watched = mean_of_ranks(graph, &watched)?;
            ranks = Some(own);
        }
        if resume && !has_checkpoints {
            return Err(Error::invalid_argument("there is nothing to resume from without a checkpoint directory"));
        }
        let (session, worker) = match (&strategy, seat, source) {
            (Some(strategy), _, Some(_)) => {
                return Err(Error::invalid_argument(format!(
                    "a trainer with strategy {} was given a source of sessions as well; give their settings to the strategy \
                     (`with_session_config`)",
                    strategy.name()
                )));
            }
            (Some(strategy), Some(seat), None) => {
                let dir = checkpoints.as_ref().filter(|_| resume).map(|checkpoints| checkpoints.dir.as_path());
                let worker = Worker::open(graph, seat, strategy.source()?, dir)?;
                (worker.session()?, Some((worker, watched.clone())))
            }
            (strategy, _, source) => {
                let session = match (strategy, source) {
                    (Some(strategy), _) => strategy.session(graph)?,
                    (None, Some(source)) => source.open(graph)?,
                    (None, None) => SessionConfig::default().open(graph)?,
                };
                session.run_op(init)?;
                session.run_op(local_init)?;
                (session, None)
            }
        };
        let restored = match &checkpoints {
            // Who knows more than the disk does not read it.
            Some(checkpoints) if resume && state.is_none() && worker.is_none() => {
                saver.restore_latest(&session, &checkpoints.dir)?
            }
            _ => None,
        };
        let read_position = || read_position(&session, position);
        let mut resumed = restored.as_ref().map(|_| read_position()).transpose()?;
        if worker.is_some() && resume {
            resumed = Some(read_position()?);
        }
        let mut is_as_saved = restored.is_some();
        if let Some(ranks) = &ranks {
            let going_on = ranks.variables.share(&ranks.world, &session, state.as_ref())?;
            let flag = ranks.world.broadcast(vec![Tensor::scalar(i32::from(resumed.is_some()))], 0)?;
            if !ranks.own.is_empty() {
                let prefix = restored.as_ref().map(|restored| restored.prefix.as_str());
                ranks.own.restore(&ranks.world, &session, prefix)?;
            }
            // What another rank had done since is not on the disk. The checkpoints there are this training's, and go in their turn.
            is_as_saved &= going_on.is_none();
            if let (Some(checkpoints), Some(_)) = (&checkpoints, &going_on)
                && let Err(error) = saver.recover_last_checkpoints(&checkpoints.dir)
            {
                tracing::warn!(target: "kolo::train", "earlier checkpoints will stay: {error}");
            }
            resumed = match going_on {
                Some(position) => Some(position),
                None if flag[0].scalar_value::<i32>()? != 0 => Some(read_position()?),
                None if elastic.as_ref().is_some_and(ElasticRank::is_past_beginning) => {
                    return Err(Error::failed_precondition(
                        "no rank is left that has the state of the training; start all of them again, and go on from a checkpoint",
                    ));
                }
                None => None,
            };
        }
        let saved = match is_as_saved {
            true => read_global_step(&session, graph)?,
            false => None,
        };
        let train_feeds = model.train_feeds.iter().map(|(output, _)| *output);
        let fed: Vec<Output<'g>> = model.inputs.iter().copied().chain(train_feeds).collect();
        let says = ranks.as_ref().map(|ranks| ranks.says);
        let train = StepCalls::new(&session, steps, &fed, (&watched, says), &own_watched)?;
        let evaluated = model.evaluated();
        if evaluated.len() != 1 + model.metrics.len() {
            return Err(Error::invalid_argument(format!(
                "the model has {} metrics, but is evaluated with {}",
                model.metrics.len(),
                evaluated.len().saturating_sub(1)
            )));
        }
        Ok(Trainer {
            graph,
            model,
            session,
            train,
            position,
            set_position,
            saver,
            checkpoints,
            running: None,
            saved,
            stop,
            restored,
            is_resumed: resumed.is_some(),
            at: resumed.unwrap_or_default(),
            ranks,
            may_save: has_checkpoints,
            whole_bytes,
            strategy,
            worker,
            elastic,
        })
    }
}

/// How a call of [`Trainer::fit`] ended.
#[derive(Clone, Debug)]
pub struct FitReport {
    /// The global step.
    pub step: i64,
    /// Steps made by this call.
    pub n_steps: u64,
    /// Samples seen by this call.
    pub n_samples: u64,
    /// The loss of the last step; NaN if there was none.
    pub last_loss: f64,
    /// How long it took.
    pub took: Duration,
    /// True if a callback or the stop flag ended it before the data did.
    pub stopped: bool,
    /// Ranks for which all others had to wait, when that began.
    pub slow_ranks: Vec<SlowRank>,
    /// What this rank has exchanged with others, if there are any.
    pub exchange: Option<ExchangeReport>,
}

impl FitReport {
    /// Of no step.
    pub(super) fn none(step: i64) -> FitReport {
        FitReport {
            step,
            n_steps: 0,
            n_samples: 0,
            last_loss: f64::NAN,
            took: Duration::ZERO,
            stopped: false,
            slow_ranks: Vec::new(),
            exchange: None,
        }
    }
}

/// What [`Trainer::evaluate`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean loss over all samples.
    pub loss: f64,
    /// The metrics by name, means over all samples.
    pub metrics: Vec<(String, f64)>,
    /// How many samples there were.
    pub n_samples: usize,
}

impl<'g> Trainer<'g> {
    /// A trainer of `model`, local and without checkpoints unless told otherwise.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(graph: &'g Graph, model: Model<'g>) -> TrainerBuilder<'g> {
        TrainerBuilder {
            graph,
            model,
            source: None,
            strategy: None,
            checkpoints: None,
            resume: false,
            stop: Arc::default(),
            world: None,
            data_parallel: None,
            check_every: 1000,
            is_uneven: false,
            state: None,
            elastic: None,
        }
    }

    /// The session.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The checkpoint it went on from, if it did.
    pub fn restored(&self) -> Option<&Restored> {
        self.restored.as_ref()
    }

    /// The global step.
    pub fn step(&self) -> Result<i64> {
        Ok(read_global_step(&self.session, self.graph)?.unwrap_or(0))
    }

    /// The place in the data that the variables' values belong to: the next batch to train on.
    pub fn position(&self) -> Result<Position> {
        read_position(&self.session, self.position)
    }

    /// What is needed to go on in another trainer, with other ranks, if this one cannot: after [`Trainer::fit`] has failed
    /// because a rank was lost, and updates were atomic
    /// ([`DataParallel::atomic_updates`](crate::parallel::DataParallel::atomic_updates)). Waits for a checkpoint that is being
    /// written.
    pub fn state(&mut self) -> Result<TrainerState> {
        self.collect_save();
        let Some(ranks) = &self.ranks else {
            return Err(Error::failed_precondition("a trainer that is alone has checkpoints"));
        };
        ranks.variables.state(&self.session, self.step()?, self.at)
    }

    /// Trains on `data` until it ends, or something asks to stop. If the trainer was resumed, the data goes on where it was.
    pub fn fit(&mut self, data: &Dataset, callbacks: &mut [&mut dyn Callback]) -> Result<FitReport> {
        let result = self.fit_in_this_world(data, callbacks);
        if let Some(rank) = self.elastic.clone() {
            // Also after the last step: a rank may be lost while the model is tested.
            rank.keep(self.state().ok());
        }
        result
    }

    fn fit_in_this_world(&mut self, data: &Dataset, callbacks: &mut [&mut dyn Callback]) -> Result<FitReport> {
        let n_ranks = self.ranks.as_ref().map(|ranks| ranks.world.size());
        if let (Some(strategy), true) = (&self.strategy, self.ranks.as_ref().is_some_and(|ranks| !ranks.is_uneven)) {
            strategy.check_batches(data)?;
        }
        let mut batches = match &self.ranks {
            Some(ranks) => shares(data, &ranks.world, ranks.is_uneven)?.batches()?,
            None => match &self.strategy {
                Some(strategy) => strategy.distribute(data)?.batches()?,
                None => data.batches()?,
            },
        };
        if self.is_resumed && self.at != Position::default() {
            batches.restore(self.at)?;
        }
        let per_epoch = data.batches_per_epoch();
        let mut step = self.step()?;
        let mut report = FitReport::none(step);
        let metered = self.ranks.as_ref().map(|ranks| ranks.world.exchanged());
        let mut timer = self.checkpoints.as_ref().map(|checkpoints| Timer::new(checkpoints.every));
        if let Some(timer) = &mut timer {
            timer.acted(step);
        }
        callbacks.iter_mut().try_for_each(|callback| callback.on_begin(step))?;
        let (began, mut last) = (Instant::now(), Instant::now());
        let mut feeds = self.model.train_feeds.clone();
        // Ranks stop after the same step: each says with a step whether it was asked to, and learns from it whether one was.
        let is_asked_alone = |trainer: &Self| trainer.ranks.is_none() && trainer.stop.load(Ordering::Relaxed);
        let (mut is_agreed, mut slow_ranks, mut is_met) = (false, Vec::new(), true);
        while !is_agreed && !is_asked_alone(self) {
            let began_step = Instant::now();
            if let Some(ranks) = &self.ranks {
                ranks.world.begin_input(step + 1);
            }
            let Some(batch) = batches.next() else { break };
            let (batch, input) = (batch?, began_step.elapsed());
            let call = self.train.of(step + 1);
            // While they are apart, ranks do not talk.
            let are_apart = call.are_apart;
            let is_free = self.running.as_ref().is_none_or(|(_, save)| save.is_done());
            let saves = timer.as_ref().is_some_and(|timer| is_free && timer.is_due(step + 1));
            feeds.truncate(self.model.train_feeds.len());
            if let Some(ranks) = self.ranks.as_mut().filter(|_| !are_apart) {
                let wants_change = self.elastic.as_ref().is_some_and(ElasticRank::wants_change);
                let wants_to_stop = self.stop.load(Ordering::Relaxed);
                let said = SaidByRank { wants_to_stop, n_rows: batch.len(), saves, wants_change };
                feeds.push((ranks.says, ranks.say(said)));
            }
            self.note(Activity::Computing);
            let mut values = match &mut self.worker {
                None => self.model.run(call.callable, &batch.tensors, &feeds)?,
                Some((worker, watched)) => {
                    let columns = self.model.inputs.iter().copied().zip(batch.tensors.iter().cloned());
                    let feeds: Vec<_> = columns.chain(feeds.iter().cloned()).collect();
                    let Some(values) = worker.step(watched, &feeds, self.model.train_op)? else { break };
                    self.session = worker.session()?;
                    // Other workers make steps as well.
                    step = worker.global_step().unwrap_or(step + 1) - 1;
                    values
                }
            };
            // Before anything else can fail: the variables are one step further.
            self.at = batches.save();
            let mut n_samples = batch.len() * if are_apart { n_ranks.unwrap_or(1) } else { 1 };
            let (mut of_all, mut changes) = (None, false);
            if let (Some(ranks), Some(mean)) = (&mut self.ranks, values.pop_if(|_| n_ranks.is_some() && !are_apart)) {
                let heard = ranks.hear(&mean, began_step, input)?;
                is_agreed = heard.stops;
                changes = heard.changes && !heard.stops;
                n_samples = heard.n_rows;
                slow_ranks.extend(heard.slow);
                if heard.saves && !ranks.own.is_empty() {
                    of_all = Some(ranks.own.gather(&ranks.world, &self.session)?);
                }
            }
            if let Some(ranks) = &mut self.ranks {
                ranks.check(&self.session, false, are_apart)?;
            }
            is_met = !are_apart;
            let values = values.iter().map(number).collect::<Result<Vec<f64>>>()?;
            step += 1;
            let now = Instant::now();
            let loss = values[0];
            if !loss.is_finite() {
                return Err(not_finite(loss, step));
            }
            report = FitReport {
                step,
                n_steps: report.n_steps + 1,
                n_samples: report.n_samples + n_samples as u64,
                last_loss: loss,
                took: began.elapsed(),
                stopped: false,
                slow_ranks: Vec::new(),
                exchange: None,
            };
            let seen = StepReport {
                step,
                epoch: batch.epoch,
                batch: batch.index,
                batches_per_epoch: per_epoch,
                loss,
                metrics: &values[1..],
                names: &self.model.metrics,
                n_samples,
                took: now - last,
            };
            last = now;
            let mut flow = Flow::Continue;
            for callback in callbacks.iter_mut() {
                flow = flow.and(callback.on_step(&seen)?);
            }
            if batch.is_last_of_epoch {
                let epoch = EpochReport { epoch: batch.epoch, step, loss };
                for callback in callbacks.iter_mut() {
                    flow = flow.and(callback.on_epoch_end(&epoch, self)?);
                }
            }
            if let Some(timer) = &mut timer
                && timer.is_due(step)
                && self.running.as_ref().is_none_or(|(_, save)| save.is_done())
                // What ranks have of their own is there if it was said before the step that it would be needed.
                && self.has_all_to_save(are_apart, of_all.is_some())
            {
                timer.acted(step);
                self.save_position(batches.save())?;
                self.write_own(of_all.as_ref(), step)?;
                self.begin_save(step);
            }
            if flow == Flow::Stop {
                report.stopped = true;
                break;
            }
            if changes {
                return Err(Error::aborted(format!(
                    "after step {step} the ranks meet another one, which waits to be let in"
                )));
            }
        }
        report.stopped |= is_agreed || is_asked_alone(self);
        report.slow_ranks = slow_ranks;
        if let (Some(ranks), Some(before)) = (&self.ranks, metered) {
            let about = (self.whole_bytes, ranks.world.exchanges_beside());
            let steps = (report.n_steps, report.took);
            report.exchange = ExchangeReport::between(before, ranks.world.exchanged(), steps, about);
        }
        if let Some(ranks) = &mut self.ranks {
            if !is_met {
                ranks.variables.average(&ranks.world, &self.session)?;
                self.saved = None;
            }
            ranks.check(&self.session, true, false)?;
        }
        self.save_position(batches.save())?;
        self.save_own(step)?;
        if self.worker.is_some() {
            step = self.step()?;
            report.step = step;
        }
        self.finish_save(step)?;
        if let Some((worker, _)) = &mut self.worker {
            self.session = worker.end()?;
        }
        for callback in callbacks.iter_mut() {
            callback.on_end(&report)?;
        }
        Ok(report)
    }

    /// The mean loss and metrics over `data`, without training. Ranks share the data, each sample once, so all of them call it. What is
    /// evaluated must not itself be exchanged by ranks: [`Model::evaluate_with`].
    pub fn evaluate(&self, data: &Dataset) -> Result<Evaluation> {
        let Some(Ranks { world, .. }) = &self.ranks else { return self.model.evaluate(&self.session, data) };
        // What a strategy reports is reduced over its replicas.
        if world.size() > 1 && self.strategy.is_none() {
            check_evaluated(self.graph, &self.model.evaluated())?;
        }
        world.note(Activity::Evaluating);
        let sums = self.model.sums(&self.session, &data.clone().shard(world.rank(), world.size()))?;
        let sums = world.all_reduce(vec![Tensor::from(sums)], ReduceOp::Sum)?;
        self.model.evaluation_of(sums[0].data::<f64>()?.to_vec())
    }

    /// `output` for every sample of `data`, batch by batch joined along the first dimension. Only the inputs that the output
    /// depends on are used; `data` may have fewer columns than the model has inputs.
    pub fn predict(&self, data: &Dataset, output: Output<'g>) -> Result<Tensor> {
        let mut parts = Vec::new();
        for batch in data.batches()? {
            let batch = batch?;
            let feeds: Vec<(Output<'g>, Tensor)> =
                self.model.inputs.iter().copied().zip(batch.tensors.iter().cloned()).collect();
            let mut values = self.session.run(&[output], &feeds, &[])?;
            parts.extend(values.pop());
        }
        join_rows(&parts)
    }

    /// Writes a checkpoint now, if there is a directory for them, and waits for it.
    pub fn save(&mut self) -> Result<Option<String>> {
        let step = self.step()?;
        // The caller may have changed variables since the step was saved.
        self.collect_save();
        self.saved = None;
        self.save_own(step)?;
        self.finish_save(step)?;
        Ok(self.saver.last_checkpoints().pop())
    }

    /// Where checkpoints go.
    pub fn checkpoint_dir(&self) -> Option<&Path> {
        self.checkpoints.as_ref().map(|checkpoints| checkpoints.dir.as_path())
    }

    /// Whether a checkpoint can be written now.
    fn has_all_to_save(&self, are_apart: bool, has_own: bool) -> bool {
        !are_apart && self.ranks.as_ref().is_none_or(|ranks| has_own || ranks.own.is_empty())
    }

    /// Writes what ranks have of their own beside the checkpoint that comes next.
    fn write_own(&self, of_all: Option<&OfAllRanks>, step: i64) -> Result<()> {
        match (&self.checkpoints, of_all) {
            (Some(checkpoints), Some(of_all)) => {
                // The save before is done.
                remove_orphans(&checkpoints.dir);
                write_beside(of_all, &checkpoints.dir, step)
            }
            _ => Ok(()),
        }
    }

    /// The same, where all ranks know that a checkpoint comes.
    fn save_own(&mut self, step: i64) -> Result<()> {
        self.collect_save();
        let Some(ranks) = self.ranks.as_ref().filter(|ranks| !ranks.own.is_empty() && self.may_save) else {
            return Ok(());
        };
        let of_all = ranks.own.gather(&ranks.world, &self.session)?;
        self.write_own(Some(&of_all), step)
    }

    fn save_position(&self, position: Position) -> Result<()> {
        if self.checkpoints.is_none() {
            return Ok(());
        }
        let (new, assign) = self.set_position;
        let parts = [position.epoch as i64, position.sample as i64, position.seed as i64];
        self.session.run(&[], &[(new, Tensor::from(parts))], &[assign]).map(|_| ())
    }

    /// Says what this rank is busy with, if it is one of several.
    fn note(&self, activity: Activity) {
        if let Some(ranks) = &self.ranks {
            ranks.world.note(activity);
        }
    }

    /// Training is worth more than one checkpoint: a save that cannot begin is reported, and the next one tried in its time.
    fn begin_save(&mut self, step: i64) {
        if self.checkpoints.is_some() {
            self.note(Activity::Saving);
        }
        self.collect_save();
        let Some(checkpoints) = &self.checkpoints else { return };
        match self.saver.save_in_background(&self.session, checkpoints.dir.join("model.ckpt"), Some(step)) {
            Ok(save) => self.running = Some((step, save)),
            Err(error) => not_saved(step, &error),
        }
    }

    fn collect_save(&mut self) {
        let Some((step, save)) = self.running.take() else { return };
        match save.wait() {
            Ok(_) => self.saved = Some(step),
            Err(error) => not_saved(step, &error),
        }
    }

    /// The last checkpoint is waited for, and its failure is the caller's to know.
    fn finish_save(&mut self, step: i64) -> Result<()> {
        self.note(if self.checkpoints.is_some() { Activity::Saving } else { Activity::Other });
        self.collect_save();
        let Some(checkpoints) = &self.checkpoints else { return Ok(()) };
        if self.saved != Some(step) {
            self.saver.save(&self.session, checkpoints.dir.join("model.ckpt"), Some(step))?;
            self.saved = Some(step);
        }
        remove_orphans(&checkpoints.dir);
        Ok(())
    }
}

fn not_saved(step: i64, error: &Error) {
    tracing::error!(
        target: "kolo::train",
        "could not save a checkpoint at step {step}: {error}; training goes on, earlier checkpoints stay"
    );
}

fn read_position(session: &Session, position: Variable<'_>) -> Result<Position> {
    match session.fetch(position.read())?.data::<i64>()? {
        [epoch, sample, seed] => Ok(Position { epoch: *epoch as u64, sample: *sample as u64, seed: *seed as u64 }),
        _ => Err(Error::internal("the input position has three parts")),
    }
}

/// A loss that no further step will mend.
pub(crate) fn not_finite(loss: f64, step: i64) -> Error {
    Error::invalid_argument(format!(
        "the loss is {loss} at step {step}; try a smaller learning rate, or clip the gradients"
    ))
}

/// A scalar of any number type.
pub(crate) fn number(value: &Tensor) -> Result<f64> {
    if let Ok(x) = value.scalar_value::<f32>() {
        return Ok(f64::from(x));
    }
    if let Ok(x) = value.scalar_value::<f64>() {
        return Ok(x);
    }
    if let Ok(x) = value.scalar_value::<half::bf16>() {
        return Ok(x.to_f64());
    }
    if let Ok(x) = value.scalar_value::<half::f16>() {
        return Ok(x.to_f64());
    }
    match value.integers()?.as_slice() {
        [x] => Ok(*x as f64),
        _ => Err(Error::invalid_argument(format!(
            "a loss or metric must be a scalar, this one is {}{}; take its mean",
            value.dtype(),
            value.shape()
        ))),
    }
}

/// Tensors of the same type and row shape, one below the other.
pub(super) fn join_rows(parts: &[Tensor]) -> Result<Tensor> {
    let Some(first) = parts.first() else {
        return Err(Error::invalid_argument("there is nothing to predict for: the data has no samples"));
    };
    let row =
        first.shape().get(1..).map(<[usize]>::to_vec).ok_or_else(|| {
            Error::invalid_argument("a prediction must have one row per sample, this one is a scalar")
        })?;
    let mut n_rows = 0;
    for part in parts {
        if part.dtype() != first.dtype() || part.shape().get(1..) != Some(row.as_slice()) {
            return Err(Error::invalid_argument(format!(
                "batches predicted {}{} and {}{}, which cannot be joined",
                first.dtype(),
                first.shape(),
                part.dtype(),
                part.shape()
            )));
        }
        n_rows += part.shape()[0];
    }
    let dims: Vec<usize> = std::iter::once(n_rows).chain(row).collect();
    let mut joined = Tensor::zeros(first.dtype(), Shape::new(&dims)?)?;
    let bytes = joined.host_bytes_mut()?;
    let mut at = 0;
    for part in parts {
        let from = part.host_bytes()?;
        bytes[at..at + from.len()].copy_from_slice(from);
        at += from.len();
    }
    Ok(joined)
}
