"""A small ResNet on random images like those of CIFAR-10.

sbatch launch/apptainer_ddp.sh examples/own-script/2_nothing_lost.py --out runs/safe
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import data

import hpctrain


class Images(data.Dataset):
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


def main() -> None:
    """Train, and save the weights."""
    parser = hpctrain.trainer_parser("resnet", "Train a small ResNet on random images.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    dataset = Images(640)
    with hpctrain.Run("resnet", **vars(args)) as run:
        model = run.prepare(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        for _epoch in run.epochs(args.epochs):
            for images, labels in run.batches(dataset, args.batch_size, num_workers=2):
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss)


if __name__ == "__main__":
    main()
