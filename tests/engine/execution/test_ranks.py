"""Checks that a model divided among ranks answers like a whole one. Two processes on the CPU add up with gloo."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tests.engine.encoders import save_encoder
from tests.engine.execution.models.test_expert_grids import keep, to_int4
from tests.engine.execution.models.test_quantized import declare, quantize
from tests.engine.references import Reference, add, answers, run, tokens_of
from tests.engine.test_speculation import speculate
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_model

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.execution import build
from conveyor_engine.execution.limits import check_settings_with_states
from conveyor_engine.execution.models.divide import divide_model
from conveyor_engine.execution.ranks import RankedRunner, Ranks
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.step import RowMask

KINDS_AT_NIGHT = ("llama", "qwen3", "mistral", "gemma2", "gpt_neox", "phi", "starcoder2", "olmo2", "glm4", "minicpm3")
GetReference = Callable[[str], Reference]


@contextmanager
def divided(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankedRunner, list[str]]]:
    """Yield the runner of rank 0, and the log lines of its start."""
    started: list[Ranks] = []
    lines: list[str] = []

    def start(*arguments: Any) -> Ranks:
        started.append(Ranks(*arguments))
        return started[0]

    monkeypatch.setattr(build, "Ranks", start)
    try:
        yield build.build_runner(config, lines.append, lambda *why: lines.append(f"failed: {why}")), lines
    finally:
        for ranks in started:
            ranks.stop()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param("qwen2", "auto", marks=pytest.mark.slow),
        pytest.param("llama", "torch", marks=pytest.mark.nightly),
        *(pytest.param(kind, "auto", marks=pytest.mark.nightly) for kind in KINDS_AT_NIGHT),
    ],
)
def test_two_ranks_give_the_tokens_of_generate(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch, kind: str, backend: str
) -> None:
    ref = reference(kind)
    config = ref.make_config(tensor_parallel_size=2, attention_backend=backend)
    with divided(config, monkeypatch) as (runner, lines):
        core = EngineCore(config, runner)
        assert answers(core, ref.prompts) == ref.answers
        for number in range(2):
            add(core, f"sampled {number}", ref.prompts[0], temperature=1.0, seed=number, logprobs=2)
        found = run(core)
        assert speculate(core, ref.prompts, ref.answers) == ref.answers, "with drafts, as n-grams make them"
        masked = _sample_masked(core, ref.prompts[1], allowed=[5, 77])
    assert sum("event=model_divided ranks=2" in line for line in lines) == 1
    assert not [line for line in lines if line.startswith("failed")]
    whole = ref.make_core(attention_backend="torch")
    for number in range(2):
        add(whole, f"sampled {number}", ref.prompts[0], temperature=1.0, seed=number, logprobs=2)
    expected = run(whole)
    for name, outputs in expected.items():
        assert tokens_of(found[name]) == tokens_of(outputs)
        ours, theirs = ([each.logprobs[0].logprob for each in both if each.logprobs] for both in (found[name], outputs))
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert masked in (5, 77), "the masks reach the ranks' samplers"


@pytest.mark.nightly
def test_two_ranks_keep_the_numbers_of_a_quantized_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = Reference("llama", tmp_path, hidden_size=128, intermediate_size=128, num_attention_heads=4)
    quantize(tmp_path, lambda layer, weight: (to_int4 if "layers" in layer else keep)(layer, weight))
    declare(tmp_path, {"quant_method": "compressed-tensors", "format": "pack-quantized"})
    config = ref.make_config(tensor_parallel_size=2, attention_backend="auto")
    with divided(config, monkeypatch) as (runner, lines):
        found = answers(EngineCore(config, runner), ref.prompts)
    (rounded,) = (line for line in lines if "event=weights_rounded" in line)
    assert f"linears={4 * ref.model.config.num_hidden_layers} " in rounded
    assert found == answers(ref.make_core(attention_backend="auto"), ref.prompts)


def _sample_masked(core: EngineCore, prompt: list[int], allowed: list[int]) -> int:
    """Return the first token after the prompt if only these tokens are allowed."""
    bits = bytearray(-(-VOCAB_SIZE // 8))
    for token in allowed:
        bits[token // 8] |= 1 << token % 8
    add(core, "masked", prompt[:8], max_tokens=1)
    plan = core.scheduler.schedule(0.0)
    assert plan is not None
    result = core.executor.begin(plan)([RowMask(plan.rows[0], bytes(bits))])()
    return result.token_ids[0][0]


def test_each_rank_has_its_share_of_the_weights(tmp_path: Path) -> None:
    shares = [save_tiny_model("qwen2", tmp_path) for _ in range(2)]
    whole = save_tiny_model("qwen2", tmp_path).model.layers[0]
    for rank, model in enumerate(shares):
        assert len(divide_model(model, rank, 2)) == 2 * model.config.num_hidden_layers
    parts = [model.model.layers[0] for model in shares]
    for name, dim in (("self_attn.q_proj", 0), ("mlp.gate_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        joined = torch.cat([part.get_submodule(name).weight for part in parts], dim)
        assert torch.equal(joined, whole.get_submodule(name).weight)
    joined = torch.cat([part.self_attn.k_proj.bias for part in parts])
    assert torch.equal(joined, whole.self_attn.k_proj.bias)


def test_a_share_computes_after_it_was_moved(tmp_path: Path) -> None:
    """torch moves weights to a GPU as it changes their type."""
    model = save_tiny_model("qwen2", tmp_path).requires_grad_(False)
    divide_model(model, 0, 2)
    linear = model.to(torch.bfloat16).model.layers[0].mlp.gate_proj
    with torch.inference_mode():
        assert linear(torch.ones(2, linear.in_features, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "world_size", "error", "message"),
    [
        ("llama", 4, ConfigError, "does not divide the model's heads, 4 of queries and 2 of keys and values"),
        ("phi3", 2, ModelError, "cannot be divided among 2 ranks: transformers has no plan for it"),
        ("gpt2", 2, ModelError, "cannot be divided among 2 ranks: transformers has no plan for it"),
        ("mixtral", 2, ModelError, "has experts, and only plain products can be divided"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, kind: str, world_size: int, error: type[Exception], message: str
) -> None:
    model = save_tiny_model(kind, tmp_path)
    with pytest.raises(error, match=message):
        divide_model(model, 0, world_size)


@pytest.mark.parametrize(
    ("settings", "world_size", "error", "message"),
    [
        ({}, 2, ModelError, "Mamba keeps states for each request, which are not divided among ranks"),
        (
            {"batching_mode": "static", "padding": "real"},
            1,
            ConfigError,
            "would change the states that Mamba keeps for each request",
        ),
    ],
)
def test_settings_that_states_do_not_allow_are_refused(
    settings: dict[str, Any], world_size: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_settings_with_states(EngineConfig(model="/m", **settings), "Mamba", world_size)
    check_settings_with_states(EngineConfig(model="/m"), "Mamba", 1)


def test_a_model_of_another_task_uses_one_device_and_says_so(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    lines: list[str] = []
    build.build_runner(EngineConfig(model=str(tmp_path), device="cpu", tensor_parallel_size=3), lines.append)
    assert "event=devices_unused task=embed devices=2" in lines
