"""Cases of crates/kolo-ops/src/math."""

import numpy as np

from harness import FLOATS, INTS, array, values


def cases(a):
    for op in ["Abs", "Neg", "Sign", "Square"]:
        a.each(op, lambda d: values(d, [2, 3]))
    for op in ["Exp", "Tanh"]:
        a.each(op, lambda d: values(d, [2, 3]))
    for op in ["Add", "Sub", "Mul"]:
        a.each(op, lambda d: [values(d, [2, 3]), values(d, [3], seed=1)], label="broadcast")
        a.op(op, values("float32", [2, 3]), values("float32", [2]), label="mismatch", error=True)
    a.each("Sum", lambda d: [values(d, [2, 3]), array([0])])
