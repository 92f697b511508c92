"""Runs programs of Kolo, PyTorch and TensorFlow under `kolo launch`, on this machine and with agents on others.

usage: check.py KOLO TORCH_PYTHON WHY_NOT
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from hosts import Hosts

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


@contextlib.contextmanager
def ended(*processes):
    """Whatever happens in the block, the processes have ended after it."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def launch_on(slots, on, address, *program):
    """Starts a launch on named hosts, and their agents; `on` makes a command one of a host."""
    hosts = ",".join(f"{name}:{n}" for name, n in slots.items())
    launcher = start(*on("launcher", kolo, "launch", "--hosts", hosts, "--listen", f"{address}:0", "--", *program))
    for line in launcher.stdout:
        called = re.search(r"KOLO_JOIN_TOKEN=(\S+) kolo agent --join (\S+)", line)
        if called:
            break
    agents = [start(*on(name, kolo, "agent", "--join", called[2], "--name", name), KOLO_JOIN_TOKEN=called[1]) for name in slots]
    return launcher, agents


TRAIN = [kolo, "train", "linear", "--epochs", "4", "--micro-batches", "4", "--json"]


def end_of(code, output):
    ends = [json.loads(line[line.index("{"):]) for line in output.splitlines() if '"event":"end"' in line]
    assert code == 0 and len(ends) == 1, (code, output[-2500:])
    return ends[0]


def every_shape_gives_the_same_weights_on_hosts_of_their_own():
    expected = end_of(*finish(start(*TRAIN)))
    with Hosts(5) as hosts:
        if hosts is None:
            return "it may not make network namespaces (needs root and `ip`)"
        for n_hosts, n_each in ((1, 1), (1, 4), (2, 1), (2, 2), (4, 1)):
            slots = {f"h{i + 1}": n_each for i in range(n_hosts)}
            on = lambda name, *command: hosts.on(5 if name == "launcher" else int(name[1:]), *command)
            launcher, agents = launch_on(slots, on, hosts.address(5), *TRAIN)
            with ended(launcher, *agents):
                found = end_of(*finish(launcher))
                assert all(finish(agent)[0] == 0 for agent in agents)
            assert found.get("ranks", 1) == n_hosts * n_each, (n_hosts, n_each, found)
            assert (found["weights"], found["final_cost"]) == (expected["weights"], expected["final_cost"]), (n_hosts, n_each, found, expected)
    return None


def a_host_that_is_cut_off_is_named_and_ends_what_it_runs():
    with Hosts(3) as hosts:
        if hosts is None:
            return "it may not make network namespaces (needs root and `ip`)"
        on = lambda name, *command: hosts.on(3 if name == "launcher" else int(name[1:]), *command)
        script = "echo process $$; exec sleep 600"
        launcher, agents = launch_on({"h1": 1, "h2": 1}, on, hosts.address(3), "sh", "-c", script)
        with ended(launcher, *agents):
            for line in launcher.stdout:
                of_h2 = re.search(r"\[1\] process (\d+)", line)
                if of_h2:
                    break
            hosts.cut(2)
            code, output = finish(launcher)
            assert code == 1 and "rank 1 of 2 on h2 failed first: its host is lost (the agent on h2: " in output, (code, output)
            code, output = finish(agents[1])
            assert code == 1 and "its processes here were ended" in output, (code, output)
            assert not Path(f"/proc/{of_h2[1]}").exists()
    return None


def pytorch_ranks_train_over_gloo():
    code, output = launch("-n", "4", "--", *TORCH)
    lines = set(re.findall(r"\[(\d)\] torch rank (\d) of 4, local (\d) of 4: trained", output))
    assert code == 0 and lines == {(str(i),) * 3 for i in range(4)}, (code, output[-2000:])


def a_pytorch_rank_that_fails_is_named_with_its_traceback():
    code, output = launch("-n", "2", "--", *TORCH, "FAIL")
    # Interpreters with open process groups end by an error or by SIGABRT.
    assert code in (1, 134) and "rank 1 of 2 on localhost failed first: " in output, (code, output[-2000:])
    assert "RuntimeError: this rank has a mistake" in output[output.index("failed first"):], output[-2000:]


def pytorch_ranks_are_started_again():
    code, output = launch("-n", "2", "--restarts", "1", "--", *TORCH, "FAIL")
    assert code == 0 and "starting all 2 processes again (1 of 1)" in output and output.count(": trained") == 2, (code, output[-2000:])


def pytorch_ranks_of_two_hosts_meet():
    launcher, agents = launch_on({"a": 2, "b": 1}, lambda _, *command: command, "127.0.0.1", *TORCH)
    with ended(launcher, *agents):
        code, output = finish(launcher)
        assert code == 0 and output.count(": trained") == 3 and "[1] torch rank 1 of 3, local 1 of 2" in output, (code, output[-2000:])
        assert [finish(agent)[0] for agent in agents] == [0, 0]


def tensorflow_workers_find_each_other():
    code, output = launch("-n", "2", "--", *TENSORFLOW)
    assert code == 0 and all(f"[{i}] tf worker {i} of 2: summed" in output for i in range(2)), (code, output[-2000:])


CASES = [
    (False, every_shape_gives_the_same_weights_on_hosts_of_their_own),
    (False, a_host_that_is_cut_off_is_named_and_ends_what_it_runs),
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
            why_not = case()
            if why_not:
                print(f"skipped: {case.__name__}: {why_not}", flush=True)
                continue
            n_passed += 1
            print(f"ok   {case.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
        except AssertionError as error:
            n_failed += 1
            print(f"FAIL {case.__name__}: {error}", flush=True)
    print(f"{n_passed} passed, {n_failed} failed")
    sys.exit(1 if n_failed else 0)


main()
