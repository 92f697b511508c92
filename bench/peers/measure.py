"""What every Python peer shares: timing, and the JSON line."""

import gzip
import json
import os
import statistics
import sys
import time
from pathlib import Path

MNIST = Path(__file__).resolve().parents[2] / "data" / "mnist"

# Seconds spent on each case, warm-up not counted.
BUDGET = float(os.environ.get("KOLO_BENCH_BUDGET", "3"))
# Seconds of warm-up before the first sample.
WARMUP = float(os.environ.get("KOLO_BENCH_WARMUP", "0.5"))
# Samples in the budget. Each sample times as many calls as fit in its share.
SAMPLES = 30


def seconds_per_call(call):
    """Times `call` for the budget. Returns one value per sample: seconds for one call."""
    clock = time.perf_counter
    calls, start = 0, clock()
    while calls < 2 or clock() - start < WARMUP:
        call()
        calls += 1
    per_call = (clock() - start) / calls
    batch = max(1, round(BUDGET / SAMPLES / per_call))
    samples, deadline = [], clock() + BUDGET
    while len(samples) < 5 or clock() < deadline:
        start = clock()
        for _ in range(batch):
            call()
        samples.append((clock() - start) / batch)
    return samples


def mnist_bytes():
    """The pixels of MNIST's training images, a row each, and what they show."""
    import numpy as np

    with gzip.open(MNIST / "train-images-idx3-ubyte.gz") as f:
        images = np.frombuffer(f.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(MNIST / "train-labels-idx1-ubyte.gz") as f:
        return images, np.frombuffer(f.read(), np.uint8, offset=8)


def mnist(first, count):
    """Some of these in the order of the file, floats from 0 to 1, with one-hot labels."""
    import numpy as np

    images, labels = (column[first : first + count] for column in mnist_bytes())
    return images.astype(np.float32) / np.float32(255), np.eye(10, dtype=np.float32)[labels]


def report(bench, case, unit, better, samples, versions):
    """Prints one case as one JSON line. Its value is the median of the samples."""
    line = {
        "bench": bench,
        "case": case,
        "unit": unit,
        "value": rounded(statistics.median(samples)),
        "better": better,
        "samples": [rounded(x) for x in samples],
        "versions": versions,
    }
    print(json.dumps(line), flush=True)


def rounded(x):
    return float(f"{x:.5g}")


# (case, M, K, N, A is stored transposed). C[M,N] = A[M,K] · B[K,N].
MATMUL = [
    ("256", 256, 256, 256, False),
    ("512", 512, 512, 512, False),
    ("1024", 1024, 1024, 1024, False),
    ("2048", 2048, 2048, 2048, False),
    ("100x784x100", 100, 784, 100, False),
    ("784x100x100-ta", 784, 100, 100, True),
    ("100x100x10", 100, 100, 10, False),
    ("1024x784x1024", 1024, 784, 1024, False),
]


def matmuls_per_call(m, k, n):
    """Matmuls in one call: about 20 ms of work at 100 GFLOP/s, 4 to 200 of them."""
    return max(4, min(200, round(2e9 / (2 * m * k * n))))


def only(cases, wanted):
    """The cases to run: all, or those named by --case."""
    unknown = [w for w in wanted if w not in cases]
    if unknown:
        sys.exit(f"no such case: {', '.join(unknown)}. Cases: {', '.join(cases)}")
    return [c for c in cases if not wanted or c in wanted]
