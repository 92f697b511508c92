//! `BackgroundSaveV2` begins a save and returns at once; `AwaitSaveV2` waits for it, without a thread, and says how it
//! went. Kolo's own ops: TensorFlow has none like them.
//!
//! The tensors are taken by reference. A variable that is updated while its old value is being written is copied first, so
//! what is written is what the variables were when the op ran: a snapshot that costs nothing but those copies.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kolo_core::{Error, Result};
use kolo_graph::{Effects, Gradient, OpDef, Operation, Output};
use parking_lot::Mutex;

use super::FileAccess;
use super::arguments::{save_arguments, save_shapes, text};
use super::bundle::{self, Item, index_path};
use super::threads::join_all;
use crate::op::{Gpu, KernelMaker, Op, cpu_any, cpu_made};
use crate::queue::wait::{Waiter, Waits, watch};
use crate::resource::Resource;
use crate::{AsyncKernel, CancelToken, Cost, Done, KernelCtx, Outcome, Registration, ResourceStore};

/// Begins to write `tensors` to the checkpoint `prefix`, as [`super::save_v2::save_v2`] does, and goes on.
#[track_caller]
pub fn background_save_v2<'g>(
    prefix: Output<'g>,
    tensor_names: Output<'g>,
    shape_and_slices: Output<'g>,
    tensors: &[Output<'g>],
) -> Operation<'g> {
    let head = [prefix, tensor_names, shape_and_slices];
    prefix.graph().op("BackgroundSaveV2").inputs(head).inputs(tensors.iter().copied()).build()
}

/// Waits until the save to `prefix` that [`background_save_v2`] began on the same device has ended; fails if that failed.
#[track_caller]
pub fn await_save_v2(prefix: Output<'_>) -> Operation<'_> {
    prefix.graph().op("AwaitSaveV2").input(prefix).build()
}

pub(crate) static BACKGROUND_SAVE_V2: Op = Op {
    def: OpDef {
        name: "BackgroundSaveV2",
        signature: "(prefix:string, tensor_names:string, shape_and_slices:string, tensors:list(dtypes)) -> () ; \
                    dtypes:list(type)>=1",
        shape: save_shapes,
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let (prefix, items) = save_arguments(ctx)?;
        let resources = ctx.step.resources();
        let access = resources.file_access();
        access.check(&index_path(&prefix))?;
        Saves::of(resources)?.begin(prefix, items, access)
    })],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

pub(crate) static AWAIT_SAVE_V2: Op = Op {
    def: OpDef {
        name: "AwaitSaveV2",
        signature: "(prefix:string) -> ()",
        shape: |ctx| ctx.input_of_rank(0, 0).map(|_| Vec::new()),
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Async(|_| Ok(Box::new(Await))))],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

struct Await;

impl AsyncKernel for Await {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let prepare = || Ok((text(ctx, 0, "prefix")?, Saves::of(ctx.step.resources())?));
        match prepare() {
            Ok((prefix, saves)) => saves.wait(&prefix, ctx.step.cancel(), done),
            Err(error) => done.finish(Err(error)),
        }
    }
}

/// A device's background saves. Those still being written when the device goes away are finished first.
struct Saves {
    state: Mutex<BackgroundState>,
}

#[derive(Default)]
struct BackgroundState {
    by_prefix: HashMap<String, Save>,
    threads: Vec<JoinHandle<()>>,
    next_id: u64,
}

enum Save {
    Running { waiters: Vec<Waiter> },
    Ended(Result<()>),
}

/// How many ended saves are remembered for somebody to ask about.
const MOST_ENDED: usize = 64;

impl Saves {
    fn of(resources: &ResourceStore) -> Result<Arc<Saves>> {
        resources.lookup_or_create("", "kolo_background_saves", || Ok(Arc::new(Saves { state: Mutex::default() })))
    }

