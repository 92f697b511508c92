//! Ranks that come and go: processes that find each other over TCP, those of `kolo train --ranks --elastic --min`, and a program of one's own.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kolo::data::Dataset;
use kolo::optim::{Optimizer, Sgd};
use kolo::parallel::{DataParallel, Elastic, ElasticConfig, ElasticRank, Sizes};
use kolo::train::{Callback, Flow, Model, StepReport, Trainer, global_step_or_create};
use kolo::{Result, SessionConfig, Tensor, ops};
use serde_json::Value;
use support::{Process, Spec, kolo, one_at_a_time};

const SMALL: [&str; 9] =
    ["train", "linear", "--json", "--batch-size", "48", "--log-every", "1", "--epochs", "100000000"];

/// A training over TCP: every process that was started, and the addresses at which they listen.
struct Training {
    spec: Spec,
    flags: Vec<String>,
    ranks: Vec<Process>,
}

impl Training {
    /// Begins with `n` ranks; `most` processes may be started in all.
    fn begin(n: usize, most: usize, flags: &[&str]) -> Training {
        let flags = SMALL.iter().chain(&["--elastic"]).chain(flags).map(|flag| (*flag).to_owned()).collect();
        let mut training = Training { spec: Spec::new(&[("rank", most)]), flags, ranks: Vec::new() };
        for _ in 0..n {
            training.start(Some(n));
        }
        training.ranks[0].wait_for_step(0, |step| step > 20);
        training
    }

    fn start(&mut self, size: Option<usize>) {
        let i = self.ranks.len();
        let address = |i: usize| self.spec.address("rank", i).to_owned();
        let first = address(0);
        let (host, port) = first.rsplit_once(':').unwrap();
        let (rank, own) = (i.to_string(), address(i));
        let join = (0..i).map(address).collect::<Vec<_>>().join(",");
        let n = size.unwrap_or(0).to_string();
        let mut environment = vec![("KOLO_TOKEN", "a-token-of-tests"), ("KOLO_LISTEN", &*own)];
        match size {
            Some(_) => environment.extend([
                ("RANK", &*rank),
                ("WORLD_SIZE", &*n),
                ("MASTER_ADDR", host),
                ("MASTER_PORT", port),
            ]),
            None => environment.push(("KOLO_JOIN", &*join)),
        }
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        self.ranks.push(Process::start_with(&format!("process {i}"), &flags, &environment));
    }

    /// Starts one more process, which finds the others by any of their addresses.
    fn newcomer(&mut self) {
        self.start(None);
    }

    fn signal(&self, i: usize, signal: &str) -> Instant {
        self.ranks[i].signal(signal);
        Instant::now()
    }

    /// Waits until process `i`, as rank 0, says that so many ranks go on, after the first `skip` of its lines.
    #[track_caller]
    fn goes_on(&self, i: usize, skip: usize, n_ranks: usize) -> Instant {
        let is_it = format!("\"ranks\":{n_ranks},");
        let line = self.ranks[i].wait_until(&format!("{n_ranks} ranks go on"), skip, |line| {
            line.text.contains("\"event\":\"recovered\"") && line.text.contains(&is_it)
        });
        let n_lines =
            self.ranks[i].lines().iter().position(|other| other.at == line.at && other.text == line.text).unwrap();
        self.ranks[i].wait_for_step(n_lines, |step| step > 0).1.at
    }

    fn n_lines(&self, i: usize) -> usize {
        self.ranks[i].lines().len()
    }

    /// Has process `i`, which is rank 0, stop all of them, and gives what it says at the end.
    fn end(&mut self, i: usize, others: &[usize]) -> Value {
        self.signal(i, "INT");
        for other in [&[i], others].concat() {
            assert!(self.ranks[other].wait().success(), "process {other}: {}", self.ranks[other].text());
        }
        self.ranks[i].wait_for("\"event\":\"end\"");
        end_of(&self.ranks[i].text())
    }
}

fn end_of(text: &str) -> Value {
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.into_iter().find(|event| event["event"] == "end").unwrap_or_else(|| panic!("{text}"))
}

