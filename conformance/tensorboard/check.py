"""Reads an event directory with TensorBoard's loaders and compares it with what the program printed.

Usage: check.py DIR PRINTED. Prints a line per check that fails and 'N passed, N failed'; exits 1 if any failed.
"""

import io
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing import event_accumulator, event_file_loader
from tensorboard.compat.proto import config_pb2, graph_pb2

STEPS = 20
passed, failed = 0, 0


def check(what, found, expected):
    global passed, failed
    if found == expected:
        passed += 1
    else:
        failed += 1
        print(f"FAILED {what}: found {found!r}, expected {expected!r}")


def read_printed(path):
    """The losses and weights of each step, as float32."""
    losses, weights = [], []
    with open(path) as lines:
        for line in lines:
            words = line.split()
            assert words[0] == "step" and words[2] == "loss" and words[4] == "weights", line
            losses.append(float(np.float32(words[3])))
            weights.append(np.array(words[5:], np.float32))
    return losses, weights


def histogram(values):
    """TensorFlow's histogram, from its definition: limits 1e-12 * 1.1^k on both sides, runs of empty buckets as one."""
    above, limit = [], 1e-12
    while limit < 1e20:
        above.append(limit)
        limit *= 1.1
    above.append(sys.float_info.max)
    limits = [-limit for limit in reversed(above)] + [0.0] + above
    counts = [0.0] * len(limits)
    for value in values:
        counts[int(np.searchsorted(limits, float(value), side="right"))] += 1.0
    kept = [i for i in range(len(counts)) if not (counts[i] == 0 and i + 1 < len(counts) and counts[i + 1] == 0)]
    return [limits[i] for i in kept], [counts[i] for i in kept]


def main(directory, printed):
    losses, weights = read_printed(printed)
    check("steps printed", len(losses), STEPS)
    check("the training learns", losses[-1] < losses[0] / 100, True)

    files = [name for name in os.listdir(directory) if "tfevents" in name]
    check("event files", len(files), 1)
    check("the file's name", files[0].startswith("events.out.tfevents."), True)

    # One event after the other, checksums checked.
    path = os.path.join(directory, files[0])
    events = list(event_file_loader.LegacyEventFileLoader(path).Load())
    check("the first event", events[0].file_version, "brain.Event:2")
    times = [event.wall_time for event in events]
    check("events are in order", times, sorted(times))
    kinds = [event.WhichOneof("what") for event in events]
    check("kinds of event", sorted(set(kinds)), ["file_version", "graph_def", "session_log", "summary", "tagged_run_metadata"])
    log = next(event.session_log for event in events if event.WhichOneof("what") == "session_log")
    check("the session log", log.status, log.START)

    # The values, one by one.
    raw = [event for event in events if event.WhichOneof("what") == "summary"]
    tags = {value.tag for event in raw for value in event.summary.value}
    check("tags", sorted(tags), ["about", "progress", "shades/image/0", "train/gradient", "train/loss", "train/weights"])

    values = {}
    for event in raw:
        for value in event.summary.value:
            values.setdefault(value.tag, []).append((event.step, value))
    for tag in sorted(tags):
        check(f"steps of {tag}", [step for step, _ in values[tag]], list(range(STEPS)))
    for step, value in values["train/loss"]:
        check(f"loss of step {step}", value.simple_value, losses[step])
    for step, value in values["progress"]:
        check(f"progress of step {step}", value.simple_value, float(np.float32((step + 1) / STEPS)))
    for step, value in values["train/weights"]:
        histo, numbers = value.histo, weights[step].astype(np.float64)
        limits, counts = histogram(numbers)
        check(f"limits of step {step}", list(histo.bucket_limit), limits)
        check(f"counts of step {step}", list(histo.bucket), counts)
        check(f"extremes of step {step}", (histo.min, histo.max), (numbers.min(), numbers.max()))
        total, squares = 0.0, 0.0
        for number in numbers:
            total, squares = total + number, squares + number * number
        check(f"sums of step {step}", (histo.num, histo.sum, histo.sum_squares), (3.0, total, squares))
    shades = [int(np.float32(i / 11) * np.float32(255)) for i in range(12)]
    for step, value in values["shades/image/0"]:
        picture = Image.open(io.BytesIO(value.image.encoded_image_string))
        check(f"size of step {step}", (value.image.width, value.image.height, value.image.colorspace), (4, 3, 1))
        check(f"size of the PNG of step {step}", (picture.width, picture.height, picture.mode), (4, 3, "L"))
        check(f"pixels of step {step}", list(picture.tobytes()), shades)
    for step, value in values["about"]:
        check(f"text of step {step}", list(value.tensor.string_val), [b"a line through **four** points"])
        check(f"plugin of step {step}", value.metadata.plugin_data.plugin_name, "text")

    # The same through the accumulator, which is what TensorBoard's plots are drawn from.
    everything = {kind: 0 for kind in event_accumulator.DEFAULT_SIZE_GUIDANCE}
    found = event_accumulator.EventAccumulator(path, size_guidance=everything).Reload()
    names = found.Tags()
    check("scalars", sorted(names["scalars"]), ["progress", "train/loss"])
    check("histograms", sorted(names["histograms"]), ["train/gradient", "train/weights"])
    check("images", names["images"], ["shades/image/0"])
    check("tensors", names["tensors"], ["about"])
    check("the curve", [(event.step, event.value) for event in found.Scalars("train/loss")], list(enumerate(losses)))
    for event in found.Histograms("train/weights"):
        value = event.histogram_value
        expected = histogram(weights[event.step])
        check(f"accumulated histogram of step {event.step}", (value.bucket_limit, value.bucket), expected)
    images = [(event.step, event.width, event.height) for event in found.Images("shades/image/0")]
    check("accumulated images", images, [(step, 4, 3) for step in range(STEPS)])

    # The graph and the trace.
    graph = graph_pb2.GraphDef.FromString(next(event.graph_def for event in events if event.WhichOneof("what") == "graph_def"))
    ops = {node.name: node.op for node in graph.node}
    check("the graph through the accumulator", found.Graph(), graph)
    expected = {
        "train/loss": "ScalarSummary",
        "train/weights": "HistogramSummary",
        "shades": "ImageSummary",
        "about": "TensorSummaryV2",
        "Merge/MergeSummary": "MergeSummary",
    }
    for name, op in expected.items():
        check(f"node {name}", ops.get(name), op)
    merge = next(node for node in graph.node if node.op == "MergeSummary")
    check("inputs of the merge", list(merge.input), ["train/loss", "train/weights", "train/gradient", "shades", "about"])
    check("run metadata", found.Tags()["run_metadata"], ["last step"])
    metadata = found.RunMetadata("last step")
    check("run metadata is one", isinstance(metadata, config_pb2.RunMetadata), True)
    devices = [device.device for device in metadata.step_stats.dev_stats]
    check("devices of the trace", devices, ["/job:localhost/replica:0/task:0/device:CPU:0"])
    traced = {node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats}
    check("nodes of the trace are the graph's", traced <= set(ops) and len(traced) > 2, True)

    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
