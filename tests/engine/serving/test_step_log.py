"""Tests the log of the engine's last steps."""

import msgspec

from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.serving.step_log import StepLog
from conveyor_engine.wire.messages import StepOutputs
from conveyor_engine.wire.request import EngineStats
from conveyor_protocol.engine_pages import MAX_STEPS, Steps


def test_a_step_is_the_difference_of_two_snapshots() -> None:
    log = StepLog()
    first = EngineStats(
        num_steps=1, step_num_seqs=2, step_num_tokens=20, prompt_tokens=15, padding_tokens=5, busy_seconds=0.5,
        num_batches=1, batch_close_reasons={"full": 1}, num_waiting=3,
    )  # fmt: skip
    second = EngineStats(
        num_steps=2, step_num_seqs=2, step_num_tokens=2, prompt_tokens=15, generation_tokens=2, padding_tokens=5,
        busy_seconds=0.6, unclaimed_seconds=0.1, num_batches=1, batch_close_reasons={"full": 1},
    )  # fmt: skip
    third = EngineStats(
        num_steps=3, step_num_seqs=4, step_num_tokens=40, prompt_tokens=55, generation_tokens=2, padding_tokens=5,
        busy_seconds=0.6, unclaimed_seconds=0.1, num_batches=2, batch_close_reasons={"full": 1, "window": 1},
        batch_padding_share=0.3,
    )  # fmt: skip
    for stats in (first, second, third):
        log.add(stats)
    steps = log.read()
    assert [(s.rows, s.tokens, s.prompt_tokens, s.generated_tokens, s.waiting) for s in steps] == [
        (2, 20, 15, 0, 3),
        (2, 2, 0, 2, 0),
        (4, 40, 40, 0, 0),
    ]
    assert [s.seconds for s in steps] == [0.5, 0.2, 0.0]
    assert [s.padding_share for s in steps] == [0.25, 0.0, 0.3]
    assert [s.closed_by for s in steps] == ["full", None, "window"]
    assert steps[0].ended <= steps[2].ended


def test_a_report_of_several_steps_is_within_the_bounds_of_one() -> None:
    log = StepLog()
    log.add(EngineStats(num_steps=2, step_num_seqs=4, step_num_tokens=10, padding_tokens=13))
    (step,) = msgspec.convert(msgspec.to_builtins(log.read()), Steps)
    assert step.padding_share == 1.0


def test_only_the_last_steps_are_kept_and_reports_without_a_step_are_none() -> None:
    metrics = EngineMetrics("m")
    for number in range(1, MAX_STEPS + 50):
        stats = EngineStats(num_steps=number, step_num_seqs=number)
        metrics.observe_step(StepOutputs([], stats, 0))
        metrics.observe_step(StepOutputs([], stats, 0))
    assert [step.rows for step in metrics.steps.read()] == list(range(50, MAX_STEPS + 50))
