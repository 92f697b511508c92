"""Cases of ops that came later, of several areas: sparse tensors, images that change their size, volumes, equations, tables,
variables changed in parts, staging areas, and what TensorFlow's rewrites make of several ops."""

import numpy as np

from cases_state import handle, ref
from harness import FLOATS, Nodes, array, registered_dtypes, values

NAN, INF = float("nan"), float("inf")
F = lambda *shape, seed=0: values("float32", list(shape), seed=seed)
SMALL = lambda d, shape, seed=0: values(d, shape, -1, 1, seed)
W = lambda *words: np.array([w.encode() for w in words] + [None], object)[:-1]
S = lambda word: np.array(word.encode(), object)
SUMS = {"rtol": 1e-5, "atol": 1e-5, "half_atol": 1e-1}


def sparse(a):
    rows = array([[0, 1], [1, 0], [3, 2]], "int64")
    for d in ("float32", "int64", "string", "bool"):
        if d in registered_dtypes("SparseFillEmptyRows", "T"):
            a.op("SparseFillEmptyRows", rows, values(d, [3]), array([5, 3], "int64"), values(d, [], seed=1), dtype=d, grad=False)
    a.op("SparseFillEmptyRows", np.zeros([0, 2], np.int64), F(0), array([2, 3], "int64"), array(1.0), label="empty", grad=False)
    a.op("SparseFillEmptyRows", rows, F(3), array([2, 3], "int64"), array(1.0), label="range", error=True)
    a.op("SparseFillEmptyRowsGrad", array([0, 1, 3], "int64"), F(5), grad=False)
    a.op("SparseFillEmptyRowsGrad", array([0, 9], "int64"), F(5), label="range", error=True)
    mixed = array([[3, 2], [0, 1], [1, 0]], "int64")
    for d in ("float32", "int32", "string"):
        a.op("SparseReorder", mixed, values(d, [3]), array([5, 3], "int64"), dtype=d, grad=False)
    a.op("SparseReorder", np.zeros([0, 2], np.int64), F(0), array([5, 3], "int64"), label="empty", grad=False)
    for d in ("float32", "float64", "int32", "string"):
        if d in registered_dtypes("SparseToDense", "T"):
            a.op("SparseToDense", rows, array([5, 3], "int64"), values(d, [3]), values(d, [], seed=1), dtype=d, grad=False)
    a.op("SparseToDense", array([1, 3]), array([5]), F(2), array(0.5), label="vector", grad=False)
    a.op("SparseToDense", array(2), array([5]), array(7.0), array(0.5), label="scalar", grad=False)
    a.op("SparseToDense", array([1, 3]), array([5]), array(7.0), array(0.5), label="one-value", grad=False)
    a.op("SparseToDense", array([3, 1]), array([5]), F(2), array(0.5), label="order", error=True)
    a.op("SparseToDense", array([3, 1]), array([5]), F(2), array(0.5), label="any-order", validate_indices=False, grad=False)
    a.op("SparseToDense", array([1, 5]), array([5]), F(2), array(0.5), label="range", error=True)
    for d in ("float32", "float64", "int32"):
        if d in registered_dtypes("SparseTensorDenseMatMul", "T"):
            a.op("SparseTensorDenseMatMul", rows, values(d, [3]), array([5, 3], "int64"), values(d, [3, 4], seed=1), dtype=d, grad=False,
                 **SUMS)
    a.op("SparseTensorDenseMatMul", rows, F(3), array([5, 3], "int64"), F(5, 4, seed=1), label="adjoint-a", adjoint_a=True, grad=False, **SUMS)
    a.op("SparseTensorDenseMatMul", rows, F(3), array([5, 3], "int64"), F(4, 3, seed=1), label="adjoint-b", adjoint_b=True, grad=False, **SUMS)
    a.op("SparseTensorDenseMatMul", rows, F(3), array([5, 3], "int64"), F(4, 4), label="sizes", error=True)
    for label, kw, left, right in (("plain", {}, [3, 4], [4, 2]), ("ta", {"transpose_a": True}, [4, 3], [4, 2]),
                                   ("tb", {"transpose_b": True}, [3, 4], [2, 4])):
        a.op("SparseMatMul", SMALL("float32", left), SMALL("float32", right, seed=1), label=label, grad=False, **kw, **SUMS)
    ids, segments = array([0, 2, 1, 0]), array([0, 0, 1, 2])
    for op in ("SparseSegmentSumGrad", "SparseSegmentMeanGrad", "SparseSegmentSqrtNGrad"):
        for d in ("float32", "float64"):
            if d in registered_dtypes(op, "T"):
                a.op(op, values(d, [3, 2]), ids, segments, array(4), dtype=d, grad=False, **SUMS)
        a.op(op, F(3, 2), array([0, 9, 1, 0]), segments, array(4), label="range", error=True)


