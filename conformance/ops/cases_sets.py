"""Cases of sets and of more ops on sparse tensors."""

import numpy as np

from harness import FLOATS, Nodes, array, registered_dtypes, values

F = lambda *shape, seed=0: values("float32", list(shape), seed=seed)
L = lambda x: array(x, "int64")
SUMS = {"rtol": 1e-5, "atol": 1e-5, "half_atol": 1e-1}
ROWS, SHAPE = L([[0, 1], [1, 0], [3, 2]]), L([5, 3])


def sets(a):
    for operation in ("a-b", "b-a", "intersection", "union"):
        kw = {"set_operation": operation, "label": operation}
        for d in registered_dtypes("DenseToDenseSetOperation", "T"):
            a.op("DenseToDenseSetOperation", values(d, [2, 3, 4], 0, 4), values(d, [2, 3, 2], 0, 4, seed=1), dtype=d, **kw)
        sets1 = (L([[0, 0], [0, 2], [2, 1]]), array([5, 3, 1]), L([3, 3]))
        sets2 = (L([[0, 1], [1, 0], [2, 1], [2, 3]]), array([3, 9, 1, 2]), L([3, 5]))
        a.op("DenseToSparseSetOperation", array([[1, 2], [9, 9], [2, 1]]), *sets2, **kw)
        a.op("SparseToSparseSetOperation", *sets1, *sets2, **kw)
        a.op("DenseToDenseSetOperation", np.zeros([2, 0], np.int32), np.zeros([2, 0], np.int32), set_operation=operation,
             label=operation + "-empty")
    a.op("DenseToDenseSetOperation", array([[1]]), array([[1]]), label="unknown", set_operation="xor", error=True)
    a.op("DenseToDenseSetOperation", array([1]), array([1]), label="rank", set_operation="union", error=True)
    a.op("DenseToDenseSetOperation", array([[1]]), array([[1], [2]]), label="groups", set_operation="union", error=True)
    for d in ("int32", "int64", "string"):
        a.op("SetSize", L([[0, 0], [0, 1], [0, 2], [2, 1]]), values(d, [4]), L([3, 3]), dtype=d)
    a.op("SetSize", L([[1, 0], [0, 1]]), array([1, 2]), L([2, 2]), label="order", error=True)


def shapes(a):
    rows = L([[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 2, 3]])
    for label, new in (("inferred", [9, -1]), ("same", [2, 3, 6]), ("flat", [36]), ("more", [2, 3, 2, 3])):
        a.op("SparseReshape", rows, L([2, 3, 6]), L(new), label=label)
    a.op("SparseReshape", np.zeros([0, 2], np.int64), L([0, 3]), L([0]), label="empty")
    for label, new in (("two", [-1, -1]), ("multiple", [5, -1]), ("size", [5, 7]), ("negative", [-2, 18])):
        a.op("SparseReshape", rows, L([2, 3, 6]), L(new), label=label, error=True)
    for d in ("float32", "float64", "int32", "int64"):
        a.op("SparseTensorDenseAdd", ROWS, values(d, [3]), SHAPE, values(d, [5, 3], seed=1), dtype=d)
    a.op("SparseTensorDenseAdd", array([[0], [2]]), F(2), array([3]), F(3, seed=1), label="narrow", grad=False)
    a.op("SparseTensorDenseAdd", ROWS, F(3), SHAPE, F(5, 4), label="size", error=True)
    a.op("SparseTensorDenseAdd", L([[5, 0]]), F(1), SHAPE, F(5, 3), label="range", error=True)


def texts(a):
    for d in ("float32", "int64", "string"):
        a.op("SerializeSparse", ROWS, values(d, [3]), SHAPE, dtype=d)
        a.op("SerializeManySparse", ROWS, values(d, [3]), SHAPE, dtype=d)
        one = a.compute("SerializeSparse", ROWS, values(d, [3]), SHAPE)[0]
        many = a.compute("SerializeManySparse", ROWS, values(d, [3]), SHAPE)[0]
        for label, op, text in (("one", "DeserializeSparse", one), ("rows", "DeserializeSparse", many),
                                ("grid", "DeserializeSparse", np.stack([many[:4], many[1:]])), ("many", "DeserializeManySparse", many)):
            nodes = Nodes()
            nodes.op("op", op, [nodes.const("in/0", text)], {"dtype": d})
            a.program(f"{op}/{d}/{label}", nodes, [{"fetch": ["op", "op:1", "op:2"]}])
    a.op("SerializeManySparse", L([[1, 0], [0, 0]]), F(2), L([2, 1]), label="order", error=True)


