"""Cases of crates/kolo-ops/src/io that need files: each writes its own with WriteFile into a folder of its own, `{dir}`,
and reads them in later runs. Checkpoints that the other side wrote are compared by conformance/checkpoints."""

import gzip
import struct
import zlib

import numpy as np

from harness import ALL, Nodes, array, values

# Lines that end in all ways: an empty one, bytes that are no UTF-8, the end of Windows, and none at all.
LINES = b"first\n\n\xff\xfe third\r\nlast, no end"
run = lambda *t, **kw: {"target": list(t), **kw}
get = lambda *f, **kw: {"fetch": list(f), **kw}


def S(word):
    return np.array(word.encode() if isinstance(word, str) else word, object)


def W(*words):
    return np.array([w.encode() if isinstance(w, str) else w for w in words] + [None], object)[:-1]


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def records(*contents):
    """The bytes of a TFRecord file."""
    length = lambda c: struct.pack("<Q", len(c))
    return b"".join(length(c) + masked(length(c)) + c + masked(c) for c in contents)


def write(n, **files):
    """Nodes that write files, `write` for all of them; a name's `_` stands for `/`."""
    for name, contents in files.items():
        path = n.const(f"{name}/path", S("{dir}/" + name.replace("_", "/")))
        n.op(f"{name}/write", "WriteFile", [path, n.const(f"{name}/contents", S(contents))])
    n.op("write", "NoOp", [], control=[f"{name}/write" for name in files])


def whole_files(a):
    for label, contents in (("lines", LINES), ("empty", b""), ("zeros", b"\0\0a\0")):
        n = Nodes()
        write(n, a=contents)
        n.op("read", "ReadFile", ["a/path"])
        a.program(f"ReadFile/{label}", n, [run("write"), get("read")], dir=True)
    n = Nodes()
    write(n, sub_deep_x=b"one", a=b"1")
    n.op("again", "WriteFile", ["a/path", n.const("more", S("2"))])
    n.op("folder", "WriteFile", [n.const("p", S("{dir}/sub")), "more"])
    n.op("below", "WriteFile", [n.const("q", S("{dir}/a/b")), "more"])
    n.op("read", "ReadFile", ["sub_deep_x/path"])
    n.op("read_a", "ReadFile", ["a/path"])
    n.op("read_folder", "ReadFile", ["p"])
    n.op("read_below", "ReadFile", ["q"])
    n.op("missing", "ReadFile", [n.const("r", S("{dir}/none"))])
    a.program("WriteFile/folders", n, [
        get("read", error=True), run("write"), get("read", "read_a"), run("again"), get("read_a"), run("folder", error=True),
        run("below", error=True), get("read_folder", error=True), get("missing", error=True), get("read_below", error=True)], dir=True)
    a.op("ReadFile", W("{dir}/a"), label="vector", error=True)
    a.op("ReadFile", array(1.0), label="number", error=True)
    a.op("WriteFile", W("{dir}/a", "{dir}/b"), S("x"), label="vector", error=True)
    a.op("WriteFile", S("{dir}/a"), W("x"), label="contents", error=True)
    a.op("WriteFile", S("{dir}/a"), array(1.0), label="number", error=True)
    a.op("ReadFile", S(""), label="no-name", error=True)
    a.op("WriteFile", S(""), S("x"), label="no-name", error=True)


def matching(a):
    n = Nodes()
    write(n, b1=b"", a1=b"", a2=b"", ab=b"", sub_a9=b"")
    patterns = {"star": W("a*"), "one": W("?1"), "class": W("[ab]1"), "range": W("a[0-1]"), "none": W("x*"), "exact": W("a1"),
                "absent": W("a7"), "two": W("b*", "a*"), "folder": W("s*/a*"), "all": W("*"), "empty": W(),
                "twice": W("a1", "a1"), "negated": W("a[^1]"), "escaped": W("a\\1")}
    for label, p in patterns.items():
        full = np.array([b"{dir}/" + x for x in p.ravel()] + [None], object)[:-1].reshape(p.shape)
        n.op(label, "MatchingFiles", [n.const(f"in/{label}", full)])
    n.op("scalar", "MatchingFiles", [n.const("in/scalar", S("{dir}/b?"))])
    a.program("MatchingFiles/patterns", n, [run("write")] + [get(label) for label in [*patterns, "scalar"]], dir=True, fed=True)
    a.op("MatchingFiles", array(1), label="number", error=True)
    a.op("MatchingFiles", np.array([[b"{dir}/a1", b"{dir}/b1"]], object), label="matrix", error=True)


