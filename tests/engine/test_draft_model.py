"""Tests that answers with a draft model are those without, in all modes, and which draft models are refused."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lora import answer, save_adapter
from tests.engine.pretended_model import Generous
from tests.engine.references import Reference, add, answers, run, tokens_of
from tests.engine.test_speculation import DRAFTING, PARAMETERS, without_counts
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_model

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, ModelError, StartError
from conveyor_engine.execution import start
from conveyor_engine.execution.limits import check_speculation
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.draft import DraftModel
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_protocol.failure_reasons import FailureReason

GetReference = Callable[[str], Reference]
SITUATIONS = [*((kind, "continuous") for kind in DRAFTING), ("llama", "none"), ("llama", "dynamic")]


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of another kind, whose guesses are seldom right."""
    directory = tmp_path_factory.mktemp("draft")
    save_tiny_model("qwen3", directory, num_hidden_layers=1)
    return directory


def write_tokenizer(special: str = "</s>", **changes: int) -> str:
    vocabulary = {f"t{number}": number for number in range(VOCAB_SIZE)} | changes
    added = [{"id": 0, "content": special, "special": True}]
    return json.dumps({"added_tokens": added, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}})


def make_core(ref: Reference, draft: Path, **changes: Any) -> EngineCore:
    """Make an engine whose draft model guesses in every step."""
    core = ref.make_core(speculation="draft", draft_model=str(draft), **changes)
    core.scheduler._batch._speculation = core.scheduler.speculation = Generous(5, 16)
    core._observe_steps(float)
    return core


@pytest.mark.parametrize(("kind", "mode"), SITUATIONS)
def test_a_draft_model_that_is_the_model_is_always_right(reference: GetReference, kind: str, mode: str) -> None:
    ref = reference(kind)
    core = make_core(ref, ref.directory, batching_mode=mode, max_num_batched_tokens=100)
    assert answers(core, ref.prompts) == ref.answers
    stats = core.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60
    assert stats.kv_cache_usage == 0.0


@pytest.mark.parametrize(("kind", "mode"), SITUATIONS)
def test_another_draft_model_changes_no_greedy_token(
    reference: GetReference, other: Path, kind: str, mode: str
) -> None:
    ref = reference(kind)
    core = make_core(ref, other, batching_mode=mode)
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_accepted_tokens < core.stats().num_draft_tokens


