"""Checks deploy/: its manifests against the fields that their kinds have, and what their pods run, as processes on this host.

usage: check.py KOLO DEPLOY

A pod becomes a process with the very arguments and variables of its manifest and those that its controller adds. What differs: names of
services are loopback addresses, volumes are folders, and MNIST is cut to a few steps by one more flag.
"""

import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import yaml

from schema import check_manifest

kolo, deploy = str(Path(sys.argv[1]).resolve()), Path(sys.argv[2])
DEADLINE_S = 150
TOKEN = "a-token-of-this-test-0123456789"


def manifests(name):
    return list(yaml.safe_load_all((deploy / "kubernetes" / name).read_text()))


def of_kind(all_of_them, kind):
    found = [manifest for manifest in all_of_them if manifest["kind"] == kind]
    assert len(found) == 1, f"{len(found)} {kind}"
    return found[0]


def render(text, values, release):
    """Fills a template of Helm in the few forms that the chart uses; anything else is an error."""
    text = re.sub(
        r"(?s)\n *\{\{- if \.Values\.(\w+) \}\}(.*?)\n *\{\{- else \}\}(.*?)\n *\{\{- end \}\}",
        lambda found: found[2] if values[found[1]] else found[3],
        text,
    )

    def fill(found):
        expression, _, function = found[1].strip().partition(" | ")
        value = release if expression == ".Release.Name" else values[expression.removeprefix(".Values.")]
        if function in ("quote", "toJson"):
            return json.dumps(str(value) if function == "quote" else value)
        assert function == "", f"{found[0]} is no form that is known here"
        return str(value)

    return re.sub(r"\{\{(.*?)\}\}", fill, text)


def chart(**changed):
    folder = deploy / "helm" / "kolo"
    values = {**yaml.safe_load((folder / "values.yaml").read_text()), **changed}
    templates = sorted((folder / "templates").glob("*.yaml"))
    return [yaml.safe_load(render(template.read_text(), values, "digits")) for template in templates]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def variables_of(container, more, labels=None):
    """The environment of a container, as a kubelet makes it."""
    made = {"PATH": os.environ["PATH"], "HOME": "/tmp", "KUBERNETES_SERVICE_HOST": "10.0.0.1", **more}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "kolo-token", "key": "token"}, source
            made[variable["name"]] = TOKEN
        elif "fieldRef" in source:
            label = re.fullmatch(r"metadata\.labels\['(.*)'\]", source["fieldRef"]["fieldPath"])
            made[variable["name"]] = labels[label[1]]
        else:
            made[variable["name"]] = variable["value"]
    return made


class Pods:
    """Processes that end with this."""

    def __init__(self):
        self.processes, self.folder = [], tempfile.TemporaryDirectory(prefix="kolo-pods-")

    def __enter__(self):
        return self

    def start(self, container, variables, host_name=None, more=()):
        words = [*container.get("command", [kolo]), *container.get("args", [])]
        words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words]
        words = [word.replace("/usr/local/bin/kolo", kolo).replace("/data", self.folder.name) for word in words]
        command = [*words, *more]
        if host_name:
            # A name of its own, as a pod has; the network stays this host's.
            command = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host_name, *command]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
        self.processes.append(process)
        return process

    def finish(self):
        """Waits for all of them; what they said."""
        deadline, said = time.monotonic() + DEADLINE_S, []
        for process in self.processes:
            try:
                said.append(process.communicate(timeout=max(1, deadline - time.monotonic()))[0])
            except subprocess.TimeoutExpired as late:
                raise AssertionError(f"{process.args} did not end: {(late.output or b'')[-800:]}") from None
        for process, text in zip(self.processes, said):
            assert process.returncode == 0, f"{process.args}: exit code {process.returncode}\n{text[-1500:]}"
        return said

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.folder.cleanup()


def one_end(said):
    ends = [json.loads(line) for text in said for line in text.splitlines() if '"event":"end"' in line]
    assert ends, said
    return ends


FEW = ["--max-steps", "3", "--json"]


def manifests_have_the_fields_of_their_kinds():
    n = 0
    for path in sorted((deploy / "kubernetes").glob("*.yaml")):
        for manifest in manifests(path.name):
            try:
                check_manifest(manifest)
            except AssertionError as error:
                raise AssertionError(f"{path.name}: {error}") from None
            n += 1
    assert n >= 11, n
    # The check can fail.
    wrong = copy.deepcopy(of_kind(manifests("job.yaml"), "Job"))
    wrong["spec"]["template"]["spec"]["containers"][0]["enviroment"] = []
    try:
        check_manifest(wrong)
    except AssertionError as error:
        assert "enviroment is no field" in str(error), error
    else:
        raise AssertionError("a wrong field was not noticed")


