//! Conditional accumulators: gradients of many workers, summed up until there are enough of them.
//!
//! A gradient that was computed from variables of an earlier step than the accumulator's is dropped, and its worker is
//! none the wiser. Whoever takes the sum leaves a callback until enough have come; takes are served in order, and each one
//! begins the next step. [`super::dense`] and [`super::sparse`] say how gradients are added; this file is what both share.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_device::Charge;
use kolo_device::cpu::IntraPool;
use kolo_graph::{Effects, Gradient, OpDef, ShapeFn, shape_fns};
use parking_lot::Mutex;

use super::dense::DenseSum;
use super::source::{Described, Source, object};
use super::sparse::{SparseGradient, SparseRoom, SparseSum};
use super::wait::{Waiter, Waits, watch};
use crate::holdings::Holdings;
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, Op, cpu_any, cpu_made};
use crate::{AsyncKernel, CancelToken, Cost, Done, Kernel, KernelCtx, KernelMaker, Registration, Resource};

/// What an accumulator is: all who name it must agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccumulatorSpec {
    /// Whether gradients are whole tensors or some rows of them.
    pub form: Form,
    /// The element type.
    pub dtype: DType,
    /// The shape of the whole, as far as it is known.
    pub shape: PartialShape,
    /// What a take gives.
    pub reduction: Reduction,
}

/// Whether gradients are whole tensors or some rows of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Whole tensors.
    Dense,
    /// Rows with their indices.
    Sparse,
}

/// What a take gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum over the number of gradients (for rows, of gradients that had the row).
    Mean,
    /// The sum.
    Sum,
}

/// A conditional accumulator.
pub struct Accumulator {
    name: Arc<str>,
    spec: AccumulatorSpec,
    /// Where sums and what is taken lie.
    memory: Charge,
    state: Mutex<AccumulatorState>,
}

struct AccumulatorState {
    global_step: i64,
    n_gradients: usize,
    sum: Sum,
    /// The rows of the sum.
    holdings: Holdings,
    takes: VecDeque<Take>,
    next_id: u64,
}

/// What was added up so far.
pub(super) enum Sum {
    Dense(DenseSum),
    Sparse(SparseSum),
}

impl Sum {
    fn new(form: Form) -> Sum {
        match form {
            Form::Dense => Sum::Dense(DenseSum::default()),
            Form::Sparse => Sum::Sparse(SparseSum::default()),
        }
    }
}

struct Take {
    waiter: Waiter,
    n_required: usize,
}

/// A take that is served, or fails: what it gets is worked out without the lock.
struct Taken {
    waiter: Waiter,
    sum: Result<HandedOut>,
}

/// A sum that has left the accumulator, with the memory for what is made of it.
enum HandedOut {
    Dense(DenseSum, usize),
    Sparse(SparseSum, SparseRoom),
}

impl Accumulator {
    /// An accumulator without gradients, at step 0. What it holds counts against the memory that `memory` does.
    pub fn new(name: impl Into<Arc<str>>, spec: AccumulatorSpec, memory: Charge) -> Result<Arc<Accumulator>> {
        let state = AccumulatorState {
            global_step: 0,
            n_gradients: 0,
            sum: Sum::new(spec.form),
            holdings: Holdings::new(memory.another(0)?),
            takes: VecDeque::new(),
            next_id: 0,
        };
        Ok(Arc::new(Accumulator { name: name.into(), spec, memory, state: Mutex::new(state) }))
    }

    /// What it is.
    pub fn spec(&self) -> &AccumulatorSpec {
        &self.spec
    }

    /// How many gradients wait to be taken.
    pub fn n_accumulated(&self) -> usize {
        self.state.lock().n_gradients
    }

    /// Sets the step; gradients of earlier ones will be dropped.
    pub fn set_global_step(&self, step: i64) {
        self.state.lock().global_step = step;
    }

    /// Adds a whole gradient, unless it is of an earlier step.
    pub fn apply(&self, local_step: i64, gradient: Tensor, pool: &IntraPool) -> Result<()> {
        self.check(Form::Dense, gradient.dtype())?;
        self.add(local_step, |state| match &mut state.sum {
            Sum::Dense(sum) => sum.add(gradient, &self.spec.shape, pool, &self.memory),
            Sum::Sparse(_) => Err(self.wrong_form(Form::Dense)),
        })
    }

    /// Adds rows of a gradient, unless it is of an earlier step.
    pub(super) fn apply_sparse(&self, local_step: i64, gradient: &SparseGradient<'_>) -> Result<()> {
        self.check(Form::Sparse, gradient.values.dtype())?;
        self.add(local_step, |state| match &mut state.sum {
            Sum::Sparse(sum) => sum.add(gradient, &self.spec.shape, &mut state.holdings),
            Sum::Dense(_) => Err(self.wrong_form(Form::Sparse)),
        })
    }

