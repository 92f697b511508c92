"""Trains ranks that Slurm starts on four emulated nodes, and compares them with those of `kolo train --ranks`.

usage: check.py KOLO   as root, in a mount namespace of its own, where it gives the nodes names

Everything that it starts listens on loopback, writes into a temporary folder, and is ended with it.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

kolo = str(Path(sys.argv[1]).resolve())
NODES = [f"kn{i}" for i in range(1, 5)]
DEADLINE_S = 90


def free_ports(n):
    """Returns the first of n ports in a row that are free."""
    for _ in range(200):
        first = random.randrange(21000, 31000)
        held = []
        try:
            for port in range(first, first + n):
                held.append(socket.socket())
                held[-1].bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise RuntimeError("no free ports")


class Slurm:
    """Daemons of a cluster in a folder."""

    def __init__(self, folder):
        self.folder, self.daemons = Path(folder), []
        hosts = self.folder / "hosts"
        hosts.write_text(Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {name}\n" for name in NODES))
        # Private to this process and those that it starts.
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
        self.munge = self.folder / "munge.socket"
        key = self.folder / "munge.key"
        key.write_bytes(random.randbytes(128))
        key.chmod(0o600)
        first = free_ports(len(NODES) + 1)
        host = socket.gethostname()
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        n_cpus = max(8, os.cpu_count())
        (self.folder / "slurm.conf").write_text(f"""
