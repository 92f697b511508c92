"""Cases of crates/kolo-ops/src/io and summary, but for what needs files (conformance/checkpoints) and readers
(conformance/tensorboard)."""

import numpy as np

from harness import Nodes, array, registered_dtypes, values

NAN, INF = float("nan"), float("inf")
W = lambda *words: np.array([w.encode() if isinstance(w, str) else w for w in words], object)
S = lambda word: np.array(word.encode(), object)


def strings(a):
    a.op("StringJoin", [W("a", "b"), W("x", "y")], label="pairs")
    a.op("StringJoin", [W("a", "b"), S("-"), W("x", "y")], label="scalar", separator=", ")
    a.op("StringJoin", [S("a")], label="one")
    a.op("StringJoin", [W("a", "b"), W("x")], label="mismatch", error=True)
    a.op("StringJoin", [values("string", [2, 2]), values("string", [2, 2], seed=1)], label="matrix", separator="\x00")
    for label, pattern in (("word", "[a-z]+"), ("any", ".*"), ("class", r"\d{2}x?"), ("either", "(ab|c)d*"), ("none", "")):
        a.op("StaticRegexFullMatch", W("abc", "12x", "cddd", "", "ABC"), label=label, pattern=pattern)
    a.op("StaticRegexFullMatch", S("x"), label="bad", pattern="(", error=True)
    a.op("ShardedFilename", S("model"), array(3), array(12))
    a.op("ShardedFilespec", S("model"), array(12))


def summaries(a):
    for d in ("float32", "float64", "int32", "int64"):
        if d in registered_dtypes("ScalarSummary", "T"):
            a.op("ScalarSummary", S("loss"), values(d, []), dtype=d)
    a.op("ScalarSummary", W("a", "b"), array([1.0, 2.0]), label="two")
    a.op("ScalarSummary", W("a", "b"), array([1.0]), label="mismatch", error=True)
    a.op("HistogramSummary", S("h"), array([1.0, 2.0, 2.0, -3.5, 0.0]))
    a.op("HistogramSummary", S("h"), np.zeros([0], np.float32), label="empty")
    a.op("HistogramSummary", S("h"), array([1.0, NAN]), label="nan", error=True)
    a.op("HistogramSummary", S("h"), array([1.0, INF]), label="infinite", error=True)
    one = a.compute("ScalarSummary", S("a"), array(1.0))[0]
    two = a.compute("ScalarSummary", S("b"), array(2.0))[0]
    a.op("MergeSummary", [np.array(one, object), np.array(two, object)], label="two")
    a.op("MergeSummary", [np.array(one, object), np.array(one, object)], label="same-tag", error=True)


def cases(a):
    strings(a)
    summaries(a)
