"""Cases of ops that are one call of TensorFlow's API each, of several areas: bits, guarded products, rolls, blocks, diagonals, scattered
tensors, places in sorted rows, orders of dimensions, tensors as bytes, old batch normalisation, fake quantisation."""

import numpy as np
import tensorflow as tf

from harness import FLOATS, Nodes, array, registered_dtypes, values

NAN, INF = float("nan"), float("inf")
F = lambda *shape, seed=0: values("float32", list(shape), seed=seed)
I = lambda *shape, seed=0: values("int32", list(shape), seed=seed)
L = lambda x: array(x, "int64")


def elementwise(a):
    for op, lo, hi in (("Asinh", -4, 4), ("Acosh", 1, 6), ("Atanh", -0.9, 0.9)):
        for d in registered_dtypes(op, "T"):
            if d in FLOATS:
                a.op(op, values(d, [2, 5], lo, hi), dtype=d, rtol=1e-5, atol=1e-5, half_atol=2e-2)
        a.op(op, array([NAN, INF, -INF, 0.0, 1.0, -1.0, 2.0]), label="special", grad=False)
        a.op(op, np.zeros([0, 3], np.float32), label="empty")
    guarded = ("MulNoNan", "Xdivy", "Xlogy", "Xlog1py")
    for op in guarded:
        for d in registered_dtypes(op, "T"):
            if d in FLOATS:
                a.op(op, values(d, [2, 4]), values(d, [4], 0.5, 3, seed=1), dtype=d, rtol=1e-5, atol=1e-5, half_atol=4e-2)
        a.op(op, array([0.0, 0.0, 0.0, 2.0]), array([NAN, INF, 0.0, 0.0]), label="zeros", grad=False)
        a.op(op, array([NAN, INF, 1.0]), array(0.0), label="right", grad=False)
        a.op(op, F(2, 1), values("float32", [3], 1, 2), label="both")
    a.op("Xlogy", array([0.0, 2.0]), array([2.0, 3.0]), label="gradient-at-zero")
    a.each("TruncateMod", lambda d: [values(d, [8], -7 if d[0] != "u" else 0, 7), values(d, [8], 1, 5, seed=1)], exact=True)
    a.op("TruncateMod", array([1]), array([0]), label="by-zero", error=True)
    for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        a.each(op, lambda d: [values(d, [3, 4], 0, 100), values(d, [4], 0, 100, seed=1)])
    for op in ("LeftShift", "RightShift"):
        a.each(op, lambda d: [values(d, [3, 6], 0 if d[0] == "u" else -100, 100), array([0, 1, 3, 5, 6, 7], d)])
        a.op(op, array([-3, 5, 100]), array([31, -1, 40]), label="far")
        a.op(op, array([-3, 5, 100], "int8"), array([7, -1, 40], "int8"), label="far-bytes")
    a.each("Invert", lambda d: values(d, [6], 0 if d[0] == "u" else -100, 100))
    a.each("PopulationCount", lambda d: values(d, [6], 0 if d[0] == "u" else -100, 100))
    for d in ("float32", "float64"):
        x = array([1.0, -1.0, 0.0, -0.0, 2.5, INF, -INF, NAN, 3.0], d)
        a.op("NextAfter", x, array([2.0, 2.0, 1.0, -1.0, 2.5, 0.0, 0.0, 1.0, NAN], d), dtype=d, exact=True)
    a.op("NextAfter", F(2, 3), F(3, seed=1), label="row")
    for d in registered_dtypes("ApproximateEqual", "T"):
        a.op("ApproximateEqual", array([1, 2, 3, 4], d), array([1, 3, 3, 2], d), dtype=d, tolerance=1.5)
    a.op("ApproximateEqual", array([1.0, NAN, 2.0]), array([1.000001, NAN, 2.1]), label="default")
    a.op("ApproximateEqual", F(2), F(3), label="shapes", error=True)


