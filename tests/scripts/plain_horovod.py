"""A user's own script: Horovod, which gets its ranks from horovodrun or MPI, independent of hpctrain."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
model = nn.Linear(8, 1).to(device)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
inputs = torch.randn(64, 8, device=device)
targets = inputs.sum(1, keepdim=True)
for _ in range(5):
    loss = nn.functional.mse_loss(model(inputs[hvd.rank() :: hvd.size()]), targets[hvd.rank() :: hvd.size()])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loss = hvd.allreduce(loss.detach(), name="loss")
print(f"rank {hvd.rank()} of {hvd.size()} loss {loss.item():.6f}", flush=True)
