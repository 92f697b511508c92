//! How ranks exchange gradients: whole, or smaller. What is smaller is not exact, and what a rank has not sent it keeps and adds next
//! time, in variables of its own; [`DataParallel::steps`] adds these to the graph, where they can be initialised and saved.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use kolo_core::{DType, Error, Result};
use kolo_graph::{Graph, Initializer, Operation, Rewriter, TrainedVariable, Training, Variable, VariableKind};

use super::data_parallel::DataParallel;
use super::local_steps::OuterStep;

/// How ranks exchange gradients. Read from text as the command line has it: `whole`, `bf16`, `f16`, `top-k:0.01`, `power-sgd:4`,
/// `1-bit-adam:200`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Exchange {
    /// As they are.
    Whole,
    /// As `bfloat16` or `half`, which halves the bytes of `float`. They are summed in `float`, and rounded once before and once after.
    As(DType),
    /// Of each gradient only this fraction of its elements, the largest; the others are kept and added to the gradient of the next step.
    TopK(f64),
    /// As the product of two matrices of this rank (Vogels et al., "PowerSGD", 2019), which begin where those of the step before ended;
    /// the difference is kept and added to the gradient of the next step. Gradients that are no matrices go whole.
    PowerSgd(usize),
    /// For [`Adam`](crate::optim::Adam) and [`AdamW`](crate::optim::AdamW) (Tang et al., "1-bit Adam", 2021): after so many steps by whole
    /// gradients, the variance stays what it is, and ranks exchange the signs of their momenta, in units of that variance, and keep the
    /// difference. In those units, no momentum counts for more than Adam itself would let it.
    OneBitAdam {
        /// Steps with whole gradients.
        warm_up: u64,
    },
}

/// Steps with whole gradients, if nothing is said.
const WARM_UP: u64 = 200;

/// Gradients of fewer elements go whole: what is saved would be less than what a meeting costs.
pub(super) const SMALLEST: usize = 1024;

impl Exchange {
    /// An error if a number makes no sense.
    pub fn check(self) -> Result<()> {
        match self {
            Exchange::As(dtype) if !matches!(dtype, DType::F16 | DType::BF16) => {
                Err(Error::invalid_argument(format!("gradients are exchanged as bfloat16 or half, not as {dtype}")))
            }
            // A position is sent with each element.
            Exchange::TopK(fraction) if !(fraction > 0.0 && fraction < 0.5) => Err(Error::invalid_argument(format!(
                "top-k:{fraction} exchanges nothing, or more bytes than whole gradients; give a fraction above 0 and below 0.5"
            ))),
            Exchange::PowerSgd(0) => {
                Err(Error::invalid_argument("power-sgd:0 exchanges nothing; give a rank of at least 1"))
            }
            _ => Ok(()),
        }
    }

    /// Whether a rank keeps what it has not sent.
    pub(super) fn keeps_the_rest(self) -> bool {
        matches!(self, Exchange::TopK(_) | Exchange::PowerSgd(_) | Exchange::OneBitAdam { .. })
    }
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exchange::Whole => f.write_str("whole"),
            Exchange::As(DType::BF16) => f.write_str("bf16"),
            Exchange::As(DType::F16) => f.write_str("f16"),
            Exchange::As(dtype) => write!(f, "{dtype}"),
            Exchange::TopK(fraction) => write!(f, "top-k:{fraction}"),
            Exchange::PowerSgd(rank) => write!(f, "power-sgd:{rank}"),
            Exchange::OneBitAdam { warm_up } => write!(f, "1-bit-adam:{warm_up}"),
        }
    }
}

impl FromStr for Exchange {
    type Err = Error;

