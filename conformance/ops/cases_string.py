"""Cases of crates/kolo-ops/src/string, and of what reads and writes formats of bytes: CSV, PNG, Example, summaries."""

import numpy as np
import tensorflow as tf

from harness import FLOATS, INTS, array, registered_dtypes, values

NAN, INF = float("nan"), float("inf")
W = lambda *words: np.array([w.encode() if isinstance(w, str) else w for w in words] + [None], object)[:-1]
S = lambda word: np.array(word.encode() if isinstance(word, str) else word, object)
F = lambda *shape, seed=0: values("float32", list(shape), seed=seed)


def texts(a):
    words = W("", "a", "Kolo", "two words", " padded\t\n", "naïve", "日本語", b"\xff\xfe")
    for op in ("StringLength", "StringLower", "StringUpper", "StringStrip"):
        a.op(op, words, label="words")
        a.op(op, S("Abc"), label="scalar")
        a.op(op, W(), label="empty")
    utf8 = W("", "naïve", "日本語", "ÀÉ ß")
    for op in ("StringLength",):
        a.op(op, utf8, label="utf8", unit="UTF8_CHAR")
    for op in ("StringLower", "StringUpper"):
        a.op(op, W("naïve", "ÀÉ"), label="utf8", encoding="utf-8")
    for n in (1, 7, 1000003):
        a.op("StringToHashBucketFast", words, label=f"{n}", num_buckets=n)
    a.op("StringToHashBucketFast", W("x" * 17, "y" * 33, "z" * 65, "w" * 200), label="long", num_buckets=1 << 40)
    for d in ("float32", "float64", "int32", "int64"):
        numbers = W("0", "-7", "12") if d.startswith("i") else W("0", "-1.5", "1e3", "inf", "nan", "+2.25", "1e-40")
        a.op("StringToNumber", numbers, dtype=d, out_type=d)
        a.op("StringToNumber", S("x"), label=f"bad-{d}", out_type=d, error=True)
    a.op("StringToNumber", S("99999999999"), label="range", out_type="int32", error=True)
    for t in ("int32", "int64"):
        a.op("Substr", W("abcdef", "ghijkl"), array(1, t), array(3, t), label=t)
        a.op("Substr", W("abcdef", "ghijkl"), array([1, -2], t), array([3, 9], t), label=f"each-{t}")
    a.op("Substr", W("ab", "c"), array(2), array(1), label="range", error=True)
    a.op("Substr", W("ab", "abc"), array([0, 1, 2]), array([1, 1, 1]), label="shapes", error=True)
    a.op("Substr", W("naïve", "日本語"), array(1), array(2), label="utf8", unit="UTF8_CHAR")
    for d in ["float32", "float64", *INTS, "bool"]:
        if d in registered_dtypes("AsString", "T"):
            a.op("AsString", values(d, [2, 3]), dtype=d)
    a.op("AsString", array([1.5, -2.25, NAN, INF, -INF, 0.0, 1e20, 1e-7]), label="special")
    for label, kw in (("precision", {"precision": 2}), ("scientific", {"scientific": True}), ("shortest", {"shortest": True}),
                      ("width", {"width": 9, "precision": 1}), ("fill", {"width": 9, "fill": "0"}), ("left", {"width": 9, "fill": "-"})):
        a.op("AsString", array([1.5, -2.25, 1e10]), label=label, **kw)
    a.op("AsString", array([7, -7]), label="wide-int", width=5, fill="0")
    a.op("AsString", array([7]), label="bad-fill", width=5, fill="ab", error=True)
    a.op("AsString", array([7]), label="int-precision", precision=2, error=True)


