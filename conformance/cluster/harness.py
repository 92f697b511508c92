"""What the programs share: cases, sessions on the cluster, and the same graph in a plain local session."""

import contextlib
import fnmatch
import os
import time

import numpy as np
import tensorflow.compat.v1 as tf

CASES = {}


class Failed(Exception):
    """A check that did not hold."""


def case(name, seconds=60.0, ranks=1, graph=True):
    """Registers a function of a `Context` as a case. `ranks` client processes call it at the same time. With `graph` it
    runs in a new default graph whose state lies in a container of its own, so that no other case sees it."""

    def register(function):
        module = function.__module__.rpartition(".")[2]
        if name in CASES.setdefault(module, {}):
            raise ValueError(f"two cases are named {module}/{name}")
        CASES[module][name] = (function, seconds, ranks, graph)
        return function

    return register


def check(condition, *why):
    if not condition:
        raise Failed(" ".join(str(w) for w in why) or "a check did not hold")


def equal(got, wanted, what="value"):
    """Exactly equal: dtype, shape, and every bit of every element but NaN's payload."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    check(got.dtype == wanted.dtype, what, "has dtype", got.dtype, "instead of", wanted.dtype)
    check(got.shape == wanted.shape, what, "has shape", got.shape, "instead of", wanted.shape)
    if got.dtype.kind in "OSU":
        check(got.tolist() == wanted.tolist(), what, "is", repr(got.tolist())[:200], "instead of", repr(wanted.tolist())[:200])
    else:
        wrong = ~((got == wanted) | ((got != got) & (wanted != wanted)))
        check(not wrong.any(), what, "differs:", _some(got, wrong), "instead of", _some(wanted, wrong))


def close(got, wanted, what="value", rtol=2e-5, atol=2e-6):
    got, wanted = np.asarray(got), np.asarray(wanted)
    check(got.dtype == wanted.dtype, what, "has dtype", got.dtype, "instead of", wanted.dtype)
    check(got.shape == wanted.shape, what, "has shape", got.shape, "instead of", wanted.shape)
    if got.dtype.kind in "biuOSU":
        return equal(got, wanted, what)
    wrong = ~np.isclose(got.astype(np.complex128), wanted.astype(np.complex128), rtol, atol, equal_nan=True)
    check(not wrong.any(), what, f"differs in {wrong.sum()} of {wrong.size}:", _some(got, wrong), "instead of", _some(wanted, wrong))


def _some(values, where):
    return np.array2string(values[where].ravel()[:4] if values.ndim else values, precision=9)


@contextlib.contextmanager
def raises(kind, *texts, op=None):
    """The block must raise exactly `kind`, with all of `texts` in the message, about the op named `op`."""
    holder = Raised()
    try:
        yield holder
    except Exception as e:
        holder.error = e
        check(type(e) is kind, "raised", f"{type(e).__name__}({str(e)[:300]!r})", "instead of", kind.__name__)
        for text in texts:
            check(text.lower() in str(e).lower(), "the message has no", repr(text), "but is", repr(str(e)[:400]))
        if op is not None:
            named = getattr(getattr(e, "op", None), "name", None)
            check(named == op, "the error is about op", named, "instead of", op, "in", repr(str(e)[:300]))
        return
    raise Failed(f"nothing was raised instead of {kind.__name__}")


class Raised:
    error = None


def name_of(x):
    """What names a graph element in another copy of the graph."""
    if isinstance(x, (str, bytes)):
        return x
    if isinstance(x, tf.Variable):
        return x.value().name if not hasattr(x, "handle") or not x.handle.dtype == tf.resource else x.read_value().name
    return x.name


class LocalSession:
    """The default graph, without its devices, in a plain session of this process."""

    def __init__(self, config=None):
        definition = tf.get_default_graph().as_graph_def()
        for node in definition.node:
            node.device = ""
        for function in definition.library.function:
            for node in function.node_def:
                node.device = ""
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf.import_graph_def(definition, name="")
        self.session = tf.Session(graph=self.graph, config=config)

    def run(self, fetches, feed_dict=None):
        feeds = {name_of(k): v for k, v in (feed_dict or {}).items()}
        return self.session.run(tf.nest.map_structure(name_of, fetches), feeds)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()


class Context:
    """What a case is given: the cluster, its part in it, and a folder."""

    def __init__(self, addresses, rank, ranks, folder, data, servers, masters):
        self.addresses, self.rank, self.ranks, self.folder, self.data = addresses, rank, ranks, folder, data
        self.servers = servers
        self.masters = masters
        self.spec = tf.train.ClusterSpec(addresses)

    def target(self, job="worker", task=0):
        return f"grpc://{self.addresses[job][task]}"

    @property
    def master(self):
        """The task this client talks to: the worker of its rank, unless the runner was told otherwise."""
        return self.masters[self.rank]

    def config(self, **named):
        named.setdefault("operation_timeout_in_ms", 60_000)
        return tf.ConfigProto(**named)

    def session(self, target=None, graph=None, **named):
        return tf.Session(target or self.master, graph=graph, config=self.config(**named))

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def tell(self, event, text=""):
        """Tells the other clients of this case that something has happened."""
        with open(self.path(f".{event}.new{self.rank}"), "w") as f:
            f.write(text)
        os.replace(self.path(f".{event}.new{self.rank}"), self.path(f".{event}"))

    def wait_for(self, event, seconds=45.0):
        """Waits until another client tells of `event`. Its text."""
        deadline = time.monotonic() + seconds
        while not os.path.exists(self.path(f".{event}")):
            check(time.monotonic() < deadline, f"'{event}' did not happen in {seconds:g} s")
            time.sleep(0.02)
        with open(self.path(f".{event}")) as f:
            return f.read()

    def meet(self, name, seconds=45.0):
        """Waits until all clients of this case are here."""
        self.tell(f"{name}.{self.rank}")
        for rank in range(self.ranks):
            self.wait_for(f"{name}.{rank}", seconds)


def same(context, fetches, feeds=None, steps=1, before=None, after=None, rtol=2e-5, atol=2e-6, exact=False, **config):
    """Runs the default graph on the cluster and in a plain local session: `before` once, then `fetches` `steps` times, and
    compares what both gave. `after` is fetched by a run of its own after each step. `feeds` is a dictionary, or a function
    of the step."""
    feed = feeds if callable(feeds) else lambda step: feeds

    def step(session, i):
        return [session.run(fetches, feed(i)), session.run(after) if after is not None else []]

    with LocalSession() as local:
        if before is not None:
            local.run(before)
        wanted = [step(local, i) for i in range(steps)]
    with context.session(**config) as s:
        if before is not None:
            s.run(before)
        got = [step(s, i) for i in range(steps)]
    for at, (g, w) in enumerate(zip(got, wanted)):
        flat_g, flat_w, names = tf.nest.flatten(g), tf.nest.flatten(w), tf.nest.flatten([fetches, after or []])
        check(len(flat_g) == len(flat_w), "a run gave", len(flat_g), "values instead of", len(flat_w))
        for a, b, n in zip(flat_g, flat_w, names):
            what = f"{getattr(n, 'name', n)} of step {at}"
            if b is None:
                check(a is None, what, "is", a)
            elif exact:
                equal(a, b, what)
            else:
                close(a, b, what, rtol, atol)
    return [fetched if after is None else [fetched, later] for fetched, later in got]


def matches(name, patterns):
    return not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)
