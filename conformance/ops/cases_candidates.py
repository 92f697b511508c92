"""Cases of candidate samplers: the classes are TensorFlow's, word for word, over several runs."""

from harness import Nodes, array

L = lambda x: array(x, "int64")


def sampler(a, op, label, n_true=1, runs=2, **attrs):
    nodes = Nodes()
    classes = L([[0] * n_true, list(range(n_true)), [2] * n_true])
    nodes.op("op", op, [nodes.const("in/0", classes)], {"num_true": n_true, **attrs})
    fetch = ["op", "op:1", "op:2"]
    a.program(f"{op}/{label}", nodes, [{"fetch": fetch}] * runs, rtol=1e-5, atol=1e-7)


def cases(a):
    for op in ("UniformCandidateSampler", "LogUniformCandidateSampler", "LearnedUnigramCandidateSampler"):
        for unique in (False, True):
            kind = "unique" if unique else "any"
            sampler(a, op, kind, num_sampled=10, unique=unique, range_max=37, seed=7, seed2=11)
            sampler(a, op, kind + "-power", n_true=2, num_sampled=6, unique=unique, range_max=64, seed=3, seed2=0)
        sampler(a, op, "all-of-them", num_sampled=5, unique=True, range_max=5, seed=1, seed2=2, runs=3)
    weights = [0.5, 3.0, 1.0, 0.0, 7.5, 2.0, 1.0]
    for unique in (False, True):
        kind = "unique" if unique else "any"
        sampler(a, "FixedUnigramCandidateSampler", kind, num_sampled=5, unique=unique, range_max=7, unigrams=weights, seed=7, seed2=11)
    sampler(a, "FixedUnigramCandidateSampler", "distortion", num_sampled=5, unique=False, range_max=8, unigrams=weights, distortion=0.75,
            num_reserved_ids=1, seed=7, seed2=11)
    sampler(a, "FixedUnigramCandidateSampler", "shard", num_sampled=3, unique=False, range_max=3, unigrams=weights, num_reserved_ids=1,
            num_shards=2, shard=1, seed=7, seed2=11)
    sampler(a, "AllCandidateSampler", "all", num_sampled=4, unique=True)
    kw = {"num_true": 1, "num_sampled": 3, "seed": 1, "seed2": 1}
    a.op("UniformCandidateSampler", L([[0]]), label="range", unique=True, range_max=2, error=True, **kw)
    a.op("UniformCandidateSampler", L([[5]]), label="class", unique=False, range_max=5, error=True, **kw)
    a.op("UniformCandidateSampler", L([[0, 1]]), label="columns", unique=False, range_max=5, error=True, **kw)
    a.op("FixedUnigramCandidateSampler", L([[0]]), label="weights", unique=False, range_max=2, unigrams=[1.0], error=True, **kw)
    a.op("ComputeAccidentalHits", L([[4, 1], [9, 4], [0, 2]]), L([1, 4, 7, 4]), num_true=2)
    a.op("ComputeAccidentalHits", L([[4, 1]]), L([7]), label="none", num_true=2)
    a.op("ComputeAccidentalHits", L([[4, 1]]), L([7]), label="columns", num_true=1, error=True)