def test_a_draft_model_of_a_model_with_states_changes_no_greedy_token(reference: GetReference, other: Path) -> None:
    ref = reference("qwen3_5_text")
    core = make_core(ref, other)
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_accepted_tokens < core.stats().num_draft_tokens


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("prefix_caching", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("is_other", [True, False])
def test_preempted_requests_get_them_too(
    reference: GetReference, other: Path, prefix_caching: bool, backend: str, is_other: bool
) -> None:
    ref = reference("llama")
    draft = other if is_other else ref.directory
    core = make_core(ref, draft, num_kv_blocks=9, prefix_caching=prefix_caching, attention_backend=backend)
    assert answers(core, ref.prompts) == ref.answers
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > 0
    assert is_other or stats.num_accepted_tokens == stats.num_draft_tokens


def test_a_shared_prefix_is_read_once_and_its_guesses_stay_right(reference: GetReference) -> None:
    ref = reference("llama")
    core = make_core(ref, ref.directory, max_num_batched_tokens=512)
    read: list[int] = []
    runner: Any = core.executor
    guess = runner._draft._guess

    def count(readings: Any, rows: Any, *, is_first: bool) -> torch.Tensor:
        read.append(sum(number for *_, number in readings))
        found: torch.Tensor = guess(readings, rows, is_first=is_first)
        return found

    runner._draft._guess = count
    counts = []
    for _ in range(2):
        assert answers(core, ref.prompts[2:3]) == ref.answers[2:3]
        counts.append(sum(read))
        read.clear()
    assert counts[0] - counts[1] == 48, "of 50 tokens of the prompt"
    assert core.stats().num_accepted_tokens == core.stats().num_draft_tokens


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_and_compiled_layers_give_the_same(tmp_path: Path, quantization: str) -> None:
    ref = Reference("qwen3", tmp_path, hidden_size=64)
    settings = {"quantization": quantization, "attention_backend": "native", "max_num_batched_tokens": 512}
    plain = answers(ref.make_core(**settings), ref.prompts)
    core = make_core(ref, tmp_path, **settings)
    assert answers(core, ref.prompts) == plain
    assert core.stats().num_accepted_tokens == core.stats().num_draft_tokens > 60


def test_rows_with_adapters_give_the_tokens_of_peft(reference: GetReference, tmp_path: Path) -> None:
    """The draft model has no adapters, so it is wrong more often."""
    ref = reference("qwen3")
    expected = [ref.answers, answer(save_adapter(ref.directory, tmp_path / "one", 1), ref.prompts)]
    core = make_core(ref, ref.directory, adapters=(("one", str(tmp_path / "one")),), max_num_batched_tokens=100)
    for number, prompt in enumerate(ref.prompts):
        for adapter in (0, 1):
            add(core, f"{number} {adapter}", prompt, adapter)
    outputs = run(core)
    for adapter, texts in enumerate(expected):
        assert [tokens_of(outputs[f"{number} {adapter}"]) for number in range(len(texts))] == texts
    assert core.stats().num_accepted_tokens < core.stats().num_draft_tokens


@pytest.mark.parametrize("params", PARAMETERS, ids=lambda params: ",".join(sorted({*params} - {"temperature", "seed"})))
def test_a_request_gets_the_tokens_that_it_would_get_without_drafts(
    reference: GetReference, params: dict[str, Any]
) -> None:
    """Greedy guesses of the same model are right now and then where tokens are sampled."""
    ref = reference("qwen3")
    settings = {"max_num_batched_tokens": 200, "max_num_seqs": 6}
    found = []
    for core in (ref.make_core(**settings), make_core(ref, ref.directory, **settings)):
        for number, prompt in enumerate(ref.prompts):
            add(core, str(number), prompt, **params)
        found.append({name: without_counts(each) for name, each in run(core).items()})
    assert found[0] == found[1]
    assert 0 < core.stats().num_accepted_tokens < core.stats().num_draft_tokens


def test_guesses_that_are_never_right_end_soon(reference: GetReference, other: Path) -> None:
    ref = reference("llama")
    core = ref.make_core(speculation="draft", draft_model=str(other), max_num_batched_tokens=200)
    add(core, "a", ref.prompts[0], max_tokens=90)
    while core.has_unfinished():
        core.step(time.monotonic())
    assert 0 < core.stats().num_draft_tokens < 45


@pytest.mark.parametrize("more", [-20, 25])
def test_embeddings_of_the_draft_model_may_have_another_size(tmp_path: Path, more: int) -> None:
    """Some families pad them. Tokens that one of the models lacks are never those of the other's answers."""
    ref = Reference("llama", tmp_path / "model")
    save_tiny_model("llama", tmp_path / "draft", vocab_size=VOCAB_SIZE + more)
    for name in ("model", "draft"):
        (tmp_path / name / "tokenizer.json").write_text(write_tokenizer())
    core = make_core(ref, tmp_path / "draft")
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_draft_tokens > 60


def test_blocks_of_both_models_are_counted(reference: GetReference, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = reference("llama")
    counted: list[int] = []
    plan = start.plan_num_blocks

    def record(config: EngineConfig, **how: Any) -> int:
        counted.append(how["block_bytes"])
        return plan(config, **how)

    monkeypatch.setattr(start, "plan_num_blocks", record)
    ref.make_core()
    runner: Any = make_core(ref, ref.directory).executor
    assert counted == [runner._draft.block_bytes, 2 * runner._draft.block_bytes]
    assert runner._draft._backend.caches(0)[0].numbers.shape == runner.backend.caches(0)[0].numbers.shape


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (write_tokenizer(t7=8, t8=7), "token 7 is 't7' in the model and 't8' in the draft model"),
        (write_tokenizer(more=VOCAB_SIZE), "token 199 is nothing in the model and 'more' in the draft model"),
        (write_tokenizer(special="<eos>"), "token 0 is '</s>' in the model and '<eos>' in the draft model"),
        (write_tokenizer().replace("true", "false"), "special token 0 is '</s>' in the model and nothing in the draft"),
        ("{}", "tokenizer.json cannot be read: 'model'"),
        ("[" * 200_000, "tokenizer.json cannot be read: maximum recursion depth exceeded"),
        (None, "the draft model has no tokenizer.json"),
    ],
)
def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path, tokenizer: str | None, message: str) -> None:
    for name in ("model", "draft"):
        save_tiny_model("llama", tmp_path / name)
    (tmp_path / "model" / "tokenizer.json").write_text(write_tokenizer())
    if tokenizer is not None:
        (tmp_path / "draft" / "tokenizer.json").write_text(tokenizer)
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu", max_model_len=96, num_kv_blocks=64)
    with pytest.raises(ConfigError, match="`draft_model` must have the tokens of the model, but ") as refused:
        start_with(config, tmp_path / "draft")
    assert message in str(refused.value)


