"""Optimizers on parameter servers: step for step what a local session gives."""

import numpy as np
import tensorflow.compat.v1 as tf

from harness import LocalSession, case, check, same

OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.2),
    "momentum": lambda: tf.train.MomentumOptimizer(0.05, 0.9),
    "nesterov": lambda: tf.train.MomentumOptimizer(0.05, 0.9, use_nesterov=True),
    "adam": lambda: tf.train.AdamOptimizer(0.01),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "rmsprop": lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.5),
    "rmsprop-centered": lambda: tf.train.RMSPropOptimizer(0.01, centered=True),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.001, l2_regularization_strength=0.001),
    "adadelta": lambda: tf.train.AdadeltaOptimizer(1.0),
}


def dense(context):
    """Two layers; the placeholders, the loss, and a feed for each step."""
    rng = np.random.default_rng(5)
    x, y = tf.placeholder(tf.float32, [None, 8]), tf.placeholder(tf.int32, [None])
    w1 = tf.get_variable("w1", [8, 16], initializer=tf.random_normal_initializer(stddev=0.3, seed=1))
    b1 = tf.get_variable("b1", [16], initializer=tf.zeros_initializer())
    w2 = tf.get_variable("w2", [16, 4], initializer=tf.random_normal_initializer(stddev=0.3, seed=2))
    b2 = tf.get_variable("b2", [4], initializer=tf.zeros_initializer())
    logits = tf.matmul(tf.nn.relu(tf.matmul(x, w1) + b1), w2) + b2
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    data = [(rng.standard_normal((32, 8)).astype(np.float32), rng.integers(0, 4, 32).astype(np.int32)) for _ in range(6)]
    return loss, lambda i: {x: data[i][0], y: data[i][1]}


def embedding(context):
    """Rows of a table, some of them twice in a batch: sparse gradients."""
    rng = np.random.default_rng(6)
    ids, y = tf.placeholder(tf.int64, [None, 3]), tf.placeholder(tf.float32, [None])
    table = tf.get_variable("table", [50, 6], initializer=tf.random_uniform_initializer(-1, 1, seed=3))
    w = tf.get_variable("w", [6, 1], initializer=tf.random_normal_initializer(seed=4))
    mean = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)
    loss = tf.reduce_mean(tf.square(tf.squeeze(tf.matmul(mean, w), 1) - y))
    data = [(rng.integers(0, 20, (16, 3)), rng.standard_normal(16).astype(np.float32)) for _ in range(6)]
    return loss, lambda i: {ids: data[i][0], y: data[i][1]}


def train(context, model, make, resource):
    setter = tf.train.replica_device_setter(cluster=context.spec, worker_device="/job:worker/task:1")
    with tf.device(setter), tf.variable_scope("", use_resource=resource):
        loss, feeds = model(context)
        step = tf.train.get_or_create_global_step()
        update = make().minimize(loss, global_step=step)
        after = [v.read_value() for v in tf.global_variables()]
    got = same(context, [loss, update], feeds, steps=6, before=tf.global_variables_initializer(), after=after, rtol=1e-4, atol=1e-5)
    check(int(got[-1][1][[v.op.name for v in tf.global_variables()].index("global_step")]) == 6, "the global step")


def _optimizer_case(name, make, model, resource):
    @case(f"{name}-{model.__name__}-{'resource' if resource else 'ref'}")
    def run(context):
        train(context, model, make, resource)


for _name, _make in OPTIMIZERS.items():
    for _model in (dense, embedding):
        for _resource in (False, True):
            _optimizer_case(_name, _make, _model, _resource)


@case("partitioned-embedding")
def partitioned(context):
    """A table in three pieces over two parameter servers."""
    rng = np.random.default_rng(8)
    ids, y = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None])
    with tf.device(tf.train.replica_device_setter(cluster=context.spec, worker_device="/job:worker/task:1")):
        table = tf.get_variable("table", [30, 4], initializer=tf.random_uniform_initializer(-1, 1, seed=3), partitioner=tf.fixed_size_partitioner(3))
        rows = tf.nn.embedding_lookup(table, ids, partition_strategy="div")
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(rows, 1) - y))
        update = tf.train.AdagradOptimizer(0.3).minimize(loss)
    data = [(rng.integers(0, 30, 12), rng.standard_normal(12).astype(np.float32)) for _ in range(4)]
    same(context, [loss, update], lambda i: {ids: data[i][0], y: data[i][1]}, steps=4, before=tf.global_variables_initializer())


@case("sparse-lookup")
def sparse_lookup(context):
    """embedding_lookup_sparse with weights, over a sparse feed."""
    sp, weights = tf.sparse_placeholder(tf.int64, [3, 4]), tf.sparse_placeholder(tf.float32, [3, 4])
    with tf.device(tf.train.replica_device_setter(cluster=context.spec, worker_device="/job:worker/task:1")):
        table = tf.get_variable("table", [10, 4], initializer=tf.random_uniform_initializer(-1, 1, seed=3))
        bag = tf.nn.embedding_lookup_sparse(table, sp, weights, combiner="mean")
        gradient = tf.gradients(tf.reduce_sum(bag * bag), table)[0]
        update = tf.train.GradientDescentOptimizer(0.1).apply_gradients([(gradient, table)])
    places = np.array([[0, 0], [0, 2], [1, 1], [2, 3]], np.int64)
    feeds = {sp: tf.SparseTensorValue(places, np.array([1, 7, 7, 2], np.int64), np.array([3, 4], np.int64)),
             weights: tf.SparseTensorValue(places, np.array([1, 0.5, 2, 1], np.float32), np.array([3, 4], np.int64))}
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        a = s.run(bag, feeds)
        s.run(update, feeds)
        check(not np.allclose(a, s.run(bag, feeds)), "the table did not change")


