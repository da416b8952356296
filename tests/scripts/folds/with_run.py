"""Cross validation with hpctrain.Run: three runs, and work after them."""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import hpctrain

POINTS = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
EXAMPLES = [(point, int(point.sum() > 0)) for point in POINTS]


def train(fold: int) -> torch.nn.Module:
    """Train on what is not in the fold; the second fold ends by itself, the third uses its best weights."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    training = [example for number, example in enumerate(EXAMPLES) if number % 3 != fold]
    held_out = EXAMPLES[fold::3]
    with hpctrain.Run("folds", out=f"runs/{fold}", resume="auto", device="cpu", checkpoint_every=2) as run:
        parallel = run.prepare(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5, momentum=0.9)
        run.track(model=parallel, optimizer=optimizer)
        for epoch in run.epochs(3):
            for points, labels in run.batches(training, 8):
                loss = cross_entropy(parallel(points), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss)
            if fold == 1 and epoch == 2:
                break
            run.score(f1=1 / epoch)  # the first one is the best
        if fold == 2:
            run.load_best()
        parallel.eval()
        if fold != 1:  # it has ended before the score of its last epoch
            batches = run.evaluation_batches(held_out, 8)
            run.score(held_out=[parallel(points).argmax(1) == labels for points, labels in batches])
    return model


torch.manual_seed(0)
models = [train(fold) for fold in range(3)]
answer = sum(model(POINTS).double().sum().item() for model in models) + torch.rand(1).item()
with Path("after.txt").open("a") as file:
    file.write(f"{answer!r}\n")
