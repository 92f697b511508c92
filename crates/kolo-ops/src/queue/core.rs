//! The queue itself: elements, and two lines of those who wait.
//!
//! | state | touched by | under |
//! | --- | --- | --- |
//! | elements, both lines, `closed` | any kernel's thread | the one lock |
//! | a waiter's callback | whoever takes it off its line | no lock |
//!
//! Everything that changes the state ends in `QueueContents::serve`, which moves elements in from the head of one line and out to
//! the head of the other until nobody can go on, and returns those who are served; they are told after the lock is gone.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};
use kolo_device::Charge;
use parking_lot::Mutex;

use super::elements::{BatchRoom, Element, Elements, Order, measured, rows_bytes, split};
use super::spec::{Amount, QueueSpec};
use super::wait::{Waiter, Waits, watch};
use crate::holdings::{Holdings, Measured};
use crate::memory::room;
use crate::{CancelToken, Done, Outcome, Registration, Resource};

/// A queue.
pub struct Queue {
    name: Arc<str>,
    spec: QueueSpec,
    /// Where its elements and batches lie.
    memory: Charge,
    state: Mutex<QueueContents>,
}

struct QueueContents {
    elements: Elements,
    /// All elements from when they come until they are handed out, those that wait for room included.
    holdings: Holdings,
    closed: bool,
    next_id: u64,
    capacity: usize,
    min_after_dequeue: usize,
    enqueues: VecDeque<Enqueue>,
    dequeues: VecDeque<Dequeue>,
}

/// One who waits for room.
struct Enqueue {
    waiter: Waiter,
    rest: VecDeque<Element>,
}

/// One who waits for elements.
struct Dequeue {
    waiter: Waiter,
    wanted: usize,
    taken: Vec<Element>,
    amount: Amount,
}

/// One who is served, to be told without the lock.
enum Served {
    Enqueued(Waiter, Result<()>),
    Dequeued(Waiter, Result<HandedOut>),
}

/// Elements that have left the queue.
enum HandedOut {
    One(Element),
    Batch(Vec<Element>, BatchRoom),
}

impl HandedOut {
    fn tensors(self) -> Result<Vec<Tensor>> {
        match self {
            HandedOut::One(element) => Ok(element.into_vec()),
            HandedOut::Batch(elements, room) => room.fill(&elements),
        }
    }
}

impl Queue {
    /// An empty queue; what it holds counts against the memory that `memory` does.
    pub fn new(name: impl Into<Arc<str>>, spec: QueueSpec, memory: Charge) -> Result<Arc<Queue>> {
        let min_after_dequeue = match spec.order {
            Order::Shuffle { min_after_dequeue, .. } => min_after_dequeue,
            Order::Fifo | Order::PaddingFifo | Order::Priority => 0,
        };
        let state = QueueContents {
            elements: Elements::new(&spec.order),
            holdings: Holdings::new(memory.another(0)?),
            closed: false,
            next_id: 0,
            capacity: spec.capacity.unwrap_or(usize::MAX),
            min_after_dequeue,
            enqueues: VecDeque::new(),
            dequeues: VecDeque::new(),
        };
        Ok(Arc::new(Queue { name: name.into(), spec, memory, state: Mutex::new(state) }))
    }

    /// What it is.
    pub fn spec(&self) -> &QueueSpec {
        &self.spec
    }

    /// How many elements are in it now.
    pub fn len(&self) -> usize {
        self.state.lock().elements.len()
    }

    /// True if no element is in it now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True once it was closed.
    pub fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Adds one element, once there is room.
    pub fn enqueue(self: &Arc<Self>, components: Vec<Tensor>, cancel: &Arc<CancelToken>, done: Done) {
        match self.spec.check(&components, None) {
            Ok(()) => self.enqueue_all(VecDeque::from([components.into()]), cancel, done),
            Err(error) => done.finish(Err(error)),
        }
    }

