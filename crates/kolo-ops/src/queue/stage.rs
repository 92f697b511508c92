//! `Stage`, `Unstage`, `StageSize`, `StageClear`: a small store that one step fills while another empties it.
//!
//! All nodes with one `shared_name` (or, without one, with one name) use the same store. Who has to wait, for room or for an
//! element, leaves its place in a line and holds no thread.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Effects, Gradient, OpDef, ShapeFn, shape_fns};
use parking_lot::Mutex;

use super::wait::{Waiter, Waits, watch};
use crate::holdings::{Holdings, Measured};
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, Op, cpu_made};
use crate::resource::Resource;
use crate::{AsyncKernel, CancelToken, Cost, Done, KernelCtx, KernelMaker, Outcome, Registration};

macro_rules! stage_ops {
    ($($op:ident, $name:literal, $arguments:literal, $least:literal, $shape:expr, $action:ident;)*) => {
        $(pub(crate) static $op: Op = stage_op(
            $name,
            concat!(
                $arguments, " ; capacity:int>=0=0, memory_limit:int>=0=0, dtypes:list(type)", $least,
                ", container:string=\"\", shared_name:string=\"\""
            ),
            $shape,
            &[cpu_made(KernelMaker::Async(|init| Access::make(init, Action::$action)))],
        );)*
    };
}

stage_ops! {
    STAGE, "Stage", "(values:list(dtypes)) -> ()", ">=1", shape_fns::unknown, Put;
    UNSTAGE, "Unstage", "() -> (values:list(dtypes))", ">=1", shape_fns::unknown, Take;
    STAGE_SIZE, "StageSize", "() -> (size:int32)", "", shape_fns::scalars, Size;
    STAGE_CLEAR, "StageClear", "() -> ()", "", shape_fns::unknown, Clear;
}

const fn stage_op(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("what was staged does not depend on a graph"),
            stateful: true,
            effects: Effects::Uses,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::OBJECTS,
        cost: Cost::Inline,
    }
}

#[derive(Clone, Copy)]
enum Action {
    Put,
    Take,
    Size,
    Clear,
}

struct Access {
    action: Action,
    container: String,
    name: Arc<str>,
    capacity: usize,
    memory_limit: usize,
}

impl Access {
    fn make(init: &KernelInit<'_>, action: Action) -> Result<Box<dyn AsyncKernel>> {
        let attrs = init.attrs();
        let name = match attrs.str("shared_name")? {
            "" => init.node.name.clone(),
            shared => shared.into(),
        };
        // 0 means any number.
        let limit = |name: &str| attrs.int(name).map(|n| usize::try_from(n).ok().filter(|&n| n > 0));
        Ok(Box::new(Access {
            action,
            container: attrs.str("container")?.to_owned(),
            name,
            capacity: limit("capacity")?.unwrap_or(usize::MAX),
            memory_limit: limit("memory_limit")?.unwrap_or(usize::MAX),
        }))
    }

    fn area(&self, ctx: &KernelCtx<'_>) -> Result<Arc<Area>> {
        let make = || {
            let charge = ctx.device.charge(0, &format!("{} {}", ctx.node.op(), self.name).into())?;
            Ok(Area::new(self.capacity, self.memory_limit, Holdings::new(charge)))
        };
        ctx.step.resources().lookup_or_create(&self.container, &self.name, make)
    }
}

impl AsyncKernel for Access {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let area = match self.area(ctx) {
            Ok(area) => area,
            Err(error) => return done.finish(Err(error)),
        };
        match self.action {
            Action::Put => match (0..ctx.n_inputs()).map(|i| ctx.take_input(i)).collect::<Result<Vec<Tensor>>>() {
                Ok(values) => area.put(values, ctx.step.cancel(), done),
                Err(error) => done.finish(Err(error)),
            },
            Action::Take => {
                let dtypes: Vec<_> = ctx.node.outputs.iter().map(|output| output.dtype).collect();
                // An element of other dtypes must not reach consumers that count on these.
                let name = self.name.clone();
                let checked = Done::new(move |outcome| {
                    done.finish(outcome.and_then(|outcome: Outcome| {
                        let found: Vec<_> = outcome.outputs.iter().map(Tensor::dtype).collect();
                        match found == dtypes {
                            true => Ok(outcome),
                            false => Err(Error::invalid_argument(format!(
                                "staging area {name} holds elements of {found:?}, expected {dtypes:?}"
                            ))),
                        }
                    }));
                });
                area.take(ctx.step.cancel(), checked);
            }
            Action::Size => {
                let n = i32::try_from(area.state.lock().elements.len()).unwrap_or(i32::MAX);
                done.finish(Ok(vec![Tensor::scalar(n)].into()));
            }
            Action::Clear => {
                area.clear();
                done.finish(Ok(Outcome::default()));
            }
        }
    }
}

