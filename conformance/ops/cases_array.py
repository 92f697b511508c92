"""Cases of crates/kolo-ops/src/array."""

import numpy as np

from harness import ALL, FLOATS, INTS, NUMBERS, array, registered_dtypes, values

NAN, INF = float("nan"), float("inf")
F = lambda *shape, seed=0: values("float32", list(shape), seed=seed)
I = lambda *shape: values("int32", list(shape))


def copies(a):
    for op in ("Identity", "StopGradient", "PreventGradient", "ZerosLike", "OnesLike"):
        a.each(op, lambda d: values(d, [2, 3]), grad=False)
        a.op(op, np.zeros([0, 2], np.float32), label="empty", grad=False)
    a.op("Identity", F(2, 3), label="gradient")
    a.op("PreventGradient", F(2), label="message", message="no", grad=False)
    a.op("IdentityN", [F(2), I(3), values("string", [2])], label="mixed", grad=False)
    a.op("IdentityN", [F(2), F(3)], label="floats")
    for op in ("Shape", "Size", "Rank"):
        a.each(op, lambda d: values(d, [2, 3]))
        for s in ([], [0], [1, 0, 3]):
            a.op(op, np.zeros(s, np.float32), label="x".join(map(str, s)) or "scalar")
    for op in ("Shape", "Size"):
        a.op(op, F(2, 3), label="wide", out_type="int64")
    a.op("ShapeN", [F(2, 3), F(4), F()])
    a.op("ShapeN", [F(2, 3), F(4)], label="wide", out_type="int64")
    for op in ("CheckNumerics",):
        a.each(op, lambda d: values(d, [2, 3]), message="here")
        for bad in (NAN, INF, -INF):
            a.op(op, array([1.0, bad]), label=f"{bad}", message="here", error=True)
        a.op(op, np.zeros([0], np.float32), label="empty", message="")


def shapes(a):
    a.each("Reshape", lambda d: [values(d, [2, 3]), array([3, 2])], grad=False)
    for label, s in (("inferred", [-1]), ("inferred-part", [3, -1]), ("ones", [1, 2, 1, 3]), ("same", [2, 3])):
        a.op("Reshape", F(2, 3), array(s), label=label)
        a.op("Reshape", F(2, 3), np.array(s, np.int64), label=label + "-wide")
    a.op("Reshape", F(1), np.zeros([0], np.int32), label="to-scalar")
    a.op("Reshape", np.zeros([0, 3], np.float32), array([0, 7]), label="empty")
    a.op("Reshape", np.zeros([0, 3], np.float32), array([3, -1]), label="empty-inferred")
    for label, s in (("size", [4]), ("two-unknown", [-1, -1]), ("not-divisible", [4, -1]), ("negative", [-2, -3])):
        a.op("Reshape", F(2, 3), array(s), label=label, error=True)
    a.op("Reshape", np.zeros([0, 3], np.float32), array([0, -1]), label="zero-and-inferred", grad=False)
    a.op("Reshape", F(2, 3), array([[6]]), label="matrix-shape", error=True)
    for axis in (0, 1, 2, -1, -3):
        a.op("ExpandDims", F(2, 3), array(axis), label=f"axis{axis}")
    a.op("ExpandDims", F(2, 3), np.array(1, np.int64), label="wide")
    a.op("ExpandDims", F(2, 3), array(3), label="too-large", error=True)
    a.op("ExpandDims", F(2, 3), array(-4), label="too-small", error=True)
    a.each("ExpandDims", lambda d: [values(d, [2]), array(0)], grad=False)
    for axes in ([], [0], [2], [0, -2], [-4]):
        a.op("Squeeze", F(1, 2, 1, 3), label="axes" + ",".join(map(str, axes)), squeeze_dims=axes)
    a.op("Squeeze", F(1, 2), label="not-one", squeeze_dims=[1], error=True)
    a.op("Squeeze", F(1, 2), label="too-large", squeeze_dims=[2], error=True)
    a.each("Squeeze", lambda d: values(d, [1, 2]), grad=False)
    for perm in ([1, 0, 2], [2, 1, 0], [0, 1, 2], [1, 2, 0], [2, 0, 1]):
        a.op("Transpose", F(2, 3, 4), array(perm), label="".join(map(str, perm)))
    a.each("Transpose", lambda d: [values(d, [2, 3]), array([1, 0])], grad=False)
    a.op("Transpose", F(2, 3), np.array([1, 0], np.int64), label="wide")
    a.op("Transpose", F(2, 3, 4, 2), array([0, 3, 1, 2]), label="nhwc-nchw")
    a.op("Transpose", F(2, 3, 2, 2, 3), array([4, 2, 0, 3, 1]), label="rank5")
    a.op("Transpose", F(), np.zeros([0], np.int32), label="scalar")
    a.op("Transpose", np.zeros([0, 3], np.float32), array([1, 0]), label="empty")
    a.op("Transpose", F(2, 3), array([-1, -2]), label="negative", grad=False)
    for label, perm in (("short", [0]), ("twice", [0, 0]), ("range", [0, 2])):
        a.op("Transpose", F(2, 3), array(perm), label=label, error=True)
    for op in ("InvertPermutation",):
        a.each(op, lambda d: np.array([2, 0, 1, 3], d), dtypes=INTS)
        a.op(op, np.zeros([0], np.int32), label="empty")
        a.op(op, array([0, 0]), label="twice", error=True)
        a.op(op, array([0, 2]), label="range", error=True)
        a.op(op, array([[0]]), label="matrix", error=True)


