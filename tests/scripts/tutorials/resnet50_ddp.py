"""torchvision's ResNet-50 by DDP on random images like CIFAR, as in HPC_helper and in NERSC's tutorial."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, ranks, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")

torch.manual_seed(0)
images = datasets.FakeData(
    size=8 * ranks, image_size=(3, 32, 32), num_classes=10, transform=transforms.ToTensor()
)
sampler = DistributedSampler(images, shuffle=True)
loader = DataLoader(images, batch_size=4, sampler=sampler)
model = models.resnet50(num_classes=10).to(device)
model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sampler.set_epoch(0)
for pixels, labels in loader:
    loss = nn.functional.cross_entropy(model(pixels.to(device)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loss = loss.detach() / ranks
dist.all_reduce(loss)
print(f"rank {rank} of {ranks} loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
