"""Builds cases, runs them in TensorFlow, and writes what it computed.

A case is one GraphDef: the nodes under test, their inputs as Const nodes `in/…`, the values TensorFlow computed as
Const nodes `expected/…`, and a NoOp `case` whose attribute `_case` is JSON that says what to run. tests/golden_ops
reads them; conformance/ops/README.md says how to add one.
"""

import gzip
import json
import os
import shutil
import struct
import tempfile
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # The plain kernels: oneDNN's round differently.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, types_pb2
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.framework import ops as tf_ops

tf1 = tf.compat.v1
tf1.disable_eager_execution()
tf1.disable_control_flow_v2()
tf1.disable_resource_variables()

BF16 = tf.bfloat16.as_numpy_dtype
FLOATS = ["float32", "float64", "float16", "bfloat16"]
INTS = ["int32", "int64", "int8", "int16", "uint8", "uint16", "uint32", "uint64"]
NUMBERS = FLOATS + INTS
ALL = NUMBERS + ["bool", "string"]

# What Kolo computes with; complex and quantised types are known by name only.
KNOWN_DTYPES = set(ALL)


def np_dtype(name):
    return BF16 if name == "bfloat16" else object if name in ("string", "bytes") else np.dtype(name)


def config():
    """No constant folding, no rewriting: the kernels themselves are asked."""
    c = tf1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    off = rewriter_config_pb2.RewriterConfig.OFF
    c.graph_options.optimizer_options.opt_level = tf1.OptimizerOptions.L0
    c.graph_options.optimizer_options.do_constant_folding = False
    r = c.graph_options.rewrite_options
    r.disable_meta_optimizer = True
    for f in ("constant_folding", "arithmetic_optimization", "remapping", "layout_optimizer", "shape_optimization"):
        setattr(r, f, off)
    return c


def registered_dtypes(op, attr):
    """The dtypes of `attr` that TensorFlow has a CPU kernel of `op` for, of those that Kolo computes with."""
    allowed = None
    for a in op_def_registry.get(op).attr:
        if a.name == attr and a.allowed_values.list.type:
            allowed = [tf.dtypes.as_dtype(t).name for t in a.allowed_values.list.type]
    found = set()
    for k in kernels.get_registered_kernels_for_op(op).kernel:
        if k.device_type not in ("CPU", "DEFAULT"):
            continue
        constraint = [c for c in k.constraint if c.name == attr]
        if not constraint:
            found |= set(allowed or ALL)
        for c in constraint:
            found |= {tf.dtypes.as_dtype(t).name for t in c.allowed_values.list.type}
    if allowed is not None:
        found &= set(allowed)
    return [d for d in ALL if d in found]


def attr_value(kind, value):
    """A Python value as the AttrValue that an OpDef's attribute of this kind wants."""
    out = attr_value_pb2.AttrValue()
    if kind.startswith("list("):
        inner = kind[5:-1]
        out.list.SetInParent()
        for v in value:
            one = attr_value(inner, v)
            field = one.WhichOneof("value")
            if field in ("shape", "tensor", "func"):
                getattr(out.list, field).add().CopyFrom(getattr(one, field))
            else:
                getattr(out.list, field).append(getattr(one, field))
        return out
    if kind == "string":
        out.s = value if isinstance(value, bytes) else value.encode()
    elif kind == "int":
        out.i = int(value)
    elif kind == "float":
        out.f = float(value)
    elif kind == "bool":
        out.b = bool(value)
    elif kind == "type":
        out.type = tf.dtypes.as_dtype(value).as_datatype_enum
    elif kind == "shape":
        out.shape.CopyFrom(tf.TensorShape(value).as_proto())
    elif kind == "tensor":
        out.tensor.CopyFrom(tensor_proto(value))
    else:
        raise ValueError(f"attributes of kind {kind} cannot be written yet")
    return out


def tensor_proto(value):
    value = np.asarray(value)
    if value.dtype.kind in "OSU":
        return tf.make_tensor_proto(value, dtype=tf.string, shape=value.shape)
    return tf.make_tensor_proto(value, shape=value.shape)


