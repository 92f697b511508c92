"""Whole models: their gradients, and 200 steps of training from the same initial values.

Parameters of the gradient cases are constants, so that a case is one run. The training cases keep them in variables:
`train` makes Kolo take its own gradients and update with its own ops, `steps` runs the graph with the gradients and
updates that TensorFlow added.
"""

import numpy as np

from harness import array, config, tf, tf1, values

STEPS, SEEN = 200, [0, 1, 10, 50, 100, 199]


class Parameters:
    """Hands out parameters, as constants or as variables."""

    def __init__(self, variables=False):
        self.variables, self.made = variables, []

    def __call__(self, name, shape, lo=-0.5, hi=0.5):
        value = values("float32", shape, lo, hi, seed=len(self.made))
        if self.variables:
            p = tf1.get_variable(name, initializer=value, use_resource=True)
        else:
            p = tf.constant(value, name=name)
        self.made.append(p)
        return p


def classes(n, k):
    return tf.constant(np.array([i % k for i in range(n)], np.int32))


def cross_entropy(logits, labels):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels))


def mlp(p):
    x = tf.constant(values("float32", [8, 6], -2, 2))
    h = tf.nn.relu(tf.matmul(x, p("w1", [6, 10])) + p("b1", [10]))
    h = tf.tanh(tf.nn.bias_add(tf.matmul(h, p("w2", [10, 10])), p("b2", [10])))
    loss = cross_entropy(tf.matmul(h, p("w3", [10, 3])) + p("b3", [3]), classes(8, 3))
    return loss + 0.01 * tf.nn.l2_loss(p.made[0])


def lenet(p):
    x = tf.constant(values("float32", [4, 12, 12, 1], -1, 1))
    h = tf.nn.conv2d(x, p("c1", [3, 3, 1, 4]), strides=1, padding="SAME") + p("cb1", [4])
    h = tf1.nn.max_pool(tf.nn.relu(h), [1, 2, 2, 1], [1, 2, 2, 1], "SAME")
    h = tf.nn.bias_add(tf.nn.conv2d(h, p("c2", [3, 3, 4, 6]), strides=1, padding="VALID"), p("cb2", [6]))
    h = tf1.nn.avg_pool(tf.nn.relu(h), [1, 2, 2, 1], [1, 2, 2, 1], "VALID")
    h = tf.reshape(h, [4, -1])
    h = tf.nn.relu(tf.matmul(h, p("w1", [24, 8])) + p("b1", [8]))
    return cross_entropy(tf.matmul(h, p("w2", [8, 5])) + p("b2", [5]), classes(4, 5))


def resnet(p):
    x = tf.constant(values("float32", [3, 6, 6, 4], -1, 1))

    def norm(h, name):
        y, _, _ = tf1.nn.fused_batch_norm(h, p(name + "_scale", [4], 0.5, 1.5), p(name + "_offset", [4]))
        return y
    h = tf.nn.relu(norm(tf.nn.conv2d(x, p("c1", [3, 3, 4, 4]), strides=1, padding="SAME"), "n1"))
    h = norm(tf.nn.conv2d(h, p("c2", [3, 3, 4, 4]), strides=1, padding="SAME"), "n2")
    h = tf.nn.relu(h + x)
    shortcut = tf.nn.conv2d(h, p("c3", [1, 1, 4, 4]), strides=2, padding="SAME")
    h = tf.nn.relu(norm(tf.nn.conv2d(h, p("c4", [3, 3, 4, 4]), strides=2, padding="SAME"), "n3") + shortcut)
    h = tf.reduce_mean(h, [1, 2])
    return cross_entropy(tf.matmul(h, p("w", [4, 3])) + p("b", [3]), classes(3, 3))


def depthwise(p):
    x = tf.constant(values("float32", [2, 7, 7, 3], -1, 1))
    h = tf.nn.depthwise_conv2d(x, p("d", [3, 3, 3, 2]), [1, 2, 2, 1], "SAME")
    h = tf.nn.relu6(tf.nn.conv2d(h, p("c", [1, 1, 6, 4]), strides=1, padding="SAME"))
    h = tf1.nn.lrn(h, depth_radius=2, bias=1.0, alpha=0.1, beta=0.75)
    return tf.reduce_mean(tf.square(tf.reduce_max(h, [1, 2]) - 0.3))


def lstm(p):
    x = tf.constant(values("float32", [5, 2, 3], -1, 1))
    w, b = p("w", [7, 16]), p("b", [16])
    inputs = tf1.TensorArray(tf.float32, 5).unstack(x)
    outputs = tf1.TensorArray(tf.float32, 5)

    def step(t, c, h, out):
        i, j, f, o = tf.split(tf.matmul(tf.concat([inputs.read(t), h], 1), w) + b, 4, 1)
        c = tf.sigmoid(f + 1.0) * c + tf.sigmoid(i) * tf.tanh(j)
        h = tf.sigmoid(o) * tf.tanh(c)
        return t + 1, c, h, out.write(t, h)
    zero = tf.zeros([2, 4])
    _, c, h, out = tf1.while_loop(lambda t, *_: t < 5, step, [0, zero, zero, outputs])
    return tf.reduce_sum(tf.square(out.stack())) + tf.reduce_mean(c * h)


