"""Cases of crates/kolo-ops/src/math."""

import numpy as np

from harness import FLOATS, INTS, NUMBERS, array, registered_dtypes, values

NAN, INF = float("nan"), float("inf")

# op: (lo, hi) where it is smooth; None for the usual range.
UNARY = {
    "Abs": None, "Neg": None, "Sign": None, "Square": None, "Reciprocal": (0.5, 4), "Inv": (0.5, 4), "Sqrt": (0.1, 9),
    "Rsqrt": (0.1, 9), "Exp": None, "Expm1": None, "Log": (0.1, 9), "Log1p": (-0.5, 9), "Floor": None, "Ceil": None,
    "Round": None, "Rint": None, "Sin": None, "Cos": None, "Tan": (-1, 1), "Asin": (-0.9, 0.9), "Acos": (-0.9, 0.9),
    "Atan": None, "Sinh": None, "Cosh": None, "Tanh": None, "Sigmoid": None, "Erf": None, "Erfc": None,
    "Lgamma": (0.1, 6), "Digamma": (0.6, 6), "IsNan": None, "IsInf": None, "IsFinite": None,
}

# Where Eigen's approximations are coarser than ours: relative tolerance of float32.
COARSE = {"Lgamma": 1e-5, "Digamma": 1e-5, "Erfc": 1e-5, "Tan": 4e-6, "Sinh": 4e-6, "Cosh": 4e-6}

BINARY = [
    "Add", "AddV2", "Sub", "Mul", "Maximum", "Minimum", "SquaredDifference", "Equal", "NotEqual", "Less", "LessEqual",
    "Greater", "GreaterEqual",
]
# The second argument is not 0.
DIVIDING = ["Div", "RealDiv", "DivNoNan", "FloorDiv", "TruncateDiv", "FloorMod", "Mod"]
SHAPES = {"same": ([2, 3], [2, 3]), "row": ([2, 3], [3]), "column": ([2, 3], [2, 1]), "scalar": ([2, 3], []),
          "both": ([2, 1, 3], [4, 1]), "empty": ([0, 3], [1, 3])}


def nonzero(dtype, shape, seed=0):
    v = values(dtype, shape, 1, 5, seed)
    if dtype in FLOATS or dtype in ("int8", "int16", "int32", "int64"):
        sign = np.resize(np.array([1, -1], v.dtype), v.shape)
        return (v * sign).astype(v.dtype)
    return v


def unary(a):
    for op, span in UNARY.items():
        kw = {"rtol": COARSE[op], "atol": COARSE[op]} if op in COARSE else {}
        for d in registered_dtypes(op, "T"):
            lo, hi = span or (None, None)
            if d in INTS and span:
                lo, hi = 1, 5
            a.op(op, values(d, [2, 5], lo, hi), dtype=d, **kw)
        for d in ("float32", "float64", "float16", "bfloat16"):
            if d in registered_dtypes(op, "T"):
                special = array([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 100.0, -100.0, 1e-4], d)
                a.op(op, special, dtype=d, label="special", grad=False, **kw)
        a.op(op, np.zeros([0, 3], np.float32), label="empty")
        a.op(op, array(0.75), label="scalar", **kw)
    for op in ("SigmoidGrad", "TanhGrad", "SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad"):
        a.each(op, lambda d: [values(d, [6], 0.2, 0.9), values(d, [6], seed=1)], dtypes=FLOATS)
        a.op(op, np.zeros([0], np.float32), np.zeros([0], np.float32), label="empty")
    for d in ("int8", "int16", "int32", "int64"):
        top = np.iinfo(d)
        for op in ("Abs", "Neg", "Square", "Sign"):
            a.op(op, np.array([top.min, top.max, 0, -1], d), dtype=d, label="limits")