def reading(n, kind, files, **attrs):
    """A reader, and a queue with the names of these files."""
    n.op("reader", kind, [], attrs)
    n.op("queue", "FIFOQueueV2", [], {"component_types": ["string"], "shapes": [[]], "shared_name": "names"})
    names = np.array([b"{dir}/" + f.encode() for f in files], object)
    n.op("names", "QueueEnqueueManyV2", ["queue", [n.const("names/list", names)]])
    n.op("close", "QueueCloseV2", ["queue"])
    n.op("read", "ReaderReadV2", ["reader", "queue"])
    for k in (2, 3, 9):
        n.op(f"upto{k}", "ReaderReadUpToV2", ["reader", "queue", n.const(f"n{k}", array(k, "int64"))])
    n.op("n", "ReaderNumRecordsProducedV2", ["reader"])
    n.op("reset", "ReaderResetV2", ["reader"])
    return n


def used(n, runs):
    """The ops about files that these runs need."""
    by_name, found = {node.name: node for node in n.graph.node}, set()
    todo = [name for r in runs for name in r.get("fetch", []) + r.get("target", [])]
    while todo:
        node = by_name[todo.pop().split(":")[0].lstrip("^")]
        found.add(node.op)
        todo.extend(node.input)
    return sorted(op for op in found if "Reader" in op or op.endswith("File"))


ONE = get("read", "read:1")
N = get("n")
END = get("read", "read:1", error=True)
UP_TO = lambda k, **kw: get(f"upto{k}", f"upto{k}:1", **kw)


