"""Makes graphs with functions, runs them in TensorFlow, and writes them with their inputs and results.

usage: make.py FOLDER      writes one .pb and one .npz per case, and SavedModels, under FOLDER

The .npz of a case holds `feed/NAME` arrays and `fetch/NAME` arrays; `kolo run` and tests/functions.rs must give the same.
A case of several steps has `step1/…`, `step2/…` before these names; the variables keep their values between the steps.
"""

import os
import shutil
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
rng = np.random.default_rng(7)


def values(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def strip(graph_def):
    """Debug information is large and says where this file was."""
    graph_def.ClearField("debug_info")
    for node in list(graph_def.node) + [n for f in graph_def.library.function for n in f.node_def]:
        node.ClearField("experimental_debug_info")
    return graph_def


def write_case(folder, name, build, steps, init=None):
    """`build` describes the graph and returns fetches; `steps` are lists of feeds, one run each."""
    graph = tf.Graph()
    with graph.as_default():
        fetches = build()
        setup = tf1.global_variables_initializer() if init is None else init
        graph_def = strip(graph.as_graph_def())
        arrays = {}
        with tf1.Session(graph=graph) as session:
            session.run(setup)
            for i, feeds in enumerate(steps):
                results = session.run(fetches, {f"{k}:0": v for k, v in feeds.items()})
                step = f"step{i + 1}/" if len(steps) > 1 else ""
                arrays.update({f"{step}feed/{k}": v for k, v in feeds.items()})
                arrays.update({f"{step}fetch/{t.name}": v for t, v in zip(fetches, results)})
    with open(os.path.join(folder, f"{name}.pb"), "wb") as file:
        file.write(graph_def.SerializeToString(deterministic=True))
    np.savez_compressed(os.path.join(folder, f"{name}.npz"), **arrays)


def placeholder(name, shape=(None, 3), dtype=tf.float32):
    return tf1.placeholder(dtype, shape, name)


def calls():
    @tf.function
    def double(x):
        return x + x

    @tf.function
    def stats(x, scale):
        return tf.reduce_sum(x, 0) * scale, tf.reduce_max(x), x

    x = placeholder("x")
    total, top, same = stats(double(x), tf.constant(0.5))
    return [tf.identity(total, "total"), tf.identity(top, "top"), tf.add(same, 1.0, name="same")]


def nested():
    @tf.function
    def inner(x):
        a, b = tf.split(x, 2, axis=1)
        return b, a

    @tf.function
    def middle(x):
        b, a = inner(x)
        return tf.concat([b, a], 1), tf.constant(3.0)

    @tf.function
    def outer(x):
        y, c = middle(x)
        z, d = middle(y * c)
        return z - x, c + d

    x = placeholder("x", (None, 4))
    z, c = outer(x)
    return [tf.identity(z, "z"), tf.identity(c, "c")]


def cond():
    @tf.function
    def choose(p, x, y):
        if p:
            if tf.reduce_sum(x) > 0.0:
                r, k = x * y, 1
            else:
                r, k = x - y, 2
        else:
            r, k = tf.ones_like(x) * 7.0, 3
        return r, k

    p = placeholder("p", (), tf.bool)
    x, y = placeholder("x"), placeholder("y")
    r, k = choose(p, x, y)
    return [tf.identity(r, "r"), tf.identity(k, "k")]


def loop():
    w = tf.constant(values(3, 3) * 0.3)

    @tf.function
    def power(x, n, bias):
        def body(i, a, b, grown):
            a = tf.tanh(tf.matmul(a, w) + bias)
            return i + 1, b, a, tf.concat([grown, tf.reduce_sum(a, 0, keepdims=True)], 0)

        shapes = [tf.TensorShape([]), tf.TensorShape([None, 3]), tf.TensorShape([None, 3]), tf.TensorShape([None, 3])]
        start = [0, x, x * 2.0, tf.zeros([1, 3])]
        return tf.while_loop(lambda i, *_: i < n, body, start, shape_invariants=shapes)

    x, n, bias = placeholder("x"), placeholder("n", (), tf.int32), placeholder("bias", (3,))
    i, a, b, grown = power(x, n, bias)
    return [tf.identity(v, name) for v, name in zip([i, a, b, grown], ["i", "a", "b", "grown"])]


def loops_in_loops():
    @tf.function
    def table(n, x):
        total = tf.zeros_like(x)
        for i in tf.range(n):
            for j in tf.range(i):
                if tf.equal((i + j) % 2, 0):
                    total += x * tf.cast(j, tf.float32)
                else:
                    total -= 1.0
        return total

    return [tf.identity(table(placeholder("n", (), tf.int32), placeholder("x", (2,))), "total")]


def case():
    @tf.function
    def pick(i, x):
        return tf.switch_case(i, [lambda: x + 1.0, lambda: x * x, lambda: tf.constant([5.0, 6.0]), lambda: -x])

    return [tf.identity(pick(placeholder("i", (), tf.int32), placeholder("x", (2,))), "y")]


def stateful():
    v = tf1.get_variable("v", initializer=np.float32([1, 2]), use_resource=True)
    count = tf1.get_variable("count", initializer=np.int64(0), use_resource=True)

    @tf.function
    def update(x):
        before = v.read_value()
        v.assign_add(x)
        count.assign_add(1)
        return before, v.read_value() * 10.0

    @tf.function
    def maybe(x, p):
        if p:
            v.assign(-x)
        for _ in tf.range(3):
            v.assign_add(tf.ones([2]))
            count.assign_add(100)
        return tf.reduce_sum(v)

    x, p = placeholder("x", (2,)), placeholder("p", (), tf.bool)
    before, after = update(x)
    with tf.control_dependencies([after]):
        total = maybe(x, p)
    with tf.control_dependencies([total]):
        last, n = v.read_value(), count.read_value()
    return [tf.identity(t, n) for t, n in zip([before, after, total, last, n],
                                              ["before", "after", "total", "last", "n"])]


def gradient():
    @tf.function
    def f(x, w):
        return tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)) ** 2)

    x, w = placeholder("x"), placeholder("w", (3, 2))
    loss = f(x, w)
    (dx, dw) = tf.gradients(loss, [x, w])
    return [tf.identity(loss, "loss"), tf.identity(dx, "dx"), tf.identity(dw, "dw")]


