"""TensorFlow's side of each bench, through `tf.compat.v1`: graph mode and a Session.

usage: tf.py BENCH [--case CASE]... [--threads N] [--callable] [--check]
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf_all
from tensorflow.python.framework import op_def_library, op_def_registry

import measure

tf = tf_all.compat.v1
tf.logging.set_verbosity(tf.logging.ERROR)
tf.disable_v2_behavior()

VERSIONS = {
    "tensorflow": tf_all.__version__,
    "numpy": np.__version__,
    "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "default"),
}


def config(threads, optimize=True, cpus=1, intra=None):
    """A session's configuration. Without `optimize` nothing is folded, merged or rewritten."""
    c = tf.ConfigProto(
        device_count={"CPU": cpus},
        intra_op_parallelism_threads=threads if intra is None else intra,
        inter_op_parallelism_threads=threads,
    )
    if not optimize:
        c.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
        c.graph_options.rewrite_options.disable_meta_optimizer = True
    return c


def session(graph, conf):
    s = tf.Session(graph=graph, config=conf)
    with graph.as_default():
        s.run(tf.global_variables_initializer())
    graph.finalize()
    return s


def run_latency(o):
    cases = ["constant", "feed-add", "constant-callable", "feed-add-callable"]
    graph = tf.Graph()
    with graph.as_default():
        constant = tf.constant(1.0)
        feed = tf.placeholder(tf.float32, [])
        total = feed + constant
    with session(graph, config(o.threads, optimize=False)) as s:
        one = np.float32(1.0)
        call_constant = s.make_callable(constant)
        call_total = s.make_callable(total, [feed])
        calls = {
            "constant": lambda: s.run(constant),
            "feed-add": lambda: s.run(total, {feed: one}),
            "constant-callable": call_constant,
            "feed-add-callable": lambda: call_total(one),
        }
        for case in measure.only(cases, o.case):
            seconds = measure.seconds_per_call(calls[case])
            yield case, "us", "lower", [1e6 * x for x in seconds]


def dispatch(o):
    nodes = 10_000
    for case in measure.only(["chain", "fan"], o.case):
        graph = tf.Graph()
        with graph.as_default():
            x = tf.Variable(1.0).read_value()
            one = tf.constant(1.0)
            if case == "chain":
                for _ in range(nodes):
                    x = x + one
                target = x.op
            else:
                adds = [(x + one).op for _ in range(nodes)]
                with tf.control_dependencies(adds):
                    target = tf.no_op()
        with session(graph, config(o.threads, optimize=False)) as s:
            if case == "chain" and s.run(x) != nodes + 1:
                raise SystemExit("tf: the chain gave a wrong sum")
            seconds = measure.seconds_per_call(s.make_callable(target))
        yield case, "ns/node", "lower", [1e9 * x / nodes for x in seconds]


def matmul(o):
    wanted = measure.only([c[0] for c in measure.MATMUL], o.case)
    rng = np.random.default_rng(0)
    for case, m, k, n, ta in measure.MATMUL:
        if case not in wanted:
            continue
        times = measure.matmuls_per_call(m, k, n)
        graph = tf.Graph()
        with graph.as_default():
            a = tf.Variable(rng.random((k, m) if ta else (m, k), dtype=np.float32)).read_value()
            b = tf.Variable(rng.random((k, n), dtype=np.float32)).read_value()
            last = []
            for _ in range(times):
                with tf.control_dependencies(last):
                    last = [tf.matmul(a, b, transpose_a=ta).op]
        with session(graph, config(o.threads, optimize=False)) as s:
            seconds = measure.seconds_per_call(s.make_callable(last[0]))
        yield case, "GFLOP/s", "higher", [2e-9 * m * k * n * times / x for x in seconds]


def weights(*shape):
    """A weight and its bias."""
    fan_in = int(np.prod(shape[:-1]))
    w = tf.Variable(tf.truncated_normal(shape, stddev=fan_in**-0.5, seed=1))
    return w, tf.Variable(tf.zeros(shape[-1:]))


def dense(x, units):
    w, b = weights(int(x.shape[1]), units)
    return tf.matmul(x, w) + b