def joining(a):
    for axis in (0, 1, -1, -2):
        parts = [F(2, 3), F(2, 3, seed=1)]
        a.op("ConcatV2", parts, array(axis), label=f"axis{axis}")
    a.op("ConcatV2", [F(1, 2), F(3, 2), F(0, 2)], array(0), label="rows")
    a.op("ConcatV2", [F(2, 1), F(2, 4), F(2, 2)], np.array(1, np.int64), label="columns", grad=False)
    a.op("ConcatV2", [F(2, 1, 3), F(2, 4, 3)], array(1), label="middle")
    a.each("ConcatV2", lambda d: [[values(d, [2]), values(d, [1], seed=1)], array(0)], grad=False)
    a.op("ConcatV2", [F(2, 3), F(2, 4)], array(0), label="shapes", error=True)
    a.op("ConcatV2", [F(2, 3), F(2, 3)], array(2), label="axis", error=True)
    a.op("ConcatV2", [F(2), F(2, 3)], array(0), label="ranks", error=True)
    a.op("ConcatV2", [F(), F()], array(0), label="scalars", error=True)
    a.op("Concat", array(1), [F(2, 1), F(2, 4)], label="columns")
    a.op("Concat", array(0), [F(2, 3), F(2, 4)], label="shapes", error=True)
    a.op("ConcatOffset", array(1), [array([2, 1]), array([2, 4]), array([2, 2])])
    a.op("ConcatOffset", array(-1), [array([2, 1]), array([2, 4])], label="negative")
    a.op("ConcatOffset", array(0), [array([2, 1]), array([2, 4])], label="mismatch", error=True)
    a.op("ConcatOffset", array(2), [array([2, 1]), array([2, 1])], label="axis", error=True)
    for axis in (0, 1, 2, -1, -3):
        a.op("Pack", [F(2, 3), F(2, 3, seed=1)], label=f"axis{axis}", axis=axis)
    a.each("Pack", lambda d: [[values(d, [2]), values(d, [2], seed=1)]], grad=False)
    a.op("Pack", [F()], label="one")
    a.op("Pack", [F(2), F(3)], label="shapes", error=True)
    a.op("Pack", [F(2), F(2)], label="axis", axis=2, error=True)
    for axis in (0, 1, -1):
        a.op("Unpack", F(2, 2, 2), label=f"axis{axis}", axis=axis, num=2)
    a.each("Unpack", lambda d: values(d, [2, 3]), grad=False, num=2)
    a.op("Unpack", F(2, 3), label="number", num=3, error=True)
    a.op("Unpack", F(2, 3), label="axis", num=2, axis=2, error=True)
    a.op("Unpack", np.zeros([2, 0], np.float32), label="empty", num=2)
    for axis in (0, 1, -1):
        a.op("Split", array(axis), F(4, 6), label=f"axis{axis}", num_split=2)
    a.each("Split", lambda d: [array(0), values(d, [4])], grad=False, num_split=2)
    a.op("Split", array(1), F(2, 6, 2), label="middle", num_split=3)
    a.op("Split", array(0), F(3), label="one", num_split=1)
    a.op("Split", array(0), F(3), label="uneven", num_split=2, error=True)
    a.op("Split", array(1), F(3), label="axis", num_split=3, error=True)
    # TensorFlow aborts on int8 lengths.
    for d in (np.int32, np.int64):
        if np.dtype(d).name in registered_dtypes("SplitV", "Tlen"):
            a.op("SplitV", F(6, 2), np.array([1, 3, 2], d), array(0), label=f"lengths-{np.dtype(d).name}", num_split=3)
    a.op("SplitV", F(2, 6), array([1, -1, 2]), array(1), label="inferred", num_split=3)
    a.op("SplitV", F(2, 6), array([0, 6]), array(-1), label="empty-part", num_split=2)
    a.op("SplitV", F(6), array([6]), array(0), label="one", num_split=1)
    a.each("SplitV", lambda d: [values(d, [4]), array([1, 3]), array(0)], grad=False, num_split=2)
    a.op("SplitV", F(6), array([1, 3]), array(0), label="sum", num_split=2, error=True)
    a.op("SplitV", F(6), array([-1, -1]), array(0), label="two-unknown", num_split=2, error=True)
    a.op("SplitV", F(6), array([7, -1]), array(0), label="too-large", num_split=2, error=True)


