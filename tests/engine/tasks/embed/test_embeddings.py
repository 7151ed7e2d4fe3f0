"""Tests that vectors equal transformers' within 1e-4 in float32, in every batch and mode, for each family of models.

The mutation tests at the end show that the comparison can fail.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.embedding_cores import LENGTHS, PROMPTS, Encoder, add, answers, distance, make_core, run, vector_of
from tests.engine.encoders import CONTEXT_TOKENS, KINDS, embed, save_encoder
from tests.engine.executors import Wired

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, ErrorCode, InvalidRequest
from conveyor_engine.execution.attention import packed
from conveyor_engine.tasks.embed.execution import text_runner
from conveyor_engine.tasks.embed.execution.text_runner import PoolRunner
from conveyor_engine.termination import COUNT_FROM_PADDING, find_context_length
from conveyor_engine.wire.request import EngineRequest, SamplingParams

MODES = ("none", "static", "dynamic", "continuous")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Encoder]:
    made: dict[str, Encoder] = {}

    def get(kind: str) -> Encoder:
        if kind not in made:
            made[kind] = Encoder(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


GetEncoder = Callable[[str], Encoder]


@pytest.mark.parametrize("kind", KINDS)
def test_the_references_differ_from_each_other(encoder: GetEncoder, kind: str) -> None:
    vectors = encoder(kind).vectors
    assert min(float((a - b).abs().max()) for a, b in pairwise(vectors)) > 0.05


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_gives_the_vectors_of_transformers(encoder: GetEncoder, kind: str, mode: str, backend: str) -> None:
    ref = encoder(kind)
    core = ref.make_core(batching_mode=mode, attention_backend=backend)
    assert distance(answers(core, PROMPTS), ref.vectors) < 1e-4
    stats = core.stats()
    assert (stats.padding_tokens, stats.kv_cache_usage, stats.generation_tokens) == (0, 0.0, 0)
    assert stats.prompt_tokens == sum(LENGTHS)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_a_vector_is_the_same_alone_and_among_others(encoder: GetEncoder, kind: str) -> None:
    ref = encoder(kind)
    alone = answers(ref.make_core(batching_mode="none"), PROMPTS)
    for max_num_seqs in (2, 7, 10):
        core = ref.make_core(max_num_seqs=max_num_seqs, max_num_batched_tokens=1024)
        assert distance(answers(core, PROMPTS), alone) < 1e-5


def test_plans_and_vectors_travel_and_come_late(encoder: GetEncoder) -> None:
    ref = encoder("bert")
    core = ref.make_core(overlap=True, batching_mode="continuous")
    assert core._overlap is not None
    core._overlap._executor = Wired(core.executor)
    assert distance(answers(core, PROMPTS), ref.vectors) < 1e-4


def test_a_dynamic_batch_closes_when_it_is_full_and_is_one_packed_step(encoder: GetEncoder) -> None:
    core = encoder("bert").make_core(batching_mode="dynamic", batching_window_seconds=5.0, max_num_batched_tokens=400)
    for number in range(3):
        add(core, str(number), PROMPTS[5], arrival=100.0)
    assert core.step(100.0) == []
    add(core, "3", PROMPTS[5], arrival=100.5)
    assert {output.request_id for output in core.step(100.5)} == {"0", "1", "2", "3"}
    stats = core.stats()
    assert (stats.num_steps, stats.step_num_seqs, stats.step_num_tokens) == (1, 4, 4 * 30)
    assert stats.batch_close_reasons == {"full": 1}


def test_a_dynamic_batch_closes_at_the_end_of_its_window(encoder: GetEncoder) -> None:
    ref = encoder("bert")
    core = ref.make_core(batching_mode="dynamic", batching_window_seconds=5.0, max_num_batched_tokens=400)
    for number, index in enumerate((6, 1)):  # 17 and 9 tokens: lengths do not matter
        add(core, str(number), PROMPTS[index], arrival=100.0 + number)
    assert core.step(104.9) == []
    assert core.next_wakeup(104.9) == 105.0
    outputs = {output.request_id: output for output in core.step(105.0)}
    assert distance([vector_of(outputs["0"]), vector_of(outputs["1"])], [ref.vectors[6], ref.vectors[1]]) < 1e-4
    assert core.stats().num_steps == 1
    assert core.stats().batch_close_reasons == {"window": 1}


def test_a_static_batch_is_a_step_that_is_answered_together_and_computes_no_padding(encoder: GetEncoder) -> None:
    core = encoder("bert").make_core(batching_mode="static", max_num_batched_tokens=50)
    for number, index in enumerate((5, 6, 8)):  # 30, 17 and 25 tokens: the third is a batch by itself
        add(core, str(number), PROMPTS[index])
    assert {output.request_id for output in core.step(0.0)} == {"0", "1"}
    assert {output.request_id for output in core.step(0.0)} == {"2"}
    assert core.stats().num_steps == 2
    assert core.stats().padding_tokens == 0


def test_fewer_dimensions_are_the_first_ones_at_length_one_again(encoder: GetEncoder) -> None:
    ref = encoder("bert")
    core = ref.make_core()
    add(core, "all", PROMPTS[1])
    add(core, "some", PROMPTS[1], dimensions=8)
    outputs = run(core)
    expected = embed(ref.model, PROMPTS[1], ref.mode, normalizes=True, dimensions=8)
    assert distance([vector_of(outputs["all"])], [ref.vectors[1]]) < 1e-4
    assert distance([vector_of(outputs["some"])], [expected]) < 1e-4


def test_warm_up_computes_the_largest_batch_and_the_longest_prompt(encoder: GetEncoder) -> None:
    core = encoder("bert").make_core(warmup=True)
    assert core.longest_warmup_step_seconds > 0
    assert core.stats().num_steps == 0
    sizes: list[list[int]] = []
    begin = core.executor.begin
    core.executor.begin = lambda plan: (sizes.append(plan.num_tokens), begin(plan))[1]  # type: ignore[method-assign]
    core._warm_up(EngineConfig(model="-"))
    assert sizes == [[12] * 4, [CONTEXT_TOKENS]]


@pytest.mark.parametrize("kind", ["bert", *COUNT_FROM_PADDING])
def test_a_fetch_reports_the_context_that_the_engine_has(tmp_path: Path, kind: str) -> None:
    save_encoder(kind, tmp_path, max_position_embeddings=CONTEXT_TOKENS + 2)
    length = make_core(tmp_path).facts.max_model_len
    assert length == CONTEXT_TOKENS + (2 if kind == "bert" else 0)
    assert find_context_length(tmp_path) == length


def test_an_engine_takes_the_requests_of_its_task_only(encoder: GetEncoder) -> None:
    core = encoder("bert").make_core()
    with pytest.raises(InvalidRequest, match="makes embeddings only") as caught:
        core.add_request(EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams()))
    assert caught.value.code is ErrorCode.WRONG_TASK
    with pytest.raises(InvalidRequest, match="65 tokens exceed the model's context of 64") as caught:
        add(core, "b", [5] * 65)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    with pytest.raises(InvalidRequest, match="at least one prompt token"):
        add(core, "c", [])
    assert not core.has_unfinished()


def test_a_vector_that_is_not_finite_is_an_error_of_its_request_alone(
    encoder: GetEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = text_runner.pool

    def damage(*arguments: Any) -> torch.Tensor:
        pooled = compute(*arguments)
        pooled[1, 7] = float("inf")
        return pooled

    monkeypatch.setattr(text_runner, "pool", damage)
    core = encoder("bert").make_core(max_num_batched_tokens=400)
    for number in range(3):
        add(core, str(number), PROMPTS[number])
    outputs = run(core)
    assert [outputs[name].finish_reason for name in "012"] == ["stop", "error", "stop"]
    assert "not finite" in (outputs["1"].message or "")


def test_a_step_that_fails_ends_the_requests_that_fail_and_no_other(
    encoder: GetEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = encoder("bert")
    core = ref.make_core(max_num_batched_tokens=400)
    assert isinstance(core.executor, PoolRunner)
    compute = core.executor._encode

    def fail(prompts: Sequence[Sequence[int]], **others: Any) -> tuple[torch.Tensor, list[int]]:
        if PROMPTS[3] in map(list, prompts):
            raise RuntimeError("out of memory")
        return compute(prompts, **others)

    monkeypatch.setattr(core.executor, "_encode", fail)
    for number in range(4):
        add(core, str(number), PROMPTS[number])
    outputs = run(core)
    assert [outputs[name].finish_reason for name in "0123"] == ["stop", "stop", "stop", "error"]
    assert distance([vector_of(outputs[name]) for name in "012"], ref.vectors[:3]) < 1e-4
    assert answers(core, PROMPTS[:1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"attention_backend": "native"}, "reads a KV cache")],
)
def test_settings_of_the_other_task_are_refused(encoder: GetEncoder, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        encoder("bert").make_core(**changes)


@pytest.mark.parametrize(
    ("kind", "name", "mutant"),
    [
        ("bert", "pool", lambda hidden, starts, mode: hidden[torch.tensor(starts[:-1])]),
        ("qwen3", "pool", lambda hidden, starts, mode: hidden[torch.tensor(starts[1:]) - 2]),
        ("bert", "finish", lambda vector, dimensions, normalizes: vector.tobytes()),
    ],
)
def test_a_mistake_is_found_out(
    encoder: GetEncoder, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, mutant: Callable[..., Any]
) -> None:
    ref = encoder(kind)
    core = ref.make_core(max_num_batched_tokens=400)
    monkeypatch.setattr(text_runner, name, mutant)
    assert distance(answers(core, PROMPTS), ref.vectors) > 1e-2


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_prompts_that_see_each_other_are_found_out(
    encoder: GetEncoder, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ref = encoder(kind)
    core = ref.make_core(max_num_batched_tokens=400)
    monkeypatch.setattr(core.executor, "_pack", lambda starts, _: packed.Packed([0, starts[-1]]))
    assert distance(answers(core, PROMPTS), ref.vectors) > 1e-2


def test_wrong_positions_are_found_out(encoder: GetEncoder) -> None:
    ref = encoder("bert")
    core = ref.make_core()
    assert isinstance(core.executor, PoolRunner)
    forward = core.executor.model.forward

    def shift(position_ids: torch.Tensor, **others: Any) -> Any:
        wrong = torch.arange(position_ids.shape[1])[None] % CONTEXT_TOKENS  # as if all were one sequence
        return forward(position_ids=wrong, **others)

    core.executor.model.forward = shift
    assert distance(answers(core, PROMPTS), ref.vectors) > 1e-2
