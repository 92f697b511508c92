"""Cases of crates/kolo-ops/src/optim: three updates from given values, dense and sparse, of both variable families."""

import numpy as np

from harness import FLOATS, Nodes, array, op_def_registry, registered_dtypes, values
from cases_state import handle, ref

DENSE = ["GradientDescent", "Momentum", "KerasMomentum", "Adam", "AdamWithAmsgrad", "AdaMax", "Adagrad", "AdagradV2",
         "AdagradDA", "ProximalAdagrad", "Adadelta", "RMSProp", "CenteredRMSProp", "Ftrl", "FtrlV2", "AddSign",
         "PowerSign", "ProximalGradientDescent"]
SPARSE = ["Momentum", "KerasMomentum", "Adagrad", "AdagradV2", "AdagradDA", "ProximalAdagrad", "Adadelta", "RMSProp",
          "CenteredRMSProp", "Ftrl", "FtrlV2", "ProximalGradientDescent"]
# Attributes to vary, each alone.
VARIANTS = {"Momentum": [{"use_nesterov": True}], "KerasMomentum": [{"use_nesterov": True}],
            "Adam": [{"use_nesterov": True}], "Adagrad": [{"update_slots": False}], "AdagradV2": [{"update_slots": False}],
            "Ftrl": [{"multiply_linear_by_lr": True}], "FtrlV2": [{"multiply_linear_by_lr": True}]}
SCALARS = {"lr": 0.125, "alpha": 0.25, "rho": 0.875, "epsilon": 0.0625, "momentum": 0.875, "beta1_power": 0.75,
           "beta2_power": 0.9375, "beta1": 0.875, "beta2": 0.96875, "l1": 0.03125, "l2": 0.0625, "l2_shrinkage": 0.125,
           "lr_power": -0.5, "sign_decay": 0.875, "logbase": 1.0, "beta": 0.875}
# Slots that must be positive, and large enough for the others.
POSITIVE = {"accum": (0.5, 2), "v": (0.5, 2), "ms": (4, 6), "vhat": (0.5, 2), "accum_update": (0.25, 1),
            "gradient_squared_accumulator": (0.5, 2), "m": (-1, 1), "mg": (-1, 1), "mom": (-1, 1), "linear": (-1, 1),
            "gradient_accumulator": (-1, 1)}


def build(op, dtype, indices=None, change=None):
    """The graph, the variables' names, and the node to run."""
    n, inputs, variables = Nodes(), [], []
    shape = [4, 2] if indices is not None else [2, 3]
    positive = dict(POSITIVE)
    if "Momentum" in op:
        positive["accum"] = (-1, 1)
    for i, arg in enumerate(op_def_registry.get(op).input_arg):
        if arg.is_ref or arg.type == 20:
            lo, hi = positive.get(arg.name, (-2, 2))
            make = ref if arg.is_ref else handle
            inputs.append(make(n, values(dtype, shape, lo, hi, seed=i), arg.name))
            variables.append(arg.name if arg.is_ref else f"read_{arg.name}")
        elif arg.name in ("grad", "delta", "gradient"):
            rows = [len(indices), 2] if indices is not None else shape
            value = values(dtype, rows, -1, 1, seed=i)
            inputs.append(n.const(f"in/{arg.name}", (change or {}).get(arg.name, value)))
        elif arg.name == "indices":
            inputs.append(n.const("in/indices", np.array(indices, np.int32 if dtype == "float32" else np.int64)))
        elif arg.name == "global_step":
            inputs.append(n.const("in/global_step", np.array(3, np.int64)))
        else:
            inputs.append(n.const(f"in/{arg.name}", (change or {}).get(arg.name, array(SCALARS[arg.name], dtype))))
    return n, inputs, variables


def update(a, op, dtype, label="", indices=None, **attrs):
    n, inputs, variables = build(op, dtype, indices)
    inits = [f"init_{v.removeprefix('read_')}" for v in variables]
    n.op("op", op, inputs, attrs)
    loose = {"float16": 1e-2, "bfloat16": 6e-2}.get(dtype)
    name = "/".join(p for p in (op, dtype, label) if p)
    a.program(name, n, [{"target": inits}] + [{"target": ["op"]}, {"fetch": variables}] * 3, ops=[op], fed=True,
              **({"rtol": loose, "atol": loose} if loose else {"rtol": 4e-6}))


def refused(a, op, label, indices=None, **change):
    n, inputs, variables = build(op, "float32", indices, change)
    inits = [f"init_{v.removeprefix('read_')}" for v in variables]
    n.op("op", op, inputs)
    a.program(f"{op}/{label}", n, [{"target": inits}, {"target": ["op"], "error": True}], ops=[op], fed=True)


def cases(a):
    for family, kinds, rows in (("Apply", DENSE, None), ("SparseApply", SPARSE, [2, 0]),
                                ("ResourceApply", DENSE, None), ("ResourceSparseApply", SPARSE, [2, 0])):
        for kind in kinds:
            op = family + kind
            if op_def_registry.get(op) is None:
                continue
            for d in registered_dtypes(op, "T"):
                if d in FLOATS:
                    update(a, op, d, indices=rows)
            for attrs in VARIANTS.get(kind, []):
                update(a, op, "float32", label="-".join(attrs), indices=rows, **attrs)
            update(a, op, "float32", label="locked", indices=rows, use_locking=True)
            if rows:
                update(a, op, "float32", label="twice", indices=[1, 3, 1])
                update(a, op, "float32", label="none", indices=[])
                refused(a, op, "range", indices=[4])
                refused(a, op, "rows", indices=[0, 1], grad=values("float32", [1, 2]))
            lr = "alpha" if "GradientDescent" in kind else "lr"
            if family.startswith("Resource"):
                refused(a, op, "lr-vector", indices=rows, **{lr: array([0.1, 0.2])})
                if not rows:
                    refused(a, op, "shape", **{"delta" if "GradientDescent" in kind else "grad": values("float32", [3])})