def defun():
    from tensorflow.python.framework import function

    @function.Defun(tf.float32, tf.float32, func_name="Weigh")
    def weigh(a, b):
        return a * 2.0 + b, a - b

    x = placeholder("x", (2,))
    s, d = weigh(x, tf.constant([1.0, 10.0]))
    return [tf.identity(s, "s"), tf.identity(d, "d")]


def frozen(folder):
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    class Model(tf.Module):
        def __init__(self):
            self.w = tf.Variable(values(3, 2))
            self.b = tf.Variable(values(2))

    model = Model()
    f = tf.function(lambda x: tf.nn.softmax(tf.matmul(x, model.w) + model.b))
    concrete = f.get_concrete_function(tf.TensorSpec([None, 3], tf.float32, name="x"))
    flat = convert_variables_to_constants_v2(concrete)
    x = values(4, 3)
    with open(os.path.join(folder, "frozen.pb"), "wb") as file:
        file.write(strip(flat.graph.as_graph_def()).SerializeToString(deterministic=True))
    np.savez_compressed(os.path.join(folder, "frozen.npz"), **{"feed/x": x, "fetch/Identity:0": f(x).numpy()})


class Network(tf.Module):
    """Two signatures, variables, and a loop."""

    def __init__(self):
        self.w = tf.Variable(values(3, 2), name="w")
        self.b = tf.Variable(values(2), name="b")
        self.steps = tf.Variable(0, dtype=tf.int64, name="steps")

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
    def serve(self, x):
        y = tf.matmul(x, self.w) + self.b
        for _ in tf.range(2):
            y = tf.tanh(y)
        self.steps.assign_add(1)
        return {"y": y, "total": tf.reduce_sum(y)}

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32, name="by")])
    def scale(self, by):
        return {"w": self.w * by}