def readers(a):
    go = lambda name, n, runs: a.program(name, n, runs, ops=used(n, runs), dir=True)
    start = [run("write"), run("names"), run("close")]
    kinds = {
        "TextLineReaderV2": (dict(a=LINES, b=b"", c=b"x\ny\n"), {}),
        "TFRecordReaderV2": (dict(a=records(b"one", b"", b"\xff\0 three", LINES), b=b"", c=records(b"x", b"y")), {}),
        "WholeFileReaderV2": (dict(a=LINES, b=b"", c=b"x", d=b"y", e=b"z", f=b"w"), {}),
        "IdentityReaderV2": (dict(a=LINES, b=b"", c=b"x", d=b"y", e=b"z", f=b"w"), {}),
        "FixedLengthRecordReaderV2": (dict(a=b"0123456789abc", b=b"", c=b"xyzuvw"), {"record_bytes": 3}),
    }
    for kind, (files, attrs) in kinds.items():
        n = Nodes()
        write(n, **files)
        reading(n, kind, files, **attrs)
        go(f"{kind}/order", n, start + [N, ONE, ONE, N, ONE, ONE, N, ONE, ONE, END, N])
        go(f"{kind}/up-to", n, start + [UP_TO(3), N, UP_TO(9), N])
        go(f"{kind}/reset", n, [run("write"), run("names"), ONE, run("reset"), N, ONE, N, run("names"), ONE, ONE])
        n = Nodes()
        write(n, a=files["a"])
        reading(n, kind, ["none", "a"], **attrs)
        first = ONE if kind == "IdentityReaderV2" else END
        # A reader of whole files stays with the one that it cannot read.
        then = END if kind == "WholeFileReaderV2" else ONE
        go(f"{kind}/missing-file", n, start + [first, N, then, N])
        go(f"{kind}/missing-file-up-to", n, start + [UP_TO(2, error=kind != "IdentityReaderV2")])
    for skip in (1, 2, 4, 9):
        n = Nodes()
        write(n, a=LINES, b=b"head\ntail")
        reading(n, "TextLineReaderV2", ["a", "b"], skip_header_lines=skip)
        go(f"TextLineReaderV2/skip-{skip}", n, start + [UP_TO(9) if skip < 4 else UP_TO(9, error=True), N])
    for label, kw in (("header", {"header_bytes": 2}), ("footer", {"footer_bytes": 4}), ("hop", {"hop_bytes": 2}),
                      ("far-hop", {"hop_bytes": 5}), ("all", {"header_bytes": 1, "footer_bytes": 1, "hop_bytes": 4})):
        n = Nodes()
        write(n, a=b"0123456789abc", b=b"xyzuvw")
        reading(n, "FixedLengthRecordReaderV2", ["a", "b"], record_bytes=3, **kw)
        go(f"FixedLengthRecordReaderV2/{label}", n, start + [ONE, UP_TO(9), N])
    for label, kw in (("short", {"header_bytes": 9}), ("no-record", {"record_bytes": 0}), ("bad-header", {"header_bytes": -1}),
                      ("bad-hop", {"hop_bytes": -1}), ("bad-footer", {"footer_bytes": -1}), ("other-encoding", {"encoding": "LZ"})):
        n = Nodes()
        write(n, a=b"0123")
        reading(n, "FixedLengthRecordReaderV2", ["a"], **{"record_bytes": 3, **kw})
        go(f"FixedLengthRecordReaderV2/{label}", n, start + [ONE if label in ("no-record", "other-encoding") else END])
    body = records(b"one", b"two" * 30)
    for packed, bytes_of in (("ZLIB", lambda b: zlib.compress(b)), ("GZIP", lambda b: gzip.compress(b, mtime=0))):
        n = Nodes()
        write(n, a=bytes_of(body), b=bytes_of(records(b"x")))
        reading(n, "TFRecordReaderV2", ["a", "b"], compression_type=packed)
        go(f"TFRecordReaderV2/{packed}", n, start + [ONE, ONE, ONE, N])
        n = Nodes()
        write(n, a=bytes_of(b"hh012345f"), b=bytes_of(b"hhxyzf"))
        reading(n, "FixedLengthRecordReaderV2", ["a", "b"], record_bytes=3, header_bytes=2, footer_bytes=1, encoding=packed)
        go(f"FixedLengthRecordReaderV2/{packed}", n, start + [ONE, ONE, ONE, N])
    broken = {"truncated": body[:-3], "no-sum": body[:-4], "in-length": body[:24], "one-byte": body[:20], "bad-length-sum": body[:8] + b"xxxx" + body[12:],
              "bad-sum": body[:-1] + b"x", "bad-first": b"x" * 40}
    for label, contents in broken.items():
        n = Nodes()
        write(n, a=contents, b=records(b"x"))
        reading(n, "TFRecordReaderV2", ["a", "b"])
        good = [ONE] if label in ("truncated", "no-sum", "in-length", "one-byte", "bad-sum") else []
        ignored = label in ("in-length", "one-byte")
        go(f"TFRecordReaderV2/{label}", n, start + good + [ONE if ignored else END, N])
    n = Nodes()
    write(n, a=body)
    reading(n, "TFRecordReaderV2", ["a"], compression_type="LZ")
    go("TFRecordReaderV2/other-compression", n, start + [ONE])
    n = Nodes()
    write(n, a=LINES)
    reading(n, "TextLineReaderV2", ["a"], skip_header_lines=-1)
    go("TextLineReaderV2/bad-skip", n, start + [END])


