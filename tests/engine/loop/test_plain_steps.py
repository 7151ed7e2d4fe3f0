"""Tests that steps are plain data. Sent to another process and back as msgpack, they give the same tokens."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.executors import Wired
from tests.engine.references import Reference, add, run

from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import FinishReason, RequestOutput

GetReference = Callable[[str], Reference]
MODES: list[dict[str, Any]] = [
    {"batching_mode": "none"},
    {"batching_mode": "static", "padding": "real"},
    {"batching_mode": "static", "padding": "none"},
    {"batching_mode": "dynamic"},
    {"batching_mode": "continuous"},
]


def request_everything(core: EngineCore, prompts: list[list[int]]) -> None:
    """Return requests of many kinds: greedy, seeded, split, with log probabilities and min_tokens.

    Two share a prefix.
    """
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5, "logprobs": 2},
        {"temperature": 0.8, "seed": 6, "top_p": 0.9},
        {"temperature": 1.2, "seed": 2**64 - 1, "top_k": 5, "logprobs": 0},
        {"temperature": 1.0, "seed": -3, "min_tokens": 9, "stop_token_ids": tuple(range(0, 190, 2))},
        {"min_tokens": 3, "stop_token_ids": tuple(range(1, 190, 2))},
    ]
    for number, (prompt, params_of_one) in enumerate(zip(prompts, params, strict=True)):
        add(core, str(number), prompt, **params_of_one)


def answers_of(core: EngineCore, prompts: list[list[int]]) -> dict[str, list[RequestOutput]]:
    request_everything(core, prompts)
    return run(core)


def wired(core: EngineCore) -> EngineCore:
    core.executor = Wired(core.executor)
    return core


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
@pytest.mark.parametrize("num_kv_blocks", [64, pytest.param(8, marks=pytest.mark.slow)])
def test_plans_and_results_that_travel_give_the_same_answers(
    reference: GetReference, mode: dict[str, Any], num_kv_blocks: int
) -> None:
    ref = reference("llama")
    cores = [
        ref.make_core(clock=float, num_kv_blocks=num_kv_blocks, max_num_batched_tokens=200, **mode) for _ in range(2)
    ]
    for core in cores:
        core.scheduler._outputs.expected_output_tokens = 1.0
    there = answers_of(wired(cores[1]), ref.prompts)
    assert there == answers_of(cores[0], ref.prompts)
    assert there["5"][-1].finish_reason == FinishReason.STOP
    stats = cores[1].stats()
    assert bool(stats.num_preemptions) == (num_kv_blocks == 8 and mode["batching_mode"] != "none")
    assert bool(stats.padding_tokens) == (mode.get("padding") == "real")
    assert bool(stats.prefix_cache_hit_tokens) == (mode.get("padding") != "real")


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: "-".join(mode.values()))
def test_steps_that_fail_and_travel_give_those_who_go_on_the_same_answers(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    ref = reference("llama")
    cores = [ref.make_core(clock=float, max_num_batched_tokens=512, max_num_seqs=8, **mode) for _ in range(2)]
    for core in cores:
        run_out_of_memory(core, monkeypatch, largest=150)
        add(core, "bad", [198] * 3)
    there, here = answers_of(wired(cores[1]), ref.prompts), answers_of(cores[0], ref.prompts)
    assert there == here
    assert there["bad"][-1].finish_reason == FinishReason.ERROR
    assert FinishReason.LENGTH in {outputs[-1].finish_reason for outputs in there.values()}


def run_out_of_memory(core: EngineCore, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """Let steps of `largest` or more tokens, and all steps with the token 198, run out of memory."""
    runner = core.executor
    forward = runner._forward  # type: ignore[attr-defined]

    def fail(input_ids: Any, *rest: Any) -> Any:
        if input_ids.shape[1] > largest or (input_ids == 198).any():
            raise MemoryError("out of memory")
        return forward(input_ids, *rest)

    monkeypatch.setattr(runner, "_forward", fail)
