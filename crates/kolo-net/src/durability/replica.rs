//! Replication of a task's variables to another task, so that a task that was killed restarts with all acknowledged
//! updates, on any machine.
//!
//! Before a task responds that it has run its part of a step, the variables that the part may have written are sent to
//! the replica and acknowledged by it. A task that starts claims its variables: it gets the copy and an epoch, and from
//! then on records of earlier epochs are refused. So of two processes that both believe they are the task, only the
//! later one can acknowledge a step. Epochs are counted, and carry a random number of the process that counts: no clock
//! decides. `docs/design/durability.md` states the guarantees.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Code, Error, Result};
use kolo_ops::ResourceStore;
use kolo_runtime::Host;
use parking_lot::Mutex;

use crate::durability::variables::{Key, changes, entry, restore};
use crate::task::peers::{Peers, TaskName};
use crate::task::random::random_u64;
use crate::wire::proto::{
    KoloClaimRequest, KoloClaimResponse, KoloReplicateRequest, KoloReplicateResponse, VariableEntry,
};

/// The timeout for the replica's acknowledgement of a record.
const DEADLINE: Duration = Duration::from_secs(10);

/// The replica of a task by default: the next task of the same job, or the first of another job.
pub(crate) fn default_replica(own: &TaskName, peers: &Peers) -> Result<TaskName> {
    let tasks = peers.tasks();
    let of_job: Vec<&TaskName> = tasks.iter().filter(|task| task.job == own.job).collect();
    let next = of_job.iter().find(|task| task.task > own.task).or(of_job.first());
    let other = tasks.iter().find(|task| task.job != own.job);
    let replica = next.copied().filter(|task| *task != own).or(other);
    replica.cloned().ok_or_else(|| {
        Error::failed_precondition(format!(
            "{own} is alone in its cluster: no other task can keep a copy of its variables"
        ))
    })
}

/// The owner's side.
pub(crate) struct Replicator {
    peers: Arc<Peers>,
    to: TaskName,
    epoch: Epoch,
    nonce: Vec<u8>,
    stores: Vec<Arc<ResourceStore>>,
    state: Mutex<ReplicationState>,
}

#[derive(Default)]
struct ReplicationState {
    /// All variables that the copy has a value for.
    known: BTreeSet<(usize, Key)>,
    sequence: u64,
}

impl Replicator {
    /// Claims the variables of this task, and restores the host's variables from the copy. Waits for the replica.
    /// `nonce` is what this process confirms when the replica asks.
    pub async fn claim(peers: Arc<Peers>, to: TaskName, host: &Host, nonce: &[u8]) -> Result<Replicator> {
        if to == peers.own {
            return Err(Error::invalid_argument(format!("{to} cannot keep the copy of its own variables")));
        }
        let request = KoloClaimRequest { task: peers.own.to_string(), nonce: nonce.to_vec() };
        let claimed = peers.task(&to)?.claim(request).await?;
        let stores = host.resources();
        let mut known = BTreeSet::new();
        for entry in claimed.entry {
            let (device, key) = (entry.device as usize, (entry.container.clone(), entry.name.clone()));
            let store = stores.get(device).ok_or_else(|| {
                Error::failed_precondition(format!(
                    "the copy on {to} has variables of device {device}, which is not here"
                ))
            })?;
            restore(store, &key, entry)?;
            known.insert((device, key));
        }
        if !known.is_empty() {
            tracing::warn!("restored {} variables from {to}", known.len());
        }
        let state = Mutex::new(ReplicationState { known, sequence: 0 });
        let epoch = Epoch { counter: claimed.epoch, granted_by: claimed.granted_by };
        Ok(Replicator { peers, to, epoch, nonce: nonce.to_vec(), stores, state })
    }

    /// Sends the current values of these variables to the replica. When this returns, the replica has them.
    pub async fn commit(&self, keys: &BTreeSet<Key>) -> Result<()> {
        let record = self.record(keys)?;
        if record.entry.is_empty() {
            return Ok(());
        }
        let kept = match self.send(record).await {
            // The replica has been restarted and is empty.
            Err(error) if error.code() == Code::NotFound => self.send(self.whole()?).await,
            other => other,
        };
        kept.map_err(|error| {
            let code = if error.code() == Code::Aborted { Code::Aborted } else { Code::Unavailable };
            let text = format!("the step could not be copied to {}, so it is not acknowledged: {error}", self.to);
            Error::new(code, text)
        })
    }

    /// Sends the removal of all variables that the stores no longer have.
    pub async fn commit_removals(&self) -> Result<()> {
        let keys: BTreeSet<Key> = self.state.lock().known.iter().map(|(_, key)| key.clone()).collect();
        self.commit(&keys).await
    }

    async fn send(&self, record: KoloReplicateRequest) -> Result<()> {
        let call = self.peers.task(&self.to)?.replicate(record);
        let answer = tokio::time::timeout(DEADLINE, call).await;
        answer.map_err(|_| Error::unavailable(format!("no answer in {DEADLINE:?}")))?.map(drop)
    }

