"""A PyTorch program as its users write it: reads what torchrun would set, trains by DistributedDataParallel over Gloo.

usage: torch_program.py [FAIL]   FAIL: rank 1 raises an error in its first start
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

ranks = torch.tensor([float(rank), 1.0])
dist.all_reduce(ranks)
assert ranks.tolist() == [size * (size - 1) / 2, size], ranks

if "FAIL" in sys.argv and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("this rank has a mistake")

torch.manual_seed(rank)  # DDP gives all ranks the weights of rank 0.
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
for step in range(60):
    x = torch.randn(16, 4)
    loss = ((model(x) - x @ truth) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = [torch.empty_like(weights) for _ in range(size)]
dist.all_gather(everyone, weights)
assert all(torch.equal(other, weights) for other in everyone), everyone
assert loss.item() < 0.05, loss
dist.barrier()
print(f"torch rank {rank} of {size}, local {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}: trained", flush=True)
dist.destroy_process_group()
