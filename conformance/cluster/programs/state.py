"""State on the servers: variables that sessions share, isolated sessions, queues, accumulators, tables, and two clients."""

import threading

import numpy as np
import tensorflow.compat.v1 as tf

from harness import case, check, equal, raises, same


def on(job, task):
    return tf.device(f"/job:{job}/task:{task}")


def _both_kinds(name, **options):
    def register(function):
        for resource in (False, True):
            case(f"{name}-{'resource' if resource else 'ref'}", **options)(lambda context, resource=resource: function(context, resource))
        return function

    return register


@_both_kinds("outlives-its-session")
def outlives(context, resource):
    with on("ps", 0):
        v = tf.get_variable("v", initializer=1.0, use_resource=resource)
        up = v.assign_add(2.0)
    with context.session() as s:
        s.run(v.initializer)
        s.run(up)
    with context.session(context.target("worker", 1)) as s:
        check(s.run(v) == 3.0, "a variable of a session that is closed")
        s.run(up)
    with tf.Graph().as_default() as g, g.container(v.op.get_attr("container").decode()), on("ps", 0):
        # Another program with a variable of that name.
        mine = tf.get_variable("v", initializer=0.0, use_resource=resource)
        with context.session() as s:
            check(s.run(mine) == 5.0, "the variable by its name from another graph")


@_both_kinds("isolated-session")
def isolated(context, resource):
    with on("ps", 0):
        v = tf.get_variable("v", initializer=1.0, use_resource=resource)
        w = tf.get_variable("w", initializer=1.0, use_resource=resource)
    with context.session() as shared, context.session(isolate_session_state=True) as alone, \
            context.session(isolate_session_state=True) as other:
        shared.run(v.initializer)
        alone.run(v.assign(7.0).op)
        with raises(tf.errors.FailedPreconditionError):
            other.run(v.read_value())
        check(alone.run(v) == 7.0 and shared.run(v) == 1.0, "isolated state is shared")
        alone.run(w.initializer)
        check(not shared.run(tf.is_variable_initialized(w)), "an isolated variable is seen outside")


@_both_kinds("updates")
def updates(context, resource):
    with on("ps", 0):
        v = tf.get_variable("v", initializer=np.arange(12, dtype=np.float32).reshape(4, 3), use_resource=resource)
    with on("worker", 1):
        delta = tf.constant([[1.0, 2.0, 3.0]])
    ops = [
        v.assign_add(tf.tile(delta, [4, 1])), v.assign_sub(tf.ones([4, 3])), tf.scatter_update(v, [1, 3], tf.zeros([2, 3])),
        tf.scatter_add(v, [0, 0, 2], tf.ones([3, 3])), tf.scatter_sub(v, [2], delta), tf.scatter_nd_update(v, [[1, 1]], [9.0]),
        tf.scatter_mul(v, [3, 0], tf.fill([2, 3], 2.0)), v[1:3, 0].assign([5.0, 6.0]),
    ]
    with context.session() as s:
        s.run(v.initializer)
        for op in ops:
            s.run(op)
        got = s.run(v)
    wanted = np.arange(12, dtype=np.float32).reshape(4, 3) + np.array([1, 2, 3], np.float32) - 1
    wanted[[1, 3]] = 0
    wanted[0] += 2
    wanted[2] += 1
    wanted[2] -= [1, 2, 3]
    wanted[1, 1] = 9
    wanted[3] *= 2
    wanted[0] *= 2
    wanted[1:3, 0] = [5, 6]
    equal(got, wanted)


@_both_kinds("report-uninitialised")
def report(context, resource):
    with tf.device(tf.train.replica_device_setter(cluster=context.spec)):
        variables = [tf.get_variable(f"v{i}", initializer=float(i), use_resource=resource) for i in range(5)]
    missing = tf.report_uninitialized_variables()
    with context.session() as s:
        check(sorted(s.run(missing)) == [b"v0", b"v1", b"v2", b"v3", b"v4"])
        s.run([variables[1].initializer, variables[4].initializer])
        check(sorted(s.run(missing)) == [b"v0", b"v2", b"v3"])
        s.run(tf.variables_initializer(variables))
        check(len(s.run(missing)) == 0)


@case("initialised-from-another")
def initialised_value(context):
    with on("ps", 1):
        a = tf.Variable(tf.random_normal([3], seed=4), use_resource=False, name="a")
        b = tf.Variable(a.initialized_value() * 2.0, use_resource=False, name="b")
    same(context, [a, b], before=tf.global_variables_initializer(), exact=True)