    /// A record of these variables. Values and sequence number are taken under one lock, so that a record with a larger
    /// number has later values.
    fn record(&self, keys: &BTreeSet<Key>) -> Result<KoloReplicateRequest> {
        let mut state = self.state.lock();
        let entries = changes(&self.stores, keys, &mut state.known)?;
        Ok(self.next(&mut state, entries, false))
    }

    fn whole(&self) -> Result<KoloReplicateRequest> {
        let mut state = self.state.lock();
        let mut entries = Vec::with_capacity(state.known.len());
        for place in &state.known {
            let value = self.stores.get(place.0).map(|store| entry(store, place)).transpose()?;
            entries.extend(value.flatten());
        }
        Ok(self.next(&mut state, entries, true))
    }

    fn next(&self, state: &mut ReplicationState, entry: Vec<VariableEntry>, is_whole: bool) -> KoloReplicateRequest {
        state.sequence += 1;
        let (task, sequence) = (self.peers.own.to_string(), state.sequence);
        let (Epoch { counter: epoch, granted_by }, nonce) = (self.epoch, self.nonce.clone());
        KoloReplicateRequest { task, epoch, granted_by, sequence, is_whole, entry, nonce }
    }
}

/// Who may send records of a task's variables: the last claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Epoch {
    /// Larger than the counters of all claims that the replica had heard of.
    counter: u64,
    /// A random number of the process that granted it.
    granted_by: u64,
}

/// The copies that a task stores for others.
pub(crate) struct Replicas {
    copies: Mutex<HashMap<String, VariablesCopy>>,
    /// Distinguishes the claims that this process granted from those of its former lives.
    own: u64,
}

impl Default for Replicas {
    fn default() -> Replicas {
        Replicas { copies: Mutex::default(), own: random_u64() }
    }
}

/// The variables of one other task.
#[derive(Default)]
struct VariablesCopy {
    epoch: Epoch,
    /// The entries with the sequence number of their record. Removed variables have an entry without a value.
    variables: BTreeMap<(u32, Key), (u64, VariableEntry)>,
}

impl Replicas {
    /// Returns a task's copy under a new epoch; records of earlier epochs are refused from now on.
    pub fn claim(&self, task: &str) -> KoloClaimResponse {
        let mut copies = self.copies.lock();
        let copy = copies.entry(task.to_owned()).or_default();
        let epoch = Epoch { counter: copy.epoch.counter.saturating_add(1), granted_by: self.own };
        copy.epoch = epoch;
        // The new owner's sequence numbers start over.
        copy.variables.retain(|_, (_, entry)| entry.value.is_some());
        copy.variables.values_mut().for_each(|(sequence, _)| *sequence = 0);
        let entry = copy.variables.values().map(|(_, entry)| entry.clone()).collect();
        KoloClaimResponse { epoch: epoch.counter, granted_by: epoch.granted_by, entry }
    }

    /// Whether a record's epoch is later than the copy's. What this process granted is later than all that its former lives
    /// did. Among those the counter decides, which grows with every claim that a life has heard of; two that cannot be told
    /// apart keep the one that came first.
    fn is_later(&self, epoch: Epoch, than: Epoch) -> bool {
        let rank = |epoch: Epoch| (epoch.granted_by == self.own, epoch.counter);
        rank(epoch) > rank(than)
    }

