//! A part of a step: its state, which one thread holds at a time, and the mail for whoever does.
//!
//! Only a thread with a [`MayWait`] may wait for a part. All others post: if nobody holds the part, they hold it for as
//! long as that takes, and otherwise they leave it in the part's mail. A runner takes the mail in between two nodes. Every
//! thread looks for mail after it has let go of a part, and a thread that has left mail tries once more to hold the
//! part: one of the two sees what the other has done, so no mail stays where it is.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use kolo_core::Result;
use kolo_ops::Value;

use super::Step;
use super::waits::PartView;
use crate::compile::part::PartPlan;
use crate::executor::may_wait::MayWait;
use crate::executor::part_state::{PartState, Token};
use crate::executor::sync::atomic::{AtomicBool, Ordering, fence};
use crate::executor::sync::mpsc::{Receiver, Sender, channel};
use crate::executor::sync::{Mutex, MutexGuard, bump, pass_on};

/// One device's share of a step.
pub(super) struct StepPart {
    pub plan: Arc<PartPlan>,
    /// The caller runs this part's nodes too.
    pub for_caller: bool,
    desk: Mutex<Desk>,
    post: Sender<Mail>,
    /// There may be mail that nobody has taken in.
    has_mail: AtomicBool,
}

/// What the holder of a part has before it.
pub(crate) struct Desk {
    state: PartState,
    mail: Receiver<Mail>,
    post: Sender<Mail>,
}

/// What a thread leaves to the holder of a part.
pub(super) enum Mail {
    /// The step begins, or has failed: somebody must see to the part.
    Look,
    /// An asynchronous kernel has completed.
    Completed { ticket: u64, produced: Option<Produced> },
    /// A registered runner has left.
    Left { produced: Option<Produced> },
    /// Somebody wants to know what the part does. It must only pass the answer on: the part is held meanwhile.
    Asked(Arc<dyn Fn(PartView) + Send + Sync>),
}

/// The outputs of a node that are to be propagated.
pub(super) struct Produced {
    pub token: Token,
    pub outputs: Vec<Value>,
}

/// A part that this thread holds.
pub(super) struct Held<'a> {
    desk: MutexGuard<'a, Desk>,
    /// Dropped after the above.
    after: Option<LookForMail<'a>>,
}

/// Looks for mail when it is dropped.
struct LookForMail<'a> {
    step: &'a Arc<Step>,
    index: usize,
}

impl Desk {
    fn new() -> Desk {
        let (post, mail) = channel();
        Desk { state: PartState::default(), mail, post }
    }
}

impl StepPart {
    /// A part in which nothing has run; `n_waiting` feeds will arrive later.
    pub fn new(plan: &Arc<PartPlan>, n_waiting: usize, for_caller: bool) -> StepPart {
        let mut desk = plan.spare.lock().pop().unwrap_or_else(Desk::new);
        desk.state.reset(plan);
        desk.state.n_waiting = n_waiting;
        let post = desk.post.clone();
        StepPart { plan: plan.clone(), for_caller, desk: Mutex::new(desk), post, has_mail: AtomicBool::new(false) }
    }

    /// Keeps what can be used again by another step.
    pub fn recycle(self, was_stopped: bool) {
        let has_mail = self.has_mail();
        let mut desk = self.desk.into_inner();
        desk.state.clear(was_stopped);
        while has_mail && desk.mail.try_recv().is_ok() {}
        self.plan.spare.lock().push(desk);
    }

    /// Whether a holder has mail to take in.
    pub fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Relaxed)
    }

    fn leave(&self, mail: Mail) {
        // The desk has the other end, and lives as long as the part.
        let _ = self.post.send(mail);
        self.has_mail.store(true, Ordering::Release);
        // With the fence below: either the next try to hold the part sees that it is free, or its holder, once it has
        // let go, sees the mail.
        fence(Ordering::SeqCst);
    }

    fn has_mail_after_all(&self) -> bool {
        fence(Ordering::SeqCst);
        self.has_mail()
    }
}