    fn begin(self: &Arc<Self>, prefix: String, items: Vec<Item>, access: FileAccess) -> Result<()> {
        let mut state = self.state.lock();
        if matches!(state.by_prefix.get(&prefix), Some(Save::Running { .. })) {
            return Err(Error::failed_precondition(format!("{prefix} is still being written; wait for that first")));
        }
        if state.by_prefix.len() >= MOST_ENDED {
            state.by_prefix.retain(|_, save| matches!(save, Save::Running { .. }));
        }
        let finished = state.threads.extract_if(.., |thread| thread.is_finished()).collect();
        join_all(finished);
        // Weak: the last user of a device may go while the save runs, and then waits for it.
        let saves = Arc::downgrade(self);
        let path = prefix.clone();
        let work = move || {
            let saved = catch_unwind(AssertUnwindSafe(|| bundle::save_within(&path, &items, None, &access)));
            let saved = saved.unwrap_or_else(|_| Err(Error::internal(format!("the save to {path} panicked"))));
            // The variables' old values go before anybody hears of it.
            drop(items);
            if let Some(saves) = saves.upgrade() {
                saves.end(&path, saved);
            }
        };
        let thread = thread::Builder::new()
            .name("kolo-save".into())
            .spawn(work)
            .map_err(|error| Error::resource_exhausted(format!("cannot start a thread to save {prefix}: {error}")))?;
        state.threads.push(thread);
        state.by_prefix.insert(prefix, Save::Running { waiters: Vec::new() });
        Ok(())
    }

    fn end(&self, prefix: &str, saved: Result<()>) {
        let old = self.state.lock().by_prefix.insert(prefix.to_owned(), Save::Ended(saved.clone()));
        if let Some(Save::Running { waiters }) = old {
            for waiter in waiters {
                waiter.finish(saved.clone().map(|()| Outcome::default()));
            }
        }
    }

    fn wait(self: &Arc<Self>, prefix: &str, cancel: &Arc<CancelToken>, done: Done) {
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        match state.by_prefix.get_mut(prefix) {
            Some(Save::Running { waiters }) => {
                waiters.push(Waiter::new(id, done));
                drop(state);
                watch(self, id, cancel);
            }
            Some(Save::Ended(saved)) => {
                let saved = saved.clone();
                drop(state);
                done.finish(saved.map(|()| Outcome::default()));
            }
            None => {
                drop(state);
                done.finish(Err(Error::not_found(format!("no background save to {prefix} was begun here"))));
            }
        }
    }
}

impl BackgroundState {
    fn waiters(&mut self) -> impl Iterator<Item = &mut Vec<Waiter>> {
        self.by_prefix.values_mut().filter_map(|save| match save {
            Save::Running { waiters } => Some(waiters),
            Save::Ended(_) => None,
        })
    }
}

impl Waits for Saves {
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool {
        let mut state = self.state.lock();
        let found = state.waiters().flatten().find(|waiter| waiter.id == id);
        found.map(|waiter| waiter.attach(token, registration)).is_some()
    }

    fn cancel(&self, id: u64) {
        let gone = self.state.lock().waiters().find_map(|waiters| {
            let at = waiters.iter().position(|waiter| waiter.id == id)?;
            Some(waiters.swap_remove(at))
        });
        if let Some(gone) = gone {
            gone.finish(Err(Error::cancelled("AwaitSaveV2 was cancelled; the save itself goes on")));
        }
    }
}

impl Drop for Saves {
    fn drop(&mut self) {
        join_all(std::mem::take(&mut self.state.get_mut().threads));
    }
}

impl Resource for Saves {
    fn kind(&self) -> &'static str {
        "list of background saves"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use kolo_core::{Code, DType, PartialShape, Tensor};

    use super::*;
    use crate::VariableCell;
    use crate::io::bundle::Bundle;
    use crate::io::files::TestDir;
    use crate::testing::Evaluation;