    /// Stores a record of the owner.
    pub fn keep(&self, record: KoloReplicateRequest) -> Result<KoloReplicateResponse> {
        let KoloReplicateRequest { task, epoch, granted_by, sequence, is_whole, entry, nonce: _ } = record;
        let epoch = Epoch { counter: epoch, granted_by };
        let mut copies = self.copies.lock();
        let copy = match copies.get_mut(&task) {
            Some(copy) if copy.epoch != epoch && !self.is_later(epoch, copy.epoch) => {
                return Err(Error::aborted(format!(
                    "another process has become {task} since; records of this one are refused"
                )));
            }
            Some(copy) if copy.epoch == epoch || is_whole => copy,
            None if is_whole => copies.entry(task).or_default(),
            Some(_) | None => return Err(Error::not_found(format!("no copy of the variables of {task}"))),
        };
        copy.epoch = epoch;
        if is_whole {
            copy.variables.retain(|_, (known, _)| *known > sequence);
        }
        for entry in entry {
            let key = (entry.device, (entry.container.clone(), entry.name.clone()));
            if copy.variables.get(&key).is_none_or(|(known, _)| *known < sequence) {
                copy.variables.insert(key, (sequence, entry));
            }
        }
        Ok(KoloReplicateResponse {})
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use super::*;
    use crate::wire::tensor_wire::WireTensor;

    fn variable(name: &str, value: Option<f32>) -> VariableEntry {
        let value = value.map(|value| WireTensor::new(Tensor::scalar(value)).unwrap());
        VariableEntry { name: name.to_owned(), value, ..VariableEntry::default() }
    }

    fn epoch(claimed: &KoloClaimResponse) -> Epoch {
        Epoch { counter: claimed.epoch, granted_by: claimed.granted_by }
    }

    fn record(epoch: Epoch, sequence: u64, entry: Vec<VariableEntry>) -> KoloReplicateRequest {
        let Epoch { counter: epoch, granted_by } = epoch;
        let (task, nonce) = ("ps".to_owned(), Vec::new());
        KoloReplicateRequest { task, epoch, granted_by, sequence, is_whole: false, entry, nonce }
    }

    fn values(claimed: KoloClaimResponse) -> Vec<(String, f32)> {
        let value = |entry: VariableEntry| entry.value.unwrap().into_tensor().unwrap().scalar_value().unwrap();
        claimed.entry.into_iter().map(|entry| (entry.name.clone(), value(entry))).collect()
    }

    #[test]
    fn the_last_values_are_handed_out_whatever_order_they_came_in() {
        let replicas = Replicas::default();
        let first = replicas.claim("ps");
        assert!(first.entry.is_empty());
        let a = |value| variable("a", Some(value));
        replicas.keep(record(epoch(&first), 2, vec![a(2.0), variable("b", Some(7.0))])).unwrap();
        replicas.keep(record(epoch(&first), 1, vec![a(1.0), variable("c", Some(8.0))])).unwrap();
        replicas.keep(record(epoch(&first), 4, vec![variable("b", None)])).unwrap();
        replicas.keep(record(epoch(&first), 3, vec![variable("b", Some(9.0))])).unwrap();
        let second = replicas.claim("ps");
        assert!(second.epoch > first.epoch);
        let newest = epoch(&second);
        assert_eq!(values(second), [("a".to_owned(), 2.0), ("c".to_owned(), 8.0)]);
        // The new owner's first record is newer than all of the old one's.
        replicas.keep(record(newest, 1, vec![a(5.0)])).unwrap();
        assert_eq!(values(replicas.claim("ps"))[0].1, 5.0);
        assert!(replicas.claim("another").entry.is_empty());
    }

    #[test]
    fn a_former_owner_is_refused_and_one_who_is_not_known_must_send_everything() {
        let replicas = Replicas::default();
        let old = epoch(&replicas.claim("ps"));
        let new = epoch(&replicas.claim("ps"));
        let error = replicas.keep(record(old, 1, vec![variable("a", Some(1.0))])).unwrap_err();
        assert_eq!(error.code(), Code::Aborted);
        let whole = KoloReplicateRequest { is_whole: true, ..record(old, 9, Vec::new()) };
        assert_eq!(replicas.keep(whole).unwrap_err().code(), Code::Aborted);
        // A restarted replica is empty.
        let replicas = Replicas::default();
        let part = record(new, 5, vec![variable("a", Some(1.0))]);
        assert_eq!(replicas.keep(part.clone()).unwrap_err().code(), Code::NotFound);
        replicas.keep(KoloReplicateRequest { is_whole: true, ..part }).unwrap();
        // A record that was sent before it and arrives after it is ignored.
        replicas.keep(record(new, 4, vec![variable("a", Some(0.0))])).unwrap();
        assert_eq!(values(replicas.claim("ps")), [("a".to_owned(), 1.0)]);
    }

    #[test]
    fn an_owner_of_before_a_restart_of_the_replica_is_refused_whatever_the_clock_said_then() {
        // Any number of claims, as if the replica's clock had been ahead.
        let former = Replicas::default();
        let old = epoch(&former.claim("ps"));
        let ahead = Epoch { counter: old.counter + 3_600_000_000, ..old };
        let restarted = Replicas::default();
        let new = epoch(&restarted.claim("ps"));
        let whole = |epoch| KoloReplicateRequest { is_whole: true, ..record(epoch, 9, vec![variable("a", Some(1.0))]) };
        for former in [old, ahead] {
            assert_eq!(restarted.keep(whole(former)).unwrap_err().code(), Code::Aborted);
        }
        restarted.keep(record(new, 1, vec![variable("a", Some(2.0))])).unwrap();
        // If nobody has claimed since the restart, the last owner of before goes on, and an earlier one does not.
        let newer = epoch(&former.claim("ps"));
        let restarted = Replicas::default();
        restarted.keep(whole(newer)).unwrap();
        restarted.keep(record(newer, 10, vec![variable("a", Some(3.0))])).unwrap();
        assert_eq!(restarted.keep(whole(old)).unwrap_err().code(), Code::Aborted);
        // The next claim is later than both.
        let last = restarted.claim("ps");
        assert!(last.epoch > newer.counter);
        for former in [old, newer] {
            assert_eq!(restarted.keep(whole(former)).unwrap_err().code(), Code::Aborted);
        }
    }
}
