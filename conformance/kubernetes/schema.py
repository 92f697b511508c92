"""What the kinds of deploy/ look like: the fields that Kubernetes, JobSet and Kubeflow have, with their types.

A field that is not listed is an error: it would be dropped by the API server, or the manifest refused. A trailing `!` marks a field that has
to be there. Written from the API references; kinds have many more fields than these.
"""

STRINGS = {"*": str}

META = {"name!": str, "namespace": str, "labels": STRINGS, "annotations": STRINGS}

ENV = {
    "name!": str,
    "value": str,
    "valueFrom": {"secretKeyRef": {"name!": str, "key!": str}, "fieldRef": {"fieldPath!": str}},
}

PROBE = {
    "httpGet": {"path!": str, "port!": (str, int)},
    "periodSeconds": int,
    "timeoutSeconds": int,
    "failureThreshold": int,
    "initialDelaySeconds": int,
}

CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [ENV],
    "ports": [{"name": str, "containerPort!": int}],
    "startupProbe": PROBE,
    "livenessProbe": PROBE,
    "readinessProbe": PROBE,
    "securityContext": {"allowPrivilegeEscalation": bool, "readOnlyRootFilesystem": bool, "capabilities": {"drop": [str]}},
    "volumeMounts": [{"name!": str, "mountPath!": str}],
    "resources": {"requests": STRINGS, "limits": STRINGS},
}

VOLUME = {"name!": str, "emptyDir": {}, "configMap": {"name!": str}, "persistentVolumeClaim": {"claimName!": str}}

POD = {
    "subdomain": str,
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "terminationGracePeriodSeconds": int,
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int, "seccompProfile": {"type!": str}},
    "containers!": [CONTAINER],
    "volumes": [VOLUME],
}

TEMPLATE = {"metadata": {"labels": STRINGS}, "spec!": POD}

JOB = {
    "completionMode": ("NonIndexed", "Indexed"),
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "template!": TEMPLATE,
}

REPLICA = {"replicas!": int, "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"), "template!": TEMPLATE}
RUN_POLICY = {"backoffLimit": int, "cleanPodPolicy": ("Running", "All", "None")}

KINDS = {
    ("v1", "Service"): {
        "spec!": {
            "clusterIP": str,
            "publishNotReadyAddresses": bool,
            "selector": STRINGS,
            "ports": [{"name": str, "port!": int}],
        }
    },
    ("v1", "ConfigMap"): {"data": STRINGS},
    ("v1", "PersistentVolumeClaim"): {"spec!": {"accessModes": [str], "resources": {"requests": STRINGS}}},
    ("batch/v1", "Job"): {"spec!": JOB},
    ("apps/v1", "StatefulSet"): {
        "spec!": {
            "serviceName!": str,
            "replicas": int,
            "podManagementPolicy": ("OrderedReady", "Parallel"),
            "selector!": {"matchLabels": STRINGS},
            "template!": TEMPLATE,
        }
    },
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "spec!": {
            "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
            "failurePolicy": {"maxRestarts": int, "restartStrategy": ("Recreate", "BlockingRecreate")},
            "replicatedJobs!": [{"name!": str, "replicas": int, "template!": {"spec!": JOB}}],
        }
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "spec!": {
            "runtimeRef!": {"name!": str},
            "trainer": {
                "numNodes": int,
                "numProcPerNode": (str, int),
                "image": str,
                "command": [str],
                "args": [str],
                "env": [ENV],
            },
        }
    },
    ("kubeflow.org/v1", "PyTorchJob"): {
        "spec!": {"nprocPerNode": str, "runPolicy": RUN_POLICY, "pytorchReplicaSpecs!": {"Master": REPLICA, "Worker": REPLICA}}
    },
    ("kubeflow.org/v1", "TFJob"): {
        "spec!": {
            "enableDynamicWorker": bool,
            "runPolicy": RUN_POLICY,
            "tfReplicaSpecs!": {"Chief": REPLICA, "PS": REPLICA, "Worker": REPLICA, "Evaluator": REPLICA},
        }
    },
}


def check(value, shape, path):
    """Raises an AssertionError that names the field where a value does not have its shape."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), f"{path} should be an object, found {value!r}"
        known = {name.rstrip("!"): inner for name, inner in shape.items()}
        for name, inner in value.items():
            assert name in known or "*" in known, f"{path}.{name} is no field of it"
            check(inner, known.get(name, known.get("*")), f"{path}.{name}")
        for name in shape:
            assert not name.endswith("!") or name[:-1] in value, f"{path}.{name[:-1]} is missing"
    elif isinstance(shape, list):
        assert isinstance(value, list), f"{path} should be a list, found {value!r}"
        for i, item in enumerate(value):
            check(item, shape[0], f"{path}[{i}]")
    elif isinstance(shape, tuple) and isinstance(shape[0], str):
        assert value in shape, f"{path} should be one of {shape}, found {value!r}"
    else:
        # In Python, truth values are numbers.
        is_bool = isinstance(value, bool) and shape is not bool
        assert isinstance(value, shape) and not is_bool, f"{path} should be {shape}, found {value!r}"


def check_manifest(manifest):
    kind = (manifest.get("apiVersion"), manifest.get("kind"))
    assert kind in KINDS, f"{kind} is none of {sorted(KINDS)}"
    check(manifest, {"apiVersion!": str, "kind!": str, "metadata!": META, **KINDS[kind]}, kind[1])