def binary(a):
    for op in BINARY + DIVIDING:
        second = nonzero if op in DIVIDING else lambda d, s, seed=0: values(d, s, seed=seed)
        a.each(op, lambda d: [values(d, [2, 3]), second(d, [2, 3], seed=1)])
        for label, (left, right) in SHAPES.items():
            for d in ("float32", "int32"):
                if d in registered_dtypes(op, "T"):
                    a.op(op, values(d, left), second(d, right, seed=1), dtype=d, label=label)
                    if label != "same":
                        a.op(op, values(d, right), second(d, left, seed=1), dtype=d, label=label + "-swapped")
        d = "int32" if op == "TruncateDiv" else "float32"
        a.op(op, values(d, [2, 3]), second(d, [2], seed=1), label="mismatch", dtype=d, error=True)
    special = np.array([NAN, INF, -INF, 0.0, -0.0, 1.0, -2.0], np.float32)
    for op in BINARY + ["Div", "RealDiv", "DivNoNan", "FloorDiv", "FloorMod", "Mod", "Pow", "Atan2"]:
        for d in ("float32", "float16", "bfloat16"):
            if d in registered_dtypes(op, "T"):
                x, y = np.repeat(special, len(special)), np.tile(special, len(special))
                a.op(op, array(x, d), array(y, d), dtype=d, label="special", grad=False)
    for op in ("Div", "FloorDiv", "TruncateDiv", "FloorMod", "Mod"):
        a.op(op, array([1, 2]), array([1, 0]), label="by-zero", error=True)
        a.op(op, array([7, -7, 7, -7, 6, -6, 0]), array([3, 3, -3, -3, 3, 3, 5]), label="signs")
        if op != "TruncateDiv":
            a.op(op, array([7.5, -7.5, 7.5, -7.5]), array([3.0, 3.0, -3.0, -3.0]), label="signs-float")
    for op in ("Add", "Mul", "Sub"):
        a.op(op, np.array([2**31 - 1, -(2**31)], np.int32), np.array([2, 3], np.int32), label="wraps")
    a.each("Pow", lambda d: [values(d, [2, 3], 0.5, 3) if d in FLOATS else values(d, [2, 3], -3, 3),
                             values(d, [2, 3], 0 if d in INTS else -2, 3, seed=1)])
    a.op("Pow", array([2, 3]), array([1, -1]), label="negative", error=True)
    a.op("Pow", array([-2.0, -2.0, 0.0, 0.0]), array([2.0, 3.0, 2.0, 0.0]), label="negative-base")
    a.op("Pow", values("float64", [2, 1, 3], 0.5, 3), values("float64", [4, 1]), label="broadcast")
    a.each("Atan2", lambda d: [values(d, [2, 3]), nonzero(d, [3])], dtypes=FLOATS)
    for op in ("Equal", "NotEqual"):
        a.op(op, array([1.0, 2.0]), array([1.0, 2.0, 3.0]), label="incompatible", incompatible_shape_error=False)
        a.op(op, array([1.0, 2.0]), array([1.0, 2.0, 3.0]), label="incompatible-error", error=True)
        a.op(op, array([1.0, 2.0]), array([1.0, 3.0]), label="compatible", incompatible_shape_error=False)
    for op in ("LogicalAnd", "LogicalOr"):
        for label, (left, right) in SHAPES.items():
            a.op(op, values("bool", left), values("bool", right, seed=1), label=label)
    a.op("LogicalNot", values("bool", [5]))
    a.op("LogicalNot", np.zeros([0], bool), label="empty")


