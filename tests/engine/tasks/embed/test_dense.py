"""Tests Dense layers behind the pooling, as EmbeddingGemma and LaBSE have them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.embedding_cores import PROMPTS, answers, distance, make_core
from tests.engine.encoders import SIZE, embed, save_encoder, write_dense, write_sentence_files
from torch import nn
from torch.nn import functional

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.embed.execution.files import read_pooling
from conveyor_engine.tasks.embed.facts import EmbeddingFacts

MEAN = "pooling_mode_mean_tokens"


def write_one(directory: Path, **changes: Any) -> nn.Linear:
    """Write sentence-transformers' files with one layer. Returns the layer."""
    torch.manual_seed(1)
    linear = nn.Linear(SIZE, 20)
    write_sentence_files(directory, MEAN, normalizes=True, num_dense=1)
    write_dense(directory / "2_Dense", linear, "activation.Tanh", **changes)
    return linear


def test_vectors_of_embeddinggemma_go_through_both_layers(tmp_path: Path) -> None:
    model = save_encoder("gemma3_text", tmp_path)
    torch.manual_seed(1)
    up, down = nn.Linear(SIZE, 4 * SIZE, bias=False), nn.Linear(4 * SIZE, SIZE, bias=False)
    write_sentence_files(tmp_path, MEAN, normalizes=True, num_dense=2)
    write_dense(tmp_path / "2_Dense", up)
    write_dense(tmp_path / "3_Dense", down)
    with torch.inference_mode():
        expected = [
            functional.normalize(down(up(embed(model, prompt, MEAN, normalizes=False))), dim=0) for prompt in PROMPTS
        ]
    for mode in ("none", "continuous"):
        assert distance(answers(make_core(tmp_path, batching_mode=mode), PROMPTS), expected) < 1e-4
    half = answers(make_core(tmp_path, dtype="bfloat16"), PROMPTS)
    assert min(float(a @ b) for a, b in zip(half, expected, strict=True)) > 0.99


def test_a_layer_sets_the_size_of_vectors(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path, matryoshka_dimensions=[8, 32])
    linear = write_one(tmp_path)
    with torch.inference_mode():
        expected = [
            functional.normalize(linear(embed(model, p, MEAN, normalizes=False)).tanh(), dim=0) for p in PROMPTS
        ]
    core = make_core(tmp_path)
    assert distance(answers(core, PROMPTS), expected) < 1e-4
    facts = EmbeddingFacts.read(core.facts)
    assert (facts.size, facts.matryoshka_dimensions) == (20, (8,))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"activation_function": "os.system"}, "activation 'system'; this engine has Identity"),
        ({"activation_function": "evil.Tanh"}, "activation 'Tanh'"),
        ({"use_residual": True}, "use_residual: 'True'"),
        ({"module_input_name": "token_embeddings"}, "module_input_name: 'token_embeddings'"),
        ({"in_features": 7}, f"vectors of {SIZE} numbers"),
        ({"out_features": 10**9}, f"vectors of {SIZE} numbers"),
        ({"out_features": 21}, "the weights that its config.json describes"),
        ({"bias": False}, "the weights that its config.json describes"),
    ],
)
def test_layers_that_compute_something_else_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    save_encoder("bert", tmp_path)
    write_one(tmp_path, **changes)
    with pytest.raises(ModelError, match=sentence):
        make_core(tmp_path)


def test_weights_that_are_absent_or_more_are_refused(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    write_one(tmp_path)
    path = tmp_path / "2_Dense" / "model.safetensors"
    save_file(load_file(path) | {"residual.weight": torch.zeros(20, SIZE)}, path)
    with pytest.raises(ModelError, match=r"the weights that its config\.json describes"):
        make_core(tmp_path)
    path.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors, which the model needs, cannot be read"):
        make_core(tmp_path)


def test_layers_in_other_folders_are_refused(tmp_path: Path) -> None:
    write_one(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[2]["path"] = "../2_Dense"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="Dense steps outside of 2_Dense and 3_Dense"):
        read_pooling(tmp_path)
