"""Cases of ops that came later, of several areas: sparse tensors, images that change their size, volumes, equations, tables,
variables changed in parts, staging areas, values that stay in a session, references, locks, pictures that are written, and
what TensorFlow's rewrites make of several ops."""

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


def kept_values(a):
    """A handle's name differs from run to run, so what it stands for is compared."""
    for op in ("GetSessionHandle", "GetSessionHandleV2"):
        for d in ("float32", "int64", "string", "bool"):
            n = Nodes()
            n.op("keep", op, [n.const("x", values(d, [2, 2]))])
            n.op("name", "Placeholder", [], {"dtype": "string"})
            n.op("get", "GetSessionTensor", ["name"], {"dtype": d})
            n.op("delete", "DeleteSessionTensor", ["name"])
            it, other = {"feed_result": {"name": (0, 0)}}, {"feed_result": {"name": (1, 0)}}
            a.program(f"{op}/{d}", n, [
                {"fetch": ["keep"], "compare": "none"}, {"fetch": ["keep"], "compare": "none"}, {"fetch": ["get"], **it},
                {"fetch": ["get"], **other}, {"target": ["delete"], **it},
                {"fetch": ["get"], "error": True, **it}, {"fetch": ["get"], **other}, {"target": ["delete"], "error": True, **it}],
                ops=[op, "GetSessionTensor", "DeleteSessionTensor"])
    n = Nodes()
    n.op("keep", "GetSessionHandle", [n.const("x", F(2))])
    n.op("name", "Placeholder", [], {"dtype": "string"})
    n.op("wrong", "GetSessionTensor", ["name"], {"dtype": "int32"})
    a.program("GetSessionTensor/other-dtype", n, [{"fetch": ["keep"], "compare": "none"},
                                                  {"fetch": ["wrong"], "error": True, "feed_result": {"name": (0, 0)}}], ops=["GetSessionTensor"])
    for label, name in (("unknown", S("no such")), ("parts", S("a;b;c")), ("vector", W("a", "b")), ("number", array(1.0))):
        n = Nodes()
        n.op("get", "GetSessionTensor", [n.const("name", name)], {"dtype": "float32"})
        a.program(f"GetSessionTensor/{label}", n, [{"fetch": ["get"], "error": True}], ops=["GetSessionTensor"])
        n = Nodes()
        n.op("delete", "DeleteSessionTensor", [n.const("name", name)])
        a.program(f"DeleteSessionTensor/{label}", n, [{"target": ["delete"], "error": True}], ops=["DeleteSessionTensor"])


def references(a):
    for d in ("float32", "int64", "string", "bool"):
        n = Nodes()
        n.op("v", "VariableV2", [], {"shape": [3], "dtype": d})
        n.op("init", "Assign", ["v", n.const("x", values(d, [3]))])
        n.op("same", "RefIdentity", ["v"])
        n.op("set", "Assign", ["same", n.const("y", values(d, [3], seed=1))])
        a.program(f"RefIdentity/{d}", n, [{"fetch": ["same"], "error": True}, {"target": ["init"]}, {"fetch": ["same"]}, {"target": ["set"]},
                                          {"fetch": ["v"]}], ops=["RefIdentity"])
    n = Nodes()
    n.op("same", "RefIdentity", [n.const("x", F(2))])
    a.program("RefIdentity/value", n, [{"fetch": ["same"], "error": True}], ops=["RefIdentity"])
    for label, shapes in (("same", [[2], [2], [2]]), ("shapes", [[2], [3], [1, 2]]), ("one", [[2]])):
        n = Nodes()
        for i, shape in enumerate(shapes):
            n.op(f"v{i}", "VariableV2", [], {"shape": shape, "dtype": "float32"})
            n.op(f"init{i}", "Assign", [f"v{i}", n.const(f"x{i}", F(*shape, seed=i))])
        n.op("init", "NoOp", [], control=[f"init{i}" for i in range(len(shapes))])
        n.op("index", "Placeholder", [], {"dtype": "int32"})
        n.op("one", "RefSelect", ["index", [f"v{i}" for i in range(len(shapes))]])
        n.op("neg", "Neg", ["one"])
        n.op("set", "Assign", ["one", n.const("y", F(*shapes[-1], seed=9))])
        at = lambda i: {"feed": {"index": array(i)}}
        runs = [{"target": ["init"]}] + [{"fetch": ["neg"], **at(i)} for i in range(len(shapes))]
        runs += [{"fetch": ["neg"], "error": True, **at(i)} for i in (len(shapes), -1, [0], [0, 0])]
        runs += [{"target": ["set"], **at(len(shapes) - 1)}] + [{"fetch": [f"v{i}"]} for i in range(len(shapes))]
        a.program(f"RefSelect/{label}", n, runs, ops=["RefSelect"])
    n = Nodes()
    n.op("v", "VariableV2", [], {"shape": [2], "dtype": "float32"})
    n.op("one", "RefSelect", [n.const("i", array(0)), ["v"]])
    a.program("RefSelect/uninitialized", n, [{"fetch": ["one"], "error": True}], ops=["RefSelect"])
    for label, i in (("vector", array([0])), ("float", array(0.0))):
        n = Nodes()
        n.op("v", "VariableV2", [], {"shape": [2], "dtype": "float32"})
        n.op("one", "RefSelect", [n.const("i", i), ["v"]])
        a.program(f"RefSelect/{label}", n, [{"fetch": ["one"], "error": True}], ops=["RefSelect"])


