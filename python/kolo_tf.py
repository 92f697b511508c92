"""Runs TensorFlow 1 programs on Kolo. One line after TensorFlow's import is enough:

    import tensorflow.compat.v1 as tf
    import kolo_tf

`tf.train.Server(...)` then starts a `kolo serve` process with the same cluster, job and task, and `tf.Session()` without a
target runs on a local one. Sessions with a target go where they say. The processes end with this one, however it ends.

The servers serve this user alone, though TensorFlow's clients cannot send a token: on loopback they ask the kernel whose a
connection is (`kolo serve --same-user`), and graphs may reach whatever files this user may. For tasks that other machines can
reach, KOLO_SERVE_FLAGS says who may call them and which directories are open to graphs.

KOLO_BIN names the binary; without it `kolo` is looked for on PATH, then in this repository's target folder. KOLO_SERVE_FLAGS
has more flags for `kolo serve`, such as those for TLS, --allow-dir DIR, or --insecure-loopback in place of --same-user. Works with TensorFlow 1.15 and 2.
"""

import atexit
import functools
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import weakref

from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import session as _session
from tensorflow.python.framework import errors as _errors
from tensorflow.python.training import server_lib as _server_lib

__all__ = ["install", "remove", "binary"]

# Seconds until a server must have said that it serves, and until it must have ended when asked to.
READY, GRACE = 120.0, 5.0
_PR_SET_PDEATHSIG = 1


def binary():
    """The kolo binary, or an error that says where it was looked for."""
    named = os.environ.get("KOLO_BIN")
    if named:
        found = shutil.which(named)
        if found is None:
            raise _errors.NotFoundError(None, None, "kolo_tf: KOLO_BIN is '%s', which cannot be run." % named)
        return found
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    target = os.path.join(root, os.environ.get("CARGO_TARGET_DIR", "target"))
    places = [os.path.join(target, "release", "kolo"), os.path.join(target, "debug", "kolo")]
    found = shutil.which("kolo") or next((p for p in places if os.access(p, os.X_OK)), None)
    if found is None:
        raise _errors.NotFoundError(None, None, "kolo_tf: there is no kolo binary in KOLO_BIN, on PATH or in %s. "
                                    "Build one with 'cargo build --release', or set KOLO_BIN." % target)
    return found


# --- processes --------------------------------------------------------------------------------------------------------