def reductions(a):
    shapes = {"rows": [1], "columns": [0], "all": [0, 1], "none": [], "negative": [-1], "both-negative": [-1, -2]}
    for op in ("Sum", "Mean", "Prod", "Max", "Min", "EuclideanNorm"):
        loose = {"rtol": 4e-3} if op == "EuclideanNorm" else {}
        a.each(op, lambda d: [values(d, [3, 4], 1 if op == "Prod" else None, 3), array([1])],
               dtypes=NUMBERS, rtol=1e-6)
        for label, axes in shapes.items():
            a.op(op, values("float32", [3, 4], 0.5, 3), np.array(axes, np.int32), label=label)
            a.op(op, values("float32", [3, 4], 0.5, 3), np.array(axes, np.int64), label=label + "-keep", keep_dims=True)
        a.op(op, values("float64", [2, 3, 4, 2], 0.5, 2), array([1, 3]), label="inner", rtol=1e-12)
        a.op(op, values("float64", [2, 3, 4, 2], 0.5, 2), array([0, 2]), label="outer", rtol=1e-12)
        a.op(op, values("float32", [2, 3]), array(1), label="scalar-axis")
        a.op(op, np.zeros([0, 3], np.float32), array([0]), label="empty-axis")
        a.op(op, np.zeros([0, 3], np.float32), array([1]), label="empty-result", grad=False)
        a.op(op, array([[NAN, 1.0], [INF, 2.0], [-INF, INF], [-INF, -INF]]), array([1]), label="special", grad=False)
        a.op(op, array(3.0), np.array([], np.int32), label="scalar")
        a.op(op, values("float32", [2, 3]), array([2]), label="axis-too-large", error=True)
        a.op(op, values("float32", [2, 3]), array([-3]), label="axis-too-small", error=True)
        a.op(op, values("float32", [2, 3]), array([0, 0]), label="axis-twice", error=True)
        a.op(op, values("float32", [2, 3]), array([0, -2]), label="axis-twice-negative", error=True)
        a.op(op, values("float32", [2, 3]), array([[0], [1]]), label="axis-matrix", error=True)
        del loose
    for op in ("Max", "Min"):
        a.op(op, array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), array([1]), label="ties")
    a.op("Prod", array([[2.0, 0.0, 3.0], [0.0, 0.0, 1.0], [1.0, 2.0, 3.0]]), array([1]), label="zeros")
    a.op("Mean", np.array([7, -7, 8], np.int32), array([0]), label="integer", dtype="int32")
    a.op("Mean", np.array([250, 250, 3], np.uint8), array([0]), label="integer", dtype="uint8")
    for op in ("All", "Any"):
        for label, axes in shapes.items():
            a.op(op, values("bool", [3, 4]), np.array(axes, np.int32), label=label)
            a.op(op, values("bool", [3, 4]), np.array(axes, np.int64), label=label + "-keep", keep_dims=True)
        a.op(op, np.zeros([0, 3], bool), array([0]), label="empty-axis")
        a.op(op, values("bool", [3, 4]), array([2]), label="axis-too-large", error=True)
    for op in ("ArgMax", "ArgMin"):
        a.each(op, lambda d: [values(d, [3, 4]), array(1)])
        for axis in (0, 1, 2, -1, -3):
            a.op(op, values("float32", [2, 3, 4]), array(axis), label=f"axis{axis}")
        for out in registered_dtypes(op, "output_type"):
            a.op(op, values("float32", [2, 3]), np.array(0, np.int64), label=f"to-{out}", output_type=out)
        a.op(op, array([3.0, 1.0, 3.0, 1.0]), array(0), label="ties")
        a.op(op, array([[1.0, NAN, 2.0], [NAN, 1.0, 0.0]]), array(1), label="nan")
        a.op(op, array([[INF, 2.0], [-INF, -INF]]), array(1), label="infinite")
        a.op(op, array(3.0), array(0), label="scalar", error=True)
        a.op(op, values("float32", [2, 3]), array(2), label="axis-too-large", error=True)
        a.op(op, np.zeros([2, 0], np.float32), array(1), label="empty-axis", error=True)
        a.op(op, np.zeros([0, 2], np.float32), array(1), label="empty")
    for op in ("Cumsum", "Cumprod"):
        a.each(op, lambda d: [values(d, [3, 4], -2, 2) if not d.startswith("u") else values(d, [3, 4], 0, 2), array(1)],
               rtol=1e-6)
        for axis in (0, 1, 2, -1):
            for exclusive in (False, True):
                for reverse in (False, True):
                    a.op(op, values("float64", [2, 3, 2], 0.5, 2), array(axis), exclusive=exclusive, reverse=reverse,
                         label=f"axis{axis}" + "-exclusive" * exclusive + "-reverse" * reverse, rtol=1e-12)
        a.op(op, array([1.0, 0.0, 2.0]), array(0), label="zero", grad=op == "Cumsum")
        a.op(op, np.zeros([0, 2], np.float32), array(0), label="empty")
        a.op(op, np.zeros([2], np.float32), array(1), label="axis-too-large", error=True)
        a.op(op, array([1.0, 2.0]), array([0, 0]), label="axis-vector", error=True)
    a.each("L2Loss", lambda d: values(d, [2, 3]))
    a.op("L2Loss", np.zeros([0], np.float32), label="empty")


