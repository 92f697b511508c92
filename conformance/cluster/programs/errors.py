"""What goes wrong: the exception's type, its text, the op it names, deadlines and cancellation."""

import threading
import time

import numpy as np
import tensorflow.compat.v1 as tf

from harness import case, check, close, raises

E = tf.errors


def on(job, task):
    return tf.device(f"/job:{job}/task:{task}")


def _everywhere(name):
    """The case once for an op of the master's own task, and once for one of another."""

    def register(function):
        for where, (job, task) in {"here": ("worker", 0), "there": ("ps", 1)}.items():
            case(f"{name}-{where}")(lambda context, job=job, task=task: function(context, f"/job:{job}/task:{task}"))
        return function

    return register


@_everywhere("op-error")
def op_error(context, device):
    x = tf.placeholder(tf.float32, None, name="x")
    with tf.device(device):
        bad = tf.check_numerics(x, "what a pity", name="layer/bad")
    after = bad + 1.0
    with context.session() as s:
        with raises(E.InvalidArgumentError, "what a pity", op="layer/bad") as r:
            s.run(after, {x: np.nan})
        check(r.error.op is bad.op, "not the op of this graph")
        check(r.error.error_code == E.INVALID_ARGUMENT, r.error.error_code)
        close(s.run(after, {x: 1.0}), np.float32(2.0), "the run after the error")


@_everywhere("matmul-shapes")
def matmul_shapes(context, device):
    a, b = tf.placeholder(tf.float32, [None, None]), tf.placeholder(tf.float32, [None, None])
    with tf.device(device):
        c = tf.matmul(a, b, name="product")
    with context.session() as s:
        with raises(E.InvalidArgumentError, "[2,3]", "[2,2]", op="product"):
            s.run(c, {a: np.ones((2, 3)), b: np.ones((2, 2))})


@_everywhere("uninitialised-ref")
def uninitialised_ref(context, device):
    with tf.device(device):
        v = tf.get_variable("v", [2], use_resource=False)
        y = v + 1.0
    with context.session() as s:
        with raises(E.FailedPreconditionError, "uninitialized value v"):
            s.run(y)
        s.run(v.initializer)
        s.run(y)


@_everywhere("uninitialised-resource")
def uninitialised_resource(context, device):
    with tf.device(device):
        v = tf.get_variable("v", [2], use_resource=True)
        y = v.read_value()
    with context.session() as s:
        with raises(E.FailedPreconditionError, "v"):
            s.run(y)
        s.run(v.initializer)
        s.run(y)


@_everywhere("assert")
def assertion(context, device):
    x = tf.placeholder(tf.float32, [], name="x")
    with tf.device(device):
        ok = tf.Assert(x > 0.0, ["x must be positive:", x], name="must_hold")
        with tf.control_dependencies([ok]):
            y = tf.sqrt(x)
    with context.session() as s:
        with raises(E.InvalidArgumentError, "x must be positive", "-4"):
            s.run(y, {x: -4.0})


@_everywhere("not-found")
def not_found(context, device):
    with tf.device(device):
        text = tf.read_file(context.path("no-such-file"), name="reader")
    with context.session() as s:
        with raises(E.NotFoundError, "no-such-file", op="reader"):
            s.run(text)


@_everywhere("end-of-queue")
def end_of_queue(context, device):
    with tf.device(device):
        q = tf.FIFOQueue(10, [tf.float32], [[]], name="numbers")
        put, take, close_it = q.enqueue([1.0]), q.dequeue(name="take"), q.close()
    with context.session() as s:
        s.run(put)
        s.run(close_it)
        check(s.run(take) == 1.0)
        with raises(E.OutOfRangeError, "closed", op="take"):
            s.run(take)
        with raises(E.CancelledError, "closed"):
            s.run(put)


@_everywhere("count-up-to")
def count_up_to(context, device):
    with tf.device(device):
        v = tf.get_variable("v", initializer=0, use_resource=False)
        up = v.count_up_to(2)
    with context.session() as s:
        s.run(v.initializer)
        check([int(s.run(up)), int(s.run(up))] == [0, 1])
        with raises(E.OutOfRangeError, "2"):
            s.run(up)