def parts(a):
    for label, text, delimiter in (("spaces", W("a b  c", "", "d"), " "), ("any", W("a,b;c", ";"), ",;"), ("letters", W("abc", ""), "")):
        a.op("StringSplit", text, S(delimiter), label=label)
        a.op("StringSplit", text, S(delimiter), label=label + "-keep", skip_empty=False)
    a.op("StringSplit", S("a b"), S(" "), label="scalar", error=True)
    for label, text, sep, most in (("words", W(" a  b ", "c"), "", -1), ("comma", W("a,,b", ""), ",", -1), ("long", W("a<>b<>c"), "<>", -1),
                                   ("most", W("a b c", "d"), "", 1), ("comma-most", W("a,b,c"), ",", 1)):
        a.op("StringSplitV2", text, S(sep), label=label, maxsplit=most)
    a.op("StringSplitV2", S("a b"), S(""), label="scalar", error=True)
    grid = np.array([[b"a", b"b", b"c"], [b"d", b"e", b"f"]], object)
    for label, axes in (("rows", [1]), ("columns", [0]), ("both", [0, 1]), ("turned", [1, 0]), ("none", []), ("negative", [-1])):
        a.op("ReduceJoin", grid, array(axes, "int32"), label=label)
        a.op("ReduceJoin", grid, array(axes, "int32"), label=label + "-keep", keep_dims=True, separator=", ")
    a.op("ReduceJoin", grid, array([2]), label="range", error=True)
    text = W("abc 123", "", "ABC", "aXbXc")
    for label, pattern in (("word", "[a-z]+"), ("any", ".*"), ("x", "a.*c"), ("digits", r"\w+ \d+")):
        a.op("RegexFullMatch", text, S(pattern), label=label)
    a.op("RegexFullMatch", text, S("("), label="bad", error=True)
    for label, pattern, rewrite in (("letter", "[a-c]", "_"), ("group", r"(\w)(\w)", r"\2\1"), ("empty", "", "-"), ("none", "q", "_")):
        for first in (True, False):
            a.op("RegexReplace", text, S(pattern), S(rewrite), label=f"{label}-{'all' if first else 'one'}", replace_global=first)
            a.op("StaticRegexReplace", text, label=f"{label}-{'all' if first else 'one'}", pattern=pattern, rewrite=rewrite,
                 replace_global=first)
    a.op("RegexReplace", text, S("("), S("_"), label="bad", error=True)


def formats(a):
    raw = np.arange(8, dtype=np.uint8).tobytes()
    for d in ("uint8", "int8", "int16", "uint16", "int32", "int64", "float32", "float64", "float16"):
        a.op("DecodeRaw", W(raw, raw[::-1]), dtype=d, out_type=d)
    a.op("DecodeRaw", W(raw), label="big", out_type="int32", little_endian=False)
    a.op("DecodeRaw", W(raw, raw[:4]), label="lengths", out_type="int32", error=True)
    a.op("DecodeRaw", W(raw[:6]), label="part", out_type="int32", error=True)
    a.op("DecodeRaw", W(), label="empty", out_type="int32")
    lines = W('1,2.5,"a ""b"" c"', "3,,d", "-4, 7 ,")
    defaults = [array([0]), array([9.5]), W("none")]
    a.op("DecodeCSV", lines, defaults, label="lines", OUT_TYPE=["int32", "float32", "string"])
    a.op("DecodeCSV", W("1;x;2"), [array([0]), array([1])], label="chosen", OUT_TYPE=["int32", "int32"], field_delim=";", select_cols=[0, 2])
    a.op("DecodeCSV", W("1,NA"), [array([0]), array([5])], label="na", OUT_TYPE=["int32", "int32"], na_value="NA")
    a.op("DecodeCSV", W("1"), [array([0]), array([5])], label="few", OUT_TYPE=["int32", "int32"], error=True)
    a.op("DecodeCSV", W("1,x"), [array([0]), array([5])], label="number", OUT_TYPE=["int32", "int32"], error=True)
    a.op("DecodeCSV", W("1,"), [array([0]), array([], "int32")], label="required", OUT_TYPE=["int32", "int32"], error=True)
    for d in ("uint8", "uint16"):
        for channels in (1, 2, 3, 4):
            image = values(d, [3, 5, channels], 0, 200)
            png = np.array(a.compute("EncodePng", image)[0], object)
            for wanted in (0, 1, 3, 4):
                if d == "uint8" and (wanted in (0, channels) or channels in (3, 4)) and not (channels == 4 and wanted == 1):
                    a.op("DecodePng", png, label=f"{channels}-as-{wanted}", channels=wanted)
            if d == "uint16":
                a.program(f"DecodePng/{d}-{channels}", decode_png(png), [{"fetch": ["image:0"]}])
    a.op("DecodePng", S("no image"), label="bad", error=True)