    fn add(&self, local_step: i64, add: impl FnOnce(&mut AccumulatorState) -> Result<()>) -> Result<()> {
        let taken = {
            let mut state = self.state.lock();
            if local_step < state.global_step {
                return Ok(());
            }
            add(&mut state)?;
            state.n_gradients += 1;
            state.serve(self)
        };
        self.tell(taken);
        Ok(())
    }

    /// Takes the sum or mean, once there are `n_required` gradients; the next step begins then.
    pub fn take(self: &Arc<Self>, n_required: i32, cancel: &Arc<CancelToken>, done: Done) {
        let n_required = match usize::try_from(n_required) {
            Ok(n) if n > 0 => n,
            _ => {
                let text = format!("Argument num_required is not positive: {n_required}");
                return done.finish(Err(Error::invalid_argument(text)));
            }
        };
        let (id, taken) = {
            let mut state = self.state.lock();
            state.next_id += 1;
            let id = state.next_id;
            state.takes.push_back(Take { waiter: Waiter::new(id, done), n_required });
            (id, state.serve(self))
        };
        let waits = !taken.iter().any(|taken| taken.waiter.id == id);
        self.tell(taken);
        if waits {
            watch(self, id, cancel);
        }
    }

    fn tell(&self, taken: Vec<Taken>) {
        for Taken { waiter, sum } in taken {
            let outputs = sum.and_then(|sum| match sum {
                HandedOut::Dense(sum, n) => sum.finish(self.spec.reduction, n).map(|mean| vec![mean]),
                HandedOut::Sparse(sum, room) => sum.finish(&self.spec, room),
            });
            waiter.finish(outputs.map(Into::into));
        }
    }

    fn check(&self, form: Form, dtype: DType) -> Result<()> {
        if self.spec.form != form {
            return Err(self.wrong_form(form));
        }
        if self.spec.dtype != dtype {
            return Err(Error::invalid_argument(format!(
                "accumulator '{}' is {}, found a gradient of {dtype}",
                self.name, self.spec.dtype
            )));
        }
        Ok(())
    }

    fn wrong_form(&self, form: Form) -> Error {
        let text = format!("accumulator '{}' is {:?}, the gradient is {form:?}", self.name, self.spec.form);
        Error::invalid_argument(text)
    }
}

impl AccumulatorState {
    /// Serves takes from the head of the line while there is enough.
    fn serve(&mut self, accumulator: &Accumulator) -> Vec<Taken> {
        let mut served = Vec::new();
        while self.takes.front().is_some_and(|take| take.n_required <= self.n_gradients)
            && let Some(take) = self.takes.pop_front()
        {
            served.push(Taken { waiter: take.waiter, sum: self.hand_out(accumulator) });
        }
        served
    }

    /// The sum leaves, and the next step begins. If there is no memory for what is made of it, nothing changes.
    fn hand_out(&mut self, Accumulator { spec, memory, .. }: &Accumulator) -> Result<HandedOut> {
        // Counted no more before more is asked for, so that gradients that have filled the memory can be taken.
        let n_held = self.holdings.held();
        self.holdings.clear();
        let room = match &mut self.sum {
            Sum::Dense(sum) if spec.reduction == Reduction::Mean && self.n_gradients > 1 => {
                sum.make_own(memory).map(|()| None)
            }
            Sum::Dense(_) => Ok(None),
            Sum::Sparse(sum) => sum.room(spec, memory).map(Some),
        };
        let room = room.inspect_err(|_| self.holdings.put_back_bytes(n_held))?;
        self.global_step = self.global_step.saturating_add(1);
        let n_gradients = std::mem::take(&mut self.n_gradients);
        match (std::mem::replace(&mut self.sum, Sum::new(spec.form)), room) {
            (Sum::Dense(sum), _) => Ok(HandedOut::Dense(sum, n_gradients)),
            (Sum::Sparse(sum), Some(room)) => Ok(HandedOut::Sparse(sum, room)),
            (Sum::Sparse(_), None) => Err(Error::internal("there is no memory for the rows")),
        }
    }
}

fn cancelled() -> Error {
    Error::cancelled("TakeGrad operation was cancelled")
}

impl Waits for Accumulator {
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool {
        let mut state = self.state.lock();
        match state.takes.iter_mut().find(|take| take.waiter.id == id) {
            Some(take) => {
                take.waiter.attach(token, registration);
                true
            }
            None => false,
        }
    }

    fn cancel(&self, id: u64) {
        let (gone, taken) = {
            let mut state = self.state.lock();
            let at = state.takes.iter().position(|take| take.waiter.id == id);
            let gone = at.and_then(|at| state.takes.remove(at));
            // Those behind it may need fewer.
            (gone, state.serve(self))
        };
        if let Some(gone) = gone {
            gone.waiter.finish(Err(cancelled()));
        }
        self.tell(taken);
    }
}

