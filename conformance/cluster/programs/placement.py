"""Where things run: named tasks, device functions, soft placement, control dependencies, towers, several parameter servers."""

import numpy as np
import tensorflow.compat.v1 as tf

from harness import case, check, equal, raises, same


def holds(context, variable, job, task):
    """Whether a task holds a variable's value. Asks that task alone."""
    with tf.Graph().as_default() as g, g.container(variable.op.get_attr("container").decode()):
        # Each device of a task has state of its own.
        with tf.device(f"/job:{job}/task:{task}/device:CPU:{variable.device[-1] if 'CPU:' in variable.device else 0}"):
            mine = tf.get_variable(variable.op.name, variable.shape, variable.dtype.base_dtype, use_resource=variable.op.type != "VariableV2")
            known = tf.is_variable_initialized(mine)
        with context.session(context.target(job, task), device_filters=[f"/job:{job}/task:{task}"]) as s:
            return bool(s.run(known))


def check_holder(context, variable, job, task):
    for j, t in (("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)):
        check(holds(context, variable, j, t) == ((j, t) == (job, task)), variable.name, "should lie on", f"{job}:{task}", "; asked", f"{j}:{t}")


def _holder_case(resource):
    @case(f"variables-lie-where-told-{'resource' if resource else 'ref'}")
    def run(context):
        variables = []
        for job, task in (("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)):
            with tf.device(f"/job:{job}/task:{task}"):
                variables.append(tf.get_variable(f"v_{job}_{task}", [2], use_resource=resource))
        with context.session() as s:
            s.run(tf.global_variables_initializer())
        for v, (job, task) in zip(variables, (("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1))):
            check_holder(context, v, job, task)


for _resource in (False, True):
    _holder_case(_resource)


@case("named-tasks")
def named_tasks(context):
    x = tf.placeholder(tf.float32, [3])
    y = x
    for device in ("/job:ps/task:0", "/job:worker/task:1/cpu:0", "/job:ps/task:1/device:CPU:1", "/job:worker/task:0/device:CPU:0",
                   "/job:ps/replica:0/task:0/device:CPU:1"):
        with tf.device(device):
            y = y * 2.0 + 1.0
    same(context, y, {x: np.array([1, 2, 3], np.float32)}, steps=2, exact=True)


@case("nested-devices")
def nested(context):
    with tf.device("/job:ps"):
        with tf.device("/task:1"):
            with tf.device("/cpu:1"):
                v = tf.get_variable("v", initializer=3.0)
        check(v.device == "/job:ps/task:1/device:CPU:1", v.device)
        with tf.device(None):
            w = v * 2.0
        check(w.device == "", w.device)
        u = v + w
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        check(s.run(u) == 9.0)
    check_holder(context, v, "ps", 1)


@case("device-function")
def device_function(context):
    turn = iter(range(100))

    def where(op):
        if op.type in ("VariableV2", "VarHandleOp"):
            return "/job:ps/task:%d" % (next(turn) % 2)
        return "/job:worker/task:1"

    with tf.device(where):
        variables = [tf.get_variable(f"v{i}", initializer=float(i)) for i in range(4)]
        total = tf.add_n([v.read_value() for v in variables])
    check(total.device == "/job:worker/task:1", total.device)
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        check(s.run(total) == 6.0)
    for i, v in enumerate(variables):
        check_holder(context, v, "ps", i % 2)


@case("replica-device-setter")
def setter(context):
    with tf.device(tf.train.replica_device_setter(cluster=context.spec, worker_device="/job:worker/task:1")):
        variables = [tf.get_variable(f"v{i}", [3], initializer=tf.ones_initializer()) for i in range(4)]
        total = tf.add_n(variables)
    check([v.device for v in variables] == [f"/job:ps/task:{i % 2}" for i in range(4)], [v.device for v in variables])
    check(total.device == "/job:worker/task:1", total.device)
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        equal(s.run(total), np.full(3, 4, np.float32))
    check_holder(context, variables[3], "ps", 1)


@case("replica-device-setter-by-size")
def setter_by_size(context):
    load = [0, 0]

    def smallest(op):
        task = load.index(min(load))
        load[task] += 4 * int(np.prod([d.size for d in op.get_attr("shape").dim]))
        return task

    with tf.device(tf.train.replica_device_setter(cluster=context.spec, ps_strategy=smallest)):
        big = tf.get_variable("big", [1000, 10])
        small = [tf.get_variable(f"small{i}", [10]) for i in range(3)]
    with context.session() as s:
        s.run(tf.global_variables_initializer())
    check_holder(context, big, "ps", 0)
    for v in small:
        check_holder(context, v, "ps", 1)


@case("unpinned-on-the-master")
def unpinned(context):
    """What has no device runs on the task that the client talks to, whichever that is."""
    for job, task in (("ps", 1), ("worker", 0), ("worker", 1)):
        v = tf.get_variable(f"v_{job}_{task}", initializer=1.0)
        with context.session(context.target(job, task)) as s:
            s.run(v.initializer)
        check_holder(context, v, job, task)


@case("partitioned-variable")
def partitioned(context):
    with tf.device(tf.train.replica_device_setter(cluster=context.spec)):
        table = tf.get_variable("table", [10, 4], partitioner=tf.fixed_size_partitioner(3), initializer=tf.random_uniform_initializer(seed=5))
        rows = tf.nn.embedding_lookup(table, [0, 3, 4, 9, 9], partition_strategy="div")
        whole = tf.convert_to_tensor(table)
    same(context, [rows, whole], before=tf.global_variables_initializer(), exact=True)


@case("soft-placement")
def soft(context):
    with tf.device("/job:worker/task:1/device:GPU:0"):
        a = tf.constant([1.0, 2.0]) * 3.0
    with tf.device("/job:ps/task:0/device:GPU:3"):
        v = tf.get_variable("v", initializer=tf.constant([1, 2]))
    with context.session(allow_soft_placement=True) as s:
        s.run(tf.global_variables_initializer())
        equal(s.run(a), np.array([3, 6], np.float32))
        equal(s.run(v), np.array([1, 2], np.int32))
    check_holder(context, v, "ps", 0)


@case("no-soft-placement")
def hard(context):
    with tf.device("/job:worker/task:1/device:GPU:0"):
        a = tf.multiply(tf.constant([1.0, 2.0]), 3.0, name="wants_gpu")
    with context.session() as s:
        with raises(tf.errors.InvalidArgumentError, "GPU:0"):
            s.run(a)


@case("no-such-task")
def no_such_task(context):
    for device in ("/job:ps/task:7", "/job:evaluator/task:0", "/job:worker/task:0/device:CPU:9"):
        with tf.device(device):
            a = tf.identity(1.0, name="lost")
        with context.session() as s:
            with raises(tf.errors.InvalidArgumentError, "lost", "assign a device"):
                s.run(a)


@case("colocation")
def colocation(context):
    with tf.device("/job:ps/task:1"):
        v = tf.get_variable("v", initializer=2.0, use_resource=False)
    with tf.device("/job:worker/task:0"), tf.colocate_with(v, ignore_existing=True):
        w = tf.get_variable("w", initializer=5.0, use_resource=False)
        z = v + w
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        check(s.run(z) == 7.0)
    check_holder(context, w, "ps", 1)


@case("control-dependencies")
def control(context):
    """An order across tasks: each update of a chain happens before the next, and before the read."""
    with tf.device("/job:ps/task:0"):
        v = tf.get_variable("v", initializer=1.0, use_resource=True)
    with tf.device("/job:ps/task:1"):
        w = tf.get_variable("w", initializer=0.0, use_resource=True)
    last = []
    for i in range(10):
        with tf.control_dependencies(last), tf.device("/job:worker/task:%d" % (i % 2)):
            two = tf.constant(2.0)
            with tf.device(v.device):
                doubled = v.assign(v.read_value() * two)
        with tf.control_dependencies([doubled]), tf.device("/job:worker/task:%d" % (1 - i % 2)):
            last = [w.assign_add(v.read_value())]
    with tf.control_dependencies(last):
        end = [v.read_value(), w.read_value()]
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        check(s.run(end) == [1024.0, 2046.0], "an order that was not kept")


@case("control-into-another-task")
def control_only(context):
    """A task that gets nothing but a signal."""
    with tf.device("/job:ps/task:0"):
        v = tf.get_variable("v", initializer=1.0)
        up = v.assign_add(1.0)
    with tf.device("/job:worker/task:1"), tf.control_dependencies([up]):
        done = tf.no_op()
        word = tf.constant("done")
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        check(s.run(done) is None)
        check(s.run(word) in (b"done",))
        check(s.run(v) == 3.0)


@case("towers")
def towers(context):
    """Data parallel by hand: a tower on each worker, averaged gradients, the variables on the parameter servers."""
    rng = np.random.default_rng(0)
    x, y = tf.placeholder(tf.float32, [8, 5]), tf.placeholder(tf.float32, [8, 2])
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    with tf.variable_scope("", use_resource=False):
        gradients = []
        for i, (a, b) in enumerate(zip(tf.split(x, 2), tf.split(y, 2))):
            with tf.device(tf.train.replica_device_setter(cluster=context.spec, worker_device=f"/job:worker/task:{i}")):
                with tf.variable_scope("model", reuse=i > 0), tf.name_scope(f"tower_{i}"):
                    w = tf.get_variable("w", [5, 2], initializer=tf.random_normal_initializer(seed=1))
                    c = tf.get_variable("c", [2], initializer=tf.zeros_initializer())
                    loss = tf.reduce_mean(tf.square(tf.matmul(a, w) + c - b))
                gradients.append(optimizer.compute_gradients(loss, tf.trainable_variables()))
        with tf.device("/job:ps/task:0"):
            averaged = [(tf.reduce_mean(tf.stack([g for g, _ in pair]), 0), pair[0][1]) for pair in zip(*gradients)]
            train = optimizer.apply_gradients(averaged)
    values = [(rng.standard_normal((8, 5)).astype(np.float32), rng.standard_normal((8, 2)).astype(np.float32)) for _ in range(5)]
    after = [v.read_value() for v in tf.trainable_variables()]
    same(context, [train, averaged[0][0]], lambda i: {x: values[i][0], y: values[i][1]}, steps=5, before=tf.global_variables_initializer(), after=after)


@case("model-parallel")
def model_parallel(context):
    """Layers in a row on four tasks, the gradient all the way back."""
    x = tf.placeholder(tf.float32, [16, 10])
    h = x
    for i, (job, task) in enumerate((("ps", 0), ("worker", 0), ("ps", 1), ("worker", 1))):
        with tf.device(f"/job:{job}/task:{task}"):
            w = tf.get_variable(f"w{i}", [10, 10], initializer=tf.random_normal_initializer(stddev=0.4, seed=i))
            h = tf.tanh(tf.matmul(h, w))
    loss = tf.reduce_sum(tf.square(h))
    gradients = tf.gradients(loss, tf.trainable_variables(), colocate_gradients_with_ops=True)
    rng = np.random.default_rng(1)
    same(context, [loss, gradients], {x: rng.standard_normal((16, 10)).astype(np.float32)}, before=tf.global_variables_initializer())


@case("log-device-placement")
def log(context):
    with tf.device("/job:ps/task:0"):
        a = tf.constant(1.0)
    with context.session(log_device_placement=True) as s:
        check(s.run(a + 1.0) == 2.0)


@case("device-filters")
def filters(context):
    with tf.device("/job:ps/task:0"):
        a = tf.identity(tf.constant(1.0))
    with context.session(device_filters=["/job:ps", f"/job:worker/task:{context.rank}"]) as s:
        check(s.run(a) == 1.0)
        names = {d.name.rpartition("/device")[0] for d in s.list_devices()}
    other = f"/job:worker/replica:0/task:{1 - context.rank}"
    check(other not in names, other, "is listed though it is filtered out")
    check(len(names) == 3, names)


@case("wide-graph")
def wide(context):
    """Two thousand nodes over eight devices."""
    devices = [f"/job:{j}/task:{t}/device:CPU:{c}" for j in ("ps", "worker") for t in range(2) for c in range(2)]
    x = tf.placeholder(tf.float32, [])
    ends = [x] * 8
    for i in range(250):
        row = []
        for k, device in enumerate(devices):
            with tf.device(device):
                row.append(ends[k] + 1.0 if i % 10 else ends[(k + 3) % 8] + 1.0)
        ends = row
    total = tf.add_n(ends)
    with context.session() as s:
        check(s.run(total, {x: 0.0}) == 2000.0)
        check(s.run(total, {x: 1.0}) == 2008.0)
