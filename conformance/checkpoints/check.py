"""Checkpoints both ways: TensorFlow's Saver and Kolo's read what the other wrote, write the same bytes, and both notice
damage. Kolo's side is peer.rs, which has the same table of variables, and `kolo checkpoint`."""

import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import tensorflow as tf_all

tf = tf_all.compat.v1
tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
KOLO = TARGET / "debug" / "kolo"
BF16 = tf_all.bfloat16.as_numpy_dtype

# name: (resource variable, value)
TABLE = {
    "f32": (True, (np.arange(6, dtype=np.float32) * 0.5 - 1).reshape(2, 3)),
    "f64": (False, np.array([1 / 3, -2, 1e300])),
    "half": (True, np.array([0.5, -1.5], np.float16)),
    "bf16": (True, np.array([1.0, -0.25], BF16)),
    "i8": (True, np.array([-128, 0, 127], np.int8)),
    "i16": (True, np.array([-300, 300], np.int16)),
    "i32": (True, np.array(7, np.int32)),
    "i64": (False, np.array(-5_000_000_000, np.int64)),
    "u8": (True, np.array([0, 255], np.uint8)),
    "u16": (True, np.array([65535], np.uint16)),
    "flag": (True, np.array([True, False, True])),
    "text": (True, np.array([b"ab", b"", b"\x00\xff"], object)),
    "none": (True, np.zeros([0, 4], np.float32)),
    "scope/w": (False, (np.arange(3000, dtype=np.float32) * 0.25).reshape(1000, 3)),
}
PART = np.arange(20, dtype=np.float32).reshape(5, 4)

passed, failed = 0, []


def check(name, ok=True, detail=""):
    global passed
    if ok:
        passed += 1
        print(f"ok    {name}")
    else:
        failed.append(name)
        print(f"FAIL  {name} {detail}")


def attempt(name, body):
    try:
        body()
        check(name)
    except Exception:
        check(name, False, "\n" + traceback.format_exc())


def raises(body):
    try:
        body()
    except Exception:
        return True
    return False


