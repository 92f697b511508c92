"""Cases of crates/kolo-ops/src/queue: queues and accumulators, through several runs of one session."""

import numpy as np

from harness import Nodes, array, registered_dtypes, values

F = lambda *shape, seed=0: values("float32", list(shape), seed=seed)


def queue(n, kind, suffix, types, shapes=None, **attrs):
    given = dict(attrs, component_types=types)
    if kind == "PriorityQueue":
        given.pop("component_types")
        given["component_types"] = types[1:]
        given["shapes"] = shapes[1:]
    elif shapes is not None:
        given["shapes"] = shapes
    n.op("q", kind + suffix, [], given)
    for name, op in (("size", "QueueSize"), ("closed", "QueueIsClosed"), ("close", "QueueClose")):
        n.op(name, op + suffix, ["q"])
    n.op("cancel", "QueueClose" + suffix, ["q"], {"cancel_pending_enqueues": True})
    n.op("pop", "QueueDequeue" + suffix, ["q"], {"component_types": types})
    for k in (2, 5):
        n.op(f"pop{k}", "QueueDequeueMany" + suffix, ["q", n.const(f"n{k}", array(k))], {"component_types": types})
        n.op(f"upto{k}", "QueueDequeueUpTo" + suffix, ["q", f"n{k}"], {"component_types": types})
    return n


def push(n, suffix, name, *parts, many=False):
    op = ("QueueEnqueueMany" if many else "QueueEnqueue") + suffix
    n.op(name, op, ["q", [n.const(f"{name}/{i}", p) for i, p in enumerate(parts)]])


def fifo(a):
    for suffix in ("", "V2"):
        n = queue(Nodes(), "FIFOQueue", suffix, ["float32", "int32"], [[2], []])
        push(n, suffix, "one", F(2), array(1))
        push(n, suffix, "two", F(2, seed=1), array(2))
        push(n, suffix, "many", F(3, 2), array([7, 8, 9]), many=True)
        push(n, suffix, "wrong", F(3), array(2))
        run = lambda *t: {"target": list(t)}
        get = lambda *f, **kw: {"fetch": list(f), **kw}
        a.program(f"FIFOQueue{suffix}/order", n, [
            run("one"), run("two"), get("size"), get("pop", "pop:1"), run("many"), get("size"), get("pop2", "pop2:1"),
            get("size"), get("closed"), run("close"), get("closed"), get("upto5", "upto5:1"), get("size"),
            get("pop", error=True), get("pop2", error=True), get("upto2", error=True),
            {"target": ["one"], "error": True}, {"target": ["close"], "error": True}])
        n = queue(Nodes(), "FIFOQueue", suffix, ["float32"], [[2]], capacity=2)
        push(n, suffix, "one", F(2))
        push(n, suffix, "many", F(5, 2), many=True)
        a.program(f"FIFOQueue{suffix}/full", n, [
            run("one"), run("one"), {"target": ["one"], "error": True, "timeout_ms": 300}, get("pop"), run("one"),
            get("size"), get("pop2"), get("pop", error=True, timeout_ms=300)])
        n = queue(Nodes(), "FIFOQueue", suffix, ["float32"])
        push(n, suffix, "short", F(2))
        push(n, suffix, "long", F(3))
        a.program(f"FIFOQueue{suffix}/any-shape", n, [run("short"), run("long"), get("pop"), get("pop"),
                                                     get("pop2", error=True)])
        n = queue(Nodes(), "FIFOQueue", suffix, ["float32"], [[]])
        push(n, suffix, "one", array(1.5))
        a.program(f"FIFOQueue{suffix}/too-few", n, [run("one"), run("close"), get("pop5", error=True), get("size"), get("upto5")])
        n = queue(Nodes(), "PaddingFIFOQueue", suffix, ["float32"], [[None, 2]])
        push(n, suffix, "short", F(1, 2))
        push(n, suffix, "long", F(3, 2))
        a.program(f"PaddingFIFOQueue{suffix}/pads", n, [run("short"), run("long"), get("size"), get("pop2"), run("short"),
                                                        get("pop"), run("long"), run("close"), get("upto5")])
        n = queue(Nodes(), "PriorityQueue", suffix, ["int64", "string"], [[], []])
        for p, word in ((5, "five"), (1, "one"), (3, "three")):
            push(n, suffix, f"p{p}", np.array(p, np.int64), np.array(word.encode(), object))
        a.program(f"PriorityQueue{suffix}/order", n, [run("p5"), run("p1"), run("p3"), get("size"), get("pop", "pop:1"),
                                                      get("pop2", "pop2:1")])
        n = queue(Nodes(), "RandomShuffleQueue", suffix, ["int32"], [[]], seed=3, seed2=4, min_after_dequeue=2)
        push(n, suffix, "many", np.arange(8, dtype=np.int32), many=True)
        a.program(f"RandomShuffleQueue{suffix}/order", n, [
            run("many"), get("size"), get("pop"), get("pop5"), get("size"), get("pop", error=True, timeout_ms=300),
            run("close"), get("upto5"), get("pop", error=True)])
        n = queue(Nodes(), "RandomShuffleQueue", suffix, ["int32"], [[]], seed=3, seed2=4)
        push(n, suffix, "many", np.arange(5, dtype=np.int32), many=True)
        a.program(f"RandomShuffleQueue{suffix}/all", n, [run("many"), get("pop5"), get("size"), run("many"), get("pop"), get("pop")])


