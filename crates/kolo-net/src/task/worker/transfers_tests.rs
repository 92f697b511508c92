//! Tests of a step's rendezvous table.

use std::sync::{Arc, mpsc};

use kolo_core::{Error, Result, Tensor};
use kolo_ops::{Received, Rendezvous as _, RendezvousKey};
use kolo_runtime::StepRendezvous as _;
use parking_lot::Mutex;

use super::transfers::{Fetch, StepTransfers, Transfers, Waiter};
use crate::task::services::{Delivery, Each, Group, Guard};

/// Keeps requests pending until the test responds.
#[derive(Default)]
struct Asked(Mutex<Vec<(String, Waiter)>>, Mutex<Vec<Each>>);

impl Fetch for Asked {
    fn fetch(&self, _: u64, key: &RendezvousKey, done: Waiter) -> Guard {
        self.0.lock().push((key.to_string(), done));
        Box::new(())
    }
    /// Task 9 supports only single requests.
    fn fetch_group(&self, _: u64, group: &Group, each: Each) -> Option<Guard> {
        self.1.lock().push(each);
        (group.task.task != 9).then(|| Box::new(()) as Guard)
    }
}

fn group(task: u32, keys: &[RendezvousKey]) -> Group {
    Group { task: crate::task::peers::TaskName::new("w", task), keys: keys.into(), wire: Default::default() }
}

fn key(task: u32) -> RendezvousKey {
    let device = |task| format!("/job:w/replica:0/task:{task}/device:CPU:0");
    RendezvousKey::parse(&format!("{};0000000000000001;{};edge;0:0", device(task), device(0))).unwrap()
}

fn table(asked: &Arc<Asked>) -> Arc<Transfers> {
    Arc::new(Transfers::new(7, "/job:w/replica:0/task:0/".into(), asked.clone()))
}

fn value(x: f32) -> Received {
    Received::value(Tensor::scalar(x))
}

fn recv(table: &Arc<Transfers>, key: RendezvousKey) -> mpsc::Receiver<Result<f32>> {
    let (sender, receiver) = mpsc::channel();
    let done = Box::new(move |received: Result<Received>| {
        let value = received.and_then(|received| received.tensor.scalar_value::<f32>());
        sender.send(value).expect("the test listens");
    });
    StepTransfers(table.clone()).recv(key, done);
    receiver
}

#[test]
fn own_values_meet_here_and_others_are_asked_for() {
    let asked = Arc::new(Asked::default());
    let table = table(&asked);
    let waiting = recv(&table, key(0));
    assert!(waiting.try_recv().is_err());
    StepTransfers(table.clone()).send(key(0), value(1.0)).unwrap();
    assert_eq!(waiting.try_recv().unwrap(), Ok(1.0));

    let waiting = recv(&table, key(1));
    assert!(table.waits()[0].is_remote);
    let (text, done) = asked.0.lock().pop().unwrap();
    assert_eq!(text, key(1).to_string());
    done(Ok(value(2.0)));
    assert_eq!(waiting.try_recv().unwrap(), Ok(2.0));
    assert!(table.is_empty());
}

#[test]
fn aborting_answers_everyone_and_late_answers_are_dropped() {
    let asked = Arc::new(Asked::default());
    let table = table(&asked);
    let waits = [recv(&table, key(0)), recv(&table, key(1))];
    StepTransfers(table.clone()).abort(Error::cancelled("stop"));
    for wait in waits {
        assert_eq!(wait.try_recv().unwrap().unwrap_err().message(), "stop");
    }
    let (_, done) = asked.0.lock().pop().unwrap();
    done(Ok(value(1.0)));
    assert!(recv(&table, key(0)).try_recv().unwrap().is_err());
    assert!(StepTransfers(table.clone()).send(key(0), value(1.0)).is_err());
}

