"""The engine as its process drives it: what it says of itself, what it refuses, what one step does."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.references import Reference, add, run, tokens_of

from conveyor_engine.core import EngineCore
from conveyor_engine.errors import InvalidRequest, Overloaded, StartError
from conveyor_engine.request import FinishReason

GetReference = Callable[[str], Reference]


def test_it_tells_the_facts_about_its_model(reference: GetReference) -> None:
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
        ({"max_num_batched_tokens": 3}, "InvalidConfig", "less than max_num_seqs 4"),
        ({"num_kv_blocks": 5}, "KVBudgetTooSmall", "needs 6"),
        ({"num_kv_blocks": 10**12}, "KVBudgetTooLarge", "lower num_kv_blocks"),
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


def test_progress_is_told_as_key_value_lines(reference: GetReference) -> None:
    lines: list[str] = []
    ref = reference("llama")
    config = ref.make_config(warmup=True)
    EngineCore(config, lines.append)
    events = [line.split()[0] for line in lines]
    assert events == ["event=model_loading", "event=model_loaded", "event=kv_cache_allocated", "event=warmed_up"]


def test_warm_up_leaves_no_trace(reference: GetReference) -> None:
    core = reference("llama").make_core(warmup=True)
    stats = core.stats()
    assert (stats.num_steps, stats.kv_cache_usage, core.has_unfinished()) == (0, 0.0, False)
    assert core.next_wakeup(0.0) is None


def test_warm_up_does_not_disturb_the_first_answers(reference: GetReference) -> None:
    ref = reference("llama")
    core = ref.make_core(warmup=True, num_kv_blocks=8)
    for number, prompt in enumerate(ref.prompts):
        add(core, str(number), prompt)
    outputs = run(core)
    assert [tokens_of(outputs[str(number)]) for number in range(len(ref.prompts))] == ref.answers


def test_a_request_that_cannot_fit_is_refused_and_the_queue_is_bounded(reference: GetReference) -> None:
    core = reference("llama").make_core(max_num_queued_requests=1, max_num_seqs=2)
    with pytest.raises(InvalidRequest, match="together more than the 96"):
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


def test_aborting_all_ends_everybody_with_the_given_reason(reference: GetReference) -> None:
    core = reference("llama").make_core()
    for name in ("a", "b", "c", "d", "e"):
        add(core, name, [5, 6])
    core.step(0.0)
    core.abort_all(FinishReason.ERROR)
    assert [output.finish_reason for output in core.step(0.0)] == [FinishReason.ERROR] * 5


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

    crowded = ref.make_core(num_kv_blocks=6)
    add(crowded, "first", ref.prompts[3], temperature=1.0)
    add(crowded, "mine", ref.prompts[1], **params)
    assert tokens_of(run(crowded)["mine"]) == answer
    assert crowded.stats().num_preemptions > 0
    assert answer != ref.answers[1], "sampled, not greedy"