def kolo(*arguments, ok=True):
    done = subprocess.run([str(KOLO), *map(str, arguments)], capture_output=True, text=True)
    if (done.returncode == 0) != ok:
        raise AssertionError(f"kolo {arguments} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def peer(what, folder):
    """Runs peer.rs: what it finds wrong is a panic."""
    command = ["cargo", "run", "--quiet", "--example", "checkpoint_peer", "--", what, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(done.stdout[-4000:] + done.stderr[-4000:])


def build(sharded):
    """The variables; with `sharded`, in turn on two devices."""
    for i, (name, (resource, value)) in enumerate(TABLE.items()):
        with tf.device(f"/cpu:{i % 2}" if sharded else None):
            scope, _, last = name.rpartition("/")
            with tf.variable_scope(scope or tf.get_variable_scope()):
                tf.get_variable(last, initializer=tf.constant(value), use_resource=resource)
    tf.get_variable("part", initializer=tf.constant(PART), partitioner=tf.fixed_size_partitioner(2), use_resource=True)
    step = tf.train.create_global_step()
    tf.add_to_collection("losses", tf.identity(step, name="loss"))
    return tf.assign(step, 42)


def session(graph):
    return tf.Session(graph=graph, config=tf.ConfigProto(device_count={"CPU": 2}))


def same(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    return found.shape == expected.shape and found.dtype == expected.dtype and np.array_equal(found, expected)


def compare(s, graph):
    for name, (_, value) in TABLE.items():
        variable = next(v for v in graph.get_collection("variables") if v.op.name == name)
        found = s.run(variable)
        assert same(found, value), f"{name}: {found!r} instead of {value!r}"
    parts = [v for v in graph.get_collection("variables") if v.op.name.startswith("part/")]
    found = np.concatenate(s.run(sorted(parts, key=lambda v: v.op.name)))
    assert same(found, PART), found
    step = next(v for v in graph.get_collection("variables") if v.op.name == "global_step")
    assert s.run(step) == 42


def tensorflow_saves(folder, sharded):
    folder.mkdir()
    with tf.Graph().as_default() as graph:
        step = build(sharded)
        saver = tf.train.Saver(sharded=sharded, max_to_keep=2)
        with session(graph) as s:
            s.run(tf.global_variables_initializer())
            s.run(step)
            for number in [40, 41, 42]:
                saver.save(s, str(folder / "m"), global_step=number)


def tensorflow_restores(prefix):
    with tf.Graph().as_default() as graph:
        build(False)
        with session(graph) as s:
            tf.train.Saver().restore(s, str(prefix))
            compare(s, graph)


def tensorflow_imports(prefix):
    with tf.Graph().as_default() as graph:
        saver = tf.train.import_meta_graph(str(prefix) + ".meta")
        names = {v.op.name for v in tf.trainable_variables()}
        assert "f32" in names and "global_step" not in names, names
        with session(graph) as s:
            saver.restore(s, str(prefix))
            compare(s, graph)
            assert s.run(tf.train.get_global_step(graph)) == 42
            # Kolo's save ops, run by TensorFlow.
            again = str(prefix) + "_by_tf"
            saver.save(s, again, write_meta_graph=False, write_state=False)
            assert filecmp.cmp(again + ".index", str(prefix) + ".index", shallow=False)


def tensorflow_reads(prefix):
    reader = tf_all.train.load_checkpoint(str(prefix))
    shapes = reader.get_variable_to_shape_map()
    assert set(shapes) == {*TABLE, "part", "global_step"}, set(shapes)
    for name, (_, value) in TABLE.items():
        assert same(reader.get_tensor(name), value), name
    assert same(reader.get_tensor("part"), PART)


def kolo_reads(prefix):
    names = [*TABLE, "part", "global_step"]
    listed = json.loads(kolo("checkpoint", "show", prefix, "--json"))
    assert set(listed) == set(names), listed
    arguments = [x for name in names for x in ("--tensor", name)]
    found = json.loads(kolo("checkpoint", "show", prefix, "--json", *arguments))
    for name, value in {**{n: v for n, (_, v) in TABLE.items()}, "part": PART}.items():
        assert found[name]["shape"] == list(value.shape), name
        if name == "text":
            assert found[name]["values"] == ["ab", "", "\\x00\\xff"], found[name]
        else:
            values = np.array(found[name]["values"]).astype(value.dtype).reshape(value.shape)
            assert np.array_equal(values, value), (name, found[name])


def same_files(a, b):
    """The same index and data under two prefixes."""
    ends = sorted(p.name[len(Path(a).name):] for p in Path(a).parent.glob(Path(a).name + ".*") if p.suffix != ".meta")
    assert any(end == ".index" for end in ends), ends
    for end in ends:
        if not filecmp.cmp(str(a) + end, str(b) + end, shallow=False):
            raise AssertionError(f"{a}{end} and {b}{end} differ")


def same_state(a, b):
    text_a, text_b = (a / "checkpoint").read_text(), (b / "checkpoint").read_text()
    assert text_a.replace(str(a), "DIR") == text_b.replace(str(b), "DIR"), text_a + text_b


def many_tensors(folder):
    """An index of several blocks."""
    names = sorted(hashlib.sha256(str(i).encode()).hexdigest() for i in range(8000))
    with tf.Graph().as_default() as graph, session(graph) as s:
        values = [tf.constant(np.float32(i)) for i in range(len(names))]
        s.run(tf.raw_ops.SaveV2(prefix=str(folder / "many"), tensor_names=names, shape_and_slices=[""] * len(names), tensors=values))
    kolo("checkpoint", "convert", folder / "many", folder / "again")
    same_files(folder / "many", folder / "again")
    assert (folder / "many.index").stat().st_size > 2 * 262144


def odd_dtypes(folder):
    """Tensors that are seldom variables, and names out of order: the order of the data follows the op's inputs."""
    tensors = {"z": np.array([2**32 - 1], np.uint32), "a": np.array([2**64 - 1], np.uint64), "m": np.float64(1)}
    with tf.Graph().as_default() as graph, session(graph) as s:
        values = [tf.constant(v) for v in tensors.values()]
        op = tf.raw_ops.SaveV2(prefix=str(folder / "odd"), tensor_names=[*tensors], shape_and_slices=[""] * 3, tensors=values)
        s.run(op)
        (folder / "odd.pb").write_bytes(graph.as_graph_def().SerializeToString())
    shutil.copytree(folder, str(folder) + "_tf")
    kolo("trace", folder / "odd.pb", "--fetch", op.name, "--out", folder / "trace.json")
    same_files(folder / "odd", Path(str(folder) + "_tf") / "odd")


def safetensors_both_ways(prefix, folder):
    try:
        from safetensors.numpy import load_file, save_file
    except ImportError:
        print("skip  safetensors: the package is not installed")
        return
    folder.mkdir()
    plain = {n: v for n, (_, v) in TABLE.items() if n not in ("text", "bf16")}
    save_file({n: np.array(v, order="C") for n, v in plain.items()}, folder / "py.safetensors")
    kolo("checkpoint", "convert", folder / "py.safetensors", folder / "m")
    kolo("checkpoint", "convert", folder / "m", folder / "kolo.safetensors")
    found = load_file(folder / "kolo.safetensors")
    assert set(found) == set(plain)
    for name, value in plain.items():
        assert same(found[name], value), name
    reader = tf_all.train.load_checkpoint(str(folder / "m"))
    assert all(same(reader.get_tensor(name), value) for name, value in plain.items())


def damage(prefix, folder):
    """Flips a bit in many places; both sides must complain about every one that matters to them."""
    folder.mkdir()
    names = [p for p in Path(prefix).parent.glob(Path(prefix).name + ".*") if p.suffix != ".meta"]
    assert len(names) >= 2, names
    wrong = []
    for source in names:
        size = source.stat().st_size
        for at in sorted({0, 1, size // 3, size // 2, size - 60, size - 9, size - 1} & set(range(size))):
            for path in names:
                shutil.copy(path, folder / path.name)
            target = folder / source.name
            content = bytearray(target.read_bytes())
            content[at] ^= 0x20
            target.write_bytes(content)
            here = folder / Path(prefix).name

            def read_all():
                reader = tf_all.train.load_checkpoint(str(here))
                for name in reader.get_variable_to_shape_map():
                    reader.get_tensor(name)

            done = subprocess.run([str(KOLO), "checkpoint", "verify", str(here)], capture_output=True, text=True)
            complaint = done.returncode == 1 and "DataLoss" in done.stderr
            # A footer's padding is read by neither.
            if raises(read_all) != complaint:
                wrong.append((source.name, at, done.stdout + done.stderr))
            if source.suffix != ".index" and not complaint:
                wrong.append((source.name, at, "data was changed and nobody noticed"))
    assert not wrong, wrong


def main():
    built = subprocess.run(["cargo", "build", "--quiet", "--bin", "kolo"], cwd=ROOT)
    if built.returncode != 0:
        sys.exit("conformance/run: 'cargo build --bin kolo' failed")
    top = Path(tempfile.mkdtemp(prefix="kolo-conformance-"))
    try:
        for folder, sharded in [("tf", False), ("tf_sharded", True)]:
            attempt(f"TensorFlow saves ({folder})", lambda: tensorflow_saves(top / folder, sharded))
        attempt("Kolo saves", lambda: peer("save", top))
        attempt("Kolo restores what TensorFlow saved, by its own graph and by TensorFlow's .meta", lambda: peer("restore", top))
        for folder in ["kolo", "kolo_background", "kolo_sharded", "kolo_sharded_background"]:
            prefix = top / folder / "m-42"
            attempt(f"TensorFlow restores {folder}", lambda: tensorflow_restores(prefix))
            attempt(f"TensorFlow reads {folder}", lambda: tensorflow_reads(prefix))
            attempt(f"TensorFlow finds the newest of {folder}", lambda: check_latest(top / folder, prefix))
            attempt(f"TensorFlow imports the .meta of {folder}", lambda: tensorflow_imports(prefix))
        for folder in ["tf", "tf_sharded", "kolo", "kolo_sharded"]:
            attempt(f"kolo checkpoint shows {folder}", lambda: kolo_reads(top / folder / "m-42"))
            attempt(f"kolo checkpoint verifies {folder}", lambda: kolo("checkpoint", "verify", top / folder))
        attempt("the same bytes", lambda: same_files(top / "tf" / "m-42", top / "kolo" / "m-42"))
        attempt("the same bytes from a background save", lambda: same_files(top / "tf" / "m-42", top / "kolo_background" / "m-42"))
        for folder in ["tf", "tf_sharded"]:
            for number in [42, 43]:
                again = top / f"{folder}_by_kolo" / f"m-{number}"
                attempt(f"the same bytes from TensorFlow's ops run by Kolo ({folder}, {number})", lambda: same_files(top / folder / "m-42", again))
        attempt("the same checkpoint file", lambda: same_state(top / "tf", top / "kolo"))
        (top / "many").mkdir()
        attempt("an index of several blocks", lambda: many_tensors(top / "many"))
        (top / "odd").mkdir()
        attempt("other dtypes, names out of order", lambda: odd_dtypes(top / "odd"))
        attempt("safetensors", lambda: safetensors_both_ways(top / "kolo" / "m-42", top / "safetensors"))
        for folder in ["tf", "kolo", "tf_sharded"]:
            attempt(f"damage to {folder} is noticed by both", lambda: damage(top / folder / "m-42", top / f"{folder}_damaged"))
    finally:
        shutil.rmtree(top, ignore_errors=True)
    print(f"{passed} passed, {len(failed)} failed")
    sys.exit(1 if failed else 0)


def check_latest(folder, prefix):
    found = tf_all.train.latest_checkpoint(str(folder))
    assert found == str(prefix), found


if __name__ == "__main__":
    main()
