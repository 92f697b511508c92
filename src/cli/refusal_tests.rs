//! No flag is ignored: each one of every command is in a table, with a command line in which it is refused because it would
//! have no effect, or the tests that show what it does. A new flag without a line there fails.

use std::collections::BTreeSet;
use std::path::Path;

use clap::{CommandFactory as _, FromArgMatches as _};

use super::Given;
use crate::cli::Cli;

/// How we know that a flag is not ignored.
enum Proof {
    /// It is refused on this command line, after the command itself.
    Refused(&'static [&'static str]),
    /// These tests use it.
    Shown(&'static str),
}

use Proof::{Refused, Shown};

const TRAIN: &str = "tests/train_command.rs";
const RECIPES: &str = "tests/recipes.rs";
const FAILURES: &str = "tests/cluster_failures.rs";
const DOORS: &str = "tests/cluster_doors.rs";
const CLI: &str = "tests/cli.rs";
const LAUNCH: &str = "tests/launch.rs";
const RUN: &str = "tests/run_command.rs";
const SWEEP: &str = "tests/sweep.rs";
const FLAGS: &str = "tests/flags.rs";
const USERS: &str = "tests/hostile/local_users.rs";
const CONNECTIONS: &str = "tests/hostile/connections.rs";

/// A flag of a command, or of all commands that begin so.
#[rustfmt::skip]
const TABLE: &[(&str, &str, Proof)] = &[
    ("train", "optimizer", Shown(FAILURES)),
    ("train", "lr", Shown(TRAIN)),
    ("train", "batch-size", Shown(TRAIN)),
    ("train", "epochs", Shown(TRAIN)),
    ("train", "max-steps", Shown(TRAIN)),
    ("train", "strategy", Shown("tests/strategies.rs")),
    ("train", "seed", Shown("tests/kill_and_resume.rs")),
    ("train", "logdir", Shown(TRAIN)),
    ("train", "checkpoint-dir", Shown(TRAIN)),
    ("train", "checkpoint-every", Refused(&["--checkpoint-every", "10"])),
    ("train", "keep", Refused(&["--keep", "3"])),
    ("train", "resume", Shown(TRAIN)),
    ("train", "device", Shown(RECIPES)),
    ("train", "devices", Refused(&["--devices", "cpu=2", "--ps", "1"])),
    ("train", "gpu-memory-fraction", Refused(&["--gpu-memory-fraction", "0.5", "--device", "cpu:0"])),
    ("train", "virtual-gpus", Refused(&["--virtual-gpus", "2=1GiB", "--devices", "cpu=2"])),
    ("train", "no-capture", Refused(&["--no-capture", "--target", "grpc://a:1"])),
    ("train", "no-fusion", Refused(&["--no-fusion", "--device", "/cpu:0"])),
    ("train", "full-precision", Refused(&["--full-precision", "--device", "cpu:0"])),
    ("train", "deny-implicit-copies", Refused(&["--deny-implicit-copies", "--workers", "2"])),
    ("train", "log-every", Shown(TRAIN)),
    ("train", "json", Shown(TRAIN)),
    ("train", "ranks", Refused(&["--ranks", "2", "--ps", "1"])),
    ("train", "micro-batches", Refused(&["--micro-batches", "2", "--workers", "2"])),
    ("train", "elastic", Refused(&["--elastic"])),
    ("train", "min", Refused(&["--min", "2", "--ranks", "4"])),
    ("train", "max", Refused(&["--max", "4", "--ranks", "4", "--elastic"])),
    ("train", "join", Refused(&["--join", "a:1", "--ranks", "2", "--elastic"])),
    ("train", "listen", Refused(&["--listen", "127.0.0.1:1", "--ranks", "2", "--elastic"])),
    ("train", "wait-for-ranks", Refused(&["--wait-for-ranks", "3", "--ranks", "2", "--elastic"])),
    ("train", "check-weights-every", Refused(&["--check-weights-every", "5"])),
    ("train", "sync-batch-norm", Refused(&["--sync-batch-norm"])),
    ("train", "exchange", Refused(&["--exchange", "bf16"])),
    ("train", "local-steps", Refused(&["--local-steps", "8"])),
    ("train", "outer", Refused(&["--outer", "0.7:0.9", "--ranks", "2"])),
    ("train", "ps", Refused(&["--ps", "1", "--cluster", "ps=a:1;worker=b:1", "--task", "0"])),
    ("train", "workers", Refused(&["--workers", "1", "--cluster", "ps=a:1;worker=b:1", "--task", "0"])),
    ("train", "sync", Refused(&["--sync"])),
    ("train", "async", Refused(&["--async", "bound=3"])),
    ("train", "hybrid", Refused(&["--hybrid"])),
    ("train", "cluster", Shown(FAILURES)),
    ("train", "task", Shown(FAILURES)),
    ("train", "target", Shown(FAILURES)),
    ("train", "target-deadline", Refused(&["--target-deadline", "3"])),
    ("train", "no-shared-memory", Refused(&["--no-shared-memory"])),
    ("train", "with-parent", Shown(FAILURES)),
    ("train", "tls-ca", Refused(&["--tls-ca", "ca.pem"])),
    ("train", "tls-cert", Refused(&["--tls-cert", "a.pem"])),
    ("train", "tls-key", Refused(&["--tls-key", "a-key.pem"])),
    ("train", "token", Shown(USERS)),
    ("train", "token-file", Refused(&["--token-file", "token"])),
    ("train", "insecure", Refused(&["--insecure", "--target", "grpc://a:1"])),
    ("train", "insecure-loopback", Refused(&["--insecure-loopback", "--target", "grpc://a:1"])),
    ("train", "same-user", Refused(&["--same-user", "--target", "grpc://a:1"])),
    ("train mnist", "model", Shown(FLAGS)),
    ("train mnist", "data", Shown(RECIPES)),
    ("train cifar", "data", Shown(RECIPES)),
    ("train lm", "model", Shown(RECIPES)),
    ("train lm", "data", Shown(RECIPES)),
    ("train lm", "context", Shown(RECIPES)),
    ("train lm", "width", Shown(RECIPES)),
    ("train lm", "layers", Shown(RECIPES)),
    ("train lm", "heads", Shown(RECIPES)),
    ("train lm", "vocabulary", Refused(&["--vocabulary", "31"])),
    ("train lm", "precision", Refused(&["--precision", "f32"])),
    ("train lm", "prompt", Refused(&["--prompt", "a", "--sample", "0"])),
    ("train lm", "sample", Refused(&["--sample", "3", "--model", "gpt2-124m"])),
    ("train lm", "temperature", Refused(&["--temperature", "1", "--model", "gpt2-124m"])),
    ("train resnet50", "data", Shown(FLAGS)),
    ("train resnet50", "side", Shown(RECIPES)),
    ("train resnet50", "classes", Shown(RECIPES)),
    ("train resnet50", "width", Shown(RECIPES)),
    ("train resnet50", "precision", Shown(RECIPES)),
    ("sweep", "grid", Shown(SWEEP)),
    ("sweep", "random", Shown(SWEEP)),
    ("sweep", "range", Shown(SWEEP)),
    ("sweep", "seed", Shown(SWEEP)),
    ("sweep", "parallel", Shown(SWEEP)),
    ("sweep", "cores", Shown("src/cli/sweep/queue.rs")),
    ("sweep", "memory", Shown(SWEEP)),
    ("sweep", "halving", Shown(SWEEP)),
    ("sweep", "best", Shown(SWEEP)),
    ("sweep", "dir", Shown(SWEEP)),
    ("sweep", "resume", Shown(SWEEP)),
    ("sweep", "json", Shown(SWEEP)),
    ("run", "feed", Shown(RUN)),
    ("run", "fetch", Shown(RUN)),
    ("run", "out", Shown(RUN)),
    ("run", "first", Shown(RUN)),
    ("run", "signature", Refused(&["Cargo.toml", "--signature", "a"])),
    ("run", "tag", Refused(&["Cargo.toml", "--tag", "a"])),
    ("run", "json", Refused(&["Cargo.toml", "--json", "--fetch", "a", "--out", "a.npy"])),
    ("serve", "cluster", Shown(FAILURES)),
    ("serve", "job", Shown("tests/support/mod.rs")),
    ("serve", "task", Shown("tests/support/mod.rs")),
    ("serve", "tls-ca", Shown(DOORS)),
    ("serve", "tls-cert", Shown(DOORS)),
    ("serve", "tls-key", Shown(DOORS)),
    ("serve", "token", Shown(USERS)),
    ("serve", "token-file", Shown(DOORS)),
    ("serve", "insecure", Shown(DOORS)),
    ("serve", "insecure-loopback", Shown(USERS)),
    ("serve", "same-user", Shown(USERS)),
    ("serve", "first-bytes", Shown(CONNECTIONS)),
    ("serve", "session-lease", Shown(CONNECTIONS)),
    ("serve", "allow-dir", Shown(DOORS)),
    ("serve", "durability", Shown(FAILURES)),
    ("serve", "journal", Refused(&["--journal", "log"])),
    ("serve", "replica", Refused(&["--replica", "ps:1", "--durability", "logged", "--journal", "log"])),
    ("serve", "max-sessions", Shown(DOORS)),
    ("serve", "max-tensor-message", Shown(FLAGS)),
    ("serve", "max-graph-message", Shown(FLAGS)),
    ("serve", "device-count", Shown(FLAGS)),
    ("serve", "inter-op-threads", Shown("conformance/cluster/tf_server.py")),
    ("serve", "intra-op-threads", Shown("conformance/cluster/tf_server.py")),
    ("serve", "ready-deadline", Shown(FAILURES)),
    ("serve", "report-after", Shown(FAILURES)),
    ("serve", "operation-timeout", Shown("conformance/cluster/tf_server.py")),
    ("serve", "log-device-placement", Shown(FLAGS)),
    ("serve", "with-parent", Shown("tests/support/mod.rs")),
    ("serve", "no-shared-memory", Shown(FLAGS)),
    ("serve", "grpc-only", Shown(FAILURES)),
    ("serve", "health", Shown(LAUNCH)),
    ("launch", "processes", Shown(LAUNCH)),
    ("launch", "hosts", Shown(LAUNCH)),
    ("launch", "ssh", Shown(LAUNCH)),
    ("launch", "remote-kolo", Refused(&["--hosts", "a:1", "--remote-kolo", "k", "true"])),
    ("launch", "listen", Refused(&["--listen", "127.0.0.1:0", "true"])),
    ("launch", "join-token-file", Refused(&["--hosts", "a:1", "--ssh", "--join-token-file", "t", "--", "true"])),
    ("launch", "join-deadline", Refused(&["--join-deadline", "3", "true"])),
    ("launch", "log-dir", Shown(LAUNCH)),
    ("launch", "restarts", Shown(LAUNCH)),
    ("launch", "min", Shown(LAUNCH)),
    ("launch", "grace", Shown(LAUNCH)),
    ("agent", "join", Shown(LAUNCH)),
    ("agent", "name", Shown(LAUNCH)),
    ("agent", "token-file", Shown(LAUNCH)),
    ("agent", "token-stdin", Shown(LAUNCH)),
    ("agent", "join-deadline", Shown(LAUNCH)),
    ("stop", "pid", Shown(LAUNCH)),
    ("stop", "list", Shown(LAUNCH)),
    ("stop", "deadline", Refused(&["--list", "--deadline", "3"])),
    ("stop", "kill", Refused(&["--list", "--kill"])),
    ("stop", "json", Shown(LAUNCH)),
    ("doctor", "cluster", Shown(FAILURES)),
    ("doctor", "tls-ca", Shown(DOORS)),
    ("doctor", "tls-cert", Shown(DOORS)),
    ("doctor", "tls-key", Shown(DOORS)),
    ("doctor", "token", Shown(USERS)),
    ("doctor", "token-file", Shown(DOORS)),
    ("doctor", "overdue", Shown(FAILURES)),
    ("doctor", "deadline", Refused(&["--deadline", "2"])),
    ("doctor", "pid", Shown("tests/rank_doctor.rs")),
    ("doctor", "json", Shown(FLAGS)),
    ("doctor", "watch", Shown(FLAGS)),
    ("cert", "hosts", Shown(DOORS)),
    ("cert", "days", Shown(FLAGS)),
    ("config check", "cluster", Shown(FLAGS)),
    ("config check", "job", Shown(FLAGS)),
    ("config check", "task", Refused(&["--task", "0", "--cluster", "ps=a:1"])),
    ("config check", "json", Shown(FLAGS)),
    ("explain", "fetch", Shown(CLI)),
    ("explain", "devices", Shown(CLI)),
    ("explain", "soft", Shown(CLI)),
    ("explain", "pins", Shown(CLI)),
    ("explain", "policy", Shown(CLI)),
    ("explain", "costs", Refused(&["g.pb", "--fetch", "a", "--costs", "c"])),
    ("explain", "passes", Shown(FLAGS)),
    ("explain", "after", Shown(FLAGS)),
    ("explain", "json", Shown(FLAGS)),
    ("explain collectives", "ranks", Shown(FLAGS)),
    ("explain collectives", "hosts", Shown(FLAGS)),
    ("trace", "fetch", Shown(CLI)),
    ("trace", "devices", Shown(CLI)),
    ("trace", "soft", Shown(CLI)),
    ("trace", "pins", Shown(CLI)),
    ("trace", "policy", Shown(CLI)),
    ("trace", "costs", Refused(&["g.pb", "--fetch", "a", "--costs", "c"])),
    ("trace", "feed", Shown(CLI)),
    ("trace", "first", Shown("conformance/functions/check.py")),
    ("trace", "out", Shown(CLI)),
    ("trace", "write-costs", Shown(CLI)),
    ("devices", "json", Shown(FLAGS)),
    ("devices", "watch", Shown(FLAGS)),
    ("devices", "interval", Refused(&["--interval", "2"])),
    ("ops", "coverage", Shown("conformance/ops/run")),
    ("checkpoint show", "tensor", Shown("tests/saver.rs")),
    ("checkpoint show", "json", Shown("tests/saver.rs")),
    ("bench", "json", Shown("bench/run")),
    ("bench", "case", Refused(&["mlp", "--case", "a"])),
    ("bench", "plain", Refused(&["mlp", "--plain"])),
    ("bench", "ranks", Refused(&["mlp", "--ranks", "3"])),
    ("bench", "transport", Refused(&["mlp", "--transport", "tcp"])),
    ("bench", "algorithm", Refused(&["collectives", "--transport", "shared", "--algorithm", "ring"])),
    ("bench", "calibrate", Refused(&["mlp", "--calibrate"])),
    // What the benchmark gives to the processes it starts.
    ("bench", "rank", Shown("src/cli/bench/collectives.rs")),
    ("bench", "meet", Shown("src/cli/bench/collectives.rs")),
    ("bench", "world", Shown("src/cli/bench/data_parallel.rs")),
    ("bench", "cluster", Shown("src/cli/bench/cluster/training.rs")),
    ("bench", "worker", Shown("src/cli/bench/cluster/training.rs")),
];

