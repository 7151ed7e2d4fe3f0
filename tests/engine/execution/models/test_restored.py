"""Checks that declared quantized checkpoints have the restored weights, and that damaged ones are rejected by name."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.execution.models.test_quantized import (
    DECLARED,
    TASKS,
    WEIGHTS,
    Tensors,
    declare,
    load,
    load_weights,
    quantize,
    refusal,
    to_fp8,
)
from tests.engine.references import MAX_TOKENS, Reference, add, run
from tests.engine.tiny_models import greedy, save_tiny_model

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.kinds import CAUSAL_LM


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_checkpoint_has_the_restored_weights_in_every_task(tmp_path: Path, task: str, name: str) -> None:
    """They equal the numbers times their scales, also where the model's class joins stored weights."""
    save, kind = TASKS[task]
    (tmp_path / "plain").mkdir()
    (tmp_path / "quantized").mkdir()
    change, settings = DECLARED[name]
    for folder in ("plain", "quantized"):
        torch.manual_seed(0)
        save(tmp_path / folder)
    (tmp_path / "quantized" / WEIGHTS).write_bytes((tmp_path / "plain" / WEIGHTS).read_bytes())

    def round_off(layer: str, weight: torch.Tensor) -> Tensors:
        stored = change(layer, weight)
        return {f"{layer}.weight": stored[f"{layer}.weight"].float() * stored[f"{layer}.weight_scale"]}

    quantize(tmp_path / "plain", round_off)
    quantize(tmp_path / "quantized", change)
    declare(tmp_path / "quantized", settings)
    plain, restored = (load_weights(tmp_path / folder, kind) for folder in ("plain", "quantized"))
    assert plain.keys() == restored.keys()
    assert [key for key in plain if not torch.equal(plain[key], restored[key])] == []


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_are_restored_before_they_are_joined(tmp_path: Path, kind: str) -> None:
    save_tiny_model(kind, tmp_path)
    plain = load_weights(tmp_path, CAUSAL_LM)
    quantize(tmp_path, to_fp8)
    declare(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})
    restored = load_weights(tmp_path, CAUSAL_LM)
    assert any("experts" in key and plain[key].dim() == 3 for key in plain)
    for key, weight in plain.items():
        torch.testing.assert_close(restored[key], weight, rtol=0.07, atol=float(weight.abs().max()) / 200)


def test_a_quantized_model_generates_the_tokens_of_its_restored_weights(tmp_path: Path) -> None:
    reference = Reference("qwen3", tmp_path)
    quantize(tmp_path, to_fp8)
    declare(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})
    core = reference.make_core(attention_backend="auto")
    for number, prompt in enumerate(reference.prompts):
        add(core, str(number), prompt)
    outputs = run(core)
    reference.model.load_state_dict(load_weights(tmp_path, CAUSAL_LM))
    for number, prompt in enumerate(reference.prompts):
        tokens = [token for output in outputs[str(number)] for token in output.new_token_ids]
        assert tokens == greedy(reference.model, prompt, MAX_TOKENS)
        assert tokens != reference.answers[number], "FP8 has an effect"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "only the layout `gemm` of AWQ is read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "only the layouts gptq and gptq_v2"),
        ({"quant_method": "gptq", "bits": 5}, "only 2, 3, 4, 8 bits of GPTQ are read"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights are not read",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
            "weights for transformed activations are not read",
        ),
        ({"quant_method": "torchao"}, "is quantized (torchao in config.json)"),
    ],
)
def test_what_cannot_be_restored_is_named(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    save_tiny_model("llama", tmp_path)
    declare(tmp_path, settings)
    assert problem in refusal(tmp_path)


def test_a_tensor_that_the_format_does_not_have_is_refused(tmp_path: Path) -> None:
    """Such as the scales of AWQ before its layers, without which the weights would be wrong."""
    save_tiny_model("llama", tmp_path)
    quantize(tmp_path, lambda layer, weight: to_fp8(layer, weight) | {f"{layer}.pre_quant_scale": torch.ones(48)})
    declare(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})
    assert "pre_quant_scale) in a way that this engine does not read" in refusal(tmp_path)


def test_a_damaged_weight_is_named(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    quantize(tmp_path, lambda layer, weight: to_fp8(layer, weight) | {f"{layer}.weight_scale": torch.ones(5, 3)})
    declare(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(ModelError, match=r"is damaged: .*weight: .*5"):
        load(tmp_path)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_no_damage(tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("llama", tmp_path)
    quantize(tmp_path, to_fp8)
    declare(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("conveyor_engine.execution.models.quantized.layouts.spread", fail)
    with pytest.raises(type(error)):
        load(tmp_path)


def test_images_states_experts_and_fp8_come_together(tmp_path: Path) -> None:
    """As in Qwen3.6-35B-A3B-FP8. Norms, convolutions, the head and the encoder of images are not quantized."""
    reference = Reference("qwen3_5_moe", tmp_path)

    def to_blocks(layer: str, weight: torch.Tensor) -> Tensors:
        if weight.dim() != 2 or "visual" in layer or not re.search(r"(proj|gate|qkvz?|ba|[abz])$", layer):
            return {f"{layer}.weight": weight}
        rows, columns = (-(-size // 16) for size in weight.shape)
        scale = torch.full((rows, columns), float(weight.abs().amax()) / 448)
        return {f"{layer}.weight": (weight / scale[0, 0]).to(torch.float8_e4m3fn), f"{layer}.weight_scale_inv": scale}

    quantize(tmp_path, to_blocks)
    declare(tmp_path, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]})
    names = {name for name in load_file(tmp_path / WEIGHTS) if name.endswith("_scale_inv")}
    assert {"experts", "self_attn", "linear_attn"} <= {part for name in names for part in name.split(".")}
    core = reference.make_core()
    for number, prompt in enumerate(reference.prompts):
        add(core, str(number), prompt)
    outputs = run(core)
    restored_text = load_weights(tmp_path, CAUSAL_LM)
    restored = {re.sub("^model", "model.language_model", name): weight for name, weight in restored_text.items()}
    assert not reference.model.load_state_dict(restored, strict=False).unexpected_keys
    for number, prompt in enumerate(reference.prompts):
        tokens = [token for output in outputs[str(number)] for token in output.new_token_ids]
        assert tokens == greedy(reference.model, prompt, MAX_TOKENS)


def test_gpt_oss_runs_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4, in the layout that its class keeps them in after restoring: inputs before outputs."""
    save_tiny_model("gpt_oss", tmp_path, hidden_size=64)
    stored, plain = load_file(tmp_path / WEIGHTS), load_weights(tmp_path, CAUSAL_LM)
    for name in [name for name in stored if name.endswith("experts.gate_up_proj")]:
        num_experts, num_inputs, num_outputs = stored.pop(name).shape
        stored[f"{name}_blocks"] = torch.full((num_experts, num_outputs, num_inputs // 32, 16), 0x42, dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.full((num_experts, num_outputs, num_inputs // 32), 126, dtype=torch.uint8)
    save_file(stored, tmp_path / WEIGHTS, {"format": "pt"})
    declare(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    weight = load_weights(tmp_path, CAUSAL_LM)["model.layers.0.mlp.experts.gate_up_proj"]
    assert weight.shape == plain["model.layers.0.mlp.experts.gate_up_proj"].shape
    assert torch.equal(weight[0, :4, 0], torch.tensor([0.5, 1.0, 0.5, 1.0]))
