"""How a session is called: callables, partial runs, many runs at once, growing graphs, devices, reset."""

import threading

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import config_pb2

from harness import case, check, close, equal, raises


def on(job, task):
    return tf.device(f"/job:{job}/task:{task}")


@case("make-callable")
def make_callable(context):
    x = tf.placeholder(tf.float32, [2])
    with on("ps", 0):
        v = tf.get_variable("v", initializer=[1.0, 1.0])
        up = v.assign_add(x)
        twice = 2.0 * x
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        call = s.make_callable([up, twice], [x])
        for i in range(3):
            got = call(np.array([i, 1], np.float32))
        equal(got[0], np.array([4, 4], np.float32))
        equal(got[1], np.array([4, 2], np.float32))
        check(s.make_callable(up.op, [x])(np.zeros(2, np.float32)) is None)
        close(s.make_callable(v)(), np.array([4, 4], np.float32))


def callable_options(feed=(), fetch=(), target=(), **run):
    options = config_pb2.CallableOptions(run_options=config_pb2.RunOptions(**run))
    options.feed.extend(feed)
    options.fetch.extend(fetch)
    options.target.extend(target)
    return options


@case("callable-from-options")
def from_options(context):
    x, y = tf.placeholder(tf.float32, [], name="x"), tf.placeholder(tf.float32, [], name="y")
    with on("ps", 1):
        v = tf.get_variable("v", initializer=0.0, use_resource=True)
        add = v.assign_add(x, read_value=False)
        minus = tf.subtract(x, y, name="minus")
    with on("worker", 1):
        times = tf.multiply(x, y, name="times")
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        call = s._make_callable_from_options(callable_options(["y:0", "x:0"], ["times:0", "minus:0"], [add.name]))
        for i in range(4):
            # By position: y first.
            got = call(np.float32(2.0), np.float32(5.0 + i))
            check(got == [2.0 * (5 + i), 3.0 + i], got)
        check(s.run(v) == 5 + 6 + 7 + 8, s.run(v))
        only_target = s._make_callable_from_options(callable_options(["x:0"], [], [add.name]))
        only_target(np.float32(100.0))
        check(s.run(v) == 126.0)
        del call, only_target
        check(s.run(v) == 126.0)


@case("callable-joined-tensors")
def joined(context):
    """A tensor connection: what one tensor has is fed to another."""
    x = tf.placeholder(tf.float32, [], name="x")
    with on("ps", 0):
        a = tf.multiply(x, 2.0, name="a")
        b = tf.add(tf.constant(1.0, name="one"), 1.0, name="b")
    options = callable_options(["x:0"], ["b:0"])
    options.tensor_connection.add(from_tensor=a.name, to_tensor="one:0")
    with context.session() as s:
        check(s._make_callable_from_options(options)(np.float32(4.0)) == [9.0])


@case("callable-errors")
def callable_errors(context):
    x = tf.placeholder(tf.float32, None, name="x")
    with on("ps", 0):
        checked = tf.check_numerics(x, "not a number", name="checked")
    with context.session() as s:
        call = s._make_callable_from_options(callable_options(["x:0"], ["checked:0"]))
        with raises(tf.errors.InvalidArgumentError, "not a number"):
            call(np.float32(np.nan))
        check(call(np.float32(1.0)) == [1.0], "a callable that failed once")
        with raises(tf.errors.NotFoundError, "nobody"):
            s._make_callable_from_options(callable_options([], ["nobody:0"]))


@case("partial-run")
def partial(context):
    a, b, c = (tf.placeholder(tf.float32, []) for _ in range(3))
    with on("ps", 0):
        r1 = a + b
    with on("worker", 1):
        r2 = r1 * c
    with context.session() as s:
        for i in range(3):
            h = s.partial_run_setup([r1, r2], [a, b, c])
            check(s.partial_run(h, r1, {a: 1.0, b: 2.0 + i}) == 3.0 + i)
            check(s.partial_run(h, r2, {c: 10.0}) == 30.0 + 10 * i)