/// The weights of one process alone after so many steps.
fn undisturbed(flags: &[&str], end: &Value) -> Value {
    let steps = end["step"].to_string();
    let (is_well, text) = kolo(&[&SMALL[..], flags, &["--max-steps", &steps]].concat());
    assert!(is_well, "{text}");
    end_of(&text)
}

/// No step is left out, and one is repeated at most each time, as rank 0 reports them, which several processes are in turn. One that
/// dies may do so between a step and its report.
#[track_caller]
fn steps_follow_each_other(training: &Training, n_worlds: usize) {
    let mut steps: Vec<i64> = training.ranks.iter().flat_map(Process::steps).collect();
    steps.sort_unstable();
    let n_reports = steps.len();
    steps.dedup();
    let n_all = (steps[steps.len() - 1] - steps[0] + 1) as usize;
    assert!(n_reports - steps.len() <= n_worlds, "{} steps again", n_reports - steps.len());
    assert!(n_all - steps.len() <= n_worlds, "{} steps were left out", n_all - steps.len());
}

/// Any process may die, the first one and two at once included, and others come: the weights are those of an undisturbed training.
#[test]
fn any_rank_may_die_and_others_come_and_the_weights_do_not_change() {
    let _turn = one_at_a_time();
    let mut all = Training::begin(4, 7, &["--micro-batches", "4", "--min", "1", "--max", "4"]);
    let mut took = Vec::new();
    // Three cannot share four parts: two train, and the third one waits for a fourth.
    let (killed, skip) = (all.signal(2, "KILL"), all.n_lines(0));
    let named = all.ranks[0].wait_until("who died", skip, |line| line.text.contains("rank 2 has died"));
    took.push((named.at - killed, all.goes_on(0, skip, 2) - killed));
    all.ranks[0].wait_for("2 train, and 1 wait");
    let skip = all.n_lines(0);
    all.newcomer();
    all.goes_on(0, skip, 4);
    // The first one, which founded it. The next in order takes over.
    let killed = all.signal(0, "KILL");
    let named = all.ranks[1].wait_until("who died", 0, |line| line.text.contains("rank 0 has died"));
    took.push((named.at - killed, all.goes_on(1, 0, 2) - killed));
    let skip = all.n_lines(1);
    all.newcomer();
    all.goes_on(1, skip, 4);
    // Two at once: half of four are left, the first of which is among them.
    let skip = all.n_lines(1);
    all.signal(3, "KILL");
    let killed = all.signal(4, "KILL");
    took.push((Duration::ZERO, all.goes_on(1, skip, 2) - killed));
    let end = all.end(1, &[5]);
    println!("named and going on after {took:?}");
    let alone = undisturbed(&["--micro-batches", "4"], &end);
    assert_eq!((&end["step"], &end["weights"]), (&alone["step"], &alone["weights"]), "{end}");
    steps_follow_each_other(&all, 5);
    assert!(took.iter().all(|(named, _)| *named < Duration::from_secs(20)), "{took:?}");
}

/// Kills one rank after the other, each as often as the others, and prints how long it took the rest to say who died and to make a step:
/// `cargo test --release --test elastic eight -- --nocapture`.
#[test]
fn eight_ranks_die_one_after_the_other_and_eight_come() {
    let _turn = one_at_a_time();
    let mut all = Training::begin(3, 11, &["--min", "2", "--max", "3"]);
    // The processes in the order of their ranks.
    let mut order = vec![0, 1, 2];
    let (mut named, mut took) = (Vec::new(), Vec::new());
    for round in 0..8 {
        let (rank, victim) = (round % 3, order.remove(round % 3));
        let (first, other) = (order[0], order[1]);
        let skips = [first, other].map(|i| all.n_lines(i));
        let killed = all.signal(victim, "KILL");
        let says = |line: &support::Line| line.text.contains(&format!("rank {rank} has died"));
        let lines =
            [(first, skips[0]), (other, skips[1])].map(|(i, skip)| all.ranks[i].wait_until("who died", skip, says));
        named.extend(lines.map(|line| line.at.saturating_duration_since(killed)));
        took.push(all.goes_on(first, skips[0], 2).saturating_duration_since(killed));
        let skip = all.n_lines(first);
        order.push(all.ranks.len());
        all.newcomer();
        all.goes_on(first, skip, 3);
    }
    named.sort();
    took.sort();
    println!("named after {:?} to {:?}, median {:?}", named[0], named[15], named[8]);
    println!("the next step after {:?} to {:?}, median {:?}", took[0], took[7], took[4]);
    let others = order[1..].to_vec();
    let end = all.end(order[0], &others);
    assert_eq!(end["ranks"], 3, "{end}");
    steps_follow_each_other(&all, 16);
}