/// Those who still wait when an accumulator is removed are told.
impl Drop for Accumulator {
    fn drop(&mut self) {
        let takes: Vec<Take> = self.state.get_mut().takes.drain(..).collect();
        takes.into_iter().for_each(|take| take.waiter.finish(Err(cancelled())));
    }
}

impl Resource for Accumulator {
    fn kind(&self) -> &'static str {
        "conditional accumulator"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Described for Accumulator {
    type Spec = AccumulatorSpec;

    fn make(name: &Arc<str>, spec: &AccumulatorSpec, memory: Charge) -> Result<Arc<Accumulator>> {
        Accumulator::new(name.clone(), spec.clone(), memory)
    }

    fn agree(&self, name: &str, spec: &AccumulatorSpec) -> Result<()> {
        if self.spec == *spec {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "Shared conditional accumulator '{name}' is {:?}, but requested was {spec:?}",
            self.spec
        )))
    }
}

/// The ops that dense and sparse accumulators share, and those that differ only by the accumulator's form.
pub(crate) static ACCUMULATOR_NUM_ACCUMULATED: Op =
    num_accumulated("AccumulatorNumAccumulated", "(handle:Ref(string)) -> (num_accumulated:int32)", false);
pub(crate) static RESOURCE_ACCUMULATOR_NUM_ACCUMULATED: Op =
    num_accumulated("ResourceAccumulatorNumAccumulated", "(handle:resource) -> (num_accumulated:int32)", true);
pub(crate) static ACCUMULATOR_SET_GLOBAL_STEP: Op =
    set_global_step("AccumulatorSetGlobalStep", "(handle:Ref(string), new_global_step:int64) -> ()", false);
pub(crate) static RESOURCE_ACCUMULATOR_SET_GLOBAL_STEP: Op =
    set_global_step("ResourceAccumulatorSetGlobalStep", "(handle:resource, new_global_step:int64) -> ()", true);

const fn num_accumulated(name: &'static str, signature: &'static str, stateful: bool) -> Op {
    access(name, signature, shape_fns::scalars, NUM_ACCUMULATED, stateful)
}

const fn set_global_step(name: &'static str, signature: &'static str, stateful: bool) -> Op {
    access(name, signature, shape_fns::unknown, SET_GLOBAL_STEP, stateful)
}

/// An op on an accumulator.
pub(super) const fn access(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    kernels: &'static [KernelDef],
    stateful: bool,
) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("what an accumulator holds does not depend on a graph"),
            stateful,
            effects: Effects::Uses,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::OBJECTS,
        cost: Cost::Elements,
    }
}

const NUM_ACCUMULATED: &[KernelDef] = &[cpu_any(|ctx| {
    let n = object::<Accumulator>(ctx, 0)?.n_accumulated();
    ctx.set_output(0, Tensor::scalar(i32::try_from(n).unwrap_or(i32::MAX)));
    Ok(())
})];

const SET_GLOBAL_STEP: &[KernelDef] = &[cpu_any(|ctx| {
    let step = ctx.scalar::<i64>(1)?;
    object::<Accumulator>(ctx, 0)?.set_global_step(step);
    Ok(())
})];

/// The kernel of ops that take: waits until there is enough.
pub(super) const TAKE: &[KernelDef] = &[cpu_made(KernelMaker::Async(|init| {
    let form = if init.node.outputs.len() == 1 { Form::Dense } else { Form::Sparse };
    Ok(Box::new(TakeGradient { form, dtype: init.attrs().dtype("dtype")? }) as Box<dyn AsyncKernel>)
}))];

struct TakeGradient {
    form: Form,
    dtype: DType,
}

impl AsyncKernel for TakeGradient {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let arguments = || {
            let accumulator = object::<Accumulator>(ctx, 0)?;
            accumulator.check(self.form, self.dtype)?;
            Ok((accumulator, ctx.scalar::<i32>(1)?))
        };
        match arguments() {
            Ok((accumulator, n_required)) => accumulator.take(n_required, ctx.step.cancel(), done),
            Err(error) => done.finish(Err(error)),
        }
    }
}

/// The kernel of ops that make an accumulator.
pub(super) fn make(init: &KernelInit<'_>, form: Form) -> Result<Box<dyn Kernel>> {
    let attrs = init.attrs();
    let reduction = match attrs.str("reduction_type")? {
        "SUM" => Reduction::Sum,
        _ => Reduction::Mean,
    };
    let spec = AccumulatorSpec { form, dtype: attrs.dtype("dtype")?, shape: attrs.shape("shape")?.clone(), reduction };
    Source::<Accumulator>::make(init, spec)
}