def array(value, dtype=None):
    """A numpy array of one of the dtypes above; Python ints are int32 and floats float32, as in TensorFlow."""
    if dtype is not None:
        return np.asarray(value, np_dtype(dtype))
    a = np.asarray(value)
    if isinstance(value, np.ndarray) or isinstance(value, np.generic):
        return a.astype(object) if a.dtype.kind in "SU" else a
    if a.dtype == np.int64:
        return a.astype(np.int32)
    if a.dtype == np.float64:
        return a.astype(np.float32)
    return a.astype(object) if a.dtype.kind in "SU" else a


def dtype_of(a):
    return tf.string if a.dtype.kind in "OSU" else tf.dtypes.as_dtype(a.dtype)


def values(dtype, shape, lo=None, hi=None, seed=0):
    """Numbers of this dtype, the same on every run: between lo and hi, -4 and 4 (0 and 8 without a sign) if not said."""
    rng = np.random.RandomState(zlib.crc32(repr((dtype, tuple(shape), lo, hi, seed)).encode()) & 0x7FFFFFFF)
    n = int(np.prod(shape))
    if dtype == "bool":
        return rng.randint(0, 2, n).astype(bool).reshape(shape)
    if dtype == "string":
        words = [b"", b"a", b"bc", b"kolo", b"\xff\x00\x01", "ž".encode()]
        return np.array([words[i] for i in rng.randint(0, len(words), n)] + [b""], object)[:n].reshape(shape)
    unsigned = dtype.startswith("u")
    lo = (0 if unsigned else -4) if lo is None else lo
    hi = (8 if unsigned else 4) if hi is None else hi
    if dtype in INTS:
        return rng.randint(int(lo), int(hi) + 1, n).astype(dtype).reshape(shape)
    # Few digits, so that files stay small and products stay exact in the small floats.
    v = np.round(rng.uniform(lo, hi, n) * 16) / 16
    return v.astype(np_dtype(dtype)).reshape(shape)


class Failure(Exception):
    """TensorFlow refused a case that was meant to work, or took one that was not."""


class Nodes:
    """A GraphDef under construction."""

    def __init__(self):
        self.graph = graph_pb2.GraphDef()
        self.graph.versions.producer = tf.version.GRAPH_DEF_VERSION
        self.dtypes = {}  # output name -> dtype

    def const(self, name, value):
        n = self.graph.node.add(name=name, op="Const")
        a = array(value)
        n.attr["dtype"].type = dtype_of(a).as_datatype_enum
        n.attr["value"].tensor.CopyFrom(tensor_proto(a))
        self.dtypes[name] = dtype_of(a)
        return name

    def op(self, name, op, inputs, attrs=None, control=()):
        """A node; `inputs` are names of outputs (a list of them where the op takes several in one argument). Type and
        number attributes follow from the inputs."""
        attrs = dict(attrs or {})
        op_def = op_def_registry.get(op)
        if op_def is None:
            raise Failure(f"TensorFlow has no op {op}")
        kinds = {a.name: a.type for a in op_def.attr}
        if op_def.deprecation.version:
            # As old as the op, so that TensorFlow still takes it.
            versions = self.graph.versions
            versions.producer = min(versions.producer, op_def.deprecation.version - 1)
        n = self.graph.node.add(name=name, op=op)
        found = {}
        if len(inputs) != len(op_def.input_arg):
            raise Failure(f"{op} takes {len(op_def.input_arg)} arguments, not {len(inputs)}")
        for arg, given in zip(op_def.input_arg, inputs):
            given = given if isinstance(given, list) else [given]
            n.input.extend(given)
            types = [self.dtypes.get(g if ":" in g else g, self.dtypes.get(g.split(":")[0])) for g in given]
            if arg.number_attr:
                found[arg.number_attr] = len(given)
            if arg.type_attr and types and types[0] is not None:
                found.setdefault(arg.type_attr, types[0])
            if arg.type_list_attr:
                found[arg.type_list_attr] = types
        found.update(attrs)
        for key, value in found.items():
            if key.startswith("_"):
                n.attr[key].CopyFrom(value)
            elif key not in kinds:
                raise Failure(f"{op} has no attribute {key}")
            else:
                n.attr[key].CopyFrom(attr_value(kinds[key], value))
        n.input.extend("^" + c for c in control)
        index = 0
        for arg in op_def.output_arg:
            def attr(k):
                if k in found:
                    return found[k]
                default = next(a.default_value for a in op_def.attr if a.name == k)
                return default.type if default.WhichOneof("value") == "type" else default.i
            if arg.type_list_attr:
                types = [tf.dtypes.as_dtype(t) for t in attr(arg.type_list_attr)]
            else:
                t = tf.dtypes.as_dtype(attr(arg.type_attr) if arg.type_attr else arg.type)
                types = [t] * (int(attr(arg.number_attr)) if arg.number_attr else 1)
            for t in types:
                self.dtypes[name if index == 0 else f"{name}:{index}"] = t
                index += 1
        self.outputs = [name if i == 0 else f"{name}:{i}" for i in range(index)]
        return name


