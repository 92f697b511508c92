"""A client process: does one case after the other, as the runner says on standard input, and answers on standard output.

A line of the runner is {"list": MODULE} or {"run": CASE, "module": MODULE, "folder": F, "ranks": N}; the answer is one line.
"""

import argparse
import importlib
import json
import os
import sys
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)


def shorter(message):
    """An error's text without the stack traces that TensorFlow weaves into it."""
    lines = message.partition("Original stack trace for")[0].splitlines()
    return "\n".join(l for l in lines if l.strip() and not l.strip().startswith(("File ", "Detected at", "Graph execution")))[:800]


def run_case(tf, harness, o, order):
    function, _, ranks, graph = harness.CASES[order["module"]][order["run"]]
    context = harness.Context(
        o.cluster, o.rank, ranks, order["folder"], os.path.join(HERE, "..", "..", "data"), o.servers, o.masters)
    tf.reset_default_graph()
    if not graph:
        return function(context)
    g = tf.Graph()
    with g.as_default(), g.container(f"{order['module']}.{order['run']}".replace("_", "-")):
        return function(context)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--cluster", type=json.loads, required=True)
    parser.add_argument("--servers", required=True)
    parser.add_argument("--masters", type=json.loads, required=True)
    o = parser.parse_args()
    # What programs print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    import harness

    def answer(**fields):
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    answer(ready=tf.__version__)
    for line in sys.stdin:
        order = json.loads(line)
        if "list" in order:
            importlib.import_module(f"programs.{order['list']}")
            answer(cases=[[n, c[1], c[2]] for n, c in harness.CASES[order["list"]].items()])
            continue
        importlib.import_module(f"programs.{order['module']}")
        print(f"== {order['module']}/{order['run']}", file=sys.stderr, flush=True)
        try:
            run_case(tf, harness, o, order)
            answer(ok=True)
        except harness.Failed as e:
            where = traceback.extract_tb(e.__traceback__)
            line = next((f for f in reversed(where) if f.filename.startswith(os.path.join(HERE, "programs"))), where[-1])
            answer(ok=False, reason=f"{e} ({os.path.basename(line.filename)}:{line.lineno})")
        except BaseException as e:
            traceback.print_exc()
            where = traceback.extract_tb(e.__traceback__)
            line = next((f for f in reversed(where) if f.filename.startswith(os.path.join(HERE, "programs"))), where[-1])
            answer(ok=False, reason=f"{type(e).__name__}: {shorter(str(e))} ({os.path.basename(line.filename)}:{line.lineno})")


if __name__ == "__main__":
    main()
