"""A user's own script: PyTorch DDP with the variables that torchrun sets, independent of hpctrain."""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
rank, size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
device = (
    torch.device("cuda", local_rank % torch.cuda.device_count())
    if torch.cuda.is_available()
    else torch.device("cpu")
)

torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 8, device=device)
targets = inputs.sum(1, keepdim=True)
for _ in range(5):
    loss = nn.functional.mse_loss(model(inputs[rank::size]), targets[rank::size])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss.detach_())
print(f"rank {rank} of {size} loss {loss.item() / size:.6f}", flush=True)
# Gloo's threads live as long as the DDP model. A thread that holds a tensor when Python exits aborts the
# process.
del model
gc.collect()
dist.destroy_process_group()
