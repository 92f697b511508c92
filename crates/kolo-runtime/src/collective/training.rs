//! The trainings of this machine, as the memory of their ranks' groups tells of them: for `kolo doctor`, which asks no process.

use std::collections::BTreeMap;

use kolo_device::shared_group::{BoardOf, RankBoard};

use super::record::RankState;

/// Ranks that train together, some of them at least on this machine.
pub struct Training {
    /// What each rank does.
    pub ranks: Vec<RankState>,
    /// Processes of this machine that belong to it: ranks, and who started them.
    pub pids: Vec<u32>,
    /// Whether its ranks share memory; otherwise they send messages.
    pub shares_memory: bool,
}

impl Training {
    /// All trainings of several ranks whose processes this one may look at, the one with the lowest process first.
    pub fn find_all() -> Vec<Training> {
        let mut groups: BTreeMap<BoardOf, Vec<(RankBoard, Vec<u32>)>> = BTreeMap::new();
        for (board, pids) in RankBoard::find_all() {
            if board.n_ranks() < 2 || board.has_ended() {
                continue;
            }
            let group = match board.of() {
                BoardOf::Rank { group, .. } => BoardOf::Rank { group, rank: 0 },
                shared @ BoardOf::Shared(..) => shared,
            };
            groups.entry(group).or_default().push((board, pids));
        }
        let mut all: Vec<Training> = groups.into_values().map(|boards| Training::new(&boards)).collect();
        all.retain(|training| !training.pids.is_empty());
        all.sort_by_key(|training| training.pids.clone());
        all
    }

    fn new(boards: &[(RankBoard, Vec<u32>)]) -> Training {
        let mut pids: Vec<u32> = boards.iter().flat_map(|(_, pids)| pids.iter().copied()).collect();
        pids.sort_unstable();
        pids.dedup();
        let n_ranks = boards.iter().map(|(board, _)| board.n_ranks()).max().unwrap_or(0);
        let shares_memory = boards.iter().any(|(board, _)| matches!(board.of(), BoardOf::Shared(..)));
        let ranks = (0..n_ranks).filter_map(|rank| state(boards, rank)).collect();
        Training { ranks, pids, shares_memory }
    }

    /// The process that stands for it: who started the ranks, or else the first rank.
    pub fn pid(&self) -> Option<u32> {
        let ranks: Vec<u32> = self.ranks.iter().filter_map(|rank| rank.pid).collect();
        let starter = self.pids.iter().find(|pid| !ranks.contains(pid));
        starter.or(ranks.iter().find(|pid| self.pids.contains(pid))).or(self.pids.first()).copied()
    }
}

/// What is known best of a rank: what it has written itself, or else what it has told somebody last.
fn state(boards: &[(RankBoard, Vec<u32>)], rank: usize) -> Option<RankState> {
    let of = |(board, _): &(RankBoard, Vec<u32>)| {
        let note = board.record(rank)?.read();
        let is_own = match board.of() {
            BoardOf::Shared(..) => true,
            BoardOf::Rank { rank: owner, .. } => owner == rank,
        };
        Some((!is_own, note.pid == 0, std::cmp::Reverse(note.heard), note))
    };
    let best = boards.iter().filter_map(of).min_by_key(|(is_told, is_absent, heard, _)| (*is_absent, *is_told, *heard));
    best.map(|(_, _, _, note)| RankState::new(rank, note))
}

#[cfg(test)]
mod tests {
    use kolo_device::shared_group::Activity;

    use super::*;
    use crate::collective::{Communicator, CommunicatorOptions};

    #[test]
    fn the_ranks_of_this_process_are_found_with_what_they_do() {
        let mut ranks = Communicator::in_process(3, &CommunicatorOptions::default()).unwrap();
        std::thread::scope(|scope| {
            for rank in &mut ranks {
                scope.spawn(|| {
                    // A step that nothing else in this process has.
                    rank.recorder().note_step(987_650 + rank.rank() as i64, Activity::Saving);
                    rank.barrier().unwrap();
                });
            }
        });
        let found = Training::find_all();
        let ours = |training: &&Training| training.ranks.first().is_some_and(|rank| rank.step == Some(987_650));
        let training = found.iter().find(ours).unwrap();
        assert_eq!((training.pid(), training.shares_memory), (Some(std::process::id()), true));
        assert_eq!(training.ranks.len(), 3);
        for (i, rank) in training.ranks.iter().enumerate() {
            assert_eq!((rank.step, rank.activity, rank.n_calls), (Some(987_650 + i as i64), Activity::Saving, 1));
            assert_eq!((rank.call.as_ref(), rank.last_calls.len()), (None, 1));
            let text = rank.last_calls[0].to_string();
            assert!(
                text.starts_with("call 0, barrier 'barrier'") && text.ends_with(&format!("in step 98765{i}")),
                "{text}"
            );
        }
    }

    #[test]
    fn what_a_rank_has_written_itself_counts_more_than_what_it_has_told() {
        let boards = [0, 1].map(|rank| (RankBoard::alone(3, rank, [7; 16]).unwrap(), vec![]));
        for (rank, (board, _)) in boards.iter().enumerate() {
            board.record(rank).unwrap().adopt();
            board.record(rank).unwrap().note_step(5, Activity::Computing);
        }
        let told = |of: usize, by: usize, step: i64| {
            let note = boards[0].0.record(0).unwrap().read();
            boards[by].0.record(of).unwrap().copy(&kolo_device::shared_group::RankNote { step: Some(step), ..note });
        };
        told(0, 1, 3);
        told(2, 1, 4);
        let training = Training::new(&boards);
        let steps: Vec<Option<i64>> = training.ranks.iter().map(|rank| rank.step).collect();
        assert_eq!(steps, [Some(5), Some(5), Some(4)]);
    }
}