ClusterName=kolo
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.munge}
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=5
NodeName=kn[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first + 1}-{first + 4}] CPUs={n_cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
""")
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")

    def __enter__(self):
        self.daemon("munged", "-F", "--force", f"--socket={self.munge}", f"--key-file={self.folder}/munge.key",
                    f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munge.seed")
        wait_until("munged", self.munge.exists)
        self.daemon("slurmctld", "-D", "-L", str(self.folder / "slurmctld.log"))
        for node in NODES:
            self.daemon("slurmd", "-D", "-N", node, "-L", str(self.folder / f"{node}.log"))
        wait_until("four idle nodes", lambda: self.n_idle() == 4)
        return self

    def daemon(self, *command):
        out = open(self.folder / f"{command[0]}.out", "a")
        self.daemons.append(subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True))

    def n_idle(self):
        shown = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %T"], capture_output=True, text=True)
        return sum(line.endswith(" idle") for line in shown.stdout.splitlines())

    def __exit__(self, *_):
        subprocess.run(["scancel", "--state=RUNNING", "--full"], capture_output=True, timeout=20)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()

    def logs(self):
        return "\n".join(f"{path.name}: {path.read_text()[-600:]}" for path in sorted(self.folder.glob("*.log")))


def wait_until(what, holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not there in {seconds} s")
        time.sleep(0.1)


def run(*command, **environment):
    """Runs a command to its end; whatever is left of it after the deadline is ended."""
    variables = {**os.environ, **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=variables)
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return 124, output


TRAIN = [kolo, "train", "linear", "--epochs", "4", "--micro-batches", "4", "--json"]


def end_of(code, output):
    """Returns the only result in an output."""
    ends = [json.loads(line[line.index("{"):]) for line in output.splitlines() if '"event":"end"' in line]
    assert code == 0 and len(ends) == 1, f"exit code {code}, {len(ends)} results\n{output[-2500:]}"
    return ends[0]


def expected_weights():
    return end_of(*run(*TRAIN, "--ranks", "2"))["weights"]


def four_tasks_on_two_nodes_are_one_world():
    found = end_of(*run("srun", "-N", "2", "-n", "4", *TRAIN))
    assert found["ranks"] == 4 and found["weights"] == expected_weights(), found


def each_of_four_nodes_has_a_rank():
    found = end_of(*run("srun", "-N", "4", "-n", "4", *TRAIN))
    assert found["ranks"] == 4 and found["weights"] == expected_weights(), found


def one_node_needs_no_name():
    found = end_of(*run("srun", "-N", "1", "-n", "2", *TRAIN))
    assert found["ranks"] == 2 and found["weights"] == expected_weights(), found


def each_task_can_explain_itself():
    code, output = run("srun", "-N", "2", "-n", "3", kolo, "config", "check", "--json")
    places = sorted((json.loads(line)["place"] for line in output.splitlines()), key=lambda place: place["rank"])
    assert code == 0 and [place["rank"] for place in places] == [0, 1, 2], output
    assert {place["meeting"]["address"].rsplit(":", 1)[0] for place in places} == {"kn1"}, output
    assert sorted((place["local_rank"], place["local_size"]) for place in places) == [(0, 1), (0, 2), (1, 2)], output


def pmi2_is_no_mpirun():
    code, output = run("srun", "--mpi=pmi2", "-N", "2", "-n", "2", kolo, "config", "check", "--json")
    engines = {json.loads(line)["engine"] for line in output.splitlines() if line.startswith("{")}
    assert code == 0 and engines == {"Slurm's srun"}, output


def a_script_trains_when_it_says_srun():
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.sh"
        script.write_text(f"#!/bin/sh\nsrun {' '.join(TRAIN)}\n")
        code, _ = run("sbatch", "--wait", "-N", "2", "-n", "4", "-o", f"{folder}/out", str(script))
        output = (Path(folder) / "out").read_text()
        assert end_of(code, output)["ranks"] == 4, output


def a_script_that_forgets_srun_is_told_so():
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.sh"
        script.write_text(f"#!/bin/sh\n{' '.join(TRAIN)}\n")
        code, _ = run("sbatch", "--wait", "-N", "2", "-n", "4", "-o", f"{folder}/out", str(script))
        output = (Path(folder) / "out").read_text()
        assert code == 1 and "SLURM_NTASKS=4" in output and "srun kolo train" in output, (code, output)
    code, output = run("salloc", "-N", "1", "-n", "2", *TRAIN)
    assert code != 0 and "SLURM_NTASKS=2" in output and "srun kolo train" in output, (code, output)


def worlds_of_one_beside_each_other_are_refused():
    """What Open MPI 5 under plain `srun` makes: four processes, each of which believes that it is alone."""
    code, output = run("srun", "-n", "4", *TRAIN, OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0")
    assert code != 0 and "each train alone" in output and "KOLO_PLACE=alone" in output, (code, output)


def a_launcher_on_each_node_starts_several():
    code, output = run("srun", "-N", "2", "--ntasks-per-node", "1", kolo, "launch", "-n", "2", "--", *TRAIN)
    found = end_of(code, output)
    assert found["ranks"] == 4 and found["weights"] == expected_weights(), found


def a_cancelled_job_saves_and_goes_on():
    with tempfile.TemporaryDirectory() as folder:
        long = [kolo, "train", "linear", "--epochs", "100000000", "--checkpoint-dir", f"{folder}/ckpt", "--json", "--log-every", "10"]
        with open(f"{folder}/out", "w") as out:
            process = subprocess.Popen(["srun", "-J", "cancelled", "-N", "2", "-n", "2", *long], stdout=out, stderr=out, start_new_session=True)
        try:
            text = lambda: Path(f"{folder}/out").read_text()
            wait_until("a step", lambda: '"event":"step"' in text())
            subprocess.run(["scancel", "-n", "cancelled", "--signal=TERM"], check=True, timeout=20)
            process.wait(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        ended = [json.loads(line) for line in text().splitlines() if '"event":"end"' in line]
        assert ended and ended[0]["stopped"], text()[-1500:]
        code, output = run("srun", "-N", "1", "-n", "2", kolo, "train", "linear", "--max-steps", str(ended[0]["step"] + 10), "--epochs", "100000000",
                           "--checkpoint-dir", f"{folder}/ckpt", "--resume", "--json")
        assert f'"step":{ended[0]["step"]}' in output and "resumed" in output, output[-1500:]
        assert end_of(code, output)["step"] == ended[0]["step"] + 10, output[-1500:]


CASES = [
    four_tasks_on_two_nodes_are_one_world,
    each_of_four_nodes_has_a_rank,
    one_node_needs_no_name,
    each_task_can_explain_itself,
    pmi2_is_no_mpirun,
    a_script_trains_when_it_says_srun,
    a_script_that_forgets_srun_is_told_so,
    worlds_of_one_beside_each_other_are_refused,
    a_launcher_on_each_node_starts_several,
    a_cancelled_job_saves_and_goes_on,
]


def main():
    n_failed = 0
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    folder = tempfile.mkdtemp(prefix="kolo-slurm-")
    # Daemons of other users (munge checks folders) have no business here.
    os.chmod(folder, 0o755)
    slurm = Slurm(folder)
    try:
        with slurm:
            for case in CASES:
                began = time.monotonic()
                try:
                    case()
                    print(f"ok   {case.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
                except (AssertionError, RuntimeError, subprocess.SubprocessError, ValueError) as error:
                    n_failed += 1
                    print(f"FAIL {case.__name__}: {error}", flush=True)
    except RuntimeError as error:
        # Installed, and yet not to be started: that is a failure, and not a reason to pass.
        print(f"FAIL Slurm did not start: {error}\n{slurm.logs()}", flush=True)
        n_failed = len(CASES)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(CASES) - n_failed} passed, {n_failed} failed")
    sys.exit(1 if n_failed else 0)


main()
