"""Cases of crates/kolo-ops/src/random: bit for bit where the same seeds give the same numbers."""

import numpy as np

from harness import FLOATS, Nodes, array, registered_dtypes, values

NAN, INF = float("nan"), float("inf")
SHAPES = {"few": [3], "odd": [7], "matrix": [5, 9], "many": [300], "none": [0], "scalar": []}


def seeded(a, op, shape, label, n_runs=2, dtype=None, extra=(), exact=True, **attrs):
    """Two runs in one session: the stream goes on."""
    nodes = Nodes()
    inputs = [nodes.const("in/shape", array(shape))] + [nodes.const(f"in/{i}", v) for i, v in enumerate(extra)]
    nodes.op("op", op, inputs, attrs if op in ("RandomUniformInt", "RandomGamma") else dict(attrs, dtype=dtype))
    name = "/".join(p for p in (op, dtype, label) if p)
    a.program(name, nodes, [{"fetch": ["op"]}] * n_runs, ops=[op], exact=exact)


def gammas(a):
    alphas = [0.3, 0.999, 1.0, 1.5, 7.0]
    for d in ("float32", "float64", "float16"):
        for label, shape, alpha in (("few", [3], alphas), ("matrix", [2, 2], [alphas]), ("scalar", [5], 2.5), ("none", [0], alphas), ("one", [], alphas),
                                    ("no-alphas", [4], []), ("wrong", [2], [0.0, -1.0, NAN, 1.0])):
            seeded(a, "RandomGamma", np.array(shape, np.int32), label, dtype=d, extra=[array(alpha, d)], seed=3, seed2=4)
    seeded(a, "RandomGamma", array([6]), "other-seed", dtype="float32", extra=[array(alphas, "float32")], seed=-87654321, seed2=0)
    a.op("RandomGamma", array([-1]), array([1.0]), label="negative", error=True)
    a.op("RandomGamma", array([[1]]), array([1.0]), label="matrix-shape", error=True)
    a.op("RandomGamma", array(2), array([1.0]), label="scalar-shape", error=True)
    a.op("RandomGamma", array([2.0]), array([1.0]), label="float-shape", error=True)
    a.op("RandomGamma", array([2]), array([1]), label="integers", error=True)


def truncated(a):
    """Only the distribution is the same: moments and bounds are compared, and one case with the numbers is in known.txt."""
    op = "ParameterizedTruncatedNormal"
    for d in registered_dtypes(op, "dtype"):
        for label, given in (("even", (0.0, 1.0, -1.0, 1.0)), ("wide", (0.0, 1.0, -3.0, 5.0)), ("narrow", (5.0, 2.0, 4.0, 4.5)), ("tail", (0.0, 1.0, 3.0, 9.0)),
                             ("low-tail", (1.0, 0.5, -4.0, -1.0)), ("half", (0.0, 1.0, 0.0, INF))):
            if d in ("float16", "bfloat16") and label != "even":
                continue
            n = Nodes()
            names = [n.const(f"in/{i}", array(v, d)) for i, v in enumerate(given)]
            n.op("op", op, [n.const("shape", array([2, 10000])), *names], {"seed": 3, "seed2": 4})
            n.op("wide", "Cast", ["op"], {"DstT": "float64"})
            n.op("square", "Square", ["wide"])
            all_of = n.const("axes", array([0, 1]))
            n.op("mean", "Mean", ["wide", all_of])
            n.op("mean2", "Mean", ["square", all_of])
            n.op("least", "GreaterEqual", ["op", names[2]])
            n.op("most", "LessEqual", ["op", names[3]])
            n.op("above", "All", ["least", all_of])
            n.op("below", "All", ["most", all_of])
            a.program(f"{op}/{d}/{label}", n, [{"fetch": ["mean", "mean2", "above", "below"]}] * 2, ops=[op], atol=0.04, rtol=0.005)
    n = Nodes()
    rows = [array([0.0, 100.0, -50.0]), array([1.0, 2.0, 0.1]), array([-1.0, 99.0, -50.1]), array([1.0, 101.0, -50.0])]
    n.op("op", op, [n.const("shape", array([3, 4000])), *[n.const(f"in/{i}", v) for i, v in enumerate(rows)]], {"seed": 3, "seed2": 4})
    n.op("mean", "Mean", ["op", n.const("axis", array([1]))])
    a.program(f"{op}/rows", n, [{"fetch": ["mean"]}], ops=[op], atol=0.05)
    n = Nodes()
    n.op("op", op, [n.const("shape", array([2, 3])), *[n.const(f"in/{i}", array(v)) for i, v in enumerate((0.0, 1.0, -1.0, 1.0))]], {"seed": 3, "seed2": 4})
    a.program(f"{op}/numbers", n, [{"fetch": ["op"]}], ops=[op], exact=True)
    zero, one = array(0.0), array(1.0)
    a.op(op, array([0, 3]), zero, one, -one, one, label="no-rows", seed=1, seed2=1)
    a.op(op, array([2, 0]), zero, one, -one, one, label="no-columns", seed=1, seed2=1)
    for label, shape, given in (("no-shape", np.zeros([0], np.int32), (zero, one, -one, one)), ("lengths", array([2, 3]), (array([0.0, 0.0, 0.0]), one, -one, one)),
                                ("matrix", array([2, 3]), (array([[0.0], [0.0]]), one, -one, one)), ("deviation", array([2, 3]), (zero, -one, -one, one)),
                                ("bounds", array([2, 3]), (zero, one, one, -one)), ("nan", array([2, 3]), (zero, one, array(NAN), one)),
                                ("same-bounds", array([2, 3]), (zero, one, one, one)), ("negative", array([-1]), (zero, one, -one, one)),
                                ("scalar-shape", array(3), (zero, one, -one, one)), ("integers", array([3]), (array(0), array(1), array(-1), array(1)))):
        a.op(op, shape, *given, label=label, seed=1, seed2=1, error=True)


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
    gammas(a)
    truncated(a)
