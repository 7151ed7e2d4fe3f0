"""Checks that the product of an encoder's patches is the convolution that it replaces."""

import pytest
import torch
from torch import nn

from conveyor_engine.execution.models.patches import PatchProduct, replace_convolutions


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(3, 8, 4, 4), (2, 3, 12, 20)),
        (nn.Conv2d(3, 8, 4, 4, padding="valid", bias=False), (1, 3, 15, 9)),  # pixels behind the last patch are ignored
        (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False), (30, 3, 2, 4, 4)),
    ],
)
def test_a_product_of_patches_is_the_convolution(convolution: nn.Conv2d | nn.Conv3d, shape: tuple[int, ...]) -> None:
    encoder = nn.Sequential(nn.Identity(), convolution)
    images = torch.rand(shape)
    expected = encoder(images)
    replace_convolutions(encoder)
    assert isinstance(encoder[1], PatchProduct)
    assert encoder[1].weight is convolution.weight
    torch.testing.assert_close(encoder(images), expected)


def test_other_convolutions_stay() -> None:
    encoder = nn.Sequential(
        nn.Conv2d(4, 8, 3, 3, padding=1), nn.Conv2d(8, 8, 3, 2), nn.Conv2d(8, 8, 2, 2, groups=2), nn.Conv1d(8, 8, 2, 2)
    )
    replace_convolutions(encoder)
    assert not [part for part in encoder.modules() if isinstance(part, PatchProduct)]
