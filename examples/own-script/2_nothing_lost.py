"""Train a small network on photos in class folders, on any number of GPUs; losing nothing.

sbatch launch/apptainer_ddp.sh examples/own-script/2_nothing_lost.py --data photos --out runs/photos
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchvision import transforms
from torchvision.datasets import ImageFolder

import hpctrain


def make_model(classes: int) -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 8 * 8, classes)]
    return nn.Sequential(*block(1, 16), *block(16, 32), *head)


def load(folder: str, *augmentation: nn.Module) -> ImageFolder:
    steps = [transforms.Grayscale(), transforms.Resize((32, 32)), *augmentation, transforms.ToTensor()]
    return ImageFolder(folder, transforms.Compose(steps))


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable) -> list[Tensor]:
    model.eval()
    hits = [model(images).argmax(1) == labels for images, labels in batches]
    model.train()
    return hits


def main() -> None:
    parser = hpctrain.trainer_parser("photos", "Train a small network on photos in class folders.")
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    train_set = load(f"{args.data}/train", transforms.RandomRotation(10))
    val_set = load(f"{args.data}/val")

    with hpctrain.Run("photos", **vars(args)) as run:
        model = run.prepare(make_model(len(train_set.classes)))
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        scheduler = CosineAnnealingLR(optimizer, args.epochs)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        for _epoch in run.epochs(args.epochs):
            for images, labels in run.batches(train_set, args.batch_size, num_workers=2):
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss)
            scheduler.step()
            run.score(accuracy=evaluate(model, run.evaluation_batches(val_set, args.batch_size)))


if __name__ == "__main__":
    main()