def imported(graph_def):
    g = tf.Graph()
    with g.as_default():
        tf.import_graph_def(graph_def, name="")
    return g


def error_name(e):
    if isinstance(e, tf.errors.OpError):
        return types_code(e.error_code)
    if isinstance(e, (ValueError, TypeError)):
        return "INVALID_ARGUMENT"
    raise e


def types_code(number):
    names = {v: k for k, v in vars(tf.errors).items() if k.isupper() and isinstance(v, int)}
    return names[number]


def fed(graph_def):
    """The same graph with every `in/…` as a placeholder of unknown shape, and what to feed."""
    out, feeds = graph_pb2.GraphDef(), {}
    out.CopyFrom(graph_def)
    for n in out.node:
        if n.name.startswith("in/") and n.op == "Const":
            feeds[n.name + ":0"] = tf.make_ndarray(n.attr["value"].tensor)
            n.op = "Placeholder"
            del n.attr["value"]
            n.attr["shape"].shape.unknown_rank = True
    return out, feeds


def replaced(value, old, new):
    """A value with `old` replaced in its strings, if it has any."""
    if isinstance(value, bytes):
        return value.replace(old, new)
    if not isinstance(value, np.ndarray) or value.dtype != object:
        return value
    out = np.empty(value.shape, object)
    for i, text in np.ndenumerate(value):
        out[i] = (text.encode() if isinstance(text, str) else text).replace(old, new)
    return out


def in_folder(graph_def, folder):
    """The same graph with the folder's name for `{dir}` in its constants."""
    if b"{dir}" not in graph_def.SerializeToString():
        return graph_def
    out = graph_pb2.GraphDef.FromString(graph_def.SerializeToString())
    for n in out.node:
        if n.op == "Const":
            texts = n.attr["value"].tensor.string_val
            texts[:] = [t.replace(b"{dir}", folder) for t in texts]
    return out


def as_feed(value, node, number):
    """A result as what another run is fed: of a handle, its name. Python cannot read a resource handle's name; it is made
    of the node, the number of the handle in its session, and the device."""
    value = getattr(value, "handle", value)
    if isinstance(value, str) and value.startswith("["):
        value = f"{node};{number};/job:localhost/replica:0/task:0/device:CPU:0"
    return np.array(value.encode() if isinstance(value, str) else value, object)


