"""Runs programs of PyTorch and TensorFlow under `kolo launch`, on this machine and with agents.

usage: check.py KOLO TORCH_PYTHON WHY_NOT
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

kolo, torch_python, why_no_torch = str(Path(sys.argv[1]).resolve()), sys.argv[2], sys.argv[3]
here = Path(__file__).resolve().parent
TORCH = [torch_python, str(here / "torch_program.py")]
TENSORFLOW = [sys.executable, str(here / "tf_program.py")]
DEADLINE_S = 150


def clean():
    """This environment without what another launcher may have set."""
    mine = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TF_CONFIG", "SLURM_", "OMPI_", "PMI_", "PET_")
    return {name: value for name, value in os.environ.items() if not name.startswith(mine)}


def start(*command, **environment):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                            stdin=subprocess.DEVNULL, env={**clean(), **environment})


def finish(process):
    """Returns exit code and output; what is left after the deadline is ended."""
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        # The launcher's guard ends what it has started.
        os.killpg(process.pid, signal.SIGKILL)
        return 124, process.communicate()[0]


def launch(*arguments):
    return finish(start(kolo, "launch", *arguments))


def pytorch_ranks_train_over_gloo():
    code, output = launch("-n", "4", "--", *TORCH)
    lines = set(re.findall(r"\[(\d)\] torch rank (\d) of 4, local (\d) of 4: trained", output))
    assert code == 0 and lines == {(str(i),) * 3 for i in range(4)}, (code, output[-2000:])


def a_pytorch_rank_that_fails_is_named_with_its_traceback():
    began = time.monotonic()
    code, output = launch("-n", "2", "--", *TORCH, "FAIL")
    assert code == 1 and "rank 1 of 2 on localhost failed first: exit code 1" in output, (code, output[-2000:])
    named = output[output.index("failed first"):]
    assert "RuntimeError: this rank has a mistake" in named and time.monotonic() - began < 60, output[-2000:]


def pytorch_ranks_are_started_again():
    code, output = launch("-n", "2", "--restarts", "1", "--", *TORCH, "FAIL")
    assert code == 0 and "starting all 2 processes again (1 of 1)" in output and output.count(": trained") == 2, (code, output[-2000:])


def pytorch_ranks_of_two_hosts_meet():
    launcher = start(kolo, "launch", "--hosts", "a:2,b:1", "--listen", "127.0.0.1:0", "--", *TORCH)
    agents = []
    try:
        for line in launcher.stdout:
            called = re.search(r"KOLO_JOIN_TOKEN=(\S+) kolo agent --join (\S+)", line)
            if called:
                break
        agents = [start(kolo, "agent", "--join", called[2], "--name", name, KOLO_JOIN_TOKEN=called[1]) for name in ("a", "b")]
        code, output = finish(launcher)
        assert code == 0 and output.count(": trained") == 3 and "[1] torch rank 1 of 3, local 1 of 2" in output, (code, output[-2000:])
        assert [finish(agent)[0] for agent in agents] == [0, 0]
    finally:
        for process in [launcher, *agents]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def tensorflow_workers_find_each_other():
    code, output = launch("-n", "2", "--", *TENSORFLOW)
    assert code == 0 and all(f"[{i}] tf worker {i} of 2: summed" in output for i in range(2)), (code, output[-2000:])


CASES = [
    (True, pytorch_ranks_train_over_gloo),
    (True, a_pytorch_rank_that_fails_is_named_with_its_traceback),
    (True, pytorch_ranks_are_started_again),
    (True, pytorch_ranks_of_two_hosts_meet),
    (False, tensorflow_workers_find_each_other),
]


def main():
    n_passed = n_failed = 0
    for needs_torch, case in CASES:
        if needs_torch and not torch_python:
            print(f"skipped: {case.__name__}: PyTorch is not here: {why_no_torch}")
            continue
        began = time.monotonic()
        try:
            case()
            n_passed += 1
            print(f"ok   {case.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
        except AssertionError as error:
            n_failed += 1
            print(f"FAIL {case.__name__}: {error}", flush=True)
    print(f"{n_passed} passed, {n_failed} failed")
    sys.exit(1 if n_failed else 0)


main()