@_everywhere("gather-out-of-range")
def gather(context, device):
    i = tf.placeholder(tf.int32, [None])
    with tf.device(device):
        y = tf.gather(tf.constant([1.0, 2.0, 3.0]), i, name="rows")
    with context.session() as s:
        with raises(E.InvalidArgumentError, "7", op="rows"):
            s.run(y, {i: [0, 7]})


@_everywhere("missing-checkpoint")
def missing_checkpoint(context, device):
    with tf.device(device):
        v = tf.get_variable("v", initializer=1.0)
    saver = tf.train.Saver()
    saver_path = context.path("nothing")
    with context.session() as s:
        s.run(v.initializer)
        saver.save(s, saver_path)
        with tf.Graph().as_default():
            with tf.device(device):
                tf.get_variable("other", initializer=1.0)
            wrong = tf.train.Saver()
            with context.session() as t:
                with raises(E.NotFoundError, "other"):
                    wrong.restore(t, saver_path)


@case("placeholder-not-fed")
def not_fed(context):
    with on("ps", 0):
        x = tf.placeholder(tf.float32, [], name="inputs")
        y = x + 1.0
    with context.session() as s:
        with raises(E.InvalidArgumentError, "You must feed a value for placeholder tensor 'inputs'", op="inputs"):
            s.run(y)


@case("placeholder-shape")
def placeholder_shape(context):
    """Fed through a tensor name that hides the shape from Python; the server looks."""
    with on("ps", 0):
        a = tf.placeholder(tf.float32, None)
        b = tf.reshape(a, [2, 2], name="two_by_two")
    with context.session() as s:
        with raises(E.InvalidArgumentError, "reshape", op="two_by_two"):
            s.run(b, {a: np.ones(3)})


@case("two-tasks-fail")
def two_fail(context):
    """The first error is told, not that others were cancelled because of it."""
    x = tf.placeholder(tf.float32, None)
    with on("ps", 0):
        q = tf.FIFOQueue(1, [tf.float32], [[]])
        waits = q.dequeue()
        bad = tf.check_numerics(x, "the cause", name="cause")
    with on("ps", 1):
        y = waits + bad
    with on("worker", 1):
        z = tf.stack([y, bad])
    with context.session() as s:
        with raises(E.InvalidArgumentError, "the cause", op="cause"):
            s.run(z, {x: np.inf})


@case("fetch-unknown")
def fetch_unknown(context):
    a = tf.constant(1.0, name="a")
    with context.session() as s:
        check(s.run(a) == 1.0)
        with raises(ValueError, "nobody"):
            s.run("nobody:0")
        with raises(TypeError):
            s.run(3)
        with raises(ValueError, "graph"):
            with tf.Graph().as_default():
                other = tf.constant(1.0)
            s.run(other)


@case("no-kernel")
def no_kernel(context):
    """A dtype that an op takes but has no kernel for on a CPU."""
    x = tf.placeholder(tf.uint64, [2, 2])
    with on("ps", 0):
        y = tf.raw_ops.MatMul(a=x, b=x, name="product")
    with context.session() as s:
        try:
            s.run(y, {x: np.ones((2, 2), np.uint64)})
        except (E.InvalidArgumentError, E.UnimplementedError, E.NotFoundError) as e:
            check("product" in str(e), str(e)[:300])


@case("op-that-a-server-lacks")
def unknown_op(context):
    """A part that needs an op which the servers may not have stops no run of another part."""
    x = tf.placeholder(tf.float32, [])
    odd = tf.raw_ops.SobolSample(dim=2, num_results=3, skip=1)
    after = tf.reduce_sum(odd) * x
    with context.session() as s:
        check(s.run(x + 1.0, {x: 2.0}) == 3.0)
        # What stands in for its output makes it needless.
        check(s.run(after, {x: 2.0, odd: np.ones((3, 2), np.float32)}) == 12.0)
        later = x * 5.0
        check(s.run(later, {x: 2.0}) == 10.0)


