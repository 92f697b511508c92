"""Lists TensorFlow's op signatures, one line each, in the notation of kolo_graph::Signature.

`Name flags signature`, where flags is `-`, or letters: s for stateful, u for "may receive an uninitialised reference".
Dtypes that Kolo has no name for (float8, int4 …) are left out of the allowed types.
"""

import gzip

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, op_def_pb2, types_pb2
from tensorflow.python.client import pywrap_tf_session


def all_ops():
    ops = op_def_pb2.OpList()
    buffer = pywrap_tf_session.TF_GetAllOpList()
    ops.ParseFromString(buffer if isinstance(buffer, bytes) else pywrap_tf_session.TF_GetBuffer(buffer))
    return sorted(ops.op, key=lambda op: op.name)


NAMED = {
    "float", "double", "int32", "uint8", "int16", "int8", "string", "complex64", "int64", "bool", "qint8", "quint8",
    "qint32", "bfloat16", "qint16", "quint16", "uint16", "complex128", "half", "resource", "variant", "uint32", "uint64",
}


def dtype(number):
    return types_pb2.DataType.Name(number).removeprefix("DT_").lower()


def arg(a):
    if a.type_list_attr:
        t = f"list({a.type_list_attr})"
    else:
        t = a.type_attr or dtype(a.type)
        t = f"{a.number_attr}*{t}" if a.number_attr else t
    return f"{a.name}:Ref({t})" if a.is_ref else f"{a.name}:{t}"


def scalar(kind, v):
    if kind == "string":
        return '"' + v.s.decode("latin-1").replace("\n", "\\n") + '"'
    if kind == "int":
        return str(v.i)
    if kind == "float":
        return repr(float(v.f))
    if kind == "bool":
        return str(v.b).lower()
    if kind == "type":
        return dtype(v.type)
    if kind == "shape":
        return "<unknown>" if v.shape.unknown_rank else "[" + ",".join(str(d.size) for d in v.shape.dim) + "]"
    if kind == "tensor":
        value = tf.make_ndarray(v.tensor)
        return f"{dtype(v.tensor.dtype)}[{','.join(str(x) for x in value.reshape(-1))}]"
    return "{}"


def attr(a):
    kind = a.type[5:-1] if a.type.startswith("list(") else a.type
    text = f"{a.name}:{a.type}"
    if a.HasField("allowed_values"):
        if kind == "type":
            items = [dtype(t) for t in a.allowed_values.list.type]
            items = [i for i in items if i in NAMED]
        else:
            items = [f'"{s.decode()}"' for s in a.allowed_values.list.s]
        text += "{" + ",".join(items) + "}"
    if a.has_minimum:
        text += f">={a.minimum}"
    if a.HasField("default_value"):
        v = a.default_value
        if a.type.startswith("list("):
            field = {"string": "s", "int": "i", "float": "f", "bool": "b", "type": "type", "shape": "shape"}.get(kind)
            items = getattr(v.list, field) if field else []
            wrap = []
            for item in items:
                one = attr_value_pb2.AttrValue()
                if field == "shape":
                    one.shape.CopyFrom(item)
                else:
                    setattr(one, field, item)
                wrap.append(scalar(kind, one))
            text += "=[" + ",".join(wrap) + "]"
        else:
            text += "=" + scalar(kind, v)
    return text


def line(op):
    flags = ("s" if op.is_stateful else "") + ("u" if op.allows_uninitialized_input else "")
    args = lambda side: "(" + ", ".join(arg(a) for a in side) + ")"
    text = f"{op.name} {flags or '-'} {args(op.input_arg)} -> {args(op.output_arg)}"
    return text + (" ; " + ", ".join(attr(a) for a in op.attr) if op.attr else "")


def write(path):
    lines = [f"# TensorFlow {tf.version.VERSION}, by conformance/ops/op_defs.py"] + [line(op) for op in all_ops()]
    with open(path, "wb") as f, gzip.GzipFile("", "wb", 9, f, mtime=0) as z:
        z.write(("\n".join(lines) + "\n").encode())
