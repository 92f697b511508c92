//! Flags that would have no effect are refused, with the reason, before a command starts: an option works, or it is an
//! error.

use std::collections::BTreeMap;
use std::path::Path;

use super::doctor::is_about_ranks;
use super::place::{has_other_launcher, is_rank, is_task};
use super::train::ranks::has_elastic_place;
use crate::{Error, Result};
use clap::ArgMatches;
use clap::parser::ValueSource;

/// What stands on the command line.
pub struct Given {
    /// The command, such as `train mnist`.
    command: String,
    /// Flags by their long name, and positional arguments by their id, whether given or defaults.
    arguments: BTreeMap<String, Argument>,
}

struct Argument {
    heading: Option<String>,
    value: Option<String>,
    is_given: bool,
}

impl Given {
    /// What the command line says. `command` is the root.
    pub fn new(command: &clap::Command, matches: &ArgMatches) -> Given {
        let (mut command, mut matches, mut path) = (command, matches, Vec::new());
        while let Some((name, below)) = matches.subcommand()
            && let Some(next) = command.find_subcommand(name)
        {
            path.push(name);
            (command, matches) = (next, below);
        }
        let argument = |arg: &clap::Arg| {
            let id = arg.get_id().as_str();
            let raw = matches.try_get_raw(id).ok().flatten().and_then(|mut values| values.next());
            let source = matches.try_contains_id(id).ok().and_then(|_| matches.value_source(id));
            Argument {
                heading: arg.get_help_heading().map(str::to_owned),
                value: raw.map(|value| value.to_string_lossy().into_owned()),
                is_given: source == Some(ValueSource::CommandLine),
            }
        };
        let arguments = command
            .get_arguments()
            .map(|arg| (arg.get_long().unwrap_or(arg.get_id().as_str()).to_owned(), argument(arg)));
        Given { command: path.join(" "), arguments: arguments.collect() }
    }

    pub fn has(&self, flag: &str) -> bool {
        self.arguments.get(flag).is_some_and(|argument| argument.is_given)
    }

    /// The first value, given or default.
    fn value(&self, argument: &str) -> &str {
        self.arguments.get(argument).and_then(|argument| argument.value.as_deref()).unwrap_or("")
    }

    /// Whether it is about several processes with parameter servers.
    pub fn is_cluster(&self) -> bool {
        ["ps", "workers", "cluster", "target"].iter().any(|flag| self.has(flag))
            || self.strategy() == "parameter-server"
            || !self.has("ranks") && is_task()
    }

    /// The strategy by its first name; empty if none is given.
    fn strategy(&self) -> &str {
        match self.value("strategy") {
            "collective-all-reduce" => "multi-worker-mirrored",
            name => name,
        }
    }

    /// Whether this process finds the other ranks of an elastic training over TCP.
    fn is_member(&self) -> bool {
        self.has("elastic") && (self.has("join") || has_elastic_place()) && !self.is_cluster()
    }

    /// Whether all devices that the flags name are CPUs.
    fn is_cpu_only(&self) -> bool {
        let named = format!("{} {}", self.value("device"), self.value("devices")).to_ascii_lowercase();
        named.contains("cpu") && !named.contains("gpu")
    }

    /// An error if a flag would have no effect.
    pub fn check(&self) -> Result<()> {
        for rule in RULES.iter().filter(|rule| format!("{} ", self.command).starts_with(&format!("{} ", rule.command)))
        {
            let mut flags =
                self.arguments.iter().filter(|(name, argument)| argument.is_given && rule.is_about(name, argument));
            if let Some((flag, _)) = flags.next()
                && (rule.has_no_effect)(self)
            {
                return Err(Error::invalid_argument(format!("--{flag} {}", rule.why)));
            }
        }
        Ok(())
    }
}

/// When flags of a command have no effect, and why.
struct Rule {
    /// The command, or the beginning of it.
    command: &'static str,
    /// Long names, or a heading of the help in brackets.
    flags: &'static [&'static str],
    has_no_effect: fn(&Given) -> bool,
    why: &'static str,
}