/// The store.
struct Area {
    capacity: usize,
    memory_limit: usize,
    state: Mutex<StageContents>,
}

struct StageContents {
    elements: VecDeque<Vec<Tensor>>,
    n_bytes: usize,
    /// All elements from when they come until they are handed out, those that wait for room included.
    holdings: Holdings,
    next_id: u64,
    puts: VecDeque<(Waiter, Vec<Tensor>)>,
    takes: VecDeque<Waiter>,
}

/// Those who are served, to be told without the lock.
type Served = Vec<(Waiter, Vec<Tensor>)>;

/// An element as the area counts it; the lists have room for up to twice as many.
fn measured(values: &[Tensor]) -> Measured {
    Measured::new(2 * size_of::<(Waiter, Vec<Tensor>)>() + size_of_val(values), values)
}

fn n_bytes(values: &[Tensor]) -> usize {
    values.iter().map(Tensor::n_bytes).sum()
}

impl Area {
    fn new(capacity: usize, memory_limit: usize, holdings: Holdings) -> Arc<Area> {
        let state = StageContents {
            elements: VecDeque::new(),
            n_bytes: 0,
            holdings,
            next_id: 0,
            puts: VecDeque::new(),
            takes: VecDeque::new(),
        };
        Arc::new(Area { capacity, memory_limit, state: Mutex::new(state) })
    }

    fn put(self: &Arc<Self>, values: Vec<Tensor>, cancel: &Arc<CancelToken>, done: Done) {
        if n_bytes(&values) > self.memory_limit {
            return done.finish(Err(Error::resource_exhausted(format!(
                "Attempted to insert tensors with combined size of '{}' bytes into Staging Area with a memory limit of \
                 '{}'.",
                n_bytes(&values),
                self.memory_limit
            ))));
        }
        let part = measured(&values);
        let (id, served) = {
            let mut state = self.state.lock();
            if let Err(error) = state.hold(&part) {
                drop(state);
                return done.finish(Err(error));
            }
            let id = state.new_id();
            state.puts.push_back((Waiter::new(id, done), values));
            (id, state.serve(self))
        };
        self.settle(id, served, cancel);
    }

    fn take(self: &Arc<Self>, cancel: &Arc<CancelToken>, done: Done) {
        let (id, served) = {
            let mut state = self.state.lock();
            let id = state.new_id();
            state.takes.push_back(Waiter::new(id, done));
            (id, state.serve(self))
        };
        self.settle(id, served, cancel);
    }

    /// Tells those who are served; if `id` is not one of them, a cancelled step ends its wait.
    fn settle(self: &Arc<Self>, id: u64, served: Served, cancel: &Arc<CancelToken>) {
        let waits = !served.iter().any(|(waiter, _)| waiter.id == id);
        tell(served);
        if waits {
            watch(self, id, cancel);
        }
    }

    fn clear(&self) {
        let (gone, served) = {
            let mut state = self.state.lock();
            state.n_bytes = 0;
            let gone = std::mem::take(&mut state.elements);
            gone.iter().for_each(|values| state.let_go(values));
            (gone, state.serve(self))
        };
        drop(gone);
        tell(served);
    }
}

fn tell(served: Served) {
    for (waiter, outputs) in served {
        waiter.finish(Ok(outputs.into()));
    }
}

impl StageContents {
    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Counts an element that comes, and makes room for it in the lists.
    fn hold(&mut self, element: &Measured) -> Result<()> {
        self.holdings.add(element)?;
        if self.elements.try_reserve(1).is_err() || self.puts.try_reserve(1).is_err() {
            self.holdings.remove(element);
            return Err(self.holdings.no_room());
        }
        Ok(())
    }

    /// Counts an element no more: it goes.
    fn let_go(&mut self, values: &[Tensor]) {
        self.holdings.remove(&measured(values));
    }

    /// Lets the first in each line go on until neither can.
    fn serve(&mut self, area: &Area) -> Served {
        let mut served = Vec::new();
        loop {
            let fits = |values: &Vec<Tensor>| {
                self.elements.len() < area.capacity
                    && self.n_bytes.checked_add(n_bytes(values)).is_some_and(|n| n <= area.memory_limit)
            };
            if self.puts.front().is_some_and(|(_, values)| fits(values))
                && let Some((waiter, values)) = self.puts.pop_front()
            {
                self.n_bytes += n_bytes(&values);
                self.elements.push_back(values);
                served.push((waiter, Vec::new()));
            } else if !self.takes.is_empty()
                && let Some(values) = self.elements.pop_front()
                && let Some(waiter) = self.takes.pop_front()
            {
                self.n_bytes -= n_bytes(&values);
                self.let_go(&values);
                served.push((waiter, values));
            } else {
                return served;
            }
        }
    }
}

