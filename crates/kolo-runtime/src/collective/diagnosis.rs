//! Says which rank the others wait for, and what it does instead, from the records of all ranks. Nothing is asked of a rank, so
//! it does not matter whether they can answer.

use std::fmt;
use std::time::Duration;

use kolo_device::shared_group::{Activity, Condition};

use super::record::{CallState, RankState};

/// A rank of another machine says this often enough what it does, if it can be reached.
const UNHEARD: Duration = Duration::from_millis(1500);

/// Ranks that wait for others, and what they wait for.
#[derive(Clone, Debug, PartialEq)]
pub struct RankFinding {
    /// The step of those who wait, if it is known.
    pub step: Option<i64>,
    /// The collective that they wait in. None if nobody waits, yet.
    pub call: Option<CallState>,
    /// Who waits.
    pub waiting: Vec<usize>,
    /// Whom they wait for.
    pub roots: Vec<usize>,
    /// For how long.
    pub lasts: Duration,
    /// What these do instead.
    pub cause: WaitCause,
    /// All of it in one sentence.
    pub text: String,
}

/// What a rank does that others wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitCause {
    /// Its process has ended.
    Died,
    /// Its process is stopped.
    Stopped,
    /// It has never come.
    Absent,
    /// It is on another machine, and nothing is heard of it.
    CutOff,
    /// It is in another collective than the others.
    OtherCall,
    /// It computes.
    Compute,
    /// It waits for its data.
    Input,
    /// It saves a checkpoint.
    Saving,
    /// It tests the model.
    Evaluating,
    /// It has not begun to train yet.
    Preparing,
    /// It has ended its training.
    Ended,
    /// It is outside of collectives, in a program that does not say what it does.
    Elsewhere,
    /// It is in the same collective, and there is no sign of what keeps it.
    Unknown,
}

/// `stopped`, …
impl fmt::Display for WaitCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WaitCause::Died => "died",
            WaitCause::Stopped => "stopped",
            WaitCause::Absent => "absent",
            WaitCause::CutOff => "cut off",
            WaitCause::OtherCall => "other collective",
            WaitCause::Compute => "compute",
            WaitCause::Input => "input",
            WaitCause::Saving => "saving",
            WaitCause::Evaluating => "evaluating",
            WaitCause::Preparing => "preparing",
            WaitCause::Ended => "ended",
            WaitCause::Elsewhere => "elsewhere",
            WaitCause::Unknown => "unknown",
        })
    }
}

impl WaitCause {
    fn of(state: &RankState, awaited: &CallState) -> WaitCause {
        match (state.condition, &state.call, state.activity) {
            (Condition::Gone { .. }, ..) => WaitCause::Died,
            (Condition::Stopped { .. }, ..) => WaitCause::Stopped,
            (Condition::Absent, ..) => WaitCause::Absent,
            _ if is_unheard(state) => WaitCause::CutOff,
            (_, Some(call), _) if !call.is_same_as(awaited) => WaitCause::OtherCall,
            (_, Some(_), _) => WaitCause::Unknown,
            (_, None, Activity::Computing) => WaitCause::Compute,
            (_, None, Activity::Input) => WaitCause::Input,
            (_, None, Activity::Saving) => WaitCause::Saving,
            (_, None, Activity::Evaluating) => WaitCause::Evaluating,
            (_, None, Activity::Preparing) => WaitCause::Preparing,
            (_, None, Activity::Ended) => WaitCause::Ended,
            (_, None, Activity::Other) => WaitCause::Elsewhere,
        }
    }
}

fn is_unheard(state: &RankState) -> bool {
    state.age.is_some_and(|age| age >= UNHEARD)
}

