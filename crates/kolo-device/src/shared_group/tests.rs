use super::*;

fn file() -> File {
    SharedGroup::anonymous_file().unwrap()
}

/// Runs `rank` on a thread of its own for each rank.
fn run<R: Send>(n_ranks: usize, rank: impl Fn(SharedGroup) -> R + Sync) -> Vec<R> {
    let file = file();
    SharedGroup::create(&file, n_ranks, 5000).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_ranks)
            .map(|i| {
                let group = SharedGroup::join(&file, i).unwrap();
                let rank = &rank;
                scope.spawn(move || rank(group))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes[..4].try_into().unwrap())
}

#[test]
fn every_rank_reads_what_all_published_in_every_round_and_the_one_before() {
    for n_ranks in [1, 2, 3, 8] {
        run(n_ranks, |mut group| {
            let rank = group.rank() as u32;
            for round in 0..500u32 {
                let mut begun = group.begin(&WaitLimits::NONE).unwrap();
                let (buffer, before) = begun.buffer_and_before();
                let sum = |of: Published<'_>| -> u32 { (0..n_ranks).map(|rank| number(of.of(rank).unwrap())).sum() };
                let n = n_ranks as u32;
                let expected = |round: u32| n * (n - 1) / 2 * 1000 + n * round;
                match before.filter(|_| round % 5 == 0) {
                    Some(before) => {
                        before.wait_all(&WaitLimits::NONE).unwrap();
                        buffer[..4].copy_from_slice(&(rank * 1000 + round).to_le_bytes());
                        assert_eq!(sum(before), expected(round - 1));
                    }
                    None => buffer[..4].copy_from_slice(&(rank * 1000 + round).to_le_bytes()),
                }
                let meeting = begun.publish();
                // Nobody has to wait for anybody in a round; others begin when it is safe.
                if round % 3 == 1 {
                    meeting.published().wait_all(&WaitLimits::NONE).unwrap();
                    assert_eq!(sum(meeting.published()), expected(round));
                }
                if let Some(before) = meeting.before().filter(|_| round % 4 == 2) {
                    before.wait_all(&WaitLimits::NONE).unwrap();
                    assert_eq!(sum(before), expected(round - 1));
                }
            }
        });
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_after_the_deadline() {
    let errors = run(2, |mut group| {
        let deadline = Some(Instant::now() + Duration::from_millis(50));
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(200));
            return None;
        }
        let meeting = group.begin(&WaitLimits::NONE).unwrap().publish();
        meeting.published().wait_all(&WaitLimits { deadline, ..WaitLimits::NONE }).err()
    });
    let error = errors[0].clone().unwrap().to_string();
    assert!(error.contains("rank 0 has waited 0.1 s for rank 1"), "{error}");
}

#[test]
fn an_ended_group_wakes_who_waits_and_says_who_ended_it() {
    let errors = run(3, |mut group| {
        if group.rank() == 2 {
            group.end("a test");
            std::thread::sleep(Duration::from_millis(100));
            return None;
        }
        // It may be over before a round has begun.
        match group.begin(&WaitLimits::NONE) {
            Ok(begun) => begun.publish().published().wait_all(&WaitLimits::NONE).err(),
            Err(error) => Some(error),
        }
    });
    assert_eq!(errors.iter().flatten().count(), 2);
    for error in errors.into_iter().flatten() {
        assert!(error.to_string().contains("rank 2 has ended the group: a test"), "{error}");
    }
}

#[test]
fn a_group_is_closed_from_outside_for_those_who_wait_and_those_who_come() {
    let file = file();
    SharedGroup::create(&file, 2, 1).unwrap();
    let mut first = SharedGroup::join(&file, 0).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let meeting = first.begin(&WaitLimits::NONE).unwrap().publish();
            meeting.published().wait_all(&WaitLimits::NONE).err().unwrap().to_string()
        });
        std::thread::sleep(Duration::from_millis(50));
        SharedGroup::close(&file, "rank 1 never came").unwrap();
        let error = waits.join().unwrap();
        assert!(error.contains("the group was closed: rank 1 never came"), "{error}");
    });
    assert!(SharedGroup::has_joined(&file, 0).unwrap() && !SharedGroup::has_joined(&file, 1).unwrap());
    let mut second = SharedGroup::join(&file, 1).unwrap();
    assert!(SharedGroup::has_joined(&file, 1).unwrap() && !SharedGroup::has_joined(&file, 2).unwrap());
    assert!(second.begin(&WaitLimits::NONE).is_err());
}

#[test]
fn a_rank_that_leaves_is_missed_at_once() {
    let errors = run(2, |mut group| {
        let rank = group.rank();
        let meeting = group.begin(&WaitLimits::NONE).unwrap().publish();
        if rank == 1 {
            return None;
        }
        // What it published before is still there.
        meeting.published().wait_all(&WaitLimits::NONE).unwrap();
        let meeting = group.begin(&WaitLimits::NONE).unwrap().publish();
        meeting.published().wait_all(&WaitLimits::NONE).err()
    });
    let error = errors[0].clone().unwrap().to_string();
    assert!(error.contains("rank 1 has left the group"), "{error}");
}

#[test]
fn a_rank_joins_once() {
    let file = file();
    SharedGroup::create(&file, 2, 1).unwrap();
    let first = SharedGroup::join(&file, 1).unwrap();
    let error = SharedGroup::join(&file, 1).err().unwrap().to_string();
    assert!(error.contains("rank 1 of the group has joined already"), "{error}");
    assert!(Watch::default().gone(first.member(1)).is_none(), "the first one is still there");
}

#[test]
fn files_that_are_no_group_are_refused() {
    let error = |file: &File, rank| SharedGroup::join(file, rank).err().unwrap().to_string();
    let other = file();
    assert!(error(&other, 0).contains("too short"));
    other.set_len(8192).unwrap();
    assert!(error(&other, 0).contains("is not one"));
    let group = file();
    SharedGroup::create(&group, 2, 100).unwrap();
    assert!(error(&group, 2).contains("there is no rank 2 in a group of 2"));
    let map = SharedMap::open(&group, 4096).unwrap();
    header(&map).n_ranks.store(200, Ordering::Relaxed);
    assert!(error(&group, 0).contains("is damaged"));
    assert!(SharedGroup::create(&group, 0, 1).is_err() && SharedGroup::create(&group, 1, usize::MAX / 2).is_err());
}

#[test]
fn what_was_not_waited_for_is_not_read() {
    run(1, |mut group| {
        assert!(group.begin(&WaitLimits::NONE).unwrap().publish().published().of(0).is_ok());
    });
    let file = file();
    SharedGroup::create(&file, 2, 1).unwrap();
    let mut group = SharedGroup::join(&file, 0).unwrap();
    let meeting = group.begin(&WaitLimits::NONE).unwrap().publish();
    assert!(meeting.published().of(1).is_err() && meeting.published().of(7).is_err());
    assert!(meeting.before().is_none());
}

#[test]
fn sequences_wrap_around() {
    assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
    assert!(reached(3, u32::MAX - 2) && !reached(u32::MAX - 2, 3));
    assert_eq!((published(u64::from(u32::MAX)), before_writing(1), before_writing(2)), (0, None, Some(1)));
    let flag = Flag::new();
    flag.raise(u32::MAX);
    flag.sleep_below(u32::MAX - 1, Duration::from_secs(100));
    assert_eq!(flag.sequence(), u32::MAX);
}
