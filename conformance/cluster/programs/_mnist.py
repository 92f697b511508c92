"""The model and the data that the training programs share."""

import gzip
import os

import numpy as np
import tensorflow.compat.v1 as tf


def load(folder, count=6000):
    """The first images of MNIST as rows of floats from 0 to 1, and their classes."""
    with gzip.open(os.path.join(folder, "mnist", "train-images-idx3-ubyte.gz")) as f:
        images = np.frombuffer(f.read(16 + count * 784), np.uint8, offset=16).reshape(count, 784)
    with gzip.open(os.path.join(folder, "mnist", "train-labels-idx1-ubyte.gz")) as f:
        labels = np.frombuffer(f.read(8 + count), np.uint8, offset=8).astype(np.int64)
    return images.astype(np.float32) / np.float32(255), labels


class Mlp:
    """784-100-10, as the distributed MNIST tutorials had it."""

    def __init__(self, hidden=100, seed=1):
        self.x = tf.placeholder(tf.float32, [None, 784], name="x")
        self.y = tf.placeholder(tf.int64, [None], name="y")
        w1 = tf.get_variable("hid_w", [784, hidden], initializer=tf.truncated_normal_initializer(stddev=1 / 28.0, seed=seed))
        b1 = tf.get_variable("hid_b", [hidden], initializer=tf.zeros_initializer())
        w2 = tf.get_variable("sm_w", [hidden, 10], initializer=tf.truncated_normal_initializer(stddev=hidden**-0.5, seed=seed + 1))
        b2 = tf.get_variable("sm_b", [10], initializer=tf.zeros_initializer())
        logits = tf.nn.xw_plus_b(tf.nn.relu(tf.nn.xw_plus_b(self.x, w1, b1)), w2, b2)
        self.loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self.y, logits=logits), name="loss")
        self.accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), self.y), tf.float32), name="accuracy")


def batches(images, labels, size, seed):
    rng = np.random.default_rng(seed)
    while True:
        rows = rng.integers(0, len(images), size)
        yield images[rows], labels[rows]
