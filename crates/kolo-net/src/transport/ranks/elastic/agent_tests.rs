//! Members as threads of one process, over loopback.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kolo_core::Tensor;
use kolo_runtime::collective::{CommunicatorOptions, ReduceOp};

use super::super::greeting::{Body, CallerSecurity, Purpose, call};
use super::agent::{ElasticConfig, Membership, NextWorld};
use super::messages::MOST_BYTES;
use super::sizes::Sizes;
use crate::transport::tls::cert::Authority;
use crate::transport::tls::{Security, Token};

fn with_token() -> Security {
    Security { token: Some(Token::new("a-token-for-tests").unwrap()), ..Security::default() }
}

fn with_tls() -> Security {
    let files = Authority::new(1).unwrap().issue("rank", &["127.0.0.1".to_owned()], 1).unwrap();
    Security { tls: Some(files), ..Security::default() }
}

/// A member that founds a training with `start_with`, or joins the one at an address.
fn member(join: Option<SocketAddr>, start_with: usize, security: &Security) -> Membership {
    let sizes = Sizes::new(1, 4, |_| true, "any").unwrap();
    let config = ElasticConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        start_with,
        security: security.clone(),
        // Tests run beside each other: a thread may wait long for a core.
        lost_after: Duration::from_secs(20),
        ..ElasticConfig::new(sizes, join.iter().map(ToString::to_string).collect())
    };
    Membership::start(config, &CommunicatorOptions::default()).unwrap()
}

fn next(member: &Membership, left: Option<u64>) -> NextWorld {
    member.next(left, &AtomicBool::new(false)).unwrap().unwrap()
}

/// The sum of 1 over all ranks.
fn count(world: &mut NextWorld) -> kolo_core::Result<f32> {
    let sums = world.communicator.all_reduce(vec![Tensor::from([1.0f32])], ReduceOp::Sum)?;
    Ok(sums[0].data::<f32>()?[0])
}

#[test]
fn members_meet_again_without_one_that_has_gone_and_end_together() {
    for security in [with_token(), with_tls()] {
        let founder = member(None, 3, &security);
        let address = founder.address();
        let others = [member(Some(address), 3, &security), member(Some(address), 3, &security)];
        let [second, third] = others;
        let stays = |one: Membership| {
            let mut world = next(&one, None);
            assert_eq!((world.number, world.local.1, count(&mut world).unwrap()), (1, 3, 3.0));
            let error = count(&mut world).unwrap_err().to_string();
            assert!(error.contains("has left the group") || error.contains("has ended the group"), "{error}");
            drop(world);
            let mut world = next(&one, Some(1));
            assert_eq!((world.number, count(&mut world).unwrap()), (2, 2.0));
            world.communicator.barrier().unwrap();
            one
        };
        std::thread::scope(|scope| {
            let goes = scope.spawn(move || count(&mut next(&third, None)).unwrap());
            let (a, b) = (scope.spawn(move || stays(founder)), scope.spawn(move || stays(second)));
            assert_eq!(goes.join().unwrap(), 3.0);
            let (founder, second) = (a.join().unwrap(), b.join().unwrap());
            founder.finish();
            assert!(second.next(Some(2), &AtomicBool::new(false)).unwrap().is_none(), "the training has ended");
        });
    }
}

#[test]
fn callers_that_talk_nonsense_or_nothing_keep_nobody_out() {
    let security = with_token();
    let founder = member(None, 2, &security);
    let (caller, deadline) = (CallerSecurity::new(&security).unwrap(), Instant::now() + Duration::from_secs(60));
    let body = |purpose| Body {
        purpose,
        rank: u32::MAX,
        n_ranks: u32::MAX,
        group: [9; 16],
        stream: u32::MAX,
        listen: [0; 16],
        port: 0,
        timeout_ms: 0,
        n_streams: 0,
        lost_after_ms: 0,
    };
    let mut open = Vec::new();
    let longest = (MOST_BYTES as u32 + 1).to_le_bytes();
    let said: [&[u8]; 5] = [&[], &longest, &[3, 0, 0, 0, 1, 2, 3], &[200, 0, 0, 0, 1], &[1, 0, 0, 0, 9]];
    for i in 0..100 {
        let purpose = [Purpose::Member, Purpose::Data, Purpose::Control, Purpose::Member][i % 4];
        let mut stream = call(founder.address(), "127.0.0.1", "a member", &caller, &body(purpose), deadline).unwrap();
        stream.write_all_by(said[i % 5], deadline).unwrap();
        open.push(stream);
    }
    let second = member(Some(founder.address()), 2, &security);
    std::thread::scope(|scope| {
        let counts = [&founder, &second].map(|one| scope.spawn(|| count(&mut next(one, None)).unwrap()));
        assert_eq!(counts.map(|count| count.join().unwrap()), [2.0, 2.0]);
    });
}

#[test]
fn what_cannot_be_is_refused() {
    let sizes = || Sizes::new(1, 4, |n| n != 3, "1, 2 or 4").unwrap();
    let says = |config: ElasticConfig, text: &str| {
        let error = Membership::start(config, &CommunicatorOptions::default()).err().unwrap().to_string();
        assert!(error.contains(text), "{error}");
    };
    let own: SocketAddr = ([127, 0, 0, 1], 0).into();
    let config = |join: &[&str]| ElasticConfig {
        listen: Some(own),
        security: with_token(),
        ..ElasticConfig::new(sizes(), join.iter().map(|address| (*address).to_owned()).collect())
    };
    says(ElasticConfig { start_with: 3, ..config(&[]) }, "a training cannot begin with 3 ranks: 1, 2 or 4");
    says(ElasticConfig { n_streams: 0, ..config(&[]) }, "1 to 16 streams");
    says(ElasticConfig { lost_after: Duration::ZERO, ..config(&[]) }, "a rank is lost after 50 ms");
    says(ElasticConfig { patience: Duration::ZERO, ..config(&[]) }, "ranks wait for each other for 0.1 s to a day");
    says(ElasticConfig { listen: None, ..config(&[]) }, "needs an address at which this process listens");
    says(ElasticConfig { listen: Some(([0, 0, 0, 0], 0).into()), ..config(&[]) }, "not at all of its own");
    says(config(&["nowhere"]), "the address 'nowhere' is not a host:port");
    let open = ElasticConfig { listen: Some(([0, 0, 0, 0], 0).into()), security: Security::default(), ..config(&[]) };
    says(open, "whoever reaches it can run any graph here");
    let taken = std::net::TcpListener::bind(own).unwrap().local_addr().unwrap();
    let alone = ElasticConfig { listen: Some(taken), ..config(&[&taken.to_string()]) };
    says(alone, "is this process's own; give that of another member");
}
