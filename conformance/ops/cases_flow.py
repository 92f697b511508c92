"""Cases of crates/kolo-ops/src/flow: control flow of TensorFlow 1, tensor arrays, stacks, assertions; with gradients
through loops and branches."""

import numpy as np

from harness import Nodes, array, tf, tf1, values
from cases_state import handle, ref

F = lambda *shape, seed=0: values("float32", list(shape), seed=seed)


def graph(a, name, build, runs, ops=None, grad=False, **keys):
    """`build()` returns {name: tensor}; with `grad`, the gradient of `y` by `x` (and by `w` if there is one)."""
    g = tf.Graph()
    with g.as_default():
        named = build()
        for key, tensor in named.items():
            if isinstance(tensor, tf.Operation):
                tf1.group(tensor, name=key)
            else:
                tf.identity(tensor, name=key) if key not in ("x", "w") else None
        graph_def = g.as_graph_def()
        expect = None
        if grad:
            xs = [named[k] for k in ("x", "w") if k in named]
            y = g.get_tensor_by_name("y:0")
            grads = tf1.gradients(y, xs)
            with tf1.Session(graph=g) as s:
                expect = s.run(grads)

    def gradients(expected):
        start = len(expected)
        expected.extend(expect)
        return {"ys": ["y:0"], "dys": [], "xs": [x.name for x in xs], "expect": list(range(start, start + len(xs)))}

    a.program(name, graph_def, runs, ops=ops, grad=gradients if grad else None, **keys)


def const(value, name="x"):
    return tf.constant(array(value), name=name)


LOOP = ["Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond"]


def loops(a):
    def powers():
        x = const(array([1.5, -0.5]))
        _, y = tf1.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, y * x + 0.25), [0, x])
        return {"x": x, "y": y}

    def never():
        x = const(array([1.5]))
        _, y = tf1.while_loop(lambda i, y: i < 0, lambda i, y: (i + 1, y * x), [0, x * 2.0])
        return {"x": x, "y": y}

    def nested():
        x = const(array([1.25, 0.5]))

        def outer(i, y):
            _, z = tf1.while_loop(lambda j, z: j < i, lambda j, z: (j + 1, z * x + 0.5), [0, y])
            return i + 1, z + x
        _, y = tf1.while_loop(lambda i, y: i < 4, outer, [0, x])
        return {"x": x, "y": y}

    def dynamic():
        x = const(array(0.75))
        n, y = tf1.while_loop(lambda n, y: y < 20.0, lambda n, y: (n + 1, y * (1.5 + x)), [0, x])
        return {"x": x, "y": y, "n": n}

    def with_cond():
        x = const(array(1.5))
        body = lambda i, y: (i + 1, tf1.cond(tf.equal(i % 2, 0), lambda: y * x, lambda: y - x * x))
        _, y = tf1.while_loop(lambda i, y: i < 5, body, [0, x])
        return {"x": x, "y": y}

    def recurrent():
        x, w = const(F(4, 2, 3)), const(values("float32", [3, 3], -0.5, 0.5), "w")
        ta = tf1.TensorArray(tf.float32, 4, name="in_array").unstack(x)
        out = tf1.TensorArray(tf.float32, 4, name="out_array")

        def body(t, h, out):
            h = tf.tanh(tf.matmul(h, w) + ta.read(t))
            return t + 1, h, out.write(t, h)
        _, h, out = tf1.while_loop(lambda t, h, o: t < 4, body, [0, tf.zeros([2, 3]), out])
        y = out.stack() * tf.constant(values("float32", [4, 2, 3], seed=9))
        return {"x": x, "w": w, "y": y, "h": h}

    def shape_changes():
        x = const(array([1.0]))
        _, y = tf1.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.concat([y, y * x], 0)), [0, x],
                              shape_invariants=[tf.TensorShape([]), tf.TensorShape([None])])
        return {"x": x, "y": y}

    for build in (powers, never, nested, dynamic, with_cond, recurrent, shape_changes):
        extra = {"recurrent": ["h"], "dynamic": ["n"]}.get(build.__name__, [])
        ops = LOOP + (["TensorArrayV3", "TensorArrayReadV3", "TensorArrayWriteV3", "TensorArrayScatterV3",
                       "TensorArrayGatherV3", "TensorArrayGradV3"] if build is recurrent else [])
        graph(a, f"while/{build.__name__}", build, [{"fetch": ["y"] + extra}], ops=ops, grad=True, rtol=1e-5, atol=1e-6)


