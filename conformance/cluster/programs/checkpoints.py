"""Checkpoints: written by a server and read by a plain TensorFlow session, and the other way round, in mid-training."""

import os

import numpy as np
import tensorflow.compat.v1 as tf

from harness import LocalSession, case, check, close, equal

from programs.training import dense


def model(context, resource=False, make=None):
    with tf.device(tf.train.replica_device_setter(cluster=context.spec, worker_device="/job:worker/task:1")), \
            tf.variable_scope("", use_resource=resource):
        loss, feeds = dense(context)
        step = tf.train.get_or_create_global_step()
        update = (make or (lambda: tf.train.AdamOptimizer(0.05)))().minimize(loss, global_step=step)
    return loss, feeds, step, update


def saver_of(sharded):
    return tf.train.Saver(sharded=sharded)


def _kinds(name):
    def register(function):
        for resource in (False, True):
            for sharded in (False, True):
                label = f"{name}-{'resource' if resource else 'ref'}{'-sharded' if sharded else ''}"
                case(label)(lambda context, r=resource, s=sharded: function(context, r, s))
        return function

    return register


def restore(local, saver, path):
    definition = saver.saver_def
    local.run(definition.restore_op_name, {definition.filename_tensor_name: path})


@_kinds("server-to-local")
def server_to_local(context, resource, sharded):
    """Three steps on the cluster, a checkpoint, three more on each side: they agree."""
    loss, feeds, step, update = model(context, resource)
    saver = saver_of(sharded)
    path = context.path("model")
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        for i in range(3):
            s.run(update, feeds(i))
        written = saver.save(s, path, global_step=3)
        check(os.path.exists(written + ".index"), "there is no", written)
        on_cluster = [s.run([loss, update], feeds(i))[0] for i in range(3, 6)]
    with LocalSession() as local:
        restore(local, saver, written)
        in_local = [local.run([loss, update], feeds(i))[0] for i in range(3, 6)]
    close(np.array(on_cluster), np.array(in_local), "losses after the checkpoint", rtol=1e-4)
    reader = tf.train.load_checkpoint(written)
    check(reader.get_tensor("global_step") == 3)
    names = set(reader.get_variable_to_shape_map())
    check({"w1", "w1/Adam", "w1/Adam_1", "beta1_power"} <= names, sorted(names))


@_kinds("local-to-server")
def local_to_server(context, resource, sharded):
    loss, feeds, step, update = model(context, resource, lambda: tf.train.MomentumOptimizer(0.05, 0.9))
    saver = saver_of(sharded)
    path = context.path("model")
    initialise = tf.global_variables_initializer()
    with LocalSession() as local:
        local.run(initialise)
        for i in range(3):
            local.run(update, feeds(i))
        definition = saver.saver_def
        local.run(definition.save_tensor_name, {definition.filename_tensor_name: path})
        in_local = [local.run([loss, update], feeds(i))[0] for i in range(3, 6)]
    with context.session() as s:
        saver.restore(s, path)
        check(int(s.run(step)) == 3, "the global step after restoring")
        on_cluster = [s.run([loss, update], feeds(i))[0] for i in range(3, 6)]
    close(np.array(on_cluster), np.array(in_local), "losses after the checkpoint", rtol=1e-4)


@case("all-dtypes")
def all_dtypes(context):
    values = {
        "f": np.array([1.5, -2], np.float32), "d": np.array(3.25), "i": np.array([[1, 2]], np.int32), "l": np.array(7, np.int64),
        "b": np.array([True, False]), "h": np.array([0.5, 2], np.float16), "u": np.array([0, 255], np.uint8), "empty": np.zeros([0, 3], np.float32),
    }
    with tf.device(tf.train.replica_device_setter(cluster=context.spec)):
        variables = {k: tf.get_variable(k, initializer=v, use_resource=True) for k, v in values.items()}
        words = tf.get_variable("words", initializer=tf.constant(["", "a", "größe"]), use_resource=False)
    saver = tf.train.Saver()
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        path = saver.save(s, context.path("all"))
    reader = tf.train.load_checkpoint(path)
    for k, v in values.items():
        equal(reader.get_tensor(k), v, k)
    check(reader.get_tensor("words").tolist() == [b"", b"a", "größe".encode()], reader.get_tensor("words"))
    with context.session() as s:
        s.run([v.assign(tf.zeros_like(v.read_value())).op for v in variables.values()])
        saver.restore(s, path)
        for k, v in variables.items():
            equal(s.run(v.read_value()), values[k], k)
        check(s.run(words)[2] == "größe".encode())


@case("partitioned")
def partitioned(context):
    """A partitioned variable is one tensor in the checkpoint, and may be cut another way when it comes back."""
    with tf.device(tf.train.replica_device_setter(cluster=context.spec)):
        table = tf.get_variable("table", [10, 3], initializer=tf.random_uniform_initializer(seed=2), partitioner=tf.fixed_size_partitioner(3))
        whole = tf.convert_to_tensor(table)
    saver = tf.train.Saver()
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        wanted = s.run(whole)
        path = saver.save(s, context.path("parts"))
    equal(tf.train.load_checkpoint(path).get_tensor("table"), wanted)
    with tf.Graph().as_default() as g, g.container("checkpoints-again"):
        with tf.device(tf.train.replica_device_setter(cluster=context.spec)):
            again = tf.convert_to_tensor(tf.get_variable("table", [10, 3], partitioner=tf.fixed_size_partitioner(4)))
        with context.session() as s:
            tf.train.Saver().restore(s, path)
            equal(s.run(again), wanted)


@case("keep-and-state-file")
def keep(context):
    with tf.device("/job:ps/task:0"):
        v = tf.get_variable("v", initializer=0)
    saver = tf.train.Saver(max_to_keep=2)
    with context.session() as s:
        s.run(v.initializer)
        for i in range(4):
            s.run(v.assign(i).op)
            saver.save(s, context.path("m"), global_step=i)
    check(tf.train.latest_checkpoint(context.folder) == context.path("m-3"))
    left = sorted(n for n in os.listdir(context.folder) if n.endswith(".index"))
    check(left == ["m-2.index", "m-3.index"], left)


@case("meta-graph")
def meta_graph(context):
    """Training goes on from files alone: the .meta file has the graph."""
    loss, feeds, step, update = model(context)
    names = [f.name for f in feeds(0)]
    saver = tf.train.Saver()
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        s.run(update, feeds(0))
        path = saver.save(s, context.path("m"))
        wanted = s.run(loss, feeds(1))
    values = list(feeds(1).values())
    with tf.Graph().as_default():
        again = tf.train.import_meta_graph(path + ".meta")
        with context.session(context.target("worker", 1)) as s:
            again.restore(s, path)
            close(s.run(loss.name, dict(zip(names, values))), wanted)