def decode_png(png):
    from harness import Nodes

    nodes = Nodes()
    nodes.const("in/0", png)
    nodes.op("image", "DecodePng", ["in/0"], {"dtype": "uint16"})
    return nodes


def example(**features):
    e = tf.train.Example()
    for name, value in features.items():
        f = e.features.feature[name]
        for v in value:
            if isinstance(v, bytes):
                f.bytes_list.value.append(v)
            elif isinstance(v, float):
                f.float_list.value.append(v)
            else:
                f.int64_list.value.append(v)
    return e.SerializeToString()


def examples(a):
    one = example(x=[1.0, 2.0], n=[7], s=[b"a", b"b"])
    two = example(x=[3.0, 4.0], n=[], s=[b"c"])
    kw = {"Tdense": ["float32"], "dense_shapes": [[2]]}
    a.op("ParseExample", W(one, two), W(), [S("n"), S("s")], [S("x")], [array([], "float32")], label="both",
         sparse_types=["int64", "string"], **kw)
    a.op("ParseExample", W(one, example(n=[1])), W("first", "second"), [], [S("x")], [array([9.0, 8.0])], label="default", sparse_types=[],
         **kw)
    a.op("ParseExample", W(example(n=[1])), W(), [], [S("x")], [array([], "float32")], label="missing", sparse_types=[], error=True, **kw)
    a.op("ParseExample", W(example(x=[1])), W(), [], [S("x")], [array([], "float32")], label="kind", sparse_types=[], error=True, **kw)
    a.op("ParseExample", W(b"\xff"), W(), [], [S("x")], [array([], "float32")], label="bytes", sparse_types=[], error=True, **kw)
    a.op("ParseSingleExample", S(one), [array([], "float32")], label="both", num_sparse=2, sparse_keys=["n", "s"], dense_keys=["x"],
         sparse_types=["int64", "string"], **kw)
    a.op("ParseSingleExample", S(two), [array([9.0, 8.0])], label="default", num_sparse=0, sparse_keys=[], dense_keys=["y"],
         sparse_types=[], **kw)
    a.op("ParseSingleExample", S(two), [array([], "float32")], label="missing", num_sparse=0, sparse_keys=[], dense_keys=["y"],
         sparse_types=[], error=True, **kw)


def summaries(a):
    for d in ("float32", "int32", "string"):
        a.op("TensorSummaryV2", S("tag"), values(d, [2, 2]), S(""), dtype=d)
        a.op("TensorSummary", values(d, [2, 2]), dtype=d)
    a.op("TensorSummaryV2", W("a", "b"), array(1.0), S(""), label="tag", error=True)
    clips = values("float32", [4, 6, 2], -1, 1)
    a.op("AudioSummaryV2", S("tag"), clips, array(8000.0), label="stereo")
    a.op("AudioSummaryV2", S("tag"), clips, array(8000.0), label="one", max_outputs=1)
    a.op("AudioSummaryV2", S("tag"), clips[:, :, 0], array(44100.0), label="mono", max_outputs=2)
    a.op("AudioSummaryV2", S("tag"), array([[2.0, -2.0, 0.00001]]), array(1.0), label="loud")
    a.op("AudioSummaryV2", S("tag"), array([1.0]), array(8000.0), label="rank", error=True)
    a.op("AudioSummaryV2", S("tag"), clips, array(0.0), label="rate", error=True)


def cases(a):
    texts(a)
    parts(a)
    formats(a)
    examples(a)
    summaries(a)