    fn from_str(text: &str) -> Result<Exchange> {
        let (name, number) = text.split_once(':').map_or((text, None), |(name, number)| (name, Some(number)));
        fn parsed<T: FromStr>(number: &str, text: &str) -> Result<T> {
            number
                .parse()
                .map_err(|_| Error::invalid_argument(format!("'{number}' in '{text}' is not a number that fits")))
        }
        let exchange = match (name, number) {
            ("whole", None) => Exchange::Whole,
            ("bf16", None) => Exchange::As(DType::BF16),
            ("f16", None) => Exchange::As(DType::F16),
            ("top-k", number) => Exchange::TopK(number.map_or(Ok(0.01), |number| parsed(number, text))?),
            ("power-sgd", number) => Exchange::PowerSgd(number.map_or(Ok(4), |number| parsed(number, text))?),
            ("1-bit-adam", number) => {
                Exchange::OneBitAdam { warm_up: number.map_or(Ok(WARM_UP), |number| parsed(number, text))? }
            }
            _ => {
                return Err(Error::invalid_argument(format!(
                    "'{text}' is no way to exchange gradients; there are whole, bf16, f16, top-k:0.01, power-sgd:4 and 1-bit-adam:200"
                )));
            }
        };
        exchange.check()?;
        Ok(exchange)
    }
}

/// What a rank runs for a training step, which may be another operation for some of the steps.
#[derive(Clone, Copy)]
pub struct Steps<'g> {
    usual: Operation<'g>,
    other: Option<(Turn, Operation<'g>)>,
}

/// When a rank runs the other operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// In every so manieth step.
    Every(u64),
    /// In all steps after this one.
    After(u64),
}

impl<'g> Steps<'g> {
    /// A step that is always the same.
    pub(crate) fn same(op: Operation<'g>) -> Steps<'g> {
        Steps { usual: op, other: None }
    }

    /// What to run for the step of this number; the first one is 1. It is the global step after it, so that a training that goes on
    /// from a checkpoint runs the same.
    pub fn at(&self, step: i64) -> Operation<'g> {
        match self.other {
            Some((_, other)) if self.is_other(step) => other,
            _ => self.usual,
        }
    }

    pub(crate) fn is_other(&self, step: i64) -> bool {
        let step = u64::try_from(step).unwrap_or(0);
        match self.other {
            Some((Turn::Every(n), _)) => step.is_multiple_of(n),
            Some((Turn::After(n), _)) => step > n,
            None => false,
        }
    }

    /// The operation of most steps, and another one.
    pub(crate) fn operations(&self) -> (Operation<'g>, Option<Operation<'g>>) {
        (self.usual, self.other.map(|(_, other)| other))
    }

    /// Whether ranks are apart after some steps, until they meet.
    pub(crate) fn meet_now_and_then(&self) -> bool {
        matches!(self.other, Some((Turn::Every(_), _)))
    }
}

/// The operations of a step, by which passes know what it is.
const STEP: &str = "data_parallel/step";
pub(super) const COMPRESSED_STEP: &str = "data_parallel/compressed_step";
pub(super) const MEETING: &str = "data_parallel/meeting";

/// An error unless the run is one that [`DataParallel::steps`] has made: the usual one, or `is_other`.
pub(super) fn check_is_step(graph: &Rewriter<'_>, is_other: bool) -> Result<()> {
    match is_other || graph.find(STEP).is_some() {
        true => Ok(()),
        false => Err(Error::failed_precondition(
            "ranks that exchange gradients in this way keep something between steps: run the operations that `DataParallel::steps` \
             returns for the training step, not the step itself",
        )),
    }
}

/// The variable of a rank for what it has not sent of a gradient.
pub(super) fn unsent(variable: &str) -> String {
    format!("{variable}/unsent")
}

/// Variables that each rank has with values of its own: what it has not sent yet.
pub(crate) const OF_ONE_RANK: &str = "variables_of_one_rank";