def slicing(a):
    a.each("Slice", lambda d: [values(d, [3, 4]), array([1, 0]), array([2, 3])], grad=False)
    a.op("Slice", F(3, 4), array([1, 1]), array([-1, 2]), label="rest")
    a.op("Slice", F(3, 4), np.array([0, 2], np.int64), np.array([3, 0], np.int64), label="empty")
    a.op("Slice", F(2, 3, 4), array([0, 1, 2]), array([2, 1, 2]), label="rank3")
    for label, begin, size in (("begin", [3, 5], [0, 0]), ("size", [1, 0], [3, 4]), ("negative", [-1, 0], [1, 1]),
                               ("rank", [0], [1]), ("size-negative", [0, 0], [-2, 1])):
        a.op("Slice", F(3, 4), array(begin), array(size), label=label, error=True)
    strided = {
        "plain": ([0, 1], [2, 3], [1, 1], {}),
        "steps": ([0, 0], [3, 4], [2, 3], {}),
        "backwards": ([2, 3], [0, 0], [-1, -2], {}),
        "negative": ([-2, -3], [-1, 4], [1, 1], {}),
        "open": ([5, 5], [7, 7], [1, 1], {"begin_mask": 3, "end_mask": 3}),
        "open-back": ([0, 0], [0, 0], [-1, -1], {"begin_mask": 3, "end_mask": 3}),
        "shrink": ([1, 0], [2, 4], [1, 1], {"shrink_axis_mask": 1}),
        "shrink-last": ([0, -1], [3, 0], [1, 1], {"shrink_axis_mask": 2}),
        "shrink-both": ([1, 2], [2, 3], [1, 1], {"shrink_axis_mask": 3}),
        "new-axis": ([0, 0, 1], [3, 0, 3], [1, 1, 1], {"new_axis_mask": 2}),
        "ellipsis": ([0, 1], [0, 3], [1, 1], {"ellipsis_mask": 1}),
        "ellipsis-new": ([0, 0, 1], [0, 0, 2], [1, 1, 1], {"ellipsis_mask": 1, "new_axis_mask": 2}),
        "few": ([1], [3], [1], {}),
        "beyond": ([-9, -9], [99, 99], [1, 1], {}),
        "nothing": ([2, 0], [1, 4], [1, 1], {}),
    }
    for label, (begin, end, strides, kw) in strided.items():
        a.op("StridedSlice", F(3, 4), array(begin), array(end), array(strides), label=label, **kw)
    a.op("StridedSlice", F(2, 3, 4, 2), array([0, 1]), array([0, 2]), array([1, 1]), label="ellipsis-rank4",
         ellipsis_mask=1)
    a.each("StridedSlice", lambda d: [values(d, [3, 4]), array([0, 1]), array([3, 3]), array([2, 1])], grad=False)
    for d in (np.int16, np.int64):
        if np.dtype(d).name in registered_dtypes("StridedSlice", "Index"):
            a.op("StridedSlice", F(3, 4), np.array([0, 1], d), np.array([3, 3], d), np.array([2, 1], d),
                 label=f"index-{np.dtype(d).name}")
    for label, (begin, end, strides, kw) in {
        "stride-zero": ([0], [2], [0], {}), "shrink-range": ([3], [4], [1], {"shrink_axis_mask": 1}),
        "shrink-backwards": ([1], [2], [-1], {"shrink_axis_mask": 1}), "rank": ([0, 0, 0], [1, 1, 1], [1, 1, 1], {}),
        "two-ellipses": ([0, 0], [1, 1], [1, 1], {"ellipsis_mask": 3}), "lengths": ([0, 0], [1], [1], {}),
    }.items():
        a.op("StridedSlice", F(3, 4), array(begin), array(end), array(strides), label=label, error=True, **kw)
    for label, dy, kw in (("plain", [2, 2], {}), ("shrink", [2], {"shrink_axis_mask": 1})):
        begin, end = ([0, 1], [2, 3]) if label == "plain" else ([1, 1], [2, 3])
        a.op("StridedSliceGrad", array([3, 4]), array(begin), array(end), array([1, 1]), F(*dy), label=label, **kw)
    a.each("StridedSliceGrad", lambda d: [array([4]), array([3]), array([0]), array([-2]), values(d, [2])], grad=False)


