//! Finds the rank that all others wait for, and why.
//!
//! Ranks that exchange gradients take as long for a step as the slowest of them, so steps do not tell which one that is. Each
//! measures how long it is busy by itself: from the end of a step to the first collective of the next one.

use std::collections::VecDeque;
use std::fmt;

/// A rank has to be this much slower than the others to be named.
const SLOW: f64 = 1.3;

/// Steps that are averaged: fewer than a slow rank may stay unnamed, more than a pause for a checkpoint.
const WINDOW: usize = 10;

/// And the others have to wait this long for it, in seconds: less is noise.
const NOTICEABLE: f64 = 5e-3;

/// What a rank does by itself in a step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankTimes {
    /// From the end of the step before to the first collective.
    pub busy: f64,
    /// The part of it in which it waited for its data.
    pub input: f64,
}

/// A rank that makes all others wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowRank {
    /// Which one.
    pub rank: usize,
    /// How many times as long as the others it is busy before it meets them.
    pub factor: f64,
    /// What takes it so long.
    pub cause: SlowCause,
}

/// What makes a rank slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlowCause {
    /// It waits for its data: reading, decoding, augmenting.
    Input,
    /// It computes for longer: a slower or busier processor, or more work.
    Compute,
}

impl fmt::Display for SlowRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.cause {
            SlowCause::Input => "it waits for its input",
            SlowCause::Compute => "it computes longer than the others",
        };
        write!(f, "rank {} takes {:.1} times as long as the others, which wait for it: {why}", self.rank, self.factor)
    }
}

/// Looks at the times of all ranks, step by step.
#[derive(Default)]
pub(crate) struct SlowRankWatch {
    window: VecDeque<Vec<RankTimes>>,
    /// Who was named last, so that it is not said again in every step.
    named: Option<usize>,
}

impl SlowRankWatch {
    /// Takes the times of a step, one for each rank. Returns a rank that has become slow.
    pub fn observe(&mut self, times: Vec<RankTimes>) -> Option<SlowRank> {
        self.window.push_back(times);
        if self.window.len() > WINDOW {
            self.window.pop_front();
        }
        if self.window.len() < WINDOW {
            return None;
        }
        let slow = self.slowest();
        let is_news = slow.is_some_and(|slow| self.named != Some(slow.rank));
        self.named = slow.map(|slow| slow.rank);
        slow.filter(|_| is_news)
    }

    fn slowest(&self) -> Option<SlowRank> {
        let n_ranks = self.window.front()?.len();
        // The median of a rank's steps: one long pause makes nobody slow.
        let of = |rank: usize, pick: &dyn Fn(&RankTimes) -> f64| {
            median(self.window.iter().filter_map(|times| times.get(rank)).map(pick).collect())
        };
        let of_all = |pick: &dyn Fn(&RankTimes) -> f64| (0..n_ranks).map(|rank| of(rank, pick)).collect::<Vec<f64>>();
        let (busy, input) = (of_all(&|times| times.busy), of_all(&|times| times.input));
        let rank = (0..n_ranks).max_by(|a, b| busy[*a].total_cmp(&busy[*b]))?;
        let others = |of: &[f64]| median((0..n_ranks).filter(|other| *other != rank).map(|other| of[other]).collect());
        let excess = busy[rank] - others(&busy);
        let factor = busy[rank] / others(&busy).max(1e-6);
        let is_input = input[rank] - others(&input) > excess / 2.0;
        let cause = if is_input { SlowCause::Input } else { SlowCause::Compute };
        let is_slow = n_ranks > 1 && factor >= SLOW && excess >= NOTICEABLE;
        is_slow.then_some(SlowRank { rank, factor, cause })
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of 10 ms in which rank 2 of four takes so much longer, and some steps take much longer for everybody.
    fn observe(compute: f64, input: f64, n_steps: usize) -> Vec<SlowRank> {
        let mut watch = SlowRankWatch::default();
        let mut found = Vec::new();
        for i in 0..n_steps {
            let extra = compute + input;
            let pause = if i % 9 == 4 { 0.5 } else { 0.0 };
            let times = |rank: usize| match rank {
                2 => RankTimes { busy: 0.01 + extra, input: 0.0002 + input },
                0 => RankTimes { busy: 0.0095 + pause, input: 0.0003 },
                _ => RankTimes { busy: 0.01 + pause, input: 0.0001 },
            };
            found.extend(watch.observe((0..4).map(times).collect()));
        }
        found
    }

    #[test]
    fn a_slow_rank_is_named_once_within_twenty_steps_with_its_cause() {
        let found = observe(0.006, 0.0, 20);
        assert_eq!(found.iter().map(|slow| (slow.rank, slow.cause)).collect::<Vec<_>>(), [(2, SlowCause::Compute)]);
        assert!((found[0].factor - 1.6).abs() < 0.05, "{found:?}");
        assert_eq!(
            found[0].to_string(),
            "rank 2 takes 1.6 times as long as the others, which wait for it: it computes longer than the others"
        );
        let found = observe(0.0, 0.02, 20);
        assert_eq!(found.iter().map(|slow| (slow.rank, slow.cause)).collect::<Vec<_>>(), [(2, SlowCause::Input)]);
    }

    #[test]
    fn ranks_that_are_alike_are_not_named() {
        assert_eq!(observe(0.0, 0.0, 1000), []);
        assert_eq!(observe(0.002, 0.0, 1000), [], "a fifth is not much");
        assert_eq!(observe(-0.009, 0.0, 1000), [], "one that is fast makes nobody slow");
        let mut watch = SlowRankWatch::default();
        assert!((0..100).all(|_| watch.observe(vec![RankTimes { busy: 1.0, input: 0.0 }]).is_none()));
    }
}