def branches(a):
    for value in (True, False):
        def plain():
            x = const(array([1.5, -2.0]))
            p = tf1.placeholder_with_default(value, [], name="p")
            return {"x": x, "y": tf1.cond(p, lambda: x * x, lambda: tf.exp(x))}

        def uneven():
            x = const(array([1.5, -2.0]))
            p = tf1.placeholder_with_default(value, [], name="p")
            return {"x": x, "y": tf1.cond(p, lambda: x * 3.0, lambda: tf.constant([7.0, 8.0]))}

        def nested():
            x = const(array([1.5, -2.0]))
            p = tf1.placeholder_with_default(value, [], name="p")
            inner = lambda: tf1.cond(tf.reduce_sum(x) > 0.0, lambda: x * 2.0, lambda: x * x * x)
            return {"x": x, "y": tf1.cond(p, inner, lambda: x + 1.0)}

        for build in (plain, uneven, nested):
            graph(a, f"cond/{build.__name__}-{value}", build,
                  [{"fetch": ["y"]}, {"fetch": ["y"], "feed": {"p": np.array(not value)}}, {"fetch": ["y"]}],
                  ops=["Switch", "Merge", "PlaceholderWithDefault"], grad=True)
    n = Nodes()
    n.op("s", "Switch", [n.const("in/0", F(2)), n.const("in/1", array(True))])
    n.op("t", "Identity", ["s:1"])
    n.op("f", "Neg", ["s"])
    n.op("m", "Merge", [["f", "t"]])
    a.program("Switch/true", n, [{"fetch": ["m", "m:1", "t"]}, {"fetch": ["f"], "error": True}], fed=True,
              ops=["Switch", "Merge"])


def arrays(a):
    def array_case(name, build, fetches, grad=True, **kw):
        graph(a, f"TensorArray/{name}", build, [{"fetch": fetches, **kw}], grad=grad, ops=None)

    def unstacked():
        x = const(F(3, 2))
        ta = tf1.TensorArray(tf.float32, 3).unstack(x)
        return {"x": x, "y": ta.read(2) * ta.read(0), "size": ta.size()}

    def gathered():
        x = const(F(3, 2))
        ta = tf1.TensorArray(tf.float32, 3, clear_after_read=False).unstack(x)
        return {"x": x, "y": ta.gather([2, 0, 2])}

    def concatenated():
        x = const(F(5, 2))
        ta = tf1.TensorArray(tf.float32, 3, infer_shape=False).split(x, [2, 0, 3])
        return {"x": x, "y": ta.concat() * tf.constant(F(5, 2, seed=3)), "first": ta.size()}

    def scattered():
        x = const(F(2, 2))
        ta = tf1.TensorArray(tf.float32, 4, dynamic_size=True).scatter([3, 1], x)
        return {"x": x, "y": ta.read(3) - ta.read(1)}

    def grown():
        x = const(array(1.5))
        ta = tf1.TensorArray(tf.float32, 0, dynamic_size=True)
        ta = ta.write(0, x).write(2, x * x)
        ta = ta.write(1, x + 1.0)
        return {"x": x, "y": ta.stack(), "size": ta.size()}

    array_case("unstacked", unstacked, ["y", "size"])
    array_case("gathered", gathered, ["y"])
    array_case("concatenated", concatenated, ["y", "first"])
    array_case("scattered", scattered, ["y"])
    array_case("grown", grown, ["y", "size"])

    def beyond():
        ta = tf1.TensorArray(tf.float32, 2)
        return {"y": ta.write(2, 1.0).read(2)}

    def twice():
        ta = tf1.TensorArray(tf.float32, 2).write(0, 1.0)
        return {"y": ta.write(0, 2.0).read(0)}

    def unwritten():
        return {"y": tf1.TensorArray(tf.float32, 2, infer_shape=False).read(1)}

    def read_twice():
        ta = tf1.TensorArray(tf.float32, 1).write(0, 1.0)
        first = ta.read(0)
        with tf.control_dependencies([first]):
            return {"y": ta.read(0)}

    def wrong_shape():
        ta = tf1.TensorArray(tf.float32, 2, infer_shape=False, element_shape=[2])
        return {"y": ta.write(0, tf1.placeholder_with_default([1.0, 2.0, 3.0], None)).read(0)}

    for build in (beyond, twice, unwritten, read_twice, wrong_shape):
        graph(a, f"TensorArray/{build.__name__}", build, [{"fetch": ["y"], "error": True}])
    n = Nodes()
    n.op("s", "StackV2", [n.const("n", array(-1))], {"elem_type": "float32"})
    n.op("p1", "StackPushV2", ["s", n.const("a", F(2))])
    n.op("p2", "StackPushV2", ["s", n.const("b", F(3))], control=["p1"])
    n.op("o1", "StackPopV2", ["s"], {"elem_type": "float32"}, control=["p2"])
    n.op("o2", "StackPopV2", ["s"], {"elem_type": "float32"}, control=["o1"])
    n.op("c", "StackCloseV2", ["s"], control=["o2"])
    n.op("empty", "StackPopV2", ["s"], {"elem_type": "float32"})
    a.program("StackV2/order", n, [{"fetch": ["o1", "o2"], "target": ["c"]}, {"fetch": ["empty"], "error": True}])
    n = Nodes()
    n.op("s", "StackV2", [n.const("n", array(1))], {"elem_type": "float32"})
    n.op("p1", "StackPushV2", ["s", n.const("a", F(2))])
    n.op("p2", "StackPushV2", ["s", n.const("b", F(3))], control=["p1"])
    a.program("StackV2/full", n, [{"fetch": ["p2"], "error": True}])


