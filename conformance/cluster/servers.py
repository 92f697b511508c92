"""Starts a cluster of server processes on free ports of this machine, Kolo's or TensorFlow's, and ends it again.

Needs no package; the cluster benches use it too.
"""

import collections
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Seconds until a server must say that it is ready. TensorFlow needs four on quiet cores, and much more on busy ones.
READY = 180.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent():
    """In a child, before its program starts: the kernel kills it when the thread that started it ends. Only for parents without
    TensorFlow, whose threads may hold locks at the fork."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def tied(command):
    """A command that ends with the process that starts it, for one that has threads: nothing runs between fork and exec. Ctrl-C
    reaches it, also where a shell has started all of this in the background, which makes children ignore it."""
    if sys.platform != "linux":
        return command
    program = ("import ctypes, os, signal, sys\nctypes.CDLL(None).prctl(%d, %d, 0, 0, 0)\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
               "if os.getppid() == int(sys.argv[1]):\n    os.execvp(sys.argv[2], sys.argv[2:])\n" % (_PR_SET_PDEATHSIG, signal.SIGKILL))
    return [sys.executable, "-I", "-S", "-c", program, str(os.getpid()), *command]


def environment(**more):
    """What children see. gRPC would send even 127.0.0.1 through a proxy that the environment names."""
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and k != "TF_CONFIG"}
    env.update(TF_CPP_MIN_LOG_LEVEL="3", PYTHONUNBUFFERED="1", **more)
    return env


def free_ports(count):
    """Ports that the system just gave out. All are held until the last is known, so that none comes twice."""
    held = []
    try:
        for _ in range(count):
            s = socket.socket()
            s.bind(("127.0.0.1", 0))
            held.append(s)
        return [s.getsockname()[1] for s in held]
    finally:
        for s in held:
            s.close()


def kolo_binary():
    """$KOLO_BIN, or the newer of this repository's builds. None where there is neither."""
    named = os.environ.get("KOLO_BIN")
    if named:
        return named
    target = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
    built = [p for p in (target / "release" / "kolo", target / "debug" / "kolo") if p.exists()]
    return str(max(built, key=lambda p: p.stat().st_mtime)) if built else None


class Server:
    """One task's process."""

    def __init__(self, command, task, log, env=None):
        self.task, self.log, self.command = task, log, command
        self.started = time.monotonic()
        self.ready = threading.Event()
        self.target = self.ready_after = None
        with open(log, "ab") as stderr:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True,
                env=env or environment(), preexec_fn=die_with_parent)
        self.last = collections.deque(maxlen=20)
        self._reader = threading.Thread(target=self._read, name=f"out {task}", daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.last.append(line.rstrip())
            if line.startswith("serving ") and self.target is None:
                self.ready_after = time.monotonic() - self.started
                self.target = line.split()[1]
                self.ready.set()
        self.ready.set()

    def wait_ready(self, deadline):
        """Raises unless the server says that it serves."""
        self.ready.wait(max(0.0, deadline - time.monotonic()))
        if self.target is None:
            code = self.process.poll()
            what = "is not ready in time" if code is None else f"ended with status {code} before it was ready"
            raise RuntimeError(f"{self.task} {what}: {' '.join(self.command)}\n{self.tail()}")

    def tail(self):
        """What it said last."""
        try:
            with open(self.log, errors="replace") as f:
                return "\n".join([*self.last, *f.read()[-2000:].splitlines()[-15:]])
        except OSError:
            return "\n".join(self.last)

    def stop(self, grace=5.0):
        """SIGTERM, and SIGKILL when that does nothing. Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(1.0)
        self.process.stdout.close()
        return self.process.returncode


class Cluster:
    """Server processes of all tasks. A context manager; leaving it ends them all.

    `kinds` gives 'kolo' or 'tensorflow' for each task, or None for a task whose process somebody else starts.
    """

    def __init__(self, jobs, kinds, folder, python=None, kolo=None, cpus=1, plain=False):
        ports = iter(free_ports(sum(jobs.values())))
        self.addresses = {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in jobs.items()}
        self.spec = ";".join(f"{job}={','.join(a)}" for job, a in self.addresses.items())
        self.servers = {}
        try:
            for job, n in jobs.items():
                for task in range(n):
                    kind = kinds[job, task]
                    if kind is None:
                        continue
                    if kind == "kolo":
                        # TensorFlow's clients and tasks send no token. The cases' folders are beside the log's.
                        command = [kolo, "serve", "--insecure-loopback", "--allow-dir", str(ROOT), "--allow-dir", os.path.dirname(folder)]
                    else:
                        command = [python, str(HERE / "tf_server.py")] + (["--plain"] if plain else [])
                    command += ["--cluster", self.spec, "--job", job, "--task", str(task)]
                    if cpus != 1:
                        command += ["--device-count", f"CPU={cpus}"]
                    log = os.path.join(folder, f"{job}-{task}.log")
                    self.servers[job, task] = Server(command, f"/job:{job}/task:{task}", log)
            deadline = time.monotonic() + READY
            for server in self.servers.values():
                server.wait_ready(deadline)
        except BaseException:
            self.stop()
            raise

    def target(self, job, task):
        return f"grpc://{self.addresses[job][task]}"

    def dead(self):
        """The servers that have ended though nobody asked them to."""
        return [s for s in self.servers.values() if s.process.poll() is not None]

    def stop(self):
        """Ends all. The exit statuses by task."""
        for server in self.servers.values():
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
        return {server.task: server.stop() for server in self.servers.values()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def start(*args, attempts=3, **named):
    """A `Cluster`, tried again with other ports if somebody took one between the choice and the start."""
    for left in reversed(range(attempts)):
        try:
            return Cluster(*args, **named)
        except RuntimeError as e:
            if left == 0 or "ended with status" not in str(e):
                raise
            print(f"# trying other ports: {e}", file=sys.stderr)
