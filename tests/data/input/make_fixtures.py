"""Writes the files in this folder with NumPy and TensorFlow, the programs whose files Kolo reads.

Run: python make_fixtures.py (NumPy 2, TensorFlow 2). The tests in tests/data_files.rs state what is in them.
"""

import pathlib

import numpy as np
import tensorflow as tf

here = pathlib.Path(__file__).parent

# NumPy arrays: every dtype both sides know, both byte orders, both orders of elements, the odd shapes.
arrays = {
    "f16": np.array([1.5, -2.0], np.float16),
    "f32": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32),
    "f64": np.array([np.pi, -0.0], np.float64),
    "f32_big": np.array([1.0, -2.5], ">f4"),
    "f32_fortran": np.asfortranarray(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)),
    "i8": np.array([-128, 127], np.int8),
    "i16": np.array([-32768, 32767], np.int16),
    "i32": np.array([-5, 7], np.int32),
    "i64": np.array([-(2**62), 2**62], np.int64),
    "i64_big": np.array([1, -2], ">i8"),
    "u8": np.array([0, 255], np.uint8),
    "u16": np.array([0, 65535], np.uint16),
    "u32": np.array([0, 2**32 - 1], np.uint32),
    "u64": np.array([0, 2**64 - 1], np.uint64),
    "bool": np.array([True, False, True]),
    "scalar": np.array(42, np.int32),
    "empty": np.zeros((0, 3), np.float32),
    "cube_fortran": np.asfortranarray(np.arange(24, dtype=np.int32).reshape(2, 3, 4)),
    "bytes": np.array([b"ab", b"c"], "S2"),
}
np.save(here / "f32_fortran.npy", arrays["f32_fortran"])
np.savez(here / "arrays.npz", **arrays)
np.savez_compressed(here / "arrays_compressed.npz", **arrays)

# Records of tf.train.Example.
def example(i):
    features = {
        "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"sample %d" % i])),
        "pixels": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5 * i, 1.0, -1.0, 2.0])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i - 1])),
    }
    if i == 1:
        features["extra"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[1, 2, 3]))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()

with tf.io.TFRecordWriter(str(here / "examples.tfrecord")) as writer:
    for i in range(3):
        writer.write(example(i))
with tf.io.TFRecordWriter(str(here / "examples.tfrecord.gz"), "GZIP") as writer:
    for i in range(3):
        writer.write(example(i))
