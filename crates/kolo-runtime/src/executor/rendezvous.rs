//! The rendezvous of one step: transfers of tensors between devices of one process.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use kolo_core::{Error, Result};
use kolo_ops::{Received, Rendezvous, RendezvousKey};

use super::sync::Mutex;

type Waiter = Box<dyn FnOnce(Result<Received>) + Send>;

/// One step's transfers, for the executor.
pub trait StepRendezvous: Rendezvous {
    /// Fails the step's pending and later transfers with `reason`.
    fn abort(&self, reason: Error);

    /// Flushes buffered sends. Called before a long kernel, and when a thread has no more nodes to run.
    fn flush(&self) {}
}

/// One step's transfers. Sender and receiver may come in either order; neither blocks.
#[derive(Default)]
pub struct LocalRendezvous {
    state: Mutex<Transfers>,
}

#[derive(Default)]
struct Transfers {
    transfers: HashMap<RendezvousKey, Transfer>,
    aborted: Option<Error>,
}

enum Transfer {
    Value(Received),
    Waiter(Waiter),
}

impl StepRendezvous for LocalRendezvous {
    fn abort(&self, reason: Error) {
        let transfers = {
            let mut state = self.state.lock();
            if state.aborted.is_some() {
                return;
            }
            state.aborted = Some(reason.clone());
            std::mem::take(&mut state.transfers)
        };
        for transfer in transfers.into_values() {
            if let Transfer::Waiter(waiter) = transfer {
                waiter(Err(reason.clone()));
            }
        }
    }
}

impl LocalRendezvous {
    /// The transfers with a waiting receiver.
    pub fn waiting(&self) -> Vec<String> {
        let state = self.state.lock();
        let waiting = state.transfers.iter().filter(|(_, transfer)| matches!(transfer, Transfer::Waiter(_)));
        waiting.map(|(key, _)| key.edge.to_string()).collect()
    }
}

impl Rendezvous for LocalRendezvous {
    fn send(&self, key: RendezvousKey, value: Received) -> Result<()> {
        let mut state = self.state.lock();
        if let Some(reason) = &state.aborted {
            return Err(reason.clone().into_derived());
        }
        match state.transfers.entry(key) {
            Entry::Vacant(vacant) => {
                vacant.insert(Transfer::Value(value));
                Ok(())
            }
            Entry::Occupied(occupied) => match occupied.get() {
                Transfer::Value(_) => Err(Error::aborted(format!("{} was sent twice", occupied.key().edge))),
                Transfer::Waiter(_) => {
                    let Transfer::Waiter(waiter) = occupied.remove() else { unreachable!("it was a waiter") };
                    drop(state);
                    waiter(Ok(value));
                    Ok(())
                }
            },
        }
    }

    fn recv(&self, key: RendezvousKey, done: Waiter) {
        let mut state = self.state.lock();
        let result = match &state.aborted {
            Some(reason) => Err(reason.clone().into_derived()),
            None => match state.transfers.entry(key) {
                Entry::Vacant(vacant) => {
                    vacant.insert(Transfer::Waiter(done));
                    return;
                }
                Entry::Occupied(occupied) => match occupied.get() {
                    Transfer::Value(_) => {
                        let Transfer::Value(value) = occupied.remove() else { unreachable!("it was a value") };
                        value.picked_up()
                    }
                    Transfer::Waiter(_) => Err(Error::aborted(format!("{} is received twice", occupied.key().edge))),
                },
            },
        };
        drop(state);
        done(result);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kolo_core::Tensor;

    use super::*;

    fn key(edge: &str) -> RendezvousKey {
        RendezvousKey { edge: edge.into(), frame_iteration: Default::default() }
    }

    fn value(x: f32) -> Received {
        Received::value(Tensor::scalar(x))
    }

    fn recv(rendezvous: &LocalRendezvous, edge: &str) -> mpsc::Receiver<Result<f32>> {
        let (sender, receiver) = mpsc::channel();
        rendezvous.recv(
            key(edge),
            Box::new(move |received| {
                let value = received.and_then(|received| received.tensor.scalar_value::<f32>());
                sender.send(value).expect("the test listens");
            }),
        );
        receiver
    }

    #[test]
    fn either_side_may_come_first() {
        let rendezvous = LocalRendezvous::default();
        rendezvous.send(key("a"), value(1.0)).unwrap();
        assert_eq!(recv(&rendezvous, "a").try_recv().unwrap(), Ok(1.0));
        let waiting = recv(&rendezvous, "b");
        assert!(waiting.try_recv().is_err());
        assert_eq!(rendezvous.waiting(), ["b"]);
        rendezvous.send(key("b"), value(2.0)).unwrap();
        assert_eq!(waiting.try_recv().unwrap(), Ok(2.0));
    }

    #[test]
    fn aborting_answers_all_who_wait_and_all_who_come_later() {
        let rendezvous = LocalRendezvous::default();
        let waiting = recv(&rendezvous, "a");
        rendezvous.abort(Error::cancelled("stop"));
        assert!(waiting.try_recv().unwrap().is_err());
        assert!(recv(&rendezvous, "b").try_recv().unwrap().is_err());
        assert!(rendezvous.send(key("c"), value(1.0)).is_err());
    }

    #[test]
    fn sending_twice_is_an_error() {
        let rendezvous = LocalRendezvous::default();
        rendezvous.send(key("a"), value(1.0)).unwrap();
        assert!(rendezvous.send(key("a"), value(1.0)).is_err());
    }
}
