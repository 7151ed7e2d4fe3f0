"""Tests that answers with drafts are those without: greedy and sampled, in all modes, whatever a request asks for."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.builders import make_state
from tests.engine.loop.test_plain_steps import answers_of
from tests.engine.lora import answer, save_adapter
from tests.engine.pretended_model import Oracle
from tests.engine.references import Reference, add, answers, run, tokens_of
from tests.engine.tiny_models import KINDS, REJECTED, WITH_STATES

from conveyor_engine.errors import ConfigError
from conveyor_engine.execution.limits import check_speculation
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Sampler
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.results import start_copy
from conveyor_engine.wire.request import RequestOutput
from conveyor_engine.wire.step import RowMask, StepPlan

GetReference = Callable[[str], Reference]
DRAFTING = [kind for kind in KINDS if kind not in WITH_STATES]
SITUATIONS = [*((kind, "continuous") for kind in DRAFTING), ("llama", "none"), ("llama", "dynamic")]


def let_drafts(core: EngineCore, texts: Iterable[list[int]]) -> EngineCore:
    """Let the core's requests have drafts, most of which are right. texts: prompts with their answers."""
    known = [*texts]

    def foretell(token_ids: list[int]) -> int:
        number = len(token_ids)
        return next((text[number] for text in known if text[:number] == token_ids and len(text) > number), 0)

    core.scheduler._batch._speculation = Oracle(5, foretell)
    return core


def speculate(core: EngineCore, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """Return the greedy answers with drafts."""
    let_drafts(core, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt, max_tokens=len(answers[number]))
    outputs = run(core)
    stats = core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert core.stats().kv_cache_usage == 0.0
    return [tokens_of(outputs[str(number)]) for number in range(len(prompts))]


@pytest.mark.parametrize(("kind", "mode"), SITUATIONS)
def test_greedy_tokens_are_those_of_generate(reference: GetReference, kind: str, mode: str) -> None:
    ref = reference(kind)
    assert speculate(ref.make_core(batching_mode=mode), ref.prompts, ref.answers) == ref.answers


SEVERAL = sorted(WITH_STATES & set(KINDS) | {"lfm2", "nemotron_h"})
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(WITH_STATES - {*SEVERAL, *REJECTED})]


@pytest.mark.parametrize("kind", [*(kind for kind in SEVERAL if kind not in REJECTED), *OTHERS])
def test_states_go_back_after_rejected_drafts(reference: GetReference, kind: str) -> None:
    ref = reference(kind)
    assert speculate(ref.make_core(speculation="ngram"), ref.prompts, ref.answers) == ref.answers


@pytest.mark.parametrize("changes", [{"batching_mode": "dynamic"}, {"num_kv_blocks": 9}], ids=str)
def test_states_of_compiled_layers_and_preempted_rows_go_back_too(
    reference: GetReference, changes: dict[str, Any]
) -> None:
    ref = reference("qwen3_5_text")
    core = ref.make_core(speculation="ngram", attention_backend="auto", **changes)
    assert speculate(core, ref.prompts, ref.answers) == ref.answers
    assert core.stats().num_preemptions > 0 or "num_kv_blocks" not in changes


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_give_them_too(reference: GetReference, prefix_caching: bool, backend: str) -> None:
    ref = reference("llama")
    core = ref.make_core(num_kv_blocks=9, prefix_caching=prefix_caching, attention_backend=backend)
    assert speculate(core, ref.prompts, ref.answers) == ref.answers
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_compiled_layers_give_them_too(reference: GetReference, kind: str) -> None:
    ref = reference(kind)
    core = ref.make_core(attention_backend="auto", max_num_batched_tokens=512)
    assert speculate(core, ref.prompts, ref.answers) == ref.answers


def test_prefixes_with_accepted_tokens_are_shared(reference: GetReference) -> None:
    ref = reference("llama")
    core = ref.make_core(max_num_batched_tokens=512)
    for _ in range(2):
        assert speculate(core, ref.prompts[2:], ref.answers[2:]) == ref.answers[2:]
    before = core.stats().prefix_cache_hit_tokens
    prompt = ref.prompts[2] + ref.answers[2][:15]
    add(core, "goes on", prompt, max_tokens=5)
    assert tokens_of(run(core)["goes on"]) == ref.answers[2][15:]
    assert core.stats().prefix_cache_hit_tokens - before == 64, "of 65 tokens, 15 of which an answer had"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_give_the_same_with_drafts(tmp_path: Path, quantization: str) -> None:
    ref = Reference("qwen3", tmp_path, hidden_size=64)
    settings = {"quantization": quantization, "attention_backend": "native", "max_num_batched_tokens": 512}
    plain = answers(ref.make_core(**settings), ref.prompts)
    assert speculate(ref.make_core(**settings), ref.prompts, plain) == plain


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rows_with_adapters_over_rounded_weights_give_the_same_with_drafts(tmp_path: Path, quantization: str) -> None:
    ref = Reference("qwen3", tmp_path / "model", hidden_size=64)
    save_adapter(ref.directory, tmp_path / "one", 1)
    sources = (("one", str(tmp_path / "one")),)
    settings = {"quantization": quantization, "attention_backend": "native", "max_num_batched_tokens": 512}
    found: list[list[list[int]]] = []
    for drafts in (False, True):
        core = ref.make_core(adapters=sources, **settings)
        if drafts:
            let_drafts(core, [prompt + text for prompt, text in zip(ref.prompts, found[0], strict=True)])
        for number, prompt in enumerate(ref.prompts):
            add(core, f"{number}", prompt, number % 2)
        outputs = run(core)
        found.append([tokens_of(outputs[f"{number}"]) for number in range(len(ref.prompts))])
        assert (core.stats().num_accepted_tokens > 20) == drafts
    assert found[0] == found[1]