#[test]
fn one_that_is_stopped_is_left_out_and_comes_back() {
    let _turn = one_at_a_time();
    let mut all = Training::begin(3, 3, &["--min", "2"]);
    for victim in [2, 0] {
        let first = if victim == 0 { 1 } else { 0 };
        let skip = all.n_lines(first);
        all.signal(victim, "STOP");
        let lost = all.ranks[first]
            .wait_until("who is lost", skip, |line| line.text.contains(&format!("rank {victim} is lost")));
        assert!(lost.text.contains("nothing was heard of it for"), "{lost:?}");
        all.goes_on(first, skip, 2);
        let skip = all.n_lines(first);
        all.signal(victim, "CONT");
        all.goes_on(first, skip, 3);
    }
    // The doctor sees the world that trains now.
    let (is_well, text) = kolo(&["doctor", "--pid", &all.ranks[0].pid().to_string(), "--json"]);
    let report: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert!(is_well && report["trainings"].as_array().unwrap().len() == 1, "{text}");
    assert_eq!(report["trainings"][0]["ranks"].as_array().unwrap().len(), 3, "{text}");
    let end = all.end(1, &[0, 2]);
    assert_eq!((&end["ranks"], &end["stopped"]), (&3.into(), &true.into()), "{end}");
    steps_follow_each_other(&all, 4);
}

#[test]
fn too_few_wait_for_others_and_say_who_is_missing() {
    let _turn = one_at_a_time();
    let mut all = Training::begin(3, 4, &["--min", "3", "--max", "3", "--wait-for-ranks", "20"]);
    // One that comes in time is let in, though nobody could go on without.
    let skip = all.n_lines(0);
    all.signal(1, "KILL");
    all.newcomer();
    all.goes_on(0, skip, 3);
    let mut all = Training::begin(3, 4, &["--min", "3", "--wait-for-ranks", "2"]);
    all.signal(1, "KILL");
    for (i, why) in [(0, "2 are there, and 3 are needed"), (2, "")] {
        assert!(!all.ranks[i].wait().success());
        all.ranks[i].wait_for(&format!("have waited 2.0 s to go on together: {why}"));
    }
    // Of two, the first one may go on alone, and the second one may not.
    let mut all = Training::begin(2, 2, &["--min", "1", "--wait-for-ranks", "2"]);
    all.signal(0, "KILL");
    assert!(!all.ranks[1].wait().success());
    all.ranks[1].wait_for("1 of 2 members of world 1 are there, and rank 0 (");
}

#[test]
fn who_is_not_of_the_training_does_not_come_in() {
    let _turn = one_at_a_time();
    let mut all = Training::begin(2, 6, &["--min", "1", "--max", "3", "--wait-for-ranks", "20"]);
    let flags = all.flags.clone();
    all.flags.extend(["--seed".to_owned(), "9".to_owned()]);
    all.newcomer();
    assert!(!all.ranks[2].wait().success());
    all.ranks[2].wait_for("it was started with other flags than the members of this training");
    // With another token, neither side believes the other.
    let (address, own) = (all.spec.address("rank", 0).to_owned(), all.spec.address("rank", 3).to_owned());
    let args: Vec<&str> = flags.iter().map(String::as_str).collect();
    let environment = [("KOLO_TOKEN", "another-token-of-tests"), ("KOLO_LISTEN", &*own), ("KOLO_JOIN", &*address)];
    let mut stranger = Process::start_with("stranger", &args, &environment);
    assert!(!stranger.wait().success());
    stranger.wait_for("has another token");
    // Nobody is there.
    all.flags = [&flags[..], &["--wait-for-ranks".to_owned(), "1".to_owned()]].concat();
    let (nobody, own) = (all.spec.address("rank", 5).to_owned(), all.spec.address("rank", 4).to_owned());
    let args: Vec<&str> = flags.iter().map(|flag| if flag == "20" { "1" } else { flag.as_str() }).collect();
    let environment = [("KOLO_TOKEN", "a-token-of-tests"), ("KOLO_LISTEN", &*own), ("KOLO_JOIN", &*nobody)];
    let mut alone = Process::start_with("alone", &args, &environment);
    assert!(!alone.wait().success());
    alone.wait_for(&format!("no member of the training has answered for 1.0 s, of {nobody}"));
    let end = all.end(0, &[1]);
    assert_eq!(end["ranks"], 2, "{end}");
}

