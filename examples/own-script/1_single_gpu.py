"""Train a small network on photos in class folders, on one GPU.

python examples/own-script/1_single_gpu.py --data photos
"""

import argparse

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


def make_model(classes: int) -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 8 * 8, classes)]
    return nn.Sequential(*block(1, 16), *block(16, 32), *head)


def load(folder: str, *augmentation: nn.Module) -> ImageFolder:
    steps = [transforms.Grayscale(), transforms.Resize((32, 32)), *augmentation, transforms.ToTensor()]
    return ImageFolder(folder, transforms.Compose(steps))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    hits = [model(images.to(device)).argmax(1) == labels.to(device) for images, labels in loader]
    model.train()
    return torch.cat(hits).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_set = load(f"{args.data}/train", transforms.RandomRotation(10))
    val_set = load(f"{args.data}/val")
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, num_workers=2)
    val_loader = DataLoader(val_set, args.batch_size, num_workers=2)

    model = make_model(len(train_set.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, args.epochs)

    history = []
    for epoch in range(1, args.epochs + 1):
        for images, labels in train_loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        history.append(evaluate(model, val_loader, device))
        print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {history[-1]:.4f}")
        if history[-1] == max(history):
            torch.save(model.state_dict(), "best.pt")

    plt.plot(history)
    plt.ylabel("accuracy on the validation set")
    plt.savefig("accuracy.png")


if __name__ == "__main__":
    main()