def picking(a):
    for d in registered_dtypes("Gather", "Tparams"):
        p = values(d, [3, 2])
        a.op("Gather", p, array([2, 0]), dtype=d, grad=False)
        a.op("GatherV2", p, array([2, 0]), array(0), dtype=d, grad=False)
        a.op("GatherNd", p, array([[2, 0], [0, 1]]), dtype=d, grad=False)
    for op, extra in (("Gather", []), ("GatherV2", [array(0)])):
        a.op(op, F(3, 2), array([2, 0, 2]), *extra, label="twice")
        a.op(op, F(3, 2), np.array([[2, 0], [1, 1]], np.int64), *extra, label="matrix")
        a.op(op, F(3, 2), array(1), *extra, label="scalar")
        a.op(op, F(3), np.zeros([0], np.int32), *extra, label="none")
        a.op(op, np.zeros([3, 0], np.float32), array([1]), *extra, label="empty-rows")
        a.op(op, F(3), array([3]), *extra, label="range", error=True)
        a.op(op, F(3), array([-1]), *extra, label="negative", error=True)
        a.op(op, F(), array([0]), *extra, label="scalar-params", error=True)
    for axis in (1, 2, -1, -2):
        a.op("GatherV2", F(2, 3, 4), array([1, 0]), array(axis), label=f"axis{axis}")
    a.op("GatherV2", F(2, 3, 4), array([[1, 0], [2, 2]]), array(1), label="batch1", batch_dims=1)
    a.op("GatherV2", F(2, 3, 4), array([[1, 0], [2, 3]]), array(2), label="batch1-axis2", batch_dims=1)
    a.op("GatherV2", F(2, 3, 4), values("int32", [2, 3, 2], 0, 3), array(2), label="batch2", batch_dims=2)
    a.op("GatherV2", F(2, 3), array([1]), array(2), label="axis-range", error=True)
    a.op("GatherV2", F(2, 3), array([1]), array([0, 1]), label="axis-vector", error=True)
    a.op("GatherV2", F(2, 3), array([[1]]), array(1), label="batch-shape", batch_dims=1, error=True)
    for label, shape, index in (("rows", [3, 2], [[1], [0]]), ("elements", [3, 2], [[1, 1], [0, 0]]),
                                ("nested", [2, 2, 2], [[[0, 1]], [[1, 0]]]), ("whole", [3], [[], []])):
        a.op("GatherNd", values("float32", shape), array(np.array(index, np.int32)), label=label,
             grad=label != "whole")
    a.op("GatherNd", F(3, 2), array([[3, 0]]), label="range", error=True)
    a.op("GatherNd", F(3, 2), array([[0, 0, 0]]), label="depth", error=True)
    a.op("GatherNd", F(3, 2), np.zeros([0, 2], np.int32), label="none")
    for d in registered_dtypes("ScatterNd", "T"):
        a.op("ScatterNd", array([[3], [0]]), values(d, [2, 2]), array([4, 2]), dtype=d, grad=False)
    a.op("ScatterNd", array([[1], [1], [0]]), F(3), array([3]), label="twice")
    a.op("ScatterNd", np.array([[0, 1], [2, 0]], np.int64), F(2), np.array([3, 2], np.int64), label="elements")
    a.op("ScatterNd", array([[4]]), F(1), array([3]), label="range", error=True)
    a.op("ScatterNd", array([[0]]), F(2), array([3]), label="shape", error=True)
    a.op("ScatterNd", np.zeros([0, 1], np.int32), F(0), array([3]), label="none")
    for label, c, s in (("same", [2, 3], [2, 3]), ("rows", [2], [2, 3]), ("scalar", [], [2, 3])):
        a.op("Select", values("bool", c), values("float32", s), values("float32", s, seed=1), label=label)
    a.each("Select", lambda d: [values("bool", [2, 3]), values(d, [2, 3]), values(d, [2, 3], seed=1)], grad=False)
    a.op("Select", values("bool", [3]), F(2, 3), F(2, 3), label="shape", error=True)
    a.op("Select", values("bool", [2, 3]), F(2, 3), F(3), label="branches", error=True)
    for label, c, t, e in (("same", [2, 3], [2, 3], [2, 3]), ("row", [3], [2, 3], [2, 1]), ("scalars", [2, 3], [], []),
                           ("all", [2, 1, 1], [3, 1], [4]), ("empty", [0], [1], [])):
        a.op("SelectV2", values("bool", c), values("float32", t), values("float32", e, seed=1), label=label)
    a.each("SelectV2", lambda d: [values("bool", [2, 3]), values(d, [2, 3]), values(d, [3], seed=1)], grad=False)
    a.op("SelectV2", values("bool", [2]), F(3), F(3), label="shape", error=True)
    # TensorFlow registers kernels for the small floats that only fail.
    a.each("Where", lambda d: values(d, [2, 3], -1, 1) if d not in ("bool", "string") else values(d, [2, 3]),
           dtypes=[d for d in ALL if d not in ("float16", "bfloat16")])
    a.op("Where", values("bool", []), label="scalar", error=True)
    for s in ([0], [4], [2, 2, 2]):
        a.op("Where", values("bool", s), label="rank" + "x".join(map(str, s)))
    a.op("Where", array([NAN, -0.0, INF]), label="special")