def charts_render_to_the_same():
    for changed in ({}, {"claim": "ckpt"}):
        for manifest in chart(**changed):
            check_manifest(manifest)
    job, plain = of_kind(chart(), "Job"), of_kind(manifests("job.yaml"), "Job")
    names = lambda job: [one["name"] for one in job["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert set(names(plain)) <= set(names(job)), (names(plain), names(job))
    assert job["spec"]["template"]["spec"]["volumes"][0] == {"name": "data", "emptyDir": {}}
    helm = subprocess.run(["helm", "version"], capture_output=True) if any(
        (Path(folder) / "helm").exists() for folder in os.environ["PATH"].split(":")) else None
    if helm is None:
        print("skipped: helm is not installed, so the chart was rendered by this suite's own few lines alone")
        return
    made = subprocess.run(["helm", "template", "digits", str(deploy / "helm" / "kolo")], capture_output=True, text=True, check=True)
    assert [m for m in yaml.safe_load_all(made.stdout) if m] == chart(), made.stdout


def names_and_numbers_agree_with_each_other():
    for all_of_them in (manifests("job.yaml"), chart()):
        job, service = of_kind(all_of_them, "Job"), of_kind(all_of_them, "Service")
        pod = job["spec"]["template"]["spec"]
        env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        assert int(env["KOLO_PODS"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
        assert env["KOLO_SERVICE"] == pod["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    stateful = manifests("statefulset.yaml")
    cluster = json.loads(of_kind(stateful, "ConfigMap")["data"]["cluster.json"])
    for one in (m for m in stateful if m["kind"] == "StatefulSet"):
        name, spec = one["metadata"]["name"], one["spec"]
        assert cluster[name] == [f"{name}-{i}.{spec['serviceName']}:2222" for i in range(spec["replicas"])]
        container = spec["template"]["spec"]["containers"][0]
        for probe, path in (("startupProbe", "/startupz"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": "health"}, container[probe]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    workers = of_kind(manifests("jobset.yaml"), "JobSet")["spec"]["replicatedJobs"][0]
    env = {one["name"]: one.get("value") for one in workers["template"]["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert int(env["KOLO_PODS"]) == workers["template"]["spec"]["completions"] and workers["replicas"] == 1


def pods_of_a_job_are_ranks_and_resume():
    job = of_kind(manifests("job.yaml"), "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    with Pods() as pods:
        port = free_port()
        for steps in ("3", "5"):
            for index in range(job["spec"]["completions"]):
                # The service's name is a loopback address here, and the host's name is that of the pod.
                more = {"JOB_COMPLETION_INDEX": str(index), "MASTER_ADDR": "127.0.0.1", "KOLO_PORT": str(port)}
                pods.start(container, variables_of(container, more), f"digits-{index}", ["--max-steps", steps, "--json"])
            said = pods.finish()
            pods.processes.clear()
            (end,) = one_end(said)
            assert end["ranks"] == 4 and end["step"] == int(steps), end
        assert any('"resumed"' in text for text in said), said[0][:500]


def pods_of_a_job_set_are_ranks():
    job = of_kind(manifests("jobset.yaml"), "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    with Pods() as pods:
        port = str(free_port())
        for index in range(job["completions"]):
            more = {"JOB_COMPLETION_INDEX": str(index), "MASTER_ADDR": "127.0.0.1", "KOLO_PORT": port}
            pods.start(container, variables_of(container, more), f"digits-workers-0-{index}", FEW)
        assert one_end(pods.finish())[0]["ranks"] == 4


def pods_of_a_train_job_are_ranks_alone_and_with_several_processes():
    trainer = of_kind(manifests("trainjob.yaml"), "TrainJob")["spec"]["trainer"]
    with Pods() as pods:
        port = str(free_port())
        for index in range(trainer["numNodes"]):
            more = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]), "PET_NODE_RANK": str(index),
                    "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
            pods.start(trainer, variables_of(trainer, more), None, FEW)
        assert one_end(pods.finish())[0]["ranks"] == 4
    with Pods() as pods:
        port = str(free_port())
        several = {**trainer, "command": [kolo, "launch", "--", kolo], "args": trainer["args"]}
        for index in range(2):
            more = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
            pods.start(several, variables_of(several, more), None, FEW)
        said = pods.finish()
        assert any('"ranks":4' in text for text in said), said


def pods_of_a_pytorch_job_are_ranks():
    replicas = of_kind(manifests("pytorchjob.yaml"), "PyTorchJob")["spec"]["pytorchReplicaSpecs"]
    size = sum(replica["replicas"] for replica in replicas.values())
    with Pods() as pods:
        port, rank = str(free_port()), 0
        for name in ("Master", "Worker"):
            container = replicas[name]["template"]["spec"]["containers"][0]
            assert container["name"] == "pytorch", "the operator looks for this name"
            for _ in range(replicas[name]["replicas"]):
                more = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                        "PET_NPROC_PER_NODE": "1", "PET_NNODES": str(size), "PET_NODE_RANK": str(rank),
                        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}
                pods.start(container, variables_of(container, more), None, FEW)
                rank += 1
        assert one_end(pods.finish())[0]["ranks"] == size


def pods_of_a_tf_job_are_a_cluster_that_ends():
    replicas = of_kind(manifests("tfjob.yaml"), "TFJob")["spec"]["tfReplicaSpecs"]
    cluster = {name.lower(): [f"127.0.0.1:{free_port()}" for _ in range(of["replicas"])] for name, of in replicas.items()}
    with Pods() as pods:
        for name, of in replicas.items():
            container = of["template"]["spec"]["containers"][0]
            assert container["name"] == "tensorflow", "the operator looks for this name"
            for index in range(of["replicas"]):
                config = {"cluster": cluster, "task": {"type": name.lower(), "index": index}, "environment": "cloud"}
                pods.start(container, variables_of(container, {"TF_CONFIG": json.dumps(config)}), None, FEW)
        said = pods.finish()
        assert {end["task"] for end in one_end(said)} == {0, 1, 2}, said


def a_stateful_set_serves_and_answers_probes():
    stateful = manifests("statefulset.yaml")
    cluster = {name: [f"127.0.0.1:{free_port()}" for _ in range(2)] for name in ("ps", "worker")}
    with Pods() as pods:
        file = Path(pods.folder.name) / "cluster.json"
        file.write_text(json.dumps(cluster))
        probes = []
        for one in (m for m in stateful if m["kind"] == "StatefulSet"):
            container = copy.deepcopy(one["spec"]["template"]["spec"]["containers"][0])
            for index in range(one["spec"]["replicas"]):
                port = free_port()
                probes.append((container, port))
                pod = {**container, "args": [word.replace("/etc/kolo/cluster.json", str(file)).replace("0.0.0.0:8080", f"127.0.0.1:{port}") for word in container["args"]]}
                pods.start(pod, variables_of(container, {}, {"apps.kubernetes.io/pod-index": str(index)}))
        deadline = time.monotonic() + 60
        for container, port in probes:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                url = f"http://127.0.0.1:{port}{container[probe]['httpGet']['path']}"
                while True:
                    try:
                        assert urllib.request.urlopen(url, timeout=5).status == 200
                        break
                    except OSError as error:
                        assert time.monotonic() < deadline, f"{url}: {error}"
                        time.sleep(0.1)
        train = subprocess.run([kolo, "train", "mnist", "--target", f"grpc://{cluster['worker'][0]}", *FEW], capture_output=True, text=True,
                               timeout=DEADLINE_S, env={**os.environ, "KOLO_TOKEN": TOKEN})
        assert train.returncode == 0 and '"event":"end"' in train.stdout, train.stdout + train.stderr
        for process in pods.processes:
            process.terminate()
        pods.finish()


def sigterm_saves_before_the_end():
    job = of_kind(manifests("job.yaml"), "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    with Pods() as pods:
        port = str(free_port())
        for index in range(2):
            more = {"MASTER_ADDR": "127.0.0.1", "KOLO_PORT": port}
            variables = {**variables_of(container, more), "KOLO_PODS": "2"}
            pods.start({**container, "args": ["train", "linear", "--epochs", "100000000", "--checkpoint-dir", "/data/ckpt"]}, variables, f"digits-{index}",
                       ["--json", "--log-every", "10"])
        for line in pods.processes[0].stdout:
            if '"event":"step"' in line:
                break
        for process in pods.processes:
            process.send_signal(signal.SIGTERM)
        said = pods.finish()
        (end,) = one_end(said)
        assert end["stopped"] and list(Path(pods.folder.name).glob(f"ckpt/*-{end['step']}.index")), (end, os.listdir(f"{pods.folder.name}/ckpt"))


CASES = [
    manifests_have_the_fields_of_their_kinds,
    charts_render_to_the_same,
    names_and_numbers_agree_with_each_other,
    pods_of_a_job_are_ranks_and_resume,
    pods_of_a_job_set_are_ranks,
    pods_of_a_train_job_are_ranks_alone_and_with_several_processes,
    pods_of_a_pytorch_job_are_ranks,
    pods_of_a_tf_job_are_a_cluster_that_ends,
    a_stateful_set_serves_and_answers_probes,
    sigterm_saves_before_the_end,
]


def main():
    n_failed, n_skipped = 0, 0
    may_name = subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0
    for case in CASES:
        needs_name = case in (pods_of_a_job_are_ranks_and_resume, pods_of_a_job_set_are_ranks, sigterm_saves_before_the_end)
        if needs_name and not may_name:
            n_skipped += 1
            print(f"skipped: {case.__name__}: it may not give processes host names (needs root)")
            continue
        began = time.monotonic()
        try:
            case()
            print(f"ok   {case.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
        except (AssertionError, KeyError, OSError, ValueError, subprocess.SubprocessError) as error:
            n_failed += 1
            print(f"FAIL {case.__name__}: {type(error).__name__} {error}", flush=True)
    print(f"{len(CASES) - n_failed - n_skipped} passed, {n_failed} failed")
    sys.exit(1 if n_failed else 0)


main()
