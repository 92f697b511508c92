//! Groups of ranks over TCP: every collective, how ranks meet, and what happens to those that do not come, are strangers, or die.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

#[path = "../../kolo-runtime/tests/collective_cases/mod.rs"]
mod cases;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use kolo_core::{Code, DType, Error, Result, Tensor};
use kolo_net::ranks::{Coordinator, CoordinatorHost, RankConfig, join};
use kolo_net::tls::cert::Authority;
use kolo_net::tls::{Security, Token};
use kolo_runtime::collective::{Algorithm, CollectiveKind, Communicator, CommunicatorOptions, ReduceOp};
use rustix::process::{Pid, Signal, kill_process};

use cases::{options, run};

fn with_token() -> Security {
    Security { token: Some(Token::new("a-token-for-tests").unwrap()), ..Security::default() }
}

fn with_tls() -> Security {
    let files = Authority::new(1).unwrap().issue("rank", &["127.0.0.1".to_owned(), "127.0.0.2".to_owned()], 1).unwrap();
    Security { tls: Some(files), ..Security::default() }
}

fn coordinator(n_ranks: usize, security: &Security) -> Coordinator {
    Coordinator::start("127.0.0.1:0".parse().unwrap(), n_ranks, security).unwrap()
}

fn config(rank: usize, n_ranks: usize, coordinator: &Coordinator, security: &Security) -> RankConfig {
    RankConfig {
        host: CoordinatorHost::Other,
        security: security.clone(),
        join_timeout: Duration::from_secs(20),
        // Tests run beside each other: a rank may wait long for a core.
        lost_after: Duration::from_secs(20),
        ..RankConfig::new(rank, n_ranks, &coordinator.address().to_string())
    }
}