def saved_model(folder):
    path = os.path.join(folder, "saved_v2")
    network = Network()
    tf.saved_model.save(network, path, {"serving_default": network.serve, "scale": network.scale})
    os.remove(os.path.join(path, "fingerprint.pb"))
    tidy(path)
    x, by = values(2, 3), np.float32(2.5)
    arrays = {"serving_default/feed/x": x, "scale/feed/by": by}
    arrays.update({f"serving_default/fetch/{k}": v.numpy() for k, v in network.serve(x).items()})
    arrays.update({f"scale/fetch/{k}": v.numpy() for k, v in network.scale(by).items()})
    np.savez_compressed(os.path.join(folder, "saved_v2.npz"), **arrays)


def saved_model_v1(folder):
    path = os.path.join(folder, "saved_v1")
    with tf.Graph().as_default(), tf1.Session() as session:
        x = placeholder("x")
        w = tf1.get_variable("w", initializer=values(3, 2), use_resource=False)
        scale = tf1.get_variable("scale", initializer=np.float32(3.0), use_resource=True)
        y = tf.nn.relu(tf.matmul(x, w) * scale, name="y")
        session.run(tf1.global_variables_initializer())
        session.run(tf1.assign(w, values(3, 2)))
        tf1.saved_model.simple_save(session, path, {"images": x}, {"scores": y})
        feed = values(2, 3)
        scores = session.run(y, {x: feed})
    tidy(path)
    np.savez_compressed(os.path.join(folder, "saved_v1.npz"),
                        **{"serving_default/feed/images": feed, "serving_default/fetch/scores": scores})


def tidy(path):
    from tensorflow.core.protobuf import saved_model_pb2

    for empty in ("assets",):
        shutil.rmtree(os.path.join(path, empty), ignore_errors=True)
    file = os.path.join(path, "saved_model.pb")
    message = saved_model_pb2.SavedModel()
    with open(file, "rb") as stream:
        message.ParseFromString(stream.read())
    for meta in message.meta_graphs:
        meta.meta_info_def.ClearField("stripped_op_list")
        strip(meta.graph_def)
    with open(file, "wb") as stream:
        stream.write(message.SerializeToString(deterministic=True))


def main(folder):
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    flag, n = (lambda v: np.bool_(v)), (lambda v: np.int32(v))
    x = values(2, 3)
    write_case(folder, "calls", calls, [{"x": x}])
    write_case(folder, "nested", nested, [{"x": values(2, 4)}])
    write_case(folder, "cond", cond, [{"p": flag(p), "x": s * np.abs(x), "y": values(2, 3)}
                                      for p, s in [(True, 1), (True, -1), (False, 1)]])
    write_case(folder, "loop", loop, [{"x": values(2, 3), "n": n(k), "bias": values(3)} for k in (0, 1, 5)])
    write_case(folder, "loops_in_loops", loops_in_loops, [{"n": n(k), "x": values(2)} for k in (0, 5)])
    write_case(folder, "case", case, [{"i": n(k), "x": values(2)} for k in (0, 1, 2, 3, 9, -1)])
    write_case(folder, "stateful", stateful, [{"x": values(2), "p": flag(p)} for p in (False, True, False)])
    write_case(folder, "gradient", gradient, [{"x": values(2, 3), "w": values(3, 2)}])
    write_case(folder, "defun", defun, [{"x": values(2)}])
    frozen(folder)
    saved_model(folder)
    saved_model_v1(folder)


if __name__ == "__main__":
    main(sys.argv[1])
