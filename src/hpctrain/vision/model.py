"""The models, the same for every trainer."""

import torch
from torch import Tensor, nn

from hpctrain.vision.data import CLASSES


class MnistNet(nn.Module):
    """The convolutional net of PyTorch's classic MNIST example, less its two dropout layers.

    Dropout draws its masks on each rank, so the weights would depend on how many ranks share the batch.
    Images [b, 1, 28, 28] float32 in, logits [b, 10] out. Source: github.com/pytorch/examples, mnist/main.py.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits."""
        x = torch.relu(self.conv1(images))
        x = torch.relu(self.conv2(x))
        x = torch.max_pool2d(x, 2).flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))


class ResNet50(nn.Module):
    """ResNet-50 of the library transformers (v1.5: the stride is in the 3 x 3 convolution) for grey images.

    Images [b, 1, h, w] float32 in, logits [b, 10] out. Its batch normalisation takes the mean and the variance of the
    images that one rank has of a batch, so the weights depend on the number of ranks; and each rank has running
    statistics of its own, of which rank 0's count: every trainer takes them before it evaluates and saves.
    """

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification  # takes seconds: only where it is used

        self.net = ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits."""
        return self.net(images).logits