impl Rule {
    fn is_about(&self, flag: &str, argument: &Argument) -> bool {
        let heading = argument.heading.as_deref().map(|heading| format!("[{heading}]"));
        self.flags.iter().any(|about| *about == flag || Some(*about) == heading.as_deref())
    }
}

const GPU_FLAGS: &[&str] = &["gpu-memory-fraction", "virtual-gpus", "no-capture", "no-fusion", "full-precision"];

/// All of them. The first that applies is reported.
const RULES: &[Rule] = &[
    Rule {
        command: "train",
        flags: &["devices"],
        has_no_effect: |given| given.strategy() == "one-device",
        why: "splits batches over several devices, and --strategy one-device has one: give --device, or --strategy mirrored",
    },
    Rule {
        command: "train",
        flags: &["device"],
        has_no_effect: |given| ["mirrored", "central-storage"].contains(&given.strategy()),
        why: "is one device, and this strategy has a replica on each of several: give --devices, or --strategy one-device",
    },
    Rule {
        command: "train",
        flags: &["ranks"],
        has_no_effect: |given| ["one-device", "mirrored", "central-storage"].contains(&given.strategy()),
        why: "starts several processes, and this strategy is for one: take --strategy multi-worker-mirrored",
    },
    Rule {
        command: "train",
        flags: &["ps", "workers", "cluster", "target", "sync", "async", "hybrid", "no-shared-memory"],
        has_no_effect: |given| !["", "parameter-server"].contains(&given.strategy()),
        why: "is about workers and parameter servers: take --strategy parameter-server",
    },
    Rule {
        command: "train",
        flags: &["strategy"],
        has_no_effect: |given| is_rank() && given.strategy() != "multi-worker-mirrored",
        why: "is for processes that this command starts, and this one was started as one of several ranks (RANK, WORLD_SIZE or \
              KOLO_WORLD is set, or mpirun has started it): take --strategy multi-worker-mirrored",
    },
    Rule {
        command: "train",
        flags: &["ps", "workers"],
        has_no_effect: |given| given.has("cluster"),
        why: "starts a cluster on this machine, and --cluster joins one that runs; give one or the other",
    },
    Rule {
        command: "train",
        flags: &["ranks"],
        has_no_effect: Given::is_cluster,
        why: "starts processes that exchange gradients among themselves, and a cluster has parameter servers; give one or the \
              other",
    },
    Rule {
        command: "train",
        flags: &["micro-batches"],
        has_no_effect: Given::is_cluster,
        why: "cuts the batches of one process or of --ranks; workers of a cluster compute each batch whole",
    },
    Rule {
        command: "train",
        flags: &["min", "max", "join", "listen", "wait-for-ranks"],
        has_no_effect: |given| !given.has("elastic"),
        why: "is about ranks that come and go; add --elastic",
    },
    Rule {
        command: "train",
        flags: &["elastic"],
        has_no_effect: Given::is_cluster,
        why: "is about ranks that exchange gradients among themselves, and a cluster has parameter servers, whose workers may come and \
              go without it; leave out the one or the other",
    },
    Rule {
        command: "train",
        flags: &["check-weights-every", "elastic", "sync-batch-norm", "exchange", "local-steps"],
        has_no_effect: |given| !given.has("ranks") && !is_rank() && !given.is_member(),
        why: "is about the processes of --ranks, which is not given",
    },
    Rule {
        command: "train",
        flags: &["join", "max", "listen", "wait-for-ranks"],
        has_no_effect: |given| given.has("ranks"),
        why: "is about ranks that find each other over TCP; --ranks starts all that there are, and says them where they meet",
    },
    Rule {
        command: "train",
        flags: &["outer"],
        has_no_effect: |given| !given.has("local-steps"),
        why: "moves the weights of ranks that train by themselves and meet now and then; add --local-steps",
    },
    Rule {
        command: "train",
        flags: &["sync", "async", "hybrid"],
        has_no_effect: |given| !given.is_cluster(),
        why: "says how the workers of a cluster update the weights, and there is no cluster; add --ps 1 --workers 2, \
              --cluster or --target",
    },
    Rule {
        command: "train",
        flags: &["no-shared-memory"],
        has_no_effect: |given| !given.is_cluster(),
        why: "is about the tasks of a cluster, and there is none; add --ps 1 --workers 2, --cluster or --target",
    },
    Rule {
        command: "train",
        flags: &["[Security]"],
        has_no_effect: |given| !given.is_cluster() && !has_other_launcher() && !given.is_member(),
        why: "is about connections between processes, and there is no cluster; add --ps 1 --workers 2, --cluster or \
              --target",
    },
    Rule {
        command: "train",
        flags: &["ranks", "ps", "workers", "cluster", "target"],
        has_no_effect: |_| is_rank(),
        why: "starts or joins other processes, and this one was started as one of several ranks: RANK, WORLD_SIZE or KOLO_WORLD is \
              set, or mpirun or srun has started it (`kolo config check` explains)",
    },
    Rule {
        command: "train",
        flags: &["elastic"],
        has_no_effect: |given| has_other_launcher() && !given.is_member(),
        why: "cannot be under mpirun, which ends all processes if one dies; start ranks with --ranks, or with RANK, WORLD_SIZE, \
              MASTER_ADDR and MASTER_PORT",
    },
    Rule {
        command: "train",
        flags: &["insecure", "insecure-loopback", "same-user"],
        has_no_effect: |given| given.has("target"),
        why: "is for processes that listen; with --target, the server does",
    },
    Rule {
        command: "train",
        flags: &["devices"],
        has_no_effect: Given::is_cluster,
        why: "splits batches over the devices of one process, and a cluster over its workers; give more --workers, or \
              --device for each",
    },
    Rule {
        command: "train",
        flags: &["deny-implicit-copies"],
        has_no_effect: Given::is_cluster,
        why: "is checked in a single process only; variables of a cluster are on parameter servers, and always copied",
    },
    Rule {
        command: "train",
        flags: GPU_FLAGS,
        has_no_effect: |given| given.has("target"),
        why: "is about GPUs of this process; with --target, they are the server's",
    },
    Rule {
        command: "train",
        flags: GPU_FLAGS,
        has_no_effect: Given::is_cpu_only,
        why: "is about GPUs, and the devices are CPUs",
    },
    Rule {
        command: "train",
        flags: &["target-deadline"],
        has_no_effect: |given| !given.has("target"),
        why: "is how long to wait for --target, which is not given",
    },
    Rule {
        command: "train",
        flags: &["checkpoint-every", "keep"],
        has_no_effect: |given| !given.has("checkpoint-dir"),
        why: "is about checkpoints, and nothing is saved without --checkpoint-dir",
    },
    Rule {
        command: "train lm",
        flags: &["vocabulary", "precision"],
        has_no_effect: |given| given.value("model") != "gpt2-124m",
        why: "is for --model gpt2-124m; the small model computes in float, and its vocabulary is that of the text",
    },
    Rule {
        command: "train lm",
        flags: &["prompt", "sample", "temperature"],
        has_no_effect: |given| given.value("model") == "gpt2-124m",
        why: "is for --model small; GPT-2 writes no sample here",
    },
    Rule {
        command: "train lm",
        flags: &["prompt", "temperature"],
        has_no_effect: |given| given.value("sample") == "0",
        why: "is about the sample, and --sample 0 writes none",
    },
    Rule {
        command: "serve",
        flags: &["journal"],
        has_no_effect: |given| !["logged", "synced"].contains(&given.value("durability")),
        why: "is the folder of a log that is kept with --durability logged or synced only",
    },
    Rule {
        command: "serve",
        flags: &["replica"],
        has_no_effect: |given| given.value("durability") != "replicated",
        why: "is the task to replicate to with --durability replicated",
    },
    Rule {
        command: "launch",
        flags: &["remote-kolo"],
        has_no_effect: |given| !given.has("ssh"),
        why: "is how the agents of --ssh are called, which is not given",
    },
    Rule {
        command: "launch",
        flags: &["join-token-file"],
        has_no_effect: |given| given.has("ssh"),
        why: "is for agents that people start, and --ssh gives them the token itself",
    },
    Rule {
        command: "launch",
        flags: &["listen", "join-token-file", "join-deadline"],
        has_no_effect: |given| !given.has("hosts"),
        why: "is about the agents of --hosts, which is not given",
    },
    Rule {
        command: "stop",
        flags: &["deadline", "kill"],
        has_no_effect: |given| given.has("list"),
        why: "is about the end of a job, and --list ends none",
    },
    Rule {
        command: "doctor",
        flags: &["deadline", "[Security]"],
        has_no_effect: |given| is_about_ranks(given.has("cluster"), given.has("pid")),
        why: "is about the tasks of a cluster, and there is none: ranks of this machine are not asked; give --cluster",
    },
    Rule {
        command: "devices",
        flags: &["interval"],
        has_no_effect: |given| !given.has("watch"),
        why: "is the time between listings of --watch, which is not given",
    },
    Rule {
        command: "run",
        flags: &["signature", "tag"],
        has_no_effect: |given| !given.value("model").is_empty() && !Path::new(given.value("model")).is_dir(),
        why: "is for a SavedModel, which is a folder; this is a file",
    },
    Rule {
        command: "run",
        flags: &["json"],
        has_no_effect: |given| given.has("out"),
        why: "prints values, and --out writes them to files",
    },
    Rule {
        command: "explain",
        flags: &["costs"],
        has_no_effect: |given| given.value("policy") != "cost" && !given.has("soft"),
        why: "is used with --policy cost, or with --soft for the cost of fallbacks",
    },
    Rule {
        command: "trace",
        flags: &["costs"],
        has_no_effect: |given| given.value("policy") != "cost" && !given.has("soft") && !given.has("write-costs"),
        why: "is used with --policy cost, with --soft for the cost of fallbacks, or with --write-costs",
    },
    Rule {
        command: "config check",
        flags: &["task"],
        has_no_effect: |given| !given.has("job") && std::env::var_os("TF_CONFIG").is_none(),
        why: "is a number in a job; add --job",
    },
    Rule {
        command: "bench",
        flags: &["case"],
        has_no_effect: |given| !["ops", "gpu", "data-parallel"].contains(&given.value("name")),
        why: "chooses among the cases of `bench ops`, `bench gpu` and `bench data-parallel`",
    },
    Rule {
        command: "bench",
        flags: &["plain"],
        has_no_effect: |given| given.value("name") != "tls",
        why: "is for `bench tls`",
    },
    Rule {
        command: "bench",
        flags: &["transport", "algorithm", "calibrate"],
        has_no_effect: |given| given.value("name") != "collectives",
        why: "is for `bench collectives`",
    },
    Rule {
        command: "bench",
        flags: &["ranks"],
        has_no_effect: |given| !["collectives", "data-parallel", "ps-vs-ring"].contains(&given.value("name")),
        why: "is for `bench collectives`, `bench data-parallel` and `bench ps-vs-ring`",
    },
    Rule {
        command: "bench",
        flags: &["algorithm"],
        has_no_effect: |given| given.value("transport") == "shared" || given.has("calibrate"),
        why: "chooses among the ways of messages: not in shared memory, and --calibrate compares them",
    },
    Rule {
        command: "bench",
        flags: &["algorithm"],
        has_no_effect: |given| given.value("algorithm") == "two-level",
        why: "two-level is for ranks on several hosts, and these are on one; `kolo explain collectives --hosts 2` says when it is taken",
    },
    Rule {
        command: "bench",
        flags: &["transport"],
        has_no_effect: |given| given.has("calibrate"),
        why: "chooses what is measured, and --calibrate measures both",
    },
    Rule {
        command: "bench",
        flags: &["json"],
        has_no_effect: |given| given.has("calibrate"),
        why: "prints cases, and --calibrate has none; `kolo explain collectives --json` prints what it measured",
    },
];

#[cfg(test)]
#[path = "refusal_tests.rs"]
mod tests;
