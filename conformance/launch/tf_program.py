"""A TensorFlow program as its users write it: MultiWorkerMirroredStrategy, which reads TF_CONFIG."""

import json
import os

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
task = json.loads(os.environ["TF_CONFIG"])["task"]
n = strategy.num_replicas_in_sync


@tf.function
def step():
    own = lambda: tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
    return strategy.reduce("SUM", strategy.run(own), axis=None)


total = float(step())
assert total == n * (n - 1) / 2, total
print(f"tf {task['type']} {task['index']} of {n}: summed", flush=True)
