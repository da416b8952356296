"""A small ResNet on random images like those of CIFAR-10.

python examples/own-script/1_single_gpu.py
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import data


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    dataset = Images(640)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        loader = data.DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True, num_workers=2)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