/// The processes that a launcher has started and that are still there, in the order in which it did.
fn children(launcher: &Process) -> Vec<u32> {
    let path = format!("/proc/{0}/task/{0}/children", launcher.pid());
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// On one machine the others need not wait for the one that takes a dead rank's place.
#[test]
fn ranks_of_a_launcher_go_on_at_once_with_fewer() {
    let _turn = one_at_a_time();
    let flags = ["--ranks", "4", "--elastic", "--min", "1", "--micro-batches", "4"];
    let mut launcher = Process::start("launcher", &[&SMALL[..], &flags].concat());
    launcher.wait_for_step(0, |step| step > 20);
    for (victims, n_left) in [(&[2][..], 2), (&[0], 2), (&[1, 3], 2), (&[0, 1, 2], 1)] {
        let (skip, ranks) = (launcher.lines().len(), children(&launcher));
        assert_eq!(ranks.len(), 4, "{}", launcher.text());
        for victim in victims {
            let pid = ranks[*victim].to_string();
            assert!(std::process::Command::new("kill").args(["-9", &pid]).status().unwrap().success());
        }
        let killed = Instant::now();
        let fewer = format!("\"ranks\":{n_left},");
        // Those of several that died may be noticed one after the other.
        let line = launcher.wait_until("fewer ranks", skip, |line| {
            line.text.contains("\"event\":\"recovered\"") && (victims.len() > 1 || line.text.contains(&fewer))
        });
        println!("{victims:?}: going on after {:?}", line.at - killed);
        launcher.wait_until("all ranks", skip, |line| {
            line.text.contains("\"event\":\"recovered\"") && line.text.contains("\"ranks\":4,")
        });
    }
    launcher.signal("INT");
    assert!(launcher.wait().success(), "{}", launcher.text());
    launcher.wait_for("\"event\":\"end\"");
    let end = end_of(&launcher.text());
    let alone = undisturbed(&["--micro-batches", "4"], &end);
    assert_eq!((&end["step"], &end["weights"]), (&alone["step"], &alone["weights"]), "{}", launcher.text());
    assert!(launcher.text().contains("died (signal: 9 (SIGKILL)); 2 go on at once"), "{}", launcher.text());
}

/// `y = 3x`, learned for so many steps by a rank that may come and go.
fn learn(rank: &ElasticRank, callback: &mut dyn Callback) -> Result<(i64, Tensor)> {
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", [None, Some(1)]);
    let y = g.placeholder::<f32>("y", [None, Some(1)]);
    let w = g.variable("w", [[0.0f32]]);
    let loss = ops::mean_all(ops::square(ops::matmul(x, w.read()) - y));
    let train_op = Sgd::new(0.001).minimize(loss, Some(global_step_or_create(&g)?))?;
    let config = DataParallel::new(rank.world()).atomic_updates().configure(SessionConfig::default());
    let mut trainer = Trainer::new(&g, Model::new(&[x, y], loss, train_op)).source(config).elastic(rank).build()?;
    let column = |factor: f32| Tensor::vector((1..=12).map(|i| factor * i as f32 / 4.0).collect::<Vec<f32>>());
    let data = Dataset::new([column(1.0).reshaped([12, 1].into())?, column(3.0).reshaped([12, 1].into())?]);
    let report = trainer.fit(&data.batch(12, true).repeat_forever(), &mut [callback])?;
    Ok((report.step, trainer.session().fetch(w.read())?))
}

/// Ends some steps after as many ranks were there as should be.
struct StopAfter<'a> {
    rank: &'a ElasticRank,
    wanted: usize,
    seen: &'a AtomicBool,
    left: i64,
}

