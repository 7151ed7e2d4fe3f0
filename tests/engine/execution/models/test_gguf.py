"""Compares models in GGUF files with transformers: the tokens of its own dequantised load, and the restored weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from tests.engine.gguf_files import OF_TRANSFORMERS, split, write_model, write_random
from tests.engine.references import MAX_TOKENS, Reference, add, run
from tests.engine.tiny_models import greedy, save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.quantized.gguf_weights import dequantize
from conveyor_engine.gguf.header import FLOATS, KINDS, TensorPlace, read_header
from conveyor_engine.gguf.unpack import unpack

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "eos_token_id": None}
LARGER: dict[str, Any] = SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
# Numbers that transformers' own load takes from its class, and not from the file, have the default of the class.
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": None},
    "gemma4_text": {  # as E2B and E4B
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 199,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "head_dim": 16,
        "layer_types": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    },
    "granite": {"head_dim": 16, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "llama": {"head_dim": 16},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True, "moe_intermediate_size": 768},
}


SLOW = [pytest.mark.slow]
LACKING = ("gemma4_text", "gpt_oss", "granite")  # which transformers' own load does not read


def save(kind: str, folder: Path, stored: str, **changes: Any) -> tuple[Path, PreTrainedModel]:
    """Write a model and its GGUF file. Return the file's path, and the model with the numbers of the file."""
    sizes = MODELS[kind] | (LARGER if stored.endswith("_K") else SIZES)
    (folder / "plain").mkdir()
    (folder / "served").mkdir()
    model = save_tiny_model(kind, folder / "plain", **(sizes | changes))
    path = folder / "served" / f"tiny-{stored}.gguf"
    weights = write_model(model, path, stored)
    model.load_state_dict(weights, strict=False)
    return path, model.eval()


def answer(folder: Path, reference: PreTrainedModel) -> list[tuple[list[int], list[int]]]:
    """Return the engine's and the reference's answers."""
    runs = Reference.__new__(Reference)
    runs.directory, runs.model = folder, reference
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(6, 199, (n,), generator=generator).tolist() for n in (3, 17, 50, 33)]
    core = runs.make_core()  # other backends round the inputs of products to 8 bits
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt, ignore_eos=True)
    outputs = run(core)
    found = [[token for output in outputs[str(n)] for token in output.new_token_ids] for n in range(len(prompts))]
    return list(zip(found, [greedy(reference, prompt, MAX_TOKENS) for prompt in prompts], strict=True))


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[] if each == "llama" else SLOW) for each in MODELS if each not in LACKING]
)
def test_a_model_in_a_gguf_file_generates_the_tokens_of_transformers_own_load(tmp_path: Path, kind: str) -> None:
    path, model = save(kind, tmp_path, "Q8_0")
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    expected = model.state_dict()
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)
    for found, wanted in answer(unpack(path), model):
        assert found == wanted
        assert len(set(wanted)) > 3 or model.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("gemma4_text", "Q8_0"),
        ("gpt_oss", "MXFP4"),
        ("granite", "Q8_0"),
        *(pytest.param("llama", each, marks=SLOW) for each in ("F16", "BF16", "Q4_0", "Q4_K", "Q5_K", "Q6_K")),
    ],
)
def test_its_tokens_are_those_of_the_numbers_that_gguf_s_package_restores(
    tmp_path: Path, kind: str, stored: str
) -> None:
    path, model = save(kind, tmp_path, stored)
    for found, wanted in answer(unpack(path), model):
        assert found == wanted


def test_a_gemma_4_with_experts_and_without_values(tmp_path: Path) -> None:
    """As 26B-A4B: layers without a window have no values of their own, and fewer keys."""
    own = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    path, model = save("gemma4_text", tmp_path, "Q8_0", **own, **experts, **keys)
    for found, wanted in answer(unpack(path), model):
        assert found == wanted


@pytest.mark.parametrize("name", [kind.name for kind in KINDS.values() if kind.name not in FLOATS])
def test_a_block_has_the_numbers_that_gguf_s_package_restores(tmp_path: Path, name: str) -> None:
    kind = next(each for each in KINDS.values() if each.name == name)
    blocks = np.random.default_rng(0).integers(0, 256, (3, 5, kind.num_bytes), dtype=np.uint8)
    (tmp_path / "blocks").write_bytes(blocks.tobytes())
    place = TensorPlace(tmp_path / "blocks", kind, (3, 5 * kind.numbers), 0, blocks.size)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks.reshape(3, -1), GGMLQuantizationType[name])
    torch.testing.assert_close(dequantize(place), torch.from_numpy(expected), rtol=1e-6, atol=0, equal_nan=True)


ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_positions_are_those_of_the_original(tmp_path: Path, kind: str) -> None:
    """transformers' own load ignores the factors of Llama 3."""
    rope = {"rope_type": kind, "rope_theta": 500_000.0} | ROPES[kind]
    path, model = save("llama", tmp_path, "F32", rope_parameters=rope, head_dim=64)
    found = AutoConfig.from_pretrained(unpack(path))
    assert found.rope_parameters == pytest.approx(rope)
    loaded = load_model(str(unpack(path)), load_config(str(unpack(path))), torch.float32, torch.device("cpu"))
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_several_files_are_one_model(tmp_path: Path) -> None:
    path, model = save("qwen2", tmp_path, "Q8_0")
    split(path)
    path.unlink()
    (first, second) = sorted(path.parent.iterdir())
    assert (first.name, second.name) == ("tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf")
    for where in (path.parent, first):
        directory = unpack(where)
        loaded = load_model(str(directory), load_config(str(directory)), torch.float32, torch.device("cpu"))
        assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in loaded.state_dict().items())
    second.unlink()
    with pytest.raises(ModelError, match="is one of 2 files, and 1 are there"):
        unpack(first)


@pytest.mark.parametrize("architecture", OF_TRANSFORMERS)
def test_architectures_that_transformers_reads_itself_have_its_weights(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_random(path, architecture)
    directory = unpack(path)
    config = load_config(str(directory))
    loaded = load_model(str(directory), config, torch.float32, torch.device("cpu"))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)


def test_a_tensor_that_the_class_lacks_is_refused(tmp_path: Path) -> None:
    """It would be left out, and every answer would be wrong."""
    _, model = save("llama", tmp_path, "F32")
    path = tmp_path / "served" / "more.gguf"
    write_model(model, path, extra={"blk.0.attn_sub_norm.weight": np.ones(64, dtype=np.float32)})
    directory = unpack(path)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no model.layers.0.attn_sub_norm.weight"):
        load_model(str(directory), load_config(str(directory)), torch.float32, torch.device("cpu"))


def test_infinite_scales_are_damage(tmp_path: Path) -> None:
    path, _ = save("llama", tmp_path, "Q8_0")
    content, place = bytearray(path.read_bytes()), read_header([path]).tensors["blk.0.ffn_up.weight"]
    content[place.start : place.start + 2] = np.array([np.inf], dtype=np.float16).tobytes()
    path.write_bytes(content)
    directory = unpack(path)
    with pytest.raises(ModelError, match=r"is damaged: blk\.0\.ffn_up\.weight: .*infinite or NaN"):
        load_model(str(directory), load_config(str(directory)), torch.float32, torch.device("cpu"))