def products(a):
    a.each("MatMul", lambda d: [values(d, [2, 3]), values(d, [3, 4], seed=1)])
    for ta in (False, True):
        for tb in (False, True):
            x, y = values("float32", [3, 2] if ta else [2, 3]), values("float32", [4, 3] if tb else [3, 4], seed=1)
            a.op("MatMul", x, y, label=f"transpose{int(ta)}{int(tb)}", transpose_a=ta, transpose_b=tb)
            x = values("float64", [2, 3, 2] if ta else [2, 2, 3])
            y = values("float64", [2, 4, 3] if tb else [2, 3, 4], seed=1)
            for op in ("BatchMatMul", "BatchMatMulV2"):
                a.op(op, x, y, label=f"adjoint{int(ta)}{int(tb)}", adj_x=ta, adj_y=tb)
    for label, left, right in (("one", [1, 1], [1, 1]), ("no-inner", [2, 0], [0, 3]), ("no-rows", [0, 2], [2, 3]),
                               ("odd", [7, 13], [13, 5]), ("vector", [1, 17], [17, 1])):
        a.op("MatMul", values("float32", left), values("float32", right, seed=1), label=label)
    a.op("MatMul", values("float32", [2, 3]), values("float32", [2, 3]), label="mismatch", error=True)
    a.op("MatMul", values("float32", [3]), values("float32", [3, 2]), label="vector-left", error=True)
    a.op("MatMul", values("float32", [1, 2, 3]), values("float32", [3, 2]), label="rank3", error=True)
    a.op("MatMul", array([[NAN, 1.0], [INF, 0.0]]), array([[0.0, 1.0], [0.0, 2.0]]), label="special", grad=False)
    for op in ("BatchMatMul", "BatchMatMulV2"):
        a.each(op, lambda d: [values(d, [2, 2, 3]), values(d, [2, 3, 2], seed=1)])
        a.op(op, values("float32", [2, 3]), values("float32", [3, 2]), label="rank2")
        a.op(op, values("float32", [0, 2, 3]), values("float32", [0, 3, 2]), label="empty")
        a.op(op, values("float32", [2, 2, 3]), values("float32", [2, 2, 2]), label="mismatch", error=True)
        a.op(op, values("float32", [3]), values("float32", [3, 2]), label="vector", error=True)
    a.op("BatchMatMul", values("float32", [2, 2, 3]), values("float32", [1, 3, 2]), label="batch", error=True)
    a.op("BatchMatMulV2", values("float32", [2, 2, 3]), values("float32", [1, 3, 2]), label="broadcast")
    a.op("BatchMatMulV2", values("float32", [2, 1, 2, 3]), values("float32", [4, 3, 2]), label="broadcast-both")
    a.op("BatchMatMulV2", values("float32", [2, 2, 3]), values("float32", [3, 3, 2]), label="batch", error=True)
    a.each("Cross", lambda d: [values(d, [2, 3]), values(d, [2, 3], seed=1)])
    a.op("Cross", values("float32", [2, 2]), values("float32", [2, 2]), label="two", error=True)
    a.op("Cross", values("float32", [2, 3]), values("float32", [3]), label="shapes", error=True)


