#!/usr/bin/env python3
"""Pooling and batch norm of Kolo and of cuDNN on GPU 0, in microseconds: `bench/gpu/layers.py path/to/kolo`. Prints a table.
Needs a Python with PyTorch, for memory, streams and graphs; cuDNN is called directly."""

import ctypes
import json
import subprocess
import sys

import torch

FLOAT, BFLOAT16 = 0, 9
NCHW, NHWC = 0, 1
TIMES = 10

POOLS = [
    ("pool-resnet50", 128, 112, 64, 3, 2, 1),
    ("pool-lenet1-64", 64, 28, 32, 2, 2, 0),
    ("pool-lenet2-64", 64, 14, 64, 2, 2, 0),
    ("pool-lenet1-1024", 1024, 28, 32, 2, 2, 0),
]
NORMS = [
    ("norm-112x64", 128, 112, 64),
    ("norm-56x64", 128, 56, 64),
    ("norm-56x256", 128, 56, 256),
    ("norm-28x512", 128, 28, 512),
    ("norm-14x1024", 128, 14, 1024),
    ("norm-7x2048", 128, 7, 2048),
]

dnn = ctypes.CDLL("libcudnn.so.9")
pointer, size_t, double = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double


def call(name, *args):
    status = getattr(dnn, name)(*args)
    if status:
        raise RuntimeError(f"{name}: {status}")


def made(name, *args):
    handle = pointer()
    call(name, ctypes.byref(handle), *args)
    return handle


def tensor(order, kind, batch, channels, side):
    handle = made("cudnnCreateTensorDescriptor")
    call("cudnnSetTensor4dDescriptor", handle, order, kind, batch, channels, side, side)
    return handle


def address(values):
    return pointer(values.data_ptr())


def microseconds(enqueue):
    """What the GPU takes for one of them, in a graph of several."""
    handle = made("cudnnCreate")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call("cudnnSetStream_v2" if hasattr(dnn, "cudnnSetStream_v2") else "cudnnSetStream", handle, pointer(stream.cuda_stream))
        for _ in range(3):
            enqueue(handle)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(TIMES):
            enqueue(handle)
    best = 1e9
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / 5 / TIMES)
    return best


ONE, ZERO = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))


def values(dtype, *sizes):
    return torch.rand(*sizes, device="cuda").mul_(2).sub_(1).to(dtype)


def pool(order, kind, dtype, batch, side, channels, window, stride, pad):
    out = -(-side // stride)
    x, y = values(dtype, batch * channels * side * side), values(dtype, batch * channels * out * out)
    dx, dy = torch.empty_like(x), values(dtype, y.numel())
    dx_kind, dy_kind = tensor(order, kind, batch, channels, side), tensor(order, kind, batch, channels, out)
    times = {}
    for mode in (0, 3):  # The largest, and the same with sums in a fixed order.
        shape = made("cudnnCreatePoolingDescriptor")
        call("cudnnSetPooling2dDescriptor", shape, mode, 0, window, window, pad, pad, stride, stride)

        def forward(handle):
            call("cudnnPoolingForward", handle, shape, ONE, dx_kind, address(x), ZERO, dy_kind, address(y))

        def backward(handle):
            call("cudnnPoolingBackward", handle, shape, ONE, dy_kind, address(y), dy_kind, address(dy), dx_kind, address(x),
                 ZERO, dx_kind, address(dx))

        for name, work in (("forward", forward), ("backward", backward)):
            times[name] = min(times.get(name, 1e9), microseconds(work))
    return times


def norm(order, kind, dtype, batch, side, channels):
    n = batch * channels * side * side
    x, dy = values(dtype, n), values(dtype, n)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    images, vector = tensor(order, kind, batch, channels, side), made("cudnnCreateTensorDescriptor")
    times, failed = {}, []
    for mode in (1, 2):  # Spatial, and spatial in one pass where it fits.
        try:
            call("cudnnDeriveBNTensorDescriptor", vector, images, mode)
            scale, offset, mean, variance, kept, inverse, dscale, doffset = (values(torch.float32, channels) for _ in range(8))
            size = size_t()
            handle = made("cudnnCreate")
            spaces = []
            call("cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize", handle, mode, 0, images, None, images, vector,
                 None, ctypes.byref(size))
            spaces.append(size.value)
            call("cudnnGetBatchNormalizationTrainingExReserveSpaceSize", handle, mode, 0, None, images, ctypes.byref(size))
            spaces.append(size.value)
            call("cudnnGetBatchNormalizationBackwardExWorkspaceSize", handle, mode, 0, images, images, images, None, images,
                 vector, None, ctypes.byref(size))
            spaces.append(size.value)
            first, reserve, second = (torch.empty(max(space, 16), dtype=torch.uint8, device="cuda") for space in spaces)

            def forward(handle):
                call("cudnnBatchNormalizationForwardTrainingEx", handle, mode, 0, ONE, ZERO, images, address(x), None, None,
                     images, address(y), vector, address(scale), address(offset), double(0.1), address(mean),
                     address(variance), double(1e-5), address(kept), address(inverse), None, address(first),
                     size_t(spaces[0]), address(reserve), size_t(spaces[1]))

            def backward(handle):
                call("cudnnBatchNormalizationBackwardEx", handle, mode, 0, ONE, ZERO, ONE, ZERO, images, address(x), None,
                     None, images, address(dy), None, None, images, address(dx), vector, address(scale), address(offset),
                     address(dscale), address(doffset), double(1e-5), address(kept), address(inverse), None,
                     address(second), size_t(spaces[2]), address(reserve), size_t(spaces[1]))

            for name, work in (("forward", forward), ("backward", backward)):
                times[name] = min(times.get(name, 1e9), microseconds(work))
        except RuntimeError as error:
            failed.append(str(error))
    if not times:
        print("not complete:", failed, file=sys.stderr)
    return times


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    command = [sys.argv[1], "bench", "gpu", "--json", "--case", "pool-", "--case", "norm-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    print(done.stderr, file=sys.stderr)
    ours = {row["case"]: row["value"] for row in map(json.loads, filter(lambda l: l.startswith("{"), done.stdout.splitlines()))}
    dnn.cudnnGetVersion.restype = size_t
    print(f"cuDNN {dnn.cudnnGetVersion()}\n\n| layer | Kolo, us | cuDNN, us | Kolo is faster by |\n| --- | ---: | ---: | ---: |")
    for order, order_name in ((NHWC, "nhwc"), (NCHW, "nchw")):
        for kind, dtype, dtype_name in ((FLOAT, torch.float32, "float"), (BFLOAT16, torch.bfloat16, "bfloat16")):
            for case in POOLS + NORMS:
                theirs = (pool if len(case) > 4 else norm)(order, kind, dtype, *case[1:])
                torch.cuda.empty_cache()
                for name in ("forward", "backward"):
                    label = f"{case[0]}-{order_name}-{dtype_name}-{name}"
                    a, b = ours.get(label), theirs.get(name)
                    cells = [f"{t:.1f}" if t else "–" for t in (a, b)]
                    print(f"| {label} | {cells[0]} | {cells[1]} | {b / a:.2f} |" if a and b else f"| {label} | {cells[0]} | {cells[1]} | – |", flush=True)


if __name__ == "__main__":
    main()