def checks(a):
    for value in (True, False):
        n = Nodes()
        n.op("op", "Assert", [n.const("in/0", np.array(value)), [n.const("in/1", F(2)), n.const("in/2", array(7))]])
        a.program(f"Assert/{value}", n, [{"target": ["op"], **({} if value else {"error": True})}], fed=True, ops=["Assert"])
    n = Nodes()
    n.op("op", "Assert", [n.const("in/0", array([True, True])), [n.const("in/1", F(2))]])
    a.program("Assert/vector", n, [{"target": ["op"], "error": True}], fed=True, ops=["Assert"])
    n = Nodes()
    n.op("op", "Timestamp", [])
    a.program("Timestamp/shape", n, [{"fetch": ["op"], "compare": "shape"}])
    n = Nodes()
    n.op("p", "PlaceholderWithDefault", [n.const("in/0", F(2))], {"shape": [None]})
    a.program("PlaceholderWithDefault/both", n, [{"fetch": ["p"]}, {"fetch": ["p"], "feed": {"p": F(3)}}])
    n = Nodes()
    n.op("p", "Placeholder", [], {"dtype": "float32", "shape": [2]})
    n.op("y", "Neg", ["p"])
    a.program("Placeholder/fed", n, [{"fetch": ["y"], "feed": {"p": F(2)}}, {"fetch": ["y"], "error": True},
                                     {"fetch": ["y"], "feed": {"p": F(3)}, "error": True}], ops=["Placeholder"])
    n = Nodes()
    n.op("op", "Print", [n.const("in/0", F(2)), [n.const("in/1", array(7))]], {"message": "kolo"})
    a.program("Print/passes", n, [{"fetch": ["op"]}], fed=True, ops=["Print"])
    n = Nodes()
    n.op("op", "StringFormat", [[n.const("in/0", F(2)), n.const("in/1", array(7))]],
         {"template": "a %s b %s", "placeholder": "%s"})
    a.program("StringFormat/two", n, [{"fetch": ["op"]}], fed=True, ops=["StringFormat"])
    for d, v in (("float32", array([[1.5, 2.0], [3.25, -1e10]])), ("bool", np.array([True, False])),
                 ("string", np.array([b"a", b"b"], object)), ("long", np.arange(20, dtype=np.int32)),
                 ("float64", np.array([0.1, 1e-20, 12345678.9]))):
        n = Nodes()
        n.op("op", "StringFormat", [[n.const("in/0", v)]], {"template": "%s!"})
        a.program(f"StringFormat/{d}", n, [{"fetch": ["op"]}], fed=True, ops=["StringFormat"])
    n = Nodes()
    n.op("c", "ControlTrigger", [])
    n.op("y", "Identity", [n.const("in/0", F(2))], control=["c"])
    a.program("ControlTrigger/runs", n, [{"fetch": ["y"]}], ops=["ControlTrigger"])
    n = Nodes()
    n.op("c", "NoOp", [])
    a.program("NoOp/runs", n, [{"target": ["c"]}], ops=["NoOp"])


