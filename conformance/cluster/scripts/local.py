"""A program of one process: sessions without a target, and local servers."""

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

# Two devices in one session.
graph = tf.Graph()
with graph.as_default():
    x = tf.placeholder(tf.float32, [None])
    with tf.device("/cpu:1"):
        v = tf.get_variable("v", initializer=2.0)
        y = x * v
    up = v.assign_add(1.0)
    init = tf.global_variables_initializer()
two = tf.ConfigProto(device_count={"CPU": 2})
with tf.Session(graph=graph, config=two) as session:
    session.run(init)
    assert np.array_equal(session.run(y, {x: [1, 2]}), [2, 4])
    session.run(up)
    names = [d.name for d in session.list_devices() if d.device_type == "CPU"]
    assert sorted(names) == ["/job:localhost/replica:0/task:0/device:CPU:%d" % i for i in range(2)], names
    # Each local session has variables of its own.
    with tf.Session(graph=graph, config=two) as other:
        try:
            other.run(y, {x: [1]})
            raise SystemExit("a second session sees the first one's variable")
        except tf.errors.FailedPreconditionError:
            pass
        other.run(init)
        assert other.run(v) == 2.0 and session.run(v) == 3.0

# Without a configuration, and as the default session.
tf.reset_default_graph()
session = tf.InteractiveSession()
w = tf.get_variable("w", initializer=np.arange(6, dtype=np.float32).reshape(2, 3))
tf.global_variables_initializer().run()
assert tf.reduce_sum(w).eval() == 15.0
optimizer = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(tf.square(w)))
session.run(tf.global_variables_initializer())
before = session.run(tf.reduce_sum(tf.square(w)))
for _ in range(20):
    session.run(optimizer)
assert session.run(tf.reduce_sum(tf.square(w))) < before
session.close()

# A server of its own, started later, with two devices by its configuration.
tf.reset_default_graph()
server = tf.train.Server.create_local_server(config=two, start=False)
server.start()
assert server.target.startswith("grpc://"), server.target
assert server.server_def.job_name and server.server_def.task_index == 0
with tf.device("/cpu:1"):
    a = tf.constant(3.0)
with tf.Session(server.target) as session:
    assert session.run(a * 2.0) == 6.0
    assert sum(d.device_type == "CPU" for d in session.list_devices()) == 2

# A cluster of which only this task is known.
tf.reset_default_graph()
alone = tf.train.Server({"worker": {3: "localhost:0"}}, job_name="worker", task_index=3, config=tf.ConfigProto(intra_op_parallelism_threads=1))
with tf.device("/job:worker/task:3"):
    b = tf.constant(4.0)
with tf.Session(alone.target) as session:
    assert session.run(b + 1.0) == 5.0

# A job without tasks, and a timeout of the server's own, for sessions without a configuration, too.
tf.reset_default_graph()
limited = tf.ConfigProto(operation_timeout_in_ms=500)
only_workers = tf.train.ClusterSpec({"ps": [], "worker": ["localhost:0"]})
patient = tf.train.Server(only_workers, job_name="worker", task_index=0, config=limited)
nothing = tf.FIFOQueue(1, tf.float32).dequeue()
for config in None, tf.ConfigProto(allow_soft_placement=True):
    with tf.Session(patient.target, config=config) as session:
        assert session.run(tf.constant(4.0)) == 4.0
        try:
            session.run(nothing)
            raise SystemExit("there was nothing to dequeue")
        except tf.errors.DeadlineExceededError:
            pass
print("local: done", flush=True)
