//! What a rank tells its peers of itself, in the place of a mere sign of life: what it is busy with, and the collective that it began
//! last. Times are how long ago, since clocks of two hosts have nothing in common.

use kolo_runtime::collective::{Activity, CallNote, RankNote, now};

/// The longest message: what is said of a call is bounded.
pub(super) const MOST_TOLD: usize = FIXED + MOST_WHAT;

/// The part that is always there.
const FIXED: usize = 4 + 4 + 12 * 8;

const MOST_WHAT: usize = 256;

/// `u64::MAX` in a message: not, or never.
const NONE: u64 = u64::MAX;

/// What a rank says of itself, for a message.
pub(super) fn write(note: &RankNote) -> Vec<u8> {
    let now = now();
    let ago = |at: u64| now.saturating_sub(at);
    let step = |step: Option<i64>| step.map_or(NONE, |step| step as u64);
    let call = note.calls.last();
    let (peer, waits) = note.waits_for.map_or((NONE, 0), |(peer, since)| (peer as u64, ago(since)));
    let mut bytes = Vec::with_capacity(MOST_TOLD);
    bytes.extend(note.pid.to_le_bytes());
    bytes.extend((note.activity as u32).to_le_bytes());
    let words = [
        note.namespace,
        note.host,
        note.born,
        ago(note.since),
        step(note.step),
        note.n_begun,
        note.n_done,
        peer,
        waits,
        call.map_or(NONE, |call| ago(call.begun)),
        call.and_then(|call| call.finished).map_or(NONE, ago),
        step(call.and_then(|call| call.step)),
    ];
    words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    if let Some(call) = call {
        let end = call.what.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        bytes.extend(&call.what[..end.min(MOST_WHAT)]);
    }
    bytes
}

/// What a peer says. `None` if no rank says so.
pub(super) fn read(bytes: &[u8]) -> Option<RankNote> {
    let (fixed, what) = bytes.split_at_checked(FIXED)?;
    if what.len() > MOST_WHAT {
        return None;
    }
    let (numbers, words) = fixed.split_at(8);
    let number = |at: usize| Some(u32::from_le_bytes(numbers[at..at + 4].try_into().ok()?));
    let mut words = words.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    let mut next = || words.next().unwrap_or(NONE);
    let now = now();
    // 0 is never.
    let at = |ago: u64| now.saturating_sub(ago).max(1);
    let step = |step: u64| i64::try_from(step).ok();
    let (namespace, host, born, since) = (next(), next(), next(), at(next()));
    let (in_step, n_begun, n_done) = (step(next()), next(), next());
    let (peer, waits) = (next(), next());
    let (began, finished, call_step) = (next(), next(), step(next()));
    let waits_for = u32::try_from(peer).ok().filter(|peer| *peer < u32::MAX).map(|peer| (peer as usize, at(waits)));
    let call = n_begun.checked_sub(1).filter(|number| began != NONE && *number < NONE - 1).map(|number| CallNote {
        number,
        step: call_step,
        begun: at(began),
        finished: (finished != NONE).then(|| at(finished)),
        what: what.to_vec(),
    });
    Some(RankNote {
        pid: number(0)?,
        namespace,
        host,
        born,
        activity: Activity::from_number(number(4)?),
        since,
        step: in_step,
        n_begun,
        n_done,
        waits_for,
        heard: 0,
        calls: call.into_iter().collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_what_is_heard() {
        let at = now() - 3_000_000_000;
        let call = CallNote { number: 41, step: Some(9), begun: at, finished: None, what: b"call".to_vec() };
        let mut note = RankNote {
            pid: 12,
            namespace: 3,
            host: 4,
            born: 5,
            activity: Activity::Saving,
            since: at,
            step: Some(9),
            n_begun: 42,
            n_done: 41,
            waits_for: Some((2, at)),
            heard: 0,
            calls: vec![call],
        };
        // The clock goes on in the meantime.
        let rounded = |note: &RankNote| {
            let text = format!("{note:?}");
            text.replace(&at.to_string(), "T").replace(&note.since.to_string(), "T")
        };
        assert_eq!(rounded(&read(&write(&note)).unwrap()), rounded(&note));
        (note.calls, note.waits_for, note.step, note.n_begun) = (Vec::new(), None, None, 0);
        assert_eq!(rounded(&read(&write(&note)).unwrap()), rounded(&note));
    }

    #[test]
    fn no_bytes_make_a_rank_panic() {
        for n in 0..=MOST_TOLD + 1 {
            for byte in [0, 1, 127, 255] {
                assert_eq!(read(&vec![byte; n]).is_some(), (FIXED..=MOST_TOLD).contains(&n), "{n} bytes");
            }
        }
    }
}
