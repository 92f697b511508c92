"""Feeds and fetches: every dtype and shape, to a task and back, as constants, feeds, and between tasks."""

import collections

import numpy as np
import tensorflow.compat.v1 as tf

from harness import case, check, close, equal, same

RNG = np.random.default_rng(7)


def sample(dtype, shape=(3, 4)):
    """Some values of a dtype, its limits among them."""
    n = dtype.as_numpy_dtype
    size = int(np.prod(shape))
    if dtype == tf.string:
        words = [b"", b"a", "größe".encode(), b"\x00\xff\x00", b"x" * 1000, b"line\nline"]
        return np.array([words[i % len(words)] for i in range(size)], object).reshape(shape)
    if dtype == tf.bool:
        return (RNG.integers(0, 2, size) == 1).reshape(shape)
    if dtype.is_complex:
        parts = RNG.standard_normal((2, size))
        return (parts[0] + 1j * parts[1]).astype(n).reshape(shape)
    if dtype.is_floating:
        v = RNG.standard_normal(size).astype(n)
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32).astype(n)
        v[: min(5, size)] = special[: min(5, size)]
        return v.reshape(shape)
    least, most = dtype.min, dtype.max
    v = np.array([RNG.integers(0, 100) for _ in range(size)]).astype(n)
    v[: min(2, size)] = np.array([least, most], n)[: min(2, size)]
    return v.reshape(shape)


def there_and_back(context, value, dtype):
    """Fed at the master, through ps:0 and worker:1, and back; and the same as a constant that lies on ps:1."""
    x = tf.placeholder(dtype, value.shape)
    with tf.device("/job:ps/task:0"):
        a = tf.identity(x)
    with tf.device("/job:worker/task:1/device:CPU:1"):
        b = tf.stack([a, a])
    with tf.device("/job:ps/task:1"):
        c = tf.constant(value, dtype)
    with tf.device("/job:worker/task:0"):
        d = tf.identity(c)
    with context.session() as s:
        got = s.run([a, b, d, x], {x: value})
        # A second run takes what was compiled in the first.
        again = s.run([a, b, d, x], {x: value})
    for r in (got, again):
        equal(r[0], value, "from ps:0")
        equal(r[1], np.stack([value, value]), "from worker:1")
        equal(r[2], value, "a constant of ps:1")
        equal(r[3], value, "a feed that is fetched")


DTYPES = [tf.float32, tf.float64, tf.int32, tf.int64, tf.bool, tf.string, tf.float16, tf.bfloat16, tf.uint8, tf.int8, tf.int16,
          tf.uint16, tf.uint32, tf.uint64, tf.complex64, tf.complex128]


def _dtype_case(dtype):
    @case(f"dtype-{dtype.name}")
    def run(context):
        there_and_back(context, sample(dtype), dtype)


for _dtype in DTYPES:
    _dtype_case(_dtype)


@case("quantised")
def quantised(context):
    x = tf.placeholder(tf.quint8, [4])
    with tf.device("/job:ps/task:0"):
        y = tf.identity(x)
        z = tf.dequantize(y, 0.0, 255.0)
    with context.session() as s:
        close(s.run(z, {x: np.array([0, 1, 128, 255], tf.quint8.as_numpy_dtype)}), np.array([0, 1, 128, 255], np.float32))


@case("scalars")
def scalars(context):
    with context.session() as s:
        for dtype in (tf.float32, tf.int64, tf.bool, tf.string):
            value = sample(dtype, (6,))[5]
            x = tf.placeholder(dtype, [])
            with tf.device("/job:ps/task:0"):
                y = tf.identity(x)
            got = s.run(y, {x: value})
            check(np.shape(got) == (), dtype.name, "came back with shape", np.shape(got))
            check(got == value, dtype.name, "came back as", got)


@case("empty")
def empty(context):
    for shape in ((0,), (3, 0), (0, 4, 2), (1, 0, 1)):
        for dtype in (tf.float32, tf.int32, tf.string, tf.bool, tf.float16):
            value = np.zeros(shape, dtype.as_numpy_dtype if dtype != tf.string else object)
            x = tf.placeholder(dtype, [None] * len(shape))
            with tf.device("/job:ps/task:0"):
                y = tf.identity(x)
            with tf.device("/job:worker/task:1"):
                z = tf.concat([y, y], 0)
            with context.session() as s:
                got = s.run([y, z], {x: value})
            check(got[0].shape == shape, "shape", got[0].shape, "for", shape)
            check(got[1].shape == (2 * shape[0],) + shape[1:], "shape", got[1].shape, "for two of", shape)


@case("ranks-to-6")
def ranks(context):
    fetches, feeds = [], {}
    for rank in range(7):
        x = tf.placeholder(tf.float32, None)
        with tf.device("/job:ps/task:%d" % (rank % 2)):
            fetches.append(tf.transpose(x) * 2.0)
        feeds[x] = RNG.standard_normal(tuple(range(1, rank + 1))).astype(np.float32)
    same(context, fetches, feeds, exact=True)