def filling(a):
    # TensorFlow says that it takes unsigned shorts and does not.
    a.each("Tile", lambda d: [values(d, [2, 3]), array([2, 1])], grad=False, dtypes=[d for d in ALL if d != "uint16"])
    for label, s, m in (("twice", [2, 3], [2, 2]), ("none", [2, 3], [0, 1]), ("vector", [3], [4]), ("scalar", [], []),
                        ("empty", [0, 2], [3, 2]), ("rank3", [1, 2, 2], [2, 1, 3])):
        a.op("Tile", values("float32", s), np.array(m, np.int32), label=label)
    a.op("Tile", F(2), np.array([2], np.int64), label="wide")
    a.op("Tile", F(2), array([2, 2]), label="rank", error=True)
    a.op("Tile", F(2), array([-1]), label="negative", error=True)
    for op, extra in (("Pad", []), ("PadV2", [array(1.5)])):
        a.op(op, F(2, 3), array([[1, 0], [0, 2]]), *extra, label="some")
        a.op(op, F(2, 3), np.array([[0, 0], [0, 0]], np.int64), *extra, label="none")
        a.op(op, F(), np.zeros([0, 2], np.int32), *extra, label="scalar")
        a.op(op, F(0, 2), array([[1, 1], [0, 0]]), *extra, label="empty")
        a.op(op, F(2, 2, 2), array([[1, 1], [2, 0], [0, 1]]), *extra, label="rank3")
        a.op(op, F(2), array([[-1, 0]]), *extra, label="negative", error=True)
        a.op(op, F(2), array([[1, 0], [0, 0]]), *extra, label="rank", error=True)
    a.each("Pad", lambda d: [values(d, [2]), array([[1, 2]])], grad=False)
    a.each("PadV2", lambda d: [values(d, [2]), array([[1, 2]]), values(d, [], 2, 2)], grad=False)
    for mode in ("REFLECT", "SYMMETRIC"):
        a.op("MirrorPad", F(3, 4), array([[1, 2], [2, 1]]), label=mode, mode=mode)
        a.op("MirrorPad", F(3), np.array([[2, 0]], np.int64), label=mode + "-wide", mode=mode)
        a.each("MirrorPad", lambda d: [values(d, [3]), array([[1, 2]])], label=mode, mode=mode, grad=False)
        a.op("MirrorPad", F(3), array([[4, 0]]), label=mode + "-large", mode=mode, error=True)
        a.op("MirrorPadGrad", F(6), array([[2, 1]]), label=mode, mode=mode)
    a.each("Fill", lambda d: [array([2, 3]), values(d, [], 2, 3)], grad=False)
    a.op("Fill", np.array([2, 2], np.int64), array(1.5), label="wide")
    a.op("Fill", np.zeros([0], np.int32), array(1.5), label="scalar")
    a.op("Fill", array([0, 2]), array(1.5), label="empty")
    a.op("Fill", array([-1]), array(1.5), label="negative", error=True)
    a.op("Fill", array([2]), array([1.5]), label="vector-value", error=True)
    a.each("BroadcastTo", lambda d: [values(d, [3]), array([2, 3])], grad=False)
    for label, s, to in (("scalar", [], [2, 3]), ("column", [2, 1], [2, 3]), ("same", [2], [2]), ("rank", [3], [2, 2, 3]),
                         ("empty", [1, 2], [0, 2])):
        a.op("BroadcastTo", values("float32", s), array(to), label=label)
    a.op("BroadcastTo", F(2), array([3]), label="mismatch", error=True)
    a.op("BroadcastTo", F(2, 2), array([2]), label="lower-rank", error=True)
    for d in registered_dtypes("OneHot", "T"):
        on, off = values(d, [], 1, 1), values(d, [], 0, 0, seed=1)
        a.op("OneHot", array([1, 0, 3, -1]), array(3), on, off, dtype=d)
    for axis in (-1, 0, 1, 2):
        a.op("OneHot", np.array([[1, 0], [2, 5]], np.int64), array(3), array(2.0), array(-1.0), label=f"axis{axis}", axis=axis)
    a.op("OneHot", np.array([1, 2], np.uint8), array(3), array(1.0), array(0.0), label="byte-indices")
    a.op("OneHot", array(1), array(3), array(1.0), array(0.0), label="scalar")
    a.op("OneHot", array([1]), array(0), array(1.0), array(0.0), label="no-depth")
    a.op("OneHot", array([1]), array(-1), array(1.0), array(0.0), label="negative", error=True)
    a.op("OneHot", array([1]), array(3), array(1.0), array(0.0), label="axis-range", axis=3, error=True)
    a.each("Range", lambda d: [array(x, d) for x in (1, 8, 2)], attr="Tidx", dtypes=[d for d in NUMBERS if d != "float16"])
    for label, r in (("down", (5, 0, -2)), ("empty", (3, 3, 1)), ("one", (0, 1, 5)), ("floats", (0.5, 2.6, 0.7)),
                     ("floats-down", (1.0, 0.0, -0.25))):
        a.op("Range", *(array(x) for x in r), label=label)
    for label, r in (("zero", (0, 1, 0)), ("away", (0, 5, -1)), ("away-down", (5, 0, 1)), ("vector", ([0], [1], [1]))):
        a.op("Range", *(array(x) for x in r), label=label, error=True)
    a.each("LinSpace", lambda d: [array(1, d), array(3, d), array(5)], dtypes=FLOATS)
    a.op("LinSpace", array(1.0), array(9.0), np.array(1, np.int64), label="one")
    a.op("LinSpace", array(-1.0), array(-9.0), array(7), label="down")
    a.op("LinSpace", array(1.0), array(2.0), array(0), label="none", error=True)