def places(a):
    a.each("NthElement", lambda d: [values(d, [2, 7]), array(3)], grad=False)
    for n in (0, 2, 4):
        a.op("NthElement", F(3, 5), array(n), label=f"n{n}")
        a.op("NthElement", F(3, 5), array(n), label=f"n{n}-reverse", reverse=True)
    a.op("NthElement", array([1.0, 1.0, 0.0, 1.0]), array(2), label="ties")
    a.op("NthElement", F(3), array(3), label="beyond", error=True)
    a.op("NthElement", F(3), array(-1), label="negative", error=True)
    a.op("NthElement", F(), array(0), label="scalar", error=True)
    rows = lambda d: np.sort(values(d, [2, 6]), axis=1)
    for op in ("LowerBound", "UpperBound"):
        for d in registered_dtypes(op, "T"):
            if d not in ("string", "bool"):
                a.op(op, rows(d), values(d, [2, 4], seed=1), dtype=d)
        a.op(op, rows("float32"), F(2, 4), label="wide", out_type="int64")
        a.op(op, F(1, 0), F(1, 3), label="empty-row")
        a.op(op, rows("float32"), F(2, 0), label="no-values")
        a.op(op, rows("float32"), F(3, 4), label="batch", error=True)
        a.op(op, F(3), F(3), label="vector", error=True)
    a.op("UnravelIndex", array([22, 41, 37]), array([7, 6]))
    a.op("UnravelIndex", L(1621), L([6, 7, 8, 9]), label="scalar")
    a.op("UnravelIndex", array([42]), array([7, 6]), label="beyond", error=True)
    a.op("UnravelIndex", array([[1]]), array([7, 6]), label="matrix", error=True)
    a.op("UnravelIndex", array([0]), array([7, 0]), label="zero", error=True)
    for d in ("int32", "int64"):
        a.op("DataFormatVecPermute", array([7, 4, 9, 3], d), dtype=d)
        a.op("DataFormatVecPermute", array([[7, 4], [9, 3], [4, 5], [5, 1]], d), dtype=d, label="pairs", src_format="NCHW", dst_format="NHWC")
        a.op("DataFormatDimMap", array([0, 1, 2, 3, -1, -2, -3, -4], d), dtype=d)
    a.op("DataFormatVecPermute", array([7, 4]), label="spatial")
    a.op("DataFormatVecPermute", array([7, 4]), label="spatial-turned", src_format="NHWC", dst_format="NCWH")
    a.op("DataFormatVecPermute", array([7, 4, 9, 3, 2]), label="volumes", src_format="NDHWC", dst_format="NCDHW")
    a.op("DataFormatVecPermute", array([7, 4, 9]), label="size", error=True)
    a.op("DataFormatDimMap", array([0, 1, 2, 3, 4]), label="volumes", src_format="NDHWC", dst_format="NCDHW")


