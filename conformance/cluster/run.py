"""Runs the TensorFlow programs of this folder as clients of a cluster of server processes.

usage: run [--servers kolo|tensorflow|mixed] [--kolo PATH] [--master JOB:TASK] [--list] [--keep] [PATTERN...]

The cluster has two parameter servers and two workers with two CPU devices each. A PATTERN names cases as `theme/case`, with
`*` for any text. `mixed` is Kolo for the tasks 0 and TensorFlow for the tasks 1, so that each is master to the other.
known.txt lists what is known to differ, with the reason. Prints 'N passed, N failed', and fails if any did.
"""

import argparse
import fnmatch
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import servers

HERE = Path(__file__).resolve().parent
JOBS = {"ps": 2, "worker": 2}
CPUS = 2
# Seconds beyond a case's own until its silence is taken for a hang, and for the others when one client has failed.
MARGIN, AFTER_FAILURE = 15.0, 8.0


class Client:
    """A client process. It imports TensorFlow once and then does case after case."""

    def __init__(self, rank, cluster, o, masters, folder):
        self.rank = rank
        self.log = os.path.join(folder, f"client-{rank}.log")
        command = [o.python, str(HERE / "client.py"), "--rank", str(rank), "--cluster", json.dumps(cluster.addresses),
                   "--servers", o.servers, "--masters", json.dumps(masters)]
        env = servers.environment(KOLO_BIN=o.kolo or "")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                                            env=env, preexec_fn=servers.die_with_parent)
        self.answers = queue.Queue()
        threading.Thread(target=self._read, name=f"client {rank}", daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def ask(self, **order):
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass

    def answer(self, seconds):
        """The next answer; None when the process ended, or was silent for so long."""
        try:
            return self.answers.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()


class Run:
    def __init__(self, o, folder):
        self.o, self.folder = o, folder
        self.cluster, self.clients, self.starts = None, {}, 0
        self.statuses = []

    def start(self):
        kinds = {(job, task): self.o.servers if self.o.servers != "mixed" else ("kolo", "tensorflow")[task]
                 for job, n in JOBS.items() for task in range(n)}
        self.starts += 1
        logs = os.path.join(self.folder, f"servers-{self.starts}")
        os.mkdir(logs)
        self.cluster = servers.start(JOBS, kinds, logs, self.o.python, self.o.kolo, CPUS, plain=self.o.servers == "mixed")
        if self.o.master:
            job, _, task = self.o.master.partition(":")
            self.masters = [self.cluster.target(job, int(task or 0))] * 2
        else:
            self.masters = [self.cluster.target("worker", rank) for rank in range(2)]

    def client(self, rank):
        if rank not in self.clients:
            self.clients[rank] = Client(rank, self.cluster, self.o, self.masters, self.folder)
            self.clients[rank].fresh = True
        return self.clients[rank]

    def ready(self, ranks):
        """Clients of these ranks that have imported TensorFlow."""
        clients = [self.client(rank) for rank in range(ranks)]
        for c in clients:
            if c.fresh:
                if c.answer(servers.READY) is None:
                    raise RuntimeError(f"client {c.rank} did not start; see {c.log}")
                c.fresh = False
        return clients

    def drop_client(self, rank):
        self.clients.pop(rank).stop()

    def stop(self):
        for rank in list(self.clients):
            self.drop_client(rank)
        if self.cluster:
            dead = {s.task for s in self.cluster.dead()}
            self.statuses += [(t, s) for t, s in self.cluster.stop().items() if t not in dead]
            self.cluster = None

    def cases(self, module):
        client = self.ready(1)[0]
        client.ask(list=module)
        answer = client.answer(60)
        if answer is None:
            raise RuntimeError(f"programs/{module}.py cannot be imported; see {client.log}")
        return answer["cases"]

    def case(self, module, name, seconds, ranks):
        """(passed, reason)."""
        folder = tempfile.mkdtemp(prefix=re.sub(r"\W", "-", f"{module}-{name}-"), dir=self.folder)
        clients = self.ready(ranks)
        for c in clients:
            c.ask(module=module, run=name, folder=folder)
        deadline = time.monotonic() + seconds + MARGIN
        reasons, waiting = [], list(clients)
        while waiting:
            for c in list(waiting):
                answer = c.answer(0.0 if len(waiting) > 1 else deadline - time.monotonic())
                who = f"client {c.rank}: " if ranks > 1 else ""
                if answer is None and c.process.poll() is None and time.monotonic() < deadline:
                    continue
                waiting.remove(c)
                if answer is None:
                    code = c.process.poll()
                    # Not the reason if it merely waited for one that failed.
                    reasons.append((code is None, f"{who}did not end in {seconds:g} s" if code is None else f"{who}ended with status {code}"))
                    self.drop_client(c.rank)
                elif not answer["ok"]:
                    reasons.append((False, who + answer["reason"]))
                if reasons:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
            if len(waiting) > 1:
                time.sleep(0.02)
        reasons = [text for _, text in sorted(reasons, key=lambda r: r[0])]
        for dead in self.cluster.dead():
            reasons.append(f"server {dead.task} ended with status {dead.process.returncode}: {dead.tail()[-1500:]}")
        if self.cluster.dead():
            self.stop()
            self.start()
        if not reasons or not self.o.keep:
            shutil.rmtree(folder, ignore_errors=True)
        return not reasons, "; ".join(reasons)


def build():
    """Builds the repository's kolo as its tests do. The path."""
    if subprocess.run(["cargo", "build", "--quiet", "--bin", "kolo"], cwd=servers.ROOT).returncode != 0:
        sys.exit("conformance/cluster: 'cargo build --bin kolo' failed")
    return str(servers.ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "debug" / "kolo")


def read_known(path):
    """[(pattern, reason)] of known.txt."""
    known = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, found, reason = line.partition(": ")
        if not found or not reason.strip():
            sys.exit(f"{path.name}:{number}: a line is 'theme/case (servers): reason'")
        known.append((pattern.strip(), reason.strip()))
    return known


def main():
    themes = sorted(p.stem for p in (HERE / "programs").glob("*.py") if not p.stem.startswith("_"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", choices=["kolo", "tensorflow", "mixed"], default="kolo")
    parser.add_argument("--kolo", help="the kolo binary; without it and $KOLO_BIN one is built")
    parser.add_argument("--python", default=sys.executable, help="a Python that has tensorflow")
    parser.add_argument("--master", metavar="JOB:TASK", help="the task that all clients talk to")
    parser.add_argument("--list", action="store_true", help="print the cases and do nothing")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("pattern", nargs="*", help="cases, such as 'values/*'; themes: " + ", ".join(themes))
    o = parser.parse_args()
    if o.servers == "tensorflow":
        o.kolo = o.kolo or os.environ.get("KOLO_BIN") or ""
    else:
        o.kolo = os.path.abspath(o.kolo or os.environ.get("KOLO_BIN") or build())
        if not os.access(o.kolo, os.X_OK):
            sys.exit(f"conformance/cluster: '{o.kolo}' cannot be run; name the kolo binary with --kolo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = tempfile.mkdtemp(prefix="kolo-conformance-cluster-")
    run, failed = Run(o, folder), True
    try:
        failed = whole(run, o, themes)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        run.stop()
        if o.keep or failed:
            print(f"# logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if failed else 0)


def whole(run, o, themes):
    """Runs everything and prints it. True when something failed that is not known to."""
    known = read_known(HERE / "known.txt")
    begin = time.monotonic()
    run.start()
    print(f"# {o.servers} servers {run.cluster.spec}", flush=True)
    rows, needed = [], set()

    def note(theme, name, passed, reason, seconds):
        full = f"{theme}/{name} ({o.servers})"
        why = next((w for p, w in known if fnmatch.fnmatchcase(full, p)), None)
        needed.update(p for p, _ in known if not passed and fnmatch.fnmatchcase(full, p))
        verdict = "ok" if passed else "known" if why else "FAILED"
        rows.append((theme, verdict))
        if passed:
            print(f"ok      {theme}/{name}  {seconds:.1f} s", flush=True)
        elif why:
            print(f"known   {theme}/{name}: {why}", flush=True)
        else:
            print(f"FAILED  {theme}/{name}  {seconds:.1f} s\n        " + reason.strip().replace("\n", "\n        "), flush=True)

    for theme in themes:
        patterns = o.pattern
        if patterns and not any(p.split("/")[0] == theme or "*" in p.split("/")[0] for p in patterns):
            continue
        for name, seconds, ranks in run.cases(theme):
            full = f"{theme}/{name}"
            if patterns and not any(full == p or theme == p or fnmatch.fnmatchcase(full, p) for p in patterns):
                continue
            if o.list:
                print(full)
                continue
            start = time.monotonic()
            passed, reason = run.case(theme, name, seconds, ranks)
            note(theme, name, passed, reason, time.monotonic() - start)
    run.stop()
    if o.list:
        return False
    wrong = [f"{task}: {status}" for task, status in run.statuses if status != 0]
    note("servers", "end-with-0", not wrong, "on SIGTERM a server must end with status 0; " + ", ".join(wrong), 0.0)

    print(f"\n{'theme':<14}{'passed':>8}{'known':>8}{'failed':>8}")
    for theme in dict.fromkeys(t for t, _ in rows):
        count = [sum(1 for t, v in rows if t == theme and v == w) for w in ("ok", "known", "FAILED")]
        print(f"{theme:<14}" + "".join(f"{n:>8}" for n in count))
    passed, listed, failed = (sum(1 for _, v in rows if v == w) for w in ("ok", "known", "FAILED"))
    stale = [] if o.pattern else [p for p, _ in known if p not in needed and _concerns(p, o.servers)]
    for pattern in stale:
        print(f"FAILED  known.txt: nothing needs the line '{pattern}' any more")
    print(f"{passed} passed, {failed + len(stale)} failed, {listed} known to differ, with {o.servers} servers in {time.monotonic() - begin:.0f} s")
    return bool(failed or stale)


def _concerns(pattern, mode):
    """Whether a line of known.txt is about this kind of servers."""
    inside = re.search(r"\((.*)\)$", pattern)
    return inside is not None and inside.group(1) == mode


if __name__ == "__main__":
    main()