impl Waits for Area {
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool {
        let mut state = self.state.lock();
        let state = &mut *state;
        let all = state.puts.iter_mut().map(|(waiter, _)| waiter).chain(&mut state.takes);
        match all.into_iter().find(|waiter| waiter.id == id) {
            Some(waiter) => {
                waiter.attach(token, registration);
                true
            }
            None => false,
        }
    }

    fn cancel(&self, id: u64) {
        let (gone, served) = {
            let mut state = self.state.lock();
            let put = state.puts.iter().position(|(waiter, _)| waiter.id == id);
            let take = state.takes.iter().position(|waiter| waiter.id == id);
            let gone = match (put, take) {
                (Some(at), _) => state.puts.remove(at).map(|(waiter, values)| {
                    state.let_go(&values);
                    waiter
                }),
                (_, Some(at)) => state.takes.remove(at),
                _ => None,
            };
            (gone, state.serve(self))
        };
        if let Some(waiter) = gone {
            waiter.finish(Err(Error::cancelled("Staging operation was cancelled")));
        }
        tell(served);
    }
}

impl Resource for Area {
    fn kind(&self) -> &'static str {
        "staging area"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kolo_core::{Code, DType};

    use super::*;
    use crate::testing::Evaluation;

    #[test]
    fn elements_come_out_in_order() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [2usize]);
        let stage = g.op("Stage").inputs([x, x * 2.0]).attr("shared_name", "area").build();
        let types = vec![DType::F32, DType::F32];
        let unstage = g.op("Unstage").attr("dtypes", types.clone()).attr("shared_name", "area").build().outputs();
        let size = g.op("StageSize").attr("dtypes", types.clone()).attr("shared_name", "area").out();
        let clear = g.op("StageClear").attr("dtypes", types).attr("shared_name", "area").build();
        let wrong = g.op("Unstage").attr("dtypes", vec![DType::I32]).attr("shared_name", "area").out();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        for value in [1.0f32, 3.0, 5.0, 7.0] {
            run.run_targets(&[stage], &[(x, Tensor::from([value, value]))]).unwrap();
        }
        assert_eq!(run.run(&[size], &[]).unwrap(), [Tensor::scalar(4i32)]);
        assert_eq!(run.run(&unstage, &[]).unwrap(), [Tensor::from([1.0f32, 1.0]), Tensor::from([2.0f32, 2.0])]);
        assert_eq!(run.run(&unstage, &[]).unwrap()[0], Tensor::from([3.0f32, 3.0]));
        assert_eq!(run.run(&[wrong], &[]).unwrap_err().code(), Code::InvalidArgument);
        run.run_targets(&[clear], &[]).unwrap();
        assert_eq!(run.run(&[size], &[]).unwrap(), [Tensor::scalar(0i32)]);
    }

    fn listener() -> (Done, mpsc::Receiver<Result<Outcome>>) {
        let (sender, receiver) = mpsc::channel();
        (Done::new(move |outcome| drop(sender.send(outcome))), receiver)
    }

    #[test]
    fn who_waits_is_served_or_cancelled() {
        let area = Area::new(1, 16, Holdings::new(kolo_device::Charge::NONE));
        let cancel = CancelToken::new();
        let put = |value: f32| {
            let (done, receiver) = listener();
            area.put(vec![Tensor::scalar(value)], &cancel, done);
            receiver
        };
        let take = |cancel: &Arc<CancelToken>| {
            let (done, receiver) = listener();
            area.take(cancel, done);
            receiver
        };
        let value = |receiver: &mpsc::Receiver<Result<Outcome>>| receiver.try_recv().unwrap().unwrap().outputs;
        // One who takes waits for one who puts; one who puts waits for room.
        let first = take(&cancel);
        assert!(first.try_recv().is_err());
        put(1.0);
        assert_eq!(value(&first), [Tensor::scalar(1.0f32)]);
        assert!(put(2.0).try_recv().is_ok());
        let late = put(3.0);
        assert!(late.try_recv().is_err());
        assert_eq!(value(&take(&cancel)), [Tensor::scalar(2.0f32)]);
        assert!(late.try_recv().is_ok());
        assert_eq!(value(&take(&cancel)), [Tensor::scalar(3.0f32)]);
        // A cancelled step waits no longer, and takes nothing from those who follow.
        let other = CancelToken::new();
        let gone = take(&other);
        other.cancel(Error::cancelled("the step ended"));
        assert_eq!(gone.try_recv().unwrap().unwrap_err().code(), Code::Cancelled);
        put(4.0);
        assert_eq!(value(&take(&cancel)), [Tensor::scalar(4.0f32)]);
        let (done, receiver) = listener();
        area.put(vec![Tensor::from([0.0f64; 3])], &cancel, done);
        assert_eq!(receiver.try_recv().unwrap().unwrap_err().code(), Code::ResourceExhausted);
    }
}