def moves(a):
    a.op("EnsureShape", F(2, 3), shape=[2, 3])
    a.op("EnsureShape", F(2, 3), label="partly", shape=[None, 3])
    a.op("EnsureShape", values("string", [2]), label="string", shape=[None])
    a.op("EnsureShape", F(2, 3), label="size", shape=[None, 2], error=True)
    a.op("EnsureShape", F(2, 3), label="rank", shape=[6], error=True)
    a.each("Roll", lambda d: [values(d, [3, 4]), array(1), array(1)], grad=False)
    for label, shift, axis in (("rows", 1, 0), ("back", -2, -1), ("both", [1, -1], [0, 1]), ("twice", [1, 2], [1, 1]), ("far", 100, 0),
                               ("none", [], [])):
        a.op("Roll", F(3, 4), array(shift, "int32"), array(axis, "int32"), label=label)
    a.op("Roll", F(2, 3, 4), L([1, 1, 1]), L([0, 1, 2]), label="rank3")
    a.op("Roll", F(0, 3), array(1), array(0), label="empty")
    a.op("Roll", F(3), array(1), array(1), label="axis", error=True)
    a.op("Roll", F(3), array([1]), array(0), label="sizes", error=True)
    a.op("Roll", F(), array(1), array(0), label="scalar", error=True)
    for op, shape in (("SpaceToDepth", [2, 4, 6, 3]), ("DepthToSpace", [2, 2, 3, 8])):
        a.each(op, lambda d: values(d, shape), block_size=2, grad=False)
        a.op(op, F(*shape), label="gradient", block_size=2)
        a.op(op, F(0, *shape[1:]), label="empty", block_size=2)
        a.op(op, F(1, 3, 3, 3), label="size", block_size=2, error=True)
        a.op(op, F(4, 4), label="rank", block_size=2, error=True)
    a.op("SpaceToDepth", F(1, 6, 3, 2), label="three", block_size=3)
    for d in ("float32", "int32", "string"):
        a.op("ParallelConcat", [values(d, [1, 2]), values(d, [1, 2], seed=1)], dtype=d, shape=[2, 2], grad=False)
    a.op("GuaranteeConst", F(2, 3))
    a.op("DeepCopy", F(2, 3), grad=False)
    zeros = Nodes()
    zeros.op("op", "Empty", [zeros.const("in/0", array([2, 3]))], {"dtype": "float32", "init": True})
    a.program("Empty", zeros, [{"fetch": ["op"]}])
    for op in ("InplaceUpdate", "InplaceAdd", "InplaceSub"):
        for d in ("float32", "int32", "float64"):
            a.op(op, values(d, [3, 2]), array([2, 0]), values(d, [2, 2], seed=1), dtype=d, grad=False)
        a.op(op, F(3, 2), array([2, -1]), F(3, 2), label="count", error=True)
        a.op(op, F(3, 2), array([1]), F(1, 3), label="row", error=True)
    indices = array([[1], [3], [0]])
    for op in ("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub", "TensorScatterMin", "TensorScatterMax", "ScatterNdNonAliasingAdd"):
        a.each(op, lambda d: [values(d, [4, 2]), indices, values(d, [3, 2], seed=1)], grad=False)
        a.op(op, F(4), indices, F(3, seed=1), label="gradient")
        a.op(op, F(2, 3), L([[1, 2], [0, 0]]), F(2, seed=1), label="elements")
        a.op(op, F(2, 3), np.zeros([0, 1], np.int32), F(0, 3), label="none")
        a.op(op, F(4), array([[4]]), F(1), label="range", error=True)
        a.op(op, F(4), array([[-1]]), F(1), label="negative", error=True)
        a.op(op, F(4), array([[1]]), F(2), label="sizes", error=True)
    for op in ("TensorScatterAdd", "TensorScatterSub", "TensorScatterMax"):
        a.op(op, F(4), array([[1], [1], [3]]), F(3, seed=1), label="twice")


def diagonals(a):
    for d in ("float32", "int32", "bool"):
        a.op("MatrixSetDiag", values(d, [2, 3, 4]), values(d, [2, 3], seed=1), dtype=d, grad=False)
    a.op("MatrixSetDiag", F(3, 3), F(3, seed=1), label="square")
    a.op("MatrixSetDiag", F(3, 3), F(2), label="size", error=True)
    a.op("MatrixDiagPart", F(2, 3, 4), label="wide")
    packed = {0: [2, 3], 1: [2, 3], -1: [2, 2], (-1, 1): [2, 3, 3], (0, 2): [2, 3, 3], (-2, -1): [2, 2, 2]}
    for k, shape in packed.items():
        label = "k" + ",".join(map(str, np.ravel(k)))
        kk = array(list(k)) if isinstance(k, tuple) else array(k)
        x, diag = F(2, 3, 4), values("float32", shape, seed=2)
        a.op("MatrixDiagPartV2", x, kk, array(7.0), label=label, grad=False)
        a.op("MatrixSetDiagV2", x, diag, kk, label=label)
        a.op("MatrixDiagV2", diag, kk, array(-1), array(-1), array(7.0), label=label, grad=False)
        for align in ("LEFT_RIGHT", "RIGHT_LEFT", "LEFT_LEFT", "RIGHT_RIGHT"):
            a.op("MatrixDiagPartV3", x, kk, array(0.0), label=f"{label}-{align}", align=align)
            a.op("MatrixSetDiagV3", x, diag, kk, label=f"{label}-{align}", align=align)
            a.op("MatrixDiagV3", diag, kk, array(-1), array(-1), array(0.0), label=f"{label}-{align}", align=align)
    a.op("MatrixDiagV3", F(2, 3), array(0), array(5), array(3), array(1.0), label="tall")
    a.op("MatrixDiagV3", F(2, 3), array(0), array(2), array(3), array(1.0), label="few-rows", error=True)
    a.op("MatrixDiagPartV3", F(3, 4), array(4), array(1.0), label="beyond", error=True)
    a.op("MatrixDiagPartV3", F(3, 4), array([1, 0]), array(1.0), label="order", error=True)