def _read_after_update(label, job, task, resource):
    @case(f"read-after-update-{label}")
    def run(context):
        """A read that waits for an update, on the variable's task or another, sees it."""
        with on("ps", 0):
            v = tf.get_variable("v", initializer=[0.0, 0.0], use_resource=resource)
            up = v.assign_add([1.0, 2.0]).op
        with on(job, task), tf.control_dependencies([up]):
            y = tf.identity(v.read_value())
        with context.session() as s:
            s.run(v.initializer)
            for i in range(1, 6):
                equal(s.run(y), np.array([i, 2 * i], np.float32), f"after {i} updates")


for _resource in (False, True):
    for _where, (_job, _task) in {"here": ("ps", 0), "on-the-master": ("worker", 0), "there": ("worker", 1)}.items():
        _read_after_update(f"{'resource' if _resource else 'ref'}-{_where}", _job, _task, _resource)


@case("ref-read-is-live")
def ref_alias(context):
    """The value that was read from a ref variable is its memory: what uses it after an update on the same device sees the
    update. SyncReplicasOptimizer makes its tokens this way from the global step."""
    fetches = []
    with on("ps", 0):
        for dtype in (tf.int64, tf.int32, tf.float32):
            v = tf.get_variable(f"step_{dtype.name}", [], dtype, tf.zeros_initializer(), use_resource=False)
            with tf.control_dependencies([v.assign_add(tf.cast(1, dtype)).op]):
                fetches.append(tf.fill([3], v))
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        for i in range(1, 6):
            for got in s.run(fetches):
                check(got.tolist() == [i, i, i], "after", i, "updates it is", got.tolist())


@case("local-variables")
def local(context):
    with on("worker", 1):
        v = tf.get_variable("v", initializer=3, collections=[tf.GraphKeys.LOCAL_VARIABLES], trainable=False)
    with context.session() as s:
        s.run(tf.local_variables_initializer())
        check(s.run(v) == 3)


@case("fifo-queue")
def fifo(context):
    with on("ps", 0):
        q = tf.FIFOQueue(50, [tf.float32, tf.string], [[2], []], shared_name="pairs")
        size = q.size()
    x, n = tf.placeholder(tf.float32, [None, 2]), tf.placeholder(tf.string, [None])
    put, take, some = q.enqueue_many([x, n]), q.dequeue(), q.dequeue_many(3)
    with context.session() as s:
        s.run(put, {x: np.arange(12, dtype=np.float32).reshape(6, 2), n: [b"a", b"b", b"c", b"d", b"", b"\xff"]})
        check(s.run(size) == 6)
        got = s.run(take)
        equal(got[0], np.array([0, 1], np.float32))
        check(got[1] == b"a")
        got = s.run(some)
        equal(got[0], np.array([[2, 3], [4, 5], [6, 7]], np.float32))
        check(list(got[1]) == [b"b", b"c", b"d"])
        check(s.run(size) == 2)


@case("other-queues")
def other_queues(context):
    with on("ps", 1):
        shuffled = tf.RandomShuffleQueue(20, 0, [tf.int32], [[]], seed=3)
        padding = tf.PaddingFIFOQueue(20, [tf.int32], [[None]])
        ranked = tf.PriorityQueue(20, [tf.string], [[]])
        fill = shuffled.enqueue_many([tf.range(10)])
        drain = shuffled.dequeue_many(10)
        pad_a, pad_b, both = padding.enqueue([[1]]), padding.enqueue([[2, 3, 4]]), padding.dequeue_many(2)
        rank = ranked.enqueue_many([tf.constant([3, 1, 2], tf.int64), ["three", "one", "two"]])
        first = ranked.dequeue()
    with context.session() as s:
        s.run(fill)
        got = s.run(drain)
        check(sorted(got) == list(range(10)), got)
        s.run(pad_a)
        s.run(pad_b)
        equal(s.run(both), np.array([[1, 0, 0], [2, 3, 4]], np.int32))
        s.run(rank)
        check([s.run(first)[1] for _ in range(3)] == [b"one", b"two", b"three"])