    /// Adds one element per row of the components, each as soon as there is room.
    pub fn enqueue_many(self: &Arc<Self>, components: &[Tensor], cancel: &Arc<CancelToken>, done: Done) {
        let rows = || -> Result<VecDeque<Element>> {
            let first = components.first().ok_or_else(|| self.spec.wrong_number(0))?;
            let Some(&n) = first.shape().first() else {
                return Err(Error::invalid_argument("Input tensor for EnqueueMany must be at least a vector"));
            };
            self.spec.check(components, Some(n))?;
            // Given back when the elements are there, whose places are then counted as they are.
            let _asked = self.memory.another(rows_bytes(components, n))?;
            (0..n).map(|i| split(components, i, &self.memory)).collect()
        };
        match rows() {
            Ok(rows) if rows.is_empty() => done.finish(Ok(Outcome::default())),
            Ok(rows) => self.enqueue_all(rows, cancel, done),
            Err(error) => done.finish(Err(error)),
        }
    }

    fn enqueue_all(self: &Arc<Self>, rest: VecDeque<Element>, cancel: &Arc<CancelToken>, done: Done) {
        let mut parts = match room(rest.len(), "elements of a queue") {
            Ok(parts) => parts,
            Err(error) => return done.finish(Err(error)),
        };
        parts.extend(rest.iter().map(measured));
        let (id, served) = {
            let mut state = self.state.lock();
            if state.closed {
                drop(state);
                return done.finish(Err(self.closed()));
            }
            if let Err(error) = state.hold(&parts) {
                drop(state);
                return done.finish(Err(error));
            }
            let id = state.new_id();
            state.enqueues.push_back(Enqueue { waiter: Waiter::new(id, done), rest });
            (id, state.serve(self))
        };
        let waits = !served.iter().any(|served| matches!(served, Served::Enqueued(waiter, _) if waiter.id == id));
        self.tell(served);
        if waits {
            watch(self, id, cancel);
        }
    }

    /// Takes elements out, once there are enough.
    pub fn dequeue(self: &Arc<Self>, amount: Amount, cancel: &Arc<CancelToken>, done: Done) {
        let wanted = match amount {
            Amount::One => 1,
            Amount::Many(n) | Amount::UpTo(n) => {
                if !self.spec.can_batch() {
                    return done.finish(Err(Error::invalid_argument(format!(
                        "{}'s DequeueMany and DequeueUpTo require the components to have specified shapes.",
                        self.spec.order.queue_name()
                    ))));
                }
                n
            }
        };
        if wanted == 0 {
            let none = self.room_for(&[]).and_then(|room| room.fill(&[]));
            return done.finish(none.map(Outcome::from));
        }
        let (id, served) = {
            let mut state = self.state.lock();
            let id = state.new_id();
            state.dequeues.push_back(Dequeue { waiter: Waiter::new(id, done), wanted, taken: Vec::new(), amount });
            (id, state.serve(self))
        };
        let waits = !served.iter().any(|served| matches!(served, Served::Dequeued(waiter, ..) if waiter.id == id));
        self.tell(served);
        if waits {
            watch(self, id, cancel);
        }
    }

    /// No more elements may come. Those who wait to add one still may, unless `cancel_pending_enqueues`.
    pub fn close(&self, cancel_pending_enqueues: bool) -> Result<()> {
        let served = {
            let mut state = self.state.lock();
            if state.closed && !cancel_pending_enqueues {
                return Err(Error::cancelled(format!("Queue '{}' is already closed.", self.name)));
            }
            state.closed = true;
            let mut served = Vec::new();
            if cancel_pending_enqueues {
                for enqueue in std::mem::take(&mut state.enqueues) {
                    state.let_go(&enqueue.rest);
                    served.push(Served::Enqueued(enqueue.waiter, Err(enqueue_cancelled())));
                }
            }
            served.extend(state.serve(self));
            served
        };
        self.tell(served);
        Ok(())
    }

