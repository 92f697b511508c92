"""PyTorch's side of `kolo bench data-parallel`: DistributedDataParallel with Gloo, one thread for each rank.

usage: ddp.py [--ranks N] [--case CASE]

The models and the number of rows are those of Kolo's bench; batches are in memory. As there, rank 0 measures, and tells the others before
each batch of steps how many there are.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

import measure
import torch_peer

# Name: the rows of a batch, and whether each rank has as many (or else they share them).
CASES = {"mnist": (100, False), "mnist-each": (100, True), "lm": (32, False), "lenet-each": (64, True)}
N_BATCHES = 40


def training(case, rank, ranks):
    """A step of this rank."""
    import torch
    from torch.nn import functional as F

    rows, each = CASES[case]
    rows = rows if each else rows // ranks
    torch.manual_seed(1)
    if case == "lm":
        model, columns = torch_peer.language_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        prepare = lambda x, y: (x, y.flatten())
    else:
        model, columns = torch_peer.lenet() if case == "lenet-each" else torch_peer.mlp(), torch_peer.images_and_labels()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        prepare = lambda x, y: (x.float().mul_(1.0 / 255.0), y)
    if ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    starts = ((rank * N_BATCHES + i) * rows % (len(columns[0]) - rows) for i in range(N_BATCHES))
    batches = [prepare(*(column[start : start + rows] for column in columns)) for start in starts]
    done = 0

    def step():
        nonlocal done
        x, y = batches[done % N_BATCHES]
        done += 1
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def be_rank(case, rank, ranks, port, n_samples=30):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    step = training(case, rank, ranks)
    clock = time.perf_counter

    def batch(n):
        told = torch.tensor([n])
        dist.broadcast(told, 0)
        n = told.item()
        dist.barrier()
        start = clock()
        for _ in range(n):
            step()
        return n, (clock() - start) / max(1, n)

    if rank > 0:
        while batch(0)[0]:
            pass
        return None
    start = clock()
    while clock() - start < measure.WARMUP:
        batch(10)
    _, once = batch(10)
    n = max(1, round(measure.BUDGET / n_samples / once))
    samples, deadline = [], clock() + measure.BUDGET
    while len(samples) < 5 or clock() < deadline:
        samples.append(batch(n)[1])
    batch(0)
    return samples


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--case", choices=list(CASES), help="only this one")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.port:
        be_rank(o.case, o.rank, o.ranks, o.port)
        return
    import torch

    versions = {"torch": torch.__version__}
    for case in [o.case] if o.case else CASES:
        rows, each = CASES[case]
        alone = None
        for n in sorted({1 << i for i in range(o.ranks.bit_length()) if 1 << i <= o.ranks} | {o.ranks}):
            if not each and rows % n:
                continue
            port = free_port()
            own = [sys.executable, __file__, "--case", case, "--ranks", str(n), "--port", str(port), "--rank"]
            others = [subprocess.Popen([*own, str(rank)]) for rank in range(1, n)]
            try:
                samples = in_process(case, n, port)
                if any(other.wait(60) for other in others):
                    sys.exit("a rank failed")
            finally:
                for other in others:
                    other.kill()
            rates = [(n if each else 1) / s for s in samples]
            measure.report("data-parallel", f"{case}/{n}", "batches/s" if each else "steps/s", "higher", rates, versions)
            alone = alone or statistics.median(rates)
            if n > 1:
                measure.report("data-parallel", f"{case}/{n}-of-1", "x", "higher", [r / alone for r in rates], versions)


def in_process(case, n, port):
    """Rank 0, here."""
    import torch.distributed as dist

    samples = be_rank(case, 0, n, port)
    dist.destroy_process_group()
    return samples


if __name__ == "__main__":
    main()