def segments(a):
    ids = array([0, 0, 1, 3])
    for op in ("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd"):
        a.each(op, lambda d: [values(d, [4, 2]), ids], grad=False)
        a.op(op, values("float32", [4, 2], 1, 3), array([0, 0, 1, 1]), label="rows", rtol=1e-6)
        a.op(op, values("float64", [4, 2, 3], 1, 3), ids.astype(np.int64), label="gap", rtol=1e-12)
        a.op(op, values("float32", [4], 1, 3), array([0, 1, 1, 2]), label="vector")
        a.op(op, np.zeros([0, 2], np.float32), np.zeros([0], np.int32), label="empty")
        a.op(op, values("float32", [4, 2]), array([0, 1, 0, 1]), label="unsorted", error=True)
        a.op(op, values("float32", [4, 2]), array([-1, 0, 1, 2]), label="negative", error=True)
        a.op(op, values("float32", [4, 2]), array([0, 1, 2]), label="short", error=True)
    for op in ("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"):
        a.each(op, lambda d: [values(d, [4, 2]), array([2, 0, 2, -1]), array(4)], grad=False)
        a.op(op, values("float32", [4, 2], 1, 3), array([2, 0, 2, 1]), array(3), label="rows")
        a.op(op, values("float32", [4, 2], 1, 3), array([2, 0, 2, -1]), array(4), label="dropped",
             grad=op != "UnsortedSegmentProd")
        a.op(op, values("float64", [2, 2, 3], 1, 3), np.array([[2, 0], [2, 1]], np.int64), array(3), label="matrix-ids")
        a.op(op, np.zeros([0, 2], np.float32), np.zeros([0], np.int32), array(2), label="empty")
        a.op(op, values("float32", [2]), array([0, 5]), array(2), label="too-large", error=True)
        a.op(op, values("float32", [2]), array([0, 1]), array(-1), label="negative-number", error=True)
        a.op(op, values("float32", [2, 3]), array([0, 1, 1]), array(2), label="shape", error=True)
    a.op("UnsortedSegmentProd", array([2.0, 0.0, 3.0, 0.0, 4.0]), array([0, 0, 1, 1, 1]), array(2), label="zeros")
    a.op("UnsortedSegmentMax", array([2.0, 2.0, 1.0]), array([0, 0, 0]), array(1), label="ties")
    for op in ("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"):
        a.each(op, lambda d: [values(d, [3, 2]), array([2, 0, 2, 1]), array([0, 0, 0, 2])], grad=False)
        a.op(op, values("float32", [3, 2]), array([2, 0, 2, 1]), array([0, 0, 1, 1]), label="rows")
        a.op(op, values("float32", [3, 2]), np.array([2, 0], np.int64), np.array([0, 1], np.int64), label="wide-ids")
        a.op(op, values("float32", [3, 2]), np.zeros([0], np.int32), np.zeros([0], np.int32), label="empty",
             grad=False)  # TensorFlow leaves that gradient uninitialised.
        a.op(op, values("float32", [3, 2]), array([3]), array([0]), label="index", error=True)
        a.op(op, values("float32", [3, 2]), array([1, 1]), array([1, 0]), label="unsorted", error=True)
        a.op(op, values("float32", [3, 2]), array([1, 1]), array([0]), label="lengths", error=True)


