"""Run traces: RunOptions, RunMetadata, timelines, and the graphs that a step was cut into."""

import json

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.client import timeline

from harness import case, check


def small_model(context):
    x = tf.placeholder(tf.float32, [4, 3], name="x")
    with tf.device("/job:ps/task:0"):
        w = tf.get_variable("w", initializer=np.ones((3, 2), np.float32))
    with tf.device("/job:worker/task:1"):
        y = tf.matmul(x, w, name="product")
    return x, y


def full_trace(context, **options):
    x, y = small_model(context)
    metadata = tf.RunMetadata()
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        s.run(y, {x: np.ones((4, 3), np.float32)},
              options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, **options), run_metadata=metadata)
        s.run(y, {x: np.ones((4, 3), np.float32)})
    return metadata


@case("full-trace")
def traced(context):
    metadata = full_trace(context)
    where = [(n.node_name, d.device) for d in metadata.step_stats.dev_stats for n in d.node_stats]
    # Sends and receives are named after what they carry, so the name alone counts.
    products = [d for n, d in where if n == "product"]
    check(products and all("/job:worker/replica:0/task:1/" in d for d in products), "product ran on", products, "of", sorted(where)[:40])
    devices = {d.device.split("/device:")[0] for d in metadata.step_stats.dev_stats}
    check("/job:ps/replica:0/task:0" in devices, devices)


@case("trace-times")
def times(context):
    metadata = full_trace(context)
    nodes = [n for d in metadata.step_stats.dev_stats for n in d.node_stats]
    check(nodes, "no node has a time")
    for n in nodes:
        check(n.all_start_micros > 1e15, n.node_name, "started at", n.all_start_micros)
        check(0 <= n.all_end_rel_micros < 60e6, n.node_name, "took", n.all_end_rel_micros)


@case("timeline")
def chrome(context):
    metadata = full_trace(context)
    trace = json.loads(timeline.Timeline(metadata.step_stats).generate_chrome_trace_format())
    check(any(e.get("ph") == "X" for e in trace["traceEvents"]), "the timeline has no op")


@case("partition-graphs")
def partition_graphs(context):
    metadata = full_trace(context, output_partition_graphs=True)
    check(len(metadata.partition_graphs) >= 2, "there are", len(metadata.partition_graphs), "parts")
    ops = {n.op for g in metadata.partition_graphs for n in g.node}
    check("_Send" in ops and "_Recv" in ops, "no sends and receives among", sorted(ops))


@case("no-trace")
def no_trace(context):
    x, y = small_model(context)
    metadata = tf.RunMetadata()
    with context.session() as s:
        s.run(tf.global_variables_initializer())
        s.run(y, {x: np.ones((4, 3), np.float32)}, options=tf.RunOptions(), run_metadata=metadata)
    check(not metadata.step_stats.dev_stats, "a trace that nobody asked for")


@case("metadata-in-event-file")
def event_file(context):
    metadata = full_trace(context)
    writer = tf.summary.FileWriter(context.path("events"), tf.get_default_graph())
    writer.add_run_metadata(metadata, "step1", 1)
    writer.close()
    events = list(tf.train.summary_iterator(_only(context.path("events"))))
    tagged = [e.tagged_run_metadata for e in events if e.HasField("tagged_run_metadata")]
    check(len(tagged) == 1 and tagged[0].tag == "step1", "the trace is not in the file")
    again = tf.RunMetadata.FromString(tagged[0].run_metadata)
    check(again.step_stats.dev_stats, "the trace in the file is empty")


def _only(folder):
    names = tf.gfile.ListDirectory(folder)
    check(len(names) == 1, names)
    return f"{folder}/{names[0]}"


@case("timeline-of-a-loop")
def loop(context):
    with tf.device("/job:ps/task:0"):
        one = tf.constant(1.0)
    with tf.device("/job:worker/task:1"):
        end = tf.while_loop(lambda i: i < 5.0, lambda i: i + one, [tf.constant(0.0)])
    metadata = tf.RunMetadata()
    with context.session() as s:
        got = s.run(end, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    check(got == 5.0 and metadata.step_stats.dev_stats, got)