@case("priority-queue-waits")
def priority_queue_waits(context):
    """A batch that waits for its elements is sorted when they have come."""
    with on("ps", 1):
        q = tf.PriorityQueue(20, [tf.float32], [[]])
    key = tf.placeholder(tf.int64, [])
    put, take, size = q.enqueue((key, tf.cast(key, tf.float32))), q.dequeue_many(3), q.size()
    got = []
    with context.session() as s:
        waiting = threading.Thread(target=lambda: got.append(s.run(take)))
        waiting.start()
        for i, k in enumerate([5, 1]):
            s.run(put, {key: k})
            check(s.run(size) == i + 1, "elements were taken before there were enough")
        s.run(put, {key: 3})
        waiting.join(20)
        check(got, "the batch did not come")
        equal(got[0][0], np.array([1, 3, 5], np.int64))
        equal(got[0][1], np.array([1, 3, 5], np.float32))


@case("queue-from-list")
def queue_from_list(context):
    with on("worker", 0):
        queues = [tf.FIFOQueue(5, tf.float32, []) for _ in range(2)]
        i = tf.placeholder(tf.int32, [])
        chosen = tf.QueueBase.from_list(i, queues)
        put, take, sizes = chosen.enqueue(4.0), chosen.dequeue(), [q.size() for q in queues]
    with context.session() as s:
        s.run(put, {i: 1})
        check(s.run(sizes) == [0, 1])
        check(s.run(take, {i: 1}) == 4.0)


@case("queue-runners")
def queue_runners(context):
    """Python threads keep a queue of the server full; a reader takes all of it and then the end."""
    with on("ps", 0):
        numbers = tf.train.range_input_producer(20, num_epochs=1, shuffle=False, capacity=4)
        n = numbers.dequeue()
    with on("worker", 1):
        squares = tf.train.batch([n * n], 4, num_threads=2, capacity=8)
    got = []
    with context.session() as s:
        s.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(s, coordinator)
        try:
            while True:
                got += list(s.run(squares))
        except tf.errors.OutOfRangeError:
            pass
        coordinator.request_stop()
        coordinator.join(threads, stop_grace_period_secs=20)
    check(sorted(got) == [i * i for i in range(20)], got)


@case("queue-runners-stop")
def queue_runners_stop(context):
    """The program stops while runners are blocked on a full queue."""
    with on("ps", 1):
        q = tf.FIFOQueue(3, [tf.float32], [[]])
        tf.train.add_queue_runner(tf.train.QueueRunner(q, [q.enqueue([1.0])] * 4))
        take = q.dequeue()
    with context.session() as s:
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(s, coordinator)
        check([s.run(take) for _ in range(10)] == [1.0] * 10)
        coordinator.request_stop()
        coordinator.join(threads, stop_grace_period_secs=20)


@case("files-and-readers")
def files(context):
    """Lines of files through a reader on a task."""
    for i in range(3):
        with open(context.path(f"part{i}.csv"), "w") as f:
            f.write("".join(f"{i * 10 + k},{k / 2}\n" for k in range(4)))
    with on("worker", 1):
        names = tf.train.string_input_producer([context.path(f"part{i}.csv") for i in range(3)], num_epochs=1, shuffle=False)
        _, line = tf.TextLineReader().read(names)
        a, b = tf.decode_csv(line, [[0], [0.0]])
    got = []
    with context.session() as s:
        s.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(s, coordinator)
        try:
            while True:
                got.append(tuple(s.run([a, b])))
        except tf.errors.OutOfRangeError:
            pass
        coordinator.request_stop()
        coordinator.join(threads, stop_grace_period_secs=20)
    check(got == [(i * 10 + k, k / 2) for i in range(3) for k in range(4)], got)


@case("accumulators")
def accumulators(context):
    with on("ps", 0):
        dense = tf.ConditionalAccumulator(tf.float32, [2], shared_name="dense")
        sparse = tf.SparseConditionalAccumulator(tf.float32, [4, 2], shared_name="sparse")
    g = tf.placeholder(tf.float32, [2])
    step = tf.placeholder(tf.int64, [])
    give, mean = dense.apply_grad(g, step), dense.take_grad(2)
    give_sparse = sparse.apply_indexed_slices_grad(tf.IndexedSlices(tf.stack([g, g]), tf.constant([1, 3], tf.int64)), step)
    mean_sparse = sparse.take_indexed_slices_grad(2)
    count = dense.num_accumulated()
    with context.session() as s:
        s.run(dense.set_global_step(5))
        s.run(give, {g: [100.0, 100.0], step: 4})
        check(s.run(count) == 0, "a stale gradient was taken")
        s.run(give, {g: [1.0, 2.0], step: 5})
        s.run(give, {g: [3.0, 4.0], step: 6})
        check(s.run(count) == 2)
        equal(s.run(mean), np.array([2, 3], np.float32))
        s.run(give_sparse, {g: [1.0, 2.0], step: 0})
        s.run(give_sparse, {g: [3.0, 6.0], step: 0})
        got = s.run(mean_sparse)
        equal(got.indices, np.array([1, 3], np.int64))
        equal(got.values, np.array([[2, 4], [2, 4]], np.float32))