/// All ranks of a group, as threads. Every second one has another address, as if it were on another host: pairs on two hosts have
/// several streams.
fn group(n_ranks: usize, options: &CommunicatorOptions, security: &Security) -> Vec<Communicator> {
    let coordinator = coordinator(n_ranks, security);
    std::thread::scope(|scope| {
        let configs = (0..n_ranks).map(|rank| RankConfig {
            listen: (rank % 2 == 1).then_some([127, 0, 0, 2].into()),
            ..config(rank, n_ranks, &coordinator, security)
        });
        let ranks: Vec<_> = configs.map(|config| scope.spawn(move || join(&config, options).unwrap())).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn tcp(n_ranks: usize, options: &CommunicatorOptions) -> Vec<Communicator> {
    group(n_ranks, options, &with_token())
}

fn tls(n_ranks: usize, options: &CommunicatorOptions) -> Vec<Communicator> {
    group(n_ranks, options, &with_tls())
}

#[test]
fn every_rank_gets_what_all_reduce_means() {
    cases::every_rank_gets_what_all_reduce_means(tcp);
}

#[test]
fn rows_go_where_the_other_collectives_say() {
    cases::rows_go_where_the_other_collectives_say(tcp);
    cases::rows_go_where_the_other_collectives_say(tls);
}

#[test]
fn a_sum_has_the_same_bits_as_over_every_other_transport() {
    cases::a_sum_has_the_same_bits_whichever_way_it_goes(tcp, &[None, Some(Algorithm::HalvingDoubling)]);
}

#[test]
fn random_calls_mean_what_they_say() {
    cases::random_calls_mean_what_they_say(tcp, 1000..1120);
    cases::random_calls_mean_what_they_say(tls, 2000..2030);
}

#[test]
fn ranks_that_differ_all_learn_so_and_none_waits() {
    cases::ranks_that_differ_all_learn_so_and_none_waits(tcp, 0..500);
}

/// Ranks with one address are on one host: here two, with blocks of ranks one after the other.
fn on_two_hosts(n_ranks: usize, options: &CommunicatorOptions) -> Vec<Communicator> {
    let security = with_token();
    let coordinator = coordinator(n_ranks, &security);
    std::thread::scope(|scope| {
        let configs = (0..n_ranks).map(|rank| RankConfig {
            listen: (rank >= n_ranks.next_power_of_two() / 2).then_some([127, 0, 0, 2].into()),
            ..config(rank, n_ranks, &coordinator, &security)
        });
        let ranks: Vec<_> = configs.map(|config| scope.spawn(move || join(&config, options).unwrap())).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_on_two_hosts_go_by_two_levels_with_the_same_bits() {
    let two_levels = Some(Algorithm::TwoLevel);
    cases::a_sum_has_the_same_bits_whichever_way_it_goes(on_two_hosts, &[two_levels]);
    let options = CommunicatorOptions { algorithm: two_levels, ..options(4096) };
    run(on_two_hosts(4, &options), |mut end| {
        let choice = end.choice().choose(CollectiveKind::AllReduce(ReduceOp::Sum), Some(DType::F32), 4096);
        assert_eq!(choice, Algorithm::TwoLevel);
        // A rank that leaves ends the call of those that wait for it in memory, and of those on the other host.
        if end.rank() == 1 {
            return;
        }
        let error = end.all_reduce(vec![Tensor::from([1.0f32; 1000])], ReduceOp::Sum).unwrap_err();
        assert_ne!(error.code(), Code::DeadlineExceeded, "{error}");
    });
}

#[test]
fn a_ring_and_direct_messages_send_no_byte_more_than_they_must() {
    cases::no_byte_more_than_it_must_is_sent(tcp, &[2, 3, 4]);
    cases::no_byte_more_than_it_must_is_sent(tls, &[3]);
}

#[test]
fn large_messages_go_over_all_streams() {
    for security in [with_token(), with_tls()] {
        let options = CommunicatorOptions { buffer_bytes: 4 << 20, ..options(1) };
        run(group(3, &options, &security), |mut end| {
            let vector =
                |rank: usize| Tensor::vector((0..3_000_001).map(|i| (i % 1000 + rank) as f32).collect::<Vec<_>>());
            let sum = end.all_reduce(vec![vector(end.rank())], ReduceOp::Sum).unwrap().remove(0);
            let sum = sum.data::<f32>().unwrap();
            assert!(sum.iter().enumerate().all(|(i, x)| *x == (3 * (i % 1000) + 3) as f32));
            assert_eq!(end.broadcast(vec![vector(end.rank())], 2).unwrap(), [vector(2)]);
        });
    }
}

#[test]
fn rank_0_has_the_coordinator_unless_another_process_does() {
    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let sums: Vec<Tensor> = std::thread::scope(|scope| {
        let rank = |rank: usize| {
            // Without a token of their own, ranks on loopback have that of their user.
            let config = RankConfig { lost_after: Duration::from_secs(20), ..RankConfig::new(rank, 3, &free) };
            let wait = Duration::from_millis(if rank == 0 { 100 } else { 0 });
            move || {
                std::thread::sleep(wait);
                let mut end = join(&config, &options(1)).unwrap();
                end.all_reduce(vec![Tensor::from([rank as i32])], ReduceOp::Sum).unwrap().remove(0)
            }
        };
        let ranks: Vec<_> = (0..3).map(|i| scope.spawn(rank(i))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(sums, vec![Tensor::from([3i32]); 3]);
    let error = join(&RankConfig::new(0, 2, "127.0.0.1:0"), &options(1)).err().unwrap().to_string();
    assert!(error.contains("the other ranks cannot know the port"), "{error}");
}

/// What the ranks of a group get that cannot form.
fn errors(configs: Vec<RankConfig>) -> Vec<Error> {
    std::thread::scope(|scope| {
        let join = |config: RankConfig| scope.spawn(move || join(&config, &options(1)).err().unwrap());
        let ranks: Vec<_> = configs.into_iter().map(join).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let (security, short) = (with_token(), Duration::from_millis(300));
    let coordinator = coordinator(5, &security);
    let configs = [0, 3].map(|rank| RankConfig { join_timeout: short, ..config(rank, 5, &coordinator, &security) });
    for error in errors(configs.to_vec()) {
        assert_eq!(error.code(), Code::DeadlineExceeded);
        let text = error.to_string();
        assert!(text.contains("not all 5 ranks have joined within 0.3 s: ranks 1, 2 and 4 are missing"), "{text}");
    }
    let nobody = RankConfig { join_timeout: short, security, ..RankConfig::new(1, 2, "127.0.0.1:1") };
    let text = join(&nobody, &options(1)).err().unwrap().to_string();
    assert!(text.contains("there is no coordinator after 0.3 s") && text.contains("is rank 0 running"), "{text}");
}

#[test]
fn ranks_that_do_not_belong_together_are_refused_and_told_why() {
    let security = with_token();
    let coordinator = coordinator(2, &security);
    let good = config(0, 2, &coordinator, &security);
    let refused = |config: RankConfig| join(&config, &options(1)).err().unwrap();
    let other = Security { token: Some(Token::new("another-token-of-tests").unwrap()), ..Security::default() };
    let error = refused(RankConfig { security: other, ..good.clone() });
    assert_eq!(error.code(), Code::Unauthenticated);
    assert!(error.to_string().contains("has another token, or none"), "{error}");
    let error = refused(RankConfig { n_ranks: 3, ..good.clone() }).to_string();
    assert!(error.contains("rank 0 was started as one of 3 ranks, and the group has 2"), "{error}");
    let error = refused(RankConfig { rank: 2, ..good.clone() }).to_string();
    assert!(error.contains("there is no rank 2 in a group of 2"), "{error}");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join(&good, &options(1)).map(drop));
        // The second one of rank 0 is refused, whichever that is; then rank 1 comes.
        let other = RankConfig { rank: 1, n_streams: 5, ..good.clone() };
        let error = loop {
            std::thread::sleep(Duration::from_millis(20));
            match join(&RankConfig { join_timeout: Duration::from_millis(500), ..other.clone() }, &options(1)) {
                Err(error) if error.code() == Code::FailedPrecondition => break error.to_string(),
                other => assert!(other.is_err()),
            }
        };
        assert!(error.contains("rank 1 has 5 streams") && error.contains("rank 0 4"), "{error}");
        let error = refused(good.clone()).to_string();
        assert!(error.contains("rank 0 has joined already, from 127.0.0.1"), "{error}");
        join(&RankConfig { rank: 1, ..good.clone() }, &options(1)).unwrap();
        first.join().unwrap().unwrap();
    });
    let open = Coordinator::start("0.0.0.0:0".parse().unwrap(), 2, &Security::default()).err().unwrap().to_string();
    assert!(open.contains("can be reached from other machines"), "{open}");
}

#[test]
fn strangers_neither_join_nor_hold_up_who_does() {
    let security = with_token();
    let coordinator = coordinator(3, &security);
    let call = || TcpStream::connect(coordinator.address()).unwrap();
    // They say nothing, something else, half of a greeting, or a whole one without a proof.
    let silent: Vec<TcpStream> = (0..300).map(|_| call()).collect();
    let mut http = call();
    http.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut half = call();
    half.write_all(b"KOLORNK1").unwrap();
    let mut liar = call();
    liar.write_all(&[b"KOLORNK1".as_slice(), &[0; 32], &[1; 32], &[1; 48], &[0xff; 5000]].concat()).unwrap();
    let began = Instant::now();
    let sums = std::thread::scope(|scope| {
        let configs = (0..3).map(|rank| config(rank, 3, &coordinator, &security));
        let rank = |config: RankConfig| {
            let mut end = join(&config, &options(1))?;
            end.all_reduce(vec![Tensor::from([1i32])], ReduceOp::Sum)
        };
        let ranks: Vec<_> = configs.map(|config| scope.spawn(move || rank(config))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<_>>>()
    });
    assert_eq!(sums.unwrap(), vec![[Tensor::from([3i32])]; 3]);
    println!("joined beside strangers in {:?}", began.elapsed());
    // They were told to go, or are still waited for; none got in.
    for mut stranger in [http, liar] {
        stranger.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut heard = Vec::new();
        let _ = stranger.read_to_end(&mut heard);
        assert!(heard.len() <= 72, "{} bytes", heard.len());
    }
    drop((silent, half));
}

/// Runs this test again as rank 1 of a group, in a process of its own.
fn other_rank(test: &str, coordinator: &Coordinator) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env("KOLO_TEST_COORDINATOR", coordinator.address().to_string());
    command.stdout(std::process::Stdio::null()).spawn().unwrap()
}

/// Rank 0 is on another host than ranks 1 and 2, which share memory.
fn join_quickly(rank: usize, address: &str) -> Communicator {
    let listen = (rank == 0).then_some([127, 0, 0, 2].into());
    let config = RankConfig {
        host: CoordinatorHost::Other,
        security: with_token(),
        listen,
        ..RankConfig::new(rank, 3, address)
    };
    join(&config, &CommunicatorOptions { algorithm: Some(Algorithm::TwoLevel), ..options(1) }).unwrap()
}

/// One rank of three is a process, to which `harm` is done while all make calls; what the others get, and after how long.
fn harmed(
    test: &str,
    call: fn(&mut Communicator) -> Result<()>,
    harm: fn(&mut Child),
) -> Option<Vec<(Error, Duration)>> {
    if let Ok(address) = std::env::var("KOLO_TEST_COORDINATOR") {
        let mut end = join_quickly(1, &address);
        while call(&mut end).is_ok() {}
        return None;
    }
    let coordinator = coordinator(3, &with_token());
    let mut child = other_rank(test, &coordinator);
    let found = std::thread::scope(|scope| {
        let ranks: Vec<_> = [0, 2]
            .map(|rank| {
                let address = coordinator.address().to_string();
                scope.spawn(move || {
                    let mut end = join_quickly(rank, &address);
                    loop {
                        if let Err(error) = call(&mut end) {
                            return (error, Instant::now());
                        }
                    }
                })
            })
            .into_iter()
            .collect();
        std::thread::sleep(Duration::from_millis(700));
        let began = Instant::now();
        harm(&mut child);
        let since = |(error, at): (Error, Instant)| (error, at.saturating_duration_since(began));
        ranks.into_iter().map(|rank| since(rank.join().unwrap())).collect()
    });
    child.kill().unwrap();
    child.wait().unwrap();
    Some(found)
}

#[test]
fn a_rank_that_is_killed_is_named_at_once() {
    let kill = |child: &mut Child| child.kill().unwrap();
    let Some(found) = harmed("a_rank_that_is_killed_is_named_at_once", Communicator::barrier, kill) else { return };
    for (error, after) in found {
        println!("{after:?}: {error}");
        assert!(error.to_string().contains("rank 1 has died: its connection was closed"), "{error}");
        assert!(after < Duration::from_secs(5), "{after:?}");
    }
}

/// Whether the others wait for it in memory or for a message, and by its number among all.
#[test]
fn a_rank_that_is_killed_between_two_levels_is_named_at_once() {
    let test = "a_rank_that_is_killed_between_two_levels_is_named_at_once";
    let kill = |child: &mut Child| child.kill().unwrap();
    let all_reduce = |end: &mut Communicator| {
        let sum = CollectiveKind::AllReduce(ReduceOp::Sum);
        assert_eq!(end.choice().choose(sum, Some(DType::I32), 400_000), Algorithm::TwoLevel);
        end.all_reduce(vec![Tensor::vector(vec![1i32; 100_000])], ReduceOp::Sum).map(drop)
    };
    let Some(found) = harmed(test, all_reduce, kill) else { return };
    for (error, after) in found {
        println!("{after:?}: {error}");
        assert!(error.to_string().contains("rank 1 has died: its "), "{error}");
        assert!(after < Duration::from_secs(5), "{after:?}");
    }
}

#[test]
fn a_rank_that_is_stopped_is_named_soon() {
    let stop = |child: &mut Child| kill_process(Pid::from_child(child), Signal::STOP).unwrap();
    let Some(found) = harmed("a_rank_that_is_stopped_is_named_soon", Communicator::barrier, stop) else { return };
    for (error, after) in found {
        println!("{after:?}: {error}");
        assert!(error.to_string().contains("rank 1 is lost: nothing was heard of it for 0."), "{error}");
        assert!(after < Duration::from_secs(5), "{after:?}");
    }
}
