"""The image classifiers, which all trainers share."""

import torch
from torch import Tensor, nn

from hpctrain.vision.data import CLASSES


class MnistNet(nn.Module):
    """PyTorch's MNIST example (github.com/pytorch/examples, mnist/main.py) without its two dropout layers.

    Each rank would draw its own dropout masks, so the weights would depend on the number of ranks.
    """

    def __init__(self, channels: int = 1, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [b, channels, 28, 28] float32 to logits [b, classes]."""
        x = torch.relu(self.conv1(images))
        x = torch.relu(self.conv2(x))
        x = torch.max_pool2d(x, 2).flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))


class ResNet50(nn.Module):
    """ResNet-50 from the library transformers (v1.5: the stride is in the 3 x 3 convolution).

    Batch normalization uses the mean and variance of a rank's own images, so the weights depend on the number
    of ranks. Each rank has its own running statistics; every trainer copies rank 0's to all ranks before it
    evaluates and saves.
    """

    def __init__(self, channels: int = 1, classes: int = CLASSES) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification  # takes seconds to import

        # num_labels is an option of the base class.
        config = ResNetConfig(num_channels=channels, num_labels=classes)  # type: ignore[call-arg]
        self.net = ResNetForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [b, channels, h, w] float32 to logits [b, classes]."""
        return self.net(images).logits