class Area:
    """The cases of one area, that is, of one golden file."""

    def __init__(self, name, only=None):
        self.name, self.only = name, only
        self.written, self.names, self.failures = [], set(), []
        self.forward, self.gradient = {}, {}

    # ---- one op, one run

    def op(self, op, *inputs, label="", dtype=None, grad=None, error=False, exact=False, rtol=None, atol=None,
           compare="equal", fetch=None, feed=True, expected=None, half_atol=None, **attrs):
        """One call of `op`. An input is an array, or a list of arrays where the op takes several. `error=True` wants
        TensorFlow to refuse it. `grad` is whether to compare gradients too; by default where TensorFlow has them and
        the inputs are float or double; `{dir}` in a string stands for an empty folder. `expected` are the results where TensorFlow cannot run it as it is; `half_atol`
        the absolute tolerance of half and bfloat16 alone."""
        name = "/".join(str(p) for p in (op, dtype, label) if p)
        if self.skipped(name):
            return
        try:
            self._op(name, op, inputs, attrs, grad, error, exact, rtol, atol, compare, fetch, feed, expected,
                     half_atol)
        except Exception as e:  # noqa: BLE001: one bad row must not hide the others
            self.failures.append(f"{self.name}: {name}: {type(e).__name__}: {str(e)[:300]}")

    def each(self, op, make, attr="T", label="", dtypes=None, **kw):
        """`make(dtype)` gives the inputs, for every dtype of `attr` that TensorFlow registers on CPUs."""
        for d in registered_dtypes(op, attr):
            if dtypes is None or d in dtypes:
                inputs = make(d)
                self.op(op, *(inputs if isinstance(inputs, (list, tuple)) else [inputs]), label=label, dtype=d, **kw)

    def skipped(self, name):
        if name in self.names:
            self.failures.append(f"{self.name}: there are two cases '{name}'")
            return True
        self.names.add(name)
        return self.only is not None and self.only not in name

    def _op(self, name, op, inputs, attrs, grad, error, exact, rtol, atol, compare, fetch, feed, expected,
            half_atol):
        nodes, args = Nodes(), []
        for i, given in enumerate(inputs):
            if isinstance(given, list) and any(isinstance(g, np.ndarray) for g in given):
                args.append([nodes.const(f"in/{i}/{j}", g) for j, g in enumerate(given)])
            elif isinstance(given, list) and not given:
                args.append([])
            else:
                args.append(nodes.const(f"in/{i}", given))
        nodes.op("op", op, args, attrs)
        fetches = [nodes.outputs[i] for i in fetch] if fetch is not None else list(nodes.outputs)
        fetches = [f if ":" in f else f + ":0" for f in fetches]
        run = {"fetch": fetches} if fetches else {"target": ["op"]}
        case = {"name": name, "ops": [op], "runs": [run]}
        if b"{dir}" in nodes.graph.SerializeToString():
            case["dir"] = True
        if not feed:
            case["fed"] = False
        for key, value in (("rtol", rtol), ("atol", atol), ("half_atol", half_atol)):
            if value is not None:
                case[key] = value
        if exact:
            case["exact"] = True
        if compare != "equal":
            run["compare"] = compare
        if expected is not None:
            run["expect"] = list(range(len(expected)))
            return self.write(case, nodes.graph, expected)
        code, got = self.run_once(nodes.graph, fetches, {})
        fed_graph, feeds = fed(nodes.graph)
        fed_code, _ = self.run_once(fed_graph, fetches, feeds) if feeds else (code, None)
        if error != (code is not None):
            raise Failure(f"TensorFlow {'took it' if error else 'refused it: ' + str(code)}"
                          + ("" if error else f": {self.last_error}"))
        if error:
            run["error"] = code
            if fed_code != code:
                run["error_fed"] = fed_code or "OK"
            return self.write(case, nodes.graph, [])
        if fed_code is not None:
            # Some checks look at static shapes only in TensorFlow; such cases are compared with constants alone.
            case["fed"] = False
        expected = list(got)
        run["expect"] = list(range(len(expected)))
        if grad is None:
            grad = self.has_gradient(op) and all(a.dtype in (np.float32, np.float64, np.int32, np.int64, np.bool_)
                                                 for a in flat(inputs))
        if grad:
            self.add_gradient(case, nodes, args, expected)
        self.write(case, nodes.graph, expected)

    @staticmethod
    def has_gradient(op):
        try:
            return tf_ops._gradient_registry.lookup(op) is not None
        except LookupError:
            return False

    def add_gradient(self, case, nodes, args, expected):
        """Adds `tf.gradients` of all float outputs by all float inputs, with given gradients of the outputs."""
        g = imported(nodes.graph)
        op = g.get_operation_by_name("op")
        ys = [y for y in op.outputs if y.dtype in (tf.float32, tf.float64)]
        xs = [g.get_tensor_by_name(a + ":0") for a in flat_names(args)]
        xs = [x for x in xs if x.dtype in (tf.float32, tf.float64)]
        if not ys or not xs:
            return
        run = case["runs"][0]
        by_name = dict(zip(run["fetch"], expected))
        ys = [y for y in ys if y.name in by_name]
        with g.as_default():
            dys = [values(y.dtype.name, by_name[y.name].shape, -1, 1, seed=7 + i) for i, y in enumerate(ys)]
            grads = tf1.gradients(ys, xs, grad_ys=[tf.constant(d) for d in dys])
            if all(d is None for d in grads):
                return
            grads = [None if d is None else tf.convert_to_tensor(d) for d in grads]
            with tf1.Session(graph=g, config=config()) as s:
                got = iter(s.run([d for d in grads if d is not None]))
        start = len(expected)
        dense = [None if d is None else next(got) for d in grads]
        index, wanted = start, []
        for d in dense:
            wanted.append(None if d is None else index)
            index += d is not None
        expected.extend(d for d in dense if d is not None)
        case["grad"] = {"ys": [y.name for y in ys], "dys": [nodes.const(f"dy/{i}", d) + ":0" for i, d in enumerate(dys)],
                        "xs": [x.name for x in xs], "expect": wanted}

    def compute(self, op, *inputs, **attrs):
        """What TensorFlow gives for one call of `op`."""
        nodes = Nodes()
        nodes.op("op", op, [nodes.const(f"in/{i}", v) for i, v in enumerate(inputs)], attrs)
        code, got = self.run_once(nodes.graph, [o if ":" in o else o + ":0" for o in nodes.outputs], {})
        if code:
            raise Failure(f"{op}: {code}: {self.last_error}")
        return got

    def run_once(self, graph_def, fetches, feeds):
        """(error code or None, values)."""
        self.last_error = ""
        folder = tempfile.mkdtemp()
        try:
            g = imported(in_folder(graph_def, folder.encode()))
            feeds = {k: replaced(v, b"{dir}", folder.encode()) for k, v in feeds.items()}
            with tf1.Session(graph=g, config=config()) as s:
                if not fetches:
                    s.run(["op"], feeds)
                    return None, []
                return None, s.run(fetches, feeds)
        except (tf.errors.OpError, ValueError, TypeError) as e:
            self.last_error = str(e)[:300]
            return error_name(e), None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # ---- several nodes, several runs

    def refused(self, name, nodes, fetches, ops):
        """A graph that TensorFlow refuses to build or to run."""
        if self.skipped(name):
            return
        fetches = [f if ":" in f else f + ":0" for f in fetches]
        code, _ = self.run_once(nodes.graph, fetches, {})
        if code is None:
            self.failures.append(f"{self.name}: {name}: TensorFlow took it")
            return
        self.write({"name": name, "ops": ops, "fed": False, "runs": [{"fetch": fetches, "error": code}]}, nodes.graph, [])

    def program(self, name, nodes, runs, ops=None, grad=None, train=None, fed=False, **keys):
        """A graph and runs in order. `nodes` is a Nodes or a GraphDef; a run is a dict with any of fetch, target, feed
        (name -> array), feed_result (name -> which run and which of its fetches), error=True, compare, timeout_ms, repeat.
        `ops` names what the case counts for; by default all but the constants. With `dir=True`, `{dir}` in constants,
        feeds and results stands for an empty folder of its own."""
        if self.skipped(name):
            return
        folder = tempfile.mkdtemp() if keys.get("dir") else None
        try:
            self._program(name, nodes, runs, ops, grad, train, fed, keys, (folder or "{dir}").encode())
        except Exception as e:  # noqa: BLE001
            self.failures.append(f"{self.name}: {name}: {type(e).__name__}: {str(e)[:400]}")
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _program(self, name, nodes, runs, ops, grad, train, fed, keys, folder):
        graph_def = nodes.graph if isinstance(nodes, Nodes) else nodes
        graph_def = graph_pb2.GraphDef.FromString(graph_def.SerializeToString())
        ops = ops or sorted({n.op for n in graph_def.node} - {"Const", "Placeholder", "NoOp", "Identity"})
        case = {"name": name, "ops": ops, "runs": [], "fed": fed, **keys}
        expected, feeds_kept, results = [], [], []
        try:
            g = imported(in_folder(graph_def, folder))
        except (tf.errors.OpError, ValueError) as e:
            refused = [r for r in runs if r.get("error")]
            if not refused:
                raise
            run = {k: r for k, r in refused[0].items() if k == "target"}
            run["fetch"] = [f if ":" in f else f + ":0" for f in refused[0].get("fetch", [])]
            case["runs"] = [dict(run, error=error_name(e))]
            case["fed"] = False
            return self.write(case, graph_def, [])
        with tf1.Session(graph=g, config=config()) as s:
            for i, r in enumerate(runs):
                run = {}
                fetches = [f if ":" in f else f + ":0" for f in r.get("fetch", [])]
                targets = list(r.get("target", []))
                feeds = {k if ":" in k else k + ":0": array(v) for k, v in r.get("feed", {}).items()}
                earlier = {k if ":" in k else k + ":0": at for k, at in r.get("feed_result", {}).items()}
                given = {k: replaced(v, b"{dir}", folder) for k, v in feeds.items()}
                for k, (at, i_fetch) in earlier.items():
                    given[k] = as_feed(results[at][i_fetch], runs[at]["fetch"][i_fetch], at)
                code, got = None, []
                try:
                    for _ in range(r.get("repeat", 1) - 1):
                        s.run(fetches + targets, given)
                    got = s.run(fetches + targets, given, options=tf1.RunOptions(timeout_in_ms=r.get("timeout_ms", 20000)))
                    got = got[: len(fetches)]
                except (tf.errors.OpError, ValueError, TypeError) as e:
                    code, text = error_name(e), str(e)[:300]
                results.append(got)
                if bool(r.get("error")) != (code is not None):
                    raise Failure(f"run {i}: " + ("TensorFlow took it" if code is None else f"{code}: {text}"))
                if fetches:
                    run["fetch"] = fetches
                if targets:
                    run["target"] = targets
                if feeds:
                    run["feed"] = {}
                    for k, v in feeds.items():
                        run["feed"][k] = len(feeds_kept)
                        feeds_kept.append(v)
                if earlier:
                    run["feed_result"] = {k: list(at) for k, at in earlier.items()}
                if code:
                    run["error"] = code
                elif fetches and r.get("compare") != "none":
                    got = [replaced(v, folder, b"{dir}") for v in got]
                    run["expect"] = list(range(len(expected), len(expected) + len(got)))
                    # Where only the shape counts, nothing that differs from run to run is kept.
                    expected.extend(np.zeros_like(v) if r.get("compare") == "shape" else v for v in got)
                for key in ("compare", "timeout_ms", "repeat"):
                    if key in r:
                        run[key] = r[key]
                case["runs"].append(run)
        if grad:
            case["grad"] = grad(expected)
        if train:
            case["train"] = train(expected)
        for i, v in enumerate(feeds_kept):
            n = Nodes()
            n.const(f"feed/{i}", v)
            graph_def.node.extend(n.graph.node)
        self.write(case, graph_def, expected)

    # ---- the file

    def write(self, case, graph_def, expected):
        out = Nodes()
        out.graph.CopyFrom(graph_def)
        for i, v in enumerate(expected):
            # As an object, since NumPy's own strings drop zeros at the end.
            out.const(f"expected/{i}", np.array(v, object) if isinstance(v, bytes) else np.asarray(v))
        n = out.graph.node.add(name="case", op="NoOp")
        n.attr["_case"].s = json.dumps(case, sort_keys=True).encode()
        for op in case["ops"]:
            self.forward[op] = self.forward.get(op, 0) + 1
            if "grad" in case or "train" in case:
                self.gradient[op] = self.gradient.get(op, 0) + 1
        # Shapes that `import_graph_def` inferred and default attributes would only make files larger.
        for node in out.graph.node:
            if "_output_shapes" in node.attr:
                del node.attr["_output_shapes"]
        self.written.append(out.graph.SerializeToString(deterministic=True))

    def save(self, folder):
        path = os.path.join(folder, self.name + ".pb.gz")
        data = b"".join(struct.pack("<I", len(c)) + c for c in self.written)
        with open(path, "wb") as f, gzip.GzipFile("", "wb", 9, f, mtime=0) as z:
            z.write(data)
        return path


def flat(inputs):
    for i in inputs:
        if isinstance(i, list) and any(isinstance(x, np.ndarray) for x in i):
            yield from (array(x) for x in i)
        else:
            yield array(i)


def flat_names(args):
    for a in args:
        yield from a if isinstance(a, list) else [a]
