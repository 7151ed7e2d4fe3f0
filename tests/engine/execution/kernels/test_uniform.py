"""Checks that the kernel that hashes seeds and positions gives the same numbers as the host."""

import numpy as np
import torch
from tests.engine.execution.interpreter import DEVICE, ON_DEVICE

from conveyor_engine.execution.kernels import uniform
from conveyor_engine.execution.sampling import draw

pytestmark = ON_DEVICE


def test_each_entry_gets_the_number_of_its_row_s_seed_and_its_position() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15], dtype=np.uint64)
    rows = np.arange(300) % len(seeds)
    positions = np.arange(300) ** 3 + 2**31
    expected = draw.uniform_numbers(seeds[rows], positions.astype(np.uint64)).astype(np.float32)
    on_device = [torch.from_numpy(values).to(DEVICE) for values in (seeds.view(np.int64)[:, None], rows, positions)]
    assert uniform.uniform_numbers(*on_device)[:, 0].tolist() == expected.tolist()