def bad_readers(a):
    def nodes(types, shapes=None):
        n = Nodes()
        n.op("reader", "IdentityReaderV2", [])
        n.op("queue", "FIFOQueueV2", [], {"component_types": types, "shapes": shapes or [], "shared_name": "q"})
        n.op("read", "ReaderReadV2", ["reader", "queue"])
        n.op("upto", "ReaderReadUpToV2", ["reader", "queue", n.const("k", array(2, "int64"))])
        return n
    n = nodes(["float32"])
    n.op("put", "QueueEnqueueV2", ["queue", [n.const("x", array(1.0))]])
    a.program("ReaderReadV2/numbers", n, [run("put"), END], ops=["ReaderReadV2"])
    a.program("ReaderReadUpToV2/numbers", n, [run("put"), get("upto", error=True)], ops=["ReaderReadUpToV2"])
    n = nodes(["string", "string"])
    n.op("put", "QueueEnqueueV2", ["queue", [n.const("x", S("a")), n.const("y", S("b"))]])
    a.program("ReaderReadV2/pairs", n, [run("put"), END], ops=["ReaderReadV2"])
    n = nodes(["string"])
    n.op("put", "QueueEnqueueV2", ["queue", [n.const("x", W("a", "b"))]])
    a.program("ReaderReadV2/lists", n, [run("put"), END], ops=["ReaderReadV2"])
    n = nodes(["string"], [[]])
    n.op("put", "QueueEnqueueV2", ["queue", [n.const("x", S("a"))]])
    n.op("none", "ReaderReadUpToV2", ["reader", "queue", n.const("zero", array(0, "int64"))])
    n.op("swapped", "ReaderReadV2", ["queue", "reader"])
    n.op("n", "ReaderNumRecordsProducedV2", ["queue"])
    n.op("reset", "ReaderResetV2", ["queue"])
    a.program("ReaderReadUpToV2/no-records", n, [run("put"), get("none")], ops=["ReaderReadUpToV2"])
    a.program("ReaderReadV2/swapped", n, [get("swapped", error=True)], ops=["ReaderReadV2"])
    a.program("ReaderReadV2/waits", n, [get("read", error=True, timeout_ms=300), run("put"), get("read")], ops=["ReaderReadV2"])
    a.program("ReaderNumRecordsProducedV2/queue", n, [get("n", error=True)], ops=["ReaderNumRecordsProducedV2"])
    a.program("ReaderResetV2/queue", n, [run("reset", error=True)], ops=["ReaderResetV2"])
    n = Nodes()
    n.op("reader", "IdentityReaderV2", [], {"shared_name": "r"})
    n.op("queue", "FIFOQueueV2", [], {"component_types": ["string"], "shared_name": "q"})
    n.op("upto", "ReaderReadUpToV2", ["reader", "queue", n.const("k", array([2], "int64"))])
    a.program("ReaderReadUpToV2/vector", n, [get("upto", error=True)], ops=["ReaderReadUpToV2"])
    n = Nodes()
    n.op("reader", "IdentityReaderV2", [], {"shared_name": "r"})
    n.op("n", "ReaderNumRecordsProducedV2", [n.const("x", array(1.0))])
    a.program("ReaderNumRecordsProducedV2/number", n, [get("n", error=True)], ops=["ReaderNumRecordsProducedV2"])
    n = Nodes()
    n.op("reader", "IdentityReaderV2", [], {"shared_name": "r"})
    n.op("again", "IdentityReaderV2", [], {"shared_name": "r"})
    n.op("other", "WholeFileReaderV2", [], {"shared_name": "r"})
    n.op("queue", "FIFOQueueV2", [], {"component_types": ["string"], "shared_name": "q"})
    n.op("put", "QueueEnqueueV2", ["queue", [n.const("x", S("a"))]])
    n.op("read", "ReaderReadV2", ["reader", "queue"])
    n.op("n", "ReaderNumRecordsProducedV2", ["again"])
    a.program("IdentityReaderV2/shared", n, [run("put"), get("read"), get("n")], ops=["IdentityReaderV2"])