impl Callback for StopAfter<'_> {
    fn on_step(&mut self, _: &StepReport<'_, '_>) -> Result<Flow> {
        if self.rank.world().size() == self.wanted {
            self.seen.store(true, Ordering::Relaxed);
        }
        self.left -= i64::from(self.seen.load(Ordering::Relaxed));
        Ok(if self.left < 0 { Flow::Stop } else { Flow::Continue })
    }
}

#[test]
fn a_program_of_ones_own_is_elastic_in_the_same_way() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("rank", 3)]);
    let address = |i: usize| spec.address("rank", i);
    let config = |i: usize, join: &[usize]| {
        let sizes = Sizes::new(1, 3, |_| true, "any").unwrap();
        let mut config = ElasticConfig::new(sizes, join.iter().map(|i| address(*i).to_owned()).collect());
        (config.start_with, config.listen) = (2, Some(address(i).parse().unwrap()));
        config
    };
    let done = std::thread::scope(|scope| {
        let member = |config: ElasticConfig| {
            scope.spawn(move || {
                let (elastic, seen) = (Elastic::join(config).unwrap(), AtomicBool::new(false));
                let mut n_worlds = 0;
                let done = elastic.train(|rank| {
                    n_worlds += 1;
                    learn(rank, &mut StopAfter { rank, wanted: 3, seen: &seen, left: 20 })
                });
                (n_worlds, done.unwrap().unwrap())
            })
        };
        let two = [member(config(0, &[])), member(config(1, &[0]))];
        std::thread::sleep(Duration::from_millis(300));
        let third = member(config(2, &[1]));
        two.into_iter().chain([third]).map(|member| member.join().unwrap()).collect::<Vec<_>>()
    });
    // All of them end with the same weights, and the third one has got what the others had learned before.
    assert!(done.iter().all(|(_, end)| *end == done[0].1), "{done:?}");
    assert!(done[0].0 >= 2 && done[2].0 == 1, "{done:?}");
    assert!(done[0].1.0 > 21, "{done:?}");
}

/// Ranks that have come to a training and lost all who knew it do not begin it anew in silence.
#[test]
fn a_training_that_nobody_knows_any_more_does_not_begin_again() {
    let sizes = Sizes::new(1, 1, |_| true, "any").unwrap();
    let config = ElasticConfig { listen: Some(([127, 0, 0, 1], 0).into()), ..ElasticConfig::new(sizes, Vec::new()) };
    let (mut n_worlds, seen) = (0, AtomicBool::new(false));
    let ended = Elastic::join(config).unwrap().train(|rank| {
        n_worlds += 1;
        match rank.number() {
            1 | 2 => Err(kolo::Error::aborted("the others are gone")),
            _ => learn(rank, &mut StopAfter { rank, wanted: 1, seen: &seen, left: 3 }),
        }
    });
    let error = ended.unwrap_err().to_string();
    assert!(error.contains("no rank is left that has the state of the training"), "{error}");
    assert_eq!(n_worlds, 3);
}

/// Machines of their own: namespaces, each with an address on one network, from which it can be cut off.
struct Network {
    shell: std::process::Child,
    commands: std::process::ChildStdin,
    answers: std::io::Lines<std::io::BufReader<std::process::ChildStdout>>,
    /// A process in each namespace.
    machines: Vec<String>,
}

