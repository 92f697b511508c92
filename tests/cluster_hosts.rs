//! The cluster of `docs/clusters.md` on three hosts, which are network namespaces that the test makes. It needs the right to
//! make them (root) and the `ip` command, and says so where it has neither.
#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

mod support;

use std::process::Command;
use std::time::Instant;

use support::{Folder, PATIENCE, Process, kolo, one_at_a_time, write_pictures};

/// Three hosts on one switch, gone after the test.
struct Hosts {
    prefix: String,
}

impl Hosts {
    /// `None` if this process may not make them.
    fn new() -> Option<Hosts> {
        let hosts = Hosts { prefix: format!("kolo{}", std::process::id()) };
        hosts.make().then_some(hosts)
    }

    fn make(&self) -> bool {
        let switch = self.name(0);
        let mut commands = vec![format!("netns add {switch}")];
        commands.push(format!("-n {switch} link add br0 type bridge"));
        commands.push(format!("-n {switch} link set br0 up"));
        for host in 1..=3 {
            let name = self.name(host);
            commands.extend([
                format!("netns add {name}"),
                format!("link add eth{host} netns {name} type veth peer name port{host} netns {switch}"),
                format!("-n {switch} link set port{host} master br0"),
                format!("-n {switch} link set port{host} up"),
                format!("-n {name} addr add {}/24 dev eth{host}", address(host)),
                format!("-n {name} link set eth{host} up"),
                format!("-n {name} link set lo up"),
            ]);
        }
        commands.iter().all(|command| ip(command))
    }

    fn name(&self, host: usize) -> String {
        format!("{}h{host}", self.prefix)
    }

    /// Cuts, or heals, the link of a host.
    fn set_link(&self, host: usize, state: &str) {
        assert!(ip(&format!("-n {} link set port{host} {state}", self.name(0))));
    }

    /// `kolo` on a host.
    fn command(&self, host: usize, args: &[&str], environment: &[(String, String)]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name(host), env!("CARGO_BIN_EXE_kolo")]).args(args);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 0..=3 {
            ip(&format!("netns del {}", self.name(host)));
        }
    }
}

fn address(host: usize) -> String {
    format!("10.77.0.{host}")
}

fn ip(arguments: &str) -> bool {
    Command::new("ip").args(arguments.split(' ')).output().is_ok_and(|output| output.status.success())
}

#[test]
fn three_hosts_train_with_certificates_and_bear_a_cut_link() {
    let _turn = one_at_a_time();
    let Some(hosts) = Hosts::new() else {
        println!("skipped: network namespaces cannot be made here (that needs root and the ip command)");
        return;
    };
    let folder = Folder::new("three-hosts");
    write_pictures(&folder.0.join("data"));
    let cluster =
        format!(r#"{{"ps": ["{}:2222"], "worker": ["{}:2222", "{}:2222"]}}"#, address(1), address(2), address(3));
    std::fs::write(folder.0.join("cluster.json"), cluster).unwrap();
    let (file, data, checkpoints) = (folder.path("cluster.json"), folder.path("data"), folder.path("ckpt"));
    let (is_well, text) =
        kolo(&["cert", "init", &folder.path("certs"), "--hosts", &(1..=3).map(address).collect::<Vec<_>>().join(",")]);
    assert!(is_well, "{text}");
    let certificates = |name: &str| -> Vec<(String, String)> {
        let path = |name: &str| folder.path(&format!("certs/{name}.pem"));
        [("KOLO_TLS_CA", path("ca")), ("KOLO_TLS_CERT", path(name)), ("KOLO_TLS_KEY", path(&format!("{name}-key")))]
            .map(|(name, path)| (name.to_owned(), path))
            .to_vec()
    };

    // Nobody serves a network without saying how friends are told from strangers.
    let refused = hosts.command(1, &["serve", "--cluster", &file, "--job", "ps"], &[]).output().unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--insecure"));

    let ps =
        hosts.command(1, &["serve", "--with-parent", "--cluster", &file, "--job", "ps"], &certificates(&address(1)));
    let _ps = Process::spawn("ps", ps);
    let worker = |task: usize, more: &[&str]| {
        let task_text = task.to_string();
        let mut args =
            vec!["train", "mnist", "--json", "--log-every", "1", "--batch-size", "20", "--epochs", "1000000"];
        args.extend(["--with-parent", "--data", &data, "--cluster", &file, "--task", &task_text]);
        args.extend(more);
        let host = 2 + task;
        Process::spawn(&format!("worker {task}"), hosts.command(host, &args, &certificates(&address(host))))
    };
    let chief = worker(0, &["--checkpoint-dir", &checkpoints, "--checkpoint-every", "50"]);
    let other = worker(1, &[]);
    chief.wait_for_step(0, |_| true);
    other.wait_for_step(0, |_| true);
    let doctor = ["doctor", "--cluster", &file, "--deadline", "10", "--overdue", "30"];
    let asked = hosts.command(3, &doctor, &certificates("client")).output().unwrap();
    let text = String::from_utf8_lossy(&asked.stdout).into_owned();
    assert!(asked.status.success() && text.contains("Nothing is stuck"), "{text}");

    // The second worker's host is cut off: the others go on, and after a while so does it.
    hosts.set_link(3, "down");
    let (n_chief, n_other) = (chief.lines().len(), other.lines().len());
    let before = chief.steps().into_iter().max().unwrap();
    chief.wait_for_step(n_chief, |step| step > before + 20);
    let cut_off = hosts.command(2, &doctor[..3], &certificates("client")).output().unwrap();
    let text = String::from_utf8_lossy(&cut_off.stdout).into_owned();
    assert!(!cut_off.status.success() && text.contains("worker:1"), "{text}");
    let quiet = other.lines().len();
    assert!(quiet <= n_other + 5, "the cut worker went on");
    hosts.set_link(3, "up");
    let healed = Instant::now();
    let (step, line) = other.wait_for_step(quiet, |step| step > before + 20);
    println!(
        "the worker trained {:?} after the link was healed, at step {step}",
        line.at.saturating_duration_since(healed)
    );
    assert!(healed.elapsed() < PATIENCE);
    for process in [&chief, &other] {
        assert!(process.steps().is_sorted(), "{:?}", process.steps());
    }

    let mut chief = chief;
    chief.signal("TERM");
    assert!(chief.wait().success(), "{}", chief.text());
    assert!(folder.0.join("ckpt/checkpoint").is_file());
}