def table_files(a):
    text = b"a\t1\nb\t22\nc\t-3\n"

    def table(label, key, value, contents, ask, then, error=False, key_dtype="string", value_dtype="int64", **kw):
        n = Nodes()
        write(n, a=contents)
        n.op("t", "HashTableV2", [], {"key_dtype": key_dtype, "value_dtype": value_dtype, "shared_name": "t"})
        n.op("init", "InitializeTableFromTextFileV2", ["t", "a/path"], {"key_index": key, "value_index": value, **kw})
        default = S("?") if value_dtype == "string" else array(-1, value_dtype)
        n.op("find", "LookupTableFindV2", ["t", n.const("ask", ask), n.const("default", default)])
        n.op("size", "LookupTableSizeV2", ["t"])
        runs = [run("write"), run("init", error=error)] + ([] if error else [get("size"), get("find"), *then])
        a.program(f"InitializeTableFromTextFileV2/{label}", n, runs, dir=True, ops=["InitializeTableFromTextFileV2"])

    again = [run("init"), get("size")]
    lines = LINES.replace(b"\n\n", b"\n")
    table("line-to-number", -2, -1, lines, W("first", b"\xff\xfe third", b"\xff\xfe third\r", "last, no end", "x"), again)
    table("empty-whole-line", -2, -1, LINES, W("first"), [], error=True)
    table("columns", 0, 1, text, W("b", "c", "z"), again)
    table("number-to-line", -1, -2, lines, array([0, 1, 2, 3, 4], "int64"), [], key_dtype="int64", value_dtype="string")
    table("number-column", 1, 0, text, array([22, 1, 5], "int64"), [], key_dtype="int64", value_dtype="string")
    table("floats", 0, 1, b"a 1.5\nb -2e3\n", W("a", "b"), [], value_dtype="float32", delimiter=" ")
    table("comma", 0, 2, b"a,x,1\nb,y,2\n", W("a", "b"), [], delimiter=",")
    table("some-lines", -2, -1, text, W("a\t1", "c\t-3"), [], vocab_size=2)
    table("offset", -2, -1, b"a\nb\n", W("a", "b"), [], offset=5)
    table("empty-parts", 0, 1, b"\tx\n", W(""), [], value_dtype="string")
    table("too-few-lines", -2, -1, text, W("a"), [], error=True, vocab_size=9)
    table("too-few-columns", 0, 2, text, W("a"), [], error=True)
    table("empty-line", 0, 1, b"a\t1\n\n", W("a"), [], error=True)
    table("no-number", 0, 1, b"a\tx\n", W("a"), [], error=True)
    table("same-keys", 0, 1, b"a\t1\na\t2\n", W("a"), [], error=True)
    table("same-pairs", 0, 1, b"a\t1\na\t1\n", W("a"), [])
    table("empty-file", -2, -1, b"", W("a"), [], error=True)
    table("line-as-number", -2, -1, text, array([0], "int64"), [], error=True, key_dtype="int64")
    table("number-as-string", -2, -1, text, W("a"), [], error=True, value_dtype="string")
    table("delimiter", 0, 1, text, W("a"), [], error=True, delimiter="ab")
    table("no-delimiter", 0, 1, text, W("a"), [], error=True, delimiter="")
    n = Nodes()
    n.op("t", "HashTableV2", [], {"key_dtype": "string", "value_dtype": "int64", "shared_name": "t"})
    kw = {"key_index": -2, "value_index": -1}
    n.op("missing", "InitializeTableFromTextFileV2", ["t", n.const("p", S("{dir}/none"))], kw)
    n.op("empty", "InitializeTableFromTextFileV2", ["t", n.const("e", S(""))], kw)
    n.op("folder", "InitializeTableFromTextFileV2", ["t", n.const("d", S("{dir}"))], kw)
    n.op("size", "LookupTableSizeV2", ["t"])
    a.program("InitializeTableFromTextFileV2/names", n, [run("missing", error=True), run("empty", error=True), run("folder", error=True),
                                                         ], dir=True, ops=["InitializeTableFromTextFileV2"])
    n.op("list", "InitializeTableFromTextFileV2", ["t", n.const("l", W("a", "b"))], kw)
    a.program("InitializeTableFromTextFileV2/list", n, [run("list", error=True)], dir=True, ops=["InitializeTableFromTextFileV2"])


def save(n, name, prefix, tensors, slices=None):
    """`tensors` by their names."""
    names = list(tensors)
    slices = slices or [""] * len(names)
    n.op(name, "SaveV2", [n.const(f"{name}/prefix", S(prefix)), n.const(f"{name}/names", W(*names)),
                          n.const(f"{name}/slices", W(*slices)), [n.const(f"{name}/{i}", v) for i, v in enumerate(tensors.values())]])


def restore(n, name, prefix, names, dtypes, slices=None):
    n.op(name, "RestoreV2", [n.const(f"{name}/prefix", S(prefix)), n.const(f"{name}/names", W(*names)),
                             n.const(f"{name}/slices", W(*(slices or [""] * len(names))))], {"dtypes": dtypes})
    return [name if i == 0 else f"{name}:{i}" for i in range(len(dtypes))]


