"""Cases of crates/kolo-ops/src/state: variables of both families, through several runs of one session."""

import numpy as np

from harness import ALL, FLOATS, NUMBERS, Nodes, array, registered_dtypes, values


def ref(nodes, value, name="v", op="VariableV2"):
    """A reference variable and its initialiser `init_v`."""
    value = array(value)
    nodes.op(name, op, [], {"shape": value.shape, "dtype": value_type(value)})
    nodes.op(f"init_{name}", "Assign", [name, nodes.const(f"{name}_value", value)])
    return name


def handle(nodes, value, name="v"):
    """A resource variable, its initialiser `init_v` and its value `read_v`."""
    value = array(value)
    nodes.op(name, "VarHandleOp", [], {"shape": value.shape, "dtype": value_type(value), "shared_name": name})
    nodes.op(f"init_{name}", "AssignVariableOp", [name, nodes.const(f"{name}_value", value)])
    nodes.op(f"read_{name}", "ReadVariableOp", [name], {"dtype": value_type(value)})
    return name


def value_type(value):
    return "string" if value.dtype.kind in "OS" else value.dtype.name


def assigning(a):
    for d in registered_dtypes("Assign", "T"):
        n = Nodes()
        ref(n, values(d, [2]))
        n.op("new", "Assign", ["v", n.const("value", values(d, [2], seed=1))])
        a.program(f"Assign/{d}", n, [{"fetch": ["init_v"]}, {"fetch": ["v"]}, {"fetch": ["new"]}, {"fetch": ["v"]}])
    for d in registered_dtypes("AssignVariableOp", "dtype"):
        n = Nodes()
        handle(n, values(d, [2]))
        n.op("new", "AssignVariableOp", ["v", n.const("value", values(d, [2], seed=1))])
        a.program(f"AssignVariableOp/{d}", n, [{"target": ["init_v"]}, {"fetch": ["read_v"]}, {"target": ["new"]},
                                               {"fetch": ["read_v"]}])
    for op in ("AssignAdd", "AssignSub"):
        for d in registered_dtypes(op, "T"):
            n = Nodes()
            ref(n, values(d, [3]))
            n.op("op", op, ["v", n.const("value", values(d, [3], seed=1))])
            a.program(f"{op}/{d}", n, [{"target": ["init_v"]}, {"fetch": ["op"]}, {"fetch": ["op"]}, {"fetch": ["v"]}])
        for d in registered_dtypes(op + "VariableOp", "dtype"):
            n = Nodes()
            handle(n, values(d, [3]))
            n.op("op", op + "VariableOp", ["v", n.const("value", values(d, [3], seed=1))])
            a.program(f"{op}VariableOp/{d}", n, [{"target": ["init_v"]}, {"target": ["op"]}, {"target": ["op"]},
                                                 {"fetch": ["read_v"]}])
        n = Nodes()
        ref(n, values("float32", [3]))
        n.op("op", op, ["v", n.const("value", values("float32", [1]))])
        a.refused(f"{op}/shape", n, ["op"], [op])
    n = Nodes()
    ref(n, values("float32", [2]))
    n.op("is", "IsVariableInitialized", ["v"])
    n.op("twice", "Mul", ["v", "v"])
    a.program("IsVariableInitialized/both", n, [{"fetch": ["is"]}, {"fetch": ["twice"], "error": True}, {"target": ["init_v"]},
                                                {"fetch": ["is", "twice"]}])
    n = Nodes()
    handle(n, values("float32", [2]))
    n.op("is", "VarIsInitializedOp", ["v"])
    n.op("shape", "VariableShape", ["v"])
    n.op("wide", "VariableShape", ["v"], {"out_type": "int64"})
    n.op("gone", "DestroyResourceOp", ["v"])
    n.op("gone-strict", "DestroyResourceOp", ["v"], {"ignore_lookup_error": False})
    n.op("add", "AssignAddVariableOp", ["v", n.const("wrong", values("float32", [3]))])
    a.program("VarHandleOp/life", n, [
        {"fetch": ["is"]}, {"fetch": ["read_v"], "error": True}, {"target": ["init_v"]}, {"fetch": ["is", "shape", "wide", "read_v"]},
        {"target": ["add"], "error": True}, {"target": ["gone"]}, {"fetch": ["is"]}, {"fetch": ["read_v"], "error": True},
        {"target": ["gone"]}, {"target": ["gone-strict"], "error": True}])
    n = Nodes()
    n.op("v", "VariableV2", [], {"shape": [2], "dtype": "float32"})
    n.op("other", "Assign", ["v", n.const("wide", values("float32", [3]))], {"validate_shape": False})
    n.op("strict", "Assign", ["v", n.const("narrow", values("float32", [2]))])
    a.program("Assign/shape-changes", n, [{"fetch": ["other"]}, {"fetch": ["v"]}, {"fetch": ["strict"], "error": True}])
    n = Nodes()
    n.op("v", "VariableV2", [], {"shape": [2], "dtype": "float32"})
    n.op("op", "Assign", ["v", n.const("value", values("float32", [3]))])
    a.refused("Assign/shape", n, ["op"], ["Assign"])
    n = Nodes()
    n.op("v", "VariableV2", [], {"shape": [2], "dtype": "float32", "shared_name": "shared"})
    n.op("w", "VariableV2", [], {"shape": [2], "dtype": "float32", "shared_name": "shared"})
    n.op("set", "Assign", ["v", n.const("value", values("float32", [2]))])
    a.program("VariableV2/shared", n, [{"target": ["set"]}, {"fetch": ["w"]}])
    for op, make in (("CountUpTo", ref), ("ResourceCountUpTo", handle)):
        for d in ("int32", "int64"):
            n = Nodes()
            make(n, array(1, d))
            n.op("op", op, ["v"], {"limit": 3, "T": d})
            a.program(f"{op}/{d}", n, [{"target": ["init_v"]}, {"fetch": ["op"]}, {"fetch": ["op"]}, {"fetch": ["op"], "error": True}])
    n = Nodes()
    n.op("t", "TemporaryVariable", [], {"shape": [2], "dtype": "float32", "var_name": "tmp"})
    n.op("set", "Assign", ["t", n.const("value", array([1.0, 2.0]))])
    n.op("add", "AssignAdd", ["set", n.const("more", array([3.0, 4.0]))])
    n.op("done", "DestroyTemporaryVariable", ["add"], {"var_name": "tmp"})
    a.program("TemporaryVariable/accumulates", n, [{"fetch": ["done"]}, {"fetch": ["done"]}])
    for op in ("Variable",):
        n = Nodes()
        ref(n, values("float32", [2]), op=op)
        a.program(f"{op}/value", n, [{"target": ["init_v"]}, {"fetch": ["v"]}])