    /// Calls back those who are served.
    fn tell(&self, served: Vec<Served>) {
        for served in served {
            match served {
                Served::Enqueued(waiter, result) => waiter.finish(result.map(|()| Outcome::default())),
                Served::Dequeued(waiter, elements) => {
                    waiter.finish(elements.and_then(HandedOut::tensors).map(Outcome::from));
                }
            }
        }
    }

    fn room_for(&self, elements: &[Element]) -> Result<BatchRoom> {
        BatchRoom::new(elements, &self.spec.dtypes, &self.spec.shapes, &self.memory)
    }

    fn closed(&self) -> Error {
        Error::cancelled(format!("{} '{}' is closed.", self.spec.order.queue_name(), self.name))
    }

    fn insufficient(&self, requested: usize, size: usize) -> Error {
        Error::out_of_range(format!(
            "{} '{}' is closed and has insufficient elements (requested {requested}, current size {size})",
            self.spec.order.queue_name(),
            self.name
        ))
    }
}

fn enqueue_cancelled() -> Error {
    Error::cancelled("Enqueue operation was cancelled")
}

fn dequeue_cancelled() -> Error {
    Error::cancelled("Dequeue operation was cancelled")
}

impl QueueContents {
    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Counts elements that come; all or none of them.
    fn hold(&mut self, elements: &[Measured]) -> Result<()> {
        for (i, element) in elements.iter().enumerate() {
            if let Err(error) = self.holdings.add(element) {
                elements[..i].iter().for_each(|element| self.holdings.remove(element));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Counts elements no more: they go.
    fn let_go<'e>(&mut self, elements: impl IntoIterator<Item = &'e Element>) {
        elements.into_iter().for_each(|element| self.holdings.remove(&measured(element)));
    }

    /// Moves elements until nobody at the head of a line can go on.
    fn serve(&mut self, queue: &Queue) -> Vec<Served> {
        let mut served = Vec::new();
        while self.serve_enqueue(&mut served) | self.serve_dequeue(queue, &mut served) {}
        served
    }

    /// Lets the first in line put in what there is room for; true if anything changed.
    fn serve_enqueue(&mut self, served: &mut Vec<Served>) -> bool {
        let Some(head) = self.enqueues.front_mut() else { return false };
        let mut changed = false;
        while self.elements.len() < self.capacity && !head.rest.is_empty() {
            if !self.elements.reserve() {
                let error = self.holdings.no_room();
                if let Some(failed) = self.enqueues.pop_front() {
                    self.let_go(&failed.rest);
                    served.push(Served::Enqueued(failed.waiter, Err(error)));
                }
                return true;
            }
            self.elements.extend(head.rest.pop_front());
            changed = true;
        }
        if head.rest.is_empty()
            && let Some(done) = self.enqueues.pop_front()
        {
            served.push(Served::Enqueued(done.waiter, Ok(())));
            changed = true;
        }
        changed
    }

    /// Lets the first in line take what it may; true if anything changed.
    fn serve_dequeue(&mut self, queue: &Queue, served: &mut Vec<Served>) -> bool {
        let stays = if self.closed { 0 } else { self.min_after_dequeue };
        let is_full = self.elements.len() >= self.capacity;
        let Some(head) = self.dequeues.front_mut() else { return false };
        // A batch that is taken in pieces would be sorted in pieces. Once closed, a queue that is full gets no more.
        if queue.spec.order == Order::Priority
            && self.elements.len() < head.wanted
            && !(self.closed && (self.enqueues.is_empty() || is_full))
        {
            return false;
        }
        let mut changed = false;
        while head.taken.len() < head.wanted
            && self.elements.len() > stays
            && let Some(element) = self.elements.pop()
        {
            head.taken.push(element);
            changed = true;
        }
        let is_full = head.taken.len() == head.wanted;
        // Once closed, only those who already wait may still add.
        let nothing_comes = self.closed && (self.enqueues.is_empty() || queue.spec.order == Order::Priority);
        if !is_full && !nothing_comes {
            return changed;
        }
        let Some(Dequeue { waiter, wanted, taken, amount }) = self.dequeues.pop_front() else { return changed };
        let takes_less = matches!(amount, Amount::UpTo(_)) && !taken.is_empty();
        let result = if is_full || takes_less {
            self.hand_out(queue, &amount, taken)
        } else {
            // It had taken all there was.
            let n_taken = taken.len();
            self.elements.put_back(taken);
            Err(queue.insufficient(wanted, n_taken))
        };
        served.push(Served::Dequeued(waiter, result));
        true
    }

    /// Lets elements leave the queue. If there is no memory for their batch, they are again the next to come.
    fn hand_out(&mut self, queue: &Queue, amount: &Amount, mut taken: Vec<Element>) -> Result<HandedOut> {
        // Counted no more before the batch is asked for, so that a queue that has filled the memory can be emptied.
        self.let_go(&taken);
        let room = match amount {
            Amount::One => None,
            Amount::Many(_) | Amount::UpTo(_) => match queue.room_for(&taken) {
                Ok(room) => Some(room),
                Err(error) => {
                    taken.iter().for_each(|element| self.holdings.put_back(&measured(element)));
                    self.elements.put_back(taken);
                    return Err(error);
                }
            },
        };
        self.elements.shrink();
        Ok(match room {
            Some(room) => HandedOut::Batch(taken, room),
            None => HandedOut::One(taken.pop().unwrap_or_default()),
        })
    }
}

impl Waits for Queue {
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool {
        let mut state = self.state.lock();
        let state = &mut *state;
        let enqueues = state.enqueues.iter_mut().map(|enqueue| &mut enqueue.waiter);
        let dequeues = state.dequeues.iter_mut().map(|dequeue| &mut dequeue.waiter);
        match enqueues.chain(dequeues).find(|waiter| waiter.id == id) {
            Some(waiter) => {
                waiter.attach(token, registration);
                true
            }
            None => false,
        }
    }

    fn cancel(&self, id: u64) {
        let served = {
            let mut state = self.state.lock();
            let mut served = Vec::new();
            if let Some(at) = state.enqueues.iter().position(|enqueue| enqueue.waiter.id == id)
                && let Some(gone) = state.enqueues.remove(at)
            {
                state.let_go(&gone.rest);
                served.push(Served::Enqueued(gone.waiter, Err(enqueue_cancelled())));
            }
            if let Some(at) = state.dequeues.iter().position(|dequeue| dequeue.waiter.id == id)
                && let Some(gone) = state.dequeues.remove(at)
            {
                // Nothing is lost: what it had is again the next to come.
                state.elements.put_back(gone.taken);
                served.push(Served::Dequeued(gone.waiter, Err(dequeue_cancelled())));
            }
            served.extend(state.serve(self));
            served
        };
        self.tell(served);
    }
}

/// Those who still wait when a queue is removed are told.
impl Drop for Queue {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let enqueues = state.enqueues.drain(..).map(|enqueue| (enqueue.waiter, enqueue_cancelled()));
        let dequeues = state.dequeues.drain(..).map(|dequeue| (dequeue.waiter, dequeue_cancelled()));
        let waiters: Vec<(Waiter, Error)> = enqueues.chain(dequeues).collect();
        waiters.into_iter().for_each(|(waiter, error)| waiter.finish(Err(error)));
    }
}

impl Resource for Queue {
    fn kind(&self) -> &'static str {
        self.spec.order.queue_name()
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use kolo_core::{Code, DType, PartialShape};

