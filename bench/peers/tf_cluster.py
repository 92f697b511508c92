"""TensorFlow's client in the cluster benches, against TensorFlow's servers or Kolo's.

usage: tf_cluster.py BENCH [--servers tensorflow|kolo] [--kolo PATH]    starts the servers, measures, ends them
       tf_cluster.py BENCH --cluster 'ps=HOST:PORT;worker=HOST:PORT,HOST:PORT'    against servers that run already
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "conformance" / "cluster"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import measure
import servers

# Parts of the budget that a training bench is cut into.
WINDOWS = 6


def tensorflow():
    """TensorFlow, imported only where it is used: it takes seconds."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    return tf


def plain(tf):
    """A configuration under which what was described is what runs."""
    c = tf.ConfigProto()
    c.graph_options.rewrite_options.disable_meta_optimizer = True
    return c


# --- remote-latency, transfer, ps-large: one client --------------------------------------------------------------------

def remote_latency(o, addresses):
    tf = tensorflow()
    constant = tf.constant(1.0)
    with tf.Session("grpc://" + addresses["worker"][0]) as s:
        deadline = time.perf_counter() + measure.WARMUP
        while time.perf_counter() < deadline:
            s.run(constant)
        times, deadline = [], time.perf_counter() + measure.BUDGET
        while len(times) < 200 or time.perf_counter() < deadline:
            start = time.perf_counter()
            s.run(constant)
            times.append(1e6 * (time.perf_counter() - start))
    # Five stretches, so that there are samples of both percentiles.
    stretch = len(times) // 5
    cuts = [sorted(times[i * stretch : (i + 1) * stretch]) for i in range(5)]
    yield "constant-p50", "us", "lower", [c[len(c) // 2] for c in cuts]
    yield "constant-p99", "us", "lower", [c[len(c) * 99 // 100] for c in cuts]


def raw_loopback(size):
    """Bytes per second of a plain socket between two processes of this machine, the best of three."""
    program = ("import socket, sys\ns = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
               "n = int(sys.argv[2])\nb = bytearray(n)\n"
               "for _ in range(5):\n  m, at = memoryview(b), 0\n  while at < n:\n    at += s.recv_into(m[at:], n - at)\n  s.sendall(b'x')\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = subprocess.Popen(servers.tied([sys.executable, "-c", program, str(listener.getsockname()[1]), str(size)]))
        listener.settimeout(30)
        data, rates = bytes(size), []
        with listener.accept()[0] as s:
            s.settimeout(60)
            for _ in range(5):
                start = time.perf_counter()
                s.sendall(data)
                s.recv(1)
                rates.append(size / (time.perf_counter() - start))
        child.wait()
    return statistics.median(sorted(rates)[-3:])


def transfer(o, addresses):
    """64 MB from a parameter server to a worker, by the way that the servers choose (`as-is`). TensorFlow's have one, which is
    compared with each of Kolo's."""
    tf = tensorflow()
    count = 16_000_000
    with tf.device("/job:ps/task:0"):
        v = tf.get_variable("v", [count], use_resource=True, initializer=tf.ones_initializer())
        value = v.read_value()
    with tf.device("/job:worker/task:0"):
        there = tf.identity(value)
        total = tf.reduce_sum(there[:1000])
    with tf.Session("grpc://" + addresses["worker"][0], config=plain(tf)) as s:
        s.run(tf.global_variables_initializer())
        if s.run(total) != 1000.0:
            sys.exit("tf_cluster: the tensor did not arrive")
        seconds = measure.seconds_per_call(s.make_callable(there.op))
    rates = [4 * count / x for x in seconds]
    for case in ("as-is",) if o.servers == "kolo" else ("as-is", "tcp", "shm"):
        yield case, "GB/s", "higher", [r / 1e9 for r in rates]
    if o.servers != "kolo":
        raw = raw_loopback(4 * count)
        yield "tcp-of-raw", "x", "higher", [r / raw for r in rates]


def ps_large(o, addresses):
    """100 MB of parameters go to the worker, and as many bytes of updates come back."""
    tf = tensorflow()
    updates = []
    for i in range(4):
        with tf.device("/job:ps/task:0"):
            v = tf.get_variable(f"v{i}", [6_250_000], use_resource=True, initializer=tf.ones_initializer())
            value = v.read_value()
        with tf.device("/job:worker/task:0"):
            gradient = value * 1e-6
        with tf.device("/job:ps/task:0"):
            updates.append(v.assign_sub(gradient, read_value=False))
    with tf.device("/job:worker/task:0"):
        step = tf.group(*updates)
    with tf.Session("grpc://" + addresses["worker"][0], config=plain(tf)) as s:
        s.run(tf.global_variables_initializer())
        seconds = measure.seconds_per_call(s.make_callable(step))
    yield "push-pull", "steps/s", "higher", [1 / x for x in seconds]


# --- ps-async, ps-sync: two worker programs ----------------------------------------------------------------------------

def worker(o, addresses):
    """One worker program. Says 'ready', waits for a line with seconds, trains for so long and says its rates; until it is ended."""
    tf = tensorflow()

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sync, chief, workers = o.bench == "ps-sync", o.worker == 0, o.workers
    cluster = tf.train.ClusterSpec(addresses)
    if o.in_process:
        # As TensorFlow's programs do it: the worker's server is a part of the worker.
        server = tf.train.Server(cluster, job_name="worker", task_index=o.worker)
        target = server.target
    else:
        target = "grpc://" + addresses["worker"][o.worker]
    # A name for each run of the bench: servers that run already may have the state of an earlier one.
    with tf.get_default_graph().container(o.container), tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{o.worker}", cluster=cluster)):
        x, y = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.float32, [None, 10])
        w1 = tf.get_variable("w1", [784, 100], initializer=tf.truncated_normal_initializer(stddev=1 / 28, seed=1))
        b1 = tf.get_variable("b1", [100], initializer=tf.zeros_initializer())
        w2 = tf.get_variable("w2", [100, 10], initializer=tf.truncated_normal_initializer(stddev=0.1, seed=2))
        b2 = tf.get_variable("b2", [10], initializer=tf.zeros_initializer())
        logits = tf.matmul(tf.sigmoid(tf.matmul(x, w1) + b1), w2) + b2
        loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=y, logits=logits))
        step = tf.train.get_or_create_global_step()
        optimizer = tf.train.GradientDescentOptimizer(0.01)
        if sync:
            optimizer = tf.train.SyncReplicasOptimizer(optimizer, workers, workers)
        train = optimizer.minimize(loss, global_step=step)
        if sync:
            runner, tokens = optimizer.get_chief_queue_runner(), optimizer.get_init_tokens_op(num_tokens=workers)
        init = tf.global_variables_initializer()
    images, labels = measure.mnist(4000 * o.worker, 4000)

    def say(text):
        out.write(text + "\n")
        out.flush()

    config = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{o.worker}"])
    s = tf.Session(target, config=config)
    say("up")
    sys.stdin.readline()
    if chief:
        s.run(init)
    say("initialised")
    sys.stdin.readline()
    if sync:
        s.run(optimizer.chief_init_op if chief else optimizer.local_step_init_op)
        if chief:
            s.run(tokens)
            runner.create_threads(s, tf.train.Coordinator(), daemon=True, start=True)
    call = s.make_callable(train, [x, y])
    say("ready")
    for line in sys.stdin:
        seconds = float(line)
        warm, window = min(measure.WARMUP, seconds), seconds / WINDOWS
        begin = time.monotonic() + warm
        end, counts, at = begin + seconds, [0] * WINDOWS, 0
        while True:
            call(images[at : at + 100], labels[at : at + 100])
            at = (at + 100) % 4000
            now = time.monotonic()
            if now >= end:
                break
            if begin <= now < end:
                counts[min(WINDOWS - 1, int((now - begin) / window))] += 1
        say(json.dumps([c / window for c in counts]))
        # The others of a synchronous job wait for this one's gradients, until they too have had their last window.
        while sync:
            call(images[:100], labels[:100])


class Workers:
    """The worker programs of a training bench."""

    def __init__(self, o, spec, count, container):
        self.all = []
        for i in range(count):
            command = [sys.executable, __file__, o.bench, "--cluster", spec, "--worker", str(i), "--workers", str(count), "--container", container]
            if o.servers == "tensorflow" and not o.cluster:
                command.append("--in-process")
            self.all.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                             env=servers.environment(KOLO_BENCH_WARMUP=str(measure.WARMUP)), preexec_fn=servers.die_with_parent))
        try:
            self.answers(["up"])
            self.ask("")
            self.answers(["initialised"])
            self.ask("")
            self.answers(["ready"])
        except BaseException:
            self.stop()
            raise

    def ask(self, line):
        for p in self.all:
            p.stdin.write(line + "\n")
            p.stdin.flush()

    def answers(self, wanted=None, seconds=180.0):
        """A line of each. A silent one is ended, and with it the bench."""
        watch = threading.Timer(seconds, lambda: [p.kill() for p in self.all])
        watch.daemon = True
        watch.start()
        try:
            lines = [p.stdout.readline().strip() for p in self.all]
        finally:
            watch.cancel()
        if not all(lines) or (wanted and lines != wanted * len(self.all)):
            sys.exit(f"tf_cluster: the workers said {lines}")
        return lines

    def rates(self, seconds):
        """Steps per second of all workers together, for each window."""
        self.ask(str(seconds))
        return [sum(r) for r in zip(*(json.loads(line) for line in self.answers(seconds=seconds + 120)))]

    def stop(self):
        for p in self.all:
            p.kill()
            p.wait()