@case("partial-run-keeps-state")
def partial_state(context):
    """What ran for the first part does not run again for the second."""
    x, y = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    with on("ps", 0):
        v = tf.get_variable("v", initializer=0.0, use_resource=True)
        first = v.assign_add(x)
    with on("ps", 1):
        second = tf.identity(first) * y
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        h = s.partial_run_setup([first, second], [x, y])
        check(s.partial_run(h, first, {x: 3.0}) == 3.0)
        check(s.partial_run(h, second, {y: 5.0}) == 15.0)
        check(s.run(v.read_value()) == 3.0)


@case("partial-run-errors")
def partial_errors(context):
    a, b = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    with on("ps", 0):
        r1 = a + 1.0
        r2 = r1 + b
    with context.session() as s:
        h = s.partial_run_setup([r1, r2], [a, b])
        check(s.partial_run(h, r1, {a: 1.0}) == 2.0)
        with raises(tf.errors.InvalidArgumentError):
            s.partial_run(h, r1, {a: 1.0})
        h = s.partial_run_setup([r1], [a])
        with raises(tf.errors.InvalidArgumentError):
            s.partial_run(h, r2, {a: 1.0})


@case("partial-run-without-a-feed")
def partial_without_feed(context):
    x = tf.placeholder(tf.float32, [], name="x")
    here = x * 2.0
    with on("ps", 0):
        there = here * 2.0
    with context.session() as s:
        for fetch in here, there:
            h = s.partial_run_setup([fetch], [])
            with raises(tf.errors.InvalidArgumentError, "must feed a value for placeholder", "x"):
                s.partial_run(h, fetch)


@case("two-partial-runs-at-once")
def two_partial(context):
    a, b = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    with on("ps", 0):
        r1 = a * 2.0
        r2 = r1 + b
    with context.session() as s:
        h1, h2 = (s.partial_run_setup([r1, r2], [a, b]) for _ in range(2))
        check(s.partial_run(h1, r1, {a: 1.0}) == 2.0)
        check(s.partial_run(h2, r1, {a: 10.0}) == 20.0)
        check(s.partial_run(h2, r2, {b: 1.0}) == 21.0)
        check(s.partial_run(h1, r2, {b: 1.0}) == 3.0)


@case("list-devices")
def list_devices(context):
    with context.session() as s:
        devices = s.list_devices()
    cpus = {d.name for d in devices if d.device_type == "CPU"}
    wanted = {f"/job:{j}/replica:0/task:{t}/device:CPU:{c}" for j in ("ps", "worker") for t in range(2) for c in range(2)}
    check(wanted <= cpus, "devices are missing:", sorted(wanted - cpus))
    check(len(cpus) == 8, sorted(cpus))
    check(all(d.incarnation != 0 for d in devices), "an incarnation is 0")
    check(all(d.memory_limit_bytes > 0 for d in devices if d.device_type == "CPU"), "a memory limit is 0")


