"""Tests that heads guess as vLLM defines them, and that answers with them are those without, in all modes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.heads import OF_QWEN, ONE_MORE_LAYER, EagleReference, HeadReference, add_weights
from tests.engine.lora import answer, save_adapter
from tests.engine.pretended_model import Generous
from tests.engine.references import Reference, add, answers, run, tokens_of
from tests.engine.test_speculation import without_counts
from tests.engine.tiny_models import save_tiny_model

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, ModelError, StartError
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.heads import Head
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import RequestOutput

Guessing = HeadReference | EagleReference


class Model:
    """A tiny model with a head, and its answers without drafts."""

    def __init__(self, kind: str, directory: Path, **changes: Any) -> None:
        self.ref = Reference(kind, directory, **changes)
        of_texts = "qwen3_5_moe_text" if kind == "qwen3_5_moe" else kind
        self.head: Guessing = HeadReference(of_texts, directory, self.ref.model)
        self.settings: dict[str, Any] = {"speculation": "mtp"}


class EagleModel(Model):
    def __init__(self, kind: str, directory: Path, *, of_speculators: bool) -> None:
        self.ref = Reference(kind, directory / "model", num_hidden_layers=5)
        self.head = EagleReference.save(directory / "head", self.ref.model, of_speculators=of_speculators)
        self.settings = {"speculation": "draft", "draft_model": str(directory / "head")}


Models = Callable[[str], Model]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made: dict[str, Model] = {}

    def make(name: str) -> Model:
        if name not in made:
            kind, folder = name.rpartition(" ")[2], tmp_path_factory.mktemp("heads")
            of_speculators = name.startswith("speculator")
            is_own = kind == name
            made[name] = Model(kind, folder) if is_own else EagleModel(kind, folder, of_speculators=of_speculators)
        return made[name]

    return make


def make_core(model: Model, **changes: Any) -> tuple[EngineCore, dict[tuple[int, ...], list[int]]]:
    """Make an engine that guesses in every step, and a record of its guesses by the tokens before them."""
    core = model.ref.make_core(**model.settings, **changes)
    core.scheduler._batch._speculation = core.scheduler.speculation = Generous(5, 16, 1)
    core._observe_steps(float)
    guesses: dict[tuple[int, ...], list[int]] = {}
    runner: Any = core.executor
    draft = runner._draft.draft

    def record(plan: Any, rows: Any) -> Any:
        made, forwards = draft(plan, rows)
        ends = {row: first + number + 1 for row, first, number in plan.readings}
        for row, drafts in zip(made.rows[made.num_decodes :], made.drafts, strict=False):
            guesses[tuple(rows.token_ids[row, : ends[row]].tolist())] = drafts
        return made, forwards

    runner._draft.draft = record
    return core, guesses


def check(model: Model, core: EngineCore, guesses: dict[tuple[int, ...], list[int]], more_than: int = 40) -> None:
    assert answers(core, model.ref.prompts) == model.ref.answers
    stats = core.stats()
    assert stats.num_draft_tokens == sum(map(len, guesses.values())) > more_than
    assert stats.kv_cache_usage == 0.0
    for tokens, found in list(guesses.items())[::5]:
        assert found == model.head.guess(tokens, len(found))


NAMES = [*ONE_MORE_LAYER, *OF_QWEN, "qwen3_5_moe", "eagle of llama", "speculator of qwen3"]
FP8 = {"quantization_config": {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}},
}}  # fmt: skip
FIRST = ["deepseek_v3", "qwen3_5_text", "eagle of llama"]
SITUATIONS = [
    *((name, "continuous") for name in FIRST),
    *(pytest.param(name, "continuous", marks=pytest.mark.nightly) for name in NAMES if name not in FIRST),
    pytest.param("glm4_moe", "none", marks=pytest.mark.nightly),
    ("qwen3_5_text", "dynamic"),
]


@pytest.mark.parametrize(("name", "mode"), SITUATIONS)
def test_a_head_guesses_as_it_is_defined_and_changes_no_greedy_token(models: Models, name: str, mode: str) -> None:
    model = models(name)
    check(model, *make_core(model, batching_mode=mode))


@pytest.mark.parametrize("prefix_caching", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", FIRST)
def test_preempted_requests_get_the_same_guesses_and_tokens(models: Models, name: str, prefix_caching: bool) -> None:
    model = models(name)
    core, guesses = make_core(model, num_kv_blocks=9, prefix_caching=prefix_caching)
    check(model, core, guesses, more_than=20)  # a request that comes back has no guesses in its first step
    assert core.stats().num_preemptions > 0


def test_a_shared_prefix_is_read_once(models: Models) -> None:
    model = models("eagle of llama")
    core, guesses = make_core(model, max_num_batched_tokens=512)
    runner: Any = core.executor
    read: list[int] = []
    guess = runner._draft._guess

    def count(readings: Any, rows: Any, *, is_first: bool) -> torch.Tensor:
        read.append(sum(number for *_, number in readings) * is_first)
        found: torch.Tensor = guess(readings, rows, is_first=is_first)
        return found

    runner._draft._guess = count
    counts = []
    for _ in range(2):
        assert answers(core, model.ref.prompts[2:3]) == model.ref.answers[2:3]
        counts.append(sum(read))
        read.clear()
    assert counts[0] - counts[1] == 47, "of 50 tokens of the prompt; the last one of a block needs the next block"
    for tokens, found in list(guesses.items())[::5]:
        assert found == model.head.guess(tokens, len(found))


def test_equal_prompts_at_once_get_right_guesses(models: Models) -> None:
    model = models("eagle of llama")
    core, guesses = make_core(model, max_num_batched_tokens=512)
    prompt, expected = model.ref.prompts[1], model.ref.answers[1]
    assert len(prompt) % 16 == 1, "all but the last token is in shared blocks"
    assert answers(core, [prompt, prompt]) == [expected, expected]
    for tokens, found in guesses.items():
        assert found == model.head.guess(tokens, len(found))


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8", "attention_backend": "native"},
        {"quantization": "int4", "attention_backend": "native", "max_num_batched_tokens": 512},
    ],
    ids=str,
)
def test_rounded_caches_and_weights_give_the_tokens_without_drafts(tmp_path: Path, settings: dict[str, Any]) -> None:
    ref = Reference("qwen3", tmp_path / "model", hidden_size=64, num_hidden_layers=5)
    EagleReference.save(tmp_path / "head", ref.model, of_speculators=True)
    plain = answers(ref.make_core(**settings), ref.prompts)
    core = ref.make_core(speculation="draft", draft_model=str(tmp_path / "head"), **settings)
    core.scheduler._batch._speculation = core.scheduler.speculation = Generous(5, 16, 1)
    assert answers(core, ref.prompts) == plain
    assert core.stats().num_draft_tokens > 60


def test_rows_with_adapters_and_sampled_rows_get_their_tokens(models: Models, tmp_path: Path) -> None:
    model = models("eagle of llama")
    ref = model.ref
    expected = answer(save_adapter(ref.directory, tmp_path / "one", 1), ref.prompts)
    settings = {"adapters": (("one", str(tmp_path / "one")),), "max_num_batched_tokens": 100}
    sampled = {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.5, "logprobs": 2}
    found = []
    for core in (ref.make_core(**settings, clock=float), make_core(model, **settings, clock=float)[0]):
        for number, prompt in enumerate(ref.prompts):
            add(core, f"{number} adapted", prompt, 1)
            add(core, f"{number} sampled", prompt, **sampled)
        found.append({name: without_counts(each) for name, each in run(core).items()})
    assert found[0] == found[1]
    assert core.stats().num_draft_tokens > 60
    assert [tokens_of(run_one(core, prompt, 1)) for prompt in ref.prompts[:2]] == expected[:2]


def run_one(core: EngineCore, prompt: list[int], adapter: int) -> list[RequestOutput]:
    add(core, "again", prompt, adapter)
    return run(core)["again"]


def test_the_head_s_weights_and_hidden_states_are_counted_in_each_block(models: Models) -> None:
    model = models("eagle of llama")
    runner: Any = make_core(model)[0].executor
    draft = runner._draft
    keys = 2 * 2 * 16 * 4 * 16  # keys and values of two heads in a block of 16 tokens, float32
    assert draft.block_bytes == keys + 16 * 3 * 48 * 4
    assert draft._kept.shape == (64 * 16, 3 * 48)


@pytest.mark.parametrize(("name", "copies"), [("eagle of llama", 2), ("qwen3_5_text", 1)])
def test_what_a_step_keeps_for_the_head_is_counted(models: Models, name: str, copies: int) -> None:
    model = models(name)
    drafts: list[Any] = [
        make_core(model, max_num_batched_tokens=tokens)[0].executor._draft  # type: ignore[attr-defined]
        for tokens in (13, 13 + 1000)
    ]
    width = drafts[0]._width
    assert width == 48 * (3 if copies == 2 else 1)
    assert drafts[1].step_bytes - drafts[0].step_bytes == copies * 1000 * width * 4


def test_rows_with_states_are_limited_when_the_head_is_loaded_too(models: Models) -> None:
    model, lines = models("qwen3_5_text"), list[str]()
    config = model.ref.make_config(**model.settings)
    GenerateRunner(config, open_placement(config), lines.append)
    events = [line.partition(" ")[0] for line in lines]
    assert events.count("event=model_loaded") == 2, "of the model and of the head"
    assert max(i for i, each in enumerate(events) if each == "event=model_loaded") < events.index(
        "event=states_planned"
    )


def test_files_without_a_head_are_refused(models: Models, tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"the files in .* have no head for it \(layers.3.eh_proj or mtp.fc\); use"):
        start(tmp_path, speculation="mtp")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"eh_proj.weight": torch.zeros(48, 48)}, r"the head in .* cannot be loaded: .*mismatch"),
        ({"hnorm.weight": None}, r"are not those of its config.json: 1 missing keys, first hnorm.weight"),
        ({"self_attn.q_b_proj.weight": None}, "1 missing keys, first model.layers.0.self_attn.q_b_proj.weight"),
        ({"self_attn.indexer.wk.weight": torch.zeros(4, 4)}, "has model.layers.0.self_attn.indexer.wk.weight, which"),
    ],
)
def test_damaged_heads_end_the_start_with_a_sentence(
    tmp_path: Path, damage: dict[str, torch.Tensor | None], message: str
) -> None:
    target = save_tiny_model("deepseek_v3", tmp_path)
    HeadReference("deepseek_v3", tmp_path, target)
    path = tmp_path / "model.safetensors"
    weights: dict[str, torch.Tensor | None] = {**load_file(path)}
    weights |= {f"model.layers.3.{name}": each for name, each in damage.items()}
    kept = {name: each for name, each in weights.items() if each is not None}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        start(tmp_path, speculation="mtp")


@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        ({}, {"fc.weight": torch.zeros(48, 96)}, "^`draft_model`: `draft_model` is a head of another model: it reads"),
        ({}, {"d2t": torch.full((99,), 150)}, "it guesses token 248, and the model has 199 tokens"),
        ({}, {"d2t": torch.arange(7)}, r"has 99 tokens and d2t of shape \[7\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, r"it reads the layers \[1, 2, 9\], and the model has 5"),
        ({"model_type": "deepseek_v3"}, {}, "has a layer of deepseek_v3; this engine runs those of llama"),
        ({"hidden_size": 64}, {}, "it has no embeddings of its own, and 64 numbers for each of the model's"),
        ({}, {"embed_tokens.weight": torch.zeros(60, 48)}, "it has embeddings of 60 tokens, and the model has 199"),
        ({}, {"fc.weight": torch.tensor(1.0)}, r"has fc.weight of shape \[\], not a matrix"),
        ({}, {"lm_head.weight": torch.tensor(1.0)}, r"has lm_head.weight of shape \[\], not a matrix"),
        (
            FP8,
            {"fc.weight": torch.zeros(48, 96, dtype=torch.float8_e4m3fn), "fc.weight_scale": torch.ones(48, 1)},
            "it reads hidden states of 32 numbers, and the model has 48",
        ),
    ],
)
def test_eagle_heads_of_other_models_are_refused(
    models: Models, tmp_path: Path, changes: dict[str, Any], damage: dict[str, torch.Tensor], message: str
) -> None:
    target = models("eagle of llama").ref
    EagleReference.save(tmp_path, target.model, of_speculators=False)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | changes))
    add_weights(tmp_path, damage)
    with pytest.raises(StartError, match=message):
        start(target.directory, speculation="draft", draft_model=str(tmp_path))


def start(directory: Path, **settings: Any) -> None:
    values = {"device": "cpu", "max_model_len": 96, "num_kv_blocks": 64, "attention_backend": "torch"}
    config = EngineConfig(model=str(directory), **values, **settings)
    GenerateRunner(config, open_placement(config))


def test_a_head_that_cannot_be_computed_ends_the_start(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no kernel")

    model = models("glm4_moe")
    monkeypatch.setattr(Head, "_guess", fail)
    with pytest.raises(ModelError, match="the model's head cannot be computed: RuntimeError: no kernel"):
        model.ref.make_core(**model.settings, warmup=True)