def checkpoints(a):
    n = Nodes()
    tensors = {d: values(d, [2, 3]) for d in ALL}
    tensors.update({"scalar": array(7), "empty": np.zeros([0, 3], np.float32), "text": S(b"\xff\0"), "none": W(), "a/b:c": array([1.5])})
    save(n, "save", "{dir}/sub/m", tensors)
    kinds = [*ALL, "int32", "float32", "string", "string", "float32"]
    all_of = restore(n, "restore", "{dir}/sub/m", list(tensors), kinds)
    a.program("SaveV2/dtypes", n, [get(all_of[0], error=True), run("save"), get(*all_of), run("save"), get(all_of[3])], dir=True,
              ops=["SaveV2", "RestoreV2"])
    one = restore(n, "missing", "{dir}/sub/m", ["scalar", "nothing"], ["int32", "int32"])
    restore(n, "wrong", "{dir}/sub/m", ["scalar"], ["float32"])
    restore(n, "nowhere", "{dir}/sub/x", ["scalar"], ["int32"])
    restore(n, "twice", "{dir}/sub/m", ["scalar", "scalar"], ["int32", "int32"])
    restore(n, "folder", "{dir}/sub", ["scalar"], ["int32"])
    a.program("RestoreV2/refused", n, [run("save"), get(*one, error=True), get("wrong", error=True), get("nowhere", error=True),
                                       get("twice", "twice:1")], dir=True, ops=["RestoreV2"])
    a.program("RestoreV2/folder", n, [run("save"), get("folder", error=True)], dir=True, ops=["RestoreV2"])
    whole = values("float32", [4, 3])
    n = Nodes()
    save(n, "save", "{dir}/m", {"w": whole[:, :2], "v": array([1, 2, 3])}, ["4 3 -:0,2", "5 1,3"])
    save(n, "full", "{dir}/f", {"w": whole})
    fetches = [restore(n, label, prefix, ["w"], ["float32"], [spec])[0] for label, prefix, spec in (
        ("same", "{dir}/m", "4 3 -:0,2"), ("inner", "{dir}/m", "4 3 1,2:1,1"), ("rows", "{dir}/f", "4 3 1,2:-"), ("all", "{dir}/f", "4 3 -:-"),
        ("row", "{dir}/f", "4 3 3,1:0,3"), ("vector", "{dir}/m", "4 3 -:1,1"))]
    a.program("RestoreV2/slices", n, [run("save"), run("full"), *[get(f) for f in fetches]], dir=True, ops=["SaveV2", "RestoreV2"])
    for label, file, spec in (("outside", "m", "4 3 -:-"), ("another", "f", "4 4 -:-"), ("part", "m", ""), ("beyond", "f", "4 3 3,2:-"),
                              ("rank", "f", "4 3 -"), ("text", "f", "4 x -:-"), ("short", "f", "4"), ("negative", "f", "4 3 -1,2:-")):
        n = Nodes()
        save(n, "save", "{dir}/m", {"w": whole[:, :2]}, ["4 3 -:0,2"])
        save(n, "full", "{dir}/f", {"w": whole})
        restore(n, "bad", "{dir}/" + file, ["w"], ["float32"], [spec])
        a.program(f"RestoreV2/slice-{label}", n, [run("save"), run("full"), get("bad", error=True)], dir=True, ops=["RestoreV2"])
    for label, spec in (("size", "5 1,3"), ("rank", "5 5 -:-"), ("text", "x"), ("beyond", "5 4,2"), ("short", "5")):
        n = Nodes()
        save(n, "save", "{dir}/m", {"v": array([1, 2])}, [spec])
        a.program(f"SaveV2/slice-{label}", n, [run("save", error=True)], dir=True, ops=["SaveV2"])
    n = Nodes()
    save(n, "first", "{dir}/m", {"v": array([1, 2])})
    save(n, "below", "{dir}/m.index/x", {"v": array([1, 2])})
    a.program("SaveV2/below-a-file", n, [run("first"), run("below", error=True)], dir=True, ops=["SaveV2"])
    x = array([1, 2])
    for label, names, specs, tensors in (("names", W("a", "b"), W(""), [x]), ("slices", W("a"), W("", ""), [x]),
                                         ("name-scalar", S("a"), W(""), [x]), ("twice", W("a", "a"), W("", ""), [x, x])):
        a.op("SaveV2", S("{dir}/m"), names, specs, tensors, label=label, error=True)
    a.op("SaveV2", W("{dir}/m"), W("a"), W(""), [x], label="prefix-vector", error=True)
    a.op("SaveV2", array(1), W("a"), W(""), [x], label="prefix-number", error=True)
    for label, prefix, names, specs in (("names", S("a"), W("a", "b"), W("")), ("slice-list", S("a"), W("a"), W("", "")),
                                        ("name-scalar", S("a"), S("a"), W("")), ("prefix-vector", W("a"), W("a"), W("")),
                                        ("prefix-number", array(1), W("a"), W("")), ("no-prefix", S(""), W("a"), W(""))):
        a.op("RestoreV2", prefix, names, specs, label=label, dtypes=["float32"], error=True)


