"""The work of `kolo bench gpu` in PyTorch and JAX, whichever this machine's Python has. One JSON object a case.

Models, sizes, batches, the loss and plain gradient descent are those of src/cli/bench/gpu.rs; the data is on the GPU.
TF32 is on, as in Kolo. `torch-eager` runs layer by layer, `torch` a CUDA graph of the whole step, `jax` one jitted step; of the
large models, ResNet-50 and GPT-2 in bfloat16 with weights in float (src/cli/bench/gpu_models.rs), `torch` is torch.compile.
`peers.py torch models` runs the large models alone.
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


def torch_resnet50(torch, nn):
    """ResNet-50 as torchvision has it: the stride is in the middle convolution."""

    def conv(n_in, n_out, side, stride=1):
        return [nn.Conv2d(n_in, n_out, side, stride, side // 2, bias=False), nn.BatchNorm2d(n_out)]

    class Block(nn.Module):
        def __init__(self, n_in, width, stride):
            super().__init__()
            self.body = nn.Sequential(
                *conv(n_in, width, 1), nn.ReLU(inplace=True), *conv(width, width, 3, stride), nn.ReLU(inplace=True),
                *conv(width, 4 * width, 1))
            same = n_in == 4 * width and stride == 1
            self.around = nn.Identity() if same else nn.Sequential(*conv(n_in, 4 * width, 1, stride))

        def forward(self, x):
            return torch.relu(self.body(x) + self.around(x))

    layers, n_in = [*conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for stage, n_blocks in enumerate((3, 4, 6, 3)):
        for i in range(n_blocks):
            layers.append(Block(n_in, 64 << stage, 2 if i == 0 and stage > 0 else 1))
            n_in = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def torch_gpt2(torch, nn):
    """GPT-2 with 124 million weights, its table of tokens used twice."""
    functional = torch.nn.functional
    width, heads, n_layers = 768, 12, 12

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            n, length, _ = x.shape
            parts = self.qkv(self.norm1(x)).view(n, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(50304, width), nn.Embedding(1024, width)
            self.layers, self.norm = nn.ModuleList(Layer() for _ in range(n_layers)), nn.LayerNorm(width)
            nn.init.normal_(self.tokens.weight, std=0.02)
            nn.init.normal_(self.places.weight, std=0.02)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.places.weight
            for layer in self.layers:
                x = layer(x)
            return functional.linear(self.norm(x), self.tokens.weight)

    return Model()


def torch_models(torch, nn):
    """ResNet-50 and GPT-2 in mixed precision: eager, and compiled."""
    functional = torch.nn.functional
    for name, unit, per_step in (("resnet50", "img/s", 128), ("gpt2", "tok/s", 16 * 1024)):
        for who in ("torch-eager", "torch"):
            torch.manual_seed(0)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            if name == "resnet50":
                net = torch_resnet50(torch, nn).cuda().to(memory_format=torch.channels_last)
                x = torch.rand(128, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
                y = torch.randint(1000, (128,), device="cuda")
                optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, fused=True)
            else:
                net = torch_gpt2(torch, nn).cuda()
                x, y = (torch.randint(50257, (16, 1024), device="cuda") for _ in range(2))
                optimizer = torch.optim.AdamW(net.parameters(), 6e-4, weight_decay=0.1, fused=True)
            run = torch.compile(net) if who == "torch" else net

            def step():
                with torch.autocast("cuda", torch.bfloat16):
                    out = run(x)
                    loss = functional.cross_entropy(out.view(-1, out.shape[-1]), y.view(-1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            for _ in range(5):
                step()
            show(who, name, unit, per_step / sample(step, torch.cuda.synchronize, 10, 4))
            show(who, f"{name}-memory", "GiB", torch.cuda.max_memory_allocated() / 2**30)
            del net, run, optimizer


def with_torch(only=""):
    import torch
    from torch import nn

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    if only in ("", "models"):
        torch_models(torch, nn)
    if only == "models":
        return
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


def jax_gpt2(jax, jnp):
    """The GPT-2 of torch_gpt2, weights in float, computed in bfloat16; AdamW written out."""
    width, heads, n_layers, half = 768, 12, 12, jnp.bfloat16
    keys = iter(jax.random.split(jax.random.key(0), 200))

    def dense(n_in, n_out):
        return {"w": jax.random.normal(next(keys), (n_in, n_out)) * 0.02, "b": jnp.zeros(n_out)}

    def norm():
        return {"w": jnp.ones(width), "b": jnp.zeros(width)}

    layer_sizes = (("qkv", width, 3 * width), ("out", width, width), ("up", width, 4 * width), ("down", 4 * width, width))
    params = {
        "tokens": jax.random.normal(next(keys), (50304, width)) * 0.02,
        "places": jax.random.normal(next(keys), (1024, width)) * 0.02,
        "norm": norm(),
        "layers": [{"norm1": norm(), "norm2": norm(), **{name: dense(i, o) for name, i, o in layer_sizes}}
                   for _ in range(n_layers)],
    }
    x, y = (jax.random.randint(next(keys), (16, 1024), 0, 50257) for _ in range(2))

    def apply(p, x):
        return x @ p["w"].astype(half) + p["b"].astype(half)

    def normalise(p, x):
        wide = x.astype(jnp.float32)
        wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
        return (wide * p["w"] + p["b"]).astype(half)

    def loss(p):
        at = (p["tokens"][x] + p["places"]).astype(half)
        for layer in p["layers"]:
            q, k, v = jnp.moveaxis(apply(layer["qkv"], normalise(layer["norm1"], at)).reshape(16, 1024, 3, heads, -1), 2, 0)
            seen = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
            at = at + apply(layer["out"], seen.reshape(16, 1024, width))
            at = at + apply(layer["down"], jax.nn.gelu(apply(layer["up"], normalise(layer["norm2"], at))))
        logits = (normalise(p["norm"], at) @ p["tokens"].T.astype(half)).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - chosen).mean()

    def update(state):
        p, m, v, t = state
        grads, t = jax.grad(loss)(p), t + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
        p = jax.tree.map(
            lambda p, m, v: p - 6e-4 * (m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.1 * p), p, m, v)
        return p, m, v, t

    zeros = jax.tree.map(jnp.zeros_like, params)
    step, state = jax.jit(update, donate_argnums=0), [(params, zeros, jax.tree.map(jnp.zeros_like, params), 0.0)]

    def once():
        state[0] = step(state[0])

    show("jax", "gpt2", "tok/s", 16 * 1024 / sample(once, lambda: jax.block_until_ready(state[0]), 10, 4))


def jax_resnet50(jax, jnp):
    """The network of torch_resnet50, channels last, with SGD and momentum written out."""
    half, keys = jnp.bfloat16, iter(jax.random.split(jax.random.key(0), 200))
    params, plan = [], []

    def conv(n_in, n_out, side, stride):
        deviation = (2 / side / side / n_in) ** 0.5
        params.append((jax.random.normal(next(keys), (side, side, n_in, n_out)) * deviation, jnp.ones(n_out), jnp.zeros(n_out)))
        plan.append((side, stride))
        return len(params) - 1

    stem, blocks, n_in = conv(3, 64, 7, 2), [], 64
    for stage, n_blocks in enumerate((3, 4, 6, 3)):
        for i in range(n_blocks):
            width, stride = 64 << stage, 2 if i == 0 and stage > 0 else 1
            body = [conv(n_in, width, 1, 1), conv(width, width, 3, stride), conv(width, 4 * width, 1, 1)]
            blocks.append((body, None if n_in == 4 * width else conv(n_in, 4 * width, 1, stride)))
            n_in = 4 * width
    params.append((jax.random.normal(next(keys), (2048, 1000)) * 0.02, jnp.zeros(1000)))
    x = jax.random.uniform(next(keys), (128, 224, 224, 3))
    y = jax.random.randint(next(keys), (128,), 0, 1000)

    def layer(p, i, x):
        (w, scale, offset), (side, stride) = p[i], plan[i]
        pad = [(side // 2, side // 2)] * 2
        x = jax.lax.conv_general_dilated(x, w.astype(half), (stride, stride), pad, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        wide = x.astype(jnp.float32)
        mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + offset).astype(half)

    def loss(p):
        at = jax.nn.relu(layer(p, stem, x.astype(half)))
        at = jax.lax.reduce_window(at, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for (a, b, c), around in blocks:
            inner = layer(p, c, jax.nn.relu(layer(p, b, jax.nn.relu(layer(p, a, at)))))
            at = jax.nn.relu(inner + (at if around is None else layer(p, around, at)))
        w, b = p[-1]
        logits = (at.mean((1, 2)) @ w.astype(half) + b.astype(half)).astype(jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(128), y])

    def update(state):
        p, m = state
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, jax.grad(loss)(p))
        return jax.tree.map(lambda p, m: p - 0.01 * m, p, m), m

    step, state = jax.jit(update, donate_argnums=0), [(params, jax.tree.map(jnp.zeros_like, params))]

    def once():
        state[0] = step(state[0])

    show("jax", "resnet50", "img/s", 128 / sample(once, lambda: jax.block_until_ready(state[0]), 10, 4))


def with_jax(only=""):
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_default_matmul_precision", "tensorfloat32")
    if only in ("", "models"):
        jax_gpt2(jax, jnp)
        jax_resnet50(jax, jnp)
    if only == "models":
        return
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
    {"torch": with_torch, "jax": with_jax}[sys.argv[1]](*sys.argv[2:3])