def ordering(a):
    for axes in ([], [0], [1], [0, 1], [-1]):
        a.op("ReverseV2", F(2, 3), np.array(axes, np.int32), label="axes" + ",".join(map(str, axes)))
    a.each("ReverseV2", lambda d: [values(d, [2, 3]), array([1])], grad=False)
    a.op("ReverseV2", F(2, 3, 2), np.array([0, 2], np.int64), label="rank3")
    a.op("ReverseV2", F(2, 3), array([2]), label="range", error=True)
    a.op("ReverseV2", F(2, 3), array([0, 0]), label="twice", error=True)
    a.each("ReverseSequence", lambda d: [values(d, [2, 4]), np.array([2, 4], np.int64)], grad=False, seq_dim=1)
    a.op("ReverseSequence", F(2, 4, 3), array([3, 0]), label="rows", seq_dim=1)
    a.op("ReverseSequence", F(4, 2, 3), array([3, 1]), label="time-major", seq_dim=0, batch_dim=1)
    a.op("ReverseSequence", F(2, 4), array([5, 1]), label="long", seq_dim=1, error=True)
    a.op("ReverseSequence", F(2, 4), array([1]), label="lengths", seq_dim=1, error=True)
    a.op("ReverseSequence", F(2, 4), array([1, 1]), label="same-dims", seq_dim=0, error=True)
    a.each("Unique", lambda d: values(d, [7], 0, 3))
    a.op("Unique", array([3, 1, 3, 2, 1]), label="wide", out_idx="int64")
    a.op("Unique", np.zeros([0], np.int32), label="empty")
    a.op("Unique", array([NAN, NAN, 1.0]), label="nan")
    a.op("Unique", I(2, 2), label="matrix", error=True)
    a.each("UniqueWithCounts", lambda d: values(d, [7], 0, 3))
    a.op("UniqueWithCounts", array([3, 1, 3]), label="wide", out_idx="int64")
    a.each("ListDiff", lambda d: [values(d, [7], 0, 4), values(d, [2], 0, 3, seed=1)])
    a.op("ListDiff", array([1, 2, 1, 3]), array([2]), label="twice", out_idx="int64")
    a.op("ListDiff", array([1]), np.zeros([0], np.int32), label="empty")
    a.op("ListDiff", I(2, 2), array([2]), label="matrix", error=True)
    a.op("DynamicPartition", F(4, 2), array([1, 0, 1, 2]), label="rows", num_partitions=3)
    a.op("DynamicPartition", F(2, 2), array([[1, 0], [1, 1]]), label="matrix", num_partitions=3)
    a.each("DynamicPartition", lambda d: [values(d, [3]), array([1, 0, 1])], grad=False, num_partitions=2)
    a.op("DynamicPartition", F(2), array([0, 2]), label="range", num_partitions=2, error=True)
    a.op("DynamicPartition", F(2), array([0]), label="shape", num_partitions=2, error=True)
    for op in ("DynamicStitch", "ParallelDynamicStitch"):
        a.op(op, [array([0, 2]), array([1])], [F(2, 3), F(1, 3)], label="rows")
        a.op(op, [array(2), array([[0], [1]])], [F(2), F(2, 1, 2)], label="shapes")
        a.each(op, lambda d: [[array([0, 2]), array([1])], [values(d, [2]), values(d, [1])]], grad=False)
        a.op(op, [array([0]), array([1])], [F(1, 3), F(1, 2)], label="mismatch", error=True)
        a.op(op, [array([-1])], [F(1)], label="negative", error=True)
    a.op("DynamicStitch", [array([0, 2]), array([2])], [F(2), F(1)], label="overlap", grad=False)
    a.op("DynamicStitch", [np.zeros([0], np.int32)], [F(0, 2)], label="empty")


