//! Makes a trainer: adds what is missing to the graph, opens the session, and initialises or restores the variables.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Graph, Output};
use kolo_runtime::SessionConfig;

use super::{Checkpoints, Model, Trainer, read_position};
use crate::parallel::{Activity, DataParallel, ElasticRank, Steps, World, trains_batch_norm};
use crate::strategy::Strategy;
use crate::train::ranks::{Ranks, TrainerState, mean_of_ranks};
use crate::train::saver::{SaverBuilder, check_writable};
use crate::train::step_calls::StepCalls;
use crate::train::worker::Worker;
use crate::train::{SessionSource, global_step_or_create, read_global_step};

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
    /// Local and without checkpoints.
    pub(super) fn new(graph: &'g Graph, model: Model<'g>) -> TrainerBuilder<'g> {
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
        let saver = SaverBuilder::new(graph).max_to_keep(keep).build()?;
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
