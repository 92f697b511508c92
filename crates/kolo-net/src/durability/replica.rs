//! Replication of a task's variables to another task, so that a task that was killed restarts with all acknowledged
//! updates, on any machine.
//!
//! Before a task responds that it has run its part of a step, the variables that the part may have written are sent to
//! the replica and acknowledged by it. A task that starts claims its variables: it gets the copy and an epoch, and from
//! then on records of earlier epochs are refused. So of two processes that both believe they are the task, only the
//! later one can acknowledge a step. `docs/design/durability.md` states the guarantees.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use kolo_core::{Code, Error, Result};
use kolo_ops::ResourceStore;
use kolo_runtime::Host;
use parking_lot::Mutex;

use crate::durability::variables::{Key, changes, entry, restore};
use crate::task::peers::{Peers, TaskName};
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
    epoch: u64,
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
    pub async fn claim(peers: Arc<Peers>, to: TaskName, host: &Host) -> Result<Replicator> {
        if to == peers.own {
            return Err(Error::invalid_argument(format!("{to} cannot keep the copy of its own variables")));
        }
        let request = KoloClaimRequest { task: peers.own.to_string() };
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
        Ok(Replicator { peers, to, epoch: claimed.epoch, stores, state })
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
        KoloReplicateRequest { task, epoch: self.epoch, sequence, is_whole, entry }
    }
}

/// The copies that a task stores for others.
#[derive(Default)]
pub(crate) struct Replicas {
    copies: Mutex<HashMap<String, VariablesCopy>>,
    last_epoch: AtomicU64,
}

/// The variables of one other task.
#[derive(Default)]
struct VariablesCopy {
    epoch: u64,
    /// The entries with the sequence number of their record. Removed variables have an entry without a value.
    variables: BTreeMap<(u32, Key), (u64, VariableEntry)>,
}

impl Replicas {
    /// Returns a task's copy under a new epoch; records of earlier epochs are refused from now on.
    pub fn claim(&self, task: &str) -> KoloClaimResponse {
        // Larger than the epochs that a previous process of this task gave out.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |time| time.as_micros() as u64);
        let epoch = self.last_epoch.load(Ordering::Relaxed).saturating_add(1).max(now);
        self.last_epoch.store(epoch, Ordering::Relaxed);
        let mut copies = self.copies.lock();
        let copy = copies.entry(task.to_owned()).or_default();
        copy.epoch = epoch;
        // The new owner's sequence numbers start over.
        copy.variables.retain(|_, (_, entry)| entry.value.is_some());
        copy.variables.values_mut().for_each(|(sequence, _)| *sequence = 0);
        KoloClaimResponse { epoch, entry: copy.variables.values().map(|(_, entry)| entry.clone()).collect() }
    }

    /// Stores a record of the owner.
    pub fn keep(&self, record: KoloReplicateRequest) -> Result<KoloReplicateResponse> {
        let KoloReplicateRequest { task, epoch, sequence, is_whole, entry } = record;
        let mut copies = self.copies.lock();
        let copy = match copies.get_mut(&task) {
            Some(copy) if copy.epoch > epoch => {
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

    fn record(epoch: u64, sequence: u64, entry: Vec<VariableEntry>) -> KoloReplicateRequest {
        KoloReplicateRequest { task: "ps".to_owned(), epoch, sequence, is_whole: false, entry }
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
        replicas.keep(record(first.epoch, 2, vec![a(2.0), variable("b", Some(7.0))])).unwrap();
        replicas.keep(record(first.epoch, 1, vec![a(1.0), variable("c", Some(8.0))])).unwrap();
        replicas.keep(record(first.epoch, 4, vec![variable("b", None)])).unwrap();
        replicas.keep(record(first.epoch, 3, vec![variable("b", Some(9.0))])).unwrap();
        let second = replicas.claim("ps");
        assert!(second.epoch > first.epoch);
        let epoch = second.epoch;
        assert_eq!(values(second), [("a".to_owned(), 2.0), ("c".to_owned(), 8.0)]);
        // The new owner's first record is newer than all of the old one's.
        replicas.keep(record(epoch, 1, vec![a(5.0)])).unwrap();
        assert_eq!(values(replicas.claim("ps"))[0].1, 5.0);
        assert!(replicas.claim("another").entry.is_empty());
    }

    #[test]
    fn a_former_owner_is_refused_and_one_who_is_not_known_must_send_everything() {
        let replicas = Replicas::default();
        let old = replicas.claim("ps").epoch;
        let new = replicas.claim("ps").epoch;
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
}
