"""TensorFlow makes graphs with functions, frozen graphs and SavedModels anew and runs them; `kolo run` must give the same.
It prints 'N passed, N failed' and fails if one did."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import make

ROOT = Path(__file__).resolve().parents[2]
KOLO = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "debug" / "kolo"

passed, failed = 0, []


def check(name, ok, detail=""):
    global passed
    if ok:
        passed += 1
        print(f"ok    {name}")
    else:
        failed.append(name)
        print(f"FAIL  {name} {detail}")


def kolo(model, feeds, fetches, work, extra=()):
    args = [str(KOLO), "run", str(model), *extra]
    for i, (name, value) in enumerate(feeds.items()):
        np.save(work / f"feed{i}.npy", value)
        args += ["--feed", f"{name}=@{work / f'feed{i}.npy'}"]
    for i, name in enumerate(fetches):
        args += ["--fetch", name, "--out", str(work / f"fetch{i}.npy")]
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode != 0:
        return None, done.stderr.strip()
    return [np.load(work / f"fetch{i}.npy") for i in range(len(fetches))], ""


def compare(name, model, feeds, expected, work, extra=()):
    found, error = kolo(model, feeds, list(expected), work, extra)
    if found is None:
        return check(name, False, error)
    for (key, want), got in zip(expected.items(), found):
        same = got.dtype == want.dtype and got.shape == want.shape and np.allclose(got, want, rtol=1e-5, atol=1e-6)
        check(f"{name} {key}", same, f"{got} is not {want}")


def steps(arrays):
    """Feeds and results of each step or signature."""
    all_steps = {}
    for key, value in arrays.items():
        side = "feed/" if "feed/" in key else "fetch/"
        step, name = key.split(side)
        all_steps.setdefault(step.rstrip("/"), ({}, {}))[side == "fetch/"][name] = value
    return all_steps


def main():
    subprocess.run(["cargo", "build", "--quiet", "--bin", "kolo"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        made, work = Path(folder) / "made", Path(folder) / "work"
        work.mkdir()
        make.main(str(made))
        for file in sorted(made.glob("*.npz")):
            case = file.stem
            is_saved = (made / case).is_dir()
            has_state = case == "stateful"
            for step, (feeds, expected) in sorted(steps(dict(np.load(file))).items()):
                if has_state and step != "step1":
                    continue  # Variables do not outlive the command; tests/functions.rs runs all steps.
                extra = ["--signature", step] if is_saved else ["--first", "init"] if has_state else []
                model = made / case if is_saved else made / f"{case}.pb"
                compare(f"{case} {step}".strip(), model, feeds, expected, work, extra)
    print(f"{passed} passed, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