def training(o, addresses, spec):
    rates = {}
    for count in (1, 2) if o.bench == "ps-async" else (2,):
        workers = Workers(o, spec, count, f"bench{os.getpid()}-{count}")
        try:
            rates[count] = workers.rates(measure.BUDGET)
        finally:
            workers.stop()
    yield "train", "steps/s", "higher", rates[2]
    if 1 in rates:
        one = statistics.median(rates[1])
        yield "of-one-worker", "x", "higher", [r / one for r in rates[2]]


# --- server ------------------------------------------------------------------------------------------------------------

def status_of(pid):
    """(megabytes of memory, threads) of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) / 1000, int(fields["Threads"])


def server(o):
    """A parameter server alone: from the start of its process to ready, and what it holds when idle."""
    ready, memory, threads = [], [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            kinds = {("ps", 0): o.servers, ("worker", 0): None}
            with servers.start({"ps": 1, "worker": 1}, kinds, folder, sys.executable, o.kolo) as cluster:
                one = cluster.servers["ps", 0]
                ready.append(1e3 * one.ready_after)
                time.sleep(0.5)
                m, t = status_of(one.process.pid)
                memory.append(m)
                threads.append(t)
    if o.servers == "kolo":
        size = os.path.getsize(o.kolo)
    else:
        import importlib.util

        package = Path(importlib.util.find_spec("tensorflow").origin).parent
        size = sum(p.stat().st_size for p in package.glob("libtensorflow*.so*"))
    yield "ready", "ms", "lower", ready
    yield "rss", "MB", "lower", memory
    yield "threads", "threads", "lower", threads
    yield "binary", "MB", "lower", [size / 1e6]


ONE_CLIENT = {"remote-latency": remote_latency, "transfer": transfer, "ps-large": ps_large}
JOBS = {"remote-latency": {"worker": 1}, "transfer": {"ps": 1, "worker": 1}, "ps-large": {"ps": 1, "worker": 1},
        "ps-async": {"ps": 1, "worker": 2}, "ps-sync": {"ps": 1, "worker": 2}}


def parse(spec):
    return {job: hosts.split(",") for job, _, hosts in (part.partition("=") for part in spec.split(";"))}


def cases(o):
    if o.bench == "server":
        yield from server(o)
        return
    if o.cluster:
        yield from measured(o, o.cluster)
        return
    jobs = JOBS[o.bench]
    if o.bench in ("ps-async", "ps-sync"):
        # One after the other, each with new servers: with TensorFlow the workers' are in the worker programs.
        own = o.servers == "tensorflow"
        kinds = {(j, t): None if own and j == "worker" else o.servers for j, n in jobs.items() for t in range(n)}
    else:
        kinds = {(j, t): o.servers for j, n in jobs.items() for t in range(n)}
    with tempfile.TemporaryDirectory() as folder:
        with servers.start(jobs, kinds, folder, sys.executable, o.kolo) as cluster:
            yield from measured(o, cluster.spec)


def measured(o, spec):
    if o.bench in ONE_CLIENT:
        yield from ONE_CLIENT[o.bench](o, parse(spec))
    else:
        yield from training(o, parse(spec), spec)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=[*JOBS, "server"])
    parser.add_argument("--servers", choices=["tensorflow", "kolo"], default="tensorflow")
    parser.add_argument("--kolo", default=servers.kolo_binary())
    parser.add_argument("--cluster")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--container", default="", help=argparse.SUPPRESS)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.worker is not None:
        return worker(o, parse(o.cluster))
    if o.servers == "kolo" and not o.cluster and not (o.kolo and os.access(o.kolo, os.X_OK)):
        sys.exit("tf_cluster: there is no kolo binary; name it with --kolo")
    from importlib.metadata import version

    try:
        versions = {"tensorflow": version("tensorflow-cpu"), "servers": o.servers}
    except ImportError:
        versions = {"servers": o.servers}
    for case, unit, better, samples in cases(o):
        measure.report(o.bench, case, unit, better, samples, versions)


if __name__ == "__main__":
    main()