def images(a):
    for op in ("ResizeBilinear", "ResizeNearestNeighbor"):
        for label, size in (("larger", [5, 7]), ("smaller", [2, 1]), ("same", [3, 4])):
            a.op(op, F(2, 3, 4, 2), array(size), label=label, rtol=1e-5, atol=1e-5)
            a.op(op, F(2, 3, 4, 2), array(size), label=label + "-corners", align_corners=True, rtol=1e-5, atol=1e-5)
            a.op(op, F(2, 3, 4, 2), array(size), label=label + "-centers", half_pixel_centers=True, rtol=1e-5, atol=1e-5)
        for d in ("uint8", "int32", "float64", "float16"):
            if d in registered_dtypes(op, "T"):
                a.op(op, values(d, [1, 3, 2, 1], 0, 9), array([5, 3]), dtype=d, rtol=1e-5, half_atol=4e-2, grad=False)
        a.op(op, F(3, 4), array([5, 3]), label="rank", error=True)
        a.op(op, F(1, 3, 4, 1), array([0, 3]), label="zero", error=True)
        a.op(op, F(1, 3, 4, 1), array([3]), label="sizes", error=True)
    for label, kw in (("plain", {}), ("corners", {"align_corners": True}), ("centers", {"half_pixel_centers": True})):
        a.op("ResizeBilinearGrad", F(2, 5, 7, 2), F(2, 3, 4, 2), label=label, grad=False, **kw, **SUMS)
        a.op("ResizeNearestNeighborGrad", F(2, 5, 7, 2), array([3, 4]), label=label, grad=False, **kw, **SUMS)
    ksize, strides = array([1, 2, 2, 1]), array([1, 2, 2, 1])
    for padding in ("SAME", "VALID"):
        a.op("MaxPoolV2", F(1, 5, 4, 2), ksize, strides, label=padding, padding=padding, grad=False)
        y = a.compute("MaxPoolV2", F(1, 5, 4, 2), ksize, strides, padding=padding)[0]
        a.op("MaxPoolGradV2", F(1, 5, 4, 2), y, values("float32", list(y.shape), seed=1), ksize, strides, label=padding, padding=padding,
             grad=False)
    a.op("MaxPoolV2", F(1, 5, 4, 2), array([1, 2, 2]), strides, label="ksize", padding="SAME", error=True)


def volumes(a):
    x, w = [1, 4, 5, 3, 2], [2, 3, 2, 2, 3]
    for label, kw in (("same", {"padding": "SAME", "strides": [1, 1, 1, 1, 1]}), ("valid", {"padding": "VALID", "strides": [1, 1, 1, 1, 1]}),
                      ("stride", {"padding": "SAME", "strides": [1, 2, 2, 1, 1]})):
        a.op("Conv3D", SMALL("float32", x), SMALL("float32", w, seed=1), label=label, **kw, **SUMS)
        y = a.compute("Conv3D", SMALL("float32", x), SMALL("float32", w, seed=1), **kw)[0]
        dy = SMALL("float32", list(y.shape), seed=2)
        a.op("Conv3DBackpropInputV2", array(x), SMALL("float32", w), dy, label=label, grad=False, **kw, **SUMS)
        a.op("Conv3DBackpropFilterV2", SMALL("float32", x), array(w), dy, label=label, grad=False, **kw, **SUMS)
    a.op("Conv3D", SMALL("float64", x), SMALL("float64", w, seed=1), label="double", padding="SAME", strides=[1, 1, 1, 1, 1], **SUMS)
    a.op("Conv3D", SMALL("float32", x), SMALL("float32", [2, 3, 2, 3, 3]), label="depth", padding="SAME", strides=[1, 1, 1, 1, 1], error=True)