# Linux ends a server when this process ends. It must not be ended earlier: what TensorFlow takes down last, such as a session
# that was never closed, still calls it, and such a call waits for ever for a server that is not there.
_TIED = sys.platform.startswith("linux") and bool(sys.executable)
# Ties itself to its parent and becomes the server. Not done between fork and exec, where other threads' locks may be held.
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(%d, %d, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
""" % (_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Keeper(object):
    """Starts processes from a thread that lives as long as this process, for the kernel ties a child to a thread."""

    def __init__(self):
        self.pid = None

    def start(self, command):
        if self.pid != os.getpid():  # The first use, or the first after a fork, which copies no threads.
            self.pid, self.wishes = os.getpid(), queue.Queue()
            thread = threading.Thread(target=self._work, name="kolo_tf keeper")
            thread.daemon = True
            thread.start()
        answer = queue.Queue()
        self.wishes.put((command, answer))
        process, error = answer.get()
        if error is not None:
            raise _errors.NotFoundError(None, None, "kolo_tf: cannot start %s: %s" % (command[0], error))
        return process

    def _work(self):
        while True:
            command, answer = self.wishes.get()
            try:
                if _TIED:
                    command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())] + command
                # A session of its own: Ctrl-C is this program's affair, which may still want to save.
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, universal_newlines=True, start_new_session=True)
                answer.put((process, None))
            except OSError as e:
                answer.put((None, e))


_KEEPER = _Keeper()
_PROCESSES = []


def _flags(config):
    """What of a ConfigProto is fixed when a server starts, as flags of `kolo serve`."""
    flags = []
    if config.device_count:
        flags += ["--device-count", ",".join("%s=%d" % kv for kv in sorted(config.device_count.items()))]
    for name, threads in (("--inter-op-threads", config.inter_op_parallelism_threads), ("--intra-op-threads", config.intra_op_parallelism_threads)):
        if threads > 0:
            flags += [name, str(threads)]
    return flags


def _session_defaults(config):
    """What of a server's ConfigProto holds for sessions that say nothing of it, as flags of `kolo serve`."""
    timeout = config.operation_timeout_in_ms
    return ["--operation-timeout", str(timeout / 1000.0)] if timeout > 0 else []


def _access(address, more):
    """Flags that say who may call a server and which files graphs may touch, as far as `more` leaves it open."""
    host = address.rpartition(":")[0].strip("[]")
    is_loopback = host == "localhost" or host == "::1" or host.startswith("127.")
    flags = []
    if not any(flag in more for flag in ("--same-user", "--insecure-loopback")):
        # Elsewhere the system does not say whose a connection is.
        flags += ["--same-user"] if sys.platform.startswith("linux") else ["--insecure-loopback"] if is_loopback else []
    if is_loopback and not any(flag.split("=")[0] == "--allow-dir" for flag in more):
        # Whoever may call it is this user, who may touch these files anyway.
        flags += ["--allow-dir", os.sep]
    return flags


class _Process(object):
    """A `kolo serve` process that is ready."""

    def __init__(self, cluster, job, task, address, config, flags=()):
        more = shlex.split(os.environ.get("KOLO_SERVE_FLAGS", ""))
        command = [binary(), "serve", "--cluster", cluster, "--job", job, "--task", str(task)] + _flags(config) + list(flags)
        command += _access(address, more) + more
        self.owner, self.target = os.getpid(), None
        self.ready = threading.Event()
        self.process = _KEEPER.start(command)
        _PROCESSES.append(self)
        reader = threading.Thread(target=self._read, name="kolo_tf %s:%d" % (job, task))
        reader.daemon = True
        reader.start()
        self.ready.wait(READY)
        if self.target is None:
            code = self.process.poll()
            what = "was not ready in %g s" % READY if code is None else "ended with status %d" % code
            self.stop()
            raise _errors.UnknownError(None, None, "Could not start the server: '%s' %s; what it said is above." % (" ".join(command), what))

    def _read(self):
        for line in self.process.stdout:
            if self.target is None and line.startswith("serving "):
                self.target = line.split()[1]
                self.ready.set()
            else:
                sys.stderr.write(line)
        self.process.wait()
        self.ready.set()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()


# Sessions of this program on servers that it started.
_SESSIONS = weakref.WeakSet()


@atexit.register
def _stop_all():
    """Where the kernel does not end the servers: closes what still calls them, then ends them."""
    mine = [p for p in _PROCESSES if p.owner == os.getpid()]  # A forked copy of this program owns none.
    if _TIED or not mine:
        return
    closer = threading.Thread(target=lambda: [s.close() for s in list(_SESSIONS)], name="kolo_tf closer")
    closer.daemon = True
    closer.start()
    closer.join(GRACE)
    for p in mine:
        p.stop()


# --- tf.train.Server --------------------------------------------------------------------------------------------------

def _cluster_text(cluster_def):
    """A ClusterDef as `kolo serve` reads it: ps=host:port,host:port;worker=host:port, or JSON where tasks are left out."""
    # A job without tasks, which a program may well have, is nobody's.
    jobs = [(job.name, dict(job.tasks)) for job in cluster_def.job if job.tasks]
    if any(sorted(tasks) != list(range(len(tasks))) for _, tasks in jobs):
        return json.dumps({name: {str(i): tasks[i] for i in sorted(tasks)} for name, tasks in jobs})
    return ";".join("%s=%s" % (name, ",".join(tasks[i] for i in range(len(tasks)))) for name, tasks in jobs)


def _server_init(self, server_or_cluster_def, job_name=None, task_index=None, protocol=None, config=None, start=True):
    # An index from the command line may come as text.
    if isinstance(task_index, str):
        task_index = int(task_index)
    self._server_def = _server_lib._make_server_def(server_or_cluster_def, job_name, task_index, protocol, config)
    if self._server_def.protocol not in ("", "grpc"):
        raise _errors.NotFoundError(None, None, "No server factory registered for the given ServerDef: kolo_tf knows the protocol "
                                    "'grpc', not '%s'." % self._server_def.protocol)
    self._kolo = None
    if start:
        self.start()


def _server_start(self):
    if self._kolo is None:
        d = self._server_def
        config = d.default_session_config
        self._kolo = _Process(_cluster_text(d.cluster), d.job_name, d.task_index, _address(d), config, _session_defaults(config))
        _DEFAULTS[self._kolo.target] = config


def _address(server_def):
    """The address of a server's own task."""
    return next(dict(job.tasks)[server_def.task_index] for job in server_def.cluster.job if job.name == server_def.job_name)


def _server_join(self):
    if self._kolo is None:
        raise _errors.FailedPreconditionError(None, None, "Server not started; call start() before join().")
    code = None
    while code is None:  # A wait without a timeout misses a Ctrl-C that comes just before the call blocks.
        try:
            code = self._kolo.process.wait(1)
        except subprocess.TimeoutExpired:
            pass
    if code:
        raise _errors.InternalError(None, None, "kolo serve ended with status %d." % code)


def _server_target(self):
    if self._kolo is None:
        address = _address(self._server_def)
        if not address.endswith(":0"):
            return "grpc://" + address
        self.start()
    return self._kolo.target


# --- tf.Session -------------------------------------------------------------------------------------------------------

# Session configurations that servers were started with, by target. A server applies its own to every session.
_DEFAULTS = {}
_LOCAL, _LOCAL_LOCK = {}, threading.Lock()


def _local_target(config):
    """A server for sessions without a target, one for each set of devices and threads."""
    key = (os.getpid(), tuple(_flags(config)))
    with _LOCAL_LOCK:
        known = _LOCAL.get(key)
        if known is None or known.process.poll() is not None:
            _LOCAL[key] = _Process("localhost=127.0.0.1:0", "localhost", 0, "127.0.0.1:0", config)
        return _LOCAL[key].target


def _session_init(original):
    @functools.wraps(original)
    def init(self, target="", graph=None, config=None):
        if not target and (config is None or isinstance(config, config_pb2.ConfigProto)):
            own = config_pb2.ConfigProto()
            if config is not None:
                own.CopyFrom(config)
            target = _local_target(own)
            # A local session's variables are its own.
            own.isolate_session_state = True
            config = own
        elif isinstance(target, (str, bytes)) and (config is None or isinstance(config, config_pb2.ConfigProto)):
            defaults = _DEFAULTS.get(target.decode() if isinstance(target, bytes) else target)
            if defaults is not None:
                own = config_pb2.ConfigProto()
                own.CopyFrom(defaults)
                if config is not None:
                    own.MergeFrom(config)
                config = own
        original(self, target, graph, config)
        if any(p.target == (target.decode() if isinstance(target, bytes) else target) for p in _PROCESSES):
            _SESSIONS.add(self)

    return init


# --- putting it in place ----------------------------------------------------------------------------------------------

_ORIGINAL = {}


def install():
    """Puts Kolo in TensorFlow's place. Importing this module does it."""
    if _ORIGINAL:
        return
    server, base = _server_lib.Server, _session.BaseSession
    # The classes stay and their methods change, so that it does not matter under which name a program knows them.
    new = {"__init__": _server_init, "__del__": lambda self: None, "start": _server_start, "join": _server_join, "target": property(_server_target)}
    for name, value in new.items():
        _ORIGINAL[server, name] = server.__dict__[name]
        setattr(server, name, value)
    _ORIGINAL[base, "__init__"] = base.__init__
    base.__init__ = _session_init(base.__init__)


def remove():
    """Undoes `install`; for tests that compare the two. Servers that were started go on."""
    for (owner, name), value in _ORIGINAL.items():
        setattr(owner, name, value)
    _ORIGINAL.clear()


install()
