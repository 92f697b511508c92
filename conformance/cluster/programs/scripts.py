"""Programs that start their own servers, each process a script as its author starts it. With Kolo one line is added to the
script: `import kolo_tf` after TensorFlow's import. With TensorFlow's servers the script is left as it is, and
python/kolo_tf.py is tried with a `kolo` that is TensorFlow's server in disguise.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import tensorflow.compat.v1 as tf

import servers
from harness import case, check

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(os.path.dirname(HERE))


def disguised(context):
    """A `kolo` that runs TensorFlow's server with the flags of `kolo serve`."""
    path = context.path("kolo")
    with open(path, "w") as f:
        f.write(f'#!/bin/sh\n[ "$1" = serve ] || exit 2\nshift\nexec "{sys.executable}" "{HERE}/tf_server.py" "$@"\n')
    os.chmod(path, 0o755)
    return path


def prepare(context, name, with_kolo):
    """(the script to run, its environment)."""
    script = os.path.join(HERE, "scripts", name)
    env = servers.environment()
    if not with_kolo:
        return script, env
    with open(script) as f:
        lines = f.read().split("\n")
    at = lines.index("import tensorflow.compat.v1 as tf")
    lines.insert(at + 1, "import kolo_tf")
    script = context.path(name)
    # A process that was started before may be about to read the script: it must never find half of one.
    with open(script + ".new", "w") as f:
        f.write("\n".join(lines))
    os.replace(script + ".new", script)
    env["PYTHONPATH"] = os.path.join(ROOT, "python")
    env["KOLO_BIN"] = os.environ.get("KOLO_BIN") or "kolo"
    if context.servers == "tensorflow":
        env["KOLO_BIN"] = disguised(context)
    return script, env


class Programs:
    """Processes of a case. All are ended with it."""

    def __init__(self, context):
        self.context, self.all = context, {}

    def start(self, label, command, env):
        log = open(self.context.path(f"{label}.out"), "wb")
        self.all[label] = subprocess.Popen(servers.tied([sys.executable, *command]), stdout=log, stderr=subprocess.STDOUT, env=env,
                                           cwd=self.context.folder)
        log.close()
        return self.all[label]

    def output(self, label):
        with open(self.context.path(f"{label}.out"), errors="replace") as f:
            return "".join(l for l in f if not l.startswith(("I0000 ", "WARNING: All log", "WARNING:tensorflow")))

    def wait(self, label, seconds=90.0):
        """Waits for a process to end well. It is told at once when another has failed."""
        deadline = time.monotonic() + seconds
        while self.all[label].poll() is None:
            check(time.monotonic() < deadline, label, "did not end in", seconds, "s:", *(f"\n{k}: {self.output(k)[-800:]}" for k in self.all))
            for other, p in self.all.items():
                check(p.poll() in (None, 0), other, "ended with status", p.returncode, ":", self.output(other)[-1500:])
            time.sleep(0.05)
        code = self.all[label].returncode
        check(code == 0, label, "ended with status", code, ":", self.output(label)[-1500:])
        return self.output(label)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for p in self.all.values():
            if p.poll() is None:
                p.kill()
            p.wait()


def tasks_with_kolo(context, forced):
    """Which tasks get the line: all, none, or with mixed servers the parameter server."""
    if forced or context.servers == "kolo":
        return lambda job: True
    return lambda job: context.servers == "mixed" and job == "ps"


def mnist(context, *flags, kolo=False):
    ps, *workers = [f"127.0.0.1:{p}" for p in servers.free_ports(3)]
    wants = tasks_with_kolo(context, kolo)
    with Programs(context) as programs:
        for job, index in (("ps", 0), ("worker", 0), ("worker", 1)):
            script, env = prepare(context, "mnist_replica.py", wants(job))
            programs.start(f"{job}{index}", [
                script, "--ps_hosts", ps, "--worker_hosts", ",".join(workers), "--job_name", job, "--task_index", str(index),
                "--data", context.data, "--log", context.path("log"), *flags], env)
        said = [programs.wait(f"worker{i}") for i in range(2)]
        for i, text in enumerate(said):
            found = re.search(r"(\d+) local steps, global step (\d+), accuracy ([0-9.]+)", text)
            check(found, "worker", i, "said", text[-500:])
            check(int(found[1]) > 0 and int(found[2]) >= 200 and float(found[3]) > 0.8, found[0])
        check(programs.all["ps0"].poll() in (None, 0), "the parameter server ended:", programs.output("ps0")[-500:])
    check(tf.train.latest_checkpoint(context.path("log")), "no checkpoint")


