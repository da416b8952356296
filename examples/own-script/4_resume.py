"""A small ResNet on random images like those of CIFAR-10: any number of GPUs, and nothing lost.

sbatch launch/apptainer_ddp.sh examples/own-script/4_resume.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import hpctrain


class Images(Dataset):
    """Random images [3, 32, 32] of ten classes: those of class c are brighter in the rows from 3 c on."""

    def __init__(self, number: int) -> None:
        self.pixels = torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        self.labels = torch.arange(number) % 10
        for image, label in zip(self.pixels, self.labels.tolist(), strict=True):
            image[:, 3 * label : 3 * label + 3] += 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.pixels[index]
        return image.flip(-1) if torch.rand(1) < 0.5 else image, self.labels[index]


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.around = nn.Conv2d(before, after, 1, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        """Half the height and width."""
        return torch.relu(self.inner(images) + self.around(images))


def make_model() -> nn.Module:
    """The ResNet, with random weights."""
    pool = [nn.AdaptiveAvgPool2d((8, 1)), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 8, 10)]
    return nn.Sequential(Block(3, 16), Block(16, 32), *pool)


def main(world: hpctrain.World) -> None:
    """Train, and save the weights."""
    parser = hpctrain.trainer_parser("resnet", "Train a small ResNet on random images.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    device = hpctrain.choose_device(world)

    def compute_loss(images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(parallel(images.to(device)), labels.to(device))

    with hpctrain.process_group(world, device):
        run = hpctrain.Run(world, "resnet", args, device)
        torch.manual_seed(args.seed)
        model = make_model().to(device)
        parallel = DistributedDataParallel(model) if world.size > 1 else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        dataset = Images(640)
        steps = hpctrain.steps_per_epoch(len(dataset), args.batch_size, world)
        if state := run.resume(device, args.epochs, model):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        hpctrain.settle_buckets(parallel, lambda: compute_loss(*dataset[:1]))
        for epoch in range(run.epoch + 1, args.epochs + 1):
            done = run.start_epoch(epoch, steps, args.batch_size)
            loader = hpctrain.data_loader(
                dataset, args.batch_size, args.seed, epoch, world, skip=done, num_workers=2
            )
            for step, (images, labels) in enumerate(run.time_data(loader), done):
                hpctrain.seed_step(args.seed, epoch, step, world)
                loss = compute_loss(images, labels)
                optimizer.zero_grad()
                loss.backward()
                run.check_gradients()
                optimizer.step()
                run.step(loss.detach())
                if run.must_save():
                    run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            run.end_epoch()
            run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        run.finish(model)


if __name__ == "__main__":
    hpctrain.main(main)
