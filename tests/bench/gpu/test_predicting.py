"""Tests the time model of `gpu --predict`: the plan that it simulates, and what it prints."""

import json
from dataclasses import replace

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE

from conveyor_bench.gpu import suite
from conveyor_bench.gpu.predicting import command
from conveyor_bench.gpu.predicting.constants import (
    BEFORE,
    DECODES_BEFORE,
    PARTS,
    QWEN3_06B,
    DecodeKernel,
)
from conveyor_bench.gpu.predicting.model import System, draw_lengths, predict, time_step
from conveyor_bench.gpu.predicting.tails import count_blocks_at_once, find_efficiency, plan_shares
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


def test_blocks_at_once_follow_from_registers_and_shared_memory() -> None:
    assert count_blocks_at_once(H200, DECODES_BEFORE) == 3
    assert count_blocks_at_once(H200, replace(DECODES_BEFORE, registers=200)) == 2
    assert count_blocks_at_once(H200, replace(DECODES_BEFORE, shared_bytes=30_000, registers=64)) == 7


def test_rows_of_unlike_lengths_leave_processors_idle_at_the_end() -> None:
    unlike = [500] * 255 + [32_768]
    before, today = (find_efficiency(unlike, 8, 512, H200, kernel) for kernel in (DECODES_BEFORE, TODAY))
    assert before + 0.05 < today < 1


def test_the_model_predicts_the_review_s_figures() -> None:
    """Milliseconds of 256 decodes, and tokens a second of the whole bench, at 0.75 of a copy's bandwidth."""
    system = System(H200, QWEN3_06B, BEFORE, 512, lambda _: 0.75)
    parts = time_step(system, [850] * 256, [], 0.75)
    assert parts["decode attention"] == pytest.approx(8.09, abs=0.2)
    assert parts["products"] == pytest.approx(0.76, abs=0.02)
    assert sum(parts.values()) == pytest.approx(9.66, abs=0.25)
    found = predict(system, draw_lengths())
    assert (found.output_tokens, found.num_steps) == (133_966, pytest.approx(1040, abs=10))
    assert found.tokens_per_second == pytest.approx(21_100, rel=0.01)
    assert found.seconds == pytest.approx(sum(found.parts.values()))


def test_the_last_line_is_json_and_a_missed_bar_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "compile_decodes", lambda _: dict.fromkeys(command.BARS, TODAY))
    monkeypatch.setattr(command, "FRACTIONS", (0.75,))
    code = suite.main(["--predict", "--device", "h200"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["predicted_output_tokens_per_second"] == told["of_each"]["today bfloat16 0.75"] > 20_000
    assert code == any(told["ratios"][name] < bar for name, bar in told["bars"].items())


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_documented_command_compiles_and_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    suite.main(DOCUMENTED.partition(" gpu ")[2].split())
    printed = capsys.readouterr().out
    assert "today, fp8" in printed
    assert json.loads(printed.splitlines()[-1])["device"] == "h100"
