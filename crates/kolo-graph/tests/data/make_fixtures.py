"""Writes the fixtures of tests/wire.rs, next to this file: GraphDefs as bytes (.pb) and as text (.pbtxt).

    python -m venv venv && venv/bin/pip install tensorflow-cpu && venv/bin/python make_fixtures.py

The committed files were made with TensorFlow 2.21.0 and protobuf 7.36.2. Every graph is made here; none is a copy of
anyone's model. `descriptors.txt` lists the fields of the messages as TensorFlow's own descriptors give them.
"""

import os
import pathlib
import random
import struct

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.framework import graph_pb2

HERE = pathlib.Path(__file__).parent
v1 = tf.compat.v1


def placeholders(g):
    x = v1.placeholder(tf.float32, [None, 3], name="x")
    v1.placeholder(tf.int64, [], name="scalar")
    v1.placeholder(tf.string, None, name="any_rank")
    v1.placeholder_with_default([[1.5, -2.0]], [None, 2], name="with_default")
    with tf.device("/job:worker/task:1/device:GPU:0"), v1.name_scope("scope"):
        y = tf.reduce_sum(x, axis=[0, 1], name="sum")
        with tf.control_dependencies([y]):
            tf.identity(x, name="after")


def consts(g):
    for dtype in [
        tf.half, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8,
        tf.uint16, tf.uint32, tf.uint64, tf.complex64, tf.complex128, tf.bool, tf.qint8, tf.quint8, tf.qint32,
    ]:
        value = np.array([0, 1, 1], dtype=bool) if dtype == tf.bool else np.array([0, 1, 100])
        tf.constant(value.astype(dtype.as_numpy_dtype), dtype, name=f"vector_{dtype.name}")
    tf.constant(7, tf.int32, name="scalar")
    tf.constant(np.zeros([0, 2], np.float32), name="empty")
    tf.constant(3.0, shape=[4, 4], name="filled")


def floats(g):
    special = [0.0, -0.0, 0.1, 1 / 3, 1e-45, 1.1754944e-38, 3.4028235e38, 16777217.0, 1e15, 1e16, 123456789.0,
               0.0001, 0.00001, float("inf"), float("-inf"), float("nan")]
    random.seed(1)
    bits = [random.getrandbits(32) for _ in range(150)]
    sampled = [f for b in bits for f in struct.unpack("<f", struct.pack("<I", b)) if f == f]
    node = g.node.add(name="float", op="Const")
    node.attr["value"].tensor.float_val.extend(special + sampled)
    node.attr["value"].tensor.dtype = tf.float32.as_datatype_enum
    bits = [random.getrandbits(64) for _ in range(150)]
    sampled = [f for b in bits for f in struct.unpack("<d", struct.pack("<Q", b)) if f == f]
    node = g.node.add(name="double", op="Const")
    node.attr["value"].tensor.double_val.extend(special + [5e-324, 1.7976931348623157e308, 2.0**53] + sampled)
    node = g.node.add(name="attrs", op="Nothing")
    for i, f in enumerate(special):
        node.attr[f"f{i:02}"].f = f
    node.attr["list"].list.f.extend(special)


def strings(g):
    tf.constant([b"", b"plain", "naïve ☃ 😀".encode(), bytes(range(256))], name="bytes")
    tf.constant([b"a'b\"c\\d\te\rf\n"] * 2, name="quotes")
    tf.constant(b"same", shape=[40], name="repeated")


def strings_by_hand(g):
    node = g.node.add(name="ñandú", op="NoOp", device="/device:CPU:0")
    node.attr["naïve ☃ 😀"].s = b"\x00\x7f\x80\xff?'\""
    node.attr["_class"].list.s.extend([b"loc:@a", b"loc:@b\n"])
    node.attr["B"].s = b""
    node.attr["a"].placeholder = "T"
    node.attr[""].i = 0
    node.attr["none"].SetInParent()


