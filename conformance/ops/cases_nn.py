"""Cases of crates/kolo-ops/src/nn. TensorFlow's CPU kernels know NHWC only; what NCHW should give is computed there with
transposed inputs."""

import numpy as np

from harness import FLOATS, NUMBERS, array, registered_dtypes, values

NAN, INF = float("nan"), float("inf")
F = lambda *shape, seed=0: values("float32", list(shape), seed=seed)
SMALL = lambda d, shape, seed=0: values(d, shape, -1, 1, seed)
# Sums of products in another order.
SUMS = {"rtol": 1e-5, "atol": 1e-5}
# TensorFlow rounds halves at every step, Kolo at the end; floats are not affected by so little.
HALVES = {"half_atol": 4e-2}


def to_nchw(v):
    return np.ascontiguousarray(v.transpose(0, 3, 1, 2)) if v.ndim == 4 else v


def nchw_list(v):
    return [v[0], v[3], v[1], v[2]]


def activations(a):
    special = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 6.0, 7.0, -20.0, 20.0, 100.0, -100.0]
    for op in ("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Softplus", "Softsign"):
        a.each(op, lambda d: values(d, [2, 5], -3, 8))
        a.op(op, array(special), label="special", grad=False)
        a.op(op, np.zeros([0, 2], np.float32), label="empty")
        a.op(op, array(-0.5), label="scalar")
    a.op("LeakyRelu", F(5), label="alpha", alpha=0.01)
    for op in ("ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "SoftplusGrad", "SoftsignGrad"):
        a.each(op, lambda d: [values(d, [2, 5]), values(d, [2, 5], -3, 8, seed=1)])
        a.op(op, F(3), array([0.0, -0.0, 6.0]), label="corners", grad=False)
        a.op(op, F(3), F(2), label="shapes", error=True)
    for op in ("Softmax", "LogSoftmax"):
        a.each(op, lambda d: values(d, [2, 5]), **HALVES)
        a.op(op, F(5), label="vector")
        a.op(op, F(2, 3, 4), label="rank3")
        a.op(op, array([[1000.0, 999.0], [-1000.0, -1001.0], [0.0, 0.0]]), label="large")
        a.op(op, array([[NAN, 1.0], [INF, 1.0], [-INF, 1.0]]), label="special", grad=False)
        a.op(op, np.zeros([0, 3], np.float32), label="empty")
        a.op(op, array(1.0), label="scalar", error=True)
    for op in ("SoftmaxCrossEntropyWithLogits",):
        labels = lambda d: values(d, [3, 4], 0, 1, seed=2)
        a.each(op, lambda d: [values(d, [3, 4]), labels(d)], grad=False, **HALVES)
        a.each(op, lambda d: [values(d, [3, 4]), labels(d)], label="loss", dtypes=["float32", "float64"], fetch=[0])
        a.op(op, F(3, 4), values("float32", [1, 4], 0, 1), label="broadcast", grad=False)
        a.op(op, F(0, 4), F(0, 4), label="empty")
        a.op(op, F(3, 4), F(3, 5), label="shapes", error=True)
        a.op(op, F(4), F(4), label="vector", error=True)
        a.op(op, array([[100.0, -100.0]]), array([[0.0, 1.0]]), label="large", fetch=[0])
    for t in ("int32", "int64"):
        a.each("SparseSoftmaxCrossEntropyWithLogits", lambda d: [values(d, [3, 4]), array([0, 3, 1], t)], label=t, **HALVES)
    op = "SparseSoftmaxCrossEntropyWithLogits"
    a.op(op, F(0, 4), array([], "int32"), label="empty")
    a.op(op, F(2, 4), array([0, 4]), label="range", error=True)
    a.op(op, F(2, 4), array([-1, 0]), label="negative", error=True)
    a.op(op, F(2, 4), array([0]), label="lengths", error=True)
    a.op(op, F(4), array([0]), label="vector", error=True)


def biases(a):
    for op in ("BiasAdd", "BiasAddV1"):
        a.each(op, lambda d: [values(d, [2, 3]), values(d, [3], seed=1)], grad=None)
        a.op(op, F(2, 2, 2, 3), F(3), label="rank4")
        a.op(op, F(2, 3), F(2), label="length", error=True)
        a.op(op, F(3), F(3), label="vector", error=True)
        a.op(op, F(2, 3), F(1, 3), label="matrix-bias", error=True)
    a.op("BiasAdd", F(2, 3, 2, 2), F(3), label="nchw", data_format="NCHW")
    a.op("BiasAdd", F(2, 3, 2), F(3), label="nchw-rank3", data_format="NCHW")
    a.op("BiasAdd", F(2, 3), F(3), label="nchw-rank2", data_format="NCHW", error=True)
    a.each("BiasAddGrad", lambda d: values(d, [4, 3]), rtol=1e-2)
    a.op("BiasAddGrad", F(2, 2, 2, 3), label="rank4", **SUMS)
    a.op("BiasAddGrad", F(2, 3, 2, 2), label="nchw", data_format="NCHW", **SUMS)
    a.op("BiasAddGrad", F(0, 3), label="empty")
    a.op("BiasAddGrad", F(3), label="vector", error=True)


# (label, input, filter, strides, padding, more attributes)
CONVS = [
    ("same", [2, 5, 4, 3], [3, 3, 3, 4], [1, 1, 1, 1], "SAME", {}),
    ("valid", [2, 5, 4, 3], [3, 2, 3, 4], [1, 1, 1, 1], "VALID", {}),
    ("strides", [1, 7, 6, 2], [3, 3, 2, 3], [1, 2, 3, 1], "SAME", {}),
    ("strides-valid", [1, 7, 6, 2], [3, 3, 2, 3], [1, 3, 2, 1], "VALID", {}),
    ("one", [2, 3, 3, 4], [1, 1, 4, 2], [1, 1, 1, 1], "VALID", {}),
    ("one-strided", [2, 4, 4, 2], [1, 1, 2, 3], [1, 2, 2, 1], "SAME", {}),
    ("dilated", [1, 7, 7, 2], [3, 3, 2, 2], [1, 1, 1, 1], "VALID", {"dilations": [1, 2, 2, 1]}),
    ("dilated-same", [1, 6, 7, 2], [2, 3, 2, 2], [1, 1, 1, 1], "SAME", {"dilations": [1, 2, 1, 1]}),
    ("explicit", [1, 5, 5, 2], [3, 3, 2, 2], [1, 2, 1, 1], "EXPLICIT", {"explicit_paddings": [0, 0, 1, 2, 0, 1, 0, 0]}),
    ("whole", [2, 3, 3, 2], [3, 3, 2, 5], [1, 1, 1, 1], "VALID", {}),
    ("even", [1, 6, 6, 1], [2, 2, 1, 1], [1, 2, 2, 1], "SAME", {}),
]


def spread(w, rates):
    """The filter with zeros between its values, which without dilation does what `w` does with it."""
    out = np.zeros([(w.shape[0] - 1) * rates[1] + 1, (w.shape[1] - 1) * rates[2] + 1, *w.shape[2:]], w.dtype)
    out[:: rates[1], :: rates[2]] = w
    return out


def backprops(a, x, X, w, W, dy, kw):
    """What the two backprops give; TensorFlow's CPU kernels do not dilate."""
    rates = kw.get("dilations", [1, 1, 1, 1])
    kw = {k: v for k, v in kw.items() if k != "dilations"}
    wide = spread(W, rates)
    dx = a.compute("Conv2DBackpropInput", array(x), wide, dy, **kw)[0]
    dw = a.compute("Conv2DBackpropFilter", X, array(wide.shape), dy, **kw)[0]
    return dx, np.ascontiguousarray(dw[:: rates[1], :: rates[2]])


def convolutions(a):
    for label, x, w, strides, padding, kw in CONVS:
        kw = dict(kw, strides=strides, padding=padding)
        X, W = SMALL("float32", x), SMALL("float32", w, seed=1)
        try:
            y = a.compute("Conv2D", X, W, **kw)
        except Exception as e:  # noqa: BLE001
            a.failures.append(f"nn: Conv2D/{label}: {e}")
            continue
        a.op("Conv2D", X, W, label=label, grad=None if "dilations" not in kw else False, **kw, **SUMS)
        dy = SMALL("float32", list(y[0].shape), seed=2)
        dx, dw = backprops(a, x, X, w, W, dy, kw)
        a.op("Conv2DBackpropInput", array(x), W, dy, label=label, expected=[dx], **kw, **SUMS)
        a.op("Conv2DBackpropFilter", X, array(w), dy, label=label, expected=[dw], **kw, **SUMS)
        other = dict(kw, strides=nchw_list(strides), data_format="NCHW")
        if "dilations" in kw:
            other["dilations"] = nchw_list(kw["dilations"])
        if "explicit_paddings" in kw:
            p = kw["explicit_paddings"]
            other["explicit_paddings"] = p[0:2] + p[6:8] + p[2:6]
        a.op("Conv2D", to_nchw(X), W, label=label + "-nchw", expected=[to_nchw(y[0])], **other, **SUMS)
        a.op("Conv2DBackpropInput", array(nchw_list(x)), W, to_nchw(dy), label=label + "-nchw", expected=[to_nchw(dx)],
             **other, **SUMS)
        a.op("Conv2DBackpropFilter", to_nchw(X), array(w), to_nchw(dy), label=label + "-nchw", expected=[dw], **other,
             **SUMS)
        if "explicit" in label or x[3] != w[2]:
            continue
        if strides[1] == strides[2]:
            depth = [w[0], w[1], x[3], 2]
            D = SMALL("float32", depth, seed=3)
            rates = kw.get("dilations", [1, 1, 1, 1])
            dilated = rates != [1, 1, 1, 1]
            y = a.compute("DepthwiseConv2dNative", X, spread(D, rates), strides=strides, padding=padding)
            a.op("DepthwiseConv2dNative", X, D, label=label, expected=y if dilated else None, **kw, **SUMS)
            if not dilated:
                dy = SMALL("float32", list(y[0].shape), seed=2)
                a.op("DepthwiseConv2dNativeBackpropInput", array(x), D, dy, label=label, grad=False, **kw, **SUMS)
                a.op("DepthwiseConv2dNativeBackpropFilter", X, array(depth), dy, label=label, grad=False, **kw, **SUMS)
                a.op("DepthwiseConv2dNative", to_nchw(X), D, label=label + "-nchw", expected=[to_nchw(y[0])], **other, **SUMS)
    plain = dict(strides=[1, 1, 1, 1], padding="SAME")
    for op in ("Conv2D", "DepthwiseConv2dNative"):
        a.each(op, lambda d: [SMALL(d, [1, 4, 4, 2]), SMALL(d, [3, 3, 2, 2], seed=1)], rtol=1e-2 if op else None,
               atol=1e-2, dtypes=FLOATS, **plain)
        if op == "Conv2D":
            a.op(op, values("int32", [1, 4, 4, 2]), values("int32", [3, 3, 2, 2]), dtype="int32", **plain)
        # TensorFlow leaves the gradient of a depthwise filter uninitialised here.
        a.op(op, np.zeros([0, 4, 4, 2], np.float32), F(3, 3, 2, 2), label="empty", grad=op == "Conv2D", **plain)
        a.op(op, F(1, 4, 4, 2), F(3, 3, 3, 2), label="channels", error=True, **plain)
        a.op(op, F(4, 4, 2), F(3, 3, 2, 2), label="rank", error=True, **plain)
        a.op(op, F(1, 2, 2, 2), F(3, 3, 2, 2), label="too-small", error=True, strides=[1, 1, 1, 1], padding="VALID")
        a.op(op, F(1, 4, 4, 2), F(3, 3, 2, 2), label="batch-stride", error=True, strides=[2, 1, 1, 1], padding="SAME")
        a.op(op, F(1, 4, 4, 2), F(3, 3, 2, 2), label="stride-zero", error=True, strides=[1, 0, 0, 1], padding="SAME")
    a.op("Conv2DBackpropInput", array([1, 4, 4, 2]), F(3, 3, 2, 2), F(1, 3, 3, 2), label="sizes", error=True, **plain)
    a.op("Conv2DBackpropFilter", F(1, 4, 4, 2), array([3, 3, 2, 2]), F(1, 3, 3, 2), label="sizes", error=True, **plain)


POOLS = [
    ("valid", [2, 5, 4, 3], [1, 2, 2, 1], [1, 2, 2, 1], "VALID"),
    ("same", [2, 5, 4, 3], [1, 3, 3, 1], [1, 1, 1, 1], "SAME"),
    ("same-strided", [1, 7, 5, 2], [1, 3, 2, 1], [1, 2, 2, 1], "SAME"),
    ("overlap", [1, 6, 6, 1], [1, 3, 3, 1], [1, 2, 2, 1], "VALID"),
    ("whole", [2, 3, 3, 2], [1, 3, 3, 1], [1, 1, 1, 1], "VALID"),
    ("gaps", [1, 7, 7, 1], [1, 2, 2, 1], [1, 3, 3, 1], "VALID"),
]


def pools(a):
    for label, x, ksize, strides, padding in POOLS:
        kw = dict(ksize=ksize, strides=strides, padding=padding)
        other = dict(ksize=nchw_list(ksize), strides=nchw_list(strides), padding=padding, data_format="NCHW")
        X = SMALL("float32", x)
        for op in ("MaxPool", "AvgPool"):
            a.op(op, X, label=label, **kw)
            y = a.compute(op, X, **kw)[0]
            dy = SMALL("float32", list(y.shape), seed=1)
            a.op(op, to_nchw(X), label=label + "-nchw", expected=[to_nchw(y)], **other)
            if op == "MaxPool":
                a.op("MaxPoolGrad", X, y, dy, label=label, grad=False, **kw)
                dx = a.compute("MaxPoolGrad", X, y, dy, **kw)[0]
                a.op("MaxPoolGrad", to_nchw(X), to_nchw(y), to_nchw(dy), label=label + "-nchw", expected=[to_nchw(dx)], **other)
            else:
                a.op("AvgPoolGrad", array(x), dy, label=label, **kw)
                dx = a.compute("AvgPoolGrad", array(x), dy, **kw)[0]
                a.op("AvgPoolGrad", array(nchw_list(x)), to_nchw(dy), label=label + "-nchw", expected=[to_nchw(dx)], **other)
    plain = dict(ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
    for op in ("MaxPool", "AvgPool"):
        a.each(op, lambda d: values(d, [1, 4, 4, 2]), dtypes=NUMBERS, grad=False, **plain)
        a.op(op, np.zeros([0, 4, 4, 2], np.float32), label="empty", **plain)
        a.op(op, F(4, 4, 2), label="rank", error=True, **plain)
        a.op(op, F(1, 2, 2, 1), label="too-small", error=True, ksize=[1, 3, 3, 1], strides=[1, 1, 1, 1], padding="VALID")
        a.op(op, F(2, 2, 2, 1), label="batch", error=True, ksize=[2, 1, 1, 1], strides=[1, 1, 1, 1], padding="VALID")
    a.op("MaxPool", array(np.float32([[[[1.0], [1.0]], [[1.0], [1.0]]]])), label="ties", **plain)
    a.op("MaxPool", array(np.float32([[[[NAN], [1.0]], [[2.0], [1.0]]]])), label="nan", grad=False, **plain)
    a.op("MaxPool", -np.ones([1, 3, 3, 1], np.float32), label="padding-is-low", **plain)
    a.op("MaxPool", F(1, 5, 5, 1), label="explicit", ksize=[1, 3, 3, 1], strides=[1, 2, 2, 1], padding="EXPLICIT",
         explicit_paddings=[0, 0, 1, 1, 1, 0, 0, 0])


def norms(a):
    x = values("float32", [2, 3, 2, 3])
    scale, offset = values("float32", [3], 0.5, 2), values("float32", [3], -1, 1, seed=1)
    mean, variance = values("float32", [3], -1, 1, seed=2), values("float32", [3], 0.5, 2, seed=3)
    none = np.zeros([0], np.float32)
    for op in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"):
        # The reserves of an inference, and of nothing, are uninitialised in TensorFlow.
        last, told = [0, 1, 2, 3, 4], [0, 1, 2]
        for eps in (1e-4, 1e-2):
            a.op(op, x, scale, offset, none, none, label=f"training-{eps}", epsilon=eps, fetch=last, **SUMS)
            a.op(op, x, scale, offset, mean, variance, label=f"inference-{eps}", epsilon=eps, is_training=False, fetch=told,
                 **SUMS)
        a.op(op, to_nchw(x), scale, offset, none, none, label="training-nchw", data_format="NCHW", fetch=last, **SUMS)
        a.op(op, to_nchw(x), scale, offset, mean, variance, label="inference-nchw", data_format="NCHW", is_training=False,
             fetch=told, **SUMS)
        a.op(op, x, scale, offset, mean, variance, label="average", exponential_avg_factor=0.25, fetch=last, grad=False, **SUMS)
        a.op(op, np.zeros([0, 3, 2, 3], np.float32), scale, offset, none, none, label="empty", fetch=told, grad=False)
        a.op(op, np.zeros([1, 1, 1, 3], np.float32), scale, offset, none, none, label="single", fetch=last, grad=False)
        a.op(op, x, scale[:2], offset, none, none, label="scale-length", error=True)
        a.op(op, F(2, 3), scale, offset, none, none, label="rank", error=True)
    for op in ("FusedBatchNormV2", "FusedBatchNormV3"):
        for d in ("float16", "bfloat16"):
            if d in registered_dtypes(op, "T"):
                a.op(op, values(d, [2, 3, 2, 3]), scale, offset, none, none, dtype=d, U="float32", fetch=[0, 1, 2],
                     rtol=1e-2, atol=1e-2)
    dy = values("float32", [2, 3, 2, 3], -1, 1, seed=5)
    for op, extra in (("FusedBatchNormGrad", []), ("FusedBatchNormGradV2", []), ("FusedBatchNormGradV3", [none])):
        for label, kw in (("training", {}), ("inference", {"is_training": False})):
            a.op(op, dy, x, scale, mean, variance, *extra, label=label, fetch=[0, 1, 2], grad=False, **kw, **SUMS)
            # TensorFlow's CPU kernel has no NCHW for inference.
            got = a.compute(op, dy, x, scale, mean, variance, *extra, **kw)[:3]
            a.op(op, to_nchw(dy), to_nchw(x), scale, mean, variance, *extra, label=label + "-nchw", data_format="NCHW",
                 fetch=[0, 1, 2], expected=[to_nchw(got[0]), *got[1:]], **kw, **SUMS)
        empty, lost = np.zeros([0, 2, 2, 3], np.float32), np.full([3], NAN, np.float32)
        a.op(op, empty, empty, scale, lost, lost, *extra, label="empty", fetch=[0, 1, 2], grad=False)
    for label, kw in (("default", {}), ("narrow", {"depth_radius": 1, "bias": 2.0, "alpha": 0.5, "beta": 0.75}),
                      ("wide", {"depth_radius": 9}), ("beta1", {"beta": 1.0, "depth_radius": 2})):
        a.op("LRN", values("float32", [1, 2, 2, 7]), label=label, rtol=1e-5, **kw)
        y = a.compute("LRN", values("float32", [1, 2, 2, 7]), **kw)[0]
        a.op("LRNGrad", SMALL("float32", [1, 2, 2, 7]), values("float32", [1, 2, 2, 7]), y, label=label, grad=False,
             rtol=1e-5, atol=1e-5, **kw)
    a.op("LRN", F(2, 7), label="rank", error=True)


def cases(a):
    activations(a)
    biases(a)
    convolutions(a)
    pools(a)
    norms(a)
