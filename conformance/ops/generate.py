#!/usr/bin/env python3
"""Makes the golden files that tests/golden_ops checks Kolo against, with TensorFlow.

usage: generate.py --out FOLDER [--only TEXT] [AREA...]

Writes FOLDER/AREA.pb.gz for every area (all of them if none is named), and, unless areas are named, op_defs.txt.gz (the
signatures of TensorFlow's ops) and counts.txt (how many cases each op has). --only keeps the cases whose name contains
TEXT. The exit status is 1 if TensorFlow refused a case that was meant to work, or took one that was not.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA")
    parser.add_argument("--out", required=True)
    parser.add_argument("--only")
    o = parser.parse_args()
    from harness import Area
    import op_defs

    known = sorted(p.stem.removeprefix("cases_") for p in HERE.glob("cases_*.py"))
    for name in o.areas:
        if name not in known:
            parser.error(f"no area '{name}'; there are {', '.join(known)}")
    os.makedirs(o.out, exist_ok=True)
    failures, forward, gradient, n = [], {}, {}, 0
    for name in o.areas or known:
        area = Area(name, o.only)
        importlib.import_module(f"cases_{name}").cases(area)
        area.save(o.out)
        failures += area.failures
        n += len(area.written)
        print(f"{name}: {len(area.written)} cases", flush=True)
        for total, part in ((forward, area.forward), (gradient, area.gradient)):
            for op, count in part.items():
                total[op] = total.get(op, 0) + count
    if not o.areas and not o.only:
        with open(os.path.join(o.out, "counts.txt"), "w") as f:
            f.write("# Made by conformance/ops/generate.py: op, cases, cases that compare gradients.\n")
            f.writelines(f"{op} {forward[op]} {gradient.get(op, 0)}\n" for op in sorted(forward))
        op_defs.write(os.path.join(o.out, "op_defs.txt.gz"))
    for f in failures:
        print(f, file=sys.stderr)
    print(f"{n} cases written to {o.out}; {len(failures)} could not be made")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