impl Step {
    /// Waits for a part.
    pub(super) fn hold(self: &Arc<Self>, index: usize, _: MayWait) -> Held<'_> {
        Held { desk: self.parts[index].desk.lock(), after: Some(LookForMail { step: self, index }) }
    }

    /// A part, if nobody holds it.
    pub(super) fn try_hold(self: &Arc<Self>, index: usize) -> Option<Held<'_>> {
        let desk = self.parts[index].desk.try_lock()?;
        Some(Held { desk, after: Some(LookForMail { step: self, index }) })
    }

    /// Does what `mail` says, and sees to it that the part goes on; or leaves both to the part's holder. Waits for nobody.
    pub(super) fn post(self: &Arc<Self>, index: usize, mail: Mail) {
        self.see_to(index, Some(mail));
    }

    fn see_to(self: &Arc<Self>, index: usize, mut mail: Option<Mail>) {
        let part = &self.parts[index];
        loop {
            let Some(desk) = part.desk.try_lock() else {
                let Some(mail) = mail.take() else {
                    if self.is_detached {
                        // The holder may not be done for long, and this thread may have sent something.
                        self.services.transfers.flush();
                    }
                    return;
                };
                part.leave(mail);
                continue;
            };
            // This loop looks for mail afterwards: if dropping did, loops would nest.
            let mut state = Held { desk, after: None };
            let first = mail.take().map_or(Ok(()), |mail| self.take_in(index, &mut state, mail));
            match first.and_then(|()| self.take_mail(index, &mut state)) {
                Ok(()) => self.attend(index, state),
                Err(error) => {
                    drop(state);
                    self.fail(error);
                    // What was taken in may have been the last that the step waited for.
                    mail = Some(Mail::Look);
                    continue;
                }
            }
            if !part.has_mail_after_all() {
                return;
            }
        }
    }

    /// Takes in what others have left. After an error, which fails the step, there may be more.
    pub(super) fn take_mail(&self, index: usize, state: &mut Held<'_>) -> Result<()> {
        let part = &self.parts[index];
        if !part.has_mail() || !part.has_mail.swap(false, Ordering::Acquire) {
            return Ok(());
        }
        while let Ok(mail) = state.desk.mail.try_recv() {
            if let Err(error) = self.take_in(index, state, mail) {
                part.has_mail.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    }

    /// An error is a panic of the executor.
    fn take_in(&self, index: usize, state: &mut PartState, mail: Mail) -> Result<()> {
        let part = &self.parts[index];
        let produced = match mail {
            Mail::Look => None,
            Mail::Completed { ticket, produced } => {
                state.end_wait(ticket);
                produced
            }
            Mail::Left { produced } => {
                state.n_runners -= 1;
                produced
            }
            Mail::Asked(answer) => {
                answer(PartView::new(part, state));
                None
            }
        };
        match produced {
            Some(Produced { token, mut outputs }) => self.propagate(part, state, token, &mut outputs),
            None => Ok(()),
        }
    }
}

impl<'a> Held<'a> {
    /// Lets a waiting thread hold the part first, if there is one: only for threads that may wait.
    pub fn bump(&mut self, _: MayWait) {
        bump(&mut self.desk);
    }

    /// Lets go of the part. A waiting thread holds it next, if there is one.
    pub fn pass_on(self) {
        let Held { desk, after } = self;
        pass_on(desk);
        drop(after);
    }

    /// For a runner, which lets go of the part many times.
    pub fn looking_for_mail(self, step: &'a Arc<Step>, index: usize) -> Held<'a> {
        Held { desk: self.desk, after: Some(LookForMail { step, index }) }
    }
}

impl Deref for Held<'_> {
    type Target = PartState;

    fn deref(&self) -> &PartState {
        &self.desk.state
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut PartState {
        &mut self.desk.state
    }
}

impl Drop for LookForMail<'_> {
    fn drop(&mut self) {
        if self.step.parts[self.index].has_mail_after_all() {
            self.step.see_to(self.index, None);
        }
    }
}