def matrices(a):
    for lower, upper in ((0, 0), (-1, 0), (0, -1), (1, 1), (-1, -1), (0, 2)):
        a.op("MatrixBandPart", F(2, 4, 3), np.array(lower, np.int64), np.array(upper, np.int64), label=f"{lower},{upper}")
    a.each("MatrixBandPart", lambda d: [values(d, [3, 3]), array(1), array(0)], grad=False)
    a.op("MatrixBandPart", F(2, 2), array(5), array(0), label="range", error=True)
    a.each("Diag", lambda d: values(d, [3]))
    a.op("Diag", F(2, 2), label="matrix")
    a.op("Diag", F(0), label="empty")
    a.each("DiagPart", lambda d: values(d, [3, 3]))
    a.op("DiagPart", F(2, 3, 2, 3), label="rank4")
    a.op("DiagPart", F(2, 3), label="not-square", error=True)
    a.op("DiagPart", F(3), label="vector", error=True)
    a.each("MatrixDiag", lambda d: values(d, [2, 3]), grad=False)
    a.op("MatrixDiag", F(2, 3), label="batch")
    a.op("MatrixDiag", F(), label="scalar", error=True)
    a.each("MatrixDiagPart", lambda d: values(d, [2, 3, 3]), grad=False)
    a.op("MatrixDiagPart", F(2, 3, 2), label="wide")
    block, pads = array([2, 2]), array([[0, 0], [0, 2]])
    a.each("SpaceToBatchND", lambda d: [values(d, [1, 2, 2, 1]), block, pads], grad=False)
    a.each("BatchToSpaceND", lambda d: [values(d, [4, 1, 2, 1]), block, pads], grad=False)
    a.op("SpaceToBatchND", F(1, 2, 4, 3), block, array([[0, 0], [2, 0]]), label="padded")
    a.op("SpaceToBatchND", F(2, 4), array([2]), array([[1, 1]]), label="vector")
    a.op("SpaceToBatchND", F(1, 3, 2), array([2]), array([[0, 0]]), label="not-divisible", error=True)
    a.op("SpaceToBatchND", F(1, 2, 2), array([0]), array([[0, 0]]), label="block-zero", error=True)
    a.op("BatchToSpaceND", F(4, 1, 2, 3), block, array([[0, 1], [2, 0]]), label="cropped")
    a.op("BatchToSpaceND", F(4, 2), array([2]), array([[1, 0]]), label="vector")
    a.op("BatchToSpaceND", F(3, 2), array([2]), array([[0, 0]]), label="not-divisible", error=True)