def equations(a):
    for equation, shapes in (("ij,jk->ik", ([2, 3], [3, 4])), ("ij,kj->ik", ([2, 3], [4, 3])), ("bij,bjk->bik", ([2, 3, 2], [2, 2, 4])),
                             ("ij->ji", ([2, 3],)), ("ii->i", ([3, 3],)), ("ij->", ([2, 3],)), ("i,j->ij", ([2], [3])),
                             ("...ij,jk->...ik", ([2, 2, 3], [3, 4])), ("ij,ij->", ([2, 3], [2, 3])), ("bhqd,bhkd->bhqk", ([1, 2, 3, 4], [1, 2, 2, 4]))):
        a.op("Einsum", [SMALL("float32", list(s), seed=i) for i, s in enumerate(shapes)], label=equation.replace("/", ""), equation=equation,
             **SUMS)
    a.op("Einsum", [F(2, 3), F(4, 3)], label="sizes", equation="ij,jk->ik", error=True)
    a.op("Einsum", [F(2, 3)], label="unknown", equation="ij->k", error=True)
    a.op("Einsum", [F(2, 3)], label="bad", equation="ij", error=True)
    for d in ("float32", "float64", "int32", "int64"):
        if d in registered_dtypes("HistogramFixedWidth", "T"):
            a.op("HistogramFixedWidth", values(d, [30], -5, 15), array([0, 10], d), array(5), dtype=d)
        if d in registered_dtypes("Bucketize", "T"):
            a.op("Bucketize", values(d, [3, 4], -5, 15), dtype=d, boundaries=[0.0, 2.5, 10.0])
    a.op("HistogramFixedWidth", F(3), array([1.0, 1.0]), array(5), label="range", error=True)
    a.op("HistogramFixedWidth", F(3), array([0.0, 1.0]), array(0), label="bins", error=True)
    a.op("Bucketize", F(3), label="none", boundaries=[])
    a.op("Bucketize", F(3), label="order", boundaries=[2.0, 1.0], error=True)
    numbers = array([[1, 2, 1], [3, 4, 3], [1, 2, 1]])
    for op in ("UniqueV2", "UniqueWithCountsV2"):
        a.op(op, array([3, 1, 3, 2, 1]), array([], "int64"), label="vector")
        a.op(op, numbers, array([0], "int64"), label="rows")
        a.op(op, numbers, array([1], "int64"), label="columns")
        a.op(op, values("string", [5]), array([0], "int64"), label="strings")
        a.op(op, numbers, array([2], "int64"), label="axis", error=True)
        a.op(op, array([], "float32"), array([0], "int64"), label="empty")


