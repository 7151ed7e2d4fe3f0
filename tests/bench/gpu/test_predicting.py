"""Tests the time model of `gpu --predict`: the plan that it simulates, and what it prints."""

import json
from dataclasses import replace

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE

from conveyor_bench.gpu import suite
from conveyor_bench.gpu.predicting.constants import (
    PARTS,
    DecodeKernel,
)
from conveyor_bench.gpu.predicting.tails import plan_shares
from conveyor_engine.execution.kernels import decode_plan
from conveyor_engine.execution.kernels.decode_plan import plan_decodes

DOCUMENTED = "python -m conveyor_bench gpu --predict --device h100"
H200 = PARTS["h200"]
TODAY = DecodeKernel(
    112, 71_680, 4, decode_plan._PROGRAMS_PER_PROCESSOR, decode_plan.KEYS_PER_PROGRAM, decode_plan._MOST_SHARES
)


@pytest.mark.parametrize("lengths", [[1, 64, 65, 129, 4097], [20_000]], ids=str)
def test_the_simulated_plan_is_that_of_the_device(lengths: list[int]) -> None:
    rows = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = plan_decodes(rows, num_heads=6, num_kv_heads=3, value_dim=8, sliding_window=None, num_processors=6)
    row, _, begin, end, _, _ = plan.work.tolist()
    planned = [max(0, last - first) if of >= 0 else 0 for of, first, last in zip(row, begin, end, strict=True)]
    assert plan_shares(lengths, 3, replace(H200, processors=6), TODAY) == planned


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_documented_command_compiles_and_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    suite.main(DOCUMENTED.partition(" gpu ")[2].split())
    printed = capsys.readouterr().out
    assert "today, fp8" in printed
    assert json.loads(printed.splitlines()[-1])["device"] == "h100"