SCATTER = ["Update", "Add", "Sub", "Mul", "Div", "Min", "Max"]


def scattering(a):
    for kind in SCATTER:
        for op, make, attr in ((f"Scatter{kind}", ref, "T"), (f"ResourceScatter{kind}", handle, "dtype")):
            for d in registered_dtypes(op, attr):
                if op == "ResourceScatterUpdate" and d == "string":
                    continue
                for label, start, indices, updates in (
                    ("rows", [4, 2], [2, 0], [2, 2]), ("twice", [4, 2], [1, 1], [2, 2]), ("scalar", [4, 2], [], [2]),
                    ("spread", [4, 2], [3, 1], []), ("none", [4, 2], [0], [0, 2])):
                    if label != "rows" and d not in ("float32", "int32"):
                        continue
                    if label == "twice" and kind == "Update":
                        continue
                    i = {"rows": [2, 0], "twice": [1, 1], "scalar": 3, "spread": [3, 1], "none": []}[label]
                    n = Nodes()
                    make(n, values(d, start, 1, 6))
                    wide = np.int64 if label == "rows" else np.int32
                    n.op("op", op, ["v", n.const("in/i", np.array(i, wide)), n.const("in/u", values(d, updates, 1, 3, seed=2))],
                         {attr: d})
                    see = ["v"] if make is ref else ["read_v"]
                    a.program(f"{op}/{d}/{label}", n, [{"target": ["init_v"]}, {"target": ["op"]}, {"fetch": see}], ops=[op], fed=True)
            for label, i in (("range", [4]), ("negative", [-1])):
                n = Nodes()
                make(n, values("float32", [4, 2]))
                n.op("op", op, ["v", n.const("in/i", array(i)), n.const("in/u", values("float32", [1, 2]))])
                a.program(f"{op}/{label}", n, [{"target": ["init_v"]}, {"target": ["op"], "error": True}], ops=[op], fed=True)
            n = Nodes()
            make(n, values("float32", [4, 2]))
            n.op("op", op, ["v", n.const("i", array([0, 1])), n.const("u", values("float32", [3, 2]))])
            if make is ref:
                a.refused(f"{op}/shape", n, ["op"], [op])
    for d in registered_dtypes("ResourceGather", "dtype"):
        n = Nodes()
        handle(n, values(d, [4, 2]))
        n.op("op", "ResourceGather", ["v", n.const("in/i", array([3, 0, 3]))], {"dtype": d})
        a.program(f"ResourceGather/{d}", n, [{"target": ["init_v"]}, {"fetch": ["op"]}], fed=True, ops=["ResourceGather"])
    n = Nodes()
    handle(n, values("float32", [4, 2]))
    n.op("op", "ResourceGather", ["v", n.const("in/i", array([4]))], {"dtype": "float32"})
    a.program("ResourceGather/range", n, [{"target": ["init_v"]}, {"fetch": ["op"], "error": True}], fed=True, ops=["ResourceGather"])


def cases(a):
    assigning(a)
    scattering(a)