def test_rows_with_adapters_give_the_tokens_of_peft(reference: GetReference, tmp_path: Path) -> None:
    ref = reference("qwen3")
    expected = [ref.answers, answer(save_adapter(ref.directory, tmp_path / "one", 1), ref.prompts)]
    core = ref.make_core(adapters=(("one", str(tmp_path / "one")),), max_num_batched_tokens=100)
    let_drafts(core, [prompt + text for texts in expected for prompt, text in zip(ref.prompts, texts, strict=True)])
    for number, prompt in enumerate(ref.prompts):
        for adapter in (0, 1):
            add(core, f"{number} {adapter}", prompt, adapter)
    outputs = run(core)
    for adapter, texts in enumerate(expected):
        assert [tokens_of(outputs[f"{number} {adapter}"]) for number in range(len(texts))] == texts
    assert core.stats().num_accepted_tokens > 50


def without_counts(outputs: list[RequestOutput]) -> list[Any]:
    """Return tokens, log probabilities and the end of one answer."""
    scores = [each for output in outputs for each in output.logprobs or ()]
    prompt = [each for output in outputs for each in output.prompt_logprobs or ()]
    rounded = [(each.token_id, round(each.logprob or 0.0, 3), each.top_token_ids) for each in scores + prompt]
    return [tokens_of(outputs), rounded, outputs[-1].finish_reason]


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 7, "logprobs": 3},
    {"temperature": 1.3, "seed": 5, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 7, "logit_bias": ((5, 3.0), (9, -100.0))},
    {"temperature": 1.0, "seed": 8, "allowed_token_ids": tuple(range(60))},
    {"temperature": 1.0, "seed": 9, "bad_words": ((7,), (3, 4))},
    {"temperature": 1.0, "seed": 10, "min_tokens": 11, "stop_token_ids": tuple(range(0, 190, 2)), "logprobs": 0},
    {"repetition_penalty": 1.5, "logprobs": 2, "prompt_logprobs": 1},
    {"frequency_penalty": 1.5},
]


@pytest.mark.parametrize("params", PARAMETERS, ids=lambda params: ",".join(sorted({*params} - {"temperature", "seed"})))
def test_a_request_gets_the_tokens_that_it_would_get_without_drafts(
    reference: GetReference, params: dict[str, Any]
) -> None:
    ref = reference("qwen3")
    cores = [ref.make_core(max_num_batched_tokens=200, max_num_seqs=6) for _ in range(2)]
    for number, prompt in enumerate(ref.prompts):
        add(cores[0], str(number), prompt, **params)
    plain = run(cores[0])
    texts = [prompt + tokens_of(plain[str(number)]) for number, prompt in enumerate(ref.prompts)]
    let_drafts(cores[1], texts)
    for number, prompt in enumerate(ref.prompts):
        add(cores[1], str(number), prompt, **params)
    drafted = run(cores[1])
    assert {name: without_counts(each) for name, each in drafted.items()} == {
        name: without_counts(each) for name, each in plain.items()
    }
    assert cores[1].stats().num_accepted_tokens > 0


def test_requests_of_many_kinds_beside_each_other_get_their_tokens(reference: GetReference) -> None:
    ref = reference("llama")
    plain = answers_of(ref.make_core(max_num_batched_tokens=200), ref.prompts)
    texts = [prompt + tokens_of(plain[str(number)]) for number, prompt in enumerate(ref.prompts)]
    drafted = answers_of(let_drafts(ref.make_core(max_num_batched_tokens=200), texts), ref.prompts)
    assert {name: without_counts(each) for name, each in drafted.items()} == {
        name: without_counts(each) for name, each in plain.items()
    }


def test_drafts_by_ngrams_save_steps_of_a_model_that_repeats_itself(reference: GetReference) -> None:
    ref = reference("llama")
    steps = []
    for speculation in (None, "ngram"):
        core = ref.make_core(speculation=speculation, max_num_batched_tokens=512)
        add(core, "a", ref.prompts[0], max_tokens=60, temperature=0.0, allowed_token_ids=(7,))
        assert tokens_of(run(core)["a"]) == [7] * 60
        steps.append(core.stats().num_steps)
    assert steps[0] == 60
    assert steps[1] < 20