def attention(p):
    x = tf.constant(values("float32", [2, 5, 8], -1, 1))

    def norm(h, name):
        mean, variance = tf.nn.moments(h, [-1], keepdims=True)
        return (h - mean) * tf1.rsqrt(variance + 1e-5) * p(name + "_g", [8], 0.5, 1.5) + p(name + "_b", [8])

    def heads(h, name):
        h = tf.reshape(tf.matmul(tf.reshape(h, [10, 8]), p(name, [8, 8])), [2, 5, 2, 4])
        return tf.transpose(h, [0, 2, 1, 3])
    h = norm(x, "n1")
    q, k, v = heads(h, "q"), heads(h, "k"), heads(h, "v")
    scores = tf.matmul(q, k, transpose_b=True) / np.float32(2.0)
    mask = tf.constant(np.triu(np.full([5, 5], -1e9, np.float32), 1))
    weights = tf.nn.softmax(scores + mask)
    h = tf.reshape(tf.transpose(tf.matmul(weights, v), [0, 2, 1, 3]), [10, 8])
    x = x + tf.reshape(tf.matmul(h, p("o", [8, 8])), [2, 5, 8])
    h = tf.reshape(norm(x, "n2"), [10, 8])
    h = tf.matmul(h, p("f1", [8, 12])) + p("fb1", [12])
    h = 0.5 * h * (1.0 + tf1.erf(h * np.float32(0.70710678)))
    x = x + tf.reshape(tf.matmul(h, p("f2", [12, 8])) + p("fb2", [8]), [2, 5, 8])
    logits = tf.reshape(x, [10, 8])
    return cross_entropy(logits, classes(10, 8))


def embedding(p):
    words = tf.constant(np.array([[1, 5, 1, 0], [3, 3, 2, 6]], np.int32))
    table = p("table", [7, 4])
    h = tf.reduce_mean(tf.gather(table, words), 1)
    h = tf.concat([h, tf.nn.embedding_lookup(table, tf.constant([2, 2], tf.int32))], 1)
    h = tf.tanh(tf.matmul(h, p("w", [8, 5])) + p("b", [5]))
    return cross_entropy(h, classes(2, 5))


def autoencoder(p):
    x = tf.constant(values("float32", [6, 9], -1, 1))
    h = tf.nn.elu(tf.matmul(x, p("e", [9, 4])) + p("eb", [4]))
    h = tf.nn.leaky_relu(h) + tf.nn.softplus(h)
    y = tf.sigmoid(tf.matmul(h, p("e2", [4, 9])) + p("db", [9]))
    kl = tf.reduce_mean(tf1.log(tf.maximum(tf.reduce_mean(tf.sigmoid(h), 0), 1e-3)))
    return tf.reduce_mean(tf1.losses.huber_loss(tf.clip_by_value(x, 0.0, 1.0), y)) - 0.05 * kl


MODELS = [mlp, lenet, resnet, depthwise, lstm, attention, embedding, autoencoder]
# Training these is smooth enough to compare after 200 steps; of batch norm and max pools, rounding makes another path.
TRAINED = {mlp: 0.1, lenet: 0.05, attention: 0.02, embedding: 0.2, lstm: 0.02, autoencoder: 0.05}


def gradient_case(a, model):
    g = tf.Graph()
    with g.as_default():
        p = Parameters()
        tf.identity(model(p), name="loss")
        graph_def = g.as_graph_def()
        grads = [tf.convert_to_tensor(d) for d in tf1.gradients(g.get_tensor_by_name("loss:0"), p.made)]
        with tf1.Session(graph=g, config=config()) as s:
            expect = s.run(grads)

    def grad(expected):
        start = len(expected)
        expected.extend(expect)
        return {"ys": ["loss:0"], "dys": [], "xs": [x.name for x in p.made], "expect": list(range(start, start + len(expect)))}

    a.program(f"model/{model.__name__}", graph_def, [{"fetch": ["loss"]}], grad=grad, rtol=2e-5, atol=2e-6)


def training_case(a, model, name, lr):
    g = tf.Graph()
    with g.as_default():
        p = Parameters(variables=True)
        loss = tf.identity(model(p), name="loss")
        tf1.group(tf1.global_variables_initializer(), name="start")
        forward = g.as_graph_def()
        optimizer = tf1.train.GradientDescentOptimizer(lr) if name == "sgd" else tf1.train.AdamOptimizer(lr)
        step = optimizer.minimize(loss, name="step")
        tf1.group(tf1.global_variables_initializer(), name="start_all")
        whole = g.as_graph_def()
        with tf1.Session(graph=g, config=config()) as s:
            s.run("start_all")
            losses = []
            for _ in range(STEPS):
                losses.append(s.run(loss))
                s.run(step)
    rtol = 2e-3
    seen = np.array([losses[i] for i in SEEN], np.float32)
    if not seen[-1] < 0.9 * seen[0]:
        raise ValueError(f"{model.__name__} with {name} does not learn: {seen}")

    def train(expected):
        expected.append(seen)
        return {"loss": "loss:0", "start": "start", "variables": [v.handle.op.name for v in p.made], "optimizer": name,
                "lr": lr, "steps": STEPS, "seen": SEEN, "expect": len(expected) - 1, "rtol": rtol}

    kind = {"sgd": "ResourceApplyGradientDescent", "adam": "ResourceApplyAdam"}[name]
    a.program(f"train/{model.__name__}-{name}", forward, [{"target": ["start"]}, {"fetch": ["loss"]}], train=train,
              ops=[kind], rtol=1e-5)
    runs = [{"target": ["start_all"]}]
    for at, until in zip(SEEN, SEEN[1:] + [None]):
        runs.append({"fetch": ["loss"]})
        if until is not None:
            runs.append({"target": ["step"], "repeat": until - at})
    a.program(f"steps/{model.__name__}-{name}", whole, runs, rtol=rtol)


def cases(a):
    for model in MODELS:
        gradient_case(a, model)
    for model, lr in TRAINED.items():
        for name in ("sgd", "adam"):
            training_case(a, model, name, lr if name == "sgd" else lr / 10)