def lists(g):
    x = v1.placeholder(tf.float32, [1, 8, 8, 3], name="x")
    w = tf.zeros([2, 2, 3, 4], name="w")
    tf.nn.conv2d(x, w, strides=[1, 2, 2, 1], padding="SAME", name="conv")
    v1.FIFOQueue(10, [tf.float32, tf.int32, tf.string], [[], [2, 3], [0]], name="queue")
    v1.PaddingFIFOQueue(3, [tf.float32], [[None, 2]], name="padding")
    tf.raw_ops.Bucketize(input=x, boundaries=[0.0, 0.1, 1e10], name="bucketize")
    tf.split(x, 2, axis=1, name="split")
    tf.raw_ops.Empty(shape=[2], dtype=tf.float32, init=True, name="empty")


def ref_variables(g):
    v1.disable_resource_variables()
    v = v1.get_variable("v", [2, 3], initializer=v1.truncated_normal_initializer(stddev=0.1, seed=3))
    with v1.colocate_with(v):
        tf.zeros([2], name="near")
    v1.assign_add(v, tf.ones([2, 3]), name="add")
    v1.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum(v * v, name="loss"))
    v1.enable_resource_variables()


def resource_variables(g):
    v = v1.get_variable("v", [2], tf.float64, v1.zeros_initializer(), use_resource=True)
    v1.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_sum(v, name="loss"))


def while_v1(g):
    v1.disable_control_flow_v2()
    i, _ = v1.while_loop(
        lambda i, acc: i < 10, lambda i, acc: (i + 1, acc * 2.0), [tf.constant(0), tf.constant(1.0)],
        parallel_iterations=4, name="loop")
    v1.cond(i > 5, lambda: i + 1, lambda: i - 1, name="cond")
    v1.enable_control_flow_v2()


def functions(g):
    @tf.function(autograph=False)
    def double(x):
        return tf.identity(x * 2.0, name="out")

    x = v1.placeholder(tf.float32, [None], name="x")
    tf.gradients(double(x), x)
    v1.while_loop(lambda i: i < 3, lambda i: (i + 1,), [tf.constant(0)], name="loop")


def variants(g):
    node = g.node.add(name="v", op="Const")
    t = node.attr["value"].tensor
    t.dtype = tf.variant.as_datatype_enum
    v = t.variant_val.add(type_name="tensorflow::TensorList", metadata=b"\x00\x01\xff")
    v.tensors.add(dtype=tf.half.as_datatype_enum, half_val=[15360, 0]).tensor_shape.dim.add(size=2, name="rows")
    t = g.node.add(name="r", op="Const").attr["value"].tensor
    t.dtype = tf.resource.as_datatype_enum
    h = t.resource_handle_val.add(device="/cpu:0", container="c", name="n", hash_code=2**64 - 1, maybe_type_name="T")
    h.dtypes_and_shapes.add(dtype=1).shape.unknown_rank = True
    t = g.node.add(name="odd", op="Const").attr["value"].tensor
    t.dtype = 77
    t.tensor_shape.dim.add(size=-1)
    t.tensor_shape.dim.add()
    t.version_number = -1
    t.float8_val = b"\x12\x00"
    t.uint32_val.append(2**32 - 1)
    t.int64_val.extend([-(2**63), 2**63 - 1])
    t.int_val.extend([-(2**31), 0, 2**31 - 1])
    g.node.add(name="empty", op="NoOp").experimental_debug_info.original_node_names.append("old")
    full = g.node.add(name="typed", op="NoOp").experimental_type
    full.type_id = 3
    full.args.add(type_id=1000).args.add(type_id=210, i=0)
    full.args.add(type_id=12345, s="")
    func = g.node.add(name="call", op="PartitionedCall").attr["f"].func
    func.name = "f"
    func.attr["T"].list.type.extend([1, 101, 77, 0])
    g.node[-1].attr["fs"].list.func.add(name="g").attr["b"].b = False
    g.node[-1].attr["shapes"].list.shape.add()
    g.node[-1].attr["tensors"].list.tensor.add().bool_val.extend([True, False])
    f = g.library.function.add()
    f.signature.name = "f"
    f.signature.input_arg.add(name="x", type=20, is_ref=True).handle_data.add(dtype=1)
    f.signature.input_arg[0].experimental_full_type.type_id = 2
    a = f.signature.attr.add(name="N", type="int", has_minimum=True, minimum=-1)
    a.default_value.i = 0
    a.allowed_values.list.SetInParent()
    f.signature.deprecation.version = 8
    f.signature.is_distributed_communication = True
    f.signature.control_output.append("c")
    f.ret["y"] = ""
    f.ret[""] = "x:0"
    f.control_ret["c"] = "n"
    f.arg_attr[10].attr["a"].i = 1
    f.arg_attr[9].SetInParent()
    f.resource_arg_unique_id[0] = 0
    f.resource_arg_unique_id[3] = 1
    g.library.gradient.add(function_name="f", gradient_func="g")
    g.library.registered_gradients.add(gradient_func="g", registered_op_type="CustomOp")
    d = g.debug_info
    d.files.append("a.py")
    d.frames_by_id[2**63].line = 0
    d.frames_by_id[1].code = ""
    d.traces_by_id[0].frame_id.extend([1, 2**63])
    d.name_to_trace_id["n@"] = 0
    d.traces["n@f"].file_line_cols.add(file_index=0, line=3, col=-1, func="f")
    g.version = 5
    g.versions.producer = 1882
    g.versions.min_consumer = 12
    g.versions.bad_consumers.extend([1, 2])