def bytes_of(a):
    for d in ("float32", "int64", "bool", "string", "float16", "uint8"):
        x = values(d, [2, 3])
        a.op("SerializeTensor", x, dtype=d)
        proto = tf.make_tensor_proto(x) if d != "string" else tf.make_tensor_proto(x, dtype=tf.string, shape=x.shape)
        a.op("ParseTensor", np.array(proto.SerializeToString(), object), label=d, out_type=d)
    a.op("ParseTensor", np.array(b"\xff\xff", object), label="garbage", out_type="float32", error=True)
    a.op("ParseTensor", np.array(tf.make_tensor_proto(1).SerializeToString(), object), label="type", out_type="float32", error=True)


def normal(a):
    x, m, v, b, g = F(2, 2, 2, 3), F(3), values("float32", [3], 0.5, 2), F(3, seed=1), F(3, seed=2)
    for scale in (True, False):
        kw = {"variance_epsilon": 0.001, "scale_after_normalization": scale, "rtol": 1e-5, "atol": 1e-5}
        a.op("BatchNormWithGlobalNormalization", x, m, v, b, g, label=f"scale{scale}", **kw)
        a.op("BatchNormWithGlobalNormalizationGrad", x, m, v, g, F(2, 2, 2, 3, seed=3), label=f"scale{scale}", grad=False, **kw)
    a.op("BatchNormWithGlobalNormalization", x, F(2), v, b, g, label="size", variance_epsilon=0.001, scale_after_normalization=True, error=True)


def quantised(a):
    x = values("float32", [4, 6], -8, 8)
    for bits, narrow in ((8, False), (8, True), (4, False), (2, True), (16, False)):
        label, kw = f"{bits}-{narrow}", {"num_bits": bits, "narrow_range": narrow}
        a.op("FakeQuantWithMinMaxArgs", x, label=label, min=-5.1, max=6.3, **kw)
        a.op("FakeQuantWithMinMaxVars", x, array(-3.3), array(4.1), label=label, **kw)
        a.op("FakeQuantWithMinMaxVarsPerChannel", x, array([-3.3, 0, 1, -2, -6, 0]), array([4.1, 2, 3, -1, 6, 0]), label=label, **kw)
    a.op("FakeQuantWithMinMaxArgsGradient", F(4, 6), x, grad=False)
    a.op("FakeQuantWithMinMaxVarsGradient", F(4, 6), x, array(-3.3), array(4.1), grad=False)
    a.op("FakeQuantWithMinMaxVarsPerChannelGradient", F(4, 6), x, array([-3.3, 0, 1, -2, -6, 0]), array([4.1, 2, 3, -1, 6, 0]), grad=False)
    a.op("FakeQuantWithMinMaxVars", x, array(0.0), array(0.0), label="nothing")
    a.op("FakeQuantWithMinMaxArgs", x, label="order", min=1.0, max=1.0, error=True)
    a.op("FakeQuantWithMinMaxArgs", x, label="bits", num_bits=1, error=True)
    a.op("FakeQuantWithMinMaxVars", x, array([0.0]), array(1.0), label="rank", error=True)


def cases(a):
    for family in (elementwise, places, moves, diagonals, bytes_of, normal, quantised):
        family(a)