/// Makes the machines, then does what it is told. Without rights, in a user's namespace of its own.
const MACHINES: &str = r#"
set -e
ip link set lo up
ip link add name br0 type bridge
ip link set br0 up
for i in 0 1 2; do
  unshare -n sleep 600 >&2 & pid=$!
  until [ "$(readlink /proc/$pid/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
  ip link add name v$i type veth peer name p$i
  ip link set v$i master br0 up
  ip link set p$i netns $pid
  nsenter -t $pid -n ip addr add 10.77.0.$((i+1))/24 dev p$i
  nsenter -t $pid -n ip link set p$i up
  nsenter -t $pid -n ip link set lo up
  echo $pid
done
while read -r line; do $line; echo done; done
kill $(jobs -p)
"#;

impl Network {
    /// None where this cannot be.
    fn new() -> Option<Network> {
        use std::io::BufRead as _;
        let mut command = std::process::Command::new("unshare");
        command.args(["-Urn", "bash", "-c", MACHINES]).stdin(std::process::Stdio::piped());
        let mut shell =
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null()).spawn().ok()?;
        let commands = shell.stdin.take().unwrap();
        let mut answers = std::io::BufReader::new(shell.stdout.take().unwrap()).lines();
        let machines: Vec<String> = answers.by_ref().take(3).map_while(std::io::Result::ok).collect();
        let is_there = machines.len() == 3;
        let network = Network { shell, commands, answers, machines };
        is_there.then_some(network)
    }

    fn tell(&mut self, command: &str) {
        use std::io::Write as _;
        writeln!(self.commands, "{command}").unwrap();
        assert_eq!(self.answers.next().unwrap().unwrap(), "done");
    }

    /// `kolo` on a machine.
    fn run(&self, machine: usize, args: &[&str], environment: &[(&str, &str)]) -> Process {
        let mut command = std::process::Command::new("nsenter");
        command.args(["-t", &self.machines[machine], "-U", "--preserve-credentials", "-n", env!("CARGO_BIN_EXE_kolo")]);
        command.args(args).envs(environment.iter().copied());
        Process::spawn(&format!("machine {machine}"), command)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for machine in &self.machines {
            let _ = std::process::Command::new("kill").arg(machine).status();
        }
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

/// A machine that is cut off does not train on, though its process lives; the others do. It comes back when it can.
#[test]
fn of_a_network_that_is_split_the_smaller_side_does_not_train() {
    let _turn = one_at_a_time();
    let Some(mut network) = Network::new() else {
        use std::io::Write as _;
        let why = "unshare, ip or nsenter are missing here, or may not make namespaces";
        let _ =
            writeln!(std::io::stderr(), "skipped: of_a_network_that_is_split_the_smaller_side_does_not_train: {why}");
        return;
    };
    let args = [&SMALL[..], &["--elastic", "--min", "1", "--micro-batches", "48"]].concat();
    let start = |i: usize| {
        let (rank, own) = (i.to_string(), format!("10.77.0.{}:4000", i + 1));
        let place = [("RANK", &*rank), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "10.77.0.1"), ("MASTER_PORT", "4000")];
        let environment = [&place[..], &[("KOLO_LISTEN", &*own), ("KOLO_TOKEN", "a-token-of-tests")]].concat();
        network.run(i, &args, &environment)
    };
    let mut ranks: Vec<Process> = (0..3).map(start).collect();
    let recovered = |n: usize| {
        move |line: &support::Line| {
            line.text.contains("\"event\":\"recovered\"") && line.text.contains(&format!("\"ranks\":{n},"))
        }
    };
    ranks[0].wait_for_step(0, |step| step > 20);
    // Rank 0, with all that may be special about it.
    network.tell("ip link set v0 down");
    ranks[1].wait_until("two go on", 0, recovered(2));
    let n_alone = ranks[0].steps().len();
    let (step, _) = ranks[1].wait_for_step(0, |_| true);
    ranks[1].wait_for_step(0, |later| later > step + 200);
    assert_eq!(ranks[0].steps().len(), n_alone, "the one that is cut off goes on:\n{}", ranks[0].text());
    network.tell("ip link set v0 up");
    ranks[1].wait_until("three go on", 0, recovered(3));
    ranks[1].signal("INT");
    for rank in &mut ranks {
        assert!(rank.wait().success(), "{}", rank.text());
    }
    ranks[1].wait_for("\"event\":\"end\"");
    let end = end_of(&ranks[1].text());
    assert_eq!((&end["ranks"], &end["stopped"]), (&3.into(), &true.into()), "{end}");
}