@case("run-timeout")
def run_timeout(context):
    with on("ps", 0):
        q = tf.FIFOQueue(3, [tf.float32], [[]])
        take, put = q.dequeue(name="take"), q.enqueue([5.0])
    with on("worker", 1):
        y = take + 1.0
    with context.session() as s:
        begin = time.monotonic()
        with raises(E.DeadlineExceededError):
            s.run(y, options=tf.RunOptions(timeout_in_ms=500))
        took = time.monotonic() - begin
        check(0.3 < took < 20, "it took", took)
        check(s.run(tf.constant(2) + 2) == 4, "the session after a timeout")
        # What timed out has left the queue: the next element is not lost to it.
        time.sleep(0.5)
        s.run(put)
        check(s.run(y, options=tf.RunOptions(timeout_in_ms=20000)) == 6.0)


@case("session-timeout")
def session_timeout(context):
    with on("ps", 1):
        q = tf.FIFOQueue(3, [tf.float32], [[]])
        take = q.dequeue()
    with tf.Session(context.master, config=tf.ConfigProto(operation_timeout_in_ms=700)) as s:
        check(s.run(tf.constant(1)) == 1)
        with raises(E.DeadlineExceededError):
            s.run(take)


@case("nobody-listens")
def nobody(context):
    """No server at all: the deadline holds for making the session too."""
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = "grpc://127.0.0.1:%d" % held.getsockname()[1]
        begin = time.monotonic()
        try:
            with tf.Session(address, config=tf.ConfigProto(operation_timeout_in_ms=1500)) as s:
                s.run(tf.constant(1))
            check(False, "a session without a server")
        except (E.DeadlineExceededError, E.UnavailableError):
            pass
        check(time.monotonic() - begin < 30)


def blocked_run(s, fetch):
    """A thread with a run that blocks, and what it raises."""
    raised = []

    def work():
        try:
            s.run(fetch)
            raised.append(None)
        except Exception as e:
            raised.append(e)

    t = threading.Thread(target=work)
    t.start()
    return t, raised


@case("close-with-a-blocked-run")
def close_blocked(context):
    with on("ps", 0):
        q = tf.FIFOQueue(1, [tf.float32], [[]])
        take = q.dequeue()
        size = q.size()
    with on("worker", 1):
        y = take * 2.0
    s = context.session()
    s.run(size)
    threads = [blocked_run(s, y) for _ in range(5)]
    time.sleep(1.0)
    begin = time.monotonic()
    s.close()
    for t, raised in threads:
        t.join(20)
        check(not t.is_alive(), "a run outlives its session")
        check(type(raised[0]) is E.CancelledError, "raised", repr(raised[0])[:300])
    check(time.monotonic() - begin < 20)


@case("queue-closed-under-a-blocked-run")
def queue_closed(context):
    with on("ps", 1):
        q = tf.FIFOQueue(1, [tf.float32], [[]])
        take = q.dequeue(name="take")
        shut = q.close()
    with context.session() as s:
        t, raised = blocked_run(s, take)
        time.sleep(0.5)
        s.run(shut)
        t.join(20)
        check(raised and type(raised[0]) is E.OutOfRangeError, raised)
    with on("ps", 1):
        q2 = tf.FIFOQueue(1, [tf.float32], [[]])
        put2, shut2 = q2.enqueue([1.0]), q2.close(cancel_pending_enqueues=True)
    with context.session() as s:
        s.run(put2)
        t, raised = blocked_run(s, put2)
        time.sleep(0.5)
        s.run(shut2)
        t.join(20)
        check(raised and type(raised[0]) is E.CancelledError, raised)


@case("thousand-errors")
def thousand(context):
    x = tf.placeholder(tf.float32, None)
    with on("ps", 0):
        bad = tf.check_numerics(x, "no", name="bad")
    with on("worker", 1):
        y = bad + 1.0
    with context.session() as s:
        for i in range(300):
            try:
                s.run(y, {x: np.nan})
                check(False, "no error")
            except E.InvalidArgumentError:
                pass
        check(s.run(y, {x: 1.0}) == 2.0)


@case("graph-after-error")
def graph_after_error(context):
    """A graph that cannot be placed is refused; the session with a good graph goes on, and a new session too."""
    with on("ps", 0):
        good = tf.constant(1.0) + 1.0
    with context.session() as s:
        check(s.run(good) == 2.0)
        with tf.device("/job:ps/task:9"):
            tf.constant(1.0, name="nowhere")
        with raises(E.InvalidArgumentError, "nowhere"):
            s.run(good)