#[test]
fn a_wait_that_was_given_up_takes_no_value() {
    let table = table(&Arc::default());
    let ticket = table.wait(key(0), Box::new(|_| panic!("nobody waits any more")));
    table.give_up(&key(0), ticket);
    StepTransfers(table.clone()).send(key(0), value(1.0)).unwrap();
    assert!(table.take(&key(0)).is_some());
    assert!(table.take(&key(0)).is_none());
}

#[test]
fn what_was_asked_for_ahead_is_not_asked_for_again() {
    let asked = Arc::new(Asked::default());
    let table = table(&asked);
    let other = RendezvousKey::parse(&key(1).to_string().replace("edge", "other")).unwrap();
    table.ask_ahead(&[group(1, &[key(1), other.clone()])]);
    table.ask_ahead(&[group(1, &[key(1)])]);
    assert_eq!(asked.1.lock().len(), 1, "a step asks once");
    assert!(!table.is_empty(), "what was asked for ahead would be missed");
    let each = asked.1.lock().pop().unwrap();
    // One arrives before a `_Recv` needs it, the other after.
    each(0, Ok(value(1.0)));
    assert_eq!(recv(&table, key(1)).try_recv().unwrap(), Ok(1.0));
    assert!(!table.is_empty(), "one is still to come");
    let waiting = recv(&table, other);
    assert!(waiting.try_recv().is_err() && table.waits()[0].is_remote);
    each(1, Ok(value(2.0)));
    assert_eq!(waiting.try_recv().unwrap(), Ok(2.0));
    assert!(asked.0.lock().is_empty() && table.is_empty());
    each(1, Ok(value(3.0)));
    each(7, Ok(value(3.0)));
    // A second receive makes a request of its own.
    drop(recv(&table, key(1)));
    assert_eq!(asked.0.lock().len(), 1);
}

#[test]
fn a_task_that_cannot_be_asked_at_once_is_asked_one_by_one() {
    let asked = Arc::new(Asked::default());
    let table = table(&asked);
    table.ask_ahead(&[group(9, &[key(9)])]);
    let waiting = recv(&table, key(9));
    let (_, done) = asked.0.lock().pop().unwrap();
    done(Ok(value(4.0)));
    assert_eq!(waiting.try_recv().unwrap(), Ok(4.0));
}

#[test]
fn an_abort_reaches_who_waits_for_what_was_asked_for_ahead() {
    let asked = Arc::new(Asked::default());
    let table = table(&asked);
    table.ask_ahead(&[group(1, &[key(1)])]);
    let waiting = recv(&table, key(1));
    StepTransfers(table.clone()).abort(Error::cancelled("stop"));
    assert_eq!(waiting.try_recv().unwrap().unwrap_err().message(), "stop");
    asked.1.lock()[0](0, Ok(value(1.0)));
}

#[test]
fn values_for_others_go_out_together() {
    let table = table(&Arc::default());
    let (got, flushed): (Arc<Mutex<Vec<usize>>>, Arc<Mutex<usize>>) = Default::default();
    let (got_by, flushed_by) = (got.clone(), flushed.clone());
    let delivery = Delivery {
        each: Arc::new(move |index, _| got_by.lock().push(index)),
        flush: Arc::new(move || *flushed_by.lock() += 1),
    };
    let other = RendezvousKey::parse(&key(0).to_string().replace("edge", "other")).unwrap();
    let step = StepTransfers(table.clone());
    step.send(other.clone(), value(1.0)).unwrap();
    let third = RendezvousKey::parse(&key(0).to_string().replace("edge", "third")).unwrap();
    let guard = table.wait_for_group(&[key(0), other, third.clone()].into(), &delivery);
    assert_eq!(*got.lock(), [1]);
    step.send(key(0), value(2.0)).unwrap();
    assert_eq!((got.lock().clone(), *flushed.lock()), (vec![1, 0], 0));
    step.flush();
    step.flush();
    assert_eq!(*flushed.lock(), 1, "nothing lies any more");
    // A cancelled wait leaves the remaining values for others.
    drop(guard);
    step.send(third.clone(), value(3.0)).unwrap();
    assert!(got.lock().len() == 2 && table.take(&third).is_some());
}
