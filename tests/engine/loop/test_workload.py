"""Tests that an engine that knows the lengths of its requests chooses its sizes by them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.engine.references import Reference

from conveyor_engine.errors import ConfigError
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Sample
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.step import StepPlan
from conveyor_protocol.workload import Lengths

GetReference = Callable[[str], Reference]
SHORT: dict[str, Any] = {"workload_input_tokens": Lengths(8, 16), "workload_output_tokens": Lengths(4, 8)}
OPEN: dict[str, Any] = {"max_model_len": None, "num_kv_blocks": None}


def sizes(ref: Reference, **changes: Any) -> tuple[int, int]:
    facts = ref.make_core(**(SHORT | OPEN | changes)).facts
    return facts.max_model_len, facts.num_kv_blocks


def test_context_and_blocks_follow_where_they_are_open(reference: GetReference) -> None:
    ref = reference("llama")
    assert sizes(ref) == (64, 4 * 2)
    assert sizes(ref, max_model_len=96) == (96, 4 * 2), "explicit settings win"
    assert sizes(ref, num_kv_blocks=50) == (64, 50)
    assert sizes(ref, num_kv_blocks=2) == (32, 2), "the context fits into the blocks"
    assert sizes(ref, workload_input_tokens=Lengths(50, 100)) == (128, 4 * 7), "the model's own limit"


def test_lengths_that_the_model_cannot_have_are_refused(reference: GetReference) -> None:
    with pytest.raises(ConfigError, match="have 132 tokens at P95, but the model was made for at most 128"):
        sizes(reference("llama"), workload_input_tokens=Lengths(50, 124))


def test_a_cache_that_holds_less_than_a_batch_is_known_from_the_start(reference: GetReference) -> None:
    ref = reference("llama")
    assert ref.make_core(**(SHORT | OPEN)).stats().capacity is None
    assert ref.make_core(**(SHORT | OPEN | {"num_kv_blocks": 2})).stats().capacity == 2
    assert ref.make_core(num_kv_blocks=6).stats().capacity is None, "nothing is known of the lengths"


class Seen:
    """An executor that records how many tokens each row computes in steps that begin prompts."""

    def __init__(self, runner: GenerateRunner) -> None:
        self._begin, self.prompts = runner.begin, list[list[int]]()
        self.facts, self.free_memory = runner.facts, runner.free_memory
        self.extra_warmup_tokens, self.graph_sizes = runner.extra_warmup_tokens, runner.graph_sizes

    def begin(self, plan: StepPlan) -> Sample:
        if plan.admitted:
            self.prompts.append(list(plan.num_tokens))
        return self._begin(plan)


def warm_up(ref: Reference, **changes: Any) -> Sequence[list[int]]:
    config = ref.make_config(max_num_batched_tokens=96, warmup=True, **changes)
    seen = Seen(GenerateRunner(config, open_placement(config)))
    EngineCore(config, seen)
    return seen.prompts


def test_the_warm_up_runs_these_shapes_beside_the_largest_step(reference: GetReference) -> None:
    ref = reference("llama")
    before = warm_up(ref)
    lengths = SHORT | {"workload_input_tokens": Lengths(24, 40)}
    assert warm_up(ref, **lengths) == [*before, [24] * 4, [40]]