    use super::*;

    fn fifo(capacity: Option<usize>) -> Arc<Queue> {
        queue(Order::Fifo, capacity)
    }

    fn queue(order: Order, capacity: Option<usize>) -> Arc<Queue> {
        let (dtypes, shapes) = (vec![DType::I64], vec![PartialShape::scalar()]);
        Queue::new("q", QueueSpec { order, capacity, dtypes, shapes }, Charge::NONE).unwrap()
    }

    /// A callback, and where its outcome arrives.
    fn pending() -> (Receiver<Result<Outcome>>, Done) {
        let (sender, receiver) = channel();
        (receiver, Done::new(move |outcome| sender.send(outcome).unwrap_or_default()))
    }

    fn put(queue: &Arc<Queue>, values: &[i64], cancel: &Arc<CancelToken>) -> Receiver<Result<Outcome>> {
        let (receiver, done) = pending();
        queue.enqueue_many(&[Tensor::vector(values)], cancel, done);
        receiver
    }

    fn take(queue: &Arc<Queue>, amount: Amount, cancel: &Arc<CancelToken>) -> Receiver<Result<Outcome>> {
        let (receiver, done) = pending();
        queue.dequeue(amount, cancel, done);
        receiver
    }

    #[track_caller]
    fn values(receiver: &Receiver<Result<Outcome>>) -> Vec<i64> {
        receiver.try_recv().expect("served").expect("well").outputs[0].data::<i64>().unwrap().to_vec()
    }

