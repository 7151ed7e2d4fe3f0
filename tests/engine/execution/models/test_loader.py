"""Checks that models that would load but give wrong answers are rejected, each with a sentence that explains it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.tiny_models import save_tiny_model

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.probe import probe_layers

CPU = torch.device("cpu")


def load(directory: Path) -> list[Any]:
    """Load a model as the engine does. Returns the shapes of its layers."""
    config = load_config(str(directory))
    model = load_model(str(directory), config, torch.float32, CPU)
    return probe_layers(model, CPU)[0]


def refusal(directory: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(directory)
    return caught.value


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("falcon", {}, "FalconForCausalLM does not use transformers' attention interface"),
        ("bloom", {}, "BloomForCausalLM does not use transformers' attention interface"),
        ("gptj", {}, "GPTJForCausalLM does not use transformers' attention interface"),
        ("bert", {}, "not plainly causal"),
        ("stablelm", {"hidden_size": 64}, "does not hand keyword arguments through"),
        ("llama4_text", {"num_local_experts": 2, "head_dim": 16}, "layers of type chunked_attention"),
    ],
)
def test_an_unsupported_kind_is_refused(tmp_path: Path, kind: str, changes: dict[str, Any], sentence: str) -> None:
    save_tiny_model(kind, tmp_path, **changes)
    error = refusal(tmp_path)
    assert error.reason == "UnsupportedModel"
    assert sentence in str(error)


def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    error = refusal(tmp_path)
    assert error.reason == "UnsupportedModel"
    assert "safetensors" in str(error)
    assert "pytorch_model.bin" in str(error)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quantization_config": {"quant_method": "vptq"}}, "quantized"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "clip"}, "no causal language model"),
        ({"model_type": "nobody-knows-it"}, "nobody-knows-it"),
        ({"hidden_size": 96}, "cannot be loaded"),
        ({"num_hidden_layers": 4}, "not those of its config.json"),
        ({"num_hidden_layers": 0}, "has 0 layers"),
        ({"num_hidden_layers": None}, "config.json cannot be used: StrictDataclassFieldValidationError"),
        ({"hidden_size": "abc"}, "'hidden_size' expected int"),
        ({"layer_types": ["nope"] * 3}, "config.json cannot be used: StrictDataclassClassValidationError"),
        ({"dtype": "nope"}, "config.json cannot be used: AttributeError"),
        ({"num_key_value_heads": 0}, "cannot be loaded: ZeroDivisionError"),
        ({"hidden_act": "nope"}, "cannot be loaded: KeyError: 'nope'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    save_tiny_model("llama", tmp_path)
    edit_config(tmp_path, **changes)
    error = refusal(tmp_path)
    assert error.reason == "UnsupportedModel"
    assert sentence in str(error)


def test_code_of_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    edit_config(tmp_path, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    (tmp_path / "own.py").write_text("raise SystemExit('was run')")
    assert refusal(tmp_path).reason == "UnsupportedModel"


def test_a_directory_without_a_model_is_not_found(tmp_path: Path) -> None:
    error = refusal(tmp_path / "nothing")
    assert error.reason == "ModelNotFound"
    assert "config.json" in str(error)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"not safetensors")])
def test_damaged_weights_are_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save_tiny_model("llama", tmp_path)
    damage(tmp_path / "model.safetensors")
    assert "cannot be loaded" in str(refusal(tmp_path))


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be used" in str(refusal(tmp_path))


def test_the_probe_reports_every_layers_geometry(tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path)
    shapes = load(tmp_path)
    assert [(s.num_heads, s.num_kv_heads, s.head_dim, s.value_dim) for s in shapes] == [(4, 2, 16, 16)] * 3


def test_the_probe_sees_layers_of_different_geometry(tmp_path: Path) -> None:
    save_tiny_model(
        "gemma4_text",
        tmp_path,
        head_dim=16,
        global_head_dim=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    )
    assert [shape.head_dim for shape in load(tmp_path)] == [16, 16, 32]


@pytest.mark.parametrize("error", [AttributeError("no such thing"), KeyError("x"), IndexError("x")])
def test_a_model_that_breaks_in_its_first_forward_is_refused(tmp_path: Path, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    save_tiny_model("llama", tmp_path)
    model = load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, CPU)
    model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ModelError, match=f"2 tokens through LlamaForCausalLM failed: {type(error).__name__}"):
        probe_layers(model, CPU)


def test_a_model_that_skips_a_layer_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    model = load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, CPU)
    model.model.layers = model.model.layers[:2]
    with pytest.raises(ModelError, match="3 layers, but called paged attention in layers"):
        probe_layers(model, CPU)


def anonymous_bytes() -> int:
    """Return this process's memory that is no copy of a file, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_weights_of_the_same_number_type_are_not_copied_into_memory(tmp_path: Path) -> None:
    """They stay in the mapped file, from which `.to(device)` reads each one straight onto a GPU."""
    size = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 4096}
    save_tiny_model("llama", tmp_path, **size)
    config, before = load_config(str(tmp_path)), anonymous_bytes()
    model = load_model(str(tmp_path), config, torch.float32, CPU)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights > 160 << 20
    assert anonymous_bytes() - before < weights / 4