def test_vocabularies_in_two_forms_may_be_the_same(tmp_path: Path) -> None:
    pieces = json.dumps({"model": {"type": "Unigram", "vocab": [[f"t{number}", 0.1] for number in range(VOCAB_SIZE)]}})
    words = json.loads(write_tokenizer()) | {"added_tokens": []}
    for name, content in (("model", json.dumps(words)), ("draft", pieces)):
        save_tiny_model("llama", tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(content)
    start_with(
        EngineConfig(model=str(tmp_path / "model"), device="cpu", max_model_len=96, num_kv_blocks=64),
        tmp_path / "draft",
    )


def start_with(config: EngineConfig, draft: Path) -> None:
    config = replace(config, speculation="draft", draft_model=str(draft))
    GenerateRunner(config, open_placement(config))


def test_draft_models_that_cannot_work_are_refused(reference: GetReference, tmp_path: Path) -> None:
    ref = reference("llama")
    config = ref.make_config(speculation="draft", draft_model="/d")
    with pytest.raises(ConfigError, match="`speculation: draft` is for CPUs, and this engine runs on cuda; remove it"):
        check_speculation(config, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"`draft_model` is a \w+, which keeps states that cannot go back"):
        make_core(ref, reference("qwen3_5_text").directory)
    save_tiny_model("llama", tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(ConfigError, match="made for at most 64 tokens, and a request has up to 96; set"):
        make_core(ref, tmp_path / "short")
    save_tiny_model("llama", tmp_path / "wide", vocab_size=300)
    with pytest.raises(ConfigError, match="but the model has 199 tokens and the draft model 300; use a draft model of"):
        make_core(ref, tmp_path / "wide")


def test_a_draft_model_with_a_tokenizer_for_a_model_without_one_is_refused(tmp_path: Path) -> None:
    config = save_two(tmp_path)
    (tmp_path / "draft" / "tokenizer.json").write_text(write_tokenizer())
    with pytest.raises(ConfigError, match=r"but the model has no tokenizer.json"):
        start_with(config, tmp_path / "draft")


def save_two(folder: Path, **of_draft: Any) -> EngineConfig:
    """Save a model and a draft model with these changes of its config.json."""
    for name in ("model", "draft"):
        save_tiny_model("llama", folder / name)
    path = folder / "draft" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | of_draft))
    return EngineConfig(model=str(folder / "model"), device="cpu", max_model_len=96, num_kv_blocks=64)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, "are not those of its config.json"),
        ({"quantization_config": AWQ}, "the model's weights are quantized already"),
        ({}, "only 16 % of the weights"),
    ],
)
def test_errors_about_the_draft_model_name_it(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = replace(save_two(tmp_path, **changes), quantization="int8", draft_model=str(tmp_path / "draft"))
    placement = open_placement(config)
    of_model = start.RunnerStart(config, placement, lambda _: None)
    with pytest.raises(StartError, match=f"^`draft_model`: .*{message}"):
        DraftModel(of_model, placement, VOCAB_SIZE, 96)


def test_a_draft_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^`draft_model`: .*nowhere") as refused:
        start_with(save_two(tmp_path), tmp_path / "nowhere")
    assert refused.value.reason is FailureReason.MODEL_NOT_FOUND


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("no kernel"), "UnsupportedModel"), (MemoryError("no memory"), "OutOfMemory")],
)
def test_a_draft_model_that_cannot_be_computed_ends_the_start(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    ref = reference("llama")
    drafting = {"speculation": "draft", "draft_model": str(ref.directory), "warmup": True}
    ref.make_core(**drafting)
    monkeypatch.setattr(DraftModel, "_guess", fail)
    with pytest.raises(ModelError, match=r"^`draft_model` cannot be computed: .*Error: no ") as refused:
        ref.make_core(**drafting)
    assert refused.value.reason == reason