def train(graph, x, y, logits, batch, o, real=False):
    """Steps per second of SGD. The batches lie in memory and are fed in turn: random pixels, or the first images of MNIST."""
    loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=y, logits=logits))
    step = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    rng = np.random.default_rng(0)
    count = 40
    if real:
        images, labels = measure.mnist(0, count * batch)
    else:
        pixels = rng.integers(0, 256, (count * batch, *x.shape[1:].as_list()))
        images = pixels.astype(np.float32) / np.float32(255)
        labels = np.eye(10, dtype=np.float32)[rng.integers(0, 10, count * batch)]
    with session(graph, config(o.threads)) as s:
        call = s.make_callable(step, [x, y]) if o.callable else lambda a, b: s.run(step, {x: a, y: b})
        at = 0

        def one_step():
            nonlocal at
            call(images[at : at + batch], labels[at : at + batch])
            at = (at + batch) % (count * batch)

        return [1 / t for t in measure.seconds_per_call(one_step)]


def mlp(o):
    small, large = (100, [100], tf.sigmoid), (1024, [1024, 1024], tf.nn.relu)
    shapes = {"small": small, "mnist": small, "large": large, "mnist-large": large}
    for case in measure.only(list(shapes), o.case):
        batch, hidden, activation = shapes[case]
        graph = tf.Graph()
        with graph.as_default():
            x = tf.placeholder(tf.float32, [None, 784])
            y = tf.placeholder(tf.float32, [None, 10])
            h = x
            for units in hidden:
                h = activation(dense(h, units))
            rates = train(graph, x, y, dense(h, 10), batch, o, real=case.startswith("mnist"))
        yield case, "steps/s", "higher", rates