def descriptors():
    lines, seen, enums = [], set(), {}

    def kind(field):
        if field.message_type:
            m = field.message_type
            if m.GetOptions().map_entry:
                return "map<{}, {}>".format(*(kind(f) for f in m.fields))
            return m.full_name
        if field.enum_type:
            enums[field.enum_type.full_name] = field.enum_type
            return field.enum_type.full_name
        names = {v: k for k, v in vars(type(field)).items() if k.startswith("TYPE_")}
        return names[field.type].removeprefix("TYPE_").lower()

    def walk(message):
        if message.full_name in seen:
            return
        seen.add(message.full_name)
        for f in sorted(message.fields, key=lambda f: f.number):
            if f.message_type and f.message_type.GetOptions().map_entry:
                label = "map"
            elif f.is_repeated:
                label = "repeated"
            elif f.containing_oneof:
                label = f"oneof {f.containing_oneof.name}"
            elif f.has_presence and not f.message_type:
                label = "optional"
            else:
                label = "single"
            lines.append(f"{message.full_name} {f.number} {f.name} {label} {kind(f)}")
        for f in message.fields:
            if f.message_type and f.message_type.GetOptions().map_entry:
                f = f.message_type.fields_by_name["value"]
            if f.message_type:
                walk(f.message_type)

    walk(graph_pb2.GraphDef.DESCRIPTOR)
    lines += [f"{e.full_name} {v.number} {v.name}" for e in enums.values() for v in e.values]
    return "\n".join(sorted(lines)) + "\n"


def write(name, graph):
    text = text_format.MessageToString(graph, as_utf8=False)
    assert text_format.Parse(text, graph_pb2.GraphDef()).ByteSize() == graph.ByteSize()
    (HERE / f"{name}.pb").write_bytes(graph.SerializeToString(deterministic=True))
    (HERE / f"{name}.pbtxt").write_text(text)
    print(f"{name}: {graph.ByteSize()} bytes, {len(text)} characters")


def main():
    for build in [placeholders, consts, strings, lists, ref_variables, resource_variables, while_v1, functions]:
        with tf.Graph().as_default() as g:
            v1.set_random_seed(0)
            build(g)
            write(build.__name__, g.as_graph_def())
    for build in [floats, strings_by_hand, variants]:
        graph = graph_pb2.GraphDef()
        build(graph)
        write(build.__name__, graph)
    # TensorFlow's own writer leaves UTF-8 as it is.
    graph = graph_pb2.GraphDef()
    strings_by_hand(graph)
    tf.io.write_graph(graph, str(HERE), "strings_by_hand_utf8.pbtxt", as_text=True)
    (HERE / "descriptors.txt").write_text(descriptors())


if __name__ == "__main__":
    main()
