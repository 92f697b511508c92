"""Cases of crates/kolo-ops/src/random: bit for bit where the same seeds give the same numbers."""

import numpy as np

from harness import FLOATS, Nodes, array, registered_dtypes, values

SHAPES = {"few": [3], "odd": [7], "matrix": [5, 9], "many": [300], "none": [0], "scalar": []}


def seeded(a, op, shape, label, n_runs=2, dtype=None, extra=(), exact=True, **attrs):
    """Two runs in one session: the stream goes on."""
    nodes = Nodes()
    inputs = [nodes.const("in/shape", array(shape))] + [nodes.const(f"in/{i}", v) for i, v in enumerate(extra)]
    nodes.op("op", op, inputs, attrs if op == "RandomUniformInt" else dict(attrs, dtype=dtype))
    name = "/".join(p for p in (op, dtype, label) if p)
    a.program(name, nodes, [{"fetch": ["op"]}] * n_runs, ops=[op], exact=exact)


def cases(a):
    for op in ("RandomUniform", "RandomStandardNormal", "TruncatedNormal"):
        for d in registered_dtypes(op, "dtype"):
            seeded(a, op, [11], "", dtype=d, seed=87654321, seed2=7, exact=True)
        for label, shape in SHAPES.items():
            for s, s2 in ((1, 2), (87654321, 0), (-5, 3)):
                seeded(a, op, np.array(shape, np.int32), f"{label}-{s}-{s2}", dtype="float32", seed=s, seed2=s2)
        for label, shape in (("negative", [-1]), ("matrix-shape", [[1]])):
            nodes = Nodes()
            nodes.op("op", op, [nodes.const("in/0", array(shape))], {"dtype": "float32"})
            a.refused(f"{op}/{label}", nodes, ["op"], ops=[op])
    for t in ("int32", "int64"):
        for label, shape in SHAPES.items():
            seeded(a, "RandomUniformInt", np.array(shape, np.int32), label, dtype=t,
                   extra=[np.array(-3, t), np.array(10, t)], seed=5, seed2=6)
        seeded(a, "RandomUniformInt", array([9]), "wide", dtype=t, extra=[np.array(-2**30, t), np.array(2**30, t)], seed=5,
               seed2=6)
        a.op("RandomUniformInt", array([2]), np.array(3, t), np.array(3, t), dtype=t, label="empty-range", seed=1, seed2=1,
             error=True)
    for label, shape in (("vector", [9]), ("rows", [6, 2]), ("one", [1]), ("empty", [0]), ("long", [40])):
        nodes = Nodes()
        nodes.op("op", "RandomShuffle", [nodes.const("in/0", values("int32", shape, 0, 99))], {"seed": 3, "seed2": 4})
        a.program(f"RandomShuffle/{label}", nodes, [{"fetch": ["op"]}] * 2, ops=["RandomShuffle"])
    for d in ("float32", "float64"):
        for out in ("int32", "int64"):
            nodes = Nodes()
            logits = nodes.const("in/0", values(d, [2, 4], -1, 1))
            nodes.op("op", "Multinomial", [logits, nodes.const("in/1", array(9))],
                     {"seed": 3, "seed2": 4, "output_dtype": out})
            a.program(f"Multinomial/{d}-{out}", nodes, [{"fetch": ["op"]}] * 2, ops=["Multinomial"])
    for op in ("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal"):
        for d in registered_dtypes(op, "dtype"):
            nodes = Nodes()
            nodes.op("op", op, [nodes.const("in/0", array([11])), nodes.const("in/1", np.array([5, 9], np.int64))], {"dtype": d})
            a.program(f"{op}/{d}", nodes, [{"fetch": ["op"]}], ops=[op], exact=True)
        for label, shape in SHAPES.items():
            for seed in ([1, 2], [-3, 2**31 - 1]):
                nodes = Nodes()
                nodes.op("op", op, [nodes.const("in/0", np.array(shape, np.int32)), nodes.const("in/1", np.array(seed, np.int32))])
                a.program(f"{op}/{label}-{seed[0]}", nodes, [{"fetch": ["op"]}], ops=[op], exact=True)