impl DataParallel {
    /// What to run for a step of `train`, the operation that an optimizer's `minimize` returned. Adds to the graph what ranks keep between
    /// steps: call it before variables are initialised and savers are made. A [`Trainer`](crate::train::Trainer) that is given this
    /// [`DataParallel`] does all of it. What a rank has not sent yet is in local variables, so
    /// [`Graph::local_variables_initializer`] makes it zero.
    ///
    /// An error if this way to exchange gradients cannot work with the optimizer, or with what else was asked for.
    pub fn steps<'g>(&self, train: Operation<'g>) -> Result<Steps<'g>> {
        let graph = train.graph();
        let exchange = self.exchange_kind();
        self.check()?;
        if !exchange.keeps_the_rest() && self.local_step_count().is_none() {
            return Ok(Steps::same(train));
        }
        let trainings = trainings_of(train);
        if trainings.is_empty() {
            return Err(Error::invalid_argument(format!(
                "'{}' runs no update that an optimizer's `minimize` or `apply_gradients` has added, so what it trains is not known",
                train.name()
            )));
        }
        if graph.operation(STEP).is_ok() {
            return Err(Error::failed_precondition(
                "the graph has the steps of ranks already; describe the model in a new one",
            ));
        }
        let mut kept = Vec::new();
        for variable in trainings.iter().flat_map(|training| &training.variables) {
            kept.extend(self.add_variables(graph, exchange, variable)?.iter().map(|added| added.handle().operation()));
        }
        // So that all that a step may need is there, whatever it fetches.
        let step = |name: &str| graph.group(name, &[&[train], &kept[..]].concat());
        let usual = step(STEP);
        let other = match (self.local_step_count(), exchange) {
            (Some((n, _)), _) => Some((Turn::Every(n), step(MEETING))),
            (None, Exchange::OneBitAdam { warm_up }) => Some((Turn::After(warm_up), step(COMPRESSED_STEP))),
            _ => None,
        };
        graph.check()?;
        Ok(Steps { usual, other })
    }

    /// An error if what was asked for makes no sense, or does not go together.
    pub(crate) fn check(&self) -> Result<()> {
        let exchange = self.exchange_kind();
        exchange.check()?;
        let refused = |what: &str| Err(Error::invalid_argument(what.to_owned()));
        if self.updates_are_atomic() && exchange.keeps_the_rest() {
            return refused(&format!(
                "a rank that dies takes with it what it has not sent of its gradients, and atomic updates (`--elastic`) promise that nothing \
                 is lost; exchange gradients whole, bf16 or f16, not by {exchange}"
            ));
        }
        let Some((n, _)) = self.local_step_count() else { return Ok(()) };
        if n == 0 {
            return refused("local steps: ranks that never meet do not train together; give at least 1");
        }
        if self.updates_are_atomic() {
            return refused(
                "a rank that dies takes with it what it has learnt since the ranks last met, and atomic updates (`--elastic`) promise that \
                 nothing is lost; leave out local steps",
            );
        }
        if exchange != Exchange::Whole {
            return refused(&format!(
                "between two meetings ranks exchange no gradients, and in a meeting whole weights; leave out local steps, or {exchange}"
            ));
        }
        if self.synchronises_statistics() {
            return refused(
                "synchronised batch normalisation meets in every step, and ranks with local steps do not; leave out one of them",
            );
        }
        Ok(())
    }

    /// Adds what ranks keep for a variable.
    fn add_variables<'g>(
        &self,
        graph: &'g Graph,
        exchange: Exchange,
        trained: &TrainedVariable,
    ) -> Result<Vec<Variable<'g>>> {
        let variable = graph.find_variable(&trained.name)?;
        if let Some((_, outer)) = self.local_step_count() {
            if variable.kind() == VariableKind::Reference {
                return Err(Error::unimplemented(format!(
                    "local steps: variable '{}' is a reference; make it a resource variable",
                    trained.name
                )));
            }
            return Ok(outer.map_or(Vec::new(), |outer| outer.add_variables(graph, variable)));
        }
        let Some(shape) = variable.shape().known().filter(|_| is_exchanged_smaller(exchange, trained, &variable))
        else {
            return Ok(Vec::new());
        };
        if let Exchange::OneBitAdam { .. } = exchange {
            super::one_bit_adam::check(trained)?;
        }
        let mut added = graph.device("/device:CPU:0", || {
            let builder = graph.new_variable(&unsent(&trained.name), Initializer::Zeros).shape(shape.clone());
            vec![graph.absolute_scope("", || builder.dtype(variable.dtype()).local().build())]
        });
        graph.add_to_collection(OF_ONE_RANK, &added[0].name());
        if let Exchange::PowerSgd(rank) = exchange {
            added.push(super::power_sgd::add_factor(graph, variable, &shape, rank));
        }
        Ok(added)
    }
}