def locks(a):
    ops = ["MutexV2", "MutexLock", "ConsumeMutexLock"]
    n = Nodes()
    n.op("m", "MutexV2", [], {"shared_name": "m"})
    n.op("v", "VariableV2", [], {"shape": [], "dtype": "int32"})
    n.op("init", "Assign", ["v", n.const("zero", array(0))])
    one, last = n.const("one", array(1)), None
    for i in range(3):
        n.op(f"lock{i}", "MutexLock", ["m"])
        # The step is only done if each lock is given back by the one before.
        n.op(f"add{i}", "AssignAdd", ["v", one], control=[f"lock{i}"])
        n.op(f"done{i}", "ConsumeMutexLock", [f"lock{i}"], control=[f"add{i}"])
    n.op("all", "NoOp", [], control=["done0", "done1", "done2"])
    a.program("MutexV2/in-turn", n, [{"target": ["init"]}, {"target": ["all"]}, {"fetch": ["v"]}, {"target": ["all"]}, {"fetch": ["v"]}], ops=ops)
    n = Nodes()
    n.op("m", "MutexV2", [], {"shared_name": "m"})
    n.op("again", "MutexV2", [], {"shared_name": "m"})
    n.op("first", "MutexLock", ["m"])
    n.op("second", "MutexLock", ["again"], control=["first"])
    n.op("consume", "ConsumeMutexLock", ["first"], control=["second"])
    n.op("alone", "MutexLock", ["m"])
    n.op("free", "ConsumeMutexLock", ["alone"])
    a.program("MutexLock/held", n, [{"target": ["consume"], "error": True, "timeout_ms": 300}, {"target": ["free"]}], ops=ops)
    n = Nodes()
    n.op("m", "MutexV2", [])
    n.op("first", "MutexLock", ["m"])
    n.op("unused", "NoOp", [], control=["first"])
    a.program("MutexLock/dropped", n, [{"target": ["unused"]}, {"target": ["unused"]}], ops=["MutexV2", "MutexLock"])
    n = Nodes()
    n.op("q", "FIFOQueueV2", [], {"component_types": ["int32"], "shared_name": "q"})
    n.op("lock", "MutexLock", ["q"])
    n.op("done", "ConsumeMutexLock", ["lock"])
    a.program("MutexLock/queue", n, [{"target": ["done"], "error": True}], ops=["MutexLock"])
    for op, x in (("MutexLock", array(1.0)), ("ConsumeMutexLock", array(1.0))):
        n = Nodes()
        n.op("op", op, [n.const("x", x)])
        a.program(f"{op}/number", n, [{"target": ["op"], "error": True}], ops=[op])


