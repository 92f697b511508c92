"""`tf.distribute` in graph mode: strategies whose replicas are devices of one task, or the workers of the cluster.

Batches are fed: the strategies' own input (`tf.data`) needs ops that Kolo does not have, see docs/from-tf-distribute.md.
"""

import time

import numpy as np
import tensorflow.compat.v1 as tf

from harness import case, check, close

XS = np.linspace(-1, 1, 64).astype(np.float32)[:, None]
YS = 3 * XS + 1
STEPS, RATE = 60, 0.3


def program(strategy, rows):
    """A line through points, described in the scope of a strategy: its loss and update, the variables, and the placeholders of `rows` rows."""
    with strategy.scope():
        x, y = (tf.placeholder(tf.float32, [rows, 1]) for _ in range(2))
        step = tf.train.get_or_create_global_step()
        w = tf.get_variable("w", [1, 1], initializer=tf.zeros_initializer())
        b = tf.get_variable("b", [1], initializer=tf.zeros_initializer())
        optimizer = tf.train.GradientDescentOptimizer(RATE)

        def replica():
            # The rows of this replica. Gradients are summed over replicas, so the loss is divided by their number.
            n, i = len(strategy.extended.worker_devices), tf.distribute.get_replica_context().replica_id_in_sync_group
            share = [tf.reshape(t, [n, rows // n, 1])[i % n] for t in (x, y)]
            loss = tf.reduce_mean(tf.square(tf.matmul(share[0], w) + b - share[1]))
            return loss, optimizer.minimize(loss / strategy.num_replicas_in_sync, global_step=step)

        # ParameterServerStrategy.run of TensorFlow's v1 returns nothing; this is what it calls.
        losses, updates = strategy.extended.call_for_each_replica(tf.autograph.experimental.do_not_convert(replica))
        loss = tf.add_n(strategy.experimental_local_results(losses)) / len(strategy.experimental_local_results(losses))
        train = strategy.group(updates)
        init = tf.global_variables_initializer()
    first = [strategy.experimental_local_results(v)[0] for v in (w, b, step)]
    return (loss, train, init), first, (x, y)


def alone(steps, xs=XS, ys=YS):
    """What one device computes with the whole batch."""
    w, b = np.float32(0), np.float32(0)
    for _ in range(steps):
        error = w * xs + b - ys
        w, b = w - np.float32(RATE) * np.float32(2) * (error * xs).mean(), b - np.float32(RATE) * np.float32(2) * error.mean()
    return w, b


DEVICES = ["/cpu:0", "/cpu:1"]
LOCAL = {
    "one-device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
    "mirrored": lambda: tf.distribute.MirroredStrategy(DEVICES),
    "central-storage": lambda: tf.distribute.experimental.CentralStorageStrategy(DEVICES, "/cpu:0"),
}


def _local_case(name):
    @case(name, seconds=90)
    def run(context):
        (loss, train, init), variables, (x, y) = program(LOCAL[name](), 64)
        with context.session(context.master) as s:
            s.run(init)
            for _ in range(STEPS):
                value, _ = s.run([loss, train], {x: XS, y: YS})
            w, b, step = s.run(variables)
        check(int(step) == STEPS, "the global step is", step)
        check(value < 1e-6, "the loss is", value)
        wanted = alone(STEPS)
        close(w.ravel()[0], wanted[0], "w")
        close(b.ravel()[0], wanted[1], "b")


for _name in LOCAL:
    _local_case(_name)


def resolver(context, jobs):
    spec = tf.train.ClusterSpec({job: context.addresses[job] for job in jobs})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=context.rank)


@case("parameter-server", seconds=120, ranks=2)
def parameter_server(context):
    """Two workers, each with its half of the points, update variables on the parameter servers when they like."""
    strategy = tf.distribute.experimental.ParameterServerStrategy(resolver(context, ["ps", "worker"]))
    (loss, train, init), (w, b, step), (x, y) = program(strategy, 32)
    check("/job:ps" in w.device, "w is on", w.device)
    config = strategy.update_config_proto(context.config())
    rows = slice(32 * context.rank, 32 * context.rank + 32)
    with tf.Session(context.target("worker", context.rank), config=config) as s:
        if context.rank == 0:
            s.run(init)
        context.meet("initialised")
        for _ in range(STEPS):
            value, _ = s.run([loss, train], {x: XS[rows], y: YS[rows]})
        context.meet("trained")
        w, b, step = s.run([w, b, step])
        context.meet("read")
    check(int(step) == 2 * STEPS, "two workers have made", step, "steps")
    check(value < 1e-3 and abs(w.ravel()[0] - 3) < 0.05 and abs(b.ravel()[0] - 1) < 0.05, "loss", value, "w", w, "b", b)


@case("multi-worker-mirrored", seconds=120, ranks=2)
def multi_worker_mirrored(context):
    """CollectiveAllReduceStrategy of 1.15: each worker has a copy of the variables, and all apply the sum of their gradients."""
    strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy(cluster_resolver=resolver(context, ["worker"]))
    check(strategy.num_replicas_in_sync == 2, "there are", strategy.num_replicas_in_sync, "replicas")
    (loss, train, init), (w, b, step), (x, y) = program(strategy, 32)
    config = strategy.update_config_proto(context.config())
    rows = slice(32 * context.rank, 32 * context.rank + 32)
    with tf.Session(context.target("worker", context.rank), config=config) as s:
        begin = time.monotonic()
        s.run(init)
        for _ in range(STEPS):
            value, _ = s.run([loss, train], {x: XS[rows], y: YS[rows]})
        w, b, step = s.run([w, b, step])
        check(time.monotonic() - begin < 100, "it took too long")
    check(int(step) == STEPS, "the global step is", step)
    wanted = alone(STEPS)
    close(w.ravel()[0], wanted[0], "w")
    close(b.ravel()[0], wanted[1], "b")
    context.meet("end")