@case("64-mb")
def large(context):
    value = RNG.standard_normal((4096, 4096)).astype(np.float32)
    x = tf.placeholder(tf.float32, [4096, 4096])
    with tf.device("/job:ps/task:0"):
        v = tf.Variable(tf.zeros([4096, 4096]), use_resource=True)
        put = tf.assign(v, x)
    with tf.device("/job:worker/task:1"):
        there = v + 1.0
    with context.session() as s:
        s.run(put.op, {x: value})
        equal(s.run(there), value + np.float32(1), "64 MB by way of two tasks")


@case("large-strings")
def large_strings(context):
    value = np.array([bytes([i % 256]) * 2_000_000 for i in range(8)], object)
    x = tf.placeholder(tf.string, [8])
    with tf.device("/job:ps/task:1"):
        y = tf.gather(x, [7, 6, 5, 4, 3, 2, 1, 0])
    with context.session() as s:
        equal(s.run(y, {x: value}), value[::-1])


@case("structures")
def structures(context):
    with tf.device("/job:ps/task:0"):
        a, b = tf.constant(1.0), tf.constant([2, 3])
        nothing = tf.no_op()
    Pair = collections.namedtuple("Pair", "left right")
    with context.session() as s:
        got = s.run({"a": a, "list": [b, (a, b)], "pair": Pair(a, nothing), "same": a})
        check(got["a"] == 1.0 and got["same"] == 1.0 and got["pair"].left == 1.0 and got["pair"].right is None, got)
        equal(got["list"][0], np.array([2, 3], np.int32))
        equal(got["list"][1][1], np.array([2, 3], np.int32))
        check(s.run([a, a, a]) == [1.0, 1.0, 1.0], "a tensor fetched three times")
        check(s.run("Const:0") == 1.0, "a fetch by name")
        check(s.run([]) == [], "nothing to fetch")


@case("sparse-values")
def sparse_values(context):
    sp = tf.sparse_placeholder(tf.float32, [4, 5])
    with tf.device("/job:ps/task:0"):
        doubled = tf.SparseTensor(sp.indices, sp.values * 2.0, sp.dense_shape)
        dense = tf.sparse_tensor_to_dense(sp)
    slices = tf.IndexedSlices(doubled.values, doubled.indices[:, 0], dense_shape=tf.constant([4]))
    value = tf.SparseTensorValue(np.array([[0, 1], [2, 3]], np.int64), np.array([5, 6], np.float32), np.array([4, 5], np.int64))
    with context.session() as s:
        got, all_of_it, rows = s.run([doubled, dense, slices], {sp: value})
    equal(got.values, np.array([10, 12], np.float32))
    equal(got.indices, value.indices)
    wanted = np.zeros((4, 5), np.float32)
    wanted[0, 1], wanted[2, 3] = 5, 6
    equal(all_of_it, wanted)
    equal(rows.indices, np.array([0, 2], np.int64))


@case("feed-in-the-middle")
def feed_middle(context):
    """A feed may replace any tensor, also one that another task would have made."""
    with tf.device("/job:ps/task:0"):
        a = tf.constant(2.0, name="a")
        v = tf.Variable(1.0, use_resource=False)
    with tf.device("/job:worker/task:1"):
        b = a * 3.0
        c = b + v
    with context.session() as s:
        check(s.run(b) == 6.0)
        check(s.run(b, {a: 5.0}) == 15.0)
        # The variable is not initialised, and is not asked when its value is fed.
        check(s.run(c, {b: 1.0, v: 4.0}) == 5.0)


@case("many-fetches")
def many(context):
    fetches = []
    for i in range(300):
        with tf.device("/job:%s/task:%d" % (("ps", "worker")[i % 2], i // 2 % 2)):
            fetches.append(tf.constant(i) + i)
    with context.session() as s:
        check(s.run(fetches) == [2 * i for i in range(300)], "300 fetches from four tasks")


@case("seeded-random")
def seeded(context):
    """Random numbers with seeds are TensorFlow's, run for run, on whichever task they are drawn."""
    tf.set_random_seed(42)
    fetches = []
    for i, (job, task) in enumerate((("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1))):
        with tf.device(f"/job:{job}/task:{task}"):
            fetches += [
                tf.random_uniform([5, 7], seed=i), tf.random_normal([33], seed=i + 10), tf.truncated_normal([4, 4]),
                tf.random_uniform([9], -5, 100, tf.int32, seed=3), tf.random_shuffle(tf.range(20), seed=i),
                tf.nn.dropout(tf.ones([50]), rate=0.4, seed=i), tf.multinomial(tf.math.log([[0.2, 0.3, 0.5]]), 10, seed=i),
            ]
    same(context, fetches, steps=3)