def variables(a):
    indices, updates = array([[0, 1], [2, 0]]), array([10.0, 20.0])
    for op in ("Update", "Add", "Sub"):
        n = Nodes()
        ref(n, F(3, 2))
        n.op("op", f"ScatterNd{op}", ["v", n.const("indices", indices), n.const("updates", updates)])
        n.op("bad", f"ScatterNd{op}", ["v", n.const("far", array([[0, 1], [3, 0]])), "updates"])
        a.program(f"ScatterNd{op}/parts", n, [{"target": ["init_v"]}, {"fetch": ["op"]}, {"fetch": ["v"]}, {"fetch": ["bad"], "error": True}])
        n = Nodes()
        handle(n, F(3, 2))
        n.op("op", f"ResourceScatterNd{op}", ["v", n.const("indices", indices), n.const("updates", updates)])
        n.op("rows", f"ResourceScatterNd{op}", ["v", n.const("row", array([[1]])), n.const("values", F(1, 2, seed=3))])
        n.op("bad", f"ResourceScatterNd{op}", ["v", n.const("far", array([[0, 1], [3, 0]])), "updates"])
        a.program(f"ResourceScatterNd{op}/parts", n, [{"target": ["init_v"]}, {"target": ["op"]}, {"fetch": ["read_v"]}, {"target": ["rows"]},
                                                      {"fetch": ["read_v"]}, {"target": ["bad"], "error": True}])
    n = Nodes()
    handle(n, F(3, 2))
    n.op("op", "ResourceGatherNd", ["v", n.const("indices", indices)], {"dtype": "float32"})
    n.op("rows", "ResourceGatherNd", ["v", n.const("row", array([[1], [1]]))], {"dtype": "float32"})
    n.op("bad", "ResourceGatherNd", ["v", n.const("far", array([[3, 0]]))], {"dtype": "float32"})
    a.program("ResourceGatherNd/parts", n, [{"target": ["init_v"]}, {"fetch": ["op"]}, {"fetch": ["rows"]}, {"fetch": ["bad"], "error": True}])
    for kind, make, run in (("", ref, "fetch"), ("Resource", handle, "target")):
        n = Nodes()
        make(n, F(4, 3))
        bounds = [n.const("begin", array([1, 0])), n.const("end", array([4, 2])), n.const("strides", array([2, 1]))]
        n.op("op", f"{kind}StridedSliceAssign", ["v", *bounds, n.const("value", F(2, 2, seed=1))])
        n.op("bad", f"{kind}StridedSliceAssign", ["v", *bounds, n.const("wrong", F(3, 2))])
        last = "v" if not kind else "read_v"
        a.program(f"{kind}StridedSliceAssign/parts", n, [{"target": ["init_v"]}, {run: ["op"]}, {"fetch": [last]}, {run: ["bad"], "error": True}])


def tables(a):
    for key, keys in (("string", W("a", "b", "c")), ("int64", array([5, 7, 9], "int64"))):
        ask = W("b", "z") if key == "string" else array([7, 1], "int64")
        numbers = array([10, 20, 30], "int64")
        n = Nodes()
        n.op("t", "HashTableV2", [], {"key_dtype": key, "value_dtype": "int64", "shared_name": "t"})
        n.op("init", "InitializeTableV2", ["t", n.const("keys", keys), n.const("values", numbers)])
        n.op("again", "InitializeTableV2", ["t", "keys", n.const("others", numbers + 1)])
        n.op("find", "LookupTableFindV2", ["t", n.const("ask", ask), n.const("default", array(-1, "int64"))])
        n.op("size", "LookupTableSizeV2", ["t"])
        a.program(f"HashTableV2/{key}", n, [{"fetch": ["find"], "error": True}, {"target": ["init"]}, {"fetch": ["find"]}, {"fetch": ["size"]},
                                            {"target": ["again"]}, {"fetch": ["find"]}])
        n = Nodes()
        n.op("t", "MutableHashTableV2", [], {"key_dtype": key, "value_dtype": "int64", "shared_name": "t"})
        n.op("put", "LookupTableInsertV2", ["t", n.const("keys", keys), n.const("values", numbers)])
        n.op("one", "LookupTableInsertV2", ["t", n.const("key", keys[1:2]), n.const("value", array([99], "int64"))])
        n.op("import", "LookupTableImportV2", ["t", n.const("key2", keys[:1]), n.const("value2", array([-5], "int64"))])
        n.op("find", "LookupTableFindV2", ["t", n.const("ask", ask), n.const("default", array(-1, "int64"))])
        n.op("size", "LookupTableSizeV2", ["t"])
        n.op("all", "LookupTableExportV2", ["t"], {"Tkeys": key, "Tvalues": "int64"})
        a.program(f"MutableHashTableV2/{key}", n, [{"fetch": ["find"]}, {"target": ["put"]}, {"fetch": ["find"]}, {"target": ["one"]},
                                                   {"fetch": ["find"]}, {"fetch": ["size"]}, {"target": ["import"]}, {"fetch": ["size"]},
                                                   {"fetch": ["all", "all:1"]}])


