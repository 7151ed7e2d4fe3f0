"""Tests the random weights of the stage `weights`."""

import pytest
import torch

from conveyor_bench.gpu.weight_formats import FORMATS, make_weights

# Of a number with its scales, of which those of floating point have 16 bits here; without scales for a whole row.
BITS = {"INT8": 8, "FP8": 8, "FP8, blocks of 128": 8.125, "4 bits, groups of 32": 4.5, "4 bits, groups of 128": 4.125}
BITS |= {"AWQ": 4.1875, "NVFP4": 4.5, "MXFP4": 4.5, "Q4_K": 4.625, "Q5_K": 8.625, "Q6_K": 8.5625}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_its_bits(name: str) -> None:
    packed = make_weights(name, (8, 1024), torch.device("cpu"), torch.float16)
    assert packed is not None
    scales, factors = packed.scales, packed.factors
    of_row = scales.nbytes if len(scales) == 1 else factors.nbytes if factors is not None and len(factors) == 1 else 0
    assert 8 * (packed.num_bytes - of_row) / packed.out_features / packed.in_features == BITS[name]


@pytest.mark.parametrize(("name", "columns"), [("Q4_K", 320), ("NVFP4", 24), ("AWQ", 64)])
def test_groups_must_divide_the_inputs(name: str, columns: int) -> None:
    assert make_weights(name, (8, columns), torch.device("cpu"), torch.float32) is None
