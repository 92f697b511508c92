"""Control flow across tasks: loops, branches and recurrent networks whose parts lie on parameter servers and workers."""

import numpy as np
import tensorflow.compat.v1 as tf

from harness import case, check, raises, same


def on(job, task):
    return tf.device(f"/job:{job}/task:{task}")


@case("while-on-one-task")
def while_one(context):
    with on("ps", 0):
        i, total = tf.while_loop(lambda i, s: i < 10, lambda i, s: (i + 1, s + tf.cast(i, tf.float32)), [0, 0.0])
    same(context, [i, total], steps=2, exact=True)


@case("while-over-tasks")
def while_tasks(context):
    """The counter on a worker, one part of the body on a parameter server, another on the other worker."""
    n = tf.placeholder(tf.int32, [])
    with on("ps", 0):
        w = tf.get_variable("w", initializer=tf.constant([[0.5, 0.1], [-0.2, 0.7]]))

    def body(i, x):
        with on("ps", 0):
            x = tf.matmul(x, w)
        with on("worker", 1):
            x = tf.tanh(x) + 0.1
        return i + 1, x

    with on("worker", 0):
        i, x = tf.while_loop(lambda i, x: i < n, body, [0, tf.ones([3, 2])])
    for count in (0, 1, 7):
        same(context, [i, x], {n: count}, before=tf.global_variables_initializer())


@case("while-gradient")
def while_gradient(context):
    with on("ps", 0):
        w = tf.get_variable("w", initializer=tf.constant([[0.5, 0.1], [-0.2, 0.7]]))

    def body(i, x):
        with on("ps", 1):
            x = tf.matmul(x, w)
        with on("worker", 1):
            x = tf.tanh(x)
        return i + 1, x

    with on("worker", 0):
        _, x = tf.while_loop(lambda i, x: i < 5, body, [0, tf.ones([3, 2])])
        loss = tf.reduce_sum(x * x)
        gradient = tf.gradients(loss, w)[0]
    same(context, [loss, gradient], steps=2, before=tf.global_variables_initializer())


@case("nested-while")
def nested(context):
    def inner(j, s):
        with on("ps", 1):
            return j + 1, s + tf.cast(j, tf.float32)

    def outer(i, s):
        with on("ps", 0):
            _, s = tf.while_loop(lambda j, s: j < i, inner, [0, s])
        with on("worker", 1):
            s = s * 1.5
        return i + 1, s

    with on("worker", 0):
        i, s = tf.while_loop(lambda i, s: i < 5, outer, [0, 1.0])
    same(context, [i, s])


@case("while-with-state")
def while_state(context):
    """Each turn adds to a variable of another task."""
    with on("ps", 0):
        v = tf.get_variable("v", initializer=0.0, use_resource=True)

    def body(i):
        with on("ps", 0), tf.control_dependencies([v.assign_add(2.0, read_value=False)]):
            return i + 1

    with on("worker", 1):
        end = tf.while_loop(lambda i: i < 6, body, [0], parallel_iterations=1)
    with context.session() as s:
        s.run(v.initializer)
        check(s.run(end) == 6)
        check(s.run(v.read_value()) == 12.0, s.run(v.read_value()))


@case("while-assigns-what-it-reads")
def assigned_in_a_loop(context):
    """The read of a reference variable is outside of the loop, and shares the variable's memory."""
    with tf.device("/job:ps/task:0/device:CPU:0"):
        v = tf.get_variable("v", initializer=2.0, use_resource=False)

        def body(i):
            with tf.control_dependencies([tf.assign(v, tf.square(v))]):
                return i + 1

        n = tf.while_loop(lambda i: i < 4, body, [0])
    with context.session() as s:
        s.run(v.initializer)
        check(s.run(n) == 4)
        check(s.run(v) == 65536.0, s.run(v))


@case("long-while")
def long_while(context):
    def body(i, x):
        with on("ps", 0):
            x = x + 1.0
        return i + 1, x

    with on("worker", 1):
        i, x = tf.while_loop(lambda i, x: i < 500, body, [0, 0.0])
    with context.session() as s:
        check(s.run([i, x]) == [500, 500.0])


@case("while-error")
def while_error(context):
    """An error in the third turn, on another task, ends the loop everywhere."""

    def body(i, x):
        with on("ps", 1):
            x = tf.check_numerics(x / tf.cast(2 - i, tf.float32), "third turn", name="inside")
        return i + 1, x

    with on("worker", 0):
        _, x = tf.while_loop(lambda i, x: i < 10, body, [0, 1.0])
    with context.session() as s:
        with raises(tf.errors.InvalidArgumentError, "third turn", op="while/inside"):
            s.run(x)
        check(s.run(tf.constant(1)) == 1)


@case("cond")
def cond(context):
    p, x = tf.placeholder(tf.bool, []), tf.placeholder(tf.float32, [2])

    def yes():
        with on("ps", 0):
            return x * 2.0

    def no():
        with on("ps", 1):
            return x - 1.0

    with on("worker", 1):
        y = tf.cond(p, yes, no)
    with on("worker", 0):
        z = y + 1.0
    for value in (True, False):
        same(context, [y, z], {p: value, x: [3.0, 4.0]}, steps=2, exact=True)