def test_logits_that_are_not_finite_after_a_rejected_draft_are_no_error(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits after a draft are those of a text that the answer never has."""
    ref = reference("llama")
    core = ref.make_core(max_num_batched_tokens=512)
    runner: Any = core.executor
    launch = runner._launch

    def spoil(plan: StepPlan, *, shows: bool) -> Any:
        logits, samples, found = launch(plan, shows=shows)
        place = sum(plan.num_logits[: plan.num_decodes])
        for drafts in plan.drafts:
            if 3 in drafts:  # the oracle's wrong token
                logits[place + 1 + drafts.index(3)] = float("nan")
            place += 1 + len(drafts)
        return logits, samples, found

    monkeypatch.setattr(runner, "_launch", spoil)
    assert speculate(core, ref.prompts, ref.answers) == ref.answers


def test_a_mask_beside_a_row_with_several_logits_changes_only_its_own_row() -> None:
    cpu = torch.device("cpu")
    sampler = Sampler(4, 32, cpu, torch.zeros((4, 9), dtype=torch.int32))
    for row in range(3):
        sampler.set_row(row, make_state(temperature=0.0).sampling)
    logits = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    samples = Samples.of(np.array([0, 1, 1, 1, 2, 2]), np.array([5, 3, 4, 5, 6, 7]), cpu)
    plain = sampler.sample(logits, samples).token_ids
    masked = sampler.sample(logits, samples, [RowMask(0, (1 << 9).to_bytes(4, "little"))]).token_ids
    assert masked[0] == 9
    assert masked[1:].equal(plain[1:])


ROWS, VOCABULARY = 10_000, 6
DRAWS = [{"temperature": 0.8}, {"temperature": 1.0, "top_k": 4}, {"temperature": 1.2, "top_p": 0.9}]


@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_the_tokens_of_drafts_have_the_model_s_distribution(params: dict[str, Any]) -> None:
    """Draws 200,000 tokens of a chain of six tokens, in pairs whose first token is drafted, and tests chi-square."""
    cpu = torch.device("cpu")
    chain = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4)) * 1.5
    first, draft = 1, int(chain[1].argmax())  # the token before each pair, and the draft
    sampler = Sampler(ROWS, VOCABULARY, cpu, torch.zeros((ROWS, 4), dtype=torch.int32))
    plan = StepPlan(0, [], [], [*range(ROWS)], [0] * ROWS, [2] * ROWS, [2] * ROWS, 0, drafts=[[draft]] * ROWS)
    drafted = Samples.of(np.repeat(np.arange(ROWS), 2), np.tile(np.array([1, 2]), ROWS), cpu)
    rest = Samples.of(np.arange(ROWS), np.full(ROWS, 2), cpu)
    counts: Counter[tuple[int, int]] = Counter()
    for batch in range(10):
        for row in range(ROWS):
            sampler.set_row(row, make_state(seed=batch * ROWS + row, **params).sampling)
        sampled = start_copy(plan, sampler.sample(chain[[first, draft] * ROWS], drafted))().token_ids
        # Where the draft is rejected, the next step computes the second token.
        seconds = sampler.sample(chain[[tokens[0] for tokens in sampled]], rest).token_ids.tolist()
        counts.update(
            (tokens[0], tokens[1] if tokens[1:] else then) for tokens, then in zip(sampled, seconds, strict=True)
        )
    assert 0.2 < sum(number for (token, _), number in counts.items() if token == draft) / counts.total() < 0.9
    assert_distributed(counts, chain, first, params)


def assert_distributed(counts: Counter[tuple[int, int]], chain: torch.Tensor, first: int, params: Any) -> None:
    def distribution(token: int) -> torch.Tensor:
        weights = (chain[token] / params["temperature"]).softmax(-1)
        ordered, places = weights.sort(descending=True)
        keep = torch.arange(len(ordered)) < params.get("top_k", len(ordered))
        keep &= ordered.cumsum(-1) - ordered < params.get("top_p", 1.0)
        kept = torch.zeros_like(weights).scatter(0, places, ordered * keep)
        return kept / kept.sum()

    total, statistic, cells = sum(counts.values()), 0.0, 0
    for one, chance in enumerate(distribution(first).tolist()):
        for two, then in enumerate(distribution(one).tolist()):
            expected = total * chance * then
            if not expected:
                assert not counts[one, two]
                continue
            statistic += (counts[one, two] - expected) ** 2 / expected
            cells += 1
    freedom = cells - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_devices_and_models_without_drafts_are_named(reference: GetReference) -> None:
    ref = reference("llama")
    with pytest.raises(ConfigError, match="`speculation: ngram` is for CPUs, and this engine runs on cuda; remove it"):
        check_speculation(ref.make_config(speculation="ngram"), torch.device("cuda"))
    with pytest.raises(ValueError, match="speculation needs `overlap=False`"):
        ref.make_core(speculation="ngram", overlap=True)
