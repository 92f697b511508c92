"""TensorFlow's collectives between devices of several tasks, in one step of one client and in steps of two."""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import collective_ops

from harness import case, check, close, equal

# TensorFlow's groups last as long as its servers: each set of devices has a key of its own.
BOTH_WORKERS, ALL_DEVICES, TWO_PROGRAMS, TRAINING, SENT = 11, 12, 13, 14, 15


def options(key):
    """Steps with collectives must have a key of their graph, by which TensorFlow's masters agree on numbers of steps."""
    return tf.RunOptions(experimental=tf.RunOptions.Experimental(collective_graph_key=key), timeout_in_ms=60_000)


def device(task, number=0):
    return tf.device(f"/job:worker/task:{task}/cpu:{number}")


def run(session, fetches, feeds=None, key=1):
    return session.run(fetches, feeds, options=options(key))


@case("one-client-reduces")
def one_client_reduces(context):
    x = tf.placeholder(tf.float32, [None])
    results = {}
    for i, (merge, final) in enumerate([("Add", "Id"), ("Add", "Div"), ("Max", "Id"), ("Min", "Id"), ("Mul", "Id")]):
        mine = []
        for task in range(2):
            with device(task):
                given = x * (task + 1) + task
                mine.append(collective_ops.all_reduce(given, 2, BOTH_WORKERS, 10 + i, merge, final, subdiv_offsets=(0,)))
        results[merge, final] = mine
    with tf.Session(context.master, config=context.config()) as s:
        for n in (1, 7, 5000):
            value = np.linspace(-2, 2, n, dtype=np.float32)
            got = run(s, results, {x: value}, BOTH_WORKERS)
            a, b = value, value * 2 + 1
            wanted = {("Add", "Id"): a + b, ("Add", "Div"): (a + b) / 2, ("Max", "Id"): np.maximum(a, b),
                      ("Min", "Id"): np.minimum(a, b), ("Mul", "Id"): a * b}
            for how, values in got.items():
                for task in range(2):
                    close(values[task], wanted[how].astype(np.float32), f"{how} of {n} on task {task}")


@case("one-client-gathers-and-sends")
def one_client_gathers(context):
    gathered, copies = [], []
    for task in range(2):
        for number in range(2):
            with device(task, number):
                mine = tf.constant([[task, number], [task * 10, 7]], tf.int32)
                gathered.append(collective_ops.all_gather(mine, 4, ALL_DEVICES, 1))
    with device(1):
        copies.append(collective_ops.broadcast_send(tf.constant([1.5, -2.0]), [2], tf.float32, 2, SENT, 1))
    with device(0):
        copies.append(collective_ops.broadcast_recv([2], tf.float32, 2, SENT, 1))
    with tf.Session(context.master, config=context.config()) as s:
        got = run(s, [gathered, copies], key=ALL_DEVICES)
        rows = np.array([[0, 0], [0, 7], [0, 1], [0, 7], [1, 0], [10, 7], [1, 1], [10, 7]], np.int32)
        for each in got[0]:
            # In the order of devices, or in TensorFlow in that in which tasks joined.
            equal(np.sort(each, axis=0), np.sort(rows, axis=0), "rows")
        for each in got[1]:
            equal(each, np.array([1.5, -2.0], np.float32), "what was sent")


@case("two-clients-meet-in-every-step", ranks=2)
def two_clients(context):
    x = tf.placeholder(tf.float32, [3])
    with device(context.rank):
        total = collective_ops.all_reduce(x, 2, TWO_PROGRAMS, 1, "Add", "Id", subdiv_offsets=(0,))
    # Each has a session of its own task.
    config = context.config(device_filters=[f"/job:worker/task:{context.rank}"])
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    with tf.Session(context.target(task=context.rank), config=config) as s:
        context.meet("begin")
        for step in range(20):
            got = run(s, total, {x: [step, context.rank, 1]}, TWO_PROGRAMS)
            equal(got, np.array([2 * step, 1, 2], np.float32), f"step {step}")
    context.meet("end")


@case("two-clients-train-one-model", ranks=2, seconds=90)
def two_clients_train(context):
    """What CollectiveAllReduceStrategy makes of a program: gradients are reduced, and each task updates its own copy."""
    rng = np.random.RandomState(3)
    data, truth = rng.randn(64, 5).astype(np.float32), np.arange(5, dtype=np.float32)[:, None]
    labels = data @ truth
    with device(context.rank):
        x, y = tf.placeholder(tf.float32, [None, 5]), tf.placeholder(tf.float32, [None, 1])
        w = tf.get_variable(f"w{context.rank}", [5, 1], initializer=tf.zeros_initializer(), use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - y))
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        (grad, _), = optimizer.compute_gradients(loss, [w])
        mean = collective_ops.all_reduce(grad, 2, TRAINING, 1, "Add", "Div", subdiv_offsets=(0,))
        train = optimizer.apply_gradients([(mean, w)])
    config = context.config(device_filters=[f"/job:worker/task:{context.rank}"])
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    with tf.Session(context.target(task=context.rank), config=config) as s:
        s.run(w.initializer)
        context.meet("begin")
        mine = slice(context.rank * 32, context.rank * 32 + 32)
        wanted = np.zeros((5, 1), np.float32)
        for step in range(40):
            run(s, [train], {x: data[mine], y: labels[mine]}, TRAINING)
            wanted = wanted - np.float32(0.1) * (2 / 64 * data.T @ (data @ wanted - labels)).astype(np.float32)
        got = s.run(w)
        close(got, wanted.astype(np.float32), "the weights", rtol=1e-3, atol=1e-4)
        check(np.abs(got - truth).max() < 0.2, "it learned nothing:", got.ravel())
    context.meet("end")
