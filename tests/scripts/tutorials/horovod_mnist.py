"""MNIST by Horovod and torchvision, as in the tutorial "Horovod on Neuron"."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

hvd.init()
torch.manual_seed(42)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
device = "cuda" if torch.cuda.is_available() else "cpu"

images = datasets.MNIST(".", train=True, download=True, transform=transforms.ToTensor())
sampler = DistributedSampler(images, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(images, batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Conv2d(1, 4, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 12 * 12, 10)).to(
    device
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)

sampler.set_epoch(0)
for pixels, labels in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(pixels.to(device)), labels.to(device))
    loss.backward()
    optimizer.step()
print(f"rank {hvd.rank()} of {hvd.size()} loss {hvd.allreduce(loss.detach()).item():.6f}", flush=True)
