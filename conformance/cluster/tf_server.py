"""A TensorFlow server process with the flags and the ready line of `kolo serve`.

usage: tf_server.py --cluster 'ps=HOST:PORT;worker=HOST:PORT,HOST:PORT' --job JOB --task N [--device-count CPU=N]
       [--inter-op-threads N] [--intra-op-threads N] [--operation-timeout SECONDS] [--same-user] [--allow-dir DIR] [--plain]
"""

import argparse
import json
import os
import signal
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow.compat.v1 as tf


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--task", type=int, required=True)
    parser.add_argument("--device-count", default="CPU=1")
    parser.add_argument("--inter-op-threads", type=int, default=0)
    parser.add_argument("--intra-op-threads", type=int, default=0)
    parser.add_argument("--operation-timeout", type=float, default=0.0)
    parser.add_argument("--same-user", action="store_true", help="as everybody may")
    parser.add_argument("--allow-dir", action="append", help="as everywhere")
    parser.add_argument("--plain", action="store_true", help="no graph rewriting: Kolo tasks get what was described")
    o = parser.parse_args()
    # TensorFlow's server has no orderly end.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if o.cluster.startswith("{"):
        cluster = json.loads(o.cluster)
    else:
        cluster = {job: hosts.split(",") for job, _, hosts in (part.partition("=") for part in o.cluster.split(";"))}
    devices = {kind: int(count) for kind, _, count in (part.partition("=") for part in o.device_count.split(","))}
    config = tf.ConfigProto(device_count=devices, inter_op_parallelism_threads=o.inter_op_threads,
                            intra_op_parallelism_threads=o.intra_op_threads, operation_timeout_in_ms=round(o.operation_timeout * 1000))
    # Where TensorFlow's tasks agree on groups of collectives.
    config.experimental.collective_group_leader = f"/job:{'worker' if 'worker' in cluster else o.job}/replica:0/task:0"
    if o.plain:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    if "worker" in cluster:
        # Without a leader, collectives stay within a task.
        config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    server = tf.train.Server(cluster, job_name=o.job, task_index=o.task, config=config)
    print(f"serving {server.target} as /job:{o.job}/task:{o.task}", flush=True)
    # In short sleeps: a signal that comes just before a long one would be handled only after it.
    while True:
        time.sleep(0.5)


if __name__ == "__main__":
    main()
