"""OpenBLAS through ctypes: the second peer of the `matmul` bench.

The cost of a ctypes call is measured and taken off, so that the figure is the library's.

usage: openblas.py [matmul] [--threads N] [--case CASE]... [--check]
"""

import argparse
import ctypes
import os
import time

import numpy as np

import measure

ROW_MAJOR, NO_TRANS, TRANS = 101, 111, 112


def load(threads):
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    import scipy_openblas32 as blas

    path = os.path.join(blas.get_lib_dir(), blas.get_library(fullname=True))
    lib = ctypes.CDLL(path)
    sgemm = lib.scipy_cblas_sgemm
    i, f, p = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    sgemm.argtypes = [i, i, i, i, i, i, f, p, i, p, i, f, p, i]
    sgemm.restype = None
    config = lib.scipy_openblas_get_config
    config.restype = ctypes.c_char_p
    words = config().decode().split()
    return sgemm, {"openblas": words[1], "core": words[-2] if words[-1].startswith("MAX_THREADS") else words[-1]}


def caller(sgemm, m, k, n, ta, empty=False):
    rng = np.random.default_rng(0)
    a = rng.random((k, m) if ta else (m, k), dtype=np.float32)
    b = rng.random((k, n), dtype=np.float32)
    c = np.zeros((m, n), dtype=np.float32)
    trans, lda = (TRANS, m) if ta else (NO_TRANS, k)
    args = [
        ctypes.c_int(ROW_MAJOR), ctypes.c_int(trans), ctypes.c_int(NO_TRANS),
        ctypes.c_int(m), ctypes.c_int(n), ctypes.c_int(k),
        ctypes.c_float(1.0), ctypes.c_void_p(a.ctypes.data), ctypes.c_int(lda),
        ctypes.c_void_p(b.ctypes.data), ctypes.c_int(n),
        ctypes.c_float(0.0), ctypes.c_void_p(c.ctypes.data), ctypes.c_int(n),
    ]
    if empty:
        args[4] = ctypes.c_int(0)
    else:
        sgemm(*args)
        wanted = (a.T if ta else a)[m // 2] @ b
        if not np.allclose(c[m // 2], wanted, rtol=1e-3):
            raise SystemExit(f"openblas: wrong product at {m}x{k}x{n}")
    keep = (a, b, c)

    def call(times, keep=keep):
        for _ in range(times):
            sgemm(*args)

    return call


def call_cost(sgemm):
    """Seconds that ctypes takes for one call: a product with no columns, best of many."""
    call = caller(sgemm, 16, 16, 16, False, empty=True)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        call(1000)
        best = min(best, (time.perf_counter() - start) / 1000)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", nargs="?", default="matmul", choices=["matmul"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--check", action="store_true", help="load the library, multiply once and stop")
    options = parser.parse_args()
    sgemm, versions = load(options.threads)
    if options.check:
        caller(sgemm, 64, 64, 64, False)
        print(f"OpenBLAS {versions['openblas']} works.")
        return
    wanted = measure.only([c[0] for c in measure.MATMUL], options.case)
    overhead = call_cost(sgemm)
    for case, m, k, n, ta in measure.MATMUL:
        if case not in wanted:
            continue
        times = measure.matmuls_per_call(m, k, n)
        call = caller(sgemm, m, k, n, ta)
        seconds = measure.seconds_per_call(lambda: call(times))
        gflops = [2e-9 * m * k * n * times / (s - overhead * times) for s in seconds]
        measure.report("matmul", case, "GFLOP/s", "higher", gflops, versions)


if __name__ == "__main__":
    main()