def merges(a):
    def nodes(**kw):
        n = Nodes()
        save(n, "one", "{dir}/t/one", {"a": array([1.5, 2.5]), "s": W("x", b"\xff")})
        save(n, "two", "{dir}/t/two", {"b": array([[3], [4]], "int64")})
        n.op("save", "NoOp", [], control=["one", "two"])
        prefixes = n.const("prefixes", W("{dir}/t/one", "{dir}/t/two"))
        n.op("merge", "MergeV2Checkpoints", [prefixes, n.const("to", S("{dir}/m"))], kw)
        n.op("files", "MatchingFiles", [n.const("patterns", W("{dir}/*", "{dir}/t/*"))])
        return n, restore(n, "restore", "{dir}/m", ["a", "s", "b"], ["float32", "string", "int64"])
    n, names = nodes()
    a.program("MergeV2Checkpoints/two", n, [run("merge", error=True), run("save"), run("merge"), get("files"), get(*names),
                                            run("merge", error=True)], dir=True, ops=["MergeV2Checkpoints", "MatchingFiles"])
    n, names = nodes(delete_old_dirs=False)
    a.program("MergeV2Checkpoints/keep", n, [run("save"), run("merge"), get(*names), get("files")], dir=True, ops=["MergeV2Checkpoints"])
    n, names = nodes(allow_missing_files=True)
    n.op("read", "RestoreV2", [n.const("r/p", S("{dir}/m")), n.const("r/n", W("a")), n.const("r/s", W(""))], {"dtypes": ["float32"]})
    a.program("MergeV2Checkpoints/missing", n, [run("one"), run("merge"), get("read"), get(*names, error=True)], dir=True, ops=["MergeV2Checkpoints"])
    n, names = nodes()
    a.program("MergeV2Checkpoints/absent", n, [run("one"), run("merge", error=True)], dir=True, ops=["MergeV2Checkpoints"])
    n = Nodes()
    whole = values("float32", [4, 2])
    save(n, "one", "{dir}/t/one", {"w": whole[:3]}, ["4 2 0,3:-"])
    save(n, "two", "{dir}/t/two", {"w": whole[3:]}, ["4 2 3,1:-"])
    n.op("save", "NoOp", [], control=["one", "two"])
    n.op("merge", "MergeV2Checkpoints", [n.const("prefixes", W("{dir}/t/one", "{dir}/t/two")), n.const("to", S("{dir}/m"))])
    f = [restore(n, "all", "{dir}/m", ["w"], ["float32"])[0], restore(n, "part", "{dir}/m", ["w"], ["float32"], ["4 2 2,2:-"])[0]]
    a.program("MergeV2Checkpoints/slices", n, [run("save"), run("merge"), get(f[0]), get(f[1])], dir=True, ops=["MergeV2Checkpoints"])
    n = Nodes()
    save(n, "one", "{dir}/t/one", {"w": array(1)})
    save(n, "two", "{dir}/t/two", {"w": array(2)})
    n.op("save", "NoOp", [], control=["one", "two"])
    n.op("merge", "MergeV2Checkpoints", [n.const("prefixes", W("{dir}/t/one", "{dir}/t/two")), n.const("to", S("{dir}/m"))])
    a.program("MergeV2Checkpoints/same-name", n, [run("save"), run("merge", error=True)], dir=True, ops=["MergeV2Checkpoints"])
    a.op("MergeV2Checkpoints", S("{dir}/a"), S("{dir}/b"), label="scalar", error=True)
    a.op("MergeV2Checkpoints", W("{dir}/a"), W("{dir}/b"), label="vector", error=True)
    a.op("MergeV2Checkpoints", array([1]), S("{dir}/b"), label="number", error=True)


def cases(a):
    whole_files(a)
    matching(a)
    readers(a)
    bad_readers(a)
    table_files(a)
    checkpoints(a)
    merges(a)