def maps(a):
    for d in ("float32", "int64", "string"):
        nodes = Nodes()
        many = [nodes.const("i", ROWS), nodes.const("v", values(d, [3])), nodes.const("s", SHAPE)]
        one = [nodes.const("i1", L([[1], [7]])), nodes.const("v1", values(d, [2], seed=1)), nodes.const("s1", L([9]))]
        nodes.op("many", "AddManySparseToTensorsMap", many, {"shared_name": "m"})
        nodes.op("one", "AddSparseToTensorsMap", one, {"shared_name": "m"})
        nodes.graph.node.add(name="handles", op="Placeholder").attr["dtype"].type = 9
        nodes.dtypes["handles"] = array(0, "int64").dtype
        nodes.op("take", "TakeManySparseFromTensorsMap", ["handles"], {"dtype": d, "shared_name": "m"})
        fetch = ["take", "take:1", "take:2"]
        a.program(f"TakeManySparseFromTensorsMap/{d}", nodes, [
            {"fetch": ["many"]}, {"fetch": ["one"]}, {"fetch": fetch, "feed": {"handles": L([3, 5, 0])}},
            {"fetch": fetch, "feed": {"handles": L([1])}}, {"fetch": fetch, "feed": {"handles": L([3])}, "error": True}])


def segments(a):
    ids, where = array([0, 2, 1, 0]), array([0, 0, 1, 2])
    for op in ("SparseSegmentSumWithNumSegments", "SparseSegmentMeanWithNumSegments", "SparseSegmentSqrtNWithNumSegments"):
        for d in registered_dtypes(op, "T"):
            if d in FLOATS or d == "int32":
                a.op(op, values(d, [3, 2]), ids, where, array(5), dtype=d, **SUMS)
        a.op(op, F(3, 2), ids, where, array(2), label="few", error=True)
        a.op(op, F(3, 2), array([0, 9, 1, 0]), where, array(3), label="range", error=True)


def parts(a):
    wide = (L([[0, 1], [1, 0], [1, 4]]), L([2, 5]))
    for d in ("float32", "int32", "string"):
        other = (L([[0, 0], [1, 2]]), L([2, 5]))
        for axis in (0, 1, -1):
            a.op("SparseConcat", [wide[0], other[0]], [values(d, [3]), values(d, [2], seed=1)], [wide[1], other[1]], dtype=d,
                 label=f"axis{axis}", concat_dim=axis)
        for axis, n in ((0, 2), (1, 2), (1, 3), (1, 5)):
            a.op("SparseSplit", L(axis), wide[0], values(d, [3]), wide[1], dtype=d, label=f"axis{axis}-{n}", num_split=n)
        for label, start, size in (("part", [0, 1], [2, 3]), ("beyond", [1, 0], [5, 9]), ("nothing", [0, 2], [1, 1]), ("outside", [7, 0], [1, 1])):
            a.op("SparseSlice", wide[0], values(d, [3]), wide[1], L(start), L(size), dtype=d, label=label, grad=False)
    a.op("SparseConcat", [wide[0], wide[0]], [F(3), F(3)], [wide[1], L([3, 5])], label="shapes", concat_dim=1, error=True)
    a.op("SparseSplit", L(1), wide[0], F(3), wide[1], label="many", num_split=6, error=True)
    a.op("SparseSplit", L(2), wide[0], F(3), wide[1], label="axis", num_split=1, error=True)
    a.op("SparseSliceGrad", F(2), wide[0], L([0, 1]), L([[0, 0], [1, 3]]), grad=False)


def elements(a):
    rows, shape = L([[0, 1], [1, 0], [1, 2]]), L([2, 3])
    for op in ("SparseDenseCwiseAdd", "SparseDenseCwiseMul", "SparseDenseCwiseDiv"):
        for d in ("float32", "float64", "int32"):
            a.op(op, rows, values(d, [3]), shape, values(d, [2, 3], 1, 4, seed=1), dtype=d, grad=False)
        grad = op != "SparseDenseCwiseAdd"
        for label, dense in (("same", [2, 3]), ("row", [3]), ("column", [2, 1]), ("scalar", [])):
            a.op(op, rows, F(3), shape, values("float32", dense, 1, 4), label=label, grad=grad and label != "scalar", rtol=1e-5, atol=1e-5)
        a.op(op, rows, F(3), shape, F(2), label="shapes", error=True)
    for d in ("float32", "float64"):
        a.op("SparseSoftmax", rows, values(d, [3]), shape, dtype=d, rtol=1e-5, atol=1e-6)
    a.op("SparseSoftmax", L([[0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 1]]), F(4), L([2, 2, 3]), label="rank3", rtol=1e-5, atol=1e-6)
    for op in ("SparseReduceSum", "SparseReduceMax"):
        for d in ("float32", "float64", "int32"):
            a.op(op, rows, values(d, [3]), shape, array([1]), dtype=d)
        for label, axes in (("rows", [0]), ("back", [-2]), ("both", [0, 1]), ("one", 1)):
            a.op(op, rows, F(3), shape, array(axes), label=label)
            a.op(op, rows, F(3), shape, array(axes), label=label + "-kept", keep_dims=True)
        a.op(op, rows, F(3), shape, array([2]), label="axis", error=True)


def cases(a):
    for family in (sets, shapes, texts, maps, segments, parts, elements):
        family(a)