def accumulators(a):
    run = lambda *t: {"target": list(t)}
    get = lambda *f, **kw: {"fetch": list(f), **kw}
    for prefix, make in (("", "ConditionalAccumulator"), ("Resource", "ResourceConditionalAccumulator")):
        for reduction in ("MEAN", "SUM"):
            for d in ("float32", "float64"):
                n = Nodes()
                n.op("acc", make, [], {"dtype": d, "shape": [2], "reduction_type": reduction})
                step = lambda k: n.const(f"step{k}", np.array(k, np.int64))
                for k in (0, 1):
                    n.op(f"apply{k}", prefix + "AccumulatorApplyGradient",
                         ["acc", step(k), n.const(f"g{k}", values(d, [2], seed=k))], {"dtype": d})
                n.op("number", prefix + "AccumulatorNumAccumulated", ["acc"])
                n.op("take2", prefix + "AccumulatorTakeGradient", ["acc", n.const("two", array(2))], {"dtype": d})
                n.op("take1", prefix + "AccumulatorTakeGradient", ["acc", n.const("one", array(1))], {"dtype": d})
                n.op("set", prefix + "AccumulatorSetGlobalStep", ["acc", n.const("step5", np.array(5, np.int64))])
                n.op("back", prefix + "AccumulatorSetGlobalStep", ["acc", "step0"])
                a.program(f"{make}/{reduction}-{d}", n, [
                    get("number"), run("apply0"), run("apply0"), get("number"), get("take2"), get("number"), run("apply0"),
                    get("number"), run("apply1"), get("take1"), get("take1", error=True, timeout_ms=300), run("set"),
                    run("apply1"), get("number")])
                n.op("wrong", prefix + "AccumulatorApplyGradient",
                     ["acc", "step5", n.const("gw", values(d, [3]))], {"dtype": d})
                a.program(f"{make}/{reduction}-{d}-shape", n, [{"target": ["wrong"], "error": True}],
                          ops=[make, prefix + "AccumulatorApplyGradient"])
    for reduction in ("MEAN", "SUM"):
        n = Nodes()
        n.op("acc", "SparseConditionalAccumulator", [], {"dtype": "float32", "shape": [4, 2], "reduction_type": reduction})
        for name, rows, seed in (("a", [0, 2], 1), ("b", [2, 3], 2)):
            n.op(name, "SparseAccumulatorApplyGradient",
                 ["acc", n.const(f"{name}/step", np.array(0, np.int64)), n.const(f"{name}/i", np.array(rows, np.int64)),
                  n.const(f"{name}/v", F(2, 2, seed=seed)), n.const(f"{name}/s", np.array([4, 2], np.int64))],
                 {"dtype": "float32", "has_known_shape": True})
        n.op("take", "SparseAccumulatorTakeGradient", ["acc", n.const("n", array(1))], {"dtype": "float32"})
        n.op("number", "AccumulatorNumAccumulated", ["acc"])
        a.program(f"SparseConditionalAccumulator/{reduction}", n, [
            run("a"), run("b"), get("number"), get("take", "take:1", "take:2"), get("number"), run("b"), get("number")])


def cases(a):
    fifo(a)
    accumulators(a)