/// The training steps that an operation runs.
fn trainings_of(train: Operation<'_>) -> Vec<Arc<Training>> {
    let nodes = train.graph().snapshot();
    let (mut seen, mut open) = (HashSet::new(), vec![train.id()]);
    let mut names = HashSet::new();
    while let Some(id) = open.pop().filter(|_| train.is_valid()) {
        if seen.insert(id) {
            let node = nodes.node(id);
            names.insert(node.name.clone());
            open.extend(node.inputs.iter().map(|at| at.node));
            open.extend(&node.control_inputs);
        }
    }
    train.graph().trainings().iter().filter(|training| names.contains(&training.op)).cloned().collect()
}

/// Whether the gradient of a variable is exchanged in another way than whole.
fn is_exchanged_smaller(exchange: Exchange, trained: &TrainedVariable, variable: &Variable<'_>) -> bool {
    let is_float = matches!(variable.dtype(), DType::F32 | DType::F64);
    let gradients = &trained.gradients;
    let is_dense = gradients.iter().all(|(_, parts)| parts.indices().is_none()) && trained.reads.indices().is_none();
    let Some(shape) = variable.shape().known().filter(|_| is_float && is_dense) else { return false };
    match exchange {
        Exchange::TopK(_) | Exchange::OneBitAdam { .. } => shape.n_elements() >= SMALLEST,
        Exchange::PowerSgd(rank) => super::power_sgd::is_worth_it(shape.dims(), rank),
        Exchange::Whole | Exchange::As(_) => false,
    }
}

impl DataParallel {
    /// The bytes that this rank sends in a step for the gradients of `train` if they go whole, by a way that sends as little as any: those
    /// of rows not counted.
    pub(crate) fn whole_bytes(&self, train: Operation<'_>) -> Option<f64> {
        let trainings = trainings_of(train);
        let n = self.world().size() as f64;
        let is_dense = |variable: &&TrainedVariable| variable.reads.indices().is_none();
        let dense = trainings.iter().flat_map(|training| &training.variables).filter(is_dense);
        let bytes: usize = dense.filter_map(|variable| variable.n_bytes).sum();
        (!trainings.is_empty()).then(|| 2.0 * (n - 1.0) / n * bytes as f64)
    }

    /// Ranks train by themselves for `n - 1` steps, and in each `n`th step their weights become the mean of all (local SGD): weights,
    /// the optimizer's slots and what else a step writes from its own data. They exchange no gradients. While they are apart, what a
    /// [`Trainer`](crate::train::Trainer) reports is a rank's own.
    #[must_use]
    pub fn local_steps(self, n: u64) -> DataParallel {
        self.with_local_steps(n, None)
    }

    /// As [`DataParallel::local_steps`], but what the ranks have learnt between two meetings is taken as a gradient, by which an outer
    /// optimizer moves the weights of the last meeting: Nesterov momentum, as in DiLoCo (Douillard et al., 2023).
    #[must_use]
    pub fn outer_steps(self, n: u64, outer: OuterStep) -> DataParallel {
        self.with_local_steps(n, Some(outer))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ways_to_exchange_are_read_and_written() {
        for text in ["whole", "bf16", "f16", "top-k:0.01", "power-sgd:4", "1-bit-adam:200", "top-k:0.25"] {
            assert_eq!(text.parse::<Exchange>().unwrap().to_string(), text);
        }
        assert_eq!("top-k".parse::<Exchange>().unwrap(), Exchange::TopK(0.01));
        for (text, says) in [
            ("gzip", "'gzip' is no way to exchange gradients; there are whole"),
            ("whole:3", "is no way to exchange gradients"),
            ("top-k:0", "give a fraction above 0"),
            ("top-k:0.5", "more bytes than whole gradients"),
            ("top-k:x", "'x' in 'top-k:x' is not a number"),
            ("power-sgd:0", "give a rank of at least 1"),
            ("1-bit-adam:-1", "is not a number that fits"),
        ] {
            let error = text.parse::<Exchange>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
#[allow(clippy::unwrap_used)]
mod trainings;