def lenet_logits(x):
    h = x
    for filters in (32, 64):
        w, b = weights(5, 5, int(h.shape[3]), filters)
        h = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(h, w, strides=[1, 1, 1, 1], padding="SAME"), b))
        h = tf.nn.max_pool(h, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
    return dense(tf.nn.relu(dense(tf.reshape(h, [-1, 7 * 7 * 64]), 512)), 10)


def lenet(o):
    for case in measure.only(["train"], o.case):
        graph = tf.Graph()
        with graph.as_default():
            x = tf.placeholder(tf.float32, [None, 28, 28, 1])
            y = tf.placeholder(tf.float32, [None, 10])
            rates = train(graph, x, y, lenet_logits(x), 64, o)
        yield case, "steps/s", "higher", rates


def scaling(o):
    size, depth = 512, 20
    for case in measure.only(["towers"], o.case):
        graph = tf.Graph()
        rng = np.random.default_rng(0)
        ends = []
        with graph.as_default():
            for i in range(2):
                with tf.device(f"/cpu:{i}"):
                    # Scaled so that the products neither grow nor vanish.
                    w = tf.Variable((rng.standard_normal((size, size)) / size**0.5).astype(np.float32))
                    w = h = w.read_value()
                    for _ in range(depth):
                        h = tf.matmul(h, w)
                    ends.append(h.op)
            both = tf.group(*ends)
        with session(graph, config(2, optimize=False, cpus=2, intra=1)) as s:
            one, two = s.make_callable(ends[0]), s.make_callable(both)
            # The two are timed in turn, so that drift hits both.
            pairs = []
            deadline = time.perf_counter() + measure.WARMUP
            while time.perf_counter() < deadline:
                one(), two()
            deadline = time.perf_counter() + measure.BUDGET
            while len(pairs) < 5 or time.perf_counter() < deadline:
                t0 = time.perf_counter()
                one()
                t1 = time.perf_counter()
                two()
                t2 = time.perf_counter()
                pairs.append(2 * (t1 - t0) / (t2 - t1))
        yield case, "speedup", "higher", pairs


def checkpoint(o):
    """A gigabyte of variables. TensorFlow's Saver has no background: a save is all pause."""
    samples = 5
    folder = tempfile.mkdtemp(prefix="tf-bench-checkpoint-", dir=os.environ.get("KOLO_BENCH_DIR"))
    try:
        graph = tf.Graph()
        with graph.as_default():
            variables = [tf.get_variable(f"w{i}", [16_000_000], use_resource=True) for i in range(16)]
            saver = tf.train.Saver(max_to_keep=1)
        bytes_in_all = 16 * 16_000_000 * 4
        with session(graph, config(o.threads)) as s:
            saves, of_plain = [], []
            for i in range(samples + 1):
                values = s.run(variables)
                t0 = time.perf_counter()
                with open(os.path.join(folder, "plain"), "wb", buffering=0) as f:
                    for value in values:
                        f.write(value)
                    os.fsync(f.fileno())
                t1 = time.perf_counter()
                del values
                t2 = time.perf_counter()
                saver.save(s, os.path.join(folder, "m"))
                t3 = time.perf_counter()
                for name in os.listdir(folder):
                    os.remove(os.path.join(folder, name))
                if i > 0:
                    saves.append(t3 - t2)
                    of_plain.append((t1 - t0) / (t3 - t2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    cases = {
        "write": ("MB/s", "higher", [bytes_in_all / x / 1e6 for x in saves]),
        "write-of-plain": ("x", "higher", of_plain),
        "pause": ("ms", "lower", [1e3 * x for x in saves]),
        "cost": ("ms", "lower", [1e3 * x for x in saves]),
    }
    for case in measure.only(list(cases), o.case):
        yield case, *cases[case]


# Ops that do so little that moving their bytes is the work, and how many elements a plain copy copies beside them.
MOVERS = ["add", "add-bias", "mul-row", "mul-column", "mul-scalar", "relu", "relu-grad", "exp", "tanh", "sigmoid"]
COPIED = 4096 * 4096
# Runs of an op in one call.
TIMES = {"small": 50, "medium": 20, "large": 3}


def op_input(spec, rng):
    """A value as bench/ops.json writes it."""
    if isinstance(spec, dict):
        ((kind, value),) = spec.items()
        return np.array(value, {"i32": np.int32, "f32": np.float32}[kind])
    kind, dims, tail = re.fullmatch(r"(\w+)\[([\d,]*)\](.*)", spec).groups()
    shape = [int(d) for d in dims.split(",") if d]
    if kind in ("f32", "f16", "bf16"):
        x = rng.random(shape, dtype=np.float32)
        x = x + np.float32(0.1) if tail == "+" else 2 * x - 1
        return x.astype({"f32": np.float32, "f16": np.float16, "bf16": tf.bfloat16.as_numpy_dtype}[kind])
    if kind == "i32":
        return rng.integers(0, int(tail[1:]), shape, dtype=np.int32)
    return rng.integers(0, 256, shape, dtype=np.uint8) if kind == "u8" else rng.random(shape) < 0.5


def default(value):
    """An attribute's default as Python has it."""
    kind = value.WhichOneof("value")
    if kind != "list":
        return getattr(value, kind)
    return next((list(values) for _, values in value.list.ListFields()), [])


def op_node(op, inputs, attrs):
    """One node; a list input takes what the others leave."""
    op_def = op_def_registry.get(op)
    args, named, at = op_def.input_arg, {}, 0
    inferred = {name for arg in args for name in (arg.type_attr, arg.type_list_attr, arg.number_attr)}
    for attr in op_def.attr:
        if attr.HasField("default_value") and attr.name not in inferred:
            named[attr.name] = default(attr.default_value)
    named.update(attrs)
    for arg in args:
        n = len(inputs) - len(args) + 1 if arg.number_attr else 1
        named[arg.name] = inputs[at : at + n] if arg.number_attr else inputs[at]
        at += n
    out = op_def_library.apply_op(op, **named)
    return out[0] if isinstance(out, (list, tuple)) else out


def copy_speed(threads):
    """Bytes per second, read and written, of numpy's copy by all threads together."""
    a, b = np.ones(COPIED, np.float32), np.zeros(COPIED, np.float32)
    parts = list(zip(np.array_split(b, threads), np.array_split(a, threads)))
    with ThreadPoolExecutor(threads) as pool:
        seconds = measure.seconds_per_call(lambda: list(pool.map(lambda part: np.copyto(*part), parts)))
    return [2 * a.nbytes / x for x in seconds]


def ops(o):
    wanted = lambda case: not o.case or any(case.startswith(c) for c in o.case)
    copy = None
    for family in json.loads((Path(__file__).resolve().parents[1] / "ops.json").read_text()):
        attrs = {k: v["type"] if isinstance(v, dict) else v for k, v in family["attrs"].items()}
        for size, times in TIMES.items():
            case, share_case = f"{family['case']}/{size}", f"of-memcpy/{family['case']}"
            share = size == "large" and family["case"] in MOVERS and wanted(share_case)
            if not wanted(case) and not share:
                continue
            rng = np.random.default_rng(0)
            values = []
            for spec in family[size]:
                if isinstance(spec, str) and spec.startswith("$"):
                    with tf.Graph().as_default(), tf.Session() as s:
                        values.append(s.run(op_node(spec[1:], [tf.constant(v) for v in values], attrs)))
                else:
                    values.append(op_input(spec, rng))
            graph, feeds = tf.Graph(), {}
            with graph.as_default():
                inputs = []
                for value, spec in zip(values, family[size]):
                    if isinstance(spec, dict):
                        inputs.append(tf.constant(value))
                        continue
                    feed = tf.placeholder(value.dtype, value.shape)
                    feeds[feed] = value
                    inputs.append(tf.Variable(feed, use_resource=True).read_value())
                first = op_node(family["op"], inputs, attrs)
                last = [first.op]
                for _ in range(times - 1):
                    with tf.control_dependencies(last):
                        last = [op_node(family["op"], inputs, attrs).op]
                init = tf.global_variables_initializer()
            with tf.Session(graph=graph, config=config(o.threads, optimize=False)) as s:
                s.run(init, feeds)
                moved = sum(v.nbytes for v in values) + s.run(first).nbytes
                seconds = [x / times for x in measure.seconds_per_call(s.make_callable(last[0]))]
            if wanted(case):
                yield case, "us", "lower", [1e6 * x for x in seconds]
            if share:
                if copy is None:
                    rates = copy_speed(o.threads)
                    copy = sorted(rates)[len(rates) // 2]
                    yield "memcpy/large", "GB/s", "higher", [r / 1e9 for r in rates]
                yield share_case, "x", "higher", [moved / x / copy for x in seconds]


def mnist_batches(size, shape):
    """Shuffled batches of the real MNIST for ever, as the tutorials' next_batch gives them: floats from 0 to 1."""
    images, labels = measure.mnist_bytes()
    images, labels = images.reshape(-1, *shape), labels.astype(np.int32)
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(images))
        for start in range(0, len(images) - size + 1, size):
            rows = order[start : start + size]
            yield images[rows].astype(np.float32) * np.float32(1 / 255), labels[rows]


def mnist_steps(graph, x, logits, y, data, o):
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    step = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    with session(graph, config(o.threads)) as s:

        def one_step():
            images, labels = next(data)
            s.run([step, loss], {x: images, y: labels})

        return [1 / t for t in measure.seconds_per_call(one_step)]


def train_mnist(o):
    graph = tf.Graph()
    with graph.as_default():
        x, y = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.int32, [None])
        logits = dense(tf.sigmoid(dense(x, 100)), 10)
        yield "train", "steps/s", "higher", mnist_steps(graph, x, logits, y, mnist_batches(100, (784,)), o)


def train_lenet(o):
    graph = tf.Graph()
    with graph.as_default():
        x, y = tf.placeholder(tf.float32, [None, 28, 28, 1]), tf.placeholder(tf.int32, [None])
        yield "train", "steps/s", "higher", mnist_steps(graph, x, lenet_logits(x), y, mnist_batches(64, (28, 28, 1)), o)


def first_step(o):
    graph = tf.Graph()
    with graph.as_default():
        x, y = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.int32, [None])
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=dense(tf.sigmoid(dense(x, 100)), 10)))
        step = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    images, labels = next(mnist_batches(100, (784,)))
    with session(graph, config(o.threads)) as s:
        s.run([step, loss], {x: images, y: labels})


def startup(o):
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, __file__, "--first-step"], check=True)
        samples.append(1e3 * (time.perf_counter() - start))
    yield "first-step", "ms", "lower", samples


BENCHES = {
    "train-mnist": train_mnist,
    "train-lenet": train_lenet,
    "startup": startup,
    "run-latency": run_latency,
    "dispatch": dispatch,
    "matmul": matmul,
    "mlp": mlp,
    "lenet": lenet,
    "scaling": scaling,
    "checkpoint": checkpoint,
    "ops": ops,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", nargs="?", choices=list(BENCHES))
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--callable", action="store_true", help="mlp, lenet: call through make_callable")
    parser.add_argument("--check", action="store_true", help="run one session and stop")
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.first_step:
        return first_step(o)
    if o.check:
        with tf.Session() as s:
            assert s.run(tf.constant(1.0) + 1.0) == 2.0
        print(f"TensorFlow {VERSIONS['tensorflow']} works.")
        return
    if not o.bench:
        parser.error("which bench?")
    for case, unit, better, samples in BENCHES[o.bench](o):
        measure.report(o.bench, case, unit, better, samples, VERSIONS)


if __name__ == "__main__":
    main()
