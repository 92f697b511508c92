"""PyTorch's side of the training benches, eager.

usage: torch_peer.py BENCH [--check]
"""

import argparse
import gzip
import os
import subprocess
import sys
import time
from pathlib import Path

import measure

DATA = Path(__file__).resolve().parents[2] / "data"


def images_and_labels():
    import torch

    images, labels = measure.mnist_bytes()
    return torch.from_numpy(images.copy()), torch.from_numpy(labels.astype("int64"))


def batches(columns, size):
    """Shuffled batches for ever, gathered from memory as a data loader without workers would."""
    import torch

    n = len(columns[0])
    while True:
        order = torch.randperm(n)
        for start in range(0, n - size + 1, size):
            rows = order[start : start + size]
            yield [column[rows] for column in columns]


def steps(model, optimizer, prepare, data):
    from torch.nn import functional as F

    def call():
        x, y = prepare(next(data))
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return [1.0 / s for s in measure.seconds_per_call(call)]


def pixels(batch):
    return batch[0].float().mul_(1.0 / 255.0), batch[1]


def mlp():
    from torch import nn

    return nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))


def train_mnist():
    import torch

    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    yield "train", "steps/s", "higher", steps(model, sgd, pixels, batches(images_and_labels(), 100))


def lenet():
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(7 * 7 * 64, 512), nn.ReLU(), nn.Linear(512, 10),
    )


def train_lenet():
    import torch

    model = lenet()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    yield "train", "steps/s", "higher", steps(model, sgd, pixels, batches(images_and_labels(), 64))


def language_model():
    """A transformer, and the windows of text that it learns from."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    context, width, heads, layers = 64, 128, 4, 4
    text = gzip.open(DATA / "shakespeare.txt.gz", "rt").read()
    known = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([known[c] for c in text], dtype=torch.int64)
    n = (len(tokens) - 1) // context
    columns = tokens[: n * context].view(n, context), tokens[1 : n * context + 1].view(n, context)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = (p.view(b, t, heads, width // heads).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(b, t, width))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.characters, self.places = nn.Embedding(len(known), width), nn.Parameter(0.02 * torch.randn(context, width))
            self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
            self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, len(known))

        def forward(self, x):
            return self.logits(self.norm(self.blocks(self.characters(x) + self.places))).flatten(0, 1)

    return Model(), columns


def train_lm():
    import torch

    model, columns = language_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    prepare = lambda batch: (batch[0], batch[1].flatten())
    yield "train", "steps/s", "higher", steps(model, adamw, prepare, batches(columns, 32))


def first_step():
    import torch

    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = pixels(next(batches(images_and_labels(), 100)))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    sgd.step()


def startup():
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, __file__, "--first-step"], check=True)
        samples.append(1e3 * (time.perf_counter() - start))
    yield "first-step", "ms", "lower", samples


BENCHES = {"train-mnist": train_mnist, "train-lenet": train_lenet, "train-lm": train_lm, "startup": startup}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", nargs="?", choices=list(BENCHES))
    parser.add_argument("--check", action="store_true", help="make one step and stop")
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.first_step:
        return first_step()
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if o.check:
        first_step()
        print(f"PyTorch {torch.__version__} works.")
        return
    if not o.bench:
        parser.error("which bench?")
    for case, unit, better, samples in BENCHES[o.bench]():
        measure.report(o.bench, case, unit, better, samples, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
