"""A regression trained by a MonitoredTrainingSession; the cluster and the role come from TF_CONFIG.

usage: TF_CONFIG={"cluster": ..., "task": ...} monitored.py LOG_FOLDER
"""

import json
import os
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
config = json.loads(os.environ["TF_CONFIG"])
cluster, job, index = tf.train.ClusterSpec(config["cluster"]), config["task"]["type"], config["task"]["index"]
server_def = tf.train.ServerDef(cluster=cluster.as_cluster_def(), job_name=job, task_index=index, protocol="grpc")
server = tf.train.Server(server_def)
if job == "ps":
    server.join()
    sys.exit(0)

is_chief = index == 0
with tf.device(tf.train.replica_device_setter(worker_device="/job:worker/task:%d" % index, cluster=cluster)):
    global_step = tf.train.get_or_create_global_step()
    x, y = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None])
    w = tf.get_variable("w", [3, 1], initializer=tf.zeros_initializer())
    b = tf.get_variable("b", [], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(tf.square(tf.squeeze(tf.matmul(x, w), 1) + b - y))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step)
    tf.summary.scalar("loss", loss)

# A worker that comes before its chief is initialised sleeps for 30 seconds between looks.
if not is_chief:
    while not os.path.exists(os.path.join(sys.argv[1], "checkpoint")):
        time.sleep(0.05)

rng = np.random.default_rng(index)
hooks = [tf.train.StopAtStepHook(last_step=150)]
session_config = tf.ConfigProto(device_filters=["/job:ps", "/job:worker/task:%d" % index])
with tf.train.MonitoredTrainingSession(master=server.target, is_chief=is_chief, checkpoint_dir=sys.argv[1], hooks=hooks, config=session_config,
                                       save_checkpoint_steps=50, save_summaries_steps=20) as session:
    steps = 0
    while not session.should_stop():
        a = rng.standard_normal((50, 3)).astype(np.float32)
        _, error = session.run([train, loss], {x: a, y: a @ np.array([1.0, -2.0, 3.0], np.float32) + 0.5})
        steps += 1
        time.sleep(0.002)
print("worker %d: %d steps, loss %.6f" % (index, steps, error), flush=True)