    #[track_caller]
    fn fails(receiver: &Receiver<Result<Outcome>>, code: Code, text: &str) {
        let error = receiver.try_recv().expect("told").expect_err("should fail");
        assert_eq!((error.code(), error.message()), (code, text));
    }

    #[track_caller]
    fn waits(receiver: &Receiver<Result<Outcome>>) {
        assert!(receiver.try_recv().is_err(), "should still wait");
    }

    #[test]
    fn a_waiting_dequeue_is_served_when_an_element_comes() {
        let (q, token) = (fifo(None), CancelToken::new());
        let (first, second) = (take(&q, Amount::One, &token), take(&q, Amount::One, &token));
        waits(&first);
        put(&q, &[7], &token);
        assert_eq!(values(&first), [7]);
        waits(&second);
        put(&q, &[8, 9], &token);
        assert_eq!(values(&second), [8]);
        assert_eq!(q.len(), 1);
    }

    #[test]
    fn a_full_queue_makes_enqueues_wait_in_order() {
        let (q, token) = (fifo(Some(2)), CancelToken::new());
        let first = put(&q, &[1, 2, 3, 4], &token);
        let second = put(&q, &[5], &token);
        waits(&first);
        assert_eq!(q.len(), 2);
        assert_eq!(values(&take(&q, Amount::One, &token)), [1]);
        waits(&first);
        assert_eq!(values(&take(&q, Amount::One, &token)), [2]);
        assert!(first.try_recv().unwrap().is_ok());
        waits(&second);
        // More than fits at once.
        assert_eq!(values(&take(&q, Amount::Many(3), &token)), [3, 4, 5]);
        assert!(second.try_recv().unwrap().is_ok());
        assert!(q.is_empty());
    }