    #[test]
    fn a_save_begins_and_is_awaited() {
        let dir = TestDir::new("background");
        let g = crate::graph();
        let prefix = g.constant(dir.text("m").as_str());
        let begin = background_save_v2(prefix, g.constant(["a"]), g.constant([""]), &[g.constant([1i32, 2])]);
        let wait = await_save_v2(prefix);
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        assert_eq!(run.run_targets(&[wait], &[]).unwrap_err().code(), Code::NotFound);
        run.run_targets(&[begin], &[]).unwrap();
        run.run_targets(&[wait], &[]).unwrap();
        assert_eq!(Bundle::open(&dir.text("m")).unwrap().read("a").unwrap(), Tensor::from([1i32, 2]));
    }

    #[test]
    fn a_failed_save_is_told_to_those_who_wait() {
        let dir = TestDir::new("background-failed");
        // A file where a directory should be.
        std::fs::write(dir.join("file"), "").unwrap();
        let g = crate::graph();
        let prefix = g.constant(dir.text("file/m").as_str());
        let begin = background_save_v2(prefix, g.constant(["a"]), g.constant([""]), &[g.constant([1i32, 2])]);
        let wait = await_save_v2(prefix);
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[begin], &[]).unwrap();
        let error = run.run_targets(&[wait], &[]).unwrap_err();
        assert!(error.message().contains(&dir.text("file")), "{error}");
    }

    #[test]
    fn what_is_written_is_the_value_at_the_beginning() {
        let dir = TestDir::new("background-snapshot");
        let cell = VariableCell::new("v", DType::F32, PartialShape::unknown());
        // Large enough that the update below meets a write in progress, or at least one that has not begun.
        cell.assign(Tensor::from(vec![1.0f32; 4_000_000])).unwrap();
        let store = ResourceStore::new("/job:a", "a");
        let saves = Saves::of(&store).unwrap();
        for step in 0..5 {
            let prefix = dir.text(&format!("m-{step}"));
            let item = Item { name: "v".into(), slice: None, tensor: cell.value().unwrap() };
            saves.begin(prefix.clone(), vec![item], FileAccess::everything()).unwrap();
            cell.update(|value| value.data_mut::<f32>().map(|values| values.iter_mut().for_each(|x| *x += 1.0)))
                .unwrap();
            let (sender, receiver) = mpsc::channel();
            saves.wait(&prefix, &CancelToken::new(), Done::new(move |outcome| sender.send(outcome).unwrap()));
            receiver.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
            let saved = Bundle::open(&prefix).unwrap().read("v").unwrap();
            let expected = step as f32 + 1.0;
            assert!(saved.data::<f32>().unwrap().iter().all(|x| *x == expected), "step {step}");
        }
        assert_eq!(cell.value().unwrap().data::<f32>().unwrap()[0], 6.0);
    }

    #[test]
    fn a_cancelled_wait_ends_and_the_save_goes_on() {
        let dir = TestDir::new("background-cancelled");
        let saves = Arc::new(Saves { state: Mutex::default() });
        // Nobody writes: the wait can only end by its cancellation.
        saves.state.lock().by_prefix.insert("p".into(), Save::Running { waiters: Vec::new() });
        let cancel = CancelToken::new();
        let (sender, receiver) = mpsc::channel();
        saves.wait("p", &cancel, Done::new(move |outcome| sender.send(outcome).unwrap()));
        assert!(receiver.try_recv().is_err());
        assert!(
            saves
                .begin("p".into(), Vec::new(), FileAccess::everything())
                .unwrap_err()
                .message()
                .contains("still being written")
        );
        cancel.cancel(Error::cancelled("enough"));
        assert_eq!(receiver.try_recv().unwrap().unwrap_err().code(), Code::Cancelled);
        // Dropping the device's list waits for what is being written.
        let tensor = Tensor::from(vec![1.0f32; 1_000_000]);
        saves
            .begin(dir.text("m"), vec![Item { name: "a".into(), slice: None, tensor }], FileAccess::everything())
            .unwrap();
        drop(saves);
        assert!(Bundle::open(&dir.text("m")).is_ok());
    }
}