/// Which rank others have waited for longer than `overdue`, if any, or which one is stopped or dead.
pub fn diagnose(states: &[RankState], overdue: Duration) -> Option<RankFinding> {
    let in_call = |state: &&RankState| state.is_well() && state.call.is_some();
    let mut waiting: Vec<&RankState> = states.iter().filter(in_call).collect();
    let lasts = waiting.iter().filter_map(|state| state.call.as_ref()).map(|call| call.began).max().unwrap_or_default();
    if lasts < overdue {
        waiting.clear();
    }
    let is_lost = |state: &&RankState| matches!(state.condition, Condition::Stopped { .. } | Condition::Gone { .. });
    let Some(first) = waiting.iter().max_by_key(|state| state.n_calls) else {
        // A rank that ends when it is done is not lost, and a training that is over has no live ranks either.
        let is_stopped = |state: &RankState| matches!(state.condition, Condition::Stopped { .. });
        let is_over = !states.iter().any(RankState::is_well);
        let is_missed =
            |state: &&RankState| is_lost(state) && (is_stopped(state) || !is_over && state.activity != Activity::Ended);
        let lost = states.iter().find(is_missed)?;
        return Some(RankFinding {
            step: lost.step,
            call: None,
            waiting: Vec::new(),
            roots: vec![lost.rank],
            lasts: Duration::ZERO,
            cause: if is_stopped(lost) { WaitCause::Stopped } else { WaitCause::Died },
            text: format!("rank {} {lost}; no rank has waited for it for long", lost.rank),
        });
    };
    let call = first.call.clone()?;
    let has_ended_it = |state: &RankState| state.call.is_none() && state.n_calls > call.number();
    let roots = |is_root: &dyn Fn(&&RankState) -> bool| states.iter().filter(is_root).collect::<Vec<&RankState>>();
    let choices = [
        // Whoever cannot go on, then who has not come, then who is somewhere else, and last whom others wait for inside of it.
        roots(&|state| !state.is_well() && !has_ended_it(state)),
        roots(&|state| is_unheard(state) && !has_ended_it(state)),
        roots(&|state| state.n_calls <= call.number()),
        roots(&|state| state.call.as_ref().is_some_and(|own| !own.is_same_as(&call))),
        roots(&|state| {
            let is_awaited = waiting.iter().any(|other| other.waits_for.is_some_and(|(rank, _)| rank == state.rank));
            is_awaited && state.waits_for.is_none()
        }),
    ];
    let roots = choices.into_iter().find(|roots| !roots.is_empty()).unwrap_or_default();
    let waiting: Vec<usize> =
        waiting.iter().map(|state| state.rank).filter(|rank| roots.iter().all(|root| root.rank != *rank)).collect();
    let cause = roots.first().map_or(WaitCause::Unknown, |root| WaitCause::of(root, &call));
    let what: Vec<String> = roots.iter().map(|root| format!("rank {} ({root})", root.rank)).collect();
    let step = call.step;
    let place = step.map_or("ranks".to_owned(), |step| format!("step {step}"));
    let whom = if what.is_empty() { "each other".to_owned() } else { what.join(" and ") };
    let text = format!(
        "{place}: {} of {} ranks ({}) wait for {whom}, in {call}, for {:.1} s",
        waiting.len(),
        states.len(),
        waiting.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
        lasts.as_secs_f64()
    );
    Some(RankFinding {
        step,
        call: Some(call),
        waiting,
        roots: roots.iter().map(|root| root.rank).collect(),
        lasts,
        cause,
        text,
    })
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;
    use kolo_device::cpu::reduce::ReduceOp;
    use kolo_device::shared_group::{CallNote, RankNote, now};
    use kolo_ops::collective::CollectiveKind;

    use super::super::signature::{SIGNATURE_BYTES, Signature};
    use super::*;

    /// Rank `rank`, whose process is this one, and which is in call 7 of step 3 for two seconds, or has ended call 6.
    fn rank(rank: usize, is_in_call: bool, change: impl FnOnce(&mut RankNote)) -> RankState {
        let board = kolo_device::shared_group::RankBoard::alone(1, 0, [0; 16]).unwrap();
        let record = board.record(0).unwrap();
        record.adopt();
        let at = now() - 2_000_000_000;
        let number = if is_in_call { 7 } else { 6 };
        let mut note = RankNote {
            step: Some(3),
            activity: Activity::Computing,
            since: at,
            n_begun: number + 1,
            n_done: 7,
            calls: vec![CallNote { number, step: Some(3), begun: at, finished: None, what: what(number, "g") }],
            ..record.read()
        };
        change(&mut note);
        RankState::new(rank, note)
    }

    fn what(number: u64, name: &str) -> Vec<u8> {
        let mut bytes = vec![0; SIGNATURE_BYTES];
        let tensors = [Tensor::from([1.0f32, 2.0])];
        Signature::new(number, CollectiveKind::AllReduce(ReduceOp::Mean), name, &tensors).write(&mut bytes);
        bytes
    }

    fn waits(i: usize) -> RankState {
        rank(i, true, |note| note.waits_for = Some((1, note.since)))
    }

    fn find(states: &[RankState]) -> RankFinding {
        diagnose(states, Duration::from_secs(1)).unwrap()
    }

    #[test]
    fn the_rank_that_has_not_come_is_named_with_what_it_does() {
        let found = find(&[waits(0), rank(1, false, |_| ()), waits(2)]);
        assert_eq!((&found.waiting[..], &found.roots[..], found.cause), (&[0, 2][..], &[1][..], WaitCause::Compute));
        assert_eq!(
            found.text,
            "step 3: 2 of 3 ranks (0, 2) wait for rank 1 (computes in step 3 for 2.0 s), in call 7, all-reduce (mean) 'g' of 1 \
             float tensors, 2 elements, in step 3, for 2.0 s"
        );
        let input = rank(1, false, |note| note.activity = Activity::Input);
        assert_eq!(find(&[waits(0), input]).cause, WaitCause::Input);
        let saving = rank(1, false, |note| note.activity = Activity::Saving);
        assert_eq!(find(&[waits(0), saving]).cause, WaitCause::Saving);
        let short = diagnose(&[waits(0), rank(1, false, |_| ())], Duration::from_secs(5));
        assert_eq!(short, None, "nobody has waited for so long");
        assert_eq!(diagnose(&[rank(0, false, |_| ()), rank(1, false, |_| ())], Duration::ZERO), None);
    }

    #[test]
    fn a_process_that_cannot_go_on_is_the_root_wherever_it_is() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = child.id();
        let stop = std::process::Command::new("kill").arg("-STOP").arg(pid.to_string()).status().unwrap();
        assert!(stop.success());
        let it = |note: &mut RankNote| (note.pid, note.born) = (pid, 0);
        while rank(1, true, it).is_well() {
            std::thread::yield_now();
        }
        // It is in the call as well, or has not come, or nobody waits yet.
        for (is_in_call, others) in [(true, vec![waits(0)]), (false, vec![waits(0)]), (false, vec![])] {
            let found = find(&[&others[..], &[rank(1, is_in_call, it)]].concat());
            assert_eq!((&found.roots[..], found.cause), (&[1][..], WaitCause::Stopped), "{found:?}");
            assert!(found.text.contains(&format!("`kill -CONT {pid}` lets it go on")), "{}", found.text);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let found = find(&[waits(0), rank(1, false, it)]);
        assert_eq!((&found.roots[..], found.cause), (&[1][..], WaitCause::Died));
        assert!(found.text.contains("has ended; before that: computes in step 3"), "{}", found.text);
        assert_eq!(diagnose(&[rank(1, false, it)], Duration::ZERO), None, "a training that is over");
        let done = rank(0, false, |note| {
            it(note);
            note.activity = Activity::Ended;
        });
        let found = find(&[done.clone(), rank(1, false, |_| ()), rank(2, false, it)]);
        assert_eq!((&found.roots[..], found.cause), (&[2][..], WaitCause::Died), "rank 0 has ended as it should");
        assert_eq!(diagnose(&[done, rank(1, false, |_| ())], Duration::ZERO), None);
    }

    #[test]
    fn ranks_that_never_came_or_are_cut_off_or_elsewhere_are_told_apart() {
        let absent = RankState::new(1, RankNote::default());
        assert_eq!(find(&[waits(0), absent]).cause, WaitCause::Absent);
        let unheard = rank(1, true, |note| (note.host, note.heard) = (1, note.since));
        let found = find(&[waits(0), unheard]);
        assert_eq!((&found.roots[..], found.cause), (&[1][..], WaitCause::CutOff));
        assert!(found.text.contains("last heard of 2.0 s ago"), "{}", found.text);
        let other = rank(1, true, |note| note.calls[0].what = what(7, "another"));
        let found = find(&[waits(0), other]);
        assert_eq!(found.cause, WaitCause::OtherCall);
        assert!(found.text.contains("'another'"), "{}", found.text);
    }
}
