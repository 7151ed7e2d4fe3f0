"""Tests the comparison before the measurement: the tokens of the measured model in its own dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch

from conveyor_bench.comparing import checks
from conveyor_bench.comparing.systems import HfStatic, Prompts, Run, generate, write_model
from conveyor_bench.comparing.turns import random_prompts


class Other:
    """A system that returns another system's tokens with one token changed."""

    def __init__(self, system: Any, row: int, place: int) -> None:
        self._system, self._row, self._place = system, row, place

    def start(self, prompts: Prompts, output_tokens: int) -> Run:
        outputs = generate(self._system, prompts, output_tokens)
        outputs[self._row][self._place] ^= 1
        yield output_tokens
        return outputs


def test_a_token_that_rounding_cannot_choose_stops_the_benchmark(tmp_path: Path) -> None:
    write_model(tmp_path, "tiny", torch.bfloat16)
    peer, prompts = HfStatic(tmp_path, "bfloat16"), random_prompts(3, (9,), 1000, 1)
    gaps = checks.check_gaps(tmp_path, {"right": peer}, prompts, 6)
    assert 0 <= gaps["right"] <= checks.GAP_AT_MOST
    for row, place in ((0, 0), (2, 5)):
        with pytest.raises(SystemExit, match=r"tokens of \['wrong'\]"):
            checks.check_gaps(tmp_path, {"right": peer, "wrong": Other(peer, row, place)}, prompts, 6)