def others(a):
    a.each("ClipByValue", lambda d: [values(d, [2, 3]), values(d, [], 1, 1), values(d, [], 2, 2)])
    a.op("ClipByValue", values("float32", [2, 3]), array([-1.0, -2.0, 0.0]), array([1.0, 0.0, 2.0]), label="rows",
         error=True)
    a.op("ClipByValue", values("float32", [3]), array([-1.0, -2.0, 0.0]), array([1.0, 0.0, 2.0]), label="same")
    a.op("ClipByValue", array([NAN, INF, -INF, 0.5]), array(-1.0), array(1.0), label="special", grad=False)
    a.each("TopKV2", lambda d: [values(d, [2, 5]), array(2)], dtypes=NUMBERS, grad=False)
    a.op("TopKV2", array([1.0]), array(2), label="too-few", error=True)
    a.op("TopKV2", array(1.0), array(2), label="scalar", error=True)
    for label, x in (("rows", values("float32", [2, 5])), ("ties", array([1.0, 3.0, 3.0, 2.0, 3.0])),
                     ("infinite", array([-INF, INF, 0.0, 1.0]))):
        a.op("TopKV2", x, array(2), label=label)
        # TensorFlow no longer runs the first version.
        a.op("TopK", x, label=label, k=2, expected=a.compute("TopKV2", x, array(2)))
    a.op("TopKV2", values("float32", [2, 2, 3]), array(3), label="all")
    a.op("TopKV2", values("float32", [3]), array(0), label="none")
    a.op("TopKV2", values("float32", [3]), array(-1), label="negative", error=True)
    a.op("TopKV2", values("float32", [4]), np.array(2, np.int64), label="wide-k", index_type="int64", grad=False)
    predictions = array([[0.1, 0.3, 0.2], [0.3, 0.1, 0.2], [0.2, 0.2, 0.2], [NAN, 0.1, 0.2]])
    for k in (0, 1, 2, 3, 5):
        for t in (np.int32, np.int64):
            targets = np.array([1, 1, 0, 2], t)
            a.op("InTopK", predictions, targets, label=f"k{k}", dtype=np.dtype(t).name, k=k)
            a.op("InTopKV2", predictions, targets, np.array(k, t), label=f"k{k}", dtype=np.dtype(t).name)
    a.op("InTopK", predictions, array([1, 7, -1, 0]), label="out-of-range", k=1)
    a.op("InTopK", predictions, array([1, 1]), label="lengths", k=1, error=True)
    a.each("Bincount", lambda d: [array([1, 2, 2, 5, 1]), array(4), values(d, [5])])
    a.op("Bincount", array([1, 2, 2]), array(4), np.zeros([0], np.float32), label="unweighted")
    a.op("Bincount", array([1, -2, 2]), array(4), np.zeros([0], np.float32), label="negative", error=True)
    a.op("Bincount", array([1, 2]), array(-1), np.zeros([0], np.float32), label="size", error=True)
    a.op("Bincount", array([1, 2]), array(3), array([1.0]), label="weights", error=True)
    for n in (1, 2, 3):
        a.each("AddN", lambda d: [[values(d, [2, 3], seed=i) for i in range(n)]], dtypes=NUMBERS, label=f"n{n}")
    a.op("AddN", [values("float32", [2]), values("float32", [3])], label="shapes", error=True)
    a.op("AccumulateNV2", [values("float32", [2]), values("float32", [2], seed=1)], shape=[2], feed=False)
    for t in (np.int32, np.int64):
        for label, s0, s1 in (("same", [2, 3], [2, 3]), ("row", [2, 3], [3]), ("both", [2, 1, 3], [4, 1]),
                              ("scalar", [], [2]), ("ones", [1, 1], [1]), ("empty", [0, 3], [1])):
            for op in ("BroadcastGradientArgs", "BroadcastArgs"):
                a.op(op, np.array(s0, t), np.array(s1, t), label=label, dtype=np.dtype(t).name)
    a.op("BroadcastArgs", array([2, 3]), array([2]), label="mismatch", error=True)
    a.op("BroadcastGradientArgs", array([2, 3]), array([2]), label="mismatch", error=True)


def cases(a):
    unary(a)
    binary(a)
    reductions(a)
    products(a)
    segments(a)
    others(a)