def casting(a):
    numbers = [d for d in NUMBERS + ["bool"]]
    for src in numbers:
        for dst in numbers:
            v = values(src, [4], 0, 3) if src != "bool" else values("bool", [4])
            a.op("Cast", v, label=f"{src}-{dst}", DstT=dst, grad=False)
    for src in ("float32", "float64", "float16", "bfloat16"):
        special = array([0.5, -0.5, 1.5, 2.5, -1.5, 3.9999, 1e-8, 300.7, NAN, INF, -INF], src)
        for dst in FLOATS + ["bool"]:
            a.op("Cast", special, label=f"special-{src}-{dst}", DstT=dst, grad=False)
        for dst in ("int32", "int64"):
            a.op("Cast", array([0.5, -0.5, 1.5, -1.5, 3.9999, -300.7], src), label=f"cut-{src}-{dst}", DstT=dst, grad=False)
        # One at a time: TensorFlow's vector loops have other rules, which depend on its version and the machine.
        for label, x in (("above", 300.0), ("below", -129.5), ("far", 3e9), ("minus", -3e9), ("nan", NAN), ("inf", INF)):
            for dst in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
                a.op("Cast", array([x], src), label=f"range-{label}-{src}-{dst}", DstT=dst, grad=False)
    a.op("Cast", np.array([-1, 300, -200, 70000], np.int32), label="wraps-uint8", DstT="uint8")
    a.op("Cast", np.array([-1, 300, -200, 70000], np.int32), label="wraps-int8", DstT="int8")
    a.op("Cast", np.array([-1, 300], np.int64), label="wraps-uint64", DstT="uint64")
    a.op("Cast", F(2, 3), label="gradient", DstT="float64")
    a.op("Cast", F(2, 3), label="integer-gradient", DstT="int32")
    a.op("Cast", np.zeros([0], np.float32), label="empty", DstT="int32")
    for src, dst, s in (("float32", "int32", [2]), ("int32", "uint8", [2]), ("uint8", "int32", [2, 4]),
                        ("float64", "float32", [2]), ("int64", "float64", [2]), ("uint8", "int8", [2]),
                        ("bfloat16", "float16", [2])):
        a.op("Bitcast", values(src, s), label=f"{src}-{dst}", type=dst)
    a.op("Bitcast", values("uint8", [2, 3]), label="size", type="int32", error=True)
    a.each("Const", lambda d: [], attr="dtype", value=np.zeros([]), dtypes=[])


def cases(a):
    copies(a)
    shapes(a)
    joining(a)
    slicing(a)
    picking(a)
    filling(a)
    ordering(a)
    matrices(a)
    casting(a)