def staging(a):
    n = Nodes()
    kw = {"dtypes": ["float32", "int32"], "shared_name": "s"}
    n.op("put", "Stage", [[n.const("x", F(2)), n.const("y", array(7))]], kw)
    n.op("put2", "Stage", [[n.const("x2", F(2, seed=1)), n.const("y2", array(8))]], kw)
    n.op("take", "Unstage", [], kw)
    n.op("size", "StageSize", [], kw)
    n.op("clear", "StageClear", [], kw)
    a.program("Stage/order", n, [{"fetch": ["size"]}, {"target": ["put"]}, {"target": ["put2"]}, {"fetch": ["size"]},
                                 {"fetch": ["take", "take:1"]}, {"fetch": ["take", "take:1"]}, {"target": ["put"]}, {"target": ["clear"]},
                                 {"fetch": ["size"]}])


def rewritten(a):
    x, w, bias = SMALL("float32", [3, 4]), SMALL("float32", [4, 5], seed=1), SMALL("float32", [5], seed=2)
    for act in ("", "Relu", "Relu6", "Elu", "LeakyRelu", "Tanh", "Sigmoid"):
        ops = ["BiasAdd", act] if act else ["BiasAdd"]
        a.op("_FusedMatMul", x, w, [bias], label=act or "BiasAdd", fused_ops=ops, grad=False, **SUMS)
    a.op("_FusedMatMul", np.ascontiguousarray(x.T), np.ascontiguousarray(w.T), [bias], label="transposed", fused_ops=["BiasAdd"],
         transpose_a=True, transpose_b=True, grad=False, **SUMS)
    image, filt, b3 = SMALL("float32", [2, 5, 4, 2]), SMALL("float32", [3, 3, 2, 3], seed=1), SMALL("float32", [3], seed=2)
    kw = {"strides": [1, 1, 1, 1], "padding": "SAME", "grad": False, "num_args": 1}
    for act in ("", "Relu", "Relu6", "Elu", "LeakyRelu"):
        ops = ["BiasAdd", act] if act else ["BiasAdd"]
        a.op("_FusedConv2D", image, filt, [b3], [], label=act or "BiasAdd", fused_ops=ops, **kw, **SUMS)
    vectors = [values("float32", [3], 0.5, 2, seed=i) for i in range(4)]
    for act in ("", "Relu"):
        ops = ["FusedBatchNorm", act] if act else ["FusedBatchNorm"]
        a.op("_FusedConv2D", image, filt, vectors, [], label="norm" + act, fused_ops=ops, epsilon=0.01, **dict(kw, num_args=4), **SUMS)
    for label, ops in (("some", ["Neg", "Exp", "Tanh"]), ("one", ["Relu"]), ("more", ["Abs", "Sqrt", "Log1p", "Rsqrt"])):
        a.op("_UnaryOpsComposition", array([0.5, 1.0, 2.0, 3.0]), label=label, op_names=ops, grad=False, **SUMS)
    # TensorFlow's CPU has no kernel of it.
    norm = [values("float32", [3], 0.5, 2, seed=i) for i in range(4)]
    y = a.compute("FusedBatchNormV3", SMALL("float32", [2, 3, 2, 3]), *norm, is_training=False)
    side = SMALL("float32", [2, 3, 2, 3], seed=5)
    a.op("_FusedBatchNormEx", SMALL("float32", [2, 3, 2, 3]), *norm, [side], label="side", activation_mode="Relu", is_training=False,
         fetch=[0, 1, 2], expected=[np.maximum(y[0] + side, 0), y[1], y[2]], **SUMS)


def cases(a):
    sparse(a)
    images(a)
    volumes(a)
    equations(a)
    variables(a)
    tables(a)
    staging(a)
    rewritten(a)