def references(a):
    """Control flow over references to variables."""
    for value in (True, False):
        n = Nodes()
        ref(n, array([1.0, 2.0]))
        n.op("s", "RefSwitch", ["v", n.const("p", np.array(value))])
        n.op("t", "AssignAdd", ["s:1", n.const("one", array([1.0, 1.0]))])
        n.op("f", "AssignAdd", ["s", n.const("ten", array([10.0, 10.0]))])
        n.op("m", "RefMerge", [["f", "t"]])
        a.program(f"RefSwitch/{value}", n, [{"target": ["init_v"]}, {"fetch": ["m", "m:1"]}, {"fetch": ["v"]}])
    n = Nodes()
    ref(n, array([1.0, 2.0]))
    frame = {"frame_name": "loop"}
    n.op("in_i", "Enter", [n.const("zero", array(0))], frame)
    n.op("in_v", "RefEnter", ["v"], frame)
    for name, value in (("three", array(3)), ("step", array(1)), ("more", array([1.0, 0.5]))):
        n.op(f"in_{name}", "Enter", [n.const(name, value)], dict(frame, is_constant=True))
    n.dtypes["next_i"], n.dtypes["next_v"] = tf.int32, tf.float32
    n.op("m_i", "Merge", [["in_i", "next_i"]])
    n.op("m_v", "RefMerge", [["in_v", "next_v"]])
    n.op("less", "Less", ["m_i", "in_three"])
    n.op("go", "LoopCond", ["less"])
    n.op("s_i", "Switch", ["m_i", "go"])
    n.op("s_v", "RefSwitch", ["m_v", "go"])
    n.op("i", "Add", ["s_i:1", "in_step"])
    n.op("next_i", "NextIteration", ["i"])
    n.op("add", "AssignAdd", ["s_v:1", "in_more"])
    n.op("next_v", "RefNextIteration", ["add"])
    n.op("out", "RefExit", ["s_v"])
    a.program("RefEnter/loop", n, [{"target": ["init_v"]}, {"fetch": ["out"]}, {"fetch": ["v"]}])


def more(a):
    n = Nodes()
    n.op("op", "PrintV2", [n.const("in/0", np.array(b"kolo", object))], {"output_stream": "stderr"})
    a.program("PrintV2/prints", n, [{"target": ["op"]}], fed=True, ops=["PrintV2"])
    n = Nodes()
    n.op("ta", "TensorArrayV3", [n.const("n", array(2))], {"dtype": "float32"})
    n.op("w", "TensorArrayWriteV3", ["ta", n.const("i", array(0)), n.const("x", F(2)), "ta:1"])
    n.op("r", "TensorArrayReadV3", ["ta", "i", "w"], {"dtype": "float32"})
    n.op("c", "TensorArrayCloseV3", ["ta"], control=["r"])
    n.op("late", "TensorArrayReadV3", ["ta", "i", "w"], {"dtype": "float32"}, control=["c"])
    a.program("TensorArrayCloseV3/closes", n, [{"fetch": ["r"], "target": ["c"]}, {"fetch": ["late"], "error": True}])
    for d in ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
              "uint64", "bool", "string"):
        for label, shape in (("matrix", [2, 3]), ("scalar", []), ("empty", [0, 2])):
            n = Nodes()
            n.const("c", values(d, shape))
            a.program(f"Const/{d}/{label}", n, [{"fetch": ["c"]}], ops=["Const"])
    n = Nodes()
    handle(n, array([1.0, 2.0]))
    n.op("d", "DisableCopyOnRead", ["v"])
    a.program("DisableCopyOnRead/runs", n, [{"target": ["init_v"]}, {"target": ["d"]}, {"fetch": ["read_v"]}])


def cases(a):
    references(a)
    more(a)
    loops(a)
    branches(a)
    arrays(a)
    checks(a)