def monitored(context, kolo=False):
    ps, *workers = [f"127.0.0.1:{p}" for p in servers.free_ports(3)]
    wants = tasks_with_kolo(context, kolo)
    os.makedirs(context.path("log"))
    with Programs(context) as programs:
        for job, index in (("ps", 0), ("worker", 0), ("worker", 1)):
            script, env = prepare(context, "monitored.py", wants(job))
            env["TF_CONFIG"] = json.dumps({"cluster": {"ps": [ps], "worker": workers}, "task": {"type": job, "index": index}})
            programs.start(f"{job}{index}", [script, context.path("log")], env)
        for i in range(2):
            text = programs.wait(f"worker{i}")
            found = re.search(r"(\d+) steps, loss ([0-9.]+)", text)
            check(found and int(found[1]) > 0 and float(found[2]) < 0.01, text[-500:])
    check(int(tf.train.load_checkpoint(context.path("log")).get_tensor("global_step")) >= 150)


def local(context, kolo=False):
    with Programs(context) as programs:
        script, env = prepare(context, "local.py", kolo or context.servers != "tensorflow")
        programs.start("local", [script], env)
        check("local: done" in programs.wait("local"))


@case("mnist-async", seconds=150)
def mnist_async(context):
    mnist(context)


@case("mnist-sync", seconds=150)
def mnist_sync(context):
    mnist(context, "--sync")


@case("monitored", seconds=150)
def monitored_as_is(context):
    monitored(context)


@case("local", seconds=90)
def local_as_is(context):
    local(context)


@case("kolo-tf-local", seconds=150)
def kolo_tf_local(context):
    local(context, kolo=True)


@case("kolo-tf-monitored", seconds=200)
def kolo_tf_monitored(context):
    """In a run with TensorFlow's servers: the line itself. With Kolo's, 'monitored' has been this."""
    if context.servers == "tensorflow":
        monitored(context, kolo=True)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


ENDING = """
import sys
import tensorflow.compat.v1 as tf
import kolo_tf
server = tf.train.Server({"worker": ["127.0.0.1:%d"]}, "worker", "0")
assert server.target.endswith(":%d"), server.target
print("pid", server._kolo.process.pid, flush=True)
if sys.argv[1] == "join":
    server.join()
elif sys.argv[1] == "error":
    raise ValueError("the program fails")
"""


def _ending(how, end, wanted):
    @case(f"kolo-tf-server-ends-on-{how}", seconds=90)
    def run(context):
        """The server process ends with the program that started it, however that ends."""
        with Programs(context) as programs:
            _, env = prepare(context, "local.py", True)
            port = servers.free_ports(1)[0]
            with open(context.path("program.py"), "w") as f:
                f.write(ENDING % (port, port))
            p = programs.start("program", [context.path("program.py"), how if how in ("error", "return") else "join"], env)
            deadline = time.monotonic() + 60
            while not (found := re.search(r"^pid (\d+)", programs.output("program"), re.M)):
                check(time.monotonic() < deadline and p.poll() is None, "no server:", programs.output("program")[-800:])
                time.sleep(0.05)
            server = int(found[1])
            if end is not None:
                check(alive(server), "the server is not there")
                p.send_signal(end)
            check(p.wait(30) in wanted, "the program ended with", p.returncode)
            deadline = time.monotonic() + 15
            while alive(server):
                check(time.monotonic() < deadline, "the server outlives its program")
                time.sleep(0.05)


_ending("return", None, (0,))
_ending("error", None, (1,))
_ending("sigkill", signal.SIGKILL, (-9,))
_ending("sigterm", signal.SIGTERM, (-15,))
_ending("ctrl-c", signal.SIGINT, (1, 130, -2))


OPEN = """
import sys
import threading
import tensorflow.compat.v1 as tf
import kolo_tf
tf.disable_v2_behavior()
kolo_tf._TIED = kolo_tf._TIED and sys.argv[2] == "tied"
session = tf.Session(tf.train.Server.create_local_server().target) if sys.argv[1] == "server" else tf.InteractiveSession()
take = tf.FIFOQueue(1, [tf.float32], [[]]).dequeue()
if sys.argv[1] == "blocked":
    threading.Thread(target=lambda: session.run(take), daemon=True).start()
print("got", session.run(tf.constant(1)), flush=True)
"""


def _left_open(what, how):
    @case(f"kolo-tf-exit-{what}{'' if how == 'tied' else '-without-pdeathsig'}", seconds=90)
    def run(context):
        """A program ends though it never closed its session."""
        with Programs(context) as programs:
            _, env = prepare(context, "local.py", True)
            with open(context.path("program.py"), "w") as f:
                f.write(OPEN)
            programs.start("program", [context.path("program.py"), what, how], env)
            check("got 1" in programs.wait("program", 60))


for _what in ("server", "local", "blocked"):
    _left_open(_what, "tied")
_left_open("server", "untied")