/// Whether a command is the one of a line, or below it.
fn is_below(command: &str, line: &str) -> bool {
    command == line || command.strip_prefix(line).is_some_and(|rest| rest.starts_with(' '))
}

/// Every flag, as the command it belongs to and its long name.
fn all_flags(command: &clap::Command, path: &str, found: &mut BTreeSet<(String, String)>) {
    let flags = command.get_arguments().filter_map(|arg| arg.get_long());
    found.extend(
        flags.filter(|flag| !["help", "version"].contains(flag)).map(|flag| (path.to_owned(), flag.to_owned())),
    );
    for below in command.get_subcommands() {
        all_flags(below, format!("{path} {}", below.get_name()).trim(), found);
    }
}

#[test]
fn every_flag_is_refused_or_shown_to_work() {
    let mut flags = BTreeSet::new();
    all_flags(&Cli::command(), "", &mut flags);
    assert!(flags.len() > 100, "the commands are walked: {flags:?}");
    for (command, flag) in &flags {
        let has_line = TABLE.iter().any(|(of, name, _)| name == flag && is_below(command, of));
        assert!(has_line, "`kolo {command} --{flag}` is new: say in this table how it is known not to be ignored");
    }
    for (of, flag, proof) in TABLE {
        let command = flags.iter().find(|(command, name)| name == flag && is_below(command, of));
        let (command, _) = command.unwrap_or_else(|| panic!("`kolo {of}` has no --{flag}"));
        match proof {
            Refused(arguments) => {
                let error = refusal(command, arguments);
                assert!(error.contains(&format!("--{flag} ")), "`kolo {command} {arguments:?}`: {error}");
            }
            Shown(file) => {
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
                let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"));
                assert!(text.contains(&format!("--{flag}")), "{file} does not use --{flag}");
            }
        }
    }
}