@case("clipping-decay-and-averages")
def extras(context):
    """Clipping by the global norm, a learning rate that decays, and moving averages of the variables."""
    with tf.device(tf.train.replica_device_setter(cluster=context.spec, worker_device="/job:worker/task:1")), \
            tf.variable_scope("", use_resource=True):
        loss, feeds = dense(context)
        step = tf.train.get_or_create_global_step()
        rate = tf.train.exponential_decay(0.5, step, 2, 0.7, staircase=True)
        optimizer = tf.train.GradientDescentOptimizer(rate)
        gradients, variables = zip(*optimizer.compute_gradients(loss))
        clipped, norm = tf.clip_by_global_norm(gradients, 0.2)
        apply = optimizer.apply_gradients(list(zip(clipped, variables)), step)
        averages = tf.train.ExponentialMovingAverage(0.9, step)
        with tf.control_dependencies([apply]):
            update = averages.apply(variables)
        with tf.control_dependencies([update]):
            after = [tf.identity(averages.average(v).read_value()) for v in variables]
    same(context, [loss, norm, rate, update, after], feeds, steps=6, before=tf.global_variables_initializer())


@case("dropout-and-batch-normalisation")
def dropout(context):
    """A network with random dropout: the same masks for the same seeds."""
    rng = np.random.default_rng(9)
    x, y = tf.placeholder(tf.float32, [32, 8]), tf.placeholder(tf.float32, [32, 1])
    with tf.device(tf.train.replica_device_setter(cluster=context.spec, worker_device="/job:worker/task:1")):
        w1 = tf.get_variable("w1", [8, 16], initializer=tf.random_normal_initializer(seed=1))
        beta, gamma = tf.get_variable("beta", [16], initializer=tf.zeros_initializer()), tf.get_variable("gamma", [16], initializer=tf.ones_initializer())
        h = tf.matmul(x, w1)
        mean, variance = tf.nn.moments(h, [0])
        h = tf.nn.dropout(tf.nn.relu(tf.nn.batch_normalization(h, mean, variance, beta, gamma, 1e-3)), rate=0.5, seed=7)
        w2 = tf.get_variable("w2", [16, 1], initializer=tf.random_normal_initializer(seed=2))
        loss = tf.reduce_mean(tf.square(tf.matmul(h, w2) - y))
        update = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    data = [(rng.standard_normal((32, 8)).astype(np.float32), rng.standard_normal((32, 1)).astype(np.float32)) for _ in range(5)]
    same(context, [loss, update], lambda i: {x: data[i][0], y: data[i][1]}, steps=5, before=tf.global_variables_initializer(), rtol=1e-4)


@case("convolution")
def convolution(context):
    """A LeNet-like network, three steps."""
    rng = np.random.default_rng(10)
    x, y = tf.placeholder(tf.float32, [8, 14, 14, 1]), tf.placeholder(tf.int32, [8])
    with tf.device(tf.train.replica_device_setter(cluster=context.spec, worker_device="/job:worker/task:1")):
        h = x
        for i, (a, b) in enumerate(((1, 6), (6, 8))):
            k = tf.get_variable(f"k{i}", [3, 3, a, b], initializer=tf.random_normal_initializer(stddev=0.3, seed=i))
            c = tf.get_variable(f"c{i}", [b], initializer=tf.zeros_initializer())
            h = tf.nn.max_pool(tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(h, k, [1, 1, 1, 1], "SAME"), c)), [1, 2, 2, 1], [1, 2, 2, 1], "SAME")
        w = tf.get_variable("w", [4 * 4 * 8, 10], initializer=tf.random_normal_initializer(stddev=0.1, seed=9))
        logits = tf.matmul(tf.reshape(h, [8, -1]), w)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        update = tf.train.AdamOptimizer(0.01).minimize(loss)
    data = [(rng.random((8, 14, 14, 1), np.float32), rng.integers(0, 10, 8).astype(np.int32)) for _ in range(3)]
    same(context, [loss, update], lambda i: {x: data[i][0], y: data[i][1]}, steps=3, before=tf.global_variables_initializer(), rtol=1e-4)


@case("summaries")
def summaries(context):
    """Merged summaries made on the tasks are TensorFlow's, byte for byte in what they say."""
    x = tf.placeholder(tf.float32, [20])
    with tf.device("/job:worker/task:1"):
        tf.summary.scalar("average", tf.reduce_mean(x))
        tf.summary.histogram("values", x)
        tf.summary.scalar("count", tf.size(x))
        tf.summary.text("note", tf.constant("hello"))
    merged = tf.summary.merge_all()
    value = np.random.default_rng(1).standard_normal(20).astype(np.float32)
    with LocalSession() as local, context.session() as s:
        wanted, got = (tf.Summary.FromString(z.run(merged, {x: value})) for z in (local, s))
    a, b = ({v.tag: v for v in m.value} for m in (got, wanted))
    check(a.keys() == b.keys(), sorted(a))
    check(abs(a["average"].simple_value - b["average"].simple_value) < 1e-6)
    check(list(a["values"].histo.bucket) == list(b["values"].histo.bucket) and a["values"].histo.num == 20, "histograms differ")
    check(a["note"] == b["note"], "texts differ")
