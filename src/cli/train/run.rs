//! Runs a recipe, whichever it is: alone, on several devices, or as a worker of a cluster.

use crate::data::Dataset;
use crate::optim::Optimizer;
use crate::parallel::World;
use crate::recipes::{Placement, train_model};
use crate::strategy::Mesh;
use crate::{Error, Result};

use super::cluster::{self, Role};
use super::job::{self, Job, Member};
use super::launch;
use super::options::Common;
use super::recipe::{Defaults, Recipe, RecipeData};

/// Starts `n` ranks, unless the flags make no sense for so many.
pub fn launch(common: &Common, recipe: &dyn Recipe, n: usize) -> Result<()> {
    let fits = |n: usize| Sizes::new(common, recipe.defaults(), n).map(drop);
    fits(n)?;
    launch::launch(&common.ranks, n, common.ranks.sizes_of(n, &fits)?)
}

/// Trains. A rank that loses others goes on with those that are left, and with new ones, from where it was.
pub fn run(common: &Common, recipe: &dyn Recipe) -> Result<()> {
    // What takes long is done before others wait for this rank.
    let batch = Sizes::batch(common, recipe.defaults());
    let data = recipe.data(batch, common.seed)?;
    if !common.ranks.elastic {
        let world = match common.cluster.is_joined() {
            true => None,
            false => common.ranks.world(&common.cluster.security)?,
        };
        let Some(world) = world else { return run_once(common, recipe, &data, None) };
        let (mut member, _) = Member::new(false, common.cluster.with_parent);
        member.world = Some(world);
        return run_once(common, recipe, &data, Some(&mut member));
    }
    let (mut member, lines) = Member::new(common.ranks.replaces_a_rank(), common.cluster.with_parent);
    let fits = |n: usize| Sizes::new(common, recipe.defaults(), n).map(drop);
    let elastic = common.ranks.elastic(&common.cluster.security, &fits, &member.stop, lines)?;
    if let Some(address) = elastic.address() {
        tracing::info!(target: "kolo::train", "this rank listens for others at {address}");
    }
    let trained = elastic.train(|rank| {
        (member.world, member.rank) = (Some(rank.world().clone()), Some(rank.clone()));
        let done = run_once(common, recipe, &data, Some(&mut member));
        // The others learn at once that it has left.
        (member.world, member.rank) = (None, None);
        done
    })?;
    if trained.is_none() {
        eprintln!("kolo: the training has ended while this process waited to be let in");
    }
    Ok(())
}

fn run_once(common: &Common, recipe: &dyn Recipe, data: &RecipeData, member: Option<&mut Member>) -> Result<()> {
    let n_ranks = member.as_ref().and_then(|member| member.world.as_ref()).map_or(1, World::size);
    let sizes = Sizes::new(common, recipe.defaults(), n_ranks)?;
    let role = common.cluster.role()?;
    let train = data.train.clone().shuffle(common.seed).batch(sizes.batch, true);
    let shares_batches = role.as_ref().map_or(Ok(false), |role| common.shares_batches(role))?;
    let per_epoch = batches_per_epoch(&train, role.as_ref().filter(|_| !shares_batches), sizes.batch)?;
    let by_data = per_epoch.saturating_mul(sizes.epochs);
    let steps = Steps::new(common, &recipe.defaults(), role.as_ref(), shares_batches, by_data);
    let (kind, rate) = recipe.defaults().optimizer;
    let optimizer = common.make_optimizer(kind, rate, steps.of_schedule, steps.warm_up)?;
    let graph = crate::graph();
    graph.set_seed(common.seed as i64);
    let inputs = recipe.inputs(&graph);
    let (epochs, unit, test) = (sizes.epochs, recipe.unit(), data.test.clone());
    let build = |optimizer: &dyn Optimizer, placement: &Placement| {
        let model = train_model(&graph, placement, optimizer, &inputs, |inputs| recipe.build(inputs))?;
        Ok::<_, Error>((model, recipe.closing(&graph, &inputs, common.seed)?))
    };
    match role {
        None => {
            let variables_on = common.variables_on(&sizes.towers);
            let world = member.as_ref().and_then(|member| member.world.as_ref());
            if world.is_none_or(|world| world.rank() == 0)
                && !member.as_ref().is_some_and(|member| member.is_under_way())
            {
                let mesh = Mesh { devices: common.replica_devices()?, process: 0, n_processes: n_ranks };
                common.announce_strategy(&mesh, mesh.n_replicas(), sizes.batch)?;
            }
            let placement = Placement { device: common.device.clone(), towers: sizes.towers, variables_on };
            let (model, closing) = build(&*optimizer, &placement)?;
            let train = train.repeat(epochs).prefetch(2);
            job::run(&graph, common, Job { model, train, test, epochs, unit, last_step: steps.last, closing }, member)
        }
        Some(role) => {
            let seat = role.seat();
            let updates = seat.optimizer(optimizer);
            let setter = seat.setter(common.device.as_deref())?;
            // As the other strategies do it: the graph decides about the initial weights. What is on no device is where the setter says.
            let towers = if common.strategy.is_some() { vec![String::new()] } else { Vec::new() };
            let placement = Placement { variables_on: Some(String::new()), towers, device: None };
            let (model, closing) = setter.apply(&graph, || build(&updates, &placement))??;
            if role.is_chief() {
                let mesh = Mesh { devices: vec![String::new()], process: 0, n_processes: role.n_workers };
                common.announce_strategy(&mesh, if seat.is_in_sync() { role.n_workers } else { 1 }, sizes.batch)?;
            }
            // Its share of the data as often as it takes: the global step says when to stop.
            let (task, n) = (role.replica, role.n_workers);
            let share = if shares_batches { train.split_batches(task, n) } else { train.shard(task, n) };
            let train = share.repeat_forever().prefetch(6);
            let job = Job { model, train, test, epochs, unit, last_step: steps.last, closing };
            cluster::run(&graph, common, job, &role, &updates)
        }
    }
}