/// What is said to a command line.
fn refusal(command: &str, arguments: &[&str]) -> String {
    let mut line = vec!["kolo"];
    line.extend(command.split_whitespace());
    // Some commands need more than the flag.
    line.extend(if command == "train cifar" { &["--data", "cifar"][..] } else { &[] });
    line.extend(arguments);
    let root = Cli::command();
    let matches = root.clone().try_get_matches_from(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
    assert!(Cli::from_arg_matches(&matches).is_ok(), "{line:?}");
    match Given::new(&root, &matches).check() {
        Ok(()) => format!("{line:?} is not refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn calibrating_takes_nothing_that_it_would_ignore() {
    for flags in [&["--json"][..], &["--transport", "tcp"], &["--algorithm", "ring"]] {
        let error = refusal("bench", &[&["collectives", "--calibrate"], flags].concat());
        assert!(error.contains(flags[0]) && error.contains("--calibrate"), "{error}");
    }
}

/// All processes of a benchmark are on one host, so another algorithm would be measured.
#[test]
fn an_algorithm_that_needs_several_hosts_is_not_measured_on_one() {
    let error = refusal("bench", &["collectives", "--algorithm", "two-level"]);
    assert!(error.contains("two-level is for ranks on several hosts"), "{error}");
}

#[test]
fn ranks_that_come_and_go_have_no_parameter_servers() {
    let elastic = ["linear", "--elastic", "--join", "127.0.0.1:9", "--min", "1", "--max", "2"];
    for cluster in [
        &["--cluster", "ps=127.0.0.1:1;worker=127.0.0.1:2", "--task", "worker:0"][..],
        &["--strategy", "parameter-server"],
        &["--ps", "1", "--workers", "2"],
        &["--target", "grpc://127.0.0.1:1"],
    ] {
        let error = refusal("train", &[&elastic[..], cluster].concat());
        assert!(error.contains("--elastic is about ranks"), "{cluster:?}: {error}");
    }
}

#[test]
fn what_has_an_effect_is_taken() {
    for line in [
        "train mnist --sync --ps 1 --workers 2 --no-shared-memory --insecure --checkpoint-dir a --keep 3",
        "train linear --cluster ps=a:1;worker=b:1 --task 0 --hybrid --no-capture",
        "train lm --sample 3 --prompt a",
        "train lm --model gpt2-124m --vocabulary 31",
        "serve --durability logged --journal a",
        "devices --watch --interval 3",
        "launch --hosts a:1 --listen 127.0.0.1:0 --ssh x --remote-kolo k --join-deadline 3 true",
        "bench ps-vs-ring --ranks 3 --json",
        "bench collectives --algorithm ring",
        "trace g.pb --fetch a --costs a --write-costs a",
    ] {
        let root = Cli::command();
        let words = std::iter::once("kolo").chain(line.split(' '));
        let matches = root.clone().try_get_matches_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        if let Err(error) = Given::new(&root, &matches).check() {
            panic!("{line}: {error}");
        }
    }
}
