"""Computes the convolutions that cut an image into patches as one matrix product each.

`tasks.generate` uses it for encoders of images. oneDNN computes such a convolution over separate patches, as in
Qwen-VL, many times slower than the product (ADR 173).
"""

import math
from itertools import chain

import torch
from torch import nn


class PatchProduct(nn.Module):
    """A convolution whose windows neither overlap nor leave gaps."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        self._sides = convolution.kernel_size

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: (N, channels, ...). Returns (N, outputs, ...), with one place for each patch."""
        sides, number = self._sides, len(self._sides)
        counts = [pixels // side for pixels, side in zip(images.shape[2:], sides, strict=True)]
        for axis, (count, side) in enumerate(zip(counts, sides, strict=True), start=2):
            images = images.narrow(axis, 0, count * side)  # a convolution ignores the rest too
        cut = images.reshape(*images.shape[:2], *chain.from_iterable(zip(counts, sides, strict=True)))
        places, within = [2 + 2 * axis for axis in range(number)], [3 + 2 * axis for axis in range(number)]
        patches = cut.permute(0, *places, 1, *within).reshape(len(images), math.prod(counts), -1)
        products = nn.functional.linear(patches, self.weight.flatten(1), self.bias)
        return products.transpose(1, 2).reshape(len(images), -1, *counts)


def replace_convolutions(encoder: nn.Module) -> None:
    """Replace the convolutions of an encoder that cut images into patches."""
    for parent in list(encoder.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, nn.Conv2d | nn.Conv3d) and _cuts_patches(part):
                setattr(parent, name, PatchProduct(part))


def _cuts_patches(part: nn.Conv2d | nn.Conv3d) -> bool:
    is_plain = part.groups == 1 and set(part.dilation) == {1} and (part.padding == "valid" or set(part.padding) == {0})
    return is_plain and part.stride == part.kernel_size
