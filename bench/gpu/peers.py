"""The work of `kolo bench gpu` in PyTorch and JAX, whichever this machine's Python has. One JSON object a case.

Models, sizes, batches, the loss and plain gradient descent are those of src/cli/bench/gpu.rs; the data lies on the card.
TF32 is on, as in Kolo. `torch-eager` runs layer by layer, `torch` a CUDA graph of the whole step, `jax` one jitted step.
"""

import json
import sys
import time


def show(who, case, unit, value):
    print(json.dumps({"who": who, "case": case, "unit": unit, "value": value}), flush=True)


def sample(call, wait, n, rounds):
    times = []
    for i in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(n):
            call()
        wait()
        if i > 0:
            times.append((time.perf_counter() - start) / n)
    return sorted(times)[len(times) // 2]


MODELS = (("mlp-100", 100), ("mlp-4096", 1024), ("lenet-64", 64), ("lenet-1024", 1024))


def with_torch():
    import torch
    from torch import nn

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    wait = torch.cuda.synchronize
    a, b = (torch.rand(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    seconds = sample(lambda: torch.matmul(a, b), wait, 100, 3)
    show("torch-eager", "matmul-8192-bf16", "TFLOP/s", 2 * 8192**3 / seconds / 1e12)

    def model(name):
        if name == "mlp-100":
            return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
        if name == "mlp-4096":
            return nn.Sequential(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(7 * 7 * 64, 512), nn.ReLU(), nn.Linear(512, 10))

    for name, batch in MODELS:
        net = model(name).cuda()
        x = torch.rand(batch, 784, device="cuda")
        y = torch.randint(10, (batch,), device="cuda")
        loss_of = nn.CrossEntropyLoss()
        params = list(net.parameters())

        def step():
            loss = loss_of(net(x), y)
            grads = torch.autograd.grad(loss, params)
            with torch.no_grad():
                torch._foreach_add_(params, grads, alpha=-0.01)

        show("torch-eager", name, "us/step", sample(step, wait, 200, 5) * 1e6)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        show("torch", name, "us/step", sample(graph.replay, wait, 200, 10) * 1e6)


def with_jax():
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_default_matmul_precision", "tensorfloat32")
    keys = iter(jax.random.split(jax.random.key(0), 64))
    a, b = (jax.random.uniform(next(keys), (8192, 8192)).astype(jnp.bfloat16) for _ in range(2))
    product = jax.jit(lambda a, b: a @ b)
    last = [product(a, b)]

    def multiply():
        last[0] = product(a, b)

    show("jax", "matmul-8192-bf16", "TFLOP/s",
         2 * 8192**3 / sample(multiply, lambda: last[0].block_until_ready(), 100, 3) / 1e12)

    def dense(n_in, n_out):
        return [jax.random.normal(next(keys), (n_in, n_out)) * (2 / n_in) ** 0.5, jnp.zeros(n_out)]

    def conv(n_in, n_out):
        return [jax.random.normal(next(keys), (5, 5, n_in, n_out)) * (2 / 25 / n_in) ** 0.5, jnp.zeros(n_out)]

    def mlp(params, x):
        for i, (w, b) in enumerate(params):
            x = x @ w + b
            if i + 1 < len(params):
                x = jax.nn.relu(x)
        return x

    def lenet(params, x):
        x = x.reshape(-1, 28, 28, 1)
        for w, b in params[:2]:
            x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
            x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return mlp(params[2:], x.reshape(x.shape[0], -1))

    for name, batch in MODELS:
        if name == "mlp-100":
            net, params = mlp, [dense(784, 100), dense(100, 10)]
        elif name == "mlp-4096":
            net, params = mlp, [dense(784, 4096), dense(4096, 4096), dense(4096, 10)]
        else:
            net, params = lenet, [conv(1, 32), conv(32, 64), dense(7 * 7 * 64, 512), dense(512, 10)]
        x = jax.random.uniform(next(keys), (batch, 784))
        y = jax.random.randint(next(keys), (batch,), 0, 10)

        def loss(params):
            return -jnp.mean(jax.nn.log_softmax(net(params, x))[jnp.arange(batch), y])

        step = jax.jit(lambda p: jax.tree.map(lambda w, g: w - 0.01 * g, p, jax.grad(loss)(p)), donate_argnums=0)
        state = [step(params)]

        def once():
            state[0] = step(state[0])

        show("jax", name, "us/step", sample(once, lambda: jax.block_until_ready(state[0]), 200, 10) * 1e6)


if __name__ == "__main__":
    {"torch": with_torch, "jax": with_jax}[sys.argv[1]]()