    #[test]
    fn closing_lets_those_who_wait_to_add_go_on() {
        let (q, token) = (fifo(Some(1)), CancelToken::new());
        let adding = put(&q, &[1, 2, 3], &token);
        q.close(false).unwrap();
        assert!(q.is_closed());
        fails(&put(&q, &[9], &token), Code::Cancelled, "FIFOQueue 'q' is closed.");
        let error = q.close(false).unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::Cancelled, "Queue 'q' is already closed."));
        assert_eq!(values(&take(&q, Amount::Many(2), &token)), [1, 2]);
        assert!(adding.try_recv().unwrap().is_ok());
        assert_eq!(values(&take(&q, Amount::One, &token)), [3]);
        let text = "FIFOQueue 'q' is closed and has insufficient elements (requested 1, current size 0)";
        fails(&take(&q, Amount::One, &token), Code::OutOfRange, text);
        // Nothing to add is nothing to refuse.
        assert!(put(&q, &[], &token).try_recv().unwrap().is_ok());
    }

    #[test]
    fn closing_may_cancel_those_who_wait_to_add() {
        let (q, token) = (fifo(Some(1)), CancelToken::new());
        let adding = put(&q, &[1, 2], &token);
        q.close(true).unwrap();
        q.close(true).unwrap();
        fails(&adding, Code::Cancelled, "Enqueue operation was cancelled");
        assert_eq!(values(&take(&q, Amount::UpTo(5), &token)), [1]);
    }

    #[test]
    fn a_batch_that_cannot_be_filled_is_put_back() {
        let (q, token) = (fifo(None), CancelToken::new());
        put(&q, &[1, 2], &token);
        let many = take(&q, Amount::Many(3), &token);
        let one = take(&q, Amount::One, &token);
        let rest = take(&q, Amount::UpTo(3), &token);
        let none = take(&q, Amount::UpTo(3), &token);
        waits(&many);
        waits(&one);
        assert_eq!(q.len(), 0);
        q.close(false).unwrap();
        let text = "FIFOQueue 'q' is closed and has insufficient elements (requested 3, current size 2)";
        fails(&many, Code::OutOfRange, text);
        assert_eq!(values(&one), [1]);
        assert_eq!(values(&rest), [2]);
        let text = "FIFOQueue 'q' is closed and has insufficient elements (requested 3, current size 0)";
        fails(&none, Code::OutOfRange, text);
    }

    #[test]
    fn a_cancelled_step_stops_waiting_and_loses_nothing() {
        let q = fifo(Some(3));
        let (token, other) = (CancelToken::new(), CancelToken::new());
        put(&q, &[1, 2], &other);
        let many = take(&q, Amount::Many(3), &token);
        let next = take(&q, Amount::Many(2), &other);
        waits(&next);
        token.cancel(Error::cancelled("why"));
        fails(&many, Code::Cancelled, "Dequeue operation was cancelled");
        assert_eq!(values(&next), [1, 2]);
        fails(&take(&q, Amount::One, &token), Code::Cancelled, "Dequeue operation was cancelled");

        let token = CancelToken::new();
        let adding = put(&q, &[1, 2, 3, 4], &token);
        token.cancel(Error::cancelled("why"));
        fails(&adding, Code::Cancelled, "Enqueue operation was cancelled");
        assert_eq!(values(&take(&q, Amount::Many(3), &other)), [1, 2, 3]);
        // Those who were served are not told again.
        other.cancel(Error::cancelled("why"));
    }

    #[test]
    fn a_queue_that_is_removed_tells_those_who_wait() {
        let (q, token) = (fifo(None), CancelToken::new());
        let waiting = take(&q, Amount::One, &token);
        drop(q);
        fails(&waiting, Code::Cancelled, "Dequeue operation was cancelled");
        token.cancel(Error::cancelled("why"));
    }

    #[test]
    fn a_shuffle_keeps_some_to_choose_from_while_open() {
        let q = queue(Order::Shuffle { min_after_dequeue: 2, seeds: (1, 1) }, Some(10));
        let token = CancelToken::new();
        put(&q, &[1, 2, 3], &token);
        let first = values(&take(&q, Amount::One, &token));
        let waiting = take(&q, Amount::Many(2), &token);
        waits(&waiting);
        q.close(false).unwrap();
        let mut all = [first, values(&waiting)].concat();
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3]);
    }

    #[test]
    fn a_priority_queue_gives_a_batch_at_once_and_sorted() {
        let q = queue(Order::Priority, None);
        let (token, other) = (CancelToken::new(), CancelToken::new());
        let many = take(&q, Amount::Many(3), &token);
        put(&q, &[5, 1], &token);
        waits(&many);
        // Nothing is taken until there is enough for all.
        assert_eq!(q.len(), 2);
        put(&q, &[3], &token);
        assert_eq!(values(&many), [1, 3, 5]);
        let (some, next) = (take(&q, Amount::UpTo(2), &other), take(&q, Amount::One, &token));
        put(&q, &[9], &token);
        waits(&some);
        waits(&next);
        other.cancel(Error::cancelled("why"));
        fails(&some, Code::Cancelled, "Dequeue operation was cancelled");
        assert_eq!(values(&next), [9]);
        let (short, rest) = (take(&q, Amount::Many(3), &token), take(&q, Amount::UpTo(3), &token));
        put(&q, &[8, 7], &token);
        q.close(false).unwrap();
        let text = "PriorityQueue 'q' is closed and has insufficient elements (requested 3, current size 2)";
        fails(&short, Code::OutOfRange, text);
        assert_eq!(values(&rest), [7, 8]);
    }

    /// As in TensorFlow, where a batch larger than the queue waits until the queue is closed.
    #[test]
    fn a_batch_that_a_priority_queue_has_no_room_for_ends_when_it_is_closed() {
        let (q, token) = (queue(Order::Priority, Some(2)), CancelToken::new());
        let adding = put(&q, &[3, 1, 2], &token);
        let many = take(&q, Amount::Many(3), &token);
        waits(&many);
        q.close(false).unwrap();
        let text = "PriorityQueue 'q' is closed and has insufficient elements (requested 3, current size 2)";
        fails(&many, Code::OutOfRange, text);
        assert_eq!(values(&take(&q, Amount::Many(2), &token)), [1, 3]);
        assert!(adding.try_recv().unwrap().is_ok());
        assert_eq!(values(&take(&q, Amount::One, &token)), [2]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (q, token) = (fifo(None), CancelToken::new());
        let enqueue = |components: Vec<Tensor>| {
            let (receiver, done) = pending();
            q.enqueue(components, &token, done);
            receiver
        };
        let invalid = Code::InvalidArgument;
        let text = "Type mismatch in tuple component 0. Expected int64, got float";
        fails(&enqueue(vec![Tensor::scalar(1.0f32)]), invalid, text);
        let text = "Shape mismatch in tuple component 0. Expected [], got [1]";
        fails(&enqueue(vec![Tensor::from([1i64])]), invalid, text);
        fails(&enqueue(vec![]), invalid, "Wrong number of components in tuple. Expected 1, got 0");
        let shapeless = QueueSpec { shapes: vec![], ..q.spec().clone() };
        let text = "FIFOQueue's DequeueMany and DequeueUpTo require the components to have specified shapes.";
        fails(&take(&Queue::new("q", shapeless, Charge::NONE).unwrap(), Amount::Many(1), &token), invalid, text);
        assert_eq!(values(&take(&q, Amount::Many(0), &token)), []);
    }

    #[test]
    fn many_threads_lose_and_double_nothing() {
        const PER_THREAD: i64 = 500;
        let (q, token) = (fifo(Some(3)), CancelToken::new());
        let mut taken: Vec<i64> = std::thread::scope(|scope| {
            for thread in 0..3 {
                let (q, token) = (&q, &token);
                scope.spawn(move || {
                    for i in 0..PER_THREAD {
                        put(q, &[thread * PER_THREAD + i], token).recv().unwrap().unwrap();
                    }
                });
            }
            let takers: Vec<_> = (0..3)
                .map(|taker| {
                    let q = &q;
                    scope.spawn(move || {
                        let mut mine = Vec::new();
                        while (mine.len() as i64) < PER_THREAD {
                            // Now and then a step is cancelled while it may be waiting.
                            let token = CancelToken::new();
                            let receiver = take(q, Amount::One, &token);
                            if (mine.len() + taker) % 7 == 0 {
                                token.cancel(Error::cancelled("why"));
                            }
                            if let Ok(outcome) = receiver.recv().unwrap() {
                                mine.extend_from_slice(outcome.outputs[0].data::<i64>().unwrap());
                            }
                        }
                        mine
                    })
                })
                .collect();
            takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect()
        });
        taken.sort_unstable();
        assert_eq!(taken, (0..3 * PER_THREAD).collect::<Vec<_>>());
        assert!(q.is_empty());
    }
}