@case("take-waits-for-all")
def take_waits(context):
    with on("ps", 0):
        acc = tf.ConditionalAccumulator(tf.float32, [], shared_name="acc")
    give, take, count = acc.apply_grad(4.0), acc.take_grad(3), acc.num_accumulated()
    got = []
    with context.session() as s:
        t = threading.Thread(target=lambda: got.append(s.run(take)))
        t.start()
        for i in range(3):
            check(not got, "taken after", i)
            s.run(give)
        t.join(20)
        check(got == [4.0], got)


@case("tables")
def tables(context):
    with on("ps", 0):
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b", "c"], tf.constant([1, 2, 3], tf.int64)), -1)
        found = table.lookup(tf.constant(["c", "x", "a"]))
        size = table.size()
    with on("worker", 1):
        twice = found * 2
    with context.session() as s:
        s.run(tf.tables_initializer())
        equal(s.run(twice), np.array([6, -2, 2], np.int64))
        check(s.run(size) == 3)


@case("tensor-array")
def tensor_array(context):
    with on("ps", 0):
        a = tf.TensorArray(tf.float32, 5, clear_after_read=False)
        for i in range(5):
            a = a.write(i, [float(i), float(i * i)])
        stacked = a.stack()
        third = a.read(3)
    with on("worker", 1):
        total = tf.reduce_sum(stacked, 0) + third
    same(context, [stacked, total], exact=True)


@case("stateful-random-is-per-session")
def random_state(context):
    """A seeded op starts anew in each session and goes on from run to run in it."""
    with on("ps", 0):
        r = tf.random_uniform([4], seed=11)
    with context.session() as s:
        a = [s.run(r) for _ in range(3)]
    with context.session() as s:
        b = [s.run(r) for _ in range(3)]
    for x, y in zip(a, b):
        equal(x, y)
    check(not np.array_equal(a[0], a[1]), "the same numbers twice in a session")


@case("queue-of-two-clients", ranks=2)
def two_clients(context):
    """One program puts, another takes; each has its own graph and master."""
    with on("ps", 0):
        q = tf.FIFOQueue(5, [tf.int32, tf.string], [[], []], shared_name="mail")
    if context.rank == 0:
        x = tf.placeholder(tf.int32, [])
        put = q.enqueue([x, tf.as_string(x)])
        with context.session() as s:
            for i in range(40):
                s.run(put, {x: i})
            s.run(q.close())
            context.meet("end")
    else:
        take = q.dequeue()
        got = []
        with context.session() as s:
            try:
                while True:
                    got.append(s.run(take))
            except tf.errors.OutOfRangeError:
                pass
        check([int(i) for i, _ in got] == list(range(40)) and all(int(t) == i for i, t in got), got[:5])
        context.meet("end")


@case("variable-of-two-clients", ranks=2)
def two_clients_variable(context):
    with on("ps", 1):
        v = tf.get_variable("v", initializer=np.zeros(3, np.float32), use_resource=True)
        up = v.assign_add([1.0, 2.0, 3.0], read_value=False)
    with context.session() as s:
        if context.rank == 0:
            s.run(v.initializer)
        context.meet("initialised")
        for _ in range(50):
            s.run(up)
        context.meet("added")
        equal(s.run(v.read_value()), np.array([100, 200, 300], np.float32))
        context.meet("end")


@case("barrier-by-queues", ranks=2)
def barrier(context):
    """Programs that tell each other of their end through queues, as ps processes learn it."""
    queues = []
    for i in range(2):
        with on("ps", i):
            queues.append(tf.FIFOQueue(2, [tf.int32], [[]], shared_name=f"done_{i}"))
    done = [q.enqueue([1]) for q in queues]
    with context.session() as s:
        s.run(done)
        if context.rank == 0:
            for q in queues:
                take = q.dequeue()
                for _ in range(2):
                    check(s.run(take) == 1)
        context.meet("end")