/// What the flags and the recipe say, checked.
struct Sizes {
    batch: usize,
    epochs: u64,
    towers: Vec<String>,
}

impl Sizes {
    /// Samples of a batch, of all ranks together.
    fn batch(common: &Common, defaults: Defaults) -> usize {
        common.batch_size.unwrap_or(defaults.batch)
    }

    /// For one of so many ranks.
    fn new(common: &Common, defaults: Defaults, n_ranks: usize) -> Result<Sizes> {
        let batch = Sizes::batch(common, defaults);
        let epochs = common.epochs.unwrap_or(defaults.epochs);
        let towers = common.towers(n_ranks)?;
        let n_parts = towers.len().max(1) * n_ranks;
        if !batch.is_multiple_of(n_parts) {
            let by = match (common.ranks.micro_batches, n_ranks) {
                (Some(_), _) => format!("cut into {n_parts} equal parts"),
                (None, 1) => format!("shared equally by {n_parts} devices"),
                (None, n) if n == n_parts => format!("shared equally by {n} ranks"),
                (None, n) => format!("shared equally by {n} ranks of {} devices", n_parts / n),
            };
            return Err(Error::invalid_argument(format!(
                "--batch-size {batch} cannot be {by}; try {}",
                batch.next_multiple_of(n_parts)
            )));
        }
        Ok(Sizes { batch, epochs, towers })
    }
}

/// How many batches all data makes. An error if this process has none to train on.
fn batches_per_epoch(train: &Dataset, role: Option<&Role>, batch: usize) -> Result<u64> {
    let n_samples = train.len().unwrap_or(0);
    let share = match role {
        Some(role) => train.clone().shard(role.replica, role.n_workers),
        None => train.clone(),
    };
    let n_workers = role.map_or(1, |role| role.n_workers);
    if share.batches_per_epoch() == Some(0) {
        let most = n_samples / n_workers.max(1);
        let of = if n_workers > 1 { format!(" for {n_workers} workers") } else { String::new() };
        let remedy = match most {
            0 => "give more data".to_owned(),
            most => format!("give --batch-size {most} or less"),
        };
        return Err(Error::invalid_argument(format!(
            "there is not one whole batch to train on: --batch-size is {batch}, and there are {n_samples} samples{of}; \
             {remedy}"
        )));
    }
    Ok(train.batches_per_epoch().unwrap_or(0) as u64)
}

/// Where training ends, in global steps.
struct Steps {
    /// Over how many the learning rate decays.
    of_schedule: u64,
    /// Over how many it warms up.
    warm_up: u64,
    /// The last one, if the data does not end before.
    last: Option<i64>,
}

impl Steps {
    /// `by_data` is how many steps of one process go through the data as often as they should.
    fn new(common: &Common, defaults: &Defaults, role: Option<&Role>, shares_batches: bool, by_data: u64) -> Steps {
        // Workers that update together go through the data in fewer steps, unless it is one batch that they share.
        let global = |steps: u64| match role.filter(|_| !shares_batches) {
            Some(role) => role.seat().global_steps(steps),
            None => steps,
        };
        let flag = common.max_steps.map(i64::unsigned_abs);
        let limit = flag.or_else(|| defaults.steps.map(global));
        let of_schedule = match defaults.steps {
            Some(steps) => limit.unwrap_or(steps),
            None => global(by_data),
        };
        // The data of a worker does not end.
        let last = match (limit, role) {
            (limit, Some(_)) => Some(limit.unwrap_or(u64::MAX).min(global(by_data))),
            (limit, None) => limit,
        };
        let warm_up = defaults.steps.map_or(0, |_| of_schedule / 10);
        Steps { of_schedule, warm_up, last: last.map(|last| i64::try_from(last).unwrap_or(i64::MAX)) }
    }
}
