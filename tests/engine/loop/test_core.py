"""Tests the engine core as its process uses it: its facts, its refusals, and single steps."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.references import Reference, add, run, tokens_of
from tests.engine.tiny_models import VOCAB_SIZE

from conveyor_engine.errors import InvalidRequest, ModelError, Overloaded, StartError
from conveyor_engine.execution import machine
from conveyor_engine.execution.attention.backend import LayerShape
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import FinishReason

GetReference = Callable[[str], Reference]


def test_it_reports_the_facts_about_its_model(reference: GetReference) -> None:
    facts = reference("llama").make_core().facts
    assert (facts.max_model_len, facts.vocab_size, facts.eos_token_ids) == (96, 199, ())
    assert (facts.dtype, facts.device, facts.attention_backend) == ("float32", "cpu", "torch")
    assert (facts.num_kv_blocks, facts.block_size, facts.max_num_seqs) == (64, 16, 4)


def test_the_models_own_context_length_is_the_default(reference: GetReference) -> None:
    assert reference("llama").make_core(max_model_len=None).facts.max_model_len == 128


@pytest.mark.parametrize(
    ("changes", "reason", "sentence"),
    [
        ({"max_model_len": 129}, "InvalidConfig", "made for at most 128"),
        ({"max_num_batched_tokens": 3}, "InvalidConfig", "less than `max_num_seqs`, which is 4"),
        ({"num_kv_blocks": 5}, "KVBudgetTooSmall", "needs 6"),
        ({"num_kv_blocks": 10**12}, "KVBudgetTooLarge", "lower `num_kv_blocks`"),
        ({"dtype": "float16"}, "InvalidConfig", "float16"),
        ({"model": "/nowhere"}, "ModelNotFound", "no config.json"),
        ({"attention_backend": "triton"}, "InvalidConfig", "triton"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(
    reference: GetReference, changes: dict[str, Any], reason: str, sentence: str
) -> None:
    with pytest.raises(StartError, match=sentence) as caught:
        reference("llama").make_core(**changes)
    assert caught.value.reason == reason


def test_the_largest_step_is_left_its_room_beside_the_kv_cache(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, free = reference("llama"), 64 * 2**20
    block_bytes = TorchPaged().block_bytes([LayerShape(4, 2, 12, 12)] * 3, 16, torch.float32)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda _: free)
    ref.make_core(num_kv_blocks=int(free * 0.85) // block_bytes)
    with pytest.raises(StartError, match="lower `num_kv_blocks`"):
        ref.make_core(num_kv_blocks=int(free * 0.85) // block_bytes, max_num_seqs=1024, max_num_batched_tokens=16384)


def break_weights(directory: Path, name: str, row: slice | int) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights[name][row] = math.nan
    save_file(weights, path, metadata={"format": "pt"})


def test_a_model_that_could_answer_nobody_does_not_start(reference: GetReference, tmp_path: Path) -> None:
    directory = shutil.copytree(reference("llama").directory, tmp_path / "broken")
    break_weights(directory, "model.norm.weight", slice(None))
    with pytest.raises(ModelError, match="computed in float32, the model's logits are not finite") as caught:
        reference("llama").make_core(model=str(directory), warmup=True)
    assert caught.value.reason == "UnsupportedModel"


def test_one_broken_token_does_not_condemn_a_model(reference: GetReference, tmp_path: Path) -> None:
    directory = shutil.copytree(reference("llama").directory, tmp_path / "broken")
    break_weights(directory, "model.embed_tokens.weight", Random(0).randrange(VOCAB_SIZE))  # warm-up's first token
    core = reference("llama").make_core(model=str(directory), warmup=True)
    add(core, "a", [1, 2, 3], max_tokens=3)
    assert run(core)["a"][-1].finish_reason == FinishReason.LENGTH


def test_a_prompt_with_a_broken_token_does_not_break_those_that_begin_like_it(
    reference: GetReference, tmp_path: Path
) -> None:
    directory = shutil.copytree(reference("llama").directory, tmp_path / "broken")
    broken, other = 7, 8
    break_weights(directory, "model.embed_tokens.weight", broken)
    core = reference("llama").make_core(model=str(directory))
    prefix = list(range(100, 120))
    add(core, "alone", [*prefix, other])
    answer = tokens_of(run(core)["alone"])
    core = reference("llama").make_core(model=str(directory))
    add(core, "broken", [*prefix, broken])
    assert run(core)["broken"][-1].finish_reason == FinishReason.ERROR
    add(core, "after it", [*prefix, other])
    assert tokens_of(run(core)["after it"]) == answer


def test_an_end_of_sequence_token_beyond_the_vocabulary_disturbs_nobody(
    reference: GetReference, tmp_path: Path
) -> None:
    directory = shutil.copytree(reference("llama").directory, tmp_path / "model")
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": [-1, 198, {VOCAB_SIZE}]}}')
    core = reference("llama").make_core(model=str(directory))
    assert core.facts.eos_token_ids == (198,)
    add(core, "a", [1, 2, 3], min_tokens=3, max_tokens=3)
    assert run(core)["a"][-1].finish_reason == FinishReason.LENGTH


def test_progress_is_reported_as_key_value_lines(reference: GetReference) -> None:
    lines: list[str] = []
    ref = reference("llama")
    config = ref.make_config(warmup=True)
    EngineCore(config, GenerateRunner(config, open_placement(config), lines.append), lines.append)
    events = [line.split()[0] for line in lines]
    assert events == ["event=model_loading", "event=model_loaded", "event=kv_cache_allocated", "event=warmed_up"]


def test_warm_up_leaves_no_trace(reference: GetReference) -> None:
    core = reference("llama").make_core(warmup=True)
    stats = core.stats()
    assert (stats.num_steps, stats.kv_cache_usage, core.has_unfinished()) == (0, 0.0, False)
    assert core.next_wakeup(0.0) is None
    assert core.longest_warmup_step_seconds > 0


def test_warm_up_does_not_disturb_the_first_answers(reference: GetReference) -> None:
    ref = reference("llama")
    core = ref.make_core(warmup=True, num_kv_blocks=8)
    for number, prompt in enumerate(ref.prompts):
        add(core, str(number), prompt)
    outputs = run(core)
    assert [tokens_of(outputs[str(number)]) for number in range(len(ref.prompts))] == ref.answers


def test_a_request_that_cannot_fit_is_refused_and_the_queue_is_bounded(reference: GetReference) -> None:
    core = reference("llama").make_core(max_num_queued_requests=1, max_num_seqs=2)
    with pytest.raises(InvalidRequest, match="exceed the model's context of 96"):
        add(core, "long", [5] * 90, max_tokens=7)
    for name in ("two", "places", "one waits"):
        add(core, name, [5])
    with pytest.raises(Overloaded):
        add(core, "no more", [5])


def test_an_abort_frees_everything_and_the_next_step_says_so(reference: GetReference) -> None:
    core = reference("llama").make_core()
    add(core, "a", [5] * 40)
    core.step(0.0)
    core.abort("a")
    assert core.stats().kv_cache_usage == 0.0
    (output,) = core.step(0.0)
    assert output.finish_reason == FinishReason.ABORT
    assert not core.has_unfinished()


def test_a_drain_starts_a_batch_that_was_waiting_to_fill(reference: GetReference) -> None:
    core = reference("llama").make_core(batching_mode="static", batching_window_seconds=1e9)
    add(core, "a", [5, 6])
    assert core.step(0.0) == []
    core.drain()
    assert set(run(core)) == {"a"}


def test_log_probabilities_come_with_each_token(reference: GetReference) -> None:
    ref = reference("llama")
    core = ref.make_core()
    add(core, "a", ref.prompts[0], logprobs=3, max_tokens=5)
    for output in run(core)["a"]:
        assert output.logprobs is not None
        (entry,) = output.logprobs
        assert [entry.token_id] == output.new_token_ids == entry.top_token_ids[:1]
        assert entry.logprob == entry.top_logprobs[0] <= 0
        assert len(entry.top_token_ids) == 3


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 20, "temperature": 1.5}])
def test_a_seed_repeats_the_answer_in_any_company_and_through_preemption(
    reference: GetReference, params: dict[str, Any]
) -> None:
    ref = reference("llama")
    params = {"temperature": 1.0, "seed": 11} | params

    alone = ref.make_core()
    add(alone, "mine", ref.prompts[1], **params)
    answer = tokens_of(run(alone)["mine"])

    crowded = ref.make_core(num_kv_blocks=6, max_num_batched_tokens=64)
    add(crowded, "first", ref.prompts[3], temperature=1.0)
    add(crowded, "mine", ref.prompts[1], **params)
    assert tokens_of(run(crowded)["mine"]) == answer
    assert crowded.stats().num_preemptions > 0
    assert answer != ref.answers[1], "sampled, not greedy"


def test_a_step_that_raises_ends_half_of_its_batch_and_the_engine_goes_on(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference("llama")
    core = ref.make_core()
    forward = core.executor._forward

    def run_out_of_memory(input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if (input_ids == 198).any():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids, *rest)

    monkeypatch.setattr(core.executor, "_forward", run_out_of_memory)
    add(core, "good", ref.prompts[0])
    add(core, "bad", [198, 1, 2])
    outputs = run(core)
    assert tokens_of(outputs["good"]) == ref.answers[0]
    assert [output.finish_reason for output in outputs["bad"]] == [FinishReason.ERROR]
    add(core, "after it", ref.prompts[1])
    assert tokens_of(run(core)["after it"]) == ref.answers[1]
    assert core.stats().kv_cache_usage == 0.0
