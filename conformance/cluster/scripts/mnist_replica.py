"""Distributed MNIST with a Supervisor: the same program for every task, started by hand on each machine.

usage: mnist_replica.py --ps_hosts H:P --worker_hosts H:P,H:P --job_name ps|worker --task_index N --data DIR --log DIR [--sync]
"""

import argparse
import gzip
import os

import numpy as np
import tensorflow.compat.v1 as tf

parser = argparse.ArgumentParser()
parser.add_argument("--ps_hosts", required=True)
parser.add_argument("--worker_hosts", required=True)
parser.add_argument("--job_name", required=True)
parser.add_argument("--task_index", type=int, required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--log", required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--sync", action="store_true")
FLAGS = parser.parse_args()


def read_data():
    with gzip.open(os.path.join(FLAGS.data, "mnist", "train-images-idx3-ubyte.gz")) as f:
        images = np.frombuffer(f.read(16 + 5000 * 784), np.uint8, offset=16).reshape(-1, 784).astype(np.float32) / 255
    with gzip.open(os.path.join(FLAGS.data, "mnist", "train-labels-idx1-ubyte.gz")) as f:
        labels = np.frombuffer(f.read(8 + 5000), np.uint8, offset=8).astype(np.int64)
    return images, labels


def main():
    tf.disable_v2_behavior()
    cluster = tf.train.ClusterSpec({"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")})
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()
        return
    is_chief = FLAGS.task_index == 0
    workers = len(FLAGS.worker_hosts.split(","))

    with tf.device(tf.train.replica_device_setter(worker_device="/job:worker/task:%d" % FLAGS.task_index, cluster=cluster)):
        global_step = tf.Variable(0, name="global_step", trainable=False)
        x, y = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.int64, [None])
        hid_w = tf.Variable(tf.truncated_normal([784, 100], stddev=1.0 / 28), name="hid_w")
        hid_b = tf.Variable(tf.zeros([100]), name="hid_b")
        sm_w = tf.Variable(tf.truncated_normal([100, 10], stddev=0.1), name="sm_w")
        sm_b = tf.Variable(tf.zeros([10]), name="sm_b")
        hidden = tf.nn.relu(tf.nn.xw_plus_b(x, hid_w, hid_b))
        logits = tf.nn.xw_plus_b(hidden, sm_w, sm_b)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))
        opt = tf.train.AdamOptimizer(0.005)
        if FLAGS.sync:
            opt = tf.train.SyncReplicasOptimizer(opt, replicas_to_aggregate=workers, total_num_replicas=workers, name="mnist_sync_replicas")
        train_step = opt.minimize(loss, global_step=global_step)
        tf.summary.scalar("cross_entropy", loss)
        summary_op = tf.summary.merge_all()
        saver = tf.train.Saver()
        init_op = tf.global_variables_initializer()
    # Here each worker says that it has ended.
    with tf.device("/job:ps/task:0"):
        done = tf.FIFOQueue(workers, tf.int32, shapes=[[]], shared_name="done")
        enqueue, dequeue = done.enqueue([FLAGS.task_index]), done.dequeue()

    options = {}
    if FLAGS.sync:
        options = {"local_init_op": opt.chief_init_op if is_chief else opt.local_step_init_op, "ready_for_local_init_op": opt.ready_for_local_init_op}
        chief_queue_runner, sync_init_op = opt.get_chief_queue_runner(), opt.get_init_tokens_op()
    sv = tf.train.Supervisor(is_chief=is_chief, logdir=FLAGS.log, init_op=init_op, summary_op=None, saver=saver, recovery_wait_secs=1,
                             global_step=global_step, stop_grace_secs=2, **options)
    config = tf.ConfigProto(allow_soft_placement=True, device_filters=["/job:ps", "/job:worker/task:%d" % FLAGS.task_index])
    sess = sv.prepare_or_wait_for_session(server.target, config=config)
    print("Worker %d: Session initialization complete." % FLAGS.task_index, flush=True)
    if FLAGS.sync and is_chief:
        sess.run(sync_init_op)
        sv.start_queue_runners(sess, [chief_queue_runner])

    images, labels = read_data()
    rng = np.random.default_rng(FLAGS.task_index)
    local_step = step = 0
    while step < FLAGS.steps:
        rows = rng.integers(0, len(images), 100)
        _, step = sess.run([train_step, global_step], feed_dict={x: images[rows], y: labels[rows]})
        local_step += 1
        if is_chief and local_step % 25 == 0:
            sv.summary_computed(sess, sess.run(summary_op, feed_dict={x: images[rows], y: labels[rows]}))
    print("Worker %d: %d local steps, global step %d, accuracy %.4f" % (
        FLAGS.task_index, local_step, step, sess.run(accuracy, feed_dict={x: images, y: labels})), flush=True)

    # The chief stays until all have ended: its thread makes the tokens of the others, and its server may be asked.
    sess.run(enqueue)
    if is_chief:
        for _ in range(workers):
            sess.run(dequeue)
        saver.save(sess, os.path.join(FLAGS.log, "model.ckpt"), global_step=global_step)
    sv.stop(ignore_live_threads=True)
    print("Worker %d: done" % FLAGS.task_index, flush=True)


if __name__ == "__main__":
    main()