def queues(a):
    n = Nodes()
    n.op("q", "FIFOQueueV2", [], {"component_types": ["float32"], "shapes": [[]], "shared_name": "q"})
    n.op("old", "FakeQueue", ["q"])
    n.op("put", "QueueEnqueueV2", ["q", [n.const("x", array(1.5))]])
    n.op("put_old", "QueueEnqueue", ["old", [n.const("y", array(2.5))]])
    n.op("size", "QueueSize", ["old"])
    n.op("size2", "QueueSizeV2", ["q"])
    n.op("pop", "QueueDequeue", ["old"], {"component_types": ["float32"]})
    n.op("close", "QueueClose", ["old"])
    a.program("FakeQueue/both", n, [{"target": ["put"]}, {"target": ["put_old"]}, {"fetch": ["size", "size2"]}, {"fetch": ["pop"]}, {"fetch": ["size2"]},
                                    {"target": ["close"]}, {"fetch": ["pop"]}, {"fetch": ["pop"], "error": True}], ops=["FakeQueue"])
    n = Nodes()
    n.op("old", "FakeQueue", [n.const("x", array(1.5))])
    n.op("size", "QueueSize", ["old"])
    a.program("FakeQueue/number", n, [{"fetch": ["size"], "error": True}], ops=["FakeQueue"])


def fed_values(a):
    for label, shape, good, bad in (("scalar", [], array(2.0), array([1.0])), ("partial", [None, 2], F(3, 2), F(3, 3)), ("any", None, F(1, 2), None)):
        n = Nodes()
        n.op("x", "PlaceholderV2", [], {"dtype": "float32", "shape": shape})
        n.op("y", "Neg", ["x"])
        runs = [{"fetch": ["y"], "feed": {"x": good}}, {"fetch": ["y"], "error": True}, {"fetch": ["x"], "feed": {"x": good}}]
        if bad is not None:
            runs.append({"fetch": ["y"], "feed": {"x": bad}, "error": True})
        a.program(f"PlaceholderV2/{label}", n, runs, ops=["PlaceholderV2"])
    # Abort ends TensorFlow's process, so it is placed in a branch that is not taken.
    n = Nodes()
    n.op("switch", "Switch", [n.const("x", F(2)), n.const("no", array(False))])
    n.op("yes", "Identity", ["switch:1"])
    n.op("abort", "Abort", [], {"error_msg": "enough"}, control=["yes"])
    n.op("after", "Identity", ["switch"])
    a.program("Abort/not-taken", n, [{"fetch": ["after"], "target": ["abort"]}], ops=["Abort"])


