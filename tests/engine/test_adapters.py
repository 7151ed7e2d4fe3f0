"""Greedy tokens of rows with several LoRA adapters in one batch equal those of PEFT, one request at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.lora import answer, load, save_adapter
from tests.engine.references import Reference, add, run, tokens_of

from conveyor_engine.errors import ModelError
from conveyor_engine.execution import native
from conveyor_engine.execution.models import state_mixers
from conveyor_engine.execution.models.adapters import Adapters
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import FinishReason

GetReference = Callable[[str], Reference]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
OTHERS = [("llama", "torch"), ("gemma2", "auto"), ("gpt_neox", "auto")]
BACKENDS = [("qwen3", "auto"), *(pytest.param(*both, marks=pytest.mark.slow) for both in OTHERS)]


class Adapted:
    """A tiny model with three adapters, of different ranks, and PEFT's answers for each number of an adapter."""

    def __init__(self, reference: Reference, folder: Path) -> None:
        self.reference, self.folder = reference, folder
        self.answers = [reference.answers]
        for number, changes in enumerate(({"r": 2}, {"r": 5}, {"r": 3, "use_rslora": True}), start=1):
            model = save_adapter(reference.directory, folder / str(number), number, **changes)
            self.answers.append(answer(model, reference.prompts))
        self.sources = tuple((f"adapter-{number}", str(folder / str(number))) for number in (1, 2, 3))

    def make_core(self, **changes: Any) -> EngineCore:
        return self.reference.make_core(adapters=self.sources, **changes)

    def expect(self, core: EngineCore, numbers: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """Send each prompt with each of these adapters at once, and compare."""
        cases = [(prompt, number) for prompt in range(len(self.reference.prompts)) for number in numbers]
        for prompt, number in cases:
            add(core, f"{prompt} {number}", self.reference.prompts[prompt], number)
        outputs = run(core)
        tokens = {case: tokens_of(outputs[f"{case[0]} {case[1]}"]) for case in cases}
        assert tokens == {(prompt, number): self.answers[number][prompt] for prompt, number in cases}


@pytest.fixture(scope="module")
def adapted(reference: GetReference, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    made: dict[str, Adapted] = {}

    def get(kind: str) -> Adapted:
        if kind not in made:
            made[kind] = Adapted(reference(kind), tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


def test_the_adapters_change_the_answers(adapted: Callable[[str], Adapted]) -> None:
    for kind in ("qwen3", "llama"):
        of_prompts = zip(*adapted(kind).answers, strict=True)
        assert all(len({tuple(answer) for answer in of_prompt}) == 4 for of_prompt in of_prompts)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rows_over_rounded_weights_get_what_they_would_get_alone(tmp_path: Path, quantization: str) -> None:
    adapted = Adapted(Reference("qwen3", tmp_path / "model", hidden_size=64), tmp_path)
    settings = {"quantization": quantization, "attention_backend": "native", "max_num_batched_tokens": 512}
    for number in range(4):
        alone = adapted.reference.make_core(adapters=adapted.sources[:number][-1:], max_num_seqs=1, **settings)
        for prompt, token_ids in enumerate(adapted.reference.prompts):
            add(alone, f"{prompt}", token_ids, min(number, 1))
        outputs = run(alone)
        adapted.answers[number] = [tokens_of(outputs[f"{prompt}"]) for prompt in range(len(outputs))]
    assert all(len({*map(tuple, of_prompt)}) == 4 for of_prompt in zip(*adapted.answers, strict=True))
    adapted.expect(adapted.make_core(max_num_seqs=8, **settings))


@pytest.mark.parametrize("mode", ["continuous", "static", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "backend"), BACKENDS)
def test_each_row_uses_its_own_adapter(adapted: Callable[[str], Adapted], kind: str, backend: str, mode: str) -> None:
    adapted(kind).expect(adapted(kind).make_core(attention_backend=backend, batching_mode=mode, max_num_seqs=8))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_layers_with_states_compute_each_part_of_a_step_with_its_adapters(
    adapted: Callable[[str], Adapted], backend: str
) -> None:
    core = adapted("qwen3_5_text").make_core(attention_backend=backend, max_num_seqs=8, max_num_batched_tokens=16)
    adapted("qwen3_5_text").expect(core, (0, 2))


def test_their_layers_that_one_product_computes_have_the_adapter_in_the_right_slice(
    adapted: Callable[[str], Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU joins them. The kernels for CPUs can compute so too."""
    group = state_mixers._group
    monkeypatch.setattr(state_mixers, "_group", lambda linears, joins: group(linears, joins=True))
    core = adapted("qwen3_5_text").make_core(attention_backend="auto", max_num_seqs=8, max_num_batched_tokens=16)
    assert isinstance(core.executor, GenerateRunner)
    mixers = [part for part in core.executor.model.modules() if isinstance(part, state_mixers.GatedDeltaNet)]
    assert [len(sizes) for mixer in mixers for sizes in mixer.sizes_of_inputs.values()] == [4, 4]
    adapted("qwen3_5_text").expect(core, (0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_preempted_rows_and_steps_that_run_ahead_do_too(
    adapted: Callable[[str], Adapted], backend: str, overlap: bool
) -> None:
    core = adapted("qwen3").make_core(attention_backend=backend, num_kv_blocks=8, overlap=overlap)
    adapted("qwen3").expect(core)
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_one_row_with_an_adapter_does_too(adapted: Callable[[str], Adapted], backend: str) -> None:
    """Steps of one adapter compute only its columns, and the last layer of a prompt only its last token."""
    core = adapted("llama").make_core(attention_backend=backend, max_num_seqs=1, max_num_batched_tokens=64)
    adapted("llama").expect(core, (2, 0))


def test_the_steps_of_graphs_do_too(adapted: Callable[[str], Adapted]) -> None:
    """A graph computes all adapters, because it does not know which the rows of a later step use."""
    core = adapted("llama").make_core(capture=lambda work: work, max_num_seqs=8)
    adapted("llama").expect(core)


@pytest.mark.parametrize("capture", [None, lambda work: work], ids=["eager", "captured"])
def test_an_adapter_whose_numbers_overflow_ends_its_own_requests_only(
    adapted: Callable[[str], Adapted], tmp_path: Path, capture: Callable[..., Any] | None
) -> None:
    ref = adapted("llama").reference
    save_adapter(ref.directory, tmp_path, 9)
    change_tensors(tmp_path, lambda all_: [tensor.fill_(3e38) for name, tensor in all_.items() if "lora_A" in name])
    sources = (*adapted("llama").sources[:1], ("bad", str(tmp_path)))
    core = ref.make_core(adapters=sources, capture=capture, max_num_seqs=8)
    for adapter in (0, 1, 2):
        add(core, str(adapter), ref.prompts[1], adapter)
    outputs = run(core)
    assert outputs["2"][-1].finish_reason == FinishReason.ERROR
    assert [tokens_of(outputs[str(adapter)]) for adapter in (0, 1)] == [adapted("llama").answers[n][1] for n in (0, 1)]
    with pytest.raises(ModelError, match=r"with the adapter 'bad', computed in float32, the model's logits are not"):
        ref.make_core(adapters=sources, warmup=True)


def test_adapters_share_no_keys_and_values(adapted: Callable[[str], Adapted]) -> None:
    core = adapted("llama").make_core()
    hits = []
    for number in (0, 1, 2, 1, 0):
        adapted("llama").expect(core, (number,))
        hits.append(core.stats().prefix_cache_hit_tokens)
    assert hits[0] == hits[1] - hits[0] == hits[2] - hits[1], "only the prefix that two prompts share"
    assert hits[3] - hits[2] > hits[0] < hits[4] - hits[3], "what the same adapter computed before is found"


def test_a_step_without_adapters_computes_none(
    adapted: Callable[[str], Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns: list[native.Columns | None] = []
    real = Adapters.columns_of
    monkeypatch.setattr(Adapters, "columns_of", lambda *arguments: columns.append(real(*arguments)) or columns[-1])
    core = adapted("llama").make_core(attention_backend="auto")
    adapted("llama").expect(core, (0,))
    assert columns
    assert not any(columns)
    adapted("llama").expect(core, (1,))
    assert any(columns)


@pytest.mark.parametrize(
    "target",
    [
        *("k_proj", "up_proj", "layer 1"),
        *(pytest.param(n, marks=pytest.mark.nightly) for n in ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")),
    ],
)
def test_each_layer_alone_changes_what_it_must(reference: GetReference, tmp_path: Path, target: str) -> None:
    """A merged layer has the adapter in the right slice."""
    ref = reference("qwen3")
    changes = {"target_modules": [target]}
    if target == "layer 1":
        changes = {"target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]}
    expected = answer(save_adapter(ref.directory, tmp_path, 7, r=8, lora_alpha=64, **changes), ref.prompts)
    assert expected != ref.answers
    for backend in ("torch", "auto"):
        core = ref.make_core(adapters=(("a", str(tmp_path)),), attention_backend=backend)
        for number, prompt in enumerate(ref.prompts):
            add(core, str(number), prompt, 1)
        outputs = run(core)
        assert [tokens_of(outputs[str(number)]) for number in range(len(ref.prompts))] == expected


def test_layers_may_have_their_own_rank_and_scale(reference: GetReference, tmp_path: Path) -> None:
    ref = reference("llama")
    patterns = {
        "rank_pattern": {"q_proj": 6, "model.layers.1.mlp.up_proj": 1},
        "alpha_pattern": {"mlp.down_proj": 40, "^model.layers.0.self_attn.v_proj": 3},
    }
    expected = answer(save_adapter(ref.directory, tmp_path, 3, **patterns), ref.prompts)
    core = ref.make_core(adapters=(("a", str(tmp_path)),), attention_backend="auto")
    add(core, "a", ref.prompts[2], 1)
    assert tokens_of(run(core)["a"]) == expected[2]


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def first(tensors: dict[str, torch.Tensor], side: str = "A") -> str:
    return next(name for name in sorted(tensors) if f"lora_{side}" in name)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), "has no adapter_config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "adapter_config.json cannot be read"),
    "no rank": (lambda folder: (folder / CONFIG).write_text("{}"), "missing required field `r`"),
    "cut off": (lambda folder: (folder / WEIGHTS).write_bytes(b"1234567890"), "cannot be read"),
    "DoRA": (lambda folder: rewrite(folder, use_dora=True), "'use_dora', which this engine does not compute"),
    "a bias": (lambda folder: rewrite(folder, bias="lora_only"), "'bias', which this engine does not compute"),
    "a whole layer": (lambda folder: rewrite(folder, modules_to_save=["lm_head"]), "'modules_to_save'"),
    "a changed base": (lambda folder: rewrite(folder, init_lora_weights="pissa"), "'init_lora_weights'"),
    "repeated layers": (lambda folder: rewrite(folder, layer_replication=[[0, 2], [1, 3]]), "'layer_replication'"),
    "no pattern": (lambda folder: rewrite(folder, alpha_pattern={"(": 1}), "which is not the end of a name"),
    "another method": (lambda folder: rewrite(folder, peft_type="IA3"), "'peft_type'"),
    "an embedding": (
        lambda folder: change_tensors(
            folder, lambda all_: all_.update({"model.embed.lora_embedding_A": torch.ones(1)})
        ),
        "no weight of plain LoRA",
    ),
    "one side": (
        lambda folder: change_tensors(folder, lambda all_: all_.pop(first(all_))),
        "has only one of its matrices",
    ),
    "nothing": (lambda folder: change_tensors(folder, lambda all_: all_.clear()), "has no tensors"),
    "not a number": (
        lambda folder: change_tensors(folder, lambda all_: all_[first(all_)].fill_(float("nan"))),
        "not finite",
    ),
    "FP8": (
        lambda folder: change_tensors(
            folder, lambda all_: all_.update({first(all_): all_[first(all_)].to(torch.float8_e4m3fn)})
        ),
        "as F8_E4M3: the adapter is quantized",
    ),
    "another rank": (
        lambda folder: change_tensors(folder, lambda all_: all_.update({first(all_): torch.ones(3, 48)})),
        "have the shapes",
    ),
    "another model": (
        lambda folder: change_tensors(folder, lambda all_: all_.update({first(all_): torch.ones(4, 47)})),
        "it belongs to another base model",
    ),
    "an unknown layer": (
        lambda folder: change_tensors(
            folder,
            lambda all_: all_.update(
                {f"base_model.model.model.layers.9.x.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
            ),
        ),
        "it changes model.layers.9.x, which is not a linear layer",
    ),
    "the head": (
        lambda folder: change_tensors(
            folder,
            lambda all_: all_.update(
                {
                    "base_model.model.lm_head.lora_A.weight": torch.ones(4, 48),
                    "base_model.model.lm_head.lora_B.weight": torch.ones(199, 4),
                }
            ),
        ),
        "it changes lm_head",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_adapter_that_cannot_be_computed_is_refused_by_name(
    reference: GetReference, tmp_path: Path, name: str
) -> None:
    spoil, message = BROKEN[name]
    save_adapter(reference("llama").directory, tmp_path, 1)
    spoil(tmp_path)
    with pytest.raises(ModelError, match="the adapter 'sql' cannot be used: ") as refused:
        reference("llama").make_core(adapters=(("sql", str(tmp_path)),))
    assert message in str(refused.value)


def test_random_adapters_differ_from_the_model(reference: GetReference, tmp_path: Path) -> None:
    """The oracle itself: PEFT's model is not the plain model."""
    ref = reference("llama")
    plain, changed = load(ref.directory), save_adapter(ref.directory, tmp_path, 1)
    tokens = torch.tensor([ref.prompts[0]])
    with torch.inference_mode():
        assert (plain(tokens).logits - changed(tokens).logits).abs().max() > 0.1
