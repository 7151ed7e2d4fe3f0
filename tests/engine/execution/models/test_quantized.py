"""Checks that quantized checkpoints whose format is not declared, or not known, are rejected for every task."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.classifiers import save_classifier
from tests.engine.dual_models import save_dual_model
from tests.engine.encoders import save_encoder
from tests.engine.image_models import save_image_model
from tests.engine.speech_models import save_speech_model
from tests.engine.tiny_models import save_tiny_model

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models import kinds
from conveyor_engine.execution.models.kinds import CAUSAL_LM, ModelKind
from conveyor_engine.execution.models.loader import load_config, load_model

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]  # from a layer's name and weight
WEIGHTS = "model.safetensors"


def load(directory: Path, kind: ModelKind = CAUSAL_LM) -> None:
    load_model(str(directory), load_config(str(directory), kind), torch.float32, torch.device("cpu"), kind)


def load_weights(directory: Path, kind: ModelKind) -> dict[str, torch.Tensor]:
    config = load_config(str(directory), kind)
    return load_model(str(directory), config, torch.float32, torch.device("cpu"), kind).state_dict()


def refusal(directory: Path, kind: ModelKind = CAUSAL_LM) -> str:
    with pytest.raises(ModelError) as caught:
        load(directory, kind)
    assert caught.value.reason == "UnsupportedModel"
    return str(caught.value)


def quantize(directory: Path, change: Quantize, file: str = WEIGHTS) -> None:
    """Replace the weights of all linear layers and convolutions."""
    stored: Tensors = {}
    for name, tensor in load_file(directory / file).items():
        layer, _, last = name.rpartition(".")
        is_layer = last == "weight" and tensor.dim() >= 2
        stored |= change(layer, tensor) if is_layer else {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / file, {"format": "pt"})


def to_fp8(layer: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax() / 448
    return {f"{layer}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{layer}.weight_scale": scale}


def to_int8(layer: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax() / 127
    return {f"{layer}.weight": (weight / scale).round().to(torch.int8), f"{layer}.weight_scale": scale}


def to_nvfp4(layer: str, weight: torch.Tensor) -> Tensors:
    packed = torch.zeros(*weight.shape[:-1], weight.shape[-1] // 2, dtype=torch.uint8)
    return {f"{layer}.weight": packed, f"{layer}.weight_scale": torch.ones(len(weight)).to(torch.float8_e4m3fn)}


def to_gptq(layer: str, weight: torch.Tensor) -> Tensors:
    return {
        f"{layer}.qweight": torch.zeros(weight.shape[1] // 8, len(weight), dtype=torch.int32),
        f"{layer}.qzeros": torch.zeros(1, 6, dtype=torch.int32),
        f"{layer}.scales": torch.ones(1, len(weight)),
    }


def to_scaled_floats(layer: str, weight: torch.Tensor) -> Tensors:
    """Values of FP8 that are stored in 32 bits: their type shows nothing."""
    scale = weight.abs().amax() / 448
    return {f"{layer}.weight": weight / scale, f"{layer}.weight_scale_inv": scale}


def to_absmax(layer: str, weight: torch.Tensor) -> Tensors:
    return {f"{layer}.weight": weight / 2, f"{layer}.weight.absmax": torch.ones(1)}


FORMATS: dict[str, tuple[Quantize, str]] = {
    "FP8": (to_fp8, "is stored as F8_E4M3"),
    "INT8": (to_int8, "is stored as I8"),
    "NVFP4": (to_nvfp4, "is stored as "),
    "GPTQ": (to_gptq, "is stored as I32"),
    "scaled floats": (to_scaled_floats, "the model's class has no "),
    "NF4's scales": (to_absmax, "the model's class has no "),
}


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_that_nothing_declares_are_refused(tmp_path: Path, name: str) -> None:
    change, sentence = FORMATS[name]
    save_tiny_model("qwen3", tmp_path)
    quantize(tmp_path, change)
    error = refusal(tmp_path)
    assert "is quantized" in error
    assert sentence in error
    assert "`runtime: VLLM`" in error


def test_nvfp4_with_an_order_of_columns_is_refused(tmp_path: Path) -> None:
    """compressed-tensors writes it with `actorder: group` (pull requests 555 and 556)."""
    save_tiny_model("qwen3", tmp_path, hidden_size=64)

    def change(layer: str, weight: torch.Tensor) -> Tensors:
        if "self_attn" not in layer:
            return {f"{layer}.weight": weight}
        rows, columns = weight.shape
        return {
            f"{layer}.weight_packed": torch.zeros(rows, columns // 2, dtype=torch.uint8),
            f"{layer}.weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
            f"{layer}.weight_global_scale": torch.ones(1),
            f"{layer}.weight_g_idx": torch.arange(columns, dtype=torch.int32) % (columns // 16),
        }

    quantize(tmp_path, change)
    declare(tmp_path, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})
    assert "weight_g_idx" in refusal(tmp_path)


TASKS: dict[str, tuple[Callable[[Path], object], ModelKind]] = {
    "generate": (lambda folder: save_tiny_model("llama", folder), CAUSAL_LM),
    "embed": (lambda folder: save_encoder("bert", folder), kinds.TEXT_ENCODER),
    "rerank": (lambda folder: save_classifier("bert", folder, 1), kinds.CROSS_ENCODER),
    "classify": (lambda folder: save_classifier("distilbert", folder), kinds.SEQUENCE_CLASSIFIER),
    "classify tokens": (lambda folder: save_classifier("bert", folder, per_token=True), kinds.TOKEN_CLASSIFIER),
    "imageclassify": (lambda folder: save_image_model("vit", folder), kinds.IMAGE_CLASSIFIER),
    "CLIP": (lambda folder: save_dual_model("clip", folder), kinds.DUAL_ENCODER),
    "transcribe": (save_speech_model, kinds.SPEECH),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("change", [to_fp8, to_scaled_floats])
def test_they_are_refused_for_every_task(tmp_path: Path, task: str, change: Quantize) -> None:
    save, kind = TASKS[task]
    save(tmp_path)
    load(tmp_path, kind)
    quantize(tmp_path, change)
    error = refusal(tmp_path, kind)
    assert "is quantized" in error
    assert ("VLLM" in error) == (task == "generate"), "vLLM is no way out for the others"


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "4 bits in quantize_config.json"),
        ("quant_config.json", {"w_bit": 4}, "4 bits in quant_config.json"),
        ("config.json", {"quantization_config": {"quant_method": "hqq", "bits": 4}}, "hqq 4 bits in config.json"),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "vptq"}}}, "vptq in config.json"),
        ("config.json", {"compression_config": {"format": "float-quantized"}}, "float-quantized in config.json"),
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}, "4 bits in config.json"),
    ],
)
def test_a_declared_format_is_named(tmp_path: Path, file: str, content: dict[str, Any], named: str) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / file).touch()
    before = (tmp_path / file).read_text() or "{}"
    (tmp_path / file).write_text(json.dumps(json.loads(before) | content))
    assert f"is quantized ({named})" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("card", "base"),
    [
        ("---\nlicense: mit\nbase_model: org/Plain-1.5B\n---\n# It", "org/Plain-1.5B"),
        ('---\nbase_model:\n  - "org/plain"\n  - org/other\n---\n', "org/plain"),
        ("---\nlicense: mit\n---\nbase_model: org/plain\n", None),
        ("base_model: org/plain\n", None),
        ("---\nbase_model: ../../etc/passwd\n---\n", None),
        ("---\nbase_model: [org/plain", None),
    ],
)
def test_the_model_that_it_was_made_from_is_named(tmp_path: Path, card: str, base: str | None) -> None:
    save_tiny_model("llama", tmp_path)
    quantize(tmp_path, to_fp8)
    (tmp_path / "README.md").write_text(card)
    error = refusal(tmp_path)
    assert (f"use {base}, which" if base else "use the original, unquantized model") in error


def add_tensors(directory: Path, **tensors: torch.Tensor) -> None:
    stored = load_file(directory / WEIGHTS)
    save_file(stored | {name.replace("__", "."): each for name, each in tensors.items()}, directory / WEIGHTS)


@pytest.mark.parametrize("name", ["model__layers__0__self_attn__q_proj__bias", "model__layers__1__mlp__up_proj__bias"])
def test_a_weight_that_a_module_of_the_model_leaves_out_is_refused(tmp_path: Path, name: str) -> None:
    save_tiny_model("llama", tmp_path)
    add_tensors(tmp_path, **{name: torch.ones(48)})
    assert f"has {name.replace('__', '.')}, which LlamaForCausalLM leaves out" in refusal(tmp_path)


def test_a_parameter_in_whole_numbers_is_refused_whatever_its_name(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, attention_bias=True)
    stored = load_file(tmp_path / WEIGHTS)
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file(stored | {name: torch.ones(stored[name].shape, dtype=torch.int16)}, tmp_path / WEIGHTS)
    assert f"{name} is stored as I16" in refusal(tmp_path)


def test_tensors_that_no_module_needs_may_stay(tmp_path: Path) -> None:
    """Old checkpoints have positions and masks; others have the head of another task or further layers."""
    save_tiny_model("llama", tmp_path)
    add_tensors(
        tmp_path,
        model__embed_tokens__position_ids=torch.arange(8),
        model__layers__0__self_attn__mask=torch.ones(2, 2, dtype=torch.uint8),
        model__layers__3__mlp__up_proj__weight=torch.ones(4, 4),
        value_head__weight=torch.ones(1, 48),
        logit_scale=torch.ones(()),
    )
    load(tmp_path)


def test_weights_in_several_files_are_read_too(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    quantize(tmp_path, to_fp8)
    stored = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).rename(tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(stored, "model-00001-of-00001.safetensors"), "metadata": {}}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert "is stored as F8_E4M3" in refusal(tmp_path)


def test_a_file_that_config_json_names_is_read_too(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    quantize(tmp_path, to_fp8)
    (tmp_path / WEIGHTS).rename(tmp_path / "own.safetensors")
    (tmp_path / WEIGHTS).write_bytes(whole)
    change_config(tmp_path, transformers_weights="own.safetensors")
    assert "is stored as F8_E4M3" in refusal(tmp_path)


def test_weights_outside_of_the_directory_are_refused(tmp_path: Path) -> None:
    """Another volume of the pod may have them."""
    (tmp_path / "model").mkdir()
    save_tiny_model("llama", tmp_path / "model")
    (tmp_path / "model" / WEIGHTS).rename(tmp_path / "other.safetensors")
    index = tmp_path / "model" / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    assert "names '../other.safetensors', which is not a file of this directory" in refusal(tmp_path / "model")
    index.unlink()
    change_config(tmp_path / "model", transformers_weights="../other.safetensors")
    assert "config.json in" in refusal(tmp_path / "model")


DECLARED: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "FP8": (to_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "INT8": (to_int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}


def declare(directory: Path, settings: Mapping[str, Any]) -> None:
    change_config(directory, quantization_config=settings)