def pictures(a):
    """PNG files are compared by what they show: how they are packed is nobody's business."""
    for d in ("uint8", "uint16"):
        most = 255 if d == "uint8" else 65535
        for label, shape, kw in (("grey", [2, 3, 1], {}), ("grey-alpha", [2, 3, 2], {}), ("colour", [3, 2, 3], {}), ("alpha", [2, 2, 4], {}),
                                 ("stored", [2, 3, 3], {"compression": 0}), ("best", [2, 3, 3], {"compression": 9})):
            n = Nodes()
            n.op("png", "EncodePng", [n.const("in/0", values(d, shape, 0, most))], kw)
            n.op("back", "DecodePng", ["png"], {"dtype": d, "channels": 4 if shape[2] == 2 else 0})
            a.program(f"EncodePng/{d}/{label}", n, [{"fetch": ["back"]}], ops=["EncodePng"], fed=True)
    n = Nodes()
    n.op("png", "EncodePng", [n.const("in/0", values("uint8", [2, 1, 2, 3], 0, 255))])
    n.op("one", "GatherV2", ["png", n.const("i", array(1)), n.const("axis", array(0))], {"Tparams": "string"})
    n.op("back", "DecodePng", ["one"])
    n.op("shape", "Shape", ["png"])
    a.program("EncodePng/batch", n, [{"fetch": ["back", "shape"]}], ops=["EncodePng"])
    for label, x, kw in (("channels", values("uint8", [2, 2, 5], 0, 9), {}), ("matrix", values("uint8", [2, 2], 0, 9), {}),
                         ("no-channels", np.zeros([2, 2, 0], np.uint8), {}),
                         ("compression", values("uint8", [2, 2, 1], 0, 9), {"compression": 10}), ("negative", values("uint8", [2, 2, 1], 0, 9), {"compression": -2}),
                         ("float", F(2, 2, 1), {})):
        a.op("EncodePng", x, label=label, error=True, **kw)
    for d in ("uint8", "float32", "float16", "float64"):
        for label, shape, lo in (("grey", [1, 2, 2, 1], 0), ("colour", [1, 1, 2, 3], -2), ("alpha", [1, 2, 1, 4], 0)):
            image_summary(a, f"{d}/{label}", values(d, shape, 0 if d == "uint8" else lo, 200 if d == "uint8" else 2))
    image_summary(a, "zeros", np.zeros([1, 2, 2, 1], np.float32))
    image_summary(a, "nan", array([[[[NAN, 1.0, 2.0], [0.5, 1.0, -2.0]]]]))
    image_summary(a, "infinite", array([[[[INF], [0.5]], [[1.0], [-INF]]]]))
    image_summary(a, "bad-colour", array([[[[NAN, 1.0, 2.0], [0.5, 1.0, 2.0]]]]), bad_color=np.array([1, 2, 3], np.uint8))
    image_summary(a, "first-of-three", values("uint8", [3, 2, 2, 1], 0, 255))
    for most in (2, 3, 9):
        n = Nodes()
        n.op("summary", "ImageSummary", [n.const("in/tag", S("im")), n.const("in/x", values("uint8", [3, 1, 2, 1], 0, 255))], {"max_images": most})
        n.op("line", "Reshape", ["summary", n.const("s", array([1]))])
        n.op("parts", "StringSplitV2", ["line", n.const("sep", S("im/image/"))])
        n.op("last", "GatherV2", ["parts:1", n.const("i", array(2)), n.const("axis", array(0))])
        # Behind the number and the headers of an image is its file.
        n.op("png", "Substr", ["last", n.const("pos", array(11)), n.const("len", array(999))])
        n.op("pixels", "DecodePng", ["png"])
        n.op("head", "Substr", ["last", n.const("zero", array(0)), n.const("one", array(1))])
        a.program(f"ImageSummary/most-{most}", n, [{"fetch": ["parts:2", "head", "pixels"]}], ops=["ImageSummary"])
    x = values("uint8", [1, 2, 2, 1], 0, 9)
    a.op("ImageSummary", S("a"), x[:0], label="empty")
    for label, tag, images, kw in (("tags", W("a", "b"), x, {}), ("rank", S("a"), x[0], {}), ("two-channels", S("a"), values("uint8", [1, 2, 2, 2]), {}),
                                   ("no-rows", S("a"), x[:, :0], {}), ("int32", S("a"), x.astype(np.int32), {}), ("short-colour", S("a"), F(1, 1, 1, 3), {"bad_color": np.array([1, 2], np.uint8)}),
                                   ("float-colour", S("a"), F(1, 1, 1, 1), {"bad_color": array([1.0])}), ("no-images", S("a"), x, {"max_images": 0})):
        a.op("ImageSummary", tag, images, label=label, error=True, **kw)


def image_summary(a, label, x, **kw):
    """The tag and the size, which are in front of the PNG file, and the pixels of the file. All lengths are below 128, so
    that they take one byte each."""
    n = Nodes()
    n.op("summary", "ImageSummary", [n.const("in/tag", S("t")), n.const("in/x", x)], {"max_images": 1, **kw})
    for name, pos, length in (("tag", 2, 9), ("size", 13, 6), ("png", 21, 999)):
        n.op(name, "Substr", ["summary", n.const(f"{name}/pos", array(pos)), n.const(f"{name}/len", array(length))])
    n.op("pixels", "DecodePng", ["png"])
    a.program(f"ImageSummary/{label}", n, [{"fetch": ["tag", "size", "pixels"]}], ops=["ImageSummary"], fed=True)


def cases(a):
    sparse(a)
    images(a)
    volumes(a)
    equations(a)
    variables(a)
    tables(a)
    staging(a)
    rewritten(a)
    kept_values(a)
    references(a)
    locks(a)
    queues(a)
    fed_values(a)
    pictures(a)