@case("growing-graph")
def growing(context):
    with context.session() as s:
        total = tf.constant(0.0)
        for i in range(20):
            with on(("ps", "worker")[i % 2], i // 2 % 2):
                total = total + float(i)
            check(s.run(total) == sum(range(i + 1)), i)
        v = tf.get_variable("late", initializer=4.0)
        s.run(v.initializer)
        check(s.run(v + total) == 194.0)


@case("concurrent-runs")
def concurrent(context):
    x = tf.placeholder(tf.float32, [])
    with on("ps", 0):
        v = tf.get_variable("v", initializer=0.0, use_resource=True)
        up = v.assign_add(1.0, read_value=False)
        a = x * 2.0
    with on("worker", 1):
        b = a + 1.0
    wrong = []
    with context.session() as s:
        s.run(tf.global_variables_initializer())

        def work(k):
            try:
                for i in range(25):
                    got, _ = s.run([b, up], {x: k * 100.0 + i})
                    if got != 2 * (k * 100 + i) + 1:
                        wrong.append((k, i, got))
            except Exception as e:
                wrong.append(e)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        check(not wrong, wrong[:3])
        check(s.run(v.read_value()) == 200.0, "updates were lost:", s.run(v.read_value()))


@case("hundred-blocked-runs")
def blocked(context):
    """A hundred runs of a session wait at once; others go on meanwhile."""
    with on("ps", 0):
        q = tf.FIFOQueue(1000, [tf.int32], [[]])
        x = tf.placeholder(tf.int32, [None])
        put, take = q.enqueue_many([x]), q.dequeue()
    with on("worker", 1):
        got = take + 0
    results, errors = [], []
    with context.session() as s:

        def work():
            try:
                results.append(int(s.run(got)))
            except Exception as e:
                errors.append(e)

        threads = [threading.Thread(target=work) for _ in range(100)]
        for t in threads:
            t.start()
        check(s.run(tf.constant(3) + 4) == 7)
        s.run(put, {x: np.arange(100, dtype=np.int32)})
        for t in threads:
            t.join(30)
        check(not errors, errors[:1])
        check(sorted(results) == list(range(100)), "got", len(results), "of 100")


@case("sessions-of-two-masters")
def two_masters(context):
    with on("ps", 0):
        v = tf.get_variable("v", initializer=0.0, use_resource=True)
        up = v.assign_add(1.0)
    with context.session(context.target("worker", 0)) as a, context.session(context.target("worker", 1)) as b, \
            context.session(context.target("ps", 0)) as c:
        a.run(v.initializer)
        for s in (a, b, c, b, a):
            s.run(up)
        check(c.run(v.read_value()) == 5.0)


@case("open-and-close")
def open_close(context):
    a = tf.constant(2) * 3
    for _ in range(30):
        with context.session() as s:
            check(s.run(a) == 6)
    sessions = [context.session() for _ in range(20)]
    for s in sessions:
        check(s.run(a) == 6)
    for s in sessions:
        s.close()


@case("closed-session")
def closed(context):
    a = tf.constant(1)
    s = context.session()
    s.run(a)
    s.close()
    with raises(RuntimeError, "closed"):
        s.run(a)


@case("interactive-session")
def interactive(context):
    with on("ps", 0):
        v = tf.get_variable("v", initializer=3.0)
    s = tf.InteractiveSession(context.master)
    try:
        tf.global_variables_initializer().run()
        check((v + 1.0).eval() == 4.0)
    finally:
        s.close()


@case("reset")
def reset(context):
    """Reset closes the sessions of that master and empties the container it is given, and no other."""
    variables = {}
    for name in ("reset-a", "reset-b"):
        with tf.get_default_graph().container(name), on("ps", 0):
            variables[name] = tf.get_variable(name.replace("-", "_"), initializer=1.0)
    s = context.session(context.target("worker", 1))
    s.run(tf.global_variables_initializer())
    tf.Session.reset(context.target("worker", 1), ["reset-a"])
    with raises(tf.errors.AbortedError):
        s.run(variables["reset-b"])
    with context.session() as t:
        check(t.run(tf.is_variable_initialized(variables["reset-b"])), "the other container was emptied too")
        check(not t.run(tf.is_variable_initialized(variables["reset-a"])), "the container was not emptied")
        with raises(tf.errors.FailedPreconditionError, "reset_a"):
            t.run(variables["reset-a"].read_value())


@case("functions", seconds=90)
def functions(context):
    """A call of a tf.function, whose body has ops of its own."""
    import tensorflow as tf2

    @tf2.function
    def square_sum(a, b):
        return tf.reduce_sum(a * a) + b

    with on("ps", 0):
        x = tf.placeholder(tf.float32, [3])
        y = square_sum(x, 1.0)
    with on("worker", 1):
        z = y * 2.0
    with context.session() as s:
        close(s.run(z, {x: np.array([1, 2, 3], np.float32)}), np.float32(30.0))