@case("cond-with-state")
def cond_state(context):
    """Only the branch that was taken changes its variable."""
    p = tf.placeholder(tf.bool, [])
    with on("ps", 0):
        a = tf.get_variable("a", initializer=0.0, use_resource=True)
    with on("ps", 1):
        b = tf.get_variable("b", initializer=0.0, use_resource=True)
    with on("worker", 1):
        y = tf.cond(p, lambda: a.assign_add(1.0) + 0.0, lambda: b.assign_add(10.0) + 0.0)
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        check(s.run(y, {p: True}) == 1.0)
        check(s.run(y, {p: False}) == 10.0)
        check(s.run(y, {p: True}) == 2.0)
        check(s.run([a.read_value(), b.read_value()]) == [2.0, 10.0])


@case("cond-gradient")
def cond_gradient(context):
    p = tf.placeholder(tf.bool, [])
    with on("ps", 0):
        w = tf.get_variable("w", initializer=3.0)
    with on("worker", 1):
        y = tf.cond(p, lambda: w * w, lambda: w * 5.0)
        g = tf.gradients(y, w)[0]
    for value in (True, False):
        same(context, [y, g], {p: value}, before=tf.global_variables_initializer())


@case("cond-in-while")
def cond_in_while(context):
    def body(i, s):
        def even():
            with on("ps", 0):
                return s + 10.0

        def odd():
            with on("ps", 1):
                return s * 2.0

        return i + 1, tf.cond(tf.equal(i % 2, 0), even, odd)

    with on("worker", 1):
        i, s = tf.while_loop(lambda i, s: i < 6, body, [0, 1.0])
    same(context, [i, s], exact=True)


@case("case")
def many_ways(context):
    x = tf.placeholder(tf.int32, [])

    def at(task, value):
        def branch():
            with on("ps", task):
                return tf.constant(value) + 1
        return branch

    with on("worker", 1):
        y = tf.case([(tf.equal(x, 0), at(0, 10)), (tf.equal(x, 1), at(1, 20))], default=at(0, 30), exclusive=True)
    with context.session() as s:
        check([int(s.run(y, {x: i})) for i in range(3)] == [11, 21, 31])


@case("fetch-of-a-dead-branch")
def dead_fetch(context):
    p = tf.placeholder(tf.bool, [])
    with on("ps", 0):
        x = tf.constant(2.0)
        off, up = tf.raw_ops.Switch(data=x, pred=p)
    with on("ps", 1):
        y = tf.identity(up, name="after_switch")
    with context.session() as s:
        check(s.run(y, {p: True}) == 2.0)
        try:
            s.run(y, {p: False})
            check(False, "a dead tensor was fetched")
        # A local session says InvalidArgument, a cluster Internal.
        except (tf.errors.InternalError, tf.errors.InvalidArgumentError) as e:
            check("after_switch" in str(e), str(e)[:300])


@case("map-and-scan")
def map_scan(context):
    x = tf.placeholder(tf.float32, [6, 2])
    with on("ps", 0):
        m = tf.map_fn(lambda r: r * r + 1.0, x)
    with on("worker", 1):
        here = m + 0.0
        c = tf.scan(lambda a, r: a + r, here)
        f = tf.foldl(lambda a, r: a * 0.5 + r, here)
    same(context, [m, c, f], {x: np.random.default_rng(2).standard_normal((6, 2)).astype(np.float32)})


def _rnn(name, cell):
    @case(f"dynamic-rnn-{name}", seconds=90)
    def run(context):
        rng = np.random.default_rng(3)
        x = tf.placeholder(tf.float32, [4, 6, 3])
        lengths = tf.placeholder(tf.int32, [4])
        target = tf.placeholder(tf.float32, [4, 5])
        with tf.device(tf.train.replica_device_setter(cluster=context.spec, worker_device="/job:worker/task:1")):
            with tf.variable_scope("net", initializer=tf.random_uniform_initializer(-0.3, 0.3, seed=2)):
                outputs, state = tf.nn.dynamic_rnn(cell(5), x, lengths, dtype=tf.float32)
            last = state.h if hasattr(state, "h") else state
            loss = tf.reduce_mean(tf.square(last - target))
            train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
        feeds = {x: rng.standard_normal((4, 6, 3)).astype(np.float32), lengths: [6, 3, 1, 0], target: rng.standard_normal((4, 5)).astype(np.float32)}
        got = same(context, [outputs, loss, train], feeds, steps=4, before=tf.global_variables_initializer())
        check(got[-1][1] < got[0][1], "the loss did not fall")


try:
    from tensorflow.python.keras.layers.legacy_rnn import rnn_cell_impl as _cells
except ImportError:
    _cells = tf.nn.rnn_cell

_rnn("lstm", lambda n: _cells.LSTMCell(n))
_rnn("gru", lambda n: _cells.GRUCell(n))
_rnn("basic", lambda n: _cells.BasicRNNCell(n))


@case("functional-control-flow")
def functional(context):
    """While and If with functions, as TensorFlow 2's control flow writes them."""
    tf.enable_control_flow_v2()
    try:
        with on("worker", 1):
            n = tf.placeholder(tf.int32, [])
            i, x = tf.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 2.0), [0, 1.0])
            y = tf.cond(n > 2, lambda: x + 1.0, lambda: x - 1.0)
    finally:
        tf.disable_control_flow_v2()
    for count in (0, 5):
        same(context, [i, x, y], {n: count})
